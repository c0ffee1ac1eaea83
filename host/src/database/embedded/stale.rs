//! What a killed run left behind: a lock file of Postgres, perhaps with a server that still runs.

use std::{
    fs, io,
    path::Path,
    process::Command,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use rustix::process::{Pid, Signal, kill_process, test_kill_process};

/// How long a server left behind may take to stop. Its watcher gives it 30 s before an immediate shutdown.
const LEFTOVER_STOP_MAX: Duration = Duration::from_secs(45);

/// Makes the data folder startable. The caller holds the project's lock, so a server that still runs there has lost its
/// host, and usually is being stopped by its watcher already.
pub fn clear(data: &Path) -> Result<()> {
    let lock_file = data.join("postmaster.pid");
    let Some((pid, rest)) = read(&lock_file)? else { return Ok(()) };
    if test_kill_process(pid).is_err_and(|error| error == rustix::io::Errno::SRCH) {
        return Ok(()); // Postgres recovers this by itself.
    }
    if runs_on(pid, data) {
        return stop_leftover(pid, data);
    }
    // The number belongs to another program by now (common in containers), and Postgres would refuse to start. The file
    // is not removed: its last lines are how Postgres finds out whether parts of the old server are still alive. A
    // number that no process can have makes it look at just those.
    fs::write(&lock_file, format!("{}\n{rest}", i32::MAX)).with_context(|| format!("correct {}", lock_file.display()))
}

/// The process in the first line, and the lines after it. An unreadable first line is left to Postgres to report.
fn read(lock_file: &Path) -> Result<Option<(Pid, String)>> {
    let text = match fs::read_to_string(lock_file) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error).with_context(|| format!("read {}", lock_file.display())),
    };
    let Some((first, rest)) = text.split_once('\n') else { return Ok(None) };
    Ok(first.trim().parse().ok().and_then(Pid::from_raw).map(|pid| (pid, rest.to_owned())))
}

/// Whether the process is a Postgres that was started on this data folder.
fn runs_on(pid: Pid, data: &Path) -> bool {
    command_line(pid).contains(&format!("-D {} ", data.display()))
}

/// The arguments of a process, joined by spaces; empty when it cannot be known.
fn command_line(pid: Pid) -> String {
    if let Ok(bytes) = fs::read(format!("/proc/{}/cmdline", pid.as_raw_nonzero())) {
        return String::from_utf8_lossy(&bytes).replace('\0', " ");
    }
    let output = Command::new("ps").args(["-ww", "-o", "args=", "-p", &pid.as_raw_nonzero().to_string()]).output();
    output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default()
}

fn stop_leftover(pid: Pid, data: &Path) -> Result<()> {
    tracing::info!(pid = pid.as_raw_nonzero(), "stopping the Postgres of an earlier run");
    let deadline = Instant::now() + LEFTOVER_STOP_MAX;
    while runs_on(pid, data) {
        ensure!(
            Instant::now() < deadline,
            "the Postgres of an earlier run (process {pid}) still uses {} and does not stop; try `kill -INT {pid}`",
            data.display(),
            pid = pid.as_raw_nonzero()
        );
        // It may end between the look and the signal, so the answer says nothing.
        let _ = kill_process(pid, Signal::INT);
        thread::sleep(Duration::from_millis(100));
    }
    Ok(())
}
