//! Parameters laid out for routing: all vectors of all models as the columns of one matrix, so that scoring a query is one
//! matrix-vector product in single precision.

use std::ops::RangeInclusive;

use faer::linalg::matmul::matmul;
use faer::{Accum, ColMut, ColRef, Mat, Par};

use super::{Distribution, Params, Policy, ScoreForm, add};
use crate::eligible::Eligible;
use crate::event::{BadQuery, ModelName, Name, Query};
use crate::query_key::QueryKeys;

/// Parameters, ready to route.
#[derive(Debug, Clone)]
pub struct Compiled {
    params: Params,
    /// Eigenvectors, model by model, then linear parts: each a column, which the library aligns.
    columns: Mat<f32>,
    /// Eigenvalues, in the order of the columns.
    eigenvalues: Vec<f32>,
    /// Number of eigenvalues of each model.
    ranks: Vec<usize>,
    /// Models that have a linear part, in the order of its columns.
    linear: Vec<usize>,
    /// Computes the keys that the head table is searched by; none without a table.
    keys: Option<QueryKeys>,
}

impl Compiled {
    /// Lays out parameters.
    pub fn new(mut params: Params) -> Self {
        let forms = std::mem::take(&mut params.policy.scores);
        let dim = params.dim;
        let mut vectors: Vec<&[f32]> = forms.iter().flat_map(|form| form.eigenvectors.chunks_exact(dim)).collect();
        let eigenvalues: Vec<f32> = forms.iter().flat_map(|form| &form.eigenvalues).copied().collect();
        let ranks = forms.iter().map(|form| form.eigenvalues.len()).collect();
        let linear: Vec<usize> = (0..forms.len()).filter(|&m| !forms[m].linear.is_empty()).collect();
        vectors.extend(linear.iter().map(|&m| &forms[m].linear[..]));
        let columns = Mat::from_fn(dim, vectors.len(), |i, j| vectors[j][i]);
        // Only what the matrix does not hold stays with the parameters.
        let biases = forms.iter().map(|form| ScoreForm { bias: form.bias, ..ScoreForm::default() });
        params.policy.scores = biases.collect();
        let keys = (!params.policy.head.is_empty()).then(|| QueryKeys::new(dim));
        Self { params, columns, eigenvalues, ranks, linear, keys }
    }

    /// Untrained parameters: uniform, or one model always.
    pub fn unlearned(space: Name, models: Vec<ModelName>, dim: usize, always: Option<usize>) -> Self {
        let policy = Policy::unlearned(models.len(), always);
        let algorithm = "none".to_owned();
        Self::new(Params { space, epoch: 0, version: 0, revision: 0, models, dim, created_ms: 0, algorithm, policy })
    }

    /// Epoch, version and revision, which order the parameters of a space.
    pub fn stamp(&self) -> (u64, u64, u64) {
        (self.params.epoch, self.params.version, self.params.revision)
    }

    /// The space.
    pub fn space(&self) -> &Name {
        &self.params.space
    }

    /// The models, in the order of every per-model vector.
    pub fn models(&self) -> &[ModelName] {
        &self.params.models
    }

    /// Dimension of queries.
    pub fn dim(&self) -> usize {
        self.params.dim
    }

    /// The parameters but for their vectors.
    pub fn params(&self) -> &Params {
        &self.params
    }

    /// The eigenvalues of each model.
    pub fn spectra(&self) -> impl Iterator<Item = &[f32]> {
        let mut from = 0;
        self.ranks.iter().map(move |rank| {
            from += rank;
            &self.eigenvalues[from - rank..from]
        })
    }

    /// The distribution over models for a query, which need not be normalised.
    pub fn distribution(&self, query: &[f32]) -> Result<Distribution, BadQuery> {
        self.distribution_among(query, &Eligible::ALL)
    }

    /// The distribution over the eligible models for a query, which need not be normalised.
    pub fn distribution_among(&self, query: &[f32], eligible: &Eligible) -> Result<Distribution, BadQuery> {
        let scores = self.scores(query)?;
        Ok(self.params.policy.distribution_of(scores, eligible))
    }

