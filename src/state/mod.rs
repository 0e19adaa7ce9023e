//! The durable state of lanes: what is in a snapshot, and which snapshots exist.
//!
//! [`LaneStore`] is the only owner of a lane's snapshots. The daemon, the fleet, `replay` and `pointsman snapshots` restore,
//! commit, verify, roll back and back up through it. Beneath it, a [`SnapshotStore`](crate::store::SnapshotStore) is a small
//! ordered map: redb, sled, memory, or a partition of the snapshots topic.
//!
//! | file | does |
//! |---|---|
//! | `lane_store` | the operations on a lane |
//! | `generations` | how generations are laid out in the ordered map |
//! | `retention` | which checkpoints are kept |
//! | `backup` | complete copies of generations: checkpoints and backups |
//! | `repair` | what can be saved from a damaged store |
//! | `running` | the store of a running learner, for backups |
//!
//! A *generation* is one snapshot in the map. A *checkpoint* is a complete copy of one generation in a file beside the map, made
//! once per hour: it survives the loss of the map, and a rollback can reach it for days.

pub mod backup;
pub mod generations;
mod lane_store;
pub mod repair;
mod retention;
#[cfg(feature = "daemon")]
pub mod running;
#[cfg(test)]
mod tests;

use thiserror::Error;

pub use lane_store::{Checkpoint, LaneStore, Opened, Restored, Resumed};
pub use retention::Retention;

use crate::engine::{BadImport, BadSnapshot};
use crate::store::StoreError;
use crate::wire::envelope::Damaged;

/// The snapshots of a lane in a directory, which lanes of one process share.
#[cfg(feature = "daemon")]
pub type LocalLane = LaneStore<crate::store::Shared<crate::store::DirStore>>;

/// A change of a record: its key, and its new value unless it is deleted.
pub type Change = (Vec<u8>, Option<Vec<u8>>);

/// Records by key.
pub type Records = Vec<(Vec<u8>, Vec<u8>)>;

/// A snapshot, read and verified.
#[derive(Debug, Clone, PartialEq)]
pub struct Snapshot {
    /// Which one.
    pub generation: u64,
    /// Its head.
    pub head: Vec<u8>,
    /// Its records, by key.
    pub records: Records,
}

/// A snapshot that fails verification.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("generation {generation} is damaged: {problem}")]
pub struct DamagedSnapshot {
    /// Which one.
    pub generation: u64,
    /// What is wrong with it.
    pub problem: String,
}

/// Why an operation on a lane's snapshots failed.
#[derive(Debug, Error)]
pub enum StateError {
    /// The store cannot be read or written.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A snapshot fails verification.
    #[error(transparent)]
    Damaged(#[from] DamagedSnapshot),
    /// The head, or a backup, cannot be decoded.
    #[error(transparent)]
    Format(#[from] Damaged),
    /// The settings in a head cannot be decoded.
    #[error("cannot read the configuration in the snapshot: {0}")]
    Settings(#[from] serde_json::Error),
    /// The records do not fit together, or do not match the configuration.
    #[error(transparent)]
    Engine(#[from] BadSnapshot),
    /// Parameters cannot be imported.
    #[error(transparent)]
    Import(#[from] BadImport),
    /// There is no such generation.
    #[error("no generation {generation} in the store: it has {existing}")]
    NoGeneration {
        /// The one asked for.
        generation: u64,
        /// Those that exist.
        existing: String,
    },
    /// There is no such space.
    #[error("no space {space} in lane {lane}: it has {existing}")]
    NoSpace {
        /// The one asked for.
        space: String,
        /// The lane.
        lane: String,
        /// Those that exist.
        existing: String,
    },
    /// The lane has no snapshot yet.
    #[error("the store {0} has no snapshot yet: run `pointsman learn` or `replay` with this store first")]
    Empty(String),
    /// The newest generation is damaged, so nothing can be added to it.
    #[error("{damage}; run `pointsman snapshots repair --store {place}` first")]
    NeedsRepair {
        /// The store.
        place: String,
        /// What is wrong.
        damage: DamagedSnapshot,
    },
    /// A backup is restored only into a new store.
    #[error("the store {0} already has snapshots: restore the backup into an empty directory")]
    NotEmpty(String),
}

impl StateError {
    /// The error of a store that a cause is, or holds: it decides whether a retry may help.
    pub fn of_store<'e>(cause: &'e (dyn std::error::Error + 'static)) -> Option<&'e StoreError> {
        match cause.downcast_ref() {
            Some(Self::Store(error)) => Some(error),
            _ => cause.downcast_ref(),
        }
    }
}
