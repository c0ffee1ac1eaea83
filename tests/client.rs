//! The Rust client: what it answers, what its transactions hold together, and how concurrent produces share them.
//! What the statements below it do is in produce.rs and keys_produce.rs; here it is reached as another program would.

use std::{
    collections::{BTreeMap, HashSet},
    time::{Duration, UNIX_EPOCH},
};

use millstream::client::{Client, Concurrency, Error, ProduceOptions, Settings, Stream};
use sqlx::Row;
use tokio::{task::JoinSet, time::timeout};

use crate::support::{engine::Project, wait_for};

/// A ceiling against hangs, and no measure of speed.
const LIMIT: Duration = Duration::from_secs(60);

const STREAMS: &str = "[streams.orders]\nmax_payload = \"100B\"\n[streams.receipts]";

async fn client(project: &Project) -> Client {
    // The test cluster's user has the name of our schema, where its unqualified tables would go.
    let url = format!("{}&options=-csearch_path%3Dpublic", project.database.url().await);
    Client::connect(&url).await.expect("connect")
}

fn plain() -> ProduceOptions {
    ProduceOptions::default()
}

fn once(key: &str) -> ProduceOptions {
    ProduceOptions { idempotency_key: Some(key.to_owned()), ..plain() }
}

fn keyed(key: &str, mode: Concurrency) -> ProduceOptions {
    ProduceOptions { message_key: Some(key.to_owned()), concurrency: Some(mode), ..plain() }
}

async fn stored(project: &Project) -> i64 {
    project
        .number("select (select count(*) from {schema}.message_log_1) + (select count(*) from {schema}.message_log_2)")
        .await
}

/// Goal: every option reaches the log, values are JSON, raw bytes stay as they are, and `None` is a tombstone.
#[tokio::test]
async fn everything_that_is_given_is_stored() {
    let project = Project::declare(STREAMS).await;
    let client = client(&project).await;
    let options = ProduceOptions {
        message_key: Some("k".to_owned()),
        concurrency: Some(Concurrency::Exclusive),
        compaction: Some(true),
        rank: Some(7),
        idempotency_key: Some("once".to_owned()),
        routing_key: Some("eu.billing".to_owned()),
        headers: BTreeMap::from([("a".to_owned(), "1".to_owned())]),
        content_type: Some("application/x".to_owned()),
        deliver_after: Some(UNIX_EPOCH + Duration::from_secs(1_924_992_000)),
        delay: Some(Duration::from_secs(1)),
    };
    let json = client.stream::<[u32]>("orders");
    assert_eq!(json.produce([1, 2].as_slice(), options).await.unwrap().id, 1);
    assert_eq!(json.produce([3].as_slice(), plain()).await.unwrap().id, 2);
    let raw = client.raw_stream("orders");
    let delayed = ProduceOptions { delay: Some(Duration::from_secs(3600)), ..plain() };
    assert_eq!(raw.produce(b"\0\xff".as_slice(), delayed).await.unwrap().id, 3);
    let gone = ProduceOptions { compaction: Some(true), rank: Some(6), message_key: Some("k".to_owned()), ..plain() };
    let tombstone = json.produce(None, gone).await.unwrap();
    assert!(tombstone.superseded && !tombstone.duplicate && tombstone.id == 4, "it is told that rank 7 has won");
    for check in [
        r#"id = 1 and payload = convert_to('[1,2]', 'UTF8') and message_key = 'k' and concurrency = 'exclusive'
            and compaction_rank = 7 and routing_key = 'eu.billing' and headers = '{"a": "1"}' and content_type = 'application/x'
            and deliver_after = '2031-01-01T00:00:00Z'"#,
        "id = 2 and payload = convert_to('[3]', 'UTF8') and content_type = 'application/json' and message_key is null",
        r"id = 3 and payload = '\x00ff' and content_type is null
            and deliver_after between clock_timestamp() + interval '50 minutes' and clock_timestamp() + interval '1 hour'",
        "id = 4 and payload is null and content_type is null",
    ] {
        let sql = format!("select count(*) from {{schema}}.message_log_1 where {check}");
        assert_eq!(project.number(&sql).await, 1, "{check}");
    }
    client.close().await;
    assert!(matches!(json.produce([1].as_slice(), plain()).await, Err(Error::Closed)));
}

