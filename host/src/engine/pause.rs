//! Pausing a group: no host claims for it until it is resumed, whatever restarts in between. What runs goes on to its
//! end, and everything that waits stays as it is.

use anyhow::{Context, Result};
use serde::Serialize;
use sqlx::Row;

use super::GroupId;
use crate::database::Database;

/// How a group stands after it was paused or resumed. The field names are a contract.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Paused {
    pub group: String,
    pub paused: bool,
    /// RFC 3339, UTC. `None` while it is not paused.
    pub paused_at: Option<String>,
    /// Whether this call made it so.
    pub changed: bool,
}

/// Pauses a group. Done twice is done once.
pub async fn pause(database: &Database, group: GroupId, name: &str) -> Result<Paused> {
    set(database, include_str!("group_pause.sql"), group, name).await.with_context(|| format!("pause group {name:?}"))
}

/// Resumes a group. Done twice is done once.
pub async fn resume(database: &Database, group: GroupId, name: &str) -> Result<Paused> {
    set(database, include_str!("group_resume.sql"), group, name).await.with_context(|| format!("resume group {name:?}"))
}

async fn set(database: &Database, statement: &str, group: GroupId, name: &str) -> Result<Paused> {
    let rows = database.fetch_all(database.query(statement).bind(group.0)).await?;
    let row = rows.first().context("the group is gone")?;
    tell_hosts(database, group).await;
    let paused_at: Option<String> = row.try_get("paused_at")?;
    Ok(Paused { group: name.to_owned(), paused: paused_at.is_some(), paused_at, changed: row.try_get("changed")? })
}

/// Makes running hosts look at a group at once. Those that do not hear it find out with their next poll or heartbeat.
pub(super) async fn tell_hosts(database: &Database, group: GroupId) {
    let query = database.query(include_str!("hint_group.sql")).bind(database.schema.channel()).bind(group.0);
    if let Err(error) = database.fetch_all(query).await {
        tracing::debug!("failed to hint the hosts, they poll: {error:#}");
    }
}
