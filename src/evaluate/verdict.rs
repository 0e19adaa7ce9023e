//! What the estimates say about every policy: does it earn more than the best single model? Or does the log contradict its
//! propensities, so that nothing can be said?
//!
//! ```text
//! lift over any model b      the range of the lift over the best single model, whichever it is: the least bounds of all b
//! pays                       lower bound > 0
//! loses                      upper bound < 0
//! undecided                  otherwise
//! contradiction              models were not played as often as the propensities say (sample_ratio), or bounds cross
//! ```
//!
//! The candidates share alpha, so that all ranges of their lifts hold together with probability 1 - alpha, and so do those of the
//! values of all policies. So may the best candidate be chosen by its range. If the propensities are right, bounds cross only where
//! one of them is wrong.

use std::fmt;

use serde::Serialize;

use super::judge::{Crossing, Estimate, Judge, Range};
use super::sample_ratio::{ModelShare, SampleRatio};
use crate::event::ModelName;

/// What one policy would have earned.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Figures {
    /// The mean reward, weights made to sum to one.
    pub value: f64,
    /// By inverse propensities.
    pub inverse_propensity: f64,
    /// By predictions, corrected where they were wrong.
    pub doubly_robust: f64,
    /// Where the truth is; none if the log contradicts its propensities.
    pub range: Option<Range>,
    /// How many examples of its own the log is worth to it.
    pub effective_examples: f64,
}

/// How much more than the best single model.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Lift {
    /// The estimate, over the model that seems best alone.
    pub value: f64,
    /// Range of the lift over that model; none if the log contradicts its propensities.
    pub range: Option<Range>,
    /// Range of the lift over the best single model, whichever it is. Models that were hardly played make it wide.
    pub over_any: Option<Range>,
}

/// Names of the evaluated policies.
#[derive(Debug, Clone, Copy)]
pub struct Names<'a> {
    /// The candidates, in the order of their estimates.
    pub candidates: &'a [String],
    /// The models, which are evaluated alone after the candidates.
    pub models: &'a [ModelName],
}

/// What a stretch of examples says about every policy.
#[derive(Debug, Clone, PartialEq)]
pub struct Assessment {
    /// Examples of the stretch.
    pub examples: u64,
    /// Of the candidates.
    pub candidates: Vec<Figures>,
    /// Of every model alone.
    pub alone: Vec<Figures>,
    /// The model that seems to earn the most alone.
    pub best_alone: usize,
    /// Of each candidate.
    pub lifts: Vec<Lift>,
    /// Bounds that cross.
    crossing: Option<Contradiction>,
}

/// The assessments of all examples and of the latest ones. They agree on whether the log contradicts its propensities.
#[derive(Debug, Clone, PartialEq)]
pub struct Assessments {
    /// By all examples.
    pub all: Assessment,
    /// By the latest of them.
    pub latest: Option<Assessment>,
    /// Why nothing can be said; the ranges are absent then.
    pub contradiction: Option<Contradiction>,
}

/// How a log contradicts its propensities.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Contradiction {
    /// Models were not played as often as their propensities say; this one is furthest off.
    SampleRatio(ModelShare),
    /// The lower bound of a figure exceeds the upper one.
    Crossing {
        /// The policy.
        policy: String,
        /// `value` or `lift`.
        figure: &'static str,
        /// Lower bound.
        low: f64,
        /// Upper bound.
        high: f64,
    },
}

/// Whether a candidate beats the best single model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Finding {
    /// It earns more.
    Pays,
    /// Not known yet.
    Undecided,
    /// It earns less.
    Loses,
    /// The log contradicts its propensities.
    Contradiction,
}

/// A candidate compared with the best single model.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Comparison {
    /// Name of the candidate.
    pub policy: String,
    /// One plain sentence.
    pub sentence: String,
    /// Whether it pays.
    pub result: Finding,
    /// Estimated lift; none if the log contradicts its propensities.
    pub lift: Option<f64>,
    /// Range of the lift over the best single model, whichever it is.
    pub range: Option<Range>,
}

/// Below this share of the examples an estimate is worth little.
pub const EFFECTIVE_MIN: f64 = 0.01;

impl Names<'_> {
    fn of(&self, policy: usize) -> String {
        match self.candidates.get(policy) {
            Some(name) => name.clone(),
            None => self.alone(policy - self.candidates.len()),
        }
    }

    /// The policy that always plays one model.
    pub fn alone(&self, model: usize) -> String {
        self.models.get(model).map_or_else(|| format!("always model {model}"), |name| format!("always {name}"))
    }
}

