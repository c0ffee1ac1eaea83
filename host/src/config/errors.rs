//! What is wrong with a streams.toml: collected while reading, told with file, line, key and a way out. Never shows a
//! value that came from the environment.

use std::fmt;

/// More than this many problems are counted, not printed: the first ones are what people mend anyway.
const SHOWN_MAX: usize = 100;

/// Everything that is wrong with one file, in the order of its lines.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigErrors {
    /// Invariant: not empty.
    pub errors: Vec<ConfigError>,
}

/// One problem.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigError {
    pub file: String,
    /// Line and column, from 1; `None` when the file could not be read at all.
    pub position: Option<(usize, usize)>,
    /// Dotted key, such as `groups.email.slots`; empty when the problem is the file's.
    pub key: String,
    /// What was found and what is allowed.
    pub message: String,
    /// How to mend it.
    pub hint: Option<String>,
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.file)?;
        if let Some((line, column)) = self.position {
            write!(f, ":{line}:{column}")?;
        }
        if !self.key.is_empty() {
            write!(f, ": {}", self.key)?;
        }
        write!(f, ": {}", self.message)?;
        if let Some(hint) = &self.hint {
            write!(f, "\n  hint: {hint}")?;
        }
        Ok(())
    }
}

impl fmt::Display for ConfigErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, error) in self.errors.iter().take(SHOWN_MAX).enumerate() {
            write!(f, "{}{error}", if index == 0 { "" } else { "\n" })?;
        }
        if self.errors.len() > SHOWN_MAX {
            write!(f, "\n... and {} more", self.errors.len() - SHOWN_MAX)?;
        }
        Ok(())
    }
}

impl std::error::Error for ConfigErrors {}

/// One problem while the file is being read: positions are byte offsets still.
#[derive(Debug)]
pub(super) struct Problem {
    pub at: usize,
    pub key: String,
    pub message: String,
    pub hint: Option<String>,
}

/// Orders problems by their place and gives them lines and columns. `None` when there are none.
pub(super) fn report(mut problems: Vec<Problem>, text: &str, file: &str) -> Option<ConfigErrors> {
    problems.sort_by_key(|problem| problem.at);
    let errors: Vec<_> = problems
        .into_iter()
        .map(|problem| ConfigError {
            file: file.to_owned(),
            position: Some(line_and_column(text, problem.at)),
            key: problem.key,
            message: problem.message,
            hint: problem.hint,
        })
        .collect();
    (!errors.is_empty()).then_some(ConfigErrors { errors })
}

/// Columns count characters, not bytes, as editors do.
fn line_and_column(text: &str, at: usize) -> (usize, usize) {
    let before = &text[..text.floor_char_boundary(at)];
    let line_start = before.rfind('\n').map_or(0, |newline| newline + 1);
    (before.matches('\n').count() + 1, before[line_start..].chars().count() + 1)
}

/// The candidate a person most likely meant, if any is near enough.
pub fn nearest<'a>(word: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    // A third of the letters wrong still reads as a slip; beyond that a guess confuses more than it helps.
    let slips_max = word.chars().count().max(3) / 3;
    candidates
        .into_iter()
        .map(|candidate| (strsim::damerau_levenshtein(&word.to_lowercase(), &candidate.to_lowercase()), candidate))
        .filter(|(slips, _)| *slips <= slips_max)
        .min_by_key(|(slips, _)| *slips)
        .map(|(_, candidate)| candidate)
}

/// Appends a part to a dotted key, in quotes where TOML needs them.
pub(super) fn dotted(key: &str, part: &str) -> String {
    let bare = !part.is_empty() && part.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '-');
    let part = shortened(part);
    let part = if bare { part } else { format!("{part:?}") };
    if key.is_empty() { part } else { format!("{key}.{part}") }
}

/// At most 60 characters of a text, for messages.
pub(super) fn shortened(text: &str) -> String {
    const SHOWN_CHARS_MAX: usize = 60;
    if text.chars().count() <= SHOWN_CHARS_MAX {
        return text.to_owned();
    }
    text.chars().take(SHOWN_CHARS_MAX).chain(['…']).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slip_is_recognised_and_a_stranger_is_not() {
        assert_eq!(nearest("slot", ["slots", "stream"]), Some("slots"));
        assert_eq!(nearest("tiemout", ["timeout"]), Some("timeout"));
        assert_eq!(nearest("workers", ["slots", "stream", "handler"]), None);
        assert_eq!(nearest("", ["slots"]), None);
    }

    #[test]
    fn positions_count_characters_and_never_fall_outside() {
        let text = "a = \"é\" x\nb";
        assert_eq!(line_and_column(text, 0), (1, 1));
        assert_eq!(line_and_column(text, text.find('x').unwrap()), (1, 9));
        assert_eq!(line_and_column(text, text.len() + 10), (2, 2));
    }
}
