//! What effects cost: the same backlog without any, with one outbox message a delivery, and with one SQL statement a delivery.
//! The effect is added to what the guest answers, so that guest and sandbox do the same work in all three.

use std::{
    sync::{Arc, OnceLock, atomic::Ordering::Relaxed},
    time::{Duration, Instant},
};

use anyhow::{Result, bail};
use tokio_util::sync::CancellationToken;

use super::{
    super::output::complain,
    Bench, Figure,
    consume::{Consumed, backlog},
    stage::{BATCH, Stage},
};
use crate::{
    config::{Allow, Config, Instance},
    engine::floor,
    handler::{Finished, Handler, Handling, Message, NewMessage, Outcome, SqlStatement, SqlValue, SqlWants},
};

/// A ceiling against hangs.
const LIMIT: Duration = Duration::from_secs(600);

/// Where outbox messages go; nobody consumes them.
const OUT: &str = "effects_out";

/// A delivery with SQL is a transaction of its own, so that a smaller backlog takes as long.
const SQL_SHARE: usize = 10;

pub async fn measure(stage: &Stage, bench: &Bench) -> Result<Vec<Figure>> {
    let all = bench.messages as usize;
    let none = run(stage, bench, "effects_none", all, Effect::Nothing).await?;
    let outbox = run(stage, bench, "effects_outbox", all, Effect::Outbox).await?;
    let mut figures = vec![
        none.figure("effects", "no effects, to the last settle", "itself", none.rate),
        outbox.figure("effects", "one outbox message a delivery", "no effects", none.rate),
    ];
    if let Err(error) = floor::create_role(&stage.database).await {
        complain(&format!("effects: no figure for SQL, since this user may not create a role: {error}"));
        return Ok(figures);
    }
    let statement = format!("insert into {}.effect (note) values ($1)", stage.database.schema.quoted());
    let sql = run(stage, bench, "effects_sql", all / SQL_SHARE, Effect::Sql(statement)).await;
    floor::drop_role(&stage.database).await?;
    figures.push(sql?.figure("effects", "one SQL statement a delivery", "no effects", none.rate));
    Ok(figures)
}

/// What a delivery does beside being done.
enum Effect {
    Nothing,
    Outbox,
    /// Runs this statement with the message's id.
    Sql(String),
}

/// The guest, and what is added to its answers.
struct WithEffect {
    guest: Arc<dyn Handler>,
    effect: Effect,
    /// Why the first statement that failed did: nothing is measured then.
    failed: OnceLock<String>,
}

impl Handler for WithEffect {
    fn handle<'a>(&'a self, message: Message, cut: &'a CancellationToken) -> Handling<'a> {
        let (id, payload, sql) = (message.id, message.payload.clone(), message.sql.clone());
        let deadline = Instant::now() + message.timeout;
        Box::pin(async move {
            let finished = self.guest.handle(message, cut).await;
            match &self.effect {
                Effect::Outbox if finished.outcome == Outcome::Done => {
                    let out = NewMessage { stream: OUT.to_owned(), payload, ..NewMessage::default() };
                    Finished { produced: vec![out], ..finished }
                }
                Effect::Sql(text) if finished.outcome == Outcome::Done => {
                    let (text, params) = (text.clone(), vec![SqlValue::Int64(id)]);
                    let statement = SqlStatement { text, params, wants: SqlWants::Count, deadline };
                    let ran = match sql {
                        Some(sql) => sql.run(statement).await.map(drop).map_err(|error| format!("{error:?}")),
                        None => Err("the group was not granted SQL".to_owned()),
                    };
                    match ran {
                        Ok(()) => finished,
                        Err(reason) => {
                            let reason = self.failed.get_or_init(|| reason).clone();
                            Finished::plain(Outcome::Reject { reason })
                        }
                    }
                }
                _ => finished,
            }
        })
    }
}

/// Consumes a backlog to its last settle: that is where effects are written.
#[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
async fn run(stage: &Stage, bench: &Bench, name: &str, messages: usize, effect: Effect) -> Result<Consumed> {
    let role = matches!(effect, Effect::Sql(_)).then(|| stage.database.schema.name().to_owned());
    let (config, group) = stage.group_with(name, |config| grant(config, name, role)).await?;
    let messages = backlog(stage, bench, name, messages.div_ceil(BATCH), |_, message| message).await?;
    let handler = Arc::new(WithEffect { guest: stage.handler(&config, &group)?, effect, failed: OnceLock::new() });
    let (wal, statements) = (floor::wal_bytes(&stage.database).await?, stage.database.statements.load(Relaxed));
    let started = Instant::now();
    let host = stage.host(&config, &group, Arc::clone(&handler) as Arc<dyn Handler>).await?;
    stage.drained(&group, LIMIT).await?;
    let elapsed = started.elapsed().as_secs_f64();
    let wal_bytes = (floor::wal_bytes(&stage.database).await? - wal) as f64 / messages as f64;
    let statements = (stage.database.statements.load(Relaxed) - statements) as f64 / messages as f64;
    host.consumer.drain().await;
    if let Some(reason) = handler.failed.get() {
        bail!("run the statement of a delivery: {reason}");
    }
    Ok(Consumed { rate: messages as f64 / elapsed, floor: 0.0, wal_bytes, statements })
}

fn grant(config: &mut Config, name: &str, sql_role: Option<String>) {
    if let Some(stream) = config.streams.get(name).cloned() {
        config.streams.insert(OUT.to_owned(), stream);
    }
    if let Some(group) = config.groups.get_mut(name) {
        group.instance = Instance::Reuse;
        group.allow = Allow { produce: vec![OUT.to_owned()], sql_role, ..Allow::default() };
    }
}
