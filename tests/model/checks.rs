//! The reference: each invariant of the semantics as a question to a trace. What holds for every message is here; what
//! holds for keys is in the files beside.

use std::collections::{BTreeMap, HashMap, HashSet};

use millstream::{config::OnDeadLetter, handler::Concurrency};

use super::{
    checks_compacted, checks_keyed,
    facts::{Age, Claim, Fact, Facts, Sent, Told},
    trace::{End, Micros},
};

/// Of each check, at most so many violations are told.
const TOLD_MAX: usize = 4;

/// Everything that is violated.
pub fn all(facts: &Facts) -> Vec<String> {
    let checks: [fn(&Facts) -> Vec<String>; 24] = [
        t1_t2_what_committed_is_there_and_nothing_else,
        l2_a_message_is_delivered_as_it_was_produced,
        o10_what_the_filter_rejects_is_not_delivered,
        n1_counts_balance,
        e2_what_is_done_is_done_once,
        e5_what_is_free_is_taken_in_its_turn,
        t5_effects_exist_once,
        r1_attempts_are_bounded,
        r2_only_failures_and_lost_hosts_count,
        r3_backoff_and_delay_are_lower_bounds,
        d4_a_dead_letter_stays_until_somebody_decides,
        e10_no_key_holds_up_a_producer,
        checks_keyed::e1_one_at_a_time,
        checks_keyed::e3_an_exclusive_key_begins_with_its_oldest,
        checks_keyed::o1_the_next_starts_after_the_one_before_has_ended,
        checks_keyed::o4_order_is_commit_order,
        checks_keyed::o9_the_last_deliveries_of_a_key_are_in_order,
        checks_keyed::d2_later_deliveries_tell_of_the_gap,
        checks_keyed::d3_nothing_of_a_resting_key_is_delivered,
        checks_keyed::d5_dead_letters_of_a_resting_key_are_in_order,
        checks_keyed::w_what_is_paused_stands_still,
        checks_compacted::c1_c3_versions_rise_and_the_winner_is_the_highest,
        checks_compacted::c5_a_superseded_version_leaves_no_trace,
        checks_compacted::y5_what_was_passed_over_is_told_once,
    ];
    checks.iter().flat_map(|check| check(facts).into_iter().take(TOLD_MAX)).collect()
}

/// T1, T2. All or nothing; what was rolled back, also to a savepoint, leaves nothing.
fn t1_t2_what_committed_is_there_and_nothing_else(facts: &Facts) -> Vec<String> {
    let mut found = Vec::new();
    let known: HashSet<i64> = facts.produced.iter().map(|one| one.id).collect();
    for one in facts.produced.iter().filter(|one| !facts.messages.contains_key(&one.id)) {
        found.push(format!("T1: message {} committed and is not in the log", one.id));
    }
    for told in &facts.deliveries {
        let id = told.delivery.id;
        if !known.contains(&id) || facts.rolled_back.contains(&id) {
            found.push(format!("T2: message {id} was delivered and never committed"));
        }
    }
    found
}

/// L2. "Key bytes (and rank, ...) are identical on first delivery, retry, ... redrive."
fn l2_a_message_is_delivered_as_it_was_produced(facts: &Facts) -> Vec<String> {
    let mut found = Vec::new();
    for told in &facts.deliveries {
        let delivery = &told.delivery;
        let Some(fact) = facts.messages.get(&delivery.id) else { continue };
        let same = delivery.key == fact.key
            && delivery.rank == fact.rank
            && delivery.rank == fact.produced.rank
            && delivery.routing_key == fact.produced.routing_key
            && delivery.payload == fact.produced.payload;
        if !same {
            found.push(format!("L2: message {} was delivered as another: {delivery:?}, {fact:?}", delivery.id));
        }
    }
    found
}

