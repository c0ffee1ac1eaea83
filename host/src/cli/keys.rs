//! `millstream keys`: which keys of a group are leased, wait or are blocked, with how much behind them.

use std::time::Duration;

use anyhow::Result;
use clap::{Args, ValueEnum};

use super::{
    Global, UsageError, hot_keys, human,
    output::{Column, visible},
    with_database::with_database,
};
use crate::engine::{KeyOrder, KeyState, find_group, list_keys};

#[derive(Args, Debug)]
pub struct Keys {
    /// The group
    pub group: String,
    /// Only keys in this state
    #[arg(long)]
    pub state: Option<State>,
    /// What comes first
    #[arg(long, default_value = "depth")]
    pub by: By,
    /// How many are shown at most
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub limit: u32,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum State {
    /// A host has it
    Leased,
    /// For a retry, or for the time of its next message
    Waiting,
    /// By a dead letter
    Blocked,
    /// Its messages die: on_dead_letter = "rest"
    Resting,
    /// By an operator
    Paused,
    /// Any host may take it
    Ready,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum By {
    /// Most messages first
    Depth,
    /// Largest share of the group's messages and handling time of the last minutes first, with advice
    Share,
    /// Oldest message first
    Age,
}

const COLUMNS: [Column; 8] = [
    Column::left("key"),
    Column::left("state"),
    Column::right("depth"),
    Column::right("oldest"),
    Column::left("host"),
    Column::right("waits for"),
    Column::left("because"),
    Column::right("since"),
];

impl Keys {
    pub(super) async fn run(&self, global: &Global) -> Result<()> {
        let order = match self.by {
            By::Depth => KeyOrder::Depth,
            By::Age => KeyOrder::Age,
            By::Share if self.state.is_some() => {
                return Err(UsageError(
                    "--by share is about the keys that were delivered lately; leave --state out".to_owned(),
                )
                .into());
            }
            By::Share => return hot_keys::run(global, &self.group, self.limit as usize).await,
        };
        let state = self.state.and_then(|state| state.to_possible_value());
        let state = state.as_ref().map(clap::builder::PossibleValue::get_name);
        let keys = with_database(global, async |database, _| {
            let group = find_group(database, &self.group).await?;
            list_keys(database, group, state, order, self.limit as usize).await
        })
        .await?;
        global.output().list(&keys, &COLUMNS, cells, "no keys: none is leased, and none waits")
    }
}

fn cells(key: &KeyState) -> Vec<String> {
    let duration = |ms: i64| human::duration(Duration::from_millis(ms.unsigned_abs()));
    let because = match (&key.class, key.dead_letter, &key.due_at) {
        (Some(class), Some(letter), _) => format!("dead letter {letter}: {class}"),
        (class, None, Some(due)) => {
            format!("{}due {due}", class.as_ref().map(|class| format!("{class}, ")).unwrap_or_default())
        }
        _ => String::new(),
    };
    let lane = if key.lane > 0 { format!(" (lane {})", key.lane) } else { String::new() };
    vec![
        format!("{}{lane}", visible(&key.key)),
        key.state.clone(),
        format!("{}{}", human::count(key.depth.unsigned_abs()), if key.depth_exact { "" } else { "+" }),
        key.oldest_age_ms.map(duration).unwrap_or_default(),
        key.host.as_deref().map(visible).unwrap_or_default().to_string(),
        key.waits_for.map(|id| id.to_string()).unwrap_or_default(),
        because,
        duration(key.since_ms),
    ]
}
