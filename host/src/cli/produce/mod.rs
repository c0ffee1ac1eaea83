//! `millstream produce`: one message from a file or standard input, or one for every line of NDJSON.

mod batches;

mod input;

mod many;

mod one;

mod refused;

use std::time::Duration;

use anyhow::{Result, bail};
use clap::Args;
use serde::Serialize;

use super::{Global, UsageError, ndjson, with_database::with_database};
use crate::{
    config::parse_duration,
    engine::{Produced, find_stream},
    handler::Concurrency,
};

#[derive(Args)]
pub struct Produce {
    /// The stream to produce to
    pub stream: String,
    /// Where the payload is, or the lines are; `-` is standard input [default: standard input]
    #[arg(long, value_name = "FILE|-")]
    pub file: Option<String>,
    /// Read one message a line: {"payload": any JSON | "payload_base64": "...", "key": ..., "headers": {...}, ...}
    #[arg(long, conflicts_with_all = ["key", "concurrency", "compaction", "rank", "idempotency_key", "header", "routing_key", "content_type", "deliver_after", "delay"])]
    pub ndjson: bool,
    /// So many lines at most in one transaction
    #[arg(long, value_name = "LINES", default_value_t = 250, requires = "ndjson", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub batch: u32,
    /// What the message is about
    #[arg(long)]
    pub key: Option<String>,
    /// How messages of its key are delivered: parallel, exclusive or ordered [default: the stream decides]
    #[arg(long, value_name = "MODE", value_parser = parse_concurrency, requires = "key")]
    pub concurrency: Option<Concurrency>,
    /// Whether the newest version of its key replaces older ones [default: the stream decides]
    #[arg(long, value_name = "true|false", num_args = 0..=1, default_missing_value = "true", requires = "key")]
    pub compaction: Option<bool>,
    /// Of a version, 0 or more: the highest wins
    #[arg(long, requires = "key", allow_negative_numbers = true)]
    pub rank: Option<i64>,
    /// A second message with the same one is not stored
    #[arg(long, value_name = "KEY")]
    pub idempotency_key: Option<String>,
    /// A header, as name=value; may be given several times
    #[arg(long, value_name = "NAME=VALUE", value_parser = parse_header)]
    pub header: Vec<(String, String)>,
    /// What filters of groups look at
    #[arg(long, value_name = "TEXT")]
    pub routing_key: Option<String>,
    /// The payload's media type, such as application/json
    #[arg(long, value_name = "TYPE")]
    pub content_type: Option<String>,
    /// Deliver it not before this time, such as 2026-01-01T00:00:00Z
    #[arg(long, value_name = "TIME", value_parser = parse_time, conflicts_with = "delay")]
    pub deliver_after: Option<String>,
    /// Deliver it not before so long from now, such as 30s
    #[arg(long, value_name = "DURATION", value_parser = parse_delay)]
    pub delay: Option<Duration>,
}

impl std::fmt::Debug for Produce {
    /// Never prints what is produced.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Produce").field("stream", &self.stream).field("ndjson", &self.ndjson).finish_non_exhaustive()
    }
}

/// The answer. Its field names are a contract.
#[derive(Clone, Debug, Default, Serialize)]
struct Answer {
    /// Stored by this call.
    produced: u64,
    /// Stored before under the same idempotency key.
    duplicates: u64,
    /// Stored, and lost already to a version of their key with a higher rank.
    superseded: u64,
    /// The lowest and the highest position of all these messages, duplicates included.
    first_id: Option<i64>,
    last_id: Option<i64>,
}

impl Answer {
    fn add(&mut self, produced: &[Produced]) {
        for one in produced {
            let count = if one.duplicate { &mut self.duplicates } else { &mut self.produced };
            *count += 1;
            self.superseded += u64::from(one.superseded);
            self.first_id = Some(self.first_id.map_or(one.id, |id| id.min(one.id)));
            self.last_id = Some(self.last_id.map_or(one.id, |id| id.max(one.id)));
        }
    }
}

impl Produce {
    pub(super) async fn run(&self, global: &Global) -> Result<()> {
        let input = input::open(self.file.as_deref())?;
        if self.stream.contains('\0') {
            bail!(UsageError("a stream's name holds no NUL character".to_owned()));
        }
        let answer = with_database(global, async |database, _| {
            find_stream(database, &self.stream).await?;
            if self.ndjson {
                many::produce(global, database, self, input).await
            } else {
                one::produce(database, self, input).await
            }
        })
        .await?;
        global.output().one(&answer, |answer| if self.ndjson { String::new() } else { one::text(answer) })
    }
}

fn parse_concurrency(text: &str) -> Result<Concurrency, String> {
    Concurrency::named(text).ok_or_else(|| "write parallel, exclusive or ordered".to_owned())
}

fn parse_header(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => Err("write name=value".to_owned()),
    }
}

fn parse_time(text: &str) -> Result<String, String> {
    ndjson::utc_time(text)
        .ok_or_else(|| "not a time; write date, time and zone such as 2026-01-01T00:00:00Z".to_owned())
}

fn parse_delay(text: &str) -> Result<Duration, String> {
    parse_duration(text).map_err(|hint| format!("not a duration: {hint}"))
}
