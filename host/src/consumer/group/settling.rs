//! Settles what did not end plainly: in one transaction for all, and one by one where that was refused.

use std::{collections::HashSet, sync::atomic::Ordering::Relaxed};

use super::{
    super::identity::Identity, End, Group, Step, answered, claiming::ALONE_MAX, lanes::in_lane, solo::SettleEnd,
};
use crate::{
    database::DatabaseError,
    engine::{LeavesKey, Settled, Settlement, Verdict, settle, verdict},
    handler::{Concurrency, Outcome},
};

/// Most deliveries of one settle: a few round trips for all of them, and locks held for some milliseconds.
const BATCH_MAX: usize = 500;

/// So many make it worth to settle them while others are being settled; fewer wait and go with those that come.
const BATCH_MIN_BESIDE: usize = BATCH_MAX / 2;

/// So often the one that has waited longest may be left behind, because it meets now this settle and now that.
const LEFT_BEHIND_MAX: u32 = 4;

impl Group {
    pub(super) fn wants_to_settle(&self) -> bool {
        !self.solo.is_empty() || self.is_settle_due()
    }

    /// Whether deliveries have ended that are to be settled now. At full speed they wait a moment for others, as long as
    /// the slots have work without it; and while others are settled beside the loop, many must have come together.
    pub(super) fn is_settle_due(&self) -> bool {
        let is_gathered = || self.gathering_since.is_none_or(|since| since.elapsed() >= self.pace.gather());
        let starves = || self.open() < self.setting.group.policy.slots;
        let is_time = || self.memory.ended_len() >= BATCH_MAX || is_gathered() || starves();
        if self.solo.shared() > 0 && self.memory.ends_freely() {
            let apart = || self.memory.count_ended(BATCH_MIN_BESIDE, |one| self.solo.is_of_another_claim(one));
            return self.solo.may_share() && self.memory.ended_len() >= BATCH_MIN_BESIDE && apart() >= BATCH_MIN_BESIDE;
        }
        self.memory.has_ended() && is_time()
    }

    /// Settles in a transaction of its own whatever did not end plainly.
    pub(super) async fn settle(&mut self, identity: &Identity) -> Step {
        if let Some(step) = self.end_solo(identity) {
            return step;
        }
        if !self.is_settle_due() {
            return Step::Rest;
        }
        let is_free = self.memory.ends_freely();
        let batch = if is_free { self.take_apart() } else { self.memory.take_ended(BATCH_MAX) };
        if batch.is_empty() {
            return Step::Rest;
        }
        self.gathering_since = None;
        if batch.iter().any(|one| one.sql.is_some()) {
            return self.settle_those_with_sql(identity, batch).await;
        }
        if matches!(&batch[..], [one] if one.may_wait()) {
            self.settle_beside(identity, batch); // the loop does not wait with it
            return Step::Again;
        }
        if is_free && batch.len() > 1 {
            self.solo.start_shared(&self.setting.database, identity.host, &self.setting.group, batch);
            return Step::Again; // it claims meanwhile
        }
        match answered(settle(&self.setting.database, identity.host, &self.setting.group, &batch)).await {
            Ok(Settled::Refused(refused)) => {
                tracing::debug!(group = &*self.setting.group.name, "settles one by one: {refused}");
                self.settle_one_by_one(identity, batch).await
            }
            Err(error) if is_blocked(&error) => self.settle_one_by_one(identity, batch).await,
            result => self.settled_together(batch, result),
        }
    }

    /// What can be settled beside what is being settled so; nothing where that is not worth a transaction.
    fn take_apart(&mut self) -> Vec<Settlement> {
        let is_apart = |one: &Settlement| self.solo.is_apart(one);
        let is_alone = self.solo.shared() == 0;
        let is_worth_it = || self.memory.count_ended(BATCH_MIN_BESIDE, is_apart) >= BATCH_MIN_BESIDE;
        if !is_alone && (self.left_behind >= LEFT_BEHIND_MAX || !is_worth_it()) {
            self.solo.wait_for_shared();
            return Vec::new();
        }
        let oldest = self.memory.oldest_ended();
        let batch = self.memory.take_matching(BATCH_MAX, is_apart);
        self.left_behind = if self.memory.oldest_ended() == oldest { self.left_behind + 1 } else { 0 };
        batch
    }

