//! The parts of a running host, joined: sandbox, deployer and consumer.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    sync::Arc,
};

use anyhow::{Context, Result};
use serde_json::json;
use tokio_util::sync::CancellationToken;

use super::{record::Recorder, wanted::Wanted};
use crate::{
    config::{self, Config},
    consumer::{Consumer, Counters},
    database::{Database, told},
    deploy::{Deployer, Status},
    engine::{self, GroupHandle, GroupId},
    sandbox::{Sandbox, Settings},
};

/// See the module.
#[derive(Debug)]
pub struct Parts {
    sandbox: Arc<Sandbox>,
    deployer: Deployer,
    consumer: Consumer,
    counters: Arc<Counters>,
    recorder: Recorder,
    /// The groups that streams.toml of this host names.
    wanted: Wanted,
    /// What the groups run with: as the database said when they were started.
    running: HashMap<String, Declared>,
    shutdown: CancellationToken,
}

/// A group that differs in any of these is started again.
#[derive(Debug, PartialEq)]
struct Declared {
    id: GroupId,
    policy: Arc<config::Group>,
}

impl Declared {
    fn of(group: &GroupHandle) -> Self {
        Self { id: group.id, policy: Arc::clone(&group.policy) }
    }
}

impl Parts {
    /// Returns when every handler file has been loaded, refused or found missing, and the host has an identity.
    pub async fn start(
        database: &Database,
        name: &str,
        config: &Config,
        config_file: &Path,
        cache: PathBuf,
        wanted: Wanted,
    ) -> Result<Self> {
        let settings = Settings {
            cache_folder: Some(cache),
            compile_threads: config.host.compile_threads,
            file_bytes_max: config.host.component_max_bytes,
            authorities_file: std::env::var_os("SSL_CERT_FILE").filter(|file| !file.is_empty()).map(PathBuf::from),
            ..Settings::default()
        };
        let sandbox = Sandbox::start(settings).await.context("start the sandbox")?;
        let shutdown = CancellationToken::new();
        let folder = config.host.handlers_folder(config_file);
        let deployer = Deployer::start(sandbox.clone(), folder, wanted.deployments(), shutdown.clone()).await;
        let counters = Arc::new(Counters::default());
        counters.publish("sandbox", json!(sandbox.describe()));
        let consumer = Consumer::start(database, &config.host, name, Arc::clone(&counters))?;
        let recorder = Recorder::default();
        let running = HashMap::new();
        let mut parts = Self { sandbox, deployer, consumer, counters, recorder, wanted, running, shutdown };
        parts.publish(database).await;
        parts.consumer.alive().await;
        parts.publish(database).await; // what is deployed is recorded under the host's identity
        parts.follow(database).await?;
        Ok(parts)
    }

    /// Tells `status` about the handlers here, and records what has been deployed since the last time.
    pub async fn publish(&mut self, database: &Database) {
        let mut status = self.deployer.status();
        status.extend(self.wanted.statuses());
        self.counters.publish("handlers", json!(status));
        if let Some(host) = self.consumer.host() {
            self.recorder.record(database, host, &self.deployer, &status).await;
        }
    }

    pub fn describe(&self) -> &str {
        self.sandbox.describe()
    }

    /// Whether the groups of this host have nothing left to do, retries that are not due yet included.
    pub async fn is_drained(&self, database: &Database) -> bool {
        let groups: Vec<String> = self.running.keys().cloned().collect();
        match engine::has_unfinished(database, &groups).await {
            Ok(unfinished) => !unfinished,
            Err(error) => {
                tracing::warn!("failed to look whether anything is left to do: {}", told(&error));
                false
            }
        }
    }

    /// The groups of streams.toml: those that a handler serves, and those whose file or secret is not there or no good.
    pub fn served_and_waiting(&self) -> (Vec<String>, Vec<String>) {
        let status = self.deployer.status().into_iter().chain(self.wanted.statuses());
        let (served, waiting): (Vec<_>, Vec<_>) = status.partition(|(_, status)| status.digest.is_some());
        let names = |groups: Vec<(String, Status)>| groups.into_iter().map(|(name, _)| name).collect();
        (names(served), names(waiting))
    }

    /// Takes over a changed streams.toml.
    pub async fn update(&mut self, config: &Config) {
        self.wanted.update(config).await;
        self.deployer.update_groups(self.wanted.deployments());
    }

    /// Takes over secrets that came or changed since the last look.
    pub async fn look_for_secrets(&mut self) {
        if self.wanted.look_again().await {
            self.deployer.update_groups(self.wanted.deployments());
        }
    }

    /// Runs the groups as the database declares them, whichever host declared them so. One that changed is drained and
    /// started again; one that is no longer declared, or no longer named here, is drained.
    pub async fn follow(&mut self, database: &Database) -> Result<()> {
        let mut groups = engine::load_groups(database).await?;
        groups.retain(|group| self.wanted.holds(&group.name));
        let (running, consumer) = (&mut self.running, &mut self.consumer);
        running.retain(|name, _| {
            let stays = groups.iter().any(|group| *group.name == **name);
            if !stays {
                consumer.stop_group(name);
            }
            stays
        });
        for group in groups {
            let declared = Declared::of(&group);
            if running.get(&*group.name) != Some(&declared)
                && let Some(newest) = self.deployer.handler(&group.name)
            {
                running.insert(group.name.to_string(), declared);
                consumer.run_group(group, newest);
            }
        }
        Ok(())
    }

    /// Stops everything: what runs is finished or handed back.
    pub async fn drain(self) {
        self.consumer.drain().await;
        self.shutdown.cancel();
        self.deployer.join().await;
    }
}
