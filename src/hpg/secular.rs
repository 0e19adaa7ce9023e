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
//! rounding however close the roots are.

const EPS: f64 = f64::EPSILON;

/// Solver with the memory that it needs, to be used again and again.
#[derive(Debug, Clone, Default)]
pub struct Secular {
    /// The eigenvalues, in no particular order.
    pub values: Vec<f64>,
    /// R in row-major order: row i belongs to d_i, column j to `values[j]`.
    pub vectors: Vec<f64>,
    order: Vec<usize>,
    poles: Vec<f64>,
    weights: Vec<f64>,
    rotations: Vec<Rotation>,
    active: Vec<usize>,
    /// d_i - x_j for active poles i and roots j, root by root.
    gaps: Vec<f64>,
    active_poles: Vec<f64>,
    squares: Vec<f64>,
    refined: Vec<f64>,
}

#[derive(Debug, Clone)]
struct Rotation {
    deflated: usize,
    kept: usize,
    cos: f64,
    sin: f64,
}

impl Secular {
    /// Solves for `values` and `vectors`.
    pub fn solve(&mut self, d: &[f64], z: &[f64], a: f64) {
        let n = d.len();
        debug_assert_eq!(n, z.len());
        // A negative step is the same problem mirrored: -(diag(-d) + |a| z z').
        let sign = if a < 0.0 { -1.0 } else { 1.0 };
        self.sort(d, z, sign);
        self.values.clear();
        self.values.resize(n, 0.0);
        self.vectors.clear();
        self.vectors.resize(n * n, 0.0);
        self.deflate(a.abs());
        self.find_roots(a.abs());
        self.refine();
        self.assemble(sign);
    }

    fn sort(&mut self, d: &[f64], z: &[f64], sign: f64) {
        self.order.clear();
        self.order.extend(0..d.len());
        self.order.sort_by(|&i, &j| (sign * d[i]).total_cmp(&(sign * d[j])).then(i.cmp(&j)));
        self.poles.clear();
        self.poles.extend(self.order.iter().map(|&i| sign * d[i]));
        self.weights.clear();
        self.weights.extend(self.order.iter().map(|&i| z[i]));
    }

    /// Sets aside what the update does not change, to rounding: components that are (nearly) zero, and one of each
    /// two (nearly) equal poles, after a rotation that moves its component to the other.
    fn deflate(&mut self, sigma: f64) {
        let norm = self.weights.iter().map(|z| z * z).sum::<f64>().sqrt();
        let largest = self.poles.iter().fold(0.0_f64, |m, d| m.max(d.abs()));
        let tolerance = 8.0 * EPS * largest.max(sigma * norm * norm);
        self.active.clear();
        self.rotations.clear();
        for j in 0..self.poles.len() {
            if sigma * self.weights[j].abs() * norm <= tolerance {
                self.weights[j] = 0.0;
                continue;
            }
            if let Some(&i) = self.active.last() {
                let length = self.weights[i].hypot(self.weights[j]);
                let (cos, sin) = (self.weights[j] / length, -self.weights[i] / length);
                let (low, high) = (self.poles[i], self.poles[j]);
                if ((high - low) * cos * sin).abs() <= tolerance {
                    self.weights[i] = 0.0;
                    self.weights[j] = length;
                    self.poles[i] = cos * cos * low + sin * sin * high;
                    self.poles[j] = sin * sin * low + cos * cos * high;
                    self.rotations.push(Rotation { deflated: i, kept: j, cos, sin });
                    self.active.pop();
                }
            }
            self.active.push(j);
        }
        self.active_poles.clear();
        self.active_poles.extend(self.active.iter().map(|&i| self.poles[i]));
        self.squares.clear();
        self.squares.extend(self.active.iter().map(|&i| sigma * self.weights[i] * self.weights[i]));
    }

    fn find_roots(&mut self, sigma: f64) {
        let n = self.active.len();
        debug_assert!(n == 0 || sigma > 0.0);
        self.gaps.clear();
        self.gaps.resize(n * n, 0.0);
        for j in 0..n {
            let gaps = &mut self.gaps[j * n..(j + 1) * n];
            let (pole, offset) = find_root(&self.active_poles, &self.squares, j, gaps);
            // What was left in `gaps` are the distances of the poles from the root's own pole.
            gaps.iter_mut().for_each(|gap| *gap -= offset);
            self.values[self.active[j]] = self.active_poles[pole] + offset;
        }
    }

    /// The components for which the roots found are exact, up to a common factor.
    fn refine(&mut self) {
        let n = self.active.len();
        self.refined.clear();
        for i in 0..n {
            let pole = self.active_poles[i];
            let product = (0..n).fold(-self.gaps[i * n + i], |product, j| {
                if j == i { product } else { product * (self.gaps[j * n + i] / (pole - self.active_poles[j])) }
            });
            self.refined.push(product.abs().sqrt().copysign(self.weights[self.active[i]]));
        }
    }

    fn assemble(&mut self, sign: f64) {
        let n = self.poles.len();
        let k = self.active.len();
        // In sorted coordinates: a deflated pole keeps its unit vector.
        for i in 0..n {
            if self.weights[i] == 0.0 {
                self.values[i] = self.poles[i];
                self.vectors[self.order[i] * n + i] = 1.0;
            }
        }
        for (j, &column) in self.active.iter().enumerate() {
            let gaps = &self.gaps[j * k..(j + 1) * k];
            let norm = self.refined.iter().zip(gaps).map(|(z, gap)| (z / gap) * (z / gap)).sum::<f64>().sqrt();
            for (i, &row) in self.active.iter().enumerate() {
                self.vectors[self.order[row] * n + column] = self.refined[i] / gaps[i] / norm;
            }
        }
        for rotation in self.rotations.iter().rev() {
            let (p, q) = (self.order[rotation.deflated] * n, self.order[rotation.kept] * n);
            for column in 0..n {
                let (x, y) = (self.vectors[p + column], self.vectors[q + column]);
                self.vectors[p + column] = rotation.cos * x - rotation.sin * y;
                self.vectors[q + column] = rotation.sin * x + rotation.cos * y;
            }
        }
        self.values.iter_mut().for_each(|x| *x *= sign);
    }
}

