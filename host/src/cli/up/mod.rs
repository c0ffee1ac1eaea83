//! `millstream up`: the host. Opens the database, declares what streams.toml says, loads the handlers, and runs the
//! groups until it is told to stop.

mod demo;

mod follow;

mod parts;

mod record;

mod signals;

mod wanted;

use std::{sync::Arc, time::Duration};

use anyhow::{Context, Result, anyhow, bail};
use clap::Args;
use tokio_util::sync::CancellationToken;

use self::{follow::Follower, parts::Parts, signals::Signals, wanted::Wanted};
use super::{
    Global,
    open::{Opened, data_folder, open_for_host},
};
use crate::{
    config::Config,
    database::{Database, told},
    engine,
};

/// How often the host looks at streams.toml and publishes what its handlers are.
const LOOK: Duration = Duration::from_millis(500);

/// Every so many looks the host asks the database what is declared, since another host may have applied its file.
const FOLLOW_EVERY: u64 = 4;

#[derive(Args, Debug)]
pub struct Up {
    /// Stop when nothing is left to do: for jobs and tests
    #[arg(long)]
    pub drain: bool,
    /// Follow what is declared in the database, without applying this streams.toml
    #[arg(long)]
    pub no_apply: bool,
    /// Keep producing example messages, to watch something happen
    #[arg(long)]
    pub demo: bool,
}

impl Up {
    pub async fn run(&self, global: &Global) -> Result<()> {
        let mut signals = Signals::listen()?;
        let config = global.load_config()?;
        let name = host_name();
        let opened = tokio::select! {
            opened = open_for_host(global, &config.database, &name) => opened?,
            () = signals.asked_to_stop() => return Ok(()),
        };
        let result = self.host(global, config, &opened, &mut signals).await;
        let closed = opened.close().await;
        result.and(closed)?;
        tracing::info!("stopped");
        Ok(())
    }

    /// Runs with an open database, and leaves nothing running behind.
    async fn host(&self, global: &Global, config: Config, opened: &Opened, signals: &mut Signals) -> Result<()> {
        let database = &opened.database;
        let wanted = Wanted::read(&config, &global.config).await;
        if self.drain {
            // A job that leaves a group out would look as if it had done its work.
            wanted.complete()?;
        }
        if !self.no_apply {
            for change in engine::apply(database, &config).await? {
                tracing::info!("applied: {change}");
            }
        }
        let cache = data_folder(global).join("cache");
        let name = host_name();
        let mut parts = tokio::select! {
            parts = Parts::start(database, &name, &config, &global.config, cache, wanted) => parts?,
            () = signals.asked_to_stop() => return Ok(()),
        };
        super::output::complain(&ready_line(opened, &parts));
        let follower = Follower::new(global.config.clone(), config.clone(), !self.no_apply);
        let stop = CancellationToken::new();
        let demo =
            self.demo.then(|| tokio::spawn(demo::produce(database.clone(), Arc::new(config.clone()), stop.clone())));
        let ended = self.wait(database, &mut parts, follower, opened, signals).await;
        stop.cancel();
        if let Some(demo) = demo {
            demo.await.context("stop the demo")?;
        }
        tokio::select! {
            () = parts.drain() => {}
            () = signals.asked_to_stop() => bail!("stopped at once by a second signal; what ran is taken over when its lease ends"),
        }
        ended
    }

    /// Runs until there is a reason to stop. An error when that reason is one.
    async fn wait(
        &self,
        database: &Database,
        parts: &mut Parts,
        mut follower: Follower,
        opened: &Opened,
        signals: &mut Signals,
    ) -> Result<()> {
        let server_ended = async {
            match &opened.server {
                Some(server) => server.ended().await,
                None => std::future::pending().await,
            }
        };
        // Each look is dropped where it stands when there is a reason to stop, so that a slow database delays no signal.
        tokio::select! {
            () = signals.asked_to_stop() => {
                tracing::info!("stopping: running deliveries finish, a second signal stops at once");
                Ok(())
            }
            reason = server_ended => Err(anyhow!("Postgres has ended by itself: {reason}")),
            () = self.look_again_and_again(database, parts, &mut follower) => Ok(()),
        }
    }

    /// Publishes and follows. Returns when there is nothing left to do and that was asked for.
    async fn look_again_and_again(&self, database: &Database, parts: &mut Parts, follower: &mut Follower) {
        let mut look = tokio::time::interval(LOOK);
        look.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        for round in 1_u64.. {
            look.tick().await;
            parts.publish(database).await;
            if self.drain && parts.is_drained(database).await {
                return;
            }
            let mut follows = round.is_multiple_of(FOLLOW_EVERY);
            if let Some(config) = follower.look(database).await {
                follows = true;
                parts.update(&config).await;
            } else if follows {
                parts.look_for_secrets().await;
            }
            if follows && let Err(error) = parts.follow(database).await {
                tracing::warn!("failed to look what is declared, will try again: {}", told(error.as_ref()));
            }
        }
    }
}

fn ready_line(opened: &Opened, parts: &Parts) -> String {
    let postgres = match &opened.server {
        Some(server) => format!("its own Postgres {} in {}", server.major(), server.data_folder().display()),
        None => opened.database.to_string(),
    };
    let (served, waiting) = parts.served_and_waiting();
    let mut line = format!("ready: {postgres}");
    for (what, groups) in [("groups", served), ("groups that wait for a handler", waiting)] {
        if !groups.is_empty() {
            line.push_str(&format!("; {what}: {}", groups.join(", ")));
        }
    }
    format!("{line}; {}", parts.describe())
}

/// As people know this process: machine and process id.
fn host_name() -> String {
    let machine = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_else(|_| "host".to_owned());
    format!("{}:{}", machine.trim(), std::process::id())
}
