//! Hypentropy regression: the paper's geometry, driven by the error of a predicted reward.
//!
//! ```text
//! score    (1 - a) b_m + a s_m(q),  s_m(q) = n_m(q) + q'W_m q               predicts r - rbar
//!          b_m: mean of r - rbar;  a in 0..1: how well s has proved itself beside b       (trust)
//! play     t: examples since the world last changed, rho: share of queries that were met before     (repeats)
//!          rho < 1/2: inverse gap, g = inverse_gap 10^-rho sqrt(t);  else softmax of (inverse_gap / 200) sqrt(t) s
//! error    e = r - clip(rbar + s_m(q), 0, 1), of the played model m, which alone learns
//! first    n_m: to second order in the leading directions of the queries    (newton, directions)
//! then     Y_m += eta_m sum_i c_i q_i q_i', project, keep (1 + 2 rho) rank   (spectra)
//!          eta_m = min(3, eta / (kappa sqrt(examples of m + 1))) / beta      kappa: mean of (q_i.q_j)^2
//!          c = (I + eta_m K)^-1 e,  K_ij = (q_i'D q_j)^2,  D = sqrt(beta) I + U diag((lambda^2 + beta^2)^(1/4) - sqrt(beta)) U'
//! drift    when errors have grown for good, what is known is doubted: P_0, examples of m = 0, t = 0    (drift)
//! ```
//!
//! The mirror step is what learns where a model's kernel lies, from few examples in many dimensions, and is slow to learn
//! how much; the second-order part learns at once how much, but only in few directions. Each learns from what the other
//! leaves. With `feature_rank = 0`, `clip_predictions = false` and `drift = "none"` it is the mirror step alone.
//!
//! c is an approximately implicit residual: D stands for the curvature of the mirror map at W.

use faer::linalg::solvers::Solve;
use faer::{Mat, Side};
use serde::{Deserialize, Serialize};

use super::directions::Directions;
use super::drift::Drift;
use super::learner::score_form;
use super::linalg::{columns_dot, dot, product};
use super::newton::{Newton, features, turn};
use super::overlap::Overlap;
use super::projection::Ball;
use super::repeats::Repeats;
use super::schedule::shrink;
use super::spectra::{Eigen, Gradient, Spectra, Step, UNIT_MAX, extend_basis, pick};
use super::trust::{Constant, Trust};
use crate::config::Mode;
use crate::event::Query;
use crate::learner::{Learner, Lesson, Play};
use crate::policy::square_cb;
use crate::policy::symmetric::Symmetric;
use crate::router::ScoreForm;
use crate::wire::records::learner::AlgorithmRecord;
use crate::wire::records::learner::regression::{ModelRegressionRecord, RegressionRecord};

/// Checked settings of hypentropy regression.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RegressionSpec {
    /// Where the parameters of the mirror step live.
    pub ball: Ball,
    /// How they are held.
    pub mode: Mode,
    /// eta: scale of the mirror step.
    pub eta: f64,
    /// g / sqrt(t)
    pub inverse_gap: f64,
    /// Leading directions that are learned to second order.
    pub feature_rank: usize,
    /// Prior precision of what is learned there.
    pub ridge: f64,
    /// Whether predictions outside of 0..1 count as its ends.
    pub clip: bool,
    /// Whether drift is looked for.
    pub drift: bool,
}

/// The learner.
#[derive(Debug, Clone)]
pub struct HypentropyRegression {
    spec: RegressionSpec,
    dim: usize,
    models: usize,
    half_life: Option<f64>,
    of_models: Vec<OfModel>,
    directions: Directions,
    /// V: the directions that the second-order parts are in, one after the other.
    basis: Vec<f64>,
    overlap: Overlap,
    repeats: Repeats,
    trust: Trust,
    drift: Drift,
    /// Version at which the world last changed.
    since: u64,
}

/// What belongs to one model.
#[derive(Debug, Clone)]
struct OfModel {
    spectra: Spectra,
    newton: Newton,
    /// Its mean of r - rbar.
    constant: Constant,
    /// Its examples, those before a change not counted, older ones less where the past fades.
    examples: f64,
    /// Version after its last example.
    learned_at: u64,
}

/// The largest step, times beta.
const STEP_MAX: f64 = 3.0;

