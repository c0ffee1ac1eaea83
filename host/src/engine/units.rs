//! How a duration goes to Postgres.

use std::time::Duration;

/// Whole milliseconds, the unit of every column and parameter that holds a duration.
pub(super) fn milliseconds(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)
}
