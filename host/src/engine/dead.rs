//! Dead letters: look at them, deliver them again, forget them. Done twice is done once, and those of one group never
//! touch another's. A payload is read by [`payload`] alone.
//!
//! ```text
//! open -> redriven (a `waiting` exception holds its id) -> deleted when the new delivery is done
//!   |        `-> open again when the new delivery fails for good
//!   `-> deleted by discard
//! ```

use std::{collections::HashMap, time::Duration};

use anyhow::{Context, Result, bail};
use serde::Serialize;
use sqlx::{Row, postgres::PgRow};

use super::{GroupId, inspect::bounded_read, units::milliseconds};
use crate::database::Database;

/// How many rows a statement with a filter looks at. Bounds its time whatever it finds.
const LOOKED_AT_MAX: i64 = 10_000;

/// How many are redriven or discarded in one transaction, so that no lock is held for long.
const STEP: usize = 500;

/// Which dead letters. Everything that is given must hold.
#[derive(Clone, Debug, Default)]
pub struct DeadFilter {
    pub class: Option<String>,
    pub key: Option<String>,
    pub first_message_id: Option<i64>,
    pub last_message_id: Option<i64>,
    /// Died no longer ago than this.
    pub since: Option<Duration>,
}

impl DeadFilter {
    /// Whether it lets everything pass.
    pub fn is_empty(&self) -> bool {
        let Self { class, key, first_message_id, last_message_id, since } = self;
        class.is_none() && key.is_none() && first_message_id.is_none() && last_message_id.is_none() && since.is_none()
    }
}

/// A dead letter in a list. The field names are a contract.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DeadLetter {
    pub id: i64,
    pub group: String,
    pub stream: String,
    pub message_id: i64,
    pub message_key: Option<String>,
    pub attempts: i32,
    pub class: String,
    pub error: String,
    /// RFC 3339, UTC.
    pub died_at: String,
    /// Its group was sent back to the message since then, so it comes again without a redrive.
    pub replayed_at: Option<String>,
}

/// Everything about one dead letter but its payload.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DeadLetterDetails {
    #[serde(flatten)]
    pub letter: DeadLetter,
    /// Of the component that failed last.
    pub digest: Option<String>,
    /// 1 + how often it died again after a redrive.
    pub deaths: i32,
    /// It is being delivered again since then.
    pub redriven_at: Option<String>,
    pub concurrency: String,
    pub compaction_rank: Option<i64>,
    pub routing_key: Option<String>,
    pub headers: serde_json::Value,
    pub content_type: Option<String>,
    pub produced_at: String,
    /// `None`: a tombstone.
    pub payload_bytes: Option<i64>,
    pub payload_sha256: Option<String>,
}

/// One page of a list.
#[derive(Clone, Debug)]
pub struct DeadPage {
    /// Newest first.
    pub letters: Vec<DeadLetter>,
    /// Where the next page begins: ids below this. `None` when nothing is left.
    pub before: Option<i64>,
}

/// Lists dead letters below `before`, newest first, at most `limit`. Looks at a bounded number of rows, so with a filter
/// a page may be short, or empty, although more follow; `before` of the answer tells.
pub async fn list(
    database: &Database,
    group: Option<GroupId>,
    filter: &DeadFilter,
    before: Option<i64>,
    limit: u32,
) -> Result<DeadPage> {
    let limit = i64::from(limit);
    // Without a group the redriven ones lie among the open ones and are filtered out as well.
    let looks_at = if filter.is_empty() && group.is_some() { limit } else { LOOKED_AT_MAX.max(limit) };
    let query = database.query(include_str!("dead_list.sql")).bind(group.map(|group| group.0));
    let query = query.bind(before.unwrap_or(i64::MAX)).bind(limit).bind(looks_at);
    let mut tx = bounded_read(database).await.context("begin to list dead letters")?;
    let rows = bind_filter(query, filter).fetch_all(&mut *tx).await.context("list dead letters")?;
    drop(tx);
    let mut page = DeadPage { letters: Vec::new(), before: None };
    for row in &rows {
        page.before = row.try_get("looked_at_to")?;
        if row.try_get::<Option<i64>, _>("id")?.is_some() {
            page.letters.push(read_letter(row)?);
        }
    }
    if page.letters.len() as i64 == limit {
        page.before = page.letters.last().map(|letter| letter.id);
    }
    Ok(page)
}

/// Shows one dead letter by its id.
pub async fn show(database: &Database, id: i64) -> Result<Option<DeadLetterDetails>> {
    details(database, Some(id), None).await
}

/// Shows the dead letter of one message in one group.
pub async fn show_message(database: &Database, group: GroupId, message_id: i64) -> Result<Option<DeadLetterDetails>> {
    details(database, None, Some((group, message_id))).await
}

async fn details(
    database: &Database,
    id: Option<i64>,
    message: Option<(GroupId, i64)>,
) -> Result<Option<DeadLetterDetails>> {
    let query = database.query(include_str!("dead_show.sql")).bind(id);
    let query = query.bind(message.map(|(group, _)| group.0)).bind(message.map(|(_, id)| id));
    let rows = database.fetch_all(query).await.context("show a dead letter")?;
    rows.first().map(read_details).transpose().context("read a dead letter")
}

fn read_letter(row: &PgRow) -> Result<DeadLetter, sqlx::Error> {
    Ok(DeadLetter {
        id: row.try_get("id")?,
        group: row.try_get("group")?,
        stream: row.try_get("stream")?,
        message_id: row.try_get("message_id")?,
        message_key: row.try_get("message_key")?,
        attempts: row.try_get("attempts")?,
        class: row.try_get("class")?,
        error: row.try_get("error")?,
        died_at: row.try_get("died_at")?,
        replayed_at: row.try_get("replayed_at")?,
    })
}

