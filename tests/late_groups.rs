//! A group that begins late: what there is for it of a compacted stream while producers go on, and that nothing of other
//! groups exists for it.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use millstream::{
    engine::{self, GroupState},
    handler::{Concurrency, Handler, Message, NewMessage},
};
use tokio::task::JoinSet;

use crate::support::{
    engine::{Project, Session, done, text},
    handlers::rounds,
    keyed::{LIMIT, failed, keyed, rejected, version},
    wait_for,
};

const STREAM: &str = "[streams.orders]\n";

fn group(name: &str, settings: &str) -> String {
    format!(
        "[groups.{name}]\nstream = \"orders\"\nhandler = \"{name}.wasm\"\nretry = {{ max_attempts = 2, base = \"1h\", max = \"1h\" }}\n{settings}\n"
    )
}

/// Everything that was delivered to a group.
fn noting() -> (Arc<Mutex<Vec<Message>>>, Arc<dyn Handler>) {
    let delivered = Arc::new(Mutex::new(Vec::new()));
    let noted = Arc::clone(&delivered);
    let handler = move |message: Message| {
        noted.lock().unwrap().push(message);
        done()
    };
    (delivered, Arc::new(handler))
}

/// Nothing is left to claim or to end for a group.
async fn is_through(project: &Project, group: &str) -> bool {
    let left = "select (select count(*) from {schema}.message_log_1 l where l.id > c.claimed)
            + (select count(*) from {schema}.cursor_gap where group_id = g.id) + (select count(*) from {schema}.claim where group_id = g.id)
            + (select count(*) from {schema}.exception where group_id = g.id)
        from {schema}.consumer_group g join {schema}.cursor c on c.group_id = g.id where g.name = 'GROUP'";
    project.number(&left.replace("GROUP", group)).await == 0
}

const MODES: [Concurrency; 3] = [Concurrency::Parallel, Concurrency::Exclusive, Concurrency::Ordered];

/// Produces until `until`: each time a version of one of its keys and a message without, and rolls one in five back.
async fn producer(mut session: Session, number: usize, seed: u64, until: Instant) {
    let mut random = fastrand::Rng::with_seed(seed + number as u64);
    while Instant::now() < until {
        let key = random.usize(0..9);
        let mode = MODES[key % 3].as_str();
        session
            .run(&format!(
                "begin; select {{schema}}.produce('orders', 'plain');
                 select {{schema}}.produce('orders', 'version', key => 'busy{key}', concurrency => '{mode}', compaction => true)"
            ))
            .await;
        tokio::time::sleep(Duration::from_millis(random.u64(0..8))).await;
        session.run(if random.u32(0..5) == 0 { "rollback" } else { "commit" }).await;
    }
}

