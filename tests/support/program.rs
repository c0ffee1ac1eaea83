//! Runs the real `millstream` program in a project folder of its own.

use std::{
    fs::{self, File},
    io::{Read, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    time::Duration,
};

use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use tempfile::TempDir;

use super::{handlers::handlers_folder, scratch_folder, wait_for};

/// A project folder and the program that runs in it. Killed, if it still runs, when this is dropped.
pub struct Program {
    folder: TempDir,
    child: Option<Child>,
    environment: Vec<(&'static str, String)>,
}

/// A place in the log of a program: it writes whole lines, so a line begins there.
#[derive(Clone, Copy)]
pub struct LogPosition(u64);

/// A ceiling against hangs, no measure of speed: the machine may be busy with other tests.
pub const PATIENCE: Duration = Duration::from_secs(90);

/// How much of its log a failed test shows.
const LOG_TAIL_BYTES: usize = 4000;

impl Program {
    /// A project with this streams.toml.
    pub fn new(streams_toml: &str) -> Self {
        let folder = scratch_folder();
        fs::write(folder.path().join("streams.toml"), streams_toml).expect("write streams.toml");
        Self { folder, child: None, environment: Vec::new() }
    }

    /// A project whose handlers are the repository's examples.
    pub fn with_examples(streams_toml: &str) -> Self {
        let program = Self::new(streams_toml);
        fs::create_dir(program.handlers()).expect("make the handlers folder");
        for name in ["hello", "order-email", "flaky", "relay-email", "ledger", "mirror", "noop"] {
            let name = format!("{name}.wasm");
            fs::copy(handlers_folder().join(&name), program.handlers().join(&name)).expect("copy a handler");
        }
        program
    }

    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    pub fn handlers(&self) -> PathBuf {
        self.folder().join("handlers")
    }

    /// Sets a variable of the environment it will be started with.
    pub fn set(&mut self, name: &'static str, value: &str) {
        self.environment.push((name, value.to_owned()));
    }

    /// The process it was started as.
    pub fn pid(&self) -> i32 {
        self.child.as_ref().expect("it was started").id().cast_signed()
    }

    /// Waits until the started program has logged something.
    pub async fn logged(&self, part: &str) {
        self.logged_after(LogPosition(0), part).await;
    }

    /// The same, looking only at what it has logged after `position`: in a long run the whole log takes long to read.
    pub async fn logged_after(&self, position: LogPosition, part: &str) {
        let found = async || self.stderr_after(position).contains(part);
        wait_for(&format!("log line `{part}`"), PATIENCE, found).await;
    }

    /// How many lines it has logged that contain all the parts.
    pub fn lines(&self, parts: &[&str]) -> usize {
        self.lines_after(LogPosition(0), parts)
    }

    /// The same, of what it has logged after `position`.
    pub fn lines_after(&self, position: LogPosition, parts: &[&str]) -> usize {
        let has_all = |line: &&str| parts.iter().all(|part| line.contains(part));
        self.stderr_after(position).lines().filter(has_all).count()
    }

    /// Where its log ends just now.
    pub fn log_end(&self) -> LogPosition {
        LogPosition(fs::metadata(self.output("stderr")).map_or(0, |file| file.len()))
    }

    /// Starts it in the background with the environment of nobody in particular.
    pub fn start(&mut self, arguments: &[&str]) {
        assert!(self.child.is_none(), "it runs already");
        let file = |name| File::create(self.folder().join(name)).expect("create an output file");
        let mut command = self.command(arguments);
        self.child = Some(command.stdout(file("stdout")).stderr(file("stderr")).spawn().expect("start millstream"));
    }

    /// Runs it to its end: status, standard output, standard error.
    pub fn run(&self, arguments: &[&str]) -> (ExitStatus, String, String) {
        self.run_with_input(arguments, b"")
    }

    /// The same with this standard input.
    pub fn run_with_input(&self, arguments: &[&str], input: &[u8]) -> (ExitStatus, String, String) {
        let mut command = self.command(arguments);
        let piped = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = piped.spawn().expect("start millstream");
        let mut stdin = child.stdin.take().expect("it is piped");
        let input = input.to_owned();
        // A program that has read enough closes its end, and that is no failure.
        let writing = std::thread::spawn(move || drop(stdin.write_all(&input)));
        let output = child.wait_with_output().expect("wait for millstream");
        writing.join().expect("write standard input");
        let text = |bytes| String::from_utf8(bytes).expect("UTF-8 output");
        (output.status, text(output.stdout), text(output.stderr))
    }

    /// What the started program has printed so far.
    pub fn stdout(&self) -> String {
        fs::read_to_string(self.output("stdout")).unwrap_or_default()
    }

    /// What the started program has logged so far.
    pub fn stderr(&self) -> String {
        self.stderr_after(LogPosition(0))
    }

    fn stderr_after(&self, position: LogPosition) -> String {
        let mut bytes = Vec::new();
        if let Ok(mut log) = File::open(self.output("stderr")) {
            log.seek(SeekFrom::Start(position.0)).expect("seek in its log");
            log.read_to_end(&mut bytes).expect("read its log");
        }
        String::from_utf8_lossy(&bytes).into_owned()
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_raw(self.pid()).expect("a process id"), signal).expect("signal millstream");
    }

    /// Waits until it has ended. Panics after `limit`.
    pub async fn ended(&mut self, limit: Duration) -> ExitStatus {
        let mut child = self.child.take().expect("it was started");
        let mut status = None;
        wait_for("millstream ends", limit, || {
            status = child.try_wait().expect("ask for its status");
            std::future::ready(status.is_some())
        })
        .await;
        status.expect("it has ended")
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_millstream"));
        command.args(arguments).current_dir(self.folder()).stdin(Stdio::null());
        for (name, _) in std::env::vars_os() {
            if name == "DATABASE_URL" || name.as_encoded_bytes().starts_with(b"PG") {
                command.env_remove(name);
            }
        }
        command.envs(self.environment.iter().map(|(name, value)| (name, value)));
        command
    }

    fn output(&self, name: &str) -> PathBuf {
        self.folder().join(name)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let log = self.stderr();
            let start = log.ceil_char_boundary(log.len().saturating_sub(LOG_TAIL_BYTES));
            eprintln!("the end of the log of millstream:\n{}", &log[start..]);
        }
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Whether a process with this number is there.
pub fn is_alive(pid: i32) -> bool {
    test_kill_process(Pid::from_raw(pid).expect("a process id")).is_ok()
}