    /// A delivery that ran SQL is settled in its own transaction, beside the loop. The others first: among them are earlier
    /// messages of its key.
    async fn settle_those_with_sql(&mut self, identity: &Identity, batch: Vec<Settlement>) -> Step {
        let (with_sql, others): (Vec<_>, Vec<_>) = batch.into_iter().partition(|one| one.sql.is_some());
        if !others.is_empty() {
            // Without effects they are settled together. With effects, one of them may be refused, or wait.
            let step = self.settle_one_by_one(identity, others).await;
            if step != Step::Again {
                self.memory.put_back(with_sql);
                return step;
            }
        }
        self.settle_beside(identity, with_sql);
        Step::Again
    }

    /// Takes note of a settle of the loop.
    fn settled_together(&mut self, batch: Vec<Settlement>, result: Result<Settled, DatabaseError>) -> Step {
        match result {
            Ok(Settled::LeaseLost) => Step::End(End::LeaseLost),
            Ok(Settled::Committed { fenced, superseded, woken }) => {
                self.settled(&batch, &fenced, &superseded, &woken);
                Step::Again
            }
            Ok(refused @ (Settled::Refused(_) | Settled::SqlRefused(_))) => {
                tracing::error!(group = &*self.setting.group.name, "a settle without effects was refused: {refused:?}");
                self.memory.put_back(batch);
                Step::Rest
            }
            Err(error) => {
                self.memory.put_back(batch);
                self.back_off("settle", &error);
                Step::Rest
            }
        }
    }

    /// Those without effects are settled together again, and first: among them are earlier messages of the others' keys.
    /// Then each other gets a transaction of its own beside the loop.
    async fn settle_one_by_one(&mut self, identity: &Identity, batch: Vec<Settlement>) -> Step {
        let (alone, together): (Vec<_>, Vec<_>) = batch.into_iter().partition(|one| !one.produced.is_empty());
        if !together.is_empty() {
            let result = answered(settle(&self.setting.database, identity.host, &self.setting.group, &together)).await;
            let step = self.settled_together(together, result);
            if step != Step::Again {
                self.memory.put_back(alone);
                return step;
            }
        }
        self.settle_beside(identity, alone);
        Step::Again
    }

    fn settle_beside(&mut self, identity: &Identity, alone: Vec<Settlement>) {
        let had_room = self.solo.alone() < ALONE_MAX;
        for one in alone {
            self.solo.start(&self.setting.database, identity.host, &self.setting.group, one);
        }
        if had_room && self.solo.alone() >= ALONE_MAX {
            let (group, waiting) = (&*self.setting.group.name, self.solo.alone());
            tracing::warn!(
                group,
                waiting,
                "claims nothing until some of what waits for other producers' open transactions is settled"
            );
        }
    }

    /// Takes note of every settle that ran beside the loop and has ended.
    pub(super) fn end_solo(&mut self, identity: &Identity) -> Option<Step> {
        let mut step = None;
        let ended = self.solo.take_ended();
        if self.solo.has_panicked() {
            // Nobody knows which they were: all that this host holds goes back.
            self.forget();
            self.must_compare = true;
            return Some(Step::Again);
        }
        for ended in ended {
            if matches!(step, Some(Step::End(_))) {
                break; // nothing of this identity counts any more
            }
            step = match ended {
                SettleEnd::Alone(one, result) => self.settled_alone(one, result).or(step),
                // Nothing of it has a key, so that each may go by itself, in whatever order.
                SettleEnd::Shared(batch, Ok(Settled::Refused(refused))) => {
                    tracing::debug!(group = &*self.setting.group.name, "settles one by one: {refused}");
                    self.settle_beside(identity, batch);
                    step
                }
                SettleEnd::Shared(batch, Err(error)) if is_blocked(&error) => {
                    if self.solo.was_in_its_own_way() {
                        self.memory.put_back(batch);
                    } else {
                        self.settle_beside(identity, batch);
                    }
                    step
                }
                SettleEnd::Shared(batch, result) => match self.settled_together(batch, result) {
                    Step::Again => step,
                    other => Some(other),
                },
            };
        }
        step
    }

    /// Takes note of one that was settled in a transaction of its own. `None`: the loop goes on.
    fn settled_alone(&mut self, one: Settlement, result: Result<Settled, DatabaseError>) -> Option<Step> {
        match result {
            Ok(Settled::LeaseLost) => return Some(Step::End(End::LeaseLost)),
            Ok(Settled::Committed { fenced, superseded, woken }) => self.settled(&[one], &fenced, &superseded, &woken),
            Ok(Settled::Refused(refused)) => self.refuse(one, &format!("what it produced was refused: {refused}")),
            Ok(Settled::SqlRefused(reason)) => {
                self.refuse(one, &format!("its SQL was refused at the end of its transaction: {reason}"));
            }
            // It stood aside for a comparison, and the database is well.
            Err(error) if has_sqlstate(&error, &[LOCK_NOT_AVAILABLE]) => self.memory.put_back(vec![one]),
            Err(error) => {
                self.memory.put_back(vec![one]);
                self.back_off("settle a delivery by itself", &error);
                return Some(Step::Rest);
            }
        }
        None
    }

