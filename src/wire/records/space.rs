//! The record of a space: everything but its learner and its requests.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::Record;
use super::clock::{ClockRecord, LargestRecord};
use super::counts::{JoinCountsRecord, JoinCountsRecordV1};
use crate::event::ModelName;
use crate::wire::envelope::{self, Damaged, Kind};

/// A space without its learner and its requests.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SpaceRecord {
    /// Names of its models. Requests refer to a model by its index here. Empty while the space has only rewards.
    pub models: Vec<ModelName>,
    /// Names of removed models, in ascending order. Their events are counted and skipped.
    pub retired: BTreeSet<ModelName>,
    /// The join without its requests.
    pub join: JoinRecord,
    /// Events whose timestamp no other event has confirmed yet.
    pub probation: ProbationRecord,
    /// What its examples were. Absent before the first.
    pub learned: Option<LearnedRecord>,
}

/// What the examples of a space were, since its models or the range of rewards last changed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LearnedRecord {
    /// The configured range of rewards: its lower and its upper end.
    pub range: (f64, f64),
    /// Number of examples of each model.
    pub examples: Vec<u64>,
    /// Examples with a reward of their own. The others have the default reward.
    pub rewarded: u64,
    /// Those of them whose reward was outside the range.
    pub clipped: u64,
    /// Decisions of each model that failed.
    pub failures: Vec<u64>,
    /// Least and greatest reward of all examples, on the scale of 0..1. Absent while only decisions failed.
    pub extremes: Option<(f64, f64)>,
}

/// The join of a space without its requests.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct JoinRecord {
    /// The rule in force when the record was written.
    pub spec: JoinSpecRecord,
    /// The space's time.
    pub clock: ClockRecord,
    /// Outcomes of all events. `pending` counts what the request records hold.
    pub counts: JoinCountsRecord,
    /// Finished requests plus identities of their rewards in the request records. A reader detects a lost record by it.
    pub remembered: u64,
    /// Queries with a smaller `ts_ms` are late, whatever the window. Absent until a window was lengthened.
    pub horizon_ms: Option<i64>,
}

/// How a space joins; the configuration section `[join]`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct JoinSpecRecord {
    /// How long after its query a reward counts.
    pub window_ms: u64,
    /// How long before its query a reward counts.
    pub early_ms: u64,
    /// How long a finished request is remembered.
    pub remember_ms: u64,
    /// What a query without reward becomes.
    pub on_missing: OnMissingRecord,
    /// How several rewards of a request become one.
    pub aggregate: AggregateRecord,
    /// Limit on waiting requests.
    pub pending_max: u64,
    /// Limit on the memory of waiting requests, in bytes.
    pub pending_bytes_max: u64,
    /// Limit on finished requests plus identities of their rewards.
    pub remembered_max: u64,
}

/// What a query becomes whose window closes without a reward.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub enum OnMissingRecord {
    /// Nothing.
    Drop,
    /// An example with this reward.
    Default(f64),
}

/// How several rewards of a request become one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum AggregateRecord {
    /// The first, learned at once.
    First,
    /// The last when the window closes.
    Last,
    /// The sum.
    Sum,
    /// The mean.
    Mean,
    /// The largest.
    Max,
    /// The smallest.
    Min,
}

/// Events on probation of a space.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProbationRecord {
    /// The largest timestamp of a trusted event. Absent until the space has a time.
    pub trusted_ms: Option<i64>,
    /// Timestamps of the newest trusted queries.
    pub recent_queries: LargestRecord,
    /// Timestamps of the newest trusted rewards.
    pub recent_rewards: LargestRecord,
    /// The events, in ascending order of (`ts_ms`, side, request ID, bytes).
    pub held: Vec<HeldRecord>,
}

/// An event on probation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeldRecord {
    /// Its event time.
    pub ts_ms: i64,
    /// The time of its log when it was read. A trusted event that is newer speaks against it.
    pub after_ms: i64,
    /// Whether the join has it already, and this is a copy.
    pub is_taken: bool,
    /// Where it was read, for its dead letter.
    pub place: String,
    /// Query or reward.
    pub side: SideRecord,
    /// The event as it was read: JSON.
    pub bytes: Vec<u8>,
}

/// The input of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum SideRecord {
    /// A query event.
    Query,
    /// A reward event.
    Reward,
}

impl Record for SpaceRecord {
    const KIND: Kind = Kind::Space;
    const VERSION: u16 = 5;

