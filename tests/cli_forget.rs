//! `forget`: a group that streams.toml no longer names goes with all that is its own, and nothing else does.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering::Relaxed},
    },
    time::Duration,
};

use millstream::{
    engine::{self, Settlement, Verdict, Wanted},
    handler::{Concurrency, Failure, FailureClass, Finished, Handler, Handling, Message, NewMessage},
};
use serde_json::json;
use tokio_util::sync::CancellationToken;

use crate::support::{
    PATIENCE,
    engine::{Project, done, numbered, request, text},
    verbs::Verbs,
    wait_for,
};

const ONE: &str = r#"
[streams.orders]
key = { concurrency = "ordered" }
[groups.email]
stream = "orders"
handler = "email.wasm"
"#;

/// And the group that is forgotten.
fn both() -> String {
    format!("{ONE}[groups.audit]\nstream = \"orders\"\nhandler = \"audit.wasm\"\n")
}

/// Leaves rows of `group` in every table that has some: claims, retries, a dead letter, keys, a gap, a paused key.
async fn use_all(project: &Project, group: &str) {
    let handle = project.group(group).await;
    let host = engine::register(&project.database, "left-handed", PATIENCE).await.expect("register");
    let wanted = Wanted { messages: 100, bytes: 1 << 20, retries: 10 };
    let turn = engine::claim(&project.database, host, &handle, &request(&[], wanted)).await.expect("claim");
    let failure = Failure { class: FailureClass::Panic, error: "told to".to_owned() };
    let again = Verdict::Again { delay: Duration::from_secs(3600), failures: 1, failure: Some(failure.clone()) };
    for (claimed, verdict) in turn.claimed.iter().zip([Verdict::Dead { attempts: 3, failure }, again]) {
        let one = Settlement::plain(claimed.token, claimed.message.id, verdict);
        engine::settle(&project.database, host, &handle, &[one]).await.expect("settle");
    }
    engine::pause_key(&project.database, handle.id, "held").await.expect("hold a key");
}

/// Rows that name the group, by table.
async fn rows(project: &Project, id: i32) -> Vec<(String, i64)> {
    let schema = project.database.schema.name();
    let tables = format!(
        "select coalesce(string_agg(table_name, ' ' order by table_name), '') from information_schema.columns \
         where table_schema = '{schema}' and column_name = 'group_id'"
    );
    let tables: String =
        sqlx::query_scalar(sqlx::AssertSqlSafe(tables)).fetch_one(&project.database.pool).await.expect("tables");
    let mut rows = Vec::new();
    for table in tables.split(' ') {
        let count = project.number(&format!("select count(*) from {{schema}}.{table} where group_id = {id}")).await;
        rows.push((table.to_owned(), count));
    }
    assert!(rows.len() >= 7, "{rows:?}");
    rows
}

