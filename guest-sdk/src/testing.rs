//! Runs a handler natively, in a unit test, without wasm and without a host.
//!
//! ```
//! use millstream_guest::{Context, NewMessage, Outcome, ProduceError, testing::{TestMessage, deliver}};
//!
//! fn handle(order_id: String, ctx: Context) -> Result<(), ProduceError> {
//!     ctx.produce("receipts", NewMessage::bytes("paid").key(order_id))
//! }
//!
//! let delivered = deliver(handle, TestMessage::text("\"o-1\"").attempt(2));
//! assert_eq!(delivered.outcome, Outcome::Done);
//! assert_eq!(delivered.produced.len(), 1);
//!
//! let refused = TestMessage::text("\"o-1\"").refuse(ProduceError::Denied { stream: "receipts".into() });
//! assert!(matches!(deliver(handle, refused).outcome, Outcome::Retry { .. }));
//! ```

use std::{
    fmt,
    rc::Rc,
    sync::Arc,
    time::{Duration, SystemTime},
};

use serde::Serialize;

use crate::{
    Context, Handler, Level, Message, NewMessage, Outcome, ProduceError,
    http::{self, Request, Response},
    native::{self, Surroundings},
    sql::{Rows, SqlError, Value},
};

/// Delivers a message to a handler and returns what came of it.
///
/// As on a host, nothing is produced unless the outcome is [`Outcome::Done`]. A panic of the handler is a panic of the
/// test. Every stream is granted that [`TestMessage::refuse`] does not name.
///
/// ```
/// use millstream_guest::{Message, Outcome, testing::{TestMessage, deliver}};
///
/// let delivered = deliver(|message: Message| Outcome::Done, TestMessage::text("{}"));
/// assert_eq!(delivered.outcome, Outcome::Done);
/// ```
pub fn deliver<Arguments>(handler: impl Handler<Arguments>, message: TestMessage) -> Delivered {
    let TestMessage { message, surroundings } = message;
    let (outcome, capture) = native::capture(surroundings, || handler.deliver(message));
    let produced = if outcome == Outcome::Done { capture.produced } else { Vec::new() };
    let (logged, called, statements) = (capture.logged, capture.called, capture.statements);
    Delivered { outcome, produced, logged, called, statements }
}

/// What came of a delivery.
///
/// ```
/// use millstream_guest::{Message, testing::{TestMessage, deliver}};
///
/// let delivered = deliver(|_: Message| millstream_guest::info!("seen"), TestMessage::text("{}"));
/// assert!(delivered.produced.is_empty());
/// assert_eq!(delivered.logged[0].text, "seen");
/// ```
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Delivered {
    /// How it ended.
    pub outcome: Outcome,
    /// What a host would commit with the acknowledgement, in the order it was produced.
    pub produced: Vec<Produced>,
    /// Log lines, whatever the outcome.
    pub logged: Vec<Logged>,
    /// HTTP requests, whatever the outcome and whatever was answered.
    pub called: Vec<Request>,
    /// The SQL it ran, in order, whatever the outcome.
    pub statements: Vec<Statement>,
}

/// A message that a handler produced.
///
/// ```
/// use millstream_guest::{NewMessage, testing::Produced};
/// let produced = Produced { to: "receipts".into(), message: NewMessage::bytes("paid") };
/// assert_eq!(produced.to, "receipts");
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Produced {
    /// The stream it goes to.
    pub to: String,
    /// The message.
    pub message: NewMessage,
}

impl Produced {
    /// The payload, which must be JSON.
    ///
    /// # Panics
    /// When it is a tombstone or not JSON, which fails the test.
    ///
    /// ```
    /// use millstream_guest::{NewMessage, testing::Produced};
    /// let produced = Produced { to: "receipts".into(), message: NewMessage::bytes(r#"{"order_id": "o-1"}"#) };
    /// assert_eq!(produced.json()["order_id"], "o-1");
    /// ```
    pub fn json(&self) -> serde_json::Value {
        let payload = self.message.payload.as_deref().expect("the produced message is no tombstone");
        serde_json::from_slice(payload).expect("the produced payload is JSON")
    }
}

/// A log line of a handler.
///
/// ```
/// use millstream_guest::{Level, testing::Logged};
/// let line = Logged { level: Level::Info, context: "orders".into(), text: "seen".into() };
/// assert_eq!(line.level, Level::Info);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Logged {
    /// How much it matters.
    pub level: Level,
    /// The module that wrote it.
    pub context: String,
    /// The line.
    pub text: String,
}

