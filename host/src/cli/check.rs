//! `millstream check`: every mistake in streams.toml in one run, or what it declares. Needs no database.

use std::path::Path;

use clap::Args;
use serde::Serialize;

use super::{
    Global, Told, human,
    output::{Column, complain, print, table},
};
use crate::config::{Config, ConfigErrors, duration_text, json_schema, size_text};

#[derive(Args, Debug)]
pub struct Check {
    /// Print the JSON Schema of streams.toml for editors instead
    #[arg(long)]
    pub schema: bool,
}

/// The answer. Its field names are a contract.
#[derive(Serialize)]
struct Answer<'a> {
    valid: bool,
    errors: Vec<Problem<'a>>,
    warnings: Vec<String>,
    streams: Vec<StreamRow<'a>>,
    groups: Vec<GroupRow<'a>>,
}

#[derive(Serialize)]
struct Problem<'a> {
    file: &'a str,
    line: Option<usize>,
    column: Option<usize>,
    key: &'a str,
    message: &'a str,
    hint: Option<&'a str>,
}

#[derive(Serialize)]
struct StreamRow<'a> {
    stream: &'a str,
    groups: usize,
    /// `None`: forever.
    retention_ms: Option<u64>,
    max_payload_bytes: u64,
}

#[derive(Serialize)]
struct GroupRow<'a> {
    group: &'a str,
    stream: &'a str,
    handler: &'a str,
    slots: u32,
    timeout_ms: u64,
    max_attempts: u32,
    produces_to: &'a [String],
}

impl Check {
    pub(super) fn run(&self, global: &Global) -> anyhow::Result<()> {
        if self.schema {
            return print(&(serde_json::to_string_pretty(&json_schema())? + "\n"));
        }
        match global.load_config() {
            Ok(config) => {
                let answer = valid(&config, &global.config);
                // In the JSON they are part of the answer.
                if !global.output().is_json() {
                    answer.warnings.iter().for_each(|warning| complain(&format!("warning: {warning}")));
                }
                global.output().one(&answer, |answer| summary(answer, &global.config))
            }
            Err(errors) => {
                if global.output().is_json() {
                    global.output().one(&invalid(&errors), |_| String::new())?;
                } else {
                    complain(&format!("{errors}\n{}", human::counted(errors.errors.len() as u64, "problem")));
                }
                Err(Told.into())
            }
        }
    }
}

fn valid<'a>(config: &'a Config, file: &Path) -> Answer<'a> {
    let milliseconds = |duration: std::time::Duration| u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
    let readers = |stream: &String| config.groups.values().filter(|group| group.stream == *stream).count();
    let streams = config.streams.iter().map(|(name, stream)| StreamRow {
        stream: name,
        groups: readers(name),
        retention_ms: stream.retention.map(milliseconds),
        max_payload_bytes: stream.max_payload_bytes,
    });
    let groups = config.groups.iter().map(|(name, group)| GroupRow {
        group: name,
        stream: &group.stream,
        handler: &group.handler,
        slots: group.slots,
        timeout_ms: milliseconds(group.timeout),
        max_attempts: group.retry.max_attempts,
        produces_to: &group.allow.produce,
    });
    let (streams, groups) = (streams.collect(), groups.collect());
    Answer { valid: true, errors: Vec::new(), warnings: missing_handlers(config, file), streams, groups }
}

fn invalid(errors: &ConfigErrors) -> Answer<'_> {
    let problems = errors.errors.iter().map(|error| Problem {
        file: &error.file,
        line: error.position.map(|(line, _)| line),
        column: error.position.map(|(_, column)| column),
        key: &error.key,
        message: &error.message,
        hint: error.hint.as_deref(),
    });
    Answer { valid: false, errors: problems.collect(), warnings: Vec::new(), streams: Vec::new(), groups: Vec::new() }
}

/// A host starts without them and waits, so this is no mistake; but it is the first thing a newcomer trips over.
fn missing_handlers(config: &Config, file: &Path) -> Vec<String> {
    let folder = config.host.handlers_folder(file);
    let mut missing = Vec::new();
    for (name, group) in &config.groups {
        let path = folder.join(&group.handler);
        if !path.is_file() {
            missing.push(format!("groups.{name}.handler: no file {} yet: build it and put it there", path.display()));
        }
    }
    missing
}

fn summary(answer: &Answer<'_>, file: &Path) -> String {
    let streams = table(
        &[Column::left("stream"), Column::right("groups"), Column::right("retention"), Column::right("max payload")],
        &answer.streams.iter().map(stream_cells).collect::<Vec<_>>(),
    );
    let groups = table(
        &[
            Column::left("group"),
            Column::left("stream"),
            Column::left("handler"),
            Column::right("slots"),
            Column::right("timeout"),
            Column::right("attempts"),
            Column::left("produces to"),
        ],
        &answer.groups.iter().map(group_cells).collect::<Vec<_>>(),
    );
    let mut text = format!("{} is valid\n", file.display());
    for (rows, table) in [(answer.streams.len(), streams), (answer.groups.len(), groups)] {
        if rows > 0 {
            text.push_str(&format!("\n{table}"));
        }
    }
    text
}

fn stream_cells(row: &StreamRow<'_>) -> Vec<String> {
    let retention = row.retention_ms.map(|ms| duration_text(std::time::Duration::from_millis(ms)));
    let retention = retention.unwrap_or_else(|| "forever".to_owned());
    vec![row.stream.to_owned(), human::count(row.groups as u64), retention, size_text(row.max_payload_bytes)]
}

fn group_cells(row: &GroupRow<'_>) -> Vec<String> {
    vec![
        row.group.to_owned(),
        row.stream.to_owned(),
        row.handler.to_owned(),
        row.slots.to_string(),
        duration_text(std::time::Duration::from_millis(row.timeout_ms)),
        row.max_attempts.to_string(),
        row.produces_to.join(", "),
    ]
}
