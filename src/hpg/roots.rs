//! The roots of the secular equation, many at a time.
//!
//! ```text
//! f(x) = 1 + sum_i s_i / (d_i - x)        n poles d_i ascending, s_i > 0, one root above each pole
//! ```
//!
//! Each lane of a vector holds one root as (origin, side, offset): x = origin + side * offset, with the nearest pole
//! as origin and the offset positive. Seen from there every root looks the same: its own pole at 0, the other
//! neighbour at `span`, the offset in between and at most half way, and side * f growing from minus infinity. The last root has no
//! neighbour above it: a pole of no weight, out of reach, takes its place.
//!
//! The lanes of a vector are neighbouring roots of one equation, or the same root of several equations, whichever takes
//! fewer vectors: 17 roots of 8 equations are 17 vectors of 8 lanes side by side, and 24 one after the other.

use pulp::{Arch, Simd, WithSimd};

use super::aligned::Aligned;
use super::kernel::LANES_MAX;

const EPS: f64 = f64::EPSILON;

/// Evaluations before the bracket is only halved, and before it is as good as it gets.
const STEPS_MAX: usize = 40;
const EVALUATIONS_MAX: usize = 160;

/// A step this small, in units of the offset, is the last: convergence is quadratic, and the offset is the smaller of the
/// distances to both neighbours.
const CLOSE: f64 = 1e-8;

/// An equation: its poles, ascending and scaled so that the largest of them and of the roots is about 1, their weights,
/// and its roots, once they are found.
#[derive(Debug, Clone, Default)]
pub struct Equation {
    /// d_i
    pub poles: Vec<f64>,
    /// s_i
    pub squares: Vec<f64>,
    /// One for each pole.
    pub roots: Places,
}

/// Where roots are; padded to whole vectors.
#[derive(Debug, Clone, Default)]
pub struct Places {
    pub(super) count: usize,
    pub(super) origin: Vec<f64>,
    pub(super) side: Vec<f64>,
    pub(super) offset: Vec<f64>,
}

impl Places {
    /// Root `j`.
    pub fn value(&self, j: usize) -> f64 {
        self.origin[j] + self.side[j] * self.offset[j]
    }

    /// Those of `other` at `kept`.
    pub fn pick(&mut self, other: &Self, kept: &[usize]) {
        self.resize(kept.len());
        for (to, from) in
            [(&mut self.origin, &other.origin), (&mut self.side, &other.side), (&mut self.offset, &other.offset)]
        {
            let (places, beyond) = to.split_at_mut(kept.len());
            places.iter_mut().zip(kept).for_each(|(to, &j)| *to = from[j]);
            beyond.fill(places.last().copied().unwrap_or(0.0));
        }
    }

    fn resize(&mut self, count: usize) {
        self.count = count;
        let padded = count.next_multiple_of(LANES_MAX);
        for list in [&mut self.origin, &mut self.side, &mut self.offset] {
            list.resize(padded, 0.0);
        }
    }
}

/// Finds the roots of some equations.
pub fn find<E: AsMut<Equation>>(equations: &mut [E], layout: &mut Layout) {
    Arch::new().dispatch(Find { equations, layout });
}

/// Poles and weights as the lanes of vectors: memory for the time of a search.
#[derive(Debug, Clone, Default)]
pub struct Layout {
    /// One equation's, completed to whole groups by poles of no weight.
    poles: Vec<f64>,
    squares: Vec<f64>,
    /// Of each of its roots the neighbours.
    left: Vec<f64>,
    left_square: Vec<f64>,
    right: Vec<f64>,
    right_square: Vec<f64>,
    /// Number i of several equations in row i, and one row more than there are roots.
    rows: Aligned,
    square_rows: Aligned,
    /// Of each of these the sum of weights and the number of poles.
    total: Aligned,
    count: Aligned,
    found: Places,
}

/// As many roots as a vector has lanes.
#[derive(Clone, Copy)]
pub(super) struct Lanes<S: Simd> {
    pub(super) origin: S::f64s,
    pub(super) side: S::f64s,
    pub(super) offset: S::f64s,
}

