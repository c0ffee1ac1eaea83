//! From before a produce to the handler's start, at 1,000 messages a second offered, and how much of it comes after the
//! commit was answered; the floor is a bare INSERT of one row and its commit, which is what the disk allows.

use std::{
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::{
    Bench, Figure,
    stage::{Stage, plain},
};
use crate::{
    config::Instance,
    engine::floor,
    handler::{Handler, Handling, Message},
};

/// Offered messages a second.
const OFFERED: u32 = 1000;

/// What is sent so early does not count: connections open and their plans are made, which keeps two cores busy for half a
/// second.
const WARM_UP: Duration = Duration::from_secs(1);

pub async fn measure(stage: &Stage, bench: &Bench) -> Result<Vec<Figure>> {
    let commit = commits(stage).await?;
    let floor = percentile(&commit, 0.5);
    let mut figures = vec![figure("bare INSERT of one row, committed: p50", floor, None)];
    for (name, what, hint) in
        [("host", "produced through the host", true), ("sql", "produced by SQL from elsewhere", false)]
    {
        let Latencies { mut whole, mut after_commit } = offer(stage, bench, name, hint).await?;
        whole.sort_unstable();
        after_commit.sort_unstable();
        for (rank, label) in [(0.5, "p50"), (0.99, "p99"), (1.0, "max")] {
            figures.push(figure(&format!("{what}: {label}"), percentile(&whole, rank), Some(floor)));
        }
        figures.push(figure(&format!("{what}, after its commit: p50"), percentile(&after_commit, 0.5), Some(floor)));
    }
    Ok(figures)
}

fn figure(what: &str, value: Duration, floor: Option<Duration>) -> Figure {
    Figure {
        scenario: "latency",
        what: what.to_owned(),
        value: value.as_secs_f64() * 1000.0,
        unit: "ms",
        ratio: floor.map(|floor| value.as_secs_f64() / floor.as_secs_f64()),
        floor: floor.map(|_| "bare commit p50".to_owned()),
        wal_bytes_per_message: None,
        statements_per_message: None,
    }
}

/// How long single committed inserts take, sorted.
async fn commits(stage: &Stage) -> Result<Vec<Duration>> {
    let mut times = Vec::new();
    for _ in 0..300 {
        let started = Instant::now();
        floor::insert(&stage.database, &[vec![0; 100]]).await?;
        times.push(started.elapsed());
    }
    times.sort_unstable();
    Ok(times)
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "an index into a list"
)]
fn percentile(sorted: &[Duration], rank: f64) -> Duration {
    let index = ((sorted.len() as f64 * rank).ceil() as usize).clamp(1, sorted.len()) - 1;
    sorted[index]
}

/// When each message, by its number, was sent, committed and delivered, since the start.
struct Times(Mutex<Vec<[Duration; 3]>>);

const SENT: usize = 0;
const COMMITTED: usize = 1;
const DELIVERED: usize = 2;

impl Times {
    fn note(&self, number: u64, what: usize, since: Instant) {
        let mut times = self.0.lock().expect("noting a time does not panic");
        if let Some(of) = usize::try_from(number).ok().and_then(|number| times.get_mut(number)) {
            of[what] = since.elapsed();
        }
    }

    fn latencies(&self) -> Latencies {
        let times = self.0.lock().expect("noting a time does not panic");
        let warm = times.iter().filter(|of| of[SENT] >= WARM_UP);
        let (whole, after_commit) = warm
            .map(|of| (of[DELIVERED].saturating_sub(of[SENT]), of[DELIVERED].saturating_sub(of[COMMITTED])))
            .unzip();
        Latencies { whole, after_commit }
    }
}

struct Latencies {
    whole: Vec<Duration>,
    /// Zero where a delivery has begun before its producer had heard of the commit.
    after_commit: Vec<Duration>,
}

/// Notes when a delivery starts, then runs the handler under measurement.
struct Timed {
    inner: Arc<dyn Handler>,
    started: Instant,
    times: Arc<Times>,
}

impl Handler for Timed {
    fn handle<'a>(&'a self, message: Message, cut: &'a CancellationToken) -> Handling<'a> {
        if let Some(number) = message.payload.as_deref().and_then(|payload| payload.first_chunk::<8>()) {
            self.times.note(u64::from_le_bytes(*number), DELIVERED, self.started);
        }
        self.inner.handle(message, cut)
    }
}

async fn offer(stage: &Stage, bench: &Bench, name: &'static str, hint: bool) -> Result<Latencies> {
    let (config, group) = stage.group(name, Instance::Fresh).await?;
    let seconds = bench.seconds + u32::try_from(WARM_UP.as_secs()).unwrap_or(1);
    let count = seconds * OFFERED;
    let times = Arc::new(Times(Mutex::new(vec![[Duration::ZERO; 3]; count as usize])));
    let started = Instant::now();
    let timed = Timed { inner: stage.handler(&config, &group)?, started, times: Arc::clone(&times) };
    let host = Arc::new(stage.host(&config, &group, Arc::new(timed)).await?);
    let elsewhere = stage.database.with_own_pool(8);
    let database = if hint { stage.database.clone() } else { elsewhere.clone() };
    let mut producing = JoinSet::new();
    let mut tick = tokio::time::interval(Duration::from_secs(1) / OFFERED);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Burst);
    for number in 0..u64::from(count) {
        tick.tick().await;
        while producing.len() >= 64 {
            producing.join_next().await.context("wait for a producer")???;
        }
        let (database, host, times) = (database.clone(), Arc::clone(&host), Arc::clone(&times));
        producing.spawn(async move {
            let mut payload = vec![0; 100];
            payload[..8].copy_from_slice(&number.to_le_bytes());
            times.note(number, SENT, started);
            produce_one(&database, name, payload).await?;
            times.note(number, COMMITTED, started);
            if hint {
                host.consumer.produced(name);
            }
            anyhow::Ok(())
        });
    }
    while let Some(produced) = producing.join_next().await {
        produced??;
    }
    stage.drained(&group, Duration::from_secs(60)).await?;
    Arc::into_inner(host).context("the producers have ended")?.consumer.drain().await;
    elsewhere.close().await;
    Ok(times.latencies())
}

async fn produce_one(database: &crate::database::Database, stream: &str, payload: Vec<u8>) -> Result<()> {
    let message = plain(payload);
    let mut tx = database.begin().await?;
    let entry = crate::engine::NewEntry { message: &message, deliver_after: None };
    crate::engine::produce(database, &mut tx, stream, &[entry]).await?;
    tx.commit().await?;
    Ok(())
}
