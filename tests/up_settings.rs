//! `millstream up` and its streams.toml: how it starts, what it does with a changed one, and how it ends a job. Method: the
//! real program on a database of its own; what it says is compared, and what the groups then do.

use std::{fs, time::Duration};

use rustix::process::Signal;
use serde_json::json;

use crate::support::{
    PATIENCE, Program, TestDatabase, database,
    handlers::handler_wasm,
    hosts::{
        SECRET, all_reported, assert_tells_no_secret, dead_letters, held_by, number, playground, reports, start_up,
        tell, up,
    },
    wait_for,
};

const SECOND: &str =
    "[groups.second]\nstream = \"playground\"\nhandler = \"flaky.wasm\"\nallow = { produce = [\"receipts\"] }";

fn rewrite(program: &Program, streams_toml: &str) {
    let temporary = program.folder().join("streams.toml.new");
    fs::write(&temporary, streams_toml).unwrap();
    fs::rename(temporary, program.folder().join("streams.toml")).unwrap();
}

async fn stop(mut program: Program) {
    program.signal(Signal::TERM);
    assert!(program.ended(PATIENCE).await.success(), "{}", program.stderr());
    assert_tells_no_secret(&program);
}

async fn groups(database: &TestDatabase) -> i64 {
    number(database, "select count(*) from {schema}.consumer_group").await
}

#[tokio::test]
async fn a_changed_streams_toml_is_applied_and_a_broken_one_refused_whole() {
    let database = database().await;
    let mut program = Program::with_examples(&playground("", ""));
    up(&mut program, &database.url().await).await;
    tell(&database, json!({"do": "report"}), 5).await;
    all_reported(&database, 5).await;
    rewrite(&program, &playground("", SECOND));
    program.logged("applied: create group second").await;
    // The new group reads from the beginning.
    all_reported(&database, 10).await;
    rewrite(&program, &playground("", &format!("slot = 3\n{SECOND}\n[groups.third]\nstream = \"playgrund\"")));
    program.logged("refused the changed streams.toml, the old one goes on").await;
    for part in ["slot", "did you mean", "playgrund"] {
        assert!(program.lines(&["ERROR", part]) >= 1, "{part}, as a line of the log: {}", program.stderr());
    }
    assert_eq!(groups(&database).await, 2);
    tell(&database, json!({"do": "report"}), 5).await;
    all_reported(&database, 20).await;
    rewrite(&program, &playground("", SECOND));
    program.logged("read the changed streams.toml: it is valid, and nothing of it is new").await;
    // A group that is taken out stops here.
    rewrite(&program, &playground("", ""));
    let taken = || program.lines(&["delivered", "group=\"second\""]);
    wait_for("only the first goes on", PATIENCE, async || {
        let (reported, seconds) = (reports(&database).await.len(), taken());
        let ids = tell(&database, json!({"do": "report"}), 1).await;
        wait_for("it is delivered", PATIENCE, async || {
            program.lines(&["delivered", "group=\"worker\"", &format!("message_id={} ", ids[0])]) == 1
        })
        .await;
        tokio::time::sleep(Duration::from_millis(300)).await;
        reports(&database).await.len() == reported + 1 && taken() == seconds
    })
    .await;
    stop(program).await;
}

/// A group whose policy changed waits for its own slow delivery; nothing else waits for it, a signal least of all.
#[tokio::test]
async fn changed_slots_restart_that_group_only_and_wait_for_nobody() {
    let database = database().await;
    let slow = "slots = 1\ntimeout = \"5m\"";
    let host = "drain_timeout = \"2m\"";
    let mut program =
        Program::with_examples(&playground(host, &format!("{slow}\n{SECOND}\nfilter = {{ routing_key = [\"x\"] }}")));
    up(&mut program, &database.url().await).await;
    tell(&database, json!({"do": "sleep", "ms": 6000, "then": "report"}), 1).await;
    wait_for("it runs", PATIENCE, async || held_by(&database, &program).await.len() == 1).await;
    let wider = playground(host, &format!("slots = 2\ntimeout = \"5m\"\n{SECOND}"));
    rewrite(&program, &wider);
    program.logged("applied: change group worker").await;
    program.logged("applied: change group second").await;
    // `second` runs with its new filter while `worker` still waits for its delivery.
    tell(&database, json!({"do": "report"}), 1).await;
    wait_for("the other group goes on", PATIENCE, async || program.lines(&["delivered", "group=\"second\""]) >= 1)
        .await;
    let attempts = all_reported(&database, 3).await;
    assert!(attempts.iter().all(|(_, attempt)| *attempt == 1), "{attempts:?}");
    // Two slots now.
    tell(&database, json!({"do": "sleep", "ms": 1500}), 1).await;
    wait_for("both slots are used", PATIENCE, async || {
        tell(&database, json!({"do": "sleep", "ms": 1500}), 1).await;
        held_by(&database, &program).await.len() >= 2
    })
    .await;
    stop(program).await;
}

