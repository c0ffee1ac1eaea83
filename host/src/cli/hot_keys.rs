//! `millstream keys GROUP --by share`: which keys make most of a group's work, and what would help.

use anyhow::Result;

use super::{
    Global, human,
    output::{Column, table, visible},
    with_database::with_database,
};
use crate::engine::{self, HotKey, HotKeys, find_group};

const COLUMNS: [Column; 8] = [
    Column::left("key"),
    Column::left("concurrency"),
    Column::right("messages"),
    Column::right("share"),
    Column::right("of time"),
    Column::right("saturation"),
    Column::right("depth"),
    Column::right("waits for"),
];

pub(super) async fn run(global: &Global, group: &str, limit: usize) -> Result<()> {
    let mut hot = with_database(global, async |database, _| {
        let (group, _) = find_group(database, group).await?;
        engine::hot_keys(database, group).await
    })
    .await?;
    hot.keys.truncate(limit);
    global.output().one(&hot, text)
}

fn text(hot: &HotKeys) -> String {
    if hot.keys.is_empty() {
        return "no key with a mode was delivered in the last minutes, by a host that lives\n".to_owned();
    }
    let mut text = table(&COLUMNS, &hot.keys.iter().map(cells).collect::<Vec<_>>());
    let window = human::duration(std::time::Duration::from_millis(hot.window_ms));
    text.push_str(&format!(
        "\nlast {window}, {}: {} deliveries of {} ms on average",
        human::counted(hot.hosts as u64, "host"),
        human::count(hot.messages),
        if hot.messages == 0 { "0".to_owned() } else { format!("{:.1}", hot.busy_ms / hot.messages as f64) },
    ));
    if let Some(slots) = hot.usable_parallelism {
        text.push_str(&format!("; no more than {slots:.1} slots can be of use"));
    }
    text.push('\n');
    for advice in &hot.advice {
        let of = format!("{}{}", visible(&advice.key), lane(advice.lane));
        text.push_str(&format!("{of}: {}. Try {}\n", advice.evidence, visible(&advice.change)));
    }
    text
}

fn cells(key: &HotKey) -> Vec<String> {
    let percent = |share: f64| format!("{:.1}%", share * 100.0);
    vec![
        format!("{}{}", visible(&key.key), lane(key.lane)),
        key.concurrency.clone(),
        human::count(key.messages),
        percent(key.message_share),
        percent(key.busy_share),
        format!("{:.2}", key.saturation),
        format!("{}{}", human::count(key.depth.unsigned_abs()), if key.depth_exact { "" } else { "+" }),
        key.waits_for.map(|id| id.to_string()).unwrap_or_default(),
    ]
}

fn lane(lane: i16) -> String {
    if lane > 0 { format!(" (lane {lane})") } else { String::new() }
}
