//! Eigenvectors in factored form: the fast path.
//!
//! ```text
//! V_m = [U_m | S] C_m            V (d x r) orthonormal, U (d x n) orthonormal, S (d x s) recent queries, C small
//! ```
//!
//! A rank-one step changes V by a rotation of its columns and one new direction. Multiplying that out costs
//! O(d k^2) a model; here it costs O(d k + k^3): the rotation goes into C, and the new direction is the query itself,
//! put once into S, which all models share, since all see the same queries. When S is full every V is multiplied
//! out into its U, one blocked product for many steps.
//!
//! U changes only then, so that products with it can be made of many queries at once, where it is known which come next:
//! U is read once for some of them, instead of once for each.
//!
//! A query that is nearly in the span of V would put nearly dependent columns under C and ruin it. Its direction is
//! made explicitly instead, orthogonalised twice in d dimensions, and becomes a further column of the model's own U.

use std::ops::Range;

use super::aligned::Aligned;
use super::kernel::{self, Strided};
use super::linalg::{Spare, axpy, columns_add, columns_dot, columns_dot_more, dot, polish, product};
use super::projection::Ball;
use super::roots::Layout;
use super::secular::{self, Secular};
use super::spectra::{Eigen, Gradient, IN_SPAN, Step, UNIT_MAX, explicit_step, is_paired, pick};
use crate::wire::records::learner::hpg::{FactorRecord, FactoredRecord};

/// How many recent queries are kept before the factors are multiplied out.
const RECENT_MAX: usize = 24;

/// Of how many queries products with U are made at once.
const TOGETHER: usize = 4;

/// How many queries it is of use to expect.
pub const FORESIGHT: usize = 2 * TOGETHER;

/// How many directions of its own a model adds to U before it is multiplied out.
const OWN_MAX: usize = 16;

/// The largest norm, squared, of the new direction's coefficients. Beyond it [U | S] is too nearly dependent, and the
/// direction is made explicitly: at the latest where less than a ten-thousandth of the query, squared, is outside of V.
///
/// That bounds by how much errors grow until V is multiplied out. A step takes all products with its query as they are
/// and trusts only that V is orthonormal, so C'GC = I holds for a matrix G that differs from the Gram matrix of [U | S]
/// by the errors of U at the start and by the roundings of the steps, which are as a change of the query in
/// proportion to the columns of C. An entry of V'V - I is therefore such an error times the norms of two columns of C, however the
/// queries depend on each other: new directions have norms of at most the root of this, and rotations keep their sum of squares.
const COEFFICIENTS_MAX: f64 = 1e4;

/// The most by which errors of orthonormality may have grown since it was restored.
const GROWTH_MAX: f64 = 1e3;

/// How far they may have grown when V has been multiplied out, so that they stay below the most until the next time.
const GROWTH_KEPT: f64 = 30.0;

/// Orthonormality is restored once in so many multiplications, long before rounding errors have added up, and at any
/// before which they have grown.
const POLISH_EVERY: u32 = 32;

/// The most that an entry of C can be: new directions are bounded by [`COEFFICIENTS_MAX`], and growth by [`GROWTH_MAX`].
const ROWS_MAX: f64 = 1e9;

/// The parameters of all models.
#[derive(Debug)]
pub struct Factored {
    /// S, one query after the other.
    recent: Aligned,
    models: Vec<Factor>,
    work: Box<Work>,
}

impl Clone for Factored {
    fn clone(&self) -> Self {
        Self { recent: self.recent.clone(), models: self.models.clone(), work: Box::default() }
    }
}

#[derive(Debug, Clone, Default)]
struct Factor {
    gamma: Vec<f64>,
    lambda: Vec<f64>,
    /// U, column by column: the eigenvectors at the last multiplication, then the model's own directions.
    base: Aligned,
    /// C's rows for U and for S, row by row.
    base_rows: Vec<f64>,
    recent_rows: Vec<f64>,
    /// How often V was multiplied out, and with it U made anew.
    compactions: u32,
    /// By how much its errors may have grown since its orthonormality was restored.
    growth: f64,
}

