//! The produce API of SQL: what is refused and how, idempotency keys, transactions, privileges, partitions.

use std::time::Duration;

use millstream::{
    database::{Connect, Database, migrate},
    engine::{self, GroupId},
};
use sqlx::{PgConnection, Row, postgres::PgDatabaseError};

use crate::support::{
    empty_database,
    engine::{Project, number, turn_statement},
};

const LIMIT: Duration = Duration::from_secs(30);

const STREAMS: &str = "[streams.orders]\nmax_payload = \"100B\"\n[streams.receipts]";

/// SQLSTATE, message and hint of a statement that must be refused.
fn refusal(result: Result<impl Sized, sqlx::Error>, sql: &str) -> (String, String, String) {
    let Err(sqlx::Error::Database(error)) = result else { panic!("not refused: {sql}") };
    let error = error.downcast_ref::<PgDatabaseError>();
    (error.code().to_owned(), error.message().to_owned(), error.hint().unwrap_or_default().to_owned())
}

/// L3, L5. Goal: a producer in any language can branch on the SQLSTATE and a person can read what to do.
#[tokio::test]
async fn every_refusal_has_its_sqlstate_and_a_hint_and_stores_nothing() {
    let project = Project::declare(STREAMS).await;
    let batch = |rest: &str| format!("select * from {{schema}}.produce_batch('orders', {rest})");
    let one = |rest: &str| format!("select * from {{schema}}.produce('orders', 'x'{rest})");
    let cases = [
        ("MS001", "select * from {schema}.produce('ordres', 'x')".to_owned()),
        ("MS002", one(", concurrency => 'ordered'")),
        ("MS002", one(", compaction => true")),
        ("MS003", one(", key => ''")),
        ("MS003", one(", key => repeat('k', 1025)")),
        ("MS004", "select * from {schema}.produce('orders', repeat('x', 101))".to_owned()),
        ("MS005", one(", key => 'k', concurrency => 'Ordered'")),
        ("MS005", one(", key => 'k', rank => 1")),
        ("MS006", one(", key => 'k', rank => -1")),
        ("MS002", one(", concurrency => 'exclusive', compaction => true, rank => 1")),
        ("MS005", one(", key => 'k', compaction => false, rank => 1")),
        ("MS005", one(", rank => 1")),
        ("MS009", batch("array['a', 'b']::bytea[], p_keys => array['k']")),
        ("MS009", batch("array['a', 'b']::bytea[], p_headers => '{}'")),
        ("MS009", batch("null")),
        ("MS009", batch("array(select 'x'::bytea from generate_series(1, 50001))")),
        ("MS010", one(", headers => '[1]'")),
        ("MS010", one(r#", headers => '{"n": 1}'"#)),
        (
            "MS010",
            one(
                ", headers => jsonb_build_object('h', (select string_agg(i::text, ',') from generate_series(1, 20000) i))",
            ),
        ),
        ("MS010", one(", routing_key => repeat('r', 1025)")),
        ("MS010", one(", content_type => repeat('c', 256)")),
        ("MS010", one(", idempotency_key => ''")),
        ("MS010", one(", idempotency_key => repeat('i', 1025)")),
    ];
    for (sqlstate, sql) in &cases {
        let result = sqlx::raw_sql(project.database.schema.sql(sql)).execute(&project.database.pool).await;
        let (found, message, hint) = refusal(result, sql);
        assert_eq!(found, *sqlstate, "{sql}: {message}");
        assert!(!hint.is_empty(), "{sql}: {message} has no hint");
    }
    // Of a batch with one bad message nothing is stored, and the message says which it is.
    let sql = batch("array['a', 'b', repeat('c', 101)]::bytea[]");
    let result = sqlx::raw_sql(project.database.schema.sql(&sql)).execute(&project.database.pool).await;
    assert!(refusal(result, &sql).1.contains("message 3"));
    assert_eq!(project.number("select count(*) from {schema}.message_log_1").await, 0);
    // The bounds themselves are allowed.
    project.run("select {schema}.produce('orders', repeat('x', 100), key => repeat('k', 1024), routing_key => repeat('r', 1024), content_type => repeat('c', 255), idempotency_key => repeat('i', 1024))").await;
    assert_eq!(project.number("select count(*) from {schema}.message_log_1").await, 1);
}

/// One produce that answers id and duplicate.
async fn once(connection: &mut PgConnection, project: &Project, arguments: &str) -> (i64, bool) {
    let sql = format!("select id, duplicate from {{schema}}.produce({arguments})");
    let row = sqlx::query(project.database.schema.sql(&sql)).fetch_one(connection).await.expect("produce");
    (row.get(0), row.get(1))
}

/// I1, I2, I3, I4, at both edges of the window, which is moved instead of waited for.
#[tokio::test]
async fn a_repeated_idempotency_key_answers_the_first_id_within_its_window() {
    let project = Project::declare(STREAMS).await;
    let mut connection = project.database.pool.acquire().await.unwrap();
    let connection = &mut *connection;
    let call = "'orders', 'a', key => 'k', idempotency_key => 'once'";
    let (first, duplicate) = once(connection, &project, call).await;
    assert!(!duplicate);
    assert_eq!(once(connection, &project, call).await, (first, true), "I3");
    let (_, duplicate) = once(connection, &project, "'receipts', 'a', key => 'k', idempotency_key => 'once'").await;
    assert!(!duplicate, "I1: the scope is the stream");
    for other in [
        "'orders', 'b', key => 'k'",
        "'orders', 'a', key => 'l'",
        "'orders', 'a'",
        "'orders', null::text, key => 'k'",
        "'orders', 'a', key => 'k', compaction => true, rank => 7",
    ] {
        let sql = format!("select {{schema}}.produce({other}, idempotency_key => 'once')");
        let result = sqlx::raw_sql(project.database.schema.sql(&sql)).execute(&mut *connection).await;
        let (sqlstate, message, hint) = refusal(result, &sql);
        assert!(sqlstate == "MS007" && message.contains("'once'") && !hint.is_empty(), "I4: {message}");
    }
    // I2: just inside the window it is a duplicate, which does not extend the window; just outside it is new.
    let age = |age: &str| {
        format!("update {{schema}}.idempotency_key_1 set created_at = clock_timestamp() - interval '{age}'")
    };
    project.run(&age("23 hours 59 minutes")).await;
    assert_eq!(once(connection, &project, call).await, (first, true), "I2, I10");
    let untouched =
        "select count(*) from {schema}.idempotency_key_1 where created_at < clock_timestamp() - interval '23 hours'";
    assert_eq!(project.number(untouched).await, 1, "a duplicate does not extend the window");
    project.run(&age("24 hours 1 second")).await;
    let (second, duplicate) = once(connection, &project, call).await;
    assert!(!duplicate && second > first, "after the window it is a new message");
    assert_eq!(once(connection, &project, call).await, (second, true));
    // A UUID is the same in either case and equal to itself only.
    let uuid = "'orders', 'u', idempotency_key => '0192F5C0-7C3A-7000-8000-00000000abcd'";
    let (id, _) = once(connection, &project, uuid).await;
    assert_eq!(once(connection, &project, &uuid.to_lowercase()).await, (id, true));
    assert_eq!(
        project
            .number(
                "select count(*) from {schema}.idempotency_key_1 where key = '0192f5c0-7c3a-7000-8000-00000000abcd'"
            )
            .await,
        1
    );
}

/// I6: inside a batch only the duplicates are left out, and they draw no id.
#[tokio::test]
async fn a_batch_stores_what_is_new_and_answers_for_all_in_order() {
    let project = Project::declare(STREAMS).await;
    let sql = "select * from {schema}.produce_batch('orders', array['a', 'b', 'a', 'c', 'd', 'c']::bytea[],
        p_idempotency_keys => array['1', '2', '1', null, '3', null])";
    let read = async || {
        let rows =
            sqlx::query(project.database.schema.sql(sql)).fetch_all(&project.database.pool).await.expect("produce");
        rows.iter().map(|row| (row.get::<i32, _>(0), row.get::<i64, _>(1), row.get::<bool, _>(2))).collect::<Vec<_>>()
    };
    assert_eq!(read().await, [(1, 1, false), (2, 2, false), (3, 1, true), (4, 3, false), (5, 4, false), (6, 5, false)]);
    assert_eq!(read().await, [(1, 1, true), (2, 2, true), (3, 1, true), (4, 6, false), (5, 4, true), (6, 7, false)]);
    // Two of one key that differ are a conflict inside the batch as well, and then nothing is stored.
    let sql =
        "select {schema}.produce_batch('orders', array['x', 'y']::bytea[], p_idempotency_keys => array['9', '9'])";
    let result = sqlx::raw_sql(project.database.schema.sql(sql)).execute(&project.database.pool).await;
    assert_eq!(refusal(result, sql).0, "MS007");
    assert_eq!(project.number("select count(*) from {schema}.message_log_1").await, 7);
}

/// I5, I8: the second waits for the first, and takes its place when that one rolls back.
#[tokio::test]
async fn i5_i8_of_two_concurrent_produces_with_one_key_exactly_one_is_stored() {
    let project = Project::declare(STREAMS).await;
    for (end, expected) in [("commit", true), ("rollback", false)] {
        let call = format!("'orders', 'a', idempotency_key => 'key {end}'");
        let mut first = project.session().await;
        first.run(&format!("begin; select {{schema}}.produce({call})")).await;
        let mut connection = project.database.pool.acquire().await.unwrap();
        let second = once(&mut connection, &project, &call);
        tokio::pin!(second);
        let waits = tokio::time::timeout(Duration::from_millis(200), &mut second).await;
        assert!(waits.is_err(), "it must wait for the first");
        first.run(end).await;
        let (id, duplicate) = tokio::time::timeout(LIMIT, second).await.expect("it goes on");
        assert_eq!(duplicate, expected, "the first did {end}");
        let stored = format!("select count(*) from {{schema}}.message_log_1 where id = {id}");
        assert_eq!(project.number(&stored).await, 1, "the answered id exists");
    }
    assert_eq!(project.number("select count(*) from {schema}.message_log_1").await, 2);
}

/// I6, I8 for batches that are large enough for the short way, in opposite order: the second waits, leaves out what the first
/// has stored, and draws no id for a message that it holds twice.
#[tokio::test]
async fn i6_i8_of_two_large_batches_the_second_stores_what_is_left() {
    let project = Project::declare(STREAMS).await;
    let batch = |from: i32, upto: i32, order: &str| {
        format!(
            "select count(*) filter (where duplicate) from (
                select array_agg(n::text order by n {order}) as keys from generate_series({from}, {upto}) as n) as given,
                {{schema}}.produce_batch('orders', keys::bytea[], p_idempotency_keys => keys)"
        )
    };
    for (base, end, duplicates) in [(0, "commit", 10), (100, "rollback", 0)] {
        let mut first = project.session().await;
        first.run(&format!("begin; {}", batch(base + 1, base + 20, "asc"))).await;
        let sql = batch(base + 11, base + 30, "desc");
        let second = project.number(&sql);
        tokio::pin!(second);
        assert!(tokio::time::timeout(Duration::from_millis(200), &mut second).await.is_err(), "it must wait");
        first.run(end).await;
        let answer = tokio::time::timeout(LIMIT, second).await.expect("it goes on");
        assert_eq!(answer, duplicates, "the first did {end}");
    }
    let remembered =
        "select count(*) from {schema}.idempotency_key_1 k join {schema}.message_log_1 m on m.id = k.message_id
        and k.key = ({schema}.idempotency_uuids(array[convert_from(m.payload, 'UTF8')]))[1]";
    assert_eq!(project.number(remembered).await, 30 + 20, "each with the id of its own message");
    assert_eq!(project.number("select count(*) from {schema}.message_log_1").await, 30 + 20);

    let mut late = project.session().await;
    late.run("begin isolation level repeatable read; select count(*) from {schema}.stream").await;
    let sql = batch(201, 220, "asc");
    project.run(&sql).await;
    assert_eq!(refusal(late.try_run(&sql).await, &sql).0, "40001");
    late.run("rollback").await;

    let drawn = "select last_value from {schema}.message_log_1_id";
    let before = project.number(drawn).await;
    let twice = "select count(*) filter (where duplicate) from {schema}.produce_batch('orders', array_fill('x'::bytea, array[20]),
        p_idempotency_keys => (select array_agg('twice ' || greatest(n, 2)) from generate_series(1, 20) as n))";
    assert_eq!(project.number(twice).await, 1);
    assert_eq!(project.number(drawn).await, before + 19);
}

