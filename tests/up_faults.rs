//! Handlers that misbehave inside the real program. Method: `flaky` is told to harm; what counts is the dead letter, the
//! next message of the same group, and the host itself.

use std::time::Duration;

use millstream::sandbox::digest;
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::support::{
    PATIENCE, Program, TestDatabase, database,
    handlers::{handler_wasm, rounds},
    hosts::{
        SECRET, SHORT_LEASE, all_reported, assert_tells_no_secret, dead_letters, held_by, number, playground, produce,
        resident, settled, stats, tell, up,
    },
    wait_for,
};

/// Looks at the host's row while `work` is done. Answers how old its heartbeat became at most, by the database's clock.
async fn oldest_heartbeat_during(database: &TestDatabase, work: impl Future<Output = ()>) -> Duration {
    let age =
        "select coalesce((1000 * extract(epoch from clock_timestamp() - heartbeat_at))::bigint, 0) from {schema}.host";
    let (looking, mut oldest) = (database.another_host().await, 0);
    tokio::pin!(work);
    loop {
        tokio::select! {
            () = &mut work => break,
            () = tokio::time::sleep(Duration::from_millis(20)) => oldest = oldest.max(number(&looking, age).await),
        }
    }
    looking.close().await;
    Duration::from_millis(oldest.unsigned_abs())
}

/// The heartbeat is due every 500 ms: in `make soak` none is missed.
fn assert_none_missed(oldest: Duration) {
    println!("the oldest heartbeat was {oldest:?} old");
    assert!(oldest < rounds(PATIENCE, Duration::from_secs(1)), "a heartbeat was {oldest:?} old");
}

/// How often the group's handlers have grown their memory, as its host last told; nothing before its first delivery.
fn growths(stats: &Value) -> Option<u64> {
    stats["groups"]["worker"]["memory_growths"].as_u64()
}

#[tokio::test]
async fn every_harm_has_its_class_and_harms_nobody_else() {
    let database = database().await;
    // One sandbox that is not given back is more than the slack that is left for memory below.
    let worker = "timeout = \"2s\"\nmemory = \"128MiB\"\nslots = 4\nretry = { max_attempts = 1 }";
    let mut program = Program::with_examples(&playground(SHORT_LEASE, worker));
    up(&mut program, &database.url().await).await;
    tell(&database, json!({"do": "report"}), 8).await;
    all_reported(&database, 8).await;
    let before = stats(&database, &program).await;
    let (resident_before, host) = (resident(&program), before["host"].clone());
    assert!(growths(&before).is_none_or(|count| count == 0), "an ordinary message grows no memory: {before}");
    let harms = [
        ("panic", "panic"),
        ("spin", "timeout"),
        ("eat-memory", "memory_limit"),
        ("overflow-stack", "stack_overflow"),
        ("exit", "failed"),
    ];
    let mut expected = Vec::new();
    let harming = async {
        let mut count = 8;
        for _ in 0..rounds(2, 20) {
            for (harm, class) in harms {
                // A panic tells its reason to stderr, which is the handler's to log: nothing of the payload goes there.
                let ids = tell(&database, json!({"do": harm, "reason": "as told"}), 2).await;
                expected.extend(ids.into_iter().map(|id| (id, class.to_owned())));
                tell(&database, json!({"do": "report"}), 2).await;
                count += 2;
                let reports = all_reported(&database, count).await;
                assert!(reports.iter().all(|(_, attempt)| *attempt == 1), "after {harm}: {reports:?}");
            }
        }
    };
    assert_none_missed(oldest_heartbeat_during(&database, harming).await);
    let found: Vec<_> = dead_letters(&database).await.into_iter().map(|(id, class, _)| (id, class)).collect();
    assert_eq!(found, expected);
    wait_for("growths are counted", PATIENCE, async || growths(&stats(&database, &program).await) > Some(0)).await;
    let now = stats(&database, &program).await;
    assert_eq!((&now["leases_lost"], &now["host"]), (&json!(0), &host), "no heartbeat was missed");
    wait_for("memory returns", PATIENCE, async || resident(&program) < resident_before + (64 << 20)).await;
    program.signal(Signal::TERM);
    assert!(program.ended(PATIENCE).await.success(), "{}", program.stderr());
}

