//! Does what its message says. The subject of the sandbox's tests, and a way to see how a host treats each fault.

mod command;
mod harm;
mod values;

use std::{
    error::Error,
    sync::atomic::{AtomicU32, Ordering},
    time::{Duration, SystemTime},
};

use command::{Action, Command};
use millstream_guest::{Context, NewMessage, Outcome, config, http, info, sql};
use serde_json::json;

/// Deliveries that this instance has served: always 1 where each message gets a fresh instance.
static DELIVERIES: AtomicU32 = AtomicU32::new(0);

#[millstream_guest::handler]
fn handle(command: Command, ctx: Context) -> Result<Outcome, Box<dyn Error + Send + Sync>> {
    DELIVERIES.fetch_add(1, Ordering::Relaxed);
    if command.times.is_some_and(|times| ctx.attempt > times) {
        return Ok(Outcome::Done);
    }
    let outcome = act(command.action, &command, &ctx)?;
    match (outcome, command.then) {
        (Outcome::Done, Some(next)) => act(next, &command, &ctx),
        (outcome, _) => Ok(outcome),
    }
}

/// One action; those that harm do not come back.
fn act(action: Action, command: &Command, ctx: &Context) -> Result<Outcome, Box<dyn Error + Send + Sync>> {
    let reason = || command.reason.clone().unwrap_or_else(|| format!("told to fail attempt {}", ctx.attempt));
    match action {
        Action::Ok => {}
        Action::Retry => return Ok(Outcome::retry(reason())),
        Action::RetryAfter => return Ok(Outcome::retry_after(command.wait(), reason())),
        Action::Reject => return Ok(Outcome::reject(reason())),
        Action::Later => return Ok(later(command.wait(), ctx)),
        Action::Error => return Err(reason().into()),
        Action::Panic => panic!("{}", reason()),
        Action::Spin => harm::spin(),
        Action::EatMemory => harm::eat_memory(),
        Action::OverflowStack => harm::overflow_stack(),
        Action::OutOfBounds => harm::read_out_of_bounds(),
        Action::Exit => std::process::exit(command.code),
        Action::Sleep => std::thread::sleep(command.wait()),
        Action::FloodStdout => harm::flood_stdout(command.bytes.unwrap_or(100 * 1024 * 1024))?,
        Action::BadUtf8 => {
            harm::print_bad_utf8()?;
            return Ok(Outcome::retry("a NUL \0 in a reason"));
        }
        Action::Allocate => harm::allocate(command.bytes.unwrap_or(8 * 1024 * 1024)),
        Action::Log => (1..=command.count).for_each(|n| info!("line {n} of {}", command.count)),
        Action::Produce => produce(command, ctx)?,
        Action::Sql => {
            let statement = command.sql.as_deref().ok_or("`sql` needs a statement")?;
            for _ in 0..command.count {
                sql::execute(statement, ())?;
            }
        }
        Action::Query => {
            let statement = command.sql.as_deref().ok_or("`query` needs a statement")?;
            let told = values::query(statement, &command.params)?;
            ctx.produce(&command.to, NewMessage::json(&told)?.key(ctx.id.to_string()))?;
        }
        Action::Report => report(command, ctx)?,
        Action::Call => call(command, ctx)?,
    }
    Ok(Outcome::Done)
}

/// Not before `wait` has passed since the message was produced.
fn later(wait: Duration, ctx: &Context) -> Outcome {
    match (ctx.produced_at + wait).duration_since(SystemTime::now()) {
        Ok(left) if !left.is_zero() => Outcome::later(left),
        _ => Outcome::Done,
    }
}

/// Produces `count` messages of `bytes` each, keyed as told, or by the id of the message they come from.
fn produce(command: &Command, ctx: &Context) -> Result<(), Box<dyn Error + Send + Sync>> {
    let bytes = command.bytes.unwrap_or(16);
    for n in 1..=command.count {
        let key = command.key.clone().unwrap_or_else(|| format!("{}-{n}", ctx.id));
        let message = NewMessage {
            concurrency: command.concurrency.map(Into::into),
            compaction: command.compaction,
            rank: command.rank,
            ..NewMessage::bytes(vec![b'x'; bytes]).key(key)
        };
        ctx.produce(&command.to, message)?;
    }
    Ok(())
}

