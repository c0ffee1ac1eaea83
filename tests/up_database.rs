//! A host of the real program and a database that goes away under it. Method: messages that sleep and report, as in
//! `up_hosts`; the database is restarted, or all its connections are cut, while they run.

use std::{
    collections::HashSet,
    time::{Duration, Instant},
};

use millstream::database::{
    Database,
    embedded::{Options, Server},
};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;

use crate::support::{
    PATIENCE, Program, database,
    handlers::rounds,
    hosts::{SHORT_LEASE, all_reported, assert_tells_no_secret, number, playground, reports, stats, tell, up},
    is_alive, scratch_folder, wait_for,
};

/// No attempt is counted for what the database did.
const WORKER: &str = "retry = { max_attempts = 3, base = \"10ms\" }";

async fn stop(mut program: Program) {
    program.signal(Signal::TERM);
    assert!(program.ended(PATIENCE).await.success(), "{}", program.stderr());
    assert_tells_no_secret(&program);
}

async fn assert_once(database: &Database, count: usize) {
    let reports = all_reported(database, count).await;
    let distinct: HashSet<i64> = reports.iter().map(|(id, _)| *id).collect();
    assert_eq!((reports.len(), distinct.len()), (count, count), "every effect exactly once");
    assert_eq!(number(database, "select count(*) from {schema}.dead_letter").await, 0);
}

/// How long a host that nothing disturbs takes for so many messages that come all at once.
async fn time_of(database: &Database, count: i32, total: &mut usize) -> Duration {
    let started = Instant::now();
    *total += tell(database, json!({"do": "sleep", "ms": 20, "then": "report"}), count).await.len();
    all_reported(database, *total).await;
    started.elapsed()
}

/// Judged by `make soak`: as fast as before, but for noise, what new connections have to learn, and the growing log that the
/// test itself counts.
fn assert_rate_returned(before: Duration, after: Duration) {
    println!("{before:?} before, {after:?} after");
    assert!(after < rounds(PATIENCE, 3 * before + Duration::from_secs(1)), "{before:?} before, {after:?} after");
}

/// The database is restarted under load, in immediate mode too. The host lives, its rate returns, nothing is lost.
#[tokio::test]
async fn a_host_survives_restarts_of_its_database() {
    let folder = scratch_folder();
    let start = async || {
        let options = Options { folder: folder.path().join(".millstream"), throw_away: false };
        Server::start(options).await.unwrap()
    };
    let mut server = start().await;
    let url = server.url();
    let mut program = Program::with_examples(&playground("", WORKER));
    up(&mut program, &url).await;
    let mut total = 0;
    let database = open(&server).await;
    time_of(&database, 500, &mut total).await; // warms everything up
    let undisturbed = time_of(&database, 1000, &mut total).await;
    database.close().await;
    for round in 0..rounds(2, 20) {
        let database = open(&server).await;
        total += tell(&database, json!({"do": "sleep", "ms": 20, "then": "report"}), 500).await.len();
        let before = reports(&database).await.len();
        wait_for("it is at work", PATIENCE, async || reports(&database).await.len() > before + 50).await;
        let pid = number(&database, "select split_part(pg_read_file('postmaster.pid'), E'\\n', 1)::bigint").await;
        let pid = Pid::from_raw(i32::try_from(pid).unwrap()).unwrap();
        let mode = if round % 2 == 0 { Signal::QUIT } else { Signal::INT };
        kill_process(pid, mode).unwrap();
        server.ended().await;
        server.stop().await.unwrap();
        server = start().await;
        assert_eq!(server.url(), url);
        let database = open(&server).await;
        all_reported(&database, total).await;
        assert!(is_alive(program.pid()));
        let after = time_of(&database, 1000, &mut total).await;
        assert_rate_returned(undisturbed, after);
    }
    let database = open(&server).await;
    assert_once(&database, total).await;
    database.close().await;
    stop(program).await;
    server.stop().await.unwrap();
}

/// While the database is away the log says so once, where it was looked for and why it does not answer; and that it is back.
#[tokio::test]
async fn a_database_that_goes_away_and_comes_back_is_told() {
    let folder = scratch_folder();
    let start = async || {
        let options = Options { folder: folder.path().join(".millstream"), throw_away: false };
        Server::start(options).await.unwrap()
    };
    let server = start().await;
    let mut program = Program::with_examples(&playground(SHORT_LEASE, WORKER));
    up(&mut program, &server.url()).await;
    server.stop().await.unwrap();
    program.logged("failed to register this host at ").await;
    let server = start().await;
    wait_for("it has an identity again", PATIENCE, async || program.lines(&["took an identity"]) == 2).await;
    let log = program.stderr();
    assert_eq!(program.lines(&["failed to renew the lease at ", ".millstream"]), 1, "{log}");
    for noise in ["on-release", "slow threshold", "at line ", "pool timed out"] {
        let lines = log.lines().filter(|line| !line.contains("DEBUG"));
        assert_eq!(lines.filter(|line| line.contains(noise)).count(), 0, "{noise}: {log}");
    }
    stop(program).await;
    server.stop().await.unwrap();
}

async fn open(server: &Server) -> Database {
    Database::connect(&server.connect(), 4, "millstream").await.unwrap()
}

/// Every connection is cut five times a second, the one of the heartbeat included, and the load does not end before the
/// cuts do.
#[tokio::test]
async fn a_host_survives_the_loss_of_its_connections() {
    let database = database().await;
    database.expect_log("testing the connection on-release"); // the test's own
    let mut program = Program::with_examples(&playground("", WORKER));
    up(&mut program, &database.url().await).await;
    let mut total = 0;
    time_of(&database, 500, &mut total).await;
    let before = time_of(&database, 1000, &mut total).await;
    let mut own = database.pool.acquire().await.unwrap();
    let cut = "select count(pg_terminate_backend(pid)) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()";
    let reported = "select count(*) from {schema}.message_log_2";
    let more = r#"select count(p.id) from generate_series(1, $1::integer) as n,
        lateral {schema}.produce('playground', '{"do": "sleep", "ms": 20, "then": "report"}' || repeat(' ', n)) as p"#;
    let (until, mut count) = (Instant::now() + rounds(Duration::from_secs(3), Duration::from_secs(20)), 0);
    loop {
        let reported: i64 = sqlx::query_scalar(database.schema.sql(reported)).fetch_one(&mut *own).await.unwrap();
        let waiting = total - usize::try_from(reported).unwrap();
        if Instant::now() > until {
            assert!(waiting > 0, "the load has ended before the cuts");
            break;
        }
        count += sqlx::query_scalar::<_, i64>(cut).fetch_one(&mut *own).await.unwrap();
        // 16 slots do 160 of 20 ms until the next cut.
        let few = i32::try_from(400_usize.saturating_sub(waiting)).unwrap();
        sqlx::query(database.schema.sql(more)).bind(few).execute(&mut *own).await.unwrap();
        total += usize::try_from(few).unwrap();
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    assert!(count > 5, "{count} connections were cut");
    drop(own);
    // The test's own pool was cut too.
    let fresh = database.another_host().await;
    assert_once(&fresh, total).await;
    let after = time_of(&fresh, 1000, &mut total).await;
    assert_rate_returned(before, after);
    assert_once(&fresh, total).await;
    assert_eq!(stats(&fresh, &program).await["leases_lost"], 0, "renewals were tried again in time");
    stop(program).await;
}
