//! Regression to second order on the products of a few coordinates.
//!
//! ```text
//! phi(y) = (INTERCEPT, y_1^2, sqrt 2 y_1 y_2, ..., y_k^2)      y = V'q;  phi(y).phi(z) = (y.z)^2 but for the intercept
//! P phi, then   w += P phi e / (1 + phi'P phi)      P -= P phi phi'P / (1 + phi'P phi)        P_0 = I / ridge
//! fading        w <- a w      P <- a^2 P + (1 - a^2) P_0
//! other V       w <- S w      P <- S P S' + P_0 (I - S S')      phi(R y) = S phi(y), R = V_new'V_old
//! ```
//!
//! The recursion is a Kalman filter's: P is how uncertain w is, for noise of variance 1. Fading is exact for weights
//! that wander and are pulled back to zero as strongly as the prior says, so P never exceeds P_0, however long nothing
//! is seen. Turning V gives what the prior gives for directions that were not looked at before.

use faer::{Mat, MatRef};

use super::linalg::{axpy, dot};
use crate::policy::symmetric::{Symmetric, packed_len};
use crate::wire::records::learner::regression::NewtonRecord;

/// The constant feature: models differ on the whole by less than rewards do.
const INTERCEPT: f64 = 0.3;

/// Number of features of k coordinates.
pub fn features_len(k: usize) -> usize {
    1 + packed_len(k)
}

/// phi of a query's coordinates.
pub fn features(y: &[f64], phi: &mut Vec<f64>) {
    phi.clear();
    phi.push(INTERCEPT);
    for (j, y_j) in y.iter().enumerate() {
        phi.push(y_j * y_j);
        phi.extend(y[j + 1..].iter().map(|y_i| std::f64::consts::SQRT_2 * y_i * y_j));
    }
}

/// One model's weights, and how certain they are.
#[derive(Debug, Clone, PartialEq)]
pub struct Newton {
    weights: Vec<f64>,
    uncertainty: Symmetric,
}

impl Newton {
    /// Nothing known of k coordinates.
    pub fn new(k: usize, ridge: f64) -> Self {
        let n = features_len(k);
        Self { weights: vec![0.0; n], uncertainty: Symmetric::identity(n, ridge.recip()) }
    }

    /// w.phi
    pub fn predict(&self, phi: &[f64]) -> f64 {
        dot(&self.weights, phi)
    }

    /// Learns from an error of the prediction.
    pub fn learn(&mut self, phi: &[f64], error: f64) {
        let gain = self.uncertainty.times(phi);
        // Rounding must not turn what is positive around.
        let scale = (1.0 + dot(phi, &gain).max(0.0)).recip();
        axpy(scale * error, &gain, &mut self.weights);
        self.uncertainty.add(-scale, &gain);
    }

    /// Fades to what is left of the past, `keep`.
    pub fn fade(&mut self, keep: f64, ridge: f64) {
        if keep < 1.0 {
            self.weights.iter_mut().for_each(|w| *w *= keep);
            self.uncertainty.scale(keep * keep);
            self.uncertainty.add_identity((1.0 - keep * keep) / ridge);
        }
    }

    /// The record of its state.
    pub fn record(&self) -> NewtonRecord {
        NewtonRecord { weights: self.weights.clone(), uncertainty: self.uncertainty.record() }
    }

    /// Restores a record of k coordinates that was saved under the prior `saved_ridge`; none if it does not fit. Under
    /// another prior no weight is less certain than the prior says.
    pub fn from_record(record: NewtonRecord, k: usize, saved_ridge: f64, ridge: f64) -> Option<Self> {
        let NewtonRecord { weights, uncertainty } = record;
        let uncertainty = Symmetric::from_record(uncertainty, features_len(k), f64::MAX)?;
        let mut newton = Self { weights, uncertainty };
        if saved_ridge != ridge {
            newton.uncertainty.scale((saved_ridge / ridge).min(1.0));
        }
        newton.is_sound(k, ridge).then_some(newton)
    }

    /// Keeps the weights as a guess, and knows nothing for certain.
    pub fn doubt(&mut self, k: usize, ridge: f64) {
        self.uncertainty = Symmetric::identity(features_len(k), ridge.recip());
    }

    /// Turns to other directions by S, as [`turn`] makes it.
    pub fn turn(&mut self, turn: &Mat<f64>, ridge: f64) {
        let n = self.weights.len();
        let weights = turn * MatRef::from_column_major_slice(&self.weights, n, 1);
        let prior = ridge.recip();
        let lower = self.uncertainty.lower();
        let at = |i: usize, j: usize| lower[i.min(j) * n + i.max(j)] - if i == j { prior } else { 0.0 };
        let excess = Mat::from_fn(n, n, at);
        // S P S' + p (I - S S') = p I + S (P - p I) S'
        let turned = turn * excess * turn.transpose();
        let m = turn.nrows();
        self.weights = (0..m).map(|i| weights[(i, 0)]).collect();
        self.uncertainty = Symmetric::from_lower(m, |i, j| turned[(i, j)] + if i == j { prior } else { 0.0 });
    }

    /// The constant part of the score.
    pub fn intercept(&self) -> f64 {
        INTERCEPT * self.weights[0]
    }

    /// Eigenvalues and eigenvectors (k x k, column by column) of its quadratic part.
    pub fn quadratic(&self, k: usize) -> (Vec<f64>, Vec<f64>) {
        let mut entries = self.weights[1..].to_vec();
        let mut at = 0;
        for j in 0..k {
            // An entry off the diagonal stands for two.
            entries[at + 1..at + k - j].iter_mut().for_each(|weight| *weight /= std::f64::consts::SQRT_2);
            at += k - j;
        }
        Symmetric::from_packed(k, entries).eigen()
    }

