//! Retries of messages without a key mode: attempts, backoff, budgets, redrive, and that failing messages do not hold up
//! healthy ones.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU32, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use millstream::handler::{Failure, FailureClass, Finished, Handler, Handling, Message, Outcome};
use tokio_util::sync::CancellationToken;

use crate::support::{
    engine::{Project, done, numbered, text},
    wait_for,
};

const LIMIT: Duration = Duration::from_secs(60);

fn declared(group: &str) -> String {
    format!(
        "[host]\ndrain_timeout = \"2s\"\n[streams.orders]\n[groups.email]\nstream = \"orders\"\nhandler = \"email.wasm\"\n{group}\n"
    )
}

fn payload(message: &Message) -> String {
    String::from_utf8(message.payload.clone().unwrap()).unwrap()
}

fn failed() -> Finished {
    Finished::plain(Outcome::Retry { reason: "no".into() })
}

/// R1, R3: the budget is exactly three deliveries across a restart in between, and a due time of tomorrow is kept.
#[tokio::test]
async fn a_budget_of_three_means_three_deliveries_across_restarts() {
    let project = Project::declare(&declared(r#"retry = { max_attempts = 3, base = "10m", jitter = 0.0 }"#)).await;
    project.produce("orders", &[text("poison")]).await;
    for attempt in 1..=3 {
        let attempts = Arc::new(Mutex::new(Vec::new()));
        let notes = Arc::clone(&attempts);
        let host = project
            .host("email", move |message| {
                notes.lock().unwrap().push(message.attempt);
                failed()
            })
            .await;
        wait_for("a delivery", LIMIT, async || !attempts.lock().unwrap().is_empty()).await;
        let settled = "select (select count(*) from {schema}.exception where state = 'waiting') + (select count(*) from {schema}.dead_letter)";
        wait_for("it is settled", LIMIT, async || project.number(settled).await == 1).await;
        host.drain().await;
        assert_eq!(*attempts.lock().unwrap(), [attempt]);
        let failures = format!(
            "select count(*) from {{schema}}.exception where failures = {attempt} and due_at > clock_timestamp() + interval '9 minutes'"
        );
        assert_eq!(project.number(&failures).await, i64::from(attempt < 3), "waits as long as it was told to");
        project.run("update {schema}.exception set due_at = clock_timestamp()").await;
    }
    assert_eq!(
        project.number("select count(*) from {schema}.dead_letter where attempts = 3 and class = 'failed'").await,
        1
    );
    assert_eq!(project.left_over().await, 0);
}

/// R3: no retry comes before its backoff is over, as the database counts it.
#[tokio::test]
async fn backoff_is_a_lower_bound() {
    let project =
        Project::declare(&declared(r#"retry = { max_attempts = 4, base = "100ms", factor = 2, jitter = 0.0 }"#)).await;
    let started = Arc::new(Mutex::new(Vec::new()));
    let notes = Arc::clone(&started);
    let host = project
        .host("email", move |_| {
            notes.lock().unwrap().push(Instant::now());
            failed()
        })
        .await;
    project.produce("orders", &[text("poison")]).await;
    wait_for("the dead letter", LIMIT, async || project.number("select count(*) from {schema}.dead_letter").await == 1)
        .await;
    let gaps: Vec<_> = started.lock().unwrap().windows(2).map(|pair| pair[1] - pair[0]).collect();
    for (gap, least) in gaps.iter().zip([100, 200, 400]) {
        assert!(*gap >= Duration::from_millis(least), "{gaps:?}");
    }
    assert_eq!(gaps.len(), 3);
    host.drain().await;
}

/// `later` and its delay count no attempt, however often; `retry-after` counts and comes when it says; a failure text
/// that Postgres cannot hold is stored without what it cannot hold.
#[tokio::test]
async fn only_failures_count_as_attempts() {
    let project = Project::declare(&declared(r#"retry = { max_attempts = 3, base = "10m" }"#)).await;
    let seen: Arc<Mutex<HashMap<String, Vec<u32>>>> = Arc::default();
    let notes = Arc::clone(&seen);
    let host = project
        .host("email", move |message| {
            let mut seen = notes.lock().unwrap();
            let attempts = seen.entry(payload(&message)).or_default();
            attempts.push(message.attempt);
            Finished::plain(match payload(&message).as_str() {
                "later" if attempts.len() < 6 => Outcome::Later { delay: Duration::ZERO },
                "after" if attempts.len() < 3 => {
                    Outcome::RetryAfter { delay: Duration::from_millis(1), reason: "soon".into() }
                }
                "odd text" => {
                    let error = format!("\0trap\0 \u{fffd} {}", "é".repeat(20_000));
                    Outcome::Failed(Failure { class: FailureClass::Panic, error })
                }
                _ => Outcome::Done,
            })
        })
        .await;
    project.produce("orders", &[text("later"), text("after"), text("odd text")]).await;
    let waiting = "select count(*) from {schema}.exception where last_class = 'panic' and last_error like 'trap %' and octet_length(last_error) <= 16384";
    wait_for("all end", LIMIT, async || {
        // In this order: before its settle the one row that is left is the claim of all three.
        project.number(waiting).await == 1 && project.left_over().await == 1
    })
    .await;
    let seen = seen.lock().unwrap().clone();
    assert_eq!((&*seen["later"], &*seen["after"], &*seen["odd text"]), (&[1; 6][..], &[1, 2, 3][..], &[1][..]));
    host.drain().await;
}

/// A handler that fails slowly for some payloads and counts the others.
struct SlowFailures {
    healthy: AtomicU32,
    failing: AtomicU32,
    stop: AtomicBool,
}

impl Handler for SlowFailures {
    fn handle<'a>(&'a self, message: Message, cut: &'a CancellationToken) -> Handling<'a> {
        Box::pin(async move {
            if !payload(&message).starts_with("fail") {
                self.healthy.fetch_add(1, Relaxed);
                return done();
            }
            self.failing.fetch_add(1, Relaxed);
            while !self.stop.load(Relaxed) {
                tokio::select! {
                    () = cut.cancelled() => return Finished::plain(Outcome::HandBack),
                    () = tokio::time::sleep(Duration::from_millis(10)) => {}
                }
            }
            failed()
        })
    }
}

/// R4: retries that run for ever never take all slots, so healthy messages that come later need not wait for one to end.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn more_stuck_retries_than_slots_leave_room_for_healthy_messages() {
    let project = Project::declare(&declared("slots = 8\nretry = { max_attempts = 10, base = \"1ms\" }")).await;
    let failing: Vec<_> = (0..40).map(|number| text(&format!("fail {number}"))).collect();
    project.produce("orders", &failing).await;
    // All of them have failed once before, and are due.
    let handler =
        Arc::new(SlowFailures { healthy: AtomicU32::new(0), failing: AtomicU32::new(0), stop: AtomicBool::new(false) });
    project
        .run(
            "update {schema}.cursor set claimed = 40;
            insert into {schema}.exception (group_id, message_id, state, due_at, failures)
            select 1, id, 'waiting', clock_timestamp(), 1 from {schema}.message_log_1",
        )
        .await;
    let host = project.host_with(&[("email", Arc::clone(&handler) as Arc<dyn Handler>)]).await;
    wait_for("the retries run", LIMIT, async || handler.failing.load(Relaxed) >= 4).await;
    project.produce("orders", &numbered(500)).await;
    wait_for("the healthy ones", LIMIT, async || handler.healthy.load(Relaxed) == 500).await;
    assert!(handler.failing.load(Relaxed) <= 8, "none has ended yet");
    handler.stop.store(true, Relaxed);
    let dead = "select count(*) from {schema}.dead_letter where attempts = 10";
    wait_for("all others end", LIMIT, async || project.number(dead).await == 40).await;
    wait_for("nothing is left over", LIMIT, async || project.left_over().await == 0).await;
    host.drain().await;
}

/// The reverse: due retries get their share while fresh work never ends.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn retries_progress_while_fresh_work_never_ends() {
    let project = Project::declare(&declared("slots = 2\nretry = { max_attempts = 10, base = \"1ms\" }")).await;
    let retried = Arc::new(AtomicU32::new(0));
    let fresh = Arc::new(AtomicU32::new(0));
    let (notes, fresh_notes) = (Arc::clone(&retried), Arc::clone(&fresh));
    let handler = move |message: Message| {
        if message.attempt == 1 && payload(&message).starts_with("fail") {
            return failed();
        }
        let count = if message.attempt > 1 { &notes } else { &fresh_notes };
        count.fetch_add(1, Relaxed);
        std::thread::sleep(Duration::from_micros(500));
        done()
    };
    let failing: Vec<_> = (0..50).map(|number| text(&format!("fail {number}"))).collect();
    project.produce("orders", &failing).await;
    project.produce("orders", &numbered(20_000)).await;
    let host = project.host("email", handler).await;
    wait_for("the retries", LIMIT, async || retried.load(Relaxed) == 50).await;
    assert!(fresh.load(Relaxed) < 20_000, "they did not wait for the end of the fresh ones");
    host.drain().await;
}

/// A free slot is filled, however few they are beside deliveries that run for hours.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_free_slot_beside_slow_deliveries_is_used() {
    let project = Project::declare(&declared("slots = 16\nretry = { max_attempts = 10 }")).await;
    let handler =
        Arc::new(SlowFailures { healthy: AtomicU32::new(0), failing: AtomicU32::new(0), stop: AtomicBool::new(false) });
    let host = project.host_with(&[("email", Arc::clone(&handler) as Arc<dyn Handler>)]).await;
    let failing: Vec<_> = (0..15).map(|number| text(&format!("fail {number}"))).collect();
    project.produce("orders", &failing).await;
    wait_for("15 slots are taken", LIMIT, async || handler.failing.load(Relaxed) == 15).await;
    project.produce("orders", &numbered(20)).await;
    wait_for("the healthy ones", LIMIT, async || handler.healthy.load(Relaxed) == 20).await;
    host.drain().await;
    assert_eq!(
        project.number("select count(*) from {schema}.exception where failures = 0 and state = 'waiting'").await,
        15,
        "handed back"
    );
}

/// A redriven dead letter comes as attempt 1 and says so; failing again brings it back with one death more, and success
/// removes it.
#[tokio::test]
async fn a_redriven_dead_letter_starts_over_and_ends_once() {
    let project = Project::declare(&declared(r#"retry = { max_attempts = 2, base = "1ms" }"#)).await;
    let is_healed = Arc::new(AtomicBool::new(false));
    let seen = Arc::new(Mutex::new(Vec::new()));
    let (healed, notes) = (Arc::clone(&is_healed), Arc::clone(&seen));
    let host = project
        .host("email", move |message| {
            notes.lock().unwrap().push((message.attempt, message.redriven));
            if healed.load(Relaxed) { done() } else { failed() }
        })
        .await;
    project.produce("orders", &[text("x")]).await;
    let redrive = "insert into {schema}.exception (group_id, message_id, state, due_at, dead_letter_id)
            select group_id, message_id, 'waiting', clock_timestamp(), id from {schema}.dead_letter;
        update {schema}.dead_letter set redriven_at = clock_timestamp()";
    for deaths in 1..=2 {
        let dead = format!(
            "select count(*) from {{schema}}.dead_letter where deaths = {deaths} and attempts = 2 and redriven_at is null and payload = 'x'"
        );
        wait_for("the dead letter", LIMIT, async || project.number(&dead).await == 1).await;
        is_healed.store(deaths == 2, Relaxed);
        // Its copy is what counts: the log may be gone by then.
        project.run("delete from {schema}.message_log_1").await;
        project.run(redrive).await;
    }
    wait_for("it is done", LIMIT, async || project.number("select count(*) from {schema}.dead_letter").await == 0)
        .await;
    wait_for("nothing is left over", LIMIT, async || project.left_over().await == 0).await;
    let expected = [(1, false), (2, false), (1, true), (2, true), (1, true)];
    assert_eq!(*seen.lock().unwrap(), expected);
    host.drain().await;
}

/// A message that is delivered again for another reason and dies again has one dead letter, and blocks nobody.
#[tokio::test]
async fn a_second_death_of_a_message_is_the_same_dead_letter() {
    let project = Project::declare(&declared("")).await;
    let host = project.host("email", |_| Finished::plain(Outcome::Reject { reason: "no".into() })).await;
    project.produce("orders", &[text("x")]).await;
    for deaths in 1..=2 {
        let dead = format!("select count(*) from {{schema}}.dead_letter where deaths = {deaths}");
        wait_for("the dead letter", LIMIT, async || project.number(&dead).await == 1).await;
        project.run("insert into {schema}.exception (group_id, message_id, state, due_at) select 1, 1, 'waiting', clock_timestamp() where (select deaths = 1 from {schema}.dead_letter)").await;
    }
    assert_eq!(project.number("select count(*) from {schema}.dead_letter").await, 1);
    wait_for("nothing is left over", LIMIT, async || project.left_over().await == 0).await;
    host.drain().await;
}
