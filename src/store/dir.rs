//! The directory of a store: its lock, its format, its newest generation.
//!
//! ```text
//! lock        held by the process that uses the store
//! format      version of the layout, and the backend; written last when a store is created
//! newest      newest acknowledged generation: if the backend holds only older ones, some were lost;
//!             newest-LANE for the lanes of partitions
//! instance    member ID in consumer groups
//! checkpoints/     complete copies of single generations: LANE-GENERATION-TIME.snapshot
//! db.redb, sled/   files of the backend
//! ```

use std::fs::{File, TryLockError};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rand::RngExt;

use super::redb::Redb;
use super::{Batch, SnapshotStore, StoreError};
use crate::config::StoreKind;
use crate::{failpoint, files};

/// The lane of the file transport, and of all partitions together.
pub const ONE_LANE: &str = "file";

/// How long a lock may outlive its owner, and how often it is retried meanwhile.
const LOCK_LINGERS: Duration = Duration::from_millis(500);
const LOCK_RETRY: Duration = Duration::from_millis(10);

const FORMAT: &str = "format";
const VERSION: u16 = 1;

const CHECKPOINTS: &str = "checkpoints";

/// A store in a directory.
pub struct DirStore {
    dir: PathBuf,
    backend: Box<dyn SnapshotStore>,
    /// Held as long as the store is open; a store on read-only media may have none.
    _lock: Option<File>,
}

/// What a store is opened for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Creates the store if there is none. A damaged one can be opened if its database can be read.
    Learn(StoreKind),
    /// Creates the store if there is none.
    Create(StoreKind),
    /// Changes an existing store.
    Write,
    /// Repairs an existing store: its database need not be readable.
    Repair,
    /// Writes nothing, not even a lock file. The database need not be readable: reading from it then fails.
    Read,
}

impl Access {
    /// Whether a database that fails its integrity check can be opened.
    fn accepts_damage(self) -> bool {
        matches!(self, Self::Learn(_) | Self::Repair | Self::Read)
    }

    /// Whether a database that cannot be read at all can be opened.
    pub(super) fn accepts_unreadable(self) -> bool {
        matches!(self, Self::Repair | Self::Read)
    }
}

impl SnapshotStore for DirStore {
    fn place(&self) -> String {
        self.dir.display().to_string()
    }

    fn value_bytes_max(&self) -> usize {
        self.backend.value_bytes_max()
    }

    fn scan(&self, prefix: &[u8], each: &mut dyn FnMut(&[u8], &[u8])) -> Result<(), StoreError> {
        self.backend.scan(prefix, each)
    }

    fn apply(&mut self, batch: Batch) -> Result<(), StoreError> {
        if batch.is_empty() { Ok(()) } else { self.backend.apply(batch) }
    }

    fn recover(&mut self) -> Result<(), StoreError> {
        self.backend.recover()
    }

    fn bytes_on_disk(&self) -> Result<u64, StoreError> {
        allocated(&self.dir).map_err(|error| cannot_read(&self.dir, &error))
    }

    fn is_damaged(&self) -> bool {
        self.backend.is_damaged()
    }

    fn start_over(&mut self) -> Result<(), StoreError> {
        self.backend.start_over()
    }

    /// Not synced: after a machine crash the record may be an older one.
    fn note_newest(&mut self, lane: &str, generation: u64) -> Result<(), StoreError> {
        failpoint::reach("after-persist");
        let path = witness(&self.dir, lane);
        put(&path, &format!("{generation} {lane}\n")).map_err(|error| cannot_write(&path, &error))
    }

    fn newest_noted(&self, lane: &str) -> Option<u64> {
        let text = std::fs::read_to_string(witness(&self.dir, lane)).ok()?;
        let (generation, of) = text.strip_suffix('\n')?.split_once(' ')?;
        if of == lane { generation.parse().ok() } else { None }
    }

    fn checkpoint_names(&self) -> Result<Vec<String>, StoreError> {
        let path = self.dir.join(CHECKPOINTS);
        let list = || -> std::io::Result<Vec<String>> {
            let names = std::fs::read_dir(&path)?.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()));
            names.collect()
        };
        match list() {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
            names => names.map_err(|error| cannot_read(&path, &error)),
        }
    }

    fn read_checkpoint(&self, name: &str) -> Result<Vec<u8>, StoreError> {
        let path = self.dir.join(CHECKPOINTS).join(name);
        files::read(&path).map_err(|error| cannot_read(&path, &error))
    }

    fn write_checkpoint(&mut self, name: &str, bytes: &[u8]) -> Result<(), StoreError> {
        let path = self.dir.join(CHECKPOINTS).join(name);
        let write = || {
            files::create_dirs(files::parent(&path))?;
            files::replace(&path, bytes)
        };
        write().map_err(|error| cannot_write(&path, &error))
    }

    fn remove_checkpoint(&mut self, name: &str) -> Result<(), StoreError> {
        let path = self.dir.join(CHECKPOINTS).join(name);
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(cannot_write(&path, &error)),
            _ => Ok(()),
        }
    }
}

/// The file that names the newest generation of a lane.
fn witness(dir: &Path, lane: &str) -> PathBuf {
    dir.join(if lane == ONE_LANE { "newest".to_owned() } else { format!("newest-{lane}") })
}

