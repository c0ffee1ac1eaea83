//! `millstream up` with a Postgres of its own, as a newcomer meets it. Method: the repository's own streams.toml and
//! handlers in a fresh folder; messages are produced by SQL into the Postgres that the program started.

use std::{path::Path, time::Duration};

use millstream::database::{Database, embedded};
use rustix::process::Signal;
use serde_json::json;

use crate::support::{
    PATIENCE, Program,
    hosts::{SECRET, assert_tells_no_secret, number, produce, reports, settled},
    is_alive, wait_for,
};

/// The streams.toml that people find in the repository, on a port that is free.
fn newcomer() -> Program {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join("streams.toml");
    let text = std::fs::read_to_string(file).unwrap();
    assert!(text.contains("127.0.0.1:7070"));
    Program::with_examples(&text.replace("127.0.0.1:7070", "127.0.0.1:0"))
}

/// The Postgres that the program runs.
async fn own(program: &Program) -> Database {
    let connect = embedded::find_running(&program.folder().join(".millstream")).await.unwrap().unwrap();
    Database::connect(&connect, 4, "millstream").await.unwrap()
}

async fn server_pid(database: &Database) -> i32 {
    let pid = number(database, "select split_part(pg_read_file('postmaster.pid'), E'\\n', 1)::bigint").await;
    i32::try_from(pid).unwrap()
}

async fn order(database: &Database, count: i32) {
    let order = json!({"order_id": "o-1", "customer": SECRET, "amount_cents": 1205, "currency": "EUR"});
    produce(database, "orders", order, count).await;
}

async fn start(program: &mut Program, more: &[&str]) -> Database {
    program.start(&[&["up", "-v"], more].concat());
    program.logged("ready: its own Postgres").await;
    own(program).await
}

async fn receipts(database: &Database, count: usize) {
    wait_for("the receipts", PATIENCE, async || reports(database).await.len() >= count).await;
    settled(database).await;
    assert_eq!(reports(database).await.len(), count);
}

/// Processes that name the project's folder: the server, its watcher, its children.
fn processes_of(program: &Program) -> Vec<String> {
    let folder = program.folder().display().to_string();
    let command_lines = std::fs::read_dir("/proc").into_iter().flatten().flatten().filter_map(|entry| {
        let bytes = std::fs::read(entry.path().join("cmdline")).ok()?;
        Some(String::from_utf8_lossy(&bytes).replace('\0', " "))
    });
    command_lines.filter(|line| line.contains(&folder)).collect()
}

/// The processes that a server has started: they do not name the folder.
fn children_of(server: i32) -> Vec<i32> {
    let statuses = std::fs::read_dir("/proc").into_iter().flatten().flatten().filter_map(|entry| {
        let pid = entry.file_name().to_str()?.parse().ok()?;
        Some((pid, std::fs::read_to_string(entry.path().join("status")).ok()?))
    });
    let is_child = |status: &str| status.lines().any(|line| line.split_whitespace().eq(["PPid:", &server.to_string()]));
    statuses.filter(|(_, status)| is_child(status)).map(|(pid, _)| pid).collect()
}

#[tokio::test]
async fn a_fresh_project_runs_twice_in_a_row_and_leaves_no_process() {
    let mut program = newcomer();
    for round in 1..=2 {
        let database = start(&mut program, &[]).await;
        let server = server_pid(&database).await;
        order(&database, 20).await;
        receipts(&database, 20 * round).await;
        assert_eq!(number(&database, "select count(*) from {schema}.dead_letter").await, 0);
        let children = children_of(server);
        assert!(children.len() >= 5, "a server has its checkpointer, writers and backends: {children:?}");
        database.close().await;
        program.signal(Signal::INT);
        assert!(program.ended(PATIENCE).await.success(), "{}", program.stderr());
        wait_for("no process is left", PATIENCE, async || {
            !is_alive(server) && !children.iter().any(|child| is_alive(*child)) && processes_of(&program).is_empty()
        })
        .await;
        assert_tells_no_secret(&program);
        assert_eq!(program.lines(&["ERROR"]) + program.lines(&["WARN"]), 0, "{}", program.stderr());
        let said = program.stderr();
        assert!(said.lines().last().is_some_and(|line| line.ends_with("INFO stopped")), "{said}");
    }
}

