//! Several hosts of the real program on one database: killed, frozen, stopped. Method: `flaky` handlers that sleep and
//! then report what their delivery looked like; the reports commit with the acknowledgements, so they are what happened.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use rustix::process::Signal;
use serde_json::{Value, json};

use crate::support::{
    PATIENCE, Program, TestDatabase, database, empty_database,
    handlers::rounds,
    hosts::{
        SHORT_LEASE, all_reported, assert_tells_no_secret, held_by, number, playground, reports, settled, start_up,
        stats, tell, up,
    },
    proxy::{Fate, Proxy},
    wait_for,
};

const WORKER: &str = "timeout = \"2m\"\nretry = { max_attempts = 5, base = \"10ms\" }";

/// A host of its own, ready.
async fn host(url: &str) -> Program {
    let mut program = Program::with_examples(&playground(SHORT_LEASE, WORKER));
    up(&mut program, url).await;
    program
}

async fn stop(mut program: Program) {
    program.signal(Signal::TERM);
    assert!(program.ended(PATIENCE).await.success(), "{}", program.stderr());
    assert_tells_no_secret(&program);
}

/// Must show: 100,000 messages of 1 KiB by `produce --ndjson`, fewer in a short run, are all delivered to a real handler by the
/// real program, and no row of theirs is left.
#[tokio::test]
async fn many_lines_are_delivered_once_each_and_leave_no_row() {
    let count = rounds(10_000, 100_000);
    let database = database().await;
    let url = database.url().await;
    let program = host(&url).await;
    let filler = "x".repeat(970);
    let lines: String = (0..count)
        .map(|n| format!("{{\"payload\": {{\"do\": \"report\", \"ms\": {n}, \"reason\": \"{filler}\"}}}}\n"))
        .collect();
    let (status, told, said) =
        program.run_with_input(&["produce", "playground", "--ndjson", "--database-url", &url], lines.as_bytes());
    assert!(status.success(), "{told}{said}");
    once(&all_reported(&database, count).await, count);
    let (status, groups, said) = program.run(&["groups", "worker", "--output", "json", "--database-url", &url]);
    assert!(status.success(), "{said}");
    let group = &serde_json::from_str::<Value>(&groups).unwrap()[0];
    assert_eq!((&group["lag"], &group["lag_exact"], &group["oldest_age_ms"]), (&json!(0), &json!(true), &Value::Null));
    let rows = "select (select count(*) from {schema}.dead_letter) + (select count(*) from {schema}.claim)
        + (select count(*) from {schema}.exception) + (select count(*) from {schema}.cursor_gap)";
    wait_for("nothing is left over", PATIENCE, async || number(&database, rows).await == 0).await;
    stop(program).await;
}

/// Each message reported once.
fn once(reports: &[(i64, i64)], count: usize) -> HashMap<i64, i64> {
    let attempts: HashMap<i64, i64> = reports.iter().copied().collect();
    assert_eq!((attempts.len(), reports.len()), (count, count), "every effect exactly once");
    attempts
}

/// What a host that was just killed had claimed and not settled. Postgres may still be about the last that it asked for.
async fn left_by(database: &TestDatabase, pid: i32) -> Vec<i64> {
    let sql = format!(
        "select coalesce(array_agg(m), '{{}}') from {{schema}}.claim c, unnest(c.pending) as r, generate_series(lower(r), upper(r) - 1) as m
         where c.host_id in (select id from {{schema}}.host where name like '%:{pid}')"
    );
    let look =
        async || -> Vec<i64> { sqlx::query_scalar(database.schema.sql(&sql)).fetch_one(&database.pool).await.unwrap() };
    let mut left = look().await;
    loop {
        tokio::time::sleep(Duration::from_millis(200)).await;
        let now = look().await;
        if now == left {
            return left;
        }
        left = now;
    }
}