impl Assessments {
    /// Assesses what was judged; none if nothing was.
    pub fn of(judge: &Judge, ratio: &SampleRatio, names: &Names, alpha: f64) -> Option<Self> {
        let (latest, number) = judge.latest();
        let mut all = Assessment::of(judge.all(), judge.events(), names, alpha)?;
        let mut latest = Assessment::of(&latest, number, names, judge.latest_alpha(alpha));
        let crossing = || latest.as_ref().and_then(|latest| latest.crossing.clone());
        let contradiction =
            Contradiction::of_shares(ratio, names.models, alpha).or_else(|| all.crossing.clone()).or_else(crossing);
        if contradiction.is_some() {
            all.withdraw_ranges();
            latest.iter_mut().for_each(Assessment::withdraw_ranges);
        }
        Some(Self { all, latest, contradiction })
    }

    /// Every candidate compared with the best single model over all examples, best first.
    pub fn comparisons(&self, names: &Names) -> Vec<Comparison> {
        let mut all: Vec<Comparison> = match &self.contradiction {
            Some(contradiction) => names.candidates.iter().map(|name| contradiction.comparison(name)).collect(),
            None => (0..names.candidates.len()).map(|i| self.all.comparison(i, names)).collect(),
        };
        all.sort_by(|a, b| a.result.cmp(&b.result).then(b.lift.unwrap_or(0.0).total_cmp(&a.lift.unwrap_or(0.0))));
        all
    }
}

impl Assessment {
    fn of(estimates: &[Estimate], examples: u64, names: &Names, alpha: f64) -> Option<Self> {
        let models = estimates.iter().filter(|estimate| !estimate.is_compared()).count();
        let (candidates, alone) = estimates.split_at(estimates.len() - models);
        let best = best_alone(alone).filter(|_| examples > 0)?;
        let mut crossing = None;
        let mut range = |policy: usize, figure: &'static str, bounds: Result<Range, Crossing>| match bounds {
            Ok(range) => Some(range),
            Err(Crossing { low, high }) => {
                crossing.get_or_insert_with(|| Contradiction::Crossing { policy: names.of(policy), figure, low, high });
                None
            }
        };
        let each = alpha / estimates.len() as f64;
        let figures: Vec<Figures> = (estimates.iter().enumerate())
            .map(|(i, estimate)| Figures::of(estimate, range(i, "value", estimate.range(each))))
            .collect();
        let each = alpha / candidates.len().max(1) as f64;
        let lift = |(i, estimate): (usize, &Estimate)| {
            let over_best = range(i, "lift", estimate.lift_over(best, each));
            let over_any = range(i, "lift", estimate.lift_range(each));
            let value = estimate.lift_estimate(best);
            Lift { value: over_best.map_or(value, |range| range.nearest(value)), range: over_best, over_any }
        };
        let lifts = candidates.iter().enumerate().map(lift).collect();
        let (candidates, alone) = figures.split_at(candidates.len());
        let (candidates, alone) = (candidates.to_vec(), alone.to_vec());
        Some(Self { examples, candidates, alone, best_alone: best, lifts, crossing })
    }

    /// Whether the examples hardly say anything of a policy.
    pub fn is_poor(&self, figures: &Figures) -> bool {
        figures.effective_examples < EFFECTIVE_MIN * self.examples as f64
    }

    fn withdraw_ranges(&mut self) {
        self.candidates.iter_mut().chain(&mut self.alone).for_each(|figures| figures.range = None);
        self.lifts.iter_mut().for_each(|lift| (lift.range, lift.over_any) = (None, None));
    }

    fn comparison(&self, candidate: usize, names: &Names) -> Comparison {
        let (policy, best) = (names.of(candidate), names.alone(self.best_alone));
        let Lift { value, range, over_any } = self.lifts[candidate];
        let lift = over_any.map_or(value, |range| range.nearest(value));
        let result = match over_any {
            Some(range) if range.low > 0.0 => Finding::Pays,
            Some(range) if range.high < 0.0 => Finding::Loses,
            _ => Finding::Undecided,
        };
        let shown = |range: Option<Range>| {
            range.map_or_else(|| "none".to_owned(), |Range { low, high }| format!("{low:+.4} to {high:+.4}"))
        };
        let more = if lift < 0.0 { "less" } else { "more" };
        let earns = format!("{policy} earns {:.4} {more} per request than {best}, the best single model", lift.abs());
        let is_above_best = range.is_some_and(|range| range.low > 0.0);
        let mut sentence = match result {
            Finding::Pays => format!("{earns} (range {}): routing pays.", shown(over_any)),
            Finding::Loses => format!("{earns} (range {}): routing does not pay.", shown(over_any)),
            _ if is_above_best => format!(
                "{earns} so far (range {}), but another model may earn more: it was played too rarely to tell (range over any \
                 model {}): undecided.",
                shown(range),
                shown(over_any)
            ),
            _ => format!(
                "{earns} so far, but the range {} includes 0: undecided; more examples will narrow it.",
                shown(over_any)
            ),
        };
        let figures = &self.candidates[candidate];
        if self.is_poor(figures) {
            let (effective, examples) = (figures.effective_examples, self.examples);
            sentence +=
                &format!(" The log says little about it: only {effective:.0} of {examples} examples are effective.");
        }
        Comparison { policy, sentence, result, lift: Some(lift), range: over_any }
    }
}

