//! Values of SQL as a message can name them, and as a report can tell them.

use std::fmt;

use millstream_guest::sql::{self, SqlError, Value};
use serde::{
    Deserialize, Deserializer,
    de::{
        Error, MapAccess, SeqAccess, Visitor,
        value::{MapAccessDeserializer, SeqAccessDeserializer},
    },
};
use serde_json::json;

/// A parameter: `{"float64": "NaN"}`. Numbers that JSON does not have are named as text.
#[derive(Clone, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Param {
    Null,
    Boolean(bool),
    Int64(i64),
    Float64(String),
    Numeric(String),
    Text(String),
    Bytes(Vec<u8>),
    Json(String),
    Timestamp(String),
    Uuid(String),
}

impl Param {
    fn value(&self) -> Result<Value, std::num::ParseFloatError> {
        Ok(match self.clone() {
            Self::Null => Value::Null,
            Self::Boolean(value) => Value::Boolean(value),
            Self::Int64(value) => Value::Int64(value),
            Self::Float64(text) => Value::Float64(text.parse()?),
            Self::Numeric(digits) => Value::Numeric(digits),
            Self::Text(text) => Value::Text(text),
            Self::Bytes(bytes) => Value::Bytes(bytes),
            Self::Json(text) => Value::Json(text),
            Self::Timestamp(text) => Value::Timestamp(text),
            Self::Uuid(text) => Value::Uuid(text),
        })
    }
}

/// What a statement answers, or how it is refused. Rows must have one column.
pub fn query(statement: &str, params: &[Param]) -> Result<serde_json::Value, std::num::ParseFloatError> {
    let params = params.iter().map(Param::value).collect::<Result<Vec<_>, _>>()?;
    Ok(match sql::query::<Told>(statement, params) {
        Ok(rows) => rows.into_iter().map(|told| told.0).collect(),
        Err(SqlError::Denied) => json!("denied"),
        Err(SqlError::Timeout) => json!("timeout"),
        Err(SqlError::Limit { .. }) => json!("limit"),
        Err(SqlError::Row { reason }) => json!({ "row": reason }),
        Err(SqlError::Refused { sqlstate, constraint, .. }) => {
            json!({ "sqlstate": sqlstate, "constraint": constraint })
        }
    })
}

/// A value as serde meets it, in JSON: its kind and what it is.
struct Told(serde_json::Value);

impl<'de> Deserialize<'de> for Told {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Teller)
    }
}

struct Teller;

impl<'de> Visitor<'de> for Teller {
    type Value = Told;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("one value")
    }

    fn visit_unit<E: Error>(self) -> Result<Told, E> {
        Ok(Told(json!("null")))
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<Told, E> {
        Ok(Told(json!({ "boolean": value })))
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<Told, E> {
        Ok(Told(json!({ "int64": value })))
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Told, E> {
        Ok(Told(json!({ "float64": value.to_string() })))
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<Told, E> {
        Ok(Told(json!({ "text": value })))
    }

    fn visit_bytes<E: Error>(self, value: &[u8]) -> Result<Told, E> {
        Ok(Told(json!({ "bytes": value })))
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Told, A::Error> {
        let value = serde_json::Value::deserialize(MapAccessDeserializer::new(map))?;
        Ok(Told(json!({ "json": value })))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<Told, A::Error> {
        let value = serde_json::Value::deserialize(SeqAccessDeserializer::new(seq))?;
        Ok(Told(json!({ "json": value })))
    }
}
