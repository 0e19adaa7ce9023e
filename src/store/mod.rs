//! Durable storage of snapshots.
//!
//! A [`SnapshotStore`] is an ordered map on disk. [`Archive`](archive::Archive) keeps generations of snapshots in it:
//! checksummed, incremental, several of them complete at any time.

pub mod archive;
#[cfg(feature = "daemon")]
mod dir;
mod memory;
#[cfg(feature = "daemon")]
mod redb;
#[cfg(feature = "sled")]
mod sled;

use thiserror::Error;

#[cfg(feature = "daemon")]
pub use dir::{DirArchive, ONE_LANE, Witness, instance, open, open_existing};
pub use memory::Memory;

/// An ordered map of small values, changed in batches.
pub trait SnapshotStore: Send {
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
    fn bytes_on_disk(&self) -> Result<u64, StoreError>;

    /// Whether the store is known to be damaged: it can be read, but must not be written.
    fn is_damaged(&self) -> bool {
        false
    }

    /// Starts over with an empty store. The damaged files are renamed, not deleted. `saved` tells whether any of their
    /// contents were recovered.
    fn start_over(&mut self, saved: bool) -> Result<(), StoreError>;
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
        "cannot read store {path}: {problem}; move it aside (mv {path} {path}.damaged) and rebuild it from the logs: \
         pointsman replay --keep-open --store {path} --queries ... --rewards ..."
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
    /// The store cannot be written.
    #[error("cannot write store {path}: {problem}; committed snapshots are intact: fix the cause and restart")]
    Write {
        /// Path of the store.
        path: String,
        /// What is wrong with it.
        problem: String,
    },
}

impl<S: SnapshotStore + ?Sized> SnapshotStore for Box<S> {
    fn value_bytes_max(&self) -> usize {
        (**self).value_bytes_max()
    }

    fn scan(&self, prefix: &[u8], each: &mut dyn FnMut(&[u8], &[u8])) -> Result<(), StoreError> {
        (**self).scan(prefix, each)
    }

    fn apply(&mut self, batch: Batch) -> Result<(), StoreError> {
        (**self).apply(batch)
    }

    fn recover(&mut self) -> Result<(), StoreError> {
        (**self).recover()
    }

    fn bytes_on_disk(&self) -> Result<u64, StoreError> {
        (**self).bytes_on_disk()
    }

    fn is_damaged(&self) -> bool {
        (**self).is_damaged()
    }

    fn start_over(&mut self, saved: bool) -> Result<(), StoreError> {
        (**self).start_over(saved)
    }
}
