//! The parameters of all models, W_m = U diag(beta sinh gamma) U', and one mirror step on them.
//!
//! ```text
//! Y_m <- shrink Y_m + eta sum_i c_im q_i q_i'        then project on the ball and keep the `rank` largest |gamma|
//! ```
//!
//! Four ways to hold the same thing: [`Exact`] decomposes a dense d x d matrix at every step (slow and obvious: the
//! reference), [`Explicit`] keeps the d x k eigenvectors, [`Factored`] keeps them as a product and multiplies it out
//! now and then (fast: the default), and [`Lazy`] keeps the plain sum and projects only to play (dual averaging).

use std::cell::OnceCell;

use super::factored::{FORESIGHT, Factored};
use super::linalg::{axpy, columns_add, columns_dot, compose, dot, product, symmetric_eigen};
use super::projection::Ball;
use crate::config::Mode;
use crate::wire::records::learner::hpg::{BallRecord, EigenRecord, ExactRecord, LazyRecord, ParametersRecord};

/// One example's descent direction, c_m q q' for each model m.
#[derive(Debug, Clone, Copy)]
pub struct Gradient<'a> {
    /// The unit query q.
    pub query: &'a [f64],
    /// c_m of each model.
    pub coefficients: &'a [f64],
}

/// How far and how to step.
#[derive(Debug, Clone, Copy)]
pub struct Step<'a> {
    /// Where the parameters live.
    pub ball: &'a Ball,
    /// Learning rate eta.
    pub rate: f64,
    /// What is left of the old parameters, in the mirror space: 1 forgets nothing.
    pub shrink: f64,
}

/// An eigendecomposition of rank r in d dimensions.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Eigen {
    /// Eigenvalues in the mirror space.
    pub gamma: Vec<f64>,
    /// Eigenvalues of W: beta sinh gamma.
    pub lambda: Vec<f64>,
    /// Eigenvectors, d x r, column by column.
    pub vectors: Vec<f64>,
}

/// The parameters of all models, in the form that the mode asks for.
#[derive(Debug, Clone)]
pub enum Spectra {
    /// Dense, decomposed at every step.
    Exact(Exact),
    /// Explicit eigenvectors.
    Explicit(Explicit),
    /// Factored eigenvectors.
    Factored(Factored),
    /// Unprojected sums.
    Lazy(Lazy),
}

impl Spectra {
    /// W = 0, in the form that a mode asks for.
    pub fn new(mode: Mode, dim: usize, models: usize) -> Self {
        match mode {
            Mode::Exact => Self::Exact(Exact::new(dim, models)),
            Mode::Explicit => Self::Explicit(Explicit::new(models)),
            Mode::Factored => Self::Factored(Factored::new(models)),
            Mode::Lazy => Self::Lazy(Lazy::new(dim, models)),
        }
    }

    /// Scores q'W_m q of all models.
    pub fn scores(&self, ball: &Ball, query: &[f64], scores: &mut [f64]) {
        match self {
            Self::Exact(Exact { eigens, .. }) | Self::Explicit(Explicit { eigens }) => {
                eigen_scores(eigens, query, scores)
            }
            Self::Lazy(lazy) => eigen_scores(lazy.projected(ball, query.len()), query, scores),
            Self::Factored(factored) => factored.scores(query, scores),
        }
    }

    /// The same, of the query that the next step is of.
    pub fn look(&mut self, ball: &Ball, query: &[f64], scores: &mut [f64]) {
        match self {
            Self::Factored(factored) => factored.look(query, scores),
            _ => self.scores(ball, query, scores),
        }
    }

    /// How many steps it is of use to know beforehand.
    pub fn foresight(&self) -> usize {
        if matches!(self, Self::Factored(_)) { FORESIGHT } else { 1 }
    }

