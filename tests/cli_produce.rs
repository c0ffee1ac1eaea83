//! `produce`: one message or many lines, all of a batch or nothing of it, and errors that name the line.

use std::{fmt::Write, sync::Mutex, time::Duration};

use base64::{Engine as _, prelude::BASE64_STANDARD};

use crate::support::{engine::done, verbs::Verbs, wait_for};

const STREAMS_TOML: &str = r#"
[streams.orders]
max_payload = "2KiB"
[groups.email]
stream = "orders"
handler = "email.wasm"
slots = 64
"#;

impl Verbs {
    async fn stored(&self) -> i64 {
        self.project.number("select count(*) from {schema}.message_log_1").await
    }

    /// Produces these lines; they must be refused with exit 1 and every part said.
    fn bad_lines(&self, lines: &str, more: &[&str], parts: &[&str]) {
        self.file("lines.ndjson", lines);
        let arguments: Vec<&str> =
            ["produce", "orders", "--ndjson", "--file", "lines.ndjson"].iter().chain(more).copied().collect();
        self.refused(&arguments, 1, parts);
    }
}

#[tokio::test]
async fn one_message_from_a_file_or_standard_input_byte_for_byte() {
    let verbs = Verbs::declare(STREAMS_TOML).await;
    verbs.file("payload.bin", [0, 255, b'\n']);
    let flags =
        ["--key", "k;'\"", "--header", "a=b=c", "--header", "ü=", "--routing-key", "eu", "--content-type", "x/y"];
    let arguments: Vec<&str> = ["produce", "orders", "--file", "payload.bin"].into_iter().chain(flags).collect();
    assert_eq!(verbs.text(&arguments), "message 1\n");
    let answer = verbs.run_with_input(&["produce", "orders", "--file", "-", "--output", "json"], b"text");
    let json: serde_json::Value = serde_json::from_str(&answer.stdout).expect("JSON");
    assert_eq!(json, serde_json::json!({"produced": 1, "duplicates": 0, "superseded": 0, "first_id": 2, "last_id": 2}));
    assert_eq!(verbs.run_with_input(&["produce", "orders"], b"").stdout, "message 3\n", "0 bytes are a payload");
    let stored = verbs
        .project
        .number(
            r#"select count(*) from {schema}.message_log_1 where (id = 1 and payload = '\x00ff0a' and message_key = 'k;''"'
                and headers = '{"a": "b=c", "ü": ""}' and routing_key = 'eu' and content_type = 'x/y')
                or (id = 2 and payload = 'text') or (id = 3 and payload = '')"#,
        )
        .await;
    assert_eq!(stored, 3);
}

#[tokio::test]
async fn an_idempotency_key_stores_a_message_once() {
    let verbs = Verbs::declare(STREAMS_TOML).await;
    let produce =
        |payload: &[u8]| verbs.run_with_input(&["produce", "orders", "--idempotency-key", "it's \\once"], payload);
    assert_eq!(produce(b"one").stdout, "message 1\n");
    assert_eq!(produce(b"one").stdout, "a duplicate of message 1, nothing stored\n");
    let other = produce(b"another");
    assert!(other.code == 1 && other.stderr.contains("(MS007)") && other.stderr.contains("hint: "), "{other:?}");
    // Among lines the key finds the line.
    let lines = "{\"payload\": 1}\n{\"payload\": 2, \"idempotency_key\": \"it's \\\\once\"}\n";
    verbs.bad_lines(lines, &[], &["line 2: idempotency key", "(MS007)", "nothing is stored"]);
    let again = "{\"payload\": \"x\", \"idempotency_key\": \"a\"}\n".repeat(3);
    verbs.file("again.ndjson", again);
    let answer = verbs.json(&["produce", "orders", "--ndjson", "--file", "again.ndjson"]);
    assert_eq!((&answer["produced"], &answer["duplicates"]), (&1.into(), &2.into()));
    assert_eq!(verbs.stored().await, 2);
}

#[tokio::test]
async fn a_delayed_message_is_stored_with_its_time() {
    let verbs = Verbs::declare(STREAMS_TOML).await;
    verbs.run_with_input(&["produce", "orders", "--delay", "1h"], b"a");
    verbs.run_with_input(&["produce", "orders", "--deliver-after", "2030-01-01T01:00:00+01:00"], b"b");
    let lines = "{\"payload\": 1, \"delay\": \"1h\"}\n{\"payload\": 1, \"deliver_after\": \"2030-01-01T00:00:00Z\"}\n";
    verbs.file("lines.ndjson", lines);
    verbs.text(&["produce", "orders", "--ndjson", "--file", "lines.ndjson"]);
    let in_an_hour = "deliver_after between created_at + interval '59 minutes' and created_at + interval '61 minutes'";
    let later = format!("select count(*) from {{schema}}.message_log_1 where {in_an_hour}");
    assert_eq!(verbs.project.number(&later).await, 2);
    let at = "select count(*) from {schema}.message_log_1 where deliver_after = '2030-01-01T00:00:00Z'";
    assert_eq!(verbs.project.number(at).await, 2);
    verbs.refused(&["produce", "orders", "--delay", "soon"], 2, &["not a duration"]);
    verbs.refused(&["produce", "orders", "--deliver-after", "soon"], 2, &["not a time"]);
}

