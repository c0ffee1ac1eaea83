//! E7: a key is never stuck without an owner. Turns leave none so, which every test of keys checks as it waits; here such
//! rows are planted, and the sweeper finds each, says so, and makes its key run again.

use millstream::{
    engine::{Step, StuckCause},
    handler::Concurrency,
};
use serde_json::Value;
use sqlx::Row;

use crate::support::{
    engine::{Project, done},
    keyed::{all_done, keyed, steps, streams},
};

/// Puts what the log has behind its keys, as if a turn had deferred it, with no lease.
const DEFER_ALL: &str = "
    insert into {schema}.exception (group_id, message_id, state, message_key, concurrency)
    select 1, id, 'deferred', message_key, concurrency from {schema}.message_log_1;
    update {schema}.cursor set claimed = (select max(id) from {schema}.message_log_1)";

async fn deferred(keys: &[(&str, u32)]) -> Project {
    let project = Project::declare(&streams("")).await;
    let of_key = |(key, count): &(&str, u32)| {
        let key = (*key).to_owned();
        (0..*count).map(move |n| keyed(&key, Concurrency::Ordered, &format!("{key}{n}"))).collect::<Vec<_>>()
    };
    project.produce("orders", &keys.iter().flat_map(of_key).collect::<Vec<_>>()).await;
    project.sql(DEFER_ALL).await;
    project
}

/// Goal: what nobody would run is found once, counted, told of, and delivered in order. Method: of six keys one has no
/// lease, two belong to a host that never was (one of them with nothing behind it), and three are as they should be.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn e7_a_key_that_nobody_has_is_found_and_runs_again() {
    let project = deferred(&[("lost", 3), ("gone", 2), ("ready", 1), ("held", 1), ("blocked", 2)]).await;
    project
        .sql(
            "insert into {schema}.host (name, version, expires_at) values ('alive', '', 'infinity');
             insert into {schema}.message_key_lease (group_id, message_key, host_id) values
                (1, 'gone', 4711), (1, 'nothing behind it', 4711), (1, 'held', 1);
             insert into {schema}.message_key_lease (group_id, message_key, blocked_by)
             select 1, 'blocked', min(id) from {schema}.message_log_1 where message_key = 'blocked';
             update {schema}.exception set state = 'waiting', due_at = clock_timestamp()
             where message_id = (select blocked_by from {schema}.message_key_lease where message_key = 'blocked');
             insert into {schema}.message_key_lease (group_id, message_key) values (1, 'ready')",
        )
        .await;
    assert_eq!(project.stuck_keys().await, 3);
    let report = project.maintain(Step::Keys).await;
    let mut stuck: Vec<_> = report.stuck.iter().map(|one| (one.cause, one.keys, one.group.as_str())).collect();
    stuck.sort_by_key(|one| one.1);
    assert_eq!((report.rows, stuck), (3, vec![(StuckCause::NoLease, 1, "email"), (StuckCause::HostGone, 2, "email")]));
    assert_eq!(report.stuck[0].example, "lost");
    assert_eq!(project.stuck_keys().await, 0);
    let again = project.maintain(Step::Keys).await;
    assert_eq!((again.rows, again.stuck.len()), (0, 0));
    // The one that lives only in this table lets its key go, as a host does that has nothing to run.
    project
        .sql("update {schema}.message_key_lease set host_id = null where host_id = 1; delete from {schema}.host")
        .await;
    let (trace, _, handler) = steps(|_, _| done());
    let host = project.host_with(&[("email", handler)]).await;
    all_done(&project).await;
    host.drain().await;
    let ended = trace.ended();
    assert_eq!(ended.len(), 9, "{ended:?}");
    let lost: Vec<_> = ended.iter().filter(|payload| payload.starts_with("lost")).collect();
    assert_eq!(lost, ["lost0", "lost1", "lost2"]);
}

/// A resting key buries what comes behind it; one that was not told to is found, and told.
#[tokio::test]
async fn e7_a_resting_key_that_buries_nobody_is_told_to() {
    let project = Project::declare(&streams("on_dead_letter = \"rest\"")).await;
    project
        .sql(
            "insert into {schema}.exception (group_id, message_id, state, message_key, dead_letter_id) values
                (1, 1, 'deferred', 'forgotten', null), (1, 2, 'deferred', 'told', null), (1, 3, 'deferred', 'redriven', 1);
             insert into {schema}.message_key_lease (group_id, message_key, rests, buries) values
                (1, 'forgotten', true, false), (1, 'told', true, true), (1, 'redriven', true, false)",
        )
        .await;
    assert_eq!(project.stuck_keys().await, 1);
    let report = project.maintain(Step::Keys).await;
    assert_eq!((report.rows, report.stuck[0].example.as_str()), (1, "forgotten"));
    assert_eq!(project.stuck_keys().await, 0);
    assert_eq!(project.maintain(Step::Keys).await.rows, 0);
}

/// More keys than one look takes: all are found, each in its lane.
#[tokio::test]
async fn e7_every_stuck_key_is_found_whatever_their_number() {
    let project = Project::declare(&streams("")).await;
    project
        .sql(
            "insert into {schema}.exception (group_id, message_id, state, message_key, lane)
             select 1, n, 'deferred', 'k' || n / 2, n % 2 from generate_series(2, 2601) as n;
             insert into {schema}.message_key_lease (group_id, message_key, lane) select 1, 'k' || n, 0 from generate_series(1, 1300) as n",
        )
        .await;
    assert_eq!(project.maintain(Step::Keys).await.rows, 1300);
    assert_eq!(project.stuck_keys().await, 0);
    assert_eq!(project.maintain(Step::Keys).await.rows, 0);
}

/// A look costs an index probe or two for each key, not for each message: 30,000 messages of three keys.
#[tokio::test]
async fn e7_a_look_for_stuck_keys_does_not_read_deep_keys() {
    let project = Project::declare(&streams("")).await;
    project
        .sql(
            "insert into {schema}.exception (group_id, message_id, state, message_key)
             select 1, n, 'deferred', 'k' || n % 3 from generate_series(1, 30000) as n;
             insert into {schema}.message_key_lease (group_id, message_key) values (1, 'k0'), (1, 'k2');
             analyze {schema}.exception",
        )
        .await;
    let look = include_str!("../host/src/engine/maintain/unleased_keys.sql");
    let sql = project.database.schema.sql(&format!("explain (analyze, buffers, format json) {look}"));
    let query = sqlx::query(sql).bind(0).bind("").bind(-1_i16).bind(1000_i64);
    let plan: Value = query.fetch_one(&project.database.pool).await.unwrap().get(0);
    let plan = &plan[0]["Plan"];
    let pages = plan["Shared Hit Blocks"].as_i64().unwrap() + plan["Shared Read Blocks"].as_i64().unwrap();
    assert_eq!(plan["Actual Rows"].as_f64(), Some(1.0), "{plan}");
    assert!((3..100).contains(&pages), "it read {pages} pages");
}
