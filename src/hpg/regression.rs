//! Hypentropy regression: plays the scores of the [critic](super::critic) as they are, without a policy of its own.
//!
//! ```text
//! policy     pi(m | q) = softmax of S s_m(q)          s: the critic's scores;  S: its steepness
//! ```
//!
//! HPG with a critic plays the policy of low rank that is closest to this one. Without that bound the remainder's mirror step
//! is the part that follows the paper.

use super::critic::features::Features;
use super::critic::form::{Expanded, Form};
use super::critic::{Critic, CriticSpec};
use super::factored::FORESIGHT;
use super::projection::Ball;
use super::spectra::{Eigen, Spectra};
use crate::event::{Example, Query};
use crate::learner::{Learner, Lesson};
use crate::router::{HeadTable, ScoreForm};
use crate::wire::records::learner::AlgorithmRecord;
use crate::wire::records::learner::critic::{CriticLearnerRecord, CriticRecord};
use crate::wire::records::learner::regression::{RegressionRecord, TrustRecord};

/// The learner.
#[derive(Debug, Clone)]
pub struct HypentropyRegression {
    critic: Critic,
    dim: usize,
    models: usize,
}

/// Examples that a model's mean in a record of version 3 or older is worth, at most.
const CONSTANT_WEIGHT_MAX: f64 = 100.0;

/// The constant feature of such records.
const OLD_INTERCEPT: f64 = 0.3;

/// Examples of 0 that the means of such records start with.
const OLD_CAUTION: f64 = 20.0;

impl HypentropyRegression {
    /// Nothing known.
    pub fn new(spec: CriticSpec, dim: usize, models: usize, half_life: Option<f64>) -> Self {
        Self { critic: Critic::new(spec, dim, models, half_life), dim, models }
    }

    /// Restores a record; none if it does not fit.
    pub fn restore(
        spec: CriticSpec,
        dim: usize,
        models: usize,
        half_life: Option<f64>,
        record: CriticRecord,
    ) -> Option<Self> {
        Some(Self { critic: Critic::restore(spec, dim, models, half_life, record)?, dim, models })
    }

    /// Starts from what version 3 or older had learned in `version` examples. The quadratic part of a model becomes its
    /// remainder, its mean becomes examples.
    pub fn from_old(
        spec: CriticSpec,
        dim: usize,
        models: usize,
        half_life: Option<f64>,
        (record, version): (RegressionRecord, u64),
    ) -> Option<Self> {
        let mut critic = Critic::new(spec.clone(), dim, models, half_life);
        let k = record.basis.len() / dim;
        let TrustRecord { product, square } = record.trust;
        let trust = if square > 0.0 { (2.0 * product / square).clamp(0.0, 1.0) } else { 1.0 };
        let is_bounded = |x: &[f64]| x.iter().all(|x| x.abs() <= 1e15);
        if trust.is_nan()
            || record.models.len() != models
            || record.basis.len() != dim * k
            || !is_bounded(&record.basis)
        {
            return None;
        }
        // A model could keep up to three times the rank.
        let ball = Ball { rank: dim, ..spec.ball };
        critic.start_at(version);
        for (model, one) in record.models.into_iter().enumerate() {
            let (features, old) = (Features::new(dim, k, k), one.newton.weights);
            let mean = one.constant.sum / (one.constant.weight + OLD_CAUTION);
            let is_sound = old.len() + k == features.count()
                && is_bounded(&old)
                && mean.abs() <= 1.0
                && (0.0..=1e18).contains(&one.constant.weight);
            if !is_sound {
                return None;
            }
            // The same features but for a linear part.
            let weights: Vec<f64> = std::iter::repeat_n(0.0, 1 + k).chain(old[1..].iter().copied()).collect();
            let mut quadratic = Vec::new();
            features.quadratic_form(&weights, &mut quadratic);
            let mirror = Spectra::from_record(one.parameters, &record.ball, spec.mode, &ball, dim, 1)?;
            let remainder = mirror.eigens(&ball, dim).pop()?;
            let form = Form { linear: vec![0.0; k], quadratic, remainder, ..Form::default() };
            let (mut lambda, vectors) = form.expand(&record.basis, dim).eigen(dim);
            lambda.iter_mut().for_each(|lambda| *lambda *= trust);
            critic.set(model, &lambda, &vectors);
            let constant = mean + trust * (OLD_INTERCEPT * old[0] - mean);
            critic.add_constant(model, one.constant.weight.min(CONSTANT_WEIGHT_MAX), constant);
        }
        critic.solve();
        Some(Self { critic, dim, models })
    }

    fn expanded(&self, model: usize) -> Expanded {
        self.critic.form(model).expand(self.critic.basis(), self.dim)
    }
}

impl Learner for HypentropyRegression {
    fn scores(&self, query: &Query, scores: &mut [f64]) {
        self.critic.scores(query, scores);
        let steepness = self.critic.steepness();
        scores.iter_mut().for_each(|score| *score *= steepness);
        self.critic.finish(query, scores);
    }

    fn look(&mut self, query: &Query, scores: &mut [f64]) {
        self.critic.look(query);
        self.scores(query, scores);
    }

    fn foresight(&self) -> usize {
        FORESIGHT
    }

    fn expect(&mut self, examples: &[Example]) {
        self.critic.expect(examples);
    }

