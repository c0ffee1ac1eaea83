//! Values of SQL and its errors on their whole way: out of a real handler, through the sandbox and Postgres, and back into
//! the handler. Method: the `flaky` example tells what it was answered, and a listener between sandbox and database notes
//! the kinds that crossed, which are more than a handler written in Rust can tell apart.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use millstream::{
    engine::GuestSession,
    handler::{Handler, Message, Outcome, Running, Sql, SqlAnswer, SqlError, SqlStatement, SqlValue},
};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use crate::support::{
    guest::Desk,
    handlers::{flaky, message},
};

/// The values of all rows.
type Answered = Result<Vec<SqlValue>, SqlError>;

/// Notes the parameters of a statement and its answer.
struct Listener {
    session: Arc<GuestSession>,
    heard: Mutex<Vec<(Vec<SqlValue>, Answered)>>,
}

impl Sql for Listener {
    fn run<'a>(&'a self, statement: SqlStatement) -> Running<'a> {
        Box::pin(async move {
            let params = statement.params.clone();
            let answer = self.session.run(statement).await;
            let answered = match &answer {
                Ok(SqlAnswer::Rows(rows)) => Ok(rows.values.concat()),
                Ok(SqlAnswer::Count(_)) => panic!("rows were asked for"),
                Err(error) => Err(error.clone()),
            };
            self.heard.lock().unwrap().push((params, answered));
            answer
        })
    }
}

/// A statement as the handler runs it: what it was told, the parameters that left it, and what Postgres' side answered.
async fn query(desk: &Desk, handler: &dyn Handler, sql: &str, params: &Value) -> (Value, Vec<SqlValue>, Answered) {
    let listener = Arc::new(Listener { session: desk.delivery().session, heard: Mutex::default() });
    let command = json!({"do": "query", "sql": sql, "params": params}).to_string();
    let message = Message { sql: Some(Arc::clone(&listener) as Arc<dyn Sql>), ..message(1, command) };
    let finished = handler.handle(message, &CancellationToken::new()).await;
    assert_eq!(finished.outcome, Outcome::Done, "{sql}");
    let told = serde_json::from_slice(finished.produced[0].payload.as_deref().unwrap()).unwrap();
    let (params, answer) = listener.heard.lock().unwrap().pop().expect("one statement was run");
    (told, params, answer)
}

/// Equal also where floats are not: NaN is NaN, and -0 is not 0.
fn is_same(left: &SqlValue, right: &SqlValue) -> bool {
    match (left, right) {
        (SqlValue::Float64(left), SqlValue::Float64(right)) => {
            left.to_bits() == right.to_bits() || left.is_nan() && right.is_nan()
        }
        _ => left == right,
    }
}

fn float(value: f64) -> (Value, SqlValue, Value) {
    let told = json!({"float64": value.to_string()});
    (told.clone(), SqlValue::Float64(value), told)
}

/// A value that is text in Rust, whatever its kind is.
fn text(kind: &str, value: &str, of: fn(String) -> SqlValue) -> (Value, SqlValue, Value) {
    (json!({ kind: value }), of(value.to_owned()), json!({"text": value}))
}

fn bytes(value: Vec<u8>) -> (Value, SqlValue, Value) {
    let told = json!({"bytes": value.clone()});
    (told.clone(), SqlValue::Bytes(value), told)
}

