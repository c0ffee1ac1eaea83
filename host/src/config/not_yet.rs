//! Refuses what this version reads but cannot do, so that nothing is accepted and then silently ignored. Delete a
//! check here when its feature is built; nothing else knows of them.

use super::{errors::Problem, tree::Node};

pub(super) fn check(root: &Node, problems: &mut Vec<Problem>) {
    for (_, group) in root.get("groups").into_iter().flat_map(Node::entries) {
        let http = group.get("allow").and_then(|allow| allow.get("http"));
        if let Some(http) = http.filter(|http| !http.elements().is_empty()) {
            refuse(http, "HTTP calls of handlers are", problems);
        }
    }
}

fn refuse(node: &Node, what: &str, problems: &mut Vec<Problem>) {
    problems.push(Problem {
        at: node.at,
        key: node.key.clone(),
        message: format!("{what} not available in this version"),
        hint: Some("remove this line, or use a later version".to_owned()),
    });
}
