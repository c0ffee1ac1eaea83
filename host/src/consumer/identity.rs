//! Keeps the host's lease alive, and stops its work when it cannot.
//!
//! It runs on a thread, a runtime and a connection of its own, so that neither a busy handler nor a full pool can make
//! it miss a heartbeat. The lease is counted from before its renewal was sent, on a clock that runs through suspend, less
//! a margin: this host stops before any other begins to take over.

use std::{
    sync::{Arc, atomic::Ordering::Relaxed},
    thread,
    time::Duration,
};

use anyhow::{Context, Result};
use tokio::{sync::watch, time::sleep};
use tokio_util::sync::CancellationToken;

use super::{clock, counters::Counters};
use crate::{
    database::{Database, told},
    engine::{HostId, deregister, register, renew},
};

/// One life of this process, as the other hosts see it.
#[derive(Clone, Debug)]
pub struct Identity {
    pub host: HostId,
    /// Cancelled when the lease is lost: everything that runs under it is cut.
    pub cut: CancellationToken,
}

/// How the lease is kept.
#[derive(Clone, Debug)]
pub struct Terms {
    /// Shown to people; need not be unique.
    pub name: String,
    pub lease: Duration,
    pub heartbeat: Duration,
}

/// The thread that keeps the lease, and what it last said.
#[derive(Debug)]
pub struct Keeper {
    identity: watch::Receiver<Option<Identity>>,
    stop: CancellationToken,
    thread: Option<thread::JoinHandle<()>>,
}

impl Keeper {
    /// Takes an identity and keeps it until [`Keeper::stop`].
    pub fn start(database: &Database, terms: Terms, counters: Arc<Counters>) -> Result<Self> {
        let (sender, identity) = watch::channel(None);
        let stop = CancellationToken::new();
        let keeping = Keeping { database: database.clone(), terms, counters, sender, stop: stop.clone() };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("make a runtime")?;
        let thread = thread::Builder::new()
            .name("millstream-lease".to_owned())
            .spawn(move || runtime.block_on(keeping.run()))
            .context("start the thread that keeps the lease")?;
        Ok(Self { identity, stop, thread: Some(thread) })
    }

    /// The current identity; `None` while there is none.
    pub fn identity(&self) -> watch::Receiver<Option<Identity>> {
        self.identity.clone()
    }

    /// Gives the identity up. Whoever held work under it has settled or handed it back before.
    pub async fn stop(mut self) {
        self.stop.cancel();
        if let Some(thread) = self.thread.take() {
            let joined = tokio::task::spawn_blocking(move || thread.join()).await;
            if !matches!(joined, Ok(Ok(()))) {
                tracing::error!("the thread that keeps the lease has panicked");
            }
        }
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

struct Keeping {
    database: Database,
    terms: Terms,
    counters: Arc<Counters>,
    sender: watch::Sender<Option<Identity>>,
    stop: CancellationToken,
}

/// How long to wait before asking a database that did not answer again.
const RETRY: Duration = Duration::from_millis(250);

/// How long a stop waits for a database that does not answer. Without a word from us others take over when the lease ends.
const GIVE_UP_MAX: Duration = Duration::from_secs(5);

impl Keeping {
    async fn run(self) {
        while !self.stop.is_cancelled() {
            // A connection for each identity: on the one before a renewal may wait for an answer that never comes.
            let database = self.database.with_own_pool(1);
            let sent = clock::now();
            let registration = register(&database, &self.terms.name, self.terms.lease);
            match tokio::time::timeout(self.terms.lease, registration).await {
                Ok(Ok(host)) => self.keep(&database, host, sent).await,
                Ok(Err(error)) => {
                    let why = told(&error);
                    tracing::warn!("failed to register this host at {database}, will try again: {why}");
                    self.pause(RETRY).await;
                }
                Err(_elapsed) => {
                    let why = database.why_away().await;
                    tracing::warn!("failed to register this host at {database}, will try again: {why}");
                }
            }
        }
    }

    /// One identity, until its lease is lost or given up.
    async fn keep(&self, database: &Database, host: HostId, sent: Duration) {
        let cut = CancellationToken::new();
        let mut until = self.end_of(sent);
        self.sender.send_replace(Some(Identity { host, cut: cut.clone() }));
        tracing::info!(host = host.0, "took an identity");
        let mut wait = self.terms.heartbeat;
        let mut is_away = false;
        loop {
            self.pause(wait.min(until.saturating_sub(clock::now()))).await;
            if self.stop.is_cancelled() {
                return self.give_up(database, host).await;
            }
            let sent = clock::now();
            let stats = self.counters.snapshot();
            let renewal = renew(database, host, self.terms.lease, &stats);
            let renewed = tokio::time::timeout(until.saturating_sub(sent), renewal).await;
            match renewed {
                Ok(Ok(true)) => {
                    if std::mem::take(&mut is_away) {
                        tracing::info!(host = host.0, "the database answers again");
                    }
                    until = self.end_of(sent);
                    wait = self.terms.heartbeat;
                    self.counters.heartbeats.fetch_add(1, Relaxed);
                }
                Ok(Ok(false)) => break,
                Ok(Err(error)) => {
                    wait = RETRY;
                    if !std::mem::replace(&mut is_away, true) {
                        let (host, why) = (host.0, told(&error));
                        tracing::warn!(host, "failed to renew the lease at {database}, will try again: {why}");
                    }
                }
                Err(_elapsed) => {}
            }
            if clock::now() >= until {
                break;
            }
        }
        cut.cancel();
        self.sender.send_replace(None);
        self.counters.leases_lost.fetch_add(1, Relaxed);
        tracing::warn!(host = host.0, "lost the lease: what ran was cut, others take it over");
    }

    /// When this host stops by itself: a tenth before the database lets the lease run out.
    fn end_of(&self, sent: Duration) -> Duration {
        sent + self.terms.lease - self.terms.lease / 10
    }

    async fn give_up(&self, database: &Database, host: HostId) {
        self.sender.send_replace(None);
        let Ok(deregistered) = tokio::time::timeout(GIVE_UP_MAX, deregister(database, host)).await else {
            return tracing::warn!(host = host.0, "failed to deregister: the database does not answer");
        };
        match deregistered {
            Ok(true) => {}
            Ok(false) => tracing::warn!(
                host = host.0,
                "stopped while it still held work; others take it over when its lease ends"
            ),
            Err(error) => tracing::warn!(host = host.0, "failed to deregister: {error:#}"),
        }
        database.close().await;
    }

    async fn pause(&self, duration: Duration) {
        tokio::select! {
            () = sleep(duration) => {}
            () = self.stop.cancelled() => {}
        }
    }
}
