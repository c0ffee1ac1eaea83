//! Streams, claims, settles, retries and dead letters: all that a group is, as statements on Postgres.
//! Knows SQL and no wasm; it never runs a handler and never retries a statement.
//!
//! Where to look: the claim algorithm is `functions/claim.sql`, message keys `functions/keys.sql`, the produce API `functions/shared.sql` and
//! `functions/produce.sql`, the log behind both `functions/log.sql`, the end of a delivery `settle.rs`, the SQL
//! of handlers `guest_sql/` and `functions/guest_sql.sql`, a dead host's
//! work `recover.rs`; what people ask for is in `inspect.rs`, `dead.rs`, `read.rs`, `why.rs`, `pause.rs` and
//! `seek.rs`.

mod ids;

mod functions;

mod declare;

mod group;

mod produce;

mod claim;

mod verdict;

mod guest_sql;

mod settle;

mod lease;

mod recover;

mod reconcile;

pub mod floor;

mod names;

mod inspect;

mod dead;

mod keys;

mod position;

mod pause;

mod seek;

mod epochs;

mod why;

mod read;

mod maintain;

pub use claim::{
    Claimed, Done, Keyed, Lane, Note, Request, Source, Token, Turn, Wanted, claim, groups_with_work, has_unfinished,
    hint,
};
pub use dead::{
    DeadFilter, DeadLetter, DeadLetterDetails, DeadPage, Redriven, check_ids, discard, list as list_dead,
    payload as dead_payload, pick as pick_dead, redrive, show as show_dead, show_message as show_dead_message,
};
pub use declare::{Change, apply, plan};
pub use epochs::{epoch, raised_epochs};
pub use functions::install as install_functions;
pub use group::{GroupHandle, load_groups};
pub use guest_sql::{GuestDatabase, GuestGrant, GuestSession, Left, OpenSql};
pub use ids::{ClaimId, GroupId, HostId, StreamId};
pub use inspect::{COUNTED_MAX, GroupState, HostState, State, StreamState, inspect};
pub use keys::{
    KeyHistory, KeyOrder, KeyState, Version, list_keys, pause_key, release_key, resume_key, show_key, skip_key,
};
pub use lease::{dead_hosts, deregister, register, renew};
pub use maintain::{Deployed, Passed, Pinned, Report, Step, maintain, record_deployment};
pub use names::{find_group, find_stream};
pub use pause::{Paused, pause, resume};
pub use produce::{NewEntry, ProduceError, Produced, produce};
pub use read::{LogEntry, last_positions, read_log, read_payload};
pub use reconcile::{Held, give_back, groups_held, held, held_keys};
pub use recover::{Orphaned, orphaned_groups, recover};
pub use seek::{Seeked, preview_seek, seek};
pub use settle::{LeavesKey, Settled, Settlement, settle, settle_with_sql};
pub use verdict::{Verdict, verdict};
pub use why::{Fate, Why, why};
