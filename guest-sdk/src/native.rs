//! Where effects go when a handler runs natively, in a unit test: into a capture of the running thread.

use std::{cell::RefCell, collections::BTreeMap, rc::Rc};

use crate::{
    Level, NewMessage, ProduceError,
    http::{Error, Request, Response},
    sql::{Rows, SqlError, Value},
    testing::{self, Logged, Produced, SqlStub, Statement},
    url::Target,
};

thread_local! {
    /// What the delivery that this thread is in has done so far; `None` outside of `testing::deliver`.
    static CAPTURE: RefCell<Option<Capture>> = const { RefCell::new(None) };
}

/// What a delivery finds around it.
#[derive(Clone, Default)]
pub(crate) struct Surroundings {
    pub(crate) refused: Vec<ProduceError>,
    pub(crate) config: BTreeMap<String, String>,
    pub(crate) answer: Option<Answer>,
    pub(crate) stub: Option<SqlStub>,
}

/// The other side of HTTP calls.
pub(crate) type Answer = Rc<dyn Fn(&Request) -> Result<Response, Error>>;

/// What a delivery did, and what it found.
#[derive(Default)]
pub(crate) struct Capture {
    surroundings: Surroundings,
    pub(crate) statements: Vec<Statement>,
    pub(crate) produced: Vec<Produced>,
    pub(crate) logged: Vec<Logged>,
    pub(crate) called: Vec<Request>,
}

/// Runs `f` while effects are captured, and returns what was.
pub(crate) fn capture<R>(surroundings: Surroundings, f: impl FnOnce() -> R) -> (R, Capture) {
    CAPTURE.set(Some(Capture { surroundings, ..Capture::default() }));
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
        if let Some(refusal) = capture.surroundings.refused.iter().find(|refusal| refusal.stream() == to) {
            return Err(refusal.clone());
        }
        capture.produced.push(Produced { to: to.to_owned(), message });
        Ok(())
    })
}

pub(crate) fn config(name: &str) -> Option<String> {
    CAPTURE.with_borrow(|capture| capture.as_ref()?.surroundings.config.get(name).cloned())
}

/// Denied, as by a host that grants nothing, where the test has given no answer.
pub(crate) fn send(request: Request) -> Result<Response, Error> {
    let to = Target::parse(&request.url)?.to();
    let answer = CAPTURE.with_borrow_mut(|capture| {
        let capture = capture.as_mut()?;
        capture.called.push(request.clone());
        capture.surroundings.answer.clone()
    });
    // The borrow has ended: the answer may log, or produce.
    answer.map_or(Err(Error::Denied { to }), |answer| answer(&request))
}

pub(crate) fn query(statement: &str, params: Vec<Value>) -> Result<Rows, SqlError> {
    match answer(statement, params)? {
        testing::Answer::Rows(rows) => Ok(rows),
        testing::Answer::Count(_) => panic!("the stub answered a count to `query`: {statement}"),
    }
}

pub(crate) fn execute(statement: &str, params: Vec<Value>) -> Result<u64, SqlError> {
    match answer(statement, params)? {
        testing::Answer::Count(count) => Ok(count),
        testing::Answer::Rows(_) => panic!("the stub answered rows to `execute`: {statement}"),
    }
}

/// What the test's stub says. Without one, as on a host without a grant, SQL is denied.
fn answer(statement: &str, params: Vec<Value>) -> Result<testing::Answer, SqlError> {
    let stub = CAPTURE.with_borrow_mut(|capture| {
        let capture = capture.as_mut()?;
        let stub = capture.surroundings.stub.clone()?;
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
