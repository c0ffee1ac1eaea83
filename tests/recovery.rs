//! Dead hosts, lost leases, lost connections: everything ends, effects exist once, and who is fenced writes nothing.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use millstream::{
    engine::{self, ClaimId, Settled, Settlement, Token, Verdict, Wanted},
    handler::{Finished, Handler, Handling, Message, NewMessage, Outcome},
};
use tokio_util::sync::CancellationToken;

use crate::support::{
    engine::{Host, Project, done, numbered, request, text},
    handlers::rounds,
    wait_for,
};

const LIMIT: Duration = Duration::from_secs(60);

/// A short lease, and a second stream for what handlers produce.
const SHORT_LEASE: &str = r#"
    [host]
    lease = "600ms"
    heartbeat = "200ms"
    drain_timeout = "2s"
    [streams.orders]
    [streams.receipts]
    [groups.email]
    stream = "orders"
    handler = "email.wasm"
    retry = { max_attempts = 3, base = "1ms", max = "5ms" }
"#;

/// Attempts by payload.
#[derive(Clone, Default)]
struct Seen(Arc<Mutex<HashMap<String, Vec<u32>>>>);

impl Seen {
    fn note(&self, message: &Message) {
        let payload = String::from_utf8(message.payload.clone().unwrap()).unwrap();
        self.0.lock().unwrap().entry(payload).or_default().push(message.attempt);
    }

    fn len(&self) -> usize {
        self.0.lock().unwrap().len()
    }

    fn all(&self) -> HashMap<String, Vec<u32>> {
        self.0.lock().unwrap().clone()
    }
}

/// Answers `done` with a receipt after a moment, or never while `stuck`; obeys the cut as the sandbox does.
struct Receipts {
    seen: Seen,
    stuck: Arc<AtomicBool>,
}

impl Receipts {
    fn handler(seen: &Seen) -> (Arc<dyn Handler>, Arc<AtomicBool>) {
        let stuck = Arc::new(AtomicBool::new(false));
        (Arc::new(Self { seen: seen.clone(), stuck: Arc::clone(&stuck) }), stuck)
    }
}

impl Handler for Receipts {
    fn handle<'a>(&'a self, message: Message, cut: &'a CancellationToken) -> Handling<'a> {
        self.seen.note(&message);
        Box::pin(async move {
            tokio::time::sleep(Duration::from_millis(1)).await;
            while self.stuck.load(Relaxed) {
                tokio::select! {
                    () = cut.cancelled() => return Finished::plain(Outcome::HandBack),
                    () = tokio::time::sleep(Duration::from_millis(5)) => {}
                }
            }
            let receipt = NewMessage { stream: "receipts".into(), payload: message.payload, ..NewMessage::default() };
            Finished { produced: vec![receipt], ..done() }
        })
    }
}

/// Receipts, and how many different ones: equal when every effect exists exactly once.
async fn receipts(project: &Project) -> (i64, i64) {
    let all = project.number("select count(*) from {schema}.message_log_2").await;
    (all, project.number("select count(distinct payload) from {schema}.message_log_2").await)
}

/// Dies as by kill -9: nothing is settled or handed back any more.
fn kill(host: Host) {
    drop(host);
}

