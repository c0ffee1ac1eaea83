//! Retention drops partitions that are too old and behind every group, whatever crashes in between and whoever reads.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use millstream::{
    database::Database,
    engine::{self, GroupId, KeyOrder, Note, Step, Wanted, maintain},
    handler::{Concurrency, Handler, Message},
};
use sqlx::Connection;

use crate::support::{
    engine::{Project, done, request, text, turn_statement},
    keyed::{keyed, rejected},
    wait_for,
};

const LIMIT: Duration = Duration::from_secs(30);

const STREAM: &str = r#"
    [streams.orders]
    partition_rows = 1000
    retention = "1h"
"#;

const GROUP: &str = r#"
    [groups.email]
    stream = "orders"
    handler = "email.wasm"
"#;

/// A stream with `rows` messages that are two hours old.
async fn old_messages(streams_toml: &str, rows: u32) -> Project {
    let project = Project::declare(streams_toml).await;
    project.sql(&format!("select {{schema}}.extend_log(1, 8 + {rows} / 1000)")).await;
    let fill = format!(
        "insert into {{schema}}.message_log_1 (id, payload, created_at)
         select nextval('{{schema}}.message_log_1_id'), convert_to('m' || n, 'UTF8'), now() - interval '2 hours'
         from generate_series(1, {rows}) n"
    );
    project.sql(&fill).await;
    project.maintain(Step::Extend).await;
    project
}

async fn first_id(project: &Project) -> i64 {
    project.number("select coalesce(min(id), 0) from {schema}.message_log_1").await
}

/// What is attached, what is noted, and what exists as a table must be the same.
async fn check_partitions_agree(project: &Project) {
    let attached =
        project.number("select count(*) from pg_inherits where inhparent = '{schema}.message_log_1'::regclass").await;
    let tables =
        project.number("select count(*) from pg_class where relname like 'message_log_1_p%' and relkind = 'r'").await;
    let noted = project.number("select count(*) from {schema}.log_partition where detached_at is null").await;
    assert_eq!((attached, noted), (tables, tables));
    assert_eq!(project.rows("log_partition").await, tables);
}

#[tokio::test]
async fn without_groups_age_alone_decides() {
    let project = old_messages(STREAM, 3500).await;
    project.sql("update {schema}.message_log_1 set created_at = now() - interval '59 minutes' where id = 2000").await;
    assert_eq!(project.maintain(Step::Retention).await.rows, 1, "the second partition's newest row is too young");
    assert_eq!(first_id(&project).await, 1001);
    project.sql("update {schema}.message_log_1 set created_at = now() - interval '61 minutes' where id = 2000").await;
    assert_eq!(project.maintain(Step::Retention).await.rows, 2);
    assert_eq!(first_id(&project).await, 3001, "the partition that is being written to stays");
    check_partitions_agree(&project).await;
    assert_eq!(project.maintain(Step::Retention).await.rows, 0);
}

#[tokio::test]
async fn forever_drops_nothing() {
    let project = old_messages(&STREAM.replace("1h", "forever"), 3500).await;
    assert_eq!(project.maintain(Step::Retention).await.rows, 0);
    assert_eq!(first_id(&project).await, 1);
}

#[tokio::test]
async fn an_empty_partition_goes_once_it_is_old_itself() {
    let project = old_messages(STREAM, 2500).await;
    project.sql("delete from {schema}.message_log_1 where id <= 1000").await; // all rolled back
    assert_eq!(project.maintain(Step::Retention).await.rows, 0);
    project.sql("update {schema}.log_partition set created_at = now() - interval '2 hours'").await;
    assert_eq!(project.maintain(Step::Retention).await.rows, 2);
    assert_eq!(first_id(&project).await, 2001);
}

