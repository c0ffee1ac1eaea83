//! Invariants of idempotent and transactional produce that need a walk of their own: I2, I5, I7, I8, I9, I10, T2. The others
//! stand where their subject is: I1, I3, I4, I6 and T3 in `produce.rs` and `client.rs`, I7 and T1 under crashes in `crashes.rs`,
//! T4 and T6 in `keys_produce.rs`, T5 in `lost_replies.rs`, T7 in `guest_sql.rs` and `up_hosts.rs`; T5 and T7 under faults in
//! `ledger.rs`, T1 and T2 with random operations in `model/`. `tidy.rs` holds that each has a test.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use millstream::{
    client::{Client, Error, ProduceOptions},
    config::Start,
    database::Database,
    engine::{self, DeadFilter, Step},
};
use tokio::{task::JoinSet, time::timeout};

use crate::support::{
    engine::{Project, done},
    keyed::rejected,
    wait_for,
};

const LIMIT: Duration = Duration::from_secs(60);

const STREAMS: &str = "[streams.orders]\nretention = \"1h\"\npartition_rows = 1000\n[streams.receipts]";

const GROUP: &str = "\n[groups.email]\nstream = \"orders\"\nhandler = \"email.wasm\"\n";

/// Id and duplicate of one produce under this idempotency key.
async fn once(database: &Database, key: &str) -> (i64, bool) {
    let sql = "select id, duplicate from {schema}.produce('orders', 'same', idempotency_key => $1)";
    sqlx::query_as(database.schema.sql(sql)).bind(key).fetch_one(&database.pool).await.expect("produce")
}

async fn age_keys(project: &Project, age: &str) {
    let sql = "update {schema}.idempotency_key_1 set created_at = clock_timestamp() - interval";
    project.run(&format!("{sql} '{age}'")).await;
}

/// I2. The window counts from the first accept, to both of its edges, and a duplicate in its last moment does not extend it.
#[tokio::test]
async fn i2_a_duplicate_does_not_extend_the_window() {
    let project = Project::declare(STREAMS).await;
    let (first, _) = once(&project.database, "k").await;
    age_keys(&project, "23 hours 59 minutes 30 seconds").await;
    for _ in 0..3 {
        assert_eq!(once(&project.database, "k").await, (first, true));
    }
    project.run("update {schema}.idempotency_key_1 set created_at = created_at - interval '31 seconds'").await;
    let (second, duplicate) = once(&project.database, "k").await;
    assert!(!duplicate && second > first, "the window has ended, whoever asked in it");
}

/// I5. A key is remembered if and only if its message committed: whichever way the transaction ends.
#[tokio::test]
async fn i5_a_key_is_remembered_only_with_its_message() {
    let project = Project::declare(STREAMS).await;
    let deferred = "create table public.pair (id integer primary key, other integer references public.pair deferrable initially deferred)";
    project.run(deferred).await;
    let produce = "select {schema}.produce('orders', 'same', idempotency_key => 'k')";
    for end in [
        "rollback",
        "select 1 / 0",
        "insert into public.pair values (1, 2); commit",
        "select pg_terminate_backend(pg_backend_pid())",
    ] {
        let mut session = project.session().await;
        session.run(&format!("begin; {produce}")).await;
        let _ = session.try_run(end).await; // all but the first fail, which is the point
        drop(session);
        let stored =
            "select (select count(*) from {schema}.message_log_1) + (select count(*) from {schema}.idempotency_key_1)";
        assert_eq!(project.number(stored).await, 0, "{end}");
    }
    let mut session = project.session().await;
    session.run(&format!("begin; savepoint s; {produce}; rollback to savepoint s; commit")).await;
    let (id, duplicate) = once(&project.database, "k").await;
    assert!(!duplicate, "no end of the others has left it");
    assert_eq!(once(&project.database, "k").await, (id, true));
    // A message that is refused leaves no key either, in one call and in the client.
    let client = Client::connect(&project.database.url().await).await.unwrap();
    let options = ProduceOptions { idempotency_key: Some("l".to_owned()), ..ProduceOptions::default() };
    let large = vec![b'x'; 2 << 20];
    let refused = client.raw_stream("orders").produce(large.as_slice(), options).await;
    assert!(matches!(refused, Err(Error::PayloadTooLarge(_))), "{refused:?}");
    assert!(!once(&project.database, "l").await.1);
}

