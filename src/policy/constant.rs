//! The simplest learners: they learn nothing, and show what learning is worth.

use crate::event::Query;
use crate::learner::{Learner, Lesson};
use crate::router::{ALWAYS, ScoreForm};
use crate::wire::records::learner::AlgorithmRecord;

/// Every model with the same probability.
#[derive(Debug, Clone)]
pub struct Uniform {
    /// Number of models.
    pub models: usize,
}

impl Learner for Uniform {
    fn scores(&self, _query: &Query, scores: &mut [f64]) {
        scores.fill(0.0);
    }

    fn apply(&mut self, _batch: &[Lesson], _version: u64) {}

    fn score_forms(&self) -> Vec<ScoreForm> {
        vec![ScoreForm::default(); self.models]
    }

    fn remap(&mut self, places: &[Option<usize>]) {
        self.models = places.len();
    }

    fn save(&self) -> AlgorithmRecord {
        AlgorithmRecord::Stateless
    }
}

/// Always the same model, but for the exploration that was asked for.
#[derive(Debug, Clone)]
pub struct Fixed {
    /// Number of models.
    pub models: usize,
    /// The one that is played.
    pub model: usize,
}

impl Learner for Fixed {
    fn scores(&self, _query: &Query, scores: &mut [f64]) {
        scores.fill(0.0);
        scores[self.model] = f64::from(ALWAYS);
    }

    fn apply(&mut self, _batch: &[Lesson], _version: u64) {}

    fn score_forms(&self) -> Vec<ScoreForm> {
        let mut forms = vec![ScoreForm::default(); self.models];
        forms[self.model].bias = ALWAYS;
        forms
    }

    fn remap(&mut self, places: &[Option<usize>]) {
        self.models = places.len();
    }

    fn save(&self) -> AlgorithmRecord {
        AlgorithmRecord::Stateless
    }
}