fn read_details(row: &PgRow) -> Result<DeadLetterDetails, sqlx::Error> {
    Ok(DeadLetterDetails {
        letter: read_letter(row)?,
        digest: row.try_get("digest")?,
        deaths: row.try_get("deaths")?,
        redriven_at: row.try_get("redriven_at")?,
        concurrency: row.try_get("concurrency")?,
        compaction_rank: row.try_get("compaction_rank")?,
        routing_key: row.try_get("routing_key")?,
        headers: row.try_get("headers")?,
        content_type: row.try_get("content_type")?,
        produced_at: row.try_get("produced_at")?,
        payload_bytes: row.try_get("payload_bytes")?,
        payload_sha256: row.try_get("payload_sha256")?,
    })
}

/// The payload of a dead letter. `None` when it is a tombstone, or gone.
pub async fn payload(database: &Database, id: i64) -> Result<Option<Vec<u8>>> {
    let query = database.query(include_str!("dead_payload.sql")).bind(id);
    let rows = database.fetch_all(query).await.context("read the payload of a dead letter")?;
    Ok(rows.first().map(|row| row.try_get(0)).transpose()?.flatten())
}

/// Ids of the open dead letters of a group that the filter picks, oldest first. They are read in bounded steps up to
/// the newest there is at the beginning, so that what dies meanwhile does not make this endless.
pub async fn pick(database: &Database, group: GroupId, filter: &DeadFilter) -> Result<Vec<i64>> {
    let newest = list(database, Some(group), &DeadFilter::default(), None, 1).await?;
    let Some(last) = newest.letters.first().map(|letter| letter.id) else { return Ok(Vec::new()) };
    let (mut picked, mut after) = (Vec::new(), Some(0));
    while let Some(above) = after {
        let query = database.query(include_str!("dead_pick.sql")).bind(group.0);
        let query = bind_filter(query.bind(above).bind(last).bind(LOOKED_AT_MAX), filter);
        let mut tx = bounded_read(database).await.context("begin to pick dead letters")?;
        let row = query.fetch_one(&mut *tx).await.context("pick dead letters")?;
        picked.extend(row.try_get::<Vec<i64>, _>("ids")?);
        after = row.try_get("looked_at_to")?;
    }
    Ok(picked)
}

/// Checks that every one of these dead letters is there, and is the group's where one is given.
pub async fn check_ids(database: &Database, group: Option<GroupId>, ids: &[i64]) -> Result<()> {
    let query = database.query(include_str!("dead_owners.sql")).bind(ids);
    let rows = database.fetch_all(query).await.context("look up dead letters")?;
    let mut owners = HashMap::new();
    for row in &rows {
        owners.insert(row.try_get::<i64, _>(0)?, GroupId(row.try_get(1)?));
    }
    for id in ids {
        match owners.get(id) {
            None => bail!("no dead letter {id}, so nothing was changed; `millstream dead list` shows those there are"),
            Some(owner) if group.is_some_and(|group| group != *owner) => {
                bail!("dead letter {id} belongs to another group; leave --group out, or take ids of that group")
            }
            Some(_) => {}
        }
    }
    Ok(())
}

/// What became of dead letters that were to be delivered again.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Redriven {
    /// Their new delivery is scheduled.
    pub redriven: u64,
    /// Being delivered already, or gone.
    pub under_way: u64,
    /// A newer version of their key has won: they end, and nothing is delivered.
    pub superseded: u64,
    /// Their ordered key has gone on without them.
    pub refused: Vec<i64>,
}

/// Delivers these dead letters again from attempt 1, in steps of a transaction each. `done` hears of every step. Those
/// whose ordered key has gone on are refused, unless `append` says to deliver them as the next of their key.
pub async fn redrive(database: &Database, ids: &[i64], append: bool, mut done: impl FnMut(usize)) -> Result<Redriven> {
    let mut all = Redriven::default();
    for step in ids.chunks(STEP) {
        let mut tx = database.begin().await.context("begin to redrive")?;
        let query = database.query(include_str!("dead_redrive.sql")).bind(step).bind(append);
        let rows = query.fetch_all(&mut *tx).await.context("redrive dead letters")?;
        tx.commit().await.context("commit what was redriven")?;
        for row in &rows {
            match row.try_get::<&str, _>(1)? {
                "redriven" => all.redriven += 1,
                "superseded" => all.superseded += 1,
                "refused" => all.refused.push(row.try_get(0)?),
                _ => all.under_way += 1,
            }
        }
        done(step.len());
    }
    Ok(all)
}

/// Deletes these dead letters, in steps of a transaction each. `done` hears of every step. Returns how many that were:
/// one that is being delivered again stays. An ordered key that waits for one of them goes on.
pub async fn discard(database: &Database, ids: &[i64], mut done: impl FnMut(usize)) -> Result<u64> {
    let mut discarded = 0;
    for step in ids.chunks(STEP) {
        let mut tx = database.begin().await.context("begin to discard")?;
        let query = database.query(include_str!("dead_discard.sql")).bind(step);
        discarded += query.fetch_all(&mut *tx).await.context("discard dead letters")?.len() as u64;
        tx.commit().await.context("commit what was discarded")?;
        done(step.len());
    }
    Ok(discarded)
}

type Query = sqlx::query::Query<'static, sqlx::Postgres, sqlx::postgres::PgArguments>;

fn bind_filter(query: Query, filter: &DeadFilter) -> Query {
    query
        .bind(filter.class.clone())
        .bind(filter.key.clone())
        .bind(filter.first_message_id)
        .bind(filter.last_message_id)
        .bind(filter.since.map(milliseconds))
}
