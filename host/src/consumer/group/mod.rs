//! One group on this host: claim, run, settle, again and again. The state machine is here; what each step does is in the
//! files beside it.
//!
//! ```text
//! waiting for an identity -> living -> (lease lost) -> waiting for an identity
//!                              |  `-> draining -> ended
//!                              `-> (group gone) -> ended
//! ```

mod claiming;

mod comparing;

mod keys_held;

mod lanes;

mod memory;

mod seeking;

mod settling;

mod slots;

mod solo;

use std::{
    sync::{Arc, atomic::Ordering::Relaxed},
    time::{Duration, Instant},
};

use tokio::{
    sync::{mpsc, watch},
    time::sleep,
};
use tokio_util::sync::CancellationToken;

pub use slots::Newest;

use self::{
    memory::Memory,
    slots::{Ended, Slots},
    solo::Solo,
};
use super::{
    budget::Budget,
    counters::GroupCounters,
    hub::{Hub, Seat},
    identity::Identity,
    pacing::Pace,
};
use crate::{
    database::{Database, DatabaseError, Reaction, reaction, told},
    engine::{GroupHandle, GuestGrant},
};

/// What a group needs to run.
pub struct Setting {
    pub database: Database,
    pub group: GroupHandle,
    pub identity: watch::Receiver<Option<Identity>>,
    pub newest: Newest,
    /// Of a group with `allow.sql`.
    pub grant: Option<GuestGrant>,
    pub hub: Arc<Hub>,
    pub budget: Arc<Budget>,
    pub counters: Arc<GroupCounters>,
    pub drain: CancellationToken,
    pub drain_timeout: Duration,
}

/// Runs the group until it is drained, or gone.
pub async fn run(setting: Setting) {
    let seat = setting.hub.seat(&setting.group);
    let (slots, ended) = Slots::start(setting.group.policy.slots, &setting.newest, setting.grant.as_ref());
    let pace = Pace::new(setting.group.policy.slots);
    let mut group = Group {
        seat,
        slots,
        ended,
        pace,
        memory: Memory::default(),
        solo: Solo::default(),
        may_have_work: true,
        must_compare: false,
        not_before: None,
        failures: 0,
        partly_since: None,
        gathering_since: None,
        left_behind: 0,
        deploys: true,
        dead_told: None,
        dead_untold: 0,
        setting,
    };
    while let Some(identity) = group.next_identity().await {
        match group.live(&identity).await {
            End::LeaseLost => group.forget(),
            End::Gone => {
                group.forget(); // nothing that it holds can be settled any more: it is cut, and not begun
                break;
            }
            End::Drained => break,
        }
    }
    group.setting.budget.forget(group.setting.group.id);
    group.setting.hub.leave(group.setting.group.id);
    group.slots.stop().await;
    // What it handed back, and the keys it let go, are for others now.
    group.setting.hub.tell_of(&group.setting.group.stream);
}

struct Group {
    setting: Setting,
    seat: Arc<Seat>,
    slots: Slots,
    ended: mpsc::UnboundedReceiver<Ended>,
    pace: Pace,
    memory: Memory,
    /// Settles that run beside the loop.
    solo: Solo,
    /// The last turn brought something, or somebody woke us.
    may_have_work: bool,
    /// What the database holds for us is in doubt: compare before anything else.
    must_compare: bool,
    /// The database failed: wait until then.
    not_before: Option<Instant>,
    failures: u32,
    /// Since when done messages wait for slower ones of their claim.
    partly_since: Option<Instant>,
    /// Since when ended deliveries wait for others to be settled with.
    gathering_since: Option<Instant>,
    /// How often in a row the one that has waited longest was not among those that were settled.
    left_behind: u32,
    /// Somebody may still deploy a newer handler.
    deploys: bool,
    /// When the log last told of a dead letter, and how many there were since.
    dead_told: Option<Instant>,
    dead_untold: u64,
}

/// Why a life ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    LeaseLost,
    Drained,
    Gone,
}

/// How a step went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// There may be more to do at once.
    Again,
    /// Nothing to do until something happens.
    Rest,
    End(End),
}

/// Done messages of a claim wait this long for the others before they are settled by themselves: it bounds what a crash
/// delivers again, and costs at most 20 small transactions a second.
const PARTLY_DONE_MAX: Duration = Duration::from_millis(50);

/// How long a turn, a shared settle or a comparison may take before it counts as lost: a network that vanished without a
/// word looks like a slow answer. Far more than any of them needs on a busy database.
const ANSWER_MAX: Duration = Duration::from_secs(30);

