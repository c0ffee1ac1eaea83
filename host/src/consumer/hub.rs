//! Who is idle, and who wakes whom. A wake is a hint to look again, never a fact: losing one costs a poll interval.

use std::{
    collections::{BTreeSet, HashMap},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicI64, Ordering::Relaxed},
    },
};

use tokio::sync::Notify;

use crate::engine::{GroupHandle, GroupId};

/// A group on this host, as the hub sees it.
#[derive(Debug, Default)]
pub struct Seat {
    /// The group has room and found nothing to do: the idle poll asks for it.
    pub idle: AtomicBool,
    wake: Notify,
    /// The database says that this host holds something of the group: compare it with memory.
    pub compare: AtomicBool,
    /// The epoch that the group works under here.
    pub epoch: AtomicI64,
    /// The database says that the epoch was raised: cut what runs.
    pub seeked: AtomicBool,
}

impl Seat {
    pub fn wake(&self) {
        self.wake.notify_one();
    }

    pub async fn woken(&self) {
        self.wake.notified().await;
    }
}

/// A group's stream and its seat.
type Seated = (Arc<str>, Arc<Seat>);

/// All groups of this host.
#[derive(Debug, Default)]
pub struct Hub {
    seats: Mutex<HashMap<GroupId, Seated>>,
    /// Streams of which other hosts have not been told yet that something is ready there.
    ready: Mutex<BTreeSet<String>>,
    /// Something happened: the idle poll goes back to its shortest interval.
    pub active: Notify,
}

impl Hub {
    pub fn seat(&self, group: &GroupHandle) -> Arc<Seat> {
        let seat = Arc::new(Seat { epoch: AtomicI64::new(group.epoch), ..Seat::default() });
        let seated = (Arc::clone(&group.stream), Arc::clone(&seat));
        self.seats.lock().expect("the hub does not panic").insert(group.id, seated);
        seat
    }

    pub fn leave(&self, group: GroupId) {
        self.seats.lock().expect("the hub does not panic").remove(&group);
    }

    pub fn idle_groups(&self) -> Vec<GroupId> {
        let seats = self.seats.lock().expect("the hub does not panic");
        seats.iter().filter(|(_, (_, seat))| seat.idle.load(Relaxed)).map(|(group, _)| *group).collect()
    }

    /// Every group with the epoch that it works under here.
    pub fn epochs(&self) -> Vec<(GroupId, i64)> {
        let seats = self.seats.lock().expect("the hub does not panic");
        seats.iter().map(|(group, (_, seat))| (*group, seat.epoch.load(Relaxed))).collect()
    }

    pub fn with_seat(&self, group: GroupId, act: impl FnOnce(&Seat)) {
        if let Some((_, seat)) = self.seats.lock().expect("the hub does not panic").get(&group) {
            act(seat);
        }
    }

    /// Wakes the groups of a stream.
    pub fn wake_stream(&self, stream: &str) {
        for (of, seat) in self.seats.lock().expect("the hub does not panic").values() {
            if **of == *stream {
                seat.wake();
            }
        }
        self.active.notify_one();
    }

    pub fn wake_all(&self) {
        for (_, seat) in self.seats.lock().expect("the hub does not panic").values() {
            seat.wake();
        }
    }

    /// Something was produced here and is committed, or was let go: wakes the stream's groups, and marks it for the other hosts.
    pub fn tell_of(&self, stream: &str) {
        self.wake_stream(stream);
        self.ready.lock().expect("the hub does not panic").insert(stream.to_owned());
    }

    /// Streams to tell other hosts about, each once.
    pub fn take_ready(&self) -> BTreeSet<String> {
        std::mem::take(&mut *self.ready.lock().expect("the hub does not panic"))
    }
}