    fn predict(&self, query: &Query, _scores: &[f64], _mean: f64, rewards: &mut [f64]) -> bool {
        self.critic.predict(query, rewards);
        true
    }

    fn apply(&mut self, batch: &[Lesson], _version: u64) {
        for lesson in batch {
            self.critic.learn(&lesson.example);
        }
    }

    fn score_forms(&self) -> Vec<ScoreForm> {
        let steepness = self.critic.steepness();
        let form = |model: usize| {
            let expanded = self.expanded(model);
            let (lambda, vectors) = expanded.eigen(self.dim);
            let scaled = |values: &[f64]| values.iter().map(|x| (steepness * x) as f32).collect();
            ScoreForm {
                eigenvalues: scaled(&lambda),
                eigenvectors: vectors.iter().map(|x| *x as f32).collect(),
                linear: scaled(&expanded.linear_part(self.dim)),
                bias: (steepness * expanded.constant + self.critic.fallback(model)) as f32,
            }
        };
        (0..self.models).map(form).collect()
    }

    fn head_table(&self) -> HeadTable {
        self.critic.head_table()
    }

    fn eigens(&self) -> Vec<Eigen> {
        let eigen = |model: usize| {
            let (lambda, vectors) = self.expanded(model).eigen(self.dim);
            let gamma = lambda.iter().map(|lambda| (lambda / self.critic.beta()).asinh()).collect();
            Eigen { gamma, lambda, vectors }
        };
        (0..self.models).map(eigen).collect()
    }

    fn steepness(&self) -> Option<f64> {
        Some(self.critic.steepness())
    }

    fn set(&mut self, model: usize, lambda: &[f64], vectors: &[f64]) -> bool {
        self.critic.set(model, lambda, vectors)
    }

    fn add(&mut self, other: &AlgorithmRecord) -> bool {
        self.critic.add(other)
    }

    fn remap(&mut self, places: &[Option<usize>]) {
        self.models = places.len();
        self.critic.remap(places);
    }

    fn save(&self) -> AlgorithmRecord {
        AlgorithmRecord::Critic(Box::new(CriticLearnerRecord { critic: self.critic.record(), actor: None }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Algorithm, LearnerConfig, Method};
    use crate::wire::records::learner::hpg::{BallRecord, EigenRecord, ParametersRecord};
    use crate::wire::records::learner::regression::{
        ConstantRecord, DirectionsRecord, DriftRecord, ModelRegressionRecord, NewtonRecord, OverlapRecord,
        RepeatsRecord,
    };
    use crate::wire::records::learner::rivals::SymmetricRecord;

    /// The old parts of a model, 0.3 (e_1.q)^2 and 0.4 (e_2.q)^2, are its remainder; its mean is what it earns more.
    #[test]
    fn what_older_versions_learned_is_kept() {
        let config = LearnerConfig { dim: 3, algorithm: Algorithm::HypentropyRegression, ..LearnerConfig::default() };
        let Method::HypentropyRegression(spec) = config.check().unwrap().method else { panic!() };
        let model = |sum: f64| ModelRegressionRecord {
            parameters: ParametersRecord::Explicit(vec![EigenRecord {
                mirror_eigenvalues: vec![0.4_f64.asinh()],
                eigenvalues: vec![0.4],
                eigenvectors: vec![0.0, 1.0, 0.0],
            }]),
            newton: NewtonRecord {
                weights: vec![sum / 80.0 / OLD_INTERCEPT, 0.3],
                uncertainty: SymmetricRecord { size: 2, lower: vec![0.5, 0.0, 0.5] },
            },
            constant: ConstantRecord { sum, weight: 60.0 },
            examples: 60.0,
            learned_at: 100,
        };
        let record = RegressionRecord {
            ball: BallRecord { radius: 100.0, scale: 1.0, rank: 3 },
            ridge: 2.0,
            models: vec![model(8.0), model(-8.0)],
            directions: DirectionsRecord { vectors: vec![], energies: vec![], recent_queries: vec![], seen: 0 },
            basis: vec![1.0, 0.0, 0.0],
            overlap: OverlapRecord { last_query: vec![], sum: 0.0, pairs: 0.0 },
            repeats: RepeatsRecord { digests: vec![0; 2048], share: 0.0 },
            trust: TrustRecord { product: 1.0, square: 1.0 },
            drift: DriftRecord { examples: 0, mean: 0.0, spread: 0.0, sum: 0.0 },
            changed_at: 0,
        };
        let learner = HypentropyRegression::from_old(spec.clone(), 3, 2, None, (record.clone(), 100)).unwrap();
        for eigen in learner.eigens() {
            let mut values = eigen.lambda.clone();
            values.sort_by(f64::total_cmp);
            assert!((values[0] - 0.3).abs() < 1e-9 && (values[1] - 0.4).abs() < 1e-9, "{values:?}");
        }
        let mut rewards = [0.0; 2];
        learner.critic.predict(&Query::new([0.0, 0.0, 1.0]).unwrap(), &mut rewards);
        assert!((rewards[0] - rewards[1] - 0.2).abs() < 0.06, "{rewards:?}");
        let short = RegressionRecord { models: vec![model(8.0)], ..record };
        assert!(HypentropyRegression::from_old(spec, 3, 2, None, (short, 100)).is_none());
    }
}
