//! How far predictions are to be trusted, beside a constant one.
//!
//! ```text
//! slope = sum (y - b)(s - b) / sum (s - b)^2, the past fading       a = clip(2 slope, 0, 1)
//! ```
//!
//! b: the mean of what was to be predicted; s: a prediction made before y was known. slope is the share of signal in what
//! s says beyond b. Where that is half or more, s is taken as it is. Where there is nothing to learn s is noise, a is 0,
//! and what is left is which model is best on the whole.

use crate::wire::records::learner::regression::{ConstantRecord, TrustRecord};

/// The share of a prediction that is believed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Trust {
    product: f64,
    square: f64,
}

/// What is left of the past after one example.
const KEEP: f64 = 1.0 - 1.0 / 5000.0;

/// Squared predictions that the first trust is worth.
const PRIOR: f64 = 1.0;

impl Default for Trust {
    /// Trusts what nothing is known against.
    fn default() -> Self {
        Self { product: PRIOR, square: PRIOR }
    }
}

impl Trust {
    /// What came, and what was predicted, both above the constant prediction.
    pub fn see(&mut self, came: f64, predicted: f64) {
        self.product = KEEP * self.product + came * predicted;
        self.square = KEEP * self.square + predicted * predicted;
    }

    /// a
    pub fn share(&self) -> f64 {
        if self.square > 0.0 { (2.0 * self.product / self.square).clamp(0.0, 1.0) } else { 1.0 }
    }

    /// The prediction as far as it is trusted, and for the rest the constant one.
    pub fn mix(&self, constant: f64, predicted: f64) -> f64 {
        constant + self.share() * (predicted - constant)
    }

    /// The record of its state.
    pub fn record(&self) -> TrustRecord {
        let Self { product, square } = *self;
        TrustRecord { product, square }
    }

    /// Restores a record; none if it holds impossible values.
    pub fn from_record(record: &TrustRecord) -> Option<Self> {
        let &TrustRecord { product, square } = record;
        Some(Self { product, square }).filter(Self::is_sound)
    }

    fn is_sound(&self) -> bool {
        self.product.abs() <= 1e30 && (0.0..=1e30).contains(&self.square)
    }
}

/// The mean of what a model earns above all, cautious while there is little of it.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Constant {
    sum: f64,
    weight: f64,
}

/// Examples of 0 that every mean begins with.
const CAUTION: f64 = 20.0;

impl Constant {
    /// Adds an example; `keep` is left of those before.
    pub fn add(&mut self, above: f64, keep: f64) {
        self.sum = keep * self.sum + above;
        self.weight = keep * self.weight + 1.0;
    }

    /// b
    pub fn mean(&self) -> f64 {
        self.sum / (self.weight + CAUTION)
    }

    /// The record of its state.
    pub fn record(&self) -> ConstantRecord {
        let Self { sum, weight } = *self;
        ConstantRecord { sum, weight }
    }

    /// Restores a record; none if it holds impossible values.
    pub fn from_record(record: &ConstantRecord) -> Option<Self> {
        let &ConstantRecord { sum, weight } = record;
        Some(Self { sum, weight }).filter(Self::is_sound)
    }

    fn is_sound(&self) -> bool {
        (0.0..=1e18).contains(&self.weight) && self.sum.abs() <= self.weight
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::{RngExt, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    #[test]
    fn trusts_what_proves_itself() {
        let share = |signal: f64, noise: f64| {
            let mut random = ChaCha8Rng::seed_from_u64(1);
            let mut trust = Trust::default();
            for _ in 0..20_000 {
                let [x, y, z]: [f64; 3] = random.random::<[f64; 3]>().map(|u| u - 0.5);
                trust.see(signal * x + y, signal * x + noise * z);
                assert!(trust.is_sound());
            }
            trust.share()
        };
        assert_eq!(share(1.0, 0.0), 1.0);
        assert!(share(1.0, 0.9) > 0.95);
        assert!(share(0.0, 1.0) < 0.1);
        // A quarter of it is signal: half is believed.
        assert!((share(1.0, 3_f64.sqrt()) - 0.5).abs() < 0.05);
    }

    #[test]
    fn a_mean_begins_with_caution() {
        let mut constant = Constant::default();
        assert_eq!(constant.mean(), 0.0);
        (0..20).for_each(|_| constant.add(0.4, 1.0));
        assert!((constant.mean() - 0.2).abs() < 1e-12 && constant.is_sound());
    }
}