    fn upgrade(version: u16, payload: &[u8]) -> Result<Self, Damaged> {
        match version {
            1 => envelope::decode::<SpaceRecordV1>(payload).map(SpaceRecordV3::from).map(Self::from),
            2 => envelope::decode::<SpaceRecordV2>(payload).map(SpaceRecordV3::from).map(Self::from),
            3 => envelope::decode::<SpaceRecordV3>(payload).map(Self::from),
            4 => envelope::decode::<SpaceRecordV4>(payload).map(Self::from),
            _ => Err(Damaged::unknown_version(version)),
        }
    }
}

/// Version 4: failures were not counted.
#[derive(Deserialize)]
struct SpaceRecordV4 {
    models: Vec<ModelName>,
    retired: BTreeSet<ModelName>,
    join: JoinRecord,
    probation: ProbationRecord,
    learned: Option<LearnedRecordV4>,
}

#[derive(Deserialize)]
struct LearnedRecordV4 {
    range: (f64, f64),
    examples: Vec<u64>,
    rewarded: u64,
    clipped: u64,
    least: f64,
    greatest: f64,
}

impl From<SpaceRecordV4> for SpaceRecord {
    fn from(old: SpaceRecordV4) -> Self {
        let SpaceRecordV4 { models, retired, join, probation, learned } = old;
        let learned = learned.map(|LearnedRecordV4 { range, examples, rewarded, clipped, least, greatest }| {
            let failures = vec![0; examples.len()];
            LearnedRecord { range, examples, rewarded, clipped, failures, extremes: Some((least, greatest)) }
        });
        Self { models, retired, join, probation, learned }
    }
}

/// Version 3: without a summary of the examples, and rewards that are further or clipped were not counted.
#[derive(Deserialize)]
struct SpaceRecordV3 {
    models: Vec<ModelName>,
    retired: BTreeSet<ModelName>,
    join: JoinRecordV3,
    probation: ProbationRecord,
}

#[derive(Deserialize)]
struct JoinRecordV3 {
    spec: JoinSpecRecord,
    clock: ClockRecord,
    counts: JoinCountsRecordV1,
    remembered: u64,
    horizon_ms: Option<i64>,
}

impl From<SpaceRecordV3> for SpaceRecord {
    /// No summary: it begins with the next example.
    fn from(old: SpaceRecordV3) -> Self {
        let SpaceRecordV3 { models, retired, join, probation } = old;
        let JoinRecordV3 { spec, clock, counts, remembered, horizon_ms } = join;
        let join = JoinRecord { spec, clock, counts: counts.into(), remembered, horizon_ms };
        Self { models, retired, join, probation, learned: None }
    }
}

/// Version 2: without a horizon.
#[derive(Deserialize)]
struct SpaceRecordV2 {
    models: Vec<ModelName>,
    retired: BTreeSet<ModelName>,
    join: JoinRecordV2,
    probation: ProbationRecord,
}

#[derive(Deserialize)]
struct JoinRecordV2 {
    spec: JoinSpecRecord,
    clock: ClockRecord,
    counts: JoinCountsRecordV1,
    remembered: u64,
}

impl From<SpaceRecordV2> for SpaceRecordV3 {
    /// No horizon: that version kept none when a window was lengthened.
    fn from(old: SpaceRecordV2) -> Self {
        let SpaceRecordV2 { models, retired, join, probation } = old;
        let JoinRecordV2 { spec, clock, counts, remembered } = join;
        Self { models, retired, join: JoinRecordV3 { spec, clock, counts, remembered, horizon_ms: None }, probation }
    }
}

/// Version 1: the time was the largest timestamp, and nothing was on probation.
#[derive(Deserialize)]
struct SpaceRecordV1 {
    models: Vec<ModelName>,
    retired: BTreeSet<ModelName>,
    join: JoinRecordV1,
}

#[derive(Deserialize)]
struct JoinRecordV1 {
    spec: JoinSpecRecord,
    time_ms: Option<i64>,
    counts: JoinCountsRecordV1,
    remembered: u64,
}

impl From<SpaceRecordV1> for SpaceRecordV3 {
    /// A single event could set that version's time to anything, so the time counts as one observation of eight. Nothing is
    /// on probation.
    fn from(old: SpaceRecordV1) -> Self {
        let SpaceRecordV1 { models, retired, join } = old;
        let JoinRecordV1 { spec, time_ms, counts, remembered } = join;
        let newest = LargestRecord { most: 8, values: time_ms.into_iter().collect() };
        let clock = ClockRecord { newest, time_ms: None };
        let none = || LargestRecord { most: 64, values: Vec::new() };
        let probation =
            ProbationRecord { trusted_ms: None, recent_queries: none(), recent_rewards: none(), held: Vec::new() };
        Self { models, retired, join: JoinRecordV3 { spec, clock, counts, remembered, horizon_ms: None }, probation }
    }
}
