//! Reads a parsed TOML table by the table of keys: checks kinds and bounds, fills in defaults, reports every problem.
//! Never stops at the first one, and never compares two keys with each other (`cross` does).

use std::collections::BTreeMap;

use toml::{
    Spanned,
    de::{DeTable, DeValue},
};

use super::{
    errors::{Problem, dotted, nearest},
    interpolate::{Environment, interpolate},
    keys::{Given, Key, Kind, ROOT},
    scalar::{self, describe, type_name},
    tree::{Node, Value},
};

pub(super) struct Reader<'a> {
    environment: &'a Environment<'a>,
    pub problems: Vec<Problem>,
}

impl<'a> Reader<'a> {
    pub fn new(environment: &'a Environment<'a>) -> Self {
        Self { environment, problems: Vec::new() }
    }

    /// Reads the whole file.
    pub fn root(&mut self, table: &DeTable<'_>) -> Node {
        let mut node = Node { at: 0, key: String::new(), given: true, hidden: false, value: Value::Invalid };
        node.value = self.table(&node, table, ROOT);
        node
    }

    fn table(&mut self, node: &Node, table: &DeTable<'_>, keys: &'static [Key]) -> Value {
        for (name, _) in table.iter() {
            if !keys.iter().any(|key| key.name == name.get_ref()) {
                self.unknown_key(node, name, keys);
            }
        }
        let mut entries = BTreeMap::new();
        for key in keys {
            let path = dotted(&node.key, key.name);
            let entry = match table.get(key.name) {
                Some(value) => self.value(path, &key.kind, value),
                None => self.left_out(node, path, key),
            };
            entries.insert(key.name.to_owned(), entry);
        }
        Value::Table(entries)
    }

    fn unknown_key(&mut self, node: &Node, name: &Spanned<std::borrow::Cow<'_, str>>, keys: &'static [Key]) {
        let names = || keys.iter().map(|key| key.name);
        let hint = match nearest(name.get_ref(), names()) {
            Some(near) => Some(format!("did you mean `{near}`?")),
            None => home_of(name.get_ref()).map(|home| format!("`{}` belongs in {home}", name.get_ref())),
        };
        self.problems.push(Problem {
            at: name.span().start,
            key: dotted(&node.key, name.get_ref()),
            message: format!("unknown key; allowed: {}", names().collect::<Vec<_>>().join(", ")),
            hint,
        });
    }

    fn left_out(&mut self, table: &Node, path: String, key: &'static Key) -> Node {
        let mut node = Node { at: table.at, key: path, given: false, hidden: false, value: Value::Absent };
        node.value = match (&key.given, &key.kind) {
            (Given::Optional, _) => Value::Absent,
            (Given::Required, kind) => {
                self.refuse(&node, format!("required, but missing; allowed: {}", kind.allowed()), None);
                Value::Invalid
            }
            (Given::Default(_), Kind::Table(keys)) => self.table(&node, &DeTable::new(), keys),
            (Given::Default(_), Kind::Named { .. }) => Value::Table(BTreeMap::new()),
            (Given::Default(_), Kind::Texts(_) | Kind::Tables(_)) => Value::List(Vec::new()),
            (Given::Default(text), kind) => scalar::default(kind, text),
        };
        node
    }

