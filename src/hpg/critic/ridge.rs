//! Hierarchical ridge regression of rewards on features.
//!
//! ```text
//! r - 1/2 = (w_0 + w_m).phi + noise                    w_0: shared by all models;  w_m: model m's own
//! A_m = sum w phi phi'      b_m = sum w (r - 1/2) phi    sums over the examples of model m
//! K_m = (A_m + L)^-1        (L_0 + M L - L (sum K_m) L) w_0 = L sum_m K_m b_m        w_m = K_m (b_m - A_m w_0)
//! ```
//!
//! Queries differ far more in difficulty than models differ on one query. w_0 absorbs the difficulty, so that the w_m see
//! a cleaner signal; only the w_m matter for routing. L and L_0 are diagonal: prior precisions, in units of the noise.
//!
//! A_m and b_m are sums: those of two shards in the same directions can be added.

use faer::linalg::solvers::{DenseSolveCore, Solve};
use faer::{Mat, MatMut, MatRef, Side};

use super::features::Features;
use crate::hpg::linalg::{axpy, dot};
use crate::policy::symmetric::Symmetric;
use crate::wire::records::learner::critic::RidgeModelRecord;

/// Sums and weights of all models.
#[derive(Debug, Clone)]
pub struct Ridge {
    models: Vec<ModelSums>,
    /// w_0
    shared: Vec<f64>,
}

/// One model's sums, and its weights as of the last solution.
#[derive(Debug, Clone)]
struct ModelSums {
    /// A, without the pending examples.
    information: Symmetric,
    /// phi of examples that A lacks, one after the other, and their weights. Several at once read A less often; the bits are
    /// those of one after the other.
    pending: Vec<f64>,
    pending_weights: Vec<f64>,
    /// b
    moments: Vec<f64>,
    /// w_m
    weights: Vec<f64>,
}

/// K_m of each model, as of one solution.
pub struct Uncertainty(Vec<Mat<f64>>);

/// Examples that are added to A at once.
const PENDING: usize = 8;

/// Prior precisions over that of the quadratic part.
const LINEAR: f64 = 20.0;
const INTERCEPT: f64 = 2.0;

/// Prior precisions of the shared part.
const SHARED: f64 = 3.0;
const SHARED_INTERCEPT: f64 = 1e-3;

/// Bound on sums and weights in a record, far beyond what rewards in 0..1 produce.
const SUM_MAX: f64 = 1e15;

impl Ridge {
    /// No examples yet.
    pub fn new(features: usize, models: usize) -> Self {
        Self { models: vec![ModelSums::new(features); models], shared: vec![0.0; features] }
    }

    /// Adds to the sums of a model: `weight` phi phi' and `moment` phi.
    pub fn add(&mut self, model: usize, weight: f64, moment: f64, phi: &[f64]) {
        let sums = &mut self.models[model];
        if weight != 0.0 {
            sums.pending.extend_from_slice(phi);
            sums.pending_weights.push(weight);
            if sums.pending_weights.len() == PENDING {
                sums.flush();
            }
        }
        axpy(moment, phi, &mut sums.moments);
    }

    /// The part of a prediction that all models share.
    pub fn shared(&self, phi: &[f64]) -> f64 {
        dot(&self.shared, phi)
    }

    /// A model's own part of a prediction.
    pub fn own(&self, model: usize, phi: &[f64]) -> f64 {
        dot(&self.models[model].weights, phi)
    }

    /// w_m
    pub fn weights(&self, model: usize) -> &[f64] {
        &self.models[model].weights
    }

    /// Multiplies all sums: forgets.
    pub fn scale(&mut self, keep: f64) {
        for sums in &mut self.models {
            sums.flush();
            sums.information.scale(keep);
            sums.moments.iter_mut().for_each(|x| *x *= keep);
        }
    }

    /// Adds the sums of another in the same directions.
    pub fn merge(&mut self, other: &Self) {
        for (sums, other) in self.models.iter_mut().zip(&other.models) {
            sums.flush();
            sums.information.merge(&other.information());
            axpy(1.0, &other.moments, &mut sums.moments);
        }
    }

    /// Turns to other features by S.
    pub fn turn(&mut self, turn: &Mat<f64>) {
        let apply = |x: &mut Vec<f64>| {
            let turned = turn * MatRef::from_column_major_slice(x, x.len(), 1);
            x.iter_mut().enumerate().for_each(|(i, x)| *x = turned[(i, 0)]);
        };
        apply(&mut self.shared);
        for sums in &mut self.models {
            apply(&mut sums.moments);
            apply(&mut sums.weights);
            sums.flush();
            let turned = turn * dense(&sums.information) * turn.transpose();
            sums.information = Symmetric::from_lower(turned.nrows(), |i, j| turned[(i, j)]);
        }
    }

