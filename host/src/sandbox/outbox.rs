//! The `outbox` import: keeps what a handler wants produced until its delivery is acknowledged. Checks grants, bounds
//! and form at once, so that the handler gets the error and not the host. Produces nothing itself.

use std::time::Duration;

use super::{
    bindings::millstream::handler::outbox::{Concurrency, Host, NewMessage, ProduceError},
    settings::GroupSettings,
    state::State,
};
use crate::handler;

/// Longest message key and idempotency key, in bytes. The same bound as in SQL: both are in an index.
const KEY_BYTES_MAX: usize = 1024;

/// Longest routing key and content type, in bytes, as in SQL.
const ROUTING_KEY_BYTES_MAX: usize = 1024;
const CONTENT_TYPE_BYTES_MAX: usize = 255;

/// All headers of one message, in bytes, as SQL counts them: 8 more for each.
const HEADERS_BYTES_MAX: usize = 64 * 1024 - 16;

/// Longest time a message may be put off.
pub const DELAY_MAX: Duration = Duration::from_secs(366 * 24 * 60 * 60);

/// The messages of one delivery. Invariant: within the group's `limits`.
#[derive(Default)]
pub struct Outbox {
    messages: Vec<handler::NewMessage>,
    bytes: u64,
}

impl Outbox {
    /// Hands over what was produced and is empty for the next delivery.
    pub fn take(&mut self) -> Vec<handler::NewMessage> {
        self.bytes = 0;
        std::mem::take(&mut self.messages)
    }

    fn produce(&mut self, settings: &GroupSettings, to: String, message: NewMessage) -> Result<(), ProduceError> {
        let payload_bytes_max = match settings.produce.get(&to) {
            None => return Err(ProduceError::Denied),
            Some(None) => return Err(ProduceError::UnknownStream),
            Some(Some(max)) => *max,
        };
        check(&to, &message, payload_bytes_max).map_err(ProduceError::Invalid)?;
        self.take_room(settings, &message)?;
        self.messages.push(convert(to, message));
        Ok(())
    }

    fn take_room(&mut self, settings: &GroupSettings, message: &NewMessage) -> Result<(), ProduceError> {
        let limits = &settings.limits;
        if self.messages.len() >= limits.produced_messages as usize {
            let text = format!(
                "one delivery may produce {} messages (groups.{}.limits.produced_messages)",
                limits.produced_messages, settings.group
            );
            return Err(ProduceError::Limit(text));
        }
        let bytes = self.bytes + size(message);
        if bytes > limits.produced_bytes {
            let text = format!(
                "one delivery may produce {} bytes (groups.{}.limits.produced_bytes); with this message it would be {bytes}",
                limits.produced_bytes, settings.group
            );
            return Err(ProduceError::Limit(text));
        }
        self.bytes = bytes;
        Ok(())
    }
}

impl Host for State {
    fn produce(&mut self, to: String, message: NewMessage) -> wasmtime::Result<Result<(), ProduceError>> {
        Ok(self.outbox.produce(&self.settings, to, message))
    }
}

/// Everything that SQL would refuse at the acknowledgement is refused here, with what to do about it.
fn check(stream: &str, message: &NewMessage, payload_bytes_max: u64) -> Result<(), String> {
    check_key("key", message.key.as_deref())?;
    check_key("idempotency-key", message.idempotency_key.as_deref())?;
    let asks_for_mode = message.compaction == Some(true)
        || matches!(message.concurrency, Some(Concurrency::Exclusive | Concurrency::Ordered));
    if message.key.is_none() && asks_for_mode {
        return Err("`concurrency` and `compaction` need a key: give it one, or leave them out".into());
    }
    if message.rank.is_some_and(|rank| rank < 0) {
        return Err("rank is negative: ranks start at 0".into());
    }
    // Where compaction is left open the stream's key policy decides, and SQL refuses what it then finds.
    if message.rank.is_some() && (message.key.is_none() || message.compaction == Some(false)) {
        return Err("a rank picks the winner of a compacted key: leave it out, or ask for compaction".into());
    }
    check_attributes(message)?;
    let payload_bytes = message.payload.as_ref().map_or(0, Vec::len);
    if payload_bytes as u64 > payload_bytes_max {
        return Err(format!(
            "the payload has {payload_bytes} bytes and `{stream}` takes {payload_bytes_max} (streams.{stream}.max_payload): \
             send a reference to the data instead"
        ));
    }
    if message.delay.is_some_and(|delay_ms| Duration::from_millis(delay_ms) > DELAY_MAX) {
        return Err(format!("delay is longer than {} days", DELAY_MAX.as_secs() / 86_400));
    }
    Ok(())
}

