//! Copies every message of its stream to another one, byte for byte: tombstones, headers and the key as well.

use std::error::Error;

use millstream_guest::{Message, NewMessage, config};

#[millstream_guest::handler]
fn handle(message: Message) -> Result<(), Box<dyn Error + Send + Sync>> {
    let to = config::get("to").ok_or("`config` of the group names no stream `to` copy to")?;
    let copy = NewMessage {
        payload: message.payload.clone(),
        key: message.key.clone(),
        // Only a compacted message has a rank.
        compaction: message.rank.map(|_| true),
        rank: message.rank,
        routing_key: message.routing_key.clone(),
        headers: message.headers.clone(),
        content_type: message.content_type.clone(),
        ..NewMessage::default()
    };
    message.produce(&to, copy)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use millstream_guest::{
        Outcome,
        testing::{TestMessage, deliver},
    };

    use super::*;

    #[test]
    fn copies_all_of_it() {
        let original = TestMessage::text("a\0b").key("k").header("h", "v").config("to", "copies");
        let delivered = deliver(handle, original);
        assert_eq!(delivered.outcome, Outcome::Done);
        let copy = &delivered.produced[0];
        assert_eq!((copy.to.as_str(), copy.message.payload.as_deref()), ("copies", Some(&b"a\0b"[..])));
        assert_eq!(copy.message.key.as_deref(), Some("k"));
        assert_eq!(copy.message.headers, [("h".to_owned(), "v".to_owned())]);
    }

    #[test]
    fn a_tombstone_is_copied_as_one() {
        let delivered = deliver(handle, TestMessage::tombstone("k").config("to", "copies"));
        assert_eq!(delivered.produced[0].message.payload, None);
    }

    #[test]
    fn without_a_target_it_is_retried() {
        let delivered = deliver(handle, TestMessage::text("x"));
        assert!(matches!(delivered.outcome, Outcome::Retry { .. }));
    }
}