impl Figures {
    fn of(estimate: &Estimate, range: Option<Range>) -> Self {
        let value = estimate.self_normalised();
        Self {
            value: range.map_or(value, |range| range.nearest(value)),
            inverse_propensity: estimate.inverse_propensity(),
            doubly_robust: estimate.doubly_robust(),
            range,
            effective_examples: estimate.effective(),
        }
    }
}

impl Contradiction {
    /// What the sample-ratio test finds, if it finds a mismatch.
    fn of_shares(ratio: &SampleRatio, models: &[ModelName], alpha: f64) -> Option<Self> {
        let view = ratio.is_mismatch(alpha).then(|| ratio.view(models, alpha))?;
        // Without names of the models nobody reads it.
        let nameless = ModelShare { model: String::new(), played: 0.0, expected: 0.0 };
        Some(Self::SampleRatio(view.worst().cloned().unwrap_or(nameless)))
    }

    /// In place of a verdict.
    pub fn sentence(&self) -> String {
        format!("no verdict: {self}; {REMEDY}.")
    }

    fn comparison(&self, policy: &str) -> Comparison {
        let (policy, sentence) = (policy.to_owned(), self.sentence());
        Comparison { policy, sentence, result: Finding::Contradiction, lift: None, range: None }
    }
}

/// What to do about propensities that are wrong.
const REMEDY: &str = "declare the split in learner.declared_propensities, or log the propensities that models were drawn with \
                      (learner.missing_propensities says what is assumed without them); shares also shift where queries without a \
                      reward are dropped (join.on_missing = \"drop\")";

impl fmt::Display for Contradiction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the log contradicts its propensities: ")?;
        match self {
            Self::SampleRatio(share) => share.fmt(f),
            Self::Crossing { policy, figure, low, high } => {
                write!(f, "the lower bound of the {figure} of {policy}, {low:.4}, exceeds the upper bound, {high:.4}")
            }
        }
    }
}

/// The model that earned the most alone, of those that were played.
pub fn best_alone(alone: &[Estimate]) -> Option<usize> {
    let values = cautious_values(alone)?;
    let played = (0..alone.len()).filter(|m| alone[*m].effective() > 0.0);
    played.max_by(|a, b| values[*a].total_cmp(&values[*b]))
}

/// What each model earned alone. Those that were hardly played could have been lucky: they begin with a few examples of
/// what all earn.
pub fn cautious_values(alone: &[Estimate]) -> Option<Vec<f64>> {
    let known: f64 = alone.iter().map(Estimate::effective).sum();
    let mean = alone.iter().map(|one| one.effective() * one.self_normalised()).sum::<f64>() / known;
    let value =
        |one: &Estimate| (one.effective() * one.self_normalised() + CAUTION * mean) / (one.effective() + CAUTION);
    (known > 0.0).then(|| alone.iter().map(value).collect())
}

