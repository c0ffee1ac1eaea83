//! What is known about a running delivery outside its store: how it is ending, how its memory fared, what it wrote.
//! It outlives the store, so that a guest dropped in the middle still leaves its last words.

use std::{
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use tokio_util::sync::CancellationToken;

use super::output::Output;

/// Why we ended a guest that had not answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stopped {
    /// Its time was up.
    Timeout,
    /// Its host does not want it any more: drain, lost lease, seek.
    Cut,
}

/// One instance has one of these for its life; [`Delivery::begin`] makes it ready for the next message.
///
/// Everything is written by the one thread that runs the guest just then, and others only look: relaxed atomics suffice.
#[derive(Debug)]
pub struct Delivery {
    /// Base of the deadline.
    created: Instant,
    deadline_nanos: AtomicU64,
    /// How often the guest has looked up in its turn.
    looks: AtomicU32,
    cut: Mutex<CancellationToken>,
    /// 0: none, 1: timeout, 2: cut.
    stopped: AtomicU8,
    /// It has used up a whole slice at least once and from now on runs only with a permit.
    over_budget: AtomicBool,
    /// The last wait was for its next slice, not for an import: it can be interrupted where it stands.
    slice_ended: AtomicBool,
    /// Growths are counted from the end of the instantiation on.
    instantiated: AtomicBool,
    growths: AtomicU32,
    growth_refused: AtomicBool,
    output: Mutex<Output>,
}

impl Delivery {
    pub fn new(output: Output) -> Self {
        Self {
            created: Instant::now(),
            deadline_nanos: AtomicU64::new(0),
            looks: AtomicU32::new(0),
            cut: Mutex::default(),
            stopped: AtomicU8::new(0),
            over_budget: AtomicBool::new(false),
            slice_ended: AtomicBool::new(false),
            instantiated: AtomicBool::new(false),
            growths: AtomicU32::new(0),
            growth_refused: AtomicBool::new(false),
            output: Mutex::new(output),
        }
    }

    /// Forgets the message before and starts the clock of the next one.
    pub fn begin(&self, timeout: Duration, cut: &CancellationToken) {
        self.deadline_nanos.store(self.now().saturating_add(nanos(timeout)), Relaxed);
        *self.cut.lock().unwrap_or_else(PoisonError::into_inner) = cut.clone();
        self.stopped.store(0, Relaxed);
        self.over_budget.store(false, Relaxed);
        self.slice_ended.store(false, Relaxed);
        self.growths.store(0, Relaxed);
        self.growth_refused.store(false, Relaxed);
    }

    pub fn deadline(&self) -> Instant {
        self.created + Duration::from_nanos(self.deadline_nanos.load(Relaxed))
    }

    /// The guest is about to run on this thread.
    pub fn begin_turn(&self) {
        self.looks.store(0, Relaxed);
        self.slice_ended.store(false, Relaxed);
    }

    /// The guest looks up; answers for the how manyth time in this turn.
    pub fn look(&self) -> u32 {
        self.looks.fetch_add(1, Relaxed) + 1
    }

    /// Whether the guest must end now, and why. Called from inside a running guest; the answer is kept.
    pub fn must_stop(&self) -> Option<Stopped> {
        if self.cut.lock().unwrap_or_else(PoisonError::into_inner).is_cancelled() {
            self.stopped.store(2, Relaxed);
        } else if self.now() >= self.deadline_nanos.load(Relaxed) {
            self.stopped.store(1, Relaxed);
        }
        self.stopped()
    }

    pub fn stopped(&self) -> Option<Stopped> {
        match self.stopped.load(Relaxed) {
            0 => None,
            1 => Some(Stopped::Timeout),
            _ => Some(Stopped::Cut),
        }
    }

    /// The guest has used its slice and gives way.
    pub fn end_slice(&self) {
        self.over_budget.store(true, Relaxed);
        self.slice_ended.store(true, Relaxed);
    }

    pub fn is_over_budget(&self) -> bool {
        self.over_budget.load(Relaxed)
    }

    pub fn slice_ended(&self) -> bool {
        self.slice_ended.load(Relaxed)
    }

    /// From here on a growth is the handler's own doing, not the instantiation's.
    pub fn note_instantiated(&self) {
        self.instantiated.store(true, Relaxed);
    }

    pub fn note_growth(&self) {
        if self.instantiated.load(Relaxed) {
            self.growths.fetch_add(1, Relaxed);
        }
    }

    pub fn note_refused_growth(&self) {
        self.growth_refused.store(true, Relaxed);
    }

    pub fn growths(&self) -> u32 {
        self.growths.load(Relaxed)
    }

    pub fn growth_was_refused(&self) -> bool {
        self.growth_refused.load(Relaxed)
    }

    /// What the guest writes. The lock is only ever held for one write.
    pub fn output(&self) -> MutexGuard<'_, Output> {
        self.output.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> u64 {
        nanos(self.created.elapsed())
    }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
