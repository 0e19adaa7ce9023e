//! Policy gradient without hypentropy: plain Euclidean steps in the log-quadratic class.
//!
//! ```text
//! pi(m | q) = softmax(q'W_m q)           W_m += eta c_m q q'           c_m as in HPG: see [`hpg::gradient`]
//! ```
//!
//! W_m: d x d, dense; or, with a rank k, d x k eigenvectors and eigenvalues, and the last steps beside them. These are
//! worked in every [`RECENT_MAX`] steps, exactly, in the span of both, and then the k eigenvalues of largest magnitude
//! are kept. Paper: Section 4.2, the method that Algorithm 1 replaces.
//!
//! [`hpg::gradient`]: crate::hpg::gradient

use std::cell::OnceCell;

use serde::{Deserialize, Serialize};

use super::symmetric::Symmetric;
use crate::event::Query;
use crate::hpg::gradient::GradientSpec;
use crate::hpg::learner::score_form;
use crate::hpg::linalg::{axpy, columns_dot, dot, product, symmetric_eigen};
use crate::hpg::schedule::{Rate, shrink};
use crate::hpg::spectra::{Eigen, UNIT_MAX, extend_basis, pick};
use crate::learner::{Learner, Lesson};
use crate::router::ScoreForm;
use crate::wire::records::learner::AlgorithmRecord;
use crate::wire::records::learner::rivals::{LogQuadraticRecord, SymmetricRecord, TruncatedRecord};

/// Checked settings of Euclidean policy gradient.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LogQuadraticSpec {
    /// Learning rate.
    pub rate: Rate,
    /// How c_m is estimated.
    pub gradient: GradientSpec,
    /// Eigenvalues kept of each model; all without it.
    pub rank: Option<usize>,
}

/// Euclidean policy gradient.
#[derive(Debug, Clone)]
pub struct LogQuadratic {
    spec: LogQuadraticSpec,
    dim: usize,
    models: usize,
    half_life: Option<f64>,
    parameters: Parameters,
    decomposed: OnceCell<Vec<Eigen>>,
}

/// The parameters of all models.
#[derive(Debug, Clone)]
enum Parameters {
    /// W of each model.
    Dense(Vec<Symmetric>),
    /// W of each model but for the last steps, and these.
    Truncated {
        /// Of rank k.
        kept: Vec<Kept>,
        /// Queries of the last steps, one after the other.
        recent: Vec<f64>,
    },
}

/// One model's part of a truncated state: W = V diag(lambda) V' + sum_i steps_i q_i q_i'.
#[derive(Debug, Clone, Default)]
struct Kept {
    lambda: Vec<f64>,
    /// d x r
    vectors: Vec<f64>,
    /// eta c of the recent queries.
    steps: Vec<f64>,
}

/// Steps that are held beside a truncated W.
pub const RECENT_MAX: usize = 32;

/// The most that an entry of W can have become in any stream.
const SUM_MAX: f64 = 1e30;

impl LogQuadratic {
    /// W = 0.
    pub fn new(spec: LogQuadraticSpec, dim: usize, models: usize, half_life: Option<f64>) -> Self {
        let parameters = match spec.rank {
            None => Parameters::Dense(vec![Symmetric::identity(dim, 0.0); models]),
            Some(_) => Parameters::Truncated { kept: vec![Kept::default(); models], recent: Vec::new() },
        };
        Self { spec, dim, models, half_life, parameters, decomposed: OnceCell::new() }
    }

    /// Restores a record; none if it does not fit. Another rank, or none, keeps the eigenvalues of largest magnitude.
    pub fn restore(
        spec: LogQuadraticSpec,
        dim: usize,
        models: usize,
        half_life: Option<f64>,
        record: LogQuadraticRecord,
    ) -> Option<Self> {
        let parameters = Parameters::from_record(record, dim, models)?;
        let fits = parameters.fits_rank(spec.rank);
        let mut restored = Self { spec, dim, models, half_life, parameters, decomposed: OnceCell::new() };
        if !fits {
            let eigens = restored.eigens();
            restored = Self::new(restored.spec, dim, models, half_life);
            for (model, Eigen { lambda, vectors, .. }) in eigens.iter().enumerate() {
                restored.set(model, lambda, vectors);
            }
        }
        Some(restored)
    }

    fn step(&mut self, query: &[f64], steps: &[f64]) {
        match &mut self.parameters {
            Parameters::Dense(all) => all.iter_mut().zip(steps).for_each(|(w, step)| w.add(*step, query)),
            Parameters::Truncated { kept, recent } => {
                recent.extend_from_slice(query);
                kept.iter_mut().zip(steps).for_each(|(model, step)| model.steps.push(*step));
                if recent.len() >= RECENT_MAX * query.len() {
                    let rank = self.spec.rank.unwrap_or(query.len());
                    kept.iter_mut().for_each(|model| *model = model.worked_in(recent, query.len(), rank));
                    recent.clear();
                }
            }
        }
    }

