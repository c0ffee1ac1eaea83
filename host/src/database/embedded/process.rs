//! The running server process and the pipe that keeps it alive. Knows nothing of SQL.

use std::{
    fs::{File, OpenOptions},
    os::unix::{fs::OpenOptionsExt, process::CommandExt},
    path::Path,
    process::{Child, ChildStdin, ExitStatus, Stdio},
    thread::{self, JoinHandle},
    time::Duration,
};

use anyhow::{Context, Result, bail};
use tokio::sync::watch;

use super::{binaries::Binaries, owner::Owner, places::Places};

/// The watcher sends an immediate shutdown after 30 s, so a stop that takes longer than this hangs in the kernel.
const STOP_MAX: Duration = Duration::from_secs(40);

/// One run of the server. Dropping it closes the pipe, which stops the server in the background.
pub struct Process {
    /// The server runs until this is closed.
    pipe: Option<ChildStdin>,
    ended: watch::Receiver<Option<ExitStatus>>,
    /// Waits for the process; a thread, so that it serves whichever runtime asks.
    waiter: Option<JoinHandle<()>>,
}

impl Process {
    /// Starts the server under its watcher. Answers before the server is ready.
    pub fn launch(binaries: &Binaries, places: &Places, owner: &Owner, settings: &[String]) -> Result<Self> {
        let mut command = owner.command("/bin/sh");
        command.args(["-c", &watcher(), "millstream-postgres"]);
        command.arg(binaries.program("postgres")).arg("-D").arg(&places.data);
        command.args(settings.iter().flat_map(|setting| ["-c", setting]));
        let log = create_log(&places.log)?;
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(log.try_clone().context("share the log file")?)
            .stderr(log)
            .process_group(0)
            .spawn()
            .context("start Postgres")?;
        let pipe = child.stdin.take();
        let (sender, ended) = watch::channel(None);
        let waiter = thread::Builder::new()
            .name("postgres-waiter".to_owned())
            .spawn(move || wait(child, &sender))
            .context("start a thread that waits for Postgres")?;
        Ok(Self { pipe, ended, waiter: Some(waiter) })
    }

    /// Returns when the server has ended, whoever ended it. Dropping this loses nothing.
    pub async fn ended(&self) -> String {
        let mut ended = self.ended.clone();
        match ended.wait_for(Option::is_some).await.map(|status| *status) {
            Ok(Some(status)) => format!("Postgres ended: {status}"),
            _ => "Postgres ended, its status is not known".to_owned(),
        }
    }

    /// Whether the server has ended.
    pub fn has_ended(&self) -> bool {
        self.ended.borrow().is_some()
    }

    /// Shuts the server down and returns when it is gone.
    pub async fn stop(mut self) -> Result<()> {
        drop(self.pipe.take());
        if tokio::time::timeout(STOP_MAX, self.ended()).await.is_err() {
            bail!("Postgres does not stop within {} s", STOP_MAX.as_secs());
        }
        if let Some(waiter) = self.waiter.take() {
            // It has sent its last word, so this does not wait.
            let _ = waiter.join();
        }
        Ok(())
    }
}

impl std::fmt::Debug for Process {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Process").field("has_ended", &self.has_ended()).finish_non_exhaustive()
    }
}

/// The watcher without its comments, which would fill the output of `ps`.
fn watcher() -> String {
    let lines = include_str!("watcher.sh").lines().map(str::trim);
    lines.filter(|line| !line.starts_with('#')).collect::<Vec<_>>().join("\n")
}

fn wait(mut child: Child, ended: &watch::Sender<Option<ExitStatus>>) {
    // Waiting fails only for a process that is not ours; the dropped sender then tells.
    if let Ok(status) = child.wait() {
        ended.send_replace(Some(status));
    }
}

/// Truncated at every start, which together with `log_min_messages` bounds it.
fn create_log(path: &Path) -> Result<File> {
    let log = OpenOptions::new().create(true).append(true).mode(0o600).open(path);
    let log = log.with_context(|| format!("create the log file {}", path.display()))?;
    log.set_len(0).with_context(|| format!("truncate the log file {}", path.display()))?;
    Ok(log)
}
