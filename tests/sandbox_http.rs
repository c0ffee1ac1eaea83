//! A handler reaches by HTTP what its group's `allow.http` names, and nothing else, however it is addressed; and every
//! call has an end. Method: the `flaky` example calls servers of this process; names are given addresses by the sandbox's
//! own hosts table, so that no name server is asked.

use std::{net::IpAddr, path::PathBuf, sync::Arc, time::Duration};

use millstream::{
    config,
    handler::{Handler, Outcome},
    sandbox::{Compiled, GroupHandler, Sandbox, Settings},
};
use serde_json::{Value, json};
use tokio::sync::OnceCell;
use tokio_util::sync::CancellationToken;

use crate::support::{
    PATIENCE,
    handlers::{deliver, deliver_within, group_settings, handler_wasm, message},
    http_server::{HttpServer, Reply, tls_file},
    log_lines::LogLines,
    wait_for,
};

/// One address of each class that no name may lead to, and names that mix them with others.
const NOT_PUBLIC: [(&str, &[&str]); 24] = [
    ("loopback.test", &["127.0.0.1"]),
    ("loopback6.test", &["::1"]),
    ("any.test", &["0.0.0.0"]),
    ("any6.test", &["::"]),
    ("ten.test", &["10.1.2.3"]),
    ("sixteen.test", &["172.16.0.1"]),
    ("home.test", &["192.168.1.1"]),
    ("link-local.test", &["169.254.10.10"]),
    ("metadata.test", &["169.254.169.254"]),
    ("metadata6.test", &["fd00:ec2::254"]),
    ("wire-server.test", &["168.63.129.16"]),
    ("nat.test", &["100.64.0.1"]),
    ("multicast.test", &["224.0.0.1"]),
    ("broadcast.test", &["255.255.255.255"]),
    ("link-local6.test", &["fe80::1"]),
    ("unique-local.test", &["fd12::1"]),
    ("multicast6.test", &["ff02::1"]),
    ("mapped.test", &["::ffff:127.0.0.1"]),
    ("mapped-metadata.test", &["::ffff:169.254.169.254"]),
    ("compatible.test", &["::127.0.0.1"]),
    ("nat64.test", &["64:ff9b::10.0.0.1"]),
    ("six-to-four.test", &["2002:7f00:1::"]),
    ("mixed.test", &["1.1.1.1", "10.0.0.1"]),
    ("mixed6.test", &["2606:4700::1111", "::ffff:10.0.0.1"]),
];

/// A sandbox that trusts the tests' authority and knows the tests' names.
async fn sandbox() -> Arc<Sandbox> {
    static SANDBOX: OnceCell<Arc<Sandbox>> = OnceCell::const_new();
    SANDBOX.get_or_init(|| start(Some(tls_file("ca.pem")))).await.clone()
}

async fn start(authorities_file: Option<PathBuf>) -> Arc<Sandbox> {
    let addresses = |addresses: &[&str]| addresses.iter().map(|address| address.parse().unwrap()).collect();
    let mut hosts: std::collections::BTreeMap<String, Vec<IpAddr>> =
        NOT_PUBLIC.iter().map(|(name, found)| ((*name).to_owned(), addresses(found))).collect();
    hosts.insert("mail.test".into(), addresses(&["127.0.0.1"]));
    hosts.insert("other.test".into(), addresses(&["127.0.0.1"]));
    // Without a pool: the other tests' sandbox takes the address space for one.
    let settings = Settings { pool_max: 0, authorities_file, hosts, ..Settings::default() };
    Sandbox::start(settings).await.unwrap()
}

async fn compiled() -> Arc<Compiled> {
    static FLAKY: OnceCell<Arc<Compiled>> = OnceCell::const_new();
    let load = || async {
        let bytes = tokio::task::spawn_blocking(|| handler_wasm("flaky")).await.unwrap();
        sandbox().await.load("flaky", bytes).await.unwrap()
    };
    FLAKY.get_or_init(load).await.clone()
}

async fn caller_with(allowed: &[String], edit: impl FnOnce(&mut config::Group)) -> GroupHandler {
    let settings = group_settings(|group| {
        group.allow.http = allowed.to_vec();
        edit(group);
    });
    sandbox().await.handler(compiled().await, Arc::new(settings))
}

/// A handler that may call these.
async fn caller(allowed: &[String]) -> GroupHandler {
    caller_with(allowed, |_| {}).await
}

