//! One group's handler: runs one delivery in a sandbox and says what became of it.

use std::{
    sync::{Arc, PoisonError},
    time::Duration,
};

use tokio_util::sync::CancellationToken;
use wasmtime::{Engine, Error, Result};

use super::{
    Sandbox,
    bindings::millstream::handler::types as wit,
    calls::Client,
    compile::Compiled,
    delivery::{Delivery, Stopped},
    failure,
    instances::{Idle, Instance, Place},
    outbox::DELAY_MAX,
    output::{Output, Writer},
    settings::GroupSettings,
    state,
    ticker::Running,
    turns::{Ended, take_turns},
};
use crate::{
    config,
    handler::{Finished, Handler, Handling, Message, NewMessage, Outcome},
};

/// A compiled handler with one group's grants, bounds and environment.
pub struct GroupHandler {
    sandbox: Arc<Sandbox>,
    compiled: Arc<Compiled>,
    settings: Arc<GroupSettings>,
    /// Always empty with `instance = "fresh"`.
    idle: Arc<Idle>,
}

impl std::fmt::Debug for GroupHandler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GroupHandler").field("group", &self.settings.group).field("compiled", &self.compiled).finish()
    }
}

impl Handler for GroupHandler {
    fn handle<'a>(&'a self, message: Message, cut: &'a CancellationToken) -> Handling<'a> {
        Box::pin(self.deliver(message, cut))
    }
}

/// What a guest's future gives back: the answer, and the instance where it can serve again.
struct Ran {
    answer: Result<(wit::Outcome, Vec<NewMessage>)>,
    instance: Option<Instance>,
}

impl GroupHandler {
    pub(super) fn new(sandbox: Arc<Sandbox>, compiled: Arc<Compiled>, settings: Arc<GroupSettings>) -> Self {
        let idle = Arc::<Idle>::default();
        if settings.instance == config::Instance::Reuse {
            sandbox.places.register(&idle);
        }
        Self { sandbox, compiled, settings, idle }
    }

    /// sha256 of the component's file.
    pub fn digest(&self) -> &Arc<str> {
        &self.compiled.digest
    }

    async fn deliver(&self, message: Message, cut: &CancellationToken) -> Finished {
        if cut.is_cancelled() {
            return self.finished(Outcome::HandBack);
        }
        let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let (place, idle) = match idle {
            Some(instance) => (None, Some(instance)),
            None => {
                let place = tokio::select! {
                    biased;
                    () = cut.cancelled() => return self.finished(Outcome::HandBack),
                    place = self.sandbox.places.take() => place,
                };
                (Some(place), None)
            }
        };
        let delivery = match &idle {
            Some(instance) => instance.delivery.clone(),
            None => Arc::new(self.new_delivery()),
        };
        delivery.output().begin(message.id, message.attempt);
        delivery.begin(message.timeout, cut);

        let guest = Guest {
            engine: self.sandbox.engine.clone(),
            client: self.sandbox.client.clone(),
            compiled: self.compiled.clone(),
            settings: self.settings.clone(),
            delivery: delivery.clone(),
            _running: self.sandbox.ticker.run(),
        };
        let ended = take_turns(guest.run(idle, place, message), &delivery, &self.sandbox.long_runs, cut).await;
        let mut finished = self.finished(Outcome::HandBack);
        match ended {
            Ended::Returned(Ran { answer, instance }) => {
                if let Some(instance) = instance {
                    self.sandbox.places.give_back(&self.idle, instance);
                }
                match answer {
                    Ok((answer, produced)) => {
                        finished.outcome = outcome(answer);
                        if finished.outcome == Outcome::Done {
                            finished.produced = produced;
                        }
                    }
                    Err(error) => finished.outcome = failure::outcome(&error, &delivery),
                }
            }
            Ended::Stopped(Stopped::Cut) => {}
            Ended::Stopped(Stopped::Timeout) => finished.outcome = failure::timed_out_waiting(&delivery),
            Ended::Panicked(text) => finished.outcome = failure::host_panicked(&text, &delivery),
        }
        delivery.output().finish();
        finished.memory_growths = delivery.growths();
        finished
    }

