//! W5: what happens to a key while a seek of it waits for what runs of it. Deliveries are claimed and settled by hand.

use std::{collections::BTreeMap, sync::atomic::Ordering::Relaxed, time::Duration};

use anyhow::Result;
use millstream::{
    config::Start,
    engine::{self, GroupHandle, HostId, KeySeeked, Settlement, Token, Verdict, Wanted, seek_key},
    handler::{Concurrency, NewMessage, Outcome},
};
use tokio::task::JoinHandle;

use crate::support::{
    engine::{Project, done, request},
    keyed::{LIMIT, all_done, keyed, steps, streams},
    wait_for,
};

const PAUSED: &str = "select count(*) from {schema}.message_key_lease where paused_at is not null";

/// A host that takes one message at a time.
struct Taker {
    project: Project,
    host: HostId,
    group: GroupHandle,
}

type Taken = (Token, i64);

impl Taker {
    async fn start() -> Self {
        let project = Project::declare(&streams("")).await;
        let host = engine::register(&project.database, "test", LIMIT).await.unwrap();
        let group = project.group("email").await;
        Self { project, host, group }
    }

    async fn produce(&self, count: usize) {
        let messages: Vec<_> = (0..count).map(|n| keyed("a", Concurrency::Parallel, &n.to_string())).collect();
        self.project.produce("orders", &messages).await;
    }

    /// What one turn brings: a message, and one of a gap.
    async fn turn(&self) -> Vec<Taken> {
        let wanted = Wanted { messages: 1, bytes: 1 << 20, retries: 1 };
        let turn = engine::claim(&self.project.database, self.host, &self.group, &request(&[], wanted)).await;
        turn.expect("claim").claimed.iter().map(|claimed| (claimed.token, claimed.message.id)).collect()
    }

    /// What committed beside an open producer is taken once it is known that this one is open.
    async fn take(&self) -> Taken {
        let taken = async {
            loop {
                match self.turn().await[..] {
                    [] => {}
                    [taken] => return taken,
                    _ => panic!("more than one"),
                }
            }
        };
        tokio::time::timeout(LIMIT, taken).await.expect("there is one")
    }

    /// Takes what a turn brings, counts it and does it.
    async fn take_and_do(&self, came: &mut BTreeMap<i64, u32>) -> usize {
        let taken = self.turn().await;
        for one in &taken {
            *came.entry(one.1).or_default() += 1;
            self.settle(*one, Verdict::Done).await;
        }
        taken.len()
    }

    async fn settle(&self, (token, id): Taken, verdict: Verdict) {
        let one = Settlement::plain(token, id, verdict);
        engine::settle(&self.project.database, self.host, &self.group, &[one]).await.expect("settle");
    }

    /// A seek of the key to its beginning, which has read what it is about and waits for what is taken.
    async fn begin_to_seek(&self) -> JoinHandle<Result<KeySeeked>> {
        self.begin_to_seek_within(LIMIT).await
    }

    async fn begin_to_seek_within(&self, patience: Duration) -> JoinHandle<Result<KeySeeked>> {
        let database = self.project.database.another_host().await;
        let statements = database.statements.clone();
        let seek = tokio::spawn(async move { seek_key(&database, "email", "a", &Start::Earliest, patience).await });
        // Whatever it does first, then it looks again and again.
        wait_for("it waits", LIMIT, async || statements.load(Relaxed) > 20).await;
        assert!(!seek.is_finished());
        seek
    }

    /// The seek failed, and left nothing behind.
    async fn refused(&self, seek: JoinHandle<Result<KeySeeked>>, why: &str) {
        let refused = seek.await.unwrap().expect_err(why);
        assert!(format!("{refused:#}").contains(&format!("{why} meanwhile; nothing was changed")), "{refused:#}");
        let rows = "select (select count(*) from {schema}.exception) + (select count(*) from {schema}.claim)";
        assert_eq!((self.project.number(rows).await, self.project.number(PAUSED).await), (0, 0));
    }
}

/// What is claimed while a seek waits is delivered after the seek began: it comes from its claim, however that ends, and from
/// nowhere else.
#[tokio::test]
async fn w5_what_is_claimed_while_a_seek_of_its_key_waits_comes_once() {
    let taker = Taker::start().await;
    taker.produce(2).await;
    let first = taker.take().await;
    let seek = taker.begin_to_seek().await;
    let second = taker.take().await;
    taker.settle(first, Verdict::Done).await;
    let seeked = seek.await.unwrap().expect("seek a key");
    assert_eq!((seeked.replayed, seeked.reset), (1, 0), "the first one: {seeked:?}");
    let again = taker.take().await;
    assert_eq!(again.1, first.1);
    taker.settle(again, Verdict::Done).await;
    taker.settle(second, Verdict::Again { delay: Duration::ZERO, failures: 0, failure: None }).await;
    let last = taker.take().await;
    assert_eq!(last.1, second.1);
    taker.settle(last, Verdict::Done).await;
    assert_eq!(taker.project.left_over().await, 0);
}

