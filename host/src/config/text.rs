//! Rules for the texts of streams.toml: names, files, globs, addresses. Pure functions of one text.

use std::net::Ipv6Addr;

/// Longest name of a stream or group. Long enough for any scheme of naming, short enough for an index row and a table column.
pub const NAME_BYTES_MAX: usize = 200;
/// Postgres cuts longer identifiers silently (NAMEDATALEN - 1).
const IDENTIFIER_BYTES_MAX: usize = 63;
/// Same bound as a message key: a longer glob could match nothing.
const GLOB_BYTES_MAX: usize = 1024;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rule {
    /// Anything Postgres and a process environment can hold: no NUL.
    Any,
    /// Of a stream or a group.
    Name,
    Handler,
    Schema,
    /// Of Postgres.
    Role,
    Glob,
    HostPort,
    /// Like `HostPort`; port 0 lets the system choose.
    Listen,
    Url,
    Folder,
    /// Name of an environment variable, a setting or a header.
    Variable,
}

impl Rule {
    /// What is allowed, to stand behind "allowed:".
    pub fn allowed(self) -> &'static str {
        match self {
            Self::Any => "text without NUL characters",
            Self::Name => "a name of 1 to 200 bytes, printable, without blanks at its ends",
            Self::Handler => "a .wasm file inside the handlers folder, without `..`",
            Self::Schema => "a schema name of 1 to 63 bytes that does not start with `pg_`",
            Self::Role => "a role name of 1 to 63 bytes",
            Self::Glob => "a glob of 1 to 1024 bytes (`*` any run of characters, `?` one)",
            Self::HostPort => "\"host:port\"",
            Self::Listen => "an address such as \"127.0.0.1:7070\"",
            Self::Url => "a connection string that starts with postgres:// or postgresql://",
            Self::Folder => "a path",
            Self::Variable => "a name without `=`, blanks or control characters",
        }
    }

    /// Whether a text of this kind may hold a password and is therefore never shown.
    pub fn hidden(self) -> bool {
        matches!(self, Self::Any | Self::Url)
    }

    /// Whether `text` keeps the rule; if not, perhaps with a hint.
    pub fn check(self, text: &str) -> Result<(), Option<&'static str>> {
        let plain_ending = |keeps: bool| if keeps { Ok(()) } else { Err(None) };
        if text.contains('\0') {
            return Err(Some("remove the NUL character: Postgres cannot store it"));
        }
        match self {
            Self::Any => Ok(()),
            Self::Name => check_name(text),
            Self::Handler => check_handler(text),
            Self::Schema if text.starts_with("pg_") => Err(Some("Postgres keeps `pg_` for itself")),
            Self::Schema | Self::Role => plain_ending((1..=IDENTIFIER_BYTES_MAX).contains(&text.len())),
            Self::Glob => plain_ending((1..=GLOB_BYTES_MAX).contains(&text.len())),
            Self::HostPort => check_host_port(text, 1),
            Self::Listen => check_host_port(text, 0),
            Self::Url => plain_ending(text.starts_with("postgres://") || text.starts_with("postgresql://")),
            Self::Folder => plain_ending(!text.is_empty()),
            Self::Variable => plain_ending(
                !text.is_empty() && !text.contains(|c: char| c == '=' || c.is_whitespace() || c.is_control()),
            ),
        }
    }
}

fn check_name(text: &str) -> Result<(), Option<&'static str>> {
    if text.is_empty() {
        return Err(Some("give it a name"));
    }
    if text.len() > NAME_BYTES_MAX {
        return Err(Some("shorten it"));
    }
    if text.trim() != text {
        return Err(Some("remove the blanks at its ends"));
    }
    // Names are shown in tables and logs and typed again on command lines: what cannot be seen cannot be typed.
    if text.contains(|c: char| c.is_control() || (c.is_whitespace() && c != ' ') || is_invisible(c)) {
        return Err(Some("remove line breaks, tabs and invisible characters"));
    }
    Ok(())
}

