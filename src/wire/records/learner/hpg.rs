//! Hypentropy policy gradient, Algorithms 1 and 2.
//!
//! The parameter of a model is the symmetric matrix W = V diag(lambda) V' of `dim` x `dim` numbers, and its mirror image is
//! Y = V diag(gamma) V', with lambda = beta sinh gamma. A record holds both lists of eigenvalues, since recomputing one
//! would round. Eigenvectors come in two forms:
//!
//! - *multiplied out* ([`EigenRecord`]): the columns of V.
//! - *factored* ([`FactoredRecord`]): V = \[U | S\] C. U is the model's own basis, S the recent queries, which all models
//!   share, and C a small matrix. A resumed learner must continue bit for bit, and multiplying out would round: so the
//!   record keeps the factors. To read the parameters, multiply out.

use serde::{Deserialize, Serialize};

/// The state of `hpg`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct HpgRecord {
    /// The ball that contains the parameters.
    pub ball: BallRecord,
    /// The parameters of all models.
    pub parameters: ParametersRecord,
}

/// The nuclear-norm ball of the parameters. A learner with another ball projects them when it restores the record.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct BallRecord {
    /// tau: the largest sum of |eigenvalue| of a model.
    pub radius: f64,
    /// beta: scale of the hypentropy.
    pub scale: f64,
    /// `learner.rank`: the most eigenvalues of a model.
    pub rank: u64,
}

/// The parameters of all models. `learner.mode` selects the form.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum ParametersRecord {
    /// `exact`.
    Exact(ExactRecord),
    /// `explicit`: per model, multiplied out.
    Explicit(Vec<EigenRecord>),
    /// `factored`.
    Factored(FactoredRecord),
    /// `lazy`.
    Lazy(LazyRecord),
}

/// The eigendecomposition of a model of rank r, multiplied out.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct EigenRecord {
    /// gamma: r eigenvalues of the mirror image.
    pub mirror_eigenvalues: Vec<f64>,
    /// lambda = beta sinh gamma: r eigenvalues of W, in the same order.
    pub eigenvalues: Vec<f64>,
    /// One eigenvector after the other, `dim` numbers each, in the same order.
    pub eigenvectors: Vec<f64>,
}

/// Dense mirror images with their eigendecompositions.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ExactRecord {
    /// Per model Y: one column after the other, `dim` numbers each.
    pub mirrors: Vec<Vec<f64>>,
    /// Per model the decomposition of Y, with the eigenvalues that the ball keeps.
    pub eigens: Vec<EigenRecord>,
}

/// The eigendecompositions of all models, with factored eigenvectors V = \[U | S\] C.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FactoredRecord {
    /// S: s recent queries, one after the other, `dim` numbers each.
    pub recent_queries: Vec<f64>,
    /// Per model the rest of the decomposition.
    pub models: Vec<FactorRecord>,
}

/// The eigendecomposition of one model of rank r. Eigenvector j is the sum of `basis_coefficients[i * r + j]` times the i-th
/// basis vector and of `recent_coefficients[i * r + j]` times the i-th recent query.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct FactorRecord {
    /// gamma: r eigenvalues of the mirror image.
    pub mirror_eigenvalues: Vec<f64>,
    /// lambda = beta sinh gamma: r eigenvalues of W, in the same order.
    pub eigenvalues: Vec<f64>,
    /// U: n basis vectors, one after the other, `dim` numbers each.
    pub basis: Vec<f64>,
    /// The rows of C for U: n rows of r numbers, one row after the other.
    pub basis_coefficients: Vec<f64>,
    /// The rows of C for S: s rows of r numbers, one row after the other.
    pub recent_coefficients: Vec<f64>,
    /// How often V was multiplied out into U; wraps around. It schedules when orthonormality is restored.
    pub compactions: u32,
    /// Bound on the growth of errors of orthonormality since it was last restored, 0 to 1000; 0 before the first time.
    pub error_growth: f64,
}

/// Dual averaging: sums of gradients that are projected only to play.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LazyRecord {
    /// Per model the sum of c q q' over examples: the lower triangle, one column after the other, the diagonal first. Column
    /// j, counted from 0, has `dim` - j numbers.
    pub sums: Vec<Vec<f64>>,
    /// Learning rate that multiplies the sums.
    pub rate: f64,
}

/// The state of `hpg-parameter-free`: W is the bettor's magnitude times the matrix of `hpg`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ParameterFreeRecord {
    /// The directions: Algorithm 1 in the ball of radius 1.
    pub hpg: HpgRecord,
    /// Per model its magnitude.
    pub bettors: Vec<BettorRecord>,
}

/// A coin bettor. It plays the magnitude max(0, `wealth` * `fraction`).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct BettorRecord {
    /// Wealth, 1e-100 to 1e9.
    pub wealth: f64,
    /// Signed fraction of the wealth that it bets, -0.5 to 0.5.
    pub fraction: f64,
    /// A: 1 plus the sum of squared gradients of the fraction.
    pub curvature: f64,
}
