//! The behaviour tests: one program, so that wasmtime is linked once; one file for each behaviour.

#![expect(clippy::unwrap_used, reason = "in a test a panic is the report")]

mod support;

mod cli;

mod tidy;

mod config;

mod database;

mod embedded_postgres;

mod program;

mod sandbox;

mod sandbox_load;

mod sandbox_output;

mod consume;