    fn value(&mut self, key: String, kind: &'static Kind, value: &Spanned<DeValue<'_>>) -> Node {
        let mut node = Node { at: value.span().start, key, given: true, hidden: kind.hidden(), value: Value::Invalid };
        node.value = match (kind, value.get_ref()) {
            (Kind::Table(keys), DeValue::Table(table)) => self.table(&node, table, keys),
            (Kind::OneOf(keys) | Kind::ChoiceOrOneOf(_, keys), DeValue::Table(table)) => {
                self.one_of(&node, table, keys)
            }
            (Kind::Named { name, each }, DeValue::Table(table)) => {
                let mut entries = BTreeMap::new();
                for (chosen, value) in table.iter() {
                    let path = dotted(&node.key, chosen.get_ref());
                    if let Err(hint) = name.check(chosen.get_ref()) {
                        let message = format!("not a name that can be used; allowed: {}", name.allowed());
                        let hint = hint.map(str::to_owned);
                        self.problems.push(Problem { at: chosen.span().start, key: path.clone(), message, hint });
                    }
                    entries.insert(chosen.get_ref().to_string(), self.value(path, each, value));
                }
                Value::Table(entries)
            }
            (Kind::Tables(keys), DeValue::Array(array)) => self.list(&node, array, |reader, path, element| {
                let mut inner =
                    Node { at: element.span().start, key: path, given: true, hidden: false, value: Value::Invalid };
                match element.get_ref() {
                    DeValue::Table(table) => inner.value = reader.table(&inner, table, keys),
                    other => reader.refuse(&inner, format!("found {}; allowed: a table", type_name(other)), None),
                }
                inner
            }),
            (Kind::Texts(rule), DeValue::Array(array)) => self.list(&node, array, |reader, path, element| {
                let at = element.span().start;
                let inner = Node { at, key: path, given: true, hidden: rule.hidden(), value: Value::Invalid };
                reader.scalar(inner, &Kind::Text(*rule), element.get_ref())
            }),
            (kind, raw) => return self.scalar(node, kind, raw),
        };
        node
    }

    fn list(
        &mut self,
        node: &Node,
        array: &[Spanned<DeValue<'_>>],
        mut element: impl FnMut(&mut Self, String, &Spanned<DeValue<'_>>) -> Node,
    ) -> Value {
        let elements = array.iter().enumerate();
        Value::List(elements.map(|(index, value)| element(self, format!("{}[{index}]", node.key), value)).collect())
    }

    fn one_of(&mut self, node: &Node, table: &DeTable<'_>, keys: &'static [Key]) -> Value {
        let value = self.table(node, table, keys);
        let names = keys.iter().map(|key| key.name);
        let given = names.clone().filter(|name| table.contains_key(*name)).count();
        if given == 1 {
            return value;
        }
        // An unknown key is reported already; "none given" on top of it would tell nothing new.
        if given > 1 || table.is_empty() {
            let allowed = names.map(|name| format!("`{name}`")).collect::<Vec<_>>().join(" or ");
            self.refuse(node, format!("found {given} keys; allowed: exactly one of {allowed}"), None);
        }
        Value::Invalid
    }

    fn scalar(&mut self, mut node: Node, kind: &Kind, raw: &DeValue<'_>) -> Node {
        let mut text = None;
        if let Some(written) = raw.as_str() {
            match interpolate(written, self.environment) {
                Ok(done) => {
                    node.hidden |= done.hidden;
                    // A quoted number is a slip, unless the quotes are there for `${VAR}`.
                    let number = matches!(kind, Kind::Integer { .. } | Kind::Float { .. } | Kind::Boolean);
                    text = (done.hidden || !number).then_some(done.text);
                }
                Err(mistakes) => {
                    for (message, hint) in mistakes {
                        self.refuse(&node, message, Some(hint));
                    }
                    return node;
                }
            }
        }
        match scalar::read(kind, raw, text.as_deref()) {
            Ok(value) => node.value = value,
            Err(hint) => {
                let found = describe(kind, raw, node.hidden);
                self.refuse(&node, format!("found {found}; allowed: {}", kind.allowed()), hint);
            }
        }
        node
    }

    fn refuse(&mut self, node: &Node, message: String, hint: Option<String>) {
        self.problems.push(Problem { at: node.at, key: node.key.clone(), message, hint });
    }
}

/// Where a key that stands in the wrong table belongs, such as "[groups.NAME]".
fn home_of(name: &str) -> Option<String> {
    fn search(keys: &'static [Key], path: &str, name: &str) -> Option<String> {
        keys.iter().find_map(|key| {
            let inside = match &key.kind {
                Kind::Table(keys) => Some((*keys, dotted(path, key.name))),
                Kind::Named { each: Kind::Table(keys), .. } => Some((*keys, dotted(path, key.name) + ".NAME")),
                _ => None,
            };
            let here = (key.name == name && !path.is_empty()).then(|| format!("[{path}]"));
            here.or_else(|| inside.and_then(|(keys, path)| search(keys, &path, name)))
        })
    }
    search(ROOT, "", name)
}
