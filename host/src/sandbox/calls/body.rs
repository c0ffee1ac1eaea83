//! Bodies with an end: so many bytes, and so long a wait for the next ones.

use std::{
    future::Future,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use tokio::time::{Instant, Sleep};
use wasmtime_wasi_http::{Error, WasiBody};

use super::failure;

/// A request's body as the guest writes it, up to a limit.
pub struct RequestBody {
    inner: WasiBody,
    bytes_max: u64,
    bytes_left: u64,
}

impl RequestBody {
    pub fn new(inner: WasiBody, bytes_max: u64) -> Self {
        Self { inner, bytes_max, bytes_left: bytes_max }
    }
}

impl Body for RequestBody {
    type Data = Bytes;
    type Error = Error;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        let polled = Pin::new(&mut self.inner).poll_frame(context);
        let this = &mut *self;
        polled.map(|frame| {
            frame.map(|frame| count(frame?, &mut this.bytes_left, || Error::HttpRequestBodySize(Some(this.bytes_max))))
        })
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

/// How long a response's body may take.
#[derive(Clone, Copy)]
pub struct Patience {
    /// The longest pause between two pieces, where the guest set one.
    pub pause_max: Option<Duration>,
    /// When all of it must be there.
    pub until: Instant,
}

/// A response's body as it arrives. hyper reads on only while the guest takes, so this holds little memory.
pub struct ResponseBody {
    inner: Incoming,
    bytes_max: u64,
    bytes_left: u64,
    patience: Patience,
    timer: Pin<Box<Sleep>>,
}

impl ResponseBody {
    pub fn new(inner: Incoming, bytes_max: u64, patience: Patience) -> Self {
        let timer = Box::pin(tokio::time::sleep_until(next_by(patience)));
        Self { inner, bytes_max, bytes_left: bytes_max, patience, timer }
    }
}

impl Body for ResponseBody {
    type Data = Bytes;
    type Error = Error;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        let this = &mut *self;
        match Pin::new(&mut this.inner).poll_frame(context) {
            Poll::Ready(Some(Ok(frame))) => {
                this.timer.as_mut().reset(next_by(this.patience));
                let too_large = || Error::HttpResponseBodySize(Some(this.bytes_max));
                Poll::Ready(Some(count(frame, &mut this.bytes_left, too_large)))
            }
            Poll::Ready(Some(Err(error))) => Poll::Ready(Some(Err(failure::in_body(&error)))),
            Poll::Ready(None) => Poll::Ready(None),
            Poll::Pending => this.timer.as_mut().poll(context).map(|()| Some(Err(Error::ConnectionReadTimeout))),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

fn next_by(patience: Patience) -> Instant {
    match patience.pause_max.and_then(|pause| Instant::now().checked_add(pause)) {
        Some(next) => next.min(patience.until),
        None => patience.until,
    }
}

/// Lets a frame through while there is room for it.
fn count(frame: Frame<Bytes>, bytes_left: &mut u64, too_large: impl FnOnce() -> Error) -> Result<Frame<Bytes>, Error> {
    let bytes = frame.data_ref().map_or(0, |data| data.len() as u64);
    match bytes_left.checked_sub(bytes) {
        Some(left) => {
            *bytes_left = left;
            Ok(frame)
        }
        None => Err(too_large()),
    }
}
