//! What every behaviour test stands on: one throw-away Postgres a run, a private database a test, the real program.

mod cluster;

mod database;

pub mod engine;

pub mod guest;

pub mod handlers;

pub mod hosts;

pub mod keyed;

pub mod log_lines;

mod logs;

mod program;

pub mod verbs;

mod wait;

pub use cluster::{cluster, scratch_folder};
pub use database::{TestDatabase, database, empty_database};
pub use program::{PATIENCE, Program, is_alive};
pub use wait::wait_for;
