//! Which groups this host can run: those whose settings are complete. A group that lacks a secret waits for it, and its
//! messages with it; the others run. Secrets are read again now and then, so one that comes or changes needs no restart.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::Arc,
};

use anyhow::{Result, anyhow};

use crate::{
    config::Config,
    deploy::{Deployment, Status},
    sandbox::GroupSettings,
};

/// See the module. Invariant: each group of `config` is in `ready` or in `waiting`.
#[derive(Debug)]
pub struct Wanted {
    config: Arc<Config>,
    /// Of streams.toml: what a secret's file is relative to.
    folder: PathBuf,
    ready: BTreeMap<String, Deployment>,
    /// Groups that cannot run, and why.
    waiting: BTreeMap<String, String>,
    /// Groups whose secrets cannot be read any more, which go on with what they have.
    stale: BTreeMap<String, String>,
}

/// What reading brought, by group.
type Settings = BTreeMap<String, Result<GroupSettings>>;

impl Wanted {
    /// Reads all secrets. A group that lacks one is told once, as an error.
    pub async fn read(config: &Config, config_file: &Path) -> Self {
        let config = Arc::new(config.clone());
        let folder = config_file.parent().unwrap_or(Path::new("")).to_owned();
        let (ready, waiting, stale) = Default::default();
        let mut wanted = Self { config: config.clone(), folder, ready, waiting, stale };
        wanted.renew(config).await;
        wanted
    }

    /// Fails with everything that is missing.
    pub fn complete(&self) -> Result<()> {
        let missing: Vec<&str> = self.waiting.values().map(String::as_str).collect();
        if missing.is_empty() { Ok(()) } else { Err(anyhow!("{}", missing.join("\n"))) }
    }

    /// Takes over a changed streams.toml.
    pub async fn update(&mut self, config: &Config) {
        self.renew(Arc::new(config.clone())).await;
    }

    /// Reads the secrets again. Says whether anything is different now.
    pub async fn look_again(&mut self) -> bool {
        // Without secrets there is nothing that could change.
        if self.config.groups.values().all(|group| group.secrets.is_empty()) {
            return false;
        }
        self.renew(self.config.clone()).await
    }

    pub fn deployments(&self) -> BTreeMap<String, Deployment> {
        self.ready.clone()
    }

    /// Whether a group can run.
    pub fn holds(&self, group: &str) -> bool {
        self.ready.contains_key(group)
    }

    /// What `status` says about the groups that cannot.
    pub fn statuses(&self) -> impl Iterator<Item = (String, Status)> {
        self.waiting.iter().map(|(name, why)| {
            let file = self.config.groups.get(name).map(|group| group.handler.clone()).unwrap_or_default();
            (name.clone(), Status { file, last_error: Some(why.clone()), ..Status::default() })
        })
    }

    async fn renew(&mut self, config: Arc<Config>) -> bool {
        let (to_read, folder) = (config.clone(), self.folder.clone());
        // A secret may lie on a file system that is slow today.
        let reading = tokio::task::spawn_blocking(move || read(&to_read, &folder)).await;
        match reading {
            Ok(settings) => self.take_over(config, settings),
            Err(error) => {
                tracing::error!(%error, "failed to read the groups' secrets, the handlers go on as before");
                false
            }
        }
    }

    fn take_over(&mut self, config: Arc<Config>, settings: Settings) -> bool {
        let (before, waited) = (std::mem::take(&mut self.ready), std::mem::take(&mut self.waiting));
        let mut stale = std::mem::take(&mut self.stale);
        stale.retain(|name, _| settings.contains_key(name));
        let mut has_changed = before.keys().any(|name| !settings.contains_key(name));
        for (name, settings) in settings {
            let file = config.groups.get(&name).map(|group| group.handler.clone()).unwrap_or_default();
            let old = before.get(&name);
            let unchanged = config.groups.get(&name) == self.config.groups.get(&name);
            match (settings, old) {
                (Ok(settings), old) => {
                    stale.remove(&name);
                    let same = old.filter(|old| old.settings.is_same(&settings));
                    let settings = same.map_or_else(|| Arc::new(settings), |same| same.settings.clone());
                    has_changed |= same.is_none_or(|same| same.file != file);
                    if waited.contains_key(&name) {
                        tracing::info!(group = name, "its secrets are there now");
                    }
                    self.ready.insert(name, Deployment { file, settings });
                }
                // A file that is being replaced, or was: what the group runs with is no worse than it was.
                (Err(error), Some(old)) if unchanged => {
                    let why = format!("{error:#}");
                    if stale.get(&name) != Some(&why) {
                        tracing::warn!(group = name, "failed to {why}; it goes on with the secrets it has");
                        stale.insert(name.clone(), why);
                    }
                    self.ready.insert(name, old.clone());
                }
                (Err(error), _) => {
                    let why = format!("{error:#}");
                    has_changed |= old.is_some();
                    if waited.get(&name) != Some(&why) {
                        tracing::error!(group = name, "failed to {why}; the group waits for it, the others run");
                    }
                    self.waiting.insert(name, why);
                }
            }
        }
        (self.stale, self.config) = (stale, config);
        has_changed
    }
}

fn read(config: &Config, folder: &Path) -> Settings {
    let settings = |name: &String| (name.clone(), GroupSettings::from_config(config, name, folder));
    config.groups.keys().map(settings).collect()
}
