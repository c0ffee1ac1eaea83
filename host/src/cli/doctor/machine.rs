//! What the machine has: programs, limits, space.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use super::{
    super::{Global, human, open::data_folder},
    Finding,
};
use crate::database::embedded;

/// Less free space than this is told: a day of a busy stream is more.
const FREE_BYTES_NOTED: u64 = 1 << 30;

/// With less than this Postgres cannot even recover.
const FREE_BYTES_MIN: u64 = 100 << 20;

pub(super) fn postgres_programs() -> Finding {
    match embedded::installed() {
        Ok((folder, major)) => Finding::ok("Postgres", format!("version {major} in {}", folder.display())),
        Err(error) => {
            let text = format!("{error:#}");
            let (found, mend) = text.split_once("; ").unwrap_or((&text, "install the Postgres server programs"));
            Finding::missing("Postgres", found, mend)
        }
    }
}

/// Only those who build handlers in Rust need it.
pub(super) fn wasm_toolchain() -> Finding {
    const TARGET: &str = "wasm32-unknown-unknown";
    let has_target = |rustc: &str| {
        let library = sysroot(rustc)?.join("lib/rustlib").join(TARGET).join("lib");
        library.is_dir().then(|| format!("{TARGET} in {}", library.display()))
    };
    if let Some(found) = has_target("rustc") {
        return Finding::ok("wasm target", found);
    }
    let debian = sysroot("/usr/bin/rustc").is_some_and(|root| root.join("lib/rustlib/src/rust/library/std").is_dir());
    if debian && Path::new("/usr/bin/wasm-ld").exists() {
        return Finding::ok("wasm target", "the distribution's Rust with its source and wasm-ld builds it");
    }
    Finding::note(
        "wasm target",
        format!("no {TARGET}, which building a handler in Rust needs"),
        format!("rustup target add {TARGET} (Debian: apt-get install rustc-web cargo-web rust-web-src lld)"),
    )
}

fn sysroot(rustc: &str) -> Option<PathBuf> {
    let output = Command::new(rustc).args(["--print", "sysroot"]).stdin(Stdio::null()).stderr(Stdio::null()).output();
    let root = String::from_utf8(output.ok().filter(|output| output.status.success())?.stdout).ok()?;
    Some(PathBuf::from(root.trim()))
}

/// The watch of the handlers folder takes one instance and a watch for each folder. Linux only.
pub(super) fn inotify() -> Option<Finding> {
    let limit =
        |name: &str| fs::read_to_string(format!("/proc/sys/fs/inotify/{name}")).ok()?.trim().parse::<u64>().ok();
    let (instances, watches) = (limit("max_user_instances")?, limit("max_user_watches")?);
    let found = format!("{instances} instances, {watches} watches a user");
    Some(if instances < 16 || watches < 256 {
        Finding::note(
            "inotify",
            format!("{found}: changed handlers may only be seen by the slow look"),
            "sysctl -w fs.inotify.max_user_instances=128 fs.inotify.max_user_watches=8192",
        )
    } else {
        Finding::ok("inotify", found)
    })
}

/// Space where the own Postgres and the compiled handlers are.
pub(super) fn disk(global: &Global) -> Finding {
    let folder = data_folder(global);
    let there = folder.ancestors().find(|folder| folder.exists()).unwrap_or(Path::new("."));
    match rustix::fs::statvfs(there) {
        Err(error) => Finding::note("disk", format!("{}: {error}", there.display()), "check the file system"),
        Ok(space) => judge_space(space.f_bavail.saturating_mul(space.f_frsize), there),
    }
}

fn judge_space(free: u64, there: &Path) -> Finding {
    let found = format!("{} free at {}", human::bytes(free), there.display());
    let mend = "make room, or let another Postgres hold the data (--database-url)";
    match free {
        0..FREE_BYTES_MIN => Finding::missing("disk", found, mend),
        FREE_BYTES_MIN..FREE_BYTES_NOTED => Finding::note("disk", found, mend),
        _ => Finding::ok("disk", found),
    }
}

#[cfg(test)]
mod tests {
    use super::{super::State, *};

    #[test]
    fn a_full_disk_is_missing_and_a_small_one_is_noted() {
        let state = |free| judge_space(free, Path::new(".")).state;
        assert_eq!([0, FREE_BYTES_MIN, FREE_BYTES_NOTED].map(state), [State::Missing, State::Note, State::Ok]);
    }
}
