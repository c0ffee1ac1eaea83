//! Hears hints that there is something to look at. A hint is never needed: whoever listens also polls.

use std::time::Duration;

use sqlx::postgres::{PgListener, PgPoolOptions};
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::{Database, target::Pooler};

/// How long to wait between attempts to connect, growing to this.
const RECONNECT_MAX: Duration = Duration::from_secs(5);

/// A network that vanished without a word looks like silence, so a silent connection is tried this often.
const SILENCE_MAX: Duration = Duration::from_secs(30);

/// How long connecting, or the answer to such a trial, may take.
const ANSWER_MAX: Duration = Duration::from_secs(10);

/// What a listener heard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wake {
    Notified {
        channel: String,
        payload: String,
    },
    /// The connection is new or was lost, so notifications may have been missed: look at everything.
    LookAgain,
}

/// Listens on `channels` until `shutdown`, and calls `on_wake`, which must not block, for everything it hears.
///
/// Reconnects for as long as it takes. Behind a transaction pooler there is no session that could listen, so it only
/// waits for the shutdown there. Dropping it loses nothing but hints.
pub async fn listen(
    database: &Database,
    channels: &[&str],
    mut on_wake: impl FnMut(Wake),
    shutdown: CancellationToken,
) {
    if database.connect.pooler == Pooler::Transaction {
        return shutdown.cancelled().await;
    }
    let mut failures = 0;
    loop {
        let mut connected = false;
        let session = session(database, channels, |wake| {
            connected = true;
            on_wake(wake);
        });
        let lost = tokio::select! {
            () = shutdown.cancelled() => return,
            result = session => result,
        };
        failures = if connected { 0 } else { failures + 1 };
        if failures <= 1 {
            // Only at the first attempt: the polls report a database that stays away.
            let reason = lost.map_or_else(|error| super::told(&error), |()| "the connection was lost".to_owned());
            tracing::info!(reason, "no wake-ups for a moment, polling goes on");
        }
        on_wake(Wake::LookAgain);
        tokio::select! {
            () = shutdown.cancelled() => return,
            () = sleep(RECONNECT_MAX.min(Duration::from_millis(50 << failures.min(7)))) => {}
        }
    }
}

/// One connection, from its beginning to its loss.
async fn session(database: &Database, channels: &[&str], mut on_wake: impl FnMut(Wake)) -> Result<(), sqlx::Error> {
    // A pool of its own: the listener never waits behind a turn, and a closed pool of the engine does not end it.
    let pool = PgPoolOptions::new()
        .max_connections(1)
        .max_lifetime(None)
        .idle_timeout(None)
        .acquire_timeout(ANSWER_MAX)
        .connect_lazy_with(database.connect.options.clone());
    let mut listener = PgListener::connect_with(&pool).await?;
    listener.eager_reconnect(false);
    listener.listen_all(channels.iter().copied()).await?;
    on_wake(Wake::LookAgain);
    loop {
        match timeout(SILENCE_MAX, listener.try_recv()).await {
            Ok(Ok(Some(heard))) => {
                on_wake(Wake::Notified { channel: heard.channel().to_owned(), payload: heard.payload().to_owned() });
            }
            Ok(Ok(None)) => return Ok(()),
            Ok(Err(error)) => return Err(error),
            Err(_silent) => {
                let trial = timeout(ANSWER_MAX, sqlx::raw_sql("select 1").execute(&mut listener)).await;
                trial.map_err(|_| sqlx::Error::PoolTimedOut)??;
            }
        }
    }
}
