//! The Rust client and `millstream produce` when the answer to a COMMIT is lost: who asked is told that nobody knows, and
//! asking again under the same idempotency key stores the message once. Method: a proxy before Postgres that loses replies,
//! or the COMMIT itself, so that both truths behind the same error are seen.

use std::{collections::HashSet, fmt::Write, time::Duration};

use millstream::client::{Client, Error, ProduceOptions};
use tokio::{task::JoinSet, time::timeout};

use crate::support::{
    engine::Project,
    proxy::{Fate, Proxy},
    verbs::Verbs,
};

/// A ceiling against hangs, and no measure of speed.
const LIMIT: Duration = Duration::from_secs(60);

const STREAMS: &str = "[streams.orders]\n[streams.receipts]";

/// A client behind a proxy that loses one commit, the first after `begin`.
struct Behind {
    project: Project,
    proxy: Proxy,
    client: Client,
}

async fn behind(fate: Fate) -> Behind {
    let project = Project::declare(STREAMS).await;
    // sqlx ends every transaction whose COMMIT failed once more.
    project.database.expect_log("testing the connection on-release");
    let proxy = Proxy::of_commits(&project.database.url().await, move |commit| match commit {
        1 => fate,
        _ => Fate::Answered,
    });
    let url = format!("{}&options=-csearch_path%3Dpublic", proxy.url());
    let client = Client::connect(&url).await.expect("connect");
    Behind { project, proxy, client }
}

impl Behind {
    async fn stored(&self) -> i64 {
        self.project.number("select count(*) from {schema}.message_log_1").await
    }
}

fn plain() -> ProduceOptions {
    ProduceOptions::default()
}

fn once(key: &str) -> ProduceOptions {
    ProduceOptions { idempotency_key: Some(key.to_owned()), ..plain() }
}

/// Goal: a produce whose COMMIT is lost is never repeated by the client and never reported as failed or done; the caller's
/// repetition with the key answers `duplicate` exactly when the first was committed.
#[tokio::test]
async fn a_produce_whose_commit_is_lost_is_unknown_and_its_key_makes_it_safe_to_repeat() {
    for (fate, is_stored) in [(Fate::ReplyLost, true), (Fate::RequestLost, false)] {
        let behind = behind(fate).await;
        let orders = behind.client.stream::<str>("orders");
        behind.proxy.begin();
        let lost = timeout(LIMIT, orders.produce("a", once("op-1"))).await.expect("it is told");
        assert!(matches!(lost, Err(Error::CommitUnknown(_))), "{fate:?}: {lost:?}");
        assert_eq!(behind.stored().await, i64::from(is_stored), "{fate:?}");
        let again = orders.produce("a", once("op-1")).await.unwrap();
        assert_eq!(again.duplicate, is_stored, "{fate:?}");
        assert_eq!((behind.stored().await, behind.proxy.lost()), (1, 1), "{fate:?}");
        let third = orders.produce("a", once("op-1")).await.unwrap();
        assert!(third.duplicate && third.id == again.id, "{fate:?}");
    }
}

/// When the connection ends right behind the COMMIT, Postgres may still be at it: the repetition waits for it (I8).
#[tokio::test]
async fn a_repetition_that_overtakes_the_first_commit_waits_for_it() {
    let behind = behind(Fate::HungUp).await;
    let orders = behind.client.stream::<str>("orders");
    behind.proxy.begin();
    let lost = orders.produce("a", once("op-1")).await;
    assert!(matches!(lost, Err(Error::CommitUnknown(_))), "{lost:?}");
    let again = orders.produce("a", once("op-1")).await.unwrap();
    assert_eq!(behind.stored().await, 1);
    assert!(orders.produce("a", once("op-1")).await.unwrap().id == again.id);
}

/// Without a key a repetition is a second message: that is what the error tells the caller to think about.
#[tokio::test]
async fn without_a_key_a_repetition_after_an_unknown_commit_is_a_second_message() {
    let behind = behind(Fate::ReplyLost).await;
    let orders = behind.client.stream::<str>("orders");
    behind.proxy.begin();
    let lost = orders.produce("a", plain()).await;
    let Err(error @ Error::CommitUnknown(_)) = lost else { panic!("{lost:?}") };
    assert!(error.to_string().contains("may be committed, or may not"), "{error}");
    assert!(!orders.produce("a", plain()).await.unwrap().duplicate);
    assert_eq!(behind.stored().await, 2);
}

