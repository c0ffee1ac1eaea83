//! Settles that run beside the group's loop, which claims meanwhile: those that many share, two at a time, and those that
//! wait for other producers or bring a transaction of their own.

use std::{
    collections::{HashSet, hash_map::RandomState},
    hash::BuildHasher,
    sync::Arc,
    time::Duration,
};

use tokio::{
    sync::Semaphore,
    task::{JoinError, JoinSet},
};
use tokio_util::sync::CancellationToken;

use super::{
    answered,
    settling::{LOCK_NOT_AVAILABLE, has_sqlstate},
};
use crate::{
    database::{Database, DatabaseError},
    engine::{GroupHandle, HostId, Patience, Settled, Settlement, Verdict, settle, settle_alone, settle_with_sql},
};

/// Most transactions that one group settles in at the same time, when deliveries are settled one by one.
const SOLO_MAX: usize = 4;

/// Most of them that wait for another producer's lock: they take turns, so that each has a connection only now and then.
const BLOCKED_MAX: usize = 2;

/// Most transactions that settle many deliveries each, none of which is in a lane: while one waits for its commit to be
/// durable, the other one works.
const SHARED_MAX: usize = 2;

/// After two were in each other's way so many run one at a time.
const LONELY: u32 = 16;

/// Settles that run beside the group's loop.
#[derive(Debug, Default)]
pub struct Solo {
    tasks: JoinSet<SettleEnd>,
    /// Invariant: at most [`SHARED_MAX`], no two of which touch the same: they would wait for each other.
    shared: JoinSet<SettleEnd>,
    touched: Touched,
    /// No other begins before all that run have ended: too much of what has ended meets them.
    meets: bool,
    /// Two have run at the same time since none ran.
    had_company: bool,
    /// How many are to run with no other beside them, since two were in each other's way.
    lonely: u32,
    places: Arc<Places>,
    ended: Vec<SettleEnd>,
    has_panicked: bool,
}

/// What the shared transactions hold locked: claims, and keys that they produce to.
#[derive(Debug, Default)]
struct Touched {
    hashes: HashSet<u64>,
    hasher: RandomState,
}

impl Touched {
    fn claim(&self, one: &Settlement) -> u64 {
        self.hasher.hash_one(one.token.claim)
    }

    /// All that one settlement touches.
    fn all(&self, one: &Settlement) -> impl Iterator<Item = u64> {
        let claim = self.claim(one);
        let produced = one.produced.iter().flat_map(|message| {
            let key = message.key.as_deref().map(|key| self.hasher.hash_one((&message.stream, key)));
            let once = message.idempotency_key.as_deref().map(|once| self.hasher.hash_one((once, &message.stream)));
            [key, once].into_iter().flatten()
        });
        std::iter::once(claim).chain(produced)
    }

    fn add(&mut self, batch: &[Settlement]) {
        let hashes: Vec<u64> = batch.iter().flat_map(|one| self.all(one)).collect();
        self.hashes.extend(hashes);
    }

    fn remove(&mut self, batch: &[Settlement]) {
        let hashes: Vec<u64> = batch.iter().flat_map(|one| self.all(one)).collect();
        for hash in hashes {
            self.hashes.remove(&hash);
        }
    }
}

/// A settle that has ended.
#[derive(Debug)]
pub enum SettleEnd {
    Alone(Settlement, Result<Settled, DatabaseError>),
    /// Many in one transaction.
    Shared(Vec<Settlement>, Result<Settled, DatabaseError>),
}

/// What keeps settles that run beside the loop from taking all connections.
#[derive(Debug)]
struct Places {
    free: Semaphore,
    /// Apart, so that what another producer's open transaction holds up is in nobody's way, however much of it there is.
    blocked: Semaphore,
    /// Those that are blocked end unsettled: a comparison waits until no settle is under way, and must not wait for others'
    /// transactions.
    aside: CancellationToken,
}

impl Default for Places {
    fn default() -> Self {
        Self { free: Semaphore::new(SOLO_MAX), blocked: Semaphore::new(BLOCKED_MAX), aside: CancellationToken::new() }
    }
}

impl Places {
    async fn settle(
        &self,
        database: &Database,
        host: HostId,
        group: &GroupHandle,
        one: &Settlement,
    ) -> Result<Settled, DatabaseError> {
        let take = async |places| Semaphore::acquire(places).await.expect("it is never closed");
        let place = take(&self.free).await;
        let mut result = settle_alone(database, host, group, one, Patience::Brief).await;
        drop(place);
        while result.as_ref().is_err_and(|error| has_sqlstate(error, &[LOCK_NOT_AVAILABLE])) {
            let place = self.aside.run_until_cancelled(take(&self.blocked)).await;
            let Some(_place) = place else { break };
            result = settle_alone(database, host, group, one, Patience::Long).await;
        }
        result
    }
}

impl Solo {
    pub fn is_empty(&self) -> bool {
        self.tasks.is_empty() && self.shared.is_empty() && self.ended.is_empty() && !self.has_panicked
    }

    /// How many deliveries are being settled each by itself, or wait for their turn.
    pub fn alone(&self) -> usize {
        self.tasks.len()
    }

    /// How many transactions settle many each.
    pub fn shared(&self) -> usize {
        self.shared.len()
    }

    /// Whether one more may.
    pub fn may_share(&self) -> bool {
        self.shared.is_empty() || (self.shared.len() < SHARED_MAX && !self.meets && self.lonely == 0)
    }

    /// Too little is apart from what is being settled, or something was left behind too often: nothing is shared before
    /// all of that has ended.
    pub fn wait_for_shared(&mut self) {
        self.meets = !self.shared.is_empty();
    }

