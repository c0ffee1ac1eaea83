//! E6: what a turn reads does not grow with the depth of a key, nor with what others of the group hold, nor with what is
//! dead and cannot be vacuumed. Counted by Postgres itself, in turns enough that every plan is the one that stays.

use millstream::{engine, handler::Concurrency};

use serde_json::Value;

use crate::support::{
    engine::{Project, Session, turn_statement},
    keyed::{LIMIT, keyed, streams},
};

/// What the turn before left to settle.
const MINE: &str = "create temp table mine on commit drop as select
    array(select id from {schema}.claim) as claims,
    array(select claim_id from {schema}.exception where state = 'running') as ran_claims,
    array(select message_id from {schema}.exception where state = 'running') as ran";

/// A turn as a host makes it that has the key `hot` with nothing left to run: it takes what is deferred, and reads on.
fn turn(host: &str) -> String {
    format!(
        "select count(*) from mine, {{schema}}.claim_1(1, {host}, 0, claims, '{{}}', '{{}}', ran_claims, ran, true, array['hot'],
         array[0::smallint], '{{}}', '{{}}', 50, 200, 1048576, 10, null, false, null, null, null, null)"
    )
}

/// Declares the stream, and has its hot key leased to a host.
async fn declare() -> (Project, String) {
    let project = Project::declare(&streams("")).await;
    let host = engine::register(&project.database, "test", LIMIT).await.unwrap().to_string();
    project
        .run(&format!(
            "insert into {{schema}}.message_key_lease (group_id, message_key, host_id) values (1, 'hot', {host})"
        ))
        .await;
    (project, host)
}

/// Puts so many messages behind the hot key, and as many other keys that are blocked, and that rest.
async fn deepen(project: &Project, depth: u32) {
    project
        .run(&format!(
            "insert into {{schema}}.exception (group_id, message_id, state, message_key, concurrency)
             select 1, 1000000 + n, 'deferred', 'hot', 'ordered' from generate_series(1, {depth}) n;
             insert into {{schema}}.message_key_lease (group_id, message_key, blocked_by)
             select 1, 'blocked' || n, n from generate_series(1, {depth}) n;
             insert into {{schema}}.message_key_lease (group_id, message_key, rests)
             select 1, 'resting' || n, true from generate_series(1, {depth}) n"
        ))
        .await;
}

/// The most rows that a turn fetches, in so many turns of one session with 200 new messages each. It scans no table.
async fn fetched(project: &Project, session: &mut Session, host: &str, turns: usize) -> i64 {
    let counts = "select relname, coalesce(seq_tup_read, 0) as scanned, coalesce(idx_tup_fetch, 0) as fetched
        from pg_stat_xact_user_tables where relname in ('exception', 'message_key_lease', 'claim', 'dead_letter')";
    let mut most = 0;
    for round in 0..turns {
        let mut batch: Vec<_> = (0..150).map(|_| keyed("hot", Concurrency::Ordered, "x")).collect();
        batch.extend((0..50).map(|n| keyed(&format!("k{n}"), Concurrency::Exclusive, "x")));
        project.produce("orders", &batch).await;
        session.run(&format!("begin; {MINE}; create temp table before on commit drop as {counts}")).await;
        session.number(&turn(host)).await;
        let grown = |column: &str| {
            format!(
                "select coalesce(sum(a.{column} - coalesce(b.{column}, 0)), 0)::bigint from ({counts}) a left join before b using (relname)"
            )
        };
        assert_eq!(session.number(&grown("scanned")).await, 0, "round {round}: tables are not scanned");
        most = most.max(session.number(&grown("fetched")).await);
        session.run("commit").await;
    }
    most
}

#[tokio::test]
async fn e6_a_turn_reads_as_much_of_a_deep_key_as_of_a_flat_one() {
    let (project, host) = declare().await;
    let flat = fetched(&project, &mut project.session().await, &host, 8).await;
    deepen(&project, 20_000).await;
    let deep = fetched(&project, &mut project.session().await, &host, 8).await;
    assert!(deep <= 2 * flat + 500, "a turn fetches {flat} rows beside a flat key and {deep} beside a deep one");
}

