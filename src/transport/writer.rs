//! Events that a router writes: decisions and rewards, into segments of the file transport or into topics.
//!
//! Whoever has an event hands it over and learns when it is accepted. The queue is bounded; what happens when it is full
//! is the caller's choice.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::thread::JoinHandle;

use tokio::sync::{mpsc, oneshot};

use super::kafka::events::EventTopics;
use super::lock;
use crate::engine::Side;
use crate::event::Name;

/// A segment is followed by the next after so many bytes.
const SEGMENT_BYTES: u64 = 64 << 20;

/// The most events written by one call to the system.
const TOGETHER_MAX: usize = 1024;

/// An event, as it is written.
pub struct Event {
    /// Which it is.
    pub side: Side,
    /// Its space.
    pub space: Name,
    /// Its request.
    pub request_id: String,
    /// Its line of JSON, with the end.
    pub line: Vec<u8>,
}

/// Events on their way to the log.
pub enum EventWriter {
    /// To files.
    Files(FileWriter),
    /// To topics.
    Topics(EventTopics),
}

impl EventWriter {
    /// Writes events of one side, all of them or none; returns when the system or the local producer has them.
    pub async fn write(&self, events: &[Event]) -> Result<(), NotWritten> {
        match self {
            Self::Files(files) => {
                let Some(Event { side, .. }) = events.first() else { return Ok(()) };
                files.write(*side, events.iter().flat_map(|event| &event.line).copied().collect()).await
            }
            Self::Topics(topics) => topics.send(events),
        }
    }

    /// What became of events after they were accepted, where that is known: delivered, and lost.
    pub fn deliveries(&self) -> Option<(u64, u64)> {
        match self {
            Self::Files(_) => None,
            Self::Topics(topics) => Some(topics.outcomes()),
        }
    }

    /// Waits until all that was accepted is written or delivered; nothing is accepted any more.
    pub fn drain(&self) -> anyhow::Result<()> {
        match self {
            Self::Files(files) => files.finish(),
            Self::Topics(topics) => Ok(topics.drain()?),
        }
    }
}

/// Events on their way to files, which a thread writes.
pub struct FileWriter {
    /// Gone when nothing is accepted any more.
    queue: Mutex<Option<mpsc::Sender<Handed>>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

struct Handed {
    side: Side,
    line: Vec<u8>,
    done: oneshot::Sender<io::Result<()>>,
}

/// Why an event was not written.
#[derive(Debug, thiserror::Error)]
pub enum NotWritten {
    /// Too many wait already.
    #[error("the queue of events is full")]
    Full,
    /// It cannot be written.
    #[error("events cannot be written: {0}")]
    Failed(String),
}

impl FileWriter {
    /// Starts a thread that writes into `dir`, into files of its own, named after `instance`.
    pub fn start(dir: &Path, instance: &str, queue_max: usize) -> io::Result<Self> {
        let (queue, inbox) = mpsc::channel(queue_max.max(1));
        let queries = Segments::new(&dir.join("queries"), instance)?;
        let rewards = Segments::new(&dir.join("rewards"), instance)?;
        let run = move || run(inbox, queries, rewards);
        let thread = std::thread::Builder::new().name("events".to_owned()).spawn(run)?;
        Ok(Self { queue: Mutex::new(Some(queue)), thread: Mutex::new(Some(thread)) })
    }

    /// Writes lines, each with its end, all of one event or none; returns when the system has them.
    async fn write(&self, side: Side, line: Vec<u8>) -> Result<(), NotWritten> {
        let (done, written) = oneshot::channel();
        let stopped = || NotWritten::Failed("the writer has stopped".to_owned());
        let queue = lock(&self.queue).clone().ok_or_else(stopped)?;
        queue.try_send(Handed { side, line, done }).map_err(|error| match error {
            mpsc::error::TrySendError::Full(_) => NotWritten::Full,
            mpsc::error::TrySendError::Closed(_) => stopped(),
        })?;
        match written.await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => Err(NotWritten::Failed(error.to_string())),
            Err(_) => Err(stopped()),
        }
    }
}

impl FileWriter {
    /// Waits until all that was accepted is written.
    fn finish(&self) -> anyhow::Result<()> {
        drop(lock(&self.queue).take());
        let Some(thread) = lock(&self.thread).take() else { return Ok(()) };
        thread.join().map_err(|_| anyhow::anyhow!("the writer of events panicked"))
    }
}

