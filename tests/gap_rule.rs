//! The gap rule: ids commit out of order, and all the same nothing is lost, nothing comes twice, and nobody waits for
//! somebody else's transaction.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use millstream::{
    config,
    database::Database,
    engine::{self, ClaimId, GroupHandle, HostId, Note, Turn, Wanted},
    handler::Message,
};
use tokio::task::JoinSet;

use crate::support::{
    database,
    engine::{Project, Session, done, request, turn_statement},
    wait_for,
};

const LIMIT: Duration = Duration::from_secs(60);

const ONE_GROUP: &str = "[streams.orders]\n[groups.email]\nstream = \"orders\"\nhandler = \"email.wasm\"\n";

/// Claims by hand, so that a test decides when a turn takes place.
struct Claimer<'a> {
    project: &'a Project,
    host: HostId,
    group: GroupHandle,
    finished: Vec<ClaimId>,
}

impl<'a> Claimer<'a> {
    async fn new(project: &'a Project, group: &str) -> Self {
        let host = engine::register(&project.database, "test", LIMIT).await.unwrap();
        Self { project, host, group: project.group(group).await, finished: Vec::new() }
    }

    /// One turn that settles everything of the turns before it. Answers the payloads.
    async fn turn(&mut self, want: u32) -> Vec<String> {
        let wanted = Wanted { messages: want, bytes: 1 << 20, retries: want };
        let database = &self.project.database;
        let request = request(&self.finished, wanted);
        let Turn { note, settled, claimed, .. } =
            engine::claim(database, self.host, &self.group, &request).await.expect("claim");
        assert_eq!((note, settled.len()), (Note::Claimed, self.finished.len()));
        self.finished = claimed.iter().map(|one| one.token.claim).collect();
        self.finished.sort_unstable();
        self.finished.dedup();
        claimed.into_iter().map(|one| String::from_utf8(one.message.payload.unwrap()).unwrap()).collect()
    }

    /// Turns until something comes.
    async fn next(&mut self, want: u32) -> Vec<String> {
        let started = Instant::now();
        loop {
            let payloads = self.turn(want).await;
            if !payloads.is_empty() {
                return payloads;
            }
            assert!(started.elapsed() < LIMIT, "nothing came");
        }
    }

    async fn gaps(&self) -> i64 {
        self.project.number("select count(*) from {schema}.cursor_gap").await
    }

    /// Whether the idle poll would wake the group.
    async fn has_work(&self) -> bool {
        !engine::groups_with_work(&self.project.database, &[self.group.id]).await.expect("poll").is_empty()
    }
}

/// A transaction left open after it has produced.
async fn open_producer(project: &Project, payloads: &str) -> Session {
    let mut session = project.session().await;
    session.run(&format!("begin; select {{schema}}.produce_batch('orders', array[{payloads}]::bytea[])")).await;
    session
}

async fn produce(project: &Project, payload: &str) {
    project.run(&format!("select {{schema}}.produce('orders', '{payload}')")).await;
}

/// A hole is waited for until the message above it is 15 ms old, then stepped over; its message comes when it commits,
/// once, and until then the group is not work for the idle poll.
#[tokio::test]
async fn a_late_commit_inside_a_gap_is_delivered_exactly_once() {
    let project = Project::declare(ONE_GROUP).await;
    let mut claimer = Claimer::new(&project, "email").await;
    produce(&project, "a").await;
    let mut late = open_producer(&project, "'late'").await;
    produce(&project, "c").await;
    assert_eq!(claimer.turn(10).await, ["a"], "the contiguous prefix waits for nothing");
    assert_eq!(claimer.next(10).await, ["c"]);
    let age = "select (extract(epoch from clock_timestamp() - created_at) * 1000)::bigint from {schema}.message_log_1 where id = 3";
    assert!(project.number(age).await >= 20, "it was waited for");
    let pid = late.number("select pg_backend_pid()::bigint").await;
    assert_eq!(project.number("select pids[1]::bigint from {schema}.cursor_gap").await, pid, "people see who it is");
    assert_eq!(claimer.turn(10).await, [""; 0]);
    assert_eq!(claimer.gaps().await, 1);
    assert!(!claimer.has_work().await, "an open gap alone is no work: the poll must come to rest");
    late.run("commit").await;
    assert!(claimer.has_work().await);
    assert_eq!(claimer.turn(10).await, ["late"]);
    assert_eq!(claimer.turn(10).await, [""; 0]);
    assert_eq!(project.left_over().await, 0);
    assert!(!claimer.has_work().await);
}

