//! The inner loops of dense products, in the widest vectors that the processor has.
//!
//! The instruction set is found at run time, so that one binary is fast everywhere. Each number is summed in an order
//! that depends on the width of vectors and on nothing else: not on the number of columns, nor on addresses.

use pulp::{Arch, Simd, WithSimd};

/// out = A'X for columns of `d` numbers: a column of `out` for each of X. Many of X at once read A fewer times, and give
/// the bits that each would alone.
pub fn products(d: usize, a: &[f64], x: &[f64], out: &mut [f64]) {
    if !a.is_empty() {
        Arch::new().dispatch(Products { d, a, x, out });
    }
}

/// out += A x for the columns of A (each of `out`'s length)
pub fn combine(a: &[f64], x: &[f64], out: &mut [f64]) {
    if !out.is_empty() {
        Arch::new().dispatch(Combine { a, x, out });
    }
}

/// A matrix of which element (i, j) is at i * `row` + j * `column`, one of which is 1.
#[derive(Debug, Clone, Copy)]
pub struct Strided<'a> {
    /// The elements.
    pub values: &'a [f64],
    /// From one row to the next.
    pub row: usize,
    /// From one column to the next.
    pub column: usize,
}

/// out (d x r) = A (d x n) B (n x r), or added to what is there, with columns of A `a.1` apart and those of `out` d.
pub fn multiply(d: usize, a: (&[f64], usize), n: usize, b: Strided, add: bool, out: &mut [f64]) {
    if d > 0 {
        Arch::new().dispatch(Multiply { d, a: a.0, a_column: a.1, n, b, add, out });
    }
}

/// out += A x for a symmetric A, of which `packed` is the lower triangle, column by column
pub fn triangle_times(packed: &[f64], x: &[f64], out: &mut [f64]) {
    Arch::new().dispatch(TriangleTimes { packed, x, out });
}

/// A += sum_i a_i x_i x_i' for a symmetric A, of which `packed` is the lower triangle, column by column; the x_i follow each
/// other in `x`. Several at once read A fewer times, and give the bits that one after the other would.
pub fn triangle_add(a: &[f64], x: &[f64], packed: &mut [f64]) {
    if !packed.is_empty() && !a.is_empty() {
        Arch::new().dispatch(TriangleAdd { a, x, packed });
    }
}

/// The hyperbolic sine of each, to a few units in the last place; the same bits whatever the width of vectors.
pub fn sinh(values: &mut [f64]) {
    if values.iter().all(|x| x.abs() <= SINH_MAX) {
        Arch::new().dispatch(Sinh { values });
    } else {
        values.iter_mut().for_each(|x| *x = x.sinh());
    }
}

/// How many columns are worked on together.
const COLUMNS: usize = 8;

/// How many are multiplied with how many others at once, where there are several.
const CROSSED: usize = 4;

/// The most lanes that a vector has.
pub const LANES_MAX: usize = 8;

struct Products<'a> {
    d: usize,
    a: &'a [f64],
    x: &'a [f64],
    out: &'a mut [f64],
}

impl WithSimd for Products<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { d, a, x, out } = self;
        for (x, out) in x.chunks(CROSSED * d).zip(out.chunks_mut(CROSSED * (a.len() / d))) {
            match x.len() / d {
                1 => cross::<S, COLUMNS, 1>(simd, d, a, x, out),
                2 => cross::<S, CROSSED, 2>(simd, d, a, x, out),
                3 => cross::<S, CROSSED, 3>(simd, d, a, x, out),
                _ => cross::<S, CROSSED, CROSSED>(simd, d, a, x, out),
            }
        }
    }
}

/// The products of all columns of A with the X columns of x, N columns of A at a time.
#[inline(always)]
fn cross<S: Simd, const N: usize, const X: usize>(simd: S, d: usize, a: &[f64], x: &[f64], out: &mut [f64]) {
    let columns = a.len() / d;
    let whole = columns / N * N;
    for j in (0..whole).step_by(N) {
        for (q, sums) in dots::<S, N, X>(simd, d, &a[j * d..], x).into_iter().enumerate() {
            out[q * columns + j..][..N].copy_from_slice(&sums);
        }
    }
    for j in whole..columns {
        for (q, [sum]) in dots::<S, 1, X>(simd, d, &a[j * d..], x).into_iter().enumerate() {
            out[q * columns + j] = sum;
        }
    }
}

