//! What several policies would have earned on the same events, which another policy chose.
//!
//! ```text
//! p: what the model m was drawn from      pi: a policy that is judged      w = pi_m / p_m      r: the reward, 0..1
//! inverse propensities   mean of w r
//! self-normalised        sum w r / sum w
//! doubly robust          mean of  sum_j pi_j f_j + w (r - f_m)      f_j: rewards predicted before r is known
//! value                  bound(w r) <= value <= 1 - bound(w (1 - r))
//! lift over model b      2 bound((w r + v (1 - r)) / 2) - 1 <= value - value_b,   v = w of the policy that always plays b
//! ```
//!
//! bound: [`confidence`](super::confidence), which asks for no more than x >= 0. That is why lifts are written with 1 - r:
//! w r - v r is bounded on neither side, (w r + v (1 - r)) / 2 is above 0 and has the mean (1 + lift) / 2.
//!
//! The latest events are a window of `BLOCKS` blocks. The k-th window, begun when the k-th block was, is allowed to be
//! wrong with probability alpha / (k (k + 1)): these add up to alpha, so that all windows hold at once.

use std::collections::VecDeque;
use std::ops::AddAssign;

use serde::Serialize;

use super::confidence::{Bounded, COUNT_MAX};
use super::off_policy::OffPolicy;
use crate::wire::records::learner::value::{BoundRecord, EstimateRecord, EvaluationRecord};

/// An event that was logged, with what was predicted of it.
#[derive(Debug, Clone, Copy)]
pub struct Logged<'a> {
    /// What the model was drawn from.
    pub propensities: &'a [f64],
    /// The model that was drawn.
    pub model: usize,
    /// What it earned, 0 to 1.
    pub reward: f64,
    /// What each model was predicted to earn, before that was known.
    pub predicted: &'a [f64],
}

/// What one policy would have earned: sums over events, so that those of two stretches can be added.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Estimate {
    weights: OffPolicy,
    robust: f64,
    robust_square: f64,
    /// Of w r and of w (1 - r).
    value: [Bounded; 2],
    /// Of (w r + v (1 - r)) / 2 and of (v r + w (1 - r)) / 2, for each model that might always be played.
    over: Vec<[Bounded; 2]>,
}

/// A range that holds what is asked for at all times at once, but for a probability of `alpha`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Range {
    /// Not below this.
    pub low: f64,
    /// Not above that.
    pub high: f64,
}

impl Estimate {
    fn new(compared: usize) -> Self {
        Self { over: vec![Default::default(); compared], ..Self::default() }
    }

    /// Takes in an event that a policy is judged by, here and in the newest block of its window. `played` is what the
    /// policy gives to the model that was drawn, `expected` what it is predicted to earn. Guesses are those of all events.
    fn see(&mut self, newest: &mut Self, event: &Logged, played: f64, expected: f64) {
        let &Logged { propensities, model, reward, predicted } = event;
        let propensity = propensities[model];
        let weight = (played / propensity).min(WEIGHT_MAX);
        let robust = expected + weight * (reward - predicted[model]);
        for one in [&mut *self, &mut *newest] {
            one.weights.add(weight, reward);
            one.robust += robust;
            one.robust_square += robust * robust;
        }
        let parts = [weight * reward, weight * (1.0 - reward)];
        see_pair(&mut self.value, &mut newest.value, parts);
        for (b, (all, newest)) in self.over.iter_mut().zip(&mut newest.over).enumerate() {
            let always = if b == model { propensity.recip().min(WEIGHT_MAX) } else { 0.0 };
            let [earned, missed] = [always * reward, always * (1.0 - reward)];
            see_pair(all, newest, [0.5 * (parts[0] + missed), 0.5 * (earned + parts[1])]);
        }
    }

    /// The mean reward by inverse propensities.
    pub fn inverse_propensity(&self) -> f64 {
        self.value[0].mean()
    }

    /// The mean reward, weights made to sum to one.
    pub fn self_normalised(&self) -> f64 {
        self.weights.value()
    }

