//! What meets on one key: a retry and a newer version, a settle and a turn, a refused outbox and those behind it. Turns and
//! settles are made by hand, or held where they meet by a lock.

use std::{sync::Arc, time::Duration};

use millstream::{
    engine::{self, Claimed, GroupHandle, HostId, Settlement, Turn, Verdict, Wanted},
    handler::{Concurrency, Failure, FailureClass, NewMessage, Outcome},
};

use crate::support::{
    engine::{Project, done, request},
    keyed::{LIMIT, all_done, keyed, steps, streams, version},
    wait_for,
};

/// A group and a host that does only what a test makes it do.
struct Hand {
    project: Project,
    host: HostId,
    group: GroupHandle,
}

impl Hand {
    async fn new() -> Self {
        let project = Project::declare(&streams("")).await;
        let host = engine::register(&project.database, "hand", LIMIT).await.unwrap();
        let group = project.group("email").await;
        Self { project, host, group }
    }

    async fn turn(&self, messages: u32, retries: u32) -> Turn {
        let wanted = Wanted { messages, bytes: 1 << 20, retries };
        engine::claim(&self.project.database, self.host, &self.group, &request(&[], wanted)).await.unwrap()
    }

    /// What comes when this delivery is settled, and its key is let go. A version may be deferred once more.
    async fn next(&self, before: &Claimed) -> Turn {
        let keyed = before.keyed.as_ref().filter(|keyed| keyed.mode != Concurrency::Parallel);
        let mut idle: Vec<_> = keyed.map(|keyed| keyed.lane.clone()).into_iter().collect();
        for _ in 0..2 {
            let wanted = Wanted { messages: 10, bytes: 1 << 20, retries: 10 };
            let request = engine::Request { idle: std::mem::take(&mut idle), ..request(&[], wanted) };
            let turn = engine::claim(&self.project.database, self.host, &self.group, &request).await.unwrap();
            if !turn.claimed.is_empty() {
                return turn;
            }
        }
        self.turn(10, 10).await
    }

    async fn settle(&self, claimed: &Claimed, verdict: Verdict) {
        let one = settlement(claimed, verdict);
        engine::settle(&self.project.database, self.host, &self.group, &[one]).await.unwrap();
    }

    async fn count(&self, sql: &str) -> i64 {
        self.project.number(sql).await
    }
}

fn settlement(claimed: &Claimed, verdict: Verdict) -> Settlement {
    Settlement {
        keyed: claimed.keyed.clone(),
        skipped: claimed.message.skipped,
        ..Settlement::plain(claimed.token, claimed.message.id, verdict)
    }
}

fn failure() -> Failure {
    Failure { class: FailureClass::Failed, error: "no".into() }
}

fn handed_back() -> Verdict {
    Verdict::Again { delay: Duration::ZERO, failures: 0, failure: None }
}

fn told(turn: &Turn) -> Vec<(i64, u32, u32)> {
    turn.claimed.iter().map(|one| (one.message.id, one.message.attempt, one.message.skipped)).collect()
}

const VERSIONS: &str = "select coalesce(sum(versions), 0)::bigint from {schema}.skipped_versions";

const EXCEPTIONS: &str = "select count(*) from {schema}.exception";

/// X3, Y5. A version that waits for its retry and has lost meanwhile ends when it is due, in the turn that looks for retries
/// only: nothing is delivered, and the newer version, attempt 1, tells of it.
#[tokio::test]
async fn x3_a_retry_that_has_lost_ends_when_it_is_due() {
    for mode in [Concurrency::Parallel, Concurrency::Exclusive, Concurrency::Ordered] {
        let hand = Hand::new().await;
        hand.project.produce("orders", &[version("k", mode, "old")]).await;
        let first = hand.turn(1, 0).await;
        let again = Verdict::Again { delay: Duration::from_secs(3600), failures: 1, failure: Some(failure()) };
        hand.settle(&first.claimed[0], again).await;
        hand.project.produce("orders", &[version("k", mode, "new")]).await;
        hand.project.run("update {schema}.exception set due_at = clock_timestamp()").await;
        let turn = hand.turn(0, 10).await;
        assert_eq!((turn.claimed.len(), hand.count(EXCEPTIONS).await), (0, 0), "{mode:?}");
        assert_eq!(hand.count(VERSIONS).await, 1);
        let turn = hand.next(&first.claimed[0]).await;
        assert_eq!(told(&turn), [(2, 1, 1)], "{mode:?}");
    }
}

/// Y5. A version that was taken and handed back before it began, and has lost meanwhile, is told of, with what it was to
/// tell itself.
#[tokio::test]
async fn y5_a_version_that_was_handed_back_and_has_lost_is_counted() {
    for mode in [Concurrency::Parallel, Concurrency::Exclusive, Concurrency::Ordered] {
        let hand = Hand::new().await;
        let versions: Vec<_> = (0..3).map(|n| version("k", mode, &n.to_string())).collect();
        hand.project.produce("orders", &versions).await;
        let turn = hand.turn(10, 10).await;
        assert_eq!(told(&turn), [(3, 1, 2)], "{mode:?}: two were passed over");
        hand.project.produce("orders", &[version("k", mode, "new")]).await;
        hand.settle(&turn.claimed[0], handed_back()).await;
        let turn = hand.next(&turn.claimed[0]).await;
        assert_eq!(told(&turn), [(4, 1, 3)], "{mode:?}: three were passed over");
        // It fails and comes again: it tells the same.
        let again = Verdict::Again { delay: Duration::ZERO, failures: 1, failure: Some(failure()) };
        hand.settle(&turn.claimed[0], again).await;
        let turn = hand.next(&turn.claimed[0]).await;
        assert_eq!(told(&turn), [(4, 2, 3)], "{mode:?}");
    }
}

