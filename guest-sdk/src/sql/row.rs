//! Rows to Rust types, through serde.

use std::{fmt, slice, vec};

use serde::{
    Deserializer,
    de::{
        self, DeserializeOwned, DeserializeSeed, IntoDeserializer, MapAccess, SeqAccess, Visitor,
        value::SeqDeserializer,
    },
    forward_to_deserialize_any,
};

use super::{SqlError, Value};

/// Never names a value, only columns and types. What a type says about a value is not told: it may quote it.
#[derive(Debug, PartialEq)]
struct RowError {
    /// Where it is known.
    column: Option<String>,
    reason: String,
}

/// Instead of what a type of the handler's says.
const REFUSED: &str = "its type refuses the value";

impl RowError {
    fn new(reason: impl Into<String>) -> Self {
        Self { column: None, reason: reason.into() }
    }

    fn in_column(self, column: &str) -> Self {
        Self { column: self.column.or_else(|| Some(column.to_owned())), ..self }
    }
}

impl fmt::Display for RowError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(column) = &self.column {
            write!(f, "column `{column}`: ")?;
        }
        f.write_str(&self.reason)
    }
}

impl std::error::Error for RowError {}

/// Every one of them is here: what serde provides prints what was found, and goes through `custom`.
impl de::Error for RowError {
    fn custom<T: fmt::Display>(_message: T) -> Self {
        Self::new(REFUSED)
    }

    fn invalid_value(_found: de::Unexpected<'_>, expected: &dyn de::Expected) -> Self {
        Self::new(format!("a value out of range, expected {expected}"))
    }

    fn invalid_length(length: usize, expected: &dyn de::Expected) -> Self {
        Self::new(format!("invalid length {length}, expected {expected}"))
    }

    fn unknown_variant(_found: &str, expected: &'static [&'static str]) -> Self {
        Self::new(format!("an unknown name, expected {}", one_of(expected)))
    }

    /// Mostly a column, but it may be one of a buffered JSON object as well.
    fn unknown_field(_found: &str, expected: &'static [&'static str]) -> Self {
        Self::new(format!("an unknown field, expected {}", one_of(expected)))
    }

    fn missing_field(field: &'static str) -> Self {
        Self::new(format!("missing field `{field}`"))
    }

    fn duplicate_field(field: &'static str) -> Self {
        Self::new(format!("duplicate field `{field}`"))
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
        Self::new(format!("found {found}, expected {expected}"))
    }
}

fn one_of(names: &[&str]) -> String {
    match names {
        [] => "none".to_owned(),
        names => format!("`{}`", names.join("` or `")),
    }
}

/// One row as a `T`.
pub(super) fn read<T: DeserializeOwned>(columns: &[String], values: Vec<Value>) -> Result<T, SqlError> {
    T::deserialize(Row { columns, values }).map_err(|error| {
        let error = match columns {
            [only] if error.reason == REFUSED => error.in_column(only),
            _ => error,
        };
        SqlError::Row { reason: error.to_string() }
    })
}

struct Row<'a> {
    columns: &'a [String],
    values: Vec<Value>,
}

impl<'de> Row<'_> {
    fn only(mut self) -> Result<Field, RowError> {
        match self.values.len() {
            1 => Ok(Field(self.values.remove(0))),
            count => Err(RowError::new(format!("it has {count} columns, and the type takes one"))),
        }
    }

    fn map<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, RowError> {
        visitor.visit_map(Fields::of(self))
    }

    fn sequence<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, RowError> {
        let count = self.values.len();
        let mut fields = Fields::of(self);
        let value = visitor.visit_seq(&mut fields)?;
        match fields.values.len() {
            0 => Ok(value),
            more => Err(RowError::new(format!("it has {count} columns, and the type takes {}", count - more))),
        }
    }
}

/// The values of a row, one after the other. Says in which column a value does not fit.
struct Fields<'a> {
    columns: slice::Iter<'a, String>,
    values: vec::IntoIter<Value>,
}

impl<'a> Fields<'a> {
    fn of(row: Row<'a>) -> Self {
        Self { columns: row.columns.iter(), values: row.values.into_iter() }
    }

    fn next<'de, S: DeserializeSeed<'de>>(&mut self, column: &str, seed: S) -> Result<S::Value, RowError> {
        let value = self.values.next().ok_or_else(|| RowError::new("it has fewer values than columns"))?;
        seed.deserialize(Field(value)).map_err(|error| error.in_column(column))
    }
}

impl<'de> SeqAccess<'de> for &mut Fields<'_> {
    type Error = RowError;

    fn next_element_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<Option<S::Value>, RowError> {
        let Some(column) = self.columns.next() else { return Ok(None) };
        self.next(column, seed).map(Some)
    }
}

