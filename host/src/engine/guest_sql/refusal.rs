//! What a handler is told when Postgres refuses its statement: never a value.

/// Marks between which Postgres quotes, in the languages that it speaks.
const QUOTES: [char; 8] = ['"', '\u{ab}', '\u{bb}', '\u{201c}', '\u{201d}', '\u{201e}', '\u{300c}', '\u{300d}'];

/// The message without the value that it quotes. Values come from payloads, and what a handler is told here usually is the
/// reason it fails with: that is stored, shown and logged. Details of an error are not passed on at all.
///
/// Errors about data (class 22) quote what could not be read. Those of class 42 quote what stands in the statement, which is
/// the handler's own text; but a value too, where one is parsed as a search or a path, or as a name (`$1::regclass`).
pub(super) fn without_value(sqlstate: &str, message: &str, statement: &str) -> String {
    let statement = statement.to_lowercase();
    let is_of_the_statement =
        || message.split(QUOTES).skip(1).step_by(2).all(|quoted| statement.contains(&quoted.to_lowercase()));
    let is_parsed = || ["unterminated", "tsquery", "jsonpath"].iter().any(|part| message.contains(part));
    let is_of_a_value = sqlstate.starts_with("22")
        || (sqlstate == "42601" && is_parsed())
        || (sqlstate.starts_with("42") && !is_of_the_statement());
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
        let of_data = |message| without_value("22P02", message, "insert into a values ($1)");
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
        for (sqlstate, quotes) in [
            ("42601", "unterminated quoted string at or near"),
            ("42601", "syntax error in tsquery:"),
            ("42601", "syntax error in tsvector:"),
            ("42P01", "relation"),
        ] {
            let told = without_value(sqlstate, &format!("{quotes} \"the secret\""), "select $1::regclass");
            assert_eq!(told, format!("{quotes} \"...\""));
        }
        let parsed = without_value("42601", "syntax error in tsquery: \"a b\"", "select to_tsquery('a b')");
        assert_eq!(parsed, "syntax error in tsquery: \"...\"");
    }

    #[test]
    fn an_error_about_the_statement_quotes_it() {
        for (sqlstate, message) in [
            ("42601", "syntax error at or near \"selct\""),
            ("42P01", "relation \"public.orders\" does not exist"),
            ("42703", "column \"total\" of relation \"orders\" does not exist"),
            ("23505", "duplicate key value violates unique constraint \"orders_pkey\""),
        ] {
            assert_eq!(without_value(sqlstate, message, "selct Total from public.Orders"), message);
        }
    }
}
