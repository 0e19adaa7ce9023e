//! What several policies would have earned on the same events, which another policy chose.
//!
//! ```text
//! p: distribution that the model m was drawn from      pi: an evaluated policy      w = pi_m / p_m      r: the reward, 0..1
//! f_j: reward of model j predicted before r is known
//!
//! inverse propensities   mean of w r
//! self-normalised        sum w r / sum w
//! doubly robust          mean of  sum_j pi_j f_j + w (r - f_m)
//! value                  bound of x with a = pi
//! lift over model b      bound of x with a_j = pi_j - [j = b]
//! x = c + y              c = sum_j a_j g_j      y = a_m / p_m (r - g_m)
//!                        g_j = min(f_j, B p_j / a_j) if a_j > 0,  max(f_j, 1 - B p_j / |a_j|) if a_j < 0
//! ```
//!
//! bound: [`confidence`](super::confidence), which requires y >= -B. The mean of x over m and r, given the query and the past, is
//! sum_j a_j r_j for any predictions g that are known before r, with r_j the expected reward of model j. So the predictions may
//! be moved to where y cannot fall below -B: if a_m > 0, y >= -a_m g_m / p_m >= -B, and if a_m < 0,
//! y >= -|a_m| (1 - g_m) / p_m >= -B. No weight is truncated and no bias arises. Only where a weight exceeds about B is the
//! prediction moved, and the variance there is at most that of no prediction. A model with p_j = 0 gets the least favourable
//! reward, which keeps the bound valid. The upper bound is minus the lower bound with -a in place of a.
//!
//! A lift is one paired difference per event: where the policy plays b as well, a is 0 and adds no variance, and good predictions
//! leave only the noise of the reward. The bound is on the mean lift over the queries that came.
//!
//! A model alone is evaluated on the events that it could have answered, and compared with policies on these. Policies are
//! conditioned on the models that could be drawn.
//!
//! The latest events are a window of `BLOCKS` blocks. The k-th window starts with the k-th block and has the error
//! probability alpha / (k (k + 1)). These add up to alpha, so that all windows are valid simultaneously.

use std::collections::VecDeque;
use std::ops::AddAssign;

use serde::Serialize;

use super::confidence::{COUNT_MAX, ConfidenceSequence, RANGE};
use super::off_policy::OffPolicy;
use crate::eligible::Eligible;
use crate::wire::records::learner::value::{BoundRecord, EstimateRecord, EvaluationRecord};

/// A logged event with the rewards predicted for it.
#[derive(Debug, Clone, Copy)]
pub struct Logged<'a> {
    /// The distribution that the model was drawn from.
    pub propensities: &'a [f64],
    /// The model that was drawn.
    pub model: usize,
    /// Its reward, 0 to 1.
    pub reward: f64,
    /// Reward of each model, predicted before the event's reward was known, 0 to 1.
    pub predicted: &'a [f64],
    /// The models that could be drawn.
    pub eligible: &'a Eligible,
}

/// What one policy would have earned: sums over events, so that those of two stretches can be added.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Estimate {
    weights: OffPolicy,
    robust: f64,
    robust_square: f64,
    /// Of the value and of minus the value.
    value: [ConfidenceSequence; 2],
    /// Per model, of the lift over always playing it and of minus the lift.
    lifts: Vec<[ConfidenceSequence; 2]>,
}

/// A confidence range, valid at all times simultaneously with probability 1 - `alpha`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Range {
    /// Lower bound.
    pub low: f64,
    /// Upper bound.
    pub high: f64,
}

/// Bounds that no value satisfies. If the propensities of the log are right, the probability that any bounds of level `alpha`
/// ever cross is at most `alpha`: so the log contradicts its propensities.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Crossing {
    /// Lower bound.
    pub low: f64,
    /// Upper bound.
    pub high: f64,
}

