//! What producing with keys locks, and what it does not: invariants T4, T6, O4 to O6, and the cluster's lock table.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use millstream::{
    config::Start,
    database::{Connect, Database},
    engine::{self, DeadFilter, Settlement, Verdict, Wanted},
    handler::{Concurrency, Failure, FailureClass, Message, NewMessage},
};
use tokio::{task::JoinSet, time::timeout};

use crate::support::{
    engine::{Project, Session, done, request, turn_statement},
    handlers::{is_soak, rounds},
    keyed::{LIMIT, all_done, keyed, streams, version},
    proxy::{Fate, Proxy},
    wait_for,
};

/// A batch with one message for each of these ordered keys.
fn batch(first: u32, count: u32) -> String {
    let keys = format!("array(select 'k' || n from generate_series({first}, {}) n)", first + count - 1);
    let modes = format!("array(select 'ordered' from generate_series(1, {count}))");
    format!(
        "select count(*) from {{schema}}.produce_batch('orders', \
         array(select 'x'::bytea from generate_series(1, {count})), p_keys => {keys}, p_concurrencies => {modes})"
    )
}

/// Must-show 8. 64 connections that each produce to 250 ordered keys at once, one call of 50,000, 1,000 calls in one
/// transaction, and 64 transactions open together with 60 keys each: a lock table of the usual size (64 locks for each of
/// 100 connections) holds them all.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_ordered_keys_do_not_exhaust_the_lock_table() {
    const USUAL: i64 = 64 * 100;
    const HELD: &str = "select count(*) from pg_locks where locktype = 'advisory'
        and database = (select oid from pg_database where datname = current_database())";
    let project = Project::declare(&streams("")).await;
    let mut producers = JoinSet::new();
    for number in 0..64 {
        let mut session = project.session().await;
        producers.spawn(async move { session.number(&batch(number * 250, 250)).await });
    }
    let mut most = 0;
    while let Some(joined) = producers.join_next().await {
        assert_eq!(joined.unwrap(), 250);
        most = most.max(project.number(HELD).await);
    }
    let mut session = project.session().await;
    session.run("begin").await;
    assert_eq!(session.number(&batch(0, 50_000)).await, 50_000);
    most = most.max(session.number(HELD).await);
    session.run("commit; begin").await;
    for key in 0..1000 {
        session
            .run(&format!("select {{schema}}.produce('orders', 'x', key => 'one{key}', concurrency => 'ordered')"))
            .await;
    }
    assert!(session.number(HELD).await <= 64 + 3);
    session.run("commit").await;
    let mut open = Vec::new();
    for number in 0..64 {
        let mut session = project.session().await;
        session.run("begin").await;
        assert_eq!(session.number(&batch(number * 60, 60)).await, 60);
        open.push(session);
    }
    most = most.max(project.number(HELD).await);
    assert!((64 * 60..USUAL).contains(&most), "{most} locks");
}

/// T4. A producer that keeps its transaction open delays its own key, and nobody else: not other keys, not keyless messages,
/// and not those behind a large batch that waits for it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t4_an_open_producer_delays_only_its_own_key() {
    let project = Project::declare(&streams("")).await;
    let (mut open, mut large, mut same) = (project.session().await, project.session().await, project.session().await);
    open.run("begin; select {schema}.produce('orders', 'x', key => 'k1', concurrency => 'ordered')").await;
    let large = tokio::spawn(async move { large.number(&batch(1, 100)).await });
    let same = tokio::spawn(async move {
        same.run("select {schema}.produce('orders', 'x', key => 'k1', concurrency => 'ordered')").await;
    });
    let waits = "select count(*) from pg_locks where locktype = 'advisory' and not granted";
    wait_for("the others of the key wait", LIMIT, async || project.number(waits).await >= 1).await;
    let mut other = project.session().await;
    for number in 0..100 {
        let options = match number % 4 {
            0 => String::new(),
            1 => ", key => 'k1'".to_owned(),
            2 => ", key => 'k1', concurrency => 'exclusive'".to_owned(),
            _ => format!(", key => 'other{number}', concurrency => 'ordered'"),
        };
        let one = format!("select {{schema}}.produce('orders', 'x'{options})");
        timeout(LIMIT, other.run(&one)).await.unwrap_or_else(|_| panic!("it waits: {one}"));
    }
    assert!(!large.is_finished() && !same.is_finished(), "they wait for the key");
    open.run("commit").await;
    assert_eq!(large.await.unwrap(), 100);
    same.await.unwrap();
}

