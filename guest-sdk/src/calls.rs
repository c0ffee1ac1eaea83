//! HTTP calls over the host's wasi:http: one request, waited for until all of its answer is there.

use crate::{
    component::bindings::wasi::{
        http::{
            outgoing_handler,
            types::{self as wasi, ErrorCode, Fields, OutgoingBody, OutgoingRequest, RequestOptions},
        },
        io::streams::{OutputStream, StreamError},
    },
    http::{Error, Request, Response},
    url::Target,
};

/// How much of a body is taken at a time.
const READ_BYTES_MAX: u64 = 64 * 1024;

pub(crate) fn send(request: Request) -> Result<Response, Error> {
    let target = Target::parse(&request.url)?;
    let to = target.to();
    let failed = |code: ErrorCode| named(&to, code);
    let options = request.timeout.map(options);
    let (outgoing, body) = outgoing(&request, &target)?;
    let future = outgoing_handler::handle(outgoing, options).map_err(failed)?;
    if let Some(body) = body {
        write(body, &request.body);
    }
    // The guest sleeps here; the host goes on with other messages.
    future.subscribe().block();
    let answered = future.get().expect("it is ready").expect("it is asked once");
    read(answered.map_err(failed)?).map_err(failed)
}

fn outgoing(request: &Request, target: &Target<'_>) -> Result<(OutgoingRequest, Option<OutgoingBody>), Error> {
    let invalid = |reason: &str| Error::Invalid { reason: reason.to_owned() };
    let mut headers: Vec<_> =
        request.headers.iter().map(|(name, value)| (name.clone(), value.clone().into_bytes())).collect();
    headers.retain(|(name, _)| !name.eq_ignore_ascii_case("content-length"));
    let method = method(&request.method);
    // Servers want to know that a POST brings nothing, and do not expect to hear it of a GET.
    let says_length = !request.body.is_empty() || matches!(method, wasi::Method::Post | wasi::Method::Put);
    if says_length {
        headers.push(("content-length".to_owned(), request.body.len().to_string().into_bytes()));
    }
    let headers = Fields::from_list(&headers)
        .map_err(|_| invalid("a header's name or value is not allowed in HTTP, or the host sets it itself"))?;
    let outgoing = OutgoingRequest::new(headers);
    outgoing.set_method(&method).map_err(|()| invalid("its method is no word of HTTP"))?;
    let scheme = if target.is_https { wasi::Scheme::Https } else { wasi::Scheme::Http };
    outgoing.set_scheme(Some(&scheme)).map_err(|()| invalid("its URL's scheme is refused"))?;
    outgoing.set_authority(Some(target.authority)).map_err(|()| invalid("its URL's host or port is not valid"))?;
    outgoing
        .set_path_with_query(Some(&target.path))
        .map_err(|()| invalid("its URL's path holds characters that must be percent-encoded"))?;
    let body = if request.body.is_empty() { None } else { Some(outgoing.body().expect("it is taken once")) };
    Ok((outgoing, body))
}

fn method(name: &str) -> wasi::Method {
    match name {
        "GET" => wasi::Method::Get,
        "HEAD" => wasi::Method::Head,
        "POST" => wasi::Method::Post,
        "PUT" => wasi::Method::Put,
        "DELETE" => wasi::Method::Delete,
        "OPTIONS" => wasi::Method::Options,
        "PATCH" => wasi::Method::Patch,
        other => wasi::Method::Other(other.to_owned()),
    }
}

fn options(timeout: std::time::Duration) -> RequestOptions {
    let nanoseconds = Some(u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX));
    let options = RequestOptions::new();
    // A host that knows no timeouts waits until the deadline.
    let _ = options.set_connect_timeout(nanoseconds);
    let _ = options.set_first_byte_timeout(nanoseconds);
    let _ = options.set_between_bytes_timeout(nanoseconds);
    options
}

/// Writes the body as fast as it is taken. A body that is not taken to its end has failed, or was answered before: the
/// answer says which.
fn write(body: OutgoingBody, bytes: &[u8]) {
    let stream = body.write().expect("it is taken once");
    let written = write_all(&stream, bytes);
    drop(stream);
    if written.is_ok() {
        let _ = OutgoingBody::finish(body, None);
    }
}