/// A message to deliver in a test: the first attempt of ten, on stream `test`, unless it says otherwise.
///
/// ```
/// use millstream_guest::testing::TestMessage;
///
/// let message = TestMessage::text("{}").key("o-1").attempt(3).header("source", "webshop").into_message();
/// assert_eq!((message.attempt, message.key.as_deref()), (3, Some("o-1")));
/// ```
#[derive(Clone)]
pub struct TestMessage {
    message: Message,
    surroundings: Surroundings,
}

impl fmt::Debug for TestMessage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TestMessage").field("message", &self.message).finish_non_exhaustive()
    }
}

/// What answers the SQL of a test.
#[derive(Clone)]
pub(crate) struct SqlStub(Arc<Stub>);

type Stub = dyn Fn(&str, &[Value]) -> Result<Answer, SqlError> + Send + Sync;

impl SqlStub {
    pub(crate) fn answer(&self, statement: &str, params: &[Value]) -> Result<Answer, SqlError> {
        (self.0)(statement, params)
    }
}

impl fmt::Debug for SqlStub {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SqlStub")
    }
}

/// What a stub answers; see [`TestMessage::sql`].
#[derive(Clone, Debug, PartialEq)]
pub enum Answer {
    /// To [`sql::query`](crate::sql::query).
    Rows(Rows),
    /// To [`sql::execute`](crate::sql::execute).
    Count(u64),
}

impl Answer {
    /// Rows with these columns.
    pub fn rows<const COLUMNS: usize>(
        columns: [&str; COLUMNS],
        values: impl IntoIterator<Item = [Value; COLUMNS]>,
    ) -> Self {
        let columns = columns.map(str::to_owned).to_vec();
        Self::Rows(Rows { columns, values: values.into_iter().map(Vec::from).collect() })
    }

    /// So many rows were touched.
    pub fn count(count: u64) -> Self {
        Self::Count(count)
    }
}

/// A statement that a handler ran.
#[derive(Clone, Debug, PartialEq)]
pub struct Statement {
    /// As it was written.
    pub text: String,
    /// Its parameters.
    pub params: Vec<Value>,
}

impl TestMessage {
    fn new(payload: Option<Vec<u8>>) -> Self {
        let context = Context {
            id: 1,
            stream: "test".to_owned(),
            group: "test".to_owned(),
            key: None,
            rank: None,
            routing_key: None,
            headers: Vec::new(),
            content_type: None,
            produced_at: SystemTime::UNIX_EPOCH,
            attempt: 1,
            max_attempts: 10,
            timeout: Duration::from_secs(30),
            replay: false,
            redriven: false,
            skipped: 0,
            gap_since: None,
        };
        Self { message: Message { context, payload }, surroundings: Surroundings::default() }
    }

    /// A message with this payload, which may be text.
    ///
    /// ```
    /// use millstream_guest::testing::TestMessage;
    /// assert_eq!(TestMessage::bytes([0, 159]).into_message().payload, Some(vec![0, 159]));
    /// ```
    pub fn bytes(payload: impl Into<Vec<u8>>) -> Self {
        Self::new(Some(payload.into()))
    }

    /// A message with this text, such as a piece of JSON.
    ///
    /// ```
    /// use millstream_guest::testing::TestMessage;
    /// assert_eq!(TestMessage::text("[1]").into_message().payload, Some(b"[1]".to_vec()));
    /// ```
    pub fn text(payload: &str) -> Self {
        Self::bytes(payload)
    }

    /// A message with a JSON payload.
    ///
    /// # Panics
    /// When the value has no JSON form, which fails the test.
    ///
    /// ```
    /// use millstream_guest::testing::TestMessage;
    /// assert_eq!(TestMessage::json(&vec![1]).into_message().payload, Some(b"[1]".to_vec()));
    /// ```
    pub fn json(value: &(impl Serialize + ?Sized)) -> Self {
        Self::bytes(serde_json::to_vec(value).expect("the value has a JSON form"))
    }

    /// A message without a payload: its key was deleted.
    ///
    /// ```
    /// use millstream_guest::testing::TestMessage;
    /// assert_eq!(TestMessage::tombstone("customer-7").into_message().payload, None);
    /// ```
    pub fn tombstone(key: &str) -> Self {
        Self::new(None).key(key)
    }

    /// Sets the key.
    ///
    /// ```
    /// use millstream_guest::testing::TestMessage;
    /// assert_eq!(TestMessage::text("{}").key("o-1").into_message().key.as_deref(), Some("o-1"));
    /// ```
    #[must_use]
    pub fn key(mut self, key: &str) -> Self {
        self.message.key = Some(key.to_owned());
        self
    }

