//! Retention of compacted streams: a key's newest version stays whatever its age, tombstones go after their time, and no
//! group misses a winner. Each invariant of the semantics by its name.

use std::sync::{Arc, Mutex};

use millstream::{
    config::Start,
    engine::{self, Step, Wanted, maintain},
    handler::{Concurrency, Message, NewMessage},
};

use crate::support::{
    engine::{Project, done, request, text},
    keyed::{LIMIT, all_done, steps, version},
    wait_for,
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
    while project.maintain(Step::Versions).await.rows > 0 {} // a run of it ends after a while, done or not
    project.maintain(Step::Retention).await;
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
    let pinned = project.maintain(Step::Retention).await.pinned;
    assert_eq!((pinned["orders"].partitions, &*pinned["orders"].group), (3, "email"), "all but those it has passed");
    retain(&project).await;
    assert_eq!(project.number("select count(*) from {schema}.message_log_1 where id > 2000").await, 2500);
    assert_eq!(project.number("select count(*) from {schema}.message_log_1 where id <= 2000").await, 0);
    has_passed(&project, "email").await;
    retain(&project).await;
    assert!(project.maintain(Step::Retention).await.pinned.is_empty());
    // A group that is sent back to what has been thinned holds up nothing.
    project.run("update {schema}.cursor set claimed = 0").await;
    assert!(project.maintain(Step::Retention).await.pinned.is_empty());
}

/// C7, C8. A tombstone stays, with its rank, for tombstone_retention after every group had it; then both go.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c7_a_tombstone_stays_for_its_time() {
    let project = old_versions(GROUP).await;
    project.produce("orders", &[tombstone("k1", 9)]).await;
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
    // Rolled back: the version that lost would keep the tombstone.
    let mut session = project.session().await;
    session.run("begin").await;
    let lost = "select superseded::integer::bigint from {schema}.produce('orders', null::bytea, key => 'k1', compaction => true, rank => 8)";
    assert_eq!(session.number(lost).await, 1, "its rank is remembered");
    session.run("rollback").await;
    project.run("update {schema}.log_partition set passed_at = passed_at - interval '2 minutes'").await;
    retain(&project).await;
    assert_eq!(project.number("select count(*) from {schema}.compaction_head_1 where message_key = 'k1'").await, 0);
    assert!(!project.produce("orders", &[tombstone("k1", 0)]).await[0].superseded, "it is a new key");
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

fn tombstone(key: &str, rank: i64) -> NewMessage {
    NewMessage { payload: None, rank: Some(rank), ..version(key, Concurrency::Parallel, "") }
}

/// The group of the test has claimed and done all there is.
async fn has_passed(project: &Project, group: &str) {
    let passed = "update {schema}.cursor set claimed = (select last_value from {schema}.message_log_1_id)
        where group_id = (select id from {schema}.consumer_group where name = 'GROUP')";
    project.run(&passed.replace("GROUP", group)).await;
}

/// Longer than `tombstone_retention` after every group had what is in the partitions so far.
async fn after_tombstone_retention(project: &Project) {
    retain(project).await; // notes since when they are passed
    project.run("update {schema}.log_partition set passed_at = passed_at - interval '121 minutes'").await;
}

const VERSIONS_OF: &str = "select count(*) from {schema}.message_log_1 where message_key = 'KEY'";

