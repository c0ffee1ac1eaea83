//! Compiled components on disk, so that a restart compiles nothing. Losing it costs time, never correctness: whatever
//! is missing, damaged or made by another wasmtime is compiled again without a word.

use std::{
    fs,
    hash::{Hash, Hasher},
    io::{self, Write},
    path::{Path, PathBuf},
    time::SystemTime,
};

use sha2::{Digest, Sha256};
use wasmtime::Engine;

use super::artefact::Artefact;

/// How many artefacts are kept; the oldest go. A development session leaves hundreds.
const ARTEFACTS_MAX: usize = 128;

const CHECKSUM_BYTES: usize = 32;

/// A folder of artefacts for one engine.
#[derive(Debug)]
pub struct Cache {
    folder: PathBuf,
    /// wasmtime's version, its settings and the CPU, hashed: an artefact serves only where all are the same.
    engine: [u8; 32],
}

impl Cache {
    /// Makes the folder, readable by nobody else: what lies in it is run as native code.
    pub fn open(folder: &Path, engine: &Engine) -> io::Result<Self> {
        fs::create_dir_all(folder)?;
        #[cfg(unix)]
        fs::set_permissions(folder, std::os::unix::fs::PermissionsExt::from_mode(0o700))?;
        let mut hasher = Sha256Hasher(Sha256::new());
        engine.precompile_compatibility_hash().hash(&mut hasher);
        Ok(Self { folder: folder.to_owned(), engine: hasher.0.finalize().into() })
    }

    /// The artefact for the component with this digest, if there is a sound one.
    pub fn read(&self, digest: &str) -> Option<Artefact> {
        let file = fs::read(self.path(digest)).ok()?;
        let (checksum, bytes) = file.split_at_checked(CHECKSUM_BYTES)?;
        if checksum != self.checksum(bytes).as_slice() {
            return None;
        }
        Some(Artefact::of_our_cache(bytes.to_vec()))
    }

    /// Keeps an artefact. A crash in the middle leaves a temporary file or nothing, never half an artefact.
    pub fn write(&self, digest: &str, artefact: &Artefact) -> io::Result<()> {
        let path = self.path(digest);
        let temporary = path.with_extension(format!("{}.tmp", std::process::id()));
        let mut file = fs::File::create(&temporary)?;
        file.write_all(&self.checksum(artefact.bytes()))?;
        file.write_all(artefact.bytes())?;
        file.sync_all()?;
        fs::rename(&temporary, &path)?;
        self.drop_oldest()
    }

    /// Named by everything it depends on.
    fn path(&self, digest: &str) -> PathBuf {
        let key = Sha256::new().chain_update(digest).chain_update(self.engine).finalize();
        self.folder.join(format!("{key:x}.artefact"))
    }

    /// Covers the engine as well, so that a renamed file does not pass either.
    fn checksum(&self, bytes: &[u8]) -> [u8; CHECKSUM_BYTES] {
        Sha256::new().chain_update(self.engine).chain_update(bytes).finalize().into()
    }

    fn drop_oldest(&self) -> io::Result<()> {
        let mut files: Vec<(SystemTime, PathBuf)> = fs::read_dir(&self.folder)?
            .filter_map(|entry| {
                let entry = entry.ok()?;
                Some((entry.metadata().ok()?.modified().ok()?, entry.path()))
            })
            .collect();
        files.sort();
        for (_, path) in files.iter().rev().skip(ARTEFACTS_MAX) {
            fs::remove_file(path)?;
        }
        Ok(())
    }
}

/// Collects what a `Hash` feeds it, to be hashed by something that is the same in every build.
struct Sha256Hasher(Sha256);

impl Hasher for Sha256Hasher {
    fn write(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    fn finish(&self) -> u64 {
        unreachable!("only the collected bytes are read")
    }
}
