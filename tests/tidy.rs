//! Holds the repository to its own rules: who may know whom, where each crate lives, what every file looks like.

use std::{
    fs,
    path::{Path, PathBuf},
};

/// Crates that only some parts may name, so that a change of one is a change in one place.
const HOMES: [(&str, &[&str]); 10] = [
    ("sqlx", &["client", "database", "engine"]),
    ("wasmtime", &["sandbox"]),
    ("wasmtime_wasi", &["sandbox"]),
    ("wasmtime_wasi_config", &["sandbox"]),
    ("wasmtime_wasi_http", &["sandbox"]),
    ("hyper", &["sandbox"]),
    ("tokio_rustls", &["sandbox"]),
    ("webpki_roots", &["sandbox"]),
    ("wit_component", &["sandbox"]),
    ("notify", &["deploy"]),
];

/// The arrows of ARCHITECTURE.md: each part and the parts it may import.
const ARROWS: [(&str, &[&str]); 10] = [
    ("cli", &["http", "client", "consumer", "deploy", "engine", "sandbox", "database", "config", "handler"]),
    ("http", &["consumer", "deploy", "engine", "sandbox", "database", "config", "handler"]),
    ("client", &["engine", "database", "handler"]),
    ("consumer", &["engine", "database", "config", "handler"]),
    ("deploy", &["engine", "sandbox", "database", "config", "handler"]),
    ("engine", &["database", "config", "handler"]),
    ("sandbox", &["config", "handler"]),
    ("config", &["handler"]),
    ("database", &[]),
    ("handler", &[]),
];

/// Longer files answer more than one question.
const LINES_MAX: usize = 600;

struct Source {
    /// Relative to the repository.
    path: PathBuf,
    text: String,
}

impl Source {
    /// The part of the host it belongs to: `engine` for host/src/engine/claim.rs, `handler` for host/src/handler.rs.
    fn part(&self) -> Option<String> {
        let inside = self.path.strip_prefix("host/src").ok()?;
        let first = inside.components().next()?.as_os_str().to_str()?;
        Some(first.trim_end_matches(".rs").to_owned()).filter(|part| part != "lib" && part != "main")
    }

    /// The code without comment lines.
    fn code(&self) -> String {
        let code = |line: &&str| !line.trim_start().starts_with("//");
        self.text.lines().filter(code).collect::<Vec<_>>().join("\n")
    }
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("host is inside the repository").to_owned()
}

/// Every file of the repository's own folders with this extension.
fn sources(extension: &str) -> Vec<Source> {
    let mut found = Vec::new();
    for folder in ["host", "guest-sdk", "examples", "tests", "wit"] {
        collect(&root().join(folder), extension, &mut found);
    }
    assert!(!found.is_empty(), "no .{extension} file was found");
    found
}

fn collect(folder: &Path, extension: &str, found: &mut Vec<Source>) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for path in entries.map(|entry| entry.expect("read a folder").path()) {
        let name = path.file_name().expect("a name").to_string_lossy().into_owned();
        if path.is_dir() {
            if name != "target" && !name.starts_with('.') {
                collect(&path, extension, found);
            }
        } else if path.extension().is_some_and(|found| found == extension) {
            let text = fs::read_to_string(&path).expect("sources are UTF-8");
            found.push(Source { path: path.strip_prefix(root()).expect("inside").to_owned(), text });
        }
    }
}

/// The names that follow `prefix::` in `code`: one, or all at the top of a group in braces.
fn names_after(code: &str, prefix: &str) -> Vec<String> {
    let mut names = Vec::new();
    for (start, matched) in code.match_indices(prefix) {
        let word_goes_on = code[..start].ends_with(|c: char| c.is_alphanumeric() || c == '_');
        let rest = &code[start + matched.len()..];
        if word_goes_on {
            continue;
        }
        match rest.strip_prefix('{') {
            Some(group) => names.extend(top_of_group(group)),
            None => names.extend(identifier(rest)),
        }
    }
    names
}

fn identifier(text: &str) -> Option<String> {
    let end = text.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(text.len());
    (end > 0).then(|| text[..end].to_owned())
}

fn top_of_group(group: &str) -> Vec<String> {
    let mut depth = 0;
    let mut top = String::new();
    for character in group.chars() {
        match character {
            '{' => depth += 1,
            '}' if depth == 0 => break,
            '}' => depth -= 1,
            _ if depth == 0 => top.push(character),
            _ => {}
        }
    }
    top.split(',').filter_map(|name| identifier(name.trim())).collect()
}

