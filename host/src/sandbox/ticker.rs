//! The engine's clock: an OS thread that raises the epoch while guests run, so that they look up now and then.
//!
//! It is a thread and not a tokio timer because the guests it interrupts may hold every thread of the runtime. It rests
//! while no guest runs, so that an idle host costs nothing.

use std::{
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
    },
    thread::{self, Thread},
    time::Duration,
};

use anyhow::Context;
use wasmtime::EngineWeak;

/// How often running guests look up. A tick is a wake-up and an atomic add; on a busy machine of 2 cores 470 a second took
/// 1.7 % of one core. At 10 ms a spinning guest would hold up a fast one for noticeably longer.
pub const TICK: Duration = Duration::from_millis(2);

/// How many ticks without a guest before the clock rests. Waking it costs a system call, which a steady trickle of
/// messages should not pay each time.
const TICKS_BEFORE_REST: u32 = 50;

/// How long it rests before it looks whether its engine still exists.
const REST: Duration = Duration::from_secs(1);

/// Counts running guests and keeps the clock going while there are any.
#[derive(Debug, Default)]
pub struct Ticker {
    running: AtomicUsize,
    /// Invariant: while this is true and a guest runs, somebody is about to wake the thread.
    resting: AtomicBool,
    thread: OnceLock<Thread>,
}

/// One running guest. The guest's future owns it: whoever waits for the guest may leave before it ends.
#[derive(Debug)]
pub struct Running(Arc<Ticker>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.running.fetch_sub(1, SeqCst);
    }
}

impl Ticker {
    /// Starts the thread. It holds the engine weakly and ends soon after it.
    pub fn start(engine: EngineWeak) -> anyhow::Result<Arc<Self>> {
        let ticker = Arc::new(Self::default());
        let clock = ticker.clone();
        let thread = thread::Builder::new()
            .name("epoch-ticker".into())
            .spawn(move || clock.tick(&engine))
            .context("start the epoch thread")?;
        ticker.thread.get_or_init(|| thread.thread().clone());
        Ok(ticker)
    }

    /// Keeps the clock going until the guard is dropped.
    pub fn run(self: &Arc<Self>) -> Running {
        self.running.fetch_add(1, SeqCst);
        if self.resting.load(SeqCst)
            && let Some(thread) = self.thread.get()
        {
            thread.unpark();
        }
        Running(self.clone())
    }

    fn tick(&self, engine: &EngineWeak) {
        let mut ticks_alone = 0;
        while let Some(engine) = engine.upgrade() {
            engine.increment_epoch();
            drop(engine);
            ticks_alone = if self.running.load(SeqCst) == 0 { ticks_alone + 1 } else { 0 };
            if ticks_alone < TICKS_BEFORE_REST {
                thread::sleep(TICK);
            } else {
                self.rest();
            }
        }
    }

    /// Said first, then looked again: a guest that begins in between either is seen here or sees that we rest.
    fn rest(&self) {
        self.resting.store(true, SeqCst);
        if self.running.load(SeqCst) == 0 {
            thread::park_timeout(REST);
        }
        self.resting.store(false, SeqCst);
    }
}
