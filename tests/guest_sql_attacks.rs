//! SQL of handlers cannot leave its role: whoever owns the role, and whatever the role owns, nothing of it ever runs with
//! the rights of the host's user. Refusals are Postgres's own.
//!
//! The tests' host connects as a superuser, so whatever got out could do everything.

use millstream::{
    engine::Settled,
    handler::{SqlError, SqlValue, SqlWants},
};

use crate::support::guest::Desk;

/// Issue 4 case 5: each is refused, and the transaction goes on.
#[tokio::test]
async fn what_leaves_the_role_is_refused_by_postgres() {
    let desk = Desk::new().await;
    desk.as_role(
        "create function public.commits() returns integer language plpgsql as $$ begin commit; return 1; end $$;
        create procedure public.commits_too(inout a integer) language plpgsql as $$ begin commit; end $$;
        create function public.calls() returns integer language plpgsql as $$
        declare v integer := 1; begin call public.commits_too(v); return 1; end $$;
        create function public.sets() returns integer language plpgsql as $$ begin set role none; return 1; end $$;
        create function public.sets_session() returns integer language plpgsql as $$ begin set session authorization default; return 1; end $$",
    )
    .await;
    let delivery = desk.delivery();
    let schema = desk.project.database.schema.quoted().to_owned();
    let (syntax, denied, ended) = ("42601", "42501", "2D000");
    for (statement, sqlstates) in [
        // No SELECT, INSERT, UPDATE, DELETE, MERGE or VALUES.
        ("set role none", &[syntax][..]),
        ("reset role", &[syntax]),
        ("set session authorization default", &[syntax]),
        ("commit", &[syntax]),
        ("rollback", &[syntax]),
        ("savepoint mine", &[syntax]),
        ("rollback to savepoint millstream", &[syntax]),
        ("release savepoint millstream", &[syntax]),
        ("copy (select 1) to program 'true'", &[syntax]),
        ("copy public.ran from program 'echo x'", &[syntax]),
        ("do $$ begin commit; end $$", &[syntax]),
        ("call public.commits_too(1)", &[syntax]),
        ("listen millstream", &[syntax]),
        ("create table public.x (i integer)", &[syntax]),
        ("lock table public.ran", &[syntax]),
        ("prepare x as select 1", &[syntax]),
        ("execute millstream_1", &[syntax]),
        ("explain analyze select 1", &[syntax]),
        // Several.
        ("select 1; select 2", &[syntax]),
        ("select 1; commit", &[syntax]),
        ("select 1); commit; --", &[syntax]),
        // What is one statement, and would change the role or the transaction.
        ("select set_config('role', 'none', false)", &[denied]),
        ("select set_config('role', 'none', true)", &[denied]),
        ("select set_config('session_authorization', 'default', false)", &[denied]),
        ("select set_config('session_replication_role', 'replica', false)", &[denied]),
        ("select public.sets()", &[denied]),
        ("select public.sets_session()", &[denied]),
        ("select public.commits()", &[ended]),
        ("select public.calls()", &[ended]),
        // What the role may not.
        ("select pg_read_file('/etc/passwd')", &[denied]),
        ("select pg_ls_dir('.')", &[denied]),
        ("select lo_import('/etc/passwd')", &[denied]),
        ("select * from pg_authid", &[denied]),
        ("select * from {schema}.message_log_1", &[denied]),
        ("select * from {schema}.host", &[denied]),
        ("update {schema}.dead_letter set error = 'x'", &[denied]),
        ("delete from {schema}.claim", &[denied]),
        ("select {schema}.produce('orders', 'x')", &[denied]),
        ("select {schema}.forget_sql_roles()", &[denied]),
        (
            "select pg_terminate_backend(pid) from pg_stat_activity where usename <> current_user and pid <> pg_backend_pid()",
            &[denied],
        ),
    ] {
        let statement = statement.replace("{schema}", &schema);
        for wants in [SqlWants::Rows, SqlWants::Count] {
            let sqlstate = delivery.refused(wants, &statement).await;
            assert!(sqlstates.contains(&&*sqlstate), "{statement}: {sqlstate}");
        }
    }
    let rows = delivery.rows("select current_user::text, spy('mine')", &[]).await.unwrap();
    assert_eq!(rows.values[0][0], SqlValue::Text(desk.role.clone()));
    desk.commits(delivery).await;
    desk.only_the_role_ran().await;
}

