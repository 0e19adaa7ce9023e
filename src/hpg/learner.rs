//! Algorithm 1, hypentropy policy gradient, as a [`Learner`].

use super::gradient::{Estimator, GradientSpec};
use super::schedule::shrink;
use super::spectra::{Eigen, Gradient, Spectra, Step};
use crate::config::HpgSpec;
use crate::event::{Example, Query};
use crate::learner::{Learner, Lesson};
use crate::router::ScoreForm;
use crate::wire::records::learner::AlgorithmRecord;
use crate::wire::records::learner::hpg::{HpgRecord, ParametersRecord};

/// Algorithm 1.
#[derive(Debug, Clone)]
pub struct Hpg {
    spec: HpgSpec,
    dim: usize,
    models: usize,
    half_life: Option<f64>,
    spectra: Spectra,
    scratch: Scratch,
}

/// Memory that a batch needs and no state.
#[derive(Debug, Clone, Default)]
struct Scratch {
    scores: Vec<f64>,
    coefficients: Vec<f64>,
    of_batch: Vec<f64>,
}

impl Hpg {
    /// W = 0.
    pub fn new(spec: HpgSpec, dim: usize, models: usize, half_life: Option<f64>) -> Self {
        let spectra = Spectra::new(spec.mode, dim, models);
        Self { spec, dim, models, half_life, spectra, scratch: Scratch::default() }
    }

    /// Restores a record, as [`Spectra::from_record`] does; none if it does not fit.
    pub fn restore(
        spec: HpgSpec,
        dim: usize,
        models: usize,
        half_life: Option<f64>,
        record: HpgRecord,
    ) -> Option<Self> {
        let HpgRecord { ball, parameters } = record;
        let spectra = Spectra::from_record(parameters, &ball, spec.mode, &spec.ball, dim, models)?;
        Some(Self { spec, dim, models, half_life, spectra, scratch: Scratch::default() })
    }

    /// The record of its state.
    pub fn record(&self) -> HpgRecord {
        HpgRecord { ball: self.spec.ball.record(), parameters: self.spectra.record() }
    }

    /// q'W_m q of each model.
    pub fn quadratic_scores(&self, query: &[f64], scores: &mut [f64]) {
        self.spectra.scores(&self.spec.ball, query, scores);
    }

    /// The same for a lesson of a batch that comes next.
    pub fn lesson_scores(&mut self, batch: &[Lesson], lesson: &Lesson, scores: &mut [f64]) {
        let query = lesson.example.query().as_slice();
        match batch {
            [_] => self.spectra.look(&self.spec.ball, query, scores),
            _ => self.spectra.scores(&self.spec.ball, query, scores),
        }
    }

    /// c_m of a lesson, for a policy that plays by `scores`.
    pub fn lesson_coefficients(&self, lesson: &Lesson, scores: impl FnOnce(&mut [f64]), c: &mut Vec<f64>) {
        let HpgSpec { estimator, baseline, weight_cap, .. } = self.spec;
        let gradient = GradientSpec { estimator, baseline, weight_cap };
        let policy = gradient.policy(lesson, self.models, scores);
        gradient.coefficients(lesson, &policy, c);
    }

    /// One mirror step with the coefficients of a batch, model by model for each lesson.
    pub fn step<'a>(&mut self, batch: &'a [Lesson], coefficients: &'a [f64], version: u64) {
        let rate = self.spec.rate.at(version + batch.len() as u64);
        let step = Step { ball: &self.spec.ball, rate, shrink: shrink(self.half_life, batch.len()) };
        let gradient = |(lesson, coefficients): (&'a Lesson, &'a [f64])| Gradient {
            query: lesson.example.query().as_slice(),
            coefficients,
        };
        if let [lesson] = batch {
            self.spectra.step(&step, &[gradient((lesson, coefficients))]);
            return;
        }
        let gradients: Vec<Gradient> = batch.iter().zip(coefficients.chunks_exact(self.models)).map(gradient).collect();
        self.spectra.step(&step, &gradients);
    }

    /// The parameters, multiplied out.
    pub fn quadratic_parts(&self) -> Vec<Eigen> {
        self.spectra.eigens(&self.spec.ball, self.dim)
    }
}

impl Learner for Hpg {
    fn scores(&self, query: &Query, scores: &mut [f64]) {
        self.quadratic_scores(query.as_slice(), scores);
    }

    fn look(&mut self, query: &Query, scores: &mut [f64]) {
        self.spectra.look(&self.spec.ball, query.as_slice(), scores);
    }

    fn foresight(&self) -> usize {
        self.spectra.foresight()
    }

    fn expect(&mut self, examples: &[Example]) {
        self.spectra.expect(examples.iter().map(|example| example.query().as_slice()));
    }

    fn apply(&mut self, batch: &[Lesson], version: u64) {
        let Scratch { mut scores, mut coefficients, mut of_batch } = std::mem::take(&mut self.scratch);
        of_batch.clear();
        for lesson in batch {
            if self.spec.estimator == Estimator::Importance {
                scores.resize(self.models, 0.0);
                self.lesson_scores(batch, lesson, &mut scores);
            }
            self.lesson_coefficients(lesson, |out| out.copy_from_slice(&scores), &mut coefficients);
            of_batch.extend_from_slice(&coefficients);
        }
        self.step(batch, &of_batch, version);
        self.scratch = Scratch { scores, coefficients, of_batch };
    }

    fn score_forms(&self) -> Vec<ScoreForm> {
        self.quadratic_parts().iter().map(score_form).collect()
    }

    fn eigens(&self) -> Vec<Eigen> {
        self.quadratic_parts()
    }

    fn set(&mut self, model: usize, lambda: &[f64], vectors: &[f64]) -> bool {
        let eigen = Eigen::from_primal(&self.spec.ball, lambda, vectors, self.dim);
        self.spectra.set(model, eigen, self.dim)
    }

    fn add(&mut self, other: &AlgorithmRecord) -> bool {
        match (&mut self.spectra, other) {
            (Spectra::Lazy(sum), AlgorithmRecord::Hpg(HpgRecord { parameters: ParametersRecord::Lazy(other), .. })) => {
                sum.add(other)
            }
            _ => false,
        }
    }

    fn remap(&mut self, places: &[Option<usize>]) {
        self.models = places.len();
        self.spectra.remap(places, self.dim);
    }

    fn save(&self) -> AlgorithmRecord {
        AlgorithmRecord::Hpg(self.record())
    }
}

/// A quadratic score in the routing form.
pub fn score_form(eigen: &Eigen) -> ScoreForm {
    let single = |values: &[f64]| values.iter().map(|&x| x as f32).collect();
    ScoreForm { eigenvalues: single(&eigen.lambda), eigenvectors: single(&eigen.vectors), ..ScoreForm::default() }
}
