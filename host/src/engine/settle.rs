//! The end of deliveries: acknowledge, schedule again, dead-letter, and produce what the handlers asked for, in one
//! transaction. What is no longer ours is fenced: nothing of it is written, effects included.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::Arc,
};

use sqlx::{PgConnection, Row};

use super::{
    ClaimId, GroupHandle, HostId, Keyed, Lane, Source, Token, Verdict,
    claim::lanes,
    guest_sql::{OpenSql, Unfinished},
    produce::{BATCH_MAX, NewEntry, ProduceError, produce},
    units::milliseconds,
};
use crate::{
    config::OnDeadLetter,
    database::Database,
    handler::{Concurrency, NewMessage},
};

/// One ended delivery.
#[derive(Debug)]
pub struct Settlement {
    pub token: Token,
    pub message_id: i64,
    /// Counted before this delivery.
    pub failures: u32,
    pub verdict: Verdict,
    /// Committed with the acknowledgement; empty unless the verdict is `Done`.
    pub produced: Vec<NewMessage>,
    /// The component that served it.
    pub digest: Option<String>,
    /// What its key means for it.
    pub keyed: Option<Keyed>,
    /// Versions of its key that were passed over before it.
    pub skipped: u32,
    /// The transaction in which its handler ran SQL: it is settled there, alone, with [`settle_with_sql`].
    pub sql: Option<Box<OpenSql>>,
}

impl Settlement {
    /// A message whose first delivery ended without effects.
    pub fn plain(token: Token, message_id: i64, verdict: Verdict) -> Self {
        Self {
            token,
            message_id,
            failures: 0,
            verdict,
            produced: Vec::new(),
            digest: None,
            keyed: None,
            skipped: 0,
            sql: None,
        }
    }

    /// Whether another producer, with its transaction open, may hold it up: one of the same idempotency key, or of the
    /// same key where that is ordered or compacted.
    pub fn may_wait(&self) -> bool {
        self.produced.iter().any(|message| message.idempotency_key.is_some() || message.key.is_some())
    }

    /// How its group treats it.
    pub fn mode(&self) -> Concurrency {
        self.keyed.as_ref().map_or(Concurrency::Parallel, |keyed| keyed.mode)
    }

    /// What it leaves its key with, when it ends by this settle.
    pub fn leaves_key(&self, on_dead_letter: OnDeadLetter) -> LeavesKey {
        match (&self.verdict, self.mode()) {
            (Verdict::Again { failure: None, delay, .. }, mode) if delay.is_zero() && mode != Concurrency::Parallel => {
                LeavesKey::Deferred
            }
            (Verdict::Again { .. }, Concurrency::Ordered) => LeavesKey::Blocked,
            (Verdict::Dead { .. }, Concurrency::Ordered) => match on_dead_letter {
                OnDeadLetter::Block => LeavesKey::Blocked,
                OnDeadLetter::Skip => LeavesKey::GoingOn,
                OnDeadLetter::Rest => LeavesKey::Resting,
            },
            _ => LeavesKey::GoingOn,
        }
    }
}

/// How a key stands when a delivery of it is settled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeavesKey {
    /// Its next message may run.
    GoingOn,
    /// The message was handed back: it is the first of its key again.
    Deferred,
    /// It waits for the message.
    Blocked,
    /// Its messages die until an operator releases it.
    Resting,
}

/// What became of a batch of settlements.
#[derive(Debug)]
pub enum Settled {
    /// Committed, except the `fenced` ones (by position), which were no longer ours. The `superseded` ones had failed,
    /// but have lost to a newer version of their key, so they just ended.
    Committed { fenced: HashSet<usize>, superseded: HashSet<usize>, woken: Vec<String> },
    /// The host's lease has run out: nothing was written.
    LeaseLost,
    /// What a handler wanted to produce was refused, so nothing was written. Settle each by itself.
    Refused(ProduceError),
    /// What a handler's SQL had put off to the end was refused, so nothing was written. Says why.
    SqlRefused(String),
}

/// How long a settle waits for the lock of another producer, which may keep its transaction open for hours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Patience {
    /// For a transaction that several deliveries share, and for the first try of one alone. What is blocked leaves.
    Brief,
    /// For one that is known to be blocked: long enough to keep its place in the queue for the lock for a while.
    Long,
    /// For one whose handler would have to run again: what it has done is in this transaction, and lost with it.
    Longest,
    Endless,
}