impl<S: Simd> Lanes<S> {
    #[inline(always)]
    pub(super) fn load(from: &Places, block: usize) -> Self {
        let load = |from: &[f64]| S::as_simd_f64s(from).0[block];
        Self { origin: load(&from.origin), side: load(&from.side), offset: load(&from.offset) }
    }

    #[inline(always)]
    fn store(self, to: &mut Places, block: usize) {
        for (to, value) in [(&mut to.origin, self.origin), (&mut to.side, self.side), (&mut to.offset, self.offset)] {
            S::as_mut_simd_f64s(to).0[block] = value;
        }
    }

    /// d - x, without the cancellation.
    #[inline(always)]
    pub(super) fn gap(self, simd: S, pole: S::f64s) -> S::f64s {
        simd.negate_mul_add_e_f64s(self.side, self.offset, simd.sub_f64s(pole, self.origin))
    }

    /// Inverses of four gaps, by one division.
    #[inline(always)]
    pub(super) fn inverses(self, simd: S, poles: [S::f64s; 4]) -> [S::f64s; 4] {
        let [a, b, c, d] = poles.map(|pole| self.gap(simd, pole));
        let (ab, cd) = (simd.mul_f64s(a, b), simd.mul_f64s(c, d));
        let all = simd.div_f64s(simd.splat_f64s(1.0), simd.mul_f64s(ab, cd));
        let (one_ab, one_cd) = (simd.mul_f64s(all, cd), simd.mul_f64s(all, ab));
        [simd.mul_f64s(one_ab, b), simd.mul_f64s(one_ab, a), simd.mul_f64s(one_cd, d), simd.mul_f64s(one_cd, c)]
    }
}

struct Find<'a, E> {
    equations: &'a mut [E],
    layout: &'a mut Layout,
}

impl<E: AsMut<Equation>> WithSimd for Find<'_, E> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        for equations in self.equations.chunks_mut(S::F64_LANES) {
            let mut counts = [0; LANES_MAX];
            for (count, equation) in counts.iter_mut().zip(&mut *equations) {
                *count = equation.as_mut().poles.len();
                equation.as_mut().roots.resize(*count);
            }
            let most = counts.into_iter().max().unwrap_or(0);
            if counts.into_iter().map(|count| count.div_ceil(S::F64_LANES)).sum::<usize>() > most {
                side_by_side(simd, equations, counts, self.layout);
            } else {
                for equation in equations {
                    one_alone(simd, equation.as_mut(), self.layout);
                }
            }
        }
    }
}

/// Finds the roots of one equation: the lanes of a vector are neighbours.
#[inline(always)]
fn one_alone<S: Simd>(simd: S, equation: &mut Equation, layout: &mut Layout) {
    let Equation { poles, squares, roots } = equation;
    if poles.is_empty() {
        return;
    }
    let total = squares.iter().sum();
    layout.of_one(poles, squares, total);
    let neighbours = Neighbours { layout, count: poles.len(), total };
    search_all(simd, &neighbours, poles.len().div_ceil(S::F64_LANES), roots);
}

/// Finds the roots of several equations: the lanes of a vector are number j of each.
#[inline(always)]
fn side_by_side<S: Simd, E: AsMut<Equation>>(
    simd: S,
    equations: &mut [E],
    counts: [usize; LANES_MAX],
    layout: &mut Layout,
) {
    let most = counts.into_iter().max().unwrap_or(0);
    layout.of_several(equations, most, S::F64_LANES);
    let Layout { rows, square_rows, total, count, found, .. } = layout;
    let rows = SideBySide::<S> {
        poles: S::as_simd_f64s(rows).0,
        squares: S::as_simd_f64s(square_rows).0,
        total: S::as_simd_f64s(total).0[0],
        count: S::as_simd_f64s(count).0[0],
    };
    search_all(simd, &rows, most, found);
    for (lane, equation) in equations.iter_mut().enumerate() {
        let Places { count, origin, side, offset } = &mut equation.as_mut().roots;
        for j in 0..*count {
            let at = j * S::F64_LANES + lane;
            (origin[j], side[j], offset[j]) = (found.origin[at], found.side[at], found.offset[at]);
        }
    }
}

