//! The record of what belongs to no space of a lane.

use serde::{Deserialize, Serialize};

use super::Record;
use super::counts::{JoinCountsRecord, JoinCountsRecordV1};
use crate::wire::envelope::{self, Damaged, Kind};

/// Counts of dropped spaces, and the volume of dead letters. A lane without this record has zeros.
///
/// 0.1 wrote its two parts without an envelope, under keys of their own ([`super::keys`]).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LaneRecord {
    /// Counts of spaces that were evicted or dropped.
    pub dropped: DroppedRecord,
    /// Which dead letters are recorded.
    pub dead_letters: BucketRecord,
}

/// Counts of spaces that were evicted or dropped.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DroppedRecord {
    /// Outcomes of their events.
    pub join: JoinCountsRecord,
    /// Examples that they had learned from.
    pub applied: u64,
}

/// The bucket that limits the volume of dead letters; [`crate::dead_letters`] defines it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BucketRecord {
    /// Bytes taken out of the bucket.
    pub taken_bytes: u64,
    /// Dead letters that found the bucket empty.
    pub beyond: u64,
    /// Those of them that were counted but not recorded.
    pub unrecorded: u64,
}

impl Record for LaneRecord {
    const KIND: Kind = Kind::Lane;
    const VERSION: u16 = 2;

    fn upgrade(version: u16, payload: &[u8]) -> Result<Self, Damaged> {
        match version {
            1 => envelope::decode::<LaneRecordV1>(payload).map(Self::from),
            _ => Err(Damaged::unknown_version(version)),
        }
    }
}

/// Version 1: rewards that are further or clipped were not counted.
#[derive(Deserialize)]
struct LaneRecordV1 {
    dropped: DroppedRecordV1,
    dead_letters: BucketRecord,
}

#[derive(Deserialize)]
struct DroppedRecordV1 {
    join: JoinCountsRecordV1,
    applied: u64,
}

impl From<LaneRecordV1> for LaneRecord {
    fn from(LaneRecordV1 { dropped, dead_letters }: LaneRecordV1) -> Self {
        Self { dropped: dropped.into(), dead_letters }
    }
}

impl From<DroppedRecordV1> for DroppedRecord {
    fn from(DroppedRecordV1 { join, applied }: DroppedRecordV1) -> Self {
        Self { join: join.into(), applied }
    }
}

impl DroppedRecord {
    /// From bytes of 0.1: the payload of version 1 alone.
    pub fn open_unversioned(bytes: &[u8]) -> Result<Self, Damaged> {
        envelope::decode::<DroppedRecordV1>(bytes).map(Self::from)
    }
}

impl BucketRecord {
    /// From bytes of 0.1: the payload alone.
    pub fn open_unversioned(bytes: &[u8]) -> Result<Self, Damaged> {
        envelope::decode(bytes)
    }
}
