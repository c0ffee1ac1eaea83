//! Reads the values of secrets where they are needed. A value goes to its handler and nowhere else: it is never kept
//! in a `Config`, logged or put into an error.

use std::path::Path;

use anyhow::{Context, bail};

use super::types::Secret;

/// Longest secret. A certificate chain fits; a file named by mistake does not fill the memory.
const SECRET_BYTES_MAX: u64 = 64 * 1024;

impl Secret {
    /// Reads the value. `folder` is the one of streams.toml, which a relative file starts from. One line break at the
    /// end of a file is left out, since editors add it.
    pub fn read(&self, folder: &Path) -> anyhow::Result<String> {
        match self {
            Self::Env(name) => std::env::var(name)
                .ok()
                .with_context(|| format!("read a secret: environment variable `{name}` is not set to readable text")),
            Self::File(path) => {
                let path = folder.join(path);
                let context = || format!("read a secret from {}", path.display());
                let size = std::fs::metadata(&path).with_context(context)?.len();
                if size > SECRET_BYTES_MAX {
                    bail!("{}: the file has {size} bytes; allowed: up to {SECRET_BYTES_MAX}", context());
                }
                let text = std::fs::read_to_string(&path).with_context(context)?;
                if text.contains('\0') {
                    bail!("{}: the file holds a NUL character; allowed: plain text", context());
                }
                Ok(text.strip_suffix('\n').map_or(&*text, |line| line.strip_suffix('\r').unwrap_or(line)).to_owned())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_gives_its_text_without_the_last_line_break() {
        let folder = tempfile::tempdir().unwrap();
        let check = |written: &str, expected: &str| {
            std::fs::write(folder.path().join("key"), written).unwrap();
            assert_eq!(Secret::File("key".into()).read(folder.path()).unwrap(), expected);
        };
        check("s3cret", "s3cret");
        check("s3cret\n", "s3cret");
        check("two\nlines\r\n", "two\nlines");
    }

    #[test]
    fn a_missing_secret_is_named_and_its_neighbours_are_not_shown() {
        let folder = tempfile::tempdir().unwrap();
        let error = format!("{:#}", Secret::Env("MILLSTREAM_TEST_NEVER_SET".into()).read(folder.path()).unwrap_err());
        assert!(error.contains("MILLSTREAM_TEST_NEVER_SET"), "{error}");
        std::fs::write(folder.path().join("key"), vec![b'x'; SECRET_BYTES_MAX as usize + 1]).unwrap();
        let error = format!("{:#}", Secret::File("key".into()).read(folder.path()).unwrap_err());
        assert!(error.contains("65537 bytes") && !error.contains("xxx"), "{error}");
    }
}
