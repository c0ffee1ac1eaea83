//! Single produces of many tasks through the Rust client against explicit batches of the same messages, in turns.

use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use tokio::task::JoinSet;

use super::{
    Bench, Figure,
    produce::{ROUND, Side, turn},
    stage::{BATCH, Stage, plain},
};
use crate::{
    client::{Client, ProduceOptions, Stream},
    config::Instance,
};

/// Tasks that each wait for the answer before they produce their next message.
const TASKS: usize = 64;

pub async fn measure(stage: &Stage, bench: &Bench) -> Result<Vec<Figure>> {
    let (_, group) = stage.group("coalesce", Instance::Fresh).await?;
    let client = Client::from_pool(stage.database.pool.clone(), stage.database.schema.name())?;
    let stream = client.raw_stream(&group.stream);
    let payloads = Arc::new(bench.payloads(BATCH));
    let batch: Vec<_> = payloads.iter().cloned().map(plain).collect();
    let (mut batches, mut singles) = (Side::default(), Side::default());
    while singles.messages < bench.messages as usize {
        let produce = async || {
            for _ in 0..ROUND {
                stage.produce(&group.stream, &batch).await?;
            }
            Ok(())
        };
        turn(stage, &mut batches, &stage.database.statements, ROUND * BATCH, produce).await?;
        let each = ROUND * BATCH / TASKS;
        let produce = async || from_many_tasks(&stream, &payloads, each).await;
        turn(stage, &mut singles, client.statements(), each * TASKS, produce).await?;
    }
    client.close().await;
    Ok(vec![
        batches.figure("coalesce", "batches of 250", None),
        singles.figure("coalesce", "single produces from 64 tasks", Some(("batches of 250", &batches))),
    ])
}

async fn from_many_tasks(stream: &Stream<[u8]>, payloads: &Arc<Vec<Vec<u8>>>, each: usize) -> Result<()> {
    let mut tasks = JoinSet::new();
    for task in 0..TASKS {
        let (stream, payloads) = (stream.clone(), Arc::clone(payloads));
        tasks.spawn(async move {
            for number in 0..each {
                let payload = payloads[(task + number) % payloads.len()].as_slice();
                let produced = stream.produce(payload, ProduceOptions::default()).await?;
                ensure!(!produced.duplicate, "message {} was there before", produced.id);
            }
            Ok(())
        });
    }
    while let Some(joined) = tasks.join_next().await {
        joined.context("run a task that produces")??;
    }
    Ok(())
}
