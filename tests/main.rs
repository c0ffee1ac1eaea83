//! Every behaviour test of the host, in one binary, so that wasmtime is linked once. One file per behaviour.

mod support;

mod deploy;
mod sandbox;
mod sandbox_load;
mod sandbox_output;