    fn forget(&mut self, keep: f64) {
        match &mut self.parameters {
            Parameters::Dense(all) => all.iter_mut().for_each(|w| w.scale(keep)),
            Parameters::Truncated { kept, .. } => {
                kept.iter_mut()
                    .flat_map(|model| model.lambda.iter_mut().chain(&mut model.steps))
                    .for_each(|x| *x *= keep);
            }
        }
    }

    fn quadratic_scores(&self, query: &[f64], scores: &mut [f64]) {
        match &self.parameters {
            Parameters::Dense(all) => {
                scores.iter_mut().zip(all).for_each(|(score, w)| *score = w.form(query));
            }
            Parameters::Truncated { kept, recent } => {
                let mut recent_products = Vec::new();
                columns_dot(recent, query, &mut recent_products);
                let squares: Vec<f64> = recent_products.iter().map(|x| x * x).collect();
                for (score, model) in scores.iter_mut().zip(kept) {
                    let parts = model.lambda.iter().zip(model.vectors.chunks_exact(query.len()));
                    *score = dot(&model.steps, &squares) + parts.map(|(l, v)| l * dot(v, query).powi(2)).sum::<f64>();
                }
            }
        }
    }
}

impl Learner for LogQuadratic {
    fn scores(&self, query: &Query, scores: &mut [f64]) {
        self.quadratic_scores(query.as_slice(), scores);
    }

    fn apply(&mut self, batch: &[Lesson], version: u64) {
        self.decomposed.take();
        let rate = self.spec.rate.at(version + batch.len() as u64);
        // All gradients are taken before the first step, as in HPG.
        let mut all = Vec::with_capacity(batch.len());
        for lesson in batch {
            let mut c = Vec::with_capacity(self.models);
            let scores = |out: &mut [f64]| self.quadratic_scores(lesson.example.query().as_slice(), out);
            let policy = self.spec.gradient.policy(lesson, self.models, scores);
            self.spec.gradient.coefficients(lesson, &policy, &mut c);
            c.iter_mut().for_each(|c| *c *= rate);
            all.push(c);
        }
        let keep = shrink(self.half_life, batch.len());
        if keep < 1.0 {
            self.forget(keep);
        }
        batch.iter().zip(&all).for_each(|(lesson, steps)| self.step(lesson.example.query().as_slice(), steps));
    }

    fn score_forms(&self) -> Vec<ScoreForm> {
        self.eigens().iter().map(score_form).collect()
    }

    fn eigens(&self) -> Vec<Eigen> {
        let decompose = || match &self.parameters {
            Parameters::Dense(all) => all.iter().map(Symmetric::to_eigen).collect(),
            Parameters::Truncated { kept, recent } => {
                kept.iter().map(|model| model.worked_in(recent, self.dim, self.dim).into_eigen()).collect()
            }
        };
        self.decomposed.get_or_init(decompose).clone()
    }

    fn set(&mut self, model: usize, lambda: &[f64], vectors: &[f64]) -> bool {
        self.decomposed.take();
        match (&mut self.parameters, self.spec.rank) {
            (Parameters::Truncated { kept, recent }, Some(rank)) => {
                let steps = vec![0.0; recent.len() / self.dim];
                kept[model] = Kept { steps, ..Kept::largest(lambda, vectors, self.dim, rank) };
            }
            (Parameters::Dense(all), _) => all[model] = Symmetric::compose(self.dim, lambda, vectors),
            _ => return false,
        }
        true
    }

    fn remap(&mut self, places: &[Option<usize>]) {
        self.decomposed.take();
        self.models = places.len();
        match &mut self.parameters {
            Parameters::Dense(all) => pick(all, places, || Symmetric::identity(self.dim, 0.0)),
            Parameters::Truncated { kept, recent } => {
                let steps = vec![0.0; recent.len() / self.dim];
                pick(kept, places, || Kept { steps: steps.clone(), ..Kept::default() });
            }
        }
    }

    fn save(&self) -> AlgorithmRecord {
        AlgorithmRecord::LogQuadratic(self.parameters.record())
    }
}

impl Parameters {
    fn record(&self) -> LogQuadraticRecord {
        match self {
            Self::Dense(all) => LogQuadraticRecord::Dense(all.iter().map(Symmetric::record).collect()),
            Self::Truncated { kept, recent } => LogQuadraticRecord::Truncated {
                models: kept.iter().map(Kept::record).collect(),
                recent_queries: recent.clone(),
            },
        }
    }

