//! What a redrive keeps and what it begins anew, and that it may be cut anywhere, be done twice, and by two at once.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
};

use millstream::{
    database::{Connect, Database},
    engine::{self, DeadFilter},
    handler::{Concurrency, Finished, Handler, Message, NewMessage},
};

use crate::support::{
    engine::{Project, done, number, text},
    keyed::{LIMIT, all_done, failed, keyed, rejected, streams},
    proxy::{Fate, Proxy},
    wait_for,
};

/// What was delivered, and whether what `is_bad` is done by now.
struct Ward {
    delivered: Arc<Mutex<Vec<Message>>>,
    mended: Arc<AtomicBool>,
    handler: Arc<dyn Handler>,
}

/// A handler that ends bad messages as `ends` says until they are mended.
fn ward(is_bad: fn(&Message) -> bool, ends: fn() -> Finished) -> Ward {
    let (delivered, mended) = (Arc::new(Mutex::new(Vec::new())), Arc::new(AtomicBool::new(false)));
    let (noted, is_mended) = (Arc::clone(&delivered), Arc::clone(&mended));
    let handler = move |message: Message| {
        let fails = is_bad(&message) && !is_mended.load(Relaxed);
        noted.lock().unwrap().push(message);
        if fails { ends() } else { done() }
    };
    Ward { delivered, mended, handler: Arc::new(handler) }
}

impl Ward {
    /// What was delivered since the last look.
    fn take(&self) -> Vec<Message> {
        std::mem::take(&mut *self.delivered.lock().unwrap())
    }
}

fn is_bad(message: &Message) -> bool {
    message.payload.as_deref().is_some_and(|payload| payload.starts_with(b"bad"))
}

const DEAD: &str = "select count(*) from {schema}.dead_letter where redriven_at is null";

async fn are_dead(project: &Project, count: i64) {
    wait_for("they are dead", LIMIT, async || project.number(DEAD).await == count).await;
}

async fn dead_ids(project: &Project) -> Vec<i64> {
    let group = project.group("email").await;
    engine::pick_dead(&project.database, group.id, &DeadFilter::default()).await.unwrap()
}

/// V3. Goal: a redrive neither asks nor changes what is remembered of idempotency keys, inside the window, at its end and
/// after it, in place and appended. Method: the whole table is the same before and after; a produce with the key still
/// answers the first id; after the window the key belongs to a second message, and the first is delivered all the same.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn v3_a_redrive_neither_meets_nor_changes_what_is_remembered() {
    let project = Project::declare(&streams("on_dead_letter = \"skip\"")).await;
    let ward = ward(is_bad, rejected);
    let once = |key: &str, message: NewMessage| NewMessage { idempotency_key: Some(key.into()), ..message };
    let batch = [
        once("plain", text("bad plain")),
        once("exclusive", keyed("e", Concurrency::Exclusive, "bad exclusive")),
        once("ordered", keyed("o", Concurrency::Ordered, "bad ordered")),
        once("behind", keyed("o", Concurrency::Ordered, "behind")),
    ];
    project.produce("orders", &batch).await;
    let host = project.host_with(&[("email", Arc::clone(&ward.handler))]).await;
    are_dead(&project, 3).await;
    all_done(&project).await;
    ward.take();
    let remembered = async || -> Vec<String> {
        let sql = "select k::text from {schema}.idempotency_key_1 k order by 1";
        sqlx::query_scalar(project.database.schema.sql(sql)).fetch_all(&project.database.pool).await.unwrap()
    };
    let duplicates = async |of: &[NewMessage]| -> Vec<(i64, bool)> {
        project.produce("orders", of).await.iter().map(|produced| (produced.id, produced.duplicate)).collect()
    };
    let ids = dead_ids(&project).await;
    // Inside the window they die once more, so that they can be redriven after it.
    for window in ["inside", "after", "forgotten"] {
        match window {
            "inside" => {}
            "after" => {
                project
                    .run("update {schema}.idempotency_key_1 set created_at = created_at - interval '25 hours'")
                    .await;
            }
            _ => project.run("delete from {schema}.idempotency_key_1").await,
        }
        let before = remembered().await;
        let told = engine::redrive(&project.database, &ids, false, |_| ()).await.unwrap();
        assert_eq!((told.redriven, told.refused.len(), told.under_way), (2, 1, 0), "{window}");
        let told = engine::redrive(&project.database, &told.refused, true, |_| ()).await.unwrap();
        assert_eq!(told.redriven, 1, "{window}: appended");
        are_dead(&project, 3).await;
        let mut again: Vec<_> = ward.take().iter().map(|message| (message.id, message.redriven)).collect();
        again.sort_unstable();
        assert_eq!(again, [(1, true), (2, true), (3, true)], "{window}");
        assert_eq!(remembered().await, before, "{window}");
        if window == "inside" {
            assert_eq!(duplicates(&batch).await, [(1, true), (2, true), (3, true), (4, true)]);
        }
    }
    // The keys are those of other messages now; the first ones are redriven beside them.
    let second = duplicates(&batch).await;
    assert!(second.iter().all(|(id, is_duplicate)| *id > 4 && !is_duplicate), "{second:?}");
    are_dead(&project, 6).await;
    all_done(&project).await;
    ward.take();
    ward.mended.store(true, Relaxed);
    let before = remembered().await;
    assert_eq!(engine::redrive(&project.database, &ids, true, |_| ()).await.unwrap().redriven, 3);
    all_done(&project).await;
    are_dead(&project, 3).await;
    assert_eq!(ward.take().len(), 3);
    assert_eq!(remembered().await, before);
    assert!(duplicates(&batch).await.iter().zip(&second).all(|(now, second)| *now == (second.0, true)));
    host.drain().await;
}

