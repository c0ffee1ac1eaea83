//! SQL in the delivery's own transaction: committed with the acknowledgement, or undone with it.
//!
//! The group needs `allow = { sql = { role = "..." } }` in streams.toml; the statements run as that role. There is nothing to
//! commit: when the handler answers `done`, its SQL, the messages it produced and the acknowledgement are one COMMIT, and
//! on a failure, a panic, a timeout or a lost host none of them exists. A statement that fails undoes only itself.
//!
//! ```
//! use millstream_guest::{Context, NewMessage, sql};
//! use serde::Deserialize;
//!
//! #[derive(Deserialize)]
//! struct Order { id: String, cents: i64 }
//!
//! #[derive(Deserialize)]
//! struct Account { owner: String, balance: i64 }
//!
//! #[millstream_guest::handler]
//! fn handle(order: Order, ctx: Context) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
//!     let paid = sql::execute("insert into payment (order_id, cents) values ($1, $2)", (&order.id, order.cents));
//!     match paid {
//!         Err(error) if error.constraint() == Some("payment_pkey") => return Ok(()), // paid already
//!         paid => paid?,
//!     };
//!     let accounts: Vec<Account> = sql::query("select owner, balance from account where id = $1", ("shop",))?;
//!     let Some(account) = accounts.first() else { return Err("no account".into()) };
//!     ctx.produce("receipts", NewMessage::bytes(format!("{}: {}", account.owner, account.balance)))?;
//!     Ok(())
//! }
//! # use millstream_guest::{Outcome, testing::{Answer, TestMessage, deliver}};
//! # let message = TestMessage::text(r#"{"id": "o-1", "cents": 5}"#).sql(|statement, _| Ok(match &statement[..6] {
//! #     "insert" => Answer::count(1),
//! #     _ => Answer::rows(["owner", "balance"], [["Ada".into(), 7.into()]]),
//! # }));
//! # let delivered = deliver(handle, message);
//! # assert_eq!(delivered.outcome, Outcome::Done);
//! # assert_eq!(delivered.produced[0].message.payload.as_deref(), Some(&b"Ada: 7"[..]));
//! ```
//!
//! One statement at a time: `select`, `insert`, `update`, `delete`, `merge` or `values`. A parameter takes the type that its
//! place wants (`where id = $1`: that of `id`); where its place does not say, that of its value.

mod row;

use std::{error::Error, fmt};

use serde::de::DeserializeOwned;

use crate::boundary;

/// Runs one statement and returns its rows.
///
/// A row becomes a struct by the names of its columns, a tuple by their order, or a plain value when it has one column. Rows
/// are bounded by the host: 10,000 of them, and 4 MiB.
///
/// # Errors
/// When Postgres refuses the statement, when there is no time left, and when a row does not fit the type. The transaction
/// goes on as if the statement had never been.
pub fn query<T: DeserializeOwned>(statement: &str, params: impl Params) -> Result<Vec<T>, SqlError> {
    let rows = boundary::query(statement, params.into_values())?;
    rows.values.into_iter().map(|row| row::read(&rows.columns, row)).collect()
}

/// Runs one statement and returns how many rows it touched.
///
/// # Errors
/// As for [`query`].
pub fn execute(statement: &str, params: impl Params) -> Result<u64, SqlError> {
    boundary::execute(statement, params.into_values())
}

/// A value of a parameter or a column.
///
/// ```
/// use millstream_guest::sql::Value;
/// assert_eq!(Value::from(7), Value::Int64(7));
/// assert_eq!(Value::from(None::<&str>), Value::Null);
/// ```
#[derive(Clone, PartialEq)]
pub enum Value {
    /// No value.
    Null,
    /// `boolean`.
    Boolean(bool),
    /// `bigint`, and the smaller ones.
    Int64(i64),
    /// `double precision`.
    Float64(f64),
    /// `numeric`, as decimal digits.
    Numeric(String),
    /// `text`, and every type without a kind of its own.
    Text(String),
    /// `bytea`.
    Bytes(Vec<u8>),
    /// `jsonb`, as JSON text; arrays come like this as well.
    Json(String),
    /// `timestamptz`, as RFC 3339.
    Timestamp(String),
    /// `uuid`.
    Uuid(String),
}

impl fmt::Debug for Value {
    /// Never prints the value: log lines outlive it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Null => "Null",
            Self::Boolean(_) => "Boolean",
            Self::Int64(_) => "Int64",
            Self::Float64(_) => "Float64",
            Self::Numeric(_) => "Numeric",
            Self::Text(_) => "Text",
            Self::Bytes(_) => "Bytes",
            Self::Json(_) => "Json",
            Self::Timestamp(_) => "Timestamp",
            Self::Uuid(_) => "Uuid",
        })
    }
}

