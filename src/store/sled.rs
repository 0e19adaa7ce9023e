//! The store on sled 0.34. It uses two to five times the disk space of redb and survives damage less often.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::dir::{Access, aside, cannot_read, cannot_write, damaged};
use super::{Batch, SnapshotStore, StoreError};
use crate::failpoint;
use crate::fatal::contain;

const CACHE_BYTES: u64 = 64 << 20;

/// A closed database holds its file until its threads end. No other process can hold it: this one owns the store lock.
const LINGERS: Duration = Duration::from_secs(10);
const LOOK_AGAIN: Duration = Duration::from_millis(5);

/// A sled database.
pub struct Sled {
    dir: PathBuf,
    /// None once a write has failed: sled refuses all further use of the handle.
    database: Option<sled::Db>,
    /// Why the database cannot be opened.
    unreadable: Option<String>,
    /// sled writes whenever it opens a database, so a database that is only read is a copy. Deleted last.
    _copy: Option<tempfile::TempDir>,
}

impl Sled {
    /// Opens the database in `dir`; `is_new` if it may not exist yet.
    pub fn open(dir: &Path, is_new: bool, access: Access) -> Result<Self, StoreError> {
        let mut store = Self { dir: dir.to_owned(), database: None, unreadable: None, _copy: None };
        let opened = match access {
            _ if !is_new && !dir.join("sled/db").exists() => Err(damaged(dir, "the file sled/db is missing")),
            Access::Read => {
                let copied = || {
                    let copy = tempfile::tempdir()?;
                    copy_dir(&dir.join("sled"), &copy.path().join("sled"))?;
                    Ok::<_, std::io::Error>(copy)
                };
                let copy = copied().map_err(|error| cannot_read(dir, &error))?;
                let opened = open(copy.path(), dir);
                store._copy = Some(copy);
                opened
            }
            _ => open(dir, dir),
        };
        match opened {
            Err(StoreError::Damaged { problem, .. }) if access.accepts_unreadable() => store.unreadable = Some(problem),
            opened => store.database = Some(opened?),
        }
        if access != Access::Read && store.database.is_some() {
            store.sync().map_err(|error| cannot_write(dir, &error))?;
        }
        Ok(store)
    }

    /// Syncs the files to disk: sled's own flush only starts to write.
    fn sync(&self) -> std::io::Result<()> {
        let sled = self.dir.join("sled");
        for path in [&sled.join("db"), &sled.join("conf"), &sled, &self.dir] {
            File::open(path)?.sync_all()?;
        }
        Ok(())
    }

    fn write(&self, batch: Batch) -> Result<(), Box<dyn std::error::Error>> {
        let mut together = sled::Batch::default();
        batch.deletes.into_iter().for_each(|key| together.remove(key));
        batch.puts.into_iter().for_each(|(key, value)| together.insert(key, value));
        let database = self.database.as_ref().ok_or("an earlier write failed")?;
        database.apply_batch(together)?;
        failpoint::reach("mid-persist");
        database.flush()?;
        Ok(self.sync()?)
    }
}

/// Opens the database below `at`; errors name the store `dir`.
fn open(at: &Path, dir: &Path) -> Result<sled::Db, StoreError> {
    let config = sled::Config::new()
        .path(at.join("sled"))
        .mode(sled::Mode::LowSpace)
        .cache_capacity(CACHE_BYTES)
        .flush_every_ms(None);
    let begun = Instant::now();
    loop {
        match contain(|| config.open()) {
            Ok(Ok(database)) => return Ok(database),
            Ok(Err(error)) if is_held(&error) && begun.elapsed() < LINGERS => std::thread::sleep(LOOK_AGAIN),
            Ok(Err(error)) if is_held(&error) => return Err(StoreError::InUse(dir.display().to_string())),
            Ok(Err(error)) if is_of_system(&error) => return Err(cannot_write(dir, &error)),
            // sled reports some failed writes as corruption, or panics.
            _ if is_full(at) => {
                let full = std::io::Error::from(std::io::ErrorKind::StorageFull);
                return Err(cannot_write(dir, &full));
            }
            Ok(Err(error)) => return Err(damaged(dir, &error.to_string())),
            Err(_) => return Err(damaged(dir, "the database panicked while it was opened")),
        }
    }
}

/// Whether the file system has no room left.
fn is_full(dir: &Path) -> bool {
    rustix::fs::statvfs(dir).is_ok_and(|system| system.f_bavail == 0)
}

/// Whether the operating system refuses: the database may be intact.
fn is_of_system(error: &sled::Error) -> bool {
    matches!(error, sled::Error::Io(error) if error.raw_os_error().is_some())
}

/// Whether the file could not be locked: sled has no dedicated error for that.
fn is_held(error: &sled::Error) -> bool {
    matches!(error, sled::Error::Io(error) if error.to_string().contains("could not acquire lock"))
}

impl SnapshotStore for Sled {
    fn place(&self) -> String {
        self.dir.display().to_string()
    }

    fn value_bytes_max(&self) -> usize {
        // Larger ones become files of their own, which sled neither syncs nor ever removes.
        4096
    }

    fn scan(&self, prefix: &[u8], each: &mut dyn FnMut(&[u8], &[u8])) -> Result<(), StoreError> {
        if let Some(problem) = &self.unreadable {
            return Err(damaged(&self.dir, problem));
        }
        let Some(database) = &self.database else {
            return Err(cannot_write(&self.dir, &std::io::Error::other("an earlier write failed")));
        };
        let scan = || database.scan_prefix(prefix).try_for_each(|entry| entry.map(|(key, value)| each(&key, &value)));
        match contain(scan) {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => Err(damaged(&self.dir, &error.to_string())),
            Err(_) => Err(damaged(&self.dir, "the database panicked during a read")),
        }
    }

    fn apply(&mut self, batch: Batch) -> Result<(), StoreError> {
        let written = self.write(batch).map_err(|error| cannot_write(&self.dir, &*error));
        if written.is_err() {
            self.database = None;
        }
        written
    }

    fn recover(&mut self) -> Result<(), StoreError> {
        if self.database.is_none() {
            self.database = Some(open(&self.dir, &self.dir)?);
        }
        Ok(())
    }

    fn is_damaged(&self) -> bool {
        self.unreadable.is_some()
    }

    fn start_over(&mut self) -> Result<(), StoreError> {
        self.database = None;
        let path = self.dir.join("sled");
        let aside = aside(&path);
        std::fs::rename(&path, &aside).map_err(|error| cannot_write(&self.dir, &error))?;
        tracing::error!(kept = %aside.display(), "store is damaged; starting a new one");
        self.database = Some(open(&self.dir, &self.dir)?);
        self.unreadable = None;
        self.sync().map_err(|error| cannot_write(&self.dir, &error))
    }
}

/// Copies a directory with all that is in it.
fn copy_dir(from: &Path, to: &Path) -> std::io::Result<()> {
    std::fs::create_dir_all(to)?;
    for entry in std::fs::read_dir(from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy_dir(&entry.path(), &target)?;
        } else {
            std::fs::copy(entry.path(), target)?;
        }
    }
    Ok(())
}
