//! As which user of the operating system the server runs. Postgres refuses to run as root, so under root it is another.

use std::{
    fs::{self, DirBuilder},
    io,
    os::unix::{
        fs::{DirBuilderExt, MetadataExt, chown},
        process::CommandExt,
    },
    path::Path,
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail, ensure};

/// The user that owns the data folder and runs the server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Owner {
    /// The user that runs the host.
    Ourselves,
    /// The host runs as root, the server as this one.
    Other { uid: u32, gid: u32 },
}

impl Owner {
    /// Chooses the user. An existing data folder keeps its owner, since Postgres accepts no other.
    pub fn choose(data: &Path) -> Result<Self> {
        let ourselves = rustix::process::geteuid().as_raw();
        let existing = fs::symlink_metadata(data).ok().map(|found| (found.uid(), found.gid()));
        if ourselves != 0 {
            if let Some((uid, _)) = existing.filter(|(uid, _)| *uid != ourselves) {
                bail!(
                    "{} belongs to user {uid}, and this is user {ourselves}; run millstream as that user, or move the \
                     folder away to start with an empty database",
                    data.display()
                );
            }
            return Ok(Self::Ourselves);
        }
        if let Some((uid, gid)) = existing.filter(|(uid, _)| *uid != 0) {
            return Ok(Self::Other { uid, gid });
        }
        for name in ["postgres", "nobody"] {
            if let (Some(uid), Some(gid)) = (ask_id("-u", name), ask_id("-g", name)) {
                return Ok(Self::Other { uid, gid });
            }
        }
        bail!("Postgres does not run as root, and there is neither a user `postgres` nor `nobody`; add one of them")
    }

    /// A command that runs as this user, in `/` (it may not be able to enter our own folder) and without our
    /// environment (which may hold secrets).
    pub fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new(program);
        command.current_dir("/").env_clear().env("LC_ALL", "C").stdin(Stdio::null());
        for name in ["PATH", "LD_LIBRARY_PATH", "TMPDIR"] {
            if let Some(value) = std::env::var_os(name) {
                command.env(name, value);
            }
        }
        if let Self::Other { uid, gid } = self {
            command.uid(*uid).gid(*gid);
        }
        command
    }

    /// Makes `folder` with mode 0700 for this user, or checks that an existing one is exactly that: in a temp folder
    /// somebody else could have made it first.
    pub fn private_folder(&self, folder: &Path) -> Result<()> {
        match DirBuilder::new().mode(0o700).create(folder) {
            Ok(()) => {
                if let Self::Other { uid, gid } = self {
                    chown(folder, Some(*uid), Some(*gid))
                        .with_context(|| format!("give {} to user {uid}", folder.display()))?;
                }
                return Ok(());
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error).with_context(|| format!("create {}", folder.display())),
        }
        let found = fs::symlink_metadata(folder).with_context(|| format!("look at {}", folder.display()))?;
        ensure!(found.is_dir(), "{} is not a folder; remove it", folder.display());
        ensure!(
            found.uid() == self.uid() && found.mode() & 0o077 == 0,
            "{} is not a private folder (mode 0700) of user {}; remove it",
            folder.display(),
            self.uid()
        );
        Ok(())
    }

    /// Whether this user can enter and write `folder`. Asked by trying: modes, groups, ACLs and mounts all have a say.
    pub fn reaches(&self, folder: &Path) -> bool {
        let mut test = self.command("/bin/sh");
        test.args(["-c", r#"test -w "$1" && test -x "$1""#, "sh"]).arg(folder);
        test.stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok_and(|status| status.success())
    }

    fn uid(&self) -> u32 {
        match self {
            Self::Ourselves => rustix::process::geteuid().as_raw(),
            Self::Other { uid, .. } => *uid,
        }
    }
}

/// `id` knows users that are not in /etc/passwd (LDAP, macOS), and needs no unsafe call.
fn ask_id(flag: &str, name: &str) -> Option<u32> {
    let output = Command::new("id").args([flag, name]).stdin(Stdio::null()).stderr(Stdio::null()).output().ok()?;
    String::from_utf8(output.stdout).ok()?.trim().parse().ok()
}