/// What Postgres runs at COMMIT it runs as the session's user. Triggers that put off each other without end, a cursor that is
/// read at COMMIT, and the same with temporary tables.
#[tokio::test]
async fn nothing_is_left_to_run_at_commit() {
    let desk = Desk::new().await;
    desk.project.run(&format!("grant temporary on database {} to {}", database_name(&desk).await, desk.role)).await;
    desk.as_role(
        "create table public.a (i integer); create table public.b (i integer);
        create function public.next() returns trigger language plpgsql as $$
        begin
            set constraints all deferred;
            begin perform public.spy('trigger'); exception when read_only_sql_transaction then null; end;
            begin insert into public.b values (new.i); exception when read_only_sql_transaction then null; end;
            return null;
        end $$;
        create constraint trigger t after insert on public.a deferrable initially deferred for each row execute function public.next();
        create constraint trigger t after insert on public.b deferrable initially deferred for each row execute function public.next();
        create function public.holds() returns integer language plpgsql as $$
        begin execute 'declare held cursor with hold for select public.spy(''held'')'; return 1; end $$;
        create function public.temporary() returns integer language plpgsql as $$
        begin
            create temporary table tt (i integer);
            create function pg_temp.again() returns trigger language plpgsql as $f$
            begin
                set constraints all deferred;
                begin perform public.spy('temporary'); exception when read_only_sql_transaction then null; end;
                insert into tt values (1);
                return null;
            end $f$;
            create constraint trigger t after insert on tt deferrable initially deferred for each row execute function pg_temp.again();
            insert into tt values (1);
            return 1;
        end $$",
    )
    .await;
    let delivery = desk.delivery();
    assert_eq!(delivery.execute("insert into a values (1)", &[]).await, Ok(1));
    desk.commits(delivery).await;
    let delivery = desk.delivery();
    delivery.rows("select holds(), spy('before')", &[]).await.unwrap();
    desk.commits(delivery).await;
    let delivery = desk.delivery();
    delivery.rows("select temporary()", &[]).await.unwrap();
    let settled = desk.settle(delivery).await;
    assert!(matches!(&settled, Settled::SqlRefused(reason) if reason.contains("pending trigger")), "{settled:?}");
    desk.only_the_role_ran().await;
}

/// Code that runs while a statement is only parsed, and code that waits in the session for our own statements: types and
/// operators before those of Postgres, and statements under the names of ours.
#[tokio::test]
async fn nothing_waits_in_the_session_for_our_own_statements() {
    let desk = Desk::new().await;
    desk.project.run(&format!("grant temporary on database {} to {}", database_name(&desk).await, desk.role)).await;
    // Better matches for what our statements use, and what is left to run under the names that statements get.
    desk.as_role(
        "create domain public.spied as integer check (public.spy('domain') = 1);
        create function public.equal(a bigint, b integer) returns boolean language sql as 'select public.spy(''operator'') = 1';
        create operator public.= (leftarg = bigint, rightarg = integer, function = public.equal);
        create function public.current_setting(a text) returns text language sql as 'select public.spy(''function'')::text';
        create function public.clock_timestamp() returns timestamptz language sql as 'select now() from public.spy(''clock'')';
        create function public.unnest(a bigint[]) returns setof bigint language sql as 'select public.spy(''unnest'')::bigint';
        create function public.plants() returns integer language plpgsql as $$
        begin
            perform set_config('search_path', 'pg_temp, public, pg_catalog', false);
            perform set_config('synchronous_commit', 'off', false);
            perform set_config('statement_timeout', '1', false);
            perform set_config('plan_cache_mode', 'force_generic_plan', false);
            perform pg_advisory_lock(17);
            create temporary table host (id bigint, expires_at timestamptz);
            create domain pg_temp.text as pg_catalog.text check (public.spy('type') = 1);
            create domain pg_temp.bigint as pg_catalog.int8 check (public.spy('type') = 1);
            deallocate all;
            for n in 0..40 loop
                begin
                    execute format('prepare sqlx_s_%s as select public.spy(''planted'')', n);
                exception when others then null;
                end;
            end loop;
            perform set_config('transaction_read_only', 'on', false);
            return 1;
        end $$",
    )
    .await;
    let delivery = desk.delivery();
    delivery.rows("select '{1}'::public.spied[], spy('mine')", &[]).await.unwrap();
    // With parameters it is read a second time, and twice more at its counting.
    assert_eq!(
        delivery.execute("insert into ran values ('{1}'::public.spied[]::text, $1)", &[SqlValue::Null]).await,
        Ok(1)
    );
    delivery.execute("update ran set who = current_user where who = '{1}'", &[]).await.unwrap();
    let rows = delivery.rows("select pg_backend_pid()", &[]).await.unwrap();
    let pid = rows.values[0][0].clone();
    delivery.rows("select plants()", &[]).await.unwrap();
    // Statements of its own may now fail, for its own names stand in their way; ours do not.
    let after = delivery.execute("insert into public.ran values (current_user, 'after')", &[]).await;
    assert!(matches!(after, Ok(1) | Err(SqlError::Refused { .. })), "{after:?}");
    desk.commits(delivery).await;
    desk.only_the_role_ran().await;
    // The same connection, as if it were new.
    let count = "select count(*) from pg_locks where locktype = 'advisory' and objid = 17";
    crate::support::wait_for("the connection is clean", crate::support::PATIENCE, async || {
        desk.number(count).await == 0
    })
    .await;
    let look = "select pg_backend_pid(), pg_catalog.current_setting('synchronous_commit'), pg_catalog.current_setting('plan_cache_mode'),
        (select count(*) from pg_prepared_statements where statement like '%spy(''planted'')')";
    let began = std::time::Instant::now();
    let (delivery, left) = loop {
        let delivery = desk.delivery();
        let left = delivery.rows(look, &[]).await.unwrap();
        if left.values[0][0] == pid {
            break (delivery, left);
        }
        assert!(began.elapsed() < crate::support::PATIENCE, "the connection never comes back");
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    };
    let auto = SqlValue::Text("auto".into());
    let on = SqlValue::Text("on".into());
    assert!(
        left.values[0][1] == on && left.values[0][2] == auto && left.values[0][3] == SqlValue::Int64(0),
        "{left:?}"
    );
    desk.commits(delivery).await;
    desk.only_the_role_ran().await;
}

