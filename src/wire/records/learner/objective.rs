//! What models cost besides their reward, and the prices that keep budgets.

use serde::{Deserialize, Serialize};

/// The state of the objective.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ObjectiveRecord {
    /// One per outcome that was configured, in the order of their names.
    pub outcomes: Vec<OutcomeRecord>,
    /// The quality floor.
    pub floor: FloorRecord,
    /// Examples learned by the last charge.
    pub examples: u64,
    /// Fading mean of the examples learned from one charge to the next.
    pub examples_per_charge: FadingMeanRecord,
    /// Fading mean of the age of the parameters that decided, in charges.
    pub age: FadingMeanRecord,
    /// The share of a violation that one request corrects.
    pub pace: f64,
}

/// One outcome.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct OutcomeRecord {
    /// Its name.
    pub name: String,
    /// Per model the outcomes that were observed.
    pub observed: Vec<FadingMeanRecord>,
    /// What one budget takes from a score.
    pub price: f64,
    /// What was spent beyond the budget and is to be saved again, in budgets of one request.
    pub debt: f64,
    /// Fading mean of the variance of the cost over the played distribution, in squared budgets.
    pub variance: FadingMeanRecord,
    /// Requests charged.
    pub requests: u64,
    /// What they were charged, in the unit of the outcome.
    pub spent: f64,
    /// Fading mean of the same, over the latest requests.
    pub recent: FadingMeanRecord,
}

/// A fading mean: `sum / weight`, none if `weight` is 0.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct FadingMeanRecord {
    /// Weighted sum.
    pub sum: f64,
    /// Sum of weights.
    pub weight: f64,
}

/// The quality floor.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct FloorRecord {
    /// The share of the prices that the floor does not permit.
    pub relief: f64,
    /// Fading mean of the predicted reward of what was played.
    pub played: FadingMeanRecord,
    /// Per model a fading mean of its predicted reward.
    pub alone: Vec<FadingMeanRecord>,
}
