//! `pause`, `resume` and `seek` given to the real program while it runs real handlers.

use rustix::process::Signal;
use serde_json::{Value, json};

use crate::support::{
    PATIENCE, Program, database,
    hosts::{SHORT_LEASE, all_reported, assert_tells_no_secret, held_by, number, playground, reports, stats, tell, up},
    wait_for,
};

/// A handler may run for longer than any test waits.
const WORKER: &str = "slots = 2\ntimeout = \"10m\"";

/// A host of its own, ready.
async fn host(url: &str) -> Program {
    let mut program = Program::with_examples(&playground(SHORT_LEASE, WORKER));
    up(&mut program, url).await;
    program
}

async fn stop(mut program: Program) {
    program.signal(Signal::TERM);
    assert!(program.ended(PATIENCE).await.success(), "{}", program.stderr());
    assert_tells_no_secret(&program);
}

/// What a verb answers, given beside a running host.
fn verb(program: &Program, url: &str, arguments: &[&str]) -> Value {
    let arguments = [arguments, &["--database-url", url, "--output", "json"]].concat();
    let (status, stdout, stderr) = program.run_with_input(&arguments, b"");
    assert!(status.success(), "{arguments:?}: {stderr}");
    serde_json::from_str(&stdout).expect("the answer is JSON")
}

/// W1: two hosts run endless loops in every slot. A seek stops the sandboxes, nothing of them is settled, and the same
/// hosts go on with what comes, and with what they are sent back to.
#[tokio::test]
async fn w1_a_seek_stops_running_sandboxes_and_the_hosts_go_on() {
    let database = database().await;
    let url = database.url().await;
    let (one, other) = (host(&url).await, host(&url).await);
    tell(&database, json!({"do": "report"}), 4).await;
    assert_eq!(all_reported(&database, 4).await.len(), 4);
    let (hosts, mut lost) = ([&one, &other], tell(&database, json!({"do": "spin"}), 12).await);
    wait_for("every slot spins", PATIENCE, async || {
        held_by(&database, &one).await.len() >= 2 && held_by(&database, &other).await.len() >= 2
    })
    .await;
    let first = lost.remove(0).to_string();
    let why = verb(&one, &url, &["why", "worker", &first]);
    assert!(why["state"] == "claimed" && why["host_alive"] == true, "{why}");
    let seeked = verb(&one, &url, &["seek", "worker", "--to", "latest", "--yes"]);
    assert!(seeked["in_flight"].as_i64().is_some_and(|count| count >= 4), "{seeked}");
    tell(&database, json!({"do": "report"}), 30).await;
    assert_eq!(all_reported(&database, 34).await.len(), 34, "both hosts have free slots again");
    // Back to what follows the loops: the thirty come again.
    assert_eq!(
        verb(&one, &url, &["seek", "worker", "--to", &(lost[10] + 1).to_string(), "--yes"])["position"],
        lost[10]
    );
    assert_eq!(all_reported(&database, 64).await.len(), 64);
    let fenced =
        async |program| stats(&database, program).await["groups"]["worker"]["fenced"].as_u64().unwrap_or_default();
    wait_for("the hosts tell", PATIENCE, async || fenced(hosts[0]).await >= 2 && fenced(hosts[1]).await >= 2).await;
    let dead = number(&database, "select count(*) from {schema}.dead_letter").await;
    let failures = stats(&database, &one).await["groups"]["worker"]["failures"].clone();
    assert_eq!((dead, failures), (0, json!({})), "a cut is no failure");
    stop(one).await;
    stop(other).await;
}

/// A pause outlives the host that ran, even one killed, and the next host hears the resume.
#[tokio::test]
async fn a_pause_outlives_a_killed_host_and_a_resume_needs_no_restart() {
    let database = database().await;
    let url = database.url().await;
    let mut killed = host(&url).await;
    assert_eq!(verb(&killed, &url, &["pause", "worker"])["changed"], true);
    tell(&database, json!({"do": "report"}), 5).await;
    killed.signal(Signal::KILL);
    killed.ended(PATIENCE).await;
    let next = host(&url).await;
    wait_for("it has looked", PATIENCE, async || {
        stats(&database, &next).await["groups"]["worker"]["turns"].as_u64() > Some(0)
    })
    .await;
    let group = verb(&next, &url, &["groups", "worker"])[0].clone();
    assert_eq!((&group["paused"], &group["lag"], &group["in_flight"]), (&true.into(), &5.into(), &0.into()));
    assert!(reports(&database).await.is_empty());
    assert_eq!(verb(&next, &url, &["resume", "worker"])["changed"], true);
    assert_eq!(all_reported(&database, 5).await.len(), 5);
    stop(next).await;
}
