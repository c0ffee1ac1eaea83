//! The Postgres that the host owns: made once, restarted, recovered after every kind of kill, never left behind.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use millstream::database::{
    Database,
    embedded::{Options, Server, find_running},
};
use rustix::process::{Pid, Signal, getpgid, kill_process};
use sqlx::Row;

use crate::support::{is_alive, scratch_folder, wait_for};

const LIMIT: Duration = Duration::from_secs(60);

async fn start(folder: &Path) -> Server {
    Server::start(Options { folder: folder.to_owned(), throw_away: true }).await.expect("start Postgres")
}

async fn refused(folder: &Path) -> String {
    let result = Server::start(Options { folder: folder.to_owned(), throw_away: true }).await;
    format!("{:#}", result.expect_err("it must be refused"))
}

async fn open(server: &Server) -> Database {
    Database::connect(&server.connect(), 2, "millstream").await.expect("connect")
}

/// Adds a row and returns how many there are: the proof that it is the same data.
async fn add_row(server: &Server) -> i64 {
    let database = open(server).await;
    sqlx::raw_sql("create table if not exists public.kept (n int); insert into public.kept values (1)")
        .execute(&database.pool)
        .await
        .expect("insert");
    let count = sqlx::query("select count(*) from public.kept").fetch_one(&database.pool).await.expect("count").get(0);
    database.close().await;
    count
}

async fn socket_folder(server: &Server) -> PathBuf {
    let database = open(server).await;
    let shown = sqlx::query("show unix_socket_directories").fetch_one(&database.pool).await.expect("show");
    database.close().await;
    PathBuf::from(shown.get::<String, _>(0).trim_matches('"'))
}

fn server_pid(server: &Server) -> i32 {
    let lock_file = fs::read_to_string(server.data_folder().join("postmaster.pid")).expect("postmaster.pid");
    lock_file.lines().next().expect("a first line").parse().expect("a process id")
}

fn kill(pid: i32) {
    kill_process(Pid::from_raw(pid).expect("a process id"), Signal::KILL).expect("kill");
}

/// Started, stopped and started again: the data stays, and a stop leaves no process and no lock file.
#[tokio::test]
async fn a_second_start_finds_the_data_of_the_first() {
    let folder = scratch_folder();
    for expected in 1..=2 {
        let server = start(folder.path()).await;
        assert_eq!(add_row(&server).await, expected);
        let pid = server_pid(&server);
        let data = server.data_folder().to_owned();
        // A ctrl-C in the terminal goes to our process group; the server must not be in it.
        assert_ne!(getpgid(Pid::from_raw(pid)).expect("its group"), getpgid(None).expect("our group"));
        server.stop().await.expect("stop");
        assert!(!is_alive(pid) && !data.join("postmaster.pid").exists());
    }
}

/// Only the private socket: no TCP port, no way in for others, and durable unless asked otherwise.
#[tokio::test]
async fn it_listens_on_a_private_socket_only_and_keeps_fsync_on() {
    use std::os::unix::fs::MetadataExt;
    let folder = scratch_folder();
    let options = Options { folder: folder.path().to_owned(), throw_away: false };
    let server = Server::start(options).await.expect("start");
    let database = open(&server).await;
    let question =
        "select current_setting('listen_addresses'), current_setting('fsync'), current_setting('synchronous_commit')";
    let settings: (String, String, String) =
        sqlx::query_as(question).fetch_one(&database.pool).await.expect("settings");
    assert_eq!(settings, (String::new(), "on".to_owned(), "on".to_owned()));
    database.close().await;
    assert_eq!(fs::metadata(socket_folder(&server).await).expect("socket folder").mode() & 0o777, 0o700);
    server.stop().await.expect("stop");
}

/// kill -9 of the server: the host is told, and the next start recovers what was committed.
#[tokio::test]
async fn a_killed_server_is_noticed_and_recovered() {
    let folder = scratch_folder();
    let server = start(folder.path()).await;
    assert_eq!(add_row(&server).await, 1);
    kill(server_pid(&server));
    let reason = tokio::time::timeout(LIMIT, server.ended()).await.expect("the host notices");
    assert!(reason.contains("Postgres ended"), "{reason}");
    drop(server);
    let server = start(folder.path()).await;
    assert_eq!(add_row(&server).await, 2);
    server.stop().await.expect("stop");
}

/// A host that is gone without a word closes its pipe; that alone must stop the server.
#[tokio::test]
async fn a_host_that_vanishes_leaves_no_server_behind() {
    let folder = scratch_folder();
    let server = start(folder.path()).await;
    let pid = server_pid(&server);
    drop(server);
    wait_for("the server stops", LIMIT, || std::future::ready(!is_alive(pid))).await;
}

/// A start right after a host was killed meets its server, which is still stopping.
#[tokio::test]
async fn a_start_on_the_heels_of_a_killed_host_waits_for_its_server() {
    let folder = scratch_folder();
    let server = start(folder.path()).await;
    assert_eq!(add_row(&server).await, 1);
    drop(server);
    let server = start(folder.path()).await;
    assert_eq!(add_row(&server).await, 2);
    server.stop().await.expect("stop");
}

