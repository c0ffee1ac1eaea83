//! A handler file is replaced while its group runs, however it is written, and a bad one never takes over. Method: hand-made
//! components that answer differently, written into a real folder in every way that tools write files; waits are for a
//! state, and every log line is compared.

use std::{
    fs::{self, File},
    io::Write,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use millstream::{
    deploy::{Deployer, Deployment, Newest, Status},
    handler::{Handler, Outcome},
    sandbox::digest,
};
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use crate::support::{
    handlers::{component, deliver, group_settings, rounds, sandbox},
    log_lines::{Line, LogLines},
};

/// A folder of handlers with group `g` on `x.wasm`, and everything that is logged.
struct Folder {
    folder: tempfile::TempDir,
    deployer: Deployer,
    shutdown: CancellationToken,
    logs: LogLines,
}

impl Folder {
    async fn start(prepare: impl FnOnce(&Path)) -> Self {
        let sandbox = sandbox().await;
        let folder = tempfile::tempdir().unwrap();
        prepare(folder.path());
        let (logs, shutdown) = (LogLines::of_this_thread(), CancellationToken::new());
        let groups = [("g".to_owned(), deployment("x.wasm"))].into();
        let deployer = Deployer::start(sandbox, folder.path().into(), groups, shutdown.clone()).await;
        Self { folder, deployer, shutdown, logs }
    }

    /// With the first version in place.
    async fn with_first() -> Self {
        let folder = Self::start(|path| fs::write(path.join("x.wasm"), version(1)).unwrap()).await;
        assert_eq!(folder.status().digest.as_deref(), Some(&*digest(&version(1))));
        folder
    }

    fn file(&self) -> PathBuf {
        self.folder.path().join("x.wasm")
    }

    fn status(&self) -> Status {
        self.deployer.status().remove("g").unwrap()
    }

    fn newest(&self) -> Newest {
        self.deployer.handler("g").unwrap()
    }

    async fn wait_for(&self, what: &str, reached: impl Fn(&Status) -> bool) {
        let give_up = Instant::now() + Duration::from_secs(30);
        while !reached(&self.status()) {
            assert!(Instant::now() < give_up, "{what}: {:?}\n{:#?}", self.status(), self.logs.all());
            sleep(Duration::from_millis(10)).await;
        }
    }

    async fn wait_for_version(&self, number: u32) {
        let expected = digest(&version(number));
        self.wait_for("a new version serves", |status| status.digest.as_deref() == Some(&*expected)).await;
        let handler = self.newest().borrow().clone().unwrap();
        assert_eq!(deliver(&*handler, "").await.outcome, answer(number));
    }

    /// The version before keeps serving while a bad file lies in the folder.
    async fn wait_for_refusal(&self, expected: &str) {
        self.wait_for(expected, |status| status.last_error.as_deref() == Some(expected)).await;
        let handler = self.newest().borrow().clone().unwrap();
        assert_eq!(deliver(&*handler, "").await.outcome, answer(1));
    }

    /// Time for two slow looks, and so for everything that could still happen.
    async fn let_things_happen(&self) {
        sleep(Duration::from_millis(4_500)).await;
    }

    /// Lines about deploying, as text.
    fn lines(&self) -> Vec<String> {
        let ours = self.logs.all().into_iter().filter(|line| line.target.starts_with("millstream::deploy"));
        ours.map(|Line { level, message, fields, .. }| format!("{level} {message} {fields}").trim().to_owned())
            .collect()
    }

    async fn stop(self) -> Vec<String> {
        let lines = self.lines();
        self.shutdown.cancel();
        self.deployer.join().await;
        lines
    }
}

fn deployment(file: &str) -> Deployment {
    Deployment { file: file.into(), settings: Arc::new(group_settings(|_| {})) }
}

/// Versions differ in their bytes and not in their size; odd ones answer `done`, even ones `reject`.
fn version(number: u32) -> Vec<u8> {
    let address = if number % 2 == 1 { 512 } else { 528 };
    component(&format!("(drop (i32.const {})) (i32.const {address})", 100_000 + number))
}

fn answer(number: u32) -> Outcome {
    if number % 2 == 1 { Outcome::Done } else { Outcome::Reject { reason: String::new() } }
}

fn deployed(number: u32) -> String {
    format!("INFO handler deployed group=g file=\"x.wasm\" new_digest={}", digest(&version(number)))
}

fn replaced(old: u32, new: u32) -> String {
    let (old, new) = (digest(&version(old)), digest(&version(new)));
    format!("INFO handler replaced group=g file=\"x.wasm\" old_digest={old} new_digest={new}")
}

fn rename_over(path: &Path, bytes: &[u8]) {
    let temporary = path.with_extension("tmp");
    fs::write(&temporary, bytes).unwrap();
    fs::rename(&temporary, path).unwrap();
}

/// Ways to replace a file; each gives one line with the old and the new digest, and no other line.
#[tokio::test]
async fn a_replaced_file_takes_over_once_however_it_is_written() {
    let folder = Folder::with_first().await;
    let file = folder.file();
    rename_over(&file, &version(2));
    folder.wait_for_version(2).await;
    fs::write(&file, version(3)).unwrap();
    folder.wait_for_version(3).await;
    // As vim saves: the old file becomes a backup, a new one is written in its place.
    fs::rename(&file, file.with_extension("wasm~")).unwrap();
    fs::write(file.with_file_name("4913"), b"").unwrap();
    fs::write(&file, version(4)).unwrap();
    fs::remove_file(file.with_extension("wasm~")).unwrap();
    folder.wait_for_version(4).await;
    fs::remove_file(&file).unwrap();
    fs::write(&file, version(5)).unwrap();
    folder.wait_for_version(5).await;
    assert_eq!(folder.status().reloads, 4);
    let lines = folder.stop().await;
    assert_eq!(lines, [deployed(1), replaced(1, 2), replaced(2, 3), replaced(3, 4), replaced(4, 5)]);
}

#[tokio::test]
async fn a_file_in_slow_chunks_takes_over_when_it_is_whole() {
    let folder = Folder::with_first().await;
    let bytes = version(2);
    let mut file = File::create(folder.file()).unwrap();
    for chunk in bytes.chunks(bytes.len().div_ceil(5)) {
        file.write_all(chunk).unwrap();
        sleep(Duration::from_millis(300)).await;
    }
    drop(file);
    folder.wait_for_version(2).await;
    assert_eq!(folder.stop().await, [deployed(1), replaced(1, 2)]);
}

/// A Kubernetes ConfigMap: the file is a symlink into `..data`, which is a symlink that is swapped.
#[tokio::test]
async fn a_swapped_symlink_is_seen() {
    let put = |path: &Path, number: u32| {
        let data = path.join(format!("..v{number}"));
        fs::create_dir(&data).unwrap();
        fs::write(data.join("x.wasm"), version(number)).unwrap();
        symlink(format!("..v{number}"), path.join("..data_tmp")).unwrap();
        fs::rename(path.join("..data_tmp"), path.join("..data")).unwrap();
    };
    let folder = Folder::start(|path| {
        put(path, 1);
        symlink("..data/x.wasm", path.join("x.wasm")).unwrap();
    })
    .await;
    for number in 2..=4 {
        put(folder.folder.path(), number);
        fs::remove_dir_all(folder.folder.path().join(format!("..v{}", number - 1))).unwrap();
        folder.wait_for_version(number).await;
    }
    assert_eq!(folder.stop().await, [deployed(1), replaced(1, 2), replaced(2, 3), replaced(3, 4)]);
}

#[tokio::test]
async fn a_replacement_of_the_same_size_and_time_is_seen() {
    let folder = Folder::with_first().await;
    assert_eq!(version(1).len(), version(2).len());
    let before = fs::metadata(folder.file()).unwrap();
    fs::write(folder.file(), version(2)).unwrap();
    let file = File::options().write(true).open(folder.file()).unwrap();
    file.set_modified(before.modified().unwrap()).unwrap();
    assert_eq!(fs::metadata(folder.file()).unwrap().modified().unwrap(), before.modified().unwrap());
    folder.wait_for_version(2).await;
    assert_eq!(folder.stop().await, [deployed(1), replaced(1, 2)]);
}

#[tokio::test]
async fn reading_touching_and_the_same_content_reload_nothing() {
    let folder = Folder::with_first().await;
    let first = folder.newest();
    for _ in 0..20 {
        fs::read(folder.file()).unwrap();
        File::options().write(true).open(folder.file()).unwrap().set_modified(std::time::SystemTime::now()).unwrap();
        rename_over(&folder.file(), &version(1));
        fs::write(folder.folder.path().join("other.wasm"), version(2)).unwrap();
        sleep(Duration::from_millis(20)).await;
    }
    fs::remove_file(folder.folder.path().join("other.wasm")).unwrap(); // else it is told that nobody uses it
    folder.let_things_happen().await;
    assert!(!first.has_changed().unwrap());
    assert_eq!(folder.status().reloads, 0);
    assert_eq!(folder.stop().await, [deployed(1)]);
}

/// A file that nobody asks for is mostly one under a wrong name. Those that lay there at the start are left in peace.
#[tokio::test]
async fn a_file_that_no_group_uses_is_told_once_when_it_comes() {
    let folder = Folder::start(|path| {
        fs::write(path.join("x.wasm"), version(1)).unwrap();
        fs::write(path.join("spare.wasm"), version(1)).unwrap();
    })
    .await;
    fs::write(folder.folder.path().join("x_.wasm"), version(2)).unwrap();
    let told = format!(
        "INFO x_.wasm came into {}, and no group uses it; did you mean x.wasm?",
        folder.folder.path().display()
    );
    let is_told = || folder.logs.all().iter().any(|line| told.ends_with(&line.message));
    folder.wait_for("it is told", |_| is_told()).await;
    folder.let_things_happen().await;
    assert_eq!(folder.stop().await, [deployed(1), told.clone()]);
}

#[tokio::test]
async fn bad_files_are_refused_in_one_line_and_the_old_one_serves_on() {
    let folder = Folder::with_first().await;
    let truncated = version(2)[..300].to_vec();
    let cases: [(Vec<u8>, &str); 4] = [
        (
            b"(module)\n".to_vec(),
            "x.wasm is WebAssembly text, not a binary: turn it into one with `wasm-tools parse in.wat -o out.wasm`",
        ),
        (truncated, "x.wasm is a wasm file cut off in the middle (300 bytes): copy it again"),
        (
            wat::parse_str("(module)").unwrap(),
            "x.wasm is a core wasm module without WIT metadata, so it does not say how to call it: did you forget \
             #[millstream_guest::handler]? Otherwise build it with `cargo build --release --target wasm32-unknown-unknown` \
             from a crate with `crate-type = [\"cdylib\"]` and `#[millstream_guest::handler]`",
        ),
        (
            wat::parse_str("(component)").unwrap(),
            "x.wasm is a component that exports nothing; a handler exports `handle` (millstream:handler@0.1.0): did you \
             forget #[millstream_guest::handler]?",
        ),
    ];
    let mut expected = vec![deployed(1)];
    for (bytes, text) in &cases {
        rename_over(&folder.file(), bytes);
        folder.wait_for_refusal(text).await;
        expected.push(format!("ERROR {text}; the version before it keeps serving"));
    }
    folder.let_things_happen().await;
    rename_over(&folder.file(), &version(1));
    folder.wait_for("the error is gone", |status| status.last_error.is_none()).await;
    expected.push("INFO x.wasm is again the version that serves".to_owned());
    rename_over(&folder.file(), &version(2));
    folder.wait_for_version(2).await;
    expected.push(replaced(1, 2));
    assert_eq!(folder.stop().await, expected);
}

/// Goal: a named pipe, which nobody may ever write to, holds up neither the other files nor the end of the host.
#[tokio::test]
async fn a_named_pipe_is_refused_and_waited_for_by_nobody() {
    let folder = Folder::with_first().await;
    let pipe = folder.folder.path().join("pipe");
    let made = std::process::Command::new("mkfifo").arg(&pipe).status().unwrap();
    assert!(made.success());
    fs::rename(&pipe, folder.file()).unwrap();
    folder.wait_for_refusal("x.wasm cannot be read (it is not a file)").await;
    assert_eq!(folder.status().digest.as_deref(), Some(&*digest(&version(1))), "the version before serves on");
    fs::remove_file(folder.file()).unwrap();
    fs::write(folder.file(), version(2)).unwrap();
    folder.wait_for_version(2).await;
    folder.stop().await;
}

#[tokio::test]
async fn a_deleted_file_serves_on_and_is_said_once() {
    let folder = Folder::with_first().await;
    let path = folder.folder.path().display().to_string();
    fs::remove_file(folder.file()).unwrap();
    folder.wait_for_refusal(&format!("x.wasm is not in {path}")).await;
    folder.let_things_happen().await;
    fs::write(folder.file(), version(1)).unwrap();
    folder.wait_for("it is back", |status| status.last_error.is_none()).await;
    assert_eq!(folder.status().reloads, 0);
    let warning = format!("WARN x.wasm was deleted from {path}; its last version keeps serving until the host stops");
    let back = "INFO x.wasm is again the version that serves".to_owned();
    assert_eq!(folder.stop().await, [deployed(1), warning, back]);
}

/// Without any event: the folder does not exist at the start, so that nothing can be watched.
#[tokio::test]
async fn a_folder_that_cannot_be_watched_is_looked_at() {
    let folder = Folder::start(|path| fs::remove_dir(path).unwrap()).await;
    assert_eq!(folder.status().digest, None);
    assert!(folder.newest().borrow().is_none());
    let lines = folder.lines();
    assert_eq!(lines.len(), 2, "{lines:#?}");
    assert!(lines[0].starts_with("WARN failed to watch the handlers folder"), "{lines:#?}");
    assert!(lines[1].ends_with("; its groups wait until it is put there"), "{lines:#?}");
    fs::create_dir(folder.folder.path()).unwrap();
    fs::write(folder.file(), version(1)).unwrap();
    folder.wait_for_version(1).await;
    // From here on the new folder is watched.
    rename_over(&folder.file(), &version(2));
    folder.wait_for_version(2).await;
    // Another folder takes its place.
    fs::rename(folder.folder.path(), folder.folder.path().with_extension("old")).unwrap();
    fs::create_dir(folder.folder.path()).unwrap();
    fs::write(folder.file(), version(3)).unwrap();
    folder.wait_for_version(3).await;
    fs::remove_dir_all(folder.folder.path().with_extension("old")).unwrap();
    folder.stop().await;
}

#[tokio::test]
async fn groups_come_go_and_change_while_it_runs() {
    let folder = Folder::with_first().await;
    fs::write(folder.folder.path().join("y.wasm"), version(2)).unwrap();
    let first = folder.newest();
    folder.deployer.update_groups(
        [("g".into(), deployment("x.wasm")), ("h".into(), deployment("x.wasm")), ("i".into(), deployment("y.wasm"))]
            .into(),
    );
    // What is loaded serves a new group at once; new settings are a new handler.
    assert!(folder.deployer.handler("h").unwrap().borrow().is_some());
    assert!(first.has_changed().unwrap());
    let expected = digest(&version(2));
    let serves_i = || folder.deployer.status()["i"].digest.as_deref() == Some(&*expected);
    while !serves_i() {
        sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(folder.status().reloads, 0);

    // One file, two groups: both are replaced. A group that goes closes its receivers.
    folder.deployer.update_groups([("g".into(), deployment("x.wasm")), ("h".into(), deployment("x.wasm"))].into());
    rename_over(&folder.file(), &version(4));
    folder.wait_for_version(4).await;
    assert_eq!(folder.deployer.status()["h"].digest, folder.status().digest);
    let mut receiver = folder.deployer.handler("h").unwrap();
    folder.deployer.update_groups([("g".into(), deployment("y.wasm"))].into());
    assert!(folder.deployer.handler("h").is_none());
    receiver.borrow_and_update();
    assert!(receiver.changed().await.is_err());
    folder.wait_for_version(2).await;
    // And back again, although the first file was let go in between.
    folder.deployer.update_groups([("g".into(), deployment("x.wasm"))].into());
    folder.wait_for_version(4).await;
    folder.stop().await;
}

/// Deliveries without pause while the file is replaced: each is answered by one whole version, and old versions are let go.
#[tokio::test]
async fn nothing_is_lost_while_it_is_replaced() {
    let folder = Folder::with_first().await;
    let newest = folder.newest();
    let stop = CancellationToken::new();
    let delivering = tokio::spawn(stop.clone().run_until_cancelled_owned(async move {
        loop {
            let handler = newest.borrow().clone().unwrap();
            let outcome = deliver(&*handler, "").await.outcome;
            assert!(outcome == answer(1) || outcome == answer(2), "{outcome:?}");
            sleep(Duration::from_millis(1)).await;
        }
    }));
    let first = Arc::downgrade(folder.newest().borrow().as_ref().unwrap());
    for number in 2..=rounds(6, 1_000) {
        rename_over(&folder.file(), &version(number));
        folder.wait_for_version(number).await;
    }
    assert!(first.upgrade().is_none());
    assert!(!delivering.is_finished(), "{:?}", delivering.await);
    stop.cancel();
    delivering.await.unwrap();
    assert_eq!(folder.stop().await.len(), rounds(6, 1_000));
}

/// Many replacements in a short time end with the last one.
#[tokio::test]
async fn a_burst_of_replacements_ends_with_the_last() {
    let folder = Folder::with_first().await;
    for number in 2..=50 {
        rename_over(&folder.file(), &version(number));
        sleep(Duration::from_millis(5)).await;
    }
    folder.wait_for_version(50).await;
    assert!(folder.status().reloads < 40, "{} of 49", folder.status().reloads);
    folder.stop().await;
}

/// The seam is usable as the consumer uses it: held, replaced and called from other tasks.
#[test]
fn the_newest_handler_can_be_shared() {
    fn shared<T: Send + Sync + Clone + 'static>() {}
    shared::<Newest>();
    shared::<Arc<dyn Handler>>();
}
