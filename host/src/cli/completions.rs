//! `millstream completions SHELL`: made by clap from the very flags it parses.

use clap::{Args, Command};

use super::output;

#[derive(Args, Debug)]
pub struct Completions {
    /// The shell to complete in
    pub shell: clap_complete::Shell,
}

impl Completions {
    pub(super) fn run(&self, command: &mut Command) -> anyhow::Result<()> {
        let mut script = Vec::new();
        clap_complete::generate(self.shell, command, "millstream", &mut script);
        output::print(&String::from_utf8_lossy(&script))
    }
}
