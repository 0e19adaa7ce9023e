//! What each model earns on the whole, estimated by query rather than by example.
//!
//! ```text
//! x_qm = mu_m + d_q + e_qm + noise / sqrt(n_qm)         x: mean of r - 1/2 over the n examples of model m on query q
//! a_m = n_m / (1 + EFFECT n_m)                          t = 1 / LEVEL + sum a_m
//! P_q = diag(a) - a a' / t                              (sum_q P_q + prior) mu = sum_q P_q x_q
//! ```
//!
//! The generalised least squares of a mixed-effects model: d and e are random, with the variances LEVEL and EFFECT over that of
//! the noise. A router plays a model mostly where it did well, and a plain mean over its examples would credit it with these
//! queries. Here models are compared within queries and one query counts only so much. As far as the model is right, a choice by
//! what was seen before leaves the estimate unbiased.

use faer::linalg::solvers::DenseSolveCore;
use faer::{Mat, MatRef, Side};

use super::head::LEVEL;
use crate::policy::symmetric::Symmetric;
use crate::wire::records::learner::critic::ConstantsRecord;

/// Sums over queries.
#[derive(Debug, Clone, PartialEq)]
pub struct Constants {
    /// sum_q P_q
    information: Symmetric,
    /// sum_q P_q x_q
    moments: Vec<f64>,
}

/// mu of each model, with its covariance in units of the noise.
pub struct Estimate {
    /// mu less its mean over models.
    pub means: Vec<f64>,
    covariance: Mat<f64>,
}

/// Variance of e_qm over that of the noise: larger than that of a typical model, since models that are good at few queries
/// would otherwise pass for good ones.
const EFFECT: f64 = 0.2;

/// Examples that say that a model earns what all earn.
const PRIOR: f64 = 10.0;

/// The same for what all earn, which changes nothing but makes the solution unique.
const PRIOR_LEVEL: f64 = 1e-3;

/// Bound on sums in a record.
const SUM_MAX: f64 = 1e15;

impl Constants {
    /// No queries.
    pub fn new(models: usize) -> Self {
        Self { information: Symmetric::identity(models, 0.0), moments: vec![0.0; models] }
    }

    /// Adds a query: per model its examples and the sum of r - 1/2 over them.
    pub fn add(&mut self, seen: &[(f32, f32)]) {
        let shrunk = |m: usize| {
            let (count, sum) = (f64::from(seen[m].0), f64::from(seen[m].1));
            let factor = (1.0 + EFFECT * count).recip();
            (factor * count, factor * sum)
        };
        let sum = |all: (f64, f64), one: (f64, f64)| (all.0 + one.0, all.1 + one.1);
        let all = (0..seen.len()).map(shrunk).fold((0.0, 0.0), sum);
        let share = (LEVEL.recip() + all.0).recip();
        let mut packed = self.information.packed_mut().iter_mut();
        for j in 0..seen.len() {
            let (a, ax) = shrunk(j);
            self.moments[j] += ax - share * a * all.1;
            for (i, entry) in (j..seen.len()).zip(&mut packed) {
                let diagonal = if i == j { a } else { 0.0 };
                *entry += diagonal - share * a * shrunk(i).0;
            }
        }
    }

    /// Adds a query with one example, of r - 1/2 = `target`.
    pub fn add_one(&mut self, model: usize, target: f64) {
        self.add_mean(model, (1.0 + EFFECT + LEVEL).recip(), target);
    }

    /// Adds `weight` queries that a model earned `mean` on.
    pub fn add_mean(&mut self, model: usize, weight: f64, mean: f64) {
        self.information.add_at(model, weight);
        self.moments[model] += weight * mean;
    }

    /// Forgets all but a share.
    pub fn scale(&mut self, keep: f64) {
        self.information.scale(keep);
        self.moments.iter_mut().for_each(|x| *x *= keep);
    }

    /// Adds the sums of another.
    pub fn merge(&mut self, other: &Self) {
        self.information.merge(&other.information);
        self.moments.iter_mut().zip(&other.moments).for_each(|(x, other)| *x += other);
    }

    /// Moves to another set of models; a new one has no examples.
    pub fn remap(&mut self, places: &[Option<usize>]) {
        let n = self.moments.len();
        let lower = self.information.lower();
        let entry = |i: usize, j: usize| match (places[i], places[j]) {
            (Some(i), Some(j)) => lower[i.min(j) * n + i.max(j)],
            _ => 0.0,
        };
        self.information = Symmetric::from_lower(places.len(), entry);
        self.moments = places.iter().map(|place| place.map_or(0.0, |m| self.moments[m])).collect();
    }

    /// Solves for mu; none if rounding left no solution.
    pub fn estimate(&self) -> Option<Estimate> {
        let n = self.moments.len();
        let lower = self.information.lower();
        let all = (PRIOR_LEVEL - PRIOR) / n as f64;
        let system = Mat::from_fn(n, n, |i, j| lower[i.min(j) * n + i.max(j)] + all + if i == j { PRIOR } else { 0.0 });
        let covariance = system.llt(Side::Lower).ok()?.inverse();
        let means = &covariance * MatRef::from_column_major_slice(&self.moments, n, 1);
        let mean = (0..n).map(|m| means[(m, 0)]).sum::<f64>() / n as f64;
        Some(Estimate { means: (0..n).map(|m| means[(m, 0)] - mean).collect(), covariance })
    }

