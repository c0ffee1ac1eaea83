//! Decides which handler file serves which group, and replaces it while it runs. Watches the handlers folder; never
//! touches a message, a database or what is inside a file.
//!
//! An event only means "look again": every look reads all files that groups use and compares what they are with what
//! serves. So lost, doubled and meaningless events do no harm, and a slow look without any event finds everything too.

mod candidate;
mod groups;
mod read;
mod strays;
mod watch;

use std::{
    collections::BTreeMap,
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::{
    sync::{Notify, oneshot},
    task::JoinSet,
    time::{sleep, timeout},
};
use tokio_util::sync::CancellationToken;

pub use self::groups::{Deployment, Newest, Status};
use self::{
    candidate::{Candidate, DEBOUNCE, Decision, Seen},
    groups::{Groups, Serving},
    read::Stamp,
    strays::Strays,
    watch::FolderWatch,
};
use crate::{
    config::nearest,
    sandbox::{Compiled, LoadError, Sandbox},
};

/// How often all files are looked at without an event. Bounds how late a change is found where events are lost.
const SLOW_LOOK: Duration = Duration::from_secs(2);

/// Serves each group the newest good handler of the folder.
pub struct Deployer {
    folder: PathBuf,
    bytes_max: u64,
    groups: Arc<Groups>,
    changed: Arc<Notify>,
    tasks: JoinSet<()>,
}

impl std::fmt::Debug for Deployer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Deployer").field("status", &self.status()).finish_non_exhaustive()
    }
}

impl Deployer {
    /// Starts watching, and returns when every file has been loaded, refused or found missing. Ends with `shutdown`.
    pub async fn start(
        sandbox: Arc<Sandbox>,
        folder: PathBuf,
        deployments: BTreeMap<String, Deployment>,
        shutdown: CancellationToken,
    ) -> Self {
        let groups = Arc::new(Groups::new(sandbox.clone()));
        groups.update(deployments);
        let changed = Arc::new(Notify::new());
        let bytes_max = sandbox.file_bytes_max();
        let (first_done, first_look) = oneshot::channel();
        let watcher = Watching {
            watch: FolderWatch::new(folder.clone(), changed.clone()),
            strays: Strays::default(),
            sandbox,
            folder: folder.clone(),
            groups: groups.clone(),
            changed: changed.clone(),
            files: BTreeMap::new(),
            loads: JoinSet::new(),
            first_done: Some(first_done),
        };
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            let _ = shutdown.run_until_cancelled(watcher.run()).await;
        });
        // An error means that the watcher was shut down before its first look ended.
        let _ = first_look.await;
        Self { folder, bytes_max, groups, changed, tasks }
    }

    /// Follows the handler of a group; `None` for a group that is not in streams.toml. Use the newest for each new
    /// delivery; one that runs keeps its own.
    pub fn handler(&self, group: &str) -> Option<Newest> {
        self.groups.newest(group)
    }

    /// Every group's handler as of now.
    pub fn status(&self) -> BTreeMap<String, Status> {
        self.groups.status()
    }

    /// The bytes of a file, if it still is what `digest` names: they are read again, not kept in memory.
    pub async fn bytes(&self, file: &str, digest: &str) -> Option<Vec<u8>> {
        let (path, bytes_max) = (self.folder.join(file), self.bytes_max);
        match tokio::task::spawn_blocking(move || read::read(&path, bytes_max)).await {
            Ok((Seen::File { digest: seen, .. }, bytes)) if *seen == *digest => Some(bytes),
            _ => None,
        }
    }

    /// Takes over what streams.toml says now. A group that is gone closes its receivers.
    pub fn update_groups(&self, deployments: BTreeMap<String, Deployment>) {
        self.groups.update(deployments);
        self.changed.notify_one();
    }

    /// Waits for the watching to end; call it after `shutdown`.
    pub async fn join(mut self) {
        while let Some(ended) = self.tasks.join_next().await {
            if let Err(error) = ended {
                tracing::error!(%error, "failed to watch handlers to the end");
            }
        }
    }
}

/// One file that groups use.
#[derive(Default)]
struct Watched {
    candidate: Candidate,
    stamp: Option<Stamp>,
    /// It wants another look soon.
    pending: bool,
}

/// Why a look happens.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Cause {
    /// Something happened: every file is read.
    Event,
    /// Nothing happened that we know of: a file is read when its stamp differs.
    Slow,
}

/// The task that looks.
struct Watching {
    sandbox: Arc<Sandbox>,
    folder: PathBuf,
    groups: Arc<Groups>,
    watch: FolderWatch,
    strays: Strays,
    changed: Arc<Notify>,
    files: BTreeMap<String, Watched>,
    /// Loads under way: the file, and what came of it.
    loads: JoinSet<(String, Result<Arc<Compiled>, LoadError>)>,
    /// Told when everything has been looked at for the first time.
    first_done: Option<oneshot::Sender<()>>,
}

