//! Drops partitions of the log that are older than their stream's `retention` and behind every group.
//!
//! A partition leaves in four steps, each of which a later round finds and goes on from, whatever crashed in between:
//!
//! ```text
//! attached -> half detached (pg_inherits.inhdetachpending) -> detached, not noted -> noted (detached_at) -> gone
//! ```
//!
//! DETACH CONCURRENTLY makes nobody wait for it: it waits itself for those who may still read the partition. It cannot
//! run inside a transaction, hence on a connection of its own.

use std::collections::HashSet;

use anyhow::{Context, Result};
use sqlx::{AssertSqlSafe, PgConnection, Row, postgres::PgRow};

use super::{LOCK_TIMEOUT, LOCK_TIMEOUT_SQL, Pinned, Report, Step, begin};
use crate::database::Database;

/// Partitions of one stream that leave in one round at most.
const PARTITIONS_MAX: i32 = 20;

/// One partition of one stream's log.
#[derive(Clone, Copy)]
struct Partition {
    stream: i32,
    lower_id: i64,
}

impl Partition {
    fn read(row: &PgRow) -> Result<Self, sqlx::Error> {
        Ok(Self { stream: row.try_get("stream_id")?, lower_id: row.try_get("lower_id")? })
    }

    fn describe(self, verb: &str) -> String {
        format!("{verb} the partition of stream {} that begins at id {}", self.stream, self.lower_id)
    }
}

/// What there is to do.
struct Work {
    half_detached: Vec<Partition>,
    detached: Vec<Partition>,
    /// With the statement that detaches it.
    old: Vec<(Partition, String)>,
}

pub(super) async fn drop_old_partitions(database: &Database) -> Result<Report> {
    let mut report = Report::default();
    let work = look(database, &mut report).await?;
    if work.half_detached.is_empty() && work.detached.is_empty() && work.old.is_empty() {
        return Ok(report);
    }
    // Keeps other hosts out while this round lasts. The transaction only holds the lock: had it read anything of the
    // log, the detach would wait for it. A host that came in all the same would find errors, and do no harm.
    let Some(guard) = begin(database, Step::Retention).await? else { return Ok(report) };
    report = Report::default();
    let work = look(database, &mut report).await?;
    let stuck = finish_detaches(database, &work.half_detached, &mut report).await;
    detach(database, &work.old, stuck, &mut report).await?;
    let detached = database.fetch_all(database.query(include_str!("detached.sql"))).await?;
    for row in &detached {
        let partition = Partition::read(row)?;
        report.add(drop_one(database, partition).await.with_context(|| partition.describe("drop")));
    }
    guard.rollback().await.context("release the step's lock")?;
    Ok(report)
}

async fn look(database: &Database, report: &mut Report) -> Result<Work> {
    let read = |rows: Vec<PgRow>| rows.iter().map(Partition::read).collect::<Result<Vec<_>, _>>();
    let half_detached = read(database.fetch_all(database.query(include_str!("half_detached.sql"))).await?)?;
    let detached = read(database.fetch_all(database.query(include_str!("detached.sql"))).await?)?;
    let mut old = Vec::new();
    for row in database.fetch_all(database.query(include_str!("old_partitions.sql")).bind(PARTITIONS_MAX)).await? {
        match row.try_get::<Option<String>, _>("pinned_by")? {
            None => old.push((Partition::read(&row)?, row.try_get("detach")?)),
            Some(group) => {
                let pinned = report.pinned.entry(row.try_get("stream_name")?);
                pinned.or_insert(Pinned { partitions: 0, group }).partitions += 1;
            }
        }
    }
    Ok(Work { half_detached, detached, old })
}

/// Finishes what earlier rounds began, and returns the streams where that was not possible yet: while one detach is
/// pending no other can begin.
async fn finish_detaches(database: &Database, pending: &[Partition], report: &mut Report) -> HashSet<i32> {
    let mut stuck = HashSet::new();
    for partition in pending {
        let finished = in_transaction(database, include_str!("finish_detach.sql"), *partition).await;
        if finished.is_err() {
            stuck.insert(partition.stream);
        }
        report.add(finished.map(|()| 0).with_context(|| partition.describe("finish to detach")));
    }
    stuck
}

async fn detach(
    database: &Database,
    old: &[(Partition, String)],
    mut stuck: HashSet<i32>,
    report: &mut Report,
) -> Result<()> {
    let mut connection: Option<PgConnection> = None;
    for (partition, statement) in old {
        if stuck.contains(&partition.stream) {
            continue;
        }
        let connection = match &mut connection {
            Some(connection) => connection,
            none => none.insert(database.connect_alone(LOCK_TIMEOUT).await.context("connect to detach partitions")?),
        };
        // A simple query by itself: everything else is a transaction, in which this statement is refused.
        let detached = sqlx::raw_sql(AssertSqlSafe(statement.clone())).execute(connection).await;
        if let Err(error) = detached {
            stuck.insert(partition.stream);
            report.add(Err(error).with_context(|| partition.describe("detach")));
        }
    }
    Ok(())
}

async fn drop_one(database: &Database, partition: Partition) -> Result<u64> {
    in_transaction(database, include_str!("note_detached.sql"), partition).await?;
    in_transaction(database, include_str!("drop_detached.sql"), partition).await?;
    Ok(1)
}

async fn in_transaction(database: &Database, text: &str, partition: Partition) -> Result<()> {
    let mut tx = database.begin().await?;
    sqlx::query(LOCK_TIMEOUT_SQL).execute(&mut *tx).await?;
    database.query(text).bind(partition.stream).bind(partition.lower_id).execute(&mut *tx).await?;
    tx.commit().await?;
    Ok(())
}
