//! Whether routing pays, evaluated while a learner learns; and the guard, which limits the cost of learning until it pays.
//!
//! ```text
//! evaluated   the logged policy, the learner's current policy, uniform, every model alone                (judge)
//! played      p = share ((1 - f) core + f uniform) + (1 - share) fallback
//! incumbent   b: the model that seems best alone, as of the guard's last look
//! fallback    half for b, half for each model in proportion to erfc(z / sqrt 2), at least 1/400: z deviations behind b
//! share       guard_share; 1 - guard_control from when both hold:
//!             - the lower bound of the lift of the learner's policy over the incumbents of their time exceeds guard_margin
//!             - the estimated lift over b exceeds guard_margin by two deviations
//!             until the estimated lift over the incumbents is a deviation below guard_margin
//! ```
//!
//! Every example is evaluated before it is learned from. An example is compared with the incumbent of its time, which is known
//! before its reward: so the bound needs no correction for a choice among models, and as the incumbent is played the most, its
//! importance weights are small, also where several models are equally good and take turns. The bound holds for all windows of
//! the latest examples simultaneously: the probability that the guard ever releases a policy that earned less over its window
//! than the incumbents is at most `evaluate_alpha`. That is no bound for the best constant model: the incumbents may have been
//! worse, most of all in the beginning and where models are nearly tied. The second condition compares with the model that
//! seems best now, over the whole window. It is a test for a single look, whose error was measured and not proved.
//!
//! Until the release the policy costs `guard_share` of what it would cost alone. While several models may be the best, the
//! fallback mix plays all of them. After the release the control group keeps them in play, so that the guard can tell when
//! routing stops paying. It is so small that the bound widens again: to withdraw the policy the guard needs some evidence.

use serde::{Deserialize, Serialize};

use super::confidence::COUNT_MAX;
use super::judge::{Estimate, Judge, Logged};
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
    /// Limits the cost of learning until routing pays.
    pub guard: Option<GuardSpec>,
}

impl Default for WorthSpec {
    fn default() -> Self {
        Self { every: 1, window: 50_000, alpha: 0.05, guard: None }
    }
}

/// Checked settings of the guard.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct GuardSpec {
    /// Share of the traffic that follows the learner's policy until it is known to pay.
    pub share: f64,
    /// Share of the traffic that follows the fallback mix afterwards.
    pub control: f64,
    /// Lift that the learner's policy must exceed.
    pub margin: f64,
}

