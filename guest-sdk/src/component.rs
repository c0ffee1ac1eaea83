//! The boundary to the host: generated bindings, their conversion to our own types, and the panic hook.
//!
//! Conversions move strings and payloads, they never copy them.

use std::time::{Duration, SystemTime};

use bindings::{
    millstream::handler::{database, outbox},
    wasi::{config::store, logging::logging},
};

pub(crate) use crate::calls::send;
use crate::{
    Concurrency, Context, Handler, Level, Message, NewMessage, Outcome, ProduceError,
    sql::{Rows, SqlError, Value},
};

/// What wit-bindgen makes of the contract. The world adds wasi interfaces; a component imports only what it uses.
#[expect(missing_docs, reason = "generated; documented in the WIT files")]
pub mod bindings {
    wit_bindgen::generate!({
        path: [
            "wit/deps/wasi-logging",
            "wit/deps/wasi-config",
            "wit/deps/wasi-io",
            "wit/deps/wasi-clocks",
            "wit/deps/wasi-http",
            "wit/handler.wit",
        ],
        inline: "
            package millstream:guest;
            world guest {
                include millstream:handler/handler@0.1.0;
                import wasi:logging/logging@0.1.0-draft;
                import wasi:config/store@0.2.0-rc.1;
                import wasi:http/outgoing-handler@0.2.0;
            }
        ",
        world: "millstream:guest/guest",
        generate_all,
        pub_export_macro: true,
    });
}

/// Runs the handler of this component for one delivery.
pub fn run<Arguments>(handler: impl Handler<Arguments>, message: bindings::Message) -> bindings::Outcome {
    #[cfg(target_os = "unknown")]
    report_panics();
    to_host(handler.deliver(from_host(message)))
}

/// Sends the text of a panic to the host, which stores it with the failure. With WASI the standard library's own hook
/// writes it to stderr, which the host stores as well; without, nobody would hear of it.
#[cfg(target_os = "unknown")]
fn report_panics() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        std::panic::set_hook(Box::new(|panic| {
            let text = panic.payload_as_str().unwrap_or("a value that is no text");
            let text = match panic.location() {
                Some(place) => format!("panicked at {place}: {text}"),
                None => format!("panicked: {text}"),
            };
            logging::log(logging::Level::Critical, "panic", &text);
        }));
    });
}

pub(crate) fn produce(to: &str, message: NewMessage) -> Result<(), ProduceError> {
    let message = outbox::NewMessage {
        payload: message.payload,
        key: message.key,
        concurrency: message.concurrency.map(|concurrency| match concurrency {
            Concurrency::Parallel => outbox::Concurrency::Parallel,
            Concurrency::Exclusive => outbox::Concurrency::Exclusive,
            Concurrency::Ordered => outbox::Concurrency::Ordered,
        }),
        compaction: message.compaction,
        rank: message.rank,
        idempotency_key: message.idempotency_key,
        routing_key: message.routing_key,
        headers: message.headers,
        content_type: message.content_type,
        delay: message.delay.map(milliseconds),
    };
    outbox::produce(to, &message).map_err(|error| {
        let stream = to.to_owned();
        match error {
            outbox::ProduceError::Denied => ProduceError::Denied { stream },
            outbox::ProduceError::UnknownStream => ProduceError::UnknownStream { stream },
            outbox::ProduceError::Invalid(reason) => ProduceError::Invalid { stream, reason },
            outbox::ProduceError::Limit(reason) => ProduceError::Limit { stream, reason },
        }
    })
}

pub(crate) fn config(name: &str) -> Option<String> {
    store::get(name).unwrap_or_else(|error| panic!("the host failed to look up the setting {name}: {error}"))
}

pub(crate) fn query(statement: &str, params: Vec<Value>) -> Result<Rows, SqlError> {
    let params: Vec<_> = params.into_iter().map(value_to_host).collect();
    let rows = database::query(statement, &params).map_err(sql_error)?;
    let values = rows.values.into_iter().map(|row| row.into_iter().map(value_from_host).collect()).collect();
    Ok(Rows { columns: rows.columns, values })
}

