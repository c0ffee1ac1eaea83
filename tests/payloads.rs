//! Odd payloads, headers and texts: delivered byte for byte or refused as documented, and nothing gets stuck.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
    time::Duration,
};

use millstream::{
    engine::{self, NewEntry, ProduceError},
    handler::{Finished, Message, NewMessage, Outcome},
};

use rustix::process::Signal;
use serde_json::json;

use crate::support::{
    PATIENCE, Program, database,
    engine::{Project, done},
    hosts::{dead_letters, number, settled, tell, up},
    verbs::Verbs,
    wait_for,
};

const LIMIT: Duration = Duration::from_secs(60);

const STREAMS: &str = r#"
    [streams.orders]
    max_payload = "64KiB"
    [groups.email]
    stream = "orders"
    handler = "email.wasm"
    retry = { max_attempts = 2, base = "1ms" }
"#;

fn named(name: &str, payload: Option<Vec<u8>>) -> NewMessage {
    NewMessage { routing_key: Some(name.into()), payload, ..NewMessage::default() }
}

fn odd_messages() -> Vec<NewMessage> {
    let headers = [
        ("", ""),
        ("UPPER lower", "x\u{7f}\u{1b}[0m\r\n\t"),
        ("ключ \"\\'", "🦀\u{10ffff}\u{fffe}"),
        ("traceparent", "00-a-b-01"),
    ];
    let headers = headers.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    vec![
        named("nul", Some(b"a\0b\0".to_vec())),
        named("not utf-8", Some(vec![0xff, 0xfe, 0xc0, 0x80, 0xed, 0xa0, 0x80])),
        named("backslash", Some(br"\x41\\".to_vec())),
        named("empty", Some(Vec::new())),
        named("tombstone", None),
        named("limit", Some((0..65_536_u32).map(|at| (at % 251) as u8).collect())),
        NewMessage {
            headers,
            key: Some("k\u{1}🦀".into()),
            content_type: Some("x/\u{202e}y".into()),
            ..named("odd text", Some(b"x".to_vec()))
        },
    ]
}

/// What goes in comes out, at the first delivery and after a retry, from the log and from a dead letter.
#[tokio::test]
async fn odd_payloads_and_texts_are_delivered_byte_for_byte() {
    let project = Project::declare(STREAMS).await;
    let seen: Arc<Mutex<HashMap<(String, u32), Message>>> = Arc::default();
    let notes = Arc::clone(&seen);
    let host = project
        .host("email", move |message: Message| {
            let attempt = message.attempt;
            notes.lock().unwrap().insert((message.routing_key.clone().unwrap(), attempt), message);
            if attempt == 1 { Finished::plain(Outcome::Retry { reason: "\0lone \u{fffd}\0".into() }) } else { done() }
        })
        .await;
    let messages = odd_messages();
    project.produce("orders", &messages).await;
    wait_for("both deliveries of each", LIMIT, async || seen.lock().unwrap().len() == 2 * messages.len()).await;
    wait_for("nothing is left over", LIMIT, async || project.left_over().await == 0).await;
    let seen = std::mem::take(&mut *seen.lock().unwrap());
    for message in &messages {
        for attempt in [1, 2] {
            let found = &seen[&(message.routing_key.clone().unwrap(), attempt)];
            let mut headers = message.headers.clone();
            headers.sort();
            let mut found_headers = found.headers.clone();
            found_headers.sort();
            assert!(found.payload == message.payload, "payload of {message:?}");
            assert_eq!(
                (&found.key, &found.content_type, found_headers),
                (&message.key, &message.content_type, headers)
            );
        }
    }
    host.drain().await;
}

const MIRROR: &str = r#"
    [host]
    listen = "127.0.0.1:0"
    [streams.orders]
    max_payload = "64KiB"
    [streams.copies]
    max_payload = "64KiB"
    [streams.playground]
    [groups.mirror]
    stream = "orders"
    handler = "mirror.wasm"
    config = { to = "copies" }
    allow = { produce = ["copies"] }
    [groups.worker]
    stream = "playground"
    handler = "flaky.wasm"
    retry = { max_attempts = 2, base = "1ms" }
"#;

