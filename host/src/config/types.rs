//! What streams.toml says, once it is known to be valid. Plain data: no parsing, no defaults looked up later.

use std::{collections::BTreeMap, path::PathBuf, time::Duration};

use serde::{Deserialize, Serialize};

use crate::handler::Concurrency;

/// One whole, valid streams.toml.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    pub database: Database,
    pub host: Host,
    pub streams: BTreeMap<String, Stream>,
    pub groups: BTreeMap<String, Group>,
}

#[derive(Clone, PartialEq)]
pub struct Database {
    /// `None`: the host runs its own Postgres.
    pub url: Option<String>,
    pub schema: String,
    pub max_connections: u32,
}

impl std::fmt::Debug for Database {
    /// Never prints the URL: it holds a password.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Database").field("schema", &self.schema).finish_non_exhaustive()
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct Host {
    pub listen: String,
    /// Absolute, or relative to the folder of streams.toml.
    pub handlers: PathBuf,
    pub heartbeat: Duration,
    /// Invariant: at least three heartbeats.
    pub lease: Duration,
    pub drain_timeout: Duration,
    pub poll_min: Duration,
    pub poll_max: Duration,
    pub prefetch_bytes: u64,
    pub compile_threads: u32,
    pub component_max_bytes: u64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Stream {
    /// `None`: forever.
    pub retention: Option<Duration>,
    pub idempotency_ttl: Duration,
    pub max_payload_bytes: u64,
    pub partition_rows: i64,
    pub dead_letter_retention: Duration,
    pub tombstone_retention: Duration,
    pub max_lag: Option<Duration>,
    pub key: KeyPolicy,
    pub key_rules: Vec<KeyRule>,
}

/// What holds for keyed messages that say nothing themselves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeyPolicy {
    pub concurrency: Concurrency,
    pub compaction: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeyRule {
    /// A glob on the key: `*` any run of characters, `?` one.
    pub pattern: String,
    pub concurrency: Option<Concurrency>,
    pub compaction: Option<bool>,
    pub shards: u32,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Group {
    pub stream: String,
    /// File name inside the handlers folder.
    pub handler: String,
    pub start: Start,
    pub slots: u32,
    pub timeout: Duration,
    pub memory_bytes: u64,
    pub instance: Instance,
    pub max_reuse: u32,
    pub filter: Filter,
    pub retry: Retry,
    pub on_dead_letter: OnDeadLetter,
    pub concurrency_override: Option<Concurrency>,
    pub allow: Allow,
    pub config: BTreeMap<String, String>,
    pub secrets: BTreeMap<String, Secret>,
    pub limits: Limits,
}

/// Where a new group begins. Read once, when the group is created.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Start {
    Earliest,
    Latest,
    Id(i64),
    /// RFC 3339, UTC.
    Time(String),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Instance {
    /// A new sandbox for every message.
    Fresh,
    /// One sandbox per slot, kept until it traps or has served `max_reuse` messages.
    Reuse,
}

/// Which messages of the stream the group sees. Everything that is given must hold; an empty list is not given.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Filter {
    pub routing_key: Vec<String>,
    pub key: Vec<String>,
    pub not_key: Vec<String>,
    pub headers: BTreeMap<String, String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Retry {
    pub max_attempts: u32,
    pub base: Duration,
    pub factor: f64,
    pub max: Duration,
    /// 0.2 spreads a delay over 0.8 to 1.2 of itself.
    pub jitter: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnDeadLetter {
    Block,
    Skip,
    Rest,
}

/// What a handler may reach. Nothing unless named.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Allow {
    /// Streams it may produce to.
    pub produce: Vec<String>,
    /// `host:port` it may call.
    pub http: Vec<String>,
    /// Postgres role its SQL runs as.
    pub sql_role: Option<String>,
}

/// Where a secret's value is found. The value itself is never kept in a `Config`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Secret {
    Env(String),
    File(PathBuf),
}

/// Bounds of one delivery, where not said otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    pub produced_messages: u32,
    pub produced_bytes: u64,
    pub log_bytes: u64,
    /// HTTP calls at a time of the whole group, on each host.
    pub http_connections: u32,
    /// Of one request's body.
    pub http_request_bytes: u64,
    /// Of one response's body.
    pub http_response_bytes: u64,
}
