//! Seeks and pauses of groups that hosts are at work for.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, Ordering::Relaxed},
    },
    time::Duration,
};

use millstream::{
    config::Start,
    engine::{self, GroupHandle, Paused, Seeked},
    handler::{Concurrency, Finished, Handler, Handling, Message, NewMessage, Outcome},
};
use tokio_util::sync::CancellationToken;

use crate::support::{
    engine::{Host, Project, done, numbered, text},
    handlers::rounds,
    wait_for,
};

const LIMIT: Duration = Duration::from_secs(60);

/// A long lease, so that what is cut is cut by a heartbeat or a turn.
const STREAMS_TOML: &str = r#"
[host]
lease = "120s"
heartbeat = "200ms"
drain_timeout = "2s"
[streams.orders]
[streams.receipts]
[groups.email]
stream = "orders"
handler = "email.wasm"
slots = 4
retry = { max_attempts = 100, base = "1ms", max = "5ms" }
[groups.audit]
stream = "orders"
handler = "audit.wasm"
"#;

async fn seek(project: &Project, to: Start) -> Seeked {
    let GroupHandle { id, stream_id, .. } = project.group("email").await;
    engine::seek(&project.database, id, stream_id, "email", &to).await.expect("seek")
}

async fn pause(project: &Project) -> Paused {
    engine::pause(&project.database, project.group("email").await.id, "email").await.expect("pause")
}

async fn resume(project: &Project) -> Paused {
    engine::resume(&project.database, project.group("email").await.id, "email").await.expect("resume")
}

/// Holds every first delivery until it is cut or released; says how many began and how many were cut.
#[derive(Clone, Default)]
struct Holding {
    began: Arc<AtomicU32>,
    cut: Arc<AtomicU32>,
    replays: Arc<AtomicU32>,
    released: CancellationToken,
}

impl Handler for Holding {
    fn handle<'a>(&'a self, message: Message, cut: &'a CancellationToken) -> Handling<'a> {
        Box::pin(async move {
            if message.replay {
                self.replays.fetch_add(1, Relaxed);
                return done();
            }
            self.began.fetch_add(1, Relaxed);
            tokio::select! {
                () = cut.cancelled() => {
                    self.cut.fetch_add(1, Relaxed);
                    Finished::plain(Outcome::HandBack)
                }
                () = self.released.cancelled() => done(),
            }
        })
    }
}

async fn holding(project: &Project) -> (Holding, Host) {
    let holding = Holding::default();
    let host = project.host_with(&[("email", Arc::new(holding.clone()) as Arc<dyn Handler>)]).await;
    (holding, host)
}

/// W1: handlers that run for minutes, with every slot taken and no turn, are cut within a heartbeat. Method: the epoch is
/// raised without a word to the host, whose lease is far longer than the test.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn w1_a_heartbeat_cuts_what_runs_for_an_old_epoch() {
    let project = Project::declare(STREAMS_TOML).await;
    let (holding, host) = holding(&project).await;
    project.produce("orders", &numbered(4)).await;
    wait_for("all slots are taken", LIMIT, async || holding.began.load(Relaxed) == 4).await;
    let turns = host.count("email", "turns");
    project
        .run(
            "update {schema}.consumer_group set epoch = epoch + 1; delete from {schema}.claim;
              update {schema}.cursor set replay_upto = claimed, claimed = 0",
        )
        .await;
    wait_for("they are cut", LIMIT, async || holding.cut.load(Relaxed) == 4).await;
    wait_for("it goes on under the new epoch", LIMIT, async || holding.replays.load(Relaxed) == 4).await;
    wait_for("nothing is left over", LIMIT, async || project.left_over().await == 0).await;
    assert!(host.count("email", "turns") > turns);
    assert_eq!((host.count("email", "fenced"), host.count("email", "done"), holding.began.load(Relaxed)), (4, 4, 4));
    host.drain().await;
}

