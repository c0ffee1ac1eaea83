//! `millstream doctor`: names what is missing and the command that mends it. Starts nothing and changes nothing.

mod database;

mod handlers;

mod machine;

use anyhow::Result;
use serde::Serialize;

use super::{Global, Told, human, open::reach, output::visible};
use crate::database::told;

/// One thing that was looked at. The field names are a contract.
#[derive(Debug, Serialize)]
struct Finding {
    check: &'static str,
    state: State,
    found: String,
    /// What to do about it.
    #[serde(skip_serializing_if = "Option::is_none")]
    mend: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum State {
    Ok,
    /// It works, and could be better, or is needed by some only.
    Note,
    /// Not there, and `millstream up` does not do its work without it.
    Missing,
    /// There, and no good.
    Broken,
}

/// The answer. Its field names are a contract.
#[derive(Serialize)]
struct Answer {
    healthy: bool,
    findings: Vec<Finding>,
}

impl Finding {
    fn ok(check: &'static str, found: impl Into<String>) -> Self {
        Self { check, state: State::Ok, found: found.into(), mend: None }
    }

    fn note(check: &'static str, found: impl Into<String>, mend: impl Into<String>) -> Self {
        Self { check, state: State::Note, found: found.into(), mend: Some(mend.into()) }
    }

    fn missing(check: &'static str, found: impl Into<String>, mend: impl Into<String>) -> Self {
        Self { check, state: State::Missing, found: found.into(), mend: Some(mend.into()) }
    }

    fn broken(check: &'static str, found: impl Into<String>, mend: impl Into<String>) -> Self {
        Self { check, state: State::Broken, found: found.into(), mend: Some(mend.into()) }
    }
}

pub(super) async fn run(global: &Global) -> Result<()> {
    let mut findings = Vec::new();
    match global.load_config() {
        Err(errors) => {
            let first = errors.errors.first().map(ToString::to_string).unwrap_or_default();
            let count = human::counted(errors.errors.len() as u64, "mistake");
            let found = format!("{count}, the first: {}", first.replace('\n', ";"));
            findings.push(Finding::broken("streams.toml", found, "`millstream check` tells them all"));
            findings.push(machine::postgres_programs());
        }
        Ok(config) => {
            let (streams, groups) = (config.streams.len() as u64, config.groups.len() as u64);
            let found = format!("{}, {}", human::counted(streams, "stream"), human::counted(groups, "group"));
            findings.push(Finding::ok("streams.toml", found));
            match reach(global, &config.database).await {
                Ok(None) => {
                    findings.push(machine::postgres_programs());
                    findings.push(Finding::ok("database", "its own, not running now; `millstream up` starts it"));
                }
                Ok(Some(database)) => {
                    findings.extend(database::look(&database, &config).await);
                    database.close().await;
                }
                Err(error) => {
                    let mend = "start that server, or name another with --database-url, DATABASE_URL or database.url";
                    findings.push(Finding::missing("database", told(error.as_ref()), mend));
                }
            }
            findings.extend(handlers::look(global, &config).await);
        }
    }
    findings.push(machine::wasm_toolchain());
    findings.extend(machine::inotify());
    findings.push(machine::disk(global));
    let healthy = findings.iter().all(|finding| matches!(finding.state, State::Ok | State::Note));
    global.output().one(&Answer { healthy, findings }, text)?;
    if healthy { Ok(()) } else { Err(Told.into()) }
}

fn text(answer: &Answer) -> String {
    let mut text = String::new();
    for finding in &answer.findings {
        let state = match finding.state {
            State::Ok => "ok",
            State::Note => "note",
            State::Missing => "MISSING",
            State::Broken => "BROKEN",
        };
        text.push_str(&format!("{state:<8}{:<14}{}\n", finding.check, visible(&finding.found)));
        if let Some(mend) = &finding.mend {
            text.push_str(&format!("{:22}-> {}\n", "", visible(mend)));
        }
    }
    text.push_str(if answer.healthy {
        "`millstream up` has what it needs\n"
    } else {
        "mend what is MISSING or BROKEN, then look again\n"
    });
    text
}
