//! The [`Learner`] trait that every algorithm implements, and the [`Trainer`] that owns one with the state that all
//! algorithms share.
//!
//! The trainer keeps the pending batch, the running mean of rewards, the counters and the random generator, so that an
//! algorithm is only its mathematics. [`Trainer::save`] returns the complete state.
//!
//! Some algorithms are faster if they know the next examples. The trainer then defers a few of them until there are enough
//! or the state is read. This affects only the speed, not the result.

use std::cell::{RefCell, RefMut};
use std::collections::BTreeMap;

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use thiserror::Error;

use crate::config::{Method, Spec};
use crate::eligible::Eligible;
use crate::evaluate::rollout::RolloutView;
use crate::evaluate::sample_ratio::SampleRatio;
use crate::evaluate::worth::{Floor, Outlook, Scratch, Worth, WorthView};
use crate::event::{BadExample, BadQuery, Example, ModelName, Query};
use crate::hpg::actor_critic::ActorCritic;
use crate::hpg::learner::Hpg;
use crate::hpg::parameter_free::ParameterFree;
use crate::hpg::regression::HypentropyRegression;
use crate::hpg::schedule::shrink;
use crate::hpg::spectra::Eigen;
use crate::objective::{Charge, Objective, ObjectiveView, Tolls, Utility, pay};
use crate::policy::constant::{Fixed, Uniform};
use crate::policy::exp3::Exp3;
use crate::policy::linear_bandit::LinearBandit;
use crate::policy::log_linear::LogLinear;
use crate::policy::log_quadratic::LogQuadratic;
use crate::policy::quadratic_sgd::QuadraticSgd;
use crate::router::{Distribution, HeadTable, Outcomes, Policy, Sampling, ScoreForm};
use crate::wire::envelope::Damaged;
use crate::wire::records::Record;
use crate::wire::records::learner::{AlgorithmRecord, GeneratorRecord, LearnerRecord, LessonRecord, RewardMeanRecord};

/// An algorithm: scores queries and learns from batches of examples.
pub trait Learner: Send {
    /// The score of each model for a query, under the current policy.
    fn scores(&self, query: &Query, scores: &mut [f64]);

    /// The same for a query that is learned from next, so that intermediate results can be reused.
    fn look(&mut self, query: &Query, scores: &mut [f64]) {
        self.scores(query, scores);
    }

    /// Useful number of examples to announce at once.
    fn foresight(&self) -> usize {
        1
    }

    /// Announces the next examples, in order. Affects only the speed.
    fn expect(&mut self, _examples: &[Example]) {}

    /// Fills in what the algorithm plays the largest of, where it plays by an index that the routing form cannot hold;
    /// false if it has none.
    fn index(&self, _query: &Query, _luck: &mut ChaCha8Rng, _scores: &mut [f64]) -> bool {
        false
    }

    /// Predicts the reward of each model for a query, from 0 to 1; false if the algorithm has no model of rewards. `scores` are
    /// those of the query, or empty where they were not computed; `mean` is the mean reward of the examples so far.
    fn predict(&self, _query: &Query, _scores: &[f64], _mean: f64, _rewards: &mut [f64]) -> bool {
        false
    }

    /// Learns from a batch; `version` examples were applied before it.
    fn apply(&mut self, batch: &[Lesson], version: u64);

    /// The current score functions, in the routing form.
    fn score_forms(&self) -> Vec<ScoreForm>;

    /// Corrections of the scores of frequent queries, which [`Learner::scores`] includes and [`Learner::score_forms`] does not.
    fn head_table(&self) -> HeadTable {
        HeadTable::default()
    }

    /// The current quadratic parameters, for those that have them.
    fn eigens(&self) -> Vec<Eigen> {
        Vec::new()
    }

    /// How scores become probabilities after `version` examples.
    fn play(&self, _version: u64) -> Play {
        Play::softmax(1.0)
    }

    /// Units of the score per unit of the reward, where scores are predicted rewards played so steeply: models then pay for their
    /// outcomes with their scores ([`crate::objective`]). `None` for algorithms that do not predict rewards.
    fn steepness(&self) -> Option<f64> {
        None
    }

    /// Starts a model from a given W = V diag(lambda) V'; false if the algorithm cannot.
    fn set(&mut self, _model: usize, _lambda: &[f64], _vectors: &[f64]) -> bool {
        false
    }

