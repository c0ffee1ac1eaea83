//! The open transaction of one delivery: a handler's statements, each in a savepoint, and its end.
//!
//! What Postgres runs at COMMIT (deferred triggers, the rest of cursors WITH HOLD) it runs as the session's user, which is
//! us, and what a guest leaves in the session (a search_path, a type named `text` in pg_temp, statements under our names)
//! our own statements would meet. So before the first of ours, [`OpenSql::finish`] leaves nothing of either.

use std::time::{Duration, Instant};

use sqlx::{AssertSqlSafe, Executor, PgConnection, Postgres, Row, SqlSafeStr, pool::PoolConnection};
use tokio::runtime::Handle;

use super::{
    GuestDatabase, GuestGrant, answer,
    cut::{Begun, Cut},
    literal,
    refusal::without_value,
};
use crate::{
    database::{Database, Reaction, is_ambiguous_commit, reaction},
    handler::{SqlAnswer, SqlError, SqlStatement, SqlValue, SqlWants},
};

/// Most rows and bytes of one answer: what fits into a handler's default memory several times, as text and as values.
const ROWS_MAX: i64 = 10_000;
const BYTES_MAX: i64 = 4 * 1024 * 1024;

/// The server ends a statement this much before the delivery ends, so that the handler hears of it and the connection
/// stays usable.
const TIMEOUT_MARGIN: Duration = Duration::from_millis(50);

/// The server ends a transaction that rests this much longer than its delivery may last: that of a host that was frozen,
/// whose locks would hold up whoever took the message over.
const IDLE_MARGIN: Duration = Duration::from_secs(2);

/// How long the checks and triggers that were put off to the end may take.
const FINISH_MAX: Duration = Duration::from_secs(30);

/// Begins a transaction, and says which it is. Without an operator: what a guest makes in `public` could be one that fits
/// better than Postgres's own, and would run with our rights.
const BEGIN: &str = "begin isolation level read committed read write; \
     select pg_catalog.pg_backend_pid(), extract(epoch from pg_catalog.now())::pg_catalog.text";

/// A connection in the middle of its first exchange: dropped now, it cannot be used again.
struct Busy(Option<PoolConnection<Postgres>>);

impl Drop for Busy {
    fn drop(&mut self) {
        if let Some(connection) = self.0.take() {
            drop(connection.detach());
        }
    }
}

/// A connection inside a transaction. Dropping it rolls back.
#[derive(Debug)]
pub struct Open {
    connection: Option<PoolConnection<Postgres>>,
    /// An exchange has begun and not ended: dropped now, the connection cannot be used again.
    is_busy: bool,
    /// What runs may be the guest's, and stay for ever: dropped now, its session is ended as well.
    runs_guest: bool,
    begun: Begun,
    cut: Cut,
    runtime: Handle,
    /// How many statements have been prepared; each has a name of its own.
    prepared: u32,
}

impl Drop for Open {
    fn drop(&mut self) {
        if let Some(connection) = self.connection.take_if(|_| self.is_busy) {
            drop(connection.detach());
            if self.runs_guest {
                self.cut.end(self.begun.clone(), &self.runtime);
            }
        }
    }
}

/// Why a statement failed.
enum Fault {
    Refused { sqlstate: String, message: String, constraint: Option<String> },
    Lost,
}

impl Open {
    pub async fn begin(guests: &GuestDatabase) -> Result<Self, sqlx::Error> {
        let mut connection = Busy(Some(guests.database.pool.acquire().await?));
        let rows = sqlx::raw_sql(BEGIN).fetch_all(&mut **connection.0.as_mut().expect("just put in")).await?;
        let row = rows.first().ok_or(sqlx::Error::RowNotFound)?;
        let begun = Begun { pid: row.try_get(0)?, at: row.try_get(1)? };
        Ok(Self {
            connection: connection.0.take(),
            is_busy: false,
            runs_guest: false,
            begun,
            cut: guests.cut.clone(),
            runtime: Handle::current(),
            prepared: 0,
        })
    }