    /// Whether a state can be one of k coordinates.
    pub fn is_sound(&self, k: usize, ridge: f64) -> bool {
        let n = features_len(k);
        self.weights.len() == n
            && self.weights.iter().all(|w| w.abs() <= WEIGHT_MAX)
            && self.uncertainty.is_bounded(n, 1.001 / ridge)
            && self.uncertainty.is_positive()
    }
}

/// Beyond this no stream of rewards in 0..1 brings a weight.
const WEIGHT_MAX: f64 = 1e12;

/// S for R (row by row, new k x old k), by which phi of old coordinates becomes phi of new ones.
pub fn turn(rotation: &[f64], new: usize, old: usize) -> Mat<f64> {
    let mut turn = Mat::zeros(features_len(new), features_len(old));
    turn[(0, 0)] = 1.0;
    let pairs = |k: usize| (0..k).flat_map(move |j| (j..k).map(move |i| (i, j)));
    let r = |i: usize, a: usize| rotation[i * old + a];
    for (row, (i, j)) in pairs(new).enumerate() {
        let double = if i == j { 1.0 } else { std::f64::consts::SQRT_2 };
        for (column, (a, b)) in pairs(old).enumerate() {
            let entry = if a == b {
                r(i, a) * r(j, a)
            } else {
                (r(i, a) * r(j, b) + r(i, b) * r(j, a)) / std::f64::consts::SQRT_2
            };
            turn[(1 + row, 1 + column)] = double * entry;
        }
    }
    turn
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simulate::normals;
    use rand::SeedableRng;
    use rand_chacha::ChaCha8Rng;

    fn phi_of(y: &[f64]) -> Vec<f64> {
        let mut phi = Vec::new();
        features(y, &mut phi);
        phi
    }

    fn learned(k: usize, examples: usize, ridge: f64) -> Newton {
        let mut generator = ChaCha8Rng::seed_from_u64(3);
        let mut newton = Newton::new(k, ridge);
        for t in 0..examples {
            let y = normals(k, &mut generator);
            let phi = phi_of(&y);
            newton.learn(&phi, y[0] * y[0] - y[1] * y[0] + 0.01 * (t % 3) as f64 - newton.predict(&phi));
            assert!(newton.is_sound(k, ridge));
        }
        newton
    }

    #[test]
    fn finds_a_quadratic_function_at_once() {
        let newton = learned(3, 60, 1e-3);
        for y in [[0.5, -0.2, 0.8], [1.0, 1.0, 0.0]] {
            let expected = y[0] * y[0] - y[1] * y[0] + 0.01;
            assert!((newton.predict(&phi_of(&y)) - expected).abs() < 0.02);
            let (values, vectors) = newton.quadratic(3);
            let form: f64 = values.iter().zip(vectors.chunks_exact(3)).map(|(l, v)| l * dot(v, &y).powi(2)).sum();
            assert!((newton.intercept() + form - newton.predict(&phi_of(&y))).abs() < 1e-12);
        }
    }

    /// Turned by an orthogonal R all predictions stay; a direction that is left and taken up again is unknown.
    #[test]
    fn turns_with_its_directions() {
        let (c, s) = (0.6, 0.8);
        let rotation = [c, -s, 0.0, s, c, 0.0, 0.0, 0.0, 1.0];
        let newton = learned(3, 40, 1.0);
        let mut turned = newton.clone();
        turned.turn(&turn(&rotation, 3, 3), 1.0);
        let (y, z) = ([0.5, -0.2, 0.8], [c * 0.5 + s * 0.2, s * 0.5 - c * 0.2, 0.8]);
        assert!((newton.predict(&phi_of(&y)) - turned.predict(&phi_of(&z))).abs() < 1e-12);
        let width = |newton: &Newton, phi: &[f64]| newton.uncertainty.form(phi);
        assert!((width(&newton, &phi_of(&y)) - width(&turned, &phi_of(&z))).abs() < 1e-12);

        let mut fewer = newton.clone();
        fewer.turn(&turn(&[1.0, 0.0, 0.0, 0.0, 1.0, 0.0], 2, 3), 1.0);
        assert!(fewer.is_sound(2, 1.0));
        assert!((fewer.predict(&phi_of(&[0.5, 0.1])) - newton.predict(&phi_of(&[0.5, 0.1, 0.0]))).abs() < 1e-12);
        fewer.turn(&turn(&[1.0, 0.0, 0.0, 1.0, 0.0, 0.0], 3, 2), 1.0);
        assert!((width(&fewer, &phi_of(&[0.0, 0.0, 1.0])) - (1.0 + width(&fewer, &phi_of(&[0.0; 3])))).abs() < 1e-12);
    }

    #[test]
    fn fades_to_the_prior() {
        let mut newton = learned(3, 40, 2.0);
        newton.fade(0.5, 2.0);
        assert!(newton.is_sound(3, 2.0));
        (0..200).for_each(|_| newton.fade(0.5, 2.0));
        let prior = Newton::new(3, 2.0);
        assert!(
            (newton.uncertainty.form(&phi_of(&[1.0; 3])) - prior.uncertainty.form(&phi_of(&[1.0; 3]))).abs() < 1e-9
        );
        assert!(newton.predict(&phi_of(&[1.0; 3])).abs() < 1e-9);
    }
}
