//! The leading directions of the queries, as they come.
//!
//! ```text
//! V diag(energy) V' ~ sum q q'        V (d x n) orthonormal, merged with every few queries by the eigenvectors of
//!                                     the products of [V sqrt(energy) | q_1 .. q_b] with each other
//! ```
//!
//! A sketch: what is beyond its n directions is lost. It forgets slowly, so that it follows where queries go.

use super::kernel::{Strided, multiply, products};
use super::linalg::{dot, symmetric_eigen};
use super::spectra::UNIT_MAX;
use crate::wire::records::learner::regression::DirectionsRecord;

/// The sketch.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Directions {
    /// V, one direction after the other, the leading one first.
    vectors: Vec<f64>,
    energy: Vec<f64>,
    /// Queries that are not merged yet, one after the other.
    recent: Vec<f64>,
    /// Queries that were seen.
    seen: u64,
}

/// Queries merged at a time.
const MERGED: usize = 16;

/// Directions beyond those that are asked for: the last ones of a sketch are the least certain.
const SPARE: usize = 8;

/// The first queries are all looked at, of t queries every (t / CLOSE)th, and of many every [`STRIDE_MAX`]th: the better the
/// directions are known, the less another query says.
const CLOSE: u64 = 1024;
const STRIDE_MAX: u64 = 32;

/// What is left of the energy at a merge.
const KEEP: f64 = 1.0 - 1.0 / 512.0;

/// Directions that hold less than this share of the largest one's energy are rounding.
const NOTHING: f64 = 1e-9;

impl Directions {
    /// Looks at a query; `wanted` directions are to be known.
    pub fn see(&mut self, query: &[f64], wanted: usize) {
        self.seen += 1;
        if self.seen.is_multiple_of((self.seen / CLOSE).clamp(1, STRIDE_MAX)) {
            self.recent.extend_from_slice(query);
            if self.recent.len() == MERGED * query.len() {
                self.merge(query.len(), wanted + SPARE);
            }
        }
    }

    /// The leading directions, at most `wanted`, one after the other.
    pub fn leading(&self, dim: usize, wanted: usize) -> &[f64] {
        &self.vectors[..self.vectors.len().min(dim * wanted)]
    }

    /// Queries seen.
    pub fn seen(&self) -> u64 {
        self.seen
    }

    /// The record of its state.
    pub fn record(&self) -> DirectionsRecord {
        let Self { vectors, energy, recent, seen } = self.clone();
        DirectionsRecord { vectors, energies: energy, recent_queries: recent, seen }
    }

    /// Restores a record of this shape; none if it does not fit.
    pub fn from_record(record: DirectionsRecord, dim: usize, wanted: usize) -> Option<Self> {
        let DirectionsRecord { vectors, energies: energy, recent_queries: recent, seen } = record;
        Some(Self { vectors, energy, recent, seen }).filter(|directions| directions.is_sound(dim, wanted))
    }

    fn is_sound(&self, dim: usize, wanted: usize) -> bool {
        let unit = |values: &[f64]| values.iter().all(|x| x.abs() <= UNIT_MAX);
        self.vectors.len() == dim * self.energy.len()
            && self.energy.len() <= wanted + SPARE
            && self.recent.len().is_multiple_of(dim)
            && self.recent.len() < MERGED * dim
            && unit(&self.vectors)
            && unit(&self.recent)
            && self.energy.iter().all(|x| (0.0..=ENERGY_MAX).contains(x))
            && self.seen < u64::MAX / 2
    }

    fn merge(&mut self, dim: usize, most: usize) {
        let mut columns = std::mem::take(&mut self.vectors);
        for (column, energy) in columns.chunks_exact_mut(dim).zip(&self.energy) {
            let length = (KEEP * energy).sqrt();
            column.iter_mut().for_each(|x| *x *= length);
        }
        columns.append(&mut self.recent);
        let n = columns.len() / dim;
        let mut squares = vec![0.0; n * n];
        products(dim, &columns, &columns, &mut squares);
        let (values, vectors) = symmetric_eigen(n, &squares);
        let least = NOTHING * values.last().copied().unwrap_or(0.0);
        let count = values.iter().rev().take(most.min(dim)).take_while(|value| **value > least).count();
        // The leading ones first.
        self.energy = values.iter().rev().take(count).copied().collect();
        let shares: Vec<f64> = vectors.chunks_exact(n).rev().take(count).flatten().copied().collect();
        self.vectors = vec![0.0; dim * count];
        let shares = Strided { values: &shares, row: 1, column: n };
        multiply(dim, (&columns, dim), n, shares, false, &mut self.vectors);
        for direction in self.vectors.chunks_exact_mut(dim) {
            let norm = dot(direction, direction).sqrt();
            direction.iter_mut().for_each(|x| *x /= norm);
        }
    }
}

/// The most energy that unit queries of which [`KEEP`] is left can add up to.
const ENERGY_MAX: f64 = MERGED as f64 / (1.0 - KEEP) * 1.01;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simulate::queries::{Queries, Shape};

    #[test]
    fn finds_the_leading_axes() {
        let (dim, wanted) = (40, 4);
        let mut queries = Queries::new(Shape::PowerLaw, dim, 5);
        let mut directions = Directions::default();
        for _ in 0..4000 {
            directions.see(queries.draw().as_slice(), wanted);
            assert!(directions.is_sound(dim, wanted));
        }
        let leading = directions.leading(dim, wanted);
        assert_eq!(leading.len(), dim * wanted);
        for (i, direction) in leading.chunks_exact(dim).enumerate() {
            // Amplitudes are those of the axes in order, so the i-th direction is nearly the i-th axis.
            assert!(direction[i].abs() > 0.9, "{i} {direction:?}");
            for other in leading.chunks_exact(dim).skip(i + 1) {
                assert!(dot(direction, other).abs() < 1e-9);
            }
        }
    }

    #[test]
    fn follows_queries_to_other_directions() {
        let axis = |i: usize| (0..6).map(|j| f64::from(u8::from(i == j))).collect::<Vec<f64>>();
        let mut directions = Directions::default();
        (0..2000).for_each(|t| directions.see(&axis(t % 2), 2));
        assert_eq!(directions.energy.len(), 2, "those that are not there are not made up");
        (0..200_000).for_each(|t| directions.see(&axis(2 + t / 3 % 2), 2));
        let leading = directions.leading(6, 2);
        assert!(leading.chunks_exact(6).all(|v| v[2].hypot(v[3]) > 0.999), "{leading:?}");
    }
}
