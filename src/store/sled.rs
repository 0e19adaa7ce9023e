//! The store on sled 0.34. It uses two to five times the disk space of redb and survives damage less often.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::dir::allocated;
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
    _lock: File,
}

impl Sled {
    /// Opens the database in `dir`; `new` if it may not exist yet.
    pub fn open(dir: &Path, new: bool, lock: File) -> Result<Self, StoreError> {
        if !new && !dir.join("sled/db").exists() {
            return Err(damaged(dir, "the file sled/db is missing"));
        }
        let store = Self { dir: dir.to_owned(), database: Some(open(dir)?), _lock: lock };
        store.sync().map_err(|error| cannot_write(dir, &error))?;
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

fn open(dir: &Path) -> Result<sled::Db, StoreError> {
    let config = sled::Config::new()
        .path(dir.join("sled"))
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
            Ok(Err(error)) => return Err(damaged(dir, &error.to_string())),
            Err(_) => return Err(damaged(dir, "the database panicked while it was opened")),
        }
    }
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
    fn value_bytes_max(&self) -> usize {
        // Larger ones become files of their own, which sled neither syncs nor ever removes.
        4096
    }

    fn scan(&self, prefix: &[u8], each: &mut dyn FnMut(&[u8], &[u8])) -> Result<(), StoreError> {
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
            self.database = Some(open(&self.dir)?);
        }
        Ok(())
    }

    fn bytes_on_disk(&self) -> Result<u64, StoreError> {
        allocated(&self.dir).map_err(|error| damaged(&self.dir, &error.to_string()))
    }

    fn start_over(&mut self, _saved: bool) -> Result<(), StoreError> {
        Err(damaged(&self.dir, "the database is damaged and cannot be recreated"))
    }
}

fn damaged(dir: &Path, problem: &str) -> StoreError {
    StoreError::Damaged { path: dir.display().to_string(), problem: problem.to_owned() }
}

fn cannot_write(dir: &Path, error: &dyn std::error::Error) -> StoreError {
    StoreError::Write { path: dir.display().to_string(), problem: error.to_string() }
}
