//! The client: a pool, the task that coalesces, and transactions in which a caller's closure runs.

#[cfg(feature = "host")]
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, PoisonError};

use serde::Serialize;
use sqlx::{PgConnection, PgPool};
use tokio::{sync::mpsc, task::JoinHandle};

use super::{
    Error, Stream,
    coalesce::{Coalescer, WAITING_MAX},
    flight::Item,
};
use crate::database::{Connect, Database, is_ambiguous_commit};

/// How [`Client::connect_with`] connects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// The schema of Millstream: `database.schema` of streams.toml.
    pub schema: String,
    /// Connections of the pool. A quarter of them may wait for other producers' locks.
    pub max_connections: u32,
}

impl Default for Settings {
    /// The schema `millstream` and ten connections.
    fn default() -> Self {
        Self { schema: "millstream".to_owned(), max_connections: 10 }
    }
}

/// Produces messages to the streams of one database. Cloning shares the connections.
///
/// It lives in the Tokio runtime that made it. When the last clone is dropped, messages whose callers still wait are
/// produced; [`Client::close`] waits for them.
#[derive(Clone, Debug)]
pub struct Client {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    database: Database,
    /// `None` once closed. Locked for a look only.
    to_coalescer: Mutex<Option<mpsc::Sender<Item>>>,
    coalescer: Mutex<Option<JoinHandle<()>>>,
    /// Whether the pool is ours to close.
    owns_pool: bool,
}

