//! streams.toml: from text to validated types. Never touches a database, a network or a handler.

mod types;

pub use types::*;
