//! W5: a seek of one key and what is not due yet, what is dead, and what is deep: nothing comes before its time, only what comes
//! again is marked so, and no depth keeps a key from being sent.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use millstream::{
    config::Start,
    engine::{self, KeySeeked, seek_key},
    handler::{Concurrency, NewMessage},
};

use crate::support::{
    engine::{Project, done},
    handlers::rounds,
    keyed::{LIMIT, all_done, failed, keyed, rejected, steps, streams, version},
    wait_for,
};

const MARKED: &str = "select count(*) from {schema}.dead_letter where replayed_at is not null";

async fn seek(project: &Project, to: Start) -> KeySeeked {
    seek_key(&project.database, "email", "a", &to, LIMIT).await.expect("seek a key")
}

/// What of key `a` waits for a time that is still to come.
async fn waits_for_its_time(project: &Project) -> bool {
    let later = "select count(*) from {schema}.exception where message_key = 'a' and due_at > clock_timestamp() + interval '50 minutes'";
    project.number(later).await == 1
}

/// Another message of the same key, so that whoever may come has come.
async fn another_comes(project: &Project, ended: impl Fn() -> Vec<String>) {
    project.produce("orders", &[keyed("a", Concurrency::Parallel, "another")]).await;
    wait_for("another comes", LIMIT, async || ended().contains(&"another".to_owned())).await;
}

/// Skipped by a seek forward, sent back; redriven, and sent back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn w5_no_seek_of_a_key_delivers_a_message_before_its_time() {
    for mode in ["ordered", "exclusive", "parallel"] {
        for is_redriven in [false, true] {
            let project = Project::declare(&streams("")).await;
            let (trace, _, handler) = steps(|_, _| done());
            project.run(&format!("select {{schema}}.produce('orders', 'late', key => 'a', concurrency => '{mode}', deliver_after => now() + interval '1 hour')")).await;
            let host = project.host_with(&[("email", handler)]).await;
            wait_for("it waits", LIMIT, async || waits_for_its_time(&project).await).await;
            assert_eq!(seek(&project, Start::Latest).await.skipped, 1);
            if is_redriven {
                let id = project.number("select id from {schema}.dead_letter").await;
                engine::redrive(&project.database, &[id], true, |_| {}).await.expect("redrive");
            }
            let seeked = seek(&project, Start::Earliest).await;
            assert_eq!((seeked.replayed, seeked.reset), if is_redriven { (0, 1) } else { (1, 0) }, "{mode}");
            assert!(waits_for_its_time(&project).await, "{mode}");
            another_comes(&project, || trace.ended()).await;
            assert_eq!(trace.ended(), ["another"], "{mode}");
            host.drain().await;
        }
    }
}

/// The same where it had died with its key.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn w5_what_died_behind_a_resting_head_waits_for_its_time_again() {
    let project = Project::declare(&streams("on_dead_letter = \"rest\"")).await;
    let first = AtomicBool::new(true);
    let (trace, _, handler) = steps(move |_, _| if first.swap(false, Relaxed) { rejected() } else { done() });
    project.produce("orders", &[keyed("a", Concurrency::Ordered, "head")]).await;
    project.run("select {schema}.produce('orders', 'late', key => 'a', concurrency => 'ordered', deliver_after => now() + interval '1 hour')").await;
    let host = project.host_with(&[("email", handler)]).await;
    let dead = "select count(*) from {schema}.dead_letter";
    wait_for("both are dead", LIMIT, async || project.number(dead).await == 2).await;
    assert_eq!(seek(&project, Start::Earliest).await.dead_letters_replayed, 2);
    wait_for("the head comes again", LIMIT, async || trace.ended().len() == 2).await;
    another_comes(&project, || trace.ended()).await;
    assert!(waits_for_its_time(&project).await);
    assert_eq!(trace.ended(), ["head", "head", "another"]);
    host.drain().await;
}

/// A dead letter whose message the filter leaves out now, or that has lost to a newer version, stays what it was: also the gap that
/// it left is told as before (D2).
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn w5_only_dead_letters_whose_messages_come_again_are_marked() {
    let group = |filter: &str| streams(&format!("on_dead_letter = \"skip\"\n{filter}"));
    let routed = |to: &str, payload: &str| NewMessage {
        routing_key: Some(to.into()),
        ..keyed("a", Concurrency::Ordered, payload)
    };
    let gaps = Arc::new(Mutex::new(Vec::new()));
    let notes = Arc::clone(&gaps);
    let (trace, _, handler) = steps(move |payload, message| {
        notes.lock().unwrap().push(message.gap_since);
        if payload == "bad" { rejected() } else { done() }
    });
    let project = Project::declare(&group("")).await;
    project.produce("orders", &[routed("out", "bad"), routed("in", "1")]).await;
    let host = project.host_with(&[("email", Arc::clone(&handler))]).await;
    all_done(&project).await;
    host.drain().await;
    let project = project.declare_again(&group("filter = { routing_key = [\"in\"] }")).await;
    let seeked = seek(&project, Start::Earliest).await;
    assert_eq!((seeked.replayed, seeked.dead_letters_replayed), (1, 0));
    let host = project.host_with(&[("email", handler)]).await;
    all_done(&project).await;
    host.drain().await;
    assert_eq!((project.number(MARKED).await, trace.ended()), (0, ["bad", "1", "1"].map(str::to_owned).to_vec()));
    assert_eq!(*gaps.lock().unwrap(), [None, Some(1), Some(1)]);

    let project = Project::declare(&group("")).await;
    let (trace, _, handler) = steps(|payload, _| if payload == "bad" { rejected() } else { done() });
    let host = project.host_with(&[("email", handler)]).await;
    for payload in ["bad", "good"] {
        project.produce("orders", &[version("a", Concurrency::Ordered, payload)]).await;
        all_done(&project).await;
    }
    let seeked = seek(&project, Start::Earliest).await;
    assert_eq!((seeked.replayed, seeked.dead_letters_replayed), (1, 0));
    all_done(&project).await;
    host.drain().await;
    assert_eq!((project.number(MARKED).await, trace.ended()), (0, ["bad", "good", "good"].map(str::to_owned).to_vec()));
}

