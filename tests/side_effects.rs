//! The walks of a side effect that end in a crash, with real processes that are killed: between COMMIT and send, before the
//! COMMIT, and between send and acknowledgement. With the relay no e-mail of a payment is lost and none is promised for a
//! payment that was rolled back. The walks that end in an error are in `client.rs`, the relay's own behaviour in
//! `relay_email.rs`.

use std::{
    collections::BTreeMap,
    io::{BufRead, BufReader},
    process::{Child, Command, Stdio},
    sync::{Arc, Mutex},
};

use millstream::client::{Client, ProduceOptions, Produced};
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::support::{
    PATIENCE, Program, TestDatabase,
    engine::Project,
    hosts::{SHORT_LEASE, number, settled, up},
    http_server::{HttpServer, Reply, Seen},
    wait_for,
};

/// Where a payer stops and waits to be killed: `before commit`, or `after commit`. Set in processes that are payers.
const STOP: &str = "MILLSTREAM_TEST_STOP";
const ORDER: &str = "MILLSTREAM_TEST_ORDER";
const URL: &str = "MILLSTREAM_TEST_URL";

fn streams_toml(port: u16) -> String {
    format!(
        r#"
[host]
listen = "127.0.0.1:0"
{SHORT_LEASE}
[streams.emails]
[groups.email]
stream = "emails"
handler = "relay-email.wasm"
retry = {{ max_attempts = 5, base = "10ms", max = "50ms" }}
allow = {{ http = ["127.0.0.1:{port}"] }}
config = {{ provider = "http://127.0.0.1:{port}/send", sender = "shop@example.com" }}
secrets = {{ API_KEY = {{ env = "MILLSTREAM_TEST_API_KEY" }} }}
"#
    )
}

/// A shop with three open orders, and the stream of its e-mails.
async fn shop() -> Project {
    let project = Project::declare("[streams.emails]").await;
    project
        .run(
            "create table public.orders (id integer primary key, status text not null);
             create table public.payment (operation text primary key, order_id integer not null);
             insert into public.orders select n, 'unpaid' from generate_series(1, 3) as n",
        )
        .await;
    project
}

/// The right place for the e-mail: a message in the transaction of the payment. `at_end` is the last thing in it. Answers
/// whether the payment is new, and what became of the message.
async fn pay(client: &Client, order: i32, at_end: impl AsyncFnOnce()) -> anyhow::Result<(bool, Produced)> {
    let emails = client.stream::<Value>("emails");
    let operation = format!("pay-{order}");
    let work = async |tx: &mut sqlx::PgConnection| {
        let insert = "insert into public.payment values ($1, $2) on conflict do nothing";
        let inserted = sqlx::query(insert).bind(&operation).bind(order).execute(&mut *tx).await?.rows_affected();
        let update = "update public.orders set status = 'paid' where id = $1";
        sqlx::query(update).bind(order).execute(&mut *tx).await?;
        let email = json!({"to": format!("{order}@example.com"), "template": "payment-received"});
        let once = ProduceOptions { idempotency_key: Some(operation.clone()), ..ProduceOptions::default() };
        let produced = emails.produce_in_tx(tx, &email, once).await?;
        at_end().await;
        anyhow::Ok((inserted == 1, produced))
    };
    client.in_transaction(work).await
}

/// A process that pays for an order, and says when it has come to where it is to be killed.
async fn payer(stop: &str) {
    let variable = |name: &str| std::env::var(name).expect("whoever started it says so");
    let client = Client::connect(&variable(URL)).await.expect("connect");
    let stop_here = async |here: &str| {
        if stop == here {
            println!("stopped {here}");
            std::future::pending::<()>().await;
        }
    };
    let paid = pay(&client, variable(ORDER).parse().unwrap(), async || stop_here("before commit").await).await;
    paid.expect("it commits");
    // Here an e-mail could be sent by hand: the commit is known, and the process may end before the send.
    stop_here("after commit").await;
    unreachable!("it is to stop somewhere");
}

/// Starts this very test again as a payer, and kills it where it stops.
async fn killed(database: &TestDatabase, test: &str, order: i32, stop: &str) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture"]).stdout(Stdio::piped()).stderr(Stdio::null());
    command.env(STOP, stop).env(ORDER, order.to_string()).env(URL, database.url().await);
    let mut child = command.spawn().expect("start a payer");
    let stopped = format!("stopped {stop}");
    let lines = BufReader::new(child.stdout.take().expect("it is piped")).lines();
    let reached = lines.map_while(Result::ok).any(|line| line.ends_with(&stopped));
    kill(&mut child);
    assert!(reached, "the payer of order {order} has ended before it came to {stop}");
}

fn kill(child: &mut Child) {
    child.kill().expect("kill -9"); // which is what it is
    child.wait().expect("wait for it");
}

