//! The critic: predicts what each model would earn on a query, and how steeply to play that.
//!
//! ```text
//! rhat_m(q) = 1/2 + w_0.phi + s_m(q)                      w_0.phi: how easy the query is, the same for all models
//! s_m(q)    = c_m + a (w_m.phi - c_m) + a' q'W_m q        c_m = w_m.mean(phi);  w: ridge;  W: remainder
//! logit_m   = S s_m(q) + (1 - a) (f_m - S c_m)            S = steepness sqrt(t), t: examples since rewards last changed
//! logit_m   = S s_m(q) + min(S, 8 sqrt(n)) e_m            where q was seen n times before                       (head)
//! ```
//!
//! - [`ridge`] regresses rewards on the [`features`] of a query, hierarchically: a part that all models share, and one of
//!   each model. It learns at once how much, but only in the leading directions.
//! - [`remainder`] learns where the rest lies, in all directions, by the paper's mirror step on the residuals.
//! - [`constants`] compares the models on the whole, query by query.
//! - [`head`] remembers frequent queries one by one. One score cannot both memorise them and carry over to others.
//!
//! a and a' say how far predictions carry over to queries that were not learned from. a' comes from first visits: slope of
//! the residual on what the remainder predicted of it. a also uses repeated queries, each left out of its own prediction:
//! evidence is counted by distinct query, not by example. Where predictions do not carry over, an unfamiliar query is
//! played by f_m, the odds that m is better on the whole than the best: log(p / (1 - p)), p = erfc(z_m / sqrt 2) / 2, where z_m
//! deviations are between the means of the two.
//!
//! When errors have grown for good ([`drift`](super::drift)), the sums are mostly forgotten and t restarts.

pub mod constants;
pub mod features;
pub mod form;
pub mod head;
pub mod remainder;
pub mod ridge;

use std::cell::RefCell;

use serde::{Deserialize, Serialize};

use self::features::Features;
use self::form::Form;
use self::head::{HeadQueries, HeadQuery};
use self::remainder::{Pace, Remainder, Residual};
use self::ridge::{Ridge, Uncertainty};
use super::directions::Directions;
use super::drift::Drift;
use super::overlap::Overlap;
use super::projection::Ball;
use super::schedule::shrink;
use super::spectra::{Eigen, UNIT_MAX, pick};
use crate::config::Mode;
use crate::event::{Example, Query};
use crate::query_key::{QueryKey, QueryKeys};
use crate::router::HeadTable;
use crate::wire::records::learner::AlgorithmRecord;
use crate::wire::records::learner::critic::{CriticRecord, ErrorsRecord};
use crate::wire::records::learner::regression::TrustRecord;

/// Checked settings of the critic. Fields that hypentropy regression lacked in older snapshots have a default.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CriticSpec {
    /// Feasible set of the remainders.
    pub ball: Ball,
    /// Representation of the remainders.
    pub mode: Mode,
    /// Scale of the remainder's steps.
    pub eta: f64,
    /// Leading directions of the linear part.
    #[serde(default)]
    pub linear_rank: usize,
    /// Leading directions whose products are features.
    pub feature_rank: usize,
    /// Prior precision of the quadratic part.
    pub ridge: f64,
    /// S / sqrt(t)
    #[serde(default)]
    pub steepness: f64,
    /// Frequent queries that are remembered one by one.
    #[serde(default)]
    pub head_queries: usize,
    /// Whether predictions outside of 0..1 count as its ends.
    pub clip: bool,
    /// Whether to detect drift.
    pub drift: bool,
}

/// The critic of all models.
#[derive(Debug, Clone)]
pub struct Critic {
    spec: CriticSpec,
    dim: usize,
    models: usize,
    half_life: Option<f64>,
    keys: QueryKeys,
    features: Features,
    directions: Directions,
    overlap: Overlap,
    ridge: Ridge,
    head: HeadQueries,
    remainders: Vec<Remainder>,
    evidence: Evidence,
    held_out: Evidence,
    remainder_evidence: Evidence,
    errors: Errors,
    drift: Drift,
    /// a, c and f, as of the last solution.
    trust: f64,
    constants: Vec<f64>,
    fallback: Vec<f64>,
    /// Examples learned from; at the last change of the rewards, at the last solution, and at the next.
    version: u64,
    since: u64,
    solved_at: u64,
    next_solution: u64,
    scratch: Scratch,
    expected: Expected,
    /// Scratch memory of the remainders, and of head queries.
    coordinates: Vec<f64>,
    head_scratch: RefCell<(Vec<f64>, Vec<f64>)>,
}