/// O10. "A message the group's filter rejects is terminal at once", so it is never delivered.
fn o10_what_the_filter_rejects_is_not_delivered(facts: &Facts) -> Vec<String> {
    let rejected =
        |told: &&Told| facts.messages.get(&told.delivery.id).is_some_and(|fact| !facts.sees(told.group, fact));
    let told = facts.deliveries.iter().filter(rejected);
    told.map(|told| format!("O10: message {} was delivered to {}", told.delivery.id, told.delivery.group)).collect()
}

/// N1, C5, D6, D8, W1, W5. "Counts balance": whatever a group sees is done, superseded, dead, or behind a key that waits for
/// an operator; nothing is lost, in any group. After a seek what lies behind its point ends once more, and what a whole
/// group was sent past need not. Nor need what a group took of a key without a mode while the seek of that waited.
fn n1_counts_balance(facts: &Facts) -> Vec<String> {
    let deliveries = facts.by_message();
    let mut found = Vec::new();
    for group in 0..facts.groups.len() {
        for fact in facts.seen(group) {
            let is_superseded = fact.rank.is_some() && facts.heads.get(fact.key.as_deref().unwrap()) != Some(&fact.id);
            if is_superseded || facts.behind.contains(&(group, fact.id)) {
                continue;
            }
            let sent: Vec<&Sent> = facts.sent(group, fact.key.as_deref()).collect();
            let ends = |age: &usize| {
                let all = deliveries.get(&((group, *age), fact.id));
                all.is_some_and(|all| all.iter().any(|told| told.how.is_done()))
                    || facts.deaths_of((group, *age), fact.id).any(|death| death.what == "open" && !death.is_kept)
            };
            let came_meanwhile = |age: usize| {
                let Sent { key, began, .. } = sent[age - 1];
                let before = deliveries.get(&((group, age - 1), fact.id));
                key.is_some()
                    && facts.mode(group, fact) == Concurrency::Parallel
                    && before.is_some_and(|before| before.iter().any(|told| told.claimed >= *began))
            };
            // From the last age back, as long as a key was sent past it.
            let ages = (0..=sent.len()).rev();
            let is_open = |age: &usize| *age > 0 && (facts.is_passed((group, *age), fact) || came_meanwhile(*age));
            let from = ages.clone().find(|age| !is_open(age) || sent[age - 1].key.is_none()).unwrap_or(0);
            let is_passed = is_open(&from);
            if !is_passed && !ages.take_while(|age| *age >= from).any(|age| ends(&age)) {
                let name = &facts.groups[group].name;
                let told: Vec<_> =
                    facts.deliveries.iter().filter(|told| (told.group, told.delivery.id) == (group, fact.id)).collect();
                found.push(format!("N1: message {} is lost in {name}: {told:?}, {sent:?}, {fact:?}", fact.id));
            }
        }
    }
    found
}

/// E2. "Every lease has a token; ack with an old token changes nothing": what was done comes again only when its host lost
/// its lease before that was settled.
fn e2_what_is_done_is_done_once(facts: &Facts) -> Vec<String> {
    let mut found = Vec::new();
    if facts.cuts_connections {
        return found; // a settle whose answer is lost may be void, and its message given back
    }
    for (((group, age), id, redriven), all) in facts.by_line() {
        for pair in all.windows(2) {
            let (before, after) = (pair[0], pair[1]);
            // Its message came as well, since a seek, and died.
            if redriven && facts.has_died((group, age), id, before.delivery.start, after.delivery.start) {
                continue;
            }
            // What a host began just before it heard of a seek looks like what it took after it.
            let is_sent = || facts.sent.iter().any(|sent| sent.group == group && sent.key.is_none());
            if age > 0 && before.delivery.life == after.delivery.life && is_sent() || took_unheard(facts, before) {
                continue;
            }
            if before.how.is_done() && before.lease_end > after.delivery.start {
                let sent: Vec<_> = facts.sent.iter().filter(|sent| sent.group == group).collect();
                found.push(format!(
                    "E2: message {id} came again though it was done: {before:?}, then {after:?}; sent {sent:?}"
                ));
            }
        }
    }
    found
}

