//! The row of a host whose lease has run out may be locked by the host itself: frozen in the middle of a turn or a settle, it
//! neither ends nor goes on, and neither does its session. Whoever takes its work over ends that session, which it knows by
//! the host's name.

use std::time::Duration;

use sqlx::{PgConnection, postgres::PgRow};
use tokio::time::sleep;

use super::HostId;
use crate::database::Database;

/// How often it is looked who holds the row.
const LOOK: Duration = Duration::from_millis(500);

/// The transaction of such a lock. What is not frozen may hold the row for longer: other dead hosts must not wait for it, so
/// this one is looked at again.
pub(super) const BEGIN: &str =
    "begin; set local idle_in_transaction_session_timeout = '1min'; set local lock_timeout = '5s'";

/// Runs a statement that locks the row of a host, and ends the sessions of its own that keep it waiting.
pub(super) async fn lock_host(
    database: &Database,
    tx: &mut PgConnection,
    statement: &str,
    host: HostId,
) -> Result<Option<PgRow>, sqlx::Error> {
    let backend: i32 = sqlx::query_scalar("select pg_catalog.pg_backend_pid()").fetch_one(&mut *tx).await?;
    let lock = database.query(statement).bind(host.0).fetch_optional(&mut *tx);
    tokio::pin!(lock);
    loop {
        tokio::select! {
            locked = &mut lock => return locked,
            () = sleep(LOOK) => {}
        }
        let ended = database.query(include_str!("frozen_end.sql")).bind(backend).bind(host.0);
        // The look may have to wait for a connection, where this transaction has the only one: the lock must not wait for it.
        let ended = tokio::select! {
            locked = &mut lock => return locked,
            ended = database.fetch_all(ended) => ended,
        };
        match ended {
            Ok(ended) if ended.is_empty() => {}
            Ok(ended) => tracing::info!(host = host.0, sessions = ended.len(), "ended what a frozen host held"),
            Err(error) => tracing::debug!("failed to look who holds up a recovery: {error:#}"),
        }
    }
}