/// Goal: a caller can branch on what was wrong, and a person reads what to do.
#[tokio::test]
async fn every_refusal_has_a_kind_of_its_own_and_stores_nothing() {
    let project = Project::declare(STREAMS).await;
    let client = client(&project).await;
    let orders = client.stream::<str>("orders");
    let long = "x".repeat(200);
    let key = |key: &str| ProduceOptions { message_key: Some(key.to_owned()), ..plain() };
    let compacted = |rank| ProduceOptions { compaction: Some(true), rank: Some(rank), ..key("k") };
    orders.produce("first", once("taken")).await.unwrap();
    let no_key = ProduceOptions { compaction: Some(true), ..plain() };
    type Expected = fn(&Error) -> bool;
    let refused: [(Result<_, Error>, Expected); 9] = [
        (client.stream::<str>("ordres").produce("x", plain()).await, |error| matches!(error, Error::UnknownStream(_))),
        (orders.produce("x", no_key).await, |error| matches!(error, Error::KeyMissing(_))),
        (orders.produce("x", key("")).await, |error| matches!(error, Error::KeyInvalid(_))),
        (orders.produce(&*long, plain()).await, |error| matches!(error, Error::PayloadTooLarge(_))),
        (orders.produce("x", ProduceOptions { rank: Some(1), ..key("k") }).await, |error| {
            matches!(error, Error::ImpossibleOptions(_))
        }),
        (orders.produce("x", compacted(-1)).await, |error| matches!(error, Error::NegativeRank(_))),
        (orders.produce("other", once("taken")).await, |error| matches!(error, Error::IdempotencyConflict(_))),
        (orders.produce("x", once("")).await, |error| matches!(error, Error::AttributeInvalid(_))),
        (orders.produce("x", key("a\0b")).await, |error| matches!(error, Error::AttributeInvalid(_))),
    ];
    for (result, is_expected) in refused {
        let error = result.expect_err("it is refused");
        assert!(is_expected(&error), "{error:?}");
        assert!(!format!("{error} {error:?}").contains("xxx"), "an error shows no payload");
    }
    let batch = std::iter::repeat_n(("x", plain()), 50_001);
    assert!(matches!(orders.produce_batch(batch).await, Err(Error::BatchTooLarge(_))));
    let mixed = orders.produce_batch([("x", plain()), (&*long, plain())]).await.expect_err("its second is refused");
    assert!(mixed.to_string().contains("message 2"), "{mixed}");
    assert_eq!(orders.produce_batch::<&str>([]).await.unwrap(), []);
    assert_eq!(stored(&project).await, 1);
    let elsewhere = Client::from_pool(project.database.pool.clone(), "elsewhere").unwrap();
    let error = elsewhere.stream::<str>("orders").produce("x", plain()).await.expect_err("there is nothing");
    assert!(matches!(error, Error::NotInstalled(_)), "{error:?}");
    project.run("create schema \"elsewhere\"").await;
    let error = elsewhere.stream::<str>("orders").produce("x", plain()).await.expect_err("it is empty");
    assert!(matches!(error, Error::NotInstalled(_)), "{error:?}");
    let wrong = Client::connect_with("postgres://u:s3cret@127.0.0.1:1/x", &Settings::default()).await;
    let error = wrong.expect_err("nobody listens").to_string();
    assert!(error.contains("127.0.0.1:1") && !error.contains("s3cret"), "{error}");
}

