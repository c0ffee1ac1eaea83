//! What a failed call is called in wasi:http. Texts of the other side are left out: they may quote what was sent.

use std::{error::Error as _, io};

use tokio_rustls::rustls;
use wasmtime_wasi_http::{Error, p2::bindings::http::types::ErrorCode};

/// Before the response's head was there.
pub fn in_head(error: &hyper::Error) -> Error {
    // The guest's own body ended the request.
    if let Some(Error::HttpRequestBodySize(size)) = error.source().and_then(|cause| cause.downcast_ref::<Error>()) {
        return Error::HttpRequestBodySize(*size);
    }
    if error.is_incomplete_message() { Error::ConnectionTerminated } else { named(error) }
}

/// While the response's body was read.
pub fn in_body(error: &hyper::Error) -> Error {
    if error.is_incomplete_message() || error.is_closed() { Error::HttpResponseIncomplete } else { named(error) }
}

/// What the guest is told of an error that ended a body.
pub fn code_in_body(error: &Error) -> ErrorCode {
    match error {
        Error::HttpResponseBodySize(size) => ErrorCode::HttpResponseBodySize(*size),
        Error::HttpResponseHeaderSectionSize(size) => ErrorCode::HttpResponseHeaderSectionSize(*size),
        Error::HttpResponseIncomplete => ErrorCode::HttpResponseIncomplete,
        Error::HttpResponseTimeout => ErrorCode::HttpResponseTimeout,
        Error::ConnectionReadTimeout => ErrorCode::ConnectionReadTimeout,
        Error::ConnectionTerminated => ErrorCode::ConnectionTerminated,
        _ => ErrorCode::HttpProtocolError,
    }
}

fn named(error: &hyper::Error) -> Error {
    let by_the_network = error.source().is_some_and(|cause| cause.is::<io::Error>());
    if error.is_parse_too_large() {
        Error::HttpResponseHeaderSectionSize(None)
    } else if error.is_timeout() {
        Error::HttpResponseTimeout
    } else if by_the_network || error.is_closed() || error.is_canceled() || error.is_body_write_aborted() {
        Error::ConnectionTerminated
    } else {
        Error::HttpProtocolError
    }
}

/// No address of the host took the connection.
pub fn connecting(error: &io::Error) -> Error {
    match error.kind() {
        io::ErrorKind::ConnectionRefused => Error::ConnectionRefused,
        io::ErrorKind::TimedOut => Error::ConnectionTimeout,
        io::ErrorKind::NetworkUnreachable | io::ErrorKind::HostUnreachable => Error::DestinationIpUnroutable,
        _ => Error::DestinationUnavailable,
    }
}

/// The connection was there, but no TLS on it.
pub fn securing(error: &io::Error) -> Error {
    match error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>()) {
        Some(rustls::Error::InvalidCertificate(_)) => Error::TlsCertificateError,
        Some(rustls::Error::AlertReceived(alert)) => Error::TlsAlertReceived {
            alert_id: Some(u8::from(*alert)),
            alert_message: alert.as_str().map(str::to_owned),
        },
        Some(_) => Error::TlsProtocolError,
        None => Error::ConnectionTerminated,
    }
}
