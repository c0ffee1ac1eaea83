//! `why`: every way in which a message can stand has its answer, for people and for machines.

use std::time::Duration;

use millstream::{
    engine::{self, Claimed, GroupHandle, HostId, Note, Settlement, Verdict, Wanted},
    handler::{Concurrency, Failure, FailureClass, NewMessage},
};
use serde_json::{Value, json};

use crate::support::{
    PATIENCE,
    engine::{Project, numbered, request, text},
    verbs::Verbs,
    wait_for,
};

const STREAMS_TOML: &str = r#"
[streams.orders]
partition_rows = 1000
retention = "1h"
[groups.email]
stream = "orders"
handler = "email.wasm"
filter = { not_key = ["skip-*"] }
retry = { max_attempts = 3, base = "1h", max = "1h" }
"#;

/// One host's turns by hand.
struct Turns<'a> {
    project: &'a Project,
    host: HostId,
    group: GroupHandle,
}

impl<'a> Turns<'a> {
    async fn new(project: &'a Project) -> Self {
        let host = engine::register(&project.database, "left-handed", PATIENCE).await.expect("register");
        Self { project, host, group: project.group("email").await }
    }

    async fn claim(&self) -> Vec<Claimed> {
        let wanted = Wanted { messages: 10, bytes: 1 << 20, retries: 10 };
        let turn =
            engine::claim(&self.project.database, self.host, &self.group, &request(&[], wanted)).await.expect("claim");
        assert_eq!(turn.note, Note::Claimed);
        turn.claimed
    }

    /// Turns until this message has come, and settles it done.
    async fn finish(&self, id: i64) {
        loop {
            if let Some(claimed) = self.claim().await.iter().find(|claimed| claimed.message.id == id) {
                return self.settle(claimed, Verdict::Done).await;
            }
        }
    }

    async fn settle(&self, claimed: &Claimed, verdict: Verdict) {
        let settlement = Settlement::plain(claimed.token, claimed.message.id, verdict);
        engine::settle(&self.project.database, self.host, &self.group, &[settlement]).await.expect("settle");
    }
}

/// More than a line has room for, and a second line.
fn long_error() -> String {
    format!("{}\nmore", "long ".repeat(100))
}

fn failure(class: FailureClass) -> Failure {
    Failure { class, error: "hunter2".to_owned() }
}

/// What `why` answers about message `id` of `email`, without the fields that every answer has.
fn why(verbs: &Verbs, id: i64) -> Value {
    let mut answer = verbs.json(&["why", "email", &id.to_string()]);
    let fields = answer.as_object_mut().expect("an object");
    assert_eq!((fields.remove("group"), fields.remove("stream")), (Some("email".into()), Some("orders".into())));
    assert_eq!(fields.remove("message_id"), Some(id.into()));
    for always in ["message_key", "paused_at"] {
        assert!(fields.remove(always).is_some(), "{always}");
    }
    answer
}

fn line(verbs: &Verbs, id: i64) -> String {
    let text = verbs.text(&["why", "email", &id.to_string()]);
    let line = text.strip_suffix('\n').expect("a line");
    assert!(!line.contains('\n'), "{line}");
    line.strip_prefix(&format!("message {id} of orders: ")).expect("the message").to_owned()
}

/// Messages 1 to 6: done, held, failed, dead, passed by the filter, delayed.
async fn six_messages(project: &Project) -> Turns<'_> {
    let skipped = NewMessage { key: Some("skip-1".into()), ..text("5") };
    let delayed = NewMessage { delay: Some(Duration::from_secs(3600)), ..text("6") };
    let messages = [text("1"), text("2"), text("3"), text("4"), skipped, delayed];
    project.produce("orders", &messages).await;
    let turns = Turns::new(project).await;
    let claimed = turns.claim().await;
    assert_eq!(claimed.iter().map(|claimed| claimed.message.id).collect::<Vec<_>>(), [1, 2, 3, 4]);
    turns.settle(&claimed[0], Verdict::Done).await;
    let failed = Some(Failure { error: long_error(), ..failure(FailureClass::Timeout) });
    turns.settle(&claimed[2], Verdict::Again { delay: Duration::from_secs(3600), failures: 1, failure: failed }).await;
    turns.settle(&claimed[3], Verdict::Dead { attempts: 3, failure: failure(FailureClass::Panic) }).await;
    turns
}