/// Must-show 4. One of two hosts is killed in the middle: all end well, what it held comes again as attempt 2 within the
/// lease and a second, and no effect exists twice.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_hosts_messages_come_again_and_their_effects_exist_once() {
    let project = Project::declare(SHORT_LEASE).await;
    let seen = Seen::default();
    let (handler, stuck) = Receipts::handler(&seen);
    let doomed = project.host_with(&[("email", handler)]).await;
    project.produce("orders", &numbered(1000)).await;
    wait_for("the first deliveries", LIMIT, async || seen.len() > 200).await;
    stuck.store(true, Relaxed);
    let held = "select coalesce(sum(upper(r) - lower(r)), 0)::bigint from {schema}.claim, unnest(pending) r";
    wait_for("it holds something", LIMIT, async || project.number(held).await >= 16).await;
    kill(doomed);
    let killed = Instant::now();
    let (handler, _) = Receipts::handler(&seen);
    let heir = project.host_with(&[("email", handler)]).await;
    wait_for("the second attempts", LIMIT, async || {
        seen.all().values().filter(|attempts| attempts.contains(&2)).count() >= 16
    })
    .await;
    let took = killed.elapsed();
    assert!(took <= rounds(LIMIT, Duration::from_millis(600 + 1000)), "recovered after {took:?}");
    wait_for("all deliveries", LIMIT, async || seen.len() == 1000).await;
    wait_for("nothing is left over", LIMIT, async || project.left_over().await == 0).await;
    wait_for("all receipts", LIMIT, async || receipts(&project).await == (1000, 1000)).await;
    assert!(seen.all().values().flatten().all(|attempt| *attempt <= 2));
    assert!(heir.counters.snapshot()["recovered"].as_u64().unwrap() >= 16);
    assert_eq!(project.number("select count(*) from {schema}.dead_letter").await, 0);
    heir.drain().await;
    assert_eq!(project.number("select count(*) from {schema}.host").await, 0, "the dead one is removed");
}

/// A message that kills its host each time ends as a dead letter at the cap, by recovery alone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_that_kills_its_hosts_is_dead_lettered_by_recovery() {
    let project = Project::declare(SHORT_LEASE).await;
    project.produce("orders", &[text("bomb")]).await;
    for attempt in 1..=3 {
        let seen = Seen::default();
        let (handler, stuck) = Receipts::handler(&seen);
        stuck.store(true, Relaxed);
        let host = project.host_with(&[("email", handler)]).await;
        wait_for("the bomb", LIMIT, async || seen.len() == 1).await;
        assert_eq!(seen.all()["bomb"], [attempt]);
        kill(host);
    }
    let seen = Seen::default();
    let (handler, _) = Receipts::handler(&seen);
    let survivor = project.host_with(&[("email", handler)]).await;
    let dead =
        "select count(*) from {schema}.dead_letter where class = 'host_lost' and attempts = 3 and payload = 'bomb'";
    wait_for("the dead letter", LIMIT, async || project.number(dead).await == 1).await;
    assert_eq!((seen.len(), project.left_over().await), (0, 0));
    survivor.drain().await;
}

/// Must-show 5. A host whose lease ran out behind its back writes nothing any more: its late settles are fenced, and it
/// goes on under a new identity.
#[tokio::test]
async fn a_host_that_lost_its_lease_is_fenced_and_goes_on_under_a_new_identity() {
    let project = Project::declare(SHORT_LEASE).await;
    project.database.expect_log("lost the lease");
    let seen = Seen::default();
    let (handler, stuck) = Receipts::handler(&seen);
    stuck.store(true, Relaxed);
    let host = project.host_with(&[("email", handler)]).await;
    project.produce("orders", &numbered(16)).await;
    wait_for("the deliveries", LIMIT, async || seen.len() == 16).await;
    let old = project.number("select id from {schema}.host").await;
    project.run("update {schema}.host set expires_at = clock_timestamp() - interval '1 s'").await;
    wait_for("a new identity", LIMIT, async || {
        project.number("select coalesce(max(id), 0) from {schema}.host").await > old
    })
    .await;
    stuck.store(false, Relaxed);
    wait_for("all receipts", LIMIT, async || receipts(&project).await == (16, 16)).await;
    wait_for("nothing is left over", LIMIT, async || project.left_over().await == 0).await;
    assert!(seen.all().values().all(|attempts| *attempts == [1, 2]), "each came again, as attempt 2: {:?}", seen.all());
    assert_eq!(host.count("email", "fenced"), 16);
    assert_eq!(host.counters.snapshot()["leases_lost"], 1);
    host.drain().await;
}

