//! The algorithms that HPG is compared with.

use serde::{Deserialize, Serialize};

use super::regression::OverlapRecord;

/// A symmetric matrix, as its lower triangle.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SymmetricRecord {
    /// n: number of rows.
    pub size: u64,
    /// One column after the other, the diagonal first: column j, counted from 0, has n - j numbers.
    pub lower: Vec<f64>,
}

/// The state of `lin-ucb` and `lin-thompson`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LinearBanditRecord {
    /// The configured ridge: a model without examples has A = ridge I.
    pub ridge: f64,
    /// How queries become features.
    pub features: FeaturesRecord,
    /// Per model its regression.
    pub models: Vec<RidgeRecord>,
}

/// How a query q becomes n features.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum FeaturesRecord {
    /// The `dim` components of q, then 1.
    Linear,
    /// Quadratic features whose directions are not known yet: zeros, then 1. Holds the examples so far, fewer than 500.
    WarmUp(Vec<EarlyRecord>),
    /// Quadratic features. Holds k directions, one after the other, `dim` numbers each. For the coordinates y of q in these
    /// directions the features are: for each j the square of y_j, followed by sqrt(2) y_j y_i for each i > j; then 1.
    Quadratic(Vec<f64>),
}

/// An example from before the directions were known.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EarlyRecord {
    /// The query, `dim` numbers.
    pub query: Vec<f64>,
    /// Index of the chosen model; none if the model was removed since.
    pub model: Option<u64>,
    /// The reward.
    pub reward: f64,
}

/// A ridge regression of reward - 1/2 on n features. A = ridge I + sum of phi phi', b = sum of (reward - 1/2) phi; the
/// weights are A^-1 b.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RidgeRecord {
    /// `fade` times A^-1, n x n.
    pub inverse: SymmetricRecord,
    /// b / `fade`, n numbers.
    pub moment: Vec<f64>,
    /// Forgetting that is not multiplied in yet, 0.5 to 1.
    pub fade: f64,
}

/// The state of `quadratic-sgd`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct QuadraticSgdRecord {
    /// How alike consecutive queries are.
    pub overlap: OverlapRecord,
    /// Per model its regression.
    pub models: Vec<QuadraticRecord>,
}

/// One model of a quadratic regression: predicts the score q'Wq.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct QuadraticRecord {
    /// W, `dim` x `dim`.
    pub parameters: SymmetricRecord,
    /// Its examples, older ones weighted less if the configuration forgets.
    pub examples: f64,
}

/// The state of `log-quadratic`: one matrix W per model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum LogQuadraticRecord {
    /// Without `learner.rank`: per model W, `dim` x `dim`.
    Dense(Vec<SymmetricRecord>),
    /// With `learner.rank`.
    Truncated {
        /// Per model W without the last steps, and its last steps.
        models: Vec<TruncatedRecord>,
        /// The s queries of the last steps, one after the other, `dim` numbers each; fewer than 32.
        recent_queries: Vec<f64>,
    },
}

/// One model of rank r: W = V diag(eigenvalues) V' + sum over i of `steps[i]` q_i q_i', q_i: the recent queries.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct TruncatedRecord {
    /// r eigenvalues.
    pub eigenvalues: Vec<f64>,
    /// V: one eigenvector after the other, `dim` numbers each.
    pub eigenvectors: Vec<f64>,
    /// s numbers, one per recent query.
    pub steps: Vec<f64>,
}

/// The state of `log-linear`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LogLinearRecord {
    /// Per model its parameters.
    pub models: Vec<LinearRecord>,
    /// The configured ridge of the Fisher matrices.
    pub ridge: f64,
    /// t: 1 plus the examples, older ones weighted less if the configuration forgets.
    pub examples: f64,
    /// The t that the ridge in the inverses belongs to; at most `examples`.
    pub ridge_examples: f64,
}

/// One model of natural policy gradient: its score is theta . q.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LinearRecord {
    /// theta, `dim` numbers.
    pub parameters: Vec<f64>,
    /// (t F)^-1, `dim` x `dim`; F is the mean Fisher matrix with its ridge.
    pub inverse_fisher: SymmetricRecord,
}

/// The state of `exp3`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Exp3Record {
    /// Per model its sum of weighted losses.
    pub losses: Vec<f64>,
    /// Examples, older ones weighted less if the configuration forgets.
    pub examples: f64,
}