/// Memory that a step needs and no state: one for all models.
#[derive(Debug, Default)]
struct Work {
    expected: Expected,
    /// The query that was looked at, if nothing has changed since.
    query: Aligned,
    /// S'q
    recent_products: Vec<f64>,
    /// p = V'q of each model.
    coordinates: Vec<Vec<f64>>,
    outsides: Vec<Option<Outside>>,
    /// The problem that a step is in each model's eigenvectors: all are solved at once.
    problems: Vec<Secular>,
    layout: Layout,
    desk: Desk,
}

/// Memory for what is done model by model.
#[derive(Debug, Default)]
struct Desk {
    /// C p, then the span's part of a direction.
    parts: Parts,
    /// U'x
    base_products: Vec<f64>,
    direction: Vec<f64>,
    correction: Vec<f64>,
    correction_products: Vec<f64>,
    poles: Vec<f64>,
    components: Vec<f64>,
    kept: Vec<usize>,
    rotation: Aligned,
    rows: Vec<f64>,
    spare: Spare,
}

/// Queries that come next, and what is known of them.
#[derive(Debug, Default)]
struct Expected {
    /// One query after the other.
    queries: Aligned,
    /// How many have come.
    come: usize,
    /// Of which of them products are known.
    known: Range<usize>,
    /// U'q of these, of each model, and which U it was: how often it had been made anew.
    base_products: Vec<(Products, u32)>,
    /// S'q
    recent_products: Products,
}

/// A'q of several queries, for the columns that A had.
#[derive(Debug, Default)]
struct Products {
    values: Vec<f64>,
    columns: usize,
}

/// Coefficients of a vector over the columns of U and of S.
#[derive(Debug, Default)]
struct Parts {
    base: Vec<f64>,
    recent: Vec<f64>,
}

/// The query of a step, and S as it is before it.
#[derive(Debug, Clone, Copy)]
struct Seen<'a> {
    query: &'a [f64],
    recent: &'a [f64],
}

/// Where the part of the query outside of V comes from, and how long that part is.
#[derive(Debug, Clone, Copy)]
enum Outside {
    /// There is none, to rounding.
    Nothing,
    /// The query becomes the next column of S.
    Recent { rho: f64 },
    /// Its direction was added to the model's U.
    Own { rho: f64 },
}

impl Factored {
    /// All zero.
    pub fn new(models: usize) -> Self {
        Self { recent: Aligned::default(), models: vec![Factor::default(); models], work: Box::default() }
    }

    /// q'W_m q of all models.
    pub fn scores(&self, query: &[f64], scores: &mut [f64]) {
        let (mut recent_products, mut base_products, mut coordinates) = (Vec::new(), Vec::new(), Vec::new());
        columns_dot(&self.recent, query, &mut recent_products);
        for (score, factor) in scores.iter_mut().zip(&self.models) {
            columns_dot(&factor.base, query, &mut base_products);
            factor.coordinates(&base_products, &recent_products, &mut coordinates);
            *score = factor.score(&coordinates);
        }
    }

    /// The same, of the query that the next step is of: what scores are made of is kept for it.
    pub fn look(&mut self, query: &[f64], scores: &mut [f64]) {
        self.prepare(query);
        for ((score, factor), coordinates) in scores.iter_mut().zip(&self.models).zip(&self.work.coordinates) {
            *score = factor.score(coordinates);
        }
    }

