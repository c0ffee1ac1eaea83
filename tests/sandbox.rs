//! The sandbox holds every misbehaving handler, says what it did, and the next message is fine. Method: the `flaky`
//! example, which does what its message says, and hand-made components; no Postgres.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use millstream::{
    config::Instance,
    handler::{ERROR_BYTES_MAX, Failure, FailureClass, Finished, Handler, Message, Outcome},
    sandbox::{GroupHandler, Sandbox, Settings},
};
use serde_json::Value;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::support::handlers::{
    assert_next_is_fine, compiled, component, deliver, deliver_within, flaky, group_settings, message, rounds, sandbox,
};

const SOON: Duration = Duration::from_millis(100);

fn failure(finished: Finished) -> Failure {
    match finished.outcome {
        Outcome::Failed(failure) => failure,
        other => panic!("not failed: {other:?}"),
    }
}

/// Every way to misbehave has its class, and an error that says what happened; then the next message is fine.
async fn check_failures(instance: Instance) {
    let handler = flaky(|group| group.instance = instance).await;
    let cases: &[(&str, FailureClass, &[&str])] = &[
        (
            r#"{"do": "panic", "reason": "the cat sat on it"}"#,
            FailureClass::Panic,
            &["unreachable", "the cat sat on it", "flaky::act", "stderr:"],
        ),
        (r#"{"do": "spin"}"#, FailureClass::Timeout, &["while it computed", "spin"]),
        (r#"{"do": "sleep", "ms": 60000}"#, FailureClass::Timeout, &["waiting in a call of the host"]),
        (r#"{"do": "eat-memory"}"#, FailureClass::MemoryLimit, &["memory limit", "eat_memory"]),
        (r#"{"do": "overflow-stack"}"#, FailureClass::StackOverflow, &["call stack exhausted", "deeper"]),
        (r#"{"do": "out-of-bounds"}"#, FailureClass::OutOfBounds, &["out of bounds memory access"]),
        // More than any call may carry out of a guest, granted or not.
        (
            r#"{"do": "produce", "bytes": 25165824}"#,
            FailureClass::Failed,
            &["too much data is being copied between the host and the guest"],
        ),
        (
            r#"{"do": "exit", "code": 3}"#,
            FailureClass::Failed,
            &["the handler exited with a failure instead of answering"],
        ),
        (r#"{"do": "exit", "code": 0}"#, FailureClass::Failed, &["the handler exited instead of answering"]),
    ];
    for (payload, class, texts) in cases {
        let ends_by_time = *class == FailureClass::Timeout;
        let timeout = if ends_by_time { SOON } else { Duration::from_secs(60) };
        let failure = failure(deliver_within(&handler, payload, timeout).await);
        assert_eq!(failure.class, *class, "{payload}: {}", failure.error);
        for text in *texts {
            assert!(failure.error.contains(text), "{payload}: {text:?} is not in\n{}", failure.error);
        }
        assert!(failure.error.len() <= ERROR_BYTES_MAX && !failure.error.contains('\0'));
        assert_next_is_fine(&handler).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_failure_is_classed_and_the_next_message_is_fine() {
    check_failures(Instance::Fresh).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_failure_costs_a_reused_instance_and_the_next_message_is_fine() {
    check_failures(Instance::Reuse).await;
}

#[tokio::test]
async fn answers_reach_the_host_as_they_are() {
    let handler = flaky(|_| {}).await;
    let minute = Duration::from_secs(60);
    let cases = [
        (r#"{"do": "ok"}"#, Outcome::Done),
        (r#"{"do": "retry", "reason": "no"}"#, Outcome::Retry { reason: "no".into() }),
        (
            r#"{"do": "retry-after", "ms": 60000, "reason": "no"}"#,
            Outcome::RetryAfter { delay: minute, reason: "no".into() },
        ),
        (r#"{"do": "reject", "reason": "no"}"#, Outcome::Reject { reason: "no".into() }),
        (r#"{"do": "bad-utf8"}"#, Outcome::Retry { reason: "a NUL \u{fffd} in a reason".into() }),
    ];
    for (payload, expected) in cases {
        let finished = deliver(&handler, payload).await;
        assert_eq!(finished.outcome, expected, "{payload}");
        assert_eq!(finished.digest.as_ref(), Some(handler.digest()));
    }
}

#[tokio::test]
async fn a_delay_without_end_is_bounded() {
    let handler = flaky(|_| {}).await;
    let payload = format!(r#"{{"do": "retry-after", "ms": {}, "reason": "no"}}"#, u64::MAX);
    let Outcome::RetryAfter { delay, .. } = deliver(&handler, &payload).await.outcome else { panic!("not put off") };
    assert_eq!(delay, Duration::from_secs(366 * 86_400));
}

/// One instance's memory never shows in the next: a guest fills all it has, the next one in the same place looks for
/// anything that is not zero, in its first memory and in what it grows.
#[tokio::test]
async fn no_memory_of_one_instance_shows_in_the_next() {
    let body = r#"
        (local $at i32) (local $end i32)
        (drop (memory.grow (i32.const 16)))
        (local.set $at (i32.const 131072))
        (local.set $end (i32.mul (memory.size) (i32.const 65536)))
        (if (i64.eq (i64.load (local.get $message)) (i64.const 1))
          (then
            (memory.fill (local.get $at) (i32.const 170) (i32.sub (local.get $end) (local.get $at)))
            (return (i32.const 512))))
        (loop $next
          (if (i64.ne (i64.load (local.get $at)) (i64.const 0)) (then (return (i32.const 528))))
          (local.set $at (i32.add (local.get $at) (i32.const 8)))
          (br_if $next (i32.lt_u (local.get $at) (local.get $end))))
        (i32.const 512)"#;
    let sandbox = sandbox().await;
    let compiled = sandbox.load("canary", component(body)).await.unwrap();
    let fresh = sandbox.handler(compiled.clone(), Arc::new(group_settings(|_| {})));
    let reused = sandbox.handler(compiled, Arc::new(group_settings(|group| group.instance = Instance::Reuse)));
    let cut = CancellationToken::new();
    for _ in 0..50 {
        assert_eq!(fresh.handle(message(1, ""), &cut).await.outcome, Outcome::Done);
        let seen = fresh.handle(message(2, ""), &cut).await;
        assert_eq!(seen.outcome, Outcome::Done, "memory of the instance before shows");
        assert_eq!(seen.memory_growths, 1);
    }
    // The look itself can see: an instance that is used again finds its own canary.
    assert_eq!(reused.handle(message(1, ""), &cut).await.outcome, Outcome::Done);
    assert_eq!(reused.handle(message(2, ""), &cut).await.outcome, Outcome::Reject { reason: String::new() });
}

#[tokio::test]
async fn instances_are_fresh_or_reused_as_the_group_says() {
    async fn deliveries_seen(handler: &GroupHandler) -> Vec<u64> {
        let mut seen = Vec::new();
        for _ in 0..5 {
            let finished = deliver(handler, r#"{"do": "report"}"#).await;
            assert_eq!(finished.outcome, Outcome::Done);
            seen.push(report(&finished)["deliveries_of_instance"].as_u64().unwrap());
        }
        seen
    }
    assert_eq!(deliveries_seen(&flaky(|_| {}).await).await, [1, 1, 1, 1, 1]);
    let reused = flaky(|group| {
        group.instance = Instance::Reuse;
        group.max_reuse = 3;
    });
    assert_eq!(deliveries_seen(&reused.await).await, [1, 2, 3, 1, 2]);
}

#[tokio::test]
async fn a_second_endless_loop_is_ended_like_the_first() {
    let handler = flaky(|group| group.instance = Instance::Reuse).await;
    assert_next_is_fine(&handler).await;
    for _ in 0..2 {
        let failure = failure(deliver_within(&handler, r#"{"do": "spin"}"#, SOON).await);
        assert_eq!(failure.class, FailureClass::Timeout);
    }
    // An instance that was idle is behind the engine's clock; it must not be interrupted for that. After 200 ms the clock
    // itself rests, and must wake for the next loop.
    for idle_ms in [0, 50, 200] {
        assert_next_is_fine(&handler).await;
        tokio::time::sleep(Duration::from_millis(idle_ms)).await;
    }
    let failure = failure(deliver_within(&handler, r#"{"do": "spin"}"#, SOON).await);
    assert!(failure.error.contains("it was interrupted while it computed"), "{}", failure.error);
}

/// 16 endless loops on two threads, and 200 messages of a fast handler: all of these are answered while all of those
/// still run.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn spinning_handlers_starve_nobody() {
    let spinning = Arc::new(flaky(|_| {}).await);
    let fast = flaky(|_| {}).await;
    let cut = CancellationToken::new();
    let ended = Arc::new(AtomicU32::new(0));
    let mut spinners = JoinSet::new();
    for _ in 0..16 {
        let (spinning, cut, ended) = (spinning.clone(), cut.clone(), ended.clone());
        spinners.spawn(async move {
            let finished = spinning.handle(message(1, r#"{"do": "spin"}"#), &cut).await;
            ended.fetch_add(1, Relaxed);
            finished.outcome
        });
    }
    tokio::task::spawn(async move {
        for _ in 0..200 {
            assert_next_is_fine(&fast).await;
        }
    })
    .await
    .unwrap();
    assert_eq!(ended.load(Relaxed), 0);
    cut.cancel();
    for outcome in spinners.join_all().await {
        assert_eq!(outcome, Outcome::HandBack);
    }
}

/// A handler that honestly computes for long gets on, alone and beside 16 endless loops. How long it takes is printed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_handler_that_computes_for_long_comes_to_its_end() {
    let body = format!(
        "(local $n i32) (loop $next (local.set $n (i32.add (local.get $n) (i32.const 1)))
         (br_if $next (i32.lt_u (local.get $n) (i32.const {})))) (i32.const 512)",
        rounds(100_000_000, 2_000_000_000)
    );
    let compiled = sandbox().await.load("long", component(&body)).await.unwrap();
    let long = sandbox().await.handler(compiled, Arc::new(group_settings(|_| {})));
    let time = async || {
        let started = Instant::now();
        let finished = deliver_within(&long, "", Duration::from_secs(600)).await;
        assert_eq!(finished.outcome, Outcome::Done);
        started.elapsed()
    };
    let alone = time().await;
    let (spinning, cut) = (Arc::new(flaky(|_| {}).await), CancellationToken::new());
    let mut spinners = JoinSet::new();
    for _ in 0..16 {
        let (spinning, cut) = (spinning.clone(), cut.clone());
        let spin = Message { timeout: Duration::from_secs(3600), ..message(1, r#"{"do": "spin"}"#) };
        spinners.spawn(async move { spinning.handle(spin, &cut).await.outcome });
    }
    println!("a long computation: {alone:?} alone, {:?} beside 16 endless loops", time().await);
    cut.cancel();
    assert!(spinners.join_all().await.iter().all(|outcome| *outcome == Outcome::HandBack));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cut_ends_a_sleeping_and_a_spinning_handler_without_an_attempt() {
    let handler = flaky(|_| {}).await;
    for payload in [r#"{"do": "sleep", "ms": 60000}"#, r#"{"do": "spin"}"#] {
        let cut = CancellationToken::new();
        let (finished, ()) = tokio::join!(handler.handle(message(1, payload), &cut), async {
            tokio::time::sleep(SOON).await;
            cut.cancel();
        });
        assert_eq!(finished.outcome, Outcome::HandBack, "{payload}");
        let late = handler.handle(message(1, r#"{"do": "ok"}"#), &cut).await;
        assert_eq!(late.outcome, Outcome::HandBack, "what was cut before it began does not begin");
    }
}

/// Dropping the future of a delivery, in a host call or in the middle of a computation, harms nobody.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dropped_deliveries_do_no_harm() {
    let handler = flaky(|group| group.instance = Instance::Reuse).await;
    let cut = CancellationToken::new();
    for round in 0..rounds(300, 10_000) {
        let payload = if round % 2 == 0 { r#"{"do": "sleep", "ms": 60000}"# } else { r#"{"do": "spin"}"# };
        let delivery = handler.handle(message(round, payload), &cut);
        assert!(tokio::time::timeout(Duration::from_micros(500), delivery).await.is_err());
    }
    assert_next_is_fine(&handler).await;
}

#[tokio::test]
async fn what_is_produced_is_checked_and_kept_only_when_done() {
    let handler = flaky(|group| group.limits.produced_messages = 3).await;
    let finished = deliver(&handler, r#"{"do": "produce", "count": 3, "bytes": 5}"#).await;
    assert_eq!(finished.outcome, Outcome::Done);
    let kept: Vec<_> = finished.produced.iter().map(|new| (new.stream.as_str(), new.key.as_deref())).collect();
    assert_eq!(kept, [("receipts", Some("1-1")), ("receipts", Some("1-2")), ("receipts", Some("1-3"))]);
    assert_eq!(finished.produced[0].payload.as_deref(), Some(&b"xxxxx"[..]));

    let dropped = deliver(&handler, r#"{"do": "produce", "then": "retry"}"#).await;
    assert!(dropped.produced.is_empty());
    assert_eq!(dropped.outcome, Outcome::Retry { reason: "told to fail attempt 1".into() });

    let refused = [
        (r#"{"do": "produce", "count": 4}"#, "one delivery may produce 3 messages (groups.g.limits.produced_messages)"),
        (r#"{"do": "produce", "to": "orders"}"#, "not granted this stream; add \"orders\" to its `allow.produce`"),
        (r#"{"do": "produce", "bytes": 1048577}"#, "1048577 bytes and `receipts` takes 1048576"),
    ];
    for (payload, text) in refused {
        let finished = deliver(&handler, payload).await;
        let Outcome::Retry { reason } = &finished.outcome else { panic!("{payload}: {:?}", finished.outcome) };
        assert!(reason.contains(text), "{payload}: {reason}");
        assert!(finished.produced.is_empty());
    }
}

/// Without a grant SQL is denied, as an error of its own kind, and the next message is fine.
#[tokio::test]
async fn sql_is_denied_by_default() {
    let handler = flaky(|_| {}).await;
    for sql in ["select 1", "delete from anything", "not even SQL"] {
        let finished = deliver(&handler, &serde_json::json!({"do": "sql", "sql": sql}).to_string()).await;
        let Outcome::Retry { reason } = &finished.outcome else { panic!("{:?}", finished.outcome) };
        assert!(reason.contains("the group is not granted SQL"), "{reason}");
    }
    assert_next_is_fine(&handler).await;
}

#[tokio::test]
async fn produced_bytes_are_limited() {
    let handler = flaky(|group| group.limits.produced_bytes = 1000).await;
    let finished = deliver(&handler, r#"{"do": "produce", "count": 10, "bytes": 200}"#).await;
    let Outcome::Retry { reason } = finished.outcome else { panic!("{:?}", finished.outcome) };
    assert!(reason.contains("one delivery may produce 1000 bytes (groups.g.limits.produced_bytes)"), "{reason}");
}

fn report(finished: &Finished) -> Value {
    serde_json::from_slice(finished.produced[0].payload.as_deref().unwrap()).unwrap()
}

/// Configuration and secrets are all a handler sees of its surroundings.
#[tokio::test]
async fn a_handler_sees_its_message_and_its_configuration_and_nothing_else() {
    let secret = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(secret.path(), "hunter2\n").unwrap();
    let handler = flaky(|group| {
        group.secrets.insert("API_KEY".into(), millstream::config::Secret::File(secret.path().into()));
    })
    .await;
    let message = Message {
        key: Some("k".into()),
        rank: Some(7),
        routing_key: Some("a.b".into()),
        headers: vec![("h".into(), "v".into())],
        attempt: 2,
        replay: true,
        gap_since: Some(5),
        ..message(42, r#"{"do": "report"}"#)
    };
    let finished = handler.handle(message, &CancellationToken::new()).await;
    let report = report(&finished);
    assert_eq!(report["environment"], serde_json::json!([["API_KEY", "hunter2"], ["sender", "shop@example.com"]]));
    assert_eq!((&report["sender"], &report["api_key"]), (&"shop@example.com".into(), &"hunter2".into()));
    assert_eq!(report["root_is_readable"], false);
    for (field, value) in [("id", 42), ("rank", 7), ("attempt", 2), ("gap_since", 5), ("timeout_ms", 60_000)] {
        assert_eq!(report[field], value, "{field}");
    }
    for (field, value) in [("stream", "orders"), ("group", "g"), ("key", "k"), ("routing_key", "a.b")] {
        assert_eq!(report[field], value, "{field}");
    }
    assert_eq!(report["replay"], true);
    assert_eq!(report["headers"], serde_json::json!([["h", "v"]]));
    assert!(!format!("{handler:?}").contains("hunter2"));
}

#[tokio::test]
async fn a_missing_secret_is_an_error_that_names_it() {
    let result = std::panic::catch_unwind(|| {
        group_settings(|group| {
            let secret = millstream::config::Secret::Env("MILLSTREAM_TEST_UNSET".into());
            group.secrets.insert("API_KEY".into(), secret);
        })
    });
    let text = *result.unwrap_err().downcast::<String>().unwrap();
    let expected =
        "read groups.g.secrets.API_KEY: environment variable MILLSTREAM_TEST_UNSET is not set: set it for the host";
    assert!(text.contains(expected), "{text}");
}

/// A growth costs an mprotect, and those serialise all threads: the SDK's arena must serve ordinary messages.
#[tokio::test]
async fn an_ordinary_message_grows_no_memory() {
    let handler = flaky(|_| {}).await;
    assert_eq!(deliver(&handler, r#"{"do": "ok"}"#).await.memory_growths, 0);
    assert!(deliver(&handler, r#"{"do": "allocate", "bytes": 33554432}"#).await.memory_growths > 0);

    let sandbox = sandbox().await;
    let order = sandbox.handler(compiled("order-email").await, Arc::new(group_settings(|_| {})));
    let payload = r#"{"order_id": "o-1", "customer": "a@example.com", "amount_cents": 100, "currency": "EUR"}"#;
    let finished = deliver(&order, payload).await;
    assert_eq!((finished.outcome, finished.memory_growths, finished.produced.len()), (Outcome::Done, 0, 1));
}

/// A full pool is a wait and never a failed message, and idle instances make room.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_pool_is_a_wait() {
    let sandbox = Sandbox::start(Settings { pool_max: 128, ..Settings::default() }).await.unwrap();
    assert!(sandbox.describe().starts_with("sandbox: pool of 128, "), "{}", sandbox.describe());
    let compiled = sandbox.load("flaky", crate::support::handlers::handler_wasm("flaky")).await.unwrap();
    let reuse = group_settings(|group| group.instance = Instance::Reuse);
    let hoarding = Arc::new(sandbox.handler(compiled.clone(), Arc::new(reuse)));
    let mut deliveries = JoinSet::new();
    for _ in 0..300 {
        let hoarding = hoarding.clone();
        deliveries.spawn(async move { deliver(&*hoarding, r#"{"do": "sleep", "ms": 20}"#).await.outcome });
    }
    for outcome in deliveries.join_all().await {
        assert_eq!(outcome, Outcome::Done);
    }
    let other = Arc::new(sandbox.handler(compiled, Arc::new(group_settings(|_| {}))));
    let mut deliveries = JoinSet::new();
    for _ in 0..200 {
        let other = other.clone();
        deliveries.spawn(async move { deliver(&*other, r#"{"do": "sleep", "ms": 20}"#).await.outcome });
    }
    for outcome in deliveries.join_all().await {
        assert_eq!(outcome, Outcome::Done);
    }
}

#[tokio::test]
async fn without_a_pool_everything_works_the_same() {
    let sandbox = Sandbox::start(Settings { pool_max: 0, ..Settings::default() }).await.unwrap();
    assert_eq!(sandbox.describe(), "sandbox: on demand, slower (switched off), epoch tick 2 ms");
    let compiled = sandbox.load("flaky", crate::support::handlers::handler_wasm("flaky")).await.unwrap();
    let handler = sandbox.handler(compiled, Arc::new(group_settings(|_| {})));
    for (payload, class) in [
        (r#"{"do": "panic"}"#, FailureClass::Panic),
        (r#"{"do": "eat-memory"}"#, FailureClass::MemoryLimit),
        (r#"{"do": "out-of-bounds"}"#, FailureClass::OutOfBounds),
    ] {
        assert_eq!(failure(deliver(&handler, payload).await).class, class);
        assert_next_is_fine(&handler).await;
    }
}

/// A component that needs more memory to start than its group may have.
#[tokio::test]
async fn a_memory_limit_below_the_initial_memory_is_said() {
    let handler = flaky(|group| group.memory_bytes = 65_536).await;
    let failure = failure(deliver(&handler, r#"{"do": "ok"}"#).await);
    assert_eq!(failure.class, FailureClass::MemoryLimit, "{}", failure.error);
}

/// Text is UTF-8 in the component model: half of a surrogate pair is the handler's failure, and nothing gets stuck.
#[tokio::test]
async fn a_reason_with_a_lone_surrogate_is_a_failure_of_its_handler() {
    let body = "(if (i64.eq (i64.load (local.get $message)) (i64.const 2)) (then (return (i32.const 512))))
        (i32.store8 (i32.const 1024) (i32.const 1)) (i32.store (i32.const 1032) (i32.const 2048))
        (i32.store (i32.const 1036) (i32.const 3)) (i32.store (i32.const 2048) (i32.const 0x80a0ed)) (i32.const 1024)";
    let compiled = sandbox().await.load("surrogate", component(body)).await.unwrap();
    let handler = sandbox().await.handler(compiled, std::sync::Arc::new(group_settings(|_| {})));
    let cut = tokio_util::sync::CancellationToken::new();
    let finished = handler.handle(crate::support::handlers::message(1, "x"), &cut).await;
    let Outcome::Failed(failure) = finished.outcome else { panic!("{finished:?}") };
    assert!(failure.error.contains("utf-8") || failure.error.contains("UTF-8"), "{}", failure.error);
    let next = handler.handle(crate::support::handlers::message(2, "x"), &cut).await;
    assert_eq!(next.outcome, Outcome::Done);
}
