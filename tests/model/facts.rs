//! What a run left, put together for the checks: the trace, the log, the leases and the dead letters. Plain data and
//! questions about it; no judgement.

use std::collections::{BTreeMap, HashMap, HashSet};

use millstream::{config::OnDeadLetter, engine, handler::Concurrency};
use sqlx::Row;

use super::{
    trace::{Delivery, End, Micros, Produced},
    world::World,
};

/// One message of the log.
#[derive(Clone, Debug)]
pub struct Fact {
    pub id: i64,
    pub key: Option<String>,
    pub lane: i16,
    pub mode: Concurrency,
    /// `None`: not compacted.
    pub rank: Option<i64>,
    pub deliver_after: Option<Micros>,
    /// As its producer knows it.
    pub produced: Produced,
}

/// One identity of a host, and how long its lease was good.
#[derive(Clone, Debug)]
pub struct Identity {
    pub began: Micros,
    pub until: Micros,
}

/// What became of a dead letter.
#[derive(Clone, Debug)]
pub struct Death {
    pub group: usize,
    pub id: i64,
    pub what: String,
    pub class: String,
    pub attempts: i32,
    pub at: Micros,
}

#[derive(Clone, Debug)]
pub struct Group {
    pub name: String,
    pub on_dead_letter: OnDeadLetter,
    pub max_attempts: u32,
    pub base: Micros,
    pub concurrency_override: Option<Concurrency>,
    id: i32,
}

/// A delivery with what its host's lease makes of it.
#[derive(Clone, Debug)]
pub struct Told {
    pub delivery: Delivery,
    pub group: usize,
    /// It began when the lease had run out already: nothing of it counts.
    pub is_void: bool,
    /// The end of the lease it ran under.
    pub lease_end: Micros,
    /// Its end, or that of its lease.
    pub end: Micros,
    /// How it ended; dropped, if it ended after its lease.
    pub how: End,
}

pub struct Facts {
    pub cuts_connections: bool,
    pub messages: BTreeMap<i64, Fact>,
    pub produced: Vec<Produced>,
    pub rolled_back: HashSet<i64>,
    pub groups: Vec<Group>,
    /// By start.
    pub deliveries: Vec<Told>,
    pub identities: HashMap<String, Vec<Identity>>,
    pub deaths: Vec<Death>,
    /// Group, message: what is still behind its key at the end.
    pub behind: HashSet<(usize, i64)>,
    /// Group and message of every receipt.
    pub receipts: Vec<String>,
    /// Heads of compacted keys, as the database has them.
    pub heads: HashMap<String, i64>,
    /// What the next delivery of a key would tell as skipped.
    pub skipped: HashMap<(usize, String), i64>,
}

impl Facts {
    pub async fn read(world: &World) -> Self {
        let noted = world.trace.take();
        let groups = groups(world).await;
        let index: HashMap<i32, usize> = groups.iter().enumerate().map(|(index, group)| (group.id, index)).collect();
        let mut facts = Self {
            cuts_connections: world.cuts_connections,
            messages: BTreeMap::new(),
            produced: noted.produced,
            rolled_back: noted.rolled_back.into_iter().collect(),
            groups,
            deliveries: Vec::new(),
            identities: identities(world).await,
            deaths: Vec::new(),
            behind: HashSet::new(),
            receipts: Vec::new(),
            heads: HashMap::new(),
            skipped: HashMap::new(),
        };
        facts.read_log(world).await;
        facts.read_ends(world, &index).await;
        for delivery in noted.deliveries {
            let told = facts.tell(delivery);
            facts.deliveries.push(told);
        }
        facts.deliveries.sort_by_key(|told| (told.delivery.start, told.delivery.number));
        facts
    }

    async fn read_log(&mut self, world: &World) {
        let sql = "select id, message_key, lane, concurrency::text, compaction_rank, (extract(epoch from deliver_after) * 1000000)::bigint
            from {schema}.message_log_1 order by id";
        let known: HashMap<i64, Produced> =
            self.produced.iter().filter(|one| !one.duplicate).map(|one| (one.id, one.clone())).collect();
        for row in rows(world, sql).await {
            let id = row.get(0);
            let Some(produced) = known.get(&id).cloned() else { continue }; // the checks tell of it
            let mode = Concurrency::named(row.get(3)).unwrap();
            let (key, lane, rank, deliver_after) = (row.get(1), row.get(2), row.get(4), row.get(5));
            self.messages.insert(id, Fact { id, key, lane, mode, rank, deliver_after, produced });
        }
        for row in rows(world, "select message_key, message_id from {schema}.compaction_head_1").await {
            self.heads.insert(row.get(0), row.get(1));
        }
    }

    async fn read_ends(&mut self, world: &World, index: &HashMap<i32, usize>) {
        let sql = "select group_id, message_id, what, class, attempts, (extract(epoch from at) * 1000000)::bigint
            from {schema}.model_dead order by seq";
        for row in rows(world, sql).await {
            self.deaths.push(Death {
                group: index[&row.get(0)],
                id: row.get(1),
                what: row.get(2),
                class: row.get(3),
                attempts: row.get(4),
                at: row.get(5),
            });
        }
        for row in rows(world, "select group_id, message_id from {schema}.exception").await {
            self.behind.insert((index[&row.get(0)], row.get(1)));
        }
        for row in rows(world, "select convert_from(payload, 'UTF8') from {schema}.message_log_2").await {
            self.receipts.push(row.get(0));
        }
        for row in rows(world, "select group_id, message_key, versions from {schema}.skipped_versions").await {
            self.skipped.insert((index[&row.get(0)], row.get(1)), row.get(2));
        }
    }

