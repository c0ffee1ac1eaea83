//! The pool, and what a Postgres must be before we use it. Runs no statement of the engine.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use anyhow::{Context, Result, anyhow, ensure};
use sqlx::{
    AssertSqlSafe, ConnectOptions, Connection, PgConnection, PgPool, Postgres, Row, Transaction,
    postgres::{PgArguments, PgConnectOptions, PgPoolOptions, PgRow},
    query::Query,
};

use super::{
    Schema,
    target::{Connect, Pooler},
};

/// The oldest major version of Postgres that our SQL is tested with.
pub const MAJOR_MIN: u32 = 14;

/// How long a connection may take to be made.
const CONNECT_MAX: Duration = Duration::from_secs(10);

/// How long to wait for a free connection. Longer than any turn, so that it fires only when the database is away.
const ACQUIRE_MAX: Duration = Duration::from_secs(15);

/// How long an attempt may take that only finds out why there is no connection.
#[cfg(feature = "host")]
const PROBE_MAX: Duration = Duration::from_secs(2);

/// How long a handler's SQL may wait for a connection, at most: longer than any delivery's timeout that waits at all.
#[cfg(feature = "host")]
const GUESTS_ACQUIRE_MAX: Duration = Duration::from_secs(3600);

/// What sessions of ours are called in `pg_stat_activity`; those of a host have a token and its name behind it.
const APPLICATION: &str = "millstream";

/// Longest name in Postgres, in bytes; a longer one would be cut and two schemas could become one.
const NAME_BYTES_MAX: usize = 63;

/// A Postgres that was checked, and its schema. Cloning shares the pool.
#[derive(Clone)]
pub struct Database {
    pub pool: PgPool,
    pub schema: Schema,
    /// How many statements of `.sql` files were made, for counting what a message costs.
    pub statements: Arc<AtomicU64>,
    pub(super) connect: Connect,
    /// Statements of `.sql` files are kept prepared by the connections.
    names_statements: bool,
    /// What stands in the names of its sessions, if it is a host's.
    sessions: Arc<str>,
}

impl Database {
    /// Connects and checks: version, encoding, not a standby. Does not migrate.
    ///
    /// Fails with one line that names host, database and user, never the password.
    pub async fn connect(connect: &Connect, max_connections: u32, schema: &str) -> Result<Self> {
        Self::open(tuned(&isolated(connect)), max_connections, schema).await
    }

    /// [`Database::connect`] for a pool whose transactions also run statements of others, which look for their tables
    /// in the search_path that their role has.
    #[cfg(feature = "client")]
    pub async fn connect_shared(connect: &Connect, max_connections: u32, schema: &str) -> Result<Self> {
        Self::open(tuned(connect), max_connections, schema).await
    }

    /// Somebody else's pool, unchecked and as it is. Connects to nothing.
    #[cfg(feature = "client")]
    pub fn from_pool(pool: PgPool, schema: &str) -> Result<Self> {
        check_schema_name(schema)?;
        let connect = Connect::direct((*pool.connect_options()).clone());
        Ok(Self {
            pool,
            schema: Schema::new(schema),
            statements: Arc::default(),
            connect,
            names_statements: true,
            sessions: "".into(),
        })
    }

    async fn open(connect: Connect, max_connections: u32, schema: &str) -> Result<Self> {
        check_schema_name(schema)?;
        let attempt = tokio::time::timeout(CONNECT_MAX, check(&connect.options)).await;
        attempt
            .unwrap_or_else(|_| Err(anyhow!("no answer within {} s", CONNECT_MAX.as_secs())))
            .with_context(|| format!("connect to Postgres at {connect}"))?;
        let pool = PgPoolOptions::new()
            .max_connections(max_connections)
            .acquire_timeout(ACQUIRE_MAX)
            // A dead connection shows at its first statement, which the caller repeats anyway; testing each one before
            // would cost a round trip a turn.
            .test_before_acquire(false)
            .connect_lazy_with(connect.options.clone());
        let names_statements = connect.pooler == Pooler::Absent;
        let schema = Schema::new(schema);
        Ok(Self { pool, schema, statements: Arc::default(), connect, names_statements, sessions: "".into() })
    }

