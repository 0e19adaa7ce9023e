//! A directory of logs in rotated segments: `queries/*.jsonl`, `rewards/*.jsonl`, compressed or not, followed live.
//!
//! A log is named by its side, its file's name without compression and a hash of how it begins, for example
//! `queries/shop-0017.jsonl#5f3a...`. So a file that is compressed in place stays the log it was, and so does one that
//! is renamed, as long as no other file has taken on both its name and its beginning.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use super::file::{AtEnd, LogFile, fingerprint_of};
use crate::engine::Side;
use crate::merge::{Merge, Position};
use crate::wire::events::Parser;

/// The logs of a directory.
pub struct Directory {
    dir: PathBuf,
    parser: Arc<Parser>,
    at_end: AtEnd,
    /// Positions of logs that were begun before a restart, until their file is found.
    waiting: BTreeMap<String, Position>,
    logs: BTreeMap<String, Followed>,
    seen: BTreeMap<PathBuf, Seen>,
}

/// A log that is being read.
struct Followed {
    index: usize,
    side: Side,
    path: PathBuf,
    length: u64,
    /// Whether the last scan did not find it.
    missed: bool,
}

/// What a file was found to be, so that it is not opened at every scan.
struct Seen {
    inode: u64,
    length: u64,
    name: String,
    print: u64,
}

impl Directory {
    /// The logs of `dir`, which go on from `positions`.
    pub fn new(dir: &Path, parser: Arc<Parser>, at_end: AtEnd, positions: BTreeMap<String, Position>) -> Self {
        let (logs, seen) = (BTreeMap::new(), BTreeMap::new());
        Self { dir: dir.to_owned(), parser, at_end, waiting: positions, logs, seen }
    }

    /// Makes the directories that are not there.
    pub fn create(&self) -> io::Result<()> {
        [Side::Query, Side::Reward]
            .into_iter()
            .try_for_each(|side| std::fs::create_dir_all(self.dir.join(folder(side))))
    }

    /// Looks for what is new: adds logs, wakes those that have grown, follows those that were renamed or compressed.
    pub fn scan(&mut self, merge: &mut Merge<LogFile>) -> io::Result<()> {
        let mut files = self.list(Side::Query)?;
        files.extend(self.list(Side::Reward)?);
        let listing = Listing {
            names: files.iter().map(|file| file.name.clone()).collect(),
            paths: files.iter().map(|file| (file.path.clone(), file.name.clone())).collect(),
        };
        for file in files {
            self.follow(file, &listing, merge)?;
        }
        self.let_go(&listing, merge);
        Ok(())
    }

    /// Bytes of each log that are not read yet, by what its file was like at the last scan.
    pub fn unread(&self, merge: &Merge<LogFile>) -> Vec<(Side, &str, u64)> {
        let bytes = |log: &Followed| merge.source(log.index).map_or(0, |source| source.unread(log.length));
        self.logs.iter().map(|(name, log)| (log.side, name.as_str(), bytes(log))).collect()
    }

    /// Positions whose files are gone.
    pub fn missing(&self) -> impl Iterator<Item = &str> {
        self.waiting.keys().map(String::as_str)
    }

    fn follow(&mut self, file: Found, listing: &Listing, merge: &mut Merge<LogFile>) -> io::Result<()> {
        let name = self.known_name(&file.name, &listing.names);
        if let Some(log) = self.logs.get_mut(&name) {
            if log.path != file.path && !listing.holds(&log.path, &name) {
                if let Some(source) = merge.source_mut(log.index) {
                    source.move_to(&file.path);
                }
                (log.path, log.length) = (file.path, file.length);
                merge.wake(log.index);
            } else if log.path == file.path && log.length != file.length {
                log.length = file.length;
                merge.wake(log.index);
            }
            return Ok(());
        }
        let position = self.waiting.remove(&name);
        let mut source = LogFile::new(
            &file.path,
            file.side,
            self.parser.clone(),
            self.at_end,
            position.as_ref(),
            Arc::new(AtomicU64::new(0)),
        )
        .with_print(file.print);
        let first_ms = if position.is_none() { source.first_ms()? } else { None };
        let index = merge.add(name.clone(), source, position, first_ms);
        let Found { side, path, length, .. } = file;
        self.logs.insert(name, Followed { index, side, path, length, missed: false });
        Ok(())
    }

