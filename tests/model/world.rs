//! One run: a database, producers, hosts and an operator, all from one seed, until everything has ended; then the checks.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use millstream::{
    config,
    database::{Database, Schema},
};
use sqlx::Row;

use super::{admin, checks, facts::Facts, handlers::Manner, hosts, producers, trace::Trace};
use crate::support::engine::{Project, number};

/// One group for each dead letter policy, one that weakens the order, and one that drops it for what its filter lets pass.
pub const STREAMS: &str = r#"
    [host]
    lease = "LEASE"
    heartbeat = "150ms"
    drain_timeout = "400ms"
    [streams.orders]
    partition_rows = 2000
    [[streams.orders.key_rules]]
    match = "sharded*"
    concurrency = "ordered"
    shards = 3
    [streams.receipts]
    [groups.block]
    stream = "orders"
    handler = "h.wasm"
    slots = 6
    retry = { max_attempts = 3, base = "20ms", max = "60ms" }
    [groups.skip]
    stream = "orders"
    handler = "h.wasm"
    slots = 6
    on_dead_letter = "skip"
    filter = { routing_key = ["seen"] }
    retry = { max_attempts = 2, base = "20ms", max = "60ms" }
    [groups.rest]
    stream = "orders"
    handler = "h.wasm"
    slots = 4
    on_dead_letter = "rest"
    filter = { not_key = ["exclusive 1", "mixed 0"] }
    retry = { max_attempts = 4, base = "20ms", max = "60ms" }
    [groups.loose]
    stream = "orders"
    handler = "h.wasm"
    slots = 6
    concurrency_override = "exclusive"
    retry = { max_attempts = 3, base = "20ms", max = "60ms" }
    [groups.narrow]
    stream = "orders"
    handler = "h.wasm"
    slots = 4
    concurrency_override = "parallel"
    filter = { key = ["ordered*", "mixed*"] }
    retry = { max_attempts = 2, base = "20ms", max = "60ms" }
"#;

/// While something is left, some delivery begins within so long, and everything has ended within so long: ceilings against
/// hangs, for a machine that is busy with other things.
const STILL_MAX: Duration = Duration::from_secs(90);
const QUIET_MAX: Duration = Duration::from_secs(300);

/// What a run is made of; all of it follows from the seed.
pub struct World {
    pub seed: u64,
    pub database: Database,
    pub schema: Schema,
    pub host: config::Host,
    pub trace: Trace,
    pub manner: Manner,
    pub lease: Duration,
    /// Hosts only stop in good order, and no lease runs out: then every count must be exact.
    pub is_calm: bool,
    pub cuts_connections: bool,
    /// The operator pauses, seeks, skips and releases too.
    pub has_verbs: bool,
    /// Of each kind.
    pub keys: u64,
    /// Most milliseconds between two transactions of a producer.
    pub pause_ms: u64,
    /// What no host can freeze.
    pub main: tokio::runtime::Handle,
    dispatch: tracing::Dispatch,
    produced: AtomicBool,
    over: AtomicBool,
}

impl World {
    pub fn is_produced(&self) -> bool {
        self.produced.load(Relaxed)
    }

    pub fn is_over(&self) -> bool {
        self.over.load(Relaxed)
    }

    /// The database as another program would reach it, from the runtime that asks.
    pub async fn another_host(&self) -> Database {
        self.database.with_own_pool(16)
    }

    /// Makes a thread's log lines fail the test as its own would.
    pub fn log_here(&self) -> impl Fn() + Send + Sync + 'static {
        let dispatch = self.dispatch.clone();
        // Until the thread ends.
        move || std::mem::forget(tracing::dispatcher::set_default(&dispatch))
    }
}

fn world(seed: u64, project: &Project, random: &mut fastrand::Rng, is_calm: bool) -> World {
    let cuts_connections = !is_calm && random.u32(0..4) == 0;
    for part in crate::support::HOSTS_COME_AND_GO {
        project.database.expect_log(part);
    }
    if !is_calm {
        // Of a statement that was cut with its host, and then failed.
        project.database.expect_log("error occurred while testing the connection");
    }
    if cuts_connections {
        project.database.expect_log("failed to");
    }
    World {
        seed,
        database: (*project.database).clone(),
        schema: project.database.schema.clone(),
        host: project.config.host.clone(),
        trace: Trace::default(),
        manner: Manner {
            seed,
            failing: *random.choice(&[3, 15, 40]).unwrap(),
            slow: *random.choice(&[1, 5, 25]).unwrap(),
        },
        lease: project.config.host.lease,
        is_calm,
        cuts_connections,
        keys: *random.choice(&[1, 2, 4, 20]).unwrap(),
        pause_ms: *random.choice(&[5, 30, 100]).unwrap(),
        has_verbs: random.u32(0..3) > 0,
        main: tokio::runtime::Handle::current(),
        dispatch: project.database.dispatch(),
        produced: AtomicBool::new(false),
        over: AtomicBool::new(false),
    }
}

