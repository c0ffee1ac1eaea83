//! Settles that run beside the group's loop, which claims meanwhile: one that many share, and those that wait for other
//! producers or bring a transaction of their own.

use std::{sync::Arc, time::Duration};

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

/// Settles that run beside the group's loop.
#[derive(Debug, Default)]
pub struct Solo {
    tasks: JoinSet<SettleEnd>,
    /// At most one: two that settle messages of one claim would wait for each other.
    shared: JoinSet<SettleEnd>,
    places: Arc<Places>,
    ended: Vec<SettleEnd>,
    has_panicked: bool,
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

    /// Whether many are being settled in one transaction.
    pub fn is_sharing(&self) -> bool {
        !self.shared.is_empty()
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
            Ok(ended) => self.ended.push(ended),
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

    /// Settles many in one transaction, while none is settled so.
    pub fn start_shared(&mut self, database: &Database, host: HostId, group: &GroupHandle, batch: Vec<Settlement>) {
        let (database, group) = (database.clone(), group.clone());
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