/// Goal: every caller of a shared transaction is told, none waits for ever, and what they repeat exists once.
#[tokio::test]
async fn all_who_share_a_lost_commit_are_told() {
    const COUNT: usize = 200;
    let project = Project::declare(STREAMS).await;
    project.database.expect_log("testing the connection on-release");
    // The first of them alone, the next shared by most, then one that never arrives.
    let proxy = Proxy::of_commits(&project.database.url().await, |commit| match commit {
        1 | 2 => Fate::ReplyLost,
        3 => Fate::RequestLost,
        _ => Fate::Answered,
    });
    let client = Client::connect(proxy.url()).await.expect("connect");
    let orders = client.stream::<str>("orders");
    proxy.begin();
    let mut unknown_in_all = 0;
    let mut ids = HashSet::new();
    for round in 0..3 {
        let mut tasks = JoinSet::new();
        for number in 0..COUNT {
            let orders = orders.clone();
            tasks.spawn(async move {
                orders.produce("x", once(&format!("{round}.{number}"))).await.map_err(|e| (number, e))
            });
        }
        let mut unknown = Vec::new();
        while let Some(told) = timeout(LIMIT, tasks.join_next()).await.expect("everybody is told") {
            match told.unwrap() {
                Ok(produced) => assert!(ids.insert(produced.id), "an id twice"),
                Err((number, Error::CommitUnknown(_))) => unknown.push(number),
                Err((_, error)) => panic!("{error:?}"),
            }
        }
        unknown_in_all += unknown.len();
        for number in unknown {
            let produced = loop {
                match orders.produce("x", once(&format!("{round}.{number}"))).await {
                    Err(Error::CommitUnknown(_)) => {} // it has met the next lost commit
                    told => break told.unwrap(),
                }
            };
            assert!(ids.insert(produced.id), "an id twice");
        }
    }
    assert_eq!(proxy.lost(), 3);
    assert!(unknown_in_all >= 2, "{unknown_in_all} were told");
    assert_eq!(ids.len(), 3 * COUNT);
    let stored = project.number("select count(*) from {schema}.message_log_1").await;
    assert_eq!(stored, i64::try_from(3 * COUNT).unwrap(), "each once");
}

const PAY: &str = "update public.orders set status = 'paid' where id = 4127";

async fn shop(project: &Project) {
    project
        .run(
            "create table public.orders (id integer primary key, status text not null);
             create table public.payment (operation text primary key, order_id integer not null);
             insert into public.orders values (4127, 'unpaid')",
        )
        .await;
}

/// The seed's rerun: an unknown commit of `in_transaction` is its own error, the closure ran once, and running it again with
/// the same idempotency key and a business constraint leaves one payment and one message, whatever the truth was.
#[tokio::test]
async fn in_transaction_tells_an_unknown_commit_and_a_rerun_changes_nothing_twice() {
    for (fate, is_stored) in [(Fate::ReplyLost, true), (Fate::RequestLost, false)] {
        let behind = behind(fate).await;
        shop(&behind.project).await;
        let receipts = behind.client.stream::<str>("orders");
        let mut runs = 0;
        let mut pay = async || {
            let runs = &mut runs;
            behind
                .client
                .in_transaction(async |tx| {
                    *runs += 1;
                    let insert = "insert into public.payment values ('op-1', 4127) on conflict do nothing";
                    let inserted = sqlx::query(insert).execute(&mut *tx).await?.rows_affected();
                    sqlx::query(PAY).execute(&mut *tx).await?;
                    anyhow::Ok((inserted, receipts.produce_in_tx(tx, "4127", once("op-1")).await?))
                })
                .await
        };
        behind.proxy.begin();
        let error = pay().await.expect_err("the answer is lost");
        assert!(matches!(error.downcast_ref(), Some(Error::CommitUnknown(_))), "{fate:?}: {error:#}");
        let (inserted, produced) = pay().await.unwrap();
        assert_eq!((inserted == 0, produced.duplicate), (is_stored, is_stored), "{fate:?}");
        assert_eq!(runs, 2, "{fate:?}: the client reruns nothing by itself");
        let paid = "select (select count(*) from public.payment) * 10
            + (select count(*) from public.orders where status = 'paid')";
        assert_eq!((behind.project.number(paid).await, behind.stored().await), (11, 1), "{fate:?}");
    }
}

