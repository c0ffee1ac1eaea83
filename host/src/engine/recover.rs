//! A dead host's work: any other host takes it over, one group at a time.

use anyhow::{Context, Result};
use sqlx::Row;

use super::{
    GroupId, HostId, StreamId,
    settle::{Burial, bury},
};
use crate::{config, database::Database, handler::FailureClass};

/// A group in which a dead host still holds something.
#[derive(Clone, Copy, Debug)]
pub struct Orphaned {
    pub group: GroupId,
    stream: StreamId,
    max_attempts: u32,
}

const ERROR: &str = "its host stopped renewing its lease while it held this message";

/// The groups in which a host holds something.
pub async fn orphaned_groups(database: &Database, host: HostId) -> Result<Vec<Orphaned>> {
    let query = database.query(include_str!("recover_groups.sql")).bind(host.0);
    let rows = database.fetch_all(query).await.context("find a dead host's groups")?;
    let read = |row: &sqlx::postgres::PgRow| -> Result<Orphaned> {
        let policy: config::Group = serde_json::from_value(row.try_get(2)?)?;
        Ok(Orphaned {
            group: GroupId(row.try_get(0)?),
            stream: StreamId(row.try_get(1)?),
            max_attempts: policy.retry.max_attempts,
        })
    };
    rows.iter().map(read).collect()
}

/// Hands on what a dead host held in one group, in one transaction, and returns how many messages that were.
///
/// Each counts one failure. One that has used up its attempts is dead-lettered here, so that a message that kills its
/// hosts ends.
pub async fn recover(database: &Database, dead: HostId, orphaned: Orphaned) -> Result<usize, sqlx::Error> {
    let mut tx = database.pool.begin().await?;
    let lock = database.query(include_str!("recover_lock.sql")).bind(dead.0);
    if lock.fetch_optional(&mut *tx).await?.is_none() {
        return Ok(0);
    }
    let query = database.stream_query(include_str!("recover_group.sql"), orphaned.stream.0);
    let query =
        query.bind(orphaned.group.0).bind(dead.0).bind(i32::try_from(orphaned.max_attempts).unwrap_or(i32::MAX));
    let rows = query.bind(ERROR).fetch_all(&mut *tx).await?;
    let mut buried = Vec::new();
    for row in &rows {
        if row.try_get("is_dead")? {
            buried.push(Burial {
                message_id: row.try_get("message_id")?,
                attempts: row.try_get("failures")?,
                class: FailureClass::HostLost.as_str(),
                error: ERROR,
                digest: None,
                dead_letter: row.try_get("dead_letter_id")?,
            });
        }
    }
    if !buried.is_empty() {
        let query = database.query(include_str!("recover_dead.sql")).bind(orphaned.group.0);
        query.bind(buried.iter().map(|one| one.message_id).collect::<Vec<_>>()).execute(&mut *tx).await?;
        bury(database, &mut tx, orphaned.group.0, orphaned.stream.0, &buried).await?;
    }
    tx.commit().await?;
    Ok(rows.len())
}
