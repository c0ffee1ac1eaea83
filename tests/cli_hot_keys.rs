//! `keys GROUP --by share`: what hosts measure of keys is added up, judged, and told with its evidence.

use millstream::handler::{Concurrency, NewMessage};
use serde_json::{Value, json};

use crate::support::{
    engine::{done, text},
    keyed::{LIMIT, keyed, steps},
    verbs::Verbs,
    wait_for,
};

const STREAMS_TOML: &str = r#"
[host]
heartbeat = "200ms"
[streams.orders]
[groups.email]
stream = "orders"
handler = "email.wasm"
[groups.audit]
stream = "orders"
handler = "email.wasm"
"#;

/// Goal: a host measures what it delivers, key by key, and publishes it. Method: two keys with a mode, one without, and
/// messages without a key; their counts are exact, and times are at least what the handler waits.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_host_delivers_of_each_key_is_counted_and_told() {
    let verbs = Verbs::declare(STREAMS_TOML).await;
    let (_, _, handler) = steps(|_, _| done());
    let mut batch: Vec<_> = (0..60).map(|n| keyed("hot", Concurrency::Ordered, &format!("h{n}"))).collect();
    batch.extend((0..20).map(|n| keyed("wa\u{1b}rm", Concurrency::Exclusive, &format!("w{n}"))));
    batch.extend((0..10).map(|n| NewMessage { key: Some("free".into()), ..text(&format!("f{n}")) }));
    batch.extend((0..10).map(|n| text(&format!("u{n}"))));
    verbs.project.produce("orders", &batch).await;
    assert_eq!(verbs.json(&["keys", "email", "--by", "share"])["keys"], json!([]));
    let host = verbs.project.host_with(&[("email", handler)]).await;
    let published = "select coalesce((stats #>> '{groups,email,hot_keys,messages}')::bigint, 0) from {schema}.host";
    wait_for("a heartbeat tells of all", LIMIT, async || verbs.project.number(published).await == 100).await;
    let told = verbs.json(&["keys", "email", "--by", "share"]);
    assert_eq!((&told["group"], &told["stream"], &told["hosts"]), (&json!("email"), &json!("orders"), &json!(1)));
    let keys: Vec<_> = told["keys"]
        .as_array()
        .unwrap()
        .iter()
        .map(|key| {
            (key["key"].as_str().unwrap(), key["concurrency"].as_str().unwrap(), key["messages"].as_u64().unwrap())
        })
        .collect();
    assert_eq!(keys, [("hot", "ordered", 60), ("wa\u{1b}rm", "exclusive", 20)]);
    let hot = &told["keys"][0];
    let figure = |of: &Value, name: &str| of[name].as_f64().unwrap();
    assert!((figure(hot, "message_share") - 0.6).abs() < 1e-9, "{told}");
    assert!(figure(hot, "busy_ms") >= 60.0 && figure(hot, "busy_ms") <= figure(&told, "busy_ms"), "{told}");
    assert!(figure(hot, "busy_share") > 0.0 && figure(hot, "saturation") > 0.0, "{told}");
    let largest = figure(hot, "busy_share").max(figure(&told["keys"][1], "busy_share"));
    assert!((figure(&told, "usable_parallelism") - 1.0 / largest).abs() < 1e-6, "{told}");
    let text = verbs.text(&["keys", "email", "--by", "share", "--limit", "1"]);
    assert!(text.contains("hot  ordered") && text.contains("60.0%") && !text.contains('\u{1b}'), "{text}");
    assert_eq!(verbs.json(&["keys", "audit", "--by", "share"])["keys"], json!([]), "of another group");
    wait_for("nothing is left over", LIMIT, async || verbs.project.left_over().await == 0).await;
    host.drain().await;
    assert!(verbs.text(&["keys", "email", "--by", "share"]).contains("no key with a mode"));
}

/// Goal: living hosts are added up, dead ones and those that publish something else left out, and what is advised rests on
/// figures. Method: hosts that published known figures, and messages that wait behind a failed one.
#[tokio::test]
async fn advice_names_the_figures_it_rests_on() {
    let verbs = Verbs::declare(STREAMS_TOML).await;
    let published = |busy_ms: u32, window_ms: u32| {
        json!({ "groups": { "email": { "hot_keys": { "window_ms": window_ms, "messages": 100, "busy_ms": 60_000, "top": [
            { "key": "a \"b\"", "lane": 0, "ordered": true, "messages": 90, "busy_ms": busy_ms },
        ]}}}})
    };
    for (stats, expires) in [
        (published(30_000, 60_000), "infinity"),
        (published(24_000, 60_000), "infinity"),
        (published(60_000, 60_000), "-infinity"),
        (json!({ "groups": { "email": { "hot_keys": { "of": "another version" } } } }), "infinity"),
    ] {
        let insert =
            "insert into {schema}.host (name, version, expires_at, stats) values ('h', '', $1::timestamptz, $2)";
        let query = sqlx::query(verbs.project.database.schema.sql(insert)).bind(expires).bind(stats);
        query.execute(&verbs.project.database.pool).await.unwrap();
    }
    verbs
        .project
        .sql(
            "insert into {schema}.message_key_lease (group_id, message_key, blocked_by)
             select id, 'a \"b\"', 1 from {schema}.consumer_group where name = 'email';
             insert into {schema}.exception (group_id, message_id, state, due_at, failures, message_key, concurrency)
             select id, n, case n when 1 then 'waiting' else 'deferred' end::{schema}.exception_state,
                case n when 1 then timestamptz 'infinity' end, case n when 1 then 3 else 0 end, 'a \"b\"', 'ordered'
             from {schema}.consumer_group, generate_series(1, 12) as n where name = 'email'",
        )
        .await;
    let told = verbs.json(&["keys", "email", "--by", "share"]);
    let key = json!({
        "key": "a \"b\"", "lane": 0, "concurrency": "ordered", "messages": 180,
        "message_share": told["keys"][0]["message_share"], "busy_ms": 54_000.0,
        "busy_share": told["keys"][0]["busy_share"], "saturation": told["keys"][0]["saturation"], "depth": 12,
        "depth_exact": true, "waits_for": 1, "failures": 3,
    });
    assert_eq!(told["keys"], json!([key]));
    for (figure, expected) in [("message_share", 0.9), ("busy_share", 0.45), ("saturation", 0.9)] {
        assert!((key[figure].as_f64().unwrap() - expected).abs() < 1e-9, "{figure}: {key}");
    }
    assert_eq!(
        (told["hosts"].as_u64(), told["window_ms"].as_u64(), told["messages"].as_u64()),
        (Some(2), Some(60_000), Some(200))
    );
    let advice: Vec<_> = told["advice"].as_array().unwrap().iter().map(|one| one["action"].as_str().unwrap()).collect();
    assert_eq!(advice, ["shards", "exclusive"]);
    let text = verbs.text(&["keys", "email", "--by", "share"]);
    for part in [
        "busy 90 % of the time",
        "shards = 2 in a key rule of stream \"orders\" that matches \"a \\\"b\\\"\"",
        "12 wait, behind message 1, which failed 3 times",
        "no more than 2.2 slots",
    ] {
        assert!(text.contains(part), "it does not say {part:?}: {text}");
    }
    verbs.refused(&["keys", "email", "--by", "share", "--state", "leased"], 2, &["leave --state out"]);
}