    /// Adds the state of another learner, if learning is a sum over examples; false if it is not.
    fn add(&mut self, _other: &AlgorithmRecord) -> bool {
        false
    }

    /// Moves to another set of models. `places` has an entry per new model: its old index, or none if it is new. A new model
    /// starts at zero.
    fn remap(&mut self, places: &[Option<usize>]);

    /// The record of the complete state.
    fn save(&self) -> AlgorithmRecord;
}

/// How scores are played.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Play {
    /// What they are multiplied with first.
    steepness: f64,
    sampling: Sampling,
}

impl Play {
    /// In proportion to the exponential of `steepness` times the score.
    pub fn softmax(steepness: f64) -> Self {
        Self { steepness, sampling: Sampling::Softmax }
    }

    /// In inverse proportion to the distance from the best score.
    pub fn inverse_gap(gap: f64) -> Self {
        Self { steepness: 1.0, sampling: Sampling::InverseGap { gap } }
    }

    /// Turns scores into their distribution over the eligible models, which pay these tolls.
    pub fn turn(self, scores: &mut [f64], tolls: &[f64], eligible: &Eligible) {
        scores.iter_mut().for_each(|score| *score *= self.steepness);
        pay(scores, tolls);
        self.sampling.turn_among(scores, eligible);
    }

    /// The same in the routing form: what scores are multiplied with is part of them there.
    fn exported(self, mut scores: Vec<ScoreForm>, mut head: HeadTable) -> (Sampling, Vec<ScoreForm>, HeadTable) {
        scores.iter_mut().for_each(|form| form.scale(self.steepness as f32));
        head.scale(self.steepness as f32);
        (self.sampling, scores, head)
    }
}

/// An example in the order of learning, with what was known before it.
#[derive(Debug, Clone, PartialEq)]
pub struct Lesson {
    /// The example.
    pub example: Example,
    /// Mean of the rewards before this one; 0.5 before the first.
    pub mean_before: f64,
    /// What each model paid for its outcomes, in units of the score; empty if none did.
    pub tolls: Vec<f64>,
}

/// A decision: which model, and with which probabilities it was drawn.
#[derive(Debug, Clone, PartialEq)]
pub struct Decision {
    /// Index of the model.
    pub model: usize,
    /// What it was drawn from.
    pub distribution: Distribution,
}

/// A decision to charge, as its event states it.
#[derive(Debug, Clone, Copy)]
pub struct ChargedDecision<'a> {
    /// Index of the model.
    pub model: usize,
    /// The distribution that it was drawn from, if the log states it.
    pub played: Option<&'a [f64]>,
    /// The policy before a floor was mixed in, where it differs.
    pub policy: Option<&'a [f64]>,
    /// Version of the parameters that decided; `None` if others decided.
    pub params_version: Option<u64>,
}

/// A learner with the state that all algorithms share.
pub struct Trainer {
    spec: Spec,
    student: RefCell<Student>,
}

/// The part of it that learns.
struct Student {
    learner: Box<dyn Learner>,
    book: Book,
    objective: Objective,
    worth: Worth,
    /// Deferred examples, with the tolls of the time when they came.
    ahead: Vec<Example>,
    ahead_tolls: Vec<Tolls>,
    /// The policy and the predicted rewards for the example that is evaluated, and scratch buffers of the evaluation.
    judged: Vec<f64>,
    predicted: Vec<f64>,
    scratch: Scratch,
}

/// Counters and means of the trainer.
#[derive(Debug, Clone)]
struct Book {
    generator: ChaCha8Rng,
    pending: Vec<Lesson>,
    rewards: DecayingMean,
    reward_sum: f64,
    /// Examples with a reward of the chosen model.
    rewarded: u64,
    learned: u64,
    version: u64,
}

/// Why a saved state cannot be restored.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum BadState {
    /// The bytes are damaged.
    #[error(transparent)]
    Damaged(#[from] Damaged),
    /// It belongs to another configuration.
    #[error(
        "the saved state has {key} = {saved}, but the configuration has {configured}: set it back, or start with an empty \
         store.dir"
    )]
    Mismatch {
        /// The key that differs.
        key: &'static str,
        /// Its saved value.
        saved: String,
        /// Its configured value.
        configured: String,
    },
    /// It was saved with other features, cannot become lazy, or holds impossible values.
    #[error(
        "the saved state does not fit the configured learner.features, learner.feature_rank or learner.mode (no other mode \
         can become lazy): set them back, or start with an empty store.dir"
    )]
    Shape,
}