/// A stale lock file may name a process that lives but is no Postgres of ours: this one.
#[tokio::test]
async fn a_stale_lock_file_with_a_reused_process_number_is_recovered() {
    let folder = scratch_folder();
    let server = start(folder.path()).await;
    assert_eq!(add_row(&server).await, 1);
    let lock_file = server.data_folder().join("postmaster.pid");
    let stale = fs::read_to_string(&lock_file).expect("lock file");
    let rest = stale.split_once('\n').expect("several lines").1.to_owned();
    kill(server_pid(&server));
    server.ended().await;
    drop(server);
    fs::write(&lock_file, format!("{}\n{rest}", std::process::id())).expect("forge the lock file");
    let server = start(folder.path()).await;
    assert_eq!(add_row(&server).await, 2);
    server.stop().await.expect("stop");
}

/// Two hosts of one folder: the second is told who has it and what to do instead.
#[tokio::test]
async fn a_second_host_of_the_same_folder_is_refused() {
    let folder = scratch_folder();
    let server = start(folder.path()).await;
    let error = refused(folder.path()).await;
    assert!(error.contains(&format!("process {}", std::process::id())) && error.contains("--database-url"), "{error}");
    assert_eq!(add_row(&server).await, 1, "the first one is undisturbed");
    server.stop().await.expect("stop");
}

/// A verb beside a running host finds the same database; without a host it finds none.
#[tokio::test]
async fn another_process_of_the_project_finds_the_running_server() {
    let folder = scratch_folder();
    assert!(find_running(folder.path()).await.expect("look").is_none());
    let server = start(folder.path()).await;
    assert_eq!(add_row(&server).await, 1);
    let connect = find_running(folder.path()).await.expect("look").expect("it runs");
    let database = Database::connect(&connect, 2, "millstream").await.expect("connect");
    let count: i64 =
        sqlx::query_scalar("select count(*) from public.kept").fetch_one(&database.pool).await.expect("count");
    assert_eq!(count, 1);
    database.close().await;
    server.stop().await.expect("stop");
    // A child that another test is just starting holds our lock file until it has become another program.
    let gone = async || find_running(folder.path()).await.expect("look").is_none();
    wait_for("nobody finds a stopped server", Duration::from_secs(10), gone).await;
}

/// Data of another major version is never touched.
#[tokio::test]
async fn data_of_another_major_version_is_refused_in_one_line() {
    let folder = scratch_folder();
    let data = folder.path().join("postgres");
    fs::create_dir(&data).expect("make a data folder");
    give_to_server(&data);
    fs::write(data.join("PG_VERSION"), "11\n").expect("write PG_VERSION");
    let error = refused(folder.path()).await;
    assert!(error.contains("made by Postgres 11") && error.contains("no server programs of Postgres 11"), "{error}");
    assert!(!error.contains('\n'), "one line: {error}");
    assert_eq!(fs::read_dir(&data).expect("list").count(), 1, "nothing was added");
}

/// A folder that is no data folder is not taken for an empty one.
#[tokio::test]
async fn a_folder_that_holds_something_else_is_refused() {
    let folder = scratch_folder();
    let data = folder.path().join("postgres");
    fs::create_dir(&data).expect("make a folder");
    fs::write(data.join("thesis.txt"), "years of work").expect("write a file");
    let error = refused(folder.path()).await;
    assert!(error.contains("no Postgres data folder"), "{error}");
    assert!(data.join("thesis.txt").exists());
}

/// A crash in the middle of initdb leaves only a folder of another name, which the next start replaces.
#[tokio::test]
async fn a_half_made_data_folder_is_made_again() {
    let folder = scratch_folder();
    let unfinished = folder.path().join("postgres.unfinished.1");
    fs::create_dir(&unfinished).expect("make a folder");
    fs::write(unfinished.join("PG_VERSION"), "15\n").expect("write PG_VERSION");
    let server = start(folder.path()).await;
    assert_eq!(add_row(&server).await, 1);
    assert!(!unfinished.exists());
    server.stop().await.expect("stop");
}

/// A project deep in the tree has a path too long for a socket.
#[tokio::test]
async fn a_path_too_long_for_a_socket_works_and_is_stable() {
    let folder = scratch_folder();
    let deep = folder.path().join("a-rather-long-name".repeat(4)).join("and-another-one".repeat(5));
    let mut found = None;
    for expected in 1..=2 {
        let server = start(&deep).await;
        assert_eq!(add_row(&server).await, expected);
        let socket = socket_folder(&server).await;
        assert!(socket.as_os_str().len() < 93, "{}", socket.display());
        assert_eq!(*found.get_or_insert_with(|| socket.clone()), socket);
        server.stop().await.expect("stop");
    }
    fs::remove_dir_all(found.expect("it was started").parent().expect("a home")).expect("remove the socket's home");
}

/// A project below a folder that only its owner enters, as /root is: the server's user cannot go there.
#[tokio::test]
async fn a_folder_that_the_server_cannot_reach_works_and_is_stable() {
    use std::os::unix::fs::PermissionsExt;
    let folder = scratch_folder();
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o700)).expect("close the folder");
    let mut data = None;
    for expected in 1..=2 {
        let server = start(&folder.path().join(".millstream")).await;
        assert_eq!(add_row(&server).await, expected);
        let found = server.data_folder().to_owned();
        assert_eq!(*data.get_or_insert_with(|| found.clone()), found);
        server.stop().await.expect("stop");
    }
    let data = data.expect("it was started");
    if !data.starts_with(folder.path()) {
        fs::remove_dir_all(data.parent().expect("a home")).expect("remove the data");
    }
}

/// Under root, the folder belongs to the user that would run the server.
fn give_to_server(folder: &Path) {
    if rustix::process::geteuid().is_root() {
        std::os::unix::fs::chown(folder, Some(65534), Some(65534)).expect("chown");
    }
}