/// The instance ID of the store in `dir`; stable across restarts.
pub fn instance(dir: &Path) -> std::io::Result<String> {
    let path = dir.join("instance");
    match std::fs::read_to_string(&path) {
        Ok(name) if !name.trim().is_empty() => return Ok(name.trim().to_owned()),
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let name = format!("pointsman-{:016x}", rand::rng().random::<u64>());
    files::replace(&path, format!("{name}\n").as_bytes())?;
    Ok(name)
}

/// Replaces a small file without syncing it.
fn put(path: &Path, text: &str) -> std::io::Result<()> {
    let beside = path.with_extension("new");
    files::create_temporary(&beside)?.write_all(text.as_bytes())?;
    std::fs::rename(&beside, path)
}

/// Opens the store in `dir`.
pub fn open(dir: &Path, access: Access) -> Result<DirStore, StoreError> {
    let shown = dir.display().to_string();
    let found = if dir.is_dir() { made_by(dir)? } else { None };
    let wanted = match access {
        Access::Learn(kind) | Access::Create(kind) => Some(kind),
        Access::Write | Access::Repair | Access::Read => None,
    };
    let (kind, is_new) = match (found, wanted) {
        (None, None) => return Err(StoreError::Missing(shown)),
        (None, Some(kind)) => (kind, true),
        (Some(found), Some(kind)) if found != kind.to_string() => {
            return Err(StoreError::OtherKind { path: shown, found });
        }
        (Some(found), _) => match [StoreKind::Redb, StoreKind::Sled].into_iter().find(|kind| kind.to_string() == found)
        {
            Some(kind) => (kind, false),
            None => return Err(StoreError::Newer { path: shown, found, newest: VERSION }),
        },
    };
    if is_new {
        files::create_dirs(dir).map_err(|error| cannot_write(dir, &error))?;
    }
    let lock = lock(dir, access)?;
    if is_new && made_by(dir)?.is_some() {
        // Another process created it in the meantime.
        drop(lock);
        return open(dir, access);
    }
    let backend: Box<dyn SnapshotStore> = match kind {
        StoreKind::Redb => Box::new(Redb::open(dir, is_new, access)?),
        #[cfg(feature = "sled")]
        StoreKind::Sled => Box::new(super::sled::Sled::open(dir, is_new, access)?),
        #[cfg(not(feature = "sled"))]
        StoreKind::Sled => return Err(StoreError::NoSled(shown)),
    };
    if backend.is_damaged() && !access.accepts_damage() {
        return Err(StoreError::Damaged { path: shown, problem: "the database fails its integrity check".to_owned() });
    }
    if is_new {
        files::replace(&dir.join(FORMAT), format!("{VERSION} {kind}\n").as_bytes())
            .map_err(|error| cannot_write(dir, &error))?;
    }
    Ok(DirStore { dir: dir.to_owned(), backend, _lock: lock })
}

/// The backend that created the store in `dir`, if there is one.
fn made_by(dir: &Path) -> Result<Option<String>, StoreError> {
    let path = dir.display().to_string();
    let text = match std::fs::read_to_string(dir.join(FORMAT)) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(StoreError::Damaged { path, problem: error.to_string() }),
    };
    let (version, kind) = text.trim().split_once(' ').unwrap_or((text.trim(), ""));
    match version.parse::<u16>() {
        Ok(version) if version > VERSION => {
            Err(StoreError::Newer { path, found: version.to_string(), newest: VERSION })
        }
        Ok(_) => Ok(Some(kind.to_owned())),
        Err(_) => Err(StoreError::Damaged { path, problem: "its file `format` is invalid".to_owned() }),
    }
}

/// Takes the lock of a store: shared to read, exclusive otherwise. Retries a contended lock for a moment: a child process
/// inherits it between fork and exec, so it can outlive its owner by that long.
fn lock(dir: &Path, access: Access) -> Result<Option<File>, StoreError> {
    let path = dir.join("lock");
    let file = match access {
        Access::Read => match File::open(&path) {
            // No process has opened this copy.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            file => file.map_err(|error| cannot_read(dir, &error))?,
        },
        _ => {
            let open = File::options().create(true).truncate(false).write(true).open(&path);
            open.map_err(|error| cannot_write(dir, &error))?
        }
    };
    let begun = Instant::now();
    loop {
        match if access == Access::Read { file.try_lock_shared() } else { file.try_lock() } {
            Ok(()) => return Ok(Some(file)),
            Err(TryLockError::WouldBlock) if begun.elapsed() < LOCK_LINGERS => std::thread::sleep(LOCK_RETRY),
            Err(TryLockError::WouldBlock) => return Err(StoreError::InUse(dir.display().to_string())),
            Err(TryLockError::Error(error)) => return Err(cannot_write(dir, &error)),
        }
    }
}

pub(super) fn damaged(dir: &Path, problem: &str) -> StoreError {
    StoreError::Damaged { path: dir.display().to_string(), problem: problem.to_owned() }
}

pub(super) fn cannot_write(path: &Path, error: &dyn std::error::Error) -> StoreError {
    StoreError::Write { path: path.display().to_string(), problem: error.to_string() }
}

pub(super) fn cannot_read(path: &Path, error: &dyn std::error::Error) -> StoreError {
    StoreError::Read { path: path.display().to_string(), problem: error.to_string() }
}

/// Bytes allocated to the files of a directory, without holes.
pub(super) fn allocated(dir: &Path) -> std::io::Result<u64> {
    use std::os::unix::fs::MetadataExt;
    let mut bytes = 0;
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        let metadata = entry.metadata()?;
        bytes += if metadata.is_dir() { allocated(&entry.path())? } else { metadata.blocks() * 512 };
    }
    Ok(bytes)
}

/// An unused file name next to `path`.
pub(super) fn aside(path: &Path) -> PathBuf {
    let name = |n: u32| PathBuf::from(format!("{}.damaged-{n}", path.display()));
    (1..).map(name).find(|path| !path.exists()).unwrap_or_else(|| name(0))
}
