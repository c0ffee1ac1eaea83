//! Every way of producing carries a message's key options to the log, and leaves to the stream's policy what it leaves open.

use std::sync::Arc;

use millstream::{
    client::{Client, Error, ProduceOptions},
    engine::{self, NewEntry},
    handler::{Concurrency, Handler, NewMessage},
};
use serde_json::json;

use crate::support::{PATIENCE, engine::text, handlers, verbs::Verbs, wait_for};

/// Group `g` is the one that the tests' own settings of `flaky` speak of.
const STREAMS_TOML: &str = r#"
    [streams.orders]
    [streams.receipts]
    key = { concurrency = "exclusive" }
    [[streams.receipts.key_rules]]
    match = "acct-*"
    concurrency = "ordered"
    [[streams.receipts.key_rules]]
    match = "state-*"
    compaction = true
    [groups.g]
    stream = "orders"
    handler = "flaky.wasm"
"#;

/// What is asked for, and what stands in the log then.
struct Case {
    key: &'static str,
    concurrency: Option<Concurrency>,
    compaction: Option<bool>,
    rank: Option<i64>,
    stored: &'static str,
}

const CASES: [Case; 8] = {
    const fn case(
        key: &'static str,
        concurrency: Option<Concurrency>,
        compaction: Option<bool>,
        rank: Option<i64>,
        stored: &'static str,
    ) -> Case {
        Case { key, concurrency, compaction, rank, stored }
    }
    use Concurrency::{Exclusive, Ordered, Parallel};
    [
        case("all", Some(Ordered), Some(true), Some(7), "ordered 7"),
        case("none", None, None, None, "exclusive"),
        case("parallel", Some(Parallel), Some(true), None, "parallel 0"),
        case("acct-1", None, None, None, "ordered"),
        case("acct-2", Some(Exclusive), Some(true), Some(3), "exclusive 3"),
        case("state-1", None, None, Some(9), "exclusive 9"),
        case("state-2", None, Some(false), None, "exclusive"),
        case("state-3", Some(Parallel), None, None, "parallel 0"),
    ]
};

/// What the messages after `last` stand for in the log, in the order of the cases.
async fn stored(verbs: &Verbs, last: i64) -> Vec<String> {
    let sql = "select concat_ws(' ', concurrency, compaction_rank) from {schema}.message_log_2 where id > $1
        order by array_position($2, message_key::text)";
    let keys: Vec<_> = CASES.iter().map(|case| case.key).collect();
    let query = sqlx::query_scalar(verbs.project.database.schema.sql(sql)).bind(last).bind(keys);
    query.fetch_all(&verbs.project.database.pool).await.expect("read the log")
}

/// A value, or null, as SQL.
fn sql<T: std::fmt::Display>(value: Option<T>) -> String {
    value.map_or("null".to_owned(), |value| format!("'{value}'"))
}

async fn by_sql(verbs: &Verbs) {
    for case in &CASES {
        let produce = format!(
            "select {{schema}}.produce('receipts', 'x', key => '{}', concurrency => {}, compaction => {}, rank => {})",
            case.key,
            sql(case.concurrency.map(Concurrency::as_str)),
            sql(case.compaction),
            sql(case.rank)
        );
        verbs.project.run(&produce).await;
    }
}

async fn by_sql_batch(verbs: &Verbs) {
    let array = |of: &dyn Fn(&Case) -> String| CASES.iter().map(of).collect::<Vec<_>>().join(", ");
    let produce = format!(
        "select {{schema}}.produce_batch('receipts', array[{}]::bytea[], p_keys => array[{}], p_concurrencies => array[{}], \
         p_compactions => array[{}]::boolean[], p_ranks => array[{}]::bigint[])",
        array(&|_| "'x'".to_owned()),
        array(&|case| sql(Some(case.key))),
        array(&|case| sql(case.concurrency.map(Concurrency::as_str))),
        array(&|case| sql(case.compaction)),
        array(&|case| sql(case.rank)),
    );
    verbs.project.run(&produce).await;
}