/// The same where it had committed late, and lay in a gap that was still open when the seek read the log.
#[tokio::test]
async fn w5_what_comes_out_of_a_gap_while_a_seek_of_its_key_waits_comes_once() {
    let taker = Taker::start().await;
    let mut late = taker.project.session().await;
    late.run("begin; select {schema}.produce('orders', 'late', key => 'a')").await;
    taker.produce(2).await;
    let first = taker.take().await;
    assert_eq!(taker.project.number("select count(*) from {schema}.cursor_gap").await, 1);
    late.run("commit").await;
    let seek = taker.begin_to_seek().await;
    let mut came: BTreeMap<i64, u32> = [(first.1, 1)].into();
    let the_others = async {
        while came.len() < 3 {
            taker.take_and_do(&mut came).await;
        }
    };
    tokio::time::timeout(LIMIT, the_others).await.expect("the gap is closed");
    taker.settle(first, Verdict::Done).await;
    let seeked = seek.await.unwrap().expect("seek a key");
    assert_eq!(seeked.replayed, 1, "{seeked:?}");
    while taker.take_and_do(&mut came).await > 0 {}
    assert_eq!(taker.project.left_over().await, 0);
    let expected: Vec<u32> = came.keys().map(|id| if *id == first.1 { 2 } else { 1 }).collect();
    assert_eq!(came.into_values().collect::<Vec<_>>(), expected);
}

/// A seek of the whole group while one of a key waits brings all of it again: the other changes nothing.
#[tokio::test]
async fn w5_a_seek_of_the_group_ends_the_seek_of_a_key_that_waits() {
    let taker = Taker::start().await;
    taker.produce(2).await;
    taker.take().await;
    taker.take().await;
    let seek = taker.begin_to_seek().await;
    let group = &taker.group;
    let sent = engine::seek(&taker.project.database, group.id, group.stream_id, "email", &Start::Earliest).await;
    sent.expect("seek the group");
    taker.refused(seek, "the group was sent elsewhere").await;
}

/// Another filter takes other messages than those that the seek has read.
#[tokio::test]
async fn w5_a_group_that_is_declared_anew_ends_the_seek_of_a_key_that_waits() {
    let mut taker = Taker::start().await;
    taker.produce(2).await;
    let first = taker.take().await;
    let seek = taker.begin_to_seek().await;
    taker.project = taker.project.declare_again(&streams("filter = { not_key = [\"a\"] }")).await;
    taker.settle(first, Verdict::Done).await;
    taker.refused(seek, "the group was declared anew").await;
}

/// Whoever lets the key go while a seek holds it has messages of it delivered that the seek has not read, and that would
/// then come before those that come again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn w5_a_key_that_is_resumed_ends_the_seek_of_it_that_waits() {
    let taker = Taker::start().await;
    let project = &taker.project;
    let (trace, stuck, handler) = steps(|_, _| done());
    stuck.store(true, Relaxed);
    let messages: Vec<_> = (0..5).map(|n| keyed("a", Concurrency::Ordered, &n.to_string())).collect();
    project.produce("orders", &messages).await;
    let host = project.host_with(&[("email", handler)]).await;
    wait_for("the first runs", LIMIT, async || trace.started() == 1).await;
    let seek = taker.begin_to_seek().await;
    assert!(engine::resume_key(&project.database, taker.group.id, "a").await.unwrap());
    stuck.store(false, Relaxed);
    taker.refused(seek, "the key was resumed, or has more lanes").await;
    all_done(project).await;
    host.drain().await;
    assert_eq!(trace.ended(), ["0", "1", "2", "3", "4"], "as if nobody had asked");
}

/// What dies while a seek of its key waits was delivered after it began: it does not come again, and is not marked so.
#[tokio::test]
async fn w5_what_dies_while_a_seek_of_its_key_waits_is_not_marked() {
    let taker = Taker::start().await;
    taker.produce(2).await;
    let first = taker.take().await;
    let seek = taker.begin_to_seek().await;
    let second = taker.take().await;
    let outcome = Outcome::Reject { reason: "bad".into() };
    taker.settle(second, engine::verdict(outcome, 0, &taker.group.policy.retry, 0.0)).await;
    taker.settle(first, Verdict::Done).await;
    let seeked = seek.await.unwrap().expect("seek a key");
    assert_eq!((seeked.replayed, seeked.dead_letters_replayed), (1, 0), "{seeked:?}");
    assert_eq!(taker.project.number("select count(*) from {schema}.dead_letter where replayed_at is null").await, 1);
}

