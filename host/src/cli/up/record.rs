//! Records in the database what has been deployed: which component serves which group since when, and its bytes.

use std::collections::{BTreeMap, HashMap};

use crate::{
    database::{Database, told},
    deploy::{Deployer, Status},
    engine::{Deployed, HostId, record_deployment},
};

/// What this process has recorded.
#[derive(Debug, Default)]
pub struct Recorder {
    /// Group to digest.
    recorded: HashMap<String, String>,
    /// A failure was told; the next one is not, until a deployment is recorded again.
    has_failed: bool,
}

impl Recorder {
    /// Records each group whose digest is another than last time. What fails is tried again with the next call.
    pub async fn record(
        &mut self,
        database: &Database,
        host: HostId,
        deployer: &Deployer,
        status: &BTreeMap<String, Status>,
    ) {
        for (group, status) in status {
            let Some(digest) = &status.digest else { continue };
            let replaced = self.recorded.get(group);
            if replaced == Some(digest) {
                continue;
            }
            let bytes = deployer.bytes(&status.file, digest).await;
            let deployed = Deployed { group, digest, bytes: bytes.as_deref(), replaced: replaced.map(String::as_str) };
            match record_deployment(database, host, deployed).await {
                Ok(_) => {
                    self.recorded.insert(group.clone(), digest.clone());
                    self.has_failed = false;
                }
                Err(error) => {
                    if !std::mem::replace(&mut self.has_failed, true) {
                        tracing::warn!(group, "failed to {}; will try again", told(error.as_ref()));
                    }
                    return;
                }
            }
        }
    }
}
