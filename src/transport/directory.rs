//! A directory of logs in rotated segments: `queries/*.jsonl`, `rewards/*.jsonl`, compressed or not, followed live.
//!
//! A log is named by its side, its file's name without compression and a hash of how it begins, for example
//! `queries/shop-0017.jsonl#5f3a...`. So a file that is compressed in place stays the log it was, and so does one that
//! is renamed, as long as no other file has taken on both its name and its beginning.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use super::file::{AtEnd, LogFile, Skip, fingerprint_of, is_compressed};
use crate::engine::Side;
use crate::files::{self, Stamp};
use crate::merge::{Merge, Position};
use crate::telemetry::Facts;
use crate::wire::events::Parser;

/// The logs of a directory.
pub struct Directory {
    dir: PathBuf,
    parser: Arc<Parser>,
    at_end: AtEnd,
    facts: Arc<Facts>,
    /// Positions of logs that were begun before a restart, until their file is found.
    waiting: BTreeMap<String, Position>,
    logs: BTreeMap<String, Followed>,
    seen: BTreeMap<PathBuf, Seen>,
    /// Files that cannot be read.
    skipped: BTreeMap<PathBuf, Skipped>,
}

/// A log that is being read.
struct Followed {
    index: usize,
    side: Side,
    path: PathBuf,
    /// What its file was like at the last scan; none while that cannot be read.
    stamp: Option<Stamp>,
    /// Whether the last scan did not find it.
    missed: bool,
}

/// What a file was found to be, so that it is opened only when it has changed.
struct Seen {
    stamp: Stamp,
    /// Name and fingerprint of its log; none before its first line is complete.
    log: Option<(String, u64)>,
}

/// A file that is no log at present.
struct Skipped {
    skip: Skip,
    /// What it was like then: itself and, if it is a symlink, what it points to.
    stamps: [Option<Stamp>; 2],
}

impl Directory {
    /// The logs of `dir`, resumed from `positions`. Gaps are counted in `facts`.
    pub fn new(
        dir: &Path,
        parser: Arc<Parser>,
        at_end: AtEnd,
        positions: BTreeMap<String, Position>,
        facts: Arc<Facts>,
    ) -> Self {
        let (logs, seen, skipped) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        Self { dir: dir.to_owned(), parser, at_end, facts, waiting: positions, logs, seen, skipped }
    }

    /// Creates missing directories.
    pub fn create(&self) -> io::Result<()> {
        [Side::Query, Side::Reward]
            .into_iter()
            .try_for_each(|side| crate::files::create_dirs(&self.dir.join(folder(side))))
    }

    /// Scans for changes: adds logs, wakes changed ones, tracks renamed and compressed ones. Fails only if the directory
    /// itself cannot be read; unreadable files are skipped.
    pub fn scan(&mut self, merge: &mut Merge<LogFile>) -> io::Result<()> {
        let mut files = self.list(Side::Query)?;
        files.extend(self.list(Side::Reward)?);
        let listing = Listing {
            names: files.iter().map(|file| file.name.clone()).collect(),
            paths: files.iter().map(|file| (file.path.clone(), file.name.clone())).collect(),
            skipped: self.skipped.keys().cloned().collect(),
        };
        for file in files {
            self.follow(file, &listing, merge)?;
        }
        self.keep_positions(merge);
        self.let_go(&listing, merge);
        for log in self.logs.values() {
            if merge.source(log.index).and_then(LogFile::skip).is_some_and(Skip::is_due) {
                merge.wake(log.index);
            }
        }
        Ok(())
    }

    /// Unread bytes of each log, as of the last scan.
    pub fn unread(&self, merge: &Merge<LogFile>) -> Vec<(Side, &str, u64)> {
        let bytes = |log: &Followed| {
            let length = log.stamp.map_or(0, |stamp| stamp.length);
            merge.source(log.index).map_or(0, |source| source.unread(length))
        };
        self.logs.iter().map(|(name, log)| (log.side, name.as_str(), bytes(log))).collect()
    }