/// A batch that loses a key to a transaction that was open draws its ids twice: the partitions reach that far, however small.
#[tokio::test]
async fn a_large_batch_that_loses_a_key_stays_within_the_partitions() {
    let project = Project::declare(SMALL).await;
    let mut first = project.session().await;
    first.run("begin; select {schema}.produce('orders', 'x', idempotency_key => '2500')").await;
    let sql = "select count(*) filter (where duplicate) from (
            select array_agg(n::text) as keys from generate_series(1, 5000) as n) as given,
            {schema}.produce_batch('orders', array_fill('x'::bytea, array[5000]), p_idempotency_keys => keys)";
    let second = project.number(sql);
    tokio::pin!(second);
    assert!(tokio::time::timeout(Duration::from_millis(1000), &mut second).await.is_err(), "it must wait");
    first.run("commit").await;
    assert_eq!(tokio::time::timeout(LIMIT, second).await.expect("it goes on"), 1);
    assert_eq!(project.number("select count(*) from {schema}.message_log_1").await, 5000);
}

/// Under REPEATABLE READ a concurrent duplicate cannot be answered: it is an error that says "again".
#[tokio::test]
async fn under_repeatable_read_a_concurrent_duplicate_is_a_serialization_failure() {
    let project = Project::declare(STREAMS).await;
    let mut late = project.session().await;
    late.run("begin isolation level repeatable read; select count(*) from {schema}.stream").await;
    project.run("select {schema}.produce('orders', 'a', idempotency_key => 'k')").await;
    let sql = "select {schema}.produce('orders', 'a', idempotency_key => 'k')";
    assert_eq!(refusal(late.try_run(sql).await, sql).0, "40001");
    late.run("rollback").await;
    late.run(
        "begin isolation level repeatable read; select {schema}.produce('orders', 'b', idempotency_key => 'l'); commit",
    )
    .await;
    assert_eq!(project.number("select count(*) from {schema}.message_log_1").await, 2);
}

