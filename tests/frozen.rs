//! What a recovery ends in the database so that it can go on, and what it waits for instead. Sessions stand for hosts that are
//! frozen in the middle of a transaction; `up_hosts.rs` freezes real ones.

use std::time::Duration;

use millstream::{
    database::Database,
    engine::{HostId, deregister, register},
};

use crate::support::{
    TestDatabase, database,
    engine::{Session, number},
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