/// A pole that no root comes near.
fn beyond(poles: &[f64], total: f64) -> f64 {
    poles.last().copied().unwrap_or(0.0) + 4.0 * total
}

impl Layout {
    /// Lays out neighbouring poles of one equation. What is beyond the last root repeats it.
    fn of_one(&mut self, poles: &[f64], squares: &[f64], total: f64) {
        let (n, padded) = (poles.len(), poles.len().next_multiple_of(LANES_MAX));
        let beyond = beyond(poles, total);
        let fill = |to: &mut Vec<f64>, from: &[f64], rest: f64| {
            to.clear();
            to.extend_from_slice(from);
            to.resize(padded, rest);
        };
        fill(&mut self.left, poles, poles[n - 1]);
        fill(&mut self.left_square, squares, squares[n - 1]);
        fill(&mut self.right, &poles[1..], beyond);
        fill(&mut self.right_square, &squares[1..], 0.0);
        fill(&mut self.poles, poles, beyond);
        fill(&mut self.squares, squares, 0.0);
    }

    /// Lays out equations side by side. One that has fewer than `most` poles is filled up with some of no weight.
    fn of_several<E: AsMut<Equation>>(&mut self, equations: &mut [E], most: usize, lanes: usize) {
        for (list, len) in [
            (&mut self.rows, (most + 1) * lanes),
            (&mut self.square_rows, (most + 1) * lanes),
            (&mut self.total, lanes),
            (&mut self.count, lanes),
        ] {
            list.set_len(len);
            list.fill(0.0);
        }
        self.found.resize(most * lanes);
        for (lane, equation) in equations.iter_mut().enumerate() {
            let Equation { poles, squares, .. } = equation.as_mut();
            let total = squares.iter().sum::<f64>();
            self.total[lane] = total;
            self.count[lane] = poles.len() as f64;
            let rest = (beyond(poles, total), 0.0);
            let terms = poles.iter().copied().zip(squares.iter().copied()).chain(std::iter::repeat(rest));
            for (i, (pole, square)) in terms.take(most + 1).enumerate() {
                self.rows[i * lanes + lane] = pole;
                self.square_rows[i * lanes + lane] = square;
            }
        }
    }
}

/// The function in the lanes of vectors, of which number `at` is asked for.
trait Function<S: Simd> {
    /// The neighbours of its roots.
    fn ends(&self, simd: S, at: usize) -> Ends<S>;

    /// The terms at these places.
    fn sums(&self, simd: S, at: usize, places: Lanes<S>) -> Sums<S>;

    /// The sum of all weights.
    fn total(&self, simd: S) -> S::f64s;

    /// The number of poles.
    fn count(&self, simd: S) -> S::f64s;
}

/// The poles below and above roots, and their weights.
struct Ends<S: Simd> {
    left: S::f64s,
    left_square: S::f64s,
    right: S::f64s,
    right_square: S::f64s,
    /// Lanes without a root.
    idle: S::m64s,
}

/// Neighbouring roots of one equation.
struct Neighbours<'a> {
    layout: &'a Layout,
    count: usize,
    total: f64,
}

