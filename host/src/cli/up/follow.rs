//! Follows streams.toml while the host runs: a valid change is applied and told, an invalid one is refused whole.

use std::{path::PathBuf, time::SystemTime};

use crate::{
    config::{self, Config},
    database::Database,
    engine,
};

/// Looks again and again; what it has seen once it does not report twice.
#[derive(Debug)]
pub struct Follower {
    file: PathBuf,
    applies: bool,
    seen: Option<Stamp>,
    text: Option<String>,
}

/// Cheap to read, and changed by whatever changes the file.
type Stamp = (u64, Option<SystemTime>);

impl Follower {
    /// `file` has just been read and applied.
    pub fn new(file: PathBuf, applies: bool) -> Self {
        let text = std::fs::read_to_string(&file).ok();
        Self { seen: stamp(&file), file, applies, text }
    }

    /// The new configuration, once it is applied. `None`: nothing has changed, or what changed was refused.
    pub async fn look(&mut self, database: &Database) -> Option<Config> {
        let stamp = stamp(&self.file);
        if stamp.is_none() || stamp == self.seen {
            return None; // a file that is gone for a moment changes nothing
        }
        let text = std::fs::read_to_string(&self.file).ok()?;
        self.seen = stamp;
        if self.text.as_deref() == Some(&text) {
            return None;
        }
        self.text = Some(text);
        let config = match config::load(&self.file) {
            Ok(config) => config,
            Err(errors) => {
                tracing::error!("refused the changed streams.toml, the old one goes on:\n{errors}");
                return None;
            }
        };
        if self.applies {
            match engine::apply(database, &config).await {
                Ok(changes) if changes.is_empty() => {
                    tracing::info!("read the changed streams.toml: it is valid, and nothing of it is new");
                }
                Ok(changes) => changes.iter().for_each(|change| tracing::info!("applied: {change}")),
                Err(error) => {
                    tracing::error!("failed to apply the changed streams.toml, the old one goes on: {error:#}");
                    return None;
                }
            }
        }
        Some(config)
    }
}

fn stamp(file: &std::path::Path) -> Option<Stamp> {
    let metadata = std::fs::metadata(file).ok()?;
    Some((metadata.len(), metadata.modified().ok()))
}
