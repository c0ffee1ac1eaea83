//! Produce against a bare INSERT of the same rows, in turns, so that both see the same machine.

use std::{
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::{Duration, Instant},
};

use anyhow::Result;

use super::{
    Bench, Figure,
    stage::{BATCH, Stage, plain},
};
use crate::{config::Instance, engine::floor, handler::NewMessage};

/// Batches in a row before it is the other's turn.
pub const ROUND: usize = 20;

/// One side of a comparison.
#[derive(Default)]
pub struct Side {
    elapsed: Duration,
    pub messages: usize,
    wal_bytes: i64,
    statements: u64,
}

impl Side {
    #[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
    pub fn figure(&self, scenario: &'static str, what: &str, floor: Option<(&str, &Self)>) -> Figure {
        let messages = self.messages as f64;
        let rate = messages / self.elapsed.as_secs_f64();
        Figure {
            scenario,
            what: what.to_owned(),
            value: rate,
            unit: "messages/s",
            ratio: floor.map(|(_, floor)| rate / (floor.messages as f64 / floor.elapsed.as_secs_f64())),
            floor: floor.map(|(name, _)| name.to_owned()),
            wal_bytes_per_message: Some(self.wal_bytes as f64 / messages),
            statements_per_message: Some(self.statements as f64 / messages),
        }
    }
}

pub async fn measure(stage: &Stage, bench: &Bench) -> Result<Vec<Figure>> {
    let (_, group) = stage.group("produce", Instance::Fresh).await?;
    let payloads = bench.payloads(BATCH);
    let batch: Vec<NewMessage> = payloads.iter().cloned().map(plain).collect();
    let (mut bare, mut ours, mut once) = (Side::default(), Side::default(), Side::default());
    let mut number = 0;
    while ours.messages < bench.messages as usize {
        round(stage, &mut bare, async || Ok(floor::insert(&stage.database, &payloads).await?)).await?;
        round(stage, &mut ours, async || stage.produce(&group.stream, &batch).await).await?;
        round(stage, &mut once, async || {
            number += 1;
            let keyed = batch.iter().enumerate().map(|(index, message)| NewMessage {
                idempotency_key: Some(format!("bench-{number}-{index}")),
                ..message.clone()
            });
            stage.produce(&group.stream, &keyed.collect::<Vec<_>>()).await
        })
        .await?;
    }
    Ok(vec![
        bare.figure("produce", "bare INSERT ... SELECT unnest", None),
        ours.figure("produce", "batches of 250", Some(("bare INSERT", &bare))),
        once.figure("produce", "batches of 250 with idempotency keys", Some(("without keys", &ours))),
    ])
}

async fn round(stage: &Stage, side: &mut Side, mut produce: impl AsyncFnMut() -> Result<()>) -> Result<()> {
    let rounds = async || {
        for _ in 0..ROUND {
            produce().await?;
        }
        Ok(())
    };
    turn(stage, side, &stage.database.statements, ROUND * BATCH, rounds).await
}

/// One side's turn, in which it produces so many messages and counts its own statements.
pub async fn turn(
    stage: &Stage,
    side: &mut Side,
    statements: &AtomicU64,
    messages: usize,
    produce: impl AsyncFnOnce() -> Result<()>,
) -> Result<()> {
    let wal = floor::wal_bytes(&stage.database).await?;
    let made = statements.load(Relaxed);
    let started = Instant::now();
    produce().await?;
    side.elapsed += started.elapsed();
    side.messages += messages;
    side.statements += statements.load(Relaxed) - made;
    side.wal_bytes += floor::wal_bytes(&stage.database).await? - wal;
    Ok(())
}