/// Products of N columns with X others, each of which is read once.
#[inline(always)]
fn dots<S: Simd, const N: usize, const X: usize>(simd: S, d: usize, a: &[f64], x: &[f64]) -> [[f64; N]; X] {
    let n = d / S::F64_LANES;
    let columns: [&[f64]; N] = std::array::from_fn(|j| &a[j * d..(j + 1) * d]);
    let others: [&[f64]; X] = std::array::from_fn(|q| &x[q * d..(q + 1) * d]);
    let bodies: [&[S::f64s]; N] = columns.map(|column| &S::as_simd_f64s(column).0[..n]);
    let other_bodies: [&[S::f64s]; X] = others.map(|other| &S::as_simd_f64s(other).0[..n]);
    let mut sums = [[simd.splat_f64s(0.0); N]; X];
    for i in 0..n {
        for q in 0..X {
            for j in 0..N {
                sums[q][j] = simd.mul_add_e_f64s(bodies[j][i], other_bodies[q][i], sums[q][j]);
            }
        }
    }
    if n * S::F64_LANES < d {
        let rest = |column: &[f64]| simd.partial_load_f64s(S::as_simd_f64s(column).1);
        for q in 0..X {
            for j in 0..N {
                sums[q][j] = simd.mul_add_e_f64s(rest(columns[j]), rest(others[q]), sums[q][j]);
            }
        }
    }
    sums.map(|sums| sums.map(|sum| simd.reduce_sum_f64s(sum)))
}

struct Combine<'a> {
    a: &'a [f64],
    x: &'a [f64],
    out: &'a mut [f64],
}

impl WithSimd for Combine<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { a, x, out } = self;
        let d = out.len();
        for (a, x) in a.chunks(COLUMNS * d).zip(x.chunks(COLUMNS)) {
            if let Ok(x) = <&[f64; COLUMNS]>::try_from(x) {
                add_columns(simd, a, x, out);
                continue;
            }
            for (a, &x) in a.chunks_exact(d).zip(x) {
                add_columns(simd, a, &[x], out);
            }
        }
    }
}

/// out += A x for N columns; `out` is read and written once.
#[inline(always)]
fn add_columns<S: Simd, const N: usize>(simd: S, a: &[f64], x: &[f64; N], out: &mut [f64]) {
    let d = out.len();
    let (out, out_rest) = S::as_mut_simd_f64s(out);
    let n = out.len();
    let columns: [&[f64]; N] = std::array::from_fn(|j| &a[j * d..(j + 1) * d]);
    let bodies: [&[S::f64s]; N] = columns.map(|column| &S::as_simd_f64s(column).0[..n]);
    let x = x.map(|x| simd.splat_f64s(x));
    for i in 0..n {
        for j in 0..N {
            out[i] = simd.mul_add_e_f64s(bodies[j][i], x[j], out[i]);
        }
    }
    if !out_rest.is_empty() {
        let mut sum = simd.partial_load_f64s(out_rest);
        for j in 0..N {
            let rest = simd.partial_load_f64s(S::as_simd_f64s(columns[j]).1);
            sum = simd.mul_add_e_f64s(rest, x[j], sum);
        }
        simd.partial_store_f64s(out_rest, sum);
    }
}

struct Multiply<'a> {
    d: usize,
    a: &'a [f64],
    a_column: usize,
    n: usize,
    b: Strided<'a>,
    add: bool,
    out: &'a mut [f64],
}

impl WithSimd for Multiply<'_> {
    type Output = ();

    /// By panels of as many vectors of rows as registers allow for, each with sums enough to keep the arithmetic units busy.
    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        let mut at = 0;
        // Wide vectors come with twice as many registers.
        while S::F64_LANES == LANES_MAX && self.d - at >= 4 * S::F64_LANES {
            self.panel::<S, 4>(simd, at);
            at += 4 * S::F64_LANES;
        }
        while self.d - at >= 3 * S::F64_LANES {
            self.panel::<S, 3>(simd, at);
            at += 3 * S::F64_LANES;
        }
        if self.d - at >= 2 * S::F64_LANES {
            self.panel::<S, 2>(simd, at);
            at += 2 * S::F64_LANES;
        }
        while at < self.d {
            self.panel::<S, 1>(simd, at);
            at += S::F64_LANES;
        }
    }
}

