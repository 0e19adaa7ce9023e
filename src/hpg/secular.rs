//! Eigendecomposition of a diagonal plus a rank-one matrix.
//!
//! ```text
//! diag(d) + a z z' = R diag(x) R'          d, z, x in R^n, R orthogonal n x n
//! ```
//!
//! The new eigenvalues are the roots of the secular equation 1 + a sum_i z_i^2 / (d_i - x) = 0, one between each two
//! neighbouring poles d_i. Components too small to matter and poles too close to tell apart are deflated first; each
//! root is held as an offset from its nearest pole, so that differences x_j - d_i keep their relative accuracy; and
//! the components z are recomputed from the roots found (Gu and Eisenstat 1994), which makes R orthogonal to
//! rounding however close the roots are. The roots themselves are found many at a time: see [`roots`].

use super::aligned::Aligned;
use super::eigenvectors;
use super::kernel::LANES_MAX;
use super::roots::{self, Equation, Layout, Places};

const EPS: f64 = f64::EPSILON;

/// Solver with the memory that it needs, to be used again and again.
#[derive(Debug, Clone, Default)]
pub struct Secular {
    /// The eigenvalues: first those that the update moved, then those that it left where they were.
    pub values: Vec<f64>,
    /// Where each of the sorted poles was.
    order: Vec<usize>,
    /// Poles and components in ascending order of the poles, scaled by a power of two to about 1.
    poles: Vec<f64>,
    weights: Vec<f64>,
    rotations: Vec<Rotation>,
    /// Poles that the update moves, and those that it does not.
    active: Vec<usize>,
    idle: Vec<usize>,
    equation: Equation,
    kept_roots: Places,
    refined: Vec<f64>,
    rows: Vec<usize>,
    /// What the eigenvalues are multiplied with in the end.
    scale: f64,
}

impl AsMut<Equation> for Secular {
    fn as_mut(&mut self) -> &mut Equation {
        &mut self.equation
    }
}

/// Solves what was posed to each for its `values`.
pub fn solve(all: &mut [Secular], layout: &mut Layout) {
    roots::find(all, layout);
    all.iter_mut().for_each(Secular::finish);
}

#[derive(Debug, Clone)]
struct Rotation {
    deflated: usize,
    kept: usize,
    cos: f64,
    sin: f64,
}

impl Secular {
    /// Takes up a problem.
    pub fn pose(&mut self, d: &[f64], z: &[f64], a: f64) {
        debug_assert_eq!(d.len(), z.len());
        // A negative step is the same problem mirrored: -(diag(-d) + |a| z z').
        let sign = if a < 0.0 { -1.0 } else { 1.0 };
        self.sort(d, sign);
        self.weights.clear();
        self.weights.extend(self.order.iter().map(|&i| z[i]));
        let norm = self.weights.iter().map(|z| z * z).sum::<f64>().sqrt();
        let ends = [self.poles.first(), self.poles.last()];
        let largest = ends.into_iter().flatten().fold(a.abs() * norm * norm, |m, d| m.max(d.abs()));
        // A power of two changes no digit, and brings products of differences into range.
        let (down, up) = powers_of_two(largest);
        self.poles.iter_mut().for_each(|d| *d *= down);
        self.deflate(a.abs() * down, norm, 8.0 * EPS * largest * down);
        self.scale = sign * up;
    }

    fn finish(&mut self) {
        let Equation { poles, roots, .. } = &self.equation;
        eigenvectors::refine(poles, roots, &mut self.refined);
        for (refined, &i) in self.refined.iter_mut().zip(&self.active) {
            *refined = refined.copysign(self.weights[i]);
        }
        self.values.clear();
        self.values.extend((0..self.active.len()).map(|j| self.scale * roots.value(j)));
        self.values.extend(self.idle.iter().map(|&i| self.scale * self.poles[i]));
    }

