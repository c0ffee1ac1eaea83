//! What a recovery ends in the database so that it can go on, and what it waits for instead. Sessions stand for hosts that are
//! frozen in the middle of a transaction; `up_hosts.rs` freezes real ones.

use std::time::Duration;

use millstream::{
    database::Database,
    engine::{self, HostId, Wanted, deregister, register},
    handler::Concurrency,
};

use crate::support::{
    TestDatabase, database,
    engine::{Project, Session, number, request},
    keyed::{keyed, streams},
    wait_for,
};

const LIMIT: Duration = Duration::from_secs(60);

/// A host whose lease has run out, and its connections.
async fn dead_host(database: &Database) -> (Database, HostId) {
    let sessions = database.of_host("gone:1");
    let host = register(&sessions, "gone:1", Duration::from_millis(1)).await.expect("register");
    tokio::time::sleep(Duration::from_millis(5)).await;
    (sessions, host)
}

/// Holds a host's row as every settle does.
async fn hold(sessions: &Database, host: HostId) -> Session {
    let mut session = Session::begin(sessions).await;
    session.run(&format!("begin; select from {{schema}}.host where id = {} for key share", host.0)).await;
    session
}

/// A session that waits for the lock that `first` holds, while it holds the row.
async fn hold_behind(first: &mut Session, sessions: &Database, host: HostId) -> tokio::task::JoinHandle<Session> {
    first.run("begin; select pg_advisory_xact_lock(7)").await;
    let mut second = hold(sessions, host).await;
    tokio::spawn(async move {
        let _ = second.try_run("select pg_advisory_xact_lock(7)").await; // it may be ended meanwhile
        second
    })
}

async fn is_removed(database: &TestDatabase, host: HostId) -> bool {
    deregister(database, host).await.is_ok_and(|removed| removed)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_frozen_host_holds_is_ended_also_where_it_waits_for_another_of_its_sessions() {
    let database = database().await;
    let (sessions, host) = dead_host(&database).await;
    let mut first = Session::begin(&sessions).await;
    let second = hold_behind(&mut first, &sessions, host).await;
    wait_for("the row is free", LIMIT, async || is_removed(&database, host).await).await;
    let mut second = second.await.expect("it ends");
    for session in [&mut first, &mut second] {
        session.try_run("select 1").await.expect_err("it was ended");
    }
}

/// A session of a pool that has all its connections in use may have to wait for the very lock that keeps it busy.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_look_for_what_is_frozen_needs_no_second_connection() {
    let database = database().await;
    let (sessions, host) = dead_host(&database).await;
    let mut holder = hold(&sessions, host).await;
    let lone = database.another_host().await.with_own_pool(1);
    let removal = tokio::spawn(async move { deregister(&lone, host).await });
    let waits = "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'";
    wait_for("it waits", LIMIT, async || number(&database, waits).await == 1).await;
    tokio::time::sleep(Duration::from_millis(700)).await; // it has begun to look
    holder.run("commit").await;
    // Not only when the look gives up.
    let removed = tokio::time::timeout(Duration::from_secs(10), removal).await.expect("it goes on").unwrap();
    assert!(removed.expect("it is granted"));
}

