//! Runs handlers: wasm components, each message in a sandbox with limits, a deadline and no more rights than its group
//! was granted. Knows wasm; never SQL, never which file serves which group.

mod artefact;
mod bindings;
mod cache;
mod calls;
mod compile;
mod componentize;
mod database;
mod delivery;
mod engine;
mod failure;
mod file;
mod group_handler;
mod imports;
mod instances;
mod limiter;
mod load_error;
mod long_runs;
mod outbox;
mod output;
mod self_test;
mod settings;
mod state;
mod stdio;
mod ticker;
mod turns;

use std::{collections::BTreeMap, net::IpAddr, path::PathBuf, sync::Arc};

use anyhow::{Context, anyhow};
use tokio::sync::Semaphore;
use wasmtime::Engine;

use self::{cache::Cache, calls::Client, compile::Compiler, instances::Places, long_runs::LongRuns, ticker::Ticker};
pub use self::{
    compile::{Compiled, digest},
    file::is_whole,
    group_handler::GroupHandler,
    load_error::LoadError,
    settings::GroupSettings,
};

/// How a sandbox is set up.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Where compiled handlers are kept; `None` compiles at every start.
    pub cache_folder: Option<PathBuf>,
    /// How many handlers may compile at once.
    pub compile_threads: u32,
    /// Largest handler file.
    pub file_bytes_max: u64,
    /// Largest pool to try; 0 for none. A host leaves it at the default.
    pub pool_max: u32,
    /// PEM file with certificate authorities that HTTP calls trust beside the public ones.
    pub authorities_file: Option<PathBuf>,
    /// Names that HTTP calls find here instead of asking the system; what they stand for is judged as always. A host
    /// leaves it empty.
    pub hosts: BTreeMap<String, Vec<IpAddr>>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            cache_folder: None,
            compile_threads: 1,
            file_bytes_max: 64 << 20,
            pool_max: u32::MAX,
            authorities_file: None,
            hosts: BTreeMap::new(),
        }
    }
}

/// The engine and what all handlers share. One for each process.
pub struct Sandbox {
    engine: Engine,
    ticker: Arc<Ticker>,
    compiler: Compiler,
    client: Arc<Client>,
    places: Places,
    /// Where guests over budget run.
    long_runs: Arc<LongRuns>,
    description: String,
}

impl std::fmt::Debug for Sandbox {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sandbox").field("description", &self.description).finish_non_exhaustive()
    }
}

impl Sandbox {
    /// Builds the engine, starts its clock and proves that it can interrupt a guest.
    pub async fn start(settings: Settings) -> anyhow::Result<Arc<Self>> {
        let client = Arc::new(Client::new(settings.hosts, settings.authorities_file.as_deref())?);
        let built = engine::build(settings.pool_max)?;
        let engine = built.engine;
        let ticker = Ticker::start(engine.weak())?;
        let long_runs = Arc::new(LongRuns::start()?);
        self_test::run(&engine, &ticker, &long_runs).await?;
        let linker = imports::linker(&engine).map_err(|error| anyhow!("{error:#}")).context("link the imports")?;
        let compiler = Compiler {
            engine: engine.clone(),
            linker: Arc::new(linker),
            cache: settings.cache_folder.and_then(|folder| open_cache(&folder, &engine)),
            file_bytes_max: settings.file_bytes_max,
            threads: Arc::new(Semaphore::new(settings.compile_threads.max(1) as usize)),
        };
        Ok(Arc::new(Self {
            engine,
            ticker,
            compiler,
            client,
            places: Places::new(built.instances_max),
            long_runs,
            description: built.description,
        }))
    }

    /// One line for people: which settings are active.
    pub fn describe(&self) -> &str {
        &self.description
    }

    /// Largest handler file that is loaded, in bytes.
    pub fn file_bytes_max(&self) -> u64 {
        self.compiler.file_bytes_max
    }

    /// Compiles and links a handler file, off the runtime. `name` is only for messages.
    pub async fn load(&self, name: &str, bytes: Vec<u8>) -> Result<Arc<Compiled>, LoadError> {
        self.compiler.compile(name, bytes).await.map(Arc::new)
    }

    /// A group's handler: a compiled file with the group's own bounds and grants. Cheap.
    pub fn handler(self: &Arc<Self>, compiled: Arc<Compiled>, settings: Arc<GroupSettings>) -> GroupHandler {
        GroupHandler::new(self.clone(), compiled, settings)
    }
}

/// A cache that cannot be opened costs compile time, no more.
fn open_cache(folder: &std::path::Path, engine: &Engine) -> Option<Arc<Cache>> {
    match Cache::open(folder, engine) {
        Ok(cache) => Some(Arc::new(cache)),
        Err(error) => {
            let folder = folder.display();
            tracing::warn!(%folder, %error, "failed to open the cache of compiled handlers: every start compiles them");
            None
        }
    }
}
