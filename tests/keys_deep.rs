//! E5, E6, O3, R4: what one key does to all others when it is very deep, or when keys only fail. `make soak` compares
//! latency and rate at half of the host's capacity; the short form counts.

use std::{
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use millstream::handler::{Concurrency, Finished, Handler, Handling, Message, NewMessage, Outcome};
use tokio_util::sync::CancellationToken;

use crate::support::{
    engine::{Host, Project, done},
    keyed::{LIMIT, keyed, streams},
    wait_for,
};

const SHALLOW_KEYS: usize = 999;

/// What stands beside the shallow keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Beside {
    Nothing,
    /// One ordered key with so many messages.
    Deep(i64),
    /// So many ordered keys with 50 messages each, whose heads only fail.
    Poison(i64),
}

/// Of the shallow keys.
#[derive(Debug)]
struct Figures {
    median: Duration,
    per_second: f64,
}

/// Micros of each shallow message from its produce to its handler.
type Latencies = Arc<Mutex<Vec<u64>>>;

/// Fails what is poison, takes its time for what is deep, and notes how late the shallow ones come.
struct Mixed {
    latencies: Latencies,
    began: Instant,
}

/// A key is deep because its messages are slow; one whose messages take no time is an offered load of its own.
const SLOW: Duration = Duration::from_millis(1);

impl Handler for Mixed {
    fn handle<'a>(&'a self, message: Message, _cut: &'a CancellationToken) -> Handling<'a> {
        Box::pin(async move {
            let key = message.key.as_deref().unwrap_or_default();
            if key.starts_with("poison") {
                return Finished::plain(Outcome::Retry { reason: "always".into() });
            }
            if key.starts_with("deep") {
                tokio::time::sleep(SLOW).await;
            }
            if key.starts_with('s') {
                let sent: u64 = String::from_utf8_lossy(&message.payload.unwrap_or_default()).parse().unwrap();
                self.latencies.lock().unwrap().push(micros(self.began).saturating_sub(sent));
            }
            done()
        })
    }
}

/// The most that one call takes.
const CALL_MAX: i64 = 50_000;

struct Run {
    project: Project,
    latencies: Latencies,
    began: Instant,
}

impl Run {
    async fn new(beside: Beside) -> Self {
        let group = "slots = 10";
        let toml = streams(group).replace("base = \"20ms\", max = \"20ms\"", "base = \"50ms\", max = \"50ms\"");
        let project = Project::declare(&toml.replace("max_attempts = 3", "max_attempts = 1000")).await;
        let (keys, deep) = match beside {
            Beside::Nothing => (0, 0),
            Beside::Deep(messages) => (1, messages),
            Beside::Poison(keys) => (keys, 50),
        };
        let name = if matches!(beside, Beside::Poison(_)) { "poison" } else { "deep" };
        for key in 0..keys {
            let mut left = deep;
            while left > 0 {
                let count = left.min(CALL_MAX);
                project
                    .run(&format!(
                        "select count(*) from {{schema}}.produce_batch('orders', array_fill('x'::bytea, array[{count}]),
                            p_keys => array_fill('{name} {key}'::text, array[{count}]),
                            p_concurrencies => array_fill('ordered'::text, array[{count}]))"
                    ))
                    .await;
                left -= count;
            }
        }
        Self { project, latencies: Latencies::default(), began: Instant::now() }
    }

    async fn host(&self) -> Host {
        let handler = Mixed { latencies: Arc::clone(&self.latencies), began: self.began };
        self.project.host_with(&[("email", Arc::new(handler))]).await
    }

    /// Produces one message to each of `count` shallow keys, in one batch.
    async fn offer(&self, from: usize, count: usize) {
        let at = micros(self.began).to_string();
        let batch: Vec<NewMessage> =
            (from..from + count).map(|n| keyed(&format!("s{}", n % SHALLOW_KEYS), Concurrency::Ordered, &at)).collect();
        self.project.produce("orders", &batch).await;
    }

    fn ended(&self) -> usize {
        self.latencies.lock().unwrap().len()
    }
}

fn micros(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_micros()).unwrap()
}

