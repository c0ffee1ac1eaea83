//! From how a delivery ended to what becomes of its message. Pure: no clock, no database.

use std::time::Duration;

use crate::{
    config::Retry,
    handler::{ERROR_BYTES_MAX, Failure, FailureClass, Outcome},
};

/// What becomes of a message whose delivery has ended.
#[derive(Clone, Debug, PartialEq)]
pub enum Verdict {
    /// Settled for good.
    Done,
    /// Delivered again after `delay`. `failures` counts this one if it was a failure.
    Again { delay: Duration, failures: u32, failure: Option<Failure> },
    /// Moved to the dead letters after `attempts` counted failures.
    Dead { attempts: u32, failure: Failure },
}

/// Judges one delivery. `failures` is how many were counted before it, `spread` a random number in 0..1 for the jitter.
///
/// Exactly `max_attempts` counted failures make a dead letter; `later` and a hand-back count nothing.
pub fn verdict(outcome: Outcome, failures: u32, retry: &Retry, spread: f64) -> Verdict {
    let attempts = failures + 1;
    let (failure, delay) = match outcome {
        Outcome::Done => return Verdict::Done,
        Outcome::Later { delay } => return Verdict::Again { delay: bounded(delay), failures, failure: None },
        Outcome::HandBack => return Verdict::Again { delay: Duration::ZERO, failures, failure: None },
        Outcome::Reject { reason } => {
            return Verdict::Dead { attempts, failure: failure(FailureClass::Rejected, reason) };
        }
        Outcome::Retry { reason } => (failure(FailureClass::Failed, reason), None),
        Outcome::RetryAfter { delay, reason } => (failure(FailureClass::Failed, reason), Some(bounded(delay))),
        Outcome::Failed(failed) => (failure(failed.class, failed.error), None),
    };
    if attempts >= retry.max_attempts {
        return Verdict::Dead { attempts, failure };
    }
    let delay = delay.unwrap_or_else(|| backoff(attempts, retry, spread));
    Verdict::Again { delay, failures: attempts, failure: Some(failure) }
}

/// Longest delay a handler may ask for: a year. It keeps timestamps in range whatever a handler answers.
const DELAY_MAX: Duration = Duration::from_secs(366 * 24 * 3600);

fn bounded(delay: Duration) -> Duration {
    delay.min(DELAY_MAX)
}

fn failure(class: FailureClass, reason: String) -> Failure {
    Failure { class, error: storable(reason) }
}

/// As Postgres can store it: no NUL, and bounded.
fn storable(mut text: String) -> String {
    text.retain(|character| character != '\0');
    let mut end = text.len().min(ERROR_BYTES_MAX);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text.truncate(end);
    text
}

/// base x factor^(failures - 1), at most `max`, spread by the jitter. A lower bound of the real delay.
fn backoff(failures: u32, retry: &Retry, spread: f64) -> Duration {
    let exponent = i32::try_from(failures - 1).unwrap_or(i32::MAX);
    let plain = retry.base.as_secs_f64() * retry.factor.powi(exponent);
    let bounded = plain.min(retry.max.as_secs_f64()); // infinity is bounded too
    let spread = bounded * (1.0 + retry.jitter * (2.0 * spread - 1.0));
    Duration::try_from_secs_f64(spread.max(0.0)).unwrap_or(retry.max)
}

#[cfg(test)]
mod tests {
    use super::*;

    const RETRY: Retry = Retry {
        max_attempts: 3,
        base: Duration::from_secs(1),
        factor: 2.0,
        max: Duration::from_secs(600),
        jitter: 0.2,
    };

    fn failed() -> Outcome {
        Outcome::Retry { reason: "no".into() }
    }

    #[test]
    fn max_attempts_means_exactly_so_many_deliveries() {
        let mut failures = 0;
        let mut deliveries = 0;
        loop {
            deliveries += 1;
            match verdict(failed(), failures, &RETRY, 0.5) {
                Verdict::Again { failures: counted, .. } => failures = counted,
                Verdict::Dead { attempts, .. } => break assert_eq!((attempts, deliveries), (3, 3)),
                Verdict::Done => unreachable!("it failed"),
            }
        }
    }

    #[test]
    fn what_is_no_failure_counts_nothing() {
        for outcome in [Outcome::HandBack, Outcome::Later { delay: Duration::ZERO }] {
            let again = Verdict::Again { delay: Duration::ZERO, failures: 2, failure: None };
            assert_eq!(verdict(outcome, 2, &RETRY, 0.5), again);
        }
    }

    #[test]
    fn a_rejected_message_is_dead_at_once() {
        let Verdict::Dead { attempts, failure } = verdict(Outcome::Reject { reason: "bad".into() }, 0, &RETRY, 0.0)
        else {
            panic!("not dead")
        };
        assert_eq!((attempts, failure.class, failure.error.as_str()), (1, FailureClass::Rejected, "bad"));
    }

    #[test]
    fn backoff_doubles_is_spread_and_never_overflows() {
        let check =
            |failures, spread, seconds| assert_eq!(backoff(failures, &RETRY, spread), Duration::from_secs_f64(seconds));
        check(1, 0.5, 1.0);
        check(2, 0.5, 2.0);
        check(3, 0.0, 3.2);
        check(3, 1.0, 4.8);
        check(u32::MAX, 0.5, 600.0);
    }

    #[test]
    fn an_error_is_stored_without_nul_and_bounded_at_a_character() {
        let stored = storable(format!("\0{}", "é".repeat(ERROR_BYTES_MAX)));
        assert!(stored.len() <= ERROR_BYTES_MAX && stored.starts_with('é'));
    }
}
