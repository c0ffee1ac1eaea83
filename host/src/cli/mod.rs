//! The command line: one file per verb. Reads flags, prints answers; what it prints comes from the other parts.
//!
//! A new verb is a file with its flags (a clap `Args`) and `run`, and a line in [`Verb`] and [`run`].

mod global;

mod open;

mod with_database;

mod up;

mod bench;

mod apply;

mod status;

mod groups;

mod why;

mod dead;

mod hot_keys;

mod key;

mod keys;

mod pause;

mod seek;

mod seek_key;

mod forget;

mod produce;

mod tail;

mod doctor;

mod check;

mod new;

mod version;

mod completions;

mod ndjson;

pub mod output;

pub mod human;

mod progress;

mod confirm;

mod logging;

use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};

pub use self::{
    confirm::Confirmation,
    global::{Global, LogFormat},
    ndjson::{LINE_BYTES_MAX, Line, LineError, parse_line},
    output::{Format, Output},
    progress::progress,
};
use crate::{config::ConfigErrors, database::told};

/// Runs message consumers as WebAssembly components over ordinary Postgres.
#[derive(Debug, Parser)]
#[command(name = "millstream", version, max_term_width = 100, arg_required_else_help = true)]
pub struct Arguments {
    #[command(flatten)]
    pub global: Global,
    #[command(subcommand)]
    pub verb: Verb,
}

#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Run the host: claims messages and runs handlers until it is stopped
    Up(up::Up),
    /// Declare what streams.toml says, without running anything
    Apply(apply::Apply),
    /// Tell what `apply` would change; changes nothing
    Plan,
    /// Tell how hosts, streams and groups stand
    Status,
    /// Tell how far every group is
    Groups(groups::Groups),
    /// Produce a message, or many from NDJSON
    Produce(produce::Produce),
    /// Print what is in a stream, without taking anything from it
    Tail(tail::Tail),
    /// Stop a group from claiming, on every host and over restarts
    Pause(pause::Pause),
    /// Let a paused group go on
    Resume(pause::Resume),
    /// Send a group back or forward in its stream; what it runs is cut
    Seek(seek::Seek),
    /// Forget a group that streams.toml no longer names: its position, its dead letters, all that it holds
    Forget(forget::Forget),
    /// Tell what one message waits for in a group, or what became of it
    Why(why::Why),
    /// Look at dead letters, deliver them again, forget them
    Dead(dead::Dead),
    /// Tell which keys of a group are leased, wait or are blocked
    Keys(keys::Keys),
    /// Look at one key, hold it, or let it go on
    Key(key::Key),
    /// Tell every mistake in streams.toml; needs no database
    Check(check::Check),
    /// Name what is missing on this machine, and what mends it
    Doctor,
    /// Start a handler: writes a project that builds
    New(new::New),
    /// Measure: each figure with its ratio to a bare Postgres in the same run
    Bench(bench::Bench),
    /// Print the versions of this program and of what it is built on
    Version,
    /// Print the completions of a shell
    Completions(completions::Completions),
}

/// Somebody asked for something that cannot be asked for like that: exit 2, as clap does.
#[derive(Debug)]
pub struct UsageError(pub String);

impl std::fmt::Display for UsageError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for UsageError {}

/// The work is done and told, and its answer is a failure: exit 1 without another word.
#[derive(Debug)]
pub struct Told;

impl std::fmt::Display for Told {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("the answer is printed above")
    }
}

impl std::error::Error for Told {}

/// Runs the program with the arguments of the process. Exits 0 when all is well, 1 on failure, 2 on wrong usage.
pub fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let done = logging::start(&arguments.global).and_then(|()| {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
        let done = runtime.block_on(run(arguments));
        // Everything is done. A thread that still waits for a file system that does not answer must not keep the process.
        runtime.shutdown_background();
        done
    });
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => report(&error),
    }
}

async fn run(arguments: Arguments) -> anyhow::Result<()> {
    let Arguments { global, verb } = arguments;
    match verb {
        Verb::Up(up) => up.run(&global).await,
        Verb::Apply(apply) => apply.run(&global).await,
        Verb::Plan => apply::plan(&global).await,
        Verb::Status => status::run(&global).await,
        Verb::Groups(groups) => groups.run(&global).await,
        Verb::Produce(produce) => produce.run(&global).await,
        Verb::Tail(tail) => tail.run(&global).await,
        Verb::Pause(pause) => pause.run(&global).await,
        Verb::Resume(resume) => resume.run(&global).await,
        Verb::Seek(seek) => seek.run(&global).await,
        Verb::Forget(forget) => forget.run(&global).await,
        Verb::Why(why) => why.run(&global).await,
        Verb::Dead(dead) => dead.run(&global).await,
        Verb::Keys(keys) => keys.run(&global).await,
        Verb::Key(key) => key.run(&global).await,
        Verb::Check(check) => check.run(&global),
        Verb::Doctor => doctor::run(&global).await,
        Verb::New(new) => new.run(&global),
        Verb::Bench(bench) => bench.run(&global).await,
        Verb::Version => version::run(&global),
        Verb::Completions(completions) => completions.run(&mut Arguments::command()),
    }
}

fn report(error: &anyhow::Error) -> ExitCode {
    const FAILURE: u8 = 1;
    const USAGE: u8 = 2;
    if output::is_closed_pipe(error) {
        // `millstream groups | head -1` has got what it wanted.
        return ExitCode::SUCCESS;
    }
    if error.is::<Told>() {
        return ExitCode::from(FAILURE);
    }
    if let Some(errors) = error.downcast_ref::<ConfigErrors>() {
        output::complain(&errors.to_string());
    } else {
        output::complain(&format!("error: {}", told(error.as_ref())));
    }
    ExitCode::from(if error.is::<UsageError>() { USAGE } else { FAILURE })
}
