//! What this host holds of one group, as it remembers it. The database has the same in `claim` and `exception`; after a
//! lost connection the two are compared.
//!
//! A held message is open (waiting for a slot, or running), or done without effects and not yet settled, or ended
//! otherwise and on its way through a settle. Invariant: it is in exactly one of the three until it is settled.

use std::collections::{HashMap, HashSet};

use tokio_util::sync::CancellationToken;

use super::slots::Ended;
use crate::{
    engine::{ClaimId, Claimed, Held, Settlement, Source, Token, Verdict, verdict},
    handler::Outcome,
};

/// What came of one turn under one token.
#[derive(Debug)]
struct HeldClaim {
    open: HashSet<i64>,
    done: Vec<i64>,
    settling: HashSet<i64>,
    cut: CancellationToken,
}

impl HeldClaim {
    fn is_empty(&self) -> bool {
        self.open.is_empty() && self.done.is_empty() && self.settling.is_empty()
    }

    /// Deliveries that have ended. Open ones are counted when they end.
    fn ended_len(&self) -> usize {
        self.done.len() + self.settling.len()
    }
}

/// See the module.
#[derive(Debug, Default)]
pub struct Memory {
    claims: HashMap<Token, HeldClaim>,
    /// Ended otherwise than plainly, and not yet handed to a settle.
    ended: Vec<Settlement>,
    /// Messages not yet ended.
    pub open: u32,
    /// Of these, retries.
    pub open_retries: u32,
    /// Payload bytes of messages not yet ended.
    pub open_bytes: u64,
}

/// What a comparison with the database found.
#[derive(Debug, Default)]
pub struct Differences {
    /// Ended deliveries that are no longer ours.
    pub fenced: usize,
    /// Claims that the database has and memory has not.
    pub unknown: Vec<ClaimId>,
}

impl Memory {
    /// Remembers a claimed message and answers what cuts it.
    pub fn hold(&mut self, claimed: &Claimed, life: &CancellationToken) -> CancellationToken {
        self.open += 1;
        self.open_retries += u32::from(claimed.token.source == Source::Exception);
        self.open_bytes += payload_bytes(claimed);
        let held = self.claims.entry(claimed.token).or_insert_with(|| HeldClaim {
            open: HashSet::new(),
            done: Vec::new(),
            settling: HashSet::new(),
            cut: life.child_token(),
        });
        held.open.insert(claimed.message.id);
        held.cut.clone()
    }

    /// Takes note of an ended delivery. `None`: it was no longer ours.
    pub fn ended(&mut self, ended: Ended, retry: &crate::config::Retry) -> Option<Verdict> {
        self.open = self.open.saturating_sub(1);
        self.open_retries = self.open_retries.saturating_sub(u32::from(ended.token.source == Source::Exception));
        self.open_bytes = self.open_bytes.saturating_sub(ended.payload_bytes);
        let held = self.claims.get_mut(&ended.token)?;
        if !held.open.remove(&ended.message_id) {
            return None;
        }
        let finished = ended.finished;
        if finished.outcome == Outcome::Done && finished.produced.is_empty() && ended.token.source == Source::Log {
            held.done.push(ended.message_id);
            return Some(Verdict::Done);
        }
        held.settling.insert(ended.message_id);
        let verdict = verdict(finished.outcome, ended.failures, retry, fastrand::f64());
        self.ended.push(Settlement {
            token: ended.token,
            message_id: ended.message_id,
            failures: ended.failures,
            verdict: verdict.clone(),
            produced: finished.produced,
            digest: finished.digest.as_deref().map(str::to_owned),
        });
        Some(verdict)
    }

    /// Claims that ended `done` to the last message: a turn settles each with one row.
    pub fn finished(&self) -> Vec<ClaimId> {
        let is_finished = |(token, held): &(&Token, &HeldClaim)| {
            token.source == Source::Log && held.open.is_empty() && held.settling.is_empty()
        };
        self.claims.iter().filter(is_finished).map(|(token, _)| token.claim).collect()
    }

    /// A turn has settled `settled` of the `finished` claims; answers how many deliveries of the others were fenced.
    pub fn forget_finished(&mut self, finished: &[ClaimId], settled: &[ClaimId]) -> usize {
        let mut fenced = 0;
        for claim in finished {
            let token = Token { claim: *claim, source: Source::Log };
            if let Some(held) = self.claims.remove(&token)
                && !settled.contains(claim)
            {
                fenced += held.done.len();
            }
        }
        fenced
    }