    fn connection(&mut self) -> &mut PgConnection {
        self.connection.as_mut().expect("only taken out by a drop")
    }

    pub async fn run(&mut self, grant: &GuestGrant, statement: &SqlStatement) -> Result<SqlAnswer, SqlError> {
        if statement.text.contains('\0') || statement.params.iter().any(literal::has_nul) {
            let message = "text in Postgres holds no NUL; take it out, or pass bytes".to_owned();
            return Err(SqlError::Refused { sqlstate: "22021".to_owned(), message, constraint: None });
        }
        (self.is_busy, self.runs_guest) = (true, true);
        let answer = self.run_forms(grant, statement).await;
        self.is_busy = matches!(answer, Err(SqlError::Lost));
        self.runs_guest = self.is_busy;
        answer
    }

    /// Tries the forms in which the statement may be accepted. A refused one leaves no trace.
    async fn run_forms(&mut self, grant: &GuestGrant, statement: &SqlStatement) -> Result<SqlAnswer, SqlError> {
        let forms: &[Form] = match statement.wants {
            SqlWants::Rows => &[Form::Rows],
            SqlWants::Count => &[Form::Counted, Form::CountedRows],
        };
        let mut refused = None;
        'forms: for form in forms {
            for types in [Types::Inferred, Types::Declared] {
                match self.attempt(grant, statement, *form, types).await {
                    Ok(lines) => return answer::read(*form, lines),
                    Err(Fault::Lost) => return Err(SqlError::Lost),
                    Err(fault @ Fault::Refused { .. }) => {
                        let next = what_next(&fault, *form, types, statement);
                        refused = Some(explain(fault, *form, &statement.text));
                        match next {
                            Next::Types => {}
                            Next::Form => continue 'forms,
                            Next::Nothing => break 'forms,
                        }
                    }
                }
            }
        }
        Err(refused.expect("there is at least one form"))
    }

    async fn attempt(
        &mut self,
        grant: &GuestGrant,
        statement: &SqlStatement,
        form: Form,
        types: Types,
    ) -> Result<Vec<String>, Fault> {
        let left = statement.deadline.saturating_duration_since(Instant::now()).saturating_sub(TIMEOUT_MARGIN);
        if left < Duration::from_millis(1) {
            return Err(timed_out());
        }
        self.prepared += 1;
        let name = format!("millstream_{}", self.prepared);
        let body = format!("{} as\n{}", literal::types(&statement.params, types), form.text(&statement.text));
        let prepare = format!("prepare {name}{body}");
        let execute = format!("execute {name}{}", literal::list(&statement.params));
        let begin = format!(
            "savepoint millstream; set local statement_timeout = {}; set local idle_in_transaction_session_timeout = {}",
            left.as_millis(),
            (left + IDLE_MARGIN).as_millis()
        );
        self.simply(&begin).await.map_err(fault)?;
        let lines = async {
            self.check(grant, &body, &prepare).await?;
            self.step(grant, form.step(), Some((&prepare, &execute))).await
        };
        match lines.await {
            Ok(lines) => {
                self.simply("release savepoint millstream").await.map_err(fault)?;
                Ok(lines)
            }
            Err(error) => {
                let fault = fault(error);
                if !matches!(fault, Fault::Lost) {
                    let undo = "rollback to savepoint millstream; release savepoint millstream";
                    self.simply(undo).await.map_err(|_| Fault::Lost)?;
                }
                Err(fault)
            }
        }
    }

    /// That it is one statement Postgres says when it parses it by the extended protocol. Nothing is analysed or run: to
    /// Postgres this is a PREPARE, and what is prepared is looked at when that runs, inside the function.
    async fn check(&mut self, grant: &GuestGrant, body: &str, prepare: &str) -> Result<(), sqlx::Error> {
        if !grant.guests.is_checked(body) {
            self.connection().prepare(AssertSqlSafe(prepare.to_owned()).into_sql_str()).await?;
            grant.guests.note_checked(body);
        }
        Ok(())
    }

    /// One call of the guest's function.
    async fn step(
        &mut self,
        grant: &GuestGrant,
        step: &str,
        statement: Option<(&str, &str)>,
    ) -> Result<Vec<String>, sqlx::Error> {
        let (prepare, execute) = statement.unzip();
        let call = format!("select line from {}($1, $2, $3, $4, $5) as line", grant.function);
        let query = sqlx::query_scalar(AssertSqlSafe(call)).persistent(false);
        query.bind(step).bind(prepare).bind(execute).bind(ROWS_MAX).bind(BYTES_MAX).fetch_all(self.connection()).await
    }

    /// Statements of ours without parameters.
    async fn simply(&mut self, sql: &str) -> Result<(), sqlx::Error> {
        sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).execute(self.connection()).await.map(drop)
    }
}

