//! Finds work for idle groups: one query for all of them. Wakes lead to earlier looks, never to fewer.

use std::{
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Duration,
};

use tokio::time::{Instant, sleep, sleep_until};
use tokio_util::sync::CancellationToken;

use super::{counters::Counters, hub::Hub};
use crate::{
    database::{Database, Wake, listen},
    engine::{groups_with_work, hint},
};

/// The shortest and the longest interval.
#[derive(Clone, Copy, Debug)]
pub struct Interval {
    pub min: Duration,
    pub max: Duration,
}

/// At this factor an interval of 5 ms reaches 100 ms after 0.3 s of quiet.
const SLOWER: f64 = 1.3;

/// Hints to other hosts are collected for this long, so that a busy host sends at most 50 a second.
const HINT_DELAY: Duration = Duration::from_millis(20);

/// Polls until `stop`.
pub async fn poll(
    database: Database,
    hub: Arc<Hub>,
    counters: Arc<Counters>,
    interval: Interval,
    stop: CancellationToken,
) {
    let mut wait = interval.min;
    let mut due = Instant::now() + wait;
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            () = sleep_until(due) => {}
            () = hub.active.notified() => {
                // Only ever earlier: a busy group that notifies all the time must not put off the look at the idle ones.
                wait = interval.min;
                due = due.min(Instant::now() + wait);
                continue;
            }
        }
        wait = wait.mul_f64(SLOWER).min(interval.max);
        due = Instant::now() + wait;
        let idle = hub.idle_groups();
        if idle.is_empty() {
            continue;
        }
        counters.idle_polls.fetch_add(1, Relaxed);
        match groups_with_work(&database, &idle).await {
            Ok(groups) => {
                if !groups.is_empty() {
                    wait = interval.min;
                }
                due = Instant::now() + wait;
                for group in groups {
                    hub.with_seat(group, |seat| seat.wake());
                }
            }
            Err(error) => {
                tracing::debug!("failed to look for work, will try again: {error:#}");
                wait = interval.max.max(Duration::from_millis(100));
                due = Instant::now() + wait;
            }
        }
    }
}

/// Tells other hosts what this one produced or let go, at most once in [`HINT_DELAY`], from a connection of its own and
/// after the commit: a notification inside a produce would serialise every commit of the cluster.
pub async fn send_hints(database: Database, hub: Arc<Hub>, stop: CancellationToken) {
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            () = sleep(HINT_DELAY) => {}
        }
        send_hints_now(&database, &hub).await;
    }
}

/// Tells other hosts what they have not been told yet.
pub async fn send_hints_now(database: &Database, hub: &Hub) {
    for stream in hub.take_ready() {
        if let Err(error) = hint(database, &stream).await {
            tracing::debug!("failed to hint other hosts, they poll: {error:#}");
        }
    }
}

/// Hears other hosts' hints.
pub async fn hear_hints(database: Database, hub: Arc<Hub>, stop: CancellationToken) {
    let channel = database.schema.channel();
    let on_wake = |wake| match wake {
        Wake::Notified { payload, .. } => hub.wake_stream(&payload),
        Wake::LookAgain => hub.wake_all(),
    };
    listen(&database, &[channel.as_str()], on_wake, stop).await;
}
