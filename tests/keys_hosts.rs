//! Keys while hosts are killed, frozen, stopped and started again under load. The long forms run with MILLSTREAM_SOAK=1.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed},
    },
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use millstream::handler::{Concurrency, Finished, Handler, Handling, Message, NewMessage, Outcome};
use tokio::{runtime, task::JoinHandle};
use tokio_util::sync::CancellationToken;

use crate::support::{
    HOSTS_COME_AND_GO,
    engine::{Host, Project, Session, done},
    keyed::{all_done, failed, keyed, rejected, streams},
    wait_for,
};

/// A ceiling against hangs.
const LIMIT: Duration = Duration::from_secs(600);

const LEASE: Duration = Duration::from_millis(600);

fn is_soak() -> bool {
    std::env::var_os("MILLSTREAM_SOAK").is_some()
}

fn sized(long: usize, short: usize) -> usize {
    if is_soak() { long } else { short }
}

/// Hosts with a short lease, and one group.
async fn declare(group: &str) -> Project {
    let host = "[host]\nlease = \"600ms\"\nheartbeat = \"150ms\"\ndrain_timeout = \"1s\"\n";
    let project = Project::declare(&(host.to_owned() + &streams(group))).await;
    for part in HOSTS_COME_AND_GO {
        project.database.expect_log(part);
    }
    project
}

/// Microseconds since 1970, on the clock that the database reads too.
fn now() -> i64 {
    i64::try_from(SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_micros()).unwrap()
}

/// One delivery: when it began, and when and how it ended. Dropped with its host, it ends without an answer.
#[derive(Clone, Copy, Debug)]
struct Span {
    /// Which process of the test ran it.
    host: usize,
    id: i64,
    attempt: u32,
    start: i64,
    end: i64,
    answered: bool,
}

/// All deliveries by key.
#[derive(Clone, Default)]
struct Spans(Arc<Mutex<HashMap<String, Vec<Span>>>>);

struct Running {
    spans: Spans,
    key: String,
    span: Span,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.span.end = now();
        let mut spans = self.spans.0.lock().unwrap();
        spans.entry(std::mem::take(&mut self.key)).or_default().push(self.span);
    }
}

impl Spans {
    fn all(&self) -> HashMap<String, Vec<Span>> {
        let mut all = self.0.lock().unwrap().clone();
        all.values_mut().for_each(|spans| spans.sort_by_key(|span| span.start));
        all
    }

    fn answered(&self) -> usize {
        self.0.lock().unwrap().values().flatten().filter(|span| span.answered).count()
    }

    /// Keys of which a host has done something.
    fn of_host(&self, host: usize) -> usize {
        let is_of_it = |spans: &&Vec<Span>| spans.iter().any(|span| span.host == host && span.answered);
        self.0.lock().unwrap().values().filter(is_of_it).count()
    }

    /// E1: no two spans of a key overlap, each cut off at the end of the lease of its host.
    fn one_at_a_time(&self, leases: &HashMap<usize, Vec<(i64, i64)>>) {
        for (key, spans) in self.all() {
            let mut until = (0, None);
            for span in spans {
                let lease = leases[&span.host].iter().rev().find(|(began, _)| *began <= span.start).expect("a lease");
                if span.start > lease.1 {
                    continue; // of a host that had lost its lease and did not know it yet
                }
                assert!(until.0 <= span.start, "two of key {key} at once: {until:?} and {span:?}");
                until = until.max((span.end.min(lease.1), Some(span.id)));
            }
        }
    }
}

/// Notes its deliveries, runs each for a moment, and answers what `judge` says of it.
struct Noting<F> {
    spans: Spans,
    host: usize,
    judge: F,
}

impl<F: Fn(&Message) -> Finished + Send + Sync> Handler for Noting<F> {
    fn handle<'a>(&'a self, message: Message, cut: &'a CancellationToken) -> Handling<'a> {
        Box::pin(async move {
            let span = Span {
                host: self.host,
                id: message.id,
                attempt: message.attempt,
                start: now(),
                end: 0,
                answered: false,
            };
            let key = message.key.clone().unwrap_or_default();
            let mut running = Running { spans: self.spans.clone(), key, span };
            tokio::select! {
                () = cut.cancelled() => return Finished::plain(Outcome::HandBack),
                () = tokio::time::sleep(Duration::from_micros(fastrand::u64(0..1500))) => {}
            }
            running.span.answered = true;
            (self.judge)(&message)
        })
    }
}

