//! streams.toml: from text to validated types. Never touches a database, a network or a handler.
//!
//! `keys` is the table of all keys. A file goes through `read` (kinds, bounds, defaults), `cross` (two keys at once)
//! to `build` (types). All problems of a file are reported in one run.

mod types;

mod keys;

mod read;

mod scalar;

mod text;

mod units;

mod interpolate;

mod syntax;

mod cross;

mod build;

mod tree;

mod errors;

mod schema;

mod secret;

use std::path::{Path, PathBuf};

use toml::de::DeTable;

use self::read::Reader;
pub use self::{
    errors::{ConfigError, ConfigErrors, nearest},
    interpolate::Environment,
    scalar::parse_time,
    schema::json_schema,
    text::NAME_BYTES_MAX,
    types::*,
    units::{duration_text, parse_duration, parse_size, size_text},
};

/// Largest streams.toml. Ten thousand groups fit; a file given by mistake does not fill the memory.
const FILE_BYTES_MAX: u64 = 8 << 20;

/// Reads and checks a streams.toml, taking `${VAR}` from the process environment.
///
/// # Errors
/// Returns every problem of the file, or the one reason why it cannot be read.
pub fn load(path: &Path) -> Result<Config, ConfigErrors> {
    let unreadable = |message: String, hint: &str| ConfigErrors {
        errors: vec![ConfigError {
            file: path.display().to_string(),
            position: None,
            key: String::new(),
            message,
            hint: Some(hint.to_owned()),
        }],
    };
    let size = std::fs::metadata(path).map(|metadata| metadata.len());
    if size.is_ok_and(|size| size > FILE_BYTES_MAX) {
        return Err(unreadable("larger than 8 MiB; allowed: a streams.toml".to_owned(), "give the right file"));
    }
    let bytes = std::fs::read(path).map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => {
            unreadable("no such file".to_owned(), "name the file with `--config FILE`, or run in its folder")
        }
        _ => unreadable(format!("cannot be read: {error}"), "make it readable for this user"),
    })?;
    let text = String::from_utf8(bytes).map_err(|error| {
        let line = error.as_bytes()[..error.utf8_error().valid_up_to()].split(|byte| *byte == b'\n').count();
        unreadable(format!("not UTF-8 text in line {line}"), "save the file as UTF-8")
    })?;
    parse(&text, path, &|name| std::env::var(name).ok())
}

/// Checks the text of a streams.toml. `file` is only named in errors; `environment` gives the values of `${VAR}`.
///
/// # Errors
/// Returns every problem of the text, in the order of its lines. Never panics, whatever the text.
pub fn parse(text: &str, file: &Path, environment: &Environment<'_>) -> Result<Config, ConfigErrors> {
    let (table, syntax_errors) = DeTable::parse_recoverable(text);
    let only_duplicates = syntax_errors.iter().all(syntax::is_duplicate);
    let mut reader = Reader::new(environment);
    let root = reader.root(table.get_ref());
    let mut problems = syntax::problems(text, &syntax_errors);
    // After other mistakes of syntax the rest of the tree is guesswork, and what it seems to hold would mislead.
    if only_duplicates {
        problems.append(&mut reader.problems);
        cross::check(&root, &mut problems);
    }
    match errors::report(problems, text, &file.display().to_string()) {
        Some(errors) => Err(errors),
        None => Ok(build::config(&root)),
    }
}

impl Host {
    /// The handlers folder, seen from the working directory. `config_file` is the streams.toml it was read from.
    pub fn handlers_folder(&self, config_file: &Path) -> PathBuf {
        config_file.parent().unwrap_or(Path::new("")).join(&self.handlers)
    }
}
