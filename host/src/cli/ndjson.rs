//! One line of `millstream produce --ndjson` to a message. Never shows a payload, a key or a header in an error.

use std::{borrow::Cow, fmt};

use base64::{Engine, prelude::BASE64_STANDARD};
use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::{Value, value::RawValue};
use time::{OffsetDateTime, UtcOffset, format_description::well_known::Rfc3339};

use crate::{
    config::{nearest, parse_duration},
    handler::{Concurrency, NewMessage},
};

/// Longest line that is read: the largest payload a stream may take (64 MiB), as base64, with room for the rest. Whoever
/// reads the lines holds one in memory.
pub const LINE_BYTES_MAX: usize = 96 << 20;

const FIELDS: [&str; 11] = [
    "payload",
    "payload_base64",
    "key",
    "concurrency",
    "compaction",
    "rank",
    "idempotency_key",
    "routing_key",
    "headers",
    "deliver_after",
    "delay",
];

/// A message and when it may be delivered.
#[derive(Clone, Debug)]
pub struct Line {
    pub message: NewMessage,
    /// RFC 3339 in UTC. Invariant: not beside `message.delay`.
    pub deliver_after: Option<String>,
}

/// What is wrong with a line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LineError {
    /// From 1.
    pub line: u64,
    pub message: String,
}

impl fmt::Display for LineError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}: {}", self.line, self.message)
    }
}

impl std::error::Error for LineError {}

/// Reads line `number` of an input for `stream`. A JSON payload is taken byte for byte as it is written, so that large
/// numbers, the order of keys and escapes stay; `null` is a tombstone, which needs a key.
///
/// # Errors
/// Returns the first thing that is wrong, without any value of the line.
pub fn parse_line(stream: &str, number: u64, line: &[u8]) -> Result<Line, LineError> {
    parse(stream, line).map_err(|message| LineError { line: number, message })
}

fn parse(stream: &str, line: &[u8]) -> Result<Line, String> {
    if line.len() > LINE_BYTES_MAX {
        return Err(format!("longer than {} MiB", LINE_BYTES_MAX >> 20));
    }
    let text = std::str::from_utf8(line).map_err(|error| format!("not UTF-8 at byte {}", error.valid_up_to() + 1))?;
    let Fields(fields) = serde_json::from_str(text).map_err(|error| syntax_error(&error))?;
    let mut line =
        Line { message: NewMessage { stream: stream.to_owned(), ..NewMessage::default() }, deliver_after: None };
    let mut seen = Vec::with_capacity(fields.len());
    for (name, raw) in &fields {
        if seen.contains(name) {
            return Err(format!("field `{}` stands twice", shown(name)));
        }
        seen.push(name.clone());
        set(&mut line, name, raw)?;
    }
    let has = |name: &str| seen.iter().any(|seen| seen == name);
    match (has("payload"), has("payload_base64")) {
        (false, false) => return Err("no payload: give `payload` (any JSON) or `payload_base64`".to_owned()),
        (true, true) => return Err("two payloads: give `payload` or `payload_base64`".to_owned()),
        _ => {}
    }
    if has("deliver_after") && has("delay") {
        return Err("two times: give `deliver_after` or `delay`".to_owned());
    }
    if line.message.payload.is_none() && line.message.key.is_none() {
        return Err("payload null deletes a key, and there is no `key`; for the JSON text null give \
                    `\"payload_base64\": \"bnVsbA==\"`"
            .to_owned());
    }
    Ok(line)
}

fn set(line: &mut Line, name: &str, raw: &RawValue) -> Result<(), String> {
    let message = &mut line.message;
    match name {
        "payload" if raw.get() == "null" => message.payload = None,
        "payload" => {
            message.payload = Some(raw.get().as_bytes().to_vec());
            message.content_type = Some("application/json".to_owned());
        }
        "payload_base64" => {
            let encoded = text(name, raw)?;
            let decoded =
                BASE64_STANDARD.decode(encoded).map_err(|_| "field `payload_base64` is not base64".to_owned())?;
            message.payload = Some(decoded);
        }
        "key" => message.key = optional(raw, |raw| text(name, raw))?,
        "concurrency" => message.concurrency = optional(raw, |raw| concurrency(&text(name, raw)?))?,
        "compaction" => {
            message.compaction = optional(raw, |raw| typed(name, raw, "true or false", |value| value.as_bool()))?
        }
        "rank" => message.rank = optional(raw, |raw| typed(name, raw, "a whole number", |value| value.as_i64()))?,
        "idempotency_key" => message.idempotency_key = optional(raw, |raw| text(name, raw))?,
        "routing_key" => message.routing_key = optional(raw, |raw| text(name, raw))?,
        "headers" => message.headers = optional(raw, headers)?.unwrap_or_default(),
        "deliver_after" => line.deliver_after = optional(raw, |raw| time(&text(name, raw)?))?,
        "delay" => {
            let read =
                |raw: &RawValue| parse_duration(&text(name, raw)?).map_err(|hint| format!("field `delay`: {hint}"));
            message.delay = optional(raw, read)?;
        }
        unknown => {
            let hint = match nearest(unknown, FIELDS) {
                Some(near) => format!("did you mean `{near}`?"),
                None => format!("allowed: {}", FIELDS.join(", ")),
            };
            return Err(format!("unknown field `{}`; {hint}", shown(unknown)));
        }
    }
    Ok(())
}

