//! `millstream status`: hosts, streams and groups at one moment, and whether streams.toml says something else.

use std::{collections::BTreeMap, time::Duration};

use anyhow::Result;
use serde::Serialize;
use serde_json::Value;

use super::{
    Global,
    groups::{count_cell, oldest, short},
    human,
    output::{Column, first_line, table, visible},
    with_database::with_database,
};
use crate::{
    config::Config,
    database::MIGRATIONS,
    engine::{self, Change, GroupState, HostState, State, StreamState},
};

/// Of why a handler does not serve; JSON has all of it.
const ERROR_CHARS_MAX: usize = 240;

/// The answer. Its field names are a contract.
#[derive(Serialize)]
struct Answer {
    /// Where the database is; without the password.
    database: String,
    schema: String,
    schema_version: i32,
    /// Sums over the hosts that live, since each one's start.
    counters: Totals,
    #[serde(flatten)]
    state: State,
    /// What `apply` would change: streams.toml says something else than what was applied last.
    differences: Vec<Change>,
    /// Declared, and not in this streams.toml.
    not_in_file: Vec<String>,
}

#[derive(Default, Serialize)]
struct Totals {
    delivered: u64,
    fenced: u64,
    memory_growths: u64,
    recovered: u64,
    reloads: u64,
    /// Open now, over all groups.
    gaps: i64,
    /// By class.
    failures: BTreeMap<String, u64>,
}

pub(super) async fn run(global: &Global) -> Result<()> {
    let answer = with_database(global, async |database, config| {
        let state = engine::inspect(database).await?;
        Ok(Answer {
            database: database.to_string(),
            schema: database.schema.name().to_owned(),
            schema_version: MIGRATIONS.last().map_or(0, |migration| migration.version),
            counters: totals(&state),
            differences: engine::plan(Some(database), config).await?,
            not_in_file: not_in_file(config, &state),
            state,
        })
    })
    .await?;
    global.output().one(&answer, text)
}

fn totals(state: &State) -> Totals {
    let mut totals = Totals { gaps: state.groups.iter().map(|group| group.gaps).sum(), ..Totals::default() };
    for host in state.hosts.iter().filter(|host| host.lease_left_ms > 0) {
        totals.recovered += number(&host.counters["recovered"]);
        totals.reloads += host.handlers.values().map(|handler| number(&handler["reloads"])).sum::<u64>();
        for group in host.counters["groups"].as_object().into_iter().flat_map(|groups| groups.values()) {
            totals.delivered += number(&group["delivered"]);
            totals.fenced += number(&group["fenced"]);
            totals.memory_growths += number(&group["memory_growths"]);
            for (class, count) in group["failures"].as_object().into_iter().flatten() {
                *totals.failures.entry(class.clone()).or_default() += number(count);
            }
        }
    }
    totals
}

/// 0 for what an older host does not publish.
fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_default()
}

/// What is declared and does not stand in streams.toml.
pub(super) fn not_in_file(config: &Config, state: &State) -> Vec<String> {
    let streams = state.streams.iter().filter(|stream| !config.streams.contains_key(&stream.stream));
    let groups = state.groups.iter().filter(|group| !config.groups.contains_key(&group.group));
    let streams = streams.map(|stream| format!("stream {}", stream.stream));
    streams.chain(groups.map(|group| format!("group {}", group.group))).collect()
}

fn text(answer: &Answer) -> String {
    let totals = &answer.counters;
    let mut parts = vec![format!("{}, tables of version {}\n", visible(&answer.database), answer.schema_version)];
    parts.push(hosts(&answer.state.hosts));
    if !answer.state.streams.is_empty() {
        parts.push(streams(&answer.state.streams));
    }
    if !answer.state.groups.is_empty() {
        parts.push(groups(&answer.state));
    }
    let failures: Vec<String> = totals.failures.iter().map(|(class, count)| format!("{count} {class}")).collect();
    parts.push(format!(
        "since the hosts' start: {} delivered, failures: {}; {} fenced, {} recovered, {}, {}; {} open\n",
        human::count(totals.delivered),
        if failures.is_empty() { "none".to_owned() } else { failures.join(", ") },
        totals.fenced,
        totals.recovered,
        human::counted(totals.reloads, "reload"),
        human::counted(totals.memory_growths, "memory growth"),
        human::counted(totals.gaps.unsigned_abs(), "gap")
    ));
    let notes = notes(answer);
    if !notes.is_empty() {
        parts.push(notes);
    }
    parts.join("\n")
}

