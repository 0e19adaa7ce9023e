//! Quadratic regression by stochastic gradient descent, played by inverse gaps.
//!
//! ```text
//! s_m(q) = q'W_m q predicts r - rbar                              rbar: mean of the rewards before the example
//! W_m += eta_m (r - rbar - s_m(q)) q q'                           the played model only
//! eta_m = min(1, eta / (kappa sqrt(n_m + 1)))                     n_m: examples of model m before
//! ```
//!
//! W_m: d x d, dense. At eta_m = 1 an example is fitted exactly, since |q q'| = 1. kappa is the running mean of
//! (q_i . q_j)^2 over consecutive distinct queries: how much of a step another query sees. SquareCB: Foster and Rakhlin
//! 2020, g = `inverse_gap` sqrt(t). A batch is learned one by one. Propensities are not used.

use std::cell::OnceCell;

use serde::{Deserialize, Serialize};

use super::square_cb;
use super::symmetric::Symmetric;
use crate::event::Query;
use crate::hpg::learner::score_form;
use crate::hpg::overlap::Overlap;
use crate::hpg::schedule::shrink;
use crate::hpg::spectra::{Eigen, pick};
use crate::learner::{Learner, Lesson, Play};
use crate::router::ScoreForm;
use crate::wire::records::learner::AlgorithmRecord;
use crate::wire::records::learner::rivals::{QuadraticRecord, QuadraticSgdRecord};

/// Checked settings of quadratic regression.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct QuadraticSgdSpec {
    /// Step size, in units of 1 / (kappa sqrt(n)).
    pub eta: f64,
    /// g / sqrt(t)
    pub inverse_gap: f64,
}

/// Quadratic regression.
#[derive(Debug, Clone)]
pub struct QuadraticSgd {
    spec: QuadraticSgdSpec,
    dim: usize,
    half_life: Option<f64>,
    overlap: Overlap,
    models: Vec<Regression>,
    decomposed: OnceCell<Vec<Eigen>>,
}

/// One model's W and how often it was played.
#[derive(Debug, Clone)]
struct Regression {
    w: Symmetric,
    played: f64,
}

/// The most that an entry of W, or a count, can have become in any stream.
const SUM_MAX: f64 = 1e30;

impl QuadraticSgd {
    /// W = 0.
    pub fn new(spec: QuadraticSgdSpec, dim: usize, models: usize, half_life: Option<f64>) -> Self {
        let (overlap, models) = (Overlap::default(), vec![Regression::new(dim); models]);
        Self { spec, dim, half_life, overlap, models, decomposed: OnceCell::new() }
    }

    /// Restores a record; none if it does not fit.
    pub fn restore(
        spec: QuadraticSgdSpec,
        dim: usize,
        models: usize,
        half_life: Option<f64>,
        record: QuadraticSgdRecord,
    ) -> Option<Self> {
        let overlap = Overlap::from_record(record.overlap, dim)?;
        let regression = |record: QuadraticRecord| Regression::from_record(record, dim);
        let restored = record.models.into_iter().map(regression).collect::<Option<Vec<Regression>>>()?;
        let fits = restored.len() == models;
        fits.then(|| Self { spec, dim, half_life, overlap, models: restored, decomposed: OnceCell::new() })
    }

    fn learn(&mut self, lesson: &Lesson) {
        let example = &lesson.example;
        let query = example.query().as_slice();
        self.overlap.see(query);
        for (model, reward) in example.rewards() {
            let model = &mut self.models[model];
            let rate = (self.spec.eta / (self.overlap.mean() * (model.played + 1.0).sqrt())).min(1.0);
            let error = reward - lesson.mean_before - model.w.form(query);
            model.w.add(rate * error, query);
            model.played += 1.0;
        }
    }
}

impl Learner for QuadraticSgd {
    fn scores(&self, query: &Query, scores: &mut [f64]) {
        scores.iter_mut().zip(&self.models).for_each(|(score, model)| *score = model.w.form(query.as_slice()));
    }

    fn apply(&mut self, batch: &[Lesson], _version: u64) {
        self.decomposed.take();
        let keep = shrink(self.half_life, batch.len());
        if keep < 1.0 {
            for model in &mut self.models {
                model.w.scale(keep);
                model.played *= keep;
            }
        }
        batch.iter().for_each(|lesson| self.learn(lesson));
    }

    fn score_forms(&self) -> Vec<ScoreForm> {
        self.eigens().iter().map(score_form).collect()
    }

    fn eigens(&self) -> Vec<Eigen> {
        let decompose = || self.models.iter().map(|model| model.w.to_eigen()).collect();
        self.decomposed.get_or_init(decompose).clone()
    }

    fn play(&self, version: u64) -> Play {
        square_cb(self.spec.inverse_gap, version)
    }

    fn set(&mut self, model: usize, lambda: &[f64], vectors: &[f64]) -> bool {
        self.decomposed.take();
        self.models[model].w = Symmetric::compose(self.dim, lambda, vectors);
        true
    }

    fn remap(&mut self, places: &[Option<usize>]) {
        self.decomposed.take();
        pick(&mut self.models, places, || Regression::new(self.dim));
    }

    fn save(&self) -> AlgorithmRecord {
        let models = self.models.iter().map(Regression::record).collect();
        AlgorithmRecord::QuadraticSgd(QuadraticSgdRecord { overlap: self.overlap.record(), models })
    }
}

impl Regression {
    fn new(dim: usize) -> Self {
        Self { w: Symmetric::identity(dim, 0.0), played: 0.0 }
    }

    fn record(&self) -> QuadraticRecord {
        QuadraticRecord { parameters: self.w.record(), examples: self.played }
    }

    fn from_record(record: QuadraticRecord, dim: usize) -> Option<Self> {
        let w = Symmetric::from_record(record.parameters, dim, SUM_MAX)?;
        (0.0..=SUM_MAX).contains(&record.examples).then_some(Self { w, played: record.examples })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::Example;

    #[test]
    fn overlap_is_that_of_neighbours_that_differ() {
        let mut overlap = Overlap::default();
        assert_eq!(overlap.mean(), 1.0);
        for query in [[1.0, 0.0], [1.0, 0.0], [0.6, 0.8], [0.6, 0.8], [0.0, 1.0]] {
            overlap.see(&query);
        }
        assert!((overlap.mean() - 0.5 * (0.36 + 0.64)).abs() < 1e-15);
        assert!(overlap.is_sound(2) && !overlap.is_sound(3));
    }

    /// The first example of a model is fitted exactly, and the others' parameters stay.
    #[test]
    fn only_the_played_model_learns() {
        let mut sgd = QuadraticSgd::new(QuadraticSgdSpec { eta: 1.0, inverse_gap: 30.0 }, 2, 2, None);
        let query = Query::new([3.0, 4.0]).unwrap();
        let example = Example::new(query.clone(), 1, vec![0.5, 0.5], None, 0.9).unwrap();
        sgd.apply(&[Lesson::new(example, 0.2)], 0);
        let mut scores = [0.0; 2];
        sgd.scores(&query, &mut scores);
        assert!(scores[0] == 0.0 && (scores[1] - 0.7).abs() < 1e-15, "{scores:?}");
    }
}
