//! Exclusive and ordered keys, each invariant of the semantics by its name.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, atomic::Ordering::Relaxed},
    time::{Duration, Instant},
};

use millstream::{
    engine::{self, Wanted},
    handler::{Concurrency, Finished, Handler, Handling, Message, NewMessage, Outcome},
};
use tokio_util::sync::CancellationToken;

use crate::support::{
    engine::{Project, done, request, text},
    handlers::rounds,
    keyed::{LIMIT, all_done, failed, keyed, steps, streams, version},
    wait_for,
};

/// O1, O3, O7, O8. The head fails twice; those behind it wait, and then come in order, all at attempt 1.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn o1_an_ordered_key_waits_for_its_head_across_failures() {
    let project = Project::declare(&streams("")).await;
    let attempts = Arc::new(Mutex::new(HashMap::<String, Vec<u32>>::new()));
    let noted = Arc::clone(&attempts);
    let (trace, _, handler) = steps(move |payload, message| {
        noted.lock().unwrap().entry(payload.to_owned()).or_default().push(message.attempt);
        if payload == "a3" && message.attempt < 3 { failed() } else { done() }
    });
    let mut batch: Vec<_> = (0..200).map(|n| keyed("a", Concurrency::Ordered, &format!("a{n}"))).collect();
    batch.extend((0..50).map(|n| keyed("b", Concurrency::Ordered, &format!("b{n}"))));
    project.produce("orders", &batch).await;
    let host = project.host_with(&[("email", handler)]).await;
    all_done(&project).await;
    host.drain().await;
    trace.one_at_a_time("a");
    trace.one_at_a_time("b");
    let mut last: Vec<String> = Vec::new();
    for noted in trace.all().into_iter().filter(|noted| noted.starts_with("-a")) {
        if last.last() != Some(&noted) {
            last.push(noted);
        }
    }
    assert_eq!(last, (0..200).map(|n| format!("-a{n}")).collect::<Vec<_>>());
    let attempts = attempts.lock().unwrap();
    assert!(
        attempts.iter().all(|(payload, seen)| *seen == if payload == "a3" { vec![1, 2, 3] } else { vec![1] }),
        "{attempts:?}"
    );
}

/// L1. A key without a mode changes nothing: all its messages run at once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn l1_a_key_without_a_mode_changes_nothing() {
    let project = Project::declare(&streams("")).await;
    let (trace, stuck, handler) = steps(|_, _| done());
    stuck.store(true, Relaxed);
    let batch: Vec<_> = (0..16).map(|n| NewMessage { key: Some("k".into()), ..text(&n.to_string()) }).collect();
    project.produce("orders", &batch).await;
    let host = project.host_with(&[("email", handler)]).await;
    wait_for("all of them run at once", LIMIT, async || trace.started() == 16).await;
    assert_eq!(project.number("select count(*) from {schema}.message_key_lease").await, 0);
    stuck.store(false, Relaxed);
    all_done(&project).await;
    host.drain().await;
}

/// L3, E1, O1, C2. Keys hold wherever their messages stand: each kind in turn, between messages that no key holds up.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn e1_keys_hold_between_messages_without_one() {
    let project = Project::declare(&streams("")).await;
    let (trace, _, handler) = steps(|_, _| done());
    let batch: Vec<_> = (0..300)
        .map(|n| match n % 4 {
            0 => text(&format!("plain{n}")),
            1 => keyed("e", Concurrency::Exclusive, &format!("exclusive{n}")),
            2 => keyed("o", Concurrency::Ordered, &format!("ordered{n}")),
            _ => version("c", Concurrency::Parallel, &format!("compacted{n}")),
        })
        .collect();
    project.produce("orders", &batch).await;
    let host = project.host_with(&[("email", handler)]).await;
    all_done(&project).await;
    host.drain().await;
    trace.one_at_a_time("exclusive");
    trace.one_at_a_time("ordered");
    let ended = |kind: &str| trace.ended().into_iter().filter(|payload| payload.starts_with(kind)).collect::<Vec<_>>();
    assert_eq!(ended("ordered"), (2..300).step_by(4).map(|n| format!("ordered{n}")).collect::<Vec<_>>());
    assert_eq!(ended("compacted"), ["compacted299"]);
    assert_eq!((ended("exclusive").len(), ended("plain").len()), (75, 75));
}