/// I7. The memory survives what becomes of its message and its stream: acknowledged, removed by retention, declared again with
/// other settings. `crashes.rs` has crashes and failovers.
#[tokio::test]
async fn i7_the_memory_survives_acknowledgement_removal_and_other_settings() {
    let project = Project::declare(&format!("{STREAMS}{GROUP}")).await;
    let (first, _) = once(&project.database, "k").await;
    let host = project.host("email", |_| done()).await;
    wait_for("it is acknowledged", LIMIT, async || host.count("email", "done") == 1).await;
    assert_eq!(once(&project.database, "k").await, (first, true), "acknowledged");
    wait_for("nothing is left over", LIMIT, async || project.left_over().await == 0).await;
    // Enough newer messages that its partition ends, and that all of it is old.
    project.run("select count(*) from {schema}.produce_batch('orders', array(select 'x'::bytea from generate_series(1, 2000)))").await;
    wait_for("all are acknowledged", LIMIT, async || host.count("email", "done") == 2001).await;
    wait_for("nothing is left over", LIMIT, async || project.left_over().await == 0).await;
    host.drain().await;
    project.run("update {schema}.message_log_1 set created_at = now() - interval '2 hours'").await;
    for step in [Step::Extend, Step::Retention, Step::IdempotencyKeys] {
        project.maintain(step).await;
    }
    let gone = format!("select count(*) from {{schema}}.message_log_1 where id = {first}");
    assert_eq!(project.number(&gone).await, 0, "retention has removed it");
    assert_eq!(once(&project.database, "k").await, (first, true), "removed");
    let other = "[streams.orders]\nretention = \"2d\"\nmax_payload = \"1KiB\"\nidempotency_ttl = \"48h\"\n[streams.orders.key]\nconcurrency = \"ordered\"\n[streams.receipts]";
    let project: Project = project.declare_again(other).await;
    assert_eq!(once(&project.database, "k").await, (first, true), "other settings");
    age_keys(&project, "47 hours").await;
    project.maintain(Step::IdempotencyKeys).await;
    assert_eq!(once(&project.database, "k").await, (first, true), "the longer window counts from the first accept");
}

/// I7. Nor does it depend on what groups do with the message, and on which functions serve it: dead, redriven, discarded, passed
/// by a seek and gone back to, its group forgotten, all functions replaced.
#[tokio::test]
async fn i7_the_memory_survives_dead_letters_seeks_a_forgotten_group_and_other_functions() {
    let streams = format!("{STREAMS}{GROUP}retry = {{ max_attempts = 1 }}\n");
    let project = Project::declare(&streams).await;
    let (first, _) = once(&project.database, "k").await;
    let is_known = async |when: &str| {
        assert_eq!(once(&project.database, "k").await, (first, true), "{when}");
        assert_eq!(project.number("select count(*) from {schema}.message_log_1").await, 1, "{when}");
    };
    let fails = Arc::new(AtomicBool::new(true));
    let failed = Arc::new(AtomicUsize::new(0));
    let (judge, counted) = (Arc::clone(&fails), Arc::clone(&failed));
    let judge = move |_| {
        if judge.load(Relaxed) {
            counted.fetch_add(1, Relaxed);
            rejected()
        } else {
            done()
        }
    };
    let host = project.host("email", judge).await;
    let group = project.group("email").await;
    let dead = async || engine::pick_dead(&project.database, group.id, &DeadFilter::default()).await.expect("pick");
    wait_for("it is dead", LIMIT, async || dead().await.len() == 1).await;
    is_known("dead").await;
    let letter = dead().await;
    engine::redrive(&project.database, &letter, false, |_| ()).await.expect("redrive");
    wait_for("it is dead again", LIMIT, async || failed.load(Relaxed) == 2 && dead().await.len() == 1).await;
    is_known("redriven").await;
    assert_eq!(engine::discard(&project.database, &dead().await, |_| ()).await.expect("discard"), 1);
    is_known("discarded").await;
    fails.store(false, Relaxed);
    for (start, done) in [(Start::Latest, 0), (Start::Earliest, 1)] {
        engine::seek(&project.database, group.id, group.stream_id, "email", &start).await.expect("seek");
        wait_for("it is delivered as often as the seek says", LIMIT, async || host.count("email", "done") == done)
            .await;
        is_known(&format!("{start:?}")).await;
    }
    host.drain().await;
    engine::forget(&project.database, group.id, "email", false).await.expect("forget");
    is_known("its group is forgotten").await;
    project.run("update {schema}.function_set set checksum = 'older'").await;
    engine::apply(&project.database, &project.config).await.expect("declare");
    let older = "select count(*) from {schema}.function_set where checksum = 'older'";
    assert_eq!(project.number(older).await, 0, "they were installed again");
    is_known("other functions").await;
}