    /// Says which queries the next steps are of, in their order. It changes nothing but the time that they take.
    pub fn expect<'a>(&mut self, queries: impl Iterator<Item = &'a [f64]>) {
        if let Self::Factored(factored) = self {
            factored.expect(queries);
        }
    }

    /// The eigenvalues of one model, and the query's coordinates in its eigenvectors.
    pub fn coordinates(&self, ball: &Ball, model: usize, query: &[f64], out: &mut Vec<f64>) -> &[f64] {
        let eigens = match self {
            Self::Exact(Exact { eigens, .. }) | Self::Explicit(Explicit { eigens }) => eigens,
            Self::Lazy(lazy) => lazy.projected(ball, query.len()),
            Self::Factored(factored) => return factored.coordinates(model, query, out),
        };
        columns_dot(&eigens[model].vectors, query, out);
        &eigens[model].lambda
    }

    /// One mirror step with all gradients of a batch.
    pub fn step(&mut self, step: &Step, batch: &[Gradient]) {
        match self {
            Self::Exact(exact) => exact.step(step, batch),
            Self::Explicit(explicit) => explicit.step(step, batch),
            Self::Factored(factored) => factored.step(step, batch),
            Self::Lazy(lazy) => lazy.step(step, batch),
        }
    }

    /// Each model's eigendecomposition, multiplied out.
    pub fn eigens(&self, ball: &Ball, dim: usize) -> Vec<Eigen> {
        match self {
            Self::Exact(Exact { eigens, .. }) | Self::Explicit(Explicit { eigens }) => eigens.clone(),
            Self::Factored(factored) => factored.eigens(dim),
            Self::Lazy(lazy) => lazy.projected(ball, dim).to_vec(),
        }
    }

    /// Moves to another set of models, of which `places` says where each was; a new one starts at zero.
    pub fn remap(&mut self, places: &[Option<usize>], dim: usize) {
        match self {
            Self::Exact(Exact { mirrors, eigens }) => {
                pick(mirrors, places, || vec![0.0; dim * dim]);
                pick(eigens, places, Eigen::default);
            }
            Self::Explicit(Explicit { eigens }) => pick(eigens, places, Eigen::default),
            Self::Factored(factored) => factored.remap(places),
            Self::Lazy(lazy) => {
                lazy.played.take();
                pick(&mut lazy.sums, places, || vec![0.0; dim * (dim + 1) / 2]);
            }
        }
    }

    /// The record of the parameters.
    pub fn record(&self) -> ParametersRecord {
        let eigens = |eigens: &[Eigen]| eigens.iter().map(Eigen::record).collect();
        match self {
            Self::Exact(exact) => {
                let record = ExactRecord { mirrors: exact.mirrors.clone(), eigens: eigens(&exact.eigens) };
                ParametersRecord::Exact(record)
            }
            Self::Explicit(explicit) => ParametersRecord::Explicit(eigens(&explicit.eigens)),
            Self::Factored(factored) => ParametersRecord::Factored(factored.record()),
            Self::Lazy(lazy) => ParametersRecord::Lazy(LazyRecord { sums: lazy.sums.clone(), rate: lazy.rate }),
        }
    }

    /// Restores parameters that were saved in the ball `saved`; none if the record has another shape or impossible values.
    ///
    /// Parameters of the same form that fit into the same ball keep every bit. Another ball projects them, and a lower rank
    /// keeps the eigenvalues of largest magnitude. Another mode multiplies them out first; sums of gradients cannot be
    /// recovered, so that no other form becomes `lazy`.
    pub fn from_record(
        record: ParametersRecord,
        saved: &BallRecord,
        mode: Mode,
        ball: &Ball,
        dim: usize,
        models: usize,
    ) -> Option<Self> {
        let mut spectra = Self::decode(record, dim, models)?;
        // In the same ball nothing moves, not even by rounding.
        if (saved.radius, saved.scale) != (ball.tau, ball.beta) {
            spectra.move_to(ball, dim);
        }
        if !spectra.is_of(mode) || !spectra.fits_rank(ball.rank, dim) {
            spectra = Self::holding(mode, spectra.eigens(ball, dim), ball, dim)?;
        }
        spectra.is_inside(ball).then_some(spectra)
    }

    /// The parameters of a record, if all lists have the right lengths and all numbers are possible ones in some ball.
    fn decode(record: ParametersRecord, dim: usize, models: usize) -> Option<Self> {
        let eigens = |records: Vec<EigenRecord>| {
            let all: Option<Vec<Eigen>> = records.into_iter().map(|record| Eigen::from_record(record, dim)).collect();
            all.filter(|eigens| eigens.len() == models)
        };
        match record {
            ParametersRecord::Exact(ExactRecord { mirrors, eigens: records }) => {
                let is_dense = |y: &Vec<f64>| y.len() == dim * dim && y.iter().all(|x| x.is_finite());
                let is_sound = mirrors.len() == models && mirrors.iter().all(is_dense);
                let eigens = eigens(records)?;
                is_sound.then_some(Self::Exact(Exact { mirrors, eigens }))
            }
            ParametersRecord::Explicit(records) => Some(Self::Explicit(Explicit { eigens: eigens(records)? })),
            ParametersRecord::Factored(record) => Some(Self::Factored(Factored::from_record(record, dim, models)?)),
            ParametersRecord::Lazy(LazyRecord { sums, rate }) => {
                let is_bounded = |x: &f64| (rate * x).abs() <= SUM_MAX;
                let is_packed = |y: &Vec<f64>| y.len() == dim * (dim + 1) / 2 && y.iter().all(is_bounded);
                let is_sound = sums.len() == models && sums.iter().all(is_packed);
                is_sound.then_some(Self::Lazy(Lazy { sums, rate, played: OnceCell::new() }))
            }
        }
    }

    /// Parameters in the form that a mode asks for, of the rank that the ball allows; none if the form cannot hold them.
    fn holding(mode: Mode, eigens: Vec<Eigen>, ball: &Ball, dim: usize) -> Option<Self> {
        let mut spectra = Self::new(mode, dim, eigens.len());
        let mut set = |(m, eigen): (usize, Eigen)| eigen.is_unit() && spectra.set(m, eigen.truncated(ball, dim), dim);
        eigens.into_iter().enumerate().all(&mut set).then_some(spectra)
    }

    fn is_of(&self, mode: Mode) -> bool {
        matches!(
            (self, mode),
            (Self::Exact(_), Mode::Exact)
                | (Self::Explicit(_), Mode::Explicit)
                | (Self::Factored(_), Mode::Factored)
                | (Self::Lazy(_), Mode::Lazy)
        )
    }

    fn fits_rank(&self, rank: usize, dim: usize) -> bool {
        match self {
            Self::Exact(Exact { eigens, .. }) | Self::Explicit(Explicit { eigens }) => {
                eigens.iter().all(|eigen| eigen.gamma.len() <= rank)
            }
            Self::Factored(factored) => factored.fits_rank(rank, dim),
            // The projection truncates whenever it is played.
            Self::Lazy(_) => true,
        }
    }

    fn is_inside(&self, ball: &Ball) -> bool {
        match self {
            Self::Exact(Exact { eigens, .. }) | Self::Explicit(Explicit { eigens }) => {
                eigens.iter().all(|eigen| ball.holds(&eigen.gamma, &eigen.lambda))
            }
            Self::Factored(factored) => factored.is_inside(ball),
            Self::Lazy(_) => true,
        }
    }

    /// Projects parameters that were made in another ball.
    fn move_to(&mut self, ball: &Ball, dim: usize) {
        match self {
            Self::Exact(Exact { mirrors, eigens }) => {
                for (mirror, eigen) in mirrors.iter_mut().zip(eigens) {
                    ball.pull_in(&mut eigen.gamma, &mut eigen.lambda);
                    *mirror = compose(dim, &eigen.gamma, &eigen.vectors);
                }
            }
            Self::Explicit(Explicit { eigens }) => {
                eigens.iter_mut().for_each(|eigen| ball.pull_in(&mut eigen.gamma, &mut eigen.lambda));
            }
            Self::Factored(factored) => factored.move_to(ball),
            // Its sums know no ball.
            Self::Lazy(_) => {}
        }
    }
}