/// Bounds one exchange with the database. When time is up it is open whether it took place, as after a lost connection.
async fn answered<T>(exchange: impl Future<Output = Result<T, DatabaseError>>) -> Result<T, DatabaseError> {
    let lost = |_elapsed| Err(DatabaseError::Io(std::io::ErrorKind::TimedOut.into()));
    tokio::time::timeout(ANSWER_MAX, exchange).await.unwrap_or_else(lost)
}

impl Group {
    async fn next_identity(&mut self) -> Option<Identity> {
        loop {
            let identity = self.setting.identity.borrow_and_update().clone();
            match identity {
                _ if self.setting.drain.is_cancelled() => return None,
                Some(identity) if !identity.cut.is_cancelled() => return Some(identity),
                _ => {}
            }
            tokio::select! {
                changed = self.setting.identity.changed() => changed.ok()?,
                () = self.setting.drain.cancelled() => {}
            }
        }
    }

    /// Works under one identity.
    async fn live(&mut self, identity: &Identity) -> End {
        let life = identity.cut.child_token();
        let mut drain_until = None;
        loop {
            if identity.cut.is_cancelled() {
                return End::LeaseLost;
            }
            if self.setting.drain.is_cancelled() {
                let until = *drain_until.get_or_insert_with(|| Instant::now() + self.setting.drain_timeout);
                if let Some(end) = self.drain(identity, &life, until).await {
                    return end;
                }
                continue;
            }
            let step = tokio::select! {
                step = self.step(identity, &life) => step,
                // A statement may wait for an answer that never comes; what it did is void now.
                () = identity.cut.cancelled() => return End::LeaseLost,
            };
            match step {
                Step::Again => {}
                Step::Rest => self.rest(identity).await,
                Step::End(end) => return end,
            }
        }
    }

    /// Everything that can be done now, once.
    async fn step(&mut self, identity: &Identity, life: &CancellationToken) -> Step {
        self.collect();
        if self.backs_off() {
            return Step::Rest;
        }
        if self.seat.seeked.swap(false, Relaxed) {
            return self.start_over().await;
        }
        if self.must_compare || self.seat.compare.swap(false, Relaxed) {
            return self.compare(identity).await;
        }
        if self.wants_to_settle() {
            let step = self.settle(identity).await;
            // After one that failed no key is handed on: of its messages, some are done and not settled.
            if step != Step::Rest || self.backs_off() {
                return step;
            }
        }
        self.claim(identity, life).await
    }

    /// The database failed a moment ago.
    fn backs_off(&self) -> bool {
        self.not_before.is_some_and(|until| until > Instant::now())
    }

    /// Takes note of every delivery that has ended.
    fn collect(&mut self) {
        let mut count = 0;
        while let Ok(ended) = self.ended.try_recv() {
            self.note(ended);
            count += 1;
        }
        if count > 0 {
            self.pace.ended(count);
            self.setting.budget.set(self.setting.group.id, self.memory.open_bytes);
        }
        if !self.memory.has_partly_done() {
            self.partly_since = None;
        } else if self.partly_since.is_none() {
            self.partly_since = Some(Instant::now());
        }
        if !self.memory.has_ended() {
            self.gathering_since = None;
        } else if self.gathering_since.is_none() {
            self.gathering_since = Some(Instant::now());
        }
    }

    /// Whether done messages have waited long enough for the others of their claim.
    fn is_partly_late(&self) -> bool {
        self.partly_since.is_some_and(|since| since.elapsed() >= PARTLY_DONE_MAX)
    }

    /// Waits until a delivery ends, somebody wakes us, or time is up.
    async fn rest(&mut self, identity: &Identity) {
        let now = Instant::now();
        let partly = self.partly_since.map(|since| since + PARTLY_DONE_MAX);
        // What has passed already waits for the other: it must not hide it.
        let keys = self.memory.keys().due_at(self.pace.keep_keys());
        // A moment that has passed since the last step looked counts too.
        let gathering = self.gathering_since.filter(|_| !self.backs_off());
        let gathered = gathering.map(|since| (since + self.pace.gather()).max(now + Duration::from_millis(1)));
        let until = [self.not_before, partly, gathered, keys].into_iter().flatten().filter(|until| *until > now).min();
        let timer = sleep(until.map_or(Duration::from_secs(60), |until| until - now));
        tokio::pin!(timer);
        loop {
            tokio::select! {
                ended = self.ended.recv() => {
                    let Some(ended) = ended else { return };
                    self.note(ended);
                    self.pace.ended(1);
                    if self.enough_ended() {
                        return;
                    }
                    continue;
                }
                () = self.seat.woken() => self.may_have_work = true,
                changed = self.setting.newest.changed(), if self.deploys => {
                    self.may_have_work = true;
                    self.deploys = changed.is_ok(); // else what is loaded stays
                }
                () = self.solo.changed() => {}
                () = identity.cut.cancelled() => {}
                () = self.setting.drain.cancelled() => {}
                () = &mut timer => {}
            }
            return;
        }
    }