#[tokio::test]
async fn a_killed_hosts_work_is_done_by_another_with_effects_exactly_once() {
    let database = database().await;
    let url = database.url().await;
    let (mut killed, other) = (host(&url).await, host(&url).await);
    tell(&database, json!({"do": "sleep", "ms": 100, "then": "report"}), 1000).await;
    wait_for("both are at work", PATIENCE, async || {
        reports(&database).await.len() > 100
            && !held_by(&database, &killed).await.is_empty()
            && !held_by(&database, &other).await.is_empty()
    })
    .await;
    let name = killed.pid();
    killed.signal(Signal::KILL);
    killed.ended(PATIENCE).await;
    let died = Instant::now();
    let in_flight = left_by(&database, name).await;
    assert!(!in_flight.is_empty());
    wait_for("its first message is delivered again", PATIENCE, async || {
        reports(&database).await.iter().any(|(_, attempt)| *attempt == 2)
    })
    .await;
    // The lease, a second, and what the delivery itself takes; measured only where nothing else runs.
    assert!(died.elapsed() < rounds(PATIENCE, Duration::from_millis(1500 + 1000 + 400)), "{:?}", died.elapsed());
    let attempts = once(&all_reported(&database, 1000).await, 1000);
    let again: Vec<i64> = attempts.iter().filter(|(_, attempt)| **attempt == 2).map(|(id, _)| *id).collect();
    assert!(attempts.values().all(|attempt| [1, 2].contains(attempt)));
    assert_eq!(sorted(again), sorted(in_flight), "those in flight, and no other, are attempt 2");
    assert_eq!(number(&database, "select count(*) from {schema}.dead_letter").await, 0);
    stop(other).await;
}

fn sorted(mut ids: Vec<i64>) -> Vec<i64> {
    ids.sort_unstable();
    ids
}

#[tokio::test]
async fn a_frozen_hosts_late_settles_change_nothing() {
    let database = database().await;
    let url = database.url().await;
    let frozen = host(&url).await;
    tell(&database, json!({"do": "sleep", "ms": 1000, "then": "report"}), 16).await;
    wait_for("all are in flight", PATIENCE, async || held_by(&database, &frozen).await.len() == 16).await;
    frozen.signal(Signal::STOP);
    let frozen_as = stats(&database, &frozen).await["host"].clone();
    let other = host(&url).await;
    let attempts = once(&all_reported(&database, 16).await, 16);
    assert!(attempts.values().all(|attempt| *attempt == 2), "{attempts:?}");
    frozen.signal(Signal::CONT);
    wait_for("it counts what was fenced", PATIENCE, async || {
        let stats = stats(&database, &frozen).await;
        // Those that no slot had begun when it froze are dropped without a count.
        stats["host"] != frozen_as && stats["groups"]["worker"]["fenced"].as_i64().is_some_and(|count| count > 0)
    })
    .await;
    assert!(stats(&database, &frozen).await["leases_lost"].as_u64() >= Some(1));
    settled(&database).await;
    once(&reports(&database).await, 16);
    let fenced = stats(&database, &frozen).await["groups"]["worker"]["fenced"].as_i64().unwrap();
    assert!((1..=16).contains(&fenced), "{fenced} counted");
    // It works on under its new identity.
    stop(other).await;
    tell(&database, json!({"do": "report"}), 10).await;
    let attempts = once(&all_reported(&database, 26).await, 26);
    assert_eq!(attempts.values().filter(|attempt| **attempt == 1).count(), 10);
    stop(frozen).await;
}

/// The worst moment to freeze: its settle is on the way, and reaches Postgres when another host has taken over. Method: a proxy
/// keeps the statements back, whose own sender is frozen until they are answered. Meanwhile there is something to claim.
async fn settle_too_late(is_settle: fn(&str) -> bool, command: Value, count: usize) {
    let database = database().await;
    let url = database.url().await;
    let proxy = Proxy::start(&url, move |statement| if is_settle(statement) { Fate::Late } else { Fate::Answered });
    let frozen = host(proxy.url()).await;
    tell(&database, command, i32::try_from(count).unwrap()).await;
    wait_for("all are in flight", PATIENCE, async || held_by(&database, &frozen).await.len() == count).await;
    tokio::time::sleep(Duration::from_millis(300)).await; // it has looked for more by then
    proxy.begin();
    wait_for("a settle is on the way", PATIENCE, async || proxy.kept() > 0).await;
    frozen.signal(Signal::STOP);
    let frozen_as = stats(&database, &frozen).await["host"].clone();
    let other = host(&url).await;
    let again = ["delivered", "attempt=2 ", "outcome=\"done\""];
    wait_for("the other has done it all", PATIENCE, async || other.lines(&again) == count).await;
    settled(&database).await;
    stop(other).await;
    tell(&database, json!({"do": "report"}), 3).await;
    let before = everything(&database).await;
    proxy.send_on();
    wait_for("Postgres has answered them", PATIENCE, async || proxy.answered_late() == proxy.kept()).await;
    assert_eq!(everything(&database).await, before, "what comes late settles nothing and claims nothing");
    frozen.signal(Signal::CONT);
    wait_for("it goes on as another", PATIENCE, async || {
        let stats = stats(&database, &frozen).await;
        stats["host"] != frozen_as && stats["groups"]["worker"]["fenced"].as_i64().is_some_and(|count| count > 0)
    })
    .await;
    let receipts = usize::try_from(before[1]).unwrap();
    once(&all_reported(&database, receipts + 3).await, receipts + 3);
    assert_eq!(number(&database, "select count(*) from {schema}.dead_letter").await, 0);
    stop(frozen).await;
}

