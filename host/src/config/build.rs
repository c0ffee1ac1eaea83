//! From a checked tree to the types of `types.rs`. Runs only when no problem was found, so nothing can be missing.

use std::{collections::BTreeMap, time::Duration};

use super::{
    tree::{Node, Value},
    types::{
        Allow, Config, Database, Filter, Group, Host, Instance, KeyPolicy, KeyRule, Limits, OnDeadLetter, Retry,
        Secret, Start, Stream,
    },
};
use crate::handler::Concurrency;

/// Why the `expect`s of this file cannot fail.
const CHECKED: &str = "the reader gave every key a value of its kind, or a problem was reported";

pub(super) fn config(root: &Node) -> Config {
    let database = child(root, "database");
    let host = child(root, "host");
    Config {
        database: Database {
            url: optional_text(database, "url"),
            schema: text(database, "schema"),
            max_connections: number(database, "max_connections"),
        },
        host: Host {
            listen: text(host, "listen"),
            handlers: text(host, "handlers").into(),
            heartbeat: duration(host, "heartbeat"),
            lease: duration(host, "lease"),
            drain_timeout: duration(host, "drain_timeout"),
            poll_min: duration(host, "poll_min"),
            poll_max: duration(host, "poll_max"),
            prefetch_bytes: size(host, "prefetch_bytes"),
            compile_threads: number(host, "compile_threads"),
            component_max_bytes: size(host, "component_max"),
        },
        streams: child(root, "streams").entries().map(|(name, node)| (name.clone(), stream(node))).collect(),
        groups: child(root, "groups").entries().map(|(name, node)| (name.clone(), group(node))).collect(),
    }
}

fn stream(node: &Node) -> Stream {
    let key = child(node, "key");
    Stream {
        retention: child(node, "retention").as_duration(),
        idempotency_ttl: duration(node, "idempotency_ttl"),
        max_payload_bytes: size(node, "max_payload"),
        partition_rows: child(node, "partition_rows").as_integer().expect(CHECKED),
        dead_letter_retention: duration(node, "dead_letter_retention"),
        tombstone_retention: duration(node, "tombstone_retention"),
        max_lag: child(node, "max_lag").as_duration(),
        key: KeyPolicy {
            concurrency: concurrency(key, "concurrency").expect(CHECKED),
            compaction: child(key, "compaction").as_boolean().expect(CHECKED),
        },
        key_rules: child(node, "key_rules").elements().iter().map(key_rule).collect(),
    }
}

fn key_rule(node: &Node) -> KeyRule {
    KeyRule {
        pattern: text(node, "match"),
        concurrency: concurrency(node, "concurrency"),
        compaction: child(node, "compaction").as_boolean(),
        shards: number(node, "shards"),
    }
}

fn group(node: &Node) -> Group {
    let (retry, limits) = (child(node, "retry"), child(node, "limits"));
    Group {
        stream: text(node, "stream"),
        handler: text(node, "handler"),
        start: start(child(node, "start")),
        slots: number(node, "slots"),
        timeout: duration(node, "timeout"),
        memory_bytes: size(node, "memory"),
        instance: if text(node, "instance") == "reuse" { Instance::Reuse } else { Instance::Fresh },
        max_reuse: number(node, "max_reuse"),
        filter: filter(child(node, "filter")),
        retry: Retry {
            max_attempts: number(retry, "max_attempts"),
            base: duration(retry, "base"),
            factor: child(retry, "factor").as_float().expect(CHECKED),
            max: duration(retry, "max"),
            jitter: child(retry, "jitter").as_float().expect(CHECKED),
        },
        on_dead_letter: match text(node, "on_dead_letter").as_str() {
            "skip" => OnDeadLetter::Skip,
            "rest" => OnDeadLetter::Rest,
            _ => OnDeadLetter::Block,
        },
        concurrency_override: concurrency(node, "concurrency_override"),
        allow: allow(child(node, "allow")),
        config: text_map(node, "config"),
        secrets: child(node, "secrets").entries().map(|(name, node)| (name.clone(), secret(node))).collect(),
        limits: Limits {
            produced_messages: number(limits, "produced_messages"),
            produced_bytes: size(limits, "produced_bytes"),
            log_bytes: size(limits, "log_bytes"),
            http_connections: number(limits, "http_connections"),
            http_request_bytes: size(limits, "http_request_bytes"),
            http_response_bytes: size(limits, "http_response_bytes"),
        },
    }
}

fn start(node: &Node) -> Start {
    match node.as_text() {
        Some("latest") => Start::Latest,
        Some(_) => Start::Earliest,
        None => match optional_text(node, "time") {
            Some(time) => Start::Time(time),
            None => Start::Id(child(node, "id").as_integer().expect(CHECKED)),
        },
    }
}

fn filter(node: &Node) -> Filter {
    Filter {
        routing_key: texts(node, "routing_key"),
        key: texts(node, "key"),
        not_key: texts(node, "not_key"),
        headers: text_map(node, "headers"),
    }
}

fn allow(node: &Node) -> Allow {
    let sql = child(node, "sql");
    Allow {
        produce: texts(node, "produce"),
        http: texts(node, "http"),
        sql_role: matches!(sql.value, Value::Table(_)).then(|| text(sql, "role")),
    }
}

fn secret(node: &Node) -> Secret {
    match optional_text(node, "env") {
        Some(name) => Secret::Env(name),
        None => Secret::File(text(node, "file").into()),
    }
}

fn concurrency(node: &Node, name: &str) -> Option<Concurrency> {
    child(node, name).as_text().map(|mode| match mode {
        "exclusive" => Concurrency::Exclusive,
        "ordered" => Concurrency::Ordered,
        _ => Concurrency::Parallel,
    })
}

fn child<'a>(node: &'a Node, name: &str) -> &'a Node {
    node.get(name).expect(CHECKED)
}

fn text(node: &Node, name: &str) -> String {
    optional_text(node, name).expect(CHECKED)
}

fn optional_text(node: &Node, name: &str) -> Option<String> {
    child(node, name).as_text().map(str::to_owned)
}

fn texts(node: &Node, name: &str) -> Vec<String> {
    child(node, name).elements().iter().map(|element| element.as_text().expect(CHECKED).to_owned()).collect()
}

fn text_map(node: &Node, name: &str) -> BTreeMap<String, String> {
    let entries = child(node, name).entries();
    entries.map(|(name, node)| (name.clone(), node.as_text().expect(CHECKED).to_owned())).collect()
}

fn number(node: &Node, name: &str) -> u32 {
    child(node, name).as_integer().and_then(|number| u32::try_from(number).ok()).expect(CHECKED)
}

fn duration(node: &Node, name: &str) -> Duration {
    child(node, name).as_duration().expect(CHECKED)
}

fn size(node: &Node, name: &str) -> u64 {
    child(node, name).as_size().expect(CHECKED)
}