    /// Skipped files, with their problems.
    pub fn skipped(&self, merge: &Merge<LogFile>) -> BTreeMap<String, String> {
        let shown = |path: &Path, skip: &Skip| (path.display().to_string(), skip.problem.clone());
        let of_log = |log: &Followed| Some(shown(&log.path, merge.source(log.index)?.skip()?));
        let logs = self.logs.values().filter_map(of_log);
        logs.chain(self.skipped.iter().map(|(path, skipped)| shown(path, &skipped.skip))).collect()
    }

    /// Positions whose files are missing.
    pub fn missing(&self) -> impl Iterator<Item = &str> {
        self.waiting.keys().map(String::as_str)
    }

    fn follow(&mut self, file: Found, listing: &Listing, merge: &mut Merge<LogFile>) -> io::Result<()> {
        let name = self.known_name(&file.name, &listing.names);
        if let Some(log) = self.logs.get_mut(&name) {
            let (index, stamp) = (log.index, file.stamp);
            if log.path != file.path && !listing.holds(&log.path, &name) {
                if let Some(source) = merge.source_mut(index) {
                    source.move_to(&file.path);
                }
                (log.path, log.stamp) = (file.path, Some(stamp));
                merge.wake(index);
            } else if log.path == file.path && log.stamp != Some(stamp) {
                log.stamp = Some(stamp);
                let consumed = merge.source(index).map_or(0, LogFile::consumed);
                if !is_compressed(&file.path) && stamp.length < consumed {
                    // Opened again as after a restart: the reader may hold a part of what is gone.
                    let position = merge.remove(index).unwrap_or_default();
                    return self.add(name, file, Some(position), merge);
                }
                merge.wake(index);
            }
            return Ok(());
        }
        let position = self.waiting.remove(&name);
        self.add(name, file, position, merge)
    }

    /// Adds a log that resumes from `position`, or from the end of its file where that is shorter.
    fn add(
        &mut self,
        name: String,
        file: Found,
        mut position: Option<Position>,
        merge: &mut Merge<LogFile>,
    ) -> io::Result<()> {
        let length = file.stamp.length;
        if let Some(position) = position.as_mut().filter(|p| p.read > length && !is_compressed(&file.path)) {
            let bytes = position.read - length;
            tracing::warn!(
                log = name.as_str(),
                bytes,
                length,
                "log file was truncated below the read position; resuming at its end, the missing bytes are a gap"
            );
            self.facts.log_gap(bytes);
            position.cut_to(length);
        }
        let mut source = self.source(&file.path, file.side, file.print, position.as_ref());
        let first_ms = if position.is_none() { source.first_ms()? } else { None };
        let index = merge.add(name.clone(), source, position, first_ms);
        let Found { side, path, stamp, .. } = file;
        self.logs.insert(name, Followed { index, side, path, stamp: Some(stamp), missed: false });
        Ok(())
    }

    fn source(&self, path: &Path, side: Side, print: u64, position: Option<&Position>) -> LogFile {
        let bytes_read = Arc::new(AtomicU64::new(0));
        LogFile::new(path, side, self.parser.clone(), self.at_end, position, bytes_read)
            .with_print(print)
            .with_facts(self.facts.clone())
    }