/// A host that cannot renew stops by itself before the others take over, here because its row is locked.
#[tokio::test]
async fn a_host_that_cannot_renew_stops_itself_before_its_lease_ends() {
    let project = Project::declare(SHORT_LEASE).await;
    project.database.expect_log("lost the lease");
    let seen = Seen::default();
    let (handler, stuck) = Receipts::handler(&seen);
    stuck.store(true, Relaxed);
    let host = project.host_with(&[("email", handler)]).await;
    project.produce("orders", &numbered(4)).await;
    wait_for("the deliveries", LIMIT, async || seen.len() == 4).await;
    let mut session = project.session().await;
    session.run("begin; select from {schema}.host for no key update").await;
    wait_for("it stops", LIMIT, async || host.counters.snapshot()["leases_lost"].as_u64() >= Some(1)).await;
    wait_for("what ran is cut", LIMIT, async || host.count("email", "fenced") == 4).await;
    session.run("commit").await;
    stuck.store(false, Relaxed);
    wait_for("all receipts", LIMIT, async || receipts(&project).await == (4, 4)).await;
    wait_for("nothing is left over", LIMIT, async || project.left_over().await == 0).await;
    host.drain().await;
}

/// A claim by hand for settles by hand.
async fn claim_three(project: &Project) -> (engine::HostId, Vec<Token>) {
    let host = engine::register(&project.database, "test", LIMIT).await.unwrap();
    project.produce("orders", &numbered(3)).await;
    let wanted = Wanted { messages: 3, bytes: 1 << 20, retries: 0 };
    let turn =
        engine::claim(&project.database, host, &project.group("email").await, &request(&[], wanted)).await.unwrap();
    (host, turn.claimed.iter().map(|claimed| claimed.token).collect())
}

/// The only message of the next turn.
async fn claim_one(project: &Project, host: engine::HostId) -> engine::Claimed {
    let wanted = Wanted { messages: 4, bytes: 1 << 20, retries: 4 };
    let group = project.group("email").await;
    let mut turn = engine::claim(&project.database, host, &group, &request(&[], wanted)).await.expect("claim");
    assert_eq!(turn.claimed.len(), 1, "{turn:?}");
    turn.claimed.remove(0)
}

fn failure() -> millstream::handler::Failure {
    millstream::handler::Failure { class: millstream::handler::FailureClass::Failed, error: "no".into() }
}

fn again() -> Verdict {
    Verdict::Again { delay: Duration::ZERO, failures: 1, failure: Some(failure()) }
}

fn with_receipt(one: &engine::Claimed) -> Settlement {
    let produced = vec![NewMessage { stream: "receipts".into(), ..text("r") }];
    Settlement { produced, ..Settlement::plain(one.token, one.message.id, Verdict::Done) }
}

/// Which of a batch were fenced.
async fn settle(project: &Project, host: engine::HostId, batch: &[Settlement]) -> Vec<usize> {
    let group = project.group("email").await;
    let settled = engine::settle(&project.database, host, &group, batch).await.expect("settle");
    let Settled::Committed { fenced, .. } = settled else { panic!("{settled:?}") };
    let mut fenced: Vec<_> = fenced.into_iter().collect();
    fenced.sort_unstable();
    fenced
}

/// T7. Of two deliveries of one message in one batch, only that has effects which still holds it.
#[tokio::test]
async fn t7_a_delivery_is_fenced_by_its_own_claim_and_not_by_its_message() {
    let project = Project::declare(SHORT_LEASE).await;
    let host = engine::register(&project.database, "test", LIMIT).await.unwrap();
    project.produce("orders", &numbered(1)).await;
    let first = claim_one(&project, host).await;
    settle(&project, host, &[Settlement::plain(first.token, first.message.id, again())]).await;
    let stale = claim_one(&project, host).await;
    settle(&project, host, &[Settlement::plain(stale.token, stale.message.id, again())]).await;
    let current = claim_one(&project, host).await;
    assert_eq!(settle(&project, host, &[with_receipt(&stale), with_receipt(&current)]).await, [0]);
    assert_eq!(receipts(&project).await, (1, 1));
    assert_eq!(project.left_over().await, 0);
}

