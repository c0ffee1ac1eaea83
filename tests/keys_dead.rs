//! What a dead letter does to its ordered key, each invariant of the semantics by its name.

use std::sync::{
    Arc, Mutex,
    atomic::{AtomicBool, Ordering::Relaxed},
};

use millstream::{
    config::Start,
    engine::{self, DeadFilter},
    handler::Concurrency,
};

use crate::support::{
    HOSTS_COME_AND_GO,
    engine::{Project, done},
    keyed::{LIMIT, all_done, failed, keyed, rejected, steps, streams, version},
    wait_for,
};

/// D1. `block`: the head is parked, those behind it stay put.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn d1_block_parks_the_head_and_keeps_the_rest_behind_it() {
    let project = Project::declare(&streams("")).await;
    let (trace, _, handler) = steps(|payload, _| if payload == "a1" { rejected() } else { done() });
    let mut batch: Vec<_> = (0..10).map(|n| keyed("a", Concurrency::Ordered, &format!("a{n}"))).collect();
    batch.push(keyed("b", Concurrency::Ordered, "b"));
    project.produce("orders", &batch).await;
    let host = project.host_with(&[("email", handler)]).await;
    wait_for("the key is blocked", LIMIT, async || {
        project.number("select count(*) from {schema}.exception where state = 'deferred'").await == 8
    })
    .await;
    wait_for("the other key", LIMIT, async || trace.ended().len() == 3).await;
    wait_for("the head is dead", LIMIT, async || {
        project.number("select count(*) from {schema}.dead_letter where message_id = 2 and class = 'rejected'").await
            == 1
    })
    .await;
    assert_eq!(
        project
            .number("select count(*) from {schema}.message_key_lease where blocked_by = 2 and host_id is null")
            .await,
        1
    );
    assert_eq!(
        project.number("select sum(failures) from {schema}.exception").await,
        0,
        "no attempt is counted for those behind"
    );
    let groups = ["email".to_owned()];
    wait_for("a job has nothing left to do", LIMIT, async || {
        !engine::has_unfinished(&project.database, &groups).await.unwrap()
    })
    .await;
    host.drain().await;
}

/// D2, D7. `skip`: the next goes out at once, and every later delivery of the key tells of the gap.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn d2_skip_goes_on_and_marks_what_comes_later() {
    let project = Project::declare(&streams("on_dead_letter = \"skip\"")).await;
    let gaps = Arc::new(Mutex::new(Vec::new()));
    let noted = Arc::clone(&gaps);
    let (trace, _, handler) = steps(move |payload, message| {
        if payload == "a1" {
            return rejected();
        }
        noted.lock().unwrap().push((payload.to_owned(), message.gap_since));
        done()
    });
    let batch: Vec<_> = (0..5).map(|n| keyed("a", Concurrency::Ordered, &format!("a{n}"))).collect();
    project.produce("orders", &batch).await;
    let host = project.host_with(&[("email", handler)]).await;
    all_done(&project).await;
    project.produce("orders", &[keyed("a", Concurrency::Ordered, "a5"), keyed("b", Concurrency::Ordered, "b0")]).await;
    all_done(&project).await;
    host.drain().await;
    let gap = |name: &str, since| (name.to_owned(), since);
    let mut gaps = gaps.lock().unwrap().clone();
    gaps.sort();
    assert_eq!(
        gaps,
        [
            gap("a0", None),
            gap("a2", Some(2)),
            gap("a3", Some(2)),
            gap("a4", Some(2)),
            gap("a5", Some(2)),
            gap("b0", None)
        ]
    );
    assert_eq!(
        trace.ended().iter().filter(|ended| ended.starts_with('a')).map(String::as_str).collect::<Vec<_>>(),
        ["a0", "a1", "a2", "a3", "a4", "a5"]
    );
}

