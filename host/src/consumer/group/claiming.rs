//! A turn: settles the claims that are finished, and claims what there is room for.

use std::{
    sync::{Arc, atomic::Ordering::Relaxed},
    time::{Duration, Instant},
};

use tokio_util::sync::CancellationToken;

use super::{
    super::{
        identity::Identity,
        pacing::{HELD_MAX, TURN_BYTES_MAX, TURN_MAX},
    },
    End, Group, Step, answered,
    lanes::in_lane,
    slots::{Ended, Work},
};
use crate::{
    config::OnDeadLetter,
    engine::{Keyed, Lane, Note, Request, Source, Turn, Verdict, Wanted, claim},
    handler::{Concurrency, FailureClass, Outcome},
};

/// Most deliveries that wait to be settled each by itself. Beyond it the group claims nothing until some are: memory has an
/// end, and somebody has to look at the transaction that stays open.
pub(super) const ALONE_MAX: usize = 10_000;

/// How long to wait with keys to hand on while another host claims: a turn takes a few milliseconds.
const BUSY_WAIT: Duration = Duration::from_millis(2);

impl Group {
    pub(super) async fn claim(&mut self, identity: &Identity, life: &CancellationToken) -> Step {
        // A group with nothing more to do hands its keys on at once.
        let keep = if self.may_have_work || self.open() > 0 { self.pace.keep_keys() } else { Duration::ZERO };
        let keys_due = self.memory.keys().due_at(keep).is_some_and(|at| at <= Instant::now());
        self.may_have_work |= keys_due && !self.setting.drain.is_cancelled(); // something may wait behind them
        let wanted = self.wanted();
        let is_late = self.is_partly_late();
        let done = self.memory.done(is_late);
        self.seat.idle.store(!self.may_have_work && self.room() > 0, Relaxed);
        // While deliveries run, finished claims wait for the next claim: the two then share one turn. A key does not wait.
        let waits = done.is_empty() || (self.memory.open > 0 && self.may_have_work && !is_late);
        if wanted.is_nothing() && waits && !keys_due {
            return Step::Rest;
        }
        let lane_max = self.pace.lane_max();
        let request = Request {
            done,
            idle: self.memory.keys().due(keep),
            full: self.slots.lanes().full(lane_max),
            lane_max,
            wanted,
        };
        self.setting.counters.turns.fetch_add(1, Relaxed);
        let began = Instant::now();
        let turn = answered(claim(&self.setting.database, identity.host, &self.setting.group, &request)).await;
        self.pace.turned(began.elapsed());
        match turn {
            Ok(turn) => self.take(turn, &request, life),
            Err(error) => {
                self.back_off("claim", &error);
                Step::Rest
            }
        }
    }

    /// How much the next turn may bring. Nothing, when a turn is not worth its price yet.
    fn wanted(&self) -> Wanted {
        let room = self.room();
        let nothing = Wanted::default();
        let slots = self.setting.group.policy.slots;
        // A slot without work is worth a turn whatever it costs: the others may be busy for hours.
        let is_worth_it = self.pace.worth_a_turn(room) || (room > 0 && self.open() < slots);
        if !self.may_have_work || self.setting.newest.borrow().is_none() || !is_worth_it {
            return nothing;
        }
        let fresh = self.open().saturating_sub(self.memory.open_retries);
        // While fresh work is held, retries get half of the slots; else a quarter stays free for it, since it should not
        // have to wait for messages that fail slowly. A turn brings at most one retry for two places, so that neither
        // kind crowds out the other.
        let retries_max = if fresh > 0 { slots.div_ceil(2) } else { slots - slots / 4 };
        let bytes = self.setting.budget.left().min(TURN_BYTES_MAX);
        Wanted {
            messages: if bytes > 0 || self.memory.open == 0 { room.min(TURN_MAX) } else { 0 },
            bytes,
            retries: retries_max.saturating_sub(self.memory.open_retries).min(room.div_ceil(2)),
        }
    }

    /// Room for more messages. What waits here for its key, or to be settled, takes no place from others, within the bound
    /// of all: a group whose settles are slower than its turns claims no more than it settles. What is settled by itself may
    /// wait for another producer for long, and has a bound of its own: it must not hold up the rest.
    pub(super) fn room(&self) -> u32 {
        if self.solo.alone() >= ALONE_MAX {
            return 0;
        }
        let unsettled = self.memory.unsettled().saturating_sub(self.solo.alone());
        let held = self.memory.open.saturating_add(u32::try_from(unsettled).unwrap_or(u32::MAX));
        let in_all = HELD_MAX.max(self.pace.held_max()).saturating_sub(held);
        self.pace.held_max().saturating_sub(self.open()).min(in_all)
    }

    /// Messages that run, or will when a slot is free.
    pub(super) fn open(&self) -> u32 {
        self.memory.open.saturating_sub(self.slots.lanes().waiting())
    }

