//! Every key of streams.toml with its kind, bounds, default and meaning: the one table that the reader, the error
//! messages and the editors' JSON Schema are made from.

use super::text::Rule;

/// One key of a table.
#[derive(Debug)]
pub(super) struct Key {
    pub name: &'static str,
    pub kind: Kind,
    pub given: Given,
    /// One sentence for editors.
    pub about: &'static str,
}

/// What holds when a key is left out.
#[derive(Debug)]
pub(super) enum Given {
    Required,
    /// It has no value then.
    Optional,
    /// As it would be written, without quotes; empty for tables and lists.
    Default(&'static str),
}

#[derive(Debug)]
pub(super) enum Kind {
    Text(Rule),
    Texts(Rule),
    Integer {
        min: i64,
        max: i64,
    },
    Float {
        min: f64,
        max: f64,
    },
    Boolean,
    Duration {
        min_ms: u64,
        max_ms: u64,
    },
    /// A duration, or "forever".
    Retention {
        min_ms: u64,
        max_ms: u64,
    },
    Size {
        min: u64,
        max: u64,
    },
    /// RFC 3339.
    Time,
    Choice(&'static [&'static str]),
    /// One of the words, or a table with exactly one of the keys.
    ChoiceOrOneOf(&'static [&'static str], &'static [Key]),
    /// A table with exactly one of the keys.
    OneOf(&'static [Key]),
    Table(&'static [Key]),
    Tables(&'static [Key]),
    /// A table whose keys are names that the user chooses.
    Named {
        name: Rule,
        each: &'static Kind,
    },
}

const SECOND: u64 = 1000;
const MINUTE: u64 = 60 * SECOND;
const HOUR: u64 = 60 * MINUTE;
const DAY: u64 = 24 * HOUR;
/// Longest time anything is kept: a hundred years, short of "forever".
const CENTURY: u64 = 36_500 * DAY;
const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

const CONCURRENCY: Kind = Kind::Choice(&["parallel", "exclusive", "ordered"]);

pub(super) const ROOT: &[Key] = &[
    table("database", DATABASE, "Which Postgres to use; leave it out and the host runs its own."),
    table("host", HOST, "This process: where it listens, how it keeps its lease, how it polls."),
    named("streams", Rule::Name, &Kind::Table(STREAM), "Streams, by name."),
    named("groups", Rule::Name, &Kind::Table(GROUP), "Consumer groups, by name."),
];

const DATABASE: &[Key] = &[
    optional("url", Kind::Text(Rule::Url), "Connection string; `--database-url` and DATABASE_URL beat it."),
    default("schema", Kind::Text(Rule::Schema), "millstream", "Postgres schema that holds all tables and functions."),
    default("max_connections", Kind::Integer { min: 2, max: 500 }, "16", "Connections this host opens at most."),
];

const HOST: &[Key] = &[
    default("listen", Kind::Text(Rule::Listen), "127.0.0.1:7070", "Reserved for the HTTP API; nothing listens yet."),
    default("handlers", Kind::Text(Rule::Folder), "handlers", "Folder of .wasm files, relative to streams.toml."),
    duration("heartbeat", 50, MINUTE, "3s", "How often the host renews its lease."),
    duration("lease", 150, 10 * MINUTE, "10s", "How long a silent host keeps its work; at least 3 x heartbeat."),
    duration("drain_timeout", 0, HOUR, "30s", "How long running handlers may go on after TERM or INT."),
    duration("poll_min", 1, 10 * SECOND, "5ms", "Pause between polls right after activity."),
    duration("poll_max", 1, MINUTE, "100ms", "Pause between polls when nothing happens."),
    size("prefetch_bytes", MIB, 64 * GIB, "256MiB", "Messages held in memory, over all groups."),
    default("compile_threads", Kind::Integer { min: 1, max: 64 }, "1", "Threads that compile new components."),
    size("component_max", 64 * KIB, GIB, "64MiB", "Largest .wasm file that is taken."),
];

const STREAM: &[Key] = &[
    retention("retention", "forever", "How long messages are kept once every group has passed them."),
    duration(
        "idempotency_ttl",
        SECOND,
        365 * DAY,
        "24h",
        "How long idempotency keys are remembered: as long as producers retry.",
    ),
    size("max_payload", 1, 64 * MIB, "1MiB", "Largest payload."),
    default(
        "partition_rows",
        Kind::Integer { min: 100, max: 100_000_000 },
        "1000000",
        "Messages in one partition; retention drops whole partitions.",
    ),
    duration("dead_letter_retention", SECOND, CENTURY, "30d", "How long dead letters are kept."),
    duration("tombstone_retention", SECOND, CENTURY, "7d", "How long a deleted key's tombstone is kept."),
    optional(
        "max_lag",
        Kind::Duration { min_ms: SECOND, max_ms: CENTURY },
        "A group further behind than this no longer holds messages back from retention.",
    ),
    table("key", KEY, "What holds for keyed messages that say nothing themselves."),
    default(
        "key_rules",
        Kind::Tables(KEY_RULE),
        "",
        "Exceptions to `key`, by a glob on the key; the first match wins.",
    ),
];

const KEY: &[Key] = &[
    default("concurrency", CONCURRENCY, "parallel", "How deliveries of one key may overlap inside a group."),
    default("compaction", Kind::Boolean, "false", "Only a key's newest message is delivered."),
];

const KEY_RULE: &[Key] = &[
    required("match", Kind::Text(Rule::Glob), "Glob on the key: `*` any run of characters, `?` one."),
    optional("concurrency", CONCURRENCY, "Inherited from `key` when left out."),
    optional("compaction", Kind::Boolean, "Inherited from `key` when left out."),
    default("shards", Kind::Integer { min: 1, max: 256 }, "1", "Lanes a key's messages are spread over."),
];

const GROUP: &[Key] = &[
    required("stream", Kind::Text(Rule::Name), "The stream it reads."),
    required("handler", Kind::Text(Rule::Handler), "The .wasm file that serves it, inside the handlers folder."),
    default(
        "start",
        Kind::ChoiceOrOneOf(&["earliest", "latest"], START),
        "earliest",
        "Where a new group begins; read once, when the group is created.",
    ),
    default("slots", Kind::Integer { min: 1, max: 1000 }, "16", "Deliveries at a time, on each host."),
    duration("timeout", 10, DAY, "30s", "How long one delivery may take."),
    size("memory", MIB, 4 * GIB, "64MiB", "Memory of one sandbox."),
    default(
        "instance",
        Kind::Choice(&["fresh", "reuse"]),
        "fresh",
        "A new sandbox for every message, or one per slot that is kept.",
    ),
    default(
        "max_reuse",
        Kind::Integer { min: 1, max: 1_000_000_000 },
        "10000",
        "Messages one kept sandbox serves before it is replaced.",
    ),
    table("filter", FILTER, "Which messages the group sees; everything that is given must hold."),
    table("retry", RETRY, "When a failed delivery is tried again."),
    default(
        "on_dead_letter",
        Kind::Choice(&["block", "skip", "rest"]),
        "block",
        "What an ordered key does after a dead letter.",
    ),
    // Ordered is the strongest: it would weaken nothing, and order what was not produced in order.
    optional("concurrency_override", Kind::Choice(&["parallel", "exclusive"]), "Weakens the key mode for this group."),
    table("allow", ALLOW, "What the handler may reach; nothing unless named here."),
    named(
        "config",
        Rule::Variable,
        &Kind::Text(Rule::Any),
        "Settings the handler reads as wasi:config or environment.",
    ),
    named("secrets", Rule::Variable, &Kind::OneOf(SECRET), "Like `config`, with the value taken from elsewhere."),
    table("limits", LIMITS, "How much one delivery may write, send and receive."),
];

const START: &[Key] = &[
    optional("id", Kind::Integer { min: 1, max: i64::MAX }, "The first message id the group sees."),
    optional("time", Kind::Time, "The group sees what was produced from this time on."),
];

const FILTER: &[Key] = &[
    default("routing_key", Kind::Texts(Rule::Glob), "", "Globs; one must match the routing key."),
    default("key", Kind::Texts(Rule::Glob), "", "Globs; one must match the key."),
    default("not_key", Kind::Texts(Rule::Glob), "", "Globs; none may match the key."),
    named("headers", Rule::Variable, &Kind::Text(Rule::Any), "Headers that must be there with exactly these values."),
];

const RETRY: &[Key] = &[
    default("max_attempts", Kind::Integer { min: 1, max: 1000 }, "10", "Attempts before a message is a dead letter."),
    duration("base", 1, DAY, "1s", "Pause after the first failure."),
    default("factor", Kind::Float { min: 1.0, max: 100.0 }, "2.0", "Each further pause is so many times longer."),
    duration("max", 1, 30 * DAY, "10m", "Longest pause."),
    default("jitter", Kind::Float { min: 0.0, max: 1.0 }, "0.2", "0.2 spreads a pause over 0.8 to 1.2 of itself."),
];

const ALLOW: &[Key] = &[
    default("produce", Kind::Texts(Rule::Name), "", "Streams the handler may produce to."),
    default(
        "http",
        Kind::Texts(Rule::HostPort),
        "",
        "What the handler may call, as host:port; private addresses only where they are named themselves.",
    ),
    optional("sql", Kind::Table(SQL), "SQL in the delivery's own transaction."),
];

const SQL: &[Key] = &[required("role", Kind::Text(Rule::Role), "The Postgres role the handler's SQL runs as.")];

const SECRET: &[Key] = &[
    optional("env", Kind::Text(Rule::Variable), "Environment variable of the host that holds the value."),
    optional("file", Kind::Text(Rule::Folder), "File that holds the value, relative to streams.toml."),
];

const LIMITS: &[Key] = &[
    default("produced_messages", Kind::Integer { min: 0, max: 100_000 }, "1000", "Messages one delivery may produce."),
    size("produced_bytes", 0, 256 * MIB, "8MiB", "Payload bytes one delivery may produce."),
    size("log_bytes", 0, 64 * MIB, "64KiB", "Log bytes of one delivery that are kept."),
    default(
        "http_connections",
        Kind::Integer { min: 1, max: 10_000 },
        "64",
        "HTTP calls of the group at a time, on each host; more wait.",
    ),
    size("http_request_bytes", 0, 256 * MIB, "8MiB", "Largest body of one HTTP request."),
    size("http_response_bytes", 0, 256 * MIB, "8MiB", "Largest body of one HTTP response."),
];

const fn required(name: &'static str, kind: Kind, about: &'static str) -> Key {
    Key { name, kind, given: Given::Required, about }
}

const fn optional(name: &'static str, kind: Kind, about: &'static str) -> Key {
    Key { name, kind, given: Given::Optional, about }
}

const fn default(name: &'static str, kind: Kind, value: &'static str, about: &'static str) -> Key {
    Key { name, kind, given: Given::Default(value), about }
}

const fn table(name: &'static str, keys: &'static [Key], about: &'static str) -> Key {
    default(name, Kind::Table(keys), "", about)
}

const fn named(name: &'static str, rule: Rule, each: &'static Kind, about: &'static str) -> Key {
    default(name, Kind::Named { name: rule, each }, "", about)
}

const fn duration(name: &'static str, min_ms: u64, max_ms: u64, value: &'static str, about: &'static str) -> Key {
    default(name, Kind::Duration { min_ms, max_ms }, value, about)
}

const fn retention(name: &'static str, value: &'static str, about: &'static str) -> Key {
    default(name, Kind::Retention { min_ms: SECOND, max_ms: CENTURY }, value, about)
}

const fn size(name: &'static str, min: u64, max: u64, value: &'static str, about: &'static str) -> Key {
    default(name, Kind::Size { min, max }, value, about)
}
