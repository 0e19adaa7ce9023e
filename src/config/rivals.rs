//! Validation of the keys of hypentropy regression and of the algorithms that HPG is compared with.

use serde::{Deserialize, Serialize};

use super::{BadSetting, LearnerConfig, LearningRate, Mode, OnDrift, Pace, SCALE, bad, within};
use crate::hpg::actor_critic::ActorCriticSpec;
use crate::hpg::critic::CriticSpec;
use crate::hpg::gradient::{Baseline, GradientSpec};
use crate::hpg::projection::Ball;
use crate::hpg::schedule::Rate;
use crate::policy::linear_bandit::{Exploration, LinearBanditSpec};
use crate::policy::log_linear::LogLinearSpec;
use crate::policy::log_quadratic::LogQuadraticSpec;
use crate::policy::quadratic_sgd::QuadraticSgdSpec;
use crate::router::HEAD_QUERIES_MAX;

/// `learner.features`
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FeatureKind {
    /// The query and a constant.
    Linear,
    /// Products of its coordinates in the leading directions, and a constant.
    Quadratic,
}

/// Largest dimension of algorithms that keep a dense matrix for each model.
const DENSE_DIM_MAX: usize = 1024;

/// Default number of directions whose products are features of linear bandits.
const FEATURE_RANK: usize = 16;

/// Defaults of the critic, tuned on other instances than the reported ones.
const CRITIC_FEATURE_RANK: usize = 22;
const CRITIC_LINEAR_RANK: usize = 64;
const CRITIC_RIDGE: f64 = 5.0;
const REMAINDER: Ball = Ball { tau: 100.0, beta: 1.0, rank: 16 };
const REMAINDER_ETA: f64 = 0.2;

/// Largest number of directions whose products are features; 44 give 991 features.
const FEATURE_RANK_MAX: usize = 44;

impl LearnerConfig {
    pub(super) fn check_linear_bandit(&self, exploration: Exploration) -> Result<LinearBanditSpec, BadSetting> {
        if self.features == FeatureKind::Linear {
            self.check_dense("set learner.features = \"quadratic\", which has no such limit")?;
        }
        let feature_rank = self.feature_rank.unwrap_or(FEATURE_RANK);
        within("learner.feature_rank", feature_rank, 1, FEATURE_RANK_MAX)?;
        let alpha = self.alpha.unwrap_or(match exploration {
            Exploration::Ucb => 1.0,
            Exploration::Thompson => 0.2,
        });
        within("learner.alpha", alpha, 0.0, 1e6)?;
        Ok(LinearBanditSpec {
            exploration,
            alpha,
            ridge: self.check_ridge(RIDGE)?,
            features: self.features,
            feature_rank: feature_rank.min(self.dim),
            inverse_gap: self.check_inverse_gap()?,
        })
    }

    /// Hypentropy regression: tau, beta, eta and rank are those of the critic's remainder.
    pub(super) fn check_regression(&self, models: usize) -> Result<CriticSpec, BadSetting> {
        let rank = self.rank.unwrap_or(self.dim.min(REMAINDER.rank));
        let ball = Ball { tau: self.tau.unwrap_or(REMAINDER.tau), beta: self.beta.unwrap_or(REMAINDER.beta), rank };
        self.check_ball(&ball)?;
        let eta = self.eta.unwrap_or(REMAINDER_ETA);
        within("learner.eta", eta, SCALE.0, SCALE.1)?;
        if self.mode == Mode::Lazy {
            return Err(bad(
                "learner.mode",
                self.mode,
                "hypentropy-regression does not support it: use factored, explicit or exact",
            ));
        }
        self.check_critic(ball, eta, models)
    }

    /// HPG with a critic: tau, beta, eta and rank are the policy's, the critic has its own.
    pub(super) fn check_actor_critic(&self, models: usize) -> Result<ActorCriticSpec, BadSetting> {
        let rank = self.rank.unwrap_or(self.dim.min(16));
        let ball = Ball { tau: self.tau.unwrap_or(1000.0), beta: self.beta.unwrap_or(10.0), rank };
        self.check_ball(&ball)?;
        let eta = self.eta.unwrap_or(1.0);
        within("learner.eta", eta, SCALE.0, SCALE.1)?;
        if let Some(rate) = self.learning_rate.filter(|rate| *rate != LearningRate::Constant) {
            return Err(bad("learner.learning_rate", rate, "must be constant with learner.estimator = \"critic\""));
        }
        let remainder = Ball { rank: REMAINDER.rank.min(self.dim), ..REMAINDER };
        Ok(ActorCriticSpec { ball, mode: self.mode, eta, critic: self.check_critic(remainder, REMAINDER_ETA, models)? })
    }

