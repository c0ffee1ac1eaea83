//! Acknowledges every message and does nothing else: what `millstream bench` runs, so that it measures the host.

use millstream_guest::Message;

#[millstream_guest::handler]
fn handle(_message: Message) {}

#[cfg(test)]
mod tests {
    use millstream_guest::{
        Outcome,
        testing::{TestMessage, deliver},
    };

    use super::*;

    #[test]
    fn acknowledges_and_leaves_no_trace() {
        let delivered = deliver(handle, TestMessage::text("anything"));
        assert_eq!(delivered.outcome, Outcome::Done);
        assert!(delivered.produced.is_empty() && delivered.logged.is_empty());
    }
}
