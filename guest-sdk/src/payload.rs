//! Reads a payload as JSON. What it says about a payload that does not parse never quotes the payload: reasons are
//! stored, shown and logged, and they outlive the message.

use serde::de::{
    DeserializeOwned,
    value::{Error as NoDetail, UnitDeserializer},
};
use serde_json::error::Category;

/// Reads the payload, or says why it is rejected.
///
/// A tombstone is read as a JSON `null` would be, so `Option<T>` takes it.
pub(crate) fn parse<T: DeserializeOwned>(payload: Option<&[u8]>) -> Result<T, String> {
    match payload {
        Some(bytes) => serde_json::from_slice(bytes).map_err(|error| reason(&error, bytes.len())),
        None => T::deserialize(UnitDeserializer::<NoDetail>::new()).map_err(|_: NoDetail| TOMBSTONE.to_owned()),
    }
}

/// The reason for handlers that do not expect deletions.
const TOMBSTONE: &str = "the message is a tombstone (its key was deleted), and the handler takes none: let it take an `Option` of its payload type";

/// What is wrong with the payload and where, without any of its content.
fn reason(error: &serde_json::Error, payload_bytes: usize) -> String {
    let (line, column) = (error.line(), error.column());
    let text = error.to_string();
    let place = format!(" at line {line} column {column}");
    let text = text.strip_suffix(&place).unwrap_or(&text);
    match error.classify() {
        // The parser's own words: a fixed list, none of which quotes its input.
        Category::Syntax | Category::Eof | Category::Io => {
            format!("the payload ({payload_bytes} bytes) is not JSON: {text},{place}")
        }
        Category::Data => {
            let expected = expected(text).unwrap_or("a rule of its type is not kept");
            format!("the payload ({payload_bytes} bytes) is not what the handler takes: {expected},{place}")
        }
    }
}

/// The same error without anything of what was read: the kind, the place and what was expected stay.
pub(crate) fn without_content(error: serde_json::Error) -> serde_json::Error {
    if error.classify() != Category::Data {
        return error; // the parser's own words, see `reason`
    }
    let (line, column) = (error.line(), error.column());
    let text = error.to_string();
    // A type that judges what is read already knows no place.
    let place = if line == 0 { String::new() } else { format!(" at line {line} column {column}") };
    let expected = expected(text.strip_suffix(&place).unwrap_or(&text)).unwrap_or("a rule of its type is not kept");
    // serde_json takes line and column out of the text.
    serde::de::Error::custom(format!("the JSON does not fit its type: {expected}{place}"))
}

/// The part of serde's message that comes from the handler's types and not from the payload.
///
/// serde writes `invalid type: string "secret", expected u64`: what it found comes first and quotes the payload, what it
/// expected comes last and is fixed text of the type. A message of another form was written by a type of the handler's
/// and may hold anything, so none of it is told.
fn expected(text: &str) -> Option<&str> {
    if is_about_own_field(text, "missing field `") || is_about_own_field(text, "duplicate field `") {
        return Some(text);
    }
    let untagged = text.strip_prefix("data did not match any variant of untagged enum ");
    if untagged.is_some_and(|name| name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')) {
        return Some(text);
    }
    let quotes_payload =
        ["invalid type: ", "invalid value: ", "invalid length ", "unknown field `", "unknown variant `"];
    if !quotes_payload.iter().any(|start| text.starts_with(start)) {
        return None;
    }
    // The last one: what was found may hold these words as well.
    text.rfind(", expected ").map(|at| &text[at + 2..])
}