impl Range {
    /// The part between `least` and `most`, where the truth is known to be. Bounds that leave nothing of it cross.
    fn between(low: f64, high: f64, [least, most]: [f64; 2]) -> Result<Self, Crossing> {
        let (low, high) = (low.max(least), high.min(most));
        if low <= high { Ok(Self { low, high }) } else { Err(Crossing { low, high }) }
    }

    /// The value in the range that is closest to an estimate.
    pub fn nearest(&self, estimate: f64) -> f64 {
        estimate.max(self.low).min(self.high)
    }
}

/// Predicted value of a policy: sum_j pi_j f_j, and the same with the predictions moved for the lower and the upper bound.
#[derive(Debug, Clone, Copy, Default)]
struct Expected {
    plain: f64,
    low: f64,
    high: f64,
}

impl Expected {
    /// Adds a model that the policy plays with probability `pi`.
    fn add(&mut self, event: &Logged, model: usize, pi: f64) {
        self.plain += pi * event.predicted[model];
        self.low += pi * event.low(model, pi);
        self.high += pi * event.high(model, pi);
    }
}

impl Logged<'_> {
    /// g for a > 0: the largest prediction that keeps -a g / p >= -B.
    fn low(&self, model: usize, a: f64) -> f64 {
        let f = self.predicted[model];
        if a > 0.0 { f.min(RANGE * self.propensities[model] / a) } else { f }
    }

    /// g for -a < 0: the smallest prediction that keeps -a (1 - g) / p >= -B.
    fn high(&self, model: usize, a: f64) -> f64 {
        let f = self.predicted[model];
        if a > 0.0 { f.max(1.0 - RANGE * self.propensities[model] / a) } else { f }
    }

    /// a / p times how far the reward is above `predicted` (or below it, if `sign` is -1). What is cut off above
    /// [`ERROR_MAX`] only lowers the bound.
    fn error(&self, a: f64, predicted: f64, sign: f64) -> f64 {
        let weight = (a / self.propensities[self.model]).min(f64::MAX);
        (sign * weight * (self.reward - predicted)).clamp(-RANGE, ERROR_MAX)
    }
}

impl Estimate {
    fn new(compared: usize) -> Self {
        Self { lifts: vec![Default::default(); compared], ..Self::default() }
    }

    /// Adds an event to these sums and to those of the newest block. The policy plays the drawn model with probability
    /// `played`; `policy` is its distribution, or empty if it is not compared with the models.
    fn add(&mut self, newest: &mut Self, event: &Logged, played: f64, expected: Expected, policy: &[f64]) {
        let &Logged { propensities, model, reward, predicted, eligible } = event;
        let weight = (played / propensities[model]).min(WEIGHT_MAX);
        let robust = expected.plain + weight * (reward - predicted[model]);
        for one in [&mut *self, &mut *newest] {
            one.weights.add(weight, reward);
            one.robust += robust;
            one.robust_square += robust * robust;
        }
        let errors =
            [event.error(played, event.low(model, played), 1.0), event.error(played, event.high(model, played), -1.0)];
        add_pair(&mut self.value, &mut newest.value, [expected.low, -expected.high], errors);
        let lifts = self.lifts.iter_mut().zip(&mut newest.lifts).enumerate();
        for (b, (all, block)) in lifts.filter(|(b, _)| eligible.allows(*b)) {
            let (pi, rest) = (policy[b], 1.0 - policy[b]);
            let (low, high) = (event.low(b, rest), event.high(b, rest));
            let above = expected.low - pi * event.low(b, pi) - rest * high;
            let below = expected.high - pi * event.high(b, pi) - rest * low;
            let errors = if b == model { [event.error(rest, high, -1.0), event.error(rest, low, 1.0)] } else { errors };
            add_pair(all, block, [above, -below], errors);
        }
    }

    /// The mean reward by inverse propensities.
    pub fn inverse_propensity(&self) -> f64 {
        self.weights.weighted_reward() / self.count().max(1) as f64
    }

    /// The mean reward by the self-normalised estimator.
    pub fn self_normalised(&self) -> f64 {
        self.weights.value()
    }

    /// Its standard deviation, for a single look.
    pub fn deviation(&self) -> f64 {
        self.weights.deviation()
    }

