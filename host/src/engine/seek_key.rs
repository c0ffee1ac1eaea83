//! Sends one key of a group to another point of its history, and leaves all other keys as they are.
//!
//! What comes again waits behind its key, as if deferred by a turn. So that no delivery overlaps it, the key is held
//! first, until nothing of it runs any more; what runs settles as ever, and then comes again where the point says so. A
//! message without a mode is not stopped by that: those that run when the seek begins are waited for, and one that is
//! begun meanwhile counts as delivered after the seek. So each comes from one place, and has its effects once for it.
//!
//! ```text
//! hold the key -> wait until it is idle -> find the point, read the log -> wait for what a claim holds of it
//!     -> under the group's lock: skip, reset, insert, let go
//! ```

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde::Serialize;
use sqlx::{PgConnection, Row};

use super::{
    GroupHandle, find_group,
    keys::with_key,
    load_groups,
    pause::tell_hosts,
    seek::{check_point, held_by, id_and_time, lock_group},
    settle::{Burial, bury},
};
use crate::{
    config::{self, Start},
    database::Database,
    handler::FailureClass,
};

/// What a seek of one key did, or would do. The field names are a contract.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct KeySeeked {
    pub group: String,
    pub key: String,
    pub dry_run: bool,
    /// Messages of the key after this position come again, or for the first time.
    pub position: i64,
    /// Messages that the group had passed and that come again.
    pub replayed: i64,
    /// Messages that waited, and begin again with attempt 1.
    pub reset: i64,
    /// Messages that waited at or before the position: they end as dead letters of class `skipped`.
    pub skipped: i64,
    /// Dead letters whose messages come again; they stay, marked.
    pub dead_letters_replayed: i64,
}

/// Rows of the log that one statement reads.
const READ_ROWS: i32 = 20_000;

/// Rows of the log between the point and the group's position that are read at most, so that a point mistyped
/// does not read for hours.
const LOG_ROWS_MAX: i64 = 20_000_000;

/// Messages of the key that may come again, or end, in the one transaction that holds up the group's claims.
const MESSAGES_MAX: usize = 100_000;

/// How often a key that is held is looked at.
const LOOK: Duration = Duration::from_millis(50);

/// How long a seek that failed waits for settles that have its key locked.
const LET_GO_MAX: Duration = Duration::from_secs(10);

const SKIPPED: &str = "an operator sent its key to a later point";

/// Sends a key. Waits up to `patience` for what runs of it.
///
/// Fails with nothing changed when the point is still to come, when the key does not become idle in time, and when too
/// much lies between. A caller that is stopped in between leaves the key held: `key resume` lets it go.
pub async fn seek_key(
    database: &Database,
    group: &str,
    key: &str,
    to: &Start,
    patience: Duration,
) -> Result<KeySeeked> {
    ensure!((1..=1024).contains(&key.len()), "a key has 1 to 1,024 bytes, this one {}", key.len());
    let group = handle(database, group).await?;
    check(database, &group, to).await?;
    let began = hold(database, &group, key, patience).await?;
    let until = Instant::now() + patience;
    let done = async {
        wait_until_idle(database, &group, key, (patience, until)).await?;
        let found = Found::ahead(database, (&group, key), to).await?;
        wait_for_claims(database, &group, key, &found.ids, (patience, until)).await?;
        let (tx, seeked) = send(database, (&group, key), found, Some(&began)).await?;
        tx.commit().await.context("commit the seek of a key")?;
        Ok(seeked)
    }
    .await;
    if done.is_err() {
        let query = || {
            database.query(include_str!("seek_key_go.sql")).bind(group.id.0).bind(key.to_owned()).bind(began.clone())
        };
        let (tx, _) = with_key(database, key, query, LET_GO_MAX)
            .await
            .with_context(|| format!("let key {key:?} go; `key resume` does"))?;
        tx.commit().await?;
    }
    tell_hosts(database, group.id).await;
    done
}