impl Trainer {
    /// An untrained learner.
    pub fn new(spec: Spec) -> Self {
        let (dim, models, half_life) = (spec.dim, spec.models.len(), spec.half_life);
        let learner: Box<dyn Learner> = match &spec.method {
            Method::Hpg(hpg) => Box::new(Hpg::new(hpg.clone(), spec.dim, models, spec.half_life)),
            Method::HpgParameterFree(hpg) => {
                Box::new(ParameterFree::new(hpg.clone(), spec.dim, models, spec.half_life))
            }
            Method::ActorCritic(actor) => Box::new(ActorCritic::new(actor.clone(), dim, models, half_life)),
            Method::HypentropyRegression(critic) => {
                Box::new(HypentropyRegression::new(critic.clone(), dim, models, half_life))
            }
            Method::Uniform => Box::new(Uniform { models }),
            Method::Fixed(model) => Box::new(Fixed { models, model: *model }),
            Method::LinearBandit(bandit) => Box::new(LinearBandit::new(bandit.clone(), dim, models, half_life)),
            Method::QuadraticSgd(sgd) => Box::new(QuadraticSgd::new(sgd.clone(), dim, models, half_life)),
            Method::LogQuadratic(log) => Box::new(LogQuadratic::new(log.clone(), dim, models, half_life)),
            Method::LogLinear(log) => Box::new(LogLinear::new(log.clone(), dim, models, half_life)),
            Method::Exp3(rate) => Box::new(Exp3::new(*rate, models, half_life)),
        };
        let book = Book {
            generator: ChaCha8Rng::seed_from_u64(spec.seed),
            pending: Vec::new(),
            rewards: DecayingMean::default(),
            reward_sum: 0.0,
            rewarded: 0,
            learned: 0,
            version: 0,
        };
        let worth = Worth::new(&spec.worth, models);
        let objective = Objective::new(spec.objective.clone(), spec.models.clone());
        Self { spec, student: RefCell::new(Student::new(learner, book, objective, worth)) }
    }

    /// Restores a saved state. Hyper-parameters, the rank and models come from `spec` and may differ from those it was saved
    /// with. A lower rank keeps the eigenvalues of largest magnitude. Models are matched by name and new ones start at zero;
    /// a batch that was pending is applied to the old ones.
    pub fn restore(spec: Spec, bytes: &[u8]) -> Result<Self, BadState> {
        let record = LearnerRecord::open(bytes)?;
        let names: Vec<String> = spec.models.iter().map(ToString::to_string).collect();
        if record.models == names {
            return Self::from_record(spec, record);
        }
        let places: Vec<Option<usize>> =
            names.iter().map(|name| record.models.iter().position(|old| old == name)).collect();
        let models = record.models.iter().map(|name| ModelName::try_from(name.as_str())).collect::<Result<_, _>>();
        let before = Spec { models: models.map_err(|_| BadState::Shape)?, ..spec.clone() };
        let mut trainer = Self::from_record(before, record)?;
        trainer.flush();
        let student = trainer.student.get_mut();
        student.objective.remap(spec.models.clone(), &places);
        student.learner.remap(&places);
        // Estimates for other models do not apply.
        student.worth = Worth::new(&spec.worth, spec.models.len());
        trainer.spec = spec;
        Ok(trainer)
    }

    /// Restores a record that was saved with the same models.
    fn from_record(spec: Spec, record: LearnerRecord) -> Result<Self, BadState> {
        let mismatch = |key, saved: &dyn ToString, configured: &dyn ToString| {
            let (saved, configured) = (saved.to_string(), configured.to_string());
            if saved == configured { Ok(()) } else { Err(BadState::Mismatch { key, saved, configured }) }
        };
        mismatch("learner.algorithm", &record.algorithm, &spec.algorithm())?;
        mismatch("learner.dim", &record.dim, &spec.dim)?;
        if matches!((&spec.method, &record.state), (Method::Hpg(_), AlgorithmRecord::Critic(_))) {
            mismatch("learner.estimator", &"critic", &"a policy gradient without a critic")?;
        }
        let student = Student::from_record(&spec, record).ok_or(BadState::Shape)?;
        Ok(Self { spec, student: RefCell::new(student) })
    }