/// D4, D6. A message that was sent back and is redriven as well runs twice. When one of the two is done and the other dies,
/// there is a dead letter, whatever became of the one that it was redriven from.
#[tokio::test]
async fn d6_a_redriven_message_that_was_sent_back_too_is_done_or_dead() {
    for replay_is_done in [true, false] {
        let project = Project::declare(SHORT_LEASE).await;
        let host = engine::register(&project.database, "test", LIMIT).await.unwrap();
        project.produce("orders", &numbered(1)).await;
        let dead = |one: &engine::Claimed| {
            Settlement::plain(one.token, one.message.id, Verdict::Dead { attempts: 3, failure: failure() })
        };
        let first = claim_one(&project, host).await;
        settle(&project, host, &[dead(&first)]).await;
        let group = project.group("email").await;
        let to = millstream::config::Start::Earliest;
        engine::seek(&project.database, group.id, group.stream_id, "email", &to).await.expect("seek");
        let replay = claim_one(&project, host).await;
        let letters = "select coalesce(max(id), 0) from {schema}.dead_letter where redriven_at is null";
        let letter = project.number(letters).await;
        engine::redrive(&project.database, &[letter], false, |_| ()).await.expect("redrive");
        let redriven = claim_one(&project, host).await;
        let (one, other) = if replay_is_done { (&replay, &redriven) } else { (&redriven, &replay) };
        let batch = [with_receipt(one), Settlement::plain(other.token, other.message.id, again())];
        assert_eq!(settle(&project, host, &batch).await, [0; 0]);
        let last = claim_one(&project, host).await;
        assert_eq!(last.message.redriven, replay_is_done, "it comes from where it came from before");
        project.run("delete from {schema}.dead_letter").await; // by hand
        settle(&project, host, &[dead(&last)]).await;
        assert_eq!((project.number(letters).await > 0, receipts(&project).await), (true, (1, 1)));
        assert_eq!(project.left_over().await, 0);
    }
}

/// Every kind of settle, done twice as after a lost reply: the second changes nothing, effects included, also while the
/// claim still has other messages.
#[tokio::test]
async fn a_settle_done_twice_changes_nothing() {
    let project = Project::declare(SHORT_LEASE).await;
    let (host, tokens) = claim_three(&project).await;
    let group = project.group("email").await;
    let verdicts = [
        Verdict::Done,
        Verdict::Again { delay: LIMIT, failures: 1, failure: Some(failure()) },
        Verdict::Dead { attempts: 3, failure: failure() },
    ];
    for (index, verdict) in verdicts.into_iter().enumerate() {
        let one = || {
            let produced = if verdict == Verdict::Done {
                vec![NewMessage { stream: "receipts".into(), ..text("r") }]
            } else {
                Vec::new()
            };
            Settlement { produced, ..Settlement::plain(tokens[index], 1 + index as i64, verdict.clone()) }
        };
        for is_second in [false, true] {
            let settled = engine::settle(&project.database, host, &group, &[one()]).await.expect("settle");
            let Settled::Committed { fenced, .. } = settled else { panic!("{settled:?}") };
            assert_eq!(fenced.contains(&0), is_second, "{verdict:?}");
        }
    }
    let rows = "select (select count(*) from {schema}.message_log_2) + 10 * (select count(*) from {schema}.exception where failures = 1)
        + 100 * (select count(*) from {schema}.dead_letter where deaths = 1) + 1000 * (select count(*) from {schema}.claim)";
    assert_eq!(project.number(rows).await, 111);
    // And as somebody else, or under a lease that has run out.
    let (host, tokens) = {
        project.run("delete from {schema}.exception").await;
        let host = engine::register(&project.database, "other", LIMIT).await.unwrap();
        (host, tokens)
    };
    let settled =
        engine::settle(&project.database, host, &group, &[Settlement::plain(tokens[0], 2, Verdict::Done)]).await;
    assert!(matches!(settled, Ok(Settled::Committed { ref fenced, .. }) if fenced.len() == 1));
    project.run("update {schema}.host set expires_at = clock_timestamp()").await;
    let settled =
        engine::settle(&project.database, host, &group, &[Settlement::plain(tokens[0], 2, Verdict::Done)]).await;
    assert!(matches!(settled, Ok(Settled::LeaseLost)));
}

