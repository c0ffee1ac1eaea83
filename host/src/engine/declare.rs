//! What streams.toml declares, made true in the database: streams with their tables and functions, groups with their
//! cursors. All of it in one transaction; what is declared already only changes its policy.

use std::{collections::HashMap, fmt};

use anyhow::{Context, Result, ensure};
use serde::Serialize;
use sqlx::{PgConnection, Row, types::Json};

use super::{GroupId, StreamId, functions, group::like, guest_sql, position::place_cursor, units::milliseconds};
use crate::{
    config::{Config, Group, KeyPolicy, KeyRule, Stream},
    database::Database,
};

/// One thing that applying a configuration did.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "change", content = "name", rename_all = "snake_case")]
pub enum Change {
    StreamCreated(String),
    StreamChanged(String),
    GroupCreated(String),
    GroupChanged(String),
    /// `start` is read at a group's creation only.
    StartIgnored(String),
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::StreamCreated(name) => write!(f, "create stream {name}"),
            Self::StreamChanged(name) => write!(f, "change stream {name}"),
            Self::GroupCreated(name) => write!(f, "create group {name}"),
            Self::GroupChanged(name) => write!(f, "change group {name}"),
            Self::StartIgnored(name) => {
                write!(f, "group {name} exists already, so its changed `start` has no effect")
            }
        }
    }
}

/// How many partitions a new stream begins with. Maintenance keeps as many ahead.
pub const PARTITIONS_AHEAD: i32 = 8;

/// Declares what the configuration says and returns what that changed. Streams and groups that it does not name stay.
pub async fn apply(database: &Database, config: &Config) -> Result<Vec<Change>> {
    let mut tx = database.begin().await.context("begin to declare")?;
    database.query(include_str!("declare_lock.sql")).execute(&mut *tx).await.context("take the declaration lock")?;
    functions::install(database, &mut tx, &[]).await?;
    let known = Known::load(database, &mut tx).await?;
    let mut changes = Vec::new();
    for (name, stream) in &config.streams {
        declare_stream(database, &mut tx, &known, name, stream, &mut changes)
            .await
            .with_context(|| format!("declare stream {name:?}"))?;
    }
    let streams = Known::load(database, &mut tx).await?.stream_ids();
    functions::install(database, &mut tx, &streams).await?;
    for (name, group) in &config.groups {
        declare_group(database, &mut tx, &known, name, group, &mut changes)
            .await
            .with_context(|| format!("declare group {name:?}"))?;
    }
    guest_sql::forget_roles(database, &mut tx).await?;
    tx.commit().await.context("commit what was declared")?;
    Ok(changes)
}

/// What applying the configuration would change. Reads only. `None` is a database in which nothing is declared.
pub async fn plan(database: Option<&Database>, config: &Config) -> Result<Vec<Change>> {
    let known = match database {
        None => Known::default(),
        Some(database) => {
            let mut tx = database.begin().await.context("begin to compare")?;
            Known::load(database, &mut tx).await?
        }
    };
    let mut changes = Vec::new();
    for (name, stream) in &config.streams {
        changes.extend(known.stream_change(name, &serde_json::to_value(stream)?));
    }
    for (name, group) in &config.groups {
        let change = known.group_changes(name, group, &serde_json::to_value(group)?);
        changes.extend(change.with_context(|| format!("declare group {name:?}"))?);
    }
    Ok(changes)
}

/// What was declared before.
#[derive(Default)]
struct Known {
    streams: HashMap<String, (StreamId, serde_json::Value)>,
    /// Stream and policy.
    groups: HashMap<String, (String, serde_json::Value)>,
}

impl Known {
    async fn load(database: &Database, tx: &mut PgConnection) -> Result<Self> {
        let rows =
            database.query(include_str!("declare_known.sql")).fetch_all(tx).await.context("read what is declared")?;
        let mut known = Self { streams: HashMap::new(), groups: HashMap::new() };
        for row in rows {
            let (name, policy) = (row.try_get("name")?, row.try_get("policy")?);
            match row.try_get("stream")? {
                None => known.streams.insert(name, (StreamId(row.try_get("id")?), policy)).map(drop),
                Some(stream) => known.groups.insert(name, (stream, policy)).map(drop),
            };
        }
        Ok(known)
    }

    fn stream_change(&self, name: &str, policy: &serde_json::Value) -> Option<Change> {
        match self.streams.get(name) {
            Some((_, before)) if before == policy => None,
            Some(_) => Some(Change::StreamChanged(name.to_owned())),
            None => Some(Change::StreamCreated(name.to_owned())),
        }
    }

