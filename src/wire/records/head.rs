//! The head of a snapshot: what a store keeps beside the records.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::Record;
use super::clock::{ClockRecord, LargestRecord};
use crate::event::Name;
use crate::wire::envelope::{self, Damaged, Kind};

/// The head of a snapshot of a lane.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct HeadRecord {
    /// Bad query events.
    pub queries_dead: u64,
    /// Bad reward events.
    pub rewards_dead: u64,
    /// Positions in the logs.
    pub merge: MergeRecord,
    /// Grows when history forks.
    pub epoch: u64,
    /// The last publication of each space, made right after the snapshot that names it.
    pub publications: BTreeMap<Name, Publication>,
    /// The settings that learning depends on, as JSON. A reader must accept the JSON of every earlier version.
    pub configuration: String,
    /// Length of the log of applied requests, in bytes.
    pub audit_bytes: u64,
    /// When it was made, in milliseconds since 1970.
    pub created_ms: u64,
}

/// Progress of a merge of logs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MergeRecord {
    /// Positions of the logs that were begun, by the name of the log.
    pub positions: BTreeMap<String, PositionRecord>,
    /// The largest time emitted in order.
    pub last_ms: Option<i64>,
    /// Events that were emitted after a later one.
    pub out_of_order: u64,
}

/// Progress in a log. Offsets are bytes in a file, messages in a partition.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PositionRecord {
    /// All events before this offset are done.
    pub floor: u64,
    /// Lines before the floor; 0 where there are no lines.
    pub floor_line: u64,
    /// The log was read ahead to this offset.
    pub read: u64,
    /// Runs of events between the two that are done, in ascending order: start of the first event, end of the last.
    pub done: Vec<(u64, u64)>,
    /// The log's time at the floor.
    pub time: ClockRecord,
}

/// Which parameters were published.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Publication {
    /// Examples in applied batches.
    pub version: u64,
    /// Publications at this version before this one.
    pub revision: u64,
}

/// The head of a snapshot in shared storage; wraps the head of the lane.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharedHead {
    /// The instance that wrote it.
    pub instance: String,
    /// Number of partitions that the spaces were distributed over.
    pub partitions: u32,
    /// For every instance that owned the lane: the length of its log of applied requests, and the term in which it last
    /// owned the lane. That prefix of the log is contained in this state or an earlier one; nothing beyond it is.
    pub audits: BTreeMap<String, Audit>,
    /// Number of ownership changes so far.
    pub term: u64,
    /// The lane's own head: a sealed [`HeadRecord`].
    pub lane: Vec<u8>,
}

/// The log of applied requests of one instance for a lane.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Audit {
    /// Length in bytes.
    pub bytes: u64,
    /// The term in which it last grew.
    pub term: u64,
}

impl Record for HeadRecord {
    const KIND: Kind = Kind::Snapshot;
    const VERSION: u16 = 2;

    fn upgrade(version: u16, payload: &[u8]) -> Result<Self, Damaged> {
        match version {
            1 => envelope::decode::<HeadRecordV1>(payload).map(Self::from),
            _ => Err(Damaged::unknown_version(version)),
        }
    }
}

impl Record for SharedHead {
    const KIND: Kind = Kind::Shared;
    const VERSION: u16 = 1;

    fn upgrade(version: u16, _: &[u8]) -> Result<Self, Damaged> {
        Err(Damaged::unknown_version(version))
    }
}

/// Version 1: the time of a log was its largest timestamp, and events were done one by one.
#[derive(Deserialize)]
struct HeadRecordV1 {
    queries_dead: u64,
    rewards_dead: u64,
    merge: MergeRecordV1,
    epoch: u64,
    publications: BTreeMap<Name, Publication>,
    configuration: String,
    audit_bytes: u64,
    created_ms: u64,
}

#[derive(Deserialize)]
struct MergeRecordV1 {
    positions: BTreeMap<String, PositionRecordV1>,
    /// Dropped, as are the times of the positions.
    _last_ms: Option<i64>,
    out_of_order: u64,
}

#[derive(Deserialize)]
struct PositionRecordV1 {
    floor: u64,
    floor_line: u64,
    read: u64,
    /// Starts of events beyond the floor that are done.
    ahead: BTreeSet<u64>,
    _newest_ms: Option<i64>,
}

impl From<HeadRecordV1> for HeadRecord {
    fn from(old: HeadRecordV1) -> Self {
        let HeadRecordV1 { queries_dead, rewards_dead, merge, epoch, .. } = old;
        let HeadRecordV1 { publications, configuration, audit_bytes, created_ms, .. } = old;
        let merge = merge.into();
        Self { queries_dead, rewards_dead, merge, epoch, publications, configuration, audit_bytes, created_ms }
    }
}

impl From<MergeRecordV1> for MergeRecord {
    /// A single event could set that version's times to anything, so all times are absent: the merge finds them again from
    /// the floor on. An event that is done becomes a run of one byte.
    fn from(old: MergeRecordV1) -> Self {
        let position = |old: PositionRecordV1| PositionRecord {
            floor: old.floor,
            floor_line: old.floor_line,
            read: old.read,
            done: old.ahead.into_iter().map(|start| (start, start.saturating_add(1))).collect(),
            time: ClockRecord { newest: LargestRecord { most: 8, values: Vec::new() }, time_ms: None },
        };
        let positions = old.positions.into_iter().map(|(name, old)| (name, position(old))).collect();
        Self { positions, last_ms: None, out_of_order: old.out_of_order }
    }
}
