//! Writes a router's events, decisions and rewards, to segments of the file transport or to topics.
//!
//! A caller submits an event and waits until it is accepted. The queue is bounded; the caller decides what to do when it is
//! full. An event in a file is accepted once the operating system has it: no request waits for the disk. Another thread
//! syncs the files, so a power failure loses at most the last [`SYNC_EVERY`].

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc as std_mpsc;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, oneshot};

use super::kafka::events::EventTopics;
use super::lock;
use crate::engine::Side;
use crate::event::Name;
use crate::files;

/// Maximum time until written events are synced to disk.
pub const SYNC_EVERY: Duration = Duration::from_secs(1);

/// Size at which a segment is rotated.
const SEGMENT_BYTES: u64 = 64 << 20;

/// Maximum number of events per write call.
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

    /// Numbers of accepted events that were delivered and lost, where known.
    pub fn deliveries(&self) -> Option<(u64, u64)> {
        match self {
            Self::Files(_) => None,
            Self::Topics(topics) => Some(topics.outcomes()),
        }
    }

    /// Stops accepting events and waits until all accepted ones are written or delivered.
    pub fn drain(&self) -> anyhow::Result<()> {
        match self {
            Self::Files(files) => files.finish(),
            Self::Topics(topics) => Ok(topics.drain()?),
        }
    }
}

/// Events on their way to files, which a thread writes.
pub struct FileWriter {
    /// `None` once no more events are accepted.
    queue: Mutex<Option<mpsc::Sender<Handed>>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

struct Handed {
    side: Side,
    line: Vec<u8>,
    done: oneshot::Sender<io::Result<()>>,
}

/// Why an event was not written.
#[derive(Debug, thiserror::Error)]
pub enum NotWritten {
    /// The queue is full.
    #[error("the event queue is full")]
    Full,
    /// It cannot be written.
    #[error("cannot write events: {0}")]
    Failed(String),
}

impl FileWriter {
    /// Starts a thread that writes into `dir`, into files of its own, named after `instance`.
    pub fn start(dir: &Path, instance: &str, queue_max: usize) -> io::Result<Self> {
        let (queue, inbox) = mpsc::channel(queue_max.max(1));
        let (unsynced, written) = std_mpsc::channel();
        let queries = Segments::new(&dir.join("queries"), instance, unsynced.clone())?;
        let rewards = Segments::new(&dir.join("rewards"), instance, unsynced)?;
        let thread = |name: &str| std::thread::Builder::new().name(name.to_owned());
        let writer = thread("events").spawn(move || run(inbox, queries, rewards))?;
        let syncer = thread("sync").spawn(move || sync_at_intervals(&written, SYNC_EVERY, |segment| segment.sync()))?;
        Ok(Self { queue: Mutex::new(Some(queue)), threads: Mutex::new(vec![writer, syncer]) })
    }

    /// Writes lines, each with its end; returns when the system has them. If it fails, some of several may be there.
    async fn write(&self, side: Side, line: Vec<u8>) -> Result<(), NotWritten> {
        let (done, written) = oneshot::channel();
        let stopped = || NotWritten::Failed("the event writer has stopped".to_owned());
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
    /// Waits until all that was accepted is written and synced.
    fn finish(&self) -> anyhow::Result<()> {
        drop(lock(&self.queue).take());
        let mut threads = std::mem::take(&mut *lock(&self.threads)).into_iter();
        threads.try_for_each(|thread| thread.join().map_err(|_| anyhow::anyhow!("the event writer thread panicked")))
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
            let (written, problem) = segments.append(&lines);
            let mut end = 0;
            for event in of_side {
                end += event.line.len();
                let outcome = match &problem {
                    Some(problem) if end > written => Err(io::Error::new(problem.kind(), problem.to_string())),
                    _ => Ok(()),
                };
                // The caller may have gone away meanwhile.
                let _ = event.done.send(outcome);
            }
        }
    }
}

/// Files `<instance>-000001.jsonl` and so on.
struct Segments {
    dir: PathBuf,
    instance: String,
    number: u32,
    current: Option<Arc<Segment>>,
    length: u64,
    /// Where segments go that have something to sync.
    unsynced: std_mpsc::Sender<Arc<Segment>>,
}

/// One file.
struct Segment {
    path: PathBuf,
    file: File,
    /// Whether it is queued for a sync.
    waits: AtomicBool,
    /// Whether its name is durable.
    is_listed: AtomicBool,
}

impl Segments {
    fn new(dir: &Path, instance: &str, unsynced: std_mpsc::Sender<Arc<Segment>>) -> io::Result<Self> {
        files::create_dirs(dir)?;
        let (dir, instance) = (dir.to_owned(), instance.to_owned());
        Ok(Self { dir, instance, number: 0, current: None, length: 0, unsynced })
    }

