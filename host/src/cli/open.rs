//! Opens the database that a verb works on: given by flag, environment or streams.toml, else the project's own.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::Global;
use crate::{
    config,
    database::{Connect, Database, Sources, Target, embedded, migrate},
};

/// An open database, and the server behind it when this process runs it.
#[derive(Debug)]
pub struct Opened {
    pub database: Database,
    pub server: Option<embedded::Server>,
}

impl Opened {
    /// Closes the connections, then stops the server if it is ours.
    pub async fn close(self) -> Result<()> {
        self.database.close().await;
        match self.server {
            Some(server) => server.stop().await.context("stop Postgres"),
            None => Ok(()),
        }
    }
}

/// The project's own folder, beside its streams.toml: the own Postgres, and the cache of compiled handlers.
pub fn data_folder(global: &Global) -> PathBuf {
    match global.config.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.join(".millstream"),
        _ => Path::new(".millstream").to_owned(),
    }
}

/// Opens the database of a verb, and brings it to the schema this program needs. A project's own Postgres that another
/// process runs is shared; one that does not run is started, for as long as the verb takes.
pub async fn open(global: &Global, config: &config::Database) -> Result<Opened> {
    let folder = data_folder(global);
    match target(global, config)? {
        Target::Given(connect) => finish(&connect, config, None).await,
        Target::Own => match embedded::find_running(&folder).await? {
            Some(connect) => finish(&connect, config, None).await,
            None => own(&folder, config).await,
        },
    }
}

/// The same without a look at the schema: for verbs that only tell what is missing.
pub async fn open_as_is(global: &Global, config: &config::Database) -> Result<Opened> {
    let folder = data_folder(global);
    let (connect, server) = match target(global, config)? {
        Target::Given(connect) => (*connect, None),
        Target::Own => match embedded::find_running(&folder).await? {
            Some(connect) => (connect, None),
            None => start(&folder).await.map(|server| (server.connect(), Some(server)))?,
        },
    };
    let database = Database::connect(&connect, config.max_connections, &config.schema).await?;
    Ok(Opened { database, server })
}

/// The database as far as it can be reached without starting a server, and without a look at its schema. `None`: it is
/// the project's own, which does not run.
pub async fn reach(global: &Global, config: &config::Database) -> Result<Option<Database>> {
    let connect = match target(global, config)? {
        Target::Given(connect) => *connect,
        Target::Own => match embedded::find_running(&data_folder(global)).await? {
            Some(connect) => connect,
            None => return Ok(None),
        },
    };
    Database::connect(&connect, config.max_connections, &config.schema).await.map(Some)
}

/// Opens the database of a host, which owns the project's Postgres if it needs one. `name` is shown to people.
pub async fn open_for_host(global: &Global, config: &config::Database, name: &str) -> Result<Opened> {
    let opened = match target(global, config)? {
        Target::Given(connect) => finish(&connect, config, None).await?,
        Target::Own => own(&data_folder(global), config).await?,
    };
    let database = opened.database.of_host(name);
    opened.database.close().await;
    Ok(Opened { database, ..opened })
}

async fn own(folder: &Path, config: &config::Database) -> Result<Opened> {
    let server = start(folder).await?;
    let connect = server.connect();
    finish(&connect, config, Some(server)).await
}

async fn start(folder: &Path) -> Result<embedded::Server> {
    embedded::Server::start(embedded::Options { folder: folder.to_owned(), throw_away: false }).await
}

async fn finish(connect: &Connect, config: &config::Database, server: Option<embedded::Server>) -> Result<Opened> {
    let database = Database::connect(connect, config.max_connections, &config.schema).await?;
    migrate(&database).await?;
    Ok(Opened { database, server })
}

fn target(global: &Global, config: &config::Database) -> Result<Target> {
    Target::choose(Sources {
        flag: global.database_url.as_deref(),
        environment: &|name| std::env::var(name).ok(),
        file: config.url.as_deref(),
    })
}
