//! Why a handler file was refused: one line that says what it is and what to do.

use std::fmt;

/// One line: what the file is, then what to do about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadError(String);

impl LoadError {
    /// Line feeds of the tools below us are folded away, since this is printed as one line.
    pub fn new(text: impl AsRef<str>) -> Self {
        Self(text.as_ref().split_whitespace().collect::<Vec<_>>().join(" "))
    }
}

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for LoadError {}