impl<S: Simd> Function<S> for Neighbours<'_> {
    #[inline(always)]
    fn ends(&self, simd: S, at: usize) -> Ends<S> {
        let load = |from: &[f64]| S::as_simd_f64s(from).0[at];
        let Layout { left, left_square, right, right_square, .. } = self.layout;
        let left = load(left);
        Ends {
            left,
            left_square: load(left_square),
            right: load(right),
            right_square: load(right_square),
            idle: simd.less_than_f64s(left, left),
        }
    }

    #[inline(always)]
    fn sums(&self, simd: S, at: usize, places: Lanes<S>) -> Sums<S> {
        let (zero, first) = (simd.splat_f64s(0.0), at * S::F64_LANES);
        let (mut left, mut right) = ([zero; 2], [zero; 2]);
        let groups = self.layout.poles.as_chunks::<4>().0.iter().zip(self.layout.squares.as_chunks::<4>().0);
        for (i, (poles, squares)) in groups.take(self.count.div_ceil(4)).enumerate() {
            let inverses = places.inverses(simd, poles.map(|pole| simd.splat_f64s(pole)));
            let terms: [S::f64s; 4] = std::array::from_fn(|l| simd.mul_f64s(simd.splat_f64s(squares[l]), inverses[l]));
            // Poles and roots are in order: most groups of poles are on one side of all roots of the vector.
            if 4 * i + 3 <= first {
                add(simd, &mut left, terms, inverses);
            } else if 4 * i >= first + S::F64_LANES {
                add(simd, &mut right, terms, inverses);
            } else {
                add(simd, &mut left, terms.map(|term| simd.min_f64s(term, zero)), inverses);
                add(simd, &mut right, terms.map(|term| simd.max_f64s(term, zero)), inverses);
            }
        }
        Sums::new(left, right)
    }

    #[inline(always)]
    fn total(&self, simd: S) -> S::f64s {
        simd.splat_f64s(self.total)
    }

    #[inline(always)]
    fn count(&self, simd: S) -> S::f64s {
        simd.splat_f64s(self.count as f64)
    }
}

/// The same root of several equations.
struct SideBySide<'a, S: Simd> {
    /// A row more than there are roots.
    poles: &'a [S::f64s],
    squares: &'a [S::f64s],
    total: S::f64s,
    count: S::f64s,
}

impl<S: Simd> Function<S> for SideBySide<'_, S> {
    #[inline(always)]
    fn ends(&self, simd: S, at: usize) -> Ends<S> {
        Ends {
            left: self.poles[at],
            left_square: self.squares[at],
            right: self.poles[at + 1],
            right_square: self.squares[at + 1],
            idle: simd.less_than_or_equal_f64s(self.count, simd.splat_f64s(at as f64)),
        }
    }

    #[inline(always)]
    fn sums(&self, simd: S, at: usize, places: Lanes<S>) -> Sums<S> {
        let zero = simd.splat_f64s(0.0);
        let (mut left, mut right) = ([zero; 2], [zero; 2]);
        let (poles, squares) = (&self.poles[..self.poles.len() - 1], &self.squares[..self.poles.len() - 1]);
        let ((groups, rest), (square_groups, rest_squares)) = (poles.as_chunks::<4>(), squares.as_chunks::<4>());
        for (i, (poles, squares)) in groups.iter().zip(square_groups).enumerate() {
            let inverses = places.inverses(simd, *poles);
            let terms: [S::f64s; 4] = std::array::from_fn(|l| simd.mul_f64s(squares[l], inverses[l]));
            if 4 * i + 3 <= at {
                add(simd, &mut left, terms, inverses);
            } else if 4 * i > at {
                add(simd, &mut right, terms, inverses);
            } else {
                for l in 0..4 {
                    let side = if 4 * i + l <= at { &mut left } else { &mut right };
                    add_one(simd, side, terms[l], inverses[l]);
                }
            }
        }
        for (l, (&pole, &square)) in rest.iter().zip(rest_squares).enumerate() {
            let side = if 4 * groups.len() + l <= at { &mut left } else { &mut right };
            let inverse = simd.div_f64s(simd.splat_f64s(1.0), places.gap(simd, pole));
            add_one(simd, side, simd.mul_f64s(square, inverse), inverse);
        }
        Sums::new(left, right)
    }

    #[inline(always)]
    fn total(&self, _: S) -> S::f64s {
        self.total
    }

    #[inline(always)]
    fn count(&self, _: S) -> S::f64s {
        self.count
    }
}

/// Finds the roots in so many vectors, several vectors at once: one alone would wait for its own last division most of the
/// time.
#[inline(always)]
fn search_all<S: Simd, F: Function<S>>(simd: S, function: &F, vectors: usize, found: &mut Places) {
    let mut at = 0;
    while at < vectors {
        at += match vectors - at {
            1 => search::<S, F, 1>(simd, function, at, found),
            2 => search::<S, F, 2>(simd, function, at, found),
            _ => search::<S, F, 3>(simd, function, at, found),
        };
    }
}