/// The role owns its function. It cannot replace it; whatever else it makes of it, it gains nothing.
#[tokio::test]
async fn altering_its_own_function_gains_a_role_nothing() {
    let desk = Desk::new().await;
    let schema = desk.project.database.schema.quoted().to_owned();
    let find = "select p.oid::regprocedure::text from pg_proc p where proname like 'run\\_as\\_%'";
    let function: String = sqlx::query_scalar(find).fetch_one(&desk.project.database.pool).await.unwrap();
    desk.project.run(&format!("grant usage on schema {schema} to {}", desk.role)).await;
    desk.as_role(
        "create function public.differs(a name, b name) returns boolean language sql as 'select public.spy(''operator'') = 0';
        create operator public.<> (leftarg = name, rightarg = name, function = public.differs)",
    )
    .await;
    let mut session = desk.project.session().await;
    session.run(&format!("set role {}", desk.role)).await;
    let body = format!("create or replace function {function} returns setof text language sql as 'select 1::text'");
    assert!(session.try_run(&body).await.is_err(), "the role replaced its function");
    let leave = "select set_config('role', 'none', false), spy('left')";
    for (change, back) in [
        ("security invoker", "security definer"),
        ("set role = none", "reset role"),
        ("set search_path = public, pg_catalog", "reset search_path"),
        ("immutable", "volatile"),
    ] {
        session.run(&format!("alter function {function} {change}")).await;
        let delivery = desk.delivery();
        assert_refused_or_role(&desk, &delivery, leave).await;
        session.run(&format!("alter function {function} {back}")).await;
    }
    let as_itself = format!("alter function {function} security invoker set role = {}", desk.role);
    session.run(&as_itself).await;
    for path in ["reset search_path", "set search_path = public, pg_catalog"] {
        session.run(&format!("alter function {function} {path}")).await;
        let delivery = desk.delivery();
        assert_refused_or_role(&desk, &delivery, leave).await;
        assert_refused_or_role(&desk, &delivery, "select spy('as itself')").await;
    }
    // Applying mends it.
    let config = millstream::config::parse(
        &crate::support::guest::with_role(&desk.role, ""),
        std::path::Path::new("streams.toml"),
        &|_| None,
    );
    millstream::engine::apply(&desk.project.database, &config.unwrap()).await.unwrap();
    let delivery = desk.delivery();
    delivery.rows("select spy('mended')", &[]).await.unwrap();
    desk.commits(delivery).await;
    desk.only_the_role_ran().await;
}

/// Either nothing ran, or it ran as the role.
async fn assert_refused_or_role(desk: &Desk, delivery: &crate::support::guest::Delivery, statement: &str) {
    if let Ok(rows) = delivery.rows(statement, &[]).await {
        let who = delivery.rows("select who from public.ran where who <> current_user", &[]).await.unwrap();
        assert!(who.values.is_empty(), "{rows:?} as somebody else than {}", desk.role);
    }
}

async fn database_name(desk: &Desk) -> String {
    sqlx::query_scalar("select current_database()::text").fetch_one(&desk.project.database.pool).await.unwrap()
}
