//! Keys as an operator sees them: which wait for what, and the ways to hold them, let them go, or skip their head.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use serde::Serialize;
use sqlx::{
    Postgres, Row, Transaction,
    postgres::{PgArguments, PgRow},
    query::Query,
};
use tokio::time::sleep;

use super::{
    GroupId, StreamId,
    inspect::bounded_read,
    pause::tell_hosts,
    settle::{Burial, bury},
};
use crate::{database::Database, handler::FailureClass};

/// Leases, and deferred messages, that a list reads at most; above, depths are lower bounds.
const READ_MAX: i64 = 100_000;

/// One key of a group that somebody has or that waits. The field names are a contract.
#[derive(Clone, Debug, Serialize)]
pub struct KeyState {
    pub key: String,
    /// With `shards`, each lane stands by itself.
    pub lane: i16,
    /// `leased`, `waiting` (for a retry or its time), `blocked` (by a dead letter), `resting`, `paused`, `ready`.
    pub state: String,
    /// Who has it.
    pub host: Option<String>,
    /// The message it waits for.
    pub waits_for: Option<i64>,
    /// When that message is due, UTC.
    pub due_at: Option<String>,
    /// Counted failures of that message.
    pub failures: Option<i32>,
    /// Class of its last failure.
    pub class: Option<String>,
    /// As `dead show` takes it.
    pub dead_letter: Option<i64>,
    /// Messages that wait in the database.
    pub depth: i64,
    /// Whether `depth` is all there is.
    pub depth_exact: bool,
    /// Age of the oldest of them.
    pub oldest_age_ms: Option<i64>,
    /// How long it has been in this state.
    pub since_ms: i64,
    #[serde(skip)]
    oldest_id: Option<i64>,
}

/// What a list of keys begins with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyOrder {
    /// Most messages first.
    Depth,
    /// Oldest message first.
    Age,
}

/// The keys of a group, those of one state where it is given, `limit` at most. Reads a bounded number of rows.
pub async fn list_keys(
    database: &Database,
    (group, stream): (GroupId, StreamId),
    state: Option<&str>,
    order: KeyOrder,
    limit: usize,
) -> Result<Vec<KeyState>> {
    let mut tx = bounded_read(database).await.context("begin to list keys")?;
    let query = database.query(include_str!("keys_list.sql")).bind(group.0).bind(READ_MAX);
    let rows = query.fetch_all(&mut *tx).await.context("list keys")?;
    let mut keys = rows.iter().map(read_key).collect::<Result<Vec<_>, _>>().context("read keys")?;
    let read: i64 = keys.iter().map(|key| key.depth).sum();
    keys.retain(|key| state.is_none_or(|state| key.state == state));
    match order {
        KeyOrder::Depth => keys.sort_by_key(|key| std::cmp::Reverse(key.depth)),
        KeyOrder::Age => keys.sort_by_key(|key| key.oldest_id.unwrap_or(i64::MAX)),
    }
    keys.truncate(limit);
    let oldest: Vec<i64> = keys.iter().filter_map(|key| key.oldest_id).collect();
    let query = database.stream_query(include_str!("keys_ages.sql"), stream.0).bind(group.0).bind(oldest);
    let ages = query.fetch_all(&mut *tx).await.context("read the ages of messages")?;
    let ages = ages.iter().map(|row| Ok((row.try_get(0)?, row.try_get(1)?)));
    let ages = ages.collect::<Result<HashMap<i64, Option<i64>>, sqlx::Error>>()?;
    for key in &mut keys {
        key.oldest_age_ms = key.oldest_id.and_then(|id| ages.get(&id).copied().flatten());
        key.depth_exact = read < READ_MAX;
    }
    Ok(keys)
}

fn read_key(row: &PgRow) -> Result<KeyState, sqlx::Error> {
    Ok(KeyState {
        key: row.try_get("message_key")?,
        lane: row.try_get("lane")?,
        state: row.try_get("state")?,
        host: row.try_get("host")?,
        waits_for: row.try_get("blocked_by")?,
        due_at: row.try_get("due_at")?,
        failures: row.try_get("failures")?,
        class: row.try_get("class")?,
        dead_letter: row.try_get("dead_letter")?,
        depth: row.try_get("depth")?,
        depth_exact: true,
        oldest_age_ms: None,
        since_ms: row.try_get("since_ms")?,
        oldest_id: row.try_get("oldest_id")?,
    })
}

/// A key of a stream: its winner and its history. The field names are a contract.
#[derive(Clone, Debug, Serialize)]
pub struct KeyHistory {
    pub key: String,
    /// The winner; none where the key was never compacted, or its tombstone's time is over.
    pub head_id: Option<i64>,
    pub head_rank: Option<i64>,
    /// Newest first; what retention has thinned is not there any more.
    pub versions: Vec<Version>,
}

/// One version of a key. The field names are a contract.
#[derive(Clone, Debug, Serialize)]
pub struct Version {
    pub id: i64,
    pub rank: i64,
    pub is_head: bool,
    pub is_tombstone: bool,
    pub payload_bytes: Option<i64>,
    pub concurrency: String,
    pub produced_at: String,
}

