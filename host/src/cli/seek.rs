//! `millstream seek`: sends a group to another position of its stream, back or forward.

use anyhow::Result;
use clap::Args;

use super::{Confirmation, Global, human, output::visible, seek_key, with_database::with_database};
use crate::{
    config::{Start, parse_time},
    database::{Database, DatabaseError, Reaction, reaction},
    engine::{GroupId, Seeked, StreamId, find_group, preview_seek, seek},
};

#[derive(Args, Debug)]
pub struct Seek {
    /// The group to send elsewhere
    pub group: String,
    /// Where it goes on: with this message, with what was produced from this time on (RFC 3339), with the oldest
    /// message (earliest), or with what comes next (latest)
    #[arg(long, value_name = "ID|TIME|earliest|latest", value_parser = parse_to)]
    pub to: Start,
    /// Only this key: all others stay where they are
    #[arg(long)]
    pub key: Option<String>,
    /// Only tell what it would do
    #[arg(long)]
    pub dry_run: bool,
    #[command(flatten)]
    pub confirmation: Confirmation,
}

/// A seek may lose a deadlock against a settle of the same group, and is then done again.
const TRIES_MAX: u32 = 3;

impl Seek {
    pub(super) async fn run(&self, global: &Global) -> Result<()> {
        if let Some(key) = &self.key {
            return seek_key::run(global, self, key).await;
        }
        let seeked = with_database(global, async |database, _| {
            let (group, stream) = find_group(database, &self.group).await?;
            if self.dry_run || !self.confirmation.yes {
                let would = again_when_busy(async || self.preview(database, group, stream).await).await?;
                if self.dry_run {
                    return Ok(would);
                }
                self.confirmation.ask(&question(&would))?;
            }
            again_when_busy(async || seek(database, group, stream, &self.group, &self.to).await).await
        })
        .await?;
        global.output().one(&seeked, text)
    }

    async fn preview(&self, database: &Database, group: GroupId, stream: StreamId) -> Result<Seeked> {
        preview_seek(database, group, stream, &self.group, &self.to).await
    }
}

pub(super) async fn again_when_busy<T>(work: impl AsyncFn() -> Result<T>) -> Result<T> {
    let mut tries = 1;
    loop {
        match work().await {
            Err(error) if tries < TRIES_MAX && is_deadlock(&error) => tries += 1,
            done => return done,
        }
    }
}

/// A wait for a lock that took too long is told at once: whoever holds it will hold it again.
fn is_deadlock(error: &anyhow::Error) -> bool {
    error.downcast_ref::<DatabaseError>().is_some_and(|error| {
        reaction(error) == Reaction::Busy
            && error.as_database_error().and_then(|error| error.code()).is_some_and(|code| code == "40P01")
    })
}

fn parse_to(text: &str) -> Result<Start, String> {
    match text {
        "earliest" => Ok(Start::Earliest),
        "latest" => Ok(Start::Latest),
        id if id.bytes().all(|byte| byte.is_ascii_digit()) && !id.is_empty() => {
            id.parse().map(Start::Id).map_err(|_| format!("{id} is no message id"))
        }
        time => parse_time(time).map(Start::Time).ok_or_else(|| {
            "write an id such as 17, a time with its zone such as 2026-01-01T00:00:00Z, earliest or latest".to_owned()
        }),
    }
}

fn question(would: &Seeked) -> String {
    let mut text = format!("send {} {}", visible(&would.group), way(would));
    for note in notes(would) {
        text.push_str(&format!("; {note}"));
    }
    text
}

fn text(seeked: &Seeked) -> String {
    let verb = if seeked.dry_run { "would send" } else { "sent" };
    let mut text = format!("{verb} {} {}\n", visible(&seeked.group), way(seeked));
    for note in notes(seeked) {
        text.push_str(&format!("{note}\n"));
    }
    text
}

/// From where to where. Positions are not dense, so their distance is no number of messages.
fn way(seeked: &Seeked) -> String {
    let direction = if seeked.position < seeked.position_before { "back" } else { "on" };
    let first = match (seeked.first_id, &seeked.first_produced_at) {
        (Some(id), Some(time)) => format!("with message {id} of {time}"),
        _ => "with what is produced next".to_owned(),
    };
    format!("{direction} from position {} to {}: it begins {first}", seeked.position_before, seeked.position)
}

fn notes(seeked: &Seeked) -> Vec<String> {
    let mut notes = Vec::new();
    if seeked.removed {
        notes.push("retention has removed messages from there on: this is the nearest point there is".to_owned());
    }
    if seeked.beyond_max_lag {
        notes.push("the stream's max_lag is shorter than that: maintenance moves the group on again".to_owned());
    }
    if seeked.survivors_only {
        notes.push("of compacted keys only the newest version comes again".to_owned());
    }
    let given_up = [
        ("in flight", seeked.in_flight),
        ("retrying", seeked.retrying),
        ("delayed", seeked.delayed),
        ("deferred", seeked.deferred),
    ];
    let given_up: Vec<String> = given_up
        .iter()
        .filter(|(_, count)| *count > 0)
        .map(|(what, count)| format!("{} {what}", number(*count)))
        .collect();
    if !given_up.is_empty() {
        notes.push(format!("given up where it stood: {}", given_up.join(", ")));
    }
    if seeked.dead_letters_replayed > 0 {
        notes
            .push(format!("{} dead letters stay, and their messages come again", number(seeked.dead_letters_replayed)));
    }
    if seeked.dead_letters_reopened > 0 {
        notes.push(format!("{} redriven dead letters are open again", number(seeked.dead_letters_reopened)));
    }
    notes
}

fn number(count: i64) -> String {
    human::count(count.unsigned_abs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_point_is_an_id_a_time_or_an_end_of_the_stream() {
        assert_eq!(parse_to("earliest"), Ok(Start::Earliest));
        assert_eq!(parse_to("latest"), Ok(Start::Latest));
        assert_eq!(parse_to("17"), Ok(Start::Id(17)));
        assert_eq!(parse_to("2026-01-01T01:30:00+01:00"), Ok(Start::Time("2026-01-01T00:30:00Z".to_owned())));
        for wrong in ["", "newest", "-1", "2026-01-01", "2026-01-01T00:00:00", "17..20", "99999999999999999999"] {
            assert!(parse_to(wrong).is_err(), "{wrong}");
        }
    }
}