/// T4, in time. How long others take from their produce to their handler, without a producer that keeps its transaction open,
/// as the first behind one, and as the next: in the middle of a soak's many at most 20 ms more. All arrive while the transaction is open.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t4_an_open_producer_delays_others_by_20_ms_at_most() {
    let project = Project::declare(&streams("")).await;
    let (sender, mut arrived) = tokio::sync::mpsc::unbounded_channel();
    let handler = move |message: Message| {
        let payload = String::from_utf8(message.payload.unwrap()).unwrap();
        sender.send((payload, Instant::now())).expect("the test listens");
        done()
    };
    let host = project.host("email", handler).await;
    let (mut open, mut other) = (project.session().await, project.session().await);
    let mut took: [Vec<Duration>; 3] = Default::default();
    for round in 0..rounds(30, 900) {
        let place = round % 3;
        if place == 1 {
            open.run("begin; select {schema}.produce('orders', 'open', key => 'k', concurrency => 'ordered')").await;
        }
        let options = match round / 3 % 4 {
            0 => "",
            1 => ", key => 'k'",
            2 => ", key => 'other', concurrency => 'ordered'",
            _ => ", key => 'other', concurrency => 'exclusive'",
        };
        let began = Instant::now();
        other.run(&format!("select {{schema}}.produce('orders', '{round}'{options})")).await;
        let (payload, at) = timeout(LIMIT, arrived.recv()).await.expect("it arrives").unwrap();
        assert_eq!(payload, round.to_string(), "and nothing of the open transaction does");
        took[place].push(at - began);
        if place == 2 {
            open.run("commit").await;
            let (payload, _) = timeout(LIMIT, arrived.recv()).await.expect("it arrives").unwrap();
            assert_eq!(payload, "open");
        }
    }
    host.drain().await;
    let [without, first, next] = took.map(|mut took| {
        took.sort_unstable();
        took[took.len() / 2]
    });
    println!("without an open producer {without:?}, first behind one {first:?}, next {next:?}");
    let most = without + Duration::from_millis(20);
    assert!(!is_soak() || next <= most, "{next:?} beside an open producer, else {without:?}");
    assert!(!is_soak() || first <= most, "{first:?} as the first beside an open producer, else {without:?}");
}

/// T6, must-show 5. Batches of many producers with the same keys in opposite order: nobody deadlocks, whatever the modes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t6_batches_with_keys_in_opposite_order_do_not_deadlock() {
    let project = Project::declare(&streams("")).await;
    let mut producers = JoinSet::new();
    for number in 0..8 {
        let mut session = project.session().await;
        let order = if number % 2 == 0 { "n" } else { "-n" };
        let array = |element: &str| format!("array(select {element} from generate_series(1, 40) n order by {order})");
        let sql = format!(
            "select count(*) from {{schema}}.produce_batch('orders', {}, p_keys => {}, p_concurrencies => {}, \
             p_compactions => {}, p_idempotency_keys => {})",
            array("'x'::bytea"),
            array("'k' || n"),
            array("case when n % 2 = 0 then 'ordered' else 'exclusive' end"),
            array("n % 3 > 0"),
            array("'i' || n % 7"),
        );
        let sql = if number < 4 { sql.replace(", p_idempotency_keys", ", p_routing_keys") } else { sql };
        // The same idempotency key for other messages is a conflict, so each producer of them has its own.
        let sql = sql.replace("'i' || n % 7", &format!("'{number}.' || n"));
        producers.spawn(async move {
            for _ in 0..20 {
                assert_eq!(session.number(&sql).await, 40);
            }
        });
    }
    while let Some(joined) = producers.join_next().await {
        joined.expect("no deadlock");
    }
}

/// O4, O5, O6. Slow and rolled-back producers on ordered keys: each key's messages are delivered in the order their
/// producers confirmed them, none is lost, and no rollback stalls a key. The gap rule's test with keys.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn o4_one_key_is_delivered_in_commit_order() {
    let project = Project::declare(&streams("")).await;
    let delivered = Arc::new(Mutex::new(HashMap::<String, Vec<String>>::new()));
    let mut hosts = Vec::new();
    for _ in 0..2 {
        let delivered = Arc::clone(&delivered);
        let handler = move |message: Message| {
            let payload = String::from_utf8(message.payload.unwrap()).unwrap();
            delivered.lock().unwrap().entry(message.key.unwrap()).or_default().push(payload);
            done()
        };
        hosts.push(project.host("email", handler).await);
    }
    let seed = fastrand::u64(..1 << 32);
    println!("seed {seed}");
    let until = Instant::now() + Duration::from_secs(rounds(5, 60));
    // Confirmed before the next began: taken under the key's own lock, which is held over the commit.
    let confirmed = Arc::new((0..6).map(|_| tokio::sync::Mutex::new(Vec::new())).collect::<Vec<_>>());
    let mut producers = JoinSet::new();
    for number in 0..12 {
        let (session, confirmed) = (project.session().await, Arc::clone(&confirmed));
        producers.spawn(slow_producer(session, confirmed, number, seed, until));
    }
    while let Some(joined) = producers.join_next().await {
        joined.unwrap();
    }
    all_done(&project).await;
    for host in hosts {
        host.drain().await;
    }
    let delivered = delivered.lock().unwrap().clone();
    let mut count = 0;
    for (key, confirmed) in confirmed.iter().enumerate() {
        let confirmed = confirmed.lock().await;
        assert_eq!(
            delivered.get(&format!("k{key}")).cloned().unwrap_or_default(),
            *confirmed,
            "seed {seed}, key {key}"
        );
        count += confirmed.len();
    }
    assert!(count > 50, "only {count} messages: this shows nothing");
}