/// `null` is the same as leaving a field out.
fn optional<T>(raw: &RawValue, read: impl FnOnce(&RawValue) -> Result<T, String>) -> Result<Option<T>, String> {
    if raw.get() == "null" { Ok(None) } else { read(raw).map(Some) }
}

fn typed<T>(name: &str, raw: &RawValue, allowed: &str, read: impl FnOnce(&Value) -> Option<T>) -> Result<T, String> {
    let value: Value =
        serde_json::from_str(raw.get()).map_err(|error| format!("field `{name}`: {}", reason(&error)))?;
    read(&value).ok_or_else(|| format!("field `{name}` is {}; allowed: {allowed}", type_name(&value)))
}

/// A string that Postgres can hold as text.
fn text(name: &str, raw: &RawValue) -> Result<String, String> {
    let text = typed(name, raw, "a string", |value| value.as_str().map(str::to_owned))?;
    without_nul(name, text)
}

fn without_nul(name: &str, text: String) -> Result<String, String> {
    if text.contains('\0') {
        return Err(format!("field `{name}` holds a NUL character, which Postgres cannot store: remove it"));
    }
    Ok(text)
}

fn headers(raw: &RawValue) -> Result<Vec<(String, String)>, String> {
    let entries = typed("headers", raw, "an object of strings", |value| value.as_object().cloned())?;
    let mut headers = Vec::with_capacity(entries.len());
    for (name, value) in entries {
        let Value::String(value) = value else {
            return Err(format!("a value in `headers` is {}; allowed: strings", type_name(&value)));
        };
        headers.push((without_nul("headers", name)?, without_nul("headers", value)?));
    }
    Ok(headers)
}

fn concurrency(text: &str) -> Result<Concurrency, String> {
    [Concurrency::Parallel, Concurrency::Exclusive, Concurrency::Ordered]
        .into_iter()
        .find(|mode| mode.as_str() == text)
        .ok_or_else(|| "field `concurrency`; allowed: \"parallel\", \"exclusive\", \"ordered\"".to_owned())
}

fn time(text: &str) -> Result<String, String> {
    utc_time(text).ok_or_else(|| {
        "field `deliver_after` is no time; allowed: date, time and zone such as \"2026-01-01T00:00:00Z\"".to_owned()
    })
}

/// An RFC 3339 time as the same moment in UTC. `None` for anything else.
pub(super) fn utc_time(text: &str) -> Option<String> {
    let utc = OffsetDateTime::parse(text, &Rfc3339).ok()?.checked_to_offset(UtcOffset::UTC)?;
    utc.format(&Rfc3339).ok()
}