    /// One was blocked. Whether by the other one, as far as anybody can tell: then it is tried again with no other beside
    /// it, and the next ones run like that. A stream's ordered keys, if there are many, are locked all at once, so that two
    /// batches with other keys each may still meet.
    pub fn was_in_its_own_way(&mut self) -> bool {
        if !self.had_company {
            return false;
        }
        self.lonely = LONELY;
        self.meets = !self.shared.is_empty();
        true
    }

    /// Whether no shared transaction settles messages of its claim.
    pub fn is_of_another_claim(&self, one: &Settlement) -> bool {
        !self.touched.hashes.contains(&self.touched.claim(one))
    }

    /// Whether no shared transaction touches what this one does.
    pub fn is_apart(&self, one: &Settlement) -> bool {
        self.touched.hashes.is_empty() || !self.touched.all(one).any(|hash| self.touched.hashes.contains(&hash))
    }

    /// Waits until one has ended; for ever, when none runs.
    pub async fn changed(&mut self) {
        let joined = tokio::select! {
            Some(joined) = self.tasks.join_next() => joined,
            Some(joined) = self.shared.join_next() => joined,
            else => std::future::pending().await,
        };
        self.put(joined);
    }

    fn put(&mut self, joined: Result<SettleEnd, JoinError>) {
        match joined {
            Ok(ended) => {
                if let SettleEnd::Shared(batch, _) = &ended {
                    self.touched.remove(batch);
                    self.meets &= !self.shared.is_empty();
                }
                self.ended.push(ended);
            }
            Err(error) if error.is_cancelled() => {} // with the process
            Err(error) => {
                tracing::error!("a settle has panicked: {error}");
                self.has_panicked = true;
            }
        }
    }

    /// Whether a settle has panicked, which none does: its deliveries are gone with it.
    pub fn has_panicked(&self) -> bool {
        self.has_panicked
    }

    /// Lets those that wait for other producers end, so that soon none is left.
    pub fn stand_aside(&self) {
        self.places.aside.cancel();
    }

    /// Settles many in one transaction; each [`Solo::is_apart`].
    pub fn start_shared(&mut self, database: &Database, host: HostId, group: &GroupHandle, batch: Vec<Settlement>) {
        let (database, group) = (database.clone(), group.clone());
        self.touched.add(&batch);
        self.had_company = !self.shared.is_empty();
        self.lonely = self.lonely.saturating_sub(1);
        self.shared.spawn(async move {
            let result = answered(settle(&database, host, &group, &batch)).await;
            SettleEnd::Shared(batch, result)
        });
    }

    /// Settles one in a transaction of its own, which may wait.
    pub fn start(&mut self, database: &Database, host: HostId, group: &GroupHandle, mut one: Settlement) {
        if self.places.aside.is_cancelled() {
            self.places = Arc::default();
        }
        let (database, group, places) = (database.clone(), group.clone(), Arc::clone(&self.places));
        self.tasks.spawn(async move {
            let result = match one.sql.take() {
                // It has a connection already.
                Some(sql) => {
                    let result = settle_with_sql(host, &group, &one, sql).await;
                    if result.is_err() {
                        one = without_effects(one);
                    }
                    result
                }
                None => places.settle(&database, host, &group, &one).await,
            };
            SettleEnd::Alone(one, result)
        });
    }

    pub fn take_ended(&mut self) -> Vec<SettleEnd> {
        while let Some(joined) = self.tasks.try_join_next().or_else(|| self.shared.try_join_next()) {
            self.put(joined);
        }
        std::mem::take(&mut self.ended)
    }
}

/// Its transaction is gone, with an answer that was lost or before it was committed. If it is still ours, it was not
/// committed and is handed back: settled as done it would lose what its handler did.
fn without_effects(one: Settlement) -> Settlement {
    let verdict = Verdict::Again { delay: Duration::ZERO, failures: one.failures, failure: None };
    Settlement { verdict, produced: Vec::new(), ..one }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        engine::{ClaimId, Source, Token},
        handler::NewMessage,
    };

    /// A delivery of a claim that produced one message to a stream: with a key, or with an idempotency key.
    fn one(claim: i64, stream: &str, key: Option<&str>, once: Option<&str>) -> Settlement {
        let token = Token { claim: ClaimId(claim), source: Source::Log };
        let produced = NewMessage {
            stream: stream.to_owned(),
            key: key.map(str::to_owned),
            idempotency_key: once.map(str::to_owned),
            ..NewMessage::default()
        };
        Settlement { produced: vec![produced], ..Settlement::plain(token, claim, Verdict::Done) }
    }

    #[test]
    fn what_is_apart_shares_no_claim_and_no_key_of_one_stream() {
        let mut solo = Solo::default();
        let under_way = [one(1, "a", Some("k"), None), one(2, "a", None, Some("o"))];
        solo.touched.add(&under_way);
        for meets in [one(1, "b", None, None), one(3, "a", Some("k"), None), one(3, "a", None, Some("o"))] {
            assert!(!solo.is_apart(&meets), "{meets:?}");
        }
        // A key and an idempotency key are two things, and each belongs to its stream.
        for apart in [
            one(3, "a", None, None),
            one(3, "a", Some("o"), None),
            one(3, "a", None, Some("k")),
            one(3, "b", Some("k"), Some("o")),
        ] {
            assert!(solo.is_apart(&apart), "{apart:?}");
        }
        solo.touched.remove(&under_way);
        assert!(solo.touched.hashes.is_empty() && solo.is_apart(&under_way[0]));
    }

    #[test]
    fn after_two_met_some_run_alone() {
        let mut solo = Solo::default();
        assert!(!solo.was_in_its_own_way(), "it ran alone: another producer is in the way");
        solo.had_company = true;
        assert!(solo.was_in_its_own_way() && solo.lonely == LONELY && solo.may_share(), "none runs: one may");
    }
}