/// E1. What a turn takes of a key is committed durably, a retry too: a crash of the database must not give the key to another
/// host while this one runs it. Without keys it need not be: then it is only delivered again.
#[tokio::test]
async fn e1_a_turn_that_takes_a_key_is_durable() {
    let project = Project::declare(&streams("")).await;
    let host = engine::register(&project.database, "test", LIMIT).await.unwrap();
    project
        .produce("orders", &[keyed("k", Concurrency::Ordered, "0"), keyed("k", Concurrency::Exclusive, "1"), text("2")])
        .await;
    project.run("update {schema}.cursor set claimed = 3").await;
    let turn = format!(
        "select count(*) from {{schema}}.claim_1(1, {host}, 0, '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', false, '{{}}', '{{}}', '{{}}', '{{}}',
         1, 1, 1048576, 1, null, false, null, null, null, null)"
    );
    for (message, mode, is_durable) in [(1, "ordered", 1), (2, "exclusive", 1), (3, "parallel", 0)] {
        let key = if mode == "parallel" { "null" } else { "'k'" };
        project
            .run(&format!(
                "delete from {{schema}}.message_key_lease; delete from {{schema}}.exception;
                 insert into {{schema}}.exception (group_id, message_id, state, due_at, message_key, concurrency)
                 values (1, {message}, 'waiting', clock_timestamp(), {key}, '{mode}');
                 insert into {{schema}}.message_key_lease (group_id, message_key, blocked_by) select 1, 'k', 1 where '{mode}' = 'ordered'"
            ))
            .await;
        let mut session = project.session().await;
        session.run("begin").await;
        assert_eq!(session.number(&turn).await, 2, "{mode}: its retry is taken");
        let durable = "select (current_setting('synchronous_commit') = 'on')::integer::bigint";
        assert_eq!(session.number(durable).await, is_durable, "{mode}");
        session.run("rollback").await;
    }
}

/// L4. Keys are bytes: case, accents and lookalikes are other keys, and so is the same key in another group.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn l4_keys_that_only_look_alike_never_wait_for_each_other() {
    let second = "[groups.second]\nstream = \"orders\"\nhandler = \"email.wasm\"";
    let project = Project::declare(&streams(second)).await;
    let (trace, stuck, handler) = steps(|_, _| done());
    stuck.store(true, Relaxed);
    let keys = ["straße", "STRASSE", "strasse", "e\u{301}", "é", " k", "k", "k ", "K"];
    let batch: Vec<_> = keys.iter().map(|key| keyed(key, Concurrency::Ordered, key)).collect();
    project.produce("orders", &batch).await;
    let host = project.host_with(&[("email", Arc::clone(&handler)), ("second", handler)]).await;
    wait_for("all keys of both groups run at once", LIMIT, async || trace.started() == 2 * keys.len()).await;
    stuck.store(false, Relaxed);
    all_done(&project).await;
    host.drain().await;
}

/// E1, E4. One at a time; a failed message leaves, its key goes on, and its retry takes its turn.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn e4_an_exclusive_key_goes_on_while_a_failed_message_waits() {
    let project = Project::declare(&streams("")).await;
    let (trace, _, handler) =
        steps(|payload, message| if payload == "x0" && message.attempt == 1 { failed() } else { done() });
    let batch: Vec<_> = (0..100).map(|n| keyed("x", Concurrency::Exclusive, &format!("x{n}"))).collect();
    project.produce("orders", &batch).await;
    let host = project.host_with(&[("email", handler)]).await;
    all_done(&project).await;
    host.drain().await;
    trace.one_at_a_time("x");
    let ended = trace.ended();
    assert_eq!(ended.len(), 101);
    assert_eq!(ended[..2], ["x0", "x1"], "the key did not wait for the retry");
    assert!(ended[2..].contains(&"x0".to_owned()));
}

