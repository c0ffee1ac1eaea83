//! Producing to one stream. What is sent lies in `coalesce.rs`, `transaction.rs` and `engine::produce`.

use std::{fmt, sync::Arc};

use sqlx::PgConnection;
use tokio::sync::oneshot;

use super::{
    Client, Error, ProduceOptions,
    flight::Item,
    options::Entry,
    transaction::{Line, Patience, produce_alone},
};
use crate::{
    database::DatabaseError,
    engine::{self, NewEntry, Produced},
};

/// A stream to which values of one type are produced; made by [`Client::stream`] or [`Client::raw_stream`]. Cloning is
/// cheap.
///
/// Wherever a value is asked for, `None` is a tombstone: with compaction it says that the key is gone.
pub struct Stream<T: ?Sized> {
    client: Client,
    name: Arc<str>,
    encode: fn(&T) -> Result<Vec<u8>, Error>,
    content_type: Option<&'static str>,
}

impl<T: ?Sized> Stream<T> {
    pub(super) fn new(
        client: &Client,
        name: &str,
        encode: fn(&T) -> Result<Vec<u8>, Error>,
        content_type: Option<&'static str>,
    ) -> Self {
        Self { client: client.clone(), name: name.into(), encode, content_type }
    }

    /// The name it has in streams.toml.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Produces one message and returns after its commit. Concurrent calls share transactions, so that many tasks that
    /// produce one message each are nearly as fast as one that produces batches.
    ///
    /// What is wrong with another message of the same transaction does not matter to this one, and no transaction
    /// that several calls share waits for a lock that another program keeps. Only a message whose own idempotency key, or
    /// ordered or compacted key, is locked by an open transaction waits for the end of that one.
    ///
    /// # Errors
    /// See [`Error`]. The transaction is run again for some seconds after a passing fault of the database, as long as no
    /// COMMIT was sent; after that the error is [`Error::CommitUnknown`].
    ///
    /// # Cancellation
    /// Dropping the future leaves it open whether the message is produced.
    ///
    /// ```no_run
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> anyhow::Result<()> {
    /// use millstream::client::{Client, Error, ProduceOptions};
    ///
    /// #[derive(serde::Serialize)]
    /// struct OrderCreated {
    ///     order_id: String,
    /// }
    ///
    /// let client = Client::connect("postgres://shop@db.example/shop").await?;
    /// let orders = client.stream::<OrderCreated>("orders");
    /// let order = OrderCreated { order_id: "o-1".to_owned() };
    /// let once = || ProduceOptions { idempotency_key: Some("order-created-o-1".to_owned()), ..ProduceOptions::default() };
    /// let produced = match orders.produce(&order, once()).await {
    ///     // The same call again cannot produce it twice.
    ///     Err(Error::CommitUnknown(_)) => orders.produce(&order, once()).await?,
    ///     answer => answer?,
    /// };
    /// if produced.duplicate {
    ///     println!("message {} was produced before", produced.id);
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub async fn produce<'a>(&self, value: impl Into<Option<&'a T>>, options: ProduceOptions) -> Result<Produced, Error>
    where
        T: 'a,
    {
        let entry = self.entry(value.into(), options)?;
        let (answer, answered) = oneshot::channel();
        self.client.hand_over(Item { stream: Arc::clone(&self.name), entry, answer }).await?;
        // Without an answer it went down with its task, and nobody knows how far it had come.
        answered.await.unwrap_or_else(|_| Err(Error::CommitUnknown(Arc::new(DatabaseError::WorkerCrashed))))
    }

