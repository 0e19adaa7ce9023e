//! Has the world changed? A cumulative sum of how much larger errors are than they used to be.
//!
//! ```text
//! z = (e^2 - mean) / deviation, at most CLIP        s <- max(0, s + z - SLACK)        alarm when s > LIMIT
//! ```
//!
//! mean and deviation are those of e^2 since the last alarm. While a learner learns, errors fall and s stays at zero.
//! By Wald's bound a sum that drifts down by SLACK deviations an example reaches LIMIT once in about
//! exp(2 SLACK LIMIT) examples, 10^10 here; errors that grow by a third of a deviation reach it in some 430.

use crate::wire::records::learner::regression::DriftRecord;

/// Page's test on squared errors.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Drift {
    examples: u64,
    mean: f64,
    /// Sum of squared distances from the mean.
    spread: f64,
    sum: f64,
}

const SLACK: f64 = 0.15;
const LIMIT: f64 = 80.0;

/// Rare, large errors are no drift.
const CLIP: f64 = 3.0;

/// Examples before which nothing is known of how errors are.
const WARM_UP: u64 = 500;

impl Drift {
    /// Takes in the error of a prediction; true if errors have grown for good.
    pub fn see(&mut self, error: f64) -> bool {
        let square = error * error;
        let deviation = (self.spread / self.examples.max(1) as f64).sqrt();
        if self.examples >= WARM_UP && deviation > 0.0 {
            let z = ((square - self.mean) / deviation).min(CLIP);
            self.sum = (self.sum + z - SLACK).max(0.0);
            if self.sum > LIMIT {
                *self = Self::default();
                return true;
            }
        }
        self.examples += 1;
        let before = square - self.mean;
        self.mean += before / self.examples as f64;
        self.spread += before * (square - self.mean);
        false
    }

    /// The record of its state.
    pub fn record(&self) -> DriftRecord {
        let Self { examples, mean, spread, sum } = *self;
        DriftRecord { examples, mean, spread, sum }
    }

    /// Restores a record; none if it holds impossible values.
    pub fn from_record(record: &DriftRecord) -> Option<Self> {
        let &DriftRecord { examples, mean, spread, sum } = record;
        Some(Self { examples, mean, spread, sum }).filter(Self::is_sound)
    }

    fn is_sound(&self) -> bool {
        self.examples < u64::MAX / 2
            && (0.0..=1e30).contains(&self.mean)
            && (0.0..=1e60).contains(&self.spread)
            && (0.0..=LIMIT).contains(&self.sum)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::{RngExt, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    /// Examples until the first alarm, for predictions that are off by `before` until `change` and by `after` then.
    fn alarm(p: f64, before: f64, after: f64, change: u64, examples: u64) -> Option<u64> {
        let mut generator = ChaCha8Rng::seed_from_u64(9);
        let mut drift = Drift::default();
        (0..examples).find(|t| {
            let reward = f64::from(u8::from(generator.random::<f64>() < p));
            let off = if *t < change { before } else { after };
            let sign = if generator.random::<bool>() { 1.0 } else { -1.0 };
            let alarm = drift.see(reward - (p + sign * off));
            assert!(drift.is_sound());
            alarm
        })
    }

    #[test]
    fn does_not_cry_wolf() {
        for p in [0.5, 0.2, 0.01] {
            assert_eq!(alarm(p, 0.1, 0.1, 0, 300_000), None, "{p}");
            assert_eq!(alarm(p, 0.3, 0.05, 10_000, 100_000), None, "learning is no drift");
        }
    }

    #[test]
    fn notices_a_change_soon() {
        let at = alarm(0.5, 0.1, 0.5, 20_000, 30_000).unwrap();
        assert!((20_000..20_600).contains(&at), "{at}");
    }
}
