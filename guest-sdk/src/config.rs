//! What streams.toml gives a handler: its group's `config` and `secrets`.

use crate::boundary;

/// The value of a setting: of `config` or of `secrets`, whichever has the name. `None` where neither has.
///
/// It is the same on every target, where environment variables need WASI. Never log a secret.
///
/// ```
/// use millstream_guest::{Message, Outcome, config, testing::{TestMessage, deliver}};
///
/// fn handle(_: Message) -> Outcome {
///     match config::get("API_KEY") {
///         Some(_) => Outcome::Done,
///         None => Outcome::retry("groups.email.secrets has no API_KEY"),
///     }
/// }
/// assert_eq!(deliver(handle, TestMessage::text("{}").config("API_KEY", "k-1")).outcome, Outcome::Done);
/// assert!(matches!(deliver(handle, TestMessage::text("{}")).outcome, Outcome::Retry { .. }));
/// ```
///
/// # Panics
/// When the host fails to look it up, which a Millstream host never does.
pub fn get(name: &str) -> Option<String> {
    boundary::config(name)
}
