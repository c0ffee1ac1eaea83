//! Threads for guests that compute for long, so that these never hold a thread of the host's own runtime.
//!
//! Why not the host's threads: one message is many short turns of the host's loops (claim, answers of Postgres, settle),
//! and each stood behind a slice. Worse, a thread that computes without a pause loses its place in the system's queue to
//! everybody else, so each of these turns waited for the system too. Beside 16 endless loops on a busy machine of 2
//! cores the median from produce to report was ten times that of today's; looking at sockets and timers more often
//! (tokio's `event_interval`) did not help. Figures: `docs/performance.md`.
//!
//! These threads rank a little lower than all others of the process, see [`NICENESS`]. They never block: they run guests
//! in slices (`state::look_up`), one on each core, in turn.

use std::{
    future::Future,
    pin::Pin,
    task::{Context, Poll},
    thread,
};

use anyhow::Context as _;
use tokio::runtime::{Builder, Handle, Runtime};
use tokio_util::task::AbortOnDropHandle;
use tracing::instrument::WithSubscriber;

/// How much lower than the host's own threads these rank: they get a third of what one of those gets where both want a
/// core. Lower would starve handlers that honestly compute for long while another group has a backlog, until they
/// time out; and a thread of the lowest rank that holds a lock of the process is not run until it can let it go.
/// Postgres gains as well where the system schedules it beside us (one container, one service), not where it has a
/// share of its own (a session each under `sched_autogroup`).
#[cfg(target_os = "linux")]
const NICENESS: i32 = 5;

/// The threads, one for each core.
#[derive(Debug)]
pub struct LongRuns {
    /// Gone only while this is dropped.
    runtime: Option<Runtime>,
}

impl LongRuns {
    pub fn start() -> anyhow::Result<Self> {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        // Without drivers of its own: timers and sockets of a guest stay with the host's runtime, see `AtHome`.
        let runtime = Builder::new_multi_thread()
            .worker_threads(cores)
            .thread_name("long-run")
            .on_thread_start(rank_lower)
            .build()
            .context("start the threads for handlers that compute for long")?;
        Ok(Self { runtime: Some(runtime) })
    }

    /// Moves a guest here. Dropping the handle drops the guest, at the end of its slice if it is in one.
    pub fn spawn<F>(&self, guest: F) -> AbortOnDropHandle<F::Output>
    where
        F: Future + Send + Unpin + 'static,
        F::Output: Send,
    {
        let runtime = self.runtime.as_ref().expect("it is only taken when this is dropped");
        // Its log lines go where those of its first slice went.
        let guest = AtHome { guest, home: Handle::current() }.with_current_subscriber();
        AbortOnDropHandle::new(runtime.spawn(guest))
    }
}

impl Drop for LongRuns {
    fn drop(&mut self) {
        // Does not wait: this may be dropped on a thread that must not block.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// A guest whose imports find the runtime it came from: what they open (a timer, a pooled connection) is driven there
/// and may outlive the guest.
struct AtHome<F> {
    guest: F,
    home: Handle,
}

impl<F: Future + Unpin> Future for AtHome<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        let this = &mut *self;
        let _entered = this.home.enter();
        Pin::new(&mut this.guest).poll(context)
    }
}

#[cfg(target_os = "linux")]
fn rank_lower() {
    // On Linux this is the thread alone; elsewhere it would be the whole process.
    if let Err(error) = rustix::process::nice(NICENESS) {
        tracing::debug!(%error, "failed to lower the rank of a thread for long runs; it ranks with all others");
    }
}

#[cfg(not(target_os = "linux"))]
fn rank_lower() {}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use rustix::process::getpriority_process;

    use super::*;

    #[tokio::test]
    async fn long_runs_rank_below_the_host_and_the_host_stays_where_it_was() {
        let rank = || getpriority_process(None).expect("read the rank of this thread");
        let before = rank();
        let there = LongRuns::start().unwrap().spawn(Box::pin(async move { rank() })).await.unwrap();
        assert_eq!(there, (before + NICENESS).min(19));
        assert_eq!(rank(), before);
    }
}
