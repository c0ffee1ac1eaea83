//! Must-show 6: of a run that fails in every way, no log, that of our own Postgres included, no stored error, no counter and
//! no answer of a verb holds a payload or a secret, as it is or in another form. Method: both are planted in messages,
//! statements, URLs, headers, answers and secrets of the real program at its most talkative, COMMITs are lost and a process of
//! Postgres is killed on the way, then everything that was said is searched. A payload stands where it belongs only: in the
//! log of its stream and in the dead letter's copy.

use base64::{Engine as _, prelude::BASE64_STANDARD_NO_PAD};
use millstream::{
    client::{Client, Concurrency, ProduceOptions},
    database::Database,
};
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::support::{
    PATIENCE, Program,
    hosts::{SECRET, number, start_up},
    http_server::{HttpServer, Reply},
    own_postgres::OwnPostgres,
    proxy::{Fate, Proxy, is_commit},
    wait_for,
};

/// Two groups on one stream: what `eager` fails is dead at its second failure, what `patient` fails waits for an hour. What
/// never ends goes to a stream of its own, where time is up soon; on the other, no machine is so busy that it is.
fn streams_toml(role: &str, port: u16) -> String {
    let group = |name: &str, stream: &str, more: &str| {
        format!(
            r#"
[groups.{name}]
stream = "{stream}"
handler = "flaky.wasm"
memory = "32MiB"
{more}
allow = {{ produce = ["receipts"], sql = {{ role = "{role}" }}, http = ["127.0.0.1:{port}", "127.0.0.1:9"] }}
config = {{ sender = "{SECRET}@example.com" }}
secrets = {{ API_KEY = {{ env = "MILLSTREAM_TEST_API_KEY" }} }}
"#
        )
    };
    let soon = "retry = { max_attempts = 2, base = \"1ms\", max = \"1ms\" }";
    let eager = group("eager", "playground", &format!("timeout = \"60s\"\n{soon}"));
    let hasty = group("hasty", "endless", &format!("timeout = \"1s\"\n{soon}"));
    let patient =
        group("patient", "playground", "timeout = \"60s\"\nretry = { max_attempts = 2, base = \"1h\", max = \"1h\" }");
    format!(
        "[host]\nlisten = \"127.0.0.1:0\"\n[streams.playground]\n[streams.endless]\n[streams.receipts]\nmax_payload = \"64B\"\n{eager}{hasty}{patient}"
    )
}

/// A role, and tables whose constraints will be violated.
async fn tables(database: &Database) -> String {
    let name: String = sqlx::query_scalar("select current_database()::text").fetch_one(&database.pool).await.unwrap();
    let role = format!("leak_{name}");
    let sql = format!(
        "create role {role} nologin;
         create table public.other (id text primary key);
         create table public.note (what text);
         create type public.mood as enum ('fine');
         create table public.account (id text constraint account_once primary key, units integer not null,
             other text references public.other, later text references public.other deferrable initially deferred,
             constraint not_negative check (units >= 0), exclude using btree (id with =));
         insert into public.account values ('{SECRET}', 1);
         grant all on public.account, public.other, public.note to {role}"
    );
    sqlx::raw_sql(sqlx::AssertSqlSafe(sql)).execute(&database.pool).await.expect("make the tables");
    role
}

/// Statements that Postgres refuses, each with an error that quotes a value in its message or its detail.
const REFUSED: [&str; 21] = [
    "insert into account values ('HUSH', 2)",
    "insert into account values ('HUSH 2', -1)",
    "insert into account values ('HUSH 3', null)",
    "insert into account values ('HUSH 4', 1, 'HUSH')",
    "insert into account values ('HUSH 5', 1, null, 'HUSH')",
    "insert into account values ('6', 'HUSH')",
    "insert into account select 'HUSH', 'HUSH'::text::integer",
    "select 'HUSH'::text::bigint",
    "select 'HUSH'::text::double precision",
    "select 'HUSH'::text::numeric",
    "select 'HUSH'::text::boolean",
    "select 'HUSH'::text::uuid",
    "select 'HUSH'::text::timestamptz",
    "select 'HUSH'::text::date",
    "select '{HUSH'::text::jsonb",
    "select '{HUSH'::text::text[]",
    "select ('HUSH')::text::mood",
    "select 'HUSH'::text::inet",
    "select to_tsquery('simple', 'HUSH HUSH')",
    "select jsonb_path_query('{}', ('$ HUSH')::text::jsonpath)",
    "select '\\xHUSH'::text::bytea",
];