/// I1, I2, I3, I4, I6 in the path of single produces, which the reference leaves for keyed ones: the first id, the stream as scope, a
/// conflict instead of silence; and in a batch only the duplicates are dropped.
#[tokio::test]
async fn i1_i3_i4_i6_duplicates_answer_the_first_id() {
    let project = Project::declare(STREAMS).await;
    let client = client(&project).await;
    let (orders, receipts) = (client.stream::<str>("orders"), client.stream::<str>("receipts"));
    let first = orders.produce("a", once("k")).await.unwrap();
    let second = orders.produce("a", once("k")).await.unwrap();
    assert!(!first.duplicate && second.duplicate && first.id == second.id, "I3");
    assert!(!receipts.produce("a", once("k")).await.unwrap().duplicate, "I1: the scope is the stream");
    assert!(matches!(orders.produce("b", once("k")).await, Err(Error::IdempotencyConflict(_))), "I4");
    let batch = [("a", once("k")), ("b", once("l")), ("c", plain()), ("b", once("l"))];
    let answers = orders.produce_batch(batch).await.unwrap();
    let duplicates: Vec<bool> = answers.iter().map(|answer| answer.duplicate).collect();
    assert_eq!(duplicates, [true, false, false, true], "I6");
    assert_eq!((answers[0].id, answers[3].id), (first.id, answers[1].id));
    // I2: the window counts from the first accept.
    project.run("update {schema}.idempotency_key_1 set created_at = clock_timestamp() - interval '25 hours'").await;
    assert!(!orders.produce("a", once("k")).await.unwrap().duplicate, "I2: after the window it is a new message");
    assert_eq!(stored(&project).await, 5);
}

/// Goal: 64 tasks that produce one message each share transactions, each hears what became of its own message, one that is
/// no good fails alone, and duplicates stay in the batch. Method: hold the stream's tasks up until all have asked.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_produces_share_transactions_and_a_poison_message_fails_alone() {
    let project = Project::declare(STREAMS).await;
    let client = client(&project).await;
    let orders = client.stream::<str>("orders");
    let mut tasks = JoinSet::new();
    for task in 0..64 {
        let orders = orders.clone();
        tasks.spawn(async move {
            let mut ids = Vec::new();
            for round in 0..16 {
                let payload = format!("{task}.{round}");
                // Pairs of tasks send the same message under one key; task 9 is the poison.
                let (payload, options) = match task {
                    0..=7 => (format!("{}.{round}", task / 2), once(&format!("{}.{round}", task / 2))),
                    9 => ("x".repeat(101), plain()),
                    10..20 => (payload, keyed(&format!("k{}", task % 3), Concurrency::Ordered)),
                    _ => (payload, plain()),
                };
                match orders.produce(&*payload, options).await {
                    Ok(produced) => ids.push((produced.id, produced.duplicate, payload)),
                    Err(Error::PayloadTooLarge(_)) if task == 9 => {}
                    Err(error) => panic!("task {task}: {error:?}"),
                }
            }
            ids
        });
    }
    let mut answers = Vec::new();
    while let Some(joined) = timeout(LIMIT, tasks.join_next()).await.expect("nobody waits for ever") {
        answers.extend(joined.unwrap());
    }
    let duplicates = answers.iter().filter(|(_, duplicate, _)| *duplicate).count();
    assert_eq!((answers.len(), duplicates), (63 * 16, 4 * 16));
    let rows = sqlx::query("select id, convert_from(payload, 'UTF8') from millstream.message_log_1");
    let rows = rows.fetch_all(&project.database.pool).await.unwrap();
    let log: HashSet<(i64, String)> = rows.iter().map(|row| (row.get(0), row.get(1))).collect();
    assert_eq!(log.len(), 59 * 16, "each once");
    for (id, _, payload) in answers {
        assert!(log.contains(&(id, format!("\"{payload}\""))), "{id} is not {payload}");
    }
    let transactions = project.number("select count(distinct xmin::text) from {schema}.message_log_1").await;
    assert!(transactions < 59 * 16 / 2, "{transactions} transactions");
}

