//! HTTP calls to what the group's `allow.http` in streams.toml names.
//!
//! ```
//! use millstream_guest::{Outcome, http, testing::{TestMessage, deliver}};
//!
//! fn handle(order_id: String) -> Result<Outcome, http::Error> {
//!     let body = format!("paid: {order_id}");
//!     let answer = http::post("https://mail.example/send", &[("content-type", "text/plain")], body)?;
//!     Ok(if answer.is_success() { Outcome::Done } else { Outcome::retry(format!("answered {}", answer.status)) })
//! }
//!
//! // A test says what the other side answers.
//! let message = TestMessage::text("\"o-1\"").answer_http(|request| {
//!     assert_eq!((request.method.as_str(), request.body.as_slice()), ("POST", &b"paid: o-1"[..]));
//!     Ok(http::Response::new(202))
//! });
//! assert_eq!(deliver(handle, message).outcome, Outcome::Done);
//! ```
//!
//! A call is no part of the delivery's transaction: when the delivery fails after it, or its host is lost, the message
//! comes again and with it the call. Send the other side something by which it knows a repetition, such as the
//! message's stream and id. Redirects are not followed; a 3xx is an answer like any other.

use std::{error, fmt, time::Duration};

use serde::de::DeserializeOwned;

use crate::{boundary, payload::without_content, url::Target};

/// Fetches a URL and waits for the whole answer.
///
/// # Errors
/// See [`Error`]. An answer with a status of 400 or above is no error.
///
/// ```
/// use millstream_guest::http;
///
/// // Outside of a delivery there is nobody to ask.
/// assert!(matches!(http::get("https://shop.example/stock/7", &[]), Err(http::Error::Denied { .. })));
/// ```
pub fn get(url: &str, headers: &[(&str, &str)]) -> Result<Response, Error> {
    with_headers(Request::new("GET", url), headers).send()
}

/// Sends a body to a URL and waits for the whole answer.
///
/// # Errors
/// See [`Error`]. An answer with a status of 400 or above is no error.
///
/// ```
/// use millstream_guest::http;
///
/// let headers = [("content-type", "application/json")];
/// assert!(matches!(http::post("shop.example", &headers, "{}"), Err(http::Error::Invalid { .. })));
/// ```
pub fn post(url: &str, headers: &[(&str, &str)], body: impl Into<Vec<u8>>) -> Result<Response, Error> {
    with_headers(Request::new("POST", url), headers).body(body).send()
}

fn with_headers(request: Request, headers: &[(&str, &str)]) -> Request {
    headers.iter().fold(request, |request, (name, value)| request.header(name, value))
}

/// A request to be sent.
///
/// ```
/// use millstream_guest::http::Request;
/// use std::time::Duration;
///
/// let request = Request::new("PUT", "https://shop.example/stock/7")
///     .header("authorization", "Bearer hunter2")
///     .body("12")
///     .timeout(Duration::from_secs(2));
/// assert_eq!(request.body, b"12");
/// ```
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Request {
    /// Such as `GET`.
    pub method: String,
    /// `http://` or `https://`, a host, perhaps a port, and the rest. No user and no password.
    pub url: String,
    /// Names and values. The host sets `host` and `content-length` itself.
    pub headers: Vec<(String, String)>,
    /// What is sent; nothing when it is empty.
    pub body: Vec<u8>,
    /// The longest wait: for the connection, then for the answer to begin, then for each next piece of it. `None`: 10 s
    /// for the connection, and for the rest until shortly before the delivery's own deadline.
    pub timeout: Option<Duration>,
}

impl fmt::Debug for Request {
    /// Never prints headers, body or what follows the host in the URL: they may hold payloads and secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let to = Target::parse(&self.url).map_or_else(|_| "?".to_owned(), |target| target.authority.to_owned());
        f.debug_struct("Request").field("method", &self.method).field("to", &to).finish_non_exhaustive()
    }
}

