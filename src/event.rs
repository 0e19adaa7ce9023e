//! Domain types of what flows through Pointsman: names, unit queries and learnable examples.
//!
//! Parse, don't validate: a value of one of these types is already good. A query is finite and of unit norm, an
//! example's probabilities and reward are in range, so nothing behind this door has to ask again.

use std::borrow::Cow;
use std::fmt;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::eligible::Eligible;
use crate::wire::records::learner::ExampleRecord;

/// Name of a space: `[A-Za-z0-9._-]{1,64}`, not starting with a dot. Spaces name files, message keys and records.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Name(String);

/// Name of a model, as people write them (`BAAI/bge-small-en-v1.5`, `openai:text-embedding-3-large`):
/// `[A-Za-z0-9._:/@+-]{1,128}`, not starting with a dot or a slash.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ModelName(String);

/// Bytes of a bad name that an error quotes.
const QUOTED_BYTES_MAX: usize = 80;

/// At most `bytes_max` bytes of a text, cut between two characters. A cut text says how long it was.
pub fn excerpt(text: &str, bytes_max: usize) -> Cow<'_, str> {
    if text.len() <= bytes_max {
        return Cow::Borrowed(text);
    }
    let end = (0..=bytes_max).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
    Cow::Owned(format!("{}... ({} bytes)", &text[..end], text.len()))
}

/// Why a string is not a name. Long strings are quoted in part, since the error may travel with the event.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum BadName {
    /// Not a [`Name`].
    #[error("{0:?} is not a name of a space: use 1 to 64 characters of A-Z a-z 0-9 . _ -, not starting with a dot")]
    Space(String),
    /// Not a [`ModelName`].
    #[error(
        "{0:?} is not a name of a model: use 1 to 128 characters of A-Z a-z 0-9 . _ : / @ + -, not starting with a dot \
         or a slash"
    )]
    Model(String),
}

impl Name {
    /// The space of events that name none.
    pub fn default_space() -> Self {
        Self("default".to_owned())
    }

    /// Whether it is the space of events that name none.
    pub fn is_default(&self) -> bool {
        self.0 == "default"
    }

    fn is_valid(text: &str) -> bool {
        let allowed = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-');
        (1..=64).contains(&text.len()) && !text.starts_with('.') && text.bytes().all(allowed)
    }
}

impl ModelName {
    fn is_valid(text: &str) -> bool {
        let allowed = |b: u8| b.is_ascii_alphanumeric() || b"._:/@+-".contains(&b);
        (1..=128).contains(&text.len()) && !text.starts_with(['.', '/']) && text.bytes().all(allowed)
    }
}