#[tokio::test]
async fn exactly_the_limit_is_stored_and_one_more_is_refused() {
    let verbs = Verbs::declare(STREAMS_TOML).await;
    assert_eq!(verbs.run_with_input(&["produce", "orders"], &[0; 2048]).code, 0);
    let over = verbs.run_with_input(&["produce", "orders"], &[0; 2049]);
    assert!(
        over.code == 1 && over.stderr.contains("payload has 2049 bytes, more than max_payload (2048) (MS004)"),
        "{over:?}"
    );
    let line = |bytes: usize| format!("{{\"payload_base64\": \"{}\"}}\n", BASE64_STANDARD.encode(vec![255; bytes]));
    verbs.bad_lines(
        &(line(2048) + &line(2049)),
        &[],
        &["line 2: payload of the message has 2049 bytes", "nothing is stored"],
    );
    verbs.file("lines.ndjson", line(2048));
    verbs.text(&["produce", "orders", "--ndjson", "--file", "lines.ndjson"]);
    assert_eq!(verbs.stored().await, 2);
}

#[tokio::test]
async fn a_bad_line_stops_and_nothing_of_its_batch_is_stored() {
    let verbs = Verbs::declare(STREAMS_TOML).await;
    let good = |count: usize| "{\"payload\": {\"n\": 1}}\n".repeat(count);
    let lines = good(12) + "{\"payload\": }\n" + &good(5);
    verbs.bad_lines(
        &lines,
        &["--batch", "5"],
        &["line 13: not valid JSON at column 13", "everything up to line 10 is stored", "tail -n +11"],
    );
    assert_eq!(verbs.stored().await, 10);
    // What only the database finds wrong is traced to its line as well; blank lines count.
    let lines = good(4) + "\n" + &good(3) + "{\"payload\": 1, \"key\": \"\"}\n";
    verbs.bad_lines(
        &lines,
        &["--batch", "6"],
        &["line 9: key of the message has 0 bytes (MS003)", "everything up to line 7 is stored"],
    );
    assert_eq!(verbs.stored().await, 16);
    for (line, part) in [
        ("{\"payload\": 1, \"headers\": {\"a\": \"\\ud800\"}}", "line 1: field `headers`: "),
        ("{\"payload\": 1, \"headers\": {\"a\": \"\\u0000\"}}", "NUL character"),
        ("{\"payload\": 1, \"key\": \"\\udc00x\"}", "line 1: field `key`: "),
        ("{\"payload\": 1, \"concurrency\": \"ordered\"}", "has no key"),
        ("{\"payload\": 1, \"key\": \"a\", \"rank\": 1}", "(MS005)"),
        ("{\"payload\": 1, \"deliver_after\": \"0000-01-01T00:00:00Z\"}", "line 1"),
    ] {
        verbs.bad_lines(line, &[], &[part, "nothing is stored"]);
    }
    assert_eq!(verbs.stored().await, 16);
}

#[tokio::test]
async fn payloads_of_any_bytes_are_stored_as_they_are() {
    let verbs = Verbs::declare(STREAMS_TOML).await;
    let lines = r#"{"payload_base64": "AAH/"}
{"payload": "\ud800 \u0000"}
{"payload": {"b": 1.0, "a": 12345678901234567890}}
{"payload_base64": ""}
{"payload": null, "key": "gone"}
"#;
    let answer = verbs.run_with_input(&["produce", "orders", "--ndjson"], lines.as_bytes());
    assert_eq!((answer.code, answer.stdout.as_str()), (0, ""), "{answer:?}");
    assert!(answer.stderr.contains("5 messages produced in "), "{answer:?}");
    let stored = verbs
        .project
        .number(
            r#"select count(*) from {schema}.message_log_1 where (id = 1 and payload = '\x0001ff')
                or (id = 2 and payload = convert_to('"\ud800 \u0000"', 'UTF8'))
                or (id = 3 and payload = convert_to('{"b": 1.0, "a": 12345678901234567890}', 'UTF8')) or (id = 4 and payload = '')
                or (id = 5 and payload is null and message_key = 'gone')"#,
        )
        .await;
    assert_eq!(stored, 5);
}

