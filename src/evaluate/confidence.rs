//! A bound on a mean that holds at all times at once, however often one looks.
//!
//! ```text
//! x_i >= 0, mu_i its mean given the past, c_i in 0..1 a guess made before x_i is known
//! S = sum (x_i - mu_i)      V = sum (x_i - c_i)^2      psi(l) = -log(1 - l) - l
//! sum_k w_k exp(l_k S - psi(l_k) V) >= 1 / alpha   at any time: with probability alpha at the most
//! ```
//!
//! For y >= -1 and 0 <= l < 1: exp(l y - psi(l) y^2) <= 1 + l y (Fan, Grama and Liu 2015). With y = x - c the mean of
//! exp(l (x - mu) - psi(l) (x - c)^2) is therefore at most 1, so each exponential above is a non-negative
//! supermartingale that begins at 1, and so is their mixture; Ville's inequality is the third line (Howard et al. 2021).
//! Nothing bounds x from above, which is what weights need that may be large; and the mu_i may all differ, which is what
//! policies need that learn: the bound is on their mean.

use std::ops::AddAssign;

use crate::wire::records::learner::value::BoundRecord;

/// Sums over events; those of two stretches of events, added, are those of both.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Bounded {
    number: u64,
    sum: f64,
    variation: f64,
}

/// The most examples that a record may count: far beyond any stream, and sums of such counts do not overflow.
pub const COUNT_MAX: u64 = 1 << 53;

/// l_k = LARGEST / 2^k for k below RATES, all with the same weight.
const LARGEST: f64 = 0.5;
const RATES: usize = 18;

impl Bounded {
    /// Takes in x >= 0; `guess` was made before x was known.
    pub fn see(&mut self, x: f64, guess: f64) {
        debug_assert!(x >= 0.0);
        self.number += 1;
        self.sum += x;
        self.variation += (x - guess.clamp(0.0, 1.0)).powi(2);
    }

    /// How many there were.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Mean of x.
    pub fn mean(&self) -> f64 {
        if self.number > 0 { self.sum / self.number as f64 } else { 0.0 }
    }

    /// A guess of the next x, cautious while there are few.
    pub fn guess(&self) -> f64 {
        (self.sum + 0.5) / (self.number as f64 + 1.0)
    }

    /// What the mean of the mu_i is above, but for a probability of `alpha` that it ever is not.
    pub fn lower(&self, alpha: f64) -> f64 {
        if self.number == 0 {
            return 0.0;
        }
        ((self.sum - reach(self.variation, alpha)) / self.number as f64).max(0.0)
    }

    /// The record of its state.
    pub fn record(&self) -> BoundRecord {
        let Self { number, sum, variation } = *self;
        BoundRecord { count: number, sum, variation }
    }

    /// Restores a record; none if it holds impossible values.
    pub fn from_record(record: &BoundRecord) -> Option<Self> {
        let &BoundRecord { count: number, sum, variation } = record;
        Some(Self { number, sum, variation }).filter(Self::is_sound)
    }

    fn is_sound(&self) -> bool {
        self.number <= COUNT_MAX
            && self.sum >= 0.0
            && self.sum.is_finite()
            && self.variation >= 0.0
            && self.variation.is_finite()
    }
}

impl AddAssign for Bounded {
    fn add_assign(&mut self, other: Self) {
        self.number += other.number;
        self.sum += other.sum;
        self.variation += other.variation;
    }
}

/// The S at which the mixture comes to 1 / alpha.
fn reach(variation: f64, alpha: f64) -> f64 {
    // The logarithm of each term is a line in S: its slope, and how far below zero it begins.
    let lines: [(f64, f64); RATES] = std::array::from_fn(|k| {
        let rate = LARGEST * 0.5_f64.powi(k as i32);
        (rate, (-(-rate).ln_1p() - rate) * variation)
    });
    let limit = (RATES as f64 / alpha).ln();
    // One term alone reaches it there, so all of them do.
    let mut s = lines.iter().map(|(slope, below)| (limit + below) / slope).fold(f64::INFINITY, f64::min);
    // The logarithm of the sum is convex in S, so Newton's steps come down to the root and never pass it.
    for _ in 0..STEPS_MAX {
        let largest = lines.iter().map(|(slope, below)| slope * s - below).fold(f64::NEG_INFINITY, f64::max);
        let (mut sum, mut slopes) = (0.0, 0.0);
        for (slope, below) in lines {
            let term = (slope * s - below - largest).exp();
            sum += term;
            slopes += slope * term;
        }
        let step = (largest + sum.ln() - limit) * sum / slopes;
        s -= step;
        if step <= 1e-12 * s {
            break;
        }
    }
    s
}