impl Multiply<'_> {
    /// All columns of a panel of R vectors of rows, the last of which may be in part beyond the matrix.
    #[inline(always)]
    fn panel<S: Simd, const R: usize>(&mut self, simd: S, at: usize) {
        let r = self.out.len() / self.d;
        let whole = r / TILE * TILE;
        for j in (0..whole).step_by(TILE) {
            self.tile::<S, R, TILE>(simd, at, j);
        }
        match r - whole {
            1 => self.tile::<S, R, 1>(simd, at, whole),
            2 => self.tile::<S, R, 2>(simd, at, whole),
            3 => self.tile::<S, R, 3>(simd, at, whole),
            _ => {}
        }
    }

    #[inline(always)]
    fn tile<S: Simd, const R: usize, const C: usize>(&mut self, simd: S, at: usize, j: usize) {
        let rows = (self.d - at).min(R * S::F64_LANES);
        let whole = rows == R * S::F64_LANES;
        let mut sums = [[simd.splat_f64s(0.0); R]; C];
        if self.add {
            for (c, sums) in sums.iter_mut().enumerate() {
                *sums = load(simd, &self.out[(j + c) * self.d + at..][..rows], whole);
            }
        }
        let Strided { values, row, column } = self.b;
        // One check of bounds for all columns, where they are side by side.
        if column == 1 {
            for i in 0..self.n {
                let a: [S::f64s; R] = load(simd, &self.a[i * self.a_column + at..][..rows], whole);
                let b = &values[i * row + j..][..C];
                for c in 0..C {
                    add_multiple(simd, a, b[c], &mut sums[c]);
                }
            }
        } else {
            let b: [&[f64]; C] = std::array::from_fn(|c| &values[((j + c) * column).min(values.len())..]);
            for i in 0..self.n {
                let a: [S::f64s; R] = load(simd, &self.a[i * self.a_column + at..][..rows], whole);
                for c in 0..C {
                    add_multiple(simd, a, b[c][i * row], &mut sums[c]);
                }
            }
        }
        for (c, sums) in sums.into_iter().enumerate() {
            store(simd, &mut self.out[(j + c) * self.d + at..][..rows], sums, whole);
        }
    }
}

/// sums += b a
#[inline(always)]
fn add_multiple<S: Simd, const R: usize>(simd: S, a: [S::f64s; R], b: f64, sums: &mut [S::f64s; R]) {
    let b = simd.splat_f64s(b);
    for l in 0..R {
        sums[l] = simd.mul_add_e_f64s(a[l], b, sums[l]);
    }
}

/// How many columns of a product are made together.
const TILE: usize = 4;

/// R vectors, of which what is beyond the end is zero.
#[inline(always)]
fn load<S: Simd, const R: usize>(simd: S, from: &[f64], whole: bool) -> [S::f64s; R] {
    if whole {
        let vectors = S::as_simd_f64s(from).0;
        return std::array::from_fn(|l| vectors[l]);
    }
    std::array::from_fn(|l| simd.partial_load_f64s(&from[(l * S::F64_LANES).min(from.len())..]))
}

#[inline(always)]
fn store<S: Simd, const R: usize>(simd: S, to: &mut [f64], values: [S::f64s; R], whole: bool) {
    if whole {
        let vectors = S::as_mut_simd_f64s(to).0;
        vectors[..R].copy_from_slice(&values);
        return;
    }
    for (to, value) in to.chunks_mut(S::F64_LANES).zip(values) {
        simd.partial_store_f64s(to, value);
    }
}

struct TriangleTimes<'a> {
    packed: &'a [f64],
    x: &'a [f64],
    out: &'a mut [f64],
}

impl WithSimd for TriangleTimes<'_> {
    type Output = ();

    /// An entry below the diagonal is read once for the two that it stands for.
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { mut packed, x, out } = self;
        for j in 0..x.len() {
            let (column, rest) = packed.split_at(x.len() - j);
            packed = rest;
            let (below, below_rest) = S::as_simd_f64s(&column[1..]);
            let (x_below, x_rest) = S::as_simd_f64s(&x[j + 1..]);
            let (out_below, out_rest) = S::as_mut_simd_f64s(&mut out[j + 1..]);
            let factor = simd.splat_f64s(x[j]);
            let mut sum = simd.splat_f64s(0.0);
            for ((&a, &x), out) in below.iter().zip(x_below).zip(out_below) {
                sum = simd.mul_add_e_f64s(a, x, sum);
                *out = simd.mul_add_e_f64s(a, factor, *out);
            }
            let a = simd.partial_load_f64s(below_rest);
            sum = simd.mul_add_e_f64s(a, simd.partial_load_f64s(x_rest), sum);
            let end = simd.mul_add_e_f64s(a, factor, simd.partial_load_f64s(out_rest));
            simd.partial_store_f64s(out_rest, end);
            out[j] += column[0] * x[j] + simd.reduce_sum_f64s(sum);
        }
    }
}

