//! Streams, claims, settles, retries and dead letters: all that a group is, as statements on Postgres.
//! Knows SQL and no wasm; it never runs a handler and never retries a statement.
//!
//! Where to look: the claim algorithm is `functions/claim.sql`, message keys `functions/keys.sql`, the produce API `functions/shared.sql` and
//! `functions/produce.sql`, the log behind both `functions/log.sql`, the end of a delivery `settle.rs`, the SQL
//! of handlers `guest_sql/` and `functions/guest_sql.sql`, a dead host's
//! work `recover.rs`; what people ask for is in `inspect.rs`, `dead.rs`, `read.rs`, `why.rs`, `pause.rs`,
//! `seek.rs` and `forget.rs`. Without the feature `host` there is only what the client needs: `produce.rs`.

#[cfg(feature = "host")]
mod ids;

#[cfg(feature = "host")]
mod frozen;
#[cfg(feature = "host")]
mod functions;

#[cfg(feature = "host")]
mod declare;

#[cfg(feature = "host")]
mod group;

mod produce;

mod units;

#[cfg(feature = "host")]
mod claim;

#[cfg(feature = "host")]
mod verdict;

#[cfg(feature = "host")]
mod guest_sql;

#[cfg(feature = "host")]
mod settle;

#[cfg(feature = "host")]
mod lease;

#[cfg(feature = "host")]
mod recover;

#[cfg(feature = "host")]
mod reconcile;

#[cfg(feature = "host")]
pub mod floor;

#[cfg(feature = "host")]
mod names;

#[cfg(feature = "host")]
mod inspect;

#[cfg(feature = "host")]
mod dead;

#[cfg(feature = "host")]
mod keys;

#[cfg(feature = "host")]
mod hot_keys;

#[cfg(feature = "host")]
mod position;

#[cfg(feature = "host")]
mod pause;

#[cfg(feature = "host")]
mod seek;

#[cfg(feature = "host")]
mod forget;

#[cfg(feature = "host")]
mod seek_key;

#[cfg(feature = "host")]
mod epochs;

#[cfg(feature = "host")]
mod why;

#[cfg(feature = "host")]
mod read;

#[cfg(feature = "host")]
mod maintain;

#[cfg(feature = "host")]
pub use claim::{
    Claimed, Done, Keyed, Lane, Note, Request, Source, Token, Turn, Wanted, claim, groups_with_work, has_unfinished,
    hint,
};
#[cfg(feature = "host")]
pub use dead::{
    DeadFilter, DeadLetter, DeadLetterDetails, DeadPage, Redriven, check_ids, discard, list as list_dead,
    payload as dead_payload, pick as pick_dead, redrive, show as show_dead, show_message as show_dead_message,
};
#[cfg(feature = "host")]
pub use declare::{Change, apply, plan};
#[cfg(feature = "host")]
pub use epochs::{epoch, raised_epochs};
#[cfg(feature = "host")]
pub use forget::{Forgotten, forget};
#[cfg(feature = "host")]
pub use functions::install as install_functions;
#[cfg(feature = "host")]
pub use group::{GroupHandle, load_groups};
#[cfg(feature = "host")]
pub use guest_sql::{GuestDatabase, GuestGrant, GuestSession, Left, OpenSql};
#[cfg(feature = "host")]
pub use hot_keys::{Action, Advice, HotKey, HotKeys, hot_keys};
#[cfg(feature = "host")]
pub use ids::{ClaimId, GroupId, HostId, StreamId};
#[cfg(feature = "host")]
pub use inspect::{COUNTED_MAX, GroupState, HostState, State, StreamState, inspect};
#[cfg(feature = "host")]
pub use keys::{
    KeyHistory, KeyOrder, KeyState, Version, list_keys, pause_key, release_key, resume_key, show_key, skip_key,
};
#[cfg(feature = "host")]
pub use lease::{dead_hosts, deregister, register, renew};
#[cfg(feature = "host")]
pub use maintain::{Deployed, Passed, Pinned, Report, Step, StuckCause, StuckKeys, maintain, record_deployment};
#[cfg(feature = "host")]
pub use names::{find_group, find_stream};
#[cfg(feature = "host")]
pub use pause::{Paused, pause, resume};
pub use produce::{NewEntry, ProduceError, Produced, produce};
#[cfg(feature = "host")]
pub use read::{LogEntry, last_positions, read_log, read_payload};
#[cfg(feature = "host")]
pub use reconcile::{Held, give_back, groups_held, held, held_keys};
#[cfg(feature = "host")]
pub use recover::{Orphaned, orphaned_groups, recover};
#[cfg(feature = "host")]
pub use seek::{Seeked, preview_seek, seek};
#[cfg(feature = "host")]
pub use seek_key::{KeySeeked, preview_seek_key, seek_key};
#[cfg(feature = "host")]
pub use settle::{LeavesKey, Patience, Settled, Settlement, settle, settle_alone, settle_with_sql};
#[cfg(feature = "host")]
pub use verdict::{Verdict, verdict};
#[cfg(feature = "host")]
pub use why::{Fate, Why, why};
