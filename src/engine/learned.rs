//! What the examples of a space were, in a few numbers: what [`crate::warnings`] needs besides the counts.

use crate::config::RewardSpec;
use crate::wire::records::counts::COUNT_MAX;
use crate::wire::records::space::LearnedRecord;

/// A summary of the examples of a space, since its models or `reward.range` last changed.
#[derive(Debug, Clone, PartialEq)]
pub struct Learned {
    /// The range of rewards.
    range: (f64, f64),
    /// Number of examples of each model.
    pub examples: Vec<u64>,
    /// Examples with a reward of their own; the others have the default.
    pub rewarded: u64,
    /// Those of them whose reward was outside the range.
    pub clipped: u64,
    /// Decisions of each model that failed.
    pub failures: Vec<u64>,
    /// Least and greatest reward of all examples, on the scale of 0..1. Absent before the first.
    extremes: Option<(f64, f64)>,
}

impl Learned {
    /// Of no examples.
    pub fn new(models: usize, spec: &RewardSpec) -> Self {
        let range = (spec.low, spec.high);
        let (examples, failures) = (vec![0; models], vec![0; models]);
        Self { range, examples, rewarded: 0, clipped: 0, failures, extremes: None }
    }

    /// Adds an example of a model with a reward as it was joined; returns the reward on the scale of 0..1, and whether it
    /// was clipped.
    pub fn add(&mut self, model: usize, reward: f64, is_default: bool, spec: &RewardSpec) -> (f64, bool) {
        let (unit, is_clipped) = (spec.unit(reward), !is_default && !spec.contains(reward));
        if let Some(examples) = self.examples.get_mut(model) {
            *examples += 1;
        }
        self.rewarded += u64::from(!is_default);
        self.clipped += u64::from(is_clipped);
        let (least, greatest) = self.extremes.unwrap_or((unit, unit));
        self.extremes = Some((least.min(unit), greatest.max(unit)));
        (unit, is_clipped)
    }

    /// Adds a decision whose model did not answer.
    pub fn add_failure(&mut self, model: usize) {
        if let Some(failures) = self.failures.get_mut(model) {
            *failures += 1;
        }
    }

    /// Number of examples.
    pub fn number(&self) -> u64 {
        self.examples.iter().sum()
    }

    /// The range of rewards.
    pub fn range(&self) -> (f64, f64) {
        self.range
    }

    /// The reward of every example, as logged and clipped, if all have the same.
    pub fn only_reward(&self) -> Option<f64> {
        let (low, high) = self.range;
        self.extremes.filter(|(least, greatest)| least == greatest).map(|(unit, _)| low + unit * (high - low))
    }

    /// As it is saved; `None` before the first example, so that a space without examples has one record whatever the range.
    pub(super) fn to_record(&self) -> Option<LearnedRecord> {
        let Self { range, ref examples, rewarded, clipped, ref failures, extremes } = *self;
        if extremes.is_none() && failures.iter().all(|n| *n == 0) {
            return None;
        }
        let (examples, failures) = (examples.clone(), failures.clone());
        Some(LearnedRecord { range, examples, rewarded, clipped, failures, extremes })
    }

    /// As it was saved, with the same models; starts over under another range. `None` if the record contradicts itself.
    pub(super) fn from_record(record: Option<LearnedRecord>, models: usize, spec: &RewardSpec) -> Option<Self> {
        let new = Self::new(models, spec);
        let Some(LearnedRecord { range, examples, rewarded, clipped, failures, extremes }) = record else {
            return Some(new);
        };
        // Wider than a count: damaged ones must not overflow.
        let number: u128 = examples.iter().copied().map(u128::from).sum();
        let is_sound = examples.len() == models
            && failures.len() == models
            && failures.iter().all(|n| *n <= COUNT_MAX)
            && (u128::from(extremes.is_some())..=u128::from(COUNT_MAX)).contains(&number)
            && (extremes.is_some() || number == 0)
            && u128::from(rewarded) <= number
            && clipped <= rewarded
            && extremes.is_none_or(|(least, greatest)| 0.0 <= least && least <= greatest && greatest <= 1.0);
        let saved = Self { range, examples, rewarded, clipped, failures, extremes };
        is_sound.then(|| if saved.range == new.range { saved } else { new })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SPEC: RewardSpec = RewardSpec { low: -1.0, high: 3.0, reject: false, failed: None };

    fn of(rewards: &[(usize, f64, bool)]) -> Learned {
        let mut learned = Learned::new(2, &SPEC);
        for &(model, reward, is_default) in rewards {
            learned.add(model, reward, is_default, &SPEC);
        }
        learned
    }

    #[test]
    fn examples_are_summed_up() {
        let mut learned = of(&[(0, 5.0, false), (1, 3.0, false)]);
        assert_eq!((learned.number(), learned.only_reward()), (2, Some(3.0)), "5 is clipped to 3");
        assert_eq!(learned.add(1, 1.0, false, &SPEC), (0.5, false));
        assert_eq!(learned.add(1, -9.0, true, &SPEC), (0.0, false), "a default is never counted as clipped");
        assert_eq!((learned.examples.as_slice(), learned.rewarded, learned.clipped), ([1, 3].as_slice(), 3, 1));
        assert_eq!(learned.only_reward(), None);
        assert_eq!((of(&[]).only_reward(), of(&[]).to_record()), (None, None));
    }

    #[test]
    fn a_record_restores_the_same_summary_or_is_refused() {
        let learned = of(&[(0, 5.0, false), (1, 2.0, false), (1, 2.0, true)]);
        let record = || learned.to_record().unwrap();
        assert_eq!(Learned::from_record(learned.to_record(), 2, &SPEC), Some(learned.clone()));
        assert_eq!(Learned::from_record(None, 2, &SPEC), Some(of(&[])));
        let wider = RewardSpec { high: 5.0, ..SPEC };
        assert_eq!(Learned::from_record(learned.to_record(), 2, &wider), Some(Learned::new(2, &wider)), "starts over");
        let damages: [fn(&mut LearnedRecord); 8] = [
            |record| record.examples.push(0),
            |record| record.examples = vec![0, 0],
            |record| record.examples = vec![u64::MAX, u64::MAX],
            |record| record.rewarded = 4,
            |record| record.clipped = 3,
            |record| record.extremes = Some((f64::NAN, 1.0)),
            |record| record.extremes = Some((1.5, 1.5)),
            |record| record.extremes = Some((0.75, 0.5)),
        ];
        for (i, damage) in damages.into_iter().enumerate() {
            let mut damaged = record();
            damage(&mut damaged);
            assert_eq!(Learned::from_record(Some(damaged), 2, &SPEC), None, "{i}");
        }
    }
}
