//! Write Millstream message handlers in Rust.
//!
//! A handler is one function. It is called for every delivery of every message of its consumer group; everything it
//! produces commits together with the acknowledgement, or not at all. A panic, a timeout or a lost host undoes all of it,
//! and the message is delivered again.
//!
//! The payload is parsed from JSON by the type you name. A payload that does not parse is rejected: it goes to the
//! dead-letter queue with the place and the reason, and without its content.
//!
//! ```
//! use millstream_guest::{Context, NewMessage};
//! use serde::{Deserialize, Serialize};
//!
//! #[derive(Deserialize)]
//! struct Order {
//!     order_id: String,
//!     amount_cents: u64,
//! }
//!
//! #[derive(Serialize)]
//! struct Receipt {
//!     order_id: String,
//! }
//!
//! #[millstream_guest::handler]
//! fn handle(order: Order, ctx: Context) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
//!     millstream_guest::info!("order of {} cents, attempt {}", order.amount_cents, ctx.attempt);
//!     let key = order.order_id.clone();
//!     let receipt = NewMessage::json(&Receipt { order_id: order.order_id })?;
//!     ctx.produce("receipts", receipt.key(key))?; // `?` on any error: the message is retried
//!     Ok(())
//! }
//!
//! // No wasm is needed to test it.
//! # use millstream_guest::testing::{self, TestMessage};
//! let delivered = testing::deliver(handle, TestMessage::text(r#"{"order_id": "o-1", "amount_cents": 500}"#));
//! assert_eq!(delivered.produced[0].to, "receipts");
//! assert_eq!(delivered.produced[0].json()["order_id"], "o-1");
//! ```
//!
//! Build it as a `cdylib` with `cargo build --release --target wasm32-unknown-unknown` (or `wasm32-wasip1`,
//! `wasm32-wasip2`, where `println!`, clocks and the like work too) and put the `.wasm` into the host's handlers folder.
//!
//! [`config::get`] reads the group's `config` and `secrets`, [`http::post`] and [`http::get`] call what its `allow.http` names.
//!
//! On `wasm32-unknown-unknown` the standard library's `println!` goes nowhere. Log with [`info!`], [`warn!`] and
//! [`error!`], which reach the host on every target.

// The attribute's expansion names this crate, in our own tests as well.
extern crate self as millstream_guest;

#[cfg(all(target_family = "wasm", feature = "allocator"))]
mod allocator;
pub mod config;
mod handler;
pub mod http;
mod log;
mod message;
mod outcome;
mod payload;
mod produce;
pub mod sql;
mod url;

#[cfg(target_family = "wasm")]
mod calls;
#[cfg(target_family = "wasm")]
mod component;
#[cfg(target_family = "wasm")]
use component as boundary;

#[cfg(not(target_family = "wasm"))]
mod native;
#[cfg(not(target_family = "wasm"))]
use native as boundary;
#[cfg(not(target_family = "wasm"))]
pub mod testing;

pub use handler::{FromMessage, Handler};
pub use log::{Level, log};
pub use message::{Context, Message};
pub use millstream_guest_macros::handler;
pub use outcome::{IntoOutcome, Outcome};
pub use produce::{Concurrency, NewMessage, ProduceError};

/// What the expansion of `#[handler]` needs. Not part of the public interface.
#[doc(hidden)]
pub mod __private {
    #[cfg(target_family = "wasm")]
    pub use crate::component::{bindings, run};

    pub use crate::__millstream_export as export;

    /// Makes the compiler judge the handler's signature on every target, not only where it is exported.
    pub fn check<Arguments>(_handler: impl crate::Handler<Arguments>) {}
}

/// Exports a handler to the host.
#[cfg(target_family = "wasm")]
#[doc(hidden)]
#[macro_export]
macro_rules! __millstream_export {
    ($handler:path) => {
        struct __MillstreamHandler;

        impl $crate::__private::bindings::Guest for __MillstreamHandler {
            fn handle(message: $crate::__private::bindings::Message) -> $crate::__private::bindings::Outcome {
                $crate::__private::run($handler, message)
            }
        }

        $crate::__private::bindings::export!(__MillstreamHandler with_types_in $crate::__private::bindings);
    };
}

/// There is no host to export to outside wasm.
#[cfg(not(target_family = "wasm"))]
#[doc(hidden)]
#[macro_export]
macro_rules! __millstream_export {
    ($handler:path) => {};
}
