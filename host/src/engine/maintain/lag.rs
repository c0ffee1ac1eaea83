//! Passes groups that lag longer than `max_lag`, so that one group that stands still does not hold a log for ever.

use anyhow::{Context, Result};
use sqlx::Row;

use super::{Passed, Report, Step, begin};
use crate::database::Database;

pub(super) async fn pass(database: &Database) -> Result<Report> {
    let mut report = Report::default();
    let look = database.query(include_str!("lagging_groups.sql"));
    for row in database.fetch_all(look).await.context("look for lagging groups")? {
        let group: i32 = row.try_get(0)?;
        match pass_one(database, group).await.with_context(|| format!("pass the lagging group {group}")) {
            Ok(Some(passed)) => {
                report.rows += 1;
                report.passed.push(passed);
            }
            Ok(None) => {}
            Err(error) => report.errors.push(error),
        }
    }
    Ok(report)
}

async fn pass_one(database: &Database, group: i32) -> Result<Option<Passed>> {
    let Some(mut tx) = begin(database, Step::Lag).await? else { return Ok(None) };
    let passed = database.query(include_str!("pass_lagging.sql")).bind(group).fetch_optional(&mut *tx).await?;
    tx.commit().await?;
    passed
        .map(|row| {
            Ok(Passed { group: row.try_get("group_name")?, from: row.try_get("from_id")?, to: row.try_get("to_id")? })
        })
        .transpose()
}
