//! How alike queries are: what a step on one of them does to the score of the next.

use super::linalg::dot;
use super::spectra::UNIT_MAX;
use crate::wire::records::learner::regression::OverlapRecord;

/// Running mean of (q_i . q_j)^2 over consecutive distinct queries; 1 before there are two.
#[derive(Debug, Clone, Default)]
pub struct Overlap {
    last: Vec<f64>,
    sum: f64,
    pairs: f64,
}

impl Overlap {
    /// The next query.
    pub fn see(&mut self, query: &[f64]) {
        if self.last == query {
            return;
        }
        if !self.last.is_empty() {
            self.sum += dot(&self.last, query).powi(2);
            self.pairs += 1.0;
        }
        self.last.clear();
        self.last.extend_from_slice(query);
    }

    /// kappa.
    pub fn mean(&self) -> f64 {
        if self.pairs > 0.0 { self.sum / self.pairs } else { 1.0 }
    }

    /// The record of its state.
    pub fn record(&self) -> OverlapRecord {
        let Self { last, sum, pairs } = self.clone();
        OverlapRecord { last_query: last, sum, pairs }
    }

    /// Restores a record of queries of this dimension; none if it does not fit.
    pub fn from_record(record: OverlapRecord, dim: usize) -> Option<Self> {
        let OverlapRecord { last_query: last, sum, pairs } = record;
        Some(Self { last, sum, pairs }).filter(|overlap| overlap.is_sound(dim))
    }

    /// Whether a state can be one of this dimension.
    pub fn is_sound(&self, dim: usize) -> bool {
        (self.last.is_empty() || self.last.len() == dim)
            && self.last.iter().all(|x| x.abs() <= UNIT_MAX)
            && (0.0..=1e30).contains(&self.pairs)
            && (0.0..=self.pairs * UNIT_MAX).contains(&self.sum)
    }
}
