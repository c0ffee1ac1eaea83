//! Fails a test that logs an ERROR or WARN it did not announce.

use std::{
    fmt::Write,
    sync::{Arc, Mutex},
};

use tracing::{
    Dispatch, Event, Level, Subscriber,
    field::{Field, Visit},
    subscriber::DefaultGuard,
};
use tracing_subscriber::{Layer, layer::Context, layer::SubscriberExt};

/// Watches the log of the thread it was made on: all of a `#[tokio::test]`, whose tasks share its thread.
pub struct Logs {
    seen: Arc<Mutex<Seen>>,
    dispatch: Dispatch,
    _guard: DefaultGuard,
}

#[derive(Default)]
struct Seen {
    lines: Vec<String>,
    expected: Vec<String>,
}

impl Logs {
    pub fn watch() -> Self {
        let seen = Arc::new(Mutex::new(Seen::default()));
        let dispatch = Dispatch::new(tracing_subscriber::registry().with(Watcher(Arc::clone(&seen))));
        let _guard = tracing::dispatcher::set_default(&dispatch);
        Self { seen, dispatch, _guard }
    }

    /// What other threads of the test log to, to be watched as well.
    pub fn dispatch(&self) -> Dispatch {
        self.dispatch.clone()
    }

    /// Lets lines pass that contain `part`.
    pub fn expect(&self, part: &str) {
        self.seen.lock().expect("no test panics here").expected.push(part.to_owned());
    }

    /// The lines that nobody expected.
    pub fn unexpected(&self) -> Vec<String> {
        let seen = self.seen.lock().expect("no test panics here");
        let expected = |line: &&String| !seen.expected.iter().any(|part| line.contains(part));
        seen.lines.iter().filter(expected).cloned().collect()
    }
}

impl Drop for Logs {
    fn drop(&mut self) {
        let unexpected = self.unexpected();
        if !unexpected.is_empty() && !std::thread::panicking() {
            panic!("unexpected log lines: {unexpected:#?}");
        }
    }
}

struct Watcher(Arc<Mutex<Seen>>);

impl<S: Subscriber> Layer<S> for Watcher {
    fn on_event(&self, event: &Event<'_>, _context: Context<'_, S>) {
        let level = *event.metadata().level();
        if level == Level::ERROR || level == Level::WARN {
            let mut line = Line(format!("{level} {}", event.metadata().target()));
            event.record(&mut line);
            self.0.lock().expect("no test panics here").lines.push(line.0);
        }
    }
}

struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        let _ = write!(self.0, " {}={value:?}", field.name());
    }
}

/// A test that cannot see a stray warning would pass whatever is logged.
#[test]
fn only_warnings_that_were_announced_pass() {
    let logs = Logs::watch();
    logs.expect("rain");
    tracing::info!("all is well");
    tracing::warn!("rain");
    tracing::error!(wind = 12, "storm");
    let unexpected = logs.unexpected();
    assert!(unexpected.len() == 1 && unexpected[0].contains("storm") && unexpected[0].contains("wind=12"));
    logs.expect("storm");
}
