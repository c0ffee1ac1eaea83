//! What a message can tell this handler to do.

use std::time::Duration;

use millstream_guest::Concurrency;
use serde::Deserialize;

use crate::values::Param;

/// The payload: `{"do": "retry", "times": 2}`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Command {
    #[serde(rename = "do")]
    pub action: Action,
    /// What to do next, when the first action ended well.
    pub then: Option<Action>,
    /// Acts only while the attempt is at most this; then all is well.
    pub times: Option<u32>,
    /// How long to wait, sleep or put off; the timeout of a call.
    #[serde(default)]
    pub ms: u64,
    /// The stream to produce to.
    #[serde(default = "receipts")]
    pub to: String,
    /// How many messages or lines.
    #[serde(default = "one")]
    pub count: u32,
    /// How many bytes to print, allocate, produce or send.
    pub bytes: Option<usize>,
    /// The key of what is produced, and its mode; see the SDK's `NewMessage`.
    pub key: Option<String>,
    pub concurrency: Option<Mode>,
    pub compaction: Option<bool>,
    pub rank: Option<i64>,
    /// What to exit with.
    #[serde(default = "three")]
    pub code: i32,
    /// What to call.
    pub url: Option<String>,
    /// What to fail with.
    pub reason: Option<String>,
    /// The statement to run.
    pub sql: Option<String>,
    /// The values of its parameters.
    #[serde(default)]
    pub params: Vec<Param>,
}

impl Command {
    pub fn wait(&self) -> Duration {
        Duration::from_millis(self.ms)
    }
}

/// As the SDK's `Concurrency`.
#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    Parallel,
    Exclusive,
    Ordered,
}

impl From<Mode> for Concurrency {
    fn from(mode: Mode) -> Self {
        match mode {
            Mode::Parallel => Self::Parallel,
            Mode::Exclusive => Self::Exclusive,
            Mode::Ordered => Self::Ordered,
        }
    }
}

/// Each is described in this example's README.
#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Action {
    Ok,
    Retry,
    RetryAfter,
    Reject,
    Later,
    Error,
    Panic,
    Spin,
    EatMemory,
    OverflowStack,
    OutOfBounds,
    Exit,
    Sleep,
    FloodStdout,
    #[serde(rename = "bad-utf8")]
    BadUtf8,
    Allocate,
    Log,
    Produce,
    Sql,
    Query,
    Report,
    Call,
}

fn receipts() -> String {
    "receipts".to_owned()
}

fn one() -> u32 {
    1
}

fn three() -> i32 {
    3
}