/// How much less steeply is played where all queries were met before.
const REPEATED: f64 = 0.1;

/// From this share of queries that were met before on, probabilities fall exponentially with the gap: where only the draw
/// explores, what it spends on models that are far behind is missing where the best ones are hard to tell apart.
const MOSTLY_REPEATED: f64 = 0.5;

/// How steeply that is, over the steepness of inverse gaps.
const EXPONENTIAL: f64 = 1.0 / 200.0;

/// Multiple of the rank that is kept where all queries repeat.
pub(crate) const RANKS_REPEATED: usize = 3;

/// The second-order part turns to newly known directions after so many examples, doubled each time, up to the second.
const FIRST_TURN: u64 = 32;
const TURN_EVERY_MAX: u64 = 16_384;

impl HypentropyRegression {
    /// Nothing known.
    pub fn new(spec: RegressionSpec, dim: usize, models: usize, half_life: Option<f64>) -> Self {
        // Where there are no more dimensions than directions wanted, they are the axes, from the beginning.
        let axes = spec.feature_rank == dim;
        let unit = |i: usize| (0..dim).map(move |j| f64::from(u8::from(i == j)));
        let basis: Vec<f64> = if axes { (0..dim).flat_map(unit).collect() } else { Vec::new() };
        let fresh = OfModel::new(&spec, dim, basis.len() / dim);
        Self {
            spec,
            dim,
            models,
            half_life,
            of_models: vec![fresh; models],
            directions: Directions::default(),
            basis,
            overlap: Overlap::default(),
            repeats: Repeats::default(),
            trust: Trust::default(),
            drift: Drift::default(),
            since: 0,
        }
    }

    /// Restores a record; none if it does not fit. Parameters of another ball, rank or mode become those of this one, as
    /// [`Spectra::from_record`] says.
    pub fn restore(
        spec: RegressionSpec,
        dim: usize,
        models: usize,
        half_life: Option<f64>,
        record: RegressionRecord,
    ) -> Option<Self> {
        let k = record.basis.len() / dim;
        let is_sound = record.basis.len() == dim * k
            && k <= spec.feature_rank
            && record.basis.iter().all(|x| x.abs() <= UNIT_MAX)
            && record.models.len() == models;
        if !is_sound {
            return None;
        }
        let repeats = Repeats::from_record(record.repeats)?;
        let is_lower = record.ball.rank > spec.ball.rank as u64;
        let ball = if is_lower {
            ball_for(&spec.ball, &repeats, dim)
        } else {
            // A model that was not played since queries repeated more often still has the rank of that time.
            Ball { rank: (RANKS_REPEATED * spec.ball.rank).min(dim), ..spec.ball }
        };
        let of_model = |one: ModelRegressionRecord| {
            let spectra = Spectra::from_record(one.parameters, &record.ball, spec.mode, &ball, dim, 1)?;
            let of_model = OfModel {
                spectra,
                newton: Newton::from_record(one.newton, k, record.ridge, spec.ridge)?,
                constant: Constant::from_record(&one.constant)?,
                examples: one.examples,
                learned_at: one.learned_at,
            };
            (0.0..=1e18).contains(&of_model.examples).then_some(of_model)
        };
        Some(Self {
            of_models: record.models.into_iter().map(of_model).collect::<Option<_>>()?,
            directions: Directions::from_record(record.directions, dim, spec.feature_rank)?,
            basis: record.basis,
            overlap: Overlap::from_record(record.overlap, dim)?,
            repeats,
            trust: Trust::from_record(&record.trust)?,
            drift: Drift::from_record(&record.drift)?,
            since: record.changed_at,
            spec,
            dim,
            models,
            half_life,
        })
    }

    fn features(&self, query: &[f64], phi: &mut Vec<f64>) {
        let mut y = Vec::new();
        columns_dot(&self.basis, query, &mut y);
        features(&y, phi);
    }

    /// Turns the second-order parts to the directions known by now.
    fn turn(&mut self) {
        let Self { directions, basis, of_models, .. } = self;
        let found = directions.leading(self.dim, self.spec.feature_rank);
        let (new, old) = (found.len() / self.dim, basis.len() / self.dim);
        let rotation: Vec<f64> =
            found.chunks_exact(self.dim).flat_map(|v| basis.chunks_exact(self.dim).map(move |u| dot(v, u))).collect();
        let turn = turn(&rotation, new, old);
        of_models.iter_mut().for_each(|of_model| of_model.newton.turn(&turn, self.spec.ridge));
        *basis = found.to_vec();
    }

