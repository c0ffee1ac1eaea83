//! SQL of handlers, in the transaction that settles their delivery. What keeps a guest inside its role is in
//! `functions/guest_sql.sql`; that nothing of it runs when the role no longer counts is in `open.rs`.
//!
//! ```text
//! nothing run yet -> open -> (done) settled in it, committed
//!                      |`--> (anything else) rolled back
//!                      `---> lost: the connection is gone, and with it all the delivery did
//! ```

mod answer;

mod cut;

mod literal;

mod open;

mod refusal;

use std::{
    collections::HashSet,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow};
use sha2::{Digest, Sha256};
use sqlx::PgConnection;
use tokio::time::sleep;

pub use self::open::{OpenSql, Unfinished};
use self::{cut::Cut, open::Open};
use crate::{
    database::{Database, Reaction, reaction},
    handler::{Running, Sql, SqlAnswer, SqlError, SqlStatement},
};

/// How long to wait before the database is asked again for a transaction.
const BEGIN_AGAIN: Duration = Duration::from_millis(100);

/// Most statements that are remembered as whole. Handlers have a few each; one that writes its values into the text
/// costs a round trip more a statement.
const CHECKED_MAX: usize = 1_000;

/// The connections that the SQL of a host's handlers runs on. Cheap to clone.
#[derive(Clone, Debug)]
pub struct GuestDatabase {
    database: Database,
    cut: Cut,
    /// Hashes of statements that were found to be one statement each.
    checked: Arc<Mutex<HashSet<[u8; 32]>>>,
}

/// What a group with `allow.sql` may do.
#[derive(Clone, Debug)]
pub struct GuestGrant {
    guests: Arc<GuestDatabase>,
    /// The function that the guest's statements run in, quoted.
    function: Arc<str>,
}

impl GuestDatabase {
    /// Opens no connection before it is needed, and no more than the host's own pool may have.
    pub fn new(database: &Database) -> Self {
        Self { database: database.for_guests(), cut: Cut::new(database), checked: Arc::default() }
    }

    /// The right to run SQL as `role`, which [`allow_sql`] has prepared.
    pub fn grant(&self, role: &str) -> GuestGrant {
        let name = format!("{:x}", Sha256::digest(role.as_bytes()));
        let function = format!("{}.guest_sql_{}", self.database.schema.quoted(), &name[..32]).into();
        GuestGrant { guests: Arc::new(self.clone()), function }
    }

    /// Waits until every connection is back and closed, and no session of a cut delivery is left.
    pub async fn close(&self) {
        self.cut.ended().await;
        self.database.pool.close().await;
    }

    fn is_checked(&self, text: &str) -> bool {
        self.lock().contains(&<[u8; 32]>::from(Sha256::digest(text.as_bytes())))
    }

    fn note_checked(&self, text: &str) {
        let mut checked = self.lock();
        if checked.len() < CHECKED_MAX {
            checked.insert(Sha256::digest(text.as_bytes()).into());
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashSet<[u8; 32]>> {
        self.checked.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl GuestGrant {
    /// For one delivery.
    pub fn session(&self) -> Arc<GuestSession> {
        Arc::new(GuestSession {
            grant: self.clone(),
            state: tokio::sync::Mutex::new(State::Unused),
            is_ours: AtomicBool::new(false),
        })
    }
}

/// Prepares groups to run SQL as `role`. Fails when the role is missing, may do too much, or is not ours to act as.
pub(super) async fn allow_sql(database: &Database, tx: &mut PgConnection, role: &str) -> Result<()> {
    if !database.has_sessions() {
        return Err(anyhow!(
            "`allow.sql` needs a connection of its own for each handler, which a pooler does not give; name the server \
             itself in database.url"
        ));
    }
    let query = database.query(include_str!("allow_sql.sql")).bind(role);
    query.execute(tx).await.map(drop).map_err(|error| match reaction(&error) {
        Reaction::Refused(refusal) => match refusal.hint {
            Some(hint) => anyhow!("{}; {hint}", refusal.message),
            None => anyhow!(refusal.message),
        },
        _ => error.into(),
    })
}

/// Removes what was prepared for roles that no group names any more.
pub(super) async fn forget_roles(database: &Database, tx: &mut PgConnection) -> Result<()> {
    let query = database.query(include_str!("forget_sql_roles.sql"));
    query.execute(tx).await.context("forget the roles that no group runs SQL as any more").map(drop)
}

/// The SQL of one delivery.
#[derive(Debug)]
pub struct GuestSession {
    grant: GuestGrant,
    state: tokio::sync::Mutex<State>,
    /// It waits for the database, or has lost it: if the delivery ends now, that is not the handler's doing.
    is_ours: AtomicBool,
}

#[derive(Debug)]
enum State {
    Unused,
    Open(Open),
    /// A statement runs, or was dropped in the middle.
    Away,
}

/// What a delivery leaves.
#[derive(Debug)]
pub enum Left {
    /// It ran no SQL.
    Nothing,
    /// Its transaction, to settle in.
    Open(Box<OpenSql>),
    /// Its transaction is gone: it was cut in the middle of a statement.
    Lost,
    /// The database failed it.
    Failed,
}

impl GuestSession {
    /// The delivery has ended. Dropping what it left rolls it back.
    pub fn take(&self) -> Left {
        if self.is_ours.load(Relaxed) {
            return Left::Failed;
        }
        let Ok(mut state) = self.state.try_lock() else { return Left::Lost };
        match std::mem::replace(&mut *state, State::Away) {
            State::Unused => Left::Nothing,
            State::Open(open) => Left::Open(Box::new(OpenSql::new(open, self.grant.clone()))),
            State::Away => Left::Lost,
        }
    }

    async fn run_statement(&self, statement: SqlStatement) -> Result<SqlAnswer, SqlError> {
        let mut state = self.state.lock().await;
        let mut open = match std::mem::replace(&mut *state, State::Away) {
            State::Open(open) => open,
            State::Unused => self.begin(statement.deadline).await?,
            State::Away => return Err(SqlError::Lost),
        };
        let answer = open.run(&self.grant, &statement).await;
        if answer == Err(SqlError::Lost) {
            self.is_ours.store(true, Relaxed);
        } else {
            *state = State::Open(open);
        }
        answer
    }

    /// Waits for a connection, and for a database that is away, as long as the delivery may last.
    async fn begin(&self, deadline: Instant) -> Result<Open, SqlError> {
        self.is_ours.store(true, Relaxed);
        let begun = tokio::time::timeout_at(deadline.into(), async {
            loop {
                match Open::begin(&self.grant.guests).await {
                    Ok(open) => return open,
                    Err(error) => tracing::debug!("failed to begin the transaction of a handler: {error:#}"),
                }
                sleep(BEGIN_AGAIN).await;
            }
        });
        let open = begun.await.map_err(|_elapsed| SqlError::Timeout)?;
        self.is_ours.store(false, Relaxed);
        Ok(open)
    }
}

impl Sql for GuestSession {
    fn run<'a>(&'a self, statement: SqlStatement) -> Running<'a> {
        Box::pin(self.run_statement(statement))
    }
}
