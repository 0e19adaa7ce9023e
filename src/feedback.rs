//! What came of a decision, as reward events say it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::event::ModelName;

/// What one reward event, or all those of a request together, say of the request.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Feedback {
    /// The reward of the chosen model, as logged.
    pub reward: Option<f64>,
    /// What few events say.
    pub more: Option<Box<MoreFeedback>>,
}

/// The optional parts of feedback. Names, not indexes: models and outcomes may change while a request waits.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct MoreFeedback {
    /// Outcomes of the decision by name, clipped to their ranges.
    pub outcomes: BTreeMap<String, f64>,
    /// Whether the chosen model did not answer.
    pub failed: bool,
    /// Rewards of several models, as logged.
    pub rewards: BTreeMap<ModelName, f64>,
    /// The model that was preferred, and the one that it was preferred to.
    pub preference: Option<(ModelName, ModelName)>,
}

impl Feedback {
    /// A reward and nothing else.
    pub fn reward(reward: f64) -> Self {
        Self { reward: Some(reward), more: None }
    }

    /// Whether it says how good the decision or a model was. Outcomes alone do not: their request waits for more.
    pub fn is_answer(&self) -> bool {
        let is_answer = |more: &MoreFeedback| more.failed || !more.rewards.is_empty() || more.preference.is_some();
        self.reward.is_some() || self.more.as_ref().is_some_and(|more| is_answer(more))
    }

    /// Whether the chosen model did not answer, and nothing says how good it was.
    pub fn is_failure(&self) -> bool {
        self.reward.is_none() && self.more.as_ref().is_some_and(|more| more.failed)
    }

    /// Adds what later feedback of the same request says: of what both say the later counts. The rewards are combined
    /// elsewhere.
    pub fn extend(&mut self, later: &Self) {
        let Some(later) = &later.more else { return };
        let more = self.more.get_or_insert_default();
        more.outcomes.extend(later.outcomes.iter().map(|(name, value)| (name.clone(), *value)));
        more.rewards.extend(later.rewards.iter().map(|(model, reward)| (model.clone(), *reward)));
        more.failed |= later.failed;
        more.preference = later.preference.clone().or(more.preference.take());
    }

    /// Its outcomes.
    pub fn outcomes(&self) -> Option<&BTreeMap<String, f64>> {
        self.more.as_ref().map(|more| &more.outcomes).filter(|outcomes| !outcomes.is_empty())
    }

    /// Whether all its numbers are finite.
    pub fn is_finite(&self) -> bool {
        let more = self.more.iter().flat_map(|more| more.outcomes.values().chain(more.rewards.values()));
        self.reward.iter().chain(more).all(|x| x.is_finite())
    }

    /// The memory that the optional parts hold: a function of the value alone.
    pub fn bytes(&self) -> usize {
        let Some(more) = &self.more else { return 0 };
        let names = more.outcomes.keys().map(String::len).chain(more.rewards.keys().map(|name| name.as_str().len()));
        let preference = more.preference.iter().map(|(one, other)| one.as_str().len() + other.as_str().len());
        size_of::<MoreFeedback>() + names.map(|length| length + ENTRY_BYTES).sum::<usize>() + preference.sum::<usize>()
    }
}

/// What an entry of a map takes besides its name.
const ENTRY_BYTES: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outcomes_alone_are_no_answer() {
        let more = |more: MoreFeedback| Feedback { reward: None, more: Some(Box::new(more)) };
        let costs = MoreFeedback { outcomes: BTreeMap::from([("cost".to_owned(), 0.5)]), ..MoreFeedback::default() };
        assert!(!more(costs.clone()).is_answer() && more(costs).bytes() > 0);
        let failed = more(MoreFeedback { failed: true, ..MoreFeedback::default() });
        assert!(failed.is_answer() && failed.is_failure());
        assert!(!Feedback { reward: Some(1.0), ..failed }.is_failure());
        assert!(Feedback::reward(0.0).is_answer() && Feedback::reward(0.0).bytes() == 0);
        let name = |name: &str| ModelName::try_from(name).unwrap();
        let preferred = MoreFeedback { preference: Some((name("a"), name("b"))), ..MoreFeedback::default() };
        assert!(more(preferred).is_answer());
        let judged = MoreFeedback { rewards: BTreeMap::from([(name("a"), f64::INFINITY)]), ..MoreFeedback::default() };
        assert!(more(judged.clone()).is_answer() && !more(judged).is_finite());
    }
}
