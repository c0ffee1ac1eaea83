//! One host a project folder: two servers on one data folder would destroy it. The lock also tells other processes of
//! the project where the server listens.

use std::{
    fs::{File, OpenOptions},
    io::{self, Read, Seek, Write},
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result, bail};
use rustix::fs::{FlockOperation, flock};

/// How often the lock is tried, and how long between: half a second in all.
const TRIES: u32 = 25;
const BETWEEN_TRIES: Duration = Duration::from_millis(20);

/// The lock, held until this is dropped. The kernel frees it when we end, however we end.
#[derive(Debug)]
pub struct Lock {
    file: File,
    path: PathBuf,
}

/// What the lock file says about the process that holds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    pub pid: String,
    /// Where its server listens; `None` while that is still starting.
    pub socket: Option<PathBuf>,
}

impl Lock {
    /// Takes the lock of `.millstream`, or says who has it.
    pub fn take(folder: &Path) -> Result<Self> {
        let path = folder.join("postgres.lock");
        let file = OpenOptions::new().create(true).truncate(false).read(true).write(true).open(&path);
        let mut file = file.with_context(|| format!("open {}", path.display()))?;
        if !get(&file) {
            bail!(
                "another millstream (process {}) runs the Postgres in {}; stop it first, or start one Postgres yourself \
                 and give both hosts its --database-url",
                read(&mut file).pid,
                folder.display()
            );
        }
        let mut lock = Self { file, path };
        lock.write(&format!("{}\n", std::process::id()))?;
        Ok(lock)
    }

    /// Says that the server is ready, and where.
    pub fn publish(&mut self, socket: &Path) -> Result<()> {
        self.write(&format!("{}\n{}\n", std::process::id(), socket.display()))
    }

    fn write(&mut self, text: &str) -> Result<()> {
        let write = self.file.set_len(0).and_then(|()| self.file.rewind());
        let write = write.and_then(|()| self.file.write_all(text.as_bytes()));
        write.with_context(|| format!("write {}", self.path.display()))
    }
}

/// Tries for a moment: a process that only looks holds the lock for an instant, and a child of its last owner until it
/// has become another program.
fn get(file: &File) -> bool {
    for _ in 0..TRIES {
        if flock(file, FlockOperation::NonBlockingLockExclusive).is_ok() {
            return true;
        }
        std::thread::sleep(BETWEEN_TRIES);
    }
    false
}

/// Who holds the lock of `.millstream` just now.
pub fn holder(folder: &Path) -> Result<Option<Holder>> {
    let path = folder.join("postgres.lock");
    let mut file = match File::open(&path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error).with_context(|| format!("open {}", path.display())),
    };
    // Shared, so that two who only look do not take each other for a host.
    if flock(&file, FlockOperation::NonBlockingLockShared).is_ok() {
        return Ok(None);
    }
    Ok(Some(read(&mut file)))
}

/// Only ever shown or tried, so an unreadable file is an unknown holder.
fn read(file: &mut File) -> Holder {
    let mut text = String::new();
    let _ = file.read_to_string(&mut text);
    let mut lines = text.lines();
    let pid = lines.next().unwrap_or("unknown").to_owned();
    Holder { pid, socket: lines.next().map(PathBuf::from) }
}
