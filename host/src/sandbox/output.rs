//! What a guest writes: stdout, stderr and wasi:logging become log lines of ours, bounded per line, per delivery and
//! per group. The guest never waits and never fails for writing too much; what is over a bound is counted and dropped.

use std::{
    borrow::Cow,
    collections::VecDeque,
    sync::{Arc, Mutex, PoisonError},
    time::Instant,
};

/// Longest line that is logged whole; the rest of a longer one is cut off.
const LINE_BYTES_MAX: usize = 1024;

/// How much of the end of stderr (with what was logged at error and critical) is kept for the stored error. Enough for
/// a panic's text and some lines before it.
const TAIL_BYTES_MAX: usize = 4096;

/// What one group may log: a steady rate, and a burst for the start of a backlog. Above it log lines cost more than the
/// messages.
const GROUP_BYTES_PER_SECOND: f64 = 1024.0 * 1024.0;
const GROUP_BURST_BYTES: f64 = 4.0 * 1024.0 * 1024.0;

/// Where a line came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    Stdout,
    Stderr,
}

/// The log levels we map everything to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    Debug,
    Info,
    Warn,
}

/// Whose lines these are. The fields of every line.
#[derive(Clone, Debug)]
pub struct Writer {
    pub group: Arc<str>,
    pub digest: Arc<str>,
    pub message_id: i64,
    pub attempt: u32,
}

/// The output of one delivery.
#[derive(Debug)]
pub struct Output {
    writer: Writer,
    rate: Arc<GroupRate>,
    bytes_max: u64,
    bytes_left: u64,
    dropped_bytes: u64,
    /// Unfinished lines. Invariant: at most [`LINE_BYTES_MAX`] bytes each.
    stdout: Vec<u8>,
    stderr: Vec<u8>,
    /// Invariant: at most [`TAIL_BYTES_MAX`] bytes.
    tail: VecDeque<u8>,
}

impl Output {
    pub fn new(writer: Writer, rate: Arc<GroupRate>, bytes_max: u64) -> Self {
        Self {
            writer,
            rate,
            bytes_max,
            bytes_left: bytes_max,
            dropped_bytes: 0,
            stdout: Vec::new(),
            stderr: Vec::new(),
            tail: VecDeque::new(),
        }
    }

    /// Ready for the next message.
    pub fn begin(&mut self, message_id: i64, attempt: u32) {
        self.writer.message_id = message_id;
        self.writer.attempt = attempt;
        self.bytes_left = self.bytes_max;
        self.dropped_bytes = 0;
        self.stdout.clear();
        self.stderr.clear();
        self.tail.clear();
    }

    /// Takes what the guest wrote to one of its streams.
    pub fn write(&mut self, source: Source, bytes: &[u8]) {
        if source == Source::Stderr {
            self.keep_tail(bytes);
        }
        let allowed = usize::try_from(self.bytes_left).unwrap_or(usize::MAX).min(bytes.len());
        self.bytes_left -= allowed as u64;
        self.dropped_bytes += (bytes.len() - allowed) as u64;
        for piece in bytes[..allowed].split_inclusive(|byte| *byte == b'\n') {
            self.add_piece(source, piece);
        }
    }

    /// A piece is a line or a part of one; only its last byte can be a line feed.
    fn add_piece(&mut self, source: Source, piece: &[u8]) {
        let line = match source {
            Source::Stdout => &mut self.stdout,
            Source::Stderr => &mut self.stderr,
        };
        let room = LINE_BYTES_MAX - line.len();
        line.extend_from_slice(&piece[..piece.len().min(room)]);
        if piece.ends_with(b"\n") {
            let line = std::mem::take(line);
            self.log_stream_line(source, &line);
        }
    }

    fn log_stream_line(&self, source: Source, line: &[u8]) {
        let line = String::from_utf8_lossy(line);
        let line = line.trim_end_matches(['\n', '\r']);
        match source {
            Source::Stdout => self.log(Level::Info, "stdout", line),
            Source::Stderr => self.log(Level::Warn, "stderr", line),
        }
    }