/// How a guest's statement is put to Postgres.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// As it is, for its rows.
    Rows,
    /// As part of one that counts what it touched.
    Counted,
    /// As it is, for the number of its rows: it returns some.
    CountedRows,
}

impl Form {
    fn text(self, text: &str) -> String {
        match self {
            Self::Rows | Self::CountedRows => text.to_owned(),
            Self::Counted => {
                let text = text.trim_end().trim_end_matches(';');
                format!(
                    "with millstream_rows as (\n{text}\nreturning 1) select pg_catalog.count(*) from millstream_rows"
                )
            }
        }
    }

    fn step(self) -> &'static str {
        match self {
            Self::Rows | Self::Counted => "rows",
            Self::CountedRows => "count",
        }
    }
}

/// Whether parameters have the type that their place wants, or that of the value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Types {
    Inferred,
    Declared,
}

enum Next {
    Types,
    Form,
    Nothing,
}

fn what_next(fault: &Fault, form: Form, types: Types, statement: &SqlStatement) -> Next {
    let Fault::Refused { sqlstate, .. } = fault else { return Next::Nothing };
    match &**sqlstate {
        // Indeterminate or mismatched types: the place of a parameter does not say what it wants.
        "42P18" | "42804" | "42725" if types == Types::Inferred && !statement.params.is_empty() => Next::Types,
        // A syntax error may come from what we put around it.
        "42601" if form == Form::Counted => Next::Form,
        _ => Next::Nothing,
    }
}

fn explain(fault: Fault, form: Form, statement: &str) -> SqlError {
    let Fault::Refused { sqlstate, message, constraint } = fault else { return SqlError::Lost };
    let message = without_value(&sqlstate, &message, statement);
    match &*sqlstate {
        "57014" => SqlError::Timeout,
        "MS013" => SqlError::Limit(format!(
            "one answer holds at most {ROWS_MAX} rows and {} MiB; ask for less, with `limit` or fewer columns",
            BYTES_MAX >> 20
        )),
        "42P11" => {
            let message = match form {
                Form::Rows => "the statement returns no rows; run it with `execute`",
                _ => "the statement neither returns rows nor can be counted (a MERGE can from Postgres 17 on)",
            };
            SqlError::Refused { sqlstate, message: message.to_owned(), constraint }
        }
        _ => SqlError::Refused { sqlstate, message, constraint },
    }
}

fn timed_out() -> Fault {
    Fault::Refused { sqlstate: "57014".to_owned(), message: String::new(), constraint: None }
}

fn fault(error: sqlx::Error) -> Fault {
    match error {
        sqlx::Error::Database(ref database) if !is_ambiguous_commit(&error) => {
            let sqlstate = database.code().unwrap_or_default().into_owned();
            let message = database.message().to_owned();
            Fault::Refused { sqlstate, message, constraint: database.constraint().map(str::to_owned) }
        }
        error => {
            tracing::debug!("lost the transaction of a handler: {error:#}");
            Fault::Lost
        }
    }
}