/// E5. A key that is stuck and deep takes no slot from others and hides nothing behind it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn e5_a_stuck_deep_key_hides_no_other() {
    let project = Project::declare(&streams("slots = 2")).await;
    let (trace, _, handler) = steps(|payload, _| {
        if payload.starts_with('h') {
            Finished::plain(Outcome::Later { delay: Duration::from_secs(60) })
        } else {
            done()
        }
    });
    let mut batch: Vec<_> = (0..5000).map(|n| keyed("hot", Concurrency::Ordered, &format!("h{n}"))).collect();
    batch.extend((0..100).map(|n| keyed(&format!("k{n}"), Concurrency::Ordered, &format!("k{n}"))));
    project.produce("orders", &batch).await;
    let host = project.host_with(&[("email", handler)]).await;
    wait_for("the other keys", LIMIT, async || {
        trace.ended().iter().filter(|ended| ended.starts_with('k')).count() == 100
    })
    .await;
    wait_for("the hot key waits", LIMIT, async || {
        project.number("select count(*) from {schema}.exception where state = 'deferred'").await == 4999
    })
    .await;
    assert_eq!(trace.ended().iter().filter(|ended| ended.starts_with('h')).count(), 1);
    assert_eq!(
        project
            .number("select count(*) from {schema}.message_key_lease where blocked_by = 1 and host_id is null")
            .await,
        1
    );
    host.drain().await;
}

/// E9, O2. A host leaves in the middle: its keys go to the other, in order, and nobody counts an attempt.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn o2_order_holds_while_hosts_come_and_go() {
    let project = Project::declare(&streams("")).await;
    let worst = Arc::new(Mutex::new(1));
    let noted = Arc::clone(&worst);
    let (trace, _, handler) = steps(move |_, message| {
        let mut worst = noted.lock().unwrap();
        *worst = message.attempt.max(*worst);
        done()
    });
    let batch: Vec<_> =
        (0..2000).map(|n| keyed(&format!("k{}", n % 20), Concurrency::Ordered, &format!("k{}.{n}", n % 20))).collect();
    project.produce("orders", &batch).await;
    let mut before = project.host_with(&[("email", Arc::clone(&handler))]).await;
    for turn in 1..=4 {
        wait_for("some progress", LIMIT, async || trace.ended().len() >= turn * 300).await;
        let next = project.host_with(&[("email", Arc::clone(&handler))]).await;
        before.drain().await;
        before = next;
    }
    all_done(&project).await;
    before.drain().await;
    assert_eq!(*worst.lock().unwrap(), 1, "a graceful hand-over counts no attempt");
    for key in 0..20 {
        trace.one_at_a_time(&format!("k{key}."));
        let of_key: Vec<_> = trace.ended().into_iter().filter(|ended| ended.starts_with(&format!("k{key}."))).collect();
        let wanted: Vec<_> = (0..100).map(|n| format!("k{key}.{}", n * 20 + key)).collect();
        assert_eq!(of_key, wanted);
    }
}

/// E7, E9. A host that lost its lease with messages of keys on their way to a slot goes on with these keys under its new
/// identity.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn e9_a_host_that_lost_its_lease_goes_on_with_its_keys() {
    let host = "[host]\nlease = \"1s\"\nheartbeat = \"200ms\"\n";
    let project = Project::declare(&(host.to_owned() + &streams("slots = 2"))).await;
    project.database.expect_log("lost the lease");
    let (trace, stuck, handler) = steps(|_, _| done());
    let batch: Vec<_> = (0..2000)
        .map(|n| keyed(&format!("k{}", n % 100), Concurrency::Ordered, &format!("k{}.{n}", n % 100)))
        .collect();
    project.produce("orders", &batch).await;
    let host = project.host_with(&[("email", handler)]).await;
    wait_for("some progress", LIMIT, async || trace.ended().len() > 100).await;
    stuck.store(true, Relaxed);
    let keys = "select count(*) from {schema}.message_key_lease where host_id is not null";
    wait_for("it has more keys than slots", LIMIT, async || project.number(keys).await > 4).await;
    project.run("update {schema}.host set expires_at = clock_timestamp()").await;
    wait_for("a new identity", LIMIT, async || host.counters.snapshot()["leases_lost"].as_u64() >= Some(1)).await;
    stuck.store(false, Relaxed);
    all_done(&project).await;
    host.drain().await;
}

