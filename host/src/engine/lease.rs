//! A host's one row: its identity, and how long it may work.

use std::time::Duration;

use sqlx::Row;

use super::{HostId, frozen, units::milliseconds};
use crate::database::Database;

/// Takes a new identity, valid for `lease` from now.
pub async fn register(database: &Database, name: &str, lease: Duration) -> Result<HostId, sqlx::Error> {
    let query = database
        .query(include_str!("lease_register.sql"))
        .bind(name)
        .bind(env!("CARGO_PKG_VERSION"))
        .bind(milliseconds(lease))
        .bind(database.sessions());
    let rows = database.fetch_all(query).await?;
    Ok(HostId(rows[0].try_get(0)?))
}

/// Renews the lease and publishes the counters. `false`: it had run out, and the identity is lost for good.
pub async fn renew(
    database: &Database,
    host: HostId,
    lease: Duration,
    stats: &serde_json::Value,
) -> Result<bool, sqlx::Error> {
    let query = database.query(include_str!("lease_renew.sql")).bind(host.0).bind(milliseconds(lease)).bind(stats);
    Ok(!database.fetch_all(query).await?.is_empty())
}

/// Hosts whose lease has run out and whose work is still theirs.
pub async fn dead_hosts(database: &Database) -> Result<Vec<HostId>, sqlx::Error> {
    let rows = database.fetch_all(database.query(include_str!("lease_dead.sql"))).await?;
    rows.iter().map(|row| row.try_get(0).map(HostId)).collect()
}

/// Gives the identity up, once nothing is held under it. `false`: something still is.
pub async fn deregister(database: &Database, host: HostId) -> Result<bool, sqlx::Error> {
    let mut tx = database.begin_with(frozen::BEGIN).await?;
    let lock = database.query(include_str!("lease_deregister_lock.sql")).bind(host.0);
    frozen::lock(database, &mut tx, lock, host).await?;
    let gone = database.query(include_str!("lease_deregister.sql")).bind(host.0).fetch_all(&mut *tx).await?;
    tx.commit().await?;
    Ok(!gone.is_empty())
}