#[tokio::test]
async fn what_became_of_a_message_or_what_it_waits_for_is_named() {
    let verbs = Verbs::declare(STREAMS_TOML).await;
    let turns = six_messages(&verbs.project).await;
    assert_eq!(
        (why(&verbs, 1), line(&verbs, 1)),
        (json!({ "state": "settled" }), "done, unless its dead letter was discarded".into())
    );
    let held = why(&verbs, 2);
    let since = held["since"].as_str().expect("a time").to_owned();
    let expected = json!({ "state": "claimed", "host": "left-handed", "host_alive": true, "since": since, "attempt": 1, "max_attempts": 3 });
    assert_eq!((held, line(&verbs, 2)), (expected, format!("with host left-handed since {since}, attempt 1 of 3")));
    let retrying = why(&verbs, 3);
    let due = retrying["due_at"].as_str().expect("a time").to_owned();
    let expected = json!({ "state": "retrying", "due_at": due, "is_due": false, "attempt": 2, "max_attempts": 3, "class": "timeout", "error": long_error(), "redriven_from": null });
    assert_eq!(
        (retrying, line(&verbs, 3)),
        (
            expected,
            format!("waits for attempt 2 of 3, at {due}; the last one failed: timeout: {}...", "long ".repeat(48))
        )
    );
    let dead = why(&verbs, 4);
    let (id, died) =
        (dead["dead_letter_id"].as_i64().expect("an id"), dead["died_at"].as_str().expect("a time").to_owned());
    let expected = json!({ "state": "dead", "dead_letter_id": id, "class": "panic", "error": "hunter2", "attempts": 3, "died_at": died, "redriven_at": null });
    assert_eq!(
        (dead, line(&verbs, 4)),
        (expected, format!("dead letter {id} since {died}, after 3 attempts: panic: hunter2"))
    );
    assert_eq!(
        (why(&verbs, 5), line(&verbs, 5)),
        (json!({ "state": "filtered" }), "the group's filter does not match it".into())
    );
    assert_eq!(verbs.json(&["why", "email", "5"])["message_key"], "skip-1");
    let delayed = why(&verbs, 6);
    assert_eq!(
        (&delayed["state"], line(&verbs, 6)),
        (&"delayed".into(), format!("delayed until {}", delayed["due_at"].as_str().expect("a time")))
    );
    for nowhere in [7, 0, 1 << 40] {
        assert_eq!(why(&verbs, nowhere), json!({ "state": "unknown", "last_id": 6 }));
    }
    assert_eq!(line(&verbs, 7), "there is none yet, the last id drawn is 6");
    verbs.refused(&["why", "emial", "1"], 1, &["did you mean \"email\"?"]);
    verbs.refused(&["why", "email", "x"], 2, &["'x'"]);
    // A host whose lease has run out, and a message that was redriven.
    verbs.text(&["dead", "redrive", &id.to_string()]);
    let redriven = why(&verbs, 4);
    assert_eq!(
        (&redriven["state"], &redriven["is_due"], &redriven["redriven_from"]),
        (&"retrying".into(), &true.into(), &id.into())
    );
    assert!(
        line(&verbs, 4).starts_with("waits for attempt 1 of 3, due since 2")
            && line(&verbs, 4).ends_with(&format!("; redriven from dead letter {id}"))
    );
    assert_eq!(turns.claim().await.len(), 1);
    let running = json!({ "state": "claimed", "host": "left-handed", "host_alive": true, "since": null, "attempt": 1, "max_attempts": 3 });
    assert_eq!(why(&verbs, 4), running);
    verbs.project.run("update {schema}.host set expires_at = clock_timestamp()").await;
    assert_eq!((&why(&verbs, 2)["host_alive"], &why(&verbs, 4)["host_alive"]), (&false.into(), &false.into()));
    assert!(line(&verbs, 2).ends_with(", attempt 1 of 3; its lease has run out, another host takes over"));
}