/// O11. A delayed message on an ordered key holds the key until it is due.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn o11_a_delayed_message_holds_its_ordered_key() {
    let project = Project::declare(&streams("")).await;
    let (trace, _, handler) = steps(|_, _| done());
    let mut batch: Vec<_> = (0..4).map(|n| keyed("a", Concurrency::Ordered, &format!("a{n}"))).collect();
    batch[1].delay = Some(Duration::from_secs(3));
    batch.push(keyed("b", Concurrency::Ordered, "b"));
    batch[2].delay = Some(Duration::from_millis(1));
    let host = project.host_with(&[("email", handler)]).await;
    project.produce("orders", &batch).await;
    wait_for("the others", LIMIT, async || trace.ended().len() == 2).await;
    wait_for("the key is blocked", LIMIT, async || {
        project.number("select count(*) from {schema}.message_key_lease where blocked_by = 2").await == 1
    })
    .await;
    assert_eq!(trace.ended().len(), 2);
    all_done(&project).await;
    host.drain().await;
    let of_key: Vec<_> = trace.ended().into_iter().filter(|ended| ended.starts_with('a')).collect();
    assert_eq!(of_key, ["a0", "a1", "a2", "a3"]);
}

/// T5 with a key. The next of a key starts only after the effects of the one before are committed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn o1_with_effects_the_next_starts_after_the_commit() {
    let project = Project::declare(&(streams("") + "[streams.receipts]")).await;
    let database = project.database.another_host().await;
    struct Checks {
        database: millstream::database::Database,
        wrong: Arc<Mutex<Vec<String>>>,
    }
    impl Handler for Checks {
        fn handle<'a>(&'a self, message: Message, _cut: &'a CancellationToken) -> Handling<'a> {
            Box::pin(async move {
                let payload = String::from_utf8(message.payload.unwrap()).unwrap();
                let before: i64 = payload.parse().unwrap();
                let found =
                    crate::support::engine::number(&self.database, "select count(*) from {schema}.message_log_2").await;
                if found != before {
                    self.wrong.lock().unwrap().push(format!("{payload}: {found}"));
                }
                let receipt = NewMessage { stream: "receipts".into(), key: Some("r".into()), ..text(&payload) };
                Finished { produced: vec![receipt], ..done() }
            })
        }
    }
    let wrong = Arc::new(Mutex::new(Vec::new()));
    let handler = Arc::new(Checks { database, wrong: Arc::clone(&wrong) });
    let batch: Vec<_> = (0..50).map(|n| keyed("a", Concurrency::Ordered, &n.to_string())).collect();
    project.produce("orders", &batch).await;
    let host = project.host_with(&[("email", handler)]).await;
    all_done(&project).await;
    host.drain().await;
    assert_eq!(*wrong.lock().unwrap(), Vec::<String>::new());
    assert_eq!(project.number("select count(*) from {schema}.message_log_2").await, 50);
}

/// The stream's key policy: the producer's option, else the first rule that matches, else the default.
#[tokio::test]
async fn key_rules_decide_what_the_producer_leaves_open() {
    let project = Project::declare(
        r#"
        [streams.orders]
        key = { concurrency = "exclusive" }
        [[streams.orders.key_rules]]
        match = "acct-*"
        concurrency = "ordered"
        shards = 4
        [[streams.orders.key_rules]]
        match = "state-?"
        compaction = true
        "#,
    )
    .await;
    let plain = |key: &str| NewMessage { key: Some(key.into()), ..text("x") };
    let mut batch = vec![
        text("x"),
        plain("other"),
        plain("state-1"),
        plain("state-10"),
        keyed("acct-1", Concurrency::Parallel, "x"),
    ];
    batch.extend((0..64).map(|_| plain("acct-1")));
    project.produce("orders", &batch).await;
    let rows = "select string_agg(concat_ws(' ', message_key, concurrency, compaction_rank), ', ' order by id) from {schema}.message_log_1 where id <= 5";
    let told: String =
        sqlx::query_scalar(project.database.schema.sql(rows)).fetch_one(&project.database.pool).await.unwrap();
    assert_eq!(told, "parallel, other exclusive, state-1 exclusive 0, state-10 exclusive, acct-1 parallel");
    let lanes = "select count(distinct lane) from {schema}.message_log_1 where concurrency = 'ordered' and lane between 0 and 3";
    assert_eq!(project.number(lanes).await, 4);
}

