//! Hosts that die, freeze past their lease, lose it behind their back, stop in good order, and come back.

use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use millstream::{
    consumer::{Consumer, Counters},
    engine,
};
use tokio::runtime;

use super::{
    handlers::{Manner, Random},
    world::World,
};
use crate::support::engine::Session;

/// How a host may end a life, or what may befall it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    /// As by kill -9.
    Killed,
    /// As by TERM.
    Stopped,
    /// Nothing of it runs for longer than its lease, and then goes on as if nothing had been.
    Frozen,
    /// The database says that its lease has run out; it learns of it only later.
    Expired,
}

/// One host after the other, until the world ends. The last one stops in good order.
pub fn node(world: &Arc<World>, node: u64) {
    let mut random = fastrand::Rng::with_seed(world.seed.wrapping_mul(31).wrapping_add(node));
    let mut life = 0;
    while !world.is_over() {
        life += 1;
        let workers = random.usize(1..=2);
        let name = format!("n{node}.{life}");
        let threads = runtime::Builder::new_multi_thread()
            .worker_threads(workers)
            .enable_all()
            .on_thread_start(world.log_here())
            .build()
            .unwrap();
        let seed = random.u64(..);
        let world_of_life = Arc::clone(world);
        let is_killed = threads.block_on(async move {
            let living = tokio::spawn(live(world_of_life, name, workers, fastrand::Rng::with_seed(seed)));
            living.await.expect("no host panics")
        });
        if is_killed {
            threads.shutdown_background();
        } else {
            drop(threads);
        }
        thread::sleep(Duration::from_millis(random.u64(0..300)));
    }
}

/// A life of a host; answers whether it ended without a word.
async fn live(world: Arc<World>, name: String, workers: usize, mut random: fastrand::Rng) -> bool {
    let host = Living::begin(&world, &name, world.manner).await;
    loop {
        let until = Instant::now() + Duration::from_millis(random.u64(300..2500));
        while Instant::now() < until && !world.is_over() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        if world.is_over() {
            host.stop().await;
            return false;
        }
        if world.is_produced() {
            continue;
        }
        match world.fate(&mut random) {
            Fate::Killed => {
                host.die();
                return true;
            }
            Fate::Stopped => {
                host.stop().await;
                return false;
            }
            Fate::Frozen => freeze(&world, &name, workers, random.u64(0..400)).await,
            Fate::Expired => {
                // A moment ahead, so that it is known to everybody when it has come.
                let sql = "update {schema}.host set expires_at = clock_timestamp() + interval '50 ms'
                    where name = $1 and expires_at > clock_timestamp() + interval '50 ms'";
                let expire = sqlx::query(world.schema.sql(sql)).bind(&name);
                // Not over the host's connections, which are cut, nor the world's, which must outlive this runtime.
                let own = world.another_host().await;
                expire.execute(&own.pool).await.expect("expire a lease");
                own.close().await;
            }
        }
    }
}

/// Holds every thread of the host for longer than its lease, so that others take over meanwhile. Until the lease has run out
/// its row is locked, so that the keeper of the lease, which has a thread of its own, cannot renew it.
async fn freeze(world: &World, name: &str, workers: usize, longer_ms: u64) {
    let (database, lease) = (world.database.clone(), world.lease);
    let lock = format!("begin; select from {{schema}}.host where name = '{name}' for no key update");
    let (locked, is_locked) = tokio::sync::oneshot::channel();
    let keeper = world.main.spawn(async move {
        let mut session = Session::begin(&database).await;
        session.run(&lock).await;
        locked.send(()).expect("the host waits");
        tokio::time::sleep(lease + Duration::from_millis(50)).await;
        session.run("commit").await;
    });
    is_locked.await.expect("the row is locked");
    let length = lease + Duration::from_millis(1000 + longer_ms);
    let still: Vec<_> = (0..workers).map(|_| tokio::spawn(async move { thread::sleep(length) })).collect();
    for one in still {
        one.await.expect("a sleep does not panic");
    }
    keeper.await.expect("the lock is let go");
}

/// A host that lives.
pub struct Living {
    consumer: Consumer,
    database: millstream::database::Database,
    /// The handlers last as long as these.
    _handlers: Vec<tokio::sync::watch::Sender<Option<Arc<dyn millstream::handler::Handler>>>>,
}

impl Living {
    pub async fn begin(world: &World, name: &str, manner: Manner) -> Self {
        let database = world.another_host().await.of_host(name);
        let mut consumer =
            Consumer::start(&database, &world.host, name, Arc::new(Counters::default())).expect("start a host");
        consumer.alive().await;
        let mut handlers = Vec::new();
        for group in engine::load_groups(&database).await.expect("load the groups") {
            let handler = Random { trace: world.trace.clone(), life: name.to_owned(), manner };
            let (sender, newest) = handler.newest();
            consumer.run_group(group, newest);
            handlers.push(sender);
        }
        Self { consumer, database, _handlers: handlers }
    }

    pub async fn stop(self) {
        self.consumer.drain().await;
        self.database.close().await;
    }

    fn die(self) {}
}

impl World {
    fn fate(&self, random: &mut fastrand::Rng) -> Fate {
        if self.is_calm {
            return Fate::Stopped;
        }
        match random.u32(0..100) {
            0..35 => Fate::Killed,
            35..60 => Fate::Stopped,
            60..80 => Fate::Frozen,
            _ => Fate::Expired,
        }
    }
}