    fn check_critic(&self, ball: Ball, eta: f64, models: usize) -> Result<CriticSpec, BadSetting> {
        // The state grows with models times features squared: with many models there are fewer features.
        let crowd = (8.0 / models as f64).min(1.0);
        let feature_rank = self.feature_rank.unwrap_or((CRITIC_FEATURE_RANK as f64 * crowd.sqrt().sqrt()) as usize);
        within("learner.feature_rank", feature_rank, 0, FEATURE_RANK_MAX)?;
        let linear_rank = ((CRITIC_LINEAR_RANK as f64 * crowd.sqrt()) as usize).max(feature_rank);
        within("learner.steepness", self.steepness, 1e-6, 1e6)?;
        within("learner.head_queries", self.head_queries, 0, HEAD_QUERIES_MAX)?;
        Ok(CriticSpec {
            ball,
            mode: self.mode,
            eta,
            linear_rank: linear_rank.min(self.dim),
            feature_rank: feature_rank.min(self.dim),
            ridge: self.check_ridge(CRITIC_RIDGE)?,
            steepness: self.steepness,
            head_queries: self.head_queries,
            clip: self.clip_predictions,
            drift: self.drift == OnDrift::Detect,
        })
    }

    pub(super) fn check_quadratic_sgd(&self) -> Result<QuadraticSgdSpec, BadSetting> {
        self.check_dense("use hpg or a smaller embedding")?;
        let eta = self.eta.unwrap_or(SGD_ETA);
        within("learner.eta", eta, SCALE.0, SCALE.1)?;
        Ok(QuadraticSgdSpec { eta, inverse_gap: self.check_inverse_gap()? })
    }

    pub(super) fn check_log_quadratic(&self) -> Result<LogQuadraticSpec, BadSetting> {
        match self.rank {
            None => self.check_dense("set learner.rank")?,
            Some(rank) => self.check_rank("learner.rank", rank)?,
        }
        let rate = self.check_rate(LearningRate::Constant, Pace::Eta(LOG_QUADRATIC_ETA))?;
        Ok(LogQuadraticSpec { rate, gradient: self.check_gradient()?, rank: self.rank })
    }

    pub(super) fn check_log_linear(&self) -> Result<LogLinearSpec, BadSetting> {
        self.check_dense("use hpg or a smaller embedding")?;
        let rate = self.check_rate(LearningRate::Constant, Pace::Eta(LOG_LINEAR_ETA))?;
        let ridge = self.check_ridge(LOG_LINEAR_RIDGE)?;
        Ok(LogLinearSpec { rate, gradient: self.check_gradient()?, ridge })
    }

    pub(super) fn check_exp3(&self, models: usize) -> Result<Rate, BadSetting> {
        let kind = if self.eta.is_some() { LearningRate::Constant } else { LearningRate::Anytime };
        let m = models as f64;
        self.check_rate(kind, Pace::Scale((2.0 * m.ln() / m).sqrt()))
    }

    fn check_gradient(&self) -> Result<GradientSpec, BadSetting> {
        within("learner.weight_cap", self.weight_cap, 1.0, 1e6)?;
        let (estimator, weight_cap) = (self.check_reinforce()?, self.weight_cap);
        Ok(GradientSpec { estimator, baseline: self.baseline.unwrap_or(Baseline::Mean), weight_cap })
    }

    fn check_ridge(&self, default: f64) -> Result<f64, BadSetting> {
        let ridge = self.ridge.unwrap_or(default);
        within("learner.ridge", ridge, SCALE.0, SCALE.1)?;
        Ok(ridge)
    }

    fn check_inverse_gap(&self) -> Result<f64, BadSetting> {
        within("learner.inverse_gap", self.inverse_gap, SCALE.0, SCALE.1)?;
        Ok(self.inverse_gap)
    }

    /// Rejects dimensions whose dense matrix per model would be too large.
    fn check_dense(&self, way_out: &str) -> Result<(), BadSetting> {
        if self.dim <= DENSE_DIM_MAX {
            return Ok(());
        }
        let allowed = format!(
            "must be 1 to {DENSE_DIM_MAX} with learner.algorithm = \"{}\", which keeps dim (dim + 1) / 2 numbers per model: \
             {way_out}",
            self.algorithm
        );
        Err(bad("learner.dim", self.dim, allowed))
    }
}

