//! Reads a stream's log without a group: nothing is claimed, delivered or remembered. What an open transaction holds is
//! not visible and may appear later below what was read.

use anyhow::{Context, Result};
use serde::Serialize;
use sqlx::Row;

use super::StreamId;
use crate::database::Database;

/// One message of a log. The field names are a contract.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LogEntry {
    pub id: i64,
    pub message_key: Option<String>,
    pub routing_key: Option<String>,
    pub content_type: Option<String>,
    /// `None`: a tombstone.
    pub payload_bytes: Option<i64>,
    /// RFC 3339, UTC.
    pub produced_at: String,
    #[serde(skip)]
    pub age_ms: i64,
}

/// The visible messages after a position, in id order, at most `limit`.
pub async fn read_log(database: &Database, stream: StreamId, after: i64, limit: u32) -> Result<Vec<LogEntry>> {
    let query = database.stream_query(include_str!("read_log.sql"), stream.0).bind(after).bind(i64::from(limit));
    let rows = database.fetch_all(query).await.context("read the log")?;
    let read = |row: &sqlx::postgres::PgRow| {
        Ok(LogEntry {
            id: row.try_get("id")?,
            message_key: row.try_get("message_key")?,
            routing_key: row.try_get("routing_key")?,
            content_type: row.try_get("content_type")?,
            payload_bytes: row.try_get("payload_bytes")?,
            produced_at: row.try_get("produced_at")?,
            age_ms: row.try_get("age_ms")?,
        })
    };
    rows.iter().map(read).collect::<Result<_, sqlx::Error>>().context("read a message of the log")
}

/// The position before the last `count` visible messages (0 when there are fewer), and the one after all of them.
pub async fn last_positions(database: &Database, stream: StreamId, count: u32) -> Result<(i64, i64)> {
    let query = database.stream_query(include_str!("read_tail.sql"), stream.0).bind(i64::from(count));
    let rows = database.fetch_all(query).await.context("find the end of the log")?;
    Ok((rows[0].try_get(0)?, rows[0].try_get(1)?))
}

/// One payload. `None` when it is a tombstone, or gone.
pub async fn read_payload(database: &Database, stream: StreamId, id: i64) -> Result<Option<Vec<u8>>> {
    let query = database.stream_query(include_str!("read_payload.sql"), stream.0).bind(id);
    let rows = database.fetch_all(query).await.context("read a payload")?;
    Ok(rows.first().map(|row| row.try_get(0)).transpose()?.flatten())
}
