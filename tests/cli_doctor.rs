//! `doctor`: names what is missing and what mends it, and changes nothing.

use serde_json::Value;

use crate::support::{Program, handlers::handler_wasm, verbs::Verbs};

const STREAMS_TOML: &str = r#"
[streams.orders]
[groups.email]
stream = "orders"
handler = "email.wasm"
[groups.audit]
stream = "orders"
handler = "audit.wasm"
"#;

fn finding<'a>(answer: &'a Value, check: &str, found: &str) -> &'a Value {
    let findings = answer["findings"].as_array().expect("findings");
    let is_it = |finding: &&Value| {
        finding["check"] == check && finding["found"].as_str().is_some_and(|text| text.contains(found))
    };
    findings.iter().find(is_it).unwrap_or_else(|| panic!("no {check} with {found}: {answer:#}"))
}

#[tokio::test]
async fn a_project_that_has_everything_is_healthy() {
    let verbs = Verbs::declare(STREAMS_TOML).await;
    std::fs::create_dir(verbs.program.folder().join("handlers")).expect("make the handlers folder");
    for file in ["handlers/email.wasm", "handlers/audit.wasm"] {
        verbs.file(file, handler_wasm("hello"));
    }
    let answer = verbs.json(&["doctor"]);
    assert_eq!(answer["healthy"], true);
    for (check, found) in [
        ("streams.toml", "1 streams, 2 groups"),
        ("tables", "current"),
        ("declared", "what streams.toml says"),
        ("hosts", "none runs"),
        ("handler", "email.wasm"),
        ("disk", "free at"),
    ] {
        assert_eq!(finding(&answer, check, found)["state"], "ok");
    }
    finding(&answer, "sandbox", "pool of");
    assert!(!verbs.program.folder().join(".millstream").exists(), "it makes nothing");
}

#[tokio::test]
async fn what_is_missing_is_named_with_what_mends_it() {
    let verbs = Verbs::declare(STREAMS_TOML).await;
    std::fs::create_dir(verbs.program.folder().join("handlers")).expect("make the handlers folder");
    verbs.file("handlers/email.wasm", "no wasm at all");
    verbs.file("streams.toml", STREAMS_TOML.replace("audit", "fax"));
    let answer = verbs.run(&["doctor", "--output", "json"]);
    assert_eq!((answer.code, answer.stderr.as_str()), (1, ""));
    let answer: Value = serde_json::from_str(&answer.stdout).expect("JSON");
    assert_eq!(answer["healthy"], false);
    assert_eq!(finding(&answer, "handler", "email.wasm for email: ")["state"], "missing");
    let missing = finding(&answer, "handler", "fax.wasm: No such file");
    assert!(
        missing["state"] == "missing" && missing["mend"].as_str().is_some_and(|text| text.contains("millstream new"))
    );
    let declared = finding(&answer, "declared", "in 1 points");
    assert!(
        declared["state"] == "note" && declared["mend"].as_str().is_some_and(|text| text.contains("millstream apply"))
    );
    let text = verbs.run(&["doctor"]).stdout;
    assert!(text.contains("MISSING handler") && text.ends_with("mend what is MISSING, then look again\n"), "{text}");
}

#[tokio::test]
async fn a_database_that_is_away_or_empty_is_told() {
    let program = Program::new(STREAMS_TOML);
    let url = "postgres://nobody:hunter2@127.0.0.1:1/x";
    let (status, stdout, stderr) = program.run(&["doctor", "--output", "json", "--database-url", url]);
    assert_eq!(status.code(), Some(1));
    assert!(!stdout.contains("hunter2") && !stderr.contains("hunter2"), "{stdout}");
    let answer: Value = serde_json::from_str(&stdout).expect("JSON");
    let away = finding(&answer, "database", "127.0.0.1:1");
    assert!(away["state"] == "missing" && away["mend"].as_str().is_some_and(|text| text.contains("--database-url")));

    let database = crate::support::empty_database().await;
    let (_, stdout, _) = program.run(&["doctor", "--output", "json", "--database-url", &database.url().await]);
    let answer: Value = serde_json::from_str(&stdout).expect("JSON");
    let tables = finding(&answer, "tables", "not applied yet");
    assert!(tables["mend"].as_str().is_some_and(|text| text.contains("millstream apply")));
}

#[test]
fn without_a_streams_toml_the_machine_is_looked_at_all_the_same() {
    let program = Program::new("[streams.orders]\nretention = \"soon\"\n");
    let (status, stdout, _) = program.run(&["doctor", "--output", "json"]);
    assert_eq!(status.code(), Some(1));
    let answer: Value = serde_json::from_str(&stdout).expect("JSON");
    let file = finding(&answer, "streams.toml", "1 mistakes, the first: ");
    assert!(file["state"] == "missing" && file["mend"].as_str().is_some_and(|text| text.contains("millstream check")));
    assert_eq!(finding(&answer, "Postgres", "version")["state"], "ok");
}