    /// Appends lines. Returns how many bytes of them are there, which is always whole lines, and why not all.
    ///
    /// A disk that is full can take a part. Lines that are whole stay: a learner may have read them. The beginning of a
    /// line is cut off, which no learner has used, and the segment ends there: a reader may be in the middle of that line.
    fn append(&mut self, lines: &[u8]) -> (usize, Option<io::Error>) {
        let segment = match self.segment() {
            Ok(segment) => segment,
            Err(error) => return (0, Some(error)),
        };
        let (written, problem) = write_counted(&segment.file, lines);
        let whole = memchr::memrchr(b'\n', &lines[..written]).map_or(0, |end| end + 1);
        self.length += whole as u64;
        if whole > 0 && !segment.waits.swap(true, Ordering::Relaxed) {
            // Fails only when the process ends.
            let _ = self.unsynced.send(segment.clone());
        }
        if written > whole {
            let _ = segment.file.set_len(self.length);
            if self.length == 0 && std::fs::remove_file(&segment.path).is_ok() {
                self.number -= 1;
            }
            self.current = None;
        }
        (whole, problem)
    }

    /// The segment to write to: one that a failed write has left as it was is used again.
    fn segment(&mut self) -> io::Result<Arc<Segment>> {
        if let Some(segment) = self.current.as_ref().filter(|_| self.length < SEGMENT_BYTES) {
            return Ok(segment.clone());
        }
        let path = self.dir.join(format!("{}-{:06}.jsonl", self.instance, self.number + 1));
        // Never another's file: two writers in one would tear each other's lines.
        let file = File::options().append(true).create_new(true).open(&path)?;
        let segment =
            Arc::new(Segment { path, file, waits: AtomicBool::new(false), is_listed: AtomicBool::new(false) });
        (self.number, self.length, self.current) = (self.number + 1, 0, Some(segment.clone()));
        Ok(segment)
    }
}

impl Segment {
    fn sync(&self) -> io::Result<()> {
        // First: what is written meanwhile is for the next time.
        self.waits.store(false, Ordering::Relaxed);
        self.file.sync_data()?;
        if !self.is_listed.load(Ordering::Relaxed) {
            File::open(files::parent(&self.path))?.sync_all()?;
            self.is_listed.store(true, Ordering::Relaxed);
        }
        Ok(())
    }
}

/// Writes as much as the system takes.
fn write_counted(mut file: &File, bytes: &[u8]) -> (usize, Option<io::Error>) {
    let mut written = 0;
    while written < bytes.len() {
        match file.write(&bytes[written..]) {
            Ok(0) => return (written, Some(io::ErrorKind::WriteZero.into())),
            Ok(more) => written += more,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return (written, Some(error)),
        }
    }
    (written, None)
}

/// Syncs what comes, each not later than `every` after it came, until all senders are gone.
fn sync_at_intervals<T>(unsynced: &std_mpsc::Receiver<T>, every: Duration, sync: impl Fn(&T) -> io::Result<()>) {
    let mut fails = false;
    while let Ok(first) = unsynced.recv() {
        let (mut all, due) = (vec![first], Instant::now() + every);
        while let Ok(next) = unsynced.recv_timeout(due.saturating_duration_since(Instant::now())) {
            all.push(next);
        }
        let problem = all.iter().filter_map(|segment| sync(segment).err()).last();
        match &problem {
            Some(error) if !fails => {
                tracing::error!(%error, "cannot sync events to disk; a power failure would lose them")
            }
            None if fails => tracing::info!("events are synced to disk again"),
            _ => {}
        }
        fails = problem.is_some();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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

    #[test]
    fn what_is_written_is_synced_in_time_and_at_the_end() {
        let (sender, receiver) = std_mpsc::channel();
        let (told, synced) = std_mpsc::channel();
        let syncer = std::thread::spawn(move || {
            let sync = |number: &u32| told.send(*number).map_err(io::Error::other);
            sync_at_intervals(&receiver, Duration::from_millis(1), sync);
        });
        sender.send(1).unwrap();
        assert_eq!(synced.recv().unwrap(), 1, "while the sender is there");
        sender.send(2).unwrap();
        drop(sender);
        syncer.join().unwrap();
        assert_eq!(synced.iter().collect::<Vec<_>>(), [2]);
        let dir = tempfile::tempdir().unwrap();
        let (unsynced, written) = std_mpsc::channel();
        let mut segments = Segments::new(dir.path(), "r", unsynced).unwrap();
        for _ in 0..3 {
            assert_eq!(segments.append(b"1\n").0, 2);
        }
        let segment = written.try_recv().unwrap();
        assert!(written.try_recv().is_err(), "it waits already");
        segment.sync().unwrap();
        segments.append(b"2\n");
        assert!(written.try_recv().is_ok());
    }

    #[tokio::test]
    async fn a_full_queue_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let (queue, mut inbox) = mpsc::channel(1);
        let writer = Arc::new(FileWriter { queue: Mutex::new(Some(queue)), threads: Mutex::default() });
        let (first, second) = (writer.clone(), writer.clone());
        let waiting = tokio::spawn(async move { first.write(Side::Query, b"1\n".to_vec()).await });
        tokio::task::yield_now().await;
        assert!(matches!(second.write(Side::Query, b"2\n".to_vec()).await, Err(NotWritten::Full)));
        drop(inbox.recv().await);
        assert!(matches!(waiting.await.unwrap(), Err(NotWritten::Failed(_))), "nobody wrote it");
        drop(dir);
    }
}
