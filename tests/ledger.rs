//! Exactly-once effects of handlers (T5, T7): the `ledger` example moves units between accounts while its hosts are killed and
//! frozen, their connections are terminated, processes of Postgres are killed, and replies to COMMITs are lost. Every
//! balance is what the events say, every transfer has one event, and each account's come in the order it was asked to pay.

use std::time::{Duration, Instant};

use millstream::database::Database;
use rustix::process::Signal;

use crate::support::{
    PATIENCE, Program,
    handlers::rounds,
    hosts::{SHORT_LEASE, held_by, number, settled, stats, up},
    own_postgres::OwnPostgres,
    proxy::{Fate, Proxy},
    wait_for,
};

const UNITS: i64 = 1_000_000;

const ACCOUNTS: i64 = 100;

fn streams_toml() -> String {
    format!(
        r#"
[host]
listen = "127.0.0.1:0"
{SHORT_LEASE}
[streams.orders]
[streams.transfers]
[groups.ledger]
stream = "orders"
handler = "ledger.wasm"
timeout = "3s"
retry = {{ max_attempts = 1000, base = "10ms", max = "100ms" }}
allow = {{ sql = {{ role = "ledger" }}, produce = ["transfers"] }}
"#
    )
}

/// Accounts `a-0` and so on, which share the units.
async fn open_accounts(database: &Database) {
    let schema =
        include_str!("../examples/ledger/accounts.sql").replace("create table account", "create table public.account");
    let schema = schema.replace("on account to", "on public.account to");
    sqlx::raw_sql(sqlx::AssertSqlSafe(schema)).execute(&database.pool).await.expect("make the accounts");
    let sql = "insert into public.account select 'a-' || n, $1 / $2 from generate_series(0, $2 - 1) as n";
    sqlx::query(sql).bind(UNITS).bind(ACCOUNTS).execute(&database.pool).await.expect("open the accounts");
}

/// Ordered transfers, each from another account to another.
async fn ask_for(database: &Database, transfers: i64) {
    let sql =
        "select count(p.id) from generate_series(1, $1) as n, lateral {schema}.produce('orders', jsonb_build_object(
            'id', n::text, 'from', 'a-' || n % $2, 'to', 'a-' || (n * 7 + 3) % $2, 'units', 1 + n * 37 % 5000),
        key => 'a-' || n % $2, concurrency => 'ordered') as p";
    let sql = sqlx::query_scalar::<_, i64>(database.schema.sql(sql)).bind(transfers).bind(ACCOUNTS);
    assert_eq!(sql.fetch_one(&database.pool).await.expect("produce"), transfers);
}

/// Processes of Postgres in the middle of what hosts have them do: those that settle and claim, those of handlers first.
async fn victims(database: &Database, most: i32) -> Result<Vec<i32>, sqlx::Error> {
    let sql = "select pid from pg_stat_activity
        where datname = current_database() and pid <> pg_backend_pid()
            and query !~ 'pg_stat_activity'
            and query ~ 'savepoint millstream|guest_sql_|^commit$|discard all|claim_1|settle'
        order by query !~ 'savepoint millstream|guest_sql_', random() limit $1";
    sqlx::query_scalar(sql).bind(most).fetch_all(&database.pool).await
}

/// Ends connections of hosts, and answers how many.
async fn terminate_some(database: &Database) -> i64 {
    let Ok(victims) = victims(database, 2).await else { return 0 };
    let sql = "select count(*) filter (where pg_terminate_backend(pid)) from unnest($1) as pid";
    sqlx::query_scalar(sql).bind(victims).fetch_one(&database.pool).await.unwrap_or(0)
}

/// Kills a process of Postgres that works for a host. All connections end with it, so there is a new pool.
async fn kill_one(own: &OwnPostgres, database: Database) -> Database {
    wait_for("a process is killed in the middle of its work", PATIENCE, async || {
        match victims(&database, 1).await.unwrap_or_default().first() {
            Some(pid) => own.kill_backend(*pid).await,
            None => false,
        }
    })
    .await;
    database.close().await;
    own.database().await
}

/// Freezes a host at a moment when it holds messages.
async fn freeze(host: &Program, database: &Database) {
    wait_for("it is frozen while it holds messages", PATIENCE, async || {
        host.signal(Signal::STOP);
        tokio::time::sleep(Duration::from_millis(50)).await; // what it has sent already is done by then
        let holds = !held_by(database, host).await.is_empty();
        if !holds {
            host.signal(Signal::CONT);
        }
        holds
    })
    .await;
}

