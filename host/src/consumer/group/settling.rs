//! Settles what did not end plainly: in one transaction for all, and one by one where that was refused.

use std::sync::{Arc, atomic::Ordering::Relaxed};

use tokio::{
    sync::Semaphore,
    task::{JoinError, JoinSet},
};

use super::{
    super::identity::Identity,
    End, Group, PARTLY_DONE_MAX, Step, answered,
    slots::{Ended, Work},
};
use crate::{
    database::{Database, DatabaseError, Reaction, reaction},
    engine::{GroupHandle, HostId, Settled, Settlement, Verdict, settle, verdict},
    handler::{Finished, Outcome},
};

/// Most deliveries of one settle: a few round trips for all of them, and locks held for a few milliseconds.
const BATCH_MAX: usize = 250;

/// Most transactions that one group settles in at the same time, when deliveries are settled one by one.
const SOLO_MAX: usize = 4;

/// Settles that run beside the group's loop.
#[derive(Debug)]
pub struct Solo {
    tasks: JoinSet<(Settlement, Result<Settled, DatabaseError>)>,
    places: Arc<Semaphore>,
    ended: Vec<(Settlement, Result<Settled, DatabaseError>)>,
}

impl Default for Solo {
    fn default() -> Self {
        Self { tasks: JoinSet::new(), places: Arc::new(Semaphore::new(SOLO_MAX)), ended: Vec::new() }
    }
}

impl Solo {
    pub fn is_empty(&self) -> bool {
        self.tasks.is_empty() && self.ended.is_empty()
    }

    /// Waits until one has ended; for ever, when none runs.
    pub async fn changed(&mut self) {
        match self.tasks.join_next().await {
            Some(joined) => self.put(joined),
            None => std::future::pending().await,
        }
    }

    fn put(&mut self, joined: Result<(Settlement, Result<Settled, DatabaseError>), JoinError>) {
        // A settle does not panic; if it did, the delivery stays held and the next comparison finds it.
        match joined {
            Ok(ended) => self.ended.push(ended),
            Err(error) => tracing::error!("a settle has panicked: {error}"),
        }
    }

    fn start(&mut self, database: &Database, host: HostId, group: &GroupHandle, one: Settlement) {
        let (database, group, places) = (database.clone(), group.clone(), Arc::clone(&self.places));
        self.tasks.spawn(async move {
            let _place = places.acquire().await.expect("it is never closed");
            let result = settle(&database, host, &group, std::slice::from_ref(&one)).await;
            (one, result)
        });
    }

    fn take_ended(&mut self) -> Vec<(Settlement, Result<Settled, DatabaseError>)> {
        while let Some(joined) = self.tasks.try_join_next() {
            self.put(joined);
        }
        std::mem::take(&mut self.ended)
    }
}

impl Group {
    pub(super) fn wants_to_settle(&self) -> bool {
        !self.solo.is_empty()
            || self.memory.has_ended()
            || self.partly_since.is_some_and(|since| since.elapsed() >= PARTLY_DONE_MAX)
    }

    /// Settles in a transaction of its own whatever did not end plainly.
    pub(super) async fn settle(&mut self, identity: &Identity) -> Step {
        if let Some(step) = self.end_solo() {
            return step;
        }
        let batch = self.memory.take_ended(BATCH_MAX);
        self.partly_since = None;
        if batch.is_empty() {
            return Step::Rest;
        }
        if matches!(&batch[..], [one] if one.may_wait()) {
            self.settle_one_by_one(identity, batch); // the loop does not wait with it
            return Step::Again;
        }
        match answered(settle(&self.setting.database, identity.host, &self.setting.group, &batch)).await {
            Ok(Settled::LeaseLost) => Step::End(End::LeaseLost),
            Ok(Settled::Committed { fenced, woken }) => {
                self.settled(&batch, |index| fenced.contains(&index), &woken);
                Step::Again
            }
            Ok(Settled::Refused(refused)) => {
                tracing::debug!(group = &*self.setting.group.name, "settles one by one: {refused}");
                self.settle_one_by_one(identity, batch);
                Step::Again
            }
            Err(error) if is_blocked(&error) => {
                self.settle_one_by_one(identity, batch);
                Step::Again
            }
            Err(error) => {
                self.memory.put_back(batch);
                self.back_off("settle", &error);
                Step::Rest
            }
        }
    }

