//! Quantiles of times, in bounded memory: counts by the logarithm of the time, to within 2%.

use std::collections::BTreeMap;

/// Times so far.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Quantiles {
    counts: BTreeMap<i32, u64>,
}

/// Logarithm of the ratio of two neighbouring times.
const STEP: f64 = 0.02;

impl Quantiles {
    /// Adds a time. All below a microsecond are the same.
    pub fn add(&mut self, seconds: f64) {
        *self.counts.entry((seconds.max(1e-6).ln() / STEP).round() as i32).or_default() += 1;
    }

    /// The time that this share is not above; none when there are no times.
    pub fn at(&self, share: f64) -> Option<f64> {
        let rank = (share * self.counts.values().sum::<u64>() as f64).ceil().max(1.0) as u64;
        let mut below = 0;
        let found = self.counts.iter().find(|(_, count)| {
            below += *count;
            below >= rank
        });
        found.map(|(step, _)| (f64::from(*step) * STEP).exp())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_those_of_the_times() {
        let mut quantiles = Quantiles::default();
        assert_eq!(quantiles.at(0.5), None);
        (1..=1000).rev().for_each(|ms| quantiles.add(f64::from(ms) / 1000.0));
        for share in [0.001, 0.5, 0.99, 1.0] {
            let found = quantiles.at(share).unwrap();
            assert!((found / share - 1.0).abs() < 0.0201, "{share}: {found}");
        }
        quantiles.add(0.0);
        assert!(quantiles.at(0.0).unwrap() < 1.1e-6);
    }
}
