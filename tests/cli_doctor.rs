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
        ("streams.toml", "1 stream, 2 groups"),
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
    assert_eq!(finding(&answer, "handler", "email.wasm for email: ")["state"], "broken");
    let missing = finding(&answer, "handler", "fax.wasm: No such file");
    assert!(
        missing["state"] == "missing" && missing["mend"].as_str().is_some_and(|text| text.contains("millstream new"))
    );
    let declared = finding(&answer, "declared", "in 1 point");
    assert!(
        declared["state"] == "note" && declared["mend"].as_str().is_some_and(|text| text.contains("millstream apply"))
    );
    let text = verbs.run(&["doctor"]).stdout;
    for part in ["MISSING handler", "BROKEN  handler", "mend what is MISSING or BROKEN, then look again\n"] {
        assert!(text.contains(part), "{part}: {text}");
    }
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
    let tables = finding(&answer, "tables", "to apply");
    assert!(tables["mend"].as_str().is_some_and(|text| text.contains("millstream apply")));
}

#[test]
fn without_a_streams_toml_the_machine_is_looked_at_all_the_same() {
    let program = Program::new("[streams.orders]\nretention = \"soon\"\n");
    let (status, stdout, _) = program.run(&["doctor", "--output", "json"]);
    assert_eq!(status.code(), Some(1));
    let answer: Value = serde_json::from_str(&stdout).expect("JSON");
    let file = finding(&answer, "streams.toml", "1 mistake, the first: ");
    assert!(file["state"] == "broken" && file["mend"].as_str().is_some_and(|text| text.contains("millstream check")));
    assert_eq!(finding(&answer, "Postgres", "version")["state"], "ok");
}

/// A user that may not make the tables, and one whose name would mix its own tables with ours. Roles are the cluster's, so
/// their names are this test's.
#[tokio::test]
async fn what_the_user_may_do_and_is_called_is_looked_at() {
    let database = crate::support::empty_database().await;
    let make = "create role doctors_guest login; create role doctors_namesake login superuser";
    sqlx::raw_sql(make).execute(&database.pool).await.expect("make the roles");
    let program = Program::new(&format!("[database]\nschema = \"doctors_namesake\"\n{STREAMS_TOML}"));
    let url = database.url().await;
    let doctor = |role: &str| {
        let url = url.replacen("//millstream@", &format!("//{role}@"), 1);
        let (_, stdout, _) = program.run(&["doctor", "--output", "json", "--database-url", &url]);
        serde_json::from_str::<Value>(&stdout).expect("JSON")
    };
    let answer = doctor("doctors_guest");
    let tables = finding(&answer, "tables", "may not make them");
    assert!(
        tables["state"] == "missing"
            && tables["mend"].as_str().is_some_and(|text| text.contains("grant create on database"))
    );
    let answer = doctor("doctors_namesake");
    assert_eq!(finding(&answer, "tables", "to apply")["state"], "note");
    assert_eq!(finding(&answer, "role", "called like the schema")["state"], "note");
    let answer = doctor("millstream");
    assert!(answer["findings"].as_array().is_some_and(|all| all.iter().all(|one| one["check"] != "role")), "{answer}");
    sqlx::raw_sql("drop role doctors_guest; drop role doctors_namesake")
        .execute(&database.pool)
        .await
        .expect("clean up");
}
