//! The log is extended by whoever produces, also when that transaction stays open for long.

use std::{
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use tokio::task::JoinSet;

use crate::support::{
    engine::{Project, done},
    handlers::rounds,
    wait_for,
};

const LIMIT: Duration = Duration::from_secs(60);

/// Must-show 3. A transaction that has extended the log stays open, a minute in `make soak`: others produce on into the
/// partitions that are ahead, a host delivers what they commit, and after it the log is extended again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn producers_and_consumers_go_on_beside_a_transaction_that_extended() {
    let streams =
        "[streams.orders]\npartition_rows = 5000\n[groups.email]\nstream = \"orders\"\nhandler = \"h.wasm\"\n";
    let project = Project::declare(streams).await;
    let delivered = Arc::new(AtomicI64::new(0));
    let notes = Arc::clone(&delivered);
    let host = project.host("email", move |_| {
        notes.fetch_add(1, Relaxed);
        done()
    });
    let host = host.await;
    let partitions = "select count(*) from {schema}.log_partition";
    let mut open = project.session().await;
    open.run("begin").await;
    let mut kept = 0;
    // Maintenance extends as well; it must be this transaction that did, so that only it sees what it attached.
    while open.number(partitions).await <= project.number(partitions).await {
        open.run("select {schema}.produce_batch('orders', array(select 'x'::bytea from generate_series(1, 250)))")
            .await;
        kept += 250;
    }
    let first = project.number(partitions).await;
    // Four times fifty a second fill less than the partitions that are left.
    let until = Instant::now() + rounds(Duration::from_secs(3), Duration::from_secs(60));
    let mut producers = JoinSet::new();
    for _ in 0..4 {
        let mut session = project.session().await;
        producers.spawn(async move {
            session.run("set lock_timeout = '2s'").await;
            let mut count = 0;
            while Instant::now() < until {
                session.run("select {schema}.produce('orders', 'y')").await;
                count += 1;
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            count
        });
    }
    let mut committed: i64 = producers.join_all().await.into_iter().sum();
    wait_for("what they committed", LIMIT, async || delivered.load(Relaxed) == committed).await;
    assert_eq!(project.number(partitions).await, first, "the extension is still the open transaction's own");
    open.run("commit").await;
    committed += kept;
    wait_for("what it committed", LIMIT, async || delivered.load(Relaxed) == committed).await;
    assert!(project.number(partitions).await > first);
    // Through everything that was ahead, and so into what is attached from here on.
    let mut session = project.session().await;
    for _ in 0..200 {
        session
            .run("select {schema}.produce_batch('orders', array(select 'z'::bytea from generate_series(1, 250)))")
            .await;
    }
    wait_for("all", LIMIT, async || delivered.load(Relaxed) == committed + 50_000).await;
    wait_for("nothing is left over", LIMIT, async || project.left_over().await == 0).await;
    host.drain().await;
    assert_eq!(delivered.load(Relaxed), committed + 50_000, "nothing twice");
}