/// Memory of one example, and no state.
#[derive(Debug, Clone, Default)]
struct Scratch {
    /// The query that the rest belongs to, if the features did not turn since.
    query: Vec<f64>,
    key: Option<QueryKey>,
    y: Vec<f64>,
    phi: Vec<f64>,
    /// q'W_m q of each model, or empty if they changed since or are not trusted.
    remainders: Vec<f64>,
}

/// Queries that are announced, and their coordinates.
#[derive(Debug, Clone, Default)]
struct Expected {
    /// One after the other.
    queries: Vec<f64>,
    /// In the directions that are known, one query after the other.
    coordinates: Vec<f64>,
    /// Index of the next query.
    next: usize,
}

/// Sums for the slope of what came on what was predicted.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Evidence {
    product: f64,
    square: f64,
}

/// A fading mean of squared errors.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Errors {
    sum: f64,
    weight: f64,
}

/// What is left of squared errors, and of the evidence for the remainder, after one example.
const KEEP: f64 = 1.0 - 1.0 / 5000.0;

/// What is left of the evidence for the regression after one first visit. Signals are weak beside the noise of rewards: it
/// takes many.
const KEEP_EVIDENCE: f64 = 1.0 - 1.0 / 20_000.0;

/// Deviations that the evidence must show: of the regression, whose sums are mostly of few distinct queries, and of the
/// remainder, which a wrong direction costs more than a missing one.
const REGRESSION_DEVIATIONS: f64 = 1.0;
const REMAINDER_DEVIATIONS: f64 = 3.3;

/// From this slope on, predictions are taken as they are.
const SLOPE_FULL: f64 = 1.0 / 3.0;

/// Repeated queries that are left out of their own prediction at one solution, at most.
const HELD_OUT: usize = 256;

/// Solutions are this share of the examples so far (or of the half-life, if that is less) apart, within these bounds.
const SOLUTION_SHARE: u64 = 8;
const SOLUTION_MIN: u64 = 32;
const SOLUTION_MAX: u64 = 16_384;

/// The features turn to newly known directions after so many examples, doubled each time, up to the second.
const FIRST_TURN: u64 = 32;
const TURN_EVERY_MAX: u64 = 16_384;

/// Steepness of what is known of one query alone, over the square root of its visits.
const HEAD_STEEPNESS: f64 = 8.0;

/// What is left of the sums when rewards have changed: a guess that is soon overruled.
const DOUBT: f64 = 0.02;

/// The most directions of the features.
const RANK_MAX: usize = 256;

/// The least f: beyond it a model is not played anyway.
const FALLBACK_MIN: f64 = -30.0;

impl Critic {
    /// Nothing known.
    pub fn new(spec: CriticSpec, dim: usize, models: usize, half_life: Option<f64>) -> Self {
        let features = Features::new(dim, spec.linear_rank, spec.feature_rank);
        let n = features.count();
        Self {
            keys: QueryKeys::new(dim),
            directions: Directions::default(),
            overlap: Overlap::default(),
            ridge: Ridge::new(n, models),
            head: HeadQueries::new(spec.head_queries, models, features.linear()),
            remainders: vec![Remainder::new(spec.mode, dim); models],
            evidence: Evidence::default(),
            held_out: Evidence::default(),
            remainder_evidence: Evidence::default(),
            errors: Errors::default(),
            drift: Drift::default(),
            trust: 1.0,
            fallback: vec![0.0; models],
            constants: vec![0.0; models],
            version: 0,
            since: 0,
            solved_at: 0,
            next_solution: SOLUTION_MIN,
            scratch: Scratch::default(),
            expected: Expected::default(),
            coordinates: Vec::new(),
            head_scratch: RefCell::default(),
            features,
            spec,
            dim,
            models,
            half_life,
        }
    }

    /// S
    pub fn steepness(&self) -> f64 {
        self.spec.steepness * (self.version.saturating_sub(self.since) as f64 + 1.0).sqrt()
    }

    /// Starts at a version: what was learned elsewhere counts for the steepness.
    pub fn start_at(&mut self, version: u64) {
        self.version = version;
        self.solved_at = version;
        self.next_solution = version + SOLUTION_MIN;
    }