impl Spectra {
    /// Sets the parameters of one model; false where the form cannot take them.
    pub fn set(&mut self, model: usize, eigen: Eigen, dim: usize) -> bool {
        match self {
            Self::Exact(Exact { mirrors, eigens }) => {
                mirrors[model] = compose(dim, &eigen.gamma, &eigen.vectors);
                eigens[model] = eigen;
            }
            Self::Explicit(Explicit { eigens }) => eigens[model] = eigen,
            Self::Factored(factored) => factored.set(model, eigen, dim),
            // Its sums are not known from what they were projected to.
            Self::Lazy(_) => return false,
        }
        true
    }
}

/// What each model had at its old place, or what a new one begins with.
pub fn pick<T: Clone>(of_models: &mut Vec<T>, places: &[Option<usize>], new: impl Fn() -> T) {
    let old = |place: usize| of_models.get(place).cloned();
    *of_models = places.iter().map(|place| place.and_then(old).unwrap_or_else(&new)).collect();
}

impl Eigen {
    /// q'Wq
    pub fn score(&self, query: &[f64]) -> f64 {
        let squares = self.vectors.chunks_exact(query.len()).map(|v| dot(v, query).powi(2));
        self.lambda.iter().zip(squares).map(|(lambda, square)| lambda * square).sum()
    }

