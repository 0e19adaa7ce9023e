//! Configuration: raw keys as they are written, and the checked settings that the rest of the crate works with.
//!
//! `config/default.toml` documents every key. Unknown keys are errors. An error names the key, its value and what is
//! allowed. Where files, environment and command line are read is an edge (`cli::settings`), not here.

use std::collections::BTreeSet;
use std::fmt;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::event::Name;
use crate::hpg::gradient::{Baseline, Estimator};
use crate::hpg::projection::Ball;
use crate::hpg::schedule::Rate;

/// All of the configuration, as written.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// What is learned, and how.
    pub learner: LearnerConfig,
}

/// `[learner]`, as written.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LearnerConfig {
    /// Dimension of query embeddings.
    pub dim: usize,
    /// Names of the models to route to.
    pub models: Vec<String>,
    /// How to learn.
    pub algorithm: Algorithm,
    /// The model that `algorithm = "fixed"` always plays.
    pub fixed_model: Option<String>,
    /// Which set of hyper-parameters to start from.
    pub preset: Preset,
    /// Nuclear-norm bound.
    pub tau: Option<f64>,
    /// Hypentropy scale.
    pub beta: Option<f64>,
    /// Learning rate.
    pub eta: Option<f64>,
    /// Most eigenvalues kept of each model.
    pub rank: Option<usize>,
    /// Examples summed into one step.
    pub batch: Option<usize>,
    /// How the parameters are held.
    pub mode: Mode,
    /// How the learning rate moves.
    pub learning_rate: Option<LearningRate>,
    /// The paper's T: examples that the theory preset is tuned to, or at which a moving rate equals eta.
    pub horizon: Option<u64>,
    /// The paper's s: rank of the models' kernels, for the theory preset.
    pub intrinsic_rank: Option<usize>,
    /// Examples after which half of what was learned is forgotten.
    pub half_life: Option<f64>,
    /// Whose policy the gradient is of.
    pub estimator: Estimator,
    /// Largest importance weight.
    pub weight_cap: f64,
    /// What is taken off the rewards.
    pub baseline: Option<Baseline>,
    /// Share of uniform exploration mixed into the policy.
    pub exploration_floor: f64,
    /// Seed of every random draw.
    pub seed: u64,
}

impl Default for LearnerConfig {
    fn default() -> Self {
        Self {
            dim: 768,
            models: vec!["minilm".to_owned(), "bge".to_owned()],
            algorithm: Algorithm::Hpg,
            fixed_model: None,
            preset: Preset::Practical,
            tau: None,
            beta: None,
            eta: None,
            rank: None,
            batch: None,
            mode: Mode::Factored,
            learning_rate: None,
            horizon: None,
            intrinsic_rank: None,
            half_life: None,
            estimator: Estimator::Logged,
            weight_cap: 10.0,
            baseline: None,
            exploration_floor: 0.0,
            seed: 1,
        }
    }
}

/// `learner.algorithm`
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Algorithm {
    /// Hypentropy policy gradient, Algorithm 1.
    Hpg,
    /// Algorithm 2: magnitudes by coin betting.
    HpgParameterFree,
    /// Every model alike.
    Uniform,
    /// Always `fixed_model`.
    Fixed,
}

/// `learner.preset`
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Preset {
    /// What learns well.
    Practical,
    /// What the paper's bound is proved for.
    Theory,
}

/// `learner.mode`
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// Factored eigenvectors: fast.
    Factored,
    /// Explicit eigenvectors.
    Explicit,
    /// A dense eigendecomposition at every step: the reference.
    Exact,
    /// Dual averaging: unprojected sums, projected to play.
    Lazy,
}

/// `learner.learning_rate`
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LearningRate {
    /// eta
    Constant,
    /// eta sqrt(horizon / t)
    Anytime,
    /// The same, in steps at powers of two.
    Doubling,
}

macro_rules! display_as_written {
    ($($type:ty),*) => {$(
        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.serialize(f)
            }
        }
    )*};
}
display_as_written!(Algorithm, Preset, Mode, LearningRate);

/// A key has a value that it cannot have.
#[derive(Debug, Error, PartialEq)]
#[error("{key} = {value}: {allowed}")]
pub struct BadSetting {
    /// The key, with its section.
    pub key: &'static str,
    /// The value, as written.
    pub value: String,
    /// What is allowed.
    pub allowed: String,
}

