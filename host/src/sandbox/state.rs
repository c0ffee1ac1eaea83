//! What a store holds beside the guest, and how a new store is set up.

use std::sync::Arc;

use tokio::task::yield_now;
use wasmtime::{Engine, Store, UpdateDeadline, component::ResourceTable};
use wasmtime_wasi::{WasiCtx, WasiCtxView, WasiView};
use wasmtime_wasi_config::WasiConfigVariables;
use wasmtime_wasi_http::{WasiHttpCtx, WasiHttpCtxView, WasiHttpView};

use super::{
    calls::{Calls, Client},
    delivery::Delivery,
    limiter::Limiter,
    outbox::Outbox,
    output::Source,
    settings::GroupSettings,
    stdio::Stream,
    turns::LOOKS_A_SLICE,
};
use crate::handler::Sql;

/// Most wasi resources (streams, pollables) a guest may have open. wasmtime's default of a million costs the host more
/// memory than the guest is granted.
const RESOURCES_MAX: usize = 10_000;

/// Most random bytes for one call; wasmtime's default of 64 MiB is more than a whole guest has.
const RANDOM_BYTES_MAX: u64 = 1024 * 1024;

/// Least that one call of an import may carry out of the guest.
const IMPORT_BYTES_MIN: usize = 16 * 1024 * 1024;

/// The data of a store.
pub struct State {
    pub settings: Arc<GroupSettings>,
    pub delivery: Arc<Delivery>,
    pub outbox: Outbox,
    /// SQL of the delivery; `None` without a grant, and between deliveries.
    pub sql: Option<Arc<dyn Sql>>,
    limiter: Limiter,
    /// Made at the first wasi call: a guest without wasi (`wasm32-unknown-unknown`) does not pay for it.
    wasi: Option<WasiCtx>,
    table: ResourceTable,
    /// The group's config and secrets for wasi:config, made at the first look.
    pub variables: Option<WasiConfigVariables>,
    client: Arc<Client>,
    /// The HTTP calls of this delivery, made at the first use of wasi:http.
    calls: Option<Calls>,
    http: WasiHttpCtx,
}

impl State {
    /// Ready for the next message: nothing of the one before is produced, and no call of it goes on.
    pub fn begin_delivery(&mut self) {
        self.outbox.take();
        self.end_calls();
    }

    /// Ends the HTTP calls that the guest has left open.
    pub fn end_calls(&mut self) {
        self.calls = None;
    }
}

impl WasiView for State {
    fn ctx(&mut self) -> WasiCtxView<'_> {
        let ctx = self.wasi.get_or_insert_with(|| wasi(&self.settings, &self.delivery));
        WasiCtxView { ctx, table: &mut self.table }
    }
}

impl WasiHttpView for State {
    fn http(&mut self) -> WasiHttpCtxView<'_> {
        let Self { settings, delivery, client, calls, http, table, .. } = self;
        let hooks = calls.get_or_insert_with(|| Calls::new(client.clone(), settings.clone(), delivery.clone()));
        WasiHttpCtxView { hooks, table, ctx: http }
    }
}

/// Nothing but clocks, random numbers, the group's environment and two streams to write to: no files, no network.
fn wasi(settings: &GroupSettings, delivery: &Arc<Delivery>) -> WasiCtx {
    WasiCtx::builder()
        .envs(settings.environment())
        .stdout(Stream { source: Source::Stdout, delivery: delivery.clone() })
        .stderr(Stream { source: Source::Stderr, delivery: delivery.clone() })
        .max_random_size(RANDOM_BYTES_MAX)
        .build()
}

/// A store for one instance. [`arm`] it before every call.
pub fn new_store(
    engine: &Engine,
    client: &Arc<Client>,
    settings: &Arc<GroupSettings>,
    delivery: &Arc<Delivery>,
) -> Store<State> {
    let mut table = ResourceTable::new();
    table.set_max_capacity(RESOURCES_MAX);
    let state = State {
        settings: settings.clone(),
        delivery: delivery.clone(),
        outbox: Outbox::default(),
        sql: None,
        limiter: Limiter::new(settings.memory_bytes, delivery.clone()),
        wasi: None,
        table,
        variables: None,
        client: client.clone(),
        calls: None,
        http: WasiHttpCtx::new(),
    };
    let mut store = Store::new(engine, state);
    store.limiter(|state| &mut state.limiter);
    store.epoch_deadline_callback(|store| Ok(look_up(&store.data().delivery)));
    // Twice what may be produced, so that one message too many is answered with `limit` and does not trap.
    let produced = usize::try_from(settings.limits.produced_bytes).unwrap_or(usize::MAX);
    store.set_hostcall_fuel(produced.saturating_mul(2).max(IMPORT_BYTES_MIN));
    store
}

/// Sets the next look-up. An idle instance falls behind the engine's epoch, so every call starts with this.
pub fn arm(store: &mut Store<State>) {
    store.set_epoch_deadline(1);
}

/// What a running guest does at a tick: go on, give way, or end.
pub fn look_up(delivery: &Delivery) -> UpdateDeadline {
    if delivery.must_stop().is_some() {
        return UpdateDeadline::Interrupt;
    }
    if delivery.look() < LOOKS_A_SLICE {
        return UpdateDeadline::Continue(1);
    }
    delivery.end_slice();
    // tokio's own yield: a plain one is polled again before everybody else and starves them.
    UpdateDeadline::YieldCustom(1, Box::pin(yield_now()))
}

#[cfg(test)]
mod tests {
    use std::{thread, time::Duration};

    use tokio_util::sync::CancellationToken;

    use super::*;
    use crate::sandbox::{
        output::{Output, Writer},
        ticker::TICK,
    };

    /// A system that is busy stops threads for longer than a slice: that is not the guest's doing.
    #[test]
    fn a_guest_whose_thread_was_stopped_goes_on_and_one_that_computes_gives_way() {
        let writer = Writer { group: "g".into(), digest: "".into(), message_id: 1, attempt: 1 };
        let delivery = Delivery::new(Output::new(writer, Arc::default(), 0));
        delivery.begin(Duration::from_secs(60), &CancellationToken::new());
        for _ in 0..3 {
            delivery.begin_turn();
            thread::sleep(5 * TICK);
            assert!(matches!(look_up(&delivery), UpdateDeadline::Continue(1)));
            assert!(!delivery.is_over_budget());
        }
        assert!(matches!(look_up(&delivery), UpdateDeadline::YieldCustom(1, _)));
        assert!(delivery.is_over_budget());
    }
}