struct TriangleAdd<'a> {
    a: &'a [f64],
    x: &'a [f64],
    packed: &'a mut [f64],
}

impl WithSimd for TriangleAdd<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { a, x, packed } = self;
        let n = x.len() / a.len();
        for (a, x) in a.chunks(COLUMNS).zip(x.chunks(COLUMNS * n)) {
            if let Ok(a) = <&[f64; COLUMNS]>::try_from(a) {
                add_squares(simd, a, x, packed);
                continue;
            }
            for (&a, x) in a.iter().zip(x.chunks_exact(n)) {
                add_squares(simd, &[a], x, packed);
            }
        }
    }
}

/// A += sum_i a_i x_i x_i' for N vectors; A is read and written once.
#[inline(always)]
fn add_squares<S: Simd, const N: usize>(simd: S, a: &[f64; N], x: &[f64], mut packed: &mut [f64]) {
    let n = x.len() / N;
    for j in 0..n {
        let (column, rest) = packed.split_at_mut(n - j);
        packed = rest;
        let tails: [&[f64]; N] = std::array::from_fn(|i| &x[i * n + j..(i + 1) * n]);
        let factors: [S::f64s; N] = std::array::from_fn(|i| simd.splat_f64s(a[i] * tails[i][0]));
        let (column, column_rest) = S::as_mut_simd_f64s(column);
        let bodies: [&[S::f64s]; N] = tails.map(|tail| &S::as_simd_f64s(tail).0[..column.len()]);
        for (l, entries) in column.iter_mut().enumerate() {
            for i in 0..N {
                *entries = simd.mul_add_e_f64s(bodies[i][l], factors[i], *entries);
            }
        }
        if !column_rest.is_empty() {
            let mut entries = simd.partial_load_f64s(column_rest);
            for i in 0..N {
                let rest = simd.partial_load_f64s(S::as_simd_f64s(tails[i]).1);
                entries = simd.mul_add_e_f64s(rest, factors[i], entries);
            }
            simd.partial_store_f64s(column_rest, entries);
        }
    }
}

struct Sinh<'a> {
    values: &'a mut [f64],
}

impl WithSimd for Sinh<'_> {
    type Output = ();

    /// Without branches, which leaves it to the compiler to take as many at a time as a vector holds.
    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        for x in self.values {
            let less_one = exp_m1(x.abs());
            *x = (0.5 * (less_one + less_one / (less_one + 1.0))).copysign(*x);
        }
    }
}

/// Beyond it 2^n below has no place in a number's exponent, nor soon has the sine.
const SINH_MAX: f64 = 700.0;

/// e^x - 1 for x from 0 to [`SINH_MAX`]: with x = n log 2 + r it is 2^n (e^r - 1) + (2^n - 1), and e^r - 1 is its series.
#[inline(always)]
fn exp_m1(x: f64) -> f64 {
    // Added to a number it leaves no room for a fraction, and the whole part in the last bits.
    const ROUND: f64 = 6_755_399_441_055_744.0;
    // The first part of log 2 has so few digits that n times it is exact.
    const LN_2: [f64; 2] = [6.931_471_803_691_238e-1, 1.908_214_929_270_587_7e-10];
    let shifted = x * std::f64::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = (x - n * LN_2[0]) - n * LN_2[1];
    let mut series = INVERSE_FACTORIALS[0];
    for factor in &INVERSE_FACTORIALS[1..] {
        series = series * r + factor;
    }
    let power = f64::from_bits(shifted.to_bits().wrapping_add(1023) << 52);
    power * (r + r * r * series) + (power - 1.0)
}