    /// The complete state, for a bit-for-bit resume: parameters, pending batch, means, counters, generator.
    pub fn save(&self) -> Vec<u8> {
        let Student { learner, book, objective, worth, .. } = &*self.caught_up();
        let record = LearnerRecord {
            algorithm: self.spec.algorithm().to_owned(),
            dim: self.spec.dim as u64,
            models: self.spec.models.iter().map(ToString::to_string).collect(),
            generator: generator_record(&book.generator),
            pending: book.pending.iter().map(Lesson::record).collect(),
            reward_mean: RewardMeanRecord { sum: book.rewards.sum, weight: book.rewards.weight },
            reward_sum: book.reward_sum,
            learned: book.learned,
            version: book.version,
            state: learner.save(),
            policy_value: worth.record(),
            rewarded: book.rewarded,
            objective: objective.record(),
        };
        record.seal()
    }

    /// The current distribution over models for a query.
    pub fn distribution(&self, query: &Query) -> Result<Distribution, BadQuery> {
        self.distribution_among(query, &Eligible::ALL)
    }

    /// The current distribution over the eligible models for a query.
    pub fn distribution_among(&self, query: &Query, eligible: &Eligible) -> Result<Distribution, BadQuery> {
        let Floor { share, distribution } = self.floor();
        Ok(Distribution::mix_among(self.core(query, eligible)?, share, &distribution, eligible.clone()))
    }

    fn core(&self, query: &Query, eligible: &Eligible) -> Result<Vec<f64>, BadQuery> {
        query.check_dim(self.spec.dim)?;
        let mut scores = vec![0.0; self.spec.models.len()];
        let student = self.caught_up();
        student.learner.scores(query, &mut scores);
        let tolls = student.in_scores(&student.objective.tolls());
        student.learner.play(student.book.version).turn(&mut scores, &tolls, eligible);
        Ok(scores)
    }

    /// What is mixed into the core: exploration, and what the stage of the rollout asks for.
    fn floor(&self) -> Floor {
        self.caught_up().worth.floor(&self.spec.worth, self.spec.exploration_floor)
    }

    /// The reward that the algorithm predicts of each model for a query; the mean reward if it has no model of rewards.
    pub fn predicted_rewards(&self, query: &Query) -> Result<Vec<f64>, BadQuery> {
        query.check_dim(self.spec.dim)?;
        let student = self.caught_up();
        let mean = student.book.rewards.mean();
        let (mut scores, mut rewards) = (vec![0.0; self.spec.models.len()], vec![mean; self.spec.models.len()]);
        student.learner.scores(query, &mut scores);
        if !student.learner.predict(query, &scores, mean, &mut rewards) {
            rewards.fill(mean);
        }
        Ok(rewards)
    }

    /// Routes a query under the current policy, with the trainer's own generator.
    pub fn decide(&mut self, query: &Query) -> Result<Decision, BadQuery> {
        let distribution = self.distribution(query)?;
        let model = distribution.draw(self.student.get_mut().book.generator.random());
        Ok(Decision { model, distribution })
    }

    /// Routes a query by the algorithm's own index, where it has one: what comparisons in one process play, and routers
    /// cannot. All but the floor's probability is on the chosen model.
    pub fn decide_exactly(&mut self, query: &Query) -> Result<Option<Decision>, BadQuery> {
        query.check_dim(self.spec.dim)?;
        let models = self.spec.models.len();
        let mut index = vec![0.0; models];
        {
            let Student { learner, book, .. } = &mut *self.caught_up();
            if !learner.index(query, &mut book.generator, &mut index) {
                return Ok(None);
            }
        }
        let best = (0..models).fold(0, |best, m| if index[m] > index[best] { m } else { best });
        let core = (0..models).map(|m| f64::from(u8::from(m == best))).collect();
        let Floor { share, distribution } = self.floor();
        let distribution = Distribution::mix(core, share, &distribution);
        let model = distribution.draw(self.student.get_mut().book.generator.random());
        Ok(Some(Decision { model, distribution }))
    }

    /// Learns from an example, once its batch is complete.
    pub fn learn(&mut self, example: Example) -> Result<(), BadExample> {
        example.check_shape(self.spec.dim, self.spec.models.len())?;
        let student = self.student.get_mut();
        student.ahead.push(example);
        student.ahead_tolls.push(student.objective.tolls());
        // The floor moves prices with every example.
        let has_floor = student.objective.has_floor();
        if has_floor || self.spec.batch > 1 || student.ahead.len() >= student.learner.foresight() {
            student.catch_up(&self.spec);
        }
        Ok(())
    }

