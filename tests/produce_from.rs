//! The examples of producing from other languages, run as their README says, each twice: one order, one message, and the
//! second run answers `duplicate`. That of psql, which comes with the server, always runs; a language that is not on this
//! machine, or whose driver cannot be had, is told and left out.

use std::{
    path::{Path, PathBuf},
    process::{Command, Output},
};

use crate::support::{engine::Project, own_postgres::server_programs, scratch_folder};

fn example(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/produce-from").join(file)
}

/// `None`: the program is not there.
fn run(command: &mut Command) -> Option<Output> {
    match command.output() {
        Ok(output) => Some(output),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
        Err(error) => panic!("{command:?}: {error}"),
    }
}

/// Gets a driver from its registry, into a folder of the test's own.
fn has_driver(command: &mut Command) -> bool {
    match run(command) {
        Some(output) if output.status.success() => true,
        Some(output) => {
            println!("left out: {command:?}: {}", String::from_utf8_lossy(&output.stderr));
            false
        }
        None => {
            println!("left out: {command:?} is not on this machine");
            false
        }
    }
}

/// Runs an example twice for one order, and looks at what it left.
async fn orders_once(project: &Project, order: &str, mut command: impl FnMut() -> Command) {
    for second in ["produced", "duplicate"] {
        // The test cluster's user has the name of our schema, where an unqualified table would go.
        let output = run(command().env("PGOPTIONS", "-c search_path=public")).expect("it is there");
        let told = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{told}{}", String::from_utf8_lossy(&output.stderr));
        assert!(
            told.contains(second) || told.contains(if second == "produced" { "| f" } else { "| t" }),
            "{second}: {told}"
        );
    }
    let messages = format!(
        "select count(*) from {{schema}}.message_log_1 where message_key = '{order}' and concurrency = 'ordered'"
    );
    assert_eq!(project.number(&messages).await, 1);
    assert_eq!(project.number(&format!("select count(*) from public.orders where id = '{order}'")).await, 1);
}

#[tokio::test]
async fn an_order_and_its_message_are_one_commit_from_psql_python_and_node() {
    let project = Project::declare("[streams.orders]").await;
    let url = project.database.url().await;
    let folder = scratch_folder();

    let psql = server_programs().join("psql");
    orders_once(&project, "psql-1", || {
        let mut command = Command::new(&psql);
        command.arg(&url).args(["-q", "-v", "order_id=psql-1", "-f"]).arg(example("order.sql"));
        command
    })
    .await;
    let mut ran = vec!["psql"];
    let python = folder.path().join("python");
    if has_driver(
        Command::new("python3").args(["-m", "pip", "install", "-q", "--target"]).arg(&python).arg("psycopg[binary]"),
    ) {
        orders_once(&project, "python-1", || {
            let mut command = Command::new("python3");
            command.arg(example("order.py")).arg("python-1").env("PYTHONPATH", &python).env("DATABASE_URL", &url);
            command
        })
        .await;
        ran.push("python");
    }
    let node = folder.path().join("node");
    std::fs::create_dir_all(&node).unwrap();
    if has_driver(
        Command::new("npm").args(["install", "--silent", "--no-audit", "--no-fund", "--prefix"]).arg(&node).arg("pg"),
    ) {
        // A module finds its packages from where it lies.
        std::fs::copy(example("order.mjs"), node.join("order.mjs")).unwrap();
        orders_once(&project, "node-1", || {
            let mut command = Command::new("node");
            command.arg(node.join("order.mjs")).arg("node-1").env("DATABASE_URL", &url);
            command
        })
        .await;
        ran.push("node");
    }
    println!("ran from {}", ran.join(", "));
    let orders = project.number("select count(*) from public.orders").await;
    assert_eq!(orders, i64::try_from(ran.len()).unwrap(), "one order from each of {ran:?}");
}
