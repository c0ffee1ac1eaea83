//! The figures of a group against its tables: exact up to 10,000, an estimate above that says so, and 0 always exact,
//! whatever has become of its messages.

use std::{
    collections::BTreeSet,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use millstream::{
    config::Start,
    engine::{self, COUNTED_MAX, DeadFilter, GroupState, Step},
    handler::{Concurrency, Handler, Message, NewMessage},
};

use crate::support::{
    engine::{Project, Session, done, text},
    handlers::rounds,
    keyed::{all_done, failed, keyed, rejected, version},
};

const STREAMS_TOML: &str = r#"
    [streams.orders]
    max_lag = "1h"
    [groups.email]
    stream = "orders"
    handler = "email.wasm"
    retry = { max_attempts = 2, base = "1h", max = "1h" }
    [groups.some]
    stream = "orders"
    handler = "some.wasm"
    filter = { key = ["a*"] }
    on_dead_letter = "rest"
    retry = { max_attempts = 2, base = "1h", max = "1h" }
"#;

async fn state(project: &Project, group: &str) -> GroupState {
    let state = engine::inspect(&project.database).await.unwrap();
    state.groups.into_iter().find(|found| found.group == group).unwrap()
}

/// Ids that a group has still to deliver, by where they stand. Each is written so that it can be checked by eye, and reads all.
const UNCLAIMED: &str =
    "select l.id from {schema}.message_log_1 l, {schema}.cursor c where c.group_id = GROUP and (l.id > c.claimed
    or exists (select from {schema}.cursor_gap o where o.group_id = GROUP and o.missing @> l.id))";
const CLAIMED: &str =
    "select l.id from {schema}.message_log_1 l, {schema}.claim k where k.group_id = GROUP and k.pending @> l.id
    union select message_id from {schema}.exception where group_id = GROUP and state = 'running'";
const WAITING: &str = "select message_id from {schema}.exception where group_id = GROUP and state = 'waiting'";
const DELAYED: &str = "select message_id from {schema}.exception where group_id = GROUP and state = 'delayed'";
const DEFERRED: &str = "select message_id from {schema}.exception where group_id = GROUP and state = 'deferred'";
const DEAD: &str = "select message_id from {schema}.dead_letter where group_id = GROUP and redriven_at is null";

async fn ids(project: &Project, group: i32, sql: &str) -> BTreeSet<i64> {
    let sql = sql.replace("GROUP", &group.to_string());
    let ids = sqlx::query_scalar(project.database.schema.sql(&sql)).fetch_all(&project.database.pool).await.unwrap();
    ids.into_iter().collect()
}

/// C13: what is told is what the tables hold.
async fn figures_are_exact(project: &Project, what: &str) {
    for (group, name) in [(1, "email"), (2, "some")] {
        let told = state(project, name).await;
        let mut counted = Vec::new();
        for sql in [UNCLAIMED, CLAIMED, WAITING, DELAYED, DEFERRED, DEAD] {
            counted.push(ids(project, group, sql).await.len() as i64);
        }
        let figures = [told.lag, told.in_flight, told.retrying, told.delayed, told.deferred, told.dead];
        assert_eq!((counted.as_slice(), told.lag_exact, told.dead_exact), (&figures[..], true, true), "{name}, {what}");
    }
}

/// Runs both groups; notes what the first is handed.
struct Hands {
    delivered: Arc<Mutex<BTreeSet<i64>>>,
    mended: Arc<AtomicBool>,
}

