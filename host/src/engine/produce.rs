//! Produce from Rust: the same SQL functions that every other language calls.

use std::{collections::BTreeMap, fmt};

use sqlx::{PgConnection, Row, types::Json};

use super::units::milliseconds;
use crate::{
    database::{Database, Reaction, Refusal, reaction},
    handler::{Concurrency, NewMessage},
};

/// Most messages of one call: what `check_batch` in `functions/shared.sql` takes.
#[cfg(feature = "host")]
pub(super) const BATCH_MAX: usize = 50_000;

/// One message of a batch.
#[derive(Clone, Debug)]
pub struct NewEntry<'a> {
    /// Its `stream` is not read: a batch goes to one stream.
    pub message: &'a NewMessage,
    /// RFC 3339; beats the message's `delay`.
    pub deliver_after: Option<&'a str>,
}

/// What became of one message of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Produced {
    /// Its position; of a duplicate, the first one's.
    pub id: i64,
    pub duplicate: bool,
    pub superseded: bool,
}

/// Why a batch was not produced. Nothing of it was.
#[derive(Debug)]
pub enum ProduceError {
    /// The message or the stream is at fault: `MSnnn` of `functions/shared.sql`, or text Postgres cannot hold.
    Refused(Refusal),
    /// The database is.
    Database(sqlx::Error),
}

impl fmt::Display for ProduceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused(refusal) => write!(f, "{} ({})", refusal.message, refusal.sqlstate),
            Self::Database(_) => f.write_str("reach the database"),
        }
    }
}

impl std::error::Error for ProduceError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Refused(_) => None,
            Self::Database(error) => Some(error),
        }
    }
}

/// Produces a batch to one stream in the caller's transaction; the answers are in the batch's order.
pub async fn produce(
    database: &Database,
    tx: &mut PgConnection,
    stream: &str,
    batch: &[NewEntry<'_>],
) -> Result<Vec<Produced>, ProduceError> {
    let headers = |message: &NewMessage| {
        (!message.headers.is_empty())
            .then(|| Json(message.headers.iter().cloned().collect::<BTreeMap<String, String>>()))
    };
    let query = database
        .query(include_str!("produce.sql"))
        .bind(stream)
        .bind(batch.iter().map(|entry| entry.message.payload.as_deref()).collect::<Vec<_>>())
        .bind(column(batch, |entry| entry.message.key.as_deref()))
        .bind(column(batch, |entry| entry.message.concurrency.map(Concurrency::as_str)))
        .bind(column(batch, |entry| entry.message.compaction))
        .bind(column(batch, |entry| entry.message.rank))
        .bind(column(batch, |entry| entry.message.idempotency_key.as_deref()))
        .bind(column(batch, |entry| entry.message.routing_key.as_deref()))
        .bind(column(batch, |entry| headers(entry.message)))
        .bind(column(batch, |entry| entry.message.content_type.as_deref()))
        .bind(column(batch, |entry| entry.deliver_after))
        .bind(column(batch, |entry| entry.message.delay.map(milliseconds)));
    let rows = query.fetch_all(tx).await.map_err(|error| match reaction(&error) {
        Reaction::Refused(refusal) => ProduceError::Refused(refusal),
        Reaction::Busy | Reaction::Broken => ProduceError::Database(error),
    })?;
    let read = |row: &sqlx::postgres::PgRow| {
        Ok(Produced { id: row.try_get(1)?, duplicate: row.try_get(2)?, superseded: row.try_get(3)? })
    };
    rows.iter().map(read).collect::<Result<_, sqlx::Error>>().map_err(ProduceError::Database)
}

/// One attribute of every message, or null where no message gives it: the functions then skip it whole.
fn column<'a, T>(
    batch: &'a [NewEntry<'a>],
    attribute: impl Fn(&'a NewEntry<'a>) -> Option<T>,
) -> Option<Vec<Option<T>>> {
    let column: Vec<Option<T>> = batch.iter().map(attribute).collect();
    column.iter().any(Option::is_some).then_some(column)
}
