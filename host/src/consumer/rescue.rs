//! Takes over from hosts whose lease has run out, and makes the groups compare what they hold.

use std::{
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Duration,
};

use anyhow::{Context, Result};
use tokio::{sync::watch, time::sleep};
use tokio_util::sync::CancellationToken;

use super::{counters::Counters, hub::Hub, identity::Identity};
use crate::{
    database::{Database, Reaction, reaction, told},
    engine::{HostId, dead_hosts, deregister, groups_held, orphaned_groups, recover},
};

/// How often to look for dead hosts: recovery starts within the lease and this.
const LOOK: Duration = Duration::from_millis(900);

/// Looks for dead hosts until `stop`.
pub async fn rescue(database: Database, hub: Arc<Hub>, counters: Arc<Counters>, stop: CancellationToken) {
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            () = sleep(LOOK) => {}
        }
        match dead_hosts(&database).await {
            Ok(hosts) => {
                for host in hosts {
                    if let Err(error) = rescue_from(&database, &hub, &counters, host).await {
                        let why = told(error.as_ref());
                        // Something of it may still be under way, or another host is at it.
                        match error.downcast_ref().map(reaction) {
                            Some(Reaction::Busy) => tracing::info!(host = host.0, "failed to {why}; will try again"),
                            _ => tracing::warn!(host = host.0, "failed to {why}; will try again"),
                        }
                    }
                }
            }
            Err(error) => tracing::debug!("failed to look for dead hosts, will try again: {error:#}"),
        }
    }
}

async fn rescue_from(database: &Database, hub: &Hub, counters: &Counters, host: HostId) -> Result<()> {
    for orphaned in orphaned_groups(database, host).await? {
        let group = orphaned.group;
        let messages = recover(database, host, orphaned).await.with_context(|| format!("recover group {group}"))?;
        counters.recovered.fetch_add(messages as u64, Relaxed);
        tracing::info!(host = host.0, group_id = group.0, messages, "recovered what a dead host held");
        hub.with_seat(group, |seat| seat.wake());
    }
    deregister(database, host).await.context("remove a dead host")?;
    Ok(())
}

/// Once a lease, asks in one query in which groups the database says this host holds something. Those groups compare it
/// with their memory: an asynchronous commit may have been lost in a crash of the database.
pub async fn compare(
    database: Database,
    hub: Arc<Hub>,
    identity: watch::Receiver<Option<Identity>>,
    lease: Duration,
    stop: CancellationToken,
) {
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            () = sleep(lease) => {}
        }
        let Some(host) = identity.borrow().as_ref().map(|identity| identity.host) else { continue };
        match groups_held(&database, host).await {
            Ok(groups) => {
                for group in groups {
                    hub.with_seat(group, |seat| {
                        seat.compare.store(true, Relaxed);
                        seat.wake();
                    });
                }
            }
            Err(error) => tracing::debug!("failed to ask what this host holds, will try again: {error:#}"),
        }
    }
}
