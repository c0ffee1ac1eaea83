//! What one group grants and allows its handler, with its secrets read. Made when a handler is loaded, not for each
//! message.

use std::{collections::BTreeMap, env, fs, sync::Arc};

use anyhow::{Context, bail};

use super::output::GroupRate;
use crate::config::{Config, Instance, Limits, Secret};

/// Longest secret we read from a file; a bigger one is surely the wrong file.
const SECRET_BYTES_MAX: u64 = 64 * 1024;

/// The bounds and grants of one group's handler.
pub struct GroupSettings {
    pub group: Arc<str>,
    pub memory_bytes: u64,
    pub instance: Instance,
    pub max_reuse: u32,
    pub limits: Limits,
    /// Streams it may produce to, each with its largest payload; `None` where the stream is not in streams.toml.
    pub produce: BTreeMap<String, Option<u64>>,
    pub config: BTreeMap<String, String>,
    /// Config and secrets, as the guest's environment. Never printed.
    pub environment: Vec<(String, String)>,
    pub(super) rate: Arc<GroupRate>,
}

impl std::fmt::Debug for GroupSettings {
    /// Never prints the environment: it holds secrets.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GroupSettings").field("group", &self.group).finish_non_exhaustive()
    }
}

impl GroupSettings {
    /// Reads the group's secrets from where streams.toml says. Fails when one is missing.
    pub fn from_config(config: &Config, group: &str) -> anyhow::Result<Self> {
        let settings = config.groups.get(group).with_context(|| format!("find groups.{group} in streams.toml"))?;
        let produce = settings.allow.produce.iter().map(|stream| {
            let payload_bytes_max = config.streams.get(stream).map(|stream| stream.max_payload_bytes);
            (stream.clone(), payload_bytes_max)
        });
        let mut environment: BTreeMap<String, String> = settings.config.clone();
        for (name, secret) in &settings.secrets {
            let value = read_secret(secret).with_context(|| format!("read groups.{group}.secrets.{name}"))?;
            environment.insert(name.clone(), value);
        }
        Ok(Self {
            group: group.into(),
            memory_bytes: settings.memory_bytes,
            instance: settings.instance,
            max_reuse: settings.max_reuse,
            limits: settings.limits,
            produce: produce.collect(),
            config: settings.config.clone(),
            environment: environment.into_iter().collect(),
            rate: Arc::default(),
        })
    }
}

/// The value itself never becomes part of an error.
fn read_secret(secret: &Secret) -> anyhow::Result<String> {
    match secret {
        Secret::Env(variable) => match env::var(variable) {
            Ok(value) => Ok(value),
            Err(env::VarError::NotPresent) => {
                bail!("environment variable {variable} is not set: export it before `up`")
            }
            Err(env::VarError::NotUnicode(_)) => bail!("environment variable {variable} is not UTF-8"),
        },
        Secret::File(path) => {
            let length = fs::metadata(path).with_context(|| format!("look at {}", path.display()))?.len();
            if length > SECRET_BYTES_MAX {
                bail!("{} has {length} bytes; a secret has at most {SECRET_BYTES_MAX}", path.display());
            }
            let value = fs::read_to_string(path).with_context(|| format!("read {}", path.display()))?;
            // Editors and `echo` end a file with a line feed that is no part of the secret.
            Ok(value.strip_suffix('\n').map_or(value.as_str(), |line| line.trim_end_matches('\r')).to_owned())
        }
    }
}
