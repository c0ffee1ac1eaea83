//! The `database` import: SQL in the delivery's own transaction. Converts values and knows no SQL; what a guest may do is
//! decided behind the seam.

use std::{sync::Arc, time::Instant};

use wasmtime::Result;

use super::{
    bindings::millstream::handler::database::{Error, Host, Rows, SqlError as WitSqlError, Value},
    state::State,
};
use crate::handler::{Sql, SqlAnswer, SqlError, SqlRows, SqlStatement, SqlValue, SqlWants};

impl Host for State {
    async fn query(&mut self, statement: String, params: Vec<Value>) -> Result<std::result::Result<Rows, Error>> {
        let answer = run(self.sql.clone(), self.delivery.deadline(), statement, params, SqlWants::Rows).await;
        Ok(answer.and_then(|answer| match answer {
            SqlAnswer::Rows(rows) => Ok(to_wit(rows)),
            SqlAnswer::Count(_) => Err(mixed_up()),
        }))
    }

    async fn execute(&mut self, statement: String, params: Vec<Value>) -> Result<std::result::Result<u64, Error>> {
        let answer = run(self.sql.clone(), self.delivery.deadline(), statement, params, SqlWants::Count).await;
        Ok(answer.and_then(|answer| match answer {
            SqlAnswer::Count(count) => Ok(count),
            SqlAnswer::Rows(_) => Err(mixed_up()),
        }))
    }
}

async fn run(
    sql: Option<Arc<dyn Sql>>,
    deadline: Instant,
    text: String,
    params: Vec<Value>,
    wants: SqlWants,
) -> std::result::Result<SqlAnswer, Error> {
    let Some(sql) = sql else { return Err(Error::Denied) };
    let params = params.into_iter().map(from_wit).collect();
    sql.run(SqlStatement { text, params, wants, deadline }).await.map_err(error)
}

fn error(error: SqlError) -> Error {
    match error {
        SqlError::Timeout => Error::Timeout,
        SqlError::Limit(reason) => Error::Limit(reason),
        SqlError::Refused { sqlstate, message, constraint } => {
            Error::Sql(WitSqlError { sqlstate, message, constraint })
        }
        SqlError::Lost => Error::Sql(WitSqlError {
            sqlstate: "08006".to_owned(),
            message: "the connection to the database was lost; the message is delivered again".to_owned(),
            constraint: None,
        }),
    }
}

/// The other side answered another question: our own fault.
fn mixed_up() -> Error {
    let message = "the host mixed up rows and counts".to_owned();
    Error::Sql(WitSqlError { sqlstate: "XX000".to_owned(), message, constraint: None })
}

fn to_wit(rows: SqlRows) -> Rows {
    let values = rows.values.into_iter().map(|row| row.into_iter().map(value).collect()).collect();
    Rows { columns: rows.columns, values }
}

fn value(value: SqlValue) -> Value {
    match value {
        SqlValue::Null => Value::Null,
        SqlValue::Boolean(value) => Value::Boolean(value),
        SqlValue::Int64(value) => Value::Int64(value),
        SqlValue::Float64(value) => Value::Float64(value),
        SqlValue::Numeric(digits) => Value::Numeric(digits),
        SqlValue::Text(text) => Value::Text(text),
        SqlValue::Bytes(bytes) => Value::Bytes(bytes),
        SqlValue::Json(json) => Value::Json(json),
        SqlValue::Timestamp(time) => Value::Timestamp(time),
        SqlValue::Uuid(uuid) => Value::Uuid(uuid),
    }
}

fn from_wit(value: Value) -> SqlValue {
    match value {
        Value::Null => SqlValue::Null,
        Value::Boolean(value) => SqlValue::Boolean(value),
        Value::Int64(value) => SqlValue::Int64(value),
        Value::Float64(value) => SqlValue::Float64(value),
        Value::Numeric(digits) => SqlValue::Numeric(digits),
        Value::Text(text) => SqlValue::Text(text),
        Value::Bytes(bytes) => SqlValue::Bytes(bytes),
        Value::Json(json) => SqlValue::Json(json),
        Value::Timestamp(time) => SqlValue::Timestamp(time),
        Value::Uuid(uuid) => SqlValue::Uuid(uuid),
    }
}