fn check(what: &str, problems: Vec<String>) {
    assert!(problems.is_empty(), "{what}:\n  {}", problems.join("\n  "));
}

#[test]
fn names_in_a_group_are_found_at_its_top_only() {
    let code = "use crate::{engine::{Claim, claim}, config};\nlet x = crate::handler::Message;\nmy_crate::no";
    assert_eq!(names_after(code, "crate::"), ["engine", "config", "handler"]);
}

#[test]
fn parts_import_only_along_the_arrows() {
    let mut problems = Vec::new();
    for source in sources("rs") {
        let Some(part) = source.part() else { continue };
        let Some((_, allowed)) = ARROWS.iter().find(|(name, _)| *name == part) else {
            problems.push(format!("{}: the part `{part}` has no row in ARROWS", source.path.display()));
            continue;
        };
        for name in names_after(&source.code(), "crate::") {
            let is_part = ARROWS.iter().any(|(part, _)| *part == name);
            if is_part && name != part && !allowed.contains(&name.as_str()) {
                problems.push(format!("{}: `{part}` must not import `{name}`", source.path.display()));
            }
        }
    }
    check("arrows between parts go one way", problems);
}

#[test]
fn every_crate_is_named_only_in_its_home() {
    let mut problems = Vec::new();
    for source in sources("rs").iter().filter(|source| source.path.starts_with("host/src")) {
        let part = source.part().unwrap_or_default();
        for (name, homes) in HOMES {
            let code = source.code();
            let named = !names_after(&code, &format!("{name}::")).is_empty() || code.contains(&format!("use {name};"));
            if named && !homes.contains(&part.as_str()) {
                problems.push(format!("{}: `{name}` belongs to {homes:?}", source.path.display()));
            }
        }
    }
    check("one home for each crate", problems);
}

/// A plan of a turn is made once, maybe while its tables are empty, and EXISTS may then be answered from a list of all that
/// a group has: seconds for each turn behind a key with 190,000 messages. `(select true ... limit 1) is null` is looked up.
#[test]
fn turns_look_up_and_do_not_ask_whether_there_is_one() {
    let mut problems = Vec::new();
    for name in ["claim.sql", "keys.sql", "turn.sql"] {
        let sources = sources("sql");
        let source = sources.iter().find(|source| source.path.ends_with(Path::new("functions").join(name)));
        let text = &source.expect("a file of the turn").text;
        let lines = text.lines().map(|line| line.split("--").next().unwrap_or_default());
        let words: Vec<&str> = lines.flat_map(str::split_whitespace).collect();
        for (at, _) in words.iter().enumerate().filter(|(_, word)| word.trim_start_matches('(') == "exists") {
            // Of what is correlated: an alias says so.
            let asked = words[at..].iter().take(24).copied().collect::<Vec<_>>().join(" ");
            if asked.contains("from {schema}.exception e ") || asked.contains("from {schema}.message_key_lease l ") {
                problems.push(format!("{name}: {asked}"));
            }
        }
    }
    check("no EXISTS about rows of the group in a turn", problems);
}

#[test]
fn every_file_says_what_it_does_and_is_short() {
    let mut problems = Vec::new();
    for source in sources("rs") {
        if !source.text.starts_with("//!") {
            problems
                .push(format!("{}: the first line must be `//!` and say what the file does", source.path.display()));
        }
    }
    for source in sources("rs").into_iter().chain(sources("sql")) {
        let lines = source.text.lines().count();
        if lines > LINES_MAX {
            problems.push(format!("{}: {lines} lines; split it by question", source.path.display()));
        }
    }
    check("shape of files", problems);
}

#[test]
fn nothing_is_left_to_fix_and_no_lint_is_silenced_without_a_reason() {
    let fix_me = concat!("FIX", "ME");
    let mut problems = Vec::new();
    for source in sources("rs").into_iter().chain(sources("sql")) {
        for (number, line) in source.text.lines().enumerate() {
            let allows = ["#[", "#!["].iter().any(|open| line.trim_start().starts_with(&format!("{open}allow(")));
            if line.contains(fix_me) || allows {
                problems.push(format!("{}:{}: {}", source.path.display(), number + 1, line.trim()));
            }
        }
    }
    check("use #[expect(.., reason = \"..\")], and mend instead of marking", problems);
}