impl<'de> MapAccess<'de> for Fields<'_> {
    type Error = RowError;

    fn next_key_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<Option<S::Value>, RowError> {
        // Stays before the column until its value is taken.
        let Some(column) = self.columns.as_slice().first() else { return Ok(None) };
        seed.deserialize(column.as_str().into_deserializer()).map(Some)
    }

    fn next_value_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<S::Value, RowError> {
        let column = self.columns.next().expect("its name was read");
        self.next(column, seed)
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
        serde_json::from_str(text).map_err(|_| RowError::new("it holds JSON that cannot be read"))
    }
}

/// serde_json's own message may show the value.
fn of_json(error: &serde_json::Error) -> RowError {
    RowError::new(format!("its JSON does not fit ({:?} error)", error.classify()))
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
                Err(_) => Err(RowError::new("a numeric that is no number")),
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
            _ => Err(RowError::new("a choice of names is read from text or JSON")),
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

    /// A type whose own error quotes what it read.
    #[derive(Debug)]
    struct Talkative;

    impl<'de> Deserialize<'de> for Talkative {
        fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
            let text = String::deserialize(deserializer)?;
            Err(de::Error::custom(format!("bad {text}")))
        }
    }

    /// One whose visitor does.
    #[derive(Debug)]
    struct TalkativeVisitor;

    impl Visitor<'_> for TalkativeVisitor {
        type Value = Self;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a text")
        }

        fn visit_str<E: de::Error>(self, text: &str) -> Result<Self, E> {
            Err(E::custom(format!("bad {text}")))
        }
    }

    impl<'de> Deserialize<'de> for TalkativeVisitor {
        fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
            deserializer.deserialize_str(Self)
        }
    }

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    #[expect(dead_code, reason = "only whether it is read is tested")]
    struct Strict {
        id: i64,
    }

    /// Buffers its fields, so that errors about what JSON holds are the row's.
    #[derive(Debug, Deserialize)]
    #[serde(tag = "kind")]
    #[expect(dead_code, reason = "only whether it is read is tested")]
    enum Tagged {
        Strict { inner: Strict },
        Talk { inner: Talkative },
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
            row::<State>(&["a"], &["hush".into()]).map(drop),
            row::<(i64, State)>(&["a", "b"], &[1.into(), "hush".into()]).map(drop),
            row::<Talkative>(&["a"], &["hush".into()]).map(drop),
            row::<Talkative>(&["a"], &[Value::Json("\"hush\"".into())]).map(drop),
            row::<Option<TalkativeVisitor>>(&["a"], &["hush".into()]).map(drop),
            row::<(TalkativeVisitor,)>(&["a"], &[Value::Uuid("hush".into())]).map(drop),
            row::<char>(&["a"], &["hush".into()]).map(drop),
            row::<std::net::IpAddr>(&["a"], &["hush".into()]).map(drop),
            row::<Tagged>(&["kind", "inner"], &["hush".into(), 1.into()]).map(drop),
            row::<Tagged>(&["kind", "inner"], &["Talk".into(), "hush".into()]).map(drop),
            row::<Tagged>(&["kind", "inner"], &["Strict".into(), Value::Json(r#"{"hush": 1}"#.into())]).map(drop),
            row::<(Strict,)>(&["a"], &[Value::Json(r#"{"hush": 1}"#.into())]).map(drop),
        ] {
            let error = error.expect_err("it does not fit").to_string();
            assert!(!error.contains("hush") && !error.contains("7000001"), "{error}");
        }
        let missing = row::<Account>(&["id"], &["x".into()]).expect_err("columns are missing").to_string();
        assert!(missing.contains("missing field `balance`"), "{missing}");
    }

    #[test]
    fn what_does_not_fit_is_told_with_its_column_and_what_was_expected() {
        fn check<T: DeserializeOwned + fmt::Debug>(columns: &[&str], values: &[Value], told: &str) {
            let error = row::<T>(columns, values).expect_err("it does not fit").to_string();
            assert!(error.contains(told), "{error:?} does not say {told:?}");
        }
        let two = ["a", "b"];
        check::<(i64, State)>(
            &two,
            &[1.into(), "x".into()],
            "column `b`: an unknown name, expected `open` or `closed`",
        );
        check::<State>(&["a"], &["x".into()], "an unknown name, expected `open` or `closed`");
        check::<(i64, Talkative)>(&two, &[1.into(), "x".into()], "column `b`: its type refuses the value");
        check::<Talkative>(&["a"], &["x".into()], "column `a`: its type refuses the value");
        check::<(i64, i64)>(&two, &[1.into(), "x".into()], "column `b`: found a text, expected i64");
        check::<Strict>(&["other"], &[1.into()], "an unknown field, expected `id`");
        check::<(i64,)>(&two, &[1.into(), 2.into()], "it has 2 columns, and the type takes 1");
    }
}
