//! What the engine needs to know of a group to claim and settle for it.

use std::{collections::BTreeMap, sync::Arc};

use anyhow::{Context, Result};
use sqlx::Row;

use super::{GroupId, StreamId};
use crate::{config, database::Database, handler::Concurrency};

/// One group as last applied. Cheap to clone.
#[derive(Clone, Debug)]
pub struct GroupHandle {
    pub id: GroupId,
    pub name: Arc<str>,
    pub stream_id: StreamId,
    pub stream: Arc<str>,
    /// Raised by a seek. Work claimed under an older epoch is void.
    pub epoch: i64,
    pub paused: bool,
    pub policy: Arc<config::Group>,
    pub(super) filter: Arc<Patterns>,
}

impl GroupHandle {
    /// As a parameter of a statement.
    pub(super) fn concurrency_override(&self) -> Option<&'static str> {
        self.policy.concurrency_override.map(Concurrency::as_str)
    }
}

/// The group's filter as `LIKE` patterns; `None` is not given.
#[derive(Debug, Default)]
pub(super) struct Patterns {
    pub routing_keys: Option<Vec<String>>,
    pub keys: Option<Vec<String>>,
    pub not_keys: Option<Vec<String>>,
    pub headers: Option<serde_json::Value>,
}

impl Patterns {
    fn new(filter: &config::Filter) -> Self {
        let given = |globs: &[String]| (!globs.is_empty()).then(|| globs.iter().map(|glob| like(glob)).collect());
        Self {
            routing_keys: given(&filter.routing_key),
            keys: given(&filter.key),
            not_keys: given(&filter.not_key),
            headers: (!filter.headers.is_empty()).then(|| headers(&filter.headers)),
        }
    }
}

fn headers(headers: &BTreeMap<String, String>) -> serde_json::Value {
    headers.iter().map(|(name, value)| (name.clone(), serde_json::Value::from(value.as_str()))).collect()
}

/// `*` is any run of characters, `?` one; everything else stands for itself.
pub(super) fn like(glob: &str) -> String {
    let mut pattern = String::with_capacity(glob.len() + 4);
    for character in glob.chars() {
        match character {
            '*' => pattern.push('%'),
            '?' => pattern.push('_'),
            '%' | '_' | '\\' => pattern.extend(['\\', character]),
            other => pattern.push(other),
        }
    }
    pattern
}

/// Every declared group, by name.
pub async fn load_groups(database: &Database) -> Result<Vec<GroupHandle>> {
    let rows = database.fetch_all(database.query(include_str!("load_groups.sql"))).await.context("load the groups")?;
    rows.iter()
        .map(|row| {
            let name: String = row.try_get("name")?;
            let policy: serde_json::Value = row.try_get("policy")?;
            let policy: config::Group = serde_json::from_value(policy)
                .with_context(|| format!("read the policy of group {name:?}; apply its streams.toml again"))?;
            Ok(GroupHandle {
                id: GroupId(row.try_get("id")?),
                name: name.into(),
                stream_id: StreamId(row.try_get("stream_id")?),
                stream: row.try_get::<String, _>("stream")?.into(),
                epoch: row.try_get("epoch")?,
                paused: row.try_get("paused")?,
                filter: Arc::new(Patterns::new(&policy.filter)),
                policy: Arc::new(policy),
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_glob_becomes_a_like_pattern_that_matches_the_same() {
        let check = |glob: &str, pattern: &str| assert_eq!(like(glob), pattern);
        check("acct-*", "acct-%");
        check("a?c", "a_c");
        check("100%_\\", "100\\%\\_\\\\");
        check("", "");
    }
}
