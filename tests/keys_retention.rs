//! Retention of compacted streams: a key's newest version stays whatever its age, tombstones go after their time, and no
//! group misses a winner. Each invariant of the semantics by its name.

use std::sync::{Arc, Mutex};

use millstream::{
    engine::Step,
    handler::{Concurrency, Message, NewMessage},
};

use crate::support::{
    engine::{Project, done, text},
    keyed::{all_done, steps, version},
};

const STREAM: &str = r#"
    [streams.orders]
    partition_rows = 1000
    retention = "1h"
    tombstone_retention = "2h"
"#;

const GROUP: &str = r#"
    [groups.email]
    stream = "orders"
    handler = "email.wasm"
    slots = 1
"#;

/// Partitions of 1,000 rows, of which the first are full and old: versions 0 to 2 of 1,000 keys, and keyless messages.
async fn old_versions(group: &str) -> Project {
    let project = Project::declare(&format!("{STREAM}{group}")).await;
    for round in 0..3 {
        let mut batch: Vec<_> = (0..1000)
            .map(|key| version(&format!("k{key}"), Concurrency::Parallel, &format!("k{key}.{round}")))
            .collect();
        batch.extend((0..500).map(|_| NewMessage {
            key: None,
            compaction: None,
            concurrency: None,
            ..version("", Concurrency::Parallel, "plain")
        }));
        project.produce("orders", &batch).await;
    }
    age(&project).await;
    project
}

/// Everything so far is two hours old, and in full partitions.
async fn age(project: &Project) {
    let last = project.number("select (last_value + 999) / 1000 * 1000 + 1 from {schema}.message_log_1_id").await;
    project
        .run(&format!(
            "update {{schema}}.message_log_1 set created_at = created_at - interval '2 hours';
             update {{schema}}.log_partition set created_at = created_at - interval '2 hours';
             select setval('{{schema}}.message_log_1_id', {last}), {{schema}}.extend_log(1, 8)"
        ))
        .await;
}

async fn retain(project: &Project) {
    for step in [Step::Versions, Step::Retention] {
        project.maintain(step).await;
    }
    project.run("update {schema}.log_partition set thinned_at = null").await; // so that the next call looks again
}

const ROWS: &str = "select count(*) from {schema}.message_log_1";

const PARTITIONS: &str =
    "select count(*) from {schema}.log_partition where upper_id <= (select last_value from {schema}.message_log_1_id)";

/// C9, G3. The newest version of each key outlives the retention, everything else goes, and a group that begins later gets
/// each key once, in position order.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c9_retention_keeps_the_newest_version_of_each_key() {
    let project = old_versions("").await;
    retain(&project).await;
    assert_eq!(project.number(ROWS).await, 1000);
    assert_eq!(
        project
            .number(
                "select count(*) from {schema}.message_log_1 l join {schema}.compaction_head_1 h on h.message_id = l.id"
            )
            .await,
        1000
    );
    assert!(project.number(PARTITIONS).await <= 3, "partitions without a winner are dropped");
    let project = project.declare_again(&format!("{STREAM}{GROUP}")).await;
    let (trace, _, handler) = steps(|_, _| done());
    let host = project.host_with(&[("email", handler)]).await;
    all_done(&project).await;
    host.drain().await;
    assert_eq!(trace.ended(), (0..1000).map(|key| format!("k{key}.2")).collect::<Vec<_>>());
}

/// N3. What a group still needs is not thinned, and says so as pinned.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn n3_what_a_group_still_needs_stays() {
    let project = old_versions(GROUP).await;
    project.run("update {schema}.cursor set claimed = 2400").await;
    retain(&project).await;
    assert_eq!(project.number("select count(*) from {schema}.message_log_1 where id > 2000").await, 2500);
    assert_eq!(project.number("select count(*) from {schema}.message_log_1 where id <= 2000").await, 0);
}

/// C7, C8. A tombstone stays, with its rank, for tombstone_retention after every group had it; then both go.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c7_a_tombstone_stays_for_its_time() {
    let project = old_versions(GROUP).await;
    let tombstone = |rank| NewMessage { payload: None, rank: Some(rank), ..version("k1", Concurrency::Parallel, "") };
    project.produce("orders", &[tombstone(9)]).await;
    age(&project).await;
    project.produce("orders", &[text("what brings the group past the partition")]).await;
    let seen = Arc::new(Mutex::new(Vec::new()));
    let noted = Arc::clone(&seen);
    let host = project
        .host("email", move |message: Message| {
            if message.payload.is_none() {
                noted.lock().unwrap().push(message.key.unwrap());
            }
            done()
        })
        .await;
    all_done(&project).await;
    host.drain().await;
    assert_eq!(*seen.lock().unwrap(), ["k1"], "the group had it");
    let stands = "select count(*) from {schema}.message_log_1 l join {schema}.compaction_head_1 h on h.message_id = l.id where h.message_key = 'k1' and l.payload is null and h.rank = 9";
    retain(&project).await;
    assert_eq!(project.number(stands).await, 1);
    project.run("update {schema}.log_partition set passed_at = passed_at - interval '119 minutes'").await;
    retain(&project).await;
    assert_eq!(project.number(stands).await, 1);
    assert!(project.produce("orders", &[tombstone(8)]).await[0].superseded, "its rank is remembered");
    project.run("update {schema}.log_partition set passed_at = passed_at - interval '2 minutes'").await;
    retain(&project).await;
    assert_eq!(project.number("select count(*) from {schema}.compaction_head_1 where message_key = 'k1'").await, 0);
    assert!(!project.produce("orders", &[tombstone(0)]).await[0].superseded, "it is a new key");
}

/// C10. Thinning cut at any round, and readers in between: the winners are always the same.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c10_readers_see_the_same_winners_before_during_and_after() {
    let project = old_versions("").await;
    let winners =
        "select md5(string_agg(l.id || encode(l.payload, 'escape'), ',' order by l.id)) from {schema}.message_log_1 l
        join {schema}.compaction_head_1 h on h.message_key = l.message_key and h.message_id = l.id";
    let read = async || -> String {
        sqlx::query_scalar(project.database.schema.sql(winners)).fetch_one(&project.database.pool).await.unwrap()
    };
    let before = read().await;
    let mut rounds = 0;
    loop {
        let mut tx = project.database.pool.begin().await.unwrap();
        let thinned: i64 = sqlx::query_scalar(project.database.schema.sql("select {schema}.thin_log(1, 100)"))
            .fetch_one(&mut *tx)
            .await
            .unwrap();
        if rounds % 3 == 0 {
            tx.rollback().await.unwrap();
        } else {
            tx.commit().await.unwrap();
        }
        assert_eq!(read().await, before, "after round {rounds}");
        rounds += 1;
        if thinned == 0 && rounds % 3 != 1 {
            break;
        }
    }
    assert!(rounds > 30, "{rounds} rounds");
    retain(&project).await; // drops the partitions without versions
    assert_eq!(project.number(ROWS).await, 1000);
}
