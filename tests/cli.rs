//! Goal: the program's verbs that need no database answer people and machines, and exit as documented.
//! Method: the real program in a project folder of its own; streams and exit codes are looked at.

use std::{fs, path::Path, process::Command, sync::Arc};

use millstream::handler::Outcome;

use crate::support::{
    Program,
    handlers::{deliver, group_settings, sandbox},
};

const STREAMS_TOML: &str = r#"
[streams.orders]
retention = "7d"

[streams.receipts]

[groups.email]
stream = "orders"
handler = "email.wasm"
allow = { produce = ["receipts"] }

[groups.audit]
stream = "orders"
handler = "audit.wasm"
slots = 4
"#;

/// Runs the program and returns exit code, standard output and standard error.
fn run(streams_toml: &str, arguments: &[&str]) -> (i32, String, String) {
    let (status, stdout, stderr) = Program::new(streams_toml).run(arguments);
    (status.code().expect("it was not killed"), stdout, stderr)
}

fn json(text: &str) -> serde_json::Value {
    serde_json::from_str(text).expect("the answer is JSON")
}

#[test]
fn check_prints_what_a_valid_file_declares() {
    let program = Program::new(STREAMS_TOML);
    fs::create_dir(program.folder().join("handlers")).expect("make the handlers folder");
    fs::write(program.folder().join("handlers/audit.wasm"), "").expect("write a handler");
    let (status, stdout, stderr) = program.run(&["check"]);
    assert_eq!(status.code(), Some(0), "{stderr}");
    let expected = "streams.toml is valid

STREAM    GROUPS  RETENTION  MAX PAYLOAD
orders         2         7d         1MiB
receipts       0    forever         1MiB

GROUP  STREAM  HANDLER     SLOTS  TIMEOUT  ATTEMPTS  PRODUCES TO
audit  orders  audit.wasm      4      30s        10
email  orders  email.wasm     16      30s        10  receipts
";
    assert_eq!(stdout, expected);
    assert_eq!(stderr, "warning: groups.email.handler: no file handlers/email.wasm yet: build it and put it there\n");
}

#[test]
fn check_answers_machines_with_the_same() {
    let (code, stdout, stderr) = run(STREAMS_TOML, &["--output", "json", "check"]);
    let answer = json(&stdout);
    assert_eq!((code, stderr.as_str()), (0, ""));
    assert_eq!((&answer["valid"], &answer["errors"]), (&true.into(), &serde_json::json!([])));
    assert_eq!(answer["warnings"].as_array().map(Vec::len), Some(2));
    assert_eq!(answer["streams"][0]["retention_ms"], 604_800_000);
    let email = serde_json::json!({
        "group": "email", "stream": "orders", "handler": "email.wasm", "slots": 16, "timeout_ms": 30_000,
        "max_attempts": 10, "produces_to": ["receipts"],
    });
    assert_eq!(answer["groups"][1], email);
}

#[test]
fn check_tells_every_mistake_and_fails() {
    let broken = "[streams.orders]\nretention = \"soon\"\n[groups.email]\nstream = \"order\"\nhandler = \"a.wasm\"\n";
    let (code, stdout, stderr) = run(broken, &["check"]);
    assert_eq!((code, stdout.as_str()), (1, ""));
    assert!(stderr.contains("streams.toml:2:13: streams.orders.retention: found \"soon\""), "{stderr}");
    assert!(stderr.contains("streams.toml:4:10: groups.email.stream: found \"order\""), "{stderr}");
    assert!(stderr.contains("  hint: did you mean \"orders\"?") && stderr.ends_with("\n2 problems\n"), "{stderr}");

    let (code, stdout, stderr) = run(broken, &["check", "--output", "json"]);
    let answer = json(&stdout);
    assert_eq!((code, stderr.as_str(), &answer["valid"]), (1, "", &false.into()));
    let error = &answer["errors"][1];
    assert_eq!(
        (&error["line"], &error["column"], &error["key"]),
        (&4.into(), &10.into(), &"groups.email.stream".into())
    );
    assert_eq!(error["hint"], "did you mean \"orders\"?");
}

#[test]
fn check_without_a_file_says_which_flag_names_one() {
    let (code, _, stderr) = run("", &["check", "--config", "nowhere/streams.toml"]);
    assert_eq!(code, 1);
    assert!(
        stderr.starts_with("nowhere/streams.toml: no such file\n  hint: ") && stderr.contains("--config"),
        "{stderr}"
    );
}

#[test]
fn the_schema_of_streams_toml_is_json() {
    let (code, stdout, _) = run("this is = = no toml", &["check", "--schema"]);
    assert_eq!(code, 0, "the schema needs no file");
    assert!(json(&stdout)["properties"]["streams"].is_object());
}

#[test]
fn version_tells_what_it_is_built_on() {
    let (code, stdout, _) = run("", &["version", "--output", "json"]);
    let versions = json(&stdout);
    assert_eq!((code, &versions["version"]), (0, &env!("CARGO_PKG_VERSION").into()));
    assert!(versions["wasmtime"].as_str().is_some_and(|version| version.starts_with("48.")), "{stdout}");
    assert!(versions["schema_version"].is_u64());
    let (_, text, _) = run("", &["version"]);
    assert!(text.starts_with("millstream ") && text.lines().count() == 4, "{text}");
}

