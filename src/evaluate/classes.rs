//! The best policy of a class, found offline with full information.
//!
//! ```text
//! value(pi) = mean_q sum_m pi(m | q) R_m(q)                 gap(pi) = mean_q max_m R_m(q) - value(pi)
//! log-linear      pi(m | q) ~ exp(theta_m . q)              columns: theta_m, d x M
//! log-quadratic   pi(m | q) ~ exp(q'W_m q)                  columns: a_mj,    d x M k
//!                 W_m = sum_j sign_j a_mj a_mj', sign_j = +1, -1, +1, ...   of rank at most k
//! ```
//!
//! (Paper, Section 4 and the appendix on its table.) The value is not concave: a policy that becomes sharp too early stays
//! where it is. So the entropy is rewarded at first, at a temperature that falls from the size of the gap to nothing:
//! mean_q sum_m pi_m (R_m - t log pi_m), by full-batch gradient ascent with Adam's steps. Its gradient by the score of
//! model m is pi_m (A_m - sum_j pi_j A_j) / n with A_m = R_m - t log pi_m.
//!
//! Queries are the columns of a d x n matrix, taken block by block; sums run in a fixed order on one thread.

use faer::linalg::matmul::matmul;
use faer::{Accum, MatMut, MatRef, Par};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

use crate::simulate::normals;

/// Queries with the expected reward of every model.
#[derive(Debug, Clone, PartialEq)]
pub struct Problem {
    dim: usize,
    models: usize,
    /// Unit vectors, one after the other.
    queries: Vec<f32>,
    /// Row by row.
    rewards: Vec<f64>,
}

/// A set of policies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Class {
    /// pi ~ exp(theta_m . q).
    LogLinear,
    /// pi ~ exp(q'W_m q), each W_m of at most this rank.
    LogQuadratic {
        /// k.
        rank: usize,
    },
}

/// A policy of a class.
#[derive(Debug, Clone, PartialEq)]
pub struct ClassPolicy {
    class: Class,
    dim: usize,
    /// One after the other.
    columns: Vec<f32>,
}

/// How the ascent goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Path {
    /// With a falling temperature: the best that is found on the queries themselves.
    Annealed,
    /// Without: rough on the queries themselves, but the policies on its way are sharp where they are sure.
    Plain,
}

/// Both, in the order in which they are tried.
pub const PATHS: [Path; 2] = [Path::Annealed, Path::Plain];

/// Steps over which the temperature falls; also those of a plain path.
pub const STEPS: usize = 300;

/// Steps between two looks at how it goes.
const STRIDE: usize = 5;

/// After the temperature has fallen, a round of so many steps follows another while it gains.
const ROUND: usize = 50;
const ROUNDS_MAX: usize = 12;
/// Share of the gap that a round must close to be followed by another.
const ROUND_GAIN: f64 = 0.02;

/// Temperatures at the beginning and the end, in units of the best constant model's gap.
const HOTTEST: f64 = 1.5;
const COLDEST: f64 = 0.004;

/// Queries in a block: its scores stay in the cache.
const BLOCK: usize = 1024;

impl Problem {
    /// From unit vectors of this dimension, one after the other, and rewards, row by row.
    pub fn new(dim: usize, models: usize, queries: Vec<f32>, rewards: Vec<f64>) -> Self {
        debug_assert!(dim > 0 && models > 0 && queries.len() / dim == rewards.len() / models);
        Self { dim, models, queries, rewards }
    }

    /// Some of the queries, in this order.
    pub fn pick(&self, rows: &[usize]) -> Self {
        let queries = rows.iter().flat_map(|&i| self.query(i)).copied().collect();
        let rewards = rows.iter().flat_map(|&i| self.rewards(i)).copied().collect();
        Self { queries, rewards, ..*self }
    }

    /// The same queries with the rewards of others: the i-th has those of `sources[i]`.
    pub fn with_rewards_of(&self, sources: &[usize]) -> Self {
        let rewards = sources.iter().flat_map(|&i| self.rewards(i)).copied().collect();
        Self { queries: self.queries.clone(), rewards, ..*self }
    }

    /// Number of queries.
    pub fn len(&self) -> usize {
        self.rewards.len() / self.models
    }

    /// Whether there is no query.
    pub fn is_empty(&self) -> bool {
        self.rewards.is_empty()
    }

    /// Dimension of queries.
    pub fn dim(&self) -> usize {
        self.dim
    }