/// Examples of the mean that every model begins with.
const CAUTION: f64 = 20.0;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::eligible::Eligible;
    use crate::evaluate::judge::Logged;
    use rand::{RngExt, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    const RARE: f64 = 0.004;

    /// Two kinds of queries, each with a model that suits it, and a third model that is hardly ever played. Candidates: the
    /// wrong model, almost always the first, and the right one. The log says `said` of what was played evenly.
    fn assess(said: [f64; 3], examples: usize) -> (Assessments, Vec<Comparison>) {
        let models = ["a", "b", "c"].map(|name| ModelName::try_from(name).unwrap());
        let candidates = ["wrong", "nearly a", "right"].map(str::to_owned);
        let names = Names { candidates: &candidates, models: &models };
        let (mut judge, mut ratio) = (Judge::new(3, 3, 100_000), SampleRatio::new(3));
        let mut generator = ChaCha8Rng::seed_from_u64(2);
        for _ in 0..examples {
            let [kind, draw, luck]: [f64; 3] = generator.random();
            let kind = usize::from(kind < 0.45);
            let model = if draw < RARE { 2 } else { usize::from(draw < 0.5) };
            let reward = f64::from(u8::from(luck < if model == kind { 0.9 } else { 0.1 }));
            let [right, wrong] =
                [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]].map(|p| if kind == 0 { p } else { [p[1], p[0], p[2]] });
            judge.see(
                &Logged { propensities: &said, model, reward, predicted: &[0.4; 3], eligible: &Eligible::ALL },
                &[&wrong, &[0.97, 0.03, 0.0], &right],
            );
            ratio.see(&said, model);
        }
        let assessed = Assessments::of(&judge, &ratio, &names, 0.05).unwrap();
        let comparisons = assessed.comparisons(&names);
        (assessed, comparisons)
    }

    #[test]
    fn every_candidate_has_a_sentence_best_first() {
        let (assessed, comparisons) = assess([0.5, 0.5 - RARE, RARE], 4000);
        assert_eq!((assessed.contradiction, assessed.all.best_alone), (None, 0));
        let results: Vec<(&str, Finding)> = comparisons.iter().map(|one| (one.policy.as_str(), one.result)).collect();
        assert_eq!(
            results,
            [("right", Finding::Undecided), ("nearly a", Finding::Undecided), ("wrong", Finding::Loses)]
        );
        let [right, nearly, wrong] = [0, 1, 2].map(|i| comparisons[i].sentence.as_str());
        let always = "more per request than always a, the best single model so far (range +0.";
        assert!(right.starts_with("right earns 0.") && right.contains(always), "{right}");
        assert!(
            right.contains(
                "but another model may earn more: it was played too rarely to tell (range over any model -0."
            ),
            "{right}"
        );
        assert!(
            nearly.contains("so far, but the range -0.") && nearly.contains(" includes 0: undecided; more examples"),
            "{nearly}"
        );
        assert!(
            wrong.starts_with("wrong earns 0.")
                && wrong.contains(" less per request than always a, ")
                && wrong.ends_with("): routing does not pay."),
            "{wrong}"
        );
        // Whatever is shown lies in its range.
        for one in &comparisons {
            assert!(one.range.is_some_and(|range| one.lift == Some(range.nearest(one.lift.unwrap()))), "{one:?}");
        }
    }

    #[test]
    fn a_log_that_contradicts_its_propensities_has_no_ranges() {
        let (assessed, comparisons) = assess([0.1, 0.5, 0.4], 2000);
        let Some(Contradiction::SampleRatio(share)) = &assessed.contradiction else { panic!("{assessed:?}") };
        assert_eq!((share.model.as_str(), share.expected > 0.09), ("a", true));
        let latest = assessed.latest.unwrap();
        for stretch in [&assessed.all, &latest] {
            assert!(stretch.candidates.iter().chain(&stretch.alone).all(|figures| figures.range.is_none()));
            assert!(stretch.lifts.iter().all(|lift| lift.range.is_none() && lift.over_any.is_none()));
        }
        assert!(
            comparisons
                .iter()
                .all(|one| one.result == Finding::Contradiction && one.sentence.starts_with("no verdict: "))
        );
    }

    /// Propensities that are right on average and wrong for each query: only the bounds can tell.
    #[test]
    fn bounds_that_cross_are_a_contradiction() {
        let models = ["a", "b"].map(|name| ModelName::try_from(name).unwrap());
        let candidates = ["routed".to_owned()];
        let names = Names { candidates: &candidates, models: &models };
        let (mut judge, mut ratio) = (Judge::new(2, 1, 1000), SampleRatio::new(2));
        for i in 0..2000 {
            let model = i % 2;
            let said = [[0.2, 0.8], [0.8, 0.2]][model];
            let played = [[1.0, 0.0], [0.0, 1.0]][model];
            judge.see(
                &Logged { propensities: &said, model, reward: 1.0, predicted: &[0.5; 2], eligible: &Eligible::ALL },
                &[&played],
            );
            ratio.see(&said, model);
        }
        assert!(!ratio.is_mismatch(0.05));
        let assessed = Assessments::of(&judge, &ratio, &names, 0.05).unwrap();
        let sentence = assessed.contradiction.as_ref().unwrap().sentence();
        assert!(matches!(assessed.contradiction, Some(Contradiction::Crossing { low, high, .. }) if low > high));
        let expected = "no verdict: the log contradicts its propensities: the lower bound of the value of routed, ";
        assert!(
            sentence.starts_with(expected) && sentence.contains("exceeds the upper bound, 1.0000; declare"),
            "{sentence}"
        );
    }
}
