//! Brings a database to the schema this program needs, one file of `host/migrations` after the other.
//!
//! sqlx has a migrator of its own, but it can neither put the schema into the files nor keep its table there.
//!
//! Ten processes may start at once on an empty database: each step takes the same advisory lock, looks at what is
//! applied only then, and commits its file together with the row that says so.

use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail, ensure};
use sha2::{Digest, Sha256};
use sqlx::{PgConnection, PgPool, Row, postgres::PgDatabaseError};

use super::Database;

/// One file of `host/migrations`.
#[derive(Clone, Copy, Debug)]
pub struct Migration {
    /// Rising by one, from 1.
    pub version: i32,
    pub name: &'static str,
    /// Several statements; may name `{schema}` and `{lock_class}`.
    pub sql: &'static str,
}

/// Every migration, oldest first. Append-only once released: the checksum of an applied one is compared.
pub const MIGRATIONS: &[Migration] =
    &[Migration { version: 1, name: "tables", sql: include_str!("../../migrations/0001_tables.sql") }];

/// How often a migration that found a table locked is tried. With [`LOCK_TIMEOUT`] this waits a quarter of a minute in
/// all, and in between the statements that queued behind it get their turn.
const TRIES: u32 = 5;

/// As `set local lock_timeout` of `begin_step.sql` has it.
const LOCK_TIMEOUT: Duration = Duration::from_secs(2);

/// Applies what is missing and returns how many that were.
///
/// Fails when a newer program has migrated the database further, when an applied file has changed, when privileges are
/// missing, and when a table stays locked (naming who holds it).
pub async fn migrate(database: &Database) -> Result<usize> {
    apply(database, MIGRATIONS).await
}

/// [`migrate`] with other files.
pub async fn apply(database: &Database, migrations: &[Migration]) -> Result<usize> {
    let numbered = migrations.iter().zip(1..).all(|(migration, number)| migration.version == number);
    assert!(numbered, "migrations are numbered from 1 without a gap");
    prepare(database).await.with_context(|| format!("prepare schema {}", database.schema.quoted()))?;
    let mut count = 0;
    for migration in migrations {
        let applied = step_with_retries(database, migrations, migration).await;
        let applied =
            applied.with_context(|| format!("migrate {database} to {:04}_{}", migration.version, migration.name))?;
        count += usize::from(applied == Step::Applied);
    }
    verify(&applied(&database.pool, database).await?, migrations)?;
    Ok(count)
}

/// How many migrations are missing. Reads only; fails as [`migrate`] does for what it cannot go on from.
pub async fn pending(database: &Database) -> Result<usize> {
    let mut tx = database.begin().await.context("begin")?;
    if !exists(&mut tx, database, include_str!("sql/migration_table_exists.sql")).await? {
        return Ok(MIGRATIONS.len());
    }
    let applied = applied(&mut *tx, database).await?;
    verify(&applied, MIGRATIONS)?;
    Ok(MIGRATIONS.len() - applied.len())
}

/// What our role may do, and what its name does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rights {
    /// It can make the schema, or tables in it.
    pub may_create: bool,
    /// It is called like the schema: what its other sessions create without naming a schema lands among our tables.
    pub is_namesake: bool,
}

/// Reads only.
pub async fn rights(database: &Database) -> Result<Rights> {
    let query = database.query(include_str!("sql/rights.sql")).bind(database.schema.name());
    let rows = database.fetch_all(query).await.context("look what the role may do")?;
    let row = rows.first().context("look what the role may do")?;
    Ok(Rights { may_create: row.try_get("may_create")?, is_namesake: row.try_get("is_namesake")? })
}

/// Makes the schema and the bookkeeping table. Asks first, so that a role that may not create anything can still run on
/// a database that is complete.
async fn prepare(database: &Database) -> Result<()> {
    let mut tx = database.begin().await.context("begin")?;
    if exists(&mut tx, database, include_str!("sql/migration_table_exists.sql")).await? {
        return Ok(());
    }
    let lock = database.schema.sql(include_str!("sql/lock_migrations.sql"));
    sqlx::raw_sql(lock).execute(&mut *tx).await.context("take the migration lock")?;
    let mut create = include_str!("sql/create_schema.sql").to_owned();
    // Making a schema needs a privilege even when it is already there, so `if not exists` is not enough.
    if exists(&mut tx, database, include_str!("sql/schema_exists.sql")).await? {
        create.clear();
    }
    create.push_str(include_str!("sql/create_migration_table.sql"));
    match sqlx::raw_sql(database.schema.sql(&create)).execute(&mut *tx).await {
        Ok(_) => tx.commit().await.context("commit"),
        Err(error) if is_sqlstate(&error, "42501") => bail!(
            "{}; as a superuser run `create schema {schema} authorization {user}`, or `grant create on database {name} \
             to {user}`",
            super::told(&error),
            schema = database.schema.quoted(),
            user = database.connect.options.get_username(),
            name = database.connect.options.get_database().unwrap_or("...")
        ),
        Err(error) => Err(error).context("create it and its migration table"),
    }
}

async fn exists(connection: &mut PgConnection, database: &Database, question: &str) -> Result<bool> {
    let statement = database.query(question).bind(database.schema.name());
    Ok(statement.fetch_optional(connection).await.context("look at the catalog")?.is_some())
}

#[derive(Debug, PartialEq, Eq)]
enum Step {
    Applied,
    /// Another process, or an earlier start.
    AlreadyApplied,
    /// A table was locked for longer than [`LOCK_TIMEOUT`]; the text says by whom.
    Locked(String),
}

