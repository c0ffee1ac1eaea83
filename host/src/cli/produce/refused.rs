//! What is said when a message is refused, or when nobody knows whether it was stored.

use anyhow::anyhow;

use super::batches::Batch;
use crate::{
    database::{Database, DatabaseError, Refusal, is_ambiguous_commit},
    engine,
};

/// One message was refused: there is no need to number it.
pub fn one(refusal: &Refusal) -> anyhow::Error {
    let message =
        refusal.message.replace(" of message 1 ", " ").replace(" of message 1", "").replace("message 1 ", "it ");
    anyhow!("{message} ({}){}", refusal.sqlstate, hint(refusal))
}

/// A batch was refused: names the line in the place of the item.
pub fn batch(refusal: &Refusal, batch: &Batch) -> anyhow::Error {
    let numbered = item_of(&refusal.message).and_then(|item| Some((item, *batch.numbers.get(item.checked_sub(1)?)?)));
    if let Some((item, line)) = numbered {
        let message = refusal.message.replacen(&format!("message {item}"), "the message", 1);
        return anyhow!("line {line}: {message} ({}){}", refusal.sqlstate, hint(refusal));
    }
    let by_key = batch.lines.iter().zip(&batch.numbers).find(|(line, _)| {
        let key = line.message.idempotency_key.as_deref();
        key.is_some_and(|key| refusal.message.contains(&quoted(key)))
    });
    match by_key {
        Some((_, line)) => anyhow!("line {line}: {} ({}){}", refusal.message, refusal.sqlstate, hint(refusal)),
        None => anyhow!("{}: {} ({}){}", batch.range(), refusal.message, refusal.sqlstate, hint(refusal)),
    }
}

fn hint(refusal: &Refusal) -> String {
    refusal.hint.as_ref().map(|hint| format!("\n  hint: {hint}")).unwrap_or_default()
}

/// "key of message 3 has 2000 bytes" is about item 3 of the batch.
fn item_of(message: &str) -> Option<usize> {
    let (_, rest) = message.split_once("message ")?;
    rest.split(' ').next()?.parse().ok()
}

/// As the produce functions quote a key in an error: its first 200 characters, the way of `quote_literal`.
fn quoted(key: &str) -> String {
    let start: String = key.chars().take(200).collect();
    format!("'{}'", start.replace('\\', "\\\\").replace('\'', "''"))
}

/// A commit that failed. Sometimes only its answer was lost.
pub fn unknown(error: DatabaseError, what: &str, has_idempotency_key: bool) -> anyhow::Error {
    if !is_ambiguous_commit(&error) {
        return anyhow::Error::new(error).context(format!("commit {what}; nothing of it was stored"));
    }
    let advice = if has_idempotency_key {
        "produce it again: its idempotency key makes sure that it is stored once"
    } else {
        "look with `millstream tail`; with an idempotency key for every message it could simply be produced again"
    };
    anyhow::Error::new(error).context(format!(
        "the connection was lost while {what} was committed: nobody knows whether it is stored; {advice}"
    ))
}

/// Hosts poll anyway, so that this may fail.
pub async fn hint_hosts(database: &Database, stream: &str) {
    if let Err(error) = engine::hint(database, stream).await {
        tracing::debug!(stream, "failed to hint the hosts: {error:#}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_item_of_a_refusal_is_read_from_its_text() {
        assert_eq!(item_of("payload of message 12 has 70000 bytes, more than max_payload (65536)"), Some(12));
        assert_eq!(item_of("message 3 has a rank and no compaction"), Some(3));
        assert_eq!(item_of("idempotency key 'a' was used for another message"), None);
    }
}
