//! Millstream: message consumers as WebAssembly components over ordinary Postgres.

pub mod handler;

pub mod config;

pub mod database;

pub mod sandbox;

pub mod deploy;
