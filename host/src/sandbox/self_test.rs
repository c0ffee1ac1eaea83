//! Proves at the start of the host that a guest that never returns is interrupted. A host where that does not work (a
//! ticker that died, a build without epochs) must not run anybody's code.

use std::{sync::Arc, time::Duration};

use anyhow::{anyhow, bail};
use tokio_util::sync::CancellationToken;
use wasmtime::{Engine, Instance, Module, Store};

use super::{
    delivery::Delivery,
    long_runs::LongRuns,
    output::{Output, Writer},
    ticker::{Running, Ticker},
    turns::{Ended, take_turns},
};

/// `(module (func (export "spin") (loop (br 0))))`; a test compares.
const SPIN: &[u8] = b"\0asm\x01\0\0\0\x01\x04\x01\x60\0\0\x03\x02\x01\0\x07\x08\x01\x04spin\0\0\x0a\x09\x01\x07\0\x03\x40\x0c\0\x0b\x0b";

/// How long the loop is let run: five ticks.
const TIMEOUT: Duration = Duration::from_millis(10);

/// Long enough for the most loaded machine.
const PATIENCE: Duration = Duration::from_secs(10);

/// Fails when the built-in loop outlives its timeout. Takes some milliseconds.
pub async fn run(engine: &Engine, ticker: &Arc<Ticker>, long_runs: &Arc<LongRuns>) -> anyhow::Result<()> {
    let running = ticker.run();
    let writer = Writer { group: "self-test".into(), digest: "".into(), message_id: 0, attempt: 0 };
    let delivery = Arc::new(Delivery::new(Output::new(writer, Arc::default(), 0)));
    delivery.begin(TIMEOUT, &CancellationToken::new());
    let guest = tokio::spawn(spin(engine.clone(), delivery, running, long_runs.clone()));
    match tokio::time::timeout(PATIENCE, guest).await {
        Ok(Ok(true)) => Ok(()),
        Ok(Ok(false)) => bail!("the built-in endless loop returned"),
        Ok(Err(error)) => Err(anyhow!("run the sandbox's self-test: {error}")),
        Err(_) => bail!("the sandbox cannot interrupt a guest on this system: handlers could run for ever"),
    }
}

/// Whether the loop was ended from outside.
async fn spin(engine: Engine, delivery: Arc<Delivery>, running: Running, long_runs: Arc<LongRuns>) -> bool {
    let clock = delivery.clone();
    let guest = async move {
        let _running = running;
        let module = Module::from_binary(&engine, SPIN)?;
        let mut store = Store::new(&engine, clock);
        store.epoch_deadline_callback(|store| Ok(super::state::look_up(store.data())));
        store.set_epoch_deadline(1);
        let instance = Instance::new_async(&mut store, &module, &[]).await?;
        let spin = instance.get_typed_func::<(), ()>(&mut store, "spin")?;
        spin.call_async(&mut store, ()).await
    };
    match take_turns(guest, &delivery, &long_runs, &CancellationToken::new()).await {
        Ended::Returned(answer) => answer.is_err() && delivery.stopped().is_some(),
        Ended::Stopped(_) => true,
        Ended::Panicked(_) => false,
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_built_in_loop_is_what_its_comment_says() {
        let text = r#"(module (func (export "spin") (loop (br 0))))"#;
        assert_eq!(super::SPIN, wat::parse_str(text).expect("valid WAT"));
    }
}
