//! A world in which each query may be answered by a random half of the models only.

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::{Costs, Occurrence, World};
use crate::eligible::Eligible;
use crate::event::Query;

/// Another world, with half of its models missing at random.
pub struct Partial {
    world: Box<dyn World>,
    generator: ChaCha8Rng,
    eligible: Eligible,
}

impl Partial {
    /// Each model may answer a query with probability 1/2, at least one always.
    pub fn new(world: Box<dyn World>, seed: u64) -> Self {
        let mut generator = ChaCha8Rng::seed_from_u64(seed);
        // No other part of a simulation uses this stream.
        generator.set_stream(u64::MAX - 2);
        Self { world, generator, eligible: Eligible::ALL }
    }
}

impl World for Partial {
    fn dim(&self) -> usize {
        self.world.dim()
    }

    fn models(&self) -> usize {
        self.world.models()
    }

    fn next_query(&mut self) -> Query {
        let models = self.world.models();
        self.eligible = loop {
            let mask = (0..models).map(|_| self.generator.random::<bool>()).collect();
            if let Some(eligible) = Eligible::only(mask) {
                break eligible;
            }
        };
        self.world.next_query()
    }

    fn expected_rewards(&self, query: &Query) -> Vec<f64> {
        self.world.expected_rewards(query)
    }

    fn true_scores(&self, query: &Query) -> Vec<f64> {
        self.world.true_scores(query)
    }

    fn true_norm(&self) -> f64 {
        self.world.true_norm()
    }

    fn switch(&mut self) {
        self.world.switch();
    }

    fn occurrence(&self) -> Option<Occurrence> {
        self.world.occurrence()
    }

    fn costs(&self) -> Option<Costs<'_>> {
        self.world.costs()
    }

    fn eligible(&self) -> Eligible {
        self.eligible.clone()
    }
}