/// Of so many COMMITs one is done and its reply lost, one is hung up on, and one never arrives.
const COMMITS: usize = 30;

fn fate(commit: usize) -> Fate {
    match commit % COMMITS {
        7 => Fate::ReplyLost,
        17 => Fate::HungUp,
        27 => Fate::RequestLost,
        _ => Fate::Answered,
    }
}

/// A host behind the proxy, ready to work. What is lost while it starts, it would say and end.
async fn host(proxy: &Proxy) -> Program {
    let mut program = Program::with_examples(&streams_toml());
    proxy.cease();
    up(&mut program, proxy.url()).await;
    proxy.begin();
    program
}

const EVENTS: &str = "(select id, convert_from(payload, 'UTF8')::jsonb as event from {schema}.message_log_2) as events";

/// How many transfers have an event.
async fn told(database: &Database) -> i64 {
    number(database, &format!("select count(*) from {EVENTS}")).await
}

#[tokio::test]
async fn t5_t7_every_transfer_counts_once_under_killed_hosts_and_lost_connections_and_replies() {
    let transfers = rounds(320, 20_000);
    let (own, mut database, _) = OwnPostgres::declare("[streams.orders]\n[streams.transfers]").await;
    let proxy = Proxy::of_commits(&own.url(), fate);
    open_accounts(&database).await;
    let mut hosts = vec![host(&proxy).await, host(&proxy).await];
    ask_for(&database, transfers).await;
    let (mut frozen, mut terminated) = (None, 0);
    for quarter in 1..=3 {
        database = kill_one(&own, database).await;
        let began = Instant::now();
        while told(&database).await < transfers * quarter / 4 {
            terminated += terminate_some(&database).await;
            tokio::time::sleep(Duration::from_millis(100)).await; // else nothing gets done at all
            assert!(began.elapsed() < PATIENCE * rounds(1, 20), "a quarter takes too long");
        }
        let mut lost = hosts.remove(0);
        if quarter == 2 {
            freeze(&lost, &database).await;
            frozen = Some(lost);
        } else {
            lost.signal(Signal::KILL);
            lost.ended(PATIENCE).await;
        }
        hosts.push(host(&proxy).await);
    }
    wait_for("all is done", PATIENCE * rounds(1, 20), async || told(&database).await >= transfers).await;
    proxy.cease();
    println!("{} replies lost, {terminated} connections terminated", proxy.lost());
    assert!(proxy.lost() >= 10 && terminated >= 10, "{} replies lost, {terminated} terminated", proxy.lost());
    // What the frozen host still holds comes too late.
    let frozen: Program = frozen.expect("one was frozen");
    frozen.signal(Signal::CONT);
    let is_back = async || stats(&database, &frozen).await["leases_lost"].as_i64().is_some_and(|lost| lost > 0);
    wait_for("it is back", PATIENCE, is_back).await;
    hosts.push(frozen);
    settled(&database).await;
    let distinct = format!("select count(distinct event->>'transfer') from {EVENTS}");
    assert_eq!(
        (told(&database).await, number(&database, &distinct).await),
        (transfers, transfers),
        "one event a transfer"
    );
    assert_eq!(number(&database, "select sum(balance)::bigint from public.account").await, UNITS);
    // Each balance is what the events say.
    let moved = |side: &str| {
        format!(
            "select event->>'{side}' as id, sum((event->>'units')::bigint) as units from {EVENTS} where event->>'state' = 'moved' group by 1"
        )
    };
    let wrong = format!(
        "select count(*) from public.account a left join ({}) as o using (id) left join ({}) as i using (id)
        where a.balance <> {UNITS} / {ACCOUNTS} - coalesce(o.units, 0) + coalesce(i.units, 0)",
        moved("from"),
        moved("to")
    );
    assert_eq!(number(&database, &wrong).await, 0, "accounts differ from their events");
    let overtaken = format!(
        "select count(*) from (select (event->>'transfer')::bigint as transfer, lag((event->>'transfer')::bigint)
            over (partition by event->>'from' order by id) as before from {EVENTS}) as one where transfer < before"
    );
    assert_eq!(number(&database, &overtaken).await, 0, "an account paid in another order than it was asked to");
    let moves = format!("select count(*) from {EVENTS} where event->>'state' = 'moved'");
    assert!(number(&database, &moves).await > transfers / 2);
    assert_eq!(number(&database, "select count(*) from {schema}.dead_letter").await, 0);
    for mut host in hosts {
        host.signal(Signal::TERM);
        assert!(host.ended(PATIENCE).await.success(), "{}", host.stderr());
    }
    drop(proxy);
    database.close().await;
    own.stop().await;
}
