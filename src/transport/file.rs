//! Event logs as files of JSON lines: plain, gzip (`.gz`) or zstd (`.zst`).

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use flate2::read::MultiGzDecoder;

use crate::engine::{Input, Side};
use crate::merge::Sourced;
use crate::wire::events::Parser;

/// A log that is read from its beginning to its end, event by event.
pub struct LogFile {
    path: PathBuf,
    lines: Box<dyn BufRead + Send>,
    side: Side,
    parser: Parser,
    log: usize,
    line: u64,
}

impl LogFile {
    /// Opens a log, the `log`-th of those that are merged. What is read of the file is added to `bytes_read`.
    pub fn open(path: &Path, side: Side, parser: Parser, log: usize, bytes_read: Arc<AtomicU64>) -> io::Result<Self> {
        let file = Counted { file: File::open(path)?, bytes_read };
        let lines: Box<dyn BufRead + Send> = match path.extension().and_then(|extension| extension.to_str()) {
            Some("gz") => Box::new(BufReader::new(MultiGzDecoder::new(BufReader::new(file)))),
            Some("zst") => Box::new(BufReader::new(zstd::Decoder::new(file)?)),
            _ => Box::new(BufReader::with_capacity(1 << 16, file)),
        };
        Ok(Self { path: path.to_owned(), lines, side, parser, log, line: 0 })
    }

    /// The next line that is not blank, without its end; of an oversized one only the first `bytes_max` bytes, with its
    /// whole length.
    fn next_line(&mut self) -> io::Result<Option<(Vec<u8>, usize)>> {
        loop {
            let most = self.parser.bytes_max();
            let mut line = Vec::new();
            let read = self.lines.by_ref().take(most as u64 + 1).read_until(b'\n', &mut line)?;
            if read == 0 {
                return Ok(None);
            }
            self.line += 1;
            let mut length = read;
            if line.last() == Some(&b'\n') {
                line.pop();
                length -= 1;
            } else if read > most {
                length += skip_line(&mut self.lines)?;
                line.truncate(most);
            }
            if !line.iter().all(u8::is_ascii_whitespace) || length > most {
                return Ok(Some((line, length)));
            }
        }
    }
}

impl Iterator for LogFile {
    type Item = io::Result<Sourced>;

    fn next(&mut self) -> Option<io::Result<Sourced>> {
        let most = self.parser.bytes_max();
        let (line, length) = match self.next_line() {
            Ok(line) => line?,
            Err(error) => {
                let place = format!("{}, after line {}: {error}", self.path.display(), self.line);
                return Some(Err(io::Error::new(error.kind(), place)));
            }
        };
        let input = if length > most {
            Input::oversized(self.side, line, length, most)
        } else {
            Input::parse(&self.parser, self.side, line)
        };
        Some(Ok(Sourced { input, log: self.log, line: self.line }))
    }
}

/// Skips the rest of a line and returns its length without the end.
fn skip_line(reader: &mut dyn BufRead) -> io::Result<usize> {
    let mut length = 0;
    loop {
        let buffer = reader.fill_buf()?;
        if buffer.is_empty() {
            return Ok(length);
        }
        let (used, ended) = match buffer.iter().position(|&byte| byte == b'\n') {
            Some(end) => (end + 1, true),
            None => (buffer.len(), false),
        };
        length += used - usize::from(ended);
        reader.consume(used);
        if ended {
            return Ok(length);
        }
    }
}

struct Counted {
    file: File,
    bytes_read: Arc<AtomicU64>,
}

impl Read for Counted {
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

    fn read(name: &str, bytes: &[u8]) -> Vec<(u64, bool)> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        let mut config = Config::default();
        config.events.bytes_max = 64;
        let settings = config.check().unwrap();
        let parser = Parser::new(settings.events, settings.reward, settings.missing_propensities);
        let count = Arc::new(AtomicU64::new(0));
        let log = LogFile::open(&path, Side::Reward, parser, 0, count.clone()).unwrap();
        let events = log.map(|event| event.map(|e| (e.line, e.input.key().is_some())).unwrap()).collect();
        assert_eq!(count.load(Ordering::Relaxed), bytes.len() as u64);
        events
    }

    #[test]
    fn lines_of_plain_and_compressed_files() {
        let good = r#"{"request_id":"r","ts_ms":1,"reward":1}"#;
        let long = "x".repeat(500_000);
        let text = format!("{good}\n\n  \n{long}\n{good}\r\nbad\n{good}");
        let expected = [(1, true), (4, false), (5, true), (6, false), (7, true)];
        assert_eq!(read("log.jsonl", text.as_bytes()), expected);
        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        gzip.write_all(text.as_bytes()).unwrap();
        assert_eq!(read("log.jsonl.gz", &gzip.finish().unwrap()), expected);
        assert_eq!(read("log.jsonl.zst", &zstd::encode_all(text.as_bytes(), 1).unwrap()), expected);
        assert_eq!(read("log.jsonl", b""), []);
    }
}