/// Y2, E7. A settle has seen no newer version, and is held before it commits; the newer version arrives, and a turn meets it.
/// The turn waits for the settle, so that it sees what the key waits for: the newer version unblocks it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn y2_a_turn_that_meets_a_newer_version_waits_for_the_settle_of_the_older() {
    let hand = Arc::new(Hand::new().await);
    hand.project.produce("orders", &[version("k", Concurrency::Ordered, "old")]).await;
    let turn = hand.turn(1, 0).await;
    let mut lock = hand.project.session().await;
    lock.run("begin; lock table {schema}.dead_letter in share mode").await;
    let settling = Arc::clone(&hand);
    let settling = tokio::spawn(async move {
        settling.settle(&turn.claimed[0], Verdict::Dead { attempts: 1, failure: failure() }).await;
    });
    let waiting =
        "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'";
    wait_for("the settle stands before its dead letter", LIMIT, async || hand.count(waiting).await == 1).await;
    hand.project.produce("orders", &[version("k", Concurrency::Ordered, "new")]).await;
    let claiming = Arc::clone(&hand);
    let claiming = tokio::spawn(async move { claiming.turn(10, 10).await });
    wait_for("the turn waits for it", LIMIT, async || hand.count(waiting).await == 2).await;
    lock.run("commit").await;
    settling.await.unwrap();
    let mut turn = claiming.await.unwrap();
    if turn.claimed.is_empty() {
        turn = hand.turn(10, 10).await; // it was deferred, and its key is ready
    }
    assert_eq!(turn.claimed.iter().map(|one| one.message.id).collect::<Vec<_>>(), [2]);
    assert_eq!(hand.project.stuck_keys().await, 0);
}

/// What was deferred is taken in turns of bounded bytes, in order, and always one message.
#[tokio::test]
async fn deferred_messages_are_taken_in_turns_of_bounded_bytes() {
    let hand = Hand::new().await;
    let (large, larger) = ("x".repeat(300_000), "x".repeat(600_000));
    let batch: Vec<_> = [&large, &large, &large, &large, &larger, &larger]
        .into_iter()
        .map(|payload| keyed("k", Concurrency::Ordered, payload))
        .collect();
    hand.project.produce("orders", &batch).await;
    hand.project
        .run(
            "insert into {schema}.exception (group_id, message_id, state, message_key, concurrency)
             select 1, id, 'deferred', message_key, concurrency from {schema}.message_log_1;
             insert into {schema}.message_key_lease (group_id, message_key) values (1, 'k');
             update {schema}.cursor set claimed = 6",
        )
        .await;
    let mut taken = Vec::new();
    let mut request = request(&[], Wanted { messages: 100, bytes: 1_000_000, retries: 0 });
    for _ in 0..4 {
        let turn = engine::claim(&hand.project.database, hand.host, &hand.group, &request).await.unwrap();
        taken.push(turn.claimed.iter().map(|one| one.message.id).collect::<Vec<_>>());
        request.done.exceptions = turn.claimed.iter().map(|one| (one.token.claim, one.message.id)).collect();
        request.idle =
            turn.claimed.first().and_then(|one| one.keyed.clone()).map(|keyed| keyed.lane).into_iter().collect();
        request.wanted.bytes = if taken.len() == 2 { 1 } else { 1_000_000 };
    }
    assert_eq!(taken, [vec![1, 2, 3], vec![4, 5], vec![6], vec![]]);
}

/// O1, O7, O8. What a handler produced is refused: the delivery has failed, and in the transaction that says so those behind
/// it go back, so that nobody who takes the key can run anything before them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn o7_those_behind_a_refused_outbox_go_back_with_it() {
    let project = Project::declare(&(streams("") + "[streams.receipts]\n")).await;
    // At the end of each transaction in which a message comes to wait: what its host still holds.
    project
        .run(
            "create table {schema}.held (messages bigint);
             create function {schema}.note_held() returns trigger language plpgsql as $$
             begin
                 insert into {schema}.held select coalesce(sum(upper(r) - lower(r)), 0) from {schema}.claim, unnest(pending) as r;
                 return null;
             end $$;
             create constraint trigger held after insert on {schema}.exception deferrable initially deferred
                 for each row when (new.state = 'waiting') execute function {schema}.note_held()",
        )
        .await;
    let refused = || NewMessage { stream: "receipts".into(), key: Some(String::new()), ..NewMessage::default() };
    let (trace, _, handler) = steps(move |payload, message| match (payload, message.attempt) {
        ("a1", 1) => millstream::handler::Finished {
            produced: vec![refused()],
            ..millstream::handler::Finished::plain(Outcome::Done)
        },
        ("a1", attempt) => {
            assert_eq!(attempt, 2);
            done()
        }
        (_, attempt) => {
            assert_eq!(attempt, 1, "{payload} was not the one that failed");
            done()
        }
    });
    let batch: Vec<_> = (0..10).map(|n| keyed("a", Concurrency::Ordered, &format!("a{n}"))).collect();
    project.produce("orders", &batch).await;
    let host = project.host_with(&[("email", handler)]).await;
    all_done(&project).await;
    host.drain().await;
    let mut wanted: Vec<_> = (0..10).map(|n| format!("a{n}")).collect();
    wanted.insert(1, "a1".to_owned());
    assert_eq!(trace.ended(), wanted);
    assert_eq!(project.number("select count(*) from {schema}.held").await, 1, "one message came to wait");
    assert_eq!(project.number("select sum(messages)::bigint from {schema}.held").await, 0, "nothing stayed behind it");
}
