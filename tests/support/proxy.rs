//! A proxy between a program and Postgres that loses requests or their replies, and with them the connection, or sends them
//! on late. It knows just enough of the wire protocol to see where a request ends and which statement it runs; what becomes
//! of it is for the test to say.

use std::{
    io,
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
    },
    thread::JoinHandle,
};

use tempfile::TempDir;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{UnixListener, UnixStream},
    sync::{oneshot, watch},
    task::JoinSet,
};

use super::scratch_folder;

/// What becomes of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    Answered,
    /// Postgres has done it and said so, and nobody hears of it. Both sides are hung up on.
    ReplyLost,
    /// Both sides are hung up on the moment it was sent on: whether Postgres does it, and when, nobody knows.
    HungUp,
    /// It never reaches Postgres. Both sides are hung up on.
    RequestLost,
    /// It reaches Postgres once [`Proxy::send_on`] says so, however the program has fared meanwhile.
    Late,
    /// It reaches Postgres, whose answer nobody takes until [`Proxy::send_on`] says so.
    Unread,
}

type Judge = dyn FnMut(&str) -> Fate + Send;

/// Runs on a thread of its own, so that tests may block. Ends, with all its connections, when it is dropped.
pub struct Proxy {
    url: String,
    shared: Arc<Shared>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
    _folder: TempDir,
}

struct Shared {
    judge: Mutex<Box<Judge>>,
    /// Whether anything is judged at all.
    is_on: AtomicBool,
    lost: AtomicUsize,
    kept: AtomicUsize,
    answered_late: AtomicUsize,
    sends_on: watch::Sender<bool>,
}

impl Proxy {
    /// Stands before the Postgres of `url`, which names the folder of a Unix socket. Once it is told to begin, `judge` is
    /// asked about every request with the text of its statement.
    pub fn start(url: &str, judge: impl FnMut(&str) -> Fate + Send + 'static) -> Self {
        let (before, socket) = url.split_once("?host=").expect("the URL of the tests' Postgres");
        let server = Path::new(socket).join(".s.PGSQL.5432");
        let folder = scratch_folder();
        let own = folder.path().join(".s.PGSQL.5432");
        let shared = Arc::new(Shared {
            judge: Mutex::new(Box::new(judge)),
            is_on: AtomicBool::new(false),
            lost: AtomicUsize::new(0),
            kept: AtomicUsize::new(0),
            answered_late: AtomicUsize::new(0),
            sends_on: watch::Sender::new(false),
        });
        let (stop, stopped) = oneshot::channel();
        let url = format!("{before}?host={}", folder.path().display());
        let listener = std::os::unix::net::UnixListener::bind(own).expect("listen");
        let serving = Arc::clone(&shared);
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("make a runtime");
            runtime.block_on(async {
                tokio::select! {
                    () = serve(listener, &server, &serving) => {}
                    _ = stopped => {}
                }
            });
        });
        Self { url, shared, stop: Some(stop), thread: Some(thread), _folder: folder }
    }

    /// Judges commits only, and tells `judge` how many there were, from 1.
    pub fn of_commits(url: &str, mut judge: impl FnMut(usize) -> Fate + Send + 'static) -> Self {
        let mut count = 0;
        Self::start(url, move |statement| {
            if !is_commit(statement) {
                return Fate::Answered;
            }
            count += 1;
            judge(count)
        })
    }

    pub fn url(&self) -> &str {
        &self.url
    }

    pub fn begin(&self) {
        self.shared.is_on.store(true, SeqCst);
    }

    /// From now on all is answered.
    pub fn cease(&self) {
        self.shared.is_on.store(false, SeqCst);
    }

    /// How often something was lost.
    pub fn lost(&self) -> usize {
        self.shared.lost.load(SeqCst)
    }

    /// How many requests, or their answers, were kept back.
    pub fn kept(&self) -> usize {
        self.shared.kept.load(SeqCst)
    }

    /// Sends on what was kept back.
    pub fn send_on(&self) {
        self.shared.sends_on.send_replace(true);
    }

    /// How many requests that were kept back Postgres has answered.
    pub fn answered_late(&self) -> usize {
        self.shared.answered_late.load(SeqCst)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        drop(self.stop.take());
        let ended = self.thread.take().expect("it runs until here").join();
        if !std::thread::panicking() {
            ended.expect("the proxy does not panic");
        }
    }
}

pub fn is_commit(statement: &str) -> bool {
    statement.trim().trim_end_matches(';').eq_ignore_ascii_case("commit")
}

async fn serve(listener: std::os::unix::net::UnixListener, server: &Path, shared: &Arc<Shared>) {
    listener.set_nonblocking(true).expect("a listener of the runtime");
    let listener = UnixListener::from_std(listener).expect("a listener of the runtime");
    let mut connections = JoinSet::new();
    loop {
        let (client, _) = listener.accept().await.expect("accept");
        while connections.try_join_next().is_some() {}
        // Postgres refuses connections while it starts again; its client then sees this one end.
        let Ok(server) = UnixStream::connect(server).await else { continue };
        let shared = Arc::clone(shared);
        // Whichever side hangs up first, the other is hung up on as well.
        connections.spawn(async move { drop(relay(client, server, &shared).await) });
    }
}

