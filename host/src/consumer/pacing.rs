//! How many messages to hold. Enough that no slot waits for the database, few enough that other hosts get their share
//! and a crash redelivers little.

use std::time::{Duration, Instant};

/// How much work to hold beyond the slots, in time, at least. A turn takes a few milliseconds; where it takes longer, on a
/// busy database or a slow disk, twice the time of a turn: else the slots would wait for it, however fast they are.
const AHEAD: Duration = Duration::from_millis(50);

/// The most, however long turns take.
const AHEAD_MAX: Duration = Duration::from_secs(1);

/// Most messages one group holds on one host: four turns of the largest size, so that the database works on the next
/// turn while the slots work on this one.
pub const HELD_MAX: u32 = 2000;

/// Most messages of one turn.
pub const TURN_MAX: u32 = 500;

/// Most messages of one key that wait here for it, whatever its pace: a crash counts an attempt for each.
const LANE_MAX: u32 = 256;

/// Payload bytes of one turn at most.
pub const TURN_BYTES_MAX: u64 = 1 << 20;

/// Deliveries a second from which on a group is busy.
const BUSY: f64 = 1000.0;

/// See [`Pace::keep_keys`].
const KEEP_KEYS: Duration = Duration::from_millis(5);

/// The same while the group is busy: less than a message waits in its backlog then.
const KEEP_KEYS_BUSY: Duration = Duration::from_millis(50);

/// See [`Pace::gather`].
const GATHER: Duration = Duration::from_millis(5);

/// Deliveries a second from which on a settle is worth waiting for.
const GATHERED: f64 = 10_000.0;

/// Follows how fast the group's deliveries end.
#[derive(Debug)]
pub struct Pace {
    slots: u32,
    per_second: f64,
    since: Instant,
    ended: u32,
    /// How long a turn takes, as of late.
    turn: Duration,
    /// How long a handler takes, as of late; before the first has ended it is not known.
    run: Option<Duration>,
}

/// The rate is measured over this long.
const WINDOW: Duration = Duration::from_millis(20);

impl Pace {
    pub fn new(slots: u32) -> Self {
        Self { slots, per_second: 0.0, since: Instant::now(), ended: 0, turn: Duration::ZERO, run: None }
    }

    /// Notes that `count` deliveries have ended.
    pub fn ended(&mut self, count: u32) {
        self.ended += count;
        let elapsed = self.since.elapsed();
        if elapsed >= WINDOW {
            let rate = f64::from(self.ended) / elapsed.as_secs_f64();
            // A faster rate counts at once, a slower one by halves.
            self.per_second = rate.max((self.per_second + rate) / 2.0);
            self.ended = 0;
            self.since = Instant::now();
        }
    }

    /// Notes how long a turn took. A slower one counts by a quarter: one that waited for a lock is not the rule.
    pub fn turned(&mut self, took: Duration) {
        self.turn = if took < self.turn { (self.turn + took) / 2 } else { (self.turn * 3 + took) / 4 };
    }

    /// Notes how long a handler ran.
    pub fn ran(&mut self, busy: Duration) {
        self.run = Some(self.run.map_or(busy, |run| (run * 7 + busy) / 8));
    }

    /// How much work to hold, in time.
    fn ahead(&self) -> Duration {
        (self.turn * 2).clamp(AHEAD, AHEAD_MAX)
    }

    /// How many messages to hold at most, running ones included.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a rate is finite and not negative; `as` saturates"
    )]
    pub fn held_max(&self) -> u32 {
        let ahead = (self.per_second * self.ahead().as_secs_f64()) as u32;
        (self.slots + ahead).min(HELD_MAX.max(self.slots))
    }

    /// How long a key with nothing left to run is kept for messages that may come with the next turns. A group that is busy
    /// meets its keys again within a few turns, and a lease that stays is one row written and one deleted less for each
    /// message; one that is not busy hands its keys on at once, so that no other host waits for them.
    pub fn keep_keys(&self) -> Duration {
        if self.per_second >= BUSY { KEEP_KEYS_BUSY } else { KEEP_KEYS }
    }

    /// How long a delivery with effects waits for others to be settled with. A settle is five round trips and a durable
    /// commit, however many it settles: where dozens more will have ended within a moment they share that.
    pub fn gather(&self) -> Duration {
        if self.per_second >= GATHERED { GATHER } else { Duration::ZERO }
    }

    /// How many messages of one key a turn may bring: what one slot can run in the time between turns. By how long handlers
    /// run and not by how many end: a key alone that was brought too few would end no more, and never be brought more.
    pub fn lane_max(&self) -> u32 {
        let Some(run) = self.run else { return 1 };
        let fit = self.ahead().as_micros() / run.as_micros().max(1);
        u32::try_from(fit).unwrap_or(u32::MAX).clamp(1, LANE_MAX)
    }

    /// Whether a turn is worth its price when `room` messages could be claimed.
    pub fn worth_a_turn(&self, room: u32) -> bool {
        room >= self.turn_min()
    }

    /// With how many messages in hand the next turn is worth its price.
    pub fn refill_at(&self) -> u32 {
        self.held_max() - self.turn_min()
    }

    fn turn_min(&self) -> u32 {
        (self.held_max() / 4).clamp(1, TURN_MAX / 2)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slow_group_holds_no_more_than_its_slots() {
        assert_eq!(Pace::new(16).held_max(), 16);
        assert!(Pace::new(1).worth_a_turn(1));
    }

    #[test]
    fn a_fast_group_holds_a_bounded_backlog() {
        let mut pace = Pace::new(16);
        pace.per_second = 2000.0;
        assert_eq!(pace.held_max(), 116);
        pace.per_second = 1e9;
        assert_eq!(pace.held_max(), HELD_MAX);
    }

    #[test]
    fn slow_turns_are_bridged_by_a_larger_backlog() {
        let mut pace = Pace::new(16);
        pace.per_second = 2000.0;
        (0..20).for_each(|_| pace.turned(Duration::from_millis(5)));
        assert_eq!(pace.held_max(), 116);
        (0..20).for_each(|_| pace.turned(Duration::from_millis(200)));
        assert!((780..=816).contains(&pace.held_max()), "{}", pace.held_max());
        (0..20).for_each(|_| pace.turned(Duration::from_secs(60)));
        assert_eq!(pace.held_max(), HELD_MAX);
    }

    #[test]
    fn a_key_is_brought_what_one_slot_can_run_between_turns() {
        let mut pace = Pace::new(16);
        assert_eq!(pace.lane_max(), 1, "nothing is known yet");
        pace.ran(Duration::from_millis(10));
        assert_eq!(pace.lane_max(), 5);
        (0..40).for_each(|_| pace.ran(Duration::from_micros(20)));
        assert_eq!(pace.lane_max(), LANE_MAX, "however few end");
        (0..40).for_each(|_| pace.ran(Duration::from_secs(2)));
        assert_eq!(pace.lane_max(), 1);
    }

    #[test]
    fn more_slots_than_the_bound_are_all_filled() {
        assert_eq!(Pace::new(1000).held_max(), 1000);
    }
}
