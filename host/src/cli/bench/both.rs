//! Producing and consuming at once: what a running system does.

use std::{
    sync::atomic::Ordering::Relaxed,
    time::{Duration, Instant},
};

use anyhow::Result;

use super::{
    Bench, Figure,
    stage::{BATCH, Stage, plain},
};
use crate::{config::Instance, engine::floor};

#[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
pub async fn measure(stage: &Stage, bench: &Bench) -> Result<Vec<Figure>> {
    let (config, group) = stage.group("both", Instance::Fresh).await?;
    let payloads = bench.payloads(BATCH);
    let alone = bare_inserts(stage, &payloads, Duration::from_secs(2)).await?;
    let batch: Vec<_> = payloads.into_iter().map(plain).collect();
    let host = stage.host(&config, &group, stage.handler(&config, &group)?).await?;
    let counters = host.counters.group("both");
    let (wal, statements) = (floor::wal_bytes(&stage.database).await?, stage.database.statements.load(Relaxed));
    let started = Instant::now();
    let mut produced = 0_usize;
    while started.elapsed() < Duration::from_secs(bench.seconds.into()) {
        stage.produce("both", &batch).await?;
        host.consumer.produced("both");
        produced += BATCH;
    }
    let in_time = counters.done.load(Relaxed) as f64 / started.elapsed().as_secs_f64();
    stage.drained(&group, Duration::from_secs(600)).await?;
    let all = produced as f64 / started.elapsed().as_secs_f64();
    let wal_bytes = (floor::wal_bytes(&stage.database).await? - wal) as f64 / produced as f64;
    let statements = (stage.database.statements.load(Relaxed) - statements) as f64 / produced as f64;
    host.consumer.drain().await;
    let figure = |what: &str, value: f64| Figure {
        scenario: "both",
        what: what.to_owned(),
        value,
        unit: "messages/s",
        ratio: Some(value / alone),
        floor: Some("bare INSERT alone".to_owned()),
        wal_bytes_per_message: Some(wal_bytes),
        statements_per_message: Some(statements),
    };
    Ok(vec![figure("produced and consumed to the end", all), figure("consumed while producing", in_time)])
}

#[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
async fn bare_inserts(stage: &Stage, payloads: &[Vec<u8>], time: Duration) -> Result<f64> {
    let started = Instant::now();
    let mut count = 0;
    while started.elapsed() < time {
        floor::insert(&stage.database, payloads).await?;
        count += payloads.len();
    }
    Ok(count as f64 / started.elapsed().as_secs_f64())
}
