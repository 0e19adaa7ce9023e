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

    /// Adds an example whose router had this probability of the incumbent under the policy.
    pub fn see(&mut self, spec: &RolloutSpec, event: &Logged, policy: impl Fn(usize) -> f64) {
        self.examples += 1;
        let Some(b) = self.incumbent.filter(|_| spec.has_control()) else { return };
        // The incumbent could not be played: the decision is not about it.
        let played = event.propensities[b];
        if played <= 0.0 {
            return;
        }
        self.plan.see(self.examples, played, policy(b));
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
        let permitted = self.plan.permitted(self.examples, allowance.clamp(0.0, most), spec.budget);
        if spec.automatic {
            self.stage = match self.stage {
                _ if is_contradictory => Stage::Shadow,
                Stage::Shadow if allowance > 0.0 => Stage::Canary,
                Stage::Canary if self.plan.share >= 1.0 - CONTROL && pays(incumbent) => Stage::Full,
                Stage::Full if permitted < FULL_MIN => Stage::Canary,
                stage => stage,
            };
        }
        // Bounds with wrong propensities show nothing.
        let is_held = is_contradictory || self.stage == Stage::Shadow;
        self.plan.follow(self.examples, if is_held { 0.0 } else { permitted }, spec.budget);
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

    /// Restores a record; none if it does not fit. Another configured stage begins at once. The promise goes on if the control
    /// distribution was played before as well, and against the same incumbent.
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
        let had_control = [Stage::Shadow, Stage::Canary].contains(&self.configured);
        let is_same = spec.incumbent.is_none() || spec.incumbent == self.incumbent;
        if !(had_control && spec.has_control() && is_same) {
            let (examples, plan) = (self.examples, Plan::new(spec.first_share(), self.examples));
            return Self { examples, plan, ..Self::new(spec) };
        }
        let stays = spec.automatic && spec.stage == self.configured;
        let stage = if stays { self.stage } else { spec.stage };
        let mut restored = Self { configured: spec.stage, stage, ..self };
        if stage == Stage::Shadow {
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

    /// Adds an example: the incumbent was played with probability `played`, and `policy` is that of the policy alone.
    fn see(&mut self, examples: u64, played: f64, policy: f64) {
        let under = |share: f64| share * policy + 1.0 - share;
        let [new, old] = [self.share, self.before].map(under);
        if (new - old).abs() < TELLING {
            // Both shares are alike, or the policy plays what the incumbent does.
            return;
        }
        if (played - old).abs() < (played - new).abs() {
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
        let risen = if permitted < 1.0 - CONTROL { (HEADROOM * permitted).max(budget.min(permitted)) } else { permitted };
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
const TELLING: f64 = 1e-6;

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