/// Goal: messages that arrive together commit together, counted. Method: one worker thread and calls that are all made
/// before the first is answered.
#[tokio::test]
async fn what_is_asked_for_at_once_is_a_handful_of_transactions() {
    let project = Project::declare(STREAMS).await;
    let client = client(&project).await;
    let (orders, receipts) = (client.raw_stream("orders"), client.raw_stream("receipts"));
    let mut tasks = JoinSet::new();
    for number in 0..400_u32 {
        let stream = if number % 4 == 0 { receipts.clone() } else { orders.clone() };
        tasks.spawn(async move { stream.produce(number.to_be_bytes().as_slice(), plain()).await });
    }
    let answers = tasks.join_all().await;
    assert_eq!(answers.iter().filter(|answer| answer.is_ok()).count(), 400);
    assert_eq!(stored(&project).await, 400);
    for (log, bound) in [(1, 8), (2, 8)] {
        let transactions = format!("select count(distinct xmin::text) from {{schema}}.message_log_{log}");
        let transactions = project.number(&transactions).await;
        assert!(transactions <= bound, "{transactions} transactions in log {log}");
    }
}

/// Flights that follow one another keep their connection, but not from others who wait for one: here there is only one. Counted
/// in what is stored between the caller's question and its answer: a handful of flights, where they would keep it for a
/// second otherwise.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_caller_of_the_same_pool_is_served_while_others_produce_without_an_end() {
    const PRODUCERS: i64 = 16;
    let project = Project::declare(STREAMS).await;
    let pool = sqlx::postgres::PgPoolOptions::new().max_connections(1).acquire_timeout(LIMIT);
    let pool = pool.connect(&project.database.url().await).await.unwrap();
    let client = Client::from_pool(pool.clone(), "millstream").expect("a client");
    let mut producing = JoinSet::new();
    for number in 0..PRODUCERS {
        // A flight is of one stream, so whenever one lands those of the other wait for the next.
        let stream = client.stream::<u32>(["orders", "receipts"][usize::from(number % 2 == 0)]);
        producing.spawn(async move {
            loop {
                stream.produce(&1, plain()).await.expect("produce");
            }
        });
    }
    wait_for("they produce", LIMIT, async || stored(&project).await > 100).await;
    let mut meanwhile = Vec::new();
    for _ in 0..21 {
        let before = stored(&project).await;
        let count =
            "select (select count(*) from millstream.message_log_1) + (select count(*) from millstream.message_log_2)";
        let served: i64 = sqlx::query_scalar(count).fetch_one(&pool).await.expect("a connection in time");
        meanwhile.push(served - before);
        wait_for("they go on", LIMIT, async || stored(&project).await > served).await;
    }
    producing.shutdown().await;
    client.close().await;
    let open = "select count(*) from pg_stat_activity where datname = current_database() and state like 'idle in%'";
    wait_for("no transaction is left open", LIMIT, async || project.number(open).await == 0).await;
    pool.close().await;
    meanwhile.sort_unstable();
    let median = meanwhile[meanwhile.len() / 2];
    assert!(median <= 10 * PRODUCERS, "a caller waited for {median} messages of others: {meanwhile:?}");
}

/// Must-show 3, I8. A caller's transaction with an idempotency key, an ordered key and a compacted key stays open: coalesced
/// produces of the same client that meet its locks wait, and everything else goes on past them; then they go on too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_open_transaction_of_a_caller_delays_only_its_own_keys() {
    let project = Project::declare(STREAMS).await;
    let client = client(&project).await;
    let orders = client.stream::<str>("orders");
    let compacted = |key: &str| ProduceOptions { compaction: Some(true), message_key: Some(key.to_owned()), ..plain() };
    let mut open = project.database.pool.begin().await.unwrap();
    let first = orders.produce_in_tx(&mut open, "same", once("once")).await.unwrap();
    orders.produce_in_tx(&mut open, "x", keyed("ordered", Concurrency::Ordered)).await.unwrap();
    orders.produce_in_tx(&mut open, "x", compacted("compacted")).await.unwrap();
    let mut delayed = JoinSet::new();
    for _ in 0..8 {
        for options in [once("once"), keyed("ordered", Concurrency::Ordered), compacted("compacted")] {
            let orders = orders.clone();
            delayed.spawn(async move { orders.produce("same", options).await.unwrap() });
        }
    }
    let waits = "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database()";
    wait_for("some wait", LIMIT, async || project.number(waits).await >= 1).await;
    // Rounds of coalesced produces, each with members that could wait, and each with one more that does.
    for round in 0..5 {
        let mut others = JoinSet::new();
        for number in 0..40 {
            let orders = orders.clone();
            let options = match number % 4 {
                0 => plain(),
                1 => keyed(&format!("other{number}"), Concurrency::Ordered),
                2 => compacted(&format!("more{number}")),
                _ => once(&format!("{round}.{number}")),
            };
            others.spawn(async move { orders.produce("y", options).await.unwrap() });
        }
        let orders = orders.clone();
        delayed.spawn(async move { orders.produce("same", keyed("ordered", Concurrency::Ordered)).await.unwrap() });
        let others = timeout(LIMIT, others.join_all()).await.expect("they do not wait for the open transaction");
        assert!(others.iter().all(|produced| !produced.duplicate && !produced.superseded));
    }
    assert_eq!(delayed.try_join_next().map(drop_result), None, "its own keys wait for it");
    open.commit().await.unwrap();
    let delayed = timeout(LIMIT, delayed.join_all()).await.expect("they go on");
    assert_eq!(delayed.iter().filter(|produced| produced.duplicate && produced.id == first.id).count(), 8, "I8");
    assert_eq!(project.number("select count(*) from {schema}.message_log_1").await, 3 + 200 + 16 + 5);
}

