//! The reference for compacted keys, alone and with a key mode.

use millstream::handler::Concurrency;

use super::facts::Facts;

/// C1, C2, C3, Y1, Y3. "Winner = max (rank, position)"; "a produce that loses on rank is never delivered"; with a key mode
/// "delivery starts are monotone in (rank, position)". X2, X4: the last success is the winner's.
pub fn c1_c3_versions_rise_and_the_winner_is_the_highest(facts: &Facts) -> Vec<String> {
    let mut found = Vec::new();
    let deliveries = facts.by_message();
    for (key, versions) in facts.versions() {
        let winner = versions.iter().max_by_key(|fact| (fact.rank, fact.id)).expect("not empty");
        if facts.heads.get(key) != Some(&winner.id) {
            found.push(format!("C1: of key {key:?} {:?} is the head and not {winner:?}", facts.heads.get(key)));
        }
        for group in 0..facts.groups.len() {
            let seen: Vec<_> = versions.iter().filter(|fact| facts.sees(group, fact)).collect();
            let mut told: Vec<_> = seen
                .iter()
                .flat_map(|fact| {
                    deliveries.get(&(group, fact.id)).into_iter().flatten().map(move |told| (**fact, *told))
                })
                .collect();
            told.sort_by_key(|(_, told)| (told.delivery.start, told.delivery.number));
            for (fact, told) in told.iter().filter(|(fact, _)| fact.produced.superseded) {
                found.push(format!("C2: {fact:?} had lost when it was produced, and came: {told:?}"));
            }
            let serial: Vec<_> =
                told.iter().filter(|(fact, _)| facts.mode(group, fact) != Concurrency::Parallel).collect();
            for pair in serial.windows(2).filter(|pair| (pair[0].0.rank, pair[0].0.id) > (pair[1].0.rank, pair[1].0.id))
            {
                found.push(format!("C3: of key {key:?} in group {group} an older version came later: {pair:?}"));
            }
            let last = serial.iter().rfind(|(_, told)| told.how.is_done());
            let is_parallel = serial.len() != told.len();
            let is_dead = facts.deaths_of(group, winner.id).any(|_| true);
            let ends_well = is_dead || facts.behind.contains(&(group, winner.id)) || !facts.sees(group, winner);
            if !ends_well && !is_parallel && last.is_none_or(|(fact, _)| fact.id != winner.id) {
                found.push(format!("X4: of key {key:?} in group {group} {last:?} was last and not {winner:?}"));
            }
        }
    }
    found
}

/// C5, X3, Y2. "A superseded message under lease: anything but `done` is a no-op; no attempt, no dead letter". And no key
/// waits for a version that has lost. Y5: a delivery tells of no more versions than there were.
pub fn c5_y5_a_superseded_version_leaves_no_trace(facts: &Facts) -> Vec<String> {
    let mut found = Vec::new();
    let deliveries = facts.by_message();
    for (key, versions) in facts.versions() {
        for fact in &versions {
            let newer = |other: &&&super::facts::Fact| (other.rank, other.id) > (fact.rank, fact.id);
            let lost_at = versions.iter().filter(newer).map(|other| other.produced.confirmed).min();
            let Some(lost_at) = lost_at else { continue };
            for group in 0..facts.groups.len() {
                let all = deliveries.get(&(group, fact.id)).map_or(&[][..], Vec::as_slice);
                for death in
                    facts.deaths_of(group, fact.id).filter(|death| death.what == "open" && death.class != "key_rests")
                {
                    let failed = all.iter().rfind(|told| told.delivery.start <= death.at);
                    if death.at > lost_at && failed.is_none_or(|told| told.end > lost_at) {
                        found.push(format!(
                            "C5: {fact:?} is a dead letter of group {group} though it had lost: {death:?}"
                        ));
                    }
                }
            }
        }
        for told in facts.deliveries.iter().filter(|told| told.delivery.key.as_deref() == Some(key)) {
            if told.delivery.skipped as usize >= versions.len().max(1) {
                found.push(format!("Y5: of {} versions of key {key:?} {told:?} skipped more", versions.len()));
            }
        }
    }
    found
}