impl Hands {
    fn handlers(&self) -> [(&'static str, Arc<dyn Handler>); 2] {
        ["email", "some"].map(|name| {
            let (delivered, mended) = (Arc::clone(&self.delivered), Arc::clone(&self.mended));
            let handler = move |message: Message| {
                if name == "email" {
                    delivered.lock().unwrap().insert(message.id);
                }
                match message.payload.as_deref() {
                    Some(b"bad") if !mended.load(Relaxed) => rejected(),
                    Some(b"retry") if !mended.load(Relaxed) => failed(),
                    _ => done(),
                }
            };
            (name, Arc::new(handler) as Arc<dyn Handler>)
        })
    }
}

const KEYS: [&str; 4] = ["a1", "a2", "b1", "b2"];

/// A message of any kind: with a key of any mode or none, a version or a tombstone, delayed, good or bad.
fn any(random: &mut fastrand::Rng) -> NewMessage {
    let payload = ["good", "good", "bad", "retry"][random.usize(0..4)];
    let key = KEYS[random.usize(0..KEYS.len())];
    let mode = [Concurrency::Parallel, Concurrency::Exclusive, Concurrency::Ordered][random.usize(0..3)];
    let mut message = match random.u32(0..6) {
        0 => text(payload),
        1 | 2 => keyed(key, mode, payload),
        3 => NewMessage { payload: None, ..version(key, mode, "") },
        4 => NewMessage { rank: Some(random.i64(0..3)), ..version(key, mode, payload) },
        _ => version(&format!("{key}.{}", random.u32(0..20)), mode, payload),
    };
    message.delay = (random.u32(0..8) == 0).then_some(Duration::from_secs(3600));
    message
}

/// Something that an operator, a producer or time does to a group's messages. Answers what.
async fn meddle(project: &Project, random: &mut fastrand::Rng, open: &mut Vec<Session>) -> &'static str {
    let group = project.group(["email", "some"][random.usize(0..2)]).await;
    let key = KEYS[random.usize(0..KEYS.len())];
    let mut dead = engine::pick_dead(&project.database, group.id, &DeadFilter::default()).await.unwrap();
    dead.retain(|_| random.bool());
    match random.u32(0..10) {
        0 => {
            let mut session = project.session().await;
            session.run("begin; select count(p.id) from generate_series(1, 20) n, lateral {schema}.produce('orders', 'late ' || n) p").await;
            open.push(session);
            "a producer begins"
        }
        1 | 2 if !open.is_empty() => {
            let mut session = open.swap_remove(random.usize(0..open.len()));
            session.run(if random.bool() { "commit" } else { "rollback" }).await;
            "a producer ends"
        }
        3 => {
            engine::redrive(&project.database, &dead, random.bool(), |_| ()).await.unwrap();
            "redrive"
        }
        4 => {
            engine::discard(&project.database, &dead, |_| ()).await.unwrap();
            "discard"
        }
        5 => {
            let _ = engine::skip_key(&project.database, (group.id, group.stream_id), key).await; // it may not be blocked
            "skip of a key"
        }
        6 => {
            engine::pause_key(&project.database, group.id, key).await.unwrap();
            "pause of a key"
        }
        7 => {
            engine::resume_key(&project.database, group.id, key).await.unwrap();
            let _ = engine::release_key(&project.database, group.id, key).await;
            "resume of a key"
        }
        8 => {
            let last = project.number("select coalesce(max(id), 1) from {schema}.message_log_1").await;
            let to = Start::Id(random.i64(1..=last));
            engine::seek(&project.database, group.id, group.stream_id, &group.name, &to).await.unwrap();
            "seek"
        }
        _ => {
            // Of what is older than max_lag the groups are moved on, and retries fall due.
            let last = project.number("select coalesce(max(id), 1) from {schema}.message_log_1").await;
            let old = random.i64(1..=last);
            project
                .run(&format!(
                    "update {{schema}}.message_log_1 set created_at = created_at - interval '2 hours' where id <= {old};
                     update {{schema}}.exception set due_at = clock_timestamp() where state in ('waiting', 'delayed')"
                ))
                .await;
            project.maintain(Step::Lag).await;
            "time passes"
        }
    }
}

