//! Rows to Rust types, through serde.

use std::fmt;

use serde::{
    Deserializer,
    de::{
        self, DeserializeOwned, IntoDeserializer, Visitor,
        value::{MapDeserializer, SeqDeserializer},
    },
    forward_to_deserialize_any,
};

use super::{SqlError, Value};

/// Never names a value, only columns and types.
#[derive(Debug)]
struct RowError(String);

impl fmt::Display for RowError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for RowError {}

impl de::Error for RowError {
    fn custom<T: fmt::Display>(message: T) -> Self {
        Self(message.to_string())
    }

    /// serde would print the value.
    fn invalid_value(_found: de::Unexpected<'_>, expected: &dyn de::Expected) -> Self {
        Self(format!("a value out of range, expected {expected}"))
    }

    fn invalid_type(found: de::Unexpected<'_>, expected: &dyn de::Expected) -> Self {
        let found = match found {
            de::Unexpected::Bool(_) => "a boolean",
            de::Unexpected::Unsigned(_) | de::Unexpected::Signed(_) => "an integer",
            de::Unexpected::Float(_) => "a float",
            de::Unexpected::Str(_) => "a text",
            de::Unexpected::Bytes(_) => "bytes",
            de::Unexpected::Unit | de::Unexpected::Option => "null",
            _ => "something else",
        };
        Self(format!("found {found}, expected {expected}"))
    }
}

/// One row as a `T`.
pub(super) fn read<T: DeserializeOwned>(columns: &[String], values: Vec<Value>) -> Result<T, SqlError> {
    T::deserialize(Row { columns, values }).map_err(|error| SqlError::Row { reason: error.0 })
}

struct Row<'a> {
    columns: &'a [String],
    values: Vec<Value>,
}

impl<'de> Row<'_> {
    fn only(mut self) -> Result<Field, RowError> {
        match self.values.len() {
            1 => Ok(Field(self.values.remove(0))),
            count => Err(RowError(format!("it has {count} columns, and the type takes one"))),
        }
    }

    fn map<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, RowError> {
        let columns = self.columns.iter().map(String::as_str);
        visitor.visit_map(MapDeserializer::new(columns.zip(self.values.into_iter().map(Field))))
    }

    fn sequence<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, RowError> {
        let mut fields = SeqDeserializer::new(self.values.into_iter().map(Field));
        let value = visitor.visit_seq(&mut fields)?;
        fields.end()?;
        Ok(value)
    }
}

