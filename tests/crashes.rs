//! What stands when Postgres itself dies, or a standby takes its place: the memory of idempotency keys (I7), and transactions
//! over several streams, whole or not at all (T1). Method: a server of the test's own, whose processes are killed.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use millstream::{
    database::Database,
    handler::{Handler, Message},
};

use crate::support::{
    engine::{Host, Session, done, number},
    own_postgres::OwnPostgres,
    wait_for,
};

const LIMIT: Duration = Duration::from_secs(60);

const STREAMS: &str = r#"
    [streams.orders]
    [streams.receipts]
    [groups.email]
    stream = "orders"
    handler = "email.wasm"
    [groups.audit]
    stream = "orders"
    handler = "audit.wasm"
    [groups.books]
    stream = "receipts"
    handler = "books.wasm"
"#;

const GROUPS: [&str; 3] = ["email", "audit", "books"];

/// Id and duplicate of one produce under this idempotency key.
async fn once(database: &Database, key: &str) -> (i64, bool) {
    let sql = "select id, duplicate from {schema}.produce('orders', 'same', idempotency_key => $1)";
    sqlx::query_as(database.schema.sql(sql)).bind(key).fetch_one(&database.pool).await.expect("produce")
}

/// I7. The memory is on disk when the produce has answered: Postgres is killed, started again, and the key is known.
#[tokio::test]
async fn i7_the_memory_survives_a_crash_of_postgres() {
    let (own, database, _) = OwnPostgres::declare(STREAMS).await;
    let (first, _) = once(&database, "k").await;
    let own = own.crash().await;
    let database = own.database().await;
    assert_eq!(once(&database, "k").await, (first, true));
    assert_eq!(number(&database, "select count(*) from {schema}.message_log_1").await, 1);
    database.close().await;
    own.stop().await;
}

/// I7. A standby that has followed up to here and takes over knows the key, the first id and which message it was.
#[tokio::test]
async fn i7_the_memory_survives_a_failover() {
    let (own, database, _) = OwnPostgres::declare(STREAMS).await;
    let standby = own.standby().await;
    let (first, duplicate) = once(&database, "k").await;
    assert!(!duplicate);
    let behind =
        "select count(*) from pg_stat_replication where pg_wal_lsn_diff(pg_current_wal_lsn(), replay_lsn) <= 0";
    wait_for("the standby has it", LIMIT, async || number(&database, behind).await == 1).await;
    own.kill().await;
    let promoted = standby.promote().await;
    assert_eq!(once(&promoted, "k").await, (first, true));
    let other = promoted.schema.sql("select {schema}.produce('orders', 'other', idempotency_key => 'k')");
    let conflict = sqlx::raw_sql(other).execute(&promoted.pool).await.expect_err("it is another message");
    assert_eq!(conflict.as_database_error().unwrap().code().as_deref(), Some("MS007"));
    let (second, duplicate) = once(&promoted, "l").await;
    assert!(second > first && !duplicate, "it goes on");
    assert_eq!(number(&promoted, "select count(*) from {schema}.message_log_1").await, 2);
    promoted.close().await;
}

/// How a transaction ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Commit,
    Rollback,
    /// The client hangs up between its two streams.
    HangsUpBetween,
    /// Postgres dies between its two streams.
    CrashBetween,
    /// One process of Postgres, that of the transaction, is killed before the COMMIT, and takes all others with it.
    KilledBeforeCommit,
    /// Postgres dies the moment it has answered the COMMIT.
    CrashAfterCommit,
}

const ENDS: [End; 6] = [
    End::Commit,
    End::Rollback,
    End::HangsUpBetween,
    End::CrashBetween,
    End::KilledBeforeCommit,
    End::CrashAfterCommit,
];

/// What each group was delivered.
type Seen = Arc<Mutex<Vec<(String, String)>>>;

async fn host(database: Database, config: millstream::config::Host) -> (Host, Seen) {
    let seen = Seen::default();
    let notes = Arc::clone(&seen);
    let note = move |message: Message| {
        let payload = String::from_utf8(message.payload.unwrap()).unwrap();
        notes.lock().unwrap().push((message.group.to_string(), payload));
        done()
    };
    let note: Arc<dyn Handler> = Arc::new(note);
    let handlers = GROUPS.map(|name| (name.to_owned(), Arc::clone(&note))).to_vec();
    (Host::start(database, config, "test".to_owned(), handlers).await, seen)
}