fn type_name(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

/// A field's name, cut and made visible: it may be anything, a payload that lost its quotes included.
fn shown(name: &str) -> String {
    const SHOWN_CHARS_MAX: usize = 30;
    super::output::visible(&name.chars().take(SHOWN_CHARS_MAX).collect::<String>())
}

fn syntax_error(error: &serde_json::Error) -> String {
    let what = reason(error);
    if error.is_data() { what } else { format!("not valid JSON at column {}: {what}", error.column()) }
}

/// serde_json's words for slips of syntax name no value; those for wrong types would.
fn reason(error: &serde_json::Error) -> String {
    if error.is_data() {
        return "not a JSON object; a line is {\"payload\": ...}".to_owned();
    }
    let text = error.to_string();
    text.split(" at line ").next().unwrap_or_default().to_owned()
}

/// The fields of an object in their order, so that one that stands twice is seen, and values as they are written.
struct Fields<'a>(Vec<(Cow<'a, str>, &'a RawValue)>);

impl<'de> Deserialize<'de> for Fields<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Collect;
        impl<'de> Visitor<'de> for Collect {
            type Value = Fields<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut fields = Vec::new();
                while let Some((name, value)) = map.next_entry::<String, &'de RawValue>()? {
                    fields.push((Cow::Owned(name), value));
                }
                Ok(Fields(fields))
            }
        }
        deserializer.deserialize_map(Collect)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn good(line: &str) -> Line {
        parse_line("orders", 1, line.as_bytes()).unwrap()
    }

    /// The error of a bad line holds `expected` and nothing of the line's values, which all say `secret`.
    fn bad(line: impl AsRef<[u8]>, expected: &str) {
        let error = parse_line("orders", 7, line.as_ref()).unwrap_err().to_string();
        assert!(error.starts_with("line 7: ") && error.contains(expected), "{error}");
        assert!(!error.contains("secret"), "{error}");
    }

    #[test]
    fn only_the_payload_is_needed_and_it_stays_as_it_is_written() {
        for payload in
            [r#"{"b":1.0, "a":12345678901234567890123}"#, "\"text\"", "[1]", "true", r#""\ud800\u0000""#, "0"]
        {
            let line = good(&format!("{{\"payload\": {payload}}}\r"));
            assert_eq!(line.message.payload.as_deref(), Some(payload.as_bytes()));
            assert_eq!(line.message.content_type.as_deref(), Some("application/json"));
            assert_eq!(line.message.stream, "orders");
        }
        let deep = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
        assert_eq!(good(&format!("{{\"payload\": {deep}}}")).message.payload, Some(deep.into_bytes()));
        let line = good(r#"{"payload_base64": "AP/+"}"#);
        assert_eq!((line.message.payload, line.message.content_type), (Some(vec![0, 255, 254]), None));
        assert_eq!(good(r#"{"payload_base64": ""}"#).message.payload, Some(Vec::new()));
    }

    #[test]
    fn every_field_is_taken() {
        let line = good(
            r#"{"payload": {}, "key": "o-1", "concurrency": "ordered", "compaction": true, "rank": -3, "idempotency_key": "i",
               "routing_key": "eu.shop", "headers": {"kind": "order", "x": ""}, "deliver_after": "2026-01-01T02:00:00+02:00"}"#,
        );
        let message = line.message;
        assert_eq!((message.key.as_deref(), message.rank), (Some("o-1"), Some(-3)));
        assert_eq!((message.concurrency, message.compaction), (Some(Concurrency::Ordered), Some(true)));
        assert_eq!((message.idempotency_key.as_deref(), message.routing_key.as_deref()), (Some("i"), Some("eu.shop")));
        assert_eq!(message.headers, [("kind".to_owned(), "order".to_owned()), ("x".to_owned(), String::new())]);
        assert_eq!(line.deliver_after.as_deref(), Some("2026-01-01T00:00:00Z"));
        assert_eq!(good(r#"{"payload": 1, "delay": "1m30s"}"#).message.delay, Some(Duration::from_secs(90)));
    }

    #[test]
    fn null_is_a_tombstone_as_payload_and_nothing_elsewhere() {
        let line = good(r#"{"payload": null, "key": "o-1", "rank": null, "headers": null, "deliver_after": null}"#);
        assert_eq!((line.message.payload, line.message.rank, line.deliver_after), (None, None, None));
        bad(r#"{"payload": null}"#, "there is no `key`");
    }

    #[test]
    fn a_broken_line_is_told_without_its_content() {
        bad("", "not valid JSON");
        bad("secret", "not valid JSON at column 1");
        bad(r#"{"payload": "secret}"#, "not valid JSON at column");
        bad(r#"{"payload": "secret"} {"payload": 1}"#, "trailing characters");
        bad(b"{\"payload\": \"secret \xff\"}", "not UTF-8 at byte 21");
        bad("\"secret\"", "not a JSON object");
        bad("[\"secret\"]", "not a JSON object");
        bad("{}", "no payload");
        bad(r#"{"payload": 1, "payload_base64": "c2VjcmV0"}"#, "two payloads");
        bad(r#"{"payload": 1, "payload": "secret"}"#, "`payload` stands twice");
        bad(r#"{"payload_base64": "secret!"}"#, "not base64");
        bad(r#"{"payload": 1, "delay": "5s", "deliver_after": "2026-01-01T00:00:00Z"}"#, "two times");
        bad(format!("{{\"payload\": {}}}", "[".repeat(100_000)), "not valid JSON at column");
        bad(format!("{{\"payload\": 1, \"key\": {}{}}}", "[".repeat(100_000), "]".repeat(100_000)), "recursion limit");
    }

    #[test]
    fn a_wrong_field_is_named() {
        bad(r#"{"payload": 1, "keys": "secret"}"#, "unknown field `keys`; did you mean `key`?");
        bad(r#"{"payload": 1, "topic": "secret"}"#, "unknown field `topic`; allowed: payload, ");
        bad(r#"{"payload": 1, "key": 5}"#, "field `key` is a number; allowed: a string");
        bad(r#"{"payload": 1, "key": "secret\u0000"}"#, "field `key` holds a NUL character");
        bad(r#"{"payload": 1, "key": "secret\ud800"}"#, "field `key`: ");
        bad(r#"{"payload": 1, "headers": {"a": "secret\u0000"}}"#, "field `headers` holds a NUL character");
        bad(r#"{"payload": 1, "headers": {"a": 1}}"#, "a value in `headers` is a number; allowed: strings");
        bad(r#"{"payload": 1, "headers": ["secret"]}"#, "field `headers` is an array");
        bad(r#"{"payload": 1, "rank": 1.5}"#, "field `rank` is a number; allowed: a whole number");
        bad(r#"{"payload": 1, "rank": 9223372036854775808}"#, "a whole number");
        bad(r#"{"payload": 1, "concurrency": "secret"}"#, "\"exclusive\"");
        bad(r#"{"payload": 1, "compaction": "secret"}"#, "true or false");
        bad(r#"{"payload": 1, "deliver_after": "secret"}"#, "`deliver_after` is no time");
        bad(r#"{"payload": 1, "delay": "secret"}"#, "field `delay`: write a number and a unit");
    }
}
