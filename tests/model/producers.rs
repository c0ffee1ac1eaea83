//! Random producers: every option of a message, through SQL and through `engine::produce`, in batches and alone, in
//! transactions that are slow, that are rolled back, wholly or to a savepoint.

use std::{sync::Arc, time::Duration};

use millstream::{
    database::{Reaction, reaction},
    engine::{self, NewEntry, ProduceError},
    handler::{Concurrency, NewMessage},
};
use sqlx::{PgConnection, Row};

use super::{
    trace::{Micros, Produced, now},
    world::World,
};

/// What the keys of a kind stand for; the number of each is the seed's.
const KINDS: [(&str, Option<Concurrency>, bool); 10] = [
    ("parallel", None, false),
    ("exclusive", Some(Concurrency::Exclusive), false),
    ("exclusive", Some(Concurrency::Exclusive), false),
    ("ordered", Some(Concurrency::Ordered), false),
    ("ordered", Some(Concurrency::Ordered), false),
    ("compacted", Some(Concurrency::Parallel), true),
    ("exclusive-compacted", Some(Concurrency::Exclusive), true),
    ("ordered-compacted", Some(Concurrency::Ordered), true),
    ("sharded", None, false), // a key rule makes them ordered
    ("mixed", None, false),   // every message decides for itself
];

/// A producer, until the producing is over.
pub async fn producer(world: Arc<World>, number: u64) {
    let database = world.another_host().await;
    let mut random = fastrand::Rng::with_seed(world.seed.wrapping_mul(77).wrapping_add(number));
    let mut connection = database.pool.acquire().await.expect("a connection").detach();
    // The operator does not cut it: it must know what has committed.
    sqlx::query("set application_name = 'producer'").execute(&mut connection).await.expect("take a name");
    let mut count = 0;
    while !world.is_produced() {
        let began = now();
        sqlx::query("begin").execute(&mut connection).await.expect("begin");
        let done = transaction(&world, &mut connection, &mut random, (number, &mut count), began).await;
        let (messages, voided) = done.unwrap_or_default(); // a deadlock: the database has resolved it against us
        if random.u32(0..6) == 0 {
            let most = if random.u32(0..8) == 0 { 400 } else { 60 };
            tokio::time::sleep(Duration::from_millis(random.u64(0..most))).await;
        }
        let commits = !messages.is_empty() && random.u32(0..8) > 0;
        let end = if commits { "commit" } else { "rollback" };
        sqlx::query(end).execute(&mut connection).await.expect("end a transaction");
        let confirmed = now();
        world.trace.rolled_back(voided);
        if commits {
            world.trace.produced(messages.into_iter().map(|one| Produced { confirmed, ..one }).collect());
        } else {
            world.trace.rolled_back(messages.into_iter().filter(|one| !one.duplicate).map(|one| one.id));
        }
        tokio::time::sleep(Duration::from_millis(random.u64(0..world.pause_ms))).await;
    }
}

/// One to four calls. `None`: a deadlock.
async fn transaction(
    world: &World,
    connection: &mut PgConnection,
    random: &mut fastrand::Rng,
    (number, count): (u64, &mut u64),
    began: Micros,
) -> Option<(Vec<Produced>, Vec<i64>)> {
    let (mut messages, mut voided) = (Vec::new(), Vec::new());
    for _ in 0..random.u32(1..=4) {
        let batch: Vec<NewMessage> = match random.u32(0..3) {
            0 => (0..random.u32(1..30)).map(|_| message(world, random, number, count)).collect(),
            _ => vec![message(world, random, number, count)],
        };
        let undoes = random.u32(0..8) == 0;
        if undoes {
            sqlx::query("savepoint s").execute(&mut *connection).await.expect("a savepoint");
        }
        let produced = if batch.len() == 1 && random.bool() {
            through_sql(world, connection, &batch[0], began).await?
        } else {
            through_engine(world, connection, &batch, began).await?
        };
        if undoes {
            sqlx::query("rollback to s").execute(&mut *connection).await.expect("undo a part");
            voided.extend(produced.iter().filter(|one| !one.duplicate).map(|one| one.id));
        } else {
            messages.extend(produced);
        }
    }
    Some((messages, voided))
}

/// A key that subjects its messages to it in every group that does not drop the order.
pub fn some_key(world: &World, random: &mut fastrand::Rng) -> String {
    let is_serial = |kind: &&(&str, Option<Concurrency>, bool)| {
        kind.1.is_some_and(|mode| mode != Concurrency::Parallel) || kind.0 == "sharded"
    };
    let kinds: Vec<_> = KINDS.iter().filter(is_serial).collect();
    format!("{} {}", random.choice(kinds).unwrap().0, number_of_key(world, random))
}

