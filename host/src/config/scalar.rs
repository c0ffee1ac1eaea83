//! Single values of streams.toml: reads one by its kind and bounds, and says what was found and what is allowed.

use time::{OffsetDateTime, UtcOffset, format_description::well_known::Rfc3339};
use toml::de::DeValue;

use super::{
    errors::{nearest, shortened},
    keys::Kind,
    tree::Value,
    units::{duration_text, parse_duration, parse_size, size_text},
};

/// Reads one value. `text` is the value of a string, after interpolation; numbers and booleans may be given that way
/// too, since `"${VAR}"` is always a string.
///
/// # Errors
/// Returns a hint, when there is more to say than what is allowed.
pub(super) fn read(kind: &Kind, raw: &DeValue<'_>, text: Option<&str>) -> Result<Value, Option<String>> {
    match kind {
        Kind::Text(rule) => {
            let text = text.ok_or_else(quotes_missing(raw))?;
            rule.check(text).map_err(|hint| hint.map(str::to_owned))?;
            Ok(Value::Text(text.to_owned()))
        }
        Kind::Integer { min, max } => {
            let number = integer(raw, text).ok_or_else(quotes_needless(raw, text))?;
            within(number, min, max).map(Value::Integer)
        }
        Kind::Float { min, max } => {
            let number = float(raw, text).ok_or_else(quotes_needless(raw, text))?;
            within(number, min, max).map(Value::Float)
        }
        Kind::Boolean => match (raw.as_bool(), text) {
            (Some(yes), _) => Ok(Value::Boolean(yes)),
            (None, Some("true")) => Ok(Value::Boolean(true)),
            (None, Some("false")) => Ok(Value::Boolean(false)),
            _ => Err(quotes_needless(raw, text)()),
        },
        Kind::Retention { .. } if text == Some("forever") => Ok(Value::Duration(None)),
        Kind::Duration { .. } if text == Some("forever") => Err(Some("leave it out for the default".to_owned())),
        Kind::Duration { min_ms, max_ms } | Kind::Retention { min_ms, max_ms } => {
            let text = text.ok_or_else(|| Some("write a unit, in quotes: \"30s\"".to_owned()))?;
            let duration = parse_duration(text).map_err(Some)?;
            within(duration.as_millis(), &u128::from(*min_ms), &u128::from(*max_ms))?;
            Ok(Value::Duration(Some(duration)))
        }
        Kind::Size { min, max } => {
            let bytes = match (text, integer(raw, None)) {
                (Some(text), _) => parse_size(text).map_err(Some)?,
                (None, Some(number)) => u64::try_from(number).map_err(|_| None)?,
                (None, None) => return Err(Some("write \"64MiB\", or a number of bytes".to_owned())),
            };
            within(bytes, min, max).map(Value::Size)
        }
        Kind::Time => Ok(Value::Text(utc_time(raw, text)?)),
        Kind::Choice(words) | Kind::ChoiceOrOneOf(words, _) => {
            let text = text.ok_or(None)?;
            if words.contains(&text) {
                return Ok(Value::Text(text.to_owned()));
            }
            Err(nearest(text, words.iter().copied()).map(|near| format!("did you mean \"{near}\"?")))
        }
        Kind::Texts(_) if text.is_some() => Err(Some("put it in brackets: [\"...\"]".to_owned())),
        Kind::OneOf(_) if text.is_some() => {
            Err(Some("a secret does not stand in this file: name the variable or the file that holds it".to_owned()))
        }
        Kind::Texts(_) | Kind::Tables(_) | Kind::OneOf(_) | Kind::Table(_) | Kind::Named { .. } => Err(None),
    }
}

/// The value of a key that is left out.
pub(super) fn default(kind: &Kind, text: &str) -> Value {
    read(kind, &DeValue::String(text.into()), Some(text))
        .expect("a default keeps its own bounds: a test reads them all")
}

/// What was found. A string is told only where its kind is a word or a number with a unit, and never one that may
/// be a secret; nor is anything told of a value that should have been a table.
pub(super) fn describe(kind: &Kind, raw: &DeValue<'_>, hidden: bool) -> String {
    let number = matches!(kind, Kind::Integer { .. } | Kind::Float { .. });
    let unit = matches!(kind, Kind::Size { .. } | Kind::Duration { .. } | Kind::Retention { .. });
    let word = matches!(kind, Kind::Text(_) | Kind::Choice(_) | Kind::ChoiceOrOneOf(..) | Kind::Time);
    match raw {
        DeValue::String(_) if hidden => "a value that is not shown".to_owned(),
        DeValue::String(text) if word || unit => format!("{:?}", shortened(text)),
        DeValue::Integer(digits) if number || unit => shortened(&digits.to_string()),
        DeValue::Float(digits) if number || unit => shortened(digits.as_str()),
        _ => type_name(raw).to_owned(),
    }
}

