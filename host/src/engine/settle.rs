//! The end of deliveries: acknowledge, schedule again, dead-letter, and produce what the handlers asked for, in one
//! transaction. What is no longer ours is fenced: nothing of it is written, effects included.

use std::collections::{BTreeMap, HashMap, HashSet};

use sqlx::{PgConnection, Row};

use super::{
    ClaimId, GroupHandle, HostId, Source, Token, Verdict,
    lease::milliseconds,
    produce::{BATCH_MAX, NewEntry, ProduceError, produce},
};
use crate::{database::Database, handler::NewMessage};

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
}

impl Settlement {
    /// A message whose first delivery ended without effects.
    pub fn plain(token: Token, message_id: i64, verdict: Verdict) -> Self {
        Self { token, message_id, failures: 0, verdict, produced: Vec::new(), digest: None }
    }

    /// Whether another producer of the same idempotency key, with its transaction open, holds it up.
    pub fn may_wait(&self) -> bool {
        self.produced.iter().any(|message| message.idempotency_key.is_some())
    }
}

/// What became of a batch of settlements.
#[derive(Debug)]
pub enum Settled {
    /// Committed, except the `fenced` ones (by position), which were no longer ours.
    Committed { fenced: HashSet<usize>, woken: Vec<String> },
    /// The host's lease has run out: nothing was written.
    LeaseLost,
    /// What a handler wanted to produce was refused, so nothing was written. Settle each by itself.
    Refused(ProduceError),
}

/// How long a transaction that several deliveries share waits for another producer's lock. What is blocked leaves for
/// a transaction of its own.
const SHARED_LOCK_TIMEOUT: &str = "set local lock_timeout = '20ms'";

/// Settles a batch in one transaction. With `shared`, locks of other producers are only waited for briefly.
///
/// An error leaves it open whether the transaction committed, if `is_ambiguous_commit` says so; then look at what is
/// still held. Dropping the future does too.
pub async fn settle(
    database: &Database,
    host: HostId,
    group: &GroupHandle,
    batch: &[Settlement],
) -> Result<Settled, sqlx::Error> {
    let mut tx = database.pool.begin().await?;
    let mut work = Work { database, tx: &mut tx, host, group, batch };
    // By itself a settle waits for another producer of the same idempotency key, maybe for long. It does so before it
    // locks anything of ours: with its claim locked, the other messages of that claim, and so its group, would wait too.
    let waits = matches!(batch, [one] if one.may_wait());
    let mut early = Vec::new();
    if waits {
        match work.produce(&HashSet::new()).await? {
            Ok(woken) => early = woken,
            Err(refused) => return Ok(Settled::Refused(refused)),
        }
    }
    let fence = database.query(include_str!("fence.sql")).bind(host.0);
    if fence.fetch_optional(&mut *work.tx).await?.is_none() {
        return Ok(Settled::LeaseLost);
    }
    let is_plain =
        |one: &Settlement| one.token.source == Source::Log && one.verdict == Verdict::Done && one.produced.is_empty();
    if batch.iter().all(is_plain) {
        // Losing a plain settle in a crash of the database only means a redelivery.
        sqlx::query("set local synchronous_commit = off").execute(&mut *work.tx).await?;
    }
    let fenced = work.take_out().await?;
    if waits && !fenced.lost.is_empty() {
        // It is no longer ours, and what it produced is undone with this transaction.
        tx.rollback().await?;
        return Ok(Settled::Committed { fenced: fenced.lost, woken: Vec::new() });
    }
    work.schedule_again(&fenced.lost, &fenced.redriven).await?;
    work.bury(&fenced.lost, &fenced.redriven).await?;
    work.forget_redriven(&fenced.redriven).await?;
    let woken = if waits {
        early
    } else {
        match work.produce(&fenced.lost).await? {
            Ok(woken) => woken,
            Err(refused) => return Ok(Settled::Refused(refused)),
        }
    };
    tx.commit().await?;
    Ok(Settled::Committed { fenced: fenced.lost, woken })
}

struct Work<'a> {
    database: &'a Database,
    tx: &'a mut PgConnection,
    host: HostId,
    group: &'a GroupHandle,
    batch: &'a [Settlement],
}