/// The value of one learner's policy, as far as it is known, and the state of the guard.
#[derive(Debug, Clone, PartialEq)]
pub struct Worth {
    /// Examples, evaluated or not.
    seen: u64,
    judge: Judge,
    /// Per model the sum and the number of its rewards.
    earned: Vec<(f64, u64)>,
    /// The fallback mix that the guard plays beside the policy; empty before its first look, when all models are equal.
    fallback: Vec<f64>,
    /// The model that seemed best alone when the guard last looked.
    incumbent: Option<usize>,
    /// Whether the learner's policy is known to pay.
    pays: bool,
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

/// The guard looks after so many judged examples, at first more often.
const LOOK_EVERY: u64 = 256;

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
    /// The learner's own policy, whatever the guard made of it.
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
    /// Whether the guard holds the policy back; none where there is no guard.
    pub held_back: Option<bool>,
    /// How the log contradicts its propensities, if it does; there are no ranges then, and the guard releases nothing.
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
        Self { seen: 0, judge, earned, fallback: Vec::new(), incumbent: None, pays: false, ratio }
    }

    /// The record of its state.
    pub fn record(&self) -> PolicyValueRecord {
        let rewards = |&(sum, count): &(f64, u64)| ModelRewardsRecord { sum, count };
        PolicyValueRecord {
            examples: self.seen,
            evaluation: self.judge.record(),
            rewards: self.earned.iter().map(rewards).collect(),
            fallback_mix: self.fallback.clone(),
            incumbent: self.incumbent.map(|model| model as u64),
            pays: self.pays,
            sample_ratio: self.ratio.record(),
        }
    }

    /// Restores a record; none if it does not fit.
    pub fn restore(spec: &WorthSpec, models: usize, record: PolicyValueRecord) -> Option<Self> {
        let PolicyValueRecord { examples: seen, evaluation, rewards, fallback_mix: fallback, incumbent, pays, .. } =
            record;
        let ratio = SampleRatio::from_record(&record.sample_ratio, models)?;
        let incumbent = incumbent.map(|model| model as usize);
        let is_possible =
            |one: &ModelRewardsRecord| one.count <= COUNT_MAX && (0.0..=one.count as f64).contains(&one.sum);
        let is_mix = fallback.is_empty() || (fallback.len() == models && is_distribution(&fallback));
        let is_sound = rewards.len() == models
            && rewards.iter().all(is_possible)
            && is_mix
            && seen <= COUNT_MAX
            && incumbent.is_none_or(|model| model < models);
        let mut judge = Judge::from_record(&evaluation, models, POLICIES)?;
        judge.set_window(spec.window);
        let earned = rewards.iter().map(|one| (one.sum, one.count)).collect();
        is_sound.then_some(Self { seen, judge, earned, fallback, incumbent, pays, ratio })
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
            self.judge(example, reward, outlook, scratch);
            let events = self.judge.events();
            let looks = events.is_multiple_of(LOOK_EVERY) || events.is_power_of_two();
            if let Some(guard) = spec.guard.filter(|_| looks) {
                self.look(spec, &guard);
            }
        }
        let earned = &mut self.earned[example.model()];
        *earned = (earned.0 + reward, earned.1 + 1);
    }

    fn judge(&mut self, example: &Example, reward: f64, outlook: Outlook, scratch: &mut Scratch) {
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
        (played[LOGGED], played[LEARNED], played[UNIFORM]) = (example.propensities(), outlook.policy, alike);
        self.judge.see(&event, &played, self.incumbent);
    }

    /// Predicts the reward of each model without looking at the query: its mean, cautious while it has few examples.
    fn predict(&self, predicted: &mut Vec<f64>) {
        let (sum, number) = self.earned.iter().fold((0.0, 0), |all, one| (all.0 + one.0, all.1 + one.1));
        let mean = if number > 0 { sum / number as f64 } else { 0.5 };
        predicted.clear();
        predicted.extend(self.earned.iter().map(|(sum, number)| (sum + mean) / (*number as f64 + 1.0)));
    }

    fn look(&mut self, spec: &WorthSpec, guard: &GuardSpec) {
        let (latest, _) = self.judge.latest();
        let alone = &latest[POLICIES..];
        let Some(incumbent) = best_alone(alone) else { return };
        self.fallback = fallback(alone, incumbent);
        self.incumbent = Some(incumbent);
        let learned = &latest[LEARNED];
        self.pays = if Assessments::of(&self.judge, &self.ratio, &NAMELESS, spec.alpha)
            .is_some_and(|assessed| assessed.contradiction.is_some())
        {
            // Estimates with wrong propensities show nothing.
            false
        } else if self.pays {
            // The control group is too small to keep the bound up.
            let (lift, deviation) = learned.lift_over_incumbents();
            lift + deviation > guard.margin
        } else {
            let (lift, deviation) = learned.lift_estimate(incumbent);
            lift - LIFT_DEVIATIONS * deviation > guard.margin
                && self.judge.is_incumbent_beaten(LEARNED, guard.margin, spec.alpha)
        };
    }

    /// What is mixed into the core where the learner itself mixes in a share of uniform exploration.
    pub fn floor(&self, spec: &WorthSpec, exploration: f64) -> Floor {
        let mut distribution = uniform(self.earned.len());
        let Some(guard) = &spec.guard else { return Floor { share: exploration, distribution } };
        let share = if self.pays { 1.0 - guard.control } else { guard.share };
        let floor = 1.0 - share * (1.0 - exploration);
        if !self.fallback.is_empty() {
            let mix = |(p, other): (&mut f64, &f64)| *p = (share * exploration * *p + (1.0 - share) * other) / floor;
            distribution.iter_mut().zip(&self.fallback).for_each(mix);
        }
        Floor { share: floor, distribution }
    }

    /// What the judged examples tell of a learner with this algorithm; none if there are none.
    pub fn view(&self, spec: &WorthSpec, algorithm: &str, models: &[ModelName]) -> Option<WorthView> {
        let candidates = ["logged policy".to_owned(), configured(algorithm), "uniform".to_owned()];
        let names = Names { candidates: &candidates, models };
        let assessed = Assessments::of(&self.judge, &self.ratio, &names, spec.alpha)?;
        Some(WorthView {
            models: models.to_vec(),
            alpha: spec.alpha,
            held_back: spec.guard.map(|_| !self.pays),
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

/// Where only the guard looks.
const NAMELESS: Names = Names { candidates: &[], models: &[] };

/// Whether these are probabilities that sum to 1, to rounding.
fn is_distribution(p: &[f64]) -> bool {
    p.iter().all(|p| (0.0..=1.0).contains(p)) && (p.iter().sum::<f64>() - 1.0).abs() <= 1e-9
}

/// The fallback mix: a part for the incumbent alone, the rest for all. The surer it is that a model is not the best alone, the
/// less it is played.
fn fallback(alone: &[Estimate], incumbent: usize) -> Vec<f64> {
    let Some(values) = cautious_values(alone) else { return Vec::new() };
    // A few examples that happen to agree deviate by nothing: one more could be off by all there is.
    let deviation = |one: &Estimate| one.deviation().hypot(1.0 / (one.effective() + 1.0));
    let top = deviation(&alone[incumbent]);
    let weight = |(one, value): (&Estimate, &f64)| {
        // Without examples the deviation is infinite.
        let z = (values[incumbent] - value).max(0.0) / top.hypot(deviation(one));
        libm::erfc(z * std::f64::consts::FRAC_1_SQRT_2).max(FALLBACK_MIN)
    };
    let mut mix: Vec<f64> = alone.iter().zip(&values).map(weight).collect();
    let sum: f64 = mix.iter().sum();
    mix.iter_mut().for_each(|weight| *weight *= (1.0 - INCUMBENT_SHARE) / sum);
    mix[incumbent] += INCUMBENT_SHARE;
    mix
}

/// By how many deviations the estimated lift over the incumbent must exceed the margin. With 0 the guard released a policy that
/// earns as much as the best constant model in up to 26% of simulated runs where models are nearly tied, since the incumbents
/// were worse than that model; with 1.5 in up to 6.5%, with 2 in up to 3.5%.
const LIFT_DEVIATIONS: f64 = 2.0;

/// The part of the fallback mix that only the incumbent gets. Where several models are equally good it keeps the importance
/// weights of the incumbent small, which the guard compares with.
const INCUMBENT_SHARE: f64 = 0.5;

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
    use crate::event::Query;
    use rand::{RngExt, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    const GUARD: GuardSpec = GuardSpec { share: 0.2, control: 0.05, margin: 0.0 };

    fn spec(guard: Option<GuardSpec>) -> WorthSpec {
        WorthSpec { every: 1, window: 20_000, alpha: 0.05, guard }
    }

    /// Plays a policy that always takes the first model for queries of one kind and the second for the other, through the
    /// guard; `rewards` are by kind and model. How often the guard held it back in the second half.
    fn play(rewards: [[f64; 2]; 2], examples: u64) -> (Worth, f64) {
        let spec = spec(Some(GUARD));
        let mut worth = Worth::new(&spec, 2);
        let mut generator = ChaCha8Rng::seed_from_u64(5);
        let mut held = 0;
        for i in 0..examples {
            let kind = usize::from(generator.random::<bool>());
            let core = [[0.95, 0.05], [0.05, 0.95]][kind];
            let Floor { share, distribution } = worth.floor(&spec, 0.0);
            let p: Vec<f64> = core.iter().zip(&distribution).map(|(p, f)| (1.0 - share) * p + share * f).collect();
            assert!((p.iter().sum::<f64>() - 1.0).abs() < 1e-12 && p.iter().all(|p| *p > 0.0), "{p:?}");
            let model = usize::from(generator.random::<f64>() >= p[0]);
            let reward = f64::from(u8::from(generator.random::<f64>() < rewards[kind][model]));
            let query = Query::new([1.0, 0.0]).unwrap();
            let example = Example::new(query, model, p, Some(core.to_vec()), reward).unwrap();
            worth.see(&spec, &example, Some(Outlook { policy: &core, predicted: None }), &mut Scratch::default());
            held += u64::from(i >= examples / 2 && !worth.pays);
        }
        (worth, held as f64 / (examples / 2) as f64)
    }

    #[test]
    fn the_guard_lets_go_of_a_policy_that_pays_and_of_no_other() {
        let (worth, held) = play([[0.8, 0.3], [0.3, 0.7]], 20_000);
        assert!(worth.pays && held < 0.2, "{held}");
        let floor = worth.floor(&spec(Some(GUARD)), 0.0);
        assert!((floor.share - 0.05).abs() < 1e-12 && floor.distribution[0] > 0.4, "{floor:?}");
        let view =
            worth.view(&spec(Some(GUARD)), "hpg", &["a", "b"].map(|name| ModelName::try_from(name).unwrap())).unwrap();
        let (lift, range) = (view.all.policy_lift, view.all.policy_lift.range.unwrap());
        assert!(range.low < 0.19 && 0.19 < range.high && (lift.value - 0.19).abs() < 0.03, "{lift:?}");
        assert_eq!((view.all.best_alone, view.held_back, view.all.examples), (0, Some(false), 20_000));
        // The first model is better for every query: what routes half of them away from it costs.
        let (worth, held) = play([[0.6, 0.3], [0.6, 0.3]], 20_000);
        assert!(!worth.pays && held == 1.0);
        let floor = worth.floor(&spec(Some(GUARD)), 0.1);
        let best = floor.share * floor.distribution[0] - 0.2 * 0.1 / 2.0;
        assert!((best - 0.8).abs() < 3e-3 && (floor.share - (1.0 - 0.2 * 0.9)).abs() < 1e-12, "{floor:?}");
    }

    /// The router plays the policy more often than the propensities say. What looks like a lift releases nothing, a release that
    /// came before is withdrawn, and there is no range.
    #[test]
    fn the_guard_releases_nothing_if_the_log_contradicts_its_propensities() {
        let spec = spec(Some(GUARD));
        let models = ["a", "b"].map(|name| ModelName::try_from(name).unwrap());
        let (mut worth, _) = play([[0.8, 0.3], [0.3, 0.7]], 20_000);
        assert!(worth.pays);
        for i in 0..20_000 {
            let (kind, is_tried) = (i % 2, i % 5 == 0);
            let model = if is_tried { 1 - kind } else { kind };
            let reward = f64::from(u8::from(model == kind && i % 3 > 0));
            let query = Query::new([1.0, 0.0]).unwrap();
            // Model a is played half of the time.
            let example = Example::new(query, model, vec![0.1, 0.9], None, reward).unwrap();
            let core = [[0.95, 0.05], [0.05, 0.95]][kind];
            worth.see(&spec, &example, Some(Outlook { policy: &core, predicted: None }), &mut Scratch::default());
        }
        assert!(!worth.pays);
        let view = worth.view(&spec, "hpg", &models).unwrap();
        assert!(matches!(view.contradiction, Some(Contradiction::SampleRatio(_))), "{:?}", view.contradiction);
        assert_eq!((view.held_back, view.all.policy.range, view.all.policy_lift.range), (Some(true), None, None));
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
        let spec = spec(Some(GUARD));
        let mut worth = Worth::new(&spec, 2);
        for i in 0..64 {
            let (model, reward) = (usize::from(i % 16 != 0), f64::from(u8::from(i % 5 == 4)));
            let example = Example::new(Query::new([1.0]).unwrap(), model, vec![0.1, 0.9], None, reward).unwrap();
            worth.see(&spec, &example, Some(Outlook { policy: &[0.5; 2], predicted: None }), &mut Scratch::default());
        }
        assert_eq!(worth.earned[0], (0.0, 4));
        assert!(worth.fallback[0] > 0.2, "{:?}", worth.fallback);
    }

    #[test]
    fn goes_on_from_what_was_saved_and_from_nothing_else() {
        let (worth, _) = play([[0.8, 0.3], [0.3, 0.7]], 3000);
        let same = spec(Some(GUARD));
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
        let spec = WorthSpec { every: 3, ..spec(None) };
        let mut worth = Worth::new(&spec, 2);
        for _ in 0..10 {
            let example = Example::new(Query::new([1.0]).unwrap(), 0, vec![0.9, 0.1], None, 1.0).unwrap();
            let outlook = worth.is_next_judged(&spec).then_some(Outlook { policy: &[0.5; 2], predicted: None });
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
