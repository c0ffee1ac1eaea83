//! Which keys of a group make most of its work, as its living hosts have measured it, and what would help. It advises
//! only what figures support, and names them.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use sqlx::Row;

use super::{COUNTED_MAX, GroupId, inspect::bounded_read};
use crate::database::Database;

/// Keys shown at most: more cannot each have a share that matters.
const SHOWN_MAX: usize = 20;

/// From here on a key is as good as saturated: what is left goes to commits and to handing it on.
const SATURATED: f64 = 0.8;

/// A key that takes this much of its group's handling time deserves a group of its own when it lags.
const DOMINANT: f64 = 0.5;

/// Figures of a shorter time prove nothing.
const WINDOW_MIN_MS: u64 = 10_000;

/// How the work of a group is spread over its keys. The field names are a contract.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct HotKeys {
    pub group: String,
    pub stream: String,
    /// Living hosts that have delivered messages with a key mode lately.
    pub hosts: usize,
    /// The longest time that the figures of a host are about: the last one or two minutes, or since it started.
    pub window_ms: u64,
    /// Deliveries in that time, those without a key included.
    pub messages: u64,
    /// What their handlers took.
    pub busy_ms: f64,
    /// How many slots the group can use at the same time, in all: 1 / the largest `busy_share`.
    pub usable_parallelism: Option<f64>,
    /// The largest first.
    pub keys: Vec<HotKey>,
    pub advice: Vec<Advice>,
}

/// One key, or one lane of it. The field names are a contract.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct HotKey {
    pub key: String,
    pub lane: i16,
    /// `ordered` or `exclusive`.
    pub concurrency: String,
    pub messages: u64,
    /// Of the group's deliveries, 0 to 1.
    pub message_share: f64,
    pub busy_ms: f64,
    /// Of the group's handling time, 0 to 1.
    pub busy_share: f64,
    /// Handling time for each second: at 1 the key is busy all the time, and no further host or slot helps.
    pub saturation: f64,
    /// Messages that wait in the database.
    pub depth: i64,
    /// Whether `depth` is all there is.
    pub depth_exact: bool,
    /// The message that the key waits for.
    pub waits_for: Option<i64>,
    /// Counted failures of that message.
    pub failures: Option<i32>,
}

/// Something that would help. The field names are a contract.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Advice {
    pub key: String,
    pub lane: i16,
    pub action: Action,
    /// The figures it rests on.
    pub evidence: String,
    /// What to write.
    pub change: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Action {
    /// Spread the key over lanes.
    Shards,
    /// Drop its order.
    Exclusive,
    /// Give it a group.
    OwnGroup,
}

/// What one host publishes of one group.
#[derive(Debug, Deserialize)]
struct OfHost {
    window_ms: u64,
    messages: u64,
    busy_ms: f64,
    top: Vec<Measured>,
}

#[derive(Debug, Deserialize)]
struct Measured {
    key: String,
    lane: i16,
    ordered: bool,
    messages: u64,
    busy_ms: f64,
}

/// Reads and judges what the hosts have published. Reads a bounded number of rows.
pub async fn hot_keys(database: &Database, group: GroupId) -> Result<HotKeys> {
    let mut tx = bounded_read(database).await.context("begin to look at hot keys")?;
    let query = database.query(include_str!("hot_keys.sql")).bind(group.0);
    let rows = query.fetch_all(&mut *tx).await.context("read what hosts have published about keys")?;
    let names = rows.first().context("the group is gone")?;
    let (name, stream): (&str, &str) = (names.try_get("group_name")?, names.try_get("stream_name")?);
    // A host of another version may publish something else: it counts as one that has published nothing.
    let hosts: Vec<OfHost> =
        rows.iter().filter_map(|row| serde_json::from_value(row.try_get("hot_keys").ok()?).ok()).collect();
    let mut hot = add_up((name, stream), &hosts);
    let (keys, lanes): (Vec<_>, Vec<_>) = hot.keys.iter().map(|key| (key.key.clone(), key.lane)).unzip();
    let query = database.query(include_str!("hot_keys_depth.sql"));
    let query = query.bind(group.0).bind(keys).bind(lanes).bind(COUNTED_MAX);
    for row in query.fetch_all(&mut *tx).await.context("count what waits behind hot keys")? {
        let (of, lane): (String, i16) = (row.try_get("message_key")?, row.try_get("lane")?);
        if let Some(key) = hot.keys.iter_mut().find(|key| key.key == of && key.lane == lane) {
            key.depth = row.try_get("depth")?;
            key.depth_exact = row.try_get("depth_exact")?;
            key.waits_for = row.try_get("blocked_by")?;
            key.failures = row.try_get("failures")?;
        }
    }
    hot.advice = advise(&hot);
    Ok(hot)
}