impl Request {
    /// A request without headers and body.
    ///
    /// ```
    /// use millstream_guest::http::Request;
    /// assert_eq!(Request::new("DELETE", "https://shop.example/stock/7").method, "DELETE");
    /// ```
    pub fn new(method: &str, url: &str) -> Self {
        Self { method: method.to_owned(), url: url.to_owned(), headers: Vec::new(), body: Vec::new(), timeout: None }
    }

    /// Adds a header.
    ///
    /// ```
    /// use millstream_guest::http::Request;
    /// let request = Request::new("GET", "https://shop.example/").header("accept", "text/plain");
    /// assert_eq!(request.headers, [("accept".to_owned(), "text/plain".to_owned())]);
    /// ```
    #[must_use]
    pub fn header(mut self, name: &str, value: &str) -> Self {
        self.headers.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Sets the body.
    ///
    /// ```
    /// use millstream_guest::http::Request;
    /// assert_eq!(Request::new("PUT", "https://shop.example/").body("12").body, b"12");
    /// ```
    #[must_use]
    pub fn body(mut self, body: impl Into<Vec<u8>>) -> Self {
        self.body = body.into();
        self
    }

    /// Sets the longest wait, see the field.
    ///
    /// ```
    /// use millstream_guest::http::Request;
    /// use std::time::Duration;
    /// let second = Duration::from_secs(1);
    /// assert_eq!(Request::new("GET", "https://shop.example/").timeout(second).timeout, Some(second));
    /// ```
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// Sends it and waits for the whole answer.
    ///
    /// # Errors
    /// See [`Error`]. An answer with a status of 400 or above is no error.
    ///
    /// ```
    /// use millstream_guest::http::{Error, Request};
    /// let error = Request::new("GET", "ftp://shop.example/").send().expect_err("it is not HTTP");
    /// assert_eq!(error.to_string(), "the request is not valid: its URL begins with neither http:// nor https://");
    /// ```
    pub fn send(self) -> Result<Response, Error> {
        Target::parse(&self.url)?;
        boundary::send(self)
    }
}

/// What the other side answered, whatever its status.
///
/// ```
/// use millstream_guest::http::Response;
/// let response = Response { body: b"[1, 2]".to_vec(), ..Response::new(200) };
/// assert_eq!(response.json::<Vec<u32>>().expect("it is JSON"), [1, 2]);
/// ```
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Response {
    /// Such as 200.
    pub status: u16,
    /// Names in lower case, and values.
    pub headers: Vec<(String, Vec<u8>)>,
    /// All of the body.
    pub body: Vec<u8>,
}

impl fmt::Debug for Response {
    /// Never prints headers and body: they may hold payloads and secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Response").field("status", &self.status).finish_non_exhaustive()
    }
}

impl Response {
    /// An answer without headers and body, for tests.
    ///
    /// ```
    /// use millstream_guest::http::Response;
    /// assert_eq!(Response::new(404).status, 404);
    /// ```
    pub fn new(status: u16) -> Self {
        Self { status, ..Self::default() }
    }

    /// Whether the status is one of 200 to 299.
    ///
    /// ```
    /// use millstream_guest::http::Response;
    /// assert!(Response::new(204).is_success() && !Response::new(302).is_success());
    /// ```
    pub fn is_success(&self) -> bool {
        (200..300).contains(&self.status)
    }

    /// The first header of this name, in any case, if it is text.
    ///
    /// ```
    /// use millstream_guest::http::Response;
    /// let response = Response { headers: vec![("retry-after".into(), b"7".to_vec())], ..Response::new(429) };
    /// assert_eq!(response.header("Retry-After"), Some("7"));
    /// ```
    pub fn header(&self, name: &str) -> Option<&str> {
        let (_, value) = self.headers.iter().find(|(found, _)| found.eq_ignore_ascii_case(name))?;
        str::from_utf8(value).ok()
    }