/// Messages a second of the shallow keys alone, as fast as they go, produced meanwhile: the producer shares the machine.
async fn capacity() -> f64 {
    const COUNT: usize = 50_000;
    let run = Run::new(Beside::Nothing).await;
    let host = run.host().await;
    let began = Instant::now();
    for from in (0..COUNT).step_by(500) {
        run.offer(from, 500).await;
    }
    wait_for("the backlog is through", LIMIT, async || run.ended() == COUNT).await;
    let rate = COUNT as f64 / began.elapsed().as_secs_f64();
    host.drain().await;
    rate
}

/// Offers a rate for ten seconds.
async fn at_rate(beside: Beside, per_second: f64) -> Figures {
    const TICK: Duration = Duration::from_millis(20);
    let run = Run::new(beside).await;
    let host = run.host().await;
    // What lies before the shallow keys in the log has to be read first, once; then it is deep.
    let unread = "select count(*) from {schema}.message_log_1 l, {schema}.cursor c where l.id > c.claimed";
    wait_for("the deep key is behind its head", LIMIT, async || run.project.number(unread).await == 0).await;
    let (began, mut offered) = (Instant::now(), 0);
    while began.elapsed() < Duration::from_secs(10) {
        tokio::time::sleep(TICK).await;
        let due = (began.elapsed().as_secs_f64() * per_second) as usize;
        while offered < due {
            let count = (due - offered).min(500);
            run.offer(offered, count).await;
            offered += count;
        }
    }
    wait_for("what was offered is through", LIMIT, async || run.ended() == offered).await;
    let rate = offered as f64 / began.elapsed().as_secs_f64();
    host.drain().await;
    let mut all = run.latencies.lock().unwrap().clone();
    all.sort_unstable();
    Figures { median: Duration::from_micros(all[all.len() / 2]), per_second: rate }
}

/// Must-show 4, long form: at half of capacity, a key 200,000 deep or 20 poison keys leave the shallow keys' latency and rate
/// within 0.9 of what they are alone. The best of three runs each: the machine has other things to do.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn e5_e6_shallow_keys_do_not_feel_a_deep_key_or_poison() {
    if std::env::var_os("MILLSTREAM_SOAK").is_none() {
        return counted().await;
    }
    let offered = capacity().await / 2.0;
    let mut best = Vec::new();
    for beside in [Beside::Nothing, Beside::Deep(200_000), Beside::Poison(20)] {
        let (mut median, mut rate) = (Duration::MAX, 0.0_f64);
        for _ in 0..3 {
            let figures = at_rate(beside, offered).await;
            println!("{beside:?} at {offered:.0}/s: {figures:?}");
            (median, rate) = (median.min(figures.median), rate.max(figures.per_second));
        }
        best.push((beside, median, rate));
    }
    let (_, alone, rate_alone) = best[0];
    for (beside, median, rate) in &best[1..] {
        assert!(alone.as_secs_f64() >= 0.9 * median.as_secs_f64(), "{beside:?}: latency {median:?}, alone {alone:?}");
        assert!(*rate >= 0.9 * rate_alone, "{beside:?}: {rate:.0}/s, alone {rate_alone:.0}/s");
    }
}

/// The short form: all that is shallow gets through behind a deep key, which does too, and behind more poison keys than slots,
/// of which no message but the heads is tried.
async fn counted() {
    for beside in [Beside::Deep(2_000), Beside::Poison(20)] {
        let run = Run::new(beside).await;
        run.offer(0, SHALLOW_KEYS).await;
        let host = run.host().await;
        wait_for("the shallow keys are through", LIMIT, async || run.ended() == SHALLOW_KEYS).await;
        let deferred = "select count(*) from {schema}.exception where state = 'deferred'";
        if beside == Beside::Poison(20) {
            let all_behind = async || run.project.number(deferred).await == 20 * 49;
            wait_for("each poison key waits behind its head", LIMIT, all_behind).await;
            let tried = "select count(*) from {schema}.exception where failures > 0";
            assert!(run.project.number(tried).await <= 20, "only heads were tried");
        } else {
            wait_for("the deep key is through as well", LIMIT, async || run.project.left_over().await == 0).await;
        }
        host.drain().await;
    }
}