    /// Says which queries the next steps are of, in their order. It changes nothing but the time that they take.
    pub fn expect<'a>(&mut self, queries: impl Iterator<Item = &'a [f64]>) {
        let expected = &mut self.work.expected;
        expected.clear();
        queries.for_each(|query| expected.queries.extend_from_slice(query));
    }

    /// The eigenvalues of one model, and the query's coordinates in its eigenvectors.
    pub fn coordinates(&self, model: usize, query: &[f64], out: &mut Vec<f64>) -> &[f64] {
        if is_same(&self.work.query, query) {
            out.clone_from(&self.work.coordinates[model]);
            return &self.models[model].lambda;
        }
        let (mut recent_products, mut base_products) = (Vec::new(), Vec::new());
        columns_dot(&self.recent, query, &mut recent_products);
        let factor = &self.models[model];
        columns_dot(&factor.base, query, &mut base_products);
        factor.coordinates(&base_products, &recent_products, out);
        &factor.lambda
    }

    /// One mirror step. A single example takes the fast path; a batch is one dense problem on multiplied-out vectors.
    pub fn step(&mut self, step: &Step, batch: &[Gradient]) {
        match batch {
            [] => {}
            [gradient] => self.step_one(step, gradient),
            _ => self.step_batch(step, batch),
        }
        self.work.query.clear();
    }

    /// Each model's eigendecomposition, multiplied out.
    pub fn eigens(&self, dim: usize) -> Vec<Eigen> {
        let eigen = |factor: &Factor| {
            let mut vectors = vec![0.0; dim * factor.gamma.len()];
            factor.vectors(&self.recent, dim, &mut vectors);
            Eigen { gamma: factor.gamma.clone(), lambda: factor.lambda.clone(), vectors }
        };
        self.models.iter().map(eigen).collect()
    }

    /// Sets the parameters of one model.
    pub fn set(&mut self, model: usize, eigen: Eigen, dim: usize) {
        self.forget();
        let Eigen { gamma, lambda, vectors } = eigen;
        let factor = &mut self.models[model];
        *factor = Factor { gamma, lambda, base: Aligned::from(&vectors[..]), growth: GROWTH_MAX, ..Factor::default() };
        factor.settle(dim, self.recent.len() / dim, &mut self.work.desk.spare);
    }

    /// Moves to another set of models, of which `places` says where each was; a new one starts at zero.
    pub fn remap(&mut self, places: &[Option<usize>]) {
        self.forget();
        pick(&mut self.models, places, Factor::default);
    }

    /// Projects parameters that were made in another ball.
    pub fn move_to(&mut self, ball: &Ball) {
        self.models.iter_mut().for_each(|factor| ball.pull_in(&mut factor.gamma, &mut factor.lambda));
    }

    /// The record of the parameters.
    pub fn record(&self) -> FactoredRecord {
        let models = self.models.iter().map(Factor::record).collect();
        FactoredRecord { recent_queries: self.recent.to_vec(), models }
    }

    /// The parameters of a record, if all lists have the right lengths and all numbers are possible ones in some ball.
    pub fn from_record(record: FactoredRecord, dim: usize, models: usize) -> Option<Self> {
        let FactoredRecord { recent_queries, models: records } = record;
        let recent = recent_queries.len() / dim;
        let is_sound = recent_queries.len() == recent * dim
            && recent <= RECENT_MAX
            && recent_queries.iter().all(|x| x.abs() <= UNIT_MAX)
            && records.len() == models;
        let factor = |record: FactorRecord| Factor::from_record(record, dim, recent);
        let models = records.into_iter().map(factor).collect::<Option<Vec<Factor>>>()?;
        is_sound.then(|| Self { recent: Aligned::from(&recent_queries[..]), models, work: Box::default() })
    }

    /// Whether no model has more eigenvalues, or a larger basis, than a rank allows.
    pub fn fits_rank(&self, rank: usize, dim: usize) -> bool {
        let fits = |factor: &Factor| factor.gamma.len() <= rank && factor.base.len() <= (rank + OWN_MAX) * dim;
        self.models.iter().all(fits)
    }

    /// Whether the parameters are inside of a ball.
    pub fn is_inside(&self, ball: &Ball) -> bool {
        self.models.iter().all(|factor| ball.holds(&factor.gamma, &factor.lambda))
    }

    /// Forgets what it knows of queries that were looked at or are expected.
    fn forget(&mut self) {
        self.work.query.clear();
        self.work.expected.clear();
    }

    /// The query's coordinates in all models, unless they are known.
    fn prepare(&mut self, query: &[f64]) {
        if is_same(&self.work.query, query) {
            return;
        }
        if self.recent.len() == RECENT_MAX * query.len() {
            self.compact(query.len());
        }
        let Work { query: looked_at, expected, recent_products, coordinates, desk, .. } = &mut *self.work;
        looked_at.clear();
        looked_at.extend_from_slice(query);
        let place = expected.meet(looked_at, &self.recent, &self.models);
        let known = place.map(|place| expected.recent_products.of(place)).unwrap_or_default();
        columns_dot_more(&self.recent, looked_at, known, recent_products);
        coordinates.resize_with(self.models.len(), Vec::new);
        for (m, (factor, coordinates)) in self.models.iter().zip(coordinates).enumerate() {
            let known = place.and_then(|place| expected.base_products_of(m, place, factor)).unwrap_or_default();
            columns_dot_more(&factor.base, looked_at, known, &mut desk.base_products);
            factor.coordinates(&desk.base_products, recent_products, coordinates);
        }
    }

    fn step_one(&mut self, step: &Step, gradient: &Gradient) {
        let query = gradient.query;
        self.prepare(query);
        let seen = Seen { query, recent: &self.recent };
        let Work { coordinates, outsides, problems, layout, desk, .. } = &mut *self.work;
        outsides.resize(self.models.len(), None);
        problems.resize_with(self.models.len(), Secular::default);
        for (m, (factor, &c)) in self.models.iter_mut().zip(gradient.coefficients).enumerate() {
            let (coordinates, problem) = (&mut coordinates[m], &mut problems[m]);
            outsides[m] = factor.pose(step, step.rate * c, seen, coordinates, problem, desk);
        }
        secular::solve(problems, layout);
        let recent = self.recent.len() / query.len();
        for (m, factor) in self.models.iter_mut().enumerate() {
            if let Some(outside) = outsides[m] {
                factor.turn(step.ball, outside, recent, &coordinates[m], &mut problems[m], desk);
            }
        }
        let keep_query = outsides.iter().any(|outside| matches!(outside, Some(Outside::Recent { .. })));
        if keep_query {
            self.recent.extend_from_slice(query);
            let rows = self.recent.len() / query.len();
            for factor in &mut self.models {
                // A model that does not use the query has a row of zeros for it.
                factor.recent_rows.resize(rows * factor.gamma.len(), 0.0);
            }
        }
    }

    fn step_batch(&mut self, step: &Step, batch: &[Gradient]) {
        let dim = batch[0].query.len();
        for (m, factor) in self.models.iter_mut().enumerate() {
            let mut eigen = Eigen { vectors: vec![0.0; dim * factor.gamma.len()], ..Eigen::default() };
            factor.vectors(&self.recent, dim, &mut eigen.vectors);
            eigen.gamma = std::mem::take(&mut factor.gamma);
            eigen.lambda = std::mem::take(&mut factor.lambda);
            explicit_step(&mut eigen, step, m, batch);
            let Factor { compactions, growth, .. } = *factor;
            let Eigen { gamma, lambda, vectors } = eigen;
            *factor =
                Factor { gamma, lambda, base: Aligned::from(&vectors[..]), compactions, growth, ..Factor::default() };
            factor.settle(dim, 0, &mut self.work.desk.spare);
        }
        self.empty_recent();
    }

    /// S has been multiplied out, and with it products are of the past.
    fn empty_recent(&mut self) {
        self.recent.clear();
        self.work.expected.known = 0..0;
    }

    fn compact(&mut self, dim: usize) {
        for factor in &mut self.models {
            factor.compact(&self.recent, dim, &mut self.work.desk.spare);
            factor.recent_rows.clear();
        }
        self.empty_recent();
    }
}