    /// Charges a decision when its event is read; returns what it was charged, to be settled when its outcomes arrive.
    pub fn charge(&mut self, decision: ChargedDecision, known: &BTreeMap<String, f64>) -> Vec<(String, f64)> {
        if self.student.get_mut().objective.is_empty() {
            return Vec::new();
        }
        let examples = self.version();
        let charge = Charge {
            model: decision.model,
            played: decision.played,
            policy: decision.policy.or(decision.played),
            age: decision.params_version.map(|version| examples.saturating_sub(version)),
            examples,
            is_partial: self.is_partial(),
        };
        self.student.get_mut().objective.charge(charge, known)
    }

    /// Corrects a charge by the outcomes that arrived.
    pub fn settle(&mut self, model: usize, charged: &[(String, f64)], outcomes: &BTreeMap<String, f64>) {
        let is_partial = self.is_partial();
        self.student.get_mut().objective.settle(model, charged, outcomes, is_partial);
    }

    /// Whether something else than the policy and its exploration gets most of the traffic.
    fn is_partial(&self) -> bool {
        // Deferred examples must not make a difference.
        self.spec.worth.rollout.has_control() && self.caught_up().worth.floor(&self.spec.worth, 0.0).share > 0.5
    }

    /// What was charged, and what it does to the scores; `None` if only the reward counts.
    pub fn objective(&self) -> Option<ObjectiveView> {
        let student = self.caught_up();
        student.objective.view(student.learner.steepness().unwrap_or(1.0))
    }

    /// Number of decisions that were charged.
    pub fn charges(&self) -> u64 {
        self.student.borrow().objective.charges()
    }

    /// The learning part, with no deferred examples.
    fn caught_up(&self) -> RefMut<'_, Student> {
        let mut student = self.student.borrow_mut();
        student.catch_up(&self.spec);
        student
    }

    /// Adds another shard of the same space; false if their learners are not sums of examples.
    pub fn add(&mut self, other: &Self) -> bool {
        let (mut student, other_student) = (self.caught_up(), other.caught_up());
        let added = self.spec == other.spec && student.learner.add(&other_student.learner.save());
        if added {
            let (book, others) = (&mut student.book, &other_student.book);
            book.rewards.sum += others.rewards.sum;
            book.rewards.weight += others.rewards.weight;
            book.reward_sum += others.reward_sum;
            book.rewarded += others.rewarded;
            book.learned += others.learned;
            book.version += others.version;
            student.worth.add(&other_student.worth);
        }
        added
    }

    /// Applies the pending batch, complete or not.
    pub fn flush(&mut self) {
        self.caught_up().flush();
    }

    /// Starts a model from a given W = V diag(lambda) V'; false if the algorithm cannot.
    pub fn set(&mut self, model: usize, lambda: &[f64], vectors: &[f64]) -> bool {
        self.caught_up().learner.set(model, lambda, vectors)
    }

    /// The current policy in the routing form.
    pub fn policy(&self) -> Policy {
        let Floor { share, distribution } = self.floor();
        let Student { learner, book, objective, .. } = &*self.caught_up();
        let (sampling, scores, head) = learner.play(book.version).exported(learner.score_forms(), learner.head_table());
        let outcomes = learner.steepness().map_or_else(Outcomes::default, |steepness| objective.outcomes(steepness));
        Policy { sampling, floor: share, floor_distribution: distribution, scores, head, outcomes }
    }

    /// The current quadratic parameters of each model; empty where the algorithm has none.
    pub fn eigens(&self) -> Vec<Eigen> {
        self.caught_up().learner.eigens()
    }

    /// Estimates of the policy value; `None` without evaluated examples.
    pub fn worth(&self) -> Option<WorthView> {
        self.caught_up().worth.view(&self.spec.worth, self.spec.algorithm(), &self.spec.models)
    }

    /// The stage of its rollout, and the share of the traffic that follows the policy.
    pub fn rollout(&self) -> RolloutView {
        self.caught_up().worth.rollout(&self.spec.worth, &self.spec.models)
    }

    /// The sample-ratio test of its examples.
    pub fn sample_ratio(&self) -> SampleRatio {
        self.caught_up().worth.sample_ratio().clone()
    }

    /// Its configuration.
    pub fn spec(&self) -> &Spec {
        &self.spec
    }

    /// Examples in applied batches.
    pub fn version(&self) -> u64 {
        let Student { book, ahead, .. } = &*self.student.borrow();
        // Only single examples are deferred.
        book.version + ahead.len() as u64
    }

    /// Examples learned from, those of a pending batch included.
    pub fn learned(&self) -> u64 {
        let Student { book, ahead, .. } = &*self.student.borrow();
        book.learned + ahead.len() as u64
    }

    /// Sum of the rewards of chosen models, and the number of examples that have one.
    pub fn rewards(&self) -> (f64, u64) {
        let Student { book, ahead, .. } = &*self.student.borrow();
        let known = ahead.iter().filter_map(Example::reward);
        known.fold((book.reward_sum, book.rewarded), |(sum, number), reward| (sum + reward, number + 1))
    }

    /// Mean of these rewards.
    pub fn mean_reward(&self) -> f64 {
        match self.rewards() {
            (_, 0) => 0.0,
            (sum, number) => sum / number as f64,
        }
    }
}

