//! Connections, migrations and the Postgres that the host owns. Knows nothing of streams, groups or messages.

mod sql;

pub use sql::Schema;