fn hosts(hosts: &[HostState]) -> String {
    if hosts.is_empty() {
        return "no host runs: start one with `millstream up`\n".to_owned();
    }
    let columns = [
        Column::left("host"),
        Column::left("version"),
        Column::right("heartbeat"),
        Column::right("lease left"),
        Column::left("sandbox"),
    ];
    let rows = hosts.iter().map(|host| {
        let lease_left = match u64::try_from(host.lease_left_ms) {
            Ok(left) => human::duration(Duration::from_millis(left)),
            Err(_) => "expired".to_owned(),
        };
        let age = human::duration(Duration::from_millis(host.heartbeat_age_ms.max(0).unsigned_abs()));
        let sandbox = host.sandbox.as_deref().unwrap_or_default();
        let sandbox = sandbox.strip_prefix("sandbox: ").unwrap_or(sandbox).to_owned();
        vec![host.host.clone(), host.version.clone(), format!("{age} ago"), lease_left, sandbox]
    });
    table(&columns, &rows.collect::<Vec<_>>())
}

fn streams(streams: &[StreamState]) -> String {
    let columns = [
        Column::left("stream"),
        Column::right("last id"),
        Column::right("messages"),
        Column::right("size"),
        Column::right("partitions ahead"),
    ];
    let rows = streams.iter().map(|stream| {
        vec![
            stream.stream.clone(),
            stream.last_id.to_string(),
            format!("~{}", human::count(stream.messages_estimate.unsigned_abs())),
            human::bytes(stream.bytes.unsigned_abs()),
            stream.partitions_ahead.to_string(),
        ]
    });
    table(&columns, &rows.collect::<Vec<_>>())
}

fn groups(state: &State) -> String {
    let columns = [
        Column::left("group"),
        Column::right("lag"),
        Column::right("oldest"),
        Column::right("retrying"),
        Column::right("deferred"),
        Column::right("blocked keys"),
        Column::right("dead"),
        Column::left("handler"),
        Column::left("serves"),
    ];
    let rows = state.groups.iter().map(group_cells);
    table(&columns, &rows.collect::<Vec<_>>())
}

fn group_cells(group: &GroupState) -> Vec<String> {
    let serves = match (&group.digest, group.paused) {
        (_, true) => "paused",
        (Some(digest), false) => short(digest),
        (None, false) => "nothing",
    };
    vec![
        group.group.clone(),
        count_cell(group.lag, group.lag_exact),
        oldest(group),
        human::count(group.retrying.unsigned_abs()),
        human::count(group.deferred.unsigned_abs()),
        human::count(group.blocked_keys.unsigned_abs()),
        count_cell(group.dead, group.dead_exact),
        group.handler.clone(),
        serves.to_owned(),
    ]
}

/// Errors are long, and most groups have none: they stand below the tables.
fn notes(answer: &Answer) -> String {
    let mut notes = String::new();
    for host in &answer.state.hosts {
        for (group, handler) in &host.handlers {
            if let Some(error) = handler["last_error"].as_str() {
                let error = first_line(error, ERROR_CHARS_MAX);
                let note = format!("group {group}, host {}: the newest handler does not serve: {error}", host.host);
                notes.push_str(&format!("{}\n", visible(&note)));
            }
        }
    }
    if !answer.differences.is_empty() {
        notes.push_str("streams.toml differs from what was applied; `millstream apply` would:\n");
        for change in &answer.differences {
            notes.push_str(&format!("  {}\n", visible(&change.to_string())));
        }
    }
    if !answer.not_in_file.is_empty() {
        notes.push_str(&format!(
            "declared, but not in streams.toml: {}; `millstream forget GROUP` removes a group, whose messages are kept for it until then\n",
            visible(&answer.not_in_file.join(", "))
        ));
    }
    for stream in
        answer.state.streams.iter().filter(|stream| stream.partitions_ahead * 2 < stream.partitions_ahead_wanted)
    {
        notes.push_str(&format!(
            "stream {} has {} partitions ahead, and should have {}; a host (`millstream up`) attaches more\n",
            visible(&stream.stream),
            stream.partitions_ahead,
            stream.partitions_ahead_wanted
        ));
    }
    notes
}
