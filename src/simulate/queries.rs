//! Where queries come from: how their energy is spread over directions.

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};

use super::{normals, random_direction};
use crate::event::Query;

/// The shape of the query distribution.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Shape {
    /// All directions alike.
    Isotropic,
    /// Amplitude of direction j in proportion to 1 / j: spectra of real embeddings decay, too.
    PowerLaw,
    /// Around 20 topics, the i-th drawn in proportion to 1 / i.
    Clustered,
}

const CLUSTERS: usize = 20;

/// Standard deviation of a clustered query around its topic, over all dimensions together.
const CLUSTER_SPREAD: f64 = 0.5;

/// A stream of queries.
#[derive(Debug, Clone)]
pub struct Queries {
    dim: usize,
    scales: Vec<f64>,
    centres: Vec<Vec<f64>>,
    generator: ChaCha8Rng,
}

impl Queries {
    /// A stream of this shape.
    pub fn new(shape: Shape, dim: usize, seed: u64) -> Self {
        let mut generator = ChaCha8Rng::seed_from_u64(seed);
        let scales = match shape {
            Shape::Isotropic => vec![1.0; dim],
            Shape::PowerLaw => (1..=dim).map(|j| 1.0 / j as f64).collect(),
            Shape::Clustered => vec![CLUSTER_SPREAD / (dim as f64).sqrt(); dim],
        };
        let clusters = if shape == Shape::Clustered { CLUSTERS } else { 0 };
        let centres = (0..clusters).map(|_| random_direction(dim, &mut generator)).collect();
        Self { dim, scales, centres, generator }
    }

    /// The next query.
    pub fn draw(&mut self) -> Query {
        loop {
            let mut q = normals(self.dim, &mut self.generator);
            q.iter_mut().zip(&self.scales).for_each(|(x, scale)| *x *= scale);
            if let Some(centre) = self.topic().map(|topic| &self.centres[topic]) {
                q.iter_mut().zip(centre).for_each(|(x, c)| *x += c);
            }
            if let Ok(query) = Query::new(q) {
                return query;
            }
        }
    }

    fn topic(&mut self) -> Option<usize> {
        let n = self.centres.len();
        let total: f64 = (1..=n).map(|i| 1.0 / i as f64).sum();
        let mut left = self.generator.random::<f64>() * total;
        (0..n).find(|i| {
            left -= 1.0 / (i + 1) as f64;
            left < 0.0 || i + 1 == n
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_have_their_spectra() {
        let dim = 16;
        let energy = |shape| {
            let mut queries = Queries::new(shape, dim, 3);
            let mut energy = vec![0.0; dim];
            for _ in 0..4000 {
                let q = queries.draw();
                energy.iter_mut().zip(q.as_slice()).for_each(|(e, x)| *e += x * x / 4000.0);
            }
            energy
        };
        let isotropic = energy(Shape::Isotropic);
        assert!(isotropic.iter().all(|e| (e * dim as f64 - 1.0).abs() < 0.15), "{isotropic:?}");
        let power_law = energy(Shape::PowerLaw);
        assert!(power_law[0] > 3.0 * power_law[4] && power_law[4] > 1.5 * power_law[15], "{power_law:?}");
    }

    #[test]
    fn clustered_queries_are_alike_within_a_topic() {
        let mut queries = Queries::new(Shape::Clustered, 64, 3);
        let drawn: Vec<Query> = (0..200).map(|_| queries.draw()).collect();
        let cosine = |a: &Query, b: &Query| a.as_slice().iter().zip(b.as_slice()).map(|(a, b)| a * b).sum::<f64>();
        let close = |a: &Query| drawn.iter().filter(|b| cosine(a, b) > 0.6).count() > 2;
        assert!(drawn.iter().filter(|a| close(a)).count() > 150);
    }
}
