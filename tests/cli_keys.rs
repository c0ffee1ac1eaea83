//! `keys` and `key`: what waits for what is told, and a key can be held, released, skipped, each twice without harm.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering::Relaxed},
};

use millstream::handler::{Concurrency, NewMessage};

use crate::support::{
    engine::{done, text},
    keyed::{LIMIT, all_done, failed, keyed, rejected, steps, version},
    verbs::Verbs,
    wait_for,
};

fn streams_toml(on_dead_letter: &str) -> String {
    format!(
        r#"
        [streams.orders]
        [groups.email]
        stream = "orders"
        handler = "email.wasm"
        on_dead_letter = "{on_dead_letter}"
        retry = {{ max_attempts = 3, base = "1h", max = "1h" }}
        "#
    )
}

const DEFERRED: &str = "select count(*) from {schema}.exception where state = 'deferred'";

/// D1, and the list: a head that waits, one that is dead, with cause, age and depth; skip lets each key go on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stuck_keys_are_listed_with_their_cause_and_can_be_skipped() {
    let verbs = Verbs::declare(&streams_toml("block")).await;
    let (trace, _, handler) = steps(|payload, _| match payload {
        "w0" => failed(),
        "d0" => rejected(),
        _ => done(),
    });
    let mut batch: Vec<_> = (0..5).map(|n| keyed("wa\u{1b}its", Concurrency::Ordered, &format!("w{n}"))).collect();
    batch.extend((0..3).map(|n| keyed("dead", Concurrency::Ordered, &format!("d{n}"))));
    verbs.project.produce("orders", &batch).await;
    let host = verbs.project.host_with(&[("email", handler)]).await;
    wait_for("both are stuck", LIMIT, async || verbs.project.number(DEFERRED).await == 6).await;
    wait_for("both are blocked", LIMIT, async || {
        verbs.project.number("select count(*) from {schema}.message_key_lease where blocked_by is not null").await == 2
    })
    .await;
    let keys = verbs.json(&["keys", "email"]);
    let told: Vec<_> = keys
        .as_array()
        .unwrap()
        .iter()
        .map(|key| {
            (
                key["key"].as_str().unwrap(),
                key["state"].as_str().unwrap(),
                key["depth"].as_i64().unwrap(),
                key["waits_for"].as_i64().unwrap(),
                key["class"].as_str().unwrap(),
            )
        })
        .collect();
    assert_eq!(told, [("wa\u{1b}its", "waiting", 5, 1, "failed"), ("dead", "blocked", 2, 6, "rejected")]);
    assert!(
        keys[0]["oldest_age_ms"].as_i64().is_some() && keys[0]["due_at"].is_string() && keys[1]["dead_letter"] == 1
    );
    assert_eq!(verbs.json(&["keys", "email", "--by", "age"])[0]["waits_for"], 1);
    assert_eq!(verbs.json(&["keys", "email", "--state", "blocked"])[0]["key"], "dead");
    assert_eq!(verbs.json(&["keys", "email", "--state", "leased"]), serde_json::json!([]));
    let text = verbs.text(&["keys", "email"]);
    assert!(text.contains("dead letter 1: rejected") && !text.contains('\u{1b}'), "{text}");

    verbs.refused(&["key", "skip", "email", "dead"], 2, &["--yes"]);
    assert_eq!(verbs.json(&["key", "skip", "email", "dead", "--yes"])["skipped"], serde_json::json!([6]));
    assert_eq!(verbs.json(&["key", "skip", "email", "wa\u{1b}its", "--yes"])["skipped"], serde_json::json!([1]));
    verbs.refused(&["key", "skip", "email", "dead", "--yes"], 1, &["waits for no message"]);
    all_done(&verbs.project).await;
    host.drain().await;
    let mut ended = trace.ended();
    ended.sort();
    assert_eq!(ended, ["d0", "d1", "d2", "w0", "w1", "w2", "w3", "w4"]);
    let skipped = "select count(*) from {schema}.dead_letter where message_id = 1 and class = 'skipped' and attempts = 1 and payload = 'w0'";
    assert_eq!(verbs.project.number(skipped).await, 1, "what was skipped is kept");
    assert_eq!(verbs.project.number("select count(*) from {schema}.dead_letter").await, 2);
}

