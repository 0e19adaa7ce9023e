//! Where snapshots are kept.
//!
//! A [`SnapshotStore`] is little more than an ordered map on disk; [`Archive`](archive::Archive) makes generations of
//! snapshots of it: checksummed, incremental, several of them whole at any time.

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
    /// The most bytes of a value.
    fn value_bytes_max(&self) -> usize;

    /// Calls `each` with the entries whose key begins with `prefix`, in the order of keys.
    fn scan(&self, prefix: &[u8], each: &mut dyn FnMut(&[u8], &[u8])) -> Result<(), StoreError>;

    /// Applies a batch, all of it or nothing. What is applied when this returns outlives the process and the machine.
    fn apply(&mut self, batch: Batch) -> Result<(), StoreError>;

    /// Makes it usable again after [`apply`](Self::apply) has failed.
    fn recover(&mut self) -> Result<(), StoreError> {
        Ok(())
    }

    /// What it takes of the disk.
    fn bytes_on_disk(&self) -> Result<u64, StoreError>;

    /// Whether it is known to be damaged: it can be read with care, but must not be written.
    fn is_damaged(&self) -> bool {
        false
    }

    /// Begins anew, empty. What is damaged is put aside, not lost; `saved` says whether something of it lives on.
    fn start_over(&mut self, saved: bool) -> Result<(), StoreError>;
}

/// Changes that belong together.
#[derive(Debug, Default, Clone)]
pub struct Batch {
    /// The most bytes of a value.
    pub value_bytes_max: usize,
    /// Keys with their new values.
    pub puts: Vec<(Vec<u8>, Vec<u8>)>,
    /// Keys that go; none of them is put too.
    pub deletes: Vec<Vec<u8>>,
}

/// Why a store cannot be used.
#[derive(Debug, Error)]
pub enum StoreError {
    /// There is none.
    #[error("there is no store in {0}")]
    Missing(String),
    /// Another process has it.
    #[error("the store {0} is in use by another process: stop that one, or set another store.dir")]
    InUse(String),
    /// It was made by another backend.
    #[error("the store {path} was made with store.kind = \"{found}\": set that, or another store.dir")]
    OtherKind {
        /// Where it is.
        path: String,
        /// What made it.
        found: String,
    },
    /// It needs a backend that this program was built without.
    #[error(
        "the store {0} needs sled, which this pointsman was built without: build it with the feature `sled` (it is on by \
         default), or set store.kind = \"redb\" and another store.dir"
    )]
    NoSled(String),
    /// It cannot be read.
    #[error(
        "the store {path} cannot be read: {problem}. Move it aside (mv {path} {path}.damaged) and rebuild it from the \
         logs: pointsman replay --keep-open --store {path} --queries ... --rewards ..."
    )]
    Damaged {
        /// Where it is.
        path: String,
        /// What is wrong.
        problem: String,
    },
    /// It was written by a newer version.
    #[error("the store {path} has format {found}, this program reads up to {newest}: upgrade pointsman")]
    Newer {
        /// Where it is.
        path: String,
        /// Its version.
        found: String,
        /// The newest known.
        newest: u16,
    },
    /// It cannot be written.
    #[error(
        "the store {path} cannot be written: {problem}. What was acknowledged before is intact: mend this and start again"
    )]
    Write {
        /// Where it is.
        path: String,
        /// What is wrong.
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