impl Expected {
    fn clear(&mut self) {
        self.queries.clear();
        self.come = 0;
        self.known = 0..0;
    }

    /// The place of a query among those that products are known of, if it is the next one; if they are not, they are made
    /// for it and for some after it. Another query than the next one says that nothing is as was expected.
    fn meet(&mut self, query: &[f64], recent: &[f64], models: &[Factor]) -> Option<usize> {
        let (dim, next) = (query.len(), self.come);
        let expected = self.queries.get(next * dim..(next + 1) * dim);
        if !expected.is_some_and(|expected| is_same(expected, query)) {
            self.clear();
            return None;
        }
        self.come += 1;
        if !self.known.contains(&next) {
            // Of no more than are sure to come before S is full and U changes.
            let count = TOGETHER.min(RECENT_MAX - recent.len() / dim).min(self.queries.len() / dim - next);
            self.known = next..next + count;
            let queries = &self.queries[next * dim..(next + count) * dim];
            self.recent_products.make(recent, queries, dim);
            self.base_products.resize_with(models.len(), Default::default);
            for ((products, compactions), factor) in self.base_products.iter_mut().zip(models) {
                products.make(&factor.base, queries, dim);
                *compactions = factor.compactions;
            }
        }
        Some(next - self.known.start)
    }

