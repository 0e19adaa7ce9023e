//! Algorithms of a comparison: by name, each with its own `learner` keys.

use anyhow::{Context, anyhow};

use crate::config::{LearnerConfig, Spec};

/// Name of the configured learner on the command line.
pub const CONFIGURED: &str = "configured";

/// An algorithm to compare.
pub struct Contestant {
    /// As given on the command line.
    pub name: String,
    /// Its resolved settings.
    pub spec: Spec,
}

/// Parses algorithms, on top of `base`.
pub fn contestants(asked: &[String], base: &LearnerConfig) -> anyhow::Result<Vec<Contestant>> {
    asked.iter().map(|text| contestant(text, base).with_context(|| format!("--algorithms {text}"))).collect()
}

/// Parses `name:key=value:key=value`.
fn contestant(text: &str, base: &LearnerConfig) -> anyhow::Result<Contestant> {
    let mut parts = text.split(':');
    let name = parts.next().unwrap_or_default();
    let mut learner = base.clone();
    let mut keys = serde_json::Map::new();
    if name != CONFIGURED {
        // The configured keys are meant for the configured algorithm.
        let LearnerConfig { dim, models, exploration_floor, seed, .. } = learner;
        learner = LearnerConfig { dim, models, exploration_floor, seed, ..LearnerConfig::default() };
        keys.insert("algorithm".to_owned(), name.into());
    }
    for part in parts {
        let (key, value) = part.split_once('=').ok_or_else(|| anyhow!("{part:?} must be written as key=value"))?;
        if ["dim", "models", "spaces_max"].contains(&key) {
            return Err(anyhow!("learner.{key} is shared by all algorithms: it cannot be set for one of them"));
        }
        let value = serde_json::from_str(value).unwrap_or_else(|_| value.into());
        keys.insert(key.to_owned(), value);
    }
    let mut spec = learner.with_keys("learner", &keys)?.check()?;
    if !spec.worth.rollout.has_control() {
        // The comparison evaluates them itself.
        spec.worth.every = 0;
    }
    let name = if name == CONFIGURED { format!("{} ({text})", spec.algorithm()) } else { text.to_owned() };
    Ok(Contestant { name, spec })
}
