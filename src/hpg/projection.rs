//! Bregman projection on the nuclear-norm ball, in the mirror space.
//!
//! ```text
//! gamma_i <- sign(gamma_i) max(|gamma_i| - nu, 0)
//! nu = 0 if sum_i beta sinh|gamma_i| <= tau, else sum_i beta max(sinh(|gamma_i| - nu), 0) = tau
//! ```
//!
//! Paper: Section 5.1, Step 4, and its appendix. For the n largest z_i = |gamma_i| active, with a = tau / beta,
//! A = sum e^{z_i} and B = sum e^{-z_i}: nu = log(A / (a + sqrt(a^2 + A B))) = log(A / B) / 2 - arcsinh(a / sqrt(A B)).
//! Everything is shifted by z_max, since sinh of an eigenvalue that was not projected yet may overflow.

use serde::{Deserialize, Serialize};

use super::kernel;
use crate::wire::records::learner::hpg::BallRecord;

/// The set in which the parameters live, and how many eigenvalues are kept of each.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Ball {
    /// Radius: the largest nuclear norm.
    pub tau: f64,
    /// Scale of the hypentropy: small is multiplicative (sparse), large is additive (Euclidean).
    pub beta: f64,
    /// The most eigenvalues that are kept of one model's matrix.
    pub rank: usize,
}

/// How many eigenvalues are looked at together.
const BLOCK: usize = 16;

impl Ball {
    /// Its record.
    pub fn record(&self) -> BallRecord {
        BallRecord { radius: self.tau, scale: self.beta, rank: self.rank as u64 }
    }

    /// Projects mirror eigenvalues in place and returns nu.
    pub fn project(&self, gamma: &mut [f64]) -> f64 {
        let reach = (self.tau / self.beta).asinh();
        let largest = gamma.iter().fold(0.0_f64, |m, g| m.max(g.abs()));
        if largest <= reach && self.is_inside(gamma, largest) {
            return 0.0;
        }
        let excess = self.excess(gamma, largest, reach);
        for g in gamma.iter_mut() {
            *g = ((g.abs() - largest) - excess).max(0.0).copysign(*g);
        }
        largest + excess
    }

    /// Indices of the eigenvalues to keep, ascending: at most `rank`, the largest by magnitude, none that is zero to
    /// rounding.
    pub fn keep(&self, gamma: &[f64], kept: &mut Vec<usize>) {
        let largest = gamma.iter().fold(0.0_f64, |m, g| m.max(g.abs()));
        let noise = 4.0 * f64::EPSILON * largest;
        kept.clear();
        kept.extend((0..gamma.len()).filter(|&i| gamma[i].abs() > noise));
        if kept.len() > self.rank {
            // The last of the least, where one is too many: that is what a single example adds.
            if kept.len() == self.rank + 1 {
                let lesser = |a: usize, b: usize| if gamma[kept[b]].abs() <= gamma[kept[a]].abs() { b } else { a };
                kept.remove((1..kept.len()).fold(0, lesser));
                return;
            }
            kept.sort_by(|&i, &j| gamma[j].abs().total_cmp(&gamma[i].abs()).then(i.cmp(&j)));
            kept.truncate(self.rank);
            kept.sort_unstable();
        }
    }

    /// Whether mirror eigenvalues and those of W belong together and are inside.
    pub fn holds(&self, gamma: &[f64], lambda: &[f64]) -> bool {
        let belongs = |(gamma, lambda): (&f64, &f64)| (self.primal(*gamma) - lambda).abs() <= 1e-9 * lambda.abs();
        gamma.len() == lambda.len()
            && gamma.len() <= self.rank
            && gamma.iter().zip(lambda).all(belongs)
            && lambda.iter().map(|lambda| lambda.abs()).sum::<f64>() <= self.tau * (1.0 + 1e-9)
    }

    /// Projects mirror eigenvalues that another ball allowed, and makes those of W anew.
    pub fn pull_in(&self, gamma: &mut [f64], lambda: &mut Vec<f64>) {
        self.project(gamma);
        self.primals(gamma, lambda);
    }

    /// The eigenvalues of W that belong to mirror eigenvalues.
    pub fn primals(&self, gamma: &[f64], lambda: &mut Vec<f64>) {
        lambda.clear();
        lambda.extend_from_slice(gamma);
        kernel::sinh(lambda);
        lambda.iter_mut().for_each(|lambda| *lambda *= self.beta);
    }

    /// The eigenvalue of W that belongs to a mirror eigenvalue.
    pub fn primal(&self, gamma: f64) -> f64 {
        self.beta * gamma.sinh()
    }

    /// Whether mirror eigenvalues, of which the largest is within reach, need no projection.
    fn is_inside(&self, gamma: &[f64], largest: f64) -> bool {
        // Far inside the largest alone tells, beyond any rounding of the sum.
        gamma.len() as f64 * self.primal(largest) <= 0.999 * self.tau || self.nuclear_norm(gamma) <= self.tau
    }

    /// Of the matrix that has these mirror eigenvalues.
    fn nuclear_norm(&self, gamma: &[f64]) -> f64 {
        let mut sum = 0.0;
        for gamma in gamma.chunks(BLOCK) {
            let mut block = [0.0; BLOCK];
            block[..gamma.len()].copy_from_slice(gamma);
            kernel::sinh(&mut block);
            sum += block.iter().map(|x| x.abs()).sum::<f64>();
        }
        self.beta * sum
    }

