//! `pause`, `resume` and `seek` on the command line: what they answer, what they ask, what they refuse.

use std::sync::{
    Arc,
    atomic::{AtomicU32, Ordering::Relaxed},
};

use millstream::handler::Concurrency;
use serde_json::{Value, json};

use crate::support::{
    PATIENCE,
    engine::{done, numbered, text},
    keyed::{all_done, steps, version},
    verbs::Verbs,
    wait_for,
};

const STREAMS_TOML: &str = r#"
[streams.orders]
[groups.email]
stream = "orders"
handler = "email.wasm"
"#;

/// A group that has handled seven messages.
async fn with_seven_done() -> Verbs {
    let verbs = Verbs::declare(STREAMS_TOML).await;
    let count = Arc::new(AtomicU32::new(0));
    let counts = Arc::clone(&count);
    let host = verbs
        .project
        .host("email", move |_| {
            counts.fetch_add(1, Relaxed);
            done()
        })
        .await;
    verbs.project.produce("orders", &numbered(7)).await;
    wait_for("all are handled", PATIENCE, async || count.load(Relaxed) == 7).await;
    host.drain().await;
    verbs
}

#[tokio::test]
async fn pause_and_resume_say_what_they_changed_and_are_shown() {
    let verbs = Verbs::declare(STREAMS_TOML).await;
    let paused = verbs.json(&["pause", "email"]);
    let at = paused["paused_at"].as_str().expect("a time").to_owned();
    assert_eq!(paused, json!({ "group": "email", "paused": true, "paused_at": at, "changed": true }));
    let again = verbs.json(&["pause", "email"]);
    assert_eq!(again, json!({ "group": "email", "paused": true, "paused_at": at, "changed": false }));
    assert_eq!(verbs.text(&["pause", "email"]), format!("email was paused already, since {at}\n"));
    assert_eq!(verbs.json(&["groups"])[0]["paused"], true);
    assert!(verbs.text(&["groups"]).contains("  paused  ") && verbs.text(&["status"]).contains("  paused"));
    verbs.text(&["apply"]);
    assert_eq!(verbs.json(&["groups"])[0]["paused"], true, "declaring changes nothing about it");
    assert_eq!(verbs.text(&["resume", "email"]), "resumed email\n");
    let again = verbs.json(&["resume", "email"]);
    assert_eq!(again, json!({ "group": "email", "paused": false, "paused_at": null, "changed": false }));
    assert_eq!(verbs.json(&["groups"])[0]["paused"], false);
    for verb in ["pause", "resume"] {
        verbs.refused(&[verb, "emial"], 1, &["no group \"emial\"", "did you mean \"email\"?"]);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_seek_tells_where_it_leads_and_a_dry_run_does_the_same_without_doing_it() {
    let verbs = with_seven_done().await;
    let position = async || {
        verbs.project.number("select claimed * 100 + epoch from {schema}.cursor, {schema}.consumer_group").await
    };
    let would = verbs.json(&["seek", "email", "--to", "3", "--dry-run"]);
    let expected = json!({
        "group": "email", "dry_run": true, "position_before": 7, "position": 2, "first_id": 3,
        "first_produced_at": would["first_produced_at"], "removed": false, "beyond_max_lag": false,
        "survivors_only": false, "in_flight": 0,
        "retrying": 0, "delayed": 0, "deferred": 0, "dead_letters_replayed": 0, "dead_letters_reopened": 0, "epoch": 1,
    });
    assert_eq!(would, expected);
    assert!(would["first_produced_at"].as_str().is_some_and(|time| time.ends_with('Z')));
    let text = verbs.text(&["seek", "email", "--to", "3", "--dry-run"]);
    assert!(text.starts_with("would send email back from position 7 to 2: it begins with message 3 of 2"), "{text}");
    assert_eq!(position().await, 700);
    let done = verbs.json(&["seek", "email", "--to", "3", "--yes"]);
    let mut expected = expected;
    expected["dry_run"] = Value::Bool(false);
    assert_eq!((done, position().await), (expected, 201));
    let text = verbs.text(&["seek", "email", "--to", "latest", "--yes"]);
    assert_eq!(text, "sent email on from position 2 to 7: it begins with what is produced next\n");
    let earliest = verbs.json(&["seek", "email", "--to", "earliest", "--yes"]);
    assert_eq!((&earliest["position"], &earliest["first_id"]), (&0.into(), &1.into()));
    let time = verbs.json(&["seek", "email", "--to", "2026-01-01T01:00:00+01:00", "--yes"]);
    assert_eq!((&time["position"], &time["first_id"], &time["removed"]), (&0.into(), &1.into(), &false.into()));
    assert_eq!(position().await, 4);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_seek_refuses_what_it_cannot_mean_and_asks_first() {
    let verbs = with_seven_done().await;
    let seek = |to: &'static str| ["seek", "email", "--to", to, "--yes"];
    verbs.refused(&["seek", "email", "--to", "3"], 2, &["refuse to send email back from position 7 to 2", "add --yes"]);
    verbs.refused(&["seek", "email"], 2, &["--to"]);
    verbs.refused(&seek("yesterday"), 2, &["write an id such as 17, a time with its zone"]);
    verbs.refused(&seek("0"), 1, &["message ids begin at 1", "earliest"]);
    verbs.refused(&seek("9"), 1, &["no id 9 yet, its last is 7", "latest"]);
    verbs.refused(&seek("2200-01-01T00:00:00Z"), 1, &["still to come", "latest"]);
    verbs.refused(&["seek", "emial", "--to", "3", "--yes"], 1, &["did you mean \"email\"?"]);
    assert_eq!(
        verbs.project.number("select claimed * 100 + epoch from {schema}.cursor, {schema}.consumer_group").await,
        700
    );
}

/// W4. Of compacted keys only the newest version comes again, and the answer says so, where it is so.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn w4_a_seek_over_compacted_keys_says_that_only_survivors_come_again() {
    let verbs = Verbs::declare(STREAMS_TOML).await;
    let (trace, _, handler) = steps(|_, _| done());
    let host = verbs.project.host_with(&[("email", handler)]).await;
    for n in 0..3 {
        verbs.project.produce("orders", &[version("k", Concurrency::Parallel, &format!("v{n}"))]).await;
        wait_for("each version is delivered", PATIENCE, async || trace.ended().len() == n + 1).await;
    }
    verbs.project.produce("orders", &[text("plain")]).await;
    all_done(&verbs.project).await;
    host.drain().await;
    assert_eq!(trace.ended(), ["v0", "v1", "v2", "plain"]);
    assert_eq!(
        verbs.json(&["seek", "email", "--to", "latest", "--yes"])["survivors_only"],
        false,
        "nothing comes again"
    );
    let text = verbs.text(&["seek", "email", "--to", "earliest", "--dry-run"]);
    assert!(text.contains("\nof compacted keys only the newest version comes again\n"), "{text}");
    assert_eq!(verbs.json(&["seek", "email", "--to", "earliest", "--yes"])["survivors_only"], true);
    let (again, _, handler) = steps(|_, message| {
        assert!(message.replay);
        done()
    });
    let host = verbs.project.host_with(&[("email", handler)]).await;
    all_done(&verbs.project).await;
    host.drain().await;
    let mut ended = again.ended();
    ended.sort();
    assert_eq!(ended, ["plain", "v2"]);
}