/// A host with threads of its own, so that it can be frozen, and killed with everything it runs.
struct Process {
    number: usize,
    threads: Option<runtime::Runtime>,
    host: Option<Host>,
}

/// A test that fails ends: dropping a runtime would wait for what runs in it.
impl Drop for Process {
    fn drop(&mut self) {
        if let Some(threads) = self.threads.take() {
            threads.shutdown_background();
        }
    }
}

static COUNT: AtomicUsize = AtomicUsize::new(0);

impl Process {
    async fn start<F>(project: &Arc<Project>, spans: &Spans, judge: F) -> Self
    where
        F: Fn(&Message) -> Finished + Send + Sync + 'static,
    {
        let number = COUNT.fetch_add(1, Relaxed);
        let threads = runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let handler = Arc::new(Noting { spans: spans.clone(), host: number, judge });
        let database = project.database.with_own_pool(16);
        let config = project.config.host.clone();
        let start = Host::start(
            database,
            config,
            format!("p{number}"),
            vec![("email".to_owned(), handler as Arc<dyn Handler>)],
        );
        let host = threads.spawn(start).await.expect("start a host");
        Self { number, threads: Some(threads), host: Some(host) }
    }

    fn threads(&self) -> &runtime::Runtime {
        self.threads.as_ref().expect("it lives")
    }

    /// As by kill -9.
    fn kill(mut self) {
        drop(self.host.take());
        self.threads.take().expect("it lives").shutdown_background();
    }

    /// As by TERM.
    async fn stop(mut self) {
        let host = self.host.take().expect("it lives");
        self.threads().spawn(host.drain()).await.expect("drain");
        self.threads.take().expect("it lives").shutdown_background();
    }

    /// Nothing of it runs for longer than its lease, so that another takes over. Until the lease has run out its row is
    /// locked, since the keeper of the lease has a thread of its own.
    async fn freeze(&self, session: &mut Session) {
        let lock = format!("begin; select from {{schema}}.host where name = 'p{}' for no key update", self.number);
        session.run(&lock).await;
        let length = LEASE + Duration::from_millis(1200);
        let still: JoinHandle<()> = self.threads().spawn(async move { std::thread::sleep(length) });
        tokio::time::sleep(LEASE + Duration::from_millis(50)).await;
        session.run("commit").await;
        still.await.expect("a sleep does not panic");
    }
}

/// Notes every lease that a host gets.
const WATCH: &str = include_str!("model/watch.sql");

/// Of each process its leases, each with its beginning and its end.
async fn leases(project: &Project) -> HashMap<usize, Vec<(i64, i64)>> {
    let sql = "select substr(name, 2)::bigint, (extract(epoch from min(at)) * 1000000)::bigint,
            (extract(epoch from (array_agg(expires_at order by seq desc))[1]) * 1000000)::bigint
        from {schema}.model_lease group by host_id, name order by host_id";
    let rows: Vec<(i64, i64, i64)> =
        sqlx::query_as(project.database.schema.sql(sql)).fetch_all(&project.database.pool).await.unwrap();
    let mut all: HashMap<usize, Vec<(i64, i64)>> = HashMap::new();
    for (process, began, until) in rows {
        all.entry(usize::try_from(process).unwrap()).or_default().push((began, until));
    }
    all
}

async fn produce(project: &Project, messages: &[NewMessage]) {
    for batch in messages.chunks(1000) {
        project.produce("orders", batch).await;
    }
}