/// Shares are shares of rates: the windows of the hosts are not equally long.
fn add_up((group, stream): (&str, &str), hosts: &[OfHost]) -> HotKeys {
    let (mut all_messages, mut all_busy) = (0.0, 0.0);
    let mut keys: BTreeMap<(&str, i16), (HotKey, f64)> = BTreeMap::new();
    for host in hosts.iter().filter(|host| host.window_ms > 0) {
        let rate = 1.0 / host.window_ms as f64;
        all_messages += host.messages as f64 * rate;
        all_busy += host.busy_ms * rate;
        for one in &host.top {
            let (key, messages) = keys.entry((&one.key, one.lane)).or_insert_with(|| (unmeasured(one), 0.0));
            key.messages += one.messages;
            key.busy_ms += one.busy_ms;
            key.saturation += one.busy_ms * rate;
            *messages += one.messages as f64 * rate;
            if one.ordered {
                key.concurrency = "ordered".to_owned();
            }
        }
    }
    let share = |of: f64, all: f64| if all > 0.0 { (of / all).min(1.0) } else { 0.0 };
    let mut keys: Vec<HotKey> = keys
        .into_values()
        .map(|(key, messages)| HotKey {
            message_share: share(messages, all_messages),
            busy_share: share(key.saturation, all_busy),
            ..key
        })
        .collect();
    keys.sort_by(|left, right| {
        let by = |key: &HotKey| key.busy_share.max(key.message_share);
        by(right).total_cmp(&by(left))
    });
    keys.truncate(SHOWN_MAX);
    let largest = keys.iter().map(|key| key.busy_share).fold(0.0, f64::max);
    HotKeys {
        group: group.to_owned(),
        stream: stream.to_owned(),
        hosts: hosts.len(),
        window_ms: hosts.iter().map(|host| host.window_ms).max().unwrap_or_default(),
        messages: hosts.iter().map(|host| host.messages).sum(),
        busy_ms: hosts.iter().map(|host| host.busy_ms).sum(),
        usable_parallelism: (largest > 0.0).then(|| 1.0 / largest),
        keys,
        advice: Vec::new(),
    }
}

fn unmeasured(of: &Measured) -> HotKey {
    HotKey {
        key: of.key.clone(),
        lane: of.lane,
        concurrency: "exclusive".to_owned(),
        messages: 0,
        message_share: 0.0,
        busy_ms: 0.0,
        busy_share: 0.0,
        saturation: 0.0,
        depth: 0,
        depth_exact: true,
        waits_for: None,
        failures: None,
    }
}

fn advise(hot: &HotKeys) -> Vec<Advice> {
    if hot.window_ms < WINDOW_MIN_MS {
        return Vec::new();
    }
    hot.keys.iter().flat_map(|key| advise_one(hot, key)).collect()
}

fn advise_one(hot: &HotKeys, key: &HotKey) -> Vec<Advice> {
    let (group, stream) = (&*hot.group, &*hot.stream);
    let advice = |action, evidence: String, change: String| Advice {
        key: key.key.clone(),
        lane: key.lane,
        action,
        evidence,
        change,
    };
    let name = toml_string(&key.key);
    let depth = format!("{}{} wait", key.depth, if key.depth_exact { "" } else { " or more" });
    let mut all = Vec::new();
    let is_ordered = key.concurrency == "ordered";
    if key.saturation >= SATURATED {
        // Each lane is to be busy for half of the time.
        let lanes = (key.saturation / 0.5).ceil().clamp(2.0, 256.0);
        let order = if is_ordered { "; order then holds inside a lane only" } else { "" };
        all.push(advice(
            Action::Shards,
            format!(
                "it runs one at a time and is busy {} of the time, so no further host or slot helps",
                percent(key.saturation)
            ),
            format!("shards = {lanes} in a key rule of stream {stream:?} that matches {name}{order}"),
        ));
    }
    if let (true, Some(waits_for), Some(failures @ 1..), 2..) = (is_ordered, key.waits_for, key.failures, key.depth) {
        all.push(advice(
            Action::Exclusive,
            format!("{depth}, behind message {waits_for}, which failed {failures} times and holds up the others to keep their order"),
            format!("concurrency = \"exclusive\" in a key rule that matches {name}, where its order is not needed; for this group alone concurrency_override = \"exclusive\""),
        ));
    }
    if key.busy_share >= DOMINANT && key.busy_share < 0.99 && key.depth > 0 {
        all.push(advice(
            Action::OwnGroup,
            format!("it takes {} of the group's handling time, and {depth}", percent(key.busy_share)),
            format!("a group with filter = {{ key = [{name}] }}, and filter = {{ not_key = [{name}] }} in {group:?}"),
        ));
    }
    all
}