/// O3, R4. Twenty keys whose heads fail, and ten slots: the failing ones wait without a slot, and every healthy message is
/// delivered at its first attempt.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r4_more_poison_keys_than_slots_hold_up_nobody() {
    let toml = streams("slots = 10").replace("base = \"20ms\", max = \"20ms\"", "base = \"1h\", max = \"1h\"");
    let project = Project::declare(&toml).await;
    let (trace, _, handler) = steps(|payload, _| if payload.starts_with('p') { failed() } else { done() });
    let mut batch = Vec::new();
    for round in 0..10 {
        batch.extend((0..20).map(|key| keyed(&format!("p{key}"), Concurrency::Ordered, &format!("p{key}"))));
        batch.extend((0..20).map(|key| keyed(&format!("h{key}"), Concurrency::Ordered, &format!("h{key}.{round}"))));
    }
    project.produce("orders", &batch).await;
    let host = project.host_with(&[("email", handler)]).await;
    wait_for("the healthy ones", LIMIT, async || {
        trace.ended().iter().filter(|ended| ended.starts_with('h')).count() == 200
    })
    .await;
    wait_for("the others wait", LIMIT, async || {
        project.number("select count(*) from {schema}.exception where state = 'deferred'").await == 180
    })
    .await;
    assert_eq!(trace.ended().iter().filter(|ended| ended.starts_with('p')).count(), 20, "each head once");
    assert_eq!(project.number("select count(*) from {schema}.exception where state = 'running'").await, 0);
    host.drain().await;
}

/// A group's override is taken away while a host holds messages that it had claimed without their keys: when that host
/// dies they wait behind their key, in order, before anything that comes later.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_claimed_under_an_override_comes_in_order_once_it_is_gone() {
    let loose = streams("concurrency_override = \"parallel\"");
    let project = Project::declare(&loose).await;
    project
        .produce("orders", &(0..5).map(|n| keyed("a", Concurrency::Ordered, &format!("a{n}"))).collect::<Vec<_>>())
        .await;
    let host = engine::register(&project.database, "dies", Duration::from_millis(1)).await.unwrap();
    let group = project.group("email").await;
    project.run("update {schema}.host set expires_at = now() + interval '1 minute'").await;
    let wanted = Wanted { messages: 10, bytes: 1 << 20, retries: 0 };
    let turn = engine::claim(&project.database, host, &group, &request(&[], wanted)).await.unwrap();
    assert_eq!((turn.claimed.len(), turn.claimed[0].keyed.is_none()), (5, true), "in parallel");
    let project = project.declare_again(&streams("")).await;
    project.run("update {schema}.host set expires_at = now() - interval '1 minute'").await;
    project.produce("orders", &[keyed("a", Concurrency::Ordered, "a5")]).await;
    for orphaned in engine::orphaned_groups(&project.database, host).await.unwrap() {
        assert_eq!(engine::recover(&project.database, host, orphaned).await.unwrap(), 5);
    }
    let (trace, _, handler) = steps(|_, _| done());
    let heir = project.host_with(&[("email", handler)]).await;
    all_done(&project).await;
    heir.drain().await;
    assert_eq!(trace.ended(), ["a0", "a1", "a2", "a3", "a4", "a5"]);
}