/// One key in three is the first of its kind.
fn number_of_key(world: &World, random: &mut fastrand::Rng) -> u64 {
    random.u64(0..world.keys).saturating_sub(world.keys / 3)
}

fn message(world: &World, random: &mut fastrand::Rng, number: u64, count: &mut u64) -> NewMessage {
    *count += 1;
    let mut new = NewMessage { payload: Some(format!("{number}-{count}").into_bytes()), ..NewMessage::default() };
    if random.u32(0..6) == 0 {
        new.routing_key = Some(random.choice(["seen", "hidden"]).unwrap().to_owned());
    }
    if random.u32(0..25) == 0 {
        new.delay = Some(Duration::from_millis(random.u64(0..500)));
    }
    if random.u32(0..8) > 0 {
        let (kind, mode, compaction) = *random.choice(KINDS.iter()).unwrap();
        let key = number_of_key(world, random);
        new.key = Some(format!("{kind} {key}"));
        new.concurrency = mode;
        new.compaction = compaction.then_some(true);
        if kind == "mixed" {
            let modes = [Concurrency::Parallel, Concurrency::Exclusive, Concurrency::Ordered];
            new.concurrency = random.choice(modes);
            new.compaction = Some(random.u32(0..3) == 0);
        }
        if new.compaction == Some(true) && random.u32(0..3) == 0 {
            new.rank = Some(random.i64(0..4));
        }
        if random.u32(0..15) == 0 {
            new.payload = None;
        }
    }
    if random.u32(0..15) == 0 {
        // The same message each time, else it is refused.
        let once = format!("{number} once {}", *count / 40);
        new = NewMessage { payload: Some(once.clone().into_bytes()), ..NewMessage::default() };
        new.key = Some(format!("ordered {}", *count / 40 % world.keys));
        new.concurrency = Some(Concurrency::Ordered);
        new.idempotency_key = Some(once);
    }
    new
}

fn noted(new: &NewMessage, id: i64, superseded: bool, duplicate: bool, began: Micros) -> Produced {
    Produced {
        id,
        payload: new.payload.clone().map(|payload| String::from_utf8(payload).unwrap()),
        routing_key: new.routing_key.clone(),
        rank: (new.compaction == Some(true)).then(|| new.rank.unwrap_or(0)),
        began,
        confirmed: began,
        superseded,
        duplicate,
    }
}

async fn through_sql(
    world: &World,
    connection: &mut PgConnection,
    new: &NewMessage,
    began: Micros,
) -> Option<Vec<Produced>> {
    let sql = "select id, duplicate, superseded from {schema}.produce('orders', $1::bytea, key => $2, concurrency => $3, compaction => $4,
        rank => $5, idempotency_key => $6, routing_key => $7, deliver_after => clock_timestamp() + $8 * interval '1 ms')";
    let query = sqlx::query(world.schema.sql(sql)).bind(&new.payload).bind(&new.key);
    let query = query.bind(new.concurrency.map(Concurrency::as_str)).bind(new.compaction).bind(new.rank);
    let query = query.bind(&new.idempotency_key).bind(&new.routing_key);
    let row = match query.bind(new.delay.map(|delay| delay.as_millis() as i64)).fetch_one(connection).await {
        Ok(row) => row,
        Err(error) => return deadlock(&error),
    };
    Some(vec![noted(new, row.get(0), row.get(2), row.get(1), began)])
}

async fn through_engine(
    world: &World,
    connection: &mut PgConnection,
    batch: &[NewMessage],
    began: Micros,
) -> Option<Vec<Produced>> {
    let entries: Vec<_> = batch.iter().map(|message| NewEntry { message, deliver_after: None }).collect();
    match engine::produce(&world.database, connection, "orders", &entries).await {
        Ok(produced) => {
            let each = batch.iter().zip(produced);
            Some(each.map(|(new, one)| noted(new, one.id, one.superseded, one.duplicate, began)).collect())
        }
        Err(ProduceError::Database(error)) => deadlock(&error),
        Err(ProduceError::Refused(refusal)) => panic!("refused: {}", refusal.message),
    }
}

fn deadlock<T>(error: &sqlx::Error) -> Option<T> {
    assert_eq!(reaction(error), Reaction::Busy, "produce: {error:#}");
    None
}
