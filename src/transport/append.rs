//! Files that only grow: dead letters, the log of applied requests.

use std::fs::File;
use std::io::{self, Read as _, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use super::Lines;
use crate::files;

/// A file to which lines are appended in durable blocks. Created with the first block.
pub struct Appender {
    path: PathBuf,
    file: Option<File>,
    /// Length of the complete blocks: the next attempt truncates what a failed one left beyond it.
    whole: u64,
    /// Size at which the file is rotated, if it is.
    rotate_bytes: Option<u64>,
}

impl Appender {
    /// One file.
    pub fn new(path: &Path) -> Self {
        Self { path: path.to_owned(), file: None, whole: 0, rotate_bytes: None }
    }

    /// Files `<dir>/<stem>-000001.jsonl` and so on, each of about `rotate_bytes`.
    pub fn rotating(dir: &Path, stem: &str, rotate_bytes: u64) -> Self {
        let number = |n: u32| dir.join(format!("{stem}-{n:06}.jsonl"));
        let last = (1..).take_while(|n| number(*n).exists()).last();
        Self { path: number(last.unwrap_or(1)), file: None, whole: 0, rotate_bytes: Some(rotate_bytes) }
    }

    fn add(&mut self, lines: &[u8]) -> io::Result<()> {
        if self.file.is_none() {
            let file = open(&self.path)?;
            self.whole = file.metadata()?.len();
            self.file = Some(file);
        }
        let Some(file) = &mut self.file else { return Ok(()) };
        if file.metadata()?.len() > self.whole {
            file.set_len(self.whole)?;
        }
        let added = file.write_all(lines).and_then(|()| file.sync_data());
        if let Err(error) = added {
            // Best effort: on a full disk others need the space.
            let _ = file.set_len(self.whole);
            return Err(error);
        }
        self.whole += lines.len() as u64;
        if self.rotate_bytes.is_some_and(|most| self.whole > most) {
            self.file = None;
            self.path = next_path(&self.path);
        }
        Ok(())
    }

    fn explain(&self, error: io::Error) -> io::Error {
        io::Error::new(error.kind(), format!("cannot write {}: {error}", self.path.display()))
    }
}

impl Lines for Appender {
    fn append(&mut self, lines: &[u8]) -> io::Result<()> {
        if lines.is_empty() {
            return Ok(());
        }
        self.add(lines).map_err(|error| self.explain(error))
    }

    fn cut(&mut self, bytes: u64) -> io::Result<u64> {
        let length = match std::fs::metadata(&self.path) {
            Ok(metadata) => metadata.len(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => 0,
            Err(error) => return Err(self.explain(error)),
        };
        if length > bytes {
            let cut = || {
                let file = File::options().write(true).open(&self.path)?;
                file.set_len(bytes)?;
                file.sync_all()
            };
            cut().map_err(|error| self.explain(error))?;
        }
        Ok(length)
    }
}

/// Opens a file at its end; terminates a line that a crash left incomplete.
fn open(path: &Path) -> io::Result<File> {
    let parent = files::parent(path);
    files::create_dirs(parent)?;
    let mut file = File::options().create(true).read(true).append(true).open(path)?;
    let length = file.seek(SeekFrom::End(0))?;
    if length > 0 {
        let mut last = [0];
        file.seek(SeekFrom::End(-1))?;
        file.read_exact(&mut last)?;
        if last != *b"\n" {
            file.write_all(b"\n")?;
        }
    }
    File::open(parent)?.sync_all()?;
    Ok(file)
}

fn next_path(path: &Path) -> PathBuf {
    let name = path.file_stem().and_then(|name| name.to_str()).unwrap_or_default();
    let (stem, number) = name.rsplit_once('-').unwrap_or((name, "0"));
    path.with_file_name(format!("{stem}-{:06}.jsonl", number.parse::<u32>().unwrap_or(0) + 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_leaves_no_torn_line() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("audit.jsonl");
        let mut log = Appender::new(&path);
        log.append(b"a\n").unwrap();
        // What a write that failed half way leaves.
        File::options().append(true).open(&path).unwrap().write_all(b"tor").unwrap();
        log.append(b"b\n").unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "a\nb\n");
        let error = Appender::new(Path::new("/dev/full")).append(b"c\n").unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::StorageFull, "{error}");
    }

    #[test]
    fn appends_cuts_mends_and_rotates() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("new/audit.jsonl");
        let mut log = Appender::new(&path);
        assert_eq!(log.cut(0).unwrap(), 0);
        log.append(b"").unwrap();
        assert!(!path.exists(), "made when something comes");
        log.append(b"a\nb\n").unwrap();
        assert_eq!(Appender::new(&path).cut(2).unwrap(), 4);
        std::fs::write(&path, "a\nto").unwrap();
        Appender::new(&path).append(b"c\n").unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "a\nto\nc\n");

        for block in ["1\n", "2\n", "3\n"] {
            Appender::rotating(dir.path(), "dead", 3).append(block.as_bytes()).unwrap();
        }
        let mut going = Appender::rotating(dir.path(), "dead", 3);
        ["4\n", "5\n"].into_iter().for_each(|block| going.append(block.as_bytes()).unwrap());
        let read = |n: u32| std::fs::read_to_string(dir.path().join(format!("dead-{n:06}.jsonl"))).unwrap_or_default();
        assert_eq!((read(1) + &read(2) + &read(3)), "1\n2\n3\n4\n5\n");
        assert!(!read(2).is_empty());
    }
}
