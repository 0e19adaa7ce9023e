//! Event logs as files: JSON lines, plain, gzip (`.gz`) or zstd (`.zst`), and tables whose rows are read as such lines.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read as _, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use flate2::read::MultiGzDecoder;
use serde_json::{Value, json};
use xxhash_rust::xxh3::xxh3_64;

use super::table::{self, Format};
use super::{Log, TransportError};
use crate::engine::{Input, Side};
use crate::event_time::CONFIRMATIONS;
use crate::files;
use crate::merge::{Position, Read, Source, Sourced};
use crate::telemetry::Facts;
use crate::wire::events::{Bad, Parser};
use crate::wire::rows::Columns;

/// What the end of a file means.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum AtEnd {
    /// The log is complete, and so is its last line.
    Complete,
    /// Stop at the current end; a last line without a newline is left unread.
    Stop,
    /// Keep reading; after `idle` without growth, the merge stops waiting for this file.
    Follow {
        /// How long the merge waits.
        idle: Duration,
    },
}

/// A log, read line by line. It is opened when it is first read.
pub struct LogFile {
    path: PathBuf,
    side: Side,
    parser: Arc<Parser>,
    at_end: AtEnd,
    bytes_read: Arc<AtomicU64>,
    /// How its file must begin, if that is known: another may have taken its name since.
    print: Option<u64>,
    /// Where each row holds a query and its reward: what the IDs of rows without one begin with.
    examples: Option<String>,
    lines: Option<Lines>,
    /// Where the next line begins, uncompressed, and how many lines there are before it.
    start: u64,
    line: u64,
    grew: Instant,
    ended: bool,
    /// How much of a compressed file was read when it was closed, as it is on disk.
    passed: u64,
    /// Why it is not read at present.
    skip: Option<Skip>,
    facts: Arc<Facts>,
}

/// Why a file is skipped, and until when: until it changes, or until the next attempt where that may help without.
#[derive(Debug, Clone)]
pub struct Skip {
    /// What is wrong with the file.
    pub problem: String,
    pause: Option<Duration>,
    since: Instant,
}

impl Skip {
    /// After this error; `before` is why it was skipped until now.
    pub fn new(error: &io::Error, before: Option<&Self>) -> Self {
        let longer = before.and_then(|skip| skip.pause).map_or(SKIP_MIN, |pause| (2 * pause).min(SKIP_MAX));
        // Other errors are caused by the content, which stays the same until the file is written.
        let pause = error.raw_os_error().map(|_| longer);
        Self { problem: error.to_string(), pause, since: Instant::now() }
    }

    /// Whether another attempt may help although the file has not changed.
    pub fn is_due(&self) -> bool {
        self.pause.is_some_and(|pause| self.since.elapsed() >= pause)
    }
}

/// How long a file that cannot be read is skipped, at first and at most.
const SKIP_MIN: Duration = Duration::from_secs(1);
const SKIP_MAX: Duration = Duration::from_secs(60);

/// Number of bytes without an event after which a reader returns, so that it can be stopped.
const BUDGET_BYTES: usize = 16 << 20;

/// An open file, and the beginning of a line whose end has not come yet.
struct Lines {
    reader: Box<dyn BufRead + Send>,
    /// The same file, which knows how far it was read.
    file: File,
    kept: Vec<u8>,
    length: usize,
    /// Decompressed bytes before the next line that were read before.
    known: u64,
}

/// How far reading on got.
enum Reached {
    LineEnd,
    FileEnd,
    /// The budget is used up.
    Pause,
}

/// What the next line is.
enum Line {
    /// Where it begins, its content without its end, and its length; of an oversized one only the first bytes.
    Next(u64, Vec<u8>, usize),
    /// There is none yet.
    None,
    /// It takes longer than one call may.
    Pause,
}

/// What tells a log from others of the same name: a hash of how it begins. `None` before its first line is there.
pub fn fingerprint(path: &Path, at_end: AtEnd) -> io::Result<Option<u64>> {
    fingerprint_of(files::open(path)?, path, at_end)
}

