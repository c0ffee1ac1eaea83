//! A seek is exact at its point, voids everything of the epoch before, and marks what comes again. Turns are made by
//! hand here; `seek_hosts.rs` does it to running hosts.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use millstream::{
    config::Start,
    engine::{self, Claimed, GroupHandle, HostId, Note, Seeked, Settled, Settlement, Verdict, Wanted},
    handler::{Failure, FailureClass, Message, NewMessage},
};

use crate::support::{
    engine::{Project, numbered, request, text},
    handlers::rounds,
    wait_for,
};

const LIMIT: Duration = Duration::from_secs(60);

const STREAMS_TOML: &str = r#"
[streams.orders]
partition_rows = 1000
[streams.receipts]
[groups.email]
stream = "orders"
handler = "email.wasm"
retry = { max_attempts = 2, base = "1ms", max = "1ms" }
"#;

/// A group whose turns a test makes by hand, as one host would.
struct ByHand {
    project: Arc<Project>,
    host: HostId,
    group: GroupHandle,
}

impl ByHand {
    async fn declare(streams_toml: &str) -> Self {
        let project = Project::declare(streams_toml).await;
        let host = engine::register(&project.database, "test", LIMIT).await.expect("register");
        let group = project.group("email").await;
        Self { project: Arc::new(project), host, group }
    }

    async fn seek(&mut self, to: Start) -> Seeked {
        let GroupHandle { id, stream_id, .. } = self.group;
        let seeked = engine::seek(&self.project.database, id, stream_id, "email", &to).await.expect("seek");
        self.group = self.project.group("email").await;
        assert_eq!(self.group.epoch, seeked.epoch);
        seeked
    }

    /// One turn of up to `want` messages and retries.
    async fn claim(&self, want: u32) -> Vec<Claimed> {
        let wanted = Wanted { messages: want, bytes: 1 << 20, retries: want };
        let turn =
            engine::claim(&self.project.database, self.host, &self.group, &request(&[], wanted)).await.expect("claim");
        assert_eq!(turn.note, Note::Claimed);
        turn.claimed
    }

    /// Turns until nothing comes any more, each message done. A hole is waited for until it is old enough.
    async fn rest(&self) -> Vec<Message> {
        let mut messages = Vec::new();
        loop {
            let claimed = self.claim(500).await;
            let behind = "select count(*) from {schema}.message_log_1, {schema}.cursor where id > claimed";
            if claimed.is_empty() && self.project.number(behind).await == 0 {
                return messages;
            }
            self.settle(&claimed, &Verdict::Done).await;
            messages.extend(claimed.into_iter().map(|one| one.message));
        }
    }

    async fn rest_ids(&self) -> Vec<i64> {
        let mut ids: Vec<i64> = self.rest().await.iter().map(|message| message.id).collect();
        ids.sort_unstable();
        ids
    }

    /// Settles, each with a receipt where it is done; answers how many were fenced.
    async fn settle(&self, claimed: &[Claimed], verdict: &Verdict) -> usize {
        let batch: Vec<_> = claimed.iter().map(|one| settlement(one, verdict)).collect();
        if batch.is_empty() {
            return 0;
        }
        match engine::settle(&self.project.database, self.host, &self.group, &batch).await.expect("settle") {
            Settled::Committed { fenced, .. } => fenced.len(),
            other => panic!("{other:?}"),
        }
    }

    async fn number(&self, sql: &str) -> i64 {
        self.project.number(sql).await
    }
}

fn settlement(claimed: &Claimed, verdict: &Verdict) -> Settlement {
    let receipt = NewMessage { stream: "receipts".into(), ..text("paid") };
    let produced = if *verdict == Verdict::Done { vec![receipt] } else { Vec::new() };
    Settlement {
        failures: claimed.failures,
        produced,
        ..Settlement::plain(claimed.token, claimed.message.id, verdict.clone())
    }
}