#[tokio::test]
async fn everything_that_is_given_is_stored_as_it_is() {
    let project = Project::declare(STREAMS).await;
    project
        .run(
            r#"select {schema}.produce('orders', 'text \x41', key => 'k%_\', routing_key => 'eu.billing', headers => '{"a": "1", "b": ""}',
                content_type => 'text/plain', deliver_after => '2031-01-01T00:00:00Z');
            select {schema}.produce('orders', '{"b": 1, "a": [1]}'::jsonb);
            select {schema}.produce('orders', '\x00ff'::bytea);
            select {schema}.produce('orders', ''::bytea);
            select {schema}.produce('orders', null::bytea);
            select {schema}.produce('orders', '{"a": "é"}')"#,
        )
        .await;
    let checks = [
        r#"id = 1 and payload = convert_to('text \x41', 'UTF8') and message_key = 'k%_\' and routing_key = 'eu.billing'
            and headers = '{"a": "1", "b": ""}' and content_type = 'text/plain' and deliver_after = '2031-01-01T00:00:00Z'
            and concurrency = 'parallel' and compaction_rank is null and lane = 0"#,
        r#"id = 2 and convert_from(payload, 'UTF8')::jsonb = '{"a": [1], "b": 1}' and content_type = 'application/json'"#,
        r"id = 3 and payload = '\x00ff' and message_key is null and headers is null and content_type is null and deliver_after is null",
        "id = 4 and payload = ''",
        "id = 5 and payload is null",
        "id = 6 and payload = convert_to('{\"a\": \"é\"}', 'UTF8') and content_type is null",
    ];
    for check in checks {
        assert_eq!(
            project.number(&format!("select count(*) from {{schema}}.message_log_1 where {check}")).await,
            1,
            "{check}"
        );
    }
}

