//! A file of complete generations: a backup, or a checkpoint of a store.

use serde::{Deserialize, Serialize};

use super::Record;
use crate::wire::envelope::{Damaged, Kind};

/// The file: an envelope of kind 6.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Backup {
    /// One entry per lane, by name.
    pub lanes: Vec<LaneBackup>,
}

/// One generation of a lane.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LaneBackup {
    /// Name of the lane.
    pub lane: String,
    /// Its generation.
    pub generation: u64,
    /// The head of the generation: an envelope of kind 3.
    pub head: Vec<u8>,
    /// The records by key.
    pub records: Vec<(Vec<u8>, Vec<u8>)>,
}

impl Record for Backup {
    const KIND: Kind = Kind::Backup;
    const VERSION: u16 = 1;

    fn upgrade(version: u16, _: &[u8]) -> Result<Self, Damaged> {
        Err(Damaged::unknown_version(version))
    }
}
