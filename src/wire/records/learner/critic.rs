//! Learners with a critic, which predicts the reward of every model.

use serde::{Deserialize, Serialize};

use super::hpg::{BallRecord, HpgRecord, ParametersRecord};
use super::regression::{DirectionsRecord, DriftRecord, OverlapRecord, TrustRecord};
use super::rivals::SymmetricRecord;

/// The state of a learner with a critic.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CriticLearnerRecord {
    /// The critic.
    pub critic: CriticRecord,
    /// The policy of `hpg`, on queries with one more component; none for `hypentropy-regression`.
    pub actor: Option<HpgRecord>,
}

/// A critic. Its features are f = 1 + n + k (k + 1) / 2 numbers: 1, the coordinates y = V'q, and for each j <= k the square
/// of y_j, followed by sqrt(2) y_j y_i for each i in j + 1..k.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CriticRecord {
    /// n: coordinates of a query.
    pub linear_rank: u64,
    /// k: coordinates whose products are features.
    pub feature_rank: u64,
    /// V: the leading directions of the queries, one after the other, `dim` numbers each; at most n.
    pub basis: Vec<f64>,
    /// Sketch of the queries.
    pub directions: DirectionsRecord,
    /// How alike consecutive queries are.
    pub overlap: OverlapRecord,
    /// Per model its ridge regression.
    pub models: Vec<RidgeModelRecord>,
    /// Weights that all models share: f numbers.
    pub shared: Vec<f64>,
    /// The ball of the remainders.
    pub ball: BallRecord,
    /// Per model what it learned from the residuals of the regression.
    pub remainders: Vec<RemainderRecord>,
    /// Places of the table of head queries.
    pub head_capacity: u64,
    /// Queries of the table, in the order of their places.
    pub head: Vec<HeadQueryRecord>,
    /// What queries that are not in the table say of the models on the whole.
    pub evicted: ConstantsRecord,
    /// Evidence on first visits: y is the reward and s the regression's prediction, both above a constant one.
    pub evidence: TrustRecord,
    /// The same for repeated queries, each left out of its own prediction.
    pub held_out: TrustRecord,
    /// Evidence for the remainder: y is the regression's residual on first visits, s the remainder's prediction of it.
    pub remainder_evidence: TrustRecord,
    /// Share of the regression's query-dependent part that is played, 0 to 1.
    pub trust: f64,
    /// Per model the mean of its prediction over the table's queries, at the last solution.
    pub constants: Vec<f64>,
    /// Per model the logarithm of its weight where the prediction is not trusted, 0 or below.
    pub fallback: Vec<f64>,
    /// Fading sum of squared errors, and of their weights.
    pub errors: ErrorsRecord,
    /// Test for a change of the prediction errors.
    pub drift: DriftRecord,
    /// Version: examples in applied batches.
    pub version: u64,
    /// Version at the last detected change; 0 if there was none.
    pub changed_at: u64,
    /// Version at which the regression is solved next.
    pub next_solution: u64,
    /// Version at the last solution.
    pub solved_at: u64,
}

/// One model's ridge regression.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RidgeModelRecord {
    /// Weighted sum of phi phi', f x f.
    pub information: SymmetricRecord,
    /// Weighted sum of (reward - 0.5) phi: f numbers.
    pub moments: Vec<f64>,
    /// Its weights at the last solution: f numbers.
    pub weights: Vec<f64>,
}

/// One model's mirror step on residuals.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RemainderRecord {
    /// W of this model alone: every list "per model" has one entry. Never `Lazy`.
    pub parameters: ParametersRecord,
    /// Its examples since the last change, older ones weighted less if the configuration forgets.
    pub examples: f64,
    /// Version after its last example.
    pub learned_at: u64,
}

/// A query that is seen often.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct HeadQueryRecord {
    /// Its place in the table.
    pub place: u64,
    /// Its key, as in the parameters.
    pub key: u64,
    /// Its coordinates V'q: n numbers.
    pub coordinates: Vec<f32>,
    /// Per model its examples.
    pub examples: Vec<f32>,
    /// Per model the sum of reward - 0.5.
    pub sums: Vec<f32>,
    /// How many other queries it outlasts in its bucket.
    pub credit: u32,
}

/// Sums over queries of the least squares of the models' mean rewards. With a_m = n / (1 + 0.2 n) for the n examples of
/// model m on a query, P is diag(a) - a a' / (1 / 0.3 + sum of a).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ConstantsRecord {
    /// Sum of P, one row and column per model.
    pub information: SymmetricRecord,
    /// Sum of P x, where x is per model the mean of reward - 0.5.
    pub moments: Vec<f64>,
}

/// A fading mean of squared errors.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ErrorsRecord {
    /// Weighted sum.
    pub sum: f64,
    /// Sum of weights.
    pub weight: f64,
}