    /// Produces up to 50,000 messages in one transaction: all of them, or none. The answers are in their order.
    /// Duplicates of earlier messages are left out and answer the first id. Batches of some hundreds are good.
    ///
    /// # Errors
    /// As [`Stream::produce`]. A refusal names the message, counted from 1.
    ///
    /// ```no_run
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> anyhow::Result<()> {
    /// # let client = millstream::client::Client::connect("postgres://shop@db.example/shop").await?;
    /// use millstream::client::ProduceOptions;
    ///
    /// let numbers = client.stream::<u32>("numbers");
    /// let batch: Vec<u32> = (0..250).collect();
    /// let produced = numbers.produce_batch(batch.iter().map(|number| (number, ProduceOptions::default()))).await?;
    /// assert_eq!(produced.len(), 250);
    /// # Ok(())
    /// # }
    /// ```
    pub async fn produce_batch<'a, V>(
        &self,
        batch: impl IntoIterator<Item = (V, ProduceOptions)>,
    ) -> Result<Vec<Produced>, Error>
    where
        T: 'a,
        V: Into<Option<&'a T>>,
    {
        let entries = self.entries(batch)?;
        Ok(produce_alone(self.client.database(), &mut Line::default(), &self.name, entries.iter(), Patience::Long)
            .await?)
    }

    /// Produces one message in the caller's transaction: one of [`Client::in_transaction`], or any other of `sqlx`. It
    /// exists if, and only if, that commits. Several streams in one transaction are fine.
    ///
    /// Keep such transactions short: while one is open, others that use the same idempotency key, or the same ordered or
    /// compacted key, wait for it. Nobody else does.
    ///
    /// # Errors
    /// See [`Error`]. Like any error of a statement it makes Postgres refuse the rest of the transaction, unless there is a
    /// savepoint.
    ///
    /// ```no_run
    /// # async fn pay(pool: &sqlx::PgPool, receipts: &millstream::client::Stream<str>) -> anyhow::Result<()> {
    /// use millstream::client::ProduceOptions;
    ///
    /// let mut tx = pool.begin().await?;
    /// sqlx::query("update orders set status = 'paid' where id = $1").bind(4127).execute(&mut *tx).await?;
    /// receipts.produce_in_tx(&mut tx, "4127", ProduceOptions::default()).await?;
    /// tx.commit().await?;
    /// # Ok(())
    /// # }
    /// ```
    pub async fn produce_in_tx<'a>(
        &self,
        tx: &mut PgConnection,
        value: impl Into<Option<&'a T>>,
        options: ProduceOptions,
    ) -> Result<Produced, Error>
    where
        T: 'a,
    {
        let produced = self.produce_batch_in_tx(tx, [(value, options)]).await?;
        Ok(*produced.first().expect("every message has an answer"))
    }

    /// [`Stream::produce_batch`] in the caller's transaction.
    ///
    /// # Errors
    /// As [`Stream::produce_in_tx`].
    pub async fn produce_batch_in_tx<'a, V>(
        &self,
        tx: &mut PgConnection,
        batch: impl IntoIterator<Item = (V, ProduceOptions)>,
    ) -> Result<Vec<Produced>, Error>
    where
        T: 'a,
        V: Into<Option<&'a T>>,
    {
        let entries = self.entries(batch)?;
        let batch: Vec<_> = entries
            .iter()
            .map(|entry| NewEntry { message: &entry.message, deliver_after: entry.deliver_after.as_deref() })
            .collect();
        Ok(engine::produce(self.client.database(), tx, &self.name, &batch).await?)
    }

    fn entries<'a, V>(&self, batch: impl IntoIterator<Item = (V, ProduceOptions)>) -> Result<Vec<Entry>, Error>
    where
        T: 'a,
        V: Into<Option<&'a T>>,
    {
        batch.into_iter().map(|(value, options)| self.entry(value.into(), options)).collect()
    }

    fn entry(&self, value: Option<&T>, options: ProduceOptions) -> Result<Entry, Error> {
        options.entry(value.map(self.encode).transpose()?, self.content_type)
    }
}

impl<T: ?Sized> Clone for Stream<T> {
    fn clone(&self) -> Self {
        Self { client: self.client.clone(), name: Arc::clone(&self.name), ..*self }
    }
}

impl<T: ?Sized> fmt::Debug for Stream<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stream").field("name", &self.name).finish_non_exhaustive()
    }
}
