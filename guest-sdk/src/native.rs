//! Where effects go when a handler runs natively, in a unit test: into a capture of the running thread.

use std::cell::RefCell;

use crate::{
    Level, NewMessage, ProduceError,
    testing::{Logged, Produced},
};

thread_local! {
    /// What the delivery that this thread is in has done so far; `None` outside of `testing::deliver`.
    static CAPTURE: RefCell<Option<Capture>> = const { RefCell::new(None) };
}

/// What a delivery did, and what it is refused.
#[derive(Default)]
pub(crate) struct Capture {
    pub(crate) refused: Vec<ProduceError>,
    pub(crate) produced: Vec<Produced>,
    pub(crate) logged: Vec<Logged>,
}

/// Runs `f` while effects are captured, and returns what was.
pub(crate) fn capture<R>(refused: Vec<ProduceError>, f: impl FnOnce() -> R) -> (R, Capture) {
    CAPTURE.set(Some(Capture { refused, ..Capture::default() }));
    let answer = f();
    let capture = CAPTURE.take().expect("only this function takes it, and deliveries do not nest");
    (answer, capture)
}

pub(crate) fn produce(to: &str, message: NewMessage) -> Result<(), ProduceError> {
    CAPTURE.with_borrow_mut(|capture| {
        let Some(capture) = capture else {
            let reason = "there is no delivery: call the handler through millstream_guest::testing::deliver".to_owned();
            return Err(ProduceError::Invalid { stream: to.to_owned(), reason });
        };
        if let Some(refusal) = capture.refused.iter().find(|refusal| refusal.stream() == to) {
            return Err(refusal.clone());
        }
        capture.produced.push(Produced { to: to.to_owned(), message });
        Ok(())
    })
}

/// Shown as well as captured: cargo prints it when the test fails.
pub(crate) fn log(level: Level, context: &str, text: &str) {
    eprintln!("{level:?} {context}: {text}");
    CAPTURE.with_borrow_mut(|capture| {
        if let Some(capture) = capture {
            capture.logged.push(Logged { level, context: context.to_owned(), text: text.to_owned() });
        }
    });
}
