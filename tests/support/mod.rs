//! What every behaviour test stands on: one throw-away Postgres a run, a private database a test, the real program.

mod cluster;

mod database;

pub mod engine;

pub mod guest;

pub mod handlers;

pub mod hosts;

pub mod http_server;

pub mod keyed;

pub mod log_lines;

mod logs;

pub mod own_postgres;

mod program;

pub mod proxy;

pub mod verbs;

mod wait;

pub use cluster::{cluster, scratch_folder};
pub use database::{TestDatabase, database, empty_database};
pub use program::{PATIENCE, Program, is_alive};
pub use wait::wait_for;

/// What the log may tell where hosts die and freeze, and the machine is busy. The driver warns of a rollback after a commit
/// whose answer nobody waited for, and of a connection that took long.
pub const HOSTS_COME_AND_GO: [&str; 4] = [
    "lost the lease",
    "stopped while it still held work",
    "there is no transaction in progress",
    "time to acquire exceeded slow threshold",
];
