//! After a lost connection or an ambiguous commit: what does the database say we hold?

use sqlx::Row;

use super::{ClaimId, GroupHandle, GroupId, HostId, Lane, Source, Token};
use crate::database::Database;

/// A run of messages that the database says a host holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held {
    pub token: Token,
    pub first: i64,
    /// Inclusive. Ids in between that are no messages are possible: ids are not dense.
    pub last: i64,
}

/// Everything the host holds in the group.
pub async fn held(database: &Database, host: HostId, group: &GroupHandle) -> Result<Vec<Held>, sqlx::Error> {
    let query = database.query(include_str!("reconcile_held.sql")).bind(group.id.0).bind(host.0);
    let read = |row: &sqlx::postgres::PgRow| {
        let source = if row.try_get("is_exception")? { Source::Exception } else { Source::Log };
        let token = Token { claim: ClaimId(row.try_get("claim_id")?), source };
        Ok(Held { token, first: row.try_get("from_id")?, last: row.try_get("to_id")? })
    };
    database.fetch_all(query).await?.iter().map(read).collect()
}

/// The keys the host has in the group.
pub async fn held_keys(database: &Database, host: HostId, group: &GroupHandle) -> Result<Vec<Lane>, sqlx::Error> {
    let query = database.query(include_str!("reconcile_keys.sql")).bind(group.id.0).bind(host.0);
    let read =
        |row: &sqlx::postgres::PgRow| Ok(Lane { key: row.try_get::<&str, _>(0)?.into(), number: row.try_get(1)? });
    database.fetch_all(query).await?.iter().map(read).collect()
}

/// The groups in which the host holds anything.
pub async fn groups_held(database: &Database, host: HostId) -> Result<Vec<GroupId>, sqlx::Error> {
    let rows = database.fetch_all(database.query(include_str!("groups_held.sql")).bind(host.0)).await?;
    rows.iter().map(|row| row.try_get(0).map(GroupId)).collect()
}

/// Gives back, with no attempt counted, what is held under claims that memory knows nothing of. Returns how many
/// messages that were; none, too, when the lease has run out and recovery will find them.
pub async fn give_back(
    database: &Database,
    host: HostId,
    group: &GroupHandle,
    claims: &[ClaimId],
) -> Result<i64, sqlx::Error> {
    let mut tx = database.begin().await?;
    if database.query(include_str!("fence.sql")).bind(host.0).fetch_optional(&mut *tx).await?.is_none() {
        return Ok(0);
    }
    database.query(include_str!("recover_lock_group.sql")).bind(group.id.0).execute(&mut *tx).await?;
    let query = database.stream_query(include_str!("reconcile_give_back.sql"), group.stream_id.0);
    let query = query.bind(group.id.0).bind(host.0).bind(claims.iter().map(|claim| claim.0).collect::<Vec<_>>());
    let query = query.bind(group.concurrency_override());
    let count = query.fetch_one(&mut *tx).await?.try_get(0)?;
    tx.commit().await?;
    Ok(count)
}