/// Shows a key's winner and at most `limit` versions.
pub async fn show_key(database: &Database, stream: StreamId, key: &str, limit: i64) -> Result<KeyHistory> {
    let query = database.stream_query(include_str!("key_head.sql"), stream.0).bind(key);
    let head = database.fetch_all(query).await.context("read the head of a key")?;
    let (head_id, head_rank) = match head.first() {
        Some(row) => (Some(row.try_get::<i64, _>(0)?), Some(row.try_get(1)?)),
        None => (None, None),
    };
    let query = database.stream_query(include_str!("key_history.sql"), stream.0).bind(key).bind(limit);
    let rows = database.fetch_all(query).await.context("read the versions of a key")?;
    let read = |row: &PgRow| {
        let id = row.try_get("id")?;
        Ok(Version {
            id,
            rank: row.try_get("rank")?,
            is_head: head_id == Some(id),
            is_tombstone: row.try_get("is_tombstone")?,
            payload_bytes: row.try_get("payload_bytes")?,
            concurrency: row.try_get("concurrency")?,
            produced_at: row.try_get("produced_at")?,
        })
    };
    let versions = rows.iter().map(read).collect::<Result<_, sqlx::Error>>()?;
    Ok(KeyHistory { key: key.to_owned(), head_id, head_rank, versions })
}

/// Holds a key of a group: nothing more of it runs until it is resumed. `false`: it was held already.
pub async fn pause_key(database: &Database, group: GroupId, key: &str) -> Result<bool> {
    if key.is_empty() || key.len() > 1024 {
        bail!("a key has 1 to 1,024 bytes, this one {}", key.len());
    }
    let lanes = change(database, include_str!("key_pause.sql"), group, key).await.context("pause a key")?;
    Ok(lanes > 0)
}

/// Lets a held key go on. `false`: it was not held.
pub async fn resume_key(database: &Database, group: GroupId, key: &str) -> Result<bool> {
    let lanes = change(database, include_str!("key_resume.sql"), group, key).await.context("resume a key")?;
    Ok(lanes > 0)
}

/// Ends the rest of a key. `false`: it did not rest.
pub async fn release_key(database: &Database, group: GroupId, key: &str) -> Result<bool> {
    let lanes = change(database, include_str!("key_release.sql"), group, key).await.context("release a key")?;
    Ok(lanes > 0)
}

async fn change(database: &Database, statement: &str, group: GroupId, key: &str) -> Result<i64> {
    let query = || database.query(statement).bind(group.0).bind(key.to_owned());
    let (tx, rows) = with_key(database, key, query, PATIENCE).await?;
    let lanes = rows.first().context("no answer")?.try_get(0)?;
    tx.commit().await?;
    tell_hosts(database, group).await;
    Ok(lanes)
}

/// How long a verb waits for settles that have its key locked.
const PATIENCE: Duration = Duration::from_secs(10);

/// How often it looks whether they have.
const LOOK: Duration = Duration::from_millis(20);

/// Runs a statement of functions/operate.sql in a transaction, again and again while somebody has the key locked: it must not
/// wait for that with the group's lock.
pub(super) async fn with_key<'q>(
    database: &Database,
    key: &str,
    query: impl Fn() -> Query<'q, Postgres, PgArguments>,
    patience: Duration,
) -> Result<(Transaction<'static, Postgres>, Vec<PgRow>)> {
    let until = Instant::now() + patience;
    loop {
        let mut tx = database.begin().await?;
        match query().fetch_all(&mut *tx).await {
            Ok(rows) => return Ok((tx, rows)),
            Err(error) if is_locked(&error) => ensure!(
                Instant::now() < until,
                "a settle has had key {key:?} locked for {} s; nothing was changed. Try again",
                patience.as_secs()
            ),
            Err(error) => return Err(error.into()),
        }
        drop(tx);
        sleep(LOOK).await;
    }
}

fn is_locked(error: &sqlx::Error) -> bool {
    error.as_database_error().is_some_and(|error| error.code().as_deref() == Some("55P03"))
}

const SKIPPED: &str = "an operator skipped it: its key waited for it";

/// Lets a key go on without the messages it waits for, and answers which. Those that were not dead letters become some.
pub async fn skip_key(database: &Database, (group, stream): (GroupId, StreamId), key: &str) -> Result<Vec<i64>> {
    let query = || database.query(include_str!("key_skip.sql")).bind(group.0).bind(key.to_owned());
    let (mut tx, rows) = with_key(database, key, query, PATIENCE).await.context("skip the head of a key")?;
    let (mut skipped, mut buried) = (Vec::new(), Vec::new());
    for row in &rows {
        let message_id = row.try_get(0)?;
        skipped.push(message_id);
        if row.try_get::<bool, _>(6)? {
            continue;
        }
        buried.push(Burial {
            message_id,
            attempts: row.try_get(1)?,
            class: FailureClass::Skipped.as_str(),
            error: SKIPPED,
            digest: row.try_get(2)?,
            dead_letter: row.try_get(5)?,
            mode: row.try_get(3)?,
            lane: row.try_get(4)?,
        });
    }
    bury(database, &mut tx, group.0, stream.0, &buried).await.context("keep what was skipped as a dead letter")?;
    tx.commit().await.context("commit the skip")?;
    tell_hosts(database, group).await;
    Ok(skipped)
}
