//! A world in which there is nothing to learn of a query: each comes with the rewards of another one.
//!
//! Which model is best on the whole stays as it was; a learner that finds more than that fools itself.

use super::World;
use crate::event::Query;

/// Two streams of the same kind: queries are of the first, rewards of the second.
pub struct Shuffled {
    queries: Box<dyn World>,
    rewards: Box<dyn World>,
    /// The query whose rewards the current one has.
    other: Option<Query>,
}

impl Shuffled {
    /// `rewards` must be the same world as `queries` with other draws.
    pub fn new(queries: Box<dyn World>, rewards: Box<dyn World>) -> Self {
        Self { queries, rewards, other: None }
    }
}

impl World for Shuffled {
    fn dim(&self) -> usize {
        self.queries.dim()
    }

    fn models(&self) -> usize {
        self.queries.models()
    }

    fn next_query(&mut self) -> Query {
        self.other = Some(self.rewards.next_query());
        self.queries.next_query()
    }

    fn expected_rewards(&self, query: &Query) -> Vec<f64> {
        self.rewards.expected_rewards(self.other.as_ref().unwrap_or(query))
    }

    fn true_scores(&self, query: &Query) -> Vec<f64> {
        vec![0.0; self.rewards.true_scores(query).len()]
    }

    fn true_norm(&self) -> f64 {
        0.0
    }

    fn switch(&mut self) {
        self.queries.switch();
        self.rewards.switch();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simulate::log_quadratic::{LogQuadratic, LogQuadraticSpec};
    use crate::simulate::queries::Shape;

    #[test]
    fn rewards_are_those_of_other_queries() {
        let world = |seed| {
            let (dim, shape) = (6, Shape::Isotropic);
            LogQuadratic::new(LogQuadraticSpec { dim, models: 3, intrinsic_rank: 1, signal: 0.2, shape, seed })
        };
        let mut shuffled = Shuffled::new(Box::new(world(1)), Box::new(world(2)));
        let (mut queries, mut rewards) = (world(1), world(2));
        for _ in 0..20 {
            let query = shuffled.next_query();
            assert_eq!(query, queries.next_query());
            let other = rewards.next_query();
            assert_eq!(shuffled.expected_rewards(&query), rewards.expected_rewards(&other));
        }
    }
}