/// What taking the messages out showed.
struct TakenOut {
    /// Positions of settlements that were no longer ours.
    lost: HashSet<usize>,
    /// Message to the dead letter it was redriven from, and whether it is a replay.
    redriven: HashMap<i64, (Option<i64>, bool)>,
}

impl Work<'_> {
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
        let mut redriven = HashMap::new();
        if !running.0.is_empty() {
            let query = self.database.query(include_str!("settle_running.sql"));
            let query = query.bind(self.group.id.0).bind(self.host.0).bind(running.0).bind(running.1);
            for row in query.fetch_all(&mut *self.tx).await? {
                redriven.insert(row.try_get(0)?, (row.try_get(1)?, row.try_get(2)?));
            }
        }
        let is_lost = |one: &Settlement| match one.token.source {
            Source::Log => !ours.contains(&one.token.claim),
            Source::Exception => !redriven.contains_key(&one.message_id),
        };
        let lost = self.batch.iter().enumerate().filter(|(_, one)| is_lost(one)).map(|(index, _)| index).collect();
        Ok(TakenOut { lost, redriven })
    }

    /// Claims and messages of one source, as the two arrays of a statement.
    fn pairs(&self, source: Source) -> (Vec<i64>, Vec<i64>) {
        self.batch
            .iter()
            .filter(|one| one.token.source == source)
            .map(|one| (one.token.claim.0, one.message_id))
            .unzip()
    }

    async fn schedule_again(
        &mut self,
        lost: &HashSet<usize>,
        redriven: &HashMap<i64, (Option<i64>, bool)>,
    ) -> Result<(), sqlx::Error> {
        let mut rows = AgainRows::default();
        for one in kept(self.batch, lost) {
            if let Verdict::Again { delay, failures, failure } = &one.verdict {
                let (dead_letter, replay) = redriven.get(&one.message_id).copied().unwrap_or_default();
                rows.messages.push(one.message_id);
                rows.delays.push(milliseconds(*delay));
                rows.failures.push(i32::try_from(*failures).unwrap_or(i32::MAX));
                rows.classes.push(failure.as_ref().map(|failure| failure.class.as_str()));
                rows.errors.push(failure.as_ref().map(|failure| failure.error.as_str()));
                rows.digests.push(failure.as_ref().and(one.digest.as_deref()));
                rows.dead_letters.push(dead_letter);
                rows.replays.push(replay);
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
        query.execute(&mut *self.tx).await.map(drop)
    }

    async fn bury(
        &mut self,
        lost: &HashSet<usize>,
        redriven: &HashMap<i64, (Option<i64>, bool)>,
    ) -> Result<(), sqlx::Error> {
        let mut dead = Vec::new();
        for one in kept(self.batch, lost) {
            if let Verdict::Dead { attempts, failure } = &one.verdict {
                dead.push(Burial {
                    message_id: one.message_id,
                    attempts: i32::try_from(*attempts).unwrap_or(i32::MAX),
                    class: failure.class.as_str(),
                    error: &failure.error,
                    digest: one.digest.as_deref(),
                    dead_letter: redriven.get(&one.message_id).and_then(|(dead_letter, _)| *dead_letter),
                });
            }
        }
        bury(self.database, self.tx, self.group.id.0, self.group.stream_id.0, &dead).await
    }

    async fn forget_redriven(&mut self, redriven: &HashMap<i64, (Option<i64>, bool)>) -> Result<(), sqlx::Error> {
        let is_done = |one: &&Settlement| one.verdict == Verdict::Done;
        let done: Vec<i64> = self
            .batch
            .iter()
            .filter(is_done)
            .filter_map(|one| redriven.get(&one.message_id).and_then(|(dead_letter, _)| *dead_letter))
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
        if batch.len() > 1 && batch.iter().any(Settlement::may_wait) {
            sqlx::query(SHARED_LOCK_TIMEOUT).execute(&mut *self.tx).await?;
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
}

/// One message on its way to the dead letters.
pub(super) struct Burial<'a> {
    pub message_id: i64,
    pub attempts: i32,
    pub class: &'a str,
    pub error: &'a str,
    pub digest: Option<&'a str>,
    pub dead_letter: Option<i64>,
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
    query.execute(tx).await.map(drop)
}