/// D2. Goal: while dead letters of a key are open, every delivery behind them tells of the first, whichever host it runs on:
/// after a drain, after a host's death, after a redrive that dies again; and no longer once it is redriven, nor of any once
/// the last is discarded.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn d2_the_first_gap_is_told_by_every_host_until_it_is_closed() {
    let host = "[host]\nlease = \"600ms\"\nheartbeat = \"150ms\"\n";
    let project = Project::declare(&(host.to_owned() + &streams("on_dead_letter = \"skip\""))).await;
    for part in HOSTS_COME_AND_GO {
        project.database.expect_log(part);
    }
    let (gaps, mended) = (Arc::new(Mutex::new(Vec::new())), Arc::new(AtomicBool::new(false)));
    let start = async || {
        let (noted, is_mended) = (Arc::clone(&gaps), Arc::clone(&mended));
        let (_, stuck, handler) = steps(move |payload, message| {
            noted.lock().unwrap().push((message.id, message.gap_since));
            if payload == "bad" && !is_mended.load(Relaxed) { rejected() } else { done() }
        });
        (project.host_with(&[("email", handler)]).await, stuck)
    };
    let produce =
        async |payload: &str| project.produce("orders", &[keyed("a", Concurrency::Ordered, payload)]).await[0].id;
    let told = async || {
        all_done(&project).await;
        std::mem::take(&mut *gaps.lock().unwrap())
    };
    let (first, _) = start().await;
    produce("fine").await;
    produce("bad").await;
    produce("fine").await;
    assert_eq!(told().await, [(1, None), (2, None), (3, Some(2))]);
    first.drain().await;
    let (second, stuck) = start().await;
    produce("fine").await;
    produce("bad").await;
    assert_eq!(told().await, [(4, Some(2)), (5, Some(2))], "another host");
    stuck.store(true, Relaxed);
    let before = produce("fine").await;
    wait_for("it is claimed", LIMIT, async || project.number("select claimed from {schema}.cursor").await == before)
        .await;
    drop(second); // as by kill -9
    let (third, _) = start().await;
    assert_eq!(told().await, [(6, Some(2))], "what a dead host had");
    let redrive = async |id: i64| {
        let redriven = engine::redrive(&project.database, &[id], true, |_| ()).await.unwrap().redriven;
        assert_eq!(redriven, 1);
    };
    redrive(1).await;
    assert_eq!(told().await, [(2, None)], "it dies again");
    produce("fine").await;
    assert_eq!(told().await, [(7, Some(2))], "and is a gap again");
    mended.store(true, Relaxed);
    redrive(1).await;
    assert_eq!(told().await, [(2, None)]);
    produce("fine").await;
    assert_eq!(told().await, [(8, Some(5))], "the next one that is open");
    third.drain().await;
    assert_eq!(engine::discard(&project.database, &[2], |_| ()).await.unwrap(), 1);
    let (fourth, _) = start().await;
    produce("fine").await;
    assert_eq!(told().await, [(9, None)]);
    fourth.drain().await;
}

/// D3, D5. `rest`: all present and future messages of the key die in order; nothing of it is delivered.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn d3_rest_dead_letters_the_key_in_order() {
    let project = Project::declare(&streams("on_dead_letter = \"rest\"")).await;
    let (trace, _, handler) = steps(|payload, _| if payload == "a1" { rejected() } else { done() });
    let batch: Vec<_> = (0..100).map(|n| keyed("a", Concurrency::Ordered, &format!("a{n}"))).collect();
    project.produce("orders", &batch).await;
    let host = project.host_with(&[("email", handler)]).await;
    wait_for("they die", LIMIT, async || project.number("select count(*) from {schema}.dead_letter").await == 99).await;
    project.produce("orders", &[keyed("a", Concurrency::Ordered, "late"), keyed("b", Concurrency::Ordered, "b")]).await;
    wait_for("the late one dies", LIMIT, async || {
        project.number("select count(*) from {schema}.dead_letter").await == 100
    })
    .await;
    wait_for("the other key", LIMIT, async || trace.ended().contains(&"b".to_owned())).await;
    assert_eq!(trace.ended(), ["a0", "a1", "b"]);
    let disorder = "select count(*) from {schema}.dead_letter a, {schema}.dead_letter b where a.id < b.id and a.message_id > b.message_id";
    assert_eq!(project.number(disorder).await, 0);
    assert_eq!(project.number("select count(*) from {schema}.exception").await, 0);
    host.drain().await;
}

