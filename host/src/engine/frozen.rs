//! What a recovery needs may be locked by the dead host itself: frozen in the middle of a turn or a settle, it neither ends nor
//! goes on, and neither do its sessions. Whoever takes its work over ends them, which it knows by a token in their names.

use std::time::Duration;

use sqlx::{
    PgConnection, Postgres,
    postgres::{PgArguments, PgRow},
    query::Query,
};
use tokio::time::sleep;

use super::HostId;
use crate::database::Database;

/// How often it is looked who holds the lock.
const LOOK: Duration = Duration::from_millis(500);

/// The transaction of such a lock. What is not frozen may hold it for longer: other dead hosts must not wait for it, so this one
/// is looked at again.
pub(super) const BEGIN: &str =
    "begin; set local idle_in_transaction_session_timeout = '1min'; set local lock_timeout = '5s'";

/// Runs a statement that locks for the recovery of a host, and ends the sessions of dead hosts that keep it waiting.
pub(super) async fn lock(
    database: &Database,
    tx: &mut PgConnection,
    lock: Query<'_, Postgres, PgArguments>,
    host: HostId,
) -> Result<Option<PgRow>, sqlx::Error> {
    let backend: i32 = sqlx::query_scalar("select pg_catalog.pg_backend_pid()").fetch_one(&mut *tx).await?;
    let lock = lock.fetch_optional(&mut *tx);
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