/// What commits inside a gap is work also while another producer of the same gap sleeps on.
#[tokio::test]
async fn a_gap_with_two_producers_delivers_the_first_that_commits() {
    let project = Project::declare(ONE_GROUP).await;
    let mut claimer = Claimer::new(&project, "email").await;
    let mut one = open_producer(&project, "'one'").await;
    let mut two = open_producer(&project, "'two'").await;
    produce(&project, "x").await;
    assert_eq!(claimer.next(10).await, ["x"]);
    two.run("commit").await;
    assert!(claimer.has_work().await);
    assert_eq!(claimer.turn(10).await, ["two"]);
    assert!(!claimer.has_work().await);
    one.run("rollback").await;
    assert!(claimer.has_work().await, "a decided gap is to be closed");
    assert_eq!(claimer.turn(10).await, [""; 0]);
    assert_eq!(project.left_over().await, 0);
}

/// A gap may hold more than one turn takes; then it comes in parts, in order, and nothing newer overtakes it.
#[tokio::test]
async fn a_gap_with_more_messages_than_one_turn_is_taken_in_parts() {
    let project = Project::declare(ONE_GROUP).await;
    let mut claimer = Claimer::new(&project, "email").await;
    let mut late = open_producer(&project, "'1','2','3','4','5','6','7'").await;
    produce(&project, "x").await;
    assert_eq!(claimer.next(3).await, ["x"]);
    late.run("commit").await;
    produce(&project, "y").await;
    assert_eq!(claimer.turn(3).await, ["1", "2", "3"]);
    assert_eq!(claimer.gaps().await, 1);
    assert_eq!(claimer.turn(3).await, ["4", "5", "6"]);
    assert_eq!(claimer.turn(3).await, ["7", "y"]);
    claimer.turn(3).await;
    assert_eq!(project.left_over().await, 0);
}

/// A new group begins above dropped partitions. A group that stands below them, as it may after a restore, meets a huge
/// hole without a producer, which is closed at once.
#[tokio::test]
async fn a_huge_hole_of_dropped_partitions_closes_at_once() {
    let project = Project::declare("[streams.orders]\npartition_rows = 100\n[streams.other]").await;
    project
        .run("select {schema}.produce_batch('orders', array(select i::text::bytea from generate_series(1, 650) i))")
        .await;
    project
        .run(
            "do $$ declare t text; begin
        for t in select table_name from {schema}.log_partition where stream_id = 1 and upper_id <= 601 loop
            execute format('alter table {schema}.message_log_1 detach partition {schema}.%I', t);
            execute format('drop table {schema}.%I', t);
        end loop; end $$",
        )
        .await;
    apply(&project, ONE_GROUP).await;
    assert_eq!(project.number("select claimed from {schema}.cursor").await, 600);
    project.run("update {schema}.cursor set claimed = 0").await;
    let mut claimer = Claimer::new(&project, "email").await;
    let open = open_producer(&project, "'open'").await;
    assert_eq!(claimer.next(1000).await.len(), 50);
    drop(open);
    assert_eq!(claimer.gaps().await, 1);
    // The producers of before are gone: it is read a last time, and closed.
    for _ in 0..2 {
        assert_eq!(claimer.turn(1000).await, [""; 0]);
    }
    assert_eq!(claimer.gaps().await, 0);
}

