//! What a handler is told when Postgres refuses its statement: never a value.

/// Marks between which Postgres quotes, in the languages that it speaks.
const QUOTES: [char; 8] = ['"', '\u{ab}', '\u{bb}', '\u{201c}', '\u{201d}', '\u{201e}', '\u{300c}', '\u{300d}'];

/// The message without the value that it quotes. Values come from payloads, and what a handler is told here usually is the
/// reason it fails with: that is stored, shown and logged. Details of an error are not passed on at all.
///
/// Errors about data (class 22) quote what could not be read; errors of class 42 quote what stands in the statement, which is
/// the handler's own text, unless a search or a path was parsed that is a value.
pub(super) fn without_value(sqlstate: &str, message: &str) -> String {
    let is_of_a_value = sqlstate.starts_with("22")
        || (sqlstate == "42601" && ["unterminated", "tsquery", "jsonpath"].iter().any(|part| message.contains(part)));
    let (Some(start), Some(end)) = (message.find(QUOTES), message.rfind(QUOTES)) else { return message.to_owned() };
    if !is_of_a_value {
        return message.to_owned();
    }
    let rest = message[end..].trim_start_matches(QUOTES);
    format!("{}\"...\"{rest}", &message[..start])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_about_a_value_does_not_quote_it() {
        let of_data = |message| without_value("22P02", message);
        assert_eq!(
            of_data("invalid input syntax for type uuid: \"a\"b\""),
            "invalid input syntax for type uuid: \"...\""
        );
        assert_eq!(
            of_data("value \"99\" is out of range for type integer"),
            "value \"...\" is out of range for type integer"
        );
        assert_eq!(
            of_data("ungültige Eingabesyntax für Typ uuid: »a«"),
            "ungültige Eingabesyntax für Typ uuid: \"...\""
        );
        assert_eq!(of_data("division by zero"), "division by zero");
        assert_eq!(
            without_value("42601", "unterminated quoted string at or near \"'a\""),
            "unterminated quoted string at or near \"...\""
        );
        assert_eq!(without_value("42601", "syntax error in tsquery: \"a b\""), "syntax error in tsquery: \"...\"");
        let of_the_statement = "syntax error at or near \"selct\"";
        assert_eq!(without_value("42601", of_the_statement), of_the_statement);
    }
}
