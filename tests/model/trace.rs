//! What a run notes while it goes on: what was produced, what was delivered, which hosts lived. One clock for all: the
//! wall clock of this machine, which the database reads too. Never judges anything.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use millstream::handler::Message;

/// Microseconds since 1970.
pub type Micros = i64;

pub fn now() -> Micros {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).expect("the clock is set");
    i64::try_from(since.as_micros()).expect("before the year 300000")
}

pub fn micros(duration: Duration) -> Micros {
    i64::try_from(duration.as_micros()).expect("a short time")
}

/// A message whose produce committed.
#[derive(Clone, Debug)]
pub struct Produced {
    pub id: i64,
    pub payload: Option<String>,
    pub routing_key: Option<String>,
    pub rank: Option<i64>,
    /// Before its transaction began.
    pub began: Micros,
    /// After its transaction was known to have committed.
    pub confirmed: Micros,
    pub superseded: bool,
    pub duplicate: bool,
}

/// How a delivery ended, as the handler knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    Done,
    /// Done, with a receipt.
    Effects,
    Retry,
    RetryAfter(Duration),
    Reject,
    Later(Duration),
    Trap,
    /// Cut by its host: it drains, or has lost its lease or its claim.
    Cut,
    /// Its host died with it.
    Dropped,
}

impl End {
    pub fn is_done(self) -> bool {
        matches!(self, Self::Done | Self::Effects)
    }

    /// Counts as an attempt.
    pub fn is_failure(self) -> bool {
        matches!(self, Self::Retry | Self::RetryAfter(_) | Self::Reject | Self::Trap)
    }
}

/// One delivery of one message.
#[derive(Clone, Debug)]
pub struct Delivery {
    /// Of the trace: rising with the start.
    pub number: usize,
    pub group: String,
    /// The life of a host.
    pub life: String,
    pub id: i64,
    pub key: Option<String>,
    pub rank: Option<i64>,
    pub routing_key: Option<String>,
    pub payload: Option<String>,
    pub attempt: u32,
    pub skipped: u32,
    pub gap_since: Option<i64>,
    pub redriven: bool,
    pub start: Micros,
    pub end: Option<(Micros, End)>,
}

/// What an operator did to a group, or to one key of it.
#[derive(Clone, Debug)]
pub struct Verb {
    pub group: String,
    pub key: Option<String>,
    pub what: What,
    /// Before it was asked for, and after it was known to be done; of a pause, from when it was known to be so until it was to end.
    pub began: Micros,
    pub ended: Micros,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum What {
    /// Sent to what comes after a position.
    Seek { after: i64 },
    /// These no longer hold up their key.
    Skip(Vec<i64>),
    /// The key rests no longer.
    Release,
    /// It stood still for all of the time between.
    Paused,
}

/// Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Trace(Arc<Mutex<Noted>>);

#[derive(Debug, Default)]
pub struct Noted {
    pub produced: Vec<Produced>,
    /// Ids that were answered and then rolled back.
    pub rolled_back: Vec<i64>,
    pub deliveries: Vec<Delivery>,
    pub verbs: Vec<Verb>,
    /// Producers that waited for somebody who is none, as the database told it.
    pub blocked_producers: Vec<String>,
    /// How often each message began in each group.
    begun: HashMap<(Arc<str>, i64), usize>,
}

impl Trace {
    pub fn produced(&self, messages: Vec<Produced>) {
        self.0.lock().unwrap().produced.extend(messages);
    }

    pub fn rolled_back(&self, ids: impl IntoIterator<Item = i64>) {
        self.0.lock().unwrap().rolled_back.extend(ids);
    }

    pub fn verb(&self, verb: Verb) {
        self.0.lock().unwrap().verbs.push(verb);
    }

    pub fn blocked_producer(&self, told: String) {
        self.0.lock().unwrap().blocked_producers.push(told);
    }

    /// Notes a start; the answer notes the end, at the latest when it is dropped. Also tells how often the message was
    /// delivered to the group before.
    pub fn start(&self, life: &str, message: &Message) -> (Running, usize) {
        let mut noted = self.0.lock().unwrap();
        let number = noted.deliveries.len();
        let begun = noted.begun.entry((Arc::clone(&message.group), message.id)).or_default();
        let before = *begun;
        *begun += 1;
        let payload = message.payload.clone().map(|payload| String::from_utf8(payload).unwrap());
        noted.deliveries.push(Delivery {
            number,
            group: message.group.to_string(),
            life: life.to_owned(),
            id: message.id,
            key: message.key.clone(),
            rank: message.rank,
            routing_key: message.routing_key.clone(),
            payload,
            attempt: message.attempt,
            skipped: message.skipped,
            gap_since: message.gap_since,
            redriven: message.redriven,
            start: now(),
            end: None,
        });
        (Running { trace: self.clone(), number, end: End::Dropped }, before)
    }

    /// How many deliveries have begun.
    pub fn begun(&self) -> usize {
        self.0.lock().unwrap().deliveries.len()
    }

    pub fn take(&self) -> Noted {
        std::mem::take(&mut *self.0.lock().unwrap())
    }
}

/// A delivery that runs.
pub struct Running {
    trace: Trace,
    number: usize,
    pub end: End,
}

impl Drop for Running {
    fn drop(&mut self) {
        let mut noted = self.trace.0.lock().unwrap();
        let end = (now(), self.end);
        if let Some(delivery) = noted.deliveries.get_mut(self.number) {
            delivery.end = Some(end);
        }
    }
}
