//! A graceful stop: what can finish is acknowledged, everything else goes to the other hosts at once.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use millstream::handler::{Finished, Handler, Handling, Message, Outcome};
use tokio_util::sync::CancellationToken;

use crate::support::{
    engine::{Project, done, numbered},
    wait_for,
};

const LIMIT: Duration = Duration::from_secs(60);

const SLOW_GROUP: &str = r#"
    [host]
    drain_timeout = "700ms"
    [streams.orders]
    [groups.email]
    stream = "orders"
    handler = "email.wasm"
    slots = 16
"#;

/// Even payloads end soon after the drain has begun, odd ones only when they are cut.
struct Halves {
    begun: AtomicU32,
    cut: AtomicU32,
    drains: CancellationToken,
}

impl Handler for Halves {
    fn handle<'a>(&'a self, message: Message, cut: &'a CancellationToken) -> Handling<'a> {
        self.begun.fetch_add(1, Relaxed);
        Box::pin(async move {
            let number: u32 = String::from_utf8(message.payload.unwrap()).unwrap().parse().unwrap();
            if number.is_multiple_of(2) {
                self.drains.cancelled().await;
                tokio::time::sleep(Duration::from_millis(50)).await;
                return done();
            }
            cut.cancelled().await;
            self.cut.fetch_add(1, Relaxed);
            Finished::plain(Outcome::HandBack)
        })
    }
}

/// Must-show 13. Sixteen in flight: eight finish and are acknowledged, eight are cut after the drain timeout, and what no
/// slot had begun goes back at once. The other host gets all of it, as attempt 1.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_finishes_in_time_is_acknowledged_and_the_rest_handed_on_uncounted() {
    let project = Project::declare(SLOW_GROUP).await;
    let handler =
        Arc::new(Halves { begun: AtomicU32::new(0), cut: AtomicU32::new(0), drains: CancellationToken::new() });
    let host = project.host_with(&[("email", Arc::clone(&handler) as Arc<dyn Handler>)]).await;
    project.produce("orders", &numbered(40)).await;
    wait_for("16 run", LIMIT, async || handler.begun.load(Relaxed) == 16).await;
    let attempts = Arc::new(std::sync::Mutex::new(Vec::new()));
    let notes = Arc::clone(&attempts);
    let other = project
        .host("email", move |message| {
            notes.lock().unwrap().push(message.attempt);
            done()
        })
        .await;
    wait_for("the other runs what is free", LIMIT, async || attempts.lock().unwrap().len() >= 24).await;
    let started = Instant::now();
    handler.drains.cancel();
    host.drain().await;
    assert!(started.elapsed() >= Duration::from_millis(700), "it waited for those that might finish");
    assert_eq!(handler.cut.load(Relaxed), 8);
    assert_eq!(handler.begun.load(Relaxed), 16, "nothing new was begun");
    wait_for("the rest runs elsewhere", LIMIT, async || attempts.lock().unwrap().len() == 32).await;
    assert!(attempts.lock().unwrap().iter().all(|attempt| *attempt == 1), "no attempt is counted");
    wait_for("nothing is left over", LIMIT, async || project.left_over().await == 0).await;
    assert_eq!(project.number("select count(*) from {schema}.host").await, 1, "the drained host is gone");
    other.drain().await;
}

/// Ends at once for the first 500 messages, then only when it is cut: the host holds a queue by then.
struct FastThenStuck {
    ended: AtomicU32,
}

impl Handler for FastThenStuck {
    fn handle<'a>(&'a self, _message: Message, cut: &'a CancellationToken) -> Handling<'a> {
        Box::pin(async move {
            if self.ended.fetch_add(1, Relaxed) < 500 {
                return done();
            }
            cut.cancelled().await;
            Finished::plain(Outcome::HandBack)
        })
    }
}

/// What no slot has begun goes back at once, not after the drain timeout.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_no_slot_has_begun_goes_back_at_once() {
    let slow_drain = SLOW_GROUP.replace("700ms", "3s").replace("slots = 16", "slots = 2");
    let project = Project::declare(&slow_drain).await;
    let host = project.host_with(&[("email", Arc::new(FastThenStuck { ended: AtomicU32::new(0) }))]).await;
    project.produce("orders", &numbered(2000)).await;
    let held = "select coalesce(sum(upper(r) - lower(r)), 0)::bigint from {schema}.claim, unnest(pending) r";
    wait_for("a queue behind two slots", LIMIT, async || {
        host.count("email", "done") >= 500 && project.number(held).await > 2
    })
    .await;
    let draining = tokio::spawn(host.drain());
    wait_for("the queue is free", LIMIT, async || project.number(held).await == 2).await;
    assert!(!draining.is_finished(), "the two that run still have time");
    draining.await.expect("it ends");
    assert_eq!(project.number(held).await, 0);
    let uncounted = "select count(*) from {schema}.exception where failures <> 0 or state <> 'waiting'";
    assert_eq!(project.number(uncounted).await, 0);
}

/// The database is away during the drain: the host ends all the same, and its work is taken over when its lease ends.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drain_ends_while_the_database_is_away() {
    let project =
        Project::declare(&SLOW_GROUP.replace("[host]", "[host]\nlease = \"600ms\"\nheartbeat = \"200ms\"")).await;
    for part in ["failed to", "lost the lease", "still held work", "does not answer"] {
        project.database.expect_log(part);
    }
    let handler =
        Arc::new(Halves { begun: AtomicU32::new(0), cut: AtomicU32::new(0), drains: CancellationToken::new() });
    let host = project.host_with(&[("email", Arc::clone(&handler) as Arc<dyn Handler>)]).await;
    project.produce("orders", &numbered(16)).await;
    wait_for("16 run", LIMIT, async || handler.begun.load(Relaxed) == 16).await;
    let mut admin = project.session().await;
    // It takes connections and never answers, as a network that vanished without a word.
    admin
        .run("begin; lock table {schema}.host, {schema}.claim, {schema}.consumer_group in access exclusive mode")
        .await;
    handler.drains.cancel();
    let drained = tokio::time::timeout(LIMIT, host.consumer.drain()).await;
    assert!(drained.is_ok(), "a drain must end");
    admin.run("rollback").await;
    let other = project.host("email", |_| done()).await;
    wait_for("the other takes over", LIMIT, async || project.left_over().await == 0).await;
    other.drain().await;
}
