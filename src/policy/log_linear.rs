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
use crate::learner::{Learner, LearnerState, Lesson};
use crate::router::ScoreForm;

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
    state: LogLinearState,
}

/// What it remembers.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct LogLinearState {
    models: Vec<Direction>,
    /// The ridge that new models begin with.
    ridge: f64,
    /// t: examples, and one before the first.
    examples: f64,
    /// t of which the ridge is.
    ridged: f64,
}

/// One model.
#[derive(Debug, Clone, Serialize, Deserialize)]
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
        let state = LogLinearState { models, ridge: spec.ridge, examples: 1.0, ridged: 1.0 };
        Self { spec, half_life, state }
    }

    /// Goes on from a state, if it fits.
    pub fn restore(
        spec: LogLinearSpec,
        dim: usize,
        models: usize,
        half_life: Option<f64>,
        mut state: LogLinearState,
    ) -> Option<Self> {
        let sound = state.models.len() == models
            && state.models.iter().all(|model| model.is_sound(dim))
            && (1.0..=SUM_MAX).contains(&state.examples)
            && (KEEP_MIN..=state.examples).contains(&state.ridged);
        state.ridge = spec.ridge;
        sound.then_some(Self { spec, half_life, state })
    }

    /// Moves to another set of models, of which `places` says where each was; a new one starts at zero.
    pub fn remap(state: &mut LogLinearState, places: &[Option<usize>], dim: usize) {
        pick(&mut state.models, places, || Direction::new(dim, state.ridge * state.ridged));
    }

    fn linear_scores(&self, query: &[f64], scores: &mut [f64]) {
        scores.iter_mut().zip(&self.state.models).for_each(|(score, model)| *score = dot(&model.theta, query));
    }

    /// The past counts less; F, which is a mean over it, stays as it is.
    fn forget(&mut self, keep: f64) {
        for model in &mut self.state.models {
            model.theta.iter_mut().for_each(|x| *x *= keep);
            model.inverse.scale(keep.recip());
        }
        self.state.examples *= keep;
        self.state.ridged *= keep;
    }

    fn count(&mut self, examples: usize) {
        self.state.examples += examples as f64;
        if self.state.examples > GROWTH * self.state.ridged {
            let more = self.spec.ridge * (self.state.examples - self.state.ridged);
            let whole = |model: &mut Direction| model.inverse = regularised(&model.inverse, 1.0, more);
            self.state.models.iter_mut().for_each(whole);
            self.state.ridged = self.state.examples;
        }
    }
}

impl Learner for LogLinear {
    fn scores(&self, query: &Query, scores: &mut [f64]) {
        self.linear_scores(query.as_slice(), scores);
    }

    fn apply(&mut self, batch: &[Lesson], version: u64) {
        let models = self.state.models.len();
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
            for (model, pi) in self.state.models.iter_mut().zip(policy.iter()) {
                model.see(pi * (1.0 - pi), lesson.example.query().as_slice());
            }
        }
        let rate = self.spec.rate.at(version + batch.len() as u64) * self.state.examples;
        let mut c = Vec::with_capacity(models);
        for (lesson, policy) in batch.iter().zip(&policies) {
            self.spec.gradient.coefficients(lesson, policy, &mut c);
            for (model, c) in self.state.models.iter_mut().zip(&c) {
                axpy(rate * c, &model.inverse.times(lesson.example.query().as_slice()), &mut model.theta);
            }
        }
    }

    fn score_forms(&self) -> Vec<ScoreForm> {
        let linear = |model: &Direction| model.theta.iter().map(|&x| x as f32).collect();
        self.state.models.iter().map(|model| ScoreForm { linear: linear(model), ..ScoreForm::default() }).collect()
    }

    fn save(&self) -> LearnerState {
        LearnerState::LogLinear(self.state.clone())
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

    fn is_sound(&self, dim: usize) -> bool {
        self.theta.len() == dim
            && self.theta.iter().all(|x| x.abs() <= SUM_MAX)
            && self.inverse.is_bounded(dim, INVERSE_MAX)
            && self.inverse.is_positive()
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
                learner.apply(&[Lesson { example, mean_before: 0.5 }], u64::from(t));
            }
            let state = &learner.state;
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
