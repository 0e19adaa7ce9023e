//! The paper's environment: models recommend items, items earn rewards.
//!
//! ```text
//! reward          r(q, a) = <Psi*, a q'> + nu(q, a),                       |nu| <= epsilon       (Section 2.1)
//! recommendation  xi_m(a | q) ~ exp(<Psi_m, a q'> / temperature + mu_m(q, a)),  |mu| <= epsilon  (Section 2.2)
//! R_m(q) = sum_a xi_m(a | q) r(q, a), mapped to 0..1 by 0.5 + gain r and clipped
//! ```
//!
//! Psi* (d x d) is the reward kernel; Psi_m = Psi* P_m with P_m a random projection of rank s: each model understands
//! s directions of the query space and is blind to the rest. The leading term of R_m is quadratic in q, with
//! W*_m = sym(Psi*' Sigma Psi_m), Sigma the covariance of the items.

use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

use super::queries::{Queries, Shape};
use super::{World, normals, random_direction};
use crate::event::Query;
use crate::hpg::linalg::{axpy, dot, nuclear_norm};

/// What an item world is made from.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ItemsSpec {
    /// Dimension of queries and items.
    pub dim: usize,
    /// Number of models.
    pub models: usize,
    /// s: rank of each model's kernel.
    pub intrinsic_rank: usize,
    /// Number of items.
    pub items: usize,
    /// Temperature of the recommendation: small is greedy.
    pub temperature: f64,
    /// epsilon: bound of what the kernels leave unexplained, in rewards and in recommendations.
    pub misspecification: f64,
    /// Standard deviation over queries and models that expected rewards are scaled to.
    pub signal: f64,
    /// Shape of the query distribution.
    pub shape: Shape,
    /// Seed of everything.
    pub seed: u64,
}

/// The world itself.
pub struct Items {
    spec: ItemsSpec,
    items: Vec<Vec<f64>>,
    truth: Truth,
    queries: Queries,
    switches: u64,
}

struct Truth {
    /// Psi*' a for each item: the reward of item a is its product with q.
    item_rewards: Vec<Vec<f64>>,
    /// Psi_m' a for each model and item.
    item_logits: Vec<Vec<Vec<f64>>>,
    /// Directions of the waves that stand for what the kernels leave unexplained: rewards first, then each model.
    waves: Vec<Vec<f64>>,
    /// W*_m, dense.
    quadratic: Vec<Vec<f64>>,
    norm: f64,
    gain: f64,
}

/// Queries from which the gain is measured.
const CALIBRATION: usize = 500;

/// How fast an unexplained part turns over as query and item move.
const WAVE: f64 = 20.0;

impl Items {
    /// Draws an instance.
    pub fn new(spec: ItemsSpec) -> Self {
        let queries = Queries::new(spec.shape, spec.dim, spec.seed);
        let mut generator = ChaCha8Rng::seed_from_u64(spec.seed);
        generator.set_stream(1);
        let items: Vec<_> = (0..spec.items).map(|_| random_direction(spec.dim, &mut generator)).collect();
        let truth = Truth::draw(&spec, &items, &queries, 0);
        Self { spec, items, truth, queries, switches: 0 }
    }
}

impl World for Items {
    fn dim(&self) -> usize {
        self.spec.dim
    }

    fn models(&self) -> usize {
        self.spec.models
    }

    fn next_query(&mut self) -> Query {
        self.queries.draw()
    }

    fn expected_rewards(&self, query: &Query) -> Vec<f64> {
        let map = |r: f64| (0.5 + self.truth.gain * r).clamp(0.0, 1.0);
        self.truth.raw_rewards(&self.spec, &self.items, query.as_slice()).into_iter().map(map).collect()
    }

    fn true_scores(&self, query: &Query) -> Vec<f64> {
        let q = query.as_slice();
        self.truth.quadratic.iter().map(|w| quadratic_form(w, q)).collect()
    }

    fn true_norm(&self) -> f64 {
        self.truth.norm
    }

    fn switch(&mut self) {
        self.switches += 1;
        self.truth = Truth::draw(&self.spec, &self.items, &self.queries, self.switches);
    }
}

impl Truth {
    fn draw(spec: &ItemsSpec, items: &[Vec<f64>], queries: &Queries, period: u64) -> Self {
        let d = spec.dim;
        let mut generator = ChaCha8Rng::seed_from_u64(spec.seed);
        generator.set_stream(2 + period);
        // Columns of Psi* / sqrt(d): the spectral norm of a Gaussian d x d matrix is about 2 sqrt(d).
        let kernel: Vec<Vec<f64>> = (0..d)
            .map(|_| normals(d, &mut generator).iter().map(|x| x / (2.0 * (d as f64).sqrt())).collect())
            .collect();
        let transpose_times = |a: &Vec<f64>| kernel.iter().map(|column| dot(column, a)).collect::<Vec<f64>>();
        let item_rewards: Vec<Vec<f64>> = items.iter().map(transpose_times).collect();
        let projections: Vec<Vec<Vec<f64>>> =
            (0..spec.models).map(|_| orthonormal(d, spec.intrinsic_rank, &mut generator)).collect();
        let project = |basis: &[Vec<f64>], x: &[f64]| {
            let mut out = vec![0.0; d];
            basis.iter().for_each(|b| axpy(dot(b, x), b, &mut out));
            out
        };
        let item_logits: Vec<Vec<Vec<f64>>> =
            projections.iter().map(|basis| item_rewards.iter().map(|x| project(basis, x)).collect()).collect();
        let waves = (0..=spec.models).map(|_| random_direction(2 * d, &mut generator)).collect();
        let mut truth = Self { item_rewards, item_logits, waves, quadratic: Vec::new(), norm: 0.0, gain: 1.0 };
        truth.calibrate(spec, items, queries);
        truth.find_quadratic(spec);
        truth
    }

