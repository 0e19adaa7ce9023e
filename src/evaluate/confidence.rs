//! A lower confidence bound on a mean that is valid at all times simultaneously, however often one looks.
//!
//! ```text
//! x_i = c_i + y_i       c_i: a prediction from before x_i is known       y_i >= -B, B = 4       mu_i: mean of x_i given the past
//! S = sum (x_i - mu_i)      V = sum y_i^2      psi(l) = -log(1 - l) - l      l_k = 2^-(k+1)
//! P(at any time: sum_k w_k exp(l_k S / B - psi(l_k) V / B^2) >= 1 / alpha) <= alpha
//! ```
//!
//! Proof. For y >= -1 and 0 <= l < 1: exp(l y - psi(l) y^2) <= 1 + l y (Fan, Grama and Liu 2015). Take y = y_i / B. The mean of the
//! right side given the past is 1 + l (mu_i - c_i) / B <= exp(l (mu_i - c_i) / B), and x_i - mu_i = y_i - (mu_i - c_i), so the mean of
//! exp(l (x_i - mu_i) / B - psi(l) (y_i / B)^2) is at most 1. The product of these terms is a non-negative supermartingale that
//! starts at 1, and so is the mixture over l_k with weights w_k that sum to 1. Ville's inequality is the third line (Howard et al. 2021).
//!
//! Nothing bounds x from above: importance weights may be large. The mu_i may all differ, as they do while a policy
//! learns: the bound is on their mean. Lowering some x_i keeps the bound valid.
//!
//! S and V are sums, so the blocks of a window add up. The betting martingales prod (1 + l_k y_i / B) have the same mean and would
//! be slightly tighter, but need one sum of logarithms per rate where V serves all rates.

use std::ops::AddAssign;

use crate::wire::records::learner::value::BoundRecord;

/// Sums over examples. The sums of two stretches of examples add up to those of both.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct ConfidenceSequence {
    count: u64,
    /// Sum of x.
    sum: f64,
    /// V
    variation: f64,
}

/// The largest count of a restored record: far beyond any stream, and sums of such counts do not overflow.
pub const COUNT_MAX: u64 = 1 << 53;

/// B: how far x may fall below its prediction. Records depend on it: a smaller value would invalidate their bounds.
pub const RANGE: f64 = 4.0;

/// Number of rates l_k. The smallest one suits 10^10 examples.
const RATES: usize = 14;

impl ConfidenceSequence {
    /// Adds x = `predicted` + `error`. The prediction is from before x is known; the error is at least -[`RANGE`].
    pub fn add(&mut self, predicted: f64, error: f64) {
        debug_assert!(error >= -RANGE);
        self.count += 1;
        self.sum += predicted + error;
        self.variation += error * error;
    }

    /// Number of x.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Mean of x.
    pub fn mean(&self) -> f64 {
        if self.count > 0 { self.sum / self.count as f64 } else { 0.0 }
    }

    /// Standard deviation of that mean around the mean of the mu_i, for a single look.
    pub fn deviation(&self) -> f64 {
        if self.count > 0 { self.variation.sqrt() / self.count as f64 } else { f64::INFINITY }
    }

    /// Lower confidence bound on the mean of the mu_i, valid at all times simultaneously with probability 1 - `alpha`.
    pub fn lower(&self, alpha: f64) -> f64 {
        if self.count == 0 {
            return f64::NEG_INFINITY;
        }
        (self.sum - RANGE * reach(self.variation / (RANGE * RANGE), alpha)) / self.count as f64
    }

    /// The record of its state.
    pub fn record(&self) -> BoundRecord {
        let Self { count, sum, variation } = *self;
        BoundRecord { count, sum, variation }
    }

    /// Restores a record; none if it holds impossible values.
    pub fn from_record(record: &BoundRecord) -> Option<Self> {
        let &BoundRecord { count, sum, variation } = record;
        Some(Self { count, sum, variation }).filter(Self::is_sound)
    }

    fn is_sound(&self) -> bool {
        self.count <= COUNT_MAX && self.sum.is_finite() && self.variation >= 0.0 && self.variation.is_finite()
    }
}