/// What a row is read as when the type says what it is; everything else is its only column.
impl<'de> Deserializer<'de> for Row<'_> {
    type Error = RowError;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, RowError> {
        if self.values.len() == 1 { self.only()?.deserialize_any(visitor) } else { self.map(visitor) }
    }

    fn deserialize_map<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, RowError> {
        self.map(visitor)
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        _fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, RowError> {
        self.map(visitor)
    }

    fn deserialize_tuple<V: Visitor<'de>>(self, _length: usize, visitor: V) -> Result<V::Value, RowError> {
        self.sequence(visitor)
    }

    fn deserialize_tuple_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        _length: usize,
        visitor: V,
    ) -> Result<V::Value, RowError> {
        self.sequence(visitor)
    }

    fn deserialize_unit<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, RowError> {
        visitor.visit_unit()
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        visitor: V,
    ) -> Result<V::Value, RowError> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, RowError> {
        self.only()?.deserialize_option(visitor)
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, RowError> {
        self.only()?.deserialize_seq(visitor)
    }

    fn deserialize_bytes<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, RowError> {
        self.only()?.deserialize_any(visitor)
    }

    fn deserialize_byte_buf<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, RowError> {
        self.only()?.deserialize_any(visitor)
    }

    fn deserialize_f64<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, RowError> {
        self.only()?.deserialize_f64(visitor)
    }

    fn deserialize_f32<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, RowError> {
        self.only()?.deserialize_f64(visitor)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        name: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, RowError> {
        self.only()?.deserialize_enum(name, variants, visitor)
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 char str string unit_struct identifier ignored_any
    }
}

/// One value.
struct Field(Value);

impl<'de> IntoDeserializer<'de, RowError> for Field {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}

impl Field {
    fn json(text: &str) -> Result<serde_json::Value, RowError> {
        serde_json::from_str(text).map_err(|_| RowError("it holds JSON that cannot be read".to_owned()))
    }
}

/// serde_json's own message may show the value.
fn of_json(error: &serde_json::Error) -> RowError {
    RowError(format!("its JSON does not fit ({:?} error)", error.classify()))
}

impl<'de> Deserializer<'de> for Field {
    type Error = RowError;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, RowError> {
        match self.0 {
            Value::Null => visitor.visit_unit(),
            Value::Boolean(value) => visitor.visit_bool(value),
            Value::Int64(value) => visitor.visit_i64(value),
            Value::Float64(value) => visitor.visit_f64(value),
            Value::Numeric(text) | Value::Text(text) | Value::Timestamp(text) | Value::Uuid(text) => {
                visitor.visit_string(text)
            }
            Value::Bytes(bytes) => visitor.visit_byte_buf(bytes),
            Value::Json(text) => Self::json(&text)?.deserialize_any(visitor).map_err(|error| of_json(&error)),
        }
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, RowError> {
        match self.0 {
            Value::Null => visitor.visit_none(),
            _ => visitor.visit_some(self),
        }
    }

    /// Bytes are a `Vec<u8>` as well.
    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, RowError> {
        match self.0 {
            Value::Bytes(bytes) => visitor.visit_seq(SeqDeserializer::new(bytes.into_iter())),
            _ => self.deserialize_any(visitor),
        }
    }

    /// A numeric is one as well, as near as can be.
    fn deserialize_f64<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, RowError> {
        match &self.0 {
            Value::Numeric(digits) => match digits.parse() {
                Ok(value) => visitor.visit_f64(value),
                Err(_) => Err(RowError("a numeric that is no number".to_owned())),
            },
            _ => self.deserialize_any(visitor),
        }
    }

    fn deserialize_f32<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, RowError> {
        self.deserialize_f64(visitor)
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        visitor: V,
    ) -> Result<V::Value, RowError> {
        visitor.visit_newtype_struct(self)
    }

    /// The text names the variant; JSON may hold one with fields.
    fn deserialize_enum<V: Visitor<'de>>(
        self,
        name: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, RowError> {
        match self.0 {
            Value::Text(text) => visitor.visit_enum(text.into_deserializer()),
            Value::Json(text) => {
                Self::json(&text)?.deserialize_enum(name, variants, visitor).map_err(|error| of_json(&error))
            }
            _ => Err(RowError("a choice of names is read from text or JSON".to_owned())),
        }
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 char str string bytes byte_buf unit unit_struct tuple
        tuple_struct map struct identifier ignored_any
    }
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    fn row<T: DeserializeOwned>(columns: &[&str], values: &[Value]) -> Result<T, SqlError> {
        let columns: Vec<String> = columns.iter().map(|name| (*name).to_owned()).collect();
        read(&columns, values.to_vec())
    }

    #[derive(Debug, PartialEq, Deserialize)]
    #[serde(rename_all = "lowercase")]
    enum State {
        Open,
        Closed,
    }

    #[derive(Debug, PartialEq, Deserialize)]
    struct Account {
        id: String,
        balance: i64,
        rate: f64,
        note: Option<String>,
        photo: Vec<u8>,
        tags: Vec<String>,
        state: State,
    }

    #[test]
    fn a_row_becomes_a_struct_by_the_names_of_its_columns() {
        let account: Account = row(
            &["balance", "id", "rate", "note", "photo", "tags", "state", "more"],
            &[
                Value::Int64(5),
                Value::Uuid("u".into()),
                Value::Numeric("1.50".into()),
                Value::Null,
                Value::Bytes(vec![1, 2]),
                Value::Json(r#"["a"]"#.into()),
                Value::Text("closed".into()),
                Value::Boolean(true),
            ],
        )
        .expect("a row");
        let expected = Account {
            id: "u".into(),
            balance: 5,
            rate: 1.5,
            note: None,
            photo: vec![1, 2],
            tags: vec!["a".into()],
            state: State::Closed,
        };
        assert_eq!(account, expected);
        assert_ne!(account.state, State::Open);
    }

    #[test]
    fn a_row_becomes_a_tuple_or_a_plain_value() {
        assert_eq!(row::<(i64, String)>(&["a", "a"], &[7.into(), "x".into()]), Ok((7, "x".into())));
        assert_eq!(row::<i64>(&["count"], &[7.into()]), Ok(7));
        assert_eq!(row::<Option<i64>>(&["max"], &[Value::Null]), Ok(None));
        assert_eq!(row::<Option<f64>>(&["avg"], &[Value::Numeric("0.5".into())]), Ok(Some(0.5)));
        assert_eq!(row::<Vec<i64>>(&["ids"], &[Value::Json("[1,2]".into())]), Ok(vec![1, 2]));
        assert_eq!(row::<Vec<u8>>(&["photo"], &[Value::Bytes(vec![9])]), Ok(vec![9]));
        assert_eq!(row::<()>(&["a", "b"], &[1.into(), 2.into()]), Ok(()));
    }

    #[test]
    fn what_does_not_fit_is_told_without_the_value() {
        for error in [
            row::<i64>(&["a"], &["hush".into()]).map(drop),
            row::<u8>(&["a"], &[Value::Int64(7_000_001)]).map(drop),
            row::<i64>(&["a", "b"], &["hush".into(), "hush".into()]).map(drop),
            row::<(i64,)>(&["a", "b"], &[1.into(), "hush".into()]).map(drop),
            row::<Vec<i64>>(&["a"], &[Value::Json(r#"["hush"]"#.into())]).map(drop),
            row::<State>(&["a"], &[Value::Json("\"hush\"".into())]).map(drop),
        ] {
            let error = error.expect_err("it does not fit").to_string();
            assert!(!error.contains("hush") && !error.contains("7000001"), "{error}");
        }
        let missing = row::<Account>(&["id"], &["x".into()]).expect_err("columns are missing").to_string();
        assert!(missing.contains("missing field `balance`"), "{missing}");
    }
}
