//! Producing from Rust: messages that commit with your own statements, or not at all.
//!
//! A program that only produces takes this crate without the sandbox:
//!
//! ```toml
//! [dependencies]
//! millstream = { version = "0.1", default-features = false, features = ["client"] }
//! ```
//!
//! [`Client`] connects, [`Stream`] produces, [`ProduceOptions`] are the keys and headers, and [`Error`] is what one can
//! react to. Streams are declared in streams.toml and by `millstream apply`, never from here. The statements run through
//! [`sqlx`], which is exported so that your transactions are of the same version.
//!
//! # Three places for an e-mail
//!
//! An order is paid, and its customer is to get an e-mail. An e-mail is not a statement: no rollback reaches it.
//!
//! **Before the commit** is wrong. The produce fails (a lost connection is enough), the transaction rolls back, order
//! 4127 is unpaid again, and Jamie holds a confirmation of a payment that never happened:
//!
//! ```no_run
//! # use millstream::client::{Client, ProduceOptions};
//! # fn send_email(_to: &str) {}
//! # async fn pay(client: &Client) -> anyhow::Result<()> {
//! # let receipts = client.stream::<str>("receipts");
//! client
//!     .in_transaction(async |tx| {
//!         sqlx::query("update orders set status = 'paid' where id = 4127").execute(&mut *tx).await?;
//!         send_email("jamie@example.com"); // wrong: sent now, whatever becomes of the transaction
//!         receipts.produce_in_tx(tx, "4127", ProduceOptions::default()).await?;
//!         anyhow::Ok(())
//!     })
//!     .await?;
//! # Ok(())
//! # }
//! ```
//!
//! **After a commit that is known** is better and still not right. The process ends between the two, and the e-mail of a
//! payment that did happen is never sent. After an error nothing may be sent either: of [`Error::CommitUnknown`] nobody
//! knows whether the order is paid.
//!
//! ```no_run
//! # use millstream::client::Client;
//! # fn send_email(_to: &str) {}
//! # async fn pay(client: &Client) -> anyhow::Result<()> {
//! client
//!     .in_transaction(async |tx| {
//!         sqlx::query("update orders set status = 'paid' where id = 4127").execute(&mut *tx).await?;
//!         anyhow::Ok(())
//!     })
//!     .await?; // after an error: no e-mail
//! send_email("jamie@example.com"); // lost, when the process ends before it
//! # Ok(())
//! # }
//! ```
//!
//! **As a message** is right. The request to send it commits with the payment; a group of the stream `emails` sends it, is
//! tried again while the provider is down, and what cannot be sent at all is a dead letter that somebody sees:
//!
//! ```no_run
//! # use millstream::client::{Client, ProduceOptions};
//! # async fn pay(client: &Client) -> anyhow::Result<()> {
//! #[derive(serde::Serialize)]
//! struct EmailRequested<'a> {
//!     to: &'a str,
//!     template: &'a str,
//! }
//!
//! let emails = client.stream::<EmailRequested>("emails");
//! client
//!     .in_transaction(async |tx| {
//!         sqlx::query("update orders set status = 'paid' where id = 4127").execute(&mut *tx).await?;
//!         let email = EmailRequested { to: "jamie@example.com", template: "payment-received" };
//!         emails.produce_in_tx(tx, &email, ProduceOptions::default()).await?;
//!         anyhow::Ok(())
//!     })
//!     .await?;
//! # Ok(())
//! # }
//! ```
//!
//! # Running it again
//!
//! [`Client::in_transaction`] never runs your closure twice; only you know what is safe to repeat. An idempotency key makes
//! the message safe: the second one answers `duplicate`. It does nothing for your other statements, which need a guard of
//! their own, such as a unique constraint on the id of the operation.

mod coalesce;

mod connection;

mod error;

mod flight;

mod options;

mod stream;

mod transaction;

pub use sqlx;

pub use self::{
    connection::{Client, Settings},
    error::Error,
    options::ProduceOptions,
    stream::Stream,
};
pub use crate::{database::Refusal, engine::Produced, handler::Concurrency};