/// What a provider was asked, as addresses by idempotency key, and how often.
#[derive(Default)]
struct Provider {
    asked: Mutex<BTreeMap<String, (String, usize)>>,
}

impl Provider {
    /// Takes the e-mail; how often it was asked to take it.
    fn take(&self, seen: &Seen) -> usize {
        let email: Value = serde_json::from_slice(&seen.body).unwrap();
        let key = seen.header("idempotency-key").unwrap().to_owned();
        let mut asked = self.asked.lock().unwrap();
        let (_, times) = asked.entry(key).or_insert_with(|| (email["to"].as_str().unwrap().to_owned(), 0));
        *times += 1;
        *times
    }

    fn sent_to(&self) -> Vec<(String, usize)> {
        let mut sent: Vec<_> = self.asked.lock().unwrap().values().cloned().collect();
        sent.sort();
        sent
    }
}

async fn relay(database: &TestDatabase, port: u16) -> Program {
    let mut program = Program::with_examples(&streams_toml(port));
    program.set("MILLSTREAM_TEST_API_KEY", "key");
    up(&mut program, &database.url().await).await;
    program
}

fn to(order: i32, times: usize) -> (String, usize) {
    (format!("{order}@example.com"), times)
}

const PAID: &str = "select coalesce(sum(id), 0)::bigint from public.orders where status = 'paid'";

/// Goal: a payer that is killed before its COMMIT has paid nothing and promised nothing, one that is killed right after it
/// has paid and promised; and running both again under the same keys, as whoever finds them dead will, changes nothing of
/// what was committed and answers `duplicate`.
#[tokio::test]
async fn a_crash_between_commit_and_send_loses_no_email_and_one_before_commit_promises_none() {
    if let Ok(stop) = std::env::var(STOP) {
        return payer(&stop).await;
    }
    let test = "side_effects::a_crash_between_commit_and_send_loses_no_email_and_one_before_commit_promises_none";
    let project = shop().await;
    let database = &project.database;
    let provider = Arc::new(Provider::default());
    let taking = Arc::clone(&provider);
    let server = HttpServer::start(move |seen| {
        taking.take(seen);
        Reply::new(202, "", "")
    })
    .await;
    killed(database, test, 1, "before commit").await;
    killed(database, test, 2, "after commit").await;
    assert_eq!(number(database, PAID).await, 2, "only order 2 is paid");
    let mut host = relay(database, server.port()).await;
    wait_for("the promised e-mail is sent", PATIENCE, async || !provider.sent_to().is_empty()).await;
    settled(database).await;
    assert_eq!(provider.sent_to(), [to(2, 1)]);

    let client = Client::connect(&database.url().await).await.unwrap();
    let (is_new, produced) = pay(&client, 2, async || {}).await.unwrap();
    assert!(!is_new && produced.duplicate, "{produced:?}");
    let (is_new, produced) = pay(&client, 1, async || {}).await.unwrap();
    assert!(is_new && !produced.duplicate, "{produced:?}");
    wait_for("the second e-mail is sent", PATIENCE, async || provider.sent_to().len() == 2).await;
    settled(database).await;
    assert_eq!(provider.sent_to(), [to(1, 1), to(2, 1)]);
    assert_eq!(number(database, "select count(*) from public.payment").await, 2);
    host.signal(Signal::TERM);
    assert!(host.ended(PATIENCE).await.success(), "{}", host.stderr());
}

/// Goal: a host that is killed after the provider has taken an e-mail, and before it could acknowledge it, loses nothing: the
/// next host asks again, under the same idempotency key, by which the provider sees that it is the same.
#[tokio::test]
async fn a_crash_between_send_and_acknowledgement_sends_again_under_the_same_key() {
    let project = shop().await;
    let database = &project.database;
    let provider = Arc::new(Provider::default());
    let taking = Arc::clone(&provider);
    let server = HttpServer::start(move |seen| match taking.take(seen) {
        1 => Reply::Stall(Vec::new()), // taken, and the host never hears of it
        _ => Reply::new(202, "", ""),
    })
    .await;
    let mut first = relay(database, server.port()).await;
    let client = Client::connect(&database.url().await).await.unwrap();
    for order in 1..=3 {
        pay(&client, order, async || {}).await.unwrap();
    }
    wait_for("all are taken", PATIENCE, async || provider.sent_to().len() == 3).await;
    first.signal(Signal::KILL);
    first.ended(PATIENCE).await;
    let mut second = relay(database, server.port()).await;
    wait_for("all are asked for again", PATIENCE, async || provider.sent_to().iter().all(|(_, times)| *times == 2))
        .await;
    settled(database).await;
    assert_eq!(provider.sent_to(), [to(1, 2), to(2, 2), to(3, 2)]);
    assert_eq!(number(database, "select count(*) from {schema}.dead_letter").await, 0);
    second.signal(Signal::TERM);
    assert!(second.ended(PATIENCE).await.success(), "{}", second.stderr());
}
