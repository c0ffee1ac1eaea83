//! Lets guests take turns: a guest that computes for long never starves one that does not, and every guest ends at its
//! deadline or when it is cut, whether it spins or waits.
//!
//! How: the epoch callback (`state.rs`) makes a guest give way after each slice. A guest begins on the host's own
//! threads; one that has used up a slice is *over budget* and moves to threads of its own (`long_runs.rs`), where such
//! guests rotate. So a fast handler stands behind the first slice of others at most, however many spin.

use std::{
    any::Any,
    future::Future,
    panic::{AssertUnwindSafe, catch_unwind},
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use tokio::task::JoinError;
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};

use super::{
    delivery::{Delivery, Stopped},
    long_runs::LongRuns,
};

/// At which look-up a guest gives way. One comes at every tick, so a slice is one to two ticks: short enough that a fast
/// handler behind one such guest a core waits a few milliseconds, long enough that the switch (about 2 us) costs nothing.
///
/// Looks are counted and not time: a fast guest whose thread the system stops for some milliseconds looks up once when it
/// goes on, and must not be taken for one that computes.
pub const LOOKS_A_SLICE: u32 = 2;

/// How much longer than its deadline a guest that spins gets, so that it is interrupted where it stands and its
/// backtrace says where it spun. After it, or when it waits in an import, it is dropped without.
const INTERRUPT_GRACE: Duration = Duration::from_millis(250);

/// How a guest's future ended.
pub enum Ended<T> {
    Returned(T),
    Stopped(Stopped),
    /// Our own code panicked inside it.
    Panicked(String),
}

/// Runs `guest` to its end. When this returns, `guest` is finished or dropped, with everything it owns. Dropping this
/// drops `guest` at the end of its slice.
pub async fn take_turns<F>(
    guest: F,
    delivery: &Arc<Delivery>,
    long_runs: &LongRuns,
    cut: &CancellationToken,
) -> Ended<F::Output>
where
    F: Future + Send + 'static,
    F::Output: Send,
{
    let mut guest = Guest { future: Box::pin(guest), delivery: delivery.clone() };
    // Most handlers answer at the first poll: for them no timer and no waker is registered.
    let first = std::future::poll_fn(|context| Poll::Ready(Pin::new(&mut guest).poll(context))).await;
    if let Poll::Ready(ended) = first {
        return ended;
    }

    let mut stop = pin!(stop_signal(delivery, cut));
    let within_budget = std::future::poll_fn(|context| {
        if delivery.is_over_budget() {
            return Poll::Ready(None);
        }
        if let Poll::Ready(reason) = stop.as_mut().poll(context) {
            // Within its budget it has not given way, so it waits in an import and cannot be interrupted there.
            return Poll::Ready(Some(Ended::Stopped(reason)));
        }
        match Pin::new(&mut guest).poll(context) {
            Poll::Ready(ended) => Poll::Ready(Some(ended)),
            Poll::Pending if delivery.is_over_budget() => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        }
    });
    if let Some(ended) = within_budget.await {
        return ended;
    }

    let mut long_run = long_runs.spawn(guest);
    let reason = tokio::select! {
        ended = &mut long_run => return joined(ended, Stopped::Cut),
        reason = stop => reason,
    };
    end(long_run, reason, delivery).await
}

/// Ends a guest that is over budget.
async fn end<T>(mut long_run: AbortOnDropHandle<Ended<T>>, reason: Stopped, delivery: &Delivery) -> Ended<T> {
    // A spinning guest is let run up to its next check, which interrupts it.
    if reason == Stopped::Timeout
        && delivery.slice_ended()
        && let Ok(ended) = tokio::time::timeout(INTERRUPT_GRACE, &mut long_run).await
    {
        return joined(ended, reason);
    }
    // One that is just running is not dropped but interrupts itself as well, and that is its answer.
    long_run.abort();
    joined(long_run.await, reason)
}

/// `reason` is why a guest was dropped that has no answer.
fn joined<T>(ended: Result<Ended<T>, JoinError>, reason: Stopped) -> Ended<T> {
    ended.unwrap_or_else(|error| match error.try_into_panic() {
        Ok(panic) => Ended::Panicked(panic_text(&*panic)),
        Err(_) => Ended::Stopped(reason),
    })
}

/// Waits until the guest must end, whatever it is doing.
async fn stop_signal(delivery: &Delivery, cut: &CancellationToken) -> Stopped {
    tokio::select! {
        biased;
        () = cut.cancelled() => Stopped::Cut,
        () = tokio::time::sleep_until(delivery.deadline().into()) => Stopped::Timeout,
    }
}

/// A guest's future, one turn a poll. A panic of ours inside it ends this delivery, not the process.
struct Guest<F> {
    future: Pin<Box<F>>,
    delivery: Arc<Delivery>,
}

impl<F: Future> Future for Guest<F> {
    type Output = Ended<F::Output>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        self.delivery.begin_turn();
        match catch_unwind(AssertUnwindSafe(|| self.future.as_mut().poll(context))) {
            Ok(polled) => polled.map(Ended::Returned),
            Err(panic) => Poll::Ready(Ended::Panicked(panic_text(&*panic))),
        }
    }
}

fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("panic without a text").to_owned()
}

#[cfg(test)]
mod tests {
    use std::{
        sync::atomic::{AtomicBool, Ordering::SeqCst},
        thread,
    };

    use tokio::{runtime::Handle, sync::oneshot, task::yield_now};

    use super::*;
    use crate::sandbox::output::{Output, Writer};

    fn delivery() -> Arc<Delivery> {
        let writer = Writer { group: "g".into(), digest: "".into(), message_id: 1, attempt: 1 };
        let delivery = Delivery::new(Output::new(writer, Arc::default(), 0));
        delivery.begin(Duration::from_secs(60), &CancellationToken::new());
        Arc::new(delivery)
    }

    async fn run<F>(guest: F, delivery: &Arc<Delivery>) -> Ended<F::Output>
    where
        F: Future<Output: Send> + Send + 'static,
    {
        take_turns(guest, delivery, &LongRuns::start().unwrap(), &CancellationToken::new()).await
    }

    /// As a guest does that computes through a whole slice.
    async fn compute(delivery: &Delivery) {
        delivery.end_slice();
        yield_now().await;
    }

    /// For ever.
    async fn go_on(computes: bool, delivery: &Delivery) {
        loop {
            if computes {
                compute(delivery).await;
            } else {
                std::future::pending::<()>().await;
            }
        }
    }

    #[tokio::test]
    async fn a_panic_of_the_host_ends_one_delivery() {
        let guest = async {
            yield_now().await;
            panic!("an import of ours");
        };
        let ended: Ended<()> = run(guest, &delivery()).await;
        assert!(matches!(ended, Ended::Panicked(text) if text == "an import of ours"));
    }

    /// Counts the slices that the host's own thread gives to a guest that computes: the first, and none after.
    #[tokio::test]
    async fn a_guest_over_budget_leaves_the_threads_of_the_host_and_takes_its_runtime_along() {
        let (here, home) = (thread::current().id(), Handle::current().id());
        let delivery = delivery();
        let clock = delivery.clone();
        let guest = async move {
            let mut slices_here = 0;
            for _ in 0..100 {
                slices_here += u32::from(thread::current().id() == here);
                assert_eq!(Handle::current().id(), home, "what an import opens belongs to the host's runtime");
                compute(&clock).await;
            }
            // Timers go on, although the threads for long runs have none.
            tokio::time::sleep(Duration::from_millis(1)).await;
            slices_here
        };
        assert!(matches!(run(guest, &delivery).await, Ended::Returned(1)));
    }

    #[tokio::test]
    async fn a_guest_that_waits_now_and_then_and_never_computes_stays() {
        let here = thread::current().id();
        let guest = async move {
            for _ in 0..100 {
                yield_now().await;
                assert_eq!(thread::current().id(), here);
            }
        };
        assert!(matches!(run(guest, &delivery()).await, Ended::Returned(())));
    }

    struct SaysWhenDropped(Option<oneshot::Sender<()>>);

    impl Drop for SaysWhenDropped {
        fn drop(&mut self) {
            let _ = self.0.take().unwrap().send(());
        }
    }

    /// Whether it computes or waits, on whichever thread: nobody waiting for it any more is its end.
    #[tokio::test]
    async fn a_guest_nobody_waits_for_is_dropped() {
        for computes in [true, false] {
            let (delivery, long_runs) = (delivery(), LongRuns::start().unwrap());
            let (send, dropped) = oneshot::channel();
            let (clock, cut, moved) = (delivery.clone(), CancellationToken::new(), Arc::new(AtomicBool::new(false)));
            let has_moved = moved.clone();
            let guest = async move {
                let _says = SaysWhenDropped(Some(send));
                compute(&clock).await;
                has_moved.store(true, SeqCst);
                go_on(computes, &clock).await;
            };
            let waiting = take_turns(guest, &delivery, &long_runs, &cut);
            tokio::select! {
                _ = waiting => panic!("it never ends by itself"),
                () = async { while !moved.load(SeqCst) { yield_now().await } } => {}
            }
            dropped.await.unwrap();
        }
    }

    /// The same when it is cut, and then it is dropped before the answer is there.
    #[tokio::test]
    async fn a_guest_that_is_cut_is_gone_before_its_end_is_told() {
        for computes in [true, false] {
            let (delivery, long_runs) = (delivery(), LongRuns::start().unwrap());
            let (send, mut dropped) = oneshot::channel();
            let (clock, cut) = (delivery.clone(), CancellationToken::new());
            let cut_by_guest = cut.clone();
            let guest = async move {
                let _says = SaysWhenDropped(Some(send));
                compute(&clock).await;
                cut_by_guest.cancel();
                go_on(computes, &clock).await;
            };
            let ended = take_turns(guest, &delivery, &long_runs, &cut).await;
            assert!(matches!(ended, Ended::Stopped(Stopped::Cut)));
            assert_eq!(dropped.try_recv(), Ok(()));
        }
    }
}