    /// The columns of R for the eigenvalues `kept` (ascending), in row-major order: row i belongs to d_i. Returns the
    /// distance from one row to the next.
    pub fn columns(&mut self, kept: &[usize], rotation: &mut Aligned) -> usize {
        let stride = kept.len().next_multiple_of(LANES_MAX);
        rotation.set_len(self.poles.len() * stride);
        if !self.idle.is_empty() {
            rotation.fill(0.0);
        }
        let moved = kept.iter().take_while(|&&j| j < self.active.len()).count();
        self.kept_roots.pick(&self.equation.roots, &kept[..moved]);
        self.rows.clear();
        self.rows.extend(self.active.iter().map(|&i| self.order[i] * stride));
        eigenvectors::vectors(&self.equation.poles, &self.refined, &self.kept_roots, &self.rows, rotation);
        for (column, &j) in kept.iter().enumerate().skip(moved) {
            let row = self.order[self.idle[j - self.active.len()]];
            rotation[row * stride + column] = 1.0;
        }
        for Rotation { deflated, kept: other, cos, sin } in self.rotations.iter().rev() {
            let (p, q) = (self.order[*deflated] * stride, self.order[*other] * stride);
            for column in 0..kept.len() {
                let (x, y) = (rotation[p + column], rotation[q + column]);
                rotation[p + column] = cos * x - sin * y;
                rotation[q + column] = sin * x + cos * y;
            }
        }
        stride
    }

    /// By insertion: what comes is nearly sorted, one way or the other.
    fn sort(&mut self, d: &[f64], sign: f64) {
        let n = d.len();
        let backwards = n > 2 && sign * d[0] > sign * d[n - 2];
        let Self { order, poles, .. } = self;
        order.clear();
        order.extend(0..n);
        if backwards {
            order[..n - 1].reverse();
        }
        poles.clear();
        poles.extend(order.iter().map(|&i| sign * d[i]));
        for step in 1..n {
            let (pole, i) = (poles[step], order[step]);
            let mut place = step;
            while place > 0 && poles[place - 1] > pole {
                (poles[place], order[place]) = (poles[place - 1], order[place - 1]);
                place -= 1;
            }
            (poles[place], order[place]) = (pole, i);
        }
    }

    /// Sets aside what the update does not change, to rounding: components that are (nearly) zero, and one of each
    /// two (nearly) equal poles, after a rotation that moves its component to the other.
    fn deflate(&mut self, sigma: f64, norm: f64, tolerance: f64) {
        self.active.clear();
        self.idle.clear();
        self.rotations.clear();
        for j in 0..self.poles.len() {
            let weight = self.weights[j];
            if sigma * weight.abs() * norm <= tolerance {
                self.idle.push(j);
                continue;
            }
            if let Some(&i) = self.active.last() {
                let (other, low, high) = (self.weights[i], self.poles[i], self.poles[j]);
                // The rotation's cosine times its sine is weight * other / (weight^2 + other^2).
                if (high - low) * (weight * other).abs() <= tolerance * (weight * weight + other * other) {
                    let length = other.hypot(weight);
                    let (cos, sin) = (weight / length, -other / length);
                    self.weights[j] = length;
                    self.poles[i] = cos * cos * low + sin * sin * high;
                    self.poles[j] = sin * sin * low + cos * cos * high;
                    self.rotations.push(Rotation { deflated: i, kept: j, cos, sin });
                    self.active.pop();
                    self.idle.push(i);
                }
            }
            self.active.push(j);
        }
        let Equation { poles, squares, .. } = &mut self.equation;
        poles.clear();
        poles.extend(self.active.iter().map(|&i| self.poles[i]));
        squares.clear();
        squares.extend(self.active.iter().map(|&i| sigma * self.weights[i] * self.weights[i]));
    }
}

