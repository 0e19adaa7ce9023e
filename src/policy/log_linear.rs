//! Natural policy gradient in the log-linear class.
//!
//! ```text
//! pi(m | q) = softmax(theta_m . q)
//! theta_m += eta F_m^-1 c_m q                              c_m as in HPG: see [`hpg::gradient`]
//! F_m = mean of pi_m (1 - pi_m) q q' + ridge I             the Fisher matrix of theta_m
//! ```
//!
//! theta_m: d, F_m: d x d. Kakade 2001; Agarwal et al. 2021, Section 6: the direction that solves the compatible least
//! squares is the Fisher matrix's inverse times the gradient. What is taken here of that M d x M d matrix are its
//! blocks on the diagonal, exact in the expectation over models, averaged over the policies so far. (t F_m)^-1 is
//! carried along by Sherman and Morrison, O(d^2) a model; its ridge, which grows with t, is made whole in the eigenbasis
//! whenever t has grown by a quarter.
//!
//! [`hpg::gradient`]: crate::hpg::gradient

use serde::{Deserialize, Serialize};

use super::ridge::regularised;
use super::symmetric::Symmetric;
use crate::event::Query;
use crate::hpg::gradient::GradientSpec;
use crate::hpg::linalg::{axpy, dot};
use crate::hpg::schedule::{Rate, shrink};
use crate::hpg::spectra::pick;
use crate::learner::{Learner, Lesson};
use crate::router::ScoreForm;
use crate::wire::records::learner::AlgorithmRecord;
use crate::wire::records::learner::rivals::{LinearRecord, LogLinearRecord};

/// Checked settings of natural policy gradient.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LogLinearSpec {
    /// Learning rate.
    pub rate: Rate,
    /// How c_m is estimated.
    pub gradient: GradientSpec,
    /// Regularisation of the Fisher matrix.
    pub ridge: f64,
}

/// Natural policy gradient.
#[derive(Debug, Clone)]
pub struct LogLinear {
    spec: LogLinearSpec,
    half_life: Option<f64>,
    models: Vec<Direction>,
    /// t: examples, and one before the first.
    examples: f64,
    /// t of which the ridge is.
    ridged: f64,
}

/// One model.
#[derive(Debug, Clone)]
struct Direction {
    theta: Vec<f64>,
    /// (t F)^-1
    inverse: Symmetric,
}

/// How much t may have grown since the ridge was made whole.
const GROWTH: f64 = 1.25;

/// The most that an entry of theta, or t, can have become in any stream.
const SUM_MAX: f64 = 1e30;

/// The most that an entry of (t F)^-1 can be: ridges are 1e-9 or more.
const INVERSE_MAX: f64 = 1e16;

/// The least share of the past that is left, so that nothing is divided by zero.
const KEEP_MIN: f64 = 1e-6;

impl LogLinear {
    /// theta = 0.
    pub fn new(spec: LogLinearSpec, dim: usize, models: usize, half_life: Option<f64>) -> Self {
        let models = vec![Direction::new(dim, spec.ridge); models];
        Self { spec, half_life, models, examples: 1.0, ridged: 1.0 }
    }

    /// Restores a record; none if it does not fit.
    pub fn restore(
        spec: LogLinearSpec,
        dim: usize,
        models: usize,
        half_life: Option<f64>,
        record: LogLinearRecord,
    ) -> Option<Self> {
        let LogLinearRecord { models: records, examples, ridge_examples: ridged, .. } = record;
        let is_sound =
            records.len() == models && (1.0..=SUM_MAX).contains(&examples) && (KEEP_MIN..=examples).contains(&ridged);
        let direction = |record: LinearRecord| Direction::from_record(record, dim);
        let models = records.into_iter().map(direction).collect::<Option<Vec<Direction>>>()?;
        is_sound.then_some(Self { spec, half_life, models, examples, ridged })
    }

    fn linear_scores(&self, query: &[f64], scores: &mut [f64]) {
        scores.iter_mut().zip(&self.models).for_each(|(score, model)| *score = dot(&model.theta, query));
    }

    /// The past counts less; F, which is a mean over it, stays as it is.
    fn forget(&mut self, keep: f64) {
        for model in &mut self.models {
            model.theta.iter_mut().for_each(|x| *x *= keep);
            model.inverse.scale(keep.recip());
        }
        self.examples *= keep;
        self.ridged *= keep;
    }

    fn count(&mut self, examples: usize) {
        self.examples += examples as f64;
        if self.examples > GROWTH * self.ridged {
            let more = self.spec.ridge * (self.examples - self.ridged);
            let whole = |model: &mut Direction| model.inverse = regularised(&model.inverse, 1.0, more);
            self.models.iter_mut().for_each(whole);
            self.ridged = self.examples;
        }
    }
}

impl Learner for LogLinear {
    fn scores(&self, query: &Query, scores: &mut [f64]) {
        self.linear_scores(query.as_slice(), scores);
    }

