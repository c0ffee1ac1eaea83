//! Transactions that the client owns: it may run them again as long as no COMMIT was sent. Those in which a caller's
//! closure runs are in `connection.rs`, and are never repeated.
//!
//! Each runs on a [`Line`]: shared flights that follow one another keep theirs, since a connection that goes through the pool
//! is asked whether it still lives before it may be taken again, a round trip more for each transaction.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use sqlx::{PgConnection, PgPool, Postgres, pool::PoolConnection};

use super::{Error, options::Entry};
use crate::{
    database::{Database, DatabaseError, Reaction, is_ambiguous_commit, reaction},
    engine::{self, NewEntry, ProduceError, Produced},
};

/// How long a line is kept at most: the pool replaces connections that are old, and looks when it gets them back.
const KEPT_MAX: Duration = Duration::from_secs(1);

/// How long a transaction that failed before its COMMIT is tried again: long enough for a restart of the server, and
/// short enough that whoever waits for the answer still does.
const RETRY_MAX: Duration = Duration::from_secs(10);

/// Between two tries, doubling from the first to the second of these.
const PAUSE: (Duration, Duration) = (Duration::from_millis(10), Duration::from_millis(500));

/// How long a transaction waits for a lock of another producer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Patience {
    /// As long as the role's `lock_timeout` allows.
    Long,
    /// For one that holds only what is known to be blocked. It then stands aside for others that are.
    Blocked,
    /// For one that several callers share: what is blocked must leave it.
    Shared,
}

impl Patience {
    /// One message to the server. READ COMMITTED whatever the default is: a concurrent duplicate is then answered.
    fn begin(self) -> &'static str {
        match self {
            Self::Long => {
                "begin isolation level read committed; set local idle_in_transaction_session_timeout = '1min'"
            }
            Self::Blocked => {
                "begin isolation level read committed; set local idle_in_transaction_session_timeout = '1min'; \
                 set local lock_timeout = '250ms'"
            }
            Self::Shared => {
                "begin isolation level read committed; set local idle_in_transaction_session_timeout = '1min'; \
                 set local lock_timeout = '20ms'"
            }
        }
    }
}

/// A connection, if one was taken yet. Dropped between two transactions it goes back to the pool, and in the middle of one it is
/// closed: an answer may still be on its way.
#[derive(Debug, Default)]
pub(super) struct Line {
    taken: Option<(PoolConnection<Postgres>, Instant)>,
    is_busy: bool,
}

impl Line {
    /// Unless others wait for a connection, or it was kept for long.
    pub fn kept(self, pool: &PgPool) -> Option<Self> {
        let since = self.taken.as_ref()?.1;
        let is_needed = pool.num_idle() == 0 && pool.size() >= pool.options().get_max_connections();
        (!self.is_busy && !is_needed && since.elapsed() < KEPT_MAX).then_some(self)
    }

    /// A connection with a transaction open.
    async fn begin(&mut self, pool: &PgPool, patience: Patience) -> Result<&mut PgConnection, DatabaseError> {
        self.hang_up();
        if self.taken.is_none() {
            self.taken = Some((pool.acquire().await?, Instant::now()));
        }
        let connection = &mut *self.taken.as_mut().expect("taken above").0;
        self.is_busy = true;
        sqlx::raw_sql(patience.begin()).execute(&mut *connection).await?;
        Ok(connection)
    }

    async fn commit(&mut self) -> Result<(), DatabaseError> {
        self.end("commit").await
    }

    /// After an error. What cannot be rolled back is closed.
    async fn roll_back(&mut self) {
        if let Err(error) = self.end("rollback").await {
            tracing::debug!("failed to roll back, the connection is closed: {error}");
        }
    }

    async fn end(&mut self, statement: &'static str) -> Result<(), DatabaseError> {
        if let Some((connection, _)) = &mut self.taken {
            sqlx::raw_sql(statement).execute(&mut **connection).await?;
        }
        self.is_busy = false;
        Ok(())
    }

    fn hang_up(&mut self) {
        if let Some((connection, _)) = self.taken.take_if(|_| self.is_busy) {
            drop(connection.detach());
        }
        self.is_busy = false;
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        self.hang_up();
    }
}

/// Why a transaction of ours did not commit.
#[derive(Debug)]
pub(super) enum Failure {
    /// Another producer holds a lock for longer than the patience.
    Blocked(DatabaseError),
    /// Some message of it was refused.
    Refused(Error),
    Broken(Error),
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Blocked(error) => Self::Database(Arc::new(error)),
            Failure::Refused(error) | Failure::Broken(error) => error,
        }
    }
}

/// One try.
enum Try {
    /// Nothing was committed, and it may go better next time.
    Again(DatabaseError),
    Failed(Failure),
}

/// Produces a batch in a transaction of its own. Dropping the future leaves it open whether it is committed.
pub(super) async fn produce_alone<'a>(
    database: &Database,
    line: &mut Line,
    stream: &str,
    entries: impl Iterator<Item = &'a Entry>,
    patience: Patience,
) -> Result<Vec<Produced>, Failure> {
    let batch: Vec<_> = entries
        .map(|entry| NewEntry { message: &entry.message, deliver_after: entry.deliver_after.as_deref() })
        .collect();
    let (started, mut pause) = (Instant::now(), PAUSE.0);
    loop {
        let error = match once(database, line, stream, &batch, patience).await {
            Ok(produced) => return Ok(produced),
            Err(Try::Failed(failure)) => return Err(failure),
            Err(Try::Again(error)) => error,
        };
        if started.elapsed() > RETRY_MAX {
            return Err(Failure::Broken(Error::from_database(error)));
        }
        tracing::debug!(stream, "produces again: {error}");
        tokio::time::sleep(pause.mul_f64(1.0 + fastrand::f64())).await;
        pause = (pause * 2).min(PAUSE.1);
    }
}

async fn once(
    database: &Database,
    line: &mut Line,
    stream: &str,
    batch: &[NewEntry<'_>],
    patience: Patience,
) -> Result<Vec<Produced>, Try> {
    let connection = line.begin(&database.pool, patience).await.map_err(before_commit)?;
    let produced = match engine::produce(database, connection, stream, batch).await {
        Ok(produced) => produced,
        Err(error) => {
            line.roll_back().await;
            return Err(match error {
                ProduceError::Database(error) => before_commit(error),
                refused @ ProduceError::Refused(_) => Try::Failed(Failure::Refused(refused.into())),
            });
        }
    };
    assert_eq!(produced.len(), batch.len(), "every message has an answer");
    line.commit().await.map_err(|error| {
        if is_ambiguous_commit(&error) {
            Try::Failed(Failure::Broken(Error::CommitUnknown(Arc::new(error))))
        } else {
            before_commit(error)
        }
    })?;
    Ok(produced)
}

fn before_commit(error: DatabaseError) -> Try {
    let sqlstate = error.as_database_error().and_then(|error| error.code()).unwrap_or_default().into_owned();
    match (&*sqlstate, reaction(&error)) {
        ("55P03", _) => Try::Failed(Failure::Blocked(error)),
        // 57014: somebody's time limit, or a person, ended it.
        ("57014", _) | (_, Reaction::Broken | Reaction::Refused(_)) => {
            Try::Failed(Failure::Broken(Error::from_database(error)))
        }
        (_, Reaction::Busy) => Try::Again(error),
    }
}