    fn from_record(record: LogQuadraticRecord, dim: usize, models: usize) -> Option<Self> {
        match record {
            LogQuadraticRecord::Dense(all) => {
                let matrix = |record: SymmetricRecord| Symmetric::from_record(record, dim, SUM_MAX);
                let all = all.into_iter().map(matrix).collect::<Option<Vec<Symmetric>>>()?;
                (all.len() == models).then_some(Self::Dense(all))
            }
            LogQuadraticRecord::Truncated { models: records, recent_queries: recent } => {
                let steps = recent.len() / dim;
                let is_sound = recent.len() == steps * dim
                    && steps < RECENT_MAX
                    && recent.iter().all(|x| x.abs() <= UNIT_MAX)
                    && records.len() == models;
                let kept = |record: TruncatedRecord| Kept::from_record(record, dim, steps);
                let kept = records.into_iter().map(kept).collect::<Option<Vec<Kept>>>()?;
                is_sound.then_some(Self::Truncated { kept, recent })
            }
        }
    }

    /// Whether they have the form, and no more eigenvalues, than a rank asks for.
    fn fits_rank(&self, rank: Option<usize>) -> bool {
        match (self, rank) {
            (Self::Dense(_), None) => true,
            (Self::Truncated { kept, .. }, Some(rank)) => kept.iter().all(|model| model.lambda.len() <= rank),
            _ => false,
        }
    }
}

impl Kept {
    /// The eigenvalues of largest magnitude, at most `rank`, and none that is zero.
    fn largest(values: &[f64], vectors: &[f64], dim: usize, rank: usize) -> Self {
        let mut order: Vec<usize> = (0..values.len()).filter(|&i| values[i] != 0.0).collect();
        order.sort_by(|&i, &j| values[j].abs().total_cmp(&values[i].abs()));
        order.truncate(rank);
        Self {
            lambda: order.iter().map(|&i| values[i]).collect(),
            vectors: order.iter().flat_map(|&i| &vectors[i * dim..(i + 1) * dim]).copied().collect(),
            steps: Vec::new(),
        }
    }

    /// The same W with no recent steps, cut to a rank.
    fn worked_in(&self, recent: &[f64], dim: usize, rank: usize) -> Self {
        let mut basis = self.vectors.clone();
        recent.chunks_exact(dim).for_each(|query| extend_basis(&mut basis, query));
        let n = basis.len() / dim;
        if n == 0 {
            return Self::default();
        }
        let mut small = vec![0.0; n * n];
        self.lambda.iter().enumerate().for_each(|(i, lambda)| small[i * n + i] = *lambda);
        let mut z = Vec::new();
        for (query, step) in recent.chunks_exact(dim).zip(&self.steps) {
            columns_dot(&basis, query, &mut z);
            small.chunks_exact_mut(n).zip(&z).for_each(|(column, z_j)| axpy(step * z_j, &z, column));
        }
        let (values, rotation) = symmetric_eigen(n, &small);
        let cut = Self::largest(&values, &rotation, n, rank);
        let r = cut.lambda.len();
        let rows: Vec<f64> =
            (0..n).flat_map(|i| (0..r).map(move |j| (i, j))).map(|(i, j)| cut.vectors[j * n + i]).collect();
        let mut vectors = vec![0.0; dim * r];
        product(dim, &basis, &rows, r, false, &mut vectors);
        Self { lambda: cut.lambda, vectors, steps: Vec::new() }
    }

    fn into_eigen(self) -> Eigen {
        Eigen { gamma: self.lambda.clone(), lambda: self.lambda, vectors: self.vectors }
    }

    fn record(&self) -> TruncatedRecord {
        let Self { lambda, vectors, steps } = self.clone();
        TruncatedRecord { eigenvalues: lambda, eigenvectors: vectors, steps }
    }

    fn from_record(record: TruncatedRecord, dim: usize, recent: usize) -> Option<Self> {
        let TruncatedRecord { eigenvalues: lambda, eigenvectors: vectors, steps } = record;
        let is_bounded = |values: &[f64]| values.iter().all(|x| x.abs() <= SUM_MAX);
        let is_sound = lambda.len() <= dim
            && vectors.len() == lambda.len() * dim
            && vectors.iter().all(|x| x.abs() <= UNIT_MAX)
            && steps.len() == recent
            && is_bounded(&lambda)
            && is_bounded(&steps);
        is_sound.then_some(Self { lambda, vectors, steps })
    }
}
