//! One turn of one group: settle what ended plainly, claim what comes next. The algorithm itself is
//! `functions/claim.sql`; here its answer becomes deliveries.

use std::sync::Arc;

use anyhow::{Result, bail};
use sqlx::{Row, postgres::PgRow};

use super::{ClaimId, GroupHandle, GroupId, HostId};
use crate::{database::Database, handler::Message};

/// How much a turn may bring.
#[derive(Clone, Copy, Debug, Default)]
pub struct Wanted {
    /// Fresh messages at most.
    pub messages: u32,
    /// Payload bytes of fresh messages at most, but always one message.
    pub bytes: u64,
    /// Due retries at most: only as many as there are free slots, since they are never prefetched.
    pub retries: u32,
}

/// What a turn brought.
#[derive(Debug)]
pub struct Turn {
    pub note: Note,
    /// Of the claims that were to be settled, those that still were ours.
    pub settled: Vec<ClaimId>,
    /// The cursor moved, or gaps delivered: there may be more.
    pub advanced: bool,
    /// In id order.
    pub claimed: Vec<Claimed>,
}

/// How a turn went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Note {
    /// The group's claims were ours to make.
    Claimed,
    /// Only settling was asked for.
    Settled,
    /// Another host claims just now; settled all the same.
    Busy,
    Paused,
    /// The group was seeked: everything claimed before is void.
    EpochRaised,
    /// The group no longer exists.
    Gone,
    /// The host's lease has run out: nothing was settled or claimed.
    LeaseLost,
}

/// A message this host now answers for.
#[derive(Debug)]
pub struct Claimed {
    pub token: Token,
    /// Failures counted so far.
    pub failures: u32,
    pub message: Message,
}

/// What a settle names to prove that the delivery is still its host's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Token {
    pub claim: ClaimId,
    pub source: Source,
}

/// Which row holds a delivery.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Source {
    /// An id in `claim.pending`.
    Log,
    /// A `running` row of `exception`.
    Exception,
}

/// Runs one turn: settles `finished`, the claims that ended `done` to the last message without effects, and claims.
///
/// Dropping the future leaves it open whether the turn took place; reconcile then.
pub async fn claim(
    database: &Database,
    host: HostId,
    group: &GroupHandle,
    finished: &[ClaimId],
    wanted: Wanted,
) -> Result<Turn, sqlx::Error> {
    let filter = &group.filter;
    let query = database
        .stream_query(include_str!("claim.sql"), group.stream_id.0)
        .bind(group.id.0)
        .bind(host.0)
        .bind(group.epoch)
        .bind(finished.iter().map(|claim| claim.0).collect::<Vec<_>>())
        .bind(i32::try_from(wanted.messages).unwrap_or(i32::MAX))
        .bind(i64::try_from(wanted.bytes).unwrap_or(i64::MAX))
        .bind(i32::try_from(wanted.retries).unwrap_or(i32::MAX))
        .bind(&filter.routing_keys)
        .bind(&filter.keys)
        .bind(&filter.not_keys)
        .bind(&filter.headers);
    let rows = database.fetch_all(query).await?;
    read_turn(&rows, group).map_err(|error| sqlx::Error::Decode(error.into()))
}

fn read_turn(rows: &[PgRow], group: &GroupHandle) -> Result<Turn> {
    let mut turn =
        Turn { note: Note::Gone, settled: Vec::new(), advanced: false, claimed: Vec::with_capacity(rows.len()) };
    for row in rows {
        match row.try_get::<i16, _>(0)? {
            0 => {
                turn.note = note(row.try_get(1)?)?;
                turn.settled = row.try_get::<Vec<i64>, _>(2)?.into_iter().map(ClaimId).collect();
                let (frontier, cursor): (Option<i64>, Option<i64>) = (row.try_get(3)?, row.try_get(5)?);
                turn.advanced |= frontier.is_some() && frontier > cursor;
            }
            1 => turn.claimed.push(read_message(row, group, Source::Log)?),
            2 => turn.claimed.push(read_message(row, group, Source::Exception)?),
            other => bail!("claim answered a row of unknown source {other}"),
        }
    }
    turn.advanced |= turn.claimed.iter().any(|claimed| claimed.token.source == Source::Log);
    turn.claimed.sort_by_key(|claimed| claimed.message.id);
    Ok(turn)
}

fn note(text: &str) -> Result<Note> {
    Ok(match text {
        "claimed" => Note::Claimed,
        "settled" => Note::Settled,
        "busy" => Note::Busy,
        "paused" => Note::Paused,
        "epoch" => Note::EpochRaised,
        "gone" => Note::Gone,
        "lease_lost" => Note::LeaseLost,
        other => bail!("claim answered the unknown note {other:?}"),
    })
}

/// Columns are read by position: this runs for every message.
fn read_message(row: &PgRow, group: &GroupHandle, source: Source) -> Result<Claimed> {
    let failures = u32::try_from(row.try_get::<i32, _>(13)?)?;
    let headers = match row.try_get::<Option<&str>, _>(9)? {
        None => Vec::new(),
        Some(text) => serde_json::from_str::<std::collections::BTreeMap<String, String>>(text)?.into_iter().collect(),
    };
    Ok(Claimed {
        token: Token { claim: ClaimId(row.try_get(4)?), source },
        failures,
        message: Message {
            id: row.try_get(5)?,
            stream: Arc::clone(&group.stream),
            group: Arc::clone(&group.name),
            key: row.try_get(6)?,
            rank: row.try_get(7)?,
            routing_key: row.try_get(8)?,
            headers,
            content_type: row.try_get(10)?,
            payload: row.try_get(11)?,
            produced_at_ms: row.try_get(12)?,
            attempt: failures + 1,
            max_attempts: group.policy.retry.max_attempts,
            timeout: group.policy.timeout,
            replay: row.try_get(15)?,
            redriven: row.try_get(14)?,
            skipped: 0,
            gap_since: None,
        },
    })
}

/// Which of these groups have something to do.
pub async fn groups_with_work(database: &Database, groups: &[GroupId]) -> Result<Vec<GroupId>, sqlx::Error> {
    let query = database
        .query(include_str!("groups_with_work.sql"))
        .bind(groups.iter().map(|group| group.0).collect::<Vec<_>>());
    let rows = database.fetch_all(query).await?;
    rows.iter().map(|row| row.try_get(0).map(GroupId)).collect()
}

/// Tells other hosts, which poll anyway, that a stream has new messages.
pub async fn hint(database: &Database, stream: &str) -> Result<(), sqlx::Error> {
    let query = database.query(include_str!("hint.sql")).bind(database.schema.channel()).bind(stream);
    database.fetch_all(query).await.map(drop)
}

/// Whether any of these groups has messages left, in whatever state: for a run that ends when all is done.
pub async fn has_unfinished(database: &Database, groups: &[String]) -> Result<bool, sqlx::Error> {
    for row in database.fetch_all(database.query(include_str!("unfinished.sql")).bind(groups)).await? {
        let (busy, stream, claimed): (bool, i32, i64) = (row.try_get(0)?, row.try_get(1)?, row.try_get(2)?);
        if busy {
            return Ok(true);
        }
        let log = database.stream_query(include_str!("unfinished_log.sql"), stream).bind(claimed);
        if database.fetch_all(log).await?[0].try_get(0)? {
            return Ok(true);
        }
    }
    Ok(false)
}
