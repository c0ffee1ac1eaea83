//! `millstream dead`: look at dead letters, deliver them again, forget them.

mod again;

mod list;

mod selection;

mod show;

use anyhow::Result;
use clap::{Args, Subcommand};

use super::Global;

#[derive(Args, Debug)]
pub struct Dead {
    #[command(subcommand)]
    pub verb: DeadVerb,
}

#[derive(Debug, Subcommand)]
pub enum DeadVerb {
    /// List dead letters, newest first
    List(list::List),
    /// Show one dead letter with its whole error; its payload only when asked
    Show(show::Show),
    /// Deliver dead letters again, from attempt 1
    Redrive(again::Redrive),
    /// Delete dead letters for good
    Discard(again::Discard),
}

impl Dead {
    pub(super) async fn run(&self, global: &Global) -> Result<()> {
        match &self.verb {
            DeadVerb::List(list) => list.run(global).await,
            DeadVerb::Show(show) => show.run(global).await,
            DeadVerb::Redrive(redrive) => redrive.run(global).await,
            DeadVerb::Discard(discard) => discard.run(global).await,
        }
    }
}
