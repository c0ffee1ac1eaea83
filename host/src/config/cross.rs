//! Checks that need two keys at once: names that must exist, and durations that must fit each other. Passes by
//! whatever the reader has refused already.

use super::{
    errors::{Problem, nearest, shortened},
    tree::{Node, Value},
    units::duration_text,
};

/// A host misses two heartbeats before others take its work: one lost packet must not look like a dead host.
const HEARTBEATS_PER_LEASE: u32 = 3;

pub(super) fn check(root: &Node, problems: &mut Vec<Problem>) {
    if let Some(host) = root.get("host") {
        check_lease(host, problems);
        check_order(host, "poll_min", "poll_max", problems);
    }
    for (_, stream) in root.get("streams").into_iter().flat_map(Node::entries) {
        stream
            .get("key_rules")
            .map(Node::elements)
            .unwrap_or_default()
            .iter()
            .for_each(|rule| check_shards(stream, rule, problems));
    }
    for (_, group) in root.get("groups").into_iter().flat_map(Node::entries) {
        if let (Some(stream), Some(streams)) = (group.get("stream"), root.get("streams")) {
            check_stream(stream, streams, problems);
        }
        if let (Some(produce), Some(streams)) =
            (group.get("allow").and_then(|allow| allow.get("produce")), root.get("streams"))
        {
            produce.elements().iter().for_each(|stream| check_stream(stream, streams, problems));
        }
        if let Some(retry) = group.get("retry") {
            check_order(retry, "base", "max", problems);
        }
        check_names_once(group, problems);
    }
}

fn check_lease(host: &Node, problems: &mut Vec<Problem>) {
    let (Some(lease), Some(heartbeat)) = (host.get("lease"), host.get("heartbeat")) else { return };
    let (Some(lease_time), Some(heartbeat_time)) = (lease.as_duration(), heartbeat.as_duration()) else { return };
    let least = heartbeat_time * HEARTBEATS_PER_LEASE;
    if lease_time < least {
        problems.push(Problem {
            at: if lease.given { lease.at } else { heartbeat.at },
            key: lease.key.clone(),
            message: format!(
                "found \"{}\" with a heartbeat of \"{}\"; allowed: at least {HEARTBEATS_PER_LEASE} heartbeats, \"{}\"",
                duration_text(lease_time),
                duration_text(heartbeat_time),
                duration_text(least)
            ),
            hint: Some("raise `lease` or lower `heartbeat`".to_owned()),
        });
    }
}

/// Lanes split a key's queue. Where messages do not queue, or versions replace each other, there is nothing to split.
fn check_shards(stream: &Node, rule: &Node, problems: &mut Vec<Problem>) {
    let Some(shards) = rule.get("shards").filter(|shards| shards.as_integer().is_some_and(|shards| shards > 1)) else {
        return;
    };
    let inherited = |name| rule.get(name).filter(|node| node.given).or_else(|| stream.get("key")?.get(name));
    let is_parallel = inherited("concurrency").and_then(Node::as_text).is_none_or(|mode| mode == "parallel");
    let is_compacted = inherited("compaction").and_then(Node::as_boolean).unwrap_or(false);
    let message = match (is_compacted, is_parallel) {
        (true, _) => "found with compaction, where a key has one newest version; allowed: 1",
        (false, true) => "found with concurrency = \"parallel\", where a key's messages do not queue; allowed: 1",
        (false, false) => return,
    };
    let hint = "remove `shards`, or make the rule exclusive or ordered and not compacted".to_owned();
    problems.push(Problem { at: shards.at, key: shards.key.clone(), message: message.to_owned(), hint: Some(hint) });
}

/// The first duration must not be above the second.
fn check_order(table: &Node, low: &str, high: &str, problems: &mut Vec<Problem>) {
    let (Some(low_node), Some(high_node)) = (table.get(low), table.get(high)) else { return };
    let (Some(low_time), Some(high_time)) = (low_node.as_duration(), high_node.as_duration()) else { return };
    if low_time > high_time {
        let (at, key) = if low_node.given { (low_node.at, &low_node.key) } else { (high_node.at, &high_node.key) };
        problems.push(Problem {
            at,
            key: key.clone(),
            message: format!(
                "found {low} = \"{}\" above {high} = \"{}\"; allowed: {low} up to {high}",
                duration_text(low_time),
                duration_text(high_time)
            ),
            hint: Some(format!("lower `{low}` or raise `{high}`")),
        });
    }
}

fn check_stream(name: &Node, streams: &Node, problems: &mut Vec<Problem>) {
    let (Some(wanted), Value::Table(known)) = (name.as_text(), &streams.value) else { return };
    if known.contains_key(wanted) {
        return;
    }
    let hint = match nearest(wanted, known.keys().map(String::as_str)) {
        _ if name.hidden => None,
        Some(near) => Some(format!("did you mean {near:?}?")),
        None => Some(format!("declare it with [{}]", super::errors::dotted("streams", wanted))),
    };
    let names = known.keys().map(|name| format!("{:?}", shortened(name))).collect::<Vec<_>>();
    let allowed = match names.as_slice() {
        [] => "a stream that this file declares; it declares none".to_owned(),
        names => format!("a stream that this file declares: {}", shortened_list(names)),
    };
    let message = format!("found {}; allowed: {allowed}", name.shown());
    problems.push(Problem { at: name.at, key: name.key.clone(), message, hint });
}

fn shortened_list(names: &[String]) -> String {
    const SHOWN_MAX: usize = 10;
    let more = if names.len() > SHOWN_MAX { format!(", and {} more", names.len() - SHOWN_MAX) } else { String::new() };
    format!("{}{more}", names[..names.len().min(SHOWN_MAX)].join(", "))
}

/// Both tables end in one environment: a name in both would hide one of the values.
fn check_names_once(group: &Node, problems: &mut Vec<Problem>) {
    let (Some(config), Some(secrets)) = (group.get("config"), group.get("secrets")) else { return };
    for (name, secret) in secrets.entries() {
        if config.get(name).is_some() {
            problems.push(Problem {
                at: secret.at,
                key: secret.key.clone(),
                message: "found in `config` too; allowed: each name once".to_owned(),
                hint: Some("remove it from `config`, or rename one of the two".to_owned()),
            });
        }
    }
}
