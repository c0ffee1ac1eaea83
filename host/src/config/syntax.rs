//! What the TOML parser refuses, in our words. One slip makes it stumble several times: only what helps is told.

use toml::de::Error;

use super::errors::{Problem, shortened};

/// What the parser says when a key stands twice in one table.
const DUPLICATE_KEY: &str = "duplicate key";

/// A file whose only mistakes are keys given twice can be read on; the first ones count.
pub(super) fn is_duplicate(error: &Error) -> bool {
    error.message() == DUPLICATE_KEY
}

pub(super) fn problems(text: &str, syntax_errors: &[Error]) -> Vec<Problem> {
    let mut problems: Vec<Problem> = Vec::new();
    let mut line_end = 0;
    for error in syntax_errors {
        let span = error.span().unwrap_or_default();
        let start = text.floor_char_boundary(span.start);
        if !problems.is_empty() && start <= line_end {
            continue;
        }
        let line_start = text[..start].rfind('\n').map_or(0, |newline| newline + 1);
        line_end = end_of(text, start, "\n");
        if is_duplicate(error) && text[line_start..line_end].trim_start().starts_with('[') {
            // A table that stands twice repeats its keys as well: the header says it all.
            line_end = end_of(text, line_end, "\n[");
        }
        let key = text.get(span.clone()).filter(|_| is_duplicate(error)).map(shortened).unwrap_or_default();
        let (message, hint) = explained(error, span.is_empty());
        problems.push(Problem { at: start, key, message, hint: Some(hint.to_owned()) });
    }
    problems
}

fn explained(error: &Error, nothing_there: bool) -> (String, &'static str) {
    if is_duplicate(error) {
        return ("found twice; allowed: each key once in its table".to_owned(), "remove or rename one of the two");
    }
    if nothing_there && error.message().starts_with("string values must be quoted") {
        return ("the value is missing".to_owned(), "write one behind `=`, or remove the line");
    }
    (format!("not valid TOML: {}", error.message()), "strings stand in quotes; https://toml.io shows the syntax")
}

fn end_of(text: &str, from: usize, mark: &str) -> usize {
    text[from..].find(mark).map_or(text.len(), |length| from + length)
}