/// What a settle or a claim may write: receipts, failures, dead letters, what is held and what waits, and how far the group is.
async fn everything(database: &TestDatabase) -> Vec<i64> {
    let tables = ["message_log_1", "message_log_2", "exception", "dead_letter", "claim", "message_key_lease"];
    let mut counts = Vec::new();
    for table in tables {
        counts.push(number(database, &format!("select count(*) from {{schema}}.{table}")).await);
    }
    counts.push(number(database, "select claimed from {schema}.cursor").await);
    counts
}

#[tokio::test]
async fn t7_a_settle_with_effects_that_arrives_after_a_recovery_leaves_no_trace() {
    let is_settle = |statement: &str| statement.contains("for key share");
    settle_too_late(is_settle, json!({"do": "sleep", "ms": 2000, "then": "report"}), 16).await;
}

/// It holds the locks that keep recovery out, and other claims, while it is frozen: whoever takes over ends its session.
async fn freeze_inside(kept_back: fn(&str) -> Fate, command: Value, count: usize) {
    let database = database().await;
    let url = database.url().await;
    let proxy = Proxy::start(&url, kept_back);
    let frozen = host(proxy.url()).await;
    proxy.begin();
    tell(&database, command.clone(), i32::try_from(count).unwrap()).await;
    wait_for("it is inside", PATIENCE, async || proxy.kept() > 0).await;
    let named = "select count(*) from {schema}.host h join pg_stat_activity a on a.application_name = left(concat_ws(' ', 'millstream', h.sessions, h.name), 63)";
    assert!(number(&database, named).await > 0, "its sessions have its name");
    frozen.signal(Signal::STOP);
    let other = host(&url).await;
    let ready = Instant::now();
    once(&all_reported(&database, count).await, count);
    let took = ready.elapsed();
    println!("all was done {took:?} after it froze");
    // What is left of the lease, a second, the second after which a session counts as frozen, and two rounds of work.
    assert!(took < rounds(PATIENCE, Duration::from_millis(1500 + 1000 + 1500 + 1000)), "{took:?}");
    frozen.signal(Signal::CONT);
    proxy.send_on();
    settled(&database).await;
    once(&reports(&database).await, count);
    tell(&database, command, 10).await;
    once(&all_reported(&database, count + 10).await, count + 10);
    for program in [frozen, other] {
        stop(program).await;
    }
}

#[tokio::test]
async fn a_host_that_is_frozen_inside_of_a_settle_does_not_hold_up_its_recovery() {
    let is_inside = |statement: &str| if statement.contains(".settle_claims(") { Fate::Late } else { Fate::Answered };
    freeze_inside(is_inside, json!({"do": "report"}), 100).await;
}

/// Its claim is more than the buffers between it and Postgres hold.
#[tokio::test]
async fn a_host_that_is_frozen_inside_of_a_claim_does_not_hold_up_its_recovery() {
    let is_inside = |statement: &str| if statement.contains(".claim_1(") { Fate::Unread } else { Fate::Answered };
    let filler = "x".repeat(64 << 10);
    freeze_inside(is_inside, json!({"do": "report", "reason": filler}), 100).await;
}

#[tokio::test]
async fn a_turn_that_settles_and_arrives_after_a_recovery_changes_nothing() {
    // The one message of its claim: the turn that follows settles it.
    settle_too_late(|statement| statement.contains(".claim_1("), json!({"do": "sleep", "ms": 2000}), 1).await;
}

