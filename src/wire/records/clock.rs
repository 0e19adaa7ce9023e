//! A clock in event time, as part of other records.

use serde::{Deserialize, Serialize};

/// A clock that shows the k-th largest timestamp it has observed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClockRecord {
    /// The k largest timestamps, where k is [`LargestRecord::most`].
    pub newest: LargestRecord,
    /// The time, in milliseconds since 1970. Absent until k timestamps were observed. At least the smallest of `newest`
    /// once these are k; above it after an observation was retracted.
    pub time_ms: Option<i64>,
}

/// The largest of many numbers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LargestRecord {
    /// How many are kept, at least 1.
    pub most: u64,
    /// The numbers in ascending order, at most `most` of them. A number may occur several times.
    pub values: Vec<i64>,
}