impl Student {
    fn new(learner: Box<dyn Learner>, book: Book, objective: Objective, worth: Worth) -> Self {
        Self {
            learner,
            book,
            objective,
            worth,
            ahead: Vec::new(),
            ahead_tolls: Vec::new(),
            judged: Vec::new(),
            predicted: Vec::new(),
            scratch: Scratch::default(),
        }
    }

    fn from_record(spec: &Spec, record: LearnerRecord) -> Option<Self> {
        let lesson = |record: LessonRecord| {
            let lesson = Lesson::from_record(record)?;
            lesson.example.check_shape(spec.dim, spec.models.len()).ok()?;
            Some(lesson)
        };
        let book = Book {
            generator: generator(&record.generator),
            pending: record.pending.into_iter().map(lesson).collect::<Option<_>>()?,
            rewards: DecayingMean { sum: record.reward_mean.sum, weight: record.reward_mean.weight },
            reward_sum: record.reward_sum,
            rewarded: record.rewarded,
            learned: record.learned,
            version: record.version,
        };
        let learner = restore_learner(spec, record.state, record.version)?;
        let worth = Worth::restore(&spec.worth, spec.models.len(), record.policy_value)?;
        let objective = Objective::restore(spec.objective.clone(), spec.models.clone(), record.objective)?;
        book.is_sound().then(|| Self::new(learner, book, objective, worth))
    }

    /// Applies deferred examples.
    fn catch_up(&mut self, spec: &Spec) {
        let (mut ahead, mut tolls) = (std::mem::take(&mut self.ahead), std::mem::take(&mut self.ahead_tolls));
        if ahead.len() > 1 {
            self.learner.expect(&ahead);
        }
        ahead.drain(..).zip(tolls.drain(..)).for_each(|(example, tolls)| self.learn(spec, example, &tolls));
        (self.ahead, self.ahead_tolls) = (ahead, tolls);
    }

    /// What each model pays in units of the present scores; nothing to an algorithm that does not predict rewards.
    fn in_scores(&self, tolls: &Tolls) -> Vec<f64> {
        match self.learner.steepness().filter(|_| !tolls.is_empty()) {
            Some(steepness) => tolls.in_scores(steepness),
            None => Vec::new(),
        }
    }

    fn learn(&mut self, spec: &Spec, example: Example, tolls: &Tolls) {
        let tolls = self.in_scores(tolls);
        self.judge(spec, &example, &tolls);
        let mean_before = self.book.rewards.mean();
        let reward = example.reward();
        let example = if example.preference().is_some() { self.with_rewards(example, mean_before) } else { example };
        let book = &mut self.book;
        let lesson = Lesson { mean_before, example, tolls };
        if let Some(reward) = reward {
            book.rewards.add(reward, shrink(spec.half_life, 1));
            book.reward_sum += reward;
            book.rewarded += 1;
        }
        book.learned += 1;
        book.pending.push(lesson);
        if book.pending.len() >= spec.batch {
            self.flush();
        }
    }

    /// The same example with rewards in place of a preference, as far as the algorithm predicts them.
    fn with_rewards(&mut self, example: Example, mean: f64) -> Example {
        let mut predicted = vec![mean; example.propensities().len()];
        if !self.learner.predict(example.query(), &[], mean, &mut predicted) {
            predicted.fill(mean);
        }
        example.with_preference_as_rewards(&predicted)
    }