/// Holds the key, and answers by which the hold is known.
async fn hold(database: &Database, group: &GroupHandle, key: &str, patience: Duration) -> Result<String> {
    let query = || database.query(include_str!("seek_key_hold.sql")).bind(group.id.0).bind(key.to_owned());
    let (tx, rows) = with_key(database, key, query, patience).await.context("hold the key")?;
    let began: Option<String> = rows.first().context("no answer")?.try_get(0)?;
    tx.commit().await.context("hold the key")?;
    began.with_context(|| {
        format!("another seek holds key {key:?}; wait until it has ended. If it was stopped in the middle, `key resume` lets the key go")
    })
}

/// What [`seek_key`] would do as things stand: it is done and rolled back. What runs of the key just now is not in it.
pub async fn preview_seek_key(database: &Database, group: &str, key: &str, to: &Start) -> Result<KeySeeked> {
    let group = handle(database, group).await?;
    check(database, &group, to).await?;
    let found = Found::ahead(database, (&group, key), to).await?;
    let (tx, seeked) = send(database, (&group, key), found, None).await?;
    tx.rollback().await.context("undo the trial seek of a key")?;
    Ok(KeySeeked { dry_run: true, ..seeked })
}

async fn handle(database: &Database, name: &str) -> Result<GroupHandle> {
    find_group(database, name).await?; // for its error, which says what is near
    let groups = load_groups(database).await?;
    groups.into_iter().find(|group| &*group.name == name).context("the group is gone")
}

async fn check(database: &Database, group: &GroupHandle, to: &Start) -> Result<()> {
    let mut tx = database.begin().await.context("begin to look at the point")?;
    check_point(database, &mut tx, group.stream_id, to).await
}

type Query<'q> = sqlx::query::Query<'q, sqlx::Postgres, sqlx::postgres::PgArguments>;

/// One statement in a transaction of its own: it locks.
async fn fetch_one(database: &Database, query: Query<'_>) -> Result<sqlx::postgres::PgRow> {
    let mut tx = database.begin().await?;
    let row = query.fetch_one(&mut *tx).await?;
    tx.commit().await?;
    Ok(row)
}

/// How long to wait, and until when that is.
type Patience = (Duration, Instant);

async fn wait_until_idle(database: &Database, group: &GroupHandle, key: &str, patience: Patience) -> Result<()> {
    loop {
        let mut tx = database.begin().await.context("look whether the key is idle")?;
        let Some(hosts) = busy(database, &mut tx, group, key).await? else { return Ok(()) };
        drop(tx);
        let mend = "Hold it with `key pause`, wait until `keys` shows no host for it, and seek then";
        look_again(key, &hosts, patience, mend).await?;
    }
}

/// Waits until every delivery of these messages has ended that was running when it began to wait.
async fn wait_for_claims(
    database: &Database,
    group: &GroupHandle,
    key: &str,
    ids: &[i64],
    patience: Patience,
) -> Result<()> {
    let (mut running, mut claims) = (ids.to_vec(), None::<Vec<i64>>);
    loop {
        let query = database.query(include_str!("seek_key_running.sql"));
        let query = query.bind(group.id.0).bind(&running).bind(&claims);
        let row = fetch_one(database, query).await.context("look what is claimed of the key")?;
        (running, claims) = (row.try_get("ids")?, Some(row.try_get("claims")?));
        if running.is_empty() {
            return Ok(());
        }
        let mend = "`pause` the group, wait until it has nothing in flight, and seek then";
        look_again(key, row.try_get("hosts")?, patience, mend).await?;
    }
}

/// Waits for the next look, or fails when it was the last.
async fn look_again(key: &str, hosts: &str, (patience, until): Patience, mend: &str) -> Result<()> {
    ensure!(
        Instant::now() < until,
        "key {key:?} is not idle after {} s: {hosts} still runs messages of it; nothing was changed. {mend}",
        patience.as_secs()
    );
    tokio::time::sleep(LOOK).await;
    Ok(())
}

/// Which hosts run messages of a key.
async fn busy(
    database: &Database,
    connection: &mut PgConnection,
    group: &GroupHandle,
    key: &str,
) -> Result<Option<String>> {
    let query = database.query(include_str!("seek_key_busy.sql")).bind(group.id.0).bind(key);
    let row = query.fetch_one(connection).await.context("look who runs messages of the key")?;
    Ok((row.try_get::<i64, _>("count")? > 0).then(|| row.try_get("hosts")).transpose()?)
}