    fn see(&mut self, query: &[f64]) {
        self.overlap.see(query);
        self.repeats.see(query);
        if self.spec.feature_rank > 0 && self.spec.feature_rank < self.dim {
            self.directions.see(query, self.spec.feature_rank);
            let seen = self.directions.seen();
            if seen.is_multiple_of(TURN_EVERY_MAX) || (seen.is_power_of_two() && seen >= FIRST_TURN) {
                self.turn();
            }
        }
    }

    /// e of a lesson whose score is this.
    fn error(&self, lesson: &Lesson, score: f64) -> f64 {
        let predicted = lesson.mean_before + score;
        lesson.example.reward() - if self.spec.clip { predicted.clamp(0.0, 1.0) } else { predicted }
    }

    /// One model learns from its lessons of a batch; true if its errors tell that the world has changed.
    fn learn(&mut self, model: usize, lessons: &[&Lesson], version: u64) -> bool {
        let end = version + lessons.len() as u64;
        let elapsed = end.saturating_sub(self.of_models[model].learned_at);
        let keep = shrink(self.half_life, elapsed as usize);
        self.of_models[model].newton.fade(keep, self.spec.ridge);
        let quadratic = Errors::new(self, model, lessons);
        let mut changed = false;
        for (phi, (lesson, score)) in quadratic.features.iter().zip(lessons.iter().zip(&quadratic.scores)) {
            let of_model = &mut self.of_models[model];
            let (score, constant) = (of_model.newton.predict(phi) + score, of_model.constant.mean());
            let above = lesson.example.reward() - lesson.mean_before;
            of_model.constant.add(above, keep);
            self.trust.see(above - constant, score - constant);
            let error = self.error(lesson, score);
            changed |= self.spec.drift && self.drift.see(error);
            if self.spec.feature_rank > 0 {
                self.of_models[model].newton.learn(phi, error);
            }
        }
        let ball = &self.ball();
        let of_model = &self.of_models[model];
        let examples = of_model.examples * keep;
        let rate = (self.spec.eta / (self.overlap.mean() * (examples + 1.0).sqrt())).min(STEP_MAX) / ball.beta;
        let left = lessons.iter().zip(&quadratic.features).zip(&quadratic.scores);
        let errors: Vec<f64> =
            left.map(|((lesson, phi), score)| self.error(lesson, of_model.newton.predict(phi) + score)).collect();
        let coefficients = quadratic.implicit(rate, errors);
        let gradients: Vec<Gradient> = lessons
            .iter()
            .zip(coefficients.chunks_exact(1))
            .map(|(lesson, coefficients)| Gradient { query: lesson.example.query().as_slice(), coefficients })
            .collect();
        let of_model = &mut self.of_models[model];
        of_model.spectra.step(&Step { ball, rate, shrink: keep }, &gradients);
        of_model.examples = examples + lessons.len() as f64;
        of_model.learned_at = end;
        changed
    }

    /// Queries that come again and again are to be told apart one by one, which takes more directions.
    fn ball(&self) -> Ball {
        ball_for(&self.spec.ball, &self.repeats, self.dim)
    }

    /// The world has changed: what is known stays as a guess, and is soon overruled.
    fn doubt(&mut self, version: u64) {
        let k = self.basis.len() / self.dim;
        for of_model in &mut self.of_models {
            of_model.newton.doubt(k, self.spec.ridge);
            of_model.examples = 0.0;
            of_model.constant = Constant::default();
        }
        self.since = version;
    }

    /// Each model's whole quadratic part, decomposed.
    fn quadratic_parts(&self) -> Vec<Eigen> {
        let trust = self.trust.share();
        let part = |of_model: &OfModel| {
            let Eigen { mut lambda, vectors, .. } = of_model.eigen(&self.spec.ball, &self.basis, self.dim);
            lambda.iter_mut().for_each(|lambda| *lambda *= trust);
            Eigen { gamma: lambda.iter().map(|x| (x / self.spec.ball.beta).asinh()).collect(), lambda, vectors }
        };
        self.of_models.iter().map(part).collect()
    }
}

