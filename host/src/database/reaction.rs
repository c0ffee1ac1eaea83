//! What to do about a database error. The one place that knows SQLSTATEs of Postgres itself.

use sqlx::postgres::PgDatabaseError;

/// How the caller reacts to a database error.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reaction {
    /// Nothing is wrong with what was asked: back off and do it again from the start.
    Busy,
    /// Postgres understood and says no: a constraint, a privilege, one of our own functions.
    Refused(Refusal),
    /// Our own fault, or a damaged database: doing it again changes nothing.
    Broken,
}

/// What Postgres said no to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    pub sqlstate: String,
    pub message: String,
    /// What to do about it, where one of our own functions says so.
    pub hint: Option<String>,
    /// The name of the violated constraint: the guard whose name says what happened.
    pub constraint: Option<String>,
}

/// Sorts an error by what to do about it.
pub fn reaction(error: &sqlx::Error) -> Reaction {
    match error {
        sqlx::Error::Database(error) => {
            let sqlstate = error.code().unwrap_or_default();
            let is_passing =
                is_stale_plan(&sqlstate, error.message()) || is_partition_missing(&sqlstate, error.constraint());
            if is_busy(&sqlstate) || is_passing {
                Reaction::Busy
            } else if is_broken(&sqlstate) {
                Reaction::Broken
            } else {
                Reaction::Refused(Refusal {
                    sqlstate: sqlstate.into_owned(),
                    message: error.message().to_owned(),
                    hint: error.try_downcast_ref::<PgDatabaseError>().and_then(|error| error.hint()).map(str::to_owned),
                    constraint: error.constraint().map(str::to_owned),
                })
            }
        }
        error if is_connection_lost(error) => Reaction::Busy,
        _ => Reaction::Broken,
    }
}

/// Whether a COMMIT that answered with this error may have committed all the same. Everything else rolled back.
pub fn is_ambiguous_commit(error: &sqlx::Error) -> bool {
    match error {
        // 08: connection; 40003: completion unknown; 57P0x: shut down while the reply was on its way.
        sqlx::Error::Database(error) => {
            let sqlstate = error.code().unwrap_or_default();
            sqlstate.starts_with("08") || sqlstate.starts_with("57P0") || sqlstate == "40003"
        }
        error => is_connection_lost(error),
    }
}

/// The connection, not the statement, is what failed. A full pool is such a case: no connection could be had in time.
fn is_connection_lost(error: &sqlx::Error) -> bool {
    use sqlx::Error::{Io, PoolClosed, PoolTimedOut, Protocol, Tls, WorkerCrashed};
    // sqlx reports a reply cut short as a protocol error; the connection is then dropped and the next one is clean.
    matches!(error, Io(_) | Tls(_) | Protocol(_) | PoolTimedOut | PoolClosed | WorkerCrashed)
}

fn is_busy(sqlstate: &str) -> bool {
    // 08 connection, 53 out of resources (connections, disk, memory), 58 the system below Postgres.
    let class = matches!(sqlstate.get(..2), Some("08" | "53" | "58"));
    class
        || matches!(
            sqlstate,
            "25006"             // read-only: the primary has just become a standby
            | "25P03"           // idle in transaction for too long
            | "26000"           // a pooler moved us to a server that never saw our statement
            | "40001" | "40P01" // serialization failure, deadlock
            | "40003"           // completion unknown
            | "55P03"           // lock not available
            | "57014"           // cancelled, statement_timeout included
            | "57P01" | "57P02" | "57P03" | "57P05" // shut down, crashed, starting up, idle for too long
        )
}

/// A migration by a newer host changed a table below a prepared statement. A fresh connection prepares it anew.
fn is_stale_plan(sqlstate: &str, message: &str) -> bool {
    sqlstate == "0A000" && message.contains("cached plan")
}

/// The log has run out of partitions while a transaction that extends it is open: the next ones come with its end. A
/// violated check constraint has the same SQLSTATE, and a name.
fn is_partition_missing(sqlstate: &str, constraint: Option<&str>) -> bool {
    sqlstate == "23514" && constraint.is_none()
}

fn is_broken(sqlstate: &str) -> bool {
    match sqlstate.get(..2) {
        // 42: our SQL is wrong, or a table is missing; 42501 (privileges) is the operator's to mend.
        Some("42") => sqlstate != "42501",
        // 25: transaction state; XX: internal error, damaged data; F0: damaged configuration.
        Some("25" | "XX" | "F0" | "") | None => true,
        Some(_) => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lost_connection_is_busy_and_its_commit_ambiguous() {
        for error in [sqlx::Error::Io(std::io::ErrorKind::UnexpectedEof.into()), sqlx::Error::PoolTimedOut] {
            assert_eq!(reaction(&error), Reaction::Busy, "{error}");
            assert!(is_ambiguous_commit(&error), "{error}");
        }
    }

    #[test]
    fn an_answer_that_cannot_be_read_is_our_own_fault() {
        let error = sqlx::Error::ColumnNotFound("x".to_owned());
        assert_eq!(reaction(&error), Reaction::Broken);
        assert!(!is_ambiguous_commit(&error));
    }

    #[test]
    fn every_sqlstate_has_one_reaction() {
        for (sqlstate, busy, broken) in [
            ("57P01", true, false),
            ("40001", true, false),
            ("55P03", true, false),
            ("53300", true, false),
            ("23505", false, false),
            ("42501", false, false),
            ("MS001", false, false),
            ("42P01", false, true),
            ("25P02", false, true),
            ("XX001", false, true),
        ] {
            assert_eq!((is_busy(sqlstate), is_broken(sqlstate)), (busy, broken), "{sqlstate}");
        }
    }
}
