//! What the tests of message keys stand on: keyed messages, and a handler that notes what begins and ends.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use millstream::handler::{Concurrency, Finished, Handler, Handling, Message, NewMessage, Outcome};
use tokio_util::sync::CancellationToken;

use super::{
    engine::{Project, text},
    wait_for,
};

pub const LIMIT: Duration = Duration::from_secs(60);

pub fn streams(group: &str) -> String {
    format!(
        r#"
        [streams.orders]
        [groups.email]
        stream = "orders"
        handler = "email.wasm"
        retry = {{ max_attempts = 3, base = "20ms", max = "20ms", jitter = 0.0 }}
        {group}
        "#
    )
}

pub fn keyed(key: &str, mode: Concurrency, payload: &str) -> NewMessage {
    NewMessage { key: Some(key.into()), concurrency: Some(mode), ..text(payload) }
}

pub fn version(key: &str, mode: Concurrency, payload: &str) -> NewMessage {
    NewMessage { compaction: Some(true), ..keyed(key, mode, payload) }
}

/// What began and ended, in order: `+payload` and `-payload`.
#[derive(Clone, Default)]
pub struct Trace(Arc<Mutex<Vec<String>>>);

impl Trace {
    fn note(&self, what: char, message: &Message) -> String {
        let payload = String::from_utf8(message.payload.clone().unwrap_or_default()).unwrap();
        self.0.lock().unwrap().push(format!("{what}{payload}"));
        payload
    }

    pub fn all(&self) -> Vec<String> {
        self.0.lock().unwrap().clone()
    }

    /// What ended, in order.
    pub fn ended(&self) -> Vec<String> {
        self.all().iter().filter_map(|noted| noted.strip_prefix('-')).map(str::to_owned).collect()
    }

    pub fn started(&self) -> usize {
        self.all().iter().filter(|noted| noted.starts_with('+')).count()
    }

    /// No two deliveries whose payloads begin so overlapped.
    pub fn one_at_a_time(&self, payload: &str) {
        let noted: Vec<_> = self.all().into_iter().filter(|noted| noted[1..].starts_with(payload)).collect();
        for pair in noted.chunks(2) {
            assert_eq!(pair[0][1..], pair[1][1..], "one at a time: {noted:?}");
        }
    }
}

/// Runs each message for a moment, and answers what `judge` says of its payload and attempt.
struct Steps<F> {
    trace: Trace,
    /// Nothing ends while it is set.
    stuck: Arc<AtomicBool>,
    judge: F,
}

impl<F: Fn(&str, &Message) -> Finished + Send + Sync> Handler for Steps<F> {
    fn handle<'a>(&'a self, message: Message, cut: &'a CancellationToken) -> Handling<'a> {
        let payload = self.trace.note('+', &message);
        Box::pin(async move {
            tokio::time::sleep(Duration::from_millis(1)).await;
            while self.stuck.load(Relaxed) {
                tokio::select! {
                    () = cut.cancelled() => return Finished::plain(Outcome::HandBack),
                    () = tokio::time::sleep(Duration::from_millis(2)) => {}
                }
            }
            let finished = (self.judge)(&payload, &message);
            self.trace.note('-', &message);
            finished
        })
    }
}

pub fn steps(
    judge: impl Fn(&str, &Message) -> Finished + Send + Sync + 'static,
) -> (Trace, Arc<AtomicBool>, Arc<dyn Handler>) {
    let (trace, stuck) = (Trace::default(), Arc::new(AtomicBool::new(false)));
    let handler = Steps { trace: trace.clone(), stuck: Arc::clone(&stuck), judge };
    (trace, stuck, Arc::new(handler))
}

pub fn failed() -> Finished {
    Finished::plain(Outcome::Retry { reason: "not yet".into() })
}

pub async fn all_done(project: &Project) {
    wait_for("nothing is left over", LIMIT, async || {
        assert_eq!(project.stuck_keys().await, 0, "E7: no key is stuck without an owner");
        // The cursor first: between two looks everything may be claimed, and then it is left over.
        let unclaimed = "select count(*) from {schema}.message_log_1 l, {schema}.cursor c where l.id > c.claimed";
        project.number(unclaimed).await == 0 && project.left_over().await == 0
    })
    .await;
}

pub fn rejected() -> Finished {
    Finished::plain(Outcome::Reject { reason: "bad".into() })
}
