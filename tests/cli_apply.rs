//! `apply`, `plan` and `status`: what streams.toml says is declared, compared and told.

use std::sync::atomic::Ordering::Relaxed;

use millstream::{database::MIGRATIONS, handler::FailureClass};

use crate::support::verbs::Verbs;

const BEFORE: &str = r#"
[streams.orders]
[groups.email]
stream = "orders"
handler = "email.wasm"
"#;

const AFTER: &str = r#"
[streams.orders]
retention = "7d"
[streams.receipts]
[groups.email]
stream = "orders"
handler = "email.wasm"
start = "latest"
"#;

#[tokio::test]
async fn plan_tells_what_apply_then_does() {
    let verbs = Verbs::declare(BEFORE).await;
    assert_eq!(verbs.text(&["plan"]), "nothing would change\n");
    verbs.file("streams.toml", AFTER);
    let changes = serde_json::json!([
        {"change": "stream_changed", "name": "orders"},
        {"change": "stream_created", "name": "receipts"},
        {"change": "group_changed", "name": "email"},
        {"change": "start_ignored", "name": "email"},
    ]);
    for arguments in [&["plan"][..], &["apply", "--dry-run"]] {
        let plan = verbs.json(arguments);
        assert_eq!((&plan["applied"], &plan["changes"]), (&false.into(), &changes));
    }
    assert_eq!(verbs.project.number("select count(*) from {schema}.stream").await, 1, "a plan changes nothing");
    assert_eq!(verbs.json(&["status"])["differences"], changes);
    let applied = verbs.json(&["apply"]);
    assert_eq!((&applied["applied"], &applied["changes"]), (&true.into(), &changes));
    assert_eq!(verbs.text(&["apply"]), "nothing to change\n");
    assert_eq!(verbs.json(&["status"])["differences"], serde_json::json!([]));
}

#[tokio::test]
async fn a_plan_for_an_empty_database_leaves_it_empty() {
    let database = crate::support::empty_database().await;
    let program = crate::support::Program::new(BEFORE);
    let (status, stdout, stderr) = program.run(&["plan", "--database-url", &database.url().await]);
    assert!(status.success(), "{stderr}");
    let tables = format!("make or migrate the database's tables ({} missing)\n", MIGRATIONS.len());
    assert_eq!(stdout, tables + "create stream orders\ncreate group email\n");
    let schemas = "select count(*) from pg_namespace where nspname = 'millstream'";
    assert_eq!(crate::support::engine::number(&database, schemas).await, 0);
}

#[tokio::test]
async fn a_group_cannot_move_to_another_stream() {
    let verbs = Verbs::declare(BEFORE).await;
    verbs.file(
        "streams.toml",
        "[streams.orders]\n[streams.new]\n[groups.email]\nstream = \"new\"\nhandler = \"email.wasm\"\n",
    );
    for verb in ["plan", "apply", "status"] {
        verbs.refused(&[verb], 1, &["declare group \"email\"", "cannot move to another (\"new\")"]);
    }
    assert_eq!(verbs.project.number("select count(*) from {schema}.stream").await, 1, "nothing is half applied");
}

#[tokio::test]
async fn status_tells_what_is_declared_and_missing_from_the_file() {
    let verbs = Verbs::declare(AFTER).await;
    verbs.file("streams.toml", BEFORE.replace("orders", "invoices").replace("email", "fax"));
    let status = verbs.json(&["status"]);
    assert_eq!(status["not_in_file"], serde_json::json!(["stream orders", "stream receipts", "group email"]));
    assert_eq!((&status["schema"], &status["schema_version"]), (&"millstream".into(), &MIGRATIONS.len().into()));
    assert_eq!(status["streams"][0]["stream"], "orders");
    assert_eq!((&status["hosts"], &status["counters"]["fenced"]), (&serde_json::json!([]), &0.into()));
    let text = verbs.text(&["status"]);
    assert!(text.contains("no host runs: start one with `millstream up`"), "{text}");
    assert!(text.contains("`millstream apply` would:\n  create stream invoices\n"), "{text}");
}

/// Goal: counters of the hosts add up. Method: a host in this process publishes them with its heartbeat.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn status_counts_what_the_hosts_did() {
    use crate::support::{
        engine::{done, numbered},
        wait_for,
    };
    let file = format!("[host]\nheartbeat = \"100ms\"\nlease = \"5s\"\n{BEFORE}");
    let verbs = Verbs::declare(&file).await;
    let host = verbs.project.host("email", |_| done()).await;
    let handlers = serde_json::json!({"email": {"file": "email.wasm", "digest": "ab".repeat(32), "reloads": 3}});
    host.counters.publish("handlers", handlers);
    let group = host.counters.group("email");
    group.fenced.fetch_add(2, Relaxed);
    group.memory_growths.fetch_add(5, Relaxed);
    host.counters.recovered.fetch_add(7, Relaxed);
    group.count_failure(FailureClass::Timeout);
    verbs.project.produce("orders", &numbered(20)).await;
    let published = "select coalesce(sum((stats #>> '{groups,email,done}')::bigint), 0)::bigint from {schema}.host";
    let limit = std::time::Duration::from_secs(30);
    wait_for("the counters", limit, async || verbs.project.number(published).await == 20).await;
    let status = verbs.json(&["status"]);
    let counters = &status["counters"];
    assert_eq!((&counters["delivered"], &counters["reloads"], &counters["gaps"]), (&20.into(), &3.into(), &0.into()));
    assert_eq!(
        (&counters["fenced"], &counters["memory_growths"], &counters["recovered"]),
        (&2.into(), &5.into(), &7.into())
    );
    assert_eq!(counters["failures"], serde_json::json!({"timeout": 1}));
    let told = &status["hosts"][0];
    assert!(told["lease_left_ms"].as_i64().is_some_and(|left| left > 0) && told["version"].is_string(), "{told}");
    assert_eq!(status["groups"][0]["digest"], "ab".repeat(32));
    assert_eq!(told["handlers"]["email"]["reloads"], 3);
    host.drain().await;
}
