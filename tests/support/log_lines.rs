//! Collects the log lines of one thread, for tests about what is logged.

use std::{
    fmt,
    sync::{Arc, Mutex},
};

use tracing::{
    Event, Level, Subscriber,
    field::{Field, Visit},
    subscriber::DefaultGuard,
};
use tracing_subscriber::{Layer, layer::Context, prelude::*};

/// One log line: its level, where it comes from, its text and its other fields.
#[derive(Clone, Debug)]
pub struct Line {
    pub level: Level,
    pub target: String,
    pub message: String,
    pub fields: String,
}

/// The lines logged on this thread while `_guard` lives.
pub struct LogLines {
    lines: Arc<Mutex<Vec<Line>>>,
    _guard: DefaultGuard,
}

impl LogLines {
    pub fn of_this_thread() -> Self {
        let lines = Arc::new(Mutex::new(Vec::new()));
        let guard = tracing_subscriber::registry().with(Collector(lines.clone())).set_default();
        Self { lines, _guard: guard }
    }

    pub fn all(&self) -> Vec<Line> {
        self.lines.lock().unwrap().clone()
    }

    /// What guests wrote.
    pub fn of_guests(&self) -> Vec<Line> {
        self.all().into_iter().filter(|line| line.target == "millstream::guest").collect()
    }
}

struct Collector(Arc<Mutex<Vec<Line>>>);

impl<S: Subscriber> Layer<S> for Collector {
    fn on_event(&self, event: &Event<'_>, _context: Context<'_, S>) {
        let mut texts = Texts::default();
        event.record(&mut texts);
        let metadata = event.metadata();
        self.0.lock().unwrap().push(Line {
            level: *metadata.level(),
            target: metadata.target().to_owned(),
            message: texts.message,
            fields: texts.fields,
        });
    }
}

#[derive(Default)]
struct Texts {
    message: String,
    fields: String,
}

impl Visit for Texts {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if field.name() == "message" {
            self.message = format!("{value:?}");
        } else {
            self.fields += &format!("{}={value:?} ", field.name());
        }
    }
}