    /// The body as text.
    ///
    /// # Errors
    /// When it is not UTF-8.
    ///
    /// ```
    /// use millstream_guest::http::Response;
    /// let response = Response { body: b"paid".to_vec(), ..Response::new(200) };
    /// assert_eq!(response.text(), Ok("paid"));
    /// ```
    pub fn text(&self) -> Result<&str, std::str::Utf8Error> {
        str::from_utf8(&self.body)
    }

    /// The body read as JSON.
    ///
    /// # Errors
    /// When it is not JSON, or not of this type. Its text says what was expected and where, and nothing of the body, so it
    /// may be a reason.
    ///
    /// ```
    /// use millstream_guest::http::Response;
    /// assert!(Response::new(200).json::<u32>().is_err());
    /// ```
    pub fn json<T: DeserializeOwned>(&self) -> Result<T, serde_json::Error> {
        serde_json::from_slice(&self.body).map_err(without_content)
    }
}

/// Why there is no answer. Its text names host and port and nothing else of the request, so it may be a reason.
///
/// ```
/// use millstream_guest::http::Error;
/// let error = Error::Denied { to: "mail.example:443".into() };
/// assert!(error.to_string().contains("allow.http"));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Error {
    /// `allow.http` of the group does not name this host and port, or the name stands for an address that is not public
    /// and not named itself.
    Denied {
        /// Host and port.
        to: String,
    },
    /// It took longer than it may. The other side may have done what it was asked.
    Timeout {
        /// Host and port.
        to: String,
    },
    /// There was no connection, or it broke off. In the latter case the other side may have done what it was asked.
    Connect {
        /// Host and port.
        to: String,
        /// What failed.
        reason: String,
    },
    /// There was no secure connection: a certificate that is not valid or not trusted, or no TLS at all.
    Tls {
        /// Host and port.
        to: String,
        /// What failed.
        reason: String,
    },
    /// A body larger than the group's `limits.http_request_bytes` or `limits.http_response_bytes`, or too large a head.
    TooLarge {
        /// Host and port.
        to: String,
        /// What is too large, and what is allowed.
        reason: String,
    },
    /// More calls at a time than one delivery or the group may have.
    Busy {
        /// Host and port.
        to: String,
    },
    /// A request that cannot be sent.
    Invalid {
        /// What is wrong with it.
        reason: String,
    },
    /// An answer that is not HTTP.
    Protocol {
        /// Host and port.
        to: String,
        /// What failed.
        reason: String,
    },
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Denied { to } => write!(
                f,
                "call {to}: the group may not; name it in its `allow.http` in streams.toml (and, if its address is \
                 private, that address)"
            ),
            Self::Timeout { to } => write!(f, "call {to}: no answer in time"),
            Self::Busy { to } => write!(f, "call {to}: too many calls at a time"),
            Self::Connect { to, reason }
            | Self::Tls { to, reason }
            | Self::TooLarge { to, reason }
            | Self::Protocol { to, reason } => write!(f, "call {to}: {reason}"),
            Self::Invalid { reason } => write!(f, "the request is not valid: {reason}"),
        }
    }
}

impl error::Error for Error {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_that_is_printed_holds_what_was_sent() {
        let request = Request::new("POST", "https://mail.example/send?token=hunter2")
            .header("authorization", "hunter2")
            .body("hunter2");
        let response = Response {
            headers: vec![("set-cookie".into(), b"hunter2".to_vec())],
            body: b"hunter2".to_vec(),
            ..Response::new(200)
        };
        for text in [format!("{request:?}"), format!("{response:?}"), request.send().unwrap_err().to_string()] {
            assert!(!text.contains("hunter2"), "{text}");
        }
        let user = Request::new("POST", "https://user:hunter2@mail.example/");
        assert!(!format!("{user:?}{}", user.clone().send().unwrap_err()).contains("hunter2"));
    }
}
