//! Names with anything in them: of streams, groups and the schema; quoted or refused, never broken SQL.

use millstream::database::{Connect, Database};
use rustix::process::Signal;
use serde_json::json;

use crate::support::{
    PATIENCE, Program, empty_database,
    engine::number,
    hosts::{all_reported, dead_letters, produce, settled, up},
    verbs::Verbs,
};

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

/// A host does its whole work under such names: deliveries, effects, retries, keys, dead letters, and all again after a
/// restart.
#[tokio::test]
async fn a_host_runs_on_any_names() {
    const SCHEMA: &str = r#"We"ird; Ünï'%"#;
    let database = empty_database().await;
    let url = database.url().await;
    let long = "n".repeat(200);
    let names: Vec<&str> = NAMES.into_iter().chain([long.as_str()]).collect();
    let mut streams_toml =
        format!("[database]\nschema = {}\n[host]\nlisten = \"127.0.0.1:0\"\n[streams.receipts]\n", quoted(SCHEMA));
    for name in names.iter().map(|name| quoted(name)) {
        streams_toml += &format!(
            "[streams.{name}]\nkey = {{ concurrency = \"ordered\" }}\n[groups.{name}]\nstream = {name}\nhandler = \"flaky.wasm\"\n\
             allow = {{ produce = [\"receipts\"] }}\nretry = {{ max_attempts = 3, base = \"1ms\" }}\n"
        );
    }
    let mut program = Program::with_examples(&streams_toml);
    let mut expected = 0;
    for round in 1..=2 {
        up(&mut program, &url).await;
        let database = Database::connect(&Connect::parse(&url).unwrap(), 4, SCHEMA).await.unwrap();
        for name in &names {
            produce(&database, name, json!({"do": "report"}), 20).await;
            produce(&database, name, json!({"do": "panic", "times": 1, "reason": "once"}), 1).await;
            produce(&database, name, json!({"do": "reject", "reason": "no"}), 1).await;
            let keyed = r#"select count(*) from generate_series(1, 20) as n,
                {schema}.produce($1, '{"do": "report", "to": "receipts"}', key => $1 || n % 3)"#;
            let keyed = sqlx::query_scalar::<_, i64>(database.schema.sql(keyed)).bind(*name);
            assert_eq!(keyed.fetch_one(&database.pool).await.unwrap(), 20);
            expected += 40;
        }
        all_reported(&database, expected).await;
        settled(&database).await;
        let rejected = dead_letters(&database).await;
        assert!(rejected.len() == round * names.len() && rejected.iter().all(|(_, class, _)| class == "rejected"));
        database.close().await;
        program.signal(Signal::TERM);
        assert!(program.ended(PATIENCE).await.success(), "{}", program.stderr());
        assert_eq!(program.lines(&["ERROR"]), 0, "{}", program.stderr());
    }
    let redrive = ["dead", "redrive", "--group", names[0], "--all", "--database-url", &url];
    let (status, told, said) = program.run(&redrive);
    assert!(status.success() && told == "redriven 2 dead letters\n", "{told}{said}");
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
