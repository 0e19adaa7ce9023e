//! Hypentropy regression: a mirror step as in HPG, and a second-order regression on the leading directions of the queries.

use serde::{Deserialize, Serialize};

use super::hpg::{BallRecord, ParametersRecord};
use super::rivals::SymmetricRecord;

/// The state of `hypentropy-regression`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RegressionRecord {
    /// The ball of the mirror step's parameters. A model may keep up to three times its rank where queries repeat.
    pub ball: BallRecord,
    /// Prior precision of the second-order parts.
    pub ridge: f64,
    /// Per model what it has learned.
    pub models: Vec<ModelRegressionRecord>,
    /// Sketch of the queries.
    pub directions: DirectionsRecord,
    /// V: the k directions of the second-order parts, one after the other, `dim` numbers each.
    pub basis: Vec<f64>,
    /// How alike consecutive queries are.
    pub overlap: OverlapRecord,
    /// How many queries repeat.
    pub repeats: RepeatsRecord,
    /// How well predictions did beside a constant one.
    pub trust: TrustRecord,
    /// Test for a change of the prediction errors.
    pub drift: DriftRecord,
    /// Version (examples in applied batches) at the last detected change; 0 if there was none.
    pub changed_at: u64,
}

/// One model of a hypentropy regression.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ModelRegressionRecord {
    /// W of this model alone: every list "per model" has one entry. Never `Lazy`.
    pub parameters: ParametersRecord,
    /// The second-order part.
    pub newton: NewtonRecord,
    /// Mean reward above the mean of all models.
    pub constant: ConstantRecord,
    /// Its examples since the last change, older ones weighted less if the configuration forgets.
    pub examples: f64,
    /// Version after its last example.
    pub learned_at: u64,
}

/// A Kalman filter over n = 1 + k (k + 1) / 2 features. For the coordinates y = V'q these are: 0.3, then for each j the
/// square of y_j, followed by sqrt(2) y_j y_i for each i > j.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct NewtonRecord {
    /// n weights.
    pub weights: Vec<f64>,
    /// Their covariance, n x n, for noise of variance 1.
    pub uncertainty: SymmetricRecord,
}

/// A mean that starts with 20 examples of value 0: `sum / (weight + 20)`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ConstantRecord {
    /// Weighted sum.
    pub sum: f64,
    /// Sum of weights.
    pub weight: f64,
}

/// Sketch of the second moment of queries: the sum of q q' is about the sum of energy times direction times direction'.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DirectionsRecord {
    /// Orthonormal directions, one after the other, `dim` numbers each, in the order of falling energy.
    pub vectors: Vec<f64>,
    /// Per direction its energy.
    pub energies: Vec<f64>,
    /// Queries that the sketch does not include yet, one after the other, `dim` numbers each.
    pub recent_queries: Vec<f64>,
    /// Queries seen.
    pub seen: u64,
}

/// Mean of the squared cosine of consecutive distinct queries.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct OverlapRecord {
    /// The last query, `dim` numbers; empty before the first.
    pub last_query: Vec<f64>,
    /// Sum of squared cosines.
    pub sum: f64,
    /// Number of pairs.
    pub pairs: f64,
}

/// Which queries were seen recently.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RepeatsRecord {
    /// 2048 places. A query's XXH3 digest (64 bits, over its components as little-endian `f64`) is at the place digest mod
    /// 2048 until a later query replaces it; 0 where there was none.
    pub digests: Vec<u64>,
    /// Share of recent queries that repeat, 0 to 1.
    pub share: f64,
}

/// Fading sums over examples: y is the reward and s the prediction, both above a constant prediction.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TrustRecord {
    /// Sum of y s.
    pub product: f64,
    /// Sum of s^2.
    pub square: f64,
}

/// A cumulative-sum test on squared prediction errors since the last change.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DriftRecord {
    /// Number of errors.
    pub examples: u64,
    /// Mean of squared errors.
    pub mean: f64,
    /// Sum of squared distances from that mean.
    pub spread: f64,
    /// The test statistic, 0 to 80.
    pub sum: f64,
}
