//! Whether routing pays, evaluated while a learner learns; and what is played beside the policy in a rollout.
//!
//! ```text
//! evaluated   the logged policy, the learner's current policy, uniform, every model alone                (judge)
//! played      p = share ((1 - f) core + f uniform) + (1 - share) control
//! share       by the stage of the rollout                                                              (rollout)
//! control     the incumbent; while it is searched for, the fallback mix
//! fallback    half for the model that seems best alone; half for each model in proportion to erfc(z / sqrt 2), at least 1/400:
//!             z deviations behind that model
//! search      ends after `SEARCH_MAX` evaluated examples
//! ```
//!
//! Every example is evaluated before it is learned from. The search plays the models, not the policy. The model that it ends with
//! stays the incumbent: if another one turns out to be better, the policy learns to play that one and is compared with the incumbent.

use serde::{Deserialize, Serialize};

use super::confidence::COUNT_MAX;
use super::judge::{Estimate, Judge, Logged};
use super::rollout::{Rollout, RolloutSpec, RolloutView};
use super::sample_ratio::SampleRatio;
use super::verdict::{
    Assessment, Assessments, Comparison, Contradiction, Figures, Lift, Names, best_alone, cautious_values,
};
use crate::event::{Example, ModelName};
use crate::router::uniform;
use crate::wire::records::learner::value::{ModelRewardsRecord, PolicyValueRecord};

/// Checked settings.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WorthSpec {
    /// Every nth example is evaluated; 0 = none.
    pub every: u64,
    /// Number of most recent evaluated examples that are also evaluated separately.
    pub window: u64,
    /// Probability that a range is ever wrong.
    pub alpha: f64,
    /// Whose decisions are played.
    #[serde(default)]
    pub rollout: RolloutSpec,
}

impl Default for WorthSpec {
    fn default() -> Self {
        Self { every: 1, window: 50_000, alpha: 0.05, rollout: RolloutSpec::default() }
    }
}

/// The value of one learner's policy, as far as it is known, and the state of the rollout.
#[derive(Debug, Clone, PartialEq)]
pub struct Worth {
    /// Examples, evaluated or not.
    seen: u64,
    judge: Judge,
    /// Per model the sum and the number of its rewards.
    earned: Vec<(f64, u64)>,
    /// The fallback mix; empty before the first look, when all models are equal.
    fallback: Vec<f64>,
    rollout: Rollout,
    /// Whether models were played as often as the propensities say.
    ratio: SampleRatio,
}

/// What the learner says about an example before it knows the reward.
#[derive(Debug, Clone, Copy)]
pub struct Outlook<'a> {
    /// The distribution of its policy.
    pub policy: &'a [f64],
    /// The reward that it predicts for each model, 0 to 1, if it has a model of rewards.
    pub predicted: Option<&'a [f64]>,
    /// Share of uniform exploration that is mixed into the core of the policy.
    pub exploration: f64,
}

/// Scratch buffers. They belong to one learner, whose number of models stays the same.
#[derive(Debug, Clone, Default)]
pub struct Scratch {
    predicted: Vec<f64>,
    alike: Vec<f64>,
}

/// Who is judged, before the models alone.
const POLICIES: usize = 3;
const LOGGED: usize = 0;
const LEARNED: usize = 1;
const UNIFORM: usize = 2;

/// The search looks after so many judged examples, at first more often.
const SEARCH_EVERY: u64 = 256;

/// The search ends after so many judged examples: models that still seem alike then nearly are.
const SEARCH_MAX: u64 = 10_000;

/// A log must contradict its propensities with this part of alpha to hold a rollout back. Little traffic then brings little new
/// evidence, so that a false alarm would hold it back for long.
const DOUBT: f64 = 0.01;

/// What is mixed into a core distribution: its share, and what else is drawn from.
#[derive(Debug, Clone, PartialEq)]
pub struct Floor {
    /// f
    pub share: f64,
    /// What is drawn from with probability f.
    pub distribution: Vec<f64>,
}

/// What a stretch of examples tells.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Verdict {
    /// Judged examples.
    pub examples: u64,
    /// What was played.
    pub logged: Figures,
    /// The learner's own policy, whatever share of the traffic it has.
    pub policy: Figures,
    /// All models alike.
    pub uniform: Figures,
    /// Every model alone.
    pub alone: Vec<Figures>,
    /// The one of them that seems to earn the most.
    pub best_alone: usize,
    /// Of what was played.
    pub logged_lift: Lift,
    /// Of the learner's own policy.
    pub policy_lift: Lift,
    /// Whether the examples hardly say anything of the learner's own policy.
    pub poor_overlap: bool,
}

