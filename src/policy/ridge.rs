//! Ridge regression, one example at a time.
//!
//! ```text
//! A = ridge I + sum phi phi'      b = sum x phi      weights = A^-1 b      width(phi) = sqrt(phi' A^-1 phi)
//! A^-1 <- A^-1 - (A^-1 phi)(A^-1 phi)' / (1 + phi' A^-1 phi)                          (Sherman and Morrison)
//! ```
//!
//! phi: n features, x: what is regressed on them. O(n^2) an example. Forgetting multiplies A and b by a factor that
//! is kept beside them, `fade`; when it falls below a half, it is multiplied in and the ridge, which must not be
//! forgotten, is made whole again, in the eigenbasis.

use super::symmetric::Symmetric;
use crate::hpg::linalg::{axpy, dot};
use crate::wire::records::learner::rivals::RidgeRecord;

/// The regression of one model.
#[derive(Debug, Clone, PartialEq)]
pub struct Ridge {
    /// A^-1, but for `fade`.
    inverse: Symmetric,
    /// b, but for `fade`.
    moment: Vec<f64>,
    /// What is left of A and b.
    fade: f64,
    weights: Vec<f64>,
    /// Whether the weights are those of A and b.
    solved: bool,
}

/// The most that an entry of A^-1 can be: ridges are 1e-9 or more, and half of one may be forgotten.
const INVERSE_MAX: f64 = 4e9;

/// The most that an entry of b can have become in any stream.
const MOMENT_MAX: f64 = 1e20;

impl Ridge {
    /// Nothing known of `n` weights.
    pub fn new(n: usize, ridge: f64) -> Self {
        let inverse = Symmetric::identity(n, ridge.recip());
        Self { inverse, moment: vec![0.0; n], fade: 1.0, weights: vec![0.0; n], solved: true }
    }

    /// Learns an example; [`Ridge::solve`] makes it count.
    pub fn add(&mut self, features: &[f64], x: f64) {
        let product = self.inverse.times(features);
        // Rounding must not turn what is positive around.
        let curvature = self.fade + dot(features, &product).max(0.0);
        self.inverse.add(-curvature.recip(), &product);
        axpy(x / self.fade, features, &mut self.moment);
        self.solved = false;
    }

    /// Keeps a share of what was learned; the ridge stays.
    pub fn forget(&mut self, keep: f64, ridge: f64) {
        self.fade *= keep;
        if self.fade >= 0.5 {
            return;
        }
        self.inverse = regularised(&self.inverse, self.fade, (1.0 - self.fade) * ridge);
        self.moment.iter_mut().for_each(|x| *x *= self.fade);
        self.fade = 1.0;
        self.solved = false;
    }

    /// Brings the weights up to date.
    pub fn solve(&mut self) {
        if !self.solved {
            self.weights = self.inverse.times(&self.moment);
            self.solved = true;
        }
    }

    /// The weights.
    pub fn weights(&self) -> &[f64] {
        &self.weights
    }

    /// What is predicted.
    pub fn mean(&self, features: &[f64]) -> f64 {
        dot(&self.weights, features)
    }

    /// How little is known: the standard deviation of a prediction, for noise of variance 1.
    pub fn width(&self, features: &[f64]) -> f64 {
        (self.inverse.form(features) / self.fade).max(0.0).sqrt()
    }

    /// The record of its state, from which the weights follow.
    pub fn record(&self) -> RidgeRecord {
        RidgeRecord { inverse: self.inverse.record(), moment: self.moment.clone(), fade: self.fade }
    }

    /// Restores a record of `n` features; none if it does not fit.
    pub fn from_record(record: RidgeRecord, n: usize) -> Option<Self> {
        let RidgeRecord { inverse, moment, fade } = record;
        let inverse = Symmetric::from_record(inverse, n, INVERSE_MAX)?;
        let mut ridge = Self { inverse, moment, fade, weights: Vec::new(), solved: false };
        if !ridge.is_sound(n) {
            return None;
        }
        ridge.solve();
        Some(ridge)
    }

    fn is_sound(&self, n: usize) -> bool {
        self.inverse.is_bounded(n, INVERSE_MAX)
            && self.inverse.is_positive()
            && self.moment.len() == n
            && self.moment.iter().all(|x| x.abs() <= MOMENT_MAX)
            && (0.5..=1.0).contains(&self.fade)
    }
}