    /// The mean reward by predictions, corrected by their errors.
    pub fn doubly_robust(&self) -> f64 {
        self.robust / self.count().max(1) as f64
    }

    /// Its standard deviation, for a single look.
    pub fn doubly_robust_deviation(&self) -> f64 {
        let n = self.count().max(1) as f64;
        let mean = self.robust / n;
        ((self.robust_square / n - mean * mean).max(0.0) / n).sqrt()
    }

    /// How many events drawn from the policy itself would say as much.
    pub fn effective(&self) -> f64 {
        self.weights.effective()
    }

    /// Number of events.
    fn count(&self) -> u64 {
        self.value[0].count()
    }

    /// Whether it is compared with the models, as all policies are that do not always play one of them.
    pub fn is_compared(&self) -> bool {
        !self.lifts.is_empty()
    }

    /// Confidence range of the mean reward.
    pub fn range(&self, alpha: f64) -> Result<Range, Crossing> {
        let [low, high] = self.value.each_ref().map(|one| one.lower(alpha / 2.0));
        Range::between(low, -high, [0.0, 1.0])
    }

    /// Confidence range of the lift over the best constant model. Models that were hardly ever played make it wide: any
    /// of them might be the best one.
    pub fn lift_range(&self, alpha: f64) -> Result<Range, Crossing> {
        // The lift over the best one is the least of all lifts.
        (0..self.lifts.len()).try_fold(Range { low: 1.0, high: 1.0 }, |least, b| {
            let one = self.lift_over(b, alpha)?;
            Ok(Range { low: least.low.min(one.low), high: least.high.min(one.high) })
        })
    }

    /// Confidence range of the lift over always playing one model, valid for all models simultaneously.
    pub fn lift_over(&self, model: usize, alpha: f64) -> Result<Range, Crossing> {
        let [low, high] = self.lifts[model].each_ref().map(|one| one.lower(alpha / (2 * self.lifts.len()) as f64));
        Range::between(low, -high, [-1.0, 1.0])
    }

    /// Estimate of the lift over always playing one model: the mean of doubly robust paired differences.
    pub fn lift_estimate(&self, model: usize) -> f64 {
        // Both are unbiased. They differ only where predictions were moved.
        let [above, below] = &self.lifts[model];
        0.5 * (above.mean() - below.mean())
    }

    fn record(&self) -> EstimateRecord {
        let pair = |[one, other]: &[ConfidenceSequence; 2]| [one.record(), other.record()];
        EstimateRecord {
            weights: self.weights.record(),
            robust: self.robust,
            robust_square: self.robust_square,
            value: pair(&self.value),
            lifts: self.lifts.iter().map(pair).collect(),
        }
    }

    /// Restores a record that is compared with so many models; none if it does not fit.
    fn from_record(record: &EstimateRecord, compared: usize) -> Option<Self> {
        let pair = |[one, other]: &[BoundRecord; 2]| {
            Some([ConfidenceSequence::from_record(one)?, ConfidenceSequence::from_record(other)?])
        };
        let estimate = Self {
            weights: OffPolicy::from_record(&record.weights)?,
            robust: record.robust,
            robust_square: record.robust_square,
            value: pair(&record.value)?,
            lifts: record.lifts.iter().map(pair).collect::<Option<_>>()?,
        };
        let is_sound =
            estimate.lifts.len() == compared && estimate.robust.is_finite() && estimate.robust_square.is_finite();
        is_sound.then_some(estimate)
    }
}

/// Limit on weights in estimates without a bound, so that no event makes sums infinite.
const WEIGHT_MAX: f64 = 1e6;

/// Limit on y from above, so that no event makes sums infinite.
const ERROR_MAX: f64 = 1e6;

fn add_pair(
    all: &mut [ConfidenceSequence; 2],
    newest: &mut [ConfidenceSequence; 2],
    predicted: [f64; 2],
    errors: [f64; 2],
) {
    for (pair, (predicted, error)) in all.iter_mut().zip(newest).zip(predicted.into_iter().zip(errors)) {
        pair.0.add(predicted, error);
        pair.1.add(predicted, error);
    }
}

