//! What a handler is told when Postgres refuses its statement: never a value.

/// Marks between which Postgres quotes, in the languages that it speaks.
const QUOTES: [char; 8] = ['"', '\u{ab}', '\u{bb}', '\u{201c}', '\u{201d}', '\u{201e}', '\u{300c}', '\u{300d}'];

/// Errors that name what stands in the statement, or a value that was taken for a name (`$1::regclass`, `$1::regtype`): a
/// database, a schema, a table, a type, a function, an operator.
const NAMING: [&str; 10] = ["0A000", "3D000", "3F000", "42601", "42602", "42704", "42725", "42809", "42883", "42P01"];

/// Words of the types that an operator is not there for.
const TYPE_WORDS: [&str; 24] = [
    "boolean",
    "smallint",
    "integer",
    "bigint",
    "real",
    "double",
    "precision",
    "numeric",
    "text",
    "character",
    "varying",
    "bytea",
    "uuid",
    "json",
    "jsonb",
    "date",
    "time",
    "timestamp",
    "with",
    "without",
    "zone",
    "interval",
    "unknown",
    "record",
];

/// The message without the value that it tells. Values come from payloads, and what a handler is told here usually is the
/// reason it fails with: that is stored, shown and logged. Details of an error are not passed on at all.
///
/// Errors about data (class 22) quote what could not be read, and so do those about the syntax of what was parsed as a search
/// or a path. Of what others name only that is told which stands in the statement, the handler's own text.
pub(super) fn without_value(sqlstate: &str, message: &str, statement: &str) -> String {
    let statement = statement.to_lowercase();
    let stands_there = |part: &str| statement.contains(&part.to_lowercase());
    let is_naming = NAMING.contains(&sqlstate);
    let (Some(start), Some(end)) = (message.find(QUOTES), message.rfind(QUOTES)) else {
        return match message.rsplit_once(": ") {
            Some((head, named)) if is_naming && !stands_there(named) && !is_of_types(named) => format!("{head}: ..."),
            _ => message.to_owned(),
        };
    };
    let is_parsed = || ["unterminated", "tsquery", "jsonpath"].iter().any(|part| message.contains(part));
    let is_of_the_statement = || message.split(QUOTES).skip(1).step_by(2).all(stands_there);
    let is_of_a_value =
        sqlstate.starts_with("22") || (sqlstate == "42601" && is_parsed()) || (is_naming && !is_of_the_statement());
    if !is_of_a_value {
        return message.to_owned();
    }
    let rest = message[end..].trim_start_matches(QUOTES);
    format!("{}\"...\"{rest}", &message[..start])
}

/// `integer = text[]`
fn is_of_types(named: &str) -> bool {
    let is_operator = |word: &str| word.chars().all(|c| c.is_ascii_punctuation());
    named.split(' ').all(|word| TYPE_WORDS.contains(&word.trim_end_matches("[]")) || is_operator(word))
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
            ("3F000", "schema"),
            ("3D000", "database"),
            ("0A000", "cross-database references are not implemented:"),
        ] {
            let told = without_value(sqlstate, &format!("{quotes} \"the secret\""), "select $1::regclass");
            assert_eq!(told, format!("{quotes} \"...\""));
        }
        for message in
            ["improper relation name (too many dotted names): the.secret", "operator does not exist: the.secret"]
        {
            let told = without_value("42601", message, "select $1::regclass");
            assert!(told.ends_with(": ...") && !told.contains("secret"), "{told}");
            assert_eq!(without_value("42601", message, "select the.secret"), message);
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
            ("42804", "column \"cents\" is of type integer but expression is of type text"),
            ("42883", "operator does not exist: integer = text[]"),
        ] {
            assert_eq!(without_value(sqlstate, message, "selct Total from public.Orders"), message);
        }
    }
}
