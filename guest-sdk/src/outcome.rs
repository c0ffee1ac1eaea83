//! How a delivery ends, and which answers of a handler mean which outcome.

use std::{error::Error, fmt::Write, time::Duration};

/// How a delivery ended.
///
/// ```
/// use millstream_guest::Outcome;
/// use std::time::Duration;
///
/// fn answer(status: u16) -> Outcome {
///     match status {
///         200 => Outcome::Done,
///         400 => Outcome::reject("the shop does not know this order"),
///         429 => Outcome::retry_after(Duration::from_secs(60), "the shop is busy"),
///         _ => Outcome::retry(format!("the shop answered {status}")),
///     }
/// }
/// assert_eq!(answer(500), Outcome::Retry { reason: "the shop answered 500".into() });
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Acknowledged; effects are committed.
    Done,
    /// Failed; again on the group's retry schedule. Counts as an attempt.
    Retry {
        /// Stored and shown to people: it must not quote the payload.
        reason: String,
    },
    /// Failed; again after `delay`. Counts as an attempt.
    RetryAfter {
        /// At millisecond precision.
        delay: Duration,
        /// Stored and shown to people: it must not quote the payload.
        reason: String,
    },
    /// Will never succeed: to the dead-letter queue now.
    Reject {
        /// Stored and shown to people: it must not quote the payload.
        reason: String,
    },
    /// Not now, and not a failure: again after `delay`, no attempt counted.
    Later {
        /// At millisecond precision.
        delay: Duration,
    },
}

impl Outcome {
    /// Failed; again on the group's retry schedule.
    ///
    /// ```
    /// use millstream_guest::Outcome;
    /// assert_eq!(Outcome::retry("no stock"), Outcome::Retry { reason: "no stock".into() });
    /// ```
    pub fn retry(reason: impl Into<String>) -> Self {
        Self::Retry { reason: reason.into() }
    }

    /// Failed; again after `delay`.
    ///
    /// ```
    /// use millstream_guest::Outcome;
    /// use std::time::Duration;
    /// let delay = Duration::from_secs(5);
    /// assert_eq!(Outcome::retry_after(delay, "busy"), Outcome::RetryAfter { delay, reason: "busy".into() });
    /// ```
    pub fn retry_after(delay: Duration, reason: impl Into<String>) -> Self {
        Self::RetryAfter { delay, reason: reason.into() }
    }

    /// Will never succeed: to the dead-letter queue now.
    ///
    /// ```
    /// use millstream_guest::Outcome;
    /// assert_eq!(Outcome::reject("unknown currency"), Outcome::Reject { reason: "unknown currency".into() });
    /// ```
    pub fn reject(reason: impl Into<String>) -> Self {
        Self::Reject { reason: reason.into() }
    }

    /// Not now, and not a failure: again after `delay`.
    ///
    /// ```
    /// use millstream_guest::Outcome;
    /// use std::time::Duration;
    /// let delay = Duration::from_secs(5);
    /// assert_eq!(Outcome::later(delay), Outcome::Later { delay });
    /// ```
    pub fn later(delay: Duration) -> Self {
        Self::Later { delay }
    }
}

/// What a handler may answer: an [`Outcome`], `()` for done, or a `Result` of either.
///
/// An error means retry, with the error and all its sources as the reason. Every error type of `std`, `anyhow::Error` and
/// plain strings will do.
///
/// ```
/// use millstream_guest::{IntoOutcome, Outcome};
///
/// let parsed = "twelve".parse::<u32>().map(|_| ());
/// assert_eq!(parsed.into_outcome(), Outcome::retry("invalid digit found in string"));
/// assert_eq!(().into_outcome(), Outcome::Done);
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` is no answer of a handler",
    note = "answer with `Outcome`, with `()`, or with a `Result` of one of them whose error is any `std::error::Error`"
)]
pub trait IntoOutcome {
    /// The outcome that this answer means.
    ///
    /// ```
    /// use millstream_guest::{IntoOutcome, Outcome};
    /// assert_eq!(Err::<(), _>("no stock").into_outcome(), Outcome::retry("no stock"));
    /// ```
    fn into_outcome(self) -> Outcome;
}

impl IntoOutcome for Outcome {
    fn into_outcome(self) -> Outcome {
        self
    }
}

impl IntoOutcome for () {
    fn into_outcome(self) -> Outcome {
        Outcome::Done
    }
}

impl<A: IntoOutcome, E: Into<Box<dyn Error + Send + Sync>>> IntoOutcome for Result<A, E> {
    fn into_outcome(self) -> Outcome {
        match self {
            Ok(answer) => answer.into_outcome(),
            Err(error) => Outcome::Retry { reason: with_sources(&*error.into()) },
        }
    }
}

/// The error and everything that caused it, outermost first: `send the receipt: connect: timed out`.
fn with_sources(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    // A chain is a handful of links; the bound keeps an error that names itself as its source from running for ever.
    for _ in 0..SOURCES_MAX {
        let Some(cause) = source else { break };
        write!(text, ": {cause}").expect("writing to a String does not fail");
        source = cause.source();
    }
    text
}

/// How many causes of an error are told.
const SOURCES_MAX: usize = 32;

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    struct Outer(std::num::ParseIntError);

    impl std::fmt::Display for Outer {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("read the amount")
        }
    }

    impl Error for Outer {
        fn source(&self) -> Option<&(dyn Error + 'static)> {
            Some(&self.0)
        }
    }

    fn outer() -> Outer {
        Outer("x".parse::<u32>().expect_err("`x` is no number"))
    }

    #[test]
    fn an_error_is_a_retry_and_names_its_sources() {
        let answer: Result<(), Outer> = Err(outer());
        assert_eq!(answer.into_outcome(), Outcome::retry("read the amount: invalid digit found in string"));
    }

    #[test]
    fn anyhow_works_without_being_a_dependency() {
        use anyhow::Context;
        let answer = Err::<Outcome, _>(outer()).context("charge the customer");
        let reason = "charge the customer: read the amount: invalid digit found in string";
        assert_eq!(answer.into_outcome(), Outcome::retry(reason));
    }

    #[test]
    fn an_outcome_inside_a_result_is_kept() {
        let answer: Result<Outcome, Outer> = Ok(Outcome::reject("no"));
        assert_eq!(answer.into_outcome(), Outcome::reject("no"));
    }
}
