//! The record of a request: one version byte, then the payload.
//!
//! Requests are by far the most numerous records, so they have no envelope. The store beneath keeps a checksum of every
//! record.
//!
//! 0.1 wrote the payload of version 1 without the version byte, under another key ([`super::keys`]).

use std::borrow::Cow;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::wire::envelope::{self, Damaged};

/// Version that is written.
pub const VERSION: u8 = 2;

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
    /// The distribution before floor or guard were mixed in, one entry per model. Absent: the propensities.
    pub policy: Option<Cow<'a, [f64]>>,
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
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct RewardRecord {
    /// What makes it the same reward within its request: XXH3-64 of its event ID with seed 1, or without one of its `ts_ms`
    /// and its value, 8 bytes each in little-endian order, with seed 0. A value of -0 counts as 0.
    pub identity: u64,
    /// Its event time.
    pub ts_ms: i64,
    /// Its value, finite, as it was logged.
    pub reward: f64,
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

/// Version 1: without the reward that was learned.
#[derive(Deserialize)]
enum RequestRecordV1<D> {
    Pending(PendingRecord<D>),
    Finished(FinishedRecordV1),
}

#[derive(Deserialize)]
struct FinishedRecordV1 {
    ts_ms: i64,
    until_ms: i64,
    settled: bool,
    seen: Vec<u64>,
}

impl<D> From<RequestRecordV1<D>> for RequestRecord<D> {
    /// Which reward was learned is unknown, so that any further one may repeat it.
    fn from(old: RequestRecordV1<D>) -> Self {
        match old {
            RequestRecordV1::Pending(pending) => Self::Pending(pending),
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

impl<D: DeserializeOwned> RequestRecord<D> {
    /// From bytes of any version.
    pub fn open(bytes: &[u8]) -> Result<Self, Damaged> {
        match envelope::open_short(VERSION, bytes)? {
            (VERSION, payload) => envelope::decode(payload),
            (1, payload) => Self::open_unversioned(payload),
            (version, _) => Err(Damaged::unknown_version(version.into())),
        }
    }

    /// From bytes of 0.1: the payload of version 1 alone.
    pub fn open_unversioned(bytes: &[u8]) -> Result<Self, Damaged> {
        envelope::decode::<RequestRecordV1<D>>(bytes).map(Self::from)
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