    /// f_m - S c_m, (1 - a) times: what unfamiliar queries add to S s_m.
    pub fn fallback(&self, model: usize) -> f64 {
        (1.0 - self.trust) * (self.fallback[model] - self.steepness() * self.constants[model])
    }

    /// Computes the key and the features of a query, unless it is still the last one.
    fn prepare(&mut self, query: &Query) {
        if self.scratch.query == query.as_slice() {
            return;
        }
        let Scratch { query: last, key, y, phi, remainders } = &mut self.scratch;
        remainders.clear();
        last.clear();
        last.extend_from_slice(query.as_slice());
        *key = Some(self.keys.key(query));
        match self.expected.next(query.as_slice()) {
            Some(known) => {
                y.clear();
                y.extend_from_slice(known);
                y.resize(self.features.linear(), 0.0);
            }
            None => self.features.coordinates(query.as_slice(), y),
        }
        self.features.of_coordinates(y, phi);
    }

    /// Announces the next examples, in order. Affects only the speed.
    pub fn expect(&mut self, examples: &[Example]) {
        let Expected { queries, coordinates, next } = &mut self.expected;
        queries.clear();
        examples.iter().for_each(|example| queries.extend_from_slice(example.query().as_slice()));
        self.features.coordinates_of_all(queries, coordinates);
        *next = 0;
    }

    /// Announces the query that is learned from next, so that its features are computed once.
    pub fn look(&mut self, query: &Query) {
        self.prepare(query);
        if self.scratch.remainders.is_empty() && self.remainder_trust() > 0.0 {
            let scores = self.remainders.iter_mut().map(|one| one.look(&self.spec.ball, query.as_slice()));
            self.scratch.remainders.extend(scores);
        }
    }

    /// Calls `f` with the key and the features of a query.
    fn with_features<T>(&self, query: &Query, f: impl FnOnce(QueryKey, &[f64]) -> T) -> T {
        let Scratch { query: last, key: Some(key), phi, .. } = &self.scratch else {
            return self.with_fresh_features(query, f);
        };
        if last == query.as_slice() { f(*key, phi) } else { self.with_fresh_features(query, f) }
    }

    fn with_fresh_features<T>(&self, query: &Query, f: impl FnOnce(QueryKey, &[f64]) -> T) -> T {
        let (mut y, mut phi) = (Vec::new(), Vec::new());
        self.features.coordinates(query.as_slice(), &mut y);
        self.features.of_coordinates(&y, &mut phi);
        f(self.keys.key(query), &phi)
    }

    /// s_m(q) of each model.
    pub fn scores(&self, query: &Query, scores: &mut [f64]) {
        self.with_features(query, |_, phi| self.scores_of(query.as_slice(), phi, scores));
    }

    fn scores_of(&self, query: &[f64], phi: &[f64], scores: &mut [f64]) {
        self.regression_scores(phi, scores);
        let share = self.remainder_trust();
        if share > 0.0 {
            let Scratch { query: last, remainders: known, .. } = &self.scratch;
            let known: &[f64] = if last == query { known } else { &[] };
            for (m, (score, remainder)) in scores.iter_mut().zip(&self.remainders).enumerate() {
                let remainder = known.get(m).copied().unwrap_or_else(|| remainder.score(&self.spec.ball, query));
                *score += share * remainder;
            }
        }
    }

    /// c_m + a (w_m.phi - c_m) of each model.
    fn regression_scores(&self, phi: &[f64], scores: &mut [f64]) {
        for (m, (score, constant)) in scores.iter_mut().zip(&self.constants).enumerate() {
            *score = constant + self.trust * (self.ridge.own(m, phi) - constant);
        }
    }

    /// Adds to logits what is known of the query itself, or the fallback if it is unfamiliar.
    pub fn finish(&self, query: &Query, logits: &mut [f64]) {
        self.with_features(query, |key, _| match self.head.get(key) {
            Some(head) => {
                let mut rows: [Row; 2] = Default::default();
                let [predicted, effects] = rows.each_mut().map(|row| row.of(self.models));
                self.effects(head, predicted, effects);
                let own = head_steepness(head, self.steepness());
                logits.iter_mut().zip(effects).for_each(|(logit, effect)| *logit += own * *effect);
            }
            None => logits.iter_mut().enumerate().for_each(|(m, logit)| *logit += self.fallback(m)),
        });
    }

