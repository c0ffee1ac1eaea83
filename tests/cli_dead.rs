//! `dead`: list, show, redrive and discard, each twice where that could do harm.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use millstream::{
    engine,
    handler::{Failure, FailureClass, Finished, Message, Outcome},
};
use serde_json::Value;

use crate::support::{
    engine::{Host, done, text},
    verbs::Verbs,
    wait_for,
};

const LIMIT: Duration = Duration::from_secs(60);

const STREAMS_TOML: &str = r#"
[streams.orders]
[groups.archive]
stream = "orders"
handler = "archive.wasm"
[groups.email]
stream = "orders"
handler = "email.wasm"
retry = { max_attempts = 2, base = "1ms", max = "1ms" }
"#;

/// What a payload must never show up in.
const SECRET: &str = "hunter2";

fn fail(message: Message) -> Finished {
    match message.payload.as_deref() {
        Some(b"panic") => {
            let error = format!("panicked\n  at line 1\n  at {} line 2", "é".repeat(80));
            Finished::plain(Outcome::Failed(Failure { class: FailureClass::Panic, error }))
        }
        _ => Finished::plain(Outcome::Reject { reason: "not\u{1b}[31m now".into() }),
    }
}

/// `count` messages that `email` gave up on, each with key `k-N`; the first one panicked.
async fn with_dead_letters(count: usize) -> Verbs {
    let verbs = Verbs::declare(STREAMS_TOML).await;
    let mut messages: Vec<_> = (1..=count).map(|number| text(&format!("{SECRET} {number}"))).collect();
    messages[0] = text("panic");
    for (message, number) in messages.iter_mut().zip(1..) {
        message.key = Some(format!("k-{number}"));
        message.headers = vec![("token".into(), SECRET.into())];
    }
    verbs.project.produce("orders", &messages).await;
    let host = verbs.project.host("email", fail).await;
    let dead = "select count(*) from {schema}.dead_letter";
    wait_for("they are dead", LIMIT, async || verbs.project.number(dead).await == count as i64).await;
    host.drain().await;
    verbs
}

/// A host that takes everything and notes attempt, and whether it was redriven.
async fn taking_host(verbs: &Verbs) -> (Host, Arc<Mutex<Vec<(u32, bool)>>>) {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let notes = Arc::clone(&seen);
    let host = verbs.project.host("email", move |message| {
        notes.lock().expect("no panic").push((message.attempt, message.redriven));
        done()
    });
    (host.await, seen)
}