/// What a batch of one model's lessons needs of its parameters before the batch.
struct Errors {
    features: Vec<Vec<f64>>,
    /// q'Wq
    scores: Vec<f64>,
    /// K
    curvature: Vec<f64>,
}

impl Errors {
    fn new(learner: &HypentropyRegression, model: usize, lessons: &[&Lesson]) -> Self {
        let (ball, spectra) = (&learner.spec.ball, &learner.of_models[model].spectra);
        let root = ball.beta.sqrt();
        let (mut features, mut scores, mut weighted, mut coordinates) = (vec![], vec![], vec![], vec![]);
        for lesson in lessons {
            let query = lesson.example.query().as_slice();
            let mut phi = Vec::new();
            learner.features(query, &mut phi);
            features.push(phi);
            let mut p = Vec::new();
            let lambda = spectra.coordinates(ball, 0, query, &mut p);
            scores.push(lambda.iter().zip(&p).map(|(lambda, p)| lambda * p * p).sum());
            let stretch = |lambda: &f64| lambda.hypot(ball.beta).sqrt() - root;
            weighted.push(lambda.iter().zip(&p).map(|(lambda, p)| stretch(lambda) * p).collect::<Vec<f64>>());
            coordinates.push(p);
        }
        let n = lessons.len();
        let entry = |at: usize| {
            let (i, j) = (at % n, at / n);
            let (a, b) = (lessons[i].example.query().as_slice(), lessons[j].example.query().as_slice());
            let cosine = if i == j { 1.0 } else { dot(a, b) };
            (root * cosine + dot(&weighted[i], &coordinates[j])).powi(2)
        };
        Self { features, scores, curvature: (0..n * n).map(entry).collect() }
    }

    /// (I + rate K)^-1 e
    fn implicit(&self, rate: f64, errors: Vec<f64>) -> Vec<f64> {
        let n = errors.len();
        let entry = |i: usize, j: usize| f64::from(u8::from(i == j)) + rate * self.curvature[j * n + i];
        if n == 1 {
            return vec![errors[0] / entry(0, 0)];
        }
        // K is a product of positive matrices, entry by entry, and so positive itself.
        match Mat::from_fn(n, n, entry).llt(Side::Lower) {
            Ok(factor) => {
                let solved = factor.solve(Mat::from_fn(n, 1, |i, _| errors[i]));
                (0..n).map(|i| solved[(i, 0)]).collect()
            }
            Err(_) => errors.iter().enumerate().map(|(i, e)| e / (entry(i, i) * n as f64)).collect(),
        }
    }
}

impl Learner for HypentropyRegression {
    fn scores(&self, query: &Query, scores: &mut [f64]) {
        let query = query.as_slice();
        let mut phi = Vec::new();
        self.features(query, &mut phi);
        for (score, of_model) in scores.iter_mut().zip(&self.of_models) {
            of_model.spectra.scores(&self.spec.ball, query, std::slice::from_mut(score));
            *score += of_model.newton.predict(&phi);
            *score = self.trust.mix(of_model.constant.mean(), *score);
        }
    }

    fn predict(&self, _query: &Query, scores: &[f64], mean: f64, rewards: &mut [f64]) -> bool {
        // A score is a reward above the mean.
        rewards.iter_mut().zip(scores).for_each(|(reward, score)| *reward = (mean + score).clamp(0.0, 1.0));
        scores.len() == rewards.len()
    }

    fn apply(&mut self, batch: &[Lesson], version: u64) {
        let mut of_models: Vec<Vec<&Lesson>> = vec![Vec::new(); self.models];
        for lesson in batch {
            self.see(lesson.example.query().as_slice());
            of_models[lesson.example.model()].push(lesson);
        }
        let mut changed = false;
        for (model, lessons) in of_models.iter().enumerate().filter(|(_, lessons)| !lessons.is_empty()) {
            changed |= self.learn(model, lessons, version);
        }
        if changed {
            self.doubt(version + batch.len() as u64);
        }
    }

    fn score_forms(&self) -> Vec<ScoreForm> {
        let parts = self.quadratic_parts();
        let form = |(eigen, of_model): (&Eigen, &OfModel)| {
            let bias = self.trust.mix(of_model.constant.mean(), of_model.newton.intercept());
            ScoreForm { bias: bias as f32, ..score_form(eigen) }
        };
        parts.iter().zip(&self.of_models).map(form).collect()
    }

