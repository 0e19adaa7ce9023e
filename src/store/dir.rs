//! The directory of a store: its lock, its format, its newest generation.
//!
//! ```text
//! lock        held by the process that uses the store
//! format      version of the layout, and the backend; written last when a store is created
//! newest      newest acknowledged generation: if the backend holds only older ones, some were lost;
//!             newest-LANE for the lanes of partitions
//! instance    member ID in consumer groups
//! db.redb, sled/   files of the backend
//! ```

use std::fs::{File, TryLockError};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rand::RngExt;

use super::archive::Archive;
use super::redb::Redb;
use super::{SnapshotStore, StoreError};
use crate::config::StoreKind;
use crate::files;

/// The lane of the file transport, and of all partitions together.
pub const ONE_LANE: &str = "file";

/// How long a lock may outlive its owner, and how often it is retried meanwhile.
const LOCK_LINGERS: Duration = Duration::from_millis(500);
const LOCK_RETRY: Duration = Duration::from_millis(10);

const FORMAT: &str = "format";
const VERSION: u16 = 1;

/// Snapshots in a directory.
pub type DirArchive = Archive<Box<dyn SnapshotStore>>;

/// Records the newest generation of a lane outside the backend, so that a store that lost generations is detected.
#[derive(Debug, Clone)]
pub struct Witness {
    path: PathBuf,
    lane: String,
}

impl Witness {
    /// For a lane of the store in `dir`.
    pub fn new(dir: &Path, lane: &str) -> Self {
        let name = if lane == ONE_LANE { "newest".to_owned() } else { format!("newest-{lane}") };
        Self { path: dir.join(name), lane: lane.to_owned() }
    }

    /// Records an acknowledged generation. Not synced: after a machine crash the record may be an older one.
    pub fn note(&self, generation: u64) -> std::io::Result<()> {
        let Self { path, lane } = self;
        put(path, &format!("{generation} {lane}\n"))
            .map_err(|error| std::io::Error::new(error.kind(), format!("cannot write {}: {error}", path.display())))
    }

    /// The newest generation recorded as acknowledged.
    pub fn newest(&self) -> Option<u64> {
        let text = std::fs::read_to_string(&self.path).ok()?;
        let (generation, of) = text.strip_suffix('\n')?.split_once(' ')?;
        if of == self.lane { generation.parse().ok() } else { None }
    }
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

/// Opens the snapshots in `dir`; creates a store if there is none.
pub fn open(dir: &Path, kind: StoreKind, keep: usize) -> Result<DirArchive, StoreError> {
    let shown = dir.display().to_string();
    let cannot = |error: std::io::Error| StoreError::Write { path: shown.clone(), problem: error.to_string() };
    std::fs::create_dir_all(dir).map_err(cannot)?;
    let lock = lock(dir)?;
    match made_by(dir)? {
        Some(found) if found != kind.to_string() => Err(StoreError::OtherKind { path: shown, found }),
        Some(_) => archive(dir, kind, keep, lock, false),
        None => {
            let archive = archive(dir, kind, keep, lock, true)?;
            files::replace(&dir.join(FORMAT), format!("{VERSION} {kind}\n").as_bytes()).map_err(cannot)?;
            Ok(archive)
        }
    }
}

/// Opens the snapshots of an existing store in `dir`, with the backend that created it.
pub fn open_existing(dir: &Path, keep: usize) -> Result<DirArchive, StoreError> {
    let kinds = [StoreKind::Redb, StoreKind::Sled];
    let shown = dir.display().to_string();
    let made_by = if dir.is_dir() { made_by(dir)? } else { None };
    let Some(found) = made_by else { return Err(StoreError::Missing(shown)) };
    match kinds.into_iter().find(|kind| kind.to_string() == found) {
        Some(kind) => archive(dir, kind, keep, lock(dir)?, false),
        None => Err(StoreError::Newer { path: shown, found, newest: VERSION }),
    }
}

fn archive(dir: &Path, kind: StoreKind, keep: usize, lock: File, new: bool) -> Result<DirArchive, StoreError> {
    let backend: Box<dyn SnapshotStore> = match kind {
        StoreKind::Redb => Box::new(Redb::open(dir, new, lock)?),
        #[cfg(feature = "sled")]
        StoreKind::Sled => Box::new(super::sled::Sled::open(dir, new, lock)?),
        #[cfg(not(feature = "sled"))]
        StoreKind::Sled => return Err(StoreError::NoSled(dir.display().to_string())),
    };
    Archive::open(backend, keep)
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

/// Takes the lock of a store. Retries a contended lock for a moment: a child process inherits it between fork and exec,
/// so it can outlive its owner by that long.
fn lock(dir: &Path) -> Result<File, StoreError> {
    let begun = Instant::now();
    loop {
        match try_lock(dir) {
            Err(StoreError::InUse(_)) if begun.elapsed() < LOCK_LINGERS => std::thread::sleep(LOCK_RETRY),
            result => return result,
        }
    }
}

fn try_lock(dir: &Path) -> Result<File, StoreError> {
    let path = dir.display().to_string();
    let open = File::options().create(true).truncate(false).write(true).open(dir.join("lock"));
    let file = open.map_err(|error| StoreError::Write { path: path.clone(), problem: error.to_string() })?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(StoreError::InUse(path)),
        Err(TryLockError::Error(error)) => Err(StoreError::Write { path, problem: error.to_string() }),
    }
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
