//! Installs the SQL functions. They are replaced as a whole when their text changes, unlike tables, which migrate.

use anyhow::{Context, Result, ensure};
use sha2::{Digest, Sha256};
use sqlx::PgConnection;

use super::StreamId;
use crate::database::Database;

/// Raised when a function's meaning changes, so that an older program does not put its own text back. A changed
/// signature also needs a migration that drops the old one.
const VERSION: i32 = 1;

const SHARED: &[&str] = &[
    include_str!("functions/shared.sql"),
    include_str!("functions/turn.sql"),
    include_str!("functions/dead.sql"),
    include_str!("functions/operate.sql"),
    include_str!("functions/maintain.sql"),
    include_str!("functions/guest_sql.sql"),
];

const STREAM: &[&str] = &[
    include_str!("functions/produce.sql"),
    include_str!("functions/log.sql"),
    include_str!("functions/keys.sql"),
    include_str!("functions/position.sql"),
    include_str!("functions/claim.sql"),
];

/// Installs what is missing or out of date. The caller holds the declaration lock.
///
/// Fails when a newer program has installed newer functions.
pub async fn install(database: &Database, tx: &mut PgConnection, streams: &[StreamId]) -> Result<()> {
    let shared = SHARED.iter().map(|part| database.schema.sql(part).0).collect::<String>();
    install_set(database, tx, "shared", shared).await?;
    for stream in streams {
        let text = STREAM.iter().map(|part| database.schema.stream_sql(part, stream.0).0).collect::<String>();
        install_set(database, tx, &format!("stream {stream}"), text).await?;
    }
    Ok(())
}

async fn install_set(database: &Database, tx: &mut PgConnection, name: &str, text: String) -> Result<()> {
    let checksum = format!("{:x}", Sha256::digest(text.as_bytes()));
    let installed: Option<(i32, String)> = sqlx::query_as(database.schema.sql(include_str!("function_set.sql")))
        .bind(name)
        .fetch_optional(&mut *tx)
        .await
        .context("read which functions are installed")?;
    if let Some((version, installed)) = installed {
        ensure!(
            version <= VERSION,
            "a newer millstream has installed its functions in this schema (version {version}, this program has \
             {VERSION}); start the newer program, or use another schema"
        );
        if version == VERSION && installed == checksum {
            return Ok(());
        }
    }
    sqlx::raw_sql(sqlx::AssertSqlSafe(text))
        .execute(&mut *tx)
        .await
        .with_context(|| format!("install the functions of {name}"))?;
    database
        .query(include_str!("function_set_put.sql"))
        .bind(name)
        .bind(VERSION)
        .bind(checksum)
        .execute(tx)
        .await
        .context("note which functions are installed")?;
    Ok(())
}
