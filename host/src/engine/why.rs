//! What one message waits for in one group, or what became of it. Reads a bounded number of rows, and changes nothing.
//!
//! Each answer is a case of [`Fate`]; [`Facts::fate`] asks them in the order in which they exclude each other: whoever
//! holds the message has the last word, then its dead letter, then the log, then the group's position.

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use sqlx::{Row, types::Json};

use super::{
    GroupHandle, find_group,
    inspect::{COUNTED_MAX, bounded_read},
    load_groups,
};
use crate::database::Database;

/// How a message stands in a group. The field names are a contract.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Why {
    pub group: String,
    pub stream: String,
    pub message_id: i64,
    pub message_key: Option<String>,
    #[serde(flatten)]
    pub fate: Fate,
    /// RFC 3339, UTC. `None`: the group is not paused.
    pub paused_at: Option<String>,
}

/// What a message waits for, or what became of it. The names are a contract.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum Fate {
    /// Nobody has drawn this id yet.
    Unknown { last_id: i64 },
    /// The transaction that drew it may still be open. `pid`: the database process of one that is; `None`: a prepared one.
    NotVisible { pid: Option<i32> },
    /// It was drawn and will never come; or it was there, and was thinned as an old version of its key.
    RolledBack,
    /// Retention has dropped it: the log begins after this position.
    Removed { begins_after: i64 },
    /// The group's filter does not match it.
    Filtered,
    /// It comes after the group's position. `before`: messages in between.
    Unclaimed { before: i64, before_exact: bool },
    /// It was committed late, below the group's position: the next turn takes it.
    InGap,
    /// A host holds it: it runs there, or is about to.
    Claimed { host: String, host_alive: bool, since: Option<String>, attempt: i32, max_attempts: u32 },
    /// It waits for an attempt. `class` and `error`: how the last one failed; `None` when it was handed back or redriven.
    Retrying {
        due_at: String,
        is_due: bool,
        attempt: i32,
        max_attempts: u32,
        class: Option<String>,
        error: Option<String>,
        redriven_from: Option<i64>,
    },
    /// It waits for its `deliver_after`.
    Delayed { due_at: String },
    /// It waits behind its key: a host has that (`key_host`), it waits for a message (`blocked_by`), is paused, or rests
    /// after a dead letter; else any host may take it now. The message that it waits for comes again (`head_due_at`), or is
    /// a dead letter (`head_dead_letter`).
    Deferred {
        key_host: Option<String>,
        blocked_by: Option<i64>,
        head_due_at: Option<String>,
        head_dead_letter: Option<i64>,
        key_paused: bool,
        key_rests: bool,
    },
    /// The group gave up on it.
    Dead {
        dead_letter_id: i64,
        class: String,
        error: String,
        attempts: i32,
        died_at: String,
        redriven_at: Option<String>,
    },
    /// It stands before the position at which the group began, or to which it was moved last. `claimed_before`: the
    /// group had passed it once, before a seek.
    BeforeStart { begins_after: i64, claimed_before: bool },
    /// It has lost to this newer version of its key: it is not delivered, unless it was before.
    Superseded { by: i64 },
    /// It is done; or its dead letter was discarded, of which nothing is kept.
    Settled,
}

impl Fate {
    /// Whether a paused group is a reason why it does not go on.
    pub fn waits_for_a_claim(&self) -> bool {
        match self {
            Self::Unclaimed { .. }
            | Self::InGap
            | Self::Retrying { .. }
            | Self::Delayed { .. }
            | Self::Deferred { .. } => true,
            Self::Unknown { .. }
            | Self::NotVisible { .. }
            | Self::RolledBack
            | Self::Removed { .. }
            | Self::Filtered
            | Self::Claimed { .. }
            | Self::Dead { .. }
            | Self::BeforeStart { .. }
            | Self::Superseded { .. }
            | Self::Settled => false,
        }
    }
}

/// Answers for the message `id` of the group's stream.
pub async fn why(database: &Database, group: &str, id: i64) -> Result<Why> {
    find_group(database, group).await?; // for its error, which says what is near
    let groups = load_groups(database).await?;
    let group = groups.into_iter().find(|known| *known.name == *group).context("the group is gone")?;
    ask(database, &group, id).await.with_context(|| format!("look at message {id} of group {:?}", &*group.name))
}

async fn ask(database: &Database, group: &GroupHandle, id: i64) -> Result<Why> {
    let producing = database.stream_query(include_str!("why_producers.sql"), group.stream_id.0);
    let producing = database.fetch_all(producing).await.context("read who produces just now")?;
    let (holders, pids): (Vec<String>, Vec<Option<i32>>) = (producing[0].try_get(0)?, producing[0].try_get(1)?);
    let filter = &group.filter;
    let query = database.stream_query(include_str!("why.sql"), group.stream_id.0).bind(group.id.0).bind(id);
    let query = query.bind(&holders).bind(&filter.routing_keys).bind(&filter.keys).bind(&filter.not_keys);
    let query = query.bind(&filter.headers).bind(COUNTED_MAX);
    let mut tx = bounded_read(database).await.context("begin to look")?;
    let row = query.fetch_one(&mut *tx).await.context("read what is known")?;
    drop(tx);
    let Json(facts): Json<Facts> = row.try_get(0).context("read the answer")?;
    let fate = facts.fate(id, group.policy.retry.max_attempts, &pids);
    Ok(Why {
        group: group.name.to_string(),
        stream: group.stream.to_string(),
        message_id: id,
        fate,
        message_key: facts.message_key(),
        paused_at: facts.paused_at,
    })
}

