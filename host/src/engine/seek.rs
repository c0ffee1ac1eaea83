//! Sends a whole group to another position of its stream, in one transaction under the lock of its claims.
//!
//! Everything the group has under way is void from then on: its rows are gone, so that no settle of the old epoch finds
//! what it names, and the epoch is raised, so that hosts cut what they run for it. What comes again comes from attempt
//! 1, marked as a replay. Produce and its idempotency keys are not touched.
//!
//! ```text
//! lock the group -> wait for settles at its rows -> clear, raise the epoch -> place the cursor -> mark dead letters
//! ```

use anyhow::{Context, Result, anyhow, ensure};
use serde::Serialize;
use sqlx::{PgConnection, Postgres, Row, Transaction, postgres::PgRow};

use super::{GroupId, Step, StreamId, pause::tell_hosts, position::place_cursor};
use crate::{config::Start, database::Database};

/// What a seek did, or would do. The field names are a contract.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Seeked {
    pub group: String,
    pub dry_run: bool,
    /// The group had claimed up to here.
    pub position_before: i64,
    /// It stands here now: it begins with the first message after it.
    pub position: i64,
    /// The first message there is after the position. `None`: it is still to be produced.
    pub first_id: Option<i64>,
    /// RFC 3339, UTC.
    pub first_produced_at: Option<String>,
    /// Retention has dropped messages at or after the point that was asked for; `position` is the nearest there is.
    pub removed: bool,
    /// The stream's `max_lag` is shorter than the way back: maintenance will move the group on.
    pub beyond_max_lag: bool,
    /// It was sent back, and the stream has compacted keys: of these only the newest version comes again.
    pub survivors_only: bool,
    /// Deliveries that were cut.
    pub in_flight: i64,
    /// Given up: failed, and waiting for their next attempt.
    pub retrying: i64,
    /// Given up: waiting for their `deliver_after`.
    pub delayed: i64,
    /// Given up: waiting behind their key.
    pub deferred: i64,
    /// Dead letters whose messages come again; they stay, marked.
    pub dead_letters_replayed: i64,
    /// Dead letters that were being redriven, and are open again.
    pub dead_letters_reopened: i64,
    /// Raised by one.
    pub epoch: i64,
}

/// How long each step waits for another transaction. Claims and settles hold their locks for milliseconds; a round of
/// retention, which has a lock too, for as long as it waits for readers of the log.
const LOCK_TIMEOUT: &str = "set local lock_timeout = '5s'";

/// Sends a group to a position. Running hosts cut what they run for it, at once or with their next heartbeat.
///
/// Fails with nothing changed for a point that is still to come, and when somebody holds the group's rows for too long.
/// A deadlock with a settle fails it too, and it can be done again.
pub async fn seek(database: &Database, group: GroupId, stream: StreamId, name: &str, to: &Start) -> Result<Seeked> {
    let (tx, seeked) = move_to(database, group, stream, name, to).await?;
    tx.commit().await.with_context(|| format!("commit the seek of group {name:?}"))?;
    tell_hosts(database, group).await;
    Ok(seeked)
}

/// What [`seek`] would do, exactly: it is done, looked at, and rolled back.
pub async fn preview_seek(
    database: &Database,
    group: GroupId,
    stream: StreamId,
    name: &str,
    to: &Start,
) -> Result<Seeked> {
    let (tx, seeked) = move_to(database, group, stream, name, to).await?;
    tx.rollback().await.with_context(|| format!("undo the trial seek of group {name:?}"))?;
    Ok(Seeked { dry_run: true, ..seeked })
}

async fn move_to(
    database: &Database,
    group: GroupId,
    stream: StreamId,
    name: &str,
    to: &Start,
) -> Result<(Transaction<'static, Postgres>, Seeked)> {
    let mut tx = database.begin().await.context("begin to seek")?;
    check_point(database, &mut tx, stream, to).await?;
    if let Err(error) = lock(database, &mut tx, group).await {
        return Err(held_by(database, group, error).await.context(format!("lock group {name:?} for a seek")));
    }
    let query = database.query(include_str!("seek_clear.sql")).bind(group.0);
    let cleared =
        query.fetch_one(&mut *tx).await.with_context(|| format!("clear what group {name:?} has under way"))?;
    place_cursor(database, &mut tx, group, stream, to).await?;
    let query = database.query(include_str!("seek_mark.sql")).bind(group.0);
    let marked = query.execute(&mut *tx).await.context("mark the dead letters that come again")?.rows_affected();
    let before = cleared.try_get("claimed").context("read where the group stood")?;
    let point = look_at_point(database, &mut tx, (group, before), stream, to).await?;
    let seeked = read_seeked(name, &cleared, &point, marked).context("read what the seek did")?;
    Ok((tx, seeked))
}

