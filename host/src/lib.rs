//! Millstream: message consumers as WebAssembly components over ordinary Postgres.
//!
//! A program that only produces takes this crate with `default-features = false, features = ["client"]` and uses
//! [`client`]; the feature `host`, which is the default, brings everything else and the `millstream` program.

// Without the host these parts are there for the client alone, and are not for others to use.
#[cfg_attr(not(feature = "host"), doc(hidden))]
pub mod handler;

#[cfg(feature = "host")]
pub mod config;

#[cfg_attr(not(feature = "host"), doc(hidden))]
pub mod database;

#[cfg_attr(not(feature = "host"), doc(hidden))]
pub mod engine;

#[cfg(feature = "client")]
pub mod client;

#[cfg(feature = "host")]
pub mod sandbox;

#[cfg(feature = "host")]
pub mod deploy;

#[cfg(feature = "host")]
pub mod consumer;

#[cfg(feature = "host")]
pub mod cli;
