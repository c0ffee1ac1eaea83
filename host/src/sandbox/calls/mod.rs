//! HTTP calls of handlers (`wasi:http/outgoing-handler`). Denied unless the group's `allow.http` names host and port, and
//! unless the addresses behind them are public or named themselves. Follows no redirect: the guest sees the answer, and
//! what it then asks for is judged anew.
//!
//! A call is a task that the guest's store owns. It ends with its delivery, however that ends: when the store is dropped
//! (a trap, the deadline, a lost lease), or when [`Calls`] is (an instance that is kept for the next message).

mod address;
mod allow;
mod body;
mod client;
mod failure;
mod resolve;

use std::{sync::Arc, time::Duration};

use http_body_util::BodyExt;
use hyper::{Method, Request, Response, Uri, client::conn::http1, header::CONTENT_LENGTH, http::uri::Scheme};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{Instant, timeout_at},
};
use tokio_util::sync::CancellationToken;
use wasmtime::component::{Linker, Resource};
use wasmtime_wasi::{WasiView, p2::bindings::io::error::Error as IoError};
use wasmtime_wasi_http::{Error, RequestOptions, WasiBody, WasiHttpHooks, io::TokioIo};

pub use self::{allow::AllowList, client::Client};
use self::{
    allow::Host,
    body::{Patience, RequestBody, ResponseBody},
    client::{Connection, Destination, Security},
};
use super::{delivery::Delivery, settings::GroupSettings, state::State};

/// Calls that one delivery may have open; a response counts until its body is dropped.
const OPEN_PER_DELIVERY_MAX: usize = 16;

/// How long looking up, connecting and TLS may take together where the guest says nothing.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// How long before its deadline a waiting guest is told, so that it can still answer: a tenth of what is left, at most
/// this. A guest that was cut off could not say why.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// Most of a response's head, and what is read ahead of the guest.
const HEAD_BYTES_MAX: usize = 64 * 1024;

/// What a guest may hand over of a request's body in one write. Two such pieces are held for each call.
const WRITE_BYTES_MAX: usize = 64 * 1024;

/// The version of wasi:http that wasmtime-wasi-http links.
const TYPES: &str = "wasi:http/types@0.2.12";

type Worker = Box<dyn Future<Output = Result<(), Error>> + Send>;
type Answer = Result<(Response<WasiBody>, Worker), Error>;

/// Offers wasi:http to guests.
pub fn add_to_linker(linker: &mut Linker<State>) -> wasmtime::Result<()> {
    wasmtime_wasi_http::p2::add_only_http_to_linker_async(linker)?;
    // wasmtime-wasi-http 48 looks for another type than the one its bodies fail with, and so tells a guest nothing.
    linker.allow_shadowing(true);
    linker.instance(TYPES)?.func_wrap("http-error-code", |mut store, (error,): (Resource<IoError>,)| {
        let error = WasiView::ctx(store.data_mut()).table.get(&error)?;
        Ok((error.downcast_ref::<Error>().map(failure::code_in_body),))
    })?;
    linker.allow_shadowing(false);
    Ok(())
}

/// The calls of one delivery. Dropping it ends them.
pub struct Calls {
    client: Arc<Client>,
    settings: Arc<GroupSettings>,
    delivery: Arc<Delivery>,
    open: Arc<Semaphore>,
    ended: CancellationToken,
}

impl Drop for Calls {
    fn drop(&mut self) {
        self.ended.cancel();
    }
}

impl Calls {
    pub fn new(client: Arc<Client>, settings: Arc<GroupSettings>, delivery: Arc<Delivery>) -> Self {
        let open = Arc::new(Semaphore::new(OPEN_PER_DELIVERY_MAX));
        Self { client, settings, delivery, open, ended: CancellationToken::new() }
    }

    /// Everything that can be refused without the network.
    fn begin(&self, request: Request<WasiBody>, options: Option<RequestOptions>) -> Result<Call, Error> {
        let to = destination(request.uri())?;
        if !self.settings.http.holds(&to.host, to.port) {
            return Err(Error::HttpRequestDenied);
        }
        // It would make the connection a tunnel, which none of the limits fits.
        if request.method() == Method::CONNECT {
            return Err(Error::HttpRequestMethodInvalid);
        }
        let bytes_max = self.settings.limits.http_request_bytes;
        if content_length(request.headers()).is_some_and(|bytes| bytes > bytes_max) {
            return Err(Error::HttpRequestBodySize(Some(bytes_max)));
        }
        let place = self.open.clone().try_acquire_owned().map_err(|_| Error::ConnectionLimitReached)?;
        let left = self.delivery.deadline().saturating_duration_since(std::time::Instant::now());
        Ok(Call {
            client: self.client.clone(),
            settings: self.settings.clone(),
            to,
            request,
            options: options.unwrap_or_default(),
            until: Instant::now() + (left - (left / 10).min(LAST_WORDS)),
            place,
        })
    }
}

