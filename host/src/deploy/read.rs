//! One look at a handler file: its bytes and what they are, or why there are none.

use std::{
    fs::{self, File, Metadata},
    io::{self, Read},
    path::Path,
    time::SystemTime,
};

use super::candidate::Seen;
use crate::sandbox;

/// What a stat tells about a file; when it is the same, a slow look does not read the file. On an event every file is
/// read: a replacement of the same size and time is seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    length: u64,
    modified: Option<SystemTime>,
    /// Inode and time of its last change, which no tool can set back.
    inode: u64,
    changed_ns: i128,
}

/// The stamp of a file, through symlinks; `None` when there is none to be had.
pub fn stamp(path: &Path) -> Option<Stamp> {
    fs::metadata(path).ok().map(|metadata| of(&metadata))
}

#[cfg(unix)]
fn of(metadata: &Metadata) -> Stamp {
    use std::os::unix::fs::MetadataExt;
    Stamp {
        length: metadata.len(),
        modified: metadata.modified().ok(),
        inode: metadata.ino(),
        changed_ns: i128::from(metadata.ctime()) * 1_000_000_000 + i128::from(metadata.ctime_nsec()),
    }
}

#[cfg(not(unix))]
fn of(metadata: &Metadata) -> Stamp {
    Stamp { length: metadata.len(), modified: metadata.modified().ok(), inode: 0, changed_ns: 0 }
}

/// Reads a file, unless it is larger than may be loaded anyway.
pub fn read(path: &Path, bytes_max: u64) -> (Seen, Vec<u8>) {
    match read_bounded(path, bytes_max) {
        Ok(bytes) => {
            let seen = Seen::File { digest: sandbox::digest(&bytes), whole: sandbox::is_whole(&bytes) };
            (seen, bytes)
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => (Seen::Missing, Vec::new()),
        Err(error) => (Seen::Unreadable(format!("cannot be read ({error})")), Vec::new()),
    }
}

/// Without waiting: a named pipe would otherwise keep its reader until somebody writes to it.
#[cfg(unix)]
fn open(path: &Path) -> io::Result<File> {
    use std::os::unix::fs::OpenOptionsExt;
    File::options().read(true).custom_flags(rustix::fs::OFlags::NONBLOCK.bits().cast_signed()).open(path)
}

#[cfg(not(unix))]
fn open(path: &Path) -> io::Result<File> {
    File::open(path)
}

fn read_bounded(path: &Path, bytes_max: u64) -> io::Result<Vec<u8>> {
    let file = open(path)?;
    let metadata = file.metadata()?;
    if !metadata.is_file() {
        return Err(io::Error::other("it is not a file"));
    }
    if metadata.len() > bytes_max {
        let text = format!("it has {} bytes and may have {bytes_max}: host.component_max", metadata.len());
        return Err(io::Error::other(text));
    }
    let mut bytes = Vec::new();
    // Bounded once more: it may grow while it is read.
    file.take(bytes_max + 1).read_to_end(&mut bytes)?;
    Ok(bytes)
}