#[tokio::test]
async fn an_id_that_is_not_visible_is_told_from_one_that_never_comes() {
    let verbs = Verbs::declare(STREAMS_TOML).await;
    let turns = six_messages(&verbs.project).await;
    let mut open = verbs.project.session().await;
    let pid = open.number("select pg_backend_pid()::bigint").await;
    open.run("begin; select {schema}.produce('orders', '7')").await;
    let mut failing = verbs.project.session().await;
    failing.run("begin; select {schema}.produce('orders', '8'); rollback").await;
    verbs.project.produce("orders", &numbered(1)).await;
    let not_visible = json!({ "state": "not_visible", "pid": pid });
    assert_eq!((why(&verbs, 7), why(&verbs, 8)), (not_visible.clone(), not_visible.clone()), "beyond the position");
    assert_eq!(why(&verbs, 9)["state"], "unclaimed");
    turns.finish(9).await;
    assert_eq!((why(&verbs, 7), why(&verbs, 9)), (not_visible, json!({ "state": "settled" })), "in the gap");
    assert_eq!(line(&verbs, 7), format!("not visible, its transaction may still be open (database process {pid})"));
    open.run("commit").await;
    assert_eq!((why(&verbs, 7), why(&verbs, 8)), (json!({ "state": "in_gap" }), json!({ "state": "rolled_back" })));
    assert_eq!(line(&verbs, 7), "committed late, below the group's position; the next turn takes it");
    turns.finish(7).await;
    assert_eq!((why(&verbs, 7), why(&verbs, 8)), (json!({ "state": "settled" }), json!({ "state": "rolled_back" })));
    assert_eq!(
        line(&verbs, 8),
        "there is none and will be none: rolled back, thinned as an old version of its key, or removed by hand"
    );
}

#[tokio::test]
async fn what_is_not_yet_claimed_is_told_from_what_was_passed() {
    let verbs = Verbs::declare(STREAMS_TOML).await;
    let turns = six_messages(&verbs.project).await;
    verbs.project.produce("orders", &numbered(3)).await;
    assert_eq!(why(&verbs, 9), json!({ "state": "unclaimed", "before": 2, "before_exact": true }));
    assert_eq!(
        (line(&verbs, 7), line(&verbs, 9)),
        ("not yet claimed, it is the next".into(), "not yet claimed, 2 messages before it".into())
    );
    let paused = verbs.json(&["pause", "email"])["paused_at"].as_str().expect("a time").to_owned();
    assert_eq!(verbs.json(&["why", "email", "9"])["paused_at"], *paused);
    assert_eq!(line(&verbs, 9), format!("not yet claimed, 2 messages before it; the group is paused since {paused}"));
    assert!(line(&verbs, 3).ends_with(&format!("; the group is paused since {paused}")));
    assert_eq!(line(&verbs, 1), "done, unless its dead letter was discarded", "of what has ended nothing waits for it");
    verbs.text(&["resume", "email"]);
    // Sent over some of it: what the group had passed before is told from what it never saw.
    verbs.text(&["seek", "email", "--to", "9", "--yes"]);
    assert_eq!(why(&verbs, 1), json!({ "state": "before_start", "begins_after": 8, "claimed_before": true }));
    assert_eq!(why(&verbs, 7), json!({ "state": "before_start", "begins_after": 8, "claimed_before": false }));
    assert_eq!(line(&verbs, 7), "the group began, or was sent, after 8, behind it");
    assert_eq!(why(&verbs, 9)["before"], 0);
    assert_eq!(why(&verbs, 4)["state"], "dead");
    // Sent back: a dead letter does not end what comes again, and what it comes to then is told.
    verbs.text(&["seek", "email", "--to", "4", "--yes"]);
    assert_eq!(why(&verbs, 4), json!({ "state": "unclaimed", "before": 0, "before_exact": true }));
    let turns = Turns { group: verbs.project.group("email").await, ..turns };
    turns.finish(4).await;
    assert_eq!((why(&verbs, 4), &why(&verbs, 3)["claimed_before"]), (json!({ "state": "settled" }), &true.into()));
}

