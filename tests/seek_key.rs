//! W5: the seek of one key. What it passed comes again in its place, what waited before the point is skipped and recorded,
//! and all other keys stay as they are.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, Ordering::Relaxed},
    },
    time::Duration,
};

use millstream::{
    config::Start,
    engine::{self, KeySeeked, preview_seek_key, seek_key},
    handler::{Concurrency, NewMessage},
};
use serde_json::json;

use crate::support::{
    engine::{Project, done},
    keyed::{LIMIT, all_done, failed, keyed, rejected, steps, streams, version},
    verbs::Verbs,
    wait_for,
};

const PAUSED: &str = "select count(*) from {schema}.message_key_lease where paused_at is not null";

async fn seek(project: &Project, key: &str, to: i64) -> KeySeeked {
    seek_key(&project.database, "email", key, &Start::Id(to), LIMIT).await.expect("seek a key")
}

/// `count` messages of each key, one key after the other in turn: message `n` of the first of two keys has the id 2n + 1.
async fn produce(project: &Project, keys: &[&str], mode: Concurrency, count: u32) {
    let of = |n: u32| keys.iter().map(move |key| keyed(key, mode, &format!("{key}{n}")));
    project.produce("orders", &(0..count).flat_map(of).collect::<Vec<_>>()).await;
}

fn named(key: &str, numbers: std::ops::Range<u32>) -> Vec<String> {
    numbers.map(|n| format!("{key}{n}")).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn w5_a_key_that_is_sent_back_comes_again_and_all_others_stay() {
    for mode in [Concurrency::Ordered, Concurrency::Exclusive, Concurrency::Parallel] {
        let project = Project::declare(&streams("")).await;
        let seen = Arc::new(Mutex::new(Vec::new()));
        let notes = Arc::clone(&seen);
        let (trace, _, handler) = steps(move |payload, message| {
            notes.lock().unwrap().push((payload.to_owned(), message.attempt, message.replay));
            if payload == "a7" && message.attempt == 1 { failed() } else { done() }
        });
        produce(&project, &["a", "b"], mode, 20).await;
        let host = project.host_with(&[("email", handler)]).await;
        all_done(&project).await;
        seen.lock().unwrap().clear();
        let before = trace.ended().len();
        let would = preview_seek_key(&project.database, "email", "a", &Start::Id(11)).await.unwrap();
        assert_eq!((would.replayed, project.left_over().await), (15, 0), "it was only tried");
        let seeked = seek(&project, "a", 11).await;
        assert_eq!(seeked, KeySeeked { dry_run: false, ..would });
        assert_eq!((seeked.position, seeked.reset, seeked.skipped), (10, 0, 0));
        project.produce("orders", &[keyed("a", mode, "a20"), keyed("b", mode, "b20")]).await;
        all_done(&project).await;
        host.drain().await;
        let mut again: Vec<_> = trace.ended()[before..].iter().filter(|one| *one != "b20").cloned().collect();
        if mode == Concurrency::Ordered {
            again.dedup(); // a7 fails once more
            assert_eq!(again, named("a", 5..21));
            trace.one_at_a_time("a");
        }
        again.sort();
        again.dedup();
        let mut expected = named("a", 5..21);
        expected.sort();
        assert_eq!(again, expected, "{mode:?}");
        assert_eq!(project.number("select count(*) from {schema}.consumer_group where epoch > 0").await, 0);
        let seen = seen.lock().unwrap();
        for (payload, attempt, replay) in seen.iter() {
            assert_eq!(*replay, !payload.ends_with("20"), "{payload}");
            assert!(*attempt == 1 || payload == "a7", "{payload} at attempt {attempt}");
        }
    }
}

/// Goal: forward, the head that blocks its key and what waits before the point end as skipped, and the rest goes on.
/// Method: one head waits an hour for its retry, another is a dead letter.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn w5_a_blocked_key_that_is_sent_on_leaves_skipped_messages_behind() {
    for is_dead in [false, true] {
        let project = Project::declare(&streams("").replace("20ms", "1h")).await;
        let (trace, _, handler) = steps(move |payload, _| match payload {
            "a0" if is_dead => rejected(),
            "a0" | "b0" => failed(),
            _ => done(),
        });
        produce(&project, &["a", "b"], Concurrency::Ordered, 10).await;
        let host = project.host_with(&[("email", handler)]).await;
        let stuck = "select count(*) from {schema}.exception where state = 'deferred'";
        let blocked = "select count(*) from {schema}.message_key_lease where blocked_by is not null";
        wait_for("both keys wait", LIMIT, async || {
            project.number(stuck).await == 18 && project.number(blocked).await == 2
        })
        .await;
        let seeked = seek(&project, "a", 11).await;
        let skipped = if is_dead { 4 } else { 5 };
        assert_eq!((seeked.position, seeked.replayed, seeked.reset, seeked.skipped), (10, 0, 5, skipped));
        wait_for("the key goes on", LIMIT, async || trace.ended().len() == 7).await;
        wait_for("it is free", LIMIT, async || {
            project.number("select count(*) from {schema}.message_key_lease").await == 1
        })
        .await;
        assert_eq!(project.stuck_keys().await, 0);
        host.drain().await;
        let of_a: Vec<_> = trace.ended().into_iter().filter(|one| one.starts_with('a') && one != "a0").collect();
        assert_eq!(of_a, named("a", 5..10));
        let recorded = "select count(*) from {schema}.dead_letter where class = 'skipped' and message_key = 'a' and payload is not null";
        assert_eq!(project.number(recorded).await, skipped);
        let other = "select count(*) from {schema}.exception where message_key = 'b' and message_id in (2, 4, 6) and failures = (message_id = 2)::integer";
        assert_eq!(project.number(other).await, 3, "the other key waits as before");
    }
}

