//! What one group grants and allows its handler, with its secrets read. Made when a handler is loaded, not for each
//! message.

use std::{collections::BTreeMap, path::Path, sync::Arc};

use anyhow::{Context, bail};
use tokio::sync::Semaphore;
use wasmtime_wasi_config::WasiConfigVariables;

use super::{calls::AllowList, output::GroupRate};
use crate::config::{Config, Instance, Limits};

/// The bounds and grants of one group's handler.
pub struct GroupSettings {
    pub group: Arc<str>,
    pub memory_bytes: u64,
    pub instance: Instance,
    pub max_reuse: u32,
    pub limits: Limits,
    /// Streams it may produce to, each with its largest payload; `None` where the stream is not in streams.toml.
    pub produce: BTreeMap<String, Option<u64>>,
    /// What it may call.
    pub(super) http: AllowList,
    /// Config and secrets, as the guest's environment. Never printed.
    environment: Vec<(String, String)>,
    /// One for each HTTP call at a time.
    pub(super) calls: Arc<Semaphore>,
    pub(super) rate: Arc<GroupRate>,
}

impl std::fmt::Debug for GroupSettings {
    /// Never prints the environment: it holds secrets.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GroupSettings").field("group", &self.group).finish_non_exhaustive()
    }
}

impl GroupSettings {
    /// Reads the group's secrets from where streams.toml says; `folder` is the one that streams.toml is in.
    ///
    /// # Errors
    /// Names every secret that is missing, where it was looked for and what to do; never a value.
    pub fn from_config(config: &Config, group: &str, folder: &Path) -> anyhow::Result<Self> {
        let settings = config.groups.get(group).with_context(|| format!("find groups.{group} in streams.toml"))?;
        let produce = settings.allow.produce.iter().map(|stream| {
            let payload_bytes_max = config.streams.get(stream).map(|stream| stream.max_payload_bytes);
            (stream.clone(), payload_bytes_max)
        });
        let http = AllowList::parse(&settings.allow.http).with_context(|| format!("read groups.{group}.allow.http"))?;
        let mut environment = settings.config.clone();
        let mut missing = Vec::new();
        for (name, secret) in &settings.secrets {
            match secret.read(folder) {
                Ok(value) => drop(environment.insert(name.clone(), value)),
                Err(error) => missing.push(format!("read groups.{group}.secrets.{name}: {error:#}")),
            }
        }
        if !missing.is_empty() {
            bail!("{}", missing.join("; "));
        }
        Ok(Self {
            group: group.into(),
            memory_bytes: settings.memory_bytes,
            instance: settings.instance,
            max_reuse: settings.max_reuse,
            limits: settings.limits,
            produce: produce.collect(),
            http,
            environment: environment.into_iter().collect(),
            calls: Arc::new(Semaphore::new(settings.limits.http_connections as usize)),
            rate: Arc::default(),
        })
    }

    /// Whether a handler with these settings is the same to its guest as one with `other`.
    pub fn is_same(&self, other: &Self) -> bool {
        (&self.group, self.memory_bytes, self.instance, self.max_reuse, self.limits)
            == (&other.group, other.memory_bytes, other.instance, other.max_reuse, other.limits)
            && self.produce == other.produce
            && self.http == other.http
            && self.environment == other.environment
    }

    /// Config and secrets, for the guest alone.
    pub(super) fn environment(&self) -> &[(String, String)] {
        &self.environment
    }

    /// The same for wasi:config, which works on every target.
    pub(super) fn variables(&self) -> WasiConfigVariables {
        self.environment.iter().cloned().collect()
    }
}
