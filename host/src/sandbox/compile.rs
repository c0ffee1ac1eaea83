//! From a handler file to something that can be instantiated, off the runtime's threads and only a few at a time.

use std::{fmt::Write, sync::Arc, thread};

use sha2::{Digest, Sha256};
use tokio::sync::{Semaphore, oneshot};
use wasmtime::{Engine, component::Linker};

use super::{artefact::Artefact, bindings::LinkedPre, cache::Cache, componentize, load_error::LoadError, state::State};

/// Stack of a compile thread: the compiler recurses over what it reads.
const STACK_BYTES: usize = 16 * 1024 * 1024;

/// A handler that is compiled, linked and known to be of our world. Serves any number of groups.
pub struct Compiled {
    /// sha256 of the file as it was given, lower-case hex.
    pub digest: Arc<str>,
    /// The file's name, for log lines.
    pub name: Arc<str>,
    pub(super) pre: LinkedPre<State>,
}

impl std::fmt::Debug for Compiled {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Compiled").field("name", &self.name).field("digest", &self.digest).finish_non_exhaustive()
    }
}

/// sha256 of a handler file, lower-case hex.
pub fn digest(bytes: &[u8]) -> Arc<str> {
    let hash = Sha256::digest(bytes);
    let hex = hash.iter().fold(String::with_capacity(64), |mut hex, byte| {
        // Writing to a string cannot fail.
        let _ = write!(hex, "{byte:02x}");
        hex
    });
    hex.into()
}

/// Everything a compile needs; cheap to clone into its thread.
#[derive(Clone)]
pub struct Compiler {
    pub engine: Engine,
    pub linker: Arc<Linker<State>>,
    pub cache: Option<Arc<Cache>>,
    pub file_bytes_max: u64,
    /// One permit for each thread that may compile at once.
    pub threads: Arc<Semaphore>,
}

impl Compiler {
    /// Waits for a thread, then for the compile. Dropping this lets a compile that has begun run out unheeded.
    pub async fn compile(&self, name: &str, bytes: Vec<u8>) -> Result<Compiled, LoadError> {
        let permit = self.threads.clone().acquire_owned().await;
        let (send, receive) = oneshot::channel();
        let (compiler, name) = (self.clone(), Arc::<str>::from(name));
        let work = move || {
            let compiled = compiler.compile_here(name, &bytes);
            drop(permit);
            // Nobody waits any more: then nobody misses it.
            let _ = send.send(compiled);
        };
        thread::Builder::new().name("compile".into()).stack_size(STACK_BYTES).spawn(work).map_err(|error| {
            LoadError::new(format!("could not be compiled: the host cannot start a thread ({error})"))
        })?;
        receive.await.unwrap_or_else(|_| {
            Err(LoadError::new("could not be compiled: the compiler panicked; its panic is in the host's log"))
        })
    }

    fn compile_here(&self, name: Arc<str>, bytes: &[u8]) -> Result<Compiled, LoadError> {
        if bytes.len() as u64 > self.file_bytes_max {
            return Err(LoadError::new(format!(
                "has {} bytes and may have {} (host.component_max): build it with --release, or raise the limit",
                bytes.len(),
                self.file_bytes_max
            )));
        }
        let digest = digest(bytes);
        let component = componentize::component(bytes)?;
        let component = match self.cached(&digest) {
            Some(component) => component,
            None => self.compile_and_keep(&digest, &component)?,
        };
        // Linking is the check of all types: what passes here can be called.
        let pre = self.linker.instantiate_pre(&component).and_then(LinkedPre::new).map_err(|error| {
            LoadError::new(format!(
                "does not fit this host's contract ({error:#}): rebuild it with the millstream-guest of this host's version"
            ))
        })?;
        Ok(Compiled { digest, name, pre })
    }

    fn cached(&self, digest: &str) -> Option<wasmtime::component::Component> {
        self.cache.as_ref()?.read(digest)?.load(&self.engine).ok()
    }

    fn compile_and_keep(&self, digest: &str, component: &[u8]) -> Result<wasmtime::component::Component, LoadError> {
        let compiled = Artefact::compile(&self.engine, component).and_then(|artefact| {
            let component = artefact.load(&self.engine)?;
            Ok((artefact, component))
        });
        let (artefact, component) = compiled.map_err(|error| {
            LoadError::new(format!(
                "cannot be compiled ({error:#}): build it for wasm without threads, GC or 64-bit memory"
            ))
        })?;
        if let Some(cache) = &self.cache
            && let Err(error) = cache.write(digest, &artefact)
        {
            tracing::warn!(%error, "failed to cache a compiled handler; it is compiled again at the next start");
        }
        Ok(component)
    }
}
