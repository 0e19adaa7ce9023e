//! The models that a request allows and those that it excludes, by name.

use std::collections::BTreeMap;

use thiserror::Error;

use crate::event::ModelName;

/// The models that a request restricts its decision to.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct Restriction {
    /// The models that it allows; `None`: all.
    pub models: Option<Vec<String>>,
    /// The models that it excludes.
    pub exclude: Vec<String>,
}

/// A request names a model that does not exist.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("there is no model {name:?}")]
pub struct UnknownModel {
    /// The field that names it.
    pub field: &'static str,
    /// Its name.
    pub name: String,
}

impl Restriction {
    /// Whether it allows every model.
    pub fn is_none(&self) -> bool {
        self.models.is_none() && self.exclude.is_empty()
    }

    /// Whether the request asks not to be answered by a model.
    pub fn excludes(&self, model: &ModelName) -> bool {
        self.exclude.iter().any(|name| name == model.as_str())
    }

    /// One entry per model: whether the request allows it. Models that `is_known` may be named, though they are none of these.
    pub fn allowed(&self, models: &[ModelName], is_known: impl Fn(&str) -> bool) -> Result<Vec<bool>, UnknownModel> {
        let mut allowed = vec![self.models.is_none(); models.len()];
        if self.is_none() {
            return Ok(allowed);
        }
        let places: BTreeMap<&str, usize> = models.iter().enumerate().map(|(m, name)| (name.as_str(), m)).collect();
        let named = [("models", self.models.as_deref().unwrap_or_default(), true), ("exclude", &self.exclude, false)];
        for (field, names, may_answer) in named {
            for name in names {
                match places.get(name.as_str()) {
                    Some(&m) => allowed[m] = may_answer,
                    None if is_known(name) => {}
                    None => return Err(UnknownModel { field, name: name.clone() }),
                }
            }
        }
        Ok(allowed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exclusion_wins_and_unknown_names_are_errors() {
        let models = ["a", "b", "c"].map(|name| ModelName::try_from(name).unwrap());
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        let is_known = |name: &str| name == "new";
        for (allowed, excluded, expected) in [
            (None, &[][..], Ok(vec![true, true, true])),
            (None, &["b", "b", "new"], Ok(vec![true, false, true])),
            (Some(&["c", "a", "a", "new"][..]), &[], Ok(vec![true, false, true])),
            (Some(&["c", "a"]), &["a"], Ok(vec![false, false, true])),
            (Some(&["c"]), &["c"], Ok(vec![false; 3])),
            (Some(&[]), &[], Ok(vec![false; 3])),
            (Some(&["new"]), &[], Ok(vec![false; 3])),
            (Some(&["a", "d"]), &["e"], Err(UnknownModel { field: "models", name: "d".to_owned() })),
            (None, &["a", ""], Err(UnknownModel { field: "exclude", name: String::new() })),
        ] {
            let restriction = Restriction { models: allowed.map(names), exclude: names(excluded) };
            assert_eq!(restriction.allowed(&models, is_known), expected, "{restriction:?}");
        }
    }
}
