//! What a bare Postgres does with the same rows: the floors that `millstream bench` measures beside us. Used by nothing
//! else.

use sqlx::Row;

use super::StreamId;
use crate::database::Database;

/// Makes the bare table.
pub async fn create(database: &Database) -> Result<(), sqlx::Error> {
    sqlx::raw_sql(database.schema.sql(include_str!("create.sql"))).execute(&database.pool).await.map(drop)
}

/// Inserts a batch and commits.
pub async fn insert(database: &Database, payloads: &[Vec<u8>]) -> Result<(), sqlx::Error> {
    database.fetch_all(database.query(include_str!("insert.sql")).bind(payloads)).await.map(drop)
}

/// Reads a log from its beginning to its end, 250 rows at a time, and returns how many messages it had.
pub async fn read(database: &Database, stream: StreamId) -> Result<u64, sqlx::Error> {
    let (mut cursor, mut count) = (0_i64, 0);
    loop {
        let query = database.stream_query(include_str!("select.sql"), stream.0).bind(cursor);
        let rows = database.fetch_all(query).await?;
        let Some(last) = rows.last() else { return Ok(count) };
        cursor = last.try_get(0)?;
        for row in &rows {
            let payload: Option<Vec<u8>> = row.try_get(2)?;
            let _key: Option<String> = row.try_get(1)?;
            count += u64::from(payload.is_some());
        }
    }
}

/// Bytes of WAL that the cluster has written so far.
pub async fn wal_bytes(database: &Database) -> Result<i64, sqlx::Error> {
    database.fetch_all(database.query(include_str!("wal.sql"))).await?[0].try_get(0)
}

/// Makes the role that the bench's deliveries run SQL as, with the name of the schema, and the table `effect` for it.
pub async fn create_role(database: &Database) -> Result<(), sqlx::Error> {
    sqlx::raw_sql(database.schema.sql(include_str!("create_role.sql"))).execute(&database.pool).await.map(drop)
}

/// Removes that role. Groups must not run SQL as it any more.
pub async fn drop_role(database: &Database) -> Result<(), sqlx::Error> {
    sqlx::raw_sql(database.schema.sql(include_str!("drop_role.sql"))).execute(&database.pool).await.map(drop)
}

/// Removes the schema of the bench.
pub async fn drop_schema(database: &Database) -> Result<(), sqlx::Error> {
    sqlx::raw_sql(database.schema.sql(include_str!("drop.sql"))).execute(&database.pool).await.map(drop)
}