    /// The score of each model for a query, which need not be normalised.
    pub fn scores(&self, query: &[f32]) -> Result<Vec<f64>, BadQuery> {
        let square = self.square(query)?;
        let (products, scale) = self.products(query, square);
        let (quadratic, linear) = products.split_at(self.eigenvalues.len());
        let mut parts = self.eigenvalues.iter().zip(quadratic).map(|(&l, &p)| part(l, p, scale));
        let biases = self.params.policy.scores.iter().map(|form| f64::from(form.bias));
        let mut scores: Vec<f64> =
            biases.zip(&self.ranks).map(|(bias, &rank)| bias + parts.by_ref().take(rank).sum::<f64>()).collect();
        for (&model, &part) in self.linear.iter().zip(linear) {
            scores[model] += f64::from(part) * scale;
        }
        add(&mut scores, self.corrections(query, square));
        self.params.policy.outcomes.charge(&mut scores);
        Ok(scores)
    }

    /// Products of the columns with a query, and what brings the query to length 1: it is cheaper to scale the few products.
    fn products(&self, query: &[f32], square: f64) -> (Vec<f32>, f64) {
        let mut products = vec![0.0; self.eigenvalues.len() + self.linear.len()];
        if PLAIN_SQUARES.contains(&square) {
            product(&self.columns, query, &mut products);
            return (products, square.sqrt().recip());
        }
        // Too long or too short for products in single precision.
        let unit: Vec<f32> = query.iter().map(|&x| (f64::from(x) / square.sqrt()) as f32).collect();
        product(&self.columns, &unit, &mut products);
        (products, 1.0)
    }

    /// The correction of each model's score, for a query in the head table.
    pub fn head(&self, query: &[f32]) -> Result<Option<&[f32]>, BadQuery> {
        let square = self.square(query)?;
        Ok(self.corrections(query, square))
    }

    fn corrections(&self, query: &[f32], square: f64) -> Option<&[f32]> {
        let keys = self.keys.as_ref()?;
        self.params.policy.head.get(keys.key_of_f32(query, square))
    }

    /// The eigenvalues of a model with their eigenvectors' products with a query, squared: what the quadratic part of its score is made of.
    pub fn parts(&self, model: usize, query: &[f32]) -> Result<Vec<f64>, BadQuery> {
        let (products, scale) = self.products(query, self.square(query)?);
        let start: usize = self.ranks[..model].iter().sum();
        let range = start..start + self.ranks[model];
        let terms = self.eigenvalues[range.clone()].iter().zip(&products[range]);
        Ok(terms.map(|(&l, &p)| part(l, p, scale)).collect())
    }

    /// The squared length of a query that is a good one.
    fn square(&self, query: &[f32]) -> Result<f64, BadQuery> {
        if query.len() != self.params.dim {
            return Err(BadQuery::Dimension { found: query.len(), expected: self.params.dim });
        }
        let square = square(query);
        if !square.is_finite() || square == 0.0 {
            // Of all components f32 can hold only NaN and infinity get here, and zero: say which.
            return Err(Query::from_f32(query).err().unwrap_or(BadQuery::Zero));
        }
        Ok(square)
    }
}

/// Squared lengths of queries whose products are well within what f32 can hold.
const PLAIN_SQUARES: RangeInclusive<f64> = 1e-12..=1e12;

/// What one eigenvalue adds to a score.
fn part(eigenvalue: f32, product: f32, scale: f64) -> f64 {
    f64::from(eigenvalue) * (f64::from(product) * scale).powi(2)
}

/// The squared length; in double precision no f32 overflows it. Several sums side by side keep the adders busy.
fn square(query: &[f32]) -> f64 {
    let (chunks, rest) = query.as_chunks::<8>();
    let mut sums = [0.0_f64; 8];
    for chunk in chunks {
        for lane in 0..8 {
            sums[lane] += f64::from(chunk[lane]) * f64::from(chunk[lane]);
        }
    }
    sums.iter().sum::<f64>() + rest.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>()
}

