//! Values of a handler as literals. The one place where a value becomes text of a statement: `execute` takes expressions,
//! and what a parameter's type is only Postgres knows, inside the function.

use std::fmt::Write;

use super::open::{Types, type_name};
use crate::handler::SqlValue;

/// The parameters of an `execute`.
pub fn list(params: &[SqlValue]) -> String {
    if params.is_empty() {
        return String::new();
    }
    let params: Vec<String> = params.iter().map(literal).collect();
    format!("({})", params.join(", "))
}

/// The types of a `prepare`.
pub fn types(params: &[SqlValue], types: Types) -> String {
    if params.is_empty() || types == Types::Inferred {
        return String::new();
    }
    let types: Vec<&str> = params.iter().map(type_name).collect();
    format!("({})", types.join(", "))
}

/// Postgres takes no NUL in any text.
pub fn has_nul(value: &SqlValue) -> bool {
    match value {
        SqlValue::Numeric(text)
        | SqlValue::Text(text)
        | SqlValue::Json(text)
        | SqlValue::Timestamp(text)
        | SqlValue::Uuid(text) => text.contains('\0'),
        SqlValue::Null | SqlValue::Boolean(_) | SqlValue::Int64(_) | SqlValue::Float64(_) | SqlValue::Bytes(_) => false,
    }
}

/// Without a type: it takes that of its parameter.
fn literal(value: &SqlValue) -> String {
    match value {
        SqlValue::Null => "null".to_owned(),
        SqlValue::Boolean(value) => quote(&value.to_string()),
        SqlValue::Int64(value) => quote(&value.to_string()),
        SqlValue::Float64(value) => quote(&value.to_string()),
        SqlValue::Numeric(text)
        | SqlValue::Text(text)
        | SqlValue::Json(text)
        | SqlValue::Timestamp(text)
        | SqlValue::Uuid(text) => quote(text),
        SqlValue::Bytes(bytes) => {
            let mut hex = String::with_capacity(2 + 2 * bytes.len());
            hex.push_str("\\x");
            for byte in bytes {
                write!(hex, "{byte:02x}").expect("a string takes everything");
            }
            quote(&hex)
        }
    }
}

/// As quote_literal of Postgres does it: right whatever standard_conforming_strings is.
fn quote(text: &str) -> String {
    let prefix = if text.contains('\\') { "E" } else { "" };
    format!("{prefix}'{}'", text.replace('\'', "''").replace('\\', "\\\\"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_literal_ends_where_its_value_does() {
        let check = |value, expected: &str| assert_eq!(literal(&value), expected);
        let text = |text: &str| SqlValue::Text(text.to_owned());
        check(text("plain"), "'plain'");
        check(text("it's"), "'it''s'");
        check(text(r"\' or true --"), r"E'\\'' or true --'");
        check(text(""), "''");
        check(SqlValue::Null, "null");
        check(SqlValue::Boolean(true), "'true'");
        check(SqlValue::Int64(i64::MIN), "'-9223372036854775808'");
        check(SqlValue::Float64(f64::NEG_INFINITY), "'-inf'");
        check(SqlValue::Float64(0.1), "'0.1'");
        check(SqlValue::Bytes(vec![0, 255, 39]), r"E'\\x00ff27'");
    }

    #[test]
    fn types_are_only_named_when_they_are_declared() {
        let params = [SqlValue::Int64(1), SqlValue::Null];
        assert_eq!(types(&params, Types::Inferred), "");
        assert_eq!(types(&params, Types::Declared), "(pg_catalog.int8, unknown)");
        assert_eq!(list(&params), "('1', null)");
        assert_eq!((list(&[]), types(&[], Types::Declared)), (String::new(), String::new()));
    }
}
