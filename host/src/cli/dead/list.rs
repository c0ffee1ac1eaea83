//! `millstream dead list`: one page of dead letters, newest first.

use anyhow::Result;
use clap::Args;

use super::{
    super::{
        Global,
        output::{Column, complain, first_line},
        with_database::with_database,
    },
    selection::Filter,
};
use crate::engine::{DeadLetter, find_group, list_dead};

#[derive(Args, Debug)]
pub struct List {
    /// Only this group
    #[arg(long)]
    pub group: Option<String>,
    #[command(flatten)]
    pub filter: Filter,
    /// How many at most
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub limit: u32,
    /// Go on below this id, as the last page says
    #[arg(long, value_name = "ID")]
    pub before: Option<i64>,
}

const COLUMNS: [Column; 9] = [
    Column::right("id"),
    Column::left("group"),
    Column::right("message"),
    Column::left("key"),
    Column::right("attempts"),
    Column::left("class"),
    Column::left("died at"),
    Column::left("replayed at"),
    Column::left("error"),
];

impl List {
    pub(super) async fn run(&self, global: &Global) -> Result<()> {
        let page = with_database(global, async |database, _| {
            let group = match &self.group {
                Some(name) => Some(find_group(database, name).await?.0),
                None => None,
            };
            list_dead(database, group, &self.filter.to_engine(), self.before, self.limit).await
        })
        .await?;
        global.output().list(&page.letters, &COLUMNS, cells, "no dead letters")?;
        if let Some(before) = page.before {
            complain(&format!("there may be more: add --before {before}"));
        }
        Ok(())
    }
}

/// So that a row fits a terminal; `dead show` has all of it.
const ERROR_CHARS_MAX: usize = 60;

fn cells(letter: &DeadLetter) -> Vec<String> {
    vec![
        letter.id.to_string(),
        letter.group.clone(),
        letter.message_id.to_string(),
        letter.message_key.clone().unwrap_or_default(),
        letter.attempts.to_string(),
        letter.class.clone(),
        letter.died_at.clone(),
        letter.replayed_at.clone().unwrap_or_default(),
        first_line(&letter.error, ERROR_CHARS_MAX),
    ]
}