/// Kills, stops and freezes one of three hosts after the other while they work; another takes its place. Answers those
/// that are left.
async fn disturb<F>(project: &Arc<Project>, spans: &Spans, total: usize, judge: F) -> Vec<Process>
where
    F: Fn(&Message) -> Finished + Clone + Send + Sync + 'static,
{
    let mut session = project.session().await;
    let mut hosts = Vec::new();
    for _ in 0..3 {
        hosts.push(Process::start(project, spans, judge.clone()).await);
    }
    let turns = sized(40, 6);
    for turn in 1..=turns {
        wait_for("more deliveries", LIMIT, async || spans.answered() >= total * turn / (turns + 2)).await;
        let doomed = hosts.remove(0);
        match turn % 3 {
            0 => doomed.stop().await,
            1 => doomed.kill(),
            _ => {
                doomed.freeze(&mut session).await;
                hosts.push(doomed);
                continue;
            }
        }
        hosts.push(Process::start(project, spans, judge.clone()).await);
    }
    hosts
}

async fn stop_all(hosts: Vec<Process>) {
    for host in hosts {
        host.stop().await;
    }
}

/// Case 2: E1, E9. Deliveries over 10 exclusive keys, 3 hosts of 32 slots, hosts killed, frozen and stopped: no two of a key at
/// once, fenced work aside, and every message ends.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn e1_no_two_deliveries_of_a_key_overlap_while_hosts_die_and_freeze() {
    let project = Arc::new(declare("slots = 32").await);
    project.run(WATCH).await;
    let total = sized(10_000, 1500);
    let batch: Vec<_> =
        (0..total).map(|n| keyed(&format!("k{}", n % 10), Concurrency::Exclusive, &n.to_string())).collect();
    produce(&project, &batch).await;
    let spans = Spans::default();
    let hosts = disturb(&project, &spans, total, |_| done()).await;
    all_done(&project).await;
    stop_all(hosts).await;
    let dead = project.number("select count(*) from {schema}.dead_letter where class <> 'host_lost'").await;
    assert_eq!(dead, 0);
    spans.one_at_a_time(&leases(&project).await);
    ends(&project, &spans, total).await;
}

/// Every message was answered, or died with its hosts.
async fn ends(project: &Project, spans: &Spans, total: usize) {
    let mut ended: Vec<i64> = spans.all().values().flatten().filter(|span| span.answered).map(|span| span.id).collect();
    let dead = "select message_id from {schema}.dead_letter";
    let dead: Vec<i64> =
        sqlx::query_scalar(project.database.schema.sql(dead)).fetch_all(&project.database.pool).await.unwrap();
    ended.extend(dead);
    ended.sort_unstable();
    ended.dedup();
    assert_eq!(ended.len(), total, "every message ends");
}

/// Case 3: O1, O2, O9, D1, D2, D3. Ordered keys, every 7th delivery fails, hosts killed, frozen and stopped: each key's last
/// successes are in order, none is stuck, and each dead letter policy does what it says.
async fn ordered_keys_survive(policy: &str) {
    let project = Arc::new(declare(&format!("slots = 16\non_dead_letter = \"{policy}\"")).await);
    project.run(WATCH).await;
    let (total, keys) = (sized(100_000, 1500), sized(1000, 50));
    let batch: Vec<_> =
        (0..total).map(|n| keyed(&format!("k{}", n % keys), Concurrency::Ordered, &n.to_string())).collect();
    produce(&project, &batch).await;
    let spans = Spans::default();
    let count = Arc::new(AtomicUsize::new(0));
    let judge = move |_: &Message| match count.fetch_add(1, Relaxed) {
        n if n % 307 == 200 => rejected(), // some die for certain
        n if n % 7 == 6 => failed(),
        _ => done(),
    };
    // With `block` and `rest` keys end early, with all that is behind their dead letters.
    let hosts = disturb(&project, &spans, if policy == "skip" { total } else { total / 2 }, judge).await;
    let left = "select (select count(*) from {schema}.claim) + (select count(*) from {schema}.message_log_1 l, {schema}.cursor c where l.id > c.claimed)
        + (select count(*) from {schema}.message_key_lease where blocked_by is null and not rests)
        + (select count(*) from {schema}.exception e where state <> 'deferred' or not exists (
            select from {schema}.message_key_lease k join {schema}.dead_letter d on d.message_id = k.blocked_by where k.message_key = e.message_key))";
    wait_for("every key is done or waits for an operator", LIMIT, async || project.number(left).await == 0).await;
    stop_all(hosts).await;
    spans.one_at_a_time(&leases(&project).await);
    in_order(&project, &spans, policy).await;
    if policy == "skip" {
        ends(&project, &spans, total).await;
    }
}