/// The [`fingerprint`] of an open file.
pub fn fingerprint_of(file: File, path: &Path, at_end: AtEnd) -> io::Result<Option<u64>> {
    const PREFIX: usize = 4096;
    let mut start = Vec::new();
    // The first line of a table is its header, which many tables share.
    match Format::of(path) {
        Format::Json => {}
        Format::Csv => {
            decompressed(file, path, Arc::default())?.take(PREFIX as u64).read_to_end(&mut start)?;
            return Ok((!start.is_empty()).then(|| xxh3_64(&start)));
        }
        Format::Parquet => {
            // What it holds is described at its end.
            let length = file.metadata()?.len();
            (&file).seek(SeekFrom::Start(length.saturating_sub(PREFIX as u64)))?;
            (&file).read_to_end(&mut start)?;
            return Ok((!start.is_empty()).then(|| xxh3_64(&start)));
        }
    }
    let read = decompressed(file, path, Arc::default())?.take(PREFIX as u64).read_until(b'\n', &mut start);
    let torn = match read {
        Err(error) if is_torn(&error, at_end) => true,
        Err(error) => return Err(error),
        Ok(_) => !start.ends_with(b"\n") && start.len() < PREFIX && at_end != AtEnd::Complete,
    };
    let line = start.strip_suffix(b"\n").unwrap_or(&start);
    Ok((!torn && !start.is_empty()).then(|| xxh3_64(line)))
}

/// The rows of a log as lines of JSON, with all their columns.
pub fn rows(path: &Path) -> io::Result<Box<dyn BufRead + Send>> {
    let (file, bytes_read) = (files::open(path)?, Arc::default());
    table::open(Format::of(path), file, &Columns::default(), &bytes_read, |file| {
        decompressed(file, path, bytes_read.clone())
    })
}

impl LogFile {
    /// A log that is read from `position` on. What is read of the file is added to `bytes_read`.
    pub fn new(
        path: &Path,
        side: Side,
        parser: Arc<Parser>,
        at_end: AtEnd,
        position: Option<&Position>,
        bytes_read: Arc<AtomicU64>,
    ) -> Self {
        let (start, line) = position.map_or((0, 0), |position| (position.floor, position.floor_line));
        Self {
            path: path.to_owned(),
            side,
            parser,
            at_end,
            bytes_read,
            print: None,
            examples: None,
            lines: None,
            start,
            line,
            grew: Instant::now(),
            ended: false,
            passed: 0,
            skip: None,
            facts: Arc::default(),
        }
    }

    /// The same, which counts what is missing in `facts`.
    pub fn with_facts(self, facts: Arc<Facts>) -> Self {
        Self { facts, ..self }
    }

    /// The same, where each row holds a query and its reward. Both sides of the file are logs of their own. IDs of rows
    /// without one begin with `prefix`; rows without a time are a second apart.
    pub fn of_examples(self, prefix: String) -> Self {
        Self { examples: Some(prefix), ..self }
    }

    /// The same, read only from a file with this [`fingerprint`]: under another it waits for [`move_to`](Self::move_to).
    pub fn with_print(self, print: u64) -> Self {
        Self { print: Some(print), ..self }
    }

    /// The earliest time among the first good events, as far as they come soon; the log is then closed again. Several,
    /// since one may have a wrong timestamp: a log that seems to begin in the far future would be read last.
    pub fn first_ms(&mut self) -> io::Result<Option<i64>> {
        let mut first = Self::new(&self.path, self.side, self.parser.clone(), self.at_end, None, Arc::default());
        (first.print, first.examples) = (self.print, self.examples.clone());
        let bytes_max = if self.at_end == AtEnd::Complete { u64::MAX } else { BUDGET_BYTES as u64 };
        let mut times = Vec::new();
        while times.len() < CONFIRMATIONS && first.start < bytes_max {
            match first.advance() {
                Ok(Read::Event(event)) => times.extend(event.input.key().map(|key| key.0)),
                Ok(_) => break,
                Err(error) if self.is_fatal(&error) => return Err(error),
                // Whatever is wrong is reported when the log itself is read.
                Err(_) => break,
            }
        }
        Ok(times.into_iter().min())
    }

    /// Continues in a renamed or compressed file with the same content.
    pub fn move_to(&mut self, path: &Path) {
        self.path = path.to_owned();
        (self.lines, self.passed) = (None, 0);
    }