/// E8. With one message done the next of its key runs at once, although another host had it: nobody waits for a poll, which
/// comes after a minute here.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn e8_the_next_message_runs_without_waiting_for_a_poll() {
    let toml = streams("") + "\n[host]\npoll_min = \"10s\"\npoll_max = \"60s\"";
    let project = Project::declare(&toml).await;
    let (trace, stuck, handler) = steps(|_, _| done());
    stuck.store(true, Relaxed);
    let host = project.host_with(&[("email", handler)]).await;
    project.produce("orders", &[keyed("a", Concurrency::Ordered, "a0")]).await;
    engine::hint(&project.database, "orders").await.unwrap();
    wait_for("the first runs", LIMIT, async || trace.started() == 1).await;
    project
        .produce("orders", &(1..50).map(|n| keyed("a", Concurrency::Ordered, &format!("a{n}"))).collect::<Vec<_>>())
        .await;
    engine::hint(&project.database, "orders").await.unwrap();
    wait_for("the others are claimed", LIMIT, async || {
        project.number("select claimed from {schema}.cursor").await == 50
    })
    .await;
    stuck.store(false, Relaxed);
    wait_for("all are done", Duration::from_secs(40), async || trace.ended().len() == 50).await;
    host.drain().await;
}

/// E8. Two hosts, and no poll for a long time: what another host deferred behind a leased key runs at once when the key is
/// acknowledged, and when its host leaves, on the other one. In the long form within a second.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn e8_what_another_host_deferred_is_claimable_at_once() {
    let long = "[host]\npoll_min = \"10s\"\npoll_max = \"60s\"\nlease = \"300s\"\nheartbeat = \"60s\"\n";
    for leaves in [false, true] {
        for mode in [Concurrency::Exclusive, Concurrency::Ordered] {
            let project = Project::declare(&(streams("") + long)).await;
            let (first_trace, first_stuck, first_handler) = steps(|_, _| done());
            first_stuck.store(true, Relaxed);
            let first = project.host_with(&[("email", first_handler)]).await;
            project.produce("orders", &[keyed("a", mode, "a0")]).await;
            engine::hint(&project.database, "orders").await.unwrap();
            wait_for("the first host has the key", LIMIT, async || first_trace.started() == 1).await;
            let turns =
                "select count(*) from pg_stat_activity where datname = current_database() and query like '%.claim' || '_1(%'
                and state_change > clock_timestamp() - interval '300 ms'";
            wait_for("it waits for a poll", LIMIT, async || project.number(turns).await == 0).await;
            // Nobody hints the first host of these, so a turn by hand finds them, and the key leased.
            let group = project.group("email").await;
            let hand = engine::register(&project.database, "hand", LIMIT).await.unwrap();
            let behind: Vec<_> = (1..10).map(|n| keyed("a", mode, &format!("a{n}"))).collect();
            project.produce("orders", &behind).await;
            let wanted = Wanted { messages: 20, bytes: 1 << 20, retries: 0 };
            let deferred = "select count(*) from {schema}.exception where state = 'deferred'";
            wait_for("they are deferred", LIMIT, async || {
                // More than once, if the first host has a turn just then.
                let turn = engine::claim(&project.database, hand, &group, &request(&[], wanted)).await.unwrap();
                assert!(turn.claimed.is_empty(), "the key is leased");
                project.number(deferred).await == 9
            })
            .await;
            let (trace, _, handler) = steps(|_, _| done());
            let second = project.host_with(&[("email", handler)]).await;
            wait_for("it waits for a poll", LIMIT, async || project.number(turns).await == 0).await;
            assert_eq!(trace.started(), 0);
            let released = Instant::now();
            first_stuck.store(false, Relaxed);
            let mut first = Some(first);
            if leaves {
                first.take().unwrap().drain().await;
            }
            let ended = || trace.ended().len() + first_trace.ended().len();
            wait_for("all are done", LIMIT, async || ended() == 10).await;
            let took = released.elapsed();
            assert!(
                took < rounds(Duration::from_secs(9), Duration::from_secs(1)),
                "{took:?}, and a poll comes after 10 s"
            );
            if let Some(first) = first {
                first.drain().await;
            }
            second.drain().await;
        }
    }
}