    /// The model that earns most on the whole; of equals the first.
    pub fn best_constant(&self) -> usize {
        let totals: Vec<f64> = (0..self.models).map(|m| self.column(m).sum()).collect();
        (0..self.models).fold(0, |best, m| if totals[m] > totals[best] { m } else { best })
    }

    /// What a model earns on each query.
    pub fn column(&self, model: usize) -> impl Iterator<Item = f64> {
        self.rewards.iter().skip(model).step_by(self.models).copied()
    }

    /// What the best model of each query earns.
    pub fn oracle(&self) -> impl Iterator<Item = f64> {
        self.rewards.chunks_exact(self.models).map(|row| row.iter().fold(f64::NEG_INFINITY, |m, &r| m.max(r)))
    }

    /// Mean gap to the oracle of what was earned on each query.
    pub fn gap(&self, earned: impl Iterator<Item = f64>) -> f64 {
        self.oracle().zip(earned).map(|(best, earned)| best - earned).sum::<f64>() / self.len().max(1) as f64
    }

    fn query(&self, i: usize) -> &[f32] {
        &self.queries[i * self.dim..(i + 1) * self.dim]
    }

    fn rewards(&self, i: usize) -> &[f64] {
        &self.rewards[i * self.models..(i + 1) * self.models]
    }

    /// Block by block, queries as the columns of a matrix and their rewards.
    fn blocks(&self) -> impl Iterator<Item = (MatRef<'_, f32>, &[f64])> {
        let queries = self.queries.chunks(BLOCK * self.dim);
        let queries = queries.map(|block| MatRef::from_column_major_slice(block, self.dim, block.len() / self.dim));
        queries.zip(self.rewards.chunks(BLOCK * self.models))
    }
}

impl Class {
    /// The best policy that is found for these queries; `tick` is told after every step.
    pub fn fit(self, problem: &Problem, seed: u64, mut tick: impl FnMut()) -> ClassPolicy {
        let mut ascent = Ascent::new(self, problem, Path::Annealed, seed);
        let mut best = (f64::INFINITY, ascent.policy.clone());
        for round in 0..=ROUNDS_MAX {
            for _ in 0..if round == 0 { STEPS } else { ROUND } {
                ascent.step();
                tick();
            }
            let gap = problem.gap(ascent.policy.values(problem).into_iter());
            let gained = gap < best.0 * (1.0 - ROUND_GAIN);
            if gap < best.0 {
                best = (gap, ascent.policy.clone());
            }
            if !gained || gap < f64::from(f32::EPSILON) {
                break;
            }
        }
        best.1
    }

    /// The path, and the number of steps on it, that serve other queries best; ties go to the fewer steps.
    pub fn choose_stop(self, problem: &Problem, others: &Problem, seed: u64, mut tick: impl FnMut()) -> (Path, usize) {
        let mut best = (f64::INFINITY, Path::Annealed, 0);
        for path in PATHS {
            let mut ascent = Ascent::new(self, problem, path, seed);
            for step in 1..=STEPS {
                ascent.step();
                tick();
                if step % STRIDE == 0 {
                    let gap = others.gap(ascent.policy.values(others).into_iter());
                    if gap < best.0 {
                        best = (gap, path, step);
                    }
                }
            }
        }
        (best.1, best.2)
    }

    /// The policy after some steps.
    pub fn fit_until(
        self,
        problem: &Problem,
        (path, steps): (Path, usize),
        seed: u64,
        mut tick: impl FnMut(),
    ) -> ClassPolicy {
        let mut ascent = Ascent::new(self, problem, path, seed);
        for _ in 0..steps {
            ascent.step();
            tick();
        }
        ascent.policy
    }

    /// Columns of each model.
    fn width(self) -> usize {
        match self {
            Class::LogLinear => 1,
            Class::LogQuadratic { rank } => rank,
        }
    }

    /// Adam's step: what it does to a score should not depend on the dimension.
    fn rate(self, dim: usize) -> f64 {
        let root = (dim as f64).sqrt();
        match self {
            Class::LogLinear => 3.0 / root,
            Class::LogQuadratic { .. } => 0.6 / root,
        }
    }

    /// theta starts at 0; a_mj cannot, where its gradient is 0, and starts small.
    fn start(self, dim: usize, models: usize, seed: u64) -> Vec<f32> {
        let size = dim * models * self.width();
        match self {
            Class::LogLinear => vec![0.0; size],
            Class::LogQuadratic { .. } => {
                let scale = 0.3 / (dim as f64).sqrt();
                let draws = normals(size, &mut ChaCha8Rng::seed_from_u64(seed));
                draws.into_iter().map(|x| (scale * x) as f32).collect()
            }
        }
    }