fn told_to_call(url: &str) -> String {
    json!({ "do": "call", "url": url }).to_string()
}

/// What the called side answered, as the handler saw it.
async fn call(handler: &GroupHandler, command: &str) -> Value {
    let finished = deliver(handler, command).await;
    assert_eq!(finished.outcome, Outcome::Done, "{command}");
    serde_json::from_slice(finished.produced[0].payload.as_deref().unwrap()).unwrap()
}

/// Why a call failed. It names no path and no query.
async fn refusal(handler: &GroupHandler, command: &str) -> String {
    let finished = deliver(handler, command).await;
    match finished.outcome {
        Outcome::Retry { reason } => {
            assert!(!reason.contains("hunter2"), "{reason}");
            reason
        }
        other => panic!("{command}: {other:?}"),
    }
}

async fn ok_server() -> HttpServer {
    HttpServer::start(|_| Reply::new(200, "", "hello")).await
}

#[tokio::test]
async fn nothing_is_called_that_is_not_named() {
    let server = ok_server().await;
    let port = server.port();
    let url = format!("http://127.0.0.1:{port}/secret?token=hunter2");
    for allowed in [
        vec![],
        vec![format!("127.0.0.1:{}", port.wrapping_add(1).max(1))],
        vec![format!("127.0.0.2:{port}"), format!("localhost:{port}"), "mail.test:443".into()],
    ] {
        let reason = refusal(&caller(&allowed).await, &told_to_call(&url)).await;
        let expected = format!("call 127.0.0.1:{port}: the group may not; name it in its `allow.http`");
        assert!(reason.starts_with(&expected), "{reason}");
    }
    assert!(server.seen().is_empty());
    let answer = call(&caller(&[format!("127.0.0.1:{port}")]).await, &told_to_call(&url)).await;
    assert_eq!((&answer["status"], &answer["bytes"]), (&json!(200), &json!(5)));
    let seen = server.seen();
    assert_eq!(seen[0].line, "GET /secret?token=hunter2 HTTP/1.1");
    assert_eq!(seen[0].header("host"), Some(format!("127.0.0.1:{port}").as_str()));
}

/// What the SDK's `http::post` sends arrives whole, and where it may not go nothing does.
#[tokio::test]
async fn a_post_arrives_with_its_headers_and_body_where_it_is_allowed_and_nowhere_else() {
    let server = HttpServer::start(|_| Reply::new(201, "location: /orders/7\n", "made")).await;
    let allowed = caller(&[format!("127.0.0.1:{}", server.port())]).await;
    let refused = caller(&["127.0.0.1:9".to_owned()]).await;
    for bytes in [0, 1, 100_000] {
        let url = format!("http://127.0.0.1:{}/orders?token=hunter2", server.port());
        let command = json!({ "do": "call", "url": url, "bytes": bytes }).to_string();
        let reason = refusal(&refused, &command).await;
        assert!(reason.contains("the group may not; name it in its `allow.http`"), "{reason}");
        let before = server.seen().len();
        let answer = call(&allowed, &command).await;
        assert_eq!(answer, json!({ "status": 201, "location": "/orders/7", "bytes": 4 }));
        let seen = server.seen();
        assert_eq!(seen.len(), before + 1, "one request, and none of the refused one");
        let seen = &seen[before];
        assert_eq!(seen.line, "POST /orders?token=hunter2 HTTP/1.1");
        assert_eq!(seen.header("content-type"), Some("text/plain"));
        assert_eq!(seen.header("content-length"), Some(bytes.to_string().as_str()));
        assert!(seen.body == vec![b'x'; bytes], "another body of {} bytes arrived", seen.body.len());
    }
}

#[tokio::test]
async fn no_name_leads_to_an_address_that_is_not_public() {
    let server = ok_server().await;
    let port = server.port();
    // Written so, they are names to us, and addresses to the system's resolver.
    let spellings = ["127.1", "2130706433", "0x7f.0.0.1", "0177.0.0.1"];
    let names: Vec<&str> = NOT_PUBLIC.iter().map(|(name, _)| *name).chain(spellings).collect();
    let allowed: Vec<String> = names.iter().map(|name| format!("{name}:{port}")).collect();
    let handler = caller(&allowed).await;
    for name in &names {
        let reason = refusal(&handler, &told_to_call(&format!("http://{name}:{port}/"))).await;
        assert!(reason.contains("the group may not") || reason.contains("has no address"), "{name}: {reason}");
        assert!(reason.contains("the group may not") || !name.ends_with(".test"), "{name}: {reason}");
    }
    assert!(server.seen().is_empty());
}