#[test]
fn every_sql_file_is_run_by_some_rust_file() {
    let rust: Vec<Source> = sources("rs").into_iter().filter(|source| source.path.starts_with("host/src")).collect();
    let is_used = |sql: &Source| {
        let name = format!("{}\"", sql.path.file_name().expect("a name").to_string_lossy());
        rust.iter().any(|source| {
            let near = source.path.parent().expect("a folder");
            let is_near = sql.path.starts_with(near) || sql.path.starts_with("host/migrations");
            is_near && source.code().lines().any(|line| line.contains(&name))
        })
    };
    let in_host = sources("sql").into_iter().filter(|sql| sql.path.starts_with("host"));
    let unused = in_host.filter(|sql| !is_used(sql)).map(|sql| sql.path.display().to_string()).collect();
    check("SQL files that nothing includes", unused);
}

#[test]
fn every_test_file_is_part_of_the_test_program() {
    let main = fs::read_to_string(root().join("tests/main.rs")).expect("tests/main.rs");
    let mut problems = Vec::new();
    for entry in fs::read_dir(root().join("tests")).expect("list tests") {
        let path = entry.expect("read a folder").path();
        let name = path.file_stem().expect("a name").to_string_lossy().into_owned();
        let is_module = path.extension().is_some_and(|extension| extension == "rs") || path.join("mod.rs").exists();
        if is_module && name != "main" && !main.lines().any(|line| line == format!("mod {name};")) {
            problems.push(format!("{}: add `mod {name};` to tests/main.rs", path.display()));
        }
    }
    check("test files that are never run", problems);
}

/// Families of invariants in the semantics: key as a label, compaction, exclusive, ordered, compaction with exclusive and with
/// ordered, retries, dead letters, redrive, idempotent and transactional produce, retention, late groups, rewind, metrics.
/// How many each has.
const INVARIANTS: [(char, u32); 15] = [
    ('L', 6),
    ('C', 14),
    ('E', 10),
    ('O', 13),
    ('X', 4),
    ('Y', 5),
    ('R', 5),
    ('D', 8),
    ('V', 6),
    ('I', 10),
    ('T', 7),
    ('N', 3),
    ('G', 4),
    ('W', 6),
    ('M', 1),
];

/// Those without a test, and why.
const NOT_SHOWN: [(&str, &str); 1] = [("O13", "needs a replica that is promoted")];

/// Each invariant is named by the comment, or by the name, of a test or of a check of the model test.
#[test]
fn every_invariant_is_named_by_a_test() {
    let names = INVARIANTS.iter().flat_map(|(family, count)| (1..=*count).map(move |n| format!("{family}{n}")));
    let tests = sources("rs")
        .into_iter()
        .filter(|source| source.path.starts_with("tests") && !source.path.ends_with("tidy.rs"));
    let tests: Vec<String> = tests.map(|source| source.text).collect();
    let is_named = |name: &str| tests.iter().any(|text| is_named_by_a_test(text, name));
    let is_excused = |name: &str| NOT_SHOWN.iter().any(|(excused, _)| *excused == name);
    let problems = names.filter(|name| is_named(name) == is_excused(name)).collect();
    check("invariants without a test, or with one and an excuse", problems);
}

/// In the lines above a `fn` that are its comment, right above a test's attribute, or in its name. A check of the model test
/// is a function of the facts, without an attribute.
fn is_named_by_a_test(text: &str, name: &str) -> bool {
    let is_word = |line: &str| line.split(|c: char| !c.is_alphanumeric()).any(|word| word == name);
    let in_name = |line: &str| line.split(['_', ' ', '(']).any(|word| word.eq_ignore_ascii_case(name));
    let lines: Vec<&str> = text.lines().collect();
    let is_test = |line: &str| line.starts_with("#[test]") || line.starts_with("#[tokio::test");
    let is_check =
        |line: &str| !line.starts_with(' ') && line.contains("fn ") && line.contains("(facts: &Facts) -> Vec<String>");
    lines.iter().enumerate().filter(|(_, line)| is_test(line) || is_check(line)).any(|(at, line)| {
        let comment = lines[..at].iter().rev().take_while(|line| line.starts_with("///"));
        let named = if is_test(line) { lines.get(at + 1) } else { Some(line) };
        comment.into_iter().any(|line| is_word(line)) || named.is_some_and(|line| in_name(line))
    })
}