impl AddAssign<&Self> for Estimate {
    fn add_assign(&mut self, other: &Self) {
        self.weights += other.weights;
        self.robust += other.robust;
        self.robust_square += other.robust_square;
        let pairs = self.lifts.iter_mut().zip(&other.lifts).chain([(&mut self.value, &other.value)]);
        for (pair, other) in pairs {
            pair.iter_mut().zip(other).for_each(|(one, other)| *one += *other);
        }
    }
}

/// Evaluates policies, and every model alone, event by event: over all events, and over the latest ones.
///
/// Policies may learn from an event after they were evaluated on it. The estimate is then of the mean of their values.
#[derive(Debug, Clone, PartialEq)]
pub struct Judge {
    models: usize,
    events: u64,
    /// Of each policy, then of each model alone.
    all: Vec<Estimate>,
    /// Events of a block.
    block: u64,
    /// The latest blocks, the newest last.
    blocks: VecDeque<Vec<Estimate>>,
    /// Blocks that are no longer among them.
    dropped: u64,
}

/// Blocks of a window.
const BLOCKS: u64 = 10;

impl Judge {
    /// No events yet. `window` is the largest number of latest events that are also evaluated separately.
    pub fn new(models: usize, policies: usize, window: u64) -> Self {
        let all = fresh(models, policies);
        let block = window.div_ceil(BLOCKS).max(1);
        Self { models, events: 0, all, block, blocks: VecDeque::new(), dropped: 0 }
    }

    /// Adds an event. `played` holds the distribution of each policy, from before the reward was known.
    pub fn see(&mut self, event: &Logged, played: &[&[f64]]) {
        if self.events.is_multiple_of(self.block) {
            if self.blocks.len() as u64 == BLOCKS {
                self.blocks.pop_front();
                self.dropped += 1;
            }
            self.blocks.push_back(fresh(self.models, self.all.len() - self.models));
        }
        self.events += 1;
        let Some(newest) = self.blocks.back_mut() else { return };
        let (policies, alone) = self.all.split_at_mut(played.len());
        let (newest_policies, newest_alone) = newest.split_at_mut(played.len());
        for ((all, newest), policy) in policies.iter_mut().zip(newest_policies).zip(played) {
            let mut expected = Expected::default();
            policy.iter().enumerate().for_each(|(j, pi)| expected.add(event, j, *pi));
            all.add(newest, event, policy[event.model], expected, policy);
        }
        let alone = alone.iter_mut().zip(newest_alone).enumerate();
        for (b, (all, newest)) in alone.filter(|(b, _)| event.eligible.allows(*b)) {
            let mut expected = Expected::default();
            expected.add(event, b, 1.0);
            all.add(newest, event, f64::from(u8::from(b == event.model)), expected, &[]);
        }
    }

    /// Events taken in.
    pub fn events(&self) -> u64 {
        self.events
    }

    /// Of each policy, then of each model alone, over all events.
    pub fn all(&self) -> &[Estimate] {
        &self.all
    }

    /// The same over the latest events, and how many these are.
    pub fn latest(&self) -> (Vec<Estimate>, u64) {
        let mut sums = fresh(self.models, self.all.len() - self.models);
        for block in &self.blocks {
            sums.iter_mut().zip(block).for_each(|(sum, estimate)| *sum += estimate);
        }
        let number = sums.first().map_or(0, |sum| sum.count());
        (sums, number)
    }

    /// How probable it may be that a range over the latest events is wrong, so that all such windows together are wrong
    /// with a probability of `alpha` at the most.
    pub fn latest_alpha(&self, alpha: f64) -> f64 {
        window_alpha(alpha, self.dropped + 1)
    }