fn drop_result<T, E>(_: Result<T, E>) {}

/// Two tables of a shop, in a schema of its own.
async fn shop(project: &Project) {
    project
        .run(
            "create table public.orders (id integer primary key, status text not null);
             create table public.payment (operation text primary key, order_id integer not null);
             insert into public.orders values (4127, 'unpaid')",
        )
        .await;
}

const PAY: &str = "update orders set status = 'paid' where id = 4127";

const PAID: &str = "select count(*) from public.orders where status = 'paid'";

/// The seed's first walk, I5 and T1: the produce fails inside the closure, so the order is unpaid again and no message
/// exists, on any stream; an error after the side effect does the same to what is in the database, and nothing to the effect.
#[tokio::test]
async fn t1_a_produce_that_fails_in_a_transaction_rolls_the_order_back() {
    let project = Project::declare(STREAMS).await;
    shop(&project).await;
    let client = client(&project).await;
    let (orders, receipts) = (client.stream::<str>("orders"), client.stream::<str>("receipts"));
    let mut sent = 0;
    let too_large = "x".repeat(101);
    let result = client
        .in_transaction(async |tx| {
            sqlx::query(PAY).execute(&mut *tx).await?;
            sent += 1; // the e-mail in the wrong place
            receipts.produce_in_tx(tx, "4127", once("receipt-4127")).await?;
            orders.produce_in_tx(tx, &*too_large, plain()).await?;
            anyhow::Ok(())
        })
        .await;
    let error = result.expect_err("the second produce is refused");
    assert!(matches!(error.downcast_ref(), Some(Error::PayloadTooLarge(_))), "{error:#}");
    assert_eq!((project.number(PAID).await, stored(&project).await), (0, 0));
    assert_eq!(sent, 1, "Jamie holds a confirmation of a payment that never happened");

    let result = client
        .in_transaction(async |tx| {
            sqlx::query(PAY).execute(&mut *tx).await?;
            receipts.produce_in_tx(tx, "4127", once("receipt-4127")).await?;
            sent += 1;
            Err::<(), _>(anyhow::anyhow!("the closure changed its mind"))
        })
        .await;
    assert_eq!(result.expect_err("its own error").to_string(), "the closure changed its mind");
    assert_eq!((project.number(PAID).await, stored(&project).await, sent), (0, 0, 2));

    let produced = client
        .in_transaction(async |tx| {
            sqlx::query(PAY).execute(&mut *tx).await?;
            orders.produce_in_tx(tx, "4127", plain()).await?;
            anyhow::Ok(receipts.produce_in_tx(tx, "4127", once("receipt-4127")).await?)
        })
        .await
        .unwrap();
    assert!(!produced.duplicate, "I5: a rolled-back key is not remembered");
    assert_eq!((project.number(PAID).await, stored(&project).await), (1, 2), "T1");
}

