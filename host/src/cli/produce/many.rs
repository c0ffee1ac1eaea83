//! Many messages: the input's lines, batch by batch, each in one transaction.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use tokio::sync::mpsc;

use super::{
    super::{Global, Line, human, output::complain, progress},
    Answer, Produce,
    batches::{self, Batch},
    input::Input,
    refused,
};
use crate::{
    database::{Database, DatabaseError, Reaction, is_ambiguous_commit, reaction},
    engine::{self, NewEntry, ProduceError, Produced},
};

/// So many batches are read ahead: reading and the database then work at the same time.
const READ_AHEAD: usize = 2;

/// How often a batch is tried that the database was too busy for, or could not be reached for. With [`WAIT_MAX`] that is
/// a quarter of a minute: long enough for a server that is started again.
const TRIES: u32 = 12;

/// The longest wait between two tries.
const WAIT_MAX: Duration = Duration::from_secs(2);

pub(super) async fn produce(global: &Global, database: &Database, asked: &Produce, input: Input) -> Result<Answer> {
    let (sender, mut receiver) = mpsc::channel(READ_AHEAD);
    let (stream, lines_max) = (asked.stream.clone(), asked.batch as usize);
    // A blocked read of standard input cannot be ended; the process does not wait for this thread.
    std::thread::Builder::new()
        .name("millstream-lines".to_owned())
        .spawn(move || batches::read(input, &stream, lines_max, &sender))
        .context("start the thread that reads lines")?;
    let (started, bar) = (Instant::now(), progress(global, None, "messages"));
    let mut answer = Answer::default();
    let mut stored_to = 0;
    while let Some(batch) = receiver.recv().await {
        let first = answer.first_id.is_none();
        let stored = match batch {
            Ok(batch) => store(database, asked, &batch).await.map(|produced| (batch, produced)),
            Err(bad_line) => Err(bad_line),
        };
        let (batch, produced) = stored.map_err(|error| stopped(error, stored_to))?;
        stored_to = batch.last_line();
        answer.add(&produced);
        bar.inc(produced.len() as u64);
        if first {
            refused::hint_hosts(database, &asked.stream).await;
        }
    }
    bar.finish_and_clear();
    if stored_to > 0 {
        refused::hint_hosts(database, &asked.stream).await;
    }
    if !global.quiet {
        complain(&summary(&answer, started.elapsed()));
    }
    Ok(answer)
}

/// Says how far it came, so that one can go on from there.
fn stopped(error: anyhow::Error, stored_to: u64) -> anyhow::Error {
    let far = match stored_to {
        0 => "nothing is stored".to_owned(),
        line => format!("everything up to line {line} is stored; go on with `tail -n +{} FILE`", line + 1),
    };
    anyhow!("{error:#}\n{far}")
}

fn summary(answer: &Answer, elapsed: Duration) -> String {
    let rate = (answer.produced as f64 / elapsed.as_secs_f64().max(0.001)) as u64;
    let some =
        |count, what: &str| if count == 0 { String::new() } else { format!(", {}", human::counted(count, what)) };
    let duplicates = some(answer.duplicates, "duplicate");
    let superseded = if answer.superseded == 0 {
        String::new()
    } else {
        format!(", {} superseded", human::count(answer.superseded))
    };
    format!(
        "{} produced{duplicates}{superseded} in {}, {}/s",
        human::counted(answer.produced, "message"),
        human::duration(elapsed),
        human::count(rate)
    )
}

/// Stores a batch. Tries again as long as nothing of it can be stored already, or its idempotency keys make it safe.
async fn store(database: &Database, asked: &Produce, batch: &Batch) -> Result<Vec<Produced>> {
    let safe = batch.lines.iter().all(|line| line.message.idempotency_key.is_some());
    let mut attempt = 0;
    loop {
        attempt += 1;
        let failed = match try_to_store(database, asked, batch).await {
            Ok(produced) => return Ok(produced),
            Err(failed) => failed,
        };
        let again = attempt < TRIES
            && match &failed {
                Failed::Refused(_) => false,
                Failed::Before(error) => reaction(error) == Reaction::Busy,
                Failed::Commit(error) => reaction(error) == Reaction::Busy && (safe || !is_ambiguous_commit(error)),
            };
        if !again {
            return Err(match failed {
                Failed::Refused(error) => error,
                Failed::Before(error) => {
                    anyhow::Error::new(error).context(format!("store {}; nothing of it was", batch.range()))
                }
                Failed::Commit(error) => refused::unknown(error, &batch.range(), safe),
            });
        }
        tokio::time::sleep(Duration::from_millis(50 << attempt).min(WAIT_MAX)).await;
    }
}

/// Where a try ended.
enum Failed {
    /// The messages are at fault.
    Refused(anyhow::Error),
    /// Before the commit: nothing is stored.
    Before(DatabaseError),
    Commit(DatabaseError),
}

async fn try_to_store(database: &Database, asked: &Produce, batch: &Batch) -> Result<Vec<Produced>, Failed> {
    let entries: Vec<NewEntry<'_>> = batch.lines.iter().map(entry).collect();
    let mut tx = database.begin().await.map_err(Failed::Before)?;
    let produced = engine::produce(database, &mut tx, &asked.stream, &entries).await.map_err(|error| match error {
        ProduceError::Refused(refusal) => Failed::Refused(refused::batch(&refusal, batch)),
        ProduceError::Database(error) => Failed::Before(error),
    })?;
    tx.commit().await.map_err(Failed::Commit)?;
    Ok(produced)
}

fn entry(line: &Line) -> NewEntry<'_> {
    NewEntry { message: &line.message, deliver_after: line.deliver_after.as_deref() }
}
