//! The engine's clock: an OS thread that raises the epoch, so that running guests look up now and then.
//!
//! It is a thread and not a tokio timer because the guests it interrupts may hold every thread of the runtime.

use std::{thread, time::Duration};

use anyhow::Context;
use wasmtime::EngineWeak;

/// How often running guests look up. Measured on 2 cores: a tick costs about 4 us of one core (a wake-up and an atomic
/// add), so 500 a second are 0.2 %; at 10 ms a spinning guest would hold up a fast one noticeably longer.
pub const TICK: Duration = Duration::from_millis(2);

/// Starts the thread. It holds the engine weakly and ends within a tick of the engine's end.
pub fn start(engine: EngineWeak) -> anyhow::Result<()> {
    let tick = move || {
        while let Some(engine) = engine.upgrade() {
            engine.increment_epoch();
            drop(engine);
            thread::sleep(TICK);
        }
    };
    thread::Builder::new().name("epoch-ticker".into()).spawn(tick).map(drop).context("start the epoch thread")
}
