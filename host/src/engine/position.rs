//! Where a group stands in its stream: put there when it is created, and when it is sent elsewhere.

use anyhow::{Context, Result};
use sqlx::{PgConnection, Row};

use super::{GroupId, StreamId};
use crate::{config::Start, database::Database};

/// Puts the cursor of a group where `start` says, within what retention has left. The group has no gaps.
pub(super) async fn place_cursor(
    database: &Database,
    tx: &mut PgConnection,
    group: GroupId,
    stream: StreamId,
    start: &Start,
) -> Result<()> {
    let sql = |statement| database.stream_query(statement, stream.0);
    let query = match start {
        Start::Earliest => sql(include_str!("start_earliest.sql")),
        Start::Latest => sql(include_str!("start_latest.sql")).bind(group.0),
        Start::Id(id) => sql(include_str!("start_id.sql")).bind(*id),
        Start::Time(time) => sql(include_str!("start_time.sql")).bind(time.clone()),
    };
    let row = query.fetch_one(&mut *tx).await.context("find where it begins")?;
    let after: i64 = row.try_get("id").context("find where it begins")?;
    let query = database.query(include_str!("place_cursor.sql")).bind(group.0).bind(after);
    query.execute(tx).await.context("place its cursor").map(drop)
}
