//! The stages of a rollout: how much of the traffic follows the learned policy, so that the cumulative loss stays within a budget.
//!
//! ```text
//! b: the incumbent      p: distribution that was played      r_j: expected reward of model j      e: budget      alpha: error probability
//! x = r_p - (1 - e) r_b                             what a decision adds to the allowance: e r_b, less its loss
//! P(at any time: sum of x < 0) <= alpha             the promise
//! A: anytime-valid lower bound of the sum of x      the allowance (confidence), less what was forgotten
//! share = e + A / (LOOK_EVERY + lag)                e to 1 - CONTROL
//! ```
//!
//! Conservative exploration (Wu et al. 2016), with a confidence sequence in place of known rewards. A decision of which the policy
//! gets a share s gives b at least the probability 1 - s, so x >= (e - s) r_b >= -(s - e). Between two looks, and until routers play
//! the new share, the sum falls by at most (s - e) (`LOOK_EVERY` + lag) <= A, which is at most the sum itself with probability
//! 1 - alpha. Where A <= 0 the share is e, and the sum cannot fall. So the sum is never below 0, whatever the policy is, and however the
//! world drifts.
//!
//! A is a bound with a_j = p_j - (1 - e) [j = b] in the notation of [`judge`](super::judge), with B = 1: for j other than b the weight
//! a_j / p_j is 1. b keeps `CONTROL` of the traffic, which limits the weight of b and the growth of the variance.
//!
//! The allowance is at most e times the window of the evaluation: of what was earned longer ago nothing may be lost again. So a
//! policy that begins to lose falls back soon, however much it had earned.
//!
//! The lag is read off the log: it is the number of examples that come after a new share was planned and were still decided with an
//! older one. It includes joins, publication and the way to the routers. A share rises only when the log shows the present one.

use serde::{Deserialize, Serialize};

use super::confidence::{COUNT_MAX, ConfidenceSequence, RANGE};
use super::judge::Logged;
use crate::event::ModelName;
use crate::wire::records::learner::value::{RolloutRecord, StageRecord};

/// Who decides.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Stage {
    /// Others do: the learner learns from their decisions and publishes nothing.
    Observe,
    /// The control distribution does. Routers log what the policy would have done.
    Shadow,
    /// The policy has the share of the traffic that the budget permits.
    Canary,
    /// The policy does.
    #[default]
    Full,
}

impl Stage {
    /// As in the configuration.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Observe => "observe",
            Self::Shadow => "shadow",
            Self::Canary => "canary",
            Self::Full => "full",
        }
    }
}

/// Checked settings of the rollout.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct RolloutSpec {
    /// The configured stage: where an automatic rollout begins, and where a manual one stays.
    pub stage: Stage,
    /// Whether evidence changes the stage.
    pub automatic: bool,
    /// The model that is served today. If it is not configured, it is searched for.
    pub incumbent: Option<usize>,
    /// e: what may be lost, relative to the reward of the incumbent.
    pub budget: f64,
}

/// The state of a rollout.
#[derive(Debug, Clone, PartialEq)]
pub struct Rollout {
    /// The stage that was configured.
    configured: Stage,
    stage: Stage,
    incumbent: Option<usize>,
    /// Examples seen.
    examples: u64,
    /// Whether the promise has begun: the log shows that routers follow.
    has_begun: bool,
    /// Bound of the sum of x since then.
    ledger: ConfidenceSequence,
    /// What was earned so long ago that it may not be lost again.
    forgotten: f64,
    plan: Plan,
}

/// The share that routers are to play, and how it reaches them.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Plan {
    share: f64,
    /// The largest share that is still played while this one has not reached the routers.
    before: f64,
    /// Examples seen when it was planned.
    since: u64,
    /// Whether the log shows it.
    has_arrived: bool,
    /// Whether the log has shown an older one since the last look.
    is_mixed: bool,
    /// Examples after `since` that an older share decided.
    late: u64,
    /// The same of earlier plans; none before the log shows that routers follow.
    lag: Option<u64>,
}