/// What a learner is made from: checked, complete, presets resolved.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Spec {
    /// Dimension of queries.
    pub dim: usize,
    /// Models to route to: at least two, no name twice.
    pub models: Vec<Name>,
    /// The algorithm with its own settings.
    pub method: Method,
    /// Examples summed into one step.
    pub batch: usize,
    /// Examples after which half is forgotten.
    pub half_life: Option<f64>,
    /// Share of uniform exploration.
    pub exploration_floor: f64,
    /// Seed of the draws.
    pub seed: u64,
}

/// An algorithm with its checked settings.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Method {
    /// Algorithm 1.
    Hpg(HpgSpec),
    /// Algorithm 2; the settings are those of the inner Algorithm 1.
    HpgParameterFree(HpgSpec),
    /// Every model alike.
    Uniform,
    /// Always the model of this index.
    Fixed(usize),
}

/// Checked hyper-parameters of hypentropy policy gradient.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct HpgSpec {
    /// Where the parameters live.
    pub ball: Ball,
    /// Learning rate.
    pub rate: Rate,
    /// How they are held.
    pub mode: Mode,
    /// Whose policy the gradient is of.
    pub estimator: Estimator,
    /// What is taken off the rewards.
    pub baseline: Baseline,
    /// Largest importance weight.
    pub weight_cap: f64,
}

impl Spec {
    /// The algorithm's name, as configured.
    pub fn algorithm(&self) -> &'static str {
        match self.method {
            Method::Hpg(_) => "hpg",
            Method::HpgParameterFree(_) => "hpg-parameter-free",
            Method::Uniform => "uniform",
            Method::Fixed(_) => "fixed",
        }
    }
}

/// Bounds within which no step can leave the range of f64, however long it runs.
const SCALE: (f64, f64) = (1e-9, 1e9);

impl LearnerConfig {
    /// Checks every key and resolves the preset.
    pub fn check(&self) -> Result<Spec, BadSetting> {
        within("learner.dim", self.dim, 1, 65_536)?;
        let models = self.check_models()?;
        if let Some(half_life) = self.half_life {
            within("learner.half_life", half_life, 1.0, 1e15)?;
        }
        within("learner.exploration_floor", self.exploration_floor, 0.0, 1.0)?;
        let batch = self.batch.unwrap_or(1);
        within("learner.batch", batch, 1, 65_536)?;
        let method = match self.algorithm {
            Algorithm::Hpg => Method::Hpg(self.check_hpg(models.len())?),
            Algorithm::HpgParameterFree => Method::HpgParameterFree(self.check_parameter_free(models.len())?),
            Algorithm::Uniform => Method::Uniform,
            Algorithm::Fixed => Method::Fixed(self.check_fixed(&models)?),
        };
        Ok(Spec {
            dim: self.dim,
            models,
            method,
            batch,
            half_life: self.half_life,
            exploration_floor: self.exploration_floor,
            seed: self.seed,
        })
    }

    fn check_models(&self) -> Result<Vec<Name>, BadSetting> {
        let refused = |allowed: String| bad("learner.models", format!("{:?}", self.models), allowed);
        if !(2..=4096).contains(&self.models.len()) {
            return Err(refused("must be 2 to 4096 names: with one model there is nothing to route".to_owned()));
        }
        let mut seen = BTreeSet::new();
        if let Some(twice) = self.models.iter().find(|name| !seen.insert(*name)) {
            return Err(refused(format!("every name once, but {twice:?} is there twice")));
        }
        self.models.iter().map(|name| Name::try_from(name.as_str()).map_err(|e| refused(e.to_string()))).collect()
    }

    fn check_fixed(&self, models: &[Name]) -> Result<usize, BadSetting> {
        let wanted = self.fixed_model.as_deref().unwrap_or_default();
        models.iter().position(|name| name.as_str() == wanted).ok_or_else(|| {
            bad(
                "learner.fixed_model",
                format!("{wanted:?}"),
                "one of learner.models, since learner.algorithm = \"fixed\"",
            )
        })
    }

    fn check_hpg(&self, models: usize) -> Result<HpgSpec, BadSetting> {
        match self.preset {
            Preset::Practical => self.check_shared(300.0, 3.0, LearningRate::Constant, Pace::Eta(0.1)),
            Preset::Theory => {
                let s = self.intrinsic_rank.ok_or_else(|| missing("learner.intrinsic_rank", "the models' rank s"))?;
                within("learner.intrinsic_rank", s, 1, self.dim)?;
                let tau = 2.0 * s as f64;
                let pace = Pace::theory(models, self.dim);
                self.check_shared(tau, tau / self.dim as f64, LearningRate::Constant, pace)
            }
        }
    }

