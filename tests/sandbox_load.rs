//! Only handlers of our world are loaded; anything else is refused in one line that says what it is and what to do.
//! Method: hand-made files of every wrong kind, and the cache of compiled handlers with damage done to it.

use std::fs;

use millstream::{
    handler::Outcome,
    sandbox::{Sandbox, Settings},
};

use crate::support::handlers::{component, group_settings, handler_wasm, sandbox};

async fn check(bytes: Vec<u8>, expected: &str) {
    let error = sandbox().await.load("x.wasm", bytes).await.unwrap_err().to_string();
    assert_eq!(error, expected);
    assert!(!error.contains('\n'));
}

fn wat(text: &str) -> Vec<u8> {
    wat::parse_str(text).unwrap()
}

const BUILD: &str = "build it with `cargo build --release --target wasm32-unknown-unknown` from a crate with `crate-type = \
                     [\"cdylib\"]` and `#[millstream_guest::handler]`";

#[tokio::test]
async fn what_is_no_wasm_is_refused() {
    check(b"hello".to_vec(), &format!("is not WebAssembly (it starts with [68, 65, 6c, 6c]): {BUILD}")).await;
    check(Vec::new(), "is empty: copy it again").await;
    check(
        b"(module)".to_vec(),
        "is WebAssembly text, not a binary: turn it into one with `wasm-tools parse in.wat -o out.wasm`",
    )
    .await;
    let whole = component("(i32.const 512)");
    let half = whole[..whole.len() / 2].to_vec();
    check(half.clone(), &format!("is a wasm file cut off in the middle ({} bytes): copy it again", half.len())).await;
}

#[tokio::test]
async fn native_code_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let cached = Settings { pool_max: 0, cache_folder: Some(folder.path().into()), ..Settings::default() };
    Sandbox::start(cached).await.unwrap().load("x", component("(i32.const 512)")).await.unwrap();
    let artefact = fs::read_dir(folder.path()).unwrap().next().unwrap().unwrap().path();
    // Our own cache puts a checksum before it.
    let native = fs::read(artefact).unwrap()[32..].to_vec();
    check(
        native,
        "is a precompiled .cwasm, which is native code and is never loaded from a file: put the .wasm it was made from \
         here, the host compiles and caches it",
    )
    .await;
}

#[tokio::test]
async fn core_modules_without_metadata_are_refused() {
    check(
        wat(r#"(module (func (export "handle")))"#),
        &format!(
            "is a core wasm module without WIT metadata, so it does not say how to call it: did you forget \
             #[millstream_guest::handler]? Otherwise {BUILD}"
        ),
    )
    .await;
}

#[tokio::test]
async fn components_of_other_worlds_are_refused() {
    check(
        wat("(component)"),
        "is a component that exports nothing; a handler exports `handle` (millstream:handler@0.1.0): did you forget \
         #[millstream_guest::handler]?",
    )
    .await;
    check(
        wat(r#"(component (core module $m (func (export "f"))) (core instance $i (instantiate $m))
            (func $f (canon lift (core func $i "f"))) (instance $run (export "run" (func $f)))
            (export "wasi:cli/run@0.2.0" (instance $run)))"#),
        "is a component of another world: it exports `wasi:cli/run@0.2.0`; a handler exports `handle` \
         (millstream:handler@0.1.0): did you forget #[millstream_guest::handler]?",
    )
    .await;
    let with_import = |import: &str| {
        let text = include_str!("support/handler.wat").replace("{BODY}", "(i32.const 512)");
        wat(&text.replacen("(component", &format!("(component (import \"{import}\" (instance))"), 1))
    };
    check(
        with_import("wasi:logging/loging@0.1.0-draft"),
        "is a component of another world: it imports `wasi:logging/loging@0.1.0-draft` (did you mean \
         `wasi:logging/logging`?), which this host does not offer; a handler may import millstream:handler, wasi:logging, \
         wasi:config and wasi 0.2 with outgoing http",
    )
    .await;
    check(
        with_import("acme:mail/smtp@1.0.0"),
        "is a component of another world: it imports `acme:mail/smtp@1.0.0`, which this host does not offer; a handler may \
         import millstream:handler, wasi:logging, wasi:config and wasi 0.2 with outgoing http",
    )
    .await;
    check(
        with_import("millstream:handler/outbox@0.2.0"),
        "was built for millstream:handler@0.2.0 and this host speaks millstream:handler@0.1.0: rebuild it with \
         millstream-guest 0.1, or update the host",
    )
    .await;
}

#[tokio::test]
async fn a_handler_with_other_types_is_refused() {
    let text = include_str!("support/handler.wat").replace("{BODY}", "(i32.const 512)");
    let other = wat(&text.replace(r#"(field "rank" (option s64))"#, r#"(field "rank" (option u64))"#));
    let error = sandbox().await.load("x", other).await.unwrap_err().to_string();
    assert!(error.starts_with("does not fit this host's contract ("), "{error}");
    assert!(error.ends_with("): rebuild it with the millstream-guest of this host's version"), "{error}");
}

#[tokio::test]
async fn a_file_over_the_size_limit_is_refused() {
    let settings = Settings { pool_max: 0, file_bytes_max: 1000, ..Settings::default() };
    let error = Sandbox::start(settings).await.unwrap().load("x", vec![0; 1001]).await.unwrap_err();
    assert_eq!(
        error.to_string(),
        "has 1001 bytes and may have 1000 (host.component_max): build it with --release, or raise the limit"
    );
}

/// Damage of every kind to the cache: the handler is compiled again without a word and works.
#[tokio::test]
async fn a_damaged_cache_is_compiled_again() {
    let folder = tempfile::tempdir().unwrap();
    let bytes = handler_wasm("flaky");
    let artefacts = || fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().path()).collect::<Vec<_>>();
    let load = async || {
        let settings = Settings { pool_max: 0, cache_folder: Some(folder.path().into()), ..Settings::default() };
        let sandbox = Sandbox::start(settings).await.unwrap();
        let compiled = sandbox.load("flaky", bytes.clone()).await.unwrap();
        let handler = sandbox.handler(compiled, std::sync::Arc::new(group_settings(|_| {})));
        let finished = crate::support::handlers::deliver(&handler, r#"{"do": "ok"}"#).await;
        assert_eq!(finished.outcome, Outcome::Done);
    };
    load().await;
    let path = artefacts().pop().unwrap();
    let sound = fs::read(&path).unwrap();
    let written = fs::metadata(&path).unwrap().modified().unwrap();
    load().await;
    assert_eq!(
        fs::metadata(&path).unwrap().modified().unwrap(),
        written,
        "a sound artefact is used, not written again"
    );

    let mut flipped = sound.clone();
    let middle = flipped.len() / 2;
    flipped[middle] ^= 1;
    for damaged in [Vec::new(), vec![7; 20], sound[..1000].to_vec(), flipped, vec![0xab; sound.len()]] {
        fs::write(&path, &damaged).unwrap();
        load().await;
        assert_eq!(fs::read(&path).unwrap(), sound);
        assert_eq!(artefacts().len(), 1);
    }
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        assert_eq!(fs::metadata(folder.path()).unwrap().permissions().mode() & 0o777, 0o700);
    }
}
