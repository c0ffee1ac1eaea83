//! Where payloads and lines come from: a file, or standard input.

use std::{
    fs::File,
    io::{self, BufReader, IsTerminal, Read},
};

use anyhow::{Context, Result, bail};

use super::super::UsageError;

/// Read in pieces of this size: large enough that reading never is what one waits for.
const BUFFER_BYTES: usize = 1 << 20;

/// An open input.
pub struct Input {
    /// As errors name it.
    pub name: String,
    pub reader: BufReader<Box<dyn Read + Send>>,
}

/// Opens what `--file` names. Fails, rather than waiting for a person to type, when that is a terminal by accident.
pub fn open(file: Option<&str>) -> Result<Input> {
    let (name, reader): (String, Box<dyn Read + Send>) = match file {
        None if io::stdin().is_terminal() => {
            bail!(UsageError(
                "nothing to read: give --file FILE, or pipe the payload in (`--file -` reads what you type)".to_owned()
            ))
        }
        None | Some("-") => ("standard input".to_owned(), Box::new(io::stdin())),
        Some(path) => (path.to_owned(), Box::new(File::open(path).with_context(|| format!("open {path}"))?)),
    };
    Ok(Input { name, reader: BufReader::with_capacity(BUFFER_BYTES, reader) })
}
