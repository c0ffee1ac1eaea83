//! The slots of one group: tasks that take claimed messages from one queue and run the handler.

use std::{panic::AssertUnwindSafe, sync::Arc};

use futures_util::FutureExt;
use tokio::{
    sync::{mpsc, watch},
    task::JoinSet,
};
use tokio_util::sync::CancellationToken;

use crate::{
    engine::{Claimed, Token},
    handler::{Failure, FailureClass, Finished, Handler, Outcome},
};

/// The newest handler of a group; `None` until its first component is loaded.
pub type Newest = watch::Receiver<Option<Arc<dyn Handler>>>;

/// A message on its way to a slot.
#[derive(Debug)]
pub struct Work {
    pub claimed: Claimed,
    /// Cancelled when the claim is no longer ours, or when the drain is over.
    pub cut: CancellationToken,
}

/// A delivery that has ended.
#[derive(Debug)]
pub struct Ended {
    pub token: Token,
    pub message_id: i64,
    pub failures: u32,
    pub payload_bytes: u64,
    pub finished: Finished,
}

/// The queue, and the tasks that work on it.
#[derive(Debug)]
pub struct Slots {
    queue: async_channel::Sender<Work>,
    /// Our own end, to take back what no slot has begun.
    waiting: async_channel::Receiver<Work>,
    tasks: JoinSet<()>,
}

impl Slots {
    /// Starts `count` slots. What ends comes out of the receiver; it holds no more than was put in.
    pub fn start(count: u32, newest: &Newest) -> (Self, mpsc::UnboundedReceiver<Ended>) {
        let (queue, waiting) = async_channel::unbounded(); // bounded by what the group claims: see pacing
        let (sender, ended) = mpsc::unbounded_channel();
        let mut tasks = JoinSet::new();
        for _ in 0..count {
            tasks.spawn(slot(waiting.clone(), newest.clone(), sender.clone()));
        }
        (Self { queue, waiting, tasks }, ended)
    }

    pub fn put(&self, work: Work) {
        self.queue.try_send(work).expect("we hold the receiving end");
    }

    /// Takes back everything that no slot has begun.
    pub fn take_back(&self) -> Vec<Work> {
        std::iter::from_fn(|| self.waiting.try_recv().ok()).collect()
    }

    /// Lets the slots finish what they run, and end.
    pub async fn stop(mut self) {
        self.queue.close();
        while self.tasks.join_next().await.is_some() {}
    }
}

async fn slot(queue: async_channel::Receiver<Work>, newest: Newest, ended: mpsc::UnboundedSender<Ended>) {
    while let Ok(Work { claimed, cut }) = queue.recv().await {
        let Claimed { token, failures, message } = claimed;
        let message_id = message.id;
        let payload_bytes = message.payload.as_ref().map_or(0, Vec::len) as u64;
        let handler = newest.borrow().clone();
        let finished = match handler {
            Some(handler) if !cut.is_cancelled() => {
                let delivery = AssertUnwindSafe(handler.handle(message, &cut)).catch_unwind();
                delivery.await.unwrap_or_else(|_| our_fault())
            }
            _ => Finished::plain(Outcome::HandBack),
        };
        let one = Ended { token, message_id, failures, payload_bytes, finished };
        if ended.send(one).is_err() {
            return; // the group has ended, and with it whoever would settle this
        }
    }
}

/// A panic of the host while it served one message fails that message, not the process.
fn our_fault() -> Finished {
    let error = "the host panicked while it ran this message; its log has the details".to_owned();
    Finished::plain(Outcome::Failed(Failure { class: FailureClass::Host, error }))
}