/// 1 / 13! to 1 / 2!: with |r| at most half of log 2 the next is below rounding.
const INVERSE_FACTORIALS: [f64; 12] = {
    let (mut inverses, mut factorial, mut n) = ([0.0; 12], 1.0, 2);
    while n <= 13 {
        factorial *= n as f64;
        inverses[13 - n] = 1.0 / factorial;
        n += 1;
    }
    inverses
};

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn numbers(count: usize, salt: usize) -> Vec<f64> {
        (0..count).map(|i| ((i * 7919 + salt * 104_729) % 1009) as f64 / 504.5 - 1.0).collect()
    }

    fn close(x: &[f64], y: &[f64]) -> bool {
        x.len() == y.len() && x.iter().zip(y).all(|(x, y)| (x - y).abs() < 1e-12)
    }

    proptest! {
        /// Sizes around the widths of vectors and blocks, against the plain sums.
        #[test]
        fn equal_plain_sums(d in 1..70_usize, n in 0..20_usize, r in 0..20_usize, add in any::<bool>()) {
            let (a, b, x, y) = (numbers(d * n, 1), numbers(n * r, 2), numbers(d, 3), numbers(n, 4));
            let mut out = vec![f64::NAN; n];
            products(d, &a, &x, &mut out);
            let expected: Vec<f64> = (0..n).map(|j| (0..d).map(|i| a[j * d + i] * x[i]).sum()).collect();
            prop_assert!(close(&out, &expected));

            let mut out = x.clone();
            combine(&a, &y, &mut out);
            let expected: Vec<f64> = (0..d).map(|i| x[i] + (0..n).map(|j| a[j * d + i] * y[j]).sum::<f64>()).collect();
            prop_assert!(close(&out, &expected));

            let start = numbers(d * r, 5);
            let entry = |i: usize, j: usize| {
                let sum: f64 = (0..n).map(|l| a[l * d + i] * b[l * r + j]).sum();
                sum + if add { start[j * d + i] } else { 0.0 }
            };
            let mut out = start.clone();
            multiply(d, (&a, d), n, Strided { values: &b, row: r, column: 1 }, add, &mut out);
            let expected: Vec<f64> = (0..d * r).map(|at| entry(at % d, at / d)).collect();
            prop_assert!(close(&out, &expected));
        }

        #[test]
        fn triangles_equal_squares(n in 0..40_usize) {
            let packed = numbers(n * (n + 1) / 2, 1);
            let at = |i: usize, j: usize| packed[i.min(j) * (2 * n + 1 - i.min(j)) / 2 + i.max(j) - i.min(j)];
            let (x, mut out) = (numbers(n, 2), numbers(n, 3));
            let expected: Vec<f64> = (0..n).map(|i| out[i] + (0..n).map(|j| at(i, j) * x[j]).sum::<f64>()).collect();
            triangle_times(&packed, &x, &mut out);
            prop_assert!(close(&out, &expected));

            let mut added = packed.clone();
            triangle_add(&[-0.7], &x, &mut added);
            let places = (0..n).flat_map(|j| (j..n).map(move |i| (i, j)));
            let expected: Vec<f64> = places.map(|(i, j)| at(i, j) - 0.7 * x[i] * x[j]).collect();
            prop_assert!(close(&added, &expected));

            let (weights, vectors) = (numbers(11, 4), numbers(11 * n, 5));
            let (mut together, mut singly) = (packed.clone(), packed);
            triangle_add(&weights, &vectors, &mut together);
            for (i, weight) in weights.iter().enumerate() {
                triangle_add(&[*weight], &vectors[i * n..(i + 1) * n], &mut singly);
            }
            prop_assert_eq!(together, singly, "bit by bit");
        }

        /// Of any size, in lists of any length.
        #[test]
        fn sinh_is_the_hyperbolic_sine(x in prop::collection::vec((-1.0..1.0_f64, -320..4_i32), 0..20), scale in 0.0..720.0_f64) {
            let x: Vec<f64> = x.iter().map(|(x, power)| x * 10_f64.powi(*power)).chain([scale, -scale, 0.0]).collect();
            let mut found = x.clone();
            sinh(&mut found);
            for (x, found) in x.iter().zip(found) {
                let expected = x.sinh();
                let close = (found - expected).abs() <= 4.0 * f64::EPSILON * expected.abs() + f64::from_bits(1);
                prop_assert!(close || found == expected, "{x:e}: {found:e} {expected:e}");
                prop_assert_eq!(found.is_sign_negative(), x.is_sign_negative());
            }
        }

        /// The number of columns does not change the bits of a product, on either side.
        #[test]
        fn columns_do_not_depend_on_each_other(d in 1..70_usize, n in 1..20_usize, others in 1..10_usize) {
            let (a, x) = (numbers(d * n, 1), numbers(d * others, 3));
            let (mut all, mut one) = (vec![0.0; n * others], [0.0]);
            products(d, &a, &x, &mut all);
            for (x, together) in x.chunks_exact(d).zip(all.chunks_exact(n)) {
                for (column, together) in a.chunks_exact(d).zip(together) {
                    products(d, column, x, &mut one);
                    prop_assert_eq!(one[0].to_bits(), together.to_bits());
                }
            }
        }
    }
}