/// The state of a rollout, as seen from outside.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RolloutView {
    /// The present stage.
    pub stage: Stage,
    /// Share of the traffic that follows the policy.
    pub share: f64,
    /// The incumbent, if it is known.
    pub incumbent: Option<ModelName>,
    /// Lower bound of what may still be lost, in rewards; none before the promise begins.
    pub allowance: Option<f64>,
}

/// A look is due after so many examples.
pub const LOOK_EVERY: u64 = 64;

/// Share of the traffic that stays with the incumbent.
const CONTROL: f64 = 0.05;

/// A share rises only by so much at once, so that plans do not follow each other faster than the log shows them.
const RISE_MIN: f64 = 1.2;

/// A share rises to this part of what is permitted, so that it need not be lowered at once.
const HEADROOM: f64 = 0.9;

/// Below this share an automatic rollout is no longer full.
const FULL_MIN: f64 = 0.5;

impl RolloutSpec {
    /// Whether the control distribution is played. An automatic rollout begins with it.
    pub fn has_control(&self) -> bool {
        [Stage::Shadow, Stage::Canary].contains(&self.stage)
    }

    /// What a rollout of this stage begins with.
    fn first_share(&self) -> f64 {
        if self.stage == Stage::Canary { self.budget } else { 0.0 }
    }
}

impl Rollout {
    /// No examples yet.
    pub fn new(spec: &RolloutSpec) -> Self {
        Self {
            configured: spec.stage,
            stage: spec.stage,
            incumbent: spec.incumbent,
            examples: 0,
            has_begun: false,
            ledger: ConfidenceSequence::default(),
            forgotten: 0.0,
            plan: Plan::new(spec.first_share(), 0),
        }
    }

    /// The present stage.
    pub fn stage(&self) -> Stage {
        self.stage
    }

    /// The incumbent; none while it is searched for.
    pub fn incumbent(&self) -> Option<usize> {
        self.incumbent
    }

    /// Whether the incumbent is to be found.
    pub fn searches(&self, spec: &RolloutSpec) -> bool {
        spec.has_control() && self.incumbent.is_none()
    }

    /// The search has found the incumbent.
    pub fn find(&mut self, spec: &RolloutSpec, incumbent: usize) {
        self.incumbent = Some(incumbent);
        self.plan = Plan::new(spec.first_share(), self.examples);
    }

    /// Share of the traffic that follows the policy.
    pub fn share(&self, spec: &RolloutSpec) -> f64 {
        match spec.has_control() {
            false => 1.0,
            true if self.incumbent.is_none() => 0.0,
            true => self.plan.share,
        }
    }

    /// Adds an example. `under` tells the probability that the incumbent has where the policy has a share.
    pub fn see(&mut self, spec: &RolloutSpec, event: &Logged, under: impl Fn(usize, f64) -> f64) {
        self.examples += 1;
        let Some(b) = self.incumbent.filter(|_| spec.has_control()) else { return };
        // The incumbent could not be played: the decision is not about it.
        let played = event.propensities[b];
        if played <= 0.0 {
            return;
        }
        self.plan.see(self.examples, played, |share| under(b, share));
        if self.has_begun {
            let (predicted, error) = addition(event, b, spec.budget);
            self.ledger.add(RANGE * predicted, RANGE * error);
        }
    }

    /// Whether a look is due.
    pub fn is_due(&self, spec: &RolloutSpec) -> bool {
        spec.has_control() && self.examples.is_multiple_of(LOOK_EVERY)
    }

