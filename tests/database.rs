//! Connecting and migrating: many starters at once, older and changed programs, missing privileges, locked tables.

use std::time::Duration;

use millstream::database::{
    Connect, Database, Migration, Reaction, Wake, apply, is_ambiguous_commit, listen, reaction,
};
use tokio::{sync::mpsc, task::JoinSet};
use tokio_util::sync::CancellationToken;

use crate::support::{TestDatabase, database, empty_database, wait_for};

const FIRST: Migration = Migration { version: 1, name: "first", sql: "create table {schema}.a (x int);" };
const SECOND: Migration = Migration {
    version: 2,
    name: "second",
    sql: "create function {schema}.f() returns int language sql as $$ select 1 $$;",
};

async fn refused(database: &Database, migrations: &[Migration]) -> String {
    format!("{:#}", apply(database, migrations).await.expect_err("it must be refused"))
}

/// Ten hosts start at once on an empty database: every one comes up, every migration is applied by exactly one.
#[tokio::test]
async fn ten_processes_may_migrate_at_once() {
    let database = empty_database().await;
    let mut hosts = JoinSet::new();
    for _ in 0..10 {
        let host = database.another_host().await;
        hosts.spawn(async move { apply(&host, &[FIRST, SECOND]).await.expect("migrate") });
    }
    let applied: usize = hosts.join_all().await.into_iter().sum();
    assert_eq!(applied, 2);
}

/// Every test starts from the template, so the real migrations have run there.
#[tokio::test]
async fn the_migrations_of_this_program_apply_once() {
    let database = database().await;
    assert_eq!(millstream::database::migrate(&database).await.expect("migrate"), 0);
}

/// An older host must not work on a schema it does not know.
#[tokio::test]
async fn an_older_host_refuses_a_newer_schema() {
    let database = empty_database().await;
    apply(&database, &[FIRST, SECOND]).await.expect("migrate");
    let error = refused(&database, &[FIRST]).await;
    assert!(error.contains("0002_second") && error.contains("upgrade millstream"), "{error}");
}

/// An applied migration that reads differently now means that the tables are not what the program thinks.
#[tokio::test]
async fn a_changed_migration_is_refused() {
    let database = empty_database().await;
    apply(&database, &[FIRST]).await.expect("migrate");
    let error = refused(&database, &[Migration { sql: "select 1;", ..FIRST }]).await;
    assert!(error.contains("0001_first was applied in another form"), "{error}");
}

/// A migration that fails half-way leaves nothing, and says where it stopped.
#[tokio::test]
async fn a_failing_migration_leaves_nothing_and_names_the_line() {
    let database = empty_database().await;
    let broken =
        Migration { sql: "create table {schema}.a (x int);\n\ncreate table {schema}.b (x nonsense);", ..FIRST };
    let error = refused(&database, &[broken]).await;
    assert!(error.contains("0001_first") && error.contains("line 3") && error.contains("nonsense"), "{error}");
    assert_eq!(apply(&database, &[FIRST]).await.expect("nothing was left behind"), 1);
}

/// A table that somebody keeps locked: the migration gives way in between, and names the holder in the end.
#[tokio::test]
async fn a_locked_table_is_waited_for_and_its_holder_named() {
    let database = empty_database().await;
    apply(&database, &[FIRST]).await.expect("migrate");
    let change = Migration { version: 2, name: "change", sql: "alter table {schema}.a add column y int;" };
    let other = database.another_host().await;
    let mut holder = other.pool.begin().await.expect("begin");
    let pid: i32 = sqlx::query_scalar("select pg_backend_pid()").fetch_one(&mut *holder).await.expect("pid");
    sqlx::raw_sql("select * from millstream.a").execute(&mut *holder).await.expect("take a lock");
    let error = refused(&database, &[FIRST, change]).await;
    assert!(error.contains(&format!("locked by process {pid} (millstream")), "{error}");
    holder.rollback().await.expect("roll back");
    assert_eq!(apply(&database, &[FIRST, change]).await.expect("migrate"), 1);
}