/// A way to produce one message under an idempotency key.
#[derive(Clone, Copy, Debug)]
enum Way {
    Sql,
    SqlBatch,
    Client,
    ClientBatch,
    ClientTransaction,
}

const WAYS: [Way; 5] = [Way::Sql, Way::SqlBatch, Way::Client, Way::ClientBatch, Way::ClientTransaction];

impl Way {
    /// Id and duplicate.
    async fn once(self, database: &Database, client: &Client, key: &str) -> (i64, bool) {
        let stream = client.raw_stream("orders");
        let (same, options) =
            (b"same".as_slice(), ProduceOptions { idempotency_key: Some(key.to_owned()), ..ProduceOptions::default() });
        let produced = match self {
            Self::Sql => return once(database, key).await,
            Self::SqlBatch => {
                let sql = "select id, duplicate from {schema}.produce_batch('orders', array['other', 'same']::bytea[],
                    p_idempotency_keys => array[null, $1]) where ordinal = 2";
                let one = sqlx::query_as(database.schema.sql(sql)).bind(key).fetch_one(&database.pool);
                return one.await.expect("produce a batch");
            }
            Self::Client => stream.produce(same, options).await,
            Self::ClientBatch => {
                let batch = [(b"other".as_slice(), ProduceOptions::default()), (same, options)];
                stream.produce_batch(batch).await.map(|mut answers| answers.remove(1))
            }
            Self::ClientTransaction => {
                client.in_transaction(async |tx| stream.produce_in_tx(tx, same, options).await).await
            }
        };
        let produced = produced.expect("produce");
        (produced.id, produced.duplicate)
    }
}

/// I8. Of concurrent produces with one id one is stored, whichever way they come. If the winner commits, the others are its
/// duplicates; if it rolls back or dies, one of them is stored, never neither and never two.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn i8_of_concurrent_produces_with_one_id_exactly_one_is_stored() {
    const OTHERS: i64 = 3;
    let project = Project::declare(STREAMS).await;
    let database = Arc::new(project.database.another_host().await);
    let client = Client::connect(&project.database.url().await).await.unwrap();
    let waiting =
        "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'";
    let mut rounds = 0;
    for end in ["commit", "rollback", "select pg_terminate_backend(pg_backend_pid())"] {
        for way in WAYS {
            let key = format!("{way:?}, {end}");
            let mut winner = project.session().await;
            winner.run("begin").await;
            let first = format!("select id from {{schema}}.produce('orders', 'same', idempotency_key => '{key}')");
            let first = winner.number(&first).await;
            let mut others = JoinSet::new();
            for _ in 0..OTHERS {
                let (database, client, key) = (Arc::clone(&database), client.clone(), key.clone());
                others.spawn(async move { way.once(&database, &client, &key).await });
            }
            // The client lets those of one key wait on one connection.
            let waits = if matches!(way, Way::Client) { 1 } else { OTHERS };
            wait_for("they wait for the first", LIMIT, async || project.number(waiting).await == waits).await;
            assert!(others.try_join_next().is_none(), "{key}: one did not wait");
            let _ = winner.try_run(end).await; // the last of them fails, which is the point
            drop(winner);
            let told = timeout(LIMIT, others.join_all()).await.expect("they go on");
            let duplicates = told.iter().filter(|(_, duplicate)| *duplicate).count() as i64;
            let is_committed = end == "commit";
            assert_eq!(duplicates, if is_committed { OTHERS } else { OTHERS - 1 }, "{key}: {told:?}");
            assert!(told.iter().all(|(id, _)| *id == told[0].0 && (*id == first) == is_committed), "{key}: {told:?}");
            rounds += 1;
            let same = "select count(*) from {schema}.message_log_1 where payload = 'same'";
            assert_eq!(project.number(same).await, rounds, "{key}: exactly one is stored");
            assert_eq!(
                project.number(&format!("{same} and id = {}", told[0].0)).await,
                1,
                "{key}: the one of the answer"
            );
        }
    }
    client.close().await;
    database.close().await;
}

