//! Where a group stands in its stream: put there when it is created, and when it is sent elsewhere.

use anyhow::{Context, Result};
use sqlx::PgConnection;

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
    let statement = match start {
        Start::Earliest => include_str!("start_earliest.sql"),
        Start::Latest => include_str!("start_latest.sql"),
        Start::Id(_) => include_str!("start_id.sql"),
        Start::Time(_) => include_str!("start_time.sql"),
    };
    let query = database.stream_query(statement, stream.0).bind(group.0);
    let query = match start {
        Start::Earliest | Start::Latest => query,
        Start::Id(id) => query.bind(*id),
        Start::Time(time) => query.bind(time.clone()),
    };
    query.execute(tx).await.context("place its cursor").map(drop)
}