/// V4. Goal: what is redriven has all its attempts before it and is as old as it was; no age begins again. Method: messages
/// five hours old die, in place, appended and behind a resting key, also with their partition gone; before a host comes the
/// ages are read, then they fail until they are dead, and once more, and what the handler was told is compared.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn v4_attempts_begin_again_and_the_age_does_not() {
    for (policy, mode) in [
        ("block", Concurrency::Parallel),
        ("block", Concurrency::Exclusive),
        ("block", Concurrency::Ordered),
        ("skip", Concurrency::Ordered),
        ("rest", Concurrency::Ordered),
    ] {
        let project = Project::declare(&streams(&format!("on_dead_letter = \"{policy}\""))).await;
        let ward = ward(is_bad, failed);
        project.produce("orders", &[keyed("k", mode, "bad"), keyed("other", mode, "fine")]).await;
        project
            .run("update {schema}.message_log_1 set created_at = created_at - interval '5 hours' where id = 1")
            .await;
        let host = project.host_with(&[("email", Arc::clone(&ward.handler))]).await;
        are_dead(&project, 1).await;
        wait_for("the other is done", LIMIT, async || ward.delivered.lock().unwrap().len() == 4).await;
        let first = told(&ward, "fine");
        assert_eq!(first.iter().map(|(attempt, _)| *attempt).collect::<Vec<_>>(), [1, 2, 3], "{policy} {mode:?}");
        let produced_at = engine::show_dead(&project.database, 1).await.unwrap().unwrap().produced_at;
        host.drain().await;
        if policy == "skip" {
            project.run("delete from {schema}.message_log_1 where id = 1").await; // its copy is left
        }
        for round in 0..2 {
            let ids = dead_ids(&project).await;
            let append = policy == "skip";
            assert_eq!(engine::redrive(&project.database, &ids, append, |_| ()).await.unwrap().redriven, 1);
            let state = engine::inspect(&project.database).await.unwrap();
            let hours = state.groups[0].oldest_age_ms.map(|age| age / 3_600_000);
            assert_eq!(hours, Some(5), "{policy} {mode:?}, round {round}: the group's oldest age");
            if policy == "rest" {
                let group = project.group("email").await;
                assert!(engine::release_key(&project.database, group.id, "k").await.unwrap());
            }
            let host = project.host_with(&[("email", Arc::clone(&ward.handler))]).await;
            are_dead(&project, 1).await;
            host.drain().await;
            assert_eq!(told(&ward, "fine"), first, "{policy} {mode:?}, round {round}: attempts and age");
            let details = engine::show_dead(&project.database, ids[0]).await.unwrap().unwrap();
            assert_eq!((details.deaths, details.letter.attempts), (round + 2, 3), "{policy} {mode:?}");
            assert_eq!(details.produced_at, produced_at);
        }
    }
}

/// Attempt and time of what was delivered since the last look, but for one payload.
fn told(ward: &Ward, except: &str) -> Vec<(u32, i64)> {
    let is_other = |message: &Message| message.payload.as_deref() != Some(except.as_bytes());
    let delivered = ward.take();
    delivered.iter().filter(|message| is_other(message)).map(|one| (one.attempt, one.produced_at_ms)).collect()
}

/// Dead letters of keyless messages and of many blocked keys with something behind each: more than one step's worth.
const KEYS: usize = 200;

const PLAIN: usize = 1000;

async fn many_dead() -> (Project, Ward) {
    let project = Project::declare(&streams("slots = 64")).await;
    let ward = ward(is_bad, rejected);
    let mut batch: Vec<_> = (0..PLAIN).map(|n| text(&format!("bad {n}"))).collect();
    for payload in ["bad head", "behind"] {
        batch.extend((0..KEYS).map(|n| keyed(&format!("k{n}"), Concurrency::Ordered, payload)));
    }
    project.produce("orders", &batch).await;
    let host = project.host_with(&[("email", Arc::clone(&ward.handler))]).await;
    are_dead(&project, (PLAIN + KEYS) as i64).await;
    host.drain().await;
    ward.take();
    ward.mended.store(true, Relaxed);
    (project, ward)
}

