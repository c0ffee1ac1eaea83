//! `groups`: every figure is right, and read at a bounded price whatever the sizes.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use millstream::{
    engine::{self, DeadFilter},
    handler::{Concurrency, Finished, Handler, Handling, Message, NewMessage, Outcome},
};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use crate::support::{
    engine::{Project, done, numbered, text},
    handlers::rounds,
    verbs::Verbs,
    wait_for,
};

const LIMIT: Duration = Duration::from_secs(60);

const STREAMS_TOML: &str = r#"
[streams.orders]
[streams.quiet]
[groups.audit]
stream = "quiet"
handler = "audit.wasm"
[groups.email]
stream = "orders"
handler = "email.wasm"
slots = 2
retry = { max_attempts = 2, base = "1h", max = "1h" }
"#;

#[tokio::test]
async fn a_lag_is_counted_and_0_is_exact() {
    let verbs = Verbs::declare(STREAMS_TOML).await;
    verbs.project.produce("orders", &numbered(7)).await;
    let groups = verbs.json(&["groups"]);
    let audit = json!({
        "group": "audit", "stream": "quiet", "lag": 0, "lag_exact": true, "oldest_age_ms": null, "in_flight": 0,
        "retrying": 0, "delayed": 0, "deferred": 0, "dead": 0, "dead_exact": true, "blocked_keys": 0, "paused": false,
        "gaps": 0, "oldest_gap_pid": null, "handler": "audit.wasm", "digest": null,
    });
    assert_eq!(groups[0], audit);
    assert_eq!((&groups[1]["lag"], &groups[1]["lag_exact"]), (&7.into(), &true.into()));
    assert!(groups[1]["oldest_age_ms"].is_u64());
    assert_eq!(verbs.json(&["groups", "email"]).as_array().map(Vec::len), Some(1));
    let table = verbs.text(&["groups"]);
    assert!(table.starts_with("GROUP  STREAM  LAG  OLDEST") && table.lines().count() == 3, "{table}");
    verbs.refused(&["groups", "emial"], 1, &["no group \"emial\"", "did you mean \"email\"?"]);
}

/// Ends as the payload says; `hold` when it is released.
struct Answers {
    released: CancellationToken,
}

