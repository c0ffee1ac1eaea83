//! Which Postgres to use: flag, environment, streams.toml, or our own. Connects to nothing.

use std::fmt;

use anyhow::{Context, Result, anyhow, bail, ensure};
use sqlx::postgres::PgConnectOptions;

/// The Postgres to use.
#[derive(Clone, Debug)]
pub enum Target {
    /// Somebody else's.
    Given(Box<Connect>),
    /// Nobody named one: the host runs its own (see [`super::embedded`]).
    Own,
}

/// How to reach a Postgres. Holds a password, so it has no derived `Debug`.
#[derive(Clone)]
pub struct Connect {
    pub(super) options: PgConnectOptions,
    pub(super) pooler: Pooler,
}

/// What stands between us and Postgres.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pooler {
    Absent,
    /// `pgbouncer=true` in the URL: another server may serve each transaction, so nothing is kept in a session.
    Transaction,
}

/// What was said about the database, strongest first.
#[derive(Clone, Copy)]
#[expect(missing_debug_implementations, reason = "it holds passwords")]
pub struct Sources<'a> {
    /// `--database-url`.
    pub flag: Option<&'a str>,
    /// Looks up an environment variable; `None` when unset.
    pub environment: &'a dyn Fn(&str) -> Option<String>,
    /// `database.url` of streams.toml.
    pub file: Option<&'a str>,
}

impl Target {
    /// Decides: `--database-url`, else `DATABASE_URL`, else `PGHOST`, `PGHOSTADDR` or `PGDATABASE` (with the other `PG*`
    /// variables of libpq), else `database.url` of streams.toml, else our own Postgres. An empty variable counts as
    /// unset. `PGUSER`, `PGPASSWORD` or `PGPORT` alone name no database and decide nothing. Service files (`PGSERVICE`)
    /// are not read; one that would decide is an error rather than another database than the user meant.
    pub fn choose(sources: Sources<'_>) -> Result<Self> {
        let variable = |name: &str| (sources.environment)(name).filter(|value| !value.is_empty());
        if let Some(url) = sources.flag {
            return Self::given(url, "--database-url");
        }
        if let Some(url) = variable("DATABASE_URL") {
            return Self::given(&url, "DATABASE_URL");
        }
        if ["PGHOST", "PGHOSTADDR", "PGDATABASE"].into_iter().any(|name| variable(name).is_some()) {
            return Ok(Self::Given(Box::new(Connect::direct(PgConnectOptions::new()))));
        }
        ensure!(
            variable("PGSERVICE").is_none(),
            "PGSERVICE is set, and millstream does not read service files; give --database-url, or unset PGSERVICE"
        );
        match sources.file {
            Some(url) => Self::given(url, "database.url of streams.toml"),
            None => Ok(Self::Own),
        }
    }

    fn given(url: &str, said_by: &str) -> Result<Self> {
        let connect = Connect::parse(url).with_context(|| format!("read {said_by}"))?;
        Ok(Self::Given(Box::new(connect)))
    }
}

impl Connect {
    /// Reads a `postgres://` or `postgresql://` URL as libpq does: percent-encoding, `?host=/socket/folder`, `sslmode`.
    /// `pgbouncer=true` is for us and not sent on. No error shows the URL, since it holds a password.
    pub fn parse(url: &str) -> Result<Self> {
        ensure!(
            url.starts_with("postgres://") || url.starts_with("postgresql://"),
            "the database URL must start with postgres:// or postgresql://"
        );
        let (address, query) = url.split_once('?').unwrap_or((url, ""));
        let mut pooler = Pooler::Absent;
        let mut kept = Vec::new();
        for parameter in query.split('&').filter(|parameter| !parameter.is_empty()) {
            let (key, value) = parameter.split_once('=').unwrap_or((parameter, ""));
            match key {
                "pgbouncer" => pooler = read_pooler(value)?,
                key if IGNORED.contains(&key) => {}
                key if KNOWN.contains(&key) || key.starts_with("options[") => kept.push(parameter),
                // Not shown unless it looks like a name: after a bare `?` in a password it would be half of that.
                other if other.bytes().all(|byte| byte.is_ascii_alphabetic() || byte == b'_') => {
                    bail!("the database URL has an unknown parameter `{other}`; known are {}", KNOWN.join(", "))
                }
                _ => bail!("the database URL has an unknown parameter; known are {}", KNOWN.join(", ")),
            }
        }
        // libpq allows `user@/database?host=/socket`; the driver wants a host there, which the parameter replaces.
        let address = address.replacen("@/", "@localhost/", 1);
        let options = format!("{address}?{}", kept.join("&")).parse().map_err(|error: sqlx::Error| {
            // The driver takes a comma between hosts, or a bare `/` or `#` in a password, for a broken port or host.
            anyhow!(
                "the database URL is not valid ({error}); percent-encode special characters of the password (`@` is %40, \
                 `/` is %2F, `#` is %23, `?` is %3F), and name one host"
            )
        })?;
        Ok(Self { options, pooler })
    }