    /// Those without effects are settled together again; each other gets a transaction of its own beside the loop.
    fn settle_one_by_one(&mut self, identity: &Identity, batch: Vec<Settlement>) {
        let (alone, together): (Vec<_>, Vec<_>) = batch.into_iter().partition(|one| !one.produced.is_empty());
        self.memory.put_back(together);
        for one in alone {
            self.solo.start(&self.setting.database, identity.host, &self.setting.group, one);
        }
    }

    /// Takes note of every settle that ran beside the loop and has ended.
    pub(super) fn end_solo(&mut self) -> Option<Step> {
        let mut step = None;
        for (one, result) in self.solo.take_ended() {
            match result {
                Ok(Settled::LeaseLost) => step = Some(Step::End(End::LeaseLost)),
                Ok(Settled::Committed { fenced, woken }) => {
                    self.settled(&[one], |index| fenced.contains(&index), &woken);
                }
                Ok(Settled::Refused(refused)) => self.refuse(one, &refused.to_string()),
                Err(error) => {
                    self.memory.put_back(vec![one]);
                    self.back_off("settle a delivery by itself", &error);
                    step = step.or(Some(Step::Rest));
                }
            }
        }
        step
    }

    /// What the handler wanted to produce was refused: the delivery has failed, and nothing of it exists.
    fn refuse(&mut self, one: Settlement, reason: &str) {
        let reason = format!("what it produced was refused: {reason}");
        let outcome = Outcome::Retry { reason };
        let verdict = verdict(outcome, one.failures, &self.setting.group.policy.retry, fastrand::f64());
        if let Verdict::Again { failure: Some(failure), .. } | Verdict::Dead { failure, .. } = &verdict {
            self.setting.counters.count_failure(failure.class);
        }
        self.memory.put_back(vec![Settlement { verdict, produced: Vec::new(), ..one }]);
    }

    fn settled(&mut self, batch: &[Settlement], is_fenced: impl Fn(usize) -> bool, woken: &[String]) {
        self.failures = 0;
        self.not_before = None;
        let fenced = (0..batch.len()).filter(|index| is_fenced(*index)).count();
        let produced: usize =
            batch.iter().enumerate().filter(|(index, _)| !is_fenced(*index)).map(|(_, one)| one.produced.len()).sum();
        self.setting.counters.fenced.fetch_add(fenced as u64, Relaxed);
        self.setting.counters.produced.fetch_add(produced as u64, Relaxed);
        self.memory.settled(batch, is_fenced);
        for stream in woken {
            self.setting.hub.produced(stream);
        }
    }

    /// One step of a drain: settles what has ended, in whatever way it did.
    pub(super) async fn finish(&mut self, identity: &Identity) -> Step {
        if self.must_compare {
            return self.compare(identity).await;
        }
        match self.settle(identity).await {
            Step::Rest if !self.memory.finished().is_empty() => {
                self.may_have_work = false; // settle only
                let life = identity.cut.child_token();
                self.claim(identity, &life).await
            }
            step => step,
        }
    }
}

impl Ended {
    /// A message that no slot has begun.
    pub(super) fn handed_back(work: Work) -> Self {
        Self {
            token: work.claimed.token,
            message_id: work.claimed.message.id,
            failures: work.claimed.failures,
            payload_bytes: work.claimed.message.payload.as_ref().map_or(0, Vec::len) as u64,
            finished: Finished::plain(Outcome::HandBack),
        }
    }
}

/// Another producer holds a lock that a shared transaction does not wait for, or a deadlock was resolved against us.
fn is_blocked(error: &DatabaseError) -> bool {
    reaction(error) == Reaction::Busy
        && error
            .as_database_error()
            .and_then(|error| error.code())
            .is_some_and(|code| matches!(&*code, "55P03" | "40P01"))
}