/// D3, E7. Whatever comes to wait behind a resting key dies, also what had failed before the key rested and waited apart.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn d3_a_retry_that_meets_a_resting_key_dies_too() {
    let rest = "on_dead_letter = \"rest\"\nretry = { max_attempts = 3, base = \"1h\", max = \"1h\" }";
    let project = Project::declare(
        &streams("").replace("retry = { max_attempts = 3, base = \"20ms\", max = \"20ms\", jitter = 0.0 }", rest),
    )
    .await;
    let (_, _, handler) = steps(|payload, _| if payload == "exclusive" { failed() } else { rejected() });
    project.produce("orders", &[keyed("k", Concurrency::Exclusive, "exclusive")]).await;
    let host = project.host_with(&[("email", handler)]).await;
    let waits = "select count(*) from {schema}.exception where state = 'waiting'";
    wait_for("it waits for a retry", LIMIT, async || project.number(waits).await == 1).await;
    project.produce("orders", &[keyed("k", Concurrency::Ordered, "ordered")]).await;
    let rests = "select count(*) from {schema}.message_key_lease where rests and not buries";
    wait_for("the key rests, and nothing is left to bury", LIMIT, async || project.number(rests).await == 1).await;
    project.run("update {schema}.exception set due_at = clock_timestamp()").await;
    let dead = "select count(*) from {schema}.dead_letter where class = 'key_rests' and message_id = 1";
    wait_for("it dies with its key", LIMIT, async || project.number(dead).await == 1).await;
    assert_eq!(project.stuck_keys().await, 0);
    host.drain().await;
}

/// O11, V1. What died with its key before its time does not come before it when it is redriven, and its key waits for it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn o11_a_redrive_delivers_nothing_before_its_time() {
    for policy in ["rest", "block"] {
        let project = Project::declare(&streams(&format!("on_dead_letter = \"{policy}\""))).await;
        let heals = Arc::new(AtomicBool::new(false));
        let healed = Arc::clone(&heals);
        let (trace, _, handler) =
            steps(move |payload, _| if payload == "first" && !healed.load(Relaxed) { rejected() } else { done() });
        let mut late = keyed("k", Concurrency::Ordered, "late");
        late.delay = Some(std::time::Duration::from_secs(3600));
        project.produce("orders", &[keyed("k", Concurrency::Ordered, "first"), late]).await;
        project.produce("orders", &[keyed("k", Concurrency::Ordered, "behind")]).await;
        let host = project.host_with(&[("email", handler)]).await;
        let group = project.group("email").await;
        let dead = "select count(*) from {schema}.dead_letter where redriven_at is null";
        wait_for("the first is dead", LIMIT, async || project.number(dead).await > 0).await;
        heals.store(true, Relaxed);
        if policy == "block" {
            assert_eq!(engine::skip_key(&project.database, (group.id, group.stream_id), "k").await.unwrap(), [1]);
            let blocked = "select count(*) from {schema}.message_key_lease where blocked_by = 2";
            wait_for("the key waits for the late one", LIMIT, async || project.number(blocked).await == 1).await;
            assert_eq!(engine::skip_key(&project.database, (group.id, group.stream_id), "k").await.unwrap(), [2]);
            wait_for("the key goes on", LIMIT, async || trace.ended().contains(&"behind".to_owned())).await;
            let ids = engine::pick_dead(&project.database, group.id, &DeadFilter::default()).await.unwrap();
            engine::redrive(&project.database, &ids, true, |_| ()).await.unwrap();
        } else {
            wait_for("all are dead", LIMIT, async || project.number(dead).await == 3).await;
            let ids = engine::pick_dead(&project.database, group.id, &DeadFilter::default()).await.unwrap();
            engine::redrive(&project.database, &ids[..2], false, |_| ()).await.unwrap();
            assert!(engine::release_key(&project.database, group.id, "k").await.unwrap());
        }
        let waits = "select count(*) from {schema}.exception where message_id = 2 and state in ('waiting', 'delayed')
            and due_at > clock_timestamp() + interval '50 minutes'";
        wait_for("it waits for its time", LIMIT, async || project.number(waits).await == 1).await;
        let before = if policy == "rest" { 0 } else { 1 };
        assert_eq!(trace.ended().iter().filter(|payload| *payload == "behind").count(), before, "{policy}");
        project.run("update {schema}.exception set due_at = clock_timestamp() where message_id = 2").await;
        wait_for("its time has come", LIMIT, async || trace.ended().contains(&"late".to_owned())).await;
        all_done(&project).await;
        host.drain().await;
    }
}