/// All that is known of the worth of a learner's policy.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct WorthView {
    /// Who is judged alone.
    pub models: Vec<ModelName>,
    /// Probability that a range is ever wrong.
    pub alpha: f64,
    /// How the log contradicts its propensities, if it does; there are no ranges then, and a rollout holds the policy back.
    pub contradiction: Option<Contradiction>,
    /// Each policy that is not a single model, compared with the best single one over all judged examples; best first.
    pub verdicts: Vec<Comparison>,
    /// By all judged examples.
    pub all: Verdict,
    /// By the latest of them, if there are any.
    pub latest: Option<Verdict>,
}

impl Worth {
    /// Nothing judged yet.
    pub fn new(spec: &WorthSpec, models: usize) -> Self {
        let judge = Judge::new(models, POLICIES, spec.window);
        let earned = vec![(0.0, 0); models];
        let ratio = SampleRatio::new(models);
        Self { seen: 0, judge, earned, fallback: Vec::new(), rollout: Rollout::new(&spec.rollout), ratio }
    }

    /// The record of its state.
    pub fn record(&self) -> PolicyValueRecord {
        let rewards = |&(sum, count): &(f64, u64)| ModelRewardsRecord { sum, count };
        PolicyValueRecord {
            examples: self.seen,
            evaluation: self.judge.record(),
            rewards: self.earned.iter().map(rewards).collect(),
            fallback_mix: self.fallback.clone(),
            rollout: Some(self.rollout.record()),
            sample_ratio: self.ratio.record(),
        }
    }

    /// Restores a record; none if it does not fit.
    pub fn restore(spec: &WorthSpec, models: usize, record: PolicyValueRecord) -> Option<Self> {
        let PolicyValueRecord { examples: seen, evaluation, rewards, fallback_mix: fallback, rollout, sample_ratio } =
            record;
        let ratio = SampleRatio::from_record(&sample_ratio, models)?;
        let rollout = match &rollout {
            Some(rollout) => Rollout::restore(&spec.rollout, models, rollout)?,
            None => Rollout::new(&spec.rollout),
        };
        let is_possible =
            |one: &ModelRewardsRecord| one.count <= COUNT_MAX && (0.0..=one.count as f64).contains(&one.sum);
        let is_mix = fallback.is_empty() || (fallback.len() == models && is_distribution(&fallback));
        let is_sound = rewards.len() == models && rewards.iter().all(is_possible) && is_mix && seen <= COUNT_MAX;
        let mut judge = Judge::from_record(&evaluation, models, POLICIES)?;
        judge.set_window(spec.window);
        let earned = rewards.iter().map(|one| (one.sum, one.count)).collect();
        is_sound.then_some(Self { seen, judge, earned, fallback, rollout, ratio })
    }

    /// Whether the next example is to be judged.
    pub fn is_next_judged(&self, spec: &WorthSpec) -> bool {
        spec.every > 0 && self.seen.is_multiple_of(spec.every)
    }

    /// Adds an example; `outlook` is the learner's, if the example is evaluated.
    pub fn see(&mut self, spec: &WorthSpec, example: &Example, outlook: Option<Outlook>, scratch: &mut Scratch) {
        self.seen += 1;
        if example.has_stated_propensities() {
            self.ratio.see(example.propensities(), example.model());
        }
        let Some(reward) = example.reward() else { return };
        if let Some(outlook) = outlook {
            self.judge(spec, example, reward, outlook, scratch);
            self.look(spec);
        }
        let earned = &mut self.earned[example.model()];
        *earned = (earned.0 + reward, earned.1 + 1);
    }