/// C4. Goal: thinning changes no position and no order of what survives, and every old position, of which most are gone, is
/// one to begin at: what comes first is the next survivor. Method: a group is sent to positions before and after thinning,
/// and what it is handed is compared with the winners as they were.
#[tokio::test]
async fn c4_any_old_position_leads_to_the_next_survivor() {
    let project = old_versions(GROUP).await;
    // Winners of all three rounds: k1 to k99 stay with their first version, k100 to k199 with their second.
    project
        .run(
            "update {schema}.compaction_head_1 h set message_id = l.id
             from {schema}.message_log_1 l, substr(l.message_key, 2) as n (number)
             where l.message_key = h.message_key and l.id between 1 and 2500
                and (n.number::integer between 1 and 99 and l.id <= 1000 or n.number::integer between 100 and 199 and l.id > 1500)",
        )
        .await;
    has_passed(&project, "email").await;
    let survivors: Vec<(i64, Vec<u8>)> = sqlx::query_as(project.database.schema.sql(
        "select l.id, l.payload from {schema}.message_log_1 l join {schema}.compaction_head_1 h on h.message_id = l.id
         where l.compaction_rank is not null order by l.id",
    ))
    .fetch_all(&project.database.pool)
    .await
    .unwrap();
    assert_eq!((survivors.len(), survivors[0].0), (1000, 2));
    let host = engine::register(&project.database, "test", LIMIT).await.unwrap();
    let plain = project.number("select count(*) from {schema}.message_log_1 where message_key is null").await;
    let behind = "select count(*) from {schema}.message_log_1, {schema}.cursor where id > claimed";
    for is_thinned in [false, true] {
        if is_thinned {
            has_passed(&project, "email").await;
            retain(&project).await;
            assert_eq!(
                project.number(ROWS).await,
                1000,
                "{plain} keyless messages and the versions that lost are gone"
            );
        }
        // Of survivors, between them, and at the ends of partitions.
        for point in [1, 2, 3, 100, 101, 1000, 1001, 1700, 1701, 3001, 3201, 4000] {
            let group = project.group("email").await;
            let to = Start::Id(point);
            engine::seek(&project.database, group.id, group.stream_id, "email", &to).await.unwrap();
            let group = project.group("email").await;
            let (mut came, mut finished) = (Vec::new(), Vec::new());
            loop {
                let wanted = Wanted { messages: 1000, bytes: 1 << 20, retries: 0 };
                let turn = engine::claim(&project.database, host, &group, &request(&finished, wanted)).await.unwrap();
                finished = turn.claimed.iter().map(|one| one.token.claim).collect();
                finished.dedup();
                came.extend(turn.claimed.into_iter().map(|one| one.message));
                if finished.is_empty() && project.number(behind).await == 0 {
                    break;
                }
            }
            came.retain(|message| message.key.is_some()); // the keyless ones are gone later
            let came: Vec<_> = came.into_iter().map(|message| (message.id, message.payload.unwrap())).collect();
            let wanted: Vec<_> = survivors.iter().filter(|(id, _)| *id >= point).cloned().collect();
            assert_eq!(came, wanted, "from {point}, thinned: {is_thinned}");
        }
    }
}

/// C7. A tombstone waits for the slowest of those that had the value, however long that takes, and for one that is sent
/// back; only then its time begins.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c7_a_tombstone_waits_for_the_slowest_group() {
    let audit = GROUP.replace("email", "audit");
    let project = old_versions(&format!("{GROUP}{audit}")).await;
    has_passed(&project, "email").await;
    has_passed(&project, "audit").await; // both had the value
    project.produce("orders", &[tombstone("k1", 9)]).await;
    age(&project).await;
    has_passed(&project, "email").await;
    let stands =
        "select count(*) from {schema}.message_log_1 l join {schema}.compaction_head_1 h on h.message_id = l.id
        where l.message_key = 'k1' and l.payload is null";
    for _ in 0..2 {
        after_tombstone_retention(&project).await;
        retain(&project).await;
        assert_eq!(project.number(stands).await, 1, "the slow group has not had it");
    }
    project.produce("orders", &[text("what brings the group past the partition")]).await;
    let seen = Arc::new(Mutex::new(Vec::new()));
    let noted = Arc::clone(&seen);
    let host = project
        .host("audit", move |message: Message| {
            if message.payload.is_none() {
                noted.lock().unwrap().push(message.key.unwrap());
            }
            done()
        })
        .await;
    all_of(&project, "audit").await;
    host.drain().await;
    assert_eq!(*seen.lock().unwrap(), ["k1"], "the slow group had it");
    retain(&project).await;
    assert_eq!(project.number(stands).await, 1, "its time begins now");
    after_tombstone_retention(&project).await;
    retain(&project).await;
    assert_eq!(project.number(stands).await, 0);
}

/// Nothing is left to claim or to end for one group.
async fn all_of(project: &Project, group: &str) {
    let left = "select (select count(*) from {schema}.message_log_1 l where l.id > c.claimed)
            + (select count(*) from {schema}.claim where group_id = g.id) + (select count(*) from {schema}.exception where group_id = g.id)
        from {schema}.consumer_group g join {schema}.cursor c on c.group_id = g.id where g.name = 'GROUP'";
    let left = left.replace("GROUP", group);
    wait_for("the group is done", LIMIT, async || project.number(&left).await == 0).await;
}

