//! The reference for exclusive and ordered keys, and for what a dead letter does to an ordered one.

use std::collections::{BTreeMap, HashMap};

use millstream::{config::OnDeadLetter, handler::Concurrency};

use super::{
    facts::{Age, Death, Fact, Facts, Told},
    trace::{Micros, What},
};

/// E1, E9, O2, O12, Y1. "At any instant at most one live lease per (group, key)", by overlap on one clock, through expiry,
/// crash, seek and change of hosts. What a host does after its lease has ended is not live.
pub fn e1_one_at_a_time(facts: &Facts) -> Vec<String> {
    let mut found = Vec::new();
    let mut last: HashMap<(usize, &str, i16), &Told> = HashMap::new();
    for next in facts.deliveries.iter().filter(|told| !told.is_void) {
        let Some(fact) = facts.messages.get(&next.delivery.id) else { continue };
        if facts.mode(next.group, fact) == Concurrency::Parallel {
            continue;
        }
        let line = (next.group, fact.key.as_deref().expect("a mode needs a key"), fact.lane);
        let before = last.get(&line).copied();
        if let Some(before) = before.filter(|before| next.delivery.start < before.end) {
            found.push(format!("E1: two of {line:?} at once: {before:?} and {next:?}"));
        }
        if before.is_none_or(|before| next.end > before.end) {
            last.insert(line, next);
        }
    }
    found
}

type ByMessage<'a> = BTreeMap<(Age, i64), Vec<&'a Told>>;

fn of<'a, 'b>(deliveries: &'b ByMessage<'a>, age: Age, fact: &Fact) -> impl Iterator<Item = &'a Told> + use<'a, 'b> {
    deliveries.get(&(age, fact.id)).into_iter().flatten().copied()
}

/// E3. "Exclusive: ... oldest first": where one was confirmed before the other's transaction began, and none is delayed or
/// compacted, its first delivery comes first.
pub fn e3_an_exclusive_key_begins_with_its_oldest(facts: &Facts) -> Vec<String> {
    let mut found = Vec::new();
    let deliveries = facts.by_message();
    for ((age @ (group, _), key, _), line) in facts.lines() {
        let first = |fact: &&Fact| {
            let is_plain = fact.deliver_after.is_none() && fact.rank.is_none() && !facts.is_passed(age, fact);
            // A dead letter whose message is to come again may be redriven before it does.
            let is_early = |told: &&Told| age.1 > 0 && told.delivery.redriven;
            of(&deliveries, age, fact).next().filter(|told| is_plain && !is_early(told))
        };
        let mut firsts: Vec<(&Fact, &Told)> = line.iter().filter_map(|fact| Some((*fact, first(fact)?))).collect();
        firsts.sort_by_key(|(_, told)| (told.delivery.start, told.delivery.number));
        // Of all that were begun later, none was confirmed before this one's transaction began.
        let mut earliest = Micros::MAX;
        for (fact, told) in firsts.iter().rev() {
            if earliest < fact.produced.began {
                found.push(format!("E3: key {key:?} in group {group} began {} before an older one: {told:?}", fact.id));
            }
            earliest = earliest.min(fact.produced.confirmed);
        }
    }
    found
}

/// O1, O2, O3, O7, O11, Y2. "Delivery of n+1 starts only after n is terminal", across failures, crashes and delays: each
/// earlier one of the key was done, or is dead and the policy lets the key go on, or has lost to a newer version.
pub fn o1_the_next_starts_after_the_one_before_has_ended(facts: &Facts) -> Vec<String> {
    let mut found = Vec::new();
    let deliveries = facts.by_message();
    let versions = facts.versions();
    for ((age @ (group, _), key, _), line) in facts.lines() {
        let ordered: Vec<&Fact> =
            line.into_iter().filter(|fact| facts.mode(group, fact) == Concurrency::Ordered).collect();
        for (place, later) in ordered.iter().enumerate() {
            for told in of(&deliveries, age, later) {
                let start = told.delivery.start;
                let waits = |fact: &&&Fact| {
                    !facts.is_passed(age, fact)
                        && !is_terminal(facts, &deliveries, age, fact, start)
                        && !is_lost(&versions, fact, start)
                };
                // From the nearest: what is far behind was looked at with those in between.
                if let Some(open) = ordered[..place].iter().rev().take(200).find(waits) {
                    let before: Vec<_> = of(&deliveries, age, open).collect();
                    found.push(format!(
                        "O1: of key {key:?} in group {group} {told:?} started before {} had ended: {before:?}",
                        open.id
                    ));
                }
            }
        }
    }
    found
}

/// Whether a message had ended for its group at a time, as its last delivery until then tells, or its dead letter.
fn is_terminal(facts: &Facts, deliveries: &ByMessage<'_>, age: Age, fact: &Fact, at: Micros) -> bool {
    let last = of(deliveries, age, fact).filter(|told| told.delivery.start < at).last();
    if last.is_some_and(|last| last.how.is_done() && last.end <= at) {
        return true;
    }
    let since = last.map_or(Micros::MIN, |last| last.delivery.start);
    let Some(death) = facts.deaths_of(age, fact.id).filter(|death| death.at <= at).last() else { return false };
    let goes_on =
        || facts.groups[age.0].on_dead_letter == OnDeadLetter::Skip || facts.is_let_go(age.0, fact, death.at, at);
    death.at >= since && (death.what == "gone" || death.what == "open" && goes_on())
}

