//! What happened since the host started. Published with every heartbeat; labels come from streams.toml only.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use serde_json::{Value, json};

use super::hot_keys::HotKeys;
use crate::handler::FailureClass;

/// One group on this host.
#[derive(Debug, Default)]
pub struct GroupCounters {
    pub delivered: AtomicU64,
    pub done: AtomicU64,
    pub again: AtomicU64,
    pub dead: AtomicU64,
    pub handed_back: AtomicU64,
    /// Deliveries that failed and had lost to a newer version of their key, so they just ended.
    pub superseded: AtomicU64,
    /// Ended deliveries that were no longer ours: nothing of them was written.
    pub fenced: AtomicU64,
    /// Messages that the database said we held and memory did not know.
    pub given_back: AtomicU64,
    pub memory_growths: AtomicU64,
    pub produced: AtomicU64,
    pub turns: AtomicU64,
    pub database_errors: AtomicU64,
    failures: Mutex<BTreeMap<&'static str, u64>>,
    /// Lists for people; never a metric, which would have a label for each key.
    pub hot_keys: HotKeys,
}

impl GroupCounters {
    pub fn count_failure(&self, class: FailureClass) {
        let mut failures = self.failures.lock().expect("counting does not panic");
        *failures.entry(class.as_str()).or_default() += 1;
    }

    fn snapshot(&self) -> Value {
        json!({
            "delivered": self.delivered.load(Relaxed),
            "done": self.done.load(Relaxed),
            "again": self.again.load(Relaxed),
            "dead": self.dead.load(Relaxed),
            "handed_back": self.handed_back.load(Relaxed),
            "superseded": self.superseded.load(Relaxed),
            "fenced": self.fenced.load(Relaxed),
            "given_back": self.given_back.load(Relaxed),
            "memory_growths": self.memory_growths.load(Relaxed),
            "produced": self.produced.load(Relaxed),
            "turns": self.turns.load(Relaxed),
            "database_errors": self.database_errors.load(Relaxed),
            "failures": *self.failures.lock().expect("counting does not panic"),
            "hot_keys": self.hot_keys.snapshot(),
        })
    }
}

/// The whole host.
#[derive(Debug, Default)]
pub struct Counters {
    pub heartbeats: AtomicU64,
    /// Leases that ran out under us.
    pub leases_lost: AtomicU64,
    /// Messages taken over from dead hosts.
    pub recovered: AtomicU64,
    pub idle_polls: AtomicU64,
    groups: Mutex<BTreeMap<String, Arc<GroupCounters>>>,
    /// What others publish beside the counters: the sandbox, the deployed components.
    extra: Mutex<BTreeMap<&'static str, Value>>,
}

impl Counters {
    /// The counters of one group; the same ones whenever it is asked for.
    pub fn group(&self, name: &str) -> Arc<GroupCounters> {
        let mut groups = self.groups.lock().expect("counting does not panic");
        Arc::clone(groups.entry(name.to_owned()).or_default())
    }

    /// Publishes `value` under `name` from the next heartbeat on.
    pub fn publish(&self, name: &'static str, value: Value) {
        self.extra.lock().expect("counting does not panic").insert(name, value);
    }

    pub fn snapshot(&self) -> Value {
        let groups = self.groups.lock().expect("counting does not panic");
        let mut snapshot = json!({
            "heartbeats": self.heartbeats.load(Relaxed),
            "leases_lost": self.leases_lost.load(Relaxed),
            "recovered": self.recovered.load(Relaxed),
            "idle_polls": self.idle_polls.load(Relaxed),
            "groups": groups.iter().map(|(name, group)| (name.clone(), group.snapshot())).collect::<BTreeMap<_, _>>(),
        });
        for (name, value) in self.extra.lock().expect("counting does not panic").iter() {
            snapshot[*name] = value.clone();
        }
        snapshot
    }
}
