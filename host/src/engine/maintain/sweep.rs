//! The plain steps: attach partitions ahead, delete rows whose time is over.

use anyhow::{Context, Result, ensure};
use sqlx::Row;

use super::{ROWS_MAX, Report, Rounds, Step, begin};
use crate::{database::Database, engine::declare::PARTITIONS_AHEAD};

pub(super) async fn extend(database: &Database) -> Result<Report> {
    let mut report = Report::default();
    let look = database.query(include_str!("streams_to_extend.sql")).bind(PARTITIONS_AHEAD);
    for row in database.fetch_all(look).await.context("look for logs to extend")? {
        let stream: i32 = row.try_get(0)?;
        report.add(extend_one(database, stream).await.with_context(|| format!("extend the log of stream {stream}")));
    }
    Ok(report)
}

async fn extend_one(database: &Database, stream: i32) -> Result<u64> {
    let Some(mut tx) = begin(database, Step::Extend).await? else { return Ok(0) };
    let query = database.query(include_str!("../extend_log.sql")).bind(stream).bind(PARTITIONS_AHEAD);
    let added: i32 = query.fetch_one(&mut *tx).await?.try_get(0)?;
    tx.commit().await?;
    Ok(added.unsigned_abs().into())
}

pub(super) async fn expire_idempotency_keys(database: &Database) -> Result<Report> {
    let mut report = Report::default();
    let look = database.query(include_str!("streams_with_old_idempotency_keys.sql"));
    for row in database.fetch_all(look).await.context("look for old idempotency keys")? {
        let stream: i32 = row.try_get(0)?;
        let expired = expire_keys_of(database, stream).await;
        report.add(expired.with_context(|| format!("expire idempotency keys of stream {stream}")));
    }
    Ok(report)
}

async fn expire_keys_of(database: &Database, stream: i32) -> Result<u64> {
    let mut rounds = Rounds::start();
    while let Some(mut tx) = begin(database, Step::IdempotencyKeys).await? {
        let delete = database.stream_query(include_str!("expire_idempotency_keys.sql"), stream).bind(ROWS_MAX);
        let rows = delete.execute(&mut *tx).await?.rows_affected();
        tx.commit().await?;
        if !rounds.add(rows) {
            break;
        }
    }
    Ok(rounds.rows)
}

pub(super) async fn expire_dead_letters(database: &Database) -> Result<Report> {
    let mut rounds = Rounds::start();
    while let Some(mut tx) = begin(database, Step::DeadLetters).await? {
        let delete = database.query(include_str!("expire_dead_letters.sql")).bind(ROWS_MAX);
        let rows = delete.execute(&mut *tx).await.context("expire dead letters")?.rows_affected();
        tx.commit().await?;
        if !rounds.add(rows) {
            break;
        }
    }
    Ok(Report { rows: rounds.rows, ..Report::default() })
}

pub(super) async fn thin(database: &Database) -> Result<Report> {
    let mut report = Report::default();
    let look = database.query(include_str!("streams_to_thin.sql"));
    for row in database.fetch_all(look).await.context("look for versions to thin")? {
        let stream: i32 = row.try_get(0)?;
        let thinned = thin_one(database, stream, &mut report).await;
        if let Err(error) = thinned.with_context(|| format!("thin the log of stream {stream}")) {
            report.errors.push(error);
        }
    }
    Ok(report)
}

async fn thin_one(database: &Database, stream: i32, report: &mut Report) -> Result<()> {
    let rounds = Rounds::start();
    while let Some(mut tx) = begin(database, Step::Versions).await? {
        let query = database.query(include_str!("thin_log.sql")).bind(stream).bind(i32::try_from(ROWS_MAX)?);
        let rows: i64 = query.fetch_one(&mut *tx).await?.try_get(0)?;
        tx.commit().await?;
        ensure!(
            rows >= 0,
            "{} versions are kept whose winner, as compaction_head_{stream} names it, is not in the log; the next \
             version of such a key sets it right",
            -rows
        );
        report.rows += rows.unsigned_abs();
        // A partition may end with fewer rows than a round takes, and the next have more.
        if rows == 0 || rounds.is_over() {
            break;
        }
    }
    Ok(())
}