    /// Takes one wasi:logging entry. `failing`: it says why the delivery may fail, so it belongs into the stored error.
    pub fn write_entry(&mut self, level: Level, failing: Failing, context: &str, message: &str) {
        if failing == Failing::Yes {
            self.keep_tail(message.as_bytes());
            self.keep_tail(b"\n");
        }
        let bytes = (message.len() + context.len()) as u64;
        if bytes > self.bytes_left {
            self.dropped_bytes += bytes;
            return;
        }
        self.bytes_left -= bytes;
        // A line of ours each, as with stdout: in text, what follows a line feed would pass for a line of the host.
        for message in message.lines() {
            let message = bounded(message, LINE_BYTES_MAX);
            if context.is_empty() {
                self.log(level, "log", message);
            } else {
                self.log(level, "log", &format!("{}: {message}", bounded(context, LINE_BYTES_MAX)));
            }
        }
    }

    /// Logs what is unfinished, and how much was dropped. Called when the delivery has ended.
    pub fn finish(&mut self) {
        for source in [Source::Stdout, Source::Stderr] {
            let line = std::mem::take(if source == Source::Stdout { &mut self.stdout } else { &mut self.stderr });
            if !line.is_empty() {
                self.log_stream_line(source, &line);
            }
        }
        if self.dropped_bytes > 0 {
            let (dropped, limit) = (self.dropped_bytes, self.bytes_max);
            let note = format!("[{dropped} bytes of output dropped: limits.log_bytes is {limit} a delivery]");
            self.log(Level::Info, "host", &note);
            self.dropped_bytes = 0;
        }
    }

    /// The end of what the guest wrote to stderr, for the stored error.
    pub fn tail(&self) -> String {
        let bytes: Vec<u8> = self.tail.iter().copied().collect();
        String::from_utf8_lossy(&bytes).trim().to_owned()
    }

    fn keep_tail(&mut self, bytes: &[u8]) {
        let bytes = &bytes[bytes.len().saturating_sub(TAIL_BYTES_MAX)..];
        let excess = (self.tail.len() + bytes.len()).saturating_sub(TAIL_BYTES_MAX);
        self.tail.drain(..excess);
        self.tail.extend(bytes);
    }

    /// Blank lines are left out: a panic begins with one, and as a line of a log it says nothing.
    fn log(&self, level: Level, stream: &'static str, line: &str) {
        if line.trim().is_empty() {
            return;
        }
        let dropped_lines = match self.rate.take(line.len(), Instant::now()) {
            Taken::Dropped => return,
            Taken::Allowed { dropped_lines } => dropped_lines,
        };
        let Writer { group, digest, message_id, attempt } = &self.writer;
        if dropped_lines > 0 {
            tracing::info!(target: "millstream::guest", %group, dropped_lines, "log lines dropped: this group logs too much");
        }
        let line = printable(line);
        macro_rules! line {
            ($level:ident) => {
                tracing::$level!(target: "millstream::guest", %group, message_id, attempt, %digest, stream, "{line}")
            };
        }
        match level {
            Level::Debug => line!(debug),
            Level::Info => line!(info),
            Level::Warn => line!(warn),
        }
    }
}

/// Whether an entry is about a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failing {
    Yes,
    No,
}

/// Without control characters, with which a guest could move the cursor of a terminal or begin a line of its own.
fn printable(line: &str) -> Cow<'_, str> {
    let is_control = |character: char| character.is_control() && character != '\t';
    if line.contains(is_control) { line.replace(is_control, "\u{fffd}").into() } else { line.into() }
}

/// The longest start of `text` that fits `bytes_max` bytes.
pub fn bounded(text: &str, bytes_max: usize) -> &str {
    &text[..text.floor_char_boundary(bytes_max)]
}