    fn judge(&mut self, spec: &WorthSpec, example: &Example, reward: f64, outlook: Outlook, scratch: &mut Scratch) {
        let Scratch { predicted, alike } = scratch;
        match outlook.predicted {
            Some(rewards) => {
                predicted.clear();
                predicted.extend_from_slice(rewards);
            }
            None => self.predict(predicted),
        }
        alike.clear();
        alike.resize(predicted.len(), 1.0 / predicted.len() as f64);
        example.eligible().restrict(alike);
        let event = Logged {
            propensities: example.propensities(),
            model: example.model(),
            reward,
            predicted,
            eligible: example.eligible(),
        };
        let mut played: [&[f64]; POLICIES] = [&[]; POLICIES];
        (played[LOGGED], played[LEARNED], played[UNIFORM]) = (example.propensities(), outlook.policy, &*alike);
        self.judge.see(&event, &played);
        // What a router makes of the floor below, among the eligible models.
        let (core, f, models) = (example.policy(), outlook.exploration, predicted.len() as f64);
        self.rollout.see(&spec.rollout, &event, |b, share| {
            let (explored, control) = (share * f / models, 1.0 - share);
            let floor = (explored + control) / (explored / alike[b] + control).max(f64::MIN_POSITIVE);
            share * (1.0 - f) * core[b] + (1.0 - share * (1.0 - f)) * floor
        });
    }

    /// Predicts the reward of each model without looking at the query: its mean, cautious while it has few examples.
    fn predict(&self, predicted: &mut Vec<f64>) {
        let (sum, number) = self.earned.iter().fold((0.0, 0), |all, one| (all.0 + one.0, all.1 + one.1));
        let mean = if number > 0 { sum / number as f64 } else { 0.5 };
        predicted.clear();
        predicted.extend(self.earned.iter().map(|(sum, number)| (sum + mean) / (*number as f64 + 1.0)));
    }

    fn look(&mut self, spec: &WorthSpec) {
        if self.rollout.searches(&spec.rollout) {
            return self.search(spec);
        }
        if self.rollout.is_due(&spec.rollout) {
            let Self { judge, ratio, rollout, .. } = self;
            let alpha = DOUBT * spec.alpha;
            let is_contradictory = ratio.is_mismatch(alpha)
                || rollout.incumbent().is_some_and(|b| judge.all()[LEARNED].lift_over(b, alpha).is_err());
            let pays = |b| judge.beats(LEARNED, b, spec.alpha);
            rollout.look(&spec.rollout, spec.alpha, spec.window, is_contradictory, pays);
        }
    }

    /// Looks for the model that is best alone.
    fn search(&mut self, spec: &WorthSpec) {
        let events = self.judge.events();
        if !(events.is_multiple_of(SEARCH_EVERY) || events.is_power_of_two()) {
            return;
        }
        let (latest, _) = self.judge.latest();
        let alone = &latest[POLICIES..];
        let Some(best) = best_alone(alone) else { return };
        self.fallback = fallback(alone, best);
        if events >= SEARCH_MAX {
            self.rollout.find(&spec.rollout, best);
        }
    }

    /// What is mixed into the core where the learner itself mixes in a share of uniform exploration.
    pub fn floor(&self, spec: &WorthSpec, exploration: f64) -> Floor {
        let mut distribution = uniform(self.earned.len());
        if !spec.rollout.has_control() {
            return Floor { share: exploration, distribution };
        }
        let share = self.rollout.share(&spec.rollout);
        let floor = 1.0 - share * (1.0 - exploration);
        let control = |m: usize, alike: f64| match self.rollout.incumbent() {
            Some(incumbent) => f64::from(u8::from(m == incumbent)),
            None => self.fallback.get(m).copied().unwrap_or(alike),
        };
        for (m, p) in distribution.iter_mut().enumerate() {
            *p = (share * exploration * *p + (1.0 - share) * control(m, *p)) / floor;
        }
        Floor { share: floor, distribution }
    }

    /// The stage of the rollout, and the share of the traffic that follows the policy.
    pub fn rollout(&self, spec: &WorthSpec, models: &[ModelName]) -> RolloutView {
        self.rollout.view(&spec.rollout, spec.alpha, models)
    }

    /// What the judged examples tell of a learner with this algorithm; none if there are none.
    pub fn view(&self, spec: &WorthSpec, algorithm: &str, models: &[ModelName]) -> Option<WorthView> {
        let candidates = ["logged policy".to_owned(), configured(algorithm), "uniform".to_owned()];
        let names = Names { candidates: &candidates, models };
        let assessed = Assessments::of(&self.judge, &self.ratio, &names, spec.alpha)?;
        Some(WorthView {
            models: models.to_vec(),
            alpha: spec.alpha,
            verdicts: assessed.comparisons(&names),
            all: Verdict::of(&assessed.all),
            latest: assessed.latest.as_ref().map(Verdict::of),
            contradiction: assessed.contradiction,
        })
    }