/// I9, I10. No number of other keys and no idleness shortens the window: the memory has no bound but the promised time, and
/// belongs to no session.
#[tokio::test]
async fn i9_i10_neither_other_keys_nor_idleness_shorten_the_window() {
    let project = Project::declare(STREAMS).await;
    let another = project.database.another_host().await;
    let (first, _) = once(&another, "k").await;
    another.close().await; // the producer goes away, and its connections with it
    let many = "select count(*) from {schema}.produce_batch('orders', array_fill('x'::bytea, array[30000]),
        p_idempotency_keys => array(select 'other ' || n from generate_series(1, 30000) n))";
    assert_eq!(project.number(many).await, 30_000);
    age_keys(&project, "23 hours 59 minutes").await;
    assert_eq!(project.maintain(Step::IdempotencyKeys).await.rows, 0, "the janitor keeps them all");
    let another = project.database.another_host().await;
    assert_eq!(once(&another, "k").await, (first, true), "I10");
    another.close().await;
    let again = "select count(*) from {schema}.produce_batch('orders', array_fill('x'::bytea, array[30000]),
        p_idempotency_keys => array(select 'other ' || n from generate_series(1, 30000) n)) as p where p.duplicate";
    assert_eq!(project.number(again).await, 30_000, "I9");
}

/// T2. A rollback leaves no idempotency key, no rank, no key hold and no stall, also to a savepoint: what comes after it on the
/// same keys is stored, wins, and is delivered.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t2_a_rollback_leaves_no_rank_no_hold_and_no_stall() {
    let project = Project::declare(&format!("{STREAMS}{GROUP}")).await;
    let delivered = Arc::new(Mutex::new(Vec::new()));
    let notes = Arc::clone(&delivered);
    let host = project
        .host("email", move |message| {
            notes.lock().unwrap().push(String::from_utf8(message.payload.unwrap()).unwrap());
            done()
        })
        .await;
    let undone = "select {schema}.produce('orders', 'undone', key => 'c', compaction => true, rank => 9, idempotency_key => 'k');
        select {schema}.produce('orders', 'undone', key => 'o', concurrency => 'ordered');
        select {schema}.produce('orders', 'undone')";
    let kept = |n: u32| {
        format!(
            "select {{schema}}.produce('orders', 'c{n}', key => 'c', compaction => true, rank => {n});
             select {{schema}}.produce('orders', 'o{n}', key => 'o', concurrency => 'ordered')"
        )
    };
    let mut session = project.session().await;
    session.run(&format!("begin; {undone}; rollback")).await;
    session.run(&kept(1)).await;
    session.run(&format!("begin; savepoint s; {undone}; rollback to savepoint s; {}; commit", kept(2))).await;
    wait_for("both keys go on", LIMIT, async || {
        let delivered = delivered.lock().unwrap();
        ["c2", "o1", "o2"].iter().all(|wanted| delivered.iter().any(|one| one == wanted))
    })
    .await;
    wait_for("nothing is left over", LIMIT, async || project.left_over().await == 0).await;
    assert!(!delivered.lock().unwrap().iter().any(|one| one == "undone"));
    let held = "select count(*) from pg_locks where locktype = 'advisory'
        and database = (select oid from pg_database where datname = current_database()) and pid = ";
    assert_eq!(session.number(&format!("{held} pg_backend_pid()")).await, 0);
    let keys = "select count(*) from {schema}.idempotency_key_1";
    assert_eq!(session.number(keys).await, 0);
    host.drain().await;
}