/// N2, N3. What a group has not claimed, what a host holds and what waits for a retry keep their partitions, and are told of.
#[tokio::test]
async fn whatever_a_group_still_needs_holds_exactly_its_partition_and_those_above() {
    let project = old_messages(&format!("{STREAM}{GROUP}"), 5500).await;
    let pins = [
        // Cursor, an open gap, a claim and an exception: the lowest of them counts.
        "update {schema}.cursor set claimed = 1500",
        "update {schema}.cursor set claimed = 5500;
         insert into {schema}.cursor_gap (group_id, missing, holders, pids) values (1, '{[2300,2301)}', '{}', '{}')",
        "delete from {schema}.cursor_gap;
         insert into {schema}.host (name, version, expires_at) values ('h', '1', now() + interval '1 day');
         insert into {schema}.claim (id, group_id, host_id, pending) select 1, 1, max(id), '{[3300,3301), [4000,4002)}' from {schema}.host",
        "delete from {schema}.claim;
         insert into {schema}.exception (group_id, message_id, state, due_at) values (1, 4001, 'waiting', now() + interval '1 day')",
    ];
    for (pin, first) in pins.iter().zip([1001, 2001, 3001, 4001]) {
        project.sql(pin).await;
        let report = project.maintain(Step::Retention).await;
        assert_eq!((report.rows, first_id(&project).await), (1, first), "{pin}");
        let pinned = &report.pinned["orders"];
        assert_eq!((pinned.partitions, &*pinned.group), ((6001 - first).unsigned_abs() / 1000 - 1, "email"), "{pin}");
    }
    project.sql("delete from {schema}.exception").await;
    let report = project.maintain(Step::Retention).await;
    assert!(report.rows == 1 && report.pinned.is_empty());
    check_partitions_agree(&project).await;
}

/// N3. Goal: one blocked key of an ordered group holds what lies behind it, which is told with the group's name, by the host
/// that maintains and beside each blocked key; no other stream is held; once the key goes on, so does retention.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn n3_a_blocked_key_that_holds_partitions_is_told_of() {
    let other = "[streams.other]\npartition_rows = 1000\nretention = \"1h\"\n[groups.fax]\nstream = \"other\"\nhandler = \"fax.wasm\"\n";
    let project = Project::declare(&format!("{STREAM}{GROUP}{other}")).await;
    project.database.expect_log("partitions older than the stream's retention are kept");
    let ordered = |key: &str, payload: &str| keyed(key, Concurrency::Ordered, payload);
    let mut batch = vec![text("first"), ordered("stuck", "bad"), ordered("stuck", "behind"), ordered("fine", "fine")];
    batch.extend((0..2600).map(|n| text(&n.to_string())));
    for stream in ["orders", "other"] {
        project.produce(stream, &batch).await;
    }
    let ends = |message: Message| match (&*message.stream, message.payload.as_deref()) {
        ("orders", Some(b"bad")) => rejected(),
        _ => done(),
    };
    let ends: Arc<dyn Handler> = Arc::new(ends);
    let host = project.host_with(&[("email", Arc::clone(&ends)), ("fax", ends)]).await;
    let left =
        "select (select count(*) from {schema}.claim) + (select count(*) from {schema}.cursor c where claimed < 2604)
        + (select count(*) from {schema}.exception where message_id <> 3)";
    wait_for("all but the stuck key", LIMIT, async || project.number(left).await == 0).await;
    for stream in [1, 2] {
        project
            .sql(&format!("update {{schema}}.message_log_{stream} set created_at = now() - interval '2 hours'"))
            .await;
    }
    let pinned = || host.counters.snapshot()["maintenance"]["pinned"].clone();
    wait_for("the host tells", LIMIT, async || pinned()["orders"].is_object()).await;
    assert_eq!(pinned(), serde_json::json!({ "orders": { "partitions": 2, "group": "email" } }));
    assert_eq!(first_id(&project).await, 1);
    wait_for("the other stream goes on", LIMIT, async || {
        project.maintain(Step::Retention).await;
        project.number("select min(id) from {schema}.message_log_2").await == 2001
    })
    .await;
    let group = project.group("email").await;
    let keys =
        engine::list_keys(&project.database, (group.id, group.stream_id), None, KeyOrder::Age, 10).await.unwrap();
    let told: Vec<_> = keys.iter().map(|key| (&*key.key, &*key.state, key.depth, key.waits_for)).collect();
    assert_eq!(told, [("stuck", "blocked", 1, Some(2))]);
    assert_eq!(keys[0].oldest_age_ms.map(|age| age / 3_600_000), Some(2));
    assert_eq!(engine::discard(&project.database, &[1], |_| ()).await.unwrap(), 1);
    wait_for("the key goes on", LIMIT, async || project.number("select count(*) from {schema}.exception").await == 0)
        .await;
    wait_for("retention goes on", LIMIT, async || {
        assert!(project.maintain(Step::Retention).await.pinned.is_empty());
        first_id(&project).await == 2001
    })
    .await;
    host.drain().await;
}