/// A type of Postgres; a parameter as the handler is told it; the value that crosses, both ways; and what the handler tells.
fn values() -> Vec<(&'static str, (Value, SqlValue, Value))> {
    let int = |value: i64| (json!({"int64": value}), SqlValue::Int64(value), json!({"int64": value}));
    let boolean = |value: bool| (json!({"boolean": value}), SqlValue::Boolean(value), json!({"boolean": value}));
    let null = || (json!("null"), SqlValue::Null, json!("null"));
    let document = |text: &str| {
        let value: Value = serde_json::from_str(text).unwrap();
        (json!({"json": text}), SqlValue::Json(text.to_owned()), json!({"json": value}))
    };
    let numeric = |digits: &str| text("numeric", digits, SqlValue::Numeric);
    let time = |time: &str| text("timestamp", time, SqlValue::Timestamp);
    let large = format!("-{}.{}", "9".repeat(1000), "1".repeat(1000));
    let mut values = vec![("jsonb", null()), ("bytea", null()), ("integer", null())];
    values.extend([true, false].map(|value| ("boolean", boolean(value))));
    values.extend([i64::MIN, -1, 0, i64::MAX].map(|value| ("bigint", int(value))));
    values.push(("smallint", int(-32768)));
    let floats = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -0.0, 0.0, 0.1, f64::MAX, f64::MIN_POSITIVE, 5e-324];
    values.extend(floats.map(|value| ("double precision", float(value))));
    values.push(("real", float(0.5)));
    for digits in ["NaN", "Infinity", "-Infinity", "0.00010", "12345678901234567890.5", &large] {
        values.push(("numeric", numeric(digits)));
    }
    for one in ["", "plain", "it's \\ \"so\"\n\t$1 %s", "n\u{e4}h \u{1f980} \u{202e}", "null", "\\x00", "{", " "] {
        values.push(("text", text("text", one, SqlValue::Text)));
    }
    values.extend(
        [vec![], vec![0], vec![0, 39, 92, 0, 255, 0], (0..=255).collect()].map(|value| ("bytea", bytes(value))),
    );
    for one in [r#"{"a": [1, null, -1.5, "x\u0001", {"b": {}}]}"#, "[]", r#"[9007199254740993, "\\"]"#] {
        values.push(("json", document(one)));
    }
    values.push(("jsonb", document(r#"{"a": [1, null, "x"]}"#)));
    for one in ["2026-01-02T03:04:05.678901+00:00", "infinity", "-infinity", "9999-12-31T23:59:59+00:00"] {
        values.push(("timestamptz", time(one)));
    }
    values.push(("uuid", text("uuid", "00112233-4455-6677-8899-aabbccddeeff", SqlValue::Uuid)));
    values
}

/// Each value leaves the handler as its kind, arrives in Postgres as what it is, and comes back the same.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_kind_of_value_survives_the_way_out_of_a_handler_and_back() {
    let desk = Desk::new().await;
    let handler = flaky(|_| {}).await;
    for (type_name, (param, value, told)) in values() {
        let sql = format!("select $1::{type_name}");
        let (answered, params, answer) = query(&desk, &handler, &sql, &json!([param])).await;
        assert!(params.len() == 1 && is_same(&params[0], &value), "{type_name} {param}: another parameter arrived");
        let answer = answer.unwrap_or_else(|error| panic!("{type_name} {param}: {error:?}"));
        assert!(answer.len() == 1 && is_same(&answer[0], &value), "{type_name} {param}: another value, {answer:?}");
        assert_eq!(answered, json!([told]), "{type_name} {param}");
    }
    // That Postgres had the value, and not only its text.
    for (sql, params) in [
        (
            "select $1::float8 = 'NaN' and $2::float8 = 'Infinity' and $3::float8::text = '-0'",
            json!([{"float64": "NaN"}, {"float64": "inf"}, {"float64": "-0"}]),
        ),
        (
            "select $1::numeric = 'NaN' and $2::numeric = 10::numeric ^ 300",
            json!([{"numeric": "NaN"}, {"numeric": format!("1{}", "0".repeat(300))}]),
        ),
        (
            "select octet_length($1::bytea) = 3 and get_byte($1::bytea, 0) = 0 and get_byte($1::bytea, 2) = 255",
            json!([{"bytes": [0, 1, 255]}]),
        ),
        (
            "select $1::timestamptz = 'infinity' and $2::timestamptz = '2026-01-02 03:04:05Z'",
            json!([{"timestamp": "infinity"}, {"timestamp": "2026-01-02T05:04:05+02:00"}]),
        ),
        (
            "select $1::jsonb -> 'a' = '[null]'::jsonb and $2::text is null",
            json!([{"json": "{\"a\": [null]}"}, "null"]),
        ),
    ] {
        assert_eq!(query(&desk, &handler, sql, &params).await.0, json!([{"boolean": true}]), "{sql}");
    }
}

/// A handler can branch on what Postgres says it is, and on the constraint.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_error_of_sql_reaches_the_handler_with_its_sqlstate() {
    let desk = Desk::new().await;
    desk.as_role(
        "create table public.paid (id integer constraint paid_once primary key, units integer constraint not_negative check (units >= 0));
         insert into public.paid values (1, 1)",
    )
    .await;
    let handler = flaky(|_| {}).await;
    let insert = "with one as (insert into paid values ($1, $2) returning id) select id from one";
    let none = json!([]);
    for (sql, params, sqlstate, constraint) in [
        (insert, json!([{"int64": 1}, {"int64": 1}]), "23505", Some("paid_once")),
        (insert, json!([{"int64": 2}, {"int64": -1}]), "23514", Some("not_negative")),
        (insert, json!(["null", {"int64": 1}]), "23502", None),
        (insert, json!([{"int64": 3_000_000_000_i64}, "null"]), "22003", None),
        ("select 1 / $1::integer", json!([{"int64": 0}]), "22012", None),
        ("select $1::integer", json!([{"text": "x"}]), "22P02", None),
        ("select $1::text", json!([{"text": "a\u{0}b"}]), "22021", None),
        ("select $1::jsonb", json!([{"json": "{"}]), "22P02", None),
        ("select $1::uuid", json!([{"uuid": "x"}]), "22P02", None),
        ("select $1::timestamptz", json!([{"timestamp": "2026-02-30T00:00:00Z"}]), "22008", None),
        ("select nothing", none.clone(), "42703", None),
        ("select * from nowhere", none.clone(), "42P01", None),
        ("selec 1", none.clone(), "42601", None),
        ("select id from millstream.host", none.clone(), "42501", None),
    ] {
        let (told, _, answer) = query(&desk, &handler, sql, &params).await;
        assert_eq!(told, json!({"sqlstate": sqlstate, "constraint": constraint}), "{sql} {params}: {answer:?}");
    }
    let (told, ..) = query(&desk, &handler, "select generate_series(1, 10001)", &none).await;
    assert_eq!(told, json!("limit"));
    let slow = json!({"do": "query", "sql": "select pg_sleep(60)::text"}).to_string();
    let timeout = Duration::from_secs(1);
    let slow = Message { sql: Some(desk.delivery().session), timeout, ..message(1, slow) };
    let finished = handler.handle(slow, &CancellationToken::new()).await;
    let told: Value = serde_json::from_slice(finished.produced[0].payload.as_deref().unwrap()).unwrap();
    assert_eq!(told, json!("timeout"), "it hears of it before its deadline");
    let denied = json!({"do": "query", "sql": "select 1"}).to_string();
    let finished = handler.handle(message(1, denied), &CancellationToken::new()).await;
    let told: Value = serde_json::from_slice(finished.produced[0].payload.as_deref().unwrap()).unwrap();
    assert_eq!(told, json!("denied"));
}