    /// The scores of all models for a query, from its products with the columns.
    fn scores(self, products: &[f32], scores: &mut [f64]) {
        for (score, products) in scores.iter_mut().zip(products.chunks_exact(self.width())) {
            *score = match self {
                Class::LogLinear => products.iter().map(|&z| f64::from(z)).sum(),
                Class::LogQuadratic { .. } => {
                    products.iter().enumerate().map(|(j, &z)| sign(j) * f64::from(z).powi(2)).sum()
                }
            };
        }
    }

    /// Turns products into the gradient by them, from the gradient by the scores.
    fn pull_back(self, products: &mut [f32], by_score: &[f64]) {
        for (&gradient, products) in by_score.iter().zip(products.chunks_exact_mut(self.width())) {
            for (j, z) in products.iter_mut().enumerate() {
                *z = match self {
                    Class::LogLinear => gradient as f32,
                    Class::LogQuadratic { .. } => (2.0 * sign(j) * gradient * f64::from(*z)) as f32,
                };
            }
        }
    }
}

fn sign(j: usize) -> f64 {
    if j.is_multiple_of(2) { 1.0 } else { -1.0 }
}

impl ClassPolicy {
    /// What is earned in the mean on each query.
    pub fn values(&self, problem: &Problem) -> Vec<f64> {
        let mut values = Vec::with_capacity(problem.len());
        let (mut policy, mut logs) = (vec![0.0; problem.models], vec![0.0; problem.models]);
        for (queries, rewards) in problem.blocks() {
            let products = self.products(queries);
            for (products, rewards) in products.chunks_exact(self.width()).zip(rewards.chunks_exact(problem.models)) {
                self.class.scores(products, &mut policy);
                softmax(&mut policy, &mut logs);
                values.push(policy.iter().zip(rewards).map(|(p, r)| p * r).sum());
            }
        }
        values
    }

    /// Number of columns.
    fn width(&self) -> usize {
        self.columns.len() / self.dim
    }

    /// The products of the columns with each query, query after query.
    fn products(&self, queries: MatRef<'_, f32>) -> Vec<f32> {
        let (width, n) = (self.width(), queries.ncols());
        let mut products = vec![0.0; width * n];
        let out = MatMut::from_column_major_slice_mut(&mut products, width, n);
        let columns = MatRef::from_column_major_slice(&self.columns, self.dim, width);
        matmul(out, Accum::Replace, columns.transpose(), queries, 1.0, Par::Seq);
        products
    }

    /// The gradient of mean_q sum_m pi_m (R_m - t log pi_m) by the columns.
    fn gradient(&self, problem: &Problem, temperature: f64) -> Vec<f32> {
        let (width, models) = (self.width(), problem.models);
        let mut gradient = vec![0.0; self.columns.len()];
        let (mut policy, mut logs) = (vec![0.0; models], vec![0.0; models]);
        for (queries, rewards) in problem.blocks() {
            let mut products = self.products(queries);
            for (products, rewards) in products.chunks_exact_mut(width).zip(rewards.chunks_exact(models)) {
                self.class.scores(products, &mut policy);
                softmax(&mut policy, &mut logs);
                // The logarithms become what playing a model is worth, the probabilities the gradient by its score.
                logs.iter_mut().zip(rewards).for_each(|(log, reward)| *log = reward - temperature * *log);
                let mean: f64 = policy.iter().zip(&logs).map(|(p, worth)| p * worth).sum();
                policy.iter_mut().zip(&logs).for_each(|(p, worth)| *p *= (worth - mean) / problem.len() as f64);
                self.class.pull_back(products, &policy);
            }
            let out = MatMut::from_column_major_slice_mut(&mut gradient, self.dim, width);
            let products = MatRef::from_column_major_slice(&products, width, queries.ncols());
            matmul(out, Accum::Add, queries, products.transpose(), 1.0, Par::Seq);
        }
        gradient
    }
}

