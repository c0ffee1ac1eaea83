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
mod told;

#[cfg(feature = "host")]
pub mod embedded;

pub use connect::{Database, MAJOR_MIN};
#[cfg(feature = "host")]
pub use listen::{Wake, listen};
#[cfg(feature = "host")]
pub use migrate::{MIGRATIONS, Migration, Rights, apply, migrate, pending, rights};
pub use reaction::{Reaction, Refusal, is_ambiguous_commit, reaction};
pub use sql::Schema;
pub use sqlx::Error as DatabaseError;
pub use target::{Connect, Pooler, Sources, Target};
#[cfg(feature = "host")]
pub use told::told;

/// What the pool finds odd (a lost connection, a slow one) is told once by who needs it, with what follows from it.
pub const QUIET_POOL: &str = "sqlx_core::pool=error,sqlx::pool=error";

/// The log target of notices that Postgres sends.
pub const NOTICES: &str = "sqlx::postgres::notice";