/// What runs of the key ends first; nothing overlaps. When it does not end in time nothing is changed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn w5_a_seek_of_a_key_waits_for_what_runs_of_it() {
    let project = Project::declare(&streams("")).await;
    let (trace, stuck, handler) = steps(|_, _| done());
    stuck.store(true, Relaxed);
    produce(&project, &["a", "b"], Concurrency::Ordered, 5).await;
    let host = project.host_with(&[("email", handler)]).await;
    wait_for("both run", LIMIT, async || trace.started() == 2).await;
    let short = Duration::from_millis(200);
    let refused = seek_key(&project.database, "email", "a", &Start::Earliest, short).await.unwrap_err();
    assert!(format!("{refused:#}").contains("test still runs messages of it; nothing was changed"), "{refused:#}");
    assert_eq!(project.number(PAUSED).await, 0, "it was let go");
    let database = project.database.another_host().await;
    let waiting = tokio::spawn(async move { seek_key(&database, "email", "a", &Start::Earliest, LIMIT).await });
    wait_for("it is held", LIMIT, async || project.number(PAUSED).await == 1).await;
    stuck.store(false, Relaxed);
    let seeked = waiting.await.unwrap().expect("seek a key");
    assert!(seeked.replayed + seeked.reset == 5 && seeked.skipped == 0, "{seeked:?}");
    all_done(&project).await;
    host.drain().await;
    trace.one_at_a_time("a");
    let of_a: Vec<_> = trace.ended().into_iter().filter(|one| one.starts_with('a')).collect();
    assert_eq!(of_a[of_a.len() - 5..], named("a", 0..5));
    assert_eq!(trace.ended().len(), of_a.len() + 5, "the other key came once");
}

/// The same without a mode, where a hold stops nothing: what runs is waited for, so that no message has two claims to be
/// delivered, each with its effects.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn w5_a_seek_of_a_key_without_a_mode_waits_for_what_runs_of_it() {
    let project = Project::declare(&streams("")).await;
    let (trace, stuck, handler) = steps(|_, _| done());
    stuck.store(true, Relaxed);
    produce(&project, &["a", "b"], Concurrency::Parallel, 5).await;
    let host = project.host_with(&[("email", handler)]).await;
    wait_for("all run", LIMIT, async || trace.started() == 10).await;
    let short = Duration::from_millis(200);
    let refused = seek_key(&project.database, "email", "a", &Start::Earliest, short).await.unwrap_err();
    assert!(format!("{refused:#}").contains("test still runs messages of it; nothing was changed"), "{refused:#}");
    assert_eq!(project.number("select count(*) from {schema}.exception").await, 0);
    let database = project.database.another_host().await;
    let waiting = tokio::spawn(async move { seek_key(&database, "email", "a", &Start::Earliest, LIMIT).await });
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert!(!waiting.is_finished());
    stuck.store(false, Relaxed);
    let seeked = waiting.await.unwrap().expect("seek a key");
    assert_eq!((seeked.replayed, seeked.reset), (5, 0), "{seeked:?}");
    all_done(&project).await;
    host.drain().await;
    let mut ended = trace.ended();
    ended.sort();
    let mut expected = [named("a", 0..5), named("a", 0..5), named("b", 0..5)].concat();
    expected.sort();
    assert_eq!(ended, expected);
}