/// Everything but the commit. `found` was read before the lock, as far as the group had come; what it claimed meanwhile is
/// deferred behind the key that is held, or comes by itself. The hold is known by when it `began`; without one it is a
/// trial.
async fn send(
    database: &Database,
    (group, key): (&GroupHandle, &str),
    found: Found,
    began: Option<&str>,
) -> Result<(sqlx::Transaction<'static, sqlx::Postgres>, KeySeeked)> {
    let mut tx = database.begin().await.context("begin to seek a key")?;
    if let Err(error) = lock_group(database, &mut tx, group.id).await {
        return Err(held_by(database, group.id, error).await.context("lock the group for the seek of a key"));
    }
    let row = database
        .query(include_str!("seek_key_group.sql"))
        .bind(group.id.0)
        .bind(key)
        .bind(began)
        .fetch_optional(&mut *tx)
        .await;
    let row = row.context("look whether all is as it was")?.context("the group is gone")?;
    let policy: config::Group = serde_json::from_value(row.try_get("policy")?).context("read the group's policy")?;
    let meanwhile = if row.try_get::<i64, _>("epoch")? != group.epoch {
        Some("the group was sent elsewhere") // what was read comes again by itself
    } else if policy != *group.policy {
        Some("the group was declared anew") // what was read is not what it takes
    } else if began.is_some() && row.try_get::<i64, _>("let_go")? > 0 {
        Some("the key was resumed, or has more lanes") // what came since would be before what comes again
    } else if began.is_some() && busy(database, &mut tx, group, key).await?.is_some() {
        Some("the key was taken")
    } else {
        None
    };
    if let Some(meanwhile) = meanwhile {
        bail!("{meanwhile} meanwhile; nothing was changed. Try again");
    }
    let seeked = apply(database, &mut tx, (group, key), (found.after, &found.ids), began).await?;
    Ok((tx, seeked))
}

async fn point(
    database: &Database,
    connection: &mut PgConnection,
    group: &GroupHandle,
    to: &Start,
) -> Result<(i64, i64)> {
    let (id, time) = id_and_time(to);
    let query = database.stream_query(include_str!("seek_key_point.sql"), group.stream_id.0).bind(group.id.0);
    let row =
        query.bind(id).bind(time).bind(*to == Start::Latest).fetch_one(connection).await.context("find the point")?;
    Ok((row.try_get("after")?, row.try_get("claimed")?))
}

/// The key's messages after the point, as far as the log has been read.
#[derive(Debug, Default)]
struct Found {
    after: i64,
    ids: Vec<i64>,
    last: i64,
    rows: i64,
}

impl Found {
    /// Finds the point, and reads as far as the group has come, without its lock.
    async fn ahead(database: &Database, (group, key): (&GroupHandle, &str), to: &Start) -> Result<Self> {
        let mut tx = database.begin().await.context("begin to read the log")?;
        let (after, upto) = point(database, &mut tx, group, to).await?;
        let mut found = Self { after, last: after, ..Self::default() };
        found.read(database, &mut tx, (group, key), upto).await?;
        Ok(found)
    }

    async fn read(
        &mut self,
        database: &Database,
        connection: &mut PgConnection,
        (group, key): (&GroupHandle, &str),
        upto: i64,
    ) -> Result<()> {
        let filter = &group.filter;
        while self.last < upto {
            let query = database.stream_query(include_str!("seek_key_read.sql"), group.stream_id.0);
            let query = query.bind(self.last).bind(READ_ROWS).bind(upto).bind(key);
            let query = query
                .bind(&filter.routing_keys)
                .bind(&filter.keys)
                .bind(&filter.not_keys)
                .bind(&filter.headers)
                .bind(group.id.0);
            let row = query.fetch_one(&mut *connection).await.context("read the log for the key")?;
            let (rows, ids): (i64, Vec<i64>) = (row.try_get("rows")?, row.try_get("ids")?);
            self.ids.extend(ids);
            self.rows += rows;
            self.last = if rows < i64::from(READ_ROWS) { upto } else { row.try_get::<i64, _>("last")?.min(upto) };
            ensure!(
                self.ids.len() <= MESSAGES_MAX && self.rows <= LOG_ROWS_MAX,
                "more than {MESSAGES_MAX} messages of the key, or {LOG_ROWS_MAX} of the stream, lie after that point; take a later \
                 one, or a group of its own for the key (filter = {{ key = [...] }}) and seek that"
            );
        }
        Ok(())
    }
}

