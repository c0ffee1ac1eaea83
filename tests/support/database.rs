//! A private database for one test, dropped with it.

use std::{
    ops::Deref,
    sync::atomic::{AtomicU32, Ordering},
};

use millstream::database::{Connect, Database, migrate};
use sqlx::AssertSqlSafe;
use tokio::sync::OnceCell;

use super::{cluster, logs::Logs};

const TEMPLATE: &str = "template_migrated";

/// The migrations run once; every test gets a copy.
static TEMPLATE_MADE: OnceCell<()> = OnceCell::const_new();

static COUNT: AtomicU32 = AtomicU32::new(0);

/// A database of its own for one test, with the pool of the test's runtime. Also watches the log of the test's thread:
/// an ERROR or WARN that was not expected (see [`TestDatabase::expect_log`]) fails the test.
pub struct TestDatabase {
    database: Database,
    name: String,
    logs: Logs,
}

/// A migrated database.
pub async fn database() -> TestDatabase {
    TEMPLATE_MADE
        .get_or_init(|| async {
            execute(format!("create database {TEMPLATE}")).await;
            let template = open(TEMPLATE).await;
            migrate(&template).await.expect("migrate the template");
            // A database with connections cannot be copied.
            template.close().await;
        })
        .await;
    TestDatabase::create(&format!("template {TEMPLATE}")).await
}

/// A database with nothing in it.
pub async fn empty_database() -> TestDatabase {
    TestDatabase::create("template template0").await
}

impl TestDatabase {
    async fn create(options: &str) -> Self {
        let name = format!("test_{}", COUNT.fetch_add(1, Ordering::Relaxed));
        execute(format!("create database {name} {options}")).await;
        let database = open(&name).await;
        Self { database, name, logs: Logs::watch() }
    }

    /// The same database through a pool of its own, as another host would have it.
    pub async fn another_host(&self) -> Database {
        open(&self.name).await
    }

    /// Its URL, for the real program.
    pub async fn url(&self) -> String {
        url(&self.name).await
    }

    /// What other threads of the test log to, to be watched as well.
    pub fn dispatch(&self) -> tracing::Dispatch {
        self.logs.dispatch()
    }

    /// Lets log lines pass that contain `part`.
    pub fn expect_log(&self, part: &str) {
        self.logs.expect(part);
    }
}

impl Deref for TestDatabase {
    type Target = Database;

    fn deref(&self) -> &Database {
        &self.database
    }
}

impl Drop for TestDatabase {
    /// Drops the database on a runtime of its own, since the test's is busy unwinding.
    fn drop(&mut self) {
        let drop_it = format!("drop database {} with (force)", self.name);
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("make a runtime");
            runtime.block_on(execute(drop_it));
        });
        let dropped = thread.join();
        if !std::thread::panicking() {
            dropped.expect("drop the test's database");
        }
    }
}

async fn url(name: &str) -> String {
    cluster().await.url().replacen("/millstream?", &format!("/{name}?"), 1)
}

async fn open(name: &str) -> Database {
    let connect = Connect::parse(&url(name).await).expect("the cluster's URL");
    Database::connect(&connect, 16, "millstream").await.expect("connect to a test database")
}

/// Runs one statement in the cluster's own database.
async fn execute(statement: String) {
    let admin = open("millstream").await;
    sqlx::raw_sql(AssertSqlSafe(statement)).execute(&admin.pool).await.expect("make or drop a test database");
    admin.close().await;
}

/// What a test announces to its database passes, and the database is gone when the test is over.
#[tokio::test]
async fn a_test_database_is_dropped_with_its_test() {
    let database = empty_database().await;
    database.expect_log("thunder");
    tracing::warn!("thunder");
    let name = database.name.clone();
    drop(database);
    let admin = open("millstream").await;
    let found = sqlx::query("select from pg_database where datname = $1").bind(name).fetch_optional(&admin.pool).await;
    assert!(found.expect("ask").is_none());
}