/// Refuses what is surely a mistake: a group that was sent there would silently pass what is produced until then.
pub(super) async fn check_point(
    database: &Database,
    tx: &mut PgConnection,
    stream: StreamId,
    to: &Start,
) -> Result<()> {
    let (id, time) = id_and_time(to);
    let query = database.stream_query(include_str!("seek_check.sql"), stream.0).bind(time);
    let row = query.fetch_one(tx).await.context("look at the end of the log")?;
    let (last_id, is_future): (i64, bool) = (row.try_get("last_id")?, row.try_get("is_future")?);
    ensure!(!is_future, "that time is still to come; for what is produced from now on say latest");
    if let Some(id) = id {
        ensure!(id >= 1, "message ids begin at 1; for the first message there is say earliest");
        ensure!(
            id <= last_id.saturating_add(1),
            "the stream has no id {id} yet, its last is {last_id}; for what is produced from now on say latest"
        );
    }
    Ok(())
}

pub(super) fn id_and_time(to: &Start) -> (Option<i64>, Option<String>) {
    match to {
        Start::Earliest | Start::Latest => (None, None),
        Start::Id(id) => (Some(*id), None),
        Start::Time(time) => (None, Some(time.clone())),
    }
}

/// No claim of the group is made from here on, and no settle of it is half done.
pub(super) async fn lock(database: &Database, tx: &mut PgConnection, group: GroupId) -> Result<(), sqlx::Error> {
    lock_group(database, tx, group).await?;
    for statement in [include_str!("seek_claims.sql"), include_str!("seek_running.sql")] {
        database.query(statement).bind(group.0).execute(&mut *tx).await?;
    }
    Ok(())
}

/// No claim of the group is made from here on, and retention removes nothing. Waits a bounded time.
pub(super) async fn lock_group(database: &Database, tx: &mut PgConnection, group: GroupId) -> Result<(), sqlx::Error> {
    sqlx::query(LOCK_TIMEOUT).execute(&mut *tx).await?;
    let query = database.query(include_str!("seek_lock.sql")).bind(Step::Retention.lock()).bind(group.0);
    query.execute(tx).await.map(drop)
}

/// Names who holds what the seek waited for in vain, where that can be told.
pub(super) async fn held_by(database: &Database, group: GroupId, error: sqlx::Error) -> anyhow::Error {
    let timed_out = error.as_database_error().and_then(|error| error.code()).is_some_and(|code| code == "55P03");
    if !timed_out {
        return error.into();
    }
    let query = database.query(include_str!("seek_holder.sql")).bind(group.0).bind(Step::Retention.lock());
    let holders: String = match database.fetch_all(query).await {
        Ok(rows) => rows.first().and_then(|row| row.try_get(0).ok()).unwrap_or_default(),
        Err(_) => String::new(), // the error that led here is the one to tell
    };
    let holders =
        if holders.is_empty() { "another transaction".to_owned() } else { format!("database process {holders}") };
    anyhow::Error::new(error).context(format!("{holders} holds it for longer than 5 s; nothing was changed, try again"))
}

async fn look_at_point(
    database: &Database,
    tx: &mut PgConnection,
    (group, before): (GroupId, i64),
    stream: StreamId,
    to: &Start,
) -> Result<PgRow> {
    let (id, time) = id_and_time(to);
    let query = database.stream_query(include_str!("seek_point.sql"), stream.0);
    let query = query.bind(group.0).bind(id).bind(time).bind(before);
    query.fetch_optional(tx).await.context("look where the group stands")?.ok_or_else(|| anyhow!("the group is gone"))
}

fn read_seeked(name: &str, cleared: &PgRow, point: &PgRow, marked: u64) -> Result<Seeked> {
    Ok(Seeked {
        group: name.to_owned(),
        dry_run: false,
        position_before: cleared.try_get("claimed")?,
        position: point.try_get("claimed")?,
        first_id: point.try_get("first_id")?,
        first_produced_at: point.try_get("first_produced_at")?,
        removed: point.try_get("removed")?,
        beyond_max_lag: point.try_get("beyond_max_lag")?,
        survivors_only: point.try_get("survivors_only")?,
        in_flight: cleared.try_get("in_flight")?,
        retrying: cleared.try_get("retrying")?,
        delayed: cleared.try_get("delayed")?,
        deferred: cleared.try_get("deferred")?,
        dead_letters_replayed: i64::try_from(marked)?,
        dead_letters_reopened: cleared.try_get("reopened")?,
        epoch: cleared.try_get("epoch")?,
    })
}