/// Goal: a crash after any statement of a detach leaves what the next round finishes. Method: do the steps by hand up to
/// each point.
#[tokio::test]
async fn a_crash_at_any_point_of_a_detach_is_finished_by_the_next_round() {
    let project = old_messages(STREAM, 5500).await;
    // In the middle of DETACH CONCURRENTLY: a reader of the log makes it wait, and its wait is cut short.
    let mut reader = project.database.pool.begin().await.unwrap();
    sqlx::query(project.database.schema.sql("select count(*) from {schema}.message_log_1"))
        .fetch_one(&mut *reader)
        .await
        .unwrap();
    let mut alone = project.database.connect_alone(Duration::from_millis(50)).await.unwrap();
    let detach = "alter table {schema}.message_log_1 detach partition {schema}.message_log_1_p1 concurrently";
    let cut = sqlx::raw_sql(project.database.schema.sql(detach)).execute(&mut alone).await.unwrap_err();
    assert!(cut.to_string().contains("lock timeout"), "{cut}");
    alone.close().await.unwrap();
    let pending = "select count(*) from pg_inherits where inhdetachpending";
    assert_eq!(project.number(pending).await, 1);
    // The log can be read, extended and produced to meanwhile; the rest of retention waits for this one.
    let report = maintain(&project.database, Step::Retention).await.unwrap();
    assert_eq!((report.rows, report.errors.len()), (0, 1), "the reader still reads: {:?}", report.errors);
    assert_eq!(first_id(&project).await, 1001);
    project.sql("select setval('{schema}.message_log_1_id', 6500)").await;
    assert!(project.maintain(Step::Extend).await.rows > 0);
    project.sql("select {schema}.produce('orders', 'x'::text)").await;
    reader.rollback().await.unwrap();
    project.sql("update {schema}.stream set retention_ms = null").await;
    assert_eq!(project.maintain(Step::Retention).await.rows, 1);
    check_partitions_agree(&project).await;
    // Detached, and not noted.
    let detach = detach.replace("_p1 ", "_p1001 ");
    let mut alone = project.database.connect_alone(Duration::from_secs(1)).await.unwrap();
    sqlx::raw_sql(project.database.schema.sql(&detach)).execute(&mut alone).await.unwrap();
    assert_eq!(project.maintain(Step::Retention).await.rows, 1);
    check_partitions_agree(&project).await;
    // Detached and noted, and not dropped.
    let detach = detach.replace("_p1001 ", "_p2001 ");
    sqlx::raw_sql(project.database.schema.sql(&detach)).execute(&mut alone).await.unwrap();
    project.sql("select {schema}.note_detached(1, 2001)").await;
    assert_eq!(project.number("select count(*) from {schema}.log_partition where detached_at is not null").await, 1);
    assert_eq!(project.maintain(Step::Retention).await.rows, 1);
    check_partitions_agree(&project).await;
    // Dropped by hand, and its row left over.
    sqlx::raw_sql(project.database.schema.sql(&detach.replace("_p2001 ", "_p3001 ")))
        .execute(&mut alone)
        .await
        .unwrap();
    project.sql("drop table {schema}.message_log_1_p3001").await;
    assert_eq!(project.maintain(Step::Retention).await.rows, 1);
    check_partitions_agree(&project).await;
    assert_eq!(first_id(&project).await, 4001);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_hosts_at_once_drop_each_partition_once() {
    let project = old_messages(STREAM, 8500).await;
    let hosts = [
        project.database.another_host().await,
        project.database.another_host().await,
        project.database.another_host().await,
    ];
    let run = async |database: &Database| {
        let mut rows = 0;
        for _ in 0..5 {
            let report = maintain(database, Step::Retention).await.unwrap();
            assert!(report.errors.is_empty(), "{:?}", report.errors);
            rows += report.rows;
        }
        rows
    };
    let (a, b, c) = tokio::join!(run(&hosts[0]), run(&hosts[1]), run(&hosts[2]));
    assert_eq!(a + b + c, 8);
    assert_eq!(first_id(&project).await, 8001);
    check_partitions_agree(&project).await;
    for host in hosts {
        host.close().await;
    }
}

/// Goal: no claim fails, and none misses a message, while partitions below it leave. Method: one group reads the whole
/// log turn by turn while retention runs as often as it can.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn claims_go_on_while_partitions_leave() {
    let project = old_messages(&format!("{STREAM}{GROUP}"), 20_500).await;
    let other = project.database.another_host().await;
    let group = project.group("email").await;
    let host = engine::register(&project.database, "test", Duration::from_secs(60)).await.unwrap();
    let claims = async {
        let (mut seen, mut finished) = (Vec::new(), Vec::new());
        while seen.len() < 20_500 {
            let wanted = Wanted { messages: 50, bytes: 1 << 20, retries: 4 };
            let turn =
                engine::claim(&project.database, host, &group, &request(&finished, wanted)).await.expect("a claim");
            assert_eq!(turn.note, Note::Claimed);
            finished = turn.claimed.iter().map(|claimed| claimed.token.claim).collect();
            finished.dedup();
            seen.extend(turn.claimed.iter().map(|claimed| claimed.message.id));
        }
        assert!(seen.iter().copied().eq(1..=20_500), "each once, in order");
        engine::claim(&project.database, host, &group, &request(&finished, Wanted::default())).await.expect("settle");
    };
    let over = AtomicUsize::new(0);
    let retention = async {
        let mut dropped = 0;
        while over.load(Relaxed) == 0 {
            let report = maintain(&other, Step::Retention).await.unwrap();
            assert!(report.errors.is_empty(), "{:?}", report.errors);
            dropped += report.rows;
            tokio::task::yield_now().await;
        }
        dropped
    };
    let claims = async {
        claims.await;
        over.store(1, Relaxed);
    };
    let ((), while_claimed) = tokio::join!(claims, retention);
    assert!(while_claimed > 1, "partitions left while claims ran: {while_claimed}");
    let rest = project.maintain(Step::Retention).await.rows;
    assert_eq!(while_claimed + rest, 20);
    other.close().await;
}