/// Whether the turn that took this began before a seek of its group, and got its lock after it: the host hears of the seek
/// with its next turn, cuts what runs, and gives it all back.
fn took_unheard(facts: &Facts, told: &Told) -> bool {
    let is_its_turn =
        |claim: &&Claim| (claim.group, claim.at) == (told.group, told.claimed) && claim.life == told.delivery.life;
    let Some(turn) = facts.claims.iter().find(is_its_turn) else { return false };
    let is_between = |sent: &Sent| (turn.began..=turn.at).contains(&sent.at);
    facts.sent.iter().any(|sent| sent.group == told.group && sent.key.is_none() && is_between(sent))
}

/// E2, E5. "Work conserving": no key, however deep or stuck, hides what is free: of two messages that no key holds up, what
/// was confirmed before the other's transaction began is taken no later. And whatever is delivered was taken.
fn e5_what_is_free_is_taken_in_its_turn(facts: &Facts) -> Vec<String> {
    let untaken = facts.deliveries.iter().filter(|told| told.claimed == Micros::MIN);
    let mut found: Vec<String> = untaken.map(|told| format!("E2: no turn took what was delivered: {told:?}")).collect();
    for group in 0..facts.groups.len() {
        let since = facts.sent.iter().find(|sent| sent.group == group).map_or(Micros::MAX, |sent| sent.at);
        let mut first: BTreeMap<i64, Micros> = BTreeMap::new();
        for claim in facts.claims.iter().filter(|claim| claim.group == group && claim.at < since) {
            (claim.first..=claim.last).for_each(|id| _ = first.entry(id).or_insert(claim.at));
        }
        let is_free = |fact: &&Fact| {
            facts.mode(group, fact) == Concurrency::Parallel && fact.rank.is_none() && fact.deliver_after.is_none()
        };
        let mut free: Vec<_> =
            facts.seen(group).filter(is_free).filter_map(|fact| Some((*first.get(&fact.id)?, fact))).collect();
        free.sort_by_key(|(at, fact)| (*at, fact.id));
        let mut earliest = (Micros::MAX, 0);
        for run in free.chunk_by(|one, other| one.0 == other.0).rev() {
            for (at, fact) in run.iter().filter(|(_, fact)| earliest.0 < fact.produced.began) {
                found
                    .push(format!("E5: group {group} took {} at {at}, before {}, which is older", fact.id, earliest.1));
            }
            let confirmed = run.iter().map(|(_, fact)| (fact.produced.confirmed, fact.id)).min();
            earliest = earliest.min(confirmed.expect("a run is not empty"));
        }
    }
    found
}

/// E10. "A producer is never blocked by a held key": whoever a producer was seen to wait for is a producer.
fn e10_no_key_holds_up_a_producer(facts: &Facts) -> Vec<String> {
    facts.blocked_producers.iter().map(|told| format!("E10: a producer waits for {told}")).collect()
}

