//! The group was sent elsewhere: whatever this host runs for it is void, and it goes on under the new epoch.

use std::sync::atomic::Ordering::Relaxed;

use super::{End, Group, Step, answered};
use crate::engine::epoch;

impl Group {
    /// Cuts what runs, and forgets what is held. A turn or a heartbeat has found the epoch raised; when both have, the
    /// second finds nothing new and cuts nothing of the new epoch.
    pub(super) async fn start_over(&mut self) -> Step {
        match answered(epoch(&self.setting.database, self.setting.group.id)).await {
            Ok(Some(epoch)) if epoch == self.setting.group.epoch => Step::Again,
            Ok(Some(epoch)) => {
                self.forget();
                self.setting.group.epoch = epoch;
                self.seat.epoch.store(epoch, Relaxed);
                // A claim that was under way while the seek committed may be ours under the old epoch: it goes back.
                self.must_compare = true;
                tracing::info!(
                    group = &*self.setting.group.name,
                    epoch,
                    "the group was sent elsewhere by a seek: what ran was cut"
                );
                Step::Again
            }
            Ok(None) => Step::End(End::Gone),
            Err(error) => {
                self.seat.seeked.store(true, Relaxed);
                self.back_off("read the group's epoch", &error);
                Step::Rest
            }
        }
    }
}