/// Passes whole messages on in both directions, until one side hangs up or a request is lost.
async fn relay(mut client: UnixStream, mut server: UnixStream, shared: &Shared) -> io::Result<()> {
    if !start_up(&mut client, &mut server).await? {
        return Ok(());
    }
    let (mut asked, mut answered, mut requests) = (Vec::new(), Vec::new(), Requests::default());
    let (mut request, mut is_late) = (Vec::new(), false);
    loop {
        tokio::select! {
            read = client.read_buf(&mut asked) => {
                if read? == 0 {
                    return Ok(());
                }
                while let Some(message) = next_message(&mut asked) {
                    let fate = requests.note(&message).map_or(Fate::Answered, |statement| shared.judge(&statement));
                    // Postgres begins with the parts of a request before it has the whole.
                    request.extend_from_slice(&message);
                    if is_part(message[0]) {
                        continue;
                    }
                    if fate == Fate::Late {
                        shared.keep().await;
                    }
                    if fate != Fate::RequestLost {
                        server.write_all(&std::mem::take(&mut request)).await?;
                    }
                    match fate {
                        Fate::Answered => {}
                        Fate::Late => is_late = true,
                        Fate::Unread => shared.keep().await,
                        Fate::ReplyLost => return requests.wait_for_replies(&mut server, answered).await,
                        Fate::HungUp | Fate::RequestLost => return Ok(()),
                    }
                }
            }
            read = server.read_buf(&mut answered) => {
                if read? == 0 {
                    return Ok(());
                }
                while let Some(message) = next_message(&mut answered) {
                    requests.note_reply(&message);
                    if is_late && requests.open == 0 {
                        is_late = false;
                        shared.answered_late.fetch_add(1, SeqCst);
                    }
                    client.write_all(&message).await?;
                }
            }
        }
    }
}

impl Shared {
    fn judge(&self, statement: &str) -> Fate {
        if !self.is_on.load(SeqCst) {
            return Fate::Answered;
        }
        let fate = (self.judge.lock().expect("no judge panics"))(statement);
        if !matches!(fate, Fate::Answered | Fate::Late | Fate::Unread) {
            self.lost.fetch_add(1, SeqCst);
        }
        fate
    }

    /// Waits until what is kept back may go on.
    async fn keep(&self) {
        self.kept.fetch_add(1, SeqCst);
        let mut sends_on = self.sends_on.subscribe();
        sends_on.wait_for(|sends_on| *sends_on).await.expect("the proxy holds the sender");
    }
}

/// The first messages have no kind. False: it was no conversation but the wish to cancel one.
async fn start_up(client: &mut UnixStream, server: &mut UnixStream) -> io::Result<bool> {
    const CANCEL: u32 = 80_877_102;
    const TLS: u32 = 80_877_103;
    const GSSAPI: u32 = 80_877_104;
    loop {
        let length = client.read_u32().await?;
        let mut rest = vec![0; length as usize - 4];
        client.read_exact(&mut rest).await?;
        let code = u32::from_be_bytes(rest[..4].try_into().expect("four bytes"));
        if matches!(code, TLS | GSSAPI) {
            client.write_all(b"N").await?;
            continue;
        }
        server.write_u32(length).await?;
        server.write_all(&rest).await?;
        return Ok(code != CANCEL);
    }
}

/// Whether more of the same request follows: Parse, Bind, Describe, Execute and Close come before a Sync.
fn is_part(kind: u8) -> bool {
    matches!(kind, b'P' | b'B' | b'D' | b'E' | b'C')
}

/// Takes one whole message out: its kind, its length, its content.
fn next_message(buffer: &mut Vec<u8>) -> Option<Vec<u8>> {
    let length = u32::from_be_bytes(buffer.get(1..5)?.try_into().expect("four bytes"));
    let end = 1 + length as usize;
    (buffer.len() >= end).then(|| buffer.drain(..end).collect())
}

/// What a client has asked so far.
struct Requests {
    /// Texts of prepared statements, by name.
    prepared: Vec<(Vec<u8>, String)>,
    /// What the portal that was bound last runs.
    bound: String,
    /// What the request under way runs, once it is told to.
    executed: Option<String>,
    /// Requests without a whole reply; the start is the first.
    open: usize,
}

impl Default for Requests {
    fn default() -> Self {
        Self { prepared: Vec::new(), bound: String::new(), executed: None, open: 1 }
    }
}

impl Requests {
    /// The statement, if this message ends a request that runs one.
    fn note(&mut self, message: &[u8]) -> Option<String> {
        let mut texts = message[5..].split(|byte| *byte == 0);
        let mut text = || texts.next().unwrap_or_default();
        match message[0] {
            b'Q' => {
                self.open += 1;
                Some(String::from_utf8_lossy(text()).into_owned())
            }
            b'P' => {
                let (name, statement) = (text().to_owned(), String::from_utf8_lossy(text()).into_owned());
                self.prepared.retain(|(known, _)| *known != name);
                self.prepared.push((name, statement));
                None
            }
            b'B' => {
                let (_portal, name) = (text(), text());
                let found = self.prepared.iter().find(|(known, _)| known == name);
                self.bound = found.map(|(_, statement)| statement.clone()).unwrap_or_default();
                None
            }
            b'E' => {
                self.executed = Some(self.bound.clone());
                None
            }
            b'S' => {
                self.open += 1;
                self.executed.take()
            }
            _ => None,
        }
    }

    fn note_reply(&mut self, message: &[u8]) {
        if message[0] == b'Z' {
            self.open = self.open.saturating_sub(1);
        }
    }

    /// Reads, and drops, all that Postgres still has to say to what it was asked.
    async fn wait_for_replies(mut self, server: &mut UnixStream, mut answered: Vec<u8>) -> io::Result<()> {
        while self.open > 0 {
            match next_message(&mut answered) {
                Some(message) => self.note_reply(&message),
                None if server.read_buf(&mut answered).await? == 0 => break,
                None => {}
            }
        }
        Ok(())
    }
}
