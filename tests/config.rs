//! Goal: streams.toml is read whole, and whatever is wrong in it is told with its place and a way out.
//! Method: real files under `configs/`, read by the library as the program reads them.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    time::Duration,
};

use millstream::config::{self, Allow, Config, Filter, Instance, KeyPolicy, OnDeadLetter, Secret, Start};

fn environment(name: &str) -> Option<String> {
    let value = match name {
        "DATABASE_PASSWORD" => "hunter2",
        "CONNECTIONS" => "20",
        "SET_SECRET" => "s3cret",
        _ => return None,
    };
    Some(value.to_owned())
}

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/configs").join(name)
}

/// The files of a folder with one ending, by name.
fn files(kind: &str, ending: &str) -> BTreeMap<String, String> {
    let entries = std::fs::read_dir(folder(kind)).unwrap().map(|entry| entry.unwrap().path());
    entries
        .filter(|path| path.extension().is_some_and(|found| found == ending))
        .map(|path| (path.file_stem().unwrap().to_str().unwrap().to_owned(), std::fs::read_to_string(&path).unwrap()))
        .collect()
}

fn valid(name: &str) -> Config {
    let text = std::fs::read_to_string(folder("valid").join(name)).unwrap();
    config::parse(&text, Path::new(name), &environment).unwrap_or_else(|errors| panic!("{errors}"))
}

