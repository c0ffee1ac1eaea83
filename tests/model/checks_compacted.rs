//! The reference for compacted keys, alone and with a key mode.

use millstream::handler::Concurrency;

use super::facts::{Age, Fact, Facts, Told};

/// C1, C2, C3, Y1, Y3. "Winner = max (rank, position)"; "a produce that loses on rank is never delivered"; with a key mode
/// "delivery starts are monotone in (rank, position)", and without one "the same holds for claims". X2, X4: the last success
/// is the winner's.
pub fn c1_c3_versions_rise_and_the_winner_is_the_highest(facts: &Facts) -> Vec<String> {
    let mut found = Vec::new();
    for (key, versions) in facts.versions() {
        let winner = versions.iter().max_by_key(|fact| (fact.rank, fact.id)).expect("not empty");
        if facts.heads.get(key) != Some(&winner.id) {
            found.push(format!("C1: of key {key:?} {:?} is the head and not {winner:?}", facts.heads.get(key)));
        }
        for group in 0..facts.groups.len() {
            let ages = facts.sent(group, Some(key)).count();
            for age in 0..=ages {
                let told = told_of(facts, (group, age), &versions);
                found.extend(rising(facts, (group, age), key, &told));
                if age == ages {
                    found.extend(ends_with(facts, (group, age), winner, &told));
                }
            }
        }
    }
    found
}

/// Deliveries of the versions of a key in an age of a group, by start.
fn told_of<'a>(facts: &'a Facts, age: Age, versions: &[&'a Fact]) -> Vec<(&'a Fact, &'a Told)> {
    let of_version = |told: &'a Told| {
        let fact = versions.iter().find(|fact| fact.id == told.delivery.id)?;
        ((told.group, told.age) == age && !told.is_void).then_some((*fact, told))
    };
    facts.deliveries.iter().filter_map(of_version).collect()
}

fn rising(facts: &Facts, age @ (group, _): Age, key: &str, told: &[(&Fact, &Told)]) -> Vec<String> {
    let mut found = Vec::new();
    for (fact, told) in told.iter().filter(|(fact, _)| fact.produced.superseded) {
        found.push(format!("C2: {fact:?} had lost when it was produced, and came: {told:?}"));
    }
    let is_serial = |(fact, _): &&(&Fact, &Told)| facts.mode(group, fact) != Concurrency::Parallel;
    let started: Vec<_> = told.iter().filter(is_serial).copied().collect();
    let mut claimed = told.to_vec();
    claimed.sort_by_key(|(fact, told)| (told.claimed, fact.rank, fact.id));
    for (what, line) in [("came", started), ("was taken", claimed)] {
        for pair in line.windows(2).filter(|pair| (pair[0].0.rank, pair[0].0.id) > (pair[1].0.rank, pair[1].0.id)) {
            found.push(format!("C3: of key {key:?} in {age:?} an older version {what} later: {pair:?}"));
        }
    }
    found
}

fn ends_with(facts: &Facts, age @ (group, _): Age, winner: &Fact, told: &[(&Fact, &Told)]) -> Option<String> {
    let is_parallel = told.iter().any(|(fact, _)| facts.mode(group, fact) == Concurrency::Parallel);
    let last = told.iter().rfind(|(_, told)| told.how.is_done());
    let ends_well = facts.deaths_of(age, winner.id).next().is_some()
        || facts.behind.contains(&(group, winner.id))
        || facts.is_passed(age, winner)
        || !facts.sees(group, winner);
    let is_wrong = !ends_well && !is_parallel && last.is_none_or(|(fact, _)| fact.id != winner.id);
    is_wrong.then(|| format!("X4: in {age:?} {last:?} was last and not {winner:?}"))
}

/// C5, X3, Y2. "A superseded message under lease: anything but `done` is a no-op; no attempt, no dead letter". And no key
/// waits for a version that has lost.
pub fn c5_a_superseded_version_leaves_no_trace(facts: &Facts) -> Vec<String> {
    let mut found = Vec::new();
    let deliveries = facts.by_message();
    for versions in facts.versions().values() {
        for fact in versions {
            let newer = |other: &&&Fact| (other.rank, other.id) > (fact.rank, fact.id);
            let lost_at = versions.iter().filter(newer).map(|other| other.produced.confirmed).min();
            let Some(lost_at) = lost_at else { continue };
            let died = |death: &&super::facts::Death| {
                death.id == fact.id && death.what == "open" && !matches!(&*death.class, "key_rests" | "skipped")
            };
            for death in facts.deaths.iter().filter(died).filter(|death| !death.is_kept) {
                let all = deliveries.get(&((death.group, death.age), fact.id)).map_or(&[][..], Vec::as_slice);
                let failed = all.iter().rfind(|told| told.delivery.start <= death.at);
                if death.at > lost_at && failed.is_none_or(|told| told.end > lost_at) {
                    found.push(format!("C5: {fact:?} is a dead letter though it had lost: {death:?}"));
                }
            }
        }
    }
    found
}

/// Y5. "The number of versions skipped is on the delivery": never more than there were; and where no host was lost and nobody
/// interfered, each version that a group passed over is told once, by the next that ends, or is still to be told. One that
/// had begun and then lost may be told or not, with what it had told itself.
pub fn y5_what_was_passed_over_is_told_once(facts: &Facts) -> Vec<String> {
    let mut found = Vec::new();
    for (key, versions) in facts.versions() {
        for told in facts.deliveries.iter().filter(|told| told.delivery.key.as_deref() == Some(key)) {
            if told.delivery.skipped as usize >= versions.len() * (told.age + 1) {
                found.push(format!("Y5: of {} versions of key {key:?} {told:?} skipped more", versions.len()));
            }
        }
        let groups = 0..facts.groups.len();
        found.extend(groups.filter(|_| facts.is_calm).filter_map(|group| all_are_told(facts, group, key, &versions)));
    }
    found
}

fn all_are_told(facts: &Facts, group: usize, key: &str, versions: &[&Fact]) -> Option<String> {
    let name = &facts.groups[group].name;
    let is_touched = facts.sent(group, Some(key)).next().is_some()
        || facts.verbs.iter().any(|verb| verb.group == *name && verb.key.as_deref() == Some(key))
        || facts.deaths.iter().any(|death| death.group == group && versions.iter().any(|fact| fact.id == death.id));
    if is_touched || versions.iter().any(|fact| facts.behind.contains(&(group, fact.id))) {
        return None;
    }
    let told = told_of(facts, (group, 0), versions);
    let (mut passed, mut begun, mut counted) = (0, 0, 0);
    for fact in versions.iter().filter(|fact| facts.sees(group, fact)) {
        let Some((_, last)) = told.iter().rfind(|(other, _)| other.id == fact.id) else {
            passed += 1;
            continue;
        };
        if last.how.is_done() {
            counted += i64::from(last.delivery.skipped);
        } else {
            begun += 1 + i64::from(last.delivery.skipped);
        }
    }
    counted += facts.skipped.get(&(group, key.to_owned())).copied().unwrap_or(0);
    let is_right = (passed - begun..=passed + begun).contains(&counted);
    let wrong = || {
        format!(
            "Y5: of key {key:?} in {name} {passed} were passed over and {counted} told, {begun} had begun: {told:?}"
        )
    };
    (!is_right).then(wrong)
}
