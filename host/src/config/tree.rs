//! streams.toml after reading: every key present with a typed value, a default or a mark. Knows no single key.

use std::{collections::BTreeMap, time::Duration};

/// One value and where it stands.
#[derive(Debug)]
pub(super) struct Node {
    /// Byte offset of the value, or of the table it is missing from.
    pub at: usize,
    /// Dotted key.
    pub key: String,
    /// It stands in the file, rather than being a default.
    pub given: bool,
    /// It may be a secret: messages never show it.
    pub hidden: bool,
    pub value: Value,
}

#[derive(Debug)]
pub(super) enum Value {
    /// Optional and left out.
    Absent,
    /// Wrong, and reported already: later checks pass it by.
    Invalid,
    Text(String),
    Integer(i64),
    Float(f64),
    Boolean(bool),
    /// `None` is forever.
    Duration(Option<Duration>),
    Size(u64),
    List(Vec<Node>),
    Table(BTreeMap<String, Node>),
}

impl Node {
    /// A key of a table; `None` when this is no table or lacks it.
    pub fn get(&self, name: &str) -> Option<&Node> {
        match &self.value {
            Value::Table(entries) => entries.get(name),
            _ => None,
        }
    }

    /// The entries of a table; none when this is no table.
    pub fn entries(&self) -> impl Iterator<Item = (&String, &Node)> {
        match &self.value {
            Value::Table(entries) => Some(entries),
            _ => None,
        }
        .into_iter()
        .flatten()
    }

    /// The elements of a list; none when this is no list.
    pub fn elements(&self) -> &[Node] {
        match &self.value {
            Value::List(elements) => elements,
            _ => &[],
        }
    }

    pub fn as_text(&self) -> Option<&str> {
        match &self.value {
            Value::Text(text) => Some(text),
            _ => None,
        }
    }

    pub fn as_integer(&self) -> Option<i64> {
        match self.value {
            Value::Integer(number) => Some(number),
            _ => None,
        }
    }

    pub fn as_float(&self) -> Option<f64> {
        match self.value {
            Value::Float(number) => Some(number),
            _ => None,
        }
    }

    pub fn as_boolean(&self) -> Option<bool> {
        match self.value {
            Value::Boolean(yes) => Some(yes),
            _ => None,
        }
    }

    /// `None` also for "forever".
    pub fn as_duration(&self) -> Option<Duration> {
        match self.value {
            Value::Duration(duration) => duration,
            _ => None,
        }
    }

    pub fn as_size(&self) -> Option<u64> {
        match self.value {
            Value::Size(bytes) => Some(bytes),
            _ => None,
        }
    }

    /// The text as a message may show it.
    pub fn shown(&self) -> String {
        match self.as_text() {
            Some(text) if !self.hidden => format!("{:?}", super::errors::shortened(text)),
            _ => "a value that is not shown".to_owned(),
        }
    }
}
