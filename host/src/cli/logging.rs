//! Log lines on standard error, so that standard output holds answers only.

use std::io::IsTerminal;

use anyhow::anyhow;
use tracing::{Level, Metadata};
use tracing_subscriber::{EnvFilter, filter::filter_fn, fmt, layer::SubscriberExt, util::SubscriberInitExt};

use super::{Global, LogFormat};
use crate::database;

/// Starts logging for the whole process. `-v` and `-q` beat RUST_LOG.
pub(super) fn start(global: &Global) -> anyhow::Result<()> {
    let stderr = fmt::layer().with_writer(std::io::stderr).with_target(false);
    let registry = tracing_subscriber::registry().with(filter(global)).with(filter_fn(shows_no_guest_data));
    let started = match global.log_format {
        LogFormat::Json => registry.with(stderr.json().flatten_event(true)).try_init(),
        LogFormat::Text => {
            let colours = std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none();
            registry.with(stderr.with_ansi(colours)).try_init()
        }
    };
    started.map_err(|error| anyhow!("start logging: {error}"))
}

/// The libraries that stand between a guest and its imports trace arguments: URLs, headers, the environment. No setting
/// brings those lines out.
fn shows_no_guest_data(line: &Metadata<'_>) -> bool {
    !line.target().starts_with("wasmtime_wasi") || *line.level() <= Level::INFO
}

/// Notices that Postgres sends, never: the SQL of a handler can raise them, with whatever text.
fn filter(global: &Global) -> EnvFilter {
    let never = format!("{}=off", database::NOTICES);
    verbosity(global).add_directive(never.parse().expect("it is a directive"))
}

/// Our own lines from INFO on, those of libraries only when something is odd.
fn verbosity(global: &Global) -> EnvFilter {
    let directives = match (global.quiet, global.verbose) {
        (true, _) => "error".to_owned(),
        (false, 1) => format!("warn,{},millstream=debug", database::QUIET_POOL),
        (false, 2..) => "debug,millstream=trace".to_owned(),
        (false, 0) => {
            let usual = || EnvFilter::new(format!("warn,{},millstream=info", database::QUIET_POOL));
            return EnvFilter::try_from_default_env().unwrap_or_else(|_| usual());
        }
    };
    EnvFilter::new(directives)
}