/// The tables are empty whenever nothing waits, and a plan stays until somebody analyses them again.
#[tokio::test]
async fn e6_plans_made_while_nothing_waited_read_no_more_of_a_deep_key() {
    let (project, host) = declare().await;
    project.run("alter table {schema}.exception set (autovacuum_enabled = off)").await;
    project.run("alter table {schema}.message_key_lease set (autovacuum_enabled = off)").await;
    project.run("vacuum analyze {schema}.exception, {schema}.message_key_lease").await;
    let mut session = project.session().await;
    let flat = fetched(&project, &mut session, &host, 8).await;
    deepen(&project, 20_000).await;
    let deep = fetched(&project, &mut session, &host, 4).await;
    assert!(deep <= 2 * flat + 500, "a turn fetches {flat} rows beside a flat key and {deep} beside a deep one");
}

/// A host has hundreds of keys with nothing left to run, and almost all that waits in the group is behind another key, as
/// the planner knows: a walk through the group in the order of its messages looks as cheap as a look-up then, and finds
/// nothing for any of these keys before its end.
#[tokio::test]
async fn e6_idle_keys_cost_no_more_beside_a_deep_one() {
    idle_beside_deep(true).await;
}

/// The same for a planner that has last looked when one message was deferred.
#[tokio::test]
async fn e6_idle_keys_cost_no_more_beside_a_key_that_was_flat() {
    idle_beside_deep(false).await;
}

/// `knows`: the tables are analysed when the key is deep already, else while one message is behind it.
async fn idle_beside_deep(knows: bool) {
    const KEYS: i64 = 500;
    let (project, host) = declare().await;
    if !knows {
        project.run("alter table {schema}.exception set (autovacuum_enabled = off)").await;
        deepen(&project, 1).await;
        project.run("analyze {schema}.exception; delete from {schema}.exception; delete from {schema}.message_key_lease where message_key <> 'hot'").await;
    }
    deepen(&project, 20_000).await;
    let analyse = if knows { "{schema}.exception, {schema}.message_key_lease" } else { "{schema}.message_key_lease" };
    project.run(&format!("analyze {analyse}")).await;
    project
        .run(&format!(
            "insert into {{schema}}.message_key_lease (group_id, message_key, host_id)
             select 1, 'idle' || n, {host} from generate_series(1, {KEYS}) n"
        ))
        .await;
    let fresh: Vec<_> = (1..=KEYS).map(|n| keyed(&format!("idle{n}"), Concurrency::Ordered, "x")).collect();
    let idle = format!("(select array_agg('idle' || n) from generate_series(1, {KEYS}) n)");
    let lanes = format!("array_fill(0::smallint, array[{KEYS}])");
    let fetched =
        "select (coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0))::bigint from pg_stat_xact_user_tables
        where relname = 'exception'";
    // With and without anything new for them: taken, and let go.
    for count in [0, KEYS] {
        project.produce("orders", &fresh[..usize::try_from(count).unwrap()]).await;
        let mut session = project.session().await;
        let turn = format!(
            "select count(*) filter (where source = 1) from {{schema}}.claim_1(1, {host}, 0, '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', true,
                {idle}, {lanes}, '{{}}', '{{}}', 50, {}, 1048576, 10, null, false, null, null, null, null)",
            2 * KEYS
        );
        session.run("begin").await;
        let before = session.number(fetched).await;
        assert_eq!(session.number(&turn).await, count);
        let fetched = session.number(fetched).await - before;
        session.run("rollback").await;
        assert!(fetched <= 2 * KEYS, "{fetched} rows of exception for {KEYS} idle keys, {count} with a message");
    }
}

/// A transaction that stays open for an hour keeps the rows of an hour's turns: a turn does not walk through them.
#[tokio::test]
async fn e6_a_turn_settles_as_cheaply_under_an_old_snapshot() {
    let project = Project::declare(&streams("")).await;
    let host = engine::register(&project.database, "test", LIMIT).await.unwrap().to_string();
    let mut old = project.session().await;
    old.run("begin; create temp table mine ()").await; // it has an id: nothing that dies from now on can be vacuumed
    let mut session = project.session().await;
    let mut settled = async || {
        project.produce("orders", &vec![keyed("k", Concurrency::Parallel, "x"); 5]).await;
        let blocks = "select sum(pg_stat_get_xact_blocks_fetched(oid))::bigint from (
            select '{schema_text}.claim'::regclass union all
            select indexrelid from pg_index where indrelid = '{schema_text}.claim'::regclass) as r (oid)";
        session.run(&format!("begin; {MINE}")).await;
        let before = session.number(blocks).await;
        session.number(&turn(&host)).await;
        let read = session.number(blocks).await - before;
        session.run("commit").await;
        read
    };
    for _ in 0..8 {
        settled().await;
    }
    let fresh = settled().await;
    project
        .run(&format!(
            "insert into {{schema}}.claim (id, group_id, host_id, pending) select -n, 1, {host}, '{{}}' from generate_series(1, 20000) n;
             delete from {{schema}}.claim where id < 0"
        ))
        .await;
    let aged = settled().await;
    assert!(aged <= fresh + 20, "a turn reads {fresh} blocks of `claim`, and {aged} with 20,000 dead claims in it");
    old.run("commit").await;
}