#[tokio::test]
async fn a_forgotten_group_leaves_nothing_behind_and_its_neighbour_everything() {
    let verbs = Verbs::declare(&both()).await;
    let project = &verbs.project;
    let mut open = project.session().await;
    open.run("begin; select {schema}.produce('orders', 'late')").await;
    let keyed = |n: usize| NewMessage {
        key: Some(format!("k{}", n % 3)),
        concurrency: Some(Concurrency::Ordered),
        ..text("x")
    };
    project.produce("orders", &numbered(5)).await;
    project.produce("orders", &(0..9).map(keyed).collect::<Vec<_>>()).await;
    for group in ["audit", "email"] {
        use_all(project, group).await;
    }
    open.run("rollback").await;
    let (audit, email) = (project.group("audit").await.id.0, project.group("email").await.id.0);
    let (before, neighbour) = (rows(project, audit).await, rows(project, email).await);
    for table in ["claim", "cursor", "cursor_gap", "dead_letter", "exception", "message_key_lease"] {
        assert!(before.iter().any(|(name, count)| name == table && *count > 0), "{table}: {before:?}");
    }

    verbs.refused(&["forget", "audit", "--yes"], 1, &["streams.toml still names group \"audit\"", "[groups.audit]"]);
    verbs.file("streams.toml", ONE);
    verbs.refused(&["forget", "audti"], 1, &["did you mean \"audit\"?"]);
    verbs.refused(&["forget", "audit"], 2, &["add --yes", "1 dead letter"]);
    let would = verbs.json(&["forget", "audit", "--dry-run"]);
    assert_eq!((&would["dry_run"], &would["dead_letters"]), (&true.into(), &1.into()), "{would}");
    assert_eq!(rows(project, audit).await, before, "nothing was changed");

    let told = verbs.text(&["status"]);
    assert!(told.contains("declared, but not in streams.toml: group audit; `millstream forget GROUP`"), "{told}");
    let forgot = verbs.json(&["forget", "audit", "--yes"]);
    let expected = json!({ "group": "audit", "position": would["position"], "dead_letters": 1, "under_way": would["under_way"], "dry_run": false });
    assert_eq!(forgot, expected);
    let left: Vec<_> = rows(project, audit).await.into_iter().filter(|(_, count)| *count > 0).collect();
    assert!(left.is_empty(), "{left:?}");
    assert_eq!(rows(project, email).await, neighbour, "the other group has all that it had");
    assert_eq!(project.number("select count(*) from {schema}.consumer_group").await, 1);

    // The same name again is a new group, from its start.
    verbs.file("streams.toml", both());
    assert_eq!(verbs.text(&["apply"]), "create group audit\n");
    let groups = verbs.json(&["groups", "audit"]);
    assert_eq!((&groups[0]["lag"], &groups[0]["dead"]), (&14.into(), &0.into()), "{groups}");
}

/// Runs until it is cut, and produces all the same.
#[derive(Clone, Default)]
struct Running {
    began: Arc<AtomicU32>,
    cut: Arc<AtomicU32>,
}

impl Handler for Running {
    fn handle<'a>(&'a self, _message: Message, cut: &'a CancellationToken) -> Handling<'a> {
        self.began.fetch_add(1, Relaxed);
        Box::pin(async move {
            cut.cancelled().await;
            self.cut.fetch_add(1, Relaxed);
            Finished { produced: vec![NewMessage { stream: "receipts".into(), ..text("receipt") }], ..done() }
        })
    }
}

/// W1's like: what runs for the group is cut, what waits for a slot is not begun, and nothing of it is written.
#[tokio::test]
async fn a_host_lets_go_of_a_group_that_is_forgotten_under_it() {
    let project = Project::declare(&format!("{}slots = 4\n[streams.receipts]\n", both())).await;
    let running = Running::default();
    let host = project.host_with(&[("audit", Arc::new(running.clone()))]).await;
    // More than the slots: what waits for one is never begun.
    project.produce("orders", &numbered(200)).await;
    wait_for("every slot is at work", PATIENCE, async || running.began.load(Relaxed) == 4).await;
    let group = project.group("audit").await.id;
    let forgotten = engine::forget(&project.database, group, "audit", false).await.expect("forget");
    assert!(forgotten.under_way >= 4, "{forgotten:?}");
    wait_for("what runs is cut", PATIENCE, async || running.cut.load(Relaxed) == 4).await;
    host.drain().await;
    assert_eq!(running.began.load(Relaxed), 4, "no other delivery began");
    let receipts = project.number("select id::bigint from {schema}.stream where name = 'receipts'").await;
    assert_eq!(project.number(&format!("select count(*) from {{schema}}.message_log_{receipts}")).await, 0);
    let left: Vec<_> = rows(&project, group.0).await.into_iter().filter(|(_, count)| *count > 0).collect();
    assert!(left.is_empty(), "{left:?}");
}

/// An apply that read the group before would declare it again, without a place in its stream: it ends first.
#[tokio::test]
async fn a_forget_waits_for_an_apply_under_way() {
    let project = Project::declare(&both()).await;
    let group = project.group("audit").await.id;
    let mut apply = project.session().await;
    apply.run(&format!("begin; {}", include_str!("../host/src/engine/declare_lock.sql"))).await;
    let forget = async || engine::forget(&project.database, group, "audit", false).await;
    assert!(tokio::time::timeout(Duration::from_millis(300), forget()).await.is_err(), "it waits");
    assert_eq!(project.group("audit").await.id, group, "nothing was done");
    apply.run("rollback").await;
    assert!(!forget().await.expect("forget").dry_run);
}
