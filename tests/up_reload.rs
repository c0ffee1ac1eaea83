//! Handlers are replaced under load in the real program. Method: versions of `flaky` that differ in one custom section, so
//! in their digest only; every delivery is logged with the digest that served it and reports once. A steady load runs
//! meanwhile.

use std::{
    fs::{self, File},
    io::Write,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    time::Duration,
};

use millstream::{database::Database, sandbox::digest};
use rustix::process::Signal;
use serde_json::json;
use tokio::{task::JoinHandle, time::sleep};
use tokio_util::sync::CancellationToken;

use crate::support::{
    PATIENCE, Program, database,
    handlers::{handler_wasm, rounds},
    hosts::{all_reported, assert_tells_no_secret, playground, tell, up},
};

/// Behaves like `flaky`; all versions have the same size.
fn version(number: u32) -> Vec<u8> {
    let mut bytes = handler_wasm("flaky");
    bytes.extend([0, 8, 3]); // a custom section of eight bytes, whose name has three
    bytes.extend(b"ver");
    bytes.extend(number.to_be_bytes());
    bytes
}

/// Produces until `stop`; answers how many messages.
fn load(database: Database, stop: CancellationToken) -> JoinHandle<usize> {
    tokio::spawn(async move {
        let mut count = 0;
        while !stop.is_cancelled() {
            count += tell(&database, json!({"do": "sleep", "ms": 5, "then": "report"}), 10).await.len();
            sleep(Duration::from_millis(30)).await;
        }
        count
    })
}

/// What a process holds of the machine.
#[derive(Debug)]
struct Footprint {
    files: usize,
    threads: usize,
    resident_kib: u64,
}

impl Footprint {
    fn of(program: &Program) -> Self {
        let process = PathBuf::from(format!("/proc/{}", program.pid()));
        let count = |folder| fs::read_dir(process.join(folder)).unwrap().count();
        let status = fs::read_to_string(process.join("status")).unwrap();
        let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        let resident_kib = resident.trim().trim_end_matches(" kB").parse().unwrap();
        Self { files: count("fd"), threads: count("task"), resident_kib }
    }
}

fn rename(file: &Path, bytes: &[u8]) {
    let temporary = file.with_extension("tmp");
    fs::write(&temporary, bytes).unwrap();
    fs::rename(&temporary, file).unwrap();
}

/// As Kubernetes does: the name is a link to a file elsewhere, and another link takes its place.
fn swap_link(file: &Path, bytes: &[u8]) {
    let elsewhere = file.with_file_name(format!("{}.version", digest(bytes)));
    fs::write(&elsewhere, bytes).unwrap();
    let temporary = file.with_extension("link");
    symlink(&elsewhere, &temporary).unwrap();
    fs::rename(&temporary, file).unwrap();
}

async fn in_chunks(file: PathBuf, bytes: Vec<u8>) {
    let mut out = File::create(file).unwrap();
    for chunk in bytes.chunks(bytes.len().div_ceil(4)) {
        out.write_all(chunk).unwrap();
        sleep(Duration::from_millis(300)).await;
    }
}