/// G3. Goal: a group that is declared on a compacted stream while producers run gets each live key once, in position order,
/// and what comes from then on without a repeat or a hole. Method: keys that rest meanwhile come once each, in order; of
/// busy keys each delivery tells how many versions were passed over, so that none is missing; keyless messages come once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn g3_a_late_group_gets_each_live_key_once_and_then_live_traffic() {
    let project = Project::declare(STREAM).await;
    let seed = fastrand::u64(..1 << 32);
    println!("seed {seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    for round in 0..4 {
        let batch: Vec<_> = (0..300)
            .map(|n| version(&format!("quiet{n}"), MODES[n % 3], &format!("{round}")))
            .filter(|_| random.u32(0..3) > 0 || round == 0)
            .collect();
        project.produce("orders", &batch).await;
    }
    let rest = project.number("select last_value from {schema}.message_log_1_id").await;
    let until = Instant::now() + Duration::from_secs(rounds(4, 60));
    let mut producers = JoinSet::new();
    for number in 0..4 {
        producers.spawn(producer(project.session().await, number, seed, until));
    }
    tokio::time::sleep(Duration::from_millis(500)).await;
    let project = project.declare_again(&format!("{STREAM}{}", group("late", "slots = 1"))).await;
    let (delivered, handler) = noting();
    let host = project.host_with(&[("late", handler)]).await;
    while let Some(joined) = producers.join_next().await {
        joined.unwrap();
    }
    wait_for("the late group is through", LIMIT, async || is_through(&project, "late").await).await;
    host.drain().await;
    let delivered = delivered.lock().unwrap().clone();

    let ids = async |sql: &str| -> Vec<i64> {
        sqlx::query_scalar(project.database.schema.sql(sql)).fetch_all(&project.database.pool).await.unwrap()
    };
    let quiet: Vec<i64> =
        delivered.iter().filter(|message| is_of(message, "quiet")).map(|message| message.id).collect();
    let live =
        ids("select message_id from {schema}.compaction_head_1 where message_key like 'quiet%' order by 1").await;
    assert_eq!(quiet, live, "seed {seed}: each key that rested once, in position order");
    let mut plain: Vec<i64> = delivered.iter().filter(|one| one.key.is_none()).map(|one| one.id).collect();
    plain.sort_unstable();
    let committed = ids("select id from {schema}.message_log_1 where message_key is null order by 1").await;
    assert!(committed.len() > 100, "only {} messages: this shows nothing", committed.len());
    assert_eq!(plain, committed, "seed {seed}: keyless messages once each");
    let mut last: BTreeMap<&str, i64> = BTreeMap::new();
    for message in delivered.iter().filter(|message| message.key.is_some()) {
        let before = last.insert(message.key.as_deref().unwrap(), message.id).unwrap_or(0);
        assert!(before < message.id, "seed {seed}: {message:?} after {before}");
    }
    let last: BTreeSet<i64> = last.into_values().collect();
    let winners = ids("select message_id from {schema}.compaction_head_1").await;
    assert_eq!(last, winners.into_iter().collect(), "seed {seed}: the last of each key is its winner");
    let told: u64 =
        delivered.iter().filter(|message| message.key.is_some()).map(|message| 1 + u64::from(message.skipped)).sum();
    let versions =
        project.number("select count(*) from {schema}.message_log_1 where compaction_rank is not null").await;
    assert_eq!(told, versions.unsigned_abs(), "seed {seed}: every version was delivered or told of as passed over");
    assert!(delivered.iter().any(|message| message.id > rest && is_of(message, "busy")), "seed {seed}");
}

fn is_of(message: &Message, key: &str) -> bool {
    message.key.as_deref().is_some_and(|found| found.starts_with(key))
}

/// The policies that a dead letter of an ordered key may meet.
const POLICIES: [&str; 3] = ["block", "skip", "rest"];

