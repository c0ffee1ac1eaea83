//! Reads the values of secrets where they are needed. A value goes to its handler and nowhere else: it is never kept
//! in a `Config`, logged or put into an error.

use std::{env, fs, path::Path};

use anyhow::{Context, bail, ensure};

use super::types::Secret;

/// Longest secret. A certificate chain fits; a file named by mistake does not fill the memory.
const SECRET_BYTES_MAX: u64 = 64 * 1024;

impl Secret {
    /// Reads the value. `folder` is the one of streams.toml, which a relative file starts from. One line break at the
    /// end of a file is left out, since editors add it.
    ///
    /// # Errors
    /// Says where it was looked for and what to do; an empty value counts as missing, since no secret is empty.
    pub fn read(&self, folder: &Path) -> anyhow::Result<String> {
        match self {
            Self::Env(variable) => match env::var(variable) {
                Ok(value) => {
                    ensure!(!value.is_empty(), "environment variable {variable} is empty: give it a value");
                    Ok(value)
                }
                Err(env::VarError::NotPresent) => {
                    bail!("environment variable {variable} is not set: set it for the host, and start the host again")
                }
                Err(env::VarError::NotUnicode(_)) => {
                    bail!("environment variable {variable} is not UTF-8: give it as text, or use a file")
                }
            },
            Self::File(path) => {
                let path = folder.join(path);
                let unreadable =
                    || format!("file {} cannot be read: put the value there, readable for the host", path.display());
                let bytes = fs::metadata(&path).with_context(unreadable)?.len();
                if bytes > SECRET_BYTES_MAX {
                    bail!("file {} has {bytes} bytes; allowed: up to {SECRET_BYTES_MAX}", path.display());
                }
                let text = fs::read_to_string(&path).with_context(unreadable)?;
                if text.contains('\0') {
                    bail!("file {} holds a NUL character; allowed: plain text", path.display());
                }
                let value = text.strip_suffix('\n').map_or(&*text, |line| line.strip_suffix('\r').unwrap_or(line));
                ensure!(!value.is_empty(), "file {} is empty: put the value there", path.display());
                Ok(value.to_owned())
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
            fs::write(folder.path().join("key"), written).unwrap();
            assert_eq!(Secret::File("key".into()).read(folder.path()).unwrap(), expected);
        };
        check("s3cret", "s3cret");
        check("s3cret\n", "s3cret");
        check("two\nlines\r\n", "two\nlines");
    }

    #[test]
    fn what_is_missing_is_named_with_a_way_out_and_no_value_is_shown() {
        let folder = tempfile::tempdir().unwrap();
        let error = |secret: Secret| format!("{:#}", secret.read(folder.path()).unwrap_err());
        let told = error(Secret::Env("MILLSTREAM_TEST_NEVER_SET".into()));
        assert!(told.starts_with("environment variable MILLSTREAM_TEST_NEVER_SET is not set: set it "), "{told}");
        let told = error(Secret::File("key".into()));
        assert!(told.contains("key cannot be read: put the value there") && told.contains("No such file"), "{told}");
        for (written, expected) in [
            (vec![b'x'; SECRET_BYTES_MAX as usize + 1], "65537 bytes"),
            (b"\n".to_vec(), "is empty"),
            (b"xxx\0".to_vec(), "NUL"),
            (b"xxx\xff".to_vec(), "UTF-8"),
        ] {
            fs::write(folder.path().join("key"), written).unwrap();
            let told = error(Secret::File("key".into()));
            assert!(told.contains(expected) && !told.contains("xxx"), "{told}");
        }
    }
}