async fn apply(
    database: &Database,
    tx: &mut PgConnection,
    (group, key): (&GroupHandle, &str),
    (after, ids): (i64, &[i64]),
    began: Option<&str>,
) -> Result<KeySeeked> {
    let (id, stream) = (group.id.0, group.stream_id.0);
    let skipped = skip(database, tx, (group, key), after).await?;
    let query = database.query(include_str!("seek_key_reset.sql")).bind(id).bind(key.to_owned()).bind(after);
    let reset = query.fetch_all(&mut *tx).await.context("reset what waits")?;
    let query = database.stream_query(include_str!("seek_key_again.sql"), stream);
    let query = query.bind(id).bind(ids.to_vec()).bind(group.concurrency_override());
    let replayed = query.fetch_all(&mut *tx).await.context("deliver messages of the key again")?;
    let coming = reset.iter().chain(&replayed).map(|row| row.try_get(0)).collect::<Result<Vec<i64>, _>>()?;
    let query = database.query(include_str!("seek_key_dead.sql")).bind(id).bind(coming);
    let dead = query.execute(&mut *tx).await.context("mark dead letters")?;
    let query =
        database.query(include_str!("seek_key_free.sql")).bind(id).bind(key.to_owned()).bind(began.map(str::to_owned));
    query.execute(&mut *tx).await.context("let the key go")?;
    Ok(KeySeeked {
        group: group.name.to_string(),
        key: key.to_owned(),
        dry_run: false,
        position: after,
        replayed: i64::try_from(replayed.len())?,
        reset: i64::try_from(reset.len())?,
        skipped,
        dead_letters_replayed: i64::try_from(dead.rows_affected())?,
    })
}

/// Ends what waits up to the point, and answers how many that are.
async fn skip(
    database: &Database,
    tx: &mut PgConnection,
    (group, key): (&GroupHandle, &str),
    after: i64,
) -> Result<i64> {
    let most = i64::try_from(MESSAGES_MAX)? + 1;
    let query =
        database.query(include_str!("seek_key_skippable.sql")).bind(group.id.0).bind(key).bind(after).bind(most);
    let waiting: i64 = query.fetch_one(&mut *tx).await.context("count what waits before the point")?.try_get(0)?;
    ensure!(
        waiting < most,
        "more than {MESSAGES_MAX} messages wait before that point, and so many can be skipped at a time; take an earlier one first"
    );
    let query = database.query(include_str!("seek_key_skip.sql")).bind(group.id.0).bind(key).bind(after);
    let rows = query.fetch_all(&mut *tx).await.context("take out what waits before the point")?;
    let burial = |row: &sqlx::postgres::PgRow| -> Result<_> {
        Ok((
            row.try_get::<i64, _>(0)?,
            row.try_get(1)?,
            row.try_get::<Option<String>, _>(2)?,
            row.try_get::<String, _>(3)?,
            row.try_get(4)?,
            row.try_get(5)?,
        ))
    };
    let rows = rows.iter().map(burial).collect::<Result<Vec<_>>>().context("read what is skipped")?;
    let burials: Vec<_> = rows
        .iter()
        .map(|(message_id, attempts, digest, mode, lane, dead_letter)| Burial {
            message_id: *message_id,
            attempts: *attempts,
            class: FailureClass::Skipped.as_str(),
            error: SKIPPED,
            digest: digest.as_deref(),
            dead_letter: *dead_letter,
            mode,
            lane: *lane,
        })
        .collect();
    bury(database, tx, group.id.0, group.stream_id.0, &burials)
        .await
        .context("keep what is skipped as dead letters")?;
    Ok(i64::try_from(burials.len())?)
}
