//! The janitor's steps: what keeps a database that runs for years as fast as on its first day. Each step is bounded, can
//! be done again after a crash at any point, and runs on one host at a time; when to run them is the consumer's to say.

mod components;

mod keys;

mod lag;

mod retention;

mod sweep;

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use sqlx::{Postgres, Row, Transaction};

pub use self::{
    components::{Deployed, record_deployment},
    keys::{StuckCause, StuckKeys},
};
use crate::database::Database;

/// One kind of maintenance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Step {
    /// Keeps empty partitions ahead of every log.
    Extend,
    /// Forgets idempotency keys after `idempotency_ttl`.
    IdempotencyKeys,
    /// Deletes dead letters after `dead_letter_retention`.
    DeadLetters,
    /// Passes groups that lag longer than `max_lag`.
    Lag,
    /// Deletes old versions of compacted keys after `retention`, once every group is past them.
    Versions,
    /// Drops partitions of the log after `retention`, once every group is past them.
    Retention,
    /// Looks for keys that nobody would run, and makes them ready. Finds none, unless there is a bug.
    Keys,
    /// Deletes components and deployments that are no longer of use.
    Components,
}

impl Step {
    /// In the order in which they are best run: what is passed or dead no longer holds a partition.
    pub const ALL: [Self; 8] = [
        Self::Extend,
        Self::IdempotencyKeys,
        Self::DeadLetters,
        Self::Lag,
        Self::Versions,
        Self::Retention,
        Self::Keys,
        Self::Components,
    ];

    /// As `status` shows it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Extend => "extend",
            Self::IdempotencyKeys => "idempotency_keys",
            Self::DeadLetters => "dead_letters",
            Self::Lag => "lag",
            Self::Versions => "versions",
            Self::Retention => "retention",
            Self::Keys => "keys",
            Self::Components => "components",
        }
    }

    /// Second number of the step's advisory lock. Part of what hosts of different versions agree on.
    pub(super) fn lock(self) -> i32 {
        match self {
            Self::Extend => 1,
            Self::IdempotencyKeys => 2,
            Self::DeadLetters => 3,
            Self::Lag => 4,
            Self::Retention => 5,
            Self::Components => 6,
            Self::Versions => 7,
            Self::Keys => 8,
        }
    }
}

/// What one run of a step did.
#[derive(Debug, Default)]
pub struct Report {
    /// Rows deleted, partitions attached or dropped, groups passed, keys that were stuck.
    pub rows: u64,
    /// What failed. The rest of the step was done all the same.
    pub errors: Vec<anyhow::Error>,
    /// Retention only, by stream: partitions that are too old and still needed.
    pub pinned: BTreeMap<String, Pinned>,
    /// Lag only.
    pub passed: Vec<Passed>,
    /// Keys only.
    pub stuck: Vec<StuckKeys>,
}

/// Why a stream's retention does not go on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pinned {
    pub partitions: u64,
    /// The group that needs the lowest of them.
    pub group: String,
}

/// A group whose cursor was moved over messages that it will never see.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Passed {
    pub group: String,
    pub from: i64,
    pub to: i64,
}

impl Report {
    /// Takes in what one stream or partition of a step came to; a failure stops nothing else.
    fn add(&mut self, done: Result<u64>) {
        match done {
            Ok(rows) => self.rows += rows,
            Err(error) => self.errors.push(error),
        }
    }
}

/// Rows that one statement deletes at most: a few milliseconds of work, so that no lock is held for long.
const ROWS_MAX: i64 = 1000;

/// How long a step goes on while there is more to do; the next round takes the rest.
const TIME_MAX: Duration = Duration::from_secs(2);

/// How long a statement of maintenance waits for a lock. Others queue behind a waiting lock, so it is short; what is
/// not had in time is had in another round.
const LOCK_TIMEOUT: Duration = Duration::from_secs(1);

/// The same, for one transaction.
const LOCK_TIMEOUT_SQL: &str = "set local lock_timeout = '1s'";

/// The transaction that holds a step's lock does nothing while the step works, which may take long. A host that is frozen
/// meanwhile keeps the others from the step no longer than this.
const BEGIN_STEP: &str = "begin; set local idle_in_transaction_session_timeout = '5min'";

/// Runs one step. What another host is doing just now is left to it.
///
/// An error says that nothing of the step could be done. Dropping the future leaves what a later run finishes.
pub async fn maintain(database: &Database, step: Step) -> Result<Report> {
    match step {
        Step::Extend => sweep::extend(database).await,
        Step::IdempotencyKeys => sweep::expire_idempotency_keys(database).await,
        Step::DeadLetters => sweep::expire_dead_letters(database).await,
        Step::Lag => lag::pass(database).await,
        Step::Versions => sweep::thin(database).await,
        Step::Retention => retention::drop_old_partitions(database).await,
        Step::Keys => keys::mend(database).await,
        Step::Components => components::expire(database).await,
    }
    .with_context(|| format!("run the maintenance step {}", step.name()))
}

/// Begins a transaction of a step; `None` while another host is at it.
async fn begin(database: &Database, step: Step) -> Result<Option<Transaction<'static, Postgres>>> {
    let mut tx = database.begin_with(BEGIN_STEP).await.context("begin")?;
    sqlx::query(LOCK_TIMEOUT_SQL).execute(&mut *tx).await.context("bound the waits for locks")?;
    let lock = database.query(include_str!("lock_step.sql")).bind(step.lock());
    let is_ours: bool = lock.fetch_one(&mut *tx).await.context("take the step's lock")?.try_get(0)?;
    Ok(is_ours.then_some(tx))
}

/// Counts what a bounded statement does that is repeated, each time in a transaction of its own.
struct Rounds {
    started: Instant,
    rows: u64,
}

impl Rounds {
    fn start() -> Self {
        Self { started: Instant::now(), rows: 0 }
    }

    /// Takes in one round, and says whether another may follow: while it was full and time allows.
    fn add(&mut self, rows: u64) -> bool {
        self.rows += rows;
        rows >= ROWS_MAX.unsigned_abs() && !self.is_over()
    }

    /// The next round takes the rest.
    fn is_over(&self) -> bool {
        self.started.elapsed() >= TIME_MAX
    }
}