pub(crate) fn execute(statement: &str, params: Vec<Value>) -> Result<u64, SqlError> {
    let params: Vec<_> = params.into_iter().map(value_to_host).collect();
    database::execute(statement, &params).map_err(sql_error)
}

fn sql_error(error: database::Error) -> SqlError {
    match error {
        database::Error::Denied => SqlError::Denied,
        database::Error::Timeout => SqlError::Timeout,
        database::Error::Limit(reason) => SqlError::Limit { reason },
        database::Error::Sql(error) => {
            SqlError::Refused { sqlstate: error.sqlstate, message: error.message, constraint: error.constraint }
        }
    }
}

fn value_to_host(value: Value) -> database::Value {
    match value {
        Value::Null => database::Value::Null,
        Value::Boolean(value) => database::Value::Boolean(value),
        Value::Int64(value) => database::Value::Int64(value),
        Value::Float64(value) => database::Value::Float64(value),
        Value::Numeric(digits) => database::Value::Numeric(digits),
        Value::Text(text) => database::Value::Text(text),
        Value::Bytes(bytes) => database::Value::Bytes(bytes),
        Value::Json(json) => database::Value::Json(json),
        Value::Timestamp(time) => database::Value::Timestamp(time),
        Value::Uuid(uuid) => database::Value::Uuid(uuid),
    }
}

fn value_from_host(value: database::Value) -> Value {
    match value {
        database::Value::Null => Value::Null,
        database::Value::Boolean(value) => Value::Boolean(value),
        database::Value::Int64(value) => Value::Int64(value),
        database::Value::Float64(value) => Value::Float64(value),
        database::Value::Numeric(digits) => Value::Numeric(digits),
        database::Value::Text(text) => Value::Text(text),
        database::Value::Bytes(bytes) => Value::Bytes(bytes),
        database::Value::Json(json) => Value::Json(json),
        database::Value::Timestamp(time) => Value::Timestamp(time),
        database::Value::Uuid(uuid) => Value::Uuid(uuid),
    }
}

pub(crate) fn log(level: Level, context: &str, text: &str) {
    let level = match level {
        Level::Trace => logging::Level::Trace,
        Level::Debug => logging::Level::Debug,
        Level::Info => logging::Level::Info,
        Level::Warn => logging::Level::Warn,
        Level::Error => logging::Level::Error,
        Level::Critical => logging::Level::Critical,
    };
    logging::log(level, context, text);
}

fn from_host(message: bindings::Message) -> Message {
    let context = Context {
        id: message.id,
        stream: message.stream,
        group: message.group,
        key: message.key,
        rank: message.rank,
        routing_key: message.routing_key,
        headers: message.headers,
        content_type: message.content_type,
        produced_at: SystemTime::UNIX_EPOCH + Duration::from_millis(message.produced_at),
        attempt: message.attempt,
        max_attempts: message.max_attempts,
        timeout: Duration::from_millis(message.timeout),
        replay: message.replay,
        redriven: message.redriven,
        skipped: message.skipped,
        gap_since: message.gap_since,
    };
    Message { context, payload: message.payload }
}

fn to_host(outcome: Outcome) -> bindings::Outcome {
    match outcome {
        Outcome::Done => bindings::Outcome::Done,
        Outcome::Retry { reason } => bindings::Outcome::Retry(reason),
        Outcome::RetryAfter { delay, reason } => bindings::Outcome::RetryAfter((milliseconds(delay), reason)),
        Outcome::Reject { reason } => bindings::Outcome::Reject(reason),
        Outcome::Later { delay } => bindings::Outcome::Later(milliseconds(delay)),
    }
}

/// Rounded up: a delay that was asked for is never shortened to nothing.
fn milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX)
}
