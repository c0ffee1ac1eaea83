//! What a host with many groups keeps in memory. Method: the real program; what the kernel counts as resident, while all its
//! slots are at work and after them.

use rustix::process::Signal;
use serde_json::json;

use crate::support::{
    PATIENCE, Program, database,
    handlers::rounds,
    hosts::{held_by, resident, settled, tell, up},
    wait_for,
};

const GROUPS: usize = 100;

/// The bar of the design: 500 MiB for 100 groups of 16 slots, each handler with a limit of 64 MiB. `make soak` judges it.
#[tokio::test]
async fn a_hundred_groups_fit_into_500_mib() {
    let database = database().await;
    let mut streams_toml = "[host]\nlisten = \"127.0.0.1:0\"\n[streams.playground]\n[streams.receipts]\n".to_owned();
    for number in 1..=GROUPS {
        streams_toml += &format!(
            "[groups.group-{number}]\nstream = \"playground\"\nhandler = \"flaky.wasm\"\nslots = 16\nmemory = \"64MiB\"\n"
        );
    }
    let mut program = Program::with_examples(&streams_toml);
    up(&mut program, &database.url().await).await;
    let idle = resident(&program);
    // Each message goes to every group. Long enough for all to be at work at once.
    let slots = GROUPS * 16;
    tell(&database, json!({"do": "sleep", "ms": rounds(4000, 10_000)}), 16).await;
    wait_for("every slot is at work", PATIENCE, async || held_by(&database, &program).await.len() == slots).await;
    let busy = resident(&program);
    settled(&database).await;
    let after = resident(&program);
    let mib = |bytes: u64| bytes >> 20;
    println!("resident: {} MiB idle, {} MiB at work, {} MiB after it", mib(idle), mib(busy), mib(after));
    for bytes in [idle, busy, after] {
        assert!(mib(bytes) < rounds(2000, 500), "{} MiB are resident", mib(bytes));
    }
    program.signal(Signal::TERM);
    assert!(program.ended(PATIENCE).await.success(), "{}", program.stderr());
}