    /// Adds a header.
    ///
    /// ```
    /// use millstream_guest::testing::TestMessage;
    /// let message = TestMessage::text("{}").header("source", "webshop").into_message();
    /// assert_eq!(message.header("source"), Some("webshop"));
    /// ```
    #[must_use]
    pub fn header(mut self, name: &str, value: &str) -> Self {
        self.message.headers.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Sets the attempt.
    ///
    /// ```
    /// use millstream_guest::testing::TestMessage;
    /// assert_eq!(TestMessage::text("{}").attempt(3).into_message().attempt, 3);
    /// ```
    #[must_use]
    pub fn attempt(mut self, attempt: u32) -> Self {
        self.message.attempt = attempt;
        self
    }

    /// Sets which attempt is the last one.
    ///
    /// ```
    /// use millstream_guest::testing::TestMessage;
    /// assert!(TestMessage::text("{}").max_attempts(1).into_message().is_last_attempt());
    /// ```
    #[must_use]
    pub fn max_attempts(mut self, max_attempts: u32) -> Self {
        self.message.max_attempts = max_attempts;
        self
    }

    /// Changes anything else of the delivery.
    ///
    /// ```
    /// use millstream_guest::testing::TestMessage;
    /// let message = TestMessage::text("{}").with(|context| context.redriven = true).into_message();
    /// assert!(message.redriven);
    /// ```
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Context)) -> Self {
        change(&mut self.message.context);
        self
    }

    /// Refuses every message that is produced to the stream this error names.
    ///
    /// ```
    /// use millstream_guest::{Context, NewMessage, ProduceError, testing::{TestMessage, deliver}};
    ///
    /// let denied = ProduceError::Denied { stream: "receipts".into() };
    /// let expected = denied.clone();
    /// let handle = move |_: u32, ctx: Context| {
    ///     assert_eq!(ctx.produce("receipts", NewMessage::bytes("paid")), Err(expected.clone()));
    /// };
    /// assert!(deliver(handle, TestMessage::text("1").refuse(denied)).produced.is_empty());
    /// ```
    #[must_use]
    pub fn refuse(mut self, refusal: ProduceError) -> Self {
        self.surroundings.refused.push(refusal);
        self
    }

    /// Sets a value of the group's `config` or `secrets`.
    ///
    /// ```
    /// use millstream_guest::{Message, config, testing::{TestMessage, deliver}};
    ///
    /// let handle = |_: Message| assert_eq!(config::get("sender").as_deref(), Some("shop@example.com"));
    /// deliver(handle, TestMessage::text("{}").config("sender", "shop@example.com"));
    /// ```
    #[must_use]
    pub fn config(mut self, name: &str, value: &str) -> Self {
        self.surroundings.config.insert(name.to_owned(), value.to_owned());
        self
    }

    /// Answers the handler's HTTP calls. Without it every call is denied, as by a host that grants none.
    ///
    /// ```
    /// use millstream_guest::{Message, http, testing::{TestMessage, deliver}};
    ///
    /// let handle = |_: Message| http::get("https://shop.example/stock/7", &[]).map(|_| ());
    /// let message = TestMessage::text("{}").answer_http(|request| Ok(http::Response::new(204)));
    /// assert_eq!(deliver(handle, message).called[0].url, "https://shop.example/stock/7");
    /// ```
    #[must_use]
    pub fn answer_http(mut self, answer: impl Fn(&Request) -> Result<Response, http::Error> + 'static) -> Self {
        self.surroundings.answer = Some(Rc::new(answer));
        self
    }

    /// Answers the handler's SQL. Without it, SQL is denied, as on a host without a grant.
    ///
    /// ```
    /// use millstream_guest::{sql::{self, SqlError, Value}, testing::{Answer, TestMessage, deliver}};
    ///
    /// fn handle(account: String) -> Result<(), SqlError> {
    ///     let balances: Vec<i64> = sql::query("select balance from account where id = $1", (&account,))?;
    ///     assert_eq!(balances, [500]);
    ///     Ok(())
    /// }
    ///
    /// let message = TestMessage::text("\"a-1\"").sql(|_, params| {
    ///     assert_eq!(params, [Value::from("a-1")]);
    ///     Ok(Answer::rows(["balance"], [[Value::from(500)]]))
    /// });
    /// let delivered = deliver(handle, message);
    /// assert!(delivered.statements[0].text.starts_with("select balance"));
    /// ```
    #[must_use]
    pub fn sql(mut self, answer: impl Fn(&str, &[Value]) -> Result<Answer, SqlError> + Send + Sync + 'static) -> Self {
        self.surroundings.stub = Some(SqlStub(Arc::new(answer)));
        self
    }

    /// The message as a handler takes it.
    ///
    /// ```
    /// use millstream_guest::testing::TestMessage;
    /// assert_eq!(TestMessage::text("{}").into_message().stream, "test");
    /// ```
    pub fn into_message(self) -> Message {
        self.message
    }
}
