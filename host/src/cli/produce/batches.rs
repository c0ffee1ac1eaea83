//! From lines of NDJSON to batches. Runs on a thread of its own, ahead of the database by a few batches.

use std::io::{BufRead, Read};

use anyhow::{Context, Result, anyhow};
use tokio::sync::mpsc;

use super::{
    super::ndjson::{LINE_BYTES_MAX, Line, parse_line},
    input::Input,
};

/// A batch is sent once its payloads reach this, so that a transaction never holds many of the largest.
const BATCH_BYTES: usize = 1 << 20;

/// Lines that are stored together or not at all.
#[derive(Debug, Default)]
pub struct Batch {
    pub lines: Vec<Line>,
    /// The number of each line, from 1. Blank lines are counted and skipped.
    pub numbers: Vec<u64>,
}

impl Batch {
    /// "lines 251 to 500".
    pub fn range(&self) -> String {
        let (first, last) = (self.numbers.first().copied(), self.last_line());
        match first {
            Some(first) if first != last => format!("lines {first} to {last}"),
            _ => format!("line {last}"),
        }
    }

    pub fn last_line(&self) -> u64 {
        self.numbers.last().copied().unwrap_or_default()
    }
}

/// Reads batches of up to `lines_max` lines until the input ends, or to the first bad line: that is the last thing sent,
/// and what stood before it in its batch is not sent.
pub fn read(mut input: Input, stream: &str, lines_max: usize, sender: &mpsc::Sender<Result<Batch>>) {
    let mut number = 0;
    loop {
        let batch = next(&mut input, stream, lines_max, &mut number);
        let ends = !matches!(&batch, Ok(batch) if !batch.lines.is_empty());
        let empty = matches!(&batch, Ok(batch) if batch.lines.is_empty());
        // Nobody receives any more when the database has failed.
        if empty || sender.blocking_send(batch).is_err() || ends {
            return;
        }
    }
}

/// The next batch; an empty one at the end of the input.
fn next(input: &mut Input, stream: &str, lines_max: usize, number: &mut u64) -> Result<Batch> {
    let mut batch = Batch::default();
    let (mut bytes, mut line) = (0, Vec::new());
    while batch.lines.len() < lines_max && bytes < BATCH_BYTES {
        line.clear();
        let bounded = &mut (&mut input.reader).take(LINE_BYTES_MAX as u64 + 1);
        let read = bounded.read_until(b'\n', &mut line);
        if read.with_context(|| format!("read {} after line {number}", input.name))? == 0 {
            break;
        }
        *number += 1;
        if line.trim_ascii().is_empty() {
            continue;
        }
        let parsed = parse_line(stream, *number, line.strip_suffix(b"\n").unwrap_or(&line));
        let parsed = parsed.map_err(|error| anyhow!(error))?;
        bytes += parsed.message.payload.as_ref().map_or(0, Vec::len);
        batch.lines.push(parsed);
        batch.numbers.push(*number);
    }
    Ok(batch)
}

#[cfg(test)]
mod tests {
    use std::io::{BufReader, Cursor};

    use super::*;

    fn batches(text: &str, lines_max: usize) -> Vec<Result<Batch>> {
        let reader: Box<dyn Read + Send> = Box::new(Cursor::new(text.to_owned().into_bytes()));
        let input = Input { name: "test".to_owned(), reader: BufReader::new(reader) };
        let (sender, mut receiver) = mpsc::channel(100);
        read(input, "orders", lines_max, &sender);
        drop(sender);
        std::iter::from_fn(|| receiver.blocking_recv()).collect()
    }

    #[test]
    fn lines_come_in_batches_with_their_numbers() {
        let text = "{\"payload\": 1}\n\n{\"payload\": 2}\r\n{\"payload\": 3}";
        let found: Vec<_> = batches(text, 2).into_iter().map(|batch| batch.unwrap().numbers).collect();
        assert_eq!(found, [vec![1, 3], vec![4]]);
        assert!(batches("", 2).is_empty() && batches("\n \n", 2).is_empty());
    }

    #[test]
    fn a_bad_line_ends_it_and_its_batch_is_not_sent() {
        let text = "{\"payload\": 1}\n{\"payload\": 2}\n{\"payload\": 3}\nnonsense\n{\"payload\": 5}\n";
        let found = batches(text, 2);
        assert_eq!(found.len(), 2);
        assert_eq!(found[0].as_ref().unwrap().range(), "lines 1 to 2");
        assert!(found[1].as_ref().unwrap_err().to_string().starts_with("line 4: not valid JSON"));
    }

    #[test]
    fn large_payloads_make_small_batches() {
        let line = format!("{{\"payload\": \"{}\"}}\n", "x".repeat(600 << 10));
        let found: Vec<_> = batches(&line.repeat(3), 250).into_iter().map(|batch| batch.unwrap().lines.len()).collect();
        assert_eq!(found, [2, 1]);
    }
}
