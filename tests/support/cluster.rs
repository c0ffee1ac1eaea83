//! The one Postgres of a test run, started at its first use by the code that users run. It stops when this process
//! ends, since its watcher then reads the end of its pipe; its files are removed by the next run.

use std::{
    fs::{self, DirBuilder, File},
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
    time::Duration,
};

use millstream::database::embedded::{Options, Server};
use rustix::fs::{FlockOperation, flock};
use tokio::sync::OnceCell;

static CLUSTER: OnceCell<Server> = OnceCell::const_new();

/// Longer than the start of a run takes from its folder to its lock.
const STARTING: Duration = Duration::from_secs(60);

/// The cluster of this run.
pub async fn cluster() -> &'static Server {
    CLUSTER
        .get_or_init(|| async {
            remove_leftovers();
            let folder = runs().join(std::process::id().to_string());
            Server::start(Options { folder, throw_away: true }).await.expect("start the tests' Postgres")
        })
        .await
}

/// A folder that the server's user can pass through; removed when the value is dropped.
pub fn scratch_folder() -> tempfile::TempDir {
    use std::os::unix::fs::PermissionsExt;
    let passable = fs::Permissions::from_mode(0o711);
    tempfile::Builder::new().prefix("millstream-test-").permissions(passable).tempdir().expect("make a temp folder")
}

/// Holds one folder for each run, named by its process.
fn runs() -> PathBuf {
    let folder = std::env::temp_dir().join(format!("millstream-runs-{}", rustix::process::geteuid().as_raw()));
    DirBuilder::new().recursive(true).mode(0o711).create(&folder).expect("make the folder of test runs");
    folder
}

/// A run that still goes on holds the lock of its folder, so whatever can be locked is over.
fn remove_leftovers() {
    for entry in fs::read_dir(runs()).expect("list earlier test runs").flatten() {
        if is_over(&entry.path()) {
            // Its server may still be writing its last file; the run after this one gets it then.
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

fn is_over(run: &Path) -> bool {
    // Without a lock it may be about to start.
    let age = || fs::metadata(run).and_then(|data| data.modified()).ok()?.elapsed().ok();
    let Ok(lock) = File::open(run.join("postgres.lock")) else { return age().is_some_and(|age| age > STARTING) };
    flock(&lock, FlockOperation::NonBlockingLockExclusive).is_ok()
}
