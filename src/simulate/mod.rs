//! Simulated traffic: worlds that know the truth, so that what a learner did can be measured against it.
//!
//! Everything is drawn from seeded, portable generators and computed with portable functions: the same seed gives the
//! same queries, rewards and losses on every machine. All randomness of a round is drawn before the learner's choice
//! is known, so that learners run on one seed meet the same queries and the same luck.

pub mod dataset;
pub mod history;
pub mod items;
pub mod ledger;
pub mod log_quadratic;
pub mod partial;
pub mod priced;
pub mod quantiles;
pub mod queries;
pub mod run;
pub mod shuffled;
pub mod traffic;

use rand::{Rng, RngExt};

use crate::eligible::Eligible;
use crate::event::Query;

/// An environment that routing decisions are taken in.
pub trait World: Send {
    /// Dimension of queries.
    fn dim(&self) -> usize;

    /// Number of models.
    fn models(&self) -> usize;

    /// Draws the next query.
    fn next_query(&mut self) -> Query;

    /// The expected reward of each model for a query, in 0..1.
    fn expected_rewards(&self, query: &Query) -> Vec<f64>;

    /// q'W*_m q for each model: the quadratic part of the truth.
    fn true_scores(&self, query: &Query) -> Vec<f64>;

    /// The largest nuclear norm of the W*_m.
    fn true_norm(&self) -> f64;

    /// Changes abruptly what the models are good at.
    fn switch(&mut self);

    /// Whether the last query had come before; none if the world does not keep track.
    fn occurrence(&self) -> Option<Occurrence> {
        None
    }

    /// What models cost for the last query; none if nothing.
    fn costs(&self) -> Option<Costs<'_>> {
        None
    }

    /// The models that may answer the last query.
    fn eligible(&self) -> Eligible {
        Eligible::ALL
    }
}

/// What each model costs for a query.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Costs<'a> {
    /// On average over queries.
    pub expected: &'a [f64],
    /// For this query.
    pub drawn: &'a [f64],
}

/// Whether a query came before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Occurrence {
    /// A query of the data set comes for the first time.
    First,
    /// A new query that was made from queries of the data set.
    Synthetic,
    /// The query came before.
    Repeat,
}

/// A direction drawn evenly from the sphere.
pub(crate) fn random_direction(dim: usize, generator: &mut impl Rng) -> Vec<f64> {
    loop {
        if let Ok(query) = Query::new(normals(dim, generator)) {
            return query.as_slice().to_vec();
        }
    }
}

/// Independent standard normal numbers, by Box and Muller: with functions whose bits no platform's library decides.
pub(crate) fn normals(n: usize, generator: &mut impl Rng) -> Vec<f64> {
    let mut normal = || {
        // 1 - u is never 0, whose logarithm is infinite.
        let (u, angle): (f64, f64) = generator.random();
        (-2.0 * libm::log(1.0 - u)).sqrt() * libm::cos(std::f64::consts::TAU * angle)
    };
    (0..n).map(|_| normal()).collect()
}