    /// Why its file is skipped at present.
    pub fn skip(&self) -> Option<&Skip> {
        self.skip.as_ref()
    }

    /// Marks it as skipped for a reason that was reported already.
    pub fn set_skip(&mut self, skip: Skip) {
        self.skip = Some(skip);
    }

    /// How many bytes of a plain file were read, with the beginning of a line whose end has not come yet.
    pub fn consumed(&self) -> u64 {
        self.start + self.lines.as_ref().map_or(0, |lines| lines.length as u64)
    }

    /// Bytes that are not read yet of its file, which has this length: up to the next line, or of a compressed file, as
    /// it is on disk, up to what is decompressed.
    pub fn unread(&self, length: u64) -> u64 {
        let read =
            if is_compressed(&self.path) { self.lines.as_ref().map_or(self.passed, Lines::passed) } else { self.start };
        length.saturating_sub(read)
    }

    /// Where the file is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The next line that is not blank.
    fn next_line(&mut self) -> io::Result<Line> {
        let most = self.parser.bytes_max();
        let mut budget = if self.at_end == AtEnd::Complete { usize::MAX } else { BUDGET_BYTES };
        loop {
            let lines = match &mut self.lines {
                Some(lines) => lines,
                None => {
                    let file = self.open()?;
                    let bytes_read = self.bytes_read.clone();
                    let columns = Columns::of(self.parser.fields(self.side), &self.parser.outcome_fields(), self.side);
                    self.lines.insert(Lines::open(file, &self.path, &columns, self.start, self.at_end, bytes_read)?)
                }
            };
            let complete = match lines.read_on(most, &mut budget)? {
                Reached::Pause => return Ok(Line::Pause),
                Reached::LineEnd => true,
                Reached::FileEnd if lines.known > 0 => return Err(shorter(self.start)),
                Reached::FileEnd => false,
            };
            if !complete && (lines.length == 0 || self.at_end != AtEnd::Complete) {
                return Ok(Line::None);
            }
            let (mut line, length) = (std::mem::take(&mut lines.kept), std::mem::take(&mut lines.length));
            let start = self.start;
            if start == 0 && line.starts_with(BYTE_ORDER_MARK) {
                line.drain(..BYTE_ORDER_MARK.len());
            }
            self.start += (length + usize::from(complete)) as u64;
            self.line += 1;
            if length > most || !line.iter().all(u8::is_ascii_whitespace) {
                return Ok(Line::Next(start, line, length));
            }
        }
    }

    /// Opens its file, if it is still the one that it was found to be.
    fn open(&self) -> io::Result<File> {
        let mut file = files::open(&self.path)?;
        if self.print.is_some() {
            if fingerprint_of(file.try_clone()?, &self.path, self.at_end)? != self.print {
                return Err(io::Error::new(io::ErrorKind::NotFound, "another file replaced it"));
            }
            file.rewind()?;
        }
        Ok(file)
    }

    /// Reads on, without regard to what was wrong before.
    fn advance(&mut self) -> io::Result<Read> {
        let most = self.parser.bytes_max();
        loop {
            let (start, line, length) = match self.next_line()? {
                Line::Next(start, line, length) => (start, line, length),
                Line::None => return Ok(self.ended()),
                Line::Pause => return Ok(Read::Awaited),
            };
            self.grew = Instant::now();
            let input = match &self.examples {
                _ if length > most => Some(Input::bad(self.side, line, Bad::Oversized { bytes: length, most })),
                Some(prefix) => self.parse_example(prefix, line),
                None => Some(Input::parse(&self.parser, self.side, line, None)),
            };
            if let Some(input) = input {
                return Ok(Read::Event(Sourced { input, start, end: self.start, line: self.line, origin: None }));
            }
        }
    }

