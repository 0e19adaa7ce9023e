//! The features of a query: a constant, its coordinates in the leading directions, and products of the first of them.
//!
//! ```text
//! y = V'q                         V (d x n): the leading directions of the queries
//! phi = (1, y_1 .. y_n, y_1^2, sqrt 2 y_1 y_2, .., y_k^2)         k <= n;  the last part: phi(y).phi(z) = (y.z)^2
//! R = V_new'V_old     phi(R y) = S phi(y)                          S = diag(1, R, products of R)
//! ```

use faer::Mat;

use crate::hpg::kernel::products;
use crate::hpg::linalg::{columns_dot, dot};
use crate::policy::symmetric::packed_len;

/// Shape of the features, and the directions they are in.
#[derive(Debug, Clone, PartialEq)]
pub struct Features {
    dim: usize,
    /// n: coordinates.
    linear: usize,
    /// k: coordinates whose products are features.
    quadratic: usize,
    /// V, one direction after the other; fewer than n while fewer are known.
    basis: Vec<f64>,
}

impl Features {
    /// Features without any direction.
    pub fn new(dim: usize, linear: usize, quadratic: usize) -> Self {
        let linear = linear.min(dim);
        Self { dim, linear, quadratic: quadratic.min(linear), basis: Vec::new() }
    }

    /// Features in given directions; none if there are too many.
    pub fn with_basis(self, basis: Vec<f64>) -> Option<Self> {
        let is_sound = basis.len().is_multiple_of(self.dim) && basis.len() <= self.linear * self.dim;
        is_sound.then_some(Self { basis, ..self })
    }

    /// Number of features.
    pub fn count(&self) -> usize {
        1 + self.linear + packed_len(self.quadratic)
    }

    /// n
    pub fn linear(&self) -> usize {
        self.linear
    }

    /// k
    pub fn quadratic(&self) -> usize {
        self.quadratic
    }

    /// V
    pub fn basis(&self) -> &[f64] {
        &self.basis
    }

    /// y of a query.
    pub fn coordinates(&self, query: &[f64], y: &mut Vec<f64>) {
        columns_dot(&self.basis, query, y);
        y.resize(self.linear, 0.0);
    }

    /// y of several queries that follow each other, without the zeros of directions that are not known yet. The bits are
    /// those of each alone.
    pub fn coordinates_of_all(&self, queries: &[f64], y: &mut Vec<f64>) {
        let known = self.basis.len() / self.dim;
        y.resize(known * (queries.len() / self.dim), 0.0);
        products(self.dim, &self.basis, queries, y);
    }

    /// phi of coordinates.
    pub fn of_coordinates(&self, y: &[f64], phi: &mut Vec<f64>) {
        phi.clear();
        phi.push(1.0);
        phi.extend_from_slice(y);
        let y = &y[..self.quadratic];
        for (j, y_j) in y.iter().enumerate() {
            phi.push(y_j * y_j);
            phi.extend(y[j + 1..].iter().map(|y_i| std::f64::consts::SQRT_2 * y_i * y_j));
        }
    }

    /// Turns to other directions. Returns R and S.
    pub fn turn(&mut self, basis: &[f64]) -> (Mat<f64>, Mat<f64>) {
        let (dim, n) = (self.dim, self.linear);
        let direction = |i: usize| i * dim..(i + 1) * dim;
        let rotation = Mat::from_fn(n, n, |i, a| match (basis.get(direction(i)), self.basis.get(direction(a))) {
            (Some(new), Some(old)) => dot(new, old),
            _ => 0.0,
        });
        self.basis = basis.to_vec();
        let turn = self.turn_features(&rotation);
        (rotation, turn)
    }

    /// S for R.
    fn turn_features(&self, r: &Mat<f64>) -> Mat<f64> {
        let (n, k) = (self.linear, self.quadratic);
        let mut turn = Mat::zeros(self.count(), self.count());
        turn[(0, 0)] = 1.0;
        for a in 0..n {
            for i in 0..n {
                turn[(1 + i, 1 + a)] = r[(i, a)];
            }
        }
        let pairs = || (0..k).flat_map(move |j| (j..k).map(move |i| (i, j)));
        for (column, (a, b)) in pairs().enumerate() {
            for (row, (i, j)) in pairs().enumerate() {
                let double = if i == j { 1.0 } else { std::f64::consts::SQRT_2 };
                let entry = if a == b {
                    r[(i, a)] * r[(j, a)]
                } else {
                    (r[(i, a)] * r[(j, b)] + r[(i, b)] * r[(j, a)]) / std::f64::consts::SQRT_2
                };
                turn[(1 + n + row, 1 + n + column)] = double * entry;
            }
        }
        turn
    }

    /// The quadratic part of weights as a symmetric matrix in coordinates (n x n, column by column).
    pub fn quadratic_form(&self, weights: &[f64], form: &mut Vec<f64>) {
        let n = self.linear;
        form.clear();
        form.resize(n * n, 0.0);
        let mut products = weights[1 + n..].iter();
        for j in 0..self.quadratic {
            for (i, weight) in (j..self.quadratic).zip(&mut products) {
                // An entry off the diagonal stands for two.
                let entry = if i == j { *weight } else { weight / std::f64::consts::SQRT_2 };
                form[j * n + i] = entry;
                form[i * n + j] = entry;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simulate::normals;
    use rand::SeedableRng;
    use rand_chacha::ChaCha8Rng;

    #[test]
    fn features_turn_with_their_directions() {
        let (dim, n, k) = (3, 3, 2);
        let axes = [1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0];
        // Within the first two directions, so that no product leaves the features.
        let turned = [0.6, 0.8, 0.0, -0.8, 0.6, 0.0, 0.0, 0.0, 1.0];
        let mut features = Features::new(dim, n, k).with_basis(axes.to_vec()).unwrap();
        let query = [0.3, -0.5, 0.8];
        let (mut y, mut before, mut after) = (Vec::new(), Vec::new(), Vec::new());
        features.coordinates(&query, &mut y);
        features.of_coordinates(&y, &mut before);
        let (rotation, turn) = features.turn(&turned);
        features.coordinates(&query, &mut y);
        features.of_coordinates(&y, &mut after);
        let product = |matrix: &Mat<f64>, x: &[f64], i: usize| (0..x.len()).map(|j| matrix[(i, j)] * x[j]).sum::<f64>();
        assert!((0..3).all(|i| (product(&rotation, &query, i) - y[i]).abs() < 1e-12));
        assert!((0..features.count()).all(|i| (product(&turn, &before, i) - after[i]).abs() < 1e-12));
    }

    #[test]
    fn a_quadratic_part_is_the_form_of_its_weights() {
        let features = Features::new(6, 4, 3);
        let mut generator = ChaCha8Rng::seed_from_u64(2);
        let weights = normals(features.count(), &mut generator);
        let y = normals(4, &mut generator);
        let (mut phi, mut form) = (Vec::new(), Vec::new());
        features.of_coordinates(&y, &mut phi);
        features.quadratic_form(&weights, &mut form);
        let of_form: f64 =
            (0..4).flat_map(|j| (0..4).map(move |i| (i, j))).map(|(i, j)| y[i] * form[j * 4 + i] * y[j]).sum();
        assert!((of_form - dot(&phi[5..], &weights[5..])).abs() < 1e-12);
    }
}