    /// Fails for what cannot be changed.
    fn group_changes(&self, name: &str, group: &Group, policy: &serde_json::Value) -> Result<Vec<Change>> {
        let Some((stream, before)) = self.groups.get(name) else {
            return Ok(vec![Change::GroupCreated(name.to_owned())]);
        };
        ensure!(
            *stream == group.stream,
            "it reads stream {stream:?}, and a group cannot move to another ({:?}); give the new group another name",
            group.stream
        );
        let mut changes = Vec::new();
        if before != policy {
            changes.push(Change::GroupChanged(name.to_owned()));
            if before.get("start") != policy.get("start") {
                changes.push(Change::StartIgnored(name.to_owned()));
            }
        }
        Ok(changes)
    }

    fn stream_ids(&self) -> Vec<StreamId> {
        self.streams.values().map(|(id, _)| *id).collect()
    }
}

async fn declare_stream(
    database: &Database,
    tx: &mut PgConnection,
    known: &Known,
    name: &str,
    stream: &Stream,
    changes: &mut Vec<Change>,
) -> Result<()> {
    let policy = serde_json::to_value(stream)?;
    let Some(change) = known.stream_change(name, &policy) else { return Ok(()) };
    changes.push(change);
    let row = database
        .query(include_str!("declare_stream.sql"))
        .bind(name)
        .bind(stream.retention.map(milliseconds))
        .bind(milliseconds(stream.idempotency_ttl))
        .bind(i64::try_from(stream.max_payload_bytes)?)
        .bind(stream.partition_rows)
        .bind(milliseconds(stream.dead_letter_retention))
        .bind(milliseconds(stream.tombstone_retention))
        .bind(stream.max_lag.map(milliseconds))
        .bind(Json(policy))
        .fetch_one(&mut *tx)
        .await?;
    let id: i32 = row.try_get(0)?;
    declare_key_rules(database, tx, id, stream).await.context("write its key rules")?;
    if !known.streams.contains_key(name) {
        let tables = database.schema.stream_sql(include_str!("create_stream.sql"), id);
        sqlx::raw_sql(tables).execute(&mut *tx).await.context("create its tables")?;
        let extend = database.query(include_str!("extend_log.sql")).bind(id).bind(PARTITIONS_AHEAD);
        extend.execute(tx).await.context("create its first partitions")?;
    }
    Ok(())
}

/// Rules with what they inherit, the stream's default last. Nothing where nothing would change.
async fn declare_key_rules(database: &Database, tx: &mut PgConnection, id: i32, stream: &Stream) -> Result<()> {
    let default = KeyRule { pattern: "*".to_owned(), concurrency: None, compaction: None, shards: 1 };
    let is_plain = stream.key_rules.is_empty() && stream.key == KeyPolicy::default();
    let rules: Vec<_> = stream.key_rules.iter().chain((!is_plain).then_some(&default)).collect();
    let query = database.query(include_str!("declare_key_rules.sql")).bind(id);
    let query = query.bind(rules.iter().map(|rule| like(&rule.pattern)).collect::<Vec<_>>());
    let mode = |rule: &&KeyRule| rule.concurrency.unwrap_or(stream.key.concurrency).as_str();
    let query = query.bind(rules.iter().map(mode).collect::<Vec<_>>());
    let compaction = |rule: &&KeyRule| rule.compaction.unwrap_or(stream.key.compaction);
    let query = query.bind(rules.iter().map(compaction).collect::<Vec<_>>());
    let shards = |rule: &&KeyRule| i16::try_from(rule.shards).unwrap_or(i16::MAX);
    query.bind(rules.iter().map(shards).collect::<Vec<_>>()).execute(&mut *tx).await?;
    database.query(include_str!("declare_holds.sql")).bind(id).execute(tx).await?;
    Ok(())
}

async fn declare_group(
    database: &Database,
    tx: &mut PgConnection,
    known: &Known,
    name: &str,
    group: &Group,
    changes: &mut Vec<Change>,
) -> Result<()> {
    let policy = serde_json::to_value(group)?;
    let change = known.group_changes(name, group, &policy)?;
    if let Some(role) = &group.allow.sql_role {
        // Each time: whatever the role's owner did to its function is mended.
        guest_sql::allow_sql(database, tx, role).await.with_context(|| format!("allow SQL as role {role:?}"))?;
    }
    if change.is_empty() {
        return Ok(());
    }
    changes.extend(change);
    let query = database.query(include_str!("declare_group.sql"));
    let query = query.bind(name).bind(&group.stream).bind(&group.handler).bind(Json(policy));
    let row = query.fetch_one(&mut *tx).await?;
    if !known.groups.contains_key(name) {
        let (id, stream) = (GroupId(row.try_get(0)?), StreamId(row.try_get(1)?));
        place_cursor(database, tx, id, stream, &group.start).await?;
    }
    Ok(())
}
