//! Why something was not produced, as the caller can react to it. Holds no payload.

use std::{fmt, sync::Arc};

use crate::{
    database::{DatabaseError, Reaction, Refusal, reaction},
    engine::ProduceError,
};

/// Why a call failed. Unless it is [`Error::CommitUnknown`], nothing of the call was produced.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Error {
    /// No stream has this name: declare it in streams.toml, and run `millstream apply`.
    UnknownStream(Refusal),
    /// A key mode was asked for, and there is no key.
    KeyMissing(Refusal),
    /// The key is empty, or has more than 1,024 bytes.
    KeyInvalid(Refusal),
    /// The payload is larger than `max_payload` of the stream.
    PayloadTooLarge(Refusal),
    /// Options that exclude each other, such as a rank without compaction.
    ImpossibleOptions(Refusal),
    /// Ranks begin at 0.
    NegativeRank(Refusal),
    /// The idempotency key was used for a message with another payload, key or rank.
    IdempotencyConflict(Refusal),
    /// A batch of more than 50,000 messages.
    BatchTooLarge(Refusal),
    /// Headers, routing key, content type, idempotency key or time out of bounds, or a NUL in a text.
    AttributeInvalid(Refusal),
    /// The role may not produce to this stream: `select millstream.grant_produce(role, stream)`.
    Forbidden(Refusal),
    /// Postgres refused it for a reason of its own.
    Refused(Refusal),
    /// The schema holds no Millstream, or an older one: run `millstream apply`.
    NotInstalled(String),
    /// The value could not be written as JSON.
    Encode(Arc<serde_json::Error>),
    /// The server could not be reached or used; says why, without a password.
    Connect(String),
    /// The client was closed; the message was not taken.
    Closed,
    /// The answer to COMMIT was lost: all of the transaction is there, or nothing. Only a repetition with the same
    /// idempotency keys is safe; it answers `duplicate` if the first was committed.
    CommitUnknown(Arc<DatabaseError>),
    /// The database failed, also when tried again where that is safe. Nothing was committed.
    Database(Arc<DatabaseError>),
}

/// SQLSTATEs of a database without our schema, and of a schema without our functions.
const NO_SCHEMA: &str = "3F000";
const NO_FUNCTION: &str = "42883";

impl Error {
    /// What Postgres said, where the message or the stream is at fault.
    pub fn refusal(&self) -> Option<&Refusal> {
        match self {
            Self::UnknownStream(refusal)
            | Self::KeyMissing(refusal)
            | Self::KeyInvalid(refusal)
            | Self::PayloadTooLarge(refusal)
            | Self::ImpossibleOptions(refusal)
            | Self::NegativeRank(refusal)
            | Self::IdempotencyConflict(refusal)
            | Self::BatchTooLarge(refusal)
            | Self::AttributeInvalid(refusal)
            | Self::Forbidden(refusal)
            | Self::Refused(refusal) => Some(refusal),
            _ => None,
        }
    }

    fn from_refusal(refusal: Refusal) -> Self {
        let kind = match &*refusal.sqlstate {
            "MS001" => Self::UnknownStream,
            "MS002" => Self::KeyMissing,
            "MS003" => Self::KeyInvalid,
            "MS004" => Self::PayloadTooLarge,
            "MS005" => Self::ImpossibleOptions,
            "MS006" => Self::NegativeRank,
            "MS007" => Self::IdempotencyConflict,
            "MS009" => Self::BatchTooLarge,
            // 22: text with a NUL, a time that does not exist.
            "MS010" | "22007" | "22008" | "22021" => Self::AttributeInvalid,
            "42501" => Self::Forbidden,
            NO_SCHEMA => return Self::NotInstalled(refusal.message),
            _ => Self::Refused,
        };
        kind(refusal)
    }

    /// Of a statement that did not commit.
    pub(super) fn from_database(error: DatabaseError) -> Self {
        let said = error.as_database_error().filter(|error| error.code().as_deref() == Some(NO_FUNCTION));
        if let Some(said) = said {
            return Self::NotInstalled(said.message().to_owned());
        }
        match reaction(&error) {
            Reaction::Refused(refusal) => Self::from_refusal(refusal),
            Reaction::Busy | Reaction::Broken => Self::Database(Arc::new(error)),
        }
    }
}

impl From<ProduceError> for Error {
    fn from(error: ProduceError) -> Self {
        match error {
            ProduceError::Refused(refusal) => Self::from_refusal(refusal),
            ProduceError::Database(error) => Self::from_database(error),
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(Refusal { sqlstate, message, hint, .. }) = self.refusal() {
            write!(f, "{message} ({sqlstate})")?;
            return hint.as_ref().map_or(Ok(()), |hint| write!(f, "; {hint}"));
        }
        match self {
            Self::NotInstalled(reason) => write!(f, "{reason}; run `millstream apply` on this database"),
            Self::Encode(_) => f.write_str("write the payload as JSON"),
            Self::Connect(reason) => f.write_str(reason),
            Self::Closed => f.write_str("the client was closed"),
            Self::CommitUnknown(_) => {
                f.write_str("hear the answer to COMMIT; the transaction may be committed, or may not")
            }
            _ => f.write_str("use the database"),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::CommitUnknown(error) | Self::Database(error) => Some(&**error),
            Self::Encode(error) => Some(&**error),
            _ => None,
        }
    }
}
