//! `millstream apply` and `millstream plan`: declares what streams.toml says, or tells what that would change.

use anyhow::Result;
use clap::Args;
use serde::Serialize;

use super::{Global, open::open_as_is, with_database::with_database};
use crate::{
    database::{Database, pending},
    engine::{self, Change},
};

#[derive(Args, Debug)]
pub struct Apply {
    /// Only tell what would change, as `millstream plan` does
    #[arg(long)]
    pub dry_run: bool,
}

/// The answer. Its field names are a contract.
#[derive(Serialize)]
struct Answer {
    applied: bool,
    /// Migrations of the database's tables that are missing.
    migrations: usize,
    changes: Vec<Change>,
}

impl Apply {
    pub(super) async fn run(&self, global: &Global) -> Result<()> {
        if self.dry_run {
            return plan(global).await;
        }
        let changes = with_database(global, async |database, config| engine::apply(database, config).await).await?;
        let answer = Answer { applied: true, migrations: 0, changes };
        global.output().one(&answer, |answer| text(answer, "nothing to change"))
    }
}

/// Tells what `apply` would do. Changes nothing, not even the database's tables.
pub(super) async fn plan(global: &Global) -> Result<()> {
    let config = global.load_config()?;
    let opened = open_as_is(global, &config.database).await?;
    let found = find_changes(&opened.database, &config).await;
    let closed = opened.close().await;
    let answer = found?;
    closed?;
    global.output().one(&answer, |answer| text(answer, "nothing would change"))
}

async fn find_changes(database: &Database, config: &crate::config::Config) -> Result<Answer> {
    let migrations = pending(database).await?;
    // Without tables there is nothing to compare with.
    let compared_with = (migrations < crate::database::MIGRATIONS.len()).then_some(database);
    Ok(Answer { applied: false, migrations, changes: engine::plan(compared_with, config).await? })
}

fn text(answer: &Answer, nothing: &str) -> String {
    let mut lines: Vec<String> = answer.changes.iter().map(ToString::to_string).collect();
    if answer.migrations > 0 {
        lines.insert(0, format!("make or migrate the database's tables ({} missing)", answer.migrations));
    }
    if lines.is_empty() {
        lines.push(nothing.to_owned());
    }
    lines.iter().map(|line| format!("{}\n", super::output::visible(line))).collect()
}
