//! What every verb with a database does around its work: read streams.toml, open the database, close it again.

use anyhow::Result;

use super::{Global, open::open};
use crate::{config::Config, database::Database};

/// Runs `work`, and closes the database whatever came of it.
pub(super) async fn with_database<T>(
    global: &Global,
    work: impl AsyncFnOnce(&Database, &Config) -> Result<T>,
) -> Result<T> {
    let config = global.load_config()?;
    let opened = open(global, &config.database).await?;
    let done = work(&opened.database, &config).await;
    let closed = opened.close().await;
    done.and_then(|done| closed.map(|()| done))
}
