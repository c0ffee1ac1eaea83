//! A delivered message, and what a handler knows about its delivery.

use std::{
    fmt,
    ops::{Deref, DerefMut},
    time::{Duration, SystemTime},
};

use crate::{NewMessage, ProduceError, boundary};

/// What a handler knows about the delivery it serves: everything but the payload.
///
/// ```
/// use millstream_guest::{Context, Outcome};
///
/// #[millstream_guest::handler]
/// fn handle(order_id: String, ctx: Context) -> Outcome {
///     if ctx.is_last_attempt() {
///         millstream_guest::warn!("the last attempt of {}", ctx.id);
///     }
///     match ctx.header("source") {
///         Some("webshop") => Outcome::Done,
///         _ => Outcome::reject("no order comes from elsewhere"),
///     }
/// }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Context {
    /// Position in the stream: rising, unique, not dense.
    pub id: u64,
    /// The stream it was produced to.
    pub stream: String,
    /// The consumer group that it is delivered to.
    pub group: String,
    /// What the message is about; read by compaction, exclusive and ordered delivery.
    pub key: Option<String>,
    /// Version of the key, for compacted messages.
    pub rank: Option<i64>,
    /// What the producer gave groups to filter by.
    pub routing_key: Option<String>,
    /// Names and values as produced.
    pub headers: Vec<(String, String)>,
    /// What the producer says the payload is, such as `application/json`.
    pub content_type: Option<String>,
    /// When it was produced, by the database's clock, to the millisecond.
    pub produced_at: SystemTime,
    /// 1 + counted failures so far.
    pub attempt: u32,
    /// The delivery with this attempt is the last one before the dead-letter queue.
    pub max_attempts: u32,
    /// How long the handler has before it is interrupted.
    pub timeout: Duration,
    /// The group was sent back to an earlier position, and this message may have been handled before.
    pub replay: bool,
    /// It comes back from the dead-letter queue; after later messages of its key, where the group's policy is `skip`.
    pub redriven: bool,
    /// Older versions of this key that were superseded since the group's last delivery of the key.
    pub skipped: u32,
    /// The earliest dead-lettered message of this ordered key that later messages have overtaken.
    pub gap_since: Option<u64>,
}

impl Context {
    /// Produces a message when, and only when, this delivery is acknowledged.
    ///
    /// # Errors
    /// Says why the host refused it; nothing is produced then. With `?` the delivery is retried.
    ///
    /// ```
    /// use millstream_guest::{Context, NewMessage, ProduceError, testing};
    ///
    /// fn handle(order_id: String, ctx: Context) -> Result<(), ProduceError> {
    ///     ctx.produce("receipts", NewMessage::bytes("paid").key(order_id))
    /// }
    ///
    /// let delivered = testing::deliver(handle, testing::TestMessage::text("\"o-1\""));
    /// assert_eq!(delivered.produced[0].message.key.as_deref(), Some("o-1"));
    /// ```
    pub fn produce(&self, to: &str, message: NewMessage) -> Result<(), ProduceError> {
        boundary::produce(to, message)
    }

    /// Whether a failure of this delivery sends the message to the dead-letter queue.
    ///
    /// ```
    /// use millstream_guest::testing::TestMessage;
    ///
    /// let message = TestMessage::text("{}").attempt(10).max_attempts(10).into_message();
    /// assert!(message.is_last_attempt());
    /// ```
    pub fn is_last_attempt(&self) -> bool {
        self.attempt >= self.max_attempts
    }

    /// The value of the first header of this name; names are compared as they were produced, case included.
    ///
    /// ```
    /// use millstream_guest::testing::TestMessage;
    ///
    /// let message = TestMessage::text("{}").header("source", "webshop").into_message();
    /// assert_eq!(message.header("source"), Some("webshop"));
    /// assert_eq!(message.header("trace"), None);
    /// ```
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(header, _)| header == name).map(|(_, value)| value.as_str())
    }
}

/// One delivery of one message, payload included.
///
/// All fields and methods of [`Context`] are reached through it: `message.key`, `message.attempt`,
/// `message.produce(..)`.
///
/// ```
/// use millstream_guest::{Message, Outcome};
///
/// #[millstream_guest::handler]
/// fn handle(message: Message) -> Outcome {
///     let bytes = message.payload.as_ref().map_or(0, Vec::len);
///     millstream_guest::info!("message {} of {}: {bytes} bytes", message.id, message.stream);
///     Outcome::Done
/// }
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct Message {
    /// What is known about the delivery.
    pub context: Context,
    /// `None` is a tombstone: the key was deleted.
    pub payload: Option<Vec<u8>>,
}

impl Deref for Message {
    type Target = Context;

    fn deref(&self) -> &Context {
        &self.context
    }
}

impl DerefMut for Message {
    fn deref_mut(&mut self) -> &mut Context {
        &mut self.context
    }
}

impl fmt::Debug for Message {
    /// Never prints the payload: log lines and test output outlive the message.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Message")
            .field("context", &self.context)
            .field("payload_bytes", &self.payload.as_ref().map(Vec::len))
            .finish()
    }
}
