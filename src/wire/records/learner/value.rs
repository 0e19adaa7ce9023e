//! Estimates of the policy value: what the learner's policy and its rivals would have earned on the logged examples.
//!
//! For an example, p is the propensity of the chosen model, pi the probability that an evaluated policy gives it, w = pi / p
//! (at most 1e6) and r the reward.

use serde::{Deserialize, Serialize};

/// What is known of the policy value, and the state of the rollout.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PolicyValueRecord {
    /// Examples, evaluated or not.
    pub examples: u64,
    /// The estimates.
    pub evaluation: EvaluationRecord,
    /// Per model the rewards of the examples that chose it.
    pub rewards: Vec<ModelRewardsRecord>,
    /// Per model its probability in the mix that is played while the incumbent is searched for; empty before the first look,
    /// when all are equal.
    pub fallback_mix: Vec<f64>,
    /// The rollout; none before version 6.
    pub rollout: Option<RolloutRecord>,
    /// Whether models were played as often as the propensities say.
    pub sample_ratio: SampleRatioRecord,
}

/// How much of the traffic follows the policy, and why.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RolloutRecord {
    /// `learner.stage`
    pub configured: StageRecord,
    /// The present stage.
    pub stage: StageRecord,
    /// Index of the incumbent; none while it is searched for.
    pub incumbent: Option<u64>,
    /// Evaluated examples.
    pub examples: u64,
    /// Whether the promise has begun.
    pub has_begun: bool,
    /// Of the sum of x since then, each multiplied by 4: x is the lift over the incumbent plus the budget.
    pub ledger: BoundRecord,
    /// What was earned so long ago that it may not be lost again, in rewards.
    pub forgotten: f64,
    /// Planned share of the traffic that follows the policy.
    pub share: f64,
    /// The largest share that is still played while the log does not show the planned one.
    pub share_before: f64,
    /// Examples when it was planned.
    pub planned_at: u64,
    /// Whether the log shows it.
    pub has_arrived: bool,
    /// Whether the log has shown an older one since the last look.
    pub is_mixed: bool,
    /// Examples after the plan that an older share decided.
    pub late: u64,
    /// The same of earlier plans; none before the log has shown one.
    pub lag: Option<u64>,
}

/// `learner.stage`
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum StageRecord {
    /// `observe`
    Observe,
    /// `shadow`
    Shadow,
    /// `canary`
    Canary,
    /// `full`
    Full,
}

/// The sample-ratio test, over the examples whose whole distribution was logged, declared or assumed.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct SampleRatioRecord {
    /// Per model what it was played.
    pub models: Vec<SharesRecord>,
    /// Natural logarithm of the evidence against the propensities.
    pub log_evidence: f64,
}

/// How often a model was played.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct SharesRecord {
    /// Tested examples that it was played for.
    pub played: u64,
    /// Sum of its propensities, each divided by the sum of the propensities of its example.
    pub expected: f64,
}

/// Rewards of one model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ModelRewardsRecord {
    /// Sum of rewards.
    pub sum: f64,
    /// Number of rewards.
    pub count: u64,
}

/// Estimates over all examples and over the latest ones. A list of estimates has the logged policy, the learner's, the
/// uniform one, then per model the policy that always plays it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EvaluationRecord {
    /// Number of models.
    pub models: u64,
    /// Evaluated examples.
    pub events: u64,
    /// Estimates over all of them.
    pub all: Vec<EstimateRecord>,
    /// Examples of a block.
    pub block_events: u64,
    /// Estimates over each of the latest blocks, oldest first; at most 10 blocks.
    pub blocks: Vec<Vec<EstimateRecord>>,
    /// Older blocks that were dropped.
    pub blocks_dropped: u64,
}

/// Sums over examples for one policy.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct EstimateRecord {
    /// Sums of weights.
    pub weights: WeightsRecord,
    /// Sum of the doubly robust estimates.
    pub robust: f64,
    /// Sum of their squares.
    pub robust_square: f64,
    /// Of the value, then of minus the value.
    pub value: [BoundRecord; 2],
    /// Per model b of the lift over the policy that always plays b, then of minus that lift. Empty for the policies that
    /// always play one model.
    pub lifts: Vec<[BoundRecord; 2]>,
}

/// Sums for self-normalised importance sampling.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct WeightsRecord {
    /// Sum of w.
    pub weight: f64,
    /// Sum of w r.
    pub reward: f64,
    /// Sum of w^2.
    pub square: f64,
    /// Sum of w^2 r.
    pub square_reward: f64,
    /// Sum of w^2 r^2.
    pub square_reward_square: f64,
}

/// Sums for a lower confidence bound on a mean. x is an unbiased estimate of the example's part of the mean, or is below one.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct BoundRecord {
    /// Number of x.
    pub count: u64,
    /// Sum of x.
    pub sum: f64,
    /// Sum of (x - c)^2; c is a prediction from before x was known, at most x + 4.
    pub variation: f64,
}