#[tokio::test]
async fn while_every_slot_spins_the_heartbeat_and_other_groups_go_on() {
    let database = database().await;
    let worker = "timeout = \"10s\"\nretry = { max_attempts = 1 }\n\n[groups.log]\nstream = \"receipts\"\nhandler = \"hello.wasm\"";
    let mut program = Program::with_examples(&playground(SHORT_LEASE, worker));
    up(&mut program, &database.url().await).await;
    let host = stats(&database, &program).await["host"].clone();
    let spinning = tell(&database, json!({"do": "spin"}), 16).await;
    wait_for("all slots spin", PATIENCE, async || held_by(&database, &program).await.len() == 16).await;
    produce(&database, "receipts", json!({"customer": SECRET}), 200).await;
    let spun = oldest_heartbeat_during(&database, async {
        let delivered = || program.lines(&["delivered", "group=\"log\""]);
        wait_for("the other group goes on", PATIENCE, async || delivered() == 200).await;
        assert_eq!(dead_letters(&database).await.len(), 0, "they still spin");
        settled(&database).await;
    });
    assert_none_missed(spun.await);
    assert_eq!(dead_letters(&database).await.len(), spinning.len());
    let now = stats(&database, &program).await;
    assert_eq!((&now["leases_lost"], &now["host"]), (&json!(0), &host), "no heartbeat was missed");
    program.signal(Signal::TERM);
    assert!(program.ended(PATIENCE).await.success(), "{}", program.stderr());
    assert_tells_no_secret(&program);
}