    /// Changes the stage and the share by what the examples say. `most` is the largest allowance, in budgets of one reward;
    /// `is_contradictory` whether the log contradicts its propensities; `pays` tells whether the lower bound of the policy's lift
    /// over a model is above 0.
    pub fn look(
        &mut self,
        spec: &RolloutSpec,
        alpha: f64,
        most: u64,
        is_contradictory: bool,
        pays: impl FnOnce(usize) -> bool,
    ) {
        let Some(incumbent) = self.incumbent else { return };
        self.has_begun |= self.plan.has_settled();
        let most = (spec.budget * most as f64).max(2.0 * self.plan.ahead(self.examples));
        let allowance = self.allowance(alpha).unwrap_or(0.0);
        self.forgotten += (allowance - most).max(0.0);
        // Bounds with wrong propensities show nothing.
        let permitted = match is_contradictory {
            true => spec.budget,
            false => self.plan.permitted(self.examples, allowance.clamp(0.0, most), spec.budget),
        };
        if spec.automatic {
            self.stage = match self.stage {
                Stage::Shadow if allowance > 0.0 && !is_contradictory => Stage::Canary,
                Stage::Canary if self.plan.share >= 1.0 - CONTROL && pays(incumbent) => Stage::Full,
                Stage::Full if permitted < FULL_MIN => Stage::Canary,
                stage => stage,
            };
        }
        self.plan.follow(self.examples, if self.stage == Stage::Shadow { 0.0 } else { permitted }, spec.budget);
    }

    /// A; none before the promise begins.
    fn allowance(&self, alpha: f64) -> Option<f64> {
        let count = self.ledger.count();
        (count > 0).then(|| self.ledger.lower(alpha) * count as f64 / RANGE - self.forgotten)
    }

    /// What is shown of it.
    pub fn view(&self, spec: &RolloutSpec, alpha: f64, models: &[ModelName]) -> RolloutView {
        RolloutView {
            stage: self.stage,
            share: self.share(spec),
            incumbent: self.incumbent.and_then(|model| models.get(model).cloned()),
            allowance: self.allowance(alpha),
        }
    }

    /// The record of its state.
    pub fn record(&self) -> RolloutRecord {
        let Self { configured, stage, incumbent, examples, has_begun, ledger, forgotten, plan } = self;
        let Plan { share, before, since, has_arrived, is_mixed, late, lag } = *plan;
        RolloutRecord {
            configured: (*configured).into(),
            stage: (*stage).into(),
            incumbent: incumbent.map(|model| model as u64),
            examples: *examples,
            has_begun: *has_begun,
            ledger: ledger.record(),
            forgotten: *forgotten,
            share,
            share_before: before,
            planned_at: since,
            has_arrived,
            is_mixed,
            late,
            lag,
        }
    }

    /// Restores a record; none if it does not fit. Another configured stage begins at once. The promise goes on if the incumbent is
    /// the same, and was played beside the policy before as well.
    pub fn restore(spec: &RolloutSpec, models: usize, record: &RolloutRecord) -> Option<Self> {
        let incumbent = record.incumbent.map(|model| model as usize);
        let restored = Self {
            configured: record.configured.into(),
            stage: record.stage.into(),
            incumbent,
            examples: record.examples,
            has_begun: record.has_begun,
            ledger: ConfidenceSequence::from_record(&record.ledger)?,
            forgotten: record.forgotten,
            plan: Plan {
                share: record.share,
                before: record.share_before,
                since: record.planned_at,
                has_arrived: record.has_arrived,
                is_mixed: record.is_mixed,
                late: record.late,
                lag: record.lag,
            },
        };
        let counts = [record.planned_at, record.late, record.lag.unwrap_or(0), restored.ledger.count()];
        let is_sound = incumbent.is_none_or(|model| model < models)
            && record.examples <= COUNT_MAX
            && counts.iter().all(|count| *count <= record.examples)
            && record.forgotten >= 0.0
            && record.forgotten.is_finite()
            && [record.share, record.share_before].iter().all(|share| (0.0..=1.0).contains(share));
        is_sound.then(|| restored.configured(spec))
    }

    /// The same under the present settings.
    fn configured(self, spec: &RolloutSpec) -> Self {
        let had_control = RolloutSpec { stage: self.configured, ..*spec }.has_control();
        let goes_on = self.configured == spec.stage || (had_control && spec.has_control());
        if !goes_on || spec.incumbent.is_some_and(|incumbent| self.incumbent != Some(incumbent)) {
            let (examples, plan) = (self.examples, Plan::new(spec.first_share(), self.examples));
            return Self { examples, plan, ..Self::new(spec) };
        }
        let stays = spec.automatic && spec.stage == self.configured;
        let stage = if stays { self.stage } else { spec.stage };
        let mut restored = Self { configured: spec.stage, stage, ..self };
        if stage == Stage::Shadow && restored.plan.share > 0.0 {
            restored.plan.follow(restored.examples, 0.0, spec.budget);
        }
        restored
    }
}