/// Two settles of one claim at once, as the loop and a settle beside it do: both count, and neither waits for what the other
/// waits for.
#[tokio::test]
async fn two_settles_of_one_claim_at_once_neither_fence_nor_hold_up_each_other() {
    let project = Project::declare(SHORT_LEASE).await;
    let (host, tokens) = claim_three(&project).await;
    let group = project.group("email").await;
    // The first is held up by another producer's idempotency key, until the second has ended.
    let mut blocker = project.session().await;
    blocker.run("begin; select {schema}.produce('receipts', 'r', idempotency_key => 'k')").await;
    let receipt = NewMessage { stream: "receipts".into(), idempotency_key: Some("k".into()), ..text("r") };
    let first = [Settlement { produced: vec![receipt], ..Settlement::plain(tokens[0], 1, Verdict::Done) }];
    let rest = [Settlement::plain(tokens[0], 2, Verdict::Done), Settlement::plain(tokens[0], 3, Verdict::Done)];
    let settle = |batch| engine::settle(&project.database, host, &group, batch);
    let then_release = async {
        tokio::time::sleep(Duration::from_millis(300)).await; // lets the first get as far as it can
        let rest = tokio::time::timeout(LIMIT, settle(&rest)).await.expect("the second is held up too");
        blocker.run("rollback").await;
        rest
    };
    let (first, rest) = tokio::join!(settle(&first), then_release);
    for settled in [first, rest] {
        assert!(matches!(settled, Ok(Settled::Committed { ref fenced, .. }) if fenced.is_empty()), "{settled:?}");
    }
    assert_eq!(project.number("select count(*) from {schema}.claim").await, 0);
    assert_eq!(receipts(&project).await, (1, 1));
}

/// A claim whose reply was lost is a row that memory knows nothing of: it is found, and given back with no attempt counted.
#[tokio::test]
async fn a_claim_whose_reply_was_lost_is_found_and_run() {
    let project = Project::declare(SHORT_LEASE).await;
    let seen = Seen::default();
    let (handler, _) = Receipts::handler(&seen);
    project.produce("orders", &numbered(10)).await;
    let host = engine::register(&project.database, "not yet", LIMIT).await.unwrap();
    let wanted = Wanted { messages: 10, bytes: 1 << 20, retries: 0 };
    let group = project.group("email").await;
    let lost: Vec<ClaimId> = engine::claim(&project.database, host, &group, &request(&[], wanted))
        .await
        .unwrap()
        .claimed
        .iter()
        .map(|c| c.token.claim)
        .collect();
    assert_eq!(lost.len(), 10);
    let host = project.host_with(&[("email", handler)]).await;
    project.run("update {schema}.claim set host_id = (select max(id) from {schema}.host)").await;
    wait_for("the deliveries", LIMIT, async || seen.len() == 10).await;
    wait_for("nothing is left over", LIMIT, async || project.left_over().await == 0).await;
    assert!(seen.all().values().all(|attempts| *attempts == [1]), "{:?}", seen.all());
    assert_eq!(host.count("email", "given_back"), 10);
    assert_eq!(receipts(&project).await, (10, 10));
    host.drain().await;
}

/// A claim that vanished from the database, as an asynchronous commit may in a crash, is noticed: what runs is cut.
#[tokio::test]
async fn a_delivery_without_a_row_is_cut() {
    let project = Project::declare(SHORT_LEASE).await;
    let seen = Seen::default();
    let (handler, stuck) = Receipts::handler(&seen);
    stuck.store(true, Relaxed);
    let host = project.host_with(&[("email", handler)]).await;
    project.produce("orders", &numbered(4)).await;
    wait_for("the deliveries", LIMIT, async || seen.len() == 4).await;
    // Under the group's lock, as everything that moves its cursor.
    project.run("select pg_advisory_xact_lock({lock_class} + 1, id) from {schema}.consumer_group; delete from {schema}.claim; update {schema}.cursor set claimed = 0").await;
    project.produce("orders", &[text("another")]).await;
    // They would run for as long as they are let.
    wait_for("what ran is cut", LIMIT, async || host.count("email", "fenced") == 4).await;
    stuck.store(false, Relaxed);
    wait_for("all end", LIMIT, async || receipts(&project).await == (5, 5)).await;
    wait_for("nothing is left over", LIMIT, async || project.left_over().await == 0).await;
    host.drain().await;
}