/// T1, T2, T3: the messages are the transaction's, over several streams, in statement order.
#[tokio::test]
async fn a_rolled_back_produce_leaves_nothing_also_to_a_savepoint() {
    let project = Project::declare(STREAMS).await;
    let mut session = project.session().await;
    let locks = "select count(*) from pg_locks where locktype = 'advisory' and pid = pg_backend_pid()";
    session.run("create temp table business (n integer); begin; insert into business values (1)").await;
    session
        .run("select {schema}.produce('orders', 'a', idempotency_key => 'k'); select {schema}.produce('receipts', 'a')")
        .await;
    assert_eq!(session.number(locks).await, 2, "one lock for each stream");
    session.run("rollback").await;
    assert_eq!(session.number(locks).await, 0);
    let nothing = "select (select count(*) from {schema}.message_log_1) + (select count(*) from {schema}.message_log_2)
        + (select count(*) from {schema}.idempotency_key_1)";
    assert_eq!(session.number(nothing).await, 0);
    session.run("begin; select {schema}.produce('orders', '1'); savepoint s; select {schema}.produce('orders', '2', idempotency_key => 'k')").await;
    session.run("rollback to savepoint s; select {schema}.produce('orders', '3', idempotency_key => 'k'); select {schema}.produce('receipts', '4')").await;
    assert_eq!(project.number(nothing).await, 0, "invisible before the commit");
    session.run("commit").await;
    let order = "select string_agg(convert_from(payload, 'UTF8'), '' order by id) = '13' from {schema}.message_log_1";
    assert_eq!(session.number(&format!("select ({order})::integer::bigint")).await, 1, "T3");
    assert_eq!(session.number(nothing).await, 4);
}