/// Root `j` of 1 + sum_i s_i / (d_i - x), as its nearest pole and the offset from it. Leaves d_i - d_pole in `delta`.
fn find_root(d: &[f64], s: &[f64], j: usize, delta: &mut [f64]) -> (usize, f64) {
    let n = d.len();
    let last = j + 1 == n;
    let total: f64 = s.iter().sum();
    let (pole, mut low, mut high) = if last {
        (j, s[j], total)
    } else {
        let half = 0.5 * (d[j + 1] - d[j]);
        let at_middle = 1.0 + (0..n).map(|i| s[i] / ((d[i] - d[j]) - half)).sum::<f64>();
        // Away from the pole by at least what the other terms, at their largest, leave to the pole's own.
        if at_middle >= 0.0 {
            let right: f64 = s[j + 1..].iter().sum();
            (j, (s[j] / (1.0 + right / half)).min(half), half)
        } else {
            let left: f64 = s[..=j].iter().sum();
            (j + 1, -half, -(s[j + 1] * half / left).min(half))
        }
    };
    for (delta, &d_i) in delta.iter_mut().zip(d) {
        *delta = d_i - d[pole];
    }
    if n == 1 {
        return (pole, total);
    }
    let split = if last { j } else { j + 1 };
    let neighbours = (delta[split - 1], delta[split]);
    let mut x = if pole == j { low } else { high };
    for iteration in 0..200 {
        let f = Secant::at(delta, s, split, x);
        if f.is_root(n) {
            break;
        }
        if f.value < 0.0 {
            low = x
        } else {
            high = x
        }
        if (high - low).abs() <= 2.0 * EPS * low.abs().min(high.abs()) {
            break;
        }
        let guess = x + f.step(neighbours.0 - x, neighbours.1 - x, last);
        x = if guess > low && guess < high && iteration < 40 { guess } else { bisect(low, high) };
    }
    (pole, x)
}

/// Halves the bracket, by magnitude where the ends differ widely in it.
fn bisect(low: f64, high: f64) -> f64 {
    let (small, large) = (low.abs().min(high.abs()), low.abs().max(high.abs()));
    if small > 0.0 && large > 4.0 * small { (small.sqrt() * large.sqrt()).copysign(low) } else { 0.5 * (low + high) }
}

/// The secular function at a point, with the derivatives of its two halves: poles left and right of the root.
struct Secant {
    value: f64,
    magnitude: f64,
    left_slope: f64,
    right_slope: f64,
}

impl Secant {
    fn at(delta: &[f64], s: &[f64], split: usize, x: f64) -> Self {
        let half = |range: std::ops::Range<usize>| {
            let mut sums = (0.0, 0.0);
            for i in range {
                let inverse = 1.0 / (delta[i] - x);
                let term = s[i] * inverse;
                sums = (sums.0 + term, sums.1 + term * inverse);
            }
            sums
        };
        let (left, left_slope) = half(0..split);
        let (right, right_slope) = half(split..s.len());
        Self { value: 1.0 + left + right, magnitude: 1.0 + left.abs() + right.abs(), left_slope, right_slope }
    }

    fn is_root(&self, n: usize) -> bool {
        self.value.abs() <= EPS * n as f64 * self.magnitude
    }

    /// The way to the root of c + s / (left - x) + t / (right - x), which has this function's value and, half by
    /// half, its slopes; `left` and `right` are the distances to the neighbouring poles.
    fn step(&self, left: f64, right: f64, last: bool) -> f64 {
        let c = self.value - left * self.left_slope - right * self.right_slope;
        let b = (left + right) * self.value - left * right * (self.left_slope + self.right_slope);
        let product = left * right * self.value;
        let root = (b * b - 4.0 * product * c).max(0.0).sqrt();
        match (last, b > 0.0) {
            (false, false) => (b - root) / (2.0 * c),
            (false, true) => 2.0 * product / (b + root),
            (true, true) => (b + root) / (2.0 * c),
            (true, false) => 2.0 * product / (b - root),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Largest errors of R diag(x) R' = diag(d) + a z z' and of R'R = I, relative to the matrix.
    fn errors(d: &[f64], z: &[f64], a: f64) -> (f64, f64) {
        let n = d.len();
        let mut secular = Secular::default();
        secular.solve(d, z, a);
        let r = |i: usize, j: usize| secular.vectors[i * n + j];
        assert!(secular.values.iter().chain(&secular.vectors).all(|x| x.is_finite()), "{d:?} {z:?} {a}");
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

    fn check(d: &[f64], z: &[f64], a: f64) {
        let (residual, skew) = errors(d, z, a);
        let bound = 1e-14 * (4 + d.len()) as f64;
        assert!(residual < bound && skew < bound, "{residual:e} {skew:e} for {d:?} {z:?} {a}");
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

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4000))]
        #[test]
        fn decomposes_any_update(
            (d, z) in (1..40_usize).prop_flat_map(|n| {
                (prop::collection::vec(pole(), n), prop::collection::vec(component(), n))
            }),
            a in component(),
            unit in any::<bool>(),
        ) {
            let norm = z.iter().map(|z| z * z).sum::<f64>().sqrt();
            let z: Vec<f64> = if unit && norm > 0.0 { z.iter().map(|z| z / norm).collect() } else { z };
            check(&d, &z, a);
        }
    }
}