/// Two hosts share a group: every message once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_hosts_share_a_group_and_no_message_comes_twice() {
    let project = Project::declare(SHORT_LEASE.replace("600ms", "10s").as_str()).await;
    let seen = Seen::default();
    let handler = |seen: Seen| {
        move |message: Message| {
            seen.note(&message);
            done()
        }
    };
    let hosts =
        [project.host("email", handler(seen.clone())).await, project.host("email", handler(seen.clone())).await];
    for batch in numbered(20_000).chunks(2000) {
        project.produce("orders", batch).await;
    }
    wait_for("the deliveries", LIMIT, async || seen.len() == 20_000).await;
    wait_for("nothing is left over", LIMIT, async || project.left_over().await == 0).await;
    assert!(seen.all().values().all(|attempts| *attempts == [1]));
    assert!(hosts.iter().all(|host| host.count("email", "delivered") > 0), "both took part");
    assert!(hosts.iter().all(|host| host.count("email", "fenced") == 0));
    for host in hosts {
        host.drain().await;
    }
}

/// Must-show 6, first half. Every connection of the host is cut again and again under load: it neither dies nor hangs, and
/// nothing is lost or done twice. MILLSTREAM_SOAK=1 makes it 20 seconds.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cut_connections_lose_nothing_and_stop_nobody() {
    let length = Duration::from_secs(if std::env::var_os("MILLSTREAM_SOAK").is_some() { 20 } else { 3 });
    let project = Project::declare(SHORT_LEASE.replace("600ms", "3s").as_str()).await;
    for part in ["failed to", "lost the lease"] {
        project.database.expect_log(part);
    }
    let seen = Seen::default();
    let (handler, _) = Receipts::handler(&seen);
    let host = project.host_with(&[("email", handler)]).await;
    let mut admin = project.session().await;
    let mut producer = project.session().await;
    let spared = [
        admin.number("select pg_backend_pid()::bigint").await,
        producer.number("select pg_backend_pid()::bigint").await,
    ];
    let cut = format!(
        "select count(pg_terminate_backend(pid)) from pg_stat_activity where datname = current_database() and pid not in ({}, {})",
        spared[0], spared[1]
    );
    let until = Instant::now() + length;
    let (mut produced, mut cuts) = (0, 0);
    while Instant::now() < until {
        for _ in 0..20 {
            producer.run(&format!("select {{schema}}.produce_batch('orders', array(select i::text::bytea from generate_series({produced} + 1, {produced} + 10) i))")).await;
            produced += 10;
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        cuts += admin.number(&cut).await;
    }
    assert!(cuts > 10, "only {cuts} connections were cut");
    let receipts = "select count(*) * 1000000 + count(distinct payload) from {schema}.message_log_2";
    let left_over = "select (select count(*) from {schema}.claim) + (select count(*) from {schema}.exception)";
    let started = Instant::now();
    while admin.number(receipts).await != produced * 1_000_001 || admin.number(left_over).await != 0 {
        assert!(started.elapsed() < LIMIT, "of {produced}: {} receipts", admin.number(receipts).await);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    host.drain().await;
}

/// What a turn brings while its host is being removed keeps the host: else nobody would ever recover it.
#[tokio::test]
async fn a_host_is_not_removed_under_a_turn_that_is_still_under_way() {
    let project = Project::declare(SHORT_LEASE).await;
    let host = engine::register(&project.database, "test", LIMIT).await.unwrap();
    let mut turn = project.session().await;
    turn.run(&format!(
        "begin; select from {{schema}}.host where id = {host} for key share;
        insert into {{schema}}.message_key_lease (group_id, message_key, host_id) values (1, 'k', {host})"
    ))
    .await;
    let waits = "select count(*) from pg_locks where not granted";
    let then_commit = async {
        wait_for("the removal waits", LIMIT, async || project.number(waits).await > 0).await;
        turn.run("commit").await;
    };
    let (removed, ()) = tokio::join!(engine::deregister(&project.database, host), then_commit);
    assert!(!removed.unwrap());
    assert_eq!(project.number("select count(*) from {schema}.host").await, 1);
}