/// T2, T3: a savepoint takes its messages back with it, and the order of statements is the order of a key.
#[tokio::test]
async fn t2_t3_a_savepoint_leaves_nothing_and_statement_order_is_key_order() {
    let project = Project::declare(STREAMS).await;
    let client = client(&project).await;
    let orders = client.stream::<str>("orders");
    let ordered = || keyed("k", Concurrency::Ordered);
    let ids = client
        .in_transaction(async |tx| {
            let first = orders.produce_in_tx(tx, "1", ordered()).await?;
            let mut savepoint = sqlx::Connection::begin(&mut *tx).await?;
            let undone = ProduceOptions { idempotency_key: Some("once".to_owned()), ..ordered() };
            orders.produce_in_tx(&mut savepoint, "2", undone).await?;
            savepoint.rollback().await?;
            let third = orders
                .produce_in_tx(tx, "3", ProduceOptions { idempotency_key: Some("once".to_owned()), ..ordered() })
                .await?;
            assert!(!third.duplicate, "the savepoint's key is not remembered");
            anyhow::Ok((first.id, third.id))
        })
        .await
        .unwrap();
    assert!(ids.0 < ids.1, "T3");
    let order = "select count(*) from (select string_agg(convert_from(payload, 'UTF8'), '' order by id) as all_of_them
        from {schema}.message_log_1) as log where all_of_them = '\"1\"\"3\"'";
    assert_eq!(project.number(order).await, 1, "T2");
}

/// The seed's last walk: a rerun with the same idempotency key and a business constraint changes nothing and answers
/// `duplicate`, whether the closure caught the violation in a savepoint or wrote around it.
#[tokio::test]
async fn a_rerun_with_the_same_key_and_a_constraint_changes_nothing() {
    let project = Project::declare(STREAMS).await;
    shop(&project).await;
    let client = client(&project).await;
    let receipts = client.stream::<str>("receipts");
    let pay = async || {
        client
            .in_transaction(async |tx| {
                let insert = "insert into payment values ('op-1', 4127) on conflict do nothing";
                let inserted = sqlx::query(insert).execute(&mut *tx).await?.rows_affected();
                sqlx::query(PAY).execute(&mut *tx).await?;
                anyhow::Ok((inserted, receipts.produce_in_tx(tx, "4127", once("op-1")).await?))
            })
            .await
            .unwrap()
    };
    let (first, second) = (pay().await, pay().await);
    assert_eq!((first.0, first.1.duplicate, second.0, second.1.duplicate), (1, false, 0, true));
    assert_eq!(first.1.id, second.1.id);
    assert_eq!((project.number("select count(*) from public.payment").await, stored(&project).await), (1, 1));
}

/// How long a caller's transaction may rest is the caller's affair; ours end when the program is frozen in the middle.
#[tokio::test]
async fn a_callers_transaction_may_rest_as_long_as_its_role_allows() {
    let project = Project::declare(STREAMS).await;
    let client = client(&project).await;
    let setting = "select current_setting('idle_in_transaction_session_timeout')";
    let of_callers: Result<String, anyhow::Error> =
        client.in_transaction(async |tx| Ok(sqlx::query_scalar(setting).fetch_one(&mut *tx).await?)).await;
    assert_eq!(of_callers.unwrap(), "0");
    let mut ours = project.database.begin().await.unwrap();
    let of_ours: String = sqlx::query_scalar(setting).fetch_one(&mut *ours).await.unwrap();
    assert_eq!(of_ours, "1min");
    ours.rollback().await.unwrap();
    client.close().await;
}

/// A closure that hides the failure of a statement must not be told that it committed: Postgres answers COMMIT of a failed
/// transaction with a silent rollback.
#[tokio::test]
async fn a_closure_that_hides_a_failed_statement_is_not_committed() {
    let project = Project::declare(STREAMS).await;
    let client = client(&project).await;
    let orders = client.stream::<str>("orders");
    let mut runs = 0;
    let result = client
        .in_transaction(async |tx| {
            runs += 1;
            orders.produce_in_tx(tx, "1", plain()).await?;
            let hidden = sqlx::query("select 1 / 0").execute(&mut *tx).await;
            assert!(hidden.is_err());
            Ok::<(), Error>(())
        })
        .await;
    assert!(matches!(result, Err(Error::Database(_))), "{result:?}");
    assert_eq!((runs, stored(&project).await), (1, 0));
}