/// Retries of messages without a mode never pause: those that run when the seek begins are waited for, each once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn w5_a_storm_of_retries_can_be_skipped() {
    let project = Project::declare(&streams("").replace("max_attempts = 3", "max_attempts = 1000")).await;
    let (trace, _, handler) = steps(|_, _| failed());
    let messages: Vec<_> = (0..40).map(|n| keyed("a", Concurrency::Parallel, &n.to_string())).collect();
    project.produce("orders", &messages).await;
    let host = project.host_with(&[("email", handler)]).await;
    wait_for("they fail", LIMIT, async || trace.started() > 100).await;
    let skipped = "select count(*) from {schema}.dead_letter where class = 'skipped'";
    wait_for("all are skipped", LIMIT, async || {
        seek(&project, Start::Latest).await; // what runs just then is left out
        project.number(skipped).await == 40
    })
    .await;
    host.drain().await;
}

/// What already waits is not read from the log, and is skipped in steps of 100,000.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn w5_a_deep_key_can_be_sent_anywhere() {
    let project = Project::declare(&streams("")).await;
    let batch = "select count(*) from {schema}.produce_batch('orders', array_fill('x'::bytea, array[50000]), array_fill('a'::text, array[50000]), array_fill('ordered'::text, array[50000]))";
    for _ in 0..5 {
        project.number(batch).await;
    }
    // As turns leave it, that have passed a head which waits for an hour.
    for statement in [
        "insert into {schema}.exception (group_id, message_id, state, message_key, concurrency) select 1, id, 'deferred', 'a', 'ordered' from {schema}.message_log_1",
        "update {schema}.cursor set claimed = 250000",
        "insert into {schema}.message_key_lease (group_id, message_key, blocked_by) values (1, 'a', 1)",
        "update {schema}.exception set state = 'waiting', due_at = now() + interval '1 hour' where message_id = 1",
        "analyze {schema}.exception",
    ] {
        project.run(statement).await;
    }
    assert_eq!(seek(&project, Start::Id(1)).await.reset, 250_000);
    let refused = seek_key(&project.database, "email", "a", &Start::Id(150_001), LIMIT).await.unwrap_err();
    assert!(format!("{refused:#}").contains("take an earlier one first"), "{refused:#}");
    let steps = [(20_001, 20_000), (120_001, 100_000), (220_001, 100_000), (250_001, 30_000)];
    for (to, skipped) in &steps[..rounds(1, 4)] {
        let seeked = seek(&project, Start::Id(*to)).await;
        assert_eq!((seeked.skipped, seeked.replayed), (*skipped, 0));
        assert_eq!(seeked.reset, 250_001 - to);
    }
}

/// Whoever holds a key must not wait with the group's lock for a settle that has it locked.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn o3_a_key_that_is_locked_by_a_settle_holds_up_no_other_while_it_is_held() {
    let project = Project::declare(&streams("")).await;
    let group = project.group("email").await.id;
    assert!(engine::pause_key(&project.database, group, "a").await.unwrap());
    // As engine/settle_lock_keys.sql does.
    let mut settle = project.session().await;
    settle
        .run("begin; select from {schema}.message_key_lease where group_id = 1 and message_key = 'a' for update")
        .await;
    let (trace, _, handler) = steps(|_, _| done());
    let host = project.host_with(&[("email", handler)]).await;
    let database = project.database.another_host().await;
    let statements = database.statements.clone();
    let verbs = tokio::spawn(async move {
        let seeked = seek_key(&database, "email", "a", &Start::Earliest, Duration::from_secs(2)).await;
        (seeked, engine::resume_key(&database, group, "a").await)
    });
    wait_for("it is tried again and again", LIMIT, async || statements.load(Relaxed) > 20).await;
    project.produce("orders", &[keyed("b", Concurrency::Ordered, "b")]).await;
    wait_for("another key's message comes", LIMIT, async || trace.ended() == ["b"]).await;
    assert!(!verbs.is_finished());
    tokio::time::sleep(Duration::from_secs(2)).await;
    settle.run("rollback").await;
    let (seeked, resumed) = verbs.await.unwrap();
    let refused = format!("{:#}", seeked.unwrap_err());
    assert!(refused.contains("a settle has had key \"a\" locked for 2 s; nothing was changed"), "{refused}");
    assert!(resumed.unwrap());
    host.drain().await;
}
