//! What a critic says of one model, as a function of the query.
//!
//! ```text
//! s(q) = constant + l.y + y'Qy + q'Wq        y = V'q;  W: the remainder
//!      = constant + l.z + z'Pz               z = B'q, B: an orthonormal basis of V and the eigenvectors of W
//! ```

use crate::hpg::linalg::{axpy, columns_add, columns_dot, rotated, symmetric_eigen};
use crate::hpg::spectra::{Eigen, extend_basis};

/// s of one model, in parts.
#[derive(Debug, Clone, Default)]
pub struct Form {
    /// The constant part.
    pub constant: f64,
    /// l, in coordinates.
    pub linear: Vec<f64>,
    /// Q, in coordinates (n x n, column by column).
    pub quadratic: Vec<f64>,
    /// W
    pub remainder: Eigen,
}

/// The same in one orthonormal basis.
#[derive(Debug, Clone)]
pub struct Expanded {
    /// The constant part.
    pub constant: f64,
    /// B, one vector after the other.
    pub basis: Vec<f64>,
    /// l
    pub linear: Vec<f64>,
    /// P (n x n, column by column).
    pub quadratic: Vec<f64>,
}

impl Form {
    /// Expresses it in one basis; `directions` are V, possibly fewer than there are coordinates.
    pub fn expand(&self, directions: &[f64], dim: usize) -> Expanded {
        let (n, known) = (self.linear.len(), directions.len() / dim);
        let mut basis = directions.to_vec();
        self.remainder.vectors.chunks_exact(dim).for_each(|vector| extend_basis(&mut basis, vector));
        let size = basis.len() / dim;
        let mut linear = self.linear[..known].to_vec();
        linear.resize(size, 0.0);
        let mut quadratic = vec![0.0; size * size];
        for j in 0..known {
            quadratic[j * size..j * size + known].copy_from_slice(&self.quadratic[j * n..j * n + known]);
        }
        let mut coordinates = Vec::new();
        for (lambda, vector) in self.remainder.lambda.iter().zip(self.remainder.vectors.chunks_exact(dim)) {
            columns_dot(&basis, vector, &mut coordinates);
            for (column, z) in quadratic.chunks_exact_mut(size).zip(&coordinates) {
                axpy(lambda * z, &coordinates, column);
            }
        }
        Expanded { constant: self.constant, basis, linear, quadratic }
    }
}

/// Eigenvalues below this share of the largest are zero but for rounding.
const ROUNDING: f64 = 1e-12;

impl Expanded {
    /// Eigenvalues and eigenvectors of the quadratic part, without those that are zero.
    pub fn eigen(&self, dim: usize) -> (Vec<f64>, Vec<f64>) {
        let (lambda, rotation) = symmetric_eigen(self.linear.len(), &self.quadratic);
        let vectors = rotated(&self.basis, &rotation, dim);
        let least = ROUNDING * lambda.iter().fold(0.0_f64, |most, lambda| most.max(lambda.abs()));
        let kept = lambda.iter().zip(vectors.chunks_exact(dim)).filter(|(lambda, _)| lambda.abs() > least);
        let (lambda, vectors): (Vec<f64>, Vec<&[f64]>) = kept.unzip();
        (lambda, vectors.concat())
    }

    /// The linear part as a vector of `dim` components.
    pub fn linear_part(&self, dim: usize) -> Vec<f64> {
        let mut linear = vec![0.0; dim];
        columns_add(&self.basis, &self.linear, &mut linear);
        linear
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hpg::linalg::dot;
    use crate::simulate::normals;
    use rand::SeedableRng;
    use rand_chacha::ChaCha8Rng;

    #[test]
    fn an_expanded_form_has_the_same_values() {
        let mut generator = ChaCha8Rng::seed_from_u64(3);
        let (dim, n, known) = (7, 3, 2);
        let mut directions = Vec::new();
        (0..known).for_each(|_| extend_basis(&mut directions, &normals(dim, &mut generator)));
        let mut vectors = Vec::new();
        (0..2).for_each(|_| extend_basis(&mut vectors, &normals(dim, &mut generator)));
        let half = normals(n * n, &mut generator);
        let quadratic = (0..n * n).map(|at| half[at] + half[at % n * n + at / n]).collect();
        let remainder = Eigen { gamma: Vec::new(), lambda: vec![0.4, -1.5], vectors };
        let form = Form { constant: 0.3, linear: normals(n, &mut generator), quadratic, remainder };
        let expanded = form.expand(&directions, dim);
        let (lambda, vectors) = expanded.eigen(dim);
        let linear = expanded.linear_part(dim);
        let square = |lambda: &[f64], vectors: &[f64], q: &[f64]| -> f64 {
            lambda.iter().zip(vectors.chunks_exact(dim)).map(|(lambda, v)| lambda * dot(v, q).powi(2)).sum()
        };
        for _ in 0..5 {
            let q = normals(dim, &mut generator);
            let y: Vec<f64> = directions.chunks_exact(dim).map(|v| dot(v, &q)).collect();
            let inner: f64 = (0..known)
                .flat_map(|i| (0..known).map(move |j| (i, j)))
                .map(|(i, j)| y[i] * form.quadratic[j * n + i] * y[j])
                .sum();
            let expected = form.constant
                + dot(&form.linear[..known], &y)
                + inner
                + square(&form.remainder.lambda, &form.remainder.vectors, &q);
            let found = expanded.constant + dot(&linear, &q) + square(&lambda, &vectors, &q);
            assert!((found - expected).abs() < 1e-9, "{found} {expected}");
        }
    }
}
