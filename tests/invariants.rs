//! Invariants of idempotent and transactional produce that need a walk of their own: I2, I5, I7, I9, I10, T2. The others stand
//! where their subject is: I1, I3, I4, I6, I8, T1 and T3 in `produce.rs` and `client.rs`, T4 and T6 in `keys_produce.rs`, T5 in
//! `lost_replies.rs`, T7 in `guest_sql.rs`; all under faults in `ledger.rs` and `model/`. `tidy.rs` holds that each has a test.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use millstream::{
    client::{Client, Error, ProduceOptions},
    config,
    database::{
        Database,
        embedded::{Options, Server},
        migrate,
    },
    engine::{self, Step},
};

use crate::support::{
    engine::{Project, done, number},
    scratch_folder, wait_for,
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

/// I7. The memory survives what becomes of its message and of the stream: acknowledged, dead, passed by a seek, removed by
/// retention, declared again with other settings, served by a newer set of functions.
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

/// I7. The memory is on disk when the produce has answered: Postgres is killed, started again, and the key is known.
#[tokio::test]
async fn i7_the_memory_survives_a_crash_of_postgres() {
    let folder = scratch_folder();
    let start = async || {
        let options = Options { folder: folder.path().to_owned(), throw_away: false };
        let server = Server::start(options).await.expect("start Postgres");
        let database = Database::connect(&server.connect(), 4, "millstream").await.expect("connect");
        (server, database)
    };
    let (server, database) = start().await;
    migrate(&database).await.expect("migrate");
    let config = config::parse(STREAMS, std::path::Path::new("streams.toml"), &|_| None).unwrap();
    engine::apply(&database, &config).await.expect("declare");
    let (first, _) = once(&database, "k").await;
    let lock_file = std::fs::read_to_string(server.data_folder().join("postmaster.pid")).unwrap();
    let pid = rustix::process::Pid::from_raw(lock_file.lines().next().unwrap().parse().unwrap()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    server.ended().await;
    drop((server, database));
    let (server, database) = start().await;
    assert_eq!(once(&database, "k").await, (first, true));
    assert_eq!(number(&database, "select count(*) from {schema}.message_log_1").await, 1);
    database.close().await;
    server.stop().await.expect("stop");
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