/// A partition that is leaving the log is no longer read, whoever detaches it: what a claim names is in the log.
#[tokio::test]
async fn a_detached_partition_is_in_no_claim() {
    for keyed in [false, true] {
        let project =
            Project::declare(&ONE_GROUP.replace("[streams.orders]", "[streams.orders]\npartition_rows = 100")).await;
        let options =
            if keyed { ", array_fill('k'::text, array[250]), array_fill('exclusive'::text, array[250])" } else { "" };
        project
            .run(&format!(
                "select {{schema}}.produce_batch('orders', array(select i::text::bytea from generate_series(1, 250) i){options});
                 alter table {{schema}}.message_log_1 detach partition {{schema}}.message_log_1_p101;
                 update {{schema}}.cursor set claimed = 100"
            ))
            .await;
        let mut claimer = Claimer::new(&project, "email").await;
        assert_eq!(claimer.next(500).await, (201..=250).map(|n| n.to_string()).collect::<Vec<_>>(), "keyed: {keyed}");
        let elsewhere = "select count(*) from {schema}.claim where pending && '[1,201)'::int8range";
        assert_eq!(project.number(elsewhere).await, 0, "keyed: {keyed}");
    }
}

/// A clock that was set back makes messages of the future; a hole below one must not wait until it has caught up.
#[tokio::test]
async fn a_hole_below_a_message_of_the_future_is_stepped_over() {
    let project = Project::declare(ONE_GROUP).await;
    let mut claimer = Claimer::new(&project, "email").await;
    drop(open_producer(&project, "'gone'").await);
    produce(&project, "x").await;
    project.run("update {schema}.message_log_1 set created_at = clock_timestamp() + interval '1 hour'").await;
    assert_eq!(claimer.next(10).await, ["x"]);
}

async fn apply(project: &Project, streams_toml: &str) {
    let config = config::parse(streams_toml, std::path::Path::new("streams.toml"), &|_| None).expect("valid");
    engine::apply(&project.database, &config).await.expect("apply");
}

/// G2: what commits after the group's creation is delivered, also by transactions that began before it, and nothing else.
#[tokio::test]
async fn start_latest_delivers_what_running_transactions_commit_later() {
    let project = Project::declare("[streams.orders]").await;
    produce(&project, "before").await;
    let mut running = open_producer(&project, "'running 1', 'running 2'").await;
    let mut failing = open_producer(&project, "'never'").await;
    produce(&project, "before too").await;
    apply(&project, &format!("{ONE_GROUP}start = \"latest\"")).await;
    let mut claimer = Claimer::new(&project, "email").await;
    assert_eq!(claimer.turn(10).await, [""; 0]);
    running.run("commit").await;
    failing.run("rollback").await;
    produce(&project, "after").await;
    assert_eq!(claimer.turn(10).await, ["running 1", "running 2", "after"]);
    assert_eq!(claimer.turn(10).await, [""; 0]);
    assert_eq!(project.left_over().await, 0);
}

/// G1: each start point is exact at its boundary.
#[tokio::test]
async fn every_start_point_is_exact_at_its_boundary() {
    let project = Project::declare("[streams.orders]").await;
    for payload in ["1", "2", "3", "4"] {
        produce(&project, payload).await;
    }
    let mut running = open_producer(&project, "'5'").await;
    produce(&project, "6").await;
    project
        .run("update {schema}.message_log_1 set created_at = timestamptz '2026-01-01T00:00:00Z' + id * interval '1 s'")
        .await;
    let group = |name: &str, start: &str| {
        format!("[groups.{name}]\nstream = \"orders\"\nhandler = \"h.wasm\"\nstart = {start}\n")
    };
    let groups = [
        group("earliest", "\"earliest\""),
        group("by_id", "{ id = 3 }"),
        group("by_time", "{ time = \"2026-01-01T00:00:03Z\" }"),
        group("just_after", "{ time = \"2026-01-01T00:00:03.000001Z\" }"),
        group("in_the_hole", "{ time = \"2026-01-01T00:00:04.5Z\" }"),
        group("beyond", "{ id = 8 }"),
        group("latest", "\"latest\""),
    ];
    apply(&project, &format!("[streams.orders]\n{}", groups.concat())).await;
    running.run("commit").await;
    for payload in ["7", "8"] {
        produce(&project, payload).await;
    }
    for (name, expected) in [
        ("earliest", "12345678"),
        ("by_id", "345678"),
        ("by_time", "345678"),
        ("just_after", "45678"),
        ("in_the_hole", "5678"),
        ("beyond", "8"),
        ("latest", "578"),
    ] {
        let mut claimer = Claimer::new(&project, name).await;
        let mut found = claimer.next(100).await;
        found.extend(claimer.turn(100).await);
        found.sort_unstable();
        assert_eq!(found.concat(), expected, "{name}");
    }
}

