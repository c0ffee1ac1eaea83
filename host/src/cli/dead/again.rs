//! `millstream dead redrive` and `dead discard`: by ids, by a filter, or all.

use anyhow::{Result, bail};
use clap::Args;
use serde::Serialize;

use super::{
    super::{Confirmation, Global, Told, UsageError, human, progress, with_database::with_database},
    selection::Filter,
};
use crate::{
    database::Database,
    engine::{GroupId, check_ids, discard, find_group, inspect, pick_dead, redrive},
};

/// Which dead letters a verb takes.
#[derive(Args, Debug)]
pub struct Which {
    /// Ids, as `dead list` shows them
    #[arg(value_name = "ID", conflicts_with_all = ["all", "class", "key", "message", "since"])]
    pub ids: Vec<i64>,
    /// Only this group
    #[arg(long)]
    pub group: Option<String>,
    #[command(flatten)]
    pub filter: Filter,
    /// All of the group, or of every group when none is given
    #[arg(long, conflicts_with_all = ["class", "key", "message", "since"])]
    pub all: bool,
}

#[derive(Args, Debug)]
pub struct Redrive {
    #[command(flatten)]
    pub which: Which,
    /// Only tell how many that would be
    #[arg(long)]
    pub dry_run: bool,
    /// Also where an ordered key has gone on without the message: it runs as the next of its key, out of its order
    #[arg(long)]
    pub append: bool,
}

#[derive(Args, Debug)]
pub struct Discard {
    #[command(flatten)]
    pub which: Which,
    /// Only tell how many that would be
    #[arg(long)]
    pub dry_run: bool,
    #[command(flatten)]
    pub confirmation: Confirmation,
}

/// The answer of `redrive`. Its field names are a contract.
#[derive(Serialize)]
struct Redriven {
    dry_run: bool,
    /// With `dry_run`: how many it would be.
    redriven: u64,
    /// On their way again already, or ended since.
    skipped: u64,
    /// Lost to a newer version of their key: they have ended.
    superseded: u64,
    /// Ids of those whose ordered key has gone on without them.
    refused: Vec<i64>,
}

/// The answer of `discard`. Its field names are a contract.
#[derive(Serialize)]
struct Discarded {
    dry_run: bool,
    /// With `dry_run`: how many it would be.
    discarded: u64,
    /// Being delivered again, or gone since.
    skipped: u64,
}

impl Redrive {
    pub(super) async fn run(&self, global: &Global) -> Result<()> {
        let answer = with_database(global, async |database, _| {
            let ids = self.which.find(database).await?;
            let mut answer = Redriven {
                dry_run: self.dry_run,
                redriven: ids.len() as u64,
                skipped: 0,
                superseded: 0,
                refused: vec![],
            };
            if !self.dry_run {
                let bar = progress(global, Some(ids.len() as u64), "dead letters");
                let all = redrive(database, &ids, self.append, |step| bar.inc(step as u64)).await?;
                bar.finish_and_clear();
                answer.redriven = all.redriven;
                answer.skipped = all.under_way;
                answer.superseded = all.superseded;
                answer.refused = all.refused;
            }
            Ok(answer)
        })
        .await?;
        global.output().one(&answer, Redriven::told)?;
        // Somebody asked for these, and they were not redriven.
        if answer.refused.is_empty() { Ok(()) } else { Err(Told.into()) }
    }
}

impl Redriven {
    fn told(&self) -> String {
        let verb = if self.dry_run { "would redrive" } else { "redriven" };
        let mut text = summary(verb, self.redriven, self.skipped);
        if self.superseded > 0 {
            text += &format!("{} ended: a newer version of their key has won\n", dead_letters(self.superseded));
        }
        if !self.refused.is_empty() {
            let ids = self.refused.iter().take(10).map(i64::to_string).collect::<Vec<_>>().join(" ");
            text += &format!(
                "{} refused ({ids}{}): their ordered key has gone on without them; --append delivers them all the same, \
                 as the next of their key\n",
                dead_letters(self.refused.len() as u64),
                if self.refused.len() > 10 { " ..." } else { "" }
            );
        }
        text
    }
}

impl Discard {
    pub(super) async fn run(&self, global: &Global) -> Result<()> {
        let answer = with_database(global, async |database, _| {
            let ids = self.which.find(database).await?;
            if self.dry_run || ids.is_empty() {
                return Ok(Discarded { dry_run: self.dry_run, discarded: ids.len() as u64, skipped: 0 });
            }
            self.confirmation.ask(&format!("discard {} for good", dead_letters(ids.len() as u64)))?;
            let bar = progress(global, Some(ids.len() as u64), "dead letters");
            let discarded = discard(database, &ids, |step| bar.inc(step as u64)).await?;
            bar.finish_and_clear();
            Ok(Discarded { dry_run: false, discarded, skipped: ids.len() as u64 - discarded })
        })
        .await?;
        global.output().one(&answer, |answer| {
            let verb = if answer.dry_run { "would discard" } else { "discarded" };
            summary(verb, answer.discarded, answer.skipped)
        })
    }
}

fn summary(verb: &str, changed: u64, skipped: u64) -> String {
    let skipped = match skipped {
        0 => String::new(),
        skipped => format!(", {} left alone: being delivered again, or gone since", human::count(skipped)),
    };
    format!("{verb} {}{skipped}\n", dead_letters(changed))
}

fn dead_letters(count: u64) -> String {
    human::counted(count, "dead letter")
}

impl Which {
    /// The ids that are meant, in the order of their groups, oldest first.
    async fn find(&self, database: &Database) -> Result<Vec<i64>> {
        let filter = self.filter.to_engine();
        if self.ids.is_empty() && filter.is_empty() && !self.all {
            bail!(UsageError("which ones? Give ids, a filter such as --class panic, or --all".to_owned()));
        }
        let group = match &self.group {
            Some(name) => Some(find_group(database, name).await?.0),
            None => None,
        };
        if !self.ids.is_empty() {
            let mut ids = self.ids.clone();
            ids.sort_unstable();
            ids.dedup();
            check_ids(database, group, &ids).await?;
            return Ok(ids);
        }
        let mut picked = Vec::new();
        for group in self.groups(database, group).await? {
            picked.extend(pick_dead(database, group, &filter).await?);
        }
        Ok(picked)
    }

    async fn groups(&self, database: &Database, group: Option<GroupId>) -> Result<Vec<GroupId>> {
        if let Some(group) = group {
            return Ok(vec![group]);
        }
        let mut groups = Vec::new();
        for state in inspect(database).await?.groups.iter().filter(|state| state.dead > 0) {
            groups.push(find_group(database, &state.group).await?.0);
        }
        Ok(groups)
    }
}