fn check_attributes(message: &NewMessage) -> Result<(), String> {
    check_length("the routing key", message.routing_key.as_deref(), ROUTING_KEY_BYTES_MAX)?;
    check_length("the content type", message.content_type.as_deref(), CONTENT_TYPE_BYTES_MAX)?;
    let header_bytes = message.headers.iter().map(|(name, value)| name.len() + value.len() + 8).sum::<usize>();
    if header_bytes > HEADERS_BYTES_MAX {
        return Err(format!("the headers have {header_bytes} bytes and may have {HEADERS_BYTES_MAX}: use the payload"));
    }
    let texts = message.routing_key.iter().chain(&message.content_type);
    let headers = message.headers.iter().flat_map(|(name, value)| [name, value]);
    if texts.chain(headers).any(|text| text.contains('\0')) {
        return Err("a header, the routing key or the content type holds a NUL byte, which Postgres cannot store: \
                    put binary data into the payload"
            .into());
    }
    Ok(())
}

fn check_length(what: &str, text: Option<&str>, bytes_max: usize) -> Result<(), String> {
    match text.map_or(0, str::len) {
        bytes if bytes > bytes_max => Err(format!("{what} has {bytes} bytes and may have {bytes_max}")),
        _ => Ok(()),
    }
}

fn check_key(name: &str, key: Option<&str>) -> Result<(), String> {
    match key {
        None => Ok(()),
        Some("") => Err(format!("{name} is empty: leave it out or give it a value")),
        Some(key) if key.len() > KEY_BYTES_MAX => Err(format!(
            "{name} has {} bytes and may have {KEY_BYTES_MAX}: use a hash of it, and put the whole into a header",
            key.len()
        )),
        Some(key) if key.contains('\0') => Err(format!("{name} holds a NUL byte, which Postgres cannot store")),
        Some(_) => Ok(()),
    }
}

/// What a message counts against `limits.produced_bytes`: everything of it that is stored.
fn size(message: &NewMessage) -> u64 {
    let texts = [&message.key, &message.idempotency_key, &message.routing_key, &message.content_type];
    let texts = texts.into_iter().flatten().map(String::len).sum::<usize>();
    let headers = message.headers.iter().map(|(name, value)| name.len() + value.len()).sum::<usize>();
    (texts + headers + message.payload.as_ref().map_or(0, Vec::len)) as u64
}