impl Patience {
    fn set(self) -> Option<&'static str> {
        match self {
            Self::Brief => Some("set local lock_timeout = '20ms'"),
            Self::Long => Some("set local lock_timeout = '250ms'"),
            Self::Longest => Some("set local lock_timeout = '5s'"),
            Self::Endless => None,
        }
    }
}

/// Settles a batch in one transaction. Locks of other producers are only waited for briefly, but by one that settles alone.
///
/// An error leaves it open whether the transaction committed, if `is_ambiguous_commit` says so; then look at what is
/// still held. Dropping the future does too.
pub async fn settle(
    database: &Database,
    host: HostId,
    group: &GroupHandle,
    batch: &[Settlement],
) -> Result<Settled, sqlx::Error> {
    let patience = if batch.len() > 1 { Patience::Brief } else { Patience::Endless };
    settle_within(database, host, group, batch, patience).await
}

/// [`settle`] for one delivery, which does not wait for another producer's lock any longer than this: while it waits it has
/// a connection. The error then says that a lock was not available.
pub async fn settle_alone(
    database: &Database,
    host: HostId,
    group: &GroupHandle,
    one: &Settlement,
    patience: Patience,
) -> Result<Settled, sqlx::Error> {
    settle_within(database, host, group, std::slice::from_ref(one), patience).await
}

async fn settle_within(
    database: &Database,
    host: HostId,
    group: &GroupHandle,
    batch: &[Settlement],
    patience: Patience,
) -> Result<Settled, sqlx::Error> {
    let mut tx = database.begin().await?;
    let settled = Work { database, tx: &mut tx, host, group, batch, patience }.run().await?;
    if settled.is_to_commit(batch) {
        tx.commit().await?;
    }
    Ok(settled)
}

/// Settles a delivery inside the transaction in which its handler ran SQL: both are committed, or neither.
///
/// As [`settle`], but it waits for another producer's lock for 5 s at most, since it has a connection meanwhile. Whenever
/// this does not answer that it committed, or the future is dropped, the handler's SQL is undone, and the delivery must not
/// be settled as done any more.
pub async fn settle_with_sql(
    host: HostId,
    group: &GroupHandle,
    one: &Settlement,
    mut sql: Box<OpenSql>,
) -> Result<Settled, sqlx::Error> {
    match sql.finish().await {
        Ok(()) => {}
        Err(Unfinished::Refused(reason)) => {
            sql.roll_back();
            return Ok(Settled::SqlRefused(reason));
        }
        Err(Unfinished::Database(error)) => return Err(error),
    }
    let database = sql.database();
    let batch = std::slice::from_ref(one);
    let patience = Patience::Longest;
    let settled = Work { database: &database, tx: sql.connection(), host, group, batch, patience }.run().await?;
    if settled.is_to_commit(batch) {
        sql.commit().await?;
    } else {
        sql.roll_back();
    }
    Ok(settled)
}

impl Settled {
    /// Whether anything was written. What was fenced has written nothing, and what it produced must go.
    fn is_to_commit(&self, batch: &[Settlement]) -> bool {
        matches!(self, Self::Committed { fenced, .. } if fenced.len() < batch.len())
    }
}

/// What taking the messages out showed.
struct TakenOut {
    /// Positions of settlements that were no longer ours.
    lost: HashSet<usize>,
    exceptions: Exceptions,
}

/// What the exceptions said that were taken out, by claim and message: a batch may hold two deliveries of one message.
#[derive(Default)]
struct Exceptions(HashMap<(ClaimId, i64), Exception>);

#[derive(Clone, Copy, Default)]
struct Exception {
    /// The dead letter it was redriven from.
    dead_letter: Option<i64>,
    is_replay: bool,
}

impl Exceptions {
    fn of(&self, one: &Settlement) -> Option<Exception> {
        match one.token.source {
            Source::Log => None,
            Source::Exception => self.0.get(&(one.token.claim, one.message_id)).copied(),
        }
    }
}

struct Work<'a> {
    database: &'a Database,
    tx: &'a mut PgConnection,
    host: HostId,
    group: &'a GroupHandle,
    batch: &'a [Settlement],
    patience: Patience,
}

