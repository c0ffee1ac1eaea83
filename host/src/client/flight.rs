//! One shared transaction and its answers. What is wrong with one message, or blocks it, is its own affair: the batch is
//! divided until that message is alone. Knows nothing of the queue.

use std::sync::Arc;

use tokio::sync::oneshot;

use super::{
    Error,
    options::Entry,
    transaction::{Failure, Line, Patience, produce_alone},
};
use crate::{database::Database, engine::Produced};

/// A message that a caller waits for.
#[derive(Debug)]
pub(super) struct Item {
    pub stream: Arc<str>,
    pub entry: Entry,
    pub answer: oneshot::Sender<Result<Produced, Error>>,
}

/// What producers of a stream wait for each other by.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Lock {
    Key(Arc<str>, String),
    Idempotency(Arc<str>, String),
}

impl Item {
    /// The lock that may hold it up while another producer has its transaction open; of two, the key.
    pub fn lock(&self) -> Option<Lock> {
        let message = &self.entry.message;
        let stream = || Arc::clone(&self.stream);
        match (&message.key, &message.idempotency_key) {
            (Some(key), _) => Some(Lock::Key(stream(), key.clone())),
            (None, Some(key)) => Some(Lock::Idempotency(stream(), key.clone())),
            (None, None) => None,
        }
    }

    pub fn payload_bytes(&self) -> usize {
        self.entry.message.payload.as_ref().map_or(0, Vec::len)
    }

    fn answer(self, result: Result<Produced, Error>) {
        if let (Ok(Produced { id, duplicate: true, .. }), Some(key)) = (&result, &self.entry.message.idempotency_key) {
            tracing::debug!(stream = &*self.stream, idempotency_key = key, id, "duplicate");
        }
        // Whoever dropped the future does not want to know.
        let _ = self.answer.send(result);
    }
}

/// What is left when a flight has landed.
#[derive(Debug, Default)]
pub(super) struct Landed {
    /// Items that another producer's open transaction holds up, unanswered, in their order.
    pub blocked: Vec<Item>,
    /// For the next flight.
    pub line: Line,
}

/// Produces items of one stream in as few transactions as possible and answers them.
pub(super) async fn fly(database: &Database, mut line: Line, items: Vec<Item>, patience: Patience) -> Landed {
    let mut blocked = Vec::new();
    let mut parts = vec![items];
    while let Some(part) = parts.pop() {
        let Some(first) = part.first() else { continue };
        let stream = Arc::clone(&first.stream);
        let patience = if part.iter().any(|item| item.lock().is_some()) { patience } else { Patience::Long };
        let produced = produce_alone(database, &mut line, &stream, part.iter().map(|item| &item.entry), patience).await;
        match produced {
            Ok(produced) => part.into_iter().zip(produced).for_each(|(item, produced)| item.answer(Ok(produced))),
            Err(Failure::Blocked(_)) if patience == Patience::Blocked => blocked.extend(part),
            Err(Failure::Blocked(_)) if part.len() == 1 && patience == Patience::Shared => {
                let lock = part[0].lock();
                blocked.extend(part);
                // The others of its lock would wait as well. The top of the stack holds the earliest.
                for part in parts.iter_mut().rev() {
                    blocked.extend(part.extract_if(.., |item| item.lock() == lock));
                }
            }
            Err(Failure::Blocked(_) | Failure::Refused(_)) if part.len() > 1 => parts.extend(divided(part)),
            Err(failure) => {
                let error = Error::from(failure);
                part.into_iter().for_each(|item| item.answer(Err(error.clone())));
            }
        }
    }
    Landed { blocked, line }
}

/// What nothing can hold up apart from the rest, else two halves; the second comes first, since it is taken last.
fn divided(mut part: Vec<Item>) -> [Vec<Item>; 2] {
    if part.iter().any(|item| item.lock().is_some()) && part.iter().any(|item| item.lock().is_none()) {
        let (held, free): (Vec<_>, Vec<_>) = part.into_iter().partition(|item| item.lock().is_some());
        return [held, free];
    }
    let second = part.split_off(part.len() / 2);
    [second, part]
}