    /// W multiplied out, d x d.
    pub fn dense(&self, dim: usize) -> Vec<f64> {
        compose(dim, &self.lambda, &self.vectors)
    }

    fn record(&self) -> EigenRecord {
        let Self { gamma, lambda, vectors } = self.clone();
        EigenRecord { mirror_eigenvalues: gamma, eigenvalues: lambda, eigenvectors: vectors }
    }

    fn from_record(record: EigenRecord, dim: usize) -> Option<Self> {
        let EigenRecord { mirror_eigenvalues: gamma, eigenvalues: lambda, eigenvectors: vectors } = record;
        let eigen = Self { gamma, lambda, vectors };
        let is_sound =
            is_paired(&eigen.gamma, &eigen.lambda) && eigen.vectors.len() == eigen.gamma.len() * dim && eigen.is_unit();
        is_sound.then_some(eigen)
    }

    /// Whether its vectors can be unit vectors.
    fn is_unit(&self) -> bool {
        self.vectors.iter().all(|x| x.abs() <= UNIT_MAX)
    }

    /// The same with at most the ball's rank of eigenvalues, those of largest |gamma|.
    fn truncated(self, ball: &Ball, dim: usize) -> Self {
        if self.gamma.len() <= ball.rank {
            return self;
        }
        let mut kept = Vec::new();
        ball.keep(&self.gamma, &mut kept);
        Self {
            gamma: kept.iter().map(|&i| self.gamma[i]).collect(),
            lambda: kept.iter().map(|&i| self.lambda[i]).collect(),
            vectors: kept.iter().flat_map(|&i| &self.vectors[i * dim..(i + 1) * dim]).copied().collect(),
        }
    }

    /// A decomposition W = V diag(lambda) V' of any size, projected on the ball.
    pub fn from_primal(ball: &Ball, lambda: &[f64], vectors: &[f64], dim: usize) -> Self {
        Self::project(ball, lambda.iter().map(|lambda| (lambda / ball.beta).asinh()).collect(), vectors, dim)
    }

    /// Projects the decomposition gamma~ (all of it) of a mirror matrix and keeps what the ball keeps.
    fn project(ball: &Ball, mut gamma: Vec<f64>, vectors: &[f64], dim: usize) -> Self {
        ball.project(&mut gamma);
        let mut kept = Vec::new();
        ball.keep(&gamma, &mut kept);
        Self {
            gamma: kept.iter().map(|&i| gamma[i]).collect(),
            lambda: kept.iter().map(|&i| ball.primal(gamma[i])).collect(),
            vectors: kept.iter().flat_map(|&i| &vectors[i * dim..(i + 1) * dim]).copied().collect(),
        }
    }
}