impl Handler for Answers {
    fn handle<'a>(&'a self, message: Message, _cut: &'a CancellationToken) -> Handling<'a> {
        Box::pin(async move {
            match message.payload.as_deref() {
                Some(b"retry") => Finished::plain(Outcome::Retry { reason: "no".into() }),
                Some(b"reject") => Finished::plain(Outcome::Reject { reason: "never".into() }),
                Some(b"hold") => {
                    self.released.cancelled().await;
                    done()
                }
                _ => done(),
            }
        })
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_in_flight_retrying_delayed_and_dead_is_told_apart() {
    let verbs = Verbs::declare(STREAMS_TOML).await;
    let released = CancellationToken::new();
    let answers: Arc<dyn Handler> = Arc::new(Answers { released: released.clone() });
    let host = verbs.project.host_with(&[("email", answers)]).await;
    let mut delayed = text("later");
    delayed.delay = Some(Duration::from_secs(3600));
    verbs.project.produce("orders", &[text("retry"), text("retry"), text("reject"), delayed, text("hold")]).await;
    let figures = ["lag", "in_flight", "retrying", "delayed", "dead"];
    let state = || {
        let group = verbs.json(&["groups", "email"]);
        figures.map(|figure| group[0][figure].as_i64().expect("a figure"))
    };
    wait_for("the deliveries", LIMIT, async || state() == [0, 1, 2, 1, 1]).await;
    released.cancel();
    wait_for("the held one ends", LIMIT, async || state() == [0, 0, 2, 1, 1]).await;
    host.drain().await;
}

#[tokio::test]
async fn an_open_producer_shows_as_a_gap_with_its_process() {
    let verbs = Verbs::declare(STREAMS_TOML).await;
    let project = &verbs.project;
    let mut slow = project.database.pool.begin().await.unwrap();
    let entry = text("late");
    let entries = [engine::NewEntry { message: &entry, deliver_after: None }];
    engine::produce(&project.database, &mut slow, "orders", &entries).await.unwrap();
    let pid: i32 = sqlx::query_scalar("select pg_backend_pid()").fetch_one(&mut *slow).await.unwrap();
    project.produce("orders", &numbered(1)).await;
    let host = project.host("email", |_| done()).await;
    let gap =
        |group: &Value| (group[0]["gaps"].as_i64(), group[0]["oldest_gap_pid"].as_i64(), group[0]["lag"].as_i64());
    let state = || gap(&verbs.json(&["groups", "email"]));
    wait_for("the gap opens", LIMIT, async || state() == (Some(1), Some(pid.into()), Some(0))).await;
    let answer = verbs.run(&["groups"]);
    assert!(answer.stderr.contains(&format!("database process {pid} may still commit")), "{answer:?}");
    slow.commit().await.unwrap();
    wait_for("the gap closes", LIMIT, async || state() == (Some(0), None, Some(0))).await;
    host.drain().await;
}

/// M1. The oldest age is that of a message that is retried, or behind its key, or a dead letter that its key waits for.
#[tokio::test]
async fn m1_the_oldest_age_includes_retrying_and_blocked_heads() {
    let verbs = Verbs::declare(STREAMS_TOML).await;
    let project = &verbs.project;
    let handler = |message: Message| match message.payload.as_deref() {
        Some(b"retry") => Finished::plain(Outcome::Retry { reason: "no".into() }),
        Some(b"reject") => Finished::plain(Outcome::Reject { reason: "no".into() }),
        _ => done(),
    };
    let ordered =
        |payload: &str| NewMessage { key: Some("k".into()), concurrency: Some(Concurrency::Ordered), ..text(payload) };
    project.produce("orders", &[text("fine"), ordered("reject"), text("retry"), ordered("behind")]).await;
    // Message n is n hours old.
    project.run("update {schema}.message_log_1 set created_at = clock_timestamp() - id * interval '1 h'").await;
    let host = project.host("email", handler).await;
    let hours = || verbs.json(&["groups", "email"])[0]["oldest_age_ms"].as_i64().map(|age| age / 3_600_000);
    wait_for("only the dead head's key and the retry are left", LIMIT, async || {
        let group = &verbs.json(&["groups", "email"])[0];
        [&group["lag"], &group["in_flight"], &group["retrying"], &group["deferred"]] == [0, 0, 1, 1]
    })
    .await;
    // By position: the dead head is first, as the one that everything waits for.
    assert_eq!(hours(), Some(2), "the dead head");
    project.run("delete from {schema}.exception where message_id = 4").await;
    assert_eq!(hours(), Some(2), "also when nothing waits behind it");
    let key = project.group("email").await;
    assert_eq!(engine::skip_key(&project.database, (key.id, key.stream_id), "k").await.unwrap(), [2]);
    wait_for("the retry", LIMIT, async || hours() == Some(3)).await;
    project.run("delete from {schema}.exception").await;
    wait_for("nothing", LIMIT, async || hours().is_none()).await;
    host.drain().await;
}

/// Fills a project with many rows without producing each.
async fn fill(project: &Project, log_rows: i64, other_rows: i64) {
    let email = project.group("email").await;
    let (group, stream) = (email.id.0, email.stream_id.0);
    let execute = async |sql: String| {
        let sql = project.database.schema.sql(&sql);
        sqlx::raw_sql(sql).execute(&project.database.pool).await.expect("fill");
    };
    execute(format!(
        "select {{schema}}.extend_log({stream}, {log_rows} / 1000000 + 8);
         insert into {{schema}}.message_log_{stream} (id, payload)
         select setval('{{schema_text}}.message_log_{stream}_id', g), 'x' from generate_series(1, {log_rows}) g;
         insert into {{schema}}.dead_letter (group_id, stream_id, message_id, attempts, class, error, concurrency, payload, produced_at)
         select {group}, {stream}, g, 3, case when g % 1000 = 0 then 'panic' else 'failed' end, 'no', 'parallel', 'x', now()
         from generate_series(1, {other_rows}) g;
         insert into {{schema}}.exception (group_id, message_id, state, due_at, message_key)
         select {group}, g, case g % 3 when 0 then 'waiting' when 1 then 'delayed' else 'deferred' end::{{schema}}.exception_state,
             case when g % 3 < 2 then now() + interval '1 hour' end, 'k' || g % 100
         from generate_series(1, {other_rows}) g;
         insert into {{schema}}.host (name, version, expires_at) values ('h', '0', now() + interval '1 hour');
         insert into {{schema}}.claim (id, group_id, host_id, pending)
         select g, {group} + 1 + g, (select min(id) from {{schema}}.host), int8multirange(int8range(g, g + 1))
         from generate_series(1, 20000) g union all
         select g, {group}, (select min(id) from {{schema}}.host), int8multirange(int8range(g, g + 1))
         from generate_series(20001, 21000) g"
    ))
    .await;
    // As autovacuum does after a while. VACUUM must stand alone.
    for table in ["dead_letter", "exception", "claim", &format!("message_log_{stream}")] {
        execute(format!("vacuum analyze {{schema}}.{table}")).await;
    }
}

/// Rows that the scans of a plan read, and the tables that were read from end to end.
fn reads(plan: &Value, scanned: &mut Vec<String>) -> i64 {
    let number = |name: &str| plan[name].as_f64().unwrap_or_default();
    let mut rows = 0;
    if let Some(table) = plan["Relation Name"].as_str() {
        let read = (number("Actual Rows") + number("Rows Removed by Filter") + number("Rows Removed by Index Recheck"))
            * number("Actual Loops");
        rows += read as i64;
        if plan["Node Type"] == "Seq Scan" && read > 100.0 {
            scanned.push(table.to_owned());
        }
    }
    rows + plan["Plans"].as_array().into_iter().flatten().map(|plan| reads(plan, scanned)).sum::<i64>()
}

/// Must show: `status`, `groups`, `why` and `dead list` read a bounded number of rows whatever the sizes.
#[tokio::test]
async fn figures_of_big_tables_are_read_in_bounded_steps() {
    let verbs = Verbs::declare(STREAMS_TOML).await;
    let (log_rows, other_rows) = rounds((60_000, 60_000), (10_000_000, 1_000_000));
    fill(&verbs.project, log_rows, other_rows).await;
    let group = verbs.project.group("email").await;
    let database = &verbs.project.database;
    let bound = engine::COUNTED_MAX;
    let explain = async |sql: &str, bind: &dyn Fn(Query) -> Query| {
        let sql = database.schema.stream_sql(&format!("explain (analyze, format json) {sql}"), group.stream_id.0);
        let query = bind(sqlx::query(sql));
        let mut tx = database.pool.begin().await.expect("begin");
        sqlx::raw_sql(include_str!("../host/src/engine/bounded_read.sql")).execute(&mut *tx).await.expect("set");
        let row = query.fetch_one(&mut *tx).await.expect("explain");
        let plan: Value = sqlx::Row::get(&row, 0);
        let mut scanned = Vec::new();
        let rows = reads(&plan[0]["Plan"], &mut scanned);
        assert!(scanned.is_empty(), "read from end to end: {scanned:?}");
        rows
    };
    // `status` is these three; what it reads of the log is its partitions' names and sizes.
    let streams = include_str!("../host/src/engine/inspect_streams.sql");
    let partitions = verbs.project.number("select count(*) from {schema}.log_partition").await;
    let rows = explain(streams, &|query| query).await;
    assert!((partitions..=partitions + 10).contains(&rows), "streams read {rows} rows for {partitions} partitions");
    let hosts = include_str!("../host/src/engine/inspect_hosts.sql");
    assert_eq!(explain(hosts, &|query| query).await, 1, "a row for each host");
    let groups = include_str!("../host/src/engine/inspect_groups.sql");
    let rows = explain(groups, &|query| query.bind(bound)).await;
    // A group's own claims are all read: there are no more than its hosts hold at a time.
    assert!((bound..8 * (bound + 1) + 1000).contains(&rows), "groups read {rows} rows");
    let list = include_str!("../host/src/engine/dead_list.sql");
    let dead = |group: Option<i32>, limit: i64, looks_at: i64, class: Option<&'static str>| {
        move |query: Query| {
            let query = query.bind(group).bind(i64::MAX).bind(limit).bind(looks_at).bind(class).bind(None::<String>);
            query.bind(None::<i64>).bind(None::<i64>).bind(None::<i64>)
        }
    };
    for (group, verb) in [(None, "dead list"), (Some(group.id.0), "dead list --group")] {
        let rows = explain(list, &dead(group, 50, 50, None)).await;
        assert!((50..300).contains(&rows), "{verb} read {rows} rows");
    }
    let rows = explain(list, &dead(None, 50, 10_000, Some("panic"))).await;
    assert!((50..10_300).contains(&rows), "dead list --class read {rows} rows");
    let pick = include_str!("../host/src/engine/dead_pick.sql");
    let rows = explain(pick, &|query| {
        let query = query.bind(group.id.0).bind(0_i64).bind(i64::MAX).bind(10_000_i64).bind(None::<String>);
        query.bind(None::<String>).bind(None::<i64>).bind(None::<i64>).bind(None::<i64>)
    })
    .await;
    assert!((50..=10_000).contains(&rows), "a step of redrive read {rows} rows");
    let why = include_str!("../host/src/engine/why.sql");
    for id in [1, log_rows / 2, log_rows] {
        let rows = explain(why, &|query| {
            let query = query.bind(group.id.0).bind(id).bind(Vec::<String>::new()).bind(None::<Vec<String>>);
            let query = query.bind(None::<Vec<String>>).bind(None::<Vec<String>>).bind(None::<Value>);
            query.bind(bound)
        })
        .await;
        // The claims of the group once, as above.
        assert!((1..bound + 100 + 1000).contains(&rows), "why of message {id} read {rows} rows");
    }
    // A group with few rows does not walk those of a group with many.
    let none = verbs.project.group("audit").await.id.0;
    let rows = explain(list, &dead(Some(none), 50, 50, None)).await;
    assert!(rows < 50, "dead list of a group without any read {rows} rows");
    for _ in 0..3 {
        assert_fast("inspect", engine::inspect(database)).await;
        assert_fast("why", engine::why(database, "email", log_rows)).await;
        assert_fast("dead list", engine::list_dead(database, None, &DeadFilter::default(), None, 50)).await;
        let panics = DeadFilter { class: Some("panic".into()), ..DeadFilter::default() };
        assert_fast("dead list --class", engine::list_dead(database, Some(group.id), &panics, None, 50)).await;
    }
}

/// In `make soak` only: under 100 ms, plus what a debug build and a busy machine add.
async fn assert_fast<T>(what: &str, work: impl Future<Output = anyhow::Result<T>>) {
    let started = Instant::now();
    work.await.expect(what);
    let limit = rounds(Duration::from_secs(10), Duration::from_millis(100));
    assert!(started.elapsed() < limit, "{what} took {:?}", started.elapsed());
}

type Query = sqlx::query::Query<'static, sqlx::Postgres, sqlx::postgres::PgArguments>;

#[tokio::test]
async fn big_figures_are_estimated_and_say_so() {
    let verbs = Verbs::declare(STREAMS_TOML).await;
    fill(&verbs.project, 30_000, 25_000).await;
    let group = &verbs.json(&["groups", "email"])[0];
    assert_eq!((&group["lag"], &group["lag_exact"]), (&30_000.into(), &false.into()));
    let dead = group["dead"].as_i64().expect("a figure");
    assert!((24_900..=25_100).contains(&dead) && group["dead_exact"] == false, "{group}");
    let table = verbs.text(&["groups", "email"]);
    assert!(table.contains(" ~30,000 ") && table.contains(" ~25,"), "{table}");
}