/// W1, W5. A resting key that is paused, with something behind it that is still to be buried, is no obstacle to a seek.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn w1_a_paused_resting_key_can_be_sent_back() {
    for of_key in [false, true] {
        let project = Project::declare(&streams("on_dead_letter = \"rest\"")).await;
        let heals = Arc::new(AtomicBool::new(false));
        let healed = Arc::clone(&heals);
        let (trace, _, handler) = steps(move |_, _| if healed.load(Relaxed) { done() } else { rejected() });
        project.produce("orders", &[keyed("k", Concurrency::Ordered, "first")]).await;
        let host = project.host_with(&[("email", handler)]).await;
        let rests = "select count(*) from {schema}.message_key_lease where rests and not buries";
        wait_for("the key rests", LIMIT, async || project.number(rests).await == 1).await;
        let group = project.group("email").await;
        assert!(engine::pause_key(&project.database, group.id, "k").await.unwrap());
        project.produce("orders", &[keyed("k", Concurrency::Ordered, "second")]).await;
        let buries = "select count(*) from {schema}.message_key_lease where buries";
        wait_for("something is behind it", LIMIT, async || project.number(buries).await == 1).await;
        heals.store(true, Relaxed);
        if of_key {
            engine::seek_key(&project.database, "email", "k", &Start::Earliest, LIMIT).await.expect("seek the key");
        } else {
            engine::seek(&project.database, group.id, group.stream_id, "email", &Start::Earliest).await.expect("seek");
        }
        engine::resume_key(&project.database, group.id, "k").await.unwrap();
        wait_for("both come, in order", LIMIT, async || trace.ended().ends_with(&["first".into(), "second".into()]))
            .await;
        host.drain().await;
    }
}

/// V1. Under `block`, redrive puts the head back before anything later; under `rest`, all go back to their places and run in
/// order once the key is released.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn v1_redrive_returns_messages_to_their_places() {
    for policy in ["block", "rest"] {
        let project = Project::declare(&streams(&format!("on_dead_letter = \"{policy}\""))).await;
        let mended = Arc::new(AtomicBool::new(false));
        let is_mended = Arc::clone(&mended);
        let (trace, _, handler) =
            steps(move |payload, _| if payload == "a1" && !is_mended.load(Relaxed) { rejected() } else { done() });
        let batch: Vec<_> = (0..20).map(|n| keyed("a", Concurrency::Ordered, &format!("a{n}"))).collect();
        project.produce("orders", &batch).await;
        let host = project.host_with(&[("email", handler)]).await;
        let dead = if policy == "block" { 1 } else { 19 };
        wait_for("the deaths", LIMIT, async || {
            project.number("select count(*) from {schema}.dead_letter").await == dead
        })
        .await;
        mended.store(true, Relaxed);
        let ids: Vec<i64> = (1..=dead).collect();
        for redriven in [dead.unsigned_abs(), 0] {
            let told = engine::redrive(&project.database, &ids, false, |_| {}).await.unwrap();
            assert_eq!((told.redriven, told.refused.len()), (redriven, 0), "twice the same redrive delivers once");
        }
        if policy == "rest" {
            assert_eq!(trace.ended().len(), 2, "it still rests");
            project.run("update {schema}.message_key_lease set rests = false").await;
        }
        all_done(&project).await;
        host.drain().await;
        let wanted: Vec<_> =
            ["a0", "a1"].into_iter().map(str::to_owned).chain((1..20).map(|n| format!("a{n}"))).collect();
        assert_eq!(trace.ended(), wanted);
        assert_eq!(project.number("select count(*) from {schema}.dead_letter").await, 0);
    }
}