#[test]
fn every_shell_gets_completions_of_every_verb() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let (code, stdout, _) = run("", &["completions", shell]);
        assert!(code == 0 && stdout.contains("completions") && stdout.contains("check"), "{shell}");
    }
}

#[test]
fn wrong_usage_exits_two_and_shows_the_way() {
    for arguments in [&["chek"][..], &["check", "--no-such-flag"], &["completions"], &["check", "-q", "-v"], &[]] {
        let (code, stdout, stderr) = run("", arguments);
        assert_eq!((code, stdout.as_str()), (2, ""), "{arguments:?}");
        assert!(stderr.contains("Usage: millstream") || stderr.contains("--help"), "{arguments:?}: {stderr}");
    }
    let (_, _, stderr) = run("", &["chek"]);
    assert!(stderr.contains("'check'"), "{stderr}");
}

#[test]
fn help_shows_no_password_of_the_environment() {
    let (code, stdout, _) = run("", &["check", "--help"]);
    assert!(code == 0 && stdout.contains("--database-url <URL>") && stdout.contains("--output"), "{stdout}");
    let (_, with_flag, stderr) =
        run("[host]\nslots = 1\n", &["check", "--database-url", "postgres://u:hunter2@h/d", "-vv"]);
    assert!(!with_flag.contains("hunter2") && !stderr.contains("hunter2"), "{stderr}");
}

/// Method: the written project's own tests are run by cargo, with the versions that the examples are locked to.
#[test]
fn new_writes_a_handler_whose_tests_pass() {
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let sdk = repository.join("guest-sdk");
    let program = Program::new("");
    let (status, stdout, stderr) = program.run(&["new", "order-log", "--sdk", sdk.to_str().expect("UTF-8")]);
    assert!(status.success() && stdout.contains("cd order-log"), "{stderr}");
    let project = program.folder().join("order-log");
    fs::copy(repository.join("examples/Cargo.lock"), project.join("Cargo.lock")).expect("copy the lock file");
    let tests = Command::new("cargo")
        .args(["test", "--quiet", "--target-dir"])
        .arg(Path::new(env!("CARGO_TARGET_TMPDIR")).join("new"))
        .current_dir(&project)
        .output()
        .expect("run cargo");
    assert!(tests.status.success(), "{}", String::from_utf8_lossy(&tests.stderr));
    assert!(String::from_utf8_lossy(&tests.stdout).contains("3 passed"), "{}", String::from_utf8_lossy(&tests.stdout));
}

/// Goal: the project becomes a handler that a host loads. Method: its own Makefile builds it, with the SDK of this
/// repository and a target folder that the next run finds warm; the sandbox runs what came out.
#[tokio::test]
async fn new_writes_a_handler_that_becomes_wasm_and_runs() {
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let sdk = repository.join("guest-sdk");
    let program = Program::new("");
    let (status, _, stderr) = program.run(&["new", "greeter", "--sdk", sdk.to_str().expect("UTF-8")]);
    assert!(status.success(), "{stderr}");
    let project = program.folder().join("greeter");
    fs::copy(repository.join("examples/Cargo.lock"), project.join("Cargo.lock")).expect("copy the lock file");
    let warm = Path::new(env!("CARGO_TARGET_TMPDIR")).join("new-wasm");
    fs::create_dir_all(&warm).expect("make the target folder");
    std::os::unix::fs::symlink(warm, project.join("target")).expect("link the target folder");
    let make = Command::new("make")
        .args(["deploy"])
        .env_remove("CARGO_TARGET_DIR")
        .current_dir(&project)
        .output()
        .expect("run make");
    assert!(make.status.success(), "{}", String::from_utf8_lossy(&make.stderr));
    let wasm = fs::read(program.folder().join("handlers/greeter.wasm")).expect("read what was built");
    let sandbox = sandbox().await;
    let greeter = sandbox.handler(sandbox.load("greeter", wasm).await.unwrap(), Arc::new(group_settings(|_| {})));
    assert_eq!(deliver(&greeter, r#"{"name": "Ada"}"#).await.outcome, Outcome::Done);
    assert_eq!(
        deliver(&greeter, r#"{"name": ""}"#).await.outcome,
        Outcome::Reject { reason: "name is empty".to_owned() }
    );
}

#[test]
fn new_leaves_alone_what_is_there() {
    let program = Program::new("");
    fs::create_dir(program.folder().join("there")).expect("make a folder");
    let (status, _, stderr) = program.run(&["new", "there"]);
    assert!(status.code() == Some(1) && stderr.contains("is there already"), "{stderr}");
    for arguments in [&["new", "../up"][..], &["new", "x", "--sdk", "."], &["new", "x", "--lang", "cobol"]] {
        let (status, _, stderr) = program.run(arguments);
        assert_eq!(status.code(), Some(2), "{stderr}");
    }
    assert!(!program.folder().join("x").exists(), "wrong usage writes nothing");
}
