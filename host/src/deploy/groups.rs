//! Which handler serves which group right now: the one thing that the watching task, the consumer and `status` share.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::SystemTime,
};

use serde::Serialize;
use tokio::sync::watch;

use crate::{
    handler::Handler,
    sandbox::{Compiled, GroupSettings, Sandbox},
};

/// What a consumer follows: the newest handler, `None` until there is one.
pub type Newest = watch::Receiver<Option<Arc<dyn Handler>>>;

/// What streams.toml says about one group's handler.
#[derive(Clone, Debug)]
pub struct Deployment {
    /// File name inside the handlers folder.
    pub file: String,
    pub settings: Arc<GroupSettings>,
}

impl Deployment {
    fn is_same(&self, other: &Self) -> bool {
        self.file == other.file && Arc::ptr_eq(&self.settings, &other.settings)
    }
}

/// What `status` says about one group's handler.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Status {
    pub file: String,
    /// sha256 of the file that serves; `None` while nothing does.
    pub digest: Option<String>,
    /// Milliseconds since 1970-01-01 UTC.
    pub loaded_at_ms: Option<u64>,
    /// How often another file took over.
    pub reloads: u64,
    /// Why the file that lies there now does not serve.
    pub last_error: Option<String>,
}

struct Group {
    deployment: Deployment,
    newest: watch::Sender<Option<Arc<dyn Handler>>>,
    status: Status,
}

/// All groups, and what was loaded for them.
pub struct Groups {
    sandbox: Arc<Sandbox>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    groups: BTreeMap<String, Group>,
    /// What serves, by file name.
    compiled: BTreeMap<String, Arc<Compiled>>,
}

impl Groups {
    pub fn new(sandbox: Arc<Sandbox>) -> Self {
        Self { sandbox, state: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes over what streams.toml says now. A group whose file already serves goes on with its new settings at once; one
    /// for which nothing changed keeps its handler, and with it the instances that are kept for reuse.
    pub fn update(&self, deployments: BTreeMap<String, Deployment>) {
        let mut state = self.state();
        let State { groups, compiled } = &mut *state;
        groups.retain(|name, _| deployments.contains_key(name));
        for (name, deployment) in deployments {
            if groups.get(&name).is_some_and(|group| group.deployment.is_same(&deployment)) {
                continue;
            }
            let handler = compiled.get(&deployment.file).map(|compiled| {
                let handler = self.sandbox.handler(compiled.clone(), deployment.settings.clone());
                (Arc::new(handler) as Arc<dyn Handler>, compiled.digest.to_string())
            });
            let group = groups.entry(name).or_insert_with(|| Group {
                deployment: deployment.clone(),
                newest: watch::Sender::new(None),
                status: Status::default(),
            });
            group.status.file.clone_from(&deployment.file);
            group.deployment = deployment;
            if let Some((handler, digest)) = handler {
                group.newest.send_replace(Some(handler));
                group.status.last_error = None;
                if group.status.digest.as_ref() != Some(&digest) {
                    group.status.note_loaded(digest);
                }
            }
        }
        let used: Vec<&String> = groups.values().map(|group| &group.deployment.file).collect();
        compiled.retain(|file, _| used.contains(&file));
    }

    /// The file names that groups use, each once.
    pub fn files(&self) -> Vec<String> {
        let mut files: Vec<String> = self.state().groups.values().map(|group| group.deployment.file.clone()).collect();
        files.sort();
        files.dedup();
        files
    }

    /// Whether something serves that was loaded from this file.
    pub fn has(&self, file: &str) -> bool {
        self.state().compiled.contains_key(file)
    }

    pub fn newest(&self, group: &str) -> Option<Newest> {
        self.state().groups.get(group).map(|group| group.newest.subscribe())
    }

    pub fn status(&self) -> BTreeMap<String, Status> {
        self.state().groups.iter().map(|(name, group)| (name.clone(), group.status.clone())).collect()
    }

    /// A file was loaded: its groups use it for new deliveries. Deliveries that run keep the old one alive.
    pub fn install(&self, file: &str, loaded: &Arc<Compiled>) {
        let mut state = self.state();
        if !state.groups.values().any(|group| group.deployment.file == file) {
            // Its last group went while it was loaded.
            return;
        }
        state.compiled.insert(file.to_owned(), loaded.clone());
        for (name, group) in state.groups.iter_mut().filter(|(_, group)| group.deployment.file == file) {
            let handler = self.sandbox.handler(loaded.clone(), group.deployment.settings.clone());
            group.newest.send_replace(Some(Arc::new(handler)));
            group.status.last_error = None;
            let (group, new_digest) = (&mut group.status, &loaded.digest);
            match group.digest.as_ref() {
                Some(old_digest) => {
                    tracing::info!(group = %name, file, %old_digest, %new_digest, "handler replaced");
                }
                None => tracing::info!(group = %name, file, %new_digest, "handler deployed"),
            }
            group.note_loaded(new_digest.to_string());
        }
    }

    /// What lies in the folder does not serve, and why. Says whether an older version serves instead.
    pub fn note_error(&self, file: &str, why: &str) -> Serving {
        let mut state = self.state();
        for group in state.groups.values_mut().filter(|group| group.deployment.file == file) {
            group.status.last_error = Some(why.to_owned());
        }
        if state.compiled.contains_key(file) { Serving::Older } else { Serving::Nothing }
    }

    /// The file that serves lies in the folder; answers whether that is news.
    pub fn clear_error(&self, file: &str) -> bool {
        let mut is_news = false;
        for group in self.state().groups.values_mut().filter(|group| group.deployment.file == file) {
            is_news |= group.status.last_error.take().is_some();
        }
        is_news
    }
}

/// What serves while the file in the folder does not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Serving {
    Older,
    Nothing,
}

impl Status {
    fn note_loaded(&mut self, digest: String) {
        if self.digest.replace(digest).is_some() {
            self.reloads += 1;
        }
        let since_1970 = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        self.loaded_at_ms = u64::try_from(since_1970.as_millis()).ok();
    }
}