#[tokio::test]
async fn a_stopped_host_finishes_what_it_can_and_hands_back_the_rest() {
    let database = database().await;
    let url = database.url().await;
    let mut stopped = host(&url).await;
    // It is there before, and takes nothing: its handler comes later.
    let mut other = Program::with_examples(&playground(SHORT_LEASE, WORKER));
    let (handler, aside) = (other.handlers().join("flaky.wasm"), other.folder().join("aside.wasm"));
    std::fs::rename(&handler, &aside).unwrap();
    up(&mut other, &url).await;
    let short = tell(&database, json!({"do": "sleep", "ms": 2000, "then": "report"}), 8).await;
    let long = tell(&database, json!({"do": "sleep", "ms": 8000, "then": "report"}), 8).await;
    wait_for("all are in flight", PATIENCE, async || held_by(&database, &stopped).await.len() == 16).await;
    let before = stopped.log_end();
    stopped.signal(Signal::TERM);
    stopped.logged("stopping: ").await;
    std::fs::rename(&aside, &handler).unwrap();
    let late = tell(&database, json!({"do": "report"}), 4).await;
    assert!(stopped.ended(PATIENCE).await.success(), "{}", stopped.stderr());
    let ended = Instant::now();
    assert_eq!(stopped.lines_after(before, &["delivered", "outcome=\"done\""]), 8, "finished after the signal");
    wait_for("the other has begun the rest", PATIENCE, async || held_by(&database, &other).await.len() == 8).await;
    assert!(ended.elapsed() < rounds(PATIENCE, Duration::from_secs(1)), "{:?}", ended.elapsed());
    let attempts = once(&all_reported(&database, 20).await, 20);
    assert!(attempts.values().all(|attempt| *attempt == 1), "a hand-back counts no attempt");
    let done =
        |program: &Program, id: &i64| program.lines(&["delivered", &format!("message_id={id} "), "outcome=\"done\""]);
    assert!(short.iter().all(|id| done(&stopped, id) == 1 && done(&other, id) == 0), "finished within drain_timeout");
    assert!(long.iter().all(|id| done(&stopped, id) == 0 && done(&other, id) == 1), "handed back");
    assert!(late.iter().all(|id| done(&stopped, id) == 0 && done(&other, id) == 1), "no new claim");
    assert_eq!(number(&database, "select count(*) from {schema}.host").await, 1, "its identity is given up");
    stop(other).await;
}

/// It never looks up from its loop, so it is interrupted; that is no failure of its message.
#[tokio::test]
async fn a_spinning_handler_is_cut_at_the_end_of_the_drain() {
    let database = database().await;
    let mut program = Program::with_examples(&playground("drain_timeout = \"1s\"", WORKER));
    up(&mut program, &database.url().await).await;
    tell(&database, json!({"do": "spin"}), 3).await;
    wait_for("they run", PATIENCE, async || held_by(&database, &program).await.len() == 3).await;
    program.signal(Signal::INT);
    assert!(program.ended(PATIENCE).await.success(), "{}", program.stderr());
    let handed_back =
        "select count(*) from {schema}.exception where state = 'waiting' and failures = 0 and due_at <= now()";
    assert_eq!(number(&database, handed_back).await, 3);
    assert_eq!(number(&database, "select count(*) from {schema}.host").await, 0);
}

#[tokio::test]
async fn a_second_signal_stops_at_once() {
    let database = database().await;
    let url = database.url().await;
    let slow = playground("drain_timeout = \"2m\"", "timeout = \"5m\"");
    let mut program = Program::with_examples(&slow);
    up(&mut program, &url).await;
    tell(&database, json!({"do": "sleep", "ms": 120_000}), 1).await;
    tell(&database, json!({"do": "spin"}), 1).await;
    wait_for("they run", PATIENCE, async || held_by(&database, &program).await.len() == 2).await;
    program.signal(Signal::TERM);
    program.logged("stopping: ").await;
    program.signal(Signal::TERM);
    assert_eq!(program.ended(Duration::from_secs(20)).await.code(), Some(1));
    assert!(program.stderr().contains("stopped at once by a second signal"), "{}", program.stderr());
    assert_tells_no_secret(&program);
}

#[tokio::test]
async fn hosts_that_start_at_once_share_an_empty_database() {
    let database = empty_database().await;
    let url = database.url().await;
    let mut programs: Vec<_> = (0..4).map(|_| Program::with_examples(&playground(SHORT_LEASE, WORKER))).collect();
    programs.iter_mut().for_each(|program| start_up(program, &url, &[]));
    for program in &programs {
        program.logged("ready: ").await;
    }
    tell(&database, json!({"do": "sleep", "ms": 20, "then": "report"}), 400).await;
    let attempts = once(&all_reported(&database, 400).await, 400);
    assert!(attempts.values().all(|attempt| *attempt == 1));
    assert_eq!(programs.iter().map(|program| program.lines(&["create group worker"])).sum::<usize>(), 1);
    for program in programs {
        stop(program).await;
    }
}