async fn by_engine(verbs: &Verbs) {
    let message = |case: &Case| NewMessage {
        key: Some(case.key.to_owned()),
        concurrency: case.concurrency,
        compaction: case.compaction,
        rank: case.rank,
        ..text("x")
    };
    verbs.project.produce("receipts", &CASES.iter().map(message).collect::<Vec<_>>()).await;
}

fn by_flags(verbs: &Verbs) {
    for case in &CASES {
        let mut arguments = vec!["produce".to_owned(), "receipts".into(), "--key".into(), case.key.into()];
        if let Some(mode) = case.concurrency {
            arguments.extend(["--concurrency".to_owned(), mode.as_str().to_owned()]);
        }
        match case.compaction {
            Some(true) => arguments.push("--compaction".to_owned()),
            Some(false) => arguments.extend(["--compaction".to_owned(), "false".to_owned()]),
            None => {}
        }
        if let Some(rank) = case.rank {
            arguments.extend(["--rank".to_owned(), rank.to_string()]);
        }
        let arguments: Vec<_> = arguments.iter().map(String::as_str).collect();
        let answer = verbs.run_with_input(&arguments, b"x");
        assert_eq!(answer.code, 0, "{answer:?}");
    }
}

fn by_lines(verbs: &Verbs) {
    let line = |case: &Case| {
        json!({ "payload": "x", "key": case.key, "concurrency": case.concurrency.map(Concurrency::as_str),
            "compaction": case.compaction, "rank": case.rank })
        .to_string()
    };
    let lines = CASES.iter().map(line).collect::<Vec<_>>().join("\n");
    let answer = verbs.run_with_input(&["produce", "receipts", "--ndjson"], lines.as_bytes());
    assert_eq!(answer.code, 0, "{answer:?}");
}