/// Zero-width and text-direction characters.
fn is_invisible(c: char) -> bool {
    matches!(c, '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2060}'..='\u{2069}' | '\u{feff}')
}

fn check_handler(text: &str) -> Result<(), Option<&'static str>> {
    if text.starts_with('/') || text.contains('\\') {
        return Err(Some("write it relative to the handlers folder, with `/`"));
    }
    if text.split('/').any(|part| matches!(part, "" | "." | "..")) {
        return Err(Some("a handler stays inside the folder that `host.handlers` names"));
    }
    match text.rsplit_once('.') {
        Some((_, "wasm")) => Ok(()),
        Some((_, "cwasm")) => Err(Some("give the .wasm file: precompiled code from elsewhere is not loaded")),
        Some((_, "wat")) => Err(Some("make it a .wasm file first, for example with `wasm-tools parse`")),
        _ => Err(Some("the name ends in .wasm")),
    }
}

fn check_host_port(text: &str, port_min: u16) -> Result<(), Option<&'static str>> {
    if text.contains("://") {
        return Err(Some("leave out `http://` and the path"));
    }
    let Some((host, port)) = text.rsplit_once(':') else { return Err(Some("the port is missing")) };
    let inside = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
    if inside.is_some_and(|inside| inside.parse::<Ipv6Addr>().is_err()) {
        return Err(Some("in brackets there is an IPv6 address: \"[::1]:443\""));
    }
    if host.contains(':') && inside.is_none() {
        return Err(Some("put an IPv6 address in brackets: \"[::1]:443\""));
    }
    if !host.is_ascii() {
        return Err(Some("write an international name in its ASCII form: \"xn--...\""));
    }
    if host.is_empty() || host.contains(|c: char| c.is_whitespace() || c.is_control() || matches!(c, '/' | '@' | '*')) {
        return Err(Some("write one host name or address, without path, user or wildcard"));
    }
    match port.parse::<u16>() {
        Ok(number) if number >= port_min => Ok(()),
        _ => Err(Some("a port is a number up to 65535")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(rule: Rule, good: &[&str], bad: &[&str]) {
        for text in good {
            assert_eq!(rule.check(text), Ok(()), "{rule:?} {text:?}");
        }
        for text in bad {
            assert!(rule.check(text).is_err(), "{rule:?} {text:?}");
        }
    }

    #[test]
    fn names_are_values_and_may_hold_anything_that_can_be_seen() {
        let long = "n".repeat(NAME_BYTES_MAX);
        let longer = "ü".repeat(NAME_BYTES_MAX / 2 + 1);
        let good = ["orders", "a\"b;drop table c", "sürü 🐑", "it's", "a b", &long];
        check(Rule::Name, &good, &["", " a", "a ", "a\tb", "a\nb", "a\0b", "a\u{200b}b", &longer]);
    }

    #[test]
    fn handlers_stay_inside_their_folder() {
        let bad =
            ["", ".wasm/", "/a.wasm", "../a.wasm", "a/../b.wasm", "a//b.wasm", "./a.wasm", "a\\b.wasm", "a.cwasm", "a"];
        check(Rule::Handler, &["a.wasm", "team/a.wasm", "a..b.wasm"], &bad);
    }

    #[test]
    fn addresses_are_a_host_and_a_port() {
        let bad =
            ["", "a", "a:", ":1", "a:0", "a:70000", "http://a:1", "::1:1", "a/b:1", "u@a:1", "*:1", "[a]:1", "é:1"];
        check(Rule::HostPort, &["a:1", "mail.example:443", "[::1]:443", "10.0.0.1:80"], &bad);
        check(Rule::Listen, &["127.0.0.1:0", "[::]:7070"], &["7070", "localhost"]);
    }

    #[test]
    fn schemas_are_any_name_that_postgres_keeps_whole() {
        let long = "s".repeat(63);
        check(Rule::Schema, &["millstream", "My \"Schema\";", &long], &["", "pg_x", "a\0", &"s".repeat(64)]);
    }
}
