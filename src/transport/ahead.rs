//! Read-ahead of logs: a thread reads, decompresses and decodes while another core learns.
//!
//! Each log moves to the thread and comes back with a batch of events. While the merge consumes that batch, the thread
//! reads the next one: at most two batches of a log are in memory. The sequence of events, errors and end is the same as
//! without read-ahead.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::thread::JoinHandle;
use std::vec;

use serde_json::Value;

use super::file::{LogFile, place};
use super::{Log, TransportError};
use crate::merge::{Read, Source};

/// Limits of a batch, large enough that the transfer between threads costs little.
const BATCH_BYTES: usize = 256 << 10;
const BATCH_EVENTS: usize = 1024;

/// The thread that reads, for any number of logs. It ends with the last of them.
pub struct Reader {
    jobs: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
}

/// A log to read, and the channel to return it on.
struct Job {
    log: LogFile,
    back: SyncSender<Batch>,
}

/// What was read of a log, in order.
struct Batch {
    reads: Vec<Result<Read, TransportError>>,
    log: LogFile,
    /// Whether more is available immediately.
    more: bool,
}

/// A log that is read ahead, from its first read on.
pub struct Ahead {
    reader: Arc<Reader>,
    path: PathBuf,
    log: Where,
    reads: vec::IntoIter<Result<Read, TransportError>>,
}

/// Where a log is.
enum Where {
    Here(Box<LogFile>),
    WithReader(Receiver<Batch>),
    Ended,
    /// The reader panicked with it.
    Lost,
}

impl Reader {
    /// Starts the thread.
    pub fn start() -> io::Result<Arc<Self>> {
        let (jobs, inbox) = channel::<Job>();
        let run = move || {
            for Job { log, back } in inbox {
                // The receiver may be gone.
                let _ = back.send(Batch::read(log));
            }
        };
        let thread = std::thread::Builder::new().name("reader".to_owned()).spawn(run)?;
        Ok(Arc::new(Self { jobs: Some(jobs), thread: Some(thread) }))
    }

    /// A log that this thread reads.
    pub fn follow(self: &Arc<Self>, log: LogFile) -> Ahead {
        Ahead {
            reader: self.clone(),
            path: log.path().to_owned(),
            log: Where::Here(Box::new(log)),
            reads: Vec::new().into_iter(),
        }
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            // A waiting reader has already got an error if it panicked.
            let _ = thread.join();
        }
    }
}

impl Batch {
    fn read(mut log: LogFile) -> Self {
        let (mut reads, mut bytes) = (Vec::new(), 0);
        while bytes < BATCH_BYTES && reads.len() < BATCH_EVENTS {
            let read = log.read();
            if let Ok(Read::Event(event)) = &read {
                bytes += event.input.bytes();
                reads.push(read);
                continue;
            }
            reads.push(read);
            return Self { reads, log, more: false };
        }
        Self { reads, log, more: true }
    }
}

impl Ahead {
    /// Requests the next batch.
    fn send(&mut self, log: LogFile) -> io::Result<()> {
        let (back, batch) = sync_channel(1);
        let sent = self.reader.jobs.as_ref().and_then(|jobs| jobs.send(Job { log, back }).ok());
        self.log = if sent.is_some() { Where::WithReader(batch) } else { Where::Lost };
        sent.ok_or_else(stopped)
    }

    /// Takes a batch and requests the next one.
    fn receive(&mut self, batch: Batch) -> io::Result<()> {
        let ended = matches!(batch.reads.last(), Some(Ok(Read::End)));
        self.reads = batch.reads.into_iter();
        match batch.more {
            true => self.send(batch.log)?,
            false if ended => self.log = Where::Ended,
            false => self.log = Where::Here(Box::new(batch.log)),
        }
        Ok(())
    }
}

impl Source for Ahead {
    type Error = TransportError;

    fn read(&mut self) -> Result<Read, TransportError> {
        loop {
            if let Some(read) = self.reads.next() {
                return read;
            }
            match std::mem::replace(&mut self.log, Where::Lost) {
                Where::Here(log) => self.send(*log)?,
                Where::WithReader(batch) => {
                    let batch = batch.recv().map_err(|_| stopped())?;
                    self.receive(batch)?;
                }
                Where::Ended => {
                    self.log = Where::Ended;
                    return Ok(Read::End);
                }
                Where::Lost => return Err(stopped().into()),
            }
        }
    }
}

impl Log for Ahead {
    fn place(&self, start: u64, line: u64) -> Value {
        place(&self.path, start, line)
    }
}

fn stopped() -> io::Error {
    io::Error::other("the log reader thread has stopped")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::engine::Side;
    use crate::transport::file::AtEnd;
    use crate::wire::events::Parser;
    use std::path::Path;

    fn log(path: &Path, at_end: AtEnd) -> LogFile {
        let settings = Config::default().check().unwrap();
        LogFile::new(path, Side::Reward, Arc::new(Parser::new(&settings)), at_end, None, Arc::default())
    }

    /// All that a log gives until it ends or fails, and once more.
    fn reads(mut log: impl Log) -> Vec<String> {
        let mut shown = Vec::new();
        loop {
            let read = log.read();
            let goes_on = matches!(read, Ok(Read::Event(_)));
            shown.push(format!("{read:?}"));
            if !goes_on {
                shown.push(format!("{:?}", log.read()));
                shown.push(log.place(7, 8).to_string());
                return shown;
            }
        }
    }

    #[test]
    fn it_gives_what_the_log_gives() {
        let directory = tempfile::tempdir().unwrap();
        let event =
            |i: usize| format!(r#"{{"request_id":"r{i}","ts_ms":{i},"reward":1,"x":"{}"}}"#, "y".repeat(i % 500));
        let good: Vec<String> = (0..3 * BATCH_EVENTS).map(event).collect();
        let text = format!("{}\nbad\n\n{}\nlast", good.join("\n"), event(1));
        let whole = zstd::encode_all(text.as_bytes(), 1).unwrap();
        for (name, bytes) in [
            ("plain.jsonl", text.as_bytes()),
            ("whole.jsonl.zst", &whole),
            ("torn.jsonl.zst", &whole[..whole.len() / 2]),
            ("empty.jsonl", b""),
            ("no.jsonl.gz", b"this is none"),
        ] {
            let path = directory.path().join(name);
            std::fs::write(&path, bytes).unwrap();
            for at_end in [AtEnd::Complete, AtEnd::Stop, AtEnd::Follow { idle: std::time::Duration::ZERO }] {
                let reader = Reader::start().unwrap();
                let expected = reads(log(&path, at_end));
                assert_eq!(reads(reader.follow(log(&path, at_end))), expected, "{name} {at_end:?}");
            }
        }
        let gone = directory.path().join("gone.jsonl");
        let reader = Reader::start().unwrap();
        assert_eq!(reads(reader.follow(log(&gone, AtEnd::Complete))), reads(log(&gone, AtEnd::Complete)));
    }

    #[test]
    fn logs_that_nobody_reads_to_the_end_are_let_go() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("l.jsonl");
        std::fs::write(&path, "{}\n".repeat(10 * BATCH_EVENTS)).unwrap();
        let reader = Reader::start().unwrap();
        let mut logs: Vec<Ahead> = (0..20).map(|_| reader.follow(log(&path, AtEnd::Complete))).collect();
        drop(reader);
        for log in &mut logs {
            assert!(matches!(log.read(), Ok(Read::Event(_))));
        }
        // Returns when the thread has ended.
        drop(logs);
    }
}