    /// Adds logs that were begun before a restart and whose files cannot be read at present: their positions must
    /// outlive the next snapshot.
    fn keep_positions(&mut self, merge: &mut Merge<LogFile>) {
        if self.waiting.is_empty() {
            return;
        }
        for (path, Skipped { skip, .. }) in &self.skipped {
            let side = if path.parent().is_some_and(|dir| dir.ends_with(folder(Side::Query))) {
                Side::Query
            } else {
                Side::Reward
            };
            let Some(base) = base_name(path) else { continue };
            let begins = format!("{}/{base}#", folder(side));
            let names: Vec<String> = self.waiting.keys().filter(|name| name.starts_with(&begins)).cloned().collect();
            for name in names {
                let Ok(print) = u64::from_str_radix(&name[begins.len()..], 16) else { continue };
                let position = self.waiting.remove(&name);
                let mut source = self.source(path, side, print, position.as_ref());
                source.set_skip(skip.clone());
                let index = merge.add(name.clone(), source, position, None);
                self.logs.insert(name, Followed { index, side, path: path.clone(), stamp: None, missed: false });
            }
        }
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
                tracing::info!(log = name.as_str(), "log file was deleted; dropped its position");
                merge.forget(log.index);
            }
            there
        });
        // A file that has no line yet is in no listing, but need not be opened again either.
        self.seen.retain(|path, seen| seen.log.is_none() && path.exists() || listing.paths.contains_key(path));
    }

    /// The files of a side that have at least one line, by their path.
    fn list(&mut self, side: Side) -> io::Result<Vec<Found>> {
        let (dir, mut files, mut present) = (self.dir.join(folder(side)), Vec::new(), BTreeSet::new());
        for entry in std::fs::read_dir(&dir)? {
            let path = entry?.path();
            let Some(base) = base_name(&path) else { continue };
            if self.skipped.get(&path).is_some_and(|skipped| skipped.holds(&path)) {
                present.insert(path);
                continue;
            }
            match self.look(side, &path, base) {
                Ok(found) => {
                    if self.skipped.remove(&path).is_some() {
                        tracing::info!(?path, "file in the log directory is readable again");
                    }
                    files.extend(found);
                }
                // It was rotated away since it was listed.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) if files::is_exhausted(&error) => return Err(error),
                Err(error) => {
                    self.skip(&path, &error);
                    present.insert(path);
                }
            }
        }
        self.skipped.retain(|path, _| path.parent() != Some(&dir) || present.contains(path));
        files.sort_by(|a, b| a.path.cmp(&b.path));
        Ok(files)
    }

    fn skip(&mut self, path: &Path, error: &io::Error) {
        let (stamps, before) = (stamps(path), self.skipped.get(path));
        let skip = Skip::new(error, before.map(|skipped| &skipped.skip));
        // A retry that fails in the same way is not logged again.
        if before.is_none_or(|before| before.stamps != stamps || before.skip.problem != skip.problem) {
            let problem = skip.problem.as_str();
            tracing::warn!(?path, problem, "cannot read a file in the log directory; skipping it until it changes");
        }
        self.skipped.insert(path.to_owned(), Skipped { skip, stamps });
    }

    fn look(&mut self, side: Side, path: &Path, base: &str) -> io::Result<Option<Found>> {
        let metadata = std::fs::metadata(path)?;
        files::check_regular(&metadata)?;
        let stamp = Stamp::of(&metadata);
        // Anything that differs may mean another file: a new one can have both the name and the inode of an old one.
        if let Some(seen) = self.seen.get(path).filter(|seen| seen.stamp == stamp) {
            return Ok(seen.found(side, path));
        }
        // Another file may have taken the name in between: what is noted is all of the one that is open now.
        let file = files::open(path)?;
        let stamp = Stamp::of(&file.metadata()?);
        let print = fingerprint_of(file, path, self.at_end)?;
        let seen = Seen { stamp, log: print.map(|print| (log_name(side, base, print), print)) };
        let found = seen.found(side, path);
        self.seen.insert(path.to_owned(), seen);
        Ok(found)
    }
}

impl Seen {
    fn found(&self, side: Side, path: &Path) -> Option<Found> {
        let (name, print) = self.log.clone()?;
        Some(Found { side, path: path.to_owned(), stamp: self.stamp, name, print })
    }
}

impl Skipped {
    /// Whether the file is still to be skipped.
    fn holds(&self, path: &Path) -> bool {
        !self.skip.is_due() && self.stamps == stamps(path)
    }
}

/// What a file is like, and what it points to.
fn stamps(path: &Path) -> [Option<Stamp>; 2] {
    [std::fs::symlink_metadata(path), std::fs::metadata(path)].map(|found| found.ok().map(|found| Stamp::of(&found)))
}

/// What is in the directory at present.
struct Listing {
    names: BTreeSet<String>,
    paths: BTreeMap<PathBuf, String>,
    /// Files that cannot be read at present.
    skipped: BTreeSet<PathBuf>,
}

impl Listing {
    /// Whether a file still holds the log of this name, or may: one that cannot be read is not gone.
    fn holds(&self, path: &Path, name: &str) -> bool {
        self.skipped.contains(path) || self.paths.get(path).is_some_and(|found| same_beginning(found, name))
    }
}

/// A file that holds a log.
struct Found {
    side: Side,
    path: PathBuf,
    stamp: Stamp,
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
        let at_end = AtEnd::Follow { idle: Duration::ZERO };
        (Directory::new(root, parser, at_end, state.positions, Arc::default()), merge)
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