    /// nu - z_max, for eigenvalues that are outside of the ball.
    ///
    /// For a set that holds all active eigenvalues nu is too small by what the others in it add, so those below it
    /// can be left out, until none is.
    fn excess(&self, gamma: &[f64], largest: f64, reach: f64) -> f64 {
        // With only the largest active nu is z_max - reach, and more active ones only raise it: what lies below is
        // never active, and what lies above cannot overflow.
        let (mut excess, mut active) = (-reach, usize::MAX);
        loop {
            let (count, next) = self.excess_of(gamma.iter().map(|g| g.abs() - largest).filter(|&z| z > excess));
            // Rounding may bring one back, or leave none.
            if count == 0 || count >= active {
                return excess;
            }
            (excess, active) = (next, count);
        }
    }

    /// How many are active, and nu - z_max for them, given their z - z_max.
    fn excess_of(&self, active: impl Iterator<Item = f64>) -> (usize, f64) {
        let (mut count, mut sum, mut inverse_sum, mut difference) = (0, 0.0, 0.0, 0.0);
        for z in active {
            let less_one = z.exp_m1();
            let inverse = 1.0 / (1.0 + less_one);
            count += 1;
            sum += 1.0 + less_one;
            inverse_sum += inverse;
            difference += less_one + less_one * inverse;
        }
        // Where tau is far below beta all z are tiny, and their sums differ by less than the sums' rounding.
        let ratio: f64 = difference / inverse_sum;
        let log_ratio = if ratio > -0.5 { ratio.ln_1p() } else { (sum / inverse_sum).ln() };
        (count, 0.5 * log_ratio - (self.tau / self.beta / (sum * inverse_sum).sqrt()).asinh())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// nu by bisection on the ball's constraint: the independent solver.
    fn bisect(z: &[f64], ball: &Ball) -> f64 {
        let norm = |nu: f64| z.iter().map(|z| ball.beta * (z.abs() - nu).max(0.0).sinh()).sum::<f64>();
        let (mut low, mut high) = (0.0, z.iter().fold(0.0_f64, |m, z| m.max(z.abs())));
        if norm(0.0) <= ball.tau {
            return 0.0;
        }
        for _ in 0..200 {
            let middle = 0.5 * (low + high);
            if norm(middle) > ball.tau { low = middle } else { high = middle }
        }
        high
    }

    proptest! {
        #[test]
        fn equals_bisection_and_is_optimal(
            gamma in prop::collection::vec(-60.0..60.0_f64, 0..40),
            log_beta in -5.0..3.0_f64,
            log_tau in -4.0..6.0_f64,
        ) {
            let ball = Ball { tau: log_tau.exp(), beta: log_beta.exp(), rank: 40 };
            let mut projected = gamma.clone();
            let nu = ball.project(&mut projected);
            let expected = bisect(&gamma, &ball);
            prop_assert!((nu - expected).abs() <= 1e-11 * (1.0 + expected), "{nu} {expected}");
            // KKT: stationarity with one multiplier nu >= 0, complementary slackness, feasibility.
            let norm: f64 = projected.iter().map(|&g| ball.primal(g).abs()).sum();
            prop_assert!(norm <= ball.tau * (1.0 + 1e-9));
            prop_assert!(nu == 0.0 || (norm - ball.tau).abs() <= 1e-9 * ball.tau);
            for (g, p) in gamma.iter().zip(&projected) {
                let slack = g.abs() - nu;
                prop_assert!((p.abs() - slack.max(0.0)).abs() < 1e-11 && (*p == 0.0 || p.signum() == g.signum()));
            }
        }
    }

    proptest! {
        /// Where eigenvalues lie within rounding of nu the set of the active ones may not settle: it must end all the same.
        #[test]
        fn ends_where_eigenvalues_are_nearly_nu(
            z in 1e-3..3.0_f64,
            few in 1..4_usize,
            ulps in prop::collection::vec(-4..5_i32, 1..12),
            log_beta in -5.0..3.0_f64,
        ) {
            let (a, beta) = (few as f64 * z.sinh(), log_beta.exp());
            let ball = Ball { tau: a * beta, beta, rank: 40 };
            // With `few` at 1 + z the threshold is at 1, give or take a rounding error.
            let near = ulps.iter().map(|&ulps| 1.0 + f64::from(ulps) * f64::EPSILON);
            let mut gamma: Vec<f64> = std::iter::repeat_n(1.0 + z, few).chain(near).collect();
            let nu = ball.project(&mut gamma);
            prop_assert!((nu - 1.0).abs() < 1e-12, "{nu}");
            prop_assert!(gamma.iter().all(|g| g.is_finite()));
        }
    }

    #[test]
    fn keeps_the_largest_and_no_zero() {
        let ball = |rank| Ball { tau: 1.0, beta: 1.0, rank };
        let mut kept = Vec::new();
        for (gamma, rank, expected) in [
            (&[][..], 3, &[][..]),
            (&[0.0, -0.0][..], 3, &[][..]),
            (&[1.0, -3.0, 2.0, 0.0][..], 2, &[1, 2][..]),
            (&[1.0, -1.0, 1.0][..], 2, &[0, 1][..]),
            (&[1.0, 1e-17, -1e-3][..], 9, &[0, 2][..]),
        ] {
            ball(rank).keep(gamma, &mut kept);
            assert_eq!(kept, expected);
        }
    }
}