/// What `why.sql` knows.
#[derive(Clone, Debug, Deserialize)]
struct Facts {
    claimed: i64,
    begins_after: i64,
    replay_upto: i64,
    /// Everything up to here was removed by retention.
    floor: i64,
    last_id: i64,
    /// Visible messages between the group's position and this one, counted up to a bound.
    ahead: i64,
    paused_at: Option<String>,
    message: Option<Visible>,
    gap: Option<Gap>,
    claim: Option<Claim>,
    exception: Option<Exception>,
    dead: Option<Dead>,
}

#[derive(Clone, Debug, Deserialize)]
struct Visible {
    message_key: Option<String>,
    /// The group's filter lets it through.
    matches: bool,
    /// Of a compacted one: the newest version of its key.
    winner: Option<i64>,
}

#[derive(Clone, Debug, Deserialize)]
struct Gap {
    /// Somebody who may fill it is still there.
    undecided: bool,
    pid: Option<i32>,
}

#[derive(Clone, Debug, Deserialize)]
struct Claim {
    host: String,
    host_alive: bool,
    since: String,
}

#[derive(Clone, Debug, Deserialize)]
struct Exception {
    state: String,
    failures: i32,
    class: Option<String>,
    error: Option<String>,
    redriven_from: Option<i64>,
    /// Both are there while it waits or is delayed.
    due_at: Option<String>,
    is_due: Option<bool>,
    /// Both are there while it runs.
    host: Option<String>,
    host_alive: Option<bool>,
    /// Of the key it is deferred behind.
    key_host: Option<String>,
    blocked_by: Option<i64>,
    head_due_at: Option<String>,
    head_dead_letter: Option<i64>,
    key_paused: bool,
    key_rests: Option<bool>,
}

#[derive(Clone, Debug, Deserialize)]
struct Dead {
    id: i64,
    class: String,
    error: String,
    attempts: i32,
    message_key: Option<String>,
    is_replayed: bool,
    died_at: String,
    redriven_at: Option<String>,
}

impl Facts {
    fn message_key(&self) -> Option<String> {
        let of_message = self.message.as_ref().and_then(|message| message.message_key.clone());
        of_message.or_else(|| self.dead.as_ref().and_then(|dead| dead.message_key.clone()))
    }

    fn fate(&self, id: i64, max_attempts: u32, producing: &[Option<i32>]) -> Fate {
        let held = self.held(max_attempts).or_else(|| self.dead());
        held.unwrap_or_else(|| match &self.message {
            Some(message) => self.visible(id, message),
            None => self.missing(id, producing),
        })
    }

    /// A row of the group's own holds it.
    fn held(&self, max_attempts: u32) -> Option<Fate> {
        if let Some(Claim { host, host_alive, since }) = self.claim.clone() {
            return Some(Fate::Claimed { host, host_alive, since: Some(since), attempt: 1, max_attempts });
        }
        let exception = self.exception.clone()?;
        let attempt = exception.failures + 1;
        let due_at = exception.due_at.unwrap_or_default();
        Some(match (exception.state.as_str(), exception.host) {
            ("delayed", _) => Fate::Delayed { due_at },
            ("deferred", _) => Fate::Deferred {
                key_host: exception.key_host,
                blocked_by: exception.blocked_by,
                head_due_at: exception.head_due_at,
                head_dead_letter: exception.head_dead_letter,
                key_paused: exception.key_paused,
                key_rests: exception.key_rests.unwrap_or_default(),
            },
            (_, Some(host)) => {
                let host_alive = exception.host_alive.unwrap_or_default();
                Fate::Claimed { host, host_alive, since: None, attempt, max_attempts }
            }
            (_, None) => Fate::Retrying {
                due_at,
                is_due: exception.is_due.unwrap_or_default(),
                attempt,
                max_attempts,
                class: exception.class,
                error: exception.error,
                redriven_from: exception.redriven_from,
            },
        })
    }

    /// A dead letter ends it, unless the group was sent back to it since.
    fn dead(&self) -> Option<Fate> {
        let Dead { id, class, error, attempts, died_at, redriven_at, .. } =
            self.dead.clone().filter(|dead| !dead.is_replayed)?;
        Some(Fate::Dead { dead_letter_id: id, class, error, attempts, died_at, redriven_at })
    }

    /// It is in the log, and nothing of the group's holds it.
    fn visible(&self, id: i64, message: &Visible) -> Fate {
        let begins_after = self.begins_after;
        if !message.matches {
            Fate::Filtered
        } else if let Some(by) = message.winner.filter(|winner| *winner != id && id > begins_after) {
            Fate::Superseded { by }
        } else if self.gap.is_some() {
            Fate::InGap
        } else if id > self.claimed {
            let before_exact = self.ahead <= COUNTED_MAX;
            let before = if before_exact { self.ahead } else { self.ahead.max(id - self.claimed - 1) };
            Fate::Unclaimed { before, before_exact }
        } else if id <= begins_after {
            Fate::BeforeStart { begins_after, claimed_before: id <= self.replay_upto }
        } else {
            Fate::Settled
        }
    }

    /// It is not in the log. `producing`: processes whose transactions may still commit something.
    fn missing(&self, id: i64, producing: &[Option<i32>]) -> Fate {
        // Beyond the position, and before the group's beginning, nobody has looked which of them may fill it.
        let is_open = (id > self.claimed || id <= self.begins_after) && !producing.is_empty();
        match &self.gap {
            _ if id < 1 || id > self.last_id => Fate::Unknown { last_id: self.last_id },
            _ if id <= self.floor => Fate::Removed { begins_after: self.floor },
            Some(gap) if gap.undecided => Fate::NotVisible { pid: gap.pid },
            None if is_open => Fate::NotVisible { pid: producing.iter().flatten().min().copied() },
            _ => Fate::RolledBack,
        }
    }
}
