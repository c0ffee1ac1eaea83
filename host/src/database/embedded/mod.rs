//! The Postgres that the host owns when nobody gave it another: found, made, started, watched and stopped here.
//!
//! It listens on a private Unix socket only, never outlives the host (a watcher stops it when the host is gone, even by
//! kill -9), and never runs with `fsync=off` except for tests. Never touches a Postgres that somebody else runs.

mod binaries;
mod cluster;
mod lock;
mod owner;
mod places;
mod process;
mod stale;

use std::{
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, bail, ensure};
use sqlx::{
    ConnectOptions, Connection, PgConnection,
    postgres::{PgConnectOptions, PgSslMode},
};

use super::Connect;

use self::{binaries::Binaries, cluster::ROLE, lock::Lock, owner::Owner, places::Places, process::Process};

/// How long a server may take to answer at all. A laptop under load needs a few seconds.
const START_MAX: Duration = Duration::from_secs(60);

/// How long one that answers "starting up" may take: after a crash it replays its log first.
const RECOVERY_MAX: Duration = Duration::from_secs(600);

/// How long the last processes of a killed server may take to go away.
const LEFTOVER_MAX: Duration = Duration::from_secs(15);

/// The last part of the server's log that an error shows.
const LOG_TAIL_BYTES: usize = 1500;

/// What to start.
#[derive(Clone, Debug)]
pub struct Options {
    /// The project's `.millstream` folder; made when it is missing.
    pub folder: PathBuf,
    /// Only for tests: the data need not survive a crash of the machine.
    pub throw_away: bool,
}

/// A running Postgres of our own. Dropping it stops the server in the background; [`Server::stop`] waits for it.
#[derive(Debug)]
pub struct Server {
    process: Process,
    places: Places,
    major: u32,
    /// Held as long as we own the folder.
    _lock: Lock,
}

impl Server {
    /// Starts the server of this folder, making its data first when there is none, and returns when it answers.
    ///
    /// Fails when another process owns the folder, when there are no server programs, when the data was made by another
    /// major version, and when the server does not come up (with the tail of its log). Dropping this stops it again.
    pub async fn start(options: Options) -> Result<Self> {
        let throw_away = options.throw_away;
        let prepared = tokio::task::spawn_blocking(move || prepare(&options)).await.context("prepare Postgres")??;
        let settings = cluster::settings(&prepared.places, throw_away)?;
        let started = Instant::now();
        loop {
            let process = Process::launch(&prepared.binaries, &prepared.places, &prepared.owner, &settings)?;
            match wait_until_ready(&process, &prepared.places).await {
                Ok(()) => return Self::ready(process, prepared),
                Err(error) => {
                    process.stop().await?;
                    let tail = log_tail(&prepared.places.log);
                    // After a kill -9 of the server its other processes take a moment to notice.
                    if !tail.contains("pre-existing shared memory block") || started.elapsed() > LEFTOVER_MAX {
                        return Err(anyhow!(
                            "start Postgres: {error:#}; its log {}:\n{tail}",
                            prepared.places.log.display()
                        ));
                    }
                    tokio::time::sleep(Duration::from_millis(200)).await;
                }
            }
        }
    }

    fn ready(process: Process, mut prepared: Prepared) -> Result<Self> {
        prepared.lock.publish(&prepared.places.socket)?;
        Ok(Self { process, places: prepared.places, major: prepared.binaries.major, _lock: prepared.lock })
    }

    /// The server's major version.
    pub fn major(&self) -> u32 {
        self.major
    }

    /// How to connect to the `millstream` database.
    pub fn connect(&self) -> Connect {
        Connect::direct(connect_options(&self.places.socket, ROLE))
    }

    /// The same as a URL that psql and every driver understand.
    pub fn url(&self) -> String {
        let socket = self.places.socket.as_os_str().as_encoded_bytes();
        let encoded: String = socket
            .iter()
            .map(|byte| match byte {
                b'/' | b'.' | b'-' | b'_' | b'0'..=b'9' | b'A'..=b'Z' | b'a'..=b'z' => char::from(*byte).to_string(),
                other => format!("%{other:02X}"),
            })
            .collect();
        format!("postgresql://{ROLE}@localhost/{ROLE}?host={encoded}")
    }

