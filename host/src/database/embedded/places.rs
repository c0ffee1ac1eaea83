//! Where the owned Postgres keeps its files. The choice depends only on what is on disk: the next run finds the same.

use std::{
    env, fs,
    fs::DirBuilder,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail, ensure};
use sha2::{Digest, Sha256};

use super::owner::Owner;

/// Longest path of a Unix socket, in bytes: `sun_path` less its closing NUL.
const SOCKET_PATH_BYTES_MAX: usize = if cfg!(target_os = "macos") { 103 } else { 107 };

/// Postgres names the socket itself, after its port.
pub const SOCKET_NAME: &str = ".s.PGSQL.5432";

/// How the folders begin in which `initdb` works.
pub const UNFINISHED: &str = "postgres.unfinished";

/// Every folder and file of one owned Postgres.
#[derive(Clone, Debug)]
pub struct Places {
    /// The Postgres data folder.
    pub data: PathBuf,
    /// `initdb` works here; renamed to `data` when it is whole. Of each start its own: the `initdb` of a host that was killed
    /// lives on for a moment, and empties its folder when it fails.
    pub unfinished: PathBuf,
    /// Holds the socket; mode 0700.
    pub socket: PathBuf,
    pub log: PathBuf,
}

/// Decides where everything goes. `folder` is the project's `.millstream`, in canonical form.
pub fn choose(folder: &Path) -> Result<(Places, Owner)> {
    let fallbacks = fallback_homes(folder);
    let homes: Vec<&Path> = std::iter::once(folder).chain(fallbacks.iter().map(PathBuf::as_path)).collect();
    // A home that already holds data wins, whatever else has changed: an empty database must never appear in its stead.
    if let Some(home) = homes.iter().find(|home| home.join("postgres/PG_VERSION").exists()) {
        let data = home.join("postgres");
        let owner = Owner::choose(&data)?;
        ensure!(
            owner.reaches(&data),
            "the user of Postgres ({owner:?}) cannot reach {} any more; restore the modes of the folders above it",
            data.display()
        );
        return Ok((places(folder, home, &owner)?, owner));
    }
    let owner = Owner::choose(&folder.join("postgres"))?;
    if owner == Owner::Ourselves {
        return Ok((places(folder, folder, &owner)?, owner));
    }
    let mut refused = Vec::new();
    for home in homes {
        match reachable_home(home, folder, &owner) {
            Ok(()) => return Ok((places(folder, home, &owner)?, owner)),
            Err(error) => refused.push(format!("{error:#}")),
        }
    }
    bail!("no folder for Postgres that its user can reach: {}", refused.join("; "))
}

fn places(folder: &Path, home: &Path, owner: &Owner) -> Result<Places> {
    Ok(Places {
        data: home.join("postgres"),
        unfinished: home.join(format!("{UNFINISHED}.{}", std::process::id())),
        socket: socket_folder(folder, home, owner)?,
        log: folder.join("postgres.log"),
    })
}

/// Where data goes when the server's user cannot reach `.millstream`, say below a /root of mode 0700.
fn fallback_homes(folder: &Path) -> Vec<PathBuf> {
    let name = short_name(folder);
    let mut homes = vec![env::temp_dir().join(format!("millstream-{name}"))];
    if rustix::process::geteuid().is_root() {
        homes.insert(0, Path::new("/var/lib/millstream").join(name));
    }
    homes
}

/// The same project folder always gets the same name, and another one never does.
fn short_name(folder: &Path) -> String {
    let digest = Sha256::digest(folder.as_os_str().as_encoded_bytes());
    digest[..8].iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Tries whether the server's user gets to a folder of its own below `home`.
fn reachable_home(home: &Path, folder: &Path, owner: &Owner) -> Result<()> {
    if home != folder {
        private_home(home, owner)?;
    }
    let socket = home.join("socket");
    owner.private_folder(&socket)?;
    if owner.reaches(&socket) {
        return Ok(());
    }
    fs::remove_dir(&socket).with_context(|| format!("remove {}", socket.display()))?;
    bail!("{} cannot be reached by {owner:?}", home.display())
}

fn private_home(home: &Path, owner: &Owner) -> Result<()> {
    if let Some(parent) = home.parent().filter(|parent| !parent.exists()) {
        // Others may pass through, not list: the folders below are private.
        DirBuilder::new()
            .recursive(true)
            .mode(0o711)
            .create(parent)
            .with_context(|| format!("create {}", parent.display()))?;
    }
    owner.private_folder(home)
}

/// The socket stays beside the data where its path is short enough, else it moves to the first folder that is.
fn socket_folder(folder: &Path, home: &Path, owner: &Owner) -> Result<PathBuf> {
    let mut candidates = vec![home.join("socket")];
    candidates.extend(fallback_homes(folder).into_iter().map(|home| home.join("socket")));
    // TMPDIR itself may be long (it is on macOS).
    candidates.push(Path::new("/tmp").join(format!("millstream-{}", short_name(folder))).join("socket"));
    let mut refused = Vec::new();
    for candidate in candidates.iter().filter(|candidate| socket_fits(candidate)) {
        match private_socket(candidate, home, owner) {
            Ok(()) => return Ok(candidate.clone()),
            Err(error) => refused.push(format!("{error:#}")),
        }
    }
    bail!("no folder for the Postgres socket: {}", refused.join("; "))
}

fn private_socket(candidate: &Path, home: &Path, owner: &Owner) -> Result<()> {
    let parent = candidate.parent().expect("every candidate ends in /socket");
    if parent != home {
        private_home(parent, owner)?;
    }
    owner.private_folder(candidate)?;
    ensure!(owner.reaches(candidate), "{} cannot be reached by {owner:?}", candidate.display());
    Ok(())
}

fn socket_fits(folder: &Path) -> bool {
    folder.as_os_str().len() + 1 + SOCKET_NAME.len() <= SOCKET_PATH_BYTES_MAX
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_path_of_exactly_the_limit_fits_and_one_more_does_not() {
        let longest = SOCKET_PATH_BYTES_MAX - 1 - SOCKET_NAME.len();
        assert!(socket_fits(Path::new(&"x".repeat(longest))));
        assert!(!socket_fits(Path::new(&"x".repeat(longest + 1))));
    }
}