/// Runs one seed; the answer is what was violated, each with the name of its invariant.
pub async fn run(seed: u64, length: Duration) -> Vec<String> {
    let mut random = fastrand::Rng::with_seed(seed);
    let is_calm = random.u32(0..4) == 0;
    let lease = if is_calm { "60s" } else { "900ms" };
    let project = Project::declare(&STREAMS.replace("LEASE", lease)).await;
    project.run(include_str!("watch.sql")).await;
    let world = Arc::new(world(seed, &project, &mut random, is_calm));
    let nodes: Vec<_> = (0..3)
        .map(|number| {
            let world = Arc::clone(&world);
            std::thread::spawn(move || hosts::node(&world, number))
        })
        .collect();
    let producers: Vec<_> =
        (0..3).map(|number| tokio::spawn(producers::producer(Arc::clone(&world), number))).collect();
    let operator = tokio::spawn(admin::operator(Arc::clone(&world)));
    tokio::time::sleep(length).await;
    world.produced.store(true, Relaxed);
    for task in producers.into_iter().chain([operator]) {
        task.await.expect("no producer and no operator fails");
    }
    // From here on nothing befalls the hosts, so that whoever is stuck shows.
    let mut violations = Vec::new();
    if let Err(stuck) = quiet(&world).await {
        violations.push(stuck);
    }
    world.over.store(true, Relaxed);
    for node in nodes {
        tokio::task::spawn_blocking(|| node.join()).await.unwrap().expect("no host fails");
    }
    violations.extend(orphans(&world).await);
    let facts = Facts::read(&world).await;
    violations.extend(checks::all(&facts));
    println!(
        "seed {seed}: {} messages, {} deliveries, {} dead, {} hosts, {} verbs{}{}",
        facts.messages.len(),
        facts.deliveries.len(),
        facts.deaths.len(),
        facts.identities.len(),
        facts.verbs.len(),
        if is_calm { ", calm" } else { "" },
        if world.cuts_connections { ", cut connections" } else { "" },
    );
    violations
}

/// What is not at its end: anything but messages behind a key that an open dead letter blocks, or that rests.
const UNFINISHED: &str = include_str!("unfinished.sql");

/// E7. Waits until everything is at its end, or tells what is stuck: nothing began for long, and something is left.
async fn quiet(world: &World) -> Result<(), String> {
    let began = Instant::now();
    let (mut known, mut since) = (0, Instant::now());
    loop {
        let rows = sqlx::query(world.schema.sql(UNFINISHED)).fetch_all(&world.database.pool).await;
        let rows = rows.expect("look for what is unfinished");
        if rows.is_empty() {
            return Ok(());
        }
        let begun = world.trace.begun();
        if begun > known {
            (known, since) = (begun, Instant::now());
        }
        if since.elapsed() > STILL_MAX || began.elapsed() > QUIET_MAX {
            let told: Vec<String> = rows.iter().map(|row| row.get(0)).collect();
            return Err(format!("E7: stuck: {}", told.join("\n    ")));
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// E7, D4. What must not be there whatever happened.
async fn orphans(world: &World) -> Vec<String> {
    let counts = [
        ("E7: deferred messages whose key has no row", "select count(*) from {schema}.exception e where state = 'deferred' and not exists
            (select from {schema}.message_key_lease l where l.group_id = e.group_id and l.message_key = e.message_key and l.lane = e.lane)"),
        ("D4: messages both under way and open dead letters", "select count(*) from {schema}.exception e
            join {schema}.dead_letter d using (group_id, message_id) where d.redriven_at is null and d.replayed_at is null"),
        ("E7: hosts that are left over", "select count(*) from {schema}.host"),
        ("E7: rows of hosts that are gone", "select (select count(*) from {schema}.claim) + (select count(*) from {schema}.exception where host_id is not null)
            + (select count(*) from {schema}.message_key_lease where host_id is not null)"),
    ];
    let mut found = Vec::new();
    for (what, sql) in counts {
        let count = number(&world.database, sql).await;
        if count != 0 {
            found.push(format!("{what}: {count}"));
        }
    }
    found
}
