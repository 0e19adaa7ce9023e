//! The store on redb, one file: the default.

use std::fs::File;
use std::path::{Path, PathBuf};

use redb::{Builder, Database, DatabaseError, Durability, ReadableDatabase, StorageError, TableDefinition, TableError};

use super::dir::{allocated, aside};
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
    /// Held as long as the store is open.
    _lock: File,
}

enum Handle {
    Whole(Database),
    /// The database opens, but fails its integrity check. This handle can still read. Reopening the file, even read-only,
    /// would require a repair, which fails.
    Damaged(Database),
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
    /// Opens the database in `dir`; `new` if it may not exist yet.
    pub fn open(dir: &Path, new: bool, lock: File) -> Result<Self, StoreError> {
        let path = file(dir);
        if !new && std::fs::metadata(&path).map_or(0, |metadata| metadata.len()) == 0 {
            return Err(damaged(dir, "the file db.redb is missing or empty"));
        }
        if new && !path.exists() {
            make(dir).map_err(|problem| StoreError::Write { path: dir.display().to_string(), problem })?;
        }
        let handle = open_checked(&path).map_err(|refused| refused.in_dir(dir))?;
        if new {
            let sync = || File::open(dir)?.sync_all();
            sync().map_err(|error| cannot_write(dir, &error))?;
        }
        Ok(Self { dir: dir.to_owned(), handle, _lock: lock })
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
    fn value_bytes_max(&self) -> usize {
        // A page is a power of two: with its key and redb's own bytes such a value fills one, and wastes nothing.
        32_400
    }

    fn scan(&self, prefix: &[u8], each: &mut dyn FnMut(&[u8], &[u8])) -> Result<(), StoreError> {
        let scanned = contain(|| match &self.handle {
            Handle::Whole(database) | Handle::Damaged(database) => Self::scan_table(database, prefix, each),
            Handle::Failed => Err(redb::Error::PreviousIo),
            Handle::Closed => Ok(()),
        });
        match scanned {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error @ redb::Error::PreviousIo)) => Err(cannot_write(&self.dir, &error)),
            Ok(Err(redb::Error::Io(error))) if error.raw_os_error().is_some() => Err(cannot_write(&self.dir, &error)),
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
            match open_checked(&file(&self.dir)) {
                Ok(handle @ Handle::Whole(_)) => self.handle = handle,
                Ok(_) => return Err(damaged(&self.dir, "the database is damaged after a failed write")),
                Err(refused) => return Err(refused.in_dir(&self.dir)),
            }
        }
        Ok(())
    }

    fn bytes_on_disk(&self) -> Result<u64, StoreError> {
        allocated(&self.dir).map_err(|error| damaged(&self.dir, &error.to_string()))
    }

    fn is_damaged(&self) -> bool {
        matches!(self.handle, Handle::Damaged(_))
    }

    fn start_over(&mut self, saved: bool) -> Result<(), StoreError> {
        if !saved {
            return Err(damaged(&self.dir, "the database is damaged and holds no intact snapshot"));
        }
        self.handle = Handle::Closed;
        let path = file(&self.dir);
        let aside = aside(&path);
        std::fs::rename(&path, &aside).map_err(|error| cannot_write(&self.dir, &error))?;
        tracing::error!(kept = %aside.display(), "store is damaged; copying its intact snapshots to a new one");
        make(&self.dir).map_err(|problem| StoreError::Write { path: self.dir.display().to_string(), problem })?;
        self.handle = open_checked(&path).map_err(|refused| refused.in_dir(&self.dir))?;
        Ok(())
    }
}

/// Opens a database. redb reports damaged bytes as errors; a panic is treated as one too.
fn open_checked(path: &Path) -> Result<Handle, Refused> {
    let open = || {
        let mut database = builder().create(path).map_err(|error| Refused::new(&error))?;
        match database.check_integrity().map_err(|error| Refused::new(&error)) {
            Ok(_) => Ok(Handle::Whole(database)),
            Err(refused @ Refused::System(_)) => Err(refused),
            Err(Refused::Damaged(_)) => Ok(Handle::Damaged(database)),
        }
    };
    let panicked = |_| Err(Refused::Damaged("the database panicked while it was opened".to_owned()));
    contain(open).unwrap_or_else(panicked)
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

fn damaged(dir: &Path, problem: &str) -> StoreError {
    StoreError::Damaged { path: dir.display().to_string(), problem: problem.to_owned() }
}

fn cannot_write(dir: &Path, error: &dyn std::error::Error) -> StoreError {
    StoreError::Write { path: dir.display().to_string(), problem: error.to_string() }
}