impl Work<'_> {
    /// Everything but the COMMIT.
    async fn run(&mut self) -> Result<Settled, sqlx::Error> {
        // By itself a settle waits for another producer of the same idempotency key, maybe for long. It does so before it
        // locks anything of ours: with its claim locked, the other messages of that claim, and so its group, would wait too.
        let waits = matches!(self.batch, [one] if one.may_wait());
        let mut early = Vec::new();
        if waits {
            match self.produce(&HashSet::new()).await? {
                Ok(woken) => early = woken,
                Err(refused) => return Ok(Settled::Refused(refused)),
            }
        }
        let fence = self.database.query(include_str!("fence.sql")).bind(self.host.0);
        if fence.fetch_optional(&mut *self.tx).await?.is_none() {
            return Ok(Settled::LeaseLost);
        }
        let fenced = self.take_out().await?;
        if fenced.lost.len() == self.batch.len() {
            return Ok(Settled::Committed { fenced: fenced.lost, superseded: HashSet::new(), woken: Vec::new() });
        }
        let superseded = self.superseded(&fenced.lost).await?;
        let ended: HashSet<usize> = fenced.lost.union(&superseded).copied().collect();
        self.schedule_again(&ended, &fenced.exceptions).await?;
        self.bury(&ended, &fenced.exceptions).await?;
        self.stop_keys(&ended).await?;
        self.forget_redriven(&superseded, &fenced.exceptions).await?;
        let woken = if waits {
            early
        } else {
            match self.produce(&fenced.lost).await? {
                Ok(woken) => woken,
                Err(refused) => return Ok(Settled::Refused(refused)),
            }
        };
        Ok(Settled::Committed { fenced: fenced.lost, superseded, woken })
    }

    async fn take_out(&mut self) -> Result<TakenOut, sqlx::Error> {
        let claims = self.pairs(Source::Log);
        let mut ours = HashSet::new();
        if !claims.0.is_empty() {
            let query = self.database.query(include_str!("settle_claims.sql"));
            let query = query.bind(self.group.id.0).bind(self.host.0).bind(claims.0).bind(claims.1);
            for row in query.fetch_all(&mut *self.tx).await? {
                ours.insert(ClaimId(row.try_get(0)?));
            }
        }
        let running = self.pairs(Source::Exception);
        let mut exceptions = Exceptions::default();
        if !running.0.is_empty() {
            let query = self.database.query(include_str!("settle_running.sql"));
            let query = query.bind(self.group.id.0).bind(self.host.0).bind(running.0).bind(running.1);
            for row in query.fetch_all(&mut *self.tx).await? {
                let exception = Exception { dead_letter: row.try_get(2)?, is_replay: row.try_get(3)? };
                exceptions.0.insert((ClaimId(row.try_get(0)?), row.try_get(1)?), exception);
            }
        }
        let is_lost = |one: &Settlement| match one.token.source {
            Source::Log => !ours.contains(&one.token.claim),
            Source::Exception => exceptions.of(one).is_none(),
        };
        let lost = self.batch.iter().enumerate().filter(|(_, one)| is_lost(one)).map(|(index, _)| index).collect();
        Ok(TakenOut { lost, exceptions })
    }

    /// Claims and messages of one source, as the two arrays of a statement.
    fn pairs(&self, source: Source) -> (Vec<i64>, Vec<i64>) {
        self.batch
            .iter()
            .filter(|one| one.token.source == source)
            .map(|one| (one.token.claim.0, one.message_id))
            .unzip()
    }

    /// Compacted messages that did not end well and have lost to a newer version: they end without a trace. One that was
    /// handed back goes back all the same: a turn passes it over, and counts it for the key's next delivery.
    async fn superseded(&mut self, lost: &HashSet<usize>) -> Result<HashSet<usize>, sqlx::Error> {
        let failed = |one: &Settlement| match (&one.keyed, &one.verdict) {
            (_, Verdict::Done) => None,
            (_, Verdict::Again { failure: None, delay, .. }) if delay.is_zero() => None,
            (Some(keyed), _) if keyed.is_compacted => Some(Arc::clone(&keyed.lane.key)),
            _ => None,
        };
        let (messages, keys): (Vec<i64>, Vec<Arc<str>>) =
            kept(self.batch, lost).filter_map(|one| Some((one.message_id, failed(one)?))).unzip();
        if messages.is_empty() {
            return Ok(HashSet::new());
        }
        let keys: Vec<&str> = keys.iter().map(|key| &**key).collect();
        let lock = self.database.query(include_str!("settle_lock_keys.sql")).bind(self.group.id.0).bind(&keys);
        lock.execute(&mut *self.tx).await?;
        let query = self.database.stream_query(include_str!("settle_lost.sql"), self.group.stream_id.0);
        let query = query.bind(&messages).bind(&keys);
        let rows = query.fetch_all(&mut *self.tx).await?;
        let gone = rows.iter().map(|row| row.try_get(0)).collect::<Result<HashSet<i64>, _>>()?;
        let is_gone = |one: &Settlement| failed(one).is_some() && gone.contains(&one.message_id);
        Ok(self.batch.iter().enumerate().filter(|(_, one)| is_gone(one)).map(|(index, _)| index).collect())
    }

    /// Ordered keys whose message comes again, or is dead, wait for it or rest.
    async fn stop_keys(&mut self, ended: &HashSet<usize>) -> Result<(), sqlx::Error> {
        let on_dead_letter = self.group.policy.on_dead_letter;
        let mut stops = Vec::new();
        for one in kept(self.batch, ended) {
            let rests = match one.leaves_key(on_dead_letter) {
                LeavesKey::Blocked => false,
                LeavesKey::Resting => true,
                LeavesKey::GoingOn | LeavesKey::Deferred => continue,
            };
            if let Some(keyed) = &one.keyed {
                stops.push(Stop { lane: &keyed.lane, message_id: one.message_id, rests });
            }
        }
        stop_keys(self.database, self.tx, self.group.id.0, self.host, &stops).await
    }

    async fn schedule_again(&mut self, lost: &HashSet<usize>, exceptions: &Exceptions) -> Result<(), sqlx::Error> {
        let mut rows = AgainRows::default();
        for one in kept(self.batch, lost) {
            if let Verdict::Again { delay, failures, failure } = &one.verdict {
                let Exception { dead_letter, is_replay } = exceptions.of(one).unwrap_or_default();
                rows.messages.push(one.message_id);
                rows.delays.push(milliseconds(*delay));
                rows.failures.push(i32::try_from(*failures).unwrap_or(i32::MAX));
                rows.classes.push(failure.as_ref().map(|failure| failure.class.as_str()));
                rows.errors.push(failure.as_ref().map(|failure| failure.error.as_str()));
                rows.digests.push(failure.as_ref().and(one.digest.as_deref()));
                rows.dead_letters.push(dead_letter);
                rows.replays.push(is_replay);
                rows.modes.push(one.mode().as_str());
                rows.lanes.push(one.keyed.as_ref().map_or(0, |keyed| keyed.lane.number));
                rows.skipped.push(i64::from(one.skipped));
                rows.deferred.push(one.leaves_key(self.group.policy.on_dead_letter) == LeavesKey::Deferred);
            }
        }
        if rows.messages.is_empty() {
            return Ok(());
        }
        let query =
            self.database.stream_query(include_str!("settle_again.sql"), self.group.stream_id.0).bind(self.group.id.0);
        let query =
            query.bind(&rows.messages).bind(&rows.delays).bind(&rows.failures).bind(&rows.classes).bind(&rows.errors);
        let query = query.bind(&rows.digests).bind(&rows.dead_letters).bind(&rows.replays);
        let query = query.bind(&rows.modes).bind(&rows.lanes).bind(&rows.skipped).bind(&rows.deferred);
        query.execute(&mut *self.tx).await.map(drop)
    }

    async fn bury(&mut self, lost: &HashSet<usize>, exceptions: &Exceptions) -> Result<(), sqlx::Error> {
        let mut dead = Vec::new();
        for one in kept(self.batch, lost) {
            if let Verdict::Dead { attempts, failure } = &one.verdict {
                dead.push(Burial {
                    message_id: one.message_id,
                    attempts: i32::try_from(*attempts).unwrap_or(i32::MAX),
                    class: failure.class.as_str(),
                    error: &failure.error,
                    digest: one.digest.as_deref(),
                    dead_letter: exceptions.of(one).and_then(|exception| exception.dead_letter),
                    mode: one.mode().as_str(),
                    lane: one.keyed.as_ref().map_or(0, |keyed| keyed.lane.number),
                });
            }
        }
        bury(self.database, self.tx, self.group.id.0, self.group.stream_id.0, &dead).await
    }

    async fn forget_redriven(
        &mut self,
        superseded: &HashSet<usize>,
        exceptions: &Exceptions,
    ) -> Result<(), sqlx::Error> {
        let done: Vec<i64> = self
            .batch
            .iter()
            .enumerate()
            .filter(|(index, one)| one.verdict == Verdict::Done || superseded.contains(index))
            .filter_map(|(_, one)| exceptions.of(one)?.dead_letter)
            .collect();
        if done.is_empty() {
            return Ok(());
        }
        let query = self.database.query(include_str!("settle_redriven.sql")).bind(self.group.id.0).bind(done);
        query.execute(&mut *self.tx).await.map(drop)
    }

    /// Produces what the deliveries that are still ours asked for, in their order, stream by stream.
    async fn produce(&mut self, lost: &HashSet<usize>) -> Result<Result<Vec<String>, ProduceError>, sqlx::Error> {
        let mut streams: BTreeMap<&str, Vec<NewEntry<'_>>> = BTreeMap::new();
        let batch = self.batch;
        for one in kept(batch, lost) {
            for message in &one.produced {
                streams.entry(message.stream.as_str()).or_default().push(NewEntry { message, deliver_after: None });
            }
        }
        if let Some(set) = self.patience.set()
            && batch.iter().any(Settlement::may_wait)
        {
            sqlx::query(set).execute(&mut *self.tx).await?;
        }
        for (stream, entries) in &streams {
            for entries in entries.chunks(BATCH_MAX) {
                match produce(self.database, self.tx, stream, entries).await {
                    Ok(_) => {}
                    Err(ProduceError::Database(error)) => return Err(error),
                    Err(refused) => return Ok(Err(refused)),
                }
            }
        }
        Ok(Ok(streams.into_keys().map(str::to_owned).collect()))
    }
}

