//! The real program as a host: its streams.toml, what is produced for it, and what its database says.

use millstream::database::Database;
use serde_json::{Value, json};

use super::{PATIENCE, Program, wait_for};

/// Stands in payloads and secrets. No host may print it.
pub const SECRET: &str = "hush-4f1d";

/// A streams.toml with group `worker`, which runs the `flaky` example on `playground` and may produce to `receipts`.
pub fn playground(host: &str, worker: &str) -> String {
    format!(
        r#"
[host]
listen = "127.0.0.1:0"
{host}
[streams.playground]
[streams.receipts]
[groups.worker]
stream = "playground"
handler = "flaky.wasm"
allow = {{ produce = ["receipts"] }}
{worker}
"#
    )
}

/// A lease short enough to wait for.
pub const SHORT_LEASE: &str = "lease = \"1500ms\"\nheartbeat = \"500ms\"\ndrain_timeout = \"3s\"";

/// Starts `millstream up` on a database, and waits until it is ready.
pub async fn up(program: &mut Program, url: &str) {
    start_up(program, url, &[]);
    program.logged("ready: ").await;
}

/// Starts `millstream up` and does not wait.
pub fn start_up(program: &mut Program, url: &str, more: &[&str]) {
    program.start(&[&["up", "-v", "--database-url", url], more].concat());
}

/// Produces `count` times the same message through SQL, in one transaction; answers their ids.
pub async fn produce(database: &Database, stream: &str, body: Value, count: i32) -> Vec<i64> {
    // Every payload differs, and the function is called for each: JSON ignores the spaces at its end.
    let sql = "select p.id from generate_series(1, $3) as n, lateral {schema}.produce($1, $2 || repeat(' ', n)) as p";
    let produced = sqlx::query_scalar(database.schema.sql(sql)).bind(stream).bind(body.to_string()).bind(count);
    produced.fetch_all(&database.pool).await.expect("produce")
}

/// One command for `flaky`, with the secret in a field that it does not use.
pub async fn tell(database: &Database, mut command: Value, count: i32) -> Vec<i64> {
    command["reason"] = command["reason"].as_str().unwrap_or(SECRET).into();
    produce(database, "playground", command, count).await
}

/// What is in `receipts`. Of deliveries that reported: message and attempt.
pub async fn reports(database: &Database) -> Vec<(i64, i64)> {
    let stream = receipts(database).await;
    let sql = "select coalesce((body->>'id')::bigint, id), coalesce((body->>'attempt')::bigint, 1)
        from (select id, convert_from(payload, 'UTF8')::jsonb as body from {schema}.message_log_{stream_id}) as report order by id";
    let rows = sqlx::query_as(database.schema.stream_sql(sql, stream));
    rows.fetch_all(&database.pool).await.expect("read the reports")
}

/// Waits until `count` messages have reported and nothing is left over; answers the reports.
pub async fn all_reported(database: &Database, count: usize) -> Vec<(i64, i64)> {
    let stream = receipts(database).await;
    let reported = format!("select count(*) from {{schema}}.message_log_{stream}");
    let all = i64::try_from(count).expect("a count");
    wait_for("every message reports", PATIENCE, async || number(database, &reported).await >= all).await;
    settled(database).await;
    reports(database).await
}

async fn receipts(database: &Database) -> i32 {
    let sql = database.schema.sql("select id from {schema}.stream where name = 'receipts'");
    sqlx::query_scalar(sql).fetch_one(&database.pool).await.expect("find the stream")
}

/// Waits until no message of any group is held, waits or is in doubt.
pub async fn settled(database: &Database) {
    let sql = "select (select count(*) from {schema}.claim) + (select count(*) from {schema}.exception)";
    wait_for("nothing is left over", PATIENCE, async || number(database, sql).await == 0).await;
}

/// The messages that one process holds just now.
pub async fn held_by(database: &Database, program: &Program) -> Vec<i64> {
    let sql = "select m from {schema}.claim c, unnest(c.pending) as r, generate_series(lower(r), upper(r) - 1) as m
        where c.host_id in (select id from {schema}.host where name like '%:' || $1)
        union all select message_id from {schema}.exception
        where host_id in (select id from {schema}.host where name like '%:' || $1)";
    let rows = sqlx::query_scalar(database.schema.sql(sql)).bind(program.pid().to_string());
    rows.fetch_all(&database.pool).await.expect("read what is held")
}

/// What a process has published with its last heartbeat, with its `host` id.
pub async fn stats(database: &Database, program: &Program) -> Value {
    let sql = "select stats || jsonb_build_object('host', id) from {schema}.host where name like '%:' || $1 order by id desc limit 1";
    let row = sqlx::query_scalar(database.schema.sql(sql)).bind(program.pid().to_string());
    row.fetch_optional(&database.pool).await.expect("read the counters").unwrap_or_else(|| json!({}))
}

/// Resident memory of the program, in bytes.
pub fn resident(program: &Program) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", program.pid())).unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
}

/// Every dead letter's message, class and error.
pub async fn dead_letters(database: &Database) -> Vec<(i64, String, String)> {
    let sql = "select message_id, class, error from {schema}.dead_letter order by message_id";
    sqlx::query_as(database.schema.sql(sql)).fetch_all(&database.pool).await.expect("read the dead letters")
}

pub async fn number(database: &Database, sql: &str) -> i64 {
    sqlx::query_scalar(database.schema.sql(sql)).fetch_one(&database.pool).await.expect("read a number")
}

/// No payload and no secret stands in what the program printed.
pub fn assert_tells_no_secret(program: &Program) {
    for (name, text) in [("stdout", program.stdout()), ("stderr", program.stderr())] {
        assert!(!text.contains(SECRET), "a payload or a secret is in its {name}");
    }
}
