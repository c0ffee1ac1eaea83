//! `millstream why`: what one message waits for in one group, or what became of it, in one line.

use anyhow::Result;
use clap::Args;

use super::{
    Global, human,
    output::{first_line, visible},
    with_database::with_database,
};
use crate::engine::{self, Fate};

/// Enough for what a payload lacks or a database refuses, and still a line.
const ERROR_CHARS_MAX: usize = 240;

#[derive(Args, Debug)]
pub struct Why {
    /// The group that should handle it
    pub group: String,
    /// The message's id, as `tail` and `produce` show it
    #[arg(value_name = "ID")]
    pub id: i64,
}

impl Why {
    pub(super) async fn run(&self, global: &Global) -> Result<()> {
        let why = with_database(global, async |database, _| engine::why(database, &self.group, self.id).await).await?;
        global.output().one(&why, text)
    }
}

fn text(why: &engine::Why) -> String {
    let paused = match &why.paused_at {
        Some(since) if why.fate.waits_for_a_claim() => format!("; the group is paused since {since}"),
        _ => String::new(),
    };
    visible(&format!("message {} of {}: {}{paused}", why.message_id, why.stream, fate(&why.fate))) + "\n"
}

fn fate(fate: &Fate) -> String {
    match fate {
        Fate::Unknown { last_id } => format!("there is none yet, the last id drawn is {last_id}"),
        Fate::NotVisible { pid: Some(pid) } => {
            format!("not visible, its transaction may still be open (database process {pid})")
        }
        Fate::NotVisible { pid: None } => "not visible, its transaction may be prepared and still to commit".to_owned(),
        Fate::RolledBack => {
            "there is none and will be none: rolled back, thinned as an old version of its key, or removed by hand"
                .to_owned()
        }
        Fate::Removed { begins_after } => format!("removed by retention, the log begins after {begins_after}"),
        Fate::Filtered => "the group's filter does not match it".to_owned(),
        Fate::Unclaimed { before: 0, .. } => "not yet claimed, it is the next".to_owned(),
        Fate::Unclaimed { before, before_exact } => {
            let about = if *before_exact { "" } else { "about " };
            let messages = human::counted(before.unsigned_abs(), "message");
            format!("not yet claimed, {about}{messages} before it")
        }
        Fate::InGap => "committed late, below the group's position; the next turn takes it".to_owned(),
        Fate::Claimed { host, host_alive, since, attempt, max_attempts } => {
            let since = since.as_ref().map(|since| format!(" since {since}")).unwrap_or_default();
            let dead = if *host_alive { "" } else { "; its lease has run out, another host takes over" };
            format!("with host {host}{since}, attempt {attempt} of {max_attempts}{dead}")
        }
        Fate::Retrying { due_at, is_due, attempt, max_attempts, class, error, redriven_from } => {
            let due = if *is_due { "due since" } else { "at" };
            let error = first_line(error.as_deref().unwrap_or_default(), ERROR_CHARS_MAX);
            let last =
                class.as_ref().map(|class| format!("; the last one failed: {class}: {error}")).unwrap_or_default();
            let redriven = redriven_from.map(|id| format!("; redriven from dead letter {id}")).unwrap_or_default();
            format!("waits for attempt {attempt} of {max_attempts}, {due} {due_at}{last}{redriven}")
        }
        Fate::Delayed { due_at } => format!("delayed until {due_at}"),
        Fate::Deferred { key_rests: true, .. } => "waits behind its key, which rests after a dead letter".to_owned(),
        Fate::Deferred { key_paused: true, .. } => "waits behind its key, which is paused".to_owned(),
        Fate::Deferred { blocked_by: Some(id), head_dead_letter, head_due_at, .. } => {
            let head = match (head_dead_letter, head_due_at) {
                // A redriven one has both, and comes again.
                (_, Some(due)) => format!(", which is due at {due}"),
                (Some(dead), None) => format!(
                    ", which is dead letter {dead}: `millstream dead redrive {dead}` puts it back in its place, `millstream dead discard {dead}` lets the key go on without it"
                ),
                (None, None) => String::new(),
            };
            format!("waits behind message {id} of its key{head}")
        }
        Fate::Deferred { key_host: Some(host), .. } => format!("waits behind its key, which is with host {host}"),
        Fate::Deferred { .. } => "waits behind its key, which the next turn takes".to_owned(),
        Fate::Superseded { by } => format!("superseded by message {by}, a newer version of its key"),
        Fate::Dead { dead_letter_id, class, error, attempts, died_at, redriven_at } => {
            let redriven = redriven_at.as_ref().map(|at| format!(", redriven at {at}")).unwrap_or_default();
            let (error, attempts) =
                (first_line(error, ERROR_CHARS_MAX), human::counted(attempts.unsigned_abs().into(), "attempt"));
            format!("dead letter {dead_letter_id} since {died_at}{redriven}, after {attempts}: {class}: {error}")
        }
        Fate::BeforeStart { begins_after, claimed_before } => {
            let handled = if *claimed_before { "; before that it had passed it" } else { "" };
            format!("the group began, or was sent, after {begins_after}, behind it{handled}")
        }
        Fate::Settled => "done, unless its dead letter was discarded".to_owned(),
    }
}