/// Finds the roots of B vectors, and returns B.
#[inline(always)]
fn search<S: Simd, F: Function<S>, const B: usize>(simd: S, function: &F, at: usize, found: &mut Places) -> usize {
    let mut searches: [Search<S>; B] = std::array::from_fn(|b| Search::start(simd, function, at + b));
    for evaluation in 0..EVALUATIONS_MAX {
        let mut done = true;
        for search in &mut searches {
            done &= search.advance(simd, function, evaluation);
        }
        if done {
            break;
        }
    }
    for search in searches {
        search.places.store(found, search.at);
    }
    B
}

/// A search for as many roots as a vector has lanes.
struct Search<S: Simd> {
    /// Which vector it is.
    at: usize,
    places: Lanes<S>,
    /// From the origin to the other neighbour.
    span: S::f64s,
    low: S::f64s,
    high: S::f64s,
}

impl<S: Simd> Search<S> {
    /// Takes the nearer pole as origin and, as the first guess, the root of the two neighbours' terms with all others
    /// as they are half way.
    #[inline(always)]
    fn start(simd: S, function: &impl Function<S>, at: usize) -> Self {
        let (zero, one, two) = (simd.splat_f64s(0.0), simd.splat_f64s(1.0), simd.splat_f64s(2.0));
        let Ends { left, left_square, right, right_square, idle } = function.ends(simd, at);
        let span = simd.sub_f64s(right, left);
        let half = simd.mul_f64s(simd.splat_f64s(0.5), span);
        let middle = Lanes { origin: left, side: one, offset: half };
        let value = function.sums(simd, at, middle).value(simd, one);

        let is_left = simd.greater_than_or_equal_f64s(value, zero);
        let origin = simd.select_f64s(is_left, left, right);
        let side = simd.select_f64s(is_left, one, simd.neg_f64s(one));
        let own = simd.select_f64s(is_left, left_square, right_square);

        let neighbours = simd.div_f64s(simd.sub_f64s(left_square, right_square), half);
        let c = simd.mul_f64s(side, simd.add_f64s(value, neighbours));
        let squares = simd.add_f64s(left_square, right_square);
        let b = simd.mul_add_e_f64s(c, span, squares);
        let guess = quadratic(simd, c, b, simd.mul_f64s(own, span));

        // Away from its pole by at least what the other terms, at their largest, leave to the pole's own.
        let all = simd.add_f64s(half, function.total(simd));
        let low = simd.div_f64s(simd.mul_f64s(own, half), simd.mul_f64s(two, all));
        let above = simd.greater_than_f64s(guess, low);
        let below = simd.less_than_or_equal_f64s(guess, half);
        let offset = simd.select_f64s(simd.and_m64s(above, below), guess, half);
        // A bracket without room is done with at once.
        let (low, high) = (simd.select_f64s(idle, one, low), simd.select_f64s(idle, one, half));
        let offset = simd.select_f64s(idle, one, offset);
        Self { at, places: Lanes { origin, side, offset }, span, low, high }
    }

    /// Evaluates, and moves to better guesses; true once there are none.
    #[inline(always)]
    fn advance(&mut self, simd: S, function: &impl Function<S>, evaluation: usize) -> bool {
        let sums = function.sums(simd, self.at, self.places).seen(simd, self.places.side);
        let (value, offset) = (sums.value(simd, self.places.side), self.places.offset);
        let negative = simd.less_than_f64s(value, simd.splat_f64s(0.0));
        self.low = simd.select_f64s(negative, offset, self.low);
        self.high = simd.select_f64s(negative, self.high, offset);
        let terms = simd.add_f64s(function.count(simd), simd.splat_f64s(8.0));
        let tolerance = simd.mul_f64s(simd.splat_f64s(EPS), terms);
        let small = simd.mul_f64s(tolerance, sums.magnitude(simd));
        let is_root = simd.less_than_or_equal_f64s(simd.abs_f64s(value), small);
        let width = simd.sub_f64s(self.high, self.low);
        let narrow = simd.mul_f64s(simd.splat_f64s(2.0 * EPS), self.low);
        let done = simd.or_m64s(is_root, simd.less_than_or_equal_f64s(width, narrow));
        let next = simd.add_f64s(offset, sums.step(simd, value, offset, self.span));
        let next = self.bracketed(simd, next, done, evaluation < STEPS_MAX);
        self.places.offset = simd.select_f64s(done, offset, next);
        let step = simd.abs_f64s(simd.sub_f64s(next, offset));
        let is_close = simd.less_than_or_equal_f64s(step, simd.mul_f64s(simd.splat_f64s(CLOSE), offset));
        all(simd, simd.or_m64s(done, is_close))
    }

