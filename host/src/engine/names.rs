//! From the name a person typed to the stream or group that is meant, or to an error that says what is near.

use anyhow::{Context, Result, anyhow};
use sqlx::Row;

use super::{GroupId, StreamId};
use crate::{config::nearest, database::Database};

/// So many names an error lists at most.
const NAMES_SHOWN_MAX: usize = 10;

/// The declared stream of this name.
pub async fn find_stream(database: &Database, name: &str) -> Result<StreamId> {
    find(database, "stream", name).await.map(|(id, _)| StreamId(id))
}

/// The declared group of this name, and its stream.
pub async fn find_group(database: &Database, name: &str) -> Result<(GroupId, StreamId)> {
    let (id, stream) = find(database, "group", name).await?;
    let stream = stream.context("read the stream of a group")?;
    Ok((GroupId(id), StreamId(stream)))
}

async fn find(database: &Database, kind: &str, wanted: &str) -> Result<(i32, Option<i32>)> {
    let query = database.query(include_str!("find_names.sql")).bind(kind);
    let rows = database.fetch_all(query).await.with_context(|| format!("look up {kind} {wanted:?}"))?;
    let mut names = Vec::with_capacity(rows.len());
    for row in &rows {
        let name: String = row.try_get("name")?;
        if name == wanted {
            return Ok((row.try_get("id")?, row.try_get("stream_id")?));
        }
        names.push(name);
    }
    Err(unknown(kind, wanted, &names))
}

fn unknown(kind: &str, wanted: &str, names: &[String]) -> anyhow::Error {
    let shown: Vec<String> = names.iter().take(NAMES_SHOWN_MAX).map(|name| format!("{name:?}")).collect();
    let way_out = match nearest(wanted, names.iter().map(String::as_str)) {
        Some(near) => format!("did you mean {near:?}?"),
        None if names.is_empty() => {
            format!("none is declared yet: write [{kind}s.NAME] in streams.toml and run `millstream apply`")
        }
        None if names.len() > shown.len() => {
            format!("declared are {} and {} more", shown.join(", "), names.len() - shown.len())
        }
        None => format!("declared are {}", shown.join(", ")),
    };
    anyhow!("no {kind} {wanted:?}; {way_out}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_name_is_answered_with_what_is_near_or_there() {
        let check = |names: &[&str], part: &str| {
            let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
            let error = unknown("stream", "ordres", &names).to_string();
            assert!(error.starts_with("no stream \"ordres\"; ") && error.contains(part), "{error}");
        };
        check(&["orders", "receipts"], "did you mean \"orders\"?");
        check(&["a", "b"], "declared are \"a\", \"b\"");
        check(&[], "run `millstream apply`");
        check(&["a"; 12], "and 2 more");
    }
}
