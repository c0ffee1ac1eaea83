//! The flags that every verb takes. Flags beat the environment, which beats streams.toml.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::output::{Format, Output};
use crate::config::{Config, ConfigErrors, load};

#[derive(Args, Clone)]
pub struct Global {
    /// The streams.toml to use
    #[arg(long, global = true, help_heading = "Everywhere", value_name = "FILE", default_value = "streams.toml")]
    pub config: PathBuf,
    /// Postgres to use [env: DATABASE_URL or PG*] [default: database.url of streams.toml, or its own]
    // Read from the environment where the database is chosen, since an empty variable counts as unset there.
    #[arg(long, global = true, help_heading = "Everywhere", value_name = "URL")]
    pub database_url: Option<String>,
    /// Tables for people, or JSON for machines
    #[arg(long, global = true, help_heading = "Everywhere", value_enum, default_value_t = Format::Table)]
    pub output: Format,
    /// How log lines on standard error look
    #[arg(long, global = true, help_heading = "Everywhere", value_enum, default_value_t = LogFormat::Text)]
    pub log_format: LogFormat,
    /// Log more; twice for everything
    #[arg(short, long, global = true, help_heading = "Everywhere", action = clap::ArgAction::Count)]
    pub verbose: u8,
    /// Log errors only, and show no progress
    #[arg(short, long, global = true, help_heading = "Everywhere", conflicts_with = "verbose")]
    pub quiet: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    Text,
    Json,
}

impl Global {
    /// Reads streams.toml.
    pub fn load_config(&self) -> Result<Config, ConfigErrors> {
        load(&self.config)
    }

    /// Where answers go.
    pub fn output(&self) -> Output {
        Output::new(self.output)
    }
}

impl std::fmt::Debug for Global {
    /// Never prints the database's URL: it holds a password.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Global").field("config", &self.config).field("output", &self.output).finish_non_exhaustive()
    }
}
