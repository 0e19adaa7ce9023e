//! The store on redb, one file: the default.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use redb::{
    Builder, Database, DatabaseError, Durability, ReadableDatabase, StorageBackend, StorageError, TableDefinition,
    TableError,
};

use super::dir::{Access, aside, cannot_read, cannot_write, damaged};
use super::{Batch, SnapshotStore, StoreError};
use crate::failpoint;
use crate::fatal::contain;
use crate::files;

const TABLE: TableDefinition<&[u8], &[u8]> = TableDefinition::new("snapshots");
const CACHE_BYTES: usize = 64 << 20;

/// A redb database.
pub struct Redb {
    dir: PathBuf,
    handle: Handle,
}

enum Handle {
    Whole(Database),
    /// The database opens, but fails its integrity check. This handle can still read. Reopening the file, even read-only,
    /// would require a repair, which fails.
    Damaged(Database),
    /// The database cannot be opened at all.
    Unreadable(String),
    /// A write has failed: redb refuses all further use of the handle.
    Failed,
    Closed,
}

/// Why a database cannot be opened.
enum Refused {
    /// The operating system refuses: the database may be intact.
    System(String),
    Damaged(String),
}

impl Refused {
    fn new(error: &DatabaseError) -> Self {
        match error {
            DatabaseError::Storage(StorageError::Io(io)) if io.raw_os_error().is_some() => {
                Self::System(error.to_string())
            }
            _ => Self::Damaged(error.to_string()),
        }
    }

    fn in_dir(self, dir: &Path) -> StoreError {
        match self {
            Self::System(problem) => StoreError::Write { path: dir.display().to_string(), problem },
            Self::Damaged(problem) => damaged(dir, &problem),
        }
    }
}

impl Redb {
    /// Opens the database in `dir`; `is_new` if it may not exist yet.
    pub fn open(dir: &Path, is_new: bool, access: Access) -> Result<Self, StoreError> {
        let path = file(dir);
        let opened = if !is_new && std::fs::metadata(&path).map_or(0, |metadata| metadata.len()) == 0 {
            Err(Refused::Damaged("the file db.redb is missing or empty".to_owned()))
        } else {
            if is_new && !path.exists() {
                make(dir).map_err(|problem| StoreError::Write { path: dir.display().to_string(), problem })?;
            }
            open_checked(&path, access)
        };
        let handle = match opened {
            Err(Refused::Damaged(problem)) if access.accepts_unreadable() => Handle::Unreadable(problem),
            Err(Refused::System(problem)) if access == Access::Read => {
                return Err(StoreError::Read { path: dir.display().to_string(), problem });
            }
            opened => opened.map_err(|refused| refused.in_dir(dir))?,
        };
        if is_new {
            let sync = || File::open(dir)?.sync_all();
            sync().map_err(|error| cannot_write(dir, &error))?;
        }
        Ok(Self { dir: dir.to_owned(), handle })
    }

    fn scan_table(database: &Database, prefix: &[u8], each: &mut dyn FnMut(&[u8], &[u8])) -> Result<(), redb::Error> {
        let table = match database.begin_read()?.open_table(TABLE) {
            Err(TableError::TableDoesNotExist(_)) => return Ok(()),
            table => table?,
        };
        for entry in table.range(prefix..)? {
            let (key, value) = entry?;
            if !key.value().starts_with(prefix) {
                break;
            }
            each(key.value(), value.value());
        }
        Ok(())
    }

    fn write(database: &Database, batch: &Batch) -> Result<(), redb::Error> {
        let mut transaction = database.begin_write()?;
        transaction.set_durability(Durability::Immediate)?;
        {
            let mut table = transaction.open_table(TABLE)?;
            for key in &batch.deletes {
                table.remove(&key[..])?;
            }
            for (key, value) in &batch.puts {
                table.insert(&key[..], &value[..])?;
            }
        }
        failpoint::reach("mid-persist");
        transaction.commit()?;
        Ok(())
    }
}

impl SnapshotStore for Redb {
    fn place(&self) -> String {
        self.dir.display().to_string()
    }

    fn value_bytes_max(&self) -> usize {
        // A page is a power of two: with its key and redb's own bytes such a value fills one, and wastes nothing.
        32_400
    }