/// C13. Goal: the figures are exact after any mix of what supersedes, deletes, fails, kills, holds, moves and passes over
/// messages, for a group with a filter and one without; together they are what is still to deliver. Method: random steps,
/// after each of which they are compared with a plain count; in the end all is delivered that they told of, but for
/// versions that have lost, and 0 is exact.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c13_the_backlog_is_what_is_still_to_deliver() {
    let seed = fastrand::u64(..1 << 32);
    println!("seed {seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    let project = Project::declare(STREAMS_TOML).await;
    project.database.expect_log("the group lagged longer than max_lag");
    let hands = Hands { delivered: Arc::default(), mended: Arc::default() };
    let mut open = Vec::new();
    for round in 0..rounds(4, 60) {
        let batch: Vec<_> = (0..random.usize(1..80)).map(|_| any(&mut random)).collect();
        project.produce("orders", &batch).await;
        figures_are_exact(&project, &format!("seed {seed}, round {round}: a batch")).await;
        for step in 0..6 {
            let what = meddle(&project, &mut random, &mut open).await;
            figures_are_exact(&project, &format!("seed {seed}, round {round}, step {step}: {what}")).await;
        }
        let host = project.host_with(&hands.handlers()).await;
        tokio::time::sleep(Duration::from_millis(random.u64(50..400))).await;
        host.drain().await;
        figures_are_exact(&project, &format!("seed {seed}, round {round}: a host")).await;
    }
    for mut session in open {
        session.run("commit").await;
    }
    for name in ["email", "some"] {
        let group = project.group(name).await;
        for key in engine::list_keys(&project.database, (group.id, group.stream_id), None, engine::KeyOrder::Age, 1000)
            .await
            .unwrap()
        {
            engine::resume_key(&project.database, group.id, &key.key).await.unwrap();
            let _ = engine::release_key(&project.database, group.id, &key.key).await; // it may not rest
        }
        let dead = engine::pick_dead(&project.database, group.id, &DeadFilter::default()).await.unwrap();
        engine::redrive(&project.database, &dead, true, |_| ()).await.unwrap();
    }
    figures_are_exact(&project, &format!("seed {seed}: before the last host")).await;
    let mut backlog = BTreeSet::new();
    for sql in [UNCLAIMED, CLAIMED, WAITING, DELAYED, DEFERRED] {
        backlog.append(&mut ids(&project, 1, sql).await);
    }
    let told = state(&project, "email").await;
    assert!(backlog.len() > 20, "seed {seed}: {} messages show nothing", backlog.len());
    // What is redriven while its group was sent back to it is told of twice, and comes once.
    let both = "select message_id from {schema}.exception where group_id = GROUP and dead_letter_id is not null
        and message_id in (UNCLAIMED)";
    let both = ids(&project, 1, &both.replace("UNCLAIMED", UNCLAIMED)).await.len();
    let all = told.lag + told.retrying + told.delayed + told.deferred;
    assert_eq!(all, (backlog.len() + both) as i64, "seed {seed}");
    hands.mended.store(true, Relaxed);
    hands.delivered.lock().unwrap().clear();
    let due = "update {schema}.exception set due_at = clock_timestamp() where due_at is not null;
        update {schema}.message_log_1 set deliver_after = null, created_at = clock_timestamp()";
    project.run(due).await;
    let host = project.host_with(&hands.handlers()).await;
    all_done(&project).await;
    host.drain().await;
    let delivered = hands.delivered.lock().unwrap().clone();
    let lost =
        "select l.id from {schema}.message_log_1 l join {schema}.compaction_head_1 h on h.message_key = l.message_key
        where l.compaction_rank is not null and h.message_id <> l.id and GROUP = 1";
    let lost = ids(&project, 1, lost).await;
    assert!(delivered.is_subset(&backlog), "seed {seed}: only what was told of");
    let missing: Vec<_> = backlog.difference(&delivered).filter(|id| !lost.contains(id)).collect();
    assert!(missing.is_empty(), "seed {seed}: all of it, but versions that have lost: {missing:?}");
    figures_are_exact(&project, &format!("seed {seed}: the end")).await;
    for name in ["email", "some"] {
        let told = state(&project, name).await;
        let figures = [told.lag, told.in_flight, told.retrying, told.delayed, told.deferred, told.blocked_keys];
        assert_eq!((figures, told.lag_exact, told.oldest_age_ms), ([0; 6], true, None), "seed {seed}");
    }
}

/// C13. 10,000 is counted, also where some of it lies in a gap; one more is an estimate and says so; 0 is exact again.
#[tokio::test]
async fn c13_one_above_ten_thousand_is_an_estimate_that_says_so() {
    let project = Project::declare(STREAMS_TOML).await;
    let more = async |count: i64| {
        project
            .run(&format!(
                "insert into {{schema}}.message_log_1 (id, payload)
                     select nextval('{{schema}}.message_log_1_id'), 'x' from generate_series(1, {count});
                 insert into {{schema}}.dead_letter (group_id, stream_id, message_id, attempts, class, error, concurrency, payload, produced_at)
                     select 1, 1, id, 3, 'failed', 'no', 'parallel', 'x', now() from {{schema}}.message_log_1 order by id desc limit {count}"
            ))
            .await;
    };
    let told = async || {
        let told = state(&project, "email").await;
        ((told.lag, told.lag_exact), (told.dead, told.dead_exact))
    };
    assert_eq!(told().await, ((0, true), (0, true)));
    more(COUNTED_MAX - 1).await;
    assert_eq!(told().await, ((COUNTED_MAX - 1, true), (COUNTED_MAX - 1, true)));
    more(1).await;
    // Ten of them below the cursor, in a gap.
    project
        .run(
            "update {schema}.cursor set claimed = 100;
             insert into {schema}.cursor_gap (group_id, missing, holders, pids) values (1, '{[50,60)}', '{}', '{}')",
        )
        .await;
    assert_eq!(told().await, ((COUNTED_MAX - 90, true), (COUNTED_MAX, true)));
    project.run("update {schema}.cursor set claimed = 10; delete from {schema}.cursor_gap").await;
    more(11).await;
    let ((lag, lag_exact), (dead, dead_exact)) = told().await;
    assert_eq!((lag, lag_exact, dead_exact), (COUNTED_MAX + 1, false, false));
    assert!((COUNTED_MAX + 1..COUNTED_MAX + 100).contains(&dead), "{dead}");
    project.run("update {schema}.cursor set claimed = 10011; delete from {schema}.dead_letter").await;
    assert_eq!(told().await, ((0, true), (0, true)));
}
