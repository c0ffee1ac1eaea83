//! Lets guests take turns: a guest that computes for long never starves one that does not, and every guest ends at its
//! deadline or when it is cut, whether it spins or waits.
//!
//! How: the epoch callback (`store.rs`) makes a guest give way after each slice. A guest that has used up a slice is
//! *over budget* and is polled only with one of as many permits as there are cores; the semaphore is fair, so such
//! guests rotate. So at most that many of them stand in the runtime's queue before a fast handler, however many spin.
//! A permit is held for one poll only: a guest that waits in an import holds none.

use std::{
    any::Any,
    future::Future,
    panic::{AssertUnwindSafe, catch_unwind},
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;

use super::delivery::{Delivery, Stopped};

/// How long a guest may compute before it gives way. Two ticks: short enough that a fast handler behind one such guest
/// a core waits a few milliseconds, long enough that the switch (about 2 us) costs nothing.
pub const SLICE: Duration = Duration::from_millis(2);

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

/// Runs `guest` to its end. When this returns, `guest` is finished or dropped, with everything it owns.
pub async fn take_turns<F: Future>(
    guest: F,
    delivery: &Delivery,
    permits: &Arc<Semaphore>,
    cut: &CancellationToken,
) -> Ended<F::Output> {
    let mut guest = pin!(guest);
    // Most handlers answer at the first poll: for them no timer and no waker is registered.
    let first = std::future::poll_fn(|context| Poll::Ready(poll_guest(guest.as_mut(), delivery, context))).await;
    if let Poll::Ready(ended) = first {
        return ended;
    }

    let mut stop = pin!(stop_signal(delivery, cut));
    let mut stopped = None;
    let mut grace = pin!(tokio::time::sleep_until((delivery.deadline() + INTERRUPT_GRACE).into()));
    let mut permit = None;
    std::future::poll_fn(move |context| {
        if stopped.is_none()
            && let Poll::Ready(reason) = stop.as_mut().poll(context)
        {
            stopped = Some(reason);
        }
        if let Some(reason) = stopped {
            // A spinning guest is let run up to its next check, which interrupts it.
            let interrupts_itself = reason == Stopped::Timeout && delivery.slice_ended();
            if !interrupts_itself || grace.as_mut().poll(context).is_ready() {
                return Poll::Ready(Ended::Stopped(reason));
            }
        } else if delivery.is_over_budget() {
            ready!(acquire(&mut permit, permits, context));
        }
        let polled = poll_guest(guest.as_mut(), delivery, context);
        permit = None;
        match (polled, stopped) {
            (Poll::Pending, Some(reason)) if !delivery.slice_ended() => Poll::Ready(Ended::Stopped(reason)),
            (polled, _) => polled,
        }
    })
    .await
}

/// Waits until the guest must end, whatever it is doing.
async fn stop_signal(delivery: &Delivery, cut: &CancellationToken) -> Stopped {
    tokio::select! {
        biased;
        () = cut.cancelled() => Stopped::Cut,
        () = tokio::time::sleep_until(delivery.deadline().into()) => Stopped::Timeout,
    }
}

/// One turn of the guest. A panic of ours inside it ends this delivery, not the process.
fn poll_guest<F: Future>(guest: Pin<&mut F>, delivery: &Delivery, context: &mut Context<'_>) -> Poll<Ended<F::Output>> {
    delivery.begin_turn();
    match catch_unwind(AssertUnwindSafe(|| guest.poll(context))) {
        Ok(polled) => polled.map(Ended::Returned),
        Err(panic) => Poll::Ready(Ended::Panicked(panic_text(&*panic))),
    }
}

fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("panic without a text").to_owned()
}

/// A place in the queue for a permit, then the permit itself.
enum Permit {
    Queued(Pin<Box<dyn Future<Output = Option<OwnedSemaphorePermit>> + Send>>),
    Held { _permit: Option<OwnedSemaphorePermit> },
}

fn acquire(slot: &mut Option<Permit>, permits: &Arc<Semaphore>, context: &mut Context<'_>) -> Poll<()> {
    let queued = slot.get_or_insert_with(|| {
        let permits = permits.clone();
        // The semaphore is never closed; were it, running without a permit would be the lesser evil.
        Permit::Queued(Box::pin(async move { permits.acquire_owned().await.ok() }))
    });
    if let Permit::Queued(waiting) = queued {
        let permit = ready!(waiting.as_mut().poll(context));
        *queued = Permit::Held { _permit: permit };
    }
    Poll::Ready(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sandbox::output::{Output, Writer};

    #[tokio::test]
    async fn a_panic_of_the_host_ends_one_delivery() {
        let writer = Writer { group: "g".into(), digest: "".into(), message_id: 1, attempt: 1 };
        let delivery = Delivery::new(Output::new(writer, Arc::default(), 0));
        let cut = CancellationToken::new();
        delivery.begin(Duration::from_secs(60), &cut);
        let guest = async {
            tokio::task::yield_now().await;
            panic!("an import of ours");
        };
        let ended: Ended<()> = take_turns(guest, &delivery, &Arc::new(Semaphore::new(1)), &cut).await;
        assert!(matches!(ended, Ended::Panicked(text) if text == "an import of ours"));
    }
}
