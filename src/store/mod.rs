//! Small ordered maps on disk, in which [`LaneStore`](crate::state::LaneStore) keeps snapshots.

#[cfg(feature = "daemon")]
mod dir;
mod memory;
#[cfg(feature = "daemon")]
mod redb;
#[cfg(feature = "sled")]
mod sled;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use thiserror::Error;

#[cfg(feature = "daemon")]
pub use dir::{Access, DirStore, ONE_LANE, instance, open};
pub use memory::Memory;

/// An ordered map of small values, changed in batches; and, if it is a directory, a few files beside the map.
pub trait SnapshotStore: Send {
    /// Where it is, for messages.
    fn place(&self) -> String;

    /// Maximum size of a value in bytes.
    fn value_bytes_max(&self) -> usize;

    /// Calls `each` with the entries whose key starts with `prefix`, in key order.
    fn scan(&self, prefix: &[u8], each: &mut dyn FnMut(&[u8], &[u8])) -> Result<(), StoreError>;

    /// Applies a batch atomically. When this returns, the batch is durable.
    fn apply(&mut self, batch: Batch) -> Result<(), StoreError>;

    /// Makes the store usable again after a failed [`apply`](Self::apply).
    fn recover(&mut self) -> Result<(), StoreError> {
        Ok(())
    }

    /// Disk space used, in bytes.
    fn bytes_on_disk(&self) -> Result<u64, StoreError> {
        Ok(0)
    }

    /// Whether the store is known to be damaged: parts of it may be readable, but it must not be written.
    fn is_damaged(&self) -> bool {
        false
    }

    /// Replaces the map by an empty one. The damaged files are renamed, not deleted.
    fn start_over(&mut self) -> Result<(), StoreError>;

    /// Records the newest generation of a lane outside the map, so that a map that lost generations is detected.
    fn note_newest(&mut self, _lane: &str, _generation: u64) -> Result<(), StoreError> {
        Ok(())
    }

    /// The newest generation recorded for a lane.
    fn newest_noted(&self, _lane: &str) -> Option<u64> {
        None
    }

    /// Names of the checkpoint files.
    fn checkpoint_names(&self) -> Result<Vec<String>, StoreError> {
        Ok(Vec::new())
    }

    /// Reads a checkpoint file.
    fn read_checkpoint(&self, name: &str) -> Result<Vec<u8>, StoreError> {
        Err(StoreError::Missing(name.to_owned()))
    }

    /// Writes a checkpoint file, atomically and durably.
    fn write_checkpoint(&mut self, _name: &str, _bytes: &[u8]) -> Result<(), StoreError> {
        Ok(())
    }

    /// Deletes a checkpoint file.
    fn remove_checkpoint(&mut self, _name: &str) -> Result<(), StoreError> {
        Ok(())
    }
}

/// A store that several lanes use.
#[derive(Debug)]
pub struct Shared<S>(Arc<Mutex<S>>);

impl<S> Shared<S> {
    /// Shares a store.
    pub fn new(store: S) -> Self {
        Self(Arc::new(Mutex::new(store)))
    }

    /// Locks the store, for several operations on one state.
    pub fn lock(&self) -> MutexGuard<'_, S> {
        // A batch is atomic: a panic leaves the store intact.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<S> Clone for Shared<S> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

/// Changes that are applied together.
#[derive(Debug, Default, Clone)]
pub struct Batch {
    /// Maximum size of a value in bytes.
    pub value_bytes_max: usize,
    /// Keys with their new values.
    pub puts: Vec<(Vec<u8>, Vec<u8>)>,
    /// Keys to delete; disjoint from `puts`.
    pub deletes: Vec<Vec<u8>>,
}

impl Batch {
    /// Whether it changes nothing.
    pub fn is_empty(&self) -> bool {
        self.puts.is_empty() && self.deletes.is_empty()
    }
}

/// Why a store cannot be used.
#[derive(Debug, Error)]
pub enum StoreError {
    /// No store exists.
    #[error("no store in {0}: check --store or store.dir")]
    Missing(String),
    /// Another process holds the lock.
    #[error("store {0} is in use by another process: stop that process, or set another store.dir")]
    InUse(String),
    /// Another backend created the store.
    #[error(
        "store {path} was created with store.kind = \"{found}\": set store.kind = \"{found}\", or another store.dir"
    )]
    OtherKind {
        /// Path of the store.
        path: String,
        /// The backend that created it.
        found: String,
    },
    /// The store needs a backend that is not compiled in.
    #[error(
        "store {0} needs the sled backend, which is not compiled in: build pointsman with the feature `sled` (on by default), \
         or set store.kind = \"redb\" and another store.dir"
    )]
    NoSled(String),
    /// The store cannot be read.
    #[error(
        "cannot read store {path}: {problem}; save what is intact (pointsman snapshots repair --store {path}), or move it aside \
         (mv {path} {path}.damaged) and rebuild it from the logs: pointsman replay --keep-open --store {path} --queries ... \
         --rewards ..."
    )]
    Damaged {
        /// Path of the store.
        path: String,
        /// What is wrong with it.
        problem: String,
    },
    /// A newer version wrote the store.
    #[error("store {path} has format version {found}, but this version reads up to {newest}: upgrade pointsman")]
    Newer {
        /// Path of the store.
        path: String,
        /// Format version of the store.
        found: String,
        /// Newest supported version.
        newest: u16,
    },
    /// The operating system refuses to read the store; its contents may be intact.
    #[error("cannot read store {path}: {problem}: fix the cause and try again")]
    Read {
        /// Path of the store, or of a file in it.
        path: String,
        /// What is wrong.
        problem: String,
    },
    /// The store cannot be written.
    #[error("cannot write store {path}: {problem}; committed snapshots are intact: fix the cause and restart")]
    Write {
        /// Path of the store.
        path: String,
        /// What is wrong with it.
        problem: String,
    },
}

impl<S: SnapshotStore> SnapshotStore for Shared<S> {
    fn place(&self) -> String {
        self.lock().place()
    }

    fn value_bytes_max(&self) -> usize {
        self.lock().value_bytes_max()
    }

    fn scan(&self, prefix: &[u8], each: &mut dyn FnMut(&[u8], &[u8])) -> Result<(), StoreError> {
        self.lock().scan(prefix, each)
    }

    fn apply(&mut self, batch: Batch) -> Result<(), StoreError> {
        self.lock().apply(batch)
    }

    fn recover(&mut self) -> Result<(), StoreError> {
        self.lock().recover()
    }

    fn bytes_on_disk(&self) -> Result<u64, StoreError> {
        self.lock().bytes_on_disk()
    }

    fn is_damaged(&self) -> bool {
        self.lock().is_damaged()
    }

    fn start_over(&mut self) -> Result<(), StoreError> {
        self.lock().start_over()
    }

    fn note_newest(&mut self, lane: &str, generation: u64) -> Result<(), StoreError> {
        self.lock().note_newest(lane, generation)
    }

    fn newest_noted(&self, lane: &str) -> Option<u64> {
        self.lock().newest_noted(lane)
    }

    fn checkpoint_names(&self) -> Result<Vec<String>, StoreError> {
        self.lock().checkpoint_names()
    }

    fn read_checkpoint(&self, name: &str) -> Result<Vec<u8>, StoreError> {
        self.lock().read_checkpoint(name)
    }

    fn write_checkpoint(&mut self, name: &str, bytes: &[u8]) -> Result<(), StoreError> {
        self.lock().write_checkpoint(name, bytes)
    }

    fn remove_checkpoint(&mut self, name: &str) -> Result<(), StoreError> {
        self.lock().remove_checkpoint(name)
    }
}
