//! Settles of what had effects: how many run at a time, what they may not share, and that a group claims no more than it
//! settles. Method: every insert into the outgoing stream sleeps, and Postgres says how many of them sleep at a time.

use std::time::Duration;

use millstream::handler::{Concurrency, Finished, Message, NewMessage};
use tokio::time::sleep;

use crate::support::{
    PATIENCE,
    engine::{Project, done, numbered, text},
    wait_for,
};

const STREAMS: &str = r#"
[streams.orders]
[streams.receipts]
[groups.worker]
stream = "orders"
handler = "worker.wasm"
"#;

/// More than a group ever holds.
const MESSAGES: i64 = 6000;

/// The most that a group holds on one host (2,000), with what a turn under way may bring.
const HELD_MAX: i64 = 2000 + 500;

/// Runs a backlog whose deliveries each produce what `receipt` makes, and answers how many settles there were at a time, at
/// most. All must be settled once, and never more be held than a group may hold.
async fn at_a_time(receipt: fn(&str) -> NewMessage) -> i64 {
    let project = Project::declare(STREAMS).await;
    let messages = usize::try_from(MESSAGES).unwrap();
    project.produce("orders", &numbered(messages)).await;
    let stream = project.number("select id::bigint from {schema}.stream where name = 'receipts'").await;
    let slow = format!(
        "create function {{schema}}.slow() returns trigger language plpgsql as 'begin perform pg_sleep(0.25); return null; end';
         create trigger slow before insert on {{schema}}.message_log_{stream} for each statement execute function {{schema}}.slow()"
    );
    project.session().await.run(&slow).await;
    let handler = move |message: Message| {
        let number = String::from_utf8(message.payload.unwrap_or_default()).unwrap();
        Finished { produced: vec![NewMessage { stream: "receipts".into(), ..receipt(&number) }], ..done() }
    };
    let host = project.host("worker", handler).await;
    let (count, sleeping) = (
        format!("select count(*) from {{schema}}.message_log_{stream}"),
        "select count(*) from pg_stat_activity where datname = current_database() and wait_event = 'PgSleep'",
    );
    let (mut most, mut settled) = (0, 0);
    for _ in 0..3000 {
        most = most.max(project.number(sleeping).await);
        let delivered = i64::try_from(host.count("worker", "delivered")).unwrap();
        settled = project.number(&count).await;
        assert!(delivered - settled <= HELD_MAX, "{delivered} delivered, {settled} settled");
        if settled == MESSAGES {
            break;
        }
        sleep(Duration::from_millis(10)).await;
    }
    let distinct = format!("select count(distinct payload) from {{schema}}.message_log_{stream}");
    assert_eq!((settled, project.number(&distinct).await), (MESSAGES, MESSAGES));
    assert_eq!(host.count("worker", "fenced"), 0);
    host.drain().await;
    assert_eq!(project.left_over().await, 0);
    most
}

#[tokio::test]
async fn two_settles_run_at_a_time_and_what_is_not_settled_is_bounded() {
    assert_eq!(at_a_time(text).await, 2);
}

/// Producers of one ordered or compacted key wait for each other's commit: such settles come one after the other.
#[tokio::test]
async fn settles_that_produce_to_one_key_do_not_meet() {
    let ordered =
        |number: &str| NewMessage { key: Some("one".into()), concurrency: Some(Concurrency::Ordered), ..text(number) };
    let compacted = |number: &str| NewMessage { key: Some("one".into()), compaction: Some(true), ..text(number) };
    for receipt in [ordered as fn(&str) -> NewMessage, compacted] {
        assert_eq!(at_a_time(receipt).await, 1);
    }
}

/// Many ordered keys are locked all at once, for the whole stream, so that settles with other keys each meet as well. One
/// then waits for the other, and does not fall apart into one transaction for each delivery.
#[tokio::test]
async fn settles_with_many_ordered_keys_come_one_after_the_other() {
    let apart = |number: &str| NewMessage {
        key: Some(number.to_owned()),
        concurrency: Some(Concurrency::Ordered),
        ..text(number)
    };
    assert_eq!(at_a_time(apart).await, 1);
}

/// What another producer's open transaction holds up, however much it is, takes no place from the rest of its group.
#[tokio::test]
async fn more_blocked_deliveries_than_a_group_holds_do_not_stop_it() {
    const BLOCKED: usize = 2200;
    let project = Project::declare(STREAMS).await;
    let mut open = project.session().await;
    open.run("begin; select {schema}.produce('receipts', 'same', idempotency_key => 'once')").await;
    let handler = |message: Message| {
        let payload = String::from_utf8(message.payload.unwrap_or_default()).unwrap();
        let idempotency_key = (payload == "same").then(|| "once".to_owned());
        Finished {
            produced: vec![NewMessage { stream: "receipts".into(), idempotency_key, ..text(&payload) }],
            ..done()
        }
    };
    let host = project.host("worker", handler).await;
    project.produce("orders", &vec![text("same"); BLOCKED]).await;
    wait_for("the group has taken them all", PATIENCE, async || host.count("worker", "delivered") >= BLOCKED as u64)
        .await;
    project.produce("orders", &numbered(200)).await;
    let stream = project.number("select id::bigint from {schema}.stream where name = 'receipts'").await;
    let receipts = format!("select count(*) from {{schema}}.message_log_{stream}");
    wait_for("the others are settled", PATIENCE, async || project.number(&receipts).await == 200).await;
    open.run("rollback").await;
    wait_for("all is settled", PATIENCE, async || project.left_over().await == 0).await;
    assert_eq!(project.number(&receipts).await, 201, "one of the same");
    host.drain().await;
}
