//! What key modes cost: the same backlog with its keys ignored, exclusive and ordered, and one ordered key alone.

use anyhow::Result;

use super::{
    Bench, Figure,
    consume::{Consumed, consume},
    stage::Stage,
};
use crate::{
    config::Instance,
    handler::{Concurrency, NewMessage},
};

/// Keys that the messages are spread over.
const KEYS: usize = 1000;

pub async fn measure(stage: &Stage, bench: &Bench) -> Result<Vec<Figure>> {
    let parallel = spread(stage, bench, "parallel", Concurrency::Parallel).await?;
    let exclusive = spread(stage, bench, "exclusive", Concurrency::Exclusive).await?;
    let ordered = spread(stage, bench, "ordered", Concurrency::Ordered).await?;
    let hot = consume(stage, bench, "hot", Some(Instance::Reuse), |_, message| NewMessage {
        key: Some("hot".to_owned()),
        concurrency: Some(Concurrency::Ordered),
        ..message
    })
    .await?;
    Ok(vec![
        parallel.figure("keys", "parallel, 1,000 keys", "itself", parallel.rate),
        exclusive.figure("keys", "exclusive, 1,000 keys", "parallel", parallel.rate),
        ordered.figure("keys", "ordered, 1,000 keys", "parallel", parallel.rate),
        hot.figure("keys", "ordered, one key alone", "parallel", parallel.rate),
    ])
}

/// The keys in turn, as a stream of many accounts has them.
async fn spread(stage: &Stage, bench: &Bench, name: &str, mode: Concurrency) -> Result<Consumed> {
    let message = |number: usize, message| NewMessage {
        key: Some(format!("k{}", number % KEYS)),
        concurrency: Some(mode),
        ..message
    };
    consume(stage, bench, name, Some(Instance::Reuse), message).await
}
