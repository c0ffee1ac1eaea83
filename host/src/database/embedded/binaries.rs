//! Finds the Postgres server programs of this machine. Never installs anything.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Result, bail};

use super::super::MAJOR_MIN;

/// A folder that holds `initdb` and `postgres` of one version.
#[derive(Clone, Debug)]
pub struct Binaries {
    pub folder: PathBuf,
    pub major: u32,
}

impl Binaries {
    pub fn program(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }
}

/// Finds server programs of the major version `wanted`, or, without one, of the first version that is new enough.
pub fn find(wanted: Option<u32>) -> Result<Binaries> {
    choose(&candidate_folders(), wanted)
}

fn choose(folders: &[PathBuf], wanted: Option<u32>) -> Result<Binaries> {
    let mut others = Vec::new();
    for folder in folders {
        let Some(major) = server_major(folder) else { continue };
        if major >= MAJOR_MIN && wanted.is_none_or(|wanted| wanted == major) {
            return Ok(Binaries { folder: folder.clone(), major });
        }
        others.push(format!("{major} in {}", folder.display()));
    }
    let found = if others.is_empty() { "none found".to_owned() } else { format!("found {}", others.join(", ")) };
    if let Some(wanted) = wanted.filter(|_| !others.is_empty()) {
        bail!("no server programs of Postgres {wanted} ({found})");
    }
    bail!(
        "no Postgres server programs (initdb and postgres, version {MAJOR_MIN} or newer; {found}); install them \
         (Debian, Ubuntu: `apt-get install postgresql`; Fedora: `dnf install postgresql-server`; macOS: `brew install \
         postgresql@17`), or name your own database with --database-url"
    )
}

/// Where distributions put them, most deliberate choice first: what the user put on PATH wins over what happens to be
/// installed. Several versions side by side are tried newest first.
fn candidate_folders() -> Vec<PathBuf> {
    let mut folders: Vec<PathBuf> =
        env::var_os("PATH").map(|path| env::split_paths(&path).collect()).unwrap_or_default();
    folders.extend(pg_config_folder());
    for (parent, prefix, suffix) in [
        ("/usr/lib/postgresql", "", "bin"),                          // Debian, Ubuntu
        ("/usr", "pgsql-", "bin"),                                   // Fedora and RHEL from postgresql.org
        ("/opt/homebrew/opt", "postgresql@", "bin"),                 // Homebrew, Apple silicon
        ("/usr/local/opt", "postgresql@", "bin"),                    // Homebrew, Intel
        ("/home/linuxbrew/.linuxbrew/opt", "postgresql@", "bin"),    // Homebrew, Linux
        ("/Applications/Postgres.app/Contents/Versions", "", "bin"), // Postgres.app
    ] {
        folders.extend(versions_newest_first(Path::new(parent), prefix).into_iter().map(|folder| folder.join(suffix)));
    }
    folders.retain(|folder| folder.is_absolute());
    folders
}

/// `pg_config` names the folder of the installation it belongs to.
fn pg_config_folder() -> Option<PathBuf> {
    let output = Command::new("pg_config").arg("--bindir").stdin(Stdio::null()).stderr(Stdio::null()).output().ok()?;
    let folder = String::from_utf8(output.stdout).ok()?;
    (output.status.success() && !folder.trim().is_empty()).then(|| PathBuf::from(folder.trim()))
}

fn versions_newest_first(parent: &Path, prefix: &str) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(parent) else { return Vec::new() };
    let mut versions: Vec<(u32, PathBuf)> = entries
        .filter_map(|entry| {
            let entry = entry.ok()?;
            let version = entry.file_name().to_str()?.strip_prefix(prefix)?.split('.').next()?.parse().ok()?;
            Some((version, entry.path()))
        })
        .collect();
    versions.sort_by(|left, right| right.cmp(left));
    versions.into_iter().map(|(_, path)| path).collect()
}

/// Asks `postgres` itself; a client-only installation has no `postgres` and answers `None`.
fn server_major(folder: &Path) -> Option<u32> {
    if !folder.join("initdb").is_file() || !folder.join("postgres").is_file() {
        return None;
    }
    let output = Command::new(folder.join("postgres")).arg("--version").stdin(Stdio::null()).output().ok()?;
    parse_major(&String::from_utf8(output.stdout).ok()?)
}

/// Reads "postgres (PostgreSQL) 15.8 (Debian 15.8-0+deb12u1)" and "postgres (PostgreSQL) 18beta1".
fn parse_major(version: &str) -> Option<u32> {
    let number = version.split_once("(PostgreSQL) ")?.1;
    let digits = number.find(|c: char| !c.is_ascii_digit()).unwrap_or(number.len());
    number[..digits].parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_major_version_is_read_from_what_postgres_prints() {
        assert_eq!(parse_major("postgres (PostgreSQL) 15.8 (Debian 15.8-0+deb12u1)\n"), Some(15));
        assert_eq!(parse_major("postgres (PostgreSQL) 18beta1\n"), Some(18));
        assert_eq!(parse_major("something else"), None);
    }

    #[test]
    fn without_server_programs_the_error_says_what_to_install() {
        let error = choose(&[PathBuf::from("/nonexistent")], None).expect_err("nothing is there").to_string();
        assert!(error.contains("none found") && error.contains("apt-get install postgresql"), "{error}");
        assert!(!error.contains('\n'), "one line: {error}");
    }

    #[test]
    fn another_major_version_than_the_data_folder_needs_is_named() {
        let installed = find(None).expect("the tests need Postgres");
        let error = choose(std::slice::from_ref(&installed.folder), Some(11)).expect_err("11 is too old").to_string();
        assert!(error.contains("Postgres 11") && error.contains(&format!("found {}", installed.major)), "{error}");
    }
}