    /// The name under which a file is known: its own, or that of a log with the same beginning that is gone.
    fn known_name(&self, name: &str, present: &BTreeSet<String>) -> String {
        let is_known = |name: &str| self.logs.contains_key(name) || self.waiting.contains_key(name);
        if is_known(name) {
            return name.to_owned();
        }
        let known = self.logs.keys().chain(self.waiting.keys());
        let mut renamed = known.filter(|known| same_beginning(known, name) && !present.contains(*known));
        renamed.next().map_or_else(|| name.to_owned(), Clone::clone)
    }

    fn let_go(&mut self, listing: &Listing, merge: &mut Merge<LogFile>) {
        self.logs.retain(|name, log| {
            // A listing can miss a file that is renamed meanwhile: only the second time it is gone.
            let missed = !listing.holds(&log.path, name);
            let there = !(std::mem::replace(&mut log.missed, missed) && missed);
            if !there {
                tracing::info!(log = name.as_str(), "the file is gone: its position is forgotten");
                merge.forget(log.index);
            }
            there
        });
        self.seen.retain(|path, _| listing.paths.contains_key(path));
    }

    /// The files of a side that have at least one line, by their path.
    fn list(&mut self, side: Side) -> io::Result<Vec<Found>> {
        let mut files = Vec::new();
        for entry in std::fs::read_dir(self.dir.join(folder(side)))? {
            let path = entry?.path();
            let Some(base) = base_name(&path) else { continue };
            match self.look(side, &path, base) {
                Ok(Some(found)) => files.push(found),
                Ok(None) => {}
                // It was rotated away since it was listed.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(io::Error::new(error.kind(), format!("{}: {error}", path.display()))),
            }
        }
        files.sort_by(|a, b| a.path.cmp(&b.path));
        Ok(files)
    }

    fn look(&mut self, side: Side, path: &Path, base: &str) -> io::Result<Option<Found>> {
        let metadata = std::fs::metadata(path)?;
        let (inode, length) = (metadata.ino(), metadata.len());
        let same = |seen: &&mut Seen| seen.inode == inode && seen.length <= length;
        if let Some(seen) = self.seen.get_mut(path).filter(same) {
            seen.length = length;
            return Ok(Some(Found { side, path: path.to_owned(), length, name: seen.name.clone(), print: seen.print }));
        }
        // Another file may have taken the name in between: what is noted is all of the one that is open now.
        let file = File::open(path)?;
        let metadata = file.metadata()?;
        let (inode, length) = (metadata.ino(), metadata.len());
        let Some(print) = fingerprint_of(file, path, self.at_end)? else { return Ok(None) };
        let name = log_name(side, base, print);
        self.seen.insert(path.to_owned(), Seen { inode, length, name: name.clone(), print });
        Ok(Some(Found { side, path: path.to_owned(), length, name, print }))
    }
}

/// What is in the directory at present.
struct Listing {
    names: BTreeSet<String>,
    paths: BTreeMap<PathBuf, String>,
}

impl Listing {
    /// Whether a file still holds the log of this name.
    fn holds(&self, path: &Path, name: &str) -> bool {
        self.paths.get(path).is_some_and(|found| same_beginning(found, name))
    }
}

/// A file that holds a log.
struct Found {
    side: Side,
    path: PathBuf,
    length: u64,
    name: String,
    print: u64,
}

/// The name of a log: its side, its file's name without compression, and a hash of how it begins.
pub fn log_name(side: Side, base: &str, print: u64) -> String {
    format!("{}/{base}#{print:016x}", folder(side))
}

/// A log's file name without compression; `None` if it is no log.
pub fn base_name(path: &Path) -> Option<&str> {
    let name = path.file_name()?.to_str()?;
    let base = name.strip_suffix(".gz").or_else(|| name.strip_suffix(".zst")).unwrap_or(name);
    (base.ends_with(".jsonl") && !base.starts_with('.')).then_some(base)
}