#[tokio::test]
async fn a_handler_is_replaced_under_load_and_nothing_is_lost_or_doubled() {
    let database = database().await;
    let mut program = Program::with_examples(&playground("", ""));
    let file = program.handlers().join("flaky.wasm");
    fs::write(&file, version(0)).unwrap();
    up(&mut program, &database.url().await).await;
    let (stop, before) = (CancellationToken::new(), Footprint::of(&program));
    let produced = load(database.another_host().await, stop.clone());
    let mut number = 0;
    for _ in 0..rounds(2, 250) {
        for way in ["in place", "chunks", "link", "rename"] {
            let (old, new) = (digest(&version(number)), digest(&version(number + 1)));
            number += 1;
            let (bytes, position) = (version(number), program.log_end());
            match way {
                "in place" => fs::write(&file, bytes).unwrap(),
                "chunks" => in_chunks(file.clone(), bytes).await,
                "link" => swap_link(&file, &bytes),
                _ => rename(&file, &bytes),
            }
            program.logged_after(position, &format!("new_digest={new}")).await;
            // A delivery by the new one, before it is replaced again.
            program.logged_after(position, &format!("digest=\"{new}\"")).await;
            assert_eq!(
                program.lines_after(position, &["handler replaced", &old, &new]),
                1,
                "{way}: {}",
                program.stderr()
            );
        }
    }
    stop.cancel();
    let produced = produced.await.unwrap();
    let reports = all_reported(&database, produced).await;
    assert_eq!(reports.len(), produced);
    assert!(reports.iter().all(|(_, attempt)| *attempt == 1), "no delivery failed");
    assert_eq!(program.lines(&["delivered", "group=\"worker\""]), produced, "delivered once each");
    assert_eq!(program.lines(&["handler replaced"]), number as usize, "one line a change");
    let log = program.stderr();
    let complaints: Vec<&str> = log.lines().filter(|line| line.contains("ERROR") || line.contains("WARN")).collect();
    assert!(complaints.is_empty(), "{complaints:#?}");
    let after = Footprint::of(&program);
    println!("{number} reloads, {produced} deliveries: {before:?} before, {after:?} after");
    assert!(after.files <= before.files + 16 && after.threads <= before.threads + 8, "{before:?} {after:?}");
    assert!(after.resident_kib <= before.resident_kib + (128 << 10), "{before:?} {after:?}");
    program.signal(Signal::TERM);
    assert!(program.ended(PATIENCE).await.success(), "{}", program.stderr());
    assert_tells_no_secret(&program);
}

#[tokio::test]
async fn a_bad_file_is_refused_in_one_line_and_the_old_one_keeps_serving() {
    let database = database().await;
    let mut program = Program::with_examples(&playground("", ""));
    let file = program.handlers().join("flaky.wasm");
    up(&mut program, &database.url().await).await;
    let good = handler_wasm("flaky");
    let bad: [(&str, Vec<u8>); 4] = [
        ("text", b"this is no handler, it is a letter".to_vec()),
        ("truncated", good[..good.len() / 2].to_vec()),
        ("core module", wat::parse_str("(module (func (export \"handle\")))").unwrap()),
        ("another world", wat::parse_str("(component)").unwrap()),
    ];
    let served = format!("digest=\"{}\"", digest(&good));
    for (count, (what, bytes)) in bad.iter().enumerate() {
        rename(&file, bytes);
        let refused = || program.lines(&["ERROR", "flaky.wasm", "the version before it keeps serving"]);
        crate::support::wait_for(what, PATIENCE, async || refused() > count).await;
        tell(&database, json!({"do": "report"}), 5).await;
        all_reported(&database, 5 * (count + 1)).await;
        assert_eq!((refused(), program.lines(&["delivered", &served])), (count + 1, 5 * (count + 1)), "{what}");
    }
    // Said once by each that looks, with what serves instead.
    let url = database.url().await;
    let (status, doctor, _) = program.run_with_input(&["doctor", "--database-url", &url], b"");
    let older = format!("does not serve, an older one ({}) does", &digest(&good)[..12]);
    assert_eq!(
        (status.code(), doctor.matches("BROKEN  ").count(), doctor.matches(&older).count()),
        (Some(1), 1, 1),
        "{doctor}"
    );
    let (_, stands, _) = program.run_with_input(&["status", "--database-url", &url], b"");
    assert!(
        stands.contains("\ngroup worker, host ") && stands.contains(": the newest handler does not serve: "),
        "{stands}"
    );
    fs::remove_file(&file).unwrap();
    program.logged("its last version keeps serving").await;
    tell(&database, json!({"do": "report"}), 5).await;
    all_reported(&database, 25).await;
    rename(&file, &version(1));
    program.logged(&format!("new_digest={}", digest(&version(1)))).await;
    assert_eq!(program.lines(&["WARN"]) + program.lines(&["ERROR"]), 5, "{}", program.stderr());
    program.signal(Signal::TERM);
    assert!(program.ended(PATIENCE).await.success(), "{}", program.stderr());
}