    /// Standard deviation of that, as of one look.
    pub fn deviation(&self) -> f64 {
        self.weights.deviation()
    }

    /// The mean reward as predicted, corrected where the prediction was wrong.
    pub fn doubly_robust(&self) -> f64 {
        self.robust / self.value[0].number().max(1) as f64
    }

    /// Standard deviation of that.
    pub fn doubly_robust_deviation(&self) -> f64 {
        let n = self.value[0].number().max(1) as f64;
        let mean = self.robust / n;
        ((self.robust_square / n - mean * mean).max(0.0) / n).sqrt()
    }

    /// How many events of its own the log is worth to this policy.
    pub fn effective(&self) -> f64 {
        self.weights.effective()
    }

    /// Where the mean reward is, at any time.
    pub fn range(&self, alpha: f64) -> Range {
        let [earned, missed] = &self.value;
        Range { low: earned.lower(alpha / 2.0).min(1.0), high: 1.0 - missed.lower(alpha / 2.0).min(1.0) }
    }

    /// Where the lift over the best model that might always be played is, at any time. Models that were hardly ever
    /// played make it wide: any of them might be the best one.
    pub fn lift_range(&self, alpha: f64) -> Range {
        let all = (0..self.over.len()).map(|b| self.lift_over(b, alpha));
        // The lift over the best one is the least of all lifts.
        all.fold(Range { low: 1.0, high: 1.0 }, |least, one| Range {
            low: least.low.min(one.low),
            high: least.high.min(one.high),
        })
    }

    /// Where the lift over always playing one model is, at any time, of all models at once.
    pub fn lift_over(&self, model: usize, alpha: f64) -> Range {
        let each = alpha / (2 * self.over.len().max(1)) as f64;
        let [above, below] = self.over[model].each_ref().map(|bounded| 2.0 * bounded.lower(each).min(1.0) - 1.0);
        Range { low: above, high: -below }
    }

    fn record(&self) -> EstimateRecord {
        let pair = |[one, other]: &[Bounded; 2]| [one.record(), other.record()];
        EstimateRecord {
            weights: self.weights.record(),
            robust: self.robust,
            robust_square: self.robust_square,
            value: pair(&self.value),
            lifts: self.over.iter().map(pair).collect(),
        }
    }

    /// Restores a record that is compared with so many models; none if it does not fit.
    fn from_record(record: &EstimateRecord, compared: usize) -> Option<Self> {
        let pair = |[one, other]: &[BoundRecord; 2]| Some([Bounded::from_record(one)?, Bounded::from_record(other)?]);
        let estimate = Self {
            weights: OffPolicy::from_record(&record.weights)?,
            robust: record.robust,
            robust_square: record.robust_square,
            value: pair(&record.value)?,
            over: record.lifts.iter().map(pair).collect::<Option<_>>()?,
        };
        let is_sound =
            estimate.over.len() == compared && estimate.robust.is_finite() && estimate.robust_square.is_finite();
        is_sound.then_some(estimate)
    }
}

/// Weights are cut there, so that no event makes sums infinite. What is cut could only raise a mean: bounds from below,
/// which all are, stay true.
const WEIGHT_MAX: f64 = 1e6;

fn see_pair(all: &mut [Bounded; 2], newest: &mut [Bounded; 2], x: [f64; 2]) {
    for ((all, newest), x) in all.iter_mut().zip(newest).zip(x) {
        let guess = all.guess();
        all.see(x, guess);
        newest.see(x, guess);
    }
}

impl AddAssign<&Self> for Estimate {
    fn add_assign(&mut self, other: &Self) {
        self.weights += other.weights;
        self.robust += other.robust;
        self.robust_square += other.robust_square;
        let pairs = self.over.iter_mut().zip(&other.over).chain([(&mut self.value, &other.value)]);
        for (pair, other) in pairs {
            pair.iter_mut().zip(other).for_each(|(bounded, other)| *bounded += *other);
        }
    }
}

