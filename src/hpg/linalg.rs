//! The few dense products of the update path, on plain slices.
//!
//! Sums run in a fixed order, so that a result depends on nothing but its inputs. Matrices are column-major unless
//! said otherwise; `d` is the dimension of queries.

use faer::{Mat, Side};
use nalgebra::{DMatrixView, DMatrixViewMut, Dyn};

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
    out.clear();
    out.extend(a.chunks_exact(x.len()).map(|column| dot(column, x)));
}

/// out += A x for the columns of A (each of `out`'s length)
pub fn columns_add(a: &[f64], x: &[f64], out: &mut [f64]) {
    for (column, &x) in a.chunks_exact(out.len()).zip(x) {
        axpy(x, column, out);
    }
}

/// out (d x r) = A (d x n) B + keep * out, with B (n x r) in row-major order
pub fn product(d: usize, a: &[f64], b_rows: &[f64], r: usize, keep: f64, out: &mut [f64]) {
    let n = a.len() / d;
    let a = DMatrixView::from_slice(a, d, n);
    let b = DMatrixView::<f64, Dyn, Dyn>::from_slice_with_strides(b_rows, n, r, r, 1);
    DMatrixViewMut::from_slice(out, d, r).gemm(1.0, &a, &b, keep);
}

/// Eigenvalues (ascending) and eigenvectors (columns) of a dense symmetric n x n matrix; only its lower triangle is
/// read.
///
/// faer, in one thread so that the bits do not depend on the machine's cores: nalgebra's solver returned wrong
/// decompositions of nearly degenerate matrices, which repeated queries produce.
pub fn symmetric_eigen(n: usize, a: &[f64]) -> (Vec<f64>, Vec<f64>) {
    let a = faer::MatRef::from_column_major_slice(a, n, n);
    let mut values = faer::Col::<f64>::zeros(n);
    let mut vectors = Mat::<f64>::zeros(n, n);
    let solved = a.self_adjoint_eigen(Side::Lower).map(|eigen| {
        values.copy_from(eigen.S().column_vector());
        vectors.copy_from(eigen.U());
    });
    // faer gives up only on inputs that are not finite, which cannot enter: queries and steps are checked before.
    solved.expect("a finite symmetric matrix has an eigendecomposition");
    let columns = (0..n).flat_map(|j| (0..n).map(move |i| (i, j)));
    (values.iter().copied().collect(), columns.map(|(i, j)| vectors[(i, j)]).collect())
}

/// Orthonormalises nearly orthonormal columns V (d x r) by one Newton step, V <- V (I - E / 2) with E = V'V - I.
pub fn polish(d: usize, v: &mut Vec<f64>, spare: &mut Vec<f64>) {
    let r = v.len() / d;
    let mut correction = vec![0.0; r * r];
    for (i, a) in v.chunks_exact(d).enumerate() {
        for (j, b) in v.chunks_exact(d).enumerate().take(i + 1) {
            let unit = f64::from(u8::from(i == j));
            let half_error = 0.5 * (dot(a, b) - unit);
            correction[i * r + j] = unit - half_error;
            correction[j * r + i] = unit - half_error;
        }
    }
    spare.clear();
    spare.resize(v.len(), 0.0);
    product(d, v, &correction, r, 0.0, spare);
    std::mem::swap(v, spare);
}