/// x for an example, as its prediction from before the reward is known and an error of at least -1.
fn addition(event: &Logged, b: usize, budget: f64) -> (f64, f64) {
    let &Logged { propensities, model, reward, predicted, .. } = event;
    let a = propensities[b] - (1.0 - budget);
    let of_b = match a < 0.0 {
        true => predicted[b].max(1.0 - propensities[b] / -a),
        false => predicted[b],
    };
    let others = |j: &usize| *j != b;
    let sum: f64 = (0..predicted.len()).filter(others).map(|j| propensities[j] * predicted[j]).sum();
    let error = match model == b {
        true => a / propensities[b] * (reward - of_b),
        false => reward - predicted[model],
    };
    (sum + a * of_b, error.clamp(-1.0, ERROR_MAX))
}

/// Limit on errors from above, so that no example makes sums infinite.
const ERROR_MAX: f64 = 1e6;

impl Plan {
    /// Until the log shows it, anything may be played.
    fn new(share: f64, since: u64) -> Self {
        Self { share, before: 1.0, since, has_arrived: false, is_mixed: false, late: 0, lag: None }
    }

    /// Adds an example in which the incumbent was played with probability `played`.
    fn see(&mut self, examples: u64, played: f64, under: impl Fn(f64) -> f64) {
        let (new, old) = (under(self.share), under(self.before));
        if (new - old).abs() < TELLING {
            // Both shares are alike, or the policy plays what the incumbent does.
            return;
        }
        if (played - new).abs() > TOLERANCE * (new - old).abs() + ROUNDING {
            (self.is_mixed, self.late) = (true, examples - self.since);
        } else {
            self.has_arrived = true;
            if self.share > 0.0 {
                self.lag.get_or_insert(0);
            }
        }
    }

    /// Whether the log shows this plan, and since the last look no older one.
    fn has_settled(&self) -> bool {
        self.has_arrived && !self.is_mixed
    }

    /// Examples that pass until what the next look plans is played.
    fn ahead(&self, examples: u64) -> f64 {
        (LOOK_EVERY + self.lag_now(examples)) as f64
    }

    fn lag_now(&self, examples: u64) -> u64 {
        let late = if self.has_arrived { self.late } else { examples - self.since };
        self.lag.unwrap_or(0).max(late)
    }

    /// The share that an allowance permits: it pays for what older shares still decide, then for this one.
    fn permitted(&self, examples: u64, allowance: f64, budget: f64) -> f64 {
        if self.lag.is_none() {
            // Nothing shows yet that routers follow.
            return budget;
        }
        let passed = examples - self.since;
        let older = match self.has_arrived {
            true => 0,
            // Overdue: perhaps as many again.
            false if passed >= self.lag_now(examples) => passed,
            false => self.lag_now(examples) - passed,
        };
        let left = allowance - (self.before - budget).max(0.0) * older as f64;
        let ahead = (self.ahead(examples) - older as f64).max(LOOK_EVERY as f64);
        (budget + left.max(0.0) / ahead).min(1.0 - CONTROL)
    }

    /// Lowers the share if it must be, and raises it if the log shows the present one.
    fn follow(&mut self, examples: u64, permitted: f64, budget: f64) {
        let risen =
            if permitted < 1.0 - CONTROL { (HEADROOM * permitted).max(budget.min(permitted)) } else { permitted };
        let rises = self.has_settled() && (risen >= RISE_MIN * self.share || risen >= 1.0 - CONTROL);
        self.is_mixed = false;
        if permitted < self.share || (rises && risen > self.share) {
            let share = permitted.min(risen.max(self.share));
            let before = if self.has_arrived { self.share } else { self.share.max(self.before) };
            let lag = self.lag.map(|lag| (lag / 2).max(self.late));
            *self = Self { before, lag, ..Self::new(share, examples) };
        }
    }
}