/// The reference: the mirror matrices themselves, dense.
#[derive(Debug, Clone)]
pub struct Exact {
    mirrors: Vec<Vec<f64>>,
    eigens: Vec<Eigen>,
}

impl Exact {
    /// All zero.
    pub fn new(dim: usize, models: usize) -> Self {
        Self { mirrors: vec![vec![0.0; dim * dim]; models], eigens: vec![Eigen::default(); models] }
    }

    fn step(&mut self, step: &Step, batch: &[Gradient]) {
        let Some(dim) = batch.first().map(|gradient| gradient.query.len()) else { return };
        for (m, (mirror, eigen)) in self.mirrors.iter_mut().zip(&mut self.eigens).enumerate() {
            mirror.iter_mut().for_each(|y| *y *= step.shrink);
            for Gradient { query, coefficients } in batch {
                for (column, &q) in mirror.chunks_exact_mut(dim).zip(*query) {
                    axpy(step.rate * coefficients[m] * q, query, column);
                }
            }
            let (gamma, vectors) = symmetric_eigen(dim, mirror);
            *eigen = Eigen::project(step.ball, gamma, &vectors, dim);
            *mirror = compose(dim, &eigen.gamma, &eigen.vectors);
        }
    }
}

/// Explicit eigenvectors of rank k; the k + b dimensional problem of each step is solved densely.
#[derive(Debug, Clone)]
pub struct Explicit {
    eigens: Vec<Eigen>,
}

impl Explicit {
    /// All zero.
    pub fn new(models: usize) -> Self {
        Self { eigens: vec![Eigen::default(); models] }
    }

    fn step(&mut self, step: &Step, batch: &[Gradient]) {
        for (m, eigen) in self.eigens.iter_mut().enumerate() {
            explicit_step(eigen, step, m, batch);
        }
    }
}

/// Model `m`'s mirror step with a whole batch, on explicit eigenvectors.
pub fn explicit_step(eigen: &mut Eigen, step: &Step, m: usize, batch: &[Gradient]) {
    let Some(dim) = batch.first().map(|gradient| gradient.query.len()) else { return };
    // An orthonormal basis of what the eigenvectors and the batch span, eigenvectors first.
    let mut basis = std::mem::take(&mut eigen.vectors);
    for gradient in batch {
        extend_basis(&mut basis, gradient.query);
    }
    let n = basis.len() / dim;
    let mut small = vec![0.0; n * n];
    for (i, gamma) in eigen.gamma.iter().enumerate() {
        small[i * n + i] = step.shrink * gamma;
    }
    let mut z = Vec::new();
    for Gradient { query, coefficients } in batch {
        columns_dot(&basis, query, &mut z);
        for (column, &z_j) in small.chunks_exact_mut(n).zip(&z) {
            axpy(step.rate * coefficients[m] * z_j, &z, column);
        }
    }
    let (gamma, rotation) = symmetric_eigen(n, &small);
    let Eigen { gamma, lambda, vectors: rotation } = Eigen::project(step.ball, gamma, &rotation, n);
    let r = gamma.len();
    let rotation_rows: Vec<f64> =
        (0..n).flat_map(|i| (0..r).map(move |j| (i, j))).map(|(i, j)| rotation[j * n + i]).collect();
    let mut vectors = vec![0.0; dim * r];
    product(dim, &basis, &rotation_rows, r, false, &mut vectors);
    *eigen = Eigen { gamma, lambda, vectors };
}

