//! `[objective]`: what is maximised besides the reward.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{BadSetting, OutcomeField, Spec, bad};
use crate::event::ModelName;
use crate::objective::{ObjectiveSpec, OutcomeSpec};

/// `[objective]`, as written.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ObjectiveConfig {
    /// How far the reward may fall below that of the best single model, on the scale of 0..1.
    pub floor: Option<f64>,
    /// Outcomes by name.
    pub outcomes: BTreeMap<String, OutcomeConfig>,
}

/// `[objective.outcomes.NAME]`, as written.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct OutcomeConfig {
    /// JSON pointer to it in query and reward events; `None`: `/outcomes/NAME`.
    pub field: Option<String>,
    /// Least and greatest value; others are clipped. Required.
    pub range: Option<[f64; 2]>,
    /// The reward that one unit is worth, on the scale of 0..1.
    pub weight: f64,
    /// The most that a request may cost on average.
    pub budget: Option<f64>,
    /// What models cost until an event says otherwise, by model.
    pub models: BTreeMap<String, f64>,
}

/// Largest number of outcomes.
const OUTCOMES_MAX: usize = 8;

/// Largest magnitude of an outcome, a weight and a budget: no sum over a stream leaves the range of f64.
const OUTCOME_MAX: f64 = 1e12;

impl ObjectiveConfig {
    /// Checks all keys but the models.
    pub fn check(&self) -> Result<ObjectiveSpec, BadSetting> {
        if let Some(floor) = self.floor
            && !(floor > 0.0 && floor <= 1.0)
        {
            return Err(bad("objective.floor", floor, "must be above 0 and at most 1"));
        }
        if self.outcomes.len() > OUTCOMES_MAX {
            let problem = format!("has {} outcomes: must have at most {OUTCOMES_MAX}", self.outcomes.len());
            let key = "objective.outcomes".to_owned();
            return Err(BadSetting { problem: format!("{key} {problem}"), key });
        }
        if self.floor.is_some() && self.outcomes.values().all(|outcome| outcome.budget.is_none()) {
            let required = "limits what budgets may cost: it needs an outcome with a budget";
            return Err(bad("objective.floor", self.floor.unwrap_or_default(), required));
        }
        let outcomes = self.outcomes.iter().map(|(name, outcome)| outcome.check(name)).collect::<Result<_, _>>()?;
        Ok(ObjectiveSpec { floor: self.floor, outcomes })
    }

    /// Checks the models of all outcomes against those that learners have.
    pub fn check_models<'a>(&self, specs: impl Iterator<Item = &'a Spec> + Clone) -> Result<(), BadSetting> {
        for (name, outcome) in &self.outcomes {
            let is_known =
                |model: &&String| specs.clone().any(|spec| spec.models.iter().any(|m| m.as_str() == **model));
            if let Some(unknown) = outcome.models.keys().find(|model| !is_known(model)) {
                let key = format!("objective.outcomes.{name}.models");
                let problem = format!("{key}: {unknown} is not one of learner.models");
                return Err(BadSetting { key, problem });
            }
        }
        Ok(())
    }

    /// Where outcomes are in events.
    pub fn fields(&self) -> Vec<OutcomeField> {
        let field = |(name, outcome): (&String, &OutcomeConfig)| {
            let range = outcome.range.unwrap_or_default();
            OutcomeField {
                field: outcome.field.clone().unwrap_or_else(|| OutcomeField::own(name)),
                name: name.clone(),
                range: (range[0], range[1]),
            }
        };
        self.outcomes.iter().map(field).collect()
    }
}

impl OutcomeConfig {
    fn check(&self, name: &str) -> Result<OutcomeSpec, BadSetting> {
        let key = |key: &str| format!("objective.outcomes.{name}.{key}");
        let wrong = |field: &str, value: String, allowed: &str| {
            let key = key(field);
            BadSetting { problem: format!("{key} = {value}: {allowed}"), key }
        };
        let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
        if !(1..=64).contains(&name.len()) || !name.chars().all(is_name) {
            let allowed = "must have 1 to 64 characters of A-Z a-z 0-9 _ -";
            return Err(bad("objective.outcomes", format!("{name:?}"), allowed));
        }
        if let Some(field) = self.field.as_ref().filter(|field| !field.starts_with('/')) {
            return Err(wrong("field", format!("{field:?}"), "must be a JSON pointer, such as /meta/cost"));
        }
        let Some([low, high]) = self.range else {
            let required = "set the least and the greatest value, such as [0.0, 0.05]; others are clipped";
            let key = key("range");
            return Err(BadSetting { problem: format!("{key} is not set: {required}"), key });
        };
        if !(low < high && low.abs() <= OUTCOME_MAX && high.abs() <= OUTCOME_MAX) {
            let allowed = "must be two numbers, the lower first, of magnitude at most 1e12";
            return Err(wrong("range", format!("[{low}, {high}]"), allowed));
        }
        if self.weight.is_nan() || self.weight.abs() > OUTCOME_MAX {
            return Err(wrong("weight", self.weight.to_string(), "must be a number of magnitude at most 1e12"));
        }
        if let Some(budget) = self.budget
            && (low < 0.0 || !(budget > 0.0 && budget <= high))
        {
            let allowed =
                "must be above 0 and at most the upper end of the range, whose lower end must not be negative";
            return Err(wrong("budget", budget.to_string(), allowed));
        }
        let model = |(model, value): (&String, &f64)| match ModelName::try_from(model.as_str()) {
            Ok(_) if !(low..=high).contains(value) => {
                let allowed = "must be within the range of the outcome";
                Err(wrong(&format!("models.{model}"), value.to_string(), allowed))
            }
            Ok(name) => Ok((name, *value)),
            Err(error) => Err(wrong("models", model.clone(), &error.to_string())),
        };
        Ok(OutcomeSpec {
            name: name.to_owned(),
            range: (low, high),
            weight: self.weight,
            budget: self.budget,
            models: self.models.iter().map(model).collect::<Result<_, _>>()?,
        })
    }
}