fn run(mut inbox: mpsc::Receiver<Handed>, mut queries: Segments, mut rewards: Segments) {
    let mut together = Vec::new();
    while inbox.blocking_recv_many(&mut together, TOGETHER_MAX) > 0 {
        for (side, segments) in [(Side::Query, &mut queries), (Side::Reward, &mut rewards)] {
            let (of_side, others): (Vec<Handed>, Vec<Handed>) =
                together.drain(..).partition(|event| event.side == side);
            together = others;
            if of_side.is_empty() {
                continue;
            }
            let lines: Vec<u8> = of_side.iter().flat_map(|event| &event.line).copied().collect();
            let written = segments.append(&lines);
            for event in of_side {
                // Whoever has gone away meanwhile does not wait for it.
                let _ =
                    event.done.send(written.as_ref().map(|_| ()).map_err(|e| io::Error::new(e.kind(), e.to_string())));
            }
        }
    }
    for segments in [&mut queries, &mut rewards] {
        segments.sync();
    }
}

/// Files `<instance>-000001.jsonl` and so on.
struct Segments {
    dir: PathBuf,
    instance: String,
    number: u32,
    file: Option<File>,
    length: u64,
}

impl Segments {
    fn new(dir: &Path, instance: &str) -> io::Result<Self> {
        std::fs::create_dir_all(dir)?;
        Ok(Self { dir: dir.to_owned(), instance: instance.to_owned(), number: 0, file: None, length: 0 })
    }

    fn append(&mut self, lines: &[u8]) -> io::Result<()> {
        if self.length >= SEGMENT_BYTES {
            self.sync();
            self.file = None;
        }
        if self.file.is_none() {
            self.number += 1;
            let path = self.dir.join(format!("{}-{:06}.jsonl", self.instance, self.number));
            // Never another's file: two writers in one would tear each other's lines.
            self.file = Some(File::options().append(true).create_new(true).open(path)?);
            self.length = 0;
        }
        let Some(file) = &mut self.file else { return Ok(()) };
        let written = file.write_all(lines);
        match &written {
            Ok(()) => self.length += lines.len() as u64,
            // Part of a line may be there: nothing may follow it in this file.
            Err(_) => {
                let _ = file.set_len(self.length);
                self.file = None;
            }
        }
        written
    }

    fn sync(&mut self) {
        if let Some(Err(error)) = self.file.as_ref().map(File::sync_all) {
            tracing::warn!(%error, dir = %self.dir.display(), "events could not be synced to disk");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    fn lines(dir: &Path) -> Vec<String> {
        let mut paths: Vec<PathBuf> = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect();
        paths.sort();
        let text = |path: &PathBuf| std::fs::read_to_string(path).unwrap();
        paths.iter().flat_map(|path| text(path).lines().map(str::to_owned).collect::<Vec<_>>()).collect()
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn all_that_is_acknowledged_is_there() {
        let dir = tempfile::tempdir().unwrap();
        let writer = Arc::new(FileWriter::start(dir.path(), "router-1", 10_000).unwrap());
        let writes = (0..1000).map(|i| {
            let writer = writer.clone();
            let side = if i % 3 == 0 { Side::Reward } else { Side::Query };
            tokio::spawn(async move { writer.write(side, format!("{i}\n").into_bytes()).await.unwrap() })
        });
        for write in writes.collect::<Vec<_>>() {
            write.await.unwrap();
        }
        let mut all = lines(&dir.path().join("queries"));
        assert_eq!(all.len(), 666);
        all.extend(lines(&dir.path().join("rewards")));
        all.sort_by_key(|line| line.parse::<u32>().unwrap());
        assert_eq!(all, (0..1000).map(|i| i.to_string()).collect::<Vec<_>>());
        writer.finish().unwrap();
        assert!(writer.write(Side::Query, b"x\n".to_vec()).await.is_err());
        assert!(FileWriter::start(dir.path(), "router-1", 1).is_ok(), "its files are opened when they are needed");
    }

    #[tokio::test]
    async fn a_full_queue_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let (queue, mut inbox) = mpsc::channel(1);
        let writer = Arc::new(FileWriter { queue: Mutex::new(Some(queue)), thread: Mutex::new(None) });
        let (first, second) = (writer.clone(), writer.clone());
        let waiting = tokio::spawn(async move { first.write(Side::Query, b"1\n".to_vec()).await });
        tokio::task::yield_now().await;
        assert!(matches!(second.write(Side::Query, b"2\n".to_vec()).await, Err(NotWritten::Full)));
        drop(inbox.recv().await);
        assert!(matches!(waiting.await.unwrap(), Err(NotWritten::Failed(_))), "nobody wrote it");
        drop(dir);
    }
}