/// What was claimed while a seek committed, under the epoch before it, is given back and comes: nothing waits for long.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_that_met_a_seek_half_way_goes_back_and_comes_again() {
    let project = Project::declare(STREAMS_TOML).await;
    let (holding, host) = holding(&project).await;
    project.produce("orders", &numbered(4)).await;
    wait_for("all slots are taken", LIMIT, async || holding.began.load(Relaxed) == 4).await;
    // The epoch alone is raised: the rows stay, as those of a claim do that read the epoch just before the seek.
    project.run("update {schema}.consumer_group set epoch = epoch + 1 where name = 'email'").await;
    wait_for("they are cut", LIMIT, async || holding.cut.load(Relaxed) == 4).await;
    holding.released.cancel();
    wait_for("nothing is left over", LIMIT, async || project.left_over().await == 0).await;
    assert_eq!(
        (host.count("email", "done"), host.count("email", "given_back"), holding.began.load(Relaxed)),
        (4, 4, 8)
    );
    host.drain().await;
}

/// Answers `done` with a receipt that says what it was, after a moment.
#[derive(Clone, Default)]
struct Receipts {
    seen: Arc<AtomicU32>,
}

impl Handler for Receipts {
    fn handle<'a>(&'a self, message: Message, cut: &'a CancellationToken) -> Handling<'a> {
        Box::pin(async move {
            let count = self.seen.fetch_add(1, Relaxed);
            tokio::select! {
                () = tokio::time::sleep(Duration::from_millis(u64::from(count % 5))) => {}
                () = cut.cancelled() => return Finished::plain(Outcome::HandBack),
            }
            if count.is_multiple_of(7) {
                return Finished::plain(Outcome::Retry { reason: "every seventh".into() });
            }
            let receipt =
                NewMessage { stream: "receipts".into(), ..text(&format!("{} {}", message.id, message.replay)) };
            Finished { produced: vec![receipt], ..done() }
        })
    }
}

/// Receipts by message: of first deliveries, and of replays.
async fn receipts(project: &Project) -> HashMap<i64, (u32, u32)> {
    let sql = "select convert_from(payload, 'UTF8') from {schema}.message_log_2";
    let rows: Vec<String> = sqlx::query_scalar(project.database.schema.sql(sql))
        .fetch_all(&project.database.pool)
        .await
        .expect("read the receipts");
    let mut receipts: HashMap<i64, (u32, u32)> = HashMap::new();
    for row in rows {
        let (id, replay) = row.split_once(' ').expect("two words");
        let counts = receipts.entry(id.parse().expect("an id")).or_default();
        if replay == "true" { counts.1 += 1 } else { counts.0 += 1 }
    }
    receipts
}

/// Waits until the group has claimed everything and nothing of it is left over.
async fn at_the_end(project: &Project) {
    let email = project.group("email").await.id;
    let behind = format!(
        "select count(*) from {{schema}}.message_log_1 where id > (select claimed from {{schema}}.cursor where group_id = {email})"
    );
    wait_for("all is claimed", LIMIT, async || project.number(&behind).await == 0).await;
    wait_for("nothing is left over", LIMIT, async || project.left_over().await == 0).await;
}

