//! Refuses what this version reads but cannot do, so that nothing is accepted and then silently ignored. Delete a
//! check here when its feature is built; nothing else knows of them.

use super::{
    errors::Problem,
    tree::{Node, Value},
};

pub(super) fn check(root: &Node, problems: &mut Vec<Problem>) {
    for (_, stream) in root.get("streams").into_iter().flat_map(Node::entries) {
        if let Some(key) = stream.get("key") {
            check_key_mode(key, problems);
        }
        let rules = stream.get("key_rules").map(Node::elements).unwrap_or_default();
        rules.iter().for_each(|rule| check_key_mode(rule, problems));
    }
    for (_, group) in root.get("groups").into_iter().flat_map(Node::entries) {
        let named = |name| group.get(name).filter(|node| matches!(node.value, Value::Text(_)));
        if let Some(mode) = named("concurrency_override") {
            refuse(mode, "message keys are", problems);
        }
        if let Some(policy) = named("on_dead_letter").filter(|node| node.as_text() != Some("block")) {
            refuse(policy, "message keys are", problems);
        }
        if let Some(allow) = group.get("allow") {
            if let Some(http) = allow.get("http").filter(|http| !http.elements().is_empty()) {
                refuse(http, "HTTP calls of handlers are", problems);
            }
            if let Some(sql) = allow.get("sql").filter(|sql| matches!(sql.value, Value::Table(_))) {
                refuse(sql, "SQL of handlers is", problems);
            }
        }
    }
}

/// One `key` table or one of the `key_rules`.
fn check_key_mode(policy: &Node, problems: &mut Vec<Problem>) {
    let asked = |name| policy.get(name).into_iter();
    let modes = asked("concurrency").filter(|node| node.as_text().is_some_and(|mode| mode != "parallel"));
    let compaction = asked("compaction").filter(|node| node.as_boolean() == Some(true));
    let shards = asked("shards").filter(|node| node.as_integer().is_some_and(|shards| shards > 1));
    modes.chain(compaction).chain(shards).for_each(|node| refuse(node, "message keys are", problems));
}

fn refuse(node: &Node, what: &str, problems: &mut Vec<Problem>) {
    problems.push(Problem {
        at: node.at,
        key: node.key.clone(),
        message: format!("{what} not available in this version"),
        hint: Some("remove this line, or use a later version".to_owned()),
    });
}