async fn by_outbox(verbs: &Verbs) {
    let command = |case: &Case| {
        let told = json!({ "do": "produce", "key": case.key, "concurrency": case.concurrency.map(Concurrency::as_str),
            "compaction": case.compaction, "rank": case.rank });
        text(&told.to_string())
    };
    let handler: Arc<dyn Handler> = Arc::new(handlers::flaky(|_| {}).await);
    verbs.project.produce("orders", &CASES.iter().map(command).collect::<Vec<_>>()).await;
    let host = verbs.project.host_with(&[("g", handler)]).await;
    let last = "select count(*) from {schema}.message_log_1 l, {schema}.cursor c where l.id > c.claimed";
    wait_for("all have produced", PATIENCE, async || {
        verbs.project.number(last).await == 0 && verbs.project.left_over().await == 0
    })
    .await;
    host.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_way_of_producing_carries_the_options_of_a_key() {
    let verbs = Verbs::declare(STREAMS_TOML).await;
    let expected: Vec<_> = CASES.iter().map(|case| case.stored).collect();
    let last = async || verbs.project.number("select coalesce(max(id), 0) from {schema}.message_log_2").await;
    for way in ["sql", "sql batch", "engine", "flags", "lines", "outbox"] {
        let before = last().await;
        match way {
            "sql" => by_sql(&verbs).await,
            "sql batch" => by_sql_batch(&verbs).await,
            "engine" => by_engine(&verbs).await,
            "flags" => by_flags(&verbs),
            "lines" => by_lines(&verbs),
            _ => by_outbox(&verbs).await,
        }
        assert_eq!(stored(&verbs, before).await, expected, "by {way}");
    }
}

/// What the command line is asked in vain says how to ask.
#[tokio::test]
async fn wrong_options_of_a_key_are_refused() {
    let verbs = Verbs::declare(STREAMS_TOML).await;
    let file = verbs.file("x", "x");
    let produce = |more: &[&str], code, parts: &[&str]| {
        let arguments = [&["produce", "receipts", "--file", file.to_str().unwrap()], more].concat();
        verbs.refused(&arguments, code, parts);
    };
    produce(&["--key", "k", "--concurrency", "serial"], 2, &["write parallel, exclusive or ordered"]);
    produce(&["--concurrency", "ordered"], 2, &["--key"]);
    produce(&["--rank", "1"], 2, &["--key"]);
    produce(&["--key", "k", "--rank", "1"], 1, &["MS005"]);
    produce(&["--key", "k", "--compaction", "--rank", "-1"], 1, &["MS006"]);
    produce(&["--ndjson", "--key", "k"], 2, &["cannot be used with"]);
    assert_eq!(verbs.project.number("select count(*) from {schema}.message_log_2").await, 0);
}

/// L5. Goal: the bound of a key is 1,024 bytes of UTF-8, whatever the characters and whichever way it comes; one byte more
/// is refused by name, and nothing of its call is stored, nothing remembered. Method: keys of characters of one to four
/// bytes at the bound and a byte, or a character, beyond, from SQL, a batch, the program, its lines, and the client.
#[tokio::test]
async fn l5_a_key_has_1024_bytes_at_most_whatever_its_characters() {
    let verbs = Verbs::declare(STREAMS_TOML).await;
    let project = &verbs.project;
    let url = format!("{}&options=-csearch_path%3Dpublic", project.database.url().await);
    let client = Client::connect(&url).await.expect("connect");
    let orders = client.stream::<str>("orders");
    let in_sql = |key: &str| {
        format!(
            "select {{schema}}.produce('orders', 'x', key => '{key}', idempotency_key => md5('{key}'), concurrency => 'ordered')"
        )
    };
    let mut session = project.session().await;
    let mut fine = 0;
    for character in ["k", "é", "€", "𝄞"] {
        let width = character.len();
        let full = character.repeat(1024 / width) + &"k".repeat(1024 % width);
        assert_eq!(full.len(), 1024);
        for longer in [full.clone() + "k", full.clone() + character, character.repeat(1024 / width) + character] {
            let remembered = "select count(*) from {schema}.idempotency_key_1";
            let before = (project.number(remembered).await, fine);
            let refused = session.try_run(&in_sql(&longer)).await.unwrap_err();
            assert_eq!(refused.as_database_error().and_then(|error| error.code()).as_deref(), Some("MS003"));
            let message = NewMessage { key: Some(longer.clone()), ..text("x") };
            let batch = [text("fine"), message];
            let entries = batch.each_ref().map(|message| NewEntry { message, deliver_after: None });
            let mut tx = project.database.pool.begin().await.unwrap();
            let refused = engine::produce(&project.database, &mut tx, "orders", &entries).await.unwrap_err();
            assert!(refused.to_string().contains("MS003"), "{refused}");
            tx.rollback().await.unwrap();
            let options = ProduceOptions { message_key: Some(longer.clone()), ..ProduceOptions::default() };
            let refused = orders.produce("x", options).await.unwrap_err();
            assert!(matches!(refused, Error::KeyInvalid(_)), "{refused:?}");
            verbs.refused(&["produce", "orders", "--key", &longer], 1, &["1024 bytes"]);
            let lines = format!("{{\"payload\": 1}}\n{{\"payload\": 2, \"key\": \"{longer}\"}}\n");
            verbs.file("lines.ndjson", lines);
            verbs.refused(&["produce", "orders", "--ndjson", "--file", "lines.ndjson"], 1, &["line 2", "1024 bytes"]);
            let stored = project.number("select count(*) from {schema}.message_log_1").await;
            assert_eq!((project.number(remembered).await, stored), before, "nothing is stored, {} bytes", longer.len());
        }
        session.run(&in_sql(&full)).await;
        project.produce("orders", &[NewMessage { key: Some(full.clone()), ..text("x") }]).await;
        let options = ProduceOptions { message_key: Some(full.clone()), ..ProduceOptions::default() };
        orders.produce("x", options).await.unwrap();
        verbs.text(&["produce", "orders", "--key", &full, "--file", "lines.ndjson"]);
        fine += 4;
        let whole = format!("select count(*) from {{schema}}.message_log_1 where message_key = '{full}'");
        assert_eq!(project.number(&whole).await, 4, "{character}");
    }
}
