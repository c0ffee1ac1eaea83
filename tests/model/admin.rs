//! Random operators: dead letters are redriven and discarded, connections of hosts are cut. What pauses, resumes and
//! seeks groups and keys goes here too.

use std::{sync::Arc, time::Duration};

use millstream::engine::{self, DeadFilter};

use super::world::World;

/// An operator, until the producing is over.
pub async fn operator(world: Arc<World>) {
    let mut random = fastrand::Rng::with_seed(world.seed.wrapping_mul(101));
    while !world.is_produced() {
        tokio::time::sleep(Duration::from_millis(random.u64(50..400))).await;
        if world.cuts_connections && random.u32(0..3) == 0 {
            cut_connections(&world).await;
        }
        let groups = engine::load_groups(&world.database).await.expect("load the groups");
        let group = random.choice(groups).expect("there are groups");
        let dead = engine::pick_dead(&world.database, group.id, &DeadFilter::default()).await.expect("pick");
        let some: Vec<i64> = dead.into_iter().filter(|_| random.bool()).collect();
        if random.u32(0..4) == 0 {
            engine::discard(&world.database, &some, |_| ()).await.expect("discard");
        } else {
            engine::redrive(&world.database, &some, false, |_| ()).await.expect("redrive");
        }
    }
}

/// Ends the connections of hosts over which a turn or a settle went last, maybe before its answer.
async fn cut_connections(world: &World) {
    let sql = "select count(pg_terminate_backend(pid)) from pg_stat_activity
        where datname = current_database() and (query like '%.claim_1(%' or query like '%for key share%')
            and pid <> pg_backend_pid() and application_name <> 'producer'";
    sqlx::query(world.schema.sql(sql)).execute(&world.database.pool).await.expect("cut connections");
}