#[tokio::test]
async fn wrong_usage_and_unknown_streams_show_the_way() {
    let verbs = Verbs::declare(STREAMS_TOML).await;
    verbs.refused(&["produce", "ordres"], 1, &["no stream \"ordres\"; did you mean \"orders\"?"]);
    verbs.refused(&["produce", "orders", "--file", "nowhere"], 1, &["open nowhere: No such file"]);
    verbs.refused(&["produce", "orders", "--header", "novalue"], 2, &["name=value"]);
    verbs.refused(&["produce", "orders", "--ndjson", "--key", "k"], 2, &["--key"]);
    verbs.refused(&["produce", "orders", "--delay", "1s", "--deliver-after", "2030-01-01T00:00:00Z"], 2, &["--delay"]);
    verbs.refused(&["produce", "orders", "--batch", "0", "--ndjson"], 2, &["--batch"]);
    assert_eq!(verbs.stored().await, 0);
}

/// Goal: a lost connection stores nothing twice and loses nothing, also when it was lost in the middle of a commit.
/// Method: every connection of the database is ended again and again while lines with idempotency keys are produced.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_connections_store_every_line_with_an_idempotency_key_once() {
    const COUNT: usize = 20_000;
    let verbs = std::sync::Arc::new(Verbs::declare(STREAMS_TOML).await);
    let line = |number| format!("{{\"payload\": {number}, \"idempotency_key\": \"{number}\"}}\n");
    verbs.file("lines.ndjson", (0..COUNT).map(line).collect::<String>());
    let ours = "select array_agg(pid) from pg_stat_activity where datname = current_database()";
    let pool = &verbs.project.database.pool;
    let ours: Vec<i32> = sqlx::query_scalar(ours).fetch_one(pool).await.unwrap();
    let runs = std::sync::Arc::clone(&verbs);
    let mut run = tokio::task::spawn_blocking(move || {
        runs.run(&["produce", "orders", "--ndjson", "--file", "lines.ndjson", "--output", "json"])
    });
    let mut ended = 0_i64;
    let answer = loop {
        tokio::select! {
            answer = &mut run => break answer.expect("it ran"),
            () = tokio::time::sleep(Duration::from_millis(300)) => {}
        }
        // Not before it has begun to produce: opening the database is not what is looked at here.
        let others = "select count(pg_terminate_backend(pid)) from pg_stat_activity where datname = current_database()
            and pid <> all ($1) and exists (select from millstream.message_log_1)";
        let others = sqlx::query_scalar::<_, i64>(others).bind(&ours).fetch_one(pool).await;
        ended += others.unwrap_or_default();
    };
    assert_eq!(answer.code, 0, "{answer:?}");
    assert!(ended > 0, "no connection was ended");
    let json: serde_json::Value = serde_json::from_str(&answer.stdout).expect("JSON");
    assert_eq!(
        json["produced"].as_u64().zip(json["duplicates"].as_u64()).map(|(new, known)| new + known),
        Some(COUNT as u64)
    );
    let stored = "select count(distinct payload) * 1000000 + count(*) from {schema}.message_log_1";
    assert_eq!(verbs.project.number(stored).await, COUNT as i64 * 1_000_001, "each once");
}

/// Must show: 100,000 messages of 1 KiB by `produce --ndjson` are all delivered, and no row of theirs is left.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hundred_thousand_lines_are_delivered_and_leave_no_row() {
    const COUNT: usize = 100_000;
    let verbs = Verbs::declare(STREAMS_TOML).await;
    let mut lines = String::with_capacity(COUNT * 1040);
    let filler = "x".repeat(990);
    for number in 0..COUNT {
        writeln!(lines, "{{\"payload\": {{\"number\": {number}, \"filler\": \"{filler}\"}}}}").expect("a string");
    }
    verbs.file("lines.ndjson", lines);
    let answer = verbs.json(&["produce", "orders", "--ndjson", "--file", "lines.ndjson"]);
    assert_eq!(
        answer,
        serde_json::json!({"produced": COUNT, "duplicates": 0, "superseded": 0, "first_id": 1, "last_id": COUNT})
    );
    let seen = std::sync::Arc::new(Mutex::new(vec![0_u8; COUNT]));
    let notes = std::sync::Arc::clone(&seen);
    let host = verbs
        .project
        .host("email", move |message| {
            let payload = message.payload.expect("a payload");
            let digits = payload[11..]
                .iter()
                .take_while(|byte| byte.is_ascii_digit())
                .fold(0, |n, d| n * 10 + usize::from(d - b'0'));
            notes.lock().expect("no panic")[digits] += 1;
            done()
        })
        .await;
    let all = || seen.lock().expect("no panic").iter().all(|times| *times == 1);
    wait_for("the deliveries", Duration::from_secs(180), async || all()).await;
    let left = "select (select count(*) from {schema}.dead_letter) + (select count(*) from {schema}.claim)
        + (select count(*) from {schema}.exception) + (select count(*) from {schema}.cursor_gap)";
    wait_for("nothing is left over", Duration::from_secs(60), async || verbs.project.number(left).await == 0).await;
    let group = &verbs.json(&["groups", "email"])[0];
    assert_eq!(
        (&group["lag"], &group["lag_exact"], &group["oldest_age_ms"]),
        (&0.into(), &true.into(), &serde_json::Value::Null)
    );
    host.drain().await;
}