/// A token bucket over the log bytes of one group, shared by all its instances.
#[derive(Debug)]
pub struct GroupRate {
    bucket: Mutex<Bucket>,
}

#[derive(Debug)]
struct Bucket {
    bytes: f64,
    filled: Instant,
    dropped_lines: u64,
}

enum Taken {
    /// `dropped_lines`: how many were dropped since the last one allowed.
    Allowed {
        dropped_lines: u64,
    },
    Dropped,
}

impl Default for GroupRate {
    fn default() -> Self {
        Self { bucket: Mutex::new(Bucket { bytes: GROUP_BURST_BYTES, filled: Instant::now(), dropped_lines: 0 }) }
    }
}

impl GroupRate {
    fn take(&self, line_bytes: usize, now: Instant) -> Taken {
        let mut bucket = self.bucket.lock().unwrap_or_else(PoisonError::into_inner);
        let refill = now.saturating_duration_since(bucket.filled).as_secs_f64() * GROUP_BYTES_PER_SECOND;
        bucket.bytes = (bucket.bytes + refill).min(GROUP_BURST_BYTES);
        bucket.filled = now;
        if bucket.bytes < line_bytes as f64 {
            bucket.dropped_lines += 1;
            return Taken::Dropped;
        }
        bucket.bytes -= line_bytes as f64;
        Taken::Allowed { dropped_lines: std::mem::take(&mut bucket.dropped_lines) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn output(bytes_max: u64) -> Output {
        let writer = Writer { group: "g".into(), digest: "d".into(), message_id: 1, attempt: 1 };
        Output::new(writer, Arc::default(), bytes_max)
    }

    #[test]
    fn the_tail_keeps_the_end_of_stderr_only() {
        let mut output = output(10);
        output.write(Source::Stdout, b"not this\n");
        output.write(Source::Stderr, &[b'a'; 5000]);
        output.write(Source::Stderr, b"the end\n");
        let tail = output.tail();
        assert_eq!(tail.len(), TAIL_BYTES_MAX - 1);
        assert!(tail.ends_with("aathe end"), "{}", &tail[4000..]);
    }

    #[test]
    fn no_line_holds_what_a_terminal_or_a_log_would_act_on() {
        assert_eq!(printable("a\tb é"), "a\tb é");
        assert_eq!(printable("a\r\u{1b}[31m\0\nb"), "a\u{fffd}\u{fffd}[31m\u{fffd}\u{fffd}b");
    }

    #[test]
    fn a_flood_is_counted_and_takes_no_memory() {
        let mut output = output(100);
        for _ in 0..1000 {
            output.write(Source::Stdout, &[b'x'; 1000]);
        }
        assert_eq!(output.dropped_bytes, 1_000_000 - 100);
        assert_eq!(output.stdout.len(), 100);
        output.begin(2, 1);
        assert_eq!((output.bytes_left, output.dropped_bytes), (100, 0));
    }

    #[test]
    fn a_group_that_logs_too_much_is_slowed_and_the_drop_is_counted() {
        let rate = GroupRate::default();
        let start = rate.bucket.lock().expect("not poisoned").filled;
        let take = |count: u64, now| {
            (0..count).filter(|_| matches!(rate.take(1024, now), Taken::Allowed { .. })).count() as u64
        };
        let burst = take(10_000, start);
        assert_eq!(burst, GROUP_BURST_BYTES as u64 / 1024);
        assert_eq!(rate.bucket.lock().expect("not poisoned").dropped_lines, 10_000 - burst);
        // A second later it may log as much as a second allows, and the first line tells what was dropped.
        let later = start + std::time::Duration::from_secs(1);
        assert!(matches!(rate.take(1024, later), Taken::Allowed { dropped_lines } if dropped_lines == 10_000 - burst));
        let second = GROUP_BYTES_PER_SECOND.min(GROUP_BURST_BYTES) as u64 / 1024;
        assert_eq!(take(10_000, later), second - 1);
    }
}