impl Watching {
    async fn run(mut self) {
        let mut cause = Cause::Event;
        self.look_for_strays();
        loop {
            self.watch.renew();
            self.look_at_all(cause).await;
            if cause == Cause::Slow {
                self.look_for_strays();
            }
            if !self.is_pending() && self.loads.is_empty() {
                self.first_done.take().map(|done| done.send(()));
            }
            // A storm of events costs one look each time, no more.
            self.wait_for_load(DEBOUNCE).await;
            cause = if self.is_pending() { Cause::Event } else { self.wait_for_event().await };
        }
    }

    /// Whether a file wants another look soon.
    fn is_pending(&self) -> bool {
        self.files.values().any(|file| file.pending)
    }

    /// Sleeps; takes in loads that end meanwhile.
    async fn wait_for_load(&mut self, duration: Duration) {
        let mut sleep = std::pin::pin!(sleep(duration));
        loop {
            tokio::select! {
                () = &mut sleep => return,
                Some(ended) = self.loads.join_next() => self.take_in(ended),
            }
        }
    }

    async fn wait_for_event(&mut self) -> Cause {
        tokio::select! {
            Some(ended) = self.loads.join_next() => {
                self.take_in(ended);
                Cause::Event
            }
            event = timeout(SLOW_LOOK, self.changed.notified()) => match event {
                Ok(()) => Cause::Event,
                Err(_) => Cause::Slow,
            },
        }
    }

    async fn look_at_all(&mut self, cause: Cause) {
        let names = self.groups.files();
        self.files.retain(|name, _| names.contains(name));
        for name in names {
            let path = self.folder.join(&name);
            let stamp = read::stamp(&path);
            let file = self.files.entry(name.clone()).or_default();
            if file.candidate.is_serving() && !self.groups.has(&name) {
                // Its last group went and came back between two looks: what served was let go.
                *file = Watched::default();
            }
            if cause == Cause::Slow && !file.pending && stamp.is_some() && file.stamp == stamp {
                continue;
            }
            let bytes_max = self.sandbox.file_bytes_max();
            let reading = tokio::task::spawn_blocking(move || read::read(&path, bytes_max)).await;
            let Ok((seen, bytes)) = reading else { continue };
            file.stamp = stamp;
            let decision = file.candidate.look(seen.clone(), Instant::now());
            file.pending = decision == Decision::LookAgain;
            self.act(&name, decision, &seen, bytes);
        }
    }

    fn look_for_strays(&mut self) {
        let names = self.groups.files();
        for stray in self.strays.look(strays::unused(&self.folder, &[]), &names) {
            let meant = meant_instead(nearest(&stray, names.iter().map(String::as_str)));
            tracing::info!("{stray} came into {}, and no group uses it{meant}", self.folder.display());
        }
    }

    fn act(&mut self, name: &str, decision: Decision, seen: &Seen, bytes: Vec<u8>) {
        match decision {
            Decision::LookAgain => {}
            Decision::Nothing => {
                if let Seen::File { digest, .. } = seen
                    && self.files.get(name).is_some_and(|file| file.candidate.serves(digest))
                    && self.groups.clear_error(name)
                {
                    tracing::info!("{name} is again the version that serves");
                }
            }
            Decision::Load => {
                let (sandbox, name) = (self.sandbox.clone(), name.to_owned());
                self.loads.spawn(async move {
                    let loaded = sandbox.load(&name, bytes).await;
                    (name, loaded)
                });
            }
            Decision::ReportMissing => self.report_missing(name),
            Decision::Report(why) => match self.groups.note_error(name, &format!("{name} {why}")) {
                Serving::Older => tracing::error!("{name} {why}; the version before it keeps serving"),
                Serving::Nothing => tracing::error!("{name} {why}; its groups wait for a good one"),
            },
        }
    }

    fn report_missing(&self, name: &str) {
        let folder = self.folder.display();
        match self.groups.note_error(name, &format!("{name} is not in {folder}")) {
            Serving::Older => {
                tracing::warn!("{name} was deleted from {folder}; its last version keeps serving until the host stops");
            }
            Serving::Nothing => {
                let there = strays::unused(&self.folder, &self.groups.files());
                let meant = meant_instead(nearest(name, there.iter().map(String::as_str)));
                tracing::warn!("{name} is not in {folder}; its groups wait until it is put there{meant}");
            }
        }
    }

    fn take_in(&mut self, ended: Result<(String, Result<Arc<Compiled>, LoadError>), tokio::task::JoinError>) {
        let (name, loaded) = match ended {
            Ok(ended) => ended,
            Err(error) => {
                tracing::error!(%error, "failed to load a handler");
                return;
            }
        };
        let Some(file) = self.files.get_mut(&name) else { return };
        // It may have changed while it was loaded.
        file.pending = true;
        match loaded {
            Ok(compiled) => {
                file.candidate.loaded();
                self.groups.install(&name, &compiled);
            }
            Err(error) => file.candidate.refused(error.to_string()),
        }
    }
}

/// A hint at the end of a line.
fn meant_instead(near: Option<&str>) -> String {
    near.map(|near| format!("; did you mean {near}?")).unwrap_or_default()
}