impl AddAssign for ConfidenceSequence {
    fn add_assign(&mut self, other: Self) {
        self.count += other.count;
        self.sum += other.sum;
        self.variation += other.variation;
    }
}

/// l_k
fn rate(k: usize) -> f64 {
    0.5_f64.powi(k as i32 + 1)
}

/// w_k, up to a factor. The rate that suits a mean that is x above the bound, with variance v, is B x / v. The weights favour
/// those from 1/16 to 1/4: lifts of a few percent, at the variance of a policy that gets a third of the traffic.
fn weight(k: usize) -> f64 {
    1.0 / (2.0 + (k as f64 - 2.0).powi(2))
}

/// The S / B at which the mixture reaches 1 / alpha, for a given V / B^2.
fn reach(variation: f64, alpha: f64) -> f64 {
    // The logarithm of each term is a line in S: its slope, and how far below zero it begins.
    let total: f64 = (0..RATES).map(weight).sum();
    let lines: [(f64, f64); RATES] = std::array::from_fn(|k| {
        let rate = rate(k);
        (rate, (-(-rate).ln_1p() - rate) * variation - (weight(k) / total).ln())
    });
    let limit = -alpha.ln();
    // One term alone reaches the limit there, so the mixture does.
    let mut s = lines.iter().map(|(slope, below)| (limit + below) / slope).fold(f64::INFINITY, f64::min);
    // The logarithm of the sum is convex in S, so Newton's steps descend to the root and never pass it.
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

/// A handful suffices.
const STEPS_MAX: usize = 50;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use rand::{RngExt, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    /// Adds x >= 0, predicted by the mean so far.
    fn add(bound: &mut ConfidenceSequence, x: f64) {
        let predicted = ((bound.sum + 0.5) / (bound.count as f64 + 1.0)).min(RANGE);
        bound.add(predicted, x - predicted);
    }

    /// The share of runs in which the bound is ever wrong, looked at after every example.
    fn ever_wrong(runs: u64, examples: usize, alpha: f64, next: impl Fn(&mut ChaCha8Rng, usize) -> (f64, f64)) -> f64 {
        let wrong = |seed: u64| {
            let mut generator = ChaCha8Rng::seed_from_u64(seed);
            let (mut bound, mut truth) = (ConfidenceSequence::default(), 0.0);
            (0..examples).any(|i| {
                let (x, mean) = next(&mut generator, i);
                add(&mut bound, x);
                truth += mean;
                bound.lower(alpha) > truth / (i + 1) as f64
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
        let mut bound = ConfidenceSequence::default();
        for _ in 0..100_000 {
            add(&mut bound, f64::from(u8::from(generator.random::<f64>() < 0.3)));
        }
        let distance = bound.mean() - bound.lower(0.05);
        // For a single look it would be 0.0024.
        assert!((0.002..0.007).contains(&distance), "{distance}");
        assert!(bound.lower(0.01) < bound.lower(0.05));
    }

    proptest! {
        #[test]
        fn the_mixture_is_at_its_limit(log_variation in -10.0..20.0_f64, alpha in 1e-6..0.5_f64) {
            let variation = log_variation.exp();
            let s = reach(variation, alpha);
            let term = |k: usize| weight(k) * (rate(k) * s - (-(1.0 - rate(k)).ln() - rate(k)) * variation).exp();
            let mixture = (0..RATES).map(term).sum::<f64>() / (0..RATES).map(weight).sum::<f64>();
            prop_assert!((mixture * alpha - 1.0).abs() < 1e-6, "{mixture} {alpha}");
        }

        #[test]
        fn sums_of_stretches_add(xs in prop::collection::vec(0.0..3.0_f64, 0..50), cut in 0..50_usize) {
            let cut = cut.min(xs.len());
            let sums = |xs: &[f64]| {
                let mut bound = ConfidenceSequence::default();
                xs.iter().for_each(|x| bound.add(0.4, x - 0.4));
                bound
            };
            let mut both = sums(&xs[..cut]);
            both += sums(&xs[cut..]);
            let all = sums(&xs);
            prop_assert_eq!(both.count, all.count);
            prop_assert!((both.sum - all.sum).abs() < 1e-9 && (both.variation - all.variation).abs() < 1e-9);
            prop_assert!(both.is_sound());
        }
    }
}
