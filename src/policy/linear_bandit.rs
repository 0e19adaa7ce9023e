//! Linear bandits: each model's reward regressed on features of the query.
//!
//! ```text
//! s_m(q) = w_m . phi(q)                     w_m: ridge regression of r - 1/2 on phi, over the examples of model m
//! lin-ucb        plays argmax s_m + alpha sqrt(phi' A_m^-1 phi)
//! lin-thompson   plays argmax w . phi with w drawn from N(w_m, alpha^2 A_m^-1)
//! ```
//!
//! LinUCB: Li et al. 2010, Chu et al. 2011; Thompson sampling: Agrawal and Goyal 2013. w enters only by its product
//! with one phi, so that one normal number for each model is the same draw. Neither rule fits the routing form: they
//! are played exactly in one process only ([`Learner::index`]); routers get s_m and play it by inverse gaps
//! (SquareCB: Foster and Rakhlin 2020), with g = `inverse_gap` sqrt(t). Propensities are not used.

use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};

use super::features::{Early, Features, WARM_UP, leading_directions};
use super::ridge::Ridge;
use super::square_cb;
use crate::config::FeatureKind;
use crate::event::Query;
use crate::hpg::schedule::shrink;
use crate::hpg::spectra::pick;
use crate::learner::{Learner, Lesson, Play};
use crate::router::ScoreForm;
use crate::simulate::normals;
use crate::wire::records::learner::AlgorithmRecord;
use crate::wire::records::learner::rivals::{LinearBanditRecord, RidgeRecord};

/// Checked settings of a linear bandit.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LinearBanditSpec {
    /// How it explores.
    pub exploration: Exploration,
    /// Width of the bonus, or scale of the posterior.
    pub alpha: f64,
    /// What A begins with.
    pub ridge: f64,
    /// What it sees of a query.
    pub features: FeatureKind,
    /// k: directions whose products it sees, where it does.
    pub feature_rank: usize,
    /// g / sqrt(t)
    pub inverse_gap: f64,
}

/// How a linear bandit explores.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Exploration {
    /// By a bonus for what is little known.
    Ucb,
    /// By a draw from the posterior.
    Thompson,
}

/// LinUCB or linear Thompson sampling.
#[derive(Debug, Clone)]
pub struct LinearBandit {
    spec: LinearBanditSpec,
    dim: usize,
    size: usize,
    half_life: Option<f64>,
    features: Features,
    models: Vec<Ridge>,
}

/// What is expected where nothing is known. Were it 0, the first model that earns anything would be played for ever
/// unless the bonus is large.
const MIDDLE: f64 = 0.5;

impl LinearBandit {
    /// Nothing known.
    pub fn new(spec: LinearBanditSpec, dim: usize, models: usize, half_life: Option<f64>) -> Self {
        let size = Features::size(spec.features, dim, spec.feature_rank);
        let features = Features::new(spec.features);
        let models = vec![Ridge::new(size, spec.ridge); models];
        Self { spec, dim, size, half_life, features, models }
    }

    /// Restores a record; none if it does not fit.
    pub fn restore(
        spec: LinearBanditSpec,
        dim: usize,
        models: usize,
        half_life: Option<f64>,
        record: LinearBanditRecord,
    ) -> Option<Self> {
        let size = Features::size(spec.features, dim, spec.feature_rank);
        let features = Features::from_record(record.features, spec.features, dim, spec.feature_rank, models)?;
        if record.models.len() != models {
            return None;
        }
        let ridge = |record: RidgeRecord| Ridge::from_record(record, size);
        let models = record.models.into_iter().map(ridge).collect::<Option<Vec<Ridge>>>()?;
        Some(Self { spec, dim, size, half_life, features, models })
    }

    fn learn(&mut self, query: &[f64], model: Option<usize>, reward: f64) {
        let phi = self.features.of(query, self.size);
        if let Some(ridge) = model.and_then(|model| self.models.get_mut(model)) {
            ridge.add(&phi, reward - MIDDLE);
        }
    }

    fn forget(&mut self, examples: usize) {
        let keep = shrink(self.half_life, examples);
        if keep < 1.0 {
            self.models.iter_mut().for_each(|model| model.forget(keep, self.spec.ridge));
        }
    }

    /// Keeps an example until there are enough to know the directions; then all are learned again, with them.
    fn warm_up(&mut self, lesson: &Lesson) {
        let Features::WarmUp(early) = &mut self.features else { return };
        let example = &lesson.example;
        early.extend(example.rewards().map(|(model, reward)| Early {
            query: example.query().as_slice().to_vec(),
            model: Some(model),
            reward,
        }));
        if early.len() < WARM_UP {
            return;
        }
        let early = std::mem::take(early);
        let directions = leading_directions(&early, self.dim, self.spec.feature_rank);
        self.features = Features::Quadratic(directions);
        self.models.fill(Ridge::new(self.size, self.spec.ridge));
        for Early { query, model, reward } in early {
            self.forget(1);
            self.learn(&query, model, reward);
        }
    }
}

impl Learner for LinearBandit {
    fn scores(&self, query: &Query, scores: &mut [f64]) {
        let phi = self.features.of(query.as_slice(), self.size);
        scores.iter_mut().zip(&self.models).for_each(|(score, model)| *score = model.mean(&phi));
    }

    fn index(&self, query: &Query, luck: &mut ChaCha8Rng, scores: &mut [f64]) -> bool {
        let phi = self.features.of(query.as_slice(), self.size);
        let draws = match self.spec.exploration {
            Exploration::Ucb => vec![1.0; scores.len()],
            Exploration::Thompson => normals(scores.len(), luck),
        };
        for ((score, model), draw) in scores.iter_mut().zip(&self.models).zip(draws) {
            *score = model.mean(&phi) + self.spec.alpha * draw * model.width(&phi);
        }
        true
    }

    fn apply(&mut self, batch: &[Lesson], _version: u64) {
        self.forget(batch.len());
        for lesson in batch {
            let example = &lesson.example;
            for (model, reward) in example.rewards() {
                self.learn(example.query().as_slice(), Some(model), reward);
            }
            self.warm_up(lesson);
        }
        self.models.iter_mut().for_each(Ridge::solve);
    }

    fn score_forms(&self) -> Vec<ScoreForm> {
        let form = |model: &Ridge| self.features.score_form(model.weights(), self.dim);
        self.models.iter().map(form).collect()
    }

    fn play(&self, version: u64) -> Play {
        square_cb(self.spec.inverse_gap, version)
    }

    /// Of a new model nothing is known.
    fn remap(&mut self, places: &[Option<usize>]) {
        pick(&mut self.models, places, || Ridge::new(self.size, self.spec.ridge));
        if let Features::WarmUp(early) = &mut self.features {
            let moved = |old: usize| places.iter().position(|place| *place == Some(old));
            early.iter_mut().for_each(|one| one.model = one.model.and_then(moved));
        }
    }

    fn save(&self) -> AlgorithmRecord {
        AlgorithmRecord::LinearBandit(LinearBanditRecord {
            ridge: self.spec.ridge,
            features: self.features.record(),
            models: self.models.iter().map(Ridge::record).collect(),
        })
    }
}