    /// The record of its state.
    pub fn record(&self) -> ConstantsRecord {
        ConstantsRecord { information: self.information.record(), moments: self.moments.clone() }
    }

    /// Restores a record; none if it does not fit.
    pub fn from_record(record: ConstantsRecord, models: usize) -> Option<Self> {
        let ConstantsRecord { information, moments } = record;
        let information = Symmetric::from_record(information, models, SUM_MAX)?;
        let is_sound = moments.len() == models && moments.iter().all(|x| x.abs() <= SUM_MAX);
        is_sound.then_some(Self { information, moments })
    }
}

impl Estimate {
    /// How many deviations the best model is ahead of each; `noise` is the deviation of a reward.
    pub fn behind(&self, noise: f64) -> impl Iterator<Item = f64> {
        let means = &self.means;
        let best = (0..means.len()).fold(0, |best, m| if means[m] > means[best] { m } else { best });
        let k = &self.covariance;
        (0..means.len()).map(move |m| {
            let variance = k[(m, m)] + k[(best, best)] - 2.0 * k[(m, best)];
            if m == best { 0.0 } else { (means[best] - means[m]) / (noise * variance.max(f64::MIN_POSITIVE).sqrt()) }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use faer::linalg::solvers::Solve;
    use rand::{RngExt, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    /// Against the joint normal equations of mu, d and e, solved densely.
    #[test]
    fn means_are_those_of_the_mixed_model() {
        let (models, queries) = (3, 4);
        let mut random = ChaCha8Rng::seed_from_u64(1);
        let mut constants = Constants::new(models);
        let size = models + queries * (1 + models);
        let (mut left, mut right) = (Mat::<f64>::zeros(size, size), Mat::<f64>::zeros(size, 1));
        for i in 0..models {
            for j in 0..models {
                let all = (PRIOR_LEVEL - PRIOR) / models as f64;
                left[(i, j)] = all + if i == j { PRIOR } else { 0.0 };
            }
        }
        for q in 0..queries {
            let level = models + q * (1 + models);
            left[(level, level)] = LEVEL.recip();
            let mut seen = vec![(0.0, 0.0); models];
            for (m, seen) in seen.iter_mut().enumerate() {
                let effect = level + 1 + m;
                left[(effect, effect)] = EFFECT.recip();
                for _ in 0..(q + 2 * m) % 4 {
                    let x = f64::from(u8::from(random.random::<bool>())) - 0.5;
                    *seen = (seen.0 + 1.0, seen.1 + x as f32);
                    for i in [m, level, effect] {
                        right[(i, 0)] += x;
                        for j in [m, level, effect] {
                            left[(i, j)] += 1.0;
                        }
                    }
                }
            }
            constants.add(&seen);
        }
        let joint = left.llt(Side::Lower).unwrap().solve(right);
        let mean = (0..models).map(|m| joint[(m, 0)]).sum::<f64>() / models as f64;
        let found = constants.estimate().unwrap();
        for m in 0..models {
            assert!((found.means[m] - (joint[(m, 0)] - mean)).abs() < 1e-9, "{:?}", found.means);
        }
        assert_eq!(Constants::from_record(constants.record(), models), Some(constants.clone()));
        assert_eq!(Constants::from_record(constants.record(), 2), None);
        constants.remap(&[Some(2), None, Some(0)]);
        let moved = constants.estimate().unwrap();
        assert!(((moved.means[0] - moved.means[2]) - (found.means[2] - found.means[0])).abs() < 0.05);
    }

    /// A model that is played on, wherever it was lucky at first, gets no credit for that.
    #[test]
    fn choices_by_luck_credit_nobody() {
        let mut random = ChaCha8Rng::seed_from_u64(2);
        let mut constants = Constants::new(2);
        let mut plain = [(0.0, 0.0); 2];
        for _ in 0..2000 {
            let level: f64 = random.random_range(0.2..0.7);
            let mut seen = [(0.0_f32, 0.0_f32); 2];
            for t in 0..20 {
                let is_second_ahead = seen[1].1 > seen[0].1;
                let m = if t < 4 { t % 2 } else { usize::from(is_second_ahead) };
                let better = if m == 1 { 0.05 } else { 0.0 };
                let x = if random.random::<f64>() < level + better { 0.5 } else { -0.5 };
                seen[m] = (seen[m].0 + 1.0, seen[m].1 + x);
                plain[m] = (plain[m].0 + 1.0, plain[m].1 + f64::from(x));
            }
            constants.add(&seen);
        }
        let found = constants.estimate().unwrap();
        assert!((found.means[1] - found.means[0] - 0.05).abs() < 0.02, "{:?} {plain:?}", found.means);
        let behind: Vec<f64> = found.behind(0.5).collect();
        assert!(behind[1] == 0.0 && behind[0] > 1.5, "{behind:?}");
    }
}