/// Adds to an orthonormal basis the direction of `query` outside of it, if there is one.
pub fn extend_basis(basis: &mut Vec<f64>, query: &[f64]) {
    let dim = query.len();
    if basis.len() == dim * dim {
        return;
    }
    let mut direction = query.to_vec();
    let mut coordinates = Vec::new();
    // Twice is enough: the first pass leaves rounding errors in proportion to what it removed.
    for pass in 0..2 {
        columns_dot(basis, &direction, &mut coordinates);
        coordinates.iter_mut().for_each(|x| *x = -*x);
        columns_add(basis, &coordinates, &mut direction);
        let norm = dot(&direction, &direction).sqrt();
        let smallest = if pass == 0 { IN_SPAN } else { 0.5 };
        if norm <= smallest {
            return;
        }
        direction.iter_mut().for_each(|x| *x /= norm);
    }
    basis.extend(direction);
}

/// Whether mirror eigenvalues and eigenvalues are finite numbers, as many of one as of the other.
pub fn is_paired(gamma: &[f64], lambda: &[f64]) -> bool {
    gamma.len() == lambda.len() && gamma.iter().chain(lambda).all(|x| x.is_finite())
}

/// The most that an entry of a unit vector can be, with rounding.
pub const UNIT_MAX: f64 = 1.0 + 1e-6;

/// The most that an entry of a sum of gradients, times the rate, can have become in any stream.
const SUM_MAX: f64 = 1e30;

/// A unit query closer than this to the span of the eigenvectors is in it: what is left is rounding.
pub const IN_SPAN: f64 = 1e-13;

/// Dual averaging: the unprojected sums of c q q', packed lower triangles column by column.
#[derive(Debug, Clone)]
pub struct Lazy {
    sums: Vec<Vec<f64>>,
    rate: f64,
    played: OnceCell<Vec<Eigen>>,
}

impl Lazy {
    /// All zero.
    pub fn new(dim: usize, models: usize) -> Self {
        Self { sums: vec![vec![0.0; dim * (dim + 1) / 2]; models], rate: 1.0, played: OnceCell::new() }
    }

    /// Adds to the sums. They hold bare gradients and the rate waits until they are played, so that a sum made in any
    /// order and in any number of parts is the same sum.
    fn step(&mut self, step: &Step, batch: &[Gradient]) {
        self.played.take();
        self.rate = step.rate;
        for (m, sum) in self.sums.iter_mut().enumerate() {
            if step.shrink != 1.0 {
                sum.iter_mut().for_each(|x| *x *= step.shrink);
            }
            for Gradient { query, coefficients } in batch {
                let mut rest = &mut sum[..];
                for (j, &q) in query.iter().enumerate() {
                    let (column, tail) = rest.split_at_mut(query.len() - j);
                    axpy(coefficients[m] * q, &query[j..], column);
                    rest = tail;
                }
            }
        }
    }

    /// Adds the sums of another; false if it is of another shape.
    pub fn add(&mut self, other: &LazyRecord) -> bool {
        let shape = |sums: &[Vec<f64>]| sums.iter().map(Vec::len).collect::<Vec<usize>>();
        if shape(&self.sums) != shape(&other.sums) {
            return false;
        }
        if other.sums.iter().flatten().all(|x| *x == 0.0) {
            // It has not learned, and does not know the rate.
            return true;
        }
        self.played.take();
        self.rate = other.rate;
        self.sums.iter_mut().zip(&other.sums).for_each(|(sum, other)| axpy(1.0, other, sum));
        true
    }

    fn projected(&self, ball: &Ball, dim: usize) -> &[Eigen] {
        self.played.get_or_init(|| {
            let project = |sum: &Vec<f64>| {
                let mut dense = vec![0.0; dim * dim];
                let mut packed = sum.iter();
                for j in 0..dim {
                    for (entry, x) in dense[j * dim + j..(j + 1) * dim].iter_mut().zip(packed.by_ref()) {
                        *entry = self.rate * x;
                    }
                }
                let (gamma, vectors) = symmetric_eigen(dim, &dense);
                Eigen::project(ball, gamma, &vectors, dim)
            };
            self.sums.iter().map(project).collect()
        })
    }
}

fn eigen_scores(eigens: &[Eigen], query: &[f64], scores: &mut [f64]) {
    for (score, eigen) in scores.iter_mut().zip(eigens) {
        *score = eigen.score(query);
    }
}
