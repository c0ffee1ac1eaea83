//! Idle groups cost next to nothing, and a busy neighbour does not make them wait.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering::Relaxed},
    },
    time::Duration,
};

use millstream::handler::{Handler, Message};

use crate::support::{
    engine::{Project, done, numbered},
    handlers::rounds,
    wait_for,
};

const LIMIT: Duration = Duration::from_secs(60);

fn groups(stream: &str, names: impl Iterator<Item = String>) -> String {
    names.map(|name| format!("[groups.{name}]\nstream = \"{stream}\"\nhandler = \"h.wasm\"\nslots = 1\n")).collect()
}

/// Transactions of this database so far, as Postgres counts them. A session publishes its counts once a second.
async fn transactions(project: &Project) -> i64 {
    project.number("select xact_commit + xact_rollback from pg_stat_database where datname = current_database()").await
}

/// Goal: one statement for all idle groups. Method: with 1,000 of them on one host, transactions of three seconds are
/// counted: 30 polls, 3 looks for dead hosts, a heartbeat; far below one for each group.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_idle_groups_share_one_poll() {
    let streams = format!("[streams.orders]\n{}", groups("orders", (0..1000).map(|number| format!("g{number}"))));
    let project = Project::declare(&streams).await;
    // The last ids were rolled back: each group has to look at the log.
    let mut session = project.session().await;
    session.run("begin; select {schema}.produce('orders', 'x'); rollback").await;
    let handler: Arc<dyn Handler> = Arc::new(|_: Message| done());
    let names: Vec<String> = (0..1000).map(|number| format!("g{number}")).collect();
    let handlers: Vec<_> = names.iter().map(|name| (name.as_str(), Arc::clone(&handler))).collect();
    let host = project.host_with(&handlers).await;
    // The fewest turns of one group, and those of all; one look at the counters for both.
    let turns = || {
        let snapshot = host.counters.snapshot();
        let turns: Vec<_> =
            snapshot["groups"].as_object().unwrap().values().map(|group| group["turns"].as_u64().unwrap()).collect();
        (*turns.iter().min().unwrap(), turns.iter().sum::<u64>())
    };
    wait_for("all have turned once", LIMIT, async || turns().0 >= 1).await;
    let polls = || host.counters.snapshot()["idle_polls"].as_u64().unwrap();
    // The poll comes to rest, and sessions publish what they did: a session that went idle does so after ten seconds.
    tokio::time::sleep(rounds(Duration::from_millis(2500), Duration::from_secs(15))).await;
    let seconds = rounds(3, 30);
    let before = (transactions(&project).await, polls(), turns());
    tokio::time::sleep(Duration::from_secs(seconds)).await;
    let after = (transactions(&project).await, polls(), turns());
    assert_eq!(after.2, before.2, "no group turns");
    let (polled, ran) = (after.1 - before.1, after.0 - before.0);
    assert!((1..=20 * seconds).contains(&polled), "{polled} polls in {seconds} s");
    // A statement a group would be 30,000. In a short run, idle connections publish their part of the first 1,000 turns
    // late; in `make soak` they have done so, and the bar is what an idle host may cost: 20 a second, the test's included.
    let ran_max = rounds(1500, 20 * 30);
    assert!(ran < ran_max, "{ran} transactions in {seconds} s");
    println!("{polled} polls and {ran} transactions in {seconds} s");
    host.drain().await;
}

/// A group that claims all the time must not put off the look at the others, whose messages come by SQL alone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_busy_group_does_not_put_off_the_poll_for_idle_ones() {
    let streams = format!(
        "[streams.busy]\n[streams.quiet]\n{}{}",
        groups("busy", (0..4).map(|number| format!("busy{number}"))),
        groups("quiet", ["quiet".to_owned()].into_iter())
    );
    let project = Project::declare(&streams).await;
    let (delivered, stop) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicBool::new(false)));
    let notes = Arc::clone(&delivered);
    let mut handlers: HashMap<String, Arc<dyn Handler>> = HashMap::new();
    for number in 0..4 {
        handlers.insert(format!("busy{number}"), Arc::new(|_: Message| done()));
    }
    handlers.insert(
        "quiet".to_owned(),
        Arc::new(move |_: Message| {
            notes.fetch_add(1, Relaxed);
            done()
        }),
    );
    let handlers: Vec<_> = handlers.iter().map(|(name, handler)| (name.as_str(), Arc::clone(handler))).collect();
    let host = project.host_with(&handlers).await;
    let load = async {
        while !stop.load(Relaxed) {
            project.produce("busy", &numbered(2)).await;
            host.consumer.produced("busy");
        }
    };
    let quiet = async {
        for count in 1..=20 {
            project.run("select {schema}.produce('quiet', 'x')").await;
            wait_for("the quiet one", Duration::from_secs(10), async || delivered.load(Relaxed) == count).await;
        }
        stop.store(true, Relaxed);
    };
    tokio::join!(load, quiet);
    host.drain().await;
}
