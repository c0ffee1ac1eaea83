//! Random operators: dead letters are redriven and discarded, connections of hosts are cut, groups and keys are paused,
//! resumed and sent elsewhere, and keys that are stuck are skipped and released.

use std::{collections::HashMap, sync::Arc, time::Duration};

use millstream::{
    config::Start,
    engine::{self, DeadFilter, GroupHandle},
};
use sqlx::Row;

use super::{
    producers,
    trace::{Micros, Verb, What, now},
    world::World,
};
use crate::support::engine::number;

/// Group and key (or the whole group) to since when it stands still.
type Held = HashMap<(usize, Option<String>), Micros>;

/// Most seeks of whole groups in a run: each makes much come again.
const SEEKS_MAX: u32 = 3;

/// An operator, until the producing is over. Then everything goes on that it held.
pub async fn operator(world: Arc<World>) {
    let mut random = fastrand::Rng::with_seed(world.seed.wrapping_mul(101));
    let groups = engine::load_groups(&world.database).await.expect("load the groups");
    let (mut held, mut seeks) = (Held::new(), 0);
    while !world.is_produced() {
        tokio::time::sleep(Duration::from_millis(random.u64(50..400))).await;
        look_at_producers(&world).await;
        if world.cuts_connections && random.u32(0..3) == 0 {
            cut_connections(&world).await;
        }
        let index = random.usize(..groups.len());
        let group = &groups[index];
        if world.has_verbs {
            for _ in 0..random.u32(0..4) {
                let key = producers::some_key(&world, &mut random);
                match random.u32(0..12) {
                    0 => hold_or_let_go(&world, &groups, &mut held, (index, None)).await,
                    1..4 => hold_or_let_go(&world, &groups, &mut held, (index, Some(key))).await,
                    4..7 => skip(&world, group, key).await,
                    7..9 => release(&world, group, key).await,
                    9 if seeks < SEEKS_MAX => {
                        seeks += 1;
                        seek(&world, &mut random, group).await;
                    }
                    10.. if !held.contains_key(&(index, Some(key.clone()))) => {
                        seek_key(&world, &mut random, group, key).await;
                    }
                    _ => {}
                }
            }
        }
        let dead = engine::pick_dead(&world.database, group.id, &DeadFilter::default()).await.expect("pick");
        let some: Vec<i64> = dead.into_iter().filter(|_| random.bool()).collect();
        if random.u32(0..4) == 0 {
            engine::discard(&world.database, &some, |_| ()).await.expect("discard");
        } else {
            engine::redrive(&world.database, &some, false, |_| ()).await.expect("redrive");
        }
    }
    for place in held.keys().cloned().collect::<Vec<_>>() {
        hold_or_let_go(&world, &groups, &mut held, place).await;
    }
}

/// Pauses what goes on, and resumes what stands still.
async fn hold_or_let_go(world: &World, groups: &[GroupHandle], held: &mut Held, place: (usize, Option<String>)) {
    let (database, group) = (&world.database, &groups[place.0]);
    if let Some(began) = held.remove(&place) {
        let ended = now();
        match &place.1 {
            Some(key) => assert!(engine::resume_key(database, group.id, key).await.expect("resume a key")),
            None => assert!(engine::resume(database, group.id, &group.name).await.expect("resume").changed),
        }
        let verb = Verb { group: group.name.to_string(), key: place.1, what: What::Paused, began, ended };
        return world.trace.verb(verb);
    }
    match &place.1 {
        Some(key) => assert!(engine::pause_key(database, group.id, key).await.expect("pause a key")),
        None => assert!(engine::pause(database, group.id, &group.name).await.expect("pause").changed),
    }
    held.insert(place, now());
}

async fn skip(world: &World, group: &GroupHandle, key: String) {
    let began = now();
    let skipped = engine::skip_key(&world.database, (group.id, group.stream_id), &key).await.expect("skip");
    if !skipped.is_empty() {
        note(world, group, Some(key), What::Skip(skipped), began);
    }
}

async fn release(world: &World, group: &GroupHandle, key: String) {
    let began = now();
    if engine::release_key(&world.database, group.id, &key).await.expect("release") {
        note(world, group, Some(key), What::Release, began);
    }
}

async fn seek(world: &World, random: &mut fastrand::Rng, group: &GroupHandle) {
    let to = match random.u32(0..6) {
        0 => Start::Earliest,
        1 => Start::Latest,
        _ => point(world, random).await,
    };
    let began = now();
    // It may lose to a settle, and then nothing has changed.
    if let Ok(seeked) = engine::seek(&world.database, group.id, group.stream_id, &group.name, &to).await {
        note(world, group, None, What::Seek { after: seeked.position }, began);
    }
}

async fn seek_key(world: &World, random: &mut fastrand::Rng, group: &GroupHandle, key: String) {
    let to = point(world, random).await;
    let began = now();
    // Its key may be busy for too long.
    let seeked = engine::seek_key(&world.database, &group.name, &key, &to, Duration::from_millis(500)).await;
    if let Ok(seeked) = seeked {
        note(world, group, Some(key), What::Seek { after: seeked.position }, began);
    }
}

async fn point(world: &World, random: &mut fastrand::Rng) -> Start {
    let last = number(&world.database, "select coalesce(max(id), 0) from {schema}.message_log_1").await;
    Start::Id(random.i64(1..=last + 1))
}

fn note(world: &World, group: &GroupHandle, key: Option<String>, what: What, began: Micros) {
    world.trace.verb(Verb { group: group.name.to_string(), key, what, began, ended: now() });
}

/// E10. Whether a producer waits for somebody who is none, just now.
async fn look_at_producers(world: &World) {
    let sql = "select concat_ws(' ', p.wait_event, 'behind', b.application_name, left(b.query, 80))
        from pg_stat_activity p, unnest(pg_blocking_pids(p.pid)) as of (pid) join pg_stat_activity b on b.pid = of.pid
        where p.datname = current_database() and p.application_name = 'producer' and b.application_name <> 'producer'
            and b.backend_type = 'client backend'";
    let rows = sqlx::query(world.schema.sql(sql)).fetch_all(&world.database.pool).await.expect("look at producers");
    rows.iter().for_each(|row| world.trace.blocked_producer(row.get(0)));
}

/// Ends the connections of hosts over which a turn or a settle went last, maybe before its answer.
async fn cut_connections(world: &World) {
    let sql = "select count(pg_terminate_backend(pid)) from pg_stat_activity
        where datname = current_database() and (query like '%.claim_1(%' or query like '%for key share%')
            and query not like '%create or replace function%' -- that one is ours
            and pid <> pg_backend_pid() and application_name <> 'producer'";
    sqlx::query(world.schema.sql(sql)).execute(&world.database.pool).await.expect("cut connections");
}