/// Whether the text is this start, one name and a closing quote: these names are always fields of the handler's types.
fn is_about_own_field(text: &str, start: &str) -> bool {
    let name = text.strip_prefix(start).and_then(|rest| rest.strip_suffix('`'));
    name.is_some_and(|name| !name.contains('`'))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde::Deserialize;

    use super::*;

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    #[expect(dead_code, reason = "only whether it parses is tested")]
    struct Order {
        order_id: String,
        amount_cents: u64,
        currency: Option<Currency>,
    }

    #[derive(Debug, Deserialize)]
    enum Currency {
        Eur,
        Usd,
    }

    #[derive(Debug, Deserialize)]
    #[serde(untagged)]
    #[expect(dead_code, reason = "only whether it parses is tested")]
    enum Either {
        Number(u8),
        Flag(bool),
    }

    /// A type whose own error quotes what it read.
    #[derive(Debug)]
    struct Talkative;

    impl<'de> Deserialize<'de> for Talkative {
        fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
            let text = String::deserialize(deserializer)?;
            Err(serde::de::Error::custom(format!("cannot read {text}, expected {text}")))
        }
    }

    #[track_caller]
    fn check<T: DeserializeOwned + std::fmt::Debug>(payload: &str, told: &str) {
        let reason = parse::<T>(Some(payload.as_bytes())).expect_err("the payload is wrong");
        assert!(!reason.to_lowercase().contains("secret"), "quotes the payload: {reason}");
        assert!(reason.contains(told), "{reason:?} does not say {told:?}");
        assert!(reason.contains(&format!("({} bytes)", payload.len())), "{reason}");
    }

    #[test]
    fn says_what_is_wrong_and_where_without_the_payload() {
        check::<Order>(r#"{"order_id": "secret"}"#, "missing field `amount_cents`, at line 1 column 22");
        check::<Order>(r#"{"order_id": "o", "amount_cents": "secret"}"#, "expected u64, at line 1 column 42");
        check::<Order>(r#"{"order_id": "o", "amount_cents": "a, expected secret"}"#, "takes: expected u64,");
        check::<Order>(r#"{"order_id": "o", "amount_cents": -5}"#, "takes: expected u64,");
        check::<Order>(r#"{"secret": 1}"#, "takes: expected one of `order_id`, `amount_cents`, `currency`,");
        check::<Order>(r#"{"order_id": "secret", "order_id": "secret"}"#, "takes: duplicate field `order_id`,");
        check::<Order>(r#"{"currency": "secret"}"#, "takes: expected `Eur` or `Usd`,");
        check::<Order>(r#"["secret"]"#, "takes: expected struct Order with 3 elements,");
        check::<Order>(r#""secret""#, "takes: expected struct Order,");
        check::<Order>(r#"{"order_id": "secret""#, "is not JSON: EOF while parsing an object, at line 1 column 21");
        check::<Order>("secret", "is not JSON: expected value, at line 1 column 1");
        check::<Order>("{} secret", "takes: missing field `order_id`,");
        check::<Either>(r#""secret""#, "takes: data did not match any variant of untagged enum Either,");
        check::<BTreeMap<String, u8>>(r#"{"secret": 256}"#, "takes: expected u8,");
    }

    #[test]
    fn the_words_of_a_type_that_may_quote_are_not_told() {
        check::<Talkative>(r#""secret""#, "takes: a rule of its type is not kept,");
    }

    #[test]
    fn an_error_without_content_keeps_its_kind_and_place() {
        #[track_caller]
        fn check<T: DeserializeOwned + std::fmt::Debug>(json: &str, told: &str) {
            let whole = serde_json::from_str::<T>(json).expect_err("it is wrong");
            let (kind, line, column) = (whole.classify(), whole.line(), whole.column());
            let error = without_content(whole);
            assert_eq!((error.classify(), error.line(), error.column()), (kind, line, column));
            assert_eq!(error.to_string(), told);
            assert!(!format!("{error} {error:?}").contains("secret"), "{error:?}");
        }
        let unfit = |what: &str| format!("the JSON does not fit its type: {what}");
        check::<Order>(r#"{"currency": "secret"}"#, &unfit("expected `Eur` or `Usd` at line 1 column 21"));
        check::<Order>(
            "\n{\"secret\": 1}",
            &unfit("expected one of `order_id`, `amount_cents`, `currency` at line 2 column 9"),
        );
        check::<u8>(r#""secret""#, &unfit("expected u8 at line 1 column 8"));
        check::<Talkative>(r#""secret""#, &unfit("a rule of its type is not kept"));
        check::<u8>("secret", "expected value at line 1 column 1");
        check::<Order>(r#"{"order_id": "secret"#, "EOF while parsing a string at line 1 column 20");
    }

    #[test]
    fn bytes_that_are_no_text_are_rejected() {
        let reason = parse::<String>(Some(b"\"\xff\"")).expect_err("not UTF-8");
        assert!(reason.contains("is not JSON: invalid unicode code point"), "{reason}");
        let reason = parse::<String>(Some(b"")).expect_err("empty");
        assert!(reason.contains("(0 bytes) is not JSON: EOF while parsing a value"), "{reason}");
    }

    #[test]
    fn a_tombstone_is_none_or_rejected() {
        assert_eq!(parse::<Option<u8>>(None), Ok(None));
        assert_eq!(parse::<u8>(None), Err(TOMBSTONE.to_owned()));
        assert!(parse::<Order>(None).is_err());
    }
}
