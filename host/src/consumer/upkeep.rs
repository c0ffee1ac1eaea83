//! Runs the engine's maintenance steps, each when it is due, and tells what came of them. A step that fails is counted
//! and tried again; it never stops the others. Which host does the work is decided in the database.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use serde::Serialize;
use serde_json::json;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use super::counters::Counters;
use crate::{
    database::{Database, DatabaseError, Reaction, reaction, told},
    engine::{Pinned, Report, Step, maintain},
};

/// How often a step runs. The log must be extended before its partitions are full; components matter least and their
/// query reads the most.
fn interval(step: Step) -> Duration {
    match step {
        Step::Extend => Duration::from_secs(2),
        Step::IdempotencyKeys | Step::DeadLetters | Step::Lag | Step::Versions | Step::Retention => {
            Duration::from_secs(10)
        }
        Step::Keys => Duration::from_secs(60),
        Step::Components => Duration::from_secs(600),
    }
}

/// Intervals are spread over this much of themselves, so that hosts started together do not all come at once.
const JITTER: f64 = 0.2;

/// One step since the host started, as `status` shows it.
#[derive(Debug, Default, Serialize)]
struct Done {
    runs: u64,
    rows: u64,
    failures: u64,
    /// `None` once it succeeds again.
    last_error: Option<String>,
}

/// What this host knows of the maintenance it did.
#[derive(Debug, Default)]
struct Upkeep {
    steps: BTreeMap<&'static str, Done>,
    pinned: BTreeMap<String, Pinned>,
    groups_passed: u64,
}

/// Runs what is due until `stop`. What that cuts short, a later run of any host finishes.
pub async fn keep_up(database: Database, counters: Arc<Counters>, stop: CancellationToken) {
    let mut upkeep = Upkeep::default();
    let mut due: Vec<(Instant, Step)> =
        Step::ALL.iter().map(|step| (Instant::now() + interval(*step).mul_f64(fastrand::f64()), *step)).collect();
    loop {
        let (at, step) = due.iter_mut().min_by_key(|(at, _)| *at).expect("there are steps");
        let run = async {
            sleep(at.saturating_duration_since(Instant::now())).await;
            maintain(&database, *step).await
        };
        let Some(result) = stop.run_until_cancelled(run).await else { return };
        upkeep.take(*step, result);
        counters.publish("maintenance", upkeep.snapshot());
        *at = Instant::now() + interval(*step).mul_f64(1.0 - JITTER / 2.0 + JITTER * fastrand::f64());
    }
}

impl Upkeep {
    fn take(&mut self, step: Step, result: anyhow::Result<Report>) {
        let report = result.unwrap_or_else(|error| Report { errors: vec![error], ..Report::default() });
        let done = self.steps.entry(step.name()).or_default();
        done.runs += 1;
        done.rows += report.rows;
        done.failures += report.errors.len() as u64;
        let first = report.errors.first().map(|error| told(error.as_ref()));
        if done.last_error != first {
            for error in &report.errors {
                tell(step, error);
            }
        }
        done.last_error = first;
        for passed in &report.passed {
            self.groups_passed += 1;
            tracing::warn!(
                group = passed.group,
                from = passed.from,
                to = passed.to,
                "the group lagged longer than max_lag and was moved on; it will not see what is in between"
            );
        }
        for stuck in &report.stuck {
            tracing::error!(
                group = stuck.group,
                keys = stuck.keys,
                message_key = stuck.example,
                cause = stuck.cause.as_str(),
                "messages waited behind keys that nobody would have run; they are ready again. Please report this: it \
                 must never happen"
            );
        }
        if step == Step::Retention && report.errors.is_empty() {
            self.take_pinned(report.pinned);
        }
    }

    /// Says once that a stream's retention does not go on, and once that it does again.
    fn take_pinned(&mut self, pinned: BTreeMap<String, Pinned>) {
        for (stream, Pinned { partitions, group }) in &pinned {
            if !self.pinned.contains_key(stream) {
                tracing::warn!(
                    stream,
                    group,
                    partitions,
                    "partitions older than the stream's retention are kept, since the group still needs them"
                );
            }
        }
        for stream in self.pinned.keys().filter(|stream| !pinned.contains_key(*stream)) {
            tracing::info!(stream, "nothing holds back the stream's retention any more");
        }
        self.pinned = pinned;
    }

