//! The parts of a running host, joined: sandbox, deployer and consumer.

use std::{
    collections::{BTreeMap, HashMap},
    path::{Path, PathBuf},
    sync::Arc,
};

use anyhow::{Context, Result};
use serde_json::json;
use tokio_util::sync::CancellationToken;

use super::record::Recorder;
use crate::{
    config::{self, Config},
    consumer::{Consumer, Counters},
    database::Database,
    deploy::{Deployer, Deployment},
    engine::{self, GroupHandle},
    sandbox::{GroupSettings, Sandbox, Settings},
};

/// See the module.
#[derive(Debug)]
pub struct Parts {
    sandbox: Arc<Sandbox>,
    deployer: Deployer,
    consumer: Consumer,
    counters: Arc<Counters>,
    recorder: Recorder,
    /// The policies that the groups run with.
    running: HashMap<String, Arc<config::Group>>,
    shutdown: CancellationToken,
}

impl Parts {
    /// Returns when every handler file has been loaded, refused or found missing, and the host has an identity.
    pub async fn start(database: &Database, config: &Config, config_file: &Path, cache: PathBuf) -> Result<Self> {
        let settings = Settings {
            cache_folder: Some(cache),
            compile_threads: config.host.compile_threads,
            file_bytes_max: config.host.component_max_bytes,
            ..Settings::default()
        };
        let sandbox = Sandbox::start(settings).await.context("start the sandbox")?;
        let shutdown = CancellationToken::new();
        let folder = config.host.handlers_folder(config_file);
        let deployer = Deployer::start(sandbox.clone(), folder, deployments(config)?, shutdown.clone()).await;
        let counters = Arc::new(Counters::default());
        counters.publish("sandbox", json!(sandbox.describe()));
        let consumer = Consumer::start(database, &config.host, &host_name(), Arc::clone(&counters))?;
        let recorder = Recorder::default();
        let mut parts = Self { sandbox, deployer, consumer, counters, recorder, running: HashMap::new(), shutdown };
        parts.publish(database).await;
        parts.consumer.alive().await;
        parts.publish(database).await; // what is deployed is recorded under the host's identity
        parts.run_groups(database, config).await?;
        Ok(parts)
    }

    /// Tells `status` about the handlers here, and records what has been deployed since the last time.
    pub async fn publish(&mut self, database: &Database) {
        let status = self.deployer.status();
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
                tracing::warn!("failed to look whether anything is left to do: {error:#}");
                false
            }
        }
    }

    /// Takes over a changed streams.toml. A group whose policy changed is drained and started again.
    pub async fn update(&mut self, database: &Database, config: &Config) {
        let updated = async {
            self.deployer.update_groups(deployments(config)?);
            self.run_groups(database, config).await
        };
        if let Err(error) = updated.await {
            tracing::error!("failed to take over streams.toml, the old one goes on: {error:#}");
        }
    }

    async fn run_groups(&mut self, database: &Database, config: &Config) -> Result<()> {
        let gone: Vec<String> =
            self.running.keys().filter(|name| !config.groups.contains_key(*name)).cloned().collect();
        for name in gone {
            self.running.remove(&name);
            self.consumer.stop_group(&name).await;
        }
        for group in engine::load_groups(database).await? {
            if config.groups.contains_key(&*group.name) && self.running.get(&*group.name) != Some(&group.policy) {
                self.run_group(group).await;
            }
        }
        Ok(())
    }

    async fn run_group(&mut self, group: GroupHandle) {
        if let Some(newest) = self.deployer.handler(&group.name) {
            self.running.insert(group.name.to_string(), Arc::clone(&group.policy));
            self.consumer.run_group(group, newest).await;
        }
    }

    /// Stops everything: what runs is finished or handed back.
    pub async fn drain(self) {
        self.consumer.drain().await;
        self.shutdown.cancel();
        self.deployer.join().await;
    }
}

/// Which file serves which group, with the group's bounds and grants. Fails when a secret is missing.
fn deployments(config: &Config) -> Result<BTreeMap<String, Deployment>> {
    let deployment = |(name, group): (&String, &config::Group)| {
        let settings = GroupSettings::from_config(config, name)?;
        Ok((name.clone(), Deployment { file: group.handler.clone(), settings: Arc::new(settings) }))
    };
    config.groups.iter().map(deployment).collect()
}

/// As people know this process: machine and process id.
fn host_name() -> String {
    let machine = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_else(|_| "host".to_owned());
    format!("{}:{}", machine.trim(), std::process::id())
}