    /// What the handler wanted was refused: the delivery has failed, and nothing of it exists.
    fn refuse(&mut self, one: Settlement, reason: &str) {
        let outcome = Outcome::Retry { reason: reason.to_owned() };
        let verdict = verdict(outcome, one.failures, &self.setting.group.policy.retry, fastrand::f64());
        if let Verdict::Again { failure: Some(failure), .. } | Verdict::Dead { failure, .. } = &verdict {
            self.setting.counters.count_failure(failure.class);
        }
        let (keyed, message_id) = (one.keyed.clone(), one.message_id);
        self.memory.judge_again(Settlement { verdict: verdict.clone(), produced: Vec::new(), ..one });
        if let Some(keyed) = in_lane(keyed.as_ref()) {
            self.note_lane(keyed, message_id, Some(&verdict)); // those behind it go back in the same settle
        }
    }

    fn settled(
        &mut self,
        batch: &[Settlement],
        fenced: &HashSet<usize>,
        superseded: &HashSet<usize>,
        woken: &[String],
    ) {
        self.failures = 0;
        self.not_before = None;
        let is_fenced = |index: usize| fenced.contains(&index);
        let produced: usize =
            batch.iter().enumerate().filter(|(index, _)| !is_fenced(*index)).map(|(_, one)| one.produced.len()).sum();
        self.setting.counters.fenced.fetch_add(fenced.len() as u64, Relaxed);
        self.setting.counters.superseded.fetch_add(superseded.len() as u64, Relaxed);
        self.setting.counters.produced.fetch_add(produced as u64, Relaxed);
        self.memory.settled(batch, is_fenced);
        for (index, one) in batch.iter().enumerate() {
            let leaves = if is_fenced(index) || superseded.contains(&index) {
                LeavesKey::GoingOn
            } else {
                one.leaves_key(self.setting.group.policy.on_dead_letter)
            };
            let is_dead =
                !is_fenced(index) && !superseded.contains(&index) && matches!(one.verdict, Verdict::Dead { .. });
            self.settled_lane(one, leaves, is_dead);
        }
        self.free_released();
        for stream in woken {
            self.setting.hub.tell_of(stream);
        }
    }

    /// What a settled message means for those behind it. `is_dead`: an ordered key goes on without it.
    fn settled_lane(&mut self, one: &Settlement, leaves: LeavesKey, is_dead: bool) {
        let Some(keyed) = in_lane(one.keyed.as_ref()) else { return };
        let is_gap = is_dead && keyed.mode == Concurrency::Ordered;
        match leaves {
            LeavesKey::Blocked | LeavesKey::Resting => self.memory.keys().lost(&keyed.lane),
            LeavesKey::Deferred if keyed.mode == Concurrency::Ordered => {}
            LeavesKey::Deferred | LeavesKey::GoingOn => {
                return self.resume_lane(&keyed.lane, one.message_id, is_gap.then_some(one.message_id));
            }
        }
        self.hand_back(self.slots.lanes().close(&keyed.lane));
    }

    /// Lanes must not wait for deliveries that were lost.
    pub(super) fn free_released(&mut self) {
        for (lane, message_id) in self.memory.take_released() {
            self.resume_lane(&lane, message_id, None);
        }
    }

    /// One step of a drain: settles what has ended, in whatever way it did.
    pub(super) async fn finish(&mut self, identity: &Identity) -> Step {
        if self.must_compare {
            return self.compare(identity).await;
        }
        match self.settle(identity).await {
            Step::Rest
                if !self.backs_off() && (!self.memory.done(true).is_empty() || self.memory.keys().has_idle()) =>
            {
                self.may_have_work = false; // settle only
                let life = identity.cut.child_token();
                self.claim(identity, &life).await
            }
            step => step,
        }
    }
}

pub(super) const LOCK_NOT_AVAILABLE: &str = "55P03";
const DEADLOCK: &str = "40P01";

/// Another producer holds a lock that a shared transaction does not wait for, or a deadlock was resolved against us.
fn is_blocked(error: &DatabaseError) -> bool {
    has_sqlstate(error, &[LOCK_NOT_AVAILABLE, DEADLOCK])
}

pub(super) fn has_sqlstate(error: &DatabaseError, sqlstates: &[&str]) -> bool {
    error.as_database_error().and_then(|error| error.code()).is_some_and(|code| sqlstates.contains(&&*code))
}