fn failure() -> Failure {
    Failure { class: FailureClass::Failed, error: "no".to_owned() }
}

fn again() -> Verdict {
    Verdict::Again { delay: Duration::ZERO, failures: 1, failure: Some(failure()) }
}

fn dead() -> Verdict {
    Verdict::Dead { attempts: 2, failure: failure() }
}

/// G1, and W1's other half: goal: each point is exact at its boundary, from wherever the group stands. Method: ten
/// messages a second apart, 5 still open; every point is sought from the start, the middle and the end.
#[tokio::test]
async fn g1_each_point_of_a_seek_is_exact_at_its_boundary_back_and_forward() {
    let mut group = ByHand::declare(STREAMS_TOML).await;
    group.project.produce("orders", &numbered(4)).await;
    let mut running = group.project.session().await;
    running.run("begin; select {schema}.produce('orders', '5')").await;
    group.project.produce("orders", &numbered(5)).await;
    group
        .project
        .run("update {schema}.message_log_1 set created_at = timestamptz '2026-01-01T00:00:00Z' + id * interval '1 s'")
        .await;
    let time = |text: &str| Start::Time(format!("2026-01-01T00:00:{text}Z"));
    let cases = [
        (Start::Earliest, 1),
        (Start::Id(1), 1),
        (Start::Id(2), 2),
        (Start::Id(5), 5),
        (Start::Id(10), 10),
        (Start::Id(11), 11),
        (time("00"), 1),
        (time("01"), 1),
        (time("01.000001"), 2),
        (time("03.999999"), 4),
        (time("04"), 4),
        (time("04.5"), 5),
        (time("06"), 5),
        (time("06.000001"), 7),
        (time("10"), 10),
        (time("10.000001"), 11),
    ];
    for (to, first) in cases {
        for before in [Start::Earliest, Start::Id(6), Start::Id(11)] {
            group.seek(before.clone()).await;
            let position = group.number("select claimed from {schema}.cursor").await;
            let seeked = group.seek(to.clone()).await;
            // 5 is not visible, and a time between 4 and 6 leaves it a hole above the position.
            let first_visible = (first..=10).find(|id| *id != 5);
            assert_eq!((seeked.position_before, seeked.first_id), (position, first_visible), "{before:?} {to:?}");
            let expected: Vec<i64> = (first..=10).filter(|id| *id != 5).collect();
            assert_eq!(group.rest_ids().await, expected, "{before:?} {to:?}");
            assert!(!seeked.removed && !seeked.beyond_max_lag && !seeked.dry_run);
        }
    }
    // What commits at last is delivered to whom it lies ahead of, and to nobody else.
    group.seek(time("06")).await;
    assert_eq!(group.rest_ids().await, [6, 7, 8, 9, 10]);
    running.run("commit").await;
    assert_eq!(group.rest_ids().await, [5]);
    group.seek(Start::Id(6)).await;
    assert_eq!(group.rest_ids().await, [6, 7, 8, 9, 10]);
}