/// A role that was granted one stream can produce to it and do nothing else, whatever the schema offers.
#[tokio::test]
async fn a_role_produces_to_the_stream_it_was_granted_and_nothing_else() {
    let project = Project::declare(STREAMS).await;
    let role = format!(
        "\"Producer of {}\"",
        sqlx::query_scalar::<_, String>("select current_database()").fetch_one(&project.database.pool).await.unwrap()
    );
    let name = role.trim_matches('"');
    project.run(&format!("create role {role}; select {{schema}}.grant_produce('{name}', 'orders')")).await;
    let mut session = project.session().await;
    session.run(&format!("set role {role}")).await;
    session.run("select {schema}.produce('orders', 'x', idempotency_key => 'k'); select {schema}.produce_batch('orders', array['y']::bytea[]); select {schema}.produce('orders', '{}'::jsonb)").await;
    let turn = turn_statement(GroupId(1), "1", 1, 1);
    for sql in [
        &*turn,
        "select {schema}.produce('receipts', 'x')",
        "select count(*) from {schema}.message_log_1",
        "select count(*) from {schema}.stream",
        "select nextval('{schema}.message_log_1_id')",
        "delete from {schema}.idempotency_key_1",
        "select {schema}.extend_log(1, 1000000)",
        "select {schema}.produce_chosen_1(array['x']::bytea[], null, null, null, null, null, array['k'], null, null, null, null, 1000)",
        "select {schema}.take_due_1(1, 1, 1, 1)",
        "select {schema}.key_modes(1, array['k'], null, null, null)",
        "select {schema}.lock_ordered_keys(1, array['k'])",
        "select {schema}.groups_with_work(array[1])",
        "create table {schema}.mine ()",
    ] {
        assert_eq!(refusal(session.try_run(sql).await, sql).0, "42501", "{sql}");
    }
    drop(session);
    assert_eq!(project.number("select count(*) from {schema}.message_log_1").await, 3);
    project.run(&format!("drop owned by {role}; drop role {role}")).await;
}