#[tokio::test]
async fn what_retention_removed_is_told() {
    let verbs = Verbs::declare(STREAMS_TOML).await;
    let fill = "insert into {schema}.message_log_1 (id, payload, created_at)
        select nextval('{schema_text}.message_log_1_id'), 'x', now() - interval '2 hours' from generate_series(1, 1500)";
    verbs.project.run(fill).await;
    verbs.text(&["seek", "email", "--to", "latest", "--yes"]);
    let report = engine::maintain(&verbs.project.database, engine::Step::Retention).await.expect("retention");
    assert_eq!(report.rows, 1);
    assert_eq!(why(&verbs, 1000), json!({ "state": "removed", "begins_after": 1000 }));
    assert_eq!(line(&verbs, 1000), "removed by retention, the log begins after 1000");
    assert_eq!(why(&verbs, 1001)["state"], "before_start");
}

/// Beyond the position nobody has recorded yet who may fill a hole: while anybody produces, it is not called lost.
#[tokio::test]
async fn a_message_behind_a_new_producer_beyond_the_position_is_not_called_lost() {
    let verbs = Verbs::declare(STREAMS_TOML).await;
    verbs.project.produce("orders", &numbered(1)).await;
    let mut failing = verbs.project.session().await;
    failing.run("begin; select {schema}.produce('orders', '2'); rollback").await;
    assert_eq!(why(&verbs, 2), json!({ "state": "rolled_back" }), "nobody produces");
    let mut open = verbs.project.session().await;
    open.run("begin; select {schema}.produce('orders', '3')").await;
    assert_eq!((&why(&verbs, 2)["state"], &why(&verbs, 3)["state"]), (&"not_visible".into(), &"not_visible".into()));
    open.run("commit").await;
    wait_for("it is visible", PATIENCE, async || why(&verbs, 3)["state"] == "unclaimed").await;
    assert_eq!(why(&verbs, 2), json!({ "state": "rolled_back" }));
}

