//! One message: the whole input is its payload.

use std::io::Read;

use anyhow::{Context, Result, ensure};

use super::{Answer, Produce, input::Input, refused};
use crate::{
    database::Database,
    engine::{self, NewEntry, ProduceError},
    handler::NewMessage,
};

/// The largest payload that any stream may take.
const PAYLOAD_BYTES_MAX: u64 = 64 << 20;

pub(super) async fn produce(database: &Database, asked: &Produce, input: Input) -> Result<Answer> {
    let name = input.name.clone();
    let payload = tokio::task::spawn_blocking(move || read(input)).await.context("read the payload")??;
    ensure!(
        payload.len() as u64 <= PAYLOAD_BYTES_MAX,
        "{name} has more than {} MiB, the most that any stream takes; store it elsewhere and send a reference",
        PAYLOAD_BYTES_MAX >> 20
    );
    let message = NewMessage {
        stream: asked.stream.clone(),
        payload: Some(payload),
        key: asked.key.clone(),
        concurrency: asked.concurrency,
        compaction: asked.compaction,
        rank: asked.rank,
        idempotency_key: asked.idempotency_key.clone(),
        routing_key: asked.routing_key.clone(),
        headers: asked.header.clone(),
        content_type: asked.content_type.clone(),
        delay: asked.delay,
    };
    let entry = NewEntry { message: &message, deliver_after: asked.deliver_after.as_deref() };
    let mut tx = database.begin().await.context("begin to produce")?;
    let produced = match engine::produce(database, &mut tx, &asked.stream, &[entry]).await {
        Ok(produced) => produced,
        Err(ProduceError::Refused(refusal)) => return Err(refused::one(&refusal)),
        Err(error) => return Err(anyhow::Error::new(error).context("produce; nothing was stored")),
    };
    tx.commit().await.map_err(|error| refused::unknown(error, "the message", asked.idempotency_key.is_some()))?;
    refused::hint_hosts(database, &asked.stream).await;
    let mut answer = Answer::default();
    answer.add(&produced);
    Ok(answer)
}

fn read(mut input: Input) -> Result<Vec<u8>> {
    let mut payload = Vec::new();
    let bounded = &mut (&mut input.reader).take(PAYLOAD_BYTES_MAX + 1);
    bounded.read_to_end(&mut payload).with_context(|| format!("read {}", input.name))?;
    Ok(payload)
}

pub(super) fn text(answer: &Answer) -> String {
    let id = answer.first_id.unwrap_or_default();
    if answer.duplicates > 0 {
        return format!("a duplicate of message {id}, nothing stored\n");
    }
    if answer.superseded > 0 {
        return format!("message {id}, superseded already: its key has a version of a higher rank\n");
    }
    format!("message {id}\n")
}