/// Every command that fails, with what is planted in it.
fn commands(port: u16) -> Vec<Value> {
    let mut commands: Vec<Value> =
        ["retry-after", "panic", "eat-memory", "overflow-stack", "out-of-bounds", "exit", "bad-utf8"]
            .iter()
            .map(|harm| json!({"do": harm, "reason": "as told", "key": SECRET}))
            .collect();
    commands.push(json!({"do": "reject", "reason": "as told", "key": SECRET}));
    let url = |rest: &str| json!({"do": "call", "url": format!("http://{rest}"), "ms": 300, "reason": "as told"});
    let call = |to: String| url(&format!("{to}/{SECRET}?{SECRET}"));
    commands.extend([
        call(format!("{SECRET}:{SECRET}@127.0.0.1:{port}")),
        call("denied.example".to_owned()),
        call("127.0.0.1:9".to_owned()),
        call(format!("127.0.0.1:{port}/rude")),
        call(format!("127.0.0.1:{port}/stall")),
        call(format!("127.0.0.1:{port}/large")),
        call(format!("127.0.0.1:{port}/redirect")),
        url(&format!("127.0.0.1:{port}/ {SECRET}")),
        url(&format!("127.0.0.1:{SECRET}/")),
    ]);
    commands.extend(REFUSED.map(|sql| json!({"do": "sql", "sql": sql.replace("HUSH", SECRET), "reason": "as told"})));
    commands.extend([
        // What it reports holds its secret, and is larger than the stream takes: the host refuses the outbox.
        json!({"do": "report", "reason": "as told"}),
        json!({"do": "produce", "bytes": 65}),
        json!({"do": "produce", "key": ""}),
        json!({"do": "produce", "to": "playground"}),
        json!({"do": "produce", "count": 2000}),
        json!({"do": SECRET}),
        json!({"do": "ok", SECRET: SECRET}),
        json!({"do": "ok", "ms": SECRET}),
        json!(SECRET),
    ]);
    commands
}

/// What the other side of a call says, with the secret in all of it.
fn answer(line: &str) -> Reply {
    if line.contains("/rude") {
        return Reply::Bytes(format!("HUSH {SECRET} not HTTP\r\n\r\n").into_bytes());
    }
    if line.contains("/stall") {
        return Reply::Stall(format!("HTTP/1.1 200 {SECRET}\r\n").into_bytes());
    }
    if line.contains("/large") {
        let head = format!("HTTP/1.1 200 x\r\ncontent-length: 100000000\r\nx: {SECRET}\r\n\r\n{SECRET}");
        return Reply::Bytes(head.into_bytes());
    }
    let location = format!("location: http://169.254.169.254/{SECRET}\n");
    Reply::new(302, &location, SECRET)
}

