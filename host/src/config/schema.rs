//! The JSON Schema of streams.toml for editors, made from the table of keys. Says less than `millstream check`: a
//! schema cannot see two keys at once.

use serde_json::{Map, Value, json};

use super::keys::{Given, Key, Kind, ROOT};

/// A string that takes part of its value from the environment can hold anything.
const INTERPOLATED: &str = "\\$\\{[A-Za-z_][A-Za-z0-9_]*\\}";

/// Returns the schema, in JSON Schema draft 7: the one that TOML plugins of editors read.
pub fn json_schema() -> Value {
    let mut schema = table(ROOT);
    schema["$schema"] = json!("http://json-schema.org/draft-07/schema#");
    schema["title"] = json!("streams.toml of Millstream");
    schema
}

fn table(keys: &[Key]) -> Value {
    let mut properties = Map::new();
    for key in keys {
        let mut schema = of_kind(&key.kind);
        schema["description"] = json!(format!("{} Allowed: {}.", key.about, key.kind.allowed()));
        if let Given::Default(text) = key.given
            && !text.is_empty()
        {
            schema["default"] = default(&key.kind, text);
        }
        properties.insert(key.name.to_owned(), schema);
    }
    let required: Vec<_> = keys.iter().filter(|key| matches!(key.given, Given::Required)).map(|key| key.name).collect();
    let mut schema = json!({ "type": "object", "properties": properties, "additionalProperties": false });
    if !required.is_empty() {
        schema["required"] = json!(required);
    }
    schema
}

fn of_kind(kind: &Kind) -> Value {
    match kind {
        Kind::Text(_) => json!({ "type": "string" }),
        Kind::Texts(_) => json!({ "type": "array", "items": { "type": "string" } }),
        Kind::Integer { min, max } => or_interpolated(json!({ "type": "integer", "minimum": min, "maximum": max })),
        Kind::Float { min, max } => or_interpolated(json!({ "type": "number", "minimum": min, "maximum": max })),
        Kind::Boolean => or_interpolated(json!({ "type": "boolean" })),
        Kind::Duration { .. } => json!({ "type": "string", "pattern": or_pattern("([0-9]+(ms|s|m|h|d))+") }),
        Kind::Retention { .. } => json!({ "type": "string", "pattern": or_pattern("([0-9]+(ms|s|m|h|d))+|forever") }),
        Kind::Size { min, max } => json!({ "anyOf": [
            { "type": "string", "pattern": or_pattern("[0-9]+ *(B|KiB|MiB|GiB|KB|MB|GB)?") },
            { "type": "integer", "minimum": min, "maximum": max },
        ] }),
        // Plugins hand a TOML date and time over as a string.
        Kind::Time => json!({ "type": "string" }),
        Kind::Choice(words) => or_interpolated(json!({ "enum": words })),
        Kind::ChoiceOrOneOf(words, keys) => json!({ "anyOf": [
            { "enum": words },
            { "type": "string", "pattern": INTERPOLATED },
            one_of(keys),
        ] }),
        Kind::OneOf(keys) => one_of(keys),
        Kind::Table(keys) => table(keys),
        Kind::Tables(keys) => json!({ "type": "array", "items": table(keys) }),
        Kind::Named { each, .. } => json!({ "type": "object", "additionalProperties": of_kind(each) }),
    }
}

fn one_of(keys: &[Key]) -> Value {
    let mut schema = table(keys);
    schema["minProperties"] = json!(1);
    schema["maxProperties"] = json!(1);
    schema
}

fn or_interpolated(schema: Value) -> Value {
    json!({ "anyOf": [schema, { "type": "string", "pattern": INTERPOLATED }] })
}

fn or_pattern(pattern: &str) -> String {
    format!("^({pattern})$|{INTERPOLATED}")
}

fn default(kind: &Kind, text: &str) -> Value {
    match kind {
        Kind::Integer { .. } | Kind::Float { .. } | Kind::Boolean => {
            serde_json::from_str(text).expect("numbers and booleans of the table are written as in JSON")
        }
        _ => json!(text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_schema_tells_bounds_defaults_and_what_is_required() {
        let schema = json_schema();
        let group = &schema["properties"]["groups"]["additionalProperties"];
        let slots = &group["properties"]["slots"];
        assert_eq!(group["required"], json!(["stream", "handler"]));
        assert_eq!((&slots["default"], &slots["anyOf"][0]["maximum"]), (&json!(16), &json!(1000)));
        assert_eq!(group["properties"]["secrets"]["additionalProperties"]["maxProperties"], json!(1));
    }

    /// Goal: an editor marks every unknown key. Method: every object of the schema says what else it takes.
    #[test]
    fn no_table_of_the_schema_is_open() {
        fn visit(schema: &Value, objects: &mut usize) {
            match schema {
                Value::Object(entries) => {
                    if entries.get("type") == Some(&json!("object")) {
                        *objects += 1;
                        assert!(entries.contains_key("additionalProperties"), "{schema}");
                    }
                    entries.values().for_each(|inner| visit(inner, objects));
                }
                Value::Array(elements) => elements.iter().for_each(|inner| visit(inner, objects)),
                _ => {}
            }
        }
        let mut objects = 0;
        visit(&json_schema(), &mut objects);
        assert!(objects > 15, "only {objects} tables were seen");
    }
}