/// Scores become probabilities, in place; `logs` are their logarithms.
fn softmax(scores: &mut [f64], logs: &mut [f64]) {
    let best = scores.iter().fold(f64::NEG_INFINITY, |m, &x| m.max(x));
    let mut total = 0.0;
    for (score, log) in scores.iter_mut().zip(logs.iter_mut()) {
        *log = *score - best;
        *score = libm::exp(*log);
        total += *score;
    }
    let log_total = libm::log(total);
    scores.iter_mut().for_each(|p| *p /= total);
    logs.iter_mut().for_each(|log| *log -= log_total);
}

/// A policy on its way up.
struct Ascent<'a> {
    problem: &'a Problem,
    policy: ClassPolicy,
    path: Path,
    /// The best constant model's gap: the unit of temperature.
    unit: f64,
    rate: f32,
    steps: usize,
    /// Running means of the gradient and of its square.
    mean: Vec<f32>,
    square: Vec<f32>,
}

/// Adam's forgetting factors, and what keeps it from dividing by 0.
const KEEP_MEAN: f32 = 0.9;
const KEEP_SQUARE: f32 = 0.999;
const TINY: f32 = 1e-12;

impl<'a> Ascent<'a> {
    fn new(class: Class, problem: &'a Problem, path: Path, seed: u64) -> Self {
        let columns = class.start(problem.dim, problem.models, seed);
        let zeros = vec![0.0; columns.len()];
        Self {
            problem,
            policy: ClassPolicy { class, dim: problem.dim, columns },
            path,
            unit: problem.gap(problem.column(problem.best_constant())),
            rate: class.rate(problem.dim) as f32,
            steps: 0,
            mean: zeros.clone(),
            square: zeros,
        }
    }

    fn temperature(&self) -> f64 {
        match self.path {
            Path::Annealed if self.steps < STEPS => {
                let done = self.steps as f64 / STEPS as f64;
                self.unit * HOTTEST * libm::pow(COLDEST / HOTTEST, done)
            }
            _ => 0.0,
        }
    }

    fn step(&mut self) {
        let gradient = self.policy.gradient(self.problem, self.temperature());
        self.steps += 1;
        let bias = |keep: f32| (1.0 - libm::pow(f64::from(keep), self.steps as f64)) as f32;
        let (mean_bias, square_bias) = (bias(KEEP_MEAN), bias(KEEP_SQUARE));
        let means = self.mean.iter_mut().zip(&mut self.square);
        for ((x, g), (mean, square)) in self.policy.columns.iter_mut().zip(gradient).zip(means) {
            *mean = KEEP_MEAN * *mean + (1.0 - KEEP_MEAN) * g;
            *square = KEEP_SQUARE * *square + (1.0 - KEEP_SQUARE) * g * g;
            *x += self.rate * (*mean / mean_bias) / ((*square / square_bias).sqrt() + TINY);
        }
    }
}

#[cfg(test)]
mod tests {
    use rand::RngExt;

    use super::*;
    use crate::simulate::random_direction;

    /// Random queries, with rewards from a function of the query and the model.
    fn problem(n: usize, dim: usize, models: usize, seed: u64, reward: impl Fn(&[f64], usize) -> f64) -> Problem {
        let mut generator = ChaCha8Rng::seed_from_u64(seed);
        let queries: Vec<Vec<f64>> = (0..n).map(|_| random_direction(dim, &mut generator)).collect();
        let rewards = queries.iter().flat_map(|q| (0..models).map(|m| reward(q, m)).collect::<Vec<f64>>()).collect();
        Problem::new(dim, models, queries.concat().iter().map(|&x| x as f32).collect(), rewards)
    }

    fn gap(policy: &ClassPolicy, problem: &Problem) -> f64 {
        problem.gap(policy.values(problem).into_iter())
    }

    /// mean_q sum_m pi_m (R_m - t log pi_m), the slow and obvious way.
    fn objective(policy: &ClassPolicy, problem: &Problem, temperature: f64) -> f64 {
        let column = |j: usize| &policy.columns[j * problem.dim..];
        let product =
            |q: &[f32], j: usize| q.iter().zip(column(j)).map(|(&x, &a)| f64::from(x) * f64::from(a)).sum::<f64>();
        let width = policy.class.width();
        let score = |q: &[f32], m: usize| match policy.class {
            Class::LogLinear => product(q, m),
            Class::LogQuadratic { .. } => {
                (0..width).map(|j| [1.0, -1.0][j % 2] * product(q, m * width + j).powi(2)).sum()
            }
        };
        let of_query = |i: usize| {
            let scores: Vec<f64> = (0..problem.models).map(|m| score(problem.query(i), m)).collect();
            let total: f64 = scores.iter().map(|s| s.exp()).sum();
            let worth = |(s, r): (&f64, &f64)| s.exp() / total * (r - temperature * (s - total.ln()));
            scores.iter().zip(problem.rewards(i)).map(worth).sum::<f64>()
        };
        (0..problem.len()).map(of_query).sum::<f64>() / problem.len() as f64
    }

