//! An HTTP server that answers what a test says, over plain TCP or over TLS with the certificates of `tests/tls`. Keeps
//! every request, so that a test can also see that none arrived.

use std::{
    net::SocketAddr,
    path::PathBuf,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::TcpListener,
    task::{JoinHandle, JoinSet},
};
use tokio_rustls::{
    TlsAcceptor,
    rustls::{
        ServerConfig,
        crypto::ring,
        pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
    },
};

/// One request as it arrived.
#[derive(Clone, Debug)]
pub struct Seen {
    /// Method, path and version.
    pub line: String,
    /// Names in lower case.
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl Seen {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(found, _)| found == name).map(|(_, value)| value.as_str())
    }
}

/// What the server does with a request.
pub enum Reply {
    /// These bytes, then the end of the connection.
    Bytes(Vec<u8>),
    /// These bytes after a while, then the end of the connection.
    Late(Duration, Vec<u8>),
    /// These bytes, and then nothing for ever.
    Stall(Vec<u8>),
}

impl Reply {
    /// A whole answer with a status, header lines that each end in a line break, and a body.
    pub fn new(status: u16, headers: &str, body: &str) -> Self {
        let headers = headers.replace('\n', "\r\n");
        let length = body.len();
        Self::Bytes(format!("HTTP/1.1 {status} x\r\n{headers}content-length: {length}\r\n\r\n{body}").into_bytes())
    }

    /// Status 200 and a body, after a while.
    pub fn late(after: Duration, body: &str) -> Self {
        match Self::new(200, "", body) {
            Self::Bytes(bytes) => Self::Late(after, bytes),
            other => other,
        }
    }
}

type Answer = dyn Fn(&Seen) -> Reply + Send + Sync;

/// Ends, with all its connections, when it is dropped.
pub struct HttpServer {
    pub address: SocketAddr,
    shared: Arc<Shared>,
    task: JoinHandle<()>,
}

struct Shared {
    answer: Box<Answer>,
    tls: Option<TlsAcceptor>,
    seen: Mutex<Vec<Seen>>,
    open: AtomicUsize,
    most_open: AtomicUsize,
}

/// Where the certificates are.
pub fn tls_file(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/tls").join(name)
}

impl HttpServer {
    pub async fn start(answer: impl Fn(&Seen) -> Reply + Send + Sync + 'static) -> Self {
        Self::start_with(None, Box::new(answer)).await
    }

    /// Is `mail.test` and 127.0.0.1, by the word of the authority in `tls/ca.pem`.
    pub async fn start_tls(answer: impl Fn(&Seen) -> Reply + Send + Sync + 'static) -> Self {
        let certificate = CertificateDer::from_pem_file(tls_file("server.pem")).unwrap();
        let key = PrivateKeyDer::from_pem_file(tls_file("server.key")).unwrap();
        let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![certificate], key)
            .unwrap();
        Self::start_with(Some(TlsAcceptor::from(Arc::new(config))), Box::new(answer)).await
    }

    /// Answers before it is asked, and never in TLS.
    pub async fn start_rude(bytes: &'static [u8]) -> Self {
        let mut server = Self::start(|_| Reply::Bytes(Vec::new())).await;
        server.task.abort();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        server.address = listener.local_addr().unwrap();
        server.task = tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let _ = stream.write_all(bytes).await;
                let _ = stream.read_u8().await;
            }
        });
        server
    }

    async fn start_with(tls: Option<TlsAcceptor>, answer: Box<Answer>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (seen, open, most_open) = Default::default();
        let shared = Arc::new(Shared { answer, tls, seen, open, most_open });
        let serving = shared.clone();
        let task = tokio::spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                let shared = serving.clone();
                connections.spawn(async move {
                    match &shared.tls {
                        None => shared.serve(stream).await,
                        // One that does not get through the handshake has sent no request.
                        Some(tls) => {
                            if let Ok(stream) = tls.accept(stream).await {
                                shared.serve(stream).await;
                            }
                        }
                    }
                });
            }
        });
        Self { address, shared, task }
    }

    pub fn port(&self) -> u16 {
        self.address.port()
    }

    /// Every request so far.
    pub fn seen(&self) -> Vec<Seen> {
        self.shared.seen.lock().unwrap().clone()
    }

    /// Requests whose connection is still open.
    pub fn open(&self) -> usize {
        self.shared.open.load(SeqCst)
    }

    /// The most that were open at a time.
    pub fn most_open(&self) -> usize {
        self.shared.most_open.load(SeqCst)
    }
}

impl Drop for HttpServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Shared {
    async fn serve(&self, mut stream: impl AsyncRead + AsyncWrite + Unpin) {
        let Some(seen) = read_request(&mut stream).await else { return };
        let open = self.open.fetch_add(1, SeqCst) + 1;
        self.most_open.fetch_max(open, SeqCst);
        self.seen.lock().unwrap().push(seen.clone());
        let (bytes, stalls) = match (self.answer)(&seen) {
            Reply::Bytes(bytes) => (bytes, false),
            Reply::Late(after, bytes) => {
                tokio::time::sleep(after).await;
                (bytes, false)
            }
            Reply::Stall(bytes) => (bytes, true),
        };
        // The client may have gone; then it wants no answer.
        let _ = stream.write_all(&bytes).await;
        let _ = stream.flush().await;
        if stalls {
            let _ = stream.read_u8().await; // ends when the client hangs up
        }
        let _ = stream.shutdown().await;
        self.open.fetch_sub(1, SeqCst);
    }
}

/// A request with a body of `content-length` bytes. `None`: the client hung up.
async fn read_request(stream: &mut (impl AsyncRead + Unpin)) -> Option<Seen> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.ok()?);
    }
    let head = String::from_utf8(head).ok()?;
    let mut lines = head.lines();
    let line = lines.next()?.to_owned();
    let headers = lines.filter_map(|line| line.split_once(": "));
    let headers: Vec<_> = headers.map(|(name, value)| (name.to_ascii_lowercase(), value.to_owned())).collect();
    let length = headers.iter().find(|(name, _)| name == "content-length").map_or("0", |(_, value)| value.as_str());
    let mut body = vec![0; length.parse().ok()?];
    stream.read_exact(&mut body).await.ok()?;
    Some(Seen { line, headers, body })
}
