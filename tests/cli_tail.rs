//! `tail`: reads a stream without a group, and shows payloads only when asked.

use std::time::Duration;

use crate::support::{
    engine::{numbered, text},
    verbs::Verbs,
    wait_for,
};

const STREAMS_TOML: &str = "[streams.orders]\n[groups.email]\nstream = \"orders\"\nhandler = \"email.wasm\"\n";

fn ids(answer: &str) -> Vec<i64> {
    let id = |line: &str| serde_json::from_str::<serde_json::Value>(line).expect("JSON lines")["id"].as_i64();
    answer.lines().map(|line| id(line).expect("an id")).collect()
}

#[tokio::test]
async fn it_begins_where_it_is_told_and_takes_nothing() {
    let verbs = Verbs::declare(STREAMS_TOML).await;
    assert_eq!(verbs.text(&["tail", "orders"]).lines().count(), 1, "only titles");
    verbs.project.produce("orders", &numbered(30)).await;
    let read = |arguments: &[&str]| {
        let arguments: Vec<&str> = ["tail", "orders", "--output", "json"].iter().chain(arguments).copied().collect();
        ids(&verbs.text(&arguments))
    };
    assert_eq!(read(&[]), (21..=30).collect::<Vec<_>>());
    assert_eq!(read(&["--from", "earliest"]), (1..=30).collect::<Vec<_>>());
    assert_eq!(read(&["--from", "28"]), [28, 29, 30]);
    assert!(read(&["--from", "latest"]).is_empty() && read(&["--from", "31"]).is_empty());
    assert_eq!(verbs.json(&["groups"])[0]["lag"], 30, "the group has lost nothing");
    verbs.refused(&["tail", "order"], 1, &["no stream \"order\"; did you mean \"orders\"?"]);
    verbs.refused(&["tail", "orders", "--from", "yesterday"], 2, &["earliest or latest"]);
}

#[tokio::test]
async fn payloads_are_shown_only_when_asked() {
    let verbs = Verbs::declare(STREAMS_TOML).await;
    let mut binary = text("");
    binary.payload = Some(vec![0, 255, 10]);
    let tombstone = millstream::handler::NewMessage { key: Some("k\u{1b}[31m".into()), ..binary.clone() };
    let tombstone = millstream::handler::NewMessage { payload: None, ..tombstone };
    verbs.project.produce("orders", &[text("hunter2\nline"), binary, tombstone]).await;
    let plain = verbs.text(&["tail", "orders"]);
    assert!(!plain.contains("hunter2") && plain.contains("12 B") && plain.contains("tombstone"), "{plain}");
    assert!(plain.contains("k\\u{1b}[31m"), "what a key holds does not reach the terminal: {plain}");
    let shown = verbs.text(&["tail", "orders", "--payload"]);
    assert!(shown.contains("  hunter2\n            line\n") && shown.contains("base64 AP8K"), "{shown}");
    let lines = verbs.text(&["tail", "orders", "--payload", "--output", "json"]);
    let lines: Vec<serde_json::Value> = lines.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    assert_eq!((&lines[0]["payload"], &lines[1]["payload_base64"]), (&"hunter2\nline".into(), &"AP8K".into()));
    assert_eq!((&lines[2]["payload_bytes"], lines[2].get("payload")), (&serde_json::Value::Null, None));
}

#[tokio::test]
async fn following_shows_what_comes_in_order() {
    let mut verbs = Verbs::declare(STREAMS_TOML).await;
    let url = verbs.project.database.url().await;
    verbs.program.start(&[
        "tail",
        "orders",
        "--follow",
        "--from",
        "latest",
        "--output",
        "json",
        "--database-url",
        &url,
    ]);
    let limit = Duration::from_secs(30);
    // It has begun when it shows what comes.
    let shown = |verbs: &Verbs| ids(&verbs.program.stdout());
    wait_for("the first message", limit, async || {
        verbs.project.produce("orders", &numbered(1)).await;
        !shown(&verbs).is_empty()
    })
    .await;
    // A transaction that commits late, below a message that is there already, still comes in its place.
    let late = text("late");
    let entries = [millstream::engine::NewEntry { message: &late, deliver_after: None }];
    let mut slow = verbs.project.database.pool.begin().await.unwrap();
    let id = millstream::engine::produce(&verbs.project.database, &mut slow, "orders", &entries).await.unwrap()[0].id;
    verbs.project.produce("orders", &numbered(1)).await;
    slow.commit().await.unwrap();
    wait_for("both", limit, async || shown(&verbs).ends_with(&[id, id + 1])).await;
    verbs.program.signal(rustix::process::Signal::TERM);
    verbs.program.ended(limit).await;
}
