//! Live traffic for a first look: orders for the example handlers, some of them broken, and now and then a misbehaving
//! message for the playground. Produces to the streams of those names only, if streams.toml has them.

use std::{sync::Arc, time::Duration};

use serde_json::{Value, json};
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use crate::{
    config::Config,
    database::{Database, told},
    engine::{self, NewEntry},
    handler::NewMessage,
};

/// Between two rounds: slow enough to read along.
const PAUSE: Duration = Duration::from_millis(500);

/// What the playground is told to do, in turn; most of the time all is well.
const PLAYGROUND: &[&str] = &["ok", "ok", "retry", "ok", "panic", "later", "ok", "reject"];

/// One round.
async fn produce_example(database: &Database, config: &Config, round: usize) -> anyhow::Result<()> {
    let mut messages = Vec::new();
    if config.streams.contains_key("orders") {
        messages.push(("orders", order(round)));
    }
    if config.streams.contains_key("playground") && round.is_multiple_of(4) {
        let what = PLAYGROUND[(round / 4) % PLAYGROUND.len()];
        messages.push(("playground", json!({ "do": what, "times": 1, "ms": 500 })));
    }
    for (stream, body) in messages {
        let message = NewMessage {
            payload: Some(body.to_string().into_bytes()),
            key: body["customer"].as_str().map(str::to_owned),
            content_type: Some("application/json".to_owned()),
            ..NewMessage::default()
        };
        let mut tx = database.begin().await?;
        engine::produce(database, &mut tx, stream, &[NewEntry { message: &message, deliver_after: None }]).await?;
        tx.commit().await?;
    }
    Ok(())
}

/// Every tenth order is one that its handler rejects.
fn order(round: usize) -> Value {
    let currency = if round % 10 == 9 { "euros" } else { "EUR" };
    json!({
        "order_id": format!("order-{}-{round}", std::process::id()),
        "customer": format!("customer-{}", round % 7),
        "amount_cents": 100 + round * 37 % 9900,
        "currency": currency,
    })
}

/// Produces until `stop`; a failure is told and does not end it. One under way is dropped at the stop, and rolled back.
pub async fn produce(database: Database, config: Arc<Config>, stop: CancellationToken) {
    let _stopped = stop.run_until_cancelled(produce_for_ever(&database, &config)).await;
}

async fn produce_for_ever(database: &Database, config: &Config) {
    for round in 0.. {
        if let Err(error) = produce_example(database, config, round).await {
            tracing::warn!("failed to produce an example: {}", told(error.as_ref()));
        }
        sleep(PAUSE).await;
    }
}
