//! Which keys of a group make most of its work on this host: how many deliveries, and how long they took, over the last
//! one to two minutes. Memory is bounded whatever the number of keys; figures of few keys are exact, of very many ones a
//! lower bound. Keys without a mode are left out: they run in parallel, so none of them can be too hot.

use std::{
    collections::HashSet,
    sync::Mutex,
    time::{Duration, Instant},
};

use datasketches::frequencies::{ErrorType, FrequentItemsSketch};
use serde_json::{Value, json};

use crate::{
    engine::{Keyed, Lane},
    handler::Concurrency,
};

/// Size of a sketch: it counts up to 192 lanes exactly; with more, a lane's figure is too low by at most 1.4 % of all.
const SKETCH_SIZE: usize = 256;

/// How long one window is filled; published are this one and the one before.
const WINDOW: Duration = Duration::from_secs(60);

/// Keys of a group that a heartbeat carries at most.
const PUBLISHED_MAX: usize = 20;

/// What has less of the group's messages and of its handling time is not worth a place in every heartbeat.
const PUBLISHED_SHARE_MIN: f64 = 0.01;

/// See the module.
#[derive(Debug, Default)]
pub struct HotKeys(Mutex<Windows>);

#[derive(Debug)]
struct Windows {
    current: Window,
    last: Option<(Window, Duration)>,
}

/// A lane, and how it is treated: one whose mode changes counts as two for a while.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct HotLane {
    lane: Lane,
    is_ordered: bool,
}

#[derive(Debug)]
struct Window {
    started: Instant,
    /// Of all deliveries, those without a key included.
    messages: u64,
    busy: Duration,
    messages_of: FrequentItemsSketch<HotLane>,
    busy_us_of: FrequentItemsSketch<HotLane>,
}

impl Window {
    fn new(started: Instant) -> Self {
        let sketch = || FrequentItemsSketch::new(SKETCH_SIZE).expect("the size is a power of two in its bounds");
        Self { started, messages: 0, busy: Duration::ZERO, messages_of: sketch(), busy_us_of: sketch() }
    }
}

impl Default for Windows {
    fn default() -> Self {
        Self { current: Window::new(Instant::now()), last: None }
    }
}

impl HotKeys {
    /// A delivery has ended, whatever came of it.
    pub fn note(&self, keyed: Option<&Keyed>, busy: Duration) {
        self.0.lock().expect("counting does not panic").note(keyed, busy, Instant::now());
    }

    /// `None` while no key with a mode was delivered.
    pub fn snapshot(&self) -> Option<Value> {
        self.0.lock().expect("counting does not panic").snapshot(Instant::now())
    }
}

impl Windows {
    fn turn(&mut self, now: Instant) {
        let age = now.saturating_duration_since(self.current.started);
        if age >= WINDOW {
            self.last = Some((std::mem::replace(&mut self.current, Window::new(now)), age));
        }
    }

    fn length(&self, now: Instant) -> Duration {
        let last = self.last.as_ref().map_or(Duration::ZERO, |(_, length)| *length);
        last + now.saturating_duration_since(self.current.started)
    }

    fn note(&mut self, keyed: Option<&Keyed>, busy: Duration, now: Instant) {
        self.turn(now);
        // What ran for longer than the windows reach back was busy in all of them, and not more.
        let busy = busy.min(self.length(now));
        self.current.messages += 1;
        self.current.busy += busy;
        if let Some(keyed) = keyed.filter(|keyed| keyed.mode != Concurrency::Parallel) {
            let hot = HotLane { lane: keyed.lane.clone(), is_ordered: keyed.mode == Concurrency::Ordered };
            self.current.messages_of.update_ref(&hot);
            self.current.busy_us_of.update_with_count(hot, u64::try_from(busy.as_micros()).unwrap_or(u64::MAX >> 16));
        }
    }

    fn windows(&self) -> impl Iterator<Item = &Window> {
        self.last.iter().map(|(window, _)| window).chain([&self.current])
    }

    fn snapshot(&mut self, now: Instant) -> Option<Value> {
        self.turn(now);
        let messages: u64 = self.windows().map(|window| window.messages).sum();
        let busy: Duration = self.windows().map(|window| window.busy).sum();
        let share = |of: u64, all: u64| if all == 0 { 0.0 } else { of as f64 / all as f64 };
        let busy_us = u64::try_from(busy.as_micros()).unwrap_or(u64::MAX);
        let mut hot: Vec<_> = self
            .candidates()
            .into_iter()
            .map(|hot| {
                let of = |sketch: fn(&Window) -> &FrequentItemsSketch<HotLane>| {
                    self.windows().map(|window| sketch(window).lower_bound(&hot)).sum::<u64>()
                };
                let (count, busy) = (of(|window| &window.messages_of), of(|window| &window.busy_us_of));
                (share(count, messages).max(share(busy, busy_us)), hot, count, busy)
            })
            .collect();
        hot.sort_by(|left, right| right.0.total_cmp(&left.0));
        // The hottest is told in any case: it says how much the group can do in parallel.
        let is_worth_it =
            |(place, (share, ..)): &(usize, &(f64, HotLane, u64, u64))| *place == 0 || *share >= PUBLISHED_SHARE_MIN;
        let top: Vec<_> = hot
            .iter()
            .enumerate()
            .take(PUBLISHED_MAX)
            .take_while(is_worth_it)
            .map(|(_, (_, hot, count, busy))| {
                json!({
                    "key": &*hot.lane.key,
                    "lane": hot.lane.number,
                    "ordered": hot.is_ordered,
                    "messages": count,
                    "busy_ms": *busy as f64 / 1000.0,
                })
            })
            .collect();
        (!top.is_empty()).then(|| {
            json!({
                "window_ms": u64::try_from(self.length(now).as_millis()).unwrap_or(u64::MAX),
                "messages": messages,
                "busy_ms": busy_us as f64 / 1000.0,
                "top": top,
            })
        })
    }

