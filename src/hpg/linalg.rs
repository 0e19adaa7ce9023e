//! The few dense products of the update path, on plain slices.
//!
//! Sums run in a fixed order, so that a result depends on nothing but its inputs. Matrices are column-major unless
//! said otherwise; `d` is the dimension of queries.

use faer::{MatRef, Side};

use super::aligned::Aligned;
use super::kernel::{self, Strided};

/// x . y
pub fn dot(x: &[f64], y: &[f64]) -> f64 {
    let (x_blocks, x_rest) = x.as_chunks::<8>();
    let (y_blocks, y_rest) = y.as_chunks::<8>();
    let mut sums = [0.0; 8];
    for (a, b) in x_blocks.iter().zip(y_blocks) {
        for i in 0..8 {
            sums[i] += a[i] * b[i];
        }
    }
    let rest: f64 = x_rest.iter().zip(y_rest).map(|(a, b)| a * b).sum();
    ((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + (sums[3] + sums[7])) + rest
}

/// y += a x
pub fn axpy(a: f64, x: &[f64], y: &mut [f64]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y += a * x;
    }
}

/// out = A' x for the columns of A (each of `x`'s length)
pub fn columns_dot(a: &[f64], x: &[f64], out: &mut Vec<f64>) {
    columns_dot_more(a, x, &[], out);
}

/// The same where the products with the first columns are known
pub fn columns_dot_more(a: &[f64], x: &[f64], known: &[f64], out: &mut Vec<f64>) {
    // Not cleared before: all of it is overwritten.
    out.resize(a.len() / x.len().max(1), 0.0);
    let (first, rest) = out.split_at_mut(known.len());
    first.copy_from_slice(known);
    kernel::products(x.len(), &a[known.len() * x.len()..], x, rest);
}

/// out += A x for the columns of A (each of `out`'s length)
pub fn columns_add(a: &[f64], x: &[f64], out: &mut [f64]) {
    kernel::combine(a, x, out);
}

/// out (d x r) = A (d x n) B, or added to what is there, with B (n x r) in row-major order
pub fn product(d: usize, a: &[f64], b_rows: &[f64], r: usize, add: bool, out: &mut [f64]) {
    kernel::multiply(d, (a, d), a.len() / d, Strided { values: b_rows, row: r, column: 1 }, add, out);
}

/// B R (d x n) for the columns of B (d x n) and of R (n x n)
pub fn rotated(basis: &[f64], rotation: &[f64], d: usize) -> Vec<f64> {
    let n = basis.len() / d;
    let mut vectors = vec![0.0; basis.len()];
    kernel::multiply(d, (basis, d), n, Strided { values: rotation, row: 1, column: n }, false, &mut vectors);
    vectors
}

/// Eigenvalues (ascending) and eigenvectors (columns) of a dense symmetric n x n matrix; only its lower triangle is
/// read.
///
/// faer, which is built here without its threads so that the bits do not depend on the machine's cores: nalgebra's
/// solver returned wrong decompositions of nearly degenerate matrices, which repeated queries produce. Should faer not
/// converge, Jacobi's rotations always do.
pub fn symmetric_eigen(n: usize, a: &[f64]) -> (Vec<f64>, Vec<f64>) {
    if n == 0 {
        return (Vec::new(), Vec::new());
    }
    let Ok(eigen) = MatRef::from_column_major_slice(a, n, n).self_adjoint_eigen(Side::Lower) else {
        return jacobi_eigen(n, a);
    };
    let (values, vectors) = (eigen.S().column_vector(), eigen.U());
    let columns = (0..n).flat_map(|j| (0..n).map(move |i| (i, j)));
    (values.iter().copied().collect(), columns.map(|(i, j)| vectors[(i, j)]).collect())
}

/// The same by cyclic rotations: slow, simple, and bound to converge.
fn jacobi_eigen(n: usize, lower: &[f64]) -> (Vec<f64>, Vec<f64>) {
    let mut a: Vec<f64> = (0..n * n).map(|at| lower[(at / n).min(at % n) * n + (at / n).max(at % n)]).collect();
    let mut v: Vec<f64> = (0..n * n).map(|at| f64::from(u8::from(at / n == at % n))).collect();
    for _ in 0..JACOBI_SWEEPS {
        for p in 0..n {
            for q in p + 1..n {
                rotate_away(n, &mut a, &mut v, p, q);
            }
        }
    }
    let mut order: Vec<usize> = (0..n).collect();
    order.sort_by(|&i, &j| a[i * n + i].total_cmp(&a[j * n + j]));
    let values = order.iter().map(|&i| a[i * n + i]).collect();
    (values, order.iter().flat_map(|&i| &v[i * n..(i + 1) * n]).copied().collect())
}

