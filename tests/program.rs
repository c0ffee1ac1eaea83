//! The real program, as a user starts it.

use std::time::Duration;

use rustix::process::Signal;

use crate::support::{Program, database, engine::number, handlers::handler_wasm};

/// The real program is found, runs in its project, and is waited for.
#[tokio::test]
async fn the_real_program_runs_in_a_project_of_its_own() {
    let mut program = Program::new("");
    program.start(&["version"]);
    program.signal(Signal::CONT);
    let status = program.ended(Duration::from_secs(30)).await;
    assert!(status.success(), "{}", program.stderr());
    let (again, stdout, _) = program.run(&["version"]);
    assert!(again.success() && stdout == program.stdout());
    assert!(program.folder().join("streams.toml").exists());
}

/// `up` keeps the bytes of what it deploys, once, however often and by how many hosts the same is deployed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn up_records_what_it_deploys() {
    let database = database().await;
    let url = database.url().await;
    let program = Program::new(
        r#"
        [streams.orders]
        [groups.hello]
        stream = "orders"
        handler = "hello.wasm"
        "#,
    );
    let bytes = tokio::task::spawn_blocking(|| handler_wasm("hello")).await.unwrap();
    std::fs::create_dir(program.folder().join("handlers")).unwrap();
    std::fs::write(program.folder().join("handlers/hello.wasm"), &bytes).unwrap();
    for _ in 0..2 {
        let (status, _, stderr) = program.run(&["--database-url", &url, "up", "--drain"]);
        assert!(status.success(), "{stderr}");
    }
    assert_eq!(number(&database, "select count(*) from {schema}.deployment").await, 1);
    let kept = format!(
        "select count(*) from {{schema}}.deployment d join {{schema}}.consumer_group g on g.id = d.group_id
         join {{schema}}.component c using (digest)
         where g.name = 'hello' and octet_length(c.bytes) = {} and encode(sha256(c.bytes), 'hex') = d.digest and d.replaced is null",
        bytes.len()
    );
    assert_eq!(number(&database, &kept).await, 1);
}
