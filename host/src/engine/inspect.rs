//! How everything stands, for people and monitors: groups, streams, hosts. Reads a bounded number of rows whatever the
//! sizes, in one snapshot, and changes nothing.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use serde::Serialize;
use serde_json::Value;
use sqlx::{PgConnection, Postgres, Row, Transaction, postgres::PgRow};

use super::{StreamId, declare::PARTITIONS_AHEAD};
use crate::database::Database;

/// Up to so many messages or dead letters a figure is counted, above it is estimated. Counting ten thousand index
/// entries takes a few milliseconds.
pub const COUNTED_MAX: i64 = 10_000;

/// How one group stands. The field names are a contract.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct GroupState {
    pub group: String,
    pub stream: String,
    /// Messages visible and not yet claimed, those that the group's filter will skip included.
    pub lag: i64,
    /// Whether `lag` was counted. 0 always was.
    pub lag_exact: bool,
    /// Age of the oldest message that is not yet ended: unclaimed, in flight or to be retried.
    pub oldest_age_ms: Option<i64>,
    /// Claimed by a host and not yet settled.
    pub in_flight: i64,
    /// Failed and waiting for the next attempt.
    pub retrying: i64,
    /// Waiting for their `deliver_after`.
    pub delayed: i64,
    /// Waiting behind their key.
    pub deferred: i64,
    pub dead: i64,
    /// Whether `dead` was counted. 0 always was.
    pub dead_exact: bool,
    pub blocked_keys: i64,
    pub paused: bool,
    /// Ranges of ids that a producer may still fill below the group's position.
    pub gaps: i64,
    /// The database process whose open transaction keeps the oldest of them open.
    pub oldest_gap_pid: Option<i32>,
    /// File name inside the handlers folder.
    pub handler: String,
    /// sha256 of the component that serves; `None` when no host has loaded it.
    pub digest: Option<String>,
}

/// How one stream stands.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct StreamState {
    pub stream: String,
    /// The highest position drawn so far; a transaction that drew it may still be open, or rolled back.
    pub last_id: i64,
    /// An upper bound: positions that were rolled back are among them.
    pub messages_estimate: i64,
    /// On disk, indexes included.
    pub bytes: i64,
    pub partitions: i64,
    /// Empty partitions that wait for what comes.
    pub partitions_ahead: i64,
    /// How many there should be.
    pub partitions_ahead_wanted: i64,
}

/// One running process, as of its last heartbeat.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct HostState {
    pub id: i64,
    pub host: String,
    pub version: String,
    pub started_at: String,
    pub heartbeat_age_ms: i64,
    /// Below 0 the host is dead, and its work is about to be taken over.
    pub lease_left_ms: i64,
    /// The line that says which sandbox settings are active.
    pub sandbox: Option<String>,
    /// What serves each group there: file, digest, reloads, last error.
    pub handlers: BTreeMap<String, Value>,
    /// What happened there since its start, the groups' own counters included.
    pub counters: Value,
}

/// Everything at one moment.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct State {
    pub groups: Vec<GroupState>,
    pub streams: Vec<StreamState>,
    pub hosts: Vec<HostState>,
}

/// Reads how everything stands.
pub async fn inspect(database: &Database) -> Result<State> {
    let mut tx = bounded_read(database).await.context("begin to look at the groups")?;
    let rows = database.query(include_str!("inspect_streams.sql")).fetch_all(&mut *tx).await;
    let mut state = State { groups: Vec::new(), streams: Vec::new(), hosts: Vec::new() };
    for row in rows.context("look at the streams")? {
        let (id, stream) = (StreamId(row.try_get("id")?), read_stream(&row)?);
        let groups = groups_of(database, &mut tx, id, &stream.stream).await;
        state.groups.extend(groups.with_context(|| format!("look at the groups of stream {:?}", stream.stream))?);
        state.streams.push(stream);
    }
    state.groups.sort_by(|left, right| left.group.cmp(&right.group));
    let hosts = database.query(include_str!("inspect_hosts.sql")).fetch_all(&mut *tx).await;
    state.hosts = hosts.context("look at the hosts")?.iter().map(read_host).collect::<Result<_, _>>()?;
    Ok(state)
}

/// Begins a transaction that reads in one snapshot, and whose statements stop at the limits they name.
pub(super) async fn bounded_read(database: &Database) -> Result<Transaction<'static, Postgres>, sqlx::Error> {
    let mut tx = database.begin_with("begin isolation level repeatable read read only").await?;
    sqlx::raw_sql(include_str!("bounded_read.sql")).execute(&mut *tx).await?;
    Ok(tx)
}

