//! Every behaviour test of the host, in one binary, so that wasmtime is linked once. One file per behaviour.

#![expect(clippy::unwrap_used, reason = "a test ends where something is not as it must be")]

mod support;

mod deploy;
mod sandbox;
mod sandbox_load;
mod sandbox_output;
