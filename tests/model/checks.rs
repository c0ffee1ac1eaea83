//! The reference: each invariant of the semantics as a question to a trace. What holds for every message is here; what
//! holds for keys is in the files beside.

use std::collections::{BTreeMap, HashMap, HashSet};

use millstream::{config::OnDeadLetter, handler::Concurrency};

use super::{
    checks_compacted, checks_keyed,
    facts::{Facts, Told},
    trace::{End, Micros},
};

/// Of each check, at most so many violations are told.
const TOLD_MAX: usize = 4;

/// Everything that is violated.
pub fn all(facts: &Facts) -> Vec<String> {
    let checks: [fn(&Facts) -> Vec<String>; 20] = [
        t1_t2_what_committed_is_there_and_nothing_else,
        l2_a_message_is_delivered_as_it_was_produced,
        o10_what_the_filter_rejects_is_not_delivered,
        n1_counts_balance,
        e2_what_is_done_is_done_once,
        t5_effects_exist_once,
        r1_attempts_are_bounded,
        r2_only_failures_and_lost_hosts_count,
        r3_backoff_and_delay_are_lower_bounds,
        d4_a_dead_letter_stays_until_somebody_decides,
        checks_keyed::e1_one_at_a_time,
        checks_keyed::e3_an_exclusive_key_begins_with_its_oldest,
        checks_keyed::o1_the_next_starts_after_the_one_before_has_ended,
        checks_keyed::o4_order_is_commit_order,
        checks_keyed::o9_the_last_deliveries_of_a_key_are_in_order,
        checks_keyed::d2_later_deliveries_tell_of_the_gap,
        checks_keyed::d3_nothing_of_a_resting_key_is_delivered,
        checks_keyed::d5_dead_letters_of_a_resting_key_are_in_order,
        checks_compacted::c1_c3_versions_rise_and_the_winner_is_the_highest,
        checks_compacted::c5_y5_a_superseded_version_leaves_no_trace,
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

/// N1, C5, D6, D8. "Counts balance": whatever a group sees is done, superseded, dead, or behind a key that waits for an
/// operator; nothing is lost, in any group.
fn n1_counts_balance(facts: &Facts) -> Vec<String> {
    let deliveries = facts.by_message();
    let dead: HashSet<(usize, i64)> = facts.deaths.iter().map(|death| (death.group, death.id)).collect();
    let mut found = Vec::new();
    for group in 0..facts.groups.len() {
        for fact in facts.seen(group) {
            let place = (group, fact.id);
            let is_done = deliveries.get(&place).is_some_and(|all| all.iter().any(|told| told.how.is_done()));
            let is_superseded = fact.rank.is_some() && facts.heads.get(fact.key.as_deref().unwrap()) != Some(&fact.id);
            if !is_done && !is_superseded && !dead.contains(&place) && !facts.behind.contains(&place) {
                let name = &facts.groups[group].name;
                let void =
                    facts.deliveries.iter().filter(|told| (told.group, told.delivery.id) == place && told.is_void);
                let void: Vec<_> = void.collect();
                let told = deliveries.get(&place);
                found.push(format!("N1: message {} is lost in {name}: {told:?}, void {void:?}, {fact:?}", fact.id));
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
    for ((_, id), all) in facts.by_message() {
        for pair in all.windows(2) {
            let (before, after) = (pair[0], pair[1]);
            if before.how.is_done() && before.lease_end > after.delivery.start {
                found.push(format!("E2: message {id} came again though it was done: {before:?}, then {after:?}"));
            }
        }
    }
    found
}

/// T5, E2. Effects and acknowledgement are one commit: a fenced delivery leaves no receipt, and one that counts leaves one.
fn t5_effects_exist_once(facts: &Facts) -> Vec<String> {
    let mut found = Vec::new();
    let mut counts: HashMap<&str, u32> = HashMap::new();
    for receipt in &facts.receipts {
        *counts.entry(receipt).or_default() += 1;
    }
    found.extend(
        counts.iter().filter(|(_, count)| **count > 1).map(|(name, count)| format!("T5: {count} receipts of {name}")),
    );
    for ((group, id), all) in facts.by_message() {
        let name = format!("{} {id}", facts.groups[group].name);
        let has_receipt = counts.contains_key(name.as_str());
        let (effects, plain) = all.iter().fold((0, 0), |(effects, plain), told| match told.how {
            End::Effects => (effects + 1, plain),
            End::Done => (effects, plain + 1),
            _ => (effects, plain),
        });
        if effects > 0
            && plain == 0
            && !has_receipt
            && !facts.deaths_of(group, id).any(|_| true)
            && !facts.behind.contains(&(group, id))
        {
            // A compacted one whose settle was fenced may have been superseded since.
            if facts.messages.get(&id).is_none_or(|fact| fact.rank.is_none()) {
                found.push(format!("T5: message {name} was done and has no receipt: {all:?}"));
            }
        }
        if has_receipt
            && !facts
                .deliveries
                .iter()
                .any(|told| told.group == group && told.delivery.id == id && told.how == End::Effects)
        {
            found.push(format!("T5: a receipt of {name}, which was never done with effects in time"));
        }
    }
    found
}

/// R1, R5. "Never more than N counted failures"; "attempts belong to the message, a new head starts at 1".
fn r1_attempts_are_bounded(facts: &Facts) -> Vec<String> {
    let mut found = Vec::new();
    for ((group, id), all) in facts.by_message() {
        let most = facts.groups[group].max_attempts;
        for life in lives(&all) {
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
    for ((group, id), all) in facts.by_message() {
        let Some(fact) = facts.messages.get(&id) else { continue };
        for life in lives(&all) {
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

/// Deliveries of a message between two redrives, which begin anew.
fn lives<'a>(all: &[&'a Told]) -> Vec<Vec<&'a Told>> {
    let mut lives: Vec<Vec<&Told>> = Vec::new();
    for told in all {
        let again = lives.last().and_then(|life| life.last()).is_none_or(|before| {
            told.delivery.redriven
                && told.delivery.attempt == 1
                && (!before.delivery.redriven || before.how.is_failure())
        });
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
    for ((group, id), all) in facts.by_message() {
        for pair in all.windows(2) {
            let wait = pair[1].delivery.start - pair[0].end;
            let least = match pair[0].how {
                End::Retry | End::Trap => facts.groups[group].base,
                End::RetryAfter(delay) | End::Later(delay) => super::trace::micros(delay) / 1000 * 1000,
                _ => 0,
            };
            let is_excused =
                pair[1].delivery.redriven || facts.is_host_lost(pair[0].delivery.start, pair[1].delivery.start);
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
    let deliveries = facts.by_message();
    let mut state: BTreeMap<(usize, i64), &str> = BTreeMap::new();
    for death in &facts.deaths {
        let before = state.insert((death.group, death.id), &death.what);
        let group = &facts.groups[death.group];
        if death.what == "open" && before == Some("open") {
            found.push(format!("D4: message {} died twice in {}", death.id, group.name));
        }
        let attempts = u32::try_from(death.attempts).unwrap();
        let is_early =
            death.what == "open" && attempts < group.max_attempts && !matches!(&*death.class, "rejected" | "key_rests");
        if is_early || death.class == "host" && attempts < group.max_attempts {
            found.push(format!(
                "R1: message {} died in {} of {} after {attempts} attempts",
                death.id, group.name, death.class
            ));
        }
        let rejected = || {
            deliveries.get(&(death.group, death.id)).is_some_and(|all| all.iter().any(|told| told.how == End::Reject))
        };
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