/// A ready key is asked for few of its messages when there are many keys: a turn looks at some times what it takes.
#[tokio::test]
async fn e6_a_turn_of_many_deep_keys_reads_some_times_what_it_takes() {
    let (project, host) = declare().await;
    project
        .run(&format!(
            "insert into {{schema}}.message_key_lease (group_id, message_key, host_id) select 1, 'k' || n, {host} from generate_series(1, 200) n;
             insert into {{schema}}.exception (group_id, message_id, state, message_key, concurrency)
             select 1, n, 'deferred', 'k' || n % 200 + 1, 'ordered' from generate_series(1, 40000) n"
        ))
        .await;
    let keys = "array(select 'k' || n from generate_series(1, 200) n), array_fill(0::smallint, array[200])";
    let turn = format!(
        "select count(*) from {{schema}}.claim_1(1, {host}, 0, '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', true, {keys}, '{{}}', '{{}}',
         256, 500, 1048576, 0, null, false, null, null, null, null)"
    );
    let fetched = "select coalesce(idx_tup_fetch, 0)::bigint from pg_stat_xact_user_tables where relname = 'exception'";
    let mut session = project.session().await;
    session.run("begin").await;
    let before = session.number(fetched).await;
    session.number(&turn).await;
    let read = session.number(fetched).await - before;
    assert!((500..8_000).contains(&read), "it reads {read} rows for 500 messages");
}

/// Bytes of WAL that a statement writes at least, of five times: a page that is first changed after a checkpoint is written
/// whole.
async fn wal_bytes(project: &Project, statement: &str) -> i64 {
    let mut least = i64::MAX;
    for _ in 0..5 {
        let sql = project.database.schema.sql(&format!("explain (analyze, wal, format json) {statement}"));
        let plan: Value = sqlx::query_scalar(sql).fetch_one(&project.database.pool).await.expect("explain");
        least = least.min(plan[0]["Plan"]["WAL Bytes"].as_i64().expect("a number"));
    }
    least
}

/// Messages without a key pay nothing for keys: a produce writes what a bare INSERT into the log does, a turn less than 20 bytes
/// a message, and no row of a key is there.
#[tokio::test]
async fn an_unkeyed_message_writes_no_more_for_the_keys_that_others_have() {
    let project = Project::declare(&streams("")).await;
    let host = engine::register(&project.database, "test", LIMIT).await.unwrap().to_string();
    let group = project.group("email").await.id;
    let payload = "convert_to(repeat('x', 1000), 'UTF8')";
    let bare = format!(
        "insert into {{schema}}.message_log_1 (id, payload)
         select nextval('{{schema_text}}.message_log_1_id'), {payload} from generate_series(1, 250)"
    );
    let produce = format!("select * from {{schema}}.produce_batch('orders', array_fill({payload}, array[250]))");
    let (bare, produced) = (wal_bytes(&project, &bare).await, wal_bytes(&project, &produce).await);
    let turn = wal_bytes(&project, &turn_statement(group, &host, 250, 10)).await;
    println!("WAL bytes of 250 messages: bare {bare}, produced {produced}, claimed {turn}");
    assert!(bare >= 250 * 1000 && produced <= bare + bare / 50, "bare {bare}, produced {produced}");
    assert!((1..250 * 20).contains(&turn), "a turn wrote {turn}");
    assert_eq!(project.number("select count(*) from {schema}.claim").await, 5, "each turn took something");
    let keys =
        "select (select count(*) from {schema}.message_key_lease) + (select count(*) from {schema}.compaction_head_1)
        + (select count(*) from {schema}.exception)";
    assert_eq!(project.number(keys).await, 0);
}
