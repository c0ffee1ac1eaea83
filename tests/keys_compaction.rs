//! Compacted keys, alone and with a key mode, each invariant of the semantics by its name.

use std::{
    sync::{Arc, Mutex, atomic::Ordering::Relaxed},
    time::Duration,
};

use millstream::{
    engine::{self, Done, Lane, Request, Source, Wanted},
    handler::{Concurrency, Finished, NewMessage, Outcome},
};

use crate::support::{
    engine::{Project, done, text},
    keyed::{LIMIT, all_done, failed, keyed, rejected, steps, streams, version},
    wait_for,
};

/// C1, C2. Whatever the order of arrival the highest rank wins, equal ranks fall to the later one, the producer is told, and
/// only the winner is delivered.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c1_any_permutation_of_versions_has_the_same_winner() {
    let project = Project::declare(&streams("")).await;
    let ranks = [3_i64, 1, 2];
    let orders = [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]];
    for (number, order) in orders.iter().enumerate() {
        let mut best = -1;
        for index in order {
            let rank = ranks[*index];
            let new = NewMessage {
                rank: Some(rank),
                ..version(&format!("k{number}"), Concurrency::Parallel, &format!("k{number}.{rank}"))
            };
            let produced = project.produce("orders", &[new]).await;
            assert_eq!(produced[0].superseded, rank < best, "{order:?}");
            best = best.max(rank);
        }
        let equal: Vec<_> =
            (0..3).map(|n| version(&format!("e{number}"), Concurrency::Parallel, &format!("e{number}.{n}"))).collect();
        let produced = project.produce("orders", &equal).await;
        assert_eq!(produced.iter().map(|one| one.superseded).collect::<Vec<_>>(), [true, true, false]);
    }
    let (trace, _, handler) = steps(|_, _| done());
    let host = project.host_with(&[("email", handler)]).await;
    all_done(&project).await;
    host.drain().await;
    let mut ended = trace.ended();
    ended.sort();
    let mut wanted: Vec<_> = (0..6).flat_map(|n| [format!("k{n}.3"), format!("e{n}.2")]).collect();
    wanted.sort();
    assert_eq!(ended, wanted);
}

/// C8, C14. A tombstone's rank is remembered, so a late lower one does not bring the key back; what is rolled back never wins.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c8_a_late_lower_rank_does_not_resurrect_a_deleted_key() {
    let project = Project::declare(&streams("")).await;
    let ranked = |rank, payload: Option<&str>| NewMessage {
        rank: Some(rank),
        payload: payload.map(|payload| payload.as_bytes().to_vec()),
        ..version("k", Concurrency::Exclusive, "")
    };
    let (trace, _, handler) = steps(|_, _| done());
    let host = project.host_with(&[("email", handler)]).await;
    let mut session = project.session().await;
    session
        .run(
            "begin; select {schema}.produce('orders', 'aborted', key => 'k', compaction => true, rank => 99); rollback",
        )
        .await;
    assert!(!project.produce("orders", &[ranked(5, Some("alive"))]).await[0].superseded);
    all_done(&project).await;
    assert!(!project.produce("orders", &[ranked(7, None)]).await[0].superseded);
    assert!(project.produce("orders", &[ranked(6, Some("late"))]).await[0].superseded);
    all_done(&project).await;
    host.drain().await;
    assert_eq!(trace.ended(), ["alive", ""]);
}

/// C6, X1, X2, Y5. 1,000 versions of a key while it is processed run exactly once more, with the newest, which tells how many it
/// skipped.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn x1_a_thousand_versions_while_one_runs_make_one_more_delivery() {
    for mode in [Concurrency::Exclusive, Concurrency::Ordered] {
        let project = Project::declare(&streams("")).await;
        let skipped = Arc::new(Mutex::new(Vec::new()));
        let noted = Arc::clone(&skipped);
        let (trace, stuck, handler) = steps(move |_, message| {
            noted.lock().unwrap().push(message.skipped);
            done()
        });
        stuck.store(true, Relaxed);
        let host = project.host_with(&[("email", handler)]).await;
        project.produce("orders", &[version("k", mode, "first")]).await;
        wait_for("the first runs", LIMIT, async || trace.started() == 1).await;
        for hundred in 0..10 {
            let batch: Vec<_> = (0..100).map(|n| version("k", mode, &format!("{}", hundred * 100 + n))).collect();
            project.produce("orders", &batch).await;
        }
        wait_for("all are claimed", LIMIT, async || {
            project.number("select claimed from {schema}.cursor").await == 1001
        })
        .await;
        assert_eq!(project.number("select count(*) from {schema}.exception").await, 1, "one delivery is pending");
        stuck.store(false, Relaxed);
        all_done(&project).await;
        host.drain().await;
        assert_eq!(trace.ended(), ["first", "999"]);
        assert_eq!(*skipped.lock().unwrap(), [0, 999]);
    }
}