/// Per key: the last deliveries of what is done strictly rise, and nothing is done after a dead letter that stops the key.
async fn in_order(project: &Project, spans: &Spans, policy: &str) {
    let dead = "select message_key, min(message_id), count(*) from {schema}.dead_letter group by message_key";
    let dead: Vec<(String, i64, i64)> =
        sqlx::query_as(project.database.schema.sql(dead)).fetch_all(&project.database.pool).await.unwrap();
    // What a lost host had answered counts only if it was settled.
    let open = "select message_id from {schema}.exception union select message_id from {schema}.dead_letter";
    let open: Vec<i64> =
        sqlx::query_scalar(project.database.schema.sql(open)).fetch_all(&project.database.pool).await.unwrap();
    let open: HashSet<i64> = open.into_iter().collect();
    let stops: HashMap<&str, i64> = dead.iter().map(|(key, first, _)| (key.as_str(), *first)).collect();
    for (key, spans) in spans.all() {
        let last: BTreeMap<i64, Span> = spans
            .iter()
            .filter(|span| span.answered && !open.contains(&span.id))
            .map(|span| (span.id, *span))
            .collect();
        let lasts: Vec<Span> = last.into_values().collect();
        for pair in lasts.windows(2) {
            assert!(pair[0].start < pair[1].start, "key {key}: {pair:?}");
        }
        if policy != "skip"
            && let Some(first) = stops.get(key.as_str())
        {
            assert!(lasts.iter().all(|span| span.id < *first), "key {key} went on after {first}");
        }
    }
    let (keys, letters) = (dead.len() as i64, dead.iter().map(|(_, _, count)| count).sum::<i64>());
    let blocked = project.number("select count(*) from {schema}.message_key_lease where blocked_by is not null").await;
    let resting = project.number("select count(*) from {schema}.message_key_lease where rests").await;
    assert!(letters > 0, "no message died");
    match policy {
        "block" => assert_eq!((blocked, letters, resting), (keys, keys, 0)),
        "skip" => assert_eq!((blocked, resting), (0, 0)),
        _ => assert_eq!((blocked, resting), (0, keys)),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn o2_ordered_keys_survive_their_hosts_and_dead_letters_block_them() {
    ordered_keys_survive("block").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn o2_ordered_keys_survive_their_hosts_and_skip_dead_letters() {
    ordered_keys_survive("skip").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn o2_ordered_keys_survive_their_hosts_and_rest_after_dead_letters() {
    ordered_keys_survive("rest").await;
}

/// Case 6: O7, O8. The head of a deep key fails with some behind it in the host's queue and some deferred: none of those
/// counts an attempt, and they come in order afterwards.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn o8_those_behind_a_failed_head_count_no_attempt() {
    // With a long lease: on a busy machine a short one may run out, and that counts an attempt.
    let project = Arc::new(Project::declare(&streams("slots = 16")).await);
    let spans = Spans::default();
    let batch: Vec<_> = (0..500).map(|n| keyed("k", Concurrency::Ordered, &n.to_string())).collect();
    let warm: Vec<_> = (0..300).map(|n| keyed(&format!("w{n}"), Concurrency::Ordered, "w")).collect();
    let fails =
        |message: &Message| message.key.as_deref() == Some("k") && message.attempt < 3 && message.id % 100 == 51;
    let host = Process::start(&project, &spans, move |message| if fails(message) { failed() } else { done() }).await;
    produce(&project, &warm).await; // so that the host is fast enough to queue some of a key
    produce(&project, &batch).await;
    all_done(&project).await;
    host.stop().await;
    let of_key = spans.all().remove("k").unwrap();
    let attempts: i64 = of_key.iter().map(|span| i64::from(span.attempt)).sum();
    assert_eq!((of_key.len(), attempts), (510, 495 + 5 * (1 + 2 + 3)), "each once, but five that come three times");
    assert!(of_key.windows(2).all(|pair| pair[0].id <= pair[1].id && pair[0].end <= pair[1].start));
}

/// Case 7: R1, R2. A message that kills its host every time is dead-lettered at the cap, by recovery; those behind it lose one
/// attempt at most, and none of them dies. The host dies so fast that it may not have settled those before; of an ordered key
/// the first of them then counts in its place, each once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r2_a_message_that_kills_its_hosts_takes_none_with_it() {
    for (mode, policy) in [(Concurrency::Exclusive, "block"), (Concurrency::Ordered, "skip")] {
        let project = Arc::new(declare(&format!("on_dead_letter = \"{policy}\"")).await);
        let batch: Vec<_> = (0..40).map(|n| keyed("k", mode, &n.to_string())).collect();
        produce(&project, &batch).await;
        let spans = Spans::default();
        let killed = Arc::new(AtomicUsize::new(0));
        let is_over = Arc::new(AtomicBool::new(false));
        let dead =
            "select count(*) from {schema}.dead_letter where message_id = 6 and class = 'host_lost' and attempts = 3";
        let is_dead = async || project.number(dead).await == 1;
        let mut deaths = 0;
        while !is_dead().await {
            assert!(deaths < 5 + 3, "{mode:?}: it killed its host {deaths} times, and lives");
            let (reached, is_over) = (Arc::clone(&killed), Arc::clone(&is_over));
            let host = Process::start(&project, &spans, move |message| {
                if message.id == 6 {
                    reached.fetch_add(1, Relaxed);
                    while !is_over.load(Relaxed) {
                        std::thread::sleep(Duration::from_millis(10)); // it never answers
                    }
                }
                done()
            })
            .await;
            deaths += 1;
            wait_for("it kills its host", LIMIT, async || killed.load(Relaxed) == deaths || is_dead().await).await;
            if killed.load(Relaxed) < deaths {
                host.stop().await; // it had died before it came to this host
                break;
            }
            host.kill();
        }
        assert!(killed.load(Relaxed) >= 3, "{mode:?}: it died after {deaths} hosts");
        is_over.store(true, Relaxed);
        let host = Process::start(&project, &spans, |_| done()).await;
        all_done(&project).await;
        host.stop().await;
        assert_eq!(project.number("select count(*) from {schema}.dead_letter").await, 1);
        for span in spans.all().remove("k").unwrap().iter().filter(|span| span.id != 6) {
            assert!(span.attempt <= 2, "{mode:?}: {span:?}");
        }
    }
}

/// Case 7: E1, E7, E9. The host that has all keys is killed: another takes them, none overlaps, none is orphaned; in the long
/// form within the lease and a second.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn e9_another_host_takes_the_keys_of_a_killed_one() {
    let project = Arc::new(declare("slots = 1000").await);
    project.run(WATCH).await;
    let keys = sized(1000, 200);
    let batch: Vec<_> =
        (0..3 * keys).map(|n| keyed(&format!("k{}", n % keys), Concurrency::Ordered, &n.to_string())).collect();
    produce(&project, &batch).await;
    let spans = Spans::default();
    let doomed = Process::start(&project, &spans, |_| Finished::plain(Outcome::Later { delay: LIMIT })).await;
    let judged = "select count(*) from {schema}.message_key_lease where blocked_by is not null";
    wait_for("it answers later", LIMIT, async || project.number(judged).await == keys as i64).await;
    doomed.stop().await;
    project.run("update {schema}.exception set due_at = clock_timestamp() where state = 'waiting'").await;
    let doomed = Process::start(&project, &spans, |_| {
        std::thread::sleep(Duration::from_millis(20)); // it has the keys for much longer than they take to be claimed
        done()
    })
    .await;
    let held = "select count(*) from {schema}.message_key_lease where host_id is not null";
    wait_for("it has all keys", LIMIT, async || project.number(held).await == keys as i64).await;
    let heir = Process::start(&project, &spans, |_| done()).await;
    assert_eq!(spans.of_host(heir.number), 0);
    doomed.kill();
    let killed = Instant::now();
    wait_for("another has them all", LIMIT, async || spans.of_host(heir.number) == keys).await;
    let took = killed.elapsed();
    println!("{keys} keys taken over {took:?} after the kill");
    assert!(!is_soak() || took <= LEASE + Duration::from_secs(1), "it took {took:?}");
    all_done(&project).await;
    heir.stop().await;
    spans.one_at_a_time(&leases(&project).await);
    ends(&project, &spans, 3 * keys).await;
}