/// How many of the groups were delivered this.
fn groups_with(seen: &Seen, payload: &str) -> usize {
    let seen = seen.lock().unwrap();
    GROUPS.iter().filter(|group| seen.iter().any(|(by, what)| by == *group && what == payload)).count()
}

/// Waits until every group has been delivered `payload`, which is produced here to both streams.
async fn passes(database: &Database, seen: &Seen, payload: &str) {
    for stream in ["orders", "receipts"] {
        let sql = format!("select count(*) from {{schema}}.produce('{stream}', '{payload}')");
        assert_eq!(number(database, &sql).await, 1);
    }
    wait_for(payload, LIMIT, async || groups_with(seen, payload) == GROUPS.len()).await;
}

/// Rows of a transaction in one snapshot: its business, its order, its receipt, its idempotency key.
async fn rows(database: &Database, payload: &str) -> i64 {
    let log = |n| format!("(select count(*) from {{schema}}.message_log_{n} where payload = '{payload}'::bytea)");
    let sql = format!(
        "select (select count(*) from public.business where what = '{payload}') + {} + {} + (select count(*) from
        {{schema}}.idempotency_key_1 where key = ({{schema}}.idempotency_uuids(array['{payload}']))[1])",
        log(1),
        log(2)
    );
    number(database, &sql).await
}

/// T1. One transaction over two streams and a table is there for every group of both at its commit, and none of it before;
/// however else it ends, none of it is ever there. Method: both streams go on past it while it is open.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t1_a_transaction_over_two_streams_is_delivered_whole_at_its_commit_or_not_at_all() {
    let (mut own, mut database, config) = OwnPostgres::declare(STREAMS).await;
    let table = "create table public.business (what text primary key)";
    sqlx::raw_sql(table).execute(&database.pool).await.unwrap();
    let (host, seen) = host(own.database().await, config.host.clone()).await;
    for end in ENDS {
        let payload = format!("{end:?}");
        let mut session = Session::begin(&database).await;
        session.run(&format!("begin; insert into public.business values ('{payload}')")).await;
        let order = "select {schema}.produce('orders', '{payload}', key => 'k', concurrency => 'ordered', idempotency_key => '{payload}')";
        session.run(&order.replace("{payload}", &payload)).await;
        passes(&database, &seen, &format!("{payload}, after its order")).await;
        let is_between = matches!(end, End::HangsUpBetween | End::CrashBetween);
        if !is_between {
            session.run(&format!("select {{schema}}.produce('receipts', '{payload}')")).await;
            passes(&database, &seen, &format!("{payload}, after its receipt")).await;
        }
        assert_eq!(
            (groups_with(&seen, &payload), rows(&database, &payload).await),
            (0, 0),
            "{end:?}: before the commit"
        );
        match end {
            End::Commit | End::CrashAfterCommit => session.run("commit").await,
            End::Rollback => session.run("rollback").await,
            End::HangsUpBetween | End::CrashBetween => {}
            End::KilledBeforeCommit => {
                let pid = session.number("select pg_backend_pid()::bigint").await.try_into().unwrap();
                assert!(own.kill_backend(pid).await && session.try_run("commit").await.is_err());
            }
        }
        if matches!(end, End::CrashBetween | End::CrashAfterCommit) {
            own = own.crash().await;
        }
        drop(session);
        if matches!(end, End::CrashBetween | End::CrashAfterCommit | End::KilledBeforeCommit) {
            database.close().await;
            database = own.database().await;
        }
        if matches!(end, End::Commit | End::CrashAfterCommit) {
            wait_for("every group has it", LIMIT, async || groups_with(&seen, &payload) == GROUPS.len()).await;
            assert_eq!(rows(&database, &payload).await, 4, "{end:?}");
        } else {
            passes(&database, &seen, &format!("{payload}, after its end")).await;
            assert_eq!((groups_with(&seen, &payload), rows(&database, &payload).await), (0, 0), "{end:?}");
        }
    }
    let open = "select (select count(*) from {schema}.claim) + (select count(*) from {schema}.exception)
        + (select count(*) from {schema}.cursor_gap)";
    wait_for("nothing is left over", LIMIT, async || number(&database, open).await == 0).await;
    host.drain().await;
    database.close().await;
    own.stop().await;
}