/// Goal: the cost of a turn and of a poll does not grow with the log. Method: what each reads is counted by Postgres itself
/// on a log of 200,000 messages in 20 partitions, in the middle of it, with open gaps far behind.
#[tokio::test]
async fn a_turn_and_a_poll_read_only_what_they_take_however_long_the_log_is() {
    let project =
        Project::declare(&ONE_GROUP.replace("[streams.orders]", "[streams.orders]\npartition_rows = 10000")).await;
    for _ in 0..4 {
        project
            .run("select {schema}.produce_batch('orders', array(select 'x'::bytea from generate_series(1, 50000)))")
            .await;
    }
    project.run("analyze {schema}.message_log_1").await;
    let group = project.group("email").await.id;
    let host = engine::register(&project.database, "test", LIMIT).await.unwrap();
    project.run(&format!("update {{schema}}.cursor set claimed = 150000 where group_id = {group};
        insert into {{schema}}.cursor_gap (group_id, missing, holders, pids) values ({group}, '{{[20010,20020),[25000,25010)}}', '{{}}', '{{}}')")).await;
    let claim = turn_statement(group, &host.to_string(), 100, 10);
    let poll = format!("select count(*) from {{schema}}.groups_with_work(array[{group}])");
    let mut session = project.session().await;
    // More turns than a plan is made anew for.
    for turn in 0..8 {
        // A claim of 100 reads each row twice: to decide, and for its payload. Whether a gap has rows left is a look more.
        for (statement, rows_max) in [(&claim, 260), (&poll, 10)] {
            // The counts may hold what the connection did before, so they are compared.
            let counts = "select relname, seq_scan, seq_tup_read, idx_scan, idx_tup_fetch from pg_stat_xact_user_tables
                where relname like 'message\\_log\\_1\\_p%'";
            session.run(&format!("begin; create temp table before on commit drop as {counts}")).await;
            session.number(statement).await;
            let read = |what: &str| format!("select {what} from ({counts}) a left join before b using (relname)");
            let grown = |column: &str| format!("coalesce(sum(a.{column} - coalesce(b.{column}, 0)), 0)::bigint");
            for column in ["seq_scan", "seq_tup_read"] {
                assert_eq!(session.number(&read(&grown(column))).await, 0, "turn {turn}: {column} of {statement}");
            }
            let partitions =
                session.number(&read("count(*) filter (where a.idx_scan > coalesce(b.idx_scan, 0))")).await;
            // The first five plans are made for their parameters, and planning looks at the ends of every index in reach.
            let partitions_max = if turn < 6 { 10 } else { 4 };
            assert!(
                (1..=partitions_max).contains(&partitions),
                "turn {turn}: {partitions} partitions read by {statement}"
            );
            let rows = session.number(&read(&grown("idx_tup_fetch"))).await;
            assert!((1..=rows_max).contains(&rows), "turn {turn}: {rows} rows read by {statement}");
            session.run("rollback").await;
        }
    }
}

/// A transaction that stays open for an hour keeps every version of a cursor, and every gap that was open, of an hour's turns:
/// neither a turn nor a poll walks through them.
#[tokio::test]
async fn a_turn_and_a_poll_read_as_little_under_an_old_snapshot() {
    let project = Project::declare(ONE_GROUP).await;
    let group = project.group("email").await.id;
    let host = engine::register(&project.database, "test", LIMIT).await.unwrap().to_string();
    let mut old = project.session().await;
    old.run("begin; create temp table mine ()").await; // it has an id: nothing that dies from now on can be vacuumed
    let mut session = project.session().await;
    let blocks = "select sum(pg_stat_get_xact_blocks_fetched(oid))::bigint from (
        select unnest(array['{schema_text}.cursor', '{schema_text}.cursor_gap']::regclass[]) union all
        select indexrelid from pg_index where indrelid in ('{schema_text}.cursor'::regclass, '{schema_text}.cursor_gap'::regclass)
    ) as r (oid)";
    let turn = turn_statement(group, &host, 10, 10);
    let poll = format!("select count(*) from {{schema}}.groups_with_work(array[{group}])");
    let mut read = async || {
        let mut read = Vec::new();
        for statement in [&turn, &poll] {
            produce(&project, "x").await;
            let before = session.number(blocks).await;
            session.number(statement).await;
            read.push(session.number(blocks).await - before);
        }
        read
    };
    for _ in 0..8 {
        read().await; // until the plans are the ones that stay
    }
    let fresh = read().await;
    project
        .run(&format!(
            "insert into {{schema}}.cursor_gap (group_id, missing, holders, pids)
             select {group}, '{{}}', '{{}}', '{{}}' from generate_series(1, 20000);
             delete from {{schema}}.cursor_gap;
             do $$ begin
                 for i in 1..20000 loop update {{schema}}.cursor set begins_after = i, claimed = claimed + 1; end loop;
             end $$;
             select setval('{{schema_text}}.message_log_1_id', (select claimed from {{schema}}.cursor))"
        ))
        .await;
    read().await; // the first turn finds where the living gaps begin
    let aged = read().await;
    for ((fresh, aged), what) in fresh.iter().zip(&aged).zip(["a turn", "a poll"]) {
        assert!(*aged <= fresh + 20, "{what} reads {fresh} blocks, and {aged} beside 20,000 dead gaps and cursors");
    }
    old.run("commit").await;
}

/// What the soak test counts: deliveries by payload, and when the first began.
type Counts = Arc<Mutex<HashMap<String, (u32, Instant)>>>;

/// One producer: up to four messages a transaction, a random sleep between drawing the ids and the end, one in ten
/// rolled back. Answers what it committed, and when.
async fn producer(mut session: Session, number: u64, seed: u64, until: Instant) -> Vec<(String, Instant)> {
    let mut random = fastrand::Rng::with_seed(seed + number);
    let mut committed = Vec::new();
    let mut count = 0;
    while Instant::now() < until {
        let payloads: Vec<String> = (0..random.u32(1..=4)).map(|at| format!("{number}-{count}-{at}")).collect();
        count += 1;
        session.run("begin").await;
        for payload in &payloads {
            session.run(&format!("select {{schema}}.produce('orders', '{payload}')")).await;
        }
        let sleep = if random.u32(0..50) == 0 { random.u64(0..600) } else { random.u64(0..50) };
        tokio::time::sleep(Duration::from_millis(sleep)).await;
        if random.u32(0..10) == 0 {
            session.run("rollback").await;
        } else {
            session.run("commit").await;
            let now = Instant::now();
            committed.extend(payloads.into_iter().map(|payload| (payload, now)));
        }
    }
    committed
}

/// How long the messages that were committed in a part of the run waited for their delivery, from the shortest wait.
fn waits(committed: &[(String, Instant)], counts: &HashMap<String, (u32, Instant)>) -> Vec<Duration> {
    let wait = |(payload, at): &(String, Instant)| counts[payload].1.saturating_duration_since(*at);
    let mut waits: Vec<Duration> = committed.iter().map(wait).collect();
    waits.sort_unstable();
    waits
}

fn is_soak() -> bool {
    std::env::var_os("MILLSTREAM_SOAK").is_some()
}

/// Somebody with an xid and a transaction that stays open, who has nothing to do with the streams.
async fn stranger(database: &Database, table: &str) -> Session {
    let mut session = Session::begin(database).await;
    session.run(&format!("create table {table} (n integer); begin; insert into {table} values (1)")).await;
    session
}

/// Must-show 3. 32 slow producers and three hosts: nothing is lost, nothing comes twice, gaps stay few and are all closed at
/// the end, and small partitions are extended on the way. After a fifth of the time two unrelated transactions are opened, one
/// of them in another database: no gap waits for them, and in `make soak`, ten minutes of it, no message either.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_lost_or_delivered_twice_with_slow_producers_and_an_open_stranger() {
    let length = Duration::from_secs(if is_soak() { 600 } else { 10 });
    let seed = fastrand::u64(..1 << 32);
    println!("seed {seed}");
    let project =
        Project::declare(&ONE_GROUP.replace("[streams.orders]", "[streams.orders]\npartition_rows = 1000")).await;
    let elsewhere = database().await;
    let counts = Counts::default();
    let mut hosts = Vec::new();
    for _ in 0..3 {
        let counts = Arc::clone(&counts);
        let handler = move |message: Message| {
            let payload = String::from_utf8(message.payload.unwrap()).unwrap();
            counts.lock().unwrap().entry(payload).or_insert((0, Instant::now())).0 += 1;
            done()
        };
        hosts.push(project.host("email", handler).await);
    }
    let (started, until) = (Instant::now(), Instant::now() + length);
    let mut producers = JoinSet::new();
    for number in 0..32 {
        producers.spawn(producer(project.session().await, number, seed, until));
    }
    let (mut strangers, mut gaps) = (Vec::new(), Vec::new());
    while Instant::now() < until {
        if strangers.is_empty() && started.elapsed() > length / 5 {
            strangers.push(stranger(&project.database, "{schema}.unrelated").await);
            strangers.push(stranger(&elsewhere, "public.unrelated").await);
        }
        gaps.push(project.number("select count(*) from {schema}.cursor_gap").await);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let mut committed = Vec::new();
    while let Some(joined) = producers.join_next().await {
        committed.extend(joined.expect("no producer fails"));
    }
    wait_for("the deliveries", LIMIT, async || counts.lock().unwrap().len() >= committed.len()).await;
    // Gaps among them: the strangers are still open.
    wait_for("nothing is left over", LIMIT, async || project.left_over().await == 0).await;
    let counts = counts.lock().unwrap().clone();
    let lost: Vec<_> = committed.iter().filter(|(payload, _)| !counts.contains_key(payload)).collect();
    let twice: Vec<_> = counts.iter().filter(|(_, (count, _))| *count != 1).collect();
    let told: Vec<_> = hosts.iter().map(|host| host.counters.snapshot().to_string()).collect();
    assert!(lost.is_empty() && twice.is_empty(), "seed {seed}: lost {lost:?}, twice {twice:?}; hosts {told:#?}");
    assert_eq!(counts.len(), committed.len(), "seed {seed}: what was rolled back is not delivered");
    assert!(committed.len() > 1000, "only {} messages: this shows nothing", committed.len());
    // Each of the 32 has at most four ids of its transaction in holes, and a hole that it no longer holds open goes at the next
    // turn: the same at the end, with strangers, as at first, without.
    let (gaps_max, fifth) = (*gaps.iter().max().unwrap(), gaps.len() / 5);
    let mean = |part: &[i64]| part.iter().sum::<i64>() / part.len() as i64;
    let (gaps_first, gaps_last) = (mean(&gaps[..fifth]), mean(&gaps[4 * fifth..]));
    println!("gaps: at most {gaps_max}, {gaps_first} on average at first, {gaps_last} at last");
    assert!(gaps_max <= 2 * 4 * 32, "seed {seed}: {gaps_max} gaps were open at once");
    assert!(gaps_last <= 2 * gaps_first + 32, "seed {seed}: {gaps_first} gaps at first, {gaps_last} at last");
    // What the strangers keep from being vacuumed makes no turn dearer; a thousand partitions do, a little.
    committed.sort_unstable_by_key(|(_, at)| *at);
    let fifth = committed.len() / 5;
    let (first, last) = (waits(&committed[..fifth], &counts), waits(&committed[4 * fifth..], &counts));
    let at = |waits: &[Duration], hundredth: usize| waits[(waits.len() - 1) * hundredth / 100];
    println!("{} messages; half delivered after {:?} and {:?}", committed.len(), at(&first, 50), at(&last, 50));
    println!(
        "99 in 100 after {:?} and {:?}, all after {:?} and {:?}",
        at(&first, 99),
        at(&last, 99),
        at(&first, 100),
        at(&last, 100)
    );
    for hundredth in [50, 99] {
        let (first, last) = (at(&first, hundredth), at(&last, hundredth));
        assert!(
            !is_soak() || last <= 2 * first + Duration::from_millis(50),
            "seed {seed}: {hundredth} in 100 wait {first:?} at first, {last:?} at last"
        );
    }
    for mut stranger in strangers {
        stranger.run("rollback").await;
    }
    for host in hosts {
        host.drain().await;
    }
}