/// Postgres tells one of those that share a lock, and the group's lock may be what is held.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_that_a_frozen_host_holds_is_ended_at_once() {
    let database = database().await;
    let (sessions, host) = dead_host(&database).await;
    let mut held = Vec::new();
    for _ in 0..16 {
        held.push(hold(&sessions, host).await);
    }
    wait_for("the row is free", LIMIT, async || is_removed(&database, host).await).await;
    for session in &mut held {
        session.try_run("select 1").await.expect_err("it was ended");
    }
    let ended = database.statements.load(std::sync::atomic::Ordering::Relaxed);
    assert!(ended < 20, "{ended} statements: a look ends all of them");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_frozen_host_does_not_keep_the_lock_of_a_group() {
    let project = Project::declare(&streams("")).await;
    let database = &project.database;
    let sessions = database.of_host("gone");
    let host = register(&sessions, "gone", Duration::from_secs(1)).await.expect("register");
    let group = project.group("email").await;
    project.produce("orders", &[keyed("a", Concurrency::Parallel, "0")]).await;
    let wanted = Wanted { messages: 1, bytes: 1 << 20, retries: 1 };
    let turn = engine::claim(database, host, &group, &request(&[], wanted)).await.expect("claim");
    assert_eq!(turn.claimed.len(), 1);
    let mut frozen = Session::begin(&sessions).await;
    frozen.run("begin; select count(*) from {schema}.free_leases(1, 99, 10)").await; // locks as a turn does
    wait_for("its lease runs out", LIMIT, async || engine::dead_hosts(database).await.unwrap() == [host]).await;
    let [orphaned] = engine::orphaned_groups(database, host).await.unwrap()[..] else { panic!("one group") };
    assert_eq!(engine::recover(database, host, orphaned).await.expect("at the first try"), 1);
    frozen.try_run("select 1").await.expect_err("it was ended");
}

/// Names are for people: given twice, cut, and changed on the way. And a process that lives is not frozen, whichever of its
/// identities is dead.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_living_host_is_no_other_of_the_same_name() {
    let pod = |end: &str| format!("millstream-consumers-of-orders-production-7d9f8c6b5d-{end}:1");
    let pairs = [
        ("web-0:1".to_owned(), "web-0:1".to_owned()),
        (pod("x2x4z"), pod("q8k7p")),
        ("bücher".into(), "bücher".into()),
    ];
    let of_two_processes = pairs.map(|(dead, living)| async move {
        let database = database().await;
        let sessions = database.of_host(&dead);
        let host = register(&sessions, &dead, Duration::from_millis(1)).await.expect("register");
        let living_sessions = database.of_host(&living);
        waits_for_a_living_one(&database, (&sessions, host), (&living_sessions, &living)).await;
    });
    let of_one = async {
        let database = database().await;
        let sessions = database.of_host("one");
        let host = register(&sessions, "one", Duration::from_millis(1)).await.expect("register");
        waits_for_a_living_one(&database, (&sessions, host), (&sessions, "one")).await;
    };
    let [a, b, c] = of_two_processes;
    tokio::join!(a, b, c, of_one);
}

/// The living one is in a delivery; a settle of the dead one waits for what that has locked.
async fn waits_for_a_living_one(database: &TestDatabase, dead: (&Database, HostId), living: (&Database, &str)) {
    register(living.0, living.1, Duration::from_secs(300)).await.expect("register");
    let mut delivery = Session::begin(living.0).await;
    let settle = hold_behind(&mut delivery, dead.0, dead.1).await;
    deregister(database, dead.1).await.expect_err("it waits for the living");
    delivery.run("commit").await;
    drop(settle.await.expect("it ends"));
    wait_for("the row is free", LIMIT, async || is_removed(database, dead.1).await).await;
}

/// A caller whose transaction a dead host's settle waits for, and another host at the same work, are waited for.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_others_hold_is_waited_for() {
    let behind_a_caller = async {
        let database = database().await;
        let (sessions, host) = dead_host(&database).await;
        let mut caller = Session::begin(&database).await;
        let second = hold_behind(&mut caller, &sessions, host).await;
        deregister(&database, host).await.expect_err("it waits for the caller");
        caller.run("commit").await;
        wait_for("the row is free", LIMIT, async || is_removed(&database, host).await).await;
        second.await.expect("it ends").try_run("select 1").await.expect_err("it was ended");
    };
    let of_a_living_host = async {
        let database = database().await;
        let (_, host) = dead_host(&database).await;
        let living = database.of_host("living:2");
        register(&living, "living:2", Duration::from_secs(300)).await.expect("register");
        let mut session = hold(&living, host).await;
        deregister(&database, host).await.expect_err("it waits for the living");
        session.run("commit").await;
        wait_for("the row is free", LIMIT, async || is_removed(&database, host).await).await;
    };
    tokio::join!(behind_a_caller, of_a_living_host);
}
