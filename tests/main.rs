//! The behaviour tests: one program, so that wasmtime is linked once; one file for each behaviour.

mod support;

mod database;

mod embedded_postgres;

mod program;

mod tidy;

mod config;