    /// Scales rewards to the signal asked for.
    fn calibrate(&mut self, spec: &ItemsSpec, items: &[Vec<f64>], queries: &Queries) {
        let mut sample = queries.clone();
        let rewards: Vec<f64> =
            (0..CALIBRATION).flat_map(|_| self.raw_rewards(spec, items, sample.draw().as_slice())).collect();
        let mean = rewards.iter().sum::<f64>() / rewards.len() as f64;
        let variance = rewards.iter().map(|r| (r - mean).powi(2)).sum::<f64>() / rewards.len() as f64;
        self.gain = if variance > 0.0 { spec.signal / variance.sqrt() } else { 0.0 };
    }

    /// W*_m = gain / temperature sym(cov_a(Psi*'a, Psi_m'a)), and the largest nuclear norm.
    fn find_quadratic(&mut self, spec: &ItemsSpec) {
        let (d, n) = (spec.dim, spec.items as f64);
        let mut mean = vec![0.0; d];
        self.item_rewards.iter().for_each(|x| axpy(1.0 / n, x, &mut mean));
        for logits in &self.item_logits {
            let mut w = vec![0.0; d * d];
            for (reward, logit) in self.item_rewards.iter().zip(logits) {
                for i in 0..d {
                    let centred = reward[i] - mean[i];
                    for j in 0..d {
                        let half = 0.5 * self.gain / spec.temperature / n * centred * logit[j];
                        w[i * d + j] += half;
                        w[j * d + i] += half;
                    }
                }
            }
            self.norm = self.norm.max(nuclear_norm(d, &w));
            self.quadratic.push(w);
        }
    }

    /// Expected reward of each model, in the kernels' own units.
    fn raw_rewards(&self, spec: &ItemsSpec, items: &[Vec<f64>], q: &[f64]) -> Vec<f64> {
        let wave = |wave: &[f64], item: &[f64]| {
            let (of_query, of_item) = wave.split_at(q.len());
            spec.misspecification * libm::sin(WAVE * (dot(of_query, q) + dot(of_item, item)))
        };
        let reward = |(x, item): (&Vec<f64>, &Vec<f64>)| dot(x, q) + wave(&self.waves[0], item);
        let rewards: Vec<f64> = self.item_rewards.iter().zip(items).map(reward).collect();
        let of_model = |(m, logits): (usize, &Vec<Vec<f64>>)| {
            let logit =
                |(x, item): (&Vec<f64>, &Vec<f64>)| dot(x, q) / spec.temperature + wave(&self.waves[m + 1], item);
            let logits: Vec<f64> = logits.iter().zip(items).map(logit).collect();
            let best = logits.iter().fold(f64::NEG_INFINITY, |m, &x| m.max(x));
            let weights: Vec<f64> = logits.iter().map(|x| libm::exp(x - best)).collect();
            let total: f64 = weights.iter().sum();
            weights.iter().zip(&rewards).map(|(w, r)| w * r).sum::<f64>() / total
        };
        self.item_logits.iter().enumerate().map(of_model).collect()
    }
}

/// `count` random orthonormal directions.
fn orthonormal(dim: usize, count: usize, generator: &mut ChaCha8Rng) -> Vec<Vec<f64>> {
    let mut basis: Vec<Vec<f64>> = Vec::new();
    while basis.len() < count.min(dim) {
        let mut direction = random_direction(dim, generator);
        for _ in 0..2 {
            basis.iter().for_each(|b| axpy(-dot(b, &direction), b, &mut direction));
        }
        if let Ok(unit) = Query::new(direction) {
            basis.push(unit.as_slice().to_vec());
        }
    }
    basis
}

fn quadratic_form(w: &[f64], q: &[f64]) -> f64 {
    w.chunks_exact(q.len()).zip(q).map(|(column, x)| x * dot(column, q)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(misspecification: f64, temperature: f64) -> ItemsSpec {
        ItemsSpec {
            dim: 12,
            models: 4,
            intrinsic_rank: 3,
            items: 50,
            temperature,
            misspecification,
            signal: 0.05,
            shape: Shape::Isotropic,
            seed: 11,
        }
    }

    /// The paper's Theorem: at a high temperature and without misspecification, R_m(q) = C(q) + q'W*_m q.
    #[test]
    fn rewards_are_quadratic_up_to_a_constant_of_the_query() {
        let mut world = Items::new(spec(0.0, 50.0));
        for _ in 0..50 {
            let query = world.next_query();
            let (rewards, scores) = (world.expected_rewards(&query), world.true_scores(&query));
            let constant = rewards[0] - scores[0];
            for (reward, score) in rewards.iter().zip(&scores) {
                assert!((reward - score - constant).abs() < 1e-3, "{rewards:?} {scores:?}");
            }
        }
    }

    #[test]
    fn misspecification_and_switches_change_rewards_within_range() {
        let (mut plain, mut odd) = (Items::new(spec(0.0, 0.1)), Items::new(spec(0.3, 0.1)));
        let query = plain.next_query();
        assert_eq!(query, odd.next_query());
        let before = odd.expected_rewards(&query);
        assert_ne!(plain.expected_rewards(&query), before);
        odd.switch();
        assert_ne!(odd.expected_rewards(&query), before);
        assert!(odd.expected_rewards(&query).iter().all(|r| (0.0..=1.0).contains(r)));
    }
}
