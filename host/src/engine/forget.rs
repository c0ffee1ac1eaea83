//! Forgetting a group: its position and all that it holds are gone, and its stream keeps its messages.

use anyhow::{Context, Result};
use serde::Serialize;
use sqlx::Row;

use super::{
    GroupId,
    seek::{held_by, lock},
};
use crate::database::Database;

/// What went with a group. The field names are a contract.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Forgotten {
    pub group: String,
    /// The last message that it had passed.
    pub position: i64,
    /// Dead letters, each with its copy of its message.
    pub dead_letters: i64,
    /// Messages that it had claimed, or that waited for a retry, a time or their key.
    pub under_way: i64,
    /// Nothing was changed.
    pub dry_run: bool,
}

/// Forgets a group; a host that runs it lets it go. With `dry_run` it is done, looked at, and rolled back. Waits a bounded
/// time for what locks the group. A deadlock with a settle fails it too, and it can be done again.
pub async fn forget(database: &Database, group: GroupId, name: &str, dry_run: bool) -> Result<Forgotten> {
    let mut tx = database.begin().await.context("begin to forget")?;
    // An apply that still knew the group would declare it again without a cursor.
    let declarations = database.query(include_str!("declare_lock.sql"));
    declarations.execute(&mut *tx).await.context("take the declaration lock")?;
    if let Err(error) = lock(database, &mut tx, group).await {
        return Err(held_by(database, group, error).await.context(format!("lock group {name:?} to forget it")));
    }
    let cleared = database.query(include_str!("seek_clear.sql")).bind(group.0);
    let cleared = cleared.fetch_optional(&mut *tx).await.context("clear what it has under way")?;
    let cleared = cleared.context("the group is gone")?;
    // They hear it at the commit; those that do not find out with their next heartbeat.
    let hint = database.query(include_str!("hint_group.sql")).bind(database.schema.channel()).bind(group.0);
    hint.execute(&mut *tx).await.context("tell the hosts")?;
    let query = database.query(include_str!("group_forget.sql")).bind(group.0);
    let dead_letters = query.fetch_one(&mut *tx).await.context("delete it")?.try_get("dead_letters")?;
    let mut under_way = 0;
    for what in ["in_flight", "retrying", "delayed", "deferred"] {
        under_way += cleared.try_get::<i64, _>(what)?;
    }
    let position = cleared.try_get("claimed")?;
    if dry_run {
        tx.rollback().await.context("undo the trial")?;
    } else {
        tx.commit().await.with_context(|| format!("commit that group {name:?} is forgotten"))?;
    }
    Ok(Forgotten { group: name.to_owned(), position, dead_letters, under_way, dry_run })
}