/// W1, W2: two hosts are at work, failures and all, when their group is sent back. Nothing is lost, every message has
/// exactly one effect of the new epoch, and none of the old epoch appears once the seek has answered.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn w1_a_seek_under_load_loses_nothing_and_lets_no_old_delivery_settle() {
    let project = Project::declare(STREAMS_TOML).await;
    let handler = Receipts::default();
    let host = async || project.host_with(&[("email", Arc::new(handler.clone()) as Arc<dyn Handler>)]).await;
    let hosts = [host().await, host().await];
    let count = rounds(600, 20_000);
    for batch in numbered(count).chunks(200) {
        project.produce("orders", batch).await;
    }
    wait_for("both are at work", LIMIT, async || {
        handler.seen.load(Relaxed) > 250 && hosts.iter().all(|host| host.count("email", "delivered") > 20)
    })
    .await;
    let seeked = seek(&project, Start::Earliest).await;
    let upto = seeked.position_before;
    assert!(seeked.in_flight > 0 && upto > 0, "{seeked:?}");
    let old = |receipts: &HashMap<i64, (u32, u32)>| -> u32 {
        receipts.iter().filter(|(id, _)| **id <= upto).map(|(_, counts)| counts.0).sum()
    };
    let settled_before = old(&receipts(&project).await);
    at_the_end(&project).await;
    let end = receipts(&project).await;
    assert_eq!(old(&end), settled_before, "an old delivery settled after the seek");
    for (id, (first, replay)) in &end {
        match *id <= upto {
            true => assert!(*first <= 1 && *replay == 1, "message {id}: {first} before the seek, {replay} after"),
            false => assert_eq!((*first, *replay), (1, 0), "message {id}"),
        }
    }
    assert_eq!(project.number("select count(*) from {schema}.dead_letter").await, 0);
    assert_eq!(end.len(), count, "every message");
    // Again and again, to anywhere. From the last, of a paused group, each has exactly one effect more.
    let seed = fastrand::u64(..1 << 32);
    println!("seed {seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    for _ in 0..rounds(6, 40) {
        seek(&project, Start::Id(random.i64(1..=count as i64))).await;
        tokio::time::sleep(Duration::from_millis(random.u64(0..60))).await;
    }
    pause(&project).await;
    seek(&project, Start::Earliest).await;
    let before = receipts(&project).await;
    resume(&project).await;
    at_the_end(&project).await;
    for (id, (_, replays)) in receipts(&project).await {
        assert_eq!(replays, before[&id].1 + 1, "seed {seed}: message {id}");
    }
    for host in hosts {
        host.drain().await;
    }
}

/// W2 with ordered keys: the leases and queues of two hosts, failures and all, are void; every key restarts at its first
/// message and comes in order, and no key stays with anybody.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn w2_each_ordered_key_restarts_at_its_first_message_in_order() {
    let project = Project::declare(STREAMS_TOML).await;
    let handler = Receipts::default();
    let host = async || project.host_with(&[("email", Arc::new(handler.clone()) as Arc<dyn Handler>)]).await;
    let hosts = [host().await, host().await];
    let messages: Vec<_> = (0..400)
        .map(|number| NewMessage {
            key: Some(format!("key {}", number % 20)),
            concurrency: Some(Concurrency::Ordered),
            ..text("x")
        })
        .collect();
    project.produce("orders", &messages).await;
    wait_for("it is at work", LIMIT, async || handler.seen.load(Relaxed) > 150).await;
    let held = "select count(*) from {schema}.message_key_lease where host_id is not null";
    assert!(project.number(held).await > 0, "keys are leased when the seek comes");
    seek(&project, Start::Earliest).await;
    at_the_end(&project).await;
    let sql = "select convert_from(payload, 'UTF8') from {schema}.message_log_2 order by id";
    let rows: Vec<String> = sqlx::query_scalar(project.database.schema.sql(sql))
        .fetch_all(&project.database.pool)
        .await
        .expect("read the receipts");
    let mut last: HashMap<i64, i64> = HashMap::new();
    let mut replays = 0;
    for row in rows.iter().filter(|row| row.ends_with("true")) {
        let id: i64 = row.split(' ').next().expect("a word").parse().expect("an id");
        let before = last.insert(id % 20, id).unwrap_or_default();
        assert!(before == id - 20 || before == 0 && id <= 20, "message {id} came after {before}");
        replays += 1;
    }
    assert!(replays > 50, "only {replays} replays: this shows nothing");
    assert_eq!(receipts(&project).await.len(), 400);
    for host in hosts {
        host.drain().await;
    }
}

