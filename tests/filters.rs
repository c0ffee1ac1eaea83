//! A group's filter: what it lets through is delivered, everything else is passed without a trace.

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex},
    time::Duration,
};

use millstream::handler::{Message, NewMessage};

use crate::support::{
    engine::{Project, done, text},
    wait_for,
};

const LIMIT: Duration = Duration::from_secs(60);

fn declared(filter: &str) -> String {
    format!(
        "[streams.orders]\n[groups.email]\nstream = \"orders\"\nhandler = \"email.wasm\"\nslots = 2\nfilter = {filter}\n"
    )
}

/// Every shape of message that a filter can tell apart; the payload is its name.
fn shapes() -> Vec<NewMessage> {
    let with = |name: &str, key: Option<&str>, routing_key: Option<&str>, headers: &[(&str, &str)]| NewMessage {
        key: key.map(str::to_owned),
        routing_key: routing_key.map(str::to_owned),
        headers: headers.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect(),
        ..text(name)
    };
    vec![
        with("bare", None, None, &[]),
        with("acct", Some("acct-1"), Some("eu.billing"), &[("tier", "gold"), ("x", "y")]),
        with("acct2", Some("acct-2"), Some("us.billing"), &[("tier", "silver")]),
        with("odd", Some("100%_\\x"), Some("eu.%"), &[("tier", "gold\"'")]),
        with("100", Some("100abx"), Some("eu.x"), &[]),
        with("upper", Some("ACCT-1"), Some("EU.billing"), &[("Tier", "gold")]),
    ]
}

async fn check(filter: &str, expected: &[&str]) {
    let project = Project::declare(&declared(filter)).await;
    let seen = Arc::new(Mutex::new(BTreeSet::new()));
    let notes = Arc::clone(&seen);
    let host = project
        .host("email", move |message: Message| {
            let name = String::from_utf8(message.payload.unwrap()).unwrap();
            assert!(notes.lock().unwrap().insert(name), "each once");
            done()
        })
        .await;
    project.produce("orders", &shapes()).await;
    wait_for("the cursor passes all", LIMIT, async || project.number("select claimed from {schema}.cursor").await == 6)
        .await;
    wait_for("nothing is left over", LIMIT, async || project.left_over().await == 0).await;
    host.drain().await;
    let seen: Vec<_> = seen.lock().unwrap().iter().cloned().collect();
    assert_eq!(seen, expected, "{filter}");
}

/// Globs on keys and routing keys, equality on headers, all of which must hold; what LIKE would take for a wildcard is
/// an ordinary character.
#[tokio::test]
async fn a_filter_lets_through_exactly_what_it_says() {
    check(r#"{ key = ["acct-*"] }"#, &["acct", "acct2"]).await;
    check(r#"{ key = ["acct-?", "100*"] }"#, &["100", "acct", "acct2", "odd"]).await;
    check(r#"{ key = ['100%_\x'] }"#, &["odd"]).await;
    check(r#"{ not_key = ["acct-*"] }"#, &["100", "bare", "odd", "upper"]).await;
    check(r#"{ routing_key = ["eu.*"], key = ["*"] }"#, &["100", "acct", "odd"]).await;
    check(r#"{ headers = { tier = "gold" } }"#, &["acct"]).await;
    check(r#"{ headers = { tier = "gold\"'" }, not_key = ["acct-*"] }"#, &["odd"]).await;
}

/// A filter that lets through one in ten thousand passes the others in few turns, however few slots the group has.
#[tokio::test]
async fn a_narrow_filter_passes_the_others_in_few_turns() {
    let project = Project::declare(&declared(r#"{ key = ["wanted"] }"#)).await;
    project.run("select {schema}.produce_batch('orders', array(select 'x'::bytea from generate_series(1, 40000)),
        p_keys => array(select case when i % 10000 = 0 then 'wanted' else 'other' end from generate_series(1, 40000) i))").await;
    let host = project.host("email", |_| done()).await;
    wait_for("the cursor passes all", LIMIT, async || {
        project.number("select claimed from {schema}.cursor").await == 40_000
    })
    .await;
    wait_for("nothing is left over", LIMIT, async || project.left_over().await == 0).await;
    assert_eq!((host.count("email", "done"), host.count("email", "delivered")), (4, 4));
    let turns = host.count("email", "turns");
    assert!(turns < 200, "{turns} turns for 40,000 rows");
    host.drain().await;
}
