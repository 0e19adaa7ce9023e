//! The record of a request: one version byte, then the payload.
//!
//! Requests are by far the most numerous records, so they have no envelope. The store beneath keeps a checksum of every
//! record.
//!
//! 0.1 wrote the payload of version 1 without the version byte, under another key ([`super::keys`]).

use std::borrow::Cow;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::feedback::{Feedback, MoreFeedback};
use crate::wire::envelope::{self, Damaged};

/// Version that is written.
pub const VERSION: u8 = 3;

/// A request, pending or remembered. `D` is what its query decided: a [`DecisionRecord`] in a store.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum RequestRecord<D = DecisionRecord<'static>> {
    /// Not finished: it has an open query, early rewards, or both.
    Pending(PendingRecord<D>),
    /// Joined, expired or evicted, and remembered.
    Finished(FinishedRecord),
}

/// A request that is not finished.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PendingRecord<D> {
    /// Its query. Absent while only rewards came; then there is at least one.
    pub query: Option<QueryRecord<D>>,
    /// Its rewards, in ascending order of their identity, each once.
    pub rewards: Vec<RewardRecord>,
}

/// A query whose window is open.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct QueryRecord<D> {
    /// Its event time.
    pub ts_ms: i64,
    /// What it decided.
    pub decision: D,
}

/// A decision of a router.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DecisionRecord<'a> {
    /// The query's embedding as it was logged, not normalised.
    pub vector: Cow<'a, [f32]>,
    /// The chosen model, as an index into the models of the space's record.
    pub model: u16,
    /// What is known of the distribution that the model was drawn from.
    pub propensities: PropensitiesRecord<'a>,
    /// The distribution before the floor was mixed in, one entry per model. Absent: the propensities.
    pub policy: Option<Cow<'a, [f64]>>,
    /// Whether each model could be chosen. Absent: all.
    pub eligible: Option<Cow<'a, [bool]>>,
    /// What it was charged of each outcome, by name.
    pub charged: Cow<'a, [(String, f64)]>,
    /// Whether it was drawn by a key that several requests share.
    pub is_keyed: bool,
}

/// What is known of the distribution that a model was drawn from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum PropensitiesRecord<'a> {
    /// The probability of every model. Sums to less than 1 if a removed model had a share.
    Full(Cow<'a, [f64]>),
    /// The probability of the chosen model.
    Chosen(f64),
    /// Nothing.
    Nothing,
}

/// A reward that is held for its request.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RewardRecord {
    /// What makes it the same reward within its request: XXH3-64 of its event ID with seed 1, or without one of its `ts_ms`
    /// and its value, 8 bytes each in little-endian order, with seed 0. A value of -0 counts as 0. If there is more feedback
    /// than a value, its encoding follows, with seed 2; an absent value counts as 0.
    pub identity: u64,
    /// Its event time.
    pub ts_ms: i64,
    /// Its value, finite, as it was logged, if it has one.
    pub reward: Option<f64>,
    /// What else it says.
    pub more: Option<Box<MoreFeedback>>,
    /// How many rewards its space had read with it. Orders rewards of one `ts_ms`.
    pub arrival: u64,
}

/// A finished request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FinishedRecord {
    /// Event time of its query.
    pub ts_ms: i64,
    /// It is forgotten when the space's time is past this.
    pub until_ms: i64,
    /// Whether every further reward is a duplicate, whatever its identity: it has joined under `first`.
    pub settled: bool,
    /// If `settled`, the identity of the reward that was learned; absent in requests that version 1 saved.
    pub used: Option<u64>,
    /// Identities of its rewards without `used`, in ascending order, each once.
    pub seen: Vec<u64>,
}

/// A decision that can be read from all versions.
pub trait SavedDecision: DeserializeOwned {
    /// Its form up to version 2.
    type Old: DeserializeOwned + Into<Self>;
}

impl SavedDecision for DecisionRecord<'static> {
    type Old = DecisionRecordV2;
}

/// Up to version 2: all models were eligible, and nothing was charged.
#[derive(Deserialize)]
pub struct DecisionRecordV2 {
    vector: Vec<f32>,
    model: u16,
    propensities: PropensitiesRecord<'static>,
    policy: Option<Vec<f64>>,
}