    /// Whether a policy has a lift over always playing one model, with error probability `alpha` for all looks together. Every
    /// window that ends now may tell: the oldest one has seen the most, a newer one forgets how the policy began.
    pub fn beats(&self, policy: usize, model: usize, alpha: f64) -> bool {
        let mut sums = ConfidenceSequence::default();
        (0..self.blocks.len()).rev().any(|start| {
            sums += self.blocks[start][policy].lifts[model][0];
            sums.lower(window_alpha(alpha, self.dropped + start as u64 + 1)) > 0.0
        })
    }

    /// Changes the length of the window. The examples of the old one remain in `all`.
    pub fn set_window(&mut self, window: u64) {
        let block = window.div_ceil(BLOCKS).max(1);
        if block != self.block {
            self.block = block;
            self.dropped += self.blocks.len() as u64;
            self.blocks.clear();
            if !self.events.is_multiple_of(block) {
                // The next event does not begin a block of itself.
                self.blocks.push_back(fresh(self.models, self.all.len() - self.models));
            }
        }
    }

    /// The record of its state.
    pub fn record(&self) -> EvaluationRecord {
        let estimates = |estimates: &Vec<Estimate>| estimates.iter().map(Estimate::record).collect();
        EvaluationRecord {
            models: self.models as u64,
            events: self.events,
            all: estimates(&self.all),
            block_events: self.block,
            blocks: self.blocks.iter().map(estimates).collect(),
            blocks_dropped: self.dropped,
        }
    }

    /// Restores a record of this shape; none if it does not fit.
    pub fn from_record(record: &EvaluationRecord, models: usize, policies: usize) -> Option<Self> {
        let compared = |i: usize| if i < policies { models } else { 0 };
        let estimates = |records: &Vec<EstimateRecord>| {
            let restored = records.iter().enumerate().map(|(i, record)| Estimate::from_record(record, compared(i)));
            restored.collect::<Option<Vec<Estimate>>>().filter(|estimates| estimates.len() == policies + models)
        };
        let is_sound = record.models == models as u64
            && record.block_events > 0
            && record.blocks.len() as u64 <= BLOCKS
            && record.events <= COUNT_MAX
            && record.blocks_dropped <= COUNT_MAX;
        let judge = Self {
            models,
            events: record.events,
            all: estimates(&record.all)?,
            block: record.block_events,
            blocks: record.blocks.iter().map(estimates).collect::<Option<_>>()?,
            dropped: record.blocks_dropped,
        };
        is_sound.then_some(judge)
    }
}

/// Error probability of the window that starts with the k-th block.
fn window_alpha(alpha: f64, k: u64) -> f64 {
    alpha / (k as f64 * (k as f64 + 1.0))
}

