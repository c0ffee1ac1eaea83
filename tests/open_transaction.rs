//! Must-show 3 of the produce API: a transaction that a caller leaves open delays the messages that need its idempotency key,
//! its ordered key or its compacted key, and nothing else: not other messages of the stream, not coalesced produces, not
//! settles with outbox messages, those that share a batch with blocked ones included. In `make soak` it stays open for 30 s.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use millstream::{
    client::{Client, Concurrency, ProduceOptions},
    handler::{Finished, Handler, Handling, Message, NewMessage, SqlValue, SqlWants},
};
use tokio::{task::JoinSet, time::timeout};
use tokio_util::sync::CancellationToken;

use crate::support::{
    engine::{Project, Session, done, text},
    guest::{as_role, project_with_role, run, with_role},
    handlers::rounds,
    wait_for,
};

/// A ceiling against hangs, and no measure of speed.
const LIMIT: Duration = Duration::from_secs(60);

/// Messages of each kind that meet the locks of the open transaction: more than a group settles alone at a time.
const BLOCKED: usize = 8;

/// A short lease: once in it a host compares what it holds, which must not wait for the open transaction either.
const STREAMS: &str = r#"
    [host]
    lease = "1500ms"
    heartbeat = "500ms"
    [streams.orders]
    [streams.receipts]
    [groups.worker]
    stream = "orders"
    handler = "worker.wasm"
    retry = { max_attempts = 1, base = "1ms" }
    [groups.reader]
    stream = "receipts"
    handler = "reader.wasm"
"#;

/// What a handler produces for a message: its payload says the kind, and a number where each is another.
fn receipt(message: Message) -> Finished {
    let payload = String::from_utf8(message.payload.unwrap()).unwrap();
    let (kind, number) = payload.split_once(' ').unwrap();
    let receipt = NewMessage { stream: "receipts".into(), ..text(&payload) };
    let produced = match kind {
        "once" => NewMessage { idempotency_key: Some(format!("once{number}")), ..text("same") },
        "ordered" => NewMessage {
            key: Some(format!("ordered{number}")),
            concurrency: Some(Concurrency::Ordered),
            ..receipt.clone()
        },
        "compacted" => {
            NewMessage { key: Some(format!("compacted{number}")), compaction: Some(true), ..receipt.clone() }
        }
        "none" => return done(),
        _ => receipt.clone(),
    };
    Finished { produced: vec![NewMessage { stream: "receipts".into(), ..produced }], ..done() }
}

fn options(kind: &str, number: &str) -> ProduceOptions {
    let key = Some(format!("{kind}{number}"));
    match kind {
        "once" => ProduceOptions { idempotency_key: key, ..ProduceOptions::default() },
        "ordered" => {
            ProduceOptions { message_key: key, concurrency: Some(Concurrency::Ordered), ..ProduceOptions::default() }
        }
        "compacted" => ProduceOptions { message_key: key, compaction: Some(true), ..ProduceOptions::default() },
        _ => ProduceOptions::default(),
    }
}

const KINDS: [&str; 5] = ["once", "ordered", "compacted", "plain", "none"];

/// Receipts of one round that need nothing of it: 80 of the worker, and 60 of the client.
const OTHERS: usize = 80 + 60;

/// The caller: one message of each kind in `receipts`, and no end in sight.
async fn open_transaction(project: &Project) -> Session {
    let mut session = project.session().await;
    session
        .run(
            "begin; select {schema}.produce('receipts', 'same', idempotency_key => 'once');
             select {schema}.produce('receipts', 'x', key => 'ordered', concurrency => 'ordered');
             select {schema}.produce('receipts', 'x', key => 'compacted', compaction => true)",
        )
        .await;
    session
}

/// Messages that the worker has not settled.
const HELD: &str = "select (select coalesce(sum(upper(r) - lower(r)), 0)::bigint
        from {schema}.claim c join {schema}.consumer_group g on g.id = c.group_id, unnest(c.pending) r where g.name = 'worker')
    + (select count(*) from {schema}.exception e join {schema}.consumer_group g on g.id = e.group_id where g.name = 'worker')";