    fn snapshot(&self) -> serde_json::Value {
        let pinned = |(stream, pinned): (&String, &Pinned)| {
            (stream.clone(), json!({ "partitions": pinned.partitions, "group": pinned.group }))
        };
        json!({
            "steps": self.steps,
            "pinned": self.pinned.iter().map(pinned).collect::<BTreeMap<_, _>>(),
            "groups_passed": self.groups_passed,
        })
    }
}

/// A busy database is no news: the step comes again, and `status` has the error.
fn tell(step: Step, error: &anyhow::Error) {
    let is_busy = error.downcast_ref::<DatabaseError>().is_some_and(|error| reaction(error) == Reaction::Busy);
    if is_busy {
        tracing::debug!(step = step.name(), "failed to {error:#}; will try again");
    } else {
        tracing::warn!(step = step.name(), "failed to {}; will try again", told(error.as_ref()));
    }
}

#[cfg(test)]
mod tests {
    use anyhow::anyhow;

    use super::*;
    use crate::engine::{StuckCause, StuckKeys};

    #[test]
    fn steps_are_counted_by_themselves_and_the_last_error_goes_with_the_next_success() {
        let mut upkeep = Upkeep::default();
        upkeep.take(Step::Extend, Ok(Report { rows: 3, ..Report::default() }));
        upkeep.take(Step::Lag, Err(DatabaseError::PoolTimedOut.into()));
        let errors = vec![anyhow!(DatabaseError::PoolTimedOut), anyhow!(DatabaseError::PoolClosed)];
        upkeep.take(Step::Extend, Ok(Report { rows: 1, errors, ..Report::default() }));
        let steps = upkeep.snapshot()["steps"].clone();
        let (extend, lag) = (&steps["extend"], &steps["lag"]);
        assert_eq!((&extend["runs"], &extend["rows"], &extend["failures"]), (&json!(2), &json!(4), &json!(2)));
        assert!(extend["last_error"].is_string() && lag["last_error"].is_string());
        upkeep.take(Step::Extend, Ok(Report::default()));
        assert_eq!(upkeep.snapshot()["steps"]["extend"]["last_error"], json!(null));
        assert_eq!(upkeep.snapshot()["steps"]["lag"]["failures"], json!(1));
    }

    #[test]
    fn stuck_keys_are_counted_and_told_of_as_an_error() {
        let lines = Arc::new(std::sync::Mutex::new(Vec::new()));
        let writer = Arc::clone(&lines);
        let subscriber =
            tracing_subscriber::fmt().with_ansi(false).with_writer(move || Lines(Arc::clone(&writer))).finish();
        let mut upkeep = Upkeep::default();
        tracing::subscriber::with_default(subscriber, || {
            upkeep.take(Step::Keys, Ok(Report::default()));
            let stuck = StuckKeys { group: "email".into(), keys: 2, example: "a".into(), cause: StuckCause::NoLease };
            upkeep.take(Step::Keys, Ok(Report { rows: 2, stuck: vec![stuck], ..Report::default() }));
        });
        let keys = upkeep.snapshot()["steps"]["keys"].clone();
        assert_eq!((&keys["runs"], &keys["rows"], &keys["failures"]), (&json!(2), &json!(2), &json!(0)));
        let told = String::from_utf8(lines.lock().expect("no writer panics").clone()).expect("text");
        assert_eq!(told.lines().count(), 1, "{told}");
        assert!(told.contains("ERROR") && told.contains("keys=2") && told.contains("no_lease"), "{told}");
    }

    struct Lines(Arc<std::sync::Mutex<Vec<u8>>>);

    impl std::io::Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().expect("no writer panics").extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn what_is_pinned_is_kept_while_the_look_at_it_fails() {
        let mut upkeep = Upkeep::default();
        let pinned = || [("orders".to_owned(), Pinned { partitions: 2, group: "email".to_owned() })].into();
        upkeep.take(Step::Retention, Ok(Report { pinned: pinned(), ..Report::default() }));
        upkeep.take(Step::Retention, Err(DatabaseError::PoolTimedOut.into()));
        assert_eq!(upkeep.snapshot()["pinned"], json!({ "orders": { "partitions": 2, "group": "email" } }));
        upkeep.take(Step::Retention, Ok(Report::default()));
        assert_eq!(upkeep.snapshot()["pinned"], json!({}));
    }
}