    /// A statement of a `.sql` file about shared tables. Behind a pooler it is not kept prepared, so run it inside a
    /// transaction there: its parts could reach two servers.
    pub fn query(&self, text: &str) -> Query<'static, Postgres, PgArguments> {
        self.prepared(self.schema.sql(text))
    }

    /// A statement of a `.sql` file about one stream.
    pub fn stream_query(&self, text: &str, stream_id: i32) -> Query<'static, Postgres, PgArguments> {
        self.prepared(self.schema.stream_sql(text, stream_id))
    }

    /// Runs one statement by itself and returns its rows. Behind a pooler it gets a transaction of its own, so that its
    /// parts reach one server.
    pub async fn fetch_all(&self, query: Query<'_, Postgres, PgArguments>) -> Result<Vec<PgRow>, sqlx::Error> {
        if self.connect.pooler == Pooler::Absent {
            return query.fetch_all(&self.pool).await;
        }
        let mut tx = self.begin().await?;
        let rows = query.fetch_all(&mut *tx).await?;
        tx.commit().await?;
        Ok(rows)
    }

    /// Begins a transaction of ours, which Postgres ends with its session when nothing is asked of it for a minute: a program
    /// that is frozen in the middle of it must not keep its locks from all others. What a slow line takes to send a large
    /// statement counts too. Dropping the future is safe.
    pub async fn begin(&self) -> Result<Transaction<'static, Postgres>, sqlx::Error> {
        self.begin_with("begin; set local idle_in_transaction_session_timeout = '1min'").await
    }

    /// The same with a `begin` statement of its own.
    ///
    /// In a task, which the drop of this future does not end: sqlx forgets a BEGIN whose answer nobody waited for, and gives
    /// the connection back to the pool with the transaction open. Whatever ran on it next would neither commit nor let its
    /// locks go. The task ends with the answer, or with the connection.
    pub async fn begin_with(&self, statement: &'static str) -> Result<Transaction<'static, Postgres>, sqlx::Error> {
        let pool = self.pool.clone();
        let begun = tokio::spawn(async move { pool.begin_with(statement).await }).await;
        begun.unwrap_or_else(|error| Err(sqlx::Error::Io(std::io::Error::other(error))))
    }

    fn prepared(&self, sql: AssertSqlSafe<String>) -> Query<'static, Postgres, PgArguments> {
        self.statements.fetch_add(1, Relaxed);
        sqlx::query(sql).persistent(self.names_statements)
    }

    /// The same database through a pool of its own, which belongs to the runtime that first uses it.
    pub fn with_own_pool(&self, max_connections: u32) -> Self {
        let pool = PgPoolOptions::new()
            .max_connections(max_connections)
            .acquire_timeout(ACQUIRE_MAX)
            .test_before_acquire(false)
            .connect_lazy_with(self.connect.options.clone());
        Self { pool, ..self.clone() }
    }

    /// The same database through a pool of as many connections, whose sessions say which process they belong to: by a token,
    /// since people's names are cut at 63 bytes, changed where they are not ASCII, and given twice. If it is frozen, others find
    /// its sessions by that and end them (`engine::frozen`).
    #[cfg(feature = "host")]
    pub fn of_host(&self, name: &str) -> Self {
        let sessions = format!("{:016x}", fastrand::u64(..));
        let options = self.connect.options.clone().application_name(&format!("{APPLICATION} {sessions} {name}"));
        let connect = Connect { options, pooler: self.connect.pooler };
        let named = Self { connect, sessions: sessions.into(), ..self.clone() };
        named.with_own_pool(self.pool.options().get_max_connections())
    }

    /// The token in the names of a host's sessions; empty for what is no host.
    pub fn sessions(&self) -> &str {
        &self.sessions
    }

    /// The same database for the SQL of handlers, over at most as many connections again as the pool has. No statement
    /// on them has a name: a guest can close a named statement and prepare one of its own under that name, which we would
    /// then run. Each is as new when it comes back: rolled back, and without anything a guest left in its session; only
    /// plans stay, as in any pool.
    #[cfg(feature = "host")]
    pub fn for_guests(&self) -> Self {
        let connect =
            Connect { options: self.connect.options.clone().statement_cache_capacity(0), pooler: self.connect.pooler };
        let pool = PgPoolOptions::new()
            .max_connections(self.pool.options().get_max_connections())
            // Waiting for one is bounded by the delivery's own deadline.
            .acquire_timeout(GUESTS_ACQUIRE_MAX)
            .test_before_acquire(false)
            .after_release(|connection, _| Box::pin(clean(connection)))
            .connect_lazy_with(connect.options.clone());
        Self { pool, names_statements: false, connect, ..self.clone() }
    }

    /// Whether a session is ours from one transaction to the next.
    pub fn has_sessions(&self) -> bool {
        self.connect.pooler == Pooler::Absent
    }

    /// A connection outside the pool, for statements that no transaction may surround. Each waits for a lock for
    /// `lock_timeout` at most; behind a pooler, where a session keeps no setting, for as long as it takes.
    pub async fn connect_alone(&self, lock_timeout: Duration) -> Result<PgConnection, sqlx::Error> {
        let mut connection = self.connect.options.connect().await?;
        if self.connect.pooler == Pooler::Absent {
            let setting = format!("set lock_timeout = {}", lock_timeout.as_millis());
            sqlx::raw_sql(AssertSqlSafe(setting)).execute(&mut connection).await?;
        }
        Ok(connection)
    }

    /// Why it does not answer, as a connection attempt of its own finds out: the pool only says that time is up.
    #[cfg(feature = "host")]
    pub async fn why_away(&self) -> String {
        match tokio::time::timeout(PROBE_MAX, self.connect.options.connect()).await {
            Ok(Ok(connection)) => {
                drop(connection.close().await);
                "it was too slow".to_owned()
            }
            Ok(Err(error)) => super::told(&error),
            Err(_elapsed) => format!("no answer within {} s", PROBE_MAX.as_secs()),
        }
    }

    /// Waits until every connection is back and closed.
    pub async fn close(&self) {
        self.pool.close().await;
    }
}

