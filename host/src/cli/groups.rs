//! `millstream groups`: how far every group is, one line each.

use std::time::Duration;

use clap::Args;

use super::{
    Global, human,
    output::{Column, complain},
    with_database::with_database,
};
use crate::engine::{GroupState, find_group, inspect};

#[derive(Args, Debug)]
pub struct Groups {
    /// Only this group
    pub group: Option<String>,
}

const COLUMNS: [Column; 12] = [
    Column::left("group"),
    Column::left("stream"),
    Column::right("lag"),
    Column::right("oldest"),
    Column::right("in flight"),
    Column::right("retrying"),
    Column::right("delayed"),
    Column::right("deferred"),
    Column::right("dead"),
    Column::left("state"),
    Column::left("handler"),
    Column::left("digest"),
];

impl Groups {
    pub(super) async fn run(&self, global: &Global) -> anyhow::Result<()> {
        let groups = with_database(global, async |database, _| {
            if let Some(name) = &self.group {
                find_group(database, name).await?;
            }
            Ok(inspect(database).await?.groups)
        })
        .await?;
        let wanted = |group: &GroupState| self.group.as_ref().is_none_or(|name| *name == group.group);
        let groups: Vec<GroupState> = groups.into_iter().filter(wanted).collect();
        let output = global.output();
        output.list(
            &groups,
            &COLUMNS,
            cells,
            "no groups: write [groups.NAME] in streams.toml and run `millstream apply`",
        )?;
        if !output.is_json() {
            groups.iter().filter_map(gap_note).for_each(|note| complain(&note));
        }
        Ok(())
    }
}

fn cells(group: &GroupState) -> Vec<String> {
    vec![
        group.group.clone(),
        group.stream.clone(),
        count_cell(group.lag, group.lag_exact),
        oldest(group),
        human::count(group.in_flight.unsigned_abs()),
        human::count(group.retrying.unsigned_abs()),
        human::count(group.delayed.unsigned_abs()),
        human::count(group.deferred.unsigned_abs()),
        count_cell(group.dead, group.dead_exact),
        state(group).to_owned(),
        group.handler.clone(),
        group.digest.as_deref().map(short).unwrap_or_default().to_owned(),
    ]
}

/// The age of the oldest message that has not ended; nothing where all have.
pub(super) fn oldest(group: &GroupState) -> String {
    let age = group.oldest_age_ms.map(|ms| human::duration(Duration::from_millis(ms.unsigned_abs())));
    age.unwrap_or_default()
}

/// An estimate says so.
pub(super) fn count_cell(count: i64, exact: bool) -> String {
    format!("{}{}", if exact { "" } else { "~" }, human::count(count.unsigned_abs()))
}

fn state(group: &GroupState) -> &'static str {
    match (group.paused, group.digest.is_some()) {
        (true, _) => "paused",
        (false, true) => "running",
        (false, false) => "not served",
    }
}

/// The start of a digest: enough to tell versions apart.
pub(super) fn short(digest: &str) -> &str {
    digest.get(..12).unwrap_or(digest)
}

fn gap_note(group: &GroupState) -> Option<String> {
    let pid = group.oldest_gap_pid?;
    Some(format!(
        "note: group {}: an open transaction of database process {pid} may still commit messages below the group's position",
        super::output::visible(&group.group)
    ))
}