    /// A guess, where it is between the ends; else the bracket halved, by magnitude where its ends differ widely in it.
    #[inline(always)]
    fn bracketed(&self, simd: S, guess: S::f64s, done: S::m64s, trusted: bool) -> S::f64s {
        let (low, high) = (self.low, self.high);
        let inside = simd.and_m64s(simd.greater_than_f64s(guess, low), simd.less_than_f64s(guess, high));
        if trusted && all(simd, simd.or_m64s(inside, done)) {
            return guess;
        }
        let wide = simd.greater_than_f64s(high, simd.mul_f64s(simd.splat_f64s(4.0), low));
        let geometric = simd.mul_f64s(simd.sqrt_f64s(low), simd.sqrt_f64s(high));
        let mean = simd.mul_f64s(simd.splat_f64s(0.5), simd.add_f64s(low, high));
        let halved = simd.select_f64s(wide, geometric, mean);
        if trusted { simd.select_f64s(inside, guess, halved) } else { halved }
    }
}

/// The terms of f and of its slope, of the poles on either side of the root.
struct Sums<S: Simd> {
    left: S::f64s,
    right: S::f64s,
    left_slope: S::f64s,
    right_slope: S::f64s,
}

impl<S: Simd> Sums<S> {
    /// Of sums and slopes.
    #[inline(always)]
    fn new(left: [S::f64s; 2], right: [S::f64s; 2]) -> Self {
        Self { left: left[0], right: right[0], left_slope: left[1], right_slope: right[1] }
    }

    /// The same as seen from the origin.
    #[inline(always)]
    fn seen(self, simd: S, side: S::f64s) -> Self {
        let is_left = simd.greater_than_f64s(side, simd.splat_f64s(0.0));
        Self {
            left: simd.select_f64s(is_left, self.left, simd.neg_f64s(self.right)),
            right: simd.select_f64s(is_left, self.right, simd.neg_f64s(self.left)),
            left_slope: simd.select_f64s(is_left, self.left_slope, self.right_slope),
            right_slope: simd.select_f64s(is_left, self.right_slope, self.left_slope),
        }
    }

    /// side * f
    #[inline(always)]
    fn value(&self, simd: S, side: S::f64s) -> S::f64s {
        simd.add_f64s(side, simd.add_f64s(self.left, self.right))
    }

    /// The sum of magnitudes, to which rounding errors are in proportion.
    #[inline(always)]
    fn magnitude(&self, simd: S) -> S::f64s {
        simd.add_f64s(simd.splat_f64s(1.0), simd.sub_f64s(self.right, self.left))
    }

    /// The way to the root of c + s / (0 - x) + t / (span - x), which has this function's value and, half by half, its
    /// slopes.
    #[inline(always)]
    fn step(&self, simd: S, value: S::f64s, offset: S::f64s, span: S::f64s) -> S::f64s {
        let right = simd.sub_f64s(span, offset);
        let across = simd.mul_f64s(offset, right);
        let slope = simd.add_f64s(self.left_slope, self.right_slope);
        let c = simd.mul_add_e_f64s(offset, self.left_slope, value);
        let c = simd.sub_f64s(c, simd.mul_f64s(right, self.right_slope));
        let b = simd.mul_f64s(simd.sub_f64s(right, offset), value);
        let b = simd.mul_add_e_f64s(across, slope, b);
        quadratic(simd, c, b, simd.neg_f64s(simd.mul_f64s(across, value)))
    }
}

