//! Concurrent produces share transactions: while some are under way, whatever else is asked for waits and goes together in
//! the next one. A lone produce never waits for company, so that it is as fast as it can be; only those who came together
//! are given a moment to come together again.
//!
//! An item is in one place at a time: in the channel, `waiting`, a shared flight, `blocked`, or a flight of its own lock.
//! It leaves the last three with its answer, except that a flight gives back to `blocked` what another producer's open
//! transaction holds up. Such an item, and later ones of its lock, fly apart from all others until the lock is free.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    sync::Arc,
    time::Duration,
};

use tokio::{
    sync::mpsc,
    task::{Id, JoinError, JoinSet},
    time::Instant,
};

use super::{
    flight::{Item, Landed, Lock, fly},
    transaction::{Line, Patience},
};
use crate::database::Database;

/// Shared transactions at the same time. The second begins only in the two cases below: with 64 tasks, two that always
/// overlap carry 19 messages each and are slower than one that carries all who wait.
const FLIGHTS_MAX: usize = 2;

/// As many waiting messages make a transaction worth its cost, whatever else is under way.
const COMPANY_MIN: usize = 250;

/// A transaction under way for so long is held up, or its disk is slow; others wait for it no longer.
const HELD_UP: Duration = Duration::from_millis(20);

/// How long a transaction waits for the callers whom the one before has answered: as long as it takes them to be scheduled
/// and to ask again. Without it 64 tasks fall apart into two halves, of which each waits while the other flies.
const LINGER: Duration = Duration::from_micros(500);

/// It waits for as many as this or more, and where fewer than half came back the next transactions do not wait.
const LINGER_MIN: usize = 8;
const LINGER_SKIPS: usize = 15;

/// Most messages of one transaction. Beyond some hundreds a larger one is no faster, and holds its locks for longer.
const FLIGHT_MESSAGES_MAX: usize = 500;

/// Most payload of one transaction, and so of the memory that its statement takes; one message may be larger.
const FLIGHT_BYTES_MAX: usize = 4 << 20;

/// Most items that wait for a flight. Beyond it callers wait to hand theirs over.
pub(super) const WAITING_MAX: usize = 2 * FLIGHT_MESSAGES_MAX;

/// Most items that other producers hold up. Beyond it callers wait to hand theirs over: somebody has to look at the
/// transaction that stays open.
const BLOCKED_MAX: usize = 10_000;

/// The task behind a client.
#[derive(Debug)]
pub(super) struct Coalescer {
    database: Database,
    inbox: mpsc::Receiver<Item>,
    /// Cleared when every client is gone or closed.
    is_open: bool,
    waiting: VecDeque<Item>,
    flights: JoinSet<Landed>,
    /// Of the flight that has just landed.
    line: Option<Line>,
    /// When the newest of them began, and with how many items.
    took_off: Instant,
    aboard: usize,
    /// How many flights do not wait for the callers of the one before.
    linger_skips: usize,
    blocked: VecDeque<Item>,
    /// How many items of a lock are in `blocked`, or in a flight of their own.
    held: HashMap<Lock, usize>,
    /// Flights of blocked items; at most one of a lock.
    solos: JoinSet<Landed>,
    /// The lock of each, and how many items it has.
    solo_locks: HashMap<Id, (Lock, usize)>,
    /// Each waits with a connection, and most connections must stay for others.
    solos_max: usize,
}

impl Coalescer {
    pub fn new(database: Database, inbox: mpsc::Receiver<Item>) -> Self {
        let solos_max = (database.pool.options().get_max_connections() as usize / 4).max(1);
        Self {
            database,
            inbox,
            is_open: true,
            waiting: VecDeque::new(),
            flights: JoinSet::new(),
            line: None,
            took_off: Instant::now(),
            aboard: 0,
            linger_skips: 0,
            blocked: VecDeque::new(),
            held: HashMap::new(),
            solos: JoinSet::new(),
            solo_locks: HashMap::new(),
            solos_max,
        }
    }

    /// Runs until the channel is closed and every item has its answer.
    pub async fn run(mut self) {
        let mut received = Vec::new();
        while self.is_open || !self.is_empty() {
            let room =
                if self.blocked.len() < BLOCKED_MAX { WAITING_MAX.saturating_sub(self.waiting.len()) } else { 0 };
            let is_waited_for = !self.waiting.is_empty() && self.flights.len() < FLIGHTS_MAX;
            tokio::select! {
                count = self.inbox.recv_many(&mut received, room), if self.is_open && room > 0 => {
                    self.is_open = count > 0;
                    received.drain(..).for_each(|item| self.receive(item));
                }
                Some(ended) = self.flights.join_next_with_id() => {
                    self.line = self.landed(ended).kept(&self.database.pool);
                    self.linger().await;
                }
                Some(ended) = self.solos.join_next_with_id() => drop(self.landed(ended)),
                () = tokio::time::sleep_until(self.took_off + HELD_UP), if is_waited_for => {}
            }
            self.start_flights();
            self.line = None; // nobody goes on with it
            self.start_solos();
        }
    }

