//! What handlers write becomes log lines with the delivery's fields, within bounds. Method: the `flaky` and `hello`
//! examples on a runtime of one thread, whose log lines are collected.

use millstream::handler::Outcome;
use tracing::Level;

use crate::support::{
    handlers::{deliver, flaky},
    log_lines::LogLines,
};

#[tokio::test]
async fn a_flood_is_cut_and_the_message_is_fine() {
    let handler = flaky(|group| group.limits.log_bytes = 10 * 1024).await;
    let logs = LogLines::of_this_thread();
    let finished = deliver(&handler, r#"{"do": "flood-stdout", "bytes": 104857600}"#).await;
    assert_eq!(finished.outcome, Outcome::Done);
    let lines = logs.of_guests();
    assert_eq!(lines.len(), 11);
    assert!(lines[..10].iter().all(|line| line.level == Level::INFO && line.message.len() == 1023));
    let dropped = 100 * 1024 * 1024 - 10 * 1024;
    assert_eq!(lines[10].message, format!("[{dropped} bytes of output dropped: limits.log_bytes is 10240 a delivery]"));
}

#[tokio::test]
async fn lines_carry_who_wrote_them() {
    let handler = flaky(|_| {}).await;
    let logs = LogLines::of_this_thread();
    deliver(&handler, r#"{"do": "log", "count": 2}"#).await;
    deliver(&handler, r#"{"do": "bad-utf8"}"#).await;
    let lines = logs.of_guests();
    let texts: Vec<_> = lines.iter().map(|line| line.message.as_str()).collect();
    assert!(texts[0].ends_with("line 1 of 2") && texts[1].ends_with("line 2 of 2"), "{texts:?}");
    assert_eq!(texts[2], "not text: \u{fffd}\u{fffd}\u{fffd}\u{fffd}\u{fffd}, and a NUL: \u{fffd}");
    assert_eq!(lines[2].level, Level::WARN);
    for field in ["group=g ", "message_id=1 ", "attempt=1 ", &format!("digest={} ", handler.digest())] {
        assert!(lines[2].fields.contains(field), "{field} is not in {}", lines[2].fields);
    }
    assert!(lines[2].fields.contains("stream=\"stderr\""), "{}", lines[2].fields);
}

/// A panic of Rust begins with a blank line.
#[tokio::test]
async fn no_line_of_the_log_is_blank() {
    let handler = flaky(|_| {}).await;
    let logs = LogLines::of_this_thread();
    deliver(&handler, r#"{"do": "panic"}"#).await;
    let lines = logs.of_guests();
    assert!(lines.iter().any(|line| line.message.contains("panicked at")), "{lines:?}");
    assert!(lines.iter().all(|line| !line.message.trim().is_empty()), "{lines:?}");
}

#[tokio::test]
async fn payloads_and_secrets_are_never_logged() {
    let handler = flaky(|group| {
        group.config.insert("TOKEN".into(), "hunter2".into());
    })
    .await;
    let logs = LogLines::of_this_thread();
    for payload in [r#"{"do": "panic"}"#, r#"{"do": "dance", "x": "s3cret"}"#, r#"{"do": "report"}"#] {
        let finished = deliver(&handler, payload).await;
        assert!(!format!("{finished:?}").contains("s3cret"), "{finished:?}");
    }
    for line in logs.all() {
        assert!(!format!("{line:?}").contains("hunter2") && !format!("{line:?}").contains("s3cret"), "{line:?}");
    }
}
