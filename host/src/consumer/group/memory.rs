//! What this host holds of one group, as it remembers it. The database has the same in `claim`, `exception` and
//! `message_key_lease`; after a lost connection the two are compared.
//!
//! A held message is open (waiting for its key or a slot, or running), or done without effects and not yet settled, or
//! ended otherwise and on its way through a settle. Invariant: it is in exactly one of the three until it is settled.

use std::{
    collections::{HashMap, HashSet},
    time::Duration,
};

use tokio_util::sync::CancellationToken;

use super::{keys_held::KeysHeld, lanes::in_lane, slots::Ended};
use crate::{
    engine::{ClaimId, Claimed, Done, Held, Keyed, Lane, Settlement, Source, Token, Turn, Verdict, verdict},
    handler::Outcome,
};

/// What came of one turn under one token.
#[derive(Debug)]
struct HeldClaim {
    open: HashSet<i64>,
    done: Vec<i64>,
    settling: HashSet<i64>,
    /// Some of its messages are in lanes: their settles keep their order, and survive a crash of the database.
    has_lanes: bool,
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

    /// Every message is done.
    fn is_finished(&self) -> bool {
        self.open.is_empty() && self.settling.is_empty()
    }
}

/// See the module.
#[derive(Debug, Default)]
pub struct Memory {
    claims: HashMap<Token, HeldClaim>,
    /// The keys this host has.
    keys: KeysHeld,
    /// Ended otherwise than plainly, and not yet handed to a settle.
    ended: Vec<Settlement>,
    /// Lanes, and the messages of theirs that will never be settled: they must not hold them.
    released: Vec<(Lane, i64)>,
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
    pub fn hold(&mut self, claimed: &Claimed, lane_max: u32, life: &CancellationToken) -> CancellationToken {
        self.open += 1;
        self.open_retries += u32::from(is_retry(claimed.token, claimed.failures, claimed.keyed.as_ref()));
        self.open_bytes += claimed.message.payload.as_ref().map_or(0, Vec::len) as u64;
        let keyed = in_lane(claimed.keyed.as_ref());
        if let Some(keyed) = keyed {
            self.keys.claimed(&keyed.lane, claimed.token.source == Source::Exception, lane_max);
        }
        let held = self.claims.entry(claimed.token).or_insert_with(|| HeldClaim {
            open: HashSet::new(),
            done: Vec::new(),
            settling: HashSet::new(),
            has_lanes: false,
            cut: life.child_token(),
        });
        held.open.insert(claimed.message.id);
        held.has_lanes |= keyed.is_some();
        held.cut.clone()
    }

