//! Algorithms that take part in a comparison: by name, each with keys of its own.

use anyhow::{Context, anyhow};

use crate::config::{LearnerConfig, Spec};

/// An algorithm that takes part.
pub struct Contestant {
    /// As it was asked for.
    pub name: String,
    /// What it comes to.
    pub spec: Spec,
}

/// Those that were asked for, on top of `base`.
pub fn contestants(asked: &[String], base: &LearnerConfig) -> anyhow::Result<Vec<Contestant>> {
    asked.iter().map(|text| contestant(text, base).with_context(|| format!("--algorithms {text}"))).collect()
}

/// `name:key=value:key=value`: the keys of `learner`, with these.
fn contestant(text: &str, base: &LearnerConfig) -> anyhow::Result<Contestant> {
    let mut parts = text.split(':');
    let name = parts.next().unwrap_or_default();
    let mut keys = serde_json::to_value(base)?;
    let Some(keys_of) = keys.as_object_mut() else { return Err(anyhow!("no keys")) };
    if name != "configured" {
        // What was configured was configured for another algorithm.
        let LearnerConfig { dim, models, exploration_floor, seed, .. } = base.clone();
        let fresh = LearnerConfig { dim, models, exploration_floor, seed, ..LearnerConfig::default() };
        if let serde_json::Value::Object(fresh) = serde_json::to_value(fresh)? {
            *keys_of = fresh;
        }
        keys_of.insert("algorithm".to_owned(), name.into());
    }
    for part in parts {
        let (key, value) = part.split_once('=').ok_or_else(|| anyhow!("{part:?} is not key=value"))?;
        if !keys_of.contains_key(key) || ["dim", "models", "spaces_max"].contains(&key) {
            return Err(anyhow!("{key:?} is no key of [learner] that an algorithm can have for itself"));
        }
        let value = serde_json::from_str(value).unwrap_or_else(|_| value.into());
        keys_of.insert(key.to_owned(), value);
    }
    let mut spec = serde_json::from_value::<LearnerConfig>(keys)?.check()?;
    if spec.worth.guard.is_none() {
        // They are judged by whoever compares them.
        spec.worth.every = 0;
    }
    let name = text.replacen("configured", &format!("configured ({})", spec.algorithm()), 1);
    Ok(Contestant { name, spec })
}