/// (keep A + add I)^-1, from A^-1.
pub fn regularised(inverse: &Symmetric, keep: f64, add: f64) -> Symmetric {
    let (values, vectors) = inverse.eigen();
    // In no direction can A^-1 be less than rounding leaves of its largest.
    let least = values.last().copied().unwrap_or(1.0) * f64::EPSILON;
    let values: Vec<f64> = values.iter().map(|value| (keep / value.max(least) + add).recip()).collect();
    Symmetric::compose(values.len(), &values, &vectors)
}

#[cfg(test)]
mod tests {
    use super::*;
    use faer::linalg::solvers::Solve;
    use faer::{Mat, Side};
    use proptest::prelude::*;
    use rand::{RngExt, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    /// A and b summed up, forgotten and solved densely.
    struct Naive {
        a: Mat<f64>,
        b: Mat<f64>,
    }

    impl Naive {
        fn add(&mut self, phi: &[f64], x: f64) {
            let n = phi.len();
            self.a += Mat::from_fn(n, n, |i, j| phi[i] * phi[j]);
            self.b += Mat::from_fn(n, 1, |i, _| x * phi[i]);
        }
    }

    proptest! {
        /// Streams of which 90% are repetitions from a pool of three, and some are zero but for one feature.
        #[test]
        fn equals_a_dense_solve(seed in 0..1000_u64, n in 1..12_usize, ridge in prop_oneof![Just(1.0), Just(0.01)]) {
            let mut random = ChaCha8Rng::seed_from_u64(seed);
            let mut fresh = || {
                let phi: Vec<f64> = (0..n).map(|_| random.random::<f64>() - 0.5).collect();
                (phi, random.random::<f64>(), random.random_range(0..30_usize))
            };
            let pool = [fresh().0, fresh().0, (0..n).map(|i| f64::from(u8::from(i == 0))).collect()];
            let mut ridges = Ridge::new(n, ridge);
            let mut naive = Naive { a: Mat::from_fn(n, n, |i, j| if i == j { ridge } else { 0.0 }), b: Mat::zeros(n, 1) };
            for _ in 0..400 {
                let (phi, x, which) = fresh();
                let phi = if which < 27 { pool[which % 3].clone() } else { phi };
                ridges.add(&phi, x);
                naive.add(&phi, x);
            }
            ridges.solve();
            let solver = naive.a.llt(Side::Lower).unwrap();
            let weights = solver.solve(&naive.b);
            for i in 0..n {
                prop_assert!((ridges.weights()[i] - weights[(i, 0)]).abs() < 1e-8, "{:?} {weights:?}", ridges.weights());
            }
            let (phi, ..) = fresh();
            let width = solver.solve(&Mat::from_fn(n, 1, |i, _| phi[i]));
            let width = (0..n).map(|i| phi[i] * width[(i, 0)]).sum::<f64>().sqrt();
            prop_assert!((ridges.width(&phi) - width).abs() < 1e-8);
            prop_assert!(ridges.is_sound(n));
        }

        /// Each example counts by its age; the ridge is never less than half of what it was, nor more.
        #[test]
        fn forgets_examples_but_not_the_ridge(seed in 0..1000_u64, keep in 0.3..0.999_f64) {
            let (n, ridge) = (4, 0.7);
            let mut random = ChaCha8Rng::seed_from_u64(seed);
            let mut ridges = Ridge::new(n, ridge);
            let mut data = Mat::<f64>::zeros(n, n);
            for _ in 0..300 {
                // Only two directions are ever seen.
                let phi = [random.random::<f64>(), random.random::<f64>(), 0.0, 0.0];
                ridges.forget(keep, ridge);
                ridges.add(&phi, 1.0);
                data = data * faer::Scale(keep) + Mat::from_fn(n, n, |i, j| phi[i] * phi[j]);
            }
            prop_assert!(ridges.is_sound(n));
            for phi in [[1.0, 0.0, 0.0, 0.0], [0.3, -0.6, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0]] {
                let width = |ridge: f64| {
                    let a = &data + Mat::from_fn(n, n, |i, j| if i == j { ridge } else { 0.0 });
                    let solved = a.llt(Side::Lower).unwrap().solve(&Mat::from_fn(n, 1, |i, _| phi[i]));
                    (0..n).map(|i| phi[i] * solved[(i, 0)]).sum::<f64>().sqrt()
                };
                let found = ridges.width(&phi);
                prop_assert!(found >= width(ridge) - 1e-9 && found <= width(0.5 * ridge) + 1e-9, "{found}");
            }
        }
    }
}
