//! Says that something in a folder may have changed. Never says what: whoever listens looks again at everything. Where
//! the system cannot watch (no inotify instances left, some network file systems), the listener's slow look is enough.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
};

use notify::{
    EventKind, RecommendedWatcher, RecursiveMode, Watcher,
    event::{AccessKind, AccessMode},
};
use tokio::sync::Notify;

/// A watch over one folder that is renewed when the folder is replaced.
pub struct FolderWatch {
    folder: PathBuf,
    changed: Arc<Notify>,
    watching: Option<(RecommendedWatcher, FolderId)>,
    /// A failure is said once, not at every try.
    failure_said: bool,
}

/// Tells a folder from another of the same name.
type FolderId = (u64, u64);

impl FolderWatch {
    /// `changed` is notified at every event.
    pub fn new(folder: PathBuf, changed: Arc<Notify>) -> Self {
        Self { folder, changed, watching: None, failure_said: false }
    }

    /// Starts the watch, or renews it if the folder is another one now. Called at every slow look.
    pub fn renew(&mut self) {
        let current = folder_id(&self.folder);
        if let (Some((_, watched)), Ok(current)) = (&self.watching, &current)
            && watched == current
        {
            return;
        }
        self.watching = None;
        match current.map_err(notify::Error::io).and_then(|id| Ok((self.start()?, id))) {
            Ok(watching) => {
                self.watching = Some(watching);
                self.failure_said = false;
                self.changed.notify_one();
            }
            Err(error) if !self.failure_said => {
                self.failure_said = true;
                let folder = self.folder.display();
                tracing::warn!(
                    %folder,
                    %error,
                    "failed to watch the handlers folder: changes are found by looking every two seconds"
                );
            }
            Err(_) => {}
        }
    }

    fn start(&self) -> notify::Result<RecommendedWatcher> {
        let changed = self.changed.clone();
        let mut watcher = notify::recommended_watcher(move |event: notify::Result<notify::Event>| {
            // An error means that events were lost, which is a reason to look as well.
            if event.is_err() || event.is_ok_and(|event| may_change(event.kind)) {
                changed.notify_one();
            }
        })?;
        watcher.watch(&self.folder, RecursiveMode::NonRecursive)?;
        Ok(watcher)
    }
}

/// Reading is no change; our own looks would wake us otherwise.
fn may_change(kind: EventKind) -> bool {
    match kind {
        EventKind::Access(AccessKind::Close(AccessMode::Write)) => true,
        EventKind::Access(_) => false,
        _ => true,
    }
}

#[cfg(unix)]
fn folder_id(folder: &Path) -> io::Result<FolderId> {
    use std::os::unix::fs::MetadataExt;
    let metadata = fs::metadata(folder)?;
    Ok((metadata.dev(), metadata.ino()))
}

#[cfg(not(unix))]
fn folder_id(folder: &Path) -> io::Result<FolderId> {
    fs::metadata(folder).map(|_| (0, 0))
}