/// Produces what this delivery looks like from inside.
fn report(command: &Command, ctx: &Context) -> Result<(), Box<dyn Error + Send + Sync>> {
    let report = json!({
        "id": ctx.id,
        "stream": ctx.stream,
        "group": ctx.group,
        "key": ctx.key,
        "rank": ctx.rank,
        "routing_key": ctx.routing_key,
        "headers": ctx.headers,
        "content_type": ctx.content_type,
        "produced_at_ms": ctx.produced_at.duration_since(SystemTime::UNIX_EPOCH)?.as_millis() as u64,
        "attempt": ctx.attempt,
        "max_attempts": ctx.max_attempts,
        "timeout_ms": ctx.timeout.as_millis() as u64,
        "replay": ctx.replay,
        "redriven": ctx.redriven,
        "skipped": ctx.skipped,
        "gap_since": ctx.gap_since,
        "deliveries_of_instance": DELIVERIES.load(Ordering::Relaxed),
        "sender": config::get("sender"),
        "api_key": config::get("API_KEY"),
        "environment": std::env::vars().collect::<Vec<_>>(),
        "root_is_readable": std::fs::read_dir("/").is_ok(),
    });
    ctx.produce(&command.to, NewMessage::json(&report)?.key(ctx.id.to_string()))?;
    Ok(())
}