    /// The lanes that may be among the hottest, of each window and measure.
    fn candidates(&self) -> HashSet<HotLane> {
        let sketches = self.windows().flat_map(|window| [&window.messages_of, &window.busy_us_of]);
        let hottest = |sketch: &FrequentItemsSketch<HotLane>| {
            let rows = sketch.frequent_items(ErrorType::NoFalseNegatives);
            rows.into_iter().take(2 * PUBLISHED_MAX).map(|row| row.item().clone()).collect::<Vec<_>>()
        };
        sketches.flat_map(hottest).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keyed(key: &str, mode: Concurrency) -> Keyed {
        Keyed { lane: Lane { key: key.into(), number: 0 }, mode, is_compacted: false }
    }

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    /// Windows that began at the second value.
    fn begun() -> (Windows, Instant) {
        let start = Instant::now();
        (Windows { current: Window::new(start), last: None }, start)
    }

    #[test]
    fn deliveries_and_their_time_are_counted_for_each_key_that_has_a_mode() {
        let (mut windows, start) = begun();
        assert_eq!(windows.snapshot(start), None);
        let now = start + ms(10_000);
        windows.note(None, ms(100), now);
        windows.note(Some(&keyed("free", Concurrency::Parallel)), ms(100), now);
        assert_eq!(windows.snapshot(now), None, "no key that could be too hot");
        for _ in 0..3 {
            windows.note(Some(&keyed("often", Concurrency::Ordered)), ms(10), now);
        }
        windows.note(Some(&keyed("slow", Concurrency::Exclusive)), ms(770), now);
        let expected = json!({ "window_ms": 10_000, "messages": 6, "busy_ms": 1000.0, "top": [
            { "key": "slow", "lane": 0, "ordered": false, "messages": 1, "busy_ms": 770.0 },
            { "key": "often", "lane": 0, "ordered": true, "messages": 3, "busy_ms": 30.0 },
        ]});
        assert_eq!(windows.snapshot(now), Some(expected));
    }

    #[test]
    fn figures_are_of_the_last_one_to_two_minutes() {
        let (mut windows, start) = begun();
        let told = |windows: &mut Windows, at: u64| {
            windows.snapshot(start + ms(at)).map(|told| (told["window_ms"].as_u64(), told["messages"].as_u64()))
        };
        let key = keyed("a", Concurrency::Ordered);
        windows.note(Some(&key), ms(1), start + ms(1_000));
        windows.note(Some(&key), ms(1), start + ms(59_000));
        assert_eq!(told(&mut windows, 59_000), Some((Some(59_000), Some(2))));
        windows.note(Some(&key), ms(1), start + ms(61_000));
        assert_eq!(told(&mut windows, 70_000), Some((Some(70_000), Some(3))));
        assert_eq!(told(&mut windows, 125_000), Some((Some(64_000), Some(1))), "the first minute is forgotten");
        assert_eq!(told(&mut windows, 190_000), None);
    }

    /// A delivery of an hour was busy in the whole of what the windows reach back to.
    #[test]
    fn a_key_is_never_busier_than_its_windows_are_long() {
        let (mut windows, start) = begun();
        windows.note(Some(&keyed("a", Concurrency::Ordered)), Duration::from_secs(3600), start + ms(20_000));
        let told = windows.snapshot(start + ms(20_000)).expect("a hot key");
        assert_eq!(told["top"][0]["busy_ms"], 20_000.0);
    }

    /// Goal: memory and what is published stay bounded, and the hot key is found among very many. Method: 100,000 keys
    /// with one message each, and one key with a tenth of all.
    #[test]
    fn a_hot_key_is_found_among_very_many() {
        let (mut windows, start) = begun();
        for n in 0..100_000_u32 {
            windows.note(Some(&keyed(&format!("cold-{n}"), Concurrency::Exclusive)), ms(1), start);
            if n % 9 == 0 {
                windows.note(Some(&keyed("hot", Concurrency::Ordered)), ms(2), start + ms(1));
            }
        }
        assert!(windows.current.messages_of.num_active_items() <= 192);
        let told = windows.snapshot(start + ms(30_000)).expect("a hot key");
        let top = told["top"].as_array().expect("a list");
        assert!(top.len() <= PUBLISHED_MAX && top[0]["key"] == "hot", "{told}");
        let (messages, exact) = (top[0]["messages"].as_u64().expect("a number"), 11_112);
        assert!(messages <= exact && messages >= exact - 112 * 14, "{messages}");
    }
}
