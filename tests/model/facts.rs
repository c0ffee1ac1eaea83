//! What a run left, put together for the checks: the trace, the log, the leases and the dead letters. Plain data and
//! questions about it; no judgement.

use std::collections::{BTreeMap, HashMap, HashSet};

use millstream::{config::OnDeadLetter, engine, handler::Concurrency};
use sqlx::Row;

use super::{
    trace::{Delivery, End, Micros, Produced, Verb, What},
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

/// One identity of a host, and until when its lease was good.
#[derive(Clone, Debug)]
pub struct Identity {
    pub host: i64,
    pub until: Micros,
}

/// A group and its age: a message that comes again after a seek begins anew, so each age of a group (for keyed messages, of
/// their key) is looked at by itself.
pub type Age = (usize, usize);

/// When a group, or a key of it, was sent to what comes after a position.
#[derive(Clone, Debug)]
pub struct Sent {
    pub group: usize,
    pub key: Option<String>,
    pub after: i64,
    /// When it was asked for. A seek of a key waits for what runs.
    pub began: Micros,
    pub at: Micros,
}

/// What a host took of a group in one turn: a run of ids.
#[derive(Clone, Debug)]
pub struct Claim {
    pub group: usize,
    pub life: String,
    /// The identity that its life had then.
    pub host: i64,
    pub first: i64,
    pub last: i64,
    /// When its turn began, and when it took them.
    pub began: Micros,
    pub at: Micros,
}

/// What became of a dead letter.
#[derive(Clone, Debug)]
pub struct Death {
    pub group: usize,
    pub age: usize,
    /// From an earlier age; its message does not come again.
    pub is_kept: bool,
    /// Its redrive was voided by a seek: it is open again, and nobody died.
    pub is_reopened: bool,
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
    /// See [`Age`].
    pub age: usize,
    /// When its host took it.
    pub claimed: Micros,
    /// It began when the lease had run out already, or its group had been sent elsewhere: nothing of it counts.
    pub is_void: bool,
    /// The end of the lease it ran under, or of the age of its group.
    pub lease_end: Micros,
    /// Its end, or that of its lease.
    pub end: Micros,
    /// How it ended; dropped, if it ended after its lease.
    pub how: End,
}

pub struct Facts {
    pub cuts_connections: bool,
    pub is_calm: bool,
    pub verbs: Vec<Verb>,
    pub blocked_producers: Vec<String>,
    /// In order.
    pub sent: Vec<Sent>,
    /// Every claim, in order.
    pub claims: Vec<Claim>,
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
            is_calm: world.is_calm,
            verbs: noted.verbs,
            blocked_producers: noted.blocked_producers,
            sent: Vec::new(),
            claims: Vec::new(),
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
        facts.read_verbs(world, &index).await;
        facts.read_ends(world, &index).await;
        let claims = facts.claims_by_life();
        let deliveries: Vec<Told> =
            noted.deliveries.into_iter().map(|delivery| facts.tell(delivery, &claims)).collect();
        facts.deliveries = deliveries;
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

    async fn read_verbs(&mut self, world: &World, index: &HashMap<i32, usize>) {
        // Of a key with lanes each lane is noted; it is sent once.
        let sql =
            "select group_id, message_key, (extract(epoch from min(at)) * 1000000)::bigint from {schema}.model_sent
            group by group_id, message_key, xact order by min(at)";
        for row in rows(world, sql).await {
            let (group, key, at): (usize, Option<String>, Micros) = (index[&row.get(0)], row.get(1), row.get(2));
            let is_it = |verb: &&Verb| {
                let is_then = (verb.began..=verb.ended).contains(&at) && matches!(verb.what, What::Seek { .. });
                is_then && verb.group == self.groups[group].name && verb.key == key
            };
            // A key that is let go was not always sent; a whole group was.
            let verb = self.verbs.iter().find(is_it);
            if let Some(Verb { what: What::Seek { after }, began, .. }) = verb {
                self.sent.push(Sent { group, key, after: *after, began: *began, at });
            }
        }
        let sql = "select c.group_id, l.name, lower(r.ids), upper(r.ids) - 1, (extract(epoch from c.began) * 1000000)::bigint,
                (extract(epoch from c.at) * 1000000)::bigint, host_id
            from {schema}.model_claim c join (select distinct host_id, name from {schema}.model_lease) as l using (host_id),
                unnest(c.ids) as r (ids) order by c.seq";
        for row in rows(world, sql).await {
            let (group, life) = (index[&row.get(0)], row.get(1));
            let (first, last, began, at, host) = (row.get(2), row.get(3), row.get(4), row.get(5), row.get(6));
            self.claims.push(Claim { group, life, host, first, last, began, at });
        }
    }

    fn claims_by_life(&self) -> HashMap<(usize, &str), Vec<&Claim>> {
        let mut all: HashMap<_, Vec<&Claim>> = HashMap::new();
        for claim in &self.claims {
            all.entry((claim.group, claim.life.as_str())).or_default().push(claim);
        }
        all
    }

    async fn read_ends(&mut self, world: &World, index: &HashMap<i32, usize>) {
        // What a seek does to dead letters belongs to the age that it ends.
        let sql = "select group_id, message_id, what, class, attempts,
                (extract(epoch from least(at, (select min(s.at) - interval '1 us' from {schema}.model_sent s where s.xact = d.xact))) * 1000000)::bigint
            from {schema}.model_dead d order by seq";
        for row in rows(world, sql).await {
            let (group, id, at) = (index[&row.get(0)], row.get(1), row.get(5));
            let age = self.age(group, self.key_of(id), at);
            let (what, class, attempts) = (row.get::<String, _>(2), row.get(3), row.get(4));
            let is_reopened = what == "reopened";
            let what = if is_reopened { "open".to_owned() } else { what };
            self.deaths.push(Death { group, age, is_kept: false, is_reopened, id, what, class, attempts, at });
        }
        self.keep_deaths();
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

    /// Dead letters that are open when a new age begins are so in it.
    fn keep_deaths(&mut self) {
        let mut kept = Vec::new();
        for sent in &self.sent {
            let mut last: BTreeMap<i64, &Death> = BTreeMap::new();
            for death in self.deaths.iter().filter(|death| death.group == sent.group && death.at <= sent.at) {
                last.insert(death.id, death);
            }
            let is_concerned = |id: i64| sent.key.is_none() || sent.key.as_deref() == self.key_of(id);
            for (id, death) in last.into_iter().filter(|(id, death)| death.what == "open" && is_concerned(*id)) {
                let age = self.age(sent.group, self.key_of(id), sent.at);
                kept.push(Death { age, is_kept: true, at: sent.at, ..death.clone() });
            }
        }
        self.deaths.extend(kept);
        self.deaths.sort_by_key(|death| (death.at, !death.is_kept));
    }

    fn tell(&self, delivery: Delivery, claims: &HashMap<(usize, &str), Vec<&Claim>>) -> Told {
        let identities = self.identities.get(&delivery.life).map_or(&[][..], Vec::as_slice);
        let group = self.groups.iter().position(|group| group.name == delivery.group).expect("a known group");
        let claims = claims.get(&(group, delivery.life.as_str())).map_or(&[][..], Vec::as_slice);
        let is_it = |claim: &&&Claim| claim.at <= delivery.start && (claim.first..=claim.last).contains(&delivery.id);
        let claim = claims.iter().rev().find(is_it);
        let claimed = claim.map_or(Micros::MIN, |claim| claim.at);
        // A host that has lost its lease may begin what it took under it, and have a new one by then.
        let is_of_claim = |identity: &&Identity| claim.is_some_and(|claim| claim.host == identity.host);
        let identity = identities.iter().find(is_of_claim);
        let sent = self.sent.iter().find(|sent| sent.group == group && sent.key.is_none() && sent.at > claimed);
        let lease_end = identity.map_or(Micros::MIN, |identity| identity.until);
        let lease_end = sent.map_or(lease_end, |sent| lease_end.min(sent.at));
        let (end, how) = delivery.end.unwrap_or((Micros::MAX, End::Dropped));
        Told {
            group,
            age: self.age(group, delivery.key.as_deref(), claimed),
            claimed,
            is_void: delivery.start > lease_end,
            lease_end,
            end: end.min(lease_end),
            how: if end > lease_end { End::Dropped } else { how },
            delivery,
        }
    }

    fn key_of(&self, id: i64) -> Option<&str> {
        self.messages.get(&id).and_then(|fact| fact.key.as_deref())
    }

    /// How a group came to its ages, for messages of one key.
    pub fn sent(&self, group: usize, key: Option<&str>) -> impl Iterator<Item = &Sent> {
        self.sent.iter().filter(move |sent| sent.group == group && (sent.key.is_none() || sent.key.as_deref() == key))
    }

    pub fn age(&self, group: usize, key: Option<&str>, at: Micros) -> usize {
        self.sent(group, key).filter(|sent| sent.at <= at).count()
    }

    /// Whether a message lies before where its age began: it need not come in it.
    pub fn is_passed(&self, (group, age): Age, fact: &Fact) -> bool {
        let begin = age.checked_sub(1).and_then(|before| self.sent(group, fact.key.as_deref()).nth(before));
        begin.is_some_and(|sent| fact.id <= sent.after)
    }

    /// Whether an operator let a key go on, or a message of it, that had stopped at a time, before another.
    pub fn is_let_go(&self, group: usize, fact: &Fact, from: Micros, until: Micros) -> bool {
        self.verbs.iter().any(|verb| {
            let lets_go = match &verb.what {
                What::Skip(ids) => ids.contains(&fact.id),
                What::Release => true,
                What::Seek { .. } | What::Paused => false,
            };
            let is_meanwhile = verb.ended >= from && verb.began <= until;
            lets_go && is_meanwhile && verb.group == self.groups[group].name && verb.key == fact.key
        })
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
            "narrow" => fact.key.as_deref().is_some_and(|key| key.starts_with("ordered") || key.starts_with("mixed")),
            _ => true,
        }
    }

    /// What the group gets to see.
    pub fn seen(&self, group: usize) -> impl Iterator<Item = &Fact> {
        self.messages.values().filter(move |fact| self.sees(group, fact))
    }

    /// Deliveries of each message that count, by start.
    pub fn by_message(&self) -> BTreeMap<(Age, i64), Vec<&Told>> {
        let mut all: BTreeMap<_, Vec<&Told>> = BTreeMap::new();
        for told in self.deliveries.iter().filter(|told| !told.is_void) {
            all.entry(((told.group, told.age), told.delivery.id)).or_default().push(told);
        }
        all
    }

    /// The same, where one delivery follows from the one before. What was redriven is a line of its own: after a seek its
    /// message comes as well, whatever becomes of the other. And what is claimed of a key without a mode while a seek of it
    /// waits belongs to the age before: it may end in the new one, and come again there.
    pub fn by_line(&self) -> BTreeMap<(Age, i64, bool), Vec<&Told>> {
        let mut all: BTreeMap<_, Vec<&Told>> = BTreeMap::new();
        for ((age, id), deliveries) in self.by_message() {
            let Some(fact) = self.messages.get(&id) else { continue };
            let is_of_key = |sent: &Sent| sent.key.is_some();
            let begin = age.1.checked_sub(1).and_then(|before| self.sent(age.0, fact.key.as_deref()).nth(before));
            if begin.is_some_and(is_of_key) && self.mode(age.0, fact) == Concurrency::Parallel {
                continue;
            }
            for told in deliveries {
                all.entry((age, id, told.delivery.redriven)).or_default().push(told);
            }
        }
        all
    }

    /// Of each key (or lane of it) of a group in each of its ages, what the group treats so that only one runs.
    pub fn lines(&self) -> BTreeMap<(Age, &str, i16), Vec<&Fact>> {
        let mut all: BTreeMap<_, Vec<&Fact>> = BTreeMap::new();
        for group in 0..self.groups.len() {
            for fact in self.seen(group).filter(|fact| self.mode(group, fact) != Concurrency::Parallel) {
                let key = fact.key.as_deref().expect("a mode needs a key");
                for age in 0..=self.sent(group, Some(key)).count() {
                    all.entry(((group, age), key, fact.lane)).or_default().push(fact);
                }
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

    /// Changes of a message's dead letter in an age of a group, in order.
    pub fn deaths_of(&self, (group, age): Age, id: i64) -> impl Iterator<Item = &Death> {
        self.deaths.iter().filter(move |death| death.group == group && death.age == age && death.id == id)
    }

    /// Whether a message became a dead letter between two times.
    pub fn has_died(&self, age: Age, id: i64, from: Micros, until: Micros) -> bool {
        self.deaths_of(age, id).any(|death| death.what == "open" && from < death.at && death.at < until)
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
    let sql = "select name, host_id,
            (extract(epoch from (array_agg(expires_at order by seq desc))[1]) * 1000000)::bigint
        from {schema}.model_lease group by host_id, name order by host_id";
    let mut all: HashMap<String, Vec<Identity>> = HashMap::new();
    for row in rows(world, sql).await {
        all.entry(row.get(0)).or_default().push(Identity { host: row.get(1), until: row.get(2) });
    }
    all
}

async fn rows(world: &World, sql: &str) -> Vec<sqlx::postgres::PgRow> {
    sqlx::query(world.schema.sql(sql)).fetch_all(&world.database.pool).await.expect("read what a run left")
}