    fn apply(&mut self, batch: &[Lesson], version: u64) {
        let models = self.models.len();
        let mut policies = Vec::with_capacity(batch.len());
        for lesson in batch {
            let scores = |out: &mut [f64]| self.linear_scores(lesson.example.query().as_slice(), out);
            policies.push(self.spec.gradient.policy(lesson, models, scores));
        }
        let keep = shrink(self.half_life, batch.len()).max(KEEP_MIN);
        if keep < 1.0 {
            self.forget(keep);
        }
        self.count(batch.len());
        for (lesson, policy) in batch.iter().zip(&policies) {
            for (model, pi) in self.models.iter_mut().zip(policy.iter()) {
                model.see(pi * (1.0 - pi), lesson.example.query().as_slice());
            }
        }
        let rate = self.spec.rate.at(version + batch.len() as u64) * self.examples;
        let mut c = Vec::with_capacity(models);
        for (lesson, policy) in batch.iter().zip(&policies) {
            self.spec.gradient.coefficients(lesson, policy, &mut c);
            for (model, c) in self.models.iter_mut().zip(&c) {
                axpy(rate * c, &model.inverse.times(lesson.example.query().as_slice()), &mut model.theta);
            }
        }
    }

    fn score_forms(&self) -> Vec<ScoreForm> {
        let linear = |model: &Direction| model.theta.iter().map(|&x| x as f32).collect();
        self.models.iter().map(|model| ScoreForm { linear: linear(model), ..ScoreForm::default() }).collect()
    }

    fn remap(&mut self, places: &[Option<usize>]) {
        let (dim, ridge) = (self.models.first().map_or(0, |model| model.theta.len()), self.spec.ridge * self.ridged);
        pick(&mut self.models, places, || Direction::new(dim, ridge));
    }

    fn save(&self) -> AlgorithmRecord {
        AlgorithmRecord::LogLinear(LogLinearRecord {
            models: self.models.iter().map(Direction::record).collect(),
            ridge: self.spec.ridge,
            examples: self.examples,
            ridge_examples: self.ridged,
        })
    }
}

impl Direction {
    fn new(dim: usize, ridge: f64) -> Self {
        Self { theta: vec![0.0; dim], inverse: Symmetric::identity(dim, ridge.recip()) }
    }

    /// t F += weight q q'
    fn see(&mut self, weight: f64, query: &[f64]) {
        let product = self.inverse.times(query);
        let curvature = dot(query, &product).max(0.0);
        self.inverse.add(-weight / (1.0 + weight * curvature), &product);
    }

    fn record(&self) -> LinearRecord {
        LinearRecord { parameters: self.theta.clone(), inverse_fisher: self.inverse.record() }
    }

    fn from_record(record: LinearRecord, dim: usize) -> Option<Self> {
        let LinearRecord { parameters: theta, inverse_fisher } = record;
        let inverse = Symmetric::from_record(inverse_fisher, dim, INVERSE_MAX)?;
        let is_sound = theta.len() == dim && theta.iter().all(|x| x.abs() <= SUM_MAX) && inverse.is_positive();
        is_sound.then_some(Self { theta, inverse })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::Example;
    use crate::hpg::gradient::{Baseline, Estimator};

    /// The carried inverse is that of the Fisher matrix with a ridge between what it was and what it should be.
    #[test]
    fn the_inverse_is_that_of_the_fisher_matrix() {
        let (dim, ridge) = (4, 0.3);
        let gradient = GradientSpec { estimator: Estimator::Logged, baseline: Baseline::Mean, weight_cap: 10.0 };
        let spec = LogLinearSpec { rate: Rate::Constant(0.1), gradient, ridge };
        for half_life in [None, Some(60.0)] {
            let mut learner = LogLinear::new(spec.clone(), dim, 2, half_life);
            let mut fisher = Symmetric::identity(dim, 0.0);
            for t in 0..300_u32 {
                // Nine of ten queries are the same.
                let seed = if t % 10 == 0 { t } else { 0 };
                let query = Query::new((0..4).map(|j| f64::from((seed * 7 + j * 3) % 11) - 4.7)).unwrap();
                let p = 0.1 + 0.8 * f64::from(t % 7) / 7.0;
                fisher.scale(shrink(half_life, 1));
                fisher.add(p * (1.0 - p), query.as_slice());
                let reward = f64::from(t % 2);
                let example = Example::new(query, (t % 2) as usize, vec![p, 1.0 - p], None, reward).unwrap();
                learner.apply(&[Lesson::new(example, 0.5)], u64::from(t));
            }
            let state = &learner;
            assert!(state.ridged <= state.examples && state.examples <= GROWTH * state.ridged);
            let (values, vectors) = fisher.eigen();
            let inverse: Vec<f64> = values.iter().map(|value| (value + ridge * state.ridged).recip()).collect();
            let expected = Symmetric::compose(dim, &inverse, &vectors);
            for x in [[1.0, 0.0, 0.0, 0.0], [0.3, -0.5, 0.2, 0.9]] {
                let (found, expected) = (state.models[0].inverse.form(&x), expected.form(&x));
                assert!((found - expected).abs() < 1e-9 * expected, "{found} {expected}");
            }
        }
    }
}
