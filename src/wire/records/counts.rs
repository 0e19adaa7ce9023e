//! Outcomes of events, as part of other records.

use serde::{Deserialize, Serialize};

/// Largest count that a reader accepts. No lane reads this many events, and sums over spaces stay below the end of `u64`.
pub const COUNT_MAX: u64 = 1 << 48;

/// Outcomes of queries and rewards. The outcomes of a side are disjoint and sum to its `read`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct JoinCountsRecord {
    /// The queries.
    pub queries: QueryCountsRecord,
    /// The rewards.
    pub rewards: RewardCountsRecord,
}

/// Outcomes of queries; [`crate::joiner`] defines them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueryCountsRecord {
    /// All valid queries: the sum of the others.
    pub read: u64,
    /// Queries of a removed model.
    pub retired: u64,
    /// Queries of a request whose query is known.
    pub duplicate: u64,
    /// Queries that came after their own window.
    pub late: u64,
    /// Queries that became examples with a reward.
    pub joined: u64,
    /// Queries whose window closed without a reward.
    pub expired: u64,
    /// Queries evicted at a limit.
    pub evicted: u64,
    /// Queries with an open window.
    pub pending: u64,
}

/// Outcomes of rewards; [`crate::joiner`] defines them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RewardCountsRecord {
    /// All valid rewards: the sum of the others.
    pub read: u64,
    /// Rewards that became part of an example.
    pub used: u64,
    /// Rewards that repeat another, or come second under `first`.
    pub duplicate: u64,
    /// Rewards that came after their request was finished.
    pub late: u64,
    /// Rewards without a query within reach.
    pub orphaned: u64,
    /// Rewards evicted at a limit.
    pub evicted: u64,
    /// Rewards held for an open window, or for a query that has not come.
    pub pending: u64,
    /// Part of `duplicate`: rewards that came second under `first` and repeat no other.
    pub further: u64,
    /// Part of `used`: rewards that were learned clipped, each after aggregation.
    pub clipped: u64,
}

/// The counts without the parts of `duplicate` and `used`: version 1 of the lane's record, 1 to 3 of a space's.
#[derive(Debug, Clone, Copy, Default, Deserialize)]
pub(super) struct JoinCountsRecordV1 {
    queries: QueryCountsRecord,
    rewards: RewardCountsRecordV1,
}

#[derive(Debug, Clone, Copy, Default, Deserialize)]
struct RewardCountsRecordV1 {
    read: u64,
    used: u64,
    duplicate: u64,
    late: u64,
    orphaned: u64,
    evicted: u64,
    pending: u64,
}

impl From<JoinCountsRecordV1> for JoinCountsRecord {
    /// No further and no clipped rewards: those versions did not count them.
    fn from(old: JoinCountsRecordV1) -> Self {
        let RewardCountsRecordV1 { read, used, duplicate, late, orphaned, evicted, pending } = old.rewards;
        let (further, clipped) = (0, 0);
        let rewards = RewardCountsRecord { read, used, duplicate, late, orphaned, evicted, pending, further, clipped };
        Self { queries: old.queries, rewards }
    }
}