/// out = columns' query, on this thread.
fn product(columns: &Mat<f32>, query: &[f32], out: &mut [f32]) {
    let (query, out) = (ColRef::from_slice(query), ColMut::from_slice_mut(out));
    matmul(out, Accum::Replace, columns.transpose(), query, 1.0, Par::Seq);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::query_key::QueryKey;
    use crate::router::{HeadTable, Sampling};
    use proptest::prelude::*;
    use rand::{RngExt, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    fn arbitrary(seed: u64, dim: usize, ranks: &[usize]) -> (Params, Vec<f32>) {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let mut numbers = |n: usize| (0..n).map(|_| random.random_range(-1.0..1.0_f32)).collect::<Vec<f32>>();
        let form = |(m, &rank): (usize, &usize)| ScoreForm {
            eigenvalues: numbers(rank),
            eigenvectors: numbers(rank * dim),
            linear: if m % 3 == 1 { numbers(dim) } else { Vec::new() },
            bias: numbers(1)[0],
        };
        let mut policy = Policy::unlearned(ranks.len(), None);
        policy.scores = ranks.iter().enumerate().map(form).collect();
        policy.floor = 0.1;
        policy.sampling = if seed.is_multiple_of(2) { Sampling::Softmax } else { Sampling::InverseGap { gap: 10.0 } };
        let models = (0..ranks.len()).map(|m| ModelName::try_from(format!("m{m}")).unwrap()).collect();
        let space = Name::default_space();
        let algorithm = "hpg".to_owned();
        let params = Params { space, epoch: 0, version: 1, revision: 0, models, dim, created_ms: 0, algorithm, policy };
        (params, numbers(dim))
    }

    proptest! {
        #[test]
        fn equals_the_plain_arithmetic(seed: u64, dim in 1..80_usize, ranks in prop::collection::vec(0..7_usize, 2..6)) {
            let (mut params, mut query) = arbitrary(seed, dim, &ranks);
            // Of any length: one that single precision could not square too.
            query.iter_mut().for_each(|x| *x *= [1.0, 1e-30, 1e30][(seed % 3) as usize]);
            let unit = Query::from_f32(&query).unwrap();
            let (key, is_hit) = (QueryKey::of(&unit).0, seed % 5 < 3);
            let keys = vec![if is_hit { key } else { key ^ 1 }];
            let corrections: Vec<f32> = (0..ranks.len()).map(|m| m as f32 - 0.5).collect();
            let uncorrected = params.scores(&unit).unwrap();
            params.policy.head = HeadTable::new(ranks.len(), keys, corrections.clone()).unwrap();
            let plain = params.distribution(&unit).unwrap();
            let plain_scores = params.scores(&unit).unwrap();
            for m in 0..ranks.len() {
                let correction = if is_hit { f64::from(corrections[m]) } else { 0.0 };
                prop_assert_eq!(plain_scores[m], uncorrected[m] + correction);
            }
            let compiled = Compiled::new(params);
            let fast = compiled.distribution(&query).unwrap();
            let scores = compiled.scores(&query).unwrap();
            prop_assert!(scores.iter().zip(&plain_scores).all(|(a, b)| (a - b).abs() < 1e-4), "{scores:?} {plain_scores:?}");
            prop_assert!(fast.propensities.iter().zip(&plain.propensities).all(|(a, b)| (a - b).abs() < 1e-4));
            prop_assert_eq!(compiled.head(&query).unwrap(), is_hit.then_some(&corrections[..]));
            for (m, &score) in scores.iter().enumerate() {
                let correction = if is_hit { f64::from(corrections[m]) } else { 0.0 };
                let form = &compiled.params().policy.scores[m];
                if m % 3 != 1 {
                    let parts: f64 = compiled.parts(m, &query).unwrap().iter().sum();
                    prop_assert!((f64::from(form.bias) + parts + correction - score).abs() < 1e-9);
                }
            }
        }
    }
}
