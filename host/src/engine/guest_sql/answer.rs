//! Reads what the guest's function answers: one line that describes the columns, then a JSON object a row.
//!
//! The description is the XML schema that Postgres makes of a cursor: the one thing on every version since 14 that tells
//! the columns' types from inside a function. The rows keep their columns' order, and names that occur twice.

use std::fmt;

use serde::{
    Deserializer,
    de::{MapAccess, Visitor},
};
use serde_json::value::RawValue;

use super::open::Form;
use crate::handler::{SqlAnswer, SqlError, SqlRows, SqlValue};

/// An answer that cannot be read is our own fault, or that of a role that altered its function.
pub fn read(form: Form, lines: Vec<String>) -> Result<SqlAnswer, SqlError> {
    let answer = match form {
        Form::Rows => rows(&lines).map(SqlAnswer::Rows),
        Form::CountedRows => lines.first().and_then(|count| count.parse().ok()).map(SqlAnswer::Count),
        Form::Counted => rows(&lines).and_then(|rows| match rows.values.first()?.first()? {
            SqlValue::Int64(count) => u64::try_from(*count).ok().map(SqlAnswer::Count),
            _ => None,
        }),
    };
    answer.ok_or_else(|| SqlError::Refused {
        sqlstate: "XX000".to_owned(),
        message: "the answer cannot be read; apply streams.toml again".to_owned(),
        constraint: None,
    })
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Boolean,
    Int64,
    Float64,
    Numeric,
    Text,
    Bytes,
    Json,
    Timestamp,
    Uuid,
    /// A type of a user's, or one without a kind of its own: JSON where it is an array or a row, else text.
    Other,
}

fn rows(lines: &[String]) -> Option<SqlRows> {
    let (description, rows) = lines.split_first()?;
    let (columns, kinds): (Vec<String>, Vec<Kind>) = columns(description)?.into_iter().unzip();
    let values = rows.iter().map(|row| values(row, &kinds)).collect::<Option<_>>()?;
    Some(SqlRows { columns, values })
}

