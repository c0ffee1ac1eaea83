//! Looks for keys that nobody would ever run again. The turns leave none behind; this proves it, and mends what a bug or
//! a hand at the tables did. Whatever it finds is an error to report.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use sqlx::Row;

use super::{ROWS_MAX, Report, Rounds, Step, begin};
use crate::database::Database;

/// Keys of one group that were stuck, and are ready again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StuckKeys {
    pub group: String,
    pub keys: u64,
    /// One of them.
    pub example: String,
    pub cause: StuckCause,
}

/// Why nobody would have run a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StuckCause {
    /// Messages are deferred behind it, and it has no lease row, or rests with nobody told to bury them.
    NoLease,
    /// Its lease belongs to a host that does not exist.
    HostGone,
}

impl StuckCause {
    /// As the log tells it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::NoLease => "no_lease",
            Self::HostGone => "host_gone",
        }
    }
}

/// One key of one group, with its lane.
type Place = (i32, String, i16);

pub(super) async fn mend(database: &Database) -> Result<Report> {
    let mut report = Report::default();
    mend_unleased(database, &mut report).await?;
    mend_abandoned(database, &mut report).await?;
    Ok(report)
}

/// Goes over the keys with deferred messages, a bounded number at a time and each once, however deep it is.
async fn mend_unleased(database: &Database, report: &mut Report) -> Result<()> {
    let mut after: Place = (0, String::new(), -1);
    let mut rounds = Rounds::start();
    loop {
        let (group, key, lane) = &after;
        let query = database.query(include_str!("unleased_keys.sql")).bind(group).bind(key).bind(lane).bind(ROWS_MAX);
        let rows = database.fetch_all(query).await.context("look for deferred messages without a lease")?;
        let mut found: BTreeMap<(i32, String), (Vec<String>, Vec<i16>)> = BTreeMap::new();
        let mut looked_at = 0;
        for row in &rows {
            let place: Place = (row.try_get("group_id")?, row.try_get("message_key")?, row.try_get("lane")?);
            looked_at = row.try_get("place")?;
            if row.try_get("is_unleased")? {
                let (keys, lanes) = found.entry((place.0, row.try_get("group_name")?)).or_default();
                keys.push(place.1.clone());
                lanes.push(place.2);
            }
            after = place;
        }
        for ((group, name), (keys, lanes)) in found {
            let query = database.query(include_str!("ready_keys.sql")).bind(group).bind(&keys).bind(&lanes);
            let mended = change(database, query).await.with_context(|| format!("make keys of group {name:?} ready"));
            note(report, mended, name, keys.into_iter().next(), StuckCause::NoLease);
        }
        // Only a full look has a row at its last place.
        if looked_at < ROWS_MAX || !rounds.add(ROWS_MAX.unsigned_abs()) {
            return Ok(());
        }
    }
}

async fn mend_abandoned(database: &Database, report: &mut Report) -> Result<()> {
    let look = database.query(include_str!("abandoned_leases.sql"));
    for row in database.fetch_all(look).await.context("look for leases of hosts that are gone")? {
        let (group, host): (i32, i64) = (row.try_get("group_id")?, row.try_get("host_id")?);
        let (name, example) = (row.try_get::<String, _>("group_name")?, row.try_get("example")?);
        let mut rounds = Rounds::start();
        loop {
            let query = database.query(include_str!("free_leases.sql")).bind(group).bind(host).bind(ROWS_MAX);
            let freed = change(database, query).await.with_context(|| format!("free leases of group {name:?}"));
            let goes_on = freed.as_ref().is_ok_and(|rows| rounds.add(*rows));
            note(report, freed, name.clone(), Some(String::clone(&example)), StuckCause::HostGone);
            if !goes_on {
                break;
            }
        }
    }
    Ok(())
}

/// Runs a statement that changes keys, in a transaction of this step; answers how many it changed.
async fn change(
    database: &Database,
    query: sqlx::query::Query<'_, sqlx::Postgres, sqlx::postgres::PgArguments>,
) -> Result<u64> {
    let Some(mut tx) = begin(database, Step::Keys).await? else { return Ok(0) };
    let keys: i64 = query.fetch_one(&mut *tx).await?.try_get(0)?;
    tx.commit().await?;
    Ok(keys.unsigned_abs())
}

/// Takes in what became of keys that were found. None are left when another host was quicker.
fn note(report: &mut Report, mended: Result<u64>, group: String, example: Option<String>, cause: StuckCause) {
    if let Ok(keys @ 1..) = mended {
        report.stuck.push(StuckKeys { group, keys, example: example.unwrap_or_default(), cause });
    }
    report.add(mended);
}
