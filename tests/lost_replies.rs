//! What a host does when Postgres answers, and nobody hears it: claims, settles, settles with an outbox and deliveries with
//! SQL whose reply or request is lost end with every effect once, no attempt counted, and nothing stuck (T5). Method: the
//! real program behind a proxy that hangs up at chosen statements; half of what is lost was done, half was not.

use rustix::process::Signal;

use crate::support::{
    PATIENCE, Program, TestDatabase, database,
    handlers::rounds,
    hosts::{dead_letters, number, settled, up},
    proxy::{Fate, Proxy, is_commit},
    wait_for,
};

/// Messages of each kind.
fn each() -> i64 {
    rounds(40, 2_000)
}

fn streams_toml(role: &str) -> String {
    format!(
        r#"
[host]
listen = "127.0.0.1:0"
[streams.playground]
[streams.receipts]
[groups.worker]
stream = "playground"
handler = "flaky.wasm"
retry = {{ max_attempts = 2, base = "1ms", max = "5ms" }}
allow = {{ produce = ["receipts"], sql = {{ role = "{role}" }} }}
"#
    )
}

/// A role and a table in which handlers note what they did. It has no key, so that what is done twice is there twice.
async fn notes(database: &TestDatabase) -> String {
    let name: String = sqlx::query_scalar("select current_database()::text").fetch_one(&database.pool).await.unwrap();
    let role = format!("lost_{name}");
    let sql = format!(
        "create role {role} nologin; create table public.note (body text); grant insert on public.note to {role}"
    );
    sqlx::raw_sql(sqlx::AssertSqlSafe(sql)).execute(&database.pool).await.unwrap();
    role
}

/// One message of each kind for every number, those with a key ordered: no effects, an outbox, SQL, SQL and an outbox, a
/// failure before success, a rejection.
async fn ask(database: &TestDatabase) {
    let sql = r#"select count(p.id) from generate_series(1, $1) as n,
        (values ('{"do": "ok"}', false), ('{"do": "produce"}', false), ('{"do": "produce"}', true),
            ('{"do": "sql", "sql": "insert into note values (''N'')"}', true),
            ('{"do": "sql", "sql": "insert into note values (''N'')", "then": "produce"}', false),
            ('{"do": "retry", "times": 1}', false), ('{"do": "reject"}', false)) as kind (body, is_keyed),
        lateral {schema}.produce('playground', replace(kind.body, '''N''', quote_literal(n)),
            key => case when is_keyed then 'k' || n % 5 end, concurrency => case when is_keyed then 'ordered' end) as p"#;
    let asked = sqlx::query_scalar::<_, i64>(database.schema.sql(sql)).bind(each());
    assert_eq!(asked.fetch_one(&database.pool).await.unwrap(), 7 * each());
}

/// Runs all of it behind a proxy that loses one in `one_in` of the statements that `is_meant` names, at least `least`.
async fn lose(is_meant: fn(&str) -> bool, one_in: usize, least: usize) {
    let database = database().await;
    let role = notes(&database).await;
    let mut count = 0;
    let proxy = Proxy::start(&database.url().await, move |statement| {
        if !is_meant(statement) {
            return Fate::Answered;
        }
        count += 1;
        match (count % one_in, count / one_in % 3) {
            (0, 0) => Fate::ReplyLost,
            (0, 1) => Fate::RequestLost,
            (0, _) => Fate::HungUp,
            _ => Fate::Answered,
        }
    });
    let mut program = Program::with_examples(&streams_toml(&role));
    up(&mut program, proxy.url()).await;
    program.logged("handler deployed group=worker").await;
    proxy.begin();
    ask(&database).await;
    let done = "select count(*) from {schema}.message_log_2";
    let patience = PATIENCE * rounds(1, 10);
    wait_for("all has been produced", patience, async || number(&database, done).await >= 3 * each()).await;
    wait_for("enough was lost", patience, async || {
        let finished = "select (select count(*) from {schema}.claim) + (select count(*) from {schema}.exception)";
        if proxy.lost() < least && number(&database, finished).await == 0 {
            ask_for_more(&database).await; // it was done before that
        }
        proxy.lost() >= least
    })
    .await;
    proxy.cease();
    settled(&database).await;
    once_each(&database).await;
    program.signal(Signal::TERM);
    assert!(program.ended(PATIENCE).await.success(), "{}", program.stderr());
    let rows = "select (select count(*) from {schema}.claim) + (select count(*) from {schema}.exception)
        + (select count(*) from {schema}.message_key_lease) + (select count(*) from {schema}.cursor_gap)";
    assert_eq!(number(&database, rows).await, 0, "rows are left over");
}

/// Messages without a trace, for which turns are taken all the same.
async fn ask_for_more(database: &TestDatabase) {
    let sql = r#"select count(*) from {schema}.produce('playground', '{"do": "retry", "times": 1}')"#;
    number(database, sql).await;
}

async fn once_each(database: &TestDatabase) {
    let receipts = "select count(*) from {schema}.message_log_2";
    let distinct = "select count(distinct message_key) from {schema}.message_log_2";
    let (receipts, distinct) = (number(database, receipts).await, number(database, distinct).await);
    assert_eq!((receipts, distinct), (3 * each(), 3 * each()), "one receipt a message");
    let wrong = "select count(*) from (select body from public.note group by body having count(*) <> 2) as wrong";
    let notes = "select count(*) from public.note";
    assert_eq!((number(database, notes).await, number(database, wrong).await), (2 * each(), 0), "each SQL once");
    let dead = dead_letters(database).await;
    let others: Vec<_> = dead.iter().filter(|(_, class, _)| class != "rejected").collect();
    assert!(others.is_empty(), "a lost reply costs no attempt: {others:?}");
    assert_eq!(i64::try_from(dead.len()).unwrap(), each(), "each rejection is one dead letter");
}

/// What a claim took in a reply that was lost is given back and delivered, what it settled is not settled twice.
#[tokio::test]
async fn a_turn_whose_reply_is_lost_loses_no_message_and_settles_none_twice() {
    lose(|statement| statement.contains(".claim_1("), 4, 3).await;
}

/// T5. The outbox, the SQL and the acknowledgement of a delivery are one COMMIT, also when nobody hears what became of it.
#[tokio::test]
async fn t5_a_settle_whose_commit_is_lost_has_its_effects_once() {
    lose(is_commit, 3, 6).await;
}

/// Whatever statement it is: heartbeats, comparisons, statements of handlers, rollbacks.
#[tokio::test]
async fn any_statement_may_be_lost() {
    lose(|_| true, 29, 12).await;
}