    /// Whether so many deliveries have ended that something should be done about it: one that has to be settled by
    /// itself, or so many that the next turn is worth its price. Noting one costs far less than a step.
    fn enough_ended(&mut self) -> bool {
        let knew_partly = self.partly_since.is_some();
        self.collect();
        let learns_partly = !knew_partly && self.partly_since.is_some(); // its timer has to begin
        let hands_on = self.memory.keys().due_at(self.pace.keep_keys()).is_some_and(|at| at <= Instant::now());
        let refills = self.may_have_work && self.open() <= self.pace.refill_at() && self.room() > 0;
        let starves = self.open() < self.setting.group.policy.slots;
        learns_partly || hands_on || refills || starves || self.is_settle_due()
    }

    /// Stops claiming, waits for what runs, hands the rest back. `Some`: done.
    async fn drain(&mut self, identity: &Identity, life: &CancellationToken, until: Instant) -> Option<End> {
        self.seat.idle.store(false, Relaxed);
        let waiting = self.slots.take_back();
        self.hand_back(waiting);
        self.collect();
        if Instant::now() >= until {
            life.cancel(); // what still runs ends now, and is handed back
        }
        // The database may be away: nothing can be handed back then, and others take over when the lease ends.
        let given_up = until + self.setting.drain_timeout.min(Duration::from_secs(5));
        if self.not_before.is_none_or(|until| until <= Instant::now()) {
            match tokio::time::timeout_at(given_up.into(), self.finish(identity)).await {
                Ok(Step::End(end)) => return Some(end),
                Ok(Step::Again) => return None,
                Ok(Step::Rest) => {}
                Err(_elapsed) => return Some(End::Drained),
            }
        }
        if self.memory.is_empty() && self.solo.is_empty() {
            return Some(End::Drained);
        }
        if Instant::now() >= given_up {
            return Some(End::Drained);
        }
        tokio::select! {
            ended = self.ended.recv() => if let Some(ended) = ended { self.note(ended) },
            () = self.solo.changed() => {}
            () = identity.cut.cancelled() => {}
            () = sleep(until.saturating_duration_since(Instant::now()).clamp(Duration::from_millis(20), Duration::from_millis(250))) => {}
        }
        None
    }

    /// The lease is lost: nothing that is held counts any more.
    fn forget(&mut self) {
        let lost = self.memory.lose_all();
        self.setting.counters.fenced.fetch_add(lost as u64, Relaxed);
        // What no slot has begun ends here; what runs stays open until its slot is free again.
        for work in self.slots.take_back() {
            self.memory.ended(Ended::handed_back(&work), &self.setting.group.policy.retry);
        }
        self.slots.lanes().forget_held();
        self.setting.budget.set(self.setting.group.id, self.memory.open_bytes);
        // Its answers would speak of the old identity.
        self.solo = Solo::default();
        self.may_have_work = true;
        self.must_compare = false;
        self.not_before = None;
        self.partly_since = None;
    }

    /// The database failed. Backs off, longer each time, and compares afterwards: a commit may have gone through.
    fn back_off(&mut self, what: &str, error: &DatabaseError) {
        self.must_compare = true;
        self.failures += 1;
        self.setting.counters.database_errors.fetch_add(1, Relaxed);
        let wait = Duration::from_millis(20 << self.failures.min(6)).mul_f64(0.5 + fastrand::f64());
        self.not_before = Some(Instant::now() + wait);
        let (group, why) = (&*self.setting.group.name, told(error));
        match reaction(error) {
            Reaction::Busy if self.failures > 1 => tracing::debug!(group, "failed to {what}, will try again: {why}"),
            Reaction::Busy => tracing::info!(group, "failed to {what}, will try again: {why}"),
            _ => tracing::error!(group, "failed to {what}, will try again: {why}"),
        }
    }
}