/// V2. Once the key has gone on, redrive is refused, and `append` delivers the message as the next.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn v2_redrive_into_a_key_that_went_on_is_refused() {
    let project = Project::declare(&streams("on_dead_letter = \"skip\"")).await;
    let mended = Arc::new(AtomicBool::new(false));
    let is_mended = Arc::clone(&mended);
    let (trace, _, handler) =
        steps(move |payload, _| if payload == "a1" && !is_mended.load(Relaxed) { rejected() } else { done() });
    let batch: Vec<_> = (0..4).map(|n| keyed("a", Concurrency::Ordered, &format!("a{n}"))).collect();
    project.produce("orders", &batch).await;
    let host = project.host_with(&[("email", handler)]).await;
    all_done(&project).await;
    mended.store(true, Relaxed);
    let refused = engine::redrive(&project.database, &[1], false, |_| {}).await.unwrap();
    assert_eq!((refused.redriven, refused.refused), (0, vec![1]));
    assert_eq!(engine::redrive(&project.database, &[1], true, |_| {}).await.unwrap().redriven, 1);
    all_done(&project).await;
    wait_for("its dead letter ends", LIMIT, async || {
        project.number("select count(*) from {schema}.dead_letter").await == 0
    })
    .await;
    host.drain().await;
    assert_eq!(trace.ended(), ["a0", "a1", "a2", "a3", "a1"]);
}

/// Discarding the dead letter that blocks a key lets the key go on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn discarding_the_head_lets_its_key_go_on() {
    let project = Project::declare(&streams("")).await;
    let (trace, _, handler) = steps(|payload, _| if payload == "a1" { rejected() } else { done() });
    let batch: Vec<_> = (0..4).map(|n| keyed("a", Concurrency::Ordered, &format!("a{n}"))).collect();
    project.produce("orders", &batch).await;
    let host = project.host_with(&[("email", handler)]).await;
    wait_for("the head is dead", LIMIT, async || {
        project.number("select count(*) from {schema}.dead_letter").await == 1
    })
    .await;
    assert_eq!(engine::discard(&project.database, &[1], |_| {}).await.unwrap(), 1);
    all_done(&project).await;
    host.drain().await;
    assert_eq!(trace.ended(), ["a0", "a1", "a2", "a3"]);
}

/// V6. A superseded version that is redriven ends, says so, and delivers nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn v6_redrive_of_a_superseded_version_delivers_nothing() {
    let project = Project::declare(&streams("")).await;
    let (trace, _, handler) = steps(|payload, _| if payload == "old" { rejected() } else { done() });
    let host = project.host_with(&[("email", handler)]).await;
    project.produce("orders", &[version("k", Concurrency::Exclusive, "old")]).await;
    wait_for("it is dead", LIMIT, async || project.number("select count(*) from {schema}.dead_letter").await == 1)
        .await;
    project.produce("orders", &[version("k", Concurrency::Exclusive, "new")]).await;
    let told = engine::redrive(&project.database, &[1], false, |_| {}).await.unwrap();
    assert_eq!((told.redriven, told.superseded), (0, 1));
    all_done(&project).await;
    host.drain().await;
    assert_eq!(trace.ended(), ["old", "new"]);
    assert_eq!(project.number("select count(*) from {schema}.dead_letter").await, 0);
}