impl From<DecisionRecordV2> for DecisionRecord<'static> {
    fn from(old: DecisionRecordV2) -> Self {
        let DecisionRecordV2 { vector, model, propensities, policy } = old;
        let (vector, policy) = (Cow::Owned(vector), policy.map(Cow::Owned));
        Self { vector, model, propensities, policy, eligible: None, charged: Cow::Borrowed(&[]), is_keyed: false }
    }
}

/// Version 2: rewards were numbers.
#[derive(Deserialize)]
enum RequestRecordV2<D> {
    Pending(PendingRecordV2<D>),
    Finished(FinishedRecord),
}

#[derive(Deserialize)]
struct PendingRecordV2<D> {
    query: Option<QueryRecord<D>>,
    rewards: Vec<RewardRecordV2>,
}

#[derive(Deserialize)]
struct RewardRecordV2 {
    identity: u64,
    ts_ms: i64,
    reward: f64,
    arrival: u64,
}

impl<D: SavedDecision> From<RequestRecordV2<D::Old>> for RequestRecord<D> {
    fn from(old: RequestRecordV2<D::Old>) -> Self {
        match old {
            RequestRecordV2::Pending(pending) => Self::Pending(pending.into()),
            RequestRecordV2::Finished(finished) => Self::Finished(finished),
        }
    }
}

impl<D: SavedDecision> From<PendingRecordV2<D::Old>> for PendingRecord<D> {
    fn from(old: PendingRecordV2<D::Old>) -> Self {
        let query = old.query.map(|QueryRecord { ts_ms, decision }| QueryRecord { ts_ms, decision: decision.into() });
        let reward = |RewardRecordV2 { identity, ts_ms, reward, arrival }| {
            let Feedback { reward, more } = Feedback::reward(reward);
            RewardRecord { identity, ts_ms, reward, more, arrival }
        };
        Self { query, rewards: old.rewards.into_iter().map(reward).collect() }
    }
}

/// Version 1: without the reward that was learned.
#[derive(Deserialize)]
enum RequestRecordV1<D> {
    Pending(PendingRecordV2<D>),
    Finished(FinishedRecordV1),
}

#[derive(Deserialize)]
struct FinishedRecordV1 {
    ts_ms: i64,
    until_ms: i64,
    settled: bool,
    seen: Vec<u64>,
}

impl<D: SavedDecision> From<RequestRecordV1<D::Old>> for RequestRecord<D> {
    /// Which reward was learned is unknown, so that any further one may repeat it.
    fn from(old: RequestRecordV1<D::Old>) -> Self {
        match old {
            RequestRecordV1::Pending(pending) => Self::Pending(pending.into()),
            RequestRecordV1::Finished(FinishedRecordV1 { ts_ms, until_ms, settled, seen }) => {
                Self::Finished(FinishedRecord { ts_ms, until_ms, settled, used: None, seen })
            }
        }
    }
}

impl<D: Serialize> RequestRecord<D> {
    /// As bytes, in the newest version.
    pub fn seal(&self) -> Vec<u8> {
        envelope::seal_short(VERSION, self)
    }
}

impl<D: SavedDecision> RequestRecord<D> {
    /// From bytes of any version.
    pub fn open(bytes: &[u8]) -> Result<Self, Damaged> {
        match envelope::open_short(VERSION, bytes)? {
            (VERSION, payload) => envelope::decode(payload),
            (2, payload) => envelope::decode::<RequestRecordV2<D::Old>>(payload).map(Self::from),
            (1, payload) => Self::open_unversioned(payload),
            (version, _) => Err(Damaged::unknown_version(version.into())),
        }
    }

    /// From bytes of 0.1: the payload of version 1 alone.
    pub fn open_unversioned(bytes: &[u8]) -> Result<Self, Damaged> {
        envelope::decode::<RequestRecordV1<D::Old>>(bytes).map(Self::from)
    }
}

impl<D> RequestRecord<D> {
    /// The same request with another form of its decision.
    pub fn map<E>(self, convert: impl FnOnce(D) -> E) -> RequestRecord<E> {
        match self {
            Self::Pending(PendingRecord { query, rewards }) => {
                let query =
                    query.map(|QueryRecord { ts_ms, decision }| QueryRecord { ts_ms, decision: convert(decision) });
                RequestRecord::Pending(PendingRecord { query, rewards })
            }
            Self::Finished(finished) => RequestRecord::Finished(finished),
        }
    }
}
