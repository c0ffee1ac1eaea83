//! `millstream bench`: how fast, and at what cost, each as a ratio to a floor measured in the same run. Works in a schema
//! of its own, which it drops.

mod both;

mod coalesce;

mod consume;

mod effects;

mod keys;

mod latency;

mod produce;

mod stage;

use std::path::PathBuf;

use anyhow::Result;
use clap::{Args, ValueEnum};
use serde::Serialize;

use self::stage::Stage;
use super::{Global, output::Column};

#[derive(Args, Debug)]
pub struct Bench {
    /// What to measure; everything when none is named
    #[arg(value_enum)]
    pub scenarios: Vec<Scenario>,
    /// Messages per round of produce and consume
    #[arg(long, default_value_t = 100_000, value_parser = clap::value_parser!(u32).range(1_000..=10_000_000))]
    pub messages: u32,
    /// Payload bytes of a message
    #[arg(long, default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..=1_048_576))]
    pub payload_bytes: u32,
    /// Seconds that `both` and `latency` take, each
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=3600))]
    pub seconds: u32,
    /// The handler that consumes [default: noop.wasm in the handlers folder]
    #[arg(long, value_name = "FILE")]
    pub handler: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Scenario {
    /// Batches of 250 against a bare INSERT of the same rows; with idempotency keys against without
    Produce,
    /// 64 tasks that produce one message each at a time through the Rust client, against batches of 250
    Coalesce,
    /// A backlog, with a fresh and with a reused sandbox, against a bare SELECT of the same rows
    Consume,
    /// A backlog with 1,000 keys, parallel, exclusive and ordered, and one ordered key alone
    Keys,
    /// A backlog whose deliveries each produce a message, or run a statement, against one without effects
    Effects,
    /// Producing and consuming at once
    Both,
    /// From produce to the handler's start at 1,000 messages a second
    Latency,
}

/// One line of the answer. Its field names are a contract.
#[derive(Debug, Serialize)]
pub struct Figure {
    pub scenario: &'static str,
    pub what: String,
    /// In `unit`.
    pub value: f64,
    pub unit: &'static str,
    /// To what `floor` names, measured in the same run.
    pub ratio: Option<f64>,
    pub floor: Option<String>,
    pub wal_bytes_per_message: Option<f64>,
    pub statements_per_message: Option<f64>,
}

impl Bench {
    pub async fn run(&self, global: &Global) -> Result<()> {
        let stage = Stage::open(global, self).await?;
        super::output::complain(&format!("{}; {}", stage.describe().await?, stage.sandbox.describe()));
        let figures = self.measure(&stage).await;
        let closed = stage.close().await;
        let figures = figures?;
        closed?;
        let columns = [
            Column::left("scenario"),
            Column::left("what"),
            Column::right("value"),
            Column::left("unit"),
            Column::right("ratio"),
            Column::left("to"),
            Column::right("wal bytes/message"),
            Column::right("statements/message"),
        ];
        global.output().list(&figures, &columns, cells, "nothing measured")
    }

    async fn measure(&self, stage: &Stage) -> Result<Vec<Figure>> {
        let wants = |scenario| self.scenarios.is_empty() || self.scenarios.contains(&scenario);
        let mut figures = Vec::new();
        if wants(Scenario::Produce) {
            figures.extend(produce::measure(stage, self).await?);
        }
        if wants(Scenario::Coalesce) {
            figures.extend(coalesce::measure(stage, self).await?);
        }
        if wants(Scenario::Consume) {
            figures.extend(consume::measure(stage, self).await?);
        }
        if wants(Scenario::Keys) {
            figures.extend(keys::measure(stage, self).await?);
        }
        if wants(Scenario::Effects) {
            figures.extend(effects::measure(stage, self).await?);
        }
        if wants(Scenario::Both) {
            figures.extend(both::measure(stage, self).await?);
        }
        if wants(Scenario::Latency) {
            figures.extend(latency::measure(stage, self).await?);
        }
        Ok(figures)
    }

    /// One batch of payloads. They do not compress, so that every byte is written.
    fn payloads(&self, count: usize) -> Vec<Vec<u8>> {
        let mut random = fastrand::Rng::with_seed(1);
        let mut payload = || std::iter::repeat_with(|| random.u8(..)).take(self.payload_bytes as usize).collect();
        std::iter::repeat_with(&mut payload).take(count).collect()
    }
}

fn cells(figure: &Figure) -> Vec<String> {
    let maybe = |number: Option<f64>| number.map_or(String::new(), |number| format!("{number:.2}"));
    let value =
        if figure.unit == "messages/s" { format!("{:.0}", figure.value) } else { format!("{:.2}", figure.value) };
    vec![
        figure.scenario.to_owned(),
        figure.what.clone(),
        value,
        figure.unit.to_owned(),
        maybe(figure.ratio),
        figure.floor.clone().unwrap_or_default(),
        maybe(figure.wal_bytes_per_message),
        figure.statements_per_message.map_or(String::new(), |number| format!("{number:.4}")),
    ]
}