    fn check_parameter_free(&self, models: usize) -> Result<HpgSpec, BadSetting> {
        for (key, value) in [("learner.tau", self.tau), ("learner.beta", self.beta)] {
            if let Some(value) = value {
                return Err(bad(key, value, "must be absent: hpg-parameter-free finds the scale itself"));
            }
        }
        let kind = if self.eta.is_some() { LearningRate::Constant } else { LearningRate::Anytime };
        self.check_shared(1.0, 1.0 / self.dim as f64, kind, Pace::theory(models, self.dim))
    }

    /// What both algorithms share; the arguments are what holds where the configuration is silent.
    fn check_shared(&self, tau: f64, beta: f64, kind: LearningRate, pace: Pace) -> Result<HpgSpec, BadSetting> {
        let (rank, baseline) = match self.preset {
            Preset::Practical => (self.dim.min(16), Baseline::Mean),
            Preset::Theory => (self.dim, Baseline::None),
        };
        let ball =
            Ball { tau: self.tau.unwrap_or(tau), beta: self.beta.unwrap_or(beta), rank: self.rank.unwrap_or(rank) };
        within("learner.tau", ball.tau, SCALE.0, SCALE.1)?;
        within("learner.beta", ball.beta, SCALE.0, SCALE.1)?;
        within("learner.rank", ball.rank, 1, self.dim)?;
        within("learner.weight_cap", self.weight_cap, 1.0, 1e6)?;
        Ok(HpgSpec {
            ball,
            rate: self.check_rate(kind, pace)?,
            mode: self.mode,
            estimator: self.estimator,
            baseline: self.baseline.unwrap_or(baseline),
            weight_cap: self.weight_cap,
        })
    }

    fn check_rate(&self, kind: LearningRate, pace: Pace) -> Result<Rate, BadSetting> {
        if let Some(eta) = self.eta {
            within("learner.eta", eta, SCALE.0, SCALE.1)?;
        }
        if self.horizon == Some(0) {
            return Err(bad("learner.horizon", 0, "must be 1 or more examples"));
        }
        let root = self.horizon.map(|horizon| (horizon as f64).sqrt());
        let scale = match (self.eta.map_or(pace, Pace::Eta), root) {
            (Pace::Eta(eta), _) if self.learning_rate.unwrap_or(kind) == LearningRate::Constant => {
                return Ok(Rate::Constant(eta));
            }
            (Pace::Eta(eta), Some(root)) => eta * root,
            (Pace::Eta(_), None) => {
                return Err(missing("learner.horizon", "the number of examples at which the moving rate equals eta"));
            }
            (Pace::Scale(scale), _) => scale,
        };
        match (self.learning_rate.unwrap_or(kind), root) {
            (LearningRate::Anytime, _) => Ok(Rate::Anytime { scale }),
            (LearningRate::Doubling, _) => Ok(Rate::Doubling { scale }),
            (LearningRate::Constant, Some(root)) => Ok(Rate::Constant(scale / root)),
            (LearningRate::Constant, None) => Err(missing("learner.horizon", "the number of examples T")),
        }
    }
}

/// Where a learning rate comes from.
#[derive(Debug, Clone, Copy)]
enum Pace {
    /// eta itself.
    Eta(f64),
    /// eta sqrt(T).
    Scale(f64),
}

impl Pace {
    /// The paper's eta = sqrt(M log d / T). At d = 1 the logarithm would stop all learning.
    fn theory(models: usize, dim: usize) -> Self {
        Self::Scale((models as f64 * (dim as f64).max(2.0).ln()).sqrt())
    }
}

fn within<T: PartialOrd + fmt::Display>(key: &'static str, value: T, low: T, high: T) -> Result<(), BadSetting> {
    if value >= low && value <= high { Ok(()) } else { Err(bad(key, value, format!("must be {low} to {high}"))) }
}

fn bad(key: &'static str, value: impl fmt::Display, allowed: impl Into<String>) -> BadSetting {
    BadSetting { key, value: value.to_string(), allowed: allowed.into() }
}

