//! `millstream dead show`: everything about one dead letter, or only its payload.

use std::io::Write;

use anyhow::{Context, Result, bail};
use clap::Args;

use super::super::{Global, UsageError, human, output::visible, with_database::with_database};
use crate::{
    database::Database,
    engine::{DeadLetterDetails, dead_payload, find_group, show_dead, show_dead_message},
};

#[derive(Args, Debug)]
pub struct Show {
    /// Its id, as `dead list` shows it
    #[arg(required_unless_present = "group", conflicts_with_all = ["group", "message"])]
    pub id: Option<i64>,
    /// Name the message instead: its group
    #[arg(long, requires = "message")]
    pub group: Option<String>,
    /// Name the message instead: its id in the stream
    #[arg(long, value_name = "ID", requires = "group")]
    pub message: Option<i64>,
    /// Write the payload to standard output, byte for byte, and nothing else
    #[arg(long)]
    pub payload: bool,
}

impl Show {
    pub(super) async fn run(&self, global: &Global) -> Result<()> {
        if self.payload && global.output().is_json() {
            bail!(UsageError(
                "--payload writes the bytes as they are, which is not JSON: leave --output out".to_owned()
            ));
        }
        let (letter, payload) = with_database(global, async |database, _| {
            let letter = self.find(database).await?;
            let payload = if self.payload { dead_payload(database, letter.letter.id).await? } else { None };
            Ok((letter, payload))
        })
        .await?;
        if !self.payload {
            return global.output().one(&letter, text);
        }
        let payload =
            payload.with_context(|| format!("dead letter {} has no payload: it is a tombstone", letter.letter.id))?;
        let mut stdout = std::io::stdout().lock();
        stdout.write_all(&payload)?;
        Ok(stdout.flush()?)
    }

    async fn find(&self, database: &Database) -> Result<DeadLetterDetails> {
        match (self.id, &self.group, self.message) {
            (Some(id), ..) => show_dead(database, id)
                .await?
                .with_context(|| format!("no dead letter {id}; `millstream dead list` shows those there are")),
            (None, Some(name), Some(message)) => {
                let (group, _) = find_group(database, name).await?;
                show_dead_message(database, group, message)
                    .await?
                    .with_context(|| format!("message {message} is not among the dead letters of {name:?}"))
            }
            _ => bail!(UsageError("name a dead letter by its id, or by --group and --message".to_owned())),
        }
    }
}

fn text(details: &DeadLetterDetails) -> String {
    let letter = &details.letter;
    let payload = match (details.payload_bytes, &details.payload_sha256) {
        (Some(bytes), Some(sha256)) => {
            format!("{}, sha256 {sha256}; --payload shows it", human::bytes(bytes.unsigned_abs()))
        }
        _ => "none: a tombstone".to_owned(),
    };
    let headers = details.headers.as_object().map(|headers| headers.keys().cloned().collect::<Vec<_>>().join(", "));
    let lines = [
        ("dead letter", Some(letter.id.to_string())),
        ("group", Some(letter.group.clone())),
        ("stream", Some(letter.stream.clone())),
        ("message", Some(letter.message_id.to_string())),
        ("key", letter.message_key.clone()),
        ("routing key", details.routing_key.clone()),
        ("headers", headers.filter(|names| !names.is_empty())),
        ("content type", details.content_type.clone()),
        ("produced at", Some(details.produced_at.clone())),
        ("died at", Some(letter.died_at.clone())),
        ("deaths", (details.deaths > 1).then(|| details.deaths.to_string())),
        ("redriven at", details.redriven_at.clone()),
        ("replayed at", letter.replayed_at.clone()),
        ("attempts", Some(letter.attempts.to_string())),
        ("handler", details.digest.clone()),
        ("payload", Some(payload)),
        ("class", Some(letter.class.clone())),
    ];
    let mut text = String::new();
    for (name, value) in lines {
        if let Some(value) = value {
            text.push_str(&format!("{name:<14}{}\n", visible(&value)));
        }
    }
    // The error has lines of its own: a backtrace, the end of what the handler wrote.
    text.push_str("error\n");
    letter.error.lines().for_each(|line| text.push_str(&format!("  {}\n", visible(line))));
    text
}
