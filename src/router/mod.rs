//! Routing: parameters and a query in, a distribution over models out.
//!
//! ```text
//! score_m(q) = bias_m + linear_m . q + sum_i eigenvalue_i (eigenvector_i . q)^2 + correction_m(q) - sum_j price_j outcome_mj
//! softmax      core = softmax(score)
//! inverse gap  core_m = 1 / (M + g (max score - score_m)) for all but the best, the rest for the best
//! p = (1 - floor) core + floor floor_distribution
//! ```
//!
//! correction_m(q) comes from the [`HeadTable`] of frequent queries; it is zero for a query that is not in the table. What
//! models cost comes from the [`Outcomes`]. If only some models may answer ([`Eligible`]), core and floor_distribution are
//! conditioned on them, with M the number of these.
//!
//! Learners export their policy in this one form, so a router does not depend on the learning algorithm.
//!
//! [`Params`] is the reference form; [`Compiled`] is the same, laid out for speed; [`Router`] holds the parameters of many
//! spaces and replaces them while it routes. [`Restriction`] is what a request says about its models, [`Resting`] which models
//! rest, [`Recent`] what was decided lately.

mod compiled;
mod draw;
mod head;
mod live;
mod outcomes;
mod recent;
mod resting;
mod restriction;

use serde::{Deserialize, Serialize};

pub use compiled::Compiled;
pub use draw::{BadKey, DrawKey};
pub use head::{BadHeadTable, HEAD_QUERIES_MAX, HeadTable};
pub use live::{Answer, Router};
pub use outcomes::{BadOutcomes, OUTCOME_NAME_BYTES_MAX, OUTCOMES_MAX, Outcomes};
pub use recent::{Recent, RecentSpec};
pub use resting::{Rest, RestOf, RestReason, Resting, RestingSpec};
pub use restriction::{Restriction, UnknownModel};

use crate::eligible::Eligible;
use crate::event::{BadQuery, ModelName, Name, Query};
use crate::query_key::QueryKey;

/// How scores become probabilities.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub enum Sampling {
    /// In proportion to the exponential of the score.
    Softmax,
    /// In inverse proportion to the distance from the best score.
    InverseGap {
        /// g: how fast the probability falls with the distance.
        gap: f64,
    },
}

impl Sampling {
    /// The distribution that belongs to the scores; no entry is zero.
    pub fn core(self, scores: &[f64]) -> Vec<f64> {
        let mut core = scores.to_vec();
        self.turn(&mut core);
        core
    }

    /// Turns scores into that distribution.
    pub fn turn(self, scores: &mut [f64]) {
        match self {
            Self::Softmax => softmax(scores),
            Self::InverseGap { gap } => inverse_gap(gap, scores),
        }
    }

    /// Turns scores into the distribution over the eligible models; no entry of these is zero, all others are.
    pub fn turn_among(self, scores: &mut [f64], eligible: &Eligible) {
        let Some(mask) = eligible.mask() else { return self.turn(scores) };
        let mut among: Vec<f64> = scores.iter().zip(mask).filter(|(_, may)| **may).map(|(score, _)| *score).collect();
        self.turn(&mut among);
        let mut among = among.into_iter();
        scores.iter_mut().zip(mask).for_each(|(p, may)| *p = if *may { among.next().unwrap_or_default() } else { 0.0 });
    }
}

/// One model's score function, as routers hold it.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ScoreForm {
    /// Eigenvalues of the quadratic part.
    pub eigenvalues: Vec<f32>,
    /// Its eigenvectors, one after the other.
    pub eigenvectors: Vec<f32>,
    /// The linear part; empty is zero.
    pub linear: Vec<f32>,
    /// The constant part.
    pub bias: f32,
}

impl ScoreForm {
    /// Multiplies all of it.
    pub fn scale(&mut self, by: f32) {
        let values = self.eigenvalues.iter_mut().chain(&mut self.linear).chain([&mut self.bias]);
        values.for_each(|x| *x *= by);
    }

    /// The score of a query.
    pub fn score(&self, query: &[f64]) -> f64 {
        let dot = |x: &[f32]| x.iter().zip(query).map(|(&x, q)| f64::from(x) * q).sum::<f64>();
        let vectors = self.eigenvectors.chunks_exact(query.len());
        let quadratic: f64 = self.eigenvalues.iter().zip(vectors).map(|(&l, v)| f64::from(l) * dot(v).powi(2)).sum();
        f64::from(self.bias) + dot(&self.linear) + quadratic
    }
}

