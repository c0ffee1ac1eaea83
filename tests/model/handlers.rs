//! Random handlers: what becomes of a delivery follows from the seed, the group, the message and how often it came.

use std::{sync::Arc, time::Duration};

use millstream::{
    consumer::Newest,
    handler::{Concurrency, Finished, Handler, Handling, Message, NewMessage, Outcome},
};
use tokio_util::sync::CancellationToken;

use super::trace::{End, Trace};

/// How the handlers of one run behave.
#[derive(Clone, Copy, Debug)]
pub struct Manner {
    pub seed: u64,
    /// Of a hundred deliveries, how many do not end well.
    pub failing: u32,
    /// Most milliseconds of an ordinary delivery.
    pub slow: u64,
}

/// The handler of one life of a host.
pub struct Random {
    pub trace: Trace,
    pub life: String,
    pub manner: Manner,
}

impl Random {
    pub fn newest(self) -> (tokio::sync::watch::Sender<Option<Arc<dyn Handler>>>, Newest) {
        tokio::sync::watch::channel(Some(Arc::new(self) as Arc<dyn Handler>))
    }

    fn random(&self, message: &Message, before: usize) -> fastrand::Rng {
        let of_group = message.group.bytes().fold(7_u64, |hash, byte| hash.wrapping_mul(31).wrapping_add(byte.into()));
        let number = u64::try_from(message.id).unwrap().wrapping_mul(1000).wrapping_add(before as u64);
        fastrand::Rng::with_seed(self.manner.seed ^ of_group.wrapping_mul(0x9e37) ^ number << 20)
    }

    fn plan(&self, message: &Message, before: usize) -> (Duration, End) {
        let mut random = self.random(message, before);
        let time = match random.u32(0..100) {
            0..40 => 0,
            40..96 => random.u64(0..=self.manner.slow),
            _ => random.u64(20..150),
        };
        let end = if random.u32(0..100) < self.manner.failing {
            let delay = Duration::from_millis(random.u64(0..80));
            match random.u32(0..100) {
                0..40 => End::Retry,
                40..50 => End::RetryAfter(delay),
                50..62 => End::Reject,
                62..75 => End::Later(delay),
                75..80 => End::Later(Duration::ZERO),
                _ => End::Trap,
            }
        } else if random.u32(0..4) == 0 {
            End::Effects
        } else {
            End::Done
        };
        (Duration::from_millis(time), end)
    }
}

impl Handler for Random {
    fn handle<'a>(&'a self, message: Message, cut: &'a CancellationToken) -> Handling<'a> {
        Box::pin(async move {
            let (mut running, before) = self.trace.start(&self.life, &message);
            let (time, end) = self.plan(&message, before);
            if !time.is_zero() {
                // Of both at once either may be seen first, as after a freeze: an answer that comes too late is fenced.
                tokio::select! {
                    () = cut.cancelled() => {
                        running.end = End::Cut;
                        return Finished::plain(Outcome::HandBack);
                    }
                    () = tokio::time::sleep(time) => {}
                }
            }
            running.end = end;
            let reason = || "no".to_owned();
            let outcome = match end {
                End::Done => Outcome::Done,
                End::Effects => {
                    let random = self.random(&message, 999);
                    return Finished { produced: vec![receipt(&message, random)], ..Finished::plain(Outcome::Done) };
                }
                End::Retry => Outcome::Retry { reason: reason() },
                End::RetryAfter(delay) => Outcome::RetryAfter { delay, reason: reason() },
                End::Reject => Outcome::Reject { reason: reason() },
                End::Later(delay) => Outcome::Later { delay },
                // Without the message of a real panic in the log of the test.
                End::Trap => std::panic::resume_unwind(Box::new("trap")),
                End::Cut | End::Dropped => unreachable!("no plan says so"),
            };
            Finished::plain(outcome)
        })
    }
}

/// Names its message, so that each can be counted. Some meet other producers' locks. The same each time that the message
/// comes: one idempotency key for two of them is refused.
fn receipt(message: &Message, mut random: fastrand::Rng) -> NewMessage {
    let name = format!("{} {}", message.group, message.id);
    let keyed = random.u32(0..3) == 0;
    NewMessage {
        stream: "receipts".into(),
        payload: Some(name.clone().into_bytes()),
        key: keyed.then(|| format!("r{}", random.u32(0..3))),
        concurrency: keyed.then_some(Concurrency::Ordered),
        idempotency_key: (random.u32(0..5) == 0).then_some(name),
        ..NewMessage::default()
    }
}
