//! The janitor's steps, each by itself, with time moved by editing the rows' own times.

use std::time::Duration;

use millstream::engine::{self, Deployed, HostId, Report, Step, maintain, record_deployment};
use sqlx::Executor;

use crate::support::{
    engine::{Project, done, text},
    wait_for,
};

const TWO_STREAMS: &str = r#"
    [streams.orders]
    partition_rows = 1000
    idempotency_ttl = "1h"
    dead_letter_retention = "1d"
    max_lag = "1h"
    [streams.receipts]
    [groups.email]
    stream = "orders"
    handler = "email.wasm"
"#;

impl Project {
    /// Runs SQL of a test's own; it may name `{schema}`.
    pub async fn sql(&self, sql: &str) {
        self.database.pool.execute(sqlx::raw_sql(self.database.schema.sql(sql))).await.expect(sql);
    }

    /// Runs one step, which must not fail.
    pub async fn maintain(&self, step: Step) -> Report {
        let report = maintain(&self.database, step).await.expect("maintain");
        assert!(report.errors.is_empty(), "{:?}", report.errors);
        report
    }

    pub async fn rows(&self, table: &str) -> i64 {
        self.number(&format!("select count(*) from {{schema}}.{table}")).await
    }
}

#[tokio::test]
async fn extend_keeps_eight_partitions_ahead_of_every_stream() {
    let project = Project::declare(TWO_STREAMS).await;
    let partitions = "select count(*) from {schema}.log_partition where stream_id = 1";
    let at_first = project.number(partitions).await;
    assert_eq!(project.maintain(Step::Extend).await.rows, 0, "what is declared has them");
    project.sql("select setval('{schema}.message_log_1_id', 2500)").await;
    assert_eq!(project.maintain(Step::Extend).await.rows, 2);
    assert_eq!(project.number(partitions).await, at_first + 2);
    let ahead = "select count(*) from {schema}.log_partition where stream_id = 1 and lower_id > 2500";
    assert_eq!(project.number(ahead).await, 8);
    assert_eq!(project.maintain(Step::Extend).await.rows, 0);
}

#[tokio::test]
async fn a_step_that_another_host_runs_is_left_to_it() {
    let project = Project::declare(TWO_STREAMS).await;
    project.sql("select setval('{schema}.message_log_1_id', 2500)").await;
    let mut other = project.database.pool.begin().await.unwrap();
    let lock = project.database.schema.sql("select pg_advisory_xact_lock({lock_class} + 4, 1)");
    sqlx::query(lock).execute(&mut *other).await.unwrap();
    assert_eq!(project.maintain(Step::Extend).await.rows, 0);
    other.rollback().await.unwrap();
    assert_eq!(project.maintain(Step::Extend).await.rows, 2);
}

#[tokio::test]
async fn idempotency_keys_are_forgotten_after_their_ttl_and_not_before() {
    let project = Project::declare(TWO_STREAMS).await;
    let mut message = text("order");
    message.idempotency_key = Some("once".to_owned());
    let first = project.produce("orders", std::slice::from_ref(&message)).await[0].id;
    let set_age = "update {schema}.idempotency_key_1 set created_at = clock_timestamp() - interval '1 hour' + interval";
    project.sql(&format!("{set_age} '1 minute'")).await;
    assert_eq!(project.maintain(Step::IdempotencyKeys).await.rows, 0);
    let again = &project.produce("orders", std::slice::from_ref(&message)).await[0];
    assert!(again.duplicate && again.id == first, "just inside its ttl");
    project.sql(&format!("{set_age} '0'")).await;
    assert_eq!(project.maintain(Step::IdempotencyKeys).await.rows, 1);
    assert_eq!(project.rows("idempotency_key_1").await, 0);
    let after = &project.produce("orders", &[message]).await[0];
    assert!(!after.duplicate && after.id > first);
    assert_eq!(project.maintain(Step::IdempotencyKeys).await.rows, 0, "the new one is young");
}

/// An expired key that a produce is just taking over must survive: the sweep skips its locked row.
#[tokio::test]
async fn an_expired_key_that_is_used_again_just_now_is_kept() {
    let project = Project::declare(TWO_STREAMS).await;
    let mut message = text("order");
    message.idempotency_key = Some("once".to_owned());
    project.produce("orders", std::slice::from_ref(&message)).await;
    project.sql("update {schema}.idempotency_key_1 set created_at = created_at - interval '2 hours'").await;
    let mut producer = project.database.pool.begin().await.unwrap();
    let entry = engine::NewEntry { message: &message, deliver_after: None };
    let produced = engine::produce(&project.database, &mut producer, "orders", &[entry]).await.unwrap();
    assert_eq!(project.maintain(Step::IdempotencyKeys).await.rows, 0);
    producer.commit().await.unwrap();
    let again = &project.produce("orders", &[message]).await[0];
    assert!(again.duplicate && again.id == produced[0].id);
}

#[tokio::test]
async fn deletes_are_bounded_and_repeated_until_nothing_is_left() {
    let project = Project::declare(TWO_STREAMS).await;
    project
        .sql(
            "insert into {schema}.idempotency_key_1 (key, message_id, fingerprint, created_at)
             select gen_random_uuid(), n, '', now() - interval '1 day' from generate_series(1, 2500) n;
             create table public.sizes (rows bigint);
             create function public.note() returns trigger language plpgsql as $$
             begin insert into public.sizes select count(*) from gone; return null; end $$;
             create trigger note after delete on {schema}.idempotency_key_1 referencing old table as gone
             for each statement execute function public.note()",
        )
        .await;
    assert_eq!(project.maintain(Step::IdempotencyKeys).await.rows, 2500);
    assert_eq!(project.rows("idempotency_key_1").await, 0);
    assert_eq!(project.number("select max(rows) from public.sizes").await, 1000);
    assert_eq!(project.number("select count(*) from public.sizes").await, 3);
}