/// G4, D8. Goal: dead letters under each policy, retries, paused keys, and a group that is paused itself are nothing to groups
/// that begin later, whatever their policy, nor is what these do anything to the others. Method: all rows of the groups that
/// were first are the same before and after, and what the late ones were told is compared with the log.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn g4_what_other_groups_did_does_not_exist_for_a_new_one() {
    let first: String = POLICIES.map(|policy| group(policy, &format!("on_dead_letter = \"{policy}\""))).concat();
    let project = Project::declare(&format!("{STREAM}{first}")).await;
    let ordered = |key: &str, payload: &str| keyed(key, Concurrency::Ordered, payload);
    let batch: Vec<NewMessage> = vec![
        ordered("dies", "fine"),
        ordered("dies", "dies"),
        ordered("dies", "behind"),
        ordered("retries", "retries"),
        ordered("retries", "behind"),
        ordered("paused", "held"),
        keyed("exclusive", Concurrency::Exclusive, "dies"),
        text("dies"),
        text("fine"),
        version("state", Concurrency::Ordered, "old"),
    ];
    for policy in POLICIES {
        let group = project.group(policy).await;
        engine::pause_key(&project.database, group.id, "paused").await.unwrap();
    }
    project.produce("orders", &batch).await;
    let ends: Arc<dyn Handler> = Arc::new(|message: Message| match message.payload.as_deref() {
        Some(b"dies") => rejected(),
        Some(b"retries") => failed(),
        _ => done(),
    });
    let host = project.host_with(&POLICIES.map(|policy| (policy, Arc::clone(&ends)))).await;
    for (policy, dead) in POLICIES.into_iter().zip([3, 3, 4]) {
        wait_for("its dead letters", LIMIT, async || state(&project, policy).await.dead == dead).await;
        wait_for("its retry", LIMIT, async || state(&project, policy).await.retrying == 1).await;
    }
    wait_for("nothing is in flight", LIMIT, async || project.number("select count(*) from {schema}.claim").await == 0)
        .await;
    host.drain().await;
    let group = project.group("block").await;
    engine::pause(&project.database, group.id, "block").await.unwrap();
    // Of the old groups, what has just a row is a part of the state.
    let rows = async || -> Vec<String> {
        let sql = "select c::text from {schema}.cursor c where group_id <= 3 union all
            select e::text from {schema}.exception e where group_id <= 3 union all
            select d::text from {schema}.dead_letter d where group_id <= 3 union all
            select l::text from {schema}.message_key_lease l where group_id <= 3 union all
            select g::text from {schema}.consumer_group g where id <= 3 order by 1";
        sqlx::query_scalar(project.database.schema.sql(sql)).fetch_all(&project.database.pool).await.unwrap()
    };
    let before = rows().await;
    assert!(before.len() > 20, "{before:#?}");

    let late: String = POLICIES
        .map(|policy| self::group(&format!("late_{policy}"), &format!("on_dead_letter = \"{policy}\"")))
        .concat();
    let late_toml = format!("{STREAM}{first}{late}");
    let config = millstream::config::parse(&late_toml, std::path::Path::new("streams.toml"), &|_| None).unwrap();
    engine::apply(&project.database, &config).await.unwrap();
    for policy in POLICIES {
        let name = format!("late_{policy}");
        let fresh = state(&project, &name).await;
        let figures = [fresh.dead, fresh.retrying, fresh.deferred, fresh.in_flight, fresh.blocked_keys, fresh.delayed];
        assert_eq!((fresh.lag, figures, fresh.paused), (batch.len() as i64, [0; 6], false), "{name}");
        let (delivered, handler) = noting();
        let host = project.host_with(&[(&*name, handler)]).await;
        wait_for("the late group is through", LIMIT, async || is_through(&project, &name).await).await;
        host.drain().await;
        let delivered = delivered.lock().unwrap().clone();
        let mut ids: Vec<i64> = delivered.iter().map(|message| message.id).collect();
        ids.sort_unstable();
        assert!(ids.iter().copied().eq(1..=batch.len() as i64), "{name}: each once: {ids:?}");
        let of_key: Vec<i64> = delivered.iter().filter(|one| is_of(one, "dies")).map(|one| one.id).collect();
        assert_eq!(of_key, [1, 2, 3], "{name}: in order");
        for message in &delivered {
            let told = (message.attempt, message.gap_since, message.skipped, message.redriven, message.replay);
            assert_eq!(told, (1, None, 0, false, false), "{name}: {message:?}");
        }
        assert_eq!(state(&project, &name).await.dead, 0);
        let leases = format!(
            "select count(*) from {{schema}}.message_key_lease where group_id = (select id from {{schema}}.consumer_group where name = '{name}')"
        );
        assert_eq!(project.number(&leases).await, 0, "{name}: no key is held");
        assert_eq!(rows().await, before, "{name} changes nothing of the others");
    }
}

async fn state(project: &Project, group: &str) -> GroupState {
    let state = engine::inspect(&project.database).await.unwrap();
    state.groups.into_iter().find(|found| found.group == group).unwrap()
}