/// Convergence is quadratic once it begins: a handful of sweeps do, these are on the safe side.
const JACOBI_SWEEPS: usize = 20;

/// One rotation that makes a_pq zero, collected in the columns of v.
fn rotate_away(n: usize, a: &mut [f64], v: &mut [f64], p: usize, q: usize) {
    let off = a[p * n + q];
    if off == 0.0 {
        return;
    }
    let slope = 0.5 * (a[q * n + q] - a[p * n + p]) / off;
    let tangent = 1.0_f64.copysign(slope) / (slope.abs() + slope.hypot(1.0));
    let cos = 1.0 / tangent.hypot(1.0);
    let sin = tangent * cos;
    for k in 0..n {
        let (x, y) = (a[p * n + k], a[q * n + k]);
        (a[p * n + k], a[q * n + k]) = (cos * x - sin * y, sin * x + cos * y);
    }
    for k in 0..n {
        let (x, y) = (a[k * n + p], a[k * n + q]);
        (a[k * n + p], a[k * n + q]) = (cos * x - sin * y, sin * x + cos * y);
        let (x, y) = (v[p * n + k], v[q * n + k]);
        (v[p * n + k], v[q * n + k]) = (cos * x - sin * y, sin * x + cos * y);
    }
}

/// V diag(values) V' (d x d) for the columns of V
pub fn compose(d: usize, values: &[f64], v: &[f64]) -> Vec<f64> {
    let mut dense = vec![0.0; d * d];
    for (&value, vector) in values.iter().zip(v.chunks_exact(d)) {
        for (column, &x) in dense.chunks_exact_mut(d).zip(vector) {
            axpy(value * x, vector, column);
        }
    }
    dense
}

/// Sum of the magnitudes of the eigenvalues of a dense symmetric matrix
pub fn nuclear_norm(n: usize, a: &[f64]) -> f64 {
    symmetric_eigen(n, a).0.iter().map(|value| value.abs()).sum()
}

/// Orthonormalises nearly orthonormal columns V (d x r) by one Newton step, V <- V (I - E / 2) with E = V'V - I.
pub fn polish(d: usize, v: &mut Aligned, spare: &mut Spare) {
    let r = v.len() / d;
    let Spare { vectors, square, .. } = spare;
    square.clear();
    square.resize(r * r, 0.0);
    for (i, column) in v.chunks_exact(d).enumerate() {
        let row = &mut square[i * r..i * r + i + 1];
        kernel::products(d, &v[..(i + 1) * d], column, row);
        for (j, entry) in row.iter_mut().enumerate() {
            let unit = f64::from(u8::from(i == j));
            *entry = unit - 0.5 * (*entry - unit);
        }
        for j in 0..i {
            square[j * r + i] = square[i * r + j];
        }
    }
    vectors.set_len(v.len());
    product(d, v, square, r, false, vectors);
    std::mem::swap(v, vectors);
}

/// Memory for what is made anew of vectors.
#[derive(Debug, Clone, Default)]
pub struct Spare {
    /// d x r
    pub vectors: Aligned,
    /// r
    pub squares: Vec<f64>,
    square: Vec<f64>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Both solvers, on matrices of few distinct values: repeated eigenvalues are common.
        #[test]
        fn eigensolvers_decompose(n in 1..12_usize, entries in prop::collection::vec(-2..3_i8, 144), noise in -1e-9..1e-9_f64) {
            let entry = |i: usize, j: usize| f64::from(entries[i.min(j) * 12 + i.max(j)]) + noise * (i + j) as f64;
            let a: Vec<f64> = (0..n * n).map(|at| entry(at / n, at % n)).collect();
            for (values, vectors) in [symmetric_eigen(n, &a), jacobi_eigen(n, &a)] {
                prop_assert!(values.is_sorted());
                let composed = compose(n, &values, &vectors);
                prop_assert!(a.iter().zip(&composed).all(|(x, y)| (x - y).abs() < 1e-12));
                let identity = compose(n, &vec![1.0; n], &vectors);
                let unit = |at: usize| f64::from(u8::from(at / n == at % n));
                prop_assert!(identity.iter().enumerate().all(|(at, x)| (x - unit(at)).abs() < 1e-13));
            }
        }
    }
}