fn folder(side: Side) -> &'static str {
    match side {
        Side::Query => "queries",
        Side::Reward => "rewards",
    }
}

fn same_beginning(a: &str, b: &str) -> bool {
    let parts = |name: &str| Some((name.split_once('/')?.0.to_owned(), name.rsplit_once('#')?.1.to_owned()));
    parts(a).is_some() && parts(a) == parts(b)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::merge::{MergeState, Next};
    use std::io::Write;
    use std::time::Duration;

    struct Fixture {
        root: tempfile::TempDir,
        directory: Directory,
        merge: Merge<LogFile>,
    }

    impl Fixture {
        fn new() -> Self {
            let root = tempfile::tempdir().unwrap();
            let (directory, merge) = open(root.path(), MergeState::default());
            directory.create().unwrap();
            Self { root, directory, merge }
        }

        fn restart(&mut self) {
            (self.directory, self.merge) = open(self.root.path(), self.merge.state());
        }

        fn path(&self, name: &str) -> PathBuf {
            self.root.path().join("rewards").join(name)
        }

        fn add(&self, name: &str, ids: std::ops::Range<u32>) {
            let mut file = std::fs::File::options().create(true).append(true).open(self.path(name)).unwrap();
            for id in ids {
                writeln!(file, r#"{{"request_id":"r{id}","ts_ms":{id},"reward":1}}"#).unwrap();
            }
        }

        fn rename(&self, from: &str, to: &str) {
            std::fs::rename(self.path(from), self.path(to)).unwrap();
        }

        /// Ids of all events that are there now.
        fn read(&mut self) -> Vec<u32> {
            self.directory.scan(&mut self.merge).unwrap();
            let mut ids = Vec::new();
            while let Next::Event(event, _) = self.merge.next().unwrap() {
                ids.push(event.input.key().unwrap().0 as u32);
            }
            ids
        }
    }

    fn open(root: &Path, state: MergeState) -> (Directory, Merge<LogFile>) {
        let settings = Config::default().check().unwrap();
        let parser = Arc::new(Parser::new(&settings));
        let merge = Merge::new(10, &state);
        (Directory::new(root, parser, AtEnd::Follow { idle: Duration::ZERO }, state.positions), merge)
    }

    #[test]
    fn grows_rotates_and_restarts_without_loss_or_repeat() {
        for restart in [false, true] {
            let mut fixture = Fixture::new();
            let pause = |fixture: &mut Fixture| {
                if restart {
                    fixture.restart();
                }
            };
            assert!(fixture.read().is_empty());
            fixture.add("a.jsonl", 0..3);
            assert_eq!(fixture.read(), [0, 1, 2]);
            pause(&mut fixture);
            fixture.add("a.jsonl", 3..5);
            assert_eq!(fixture.read(), [3, 4]);
            pause(&mut fixture);
            // A new segment, while the old one still grows.
            fixture.add("b.jsonl", 6..7);
            fixture.add("a.jsonl", 5..6);
            assert_eq!(fixture.read(), [5, 6]);
            pause(&mut fixture);
            // Rotation by renaming, and a new file of the old name.
            fixture.rename("a.jsonl", "a.1.jsonl");
            fixture.add("a.1.jsonl", 7..8);
            fixture.add("a.jsonl", 8..10);
            assert_eq!(fixture.read(), [7, 8, 9]);
            pause(&mut fixture);
            // Compression in place, of a file that has something unread.
            fixture.add("b.jsonl", 10..12);
            let bytes = std::fs::read(fixture.path("b.jsonl")).unwrap();
            std::fs::write(fixture.path("b.jsonl.zst"), zstd::encode_all(&bytes[..], 1).unwrap()).unwrap();
            std::fs::remove_file(fixture.path("b.jsonl")).unwrap();
            assert_eq!(fixture.read(), [10, 11]);
            pause(&mut fixture);
            std::fs::remove_file(fixture.path("a.1.jsonl")).unwrap();
            assert!(fixture.read().is_empty() && fixture.read().is_empty());
            pause(&mut fixture);
            assert_eq!(fixture.merge.state().positions.len(), if restart { 0 } else { 2 });
            assert!(fixture.read().is_empty());
        }
    }

    #[test]
    fn it_is_known_how_much_is_not_read_yet() {
        for compressed in [false, true] {
            let mut fixture = Fixture::new();
            let unread = |fixture: &Fixture| -> u64 {
                fixture.directory.unread(&fixture.merge).iter().map(|(_, _, bytes)| bytes).sum()
            };
            assert_eq!(unread(&fixture), 0);
            fixture.add("a.jsonl", 0..10_000);
            if compressed {
                let bytes = std::fs::read(fixture.path("a.jsonl")).unwrap();
                // Not so small that all of it is read at once.
                std::fs::write(fixture.path("a.jsonl.zst"), zstd::encode_all(&bytes[..], -7).unwrap()).unwrap();
                std::fs::remove_file(fixture.path("a.jsonl")).unwrap();
            }
            let path = fixture.path(if compressed { "a.jsonl.zst" } else { "a.jsonl" });
            let length = std::fs::metadata(path).unwrap().len();
            fixture.directory.scan(&mut fixture.merge).unwrap();
            let [(side, name, bytes)] = fixture.directory.unread(&fixture.merge)[..] else { panic!("one log") };
            assert_eq!((side, bytes), (Side::Reward, length), "{name}");
            for _ in 0..100 {
                assert!(matches!(fixture.merge.next().unwrap(), Next::Event(..)));
            }
            assert!((1..length).contains(&unread(&fixture)), "{} of {length}", unread(&fixture));
            assert_eq!(fixture.read().len(), 9_900);
            assert_eq!(unread(&fixture), 0);
            if !compressed {
                fixture.add("a.jsonl", 10_000..10_001);
                std::fs::write(fixture.path("b.jsonl"), "{\"request_id\":\"b\",\"ts_ms\":9,\"reward\":1}\n{\"re")
                    .unwrap();
                assert_eq!(fixture.read().len(), 2);
                assert_eq!(unread(&fixture), 4, "a line that has no end yet");
            }
            fixture.restart();
            fixture.read();
            assert_eq!(unread(&fixture), if compressed { 0 } else { 4 });
        }
    }

    #[test]
    fn a_name_that_another_file_takes_is_not_mistaken() {
        let mut fixture = Fixture::new();
        fixture.add("a.jsonl", 0..3);
        assert_eq!(fixture.read(), [0, 1, 2]);
        // It grows, is seen, and before it is read again it is renamed; a new file has its name.
        fixture.add("a.jsonl", 3..5);
        fixture.directory.scan(&mut fixture.merge).unwrap();
        fixture.rename("a.jsonl", "a.1.jsonl");
        fixture.add("a.jsonl", 5..25);
        assert_eq!(fixture.merge.next().unwrap(), Next::End);
        assert_eq!(fixture.read(), (3..25).collect::<Vec<_>>());
        // A listing that misses a file that is being renamed.
        fixture.rename("a.1.jsonl", "a.moving");
        assert!(fixture.read().is_empty());
        fixture.rename("a.moving", "a.2.jsonl");
        assert!(fixture.read().is_empty());
    }

    #[test]
    fn files_that_begin_alike_are_different_logs() {
        let mut fixture = Fixture::new();
        fixture.add("a.jsonl", 0..3);
        fixture.add("b.jsonl", 0..4);
        assert_eq!(fixture.read().len(), 7);
        fixture.restart();
        fixture.add("b.jsonl", 4..5);
        assert_eq!(fixture.read(), [4]);
    }

    #[test]
    fn what_is_no_log_is_left_alone() {
        let mut fixture = Fixture::new();
        fixture.add("a.jsonl.tmp", 0..3);
        fixture.add(".hidden.jsonl", 0..3);
        std::fs::write(fixture.path("empty.jsonl"), "").unwrap();
        std::fs::write(fixture.path("torn.jsonl"), "{\"request_id\"").unwrap();
        assert!(fixture.read().is_empty());
    }
}