/// A TOML type in plain words.
pub(super) fn type_name(raw: &DeValue<'_>) -> &'static str {
    match raw {
        DeValue::String(_) => "a string",
        DeValue::Integer(_) => "a whole number",
        DeValue::Float(_) => "a number",
        DeValue::Boolean(_) => "a boolean",
        DeValue::Datetime(_) => "a date or time",
        DeValue::Array(_) => "a list",
        DeValue::Table(_) => "a table",
    }
}

impl Kind {
    /// What is allowed, to stand behind "allowed:".
    pub fn allowed(&self) -> String {
        let words = |words: &[&str]| words.iter().map(|word| format!("\"{word}\"")).collect::<Vec<_>>().join(", ");
        let milliseconds = |ms: u64| duration_text(std::time::Duration::from_millis(ms));
        match self {
            Self::Text(rule) => rule.allowed().to_owned(),
            Self::Texts(rule) => format!("a list, each {}", rule.allowed()),
            Self::Integer { min, max: i64::MAX } => format!("a whole number from {min}"),
            Self::Integer { min, max } => format!("a whole number from {min} to {max}"),
            Self::Float { min, max } => format!("a number from {min} to {max}"),
            Self::Boolean => "true or false".to_owned(),
            Self::Duration { min_ms, max_ms } => {
                format!("a duration from \"{}\" to \"{}\"", milliseconds(*min_ms), milliseconds(*max_ms))
            }
            Self::Retention { min_ms, max_ms } => {
                let (min, max) = (milliseconds(*min_ms), milliseconds(*max_ms));
                format!("\"forever\" or a duration from \"{min}\" to \"{max}\"")
            }
            Self::Size { min, max } => format!("a size from \"{}\" to \"{}\"", size_text(*min), size_text(*max)),
            Self::Time => "a time such as \"2026-01-01T00:00:00Z\"".to_owned(),
            Self::Choice(choices) => words(choices),
            Self::ChoiceOrOneOf(choices, keys) => {
                let forms = keys.iter().map(|key| format!("{{ {} = ... }}", key.name)).collect::<Vec<_>>().join(", ");
                format!("{}, {forms}", words(choices))
            }
            Self::OneOf(keys) => {
                keys.iter().map(|key| format!("{{ {} = ... }}", key.name)).collect::<Vec<_>>().join(" or ")
            }
            Self::Table(_) => "a table".to_owned(),
            Self::Tables(_) => "a list of tables".to_owned(),
            Self::Named { .. } => "a table of names and values".to_owned(),
        }
    }

    /// Whether a value of this kind may be a secret and is never shown.
    pub fn hidden(&self) -> bool {
        matches!(self, Self::Text(rule) | Self::Texts(rule) if rule.hidden())
    }
}

fn integer(raw: &DeValue<'_>, text: Option<&str>) -> Option<i64> {
    match (raw, text) {
        (DeValue::Integer(number), _) => i64::from_str_radix(number.as_str(), number.radix()).ok(),
        (_, Some(text)) => text.parse().ok(),
        _ => None,
    }
}

/// Whole numbers are numbers too: `factor = 2` is what people write.
fn float(raw: &DeValue<'_>, text: Option<&str>) -> Option<f64> {
    let text = match (raw, text) {
        (DeValue::Float(number), _) => number.as_str(),
        (DeValue::Integer(number), _) if number.radix() == 10 => number.as_str(),
        (_, Some(text)) => text,
        _ => return None,
    };
    text.parse().ok()
}

/// NaN is outside every range.
fn within<T: PartialOrd>(value: T, min: &T, max: &T) -> Result<T, Option<String>> {
    if value >= *min && value <= *max { Ok(value) } else { Err(None) }
}

fn utc_time(raw: &DeValue<'_>, text: Option<&str>) -> Result<String, Option<String>> {
    let written = match (raw, text) {
        (DeValue::Datetime(time), _) => time.to_string(),
        (_, Some(text)) => text.to_owned(),
        _ => return Err(None),
    };
    parse_time(&written)
        .ok_or_else(|| Some("write date, time and zone, for example \"2026-01-01T00:00:00Z\"".to_owned()))
}

/// An RFC 3339 time, in UTC.
pub fn parse_time(text: &str) -> Option<String> {
    let time = OffsetDateTime::parse(text, &Rfc3339).ok()?;
    time.checked_to_offset(UtcOffset::UTC)?.format(&Rfc3339).ok()
}

fn quotes_missing(raw: &DeValue<'_>) -> impl FnOnce() -> Option<String> {
    let scalar = matches!(raw, DeValue::Integer(_) | DeValue::Float(_) | DeValue::Boolean(_) | DeValue::Datetime(_));
    move || scalar.then(|| "write it in quotes".to_owned())
}

fn quotes_needless(raw: &DeValue<'_>, text: Option<&str>) -> impl FnOnce() -> Option<String> {
    // With a text the quotes stood around `${VAR}`, where they are needed.
    let needless = raw.is_str() && text.is_none();
    move || needless.then(|| "write it without quotes".to_owned())
}

#[cfg(test)]
mod tests {
    use super::{super::keys, *};

    /// Goal: no default is outside its own bounds. Method: read every one of the table.
    #[test]
    fn every_default_keeps_its_own_bounds() {
        fn visit(keys: &[keys::Key], seen: &mut usize) {
            for key in keys {
                match (&key.kind, &key.given) {
                    (Kind::Table(inner) | Kind::Tables(inner), _) => visit(inner, seen),
                    (Kind::Named { each: Kind::Table(inner), .. }, _) => visit(inner, seen),
                    (Kind::Named { .. } | Kind::Texts(_), _) => {}
                    (kind, keys::Given::Default(text)) => {
                        let raw = DeValue::String((*text).into());
                        assert!(read(kind, &raw, Some(text)).is_ok(), "{} = {text}", key.name);
                        *seen += 1;
                    }
                    _ => {}
                }
            }
        }
        let mut seen = 0;
        visit(keys::ROOT, &mut seen);
        assert!(seen > 30, "only {seen} defaults were read");
    }

    #[test]
    fn times_are_kept_in_utc() {
        let utc = |text| utc_time(&DeValue::String("".into()), Some(text));
        assert_eq!(utc("2026-01-01T02:00:00+02:00"), Ok("2026-01-01T00:00:00Z".to_owned()));
        assert!(utc("2026-01-01").is_err());
        assert!(utc("yesterday").is_err());
    }
}