/// Everything that Millstream has stored beside messages and their copies: errors, counters, policies.
async fn stored(database: &Database) -> Vec<String> {
    let sql = "select row_to_json(e)::text from {schema}.exception e
        union all select (to_jsonb(d) - '{payload,headers}'::text[])::text from {schema}.dead_letter d
        union all select row_to_json(h)::text from {schema}.host h
        union all select row_to_json(s)::text from {schema}.stream s
        union all select row_to_json(d)::text from {schema}.deployment d
        union all select (to_jsonb(g) #- '{policy,config}')::text from {schema}.consumer_group g";
    sqlx::query_scalar(database.schema.sql(sql)).fetch_all(&database.pool).await.expect("read what is stored")
}

/// The forms in which a secret could be told: itself, in hex, in base64 at each place of a group, as a list of bytes.
fn forms() -> Vec<String> {
    let hex: String = SECRET.bytes().map(|byte| format!("{byte:02x}")).collect();
    let list: Vec<String> = SECRET.bytes().map(|byte| byte.to_string()).collect();
    let base64 = (0..3_usize).map(|before| {
        let encoded = BASE64_STANDARD_NO_PAD.encode([&vec![0; before][..], SECRET.as_bytes()].concat());
        // Only the characters that hold nothing but bits of it.
        encoded[(8 * before).div_ceil(6)..8 * (before + SECRET.len()) / 6].to_owned()
    });
    let mut forms = vec![SECRET.to_owned(), hex.to_uppercase(), hex, list.join(", "), list.join(",")];
    forms.extend(base64);
    forms
}

/// Lines with the secret in them, shortened.
fn leaks<'a>(whence: &str, text: impl IntoIterator<Item = &'a str>) -> Vec<String> {
    let forms = forms();
    let found = text.into_iter().filter(|line| forms.iter().any(|form| line.contains(form)));
    found.map(|line| format!("{whence}: {}", &line[..line.floor_char_boundary(600)])).collect()
}

/// A search that does not know a form would find nothing, whatever is told.
#[test]
fn every_form_of_a_secret_is_found() {
    let check = |line: &str, count: usize| assert_eq!(leaks("test", [line]).len(), count, "{line}");
    for before in 0..4 {
        let payload = format!("{}{SECRET}, and more", &"abc"[..before.min(3)]);
        let bytes = payload.as_bytes();
        check(&payload, 1);
        check(&format!("{bytes:?}"), 1);
        check(&format!("{bytes:x?}").replace(", ", ""), 1);
        check(&BASE64_STANDARD_NO_PAD.encode(bytes), 1);
        check(&serde_json::to_string(bytes).unwrap(), 1);
    }
    check("hush", 0);
}