/// T5, E2. Effects and acknowledgement are one commit: a fenced delivery leaves no receipt, and one that counts leaves one.
fn t5_effects_exist_once(facts: &Facts) -> Vec<String> {
    let mut found = Vec::new();
    let mut counts: HashMap<&str, usize> = HashMap::new();
    for receipt in &facts.receipts {
        *counts.entry(receipt).or_default() += 1;
    }
    let mut by_name: HashMap<String, Vec<&Told>> = HashMap::new();
    for told in facts.deliveries.iter().filter(|told| !told.is_void) {
        by_name.entry(format!("{} {}", facts.groups[told.group].name, told.delivery.id)).or_default().push(told);
    }
    for (name, count) in &counts {
        let all = by_name.get(*name).map_or(&[][..], Vec::as_slice);
        // After a seek a message comes by itself, and as what was redriven.
        let ages: HashSet<(usize, bool)> =
            all.iter().filter(|told| told.how == End::Effects).map(|told| (told.age, told.delivery.redriven)).collect();
        if *count > ages.len() {
            let is_it = |told: &&Told| format!("{} {}", facts.groups[told.group].name, told.delivery.id) == *name;
            let story: Vec<&Told> = facts.deliveries.iter().filter(is_it).collect();
            let group = story.first().map_or(0, |told| told.group);
            let sent: Vec<_> = facts.sent.iter().filter(|sent| sent.group == group).collect();
            found.push(format!("T5: {count} receipts of {name}, which was done with effects in time in {ages:?}: {story:#?}; sent {sent:#?}"));
        }
    }
    for (name, all) in &by_name {
        let Some(fact) = facts.messages.get(&all[0].delivery.id) else { continue };
        let group = all[0].group;
        let is_done = |how| all.iter().any(|told| told.how == how);
        // A compacted one whose settle was fenced may have been superseded since; and a seek fences too.
        let is_excused = fact.rank.is_some()
            || facts.sent(group, fact.key.as_deref()).next().is_some()
            || facts.deaths_of((group, 0), fact.id).next().is_some()
            || facts.behind.contains(&(group, fact.id));
        if is_done(End::Effects) && !is_done(End::Done) && !counts.contains_key(name.as_str()) && !is_excused {
            found.push(format!("T5: message {name} was done and has no receipt: {all:?}"));
        }
    }
    found
}

/// R1, R5. "Never more than N counted failures"; "attempts belong to the message, a new head starts at 1".
fn r1_attempts_are_bounded(facts: &Facts) -> Vec<String> {
    let mut found = Vec::new();
    for ((age @ (group, _), id, _), all) in facts.by_line() {
        let most = facts.groups[group].max_attempts;
        for life in lives(facts, age, &all) {
            let failures = life.iter().filter(|told| told.how.is_failure()).count();
            if failures > most as usize || life.iter().any(|told| told.delivery.attempt > most) {
                found.push(format!("R1: message {id} in group {group} failed {failures} times of {most}: {life:?}"));
            }
            if life.windows(2).any(|pair| pair[1].delivery.attempt < pair[0].delivery.attempt) {
                found.push(format!("R5: attempts of message {id} in group {group} went back: {life:?}"));
            }
        }
    }
    found
}

/// R2, O8. "A crash of the host counts one attempt for what it had claimed; hand-back, `later`, O8 do not."
fn r2_only_failures_and_lost_hosts_count(facts: &Facts) -> Vec<String> {
    let mut found = Vec::new();
    for ((age @ (group, _), id, _), all) in facts.by_line() {
        let fact = &facts.messages[&id];
        for life in lives(facts, age, &all) {
            let mut failures = 0;
            for told in &life {
                let counted = told.delivery.attempt - 1;
                let lost = lost_hosts(facts, fact.produced.began, told.delivery.start);
                let is_wrong =
                    counted > failures + lost || (lost == 0 && counted < failures && !facts.cuts_connections);
                if is_wrong {
                    found.push(format!(
                        "R2: message {id} in group {group} comes as attempt {} after {failures} failures and {lost} lost hosts: {life:?}",
                        told.delivery.attempt
                    ));
                }
                failures += u32::from(told.how.is_failure());
            }
        }
    }
    found
}

fn lost_hosts(facts: &Facts, from: Micros, until: Micros) -> u32 {
    let lost = facts.identities.values().flatten().filter(|identity| (from..=until).contains(&identity.until));
    u32::try_from(lost.count()).unwrap()
}

