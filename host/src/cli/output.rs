//! How answers are printed: tables for people, JSON for machines. Its JSON is the contract, its tables are not.

use std::io::{self, Write};

use clap::ValueEnum;
use serde::Serialize;

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    Table,
    Json,
}

/// Prints answers to standard output in the format that was asked for.
#[derive(Clone, Copy, Debug)]
pub struct Output {
    format: Format,
}

/// A column of a table.
#[derive(Clone, Copy, Debug)]
pub struct Column {
    pub title: &'static str,
    pub align: Align,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Align {
    Left,
    /// For numbers.
    Right,
}

impl Column {
    pub const fn left(title: &'static str) -> Self {
        Self { title, align: Align::Left }
    }

    pub const fn right(title: &'static str) -> Self {
        Self { title, align: Align::Right }
    }
}

impl Output {
    pub fn new(format: Format) -> Self {
        Self { format }
    }

    pub fn is_json(&self) -> bool {
        self.format == Format::Json
    }

    /// Prints a list: a table whose cells `cells` writes, or a JSON array. An empty table prints `nothing`.
    pub fn list<T: Serialize>(
        &self,
        rows: &[T],
        columns: &[Column],
        cells: impl Fn(&T) -> Vec<String>,
        nothing: &str,
    ) -> anyhow::Result<()> {
        match self.format {
            Format::Json => self.json(&rows),
            Format::Table if rows.is_empty() => print(&format!("{nothing}\n")),
            Format::Table => print(&table(columns, &rows.iter().map(cells).collect::<Vec<_>>())),
        }
    }

    /// Prints one thing: the text that `text` writes, or a JSON object.
    pub fn one<T: Serialize>(&self, value: &T, text: impl FnOnce(&T) -> String) -> anyhow::Result<()> {
        match self.format {
            Format::Json => self.json(value),
            Format::Table => print(&text(value)),
        }
    }

    fn json<T: Serialize>(&self, value: &T) -> anyhow::Result<()> {
        print(&(serde_json::to_string_pretty(value)? + "\n"))
    }
}

/// Lays a table out: titles in capitals, columns as wide as their widest cell, two blanks between.
pub fn table(columns: &[Column], rows: &[Vec<String>]) -> String {
    let rows: Vec<Vec<String>> = rows.iter().map(|row| row.iter().map(|cell| visible(cell)).collect()).collect();
    let titles: Vec<String> = columns.iter().map(|column| column.title.to_uppercase()).collect();
    let width = |index: usize| {
        let cells = rows.iter().map(|row| row[index].chars().count());
        cells.chain([titles[index].chars().count()]).max().unwrap_or_default()
    };
    let widths: Vec<usize> = (0..columns.len()).map(width).collect();
    let mut text = String::new();
    for row in std::iter::once(&titles).chain(&rows) {
        assert_eq!(row.len(), columns.len(), "every row has a cell for every column");
        let cells = row.iter().zip(columns).zip(&widths).map(|((cell, column), width)| match column.align {
            Align::Left => format!("{cell:<width$}"),
            Align::Right => format!("{cell:>width$}"),
        });
        text.push_str(cells.collect::<Vec<_>>().join("  ").trim_end());
        text.push('\n');
    }
    text
}

/// The first line of an error, or so many characters of it. The whole is in `dead show` and in JSON.
pub fn first_line(error: &str, chars_max: usize) -> String {
    let line = error.lines().next().unwrap_or_default();
    let mut short: String = line.chars().take(chars_max).collect();
    if short.len() < line.len() {
        short.push_str("...");
    }
    short
}

/// Keys and error texts come from anywhere: control characters in them must not reach a terminal.
pub fn visible(text: &str) -> String {
    let escaped = |c: char| c.is_control().then(|| c.escape_default().to_string());
    text.chars().map(|c| escaped(c).unwrap_or_else(|| c.to_string())).collect()
}

/// Writes to standard output.
///
/// # Errors
/// Fails as a write does; a reader that has gone away is told by [`is_closed_pipe`].
pub fn print(text: &str) -> anyhow::Result<()> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(text.as_bytes())?;
    stdout.flush()?;
    Ok(())
}

/// Writes a line to standard error. Where nobody reads it, there is nobody left to tell.
pub fn complain(line: &str) {
    let _ = writeln!(io::stderr().lock(), "{line}");
}

/// Whether this is only a reader of our output that stopped reading.
pub fn is_closed_pipe(error: &anyhow::Error) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let columns = [Column::left("group"), Column::right("lag")];
        let rows = [vec!["email".to_owned(), "7".to_owned()], vec!["größer".to_owned(), "1,000".to_owned()]];
        assert_eq!(table(&columns, &rows), "GROUP     LAG\nemail       7\ngrößer  1,000\n");
    }

    #[test]
    fn of_an_error_the_first_line_is_shown_and_a_cut_is_seen() {
        let shown = ["über alles\nmore", "über", ""].map(|error| first_line(error, 5));
        assert_eq!(shown, ["über ...", "über", ""]);
    }

    #[test]
    fn control_characters_never_reach_a_terminal() {
        let columns = [Column::left("key")];
        assert_eq!(table(&columns, &[vec!["a\u{1b}[31m\nb".to_owned()]]), "KEY\na\\u{1b}[31m\\nb\n");
    }
}
