//! The instance that the policy class fits exactly.
//!
//! ```text
//! R_m(q) = clip(0.5 + q'W*_m q, 0, 1)         W*_m = sum_i u_i u_i' - c_m sum_j v_j v_j',  s random directions each
//! ```
//!
//! c_m balances the two halves over the query distribution: no model is better than another on the whole, and all that
//! there is to gain lies in the query. W* is scaled so that rewards, before they are clipped, spread by a given standard
//! deviation over queries and models: with a fixed norm instead, isotropic queries in high dimension would carry no signal.

use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

use super::queries::{Queries, Shape};
use super::{World, random_direction};
use crate::event::Query;
use crate::hpg::linalg::{compose, dot, nuclear_norm};

/// What a log-quadratic world is made from.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LogQuadraticSpec {
    /// Dimension of queries.
    pub dim: usize,
    /// Number of models.
    pub models: usize,
    /// s: the W*_m have rank 2s.
    pub intrinsic_rank: usize,
    /// Standard deviation of expected rewards over queries and models, before they are clipped.
    pub signal: f64,
    /// Shape of the query distribution.
    pub shape: Shape,
    /// Seed of everything.
    pub seed: u64,
}

/// The world itself.
pub struct LogQuadratic {
    spec: LogQuadraticSpec,
    truth: Vec<Truth>,
    norm: f64,
    queries: Queries,
    switches: u64,
}

/// W*_m = sum_i values_i v_i v_i', the v_i of unit norm but not orthogonal.
struct Truth {
    values: Vec<f64>,
    vectors: Vec<Vec<f64>>,
}

/// Queries from which the scale of W* is measured.
const CALIBRATION: usize = 2000;

impl LogQuadratic {
    /// Draws an instance.
    pub fn new(spec: LogQuadraticSpec) -> Self {
        let queries = Queries::new(spec.shape, spec.dim, spec.seed);
        let truth = draw_truth(&spec, &queries, 0);
        Self { spec, norm: largest_norm(&truth, spec.dim), truth, queries, switches: 0 }
    }
}

impl World for LogQuadratic {
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
        self.truth.iter().map(|truth| (0.5 + truth.score(query)).clamp(0.0, 1.0)).collect()
    }

    fn true_scores(&self, query: &Query) -> Vec<f64> {
        self.truth.iter().map(|truth| truth.score(query)).collect()
    }

    fn true_norm(&self) -> f64 {
        self.norm
    }

    fn switch(&mut self) {
        self.switches += 1;
        self.truth = draw_truth(&self.spec, &self.queries, self.switches);
        self.norm = largest_norm(&self.truth, self.spec.dim);
    }
}

impl Truth {
    /// Scales the negative part so that the mean score over a sample of queries is zero.
    fn balance(&mut self, sample: &[Query]) {
        let mean = |keep: fn(f64) -> bool| {
            let values = self.values.iter().map(|&v| if keep(v) { v } else { 0.0 }).collect();
            let part = Truth { values, vectors: self.vectors.clone() };
            sample.iter().map(|query| part.score(query)).sum::<f64>()
        };
        let (positive, negative) = (mean(|v| v > 0.0), mean(|v| v < 0.0));
        if negative < 0.0 {
            self.values.iter_mut().filter(|v| **v < 0.0).for_each(|v| *v *= -positive / negative);
        }
    }

    fn score(&self, query: &Query) -> f64 {
        self.values.iter().zip(&self.vectors).map(|(value, v)| value * dot(v, query.as_slice()).powi(2)).sum()
    }
}

fn largest_norm(truth: &[Truth], dim: usize) -> f64 {
    let dense = |truth: &Truth| compose(dim, &truth.values, &truth.vectors.concat());
    truth.iter().map(|truth| nuclear_norm(dim, &dense(truth))).fold(0.0, f64::max)
}

/// Draws W* and scales it; `period` counts the switches before.
fn draw_truth(spec: &LogQuadraticSpec, queries: &Queries, period: u64) -> Vec<Truth> {
    // A stream of its own: the queries that follow do not depend on what is drawn here.
    let mut generator = ChaCha8Rng::seed_from_u64(spec.seed);
    generator.set_stream(1 + period);
    let rank = 2 * spec.intrinsic_rank;
    let mut truth: Vec<Truth> = (0..spec.models)
        .map(|_| Truth {
            values: (0..rank).map(|i| if i % 2 == 0 { 1.0 } else { -1.0 }).collect(),
            vectors: (0..rank).map(|_| random_direction(spec.dim, &mut generator)).collect(),
        })
        .collect();
    let mut sample = queries.clone();
    let sample: Vec<Query> = (0..CALIBRATION).map(|_| sample.draw()).collect();
    truth.iter_mut().for_each(|truth| truth.balance(&sample));
    let scores: Vec<f64> = truth.iter().flat_map(|truth| sample.iter().map(|query| truth.score(query))).collect();
    let deviation = (scores.iter().map(|s| s * s).sum::<f64>() / scores.len() as f64).sqrt();
    let scale = if deviation > 0.0 { spec.signal / deviation } else { 0.0 };
    truth.iter_mut().flat_map(|truth| &mut truth.values).for_each(|value| *value *= scale);
    truth
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rewards_are_in_range_and_spread_as_asked() {
        for (shape, dim) in [(Shape::PowerLaw, 64), (Shape::Isotropic, 32), (Shape::Clustered, 16)] {
            let spec = LogQuadraticSpec { dim, models: 5, intrinsic_rank: 2, signal: 0.1, shape, seed: 9 };
            let mut world = LogQuadratic::new(spec);
            let mut all = Vec::new();
            for _ in 0..3000 {
                let query = world.next_query();
                let rewards = world.expected_rewards(&query);
                assert!(rewards.iter().all(|r| (0.0..=1.0).contains(r)));
                all.extend(rewards);
            }
            let mean = all.iter().sum::<f64>() / all.len() as f64;
            let deviation = (all.iter().map(|r| (r - mean).powi(2)).sum::<f64>() / all.len() as f64).sqrt();
            assert!((deviation - 0.1).abs() < 0.03, "{shape:?} {deviation}");
        }
    }

    #[test]
    fn a_switch_changes_the_truth_but_not_the_queries() {
        let spec =
            LogQuadraticSpec { dim: 8, models: 3, intrinsic_rank: 1, signal: 0.2, shape: Shape::Isotropic, seed: 4 };
        let (mut a, mut b) = (LogQuadratic::new(spec), LogQuadratic::new(spec));
        let first = a.next_query();
        assert_eq!(first, b.next_query());
        assert_eq!(a.expected_rewards(&first), b.expected_rewards(&first));
        b.switch();
        assert_ne!(a.expected_rewards(&first), b.expected_rewards(&first));
        assert_eq!(a.next_query(), b.next_query());
    }
}