    /// The sample-ratio test of all examples, evaluated or not.
    pub fn sample_ratio(&self) -> &SampleRatio {
        &self.ratio
    }

    /// Adds the sample-ratio test of another shard. Its estimates are of another policy.
    pub fn add(&mut self, other: &Self) {
        self.ratio.add(&other.ratio);
    }
}

/// Name of the configured learner's policy in verdicts.
pub fn configured(algorithm: &str) -> String {
    format!("{algorithm} (configured)")
}

/// Whether these are probabilities that sum to 1, to rounding.
fn is_distribution(p: &[f64]) -> bool {
    p.iter().all(|p| (0.0..=1.0).contains(p)) && (p.iter().sum::<f64>() - 1.0).abs() <= 1e-9
}

/// The fallback mix: a part for the model that seems best alone, the rest for all. The surer it is that a model is not the best alone, the
/// less it is played.
fn fallback(alone: &[Estimate], best: usize) -> Vec<f64> {
    let Some(values) = cautious_values(alone) else { return Vec::new() };
    // A few examples that happen to agree deviate by nothing: one more could be off by all there is.
    let deviation = |one: &Estimate| one.deviation().hypot(1.0 / (one.effective() + 1.0));
    let top = deviation(&alone[best]);
    let weight = |(one, value): (&Estimate, &f64)| {
        // Without examples the deviation is infinite.
        let z = (values[best] - value).max(0.0) / top.hypot(deviation(one));
        libm::erfc(z * std::f64::consts::FRAC_1_SQRT_2).max(FALLBACK_MIN)
    };
    let mut mix: Vec<f64> = alone.iter().zip(&values).map(weight).collect();
    let sum: f64 = mix.iter().sum();
    mix.iter_mut().for_each(|weight| *weight *= (1.0 - BEST_SHARE) / sum);
    mix[best] += BEST_SHARE;
    mix
}

/// The part of the fallback mix that only the model which seems best gets.
const BEST_SHARE: f64 = 0.5;

/// The least weight of a model in the fallback mix, relative to the best. A model that is hardly ever played has importance
/// weights so large that a single example would outweigh all others of the model, for as long as the window is.
const FALLBACK_MIN: f64 = 1.0 / 400.0;