/// A host delivers all there is: each message once, the head of a key before what is behind it, and nothing stays dead.
async fn each_comes_once(project: &Project, ward: &Ward) {
    let host = project.host_with(&[("email", Arc::clone(&ward.handler))]).await;
    all_done(project).await;
    host.drain().await;
    let mut delivered: BTreeMap<Option<String>, Vec<i64>> = BTreeMap::new();
    for message in ward.take() {
        delivered.entry(message.key).or_default().push(message.id);
    }
    let mut plain = delivered.remove(&None).unwrap_or_default();
    plain.sort_unstable();
    assert!(plain.iter().copied().eq(1..=PLAIN as i64), "each keyless message once");
    assert_eq!(delivered.len(), KEYS);
    for ids in delivered.values() {
        assert!(ids.len() == 2 && ids[0] < ids[1], "its head, and what was behind it: {ids:?}");
    }
    assert_eq!(project.number("select count(*) from {schema}.dead_letter").await, 0);
}

/// V5. A redrive that is cut in its second step, at its statement, before its COMMIT and behind it, and is done again then.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn v5_a_redrive_that_is_cut_is_done_again_and_each_comes_once() {
    for (fate, committed) in [(None, 500), (Some(Fate::RequestLost), 500), (Some(Fate::ReplyLost), 1000)] {
        let (project, ward) = many_dead().await;
        project.database.expect_log("testing the connection on-release");
        let ids = dead_ids(&project).await;
        assert_eq!(ids.len(), PLAIN + KEYS);
        match fate {
            Some(fate) => {
                let answer = move |commit| if commit == 2 { fate } else { Fate::Answered };
                let proxy = Proxy::of_commits(&project.database.url().await, answer);
                let connect = Connect::parse(proxy.url()).unwrap();
                let operator = Database::connect(&connect, 2, "millstream").await.unwrap();
                proxy.begin();
                let cut = engine::redrive(&operator, &ids, false, |_| ()).await;
                assert!(cut.is_err() && proxy.lost() == 1, "{cut:?}");
                operator.close().await;
            }
            None => terminated(&project, &ids).await,
        }
        let redriven = "select count(*) from {schema}.dead_letter where redriven_at is not null";
        assert_eq!(project.number(redriven).await, committed, "{fate:?}: whole steps");
        assert_eq!(project.number("select count(*) from {schema}.exception where state = 'waiting'").await, committed);
        for more in [ids.len() as u64 - committed.unsigned_abs(), 0] {
            let told = engine::redrive(&project.database, &ids, false, |_| ()).await.unwrap();
            assert_eq!((told.redriven, told.under_way), (more, ids.len() as u64 - more), "{fate:?}");
        }
        each_comes_once(&project, &ward).await;
    }
}

/// Ends the process of a redrive while its second step waits for a dead letter that somebody else has locked.
async fn terminated(project: &Project, ids: &[i64]) {
    let mut session = project.session().await;
    session.run(&format!("begin; select from {{schema}}.dead_letter where id = {} for update", ids[750])).await;
    let operator = project.database.another_host().await;
    let waits = "select coalesce(min(pid), 0)::bigint from pg_stat_activity
        where datname = current_database() and wait_event_type = 'Lock' and query like '%.redrive(%'";
    let redrive = engine::redrive(&operator, ids, false, |_| ());
    let end = async {
        wait_for("the second step waits", LIMIT, async || number(&project.database, waits).await != 0).await;
        let pid = number(&project.database, waits).await;
        project.run(&format!("select pg_terminate_backend({pid})")).await;
    };
    let (cut, ()) = tokio::join!(redrive, end);
    assert!(cut.is_err(), "{cut:?}");
    session.run("rollback").await;
    operator.close().await;
}

/// V5. Two redrives of the same dead letters at once, from either end: one of them
/// takes it, and each comes once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn v5_two_redrives_at_once_deliver_each_once() {
    let (project, ward) = many_dead().await;
    let ids = dead_ids(&project).await;
    let backwards: Vec<i64> = ids.iter().rev().copied().collect();
    let other = project.database.another_host().await;
    let (one, two) = tokio::join!(
        engine::redrive(&project.database, &ids, false, |_| ()),
        engine::redrive(&other, &backwards, false, |_| ()),
    );
    let (one, two) = (one.unwrap(), two.unwrap());
    assert_eq!(one.redriven + two.redriven, ids.len() as u64, "{one:?} {two:?}");
    assert_eq!(one.under_way + two.under_way, ids.len() as u64, "{one:?} {two:?}");
    other.close().await;
    each_comes_once(&project, &ward).await;
}