    /// Those of a query with a model's U, if it is still the same.
    fn base_products_of(&self, model: usize, place: usize, factor: &Factor) -> Option<&[f64]> {
        let (products, compactions) = &self.base_products[model];
        (*compactions == factor.compactions).then(|| products.of(place))
    }
}

impl Products {
    fn make(&mut self, a: &[f64], queries: &[f64], dim: usize) {
        self.columns = a.len() / dim;
        // Not cleared before: all of it is overwritten.
        self.values.resize(self.columns * (queries.len() / dim), 0.0);
        kernel::products(dim, a, queries, &mut self.values);
    }

    /// Those of one query.
    fn of(&self, place: usize) -> &[f64] {
        &self.values[place * self.columns..(place + 1) * self.columns]
    }
}

/// Whether two queries are the same, bit by bit.
fn is_same(x: &[f64], y: &[f64]) -> bool {
    let differ = |(x, y): (&[f64], &[f64])| x.iter().zip(y).fold(0, |bits, (x, y)| bits | (x.to_bits() ^ y.to_bits()));
    x.len() == y.len() && x.chunks(64).zip(y.chunks(64)).all(|blocks| differ(blocks) == 0)
}

impl Factor {
    fn record(&self) -> FactorRecord {
        FactorRecord {
            mirror_eigenvalues: self.gamma.clone(),
            eigenvalues: self.lambda.clone(),
            basis: self.base.to_vec(),
            basis_coefficients: self.base_rows.clone(),
            recent_coefficients: self.recent_rows.clone(),
            compactions: self.compactions,
            error_growth: self.growth,
        }
    }

    fn from_record(record: FactorRecord, dim: usize, recent: usize) -> Option<Self> {
        let is_small = |values: &[f64]| values.iter().all(|x| x.abs() <= ROWS_MAX);
        let (rank, base) = (record.mirror_eigenvalues.len(), record.basis.len() / dim);
        let is_sound = is_paired(&record.mirror_eigenvalues, &record.eigenvalues)
            && rank <= dim
            && record.basis.len() == base * dim
            && base <= dim + OWN_MAX
            && record.basis_coefficients.len() == base * rank
            && record.recent_coefficients.len() == recent * rank
            && record.basis.iter().all(|x| x.abs() <= UNIT_MAX)
            && is_small(&record.basis_coefficients)
            && is_small(&record.recent_coefficients)
            && (0.0..=GROWTH_MAX).contains(&record.error_growth);
        is_sound.then(|| Self {
            gamma: record.mirror_eigenvalues,
            lambda: record.eigenvalues,
            base: Aligned::from(&record.basis[..]),
            base_rows: record.basis_coefficients,
            recent_rows: record.recent_coefficients,
            compactions: record.compactions,
            growth: record.error_growth,
        })
    }

    fn score(&self, coordinates: &[f64]) -> f64 {
        self.lambda.iter().zip(coordinates).map(|(lambda, p)| lambda * p * p).sum()
    }

    /// out = V'x, given U'x and S'x
    fn coordinates(&self, base_products: &[f64], recent_products: &[f64], out: &mut Vec<f64>) {
        out.clear();
        out.resize(self.gamma.len(), 0.0);
        if !out.is_empty() {
            columns_add(&self.base_rows, base_products, out);
            columns_add(&self.recent_rows, recent_products, out);
        }
    }

    /// C p: the coefficients of V p over U and S
    fn parts(&self, coordinates: &[f64], parts: &mut Parts) {
        columns_dot(&self.base_rows, coordinates, &mut parts.base);
        columns_dot(&self.recent_rows, coordinates, &mut parts.recent);
    }