/// Goal: under load, with two hosts and failures, a key that is sent back again and again loses nothing, never overlaps and
/// never leaves its order, and its neighbours come once each. Method: in the order in which its messages end, each follows
/// the one before, or is the one that the key was sent to.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn w5_a_key_is_sent_back_while_two_hosts_are_at_work() {
    let project = Project::declare(&streams("")).await;
    let count = Arc::new(AtomicU32::new(0));
    let counts = Arc::clone(&count);
    let (trace, _, handler) = steps(move |_, message| {
        let n = counts.fetch_add(1, Relaxed);
        if n.is_multiple_of(7) && message.attempt == 1 { failed() } else { done() }
    });
    produce(&project, &["a", "b"], Concurrency::Ordered, 200).await;
    let hosts =
        [project.host_with(&[("email", Arc::clone(&handler))]).await, project.host_with(&[("email", handler)]).await];
    for round in 1..=4 {
        wait_for("it goes on", LIMIT, async || count.load(Relaxed) >= round * 40).await;
        let seeked = seek(&project, "a", 21).await;
        assert_eq!(seeked.position, 20);
    }
    all_done(&project).await;
    for host in hosts {
        host.drain().await;
    }
    trace.one_at_a_time("a");
    trace.one_at_a_time("b");
    let numbers = |key: &str| {
        let ended: Vec<_> =
            trace.ended().into_iter().filter_map(|one| one.strip_prefix(key)?.parse::<u32>().ok()).collect();
        ended.into_iter().fold(Vec::new(), |mut all, n| {
            if all.last() != Some(&n) {
                all.push(n); // one that failed ends twice
            }
            all
        })
    };
    assert_eq!(numbers("b"), (0..200).collect::<Vec<_>>());
    let a = numbers("a");
    let jumps =
        a.windows(2).filter(|pair| pair[1] != pair[0] + 1).inspect(|pair| assert_eq!(pair[1], 10, "{a:?}")).count();
    assert!(a.last() == Some(&199) && (1..=4).contains(&jumps), "{jumps} jumps: {a:?}");
}

/// Only winners of a compacted key come again, what the filter leaves out stays out, and a held key stays held.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn w5_what_would_not_come_does_not_come_again() {
    let filter = "filter = { routing_key = [\"in\"] }";
    let project = Project::declare(&streams(filter)).await;
    let (trace, _, handler) = steps(|_, _| done());
    let routed = |to: &str, message: NewMessage| NewMessage { routing_key: Some(to.into()), ..message };
    let host = project.host_with(&[("email", handler)]).await;
    for n in 0..3 {
        let batch = [
            routed("in", version("k", Concurrency::Ordered, &format!("v{n}"))),
            routed("out", keyed("k", Concurrency::Ordered, &format!("out{n}"))),
        ];
        project.produce("orders", &batch).await;
        all_done(&project).await;
    }
    assert_eq!(trace.ended(), ["v0", "v1", "v2"]);
    engine::pause_key(&project.database, project.group("email").await.id, "k").await.unwrap();
    let seeked = seek(&project, "k", 1).await;
    assert_eq!((seeked.replayed, project.number(PAUSED).await), (1, 1), "{seeked:?}");
    engine::resume_key(&project.database, project.group("email").await.id, "k").await.unwrap();
    all_done(&project).await;
    host.drain().await;
    assert_eq!(trace.ended(), ["v0", "v1", "v2", "v2"]);
}

/// On the command line: it tells what it would do, asks, does it, and refuses what it cannot mean.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn w5_the_seek_of_a_key_tells_what_it_did() {
    let verbs = Verbs::declare(&streams("")).await;
    let (trace, _, handler) = steps(|_, _| done());
    produce(&verbs.project, &["a", "b"], Concurrency::Ordered, 5).await;
    let host = verbs.project.host_with(&[("email", handler)]).await;
    all_done(&verbs.project).await;
    let seek = |more: &[&'static str]| [&["seek", "email", "--key", "a", "--to"], more].concat();
    let mut expected = json!({ "group": "email", "key": "a", "dry_run": true, "position": 4, "replayed": 3, "reset": 0,
        "skipped": 0, "dead_letters_replayed": 0 });
    assert_eq!(verbs.json(&seek(&["5", "--dry-run"])), expected);
    verbs.refused(
        &seek(&["5"]),
        2,
        &["refuse to send key a of email to position 4: 3 messages come again", "add --yes"],
    );
    expected["dry_run"] = false.into();
    assert_eq!(verbs.json(&seek(&["5", "--yes"])), expected);
    all_done(&verbs.project).await;
    host.drain().await;
    assert_eq!(trace.ended()[10..], ["a2", "a3", "a4"]);
    let text = verbs.text(&seek(&["latest", "--yes"]));
    assert_eq!(text, "sent key a of email to position 10: it has no message there\n");
    verbs.refused(&seek(&["12", "--yes"]), 1, &["no id 12 yet, its last is 10"]);
    verbs.refused(&["seek", "emial", "--key", "a", "--to", "1", "--yes"], 1, &["did you mean \"email\"?"]);
    verbs.refused(&["seek", "email", "--key", "", "--to", "1", "--yes"], 1, &["a key has 1 to 1,024 bytes"]);
}