#[tokio::test]
async fn an_address_that_is_not_public_is_called_when_it_is_named_itself() {
    let server = ok_server().await;
    let port = server.port();
    let url = |host: &str| told_to_call(&format!("http://{host}:{port}/"));
    let named = caller(&[format!("127.0.0.1:{port}")]).await;
    assert_eq!(call(&named, &url("127.0.0.1")).await["status"], 200);
    assert_eq!(call(&named, &url("[::ffff:127.0.0.1]")).await["status"], 200);
    let localhost = caller(&[format!("localhost:{port}")]).await;
    assert_eq!(call(&localhost, &url("localhost")).await["status"], 200);
    assert!(refusal(&localhost, &url("127.0.0.1")).await.contains("the group may not"));
    // A private name: named, and its address as well.
    let private = caller(&[format!("mail.test:{port}"), format!("127.0.0.1:{port}")]).await;
    assert_eq!(call(&private, &url("mail.test")).await["status"], 200);
    assert_eq!(server.seen().len(), 4);
}

#[tokio::test]
async fn a_redirect_is_an_answer_and_what_it_points_at_is_judged_anew() {
    let inside = ok_server().await;
    let target = format!("http://127.0.0.1:{}/latest/meta-data", inside.port());
    let location = target.clone();
    let server = HttpServer::start(move |_| Reply::new(302, &format!("location: {location}\n"), "")).await;
    let handler = caller(&[format!("127.0.0.1:{}", server.port())]).await;
    let answer = call(&handler, &told_to_call(&format!("http://127.0.0.1:{}/", server.port()))).await;
    assert_eq!((&answer["status"], &answer["location"]), (&json!(302), &json!(target)));
    let reason = refusal(&handler, &told_to_call(answer["location"].as_str().unwrap())).await;
    assert!(reason.contains("the group may not"), "{reason}");
    assert!(inside.seen().is_empty());
}

#[tokio::test]
async fn an_allowed_host_is_called_over_tls_and_must_prove_who_it_is() {
    let server = HttpServer::start_tls(|seen| Reply::new(200, "", &seen.body.len().to_string())).await;
    let plain = HttpServer::start_rude(b"HTTP/1.1 400 x\r\n\r\n").await;
    let ports = [server.port(), plain.port()];
    let hosts = ["mail.test", "other.test", "127.0.0.1"];
    let allowed: Vec<String> =
        ports.iter().flat_map(|port| hosts.iter().map(move |host| format!("{host}:{port}"))).collect();
    let handler = caller(&allowed).await;
    let url = |host: &str| format!("https://{host}:{}/send", server.port());
    for host in ["mail.test", "127.0.0.1"] {
        let command = json!({ "do": "call", "url": url(host), "bytes": 100_000 }).to_string();
        assert_eq!(call(&handler, &command).await["bytes"], 6, "{host}");
    }
    assert_eq!(server.seen().len(), 2);
    assert_eq!(server.seen()[0].line, "POST /send HTTP/1.1");
    assert_eq!(server.seen()[0].body, vec![b'x'; 100_000]);

    let reason = refusal(&handler, &told_to_call(&url("other.test"))).await;
    assert_eq!(reason, format!("call other.test:{}: its certificate is not trusted", server.port()));
    let reason = refusal(&handler, &told_to_call(&format!("https://mail.test:{}/", plain.port()))).await;
    assert_eq!(reason, format!("call mail.test:{}: it does not speak TLS that we know", plain.port()));
    // Plain HTTP to a server that speaks TLS.
    let reason = refusal(&handler, &told_to_call(&format!("http://mail.test:{}/", server.port()))).await;
    assert!(reason.contains("not valid HTTP") || reason.contains("broke off"), "{reason}");
    // A sandbox that was not told of the authority.
    let stranger = start(None).await;
    let settings = group_settings(|group| group.allow.http = allowed.clone());
    let compiled = stranger.load("flaky", handler_wasm("flaky")).await.unwrap();
    let handler = stranger.handler(compiled, Arc::new(settings));
    let reason = refusal(&handler, &told_to_call(&url("mail.test"))).await;
    assert_eq!(reason, format!("call mail.test:{}: its certificate is not trusted", server.port()));
    assert_eq!(server.seen().len(), 2);
}

