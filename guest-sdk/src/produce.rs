//! Messages that a handler produces with its acknowledgement.

use std::{error::Error, fmt, time::Duration};

use serde::Serialize;

/// A message to produce. All fields are public and all but the payload may be left out.
///
/// ```
/// use millstream_guest::{Concurrency, NewMessage};
///
/// let short = NewMessage::bytes("paid").key("o-1");
/// let full = NewMessage {
///     concurrency: Some(Concurrency::Ordered),
///     routing_key: Some("receipts.eu".into()),
///     ..NewMessage::bytes("paid")
/// };
/// assert_eq!(short.payload, full.payload);
/// ```
#[derive(Clone, Default, PartialEq, Eq)]
pub struct NewMessage {
    /// `None` is a tombstone: the key is deleted.
    pub payload: Option<Vec<u8>>,
    /// What the message is about: at most 1 KiB, not empty.
    pub key: Option<String>,
    /// `None`: the stream's key policy decides.
    pub concurrency: Option<Concurrency>,
    /// Whether it replaces older messages of its key. `None`: the stream's key policy decides.
    pub compaction: Option<bool>,
    /// Version of the key: a message of a lower rank than the winner's is superseded at once; of equal ranks the later
    /// wins. `None`: 0.
    pub rank: Option<i64>,
    /// A second message with this idempotency key is a duplicate and is not produced.
    pub idempotency_key: Option<String>,
    /// What groups may filter by.
    pub routing_key: Option<String>,
    /// Names and values, delivered as they are.
    pub headers: Vec<(String, String)>,
    /// What the payload is, such as `application/json`.
    pub content_type: Option<String>,
    /// How long after the commit it may first be delivered; at millisecond precision.
    pub delay: Option<Duration>,
}

impl NewMessage {
    /// A message with a JSON payload.
    ///
    /// # Errors
    /// When the value has no JSON form, such as a map whose keys are not strings.
    ///
    /// ```
    /// use millstream_guest::NewMessage;
    ///
    /// let message = NewMessage::json(&vec![1, 2])?;
    /// assert_eq!(message.payload.as_deref(), Some(&b"[1,2]"[..]));
    /// assert_eq!(message.content_type.as_deref(), Some("application/json"));
    /// # Ok::<(), serde_json::Error>(())
    /// ```
    pub fn json(value: &(impl Serialize + ?Sized)) -> Result<Self, serde_json::Error> {
        let payload = Some(serde_json::to_vec(value)?);
        Ok(Self { payload, content_type: Some("application/json".to_owned()), ..Self::default() })
    }

    /// A message with this payload, which may be text.
    ///
    /// ```
    /// use millstream_guest::NewMessage;
    /// assert_eq!(NewMessage::bytes("paid"), NewMessage::bytes(b"paid"));
    /// ```
    pub fn bytes(payload: impl Into<Vec<u8>>) -> Self {
        Self { payload: Some(payload.into()), ..Self::default() }
    }

    /// A message that says its key was deleted.
    ///
    /// ```
    /// use millstream_guest::NewMessage;
    /// let message = NewMessage::tombstone("customer-7");
    /// assert_eq!((message.payload, message.key), (None, Some("customer-7".into())));
    /// ```
    pub fn tombstone(key: impl Into<String>) -> Self {
        Self { key: Some(key.into()), ..Self::default() }
    }

    /// Sets the key.
    ///
    /// ```
    /// use millstream_guest::NewMessage;
    /// assert_eq!(NewMessage::bytes("paid").key("o-1").key.as_deref(), Some("o-1"));
    /// ```
    #[must_use]
    pub fn key(self, key: impl Into<String>) -> Self {
        Self { key: Some(key.into()), ..self }
    }

    /// Adds a header.
    ///
    /// ```
    /// use millstream_guest::NewMessage;
    /// let message = NewMessage::bytes("paid").header("source", "billing");
    /// assert_eq!(message.headers, [("source".to_owned(), "billing".to_owned())]);
    /// ```
    #[must_use]
    pub fn header(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.headers.push((name.into(), value.into()));
        self
    }