/// Produces to two keys a transaction, in either order of statements, with a sleep before its end; one in five is rolled back.
async fn slow_producer(
    mut session: Session,
    confirmed: Arc<Vec<tokio::sync::Mutex<Vec<String>>>>,
    number: u64,
    seed: u64,
    until: Instant,
) {
    let mut random = fastrand::Rng::with_seed(seed + number);
    let mut count = 0;
    while Instant::now() < until {
        let (low, high) = (random.usize(0..3), random.usize(3..6));
        let payload = format!("{number}-{count}");
        count += 1;
        session.run("begin").await;
        for key in [low, high] {
            let one =
                format!("select {{schema}}.produce('orders', '{payload}', key => 'k{key}', concurrency => 'ordered')");
            session.run(&one).await;
        }
        // Whoever has both keys' locks in the database is the only one here, so the order of noting is that of commits.
        let (mut first, mut second) = (confirmed[low].lock().await, confirmed[high].lock().await);
        tokio::time::sleep(Duration::from_millis(random.u64(0..10))).await;
        if random.u32(0..5) == 0 {
            session.run("rollback").await;
        } else {
            session.run("commit").await;
            first.push(payload.clone());
            second.push(payload);
        }
    }
}

/// Two transactions that each lock more keys than one may, in several calls: one of them gets 40P01, and neither waits for
/// ever; also where one waits for a key and the other for the whole stream.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_transactions_with_very_many_ordered_keys_end() {
    let project = Project::declare(&streams("")).await;
    let (mut first, mut second) = (project.session().await, project.session().await);
    for (session, key) in [(&mut first, 'a'), (&mut second, 'b')] {
        session.run("begin").await;
        for number in 0..60 {
            session.run(&one(&format!("{key}{number}"))).await;
        }
    }
    let rest = |key: char| (60..70).map(move |number| one(&format!("{key}{number}"))).collect::<Vec<_>>();
    let (first_ended, second_ended) = tokio::join!(all(first, rest('a')), all(second, rest('b')));
    let deadlocks =
        [&first_ended, &second_ended].iter().filter(|ended| matches!(ended, Err(code) if code == "40P01")).count();
    assert!(deadlocks <= 1 && (first_ended.is_ok() || second_ended.is_ok()), "{first_ended:?} {second_ended:?}");

    // The same key again and again is one lock.
    let mut same = project.session().await;
    same.run("begin").await;
    for _ in 0..100 {
        same.run(&one("same")).await;
    }
    let stream = "select count(*) from pg_locks where pid = pg_backend_pid() and locktype = 'advisory' and mode = 'ExclusiveLock' and objsubid = 2";
    assert_eq!(same.number(stream).await, 0, "the stream's ordered lock is shared");
}

fn one(key: &str) -> String {
    format!("select {{schema}}.produce('orders', 'x', key => '{key}', concurrency => 'ordered')")
}

/// Runs statements and commits; the SQLSTATE of the first that fails.
async fn all(mut session: Session, statements: Vec<String>) -> Result<(), String> {
    for statement in statements.into_iter().chain(["commit".to_owned()]) {
        let ran = timeout(LIMIT, session.try_run(&statement)).await.expect("it does not wait for ever");
        ran.map_err(|error| error.as_database_error().and_then(|error| error.code()).unwrap_or_default().into_owned())?;
    }
    Ok(())
}

/// What may have a key's rows locked, each in a transaction that is not committed yet.
const HOLDERS: [&str; 9] = ["claim", "settle", "dead", "recover", "seek", "seek key", "pause", "skip", "redrive"];