/// A held key stands still, also over a restart of its hosts, while others go on; then it goes on in order.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_held_key_stands_still_until_it_is_resumed() {
    for mode in [Concurrency::Exclusive, Concurrency::Ordered] {
        let verbs = Verbs::declare(&streams_toml("block")).await;
        let (trace, _, handler) = steps(|_, _| done());
        assert_eq!(verbs.json(&["key", "pause", "email", "a"])["changed"], true);
        assert_eq!(verbs.json(&["key", "pause", "email", "a"])["changed"], false);
        let batch: Vec<_> = (0..20)
            .map(|n| {
                keyed(if n % 2 == 0 { "a" } else { "b" }, mode, &format!("{}{n}", if n % 2 == 0 { "a" } else { "b" }))
            })
            .collect();
        for _ in 0..2 {
            let host = verbs.project.host_with(&[("email", Arc::clone(&handler))]).await;
            if trace.started() == 0 {
                verbs.project.produce("orders", &batch).await;
            }
            wait_for("the other key", LIMIT, async || trace.ended().len() == 10).await;
            wait_for("the held key waits", LIMIT, async || verbs.project.number(DEFERRED).await == 10).await;
            host.drain().await;
        }
        assert_eq!(verbs.json(&["keys", "email", "--state", "paused"])[0]["depth"], 10);
        let host = verbs.project.host_with(&[("email", handler)]).await;
        assert_eq!(verbs.json(&["key", "resume", "email", "a"])["changed"], true);
        assert_eq!(verbs.json(&["key", "resume", "email", "a"])["changed"], false);
        all_done(&verbs.project).await;
        host.drain().await;
        let of_key: Vec<_> = trace.ended().into_iter().filter(|ended| ended.starts_with('a')).collect();
        assert_eq!(of_key, (0..20).step_by(2).map(|n| format!("a{n}")).collect::<Vec<_>>());
    }
}

/// D3, V1. A resting key goes on once it is released: first what was redriven, then what comes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_resting_key_is_released() {
    let verbs = Verbs::declare(&streams_toml("rest")).await;
    let mended = Arc::new(AtomicBool::new(false));
    let is_mended = Arc::clone(&mended);
    let (trace, _, handler) = steps(move |_, _| if is_mended.load(Relaxed) { done() } else { rejected() });
    let batch: Vec<_> = (0..5).map(|n| keyed("a", Concurrency::Ordered, &format!("a{n}"))).collect();
    verbs.project.produce("orders", &batch).await;
    let host = verbs.project.host_with(&[("email", handler)]).await;
    wait_for("all are dead", LIMIT, async || {
        verbs.project.number("select count(*) from {schema}.dead_letter").await == 5
    })
    .await;
    assert_eq!(verbs.json(&["keys", "email", "--state", "resting"])[0]["key"], "a");
    mended.store(true, Relaxed);
    assert_eq!(verbs.json(&["dead", "redrive", "--all"])["redriven"], 5);
    assert_eq!(verbs.json(&["key", "release", "email", "a"])["changed"], true);
    assert_eq!(verbs.json(&["key", "release", "email", "a"])["changed"], false);
    verbs.project.produce("orders", &[keyed("a", Concurrency::Ordered, "a5")]).await;
    all_done(&verbs.project).await;
    host.drain().await;
    assert_eq!(trace.ended()[1..], ["a0", "a1", "a2", "a3", "a4", "a5"]);
}

/// The winner and the history of a key, without payloads.
#[tokio::test]
async fn a_keys_head_and_history_are_shown() {
    let verbs = Verbs::declare(&streams_toml("block")).await;
    let ranked = |rank, payload: Option<&str>| NewMessage {
        rank: Some(rank),
        payload: payload.map(|payload| payload.as_bytes().to_vec()),
        ..version("k", Concurrency::Exclusive, "")
    };
    let versions = [ranked(1, Some("hunter2")), ranked(5, Some("hunter2!")), ranked(3, None)];
    verbs.project.produce("orders", &versions).await;
    verbs.project.produce("orders", &[text("other")]).await;
    let shown = verbs.json(&["key", "show", "orders", "k"]);
    assert_eq!((shown["head_id"].as_i64(), shown["head_rank"].as_i64()), (Some(2), Some(5)));
    let ids: Vec<_> = shown["versions"].as_array().unwrap().iter().map(|one| one["id"].as_i64().unwrap()).collect();
    assert_eq!(ids, [3, 2, 1]);
    assert_eq!((&shown["versions"][0]["is_tombstone"], &shown["versions"][1]["is_head"]), (&true.into(), &true.into()));
    let text = verbs.text(&["key", "show", "orders", "k"]);
    assert!(text.contains("newest") && !text.contains("hunter2"), "{text}");
    assert!(verbs.text(&["key", "show", "orders", "nobody"]).contains("no version"));
    verbs.refused(&["key", "show", "ordres", "k"], 1, &["did you mean \"orders\"?"]);
    verbs.refused(&["keys", "emial"], 1, &["did you mean \"email\"?"]);
}
