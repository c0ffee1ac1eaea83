//! The seam between the engine and the sandbox: a message goes in, a finished delivery comes out.
//!
//! A leaf: it imports no other part. The engine fills [`Message`]s, `consumer` calls a [`Handler`], the sandbox (or a
//! closure in a test) implements it. Nothing here knows SQL or wasm.

use std::{
    fmt,
    future::Future,
    pin::Pin,
    sync::Arc,
    time::{Duration, Instant},
};

#[cfg(feature = "host")]
use tokio_util::sync::CancellationToken;

/// One delivery of one message, as the handler sees it.
#[derive(Clone)]
pub struct Message {
    /// Position in the stream: rising, unique, not dense.
    pub id: i64,
    pub stream: Arc<str>,
    pub group: Arc<str>,
    pub key: Option<String>,
    pub rank: Option<i64>,
    pub routing_key: Option<String>,
    pub headers: Vec<(String, String)>,
    pub content_type: Option<String>,
    /// `None` is a tombstone: the key was deleted.
    pub payload: Option<Vec<u8>>,
    /// Milliseconds since 1970-01-01 UTC, database clock.
    pub produced_at_ms: i64,
    /// 1 + counted failures so far.
    pub attempt: u32,
    pub max_attempts: u32,
    pub timeout: Duration,
    pub replay: bool,
    pub redriven: bool,
    pub skipped: u32,
    pub gap_since: Option<i64>,
    /// SQL in the delivery's own transaction; `None` without a grant.
    pub sql: Option<Arc<dyn Sql>>,
}

impl fmt::Debug for Message {
    /// Never prints the payload.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Message")
            .field("stream", &self.stream)
            .field("group", &self.group)
            .field("id", &self.id)
            .field("key", &self.key)
            .field("attempt", &self.attempt)
            .finish_non_exhaustive()
    }
}

/// A message that a handler wants produced when, and only when, its delivery is acknowledged.
#[derive(Clone, Default)]
pub struct NewMessage {
    pub stream: String,
    pub payload: Option<Vec<u8>>,
    pub key: Option<String>,
    /// `None`: the stream's key policy decides.
    pub concurrency: Option<Concurrency>,
    /// `None`: the stream's key policy decides.
    pub compaction: Option<bool>,
    pub rank: Option<i64>,
    pub idempotency_key: Option<String>,
    pub routing_key: Option<String>,
    pub headers: Vec<(String, String)>,
    pub content_type: Option<String>,
    /// How long after the commit it may first be delivered.
    pub delay: Option<Duration>,
}

impl fmt::Debug for NewMessage {
    /// Never prints the payload.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NewMessage")
            .field("stream", &self.stream)
            .field("key", &self.key)
            .field("idempotency_key", &self.idempotency_key)
            .finish_non_exhaustive()
    }
}

/// How deliveries of one key may overlap inside a group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Concurrency {
    #[default]
    Parallel,
    Exclusive,
    Ordered,
}

impl Concurrency {
    /// The one of this name; see [`Concurrency::as_str`].
    pub fn named(name: &str) -> Option<Self> {
        [Self::Parallel, Self::Exclusive, Self::Ordered].into_iter().find(|mode| mode.as_str() == name)
    }

    /// The name used in SQL, TOML and JSON.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Parallel => "parallel",
            Self::Exclusive => "exclusive",
            Self::Ordered => "ordered",
        }
    }
}

/// How a delivery ended. The first five are what a handler can answer; the last two are what happened to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Acknowledged; effects are committed.
    Done,
    /// Failed; again on the group's retry schedule. Counts as an attempt.
    Retry { reason: String },
    /// Failed; again after `delay`. Counts as an attempt.
    RetryAfter { delay: Duration, reason: String },
    /// Will never succeed: to the dead-letter queue now.
    Reject { reason: String },
    /// Not now, and not a failure: again after `delay`, no attempt counted.
    Later { delay: Duration },
    /// It trapped, ran out of time or memory, or the host failed it. Retried on the group's schedule.
    Failed(Failure),
    /// It never ran, or was cut for a reason of ours (drain, lost lease, no free sandbox): it is handed back and no
    /// attempt is counted.
    HandBack,
}

/// Why a delivery failed without answering.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    pub class: FailureClass,
    /// Trap, backtrace with function names and the tail of stderr. No NUL, at most [`ERROR_BYTES_MAX`] bytes, no payload.
    pub error: String,
}

/// Longest error text that is stored, in bytes. Long enough for a backtrace and a tail of stderr, short enough that
/// 1,000,000 dead letters stay below 16 GiB.
pub const ERROR_BYTES_MAX: usize = 16 * 1024;

/// What kind of failure it was; stored, and a metric label.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FailureClass {
    /// The handler answered `retry`, or exited.
    Failed,
    /// The handler answered `reject`.
    Rejected,
    Panic,
    Timeout,
    CpuLimit,
    MemoryLimit,
    OutOfBounds,
    StackOverflow,
    /// Its host died with it.
    HostLost,
    /// Our own fault, not the handler's.
    Host,
    /// Never delivered: an earlier message of its key is a dead letter, and the key rests.
    KeyRests,
    /// An operator skipped it, so that its key could go on.
    Skipped,
}