impl Client {
    /// Connects to the schema `millstream` of a Postgres: `postgres://user:password@host/database`, with
    /// `?pgbouncer=true` behind a pooler of transactions.
    ///
    /// # Errors
    /// [`Error::Connect`] when the URL is wrong or the server cannot be used.
    ///
    /// ```no_run
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), millstream::client::Error> {
    /// use millstream::client::{Client, ProduceOptions};
    ///
    /// let client = Client::connect("postgres://shop@db.example/shop").await?;
    /// let produced = client.stream::<str>("greetings").produce("hello", ProduceOptions::default()).await?;
    /// println!("message {}", produced.id);
    /// client.close().await;
    /// # Ok(())
    /// # }
    /// ```
    pub async fn connect(url: &str) -> Result<Self, Error> {
        Self::connect_with(url, &Settings::default()).await
    }

    /// [`Client::connect`] with another schema or number of connections.
    ///
    /// # Errors
    /// As [`Client::connect`].
    pub async fn connect_with(url: &str, settings: &Settings) -> Result<Self, Error> {
        let connect = async {
            let connect = Connect::parse(url)?;
            Database::connect_shared(&connect, settings.max_connections, &settings.schema).await
        };
        let database = connect.await.map_err(|error| Error::Connect(format!("{error:#}")))?;
        Ok(Self::start(database, true))
    }

    /// Uses a pool that is there already, as it is. Must be called inside a Tokio runtime.
    ///
    /// # Errors
    /// [`Error::Connect`] when the schema's name cannot be one.
    pub fn from_pool(pool: PgPool, schema: &str) -> Result<Self, Error> {
        let database = Database::from_pool(pool, schema).map_err(|error| Error::Connect(format!("{error:#}")))?;
        Ok(Self::start(database, false))
    }

    fn start(database: Database, owns_pool: bool) -> Self {
        let (sender, inbox) = mpsc::channel(WAITING_MAX);
        let coalescer = tokio::spawn(Coalescer::new(database.clone(), inbox).run());
        let shared = Shared {
            database,
            to_coalescer: Mutex::new(Some(sender)),
            coalescer: Mutex::new(Some(coalescer)),
            owns_pool,
        };
        Self { shared: Arc::new(shared) }
    }

    /// A stream of values that are written as JSON. Asks nothing of the database: whether the stream exists shows at the
    /// first produce.
    pub fn stream<T: Serialize + ?Sized>(&self, name: &str) -> Stream<T> {
        let encode = |value: &T| serde_json::to_vec(value).map_err(|error| Error::Encode(Arc::new(error)));
        Stream::new(self, name, encode, Some("application/json"))
    }

    /// A stream of bytes, stored as they are and without a content type.
    pub fn raw_stream(&self, name: &str) -> Stream<[u8]> {
        Stream::new(self, name, |bytes| Ok(bytes.to_vec()), None)
    }

    /// Runs a closure in a transaction, and commits it if the closure answers `Ok`. What it produces with
    /// [`Stream::produce_in_tx`] exists if, and only if, this returns `Ok`, except after [`Error::CommitUnknown`].
    ///
    /// The closure runs once, whatever happens: only the caller knows what is safe to repeat. `E` is the caller's
    /// error, such as `anyhow::Error`; errors of the transaction itself reach it through [`From`].
    ///
    /// # Errors
    /// The closure's own, after a rollback. [`Error::Database`] or [`Error::Refused`] when the transaction cannot begin or
    /// commit, also when the closure has hidden that one of its statements failed. [`Error::CommitUnknown`] when the answer
    /// to COMMIT was lost.
    ///
    /// # Cancellation
    /// Dropping the future rolls back, unless the COMMIT is already under way.
    ///
    /// ```no_run
    /// # use millstream::client::{Client, ProduceOptions};
    /// # async fn pay(client: &Client) -> anyhow::Result<()> {
    /// use millstream::client::Error;
    ///
    /// let receipts = client.stream::<str>("receipts");
    /// let paid = client
    ///     .in_transaction(async |tx| {
    ///         sqlx::query("update orders set status = 'paid' where id = 4127").execute(&mut *tx).await?;
    ///         anyhow::Ok(receipts.produce_in_tx(tx, "4127", ProduceOptions::default()).await?)
    ///     })
    ///     .await;
    /// match paid {
    ///     Ok(produced) => println!("paid, message {}", produced.id),
    ///     Err(error) if matches!(error.downcast_ref(), Some(Error::CommitUnknown(_))) => println!("look at the order"),
    ///     Err(error) => println!("not paid: {error:#}"),
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub async fn in_transaction<R, E: From<Error>>(
        &self,
        work: impl AsyncFnOnce(&mut PgConnection) -> Result<R, E>,
    ) -> Result<R, E> {
        let mut tx = self.shared.database.begin_with("begin").await.map_err(Error::from_database)?;
        let result = match work(&mut tx).await {
            Ok(result) => result,
            Err(error) => {
                if let Err(failed) = tx.rollback().await {
                    tracing::debug!("failed to roll back, which the end of the connection does: {failed}");
                }
                return Err(error);
            }
        };
        // Postgres answers COMMIT of a failed transaction with a silent rollback. A statement before it does not.
        sqlx::raw_sql("select").execute(&mut *tx).await.map_err(Error::from_database)?;
        match tx.commit().await {
            Ok(()) => Ok(result),
            Err(error) if is_ambiguous_commit(&error) => Err(Error::CommitUnknown(Arc::new(error)).into()),
            Err(error) => Err(Error::from_database(error).into()),
        }
    }

    /// Takes no more messages, and returns when those on their way have their answers. Clones are closed as well.
    pub async fn close(&self) {
        take(&self.shared.to_coalescer);
        if let Some(coalescer) = take(&self.shared.coalescer)
            && let Err(error) = coalescer.await
        {
            tracing::error!("the client's task has ended: {error}");
        }
        if self.shared.owns_pool {
            self.shared.database.close().await;
        }
    }

    /// How many statements it has run, for counting what a message costs.
    #[cfg(feature = "host")]
    pub(crate) fn statements(&self) -> &AtomicU64 {
        &self.shared.database.statements
    }

    pub(super) fn database(&self) -> &Database {
        &self.shared.database
    }

    /// Gives an item to the coalescer; waits while that has too many.
    pub(super) async fn hand_over(&self, item: Item) -> Result<(), Error> {
        let sender = self.shared.to_coalescer.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let sender = sender.ok_or(Error::Closed)?;
        sender.send(item).await.map_err(|_| Error::Closed)
    }
}

fn take<T>(slot: &Mutex<Option<T>>) -> Option<T> {
    slot.lock().unwrap_or_else(PoisonError::into_inner).take()
}
