//! The epoch of a group, which a seek raises: whatever was claimed under an older one is void.

use sqlx::Row;

use super::GroupId;
use crate::database::Database;

/// The epoch of a group now. `None`: it is gone.
pub async fn epoch(database: &Database, group: GroupId) -> Result<Option<i64>, sqlx::Error> {
    let rows = database.fetch_all(database.query(include_str!("epoch.sql")).bind(group.0)).await?;
    rows.first().map(|row| row.try_get(0)).transpose()
}

/// Those of these groups that are gone, or whose epoch is no longer the one given.
pub async fn raised_epochs(database: &Database, known: &[(GroupId, i64)]) -> Result<Vec<GroupId>, sqlx::Error> {
    let (groups, epochs): (Vec<i32>, Vec<i64>) = known.iter().map(|(group, epoch)| (group.0, *epoch)).unzip();
    let query = database.query(include_str!("epochs_raised.sql")).bind(groups).bind(epochs);
    database.fetch_all(query).await?.iter().map(|row| row.try_get(0).map(GroupId)).collect()
}