    /// Evaluates the policy on an example before learning from it.
    fn judge(&mut self, spec: &Spec, example: &Example, tolls: &[f64]) {
        let Self { learner, book, objective, worth, judged, predicted, scratch, .. } = self;
        let models = spec.models.len();
        if !objective.is_empty() {
            let mut rewards = vec![0.0; models];
            if learner.predict(example.query(), &[], book.rewards.mean(), &mut rewards) {
                objective.note_quality(&rewards, example.propensities());
            }
        }
        // Where models pay for outcomes, it is their utility that counts, scaled to 0..1.
        let utility = Utility::new(tolls, learner.steepness().unwrap_or(1.0));
        let valued = (!tolls.is_empty()).then(|| example.clone().valued(|model, reward| utility.of(model, reward)));
        let example = valued.as_ref().unwrap_or(example);
        if !worth.is_next_judged(&spec.worth) {
            return worth.see(&spec.worth, example, None, scratch);
        }
        judged.resize(models, 0.0);
        predicted.resize(models, 0.0);
        let (query, mean) = (example.query(), book.rewards.mean());
        let has_predicted = if spec.plays_by_sums() {
            // Its current policy would need a projection for every example; the published one is evaluated instead.
            judged.copy_from_slice(example.policy());
            learner.predict(query, &[], mean, predicted)
        } else {
            match spec.batch {
                1 => learner.look(query, judged),
                _ => learner.scores(query, judged),
            }
            let has_predicted = learner.predict(query, judged, mean, predicted);
            learner.play(book.version).turn(judged, tolls, example.eligible());
            has_predicted
        };
        predicted.iter_mut().enumerate().for_each(|(model, reward)| *reward = utility.of(model, *reward));
        let exploration = spec.exploration_floor;
        let eligible = (0..models).filter(|m| example.eligible().allows(*m)).count() as f64;
        let explored = |m: usize| if example.eligible().allows(m) { exploration / eligible } else { 0.0 };
        judged.iter_mut().enumerate().for_each(|(m, p)| *p = (1.0 - exploration) * *p + explored(m));
        let outlook = Outlook { policy: judged, predicted: has_predicted.then_some(predicted), exploration };
        worth.see(&spec.worth, example, Some(outlook), scratch);
    }

    /// Applies the pending batch, complete or not.
    fn flush(&mut self) {
        if !self.book.pending.is_empty() {
            self.learner.apply(&self.book.pending, self.book.version);
            self.book.version += self.book.pending.len() as u64;
            self.book.pending.clear();
        }
    }
}

fn restore_learner(spec: &Spec, record: AlgorithmRecord, version: u64) -> Option<Box<dyn Learner>> {
    let (dim, models, half_life) = (spec.dim, spec.models.len(), spec.half_life);
    match (&spec.method, record) {
        (Method::Hpg(hpg), AlgorithmRecord::Hpg(record)) => {
            Some(Box::new(Hpg::restore(hpg.clone(), spec.dim, models, spec.half_life, record)?))
        }
        (Method::HpgParameterFree(hpg), AlgorithmRecord::ParameterFree(record)) => {
            Some(Box::new(ParameterFree::restore(hpg.clone(), spec.dim, models, spec.half_life, record)?))
        }
        (Method::ActorCritic(actor), AlgorithmRecord::Critic(record)) => {
            Some(Box::new(ActorCritic::restore(actor.clone(), dim, models, half_life, *record)?))
        }
        (Method::ActorCritic(actor), AlgorithmRecord::Hpg(record)) => {
            Some(Box::new(ActorCritic::from_policy(actor.clone(), dim, models, half_life, (record, version))?))
        }
        (Method::HypentropyRegression(critic), AlgorithmRecord::Critic(record)) => {
            Some(Box::new(HypentropyRegression::restore(critic.clone(), dim, models, half_life, record.critic)?))
        }
        (Method::HypentropyRegression(critic), AlgorithmRecord::Regression(record)) => {
            Some(Box::new(HypentropyRegression::from_old(critic.clone(), dim, models, half_life, (record, version))?))
        }
        (Method::Uniform, AlgorithmRecord::Stateless) => Some(Box::new(Uniform { models })),
        (Method::Fixed(model), AlgorithmRecord::Stateless) => Some(Box::new(Fixed { models, model: *model })),
        (Method::LinearBandit(bandit), AlgorithmRecord::LinearBandit(record)) => {
            Some(Box::new(LinearBandit::restore(bandit.clone(), dim, models, half_life, record)?))
        }
        (Method::QuadraticSgd(sgd), AlgorithmRecord::QuadraticSgd(record)) => {
            Some(Box::new(QuadraticSgd::restore(sgd.clone(), dim, models, half_life, record)?))
        }
        (Method::LogQuadratic(log), AlgorithmRecord::LogQuadratic(record)) => {
            Some(Box::new(LogQuadratic::restore(log.clone(), dim, models, half_life, record)?))
        }
        (Method::LogLinear(log), AlgorithmRecord::LogLinear(record)) => {
            Some(Box::new(LogLinear::restore(log.clone(), dim, models, half_life, record)?))
        }
        (Method::Exp3(rate), AlgorithmRecord::Exp3(record)) => {
            Some(Box::new(Exp3::restore(*rate, models, half_life, record)?))
        }
        _ => None,
    }
}