impl fmt::Display for Database {
    /// Host, database, user and schema; never the password.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} schema {}", self.connect, self.schema.quoted())
    }
}

impl fmt::Debug for Database {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Database({self})")
    }
}

/// What every connection of ours has, whoever named the server.
fn tuned(connect: &Connect) -> Connect {
    // Statements hold no payload (parameters only), but a slow one would be logged with its whole text at WARN.
    let options = connect.options.clone().application_name(APPLICATION).disable_statement_logging();
    if connect.pooler == Pooler::Transaction {
        // A pooler refuses startup parameters it does not know, and a named statement may meet a server without it.
        let options = options.statement_cache_capacity(0).extra_float_digits(None);
        return Connect { options, pooler: connect.pooler };
    }
    let is_unix_socket = options.get_socket().is_some() || options.get_host().starts_with('/');
    let options = if is_unix_socket {
        options
    } else {
        // The server then drops the session of a host that vanished without a word, and with it the locks it held,
        // after some 25 s instead of hours.
        options.options([
            ("tcp_keepalives_idle", "10"),
            ("tcp_keepalives_interval", "5"),
            ("tcp_keepalives_count", "3"),
            ("tcp_user_timeout", "20000"),
        ])
    };
    Connect { options, pooler: connect.pooler }
}

/// Our own names have their schema. Those of Postgres are looked for nowhere else, so that nobody who may create functions
/// in `public` can put a better match before them, which would then run with our rights. Not behind a pooler, which refuses
/// startup parameters.
fn isolated(connect: &Connect) -> Connect {
    let options = connect.options.clone();
    let options = match connect.pooler {
        Pooler::Absent => options.options([("search_path", "pg_catalog")]),
        Pooler::Transaction => options,
    };
    Connect { options, pooler: connect.pooler }
}