impl Verdict {
    fn of(assessment: &Assessment) -> Self {
        let (policies, lifts) = (&assessment.candidates, &assessment.lifts);
        Self {
            examples: assessment.examples,
            logged: policies[LOGGED],
            policy: policies[LEARNED],
            uniform: policies[UNIFORM],
            alone: assessment.alone.clone(),
            best_alone: assessment.best_alone,
            logged_lift: lifts[LOGGED],
            policy_lift: lifts[LEARNED],
            poor_overlap: assessment.is_poor(&policies[LEARNED]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::evaluate::rollout::Stage;
    use crate::event::Query;
    use rand::{RngExt, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    const CANARY: RolloutSpec =
        RolloutSpec { stage: Stage::Canary, automatic: false, incumbent: Some(0), budget: 0.01 };

    fn spec(rollout: RolloutSpec) -> WorthSpec {
        WorthSpec { every: 1, window: 20_000, alpha: 0.05, rollout }
    }

    fn outlook(policy: &[f64]) -> Outlook<'_> {
        Outlook { policy, predicted: None, exploration: 0.0 }
    }

    /// Plays a policy that mostly takes the first model for queries of one kind and the second for the other; `rewards` are by
    /// kind and model.
    fn play(spec: &WorthSpec, rewards: [[f64; 2]; 2], examples: u64) -> Worth {
        let mut worth = Worth::new(spec, 2);
        let mut generator = ChaCha8Rng::seed_from_u64(5);
        for _ in 0..examples {
            let kind = usize::from(generator.random::<bool>());
            let core = [[0.95, 0.05], [0.05, 0.95]][kind];
            let Floor { share, distribution } = worth.floor(spec, 0.0);
            let p: Vec<f64> = core.iter().zip(&distribution).map(|(p, f)| (1.0 - share) * p + share * f).collect();
            assert!((p.iter().sum::<f64>() - 1.0).abs() < 1e-12, "{p:?}");
            let model = usize::from(generator.random::<f64>() >= p[0]);
            let reward = f64::from(u8::from(generator.random::<f64>() < rewards[kind][model]));
            let query = Query::new([1.0, 0.0]).unwrap();
            let example = Example::new(query, model, p, Some(core.to_vec()), reward).unwrap();
            worth.see(spec, &example, Some(outlook(&core)), &mut Scratch::default());
        }
        worth
    }

    const USEFUL: [[f64; 2]; 2] = [[0.8, 0.3], [0.3, 0.7]];

    #[test]
    fn a_policy_that_pays_gets_the_traffic_and_no_other() {
        let canary = spec(CANARY);
        let worth = play(&canary, USEFUL, 20_000);
        let floor = worth.floor(&canary, 0.0);
        assert!((floor.share - 0.05).abs() < 1e-12 && floor.distribution == [1.0, 0.0], "{floor:?}");
        let view = worth.view(&canary, "hpg", &["a", "b"].map(|name| ModelName::try_from(name).unwrap())).unwrap();
        let (lift, range) = (view.all.policy_lift, view.all.policy_lift.range.unwrap());
        assert!(range.low < 0.19 && 0.19 < range.high && (lift.value - 0.19).abs() < 0.03, "{lift:?}");
        assert_eq!((view.all.best_alone, view.all.examples), (0, 20_000));
        // The first model is better for every query: what routes half of them away from it costs.
        let worth = play(&canary, [[0.6, 0.3], [0.6, 0.3]], 20_000);
        let floor = worth.floor(&canary, 0.1);
        assert!(1.0 - floor.share < 0.1 && floor.distribution[0] > 0.99, "{floor:?}");
    }

    #[test]
    fn an_automatic_rollout_goes_through_the_stages_and_back() {
        let automatic = spec(RolloutSpec { stage: Stage::Shadow, automatic: true, ..CANARY });
        let stage = |worth: &Worth| worth.rollout(&automatic, &[]).stage;
        assert_eq!(stage(&play(&automatic, USEFUL, 200)), Stage::Shadow);
        assert_eq!(stage(&play(&automatic, USEFUL, 2_500)), Stage::Canary);
        let mut worth = play(&automatic, USEFUL, 40_000);
        assert_eq!((stage(&worth), worth.rollout.share(&CANARY)), (Stage::Full, 0.95));
        // From now on each query gets the wrong model.
        for i in 0..10_000 {
            let core = [0.5; 2];
            let Floor { share, distribution } = worth.floor(&automatic, 0.0);
            let p: Vec<f64> = distribution.iter().map(|f| (1.0 - share) * 0.5 + share * f).collect();
            let model = usize::from(i % 100 >= (100.0 * p[0]) as usize);
            let reward = f64::from(u8::from(model == 0));
            let example = Example::new(Query::new([1.0, 0.0]).unwrap(), model, p, Some(core.to_vec()), reward).unwrap();
            worth.see(&automatic, &example, Some(outlook(&core)), &mut Scratch::default());
        }
        assert!(stage(&worth) == Stage::Canary && worth.rollout.share(&CANARY) < 0.1, "{:?}", worth.rollout);
    }

    #[test]
    fn stages_without_a_budget() {
        let of = |stage| spec(RolloutSpec { stage, ..CANARY });
        let control = play(&of(Stage::Shadow), USEFUL, 1000).floor(&of(Stage::Shadow), 0.1);
        assert_eq!(control, Floor { share: 1.0, distribution: vec![1.0, 0.0] });
        for stage in [Stage::Observe, Stage::Full] {
            let floor = play(&of(stage), USEFUL, 1000).floor(&of(stage), 0.1);
            assert_eq!(floor, Floor { share: 0.1, distribution: vec![0.5; 2] });
        }
    }

    /// The search plays all models, then the one that it has found.
    #[test]
    fn without_an_incumbent_the_best_model_is_searched_for() {
        let searching = spec(RolloutSpec { incumbent: None, ..CANARY });
        let worth = play(&searching, [[0.5, 0.3], [0.4, 0.5]], 100);
        let floor = worth.floor(&searching, 0.0);
        assert!(floor.share == 1.0 && floor.distribution.iter().all(|p| *p > 0.2), "{floor:?}");
        let worth = play(&searching, [[0.6, 0.3], [0.6, 0.3]], SEARCH_MAX + SEARCH_EVERY);
        assert_eq!(worth.rollout.incumbent(), Some(0));
    }

    /// The router plays the policy more often than the propensities say: what looks like a lift permits nothing.
    #[test]
    fn a_rollout_holds_back_if_the_log_contradicts_its_propensities() {
        let spec = spec(CANARY);
        let models = ["a", "b"].map(|name| ModelName::try_from(name).unwrap());
        let mut worth = play(&spec, USEFUL, 20_000);
        assert!(worth.rollout.share(&CANARY) > 0.9);
        for i in 0..20_000 {
            let (kind, is_tried) = (i % 2, i % 5 == 0);
            let model = if is_tried { 1 - kind } else { kind };
            let reward = f64::from(u8::from(model == kind && i % 3 > 0));
            let query = Query::new([1.0, 0.0]).unwrap();
            // Model a is played half of the time.
            let example = Example::new(query, model, vec![0.1, 0.9], None, reward).unwrap();
            let core = [[0.95, 0.05], [0.05, 0.95]][kind];
            worth.see(&spec, &example, Some(outlook(&core)), &mut Scratch::default());
        }
        assert_eq!(worth.rollout.share(&CANARY), CANARY.budget);
        let view = worth.view(&spec, "hpg", &models).unwrap();
        assert!(matches!(view.contradiction, Some(Contradiction::SampleRatio(_))), "{:?}", view.contradiction);
        assert_eq!((view.all.policy.range, view.all.policy_lift.range), (None, None));
        assert!(view.verdicts.iter().all(|one| (one.lift, one.range) == (None, None)));
        let said = &view.verdicts[0].sentence;
        assert!(
            said.starts_with("no verdict: the log contradicts its propensities: ")
                && said.contains("learner.declared_propensities"),
            "{said}"
        );
        assert_eq!(Worth::restore(&spec, 2, worth.record()), Some(worth));
    }

    /// Four failures of a model say little of it, however much they agree.
    #[test]
    fn a_model_that_was_unlucky_at_first_is_tried_again() {
        let spec = spec(RolloutSpec { incumbent: None, ..CANARY });
        let mut worth = Worth::new(&spec, 2);
        for i in 0..64 {
            let (model, reward) = (usize::from(i % 16 != 0), f64::from(u8::from(i % 5 == 4)));
            let example = Example::new(Query::new([1.0]).unwrap(), model, vec![0.1, 0.9], None, reward).unwrap();
            worth.see(&spec, &example, Some(outlook(&[0.5; 2])), &mut Scratch::default());
        }
        assert_eq!(worth.earned[0], (0.0, 4));
        assert!(worth.fallback[0] > 0.2, "{:?}", worth.fallback);
    }

    #[test]
    fn goes_on_from_what_was_saved_and_from_nothing_else() {
        let same = spec(CANARY);
        let worth = play(&same, USEFUL, 3000);
        assert_eq!(Worth::restore(&same, 2, worth.record()), Some(worth.clone()));
        let shorter = Worth::restore(&WorthSpec { window: 100, ..same.clone() }, 2, worth.record()).unwrap();
        assert_eq!(
            shorter.view(&same, "hpg", &[]).map(|view| view.all),
            worth.view(&same, "hpg", &[]).map(|view| view.all)
        );
        assert_eq!(Worth::restore(&same, 3, worth.record()), None);
        let broken = PolicyValueRecord { fallback_mix: vec![2.0, -1.0], ..worth.record() };
        assert_eq!(Worth::restore(&same, 2, broken), None);
    }

    #[test]
    fn judges_every_nth_example() {
        let spec = WorthSpec { every: 3, ..spec(RolloutSpec::default()) };
        let mut worth = Worth::new(&spec, 2);
        for _ in 0..10 {
            let example = Example::new(Query::new([1.0]).unwrap(), 0, vec![0.9, 0.1], None, 1.0).unwrap();
            let outlook = worth.is_next_judged(&spec).then_some(outlook(&[0.5; 2]));
            worth.see(&spec, &example, outlook, &mut Scratch::default());
        }
        assert_eq!(worth.judge.events(), 4);
        let view = worth.view(&spec, "hpg", &[]).unwrap();
        assert_eq!(view.all.best_alone, 0, "the other was never played");
        let lift = view.all.logged_lift;
        assert!(lift.range.is_some_and(|range| (range.low..=range.high).contains(&lift.value)), "{lift:?}");
        assert_eq!(worth.floor(&spec, 0.1), Floor { share: 0.1, distribution: vec![0.5; 2] });
        assert!(!worth.is_next_judged(&WorthSpec { every: 0, ..spec }));
    }
}
