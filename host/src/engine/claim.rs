//! One turn of one group: settle what ended plainly, claim what comes next. The algorithm itself is
//! `functions/claim.sql`; here its answer becomes deliveries.

use std::{collections::HashSet, sync::Arc};

use anyhow::{Context, Result, bail};
use sqlx::{Row, postgres::PgRow};

use super::{ClaimId, GroupHandle, GroupId, HostId};
use crate::{
    config::OnDeadLetter,
    database::Database,
    handler::{Concurrency, Message},
};

/// What a turn is asked to do.
#[derive(Debug, Default)]
pub struct Request {
    pub done: Done,
    /// Keys of this host with nothing left to run here: each gets what is deferred behind it, or is let go.
    pub idle: Vec<Lane>,
    /// Keys of this host with enough to run here.
    pub full: Vec<Lane>,
    /// Messages of one key at most.
    pub lane_max: u32,
    pub wanted: Wanted,
}

/// Deliveries that ended `done`, without effects.
#[derive(Clone, Debug, Default)]
pub struct Done {
    /// Claims of which every message ended so.
    pub claims: Vec<ClaimId>,
    /// Messages of other claims.
    pub messages: Vec<(ClaimId, i64)>,
    /// Running exceptions.
    pub exceptions: Vec<(ClaimId, i64)>,
    /// Keyed ones are among them, so a crash of the database must not undo it.
    pub is_durable: bool,
}

impl Done {
    pub fn is_empty(&self) -> bool {
        self.claims.is_empty() && self.messages.is_empty() && self.exceptions.is_empty()
    }
}

/// How much a turn may bring.
#[derive(Clone, Copy, Debug, Default)]
pub struct Wanted {
    /// Fresh messages at most, those that were deferred behind their key included.
    pub messages: u32,
    /// Payload bytes at most of either, but always one message.
    pub bytes: u64,
    /// Due retries at most: only as many as there are free slots, since they are never prefetched.
    pub retries: u32,
}

impl Wanted {
    pub fn is_nothing(self) -> bool {
        self.messages == 0 && self.retries == 0
    }
}

/// What a turn brought.
#[derive(Debug)]
pub struct Turn {
    pub note: Note,
    /// Of the claims that were to be settled, wholly or in part, those that still were ours.
    pub settled: HashSet<ClaimId>,
    /// Of the exceptions that were to be settled, those that still were ours.
    pub ran: HashSet<i64>,
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
    /// `None`: its key, if it has one, changes nothing.
    pub keyed: Option<Keyed>,
    pub message: Message,
}

/// What a key means for a delivery.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Keyed {
    pub lane: Lane,
    /// As the group treats it.
    pub mode: Concurrency,
    pub is_compacted: bool,
}

/// One key of a group, or one lane of a key with `shards`: deliveries of a lane run one at a time.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Lane {
    pub key: Arc<str>,
    pub number: i16,
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

/// Runs one turn: settles what is done, lets keys go, and claims.
///
/// Dropping the future leaves it open whether the turn took place; reconcile then.
pub async fn claim(
    database: &Database,
    host: HostId,
    group: &GroupHandle,
    request: &Request,
) -> Result<Turn, sqlx::Error> {
    let (filter, policy, wanted) = (&group.filter, &group.policy, request.wanted);
    let (done_claims, done_ids) = pairs(&request.done.messages);
    let (ran_claims, ran_ids) = pairs(&request.done.exceptions);
    let (idle_keys, idle_lanes) = lanes(&request.idle);
    let (full_keys, full_lanes) = lanes(&request.full);
    let query = database
        .stream_query(include_str!("claim.sql"), group.stream_id.0)
        .bind(group.id.0)
        .bind(host.0)
        .bind(group.epoch)
        .bind(request.done.claims.iter().map(|claim| claim.0).collect::<Vec<_>>())
        .bind(done_claims)
        .bind(done_ids)
        .bind(ran_claims)
        .bind(ran_ids)
        .bind(request.done.is_durable)
        .bind(idle_keys)
        .bind(idle_lanes)
        .bind(full_keys)
        .bind(full_lanes)
        .bind(i32::try_from(request.lane_max).unwrap_or(i32::MAX))
        .bind(i32::try_from(wanted.messages).unwrap_or(i32::MAX))
        .bind(i64::try_from(wanted.bytes).unwrap_or(i64::MAX))
        .bind(i32::try_from(wanted.retries).unwrap_or(i32::MAX))
        .bind(group.concurrency_override())
        .bind(policy.on_dead_letter == OnDeadLetter::Skip)
        .bind(&filter.routing_keys)
        .bind(&filter.keys)
        .bind(&filter.not_keys)
        .bind(&filter.headers)
        .bind(policy.allow.sql_role.is_some());
    let rows = database.fetch_all(query).await?;
    read_turn(&rows, group).map_err(|error| sqlx::Error::Decode(error.into()))
}