/// Goal: a dead letter holds no partition, and its message is still there when it is redriven later.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_letter_is_delivered_again_although_its_partition_is_gone() {
    let project = old_messages(&format!("{STREAM}{GROUP}"), 1500).await;
    project
        .sql(
            "update {schema}.cursor set claimed = 1500;
             insert into {schema}.dead_letter (group_id, stream_id, message_id, attempts, class, error, concurrency, payload, produced_at, died_at)
             select 1, 1, id, 3, 'failed', 'e', concurrency, payload, created_at, now() - interval '99 days' from {schema}.message_log_1 where id = 10",
        )
        .await;
    assert_eq!(project.maintain(Step::Retention).await.rows, 1);
    let dead = project.number("select id from {schema}.dead_letter").await;
    assert_eq!(engine::redrive(&project.database, &[dead], false, |_| ()).await.unwrap().redriven, 1);
    assert_eq!(project.maintain(Step::DeadLetters).await.rows, 0, "its redelivery is still to come");
    let seen = Arc::new(Mutex::new(Vec::new()));
    let notes = Arc::clone(&seen);
    let host = project
        .host("email", move |message: Message| {
            notes.lock().unwrap().push((message.id, message.payload.unwrap(), message.redriven));
            done()
        })
        .await;
    wait_for("the redelivery", LIMIT, async || project.rows("dead_letter").await == 0).await;
    assert_eq!(*seen.lock().unwrap(), [(10, b"m10".to_vec(), true)]);
    assert_eq!(project.left_over().await, 0);
    host.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_group_that_begins_below_the_first_partition_goes_on_at_its_first_message() {
    let project = old_messages(STREAM, 2500).await;
    assert_eq!(project.maintain(Step::Retention).await.rows, 2);
    let with_group =
        millstream::config::parse(&format!("{STREAM}{GROUP}"), "streams.toml".as_ref(), &|_| None).unwrap();
    engine::apply(&project.database, &with_group).await.unwrap();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let notes = Arc::clone(&seen);
    let host = project
        .host("email", move |message: Message| {
            notes.lock().unwrap().push(message.id);
            done()
        })
        .await;
    wait_for("the deliveries", LIMIT, async || seen.lock().unwrap().len() == 500).await;
    wait_for("nothing is left over", LIMIT, async || project.left_over().await == 0).await;
    let mut seen = seen.lock().unwrap().clone();
    seen.sort_unstable();
    assert!(seen.into_iter().eq(2001..=2500));
    host.drain().await;
}

