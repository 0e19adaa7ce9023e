//! The record of a learner: everything that a bit-for-bit resume needs.
//!
//! A learner's envelope has [`Kind::Learner`] and, in the present version, one [`LearnerRecord`] as payload. Fields follow
//! each other in the order of declaration, without names or padding. Integers are variable-length, an `f64` has eight bytes,
//! little-endian. A list starts with its length, a string with its length in bytes. An `Option` starts with 0 (none) or 1
//! (some), an enum with the index of its variant, counted from 0 in the order of declaration. A fixed array has no length.
//!
//! Matrices are lists of `f64`. Where a comment says "one vector after the other", the list holds the first vector
//! completely, then the second. `dim` is the dimension of queries, and every list "per model" is in the order of
//! [`LearnerRecord::models`].
//!
//! | version | payload |
//! |---|---|
//! | 6 | [`LearnerRecord`] |
//! | 5 | [`old`]: a guard in place of the rollout, no objective; examples without eligible models and further feedback |
//! | 4 | [`old`]: no sample-ratio test |
//! | 3 | [`old`]: no incumbent, other sums for lifts |
//! | 2 | the same as 3; or, before the guard mixed several models, [`old`] with one best model |
//! | 1 | [`old`]: no estimates of the policy value |

pub mod critic;
pub mod hpg;
pub mod objective;
pub mod old;
pub mod regression;
pub mod rivals;
pub mod value;

use serde::{Deserialize, Serialize};

use self::critic::CriticLearnerRecord;
use self::hpg::{HpgRecord, ParameterFreeRecord};
use self::objective::ObjectiveRecord;
use self::regression::RegressionRecord;
use self::rivals::{Exp3Record, LinearBanditRecord, LogLinearRecord, LogQuadraticRecord, QuadraticSgdRecord};
use self::value::PolicyValueRecord;
use super::Record;
use crate::wire::envelope::{Damaged, Kind};

/// The complete state of a learner.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LearnerRecord {
    /// `learner.algorithm`, as in the configuration: `"hpg"`.
    pub algorithm: String,
    /// Dimension of queries.
    pub dim: u64,
    /// Names of the models.
    pub models: Vec<String>,
    /// The generator of the learner's own decisions.
    pub generator: GeneratorRecord,
    /// Examples of the incomplete batch, in the order of arrival.
    pub pending: Vec<LessonRecord>,
    /// Mean of rewards, which the next example is compared with.
    pub reward_mean: RewardMeanRecord,
    /// Sum of the rewards of all examples.
    pub reward_sum: f64,
    /// Examples, those of the incomplete batch included.
    pub learned: u64,
    /// Examples in applied batches: `learned` less the length of `pending`.
    pub version: u64,
    /// The parameters that the algorithm has learned.
    pub state: AlgorithmRecord,
    /// Estimates of what the policy earns.
    pub policy_value: PolicyValueRecord,
    /// Examples with a reward of the chosen model: `reward_sum` is the sum over these.
    pub rewarded: u64,
    /// Outcomes and their prices.
    pub objective: ObjectiveRecord,
}

/// The state of a ChaCha generator with 8 rounds. Bytes equal those of `rand_chacha`'s own serialization.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GeneratorRecord {
    /// The key.
    pub seed: [u8; 32],
    /// The stream number: the nonce of ChaCha.
    pub stream: u64,
    /// The next word of 32 bits, counted from the start of the stream; at most 68 bits are used.
    pub word_position: u128,
}

/// An example of an incomplete batch.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LessonRecord {
    /// The example.
    pub example: ExampleRecord,
    /// Mean of the rewards before it, in 0..1.
    pub mean_before: f64,
    /// Per model what it paid for its outcomes, in units of the score; empty if none did.
    pub tolls: Vec<f64>,
}

/// A query, the decision on it and the reward.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ExampleRecord {
    /// The query: `dim` numbers of Euclidean norm 1.
    pub query: Vec<f64>,
    /// Index of the chosen model.
    pub model: u64,
    /// Probability of each model when the decision was drawn.
    pub propensities: Vec<f64>,
    /// The same before an exploration floor was mixed in, if it differs.
    pub policy: Option<Vec<f64>>,
    /// The reward of the chosen model, in 0..1, if it is known.
    pub reward: Option<f64>,
    /// Whether each model could be chosen. Absent: all.
    pub eligible: Option<Vec<bool>>,
    /// Known rewards of other models: index and reward, in 0..1.
    pub others: Vec<(u64, f64)>,
    /// Indexes of a model that was preferred, and of the one that it was preferred to.
    pub preference: Option<(u64, u64)>,
}

/// An exponentially weighted mean of rewards: `sum / weight`, or 0.5 if `weight` is 0.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RewardMeanRecord {
    /// Weighted sum of rewards.
    pub sum: f64,
    /// Sum of weights: the number of rewards if nothing is forgotten.
    pub weight: f64,
}

/// The state of an algorithm. The variant must match [`LearnerRecord::algorithm`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum AlgorithmRecord {
    /// `uniform` and `fixed` learn nothing.
    Stateless,
    /// `hpg`.
    Hpg(HpgRecord),
    /// `hpg-parameter-free`.
    ParameterFree(ParameterFreeRecord),
    /// `lin-ucb` and `lin-thompson`.
    LinearBandit(LinearBanditRecord),
    /// `quadratic-sgd`.
    QuadraticSgd(QuadraticSgdRecord),
    /// `log-quadratic`.
    LogQuadratic(LogQuadraticRecord),
    /// `log-linear`.
    LogLinear(LogLinearRecord),
    /// `exp3`.
    Exp3(Exp3Record),
    /// `hypentropy-regression` up to version 3. Since then it is a [`AlgorithmRecord::Critic`].
    Regression(RegressionRecord),
    /// `hpg` with `estimator = "critic"`, and `hypentropy-regression`.
    Critic(Box<CriticLearnerRecord>),
}

impl Record for LearnerRecord {
    const KIND: Kind = Kind::Learner;
    const VERSION: u16 = 6;

    fn upgrade(version: u16, payload: &[u8]) -> Result<Self, Damaged> {
        old::upgrade(version, payload)
    }
}
