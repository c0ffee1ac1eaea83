//! Real handlers for tests: the examples, built to wasm once a run, and hand-made components.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::{Arc, OnceLock},
    time::Duration,
};

use millstream::{
    config,
    handler::{Finished, Handler, Message, Outcome},
    sandbox::{Compiled, GroupHandler, GroupSettings, Sandbox, Settings},
};
use tokio::sync::OnceCell;
use tokio_util::sync::CancellationToken;

/// The `.wasm` of one of the repository's examples.
pub fn handler_wasm(name: &str) -> Vec<u8> {
    let path = handlers_folder().join(format!("{name}.wasm"));
    fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Where the examples were built to. Do not write there.
pub fn handlers_folder() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let scratch = Path::new(env!("CARGO_TARGET_TMPDIR"));
        let folder = scratch.join("handlers");
        let output = Command::new("sh")
            .arg(root.join("guest-sdk/build-handlers.sh"))
            .arg(&folder)
            .env("MILLSTREAM_WASM_TARGET_DIR", scratch.join("wasm"))
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        folder
    })
}

/// How often to repeat something: `many` under `make soak`, which sets MILLSTREAM_SOAK.
pub fn rounds<T>(few: T, many: T) -> T {
    if is_soak() { many } else { few }
}

/// Whether it runs under `make soak`, the only place where times are asserted.
pub fn is_soak() -> bool {
    std::env::var_os("MILLSTREAM_SOAK").is_some()
}

/// One sandbox for all tests: a pool takes terabytes of address space, of which a process has 128.
pub async fn sandbox() -> Arc<Sandbox> {
    static SANDBOX: OnceCell<Arc<Sandbox>> = OnceCell::const_new();
    SANDBOX.get_or_init(|| async { Sandbox::start(Settings::default()).await.unwrap() }).await.clone()
}

/// An example, compiled in the shared sandbox once.
pub async fn compiled(name: &'static str) -> Arc<Compiled> {
    static FLAKY: OnceCell<Arc<Compiled>> = OnceCell::const_new();
    let load = || async {
        let bytes = tokio::task::spawn_blocking(move || handler_wasm(name)).await.unwrap();
        sandbox().await.load(name, bytes).await.unwrap()
    };
    if name == "flaky" { FLAKY.get_or_init(load).await.clone() } else { load().await }
}

/// The `flaky` example for a group of its own.
pub async fn flaky(edit: impl FnOnce(&mut config::Group)) -> GroupHandler {
    sandbox().await.handler(compiled("flaky").await, Arc::new(group_settings(edit)))
}

/// The settings of group `g` on stream `orders`, with streams.toml's defaults but a short timeout.
pub fn group_settings(edit: impl FnOnce(&mut config::Group)) -> GroupSettings {
    let mut group = group();
    edit(&mut group);
    let config = config::Config {
        database: config::Database { url: None, schema: "millstream".into(), max_connections: 16 },
        host: host(),
        streams: [("orders".to_owned(), stream()), ("receipts".to_owned(), stream())].into(),
        groups: [("g".to_owned(), group)].into(),
    };
    GroupSettings::from_config(&config, "g", Path::new("")).unwrap()
}

fn host() -> config::Host {
    config::Host {
        listen: "127.0.0.1:7070".into(),
        handlers: "handlers".into(),
        heartbeat: Duration::from_secs(3),
        lease: Duration::from_secs(10),
        drain_timeout: Duration::from_secs(30),
        poll_min: Duration::from_millis(5),
        poll_max: Duration::from_millis(100),
        prefetch_bytes: 256 << 20,
        compile_threads: 1,
        component_max_bytes: 64 << 20,
    }
}

fn stream() -> config::Stream {
    config::Stream {
        retention: None,
        idempotency_ttl: Duration::from_secs(86_400),
        max_payload_bytes: 1 << 20,
        partition_rows: 1_000_000,
        dead_letter_retention: Duration::from_secs(86_400),
        tombstone_retention: Duration::from_secs(86_400),
        max_lag: None,
        key: config::KeyPolicy::default(),
        key_rules: Vec::new(),
    }
}

fn group() -> config::Group {
    config::Group {
        stream: "orders".into(),
        handler: "flaky.wasm".into(),
        start: config::Start::Earliest,
        slots: 16,
        timeout: Duration::from_secs(30),
        memory_bytes: 64 << 20,
        instance: config::Instance::Fresh,
        max_reuse: 10_000,
        filter: config::Filter::default(),
        retry: config::Retry {
            max_attempts: 10,
            base: Duration::from_secs(1),
            factor: 2.0,
            max: Duration::from_secs(600),
            jitter: 0.2,
        },
        on_dead_letter: config::OnDeadLetter::Block,
        concurrency_override: None,
        allow: config::Allow { produce: vec!["receipts".into()], ..config::Allow::default() },
        config: [("sender".to_owned(), "shop@example.com".to_owned())].into(),
        secrets: std::collections::BTreeMap::new(),
        limits: config::Limits {
            produced_messages: 1_000,
            produced_bytes: 8 << 20,
            log_bytes: 64 << 10,
            http_connections: 64,
            http_request_bytes: 8 << 20,
            http_response_bytes: 8 << 20,
        },
    }
}

/// A delivery of group `g` with this payload, and a minute to answer.
pub fn message(id: i64, payload: impl Into<Vec<u8>>) -> Message {
    Message {
        id,
        stream: "orders".into(),
        group: "g".into(),
        key: None,
        rank: None,
        routing_key: None,
        headers: Vec::new(),
        content_type: None,
        payload: Some(payload.into()),
        produced_at_ms: 0,
        attempt: 1,
        max_attempts: 10,
        timeout: Duration::from_secs(60),
        replay: false,
        redriven: false,
        skipped: 0,
        gap_since: None,
        sql: None,
    }
}

/// Delivers one payload to the end.
pub async fn deliver(handler: &dyn Handler, payload: &str) -> Finished {
    handler.handle(message(1, payload), &CancellationToken::new()).await
}

/// Delivers one payload that is given only so long.
pub async fn deliver_within(handler: &dyn Handler, payload: &str, timeout: Duration) -> Finished {
    let message = Message { timeout, ..message(1, payload) };
    handler.handle(message, &CancellationToken::new()).await
}

/// Fails unless the next message of the handler is fine.
pub async fn assert_next_is_fine(handler: &dyn Handler) {
    assert_eq!(deliver(handler, r#"{"do": "ok"}"#).await.outcome, Outcome::Done);
}

/// A hand-made component of the handler world around the body of its `handle`, a function from the address of the message
/// (its id is the u64 there) to the address of the outcome (512 is `done`, 528 is `reject`).
pub fn component(body: &str) -> Vec<u8> {
    let text = include_str!("handler.wat").replace("{BODY}", body);
    wat::parse_str(text).unwrap()
}
