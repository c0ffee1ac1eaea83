//! What served which group, and the bytes of the last few of those components, so that one can be brought back.

use anyhow::{Context, Result};

use super::{ROWS_MAX, Report, Rounds, Step, begin};
use crate::{database::Database, engine::HostId};

/// A component that serves a group from now on.
#[derive(Clone, Copy, Debug)]
pub struct Deployed<'a> {
    pub group: &'a str,
    /// sha256 of the file, lower-case hex.
    pub digest: &'a str,
    /// The file; `None` when it has changed again before it could be read.
    pub bytes: Option<&'a [u8]>,
    /// The digest that served before on this host.
    pub replaced: Option<&'a str>,
}

/// Records a deployment. `false`: it is the one that was recorded last for the group, by whichever host.
pub async fn record_deployment(database: &Database, host: HostId, deployed: Deployed<'_>) -> Result<bool> {
    let recorded = async {
        let mut tx = database.begin().await?;
        let lock = database.query(include_str!("lock_components.sql")).bind(Step::Components.lock());
        lock.execute(&mut *tx).await?;
        let query = database.query(include_str!("record_deployment.sql"));
        let query = query.bind(deployed.group).bind(host.0).bind(deployed.digest).bind(deployed.replaced);
        let is_new = query.execute(&mut *tx).await?.rows_affected() > 0;
        if let (true, Some(bytes)) = (is_new, deployed.bytes) {
            let query = database.query(include_str!("record_component.sql")).bind(deployed.digest).bind(bytes);
            query.execute(&mut *tx).await?;
        }
        tx.commit().await?;
        Ok::<_, sqlx::Error>(is_new)
    };
    recorded.await.with_context(|| format!("record what serves group {}", deployed.group))
}

pub(super) async fn expire(database: &Database) -> Result<Report> {
    let mut rounds = Rounds::start();
    while let Some(mut tx) = begin(database, Step::Components).await? {
        let deployments = database.query(include_str!("expire_deployments.sql")).bind(ROWS_MAX);
        let deployments = deployments.execute(&mut *tx).await.context("delete old deployments")?.rows_affected();
        let components = database.query(include_str!("expire_components.sql")).bind(ROWS_MAX);
        let components = components.execute(&mut *tx).await.context("delete old components")?.rows_affected();
        tx.commit().await?;
        if !rounds.add(deployments + components) {
            break;
        }
    }
    Ok(Report { rows: rounds.rows, ..Report::default() })
}
