//! Whether the sandbox starts with its fast settings, and every handler file is there and can be loaded.

use std::{collections::BTreeSet, sync::Arc};

use super::{
    super::{Global, open::data_folder},
    Finding,
};
use crate::{
    config::Config,
    sandbox::{Sandbox, Settings},
};

pub(super) async fn look(global: &Global, config: &Config) -> Vec<Finding> {
    // Nothing is made that is not there yet.
    let cache = data_folder(global).join("cache");
    let settings = Settings {
        cache_folder: cache.is_dir().then_some(cache),
        compile_threads: config.host.compile_threads,
        file_bytes_max: config.host.component_max_bytes,
        ..Settings::default()
    };
    let sandbox = match Sandbox::start(settings).await {
        Ok(sandbox) => sandbox,
        Err(error) => {
            return vec![Finding::missing(
                "sandbox",
                format!("{error:#}"),
                "this machine cannot run handlers; report it",
            )];
        }
    };
    let mut findings = vec![settings_finding(sandbox.describe())];
    let files: BTreeSet<&str> = config.groups.values().map(|group| group.handler.as_str()).collect();
    for file in files {
        findings.push(file_finding(global, config, &sandbox, file).await);
    }
    findings
}

/// The description is the line that `up` prints.
fn settings_finding(description: &str) -> Finding {
    let found = description.strip_prefix("sandbox: ").unwrap_or(description);
    if found.contains("slower") {
        let mend = "handlers run, only slower: use Linux 6.7 or newer, and raise the limit of address space (ulimit -v unlimited)";
        return Finding::note("sandbox", found, mend);
    }
    Finding::ok("sandbox", found)
}

async fn file_finding(global: &Global, config: &Config, sandbox: &Arc<Sandbox>, file: &str) -> Finding {
    let path = config.host.handlers_folder(&global.config).join(file);
    let users: Vec<&str> =
        config.groups.iter().filter(|(_, group)| group.handler == file).map(|(name, _)| name.as_str()).collect();
    let users = users.join(", ");
    let size = tokio::fs::metadata(&path).await.map(|metadata| metadata.len());
    let bytes = match size {
        Ok(size) if size > sandbox.file_bytes_max() => {
            let found = format!("{} has {size} bytes, more than host.component_max", path.display());
            return Finding::broken("handler", found, "build it with --release, or raise component_max");
        }
        Ok(_) => tokio::fs::read(&path).await,
        Err(error) => Err(error),
    };
    let bytes = match bytes {
        Ok(bytes) => bytes,
        Err(error) => {
            let found = format!("{}: {error}; groups that wait for it: {users}", path.display());
            let mend = "build the handler and put it there (`millstream new NAME` starts one); no restart is needed";
            return Finding::missing("handler", found, mend);
        }
    };
    match sandbox.load(file, bytes).await {
        Ok(compiled) => {
            Finding::ok("handler", format!("{file} ({}) for {users}", super::super::groups::short(&compiled.digest)))
        }
        Err(error) => {
            let found = format!("{file} for {users}: {error}");
            Finding::broken("handler", found, "put a good file there; no restart is needed")
        }
    }
}
