//! Connections, migrations and the Postgres that the host owns. Knows nothing of streams, groups or messages.

mod sql;

mod target;

mod connect;

#[cfg(feature = "host")]
mod listen;

#[cfg(feature = "host")]
mod migrate;

mod reaction;

#[cfg(feature = "host")]
pub mod embedded;

pub use connect::{Database, MAJOR_MIN};
#[cfg(feature = "host")]
pub use listen::{Wake, listen};
#[cfg(feature = "host")]
pub use migrate::{MIGRATIONS, Migration, apply, migrate, pending};
pub use reaction::{Reaction, Refusal, is_ambiguous_commit, reaction};
pub use sql::Schema;
pub use sqlx::Error as DatabaseError;
pub use target::{Connect, Pooler, Sources, Target};

/// The log target of notices that Postgres sends.
pub const NOTICES: &str = "sqlx::postgres::notice";