/// A transaction that is refused at its COMMIT is known to be rolled back, and is not run again.
#[tokio::test]
async fn a_commit_that_is_refused_is_no_unknown_commit() {
    let project = Project::declare(STREAMS).await;
    // sqlx ends every transaction whose COMMIT failed once more.
    project.database.expect_log("there is no transaction in progress");
    project
        .run("create table public.pair (id integer primary key, other integer references public.pair deferrable initially deferred)")
        .await;
    let client = client(&project).await;
    let orders = client.stream::<str>("orders");
    let mut runs = 0;
    let result = client
        .in_transaction(async |tx| {
            runs += 1;
            orders.produce_in_tx(tx, "1", plain()).await?;
            let insert = sqlx::query("insert into pair values (1, 2)").execute(&mut *tx).await;
            insert.expect("it is checked at the end");
            Ok::<(), Error>(())
        })
        .await;
    assert!(matches!(&result, Err(Error::Refused(refusal)) if refusal.sqlstate == "23503"), "{result:?}");
    assert_eq!((runs, stored(&project).await), (1, 0));
}

/// Goal: a produce whose connection dies before its COMMIT is tried again, and is there once. A transaction of the caller
/// is not. Method: end the backends of the client while it holds nothing, and while the closure runs.
#[tokio::test]
async fn a_lost_connection_is_tried_again_by_produce_and_never_by_in_transaction() {
    let project = Project::declare(STREAMS).await;
    let client = client(&project).await;
    let orders: Stream<str> = client.stream("orders");
    project.database.expect_log("testing the connection on-release");
    orders.produce("1", plain()).await.unwrap();
    let kill = "select count(pg_terminate_backend(pid)) from pg_stat_activity
        where datname = current_database() and pid <> pg_backend_pid()";
    project.number(kill).await;
    orders.produce("2", plain()).await.expect("a fresh connection serves it");
    let mut runs = 0;
    let result = client
        .in_transaction(async |tx| {
            runs += 1;
            orders.produce_in_tx(tx, "3", plain()).await?;
            project.number(kill).await;
            Ok::<(), Error>(())
        })
        .await;
    assert!(matches!(result, Err(Error::Database(_))), "{result:?}");
    assert_eq!((runs, stored(&project).await), (1, 2));
}

/// Work in a transaction may move to another thread, and so may whatever waits for a produce.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_can_be_spawned() {
    let project = Project::declare(STREAMS).await;
    let client = client(&project).await;
    let orders = client.stream::<String>("orders");
    let task = tokio::spawn(async move {
        let payload = "1".to_owned();
        client.in_transaction(async |tx| orders.produce_in_tx(tx, &payload, plain()).await).await
    });
    assert_eq!(task.await.unwrap().unwrap().id, 1);
}

/// A caller that gives up, at whatever moment, leaves no connection of the pool inside a transaction: whatever ran on it next
/// would not be committed.
#[tokio::test]
async fn a_call_that_is_dropped_leaves_no_transaction_open() {
    let project = Project::declare(STREAMS).await;
    let client = client(&project).await;
    project.database.expect_log("there is no transaction in progress"); // a commit was under way already
    let open = "select count(*) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()
        and (state = 'idle in transaction' or state = 'active' and backend_type = 'client backend')";
    for step in 0..80 {
        let call = client.in_transaction(async |tx| {
            sqlx::query("select pg_sleep(0.001)").execute(&mut *tx).await?;
            anyhow::Ok(())
        });
        _ = timeout(Duration::from_micros(50 * step), call).await;
        wait_for("nothing of it is left", LIMIT, async || project.number(open).await == 0).await;
    }
    client.close().await;
}