    /// e of each model on a head query, and d. `predicted` becomes what the regression predicts of r - 1/2, from the
    /// coordinates that are stored: the table that routers get is computed from the same.
    fn effects(&self, head: &HeadQuery, predicted: &mut [f64], effects: &mut [f64]) -> f64 {
        let (y, phi) = &mut *self.head_scratch.borrow_mut();
        self.features_of(head, y, phi);
        self.regression_scores(phi, predicted);
        let shared = self.ridge.shared(phi);
        predicted.iter_mut().for_each(|predicted| *predicted += shared);
        head.effects(predicted, effects)
    }

    /// The reward of each model, 0 to 1.
    pub fn predict(&self, query: &Query, rewards: &mut [f64]) {
        self.with_features(query, |key, phi| match self.head.get(key) {
            Some(head) => {
                let mut effects = Row::default();
                let effects = effects.of(self.models);
                let level = self.effects(head, rewards, effects);
                rewards.iter_mut().zip(effects).for_each(|(reward, effect)| *reward += level + *effect);
            }
            None => {
                self.scores_of(query.as_slice(), phi, rewards);
                let shared = self.ridge.shared(phi);
                rewards.iter_mut().for_each(|reward| *reward += shared);
            }
        });
        rewards.iter_mut().for_each(|reward| *reward = (0.5 + *reward).clamp(0.0, 1.0));
    }

    /// Learns from an example. True if this solved the regression.
    pub fn learn(&mut self, example: &Example) -> bool {
        let query = example.query();
        self.overlap.see(query.as_slice());
        self.directions.see(query.as_slice(), self.features.linear());
        let seen = self.directions.seen();
        let turns = seen.is_multiple_of(TURN_EVERY_MAX) || (seen.is_power_of_two() && seen >= FIRST_TURN);
        if turns {
            self.turn();
        }
        self.prepare(query);
        let scratch = std::mem::take(&mut self.scratch);
        let changed = self.learn_prepared(&scratch, example);
        self.scratch = scratch;
        self.scratch.remainders.clear();
        self.version += 1;
        if changed {
            self.doubt();
        }
        let solves = turns || self.version >= self.next_solution;
        if solves {
            self.solve();
        }
        solves
    }

    /// Learns the known rewards of a query; true if errors say that rewards have changed.
    fn learn_prepared(&mut self, scratch: &Scratch, example: &Example) -> bool {
        let is_new = scratch.key.is_some_and(|key| self.head.get(key).is_none());
        let learn = |changed, (model, reward)| changed | self.learn_reward(scratch, model, reward, is_new);
        example.rewards().fold(false, learn)
    }

    /// Learns what a model earned; `is_new`: on a query that is not in the table. True if the errors say that rewards have
    /// changed.
    fn learn_reward(&mut self, scratch: &Scratch, model: usize, reward: f64, is_new: bool) -> bool {
        let Scratch { query, key: Some(key), y, phi, .. } = scratch else { return false };
        let shared = self.ridge.shared(phi);
        let own = self.ridge.own(model, phi);
        let remainder = self.remainders[model].look(&self.spec.ball, query);
        let repeated = self.head.get(*key).and_then(|head| head.mean(model)).map_or(0.0, |(weight, _)| weight);
        if is_new {
            let constant = self.constants[model];
            self.evidence.fade(KEEP_EVIDENCE);
            self.evidence.add(1.0, own - constant, reward - 0.5 - shared - constant);
            self.remainder_evidence.fade(KEEP);
            self.remainder_evidence.add(1.0, remainder, reward - (0.5 + shared + own).clamp(0.0, 1.0));
        }
        let predicted = 0.5 + shared + own + remainder;
        let error = reward - if self.spec.clip { predicted.clamp(0.0, 1.0) } else { predicted };
        self.errors.add(error);
        let changed = self.spec.drift && self.drift.see(error);
        let pace =
            Pace { ball: self.spec.ball, eta: self.spec.eta, overlap: self.overlap.mean(), half_life: self.half_life };
        // The remainder, too, counts queries rather than examples.
        let residual = Residual { query, error: error * head::novelty(repeated), version: self.version };
        self.remainders[model].learn(&pace, &residual, &mut self.coordinates);
        let (weight, moment) = self.head.add(*key, y, model, reward - 0.5);
        self.ridge.add(model, weight, moment, phi);
        changed
    }

