//! Logs a line for every message: its id, its key and its size, never its payload.

use millstream_guest::{Message, info};

#[millstream_guest::handler]
fn handle(message: Message) {
    let key = message.key.as_deref().unwrap_or("none");
    match &message.payload {
        Some(payload) => info!("message {} of {}: key {key}, {} bytes", message.id, message.stream, payload.len()),
        None => info!("message {} of {}: key {key} was deleted", message.id, message.stream),
    }
}

#[cfg(test)]
mod tests {
    use millstream_guest::{
        Outcome,
        testing::{TestMessage, deliver},
    };

    use super::*;

    #[test]
    fn logs_key_and_size_and_never_the_payload() {
        let delivered = deliver(handle, TestMessage::text("a secret").key("o-1"));
        assert_eq!(delivered.outcome, Outcome::Done);
        let lines: Vec<_> = delivered.logged.iter().map(|line| line.text.as_str()).collect();
        assert_eq!(lines, ["message 1 of test: key o-1, 8 bytes"]);
    }

    #[test]
    fn logs_deletions() {
        let delivered = deliver(handle, TestMessage::tombstone("o-1"));
        assert_eq!(delivered.logged[0].text, "message 1 of test: key o-1 was deleted");
    }
}