async fn step_with_retries(database: &Database, all: &[Migration], migration: &Migration) -> Result<Step> {
    let mut blockers = String::new();
    for attempt in 0..TRIES {
        match step(database, all, migration).await? {
            Step::Locked(by) => blockers = by,
            done => return Ok(done),
        }
        tokio::time::sleep(Duration::from_millis(100 << attempt)).await;
    }
    bail!("a table it changes stays locked by {blockers}; end that transaction and start again")
}

/// One migration in one transaction.
async fn step(database: &Database, all: &[Migration], migration: &Migration) -> Result<Step> {
    let mut tx = database.begin().await.context("begin")?;
    if let Err(error) = sqlx::raw_sql(database.schema.sql(include_str!("sql/begin_step.sql"))).execute(&mut *tx).await {
        ensure!(is_sqlstate(&error, "55P03"), anyhow!(error).context("take the migration lock"));
        return Ok(Step::Locked("another process that is migrating".to_owned()));
    }
    let applied = applied(&mut *tx, database).await?;
    verify(&applied, all)?;
    if applied.iter().any(|applied| applied.version == migration.version) {
        return Ok(Step::AlreadyApplied);
    }
    let pid: i32 = sqlx::query_scalar("select pg_backend_pid()").persistent(false).fetch_one(&mut *tx).await?;
    if let Err((error, blockers)) = run_watched(database, &mut tx, migration, pid).await {
        ensure!(is_sqlstate(&error, "55P03"), locate(error, migration));
        return Ok(Step::Locked(blockers));
    }
    let record = database.query(include_str!("sql/record_migration.sql"));
    let record = record.bind(migration.version).bind(migration.name).bind(checksum(migration.sql));
    record.execute(&mut *tx).await.context("record it")?;
    tx.commit().await.context("commit")?;
    tracing::info!(version = migration.version, name = migration.name, "migrated");
    Ok(Step::Applied)
}

/// Runs the file; shortly before it would give up waiting for a lock, asks on another connection who holds it.
async fn run_watched(
    database: &Database,
    connection: &mut PgConnection,
    migration: &Migration,
    pid: i32,
) -> Result<(), (sqlx::Error, String)> {
    let mut run = std::pin::pin!(sqlx::raw_sql(database.schema.sql(migration.sql)).execute(connection));
    let mut blockers = "a transaction that has just ended".to_owned();
    let error = loop {
        tokio::select! {
            result = &mut run => match result {
                Ok(_) => return Ok(()),
                Err(error) => break error,
            },
            () = tokio::time::sleep(LOCK_TIMEOUT * 4 / 5) => {}
        }
        if let Ok(Some(found)) = blocking(&database.pool, pid).await {
            blockers = found;
        }
    };
    Err((error, blockers))
}

async fn blocking(pool: &PgPool, pid: i32) -> Result<Option<String>, sqlx::Error> {
    let statement = sqlx::query_scalar(include_str!("sql/blocking_processes.sql")).persistent(false);
    statement.bind(pid).fetch_one(pool).await
}

struct Applied {
    version: i32,
    name: String,
    checksum: String,
}

async fn applied(executor: impl sqlx::PgExecutor<'_>, database: &Database) -> Result<Vec<Applied>> {
    let statement = database.schema.sql(include_str!("sql/applied_migrations.sql"));
    // One simple-protocol message, so that it works outside a transaction behind a pooler as well.
    let rows = sqlx::raw_sql(statement).fetch_all(executor).await.context("read which migrations are applied")?;
    let read = |row: &sqlx::postgres::PgRow| {
        Ok(Applied { version: row.try_get(0)?, name: row.try_get(1)?, checksum: row.try_get(2)? })
    };
    rows.iter().map(read).collect()
}

/// What is applied must be what we know: nothing newer, nothing changed since.
fn verify(applied: &[Applied], known: &[Migration]) -> Result<()> {
    for row in applied {
        let Some(migration) = known.iter().find(|known| known.version == row.version) else {
            bail!(
                "the database is at migration {:04}_{}, and this millstream {} knows only {:04}; upgrade millstream",
                row.version,
                row.name,
                env!("CARGO_PKG_VERSION"),
                known.len()
            );
        };
        ensure!(
            row.checksum == checksum(migration.sql),
            "migration {:04}_{} was applied in another form than this millstream has; use the version of millstream that \
             applied it, or a later one",
            row.version,
            row.name
        );
    }
    Ok(())
}

fn checksum(sql: &str) -> String {
    Sha256::digest(sql).iter().map(|byte| format!("{byte:02x}")).collect()
}

fn is_sqlstate(error: &sqlx::Error, sqlstate: &str) -> bool {
    error.as_database_error().and_then(|error| error.code()).is_some_and(|code| code == sqlstate)
}

/// Says where in the file Postgres stopped. The line is right as far as names put into the file have no line breaks.
fn locate(error: sqlx::Error, migration: &Migration) -> anyhow::Error {
    use sqlx::postgres::PgErrorPosition::{Internal, Original};
    let details = error.as_database_error().and_then(|error| error.try_downcast_ref::<PgDatabaseError>());
    let place = details.and_then(|details| match details.position()? {
        Original(characters) => Some(format!("line {}", line_of(migration.sql, characters))),
        Internal { position, query } => Some(format!("line {} of the function body", line_of(query, position))),
    });
    match place {
        Some(place) => anyhow!(error).context(place),
        None => error.into(),
    }
}

fn line_of(text: &str, characters: usize) -> usize {
    1 + text.chars().take(characters.saturating_sub(1)).filter(|character| *character == '\n').count()
}
