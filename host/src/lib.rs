//! Millstream: message consumers as WebAssembly components over ordinary Postgres.

pub mod handler;

pub mod config;

pub mod database;

pub mod engine;

pub mod sandbox;

pub mod deploy;

pub mod consumer;

pub mod cli;
