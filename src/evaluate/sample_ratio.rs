//! A sample-ratio test: whether each model was played as often as the propensities of the log say. Valid at all times
//! simultaneously, however often one looks.
//!
//! ```text
//! p_t: distribution that the model m_t was drawn from, by the log      n_j: times that model j was played before      s_j: sum of p_j before
//! q_t(j) proportional to p_t(j) (n_j + 1) / (s_j + 1)      E = prod over t of q_t(m_t) / p_t(m_t)
//! P(at any time: E >= 1 / alpha) <= alpha if the log is right
//! ```
//!
//! Proof. q_t depends on the past and on p_t alone and sums to 1, so the mean of q_t(m) / p_t(m) over m drawn from p_t is 1. E is a
//! non-negative martingale that starts at 1, and Ville's inequality is the third line. If models are played more or less often than
//! p says, q learns how often they are played, and E grows exponentially.
//!
//! E itself is the evidence, not its running maximum. Where examples arrive in an order that depends on the model, for example because
//! clicks are learned before the end of the window and their absence is learned at its end, early shares are off, and so are all
//! estimates. E falls again as the missing examples arrive. The bound on false alarms holds for both.

use std::fmt;

use serde::Serialize;

use super::confidence::COUNT_MAX;
use crate::event::ModelName;
use crate::wire::records::learner::value::{SampleRatioRecord, SharesRecord};

/// Counts and evidence over the examples whose distribution is known.
#[derive(Debug, Clone, PartialEq)]
pub struct SampleRatio {
    /// n
    played: Vec<u64>,
    /// s
    expected: Vec<f64>,
    /// Natural logarithm of E.
    log_evidence: f64,
}

/// The result of the test.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SampleRatioView {
    /// Tested examples.
    pub examples: u64,
    /// Natural logarithm of the evidence against the propensities.
    pub log_evidence: f64,
    /// Whether the evidence reaches 1 / alpha: models were not played as often as the propensities say.
    pub mismatch: bool,
    /// The shares of each model.
    pub models: Vec<ModelShare>,
}

/// How often a model was played, and how often it should have been.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ModelShare {
    /// The model.
    pub model: String,
    /// Share of the tested examples that it was played for.
    pub played: f64,
    /// Mean of its propensities.
    pub expected: f64,
}

impl SampleRatio {
    /// No examples yet.
    pub fn new(models: usize) -> Self {
        Self { played: vec![0; models], expected: vec![0.0; models], log_evidence: 0.0 }
    }

    /// Adds an example. Propensities of models that were retired are absent, so the others may sum to less than 1.
    pub fn see(&mut self, propensities: &[f64], model: usize) {
        let tilt = |j: usize| (self.played[j] as f64 + PRIOR) / (self.expected[j] + PRIOR);
        let total: f64 = propensities.iter().sum();
        let mean = propensities.iter().enumerate().map(|(j, p)| p * tilt(j)).sum::<f64>() / total;
        self.log_evidence += (tilt(model) / mean).ln();
        self.expected.iter_mut().zip(propensities).for_each(|(sum, p)| *sum += p / total);
        self.played[model] += 1;
    }

    /// Adds the examples of another shard. The shards draw independently, so the product of their evidence is evidence.
    pub fn add(&mut self, other: &Self) {
        self.played.iter_mut().zip(&other.played).for_each(|(sum, n)| *sum += n);
        self.expected.iter_mut().zip(&other.expected).for_each(|(sum, s)| *sum += s);
        self.log_evidence += other.log_evidence;
    }

    /// Whether models were not played as often as the propensities say. If they were, the probability that this is ever
    /// true is at most `alpha`.
    pub fn is_mismatch(&self, alpha: f64) -> bool {
        self.log_evidence >= -alpha.ln()
    }

    /// Tested examples.
    pub fn examples(&self) -> u64 {
        self.played.iter().sum()
    }

    /// The result of the test.
    pub fn view(&self, models: &[ModelName], alpha: f64) -> SampleRatioView {
        let examples = self.examples();
        let share = |x: f64| x / examples.max(1) as f64;
        let of = |((model, n), s): ((&ModelName, &u64), &f64)| ModelShare {
            model: model.to_string(),
            played: share(*n as f64),
            expected: share(*s),
        };
        SampleRatioView {
            examples,
            log_evidence: self.log_evidence,
            mismatch: self.is_mismatch(alpha),
            models: models.iter().zip(&self.played).zip(&self.expected).map(of).collect(),
        }
    }

    /// The record of its state.
    pub fn record(&self) -> SampleRatioRecord {
        let shares = |(&played, &expected): (&u64, &f64)| SharesRecord { played, expected };
        SampleRatioRecord {
            models: self.played.iter().zip(&self.expected).map(shares).collect(),
            log_evidence: self.log_evidence,
        }
    }

    /// Restores a record; none if it does not fit.
    pub fn from_record(record: &SampleRatioRecord, models: usize) -> Option<Self> {
        let is_possible =
            |one: &SharesRecord| one.played <= COUNT_MAX && (0.0..=COUNT_MAX as f64).contains(&one.expected);
        let is_sound =
            record.models.len() == models && record.models.iter().all(is_possible) && record.log_evidence.is_finite();
        let restored = Self {
            played: record.models.iter().map(|one| one.played).collect(),
            expected: record.models.iter().map(|one| one.expected).collect(),
            log_evidence: record.log_evidence,
        };
        is_sound.then_some(restored)
    }
}