/// `produce_in_tx` on the caller's own transaction: its COMMIT is the caller's, and so is its error; the key works the same.
#[tokio::test]
async fn a_lost_commit_of_the_callers_own_transaction_is_safe_to_repeat_with_a_key() {
    for (fate, is_stored) in [(Fate::ReplyLost, true), (Fate::RequestLost, false)] {
        let behind = behind(fate).await;
        let orders = behind.client.stream::<str>("orders");
        let pool = sqlx::PgPool::connect(behind.proxy.url()).await.unwrap();
        let produce = async || {
            let mut tx = pool.begin().await.unwrap();
            let produced = orders.produce_in_tx(&mut tx, "a", once("op-1")).await.unwrap();
            tx.commit().await.map(|()| produced)
        };
        behind.proxy.begin();
        let lost = produce().await.expect_err("the answer is lost");
        assert!(lost.as_database_error().is_none(), "{fate:?}: {lost:?}");
        let again = produce().await.unwrap();
        assert_eq!((again.duplicate, behind.stored().await), (is_stored, 1), "{fate:?}");
        pool.close().await;
    }
}

/// Lines of `produce --ndjson`, each with an idempotency key or without.
fn lines(count: usize, has_keys: bool) -> String {
    let mut lines = String::new();
    for number in 0..count {
        let key = if has_keys { format!(", \"idempotency_key\": \"line-{number}\"") } else { String::new() };
        writeln!(lines, "{{\"payload\": {number}{key}}}").unwrap();
    }
    lines
}

/// Goal: with idempotency keys a lost answer costs nothing; without them it stops, says that nobody knows, and which lines.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_command_line_goes_on_after_a_lost_commit_only_where_that_is_safe() {
    let verbs = Verbs::declare(STREAMS).await;
    let stored = async || verbs.project.number("select count(*) from {schema}.message_log_1").await;
    let produce = |fate: Fate, has_keys: bool, url: &str| {
        let proxy = Proxy::of_commits(url, move |commit| if commit == 2 { fate } else { Fate::Answered });
        proxy.begin();
        let flags = ["produce", "orders", "--ndjson", "--batch", "10", "--output", "json"];
        let arguments = [&["--database-url", proxy.url()], &flags[..]].concat();
        let (status, stdout, stderr) = verbs.program.run_with_input(&arguments, lines(30, has_keys).as_bytes());
        assert_eq!(proxy.lost(), 1, "{stderr}");
        (status.code().unwrap(), stdout, stderr)
    };
    let url = verbs.project.database.url().await;
    for (round, fate) in [(1, Fate::ReplyLost), (2, Fate::RequestLost), (3, Fate::HungUp)] {
        let (code, stdout, stderr) = produce(fate, true, &url);
        assert_eq!(code, 0, "{fate:?}: {stderr}");
        let answer: serde_json::Value = serde_json::from_str(&stdout).unwrap();
        let told = answer["produced"].as_i64().unwrap() + answer["duplicates"].as_i64().unwrap();
        assert_eq!((told, stored().await), (30, 30), "{fate:?}, round {round}: {answer}");
        if round == 1 {
            assert_eq!(answer["first_id"], 1, "{answer}");
            verbs.project.run("delete from {schema}.message_log_1; delete from {schema}.idempotency_key_1").await;
            let (code, ..) = produce(Fate::RequestLost, true, &url);
            assert_eq!((code, stored().await), (0, 30));
        }
    }
    verbs.project.run("delete from {schema}.message_log_1").await;
    for (fate, expected) in [(Fate::ReplyLost, 20), (Fate::RequestLost, 10)] {
        let (code, stdout, stderr) = produce(fate, false, &url);
        assert_eq!((code, stdout.as_str()), (1, ""), "{fate:?}: {stderr}");
        for part in ["lines 11 to 20", "nobody knows whether it is stored", "everything up to line 10 is stored"] {
            assert!(stderr.contains(part), "{fate:?} does not say {part:?}: {stderr}");
        }
        assert_eq!(stored().await, expected, "{fate:?}");
        verbs.project.run("delete from {schema}.message_log_1").await;
    }
}