/// Ends a transaction that is open, if one is (BEGIN, since ROLLBACK alone would be a warning where none is). Then DISCARD
/// ALL, but for the plans: Postgres makes them anew when what they rest on changes, and a guest cannot change what our
/// functions are. To make all of a settle's in every delivery took a quarter of its time.
#[cfg(feature = "host")]
const CLEAN: &str = "set client_min_messages = error; begin; rollback; close all; set session authorization default; reset all; deallocate all; unlisten *; \
    select pg_catalog.pg_advisory_unlock_all(); discard sequences; discard temp";

/// Ends the transaction that a handler left open, and forgets all that is in the session.
#[cfg(feature = "host")]
async fn clean(connection: &mut PgConnection) -> Result<bool, sqlx::Error> {
    // Refused inside a transaction that has failed.
    if sqlx::raw_sql(CLEAN).execute(&mut *connection).await.is_err() {
        sqlx::raw_sql("rollback").execute(&mut *connection).await?;
        sqlx::raw_sql(CLEAN).execute(connection).await?;
    }
    Ok(true)
}

async fn check(options: &PgConnectOptions) -> Result<()> {
    let mut connection = options.connect().await.map_err(explain)?;
    // One simple-protocol message: behind a pooler the parts of a prepared one could reach two servers.
    let row = sqlx::raw_sql(include_str!("sql/check_server.sql")).fetch_one(&mut connection).await?;
    let (version, encoding, standby) = (row.try_get(0)?, row.try_get::<String, _>(1)?, row.try_get(2)?);
    judge(version, &encoding, standby)?;
    connection.close().await.context("close the connection")
}

/// `version` as Postgres counts it: 150008 is 15.8.
fn judge(version: i32, encoding: &str, standby: bool) -> Result<()> {
    let (major, oldest) = (version / 10_000, MAJOR_MIN);
    ensure!(
        major >= oldest.cast_signed(),
        "it is Postgres {major}, and millstream needs {oldest} or newer; upgrade the server"
    );
    ensure!(
        encoding == "UTF8",
        "its encoding is {encoding}, and millstream needs UTF8; create the database with `encoding 'UTF8' template \
         template0`"
    );
    ensure!(!standby, "it is a standby, which cannot be written; name the primary");
    Ok(())
}

/// Adds what to do to the errors that people meet first.
fn explain(error: sqlx::Error) -> anyhow::Error {
    let text = error.to_string();
    if text.contains("unsupported startup parameter") {
        return anyhow!("{text}; this looks like a pooler: add `?pgbouncer=true` to the URL");
    }
    match error.as_database_error() {
        // Its message only: the driver's own text repeats it, with a line of the server's source.
        Some(error) => anyhow!("{}", error.message().to_owned()),
        None => error.into(),
    }
}

fn check_schema_name(name: &str) -> Result<()> {
    ensure!(
        (1..=NAME_BYTES_MAX).contains(&name.len()) && !name.contains('\0'),
        "the schema's name must have 1 to {NAME_BYTES_MAX} bytes and no NUL"
    );
    // Function bodies are quoted with dollars, and the name stands inside them.
    ensure!(!name.contains('$'), "the schema's name must not contain `$`");
    ensure!(!name.starts_with("pg_"), "the schema's name must not start with `pg_`, which Postgres keeps for itself");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_that_cannot_be_used_is_refused_with_what_to_do() {
        let refused = |version, encoding, standby| judge(version, encoding, standby).map_err(|error| error.to_string());
        assert_eq!(refused(140_000, "UTF8", false), Ok(()));
        for (result, part) in [
            (refused(130_014, "UTF8", false), "it is Postgres 13, and millstream needs 14"),
            (refused(170_002, "LATIN1", false), "encoding 'UTF8'"),
            (refused(170_002, "UTF8", true), "name the primary"),
        ] {
            let error = result.expect_err(part);
            assert!(error.contains(part), "{error}");
        }
    }
}
