//! A declared database with hosts on it, whose handlers are closures.

use std::{collections::HashMap, path::Path, sync::Arc};

use millstream::{
    config::{self, Config},
    consumer::{Consumer, Counters, Newest},
    database::{Database, Schema},
    engine::{self, ClaimId, Done, GroupHandle, GroupId, NewEntry, Produced, Request, Wanted},
    handler::{Finished, Handler, Message, NewMessage, Outcome},
};
use sqlx::PgConnection;
use tokio::sync::watch;

use super::{TestDatabase, database};

/// A database with what a streams.toml declares.
pub struct Project {
    pub database: TestDatabase,
    pub config: Config,
}

impl Project {
    /// Declares `streams_toml`; its `[host]` also sets the hosts of the test.
    pub async fn declare(streams_toml: &str) -> Self {
        let database = database().await;
        let config = config::parse(streams_toml, Path::new("streams.toml"), &|_| None).expect("a valid streams.toml");
        engine::apply(&database, &config).await.expect("declare");
        Self { database, config }
    }

    /// Declares another streams.toml in the same database.
    pub async fn declare_again(self, streams_toml: &str) -> Self {
        let config = config::parse(streams_toml, Path::new("streams.toml"), &|_| None).expect("a valid streams.toml");
        engine::apply(&self.database, &config).await.expect("declare");
        Self { config, ..self }
    }

    pub async fn group(&self, name: &str) -> GroupHandle {
        let groups = engine::load_groups(&self.database).await.expect("load the groups");
        groups.into_iter().find(|group| &*group.name == name).expect("a declared group")
    }

    /// A host with a pool of its own, running one group with a closure.
    pub async fn host<F>(&self, group: &str, handler: F) -> Host
    where
        F: Fn(Message) -> Finished + Send + Sync + 'static,
    {
        self.host_with(&[(group, Arc::new(handler) as Arc<dyn Handler>)]).await
    }

    pub async fn host_with(&self, handlers: &[(&str, Arc<dyn Handler>)]) -> Host {
        let database = self.database.another_host().await;
        let handlers = handlers.iter().map(|(name, handler)| ((*name).to_owned(), Arc::clone(handler))).collect();
        Host::start(database, self.config.host.clone(), "test".to_owned(), handlers).await
    }

    /// Produces one batch in one transaction.
    pub async fn produce(&self, stream: &str, messages: &[NewMessage]) -> Vec<Produced> {
        let entries: Vec<_> = messages.iter().map(|message| NewEntry { message, deliver_after: None }).collect();
        let mut tx = self.database.pool.begin().await.expect("begin");
        let produced = engine::produce(&self.database, &mut tx, stream, &entries).await.expect("produce");
        tx.commit().await.expect("commit");
        produced
    }

    /// One number from the database; `sql` may name `{schema}`.
    pub async fn number(&self, sql: &str) -> i64 {
        number(&self.database, sql).await
    }

    /// Runs statements for what they do; `sql` may name `{schema}`.
    pub async fn run(&self, sql: &str) {
        sqlx::raw_sql(self.database.schema.sql(sql)).execute(&self.database.pool).await.expect("run a statement");
    }

    /// A connection of its own, for transactions that stay open.
    pub async fn session(&self) -> Session {
        Session::begin(&self.database).await
    }

    /// Keys that nobody would ever run (E7): with deferred messages and no lease, leased to a host that does not exist, or
    /// waiting for a message that is nowhere. Never any, at no moment.
    pub async fn stuck_keys(&self) -> i64 {
        self.number(include_str!("stuck_keys.sql")).await
    }

    /// Rows left in the tables that must be empty once everything is done.
    pub async fn left_over(&self) -> i64 {
        self.number("select (select count(*) from {schema}.claim) + (select count(*) from {schema}.exception) + (select count(*) from {schema}.cursor_gap) + (select count(*) from {schema}.message_key_lease)").await
    }
}

pub async fn number(database: &Database, sql: &str) -> i64 {
    sqlx::query_scalar(database.schema.sql(sql)).fetch_one(&database.pool).await.expect("read a number")
}

/// A client with a connection of its own, as another program would have it. Dropping it rolls its transaction back.
pub struct Session {
    connection: PgConnection,
    schema: Schema,
}

impl Session {
    pub async fn begin(database: &Database) -> Self {
        let connection = database.pool.acquire().await.expect("a connection").detach();
        Self { connection, schema: database.schema.clone() }
    }

    pub async fn run(&mut self, sql: &str) {
        self.try_run(sql).await.expect("run a statement");
    }

    pub async fn try_run(&mut self, sql: &str) -> Result<(), sqlx::Error> {
        sqlx::raw_sql(self.schema.sql(sql)).execute(&mut self.connection).await.map(drop)
    }

    pub async fn number(&mut self, sql: &str) -> i64 {
        sqlx::query_scalar(self.schema.sql(sql)).fetch_one(&mut self.connection).await.expect("read a number")
    }
}

/// One host of a test.
pub struct Host {
    pub consumer: Consumer,
    pub counters: Arc<Counters>,
    pub database: Database,
    _senders: HashMap<String, watch::Sender<Option<Arc<dyn Handler>>>>,
}

impl Host {
    /// Runs groups, each with its handler.
    pub async fn start(
        database: Database,
        config: config::Host,
        name: String,
        handlers: Vec<(String, Arc<dyn Handler>)>,
    ) -> Self {
        let counters = Arc::new(Counters::default());
        let database = database.of_host(&name);
        let mut consumer = Consumer::start(&database, &config, &name, Arc::clone(&counters)).expect("start a host");
        consumer.alive().await;
        let groups = engine::load_groups(&database).await.expect("load the groups");
        let mut senders = HashMap::new();
        for (name, handler) in handlers {
            let (sender, newest): (_, Newest) = watch::channel(Some(handler));
            let group = groups.iter().find(|group| *group.name == *name).expect("a declared group");
            consumer.run_group(group.clone(), newest);
            senders.insert(name, sender);
        }
        Self { consumer, counters, database, _senders: senders }
    }

    /// Stops as TERM would.
    pub async fn drain(self) {
        self.consumer.drain().await;
        self.database.close().await;
    }

    /// A counter of one group.
    pub fn count(&self, group: &str, counter: &str) -> u64 {
        self.counters.snapshot()["groups"][group][counter].as_u64().expect("a counter")
    }
}

/// Messages whose payload is their number.
pub fn numbered(count: usize) -> Vec<NewMessage> {
    (0..count).map(|number| text(&number.to_string())).collect()
}

pub fn text(payload: &str) -> NewMessage {
    NewMessage { payload: Some(payload.as_bytes().to_vec()), ..NewMessage::default() }
}

/// A turn by hand: settles these claims whole, and claims.
pub fn request(finished: &[ClaimId], wanted: Wanted) -> Request {
    let done = Done { claims: finished.to_vec(), ..Done::default() };
    Request { done, lane_max: 64, wanted, ..Request::default() }
}

/// A turn by hand as a statement that counts its rows, for what Postgres tells of it.
pub fn turn_statement(group: GroupId, host: &str, want: u32, retries: u32) -> String {
    format!(
        "select count(*) from {{schema}}.claim_1({group}, {host}, 0, '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', false, '{{}}', '{{}}', '{{}}', '{{}}', \
         64, {want}, 1048576, {retries}, null, false, null, null, null, null)"
    )
}

pub fn done() -> Finished {
    Finished::plain(Outcome::Done)
}
