//! The other imports of the contract, and the linker that offers them all. Every handler gets the same ones: what it
//! has no grant for answers `denied`.

use wasmtime::{
    Engine, Result,
    component::{HasSelf, Linker},
};
use wasmtime_wasi_config::{WasiConfig, WasiConfigVariables};

use super::{
    bindings::{Linked, millstream::handler::types, wasi::logging::logging},
    calls,
    output::{Failing, Level},
    state::State,
};

/// The interfaces a handler may import, without their versions; for errors that name what is missing.
pub const OFFERED: &[&str] = &[
    "millstream:handler/types",
    "millstream:handler/outbox",
    "millstream:handler/database",
    "wasi:logging/logging",
    "wasi:config/store",
    "wasi:cli/environment",
    "wasi:cli/exit",
    "wasi:cli/stdin",
    "wasi:cli/stdout",
    "wasi:cli/stderr",
    "wasi:cli/terminal-input",
    "wasi:cli/terminal-output",
    "wasi:cli/terminal-stdin",
    "wasi:cli/terminal-stdout",
    "wasi:cli/terminal-stderr",
    "wasi:clocks/monotonic-clock",
    "wasi:clocks/wall-clock",
    "wasi:filesystem/preopens",
    "wasi:filesystem/types",
    "wasi:http/outgoing-handler",
    "wasi:http/types",
    "wasi:io/error",
    "wasi:io/poll",
    "wasi:io/streams",
    "wasi:random/insecure",
    "wasi:random/insecure-seed",
    "wasi:random/random",
    "wasi:sockets/instance-network",
    "wasi:sockets/ip-name-lookup",
    "wasi:sockets/network",
    "wasi:sockets/tcp",
    "wasi:sockets/tcp-create-socket",
    "wasi:sockets/udp",
    "wasi:sockets/udp-create-socket",
];

/// One linker serves every component. The sockets are there because the standard libraries of some languages import
/// them; wasmtime denies every address and name unless told otherwise, and we never do.
pub fn linker(engine: &Engine) -> Result<Linker<State>> {
    let mut linker = Linker::new(engine);
    Linked::add_to_linker::<_, HasSelf<State>>(&mut linker, |state| state)?;
    wasmtime_wasi::p2::add_to_linker_async(&mut linker)?;
    calls::add_to_linker(&mut linker)?;
    wasmtime_wasi_config::add_to_linker(&mut linker, |state: &mut State| WasiConfig::from(state.variables()))?;
    Ok(linker)
}

impl State {
    /// The group's config and secrets as wasi:config sees them, made at the first look.
    fn variables(&mut self) -> &WasiConfigVariables {
        self.variables.get_or_insert_with(|| self.settings.variables())
    }
}

impl types::Host for State {}

impl logging::Host for State {
    fn log(&mut self, level: logging::Level, context: String, message: String) -> Result<()> {
        // ERROR is ours: a human must look. A handler's own errors are a warning to the host.
        let (level, failing) = match level {
            logging::Level::Trace | logging::Level::Debug => (Level::Debug, Failing::No),
            logging::Level::Info => (Level::Info, Failing::No),
            logging::Level::Warn => (Level::Warn, Failing::No),
            logging::Level::Error | logging::Level::Critical => (Level::Warn, Failing::Yes),
        };
        self.delivery.output().write_entry(level, failing, &context, &message);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use wasmtime::component::Component;

    use super::*;

    /// A component that imports one interface, in whichever version of it we offer.
    #[test]
    fn every_interface_that_is_said_to_be_offered_is() {
        let engine = super::super::engine::build(0).expect("an engine").engine;
        let linker = linker(&engine).expect("a linker");
        for name in OFFERED {
            let links = |version: &&str| {
                let text = format!(r#"(component (import "{name}@{version}" (instance)))"#);
                let component = Component::new(&engine, wat::parse_str(text).expect("valid WAT")).expect("a component");
                linker.instantiate_pre(&component).is_ok()
            };
            // An import without functions is met by anything; one that we do not know is not.
            let versions = ["0.1.0", "0.2.0", "0.2.0-rc.1", "0.1.0-draft"];
            assert!(versions.iter().any(links), "{name}");
        }
        let unknown = Component::new(
            &engine,
            wat::parse_str(r#"(component (import "a:b/c" (instance (export "f" (func)))))"#).expect("valid WAT"),
        );
        assert!(linker.instantiate_pre(&unknown.expect("a component")).is_err());
    }
}
