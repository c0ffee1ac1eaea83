//! `bench`: every scenario answers with its figures, and leaves nothing behind. How high they are is not judged here.

use serde_json::Value;

use crate::support::{handlers::handler_wasm, verbs::Verbs};

#[tokio::test]
async fn every_scenario_has_its_figures_and_leaves_nothing_behind() {
    let verbs = Verbs::declare("[streams.orders]\n").await;
    let handler = verbs.file("noop.wasm", handler_wasm("noop"));
    let handler = handler.to_str().expect("UTF-8");
    let arguments = ["--output", "json", "bench", "--messages", "2000", "--seconds", "1", "--handler", handler];
    let answer = verbs.run(&arguments);
    assert_eq!(answer.code, 0, "{answer:?}");
    assert!(answer.stderr.contains("sandbox: pool of ") && answer.stderr.contains(" cores "), "{}", answer.stderr);
    let figures: Value = serde_json::from_str(&answer.stdout).expect("JSON");
    let figures = figures.as_array().expect("a list");
    // All that the help names.
    let help = verbs.run(&["bench", "--help"]).stdout;
    let named = help.lines().filter_map(|line| line.trim().strip_prefix("- ")?.split_once(':'));
    let scenarios: Vec<&str> = named.map(|(name, _)| name).collect();
    assert!(scenarios.len() >= 6 && scenarios.contains(&"keys"), "{help}");
    for scenario in scenarios {
        let ours: Vec<_> = figures.iter().filter(|figure| figure["scenario"] == scenario).collect();
        assert!(ours.iter().all(|figure| figure["value"].as_f64() > Some(0.0)), "{scenario}: {ours:?}");
        let has = |field: &str| ours.iter().any(|figure| figure[field].as_f64() > Some(0.0));
        assert!(has("ratio") && ours.iter().any(|figure| figure["floor"].is_string()), "{scenario}: {ours:?}");
        if scenario != "latency" {
            assert!(has("wal_bytes_per_message") && has("statements_per_message"), "{scenario}: {ours:?}");
        }
    }
    for instance in ["fresh", "reuse"] {
        let named = |figure: &Value| figure["what"].as_str().is_some_and(|what| what.contains(instance));
        assert!(figures.iter().any(named), "{instance}: {figures:?}");
    }
    for effect in ["no effects", "outbox message", "SQL statement"] {
        let named = |figure: &Value| figure["what"].as_str().is_some_and(|what| what.contains(effect));
        assert!(figures.iter().any(named), "{effect}: {figures:?}");
    }
    let roles = "select count(*) from pg_roles where rolname like 'millstream_bench%'";
    assert_eq!(verbs.project.number(roles).await, 0, "its role is dropped");
    let left = "select count(*) from pg_namespace where nspname like 'millstream_bench%'";
    assert_eq!(verbs.project.number(left).await, 0, "its schema is dropped");
    verbs.refused(&["bench", "--handler", "nowhere.wasm"], 1, &["read nowhere.wasm", "make handlers"]);
}