    fn scan(&self, prefix: &[u8], each: &mut dyn FnMut(&[u8], &[u8])) -> Result<(), StoreError> {
        let scanned = contain(|| match &self.handle {
            Handle::Whole(database) | Handle::Damaged(database) => Self::scan_table(database, prefix, each),
            Handle::Unreadable(problem) => Err(redb::Error::Corrupted(problem.clone())),
            Handle::Failed => Err(redb::Error::PreviousIo),
            Handle::Closed => Ok(()),
        });
        match scanned {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error @ redb::Error::PreviousIo)) => Err(cannot_write(&self.dir, &error)),
            Ok(Err(redb::Error::Io(error))) if error.raw_os_error().is_some() => Err(cannot_read(&self.dir, &error)),
            Ok(Err(error)) => Err(damaged(&self.dir, &error.to_string())),
            Err(_) => Err(damaged(&self.dir, "the database panicked during a read")),
        }
    }

    fn apply(&mut self, batch: Batch) -> Result<(), StoreError> {
        let Handle::Whole(database) = &self.handle else {
            return Err(damaged(&self.dir, "the database is damaged and was not recreated"));
        };
        // On a full disk redb may panic in the middle of a page: the next open rolls the transaction back.
        let written = contain(|| Self::write(database, &batch));
        let failed = match written {
            Ok(Ok(())) => return Ok(()),
            Ok(Err(error)) => cannot_write(&self.dir, &error),
            Err(_) => cannot_write(&self.dir, &std::io::Error::other("the database panicked during a write")),
        };
        self.handle = Handle::Failed;
        Err(failed)
    }

    fn recover(&mut self) -> Result<(), StoreError> {
        if matches!(self.handle, Handle::Failed) {
            match open_checked(&file(&self.dir), Access::Write) {
                Ok(handle @ Handle::Whole(_)) => self.handle = handle,
                Ok(_) => return Err(damaged(&self.dir, "the database is damaged after a failed write")),
                Err(refused) => return Err(refused.in_dir(&self.dir)),
            }
        }
        Ok(())
    }

    fn is_damaged(&self) -> bool {
        matches!(self.handle, Handle::Damaged(_) | Handle::Unreadable(_))
    }

    fn start_over(&mut self) -> Result<(), StoreError> {
        self.handle = Handle::Closed;
        let path = file(&self.dir);
        if path.exists() {
            let aside = aside(&path);
            std::fs::rename(&path, &aside).map_err(|error| cannot_write(&self.dir, &error))?;
            tracing::error!(kept = %aside.display(), "store is damaged; copying its intact snapshots to a new one");
        }
        make(&self.dir).map_err(|problem| StoreError::Write { path: self.dir.display().to_string(), problem })?;
        self.handle = open_checked(&path, Access::Write).map_err(|refused| refused.in_dir(&self.dir))?;
        Ok(())
    }
}

/// Opens a database. redb reports damaged bytes as errors; a panic is treated as one too.
fn open_checked(path: &Path, access: Access) -> Result<Handle, Refused> {
    let open = || {
        let opened = match access {
            Access::Read => {
                let overlay = Overlay::new(path).map_err(|error| Refused::System(error.to_string()))?;
                builder().create_with_backend(overlay)
            }
            _ => builder().create(path),
        };
        let mut database = opened.map_err(|error| Refused::new(&error))?;
        match database.check_integrity().map_err(|error| Refused::new(&error)) {
            Ok(_) => Ok(Handle::Whole(database)),
            Err(refused @ Refused::System(_)) => Err(refused),
            Err(Refused::Damaged(_)) => Ok(Handle::Damaged(database)),
        }
    };
    let panicked = |_| Err(Refused::Damaged("the database panicked while it was opened".to_owned()));
    contain(open).unwrap_or_else(panicked)
}

/// A database file that is only read. redb recovers a database that was not closed, which writes: those pages stay in memory.
#[derive(Debug)]
struct Overlay {
    file: File,
    state: Mutex<Written>,
}

/// What was written over a file.
#[derive(Debug)]
struct Written {
    length: u64,
    /// Bytes of the file that still count: it may have been truncated.
    file_length: u64,
    /// Blocks by number.
    blocks: BTreeMap<u64, Vec<u8>>,
}

const BLOCK: u64 = 4096;

impl Overlay {
    fn new(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        let length = file.metadata()?.len();
        Ok(Self { file, state: Mutex::new(Written { length, file_length: length, blocks: BTreeMap::new() }) })
    }

