//! Finds out, once a heartbeat, which groups were sent elsewhere or forgotten. Turns tell as well; but while handlers run
//! for minutes there is none.

use std::{
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Duration,
};

use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use super::hub::Hub;
use crate::{database::Database, engine::raised_epochs};

/// Looks until `stop`. A look that fails is made up for by the next one, or by a turn.
pub async fn watch(database: Database, hub: Arc<Hub>, heartbeat: Duration, stop: CancellationToken) {
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            () = sleep(heartbeat) => {}
        }
        let known = hub.epochs();
        if known.is_empty() {
            continue;
        }
        match raised_epochs(&database, &known).await {
            Ok(groups) => {
                for group in groups {
                    hub.with_seat(group, |seat| {
                        seat.seeked.store(true, Relaxed);
                        seat.wake();
                    });
                }
            }
            Err(error) => tracing::debug!("failed to look for seeked groups, will try again: {error:#}"),
        }
    }
}
