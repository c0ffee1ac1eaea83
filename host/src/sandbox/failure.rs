//! What became of a guest that did not answer: which class of failure it is, and the text that is stored with it.

use std::io;

use wasmtime::{Error, PoolConcurrencyLimitError, Trap, WasmBacktrace};
use wasmtime_wasi::I32Exit;

use super::{
    delivery::{Delivery, Stopped},
    output::bounded,
};
use crate::handler::{ERROR_BYTES_MAX, Failure, FailureClass, Outcome};

/// Names the outcome of an error from wasmtime. Guest's fault: a failure. Ours, for want of resources: a hand-back.
pub fn outcome(error: &Error, delivery: &Delivery) -> Outcome {
    match delivery.stopped() {
        Some(Stopped::Cut) => return Outcome::HandBack,
        Some(Stopped::Timeout) => return failed(FailureClass::Timeout, &timeout_text(error), delivery),
        None => {}
    }
    if error.is::<PoolConcurrencyLimitError>() || error.is::<io::Error>() {
        tracing::warn!("failed to start a handler, its message is handed back: {error:#}");
        return Outcome::HandBack;
    }
    let (class, cause) = classify(error, delivery);
    failed(class, &with_backtrace(&cause, error), delivery)
}

/// A guest that was dropped while it waited, past its deadline.
pub fn timed_out_waiting(delivery: &Delivery) -> Outcome {
    failed(FailureClass::Timeout, "no answer within the timeout; it was waiting in a call of the host", delivery)
}

/// Our own code panicked while it served this delivery.
pub fn host_panicked(text: &str, delivery: &Delivery) -> Outcome {
    tracing::error!(panic = text, "the host panicked while it served a message");
    failed(FailureClass::Host, &format!("the host panicked: {text}"), delivery)
}

fn timeout_text(error: &Error) -> String {
    with_backtrace("no answer within the timeout; it was interrupted while it computed", error)
}

fn failed(class: FailureClass, text: &str, delivery: &Delivery) -> Outcome {
    let tail = delivery.output().tail();
    let panic = panic_line(&tail).filter(|_| class == FailureClass::Panic).map(|line| format!("{line}\n"));
    let text = format!("{}{text}", panic.unwrap_or_default());
    let error = if tail.is_empty() { text } else { format!("{text}\nstderr:\n{tail}") };
    Outcome::Failed(Failure { class, error: clean(&error) })
}

/// It stands in the tail as well, which has room for the rest.
const PANIC_BYTES_MAX: usize = 500;

/// What a panic of Rust said, in one line, so that it is the first of the error: `panicked at src/lib.rs:7:5: no such unit`.
fn panic_line(stderr: &str) -> Option<String> {
    let lines: Vec<&str> = stderr.lines().collect();
    // The last one: what was written before may speak of panics, too.
    let at = lines.iter().rposition(|line| line.contains("panicked at "))?;
    let place = lines[at].get(lines[at].find("panicked at ")?..)?.trim_end_matches(':');
    let said = lines.get(at + 1).filter(|said| !said.is_empty());
    let line = said.map_or_else(|| place.to_owned(), |said| format!("{place}: {said}"));
    Some(bounded(&line, PANIC_BYTES_MAX).to_owned())
}

/// Fit to be stored: Postgres takes no NUL, and the length is bounded.
pub fn clean(text: &str) -> String {
    // Bounded before as well as after: a replacement is longer than what it replaces.
    bounded(&bounded(text, ERROR_BYTES_MAX).replace('\0', "\u{fffd}"), ERROR_BYTES_MAX).to_owned()
}

fn classify(error: &Error, delivery: &Delivery) -> (FailureClass, String) {
    if let Some(I32Exit(code)) = error.downcast_ref::<I32Exit>() {
        // wasi 0.2 passes on only whether the code was 0.
        let how = if *code == 0 { "" } else { " with a failure" };
        return (FailureClass::Failed, format!("the handler exited{how} instead of answering"));
    }
    let Some(trap) = error.downcast_ref::<Trap>() else {
        let cause = error.root_cause().to_string();
        // A refusal during the instantiation is an error and not a trap.
        return if delivery.growth_was_refused() {
            (FailureClass::MemoryLimit, format!("memory limit: {cause}"))
        } else {
            (FailureClass::Failed, cause)
        };
    };
    let class = match trap {
        // A guest that cannot get memory ends like one that panics; what was refused before tells them apart.
        Trap::UnreachableCodeReached if delivery.growth_was_refused() => {
            return (FailureClass::MemoryLimit, "memory limit: the group's `memory` is used up".into());
        }
        Trap::StackOverflow => FailureClass::StackOverflow,
        Trap::MemoryOutOfBounds
        | Trap::TableOutOfBounds
        | Trap::ArrayOutOfBounds
        | Trap::StringOutOfBounds
        | Trap::ListOutOfBounds => FailureClass::OutOfBounds,
        Trap::OutOfFuel => FailureClass::CpuLimit,
        Trap::Interrupt => FailureClass::Timeout,
        // A poisoned store was used again: that is never the guest's doing.
        Trap::CannotEnterComponent => FailureClass::Host,
        _ => FailureClass::Panic,
    };
    (class, trap.to_string())
}

/// The cause first, since a long backtrace may be cut off. Function names are demangled by wasmtime.
fn with_backtrace(cause: &str, error: &Error) -> String {
    match error.downcast_ref::<WasmBacktrace>() {
        Some(backtrace) if !backtrace.frames().is_empty() => {
            let frames = backtrace.to_string().replace("<unknown>!", "");
            format!("{cause}\n{}", without_crate_hashes(frames.trim_end()))
        }
        _ => cause.to_owned(),
    }
}

/// `std[3aa8d6803719fbb8]::process::abort` is `std::process::abort` to people.
fn without_crate_hashes(text: &str) -> String {
    let mut parts = text.split('[');
    let mut plain = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        match part.split_once(']') {
            Some((hash, rest)) if hash.len() >= 8 && hash.bytes().all(|byte| byte.is_ascii_hexdigit()) => plain += rest,
            _ => {
                plain.push('[');
                plain += part;
            }
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crate_hashes_are_left_out_of_function_names() {
        let text = "12: flaky[55463163c104bf97]::act::<[u8; 4]>\n13: <a[0123456789abcdef]::B>";
        assert_eq!(without_crate_hashes(text), "12: flaky::act::<[u8; 4]>\n13: <a::B>");
    }

    #[test]
    fn a_stored_error_has_no_nul_and_is_bounded_in_bytes() {
        assert_eq!(clean("a\0b"), "a\u{fffd}b");
        let cleaned = clean(&"\0é".repeat(ERROR_BYTES_MAX));
        assert!(cleaned.len() <= ERROR_BYTES_MAX, "{}", cleaned.len());
        assert!(cleaned.len() > ERROR_BYTES_MAX - 8, "{}", cleaned.len());
    }
}