/// E10. Goal: whatever the key is in, leased, running, paused, blocked by a retry or a dead letter, and whatever of it has a
/// transaction open, a claim, a settle, a recovery, a seek, an operator, no producer of the key waits. Method: the COMMIT of
/// each is kept back by a proxy, and every kind of produce runs under a lock timeout meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn e10_no_consumer_blocks_a_producer_of_its_key() {
    for holder in HOLDERS {
        let project = Project::declare(&streams("")).await;
        let host = engine::register(&project.database, "hand", LIMIT).await.unwrap();
        let group = project.group("email").await;
        let wanted = Wanted { messages: 10, bytes: 1 << 20, retries: 10 };
        let batch = |n: usize| {
            let mut batch: Vec<_> =
                (0..3).map(|m| keyed("ordered", Concurrency::Ordered, &format!("{n}.{m}"))).collect();
            batch.push(keyed("exclusive", Concurrency::Exclusive, &n.to_string()));
            batch.push(version("compacted", Concurrency::Ordered, &n.to_string()));
            batch
        };
        project.produce("orders", &batch(0)).await;
        let mut claimed = Vec::new();
        if holder != "claim" {
            claimed = engine::claim(&project.database, host, &group, &request(&[], wanted)).await.unwrap().claimed;
            assert_eq!(claimed.len(), 5);
        }
        let failure = || Failure { class: FailureClass::Failed, error: "no".into() };
        let settlements = |verdict: Verdict| -> Vec<Settlement> {
            let settled = claimed.iter().map(|one| Settlement {
                keyed: one.keyed.clone(),
                ..Settlement::plain(one.token, one.message.id, verdict.clone())
            });
            settled.collect()
        };
        let dead = settlements(Verdict::Dead { attempts: 1, failure: failure() });
        if matches!(holder, "skip" | "redrive") {
            engine::settle(&project.database, host, &group, &dead[..1]).await.unwrap();
        }
        if holder == "recover" {
            project.run("update {schema}.host set expires_at = now() - interval '1 minute'").await;
        }
        produce_all(&project, &batch(1), holder).await; // leased, running, blocked

        // These are one statement each, so their transaction is begun here.
        let statement = match holder {
            "claim" => turn_statement(group.id, &host.to_string(), 10, 10),
            "pause" => "select {schema}.pause_key(1, 'ordered')".to_owned(),
            _ => String::new(),
        };
        if !statement.is_empty() {
            let mut session = project.session().await;
            session.run(&format!("begin; {statement}")).await;
            produce_all(&project, &batch(2), holder).await;
            session.run("commit").await;
            produce_all(&project, &batch(3), holder).await;
            continue;
        }

        let proxy = Proxy::of_commits(&project.database.url().await, |_| Fate::Late);
        let behind = Database::connect(&Connect::parse(proxy.url()).unwrap(), 4, "millstream").await.unwrap();
        let group_name = "email";
        let work = async {
            match holder {
                "settle" => drop(engine::settle(&behind, host, &group, &settlements(Verdict::Done)).await.unwrap()),
                "dead" => drop(engine::settle(&behind, host, &group, &dead).await.unwrap()),
                "recover" => {
                    let orphaned = engine::orphaned_groups(&behind, host).await.unwrap().remove(0);
                    assert_eq!(engine::recover(&behind, host, orphaned).await.unwrap(), 5);
                }
                "seek" => {
                    let to = Start::Earliest;
                    drop(engine::seek(&behind, group.id, group.stream_id, group_name, &to).await.unwrap());
                }
                "seek key" => {
                    project
                        .run("update {schema}.message_key_lease set host_id = null; delete from {schema}.claim")
                        .await;
                    drop(engine::seek_key(&behind, group_name, "ordered", &Start::Earliest, LIMIT).await.unwrap());
                }
                "skip" => drop(engine::skip_key(&behind, (group.id, group.stream_id), "ordered").await.unwrap()),
                _ => {
                    let ids = engine::pick_dead(&project.database, group.id, &DeadFilter::default()).await.unwrap();
                    assert_eq!(engine::redrive(&behind, &ids, false, |_| ()).await.unwrap().redriven, 1);
                }
            }
        };
        proxy.begin();
        let meanwhile = async {
            wait_for("its COMMIT is kept back", LIMIT, async || proxy.kept() > 0).await;
            produce_all(&project, &batch(2), holder).await;
            proxy.send_on();
        };
        tokio::join!(work, meanwhile);
        behind.close().await;
        produce_all(&project, &batch(3), holder).await;
    }
}

/// Every kind of produce, one at a time and as a batch: one that waits for a lock fails. Ten messages.
async fn produce_all(project: &Project, batch: &[NewMessage], holder: &str) {
    let mut session = project.session().await;
    session.run("set lock_timeout = '3s'").await;
    for options in [
        "",
        ", key => 'ordered'",
        ", key => 'ordered', concurrency => 'ordered'",
        ", key => 'exclusive', concurrency => 'exclusive', idempotency_key => clock_timestamp()::text",
        ", key => 'compacted', concurrency => 'ordered', compaction => true, rank => 3",
    ] {
        let one = format!("select {{schema}}.produce('orders', 'one'{options})");
        session.try_run(&one).await.unwrap_or_else(|error| panic!("{holder}: {one}: {error}"));
    }
    let produced = timeout(Duration::from_secs(10), project.produce("orders", batch)).await;
    assert_eq!(produced.unwrap_or_else(|_| panic!("{holder}: a batch waits")).len(), 5);
}
