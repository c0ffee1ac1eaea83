//! How an error and its causes are told: each cause once, and of what Postgres says its message alone. The driver's own
//! text adds a line of the server's source, which reads like a line of a file of ours.

use std::{error::Error, fmt::Write};

/// The error and its causes in one line.
pub fn told(error: &(dyn Error + 'static)) -> String {
    let mut text = String::new();
    let mut last = String::new();
    let mut next = Some(error);
    while let Some(error) = next {
        // Both wrap a cause that says the same again.
        let (cause, after) = match error.downcast_ref::<sqlx::Error>() {
            Some(sqlx::Error::Database(error)) => (error.message().to_owned(), None),
            Some(sqlx::Error::Io(error)) => (error.to_string(), None),
            _ => (error.to_string(), error.source()),
        };
        // Others end with what follows.
        if !last.ends_with(&cause) {
            let _ = write!(text, "{}{cause}", if text.is_empty() { "" } else { ": " });
            last = cause;
        }
        next = after;
    }
    text
}

#[cfg(test)]
mod tests {
    use std::io;

    use anyhow::Context;

    use super::*;

    #[test]
    fn a_cause_is_told_once() {
        let refused = || sqlx::Error::Io(io::Error::other("Connection refused"));
        assert_eq!(told(&refused()), "Connection refused");
        let error = Err::<(), _>(refused()).context("connect to x").context("open").unwrap_err();
        assert_eq!(told(error.as_ref()), "open: connect to x: Connection refused");
    }
}