    /// Turns the features to the directions known by now.
    fn turn(&mut self) {
        let (rotation, turn) = self.features.turn(self.directions.leading(self.dim, self.features.linear()));
        self.ridge.turn(&turn);
        self.head.turn(&rotation);
        self.scratch.query.clear();
        self.expected.queries.clear();
    }

    /// Rewards have changed.
    fn doubt(&mut self) {
        self.ridge.scale(DOUBT);
        self.head.scale(DOUBT);
        self.remainders.iter_mut().for_each(Remainder::doubt);
        self.held_out = Evidence::default();
        self.since = self.version;
        self.next_solution = self.version + SOLUTION_MIN;
    }

    /// Solves the regression, and finds out how far it carries over.
    pub fn solve(&mut self) {
        let version = self.version;
        let keep = shrink(self.half_life, version.saturating_sub(self.solved_at) as usize);
        if keep < 1.0 {
            self.ridge.scale(keep);
            self.head.scale(keep);
        }
        self.solved_at = version;
        let since = version.saturating_sub(self.since);
        let span = self.half_life.map_or(since, |half_life| since.min(half_life as u64));
        self.next_solution = version + (span / SOLUTION_SHARE).clamp(SOLUTION_MIN, SOLUTION_MAX);
        let Some(uncertainty) = self.ridge.solve(&self.features, self.spec.ridge) else { return };
        self.find_constants();
        self.find_trust(&uncertainty);
        self.find_fallback();
    }

    /// c: what the regression predicts of the table's queries on average; without a table, its intercept.
    fn find_constants(&mut self) {
        let mut sums = vec![0.0; self.models];
        let (mut y, mut phi) = (Vec::new(), Vec::new());
        for head in self.head.iter() {
            self.features_of(head, &mut y, &mut phi);
            sums.iter_mut().enumerate().for_each(|(m, sum)| *sum += self.ridge.own(m, &phi));
        }
        let queries = self.head.iter().count();
        let constant = |(m, sum): (usize, f64)| match queries {
            0 => self.ridge.weights(m)[0],
            _ => sum / queries as f64,
        };
        self.constants = sums.into_iter().enumerate().map(constant).collect();
    }

    /// f
    fn find_fallback(&mut self) {
        let Some(estimate) = self.head.constants().estimate() else { return };
        for (weight, z) in self.fallback.iter_mut().zip(estimate.behind(self.errors.deviation())) {
            let worse = 0.5 * libm::erfc(z * std::f64::consts::FRAC_1_SQRT_2);
            *weight = libm::log(worse / (1.0 - worse)).max(FALLBACK_MIN);
        }
    }

    /// The features of a head query, from the coordinates that are stored.
    fn features_of(&self, head: &HeadQuery, y: &mut Vec<f64>, phi: &mut Vec<f64>) {
        y.clear();
        y.extend(head.coordinates.iter().map(|y| f64::from(*y)));
        self.features.of_coordinates(y, phi);
    }

    /// a: the slope of what repeated queries earned, on what the others predict of them; and that of first visits.
    ///
    /// Leaving a query out of K_m changes its prediction from p to (p - w h x) / (1 - w h), with its weight w, its mean x and
    /// h = phi'K_m phi.
    fn find_trust(&mut self, uncertainty: &Uncertainty) {
        let (n, count) = (self.features.count(), self.head.iter().count());
        let stride = count.div_ceil(HELD_OUT).max(1);
        let sample: Vec<&HeadQuery> =
            self.head.iter().skip(self.version as usize / 32 % stride).step_by(stride).collect();
        let (mut phis, mut y, mut phi) = (Vec::with_capacity(n * sample.len()), Vec::new(), Vec::new());
        for head in &sample {
            self.features_of(head, &mut y, &mut phi);
            phis.extend_from_slice(&phi);
        }
        let variances: Vec<Vec<f64>> = (0..self.models).map(|m| uncertainty.variances(m, &phis, n)).collect();
        // Each query is counted once, however many solutions look at it.
        self.held_out.fade(1.0 - sample.len() as f64 / count.max(1) as f64);
        let mut held_out = self.held_out;
        for (i, (head, phi)) in sample.iter().zip(phis.chunks_exact(n)).enumerate() {
            let shared = self.ridge.shared(phi);
            let mut rows: [Row; 3] = Default::default();
            let [predicted, seen, precision] = rows.each_mut().map(|row| row.of(self.models));
            for m in 0..self.models {
                let Some((weight, mean)) = head.mean(m) else { continue };
                let (mean, leverage) = (mean - shared, (weight * variances[m][i]).min(LEVERAGE_MAX));
                predicted[m] = (self.ridge.own(m, phi) - leverage * mean) / (1.0 - leverage) - self.constants[m];
                seen[m] = mean - self.constants[m];
                precision[m] = head.precision(m);
            }
            // The level of the query says nothing of the models.
            let sum: f64 = (0..self.models).map(|m| precision[m] * (seen[m] - predicted[m])).sum();
            let level = sum / (head::LEVEL.recip() + precision.iter().sum::<f64>());
            (0..self.models).for_each(|m| held_out.add(precision[m], predicted[m], seen[m] - level));
        }
        self.held_out = held_out;
        let all = Evidence {
            product: self.held_out.product + self.evidence.product,
            square: self.held_out.square + self.evidence.square,
        };
        self.trust = all.share(REGRESSION_DEVIATIONS * self.errors.deviation());
    }

