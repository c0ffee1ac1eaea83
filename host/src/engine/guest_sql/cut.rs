//! Ends the sessions of deliveries that were cut in the middle of a statement. That their connection is gone Postgres finds
//! out when it next writes to it, and a function that catches its cancellation never does so: it would keep its locks and
//! one of the server's connections for ever. Never touches a session that is in another transaction by then.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use tokio::{runtime::Handle, task::JoinSet};

use crate::database::Database;

/// How long to try. It is over the host's own pool, which may be busy or away; a host that stops waits as long at most.
const END_MAX: Duration = Duration::from_secs(5);

/// A transaction of the server's.
#[derive(Clone, Debug)]
pub(super) struct Begun {
    pub pid: i32,
    /// In seconds since 1970, as Postgres writes it.
    pub at: String,
}

/// What ends them, over the host's own pool. Cheap to clone.
#[derive(Clone, Debug)]
pub(super) struct Cut(Arc<Ending>);

#[derive(Debug)]
struct Ending {
    database: Database,
    tasks: Mutex<JoinSet<()>>,
}

impl Cut {
    pub fn new(database: &Database) -> Self {
        Self(Arc::new(Ending { database: database.clone(), tasks: Mutex::default() }))
    }

    /// Begins to end the session, on `runtime`: a delivery may be dropped where there is none.
    pub fn end(&self, begun: Begun, runtime: &Handle) {
        let mut tasks = self.0.tasks.lock().unwrap_or_else(PoisonError::into_inner);
        while tasks.try_join_next().is_some() {}
        let database = self.0.database.clone();
        let end = async move {
            let query = database.query(include_str!("end_cut.sql")).bind(begun.pid).bind(begun.at);
            match tokio::time::timeout(END_MAX, query.execute(&database.pool)).await {
                Ok(Ok(_)) => {}
                Ok(Err(error)) => tracing::debug!("failed to end the session of a cut delivery: {error:#}"),
                Err(_elapsed) => tracing::debug!("failed to end the session of a cut delivery in time"),
            }
        };
        tasks.spawn_on(end, runtime);
    }

    /// Waits until what was begun has ended.
    pub async fn ended(&self) {
        let mut tasks = std::mem::take(&mut *self.0.tasks.lock().unwrap_or_else(PoisonError::into_inner));
        while tasks.join_next().await.is_some() {}
    }
}