    /// One side of a row, completed by an ID and a time where it has none. None for the reward of a row without one, and
    /// of a row that is malformed as a whole, which the query side reports.
    fn parse_example(&self, prefix: &str, line: Vec<u8>) -> Option<Input> {
        let fields = self.parser.fields(self.side);
        let mut input = Input::parse(&self.parser, self.side, line, None);
        for _ in 0..2 {
            let (field, value) = match input.problem() {
                Some(Bad::MissingField(field)) if self.side == Side::Reward && *field == fields.reward => return None,
                Some(Bad::NotJson(_)) if self.side == Side::Reward => return None,
                Some(Bad::MissingField(field)) if *field == fields.request_id => {
                    (field, json!(format!("{prefix}-{}", self.line)))
                }
                Some(Bad::MissingField(field)) if *field == fields.ts_ms => (field, json!(1000 * self.line)),
                _ => break,
            };
            let Some(completed) = with_field(input.content(), field, &value) else { break };
            input = Input::parse(&self.parser, self.side, completed, None);
        }
        Some(input)
    }

    /// Whether the error is fatal: the file was requested by name, or other files would fail in the same way.
    fn is_fatal(&self, error: &io::Error) -> bool {
        self.at_end == AtEnd::Complete || files::is_exhausted(error)
    }

    /// Skips the file. Logged once, not for every retry.
    fn skip_after(&mut self, error: &io::Error) -> Read {
        let skip = Skip::new(error, self.skip.as_ref());
        if self.skip.as_ref().is_none_or(|before| before.problem != skip.problem) {
            let (path, line) = (&self.path, self.line);
            tracing::warn!(?path, line, problem = skip.problem, "cannot read log file; skipping it until it changes");
            if is_shorter(error) {
                self.facts.log_gap(0);
            }
        }
        self.skip = Some(skip);
        self.ended = self.at_end == AtEnd::Stop;
        if self.ended { Read::End } else { Read::Idle }
    }

    fn ended(&mut self) -> Read {
        self.passed = self.lines.as_ref().map_or(self.passed, Lines::passed);
        match self.at_end {
            AtEnd::Complete | AtEnd::Stop => {
                (self.lines, self.ended) = (None, true);
                Read::End
            }
            AtEnd::Follow { idle } if self.grew.elapsed() < idle => Read::Pending,
            AtEnd::Follow { .. } => {
                // Thousands of rotated files are idle: none of them holds a handle.
                self.lines = None;
                Read::Idle
            }
        }
    }
}

impl Source for LogFile {
    type Error = TransportError;

    fn read(&mut self) -> Result<Read, TransportError> {
        if self.ended {
            return Ok(Read::End);
        }
        match self.advance() {
            Ok(read) => {
                if self.skip.is_some() && !matches!(read, Read::Pending | Read::Awaited) {
                    tracing::info!(path = ?self.path, "log file is readable again");
                    self.skip = None;
                }
                Ok(read)
            }
            Err(error) if is_torn(&error, self.at_end) => {
                let read = self.ended();
                self.lines = None;
                Ok(read)
            }
            Err(error) => {
                // A failed decoder or a partly read line cannot be resumed: the line is read again.
                self.lines = None;
                if self.is_fatal(&error) {
                    let place = format!("{:?}, after line {}: {error}", self.path, self.line);
                    return Err(io::Error::new(error.kind(), place).into());
                }
                Ok(self.skip_after(&error))
            }
        }
    }
}

impl Log for LogFile {
    fn place(&self, start: u64, line: u64) -> Value {
        place(&self.path, start, line)
    }
}

/// The place of an event in a file.
pub(super) fn place(path: &Path, start: u64, line: u64) -> Value {
    json!({"source": path, "offset": start, "line": line})
}

impl Lines {
    fn open(
        mut file: File,
        path: &Path,
        columns: &Columns,
        start: u64,
        at_end: AtEnd,
        bytes_read: Arc<AtomicU64>,
    ) -> io::Result<Self> {
        let (compressed, same) = (is_compressed(path), file.try_clone()?);
        let reader = if compressed || start == 0 {
            table::open(Format::of(path), file, columns, &bytes_read, |file| {
                decompressed(file, path, bytes_read.clone())
            })?
        } else {
            if file.metadata()?.len() < start {
                // A log that is followed gets another position when its directory is next listed.
                let cut = io::Error::new(io::ErrorKind::NotFound, "the file was truncated");
                return Err(if at_end == AtEnd::Complete { shorter(start) } else { cut });
            }
            file.seek(SeekFrom::Start(start))?;
            bytes_read.fetch_add(start, Ordering::Relaxed);
            Box::new(BufReader::with_capacity(BUFFER, Counted { file, bytes_read }))
        };
        let known = if compressed { start } else { 0 };
        Ok(Self { reader, file: same, kept: Vec::new(), length: 0, known })
    }