    /// a'
    fn remainder_trust(&self) -> f64 {
        self.remainder_evidence.share(REMAINDER_DEVIATIONS * self.errors.deviation())
    }

    /// Corrections of the logits of the head queries: what [`Critic::finish`] adds for them, less what it adds for others.
    /// The remainder is left out of their predictions: it knows no coordinates.
    pub fn head_table(&self) -> HeadTable {
        let steepness = self.steepness();
        let mut rows: Vec<(u64, Vec<f32>)> = Vec::new();
        let (mut predicted, mut effects) = (vec![0.0; self.models], vec![0.0; self.models]);
        for head in self.head.iter() {
            self.effects(head, &mut predicted, &mut effects);
            let own = head_steepness(head, steepness);
            let correction = |(m, effect): (usize, &f64)| (own * effect - self.fallback(m)) as f32;
            rows.push((head.key.0, effects.iter().enumerate().map(correction).collect()));
        }
        rows.sort_unstable_by_key(|(key, _)| *key);
        let (keys, corrections): (Vec<u64>, Vec<Vec<f32>>) = rows.into_iter().unzip();
        HeadTable::new(self.models, keys, corrections.concat()).unwrap_or_default()
    }

    /// s_m in parts.
    pub fn form(&self, model: usize) -> Form {
        let weights = self.ridge.weights(model);
        let n = self.features.linear();
        let mut quadratic = Vec::new();
        self.features.quadratic_form(weights, &mut quadratic);
        quadratic.iter_mut().for_each(|x| *x *= self.trust);
        let share = self.remainder_trust();
        let remainder = (share > 0.0).then(|| {
            let mut eigen = self.remainders[model].eigen(&self.spec.ball, self.dim);
            eigen.lambda.iter_mut().for_each(|lambda| *lambda *= share);
            eigen
        });
        Form {
            constant: self.trust * weights[0] + (1.0 - self.trust) * self.constants[model],
            linear: weights[1..=n].iter().map(|w| self.trust * w).collect(),
            quadratic,
            remainder: remainder.unwrap_or_default(),
        }
    }

    /// Hypentropy scale of the remainders.
    pub fn beta(&self) -> f64 {
        self.spec.ball.beta
    }

    /// V, one direction after the other.
    pub fn basis(&self) -> &[f64] {
        self.features.basis()
    }

    /// Starts a model from W = V diag(lambda) V' in units of the reward: as its remainder, which is trusted until evidence says
    /// otherwise.
    pub fn set(&mut self, model: usize, lambda: &[f64], vectors: &[f64]) -> bool {
        let eigen = Eigen::from_primal(&self.spec.ball, lambda, vectors, self.dim);
        self.remainder_evidence = Evidence { product: PRIOR, square: PRIOR };
        self.scratch.remainders.clear();
        self.remainders[model].set(eigen, self.dim)
    }

    /// Counts what a model earns more than the others as known from `weight` queries, of which nothing else is known.
    pub fn add_constant(&mut self, model: usize, weight: f64, constant: f64) {
        self.head.add_mean(model, weight, constant);
        let mut phi = vec![0.0; self.features.count()];
        phi[0] = 1.0;
        self.ridge.add(model, weight, weight * constant, &phi);
    }