/// Names and kinds.
fn columns(description: &str) -> Option<Vec<(String, Kind)>> {
    let (types, row) = description.rsplit_once(r#"<xsd:complexType name="RowType">"#)?;
    let (row, _) = row.split_once("</xsd:complexType>")?;
    row.lines()
        .filter_map(|line| line.trim().strip_prefix(r#"<xsd:element name=""#))
        .map(|line| {
            let (name, rest) = line.split_once('"')?;
            let (_, rest) = rest.split_once(r#"type=""#)?;
            let (type_name, _) = rest.split_once('"')?;
            Some((unescape(name), kind(type_name, types)))
        })
        .collect()
}

fn kind(type_name: &str, types: &str) -> Kind {
    let type_name = if type_name.starts_with("Domain.") { base(type_name, types) } else { type_name };
    match type_name {
        "BOOLEAN" => Kind::Boolean,
        "SMALLINT" | "INTEGER" | "BIGINT" => Kind::Int64,
        "REAL" | "DOUBLE" => Kind::Float64,
        name if name.starts_with("NUMERIC") => Kind::Numeric,
        name if name.starts_with("TIMESTAMP_WTZ") => Kind::Timestamp,
        name => match name.strip_prefix("UDT.").and_then(|name| name.rsplit_once(".pg_catalog.")) {
            Some((_, "text" | "name" | "varchar" | "bpchar")) => Kind::Text,
            Some((_, "bytea")) => Kind::Bytes,
            Some((_, "json" | "jsonb")) => Kind::Json,
            Some((_, "uuid")) => Kind::Uuid,
            _ if name.starts_with("VARCHAR") || name.starts_with("CHAR") => Kind::Text,
            _ => Kind::Other,
        },
    }
}

/// The type that a domain restricts.
fn base<'a>(domain: &str, types: &'a str) -> &'a str {
    let found = types.split_once(&format!(r#"<xsd:simpleType name="{domain}">"#)).and_then(|(_, definition)| {
        let (_, rest) = definition.split_once(r#"<xsd:restriction base=""#)?;
        rest.split_once('"')
    });
    found.map_or("", |(base, _)| base)
}

/// Names are escaped as SQL/XML has it: `_x0020_` is a space.
fn unescape(name: &str) -> String {
    let mut plain = String::with_capacity(name.len());
    let mut rest = name;
    while let Some((before, after)) = rest.split_once("_x") {
        plain.push_str(before);
        let character = after.split_once('_').and_then(|(hex, after)| {
            let code = u32::from_str_radix(hex, 16).ok().filter(|_| matches!(hex.len(), 4 | 6 | 8))?;
            Some((char::from_u32(code)?, after))
        });
        match character {
            Some((character, after)) => {
                plain.push(character);
                rest = after;
            }
            None => {
                plain.push_str("_x");
                rest = after;
            }
        }
    }
    plain + rest
}

fn values(row: &str, kinds: &[Kind]) -> Option<Vec<SqlValue>> {
    let fields = serde_json::Deserializer::from_str(row).deserialize_map(Fields).ok()?;
    (fields.len() == kinds.len()).then_some(())?;
    fields.iter().zip(kinds).map(|(field, kind)| value(field.get(), *kind)).collect()
}

/// The values of an object in their order, those of equal names as well.
struct Fields;

impl<'de> Visitor<'de> for Fields {
    type Value = Vec<Box<RawValue>>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a row")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut fields = Vec::new();
        while let Some((_, value)) = map.next_entry::<String, Box<RawValue>>()? {
            fields.push(value);
        }
        Ok(fields)
    }
}

fn value(json: &str, kind: Kind) -> Option<SqlValue> {
    if json == "null" {
        return Some(SqlValue::Null);
    }
    if kind == Kind::Json {
        return Some(SqlValue::Json(json.to_owned()));
    }
    let is_nested = json.starts_with(['[', '{']);
    // Numbers and truth values stand for themselves; everything else is a string.
    let text = if json.starts_with('"') { serde_json::from_str(json).ok()? } else { json.to_owned() };
    Some(match kind {
        Kind::Boolean => SqlValue::Boolean(text.parse().ok()?),
        Kind::Int64 => SqlValue::Int64(text.parse().ok()?),
        Kind::Float64 => SqlValue::Float64(text.parse().ok()?),
        Kind::Numeric => SqlValue::Numeric(text),
        Kind::Bytes => SqlValue::Bytes(bytes(&text)?),
        Kind::Timestamp => SqlValue::Timestamp(text),
        Kind::Uuid => SqlValue::Uuid(text),
        Kind::Other if is_nested => SqlValue::Json(text),
        Kind::Text | Kind::Other | Kind::Json => SqlValue::Text(text),
    })
}

fn bytes(text: &str) -> Option<Vec<u8>> {
    let hex = text.strip_prefix("\\x")?;
    let digits = hex.as_bytes().chunks(2).map(|pair| std::str::from_utf8(pair).ok());
    digits.map(|pair| u8::from_str_radix(pair?, 16).ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escaped_names_become_plain_again() {
        let check = |name: &str, plain: &str| assert_eq!(unescape(name), plain);
        check("we_x0020_ird_x005F_x", "we ird_x");
        check("_x003F_column_x003F_", "?column?");
        check("a_x", "a_x");
        check("_xyz_x12_", "_xyz_x12_");
    }

    #[test]
    fn a_row_keeps_names_that_occur_twice() {
        let kinds = [Kind::Int64, Kind::Numeric, Kind::Bytes, Kind::Json, Kind::Other, Kind::Float64, Kind::Text];
        let row = r#"{"a":1,"a":1.50,"b":"\\x00ff","j":"text","o":[1,2],"f":"NaN","t":"\"quoted\""}"#;
        let values = values(row, &kinds).expect("a row");
        assert_eq!(values[..2], [SqlValue::Int64(1), SqlValue::Numeric("1.50".into())]);
        assert_eq!(values[2], SqlValue::Bytes(vec![0, 255]));
        assert_eq!(values[3..5], [SqlValue::Json(r#""text""#.into()), SqlValue::Json("[1,2]".into())]);
        assert!(matches!(values[5], SqlValue::Float64(number) if number.is_nan()));
        assert_eq!(values[6], SqlValue::Text("\"quoted\"".into()));
        assert!(super::values(r#"{"a":1}"#, &kinds).is_none(), "a column is missing");
    }
}