/// By how much the probabilities of the incumbent must differ to tell two shares apart.
const TELLING: f64 = 1e-5;

/// What of that difference a log may be off by.
const TOLERANCE: f64 = 1e-3;

/// For probabilities that were written with few digits.
const ROUNDING: f64 = 1e-7;

impl From<Stage> for StageRecord {
    fn from(stage: Stage) -> Self {
        match stage {
            Stage::Observe => Self::Observe,
            Stage::Shadow => Self::Shadow,
            Stage::Canary => Self::Canary,
            Stage::Full => Self::Full,
        }
    }
}

impl From<StageRecord> for Stage {
    fn from(record: StageRecord) -> Self {
        match record {
            StageRecord::Observe => Self::Observe,
            StageRecord::Shadow => Self::Shadow,
            StageRecord::Canary => Self::Canary,
            StageRecord::Full => Self::Full,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::eligible::Eligible;
    use proptest::prelude::*;
    use rand::{RngExt, SeedableRng};
    use rand_chacha::ChaCha8Rng;
    use std::collections::VecDeque;

    const CANARY: RolloutSpec =
        RolloutSpec { stage: Stage::Canary, automatic: false, incumbent: Some(0), budget: 0.02 };

    /// Decisions among an incumbent that earns 0.5 and a policy that always plays the other model.
    struct Traffic {
        spec: RolloutSpec,
        rollout: Rollout,
        random: ChaCha8Rng,
        /// Decisions whose reward has not come yet: p of the incumbent, the chosen model, its reward.
        open: VecDeque<(f64, usize, f64)>,
        /// The sum of x, and the least it ever was.
        sum: f64,
        least: f64,
    }

    impl Traffic {
        fn new(spec: RolloutSpec, seed: u64) -> Self {
            let (rollout, random) = (Rollout::new(&spec), ChaCha8Rng::seed_from_u64(seed));
            Self { spec, rollout, random, open: VecDeque::new(), sum: 0.0, least: 0.0 }
        }

        /// The share that routers play.
        fn share(&self) -> f64 {
            self.rollout.share(&self.spec)
        }

        /// Plays so many decisions with a policy that earns `reward`; rewards come `delay` decisions later.
        fn play(&mut self, decisions: u64, delay: usize, reward: f64) {
            for _ in 0..decisions {
                let share = self.share();
                let [draw, luck]: [f64; 2] = self.random.random();
                let model = usize::from(draw < share);
                let won = f64::from(u8::from(luck < [0.5, reward][model]));
                if self.rollout.has_begun {
                    self.sum += share * reward + (1.0 - share) * 0.5 - (1.0 - self.spec.budget) * 0.5;
                    self.least = self.least.min(self.sum);
                }
                self.open.push_back((1.0 - share, model, won));
                if self.open.len() > delay {
                    let (p, model, reward) = self.open.pop_front().unwrap();
                    self.see(&[p, 1.0 - p], model, reward);
                }
            }
        }

        fn see(&mut self, propensities: &[f64], model: usize, reward: f64) {
            let predicted = [0.5; 2];
            let event = Logged { propensities, model, reward, predicted: &predicted, eligible: &Eligible::ALL };
            self.rollout.see(&self.spec, &event, |_, share| 1.0 - share);
            if self.rollout.is_due(&self.spec) {
                self.rollout.look(&self.spec, 0.05, 50_000, false, |_| true);
            }
        }
    }

    /// It earns well until it has the traffic, and nothing from then on.
    #[test]
    fn a_policy_that_turns_bad_at_the_worst_time_stays_within_the_budget() {
        for delay in [0, 100, 1000] {
            for seed in 0..10 {
                let mut traffic = Traffic::new(CANARY, seed);
                while traffic.share() < 0.9 {
                    traffic.play(64, delay, 0.9);
                }
                for _ in 0..40 {
                    let reward = if traffic.share() > 0.3 { 0.0 } else { 0.9 };
                    traffic.play(500, delay, reward);
                }
                assert!(traffic.least >= 0.0, "{delay}, {seed}: {}", traffic.least);
            }
        }
    }

    /// What was earned long ago may not be lost again.
    #[test]
    fn a_policy_that_earned_much_falls_back_soon() {
        let mut traffic = Traffic::new(CANARY, 1);
        traffic.play(100_000, 0, 0.7);
        assert_eq!(traffic.share(), 1.0 - CONTROL);
        traffic.play(6_000, 0, 0.3);
        assert!(traffic.sum > 10_000.0 && traffic.share() < 0.1, "{} {}", traffic.sum, traffic.share());
    }

    #[test]
    fn a_share_rises_only_where_routers_follow() {
        let mut traffic = Traffic::new(CANARY, 1);
        // They play the incumbent, whatever is published.
        for i in 0..20_000 {
            traffic.see(&[1.0, 0.0], 0, f64::from(i % 2));
        }
        assert_eq!(traffic.share(), CANARY.budget);
        // They follow, but a thousand decisions later.
        let mut traffic = Traffic::new(CANARY, 1);
        traffic.play(40_000, 1000, 0.7);
        let lag = traffic.rollout.plan.lag_now(traffic.rollout.examples);
        assert!((900..2500).contains(&lag), "{lag}");
    }

    #[test]
    fn the_promise_goes_on_where_the_control_stays_the_same() {
        let mut traffic = Traffic::new(CANARY, 1);
        traffic.play(20_000, 0, 0.7);
        let Traffic { rollout, .. } = traffic;
        let restored = |spec: RolloutSpec| Rollout::restore(&spec, 2, &rollout.record()).unwrap();
        assert_eq!(restored(CANARY), rollout);
        let shadow = restored(RolloutSpec { stage: Stage::Shadow, ..CANARY });
        assert_eq!((shadow.stage, shadow.plan.share, shadow.ledger), (Stage::Shadow, 0.0, rollout.ledger));
        let full = restored(RolloutSpec { stage: Stage::Full, ..CANARY });
        assert_eq!((full.ledger.count(), full.share(&RolloutSpec { stage: Stage::Full, ..CANARY })), (0, 1.0));
        let other = restored(RolloutSpec { incumbent: Some(1), ..CANARY });
        assert_eq!((other.incumbent, other.ledger.count(), other.plan.share), (Some(1), 0, CANARY.budget));
        assert_eq!(Rollout::restore(&CANARY, 1, &RolloutRecord { incumbent: Some(1), ..rollout.record() }), None);
        assert_eq!(Rollout::restore(&CANARY, 2, &RolloutRecord { share: f64::NAN, ..rollout.record() }), None);
    }

    proptest! {
        /// Over all draws and rewards, whatever is predicted, x is unbiased, and no error is below -1.
        #[test]
        fn additions_are_unbiased(
            b in 0.01..=1.0_f64,
            split in 0.0..=1.0_f64,
            predicted in prop::array::uniform3(0.0..=1.0_f64),
            rewards in prop::array::uniform3(0.0..=1.0_f64),
            budget in 1e-4..0.5_f64,
        ) {
            let propensities = [b, (1.0 - b) * split, (1.0 - b) * (1.0 - split)];
            let mut mean = 0.0;
            for (model, reward) in (0..3).flat_map(|model| [(model, 0.0), (model, 1.0)]).filter(|one| propensities[one.0] > 0.0) {
                let chance = propensities[model] * if reward == 1.0 { rewards[model] } else { 1.0 - rewards[model] };
                let event = Logged { propensities: &propensities, model, reward, predicted: &predicted, eligible: &Eligible::ALL };
                let (expected, error) = addition(&event, 0, budget);
                prop_assert!(error >= -1.0);
                mean += chance * (expected + error);
            }
            let truth = propensities.iter().zip(rewards).map(|(p, r)| p * r).sum::<f64>() - (1.0 - budget) * rewards[0];
            prop_assert!((mean - truth).abs() < 1e-9, "{mean} {truth}");
        }
    }
}
