//! Which keys this host has in the database, and which of them have nothing left to run here.

use std::{
    collections::{HashMap, HashSet, VecDeque, hash_map::Entry},
    time::{Duration, Instant},
};

use crate::engine::Lane;

/// See the module. Invariant: a lane is counted, or idle, or not ours; and an idle one has an entry in the queue.
#[derive(Debug, Default)]
pub struct KeysHeld {
    /// How many messages of a lane are open or on their way through a settle; at least one.
    busy: HashMap<Lane, Busy>,
    /// Lanes without, and since when.
    idle: HashMap<Lane, Instant>,
    /// The idle lanes in the order in which they became so; an entry whose time differs from `idle` is void.
    queue: VecDeque<(Instant, Lane)>,
    /// Idle lanes behind which something waits in the database, as far as this host knows: they are handed on at once.
    deep: HashSet<Lane>,
}

#[derive(Debug, Default)]
struct Busy {
    messages: u32,
    is_deep: bool,
}

impl KeysHeld {
    /// A message of the lane was claimed. `is_deferred`: it had waited in the database; others may still do. So may
    /// others when the lane has got as many as a turn brings at most.
    pub fn claimed(&mut self, lane: &Lane, is_deferred: bool, lane_max: u32) {
        self.idle.remove(lane);
        self.deep.remove(lane);
        let busy = self.busy.entry(lane.clone()).or_default();
        busy.messages += 1;
        busy.is_deep |= is_deferred || busy.messages >= lane_max;
    }

    /// A message of the lane is done, settled, or no longer ours.
    pub fn ended(&mut self, lane: &Lane) {
        let Entry::Occupied(mut busy) = self.busy.entry(lane.clone()) else { return };
        busy.get_mut().messages -= 1;
        if busy.get().messages == 0 {
            let is_deep = busy.remove().is_deep;
            self.note_idle(lane.clone(), is_deep);
        }
    }

    /// The database says that the lane is ours.
    pub fn found(&mut self, lane: Lane) {
        if !self.busy.contains_key(&lane) && !self.idle.contains_key(&lane) {
            self.note_idle(lane, true);
        }
    }

    fn note_idle(&mut self, lane: Lane, is_deep: bool) {
        let now = Instant::now();
        self.idle.insert(lane.clone(), now);
        self.queue.push_back((now, lane.clone()));
        if is_deep {
            self.deep.insert(lane);
        }
    }

    /// The lane is no longer ours.
    pub fn lost(&mut self, lane: &Lane) {
        self.busy.remove(lane);
        self.idle.remove(lane);
        self.deep.remove(lane);
    }

    /// Lanes to hand on: those that have been idle for `keep`, and those behind which something waits.
    pub fn due(&self, keep: Duration) -> Vec<Lane> {
        let now = Instant::now();
        let old = self.queue.iter().take_while(|(since, _)| now - *since >= keep);
        let old = old.filter(|(since, lane)| self.idle.get(lane) == Some(since) && !self.deep.contains(lane));
        old.map(|(_, lane)| lane).chain(&self.deep).cloned().collect()
    }

    /// When the next lane has been idle for `keep`.
    pub fn due_at(&mut self, keep: Duration) -> Option<Instant> {
        if !self.deep.is_empty() {
            return Some(Instant::now());
        }
        while self.queue.front().is_some_and(|(since, lane)| self.idle.get(lane) != Some(since)) {
            self.queue.pop_front();
        }
        self.queue.front().map(|(since, _)| *since + keep)
    }

    pub fn has_idle(&self) -> bool {
        !self.idle.is_empty()
    }

    pub fn clear(&mut self) {
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lane(key: &str) -> Lane {
        Lane { key: key.into(), number: 0 }
    }

    const LONG: Duration = Duration::from_secs(3600);

    #[test]
    fn a_lane_is_idle_when_its_last_message_has_ended() {
        let mut keys = KeysHeld::default();
        keys.claimed(&lane("a"), false, 64);
        keys.claimed(&lane("a"), false, 64);
        keys.ended(&lane("a"));
        assert!(!keys.has_idle() && keys.due_at(LONG).is_none());
        keys.ended(&lane("a"));
        assert!(keys.has_idle() && keys.due(LONG).is_empty());
        assert_eq!(keys.due(Duration::ZERO), [lane("a")]);
        keys.claimed(&lane("a"), false, 64);
        assert!(keys.due(Duration::ZERO).is_empty() && keys.due_at(LONG).is_none(), "it is in use again");
    }

    #[test]
    fn a_lane_with_more_behind_it_is_handed_on_at_once() {
        for (is_deferred, messages) in [(true, 1), (false, 3)] {
            let mut keys = KeysHeld::default();
            (0..messages).for_each(|_| keys.claimed(&lane("a"), is_deferred, 3));
            (0..messages).for_each(|_| keys.ended(&lane("a")));
            assert_eq!(keys.due(LONG), [lane("a")]);
            assert!(keys.due_at(LONG).is_some_and(|at| at <= Instant::now()));
            keys.lost(&lane("a"));
            assert!(!keys.has_idle() && keys.due(Duration::ZERO).is_empty());
        }
    }

    #[test]
    fn what_the_database_says_is_ours_is_handed_on_unless_it_is_in_use() {
        let mut keys = KeysHeld::default();
        keys.claimed(&lane("a"), false, 64);
        keys.found(lane("a"));
        keys.found(lane("b"));
        assert_eq!(keys.due(LONG), [lane("b")]);
    }
}