    /// Takes note of an ended delivery. `None`: it was no longer ours.
    pub fn ended(&mut self, ended: Ended, retry: &crate::config::Retry) -> Option<Verdict> {
        self.open = self.open.saturating_sub(1);
        let is_retry = is_retry(ended.token, ended.failures, ended.keyed.as_ref());
        self.open_retries = self.open_retries.saturating_sub(u32::from(is_retry));
        self.open_bytes = self.open_bytes.saturating_sub(ended.payload_bytes);
        let held = self.claims.get_mut(&ended.token).filter(|held| held.open.contains(&ended.message_id));
        let Some(held) = held else {
            self.leave_lane(ended.keyed.as_ref());
            return None;
        };
        held.open.remove(&ended.message_id);
        let has_effects = ended.has_effects();
        let finished = ended.finished;
        if finished.outcome == Outcome::Done && !has_effects && !ended.is_redriven {
            held.done.push(ended.message_id);
            self.leave_lane(ended.keyed.as_ref());
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
            keyed: ended.keyed,
            skipped: ended.skipped,
            sql: ended.sql,
        });
        Some(verdict)
    }

    /// A message of a lane is done, or settled.
    fn leave_lane(&mut self, keyed: Option<&Keyed>) {
        if let Some(keyed) = in_lane(keyed) {
            self.keys.ended(&keyed.lane);
        }
    }

    /// The keys this host has.
    pub fn keys(&mut self) -> &mut KeysHeld {
        &mut self.keys
    }

    /// What a turn is to settle: everything of finished claims and of claims with lanes, so that nothing of a key is left
    /// when the key is handed on. With `partly`, everything that is done.
    pub fn done(&self, partly: bool) -> Done {
        let mut done = Done::default();
        for (token, held) in self.claims.iter().filter(|(_, held)| !held.done.is_empty()) {
            let messages = held.done.iter().map(|message| (token.claim, *message));
            match token.source {
                Source::Exception => done.exceptions.extend(messages),
                Source::Log if held.is_finished() => done.claims.push(token.claim),
                Source::Log if held.has_lanes || partly => done.messages.extend(messages),
                Source::Log => continue,
            }
            done.is_durable |= held.has_lanes;
        }
        done
    }

    /// A turn has settled `done`, as far as that was still ours; answers how many deliveries were fenced.
    pub fn settled_by_turn(&mut self, done: &Done, turn: &Turn) -> usize {
        let mut fenced = 0;
        for claim in &done.claims {
            let token = Token { claim: *claim, source: Source::Log };
            if let Some(held) = self.claims.remove(&token)
                && !turn.settled.contains(claim)
            {
                fenced += held.done.len();
            }
        }
        let of_claims = done.messages.iter().map(|one| (Source::Log, one));
        for (source, (claim, message)) in of_claims.chain(done.exceptions.iter().map(|one| (Source::Exception, one))) {
            let token = Token { claim: *claim, source };
            let was_ours = match source {
                Source::Log => turn.settled.contains(claim),
                Source::Exception => turn.ran.contains(message),
            };
            fenced += usize::from(!was_ours);
            let Some(held) = self.claims.get_mut(&token) else { continue };
            held.done.retain(|id| id != message);
            if !was_ours && source == Source::Log {
                self.lose(token);
            } else if held.is_empty() {
                self.claims.remove(&token);
            }
        }
        fenced
    }

    pub fn has_ended(&self) -> bool {
        !self.ended.is_empty()
    }

    /// Whether what has ended can be settled in any order, and apart from the turns: none of it is in a lane, compacted, or
    /// in a transaction already.
    pub fn ends_freely(&self) -> bool {
        self.claims.values().all(|held| !held.has_lanes)
            && self.ended.iter().all(|one| one.keyed.is_none() && one.sql.is_none())
    }

    pub fn ended_len(&self) -> usize {
        self.ended.len()
    }

    /// The message that has waited longest to be settled.
    pub fn oldest_ended(&self) -> Option<i64> {
        self.ended.first().map(|one| one.message_id)
    }

    /// How many of what has ended match; counted up to `max`.
    pub fn count_ended(&self, max: usize, matches: impl Fn(&Settlement) -> bool) -> usize {
        self.ended.iter().filter(|one| matches(one)).take(max).count()
    }

    /// At most `max` ended deliveries that match. For those that end freely.
    pub fn take_matching(&mut self, max: usize, matches: impl Fn(&Settlement) -> bool) -> Vec<Settlement> {
        let mut left = max;
        let takes = |one: &mut Settlement| {
            let takes = left > 0 && matches(one);
            left -= usize::from(takes);
            takes
        };
        self.ended.extract_if(.., takes).collect()
    }

    /// How many have ended otherwise than plainly and are not settled yet.
    pub fn unsettled(&self) -> usize {
        self.claims.values().map(|held| held.settling.len()).sum()
    }

    /// Whether claims have done messages that wait for slower ones of their claim.
    pub fn has_partly_done(&self) -> bool {
        self.claims.values().any(|held| !held.done.is_empty() && !held.is_finished())
    }

    /// About `max` ended deliveries to settle in one transaction: a message that was handed back goes with the one it waited
    /// for. The done ones of claims with lanes come first: of one key, none is settled before an earlier one.
    pub fn take_ended(&mut self, max: usize) -> Vec<Settlement> {
        let is_behind = |one: &Settlement| matches!(one.verdict, Verdict::Again { failure: None, .. });
        let mut cut = self.ended.len().min(max);
        while self.ended.get(cut).is_some_and(is_behind) {
            cut += 1;
        }
        let rest = self.ended.split_off(cut);
        let ended = std::mem::replace(&mut self.ended, rest);
        let mut batch = Vec::with_capacity(ended.len());
        for (token, held) in self.claims.iter_mut().filter(|(_, held)| held.has_lanes) {
            for message_id in held.done.drain(..) {
                held.settling.insert(message_id);
                batch.push(Settlement::plain(*token, message_id, Verdict::Done));
            }
        }
        batch.extend(ended);
        batch
    }

    /// A settle has ended: `batch` is settled, or was fenced. Fenced deliveries of a claim mean that it is gone; exceptions
    /// each have a row of their own, so that one says nothing of the others.
    pub fn settled(&mut self, batch: &[Settlement], is_fenced: impl Fn(usize) -> bool) {
        for (index, one) in batch.iter().enumerate() {
            if is_fenced(index) && one.token.source == Source::Log {
                self.lose(one.token);
            } else if let Some(held) = self.claims.get_mut(&one.token) {
                held.settling.remove(&one.message_id);
                if held.is_empty() {
                    self.claims.remove(&one.token);
                }
            }
            self.leave_lane(one.keyed.as_ref());
        }
    }

    /// A settle has failed before it could commit: its deliveries wait for the next.
    pub fn put_back(&mut self, batch: Vec<Settlement>) {
        self.ended.splice(..0, batch);
    }

    /// A delivery whose effects were refused has another verdict now; what was behind it follows.
    pub fn judge_again(&mut self, one: Settlement) {
        self.ended.push(one);
    }

    fn lose(&mut self, token: Token) {
        if let Some(held) = self.claims.remove(&token) {
            held.cut.cancel();
        }
        self.drop_ended(|one| one.token == token);
    }

    /// Forgets ended deliveries that are no longer ours.
    fn drop_ended(&mut self, is_lost: impl Fn(&Settlement) -> bool) {
        let (lost, kept) = std::mem::take(&mut self.ended).into_iter().partition(is_lost);
        self.ended = kept;
        let lost: Vec<Settlement> = lost;
        for one in lost {
            self.leave_lane(one.keyed.as_ref());
            self.released.extend(one.keyed.map(|keyed| (keyed.lane, one.message_id)));
        }
    }

    /// See [`Memory::released`].
    pub fn take_released(&mut self) -> Vec<(Lane, i64)> {
        std::mem::take(&mut self.released)
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
        self.keys.clear();
        lost
    }

    pub fn is_empty(&self) -> bool {
        self.claims.is_empty() && !self.keys.has_idle()
    }

    /// Compares with what the database says is held, both ways. No settle may be under way.
    pub fn compare(&mut self, held: &[Held], keys: Vec<Lane>) -> Differences {
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
                Some(rows) => differences.fenced += self.compare_claim(token, &rows, &mut differences.unknown),
            }
        }
        differences.unknown.extend(rows.into_keys().map(|token| token.claim));
        differences.unknown.sort_unstable();
        differences.unknown.dedup();
        // What a turn brought from the log and what it brought of exceptions have one claim id, and go back together: else
        // one would come again while it runs here, or run before an earlier one of its key.
        for claim in &differences.unknown {
            for source in [Source::Log, Source::Exception] {
                let token = Token { claim: *claim, source };
                differences.fenced += self.claims.get(&token).map_or(0, HeldClaim::ended_len);
                self.lose(token);
            }
        }
        // A key whose lease was answered to nobody, or whose messages were given back.
        keys.into_iter().for_each(|lane| self.keys.found(lane));
        differences
    }

    /// One claim that both know. Messages that only memory has are settled already, and dropped; messages that only the
    /// database has were settled by a commit that was lost, and are handed back. With them goes a whole claim that has
    /// lanes, so that none of a key runs before an earlier one.
    fn compare_claim(&mut self, token: Token, rows: &HashSet<i64>, unknown: &mut Vec<ClaimId>) -> usize {
        let Some(held) = self.claims.get_mut(&token) else { return 0 };
        let before = held.ended_len();
        held.open.retain(|id| rows.contains(id));
        held.done.retain(|id| rows.contains(id));
        held.settling.retain(|id| rows.contains(id));
        let gone = before - held.ended_len();
        let known = |id: &i64| held.open.contains(id) || held.settling.contains(id) || held.done.contains(id);
        let lost: Vec<i64> = rows.iter().filter(|id| !known(id)).copied().collect();
        if held.has_lanes && !lost.is_empty() {
            let ended = held.ended_len();
            self.lose(token);
            unknown.push(token.claim);
            return gone + ended;
        }
        held.settling.extend(&lost);
        if held.is_empty() {
            self.claims.remove(&token);
        }
        self.drop_ended(|one| one.token == token && !rows.contains(&one.message_id));
        self.ended.extend(lost.into_iter().map(|message_id| {
            let verdict = Verdict::Again { delay: Duration::ZERO, failures: 0, failure: None };
            Settlement::plain(token, message_id, verdict)
        }));
        gone
    }
}