/// Default regularisation of linear bandits.
const RIDGE: f64 = 1.0;

/// Default step of quadratic regression.
const SGD_ETA: f64 = 0.5;

/// Default learning rate of Euclidean policy gradient.
const LOG_QUADRATIC_ETA: f64 = 1.0;

/// Default learning rate of natural policy gradient, and regularisation of its Fisher matrix.
const LOG_LINEAR_ETA: f64 = 0.01;
const LOG_LINEAR_RIDGE: f64 = 0.001;

#[cfg(test)]
mod tests {
    use super::super::{Algorithm, Method};
    use super::*;

    const RIVALS: [Algorithm; 6] = [
        Algorithm::Exp3,
        Algorithm::LogLinear,
        Algorithm::LogQuadratic,
        Algorithm::LinUcb,
        Algorithm::LinThompson,
        Algorithm::QuadraticSgd,
    ];

    fn config(algorithm: Algorithm, change: impl FnOnce(&mut LearnerConfig)) -> LearnerConfig {
        let mut config = LearnerConfig { dim: 8, algorithm, ..LearnerConfig::default() };
        change(&mut config);
        config
    }

    #[test]
    fn names_are_those_that_were_configured() {
        for algorithm in RIVALS {
            assert_eq!(config(algorithm, |_| ()).check().unwrap().algorithm(), algorithm.to_string());
        }
    }

    #[test]
    fn bad_settings_name_their_key_and_range() {
        let check = |algorithm, change: fn(&mut LearnerConfig), key: &str, allowed: &str| {
            let error = config(algorithm, change).check().unwrap_err();
            assert_eq!(error.key, key, "{error}");
            assert!(error.to_string().contains(allowed), "{error}");
        };
        let large: fn(&mut LearnerConfig) = |c| (c.dim, c.features) = (1025, FeatureKind::Linear);
        for algorithm in RIVALS.into_iter().filter(|algorithm| *algorithm != Algorithm::Exp3) {
            check(algorithm, large, "learner.dim", "must be 1 to 1024 with learner.algorithm");
        }
        check(Algorithm::LogQuadratic, large, "learner.dim", "set learner.rank");
        check(
            Algorithm::LogQuadratic,
            |c| c.rank = Some(9),
            "learner.rank",
            "9 exceeds learner.dim = 8: lower the rank",
        );
        check(Algorithm::LogQuadratic, |c| c.weight_cap = 0.0, "learner.weight_cap", "must be 1 to");
        check(Algorithm::LogLinear, |c| c.ridge = Some(0.0), "learner.ridge", "must be 0.000000001 to");
        check(Algorithm::LogLinear, |c| c.learning_rate = Some(LearningRate::Anytime), "learner.horizon", "is not set");
        check(Algorithm::LinUcb, |c| c.ridge = Some(f64::NAN), "learner.ridge", "must be");
        check(Algorithm::LinUcb, |c| c.alpha = Some(-1.0), "learner.alpha", "must be 0 to");
        check(Algorithm::LinThompson, |c| c.feature_rank = Some(45), "learner.feature_rank", "must be 1 to 44");
        check(Algorithm::LinThompson, |c| c.inverse_gap = 0.0, "learner.inverse_gap", "must be");
        check(Algorithm::QuadraticSgd, |c| c.inverse_gap = f64::INFINITY, "learner.inverse_gap", "inf");
        check(Algorithm::QuadraticSgd, |c| c.eta = Some(0.0), "learner.eta", "must be");
        check(Algorithm::Exp3, |c| c.eta = Some(-1.0), "learner.eta", "must be");
    }

    #[test]
    fn what_needs_no_dense_matrix_knows_no_limit() {
        for algorithm in [Algorithm::Exp3, Algorithm::LinUcb, Algorithm::LinThompson] {
            config(algorithm, |c| c.dim = 65_536).check().unwrap();
        }
        config(Algorithm::LogQuadratic, |c| (c.dim, c.rank) = (65_536, Some(16))).check().unwrap();
        let Method::LinearBandit(spec) = config(Algorithm::LinUcb, |_| ()).check().unwrap().method else { panic!() };
        assert_eq!(spec.feature_rank, 8, "never more than the dimension");
    }
}