/// Judges policies, and every model alone, event by event: over all of them, and over the latest.
///
/// Policies may learn from an event after they were judged by it: the estimate is then of the mean of what they were.
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
    /// Nothing judged yet. `window` is how many of the latest events are looked at for themselves, at the most.
    pub fn new(models: usize, policies: usize, window: u64) -> Self {
        let all = fresh(models, policies);
        let block = window.div_ceil(BLOCKS).max(1);
        Self { models, events: 0, all, block, blocks: VecDeque::new(), dropped: 0 }
    }

    /// Takes in an event; `played` holds what each policy would have drawn from.
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
        let alone = (0..self.models).map(|b| (f64::from(u8::from(b == event.model)), event.predicted[b]));
        let expected = |played: &[f64]| played.iter().zip(event.predicted).map(|(p, f)| p * f).sum();
        let judged = played.iter().map(|played| (played[event.model], expected(played))).chain(alone);
        for ((all, newest), (played, expected)) in self.all.iter_mut().zip(newest).zip(judged) {
            all.see(newest, event, played, expected);
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
        let number = sums.first().map_or(0, |sum| sum.value[0].number());
        (sums, number)
    }

    /// How probable it may be that a range over the latest events is wrong, so that all such windows together are wrong
    /// with a probability of `alpha` at the most.
    pub fn latest_alpha(&self, alpha: f64) -> f64 {
        let k = (self.dropped + 1) as f64;
        alpha / (k * (k + 1.0))
    }

    /// Goes on with another window: what was in the old one is still in `all`.
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

/// Of so many policies, which are compared with every model, and of every model alone, which is not.
fn fresh(models: usize, policies: usize) -> Vec<Estimate> {
    let mut all = vec![Estimate::new(models); policies];
    all.resize_with(policies + models, Estimate::default);
    all
}

#[cfg(test)]
mod tests {
    use super::*;
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
            let event = Logged { propensities: &logged, model, reward, predicted: &[0.5, 0.4] };
            judge.see(&event, &[&right, &wrong, &logged]);
            each(&judge);
        }
        judge
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
            let (range, lift) = (estimate.range(0.05), estimate.lift_range(0.05));
            assert!(range.low < truth && truth < range.high && range.high - range.low < 0.1, "{range:?} {truth}");
            let expected = truth - BEST_ALONE;
            assert!(lift.low < expected && expected < lift.high && lift.high - lift.low < 0.12, "{lift:?} {expected}");
            assert!(estimate.doubly_robust_deviation() < 0.01);
        }
        let effective: Vec<f64> = judged.all().iter().map(Estimate::effective).collect();
        assert!(effective[2] == 40_000.0 && effective[0] < 20_000.0, "{effective:?}");
        for (alone, truth) in judged.all()[3..].iter().zip([BEST_ALONE, 0.4]) {
            let range = alone.range(0.05);
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
                let (range, lift) = (estimate.range(0.1), estimate.lift_range(0.1));
                ever[0] |= RIGHT < range.low || range.high < RIGHT;
                ever[1] |= RIGHT - BEST_ALONE < lift.low || lift.high < RIGHT - BEST_ALONE;
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
                let event = Logged { propensities: &propensities, model: 0, reward, predicted: &[0.5; 2] };
                judge.see(&event, &[&[1.0, 0.0]]);
            }
        }
        assert!(Judge::from_record(&judge.record(), 2, 1).is_some());
        assert!(judge.all()[0].range(0.05).low >= 0.0);
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
            told.see(&Logged { propensities: &logged, model, reward, predicted: &predicted }, &[&[0.1, 0.9]]);
            untold.see(&Logged { propensities: &logged, model, reward, predicted: &[0.0; 2] }, &[&[0.1, 0.9]]);
        }
        let deviation = |judge: &Judge| judge.all()[0].doubly_robust_deviation();
        assert!(deviation(&told) < 0.85 * deviation(&untold), "{} {}", deviation(&told), deviation(&untold));
        assert_eq!(untold.all()[0].doubly_robust(), untold.all()[0].inverse_propensity());
    }
}