#[tokio::test]
async fn without_apply_it_only_follows_what_is_declared() {
    let database = database().await;
    let url = database.url().await;
    let mut first = Program::with_examples(&playground("", ""));
    up(&mut first, &url).await;
    let mut follower = Program::with_examples(&playground("", SECOND));
    start_up(&mut follower, &url, &["--no-apply"]);
    follower.logged("ready: ").await;
    rewrite(&follower, &playground("", &format!("slots = 2\n{SECOND}")));
    tell(&database, json!({"do": "report"}), 5).await;
    all_reported(&database, 5).await;
    assert_eq!((groups(&database).await, follower.lines(&["applied"])), (1, 0));
    // Another host applies it: the follower runs it too, without a change of its own file.
    stop(first).await;
    let mut other = Program::with_examples(&playground("", SECOND));
    up(&mut other, &url).await;
    stop(other).await;
    tell(&database, json!({"do": "report"}), 5).await;
    wait_for("it follows", PATIENCE, async || follower.lines(&["delivered", "group=\"second\""]) >= 5).await;
    stop(follower).await;
}

#[tokio::test]
async fn drain_ends_the_job_when_nothing_is_left() {
    let database = database().await;
    let url = database.url().await;
    let worker = "retry = { max_attempts = 3, base = \"700ms\" }";
    let mut program = Program::with_examples(&playground("", worker));
    start_up(&mut program, &url, &["--drain"]);
    assert!(program.ended(PATIENCE).await.success(), "{}", program.stderr());
    tell(&database, json!({"do": "report"}), 200).await;
    tell(&database, json!({"do": "retry", "times": 2}), 1).await;
    tell(&database, json!({"do": "later", "ms": 2000}), 1).await;
    tell(&database, json!({"do": "reject"}), 1).await;
    start_up(&mut program, &url, &["--drain"]);
    assert!(program.ended(PATIENCE).await.success(), "{}", program.stderr());
    assert_eq!((reports(&database).await.len(), dead_letters(&database).await.len()), (200, 1));
    let left = "select (select count(*) from {schema}.claim) + (select count(*) from {schema}.exception) + (select count(*) from {schema}.host)";
    assert_eq!(number(&database, left).await, 0, "nothing is left, retries included");
    assert_tells_no_secret(&program);
}

#[tokio::test]
async fn a_missing_handler_is_told_once_and_its_group_waits_for_the_file() {
    let database = database().await;
    let mut program = Program::with_examples(&playground("", ""));
    let file = program.handlers().join("flaky.wasm");
    fs::remove_file(&file).unwrap();
    up(&mut program, &database.url().await).await;
    tell(&database, json!({"do": "report"}), 5).await;
    tokio::time::sleep(Duration::from_secs(5)).await; // two slow looks
    assert_eq!(program.lines(&["WARN", "flaky.wasm is not in", "its groups wait until it is put there"]), 1);
    assert_eq!((program.lines(&["WARN"]), reports(&database).await.len()), (1, 0), "{}", program.stderr());
    fs::write(&file, handler_wasm("flaky")).unwrap();
    let reports = all_reported(&database, 5).await;
    assert!(reports.iter().all(|(_, attempt)| *attempt == 1), "waiting counts no attempt");
    stop(program).await;
}

#[tokio::test]
async fn what_keeps_it_from_starting_is_one_clear_error() {
    let broken =
        Program::new("[groups.email]\nstream = \"orders\"\nslots = \"many\"\n[streams.ordrs]\nretension = \"7d\"\n");
    let (status, stdout, stderr) = broken.run(&["up"]);
    assert_eq!((status.code(), stdout.as_str()), (Some(1), ""), "{stderr}");
    for part in ["handler", "slots", "retension", "ordrs"] {
        assert!(stderr.contains(part), "{part}: {stderr}");
    }
    assert!(!broken.folder().join(".millstream").exists(), "nothing is started for a broken file");
    let project = Program::with_examples(&playground("", ""));
    let url = format!("postgres://miller:{SECRET}@127.0.0.1:1/shop");
    let (status, stdout, stderr) = project.run(&["up", "--database-url", &url]);
    assert_eq!((status.code(), stdout.as_str(), stderr.lines().count()), (Some(1), "", 1), "{stderr}");
    assert!(stderr.starts_with("error: connect to Postgres at") && stderr.contains("127.0.0.1"), "{stderr}");
    assert!(!stderr.contains(SECRET), "{stderr}");
    let no_secret =
        Program::with_examples(&playground("", "secrets = { TOKEN = { env = \"MILLSTREAM_TEST_NOT_SET\" } }"));
    let database = database().await;
    let url = database.url().await;
    let (status, _, stderr) = no_secret.run(&["up", "--drain", "--database-url", &url]);
    assert_eq!(number(&database, "select count(*) from {schema}.host").await, 0);
    assert!(status.code() == Some(1) && stderr.contains("MILLSTREAM_TEST_NOT_SET"), "{stderr}");
}