    /// How much of the file was read, as it is on disk.
    fn passed(&self) -> u64 {
        // Nothing is moved by asking, and a file that cannot tell is no reason to stop.
        (&self.file).stream_position().unwrap_or(0)
    }

    /// Reads on in the line that was begun. Of a line beyond `most` bytes only the first are kept.
    fn read_on(&mut self, most: usize, budget: &mut usize) -> io::Result<Reached> {
        while *budget > 0 {
            let buffer = self.reader.fill_buf()?;
            if buffer.is_empty() {
                return Ok(Reached::FileEnd);
            }
            if self.known > 0 {
                let used = buffer.len().min(usize::try_from(self.known).unwrap_or(usize::MAX));
                self.reader.consume(used);
                self.known -= used as u64;
                *budget = budget.saturating_sub(used);
                continue;
            }
            let (used, complete) = match memchr::memchr(b'\n', buffer) {
                Some(end) => (end, true),
                None => (buffer.len(), false),
            };
            let room = most.saturating_sub(self.kept.len()).min(used);
            self.kept.extend_from_slice(&buffer[..room]);
            self.length += used;
            self.reader.consume(used + usize::from(complete));
            *budget = budget.saturating_sub(used + 1);
            if complete {
                return Ok(Reached::LineEnd);
            }
        }
        Ok(Reached::Pause)
    }
}

const BUFFER: usize = 1 << 16;

/// Some programs write it at the beginning of text files.
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// A row with one more field; none if that would have to be within another.
fn with_field(row: &[u8], field: &str, value: &Value) -> Option<Vec<u8>> {
    let key = field.strip_prefix('/').filter(|key| !key.contains('/'))?.replace("~1", "/").replace("~0", "~");
    let rest = row.trim_ascii_start().strip_prefix(b"{")?;
    let comma = if rest.trim_ascii_start().starts_with(b"}") { "" } else { "," };
    Some([format!("{{{}:{value}{comma}", json!(key)).as_bytes(), rest].concat())
}

fn decompressed(file: File, path: &Path, bytes_read: Arc<AtomicU64>) -> io::Result<Box<dyn BufRead + Send>> {
    let file = Counted { file, bytes_read };
    Ok(match extension(path) {
        Some("gz") => Box::new(BufReader::with_capacity(BUFFER, MultiGzDecoder::new(BufReader::new(file)))),
        Some("zst") => Box::new(BufReader::with_capacity(BUFFER, zstd::Decoder::new(file)?)),
        _ => Box::new(BufReader::with_capacity(BUFFER, file)),
    })
}

/// Whether positions are not those of the file itself.
pub(super) fn is_compressed(path: &Path) -> bool {
    matches!(extension(path), Some("gz" | "zst")) || Format::of(path) != Format::Json
}

fn extension(path: &Path) -> Option<&str> {
    path.extension().and_then(|extension| extension.to_str())
}

/// Whether a compressed file may still be written, or was just removed.
fn is_torn(error: &io::Error, at_end: AtEnd) -> bool {
    at_end != AtEnd::Complete && matches!(error.kind(), io::ErrorKind::UnexpectedEof | io::ErrorKind::NotFound)
}

/// The file is shorter than its read position.
#[derive(Debug, thiserror::Error)]
#[error("the file is shorter than its read position of {0} bytes: restore the file, or rebuild the store by replay")]
struct Shorter(u64);

fn shorter(start: u64) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, Shorter(start))
}

fn is_shorter(error: &io::Error) -> bool {
    error.get_ref().is_some_and(|error| error.is::<Shorter>())
}

struct Counted {
    file: File,
    bytes_read: Arc<AtomicU64>,
}

impl io::Read for Counted {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read(buffer)?;
        self.bytes_read.fetch_add(read as u64, Ordering::Relaxed);
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use std::io::Write;

    fn parser() -> Arc<Parser> {
        let mut config = Config::default();
        config.events.bytes_max = 64;
        let settings = config.check().unwrap();
        Arc::new(Parser::new(&settings))
    }