fn ids(list: &Value) -> Vec<i64> {
    list.as_array().expect("a list").iter().map(|letter| letter["id"].as_i64().expect("an id")).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn list_filters_and_pages_newest_first() {
    let verbs = with_dead_letters(5).await;
    let all = verbs.json(&["dead", "list"]);
    let newest_first = ids(&all);
    assert!(newest_first.len() == 5 && newest_first.is_sorted_by(|left, right| left > right), "{newest_first:?}");
    let fields: Vec<&String> = all[0].as_object().expect("an object").keys().collect();
    let mut contract =
        ["id", "group", "stream", "message_id", "message_key", "attempts", "class", "error", "died_at", "replayed_at"];
    contract.sort_unstable();
    assert_eq!(fields, contract);
    let list = |arguments: &[&str]| {
        let arguments: Vec<&str> = ["dead", "list"].iter().chain(arguments).copied().collect();
        ids(&verbs.json(&arguments)).len()
    };
    assert_eq!(list(&["--group", "email"]), 5);
    assert_eq!(list(&["--group", "archive"]), 0, "one group's are not another's");
    assert_eq!((list(&["--class", "panic"]), list(&["--class", "rejected"]), list(&["--class", "timeout"])), (1, 4, 0));
    assert_eq!((list(&["--key", "k-2"]), list(&["--key", "nobody"])), (1, 0));
    assert_eq!((list(&["--message", "2..4"]), list(&["--message", "3"]), list(&["--message", "9.."])), (3, 1, 0));
    assert_eq!((list(&["--since", "1h"]), list(&["--since", "1ms"])), (5, 0));
    let first = verbs.run(&["dead", "list", "--limit", "2", "--output", "json"]);
    let next = first.stderr.trim().strip_prefix("there may be more: add ").expect("how to go on");
    let next: Vec<&str> = ["dead", "list", "--limit", "9"].into_iter().chain(next.split(' ')).collect();
    assert_eq!(ids(&verbs.json(&next)), newest_first[2..]);
    let table = verbs.text(&["dead", "list"]);
    assert!(table.contains("rejected") && table.contains("not\\u{1b}[31m now") && !table.contains("line 1"), "{table}");
    verbs.refused(&["dead", "list", "--group", "emial"], 1, &["did you mean \"email\"?"]);
    verbs.refused(&["dead", "list", "--message", "9..1"], 2, &["write 1..9"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn show_tells_everything_and_the_payload_only_when_asked() {
    let verbs = with_dead_letters(2).await;
    let newest_first = ids(&verbs.json(&["dead", "list"]));
    let (rejected, panicked) = if verbs.json(&["dead", "show", &newest_first[0].to_string()])["class"] == "panic" {
        (newest_first[1].to_string(), newest_first[0].to_string())
    } else {
        (newest_first[0].to_string(), newest_first[1].to_string())
    };
    let letter = verbs.json(&["dead", "show", &rejected]);
    assert_eq!((&letter["payload_bytes"], &letter["headers"]["token"]), (&9.into(), &SECRET.into()));
    assert_eq!((&letter["attempts"], &letter["deaths"], &letter["redriven_at"]), (&1.into(), &1.into(), &Value::Null));
    assert_eq!(verbs.json(&["dead", "show", "--group", "email", "--message", "2"]), letter);
    let text = verbs.text(&["dead", "show", &panicked]);
    assert!(
        text.contains("class         panic\nerror\n  panicked\n    at line 1\n") && text.contains("line 2"),
        "{text}"
    );
    assert!(text.contains("attempts      2\n") && text.contains("sha256 "), "{text}");
    assert_eq!(verbs.text(&["dead", "show", &rejected, "--payload"]), format!("{SECRET} 2"), "byte for byte");
    verbs.refused(&["dead", "show", "999"], 1, &["no dead letter 999", "dead list"]);
    verbs.refused(&["dead", "show", "--group", "email", "--message", "77"], 1, &["message 77 is not among"]);
    verbs.refused(&["dead", "show"], 2, &["Usage"]);
    verbs.refused(&["dead", "show", "1", "--payload", "--output", "json"], 2, &["leave --output out"]);
}

/// A payload is in no output of any verb, logs included, unless somebody asked for it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_verb_shows_a_payload_that_nobody_asked_for() {
    let verbs = with_dead_letters(3).await;
    let id = verbs.json(&["dead", "list"])[0]["id"].to_string();
    for verb in [
        &["groups"][..],
        &["status"],
        &["tail", "orders", "--from", "earliest"],
        &["dead", "list"],
        &["dead", "show", &id],
        &["dead", "redrive", "--all", "--dry-run"],
        &["dead", "discard", "--all", "--dry-run"],
        &["doctor"],
    ] {
        for format in ["table", "json"] {
            let arguments: Vec<&str> = verb.iter().copied().chain(["--output", format, "-vv"]).collect();
            let answer = verbs.run(&arguments);
            // The headers of one dead letter are part of what `show` shows to machines.
            let stdout = answer.stdout.replace(&format!("\"token\": \"{SECRET}\""), "");
            assert!(!stdout.contains(SECRET) && !answer.stderr.contains(SECRET), "{verb:?}: {answer:?}");
        }
    }
    let line = format!("{{\"payload\": \"{SECRET}\", \"key\": \"\"}}\n{{\"payload\": {SECRET}}}\n");
    for lines in [line.lines().next().expect("two lines"), line.lines().last().expect("two lines")] {
        let answer = verbs.run_with_input(&["produce", "orders", "--ndjson", "-vv"], lines.as_bytes());
        assert!(answer.code == 1 && !answer.stderr.contains(SECRET), "{answer:?}");
    }
}

/// Must show: a redrive delivers it again with attempts from 1; twice the same redrive delivers once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn redrive_twice_delivers_once() {
    let verbs = with_dead_letters(3).await;
    let dry = verbs.json(&["dead", "redrive", "--all", "--dry-run"]);
    assert_eq!((&dry["redriven"], &dry["dry_run"]), (&3.into(), &true.into()));
    assert_eq!(verbs.project.number("select count(*) from {schema}.exception").await, 0, "a dry run changes nothing");
    let id = verbs.json(&["dead", "list", "--class", "panic"])[0]["id"].to_string();
    assert_eq!(verbs.text(&["dead", "redrive", &id, &id]), "redriven 1 dead letter\n");
    let again = verbs.json(&["dead", "redrive", &id]);
    assert_eq!((&again["redriven"], &again["skipped"]), (&0.into(), &1.into()));
    assert_eq!(ids(&verbs.json(&["dead", "list"])).len(), 2, "one under way is no open dead letter");
    assert_eq!(verbs.json(&["groups", "email"])[0]["dead"], 2);
    assert!(verbs.json(&["dead", "show", &id])["redriven_at"].is_string());
    // Two at once share the rest between them.
    let group = verbs.project.group("email").await.id;
    let picked = engine::pick_dead(&verbs.project.database, group, &engine::DeadFilter::default()).await.unwrap();
    let other = verbs.project.database.another_host().await;
    let (left, right) = tokio::join!(
        engine::redrive(&verbs.project.database, &picked, false, |_| {}),
        engine::redrive(&other, &picked, false, |_| {})
    );
    assert_eq!(left.unwrap().redriven + right.unwrap().redriven, 2);
    other.close().await;
    let (host, seen) = taking_host(&verbs).await;
    let left = "select (select count(*) from {schema}.dead_letter) + (select count(*) from {schema}.exception)";
    wait_for("they are done", LIMIT, async || verbs.project.number(left).await == 0).await;
    assert_eq!(*seen.lock().unwrap(), [(1, true); 3], "each once, from attempt 1");
    host.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_that_dies_again_goes_back_to_its_row() {
    let verbs = with_dead_letters(1).await;
    let id = verbs.json(&["dead", "list"])[0]["id"].to_string();
    verbs.text(&["dead", "redrive", "--group", "email", "--class", "panic"]);
    let host = verbs.project.host("email", fail).await;
    let dead_again = "select count(*) from {schema}.dead_letter where redriven_at is null and deaths = 2";
    wait_for("it is dead again", LIMIT, async || verbs.project.number(dead_again).await == 1).await;
    host.drain().await;
    let letter = verbs.json(&["dead", "show", &id]);
    assert_eq!((&letter["deaths"], &letter["attempts"]), (&2.into(), &2.into()));
    assert_eq!(verbs.json(&["dead", "redrive", &id])["redriven"], 1, "and can be redriven anew");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn discard_asks_and_deletes_what_is_open() {
    let verbs = with_dead_letters(4).await;
    verbs.refused(&["dead", "discard", "--all"], 2, &["refuse to discard 4 dead letters for good", "add --yes"]);
    assert_eq!(verbs.json(&["dead", "discard", "--key", "k-3", "--dry-run"])["discarded"], 1);
    let newest_first = ids(&verbs.json(&["dead", "list"]));
    let redriven = newest_first[3].to_string();
    verbs.text(&["dead", "redrive", &redriven]);
    let answer = verbs.json(&["dead", "discard", "--yes", &redriven, &newest_first[0].to_string()]);
    assert_eq!((&answer["discarded"], &answer["skipped"]), (&1.into(), &1.into()));
    assert_eq!(verbs.text(&["dead", "discard", "--all", "--yes", "--group", "email"]), "discarded 2 dead letters\n");
    assert_eq!(verbs.text(&["dead", "discard", "--all", "--yes"]), "discarded 0 dead letters\n");
    let (host, seen) = taking_host(&verbs).await;
    let left = "select count(*) from {schema}.dead_letter";
    wait_for("the redriven one is done", LIMIT, async || verbs.project.number(left).await == 0).await;
    assert_eq!(seen.lock().unwrap().len(), 1, "what was discarded is never delivered");
    host.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_group_never_touches_what_is_anothers() {
    let verbs = with_dead_letters(2).await;
    let id = verbs.json(&["dead", "list"])[0]["id"].to_string();
    for verb in ["redrive", "discard"] {
        verbs.refused(&["dead", verb, &id, "--group", "archive"], 1, &["belongs to another group"]);
        verbs.refused(&["dead", verb, "4711", &id], 1, &["no dead letter 4711"]);
        verbs.refused(&["dead", verb], 2, &["which ones?"]);
        verbs.refused(&["dead", verb, "--group", "email"], 2, &["which ones?"]);
        verbs.refused(&["dead", verb, "--all", "--class", "panic"], 2, &["--class"]);
        verbs.refused(&["dead", verb, "--all", "--group", "nobody"], 1, &["no group \"nobody\""]);
        let answer = verbs.run(&["dead", verb, "--all", "--group", "archive"]);
        assert!(answer.code == 0 && answer.stdout.ends_with(" 0 dead letters\n"), "{answer:?}");
    }
    assert_eq!(ids(&verbs.json(&["dead", "list"])).len(), 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_class_that_there_is_none_of_is_refused() {
    let verbs = Verbs::declare(STREAMS_TOML).await;
    for verb in ["list", "redrive", "discard"] {
        verbs.refused(&["dead", verb, "--class", "pannic"], 2, &["'pannic'", "panic, timeout"]);
    }
}