    fn new_delivery(&self) -> Delivery {
        let writer = Writer {
            group: self.settings.group.clone(),
            digest: self.compiled.digest.clone(),
            message_id: 0,
            attempt: 0,
        };
        Delivery::new(Output::new(writer, self.settings.rate.clone(), self.settings.limits.log_bytes))
    }

    fn finished(&self, outcome: Outcome) -> Finished {
        Finished { digest: Some(self.compiled.digest.clone()), ..Finished::plain(outcome) }
    }
}

/// One guest and all it needs, owned: it may move to other threads, and may outlive by a slice whoever waits for it.
struct Guest {
    engine: Engine,
    client: Arc<Client>,
    compiled: Arc<Compiled>,
    settings: Arc<GroupSettings>,
    delivery: Arc<Delivery>,
    /// While it runs, the clock ticks.
    _running: Running,
}

impl Guest {
    /// The guest's own future. It owns the store, so that dropping it ends everything the guest has.
    async fn run(self, idle: Option<Instance>, place: Option<Place>, message: Message) -> Ran {
        let instance = match (idle, place) {
            (Some(instance), _) => Ok(instance),
            (None, Some(place)) => self.instantiate(place).await,
            (None, None) => unreachable!("a delivery has an idle instance or a place for a new one"),
        };
        let mut instance = match instance {
            Ok(instance) => instance,
            Err(error) => return Ran { answer: Err(error), instance: None },
        };
        let mut message = message;
        let state = instance.store.data_mut();
        state.begin_delivery();
        state.sql = message.sql.take();
        state::arm(&mut instance.store);
        let answer = instance.linked.call_handle(&mut instance.store, &to_wit(message)).await;
        match answer {
            Ok(answer) => {
                let state = instance.store.data_mut();
                let produced = state.outbox.take();
                state.end_calls();
                state.sql = None; // the transaction is ours now
                instance.served += 1;
                let again =
                    self.settings.instance == config::Instance::Reuse && instance.served < self.settings.max_reuse;
                Ran { answer: Ok((answer, produced)), instance: again.then_some(instance) }
            }
            // After a trap the store is dead.
            Err(error) => Ran { answer: Err(error), instance: None },
        }
    }

    async fn instantiate(&self, place: Place) -> Result<Instance, Error> {
        let mut store = state::new_store(&self.engine, &self.client, &self.settings, &self.delivery);
        state::arm(&mut store);
        let linked = self.compiled.pre.instantiate_async(&mut store).await?;
        self.delivery.note_instantiated();
        Ok(Instance { store, linked, delivery: self.delivery.clone(), served: 0, _place: place })
    }
}

fn outcome(answer: wit::Outcome) -> Outcome {
    match answer {
        wit::Outcome::Done => Outcome::Done,
        wit::Outcome::Retry(reason) => Outcome::Retry { reason: failure::clean(&reason) },
        wit::Outcome::RetryAfter((delay_ms, reason)) => {
            Outcome::RetryAfter { delay: delay(delay_ms), reason: failure::clean(&reason) }
        }
        wit::Outcome::Reject(reason) => Outcome::Reject { reason: failure::clean(&reason) },
        wit::Outcome::Later(delay_ms) => Outcome::Later { delay: delay(delay_ms) },
    }
}

/// Bounded, so that a nonsensical delay is a late message and not an error of the database.
fn delay(delay_ms: u64) -> Duration {
    Duration::from_millis(delay_ms).min(DELAY_MAX)
}

fn to_wit(message: Message) -> wit::Message {
    let unsigned = |number: i64| u64::try_from(number).unwrap_or(0);
    wit::Message {
        id: unsigned(message.id),
        stream: message.stream.to_string(),
        group: message.group.to_string(),
        key: message.key,
        rank: message.rank,
        routing_key: message.routing_key,
        headers: message.headers,
        content_type: message.content_type,
        payload: message.payload,
        produced_at: unsigned(message.produced_at_ms),
        attempt: message.attempt,
        max_attempts: message.max_attempts,
        timeout: u64::try_from(message.timeout.as_millis()).unwrap_or(u64::MAX),
        replay: message.replay,
        redriven: message.redriven,
        skipped: message.skipped,
        gap_since: message.gap_since.map(unsigned),
    }
}