/// A paused group's running deliveries end, nothing else of it begins, and that survives the host; the other group of the
/// stream goes on. Resumed, a running host goes on without being touched.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pause_lets_running_deliveries_end_and_survives_restarts() {
    let project = Project::declare(STREAMS_TOML).await;
    let (held, host) = holding(&project).await;
    project.produce("orders", &numbered(4)).await;
    wait_for("all slots are taken", LIMIT, async || held.began.load(Relaxed) == 4).await;
    let paused = pause(&project).await;
    assert!(paused.changed && paused.paused && paused.paused_at.is_some());
    project.produce("orders", &numbered(20)).await;
    held.released.cancel();
    wait_for("what ran ends", LIMIT, async || project.left_over().await == 0).await;
    let audited = Arc::new(AtomicU32::new(0));
    let audits = Arc::clone(&audited);
    let audit = move |_: Message| {
        audits.fetch_add(1, Relaxed);
        done()
    };
    host.drain().await;
    let begins: Arc<Mutex<Vec<i64>>> = Arc::default();
    let notes = Arc::clone(&begins);
    let email = move |message: Message| {
        notes.lock().unwrap().push(message.id);
        done()
    };
    let next = project
        .host_with(&[("email", Arc::new(email) as Arc<dyn Handler>), ("audit", Arc::new(audit) as Arc<dyn Handler>)])
        .await;
    wait_for("the other group is done", LIMIT, async || audited.load(Relaxed) == 24).await;
    wait_for("the paused one has looked", LIMIT, async || next.count("email", "turns") > 0).await;
    assert_eq!(*begins.lock().unwrap(), [0; 0]);
    assert_eq!(held.began.load(Relaxed), 4);
    let again = pause(&project).await;
    assert_eq!((again.changed, again.paused_at), (false, paused.paused_at));
    assert!(
        !engine::has_unfinished(&project.database, &["email".into()]).await.expect("ask"),
        "nothing to do for a drain"
    );
    let resumed = resume(&project).await;
    assert_eq!((resumed.changed, resumed.paused, resumed.paused_at), (true, false, None));
    wait_for("it goes on", LIMIT, async || begins.lock().unwrap().len() == 20).await;
    assert!(!resume(&project).await.changed);
    wait_for("nothing is left over", LIMIT, async || project.left_over().await == 0).await;
    next.drain().await;
}

/// What a host has claimed ahead and not begun goes back when it learns of the pause, with no attempt counted; due
/// retries stay where they are.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pause_hands_back_what_has_not_begun() {
    let project = Project::declare(&STREAMS_TOML.replace("slots = 4", "slots = 1")).await;
    let gate = CancellationToken::new();
    let fast: Arc<AtomicU32> = Arc::default();
    let (count, open) = (Arc::clone(&fast), gate.clone());
    let handler: Arc<dyn Handler> = Arc::new(Gate { open, count });
    let host = project.host_with(&[("email", handler)]).await;
    // Fast ones make the host claim far ahead; then one stands in the only slot.
    project.produce("orders", &numbered(3000)).await;
    wait_for("it is fast", LIMIT, async || fast.load(Relaxed) > 1000).await;
    let mut messages = numbered(50);
    messages.insert(0, text("hold"));
    project.produce("orders", &messages).await;
    let ahead = "select coalesce(sum(upper(r) - lower(r)), 0)::bigint from {schema}.claim c, unnest(c.pending) r";
    wait_for("it holds one back and claims ahead", LIMIT, async || {
        fast.load(Relaxed) == 3000 && project.number(ahead).await > 1
    })
    .await;
    pause(&project).await;
    let back = "select count(*) from {schema}.exception where state = 'waiting' and failures = 0";
    wait_for("they are back", LIMIT, async || project.number(back).await > 0 && project.number(ahead).await == 1).await;
    let handed_back = project.number(back).await;
    gate.cancel();
    wait_for("what ran ends", LIMIT, async || project.number("select count(*) from {schema}.claim").await == 0).await;
    assert_eq!((fast.load(Relaxed), project.number(back).await), (3001, handed_back));
    resume(&project).await;
    wait_for("all come", LIMIT, async || fast.load(Relaxed) == 3051).await;
    wait_for("nothing is left over", LIMIT, async || project.left_over().await == 0).await;
    assert_eq!(project.number("select count(*) from {schema}.dead_letter").await, 0);
    host.drain().await;
}

/// Counts what ends; `hold` ends when the gate opens. Every attempt is the first.
struct Gate {
    open: CancellationToken,
    count: Arc<AtomicU32>,
}

impl Handler for Gate {
    fn handle<'a>(&'a self, message: Message, _cut: &'a CancellationToken) -> Handling<'a> {
        Box::pin(async move {
            assert_eq!(message.attempt, 1);
            if message.payload.as_deref() == Some(b"hold") {
                self.open.cancelled().await;
            }
            self.count.fetch_add(1, Relaxed);
            done()
        })
    }
}