/// Must show, in `make soak`: while every slot of one group spins, the p99 of another stays under its quiet value + 50 ms.
/// Method: a message every 20 ms, and the database's own clock from its produce to the report that commits with its
/// acknowledgement. In a short run the time is printed and not judged.
#[tokio::test]
async fn while_every_slot_spins_another_group_is_as_fast_as_before() {
    let database = database().await;
    let worker = "timeout = \"10m\"\nretry = { max_attempts = 1 }\n\n[streams.prompt]\n[groups.prompt]\nstream = \"prompt\"\n\
                  handler = \"flaky.wasm\"\nallow = { produce = [\"receipts\"] }";
    let mut program = Program::with_examples(&playground("drain_timeout = \"1s\"", worker));
    up(&mut program, &database.url().await).await;
    let id = async |name: &str| {
        number(&database, &format!("select id::bigint from {{schema}}.stream where name = '{name}'")).await
    };
    let (receipts, prompt) = (id("receipts").await, id("prompt").await);
    let count = rounds(100, 2000);
    let p99_ms = async |sent: i64| {
        for _ in 0..count {
            produce(&database, "prompt", json!({"do": "report"}), 1).await;
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        let all = format!("select count(*) from {{schema}}.message_log_{receipts}");
        wait_for("all report", PATIENCE, async || number(&database, &all).await == sent + count).await;
        let p99 = format!(
            "select (1000 * percentile_cont(0.99) within group (order by extract(epoch from report.created_at - sent.created_at)))::bigint
             from {{schema}}.message_log_{receipts} as report join {{schema}}.message_log_{prompt} as sent
                 on sent.id = (convert_from(report.payload, 'UTF8')::jsonb->>'id')::bigint where report.id > {sent}"
        );
        number(&database, &p99).await
    };
    p99_ms(0).await; // warms everything up
    let quiet = p99_ms(count).await;
    tell(&database, json!({"do": "spin"}), 16).await;
    wait_for("all slots spin", PATIENCE, async || held_by(&database, &program).await.len() == 16).await;
    let beside_spinners = p99_ms(2 * count).await;
    println!("p99 {quiet} ms alone, {beside_spinners} ms beside 16 endless loops");
    assert!(beside_spinners <= quiet + rounds(60_000, 50), "{quiet} ms alone, {beside_spinners} ms beside them");
    assert_eq!(dead_letters(&database).await.len(), 0, "they still spin");
    program.signal(Signal::TERM);
    assert!(program.ended(PATIENCE).await.success(), "{}", program.stderr());
}

#[tokio::test]
async fn a_flood_of_output_is_fine_but_cut() {
    let database = database().await;
    let worker = "timeout = \"2m\"\nlimits = { log_bytes = \"16KiB\" }\nslots = 1";
    let mut program = Program::with_examples(&playground(SHORT_LEASE, worker));
    up(&mut program, &database.url().await).await;
    let resident_before = resident(&program);
    let id = tell(&database, json!({"do": "flood-stdout", "then": "report"}), 1).await[0];
    // The next message of the same group, on the same slot, has its own lines and its own bound of them.
    let log = tell(&database, json!({"do": "log", "count": 3, "then": "report"}), 1).await[0];
    let flooded = async {
        let mut reported = all_reported(&database, 2).await;
        reported.sort_unstable(); // one settle may commit both
        assert_eq!(reported, [(id, 1), (log, 1)]);
    };
    assert_none_missed(oldest_heartbeat_during(&database, flooded).await);
    program.logged("bytes of output dropped: limits.log_bytes is 16384 a delivery").await;
    assert_eq!(program.lines(&["bytes of output dropped", &format!("message_id={log} ")]), 0);
    assert_eq!(program.lines(&["line ", " of 3", &format!("message_id={log} ")]), 3, "{}", program.stderr());
    assert!(program.stderr().len() < 64 << 10, "{}", program.stderr().len());
    assert!(resident(&program) < resident_before + (64 << 20), "what is dropped is not kept");
    wait_for("its counters are told", PATIENCE, async || stats(&database, &program).await["leases_lost"].is_u64())
        .await;
    assert_eq!(stats(&database, &program).await["leases_lost"], 0);
    program.signal(Signal::TERM);
    assert!(program.ended(PATIENCE).await.success(), "{}", program.stderr());
}

#[tokio::test]
async fn three_attempts_are_three_deliveries_across_a_restart_and_one_dead_letter() {
    let database = database().await;
    let worker = "retry = { max_attempts = 3, base = \"1s\", jitter = 0.0 }";
    let mut program = Program::with_examples(&playground(SHORT_LEASE, worker));
    let url = database.url().await;
    up(&mut program, &url).await;
    let id = tell(&database, json!({"do": "panic", "reason": "the mill is dry", "to": SECRET}), 1).await[0];
    let failed_once = "select count(*) from {schema}.exception where failures = 1";
    wait_for("the first failure", PATIENCE, async || number(&database, failed_once).await == 1).await;
    program.signal(Signal::TERM);
    assert!(program.ended(PATIENCE).await.success(), "{}", program.stderr());
    assert_tells_no_secret(&program);
    let delivered =
        |program: &Program, attempt| program.lines(&["delivered", &format!("message_id={id} attempt={attempt} ")]);
    let before: Vec<_> = (1..=4).map(|attempt| delivered(&program, attempt)).collect();
    up(&mut program, &url).await;
    wait_for("the dead letter", PATIENCE, async || dead_letters(&database).await.len() == 1).await;
    settled(&database).await;
    tokio::time::sleep(Duration::from_secs(2)).await; // a fourth delivery would come by now
    let all: Vec<_> = (1..=4).map(|attempt| before[attempt - 1] + delivered(&program, attempt)).collect();
    assert_eq!(all, [1, 1, 1, 0], "{}", program.stderr());
    let (message, class, error) = dead_letters(&database).await.remove(0);
    assert_eq!((message, class.as_str()), (id, "panic"));
    for part in ["wasm backtrace", "flaky::act", "stderr:", "the mill is dry"] {
        assert!(error.contains(part), "`{part}` is not in {error}");
    }
    let digest = digest(&handler_wasm("flaky"));
    let complete = format!("select count(*) from {{schema}}.dead_letter where attempts = 3 and digest = '{digest}'");
    assert_eq!(number(&database, &complete).await, 1);
    // Twice the same redrive, while nobody delivers: it is one, with attempts from 1.
    program.signal(Signal::TERM);
    assert!(program.ended(PATIENCE).await.success(), "{}", program.stderr());
    assert_tells_no_secret(&program);
    let redrive = || {
        let message = id.to_string();
        let redrive = ["dead", "redrive", "--group", "worker", "--message", &message, "--database-url", &url];
        program.run(&redrive)
    };
    let ((first, told, _), (_, told_again, _)) = (redrive(), redrive());
    assert!(first.success() && told == "redriven 1 dead letter\n", "{told}");
    assert_eq!(told_again, "redriven 0 dead letters\n");
    up(&mut program, &url).await;
    let dead_again =
        "select count(*) from {schema}.dead_letter where deaths = 2 and attempts = 3 and redriven_at is null";
    wait_for("it is dead again", PATIENCE, async || number(&database, dead_again).await == 1).await;
    settled(&database).await;
    let again: Vec<_> = (1..=4).map(|attempt| delivered(&program, attempt)).collect();
    assert_eq!(again, [1, 1, 1, 0], "{}", program.stderr());
    program.signal(Signal::TERM);
    assert!(program.ended(PATIENCE).await.success(), "{}", program.stderr());
    assert_tells_no_secret(&program);
}

/// What a handler cannot read is rejected with what is wrong, not with what it is; its settings reach it and no log.
#[tokio::test]
async fn payloads_and_secrets_are_in_no_log_line_and_no_error() {
    let database = database().await;
    let worker =
        "secrets = { TOKEN = { env = \"MILLSTREAM_TEST_TOKEN\" } }\nretry = { max_attempts = 2, base = \"10ms\" }";
    let mut program = Program::with_examples(&playground("", worker));
    program.set("MILLSTREAM_TEST_TOKEN", SECRET);
    up(&mut program, &database.url().await).await;
    tell(&database, json!({"do": SECRET}), 1).await;
    tell(&database, json!({"do": "ok", "times": SECRET}), 1).await;
    tell(&database, json!({"do": "ok", SECRET: 1}), 1).await;
    tell(&database, json!({"do": "produce", "to": SECRET}), 1).await;
    tell(&database, json!({"do": "report"}), 1).await;
    wait_for("the rejects", PATIENCE, async || dead_letters(&database).await.len() == 4).await;
    all_reported(&database, 1).await;
    let told = "select count(*) from {schema}.dead_letter where position('hush' in error) > 0 and class = 'rejected'";
    assert_eq!(number(&database, told).await, 0, "{:?}", dead_letters(&database).await);
    program.signal(Signal::TERM);
    assert!(program.ended(PATIENCE).await.success(), "{}", program.stderr());
    assert_tells_no_secret(&program);
}
