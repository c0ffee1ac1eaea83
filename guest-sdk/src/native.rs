//! Where effects go when a handler runs natively, in a unit test: into a capture of the running thread.

use std::cell::RefCell;

use crate::{
    Level, NewMessage, ProduceError,
    sql::{Rows, SqlError, Value},
    testing::{Answer, Logged, Produced, SqlStub, Statement},
};

thread_local! {
    /// What the delivery that this thread is in has done so far; `None` outside of `testing::deliver`.
    static CAPTURE: RefCell<Option<Capture>> = const { RefCell::new(None) };
}

/// What a delivery did, and what it is refused.
#[derive(Default)]
pub(crate) struct Capture {
    pub(crate) refused: Vec<ProduceError>,
    pub(crate) stub: Option<SqlStub>,
    pub(crate) statements: Vec<Statement>,
    pub(crate) produced: Vec<Produced>,
    pub(crate) logged: Vec<Logged>,
}

/// Runs `f` while effects are captured, and returns what was.
pub(crate) fn capture<R>(refused: Vec<ProduceError>, stub: Option<SqlStub>, f: impl FnOnce() -> R) -> (R, Capture) {
    CAPTURE.set(Some(Capture { refused, stub, ..Capture::default() }));
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

pub(crate) fn query(statement: &str, params: Vec<Value>) -> Result<Rows, SqlError> {
    match answer(statement, params)? {
        Answer::Rows(rows) => Ok(rows),
        Answer::Count(_) => panic!("the stub answered a count to `query`: {statement}"),
    }
}

pub(crate) fn execute(statement: &str, params: Vec<Value>) -> Result<u64, SqlError> {
    match answer(statement, params)? {
        Answer::Count(count) => Ok(count),
        Answer::Rows(_) => panic!("the stub answered rows to `execute`: {statement}"),
    }
}

/// What the test's stub says. Without one, as on a host without a grant, SQL is denied.
fn answer(statement: &str, params: Vec<Value>) -> Result<Answer, SqlError> {
    let stub = CAPTURE.with_borrow_mut(|capture| {
        let capture = capture.as_mut()?;
        let stub = capture.stub.clone()?;
        capture.statements.push(Statement { text: statement.to_owned(), params: params.clone() });
        Some(stub)
    });
    match stub {
        Some(stub) => stub.answer(statement, &params),
        None => Err(SqlError::Denied),
    }
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
