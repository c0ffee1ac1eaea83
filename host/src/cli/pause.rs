//! `millstream pause` and `millstream resume`: a group stops claiming, on every host, until it is resumed.

use anyhow::Result;
use clap::Args;

use super::{Global, output::visible, with_database::with_database};
use crate::engine::{self, Paused, find_group};

#[derive(Args, Debug)]
pub struct Pause {
    /// The group that stops claiming. What it runs ends, what waits stays
    pub group: String,
}

#[derive(Args, Debug)]
pub struct Resume {
    /// The group that goes on
    pub group: String,
}

impl Pause {
    pub(super) async fn run(&self, global: &Global) -> Result<()> {
        let paused = with_database(global, async |database, _| {
            let (group, _) = find_group(database, &self.group).await?;
            engine::pause(database, group, &self.group).await
        })
        .await?;
        global.output().one(&paused, text)
    }
}

impl Resume {
    pub(super) async fn run(&self, global: &Global) -> Result<()> {
        let resumed = with_database(global, async |database, _| {
            let (group, _) = find_group(database, &self.group).await?;
            engine::resume(database, group, &self.group).await
        })
        .await?;
        global.output().one(&resumed, text)
    }
}

fn text(state: &Paused) -> String {
    let group = visible(&state.group);
    match (&state.paused_at, state.changed) {
        (Some(_), true) => format!("paused {group}; `millstream resume {group}` lets it go on\n"),
        (Some(since), false) => format!("{group} was paused already, since {since}\n"),
        (None, true) => format!("resumed {group}\n"),
        (None, false) => format!("{group} was not paused\n"),
    }
}