    /// Where the data is: below the options' folder, unless the server's user cannot reach it.
    pub fn data_folder(&self) -> &Path {
        &self.places.data
    }

    /// Returns, with the reason, when the server has ended without being asked to. The host cannot go on then.
    pub async fn ended(&self) -> String {
        format!(
            "{}; its log {}:\n{}",
            self.process.ended().await,
            self.places.log.display(),
            log_tail(&self.places.log)
        )
    }

    /// Shuts down (open transactions are rolled back) and returns when nothing is left running.
    pub async fn stop(self) -> Result<()> {
        self.process.stop().await
    }
}

/// The server programs of this machine that a new data folder would be made with: their folder and major version. Fails
/// with what to install.
pub fn installed() -> Result<(PathBuf, u32)> {
    binaries::find(None).map(|found| (found.folder, found.major))
}

/// Finds the server that another process of this project runs, so that a verb beside `millstream up` reaches the same
/// database. `None` when no process does. Waits for one that is still starting.
pub async fn find_running(folder: &Path) -> Result<Option<Connect>> {
    let started = Instant::now();
    loop {
        let Some(holder) = lock::holder(folder)? else { return Ok(None) };
        if let Some(socket) = holder.socket {
            return Ok(Some(Connect::direct(connect_options(&socket, ROLE))));
        }
        ensure!(started.elapsed() < START_MAX, "the Postgres of process {} does not get ready", holder.pid);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

struct Prepared {
    lock: Lock,
    places: Places,
    owner: Owner,
    binaries: Binaries,
}

fn prepare(options: &Options) -> Result<Prepared> {
    fs::create_dir_all(&options.folder).with_context(|| format!("create {}", options.folder.display()))?;
    let folder = fs::canonicalize(&options.folder).with_context(|| format!("find {}", options.folder.display()))?;
    let lock = Lock::take(&folder)?;
    let (places, owner) = places::choose(&folder)?;
    let binaries = cluster::prepare(&places, &owner, options.throw_away)?;
    stale::clear(&places.data)?;
    Ok(Prepared { lock, places, owner, binaries })
}

async fn wait_until_ready(process: &Process, places: &Places) -> Result<()> {
    let started = Instant::now();
    loop {
        let error = match make_database(places).await {
            Ok(()) => return Ok(()),
            Err(error) => error,
        };
        if process.has_ended() {
            bail!("{}", process.ended().await);
        }
        let recovers = error.as_database_error().and_then(|error| error.code()).is_some_and(|code| code == "57P03");
        let answers_with_an_error = error.as_database_error().is_some() && !recovers;
        let limit = if recovers { RECOVERY_MAX } else { START_MAX };
        if answers_with_an_error || started.elapsed() > limit {
            return Err(error).context("connect to it");
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Makes the `millstream` database, once. A server that answers this is ready.
async fn make_database(places: &Places) -> Result<(), sqlx::Error> {
    let mut connection: PgConnection = connect_options(&places.socket, "postgres").connect().await?;
    let exists = sqlx::query("select from pg_catalog.pg_database where datname = 'millstream'");
    if exists.fetch_optional(&mut connection).await?.is_none() {
        sqlx::raw_sql("create database millstream").execute(&mut connection).await?;
    }
    // Role and schema have one name, so that `"$user"` would put the tables of whoever looks inside among ours.
    sqlx::raw_sql("alter database millstream set search_path = public").execute(&mut connection).await?;
    connection.close().await
}

fn connect_options(socket: &Path, database: &str) -> PgConnectOptions {
    PgConnectOptions::new_without_pgpass()
        .socket(socket)
        .port(5432)
        .username(ROLE)
        .database(database)
        .ssl_mode(PgSslMode::Disable)
}

fn log_tail(log: &Path) -> String {
    let text = fs::read(log).unwrap_or_default();
    let cut = text.len().saturating_sub(LOG_TAIL_BYTES);
    let tail = String::from_utf8_lossy(&text[cut..]).into_owned();
    // From the first whole line on.
    let tail = if cut > 0 { tail.split_once('\n').map_or(tail.as_str(), |(_, rest)| rest) } else { &tail };
    if tail.trim().is_empty() { "(empty)".to_owned() } else { tail.trim().to_owned() }
}