/// Whether a newer version of its key may have been committed by a time.
fn is_lost(versions: &std::collections::HashMap<&str, Vec<&Fact>>, fact: &Fact, at: Micros) -> bool {
    let Some(rank) = fact.rank else { return false };
    let newer = |other: &&Fact| (other.rank.unwrap(), other.id) > (rank, fact.id) && other.produced.began <= at;
    versions[fact.key.as_deref().unwrap()].iter().any(newer)
}

/// O4. "If produce A was confirmed before produce B began, A precedes B."
pub fn o4_order_is_commit_order(facts: &Facts) -> Vec<String> {
    let mut found = Vec::new();
    for ((_, key, _), line) in facts.lines() {
        let mut earliest = (Micros::MAX, 0);
        for fact in line.iter().rev() {
            if earliest.0 < fact.produced.began {
                found.push(format!(
                    "O4: of key {key:?} message {} stands before {}, which was confirmed first",
                    fact.id, earliest.1
                ));
            }
            earliest = earliest.min((fact.produced.confirmed, fact.id));
        }
    }
    found
}

/// O1, O7, O9. "Settles of the key commit in order, and if n's is refused the later ones are cut and not settled": whatever
/// came again, the last deliveries that were done are in order. A redriven one under `skip` is not in it; and what died
/// after it was done, or still waits, was not settled: its host was lost.
pub fn o9_the_last_deliveries_of_a_key_are_in_order(facts: &Facts) -> Vec<String> {
    let mut found = Vec::new();
    let deliveries = facts.by_message();
    for ((age @ (group, _), key, _), line) in facts.lines() {
        let mut before: Option<&Told> = None;
        for fact in line.iter().filter(|fact| facts.mode(group, fact) == Concurrency::Ordered) {
            let Some(last) = of(&deliveries, age, fact).filter(|told| told.how.is_done()).last() else { continue };
            let went_on = || {
                facts.groups[group].on_dead_letter == OnDeadLetter::Skip
                    || facts.is_let_go(group, fact, Micros::MIN, last.delivery.start)
            };
            let was_lost = facts.behind.contains(&(group, fact.id))
                || facts.deaths_of(age, fact.id).any(|death| death.what == "open" && death.at > last.delivery.start);
            if was_lost || facts.is_passed(age, fact) || last.delivery.redriven && went_on() {
                continue;
            }
            if let Some(before) = before
                && last.delivery.start < before.end
            {
                let all: Vec<_> = of(&deliveries, age, fact).collect();
                let before_all: Vec<_> = of(&deliveries, age, &facts.messages[&before.delivery.id]).collect();
                let deaths: Vec<_> =
                    facts.deaths.iter().filter(|death| death.group == group && death.id == fact.id).collect();
                let verbs: Vec<_> = facts.verbs.iter().filter(|verb| verb.key.as_deref() == Some(key)).collect();
                found.push(format!(
                    "O9: of key {key:?} in group {group}, {last:?} was done before {before:?}; all: {all:?}; {before_all:?}; {deaths:?}; {verbs:?}"
                ));
            }
            before = Some(last);
        }
    }
    found
}

/// D2, D7. "`skip`: n moves, n+1 goes out at once and every later delivery of the key carries `gap_since=n` until n is
/// redriven or dismissed": the first of them that is open, as it was when the delivery was taken or since. Under the other
/// policies nothing tells of a gap.
pub fn d2_later_deliveries_tell_of_the_gap(facts: &Facts) -> Vec<String> {
    let mut found = Vec::new();
    let deliveries = facts.by_message();
    for ((age @ (group, _), key, _), line) in facts.lines() {
        let skips = facts.groups[group].on_dead_letter == OnDeadLetter::Skip;
        let ordered: Vec<&Fact> =
            line.into_iter().filter(|fact| facts.mode(group, fact) == Concurrency::Ordered).collect();
        let died: Vec<(i64, Vec<&Death>)> = ordered
            .iter()
            .map(|fact| (fact.id, facts.deaths_of(age, fact.id).collect::<Vec<_>>()))
            .filter(|(_, deaths)| !deaths.is_empty())
            .collect();
        for told in ordered.iter().flat_map(|fact| of(&deliveries, age, fact)) {
            let (from, until) = (told.claimed, told.delivery.start);
            let before = |id: i64| died.iter().filter(move |(other, _)| *other < id);
            // The state at a time is that of the last change.
            let was_open = |deaths: &[&Death], at: Micros| {
                deaths.iter().rfind(|death| death.at <= at).is_some_and(|death| death.what == "open")
            };
            let is_open_at_all = |deaths: &[&Death]| {
                was_open(deaths, from)
                    || deaths.iter().any(|death| (from..=until).contains(&death.at) && death.what == "open")
            };
            let stays_open = |deaths: &[&Death]| {
                was_open(deaths, from) && !deaths.iter().any(|death| (from..=until).contains(&death.at))
            };
            let open = before(told.delivery.id).find(|(_, deaths)| was_open(deaths, until)).map(|(id, _)| *id);
            let is_told = match told.delivery.gap_since {
                None => open.is_none(),
                Some(since) => {
                    before(told.delivery.id).any(|(id, deaths)| *id == since && is_open_at_all(deaths))
                        && !before(since).any(|(_, deaths)| stays_open(deaths))
                }
            };
            if skips && !is_told || !skips && told.delivery.gap_since.is_some() {
                found.push(format!(
                    "D2: of key {key:?} in group {group} {told:?} tells of another gap than {open:?}, of {died:?}"
                ));
            }
        }
    }
    found
}