    /// Solves for all weights; `ridge` is the prior precision of the quadratic part. None if rounding left no solution, and
    /// then the weights stay.
    pub fn solve(&mut self, features: &Features, ridge: f64) -> Option<Uncertainty> {
        let n = features.count();
        let prior = |i: usize| match i {
            0 => INTERCEPT * ridge,
            i if i <= features.linear() => LINEAR * ridge,
            _ => ridge,
        };
        let mut inverses = Vec::with_capacity(self.models.len());
        let (mut sum, mut right) = (Mat::<f64>::zeros(n, n), Mat::<f64>::zeros(n, 1));
        for sums in &mut self.models {
            sums.flush();
            let mut precision = dense(&sums.information);
            (0..n).for_each(|i| precision[(i, i)] += prior(i));
            let inverse = precision.llt(Side::Lower).ok()?.inverse();
            let guess = &inverse * MatRef::from_column_major_slice(&sums.moments, n, 1);
            (0..n).for_each(|i| right[(i, 0)] += prior(i) * guess[(i, 0)]);
            sum += &inverse;
            inverses.push(inverse);
        }
        let models = self.models.len() as f64;
        let own = |i: usize| if i == 0 { SHARED_INTERCEPT } else { SHARED };
        let system = Mat::from_fn(n, n, |i, j| {
            let diagonal = if i == j { own(i) + models * prior(i) } else { 0.0 };
            diagonal - prior(i) * sum[(i, j)] * prior(j)
        });
        let shared = system.llt(Side::Lower).ok()?.solve(right);
        self.shared.iter_mut().enumerate().for_each(|(i, w)| *w = shared[(i, 0)]);
        for (sums, inverse) in self.models.iter_mut().zip(&inverses) {
            let mut left = sums.information.times(&self.shared);
            left.iter_mut().zip(&sums.moments).for_each(|(left, moment)| *left = moment - *left);
            let weights = inverse * MatRef::from_column_major_slice(&left, n, 1);
            sums.weights.iter_mut().enumerate().for_each(|(i, w)| *w = weights[(i, 0)]);
        }
        Some(Uncertainty(inverses))
    }

    /// Moves to another set of models, of which `places` says where each was.
    pub fn remap(&mut self, places: &[Option<usize>]) {
        let fresh = ModelSums::new(self.shared.len());
        crate::hpg::spectra::pick(&mut self.models, places, || fresh.clone());
    }

    /// Records of the models, and w_0.
    pub fn record(&self) -> (Vec<RidgeModelRecord>, Vec<f64>) {
        let record = |sums: &ModelSums| RidgeModelRecord {
            information: sums.information().record(),
            moments: sums.moments.clone(),
            weights: sums.weights.clone(),
        };
        (self.models.iter().map(record).collect(), self.shared.clone())
    }

    /// Restores records; none if they do not fit.
    pub fn from_record(models: Vec<RidgeModelRecord>, shared: Vec<f64>, features: usize) -> Option<Self> {
        let is_bounded = |x: &[f64]| x.len() == features && x.iter().all(|x| x.abs() <= SUM_MAX);
        let sums = |record: RidgeModelRecord| {
            let RidgeModelRecord { information, moments, weights } = record;
            let information = Symmetric::from_record(information, features, SUM_MAX)?;
            let is_sound = is_bounded(&moments) && is_bounded(&weights);
            is_sound.then(|| ModelSums { information, moments, weights, ..ModelSums::new(0) })
        };
        let models = models.into_iter().map(sums).collect::<Option<_>>()?;
        is_bounded(&shared).then_some(Self { models, shared })
    }
}

impl ModelSums {
    fn new(features: usize) -> Self {
        Self {
            information: Symmetric::identity(features, 0.0),
            pending: Vec::new(),
            pending_weights: Vec::new(),
            moments: vec![0.0; features],
            weights: vec![0.0; features],
        }
    }

    /// Adds the pending examples to A.
    fn flush(&mut self) {
        self.information.add_all(&self.pending_weights, &self.pending);
        self.pending.clear();
        self.pending_weights.clear();
    }

    /// A, with the pending examples.
    fn information(&self) -> Symmetric {
        let mut information = self.information.clone();
        information.add_all(&self.pending_weights, &self.pending);
        information
    }
}

