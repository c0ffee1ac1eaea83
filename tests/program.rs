//! The real program, as a user starts it.

use std::time::Duration;

use rustix::process::Signal;

use crate::support::Program;

/// The real program is found, runs in its project, and is waited for.
#[tokio::test]
async fn the_real_program_runs_in_a_project_of_its_own() {
    let mut program = Program::new("");
    program.start(&["version"]);
    program.signal(Signal::CONT);
    let status = program.ended(Duration::from_secs(30)).await;
    assert!(status.success(), "{}", program.stderr());
    let (again, stdout, _) = program.run(&["version"]);
    assert!(again.success() && stdout == program.stdout());
    assert!(program.folder().join("streams.toml").exists());
}