/// C2, C8. A version that lost to a tombstone has lost for ever, also when the tombstone's time is over before its own: the
/// rank is remembered as long as a version that it beat is there.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c8_a_version_that_lost_to_a_tombstone_never_comes() {
    let project = old_versions(GROUP).await;
    project.produce("orders", &[tombstone("k1", 9), tombstone("k2", 9)]).await;
    age(&project).await;
    let late = NewMessage { rank: Some(8), ..version("k1", Concurrency::Parallel, "late") };
    assert!(project.produce("orders", &[late]).await[0].superseded);
    has_passed(&project, "email").await;
    after_tombstone_retention(&project).await;
    retain(&project).await;
    let heads = "select count(*) from {schema}.compaction_head_1 where message_key in ('k1', 'k2')";
    assert_eq!(project.number(heads).await, 1, "that of k2 is forgotten");
    let late_group = GROUP.replace("email", "late");
    let project = project.declare_again(&format!("{STREAM}{GROUP}{late_group}")).await;
    let (trace, _, handler) = steps(|_, _| done());
    let host = project.host_with(&[("late", handler)]).await;
    all_of(&project, "late").await;
    host.drain().await;
    let ended = trace.ended();
    assert_eq!((ended.len(), ended.contains(&"late".to_owned())), (999, false), "998 keys, and the tombstone of k1");
    // Once the late version has gone as well, nothing is left of the key.
    age(&project).await;
    for group in ["email", "late"] {
        has_passed(&project, group).await;
    }
    after_tombstone_retention(&project).await;
    retain(&project).await;
    retain(&project).await;
    assert_eq!(project.number(&VERSIONS_OF.replace("KEY", "k1")).await, 0);
    assert_eq!(project.number(heads).await, 0);
}

/// C11, C12. Of keys whose winner is lost, by a hand at the tables or a disk, thinning removes no version and says how many
/// there are; all other keys are thinned; the next version of such a key sets it right.
#[tokio::test]
async fn c11_versions_without_a_winner_stay_and_are_told_of() {
    let project = old_versions("").await;
    project
        .run(
            "delete from {schema}.compaction_head_1 where message_key = 'k1';
             update {schema}.compaction_head_1 set message_id = 1000000 where message_key = 'k2';
             delete from {schema}.message_log_1 l using {schema}.compaction_head_1 h
             where h.message_key = 'k3' and l.id = h.message_id",
        )
        .await;
    for _ in 0..2 {
        let report = maintain(&project.database, Step::Versions).await.unwrap();
        let told: Vec<_> = report.errors.iter().map(|error| format!("{error:#}")).collect();
        assert!(told.len() == 1 && told[0].contains("8 versions are kept whose winner"), "{told:?}");
    }
    for (key, versions) in [("k1", 3), ("k2", 3), ("k3", 2), ("k4", 1)] {
        assert_eq!(project.number(&VERSIONS_OF.replace("KEY", key)).await, versions, "{key}");
    }
    let others = "select count(*) from {schema}.message_log_1 where message_key not in ('k1', 'k2', 'k3')";
    assert_eq!(project.number(others).await, 997, "all other keys are thinned");
    let next = |key: &str| NewMessage { rank: Some(1), ..version(key, Concurrency::Parallel, "next") };
    project.produce("orders", &[next("k1"), next("k2"), next("k3")]).await;
    retain(&project).await;
    let damaged = "select count(*) from {schema}.message_log_1 where message_key in ('k1', 'k2', 'k3')";
    assert_eq!(project.number(damaged).await, 3);
}

/// C12. A producer that keeps a key's transaction open, and a row that somebody has locked, hold up just these: every other
/// key is thinned, and tombstones go, without an error and without waiting.
#[tokio::test]
async fn c12_a_key_that_is_held_stops_the_thinning_of_no_other() {
    let project = old_versions(GROUP).await;
    project.produce("orders", &[tombstone("k1", 9), tombstone("k2", 9)]).await;
    age(&project).await;
    has_passed(&project, "email").await;
    let mut producer = project.session().await;
    producer.run("begin; select {schema}.produce('orders', 'x', key => 'k1', compaction => true, rank => 10)").await;
    let mut hand = project.session().await;
    hand.run("begin; select from {schema}.message_log_1 where id = 6 for update").await; // the first version of k5
    project.maintain(Step::Versions).await;
    project
        .run("update {schema}.log_partition set thinned_at = null, passed_at = passed_at - interval '121 minutes'")
        .await;
    project.maintain(Step::Versions).await;
    let heads = "select count(*) from {schema}.compaction_head_1 where message_key = 'KEY'";
    for (key, versions, head) in [("k1", 1, 1), ("k2", 0, 0), ("k5", 2, 1), ("k6", 1, 1)] {
        assert_eq!(project.number(&VERSIONS_OF.replace("KEY", key)).await, versions, "versions of {key}");
        assert_eq!(project.number(&heads.replace("KEY", key)).await, head, "heads of {key}");
    }
    let versions = "select count(*) from {schema}.message_log_1 where compaction_rank is not null";
    assert_eq!(project.number(versions).await, 1 + 2 + 997);
    producer.run("rollback").await;
    hand.run("rollback").await;
    project.run("update {schema}.log_partition set thinned_at = null").await;
    project.maintain(Step::Versions).await;
    assert_eq!(project.number(versions).await, 998);
}
