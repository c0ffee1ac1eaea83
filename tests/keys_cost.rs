//! E6: what a turn reads does not grow with the depth of a key, nor with what others of the group hold. Counted by Postgres
//! itself, in turns enough that every plan is the one that stays.

use millstream::{engine, handler::Concurrency};

use crate::support::{
    engine::Project,
    keyed::{LIMIT, keyed, streams},
};

/// What the turn before left to settle.
const MINE: &str = "create temp table mine on commit drop as select
    array(select id from {schema}.claim) as claims,
    array(select claim_id from {schema}.exception where state = 'running') as ran_claims,
    array(select message_id from {schema}.exception where state = 'running') as ran";

/// A turn as a host makes it that has the key `hot` with nothing left to run: it takes what is deferred, and reads on.
fn turn(host: &str) -> String {
    format!(
        "select count(*) from mine, {{schema}}.claim_1(1, {host}, 0, claims, '{{}}', '{{}}', ran_claims, ran, true, array['hot'],
         array[0::smallint], '{{}}', '{{}}', 50, 200, 1048576, 10, null, false, null, null, null, null)"
    )
}

#[tokio::test]
async fn e6_a_turn_reads_as_much_of_a_deep_key_as_of_a_flat_one() {
    let project = Project::declare(&streams("")).await;
    let host = engine::register(&project.database, "test", LIMIT).await.unwrap().to_string();
    let mut read = Vec::new();
    for deep in [0, 20_000] {
        project
            .run(&format!(
                "insert into {{schema}}.message_key_lease (group_id, message_key, host_id) values (1, 'hot', {host}) on conflict do nothing;
                 insert into {{schema}}.exception (group_id, message_id, state, message_key, concurrency)
                 select 1, 1000000 + n, 'deferred', 'hot', 'ordered' from generate_series(1, {deep}) n;
                 insert into {{schema}}.message_key_lease (group_id, message_key, blocked_by)
                 select 1, 'blocked' || n, n from generate_series(1, {deep}) n;
                 insert into {{schema}}.message_key_lease (group_id, message_key, rests)
                 select 1, 'resting' || n, true from generate_series(1, {deep}) n"
            ))
            .await;
        let mut session = project.session().await;
        for round in 0..8 {
            let mut batch: Vec<_> = (0..150).map(|_| keyed("hot", Concurrency::Ordered, "x")).collect();
            batch.extend((0..50).map(|n| keyed(&format!("k{n}"), Concurrency::Exclusive, "x")));
            project.produce("orders", &batch).await;
            let counts = "select relname, coalesce(seq_tup_read, 0) as scanned, coalesce(idx_tup_fetch, 0) as fetched
                from pg_stat_xact_user_tables where relname in ('exception', 'message_key_lease', 'claim', 'dead_letter')";
            session.run(&format!("begin; {MINE}; create temp table before on commit drop as {counts}")).await;
            session.number(&turn(&host)).await;
            let grown = |column: &str| {
                format!(
                    "select coalesce(sum(a.{column} - coalesce(b.{column}, 0)), 0)::bigint from ({counts}) a left join before b using (relname)"
                )
            };
            let (scanned, fetched) = (session.number(&grown("scanned")).await, session.number(&grown("fetched")).await);
            session.run("commit").await;
            assert_eq!(scanned, 0, "depth {deep}, round {round}: tables are not scanned");
            read.push((deep, round, fetched));
        }
    }
    let most =
        |deep| read.iter().filter(|(of, round, _)| *of == deep && *round > 1).map(|(_, _, rows)| *rows).max().unwrap();
    let (flat, deep) = (most(0), most(20_000));
    assert!(
        deep <= 2 * flat + 500,
        "a turn fetches {flat} rows beside a flat key and {deep} beside a deep one: {read:?}"
    );
}
