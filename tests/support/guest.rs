//! SQL as a handler runs it, without one: a role of its own, deliveries claimed and settled by hand.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use millstream::{
    engine::{self, GroupHandle, GuestDatabase, GuestSession, HostId, Left, Settled, Settlement, Verdict, Wanted},
    handler::{Sql, SqlAnswer, SqlError, SqlRows, SqlStatement, SqlValue, SqlWants},
};
use sqlx::AssertSqlSafe;

use super::engine::{Project, numbered, request};

static ROLES: AtomicU32 = AtomicU32::new(0);

/// A stream, a group with a role that owns `public.ran` and may do what it likes in `public`, and a host.
pub struct Desk {
    pub project: Project,
    pub role: String,
    pub guests: GuestDatabase,
    pub host: HostId,
    pub group: GroupHandle,
}

/// Streams `orders` and `receipts`, group `email` with SQL as `role`.
pub fn with_role(role: &str, more: &str) -> String {
    format!(
        r#"
        [host]
        drain_timeout = "5s"
        [streams.orders]
        [streams.receipts]
        [groups.email]
        stream = "orders"
        handler = "email.wasm"
        retry = {{ max_attempts = 1000, base = "1ms", max = "5ms" }}
        allow = {{ sql = {{ role = "{role}" }}, produce = ["receipts"] }}
        {more}
        "#
    )
}

/// A database in which a new role may create and use what it likes in `public`. It owns a table there in which `spy()` notes
/// who runs it.
pub async fn project_with_role(more: &str) -> (Project, String) {
    let role = format!("guest_{}", ROLES.fetch_add(1, Relaxed));
    let project = Project::declare("[streams.orders]").await;
    project.run(&format!("create role {role} nologin; grant create, usage on schema public to {role}")).await;
    let spy = "create table public.ran (who text, what text);
        create function public.spy(p_what text) returns integer language plpgsql as $$
        begin insert into public.ran values (current_user, p_what); return 1; end $$";
    as_role(&project, &role, spy).await;
    let project = project.declare_again(&with_role(&role, more)).await;
    (project, role)
}

/// Runs statements as the role itself would in a session of its own.
pub async fn as_role(project: &Project, role: &str, sql: &str) {
    project.run(&format!("set role {role}; {sql}; reset role")).await;
}

impl Desk {
    pub async fn new() -> Self {
        let (project, role) = project_with_role("").await;
        let guests = GuestDatabase::new(&project.database);
        let host = engine::register(&project.database, "test", Duration::from_secs(60)).await.unwrap();
        let group = project.group("email").await;
        Self { project, role, guests, host, group }
    }

    pub fn delivery(&self) -> Delivery {
        Delivery { session: self.guests.grant(&self.role).session(), within: Duration::from_secs(30) }
    }

    pub async fn as_role(&self, sql: &str) {
        as_role(&self.project, &self.role, sql).await;
    }

    /// Acknowledges a new message in the transaction of `delivery`.
    pub async fn settle(&self, delivery: Delivery) -> Settled {
        self.project.produce("orders", &numbered(1)).await;
        let wanted = Wanted { messages: 1, bytes: 1 << 20, retries: 0 };
        let turn =
            engine::claim(&self.project.database, self.host, &self.group, &request(&[], wanted)).await.expect("claim");
        let claimed = &turn.claimed[0];
        let one = Settlement::plain(claimed.token, claimed.message.id, Verdict::Done);
        let Left::Open(sql) = delivery.session.take() else { panic!("no transaction is open") };
        engine::settle_with_sql(self.host, &self.group, &one, sql).await.expect("settle")
    }

    pub async fn commits(&self, delivery: Delivery) {
        let settled = self.settle(delivery).await;
        assert!(matches!(settled, Settled::Committed { ref fenced, .. } if fenced.is_empty()), "{settled:?}");
    }

    /// Who ran `spy()`, and how often.
    pub async fn spies(&self) -> Vec<(String, i64)> {
        let sql = "select who, count(*) from public.ran group by who order by who";
        sqlx::query_as(sql).fetch_all(&self.project.database.pool).await.expect("read who ran")
    }

    /// Everything that ran, and something did, ran as the role.
    pub async fn only_the_role_ran(&self) {
        let spies = self.spies().await;
        assert!(matches!(&spies[..], [(who, _)] if *who == self.role), "{spies:?}");
    }

    pub async fn number(&self, sql: &str) -> i64 {
        let sql = sqlx::query_scalar(AssertSqlSafe(sql.to_owned()));
        sql.fetch_one(&self.project.database.pool).await.expect("read a number")
    }
}

/// One delivery's SQL.
pub struct Delivery {
    pub session: Arc<GuestSession>,
    pub within: Duration,
}

impl Delivery {
    pub async fn rows(&self, text: &str, params: &[SqlValue]) -> Result<SqlRows, SqlError> {
        match run(&*self.session, text, params, SqlWants::Rows, self.within).await? {
            SqlAnswer::Rows(rows) => Ok(rows),
            SqlAnswer::Count(_) => panic!("rows were asked for"),
        }
    }

    pub async fn execute(&self, text: &str, params: &[SqlValue]) -> Result<u64, SqlError> {
        match run(&*self.session, text, params, SqlWants::Count, self.within).await? {
            SqlAnswer::Count(count) => Ok(count),
            SqlAnswer::Rows(_) => panic!("a count was asked for"),
        }
    }

    /// The SQLSTATE it is refused with.
    pub async fn refused(&self, wants: SqlWants, text: &str) -> String {
        match run(&*self.session, text, &[], wants, self.within).await {
            Err(SqlError::Refused { sqlstate, .. }) => sqlstate,
            other => panic!("{text}: {other:?}"),
        }
    }
}

pub async fn run(
    sql: &dyn Sql,
    text: &str,
    params: &[SqlValue],
    wants: SqlWants,
    within: Duration,
) -> Result<SqlAnswer, SqlError> {
    let deadline = Instant::now() + within;
    sql.run(SqlStatement { text: text.to_owned(), params: params.to_vec(), wants, deadline }).await
}

pub fn text(text: &str) -> SqlValue {
    SqlValue::Text(text.to_owned())
}
