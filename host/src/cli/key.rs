//! `millstream key`: look at one key, hold it, let it go, or let it go on without its head.

use anyhow::{Result, bail};
use clap::{Args, Subcommand};
use serde::Serialize;

use super::{
    Confirmation, Global, human,
    output::{Column, visible},
    with_database::with_database,
};
use crate::{
    database::Database,
    engine::{KeyHistory, Version, find_group, find_stream, pause_key, release_key, resume_key, show_key, skip_key},
};

#[derive(Args, Debug)]
pub struct Key {
    #[command(subcommand)]
    pub verb: KeyVerb,
}

#[derive(Debug, Subcommand)]
pub enum KeyVerb {
    /// Show a compacted key's newest version and its history, without payloads
    Show(Show),
    /// Hold a key of a group: no host takes more of it. What one has taken already, to run it one after the other, still
    /// runs. Messages without order (neither exclusive nor ordered) are not held
    Pause(OfGroup),
    /// Let a held key go on
    Resume(OfGroup),
    /// End the rest of a key (on_dead_letter = "rest"): what comes of it is delivered again
    Release(OfGroup),
    /// Let a key go on without the message it waits for; that one is kept as a dead letter
    Skip(Skip),
}

#[derive(Args, Debug)]
pub struct Show {
    /// The stream
    pub stream: String,
    /// The key
    pub key: String,
    /// How many versions are shown at most
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(i64).range(1..=10_000))]
    pub limit: i64,
}

#[derive(Args, Debug)]
pub struct OfGroup {
    /// The group
    pub group: String,
    /// The key
    pub key: String,
}

#[derive(Args, Debug)]
pub struct Skip {
    #[command(flatten)]
    pub of: OfGroup,
    #[command(flatten)]
    pub confirmation: Confirmation,
}

/// The answer of `pause`, `resume`, `release`. Its field names are a contract.
#[derive(Serialize)]
struct Changed<'a> {
    group: &'a str,
    key: &'a str,
    /// `false`: it was so already.
    changed: bool,
}

/// The answer of `skip`. Its field names are a contract.
#[derive(Serialize)]
struct Skipped<'a> {
    group: &'a str,
    key: &'a str,
    /// The messages that the key no longer waits for.
    skipped: Vec<i64>,
}

impl Key {
    pub(super) async fn run(&self, global: &Global) -> Result<()> {
        match &self.verb {
            KeyVerb::Show(show) => show.run(global).await,
            KeyVerb::Pause(of) => {
                let changed =
                    of.change(global, async |database, group| pause_key(database, group, &of.key).await).await?;
                of.tell(
                    global,
                    changed,
                    "holds: of its exclusive and ordered messages no more are taken",
                    "was held already",
                )
            }
            KeyVerb::Resume(of) => {
                let changed =
                    of.change(global, async |database, group| resume_key(database, group, &of.key).await).await?;
                of.tell(global, changed, "goes on", "was not held")
            }
            KeyVerb::Release(of) => {
                let changed =
                    of.change(global, async |database, group| release_key(database, group, &of.key).await).await?;
                of.tell(global, changed, "rests no longer", "did not rest")
            }
            KeyVerb::Skip(skip) => skip.run(global).await,
        }
    }
}

impl OfGroup {
    async fn change(
        &self,
        global: &Global,
        change: impl AsyncFnOnce(&Database, crate::engine::GroupId) -> Result<bool>,
    ) -> Result<bool> {
        with_database(global, async |database, _| {
            let (group, _) = find_group(database, &self.group).await?;
            change(database, group).await
        })
        .await
    }

    fn tell(&self, global: &Global, changed: bool, done: &str, was_so: &str) -> Result<()> {
        let answer = Changed { group: &self.group, key: &self.key, changed };
        global.output().one(&answer, |answer| {
            let what = if answer.changed { done } else { was_so };
            format!("key {} of group {} {what}\n", visible(answer.key), visible(answer.group))
        })
    }
}

impl Skip {
    async fn run(&self, global: &Global) -> Result<()> {
        let OfGroup { group, key } = &self.of;
        let skipped = with_database(global, async |database, _| {
            let ids = find_group(database, group).await?;
            self.confirmation
                .ask(&format!("let key {key:?} of group {group:?} go on without the message it waits for"))?;
            let skipped = skip_key(database, ids, key).await?;
            if skipped.is_empty() {
                bail!(
                    "key {key:?} of group {group:?} waits for no message; `millstream keys {group}` shows those that do"
                );
            }
            Ok(skipped)
        })
        .await?;
        global.output().one(&Skipped { group, key, skipped }, |answer| {
            let ids = answer.skipped.iter().map(i64::to_string).collect::<Vec<_>>().join(" ");
            format!("key {} goes on without message {ids}\n", visible(answer.key))
        })
    }
}

const COLUMNS: [Column; 6] = [
    Column::right("id"),
    Column::right("rank"),
    Column::left(""),
    Column::right("bytes"),
    Column::left("concurrency"),
    Column::left("produced"),
];

impl Show {
    async fn run(&self, global: &Global) -> Result<()> {
        let history = with_database(global, async |database, _| {
            let stream = find_stream(database, &self.stream).await?;
            show_key(database, stream, &self.key, self.limit).await
        })
        .await?;
        let output = global.output();
        if output.is_json() {
            return output.one(&history, |_: &KeyHistory| String::new());
        }
        output.list(
            &history.versions,
            &COLUMNS,
            cells,
            "no version of this key is in the log; without compaction a key has none",
        )
    }
}

fn cells(version: &Version) -> Vec<String> {
    let what = match (version.is_head, version.is_tombstone) {
        (true, true) => "newest, a tombstone",
        (true, false) => "newest",
        (false, true) => "a tombstone",
        (false, false) => "",
    };
    vec![
        version.id.to_string(),
        version.rank.to_string(),
        what.to_owned(),
        version.payload_bytes.map(|bytes| human::count(bytes.unsigned_abs())).unwrap_or_default(),
        version.concurrency.clone(),
        version.produced_at.clone(),
    ]
}