/// A policy in the routing form.
#[derive(Debug, Clone, PartialEq)]
pub struct Policy {
    /// How scores become the core distribution.
    pub sampling: Sampling,
    /// Share of the floor distribution in the mixture, 0..1.
    pub floor: f64,
    /// The floor distribution.
    pub floor_distribution: Vec<f64>,
    /// The score of each model.
    pub scores: Vec<ScoreForm>,
    /// Corrections of the scores of frequent queries.
    pub head: HeadTable,
    /// What models cost besides their reward.
    pub outcomes: Outcomes,
}

impl Policy {
    /// An untrained policy: uniform, or one model always.
    pub fn unlearned(models: usize, always: Option<usize>) -> Self {
        let bias = |m: usize| if Some(m) == always { ALWAYS } else { 0.0 };
        let scores = (0..models).map(|m| ScoreForm { bias: bias(m), ..ScoreForm::default() }).collect();
        Self {
            sampling: Sampling::Softmax,
            floor: 0.0,
            floor_distribution: uniform(models),
            scores,
            head: HeadTable::default(),
            outcomes: Outcomes::default(),
        }
    }
}

impl Policy {
    /// The distribution over the eligible models that belongs to scores.
    fn distribution_of(&self, mut scores: Vec<f64>, eligible: &Eligible) -> Distribution {
        self.sampling.turn_among(&mut scores, eligible);
        Distribution::mix_among(scores, self.floor, &self.floor_distribution, eligible.clone())
    }
}

/// A score that dominates all others.
pub const ALWAYS: f32 = 1000.0;

/// Routing parameters of one space.
#[derive(Debug, Clone, PartialEq)]
pub struct Params {
    /// The space.
    pub space: Name,
    /// Grows when history forks.
    pub epoch: u64,
    /// Examples in applied batches.
    pub version: u64,
    /// Publications at this version.
    pub revision: u64,
    /// Names of the models, in the order of every per-model vector.
    pub models: Vec<ModelName>,
    /// Dimension of queries.
    pub dim: usize,
    /// Creation time, in milliseconds since 1970.
    pub created_ms: u64,
    /// Name of the algorithm that learned them.
    pub algorithm: String,
    /// The policy.
    pub policy: Policy,
}

/// The distributions of one decision.
#[derive(Debug, Clone, PartialEq)]
pub struct Distribution {
    /// The policy before the floor is mixed in: pi.
    pub policy: Vec<f64>,
    /// The distribution that the model is drawn from: p.
    pub propensities: Vec<f64>,
    /// The models that may answer; both distributions are conditioned on them.
    pub eligible: Eligible,
}

impl Distribution {
    /// Mixes the floor into a core distribution.
    pub fn mix(policy: Vec<f64>, floor: f64, floor_distribution: &[f64]) -> Self {
        let propensities = policy.iter().zip(floor_distribution).map(|(p, f)| (1.0 - floor) * p + floor * f).collect();
        Self { policy, propensities, eligible: Eligible::ALL }
    }

    /// The same among the eligible models, for a core that is conditioned on them.
    pub fn mix_among(policy: Vec<f64>, floor: f64, floor_distribution: &[f64], eligible: Eligible) -> Self {
        let mut conditioned = floor_distribution.to_vec();
        eligible.restrict(&mut conditioned);
        Self { eligible, ..Self::mix(policy, floor, &conditioned) }
    }

    /// The model that a uniform draw `u` in 0..1 selects.
    pub fn draw(&self, u: f64) -> usize {
        let mut left = u;
        let mut chosen = 0;
        for (m, &p) in self.propensities.iter().enumerate().filter(|(_, p)| **p > 0.0) {
            chosen = m;
            left -= p;
            if left < 0.0 {
                break;
            }
        }
        chosen
    }
}

impl Params {
    /// The score of each model for a query.
    pub fn scores(&self, query: &Query) -> Result<Vec<f64>, BadQuery> {
        query.check_dim(self.dim)?;
        let mut scores: Vec<f64> = self.policy.scores.iter().map(|form| form.score(query.as_slice())).collect();
        add(&mut scores, self.head(query));
        self.policy.outcomes.charge(&mut scores);
        Ok(scores)
    }

