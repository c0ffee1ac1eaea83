//! A Postgres of a test's own, for what would hit every other test in the common one: killed backends, crashes, a standby.

use std::{
    fs,
    os::unix::{fs::MetadataExt, process::CommandExt},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use millstream::{
    config::{self, Config},
    database::{
        Connect, Database,
        embedded::{Options, Server, installed},
        migrate,
    },
    engine,
};
use rustix::process::{Pid, Signal, kill_process};
use sqlx::{Connection, PgConnection};
use tempfile::TempDir;
use tokio::time::timeout;

use super::{scratch_folder, wait_for};

/// A ceiling against hangs.
const LIMIT: Duration = Duration::from_secs(60);

pub struct OwnPostgres {
    server: Server,
    folder: TempDir,
}

impl OwnPostgres {
    /// Starts one with what a streams.toml declares.
    pub async fn declare(streams_toml: &str) -> (Self, Database, Config) {
        let folder = scratch_folder();
        let server = start(folder.path()).await;
        let own = Self { server, folder };
        let database = own.database().await;
        migrate(&database).await.expect("migrate");
        let config = config::parse(streams_toml, Path::new("streams.toml"), &|_| None).expect("a valid streams.toml");
        engine::apply(&database, &config).await.expect("declare");
        (own, database, config)
    }

    /// Connects with a pool.
    pub async fn database(&self) -> Database {
        Database::connect(&self.server.connect(), 16, "millstream").await.expect("connect")
    }

    pub fn url(&self) -> String {
        self.server.url()
    }

    /// Everything the server has logged.
    pub fn log(&self) -> String {
        fs::read_to_string(self.folder.path().join("postgres.log")).expect("read the log of Postgres")
    }

    /// Kills a process that serves a connection; the server then ends all others, recovers, and this returns when it is back.
    /// False: it was gone already.
    pub async fn kill_backend(&self, pid: i32) -> bool {
        let mut witness = PgConnection::connect(&self.url()).await.expect("connect");
        if kill_process(Pid::from_raw(pid).expect("a process id"), Signal::KILL).is_err() {
            return false;
        }
        let ended = async { while witness.ping().await.is_ok() {} };
        timeout(LIMIT, ended).await.expect("the server ends the others");
        wait_for("Postgres is back", LIMIT, async || PgConnection::connect(&self.url()).await.is_ok()).await;
        true
    }

    /// Kills the server's first process, and returns when all of it is gone.
    pub async fn kill(&self) {
        let lock_file = fs::read_to_string(self.server.data_folder().join("postmaster.pid")).expect("postmaster.pid");
        let pid = lock_file.lines().next().expect("a first line").parse().expect("a process id");
        kill_process(Pid::from_raw(pid).expect("a process id"), Signal::KILL).expect("kill Postgres");
        self.server.ended().await;
    }

    /// Kills it, and starts it again on the same data.
    pub async fn crash(self) -> Self {
        self.kill().await;
        let Self { server, folder } = self;
        drop(server);
        Self { server: start(folder.path()).await, folder }
    }

    /// Copies it into a standby that follows it.
    pub async fn standby(&self) -> Standby {
        let programs = server_programs();
        let data = self.server.data_folder();
        let owner = fs::metadata(data).expect("look at the data folder");
        let folder = scratch_folder();
        std::os::unix::fs::chown(folder.path(), Some(owner.uid()), Some(owner.gid())).expect("give the folder away");
        let command = |program: &str| {
            let mut command = Command::new(programs.join(program));
            command.current_dir("/").uid(owner.uid()).gid(owner.gid()).stdin(Stdio::null()).stdout(Stdio::null());
            command
        };
        let copy = folder.path().join("postgres");
        let mut backup = command("pg_basebackup");
        backup.args(["--checkpoint=fast", "--write-recovery-conf", "--no-sync", "--dbname"]).arg(self.url());
        let copied = backup.arg("--pgdata").arg(&copy).output().expect("run pg_basebackup");
        assert!(copied.status.success(), "{}", String::from_utf8_lossy(&copied.stderr));
        let log = fs::File::create(folder.path().join("log")).expect("create its log");
        let mut postgres = command("postgres");
        postgres.arg("-D").arg(&copy).args(["-c", "listen_addresses=", "-c", "fsync=off"]).stderr(log);
        // A standby may have no fewer of these than the server it follows.
        postgres.args(["-c", "max_connections=300", "-c", "max_locks_per_transaction=256", "-c"]);
        let child = postgres.arg(format!("unix_socket_directories={}", folder.path().display())).spawn();
        let standby = Standby { process: child.expect("start the standby"), folder };
        wait_for("the standby answers", LIMIT, async || PgConnection::connect(&standby.url()).await.is_ok()).await;
        standby
    }

    pub async fn stop(self) {
        self.server.stop().await.expect("stop Postgres");
    }
}

/// A copy that follows its server until it takes its place. Killed when it is dropped.
pub struct Standby {
    process: Child,
    folder: TempDir,
}

impl Standby {
    pub fn url(&self) -> String {
        format!("postgresql://millstream@localhost/millstream?host={}", self.folder.path().display())
    }

    /// Takes the place of the server that it followed.
    pub async fn promote(&self) -> Database {
        let mut connection = PgConnection::connect(&self.url()).await.expect("connect to the standby");
        let promoted = sqlx::query_scalar::<_, bool>("select pg_is_in_recovery() and pg_promote()");
        assert!(promoted.fetch_one(&mut connection).await.expect("promote the standby"), "it was no standby");
        Database::connect(&Connect::parse(&self.url()).expect("a URL"), 4, "millstream").await.expect("connect")
    }
}

impl Drop for Standby {
    fn drop(&mut self) {
        // INT is a fast shutdown; a killed server would leave processes behind.
        let pid = Pid::from_child(&self.process);
        let _ = kill_process(pid, Signal::INT);
        let _ = self.process.wait();
    }
}

/// Where the server lies, with the programs that come with it: a folder of links need not have all of them.
pub fn server_programs() -> PathBuf {
    let postgres = installed().expect("server programs").0.join("postgres");
    fs::canonicalize(postgres).expect("find the server").parent().expect("its folder").to_owned()
}

async fn start(folder: &Path) -> Server {
    let options = Options { folder: PathBuf::from(folder), throw_away: true };
    Server::start(options).await.expect("start Postgres")
}