/// Kills the process of Postgres that runs a handler's statement, which has a secret in it.
async fn kill_one(own: &OwnPostgres, database: &Database) {
    let sql = "select coalesce((select pid::bigint from pg_stat_activity where datname = current_database()
        and pid <> pg_backend_pid() and query ~ 'guest_sql_' and wait_event = 'PgSleep' limit 1), 0)";
    wait_for("a handler's statement is killed", PATIENCE, async || {
        let pid = number(database, sql).await;
        pid > 0 && own.kill_backend(pid.try_into().unwrap()).await
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_run_that_fails_in_every_way_tells_no_payload_and_no_secret() {
    let server = HttpServer::start(|seen| answer(&seen.line)).await;
    let (own, database, _) = OwnPostgres::declare("[streams.playground]\n[streams.receipts]").await;
    let role = tables(&database).await;
    let url = own.url();
    let mut commits = 0;
    let proxy = Proxy::start(&url, move |statement| {
        commits += usize::from(is_commit(statement));
        match (is_commit(statement), commits % 7) {
            (true, 3) => Fate::ReplyLost,
            (true, 5) => Fate::HungUp,
            _ => Fate::Answered,
        }
    });
    let mut program = Program::with_examples(&streams_toml(&role, server.port()));
    program.set("MILLSTREAM_TEST_API_KEY", &format!("{SECRET}-key"));
    start_up(&mut program, proxy.url(), &["-v"]);
    program.logged("ready: ").await;
    // Alone, so that it runs when it is killed; it is done when it comes again.
    let slow =
        json!({"do": "sql", "sql": format!("insert into note select '{SECRET}' from pg_sleep(0.7)")}).to_string();
    let alone = database.schema.sql("select id from {schema}.produce('playground', $1)");
    sqlx::query(alone).bind(slow).execute(&database.pool).await.unwrap();
    kill_one(&own, &database).await;
    database.close().await;
    let database = own.database().await;
    proxy.begin();
    let commands = commands(server.port());
    let bodies: Vec<String> = commands.iter().map(Value::to_string).chain([format!("not JSON: {SECRET}")]).collect();
    let sql = "select count(p.id) from unnest($1::text[]) as body, lateral {schema}.produce('playground', body,
        headers => jsonb_build_object('token', $2::text)) as p";
    let produced = sqlx::query_scalar::<_, i64>(database.schema.sql(sql)).bind(&bodies).bind(SECRET);
    let count = produced.fetch_one(&database.pool).await.unwrap();
    assert_eq!(usize::try_from(count).unwrap(), bodies.len());
    let spin = json!({"do": "spin", "reason": "as told", "key": SECRET}).to_string();
    let sql = database.schema.sql("select id from {schema}.produce('endless', $1)");
    sqlx::query(sql).bind(spin).execute(&database.pool).await.unwrap();
    let ended = "select count(distinct message_id) from {schema}.dead_letter
        where group_id = (select id from {schema}.consumer_group where name = 'eager')";
    let redirect = 2; // a redirect is an answer, and so is what is said to a name and password: these two are done
    wait_for("all have failed", PATIENCE, async || number(&database, ended).await >= count - redirect).await;
    wait_for("all have been tried", PATIENCE, async || {
        let open = "select (select count(*) from {schema}.claim) + (select count(*) from {schema}.exception
            where state <> 'waiting' or group_id <> (select id from {schema}.consumer_group where name = 'patient'))";
        number(&database, open).await == 0
    })
    .await;
    let spun = "select count(*) from {schema}.dead_letter where class = 'timeout'";
    wait_for("what never ends is dead", PATIENCE, async || number(&database, spun).await == 1).await;

    proxy.cease();
    assert!(proxy.lost() >= 5, "{} COMMITs were lost", proxy.lost());
    assert_eq!(number(&database, "select count(distinct what) from public.note").await, 1, "what was killed is done");
    let mut found = leaks("stored", stored(&database).await.iter().map(String::as_str));
    let classes = "select count(distinct class) from {schema}.dead_letter";
    assert!(number(&database, classes).await >= 7, "not every way to fail was gone");
    found.extend(verbs(&program, &url));
    found.extend(client(&url).await);
    program.signal(Signal::TERM);
    assert!(program.ended(PATIENCE).await.success(), "{}", program.stderr());
    found.extend(leaks("stdout", program.stdout().lines()));
    found.extend(leaks("log", program.stderr().lines()));
    let log = own.log();
    assert!(log.contains("terminated by signal 9"), "that is not the log of the run: {log}");
    found.extend(leaks("log of Postgres", log.lines()));
    assert!(found.is_empty(), "{} places tell what is planted:\n{}", found.len(), found.join("\n"));
    drop(proxy);
    database.close().await;
    own.stop().await;
}

/// What the verbs answer about all of it, and how they refuse.
fn verbs(program: &Program, url: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut run = |arguments: &[&str], input: &str, expected: Option<i32>| {
        for more in [&["--output", "json", "-vv"][..], &["-vv"]] {
            let arguments = [&["--database-url", url], more, arguments].concat();
            let (status, stdout, stderr) = program.run_with_input(&arguments, input.as_bytes());
            assert!(expected.is_none() || status.code() == expected, "{arguments:?}: {stderr}");
            let lines = stdout.lines().chain(stderr.lines());
            found.extend(leaks(&arguments[2..].join(" "), lines));
        }
    };
    for verb in ["status", "groups", "plan", "check", "doctor"] {
        run(&[verb], "", None);
    }
    for group in ["eager", "patient"] {
        run(&["keys", group], "", Some(0));
        run(&["why", group, "1"], "", Some(0));
        run(&["why", group, "20"], "", Some(0));
    }
    run(&["dead", "list"], "", Some(0));
    run(&["produce", "receipts"], &format!("{SECRET}{}", "x".repeat(64)), Some(1));
    for line in [
        format!("{{\"payload\": \"{SECRET}{}\"}}", "x".repeat(64)),
        format!("{{\"payload\": \"{SECRET}\""),
        format!("{{\"payload\": {SECRET}}}"),
        format!("{{\"payload\": 1, \"payload_base64\": \"{SECRET}\"}}"),
        format!("{{\"payload_base64\": \"{SECRET}!\"}}"),
        format!("{{\"payload\": \"{SECRET}\", \"headers\": \"{SECRET}\"}}"),
        format!("{{\"payload\": \"{SECRET}\", \"headers\": {{\"a\": [\"{SECRET}\"]}}}}"),
        format!("{{\"payload\": \"{SECRET}\", \"rank\": \"{SECRET}\"}}"),
        format!("{{\"payload\": \"{SECRET}\", \"deliver_after\": \"{SECRET}\"}}"),
        format!("{{\"payload\": \"{SECRET}\", \"key\": \"\"}}"),
        SECRET.to_owned(),
    ] {
        run(&["produce", "receipts", "--ndjson"], &line, Some(1));
    }
    found.extend(configs());
    found
}