/// L6. Impossible mixes of key options are among them. Set MILLSTREAM_WRITE_EXPECTED=1 to write the expected texts anew, then read the difference.
#[test]
fn every_broken_file_is_told_with_its_place_and_a_way_out() {
    let (broken, expected) = (files("invalid", "toml"), files("invalid", "expected"));
    assert!(broken.len() >= 30, "only {} broken files", broken.len());
    let mut wrong = Vec::new();
    for (name, text) in &broken {
        let told = match config::parse(text, Path::new(&format!("{name}.toml")), &environment) {
            Ok(_) => "accepted".to_owned(),
            Err(errors) => errors.to_string(),
        };
        if std::env::var_os("MILLSTREAM_WRITE_EXPECTED").is_some() {
            std::fs::write(folder("invalid").join(format!("{name}.expected")), format!("{told}\n")).unwrap();
        } else if expected.get(name).map(|text| text.trim_end()) != Some(told.as_str()) {
            wrong.push(format!("{name} tells:\n{told}\n"));
        }
    }
    wrong.extend(expected.keys().filter(|name| !broken.contains_key(*name)).map(|name| format!("{name}.toml is gone")));
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn no_error_shows_a_secret() {
    for (name, told) in files("invalid", "expected") {
        for secret in ["hunter2", "s3cret", "sk-live", "4711"] {
            assert!(!told.contains(secret), "{name} shows {secret}");
        }
        assert!(!told.contains("accepted"), "{name} is accepted");
    }
}

#[test]
fn an_empty_file_gives_the_documented_defaults() {
    let config = valid("empty.toml");
    assert_eq!((config.database.url, config.database.schema.as_str()), (None, "millstream"));
    assert_eq!(config.database.max_connections, 16);
    assert_eq!(
        (config.host.listen.as_str(), config.host.handlers.as_path()),
        ("127.0.0.1:7070", Path::new("handlers"))
    );
    assert_eq!((config.host.heartbeat, config.host.lease), (Duration::from_secs(3), Duration::from_secs(10)));
    assert_eq!((config.host.poll_min, config.host.poll_max), (Duration::from_millis(5), Duration::from_millis(100)));
    assert_eq!((config.host.prefetch_bytes, config.host.component_max_bytes), (256 << 20, 64 << 20));
    assert_eq!((config.host.drain_timeout, config.host.compile_threads), (Duration::from_secs(30), 1));
    assert!(config.streams.is_empty() && config.groups.is_empty());
}

#[test]
fn a_small_file_gives_streams_and_groups_their_defaults() {
    let config = valid("smallest.toml");
    let (stream, group) = (&config.streams["orders"], &config.groups["email"]);
    assert_eq!((stream.retention, stream.max_lag), (None, None));
    assert_eq!((stream.idempotency_ttl, stream.max_payload_bytes), (Duration::from_secs(86_400), 1 << 20));
    assert_eq!(stream.partition_rows, 1_000_000);
    assert_eq!((group.slots, group.timeout, group.memory_bytes), (16, Duration::from_secs(30), 64 << 20));
    assert_eq!((group.instance, group.max_reuse, &group.start), (Instance::Fresh, 10_000, &Start::Earliest));
    assert_eq!((group.retry.max_attempts, group.retry.base), (10, Duration::from_secs(1)));
    assert_eq!((group.retry.factor, group.retry.max, group.retry.jitter), (2.0, Duration::from_secs(600), 0.2));
    assert_eq!((group.limits.produced_messages, group.limits.log_bytes), (1000, 64 << 10));
    assert_eq!(group.limits.produced_bytes, 8 << 20);
    assert_eq!(group.limits.http_connections, 64);
    assert_eq!((group.limits.http_request_bytes, group.limits.http_response_bytes), (8 << 20, 8 << 20));
    assert!(group.allow.produce.is_empty() && group.secrets.is_empty());
    let day = Duration::from_secs(86_400);
    assert_eq!((stream.dead_letter_retention, stream.tombstone_retention), (30 * day, 7 * day));
    assert_eq!((stream.key, stream.key_rules.len()), (KeyPolicy::default(), 0));
    assert_eq!((group.on_dead_letter, group.concurrency_override), (OnDeadLetter::Block, None));
    assert_eq!((&group.filter, &group.allow, group.config.len()), (&Filter::default(), &Allow::default(), 0));
}

/// The bounds of DESIGN's table, each at the last value that is allowed and at the first that is not.
#[test]
fn every_bound_is_where_it_is_documented() {
    let small = "[groups.g]\nstream = \"s\"\nhandler = \"h.wasm\"\n";
    let cases = [
        ("[database]\nmax_connections = {}\n[streams.s]", &["2", "500"][..], &["1", "501"][..]),
        ("[host]\nheartbeat = \"1s\"\nlease = {}\n[streams.s]", &["\"3s\""], &["\"2999ms\""]),
        ("[host]\ncompile_threads = {}\n[streams.s]", &["1"], &["0"]),
        ("[[streams.s.key_rules]]\nmatch = \"a\"\nshards = {}", &["1"], &["0", "257"]),
        ("[streams.s]\n{small}slots = {}", &["1", "1000"], &["0", "1001"]),
        ("[streams.s]\n{small}retry = { max_attempts = {} }", &["1", "1000"], &["0", "1001"]),
        ("[streams.s]\n{small}max_reuse = {}", &["1"], &["0"]),
        ("[streams.s]\n{small}limits = { http_connections = {} }", &["1", "10000"], &["0", "10001"]),
        ("[streams.s]\n{small}instance = {}", &["\"fresh\"", "\"reuse\""], &["\"kept\""]),
    ];
    for (text, allowed, refused) in cases {
        let told = |value: &str| {
            let text = text.replace("{small}", small).replace("{}", value);
            config::parse(&text, Path::new("bounds.toml"), &environment).map_err(|errors| errors.to_string())
        };
        for value in allowed {
            assert!(told(value).is_ok(), "{text} with {value}: {:?}", told(value));
        }
        for value in refused {
            assert!(told(value).is_err_and(|told| told.contains("allowed: ")), "{text} with {value} is accepted");
        }
    }
}

#[test]
fn every_key_is_taken_as_it_is_written() {
    let config = valid("everything.toml");
    assert_eq!(config.database.url.as_deref(), Some("postgres://shop:hunter2@db.example/shop"));
    assert!(!format!("{config:?}").contains("hunter2"), "Debug shows the password");
    assert_eq!((config.database.schema.as_str(), config.database.max_connections), ("Shop \"one\"; --", 20));
    assert_eq!((config.host.lease, config.host.drain_timeout), (Duration::from_secs(90), Duration::ZERO));
    assert_eq!(config.host.component_max_bytes, 10_000_000);
    assert_eq!(config.host.handlers_folder(Path::new("/etc/streams.toml")), Path::new("/srv/handlers"));
    let stream = &config.streams["orders"];
    assert_eq!((stream.max_payload_bytes, stream.partition_rows), (65_536, 4096));
    assert_eq!(stream.max_lag, Some(Duration::from_secs(2 * 86_400)));
    assert_eq!((stream.key_rules.len(), stream.key_rules[1].compaction), (2, Some(false)));
    let group = &config.groups["e-mail \"quoted\""];
    assert_eq!((group.instance, group.memory_bytes, &group.start), (Instance::Reuse, 4 << 30, &Start::Latest));
    assert_eq!((group.retry.factor, group.retry.jitter), (2.0, 0.0));
    assert_eq!(group.allow.produce, ["it's a stream; drop table x 🐑", "orders"]);
    assert_eq!(group.allow.http, ["mail.example:443", "[::1]:8080"]);
    assert_eq!((group.limits.http_connections, group.limits.http_request_bytes), (1, 1024));
    assert_eq!(group.limits.http_response_bytes, 256 << 20);
    assert_eq!(group.config["literal"], "${NOT_A_VARIABLE} costs $5");
    assert_eq!(group.secrets["API_KEY"], Secret::Env("MAIL_API_KEY".to_owned()));
    assert_eq!(group.secrets["CERTIFICATE"], Secret::File("certs/mail.pem".into()));
    assert_eq!(group.filter.headers["x-region"], "");
    assert_eq!((group.filter.routing_key.len(), group.filter.not_key.as_slice()), (2, &["ab*".to_owned()][..]));
}

#[test]
fn a_group_starts_where_it_says_in_utc() {
    let config = valid("start_forms.toml");
    let start = |group: &str| config.groups[group].start.clone();
    let new_year = Start::Time("2026-01-01T00:00:00Z".to_owned());
    assert_eq!([start("a"), start("b")], [Start::Earliest, Start::Id(42)]);
    assert_eq!([start("c"), start("d")], [new_year.clone(), new_year]);
}

#[test]
fn a_file_that_cannot_be_read_is_told_in_two_lines() {
    let folder = tempfile::tempdir().unwrap();
    let check = |name: &str, bytes: Option<&[u8]>, expected: &str| {
        let path = folder.path().join(name);
        if let Some(bytes) = bytes {
            std::fs::write(&path, bytes).unwrap();
        }
        let told = config::load(&path).unwrap_err().to_string();
        assert!(told.contains(name) && told.contains(expected) && told.contains("\n  hint: "), "{told}");
    };
    check("missing.toml", None, "no such file");
    check("latin1.toml", Some(b"[host]\nlisten = \"\xe9\"\n"), "not UTF-8 text in line 2");
    check("huge.toml", Some(&vec![b'#'; (8 << 20) + 1]), "larger than 8 MiB");
}

#[test]
fn the_repositorys_own_file_is_valid() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../streams.toml");
    let config = config::load(&path).unwrap_or_else(|errors| panic!("{errors}"));
    assert!(config.database.url.is_none(), "a newcomer has no Postgres yet");
    assert!(config.groups.len() >= 4);
}