fn write_all(stream: &OutputStream, mut bytes: &[u8]) -> Result<(), StreamError> {
    while !bytes.is_empty() {
        match usize::try_from(stream.check_write()?).unwrap_or(usize::MAX).min(bytes.len()) {
            0 => stream.subscribe().block(),
            room => {
                stream.write(&bytes[..room])?;
                bytes = &bytes[room..];
            }
        }
    }
    Ok(())
}

fn read(answer: wasi::IncomingResponse) -> Result<Response, ErrorCode> {
    let (status, headers) = (answer.status(), answer.headers().entries());
    let incoming = answer.consume().expect("it is taken once");
    let stream = incoming.stream().expect("it is taken once");
    let mut body = Vec::new();
    loop {
        match stream.blocking_read(READ_BYTES_MAX) {
            Ok(bytes) if body.is_empty() => body = bytes,
            Ok(bytes) => body.extend_from_slice(&bytes),
            Err(StreamError::Closed) => return Ok(Response { status, headers, body }),
            Err(StreamError::LastOperationFailed(error)) => {
                return Err(wasi::http_error_code(&error).unwrap_or(ErrorCode::HttpResponseIncomplete));
            }
        }
    }
}

fn named(to: &str, code: ErrorCode) -> Error {
    let to = to.to_owned();
    let connect = |to, reason: &str| Error::Connect { to, reason: reason.to_owned() };
    let too_large = |to, reason: String| Error::TooLarge { to, reason };
    let limit = |bytes: Option<u64>| bytes.map_or_else(String::new, |bytes| format!(" of {bytes} bytes"));
    match code {
        ErrorCode::HttpRequestDenied | ErrorCode::DestinationIpProhibited => Error::Denied { to },
        ErrorCode::ConnectionTimeout
        | ErrorCode::ConnectionReadTimeout
        | ErrorCode::ConnectionWriteTimeout
        | ErrorCode::HttpResponseTimeout
        | ErrorCode::DnsTimeout => Error::Timeout { to },
        ErrorCode::ConnectionLimitReached => Error::Busy { to },
        ErrorCode::DnsError(_) | ErrorCode::DestinationNotFound => connect(to, "the name has no address"),
        ErrorCode::ConnectionRefused => connect(to, "the connection was refused"),
        ErrorCode::DestinationUnavailable | ErrorCode::DestinationIpUnroutable => {
            connect(to, "the address cannot be reached")
        }
        ErrorCode::ConnectionTerminated | ErrorCode::HttpResponseIncomplete => connect(to, "the connection broke off"),
        ErrorCode::TlsCertificateError => Error::Tls { to, reason: "its certificate is not trusted".to_owned() },
        ErrorCode::TlsProtocolError => Error::Tls { to, reason: "it does not speak TLS that we know".to_owned() },
        ErrorCode::TlsAlertReceived(alert) => {
            let alert = alert.alert_message.unwrap_or_else(|| "no reason".to_owned());
            Error::Tls { to, reason: format!("it refuses the TLS connection ({alert})") }
        }
        ErrorCode::HttpRequestBodySize(bytes) => {
            too_large(to, format!("the request's body is over the limit{} (limits.http_request_bytes)", limit(bytes)))
        }
        ErrorCode::HttpResponseBodySize(bytes) => {
            too_large(to, format!("the answer's body is over the limit{} (limits.http_response_bytes)", limit(bytes)))
        }
        ErrorCode::HttpResponseHeaderSectionSize(_) | ErrorCode::HttpResponseHeaderSize(_) => {
            too_large(to, "the answer's head is too large".to_owned())
        }
        ErrorCode::HttpRequestUriInvalid => Error::Invalid { reason: "its URL is not valid".to_owned() },
        ErrorCode::HttpRequestMethodInvalid => Error::Invalid { reason: "its method is not allowed".to_owned() },
        _ => Error::Protocol { to, reason: "the answer is not valid HTTP".to_owned() },
    }
}
