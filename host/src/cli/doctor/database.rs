//! What the database says: its tables, what is declared, the hosts and their handlers.

use std::time::Duration;

use anyhow::Result;

use super::{
    super::{groups::short, human, status::not_in_file},
    Finding,
};
use crate::{
    config::Config,
    database::{Database, pending, rights, told},
    engine::{self, HostState, State},
};

/// More growths of memory than one in so many deliveries are worth a word: each costs more than the delivery.
const DELIVERIES_PER_GROWTH: u64 = 100;

pub(super) async fn look(database: &Database, config: &Config) -> Vec<Finding> {
    let mut findings = vec![Finding::ok("database", database.to_string())];
    match find(database, config).await {
        Ok(found) => findings.extend(found),
        Err(error) => {
            findings.push(Finding::missing("tables", told(error.as_ref()), "mend what this says, then look again"))
        }
    }
    findings
}

async fn find(database: &Database, config: &Config) -> Result<Vec<Finding>> {
    let rights = rights(database).await?;
    let mut findings: Vec<Finding> = rights.is_namesake.then(namesake).into_iter().collect();
    let missing = pending(database).await?;
    if missing > 0 && !rights.may_create {
        let found = format!("this user may not make them in schema {}", database.schema.quoted());
        let mend = "as a superuser `grant create on database ... to ...`, or make the schema and give it to the user";
        findings.push(Finding::missing("tables", found, mend));
        return Ok(findings);
    }
    if missing > 0 {
        let found = format!("{} to apply", human::counted(missing as u64, "migration"));
        findings.push(Finding::note("tables", found, "`millstream apply`; `millstream up` does it as well"));
        return Ok(findings);
    }
    findings.push(Finding::ok("tables", "current"));
    let changes = engine::plan(Some(database), config).await?;
    let state = engine::inspect(database).await?;
    findings.push(declared(changes.len(), &not_in_file(config, &state)));
    findings.push(hosts(&state, config.host.heartbeat));
    findings.extend(state.hosts.iter().flat_map(growing_handlers));
    findings.extend(state.hosts.iter().flat_map(refused_handlers));
    Ok(findings)
}

/// Its own programs would mix their tables with ours without a word.
fn namesake() -> Finding {
    Finding::note(
        "role",
        "it is called like the schema, which its search_path (\"$user\", public) then finds first: a table that it creates without a schema's name lands among Millstream's",
        "connect as a role of another name, or `alter role ... set search_path = public`",
    )
}

/// Leases are judged by the database's clock, so no clock of a host is compared.
/// `differences` is how many points of streams.toml are not applied, `more` what is declared besides.
fn declared(differences: usize, more: &[String]) -> Finding {
    if differences > 0 {
        let points = human::counted(differences as u64, "point");
        let found = format!("streams.toml differs from what is applied in {points}");
        return Finding::note("declared", found, "`millstream plan` tells them, `millstream apply` applies them");
    }
    if !more.is_empty() {
        let found = format!("what streams.toml says, and besides: {}", more.join(", "));
        let mend = "`millstream forget GROUP` removes a group, whose messages are kept for it until then";
        return Finding::note("declared", found, mend);
    }
    Finding::ok("declared", "what streams.toml says")
}

fn hosts(state: &State, heartbeat: Duration) -> Finding {
    let milliseconds = |ms: i64| human::duration(Duration::from_millis(ms.unsigned_abs()));
    let late_ms = i64::try_from(heartbeat.as_millis()).unwrap_or(i64::MAX).saturating_mul(2);
    if let Some(late) = state.hosts.iter().find(|host| host.heartbeat_age_ms > late_ms) {
        let found = format!("{} gave its last heartbeat {} ago", late.host, milliseconds(late.heartbeat_age_ms));
        return match late.lease_left_ms {
            ..=0 => {
                Finding::note("hosts", found, "its work is taken over by another host: start one with `millstream up`")
            }
            _ => Finding::note("hosts", found, "look at its log: it may be frozen, or the database may be slow for it"),
        };
    }
    match state.hosts.len() {
        0 => Finding::ok("hosts", "none runs; `millstream up` starts one"),
        count => Finding::ok("hosts", format!("{count} running, heartbeats on time")),
    }
}

fn growing_handlers(host: &HostState) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (group, counters) in host.counters["groups"].as_object().into_iter().flatten() {
        let number = |name: &str| counters[name].as_u64().unwrap_or_default();
        let (growths, delivered) = (number("memory_growths"), number("delivered"));
        if growths * DELIVERIES_PER_GROWTH > delivered {
            findings.push(Finding::note(
                "memory",
                format!("the handler of {group} grew its memory {growths} times in {delivered} deliveries, which makes it slow"),
                "build it with the allocator of millstream-guest, or give it a larger initial memory",
            ));
        }
    }
    findings
}

/// Without the error: the finding about the file of this project says it, and `status` says it for every host.
fn refused_handlers(host: &HostState) -> Vec<Finding> {
    let refused = host.handlers.iter().filter(|(_, handler)| handler["last_error"].is_string());
    refused
        .map(|(group, handler)| {
            let serves = match handler["digest"].as_str() {
                Some(digest) => format!("an older one ({}) does", short(digest)),
                None => "nothing does".to_owned(),
            };
            let found = format!("on {} the newest handler of {group} does not serve, {serves}", host.host);
            Finding::note(
                "handlers",
                found,
                "`millstream status` says why; put a good file there, no restart is needed",
            )
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::{super::State as Judged, *};

    fn host(heartbeat_age_ms: i64, lease_left_ms: i64) -> HostState {
        let counters = serde_json::json!({"groups": {
            "steady": {"delivered": 1000, "memory_growths": 1}, "growing": {"delivered": 1000, "memory_growths": 11},
        }});
        HostState {
            id: 1,
            host: "h".to_owned(),
            version: String::new(),
            started_at: String::new(),
            heartbeat_age_ms,
            lease_left_ms,
            sandbox: None,
            handlers: std::collections::BTreeMap::new(),
            counters,
        }
    }

    #[test]
    fn what_is_declared_and_not_in_the_file_is_noted() {
        let more = ["group old".to_owned()];
        let told = |differences, more| {
            let finding = declared(differences, more);
            (finding.state, finding.found)
        };
        assert_eq!(told(0, &[]), (Judged::Ok, "what streams.toml says".to_owned()));
        assert_eq!(told(0, &more), (Judged::Note, "what streams.toml says, and besides: group old".to_owned()));
        assert_eq!(told(1, &more).0, Judged::Note);
    }

    #[test]
    fn a_late_heartbeat_is_noted() {
        let judge = |hosts| {
            let state = State { groups: Vec::new(), streams: Vec::new(), hosts };
            super::hosts(&state, Duration::from_secs(3)).state
        };
        assert_eq!(judge(Vec::new()), Judged::Ok);
        assert_eq!(judge(vec![host(3100, 6900)]), Judged::Ok);
        assert_eq!(judge(vec![host(3100, 6900), host(6100, 3900)]), Judged::Note);
        assert_eq!(judge(vec![host(20_000, -10_000)]), Judged::Note);
    }

    #[test]
    fn a_handler_that_grows_its_memory_is_named() {
        let findings = growing_handlers(&host(0, 10_000));
        assert!(findings.len() == 1 && findings[0].found.contains("growing grew its memory 11 times"), "{findings:?}");
    }
}