    fn tell(&self, delivery: Delivery) -> Told {
        let identities = self.identities.get(&delivery.life).map_or(&[][..], Vec::as_slice);
        let identity = identities.iter().rev().find(|identity| identity.began <= delivery.start);
        let lease_end = identity.map_or(Micros::MIN, |identity| identity.until);
        let (end, how) = delivery.end.unwrap_or((Micros::MAX, End::Dropped));
        Told {
            group: self.groups.iter().position(|group| group.name == delivery.group).expect("a known group"),
            is_void: delivery.start > lease_end,
            lease_end,
            end: end.min(lease_end),
            how: if end > lease_end { End::Dropped } else { how },
            delivery,
        }
    }

    /// As the group treats it.
    pub fn mode(&self, group: usize, fact: &Fact) -> Concurrency {
        let weaker =
            |mode: Concurrency| self.groups[group].concurrency_override.map_or(mode, |most| weaker(mode, most));
        weaker(fact.mode)
    }

    /// Whether the group's filter lets it pass.
    pub fn sees(&self, group: usize, fact: &Fact) -> bool {
        match &*self.groups[group].name {
            "skip" => fact.produced.routing_key.as_deref() == Some("seen"),
            "rest" => !matches!(fact.key.as_deref(), Some("exclusive 1" | "mixed 0")),
            _ => true,
        }
    }

    /// What the group gets to see.
    pub fn seen(&self, group: usize) -> impl Iterator<Item = &Fact> {
        self.messages.values().filter(move |fact| self.sees(group, fact))
    }

    /// Deliveries of each message that count, by start.
    pub fn by_message(&self) -> BTreeMap<(usize, i64), Vec<&Told>> {
        let mut all: BTreeMap<_, Vec<&Told>> = BTreeMap::new();
        for told in self.deliveries.iter().filter(|told| !told.is_void) {
            all.entry((told.group, told.delivery.id)).or_default().push(told);
        }
        all
    }

    /// Of each key (or lane of it) of a group, what the group treats so that only one runs.
    pub fn lines(&self) -> BTreeMap<(usize, &str, i16), Vec<&Fact>> {
        let mut all: BTreeMap<_, Vec<&Fact>> = BTreeMap::new();
        for group in 0..self.groups.len() {
            for fact in self.seen(group).filter(|fact| self.mode(group, fact) != Concurrency::Parallel) {
                let key = fact.key.as_deref().expect("a mode needs a key");
                all.entry((group, key, fact.lane)).or_default().push(fact);
            }
        }
        all
    }

    /// Compacted messages of each key, over all groups.
    pub fn versions(&self) -> HashMap<&str, Vec<&Fact>> {
        let mut all: HashMap<&str, Vec<&Fact>> = HashMap::new();
        for fact in self.messages.values().filter(|fact| fact.rank.is_some()) {
            all.entry(fact.key.as_deref().expect("compaction needs a key")).or_default().push(fact);
        }
        all
    }

    /// Changes of a message's dead letter in a group, in order.
    pub fn deaths_of(&self, group: usize, id: i64) -> impl Iterator<Item = &Death> {
        self.deaths.iter().filter(move |death| death.group == group && death.id == id)
    }

    /// Whether some host has lost its lease, or died, between two times.
    pub fn is_host_lost(&self, from: Micros, until: Micros) -> bool {
        self.identities.values().flatten().any(|identity| (from..=until).contains(&identity.until))
    }
}

fn weaker(one: Concurrency, other: Concurrency) -> Concurrency {
    let rank = |mode| match mode {
        Concurrency::Parallel => 0,
        Concurrency::Exclusive => 1,
        Concurrency::Ordered => 2,
    };
    if rank(one) < rank(other) { one } else { other }
}

async fn groups(world: &World) -> Vec<Group> {
    let read = |group: engine::GroupHandle| Group {
        name: group.name.to_string(),
        on_dead_letter: group.policy.on_dead_letter,
        max_attempts: group.policy.retry.max_attempts,
        base: super::trace::micros(group.policy.retry.base.mul_f64(1.0 - group.policy.retry.jitter)),
        concurrency_override: group.policy.concurrency_override,
        id: group.id.0,
    };
    engine::load_groups(&world.database).await.expect("load the groups").into_iter().map(read).collect()
}

async fn identities(world: &World) -> HashMap<String, Vec<Identity>> {
    // Of each identity the last row counts: a lease that was ended from outside is not renewed again.
    let sql = "select name, (extract(epoch from min(at)) * 1000000)::bigint,
            (extract(epoch from (array_agg(expires_at order by seq desc))[1]) * 1000000)::bigint
        from {schema}.model_lease group by host_id, name order by host_id";
    let mut all: HashMap<String, Vec<Identity>> = HashMap::new();
    for row in rows(world, sql).await {
        all.entry(row.get(0)).or_default().push(Identity { began: row.get(1), until: row.get(2) });
    }
    all
}

async fn rows(world: &World, sql: &str) -> Vec<sqlx::postgres::PgRow> {
    sqlx::query(world.schema.sql(sql)).fetch_all(&world.database.pool).await.expect("read what a run left")
}