/// The transaction of a delivery that is done. Dropping it rolls it back.
#[derive(Debug)]
pub struct OpenSql {
    open: Open,
    grant: GuestGrant,
}

/// Why a transaction cannot be settled in.
#[derive(Debug)]
pub enum Unfinished {
    /// Something the handler left to the end was refused. Says what.
    Refused(String),
    Database(sqlx::Error),
}

impl OpenSql {
    pub(super) fn new(open: Open, grant: GuestGrant) -> Self {
        Self { open, grant }
    }

    pub(in crate::engine) fn database(&self) -> Database {
        self.grant.guests.database.clone()
    }

    /// Only for statements without names, and after [`OpenSql::finish`].
    pub(in crate::engine) fn connection(&mut self) -> &mut PgConnection {
        self.open.connection()
    }

    /// Runs what the handler has put off to the end, as the handler's role, and leaves nothing of the handler's in the
    /// session that our own statements, or the COMMIT, would meet.
    pub(in crate::engine) async fn finish(&mut self) -> Result<(), Unfinished> {
        (self.open.is_busy, self.open.runs_guest) = (true, true);
        let finished = self.run_deferred().await.map_err(unfinished);
        self.open.runs_guest = false; // what comes is ours, the COMMIT above all
        finished
    }

    async fn run_deferred(&mut self) -> Result<(), sqlx::Error> {
        let Self { open, grant } = self;
        let timeout = FINISH_MAX.as_millis();
        open.simply(&format!("set local statement_timeout = {timeout}; savepoint millstream")).await?;
        open.step(grant, "constraints", None).await?;
        // Such a trigger may put off others, without end. Once more then, where nothing can be written but temporary
        // tables: what they put off, `discard temp` refuses to drop, and the transaction fails. The end of the savepoint
        // ends the mode, which the guest cannot.
        let read_only = "release savepoint millstream; savepoint millstream; set local transaction_read_only = on";
        open.simply(read_only).await?;
        open.step(grant, "constraints", None).await?;
        open.simply(&format!(
            "release savepoint millstream; close all; discard temp; reset all; set local search_path = pg_catalog, pg_temp; \
             set local idle_in_transaction_session_timeout = {timeout}"
        ))
        .await
    }

    pub(in crate::engine) async fn commit(mut self) -> Result<(), sqlx::Error> {
        self.open.simply("commit").await?;
        self.open.is_busy = false;
        Ok(())
    }

    /// Nothing of it shall be; the connection is as good as before.
    pub(in crate::engine) fn roll_back(mut self) {
        self.open.is_busy = false;
    }
}

fn unfinished(error: sqlx::Error) -> Unfinished {
    let is_ours = is_ambiguous_commit(&error) || reaction(&error) == Reaction::Busy;
    match error.as_database_error() {
        Some(database) if !is_ours || database.code().as_deref() == Some("57014") => {
            Unfinished::Refused(without_value(&database.code().unwrap_or_default(), database.message(), ""))
        }
        _ => Unfinished::Database(error),
    }
}

/// The value's kind as a type of Postgres.
pub(super) fn type_name(value: &SqlValue) -> &'static str {
    match value {
        SqlValue::Null => "unknown",
        SqlValue::Boolean(_) => "pg_catalog.bool",
        SqlValue::Int64(_) => "pg_catalog.int8",
        SqlValue::Float64(_) => "pg_catalog.float8",
        SqlValue::Numeric(_) => "pg_catalog.numeric",
        SqlValue::Text(_) => "pg_catalog.text",
        SqlValue::Bytes(_) => "pg_catalog.bytea",
        SqlValue::Json(_) => "pg_catalog.jsonb",
        SqlValue::Timestamp(_) => "pg_catalog.timestamptz",
        SqlValue::Uuid(_) => "pg_catalog.uuid",
    }
}