/// Of so many policies, which are compared with every model, and of every model alone, which is not.
fn fresh(models: usize, policies: usize) -> Vec<Estimate> {
    let mut all = vec![Estimate::new(models); policies];
    all.resize_with(policies + models, Estimate::default);
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use rand::{RngExt, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    /// Two kinds of queries, two models, each good at one kind.
    struct World {
        generator: ChaCha8Rng,
    }

    const REWARDS: [[f64; 2]; 2] = [[0.8, 0.3], [0.2, 0.5]];

    impl World {
        /// Kind, model drawn from `logged`, reward.
        fn next(&mut self, logged: [f64; 2]) -> (usize, usize, f64) {
            let [kind, draw, luck]: [f64; 3] = self.generator.random();
            let (kind, model) = (usize::from(kind < 0.5), usize::from(draw >= logged[0]));
            (kind, model, f64::from(u8::from(luck < REWARDS[kind][model])))
        }
    }

    /// The policies that are judged: the right model by kind, the wrong one, and what was logged.
    fn judge(seed: u64, events: u64, logged: [f64; 2], mut each: impl FnMut(&Judge)) -> Judge {
        let mut world = World { generator: ChaCha8Rng::seed_from_u64(seed) };
        let mut judge = Judge::new(2, 3, 1000);
        for _ in 0..events {
            let (kind, model, reward) = world.next(logged);
            let right = [[1.0, 0.0], [0.0, 1.0]][kind];
            let wrong = [[0.0, 1.0], [1.0, 0.0]][kind];
            let event =
                Logged { propensities: &logged, model, reward, predicted: &[0.5, 0.4], eligible: &Eligible::ALL };
            judge.see(&event, &[&right, &wrong, &logged]);
            each(&judge);
        }
        judge
    }

    /// Over all sets of eligible models and all choices among them, each with its probability, the estimates of one event add up
    /// to the truth: of a policy that is conditioned on the set, and of a model alone on the events that it could answer.
    #[test]
    fn unbiased_by_enumeration_over_eligible_sets_and_choices() {
        let (rewards, predicted) = ([0.9, 0.2, 0.6], [0.4, 0.5, 0.1]);
        let (logged, policy) = ([0.5, 0.3, 0.2], [0.1, 0.3, 0.6]);
        // Not alike, so that a mistake in a condition shows.
        let share = |set: usize| set as f64 / (1..8).sum::<usize>() as f64;
        let (mut found, mut truth) = ([[0.0; 2]; 4], [0.0; 4]);
        for set in 1..8_usize {
            let mask: Vec<bool> = (0..3).map(|m| set >> m & 1 == 1).collect();
            let eligible = Eligible::only(mask.clone()).unwrap();
            let conditioned = |p: [f64; 3]| {
                let mut p = p;
                eligible.restrict(&mut p);
                p
            };
            let (p, pi) = (conditioned(logged), conditioned(policy));
            truth[0] += share(set) * pi.iter().zip(rewards).map(|(pi, r)| pi * r).sum::<f64>();
            for model in (0..3).filter(|m| mask[*m]) {
                truth[1 + model] += share(set) * rewards[model];
                let mut judge = Judge::new(3, 1, 100);
                let reward = rewards[model];
                let event = Logged { propensities: &p, model, reward, predicted: &predicted, eligible: &eligible };
                judge.see(&event, &[&pi]);
                for (sums, estimate) in found.iter_mut().zip(judge.all()) {
                    sums[0] += share(set) * p[model] * estimate.inverse_propensity();
                    sums[1] += share(set) * p[model] * estimate.doubly_robust();
                }
            }
        }
        for (found, truth) in found.iter().zip(truth) {
            assert!(found.iter().all(|found| (found - truth).abs() < 1e-12), "{found:?} {truth}");
        }
    }

    /// Values of the three, and of the best model alone.
    const RIGHT: f64 = 0.65;
    const WRONG: f64 = 0.25;
    const BEST_ALONE: f64 = 0.5;

    #[test]
    fn all_estimators_find_the_truth() {
        let judged = judge(1, 40_000, [0.8, 0.2], |_| ());
        for (estimate, truth) in judged.all()[..3].iter().zip([RIGHT, WRONG, 0.8 * 0.5 + 0.2 * 0.4]) {
            for found in [estimate.inverse_propensity(), estimate.self_normalised(), estimate.doubly_robust()] {
                assert!((found - truth).abs() < 0.02, "{found} {truth}");
            }
            let (range, lift) = (estimate.range(0.05).unwrap(), estimate.lift_range(0.05).unwrap());
            assert!(range.low < truth && truth < range.high && range.high - range.low < 0.1, "{range:?} {truth}");
            let expected = truth - BEST_ALONE;
            assert!(lift.low < expected && expected < lift.high && lift.high - lift.low < 0.1, "{lift:?} {expected}");
            assert!(estimate.doubly_robust_deviation() < 0.01);
        }
        let effective: Vec<f64> = judged.all().iter().map(Estimate::effective).collect();
        assert!(effective[2] == 40_000.0 && effective[0] < 20_000.0, "{effective:?}");
        for (alone, truth) in judged.all()[3..].iter().zip([BEST_ALONE, 0.4]) {
            let range = alone.range(0.05).unwrap();
            assert!(
                (alone.self_normalised() - truth).abs() < 0.02 && range.low < truth && truth < range.high,
                "{range:?}"
            );
        }
        let restored = |models, policies| Judge::from_record(&judged.record(), models, policies);
        assert_eq!((restored(2, 3).as_ref(), restored(3, 3), restored(2, 2)), (Some(&judged), None, None));
    }

    #[test]
    fn ranges_hold_at_all_times() {
        let runs = 100;
        let mut wrong = [0; 2];
        for seed in 0..runs {
            let mut ever = [false; 2];
            judge(seed, 300, [0.7, 0.3], |judged| {
                let estimate = &judged.all()[0];
                let outside = |range: Result<Range, Crossing>, x: f64| !range.is_ok_and(|range| range.nearest(x) == x);
                ever[0] |= outside(estimate.range(0.1), RIGHT);
                ever[1] |= outside(estimate.lift_range(0.1), RIGHT - BEST_ALONE);
            });
            wrong.iter_mut().zip(ever).for_each(|(wrong, ever)| *wrong += u64::from(ever));
        }
        assert!(wrong.iter().all(|wrong| *wrong <= runs / 10), "{wrong:?}");
    }

    #[test]
    fn no_propensity_is_too_small() {
        let mut judge = Judge::new(2, 1, 10);
        for propensity in [f64::MIN_POSITIVE * f64::EPSILON, 1e-300, 1e-9, 0.5] {
            let propensities = [propensity, 1.0 - propensity];
            for reward in [0.0, 1.0] {
                let event = Logged {
                    propensities: &propensities,
                    model: 0,
                    reward,
                    predicted: &[0.5; 2],
                    eligible: &Eligible::ALL,
                };
                judge.see(&event, &[&[1.0, 0.0]]);
            }
        }
        assert!(Judge::from_record(&judge.record(), 2, 1).is_some());
        assert!(judge.all()[0].range(0.05).is_ok_and(|range| range.low >= 0.0));
    }

    /// The lower bound of the value of a policy that a wrong log makes look better than any reward.
    #[test]
    fn bounds_that_no_value_satisfies_are_no_range() {
        let mut judge = Judge::new(2, 1, 10);
        for i in 0..2000 {
            // The model is always played and mostly earns 1, the log says that it is played one time in four.
            let event = Logged {
                propensities: &[0.25, 0.75],
                model: 0,
                reward: f64::from(u8::from(i % 9 > 0)),
                predicted: &[0.5; 2],
                eligible: &Eligible::ALL,
            };
            judge.see(&event, &[&[1.0, 0.0]]);
        }
        let Err(Crossing { low, high }) = judge.all()[0].range(0.05) else { panic!("it is a range") };
        assert!(low > 1.0 && high == 1.0, "{low} {high}");
        assert!(judge.all()[0].lift_range(0.05).is_err());
        let between = |low, high| Range::between(low, high, [0.0, 1.0]);
        assert_eq!(between(-3.0, 2.0), Ok(Range { low: 0.0, high: 1.0 }));
        assert_eq!(between(0.507, 0.1), Err(Crossing { low: 0.507, high: 0.1 }));
        assert_eq!(between(-0.5, -0.1), Err(Crossing { low: 0.0, high: -0.1 }));
    }

    #[test]
    fn the_latest_events_are_a_window() {
        let judged = judge(2, 5050, [0.5, 0.5], |_| ());
        let (latest, number) = judged.latest();
        assert_eq!((judged.events(), number), (5050, 950));
        assert!((latest[0].self_normalised() - RIGHT).abs() < 0.1);
        assert!((judged.latest_alpha(0.1) - 0.1 / (42.0 * 43.0)).abs() < 1e-12, "41 blocks of 100 were dropped");
        let (_, before_it_is_full) = judge(2, 120, [0.5, 0.5], |_| ()).latest();
        assert_eq!(before_it_is_full, 120);
    }

    #[test]
    fn predictions_that_are_right_leave_little_to_chance() {
        let logged = [0.9, 0.1];
        let mut world = World { generator: ChaCha8Rng::seed_from_u64(3) };
        let [mut told, mut untold] = [Judge::new(2, 1, 1), Judge::new(2, 1, 1)];
        for _ in 0..5000 {
            let (kind, model, reward) = world.next(logged);
            let predicted = REWARDS[kind];
            told.see(
                &Logged { propensities: &logged, model, reward, predicted: &predicted, eligible: &Eligible::ALL },
                &[&[0.1, 0.9]],
            );
            untold.see(
                &Logged { propensities: &logged, model, reward, predicted: &[0.0; 2], eligible: &Eligible::ALL },
                &[&[0.1, 0.9]],
            );
        }
        let deviation = |judge: &Judge| judge.all()[0].doubly_robust_deviation();
        assert!(deviation(&told) < 0.85 * deviation(&untold), "{} {}", deviation(&told), deviation(&untold));
        assert_eq!(untold.all()[0].doubly_robust(), untold.all()[0].inverse_propensity());
    }

    /// Windows and looks together are wrong as rarely as one.
    #[test]
    fn a_model_is_beaten_only_by_what_is_better() {
        let beaten = |seed: u64, policy: usize| {
            let mut world = World { generator: ChaCha8Rng::seed_from_u64(seed) };
            let mut judge = Judge::new(2, 2, 1000);
            (0..2000).any(|i| {
                let logged = [[0.7, 0.3], [0.2, 0.8]][i / 100 % 2];
                let (kind, model, reward) = world.next(logged);
                // Worth 0.5, as the first model is.
                let first = [1.0, 0.0];
                let right = [[1.0, 0.0], [0.0, 1.0]][kind];
                let even = if i % 2 == 0 { [0.9, 0.1] } else { first };
                let event =
                    Logged { propensities: &logged, model, reward, predicted: &[0.5, 0.4], eligible: &Eligible::ALL };
                judge.see(&event, &[&even, &right]);
                judge.beats(policy, 0, 0.1)
            })
        };
        let runs = 100;
        let wrong = (0..runs).filter(|seed| beaten(*seed, 0)).count();
        let right = (0..runs).filter(|seed| beaten(*seed, 1)).count();
        assert!(wrong <= 10 && right >= 90, "{wrong} {right}");
    }

    fn distribution(weights: [f64; 3]) -> [f64; 3] {
        let sum: f64 = weights.iter().sum();
        weights.map(|weight| weight / sum)
    }

    proptest! {
        /// Over all draws and rewards, whatever is predicted: bounds are on the truth, and no error is below the range.
        #[test]
        fn predictions_leave_no_bias(
            logged in prop::array::uniform3(1e-4..1.0_f64),
            policy in prop::array::uniform3(0.0..1.0_f64),
            predicted in prop::array::uniform3(0.0..=1.0_f64),
            rewards in prop::array::uniform3(0.0..=1.0_f64),
        ) {
            let (logged, policy) = (distribution(logged), distribution(policy));
            let mut means = [[0.0; 2]; 4];
            for (model, reward) in (0..3).flat_map(|model| [(model, 0.0), (model, 1.0)]) {
                let chance = logged[model] * if reward == 1.0 { rewards[model] } else { 1.0 - rewards[model] };
                let mut judge = Judge::new(3, 1, 10);
                let event = Logged { propensities: &logged, model, reward, predicted: &predicted, eligible: &Eligible::ALL };
                judge.see(&event, &[&policy]);
                let Estimate { value, lifts, .. } = &judge.all()[0];
                for (means, pair) in means.iter_mut().zip(lifts.iter().chain([value])) {
                    means.iter_mut().zip(pair).for_each(|(mean, one)| *mean += chance * one.mean());
                }
            }
            let truth: f64 = policy.iter().zip(rewards).map(|(pi, r)| pi * r).sum();
            for (mean, other) in means.iter().zip(rewards.into_iter().chain([0.0])) {
                let lift = truth - other;
                // An error that was cut off at the end of the range would show as bias.
                prop_assert!((mean[0] - lift).abs() < 1e-9 && (mean[1] + lift).abs() < 1e-9, "{mean:?} {lift}");
            }
        }
    }
}
