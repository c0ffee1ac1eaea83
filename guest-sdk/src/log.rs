//! Log lines that reach the host on every target.

use std::fmt;

use crate::boundary;

/// How much a log line matters.
///
/// ```
/// use millstream_guest::Level;
/// assert!(Level::Error > Level::Info);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Level {
    /// Every step.
    Trace,
    /// What helps to find a fault.
    Debug,
    /// What happened.
    Info,
    /// Odd, but it went on.
    Warn,
    /// A person should look.
    Error,
    /// It cannot go on.
    Critical,
}

/// Writes one log line. The macros [`info!`](crate::info) and the others are shorter.
///
/// The host adds the group, the message's id, the attempt and the component's digest. It cuts what goes over the group's
/// log limit. Never log a payload or a secret: log lines outlive them.
///
/// ```
/// use millstream_guest::{Level, log};
/// log(Level::Info, "orders", format_args!("{} orders", 2));
/// ```
pub fn log(level: Level, context: &str, message: fmt::Arguments<'_>) {
    match message.as_str() {
        Some(text) => boundary::log(level, context, text),
        None => boundary::log(level, context, &message.to_string()),
    }
}

/// Logs a line at level trace.
///
/// ```
/// millstream_guest::trace!("read {} bytes", 12);
/// ```
#[macro_export]
macro_rules! trace {
    ($($argument:tt)+) => { $crate::log($crate::Level::Trace, module_path!(), format_args!($($argument)+)) };
}

/// Logs a line at level debug.
///
/// ```
/// millstream_guest::debug!("parsed {} items", 3);
/// ```
#[macro_export]
macro_rules! debug {
    ($($argument:tt)+) => { $crate::log($crate::Level::Debug, module_path!(), format_args!($($argument)+)) };
}

/// Logs a line at level info.
///
/// ```
/// millstream_guest::info!("sent to {} readers", 4);
/// ```
#[macro_export]
macro_rules! info {
    ($($argument:tt)+) => { $crate::log($crate::Level::Info, module_path!(), format_args!($($argument)+)) };
}

/// Logs a line at level warn.
///
/// ```
/// millstream_guest::warn!("no stock for {} items", 5);
/// ```
#[macro_export]
macro_rules! warn {
    ($($argument:tt)+) => { $crate::log($crate::Level::Warn, module_path!(), format_args!($($argument)+)) };
}

/// Logs a line at level error.
///
/// ```
/// millstream_guest::error!("the shop answered {}", 500);
/// ```
#[macro_export]
macro_rules! error {
    ($($argument:tt)+) => { $crate::log($crate::Level::Error, module_path!(), format_args!($($argument)+)) };
}