/// G1: a time is found by halves in a long log, and is the smallest id produced at or after it all the same.
#[tokio::test]
async fn g1_a_time_is_found_in_a_long_log_as_if_it_were_read_from_end_to_end() {
    let seed = fastrand::u64(..1 << 32);
    println!("seed {seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    let project = Project::declare(STREAMS_TOML).await;
    let rows = rounds(12_000, 200_000);
    project.run(&format!("select {{schema}}.extend_log(1, {rows} / 1000 + 8)")).await;
    // Three to twenty seconds from one message to the next, every seventh rolled back, neighbours a little out of order.
    project
        .run(&format!(
            "insert into {{schema}}.message_log_1 (id, payload, created_at)
             select n, 'x', timestamptz '2026-01-01T00:00:00Z' + n * 11 * interval '1 s' + (n * 7919 % 29 - 14) * interval '1 s'
             from (select nextval('{{schema_text}}.message_log_1_id') as n from generate_series(1, {rows})) as ids where n % 7 <> 3"
        ))
        .await;
    for _ in 0..rounds(60, 300) {
        let seconds = random.i64(-100..rows * 11 + 100);
        let time = format!("timestamptz '2026-01-01T00:00:00Z' + {seconds} * interval '1 s'");
        let found = project.number(&format!("select {{schema}}.position_of_time_1({time})")).await;
        let exact = format!(
            "with first as (select min(id) as id from {{schema}}.message_log_1 where created_at >= {time})
             select coalesce((select max(l.id) from {{schema}}.message_log_1 l where first.id is null or l.id < first.id), 0) from first"
        );
        let exact = project.number(&exact).await;
        assert_eq!(found, exact, "seed {seed}: {seconds} s");
    }
}

/// G2: what running transactions commit later is delivered after a seek to latest, and nothing else.
#[tokio::test]
async fn g2_a_seek_to_latest_delivers_what_running_transactions_commit_later() {
    let mut group = ByHand::declare(STREAMS_TOML).await;
    group.project.produce("orders", &numbered(2)).await;
    let mut running = group.project.session().await;
    running.run("begin; select {schema}.produce('orders', '3')").await;
    let mut failing = group.project.session().await;
    failing.run("begin; select {schema}.produce('orders', '4')").await;
    group.project.produce("orders", &numbered(2)).await;
    for before in [Start::Earliest, Start::Latest] {
        group.seek(before).await;
        let seeked = group.seek(Start::Latest).await;
        assert_eq!((seeked.position, seeked.first_id), (6, None));
        assert_eq!(group.rest_ids().await, [0; 0]);
        assert_eq!(group.number("select count(*) from {schema}.cursor_gap").await, 1, "the one of before is gone");
    }
    running.run("commit").await;
    failing.run("rollback").await;
    group.project.produce("orders", &numbered(1)).await;
    assert_eq!(group.rest_ids().await, [3, 7]);
    assert_eq!(group.rest_ids().await, [0; 0]);
    assert_eq!(group.project.left_over().await, 0);
}

/// W1: whatever a host still answers for the old epoch, by turn or settle, writes nothing, effects included.
#[tokio::test]
async fn w1_an_ack_of_an_old_epoch_changes_nothing_its_outbox_included() {
    let mut group = ByHand::declare(STREAMS_TOML).await;
    group.project.produce("orders", &numbered(9)).await;
    let failing = group.claim(3).await;
    assert_eq!(group.settle(&failing, &again()).await, 0);
    let old: Vec<Claimed> = group.claim(6).await; // three retries of an exception each, and six fresh ones
    assert_eq!(old.len(), 9);
    let finished = old.iter().map(|one| one.token.claim).max().expect("a claim");
    let before = group.group.clone();
    let seeked = group.seek(Start::Id(2)).await;
    assert_eq!((seeked.in_flight, seeked.retrying, seeked.position), (9, 0, 1));
    let state = "select claimed * 1000 + (select count(*) from {schema}.claim) + (select count(*) from {schema}.exception)
        + (select count(*) from {schema}.dead_letter) + (select count(*) from {schema}.message_log_2) from {schema}.cursor";
    for verdict in [Verdict::Done, again(), dead()] {
        assert_eq!(group.settle(&old, &verdict).await, 9);
        for one in &old {
            assert_eq!(group.settle(std::slice::from_ref(one), &verdict).await, 1, "by itself");
        }
        assert_eq!(group.number(state).await, 1000, "{verdict:?}");
    }
    let database = &group.project.database;
    let wanted = Wanted { messages: 10, bytes: 1 << 20, retries: 10 };
    let turn = engine::claim(database, group.host, &before, &request(&[finished], wanted)).await.expect("a turn");
    assert_eq!((turn.note, turn.settled.len(), turn.claimed.len()), (Note::EpochRaised, 0, 0));
    assert_eq!(group.number(state).await, 1000);
    assert_eq!(group.rest_ids().await, [2, 3, 4, 5, 6, 7, 8, 9]);
}

/// W1: a settle that has its rows when the seek comes is waited for, and what it scheduled again is void too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn w1_a_settle_under_way_is_waited_for_and_leaves_nothing_behind() {
    let mut group = ByHand::declare(STREAMS_TOML).await;
    group.project.produce("orders", &numbered(2)).await;
    let failing = group.claim(1).await;
    group.settle(&failing, &again()).await;
    group.claim(1).await;
    // Half way through settling both: the retry is taken out and scheduled again, the fresh one is scheduled for the first time.
    let mut settle = group.project.session().await;
    settle
        .run("begin; delete from {schema}.claim; delete from {schema}.exception;
              insert into {schema}.exception (group_id, message_id, state, due_at, failures) values (1, 1, 'waiting', now(), 2), (1, 2, 'waiting', now(), 1)")
        .await;
    let (database, id, stream) = (group.project.database.another_host().await, group.group.id, group.group.stream_id);
    let seek = tokio::spawn(async move { engine::seek(&database, id, stream, "email", &Start::Latest).await });
    let waits = "select count(*) from pg_locks where not granted and database = (select oid from pg_database where datname = current_database())
        or not granted and locktype = 'transactionid'";
    wait_for("the seek waits", LIMIT, async || group.number(waits).await > 0).await;
    settle.run("commit").await;
    let seeked = seek.await.expect("it does not panic").expect("it succeeds");
    assert_eq!((seeked.in_flight, seeked.retrying), (0, 2));
    group.group = group.project.group("email").await;
    assert_eq!((group.rest_ids().await, group.project.left_over().await), (Vec::new(), 0));
}

/// W2: everything from the point on comes again in order, from attempt 1, marked; a replay that fails stays one; what was
/// never claimed before is none.
#[tokio::test]
async fn w2_what_comes_again_is_in_order_from_attempt_1_and_marked_replay() {
    let mut group = ByHand::declare(STREAMS_TOML).await;
    group.project.produce("orders", &numbered(6)).await;
    let failing = group.claim(2).await;
    group.settle(&failing, &again()).await;
    let first = group.rest().await;
    assert!(first.iter().all(|message| !message.replay));
    assert_eq!(first.iter().filter(|message| message.attempt == 2).count(), 2);
    group.project.produce("orders", &numbered(2)).await;
    group.seek(Start::Id(2)).await;
    let replays = group.claim(3).await;
    let told: Vec<_> = replays.iter().map(|one| (one.message.id, one.message.attempt, one.message.replay)).collect();
    assert_eq!(told, [(2, 1, true), (3, 1, true), (4, 1, true)]);
    group.settle(&replays, &again()).await;
    let mut told: Vec<_> =
        group.rest().await.iter().map(|message| (message.id, message.attempt, message.replay)).collect();
    told.sort_unstable();
    let expected = [(2, 2, true), (3, 2, true), (4, 2, true), (5, 1, true), (6, 1, true), (7, 1, false), (8, 1, false)];
    assert_eq!(told, expected);
    // Forward over what nobody has claimed, and back: up to where the group stood once, it is a replay.
    group.seek(Start::Id(2)).await;
    group.seek(Start::Id(6)).await;
    let told: BTreeMap<_, _> = group.rest().await.iter().map(|message| (message.id, message.replay)).collect();
    assert_eq!(told, [(6, true), (7, true), (8, true)].into());
}

/// W3: a point that retention has removed is answered with the nearest there is, and says so; one inside does not.
#[tokio::test]
async fn w3_a_point_outside_retention_answers_the_effective_point() {
    let mut group =
        ByHand::declare(&STREAMS_TOML.replace("partition_rows = 1000", "partition_rows = 1000\nretention = \"1h\""))
            .await;
    let old = "insert into {schema}.message_log_1 (id, payload, created_at)
        select nextval('{schema_text}.message_log_1_id'), 'x', now() - interval '2 hours' from generate_series(1, 2500)";
    group.project.run(old).await;
    group.seek(Start::Latest).await;
    let report = engine::maintain(&group.project.database, engine::Step::Retention).await.expect("retention");
    assert_eq!((report.rows, report.errors.len()), (2, 0));
    let hours_ago = async |hours: i64| {
        let sql = format!(
            "select to_char(now() at time zone 'UTC' - {hours} * interval '1 h', 'YYYY-MM-DD\"T\"HH24:MI:SS\"Z\"')"
        );
        let time = sqlx::query_scalar(group.project.database.schema.sql(&sql)).fetch_one(&group.project.database.pool);
        Start::Time(time.await.expect("a time"))
    };
    let (long_ago, inside) = (hours_ago(3).await, hours_ago(1).await);
    for (to, position, removed) in [
        (Start::Id(1), 2000, true),
        (Start::Id(2000), 2000, true),
        (Start::Id(2001), 2000, false),
        (Start::Id(2100), 2099, false),
        (Start::Earliest, 2000, false),
        (long_ago, 2000, true),
        (inside, 2500, false),
        (Start::Latest, 2500, false),
    ] {
        let seeked = group.seek(to.clone()).await;
        assert_eq!((seeked.position, seeked.removed), (position, removed), "{to:?}");
        let first = (position < 2500).then_some(position + 1);
        assert_eq!((seeked.first_id, seeked.first_produced_at.is_some()), (first, first.is_some()), "{to:?}");
    }
    group.seek(Start::Id(7)).await;
    assert_eq!(group.rest_ids().await, (2001..=2500).collect::<Vec<_>>());
}

/// W6: dead letters stay, those whose messages come again are marked, and produce's memory is neither asked nor changed.
#[tokio::test]
async fn w6_dead_letters_stay_and_are_marked_and_dedup_is_untouched() {
    let mut group = ByHand::declare(STREAMS_TOML).await;
    let keyed = NewMessage { idempotency_key: Some("once".into()), ..text("1") };
    group.project.produce("orders", std::slice::from_ref(&keyed)).await;
    group.project.produce("orders", &numbered(4)).await;
    let claimed = group.claim(5).await;
    let (done, failed): (Vec<_>, Vec<_>) = claimed.into_iter().partition(|one| ![2, 4].contains(&one.message.id));
    group.settle(&failed, &dead()).await;
    group.settle(&done, &Verdict::Done).await;
    let memory = "select count(*) + sum(message_id) from {schema}.idempotency_key_1";
    let remembered = group.project.number(&format!("select ({memory})::bigint")).await;
    let seeked = group.seek(Start::Id(3)).await;
    assert_eq!(seeked.dead_letters_replayed, 1);
    let database = &group.project.database;
    let listed = engine::list_dead(database, None, &engine::DeadFilter::default(), None, 10).await.expect("list");
    let told: Vec<_> = listed.letters.iter().map(|one| (one.message_id, one.replayed_at.is_some())).collect();
    assert_eq!(told, [(4, true), (2, false)]);
    let shown = engine::show_dead_message(database, group.group.id, 4).await.expect("show").expect("it is there");
    assert_eq!(shown.letter.replayed_at, listed.letters[0].replayed_at);
    assert_eq!(group.project.number(&format!("select ({memory})::bigint")).await, remembered);
    let produced = group.project.produce("orders", std::slice::from_ref(&keyed)).await;
    assert_eq!((produced[0].id, produced[0].duplicate), (1, true));
    // The replay of it dies as well: one dead letter, no longer replayed.
    let claimed = group.claim(5).await;
    let (failed, done): (Vec<_>, Vec<_>) = claimed.into_iter().partition(|one| one.message.id == 4);
    group.settle(&done, &Verdict::Done).await;
    assert_eq!(group.settle(&failed, &dead()).await, 0);
    let once = "select count(*) from {schema}.dead_letter where message_id = 4 and deaths = 2 and replayed_at is null";
    assert_eq!(group.number(once).await, 1);
    assert_eq!(group.number("select count(*) from {schema}.dead_letter").await, 2);
}

/// W6: a dead letter that comes again can be redriven all the same; the two deliveries do not hinder each other.
#[tokio::test]
async fn w6_a_redrive_beside_a_replay_hinders_neither() {
    let mut group = ByHand::declare(STREAMS_TOML).await;
    group.project.produce("orders", &numbered(2)).await;
    let failed = group.claim(2).await;
    group.settle(&failed, &dead()).await;
    group.seek(Start::Earliest).await;
    let letters =
        engine::pick_dead(&group.project.database, group.group.id, &engine::DeadFilter::default()).await.expect("pick");
    assert_eq!(engine::redrive(&group.project.database, &letters, false, |_| {}).await.expect("redrive").redriven, 2);
    let both = group.claim(10).await;
    let replayed: Vec<_> = both.iter().filter(|one| !one.message.redriven).map(|one| one.message.replay).collect();
    assert_eq!((both.len(), replayed), (4, vec![true, true]));
    // The replays fail while the redriven ones run: they leave, and their messages are with those.
    let (redriven, replays): (Vec<_>, Vec<_>) = both.into_iter().partition(|one| one.message.redriven);
    assert_eq!(group.settle(&replays, &again()).await, 0);
    assert_eq!(group.settle(&redriven, &Verdict::Done).await, 0);
    assert_eq!((group.rest_ids().await, group.project.left_over().await), (Vec::new(), 0));
    // One that was being redriven when a seek voids it is an open dead letter again: it may be the only copy.
    group.seek(Start::Earliest).await;
    let failed = group.claim(1).await;
    group.settle(&failed, &dead()).await;
    let letters =
        engine::pick_dead(&group.project.database, group.group.id, &engine::DeadFilter::default()).await.expect("pick");
    assert_eq!(engine::redrive(&group.project.database, &letters, false, |_| {}).await.expect("redrive").redriven, 1);
    let seeked = group.seek(Start::Latest).await;
    assert_eq!((seeked.retrying, seeked.dead_letters_reopened, seeked.dead_letters_replayed), (1, 1, 0));
    let open = "select count(*) from {schema}.dead_letter where redriven_at is null";
    assert_eq!(group.number(open).await, 1);
}

/// W6, D4: a replay and a redriven delivery of one message that die in the same settle leave one dead letter, and so do they
/// where the letter was discarded by hand meanwhile; what else is settled with them is settled.
#[tokio::test]
async fn w6_a_replay_and_a_redrive_that_die_together_leave_one_dead_letter() {
    for is_gone in [false, true] {
        let mut group = ByHand::declare(STREAMS_TOML).await;
        group.project.produce("orders", &numbered(2)).await;
        let failed = group.claim(2).await;
        group.settle(&failed, &dead()).await;
        group.seek(Start::Earliest).await;
        assert_eq!(
            engine::redrive(&group.project.database, &[1, 2], false, |_| {}).await.expect("redrive").redriven,
            2
        );
        let both = group.claim(10).await;
        assert_eq!(both.len(), 4);
        if is_gone {
            group.project.run("delete from {schema}.dead_letter").await;
        }
        assert_eq!(group.settle(&both, &dead()).await, 0);
        let deaths = if is_gone { 1 } else { 2 };
        let letters = format!(
            "select count(*) from {{schema}}.dead_letter where redriven_at is null and payload is not null and deaths = {deaths}"
        );
        assert_eq!((group.number(&letters).await, group.project.rows("dead_letter").await), (2, 2));
        assert_eq!((group.rest_ids().await, group.project.left_over().await), (Vec::new(), 0));
    }
}

/// What a seek waits for in vain, a claim or a round of retention that does not end, is named, and nothing is changed.
#[tokio::test]
async fn a_seek_that_waits_in_vain_names_who_holds_it_up() {
    let group = ByHand::declare(STREAMS_TOML).await;
    let GroupHandle { id, stream_id, .. } = group.group;
    for lock in [format!("{{lock_class}} + 1, {id}"), "{lock_class} + 4, 5".to_owned()] {
        let mut holder = group.project.session().await;
        let pid = holder.number("select pg_backend_pid()::bigint").await;
        holder.run(&format!("begin; select pg_advisory_xact_lock({lock})")).await;
        let error = engine::seek(&group.project.database, id, stream_id, "email", &Start::Latest).await.unwrap_err();
        let error = format!("{error:#}");
        let named = format!("database process {pid} holds it");
        assert!(error.contains("lock group \"email\"") && error.contains(&named), "{error}");
        assert_eq!(group.number("select epoch from {schema}.consumer_group").await, 0);
    }
}

/// G4, D8: a seek of one group changes nothing of another, and a new group begins as if neither had been.
#[tokio::test]
async fn g4_a_seek_of_one_group_is_nothing_to_another() {
    let audit = "[groups.audit]\nstream = \"orders\"\nhandler = \"audit.wasm\"\n";
    let mut group = ByHand::declare(&format!("{STREAMS_TOML}{audit}")).await;
    group.project.produce("orders", &numbered(6)).await;
    let other =
        ByHand { project: Arc::clone(&group.project), host: group.host, group: group.project.group("audit").await };
    let all = [other.claim(4).await, group.claim(4).await];
    for (group, claimed) in [&other, &group].into_iter().zip(&all) {
        group.settle(&claimed[..1], &dead()).await;
        group.settle(&claimed[1..2], &again()).await;
    }
    let state = format!(
        "select md5((select array_agg(c::text) from {{schema}}.cursor c where group_id = {0})::text
            || (select array_agg(c::text) from {{schema}}.claim c where group_id = {0})::text
            || (select array_agg(e::text) from {{schema}}.exception e where group_id = {0})::text
            || (select array_agg(d::text) from {{schema}}.dead_letter d where group_id = {0})::text
            || (select g::text from {{schema}}.consumer_group g where id = {0}))",
        other.group.id
    );
    let of_other = async |group: &ByHand| -> String {
        let database = &group.project.database;
        sqlx::query_scalar(database.schema.sql(&state)).fetch_one(&database.pool).await.expect("read the state")
    };
    let before = of_other(&group).await;
    for to in [Start::Earliest, Start::Latest, Start::Id(3)] {
        group.seek(to).await;
        assert_eq!(of_other(&group).await, before);
    }
    assert_eq!(other.settle(&all[0][2..], &Verdict::Done).await, 0, "what it holds is its own");
}

/// A seek frees every key of the group but those that an operator has paused, which wait for nobody else from then on.
#[tokio::test]
async fn a_key_that_an_operator_paused_stays_paused_over_a_seek() {
    let mut group = ByHand::declare(STREAMS_TOML).await;
    let host = group.host;
    group
        .project
        .run(&format!(
            "insert into {{schema}}.message_key_lease (group_id, message_key, host_id, blocked_by, paused_at, rests)
             values (1, 'leased', {host}, null, null, false), (1, 'blocked', null, 7, null, false), (1, 'resting', null, null, null, true),
                 (1, 'paused', {host}, null, now(), false), (1, 'paused head', null, 7, now(), false)"
        ))
        .await;
    group.seek(Start::Earliest).await;
    let held = "select count(*) from {schema}.message_key_lease where message_key like 'paused%' and paused_at is not null and host_id is null and blocked_by is null";
    assert_eq!(group.number(held).await, 2);
    assert_eq!(group.number("select count(*) from {schema}.message_key_lease").await, 2);
}
