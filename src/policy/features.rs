//! What linear bandits see of a query.
//!
//! ```text
//! linear     phi = (q, 1)                                                                   d + 1
//! quadratic  phi = (y_1^2, sqrt 2 y_1 y_2, ..., y_k^2, 1)       y = V'q       k (k + 1) / 2 + 1
//! ```
//!
//! V (d x k): the leading directions of the first [`WARM_UP`] queries, eigenvectors of their second moment; from then
//! on it stays. Until then only the constant is seen, and the examples are kept: what was learned from them by the
//! constant alone is forgotten when V is known, and they are learned again with all features.

use super::symmetric::{Symmetric, packed_len};
use crate::config::FeatureKind;
use crate::hpg::linalg::{axpy, columns_dot, dot, product, symmetric_eigen};
use crate::hpg::spectra::UNIT_MAX;
use crate::router::ScoreForm;
use crate::wire::records::learner::rivals::{EarlyRecord, FeaturesRecord};

/// Examples from which the leading directions are taken.
pub const WARM_UP: usize = 500;

/// Directions that hold less than this share of the largest one's energy are rounding.
const NOTHING: f64 = 1e-9;

/// How a query becomes features.
#[derive(Debug, Clone, PartialEq)]
pub enum Features {
    /// The query as it is.
    Linear,
    /// The constant, until the directions are known.
    WarmUp(Vec<Early>),
    /// Products of coordinates in these directions, d x k.
    Quadratic(Vec<f64>),
}

/// An example from before the directions were known.
#[derive(Debug, Clone, PartialEq)]
pub struct Early {
    /// The query.
    pub query: Vec<f64>,
    /// The model that was played; none if it is gone.
    pub model: Option<usize>,
    /// What it earned.
    pub reward: f64,
}

impl Features {
    /// Before anything was seen.
    pub fn new(kind: FeatureKind) -> Self {
        match kind {
            FeatureKind::Linear => Self::Linear,
            FeatureKind::Quadratic => Self::WarmUp(Vec::new()),
        }
    }

    /// Number of features, with k directions.
    pub fn size(kind: FeatureKind, dim: usize, k: usize) -> usize {
        match kind {
            FeatureKind::Linear => dim + 1,
            FeatureKind::Quadratic => packed_len(k) + 1,
        }
    }

    /// The features of a query, `size` of them.
    pub fn of(&self, query: &[f64], size: usize) -> Vec<f64> {
        let mut phi = Vec::with_capacity(size);
        match self {
            Self::Linear => phi.extend_from_slice(query),
            Self::WarmUp(_) => phi.resize(size - 1, 0.0),
            Self::Quadratic(directions) => {
                let mut y = Vec::new();
                columns_dot(directions, query, &mut y);
                for (j, y_j) in y.iter().enumerate() {
                    phi.push(y_j * y_j);
                    phi.extend(y[j + 1..].iter().map(|y_i| std::f64::consts::SQRT_2 * y_i * y_j));
                }
            }
        }
        phi.push(1.0);
        phi
    }

    /// weights . phi(q) in the routing form.
    pub fn score_form(&self, weights: &[f64], dim: usize) -> ScoreForm {
        let single = |values: &[f64]| values.iter().map(|&x| x as f32).collect();
        let Some((&bias, weights)) = weights.split_last() else { return ScoreForm::default() };
        let mut form = ScoreForm { bias: bias as f32, ..ScoreForm::default() };
        match self {
            Self::Linear => form.linear = single(weights),
            Self::WarmUp(_) => {}
            Self::Quadratic(directions) => {
                let (lambda, vectors) = quadratic_part(directions, weights, dim);
                (form.eigenvalues, form.eigenvectors) = (single(&lambda), single(&vectors));
            }
        }
        form
    }

    /// The record of its state.
    pub fn record(&self) -> FeaturesRecord {
        match self {
            Self::Linear => FeaturesRecord::Linear,
            Self::WarmUp(early) => FeaturesRecord::WarmUp(early.iter().map(Early::record).collect()),
            Self::Quadratic(directions) => FeaturesRecord::Quadratic(directions.clone()),
        }
    }

    /// Restores a record of this kind and shape; none if it does not fit.
    pub fn from_record(record: FeaturesRecord, kind: FeatureKind, dim: usize, k: usize, models: usize) -> Option<Self> {
        let features = match record {
            FeaturesRecord::Linear => Self::Linear,
            FeaturesRecord::WarmUp(early) => {
                Self::WarmUp(early.into_iter().map(Early::from_record).collect::<Option<_>>()?)
            }
            FeaturesRecord::Quadratic(directions) => Self::Quadratic(directions),
        };
        features.is_sound(kind, dim, k, models).then_some(features)
    }