/// Calls `url` `count` times, each with a body of `bytes` if there are any, and produces what was answered.
fn call(command: &Command, ctx: &Context) -> Result<(), Box<dyn Error + Send + Sync>> {
    let url = command.url.as_deref().ok_or("there is no `url` to call")?;
    for n in 1..=command.count {
        let answer = match (command.bytes, command.ms) {
            (None, 0) => http::get(url, &[])?,
            (Some(bytes), 0) => http::post(url, &[("content-type", "text/plain")], vec![b'x'; bytes])?,
            (None, _) => http::Request::new("GET", url).timeout(command.wait()).send()?,
            (Some(bytes), _) => {
                http::Request::new("POST", url).body(vec![b'x'; bytes]).timeout(command.wait()).send()?
            }
        };
        let report =
            json!({ "status": answer.status, "location": answer.header("location"), "bytes": answer.body.len() });
        ctx.produce(&command.to, NewMessage::json(&report)?.key(format!("{}-{n}", ctx.id)))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use millstream_guest::testing::{Delivered, TestMessage, deliver};
    use serde_json::Value;

    use super::*;

    fn told(command: Value) -> TestMessage {
        TestMessage::json(&command)
    }

    fn run(command: Value) -> Delivered {
        deliver(handle, told(command))
    }

    #[test]
    fn answers_as_told() {
        let second = Duration::from_secs(1);
        assert_eq!(run(json!({"do": "ok"})).outcome, Outcome::Done);
        assert_eq!(run(json!({"do": "retry", "reason": "no"})).outcome, Outcome::retry("no"));
        assert_eq!(run(json!({"do": "error", "reason": "no"})).outcome, Outcome::retry("no"));
        assert_eq!(run(json!({"do": "reject"})).outcome, Outcome::reject("told to fail attempt 1"));
        let answer = run(json!({"do": "retry-after", "ms": 1000, "reason": "no"})).outcome;
        assert_eq!(answer, Outcome::retry_after(second, "no"));
        assert!(matches!(run(json!({"do": "dance"})).outcome, Outcome::Reject { .. }));
    }

    #[test]
    fn fails_only_as_often_as_told() {
        let command = json!({"do": "retry", "times": 2});
        assert!(matches!(deliver(handle, told(command.clone()).attempt(2)).outcome, Outcome::Retry { .. }));
        assert_eq!(deliver(handle, told(command).attempt(3)).outcome, Outcome::Done);
    }

    #[test]
    fn later_ends_when_the_time_has_passed() {
        let command = json!({"do": "later", "ms": 60_000});
        assert_eq!(deliver(handle, told(command.clone())).outcome, Outcome::Done);
        let fresh = told(command).with(|context| context.produced_at = SystemTime::now());
        let outcome = deliver(handle, fresh).outcome;
        let Outcome::Later { delay } = outcome else { panic!("not later: {outcome:?}") };
        assert!(delay <= Duration::from_secs(60) && delay > Duration::from_secs(30), "{delay:?}");
    }

    #[test]
    fn what_it_produces_is_kept_only_when_it_succeeds() {
        let kept = run(json!({"do": "produce", "to": "out", "count": 2, "bytes": 3}));
        let keys: Vec<_> = kept.produced.iter().map(|produced| produced.message.key.as_deref()).collect();
        assert_eq!(keys, [Some("1-1"), Some("1-2")]);
        assert_eq!(kept.produced[0].message.payload.as_deref(), Some(&b"xxx"[..]));
        let dropped = run(json!({"do": "produce", "then": "retry"}));
        assert!(matches!(dropped.outcome, Outcome::Retry { .. }));
        assert!(dropped.produced.is_empty());
    }

    #[test]
    fn runs_the_statement_it_is_told() {
        use millstream_guest::testing::Answer;
        let command = told(json!({"do": "sql", "sql": "delete from t", "count": 2}));
        let delivered = deliver(handle, command.clone().sql(|_, _| Ok(Answer::count(3))));
        assert_eq!(delivered.outcome, Outcome::Done);
        assert_eq!(delivered.statements.len(), 2);
        assert!(matches!(deliver(handle, command).outcome, Outcome::Retry { .. }), "it has no grant");
    }

    #[test]
    fn tells_what_a_statement_answers() {
        use millstream_guest::{
            sql::{SqlError, Value},
            testing::Answer,
        };
        let params = json!(["null", {"float64": "-inf"}, {"bytes": [0, 255]}]);
        let command = told(json!({"do": "query", "sql": "select", "params": params}));
        let expected = [Value::Null, Value::Float64(f64::NEG_INFINITY), Value::Bytes(vec![0, 255])];
        let echoed = command.clone().sql(move |_, params| {
            assert_eq!(params, expected);
            let more = [Value::Json("[{\"a\": null}]".into()), Value::Uuid("u".into())];
            Ok(Answer::rows(["v"], params.iter().chain(&more).map(|value| [value.clone()])))
        });
        let told = deliver(handle, echoed).produced[0].json();
        let expected =
            json!(["null", {"float64": "-inf"}, {"bytes": [0, 255]}, {"json": [{"a": null}]}, {"text": "u"}]);
        assert_eq!(told, expected);
        let refused =
            SqlError::Refused { sqlstate: "23505".into(), message: "no".into(), constraint: Some("c".into()) };
        let told = deliver(handle, command.clone().sql(move |_, _| Err(refused.clone()))).produced[0].json();
        assert_eq!(told, json!({"sqlstate": "23505", "constraint": "c"}));
        assert_eq!(deliver(handle, command).produced[0].json(), json!("denied"), "it has no grant");
    }

    #[test]
    fn reports_its_delivery() {
        let delivered = deliver(handle, told(json!({"do": "report", "to": "out"})).attempt(4).header("a", "b"));
        let report = delivered.produced[0].json();
        assert_eq!(report["attempt"], 4);
        assert_eq!(report["headers"], json!([["a", "b"]]));
    }

    #[test]
    fn calls_as_told_and_reports_the_answer() {
        let command = json!({"do": "call", "url": "http://a.test/b", "bytes": 3, "ms": 5, "count": 2});
        assert!(matches!(run(command.clone()).outcome, Outcome::Retry { .. }), "nobody granted it");
        let delivered = deliver(handle, told(command).answer_http(|_| Ok(http::Response::new(302))));
        assert_eq!(delivered.produced[1].json(), json!({"status": 302, "location": null, "bytes": 0}));
        let called = &delivered.called[0];
        assert_eq!((called.method.as_str(), called.body.as_slice()), ("POST", &b"xxx"[..]));
        assert_eq!(called.timeout, Some(Duration::from_millis(5)));
    }

    #[test]
    fn logs_as_many_lines_as_told() {
        assert_eq!(run(json!({"do": "log", "count": 3})).logged.len(), 3);
    }
}