fn percent(share: f64) -> String {
    format!("{:.0} %", share * 100.0)
}

/// As it is written in streams.toml. JSON escapes what TOML must have escaped, in a way that TOML reads.
fn toml_string(key: &str) -> String {
    serde_json::Value::from(key).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(window_ms: u64, messages: u64, busy_ms: f64, top: &[(&str, u64, f64)]) -> OfHost {
        let top = top.iter().map(|(key, messages, busy_ms)| Measured {
            key: (*key).to_owned(),
            lane: 0,
            ordered: true,
            messages: *messages,
            busy_ms: *busy_ms,
        });
        OfHost { window_ms, messages, busy_ms, top: top.collect() }
    }

    fn of(hosts: &[OfHost]) -> HotKeys {
        add_up(("email", "orders"), hosts)
    }

    fn near(left: f64, right: f64) -> bool {
        (left - right).abs() < 1e-9
    }

    #[test]
    fn shares_are_of_rates_and_add_up_over_hosts() {
        // One host for 100 s, another for 10 s; the key was busy for half of the time on either: it moved between them.
        let hot = of(&[
            host(100_000, 1000, 80_000.0, &[("a", 500, 50_000.0), ("b", 100, 10_000.0)]),
            host(10_000, 100, 12_000.0, &[("a", 10, 5_000.0)]),
        ]);
        let a = &hot.keys[0];
        assert_eq!((a.key.as_str(), a.messages, hot.keys[1].key.as_str(), hot.messages), ("a", 510, "b", 1100));
        assert!(near(a.saturation, 1.0) && near(a.busy_share, 0.5) && near(a.message_share, 6.0 / 20.0), "{hot:?}");
        assert!(hot.usable_parallelism.is_some_and(|slots| near(slots, 2.0)));
        let nothing = of(&[]);
        assert_eq!((nothing.usable_parallelism, nothing.keys.len(), nothing.hosts), (None, 0, 0));
    }

    fn actions(hot: &HotKeys) -> Vec<(&str, Action)> {
        let advice = advise(hot);
        assert!(advice.iter().all(|one| !one.evidence.is_empty() && !one.change.is_empty()));
        hot.keys
            .iter()
            .flat_map(|key| advice.iter().filter(|one| one.key == key.key).map(|one| (key.key.as_str(), one.action)))
            .collect()
    }

    #[test]
    fn only_what_figures_support_is_advised() {
        let measured = |busy_ms: f64, all_ms: f64| of(&[host(60_000, 1000, all_ms, &[("a", 500, busy_ms)])]);
        let with = |mut hot: HotKeys, depth, failures: Option<i32>| {
            hot.keys[0].depth = depth;
            hot.keys[0].failures = failures;
            hot.keys[0].waits_for = failures.map(|_| 7);
            hot
        };
        assert_eq!(actions(&measured(47_000.0, 200_000.0)), []);
        assert_eq!(actions(&measured(48_000.0, 200_000.0)), [("a", Action::Shards)]);
        assert_eq!(actions(&with(measured(20_000.0, 40_000.0), 0, None)), [], "nothing waits");
        assert_eq!(actions(&with(measured(20_000.0, 40_000.0), 1, None)), [("a", Action::OwnGroup)]);
        assert_eq!(actions(&with(measured(19_000.0, 40_000.0), 1, None)), []);
        assert_eq!(actions(&with(measured(1_000.0, 40_000.0), 5, Some(2))), [("a", Action::Exclusive)]);
        assert_eq!(actions(&with(measured(1_000.0, 40_000.0), 1, Some(2))), [], "nothing is behind the failed one");
        let short = HotKeys { window_ms: 9_000, ..measured(60_000.0, 60_000.0) };
        assert_eq!(actions(&short), []);
        let exclusive = of(&[OfHost {
            top: vec![Measured { key: "a".into(), lane: 3, ordered: false, messages: 1, busy_ms: 60_000.0 }],
            ..host(60_000, 1, 60_000.0, &[])
        }]);
        let advice = advise(&with(exclusive, 9, Some(1)));
        assert_eq!(advice.iter().map(|one| (one.action, one.lane)).collect::<Vec<_>>(), [(Action::Shards, 3)]);
        assert!(
            advice[0].change.starts_with("shards = 2 ") && !advice[0].change.contains("order then holds"),
            "{advice:?}"
        );
    }
}