/// The same through the real program and a real `.wasm`, which copies each to another stream; and what a handler says that is
/// no text is stored as text.
#[tokio::test]
async fn odd_payloads_go_through_a_sandbox_byte_for_byte() {
    let database = database().await;
    let mut program = Program::with_examples(MIRROR);
    up(&mut program, &database.url().await).await;
    let mut messages = odd_messages();
    messages.push(NewMessage { compaction: Some(true), rank: Some(7), key: Some("k".into()), ..named("ranked", None) });
    let entries: Vec<_> = messages.iter().map(|message| NewEntry { message, deliver_after: None }).collect();
    let mut tx = database.pool.begin().await.unwrap();
    engine::produce(&database, &mut tx, "orders", &entries).await.unwrap();
    tx.commit().await.unwrap();
    let copied = "select count(*) from {schema}.message_log_1"; // by name: copies, orders, playground
    let count = i64::try_from(messages.len()).unwrap();
    wait_for("all are copied", PATIENCE, async || number(&database, copied).await >= count).await;
    settled(&database).await;
    let same = "select count(*) from {schema}.message_log_2 a join {schema}.message_log_1 b using (routing_key)
        where (a.payload, a.message_key, a.headers, a.content_type, a.compaction_rank)
            is not distinct from (b.payload, b.message_key, b.headers, b.content_type, b.compaction_rank)";
    assert_eq!((number(&database, copied).await, number(&database, same).await), (count, count), "byte for byte, once");
    tell(&database, json!({"do": "bad-utf8"}), 1).await;
    wait_for("the dead letter", PATIENCE, async || !dead_letters(&database).await.is_empty()).await;
    settled(&database).await;
    let (_, class, error) = dead_letters(&database).await.remove(0);
    assert_eq!(class, "failed");
    assert!(error.contains("a NUL \u{fffd} in a reason"), "{error}");
    program.signal(Signal::TERM);
    assert!(program.ended(PATIENCE).await.success(), "{}", program.stderr());
}

/// What cannot be stored is refused as the message's fault, with its SQLSTATE, and nothing of its batch is stored.
#[tokio::test]
async fn what_cannot_be_stored_is_refused_as_the_messages_own_fault() {
    let project = Project::declare(STREAMS).await;
    let plain = || named("x", Some(Vec::new()));
    let pair = |name: &str, value: &str| vec![(name.to_owned(), value.to_owned())];
    for (sqlstate, message) in [
        ("MS004", named("x", Some(vec![0; 65_537]))),
        ("22P05", NewMessage { headers: pair("h", "a\0b"), ..plain() }),
        ("22P05", NewMessage { headers: pair("\0", "v"), ..plain() }),
        ("22021", NewMessage { key: Some("a\0b".into()), ..plain() }),
        ("22021", NewMessage { idempotency_key: Some("\0".into()), ..plain() }),
        ("22021", NewMessage { content_type: Some("\0".into()), ..plain() }),
    ] {
        let (good, bad) = (plain(), message);
        let entries = [&good, &bad].map(|message| NewEntry { message, deliver_after: None });
        let mut tx = project.database.pool.begin().await.unwrap();
        let refused = engine::produce(&project.database, &mut tx, "orders", &entries).await;
        let Err(ProduceError::Refused(refusal)) = refused else { panic!("{bad:?}: {refused:?}") };
        assert_eq!(refusal.sqlstate, sqlstate, "{bad:?}: {}", refusal.message);
    }
    assert_eq!(project.number("select count(*) from {schema}.message_log_1").await, 0);
}

/// Half of a surrogate pair is no text: Postgres does not take it for JSON, and neither does the program.
#[tokio::test]
async fn lone_surrogates_in_headers_are_refused() {
    let verbs = Verbs::declare(STREAMS).await;
    for half in [r"\ud800", r"\udc00 x", r"\udc00\ud800"] {
        let mut session = verbs.project.session().await;
        let produce = format!(r#"select {{schema}}.produce('orders', 'x', headers => '{{"h": "{half}"}}')"#);
        let error = session.try_run(&produce).await.expect_err("no text");
        assert_eq!(error.as_database_error().and_then(|error| error.code()).as_deref(), Some("22P02"), "{half}");
        let lines = format!("{{\"payload\": 1}}\n{{\"payload\": 2, \"headers\": {{\"h\": \"{half}\"}}}}\n");
        let answer = verbs.run_with_input(&["produce", "orders", "--ndjson"], lines.as_bytes());
        assert!(answer.code == 1 && answer.stderr.contains("line 2"), "{half}: {answer:?}");
    }
    assert_eq!(verbs.project.number("select count(*) from {schema}.message_log_1").await, 0);
}

/// A handler that asks for the impossible fails alone: its neighbours in the batch are settled.
#[tokio::test]
async fn an_impossible_effect_fails_its_own_delivery_only() {
    let project = Project::declare(STREAMS).await;
    let host = project
        .host("email", |message: Message| {
            let produced = match message.routing_key.as_deref() {
                Some("impossible") => {
                    vec![NewMessage { stream: "orders".into(), key: Some("\0".into()), ..NewMessage::default() }]
                }
                Some("far future") => {
                    vec![NewMessage { stream: "orders".into(), delay: Some(Duration::MAX), ..NewMessage::default() }]
                }
                _ => Vec::new(),
            };
            Finished { produced, ..done() }
        })
        .await;
    let names = ["a", "impossible", "b", "far future", "c"];
    project.produce("orders", &names.map(|name| named(name, Some(Vec::new())))).await;
    let dead = "select count(*) from {schema}.dead_letter where attempts = 2 and class = 'failed' and error like 'what it produced was refused%'";
    wait_for("the dead letters", LIMIT, async || project.number(dead).await == 2).await;
    wait_for("nothing is left over", LIMIT, async || project.left_over().await == 0).await;
    assert_eq!(project.number("select count(*) from {schema}.message_log_1").await, 5);
    host.drain().await;
}