#[tokio::test]
async fn authorities_that_cannot_be_read_keep_a_host_from_starting() {
    for (file, expected) in [("no-such.pem", "No such file"), ("make.sh", "there is no certificate in it")] {
        let settings = Settings { pool_max: 0, authorities_file: Some(tls_file(file)), ..Settings::default() };
        let error = format!("{:#}", Sandbox::start(settings).await.unwrap_err());
        assert!(error.contains("SSL_CERT_FILE") && error.contains(expected), "{error}");
    }
}

#[tokio::test]
async fn bodies_are_bounded_both_ways() {
    let server = HttpServer::start(|seen| {
        let body = "y".repeat(1000 + seen.line.contains("more") as usize);
        if seen.line.contains("chunked") {
            let chunk =
                format!("HTTP/1.1 200 x\r\ntransfer-encoding: chunked\r\n\r\n{:x}\r\n{body}\r\n0\r\n\r\n", body.len());
            return Reply::Bytes(chunk.into_bytes());
        }
        Reply::new(200, "", &body)
    })
    .await;
    let allowed = [format!("127.0.0.1:{}", server.port())];
    let handler = caller_with(&allowed, |group| {
        group.limits.http_request_bytes = 500;
        group.limits.http_response_bytes = 1000;
    })
    .await;
    let url = |path: &str| format!("http://127.0.0.1:{}/{path}", server.port());
    for path in ["", "chunked"] {
        assert_eq!(call(&handler, &told_to_call(&url(path))).await["bytes"], 1000, "{path}");
    }
    for path in ["more", "chunked-more"] {
        let reason = refusal(&handler, &told_to_call(&url(path))).await;
        assert!(
            reason.ends_with("the answer's body is over the limit of 1000 bytes (limits.http_response_bytes)"),
            "{reason}"
        );
    }
    let send = |bytes: usize| json!({ "do": "call", "url": url(""), "bytes": bytes }).to_string();
    assert_eq!(call(&handler, &send(500)).await["status"], 200);
    let before = server.seen().len();
    let reason = refusal(&handler, &send(501)).await;
    assert!(
        reason.ends_with("the request's body is over the limit of 500 bytes (limits.http_request_bytes)"),
        "{reason}"
    );
    assert_eq!(server.seen().len(), before, "what is too large is not begun");
}

#[tokio::test]
async fn answers_that_are_no_http_are_errors_with_a_name() {
    let cases: [(&str, Vec<u8>, &str); 4] = [
        ("nothing", Vec::new(), "the connection broke off"),
        ("noise", b"\x00\x01 not http\r\n\r\n".to_vec(), "the answer is not valid HTTP"),
        ("half", b"HTTP/1.1 200 x\r\ncontent-length: 10\r\n\r\nhalf".to_vec(), "the connection broke off"),
        ("head", format!("HTTP/1.1 200 x\r\na: {}\r\n\r\n", "x".repeat(1_000_000)).into_bytes(), "head is too large"),
    ];
    for (name, bytes, expected) in cases {
        let server = HttpServer::start(move |_| Reply::Bytes(bytes.clone())).await;
        let handler = caller(&[format!("127.0.0.1:{}", server.port())]).await;
        let reason = refusal(&handler, &told_to_call(&format!("http://127.0.0.1:{}/hunter2", server.port()))).await;
        assert!(reason.contains(expected), "{name}: {reason}");
    }
    let closed = ok_server().await.port();
    let handler = caller(&[format!("127.0.0.1:{closed}")]).await;
    wait_for("the port is closed", PATIENCE, async || {
        tokio::net::TcpStream::connect(("127.0.0.1", closed)).await.is_err()
    })
    .await;
    let reason = refusal(&handler, &told_to_call(&format!("http://127.0.0.1:{closed}/"))).await;
    assert_eq!(reason, format!("call 127.0.0.1:{closed}: the connection was refused"));
    let reason = refusal(&handler, &told_to_call("http://user:hunter2@127.0.0.1/")).await;
    assert!(reason.starts_with("the request is not valid: its URL holds a user"), "{reason}");
}