    /// Poses the problem of a step, if there is one.
    fn pose(
        &mut self,
        step: &Step,
        a: f64,
        seen: Seen,
        coordinates: &mut [f64],
        problem: &mut Secular,
        desk: &mut Desk,
    ) -> Option<Outside> {
        desk.components.clear();
        desk.poles.clear();
        if a == 0.0 && step.shrink == 1.0 {
            problem.pose(&desk.poles, &desk.components, a);
            return None;
        }
        if self.gamma.is_empty() && !self.base.is_empty() {
            self.base.clear();
            self.compactions = self.compactions.wrapping_add(1);
        }
        let outside = self.outside(step.ball, seen, coordinates, desk);
        desk.components.extend_from_slice(coordinates);
        desk.poles.extend(self.gamma.iter().map(|gamma| step.shrink * gamma));
        if let Outside::Recent { rho } | Outside::Own { rho } = outside {
            desk.components.push(rho);
            desk.poles.push(0.0);
        }
        problem.pose(&desk.poles, &desk.components, a);
        Some(outside)
    }

    /// Takes the step that the problem's solution is.
    fn turn(
        &mut self,
        ball: &Ball,
        outside: Outside,
        recent: usize,
        coordinates: &[f64],
        problem: &mut Secular,
        desk: &mut Desk,
    ) {
        ball.project(&mut problem.values);
        ball.keep(&problem.values, &mut desk.kept);
        self.rotate(outside, recent, coordinates, problem, desk);
        self.gamma.clear();
        self.gamma.extend(desk.kept.iter().map(|&j| problem.values[j]));
        ball.primals(&self.gamma, &mut self.lambda);
    }

    fn outside(&mut self, ball: &Ball, seen: Seen, coordinates: &mut [f64], desk: &mut Desk) -> Outside {
        if self.gamma.len() == seen.query.len() {
            return Outside::Nothing;
        }
        self.parts(coordinates, &mut desk.parts);
        let residual = 1.0 - dot(coordinates, coordinates);
        let size = 1.0 + dot(&desk.parts.base, &desk.parts.base) + dot(&desk.parts.recent, &desk.parts.recent);
        if size <= COEFFICIENTS_MAX * residual {
            return Outside::Recent { rho: residual.sqrt() };
        }
        self.own_direction(ball, seen, coordinates, desk)
    }

    /// Makes the query's direction outside of V, adds it to U, and corrects the coordinates by what the second
    /// orthogonalisation found.
    fn own_direction(&mut self, ball: &Ball, seen: Seen, coordinates: &mut [f64], desk: &mut Desk) -> Outside {
        let Seen { query, recent } = seen;
        let dim = query.len();
        if self.base.len() >= (ball.rank + OWN_MAX) * dim {
            self.compact(recent, dim, &mut desk.spare);
            self.parts(coordinates, &mut desk.parts);
        }
        desk.direction.clear();
        desk.direction.extend_from_slice(query);
        let rho = self.remove_span(recent, &mut desk.parts, &mut desk.direction);
        if rho <= IN_SPAN {
            return Outside::Nothing;
        }
        desk.direction.iter_mut().for_each(|x| *x /= rho);
        columns_dot(recent, &desk.direction, &mut desk.correction_products);
        columns_dot(&self.base, &desk.direction, &mut desk.base_products);
        self.coordinates(&desk.base_products, &desk.correction_products, &mut desk.correction);
        self.parts(&desk.correction, &mut desk.parts);
        let norm = self.remove_span(recent, &mut desk.parts, &mut desk.direction);
        if norm <= 0.5 {
            return Outside::Nothing;
        }
        axpy(rho, &desk.correction, coordinates);
        desk.direction.iter_mut().for_each(|x| *x /= norm);
        self.base.extend_from_slice(&desk.direction);
        Outside::Own { rho }
    }