/// A handful do.
const STEPS_MAX: usize = 50;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use rand::{RngExt, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    /// The share of runs in which the bound is ever wrong, looked at after every example.
    fn ever_wrong(runs: u64, examples: usize, alpha: f64, next: impl Fn(&mut ChaCha8Rng, usize) -> (f64, f64)) -> f64 {
        let wrong = |seed: u64| {
            let mut generator = ChaCha8Rng::seed_from_u64(seed);
            let (mut bounded, mut truth) = (Bounded::default(), 0.0);
            (0..examples).any(|i| {
                let (x, mean) = next(&mut generator, i);
                bounded.see(x, bounded.guess());
                truth += mean;
                bounded.lower(alpha) > truth / (i + 1) as f64
            })
        };
        (0..runs).filter(|seed| wrong(*seed)).count() as f64 / runs as f64
    }

    #[test]
    fn holds_at_all_times() {
        let coin = |p: f64, size: f64| {
            move |generator: &mut ChaCha8Rng, _: usize| {
                (if generator.random::<f64>() < p { size } else { 0.0 }, p * size)
            }
        };
        for (p, size) in [(0.5, 1.0), (0.05, 1.0), (0.02, 40.0), (0.9, 1.0)] {
            let share = ever_wrong(200, 300, 0.1, coin(p, size));
            assert!(share <= 0.1, "{p} {size}: {share}");
        }
        // Means that move.
        let moving = |generator: &mut ChaCha8Rng, i: usize| {
            let p = if i < 200 { 0.2 } else { 0.7 };
            (f64::from(u8::from(generator.random::<f64>() < p)), p)
        };
        assert!(ever_wrong(200, 400, 0.1, moving) <= 0.1);
    }

    #[test]
    fn is_close_after_many() {
        let mut generator = ChaCha8Rng::seed_from_u64(1);
        let mut bounded = Bounded::default();
        for _ in 0..100_000 {
            bounded.see(f64::from(u8::from(generator.random::<f64>() < 0.3)), bounded.guess());
        }
        let distance = bounded.mean() - bounded.lower(0.05);
        // Without the right to look at any time it would be 0.0024.
        assert!((0.002..0.007).contains(&distance), "{distance}");
        assert!(bounded.lower(0.01) < bounded.lower(0.05));
    }

    proptest! {
        #[test]
        fn the_mixture_is_at_its_limit(log_variation in -10.0..20.0_f64, alpha in 1e-6..0.5_f64) {
            let variation = log_variation.exp();
            let s = reach(variation, alpha);
            let term = |k: i32| {
                let rate = LARGEST * 0.5_f64.powi(k);
                (rate * s - (-(1.0 - rate).ln() - rate) * variation).exp()
            };
            let mixture = (0..RATES as i32).map(term).sum::<f64>() / RATES as f64;
            prop_assert!((mixture * alpha - 1.0).abs() < 1e-6, "{mixture} {alpha}");
        }

        #[test]
        fn sums_of_stretches_add(xs in prop::collection::vec(0.0..3.0_f64, 0..50), cut in 0..50_usize) {
            let cut = cut.min(xs.len());
            let sums = |xs: &[f64]| {
                let mut bounded = Bounded::default();
                xs.iter().for_each(|x| bounded.see(*x, 0.4));
                bounded
            };
            let mut both = sums(&xs[..cut]);
            both += sums(&xs[cut..]);
            let all = sums(&xs);
            prop_assert_eq!(both.number, all.number);
            prop_assert!((both.sum - all.sum).abs() < 1e-9 && (both.variation - all.variation).abs() < 1e-9);
            prop_assert!(both.is_sound());
        }
    }
}
