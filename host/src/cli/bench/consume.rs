//! Consuming a backlog against a bare keyset SELECT of the same rows.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};

use super::{
    Bench, Figure,
    stage::{BATCH, Stage, plain},
};
use crate::{
    config::Instance,
    engine::floor,
    handler::{Finished, Message, NewMessage},
};

/// A ceiling against hangs.
const LIMIT: Duration = Duration::from_secs(600);

pub async fn measure(stage: &Stage, bench: &Bench) -> Result<Vec<Figure>> {
    let mut figures = Vec::new();
    let reuse = consume(stage, bench, "reuse", Some(Instance::Reuse), as_it_is).await?;
    let fresh = consume(stage, bench, "fresh", Some(Instance::Fresh), as_it_is).await?;
    let closure = consume(stage, bench, "closure", None, as_it_is).await?;
    figures.push(reuse.floor_figure());
    figures.push(reuse.figure("consume", "no-op handler, reused sandbox", "bare SELECT", reuse.floor));
    figures.push(fresh.figure("consume", "no-op handler, fresh sandbox", "reused sandbox", reuse.rate));
    figures.push(closure.figure("consume", "no sandbox at all", "bare SELECT", closure.floor));
    Ok(figures)
}

fn as_it_is(_: usize, message: NewMessage) -> NewMessage {
    message
}

/// What consuming a backlog came to.
pub struct Consumed {
    pub rate: f64,
    /// Messages a second of the bare SELECT over the same log.
    pub floor: f64,
    /// These two for each message.
    pub wal_bytes: f64,
    pub statements: f64,
}

impl Consumed {
    fn floor_figure(&self) -> Figure {
        Figure {
            scenario: "consume",
            what: "bare SELECT, 250 at a time".to_owned(),
            value: self.floor,
            unit: "messages/s",
            ratio: None,
            floor: None,
            wal_bytes_per_message: None,
            statements_per_message: None,
        }
    }

    pub fn figure(&self, scenario: &'static str, what: &str, floor: &str, floor_rate: f64) -> Figure {
        Figure {
            scenario,
            what: what.to_owned(),
            value: self.rate,
            unit: "messages/s",
            ratio: Some(self.rate / floor_rate),
            floor: Some(floor.to_owned()),
            wal_bytes_per_message: Some(self.wal_bytes),
            statements_per_message: Some(self.statements),
        }
    }
}

/// Produces a backlog of what `message` makes of numbered messages, and consumes it; without an instance by a closure.
#[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
pub async fn consume(
    stage: &Stage,
    bench: &Bench,
    name: &str,
    instance: Option<Instance>,
    message: impl Fn(usize, NewMessage) -> NewMessage,
) -> Result<Consumed> {
    let (config, group) = stage.group(name, instance.unwrap_or(Instance::Fresh)).await?;
    let count = backlog(stage, bench, name, (bench.messages as usize).div_ceil(BATCH), message).await?;
    let messages = count as f64;
    floor::read(&stage.database, group.stream_id).await?; // both sides find the log in memory
    let started = Instant::now();
    let read = floor::read(&stage.database, group.stream_id).await?;
    let floor = read as f64 / started.elapsed().as_secs_f64();

    let handler = match instance {
        Some(_) => stage.handler(&config, &group)?,
        None => Arc::new(|_: Message| Finished::plain(crate::handler::Outcome::Done)),
    };
    let (wal, statements) = (floor::wal_bytes(&stage.database).await?, stage.database.statements.load(Relaxed));
    let started = Instant::now();
    let host = stage.host(&config, &group, handler).await?;
    let counters = host.counters.group(name);
    while done(&counters.done) < count as u64 {
        ensure!(started.elapsed() < LIMIT, "the backlog is not consumed within {} s", LIMIT.as_secs());
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let elapsed = started.elapsed();
    stage.drained(&group, LIMIT).await?;
    let wal_bytes = (floor::wal_bytes(&stage.database).await? - wal) as f64 / messages;
    let statements = (stage.database.statements.load(Relaxed) - statements) as f64 / messages;
    host.consumer.drain().await;
    Ok(Consumed { rate: messages / elapsed.as_secs_f64(), floor, wal_bytes, statements })
}

/// Produces so many batches of what `message` makes of numbered messages; answers the number of messages.
pub async fn backlog(
    stage: &Stage,
    bench: &Bench,
    stream: &str,
    batches: usize,
    message: impl Fn(usize, NewMessage) -> NewMessage,
) -> Result<usize> {
    let payloads = bench.payloads(BATCH);
    for number in 0..batches {
        let numbered = payloads.iter().cloned().enumerate();
        let batch: Vec<_> = numbered.map(|(index, payload)| message(number * BATCH + index, plain(payload))).collect();
        stage.produce(stream, &batch).await?;
    }
    Ok(batches * BATCH)
}

fn done(counter: &AtomicU64) -> u64 {
    counter.load(Relaxed)
}
