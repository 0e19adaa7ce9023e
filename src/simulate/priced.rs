//! A world in which models cost something.
//!
//! ```text
//! cost_m          = cheapest 50^x_m                        x_m = (m - 1) / (M - 1): 0 of the cheapest to 1 of the dearest
//! reward_m        = clip(r_m + merit (x_m - 1/2) + chance_m, 0, 1)
//! cost of a query = cost_m exp(noise z - noise^2 / 2)   z: standard normal, the same for all models
//! ```
//!
//! Dear models are better on the whole, so that there is a trade-off, and each is best for some queries, so that there is something
//! to route. The noise is the query's own, as its length would be.

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::{Costs, Occurrence, World, normals};
use crate::eligible::Eligible;
use crate::event::Query;

/// What models cost.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PriceSpec {
    /// Standard deviation of the logarithm of a query's cost.
    pub noise: f64,
    /// Number of queries after which some prices change.
    pub reprice_at: Option<u64>,
    /// Seed of everything.
    pub seed: u64,
}

/// A world with prices.
pub struct Priced {
    world: Box<dyn World>,
    spec: PriceSpec,
    generator: ChaCha8Rng,
    merits: Vec<f64>,
    expected: Vec<f64>,
    drawn: Vec<f64>,
    queries: u64,
}

/// The lowest price, the ratio of the highest to it, and the factor by which prices change.
const CHEAPEST: f64 = 0.1;
const SPAN: f64 = 50.0;
const CHANGE: f64 = 4.0;

/// What the dearest model earns more than the cheapest, and the standard deviation of what has nothing to do with the price.
const MERIT: f64 = 0.25;
const CHANCE: f64 = 0.02;

impl Priced {
    /// Gives the models of a world their prices.
    pub fn new(world: Box<dyn World>, spec: PriceSpec) -> Self {
        let mut generator = ChaCha8Rng::seed_from_u64(spec.seed);
        // Stream 0 is the world's own, `u64::MAX` that of the loop.
        generator.set_stream(u64::MAX - 1);
        let models = world.models();
        let last = (models.max(2) - 1) as f64;
        let positions: Vec<f64> = (0..models).map(|m| m as f64 / last).collect();
        let chances = normals(models, &mut generator);
        let merits = positions.iter().zip(chances).map(|(x, z)| MERIT * (x - 0.5) + CHANCE * z).collect();
        let expected: Vec<f64> = positions.iter().map(|x| CHEAPEST * libm::pow(SPAN, *x)).collect();
        Self { world, spec, generator, merits, drawn: expected.clone(), expected, queries: 0 }
    }

    /// Three of eight models change their price, by a factor of 4.
    fn reprice(&mut self) {
        let models = self.expected.len();
        let changed = (3 * models).div_ceil(8);
        for m in shuffled(models, &mut self.generator).into_iter().take(changed) {
            let middle = CHEAPEST * SPAN.sqrt();
            // Away from where it is: a dear model becomes cheap.
            let factor = if self.expected[m] > middle { 1.0 / CHANGE } else { CHANGE };
            self.expected[m] *= factor;
        }
    }
}

/// 0 to n - 1 in random order.
fn shuffled(n: usize, generator: &mut ChaCha8Rng) -> Vec<usize> {
    let mut order: Vec<usize> = (0..n).collect();
    (1..n).rev().for_each(|i| order.swap(i, generator.random_range(0..=i)));
    order
}

impl World for Priced {
    fn dim(&self) -> usize {
        self.world.dim()
    }

    fn models(&self) -> usize {
        self.world.models()
    }

    fn next_query(&mut self) -> Query {
        if self.spec.reprice_at == Some(self.queries) {
            self.reprice();
        }
        self.queries += 1;
        let (noise, z) = (self.spec.noise, normals(1, &mut self.generator)[0]);
        let factor = libm::exp(noise * z - 0.5 * noise * noise);
        self.drawn.iter_mut().zip(&self.expected).for_each(|(drawn, cost)| *drawn = factor * cost);
        self.world.next_query()
    }

    fn expected_rewards(&self, query: &Query) -> Vec<f64> {
        let rewards = self.world.expected_rewards(query);
        rewards.iter().zip(&self.merits).map(|(r, merit)| (r + merit).clamp(0.0, 1.0)).collect()
    }

    fn true_scores(&self, query: &Query) -> Vec<f64> {
        self.world.true_scores(query).iter().zip(&self.merits).map(|(score, merit)| score + merit).collect()
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
        Some(Costs { expected: &self.expected, drawn: &self.drawn })
    }

    fn eligible(&self) -> Eligible {
        self.world.eligible()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simulate::log_quadratic::{LogQuadratic, LogQuadraticSpec};
    use crate::simulate::queries::Shape;

    fn world(noise: f64, reprice_at: Option<u64>) -> Priced {
        let (dim, shape) = (6, Shape::Isotropic);
        let inner =
            LogQuadratic::new(LogQuadraticSpec { dim, models: 8, intrinsic_rank: 1, signal: 0.1, shape, seed: 1 });
        Priced::new(Box::new(inner), PriceSpec { noise, reprice_at, seed: 1 })
    }

    #[test]
    fn prices_span_a_wide_range_and_dear_models_are_better_on_the_whole() {
        let mut world = world(0.5, Some(3000));
        let costs = world.costs().unwrap().expected.to_vec();
        let (least, most) =
            (costs.iter().fold(f64::MAX, |a, b| a.min(*b)), costs.iter().fold(0.0_f64, |a, b| a.max(*b)));
        assert!((most / least - SPAN).abs() < 1e-9);
        let (mut earned, mut drawn) = (vec![0.0; 8], vec![0.0; 8]);
        for _ in 0..3000 {
            let query = world.next_query();
            earned.iter_mut().zip(world.expected_rewards(&query)).for_each(|(sum, r)| *sum += r / 3000.0);
            let costs = world.costs().unwrap().drawn.to_vec();
            drawn.iter_mut().zip(costs).for_each(|(sum, cost)| *sum += cost / 3000.0);
        }
        let at = |cost: f64| costs.iter().position(|c| *c == cost).unwrap();
        assert!(earned[at(most)] > earned[at(least)] + 0.1, "{earned:?}");
        assert!(drawn.iter().zip(&costs).all(|(drawn, cost)| (drawn / cost - 1.0).abs() < 0.1), "{drawn:?} {costs:?}");
        world.next_query();
        let changed = world.costs().unwrap().expected.iter().zip(&costs).filter(|(a, b)| a != b).count();
        assert_eq!(changed, 3);
    }
}
