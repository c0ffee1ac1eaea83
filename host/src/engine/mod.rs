//! Streams, claims, settles, retries and dead letters: all that a group is, as statements on Postgres.
//! Knows SQL and no wasm; it never runs a handler and never retries a statement.
//!
//! Where to look: the claim algorithm is `functions/claim.sql`, the produce API `functions/shared.sql` and
//! `functions/produce.sql`, the end of a delivery `settle.rs`, a dead host's work `recover.rs`.

mod ids;

mod functions;

mod declare;

mod group;

mod produce;

mod claim;

mod verdict;

mod settle;

mod lease;

mod recover;

mod reconcile;

pub use claim::{Claimed, Note, Source, Token, Turn, Wanted, claim, groups_with_work, has_unfinished, hint};
pub use declare::{Change, apply};
pub use functions::install as install_functions;
pub use group::{GroupHandle, load_groups};
pub use ids::{ClaimId, GroupId, HostId, StreamId};
pub use lease::{dead_hosts, deregister, register, renew};
pub use produce::{NewEntry, ProduceError, Produced, produce};
pub use reconcile::{Held, give_back, groups_held, held};
pub use recover::{Orphaned, orphaned_groups, recover};
pub use settle::{Settled, Settlement, settle};
pub use verdict::{Verdict, verdict};