async fn groups_of(
    database: &Database,
    tx: &mut PgConnection,
    stream_id: StreamId,
    stream: &str,
) -> Result<Vec<GroupState>, sqlx::Error> {
    let query = database.stream_query(include_str!("inspect_groups.sql"), stream_id.0).bind(COUNTED_MAX);
    query.fetch_all(tx).await?.iter().map(|row| read_group(row, stream)).collect()
}

fn read_group(row: &PgRow, stream: &str) -> Result<GroupState, sqlx::Error> {
    let (fresh, late): (i64, i64) = (row.try_get("fresh")?, row.try_get("late")?);
    let lag_exact = fresh + late <= COUNTED_MAX;
    let ids_ahead: i64 = row.try_get("ids_ahead")?;
    let dead: i64 = row.try_get("dead")?;
    let dead_exact = dead <= COUNTED_MAX;
    let dead_ids = DeadIds {
        first: row.try_get("dead_first")?,
        counted_to: row.try_get("dead_counted_to")?,
        last: row.try_get("dead_last")?,
    };
    Ok(GroupState {
        group: row.try_get("name")?,
        stream: stream.to_owned(),
        lag: if lag_exact { fresh + late } else { fresh.max(ids_ahead) + late },
        lag_exact,
        oldest_age_ms: row.try_get::<Option<i64>, _>("oldest_age_ms")?.map(|age| age.max(0)),
        in_flight: row.try_get("in_flight")?,
        retrying: row.try_get("retrying")?,
        delayed: row.try_get("delayed")?,
        deferred: row.try_get("deferred")?,
        dead: if dead_exact { dead } else { dead_ids.estimate(dead) },
        dead_exact,
        blocked_keys: row.try_get("blocked_keys")?,
        paused: row.try_get("paused")?,
        gaps: row.try_get("gaps")?,
        oldest_gap_pid: row.try_get("oldest_gap_pid")?,
        handler: row.try_get("handler")?,
        digest: row.try_get("digest")?,
    })
}

/// Ids of a group's dead letters, which it shares with all other groups.
struct DeadIds {
    first: Option<i64>,
    /// The last one that was counted.
    counted_to: Option<i64>,
    last: Option<i64>,
}

impl DeadIds {
    /// As if the rest were as dense as the part that was counted. Needs no statistics, which may be missing.
    fn estimate(&self, counted: i64) -> i64 {
        let (Some(first), Some(counted_to), Some(last)) = (self.first, self.counted_to, self.last) else {
            return counted;
        };
        let ids_per_letter = (counted_to - first + 1) as f64 / counted as f64;
        counted.max(((last - first + 1) as f64 / ids_per_letter) as i64)
    }
}

fn read_stream(row: &PgRow) -> Result<StreamState, sqlx::Error> {
    let last_id: i64 = row.try_get("last_id")?;
    let first_id: Option<i64> = row.try_get("first_id")?;
    Ok(StreamState {
        stream: row.try_get("name")?,
        last_id,
        messages_estimate: (last_id - first_id.unwrap_or(1) + 1).max(0),
        bytes: row.try_get("bytes")?,
        partitions: row.try_get("partitions")?,
        partitions_ahead: row.try_get("partitions_ahead")?,
        partitions_ahead_wanted: i64::from(PARTITIONS_AHEAD),
    })
}

fn read_host(row: &PgRow) -> Result<HostState, sqlx::Error> {
    let mut counters: Value = row.try_get("stats")?;
    let mut take = |name: &str| counters.as_object_mut().and_then(|counters| counters.remove(name));
    let sandbox = take("sandbox").and_then(|text| text.as_str().map(str::to_owned));
    let handlers = match take("handlers") {
        Some(Value::Object(handlers)) => handlers.into_iter().collect(),
        _ => BTreeMap::new(),
    };
    Ok(HostState {
        id: row.try_get("id")?,
        host: row.try_get("name")?,
        version: row.try_get("version")?,
        started_at: row.try_get("started_at")?,
        heartbeat_age_ms: row.try_get("heartbeat_age_ms")?,
        lease_left_ms: row.try_get("lease_left_ms")?,
        sandbox,
        handlers,
        counters,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rest_of_the_dead_letters_is_taken_to_be_as_dense() {
        let check = |first, counted_to, last, estimate| {
            let ids = DeadIds { first: Some(first), counted_to: Some(counted_to), last: Some(last) };
            assert_eq!(ids.estimate(10_001), estimate);
        };
        check(1, 10_001, 1_000_000, 1_000_000);
        check(1, 20_002, 1_000_000, 500_000);
        check(5, 10_005, 10_005, 10_001);
        assert_eq!(DeadIds { first: None, counted_to: None, last: None }.estimate(10_001), 10_001);
    }
}