fn pairs(deliveries: &[(ClaimId, i64)]) -> (Vec<i64>, Vec<i64>) {
    deliveries.iter().map(|(claim, message)| (claim.0, *message)).unzip()
}

pub(super) fn lanes<'a>(lanes: impl IntoIterator<Item = &'a Lane>) -> (Vec<&'a str>, Vec<i16>) {
    lanes.into_iter().map(|lane| (&*lane.key, lane.number)).unzip()
}

fn read_turn(rows: &[PgRow], group: &GroupHandle) -> Result<Turn> {
    let mut turn = Turn {
        note: Note::Gone,
        settled: HashSet::new(),
        ran: HashSet::new(),
        advanced: false,
        claimed: Vec::with_capacity(rows.len()),
    };
    for row in rows {
        match row.try_get::<i16, _>(0)? {
            0 => {
                turn.note = note(row.try_get(1)?)?;
                turn.settled = row.try_get::<Vec<i64>, _>(2)?.into_iter().map(ClaimId).collect();
                turn.ran = row.try_get::<Vec<i64>, _>(3)?.into_iter().collect();
                let (frontier, cursor): (Option<i64>, Option<i64>) = (row.try_get(4)?, row.try_get(6)?);
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
    let failures = u32::try_from(row.try_get::<i32, _>(14)?)?;
    let headers = match row.try_get::<Option<&str>, _>(10)? {
        None => Vec::new(),
        Some(text) => serde_json::from_str::<std::collections::BTreeMap<String, String>>(text)?.into_iter().collect(),
    };
    let key: Option<String> = row.try_get(7)?;
    let rank: Option<i64> = row.try_get(8)?;
    let mode = Concurrency::named(row.try_get(17)?).context("claim answered an unknown concurrency")?;
    let keyed = match &key {
        Some(key) if mode != Concurrency::Parallel || rank.is_some() => Some(Keyed {
            lane: Lane { key: key.as_str().into(), number: row.try_get(18)? },
            mode,
            is_compacted: rank.is_some(),
        }),
        _ => None,
    };
    Ok(Claimed {
        token: Token { claim: ClaimId(row.try_get(5)?), source },
        failures,
        keyed,
        message: Message {
            id: row.try_get(6)?,
            stream: Arc::clone(&group.stream),
            group: Arc::clone(&group.name),
            key,
            rank,
            routing_key: row.try_get(9)?,
            headers,
            content_type: row.try_get(11)?,
            payload: row.try_get(12)?,
            produced_at_ms: row.try_get(13)?,
            attempt: failures + 1,
            max_attempts: group.policy.retry.max_attempts,
            timeout: group.policy.timeout,
            replay: row.try_get(16)?,
            redriven: row.try_get(15)?,
            skipped: u32::try_from(row.try_get::<i64, _>(19)?).unwrap_or(u32::MAX),
            gap_since: row.try_get(20)?,
            sql: None,
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