/// D3. "`rest`: nothing of the key is delivered meanwhile", from when an ordered message of it is a dead letter until an
/// operator releases the key.
pub fn d3_nothing_of_a_resting_key_is_delivered(facts: &Facts) -> Vec<String> {
    let mut found = Vec::new();
    let deliveries = facts.by_message();
    for ((age @ (group, _), key, _), line) in facts.lines() {
        if facts.groups[group].on_dead_letter != OnDeadLetter::Rest {
            continue;
        }
        let ordered = line.iter().filter(|fact| facts.mode(group, fact) == Concurrency::Ordered);
        let stops = |death: &&Death| death.what == "open" && death.class != "skipped" && !death.is_kept;
        let stops: Vec<(&Fact, &Death)> =
            ordered.flat_map(|fact| facts.deaths_of(age, fact.id).filter(stops).map(|death| (*fact, death))).collect();
        for told in line.iter().flat_map(|fact| of(&deliveries, age, fact)) {
            let start = told.delivery.start;
            let rests =
                |(fact, death): &&(&Fact, &Death)| death.at < start && !facts.is_let_go(group, fact, death.at, start);
            if let Some((_, death)) = stops.iter().find(rests) {
                found
                    .push(format!("D3: of key {key:?} in group {group} {told:?} though the key rests since {death:?}"));
            }
        }
    }
    found
}

/// D5. "The dead-letter store keeps per-key order."
pub fn d5_dead_letters_of_a_resting_key_are_in_order(facts: &Facts) -> Vec<String> {
    let mut found = Vec::new();
    for ((age @ (group, _), key, _), line) in facts.lines() {
        if facts.groups[group].on_dead_letter != OnDeadLetter::Rest {
            continue;
        }
        let ordered = line.iter().filter(|fact| facts.mode(group, fact) == Concurrency::Ordered && fact.rank.is_none());
        // What was dead before the age began, or does not come in it, dies when an operator redrives it, whenever that is.
        let ordered = ordered.filter(|fact| !facts.is_passed(age, fact));
        // A letter of an earlier age may be redriven, discarded or settled in this one: that is none either.
        let is_death = |death: &&Death| death.what == "open" && !death.is_kept && !death.is_reopened;
        let first = |fact: &&Fact| facts.deaths_of(age, fact.id).next().filter(is_death);
        let mut firsts = ordered.filter_map(|fact| Some((first(fact)?.at, fact.id)));
        let mut before = firsts.next();
        for first in firsts {
            if before.is_some_and(|before| first.0 < before.0) {
                let both = [before.map(|before| before.1), Some(first.1)];
                let story: Vec<_> = facts
                    .deaths
                    .iter()
                    .filter(|death| death.group == group && both.contains(&Some(death.id)))
                    .collect();
                let sent: Vec<_> = facts.sent(group, Some(key)).collect();
                found.push(format!(
                    "D5: of key {key:?} in group {group} message {} died before {before:?}: {story:?}; sent {sent:?}",
                    first.1
                ));
            }
            before = Some(first);
        }
    }
    found
}

/// A key that stands still, or a group: nothing of it is taken meanwhile, whatever restarts; of a key what has a mode.
pub fn w_what_is_paused_stands_still(facts: &Facts) -> Vec<String> {
    let mut found = Vec::new();
    for verb in facts.verbs.iter().filter(|verb| verb.what == What::Paused) {
        for claim in facts.claims.iter().filter(|claim| facts.groups[claim.group].name == verb.group) {
            // A turn that began before may still take from a group, but it never meets the pausing of a key.
            let is_meanwhile = match verb.key {
                None => claim.began > verb.began && claim.at < verb.ended,
                Some(_) => claim.at > verb.began && claim.at < verb.ended,
            };
            let concerns = |fact: &Fact| {
                verb.key.is_none() || fact.key == verb.key && facts.mode(claim.group, fact) != Concurrency::Parallel
            };
            if is_meanwhile && facts.messages.range(claim.first..=claim.last).any(|(_, fact)| concerns(fact)) {
                found.push(format!("W: {claim:?} during {verb:?}"));
            }
        }
    }
    found
}