impl WasiHttpHooks for Calls {
    fn send_request(
        &mut self,
        request: Request<WasiBody>,
        options: Option<RequestOptions>,
        _processed: Worker,
    ) -> Box<dyn Future<Output = Answer> + Send> {
        let call = self.begin(request, options);
        let ended = self.ended.clone();
        Box::new(async move {
            let call = call?;
            tokio::select! {
                biased;
                () = ended.cancelled() => Err(Error::ConnectionTerminated),
                answer = call.run(ended.clone()) => answer,
            }
        })
    }

    fn p2_outgoing_body_chunk_size(&mut self) -> usize {
        WRITE_BYTES_MAX
    }
}

/// One call that may be tried.
struct Call {
    client: Arc<Client>,
    settings: Arc<GroupSettings>,
    to: Destination,
    request: Request<WasiBody>,
    options: RequestOptions,
    /// When the guest wants to know.
    until: Instant,
    place: OwnedSemaphorePermit,
}

impl Call {
    async fn run(self, ended: CancellationToken) -> Answer {
        let Self { client, settings, to, request, options, until, place } = self;
        let group_place = settings.calls.clone().acquire_owned();
        let Ok(Ok(group_place)) = timeout_at(until, group_place).await else {
            return Err(Error::ConnectionLimitReached);
        };
        let connect_until = earlier(until, Some(options.connect_timeout.unwrap_or(CONNECT_TIMEOUT)));
        let connecting = client.connect(&to, &settings.http);
        let connection = timeout_at(connect_until, connecting).await.map_err(|_| Error::ConnectionTimeout)??;

        let head_until = earlier(until, options.first_byte_timeout);
        let bytes_max = settings.limits.http_request_bytes;
        let exchange = exchange(connection, request.map(|body| RequestBody::new(body, bytes_max)));
        let (response, driver) = timeout_at(head_until, exchange).await.map_err(|_| Error::ConnectionReadTimeout)??;

        let bytes_max = settings.limits.http_response_bytes;
        if content_length(response.headers()).is_some_and(|bytes| bytes > bytes_max) {
            return Err(Error::HttpResponseBodySize(Some(bytes_max)));
        }
        let patience = Patience { pause_max: options.between_bytes_timeout, until };
        let response = response.map(|body| ResponseBody::new(body, bytes_max, patience).boxed_unsync());
        let worker = async move {
            let _places = (place, group_place);
            tokio::select! {
                () = ended.cancelled() => {}
                () = driver => {}
            }
            Ok(())
        };
        Ok((response, Box::new(worker)))
    }
}

/// Sends the request and waits for the response's head. What is given back drives the rest of both bodies.
async fn exchange(
    connection: Box<dyn Connection>,
    mut request: Request<RequestBody>,
) -> Result<(Response<hyper::body::Incoming>, impl Future<Output = ()> + Send), Error> {
    // The host is in its header; what is sent is only what follows it.
    let path = request.uri().path_and_query().map_or("/", |path| path.as_str());
    *request.uri_mut() = path.parse::<Uri>().map_err(|_| Error::HttpRequestUriInvalid)?;
    let mut builder = http1::Builder::new();
    builder.max_buf_size(HEAD_BYTES_MAX);
    let handshake = builder.handshake(TokioIo::new(connection)).await;
    let (mut sender, driver) = handshake.map_err(|error| failure::in_head(&error))?;
    let mut driver = Some(Box::pin(driver));
    let mut sending = Box::pin(sender.send_request(request));
    let response = loop {
        let Some(driving) = &mut driver else { break sending.as_mut().await };
        tokio::select! {
            biased;
            response = &mut sending => break response,
            // Its error reaches whoever waits for the response as well.
            _ = driving => driver = None,
        }
    };
    let response = response.map_err(|error| failure::in_head(&error))?;
    let rest = async move {
        if let Some(driver) = driver {
            // An error shows in the body, which is where the guest looks.
            let _ = driver.await;
        }
    };
    Ok((response, rest))
}

fn destination(uri: &Uri) -> Result<Destination, Error> {
    let authority = uri.authority().ok_or(Error::HttpRequestUriInvalid)?;
    // A user in a URL serves to make one host look like another; credentials belong into a header.
    if authority.as_str().contains('@') || authority.host().is_empty() {
        return Err(Error::HttpRequestUriInvalid);
    }
    let security = if uri.scheme() == Some(&Scheme::HTTPS) { Security::Tls } else { Security::Plain };
    let default_port = if security == Security::Tls { 443 } else { 80 };
    let port = match authority.port() {
        Some(port) => port.as_u16(),
        // A colon with something after it that is no port must not fall back to the default one.
        None if authority.as_str().len() != authority.host().len() => return Err(Error::HttpRequestUriInvalid),
        None => default_port,
    };
    Ok(Destination { host: Host::parse(authority.host()), port, security })
}