/// The hold of a seek is its own: an operator's hold that begins meanwhile outlives it, however it ends, and one that ended and
/// began anew is told apart from it.
#[tokio::test]
async fn w5_an_operators_hold_is_told_from_that_of_a_seek() {
    for (resumes, settles) in [(false, true), (false, false), (true, true)] {
        let taker = Taker::start().await;
        let (database, group) = (&taker.project.database, taker.group.id);
        taker.produce(1).await;
        let first = taker.take().await;
        let patience = if settles { LIMIT } else { Duration::from_secs(3) };
        let seek = taker.begin_to_seek_within(patience).await;
        if resumes {
            assert!(engine::resume_key(database, group, "a").await.unwrap());
        }
        assert!(engine::pause_key(database, group, "a").await.unwrap(), "it is the operator's now");
        assert!(!engine::pause_key(database, group, "a").await.unwrap());
        if settles {
            taker.settle(first, Verdict::Done).await;
        }
        let seeked = seek.await.unwrap();
        assert_eq!(seeked.is_ok(), settles && !resumes, "{seeked:?}");
        assert_eq!(taker.project.number(PAUSED).await, 1, "it stays held");
        assert!(engine::resume_key(database, group, "a").await.unwrap());
    }
}

/// One seek of a key at a time. One that was stopped in the middle leaves the key held, which the next is told.
#[tokio::test]
async fn w5_a_seek_does_not_meet_another_of_its_key() {
    let taker = Taker::start().await;
    let database = &taker.project.database;
    taker.produce(1).await;
    let first = taker.take().await;
    let seek = taker.begin_to_seek().await;
    let refused = seek_key(database, "email", "a", &Start::Earliest, LIMIT).await.unwrap_err();
    assert!(format!("{refused:#}").contains("another seek holds key \"a\""), "{refused:#}");
    seek.abort();
    assert!(seek.await.unwrap_err().is_cancelled());
    let refused = seek_key(database, "email", "a", &Start::Earliest, LIMIT).await.unwrap_err();
    assert!(format!("{refused:#}").contains("`key resume` lets the key go"), "{refused:#}");
    taker.settle(first, Verdict::Done).await;
    assert!(engine::resume_key(database, taker.group.id, "a").await.unwrap());
    assert_eq!(seek_key(database, "email", "a", &Start::Earliest, LIMIT).await.expect("seek a key").replayed, 1);
    assert_eq!(taker.project.number(PAUSED).await, 0);
}

/// Messages keep the lanes of the rule under which they were produced: whoever holds the key holds those too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn w5_a_held_key_is_held_on_the_lanes_of_older_rules() {
    let rule = |pattern: &str, shards: u32| {
        let rule = format!("match = \"{pattern}\"\nconcurrency = \"ordered\"\nshards = {shards}");
        format!("[[streams.orders.key_rules]]\n{rule}\n")
    };
    let declared = |rules: &[String]| format!("{}\n{}", streams(""), rules.concat());
    let mut project = Project::declare(&declared(&[rule("a*", 4)])).await;
    let plain = |n: u32| NewMessage { concurrency: None, ..keyed("a", Concurrency::Ordered, &n.to_string()) };
    project.produce("orders", &(0..40).map(plain).collect::<Vec<_>>()).await;
    let group = project.group("email").await.id;
    for (rules, lanes) in [
        (vec![rule("a*", 4)], 4),
        (vec![rule("a*", 2)], 4),
        (vec![rule("a", 1), rule("a*", 2)], 4),
        (vec![], 4),
        (vec![rule("a*", 6)], 6),
        (vec![rule("b*", 1)], 6),
    ] {
        assert!(engine::pause_key(&project.database, group, "a").await.unwrap());
        project = project.declare_again(&declared(&rules)).await;
        assert_eq!(project.number(PAUSED).await, lanes, "held before {rules:?}");
        assert!(engine::resume_key(&project.database, group, "a").await.unwrap());
        assert!(engine::pause_key(&project.database, group, "a").await.unwrap());
        assert_eq!(project.number(PAUSED).await, lanes, "{rules:?}");
        assert!(engine::resume_key(&project.database, group, "a").await.unwrap());
    }
    assert!(engine::pause_key(&project.database, group, "a").await.unwrap());
    let (trace, _, handler) = steps(|_, _| done());
    project.produce("orders", &[keyed("c", Concurrency::Ordered, "c")]).await;
    let host = project.host_with(&[("email", handler)]).await;
    wait_for("another key's message ends", LIMIT, async || trace.ended().len() == 1).await;
    wait_for("the others wait", LIMIT, async || {
        project.number("select count(*) from {schema}.exception where state = 'deferred'").await == 40
    })
    .await;
    assert_eq!(trace.all(), ["+c", "-c"]);
    assert!(engine::resume_key(&project.database, group, "a").await.unwrap());
    all_done(&project).await;
    host.drain().await;
    assert_eq!(trace.ended().len(), 41);
}