/// Claimed for a free slot, as retries are; what waited for its key is claimed like a fresh one.
fn is_retry(token: Token, failures: u32, keyed: Option<&Keyed>) -> bool {
    token.source == Source::Exception && (failures > 0 || in_lane(keyed).is_none())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::handler::Message;

    /// A message without a key that a turn has brought.
    fn claimed(claim: i64, source: Source, id: i64) -> Claimed {
        let message = Message {
            id,
            stream: "s".into(),
            group: "g".into(),
            key: None,
            rank: None,
            routing_key: None,
            headers: Vec::new(),
            content_type: None,
            payload: None,
            produced_at_ms: 0,
            attempt: 1,
            max_attempts: 3,
            timeout: Duration::from_secs(1),
            replay: false,
            redriven: false,
            skipped: 0,
            gap_since: None,
            sql: None,
        };
        Claimed { token: Token { claim: ClaimId(claim), source }, failures: 0, keyed: None, message }
    }

    fn held(claim: i64, source: Source, id: i64) -> Held {
        Held { token: Token { claim: ClaimId(claim), source }, first: id, last: id }
    }

    /// What a comparison gives back it gives back whole: the log's messages and the exceptions of a turn have one claim id.
    #[test]
    fn what_goes_back_of_a_turn_is_forgotten_whole() {
        for (known, unknown) in [(Source::Log, Source::Exception), (Source::Exception, Source::Log)] {
            let (mut memory, life) = (Memory::default(), CancellationToken::new());
            let cut = memory.hold(&claimed(7, known, 1), 1, &life);
            let other = memory.hold(&claimed(8, known, 2), 1, &life);
            let rows = [held(7, known, 1), held(7, unknown, 3), held(8, known, 2)];
            let differences = memory.compare(&rows, Vec::new());
            assert_eq!(differences.unknown, [ClaimId(7)], "{known:?}");
            assert!(cut.is_cancelled() && !other.is_cancelled(), "{known:?}");
            assert_eq!(memory.claims.len(), 1, "{known:?}");
        }
    }

    /// Exceptions have rows of their own: one that was fenced says nothing of the others of its turn.
    #[test]
    fn a_fenced_exception_is_forgotten_alone() {
        let (mut memory, life) = (Memory::default(), CancellationToken::new());
        let cut = memory.hold(&claimed(7, Source::Exception, 1), 1, &life);
        memory.hold(&claimed(7, Source::Exception, 2), 1, &life);
        let token = Token { claim: ClaimId(7), source: Source::Exception };
        memory.settled(&[Settlement::plain(token, 1, Verdict::Done)], |_| true);
        assert!(!cut.is_cancelled() && memory.claims.contains_key(&token));
    }

    /// Those that match go, in their order and up to a number; the others stay in theirs.
    #[test]
    fn what_matches_is_taken_and_the_rest_keeps_its_order() {
        let mut memory = Memory::default();
        let token = |claim| Token { claim: ClaimId(claim), source: Source::Log };
        let all = [(1, 10), (2, 20), (1, 11), (2, 21), (2, 22)];
        memory.put_back(all.iter().map(|(claim, id)| Settlement::plain(token(*claim), *id, Verdict::Done)).collect());
        let is_second = |one: &Settlement| one.token.claim == ClaimId(2);
        assert_eq!(
            (memory.oldest_ended(), memory.count_ended(9, is_second), memory.count_ended(2, is_second)),
            (Some(10), 3, 2)
        );
        let ids = |batch: Vec<Settlement>| batch.iter().map(|one| one.message_id).collect::<Vec<_>>();
        assert_eq!(ids(memory.take_matching(2, is_second)), [20, 21]);
        assert_eq!(ids(memory.take_matching(9, |_| true)), [10, 11, 22]);
    }
}