async fn limited_role(database: &TestDatabase, name: &str) -> Database {
    let role = format!("drop role if exists {name}; create role {name} login;");
    sqlx::raw_sql(sqlx::AssertSqlSafe(role)).execute(&database.pool).await.expect("create a role");
    let url = database.url().await.replacen("//millstream@", &format!("//{name}@"), 1);
    let connect = Connect::parse(&url).expect("a URL");
    Database::connect(&connect, 2, "millstream").await.expect("connect")
}

/// A role that may not create a schema is told the two statements that mend it, and the first of them does.
#[tokio::test]
async fn a_missing_privilege_is_explained() {
    let database = empty_database().await;
    let limited = limited_role(&database, "newcomer").await;
    let error = refused(&limited, &[FIRST]).await;
    let remedy = r#"create schema "millstream" authorization newcomer"#;
    assert!(error.contains(remedy) && error.contains("grant create on database"), "{error}");
    sqlx::raw_sql(remedy).execute(&database.pool).await.expect("mend it");
    assert_eq!(apply(&limited, &[FIRST]).await.expect("migrate"), 1);
    limited.close().await;
    sqlx::raw_sql("drop owned by newcomer cascade; drop role newcomer")
        .execute(&database.pool)
        .await
        .expect("clean up");
}

/// Names that would be dangerous unquoted are only names; those that Postgres would cut or keep for itself are refused.
#[tokio::test]
async fn any_schema_name_is_quoted_or_refused() {
    let database = empty_database().await;
    let connect = Connect::parse(&database.url().await).expect("a URL");
    for name in ["we\"ird'; drop schema public; --", "Größe", "{stream_id}", "a b.c"] {
        let strange = Database::connect(&connect, 2, name).await.expect("connect");
        assert_eq!(apply(&strange, &[FIRST, SECOND]).await.expect(name), 2);
        strange.close().await;
    }
    for name in [String::new(), "x".repeat(64), "pg_mine".to_owned(), "a$$b".to_owned()] {
        let error = Database::connect(&connect, 2, &name).await.expect_err(&name).to_string();
        assert!(error.contains("schema's name"), "{error}");
    }
}

/// A server that is not there fails within the limit, naming where, who and not the password.
#[tokio::test]
async fn an_unreachable_server_is_named_without_the_password() {
    let connect = Connect::parse("postgres://me:s3cret@127.0.0.1:1/shop").expect("a URL");
    let attempt = tokio::time::timeout(Duration::from_secs(30), Database::connect(&connect, 2, "millstream"));
    let error = format!("{:#}", attempt.await.expect("within the limit").expect_err("nobody listens"));
    assert!(error.contains("127.0.0.1:1 database shop as me") && !error.contains("s3cret"), "{error}");
}

/// A database in another encoding could not hold every text.
#[tokio::test]
async fn another_encoding_is_refused() {
    let database = empty_database().await;
    sqlx::raw_sql("create database latin encoding 'LATIN1' template template0")
        .execute(&database.pool)
        .await
        .expect("create");
    let url = crate::support::cluster().await.url().replacen("/millstream?", "/latin?", 1);
    let error = format!(
        "{:#}",
        Database::connect(&Connect::parse(&url).expect("a URL"), 2, "millstream").await.expect_err("refused")
    );
    assert!(error.contains("LATIN1") && error.contains("encoding 'UTF8'"), "{error}");
    sqlx::raw_sql("drop database latin with (force)").execute(&database.pool).await.expect("drop");
}