/// Goal: whoever may create functions in a schema of our search_path, as everybody could in `public` before Postgres 15,
/// cannot have them run with the rights of the host or of a producer.
#[tokio::test]
async fn no_function_of_somebody_else_runs_in_place_of_one_of_postgres() {
    let project = Project::declare("[streams.orders]\n[groups.g]\nstream = \"orders\"\nhandler = \"g.wasm\"").await;
    // Each is a better match than the variadic function of Postgres.
    for arguments in ["text, integer", "text, text", "text, text, text"] {
        let sql = format!(
            "create function public.format({arguments}) returns text language plpgsql as $$ begin raise exception 'taken over'; end $$"
        );
        project.run(&sql).await;
    }
    project
        .run(
            "create function public.joined(text, integer) returns text language plpgsql as $$ begin raise exception 'taken over'; end $$;
             create operator public.|| (leftarg = text, rightarg = integer, function = public.joined)",
        )
        .await;
    let ours = "select count(*) from {schema}.produce('orders', 'x')";
    assert_eq!(project.number(ours).await, 1, "on a connection of the host");
    let mut session = project.session().await;
    session.run("set search_path = public, pg_catalog").await;
    for sql in [
        "select {schema}.produce('orders', 'x'), {schema}.produce('orders', '{}'::jsonb)",
        "select {schema}.produce_batch('orders', array['y']::bytea[])",
        "select {schema}.groups_with_work(array[1])",
        "select {schema}.streams_to_extend(8), {schema}.lagging_groups(), {schema}.old_partitions(1)",
        "select {schema}.half_detached_partitions(), {schema}.detached_partitions(), {schema}.pass_lagging(1)",
    ] {
        session.run(sql).await;
    }
    let path = project.number("select count(*) where current_setting('search_path') = 'pg_catalog'").await;
    assert_eq!(path, 1, "the host's own statements look for functions nowhere else");
}

/// Goal: an array of the caller that does not start at 1 hides no conflict, and with it no message.
#[tokio::test]
async fn a_conflict_is_found_whatever_the_bounds_of_the_arrays() {
    let project = Project::declare(STREAMS).await;
    let mut session = project.session().await;
    let sql = "select {schema}.produce_batch('orders', '{a,b}'::bytea[], p_idempotency_keys => '[3:4]={k,k}')";
    let (sqlstate, message, _) = refusal(session.try_run(sql).await, sql);
    assert_eq!((sqlstate.as_str(), message.as_str()), ("MS007", "idempotency key 'k' was used for another message"));
    assert_eq!(project.number("select count(*) from {schema}.message_log_1").await, 0);
}

/// One call may bring 50,000 messages, also when that is hundreds of partitions of a small stream.
#[tokio::test]
async fn fifty_thousand_messages_in_one_call() {
    let project = Project::declare("[streams.orders]\n[streams.small]\npartition_rows = 1000").await;
    for (id, stream) in [(1, "orders"), (2, "small")] {
        let sql = format!(
            "select count(*) from {{schema}}.produce_batch('{stream}', array(select i::text::bytea from generate_series(1, 50000) i))"
        );
        assert_eq!(project.number(&sql).await, 50_000);
        let in_order = format!(
            "select count(*) from {{schema}}.message_log_{id} where convert_from(payload, 'UTF8')::bigint = id"
        );
        assert_eq!(project.number(&in_order).await, 50_000, "ids are drawn in array order");
    }
    let ahead = "select max(upper_id) - 50000 from {schema}.log_partition where stream_id = 2";
    assert!(project.number(ahead).await > 4 * 1000);
}

const SMALL: &str = "[streams.orders]\npartition_rows = 100";

/// Several producers at once, no host and no maintenance anywhere: they never wait for each other, and never run out.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn producers_extend_the_log_among_themselves() {
    // They reach the point where the log is extended, and not the edge: how fast one of them attaches is the machine's affair.
    let project = Project::declare("[streams.orders]\npartition_rows = 5000").await;
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..8 {
        let mut session = project.session().await;
        tasks.spawn(async move {
            session.run("set lock_timeout = '5s'").await;
            for _ in 0..50 {
                session.run("select {schema}.produce_batch('orders', array(select 'x'::bytea from generate_series(1, 100)))").await;
            }
        });
    }
    while let Some(joined) = tokio::time::timeout(LIMIT, tasks.join_next()).await.expect("nobody waits for ever") {
        joined.expect("no produce fails");
    }
    assert_eq!(project.number("select count(*) from {schema}.message_log_1").await, 40_000);
    let edge = project.number("select max(upper_id) from {schema}.log_partition").await;
    assert!(edge > 45_001, "nobody has extended the log: it ends at {edge}");
}