    fn is_sound(&self, kind: FeatureKind, dim: usize, k: usize, models: usize) -> bool {
        let unit = |values: &[f64]| values.iter().all(|x| x.abs() <= UNIT_MAX);
        match self {
            Self::Linear => kind == FeatureKind::Linear,
            Self::WarmUp(early) => {
                let sound = |one: &Early| {
                    one.query.len() == dim
                        && unit(&one.query)
                        && one.model.is_none_or(|model| model < models)
                        && (0.0..=1.0).contains(&one.reward)
                };
                kind == FeatureKind::Quadratic && early.len() < WARM_UP && early.iter().all(sound)
            }
            Self::Quadratic(directions) => {
                kind == FeatureKind::Quadratic && directions.len() == dim * k && unit(directions)
            }
        }
    }
}

impl Early {
    fn record(&self) -> EarlyRecord {
        let Self { query, model, reward } = self.clone();
        EarlyRecord { query, model: model.map(|model| model as u64), reward }
    }

    fn from_record(record: EarlyRecord) -> Option<Self> {
        let EarlyRecord { query, model, reward } = record;
        Some(Self { query, model: model.map(usize::try_from).transpose().ok()?, reward })
    }
}

/// Eigenvalues and -vectors of the quadratic form that weights of products are.
fn quadratic_part(directions: &[f64], weights: &[f64], dim: usize) -> (Vec<f64>, Vec<f64>) {
    let k = directions.len() / dim;
    let mut entries = weights.to_vec();
    let mut at = 0;
    for j in 0..k {
        // An entry off the diagonal stands for two.
        entries[at + 1..at + k - j].iter_mut().for_each(|weight| *weight /= std::f64::consts::SQRT_2);
        at += k - j;
    }
    let (lambda, rotation) = Symmetric::from_packed(k, entries).eigen();
    let rotation_rows: Vec<f64> =
        (0..k).flat_map(|i| (0..k).map(move |j| (i, j))).map(|(i, j)| rotation[j * k + i]).collect();
    let mut vectors = vec![0.0; directions.len()];
    product(dim, directions, &rotation_rows, k, false, &mut vectors);
    (lambda, vectors)
}

/// The k leading eigenvectors (d x k) of the second moment of queries, by way of the products of queries with each
/// other, of which there are fewer than d x d where d is large. Those that the queries do not reach are zero.
pub fn leading_directions(early: &[Early], dim: usize, k: usize) -> Vec<f64> {
    let n = early.len();
    let gram: Vec<f64> = early.iter().flat_map(|a| early.iter().map(|b| dot(&a.query, &b.query))).collect();
    let (values, vectors) = symmetric_eigen(n, &gram);
    let mut directions = vec![0.0; dim * k];
    let leading = values.iter().zip(vectors.chunks_exact(n)).rev();
    let least = NOTHING * values.last().copied().unwrap_or(0.0);
    for (direction, (&value, shares)) in directions.chunks_exact_mut(dim).zip(leading) {
        if value > least {
            early.iter().zip(shares).for_each(|(one, share)| axpy(share / value.sqrt(), &one.query, direction));
        }
    }
    directions
}

#[cfg(test)]
mod tests {
    use super::*;

    fn early(dim: usize, n: usize) -> Vec<Early> {
        let query = |i: usize| {
            let q: Vec<f64> = (0..dim).map(|j| (((i * 7 + j * 5) % 13) as f64 - 6.0) / (j + 1) as f64).collect();
            let norm = dot(&q, &q).sqrt();
            q.iter().map(|x| x / norm).collect::<Vec<f64>>()
        };
        (0..n).map(|i| Early { query: query(i), model: Some(0), reward: 0.5 }).collect()
    }

    #[test]
    fn directions_are_leading_eigenvectors() {
        let (dim, k) = (9, 3);
        let early = early(dim, 40);
        let mut moment = Symmetric::identity(dim, 0.0);
        early.iter().for_each(|one| moment.add(1.0, &one.query));
        let (values, _) = moment.eigen();
        let directions = leading_directions(&early, dim, k);
        for (i, direction) in directions.chunks_exact(dim).enumerate() {
            assert!((dot(direction, direction) - 1.0).abs() < 1e-9);
            let image = moment.times(direction);
            let value = values[dim - 1 - i];
            assert!(image.iter().zip(direction).all(|(a, b)| (a - value * b).abs() < 1e-9), "{i}");
        }
        // One query, repeated, has one direction.
        let same = vec![early[0].clone(); 10];
        assert!(leading_directions(&same, dim, k)[dim..].iter().all(|x| *x == 0.0));
    }

    #[test]
    fn the_routing_form_is_the_product_of_weights_and_features() {
        let (dim, k) = (9, 3);
        let early = early(dim, 20);
        let quadratic = Features::Quadratic(leading_directions(&early, dim, k));
        for (features, kind) in [
            (Features::Linear, FeatureKind::Linear),
            (Features::WarmUp(Vec::new()), FeatureKind::Quadratic),
            (quadratic, FeatureKind::Quadratic),
        ] {
            let size = Features::size(kind, dim, k);
            let weights: Vec<f64> = (0..size).map(|i| (i % 5) as f64 - 1.7).collect();
            let form = features.score_form(&weights, dim);
            for one in &early {
                let phi = features.of(&one.query, size);
                assert_eq!(phi.len(), size);
                assert!((form.score(&one.query) - dot(&weights, &phi)).abs() < 1e-5);
            }
        }
    }
}