    /// Sets the idempotency key.
    ///
    /// ```
    /// use millstream_guest::NewMessage;
    /// let message = NewMessage::bytes("paid").idempotency_key("charge-17");
    /// assert_eq!(message.idempotency_key.as_deref(), Some("charge-17"));
    /// ```
    #[must_use]
    pub fn idempotency_key(self, idempotency_key: impl Into<String>) -> Self {
        Self { idempotency_key: Some(idempotency_key.into()), ..self }
    }

    /// Sets how long after the commit it may first be delivered.
    ///
    /// ```
    /// use millstream_guest::NewMessage;
    /// use std::time::Duration;
    /// let message = NewMessage::bytes("remind").delay(Duration::from_secs(3600));
    /// assert_eq!(message.delay, Some(Duration::from_secs(3600)));
    /// ```
    #[must_use]
    pub fn delay(self, delay: Duration) -> Self {
        Self { delay: Some(delay), ..self }
    }
}

impl fmt::Debug for NewMessage {
    /// Never prints the payload: log lines and test output outlive the message.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NewMessage")
            .field("payload_bytes", &self.payload.as_ref().map(Vec::len))
            .field("key", &self.key)
            .field("concurrency", &self.concurrency)
            .field("compaction", &self.compaction)
            .field("rank", &self.rank)
            .field("idempotency_key", &self.idempotency_key)
            .field("routing_key", &self.routing_key)
            .field("headers", &self.headers)
            .field("content_type", &self.content_type)
            .field("delay", &self.delay)
            .finish()
    }
}

/// How deliveries of one key may overlap inside a group.
///
/// ```
/// use millstream_guest::{Concurrency, NewMessage};
///
/// let message = NewMessage { concurrency: Some(Concurrency::Exclusive), ..NewMessage::bytes("paid").key("o-1") };
/// assert_eq!(message.concurrency, Some(Concurrency::Exclusive));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Concurrency {
    /// Any number at once, in any order.
    Parallel,
    /// One at a time, in any order.
    Exclusive,
    /// One at a time, in the order they were produced.
    Ordered,
}

/// Why the host refused a produced message.
///
/// ```
/// use millstream_guest::{Context, NewMessage, Outcome, ProduceError, testing};
///
/// fn handle(_: String, ctx: Context) -> Outcome {
///     match ctx.produce("audit", NewMessage::bytes("seen")) {
///         Ok(()) | Err(ProduceError::Denied { .. }) => Outcome::Done, // an audit is nice to have
///         Err(error) => Outcome::retry(error.to_string()),
///     }
/// }
///
/// let message = testing::TestMessage::text("\"x\"").refuse(ProduceError::Denied { stream: "audit".into() });
/// assert_eq!(testing::deliver(handle, message).outcome, Outcome::Done);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProduceError {
    /// The group was not granted this stream.
    Denied {
        /// The stream that was asked for.
        stream: String,
    },
    /// There is no stream of this name.
    UnknownStream {
        /// The stream that was asked for.
        stream: String,
    },
    /// The message cannot be produced as it is.
    Invalid {
        /// The stream that was asked for.
        stream: String,
        /// What is wrong with the message and how to mend it.
        reason: String,
    },
    /// More messages or bytes than one delivery may produce.
    Limit {
        /// The stream that was asked for.
        stream: String,
        /// Which limit it is, and how to raise it.
        reason: String,
    },
}

impl ProduceError {
    /// The stream that was asked for.
    ///
    /// ```
    /// use millstream_guest::ProduceError;
    /// assert_eq!(ProduceError::Denied { stream: "audit".into() }.stream(), "audit");
    /// ```
    pub fn stream(&self) -> &str {
        match self {
            Self::Denied { stream }
            | Self::UnknownStream { stream }
            | Self::Invalid { stream, .. }
            | Self::Limit { stream, .. } => stream,
        }
    }
}

impl fmt::Display for ProduceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "produce to {:?}: ", self.stream())?;
        match self {
            Self::Denied { stream } => {
                write!(f, "the group is not granted this stream; add {stream:?} to its `allow.produce` in streams.toml")
            }
            Self::UnknownStream { stream } => {
                write!(f, "there is no such stream; declare [streams.{stream}] in streams.toml")
            }
            Self::Invalid { reason, .. } | Self::Limit { reason, .. } => f.write_str(reason),
        }
    }
}

impl Error for ProduceError {}