/// A transaction that extended and stays open delays no other producer; what lies ahead bounds how many messages fit
/// beside it. When it rolls back with everything used up, the next produce extends the log again.
#[tokio::test]
async fn an_open_transaction_that_extended_delays_nobody_and_its_rollback_wedges_nothing() {
    let project = Project::declare(SMALL).await;
    let mut open = project.session().await;
    let partitions = "select count(*) from {schema}.log_partition";
    let first = project.number(partitions).await;
    // Produces until it has extended.
    open.run("begin").await;
    while open.number(partitions).await == first {
        open.run("select {schema}.produce_batch('orders', array(select 'x'::bytea from generate_series(1, 25)))").await;
    }
    let mut other = project.session().await;
    other.run("set lock_timeout = '2s'").await;
    let mut fitted = 0;
    loop {
        match other.try_run("select {schema}.produce('orders', 'y')").await {
            Ok(()) => fitted += 1,
            Err(error) => {
                break assert_eq!(refusal(Err::<(), _>(error), "").0, "23514", "no partition left, and no wait");
            }
        }
    }
    assert!(fitted >= 200, "only {fitted} fitted beside it");
    open.run("rollback").await;
    for _ in 0..30 {
        other.run("select {schema}.produce('orders', 'z')").await;
    }
    assert_eq!(project.number("select count(*) from {schema}.message_log_1").await, fitted + 30);
}

/// A snapshot older than the last extension sees too few partitions; extending must not fail the produce.
#[tokio::test]
async fn under_repeatable_read_a_stale_snapshot_extends_nothing_and_fails_nothing() {
    let project = Project::declare(SMALL).await;
    let mut late = project.session().await;
    late.run("begin isolation level repeatable read; select count(*) from {schema}.log_partition").await;
    project.run("select {schema}.produce_batch('orders', array(select 'x'::bytea from generate_series(1, 600)))").await;
    for _ in 0..5 {
        late.run("select {schema}.produce_batch('orders', array(select 'y'::bytea from generate_series(1, 60)))").await;
    }
    late.run("commit").await;
    assert_eq!(project.number("select count(*) from {schema}.message_log_1").await, 900);
}

/// Any schema name, any search_path of the caller: names that shadow ours change nothing.
#[tokio::test]
async fn another_schema_and_a_hostile_search_path_change_nothing() {
    let empty = empty_database().await;
    let connect = Connect::parse(&empty.url().await).unwrap();
    let database = Database::connect(&connect, 4, r#"We"ird %s-'Ünï; --"#).await.unwrap();
    migrate(&database).await.unwrap();
    let config = millstream::config::parse(STREAMS, std::path::Path::new("streams.toml"), &|_| None).unwrap();
    engine::apply(&database, &config).await.unwrap();
    let mut connection = database.pool.acquire().await.unwrap();
    let hostile = "create schema evil;
        create function evil.clock_timestamp() returns timestamptz language sql as $$ select 'infinity'::timestamptz $$;
        create function evil.octet_length(bytea) returns integer language sql as $$ select 1 / 0 $$;
        create table evil.stream (id integer, name text);
        set search_path = evil, pg_catalog";
    sqlx::raw_sql(hostile).execute(&mut *connection).await.unwrap();
    for sql in [
        "select {schema}.produce('orders', 'x', key => 'k', idempotency_key => 'i')",
        "set search_path = ''",
        "select {schema}.produce('orders', '{}'::jsonb)",
    ] {
        sqlx::raw_sql(database.schema.sql(sql)).execute(&mut *connection).await.expect(sql);
    }
    let stored = "select count(*) from {schema}.message_log_1 where created_at between clock_timestamp() - interval '1 minute' and clock_timestamp()";
    assert_eq!(number(&database, stored).await, 2);
    drop(connection);
    database.close().await;
}