    /// Adds the sums of another learner with a critic; false if they do not fit.
    pub fn add(&mut self, other: &AlgorithmRecord) -> bool {
        let AlgorithmRecord::Critic(record) = other else { return false };
        let restored = Self::restore(self.spec.clone(), self.dim, self.models, self.half_life, record.critic.clone());
        restored.is_some_and(|other| self.merge(&other))
    }

    /// Adds the sums of another critic, whose features are turned to the directions of this one.
    fn merge(&mut self, other: &Self) -> bool {
        let is_alike = |one: &Self| (one.features.count(), one.features.linear(), one.models);
        if is_alike(other) != is_alike(self) {
            return false;
        }
        let mut other = other.clone();
        let (rotation, turn) = other.features.turn(self.features.basis());
        other.ridge.turn(&turn);
        other.head.turn(&rotation);
        self.ridge.merge(&other.ridge);
        self.head.merge(&other.head);
        for (own, other) in
            [(&mut self.evidence, other.evidence), (&mut self.remainder_evidence, other.remainder_evidence)]
        {
            own.product += other.product;
            own.square += other.square;
        }
        self.errors.sum += other.errors.sum;
        self.errors.weight += other.errors.weight;
        for (own, other) in self.remainders.iter_mut().zip(&other.remainders) {
            own.merge(other, &self.spec.ball, self.dim);
        }
        self.version += other.version;
        self.scratch.query.clear();
        self.solve();
        true
    }

    /// Moves to another set of models; a new one starts at zero.
    pub fn remap(&mut self, places: &[Option<usize>]) {
        self.models = places.len();
        self.ridge.remap(places);
        self.head.remap(places);
        pick(&mut self.remainders, places, || Remainder::new(self.spec.mode, self.dim));
        pick(&mut self.fallback, places, || 0.0);
        pick(&mut self.constants, places, || 0.0);
        self.scratch.query.clear();
    }

    /// The record of its state.
    pub fn record(&self) -> CriticRecord {
        let (models, shared) = self.ridge.record();
        CriticRecord {
            linear_rank: self.features.linear() as u64,
            feature_rank: self.features.quadratic() as u64,
            basis: self.features.basis().to_vec(),
            directions: self.directions.record(),
            overlap: self.overlap.record(),
            models,
            shared,
            ball: self.spec.ball.record(),
            remainders: self.remainders.iter().map(Remainder::record).collect(),
            head_capacity: self.head.capacity() as u64,
            head: self.head.record(),
            evicted: self.head.evicted().record(),
            evidence: self.evidence.record(),
            held_out: self.held_out.record(),
            remainder_evidence: self.remainder_evidence.record(),
            trust: self.trust,
            constants: self.constants.clone(),
            fallback: self.fallback.clone(),
            errors: ErrorsRecord { sum: self.errors.sum, weight: self.errors.weight },
            drift: self.drift.record(),
            version: self.version,
            changed_at: self.since,
            next_solution: self.next_solution,
            solved_at: self.solved_at,
        }
    }

    /// Restores a record; none if it does not fit. The features keep the ranks that they were saved with; a remainder of
    /// another ball, rank or mode becomes one of this.
    pub fn restore(
        spec: CriticSpec,
        dim: usize,
        models: usize,
        half_life: Option<f64>,
        record: CriticRecord,
    ) -> Option<Self> {
        let rank = |saved: u64, most: usize| usize::try_from(saved).ok().filter(|rank| *rank <= most);
        let linear_rank = rank(record.linear_rank, dim.min(RANK_MAX))?;
        let feature_rank = rank(record.feature_rank, linear_rank)?;
        let fresh = Self::new(CriticSpec { linear_rank, feature_rank, ..spec }, dim, models, half_life);
        let n = fresh.features.count();
        let is_bounded = |x: &[f64], len: usize| x.len() == len && x.iter().all(|x| x.abs() <= 1e18);
        let is_sound = record.basis.iter().all(|x| x.abs() <= UNIT_MAX)
            && record.models.len() == models
            && record.remainders.len() == models
            && (0.0..=1.0).contains(&record.trust)
            && is_bounded(&record.constants, models)
            && record.fallback.len() == models
            && record.fallback.iter().all(|f| (FALLBACK_MIN..=0.0).contains(f))
            && record.version < u64::MAX / 2
            && record.next_solution < u64::MAX / 2;
        if !is_sound {
            return None;
        }
        let remainder = |one| Remainder::from_record(one, &record.ball, fresh.spec.mode, &fresh.spec.ball, dim);
        Some(Self {
            features: fresh.features.with_basis(record.basis)?,
            directions: Directions::from_record(record.directions, dim, record.linear_rank as usize)?,
            overlap: Overlap::from_record(record.overlap, dim)?,
            ridge: Ridge::from_record(record.models, record.shared, n)?,
            head: fresh.head.restore(record.head, record.head_capacity, record.evicted)?,
            remainders: record.remainders.into_iter().map(remainder).collect::<Option<_>>()?,
            evidence: Evidence::from_record(&record.evidence)?,
            held_out: Evidence::from_record(&record.held_out)?,
            remainder_evidence: Evidence::from_record(&record.remainder_evidence)?,
            errors: Errors::from_record(&record.errors)?,
            drift: Drift::from_record(&record.drift)?,
            trust: record.trust,
            constants: record.constants,
            fallback: record.fallback,
            version: record.version,
            since: record.changed_at,
            solved_at: record.solved_at,
            next_solution: record.next_solution,
            ..fresh
        })
    }
}