    /// The correction of each model's score, for a query in the head table.
    pub fn head(&self, query: &Query) -> Option<&[f32]> {
        let table = &self.policy.head;
        if table.is_empty() { None } else { table.get(QueryKey::of(query)) }
    }

    /// The distribution over models for a query.
    pub fn distribution(&self, query: &Query) -> Result<Distribution, BadQuery> {
        self.distribution_among(query, &Eligible::ALL)
    }

    /// The distribution over the eligible models for a query.
    pub fn distribution_among(&self, query: &Query, eligible: &Eligible) -> Result<Distribution, BadQuery> {
        let scores = self.scores(query)?;
        Ok(self.policy.distribution_of(scores, eligible))
    }
}

/// Uniform over `n` models.
pub fn uniform(n: usize) -> Vec<f64> {
    vec![1.0 / n as f64; n]
}

/// Adds the corrections of a head query.
fn add(scores: &mut [f64], corrections: Option<&[f32]>) {
    let corrections = corrections.into_iter().flatten();
    scores.iter_mut().zip(corrections).for_each(|(score, &correction)| *score += f64::from(correction));
}

fn softmax(scores: &mut [f64]) {
    let best = scores.iter().fold(f64::NEG_INFINITY, |m, &s| m.max(s));
    // The minimum weight is exp(-700): still positive, so that every model can be drawn.
    scores.iter_mut().for_each(|s| *s = (*s - best).max(-700.0).exp());
    let sum: f64 = scores.iter().sum();
    scores.iter_mut().for_each(|weight| *weight /= sum);
}

fn inverse_gap(gap: f64, scores: &mut [f64]) {
    let best = (0..scores.len()).fold(0, |best, m| if scores[m] > scores[best] { m } else { best });
    let (models, most) = (scores.len() as f64, scores[best]);
    scores.iter_mut().for_each(|s| *s = 1.0 / (models + gap * (most - *s)));
    let others: f64 = scores.iter().enumerate().filter(|(m, _)| *m != best).map(|(_, p)| p).sum();
    scores[best] = 1.0 - others;
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn cores_are_distributions(
            scores in prop::collection::vec(-1e9..1e9_f64, 1..20),
            scale in prop_oneof![Just(1.0), Just(1e-9), Just(1e-6)],
            gap in 0.0..1e6_f64,
        ) {
            let scores: Vec<f64> = scores.iter().map(|s| s * scale).collect();
            for sampling in [Sampling::Softmax, Sampling::InverseGap { gap }] {
                let core = sampling.core(&scores);
                prop_assert!((core.iter().sum::<f64>() - 1.0).abs() < 1e-12);
                prop_assert!(core.iter().all(|&p| p > 0.0), "{core:?}");
                let best = scores.iter().cloned().fold(f64::MIN, f64::max);
                let best_share = core.iter().cloned().fold(0.0, f64::max);
                prop_assert!(scores.iter().zip(&core).any(|(s, p)| *s == best && *p == best_share));
            }
        }
    }

    #[test]
    fn draws_follow_the_cumulative_distribution() {
        let distribution = Distribution::mix(vec![0.25, 0.0, 0.75], 0.0, &uniform(3));
        for (u, expected) in [(0.0, 0), (0.2499, 0), (0.25, 2), (0.9999999999999999, 2), (1.0, 2)] {
            assert_eq!(distribution.draw(u), expected, "{u}");
        }
        let mixed = Distribution::mix(vec![1.0, 0.0], 0.2, &uniform(2));
        assert_eq!(mixed.propensities, [0.9, 0.1]);
        assert_eq!(mixed.policy, [1.0, 0.0]);
    }

    #[test]
    fn inverse_gap_as_specified() {
        let core = Sampling::InverseGap { gap: 10.0 }.core(&[0.1, 0.3, 0.0]);
        let (a, c) = (1.0 / (3.0 + 10.0 * (0.3 - 0.1)), 1.0 / (3.0 + 10.0 * 0.3));
        assert!((core[0] - a).abs() < 1e-15 && (core[2] - c).abs() < 1e-15 && (core[1] - (1.0 - a - c)).abs() < 1e-15);
    }
}