fn missing(key: &'static str, what: &str) -> BadSetting {
    bad(key, "(absent)", format!("needed here: {what}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(change: impl FnOnce(&mut LearnerConfig)) -> LearnerConfig {
        let mut config = LearnerConfig { dim: 8, ..LearnerConfig::default() };
        change(&mut config);
        config
    }

    #[test]
    fn bad_settings_name_their_key_and_range() {
        let nan = f64::NAN;
        let check = |change: fn(&mut LearnerConfig), key: &str, allowed: &str| {
            let error = config(change).check().unwrap_err();
            assert_eq!(error.key, key, "{error}");
            assert!(error.to_string().contains(allowed), "{error}");
        };
        check(|c| c.tau = Some(0.0), "learner.tau", "must be 0.000000001 to 1000000000");
        check(|c| c.tau = Some(-1.0), "learner.tau", "-1");
        check(|c| c.tau = Some(f64::NAN), "learner.tau", "NaN");
        check(|c| c.beta = Some(f64::INFINITY), "learner.beta", "inf");
        check(|c| c.eta = Some(0.0), "learner.eta", "must be");
        check(|c| c.rank = Some(0), "learner.rank", "must be 1 to 8");
        check(|c| c.rank = Some(9), "learner.rank", "must be 1 to 8");
        check(|c| c.batch = Some(0), "learner.batch", "must be 1 to 65536");
        check(|c| c.dim = 0, "learner.dim", "must be 1 to 65536");
        check(|c| c.models.truncate(1), "learner.models", "nothing to route");
        check(|c| c.models.push("bge".to_owned()), "learner.models", "\"bge\" is there twice");
        check(|c| c.models.push("b g e".to_owned()), "learner.models", "is not a name");
        check(|c| c.half_life = Some(0.5), "learner.half_life", "must be 1 to");
        check(|c| c.exploration_floor = 1.5, "learner.exploration_floor", "must be 0 to 1");
        check(|c| c.weight_cap = 0.5, "learner.weight_cap", "must be 1 to");
        check(|c| c.preset = Preset::Theory, "learner.intrinsic_rank", "needed here");
        check(
            |c| (c.preset, c.intrinsic_rank) = (Preset::Theory, Some(2)),
            "learner.horizon",
            "needed here: the number of examples T",
        );
        check(
            |c| (c.preset, c.intrinsic_rank, c.horizon) = (Preset::Theory, Some(9), Some(9)),
            "learner.intrinsic_rank",
            "must be 1 to 8",
        );
        check(|c| c.horizon = Some(0), "learner.horizon", "1 or more");
        check(|c| c.learning_rate = Some(LearningRate::Anytime), "learner.horizon", "needed here");
        check(|c| c.algorithm = Algorithm::Fixed, "learner.fixed_model", "one of learner.models");
        check(
            |c| (c.algorithm, c.tau) = (Algorithm::HpgParameterFree, Some(1.0)),
            "learner.tau",
            "finds the scale itself",
        );
        assert!(config(|c| c.exploration_floor = nan).check().is_err());
    }

    #[test]
    fn presets_resolve_and_are_overridden() {
        let hpg = |config: LearnerConfig| match config.check().unwrap().method {
            Method::Hpg(spec) | Method::HpgParameterFree(spec) => spec,
            other => panic!("{other:?}"),
        };
        let practical = hpg(config(|c| c.dim = 64));
        assert_eq!(practical.ball, Ball { tau: 300.0, beta: 3.0, rank: 16 });
        assert_eq!((practical.rate, practical.baseline), (Rate::Constant(0.1), Baseline::Mean));
        assert_eq!(hpg(config(|_| ())).ball.rank, 8, "never more than the dimension");

        let theory = |c: &mut LearnerConfig| {
            c.models = ["a", "b", "c", "d"].map(String::from).to_vec();
            (c.preset, c.intrinsic_rank, c.horizon) = (Preset::Theory, Some(2), Some(400));
        };
        let paper = hpg(config(theory));
        assert_eq!(paper.ball, Ball { tau: 4.0, beta: 0.5, rank: 8 });
        assert_eq!((paper.rate, paper.baseline), (Rate::Constant(0.14420268866008829), Baseline::None));
        let anytime = hpg(config(|c| {
            theory(c);
            (c.horizon, c.learning_rate) = (None, Some(LearningRate::Anytime));
        }));
        assert!((anytime.rate.at(400) - 0.14420268866008829).abs() < 1e-15);

        let overridden = hpg(config(|c| {
            theory(c);
            (c.tau, c.eta, c.baseline) = (Some(7.0), Some(0.2), Some(Baseline::Mean));
        }));
        assert_eq!((overridden.ball.tau, overridden.rate), (7.0, Rate::Constant(0.2)));
        assert_eq!((overridden.ball.beta, overridden.baseline), (0.5, Baseline::Mean));

        let free = hpg(config(|c| c.algorithm = Algorithm::HpgParameterFree));
        assert_eq!(free.ball, Ball { tau: 1.0, beta: 0.125, rank: 8 });
        assert!(matches!(free.rate, Rate::Anytime { .. }));
    }

    #[test]
    fn names_display_as_they_are_written() {
        assert_eq!(Algorithm::HpgParameterFree.to_string(), "hpg-parameter-free");
        assert_eq!(Mode::Factored.to_string(), "factored");
    }
}