/// Deliveries of one line of a message between two redrives, which begin anew.
fn lives<'a>(facts: &Facts, age: Age, all: &[&'a Told]) -> Vec<Vec<&'a Told>> {
    let mut lives: Vec<Vec<&Told>> = Vec::new();
    for told in all {
        let again = lives
            .last()
            .and_then(|life| life.last())
            .is_none_or(|before| facts.has_died(age, told.delivery.id, before.delivery.start, told.delivery.start));
        if again {
            lives.push(Vec::new());
        }
        lives.last_mut().expect("just made").push(told);
    }
    lives
}

/// R3, O11. "Backoff is a lower bound"; a delayed message does not come before it is due.
fn r3_backoff_and_delay_are_lower_bounds(facts: &Facts) -> Vec<String> {
    let mut found = Vec::new();
    for told in &facts.deliveries {
        let due = facts.messages.get(&told.delivery.id).and_then(|fact| fact.deliver_after);
        if due.is_some_and(|due| told.delivery.start < due) {
            found.push(format!("O11: message {} came before it was due: {told:?}", told.delivery.id));
        }
    }
    for (((group, _), id, redriven), all) in facts.by_line() {
        for pair in all.windows(2) {
            let wait = pair[1].delivery.start - pair[0].end;
            let least = match pair[0].how {
                End::Retry | End::Trap => facts.groups[group].base,
                End::RetryAfter(delay) | End::Later(delay) => super::trace::micros(delay) / 1000 * 1000,
                _ => 0,
            };
            let is_excused = redriven || facts.is_host_lost(pair[0].delivery.start, pair[1].delivery.start);
            if wait < least && !is_excused {
                found
                    .push(format!("R3: message {id} in group {group} came again after {wait} us of {least}: {pair:?}"));
            }
        }
    }
    found
}

/// D4, D6. "Move and key state change are one transaction: never both places, never neither, never twice"; parked, never
/// deleted. And nobody dies who has not failed: as often as the cap says, or for good, or with its hosts.
fn d4_a_dead_letter_stays_until_somebody_decides(facts: &Facts) -> Vec<String> {
    let mut found = Vec::new();
    let rejected: HashSet<(usize, i64)> = facts
        .deliveries
        .iter()
        .filter(|told| !told.is_void && told.how == End::Reject)
        .map(|told| (told.group, told.delivery.id))
        .collect();
    let mut state: BTreeMap<(usize, i64), &str> = BTreeMap::new();
    for death in facts.deaths.iter().filter(|death| !death.is_kept) {
        let before = state.insert((death.group, death.id), &death.what);
        let group = &facts.groups[death.group];
        if death.is_reopened {
            continue;
        }
        // After a seek its message comes by itself and as what was redriven, and each may die.
        let comes_twice = || {
            facts.sent(death.group, facts.messages.get(&death.id).and_then(|fact| fact.key.as_deref())).next().is_some()
        };
        if death.what == "open" && before == Some("open") && !comes_twice() {
            found.push(format!("D4: message {} died twice in {}", death.id, group.name));
        }
        let attempts = u32::try_from(death.attempts).unwrap();
        let is_early = death.what == "open"
            && attempts < group.max_attempts
            && !matches!(&*death.class, "rejected" | "key_rests" | "skipped");
        if is_early || death.class == "host" && attempts < group.max_attempts {
            found.push(format!(
                "R1: message {} died in {} of {} after {attempts} attempts",
                death.id, group.name, death.class
            ));
        }
        let rejected = || rejected.contains(&(death.group, death.id));
        if death.what == "open" && death.class == "rejected" && !rejected() {
            found.push(format!(
                "D4: message {} died in {} as rejected, and no delivery rejected it",
                death.id, group.name
            ));
        }
        let rests = group.on_dead_letter == OnDeadLetter::Rest
            && facts.messages.get(&death.id).is_some_and(|fact| facts.mode(death.group, fact) != Concurrency::Parallel);
        if death.class == "key_rests" && !rests {
            found.push(format!("D3: message {} died of a resting key in {}", death.id, group.name));
        }
    }
    found
}