/// The power of two that brings a number to between 1 and 2, and its inverse; ones where there is none.
fn powers_of_two(x: f64) -> (f64, f64) {
    let exponent = (x.to_bits() >> 52) & 0x7ff;
    if (1..2046).contains(&exponent) {
        (f64::from_bits((2046 - exponent) << 52), f64::from_bits(exponent << 52))
    } else {
        (1.0, 1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn posed(d: &[f64], z: &[f64], a: f64) -> Secular {
        let mut secular = Secular::default();
        secular.pose(d, z, a);
        secular
    }

    /// Largest errors of R diag(x) R' = diag(d) + a z z' and of R'R = I, relative to the matrix.
    fn errors(secular: &mut Secular, d: &[f64], z: &[f64], a: f64) -> (f64, f64) {
        let n = d.len();
        let (all, mut rotation): (Vec<usize>, _) = ((0..n).collect(), Aligned::default());
        let stride = secular.columns(&all, &mut rotation);
        let r = |i: usize, j: usize| rotation[i * stride + j];
        assert!(secular.values.iter().chain(&rotation[..]).all(|x| x.is_finite()), "{d:?} {z:?} {a}");
        let norm2: f64 = z.iter().map(|z| z * z).sum();
        let scale = d.iter().fold(a.abs() * norm2, |m, d| m.max(d.abs())).max(f64::MIN_POSITIVE);
        let (mut residual, mut skew) = (0.0_f64, 0.0_f64);
        for i in 0..n {
            for j in 0..n {
                let unit = f64::from(u8::from(i == j));
                let expected = unit * d[i] + a * z[i] * z[j];
                let found: f64 = (0..n).map(|l| r(i, l) * secular.values[l] * r(j, l)).sum();
                residual = residual.max((found - expected).abs() / scale);
                skew = skew.max(((0..n).map(|l| r(l, i) * r(l, j)).sum::<f64>() - unit).abs());
            }
        }
        (residual, skew)
    }

    /// Solves problems at once, and each of them alone.
    fn check_all(problems: &[(Vec<f64>, Vec<f64>, f64)]) {
        let pose = || problems.iter().map(|(d, z, a)| posed(d, z, *a));
        let mut together: Vec<Secular> = pose().collect();
        solve(&mut together, &mut Layout::default());
        let mut alone: Vec<Secular> = pose().collect();
        alone.iter_mut().for_each(|secular| solve(std::slice::from_mut(secular), &mut Layout::default()));
        for ((together, alone), (d, z, a)) in together.iter_mut().zip(&mut alone).zip(problems) {
            let bound = 1e-14 * (4 + d.len()) as f64;
            for secular in [together, alone] {
                let (residual, skew) = errors(secular, d, z, *a);
                assert!(residual < bound && skew < bound, "{residual:e} {skew:e} for {d:?} {z:?} {a} of {problems:?}");
            }
        }
    }

    fn check(d: &[f64], z: &[f64], a: f64) {
        check_all(&vec![(d.to_vec(), z.to_vec(), a); 9]);
    }

    #[test]
    fn degenerate_problems() {
        let tiny = 1e-200;
        for a in [1.0, -1.0, 0.0, 1e-18, -1e-9, 1e9, 1e-300] {
            check(&[], &[], a);
            check(&[2.0], &[1.0], a);
            check(&[0.0, 0.0, 0.0], &[0.6, 0.0, 0.8], a);
            check(&[1.0, 1.0, 1.0, 1.0], &[0.5, -0.5, 0.5, 0.5], a);
            check(&[1.0, 1.0 + EPS, 1.0 - EPS, -1.0], &[0.5, 0.5, -0.5, 0.5], a);
            check(&[3.0, -3.0, 0.0], &[tiny, 1.0, tiny], a);
            check(&[3.0, 2.0, 1.0], &[0.0, 0.0, 0.0], a);
            check(&[1e-8, 1.0, -1.0, 0.0], &[1e-9, 1e-8, 1.0, 1e-16], a);
            check(&[1.0, 1.0 + 1e-13, 1.0 + 2e-13], &[0.57, 0.57, 0.59], a);
        }
    }

    /// Diagonals drawn from few values, so that equal and nearly equal poles are common.
    fn pole() -> impl Strategy<Value = f64> {
        let base = prop_oneof![Just(0.0), Just(1.0), Just(-1.0), Just(0.5), -6.0..6.0_f64];
        (base, prop_oneof![3 => Just(0.0), 1 => -1e-14..1e-14_f64, 1 => -1e-7..1e-7_f64])
            .prop_map(|(x, noise)| x + noise)
    }

    fn component() -> impl Strategy<Value = f64> {
        (-1.0..1.0_f64, prop_oneof![3 => Just(0_i32), 1 => -18..0]).prop_map(|(x, power)| x * 10_f64.powi(power))
    }

    /// A diagonal, a vector that is of length 1 or not, and a step.
    fn problem() -> impl Strategy<Value = (Vec<f64>, Vec<f64>, f64)> {
        let size = prop_oneof![3 => 15..19_usize, 1 => 0..40_usize];
        let vectors = size.prop_flat_map(|n| (prop::collection::vec(pole(), n), prop::collection::vec(component(), n)));
        (vectors, component(), any::<bool>()).prop_map(|((d, z), a, unit)| {
            let norm = z.iter().map(|z| z * z).sum::<f64>().sqrt();
            let z = if unit && norm > 0.0 { z.iter().map(|z| z / norm).collect() } else { z };
            (d, z, a)
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(1000))]
        /// As many at once as fill the lanes of vectors, and a few more.
        #[test]
        fn decomposes_any_updates(problems in prop::collection::vec(problem(), 1..12)) {
            check_all(&problems);
        }
    }
}