fn content_length(headers: &hyper::HeaderMap) -> Option<u64> {
    headers.get(CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}

fn earlier(until: Instant, timeout: Option<Duration>) -> Instant {
    match timeout.and_then(|timeout| Instant::now().checked_add(timeout)) {
        Some(instant) => instant.min(until),
        None => until,
    }
}

#[cfg(test)]
mod tests {
    use std::{path::Path, pin::Pin, task::Poll};

    use http_body_util::Empty;
    use tokio::net::TcpListener;

    use super::*;
    use crate::{
        config,
        sandbox::output::{Output, Writer},
    };

    fn check(uri: &str, expected: Option<(&str, u16, Security)>) {
        let found = uri.parse::<Uri>().ok().and_then(|uri| destination(&uri).ok());
        let found = found.map(|to| (to.host, to.port, to.security));
        let expected = expected.map(|(host, port, security)| (Host::parse(host), port, security));
        assert_eq!(found, expected, "{uri}");
    }

    #[test]
    fn a_url_says_where_it_goes_and_nothing_in_it_pretends() {
        check("https://mail.example/a?b", Some(("mail.example", 443, Security::Tls)));
        check("http://mail.example", Some(("mail.example", 80, Security::Plain)));
        check("http://mail.example:8080/", Some(("mail.example", 8080, Security::Plain)));
        check("https://[::1]:8443/", Some(("[::1]", 8443, Security::Tls)));
        check("http://mail.example:443@evil.example/", None);
        check("http://user@mail.example/", None);
        check("http://mail.example:/", None);
        check("http://mail.example:99999/", None);
        check("/a", None);
    }

    /// The calls of a delivery that may call this port.
    fn calls(port: u16) -> Calls {
        let text = format!(
            "[streams.s]\n[groups.g]\nstream = \"s\"\nhandler = \"h.wasm\"\nallow = {{ http = [\"127.0.0.1:{port}\"] }}"
        );
        let config = config::parse(&text, Path::new("streams.toml"), &|_| None).expect("valid settings");
        let settings = GroupSettings::from_config(&config, "g", Path::new("")).expect("no secrets");
        let writer = Writer { group: "g".into(), digest: "".into(), message_id: 1, attempt: 1 };
        let delivery = Delivery::new(Output::new(writer, Arc::default(), 0));
        delivery.begin(Duration::from_secs(60), &CancellationToken::new());
        Calls::new(
            Arc::new(Client::new(Default::default(), None).expect("a client")),
            Arc::new(settings),
            Arc::new(delivery),
        )
    }

    fn begin(calls: &mut Calls, method: Method, port: u16) -> Pin<Box<dyn Future<Output = Answer> + Send>> {
        let body = Empty::new().map_err(|never| match never {}).boxed_unsync();
        let request = Request::builder().method(method).uri(format!("http://127.0.0.1:{port}/")).body(body);
        Box::into_pin(calls.send_request(request.expect("a request"), None, Box::new(std::future::ready(Ok(())))))
    }

    /// A server that takes connections and says nothing.
    async fn silent() -> (TcpListener, u16) {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let port = listener.local_addr().expect("an address").port();
        (listener, port)
    }

    /// What an instance that is kept for the next message must not carry over.
    #[tokio::test]
    async fn calls_end_with_their_delivery() {
        let (listener, port) = silent().await;
        let mut calls = calls(port);
        let call = tokio::spawn(begin(&mut calls, Method::GET, port));
        let _connection = listener.accept().await.expect("a connection");
        drop(calls);
        assert!(matches!(call.await.expect("no panic"), Err(Error::ConnectionTerminated)));
    }

    #[tokio::test]
    async fn one_delivery_has_so_many_calls_open() {
        let (_listener, port) = silent().await;
        let mut calls = calls(port);
        let mut open: Vec<_> = (0..OPEN_PER_DELIVERY_MAX).map(|_| begin(&mut calls, Method::GET, port)).collect();
        assert!(matches!(begin(&mut calls, Method::GET, port).await, Err(Error::ConnectionLimitReached)));
        open.pop();
        let mut another = begin(&mut calls, Method::GET, port);
        // It waits for the silent server, and so has a place.
        let polled = std::future::poll_fn(|context| Poll::Ready(another.as_mut().poll(context))).await;
        assert!(polled.is_pending());
    }

    #[tokio::test]
    async fn a_tunnel_is_not_a_call() {
        let (_listener, port) = silent().await;
        let answer = begin(&mut calls(port), Method::CONNECT, port).await;
        assert!(matches!(answer, Err(Error::HttpRequestMethodInvalid)));
    }
}
