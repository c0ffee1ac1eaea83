//! The main job with closures as handlers: every message is delivered, and what happens to it is settled.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
    time::Duration,
};

use millstream::handler::{Failure, FailureClass, Finished, Message, NewMessage, Outcome};

use crate::support::{
    engine::{Project, done, numbered, text},
    wait_for,
};

const LIMIT: Duration = Duration::from_secs(30);

const ONE_GROUP: &str = r#"
    [streams.orders]
    [groups.email]
    stream = "orders"
    handler = "email.wasm"
    retry = { max_attempts = 3, base = "1ms", max = "5ms" }
"#;

/// Counts deliveries by payload.
#[derive(Clone, Default)]
struct Seen(Arc<Mutex<HashMap<String, Vec<u32>>>>);

impl Seen {
    fn note(&self, message: &Message) -> u32 {
        let payload = String::from_utf8(message.payload.clone().unwrap_or_default()).expect("text");
        let mut seen = self.0.lock().expect("no panic");
        seen.entry(payload).or_default().push(message.attempt);
        message.attempt
    }

    fn attempts(&self, payload: &str) -> Vec<u32> {
        self.0.lock().expect("no panic").get(payload).cloned().unwrap_or_default()
    }

    fn len(&self) -> usize {
        self.0.lock().expect("no panic").len()
    }
}

/// Goal: a producer that leaves its transaction open delays the messages that need its idempotency key, and nothing else.
#[tokio::test]
async fn a_group_goes_on_while_one_delivery_waits_for_an_idempotency_key() {
    let project = Project::declare(&format!("{ONE_GROUP}\n[streams.receipts]")).await;
    let mut producer = project.session().await;
    producer.run("begin; select {schema}.produce('receipts', 'r', idempotency_key => 'k')").await;
    let host = project
        .host("email", |message| {
            let is_first = message.payload.as_deref() == Some(b"first");
            let receipt = NewMessage { stream: "receipts".into(), idempotency_key: Some("k".into()), ..text("r") };
            Finished { produced: if is_first { vec![receipt] } else { Vec::new() }, ..done() }
        })
        .await;
    project.produce("orders", &[text("first")]).await;
    for batch in numbered(600).chunks(100) {
        project.produce("orders", batch).await;
    }
    let held = "select coalesce(sum(upper(r) - lower(r)), 0)::bigint from {schema}.claim, unnest(pending) r";
    let all_but_one = "select count(*) from {schema}.cursor where claimed = 601";
    wait_for("all others are settled", LIMIT, async || {
        project.number(all_but_one).await == 1 && project.number(held).await == 1
    })
    .await;
    producer.run("rollback").await;
    wait_for("nothing is left over", LIMIT, async || project.left_over().await == 0).await;
    assert_eq!(project.number("select count(*) from {schema}.message_log_2").await, 1);
    host.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_message_is_delivered_once_and_leaves_no_row() {
    let project = Project::declare(ONE_GROUP).await;
    let seen = Seen::default();
    let notes = seen.clone();
    let host = project
        .host("email", move |message| {
            notes.note(&message);
            done()
        })
        .await;
    for batch in numbered(2000).chunks(250) {
        project.produce("orders", batch).await;
    }
    wait_for("the deliveries", LIMIT, async || seen.len() == 2000).await;
    wait_for("nothing is left over", LIMIT, async || project.left_over().await == 0).await;
    assert!(seen.0.lock().unwrap().values().all(|attempts| *attempts == [1]), "delivered once, as attempt 1");
    assert_eq!(project.number("select count(*) from {schema}.dead_letter").await, 0);
    host.drain().await;
    assert_eq!(project.number("select count(*) from {schema}.host").await, 0, "the identity is given up");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn max_attempts_deliveries_then_one_dead_letter_with_its_copy() {
    let project = Project::declare(ONE_GROUP).await;
    let seen = Seen::default();
    let notes = seen.clone();
    let host = project
        .host("email", move |message| {
            notes.note(&message);
            let error = "trap: unreachable".to_owned();
            Finished::plain(Outcome::Failed(Failure { class: FailureClass::Panic, error }))
        })
        .await;
    let mut message = text("poison");
    message.key = Some("k".into());
    message.headers = vec![("h".into(), "v".into())];
    project.produce("orders", &[message]).await;
    wait_for("the deliveries", LIMIT, async || project.number("select count(*) from {schema}.dead_letter").await == 1)
        .await;
    assert_eq!(seen.attempts("poison"), [1, 2, 3]);
    let copies = project
        .number(
            "select count(*) from {schema}.dead_letter where attempts = 3 and class = 'panic' and error = 'trap: unreachable'
             and message_key = 'k' and headers = '{\"h\": \"v\"}' and payload = 'poison'",
        )
        .await;
    assert_eq!(copies, 1);
    wait_for("nothing is left over", LIMIT, async || project.left_over().await == 0).await;
    host.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn later_counts_no_attempt_and_reject_is_dead_at_once() {
    let project = Project::declare(ONE_GROUP).await;
    let seen = Seen::default();
    let notes = seen.clone();
    let host = project
        .host("email", move |message| {
            let payload = String::from_utf8(message.payload.clone().unwrap()).unwrap();
            notes.note(&message);
            Finished::plain(match payload.as_str() {
                "later" if notes.attempts("later").len() < 5 => Outcome::Later { delay: Duration::from_millis(1) },
                "reject" => Outcome::Reject { reason: "no such customer\0".into() },
                _ => Outcome::Done,
            })
        })
        .await;
    project.produce("orders", &[text("later"), text("reject")]).await;
    wait_for("the deliveries", LIMIT, async || seen.attempts("later").len() == 5).await;
    assert_eq!(seen.attempts("later"), [1; 5]);
    wait_for("nothing is left over", LIMIT, async || project.left_over().await == 0).await;
    assert_eq!(seen.attempts("reject"), [1]);
    let rejected = "select count(*) from {schema}.dead_letter where class = 'rejected' and error = 'no such customer'";
    assert_eq!(project.number(rejected).await, 1);
    host.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_handler_produced_commits_with_its_acknowledgement() {
    let project = Project::declare(
        r#"
        [streams.orders]
        [streams.receipts]
        [groups.email]
        stream = "orders"
        handler = "email.wasm"
        retry = { max_attempts = 2, base = "1ms" }
        [groups.archive]
        stream = "receipts"
        handler = "archive.wasm"
        "#,
    )
    .await;
    let seen = Seen::default();
    let notes = seen.clone();
    let email = move |message: Message| {
        let payload = message.payload.clone().unwrap();
        let to = if payload == b"13" { "nowhere" } else { "receipts" };
        let receipt = NewMessage { stream: to.into(), payload: Some(payload), ..NewMessage::default() };
        Finished { produced: vec![receipt], ..done() }
    };
    let archive = move |message: Message| {
        notes.note(&message);
        done()
    };
    let host = project.host_with(&[("email", Arc::new(email)), ("archive", Arc::new(archive))]).await;
    project.produce("orders", &numbered(300)).await;
    wait_for("the deliveries", LIMIT, async || seen.len() == 299).await;
    wait_for("nothing is left over", LIMIT, async || project.left_over().await == 0).await;
    assert!(seen.0.lock().unwrap().values().all(|attempts| *attempts == [1]));
    // The one that was refused failed alone, and says why.
    let refused = "select count(*) from {schema}.dead_letter where attempts = 2 and class = 'failed' and error like '%unknown stream%nowhere%'";
    assert_eq!(project.number(refused).await, 1);
    assert_eq!(project.number("select count(*) from {schema}.dead_letter").await, 1);
    host.drain().await;
}