/// What waits behind its key names what the key waits for; a version that has lost names the one it lost to.
#[tokio::test]
async fn what_waits_behind_its_key_or_lost_to_a_newer_version_is_told() {
    let verbs = Verbs::declare(STREAMS_TOML).await;
    let keyed = |compaction: bool, key: &str| NewMessage {
        key: Some(key.into()),
        concurrency: (!compaction).then_some(Concurrency::Ordered),
        compaction: compaction.then_some(true),
        ..text("x")
    };
    let messages = [keyed(false, "a"), keyed(false, "a"), keyed(true, "b"), keyed(true, "b")];
    verbs.project.produce("orders", &messages).await;
    assert_eq!(
        (why(&verbs, 3), &why(&verbs, 4)["state"]),
        (json!({ "state": "superseded", "by": 4 }), &"unclaimed".into())
    );
    assert_eq!(line(&verbs, 3), "superseded by message 4, a newer version of its key");
    let turns = Turns::new(&verbs.project).await;
    let claimed = turns.claim().await;
    assert_eq!(claimed.iter().map(|claimed| claimed.message.id).collect::<Vec<_>>(), [1, 2, 4]);
    let behind = |key_host: Value, blocked_by: Value, key_paused: bool, key_rests: bool| json!({ "state": "deferred", "key_host": key_host, "blocked_by": blocked_by, "head_due_at": null, "head_dead_letter": null, "key_paused": key_paused, "key_rests": key_rests });
    // As a settle leaves them: the first failed, the second goes back behind it. Then every other state of a key.
    verbs
        .project
        .run("delete from {schema}.claim;
              insert into {schema}.exception (group_id, message_id, state, message_key, concurrency) values (1, 2, 'deferred', 'a', 'ordered')")
        .await;
    for (state, answer, told) in [
        ("host_id = null, blocked_by = 1", behind(Value::Null, 1.into(), false, false), "message 1 of its key"),
        (
            "blocked_by = null, rests = true",
            behind(Value::Null, Value::Null, false, true),
            "its key, which rests after a dead letter",
        ),
        ("rests = false, paused_at = now()", behind(Value::Null, Value::Null, true, false), "its key, which is paused"),
        ("paused_at = null", behind(Value::Null, Value::Null, false, false), "its key, which the next turn takes"),
        (
            "host_id = (select max(id) from {schema}.host)",
            behind("left-handed".into(), Value::Null, false, false),
            "its key, which is with host left-handed",
        ),
    ] {
        verbs.project.run(&format!("update {{schema}}.message_key_lease set {state} where message_key = 'a'")).await;
        assert_eq!((why(&verbs, 2), line(&verbs, 2)), (answer, format!("waits behind {told}")));
    }
}

/// The head of a key and that head's state: it comes again, or it is a dead letter, and then what an operator can do.
#[tokio::test]
async fn what_waits_behind_a_failed_head_is_told_how_that_one_stands() {
    let verbs = Verbs::declare(STREAMS_TOML).await;
    let ordered = || NewMessage { key: Some("a".into()), concurrency: Some(Concurrency::Ordered), ..text("x") };
    verbs.project.produce("orders", &[ordered(), ordered()]).await;
    let turns = Turns::new(&verbs.project).await;
    let claimed = turns.claim().await;
    let settle = async |verdict, of: &Claimed| {
        let keyed = of.keyed.clone();
        let one = Settlement { keyed, ..Settlement::plain(of.token, of.message.id, verdict) };
        engine::settle(&verbs.project.database, turns.host, &turns.group, &[one]).await.expect("settle");
    };
    let back = Verdict::Again { delay: Duration::ZERO, failures: 0, failure: None };
    let again = |failure| Verdict::Again { delay: Duration::from_secs(3600), failures: 1, failure: Some(failure) };
    settle(back, &claimed[1]).await;
    settle(again(failure(FailureClass::Timeout)), &claimed[0]).await;
    let behind = why(&verbs, 2);
    assert_eq!((&behind["state"], &behind["blocked_by"]), (&"deferred".into(), &1.into()), "{behind}");
    let due = behind["head_due_at"].as_str().expect("a time");
    assert_eq!(line(&verbs, 2), format!("waits behind message 1 of its key, which is due at {due}"));
    assert_eq!(why(&verbs, 1)["due_at"], due);

    verbs.project.run("update {schema}.exception set due_at = clock_timestamp() where message_id = 1").await;
    let claimed = turns.claim().await;
    settle(Verdict::Dead { attempts: 2, failure: failure(FailureClass::Timeout) }, &claimed[0]).await;
    let dead = why(&verbs, 1)["dead_letter_id"].as_i64().expect("an id");
    assert_eq!(why(&verbs, 2)["head_dead_letter"], dead);
    let told = line(&verbs, 2);
    for part in [
        format!("message 1 of its key, which is dead letter {dead}: "),
        format!("dead redrive {dead}`"),
        format!("dead discard {dead}`"),
    ] {
        assert!(told.contains(&part), "{part}: {told}");
    }
}
