//! Algorithm 2, parameter-free hypentropy policy gradient.
//!
//! ```text
//! W_m = z_m w_m       w: Algorithm 1 with tau = 1, beta = 1/d;  z_m: coin betting on g_m = <G_m, w_m> = -c_m q'w_m q
//! ```
//!
//! The bettor steps once an example, the inner algorithm once a batch. The nuclear-norm bound holds for w, not for
//! z w: finding the scale is the point.

use super::coin::Bettor;
use super::gradient::Estimator;
use super::learner::{Hpg, score_form};
use super::spectra::{Eigen, pick};
use crate::config::HpgSpec;
use crate::event::{Example, Query};
use crate::learner::{Learner, Lesson};
use crate::router::ScoreForm;
use crate::wire::records::learner::AlgorithmRecord;
use crate::wire::records::learner::hpg::ParameterFreeRecord;

/// What a bettor begins with.
const INITIAL_WEALTH: f64 = 1.0;

/// Algorithm 2.
#[derive(Debug, Clone)]
pub struct ParameterFree {
    inner: Hpg,
    bettors: Vec<Bettor>,
    estimator: Estimator,
    weight_cap: f64,
}

impl ParameterFree {
    /// W = 0.
    pub fn new(spec: HpgSpec, dim: usize, models: usize, half_life: Option<f64>) -> Self {
        let (estimator, weight_cap) = (spec.estimator, spec.weight_cap);
        let bettors = vec![Bettor::new(INITIAL_WEALTH); models];
        Self { inner: Hpg::new(spec, dim, models, half_life), bettors, estimator, weight_cap }
    }

    /// Restores a record, as [`Hpg::restore`] does; none if it does not fit.
    pub fn restore(
        spec: HpgSpec,
        dim: usize,
        models: usize,
        half_life: Option<f64>,
        record: ParameterFreeRecord,
    ) -> Option<Self> {
        let (estimator, weight_cap) = (spec.estimator, spec.weight_cap);
        let inner = Hpg::restore(spec, dim, models, half_life, record.hpg)?;
        let bettors = record.bettors.iter().map(Bettor::from_record).collect::<Option<Vec<Bettor>>>()?;
        (bettors.len() == models).then_some(Self { inner, bettors, estimator, weight_cap })
    }

    /// z_m of each model.
    pub fn magnitudes(&self) -> Vec<f64> {
        self.bettors.iter().map(Bettor::magnitude).collect()
    }
}

impl Learner for ParameterFree {
    fn scores(&self, query: &Query, scores: &mut [f64]) {
        self.inner.quadratic_scores(query.as_slice(), scores);
        for (score, bettor) in scores.iter_mut().zip(&self.bettors) {
            *score *= bettor.magnitude();
        }
    }

    fn foresight(&self) -> usize {
        self.inner.foresight()
    }

    fn expect(&mut self, examples: &[Example]) {
        self.inner.expect(examples);
    }

    fn apply(&mut self, batch: &[Lesson], version: u64) {
        let models = self.bettors.len();
        let mut all = Vec::with_capacity(batch.len() * models);
        let mut directions = vec![0.0; models];
        let mut c = Vec::with_capacity(models);
        for lesson in batch {
            self.inner.lesson_scores(batch, lesson, &mut directions);
            let scores = |out: &mut [f64]| {
                let magnitudes = self.bettors.iter().map(Bettor::magnitude);
                out.iter_mut().zip(directions.iter().zip(magnitudes)).for_each(|(score, (w, z))| *score = w * z);
            };
            self.inner.lesson_coefficients(lesson, scores, &mut c);
            // What brings g into -1..1: the largest weight, where the example can have one other than 1.
            let weighted = self.estimator == Estimator::Importance || lesson.example.is_weighted();
            let gradient_max = if weighted { self.weight_cap } else { 1.0 };
            for ((bettor, c), direction) in self.bettors.iter_mut().zip(&c).zip(&directions) {
                bettor.step(-c * direction / gradient_max);
            }
            all.extend_from_slice(&c);
        }
        self.inner.step(batch, &all, version);
    }

    fn score_forms(&self) -> Vec<ScoreForm> {
        self.eigens().iter().map(score_form).collect()
    }

    fn eigens(&self) -> Vec<Eigen> {
        let mut eigens = self.inner.quadratic_parts();
        for (eigen, bettor) in eigens.iter_mut().zip(&self.bettors) {
            eigen.lambda.iter_mut().for_each(|lambda| *lambda *= bettor.magnitude());
        }
        eigens
    }

    fn remap(&mut self, places: &[Option<usize>]) {
        self.inner.remap(places);
        pick(&mut self.bettors, places, || Bettor::new(INITIAL_WEALTH));
    }

    fn save(&self) -> AlgorithmRecord {
        let bettors = self.bettors.iter().map(Bettor::record).collect();
        AlgorithmRecord::ParameterFree(ParameterFreeRecord { hpg: self.inner.record(), bettors })
    }
}
