//! Follows streams.toml while the host runs: a valid change is applied and told, an invalid one is refused whole.

use std::{path::PathBuf, time::SystemTime};

use crate::{
    config::{self, Config},
    database::{Database, told},
    engine,
};

/// Looks again and again; what it has seen once it does not report twice.
#[derive(Debug)]
pub struct Follower {
    file: PathBuf,
    applies: bool,
    seen: Option<Stamp>,
    text: Option<String>,
    /// What was read last.
    config: Config,
    /// What this host was started with.
    started: Config,
    /// So many looks in a row did not find it.
    gone: u32,
}

/// A file that so many looks in a row do not find is missing, not being written.
const GONE_LOOKS: u32 = 3;

/// Cheap to read, and changed by whatever changes the file.
type Stamp = (u64, Option<SystemTime>);

impl Follower {
    /// `file` has just been read as `config`, and applied.
    pub fn new(file: PathBuf, config: Config, applies: bool) -> Self {
        let text = std::fs::read_to_string(&file).ok();
        Self { seen: stamp(&file), file, applies, text, started: config.clone(), config, gone: 0 }
    }

    /// The new configuration, once it is applied. `None`: nothing has changed, or what changed was refused.
    pub async fn look(&mut self, database: &Database) -> Option<Config> {
        let stamp = stamp(&self.file);
        if stamp.is_none() {
            // For a moment it is gone whenever an editor writes it.
            self.gone += 1;
            if self.gone == GONE_LOOKS {
                tracing::warn!("{} is not there: what was read last goes on until it is back", self.file.display());
            }
            return None;
        }
        if std::mem::take(&mut self.gone) >= GONE_LOOKS {
            tracing::info!("{} is back", self.file.display());
        }
        if stamp == self.seen {
            return None;
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
                tracing::error!("refused the changed streams.toml, the old one goes on");
                // A line of the log for each: what follows a line feed would have neither time nor level.
                for line in errors.to_string().lines() {
                    tracing::error!("{}", line.trim_start());
                }
                return None;
            }
        };
        let mut is_news = false;
        if self.applies {
            match engine::apply(database, &config).await {
                Ok(changes) => {
                    changes.iter().for_each(|change| tracing::info!("applied: {change}"));
                    is_news = !changes.is_empty();
                }
                Err(error) => {
                    let why = told(error.as_ref());
                    tracing::error!("failed to apply the changed streams.toml, the old one goes on: {why}");
                    return None;
                }
            }
        }
        is_news |= self.tell(&config);
        if self.applies && !is_news {
            tracing::info!("read the changed streams.toml: it is valid, and nothing of it is new");
        }
        self.config = config.clone();
        Some(config)
    }

    /// Tells what is no matter of the database. Answers whether there was anything.
    fn tell(&self, config: &Config) -> bool {
        let gone: Vec<&str> =
            self.config.groups.keys().filter(|name| !config.groups.contains_key(*name)).map(String::as_str).collect();
        for group in &gone {
            tracing::info!(
                "group {group} is no longer in streams.toml: it stops here, and keeps its place; `millstream forget {group}` removes it"
            );
        }
        // Against what was read last, so that it is told once, and against what runs, so that to undo it is no change.
        let (last, runs) = (&self.config, &self.started);
        let host = last.host != config.host && runs.host != config.host;
        let database = last.database != config.database && runs.database != config.database;
        let restarts: Vec<&str> = [("[host]", host), ("[database]", database)]
            .into_iter()
            .filter_map(|(table, differs)| differs.then_some(table))
            .collect();
        if !restarts.is_empty() {
            tracing::warn!(
                "{} has changed in streams.toml: that takes effect when this host is started again",
                restarts.join(" and ")
            );
        }
        !gone.is_empty() || !restarts.is_empty()
    }
}

fn stamp(file: &std::path::Path) -> Option<Stamp> {
    let metadata = std::fs::metadata(file).ok()?;
    Some((metadata.len(), metadata.modified().ok()))
}