/// The root of c x^2 - b x + p that is the smaller one where both have the sign of b / c, without cancellation.
#[inline(always)]
fn quadratic<S: Simd>(simd: S, c: S::f64s, b: S::f64s, p: S::f64s) -> S::f64s {
    let (zero, two) = (simd.splat_f64s(0.0), simd.splat_f64s(2.0));
    let four = simd.mul_f64s(simd.splat_f64s(4.0), simd.mul_f64s(c, p));
    let square = simd.max_f64s(simd.sub_f64s(simd.mul_f64s(b, b), four), zero);
    let root = simd.sqrt_f64s(square);
    let positive = simd.greater_than_f64s(b, zero);
    let above = simd.select_f64s(positive, simd.mul_f64s(two, p), simd.sub_f64s(b, root));
    let below = simd.select_f64s(positive, simd.add_f64s(b, root), simd.mul_f64s(two, c));
    simd.div_f64s(above, below)
}

/// Adds four terms to a sum, and their slopes to its slope.
#[inline(always)]
fn add<S: Simd>(simd: S, [sum, slope]: &mut [S::f64s; 2], terms: [S::f64s; 4], inverses: [S::f64s; 4]) {
    let [a, b, c, d] = terms;
    *sum = simd.add_f64s(*sum, simd.add_f64s(simd.add_f64s(a, b), simd.add_f64s(c, d)));
    let first = simd.mul_add_e_f64s(b, inverses[1], simd.mul_f64s(a, inverses[0]));
    let second = simd.mul_add_e_f64s(d, inverses[3], simd.mul_f64s(c, inverses[2]));
    *slope = simd.add_f64s(*slope, simd.add_f64s(first, second));
}

#[inline(always)]
fn add_one<S: Simd>(simd: S, [sum, slope]: &mut [S::f64s; 2], term: S::f64s, inverse: S::f64s) {
    *sum = simd.add_f64s(*sum, term);
    *slope = simd.mul_add_e_f64s(term, inverse, *slope);
}

#[inline(always)]
fn all<S: Simd>(simd: S, mask: S::m64s) -> bool {
    simd.first_true_m64s(simd.not_m64s(mask)) >= S::F64_LANES
}

#[cfg(test)]
mod tests {
    use super::*;

    impl AsMut<Self> for Equation {
        fn as_mut(&mut self) -> &mut Self {
            self
        }
    }

    /// Other processors have other vectors, in which the same equations stand otherwise.
    #[test]
    fn roots_are_the_same_in_vectors_of_any_width() {
        let number = |salt: usize| ((salt * 7919) % 1009) as f64 / 1009.0;
        for (poles, count) in [(17, 8), (17, 3), (16, 8), (5, 11), (33, 9), (1, 2)] {
            let equation = |e: usize| Equation {
                // Some have fewer.
                poles: (0..poles - e % 3 * poles / 9).map(|i| (i as f64 + 0.9 * number(100 * e + i)) / 40.0).collect(),
                squares: (0..poles - e % 3 * poles / 9).map(|i| 0.02 * number(100 * e + i + 7) + 1e-9).collect(),
                roots: Places::default(),
            };
            let posed = || (0..count).map(equation).collect::<Vec<Equation>>();
            let (mut widest, mut single) = (posed(), posed());
            find(&mut widest, &mut Layout::default());
            pulp::Scalar.vectorize(Find { equations: &mut single, layout: &mut Layout::default() });
            check_same(&widest, &single);
            #[cfg(target_arch = "x86_64")]
            if let Some(simd) = pulp::x86::V3::try_new() {
                let mut fours = posed();
                Simd::vectorize(simd, Find { equations: &mut fours, layout: &mut Layout::default() });
                check_same(&fours, &single);
            }
        }
    }

    fn check_same(found: &[Equation], expected: &[Equation]) {
        for (found, expected) in found.iter().zip(expected) {
            for j in 0..expected.poles.len() {
                let (x, y) = (found.roots.value(j), expected.roots.value(j));
                assert!((x - y).abs() < 1e-15 * (1.0 + y.abs()), "{j}: {x} {y} of {expected:?}");
                assert!(x > expected.poles[j] && expected.poles.get(j + 1).is_none_or(|above| x < *above));
            }
        }
    }
}
