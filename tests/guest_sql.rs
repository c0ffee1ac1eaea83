//! SQL of handlers: values, counts, errors, and that it is committed with the acknowledgement or not at all.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use millstream::{
    config::Start,
    engine::{self, GroupHandle, Left, Request, Settled, Settlement, Verdict, Wanted},
    handler::{Concurrency, Finished, Handler, NewMessage, Outcome, SqlError, SqlValue, SqlWants},
};
use serde_json::json;

use crate::support::{
    PATIENCE,
    engine::{Project, numbered},
    guest::{Desk, as_role, project_with_role, text, with_role},
    handlers::{flaky, rounds},
    wait_for,
};

/// Most connections of a test's host for the SQL of handlers; as many as a group has slots.
const CONNECTIONS: usize = 16;

fn int(value: i64) -> SqlValue {
    SqlValue::Int64(value)
}

/// Every kind of value, into a column of its type and out again.
#[tokio::test]
async fn values_come_out_as_they_went_in() {
    let desk = Desk::new().await;
    let all = "create table public.all_kinds (b boolean, i2 smallint, i8 bigint, f double precision, n numeric(20, 4), t text,
        v varchar(9), y bytea, j jsonb, z timestamptz, u uuid, \"we ird\" text, d date)";
    desk.as_role(all).await;
    let delivery = desk.delivery();
    let uuid = "00112233-4455-6677-8899-aabbccddeeff";
    let values = [
        SqlValue::Boolean(true),
        int(-7),
        int(i64::MAX),
        SqlValue::Float64(0.1),
        SqlValue::Numeric("1234567890123456.7890".into()),
        text("it's \\ \"so\"\n$1"),
        text("näh"),
        SqlValue::Bytes(vec![0, 39, 92, 255]),
        SqlValue::Json(r#"{"a": [1, null]}"#.into()),
        SqlValue::Timestamp("2026-01-02T03:04:05.678901+00:00".into()),
        SqlValue::Uuid(uuid.into()),
        SqlValue::Null,
        text("2026-01-02"),
    ];
    let insert = "insert into all_kinds values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13);";
    assert_eq!(delivery.execute(insert, &values).await, Ok(1));
    let rows = delivery.rows("select * from all_kinds -- all", &[]).await.unwrap();
    assert_eq!(rows.columns[..3], ["b", "i2", "i8"]);
    assert_eq!(rows.columns[11], "we ird");
    for (index, (got, sent)) in rows.values[0].iter().zip(&values).enumerate() {
        assert!(got == sent, "column {index}: {got:?}");
    }
    // Names that occur twice, arrays, rows of none, a parameter whose place does not say its type.
    let rows = delivery.rows("select 1 as a, array[1, 2] as a, $1 as p", &[int(5)]).await.unwrap();
    assert_eq!(rows.columns, ["a", "a", "p"]);
    assert_eq!(rows.values[0][..2], [int(1), SqlValue::Json("[1,2]".into())]);
    let built = delivery.rows("select jsonb_build_object('n', $1)", &[int(5)]).await.unwrap();
    assert_eq!(built.values, [[SqlValue::Json(r#"{"n": 5}"#.into())]]);
    let none = delivery.rows("select t from all_kinds where i8 = $1", &[int(0)]).await.unwrap();
    assert_eq!((none.columns.len(), none.values.len()), (1, 0));
    desk.commits(delivery).await;
    assert_eq!(desk.number("select count(*) from public.all_kinds").await, 1);
}

/// Statements with and without rows, counted.
#[tokio::test]
async fn execute_counts_what_a_statement_touched() {
    let desk = Desk::new().await;
    desk.as_role("create table public.t (i integer primary key)").await;
    let delivery = desk.delivery();
    for (statement, count) in [
        ("insert into t select generate_series(1, 5)", 5),
        ("with big as (select 3) update t set i = i + 10 where i > (select * from big);", 2),
        ("insert into t values (1), (7) on conflict do nothing", 1),
        ("update t set i = i where i < 3 returning i", 2),
        ("delete from t where i = 7 -- seven", 1),
        ("delete from t where i = 7", 0),
        ("select i from t", 5),
    ] {
        assert_eq!(delivery.execute(statement, &[]).await, Ok(count), "{statement}");
    }
    let refused = delivery.rows("insert into t values (100)", &[]).await;
    let Err(SqlError::Refused { message, .. }) = refused else { panic!("{refused:?}") };
    assert!(message.contains("run it with `execute`"), "{message}");
    desk.commits(delivery).await;
    assert_eq!(desk.number("select count(*) from public.t").await, 5);
}

/// Issue 4 case 5: the handler catches a unique violation and goes on.
#[tokio::test]
async fn a_caught_violation_then_done_commits_the_rest() {
    let desk = Desk::new().await;
    desk.as_role("create table public.paid (id text constraint paid_once primary key)").await;
    let delivery = desk.delivery();
    let insert = "insert into paid values ($1)";
    assert_eq!(delivery.execute(insert, &[text("a")]).await, Ok(1));
    let twice = delivery.execute(insert, &[text("a")]).await;
    let Err(SqlError::Refused { sqlstate, constraint, .. }) = twice else { panic!("{twice:?}") };
    assert_eq!((&*sqlstate, constraint.as_deref()), ("23505", Some("paid_once")));
    assert_eq!(delivery.execute(insert, &[text("b")]).await, Ok(1));
    desk.commits(delivery).await;
    assert_eq!(desk.number("select count(*) from public.paid").await, 2);
}

/// What a handler has put off to the end fails its delivery, and undoes it.
#[tokio::test]
async fn a_constraint_checked_at_the_end_undoes_the_delivery() {
    let desk = Desk::new().await;
    desk.as_role(
        "create table public.parent (id integer primary key);
        create table public.child (id integer references public.parent deferrable initially deferred)",
    )
    .await;
    let delivery = desk.delivery();
    assert_eq!(delivery.execute("insert into child values (1)", &[]).await, Ok(1));
    let settled = desk.settle(delivery).await;
    assert!(matches!(&settled, Settled::SqlRefused(reason) if reason.contains("foreign key")), "{settled:?}");
    let delivery = desk.delivery();
    assert_eq!(delivery.execute("insert into child values (2)", &[]).await, Ok(1));
    assert_eq!(delivery.execute("insert into parent values (2)", &[]).await, Ok(1));
    desk.commits(delivery).await;
    assert_eq!(desk.number("select sum(id) from public.child").await, 2);
}

#[tokio::test]
async fn an_answer_is_bounded_in_rows_and_bytes() {
    let desk = Desk::new().await;
    let delivery = desk.delivery();
    for statement in ["select generate_series(1, 10001)", "select repeat('x', 5000000)"] {
        let answer = delivery.rows(statement, &[]).await;
        assert!(matches!(&answer, Err(SqlError::Limit(text)) if text.contains("10000 rows and 4 MiB")), "{answer:?}");
    }
    let most = delivery.rows("select generate_series(1, 10000)", &[]).await.unwrap();
    assert_eq!(most.values.len(), 10_000);
}

/// Issue 4 case 4: statements that end at the deadline, and deliveries that are dropped in the middle of one.
#[tokio::test]
async fn a_hundred_deliveries_cut_in_the_middle_do_not_exhaust_the_connections() {
    let desk = Desk::new().await;
    desk.as_role("create table public.t (i integer)").await;
    let mut delivery = desk.delivery();
    delivery.within = Duration::from_millis(250);
    let slow = delivery.rows("select pg_sleep(60)", &[]).await;
    assert_eq!(slow.unwrap_err(), SqlError::Timeout);
    delivery.within = Duration::from_secs(30);
    assert_eq!(delivery.execute("insert into t values (1)", &[]).await, Ok(1), "its transaction goes on");
    assert!(matches!(delivery.session.take(), Left::Open(_)));
    for round in 0..rounds(100, 1_000) {
        let mut delivery = desk.delivery();
        assert_eq!(delivery.execute("insert into t values (2)", &[]).await, Ok(1), "round {round}");
        if round % 2 == 0 {
            delivery.within = Duration::from_millis(200);
            let statement = delivery.rows("select pg_sleep(60)", &[]);
            assert!(tokio::time::timeout(Duration::from_millis(5), statement).await.is_err());
            assert!(matches!(delivery.session.take(), Left::Lost));
        } // else it is dropped while it runs nothing
    }
    let delivery = desk.delivery();
    assert_eq!(delivery.execute("insert into t values (3)", &[]).await, Ok(1));
    desk.commits(delivery).await;
    assert_eq!(desk.number("select sum(i) from public.t").await, 3);
}

/// A function that catches its cancellation ends at no statement_timeout, and never notices that nobody listens any more.
#[tokio::test]
async fn a_statement_that_will_not_be_cancelled_ends_with_its_delivery() {
    let desk = Desk::new().await;
    desk.as_role(
        "create sequence public.cancelled;
        create function public.stubborn() returns integer language plpgsql as $$
        begin
            loop
                begin perform pg_sleep(600); exception when query_canceled then perform nextval('public.cancelled'); end;
            end loop;
        end $$",
    )
    .await;
    let stubborn = "select count(*) from pg_stat_activity where datname = current_database()
        and pid <> pg_backend_pid() and wait_event = 'PgSleep'";
    let mut delivery = desk.delivery();
    delivery.within = Duration::from_millis(150);
    let cut = async {
        let cancelled = "select count(*) from public.cancelled where is_called";
        wait_for("it is cancelled", PATIENCE, async || desk.number(cancelled).await == 1).await;
        wait_for("it goes on", PATIENCE, async || desk.number(stubborn).await == 1).await;
    };
    tokio::select! {
        answer = delivery.rows("select stubborn()", &[]) => panic!("it ends: {answer:?}"),
        () = cut => {}
    }
    assert!(matches!(delivery.session.take(), Left::Lost));
    wait_for("no backend is left of it", PATIENCE, async || desk.number(stubborn).await == 0).await;
    let next = desk.delivery();
    next.rows("select 1", &[]).await.unwrap();
    desk.commits(next).await;
}

/// Two deliveries of one host that ran SQL, left something in the outbox, and are not settled.
async fn under_way(desk: &Desk) -> Vec<(Box<engine::OpenSql>, Settlement)> {
    desk.project.produce("orders", &numbered(2)).await;
    let request =
        Request { lane_max: 64, wanted: Wanted { messages: 2, bytes: 1 << 20, retries: 2 }, ..Request::default() };
    let turn = engine::claim(&desk.project.database, desk.host, &desk.group, &request).await.expect("claim");
    let mut under_way = Vec::new();
    for claimed in &turn.claimed {
        let delivery = desk.delivery();
        assert_eq!(delivery.execute("insert into t values (1)", &[]).await, Ok(1));
        let Left::Open(sql) = delivery.session.take() else { panic!("no transaction is open") };
        let receipt = NewMessage { stream: "receipts".into(), ..crate::support::engine::text("receipt") };
        let once = NewMessage { idempotency_key: Some(format!("once {}", claimed.message.id)), ..receipt.clone() };
        let one = Settlement::plain(claimed.token, claimed.message.id, Verdict::Done);
        under_way.push((sql, Settlement { produced: vec![receipt, once], ..one }));
    }
    assert_eq!(under_way.len(), 2);
    under_way
}

/// What deliveries have left: rows, messages and idempotency keys.
async fn traces(desk: &Desk) -> (i64, i64, i64) {
    let rows = desk.number("select count(*) from public.t").await;
    let receipts = desk.project.number("select count(*) from {schema}.message_log_2").await;
    (rows, receipts, desk.project.number("select count(*) from {schema}.idempotency_key_2").await)
}

/// T7: of a delivery that is no longer ours nothing is written, neither its SQL nor what it produced. Method: while it runs, its
/// host's lease ends, another host takes the message over and does it; and a seek takes it from a host that lives on. One
/// delivery beside it is settled before, so that it would have been.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t7_a_fenced_delivery_leaves_no_trace_of_its_sql_and_outbox() {
    let desk = Desk::new().await;
    desk.project.database.expect_log("stopped while it still held work");
    desk.as_role("create table public.t (i integer)").await;
    let mut deliveries = under_way(&desk).await;
    let (sql, settlement) = deliveries.remove(0);
    let settled = engine::settle_with_sql(desk.host, &desk.group, &settlement, sql).await.unwrap();
    assert!(matches!(settled, Settled::Committed { ref fenced, .. } if fenced.is_empty()), "{settled:?}");
    assert_eq!(traces(&desk).await, (1, 2, 1), "what is ours is written");

    desk.project.run("update {schema}.host set expires_at = clock_timestamp()").await;
    let host = desk.project.host("email", |_| Finished::plain(Outcome::Done)).await;
    wait_for("another host has recovered it, and done it", PATIENCE, async || host.count("email", "done") == 1).await;
    wait_for("nothing is left over", PATIENCE, async || desk.project.left_over().await == 0).await;
    let (sql, settlement) = deliveries.remove(0);
    let settled = engine::settle_with_sql(desk.host, &desk.group, &settlement, sql).await.unwrap();
    assert!(matches!(settled, Settled::LeaseLost), "{settled:?}");
    assert_eq!(traces(&desk).await, (1, 2, 1), "it came too late");
    host.drain().await;

    let desk = Desk { host: engine::register(&desk.project.database, "again", PATIENCE).await.unwrap(), ..desk };
    let mut deliveries = under_way(&desk).await;
    let GroupHandle { id, stream_id, .. } = desk.group;
    engine::seek(&desk.project.database, id, stream_id, "email", &Start::Latest).await.expect("seek");
    let (sql, settlement) = deliveries.remove(0);
    let settled = engine::settle_with_sql(desk.host, &desk.group, &settlement, sql).await.unwrap();
    assert!(matches!(settled, Settled::Committed { ref fenced, .. } if fenced.len() == 1), "{settled:?}");
    assert_eq!(traces(&desk).await, (1, 2, 1), "a seek has taken it away");
}

/// A backend that is terminated takes the transaction with it, and the delivery is not to blame.
#[tokio::test]
async fn a_terminated_backend_is_not_the_handlers_failure() {
    let desk = Desk::new().await;
    let delivery = desk.delivery();
    let rows = delivery.rows("select pg_backend_pid()", &[]).await.unwrap();
    let SqlValue::Int64(pid) = rows.values[0][0] else { panic!("{rows:?}") };
    desk.number(&format!("select pg_terminate_backend({pid})::integer::bigint")).await;
    assert_eq!(delivery.rows("select 1", &[]).await.unwrap_err(), SqlError::Lost);
    assert_eq!(delivery.rows("select 1", &[]).await.unwrap_err(), SqlError::Lost);
    assert!(matches!(delivery.session.take(), Left::Failed));
    assert!(desk.delivery().rows("select 1", &[]).await.is_ok());
}

/// Roles that are missing, or may do more than a handler should, are refused with what to do when they are applied.
#[tokio::test]
async fn roles_that_may_do_too_much_are_refused() {
    let (project, role) = project_with_role("").await;
    let us: String = sqlx::query_scalar("select current_user::text").fetch_one(&project.database.pool).await.unwrap();
    let config = |role: &str| {
        let path = std::path::Path::new("streams.toml");
        millstream::config::parse(&with_role(role, ""), path, &|_| None).unwrap()
    };
    let check = async |role: &str, part: &str| {
        let error = engine::apply(&project.database, &config(role)).await.expect_err(part);
        let error = format!("{error:#}");
        assert!(error.contains(part), "{error}");
    };
    check("nobody_of_this_name", "create role nobody_of_this_name nologin").await;
    check(&us, "is a superuser").await;
    for (grant, revoke, part) in [
        ("alter role {role} createrole", "alter role {role} nocreaterole", "may create roles"),
        ("grant pg_read_all_data to {role}", "revoke pg_read_all_data from {role}", "member of pg_read_all_data"),
        ("grant create on schema {schema} to {role}", "revoke create on schema {schema} from {role}", "own schema"),
        ("grant {us} to {role}", "revoke {us} from {role}", "rights of the host's own user"),
    ] {
        let named = |sql: &str| sql.replace("{role}", &role).replace("{us}", &us);
        project.run(&named(grant)).await;
        check(&role, part).await;
        project.run(&named(revoke)).await;
    }
    engine::apply(&project.database, &config(&role)).await.expect("an ordinary role");
    engine::apply(&project.database, &config(&role)).await.expect("once more");
    let functions = "select count(*) from pg_proc where pronamespace = '{schema}'::regnamespace and proname ~ '^(run_as|guest_sql)_'";
    assert_eq!(project.number(functions).await, 2);
    // A group that runs no SQL any more leaves nothing that the role owns.
    let project: Project = project
        .declare_again(
            "[streams.orders]\n[streams.receipts]\n[groups.email]\nstream = \"orders\"\nhandler = \"e.wasm\"",
        )
        .await;
    assert_eq!(project.number(functions).await, 0);
}

/// Deliveries that are settled in transactions of their own have claims of their own, or each would wait at that row for the
/// commit of another; whether the turn takes its short way, or the long one.
#[tokio::test]
async fn messages_of_a_group_with_sql_have_a_claim_each() {
    let desk = Desk::new().await;
    let keyed = NewMessage { key: Some("k".into()), concurrency: Some(Concurrency::Ordered), ..NewMessage::default() };
    let mut claims = 0;
    for (messages, has_gap) in [(numbered(5), false), (vec![keyed; 4], false), (numbered(3), true)] {
        if has_gap {
            desk.project.run("select nextval('{schema_text}.message_log_1_id')").await; // as a rollback leaves it
        }
        desk.project.produce("orders", &messages).await;
        let wanted = Wanted { messages: 10, bytes: 1 << 20, retries: 0 };
        let mut found = Vec::new();
        let began = Instant::now();
        while found.len() < messages.len() {
            let request = Request { lane_max: 64, wanted, ..Request::default() };
            let turn = engine::claim(&desk.project.database, desk.host, &desk.group, &request).await.expect("claim");
            found.extend(turn.claimed);
            assert!(began.elapsed() < PATIENCE, "they are not claimed");
        }
        claims += messages.len() as i64;
        let apart = "select count(*) from {schema}.claim where upper(pending) - lower(pending) = 1";
        assert_eq!(desk.project.number(apart).await, claims);
        let tokens: std::collections::HashSet<_> = found.iter().map(|claimed| claimed.token.claim).collect();
        assert_eq!(tokens.len(), messages.len());
        let pending = "select count(*) from {schema}.claim where id = any ($1) and pending @> $2::bigint";
        for claimed in &found {
            let sql = desk.project.database.schema.sql(pending);
            let query = sqlx::query_scalar::<_, i64>(sql).bind(vec![claimed.token.claim.0]).bind(claimed.message.id);
            assert_eq!(query.fetch_one(&desk.project.database.pool).await.unwrap(), 1, "each under its own");
        }
    }
}

/// Waiting for a connection is bounded by the delivery, and not the handler's failure.
#[tokio::test]
async fn a_full_pool_is_a_wait() {
    let desk = Desk::new().await;
    let mut open = Vec::new();
    for _ in 0..16 {
        let delivery = desk.delivery();
        assert!(delivery.rows("select 1", &[]).await.is_ok());
        open.push(delivery);
    }
    let mut late = desk.delivery();
    late.within = Duration::from_millis(50);
    assert_eq!(late.rows("select 1", &[]).await.unwrap_err(), SqlError::Timeout);
    assert!(matches!(late.session.take(), Left::Failed));
    let waiting = desk.delivery();
    let began = Instant::now();
    let (answer, ()) = tokio::join!(waiting.rows("select 1", &[]), async {
        tokio::time::sleep(Duration::from_millis(20)).await;
        open.pop();
    });
    assert!(answer.is_ok() && began.elapsed() >= Duration::from_millis(20));
    assert_eq!(waiting.refused(SqlWants::Rows, "select 1 / 0").await, "22012");
}

/// Issue 4 case 4, through the sandbox: handlers that open SQL and then spin or sleep are cut at their deadline and rolled
/// back, and the connections are there for the next.
#[tokio::test]
async fn handlers_cut_after_they_opened_sql_leave_nothing_and_no_connection_is_lost() {
    let (project, role) = project_with_role("timeout = \"400ms\"").await;
    as_role(&project, &role, "create table public.t (i integer)").await;
    let handler: Arc<dyn Handler> = Arc::new(flaky(|_| {}).await);
    let cut = |how: &str| {
        let command = r#"{"do": "sql", "sql": "insert into t values (1)", "then": "HOW", "ms": 60000, "times": 1}"#;
        crate::support::engine::text(&command.replace("HOW", how))
    };
    let messages: Vec<_> = (0..rounds(100, 1_000)).map(|n| cut(if n % 2 == 0 { "spin" } else { "sleep" })).collect();
    project.produce("orders", &messages).await;
    let host = project.host_with(&[("email", handler)]).await;
    let all = messages.len() as u64;
    wait_for("each was cut once, then done", PATIENCE, async || host.count("email", "done") == all).await;
    let failures = host.counters.snapshot()["groups"]["email"]["failures"].clone();
    assert_eq!(failures, json!({"timeout": all}), "each was cut at its deadline, and nothing else went wrong");
    assert_eq!((host.count("email", "delivered"), host.count("email", "again")), (2 * all, all));
    assert_eq!(project.number("select count(*) from public.t").await, 0, "all of it was rolled back");
    // The pool has lost none: as many as it may open are in a transaction at a time, waiting for what we hold.
    let mut gate = project.session().await;
    gate.run("begin; lock table public.t").await;
    let fine = crate::support::engine::text(r#"{"do": "sql", "sql": "insert into t values (2)", "count": 3}"#);
    project.produce("orders", &vec![fine; CONNECTIONS]).await;
    let waiting =
        "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'";
    let connections = i64::try_from(CONNECTIONS).unwrap();
    wait_for("all connections wait", PATIENCE, async || project.number(waiting).await == connections).await;
    gate.run("commit").await;
    let inserted = "select count(*) from public.t";
    wait_for("they go on", PATIENCE, async || project.number(inserted).await == 3 * connections).await;
    wait_for("nothing is left over", PATIENCE, async || project.left_over().await == 0).await;
    assert_eq!(project.number(inserted).await, 3 * connections, "each once");
    let open = "select count(*) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()
        and state like 'idle in transaction%'";
    wait_for("no transaction is open", PATIENCE, async || project.number(open).await == 0).await;
    host.drain().await;
}