impl SampleRatioView {
    /// The model whose share differs most from its mean propensity, relative to the deviation of a share.
    pub fn worst(&self) -> Option<&ModelShare> {
        let distance = |one: &ModelShare| (one.played - one.expected).powi(2) / one.expected.max(f64::MIN_POSITIVE);
        self.models.iter().max_by(|a, b| distance(a).total_cmp(&distance(b)))
    }
}

impl fmt::Display for ModelShare {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { model, played, expected } = self;
        let percent = |share: &f64| 100.0 * share;
        write!(
            f,
            "{model} was played {:.1}% of the time, its mean propensity is {:.1}%",
            percent(played),
            percent(expected)
        )
    }
}

/// Examples that each model is thought to have been played for, and to have been expected for, before the first. They keep the
/// tilt of rare models small.
const PRIOR: f64 = 1.0;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use rand::{RngExt, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    /// The number of examples after which the test first rejects, if it does. Models are drawn from `played`, the log says
    /// `logged`; both may depend on the number of examples.
    fn rejected_after<const M: usize>(
        seed: u64,
        examples: usize,
        alpha: f64,
        played: impl Fn(usize) -> [f64; M],
        logged: impl Fn(usize) -> [f64; M],
    ) -> Option<usize> {
        let mut generator = ChaCha8Rng::seed_from_u64(seed);
        let mut ratio = SampleRatio::new(M);
        (1..=examples).find(|i| {
            let mut draw: f64 = generator.random();
            let p = played(*i);
            let model = p.iter().position(|p| {
                draw -= p;
                draw < 0.0
            });
            ratio.see(&logged(*i), model.unwrap_or(M - 1));
            ratio.is_mismatch(alpha)
        })
    }

    #[test]
    fn logs_that_are_right_are_rejected_as_rarely_as_it_says() {
        let moving = |i: usize| [[0.05, 0.15, 0.8], [0.6, 0.3, 0.1]][i / 7 % 2];
        for alpha in [0.05, 0.3] {
            let rejected = (0..400).filter(|seed| rejected_after(*seed, 500, alpha, moving, moving).is_some()).count();
            assert!(rejected as f64 <= alpha * 400.0, "{rejected} at {alpha}");
        }
        let rare = |_| [0.998, 0.001, 0.001];
        let rejected = (0..400).filter(|seed| rejected_after(*seed, 500, 0.1, rare, rare).is_some()).count();
        assert!(rejected <= 40, "{rejected}");
    }

    #[test]
    fn wrong_propensities_are_rejected_soon() {
        let uniform = |_| [1.0 / 3.0; 3];
        for seed in 0..50 {
            let after = rejected_after(seed, 2000, 0.05, |_| [0.5, 0.3, 0.2], uniform);
            assert!(after.is_some_and(|after| after < 1000), "{seed}: {after:?}");
            let after = rejected_after(seed, 20_000, 0.05, |_| [0.38, 0.33, 0.29], uniform);
            assert!(after.is_some(), "{seed}");
        }
    }

    /// Examples of one model come first, then all others: in the end all is as the log says.
    #[test]
    fn an_order_by_model_is_forgiven_at_the_end() {
        let mut ratio = SampleRatio::new(2);
        (0..100).for_each(|_| ratio.see(&[0.5, 0.5], 0));
        assert!(ratio.is_mismatch(1e-6));
        (0..100).for_each(|_| ratio.see(&[0.5, 0.5], 1));
        assert!(!ratio.is_mismatch(0.5), "{ratio:?}");
    }

    #[test]
    fn shards_add_up_and_the_worst_model_is_named() {
        let models = ["a", "b", "c"].map(|name| ModelName::try_from(name).unwrap());
        let (mut one, mut other) = (SampleRatio::new(3), SampleRatio::new(3));
        (0..40).for_each(|i| one.see(&[0.25, 0.25, 0.5], [0, 1, 1, 2][i % 4]));
        // The third was retired in the router: the others are drawn in proportion.
        (0..40).for_each(|i| other.see(&[0.25, 0.25, 0.0], i % 2));
        let evidence = one.log_evidence + other.log_evidence;
        one.add(&other);
        let view = one.view(&models, 0.05);
        assert_eq!((view.examples, view.log_evidence), (80, evidence));
        let worst = view.worst().unwrap();
        assert_eq!((worst.model.as_str(), worst.played, worst.expected), ("c", 0.125, 0.25));
        assert_eq!(SampleRatio::from_record(&one.record(), 3), Some(one.clone()));
        assert_eq!(SampleRatio::from_record(&one.record(), 2), None);
        let broken = SampleRatioRecord { log_evidence: f64::NAN, ..one.record() };
        assert_eq!(SampleRatio::from_record(&broken, 3), None);
    }

    proptest! {
        /// Whatever came before, the evidence does not grow on average if the log is right.
        #[test]
        fn the_evidence_is_a_martingale(
            weights in prop::array::uniform3(1e-6..1.0_f64),
            past in prop::collection::vec((0..3_usize, prop::array::uniform3(0.01..1.0_f64)), 0..30),
        ) {
            let sum: f64 = weights.iter().sum();
            let mut ratio = SampleRatio::new(3);
            past.iter().for_each(|(model, p)| ratio.see(p, *model));
            let grown = |model: usize| {
                let mut next = ratio.clone();
                next.see(&weights, model);
                (next.log_evidence - ratio.log_evidence).exp()
            };
            let mean: f64 = (0..3).map(|model| weights[model] / sum * grown(model)).sum();
            prop_assert!((mean - 1.0).abs() < 1e-9, "{mean}");
        }
    }
}
