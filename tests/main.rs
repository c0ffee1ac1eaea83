//! The behaviour tests: one program, so that wasmtime is linked once; one file for each behaviour.

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
