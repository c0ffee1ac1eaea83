//! `${VAR}` in string values. Looks names up through a function, so that tests need no process environment.

/// Where `${VAR}` is looked up: `None` when the variable is not set, or holds no valid UTF-8.
pub type Environment<'a> = dyn Fn(&str) -> Option<String> + 'a;

/// A string value after interpolation.
pub(super) struct Interpolated {
    pub text: String,
    /// Some of it came from the environment: it may be a secret, so no message may show it.
    pub hidden: bool,
}

/// Replaces every `${VAR}`; `$${` stands for a plain `${`.
///
/// # Errors
/// Returns every mistake, as (what is wrong, how to mend it). Neither holds a value.
pub(super) fn interpolate(raw: &str, environment: &Environment<'_>) -> Result<Interpolated, Vec<(String, String)>> {
    let mut text = String::with_capacity(raw.len());
    let mut hidden = false;
    let mut mistakes = Vec::new();
    let mut rest = raw;
    while let Some(at) = rest.find("${") {
        if rest[..at].ends_with('$') {
            text.push_str(&rest[..at - 1]);
            text.push_str("${");
            rest = &rest[at + 2..];
            continue;
        }
        text.push_str(&rest[..at]);
        let Some(length) = rest[at..].find('}') else {
            mistakes.push(("`${` without `}`".to_owned(), "write `${NAME}`, or `$${` for a plain `${`".to_owned()));
            return Err(mistakes);
        };
        let name = &rest[at + 2..at + length];
        match look_up(name, environment) {
            Ok(value) => text.push_str(&value),
            Err(mistake) => mistakes.push(mistake),
        }
        hidden = true;
        rest = &rest[at + length + 1..];
    }
    text.push_str(rest);
    if mistakes.is_empty() { Ok(Interpolated { text, hidden }) } else { Err(mistakes) }
}

fn look_up(name: &str, environment: &Environment<'_>) -> Result<String, (String, String)> {
    let plain = !name.is_empty()
        && !name.starts_with(|c: char| c.is_ascii_digit())
        && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
    if !plain {
        return Err((
            "`${...}` holds something other than a variable's name".to_owned(),
            "a name is letters, digits and `_`; there are no defaults or expressions; `$${` is a plain `${`".to_owned(),
        ));
    }
    environment(name).ok_or_else(|| {
        (format!("environment variable `{name}` is not set"), format!("set it, for example `export {name}=...`"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(raw: &str) -> Result<(String, bool), usize> {
        let environment = |name: &str| (name == "SET").then(|| "value".to_owned());
        interpolate(raw, &environment).map(|done| (done.text, done.hidden)).map_err(|mistakes| mistakes.len())
    }

    #[test]
    fn variables_are_replaced_and_escapes_are_kept() {
        assert_eq!(check("plain $ } {"), Ok(("plain $ } {".to_owned(), false)));
        assert_eq!(check("a ${SET}${SET} b"), Ok(("a valuevalue b".to_owned(), true)));
        assert_eq!(check("$${SET} ${SET}"), Ok(("${SET} value".to_owned(), true)));
    }

    #[test]
    fn every_mistake_of_one_value_is_reported() {
        assert_eq!(check("${UNSET} ${ALSO UNSET} ${}"), Err(3));
        assert_eq!(check("${SET"), Err(1));
        assert_eq!(check("${é}${1}"), Err(2));
    }
}