    fn is_empty(&self) -> bool {
        self.waiting.is_empty() && self.blocked.is_empty() && self.flights.is_empty() && self.solos.is_empty()
    }

    fn receive(&mut self, item: Item) {
        match item.lock() {
            Some(lock) if self.held.contains_key(&lock) => self.block(item),
            _ => self.waiting.push_back(item),
        }
    }

    fn block(&mut self, item: Item) {
        if let Some(lock) = item.lock() {
            *self.held.entry(lock).or_default() += 1;
        }
        self.blocked.push_back(item);
    }

    /// Answers the line that it leaves.
    fn landed(&mut self, ended: Result<(Id, Landed), JoinError>) -> Line {
        let (id, Landed { blocked, line }) = match ended {
            Ok(ended) => ended,
            // Its items are gone with it; their callers hear that the outcome is unknown.
            Err(error) => {
                tracing::error!("a produce has panicked: {error}");
                (error.id(), Landed::default())
            }
        };
        if let Some((lock, count)) = self.solo_locks.remove(&id) {
            let left = self.held.remove(&lock).unwrap_or_default() - count;
            if left > 0 {
                self.held.insert(lock, left);
            }
        }
        blocked.into_iter().for_each(|item| self.block(item));
        line
    }

    /// Takes in what the callers ask for next whom a flight has just answered, before the next one takes off.
    async fn linger(&mut self) {
        let expected = std::mem::take(&mut self.aboard);
        if expected < LINGER_MIN || !self.flights.is_empty() {
            return;
        }
        if self.linger_skips > 0 {
            self.linger_skips -= 1;
            return;
        }
        let until = Instant::now() + LINGER;
        let mut came = 0;
        let has_room = |of: &Self| of.waiting.len() < WAITING_MAX && of.blocked.len() < BLOCKED_MAX;
        while came < expected && has_room(self) && Instant::now() < until {
            match self.inbox.try_recv() {
                Ok(item) => {
                    came += 1;
                    self.receive(item);
                }
                Err(_) => tokio::task::yield_now().await,
            }
        }
        if came < expected / 2 {
            self.linger_skips = LINGER_SKIPS;
        }
    }

    fn start_flights(&mut self) {
        while !self.waiting.is_empty() && self.may_take_off() {
            self.took_off = Instant::now();
            let items = self.board();
            self.aboard = items.len();
            let (database, line) = (self.database.clone(), self.line.take().unwrap_or_default());
            self.flights.spawn(async move { fly(&database, line, items, Patience::Shared).await });
        }
    }

    fn may_take_off(&self) -> bool {
        let is_worth_it = self.waiting.len() >= COMPANY_MIN || self.took_off.elapsed() >= HELD_UP;
        self.flights.is_empty() || (self.flights.len() < FLIGHTS_MAX && is_worth_it)
    }

    /// Takes the longest waiting item and others of its stream, in their order.
    fn board(&mut self) -> Vec<Item> {
        let (mut aboard, mut others, mut bytes) = (Vec::new(), VecDeque::new(), 0);
        let stream = self.waiting.front().map(|item| Arc::clone(&item.stream));
        while let Some(item) = self.waiting.pop_front() {
            let is_full = !aboard.is_empty() && bytes + item.payload_bytes() > FLIGHT_BYTES_MAX;
            if is_full || aboard.len() == FLIGHT_MESSAGES_MAX {
                self.waiting.push_front(item);
                break;
            }
            if stream.as_ref() == Some(&item.stream) {
                bytes += item.payload_bytes();
                aboard.push(item);
            } else {
                others.push_back(item);
            }
        }
        others.append(&mut self.waiting);
        self.waiting = others;
        aboard
    }

    fn start_solos(&mut self) {
        while self.solos.len() < self.solos_max {
            let flying: HashSet<Lock> = self.solo_locks.values().map(|(lock, _)| lock.clone()).collect();
            let is_next = |item: &Item| item.lock().is_some_and(|lock| !flying.contains(&lock));
            let Some(position) = self.blocked.iter().position(is_next) else { return };
            let Some(lock) = self.blocked[position].lock() else { return };
            let items = self.with_lock(&lock);
            let (database, count) = (self.database.clone(), items.len());
            let task = self.solos.spawn(async move { fly(&database, Line::default(), items, Patience::Blocked).await });
            self.solo_locks.insert(task.id(), (lock, count));
        }
    }

    /// Takes the blocked items of a lock, together where they can wait for nothing else, else the first alone.
    fn with_lock(&mut self, lock: &Lock) -> Vec<Item> {
        let (mut taken, mut others) = (Vec::new(), VecDeque::new());
        let mut has_room = true;
        for item in self.blocked.drain(..) {
            let is_alike = item.entry.message.key.is_none() || item.entry.message.idempotency_key.is_none();
            if has_room && item.lock().as_ref() == Some(lock) && (taken.is_empty() || is_alike) {
                taken.push(item);
                has_room = is_alike && taken.len() < FLIGHT_MESSAGES_MAX;
            } else {
                others.push_back(item);
            }
        }
        self.blocked = others;
        taken
    }
}