#[tokio::test]
async fn old_dead_letters_go_and_those_whose_redelivery_runs_stay() {
    let project = Project::declare(TWO_STREAMS).await;
    project
        .sql(
            "insert into {schema}.dead_letter (group_id, stream_id, message_id, attempts, class, error, concurrency, produced_at,
                 died_at, redriven_at)
             values (1, 1, 1, 3, 'failed', 'old', 'parallel', now(), now() - interval '2 days', null),
                 (1, 1, 2, 3, 'failed', 'young', 'parallel', now(), now() - interval '23 hours', null),
                 (1, 1, 3, 3, 'failed', 'redriven just now', 'parallel', now(), now() - interval '2 days', now()),
                 (1, 1, 4, 3, 'failed', 'redriven, runs', 'parallel', now(), now() - interval '9 days', now() - interval '2 days'),
                 (1, 1, 5, 3, 'failed', 'redriven, lost', 'parallel', now(), now() - interval '9 days', now() - interval '2 days');
             insert into {schema}.exception (group_id, message_id, state, due_at, dead_letter_id)
             select group_id, message_id, 'waiting', now(), id from {schema}.dead_letter where message_id in (3, 4)",
        )
        .await;
    assert_eq!(project.maintain(Step::DeadLetters).await.rows, 2);
    let left = project.number("select sum(message_id)::bigint from {schema}.dead_letter").await;
    assert_eq!((left, project.rows("dead_letter").await), (2 + 3 + 4, 3));
}

#[tokio::test]
async fn a_group_that_lags_too_long_is_moved_to_the_first_young_message() {
    let project = Project::declare(TWO_STREAMS).await;
    let ids: Vec<i64> = project.produce("orders", &vec![text("x"); 20]).await.iter().map(|one| one.id).collect();
    project.sql("delete from {schema}.message_log_1 where id in (3, 13, 14)").await; // rolled back
    assert_eq!(project.maintain(Step::Lag).await.rows, 0);
    let cursor = "select claimed from {schema}.cursor where group_id = 1";
    let age =
        format!("update {{schema}}.message_log_1 set created_at = now() - interval '2 hours' where id <= {}", ids[11]);
    project.sql(&age).await;
    // While a host claims for the group nothing is moved.
    let mut claiming = project.database.pool.begin().await.unwrap();
    let lock = project.database.schema.sql("select pg_advisory_xact_lock({lock_class} + 1, 1)");
    sqlx::query(lock).execute(&mut *claiming).await.unwrap();
    assert_eq!(project.maintain(Step::Lag).await.rows, 0);
    claiming.rollback().await.unwrap();
    let passed = project.maintain(Step::Lag).await.passed;
    assert_eq!((&*passed[0].group, passed[0].from, passed[0].to), ("email", 0, ids[11]));
    assert_eq!(project.number(cursor).await, ids[11], "the next message is the first young one");
    assert_eq!(project.maintain(Step::Lag).await.rows, 0);
    project.sql("update {schema}.message_log_1 set created_at = now() - interval '2 hours'").await;
    assert_eq!(project.maintain(Step::Lag).await.rows, 1);
    assert_eq!(project.number(cursor).await, ids[19]);
}

#[tokio::test]
async fn the_components_of_the_last_ten_deployments_are_kept_and_what_serves() {
    let project = Project::declare(TWO_STREAMS).await;
    let database = &*project.database;
    let mut replaced: Option<String> = None;
    for number in 0..130 {
        let (digest, bytes) = (format!("digest-{number}"), format!("bytes-{number}"));
        let deployed =
            Deployed { group: "email", digest: &digest, bytes: Some(bytes.as_bytes()), replaced: replaced.as_deref() };
        assert!(record_deployment(database, HostId(7), deployed).await.unwrap());
        assert!(!record_deployment(database, HostId(8), deployed).await.unwrap(), "another host deploys the same");
        replaced = Some(digest);
    }
    assert_eq!((project.rows("deployment").await, project.rows("component").await), (130, 130));
    // A host that has not been told yet still runs an old one.
    project
        .sql(r#"insert into {schema}.host (name, version, expires_at, stats)
                values ('h', '1', now(), '{"handlers": {"email": {"digest": "digest-5"}, "other": {"digest": null}}}')"#)
        .await;
    assert_eq!(project.maintain(Step::Components).await.rows, 30 + 119);
    assert_eq!((project.rows("deployment").await, project.rows("component").await), (100, 11));
    let kept = "select count(*) from {schema}.component where digest = 'digest-5' or substr(digest, 8)::integer >= 120";
    assert_eq!(project.number(kept).await, 11);
    let chain = "select count(*) from {schema}.deployment where replaced = 'digest-' || substr(digest, 8)::integer - 1";
    assert_eq!(project.number(chain).await, 100);
    assert_eq!(project.maintain(Step::Components).await.rows, 0);
}

/// Goal: a host does all this by itself and tells what it did. Method: leave something to do, and read its counters.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_running_host_maintains_the_database_and_tells_of_it() {
    let project = Project::declare(TWO_STREAMS).await;
    project.sql("select setval('{schema}.message_log_1_id', 2500)").await;
    let host = project.host("email", |_| done()).await;
    let extended = async || host.counters.snapshot()["maintenance"]["steps"]["extend"]["rows"] == 2;
    wait_for("the log is extended", Duration::from_secs(30), extended).await;
    let extend = host.counters.snapshot()["maintenance"]["steps"]["extend"].clone();
    assert!(
        extend["runs"].as_u64() >= Some(1) && extend["failures"] == 0 && extend["last_error"].is_null(),
        "{extend}"
    );
    host.drain().await;
}
