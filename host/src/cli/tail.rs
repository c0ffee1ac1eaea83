//! `millstream tail`: prints what is in a stream. Reads without a group: nothing is claimed or delivered.

use std::time::Duration;

use anyhow::Result;
use base64::{Engine as _, prelude::BASE64_STANDARD};
use clap::Args;
use serde::Serialize;

use super::{
    Global, human,
    output::{print, visible},
    with_database::with_database,
};
use crate::{
    database::Database,
    engine::{LogEntry, StreamId, find_stream, last_positions, read_log, read_payload},
};

#[derive(Args, Debug)]
pub struct Tail {
    /// The stream to read
    pub stream: String,
    /// Begin with this message, with the oldest (earliest), or with what comes next (latest) [default: the last 10]
    #[arg(long, value_name = "ID|earliest|latest", value_parser = parse_from)]
    pub from: Option<From>,
    /// Go on with what comes
    #[arg(short, long)]
    pub follow: bool,
    /// Print payloads as well
    #[arg(long)]
    pub payload: bool,
}

/// Where to begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum From {
    Id(i64),
    Earliest,
    Latest,
}

/// How many messages are shown when nobody says where to begin.
const SHOWN: u32 = 10;

/// How many are read at a time.
const PAGE: u32 = 500;

/// How often to look for what comes.
const LOOK: Duration = Duration::from_millis(200);

/// While following, a message above a hole is held back this long: the hole may be a transaction that is about to
/// commit. One that takes longer is not shown.
const HOLE_MS: i64 = 1000;

/// A message as JSON, one a line. The field names are a contract.
#[derive(Serialize)]
struct JsonLine<'a> {
    #[serde(flatten)]
    entry: &'a LogEntry,
    #[serde(skip_serializing_if = "Option::is_none")]
    payload: Option<&'a str>,
    /// In place of `payload` where that is not UTF-8.
    #[serde(skip_serializing_if = "Option::is_none")]
    payload_base64: Option<String>,
}

impl Tail {
    pub(super) async fn run(&self, global: &Global) -> Result<()> {
        with_database(global, async |database, _| {
            let stream = find_stream(database, &self.stream).await?;
            let (before_last, end) = last_positions(database, stream, SHOWN).await?;
            let position = match self.from {
                None => before_last,
                Some(From::Earliest) => 0,
                Some(From::Latest) => end,
                Some(From::Id(id)) => id.saturating_sub(1),
            };
            self.print_from(global, database, stream, position).await
        })
        .await
    }

    async fn print_from(&self, global: &Global, database: &Database, stream: StreamId, from: i64) -> Result<()> {
        let mut position = from;
        if !global.output().is_json() {
            print(&format!("{:>10}  {:<24}  {:>10}  KEY\n", "ID", "TIME", "SIZE"))?;
        }
        loop {
            let page = read_log(database, stream, position, PAGE).await?;
            let ready = if self.follow { without_young_holes(&page, position) } else { &page };
            for entry in ready {
                let payload = if self.payload { read_payload(database, stream, entry.id).await? } else { None };
                print(&line(entry, payload.as_deref(), global.output().is_json())?)?;
                position = entry.id;
            }
            let is_end = page.len() < PAGE as usize;
            if is_end && !self.follow {
                return Ok(());
            }
            if is_end || ready.is_empty() {
                tokio::time::sleep(LOOK).await;
            }
        }
    }
}

/// The messages up to the first hole that may still fill.
fn without_young_holes(page: &[LogEntry], position: i64) -> &[LogEntry] {
    let mut expected = position + 1;
    for (index, entry) in page.iter().enumerate() {
        if entry.id != expected && entry.age_ms < HOLE_MS {
            return &page[..index];
        }
        expected = entry.id + 1;
    }
    page
}

fn line(entry: &LogEntry, payload: Option<&[u8]>, json: bool) -> Result<String> {
    let text = payload.map(std::str::from_utf8);
    let base64 = || payload.map(|payload| BASE64_STANDARD.encode(payload));
    if json {
        let (payload, payload_base64) = match text {
            Some(Ok(text)) => (Some(text), None),
            Some(Err(_)) => (None, base64()),
            None => (None, None),
        };
        return Ok(serde_json::to_string(&JsonLine { entry, payload, payload_base64 })? + "\n");
    }
    let size = entry.payload_bytes.map_or("tombstone".to_owned(), |bytes| human::bytes(bytes.unsigned_abs()));
    let key = visible(entry.message_key.as_deref().unwrap_or_default());
    let mut line = format!("{:>10}  {:<24}  {size:>10}  {key}", entry.id, entry.produced_at);
    line.truncate(line.trim_end().len());
    line.push('\n');
    match text {
        Some(Ok(text)) => text.lines().for_each(|text| line.push_str(&format!("            {}\n", visible(text)))),
        Some(Err(_)) => line.push_str(&format!("            base64 {}\n", base64().unwrap_or_default())),
        None => {}
    }
    Ok(line)
}

fn parse_from(text: &str) -> Result<From, String> {
    match text {
        "earliest" => Ok(From::Earliest),
        "latest" => Ok(From::Latest),
        text => text.parse().map(From::Id).map_err(|_| "write a message id, earliest or latest".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(id: i64, age_ms: i64) -> LogEntry {
        LogEntry {
            id,
            message_key: None,
            routing_key: None,
            content_type: None,
            payload_bytes: None,
            produced_at: String::new(),
            age_ms,
        }
    }

    #[test]
    fn what_stands_above_a_young_hole_is_held_back() {
        let check = |page: &[LogEntry], shown: usize| assert_eq!(without_young_holes(page, 10).len(), shown);
        check(&[entry(11, 0), entry(12, 0)], 2);
        check(&[entry(11, 0), entry(13, 0)], 1);
        check(&[entry(12, 0)], 0);
        check(&[entry(12, HOLE_MS), entry(13, 0)], 2);
    }
}