/// A message that somebody deleted by hand must neither stop the group's retries nor stay for ever.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_exception_whose_message_is_gone_ends_as_a_dead_letter() {
    let project = old_messages(&format!("{STREAM}{GROUP}"), 20).await;
    project
        .sql(
            "update {schema}.cursor set claimed = 20;
             insert into {schema}.exception (group_id, message_id, state, due_at, failures)
             values (1, 3, 'waiting', now(), 1), (1, 4, 'waiting', now(), 1);
             delete from {schema}.message_log_1 where id = 3",
        )
        .await;
    let host = project
        .host("email", |message: Message| {
            assert_eq!(message.id, 4);
            done()
        })
        .await;
    wait_for("both end", LIMIT, async || project.left_over().await == 0).await;
    let told = "select count(*) from {schema}.dead_letter where message_id = 3 and class = 'host' and error like '%no longer in the log%'";
    assert_eq!((project.number(told).await, project.rows("dead_letter").await), (1, 1));
    host.drain().await;
}

/// Nobody but its own transaction sees such a message yet, so its partition looks older than it is.
#[tokio::test]
async fn a_message_that_is_not_yet_committed_holds_its_partition() {
    let project = old_messages(STREAM, 999).await;
    let mut producer = project.database.pool.begin().await.unwrap();
    let late = text("late");
    let entry = engine::NewEntry { message: &late, deliver_after: None };
    let produced = engine::produce(&project.database, &mut producer, "orders", &[entry]).await.unwrap();
    assert_eq!(produced[0].id, 1000);
    project.sql("select setval('{schema}.message_log_1_id', 2500)").await;
    assert_eq!(project.maintain(Step::Retention).await.rows, 0);
    producer.commit().await.unwrap();
    assert_eq!(project.maintain(Step::Retention).await.rows, 0, "its newest row is young");
    project.sql("update {schema}.message_log_1 set created_at = created_at - interval '2 hours' where id = 1000").await;
    assert_eq!(project.maintain(Step::Retention).await.rows, 1);
}

/// Goal: the cost of a turn and of the poll does not grow with the log. Method: count the partitions each has locked.
#[tokio::test]
async fn a_turn_touches_few_partitions_however_many_there_are() {
    let project = old_messages(&format!("{STREAM}{GROUP}"), 50_500).await;
    project
        .sql(
            "update {schema}.cursor set claimed = 25990;
             insert into {schema}.host (name, version, expires_at) values ('h', '1', now() + interval '1 day');
             insert into {schema}.cursor_gap (group_id, missing, holders, pids) values (1, '{[3300,3301)}', '{}', '{}');
             insert into {schema}.exception (group_id, message_id, state, due_at) values (1, 7001, 'waiting', now())",
        )
        .await;
    let turn = turn_statement(GroupId(1), "(select max(id) from {schema}.host)", 20, 4);
    for (statement, rows, partitions) in
        [("select count(*) from {schema}.groups_with_work('{1}')", 1, 0), (&*turn, 23, 4)]
    {
        let mut tx = project.database.pool.begin().await.unwrap();
        let found: i64 = sqlx::query_scalar(project.database.schema.sql(statement)).fetch_one(&mut *tx).await.unwrap();
        assert_eq!(found, rows, "{statement}");
        let locked = "select count(distinct relation) from pg_locks
                      where pid = pg_backend_pid() and relation in (select inhrelid from pg_inherits where inhparent = '{schema}.message_log_1'::regclass)";
        let locked: i64 = sqlx::query_scalar(project.database.schema.sql(locked)).fetch_one(&mut *tx).await.unwrap();
        assert_eq!(locked, partitions, "{statement}");
        tx.rollback().await.unwrap();
    }
}