    /// direction -= [U | S] parts; returns what is left of its length
    fn remove_span(&self, recent: &[f64], parts: &mut Parts, direction: &mut [f64]) -> f64 {
        parts.base.iter_mut().chain(&mut parts.recent).for_each(|x| *x = -*x);
        columns_add(&self.base, &parts.base, direction);
        columns_add(recent, &parts.recent, direction);
        dot(direction, direction).sqrt()
    }

    /// C <- C R for the kept columns of R, with the new direction's row.
    fn rotate(&mut self, outside: Outside, recent: usize, coordinates: &[f64], problem: &mut Secular, desk: &mut Desk) {
        let (rank, kept) = (self.gamma.len(), desk.kept.len());
        let stride = problem.columns(&desk.kept, &mut desk.rotation);
        let (rotation, new_row) = desk.rotation.split_at_mut(rank * stride);
        if let Outside::Recent { rho } = outside {
            // The new direction is (q - V p) / rho: its part in V folds into the rotation.
            new_row.iter_mut().for_each(|x| *x /= -rho);
            let p = Strided { values: coordinates, row: rank, column: 1 };
            kernel::multiply(stride, (new_row, stride), 1, p, true, rotation);
            new_row.iter_mut().for_each(|x| *x = -*x);
        }
        for rows in [&mut self.base_rows, &mut self.recent_rows] {
            // Not cleared before: all of it is overwritten.
            desk.rows.resize(rows.len() / rank.max(1) * kept, 0.0);
            let values = Strided { values: rows, row: 1, column: rank };
            kernel::multiply(kept, (rotation, stride), rank, values, false, &mut desk.rows);
            std::mem::swap(rows, &mut desk.rows);
        }
        // From rank 0 there was nothing to rotate, but S may hold what other models use.
        self.recent_rows.resize(recent * kept, 0.0);
        match outside {
            Outside::Nothing => {}
            Outside::Recent { .. } => self.recent_rows.extend_from_slice(&new_row[..kept]),
            Outside::Own { .. } => self.base_rows.extend_from_slice(&new_row[..kept]),
        }
    }

    /// V multiplied out.
    fn vectors(&self, recent: &[f64], dim: usize, vectors: &mut [f64]) {
        let rank = self.gamma.len();
        product(dim, &self.base, &self.base_rows, rank, false, vectors);
        product(dim, recent, &self.recent_rows, rank, true, vectors);
    }

    /// U <- V; the rows for S stay, as zeros, since other models may still use it.
    fn compact(&mut self, recent: &[f64], dim: usize, spare: &mut Spare) {
        self.growth = (self.growth.max(1.0) * self.amplification(&mut spare.squares)).min(GROWTH_MAX);
        spare.vectors.set_len(dim * self.gamma.len());
        self.vectors(recent, dim, &mut spare.vectors);
        std::mem::swap(&mut self.base, &mut spare.vectors);
        self.settle(dim, recent.len() / dim, spare);
    }

    /// The largest norm of a column of C, squared: by how much errors of U'U are larger in V'V.
    fn amplification(&self, squares: &mut Vec<f64>) -> f64 {
        let rank = self.gamma.len();
        squares.clear();
        squares.resize(rank, 0.0);
        for row in self.base_rows.chunks_exact(rank.max(1)).chain(self.recent_rows.chunks_exact(rank.max(1))) {
            squares.iter_mut().zip(row).for_each(|(sum, x)| *sum += x * x);
        }
        squares.iter().fold(1.0_f64, |m, x| m.max(*x))
    }

    /// Makes C the identity, after U became V.
    fn settle(&mut self, dim: usize, recent: usize, spare: &mut Spare) {
        let rank = self.gamma.len();
        self.compactions = self.compactions.wrapping_add(1);
        if rank > 0 && (self.compactions.is_multiple_of(POLISH_EVERY) || self.growth > GROWTH_KEPT) {
            self.growth = 1.0;
            polish(dim, &mut self.base, spare);
        }
        self.base_rows.clear();
        self.base_rows.resize(rank * rank, 0.0);
        for i in 0..rank {
            self.base_rows[i * rank + i] = 1.0;
        }
        self.recent_rows.clear();
        self.recent_rows.resize(recent * rank, 0.0);
    }
}