fn convert(stream: String, message: NewMessage) -> handler::NewMessage {
    handler::NewMessage {
        stream,
        payload: message.payload,
        key: message.key,
        concurrency: message.concurrency.map(|concurrency| match concurrency {
            Concurrency::Parallel => handler::Concurrency::Parallel,
            Concurrency::Exclusive => handler::Concurrency::Exclusive,
            Concurrency::Ordered => handler::Concurrency::Ordered,
        }),
        compaction: message.compaction,
        rank: message.rank,
        idempotency_key: message.idempotency_key,
        routing_key: message.routing_key,
        headers: message.headers,
        content_type: message.content_type,
        delay: message.delay.map(Duration::from_millis),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message() -> NewMessage {
        NewMessage {
            payload: None,
            key: None,
            concurrency: None,
            compaction: None,
            rank: None,
            idempotency_key: None,
            routing_key: None,
            headers: Vec::new(),
            content_type: None,
            delay: None,
        }
    }

    #[track_caller]
    fn check_is(edit: impl FnOnce(&mut NewMessage), expected: Result<(), &str>) {
        let mut message = message();
        edit(&mut message);
        assert_eq!(check("s", &message, 10), expected.map_err(str::to_owned));
    }

    #[test]
    fn what_sql_would_refuse_is_refused_with_what_to_do() {
        let nul = Err(
            "a header, the routing key or the content type holds a NUL byte, which Postgres cannot store: put binary \
                       data into the payload",
        );
        let no_key = Err("`concurrency` and `compaction` need a key: give it one, or leave them out");
        let rank = Err("a rank picks the winner of a compacted key: leave it out, or ask for compaction");
        check_is(|_| {}, Ok(()));
        check_is(|new| new.key = Some("k".repeat(1024)), Ok(()));
        check_is(|new| new.concurrency = Some(Concurrency::Parallel), Ok(()));
        check_is(|new| new.payload = Some(vec![0; 10]), Ok(()));
        check_is(|new| new.delay = Some(366 * 86_400_000), Ok(()));
        check_is(|new| new.key = Some(String::new()), Err("key is empty: leave it out or give it a value"));
        check_is(
            |new| new.key = Some("k".repeat(1025)),
            Err("key has 1025 bytes and may have 1024: use a hash of it, and put the whole into a header"),
        );
        check_is(|new| new.key = Some("\0".into()), Err("key holds a NUL byte, which Postgres cannot store"));
        check_is(
            |new| new.idempotency_key = Some(String::new()),
            Err("idempotency-key is empty: leave it out or give it a value"),
        );
        check_is(|new| new.rank = Some(-1), Err("rank is negative: ranks start at 0"));
        check_is(
            |new| new.payload = Some(vec![0; 11]),
            Err(
                "the payload has 11 bytes and `s` takes 10 (streams.s.max_payload): send a reference to the data instead",
            ),
        );
        check_is(|new| new.delay = Some(366 * 86_400_000 + 1), Err("delay is longer than 366 days"));
        check_is(|new| new.headers = vec![("a".into(), "\0".into())], nul);
        check_is(|new| new.routing_key = Some("\0".into()), nul);
        check_is(|new| new.content_type = Some("\0".into()), nul);
        check_is(|new| new.concurrency = Some(Concurrency::Ordered), no_key);
        check_is(|new| new.concurrency = Some(Concurrency::Exclusive), no_key);
        check_is(|new| new.compaction = Some(true), no_key);
        check_is(|new| new.rank = Some(1), rank);
        let keyed = |new: &mut NewMessage| (new.key, new.rank) = (Some("k".into()), Some(1));
        check_is(keyed, Ok(()));
        check_is(|new| (keyed(new), new.compaction = Some(false)).0, rank);
        check_is(|new| (keyed(new), new.concurrency = Some(Concurrency::Ordered)).0, Ok(()));
    }

    #[test]
    fn attributes_are_bounded_as_in_sql() {
        check_is(|new| new.routing_key = Some("r".repeat(1024)), Ok(()));
        check_is(|new| new.content_type = Some("c".repeat(255)), Ok(()));
        check_is(|new| new.headers = vec![("h".into(), "v".repeat(HEADERS_BYTES_MAX - 9))], Ok(()));
        let over = "the routing key has 1025 bytes and may have 1024";
        check_is(|new| new.routing_key = Some("r".repeat(1025)), Err(over));
        check_is(
            |new| new.content_type = Some("c".repeat(256)),
            Err("the content type has 256 bytes and may have 255"),
        );
        let headers = "the headers have 65521 bytes and may have 65520: use the payload";
        check_is(|new| new.headers = vec![("h".into(), "v".repeat(HEADERS_BYTES_MAX - 8))], Err(headers));
    }

    #[test]
    fn everything_of_a_message_that_is_stored_counts() {
        let message = NewMessage {
            payload: Some(vec![0; 3]),
            key: Some("kk".into()),
            headers: vec![("a".into(), "bc".into())],
            routing_key: Some("r".into()),
            ..message()
        };
        assert_eq!(size(&message), 3 + 2 + 3 + 1);
    }
}
