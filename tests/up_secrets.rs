//! A group runs with its secrets or waits for them, the others run; what changes is taken over without a restart. Method:
//! the real program; `flaky` reports what it sees as its secret.

use std::fs;

use millstream::database::Database;
use rustix::process::Signal;
use serde_json::json;

use crate::support::{
    PATIENCE, Program, TestDatabase, database,
    hosts::{SECRET, assert_tells_no_secret, number, playground, produce, stats, up},
    wait_for,
};

const FROM_A_FILE: &str = "secrets = { API_KEY = { file = \"secrets/api-key\" } }";

/// Two groups: `worker`, which needs the secret, and `other`, which does not.
fn two_groups(worker: &str) -> String {
    let other = "[groups.other]\nstream = \"receipts\"\nhandler = \"hello.wasm\"\n";
    format!("{}{other}", playground("", worker))
}

fn write_secret(program: &Program, value: &str) {
    let folder = program.folder().join("secrets");
    fs::create_dir_all(&folder).unwrap();
    // As whoever rotates secrets should: whole, by a rename.
    fs::write(folder.join("new"), value).unwrap();
    fs::rename(folder.join("new"), folder.join("api-key")).unwrap();
}

/// The secrets that deliveries have reported, in order.
async fn reported(database: &Database) -> Vec<Option<String>> {
    let stream: i32 = sqlx::query_scalar(database.schema.sql("select id from {schema}.stream where name = 'receipts'"))
        .fetch_one(&database.pool)
        .await
        .unwrap();
    let sql =
        "select convert_from(payload, 'UTF8')::jsonb->>'api_key' from {schema}.message_log_{stream_id} order by id";
    sqlx::query_scalar(database.schema.stream_sql(sql, stream)).fetch_all(&database.pool).await.unwrap()
}

async fn ask(database: &Database) -> Option<String> {
    let before = reported(database).await.len();
    produce(database, "playground", json!({"do": "report"}), 1).await;
    wait_for("a report", PATIENCE, async || reported(database).await.len() > before).await;
    reported(database).await[before].clone()
}

/// Asks until the answer is this one.
async fn answers(database: &Database, expected: &str) {
    wait_for("the secret is taken over", PATIENCE, async || ask(database).await.as_deref() == Some(expected)).await;
}

async fn why_waiting(database: &TestDatabase, program: &Program) -> String {
    let stats = stats(database, program).await;
    stats["handlers"]["worker"]["last_error"].as_str().unwrap_or_default().to_owned()
}

#[tokio::test]
async fn a_group_waits_for_its_secret_and_the_others_run() {
    let database = database().await;
    let mut program = Program::with_examples(&two_groups(FROM_A_FILE));
    up(&mut program, &database.url().await).await;
    let telling = "read groups.worker.secrets.API_KEY: file ";
    assert_eq!(program.lines(&["ERROR", telling, "secrets/api-key cannot be read: put the value there"]), 1);
    assert_eq!(
        program.lines(&["ready: ", "groups: other; groups that wait for a handler: worker;"]),
        1,
        "{}",
        program.stderr()
    );
    wait_for("status says why", PATIENCE, async || why_waiting(&database, &program).await.contains(telling)).await;
    program.logged("handler deployed group=other").await;

    produce(&database, "playground", json!({"do": "report"}), 1).await;
    write_secret(&program, &format!("{SECRET}-1\n"));
    wait_for("the message it waited with", PATIENCE, async || reported(&database).await.len() == 1).await;
    assert_eq!(reported(&database).await[0].as_deref(), Some(format!("{SECRET}-1").as_str()));
    wait_for("status is clear", PATIENCE, async || why_waiting(&database, &program).await.is_empty()).await;

    // A secret that is exchanged, one that is gone for a while, and one that is back.
    write_secret(&program, &format!("{SECRET}-2"));
    answers(&database, &format!("{SECRET}-2")).await;
    fs::remove_file(program.folder().join("secrets/api-key")).unwrap();
    program.logged("it goes on with the secrets it has").await;
    assert_eq!(ask(&database).await.as_deref(), Some(format!("{SECRET}-2").as_str()));
    write_secret(&program, &format!("{SECRET}-3"));
    answers(&database, &format!("{SECRET}-3")).await;
    assert_eq!(program.lines(&["it goes on with the secrets it has"]), 1);
    assert_eq!(program.lines(&["ERROR"]), 1, "{}", program.stderr());
    program.signal(Signal::TERM);
    assert!(program.ended(PATIENCE).await.success(), "{}", program.stderr());
    assert_tells_no_secret(&program);
    let stored = "select count(*) from {schema}.host h, {schema}.consumer_group g
        where position('hush' in h.stats::text) > 0 or position('hush' in g.policy::text) > 0";
    assert_eq!(number(&database, stored).await, 0, "a secret is in the database");
}

#[tokio::test]
async fn a_changed_file_that_needs_a_missing_secret_stops_that_group_only() {
    let database = database().await;
    let mut program = Program::with_examples(&two_groups(""));
    up(&mut program, &database.url().await).await;
    assert_eq!(ask(&database).await, None);
    let file = program.folder().join("streams.toml");
    fs::write(&file, two_groups("secrets = { API_KEY = { env = \"MILLSTREAM_TEST_NOT_SET\" } }")).unwrap();
    program.logged("environment variable MILLSTREAM_TEST_NOT_SET is not set").await;
    produce(&database, "playground", json!({"do": "report"}), 1).await;
    wait_for("status says why", PATIENCE, async || {
        why_waiting(&database, &program).await.contains("MILLSTREAM_TEST_NOT_SET")
    })
    .await;
    assert_eq!(reported(&database).await.len(), 1, "the group runs without its secret");
    fs::write(&file, two_groups(FROM_A_FILE)).unwrap();
    write_secret(&program, SECRET);
    wait_for("the message it waited with", PATIENCE, async || reported(&database).await.len() == 2).await;
    assert_eq!(reported(&database).await[1].as_deref(), Some(SECRET));
    program.signal(Signal::TERM);
    assert!(program.ended(PATIENCE).await.success(), "{}", program.stderr());
    assert_tells_no_secret(&program);
}