/// Rows as they come from the host.
#[derive(Clone, Debug, PartialEq)]
pub struct Rows {
    /// Names of the columns.
    pub columns: Vec<String>,
    /// A value a column, for each row.
    pub values: Vec<Vec<Value>>,
}

macro_rules! value_from {
    ($($from:ty => $kind:ident($value:ident) $into:expr;)*) => {
        $(impl From<$from> for Value {
            fn from($value: $from) -> Self {
                Self::$kind($into)
            }
        })*
    };
}

value_from! {
    bool => Boolean(value) value;
    i16 => Int64(value) value.into();
    i32 => Int64(value) value.into();
    i64 => Int64(value) value;
    u16 => Int64(value) value.into();
    u32 => Int64(value) value.into();
    f32 => Float64(value) value.into();
    f64 => Float64(value) value;
    String => Text(value) value;
    &String => Text(value) value.clone();
    &str => Text(value) value.to_owned();
    Vec<u8> => Bytes(value) value;
    &[u8] => Bytes(value) value.to_vec();
    serde_json::Value => Json(value) value.to_string();
    &serde_json::Value => Json(value) value.to_string();
}

impl<T: Into<Value>> From<Option<T>> for Value {
    fn from(value: Option<T>) -> Self {
        value.map_or(Self::Null, Into::into)
    }
}

/// The parameters `$1`, `$2`, ... of a statement: a tuple of up to twelve values, or a `Vec` of [`Value`].
///
/// ```
/// use millstream_guest::sql::{Params, Value};
/// assert_eq!(("a", 7).into_values(), [Value::from("a"), Value::from(7)]);
/// assert!(().into_values().is_empty());
/// ```
pub trait Params {
    /// The values in their order.
    fn into_values(self) -> Vec<Value>;
}

impl Params for () {
    fn into_values(self) -> Vec<Value> {
        Vec::new()
    }
}

impl Params for Vec<Value> {
    fn into_values(self) -> Vec<Value> {
        self
    }
}

macro_rules! params_of {
    ($($name:ident)+) => {
        impl<$($name: Into<Value>),+> Params for ($($name,)+) {
            fn into_values(self) -> Vec<Value> {
                #[expect(non_snake_case, reason = "the types' names serve as those of the values")]
                let ($($name,)+) = self;
                vec![$($name.into()),+]
            }
        }
    };
}

params_of!(A);
params_of!(A B);
params_of!(A B C);
params_of!(A B C D);
params_of!(A B C D E);
params_of!(A B C D E F);
params_of!(A B C D E F G);
params_of!(A B C D E F G H);
params_of!(A B C D E F G H I);
params_of!(A B C D E F G H I J);
params_of!(A B C D E F G H I J K);
params_of!(A B C D E F G H I J K L);

/// Why a statement has no answer.
///
/// ```
/// use millstream_guest::sql::SqlError;
/// let error = SqlError::Refused {
///     sqlstate: "23505".into(),
///     message: "duplicate key value".into(),
///     constraint: Some("payment_pkey".into()),
/// };
/// assert_eq!((error.sqlstate(), error.constraint()), (Some("23505"), Some("payment_pkey")));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SqlError {
    /// The group has no `allow.sql`.
    Denied,
    /// No time left.
    Timeout,
    /// More rows or bytes than one answer may hold.
    Limit {
        /// Which limit it is.
        reason: String,
    },
    /// Postgres refused the statement.
    Refused {
        /// What it is: `23505` is a unique violation.
        sqlstate: String,
        /// In Postgres's words.
        message: String,
        /// The violated constraint's name.
        constraint: Option<String>,
    },
    /// A row does not fit the type it was asked for as.
    Row {
        /// What does not fit.
        reason: String,
    },
}

impl SqlError {
    /// What Postgres says it is.
    pub fn sqlstate(&self) -> Option<&str> {
        match self {
            Self::Refused { sqlstate, .. } => Some(sqlstate),
            _ => None,
        }
    }

    /// The violated constraint's name.
    pub fn constraint(&self) -> Option<&str> {
        match self {
            Self::Refused { constraint, .. } => constraint.as_deref(),
            _ => None,
        }
    }
}

impl fmt::Display for SqlError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Denied => f.write_str(
                "the group is not granted SQL; add `sql = { role = \"...\" }` to its `allow` in streams.toml",
            ),
            Self::Timeout => f.write_str("no time left for the statement; raise the group's `timeout`"),
            Self::Limit { reason } => f.write_str(reason),
            Self::Refused { sqlstate, message, .. } => {
                write!(f, "Postgres refused the statement: {message} ({sqlstate})")
            }
            Self::Row { reason } => write!(f, "a row does not fit the type it is read as: {reason}"),
        }
    }
}

impl Error for SqlError {}
