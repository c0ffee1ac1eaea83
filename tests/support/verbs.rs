//! The real program on a real database: verbs are run, and what they answer is looked at.

use std::path::PathBuf;

use super::{Program, engine::Project};

/// A declared project and the program that works on it.
pub struct Verbs {
    pub project: Project,
    pub program: Program,
    url: String,
}

/// What one run answered.
#[derive(Debug)]
pub struct Answer {
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
}

impl Verbs {
    pub async fn declare(streams_toml: &str) -> Self {
        let project = Project::declare(streams_toml).await;
        let url = project.database.url().await;
        Self { project, program: Program::new(streams_toml), url }
    }

    /// Runs a verb to its end, whatever comes of it.
    pub fn run(&self, arguments: &[&str]) -> Answer {
        self.run_with_input(arguments, b"")
    }

    /// The same with a standard input.
    pub fn run_with_input(&self, arguments: &[&str], input: &[u8]) -> Answer {
        let arguments: Vec<&str> = ["--database-url", &self.url].into_iter().chain(arguments.iter().copied()).collect();
        let (status, stdout, stderr) = self.program.run_with_input(&arguments, input);
        Answer { code: status.code().expect("it was not killed"), stdout, stderr }
    }

    /// What a verb that succeeds prints for people.
    pub fn text(&self, arguments: &[&str]) -> String {
        let answer = self.run(arguments);
        assert_eq!(answer.code, 0, "{arguments:?}: {answer:?}");
        answer.stdout
    }

    /// What a verb that succeeds answers machines.
    pub fn json(&self, arguments: &[&str]) -> serde_json::Value {
        let arguments: Vec<&str> = ["--output", "json"].into_iter().chain(arguments.iter().copied()).collect();
        serde_json::from_str(&self.text(&arguments)).expect("the answer is JSON")
    }

    /// What a verb that fails says: it must exit with `code`, print nothing else, and say every part.
    pub fn refused(&self, arguments: &[&str], code: i32, parts: &[&str]) {
        let answer = self.run(arguments);
        assert_eq!((answer.code, answer.stdout.as_str()), (code, ""), "{arguments:?}: {answer:?}");
        for part in parts {
            assert!(answer.stderr.contains(part), "{arguments:?} does not say {part:?}: {}", answer.stderr);
        }
    }

    /// Writes a file into the project's folder.
    pub fn file(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.program.folder().join(name);
        std::fs::write(&path, content).expect("write a file of the project");
        path
    }
}