/// Goal: whatever the text, an answer and no panic, and a place inside the file. Method: cut, damage and join valid files
/// at random places; the seed is printed with a failure.
#[test]
fn mangled_files_never_panic() {
    let sources: Vec<_> = files("valid", "toml").into_values().chain(files("invalid", "toml").into_values()).collect();
    let splinters =
        ["[", "]", "{", "}", "\"", "'", "=", ".", ",", "\n", "#", "${", "\\u", "é", "\0", "[[", "\"\"\"", "0x", "-"];
    let (mut accepted, mut refused) = (0, 0);
    for seed in 0..20_000 {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut text: Vec<char> = random.choice(&sources).unwrap().chars().collect();
        for _ in 0..random.usize(1..4) {
            let (from, to) = (random.usize(0..=text.len()), random.usize(0..=text.len()));
            let range = from.min(to)..from.max(to).min(from.min(to) + 20);
            match random.u8(0..4) {
                0 => text.truncate(from),
                1 => drop(text.splice(range, [])),
                2 => drop(text.splice(from..from, random.choice(splinters).unwrap().chars())),
                _ => {
                    drop(text.splice(from..from, random.choice(&sources).unwrap().chars().take(80).collect::<Vec<_>>()))
                }
            }
        }
        let text: String = text.into_iter().collect();
        let parsed = std::panic::catch_unwind(|| config::parse(&text, Path::new("mangled.toml"), &environment));
        match parsed.unwrap_or_else(|_| panic!("seed {seed} panics with:\n{text}")) {
            Ok(_) => accepted += 1,
            Err(errors) => {
                refused += 1;
                let lines = text.matches('\n').count() + 1;
                assert!(errors.errors.iter().all(|error| error.position.unwrap().0 <= lines), "seed {seed}: {errors}");
            }
        }
    }
    assert!(accepted > 100 && refused > 1000, "{accepted} accepted, {refused} refused: the mangling tests nothing");
}
