//! The way out to the world: an e-mail that was promised by a committed payment is sent, whatever its provider does, or
//! ends as a dead letter; one that was not promised is not. Method: the real program with the `relay-email` example, and
//! a provider that fails now and then, which keeps what it accepted by idempotency key.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex},
};

use millstream::database::Database;
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::support::{
    PATIENCE, Program, database,
    hosts::{SECRET, assert_tells_no_secret, dead_letters, produce, settled},
    http_server::{HttpServer, Reply, Seen},
    wait_for,
};

const ATTEMPTS: usize = 4;

fn project(port: u16) -> String {
    format!(
        r#"
[host]
listen = "127.0.0.1:0"
[streams.emails]
[groups.email]
stream = "emails"
handler = "relay-email.wasm"
retry = {{ max_attempts = {ATTEMPTS}, base = "20ms", max = "50ms" }}
allow = {{ http = ["127.0.0.1:{port}"] }}
config = {{ provider = "http://127.0.0.1:{port}/send?account={SECRET}", sender = "shop@example.com" }}
secrets = {{ API_KEY = {{ env = "MILLSTREAM_TEST_API_KEY" }} }}
"#
    )
}

/// What the provider remembers.
#[derive(Default)]
struct Provider {
    /// How often it was asked to send, by idempotency key.
    asked: Mutex<HashMap<String, usize>>,
    /// What it sent, by idempotency key.
    sent: Mutex<BTreeMap<String, Value>>,
}

impl Provider {
    /// In turns: refuses at first, accepts and then loses its answer, is busy, accepts.
    fn answer(&self, seen: &Seen) -> Reply {
        let key = seen.header("idempotency-key").unwrap().to_owned();
        if seen.header("authorization") != Some(&format!("Bearer {SECRET}-key")) {
            return Reply::new(401, "", SECRET);
        }
        let email: Value = serde_json::from_slice(&seen.body).unwrap();
        let asked = {
            let mut asked = self.asked.lock().unwrap();
            let asked = asked.entry(key.clone()).or_default();
            *asked += 1;
            *asked
        };
        let number = key.rsplit('-').next().unwrap().parse::<usize>().unwrap();
        match email["template"].as_str().unwrap() {
            "never" => Reply::new(500, "", SECRET),
            "unknown" => Reply::new(422, "", SECRET),
            _ if asked == 1 && number % 4 == 0 => Reply::new(500, "", SECRET),
            _ if asked == 1 && number % 4 == 1 => Reply::new(503, "retry-after: 0\n", ""),
            _ => {
                self.sent.lock().unwrap().insert(key, email);
                match (asked, number % 4) {
                    (1, 2) => Reply::Bytes(Vec::new()),
                    _ => Reply::new(202, "", ""),
                }
            }
        }
    }
}

/// A payment and its e-mail in one transaction, which then is committed or not.
async fn pay(database: &Database, order: &str, committed: bool) {
    let mut tx = database.pool.begin().await.unwrap();
    sqlx::query("update shop.orders set status = 'paid' where id = $1").bind(order).execute(&mut *tx).await.unwrap();
    let sql = "select id from {schema}.produce('emails', $1)";
    let email = json!({"to": format!("{order}-{SECRET}@example.com"), "template": "payment-received"}).to_string();
    sqlx::query(database.schema.sql(sql)).bind(email).execute(&mut *tx).await.unwrap();
    if committed { tx.commit().await.unwrap() } else { tx.rollback().await.unwrap() }
}

async fn orders(database: &Database, count: usize) {
    for sql in ["create schema shop", "create table shop.orders (id text primary key, status text)"] {
        sqlx::query(sql).execute(&database.pool).await.unwrap();
    }
    let sql = "insert into shop.orders select n::text, 'open' from generate_series(1, $1) as n";
    sqlx::query(sql).bind(count as i32).execute(&database.pool).await.unwrap();
}

#[tokio::test]
async fn every_promised_email_is_sent_or_a_dead_letter_and_no_other_is() {
    const ORDERS: usize = 24;
    let provider = Arc::new(Provider::default());
    let answering = provider.clone();
    let server = HttpServer::start(move |seen| answering.answer(seen)).await;
    let database = database().await;
    let mut program = Program::with_examples(&project(server.port()));
    program.set("MILLSTREAM_TEST_API_KEY", &format!("{SECRET}-key"));
    // Whatever anybody asks to be logged of what is between the guest and the network, no payload and no secret is.
    let all = "wasmtime_wasi=trace,wasmtime_wasi_http=trace,wasmtime_wasi_config=trace,hyper=trace,tokio_rustls=trace";
    program.set("RUST_LOG", &format!("warn,millstream=trace,{all}"));
    program.start(&["up", "--database-url", &database.url().await]);
    program.logged("ready: ").await;
    orders(&database, ORDERS).await;
    for order in 1..=ORDERS {
        pay(&database, &order.to_string(), order % 3 != 0).await;
    }
    let hopeless = produce(&database, "emails", json!({"to": SECRET, "template": "never"}), 1).await[0];
    let refused = produce(&database, "emails", json!({"to": SECRET, "template": "unknown"}), 1).await[0];

    let paid = (1..=ORDERS).filter(|order| order % 3 != 0);
    let expected: Vec<String> = paid.map(|order| format!("{order}-{SECRET}@example.com")).collect();
    wait_for("all are sent", PATIENCE, async || provider.sent.lock().unwrap().len() >= expected.len()).await;
    wait_for("the others are dead", PATIENCE, async || dead_letters(&database).await.len() >= 2).await;
    settled(&database).await;
    let sent = provider.sent.lock().unwrap().clone();
    let mut sent: Vec<String> = sent.values().map(|email| email["to"].as_str().unwrap().to_owned()).collect();
    sent.sort_by_key(|to| to.split('-').next().unwrap().parse::<usize>().unwrap());
    assert!(sent == expected, "{} of {} are sent", sent.len(), expected.len());

    let dead = dead_letters(&database).await;
    let told: Vec<_> = dead.iter().map(|(id, class, error)| (*id, class.as_str(), error.as_str())).collect();
    let failed = (hopeless, "failed", "the provider answered 500");
    assert_eq!(told, [failed, (refused, "rejected", "the provider answered 422")]);
    let asked = provider.asked.lock().unwrap().clone();
    assert_eq!(asked[&format!("emails-{hopeless}")], ATTEMPTS);
    assert_eq!(asked[&format!("emails-{refused}")], 1);
    assert!(asked.len() == expected.len() + 2 && asked.values().any(|times| *times == 2), "{asked:?}");
    program.signal(Signal::TERM);
    assert!(program.ended(PATIENCE).await.success(), "{}", program.stderr());
    assert_tells_no_secret(&program);
}