    /// A block: as written, else as in the file, zero beyond its end.
    fn block(&self, state: &Written, number: u64) -> io::Result<Vec<u8>> {
        if let Some(block) = state.blocks.get(&number) {
            return Ok(block.clone());
        }
        let mut block = vec![0; BLOCK as usize];
        let there = state.file_length.saturating_sub(number * BLOCK).min(BLOCK) as usize;
        self.file.read_exact_at(&mut block[..there], number * BLOCK)?;
        Ok(block)
    }

    /// Calls `each` with the part of each block that the range covers, and the matching part of the range.
    fn blocks(
        offset: u64,
        length: usize,
        mut each: impl FnMut(u64, std::ops::Range<usize>, std::ops::Range<usize>) -> io::Result<()>,
    ) -> io::Result<()> {
        let mut done = 0;
        while done < length {
            let at = offset + done as u64;
            let within = (at % BLOCK) as usize;
            let take = (BLOCK as usize - within).min(length - done);
            each(at / BLOCK, within..within + take, done..done + take)?;
            done += take;
        }
        Ok(())
    }
}

impl StorageBackend for Overlay {
    fn len(&self) -> io::Result<u64> {
        Ok(self.state.lock().unwrap_or_else(PoisonError::into_inner).length)
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if offset.checked_add(out.len() as u64).is_none_or(|end| end > state.length) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        if state.blocks.is_empty() && offset + out.len() as u64 <= state.file_length {
            return self.file.read_exact_at(out, offset);
        }
        Self::blocks(offset, out.len(), |number, within, of| {
            out[of].copy_from_slice(&self.block(&state, number)?[within]);
            Ok(())
        })
    }

    fn set_len(&self, length: u64) -> io::Result<()> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if length < state.length {
            // What lies beyond must read as zero if the storage grows again.
            let (last, rest) = (length / BLOCK, (length % BLOCK) as usize);
            if rest > 0 {
                let mut block = self.block(&state, last)?;
                block[rest..].fill(0);
                state.blocks.insert(last, block);
            }
            state.blocks.retain(|number, _| number * BLOCK < length);
            state.file_length = state.file_length.min(length);
        }
        state.length = length;
        Ok(())
    }

    fn sync_data(&self) -> io::Result<()> {
        Ok(())
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.length = state.length.max(offset + data.len() as u64);
        Self::blocks(offset, data.len(), |number, within, of| {
            let mut block = self.block(&state, number)?;
            block[within].copy_from_slice(&data[of]);
            state.blocks.insert(number, block);
            Ok(())
        })
    }
}

fn builder() -> Builder {
    let mut builder = Database::builder();
    builder.set_cache_size(CACHE_BYTES);
    builder
}

/// Creates an empty database under another name, then renames it: redb cannot open one that a crash left incomplete.
fn make(dir: &Path) -> Result<(), String> {
    let beside = dir.join("db.redb.new");
    let new = files::create_temporary(&beside).map_err(|error| error.to_string())?;
    drop(builder().create_file(new).map_err(|error| error.to_string())?);
    std::fs::rename(&beside, file(dir)).map_err(|error| error.to_string())
}

fn file(dir: &Path) -> PathBuf {
    dir.join("db.redb")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn an_overlay_reads_like_a_file_that_was_written(
            content in prop::collection::vec(any::<u8>(), 0..20_000),
            steps in prop::collection::vec((0..3_u8, 0..25_000_u64, prop::collection::vec(any::<u8>(), 0..9000)), 0..12),
        ) {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("file");
            std::fs::write(&path, &content).unwrap();
            let overlay = Overlay::new(&path).unwrap();
            let mut expected = content.clone();
            for (kind, at, data) in steps {
                match kind {
                    0 => {
                        overlay.set_len(at).unwrap();
                        expected.resize(at as usize, 0);
                    }
                    _ => {
                        overlay.write(at, &data).unwrap();
                        let end = at as usize + data.len();
                        expected.resize(expected.len().max(end), 0);
                        expected[at as usize..end].copy_from_slice(&data);
                    }
                }
                prop_assert_eq!(overlay.len().unwrap(), expected.len() as u64);
                let mut all = vec![1; expected.len()];
                overlay.read(0, &mut all).unwrap();
                prop_assert_eq!(&all, &expected);
                let from = (at as usize).min(expected.len());
                let mut some = vec![1; (expected.len() - from).min(5000)];
                overlay.read(from as u64, &mut some).unwrap();
                prop_assert_eq!(&some[..], &expected[from..from + some.len()]);
            }
            prop_assert!(overlay.read(expected.len() as u64, &mut [0]).is_err());
            prop_assert_eq!(std::fs::read(&path).unwrap(), content);
        }
    }
}