/// Receipts that were delivered: those of the keys that the open transaction holds, and the others, with its idempotency key's.
#[derive(Default)]
struct Read {
    needing: AtomicUsize,
    others: AtomicUsize,
}

impl Read {
    fn note(&self, message: &Message) {
        let is_needing = matches!(message.key.as_deref(), Some("ordered" | "compacted"));
        if is_needing { &self.needing } else { &self.others }.fetch_add(1, Relaxed);
    }
}

/// Messages for the handler, and produces of a client, none of which needs what the open transaction holds. All must come
/// to their end. `blocked` of their like are produced in their midst; they must leave the transactions they share.
async fn others_flow(
    project: &Project,
    client: &Client,
    read: &Read,
    round: usize,
    blocked: usize,
    blocked_in_all: usize,
) {
    let messages: Vec<_> = (0..100).map(|n| text(&format!("{} {round}.{n}", KINDS[n % 5]))).collect();
    let among: Vec<_> = (0..blocked).map(|n| text(&format!("{} ", KINDS[n % 3]))).collect();
    project.produce("orders", &[&messages[..50], &among, &messages[50..]].concat()).await;
    let stream = client.raw_stream("receipts");
    let mut produces = JoinSet::new();
    for number in 0..60 {
        let stream = stream.clone();
        let options = options(KINDS[number % 4], &format!("client{round}.{number}"));
        produces.spawn(async move { stream.produce(b"x".as_slice(), options).await.unwrap() });
    }
    let produced = timeout(LIMIT, produces.join_all()).await.expect("coalesced produces flow");
    assert!(produced.iter().all(|produced| !produced.duplicate && !produced.superseded));
    let claimed = "select claimed from {schema}.cursor c join {schema}.consumer_group g on g.id = c.group_id where g.name = 'worker'";
    let all = ((round + 1) * messages.len() + blocked_in_all) as i64;
    wait_for("deliveries with outbox messages are settled", LIMIT, async || {
        project.number(claimed).await == all && project.number(HELD).await == blocked_in_all as i64
    })
    .await;
    let receipts = (round + 1) * OTHERS;
    wait_for("what they produced is delivered", LIMIT, async || read.others.load(Relaxed) == receipts).await;
    assert_eq!(read.needing.load(Relaxed), 0, "nothing that needs its keys is delivered, nor what it produced");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_transaction_left_open_delays_only_what_needs_its_keys() {
    let project = Project::declare(STREAMS).await;
    let read = Arc::new(Read::default());
    let noted = Arc::clone(&read);
    let reader = move |message: Message| {
        noted.note(&message);
        done()
    };
    let host =
        project.host_with(&[("worker", Arc::new(receipt) as Arc<dyn Handler>), ("reader", Arc::new(reader))]).await;
    let client = Client::connect(&project.database.url().await).await.unwrap();
    let mut open = open_transaction(&project).await;
    let stream = client.raw_stream("receipts");
    let mut delayed = JoinSet::new();
    for number in 0..3 * BLOCKED {
        let (stream, options) = (stream.clone(), options(KINDS[number % 3], ""));
        delayed.spawn(async move { stream.produce(b"same".as_slice(), options).await.unwrap() });
    }
    // Longer than two leases.
    let (began, at_least) = (Instant::now(), rounds(Duration::from_secs(4), Duration::from_secs(30)));
    let (mut round, mut blocked_in_all) = (0, 0);
    while round < 4 || began.elapsed() < at_least {
        let blocked = if round == 0 { 3 * BLOCKED } else { usize::from(round < 10) * 3 };
        blocked_in_all += blocked;
        others_flow(&project, &client, &read, round, blocked, blocked_in_all).await;
        round += 1;
    }
    assert!(delayed.try_join_next().is_none(), "produces that need its keys wait");
    open.run("commit").await;
    let delayed = timeout(LIMIT, delayed.join_all()).await.expect("they go on");
    assert_eq!(delayed.iter().filter(|produced| produced.duplicate).count(), BLOCKED);
    wait_for("nothing is left over", LIMIT, async || project.left_over().await == 0).await;
    // Of the blocked, those under the idempotency key are one message.
    let once = BLOCKED + blocked_in_all / 3;
    let all = round * OTHERS + 3 * BLOCKED + blocked_in_all + 3 - once;
    let stored = project.number("select count(*) from {schema}.message_log_2").await;
    assert_eq!(stored, i64::try_from(all).unwrap());
    assert_eq!(project.number("select count(*) from {schema}.dead_letter").await, 0);
    // Of the compacted key only its newest version needs to come.
    let needing = read.needing.load(Relaxed);
    let compacted = 1 + BLOCKED + blocked_in_all / 3;
    let most = all - round * OTHERS - 1;
    assert!((most - compacted + 1..=most).contains(&needing), "{needing} of {most}");
    assert_eq!(read.others.load(Relaxed), round * OTHERS + 1, "each once, also that of the idempotency key");
    client.close().await;
    host.drain().await;
}

/// Notes its message with SQL, and leaves a receipt.
struct Noting;

impl Handler for Noting {
    fn handle<'a>(&'a self, message: Message, _: &'a CancellationToken) -> Handling<'a> {
        Box::pin(async move {
            let sql = message.sql.clone().expect("a grant");
            let payload = String::from_utf8(message.payload.clone().unwrap()).unwrap();
            let note = "insert into noted values ($1)";
            let noted = run(&*sql, note, &[SqlValue::Text(payload)], SqlWants::Count, LIMIT).await;
            // Whatever it says: a connection that is lost is not the handler's failure.
            if noted.is_ok() { receipt(message) } else { done() }
        })
    }
}

/// A delivery that ran SQL holds its connection while it waits for the open transaction: for 5 s, then it comes again, no
/// attempt counted. As many of them as there are connections hold up nothing for good, neither deliveries like them nor the
/// comparison after a lease, without which a lost delivery would never come again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn deliveries_with_sql_that_meet_an_open_transaction_let_others_by() {
    let (project, role) = project_with_role("").await;
    let streams =
        with_role(&role, "").replace("[streams.orders]", "lease = \"1500ms\"\nheartbeat = \"500ms\"\n[streams.orders]");
    let project = project.declare_again(&streams).await;
    as_role(&project, &role, "create table public.noted (what text)").await;
    let host = project.host_with(&[("email", Arc::new(Noting) as Arc<dyn Handler>)]).await;
    let mut open = open_transaction(&project).await;
    project.produce("orders", &vec![text("once "); 16]).await;
    let blocked =
        "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'";
    wait_for("all of them wait", LIMIT, async || project.number(blocked).await == 16).await;
    let (began, at_least) = (Instant::now(), rounds(Duration::from_secs(6), Duration::from_secs(30)));
    let mut round = 0;
    while began.elapsed() < at_least {
        round += 1;
        let free: Vec<_> = (0..10).map(|n| text(&format!("plain {round}.{n}"))).collect();
        project.produce("orders", &free).await;
        let noted = "select count(*) from public.noted where what like 'plain %'";
        wait_for("others go on", LIMIT, async || project.number(noted).await == 11 * round - 1).await;
        // As a turn whose reply is lost leaves it: the host knows nothing of this one until it compares.
        project
            .run(
                "begin; select pg_advisory_xact_lock({lock_class} + 1, 1);
                 with drawn as (select id from {schema}.produce('orders', 'plain lost')),
                 moved as (update {schema}.cursor set claimed = drawn.id from drawn)
                 insert into {schema}.claim (id, group_id, host_id, pending)
                 select nextval('{schema_text}.claim_id'), 1, h.id, int8multirange(int8range(d.id, d.id, '[]'))
                 from drawn d, {schema}.host h; commit",
            )
            .await;
        wait_for("a lost one comes again", LIMIT, async || project.number(noted).await == 11 * round).await;
    }
    assert_eq!(project.number("select count(*) from public.noted where what = 'once '").await, 0);
    open.run("commit").await;
    wait_for("nothing is left over", LIMIT, async || project.left_over().await == 0).await;
    assert_eq!(project.number("select count(*) from public.noted where what = 'once '").await, 16);
    assert_eq!(project.number("select count(*) from {schema}.dead_letter").await, 0);
    let receipts = project.number("select count(*) from {schema}.message_log_2").await;
    assert_eq!(receipts, 11 * round + 3, "the open transaction's three, of which those under its key are one");
    host.drain().await;
}