/// X3, C5. A version that fails after a newer one has come ends as superseded: no attempt, no dead letter, and the newer one
/// goes out as attempt 1.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn x3_a_failed_version_that_has_lost_ends_and_the_newer_one_runs() {
    for mode in [Concurrency::Parallel, Concurrency::Exclusive, Concurrency::Ordered] {
        for dies in [false, true] {
            let project = Project::declare(&streams("")).await;
            let (trace, stuck, handler) = steps(move |payload, message| match (payload, dies) {
                ("new", _) => {
                    assert_eq!(message.attempt, 1);
                    done()
                }
                (_, true) => rejected(),
                (_, false) => failed(),
            });
            stuck.store(true, Relaxed);
            let host = project.host_with(&[("email", handler)]).await;
            project.produce("orders", &[version("k", mode, "old")]).await;
            wait_for("the first runs", LIMIT, async || trace.started() == 1).await;
            project.produce("orders", &[version("k", mode, "new")]).await;
            stuck.store(false, Relaxed);
            all_done(&project).await;
            let mut ended = trace.ended();
            ended.sort();
            assert_eq!(ended, ["new", "old"], "{mode:?}, dies: {dies}");
            assert_eq!(project.number("select count(*) from {schema}.dead_letter").await, 0);
            assert_eq!(host.count("email", "superseded"), 1);
            host.drain().await;
        }
    }
}

/// Y2. A newer version unblocks an ordered key whose head waits for a retry, or is a dead letter under `block`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn y2_a_newer_version_unblocks_a_stuck_key() {
    for dies in [false, true] {
        let project = Project::declare(&streams("")).await;
        let (trace, _, handler) = steps(move |payload, _| match (payload, dies) {
            ("new", _) => done(),
            (_, true) => rejected(),
            (_, false) => {
                Finished::plain(Outcome::RetryAfter { delay: Duration::from_secs(3600), reason: "later".into() })
            }
        });
        let host = project.host_with(&[("email", handler)]).await;
        project.produce("orders", &[version("k", Concurrency::Ordered, "old")]).await;
        wait_for("the key is blocked", LIMIT, async || {
            project.number("select count(*) from {schema}.message_key_lease where blocked_by = 1").await == 1
        })
        .await;
        project.produce("orders", &[version("k", Concurrency::Ordered, "new")]).await;
        all_done(&project).await;
        host.drain().await;
        assert_eq!(trace.ended(), ["old", "new"]);
        assert_eq!(project.number("select count(*) from {schema}.dead_letter").await, i64::from(dies));
    }
}

/// Y4. A tombstone takes its turn like any version: it fails and comes again, dies and blocks its ordered key, is redriven in
/// its place, and a lower rank that arrives meanwhile stays lost; a higher one unblocks the key.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn y4_a_tombstone_is_retried_and_dies_like_any_version() {
    let project = Project::declare(&streams("")).await;
    let ranked = |rank, payload: Option<&str>| NewMessage {
        rank: Some(rank),
        payload: payload.map(|payload| payload.as_bytes().to_vec()),
        ..version("k", Concurrency::Ordered, "")
    };
    let (told, ends) = (Arc::new(Mutex::new(Vec::new())), Arc::new(Mutex::new(true)));
    let (noted, fails) = (Arc::clone(&told), Arc::clone(&ends));
    let (_, _, handler) = steps(move |_, message| {
        noted.lock().unwrap().push((message.id, message.payload.is_none(), message.attempt, message.redriven));
        if message.payload.is_none() && *fails.lock().unwrap() { failed() } else { done() }
    });
    let host = project.host_with(&[("email", handler)]).await;
    project.produce("orders", &[ranked(5, Some("alive"))]).await;
    all_done(&project).await;
    project.produce("orders", &[ranked(7, None)]).await;
    let blocked =
        "select count(*) from {schema}.message_key_lease l join {schema}.dead_letter d on d.message_id = l.blocked_by
        where d.payload is null and d.compaction_rank = 7 and d.attempts = 3";
    wait_for("it is dead and blocks its key", LIMIT, async || project.number(blocked).await == 1).await;
    assert!(project.produce("orders", &[ranked(6, Some("late"))]).await[0].superseded, "its rank is remembered");
    *ends.lock().unwrap() = false;
    assert_eq!(engine::redrive(&project.database, &[1], false, |_| ()).await.unwrap().redriven, 1);
    all_done(&project).await;
    project.produce("orders", &[ranked(8, Some("again"))]).await;
    all_done(&project).await;
    let died = [(2, true, 1, false), (2, true, 2, false), (2, true, 3, false)];
    let wanted = [&[(1, false, 1, false)], &died[..], &[(2, true, 1, true), (4, false, 1, false)]].concat();
    assert_eq!(*told.lock().unwrap(), wanted);
    *ends.lock().unwrap() = true;
    project.produce("orders", &[ranked(9, None)]).await;
    let blocked = blocked.replace("= 7", "= 9");
    wait_for("another one blocks the key", LIMIT, async || project.number(&blocked).await == 1).await;
    project.produce("orders", &[ranked(10, Some("newer"))]).await;
    all_done(&project).await;
    host.drain().await;
    assert_eq!(told.lock().unwrap().last(), Some(&(6, false, 1, false)));
}