#[tokio::test]
async fn after_kill_9_the_server_goes_away_and_the_next_up_goes_on() {
    let mut program = newcomer();
    let database = start(&mut program, &[]).await;
    let server = server_pid(&database).await;
    order(&database, 5).await;
    receipts(&database, 5).await;
    order(&database, 500).await;
    let children = children_of(server);
    program.signal(Signal::KILL);
    program.ended(PATIENCE).await;
    database.close().await;
    wait_for("the server goes away by itself", PATIENCE, async || {
        !is_alive(server) && !children.iter().any(|child| is_alive(*child))
    })
    .await;
    let database = start(&mut program, &[]).await;
    receipts(&database, 505).await;
    database.close().await;
    program.signal(Signal::TERM);
    assert!(program.ended(PATIENCE).await.success(), "{}", program.stderr());
    assert_tells_no_secret(&program);
}

#[tokio::test]
async fn the_demo_shows_every_kind_of_ending() {
    let mut program = newcomer();
    let database = start(&mut program, &["--demo"]).await;
    wait_for("receipts appear", PATIENCE, async || reports(&database).await.len() >= 3).await;
    let rejected = "select count(*) from {schema}.dead_letter where class = 'rejected'";
    wait_for("an order is rejected", PATIENCE, async || number(&database, rejected).await > 0).await;
    database.close().await;
    program.signal(Signal::INT);
    assert!(program.ended(PATIENCE).await.success(), "{}", program.stderr());
}

#[tokio::test]
async fn a_host_whose_own_postgres_ends_says_so_and_fails() {
    let mut program = newcomer();
    let database = start(&mut program, &[]).await;
    let server = server_pid(&database).await;
    database.close().await;
    rustix::process::kill_process(rustix::process::Pid::from_raw(server).unwrap(), Signal::INT).unwrap();
    assert_eq!(program.ended(PATIENCE).await.code(), Some(1));
    assert!(program.stderr().contains("error: Postgres has ended by itself"), "{}", program.stderr());
}

#[tokio::test]
async fn a_second_host_of_the_same_project_is_refused_and_harms_nothing() {
    let mut program = newcomer();
    let database = start(&mut program, &[]).await;
    let (status, stdout, stderr) = program.run(&["up"]);
    assert_eq!((status.code(), stdout.as_str()), (Some(1), ""), "{stderr}");
    assert!(stderr.starts_with("error: ") && stderr.contains(&program.pid().to_string()), "{stderr}");
    order(&database, 5).await;
    receipts(&database, 5).await;
    database.close().await;
    program.signal(Signal::INT);
    assert!(program.ended(PATIENCE).await.success(), "{}", program.stderr());
}

/// Whenever its start was cut short, by ctrl-C or by kill -9: the next one works.
#[tokio::test]
async fn a_start_that_was_cut_short_does_no_harm_to_the_next() {
    let mut program = newcomer();
    for (round, wait) in [20, 300, 600, 900, 1200, 1500, 2000, 3000].into_iter().enumerate() {
        program.start(&["up"]);
        tokio::time::sleep(Duration::from_millis(wait)).await;
        program.signal(if round % 2 == 0 { Signal::KILL } else { Signal::INT });
        let status = program.ended(PATIENCE).await;
        // Before the program listens to it, INT ends it like any other.
        assert!(round % 2 == 0 || status.success() || status.code().is_none(), "{status}: {}", program.stderr());
    }
    let database = start(&mut program, &[]).await;
    order(&database, 5).await;
    receipts(&database, 5).await;
    database.close().await;
    program.signal(Signal::INT);
    assert!(program.ended(PATIENCE).await.success(), "{}", program.stderr());
    wait_for("no process is left", PATIENCE, async || processes_of(&program).is_empty()).await;
}
