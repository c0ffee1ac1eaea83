//! `millstream forget`: a group that is no longer in streams.toml goes, with all that is its own.

use anyhow::{Result, ensure};
use clap::Args;

use super::{Confirmation, Global, human, output::visible, seek::again_when_busy, with_database::with_database};
use crate::engine::{self, Forgotten, find_group};

#[derive(Args, Debug)]
pub struct Forget {
    /// The group, which streams.toml no longer names
    pub group: String,
    /// Only tell what would go
    #[arg(long)]
    pub dry_run: bool,
    #[command(flatten)]
    pub confirmation: Confirmation,
}

impl Forget {
    pub(super) async fn run(&self, global: &Global) -> Result<()> {
        let group = &self.group;
        let forgotten = with_database(global, async |database, config| {
            let (id, _) = find_group(database, group).await?;
            ensure!(
                !config.groups.contains_key(group),
                "streams.toml still names group {group:?}: take [groups.{group}] out there first, else it would be declared again from its start"
            );
            let forget = async |dry_run| again_when_busy(async || engine::forget(database, id, group, dry_run).await).await;
            if self.dry_run || !self.confirmation.yes {
                let would = forget(true).await?;
                if self.dry_run {
                    return Ok(would);
                }
                self.confirmation.ask(&format!("forget {}", what(&would)))?;
            }
            forget(false).await
        })
        .await?;
        global.output().one(&forgotten, |forgotten| {
            let verb = if forgotten.dry_run { "would forget" } else { "forgot" };
            format!("{verb} {}; its stream keeps its messages\n", what(forgotten))
        })
    }
}

fn what(forgotten: &Forgotten) -> String {
    format!(
        "group {} with its position {}, {} and {} under way",
        visible(&forgotten.group),
        forgotten.position,
        human::counted(forgotten.dead_letters.unsigned_abs(), "dead letter"),
        human::counted(forgotten.under_way.unsigned_abs(), "message"),
    )
}
