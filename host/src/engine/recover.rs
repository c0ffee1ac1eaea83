//! A dead host's work: any other host takes it over, one group at a time.

use anyhow::{Context, Result};
use sqlx::{PgConnection, Row};

use super::{
    GroupId, HostId, Lane, StreamId, frozen,
    settle::{Burial, Stop, bury, stop_keys},
};
use crate::{
    config::{self, OnDeadLetter},
    database::Database,
    handler::{Concurrency, FailureClass},
};

/// A group in which a dead host still holds something.
#[derive(Clone, Copy, Debug)]
pub struct Orphaned {
    pub group: GroupId,
    stream: StreamId,
    max_attempts: u32,
    on_dead_letter: OnDeadLetter,
    concurrency_override: Option<Concurrency>,
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
            on_dead_letter: policy.on_dead_letter,
            concurrency_override: policy.concurrency_override,
        })
    };
    rows.iter().map(read).collect()
}

/// Hands on what a dead host held in one group, in one transaction, and returns how many messages that were.
///
/// Each counts one failure. One that has used up its attempts is dead-lettered here, so that a message that kills its
/// hosts ends. Its keys are ready for any host, with the messages of theirs that it held.
pub async fn recover(database: &Database, dead: HostId, orphaned: Orphaned) -> Result<usize, sqlx::Error> {
    let mut tx = database.begin_with(frozen::BEGIN).await?;
    let lock = database.query(include_str!("recover_lock.sql")).bind(dead.0);
    if frozen::lock(database, &mut tx, lock, dead).await?.is_none() {
        return Ok(0);
    }
    let lock = database.query(include_str!("recover_lock_group.sql")).bind(orphaned.group.0);
    frozen::lock(database, &mut tx, lock, dead).await?;
    let query = database.stream_query(include_str!("recover_group.sql"), orphaned.stream.0);
    let query =
        query.bind(orphaned.group.0).bind(dead.0).bind(i32::try_from(orphaned.max_attempts).unwrap_or(i32::MAX));
    let query = query.bind(ERROR).bind(orphaned.concurrency_override.map(Concurrency::as_str));
    let rows = query.fetch_all(&mut *tx).await?;
    let given_up = rows.iter().filter_map(|row| GivenUp::read(row).transpose()).collect::<Result<Vec<_>, _>>()?;
    if !given_up.is_empty() {
        bury_given_up(database, &mut tx, dead, orphaned, &given_up).await?;
    }
    let keys = database.query(include_str!("recover_keys.sql")).bind(orphaned.group.0).bind(dead.0);
    keys.execute(&mut *tx).await?;
    tx.commit().await?;
    Ok(rows.len())
}

/// A message that has used up its attempts.
struct GivenUp {
    message_id: i64,
    failures: i32,
    dead_letter: Option<i64>,
    mode: Concurrency,
    lane: Lane,
}

impl GivenUp {
    fn read(row: &sqlx::postgres::PgRow) -> Result<Option<Self>, sqlx::Error> {
        if !row.try_get("is_dead")? {
            return Ok(None);
        }
        Ok(Some(Self {
            message_id: row.try_get("message_id")?,
            failures: row.try_get("failures")?,
            dead_letter: row.try_get("dead_letter_id")?,
            mode: Concurrency::named(row.try_get("concurrency")?).unwrap_or_default(),
            lane: Lane {
                key: row.try_get::<Option<&str>, _>("message_key")?.unwrap_or_default().into(),
                number: row.try_get("lane")?,
            },
        }))
    }
}

async fn bury_given_up(
    database: &Database,
    tx: &mut PgConnection,
    dead: HostId,
    orphaned: Orphaned,
    given_up: &[GivenUp],
) -> Result<(), sqlx::Error> {
    let query = database.query(include_str!("recover_dead.sql")).bind(orphaned.group.0);
    query.bind(given_up.iter().map(|one| one.message_id).collect::<Vec<_>>()).execute(&mut *tx).await?;
    let burial = |one: &GivenUp| Burial {
        message_id: one.message_id,
        attempts: one.failures,
        class: FailureClass::HostLost.as_str(),
        error: ERROR,
        digest: None,
        dead_letter: one.dead_letter,
        mode: one.mode.as_str(),
        lane: one.lane.number,
    };
    let buried: Vec<_> = given_up.iter().map(burial).collect();
    bury(database, tx, orphaned.group.0, orphaned.stream.0, &buried).await?;
    if orphaned.on_dead_letter == OnDeadLetter::Skip {
        return Ok(());
    }
    let rests = orphaned.on_dead_letter == OnDeadLetter::Rest;
    let ordered = given_up.iter().filter(|one| one.mode == Concurrency::Ordered);
    let stops: Vec<_> = ordered.map(|one| Stop { lane: &one.lane, message_id: one.message_id, rests }).collect();
    stop_keys(database, tx, orphaned.group.0, dead, &stops).await
}
