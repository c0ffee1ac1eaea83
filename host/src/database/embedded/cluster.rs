//! Makes the data folder, once and whole, and refuses one that these server programs cannot run.

use std::{
    fs::{self, File},
    io,
    path::Path,
    process::{Output, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};

use super::{
    binaries::{self, Binaries},
    owner::Owner,
    places::{Places, UNFINISHED},
};

/// The database role that owns everything; on the private socket it needs no password.
pub const ROLE: &str = "millstream";

/// Makes the data folder if there is none yet. Returns the server programs that fit it.
pub fn prepare(places: &Places, owner: &Owner, throw_away: bool) -> Result<Binaries> {
    if let Some(major) = data_major(&places.data)? {
        return binaries::find(Some(major)).with_context(|| {
            format!(
                "the data folder {} was made by Postgres {major}; install that version's server, or move the folder \
                 away to start with an empty database (pg_dump of that version carries the data over)",
                places.data.display()
            )
        });
    }
    let binaries = binaries::find(None)?;
    initdb(&binaries, places, owner, throw_away)?;
    Ok(binaries)
}

/// The major version that made the data folder; `None` when there is no data yet.
fn data_major(data: &Path) -> Result<Option<u32>> {
    let version = data.join("PG_VERSION");
    match fs::read_to_string(&version) {
        Ok(text) => {
            let major = text.trim().split('.').next().and_then(|major| major.parse().ok());
            major
                .map(Some)
                .with_context(|| format!("{} holds no version; the data folder is damaged", version.display()))
        }
        Err(_) if !data.exists() => Ok(None),
        Err(error) => Err(error).with_context(|| {
            format!("{} is no Postgres data folder; move it away. Read {}", data.display(), version.display())
        }),
    }
}

/// A crash in the middle leaves only `unfinished`, which the next start removes: `data` is whole or absent.
fn initdb(binaries: &Binaries, places: &Places, owner: &Owner, throw_away: bool) -> Result<()> {
    let unfinished = &places.unfinished;
    let home = places.data.parent().expect("the data folder is below its home");
    remove_unfinished(home).with_context(|| format!("remove what is unfinished in {}", home.display()))?;
    owner.private_folder(unfinished)?;
    let mut command = owner.command(binaries.program("initdb"));
    command.arg("--pgdata").arg(unfinished);
    // The C locale: an index then never breaks when the system's collations are updated.
    command.args(["--encoding=UTF8", "--locale=C", "--auth-local=trust", "--auth-host=reject", "--username", ROLE]);
    if throw_away {
        command.arg("--no-sync");
    }
    let output = command.stdout(Stdio::piped()).stderr(Stdio::piped()).output().context("run initdb")?;
    ensure!(output.status.success(), "initdb failed: {}", last_lines(&output));
    fs::rename(unfinished, &places.data)
        .with_context(|| format!("rename {} to {}", unfinished.display(), places.data.display()))?;
    File::open(home).and_then(|folder| folder.sync_all()).with_context(|| format!("sync {}", home.display()))
}

/// Removes what starts that were cut short have left.
fn remove_unfinished(home: &Path) -> io::Result<()> {
    let entries = match fs::read_dir(home) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries?,
    };
    for entry in entries {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with(UNFINISHED) {
            remove(&entry.path())?;
        }
    }
    Ok(())
}

/// Removes a folder, if it is there. The `initdb` of a host that was killed lives on for a moment and still writes into it.
fn remove(folder: &Path) -> io::Result<()> {
    let patience = Instant::now() + Duration::from_secs(30);
    loop {
        match fs::remove_dir_all(folder) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty && Instant::now() < patience => {
                thread::sleep(Duration::from_millis(50));
            }
            removed => return removed,
        }
    }
}

fn last_lines(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stderr);
    let lines: Vec<&str> = text.lines().filter(|line| !line.is_empty()).collect();
    lines[lines.len().saturating_sub(5)..].join(" | ")
}

/// The settings that differ from the server's own defaults. They are arguments, so that an edited postgresql.conf
/// cannot open a TCP port.
pub fn settings(places: &Places, throw_away: bool) -> Result<Vec<String>> {
    let Some(socket) = places.socket.to_str() else {
        bail!("{} is not UTF-8; move the project to a folder that is", places.socket.display());
    };
    let mut settings = vec![
        // Only the private socket: nobody but this user gets in, so no password is needed.
        "listen_addresses=".to_owned(),
        format!(r#"unix_socket_directories="{}""#, socket.replace('"', r#""""#)),
        "unix_socket_permissions=0700".to_owned(),
        "port=5432".to_owned(),
        "cluster_name=millstream".to_owned(),
        // A host needs 16, so several hosts, a few psql and the tests fit; each unused one costs a few KB.
        format!("max_connections={}", if throw_away { 300 } else { 100 }),
        // A produce holds up to 64 key locks, and a query locks each partition it looks at. About 10 MB.
        "max_locks_per_transaction=256".to_owned(),
        // All statements are short; compiling one that the planner overrates costs more than it ever saves.
        "jit=off".to_owned(),
        // Statements and details of errors hold payloads, which are never logged; the client gets the error anyway.
        // `log` leaves start, stop and crashes, so the file stays small.
        "log_min_messages=log".to_owned(),
        "log_min_error_statement=panic".to_owned(),
        "log_error_verbosity=terse".to_owned(),
        "log_checkpoints=off".to_owned(),
        "log_autovacuum_min_duration=-1".to_owned(),
        "log_timezone=UTC".to_owned(),
        "timezone=UTC".to_owned(),
    ];
    if throw_away {
        // Only the tests' cluster, which is deleted when they end. synchronous_commit stays on: its waits are tested.
        settings.extend(["fsync=off", "full_page_writes=off"].map(str::to_owned));
    }
    Ok(settings)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_that_somebody_still_writes_into_is_removed() {
        let home = std::env::temp_dir().join(format!("millstream-remove-{}", std::process::id()));
        let folder = home.join(format!("{UNFINISHED}.1"));
        fs::create_dir_all(&folder).unwrap();
        let written = folder.clone();
        let writer = thread::spawn(move || {
            let mut count = 0;
            // Ends once its folder is gone, as `initdb` does.
            while fs::write(written.join(count.to_string()), "x").is_ok() && count < 20_000 {
                count += 1;
            }
        });
        thread::sleep(Duration::from_millis(20));
        remove_unfinished(&home).unwrap();
        writer.join().unwrap();
        remove_unfinished(&home).unwrap(); // nothing is there, which is no error
        assert!(!folder.exists());
        fs::remove_dir_all(&home).unwrap();
    }
}
