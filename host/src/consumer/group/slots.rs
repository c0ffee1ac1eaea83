//! The slots of one group: tasks that take claimed messages from one queue and run the handler.

use std::{
    panic::AssertUnwindSafe,
    sync::Arc,
    time::{Duration, Instant},
};

use futures_util::FutureExt;
use tokio::{
    sync::{mpsc, watch},
    task::JoinSet,
};
use tokio_util::sync::CancellationToken;

use super::lanes::{Lanes, goes_on, in_lane};
use crate::{
    engine::{Claimed, GuestGrant, GuestSession, Keyed, Left, OpenSql, Token},
    handler::{Concurrency, Failure, FailureClass, Finished, Handler, Message, Outcome, Sql},
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
    pub keyed: Option<Keyed>,
    pub skipped: u32,
    /// Its dead letter waits for how it ends.
    pub is_redriven: bool,
    pub finished: Finished,
    /// How long its handler took; `None`: it did not run.
    pub busy: Option<Duration>,
    /// The transaction of a delivery that is done and ran SQL.
    pub sql: Option<Box<OpenSql>>,
}

impl Ended {
    pub fn new(claimed: &Claimed, finished: Finished) -> Self {
        let message = &claimed.message;
        Self {
            token: claimed.token,
            message_id: message.id,
            failures: claimed.failures,
            payload_bytes: message.payload.as_ref().map_or(0, Vec::len) as u64,
            keyed: claimed.keyed.clone(),
            skipped: message.skipped,
            is_redriven: message.redriven,
            finished,
            busy: None,
            sql: None,
        }
    }

    /// Whether it asks for more than its acknowledgement.
    pub fn has_effects(&self) -> bool {
        !self.finished.produced.is_empty() || self.sql.is_some()
    }

    /// How its group treats it.
    pub fn mode(&self) -> Concurrency {
        self.keyed.as_ref().map_or(Concurrency::Parallel, |keyed| keyed.mode)
    }

    /// A message that no slot has begun.
    pub fn handed_back(work: &Work) -> Self {
        Self::new(&work.claimed, Finished::plain(Outcome::HandBack))
    }
}

/// The queue, and the tasks that work on it.
#[derive(Debug)]
pub struct Slots {
    queue: async_channel::Sender<Work>,
    /// Our own end, to take back what no slot has begun.
    waiting: async_channel::Receiver<Work>,
    lanes: Lanes,
    tasks: JoinSet<()>,
}

impl Slots {
    /// Starts `count` slots. What ends comes out of the receiver; it holds no more than was put in.
    pub fn start(count: u32, newest: &Newest, grant: Option<&GuestGrant>) -> (Self, mpsc::UnboundedReceiver<Ended>) {
        let (queue, waiting) = async_channel::unbounded(); // bounded by what the group claims: see pacing
        let (sender, ended) = mpsc::unbounded_channel();
        let lanes = Lanes::default();
        let mut tasks = JoinSet::new();
        for _ in 0..count {
            let slot = Slot {
                queue: queue.clone(),
                waiting: waiting.clone(),
                lanes: lanes.clone(),
                newest: newest.clone(),
                grant: grant.cloned(),
                ended: sender.clone(),
            };
            tasks.spawn(slot.run());
        }
        (Self { queue, waiting, lanes, tasks }, ended)
    }

    /// The message runs as soon as its key and a slot are free.
    pub fn put(&self, work: Work) {
        if let Some(work) = self.lanes.put(work) {
            self.run(work);
        }
    }

    /// Runs a message whose key is free.
    pub fn run(&self, work: Work) {
        self.queue.try_send(work).expect("we hold the receiving end");
    }

    pub fn lanes(&self) -> &Lanes {
        &self.lanes
    }

    /// Takes back everything that no slot has begun: first what waits for its key, else it would be started meanwhile.
    pub fn take_back(&self) -> Vec<Work> {
        let behind = self.lanes.take_back();
        let first: Vec<Work> = std::iter::from_fn(|| self.waiting.try_recv().ok()).collect();
        for work in &first {
            self.lanes.give_up(work); // no slot has it, so none would go on with its lane
        }
        first.into_iter().chain(behind).collect()
    }

    /// Lets the slots finish what they run, and end.
    pub async fn stop(mut self) {
        self.queue.close();
        while self.tasks.join_next().await.is_some() {}
    }
}

struct Slot {
    queue: async_channel::Sender<Work>,
    waiting: async_channel::Receiver<Work>,
    lanes: Lanes,
    newest: Newest,
    /// Of a group with `allow.sql`.
    grant: Option<GuestGrant>,
    ended: mpsc::UnboundedSender<Ended>,
}

impl Slot {
    async fn run(self) {
        while let Ok(Work { claimed, cut }) = self.waiting.recv().await {
            let mut ended = Ended::new(&claimed, Finished::plain(Outcome::HandBack));
            let handler = self.newest.borrow().clone();
            if let Some(handler) = handler.filter(|_| !cut.is_cancelled()) {
                let started = Instant::now();
                (ended.finished, ended.sql) = self.deliver(&*handler, claimed.message, &cut).await;
                ended.busy = Some(started.elapsed());
            }
            let lane = in_lane(ended.keyed.as_ref()).map(|keyed| keyed.lane.clone());
            let message_id = ended.message_id;
            let goes_on = goes_on(&ended);
            if let (Some(lane), false) = (&lane, goes_on) {
                self.lanes.hold(lane, message_id); // before the loop hears of it, and settles it
            }
            if self.ended.send(ended).is_err() {
                return; // the group has ended, and with it whoever would settle this
            }
            // After the loop was told, so that it hears of a lane's deliveries in their order.
            if let (Some(lane), true) = (&lane, goes_on)
                && let Some(next) = self.lanes.next(lane)
                && self.queue.try_send(next).is_err()
            {
                return;
            }
        }
    }
}

impl Slot {
    async fn deliver(
        &self,
        handler: &dyn Handler,
        mut message: Message,
        cut: &CancellationToken,
    ) -> (Finished, Option<Box<OpenSql>>) {
        let session = self.grant.as_ref().map(GuestGrant::session);
        message.sql = session.clone().map(|session| session as Arc<dyn Sql>);
        let delivery = AssertUnwindSafe(handler.handle(message, cut)).catch_unwind();
        let finished = delivery.await.unwrap_or_else(|_| our_fault());
        match session {
            Some(session) => with_sql(finished, &session),
            None => (finished, None),
        }
    }
}

/// What a delivery that may have run SQL leaves. That the database failed it is not its failure, whatever it made of it.
fn with_sql(finished: Finished, session: &GuestSession) -> (Finished, Option<Box<OpenSql>>) {
    match (session.take(), &finished.outcome) {
        (Left::Open(sql), Outcome::Done) => (finished, Some(sql)),
        (Left::Lost, Outcome::Done) | (Left::Failed, _) => {
            (Finished { outcome: Outcome::HandBack, produced: Vec::new(), ..finished }, None)
        }
        _ => (finished, None),
    }
}

/// A panic of the host while it served one message fails that message, not the process.
fn our_fault() -> Finished {
    let error = "the host panicked while it ran this message; its log has the details".to_owned();
    Finished::plain(Outcome::Failed(Failure { class: FailureClass::Host, error }))
}
