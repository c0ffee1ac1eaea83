//! Where a message meets a handler: the host's lease, the groups' loops, and what wakes them. The only part that knows
//! both the engine and the seam to the sandbox.
//!
//! Every task lives in the set of its [`Consumer`] and ends with it.

mod budget;

mod clock;

mod counters;

mod group;

mod hot_keys;

mod hub;

mod identity;

mod pacing;

mod polling;

mod rescue;

mod seeking;

mod upkeep;

use std::{collections::HashMap, sync::Arc, time::Duration};

use anyhow::Result;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use self::{budget::Budget, group::Setting, hub::Hub, identity::Keeper, polling::Interval};
pub use self::{
    counters::{Counters, GroupCounters},
    group::Newest,
    identity::{Identity, Terms},
};
use crate::{
    config,
    database::Database,
    engine::{GroupHandle, GuestDatabase, HostId},
};

/// One host at work: all its groups. Dropping it without [`Consumer::drain`] is like a crash: others take over when its
/// lease ends.
#[derive(Debug)]
pub struct Consumer {
    database: Database,
    guests: GuestDatabase,
    hub: Arc<Hub>,
    budget: Arc<Budget>,
    counters: Arc<Counters>,
    keeper: Keeper,
    drain_timeout: Duration,
    groups: HashMap<String, Running>,
    services: JoinSet<()>,
    stop: CancellationToken,
}

/// How long a stop waits for statements of the services, which leave nothing half done when they are cut.
const SERVICES_END_MAX: Duration = Duration::from_secs(2);

/// A group that runs on this host.
#[derive(Debug)]
struct Running {
    drain: CancellationToken,
    task: JoinSet<()>,
}

impl Consumer {
    /// Takes an identity and starts what all groups share. `name` is shown to people. The database should be
    /// [`Database::of_host`], so that others can end its sessions when this host is frozen.
    pub fn start(database: &Database, host: &config::Host, name: &str, counters: Arc<Counters>) -> Result<Self> {
        let terms = Terms { name: name.to_owned(), lease: host.lease, heartbeat: host.heartbeat };
        let keeper = Keeper::start(database, terms, Arc::clone(&counters))?;
        let hub = Arc::new(Hub::default());
        let stop = CancellationToken::new();
        let mut services = JoinSet::new();
        let interval = Interval { min: host.poll_min, max: host.poll_max };
        services.spawn(polling::poll(
            database.clone(),
            Arc::clone(&hub),
            Arc::clone(&counters),
            interval,
            stop.clone(),
        ));
        services.spawn(polling::send_hints(database.clone(), Arc::clone(&hub), stop.clone()));
        services.spawn(polling::hear_hints(database.clone(), Arc::clone(&hub), stop.clone()));
        services.spawn(rescue::rescue(database.clone(), Arc::clone(&hub), Arc::clone(&counters), stop.clone()));
        services.spawn(seeking::watch(database.clone(), Arc::clone(&hub), host.heartbeat, stop.clone()));
        services.spawn(upkeep::keep_up(database.clone(), Arc::clone(&counters), stop.clone()));
        services.spawn(rescue::compare(
            database.clone(),
            Arc::clone(&hub),
            keeper.identity(),
            host.lease,
            stop.clone(),
        ));
        Ok(Self {
            database: database.clone(),
            guests: GuestDatabase::new(database),
            hub,
            budget: Arc::new(Budget::new(host.prefetch_bytes)),
            counters,
            keeper,
            drain_timeout: host.drain_timeout,
            groups: HashMap::new(),
            services,
            stop,
        })
    }

    /// Starts a group with the handlers that `newest` brings. One of this name that runs already is drained first; this
    /// does not wait for it, so that a slow delivery of one group holds up no other group and no signal.
    pub fn run_group(&mut self, group: GroupHandle, newest: Newest) {
        let name = group.name.to_string();
        self.stop_group(&name);
        let before = self.groups.remove(&name);
        let drain = CancellationToken::new();
        let setting = Setting {
            database: self.database.clone(),
            grant: group.policy.allow.sql_role.as_deref().map(|role| self.guests.grant(role)),
            counters: self.counters.group(&name),
            group,
            identity: self.keeper.identity(),
            newest,
            hub: Arc::clone(&self.hub),
            budget: Arc::clone(&self.budget),
            drain: drain.clone(),
            drain_timeout: self.drain_timeout,
        };
        let mut task = JoinSet::new();
        task.spawn(async move {
            if let Some(mut before) = before {
                while before.task.join_next().await.is_some() {}
            }
            group::run(setting).await;
        });
        self.groups.insert(name, Running { drain, task });
    }

    /// Begins to drain one group: what it runs is finished or handed back. [`Consumer::drain`] waits for that.
    pub fn stop_group(&mut self, name: &str) {
        if let Some(running) = self.groups.get(name) {
            running.drain.cancel();
        }
    }

    /// Names of the groups that run here.
    pub fn groups(&self) -> impl Iterator<Item = &str> {
        self.groups.iter().filter(|(_, running)| !running.drain.is_cancelled()).map(|(name, _)| name.as_str())
    }

    /// Whether this host has an identity, without which it claims nothing.
    pub fn is_alive(&self) -> bool {
        self.keeper.identity().borrow().is_some()
    }

    /// The identity this host has now.
    pub fn host(&self) -> Option<HostId> {
        self.keeper.identity().borrow().as_ref().map(|identity| identity.host)
    }

    /// Waits until this host has an identity.
    pub async fn alive(&self) {
        // An error means that the keeper has ended; then there is nothing to wait for.
        let mut identity = self.keeper.identity();
        let _ended = identity.wait_for(Option::is_some).await;
    }

    /// Something was produced to `stream` through this process: wakes its groups here, and hints the other hosts.
    pub fn produced(&self, stream: &str) {
        self.hub.tell_of(stream);
    }

    /// Stops claiming, lets running deliveries finish within the drain timeout, hands the rest back with no attempt
    /// counted, and gives the identity up.
    pub async fn drain(mut self) {
        for running in self.groups.values() {
            running.drain.cancel();
        }
        for (_, mut running) in self.groups.drain() {
            while running.task.join_next().await.is_some() {}
        }
        self.stop.cancel();
        let services_end = async {
            polling::send_hints_now(&self.database, &self.hub).await;
            self.guests.close().await;
            while self.services.join_next().await.is_some() {}
        };
        if tokio::time::timeout(SERVICES_END_MAX, services_end).await.is_err() {
            tracing::debug!("a database that does not answer holds up the stop: it goes on without an answer");
            self.services.shutdown().await;
        }
        self.keeper.stop().await;
    }
}