    pub fn has_ended(&self) -> bool {
        !self.ended.is_empty()
    }

    /// Whether claims have done messages that wait for slower ones of their claim.
    pub fn has_partly_done(&self) -> bool {
        self.claims.values().any(|held| !held.done.is_empty() && (!held.open.is_empty() || !held.settling.is_empty()))
    }

    /// Up to `max` ended deliveries to settle in one transaction, the plainly done ones of unfinished claims with them.
    pub fn take_ended(&mut self, max: usize) -> Vec<Settlement> {
        let rest = self.ended.split_off(self.ended.len().min(max));
        let mut batch = std::mem::replace(&mut self.ended, rest);
        for (token, held) in &mut self.claims {
            if held.open.is_empty() && held.settling.is_empty() {
                continue; // finished: its next turn settles it whole
            }
            for message_id in held.done.drain(..) {
                held.settling.insert(message_id);
                batch.push(Settlement::plain(*token, message_id, Verdict::Done));
            }
        }
        batch
    }

    /// A settle has ended: `batch` is settled, or was fenced. Fenced deliveries of a claim mean that it is gone.
    pub fn settled(&mut self, batch: &[Settlement], is_fenced: impl Fn(usize) -> bool) {
        for (index, one) in batch.iter().enumerate() {
            if is_fenced(index) {
                self.lose(one.token);
            } else if let Some(held) = self.claims.get_mut(&one.token) {
                held.settling.remove(&one.message_id);
                if held.is_empty() {
                    self.claims.remove(&one.token);
                }
            }
        }
    }

    /// A settle has failed before it could commit: its deliveries wait for the next.
    pub fn put_back(&mut self, batch: Vec<Settlement>) {
        self.ended.extend(batch);
    }

    fn lose(&mut self, token: Token) {
        if let Some(held) = self.claims.remove(&token) {
            held.cut.cancel();
        }
        self.ended.retain(|one| one.token != token);
    }

    /// Everything is void: the lease is lost, or the group was seeked. Answers how many ended deliveries that fences; those
    /// that still run are counted when they end.
    pub fn lose_all(&mut self) -> usize {
        let mut lost = 0;
        for (_, held) in self.claims.drain() {
            lost += held.ended_len();
            held.cut.cancel();
        }
        self.ended.clear();
        lost
    }

    pub fn is_empty(&self) -> bool {
        self.claims.is_empty()
    }

    /// Compares with what the database says is held, both ways. No settle may be under way.
    pub fn compare(&mut self, held: &[Held]) -> Differences {
        let mut rows: HashMap<Token, HashSet<i64>> = HashMap::new();
        for run in held {
            rows.entry(run.token).or_default().extend(run.first..=run.last);
        }
        let mut differences = Differences::default();
        let tokens: Vec<Token> = self.claims.keys().copied().collect();
        for token in tokens {
            match rows.remove(&token) {
                None => {
                    differences.fenced += self.claims.get(&token).map_or(0, HeldClaim::ended_len);
                    self.lose(token);
                }
                Some(rows) => differences.fenced += self.compare_claim(token, &rows),
            }
        }
        differences.unknown = rows.into_keys().map(|token| token.claim).collect();
        differences.unknown.sort_unstable();
        differences.unknown.dedup();
        differences
    }

    /// One claim that both know. Messages that only memory has are settled already, and dropped; messages that only the
    /// database has were settled by a commit that was lost, and are handed back.
    fn compare_claim(&mut self, token: Token, rows: &HashSet<i64>) -> usize {
        let Some(held) = self.claims.get_mut(&token) else { return 0 };
        let before = held.ended_len();
        held.open.retain(|id| rows.contains(id));
        held.done.retain(|id| rows.contains(id));
        held.settling.retain(|id| rows.contains(id));
        let gone = before - held.ended_len();
        self.ended.retain(|one| one.token != token || rows.contains(&one.message_id));
        let known = |id: &i64| held.open.contains(id) || held.settling.contains(id) || held.done.contains(id);
        let lost: Vec<i64> = rows.iter().filter(|id| !known(id)).copied().collect();
        for message_id in lost {
            held.settling.insert(message_id);
            let verdict = Verdict::Again { delay: std::time::Duration::ZERO, failures: 0, failure: None };
            self.ended.push(Settlement::plain(token, message_id, verdict));
        }
        if held.is_empty() {
            self.claims.remove(&token);
        }
        gone
    }
}

fn payload_bytes(claimed: &Claimed) -> u64 {
    claimed.message.payload.as_ref().map_or(0, Vec::len) as u64
}