macro_rules! impl_name {
    ($name:ident, $bad:path) => {
        impl $name {
            /// The name as text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl TryFrom<String> for $name {
            type Error = BadName;

            fn try_from(text: String) -> Result<Self, BadName> {
                match Self::is_valid(&text) {
                    true => Ok(Self(text)),
                    false => Err($bad(excerpt(&text, QUOTED_BYTES_MAX).into_owned())),
                }
            }
        }

        impl TryFrom<&str> for $name {
            type Error = BadName;

            fn try_from(text: &str) -> Result<Self, BadName> {
                Self::try_from(text.to_owned())
            }
        }

        impl From<$name> for String {
            fn from(name: $name) -> Self {
                name.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    };
}
impl_name!(Name, BadName::Space);
impl_name!(ModelName, BadName::Model);

/// A query embedding of unit Euclidean norm.
///
/// Scaling a query by c is the same as scaling (eta, beta, tau) by c², so unit norm is not optional.
#[derive(Debug, Clone, PartialEq)]
pub struct Query(Vec<f64>);

/// Why a vector cannot be a [`Query`].
#[derive(Debug, Error, PartialEq)]
pub enum BadQuery {
    /// A component is NaN or infinite.
    #[error("component {index} of the query is {value}: all components must be finite")]
    NotFinite {
        /// Position of the component.
        index: usize,
        /// Its value.
        value: f64,
    },
    /// All components are zero, so there is no direction to normalise to.
    #[error("the query is empty or the zero vector, which has no direction")]
    Zero,
    /// The number of components is not the space's dimension.
    #[error("the query has {found} components, but the space has dim = {expected}")]
    Dimension {
        /// Components of the query.
        found: usize,
        /// Dimension of the space.
        expected: usize,
    },
}

impl Query {
    /// Normalises `components` to unit norm.
    pub fn new(components: impl IntoIterator<Item = f64>) -> Result<Self, BadQuery> {
        let mut q: Vec<f64> = components.into_iter().collect();
        // Only magnitudes whose squares would overflow or vanish are scaled first, so that ordinary vectors keep
        // the bits that a plain division by the norm gives.
        let (smallest, largest) = (1e-100, 1e100);
        if !(q.iter().all(|x| x.abs() <= largest) && q.iter().any(|x| x.abs() >= smallest)) {
            scale(&mut q)?;
        }
        let norm = q.iter().map(|x| x * x).sum::<f64>().sqrt();
        q.iter_mut().for_each(|x| *x /= norm);
        Ok(Self(q))
    }

    /// Normalises single-precision components, as events carry them, in double precision.
    pub fn from_f32(components: &[f32]) -> Result<Self, BadQuery> {
        Self::new(components.iter().map(|&x| f64::from(x)))
    }

    /// Takes over components of a query that was saved. They are checked, not normalised again: a restored query has the
    /// bits of the saved one.
    pub fn from_unit(components: Vec<f64>) -> Option<Self> {
        let norm = components.iter().map(|x| x * x).sum::<f64>();
        ((norm - 1.0).abs() < 1e-9).then_some(Self(components))
    }

    /// Checks that the query belongs into a space of this dimension.
    pub fn check_dim(&self, expected: usize) -> Result<(), BadQuery> {
        let found = self.0.len();
        if found == expected { Ok(()) } else { Err(BadQuery::Dimension { found, expected }) }
    }

    /// The components.
    pub fn as_slice(&self) -> &[f64] {
        &self.0
    }
}

/// Scales components so that the largest is 1.
fn scale(q: &mut [f64]) -> Result<(), BadQuery> {
    if let Some(index) = q.iter().position(|x| !x.is_finite()) {
        return Err(BadQuery::NotFinite { index, value: q[index] });
    }
    let largest = q.iter().fold(0.0_f64, |m, x| m.max(x.abs()));
    if largest == 0.0 {
        return Err(BadQuery::Zero);
    }
    q.iter_mut().for_each(|x| *x /= largest);
    Ok(())
}

/// A query with the decision that was taken on it and what came of it: what a learner learns from.
#[derive(Debug, Clone, PartialEq)]
pub struct Example {
    query: Query,
    model: usize,
    propensities: Vec<f64>,
    policy: Option<Vec<f64>>,
    eligible: Eligible,
    /// The reward of the chosen model. Absent if the feedback is about other models only.
    reward: Option<f64>,
    /// Rewards of other models.
    others: Vec<(usize, f64)>,
    preference: Option<Preference>,
    /// Whether `propensities` is the distribution that the log states.
    is_stated: bool,
}

/// One model was preferred to another for a query.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Preference {
    /// Index of the model that was preferred.
    pub preferred: usize,
    /// Index of the other.
    pub over: usize,
}

/// Why an [`Example`] cannot be learned from.
#[derive(Debug, Error, PartialEq)]
pub enum BadExample {
    /// The query does not match the space.
    #[error(transparent)]
    Query(#[from] BadQuery),
    /// A probability vector does not have one entry per model.
    #[error("{field} has {found} entries, but the space has {expected} models")]
    Length {
        /// `propensities` or `policy`.
        field: &'static str,
        /// Number of entries.
        found: usize,
        /// Models of the space.
        expected: usize,
    },
    /// A probability is NaN or outside of 0..1.
    #[error("{field} contains {value}: probabilities must be between 0 and 1")]
    Probability {
        /// `propensities` or `policy`.
        field: &'static str,
        /// The offending value.
        value: f64,
    },
    /// The chosen model's index is beyond the space's models.
    #[error("the chosen model has index {0}, but the space has no such model")]
    Model(usize),
    /// The chosen model has propensity zero: it cannot have been drawn.
    #[error("the chosen model has propensity 0: it cannot have been drawn")]
    Impossible,
    /// The reward is NaN or outside of 0..1.
    #[error("reward {0} is not between 0 and 1: scale it to that range first")]
    Reward(f64),
    /// The chosen model was not eligible.
    #[error("the chosen model has index {0}, which is not eligible")]
    Ineligible(usize),
    /// A model has two rewards, or is preferred to itself.
    #[error("the feedback names the model of index {0} twice")]
    Twice(usize),
}

impl Example {
    /// An example; `policy` is the distribution before an exploration floor was mixed in, where it differs.
    pub fn new(
        query: Query,
        model: usize,
        propensities: Vec<f64>,
        policy: Option<Vec<f64>>,
        reward: f64,
    ) -> Result<Self, BadExample> {
        check_reward(reward)?;
        Ok(Self { reward: Some(reward), ..Self::unrewarded(query, model, propensities, policy)? })
    }

    /// The same without a reward of the chosen model: for feedback that is about others.
    pub fn unrewarded(
        query: Query,
        model: usize,
        propensities: Vec<f64>,
        policy: Option<Vec<f64>>,
    ) -> Result<Self, BadExample> {
        let expected = propensities.len();
        check_probabilities("propensities", &propensities, expected)?;
        if let Some(policy) = &policy {
            check_probabilities("policy", policy, expected)?;
        }
        match propensities.get(model) {
            None => return Err(BadExample::Model(model)),
            Some(&p) if p <= 0.0 => return Err(BadExample::Impossible),
            Some(_) => {}
        }
        Ok(Self {
            query,
            model,
            propensities,
            policy,
            eligible: Eligible::ALL,
            reward: None,
            others: Vec::new(),
            preference: None,
            is_stated: true,
        })
    }

    /// The same example of a decision among these models alone.
    pub fn among(self, eligible: Eligible) -> Result<Self, BadExample> {
        if let Some(mask) = eligible.mask() {
            let (found, expected) = (mask.len(), self.propensities.len());
            if found != expected {
                return Err(BadExample::Length { field: "eligible", found, expected });
            }
            if !mask[self.model] {
                return Err(BadExample::Ineligible(self.model));
            }
        }
        Ok(Self { eligible, ..self })
    }

    /// The same example with another reward of the chosen model, in 0..1, if it has one.
    pub fn valued(self, value: impl FnOnce(usize, f64) -> f64) -> Self {
        let reward = self.reward.map(|reward| value(self.model, reward).clamp(0.0, 1.0));
        Self { reward, ..self }
    }

    /// The same example with rewards of other models, each in 0..1.
    pub fn with_others(self, others: Vec<(usize, f64)>) -> Result<Self, BadExample> {
        for (i, &(model, reward)) in others.iter().enumerate() {
            check_reward(reward)?;
            if model >= self.propensities.len() {
                return Err(BadExample::Model(model));
            }
            if model == self.model || others[..i].iter().any(|(other, _)| *other == model) {
                return Err(BadExample::Twice(model));
            }
        }
        Ok(Self { others, ..self })
    }

    /// The same example with a preference between two models.
    pub fn with_preference(self, preference: Preference) -> Result<Self, BadExample> {
        let Preference { preferred, over } = preference;
        match preferred.max(over) {
            model if model >= self.propensities.len() => Err(BadExample::Model(model)),
            _ if preferred == over => Err(BadExample::Twice(over)),
            _ => Ok(Self { preference: Some(preference), ..self }),
        }
    }

    /// The same example with propensities that were guessed: completed from the probability of the chosen model alone, or those
    /// of the current policy. They are no statement about the log that could be tested.
    pub fn with_guessed_propensities(self) -> Self {
        Self { is_stated: false, ..self }
    }

    /// Whether the propensities are the distribution that the model was drawn from, as logged, declared or assumed as a whole.
    pub fn has_stated_propensities(&self) -> bool {
        self.is_stated
    }

    /// Checks that the example belongs into a space of this shape.
    pub fn check_shape(&self, dim: usize, models: usize) -> Result<(), BadExample> {
        self.query.check_dim(dim)?;
        let found = self.propensities.len();
        if found == models {
            Ok(())
        } else {
            Err(BadExample::Length { field: "propensities", found, expected: models })
        }
    }

    /// The query.
    pub fn query(&self) -> &Query {
        &self.query
    }

    /// Index of the model that was chosen.
    pub fn model(&self) -> usize {
        self.model
    }

    /// The distribution from which the model was drawn.
    pub fn propensities(&self) -> &[f64] {
        &self.propensities
    }

    /// The policy's own distribution: before a floor was mixed in, else the propensities.
    pub fn policy(&self) -> &[f64] {
        self.policy.as_deref().unwrap_or(&self.propensities)
    }

    /// The models that could be chosen.
    pub fn eligible(&self) -> &Eligible {
        &self.eligible
    }

    /// Whether the policy and the propensities give the chosen model different probabilities.
    pub fn is_weighted(&self) -> bool {
        self.policy()[self.model] != self.propensities[self.model]
    }

    /// The reward of the chosen model, in 0..1, if the feedback has one.
    pub fn reward(&self) -> Option<f64> {
        self.reward
    }

    /// All known rewards by model: that of the chosen model first, if it is known.
    pub fn rewards(&self) -> impl Iterator<Item = (usize, f64)> {
        self.reward.map(|reward| (self.model, reward)).into_iter().chain(self.others.iter().copied())
    }

    /// The preference between two models, if there is one.
    pub fn preference(&self) -> Option<Preference> {
        self.preference
    }

    /// The reward of the chosen model, if it is all that the feedback says.
    pub fn only_reward(&self) -> Option<f64> {
        self.reward.filter(|_| self.others.is_empty())
    }

    /// Replaces a preference by rewards that differ as it says: `predicted` are those of all models, as far as they are known.
    /// Each model gets half of the difference, above and below the middle of the two predictions, as far as 0..1 permits. A model
    /// with a reward of its own keeps that.
    pub fn with_preference_as_rewards(&self, predicted: &[f64]) -> Self {
        let Some(Preference { preferred, over }) = self.preference else { return self.clone() };
        let middle = 0.5 * (predicted[preferred] + predicted[over]);
        let mut example = Self { preference: None, ..self.clone() };
        for (model, target) in [(preferred, (middle + 0.5).min(1.0)), (over, (middle - 0.5).max(0.0))] {
            if self.rewards().all(|(known, _)| known != model) {
                match model == self.model {
                    true => example.reward = Some(target),
                    false => example.others.push((model, target)),
                }
            }
        }
        example
    }

    /// Its record.
    pub fn record(&self) -> ExampleRecord {
        let Self { query: Query(query), model, propensities, policy, eligible, reward, others, .. } = self.clone();
        ExampleRecord {
            query,
            model: model as u64,
            propensities,
            policy,
            reward,
            eligible: eligible.mask().map(<[bool]>::to_vec),
            others: others.into_iter().map(|(model, reward)| (model as u64, reward)).collect(),
            preference: self.preference.map(|Preference { preferred, over }| (preferred as u64, over as u64)),
        }
    }

    /// Restores a record; none if it holds impossible values.
    pub fn from_record(record: ExampleRecord) -> Option<Self> {
        let ExampleRecord { query, model, propensities, policy, reward, eligible, others, preference } = record;
        let (query, index) = (Query::from_unit(query)?, |model: u64| usize::try_from(model).ok());
        let others = others.into_iter().map(|(model, reward)| Some((index(model)?, reward))).collect::<Option<_>>()?;
        let eligible = eligible.map_or(Some(Eligible::ALL), Eligible::only)?;
        let example = match reward {
            Some(reward) => Self::new(query, index(model)?, propensities, policy, reward),
            None => Self::unrewarded(query, index(model)?, propensities, policy),
        };
        let mut example = example.ok()?.among(eligible).ok()?.with_others(others).ok()?;
        if let Some((preferred, over)) = preference {
            let preference = Preference { preferred: index(preferred)?, over: index(over)? };
            example = example.with_preference(preference).ok()?;
        }
        Some(example)
    }
}

fn check_reward(reward: f64) -> Result<(), BadExample> {
    if (0.0..=1.0).contains(&reward) { Ok(()) } else { Err(BadExample::Reward(reward)) }
}

fn check_probabilities(field: &'static str, values: &[f64], expected: usize) -> Result<(), BadExample> {
    if values.len() != expected {
        return Err(BadExample::Length { field, found: values.len(), expected });
    }
    match values.iter().find(|p| !(0.0..=1.0).contains(*p)) {
        Some(&value) => Err(BadExample::Probability { field, value }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        for good in ["a", "bge-small_v1.5", "9", &"x".repeat(64)] {
            assert_eq!(Name::try_from(good).unwrap().as_str(), good);
        }
        for bad in ["", ".hidden", "a b", "ä", "a/b", "a:b", &"x".repeat(65)] {
            assert_eq!(Name::try_from(bad), Err(BadName::Space(bad.to_owned())));
        }
        for good in ["BAAI/bge-small-en-v1.5", "openai:text-embedding-3-large", "m@2+q8", "_", &"x".repeat(128)] {
            assert_eq!(ModelName::try_from(good).unwrap().as_str(), good);
        }
        for bad in ["", ".hidden", "/etc", "a b", "ä", "a\n", "a\"b", "a\\b", &"x".repeat(129)] {
            assert!(matches!(ModelName::try_from(bad), Err(BadName::Model(_))), "{bad}");
        }
    }

    #[test]
    fn long_names_are_quoted_in_part() {
        let Err(BadName::Space(quoted)) = Name::try_from("x".repeat(600_000)) else { panic!("it is too long") };
        assert_eq!(quoted, format!("{}... (600000 bytes)", "x".repeat(80)));
        assert_eq!(excerpt("aää", 2), "a... (5 bytes)", "cut between characters");
        assert_eq!(excerpt("aää", 5), "aää");
    }

    #[test]
    fn queries_are_normalised_at_any_magnitude() {
        for scale in [1.0, 1e-308, 1e-160, 1e160, 1e307] {
            let q = Query::new([3.0 * scale, -4.0 * scale]).unwrap();
            assert!((q.as_slice()[0] - 0.6).abs() < 1e-15 && (q.as_slice()[1] + 0.8).abs() < 1e-15, "{scale}");
        }
        assert_eq!(Query::new([0.0, -0.0]), Err(BadQuery::Zero));
        assert_eq!(Query::new([]), Err(BadQuery::Zero));
        assert!(matches!(Query::from_f32(&[1.0, f32::NAN]), Err(BadQuery::NotFinite { index: 1, .. })));
        assert!(matches!(Query::new([f64::INFINITY]), Err(BadQuery::NotFinite { index: 0, .. })));
    }

    #[test]
    fn bad_examples_are_refused() {
        let query = || Query::new([1.0, 0.0]).unwrap();
        let example = |model, p: &[f64], policy: Option<&[f64]>, reward| {
            Example::new(query(), model, p.to_vec(), policy.map(<[f64]>::to_vec), reward)
        };
        let half = [0.5, 0.5];
        assert!(example(0, &half, Some(&half), 1.0).is_ok());
        assert_eq!(example(2, &half, None, 1.0), Err(BadExample::Model(2)));
        assert_eq!(example(1, &[1.0, 0.0], None, 1.0), Err(BadExample::Impossible));
        for reward in [f64::NAN, f64::INFINITY, -0.1, 1.1] {
            assert!(matches!(example(0, &half, None, reward), Err(BadExample::Reward(_))), "{reward}");
        }
        for p in [[0.5, f64::NAN], [0.5, -0.5], [0.5, 1.5]] {
            assert!(matches!(example(0, &p, None, 1.0), Err(BadExample::Probability { .. })));
            assert!(matches!(example(0, &half, Some(&p), 1.0), Err(BadExample::Probability { field: "policy", .. })));
        }
        assert!(matches!(example(0, &half, Some(&[1.0]), 1.0), Err(BadExample::Length { .. })));
        let good = || example(0, &half, None, 1.0).unwrap();
        assert_eq!(good().among(Eligible::only(vec![false, true]).unwrap()), Err(BadExample::Ineligible(0)));
        assert!(good().among(Eligible::only(vec![true, false, true]).unwrap()).is_err());
        assert_eq!(good().with_others(vec![(0, 0.5)]), Err(BadExample::Twice(0)));
        assert_eq!(good().with_others(vec![(2, 0.5)]), Err(BadExample::Model(2)));
        assert!(good().with_others(vec![(1, 1.5)]).is_err());
        assert_eq!(good().with_preference(Preference { preferred: 1, over: 1 }), Err(BadExample::Twice(1)));
        let rich =
            good().among(Eligible::only(vec![true, false]).unwrap()).unwrap().with_others(vec![(1, 0.25)]).unwrap();
        let rich = rich.with_preference(Preference { preferred: 1, over: 0 }).unwrap();
        assert_eq!(rich.rewards().collect::<Vec<_>>(), [(0, 1.0), (1, 0.25)]);
        assert_eq!(Example::from_record(rich.record()), Some(rich));
        assert!(example(0, &half, None, 1.0).unwrap().check_shape(3, 2).is_err());
        assert!(example(0, &half, None, 1.0).unwrap().check_shape(2, 3).is_err());
    }
}