    /// A server that nothing stands before.
    pub fn direct(options: PgConnectOptions) -> Self {
        Self { options, pooler: Pooler::Absent }
    }
}

/// Parameters that reach the driver.
const KNOWN: [&str; 11] = [
    "sslmode",
    "sslrootcert",
    "sslcert",
    "sslkey",
    "host",
    "hostaddr",
    "port",
    "dbname",
    "user",
    "password",
    "options",
];

/// Parameters of libpq that say nothing here: our time limit and keepalives are fixed, and a standby is refused anyway.
const IGNORED: [&str; 6] =
    ["application_name", "connect_timeout", "keepalives", "gssencmode", "channel_binding", "target_session_attrs"];

fn read_pooler(value: &str) -> Result<Pooler> {
    match value {
        "true" => Ok(Pooler::Transaction),
        "false" => Ok(Pooler::Absent),
        _ => bail!("`pgbouncer` in the database URL must be true or false"),
    }
}

impl fmt::Display for Connect {
    /// Host, database and user; never the password.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let options = &self.options;
        let database = options.get_database().unwrap_or(options.get_username());
        match options.get_socket() {
            Some(socket) => write!(f, "{}", socket.display())?,
            None => write!(f, "{}:{}", options.get_host(), options.get_port())?,
        }
        write!(f, " database {database} as {}", options.get_username())
    }
}

impl fmt::Debug for Connect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Connect({self})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(flag: Option<&str>, environment: &[(&str, &str)], file: Option<&str>) -> Result<String> {
        let look_up =
            |name: &str| environment.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
        Ok(match Target::choose(Sources { flag, environment: &look_up, file })? {
            Target::Given(connect) => connect.options.get_host().to_owned(),
            Target::Own => "own".to_owned(),
        })
    }

    #[test]
    fn flag_beats_environment_beats_file_beats_our_own() {
        let url = |name| Some(["postgres://flag/x", "postgres://env/x", "postgres://file/x"][name]);
        let environment = [("DATABASE_URL", "postgres://env/x"), ("PGHOST", "variables")];
        assert_eq!(check(url(0), &environment, url(2)).expect("valid"), "flag");
        assert_eq!(check(None, &environment, url(2)).expect("valid"), "env");
        assert_ne!(check(None, &environment[1..], url(2)).expect("valid"), "file");
        assert_eq!(check(None, &[("DATABASE_URL", ""), ("PGHOST", "")], url(2)).expect("valid"), "file");
        assert_eq!(check(None, &[("PGUSER", "me"), ("PGPORT", "1")], None).expect("valid"), "own");
    }

    #[test]
    fn a_service_file_that_would_decide_is_refused() {
        assert!(check(None, &[("PGSERVICE", "shop")], None).is_err());
        assert_eq!(check(Some("postgres://flag/x"), &[("PGSERVICE", "shop")], None).expect("valid"), "flag");
    }

    #[test]
    fn urls_of_every_form_are_read_and_the_password_is_never_shown() {
        for (url, shown) in [
            ("postgres://u:s3cret@h:6000/d", "h:6000 database d as u"),
            ("postgresql://u%40x:s3cret%2F@h/d%20e?sslmode=require", "h:5432 database d e as u@x"),
            ("postgres://u:s3cret@/d?host=/run/pg", "/run/pg database d as u"),
            ("postgres://u:s3cret@%2Frun%2Fpg/d", "/run/pg database d as u"),
            ("postgres://u:s3cret@h/d?pgbouncer=true", "h:5432 database d as u"),
        ] {
            let connect = Connect::parse(url).expect(url);
            assert_eq!(connect.to_string(), shown);
            assert!(!format!("{connect:?}").contains("s3cret"));
            assert_eq!(connect.pooler == Pooler::Transaction, url.contains("pgbouncer"));
        }
    }

    #[test]
    fn a_broken_url_is_refused_without_showing_the_password() {
        for url in [
            "mysql://u:s3cret@h/d",
            "postgres://u:s3cret/x@h/d",
            "postgres://u:s3cret@h:port/d",
            "postgres://u:s3cret@h/d?sslmode=maybe",
            "postgres://u:s3cret@h/d?pgbouncer=perhaps",
            "postgres://u:s3cret@h/d?passwort=s3cret",
            "postgres://u:1?s3cret@h/d",
        ] {
            let error = format!("{:#}", Connect::parse(url).expect_err(url));
            assert!(!error.contains("s3cret"), "{error}");
        }
    }
}