    fn log(path: &Path, at_end: AtEnd, position: Option<&Position>) -> (LogFile, Arc<AtomicU64>) {
        let count = Arc::default();
        (LogFile::new(path, Side::Reward, parser(), at_end, position, Arc::clone(&count)), count)
    }

    fn events(log: &mut LogFile) -> Vec<(u64, u64, u64, bool)> {
        let event = || match log.read().unwrap() {
            Read::Event(event) => Some((event.line, event.start, event.end, event.input.key().is_some())),
            _ => None,
        };
        std::iter::from_fn(event).collect()
    }

    fn file(name: &str, bytes: &[u8]) -> (tempfile::TempDir, PathBuf) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        (directory, path)
    }

    const GOOD: &str = r#"{"request_id":"r","ts_ms":1,"reward":1}"#;

    #[test]
    fn lines_of_plain_and_compressed_files() {
        let long = "x".repeat(500_000);
        let text = format!("{GOOD}\n\n  \n{long}\n{GOOD}\r\nbad\n{GOOD}");
        let gzip = {
            let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
            gzip.write_all(text.as_bytes()).unwrap();
            gzip.finish().unwrap()
        };
        let zst = zstd::encode_all(text.as_bytes(), 1).unwrap();
        let after = GOOD.len() as u64 + 5;
        let (n, long) = (GOOD.len() as u64, long.len() as u64);
        let expected = [
            (1, 0, n + 1, true),
            (4, after, after + long + 1, false),
            (5, after + long + 1, after + long + n + 3, true),
            (6, after + long + n + 3, after + long + n + 7, false),
            (7, after + long + n + 7, after + long + n + n + 7, true),
        ];
        let mut prints = Vec::new();
        for (name, bytes) in [("l.jsonl", text.as_bytes()), ("l.jsonl.gz", &gzip), ("l.jsonl.zst", &zst)] {
            let (_directory, path) = file(name, bytes);
            let (mut whole, count) = log(&path, AtEnd::Complete, None);
            assert_eq!(events(&mut whole), expected);
            assert_eq!(count.load(Ordering::Relaxed), bytes.len() as u64);
            assert_eq!(whole.first_ms().unwrap(), Some(1));
            let (mut stopped, _) = log(&path, AtEnd::Stop, None);
            assert_eq!(events(&mut stopped), expected[..4], "a last line without its end is left");
            let floor = expected[3].1;
            let position = Position { floor, floor_line: 5, ..Position::default() };
            let (mut rest, _) = log(&path, AtEnd::Complete, Some(&position));
            assert_eq!(events(&mut rest), expected[3..]);
            prints.push(fingerprint(&path, AtEnd::Stop).unwrap());
        }
        assert!(prints[0].is_some() && prints.iter().all(|print| *print == prints[0]));
        assert_eq!(events(&mut log(&file("l.jsonl", b"").1, AtEnd::Stop, None).0), []);
    }

    #[test]
    fn a_torn_line_is_waited_for() {
        let (_directory, path) = file("l.jsonl", b"");
        let follow = AtEnd::Follow { idle: Duration::from_secs(3600) };
        let (mut live, _) = log(&path, follow, None);
        let mut writer = File::options().append(true).open(&path).unwrap();
        for (part, fingerprinted) in [(&GOOD[..20], false), (&GOOD[20..], false), ("\n", true)] {
            assert_eq!(live.read().unwrap(), Read::Pending);
            writer.write_all(part.as_bytes()).unwrap();
            assert_eq!(fingerprint(&path, follow).unwrap().is_some(), fingerprinted);
        }
        assert_eq!(events(&mut live), [(1, 0, GOOD.len() as u64 + 1, true)]);
        let (mut idle, _) = log(&path, AtEnd::Follow { idle: Duration::ZERO }, None);
        assert_eq!(events(&mut idle).len(), 1);
        assert_eq!(idle.read().unwrap(), Read::Idle);
        writeln!(writer, "{GOOD}").unwrap();
        assert_eq!(events(&mut idle).len(), 1, "it goes on when it has grown");
    }

    #[test]
    fn a_compressed_file_that_is_not_complete_is_waited_for() {
        let text = format!("{GOOD}\n").repeat(3);
        let zst = zstd::encode_all(text.as_bytes(), 1).unwrap();
        let (_directory, path) = file("l.jsonl.zst", &zst[..zst.len() - 5]);
        let (mut live, _) = log(&path, AtEnd::Follow { idle: Duration::ZERO }, None);
        let early = events(&mut live).len();
        std::fs::write(&path, &zst).unwrap();
        assert_eq!(early + events(&mut live).len(), 3);
        std::fs::write(&path, &zst[..zst.len() - 5]).unwrap();
        let (mut whole, _) = log(&path, AtEnd::Complete, None);
        assert!((0..4).any(|_| whole.read().is_err()), "where it must be complete, it is an error");
    }

    #[test]
    fn a_file_that_was_cut_is_an_error_only_where_it_was_asked_for() {
        let zst = zstd::encode_all(&b"abc\n"[..], 1).unwrap();
        for (name, bytes) in [("l.jsonl", &b"abc\n"[..]), ("l.jsonl.zst", &zst)] {
            let (_directory, path) = file(name, bytes);
            let position = Position { floor: 100, ..Position::default() };
            let error = log(&path, AtEnd::Complete, Some(&position)).0.read().unwrap_err();
            assert!(error.to_string().contains("shorter than its read position of 100 bytes"), "{error}");
            let facts = Arc::new(Facts::default());
            let (mut followed, _) = log(&path, AtEnd::Follow { idle: Duration::ZERO }, Some(&position));
            followed = followed.with_facts(facts.clone());
            assert_eq!([followed.read().unwrap(), followed.read().unwrap()], [Read::Idle, Read::Idle]);
            assert_eq!(
                facts.log_gaps().0,
                u64::from(name.ends_with(".zst")),
                "a plain file is the directory's to count"
            );
        }
    }

    #[test]
    fn a_corrupt_file_is_skipped_until_it_changes() {
        let text =
            (0..20_000).map(|i| format!("{{\"request_id\":\"r{i}\",\"ts_ms\":1,\"reward\":1}}\n")).collect::<String>();
        let whole = zstd::encode_all(text.as_bytes(), 1).unwrap();
        let mut corrupt = whole.clone();
        let middle = corrupt.len() / 2;
        corrupt[middle..middle + 64].fill(0xff);
        let (_directory, path) = file("l.jsonl.zst", &corrupt);
        let (mut live, _) = log(&path, AtEnd::Follow { idle: Duration::ZERO }, None);
        let before = events(&mut live).len();
        assert!(before < 20_000 && live.skip().is_some_and(|skip| !skip.is_due()));
        assert_eq!(live.read().unwrap(), Read::Idle);
        std::fs::write(&path, &whole).unwrap();
        assert_eq!(before + events(&mut live).len(), 20_000);
        assert!(live.skip().is_none());
        let (mut stopped, _) = log(&file("l.jsonl.gz", b"this is none").1, AtEnd::Stop, None);
        assert_eq!(stopped.read().unwrap(), Read::End);
    }

    #[test]
    fn what_takes_long_can_be_stopped() {
        let blank = "\n".repeat(BUDGET_BYTES);
        let text = format!("{GOOD}\n{blank}{GOOD}\n");
        for (name, bytes) in
            [("l.jsonl", text.clone().into_bytes()), ("l.jsonl.zst", zstd::encode_all(text.as_bytes(), 1).unwrap())]
        {
            let (_directory, path) = file(name, &bytes);
            let follow = AtEnd::Follow { idle: Duration::ZERO };
            let (mut live, _) = log(&path, follow, None);
            let reads: Vec<Read> = (0..4).map(|_| live.read().unwrap()).collect();
            assert!(matches!(reads[..], [Read::Event(_), Read::Awaited, Read::Event(_), Read::Idle]), "{reads:?}");
            // Read again from near its end, decompressed bytes that are known count too.
            let position = Position { floor: text.len() as u64 - 1, ..Position::default() };
            let (mut rest, _) = log(&path, follow, Some(&position));
            let expected = if name.ends_with(".zst") { Read::Awaited } else { Read::Idle };
            assert_eq!(rest.read().unwrap(), expected);
        }
    }
}
