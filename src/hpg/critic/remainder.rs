//! What the ridge regression leaves: a mirror step on its residuals, in all d dimensions.
//!
//! ```text
//! Y_m += eta_m c q q', project, keep the rank               of the played model m alone
//! eta_m = min(3, eta / (kappa sqrt(examples of m + 1))) / beta          kappa: mean of (q_i.q_j)^2
//! c = e / (1 + eta_m (q'D q)^2)       D = sqrt(beta) I + U diag((lambda^2 + beta^2)^(1/4) - sqrt(beta)) U'
//! ```
//!
//! c is an approximately implicit residual: D stands for the curvature of the mirror map at W.

use crate::config::Mode;
use crate::hpg::linalg::{columns_dot, rotated};
use crate::hpg::projection::Ball;
use crate::hpg::schedule::shrink;
use crate::hpg::spectra::{Eigen, Gradient, Spectra, Step, extend_basis};
use crate::policy::symmetric::Symmetric;
use crate::wire::records::learner::critic::RemainderRecord;
use crate::wire::records::learner::hpg::BallRecord;

/// One model's remainder.
#[derive(Debug, Clone)]
pub struct Remainder {
    spectra: Spectra,
    /// Examples since the last change of the rewards, older ones less where the learner forgets.
    examples: f64,
    /// Version after the last of them.
    learned_at: u64,
}

/// A residual to learn from.
#[derive(Debug, Clone, Copy)]
pub struct Residual<'a> {
    /// The query.
    pub query: &'a [f64],
    /// e, weighted.
    pub error: f64,
    /// Version before the example.
    pub version: u64,
}

/// Settings of the step.
#[derive(Debug, Clone, Copy)]
pub struct Pace {
    /// Feasible set.
    pub ball: Ball,
    /// eta
    pub eta: f64,
    /// kappa
    pub overlap: f64,
    /// Half-life, in examples.
    pub half_life: Option<f64>,
}

/// The largest step, times beta.
const STEP_MAX: f64 = 3.0;

impl Remainder {
    /// W = 0.
    pub fn new(mode: Mode, dim: usize) -> Self {
        Self { spectra: Spectra::new(mode, dim, 1), examples: 0.0, learned_at: 0 }
    }

    /// q'Wq
    pub fn score(&self, ball: &Ball, query: &[f64]) -> f64 {
        let mut score = [0.0];
        self.spectra.scores(ball, query, &mut score);
        score[0]
    }

    /// The same for the query that is learned from next, whose products are then reused.
    pub fn look(&mut self, ball: &Ball, query: &[f64]) -> f64 {
        let mut score = [0.0];
        self.spectra.look(ball, query, &mut score);
        score[0]
    }

    /// One mirror step; `coordinates` is scratch memory.
    pub fn learn(&mut self, pace: &Pace, residual: &Residual, coordinates: &mut Vec<f64>) {
        let Pace { ball, eta, overlap, half_life } = pace;
        let elapsed = (residual.version + 1).saturating_sub(self.learned_at);
        let keep = shrink(*half_life, elapsed as usize);
        let examples = self.examples * keep;
        let rate = (eta / (overlap * (examples + 1.0).sqrt())).min(STEP_MAX) / ball.beta;
        let root = ball.beta.sqrt();
        let lambda = self.spectra.coordinates(ball, 0, residual.query, coordinates);
        let stretch = |lambda: &f64| lambda.hypot(ball.beta).sqrt() - root;
        let form: f64 = lambda.iter().zip(&*coordinates).map(|(lambda, p)| stretch(lambda) * p * p).sum();
        let coefficient = residual.error / (1.0 + rate * (root + form).powi(2));
        let gradient = Gradient { query: residual.query, coefficients: &[coefficient] };
        self.spectra.step(&Step { ball, rate, shrink: keep }, &[gradient]);
        self.examples = examples + 1.0;
        self.learned_at = residual.version + 1;
    }

    /// The rewards have changed: steps are large again.
    pub fn doubt(&mut self) {
        self.examples = 0.0;
    }

    /// Replaces W.
    pub fn set(&mut self, eigen: Eigen, dim: usize) -> bool {
        self.spectra.set(0, eigen, dim)
    }

    /// W, multiplied out.
    pub fn eigen(&self, ball: &Ball, dim: usize) -> Eigen {
        self.spectra.eigens(ball, dim).pop().unwrap_or_default()
    }

    /// Becomes the mean of both, weighted by examples.
    pub fn merge(&mut self, other: &Self, ball: &Ball, dim: usize) {
        let total = self.examples + other.examples;
        if other.examples == 0.0 {
            return;
        }
        let (mut basis, mut parts) = (Vec::new(), Vec::new());
        for one in [&*self, other] {
            let Eigen { lambda, vectors, .. } = one.eigen(ball, dim);
            vectors.chunks_exact(dim).for_each(|vector| extend_basis(&mut basis, vector));
            parts.push((one.examples / total, lambda, vectors));
        }
        let n = basis.len() / dim;
        let mut small = Symmetric::identity(n, 0.0);
        let mut coordinates = Vec::new();
        for (share, lambda, vectors) in &parts {
            for (lambda, vector) in lambda.iter().zip(vectors.chunks_exact(dim)) {
                columns_dot(&basis, vector, &mut coordinates);
                small.add(share * lambda, &coordinates);
            }
        }
        let (lambda, rotation) = small.eigen();
        let vectors = rotated(&basis, &rotation, dim);
        self.spectra.set(0, Eigen::from_primal(ball, &lambda, &vectors, dim), dim);
        self.examples = total;
        self.learned_at = self.learned_at.max(other.learned_at);
    }

    /// The record of its state.
    pub fn record(&self) -> RemainderRecord {
        RemainderRecord { parameters: self.spectra.record(), examples: self.examples, learned_at: self.learned_at }
    }

    /// Restores a record that was saved with the ball `saved`; none if it does not fit.
    pub fn from_record(
        record: RemainderRecord,
        saved: &BallRecord,
        mode: Mode,
        ball: &Ball,
        dim: usize,
    ) -> Option<Self> {
        let RemainderRecord { parameters, examples, learned_at } = record;
        let spectra = Spectra::from_record(parameters, saved, mode, ball, dim, 1)?;
        (0.0..=1e18).contains(&examples).then_some(Self { spectra, examples, learned_at })
    }
}