/// Squared predictions that a given start of the remainder is worth as evidence.
const PRIOR: f64 = 100.0;

/// The most that a query is taken to determine of its own prediction.
const LEVERAGE_MAX: f64 = 0.999;

/// Steepness of what is known of one query alone.
fn head_steepness(head: &HeadQuery, steepness: f64) -> f64 {
    (HEAD_STEEPNESS * head.visits().sqrt()).min(steepness)
}

impl Expected {
    /// Coordinates of the next query, if it is this one.
    fn next(&mut self, query: &[f64]) -> Option<&[f64]> {
        let (dim, at) = (query.len(), self.next);
        let is_expected = self.queries.get(at * dim..(at + 1) * dim).is_some_and(|expected| expected == query);
        if !is_expected {
            self.queries.clear();
            return None;
        }
        self.next += 1;
        let known = self.coordinates.len() / (self.queries.len() / dim);
        self.coordinates.get(at * known..(at + 1) * known)
    }
}

impl Evidence {
    fn fade(&mut self, keep: f64) {
        self.product *= keep;
        self.square *= keep;
    }

    fn add(&mut self, weight: f64, predicted: f64, came: f64) {
        self.product += weight * predicted * came;
        self.square += weight * predicted * predicted;
    }

    /// The share of predictions that is played: their slope, less its deviations, over the slope that is full trust.
    fn share(&self, deviations: f64) -> f64 {
        if self.square <= 0.0 {
            return 0.0;
        }
        ((self.product - deviations * self.square.sqrt()) / (SLOPE_FULL * self.square)).clamp(0.0, 1.0)
    }

    fn record(&self) -> TrustRecord {
        TrustRecord { product: self.product, square: self.square }
    }

    fn from_record(record: &TrustRecord) -> Option<Self> {
        let &TrustRecord { product, square } = record;
        (product.abs() <= 1e30 && (0.0..=1e30).contains(&square)).then_some(Self { product, square })
    }
}

impl Default for Errors {
    /// As of rewards that are 0 or 1, until there are some.
    fn default() -> Self {
        Self { sum: 20.0, weight: 100.0 }
    }
}

impl Errors {
    fn add(&mut self, error: f64) {
        self.sum = KEEP * self.sum + error * error;
        self.weight = KEEP * self.weight + 1.0;
    }

    fn deviation(&self) -> f64 {
        (self.sum / self.weight).sqrt()
    }

    fn from_record(record: &ErrorsRecord) -> Option<Self> {
        let &ErrorsRecord { sum, weight } = record;
        ((0.0..=1e30).contains(&sum) && weight > 0.0 && weight <= 1e30).then_some(Self { sum, weight })
    }
}

/// A number per model without allocating, for up to so many models.
struct Row {
    few: [f64; ROW],
    many: Vec<f64>,
}

const ROW: usize = 16;

impl Default for Row {
    fn default() -> Self {
        Self { few: [0.0; ROW], many: Vec::new() }
    }
}

impl Row {
    fn of(&mut self, models: usize) -> &mut [f64] {
        if models <= ROW {
            return &mut self.few[..models];
        }
        self.many.resize(models, 0.0);
        &mut self.many
    }
}
