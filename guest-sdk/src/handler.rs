//! Which functions are handlers: a message in, an outcome out.

use serde::de::DeserializeOwned;

use crate::{Context, IntoOutcome, Message, Outcome, payload};

/// A function that can be a handler. Implemented for functions, never by hand.
///
/// ```
/// use millstream_guest::{Context, Handler, Message, Outcome};
///
/// fn accept<Arguments>(_handler: impl Handler<Arguments>) {}
///
/// accept(|message: Message| Outcome::Done);
/// accept(|numbers: Vec<u32>| ());
/// accept(|number: u32, ctx: Context| Ok::<(), std::fmt::Error>(()));
/// ```
#[diagnostic::on_unimplemented(
    message = "this function is no handler",
    note = "a handler takes `Message`, or a payload type that implements `serde::Deserialize` and then, if it wants, `Context`",
    note = "it answers with `Outcome`, with `()`, or with a `Result` of one of them whose error is any `std::error::Error`"
)]
pub trait Handler<Arguments> {
    /// Handles one delivery.
    ///
    /// ```
    /// use millstream_guest::{Handler, Message, Outcome, testing::TestMessage};
    ///
    /// let handler = |message: Message| Outcome::Done;
    /// assert_eq!(handler.deliver(TestMessage::text("{}").into_message()), Outcome::Done);
    /// ```
    fn deliver(&self, message: Message) -> Outcome;
}

impl<F, A, R> Handler<(A,)> for F
where
    F: Fn(A) -> R,
    A: FromMessage,
    R: IntoOutcome,
{
    fn deliver(&self, message: Message) -> Outcome {
        match A::from_message(message) {
            Ok(argument) => self(argument).into_outcome(),
            Err(outcome) => outcome,
        }
    }
}

impl<F, T, R> Handler<(T, Context)> for F
where
    F: Fn(T, Context) -> R,
    T: DeserializeOwned,
    R: IntoOutcome,
{
    fn deliver(&self, message: Message) -> Outcome {
        match payload::parse(message.payload.as_deref()) {
            Ok(payload) => self(payload, message.context).into_outcome(),
            Err(reason) => Outcome::Reject { reason },
        }
    }
}

/// What the only argument of a handler may be: the whole [`Message`], or its payload read from JSON.
///
/// ```
/// use millstream_guest::{FromMessage, Outcome, testing::TestMessage};
///
/// let numbers = Vec::<u32>::from_message(TestMessage::text("[1, 2]").into_message());
/// assert_eq!(numbers, Ok(vec![1, 2]));
///
/// // A tombstone has no payload; `Option` takes it.
/// assert_eq!(Option::<u32>::from_message(TestMessage::tombstone("k").into_message()), Ok(None));
/// assert!(matches!(u32::from_message(TestMessage::tombstone("k").into_message()), Err(Outcome::Reject { .. })));
/// ```
pub trait FromMessage: Sized {
    /// Takes what the handler wants out of the message.
    ///
    /// # Errors
    /// The outcome of the delivery when the payload is not what the handler takes: a rejection with the reason, and
    /// without any of the payload's content.
    ///
    /// ```
    /// use millstream_guest::{FromMessage, Outcome, testing::TestMessage};
    ///
    /// let message = TestMessage::text(r#"{"password": "hunter2""#).into_message();
    /// let Err(Outcome::Reject { reason }) = u32::from_message(message) else { panic!("it is no number") };
    /// assert_eq!(reason, "the payload (22 bytes) is not what the handler takes: expected u32, at line 1 column 0");
    /// ```
    fn from_message(message: Message) -> Result<Self, Outcome>;
}

impl FromMessage for Message {
    fn from_message(message: Message) -> Result<Self, Outcome> {
        Ok(message)
    }
}

impl<T: DeserializeOwned> FromMessage for T {
    fn from_message(message: Message) -> Result<Self, Outcome> {
        payload::parse(message.payload.as_deref()).map_err(|reason| Outcome::Reject { reason })
    }
}
