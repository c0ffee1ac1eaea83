//! The keys this host has, and what waits for them here: one delivery of a lane at a time, in order.
//!
//! Shared by the group's loop, which puts messages in, and the slots, which start the next of a lane as soon as the one
//! before has ended, without waiting for the loop. Invariant: of a lane that is in the map, either one message is with
//! the slots, or the lane is held until the loop has settled the message that holds it.

use std::{
    collections::{HashMap, VecDeque, hash_map::Entry},
    sync::{Arc, Mutex, MutexGuard},
};

use super::slots::{Ended, Work};
use crate::{
    engine::{Keyed, Lane},
    handler::{Concurrency, Outcome},
};

/// See the module. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Lanes(Arc<Mutex<Map>>);

#[derive(Debug, Default)]
struct Map {
    lines: HashMap<Lane, Line>,
    /// Messages in all lines, not those with the slots.
    waiting: u32,
}

#[derive(Debug, Default)]
struct Line {
    waiting: VecDeque<Work>,
    /// The message whose settle the lane waits for.
    held_by: Option<i64>,
}

/// Whether the next delivery of a lane may start before this one is settled. An exclusive key does not wait for what
/// failed; no key goes on before effects are committed.
pub fn goes_on(ended: &Ended) -> bool {
    match ended.mode() {
        Concurrency::Parallel => true,
        Concurrency::Exclusive => !ended.has_effects(),
        Concurrency::Ordered => ended.finished.outcome == Outcome::Done && !ended.has_effects(),
    }
}

impl Lanes {
    fn lock(&self) -> MutexGuard<'_, Map> {
        self.0.lock().expect("lanes do not panic")
    }

    /// A message has been claimed. Answers it when it may run now.
    pub fn put(&self, work: Work) -> Option<Work> {
        let Some(lane) = lane_of(&work) else { return Some(work) };
        let mut map = self.lock();
        match map.lines.entry(lane) {
            Entry::Vacant(free) => {
                free.insert(Line::default());
                Some(work)
            }
            Entry::Occupied(mut taken) => {
                taken.get_mut().waiting.push_back(work);
                map.waiting += 1;
                None
            }
        }
    }

    /// A delivery has ended and its lane may go on. Answers what may run now.
    pub fn next(&self, lane: &Lane) -> Option<Work> {
        let mut map = self.lock();
        let line = map.lines.get_mut(lane)?;
        line.held_by = None;
        match line.waiting.pop_front() {
            Some(work) => {
                map.waiting -= 1;
                Some(work)
            }
            None => {
                map.lines.remove(lane);
                None
            }
        }
    }

    /// A delivery has ended and its lane waits until it is settled.
    pub fn hold(&self, lane: &Lane, message_id: i64) {
        if let Some(line) = self.lock().lines.get_mut(lane) {
            line.held_by = Some(message_id);
        }
    }

    /// A message is settled. Answers what may run now, if its lane waited for it. `gap` is a dead letter that later ones
    /// of the lane tell of.
    pub fn settled(&self, lane: &Lane, message_id: i64, gap: Option<i64>) -> Option<Work> {
        {
            let mut map = self.lock();
            let line = map.lines.get_mut(lane)?;
            if line.held_by != Some(message_id) {
                return None;
            }
            for work in &mut line.waiting {
                let since = &mut work.claimed.message.gap_since;
                *since = since.or(gap);
            }
        }
        self.next(lane)
    }

    /// Takes out all that waits in a lane. What runs, or holds it, stays.
    pub fn take(&self, lane: &Lane) -> Vec<Work> {
        let mut map = self.lock();
        let waiting = map.lines.get_mut(lane).map(|line| std::mem::take(&mut line.waiting)).unwrap_or_default();
        map.waiting -= u32::try_from(waiting.len()).unwrap_or(0);
        waiting.into()
    }

    /// The lane is no longer ours: answers what still waits in it, and forgets it.
    pub fn close(&self, lane: &Lane) -> Vec<Work> {
        let waiting = self.take(lane);
        self.lock().lines.remove(lane);
        waiting
    }

    /// What waits in all lanes, in order within each. What runs goes on, and finds nothing behind it.
    pub fn take_back(&self) -> Vec<Work> {
        let mut map = self.lock();
        map.waiting = 0;
        map.lines.values_mut().flat_map(|line| std::mem::take(&mut line.waiting)).collect()
    }

    /// A message that was to run will not: nothing of its lane is with the slots.
    pub fn give_up(&self, work: &Work) {
        if let Some(lane) = lane_of(work) {
            self.lock().lines.remove(&lane);
        }
    }

    /// No settle will come any more for the messages that hold lanes.
    pub fn forget_held(&self) {
        self.lock().lines.retain(|_, line| line.held_by.is_none());
    }

    pub fn waiting(&self) -> u32 {
        self.lock().waiting
    }

    /// Lanes in which at least so many messages wait.
    pub fn full(&self, waiting: u32) -> Vec<Lane> {
        let map = self.lock();
        let is_full = |line: &Line| line.waiting.len() as u64 + 1 >= u64::from(waiting);
        map.lines.iter().filter(|(_, line)| is_full(line)).map(|(lane, _)| lane.clone()).collect()
    }
}

/// The lane whose messages this one waits for.
fn lane_of(work: &Work) -> Option<Lane> {
    in_lane(work.claimed.keyed.as_ref()).map(|keyed| keyed.lane.clone())
}

/// What is keyed and has a mode. A compacted message without one only meets its key when it is settled.
pub fn in_lane(keyed: Option<&Keyed>) -> Option<&Keyed> {
    keyed.filter(|keyed| keyed.mode != Concurrency::Parallel)
}