/// Files with a secret where none may be, and addresses with a password.
fn configs() -> Vec<String> {
    let group = "[streams.s]\n[groups.g]\nstream = \"s\"\nhandler = \"h.wasm\"\n";
    let mut found = Vec::new();
    for text in [
        format!("{group}secrets = {{ API_KEY = \"{SECRET}\" }}"),
        format!("{group}secrets = {{ API_KEY = {{ value = \"{SECRET}\" }} }}"),
        format!("{group}secrets = [\"{SECRET}\"]"),
        format!("{group}secrets = \"{SECRET}\""),
        format!("{group}secrets = {{ API_KEY = {{ env = \"MILLSTREAM_TEST_API_KEY\" }}, API_KEY = \"{SECRET}\" }}"),
        format!("{group}secrets = {{ API_KEY = {SECRET} }}"),
        format!("[database]\nurl = \"postgres://u:{SECRET}@127.0.0.1:1/d\"\n{group}"),
        format!("[database]\nurl = \"postgres://u:{SECRET}@127.0.0.1:port/d\"\n{group}"),
        format!("[database]\nurl = \"{SECRET}\"\n{group}"),
        format!("[database]\nurl = [\"{SECRET}\"]\n{group}"),
    ] {
        let program = Program::new(&text);
        for verb in ["check", "status"] {
            let (status, stdout, stderr) = program.run(&["-vv", verb]);
            assert!(verb == "check" || !status.success(), "{verb} of a bad file: {stdout}");
            found.extend(leaks(&format!("{verb} of a bad file"), stdout.lines().chain(stderr.lines())));
        }
    }
    found
}

/// What the Rust client says about messages that are refused, to people and to programmers.
async fn client(url: &str) -> Vec<String> {
    let client = Client::connect(url).await.unwrap();
    let raw = |name: &str| client.raw_stream(name);
    let plain = ProduceOptions::default;
    let once = || ProduceOptions { idempotency_key: Some("once".to_owned()), ..plain() };
    let secret = SECRET.as_bytes();
    let large = [secret, &[b'x'; 64]].concat();
    raw("receipts").produce(secret, once()).await.unwrap();
    let ordered = ProduceOptions { concurrency: Some(Concurrency::Ordered), ..plain() };
    let headers = [("n".to_owned(), format!("{SECRET}\0"))].into();
    let mut errors = vec![
        raw("receipts").produce(large.as_slice(), plain()).await.unwrap_err(),
        raw("receipts").produce(&large[..20], once()).await.unwrap_err(),
        raw("receipts").produce(secret, ordered).await.unwrap_err(),
        raw("receipts").produce(secret, ProduceOptions { headers, ..plain() }).await.unwrap_err(),
        raw("nowhere").produce(secret, plain()).await.unwrap_err(),
        raw("receipts").produce_batch([(secret, plain()), (&large[..], plain())]).await.unwrap_err(),
    ];
    let in_transaction =
        client.in_transaction(async |tx| raw("receipts").produce_in_tx(tx, large.as_slice(), plain()).await).await;
    errors.push(in_transaction.unwrap_err());
    let with_password = Client::connect(&format!("postgres://u:{SECRET}@127.0.0.1:1/d")).await;
    errors.push(with_password.unwrap_err());
    client.close().await;
    let shown: Vec<String> = errors.iter().flat_map(|error| [error.to_string(), format!("{error:?}")]).collect();
    leaks("client", shown.iter().map(String::as_str))
}