    fn eigens(&self) -> Vec<Eigen> {
        self.quadratic_parts()
    }

    fn play(&self, version: u64) -> Play {
        let (scale, examples) = (self.spec.inverse_gap, version.saturating_sub(self.since));
        let repeated = self.repeats.share();
        if repeated < MOSTLY_REPEATED {
            square_cb(scale * REPEATED.powf(repeated), examples)
        } else {
            Play::softmax(EXPONENTIAL * scale * (examples as f64 + 1.0).sqrt())
        }
    }

    fn set(&mut self, model: usize, lambda: &[f64], vectors: &[f64]) -> bool {
        let eigen = Eigen::from_primal(&self.spec.ball, lambda, vectors, self.dim);
        self.of_models[model].spectra.set(0, eigen, self.dim)
    }

    fn remap(&mut self, places: &[Option<usize>]) {
        self.models = places.len();
        let fresh = OfModel::new(&self.spec, self.dim, self.basis.len() / self.dim);
        pick(&mut self.of_models, places, || fresh.clone());
    }

    fn save(&self) -> AlgorithmRecord {
        AlgorithmRecord::Regression(RegressionRecord {
            ball: self.spec.ball.record(),
            ridge: self.spec.ridge,
            models: self.of_models.iter().map(OfModel::record).collect(),
            directions: self.directions.record(),
            basis: self.basis.clone(),
            overlap: self.overlap.record(),
            repeats: self.repeats.record(),
            trust: self.trust.record(),
            drift: self.drift.record(),
            changed_at: self.since,
        })
    }
}

/// The ball with the rank that the share of repeated queries asks for.
fn ball_for(ball: &Ball, repeats: &Repeats, dim: usize) -> Ball {
    let more = ((RANKS_REPEATED - 1) * ball.rank) as f64 * repeats.share();
    Ball { rank: (ball.rank + more as usize).min(dim), ..*ball }
}

impl OfModel {
    fn new(spec: &RegressionSpec, dim: usize, k: usize) -> Self {
        Self {
            spectra: Spectra::new(spec.mode, dim, 1),
            newton: Newton::new(k, spec.ridge),
            constant: Constant::default(),
            examples: 0.0,
            learned_at: 0,
        }
    }

    fn record(&self) -> ModelRegressionRecord {
        ModelRegressionRecord {
            parameters: self.spectra.record(),
            newton: self.newton.record(),
            constant: self.constant.record(),
            examples: self.examples,
            learned_at: self.learned_at,
        }
    }

    /// W and the second-order part's own quadratic form, as one; gamma is left out.
    fn eigen(&self, ball: &Ball, basis: &[f64], dim: usize) -> Eigen {
        let mirror = self.spectra.eigens(ball, dim).pop().unwrap_or_default();
        let k = basis.len() / dim;
        if k == 0 {
            return mirror;
        }
        let (values, rotation) = self.newton.quadratic(k);
        let mut span = mirror.vectors.clone();
        basis.chunks_exact(dim).for_each(|direction| extend_basis(&mut span, direction));
        let n = span.len() / dim;
        let mut small = Symmetric::identity(n, 0.0);
        let mut coordinates = Vec::new();
        let rows: Vec<f64> =
            (0..k).flat_map(|i| (0..k).map(move |j| (i, j))).map(|(i, j)| rotation[j * k + i]).collect();
        let mut vectors = vec![0.0; dim * k];
        product(dim, basis, &rows, k, false, &mut vectors);
        let parts = mirror.lambda.iter().zip(mirror.vectors.chunks_exact(dim));
        for (value, vector) in parts.chain(values.iter().zip(vectors.chunks_exact(dim))) {
            columns_dot(&span, vector, &mut coordinates);
            small.add(*value, &coordinates);
        }
        let (lambda, rotation) = small.eigen();
        let rows: Vec<f64> =
            (0..n).flat_map(|i| (0..n).map(move |j| (i, j))).map(|(i, j)| rotation[j * n + i]).collect();
        let mut vectors = vec![0.0; dim * n];
        product(dim, &span, &rows, n, false, &mut vectors);
        Eigen { gamma: Vec::new(), lambda, vectors }
    }
}