/// The guest hears of it before it is cut off, and can say why it failed.
#[tokio::test]
async fn a_silent_server_is_a_timeout_of_the_call_before_it_is_one_of_the_delivery() {
    let server = HttpServer::start(|seen| {
        let begun = if seen.line.contains("begun") { "HTTP/1.1 200 x\r\ncontent-length: 9\r\n\r\nhalf" } else { "" };
        Reply::Stall(begun.into())
    })
    .await;
    let handler = caller(&[format!("127.0.0.1:{}", server.port())]).await;
    let url = |path: &str| format!("http://127.0.0.1:{}/{path}", server.port());
    for path in ["", "begun"] {
        let by_guest = json!({ "do": "call", "url": url(path), "ms": 200 }).to_string();
        assert!(refusal(&handler, &by_guest).await.ends_with("no answer in time"), "{path}");
    }
    let finished = deliver_within(&handler, &told_to_call(&url("")), Duration::from_secs(5)).await;
    let Outcome::Retry { reason } = finished.outcome else { panic!("{:?}", finished.outcome) };
    assert!(reason.ends_with("no answer in time"), "{reason}");
    wait_for("every connection is closed", PATIENCE, async || server.open() == 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiting_call_holds_no_core_and_ends_when_its_delivery_is_cut() {
    const WAITING: usize = 40;
    let server = HttpServer::start(|_| Reply::Stall(Vec::new())).await;
    let handler = Arc::new(caller(&[format!("127.0.0.1:{}", server.port())]).await);
    let cut = CancellationToken::new();
    let mut waiting = tokio::task::JoinSet::new();
    for id in 0..WAITING {
        let (handler, cut) = (handler.clone(), cut.clone());
        let message = message(id as i64, told_to_call(&format!("http://127.0.0.1:{}/", server.port())));
        waiting.spawn(async move { handler.handle(message, &cut).await.outcome });
    }
    wait_for("all of them wait", PATIENCE, async || server.open() == WAITING).await;
    assert_eq!(deliver(&*handler, r#"{"do": "ok"}"#).await.outcome, Outcome::Done);
    cut.cancel();
    assert!(waiting.join_all().await.iter().all(|outcome| *outcome == Outcome::HandBack));
    wait_for("every connection is closed", PATIENCE, async || server.open() == 0).await;
}

#[tokio::test]
async fn a_group_has_so_many_calls_at_a_time_and_more_wait() {
    // Slow, so that as many as may be are open at a time.
    let server = HttpServer::start(|_| Reply::late(Duration::from_millis(50), "hello")).await;
    let allowed = [format!("127.0.0.1:{}", server.port())];
    let handler = Arc::new(caller_with(&allowed, |group| group.limits.http_connections = 2).await);
    let mut calling = tokio::task::JoinSet::new();
    for id in 0..12 {
        let handler = handler.clone();
        let message = message(id, told_to_call(&format!("http://127.0.0.1:{}/", server.port())));
        calling.spawn(async move { handler.handle(message, &CancellationToken::new()).await.outcome });
    }
    assert!(calling.join_all().await.iter().all(|outcome| *outcome == Outcome::Done));
    assert_eq!((server.seen().len(), server.most_open()), (12, 2));
}

/// Method: everything that any crate logs, at every level.
#[tokio::test]
async fn no_log_line_and_no_error_holds_what_is_sent_or_answered() {
    let logs = LogLines::of_this_thread();
    let server = HttpServer::start_tls(|seen| match seen.line.contains("broken") {
        true => Reply::Bytes(b"HTTP/1.1 200 x\r\ncontent-length: 99\r\nx-key: hunter2\r\n\r\nhunter2".to_vec()),
        false => Reply::new(200, "x-key: hunter2\n", "hunter2"),
    })
    .await;
    let port = server.port();
    let handler = caller(&[format!("mail.test:{port}"), format!("127.0.0.1:{port}")]).await;
    let url = |path: &str| told_to_call(&format!("https://mail.test:{port}/hunter2/{path}?token=hunter2"));
    assert_eq!(call(&handler, &url("")).await["status"], 200);
    refusal(&handler, &url("broken")).await;
    // What wasmtime's crates trace holds everything; the program never shows it, whatever RUST_LOG says.
    for line in logs.all().iter().filter(|line| !line.target.starts_with("wasmtime_wasi")) {
        assert!(!format!("{line:?}").contains("hunter2"), "{line:?}");
    }
}