impl Uncertainty {
    /// phi'K_m phi of several feature vectors, one after the other: variance of a model's own part of each prediction, in units
    /// of the noise.
    pub fn variances(&self, model: usize, phis: &[f64], features: usize) -> Vec<f64> {
        let columns = MatRef::from_column_major_slice(phis, features, phis.len() / features);
        let products = &self.0[model] * columns;
        phis.chunks_exact(features).enumerate().map(|(j, phi)| dot(phi, products.col_as_slice(j))).collect()
    }
}

/// Both triangles.
fn dense(matrix: &Symmetric) -> Mat<f64> {
    let lower = matrix.lower();
    let n = lower.len().isqrt();
    let mut dense = MatRef::from_column_major_slice(&lower, n, n).to_owned();
    mirror(dense.as_mut());
    dense
}

fn mirror(mut matrix: MatMut<'_, f64>) {
    for j in 0..matrix.ncols() {
        for i in j + 1..matrix.nrows() {
            matrix[(j, i)] = matrix[(i, j)];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simulate::normals;
    use rand::{RngExt, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    /// Against the joint normal equations of (w_0, w_1, .., w_M), solved densely.
    #[test]
    fn the_hierarchy_solves_the_joint_problem() {
        let features = Features::new(4, 3, 2);
        let (n, models, ridge) = (features.count(), 3, 5.0);
        let mut generator = ChaCha8Rng::seed_from_u64(8);
        let mut all = Ridge::new(n, models);
        let (mut left, mut right) =
            (Mat::<f64>::zeros(n * (models + 1), n * (models + 1)), Mat::<f64>::zeros(n * (models + 1), 1));
        for i in 0..n {
            left[(i, i)] = if i == 0 { SHARED_INTERCEPT } else { SHARED };
            for m in 1..=models {
                left[(m * n + i, m * n + i)] = ridge
                    * if i == 0 {
                        INTERCEPT
                    } else if i <= 3 {
                        LINEAR
                    } else {
                        1.0
                    };
            }
        }
        for t in 0..200 {
            let (mut phi, m) = (Vec::new(), t % models);
            features.of_coordinates(&normals(3, &mut generator), &mut phi);
            let (weight, target) = (generator.random::<f64>(), generator.random::<f64>() - 0.5);
            all.add(m, weight, weight * target, &phi);
            for block in [(0, 0), (0, m + 1), (m + 1, 0), (m + 1, m + 1)] {
                for i in 0..n {
                    for j in 0..n {
                        left[(block.0 * n + i, block.1 * n + j)] += weight * phi[i] * phi[j];
                    }
                }
            }
            for i in 0..n {
                right[(i, 0)] += weight * target * phi[i];
                right[((m + 1) * n + i, 0)] += weight * target * phi[i];
            }
        }
        let uncertainty = all.solve(&features, ridge).unwrap();
        let joint = left.llt(Side::Lower).unwrap().solve(right);
        for i in 0..n {
            assert!((all.shared[i] - joint[(i, 0)]).abs() < 1e-9);
            assert!((0..models).all(|m| (all.weights(m)[i] - joint[((m + 1) * n + i, 0)]).abs() < 1e-9));
        }
        let phis: Vec<f64> = normals(2 * n, &mut generator);
        let variance = |phi: &[f64]| {
            let product = &uncertainty.0[1] * MatRef::from_column_major_slice(phi, n, 1);
            (0..n).map(|i| phi[i] * product[(i, 0)]).sum()
        };
        let each: Vec<f64> = phis.chunks_exact(n).map(variance).collect();
        assert!(uncertainty.variances(1, &phis, n).iter().zip(&each).all(|(a, b)| (a - b).abs() < 1e-12 && *a > 0.0));
    }

    #[test]
    fn sums_of_shards_add_up() {
        let features = Features::new(3, 2, 2);
        let mut generator = ChaCha8Rng::seed_from_u64(9);
        let n = features.count();
        let (mut whole, mut parts) = (Ridge::new(n, 2), [Ridge::new(n, 2), Ridge::new(n, 2)]);
        for t in 0..60 {
            let mut phi = Vec::new();
            features.of_coordinates(&normals(2, &mut generator), &mut phi);
            let target = generator.random::<f64>() - 0.5;
            whole.add(t % 2, 1.0, target, &phi);
            parts[t / 30].add(t % 2, 1.0, target, &phi);
        }
        let [mut merged, other] = parts;
        merged.merge(&other);
        whole.solve(&features, 5.0).unwrap();
        merged.solve(&features, 5.0).unwrap();
        assert!((0..n).all(|i| (whole.weights(1)[i] - merged.weights(1)[i]).abs() < 1e-12));
    }
}
