//! What the scenarios stand on: a schema of its own, a sandbox, the handler, and fresh streams.

use std::{path::Path, sync::Arc, time::Duration};

use anyhow::{Context, Result, ensure};
use tokio::sync::watch;

use super::{
    super::{
        Global,
        open::{Opened, data_folder, open},
    },
    Bench,
};
use crate::{
    config::{self, Config, Instance},
    consumer::{Consumer, Counters},
    database::Database,
    engine::{self, GroupHandle, NewEntry, floor},
    handler::{Handler, NewMessage},
    sandbox::{Compiled, GroupSettings, Sandbox, Settings},
};

/// See the module.
pub struct Stage {
    pub database: Database,
    pub sandbox: Arc<Sandbox>,
    compiled: Arc<Compiled>,
    opened: Opened,
}

/// Messages of one produce: the size at which the design is held to its bars.
pub const BATCH: usize = 250;

/// How many messages one shared connection pool lets the scenarios use.
const CONNECTIONS: u32 = 16;

impl Stage {
    pub async fn open(global: &Global, bench: &Bench) -> Result<Self> {
        let config = global.load_config()?;
        let folder = config.host.handlers_folder(&global.config);
        let file = bench.handler.clone().unwrap_or_else(|| folder.join("noop.wasm"));
        let bytes = std::fs::read(&file).with_context(|| {
            format!("read {}; `make handlers` builds it, or name another with --handler", file.display())
        })?;
        let own = config::Database {
            schema: format!("millstream_bench_{}", std::process::id()),
            max_connections: CONNECTIONS,
            ..config.database
        };
        let settings = Settings { cache_folder: Some(data_folder(global).join("cache")), ..Settings::default() };
        let sandbox = Sandbox::start(settings).await?;
        let compiled = sandbox.load(&file.display().to_string(), bytes).await?;
        let opened = open(global, &own).await?;
        floor::create(&opened.database).await.context("make the bare table")?;
        Ok(Self { database: opened.database.clone(), sandbox, compiled, opened })
    }

    /// Machine and database, for whoever reads the figures later.
    pub async fn describe(&self) -> Result<String> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Ok(format!("{cores} cores shared by Postgres, host and load; {}", self.database))
    }

    pub async fn close(self) -> Result<()> {
        floor::drop_schema(&self.database).await.context("drop the bench's schema")?;
        self.opened.close().await
    }

    /// A new stream with a group, both called `name`.
    pub async fn group(&self, name: &str, instance: Instance) -> Result<(Config, GroupHandle)> {
        self.group_with(name, |config| config.groups.values_mut().for_each(|group| group.instance = instance)).await
    }

    /// The same, declared as `edit` leaves it.
    pub async fn group_with(&self, name: &str, edit: impl FnOnce(&mut Config)) -> Result<(Config, GroupHandle)> {
        let text = include_str!("bench.toml")
            .replace("bench]", &format!("{name}]"))
            .replace("\"bench\"", &format!("\"{name}\""));
        let mut config = config::parse(&text, Path::new("bench.toml"), &|_| None)?;
        edit(&mut config);
        engine::apply(&self.database, &config).await?;
        let groups = engine::load_groups(&self.database).await?;
        let group = groups.into_iter().find(|group| &*group.name == name).context("find the bench's group")?;
        Ok((config, group))
    }

    /// The handler under measurement, as the group's.
    pub fn handler(&self, config: &Config, group: &GroupHandle) -> Result<Arc<dyn Handler>> {
        let settings = Arc::new(GroupSettings::from_config(config, &group.name, Path::new(""))?);
        Ok(Arc::new(self.sandbox.handler(Arc::clone(&self.compiled), settings)))
    }

    /// A host that runs the group. Everything it does to the database is counted in `statements`.
    pub async fn host(&self, config: &Config, group: &GroupHandle, handler: Arc<dyn Handler>) -> Result<Host> {
        let counters = Arc::new(Counters::default());
        let mut consumer = Consumer::start(&self.database, &config.host, "bench", Arc::clone(&counters))?;
        consumer.alive().await;
        let (sender, newest) = watch::channel(Some(handler));
        consumer.run_group(group.clone(), newest);
        Ok(Host { consumer, counters, _sender: sender })
    }

    /// Produces one batch in a transaction of its own.
    pub async fn produce(&self, stream: &str, batch: &[NewMessage]) -> Result<()> {
        let entries: Vec<_> = batch.iter().map(|message| NewEntry { message, deliver_after: None }).collect();
        let mut tx = self.database.begin().await?;
        engine::produce(&self.database, &mut tx, stream, &entries).await?;
        tx.commit().await?;
        Ok(())
    }

    /// Waits until the group has nothing left.
    pub async fn drained(&self, group: &GroupHandle, limit: Duration) -> Result<()> {
        let started = std::time::Instant::now();
        let names = [group.name.to_string()];
        while engine::has_unfinished(&self.database, &names).await? {
            ensure!(started.elapsed() < limit, "the group does not come to an end within {} s", limit.as_secs());
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        Ok(())
    }
}

/// A running host, and who keeps its handler.
pub struct Host {
    pub consumer: Consumer,
    pub counters: Arc<Counters>,
    _sender: watch::Sender<Option<Arc<dyn Handler>>>,
}

impl std::fmt::Debug for Host {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Host").field("consumer", &self.consumer).finish_non_exhaustive()
    }
}

impl std::fmt::Debug for Stage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Stage").field("database", &self.database).finish_non_exhaustive()
    }
}

pub fn plain(payload: Vec<u8>) -> NewMessage {
    NewMessage { payload: Some(payload), ..NewMessage::default() }
}