impl FailureClass {
    pub const ALL: [Self; 12] = [
        Self::Failed,
        Self::Rejected,
        Self::Panic,
        Self::Timeout,
        Self::CpuLimit,
        Self::MemoryLimit,
        Self::OutOfBounds,
        Self::StackOverflow,
        Self::HostLost,
        Self::Host,
        Self::KeyRests,
        Self::Skipped,
    ];

    /// The name used in SQL, JSON and metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Failed => "failed",
            Self::Rejected => "rejected",
            Self::Panic => "panic",
            Self::Timeout => "timeout",
            Self::CpuLimit => "cpu_limit",
            Self::MemoryLimit => "memory_limit",
            Self::OutOfBounds => "out_of_bounds",
            Self::StackOverflow => "stack_overflow",
            Self::HostLost => "host_lost",
            Self::Host => "host",
            Self::KeyRests => "key_rests",
            Self::Skipped => "skipped",
        }
    }
}

/// A delivery that has ended: what became of it and what it wants committed with its acknowledgement.
#[derive(Debug)]
pub struct Finished {
    pub outcome: Outcome,
    /// Empty unless the outcome is [`Outcome::Done`].
    pub produced: Vec<NewMessage>,
    /// sha256 of the component that served it, lower-case hex; `None` for closures in tests.
    pub digest: Option<Arc<str>>,
    /// How often the guest grew its memory. An ordinary message should need none.
    pub memory_growths: u32,
}

impl Finished {
    /// A delivery that ended without effects.
    pub fn plain(outcome: Outcome) -> Self {
        Self { outcome, produced: Vec::new(), digest: None, memory_growths: 0 }
    }
}

/// Runs SQL of one delivery, one statement after the other, in a transaction that ends as the delivery does. Implemented
/// by the engine.
pub trait Sql: Send + Sync {
    /// Runs one statement. Dropping the future ends the statement, and the delivery cannot succeed any more.
    fn run<'a>(&'a self, statement: SqlStatement) -> Running<'a>;
}

/// The future of one statement.
pub type Running<'a> = Pin<Box<dyn Future<Output = Result<SqlAnswer, SqlError>> + Send + 'a>>;

/// One statement with its parameters `$1`, `$2`, ...
pub struct SqlStatement {
    pub text: String,
    pub params: Vec<SqlValue>,
    pub wants: SqlWants,
    /// When the delivery ends, and the statement with it.
    pub deadline: Instant,
}

/// What a statement is run for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SqlWants {
    Rows,
    /// How many rows it touched.
    Count,
}

/// What came of a statement.
#[derive(Debug, PartialEq)]
pub enum SqlAnswer {
    Rows(SqlRows),
    Count(u64),
}

/// Rows in the order Postgres gave them.
#[derive(Debug, PartialEq)]
pub struct SqlRows {
    pub columns: Vec<String>,
    pub values: Vec<Vec<SqlValue>>,
}

/// One value, in or out.
#[derive(Clone, PartialEq)]
pub enum SqlValue {
    Null,
    Boolean(bool),
    Int64(i64),
    Float64(f64),
    /// Decimal digits.
    Numeric(String),
    Text(String),
    Bytes(Vec<u8>),
    /// JSON text.
    Json(String),
    /// RFC 3339.
    Timestamp(String),
    Uuid(String),
}

/// Why a statement has no answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SqlError {
    /// No time left.
    Timeout,
    /// More than one answer may hold.
    Limit(String),
    /// Postgres refused it. The transaction goes on as if the statement had never been.
    Refused { sqlstate: String, message: String, constraint: Option<String> },
    /// The transaction is lost, for a reason of the database's. The delivery is handed back.
    Lost,
}

impl fmt::Debug for SqlStatement {
    /// Never prints a value, nor the text, which may hold some.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SqlStatement").field("params", &self.params).field("wants", &self.wants).finish_non_exhaustive()
    }
}

impl fmt::Debug for SqlValue {
    /// Never prints the value.
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

/// What runs one delivery. Implemented by the sandbox, and by closures in engine tests.
#[cfg(feature = "host")]
pub trait Handler: Send + Sync {
    /// Runs one delivery to its end. Never panics and never runs past `message.timeout`.
    ///
    /// `cut` is cancelled when the delivery must stop because its host lost the lease, drains or was seeked; the
    /// answer is then [`Outcome::HandBack`]. Dropping the future stops the guest as well.
    fn handle<'a>(&'a self, message: Message, cut: &'a CancellationToken) -> Handling<'a>;
}

/// The future of one delivery.
#[cfg(feature = "host")]
pub type Handling<'a> = Pin<Box<dyn Future<Output = Finished> + Send + 'a>>;

#[cfg(feature = "host")]
impl<F> Handler for F
where
    F: Fn(Message) -> Finished + Send + Sync,
{
    fn handle<'a>(&'a self, message: Message, _cut: &'a CancellationToken) -> Handling<'a> {
        Box::pin(std::future::ready(self(message)))
    }
}
