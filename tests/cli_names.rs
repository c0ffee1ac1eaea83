//! Names with anything in them: of streams, groups and the schema; quoted or refused, never broken SQL.

use crate::support::{Program, empty_database, engine::number, verbs::Verbs};

const NAMES: [&str; 5] = [r#"a"b'; drop table x; --"#, "sürü 🐑 %s {schema} $1", "Upper lower", "\\", "''"];

fn quoted(name: &str) -> String {
    format!("\"{}\"", name.replace('\\', "\\\\").replace('"', "\\\""))
}

#[tokio::test]
async fn streams_and_groups_may_have_any_name() {
    let long = "n".repeat(200);
    let mut streams_toml = String::new();
    for name in NAMES.iter().chain([&long.as_str()]) {
        let name = quoted(name);
        streams_toml += &format!("[streams.{name}]\n[groups.{name}]\nstream = {name}\nhandler = \"h.wasm\"\n");
    }
    let verbs = Verbs::declare(&streams_toml).await;
    assert_eq!(verbs.text(&["apply"]), "nothing to change\n");
    for name in NAMES.iter().chain([&long.as_str()]) {
        let answer = verbs.run_with_input(&["produce", "--", name], b"{}");
        assert_eq!((answer.code, answer.stdout.as_str()), (0, "message 1\n"), "{name}: {answer:?}");
        verbs.file("lines.ndjson", "{\"payload\": 1}\n");
        assert_eq!(verbs.json(&["produce", "--ndjson", "--file", "lines.ndjson", "--", name])["first_id"], 2, "{name}");
        assert_eq!(verbs.text(&["tail", "--", name]).lines().count(), 3, "{name}");
        let group = &verbs.json(&["groups", "--", name])[0];
        assert_eq!((&group["group"], &group["stream"], &group["lag"]), (&(*name).into(), &(*name).into(), &2.into()));
        assert_eq!(verbs.json(&["dead", "list", "--group", name]), serde_json::json!([]), "{name}");
        assert_eq!(verbs.json(&["pause", "--", name])["group"], *name);
        assert_eq!(verbs.json(&["resume", "--", name])["changed"], true, "{name}");
        assert_eq!(verbs.json(&["seek", "--to", "latest", "--yes", "--", name])["position"], 2, "{name}");
        assert_eq!(verbs.json(&["why", "--", name, "2"])["state"], "before_start", "{name}");
    }
    verbs.refused(&["groups", "--", &"m".repeat(201)], 1, &["no group"]);
    assert!(verbs.json(&["status"])["groups"].as_array().is_some_and(|groups| groups.len() == 6));
}

#[tokio::test]
async fn a_schema_may_have_any_name_that_postgres_keeps() {
    let database = empty_database().await;
    let url = database.url().await;
    for schema in [r#"We"ird; Ünï'%"#, "select", &"s".repeat(63)] {
        let program = Program::new(&format!(
            "[database]\nschema = {}\n[streams.orders]\n[groups.email]\nstream = \"orders\"\nhandler = \"e.wasm\"\n",
            quoted(schema)
        ));
        let run = |arguments: &[&str]| {
            let arguments: Vec<&str> = arguments.iter().copied().chain(["--database-url", &url]).collect();
            let (status, stdout, stderr) = program.run_with_input(&arguments, b"{}");
            assert!(status.success(), "{schema} {arguments:?}: {stderr}");
            stdout
        };
        assert_eq!(run(&["apply"]), "create stream orders\ncreate group email\n");
        assert_eq!(run(&["produce", "orders"]), "message 1\n");
        assert_eq!(run(&["tail", "orders"]).lines().count(), 2);
        let status: serde_json::Value = serde_json::from_str(&run(&["status", "--output", "json"])).expect("JSON");
        assert_eq!((&status["schema"], &status["groups"][0]["lag"]), (&schema.into(), &1.into()));
        assert_eq!(run(&["dead", "list"]), "no dead letters\n");
        assert!(run(&["seek", "email", "--to", "2026-01-01T00:00:00Z", "--yes"]).contains("with message 1 of"));
        assert!(run(&["why", "email", "1"]).ends_with("not yet claimed, it is the next\n"));
        assert_eq!(run(&["dead", "redrive", "--all"]), "redriven 0 dead letters\n");
    }
    assert_eq!(number(&database, "select count(*) from pg_namespace where nspname like 'We\"ird%'").await, 1);
}

#[tokio::test]
async fn a_schema_that_cannot_be_is_refused() {
    let database = empty_database().await;
    let url = database.url().await;
    for (schema, part) in [("a$b", "must not contain `$`"), ("pg_x", "Postgres keeps `pg_` for itself")] {
        let program = Program::new(&format!("[database]\nschema = {}\n[streams.orders]\n", quoted(schema)));
        let (status, _, stderr) = program.run(&["apply", "--database-url", &url]);
        assert!(status.code() == Some(1) && stderr.contains(part), "{stderr}");
    }
}