    #[test]
    fn gradients_are_those_of_finite_differences() {
        let problem = problem(BLOCK + 7, 3, 3, 5, |q, m| (0.5 + 0.4 * q[m]).clamp(0.0, 1.0));
        for class in [Class::LogLinear, Class::LogQuadratic { rank: 3 }] {
            let mut generator = ChaCha8Rng::seed_from_u64(2);
            let columns = (0..3 * 3 * class.width()).map(|_| generator.random::<f32>() - 0.5).collect();
            let mut policy = ClassPolicy { class, dim: 3, columns };
            for temperature in [0.0, 0.2] {
                let gradient = policy.gradient(&problem, temperature);
                for (at, &found) in gradient.iter().enumerate() {
                    let (x, h) = (policy.columns[at], 1.0 / 256.0);
                    let mut shifted = |x: f32| {
                        policy.columns[at] = x;
                        objective(&policy, &problem, temperature)
                    };
                    let slope = (shifted(x + h) - shifted(x - h)) / f64::from(2.0 * h);
                    shifted(x);
                    assert!((f64::from(found) - slope).abs() < 1e-5, "{class:?} {at}: {found} {slope}");
                }
            }
        }
    }

    #[test]
    fn values_are_those_of_the_obvious_way_in_every_block() {
        let problem = problem(2 * BLOCK + 1, 4, 2, 6, |q, m| if (q[0] > 0.0) == (m == 0) { 0.9 } else { 0.1 });
        let policy = Class::LogQuadratic { rank: 2 }.fit_until(&problem, (Path::Plain, 3), 1, || ());
        let values = policy.values(&problem);
        assert_eq!(values.len(), problem.len());
        let mean = values.iter().sum::<f64>() / values.len() as f64;
        assert!((mean - objective(&policy, &problem, 0.0)).abs() < 1e-6);
    }

    #[test]
    fn each_class_finds_what_it_can_express_and_nothing_else() {
        let side = |q: &[f64], m: usize| if (q[0] > 0.0) == (m == 0) { 0.9 } else { 0.1 };
        let form = |q: &[f64], m: usize| if (q[0] * q[1] > 0.0) == (m == 0) { 0.9 } else { 0.1 };
        let (linear, quadratic) = (Class::LogLinear, Class::LogQuadratic { rank: 2 });
        let (side, form) = (problem(400, 4, 2, 1, side), problem(400, 4, 2, 1, form));
        let fitted = |class: Class, problem: &Problem| gap(&class.fit(problem, 1, || ()), problem);
        // A quadratic form is even: it cannot tell q from -q.
        assert!(fitted(linear, &side) < 0.01 && fitted(quadratic, &side) > 0.25);
        assert!(fitted(linear, &form) > 0.25 && fitted(quadratic, &form) < 0.01);
    }

    #[test]
    fn with_as_many_dimensions_as_queries_chance_is_fitted() {
        let noise = |q: &[f64], m: usize| (1e4 * q[m]).rem_euclid(1.0);
        let problem = problem(60, 64, 4, 3, noise);
        let constant = problem.gap(problem.column(problem.best_constant()));
        for class in [Class::LogLinear, Class::LogQuadratic { rank: 4 }] {
            let fitted = class.fit(&problem, 1, || ());
            assert!(gap(&fitted, &problem) < 0.02 * constant, "{class:?} {} {constant}", gap(&fitted, &problem));
            assert_eq!(fitted, class.fit(&problem, 1, || ()), "the same every time");
        }
    }

    #[test]
    fn equal_rewards_and_single_queries_are_no_trouble() {
        for (n, models) in [(1, 1), (1, 3), (7, 2)] {
            let problem = problem(n, 3, models, 4, |_, _| 0.5);
            for class in [Class::LogLinear, Class::LogQuadratic { rank: 3 }] {
                assert!(gap(&class.fit(&problem, 1, || ()), &problem).abs() < 1e-12);
                let (path, steps) = class.choose_stop(&problem, &problem, 1, || ());
                assert!(steps <= STEPS && PATHS.contains(&path));
            }
        }
    }
}
