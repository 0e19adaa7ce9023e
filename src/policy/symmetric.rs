//! A dense symmetric matrix, held as its lower triangle.

use faer::{MatRef, Side};

use crate::hpg::kernel::{triangle_add, triangle_times};
use crate::hpg::linalg::{compose, dot, symmetric_eigen};
use crate::hpg::spectra::Eigen;
use crate::wire::records::learner::rivals::SymmetricRecord;

/// n x n, the lower triangle packed column by column.
#[derive(Debug, Clone, PartialEq)]
pub struct Symmetric {
    n: usize,
    packed: Vec<f64>,
}

impl Symmetric {
    /// `value` times the identity.
    pub fn identity(n: usize, value: f64) -> Self {
        let mut matrix = Self { n, packed: vec![0.0; packed_len(n)] };
        matrix.columns_mut().for_each(|(_, column)| column[0] = value);
        matrix
    }

    /// V diag(values) V' for the columns of V.
    pub fn compose(n: usize, values: &[f64], vectors: &[f64]) -> Self {
        let dense = compose(n, values, vectors);
        Self { n, packed: (0..n).flat_map(|j| &dense[j * n + j..(j + 1) * n]).copied().collect() }
    }

    /// The matrix of a packed triangle, which has n (n + 1) / 2 entries.
    pub fn from_packed(n: usize, packed: Vec<f64>) -> Self {
        Self { n, packed }
    }

    /// The matrix whose entries on and below the diagonal (row i, column j) are these.
    pub fn from_lower(n: usize, entry: impl Fn(usize, usize) -> f64) -> Self {
        let entry = &entry;
        Self { n, packed: (0..n).flat_map(|j| (j..n).map(move |i| entry(i, j))).collect() }
    }

    /// The lower triangle, column by column.
    pub fn packed_mut(&mut self) -> &mut [f64] {
        &mut self.packed
    }

    /// Its record.
    pub fn record(&self) -> SymmetricRecord {
        SymmetricRecord { size: self.n as u64, lower: self.packed.clone() }
    }

    /// Restores a record; none unless it has this size and no entry beyond `most` in magnitude.
    pub fn from_record(record: SymmetricRecord, n: usize, most: f64) -> Option<Self> {
        let SymmetricRecord { size, lower: packed } = record;
        Some(Self { n: usize::try_from(size).ok()?, packed }).filter(|matrix| matrix.is_bounded(n, most))
    }

    /// Adds to an entry of the diagonal.
    pub fn add_at(&mut self, i: usize, value: f64) {
        self.packed[i * (2 * self.n + 1 - i) / 2] += value;
    }

    /// += a I
    pub fn add_identity(&mut self, a: f64) {
        self.columns_mut().for_each(|(_, column)| column[0] += a);
    }

    /// += a x x'
    pub fn add(&mut self, a: f64, x: &[f64]) {
        self.add_all(&[a], x);
    }

    /// += sum_i a_i x_i x_i', where the x_i follow each other in `x`.
    pub fn add_all(&mut self, a: &[f64], x: &[f64]) {
        triangle_add(a, x, &mut self.packed);
    }

    /// += another of the same size.
    pub fn merge(&mut self, other: &Self) {
        self.packed.iter_mut().zip(&other.packed).for_each(|(entry, other)| *entry += other);
    }

    /// *= a
    pub fn scale(&mut self, a: f64) {
        self.packed.iter_mut().for_each(|entry| *entry *= a);
    }

    /// x'Ax
    pub fn form(&self, x: &[f64]) -> f64 {
        self.columns().map(|(j, column)| x[j] * (2.0 * dot(column, &x[j..]) - column[0] * x[j])).sum()
    }

    /// A x
    pub fn times(&self, x: &[f64]) -> Vec<f64> {
        let mut product = vec![0.0; self.n];
        triangle_times(&self.packed, x, &mut product);
        product
    }

    /// Eigenvalues (ascending) and eigenvectors (columns).
    pub fn eigen(&self) -> (Vec<f64>, Vec<f64>) {
        symmetric_eigen(self.n, &self.lower())
    }

    /// The same as parameters of a model: the mirror map of Euclidean steps is the identity.
    pub fn to_eigen(&self) -> Eigen {
        let (lambda, vectors) = self.eigen();
        Eigen { gamma: lambda.clone(), lambda, vectors }
    }

    /// Whether it has this size and no entry beyond `most` in magnitude.
    pub fn is_bounded(&self, n: usize, most: f64) -> bool {
        self.n == n && self.packed.len() == packed_len(n) && self.packed.iter().all(|x| x.abs() <= most)
    }

    /// Whether x'Ax > 0 for all x but 0.
    pub fn is_positive(&self) -> bool {
        MatRef::from_column_major_slice(&self.lower(), self.n, self.n).llt(Side::Lower).is_ok()
    }

    /// The lower triangle in place, zeros above.
    pub fn lower(&self) -> Vec<f64> {
        let mut dense = vec![0.0; self.n * self.n];
        for (j, column) in self.columns() {
            dense[j * self.n + j..(j + 1) * self.n].copy_from_slice(column);
        }
        dense
    }

    fn columns(&self) -> impl Iterator<Item = (usize, &[f64])> {
        let mut rest = &self.packed[..];
        (0..self.n).map(move |j| {
            let (column, tail) = rest.split_at(self.n - j);
            rest = tail;
            (j, column)
        })
    }

    fn columns_mut(&mut self) -> impl Iterator<Item = (usize, &mut [f64])> {
        let n = self.n;
        let mut rest = &mut self.packed[..];
        (0..n).map(move |j| {
            let (column, tail) = std::mem::take(&mut rest).split_at_mut(n - j);
            rest = tail;
            (j, column)
        })
    }
}

/// Entries of a lower triangle.
pub fn packed_len(n: usize) -> usize {
    n * (n + 1) / 2
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_are_those_of_the_dense_matrix() {
        for n in [1, 2, 5, 17] {
            let x = |seed: usize| (0..n).map(|i| ((i * 7 + seed * 3) % 11) as f64 - 4.5).collect::<Vec<f64>>();
            let mut matrix = Symmetric::identity(n, 2.0);
            matrix.add(0.5, &x(1));
            matrix.add(-0.25, &x(2));
            let entry = |i: usize, j: usize| {
                2.0 * f64::from(u8::from(i == j)) + 0.5 * x(1)[i] * x(1)[j] - 0.25 * x(2)[i] * x(2)[j]
            };
            let y = x(3);
            let expected: Vec<f64> = (0..n).map(|i| (0..n).map(|j| entry(i, j) * y[j]).sum()).collect();
            let product = matrix.times(&y);
            assert!(product.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-9), "{product:?} {expected:?}");
            assert!((matrix.form(&y) - dot(&y, &expected)).abs() < 1e-9);
            let (values, vectors) = matrix.eigen();
            let again = Symmetric::compose(n, &values, &vectors);
            assert!(again.packed.iter().zip(&matrix.packed).all(|(a, b)| (a - b).abs() < 1e-9));
            assert!(matrix.is_bounded(n, 1e3) && !matrix.is_bounded(n, 1e-3) && !matrix.is_bounded(n + 1, 1e3));
            assert_eq!(matrix.is_positive(), values[0] > 0.0);
        }
    }
}
