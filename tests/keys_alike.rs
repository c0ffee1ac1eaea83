//! L4: keys that are not the same never wait for each other: the same text in another stream or group, what only looks
//! alike, and what has the same hash. Only a produce may wait for a key of the same hash, as docs/keys.md says.

use std::sync::{Arc, atomic::Ordering::Relaxed};

use millstream::handler::Concurrency;
use tokio::{task::JoinSet, time::timeout};

use crate::support::{
    engine::{Project, Session, done},
    keyed::{LIMIT, Trace, all_done, keyed, steps, streams},
    wait_for,
};

/// Differ by case, by accents (composed and not), by width, and by spaces.
const ALIKE: [&str; 10] = ["k", "K", "k ", " k", "k\t", "\u{e9}", "e\u{301}", "e", "\u{ff4b}", "\u{212a}"];

/// Two keys whose locks are one: found by running the last steps of Postgres' hash backwards.
const COLLIDE: [&str; 2] = ["acct-00000-collides-1", "acct-04589zVPWwc1Lj4U"];

fn one(stream: &str, key: &str) -> String {
    format!(
        "select {{schema}}.produce('{stream}', 'x', key => $k${key}$k$, concurrency => 'ordered', compaction => true)"
    )
}

async fn does_not_wait(session: &mut Session, statement: &str) {
    timeout(LIMIT, session.run(statement)).await.unwrap_or_else(|_| panic!("it waits: {statement}"));
}

/// Producers: while a transaction to one key is open, every other of them is produced to, in both directions.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn l4_producers_of_keys_that_look_alike_do_not_wait() {
    let project = Project::declare(&(streams("") + "[streams.other]\n")).await;
    let (mut open, mut other) = (project.session().await, project.session().await);
    for held in ALIKE {
        open.run(&format!("begin; {}", one("orders", held))).await;
        does_not_wait(&mut other, &one("other", held)).await;
        for key in ALIKE.iter().filter(|key| **key != held) {
            does_not_wait(&mut other, &one("orders", key)).await;
        }
        open.run("commit").await;
    }
}

/// Deliveries: one group stands still in the middle of every key, and the same keys of another group of the stream, and of
/// another stream, all come.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn l4_the_same_key_in_another_stream_or_group_does_not_wait() {
    let more = "[streams.other]\n[groups.second]\nstream = \"orders\"\nhandler = \"h.wasm\"\n\
        [groups.third]\nstream = \"other\"\nhandler = \"h.wasm\"";
    let project = Project::declare(&streams(more)).await;
    let (stopped, stuck, standing) = steps(|_, _| done());
    stuck.store(true, Relaxed);
    let (second, _, of_second) = steps(|_, _| done());
    let (third, _, of_third) = steps(|_, _| done());
    for mode in [Concurrency::Ordered, Concurrency::Exclusive] {
        let batch: Vec<_> = (0..20).flat_map(|_| ALIKE.map(|key| keyed(key, mode, &format!("<{key}>")))).collect();
        project.produce("orders", &batch).await;
        project.produce("other", &batch).await;
    }
    let host = project.host_with(&[("email", standing), ("second", of_second), ("third", of_third)]).await;
    let is_through = |trace: &Trace| trace.ended().len() == 40 * ALIKE.len();
    wait_for("each key runs", LIMIT, async || stopped.started() == ALIKE.len()).await;
    wait_for("the others are through", LIMIT, async || is_through(&second) && is_through(&third)).await;
    assert_eq!((stopped.started(), stopped.ended().len()), (ALIKE.len(), 0), "one of each key, none has ended");
    stuck.store(false, Relaxed);
    all_done(&project).await;
    host.drain().await;
    for key in ALIKE {
        stopped.one_at_a_time(&format!("<{key}>"));
    }
}

/// Keys of one hash: they are delivered side by side, each in order; a produce to one waits for an open transaction to the
/// other, and no longer; and batches with both, in either order, do not deadlock.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn l4_keys_of_one_hash_run_side_by_side_and_only_producers_meet() {
    let project = Project::declare(&streams("")).await;
    let hash = |key: &str| format!("hashtextextended('0:{key}', {{lock_class}}::bigint << 32 | 1)");
    let equal = format!("select ({} = {})::integer::bigint", hash(COLLIDE[0]), hash(COLLIDE[1]));
    assert_eq!(project.number(&equal).await, 1, "the lock of an ordered key is another hash: find two such keys again");
    let (mut open, mut waits) = (project.session().await, project.session().await);
    open.run(&format!("begin; {}", one("orders", COLLIDE[0]))).await;
    let waiting = tokio::spawn(async move { waits.run(&one("orders", COLLIDE[1])).await });
    let blocked = "select count(*) from pg_locks where locktype = 'advisory' and objsubid = 1 and not granted";
    wait_for("it waits for the other key", LIMIT, async || project.number(blocked).await == 1).await;
    open.run("commit").await;
    timeout(LIMIT, waiting).await.expect("it goes on with the commit").unwrap();

    let mut producers = JoinSet::new();
    for number in 0..8 {
        let mut session = project.session().await;
        let (first, second) = if number % 2 == 0 { (0, 1) } else { (1, 0) };
        let batch = format!(
            "select count(*) from {{schema}}.produce_batch('orders', array['x', 'x']::bytea[], array['{}', '{}'], \
             array['ordered', 'ordered'])",
            COLLIDE[first], COLLIDE[second]
        );
        producers.spawn(async move {
            for _ in 0..20 {
                assert_eq!(session.number(&batch).await, 2);
            }
        });
    }
    while let Some(joined) = producers.join_next().await {
        joined.expect("no deadlock");
    }

    let project = Project::declare(&streams("")).await;
    let (trace, stuck, handler) = steps(|_, _| done());
    stuck.store(true, Relaxed);
    let batch: Vec<_> =
        (0..50).flat_map(|n| COLLIDE.map(|key| keyed(key, Concurrency::Ordered, &format!("{key}: {n}")))).collect();
    project.produce("orders", &batch).await;
    let host = project.host_with(&[("email", Arc::clone(&handler))]).await;
    wait_for("both run at once", LIMIT, async || trace.started() == 2).await;
    stuck.store(false, Relaxed);
    all_done(&project).await;
    host.drain().await;
    for key in COLLIDE {
        trace.one_at_a_time(key);
        let of_key: Vec<_> = trace.ended().into_iter().filter(|payload| payload.starts_with(key)).collect();
        assert_eq!(of_key, (0..50).map(|n| format!("{key}: {n}")).collect::<Vec<_>>());
    }
}