/// The settlements that are still ours.
fn kept<'a>(batch: &'a [Settlement], lost: &HashSet<usize>) -> impl Iterator<Item = &'a Settlement> {
    batch.iter().enumerate().filter(|(index, _)| !lost.contains(index)).map(|(_, one)| one)
}

#[derive(Default)]
struct AgainRows<'a> {
    messages: Vec<i64>,
    delays: Vec<i64>,
    failures: Vec<i32>,
    classes: Vec<Option<&'a str>>,
    errors: Vec<Option<&'a str>>,
    digests: Vec<Option<&'a str>>,
    dead_letters: Vec<Option<i64>>,
    replays: Vec<bool>,
    modes: Vec<&'static str>,
    lanes: Vec<i16>,
    skipped: Vec<i64>,
    deferred: Vec<bool>,
}

/// One message on its way to the dead letters.
pub(super) struct Burial<'a> {
    pub message_id: i64,
    pub attempts: i32,
    pub class: &'a str,
    pub error: &'a str,
    pub digest: Option<&'a str>,
    pub dead_letter: Option<i64>,
    pub mode: &'a str,
    pub lane: i16,
}

/// Writes dead letters. The messages have been taken out of their claim or exception in the same transaction.
pub(super) async fn bury(
    database: &Database,
    tx: &mut PgConnection,
    group: i32,
    stream: i32,
    dead: &[Burial<'_>],
) -> Result<(), sqlx::Error> {
    if dead.is_empty() {
        return Ok(());
    }
    let query = database.stream_query(include_str!("settle_dead.sql"), stream).bind(group);
    let query = query.bind(dead.iter().map(|one| one.message_id).collect::<Vec<_>>());
    let query = query.bind(dead.iter().map(|one| one.attempts).collect::<Vec<_>>());
    let query = query.bind(dead.iter().map(|one| one.class).collect::<Vec<_>>());
    let query = query.bind(dead.iter().map(|one| one.error).collect::<Vec<_>>());
    let query = query.bind(dead.iter().map(|one| one.digest).collect::<Vec<_>>());
    let query = query.bind(dead.iter().map(|one| one.dead_letter).collect::<Vec<_>>());
    let query = query.bind(dead.iter().map(|one| one.mode).collect::<Vec<_>>());
    let query = query.bind(dead.iter().map(|one| one.lane).collect::<Vec<_>>());
    query.execute(tx).await.map(drop)
}

/// An ordered key that stops at a message.
pub(super) struct Stop<'a> {
    pub lane: &'a Lane,
    pub message_id: i64,
    pub rests: bool,
}

/// Makes keys of `host` wait for a message, or rest. Part of the transaction that takes the message out.
pub(super) async fn stop_keys(
    database: &Database,
    tx: &mut PgConnection,
    group: i32,
    host: HostId,
    stops: &[Stop<'_>],
) -> Result<(), sqlx::Error> {
    if stops.is_empty() {
        return Ok(());
    }
    let (keys, numbers) = lanes(stops.iter().map(|stop| stop.lane));
    let query = database.query(include_str!("settle_keys.sql")).bind(group).bind(host.0).bind(keys).bind(numbers);
    let query = query.bind(stops.iter().map(|stop| stop.message_id).collect::<Vec<_>>());
    query.bind(stops.iter().map(|stop| stop.rests).collect::<Vec<_>>()).execute(tx).await.map(drop)
}