/// X3, Y2. A version that dies with its hosts at the cap, and has lost meanwhile, ends: no dead letter, and its key goes on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn x3_a_version_that_has_lost_and_dies_with_its_host_does_not_block_its_key() {
    let host = "[host]\nlease = \"600ms\"\nheartbeat = \"150ms\"\n";
    let toml = host.to_owned() + &streams("").replace("max_attempts = 3", "max_attempts = 1");
    let project = Project::declare(&toml).await;
    // Its handler never ends, also while the host is on its way out.
    let (doomed_trace, stuck, doomed_handler) = steps(|_, _| done());
    stuck.store(true, Relaxed);
    let doomed = project.host_with(&[("email", doomed_handler)]).await;
    project.produce("orders", &[version("k", Concurrency::Ordered, "old")]).await;
    wait_for("the old one runs", LIMIT, async || doomed_trace.started() == 1).await;
    project.produce("orders", &[version("k", Concurrency::Ordered, "new")]).await;
    wait_for("the new one waits", LIMIT, async || {
        project.number("select count(*) from {schema}.exception where state = 'deferred'").await == 1
    })
    .await;
    drop(doomed);
    let (trace, _, handler) = steps(|_, _| done());
    let heir = project.host_with(&[("email", handler)]).await;
    all_done(&project).await;
    heir.drain().await;
    assert_eq!(trace.ended(), ["new"]);
    assert_eq!(project.number("select count(*) from {schema}.dead_letter").await, 0);
}

/// A turn answers every message that it puts under a claim, whatever else it takes along: what it did not answer would wait for
/// a comparison, and count an attempt if its host died before.
#[tokio::test]
async fn a_turn_answers_all_that_it_claims() {
    for mode in [Concurrency::Exclusive, Concurrency::Ordered] {
        let project = Project::declare(&streams("")).await;
        let host = engine::register(&project.database, "test", LIMIT).await.unwrap();
        let group = project.group("email").await;
        let wanted = Wanted { messages: 100, bytes: 1 << 20, retries: 10 };
        let turn = async |done: Done, idle: Vec<Lane>| {
            let request = Request { done, idle, lane_max: 64, wanted, ..Request::default() };
            engine::claim(&project.database, host, &group, &request).await.expect("claim")
        };
        project.produce("orders", &[version("k", mode, "1")]).await;
        let first = turn(Done::default(), Vec::new()).await;
        assert_eq!(first.claimed.len(), 1);
        // Two versions more, one of which is passed over: the next delivery tells of it.
        for payload in ["2", "3"] {
            project.produce("orders", &[version("k", mode, payload)]).await;
            assert!(turn(Done::default(), Vec::new()).await.claimed.is_empty());
        }
        assert_eq!(project.number("select count(*) from {schema}.skipped_versions").await, 1);
        // What has no key, what has another, and both: with the third version of the key.
        let free = [text("a"), keyed("other", mode, "b"), text("c")];
        for free in [&free[..1], &free[1..2], &free[..]] {
            project.produce("orders", free).await;
            let done = Done { claims: vec![first.claimed[0].token.claim], is_durable: true, ..Done::default() };
            let next = turn(done, vec![Lane { key: "k".into(), number: 0 }]).await;
            let answered = |source| next.claimed.iter().filter(|one| one.token.source == source).count() as i64;
            let pending = "select coalesce(sum(upper(r) - lower(r)), 0)::bigint from {schema}.claim, unnest(pending) r";
            assert_eq!(project.number(pending).await, answered(Source::Log), "{mode:?}");
            let running = "select count(*) from {schema}.exception where state = 'running'";
            assert_eq!(project.number(running).await, answered(Source::Exception), "{mode:?}");
            assert_eq!(answered(Source::Exception), 1, "{mode:?}: the third version");
            // Once more, for other messages behind it.
            project
                .run(
                    "delete from {schema}.claim; update {schema}.exception set state = 'deferred', host_id = null, claim_id = null;
                     delete from {schema}.message_key_lease where message_key <> 'k';
                     insert into {schema}.skipped_versions values (1, 'k', 1) on conflict do nothing",
                )
                .await;
        }
    }
}