/// The state of a generator.
fn generator_record(generator: &ChaCha8Rng) -> GeneratorRecord {
    GeneratorRecord {
        seed: generator.get_seed(),
        stream: generator.get_stream(),
        word_position: generator.get_word_pos(),
    }
}

fn generator(record: &GeneratorRecord) -> ChaCha8Rng {
    let mut generator = ChaCha8Rng::from_seed(record.seed);
    generator.set_stream(record.stream);
    generator.set_word_pos(record.word_position);
    generator
}

impl Lesson {
    /// A lesson for which no model pays.
    pub fn new(example: Example, mean_before: f64) -> Self {
        Self { example, mean_before, tolls: Vec::new() }
    }

    fn record(&self) -> LessonRecord {
        LessonRecord { example: self.example.record(), mean_before: self.mean_before, tolls: self.tolls.clone() }
    }

    fn from_record(record: LessonRecord) -> Option<Self> {
        let LessonRecord { example, mean_before, tolls } = record;
        let example = Example::from_record(example)?;
        let is_sound = (0.0..=1.0).contains(&mean_before)
            && (tolls.is_empty() || tolls.len() == example.propensities().len())
            && tolls.iter().all(|toll| toll.is_finite());
        is_sound.then_some(Self { example, mean_before, tolls })
    }
}

impl Book {
    fn is_sound(&self) -> bool {
        self.rewards.is_sound()
            && self.rewarded <= self.learned
            && (0.0..=self.rewarded as f64).contains(&self.reward_sum)
            && self.version.checked_add(self.pending.len() as u64) == Some(self.learned)
            && self.learned < u64::MAX / 2
    }
}

/// Exponentially weighted mean of rewards.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct DecayingMean {
    sum: f64,
    weight: f64,
}

impl DecayingMean {
    fn mean(&self) -> f64 {
        if self.weight > 0.0 { self.sum / self.weight } else { 0.5 }
    }

    fn add(&mut self, reward: f64, shrink: f64) {
        self.sum = self.sum * shrink + reward;
        self.weight = self.weight * shrink + 1.0;
    }

    fn is_sound(&self) -> bool {
        // Rewards are in 0..1, and rounding keeps order: a sum cannot exceed its weight.
        self.weight.is_finite() && (0.0..=self.weight).contains(&self.sum)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::envelope::encode;

    /// What scores are multiplied with applies to the corrections of frequent queries too.
    #[test]
    fn exported_corrections_are_scaled_like_scores() {
        let form = ScoreForm { bias: 2.0, ..ScoreForm::default() };
        let head = HeadTable::new(1, vec![9], vec![0.5]).unwrap();
        let (sampling, scores, head) = Play::softmax(3.0).exported(vec![form], head);
        assert_eq!((sampling, scores[0].bias), (Sampling::Softmax, 6.0));
        assert_eq!((head.keys(), head.corrections()), (&[9][..], &[1.5][..]));
    }

    /// Older versions were written with the generator's own serialization.
    #[test]
    fn a_generator_has_the_bytes_of_its_own_serialization() {
        let mut random = ChaCha8Rng::seed_from_u64(7);
        for draws in [0, 1, 15, 16, 63, 64, 1000] {
            for _ in 0..draws {
                random.random::<u32>();
            }
            let record = generator_record(&random);
            assert_eq!(encode(&record), encode(&random), "{draws}");
            assert_eq!(generator(&record), random, "{draws}");
        }
    }
}