/// The errors that a turn meets, made by a real server, and what to do about each.
#[tokio::test]
async fn errors_of_a_real_server_are_sorted_by_what_to_do() {
    let database = empty_database().await;
    let run = async |sql: &'static str| sqlx::raw_sql(sql).execute(&database.pool).await.expect_err(sql);
    sqlx::raw_sql("create table public.t (x int constraint only_once unique); insert into public.t values (1)")
        .execute(&database.pool)
        .await
        .expect("prepare");
    let twice = run("insert into public.t values (1)").await;
    let Reaction::Refused(refusal) = reaction(&twice) else { panic!("a constraint refuses: {twice}") };
    assert_eq!((refusal.sqlstate.as_str(), refusal.constraint.as_deref()), ("23505", Some("only_once")));
    assert!(!is_ambiguous_commit(&twice));
    assert_eq!(reaction(&run("set statement_timeout = 10; select pg_sleep(5)").await), Reaction::Busy);
    assert_eq!(reaction(&run("select * from no_such_table").await), Reaction::Broken);
    let terminated = run("select pg_terminate_backend(pg_backend_pid())").await;
    assert_eq!(reaction(&terminated), Reaction::Busy);
    assert!(is_ambiguous_commit(&terminated), "the reply of a COMMIT would have been lost the same way");
}

/// A lost listener says so (whatever it missed must be looked for), comes back by itself, and stops at once.
#[tokio::test]
async fn a_listener_survives_the_loss_of_its_connection() {
    let database = empty_database().await;
    let (sender, mut heard) = mpsc::unbounded_channel();
    let shutdown = CancellationToken::new();
    let (host, token) = (database.another_host().await, shutdown.clone());
    let listener = tokio::spawn(async move {
        listen(&host, &["hint"], |wake| drop(sender.send(wake)), token).await;
    });
    let hint = Wake::Notified { channel: "hint".to_owned(), payload: "orders".to_owned() };
    for round in ["first connection", "after the loss"] {
        assert_eq!(heard.recv().await, Some(Wake::LookAgain), "{round}");
        notify(&database, &hint, &mut heard).await;
        let terminate = "select pg_terminate_backend(pid) from pg_stat_activity
            where query ilike 'listen%' and datname = current_database() and pid <> pg_backend_pid()";
        assert_eq!(
            sqlx::query(terminate).execute(&database.pool).await.expect("terminate").rows_affected(),
            1,
            "{round}"
        );
        assert_eq!(heard.recv().await, Some(Wake::LookAgain), "{round}: the loss is reported");
    }
    shutdown.cancel();
    tokio::time::timeout(Duration::from_secs(5), listener).await.expect("stops at once").expect("no panic");
}

/// Sends hints until one is heard.
async fn notify(database: &Database, hint: &Wake, heard: &mut mpsc::UnboundedReceiver<Wake>) {
    sqlx::query("select pg_notify('hint', 'orders')").execute(&database.pool).await.expect("notify");
    let mut found = None;
    wait_for("the hint is heard", Duration::from_secs(30), || {
        found = heard.try_recv().ok();
        std::future::ready(found.is_some())
    })
    .await;
    assert_eq!(found.as_ref(), Some(hint));
}

/// Whoever gives up on a `begin`, at whatever moment, leaves no transaction open on a connection of the pool: the next
/// statement there would never commit.
#[tokio::test]
async fn a_begin_that_is_given_up_leaves_no_transaction_open() {
    let database = database().await;
    let host = database.another_host().await.with_own_pool(1);
    for micros in (0..200).map(|turn| turn * 10) {
        let given_up = tokio::time::timeout(Duration::from_micros(micros), host.begin()).await;
        drop(given_up);
    }
    sqlx::query(host.schema.sql("create table {schema}.begun (n integer)"))
        .execute(&host.pool)
        .await
        .expect("create a table");
    let open = "select count(*) from pg_stat_activity where datname = current_database() and state like 'idle in transaction%'";
    wait_for("no transaction is left open", Duration::from_secs(30), async || {
        crate::support::engine::number(&database, open).await == 0
    })
    .await;
    let seen = "select count(*) from pg_tables where tablename = 'begun'";
    assert_eq!(crate::support::engine::number(&database, seen).await, 1, "what ran next has committed");
}