    fn take(&mut self, turn: Turn, request: &Request, life: &CancellationToken) -> Step {
        self.failures = 0;
        self.not_before = None;
        if turn.note == Note::LeaseLost {
            return Step::End(End::LeaseLost);
        }
        self.partly_since = None;
        let fenced = self.memory.settled_by_turn(&request.done, &turn);
        self.setting.counters.fenced.fetch_add(fenced as u64, Relaxed);
        match turn.note {
            Note::Gone => return Step::End(End::Gone),
            Note::EpochRaised => self.seat.seeked.store(true, Relaxed), // the next step starts over
            // The holder of the group's lock may take what we wanted; look again with the next poll. Our idle keys do not
            // wait so long.
            Note::Busy => {
                self.may_have_work = false;
                if !request.idle.is_empty() {
                    self.not_before = Some(Instant::now() + BUSY_WAIT);
                }
            }
            Note::Paused => self.pause(),
            Note::Claimed => self.may_have_work = turn.advanced || !turn.claimed.is_empty(),
            Note::Settled | Note::LeaseLost => {}
        }
        if turn.note != Note::Busy {
            request.idle.iter().for_each(|lane| self.memory.keys().lost(lane));
        }
        if !turn.claimed.is_empty() {
            self.setting.hub.active.notify_one();
        }
        self.setting.counters.delivered.fetch_add(turn.claimed.len() as u64, Relaxed);
        for claimed in turn.claimed {
            let cut = self.memory.hold(&claimed, request.lane_max, life);
            self.slots.put(Work { claimed, cut });
        }
        self.setting.budget.set(self.setting.group.id, self.memory.open_bytes);
        self.seat.idle.store(!self.may_have_work && self.room() > 0, Relaxed);
        Step::Again
    }

    /// No delivery begins any more: what runs ends, and what no slot has begun goes back, no attempt counted.
    fn pause(&mut self) {
        self.may_have_work = false;
        let waiting = self.slots.take_back();
        self.hand_back(waiting);
    }

    /// Counts and remembers a delivery that has ended.
    pub(super) fn note(&mut self, ended: Ended) {
        let counters = Arc::clone(&self.setting.counters);
        counters.memory_growths.fetch_add(u64::from(ended.finished.memory_growths), Relaxed);
        tracing::debug!(
            stream = &*self.setting.group.stream,
            group = &*self.setting.group.name,
            message_id = ended.message_id,
            attempt = ended.failures + 1,
            digest = ended.finished.digest.as_deref(),
            retry = ended.token.source == Source::Exception,
            outcome = outcome_name(&ended.finished.outcome),
            "delivered"
        );
        let handed_back = ended.finished.outcome == Outcome::HandBack;
        let message_id = ended.message_id;
        let keyed = ended.keyed.clone();
        if let Some(busy) = ended.busy {
            counters.hot_keys.note(keyed.as_ref(), busy);
            self.pace.ran(busy);
        }
        let verdict = self.memory.ended(ended, &self.setting.group.policy.retry);
        match &verdict {
            None => counters.fenced.fetch_add(1, Relaxed),
            Some(Verdict::Done) => counters.done.fetch_add(1, Relaxed),
            Some(Verdict::Dead { attempts, failure }) => {
                self.tell_dead(message_id, *attempts, failure.class);
                counters.count_failure(failure.class);
                counters.dead.fetch_add(1, Relaxed)
            }
            Some(Verdict::Again { .. }) if handed_back => counters.handed_back.fetch_add(1, Relaxed),
            Some(Verdict::Again { failure, .. }) => {
                if let Some(failure) = failure {
                    counters.count_failure(failure.class);
                }
                counters.again.fetch_add(1, Relaxed)
            }
        };
        if let Some(keyed) = in_lane(keyed.as_ref()) {
            self.note_lane(keyed, message_id, verdict.as_ref());
        }
    }

    /// An ordered message did not end well: those behind it go back, no attempt counted, in the settle that takes it out.
    /// Where the key goes on without it they stay.
    pub(super) fn note_lane(&mut self, keyed: &Keyed, message_id: i64, verdict: Option<&Verdict>) {
        let skips = self.setting.group.policy.on_dead_letter == OnDeadLetter::Skip;
        let stops = match verdict {
            Some(Verdict::Done) => false,
            Some(Verdict::Dead { .. }) => !skips,
            Some(Verdict::Again { .. }) | None => true,
        };
        if stops && keyed.mode == Concurrency::Ordered {
            self.hand_back(self.slots.lanes().take(&keyed.lane));
        }
        if verdict.is_none() {
            self.resume_lane(&keyed.lane, message_id, None); // no settle of it will come
        }
    }

    pub(super) fn hand_back(&mut self, works: Vec<Work>) {
        for work in works {
            self.note(Ended::handed_back(&work));
        }
    }

    /// A message is settled, or never will be: its lane goes on, if it waited for that.
    pub(super) fn resume_lane(&mut self, lane: &Lane, message_id: i64, gap: Option<i64>) {
        if let Some(next) = self.slots.lanes().settled(lane, message_id, gap) {
            self.slots.run(next);
        }
    }
}

impl Group {
    /// One line a second at most: a handler that rejects everything must not flood the log. `millstream dead list` has
    /// them all.
    fn tell_dead(&mut self, message_id: i64, attempts: u32, class: FailureClass) {
        self.dead_untold += 1;
        let now = Instant::now();
        if self.dead_told.is_none_or(|told| now - told >= Duration::from_secs(1)) {
            self.dead_told = Some(now);
            let dead = std::mem::take(&mut self.dead_untold);
            let group = &*self.setting.group.name;
            tracing::info!(
                group,
                message_id,
                attempts,
                class = class.as_str(),
                dead,
                "gave up on a message: it is a dead letter"
            );
        }
    }
}

fn outcome_name(outcome: &Outcome) -> &'static str {
    match outcome {
        Outcome::Done => "done",
        Outcome::Retry { .. } => "retry",
        Outcome::RetryAfter { .. } => "retry_after",
        Outcome::Reject { .. } => "reject",
        Outcome::Later { .. } => "later",
        Outcome::Failed(failure) => failure.class.as_str(),
        Outcome::HandBack => "hand_back",
    }
}
