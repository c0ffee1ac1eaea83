//! Asks before something is destroyed. `--yes` answers beforehand; without a terminal nobody can be asked.

use std::io::{self, BufRead, IsTerminal, Write};

use anyhow::{Context, bail};
use clap::Args;

use super::UsageError;

/// The flag of every destructive verb.
#[derive(Args, Clone, Copy, Debug, Default)]
pub struct Confirmation {
    /// Do it without asking
    #[arg(short, long)]
    pub yes: bool,
}

impl Confirmation {
    /// Goes on only when `--yes` was given or a person answers yes. `what` is what would be done, with its count:
    /// "discard 3 dead letters of email".
    ///
    /// # Errors
    /// A [`UsageError`] when nobody can be asked; a plain one when the answer is no.
    pub fn ask(self, what: &str) -> anyhow::Result<()> {
        let stdin = io::stdin();
        let terminal = stdin.is_terminal() && io::stderr().is_terminal();
        self.ask_on(what, terminal.then(|| stdin.lock()), &mut io::stderr())
    }

    fn ask_on(self, what: &str, terminal: Option<impl BufRead>, question: &mut impl Write) -> anyhow::Result<()> {
        if self.yes {
            return Ok(());
        }
        let Some(mut terminal) = terminal else {
            bail!(UsageError(format!("refuse to {what} without asking, and there is no terminal: add --yes")));
        };
        write!(question, "{what}? [y/N] ").and_then(|()| question.flush()).context("ask on the terminal")?;
        let mut answer = String::new();
        terminal.read_line(&mut answer).context("read the answer")?;
        if matches!(answer.trim().to_lowercase().as_str(), "y" | "yes") {
            return Ok(());
        }
        bail!("did not {what}: the answer was no");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(yes: bool, answer: Option<&str>) -> anyhow::Result<()> {
        Confirmation { yes }.ask_on("discard 3 dead letters", answer.map(str::as_bytes), &mut Vec::new())
    }

    #[test]
    fn only_a_yes_goes_on() {
        assert!(ask(true, None).is_ok());
        assert!(ask(false, Some("y\n")).is_ok() && ask(false, Some("YES\n")).is_ok());
        for answer in ["n\n", "\n", "", "yikes\n"] {
            let error = ask(false, Some(answer)).unwrap_err();
            assert!(!error.is::<UsageError>(), "{error}");
        }
    }

    #[test]
    fn nobody_to_ask_is_wrong_usage() {
        let error = ask(false, None).unwrap_err();
        assert!(error.is::<UsageError>() && error.to_string().contains("--yes"), "{error}");
    }
}
