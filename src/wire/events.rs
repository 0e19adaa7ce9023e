//! Events as JSON: one object per message or line, with the default field names or mapped ones. Routers write the default
//! names, so with mapped names both layouts are read.
//!
//! Parsing validates input: accepted events are well-formed, and rejected ones have a reason code, by which dead letters are
//! counted. The engine, which knows the spaces, checks dimension and models.
//!
//! The semantics are defined here, on a tree of JSON values. Valid events in a common shape take a faster path in
//! `quick.rs`, with the same result.

use std::collections::BTreeMap;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use thiserror::Error;

use crate::config::{EventsSpec, Fields, OutcomeField, RewardSpec, Settings, TimeUnit};
use crate::engine::Side;
use crate::event::{BadName, ModelName, Name};
use crate::feedback::{Feedback, MoreFeedback};
use crate::router::Answer;
use crate::timestamp;
use crate::wire::quick::{Found, Plan, Time};

/// A decision that a router took.
#[derive(Debug, Clone, PartialEq)]
pub struct QueryEvent {
    /// Join key within its space.
    pub request_id: String,
    /// Its space.
    pub space: Name,
    /// When the decision was taken.
    pub ts_ms: i64,
    /// The query: finite, not zero, not normalised.
    pub query: Vec<f32>,
    /// The model that was chosen.
    pub model: ModelName,
    /// The known part of the distribution that it was drawn from.
    pub propensities: Propensities,
    /// The distribution before the floor was mixed in, where it differs.
    pub policy: Option<Vec<(ModelName, f64)>>,
    /// Version of the parameters that decided, if a router of ours did.
    pub params_version: Option<u64>,
    /// Outcomes that were known when the decision was taken, clipped to their ranges.
    pub outcomes: BTreeMap<String, f64>,
    /// Whether it was drawn by a key that several requests share.
    pub is_keyed: bool,
}

/// The known part of the distribution that a model was drawn from.
#[derive(Debug, Clone, PartialEq)]
pub enum Propensities {
    /// All of it.
    Full(Vec<(ModelName, f64)>),
    /// The probability of the model that was chosen.
    Chosen(f64),
    /// Nothing.
    Unknown,
}

/// The feedback on a decision.
#[derive(Debug, Clone, PartialEq)]
pub struct RewardEvent {
    /// Its request.
    pub request_id: String,
    /// Its space.
    pub space: Name,
    /// Event time.
    pub ts_ms: i64,
    /// What it says of the decision.
    pub feedback: Feedback,
    /// Identifies it among the rewards of the request, if present.
    pub event_id: Option<String>,
}

/// Why an event is malformed.
#[derive(Debug, Clone, Error, PartialEq)]
pub enum Bad {
    /// Not a JSON object.
    #[error("not a JSON object: {0}")]
    NotJson(String),
    /// A field is missing.
    #[error("{0} is missing")]
    MissingField(String),
    /// A field has the wrong type.
    #[error("{field} must be {expected}")]
    MistypedField {
        /// Its JSON pointer.
        field: String,
        /// What it must be.
        expected: &'static str,
    },
    /// A name is invalid, or a request ID is empty or too long.
    #[error("{field}: {problem}")]
    BadName {
        /// Its JSON pointer.
        field: String,
        /// What is wrong with it.
        problem: String,
    },
    /// The query does not have the dimension of the space.
    #[error("the query has {found} components, but the space has dim = {expected}")]
    WrongDimension {
        /// Components of the query.
        found: usize,
        /// Dimension of the space.
        expected: usize,
    },
    /// A number is NaN or infinite.
    #[error("{0} contains a number that is not finite")]
    NotFinite(String),
    /// The query has no direction.
    #[error("the query is the zero vector")]
    ZeroVector,
    /// The space never had this model.
    #[error("the space has no model {0}: add it to learner.models")]
    UnknownModel(ModelName),
    /// The probabilities are not a distribution.
    #[error("{field}: {problem}")]
    BadPropensities {
        /// Its JSON pointer.
        field: String,
        /// What is wrong with them.
        problem: String,
    },
    /// The chosen model has propensity 0: it cannot have been drawn.
    #[error("the chosen model {0} has propensity 0")]
    ImpossibleChoice(ModelName),
    /// The event has no propensities, and none may be assumed.
    #[error("the event has no propensities, and learner.missing_propensities = \"reject\"")]
    MissingPropensities,
    /// The reward is outside of its range, and may not be clipped.
    #[error("reward {reward} is outside of reward.range {low}..{high}, and reward.out_of_range = \"reject\"")]
    RewardOutOfRange {
        /// The reward.
        reward: f64,
        /// The range's lower end.
        low: f64,
        /// The range's upper end.
        high: f64,
    },
    /// The feedback contradicts itself.
    #[error("{field}: {problem}")]
    BadFeedback {
        /// Its JSON pointer.
        field: String,
        /// What is wrong with it.
        problem: String,
    },
    /// The message is larger than allowed.
    #[error("the event has {bytes} bytes, more than events.bytes_max = {most}")]
    Oversized {
        /// Its size.
        bytes: usize,
        /// What is allowed.
        most: usize,
    },
    /// Its timestamp is too far ahead of that of its record.
    #[error("ts_ms is {ahead_ms} ms ahead of the record timestamp, more than join.future_ms = {most_ms}")]
    FutureTime {
        /// By how much.
        ahead_ms: u64,
        /// What is allowed.
        most_ms: u64,
    },
    /// Its time is far ahead of all other events of its space.
    #[error(
        "ts_ms is {0} ms ahead of the event time of the space, and later events contradict it: check that it is in \
         milliseconds"
    )]
    Unconfirmed(u64),
    /// Its header names a format that is not known.
    #[error("content-type {0:?} is not supported: send JSON")]
    ContentType(String),
    /// Its space belongs to another partition.
    #[error(
        "the event is in partition {found}, but the key of its space maps to partition {expected}: use the space as the \
         message key (transport.kafka.lanes = \"partition\")"
    )]
    WrongPartition {
        /// Where it was.
        found: i32,
        /// Where it should be.
        expected: i32,
    },
    /// Messages that were skipped, since they cannot be read.
    #[error("skipped unreadable offsets {from} to {to} (--accept-gap): {problem}")]
    Gap {
        /// The first offset.
        from: u64,
        /// The offset after the last.
        to: u64,
        /// Why they cannot be read.
        problem: String,
    },
    /// A new space beyond those that may be.
    #[error("the limit of learner.spaces_max = {0} spaces is reached: raise it")]
    TooManySpaces(usize),
    /// Its space is not listed.
    #[error("space {0} is not listed in [spaces], and learner.spaces = \"listed\": add it to [spaces]")]
    UnlistedSpace(Name),
}

impl Bad {
    /// The reason code, by which dead letters are counted.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::NotJson(_) => "not-json",
            Self::MissingField(_) => "missing-field",
            Self::MistypedField { .. } => "mistyped-field",
            Self::BadName { .. } => "bad-name",
            Self::WrongDimension { .. } => "wrong-dimension",
            Self::NotFinite(_) => "not-finite",
            Self::ZeroVector => "zero-vector",
            Self::UnknownModel(_) => "unknown-model",
            Self::BadPropensities { .. } => "bad-propensities",
            Self::ImpossibleChoice(_) => "impossible-choice",
            Self::MissingPropensities => "missing-propensities",
            Self::RewardOutOfRange { .. } => "reward-out-of-range",
            Self::BadFeedback { .. } => "bad-feedback",
            Self::Oversized { .. } => "oversized",
            Self::FutureTime { .. } | Self::Unconfirmed(_) => "future-time",
            Self::ContentType(_) => "content-type",
            Self::WrongPartition { .. } => "wrong-partition",
            Self::Gap { .. } => "gap",
            Self::TooManySpaces(_) => "too-many-spaces",
            Self::UnlistedSpace(_) => "unlisted-space",
        }
    }
}

/// Where routers say that a decision was drawn by another key than its request ID.
pub(super) const DRAW_KEY: &str = "/draw_key";

/// Where routers write outcomes.
const OUTCOMES: &str = "/outcomes";

/// Tolerance of the sum of propensities.
const SUM_TOLERANCE: f64 = 1e-6;

/// Longest request or event id, in bytes.
pub const ID_MAX: usize = 256;

/// Fields that events of a router have, and few others.
const OWN_QUERY: &[u8] = b"\"params_version\"";
const OWN_REWARD: &[u8] = b"\"ts_ms\"";

fn contains(bytes: &[u8], part: &[u8]) -> bool {
    memchr::memmem::find(bytes, part).is_some()
}

/// Reads events.
///
/// With mapped fields, an event that cannot be read by the map, or lacks propensities by it, is read in the layout that
/// routers write: a router and the logs of another program can share a configuration, and a topic.
#[derive(Debug, Clone)]
pub struct Parser {
    events: EventsSpec,
    reward: RewardSpec,
    requires_propensities: bool,
    future_ms: u64,
    queries: Option<Plan>,
    rewards: Option<Plan>,
    /// Reads the layout that routers write, if the configuration describes another one.
    own: Option<Box<Parser>>,
}

impl Parser {
    /// A parser with this configuration.
    pub fn new(settings: &Settings) -> Self {
        let own = settings.events.in_own_layout();
        let own = (own != settings.events).then(|| Box::new(Self::of(settings, own, true)));
        Self { own, ..Self::of(settings, settings.events.clone(), settings.requires_propensities()) }
    }

    fn of(settings: &Settings, events: EventsSpec, requires_propensities: bool) -> Self {
        Self {
            reward: settings.reward,
            requires_propensities,
            future_ms: settings.future_ms,
            queries: Plan::of_queries(&events.fields, &events.outcome_fields()),
            rewards: Plan::of_rewards(events.reward_fields(), &events.outcome_fields()),
            events,
            own: None,
        }
    }

    /// The same without the fast path: the reference for tests and benchmarks.
    pub fn by_tree(self) -> Self {
        let own = self.own.map(|own| Box::new(own.by_tree()));
        Self { queries: None, rewards: None, own, ..self }
    }

    /// Where the fields of events of a side are.
    pub fn fields(&self, side: Side) -> &Fields {
        match side {
            Side::Query => &self.events.fields,
            Side::Reward => self.events.reward_fields(),
        }
    }

    /// Where outcomes are.
    pub fn outcome_fields(&self) -> Vec<String> {
        self.events.outcome_fields()
    }

    /// Maximum size of a message.
    pub fn bytes_max(&self) -> usize {
        self.events.bytes_max
    }

    /// Reads a query event; `record_ms` is when the log says that it was written, if it says so.
    pub fn query(&self, bytes: &[u8], record_ms: Option<i64>) -> Result<QueryEvent, Bad> {
        let read = match self.quick_query(bytes, record_ms) {
            Some(event) => Ok(event),
            None => self.query_by_tree(bytes, record_ms),
        };
        let suffices = read.as_ref().is_ok_and(|event| event.propensities != Propensities::Unknown);
        match &self.own {
            Some(own) if !suffices && contains(bytes, OWN_QUERY) => own.query(bytes, record_ms).or(read),
            _ => read,
        }
    }

    /// Reads a reward event; `record_ms` is when the log says that it was written, if it says so.
    pub fn reward(&self, bytes: &[u8], record_ms: Option<i64>) -> Result<RewardEvent, Bad> {
        let read = match self.quick_reward(bytes, record_ms) {
            Some(event) => Ok(event),
            None => self.reward_by_tree(bytes, record_ms),
        };
        match &self.own {
            Some(own) if read.is_err() && contains(bytes, OWN_REWARD) => own.reward(bytes, record_ms).or(read),
            _ => read,
        }
    }

    fn query_by_tree(&self, bytes: &[u8], record_ms: Option<i64>) -> Result<QueryEvent, Bad> {
        let object = self.object(bytes)?;
        let fields = &self.events.fields;
        Ok(QueryEvent {
            request_id: id(required(&object, &fields.request_id)?, &fields.request_id)?,
            space: space(&object, &fields.space)?,
            ts_ms: self.time(&object, &fields.ts_ms, record_ms)?,
            query: vector(required(&object, &fields.query)?, &fields.query)?,
            model: name(required(&object, &fields.model)?, &fields.model)?,
            propensities: self.propensities(&object)?,
            policy: optional(&object, &fields.policy).map(|value| distribution(value, &fields.policy)).transpose()?,
            params_version: optional(&object, &fields.params_version).and_then(Value::as_u64),
            outcomes: self.outcomes(&object)?,
            is_keyed: optional(&object, DRAW_KEY).is_some(),
        })
    }

    fn reward_by_tree(&self, bytes: &[u8], record_ms: Option<i64>) -> Result<RewardEvent, Bad> {
        let object = self.object(bytes)?;
        let fields = self.events.reward_fields();
        let event_id = |value| id(value, &fields.event_id);
        let reward = optional(&object, &fields.reward).map(|value| self.reward_value(value, &fields.reward));
        let failed = optional(&object, &fields.failed).map(|value| boolean(value, &fields.failed)).transpose()?;
        let rewards = optional(&object, &fields.rewards).map(|value| by_model(value, &fields.rewards)).transpose()?;
        let model = |field: &str| optional(&object, field).map(|value| name(value, field)).transpose();
        let feedback = self.feedback(
            reward.transpose()?,
            self.outcomes(&object)?,
            failed.unwrap_or_default(),
            rewards.unwrap_or_default(),
            (model(&fields.preferred)?, model(&fields.over)?),
        )?;
        // Outcomes that are not configured are ignored, also if nothing else is there.
        if feedback == Feedback::default() && !optional(&object, OUTCOMES).is_some_and(Value::is_object) {
            return Err(Bad::MissingField(fields.reward.clone()));
        }
        Ok(RewardEvent {
            feedback,
            request_id: id(required(&object, &fields.request_id)?, &fields.request_id)?,
            space: space(&object, &fields.space)?,
            ts_ms: self.time(&object, &fields.ts_ms, record_ms)?,
            event_id: optional(&object, &fields.event_id).map(event_id).transpose()?,
        })
    }

    /// A query event that is good and in a common shape; what is found is judged as that of a tree is.
    fn quick_query(&self, bytes: &[u8], record_ms: Option<i64>) -> Option<QueryEvent> {
        let plan = self.queries.as_ref().filter(|_| bytes.len() <= self.events.bytes_max)?;
        let found = plan.read(bytes)?;
        let fields = &self.events.fields;
        let Found { request_id, space, ts_ms, query, model, propensities, propensity, policy, .. } = found;
        let Found { params_version, outcomes, is_keyed, .. } = found;
        let known = |all| check_distribution(all, &fields.policy);
        Some(QueryEvent {
            request_id: check_id(request_id?, &fields.request_id).ok()?,
            space: space.unwrap_or_else(Name::default_space),
            ts_ms: self.check_time(self.to_ms(ts_ms)?, &fields.ts_ms, record_ms).ok()?,
            query: check_vector(query?, &fields.query).ok()?,
            model: model?,
            propensities: match propensities {
                Some(all) => Propensities::Full(check_distribution(all, &fields.propensities).ok()?),
                None => self.check_propensity(propensity, policy.is_some()).ok()?,
            },
            policy: policy.map(known).transpose().ok()?,
            params_version,
            outcomes: self.clipped(outcomes)?,
            is_keyed,
        })
    }

    /// A reward event that is good and in a common shape; what is found is judged as that of a tree is.
    fn quick_reward(&self, bytes: &[u8], record_ms: Option<i64>) -> Option<RewardEvent> {
        let plan = self.rewards.as_ref().filter(|_| bytes.len() <= self.events.bytes_max)?;
        let found = plan.read(bytes)?;
        let Found { request_id, space, ts_ms, reward, event_id, .. } = found;
        let Found { outcomes, failed, rewards, preferred, over, .. } = found;
        let fields = self.events.reward_fields();
        let (failed, rewards) = (failed.unwrap_or_default(), rewards.unwrap_or_default());
        Some(RewardEvent {
            feedback: self
                .feedback(reward, self.clipped(outcomes)?, failed, rewards, (preferred, over))
                .ok()
                .filter(|feedback| *feedback != Feedback::default())?,
            request_id: check_id(request_id?, &fields.request_id).ok()?,
            space: space.unwrap_or_else(Name::default_space),
            ts_ms: self.check_time(self.to_ms(ts_ms)?, &fields.ts_ms, record_ms).ok()?,
            event_id: event_id.map(|id| check_id(id, &fields.event_id)).transpose().ok()?,
        })
    }

    fn object(&self, bytes: &[u8]) -> Result<Value, Bad> {
        if bytes.len() > self.events.bytes_max {
            return Err(Bad::Oversized { bytes: bytes.len(), most: self.events.bytes_max });
        }
        match serde_json::from_slice(bytes) {
            Ok(value @ Value::Object(_)) => Ok(value),
            Ok(_) => Err(Bad::NotJson("it is another JSON value".to_owned())),
            Err(error) => Err(Bad::NotJson(error.to_string())),
        }
    }

    fn time(&self, object: &Value, field: &str, record_ms: Option<i64>) -> Result<i64, Bad> {
        let unit = self.events.time_unit;
        let decimal = |seconds: f64| (unit == TimeUnit::S).then(|| (1000.0 * seconds).round() as i64);
        let to_ms = |value: &Value| match value {
            Value::String(text) => timestamp::parse(text),
            _ => value.as_i64().map_or_else(|| decimal(value.as_f64()?), |number| unit.to_ms(number)),
        };
        let expected = match unit {
            TimeUnit::S => "a number of seconds since 1970 (events.time_unit = \"s\") or a time in RFC 3339",
            TimeUnit::Ms => "a whole number of milliseconds since 1970 (see events.time_unit) or a time in RFC 3339",
            TimeUnit::Us => "a whole number of microseconds (events.time_unit = \"us\") or a time in RFC 3339",
            TimeUnit::Ns => "a whole number of nanoseconds (events.time_unit = \"ns\") or a time in RFC 3339",
        };
        let mistyped = || Bad::MistypedField { field: field.to_owned(), expected };
        let logged = optional(object, field).map(|value| to_ms(value).ok_or_else(mistyped));
        self.check_time(logged.transpose()?, field, record_ms)
    }

    /// A logged time in milliseconds, if there is one; none if it is not in a common form.
    fn to_ms(&self, logged: Option<Time>) -> Option<Option<i64>> {
        logged
            .map(|time| match time {
                Time::Number(number) => self.events.time_unit.to_ms(number),
                Time::Text(text) => timestamp::parse(&text),
            })
            .map_or(Some(None), |ms| ms.map(Some))
    }

    fn check_time(&self, logged_ms: Option<i64>, field: &str, record_ms: Option<i64>) -> Result<i64, Bad> {
        let missing = || Bad::MissingField(field.to_owned());
        let ts_ms = logged_ms.or(record_ms).ok_or_else(missing)?;
        let ahead_ms = record_ms.map_or(0, |record_ms| ts_ms.saturating_sub(record_ms).max(0).unsigned_abs());
        match ahead_ms > self.future_ms {
            true => Err(Bad::FutureTime { ahead_ms, most_ms: self.future_ms }),
            false => Ok(ts_ms),
        }
    }

    /// A reward: a number, true for 1 and false for 0, or a word of `reward.values`.
    fn reward_value(&self, value: &Value, field: &str) -> Result<f64, Bad> {
        match value {
            Value::Bool(is_true) => Ok(f64::from(u8::from(*is_true))),
            Value::String(word) => self.events.reward_values.get(word).copied().ok_or_else(|| {
                let expected = "a number, true or false, or a word that reward.values maps to a number";
                Bad::MistypedField { field: field.to_owned(), expected }
            }),
            _ => number(value, field),
        }
    }

    /// Feedback of these parts. Rewards must be within the range, if those outside of it are rejected.
    fn feedback(
        &self,
        reward: Option<f64>,
        outcomes: BTreeMap<String, f64>,
        failed: bool,
        rewards: Vec<(ModelName, f64)>,
        preference: (Option<ModelName>, Option<ModelName>),
    ) -> Result<Feedback, Bad> {
        let fields = self.events.reward_fields();
        let preference = match preference {
            (None, None) => None,
            (Some(preferred), Some(over)) if preferred == over => {
                let problem = format!("{over} cannot be preferred to itself");
                return Err(Bad::BadFeedback { field: fields.over.clone(), problem });
            }
            (Some(preferred), Some(over)) => Some((preferred, over)),
            (Some(_), None) => return Err(Bad::MissingField(fields.over.clone())),
            (None, Some(_)) => return Err(Bad::MissingField(fields.preferred.clone())),
        };
        let reward = reward.map(|reward| self.in_range(reward)).transpose()?;
        let rewards = rewards.into_iter().map(|(model, reward)| Ok((model, self.in_range(reward)?)));
        let more = MoreFeedback { outcomes, failed, rewards: rewards.collect::<Result<_, Bad>>()?, preference };
        let more = (more != MoreFeedback::default()).then(|| Box::new(more));
        Ok(Feedback { reward, more })
    }

    /// The configured outcomes of an event, clipped to their ranges.
    fn outcomes(&self, object: &Value) -> Result<BTreeMap<String, f64>, Bad> {
        let known = self.events.outcomes.iter().filter_map(|one| Some((one, optional(object, &one.field)?)));
        known.map(|(one, value)| Ok((one.name.clone(), one.clip(number(value, &one.field)?)))).collect()
    }

    /// The same of outcomes by index; `None` if one is not finite.
    fn clipped(&self, outcomes: Vec<(usize, f64)>) -> Option<BTreeMap<String, f64>> {
        let outcome = |(j, value): (usize, f64)| {
            let one: &OutcomeField = &self.events.outcomes[j];
            value.is_finite().then(|| (one.name.clone(), one.clip(value)))
        };
        outcomes.into_iter().map(outcome).collect()
    }

    fn in_range(&self, reward: f64) -> Result<f64, Bad> {
        let RewardSpec { low, high, reject, .. } = self.reward;
        match reject && !(low..=high).contains(&reward) {
            true => Err(Bad::RewardOutOfRange { reward, low, high }),
            false => Ok(reward),
        }
    }

    fn propensities(&self, object: &Value) -> Result<Propensities, Bad> {
        let fields = &self.events.fields;
        if let Some(value) = optional(object, &fields.propensities) {
            return distribution(value, &fields.propensities).map(Propensities::Full);
        }
        let chosen = optional(object, &fields.propensity);
        let has_policy = optional(object, &fields.policy).is_some();
        self.check_enough(chosen.is_some(), has_policy)?;
        let chosen = chosen.map(|value| number(value, &fields.propensity)).transpose()?;
        self.check_propensity(chosen, has_policy)
    }

    fn check_enough(&self, has_propensity: bool, has_policy: bool) -> Result<(), Bad> {
        // The policy and the chosen model's propensity are all that learning needs.
        let enough = has_propensity && has_policy;
        match self.requires_propensities && !enough {
            true => Err(Bad::MissingPropensities),
            false => Ok(()),
        }
    }

    fn check_propensity(&self, chosen: Option<f64>, has_policy: bool) -> Result<Propensities, Bad> {
        self.check_enough(chosen.is_some(), has_policy)?;
        let Some(chosen) = chosen else { return Ok(Propensities::Unknown) };
        match chosen > 0.0 && chosen <= 1.0 {
            true => Ok(Propensities::Chosen(chosen)),
            false => {
                Err(bad_propensities(&self.events.fields.propensity, format!("{chosen} must be above 0 and at most 1")))
            }
        }
    }
}

/// A decision as an event, with the end of its line. Its distributions have the eligible models alone.
pub fn query_line(request_id: &str, ts_ms: i64, query: &[f32], answer: &Answer) -> Vec<u8> {
    let bytes: Vec<u8> = query.iter().flat_map(|x| x.to_le_bytes()).collect();
    let distribution = &answer.distribution;
    let mut event = json!({
        "request_id": request_id,
        "space": answer.by.space(),
        "ts_ms": ts_ms,
        "query": STANDARD.encode(bytes),
        "model": answer.model_name(),
        "propensities": answer.by_name(&distribution.propensities),
        "params_version": answer.by.params().version,
    });
    if distribution.policy != distribution.propensities {
        event["policy"] = json!(answer.by_name(&distribution.policy));
    }
    if let Some(draw_key) = &answer.draw_key {
        event["draw_key"] = json!(draw_key);
    }
    format!("{event}\n").into_bytes()
}

/// What came of a request as a reward event, with the end of its line. It has the fields that the feedback has.
pub fn reward_line(request_id: &str, space: &Name, ts_ms: i64, feedback: &Feedback, event_id: Option<&str>) -> Vec<u8> {
    let mut event = json!({"request_id": request_id, "space": space, "ts_ms": ts_ms});
    if let Some(reward) = feedback.reward {
        event["reward"] = json!(reward);
    }
    if let Some(more) = &feedback.more {
        if !more.outcomes.is_empty() {
            event["outcomes"] = json!(more.outcomes);
        }
        if more.failed {
            event["failed"] = json!(true);
        }
        if !more.rewards.is_empty() {
            event["rewards"] = json!(more.rewards);
        }
        if let Some((preferred, over)) = &more.preference {
            event["preferred"] = json!(preferred);
            event["over"] = json!(over);
        }
    }
    if let Some(event_id) = event_id {
        event["event_id"] = json!(event_id);
    }
    format!("{event}\n").into_bytes()
}

fn bad_propensities(field: &str, problem: String) -> Bad {
    Bad::BadPropensities { field: field.to_owned(), problem }
}

fn optional<'a>(object: &'a Value, field: &str) -> Option<&'a Value> {
    object.pointer(field).filter(|value| !value.is_null())
}

fn required<'a>(object: &'a Value, field: &str) -> Result<&'a Value, Bad> {
    optional(object, field).ok_or_else(|| Bad::MissingField(field.to_owned()))
}

fn text<'a>(value: &'a Value, field: &str) -> Result<&'a str, Bad> {
    value.as_str().ok_or_else(|| Bad::MistypedField { field: field.to_owned(), expected: "a string" })
}

fn name<'a, N: TryFrom<&'a str, Error = BadName>>(value: &'a Value, field: &str) -> Result<N, Bad> {
    check_name(text(value, field)?, field)
}

fn check_name<'a, N: TryFrom<&'a str, Error = BadName>>(text: &'a str, field: &str) -> Result<N, Bad> {
    N::try_from(text).map_err(|bad| Bad::BadName { field: field.to_owned(), problem: bad.to_string() })
}

fn space(object: &Value, field: &str) -> Result<Name, Bad> {
    optional(object, field).map_or_else(|| Ok(Name::default_space()), |value| name(value, field))
}

/// An ID: a string, or a whole number, which stands for its digits.
fn id(value: &Value, field: &str) -> Result<String, Bad> {
    match value.as_i64() {
        Some(number) => Ok(number.to_string()),
        None => {
            let expected = "a string or a whole number";
            let text = value.as_str().ok_or_else(|| Bad::MistypedField { field: field.to_owned(), expected })?;
            check_id(text.to_owned(), field)
        }
    }
}

fn check_id(id: String, field: &str) -> Result<String, Bad> {
    match (1..=ID_MAX).contains(&id.len()) {
        true => Ok(id),
        false => Err(Bad::BadName { field: field.to_owned(), problem: format!("must have 1 to {ID_MAX} bytes") }),
    }
}

fn number(value: &Value, field: &str) -> Result<f64, Bad> {
    let number = value.as_f64().ok_or_else(|| Bad::MistypedField { field: field.to_owned(), expected: "a number" })?;
    if number.is_finite() { Ok(number) } else { Err(Bad::NotFinite(field.to_owned())) }
}

fn boolean(value: &Value, field: &str) -> Result<bool, Bad> {
    value.as_bool().ok_or_else(|| Bad::MistypedField { field: field.to_owned(), expected: "true or false" })
}

/// Reads a query's components: finite, not all zero. `field` is what errors call it.
pub(crate) fn vector(value: &Value, field: &str) -> Result<Vec<f32>, Bad> {
    let expected = "an array of numbers or base64 of little-endian f32";
    let mistyped = || Bad::MistypedField { field: field.to_owned(), expected };
    let components: Vec<f32> = match value {
        Value::Array(items) => {
            items.iter().map(|x| x.as_f64().map(|x| x as f32)).collect::<Option<_>>().ok_or_else(mistyped)?
        }
        Value::String(text) => {
            let bytes = STANDARD.decode(text).map_err(|_| mistyped())?;
            let (words, rest) = bytes.as_chunks::<4>();
            if !rest.is_empty() {
                return Err(mistyped());
            }
            words.iter().map(|&word| f32::from_le_bytes(word)).collect()
        }
        _ => return Err(mistyped()),
    };
    check_vector(components, field)
}

fn check_vector(components: Vec<f32>, field: &str) -> Result<Vec<f32>, Bad> {
    if !components.iter().all(|x| x.is_finite()) {
        return Err(Bad::NotFinite(field.to_owned()));
    }
    if components.iter().all(|&x| x == 0.0) {
        return Err(Bad::ZeroVector);
    }
    Ok(components)
}

fn distribution(value: &Value, field: &str) -> Result<Vec<(ModelName, f64)>, Bad> {
    check_distribution(by_model(value, field)?, field)
}

fn by_model(value: &Value, field: &str) -> Result<Vec<(ModelName, f64)>, Bad> {
    let expected = "an object that maps models to numbers";
    let object = value.as_object().ok_or_else(|| Bad::MistypedField { field: field.to_owned(), expected })?;
    object.iter().map(|(model, x)| Ok((check_name(model, field)?, number(x, field)?))).collect()
}

fn check_distribution(all: Vec<(ModelName, f64)>, field: &str) -> Result<Vec<(ModelName, f64)>, Bad> {
    if let Some((model, p)) = all.iter().find(|(_, p)| !(0.0..=1.0).contains(p)) {
        return Err(bad_propensities(field, format!("{model} has probability {p}, which is not between 0 and 1")));
    }
    let sum: f64 = all.iter().map(|(_, p)| p).sum();
    match (sum - 1.0).abs() <= SUM_TOLERANCE {
        true => Ok(all),
        false => Err(bad_propensities(field, format!("the probabilities sum to {sum}, not to 1"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use crate::config::Config;
    use proptest::prelude::*;

    fn parser(set: &str) -> Parser {
        let config: Config = toml::from_str(set).unwrap();
        Parser::new(&config.check().unwrap())
    }

    #[test]
    fn reward_events_have_the_fields_of_the_feedback() {
        let name = |name: &str| ModelName::try_from(name).unwrap();
        let failed = MoreFeedback { failed: true, ..MoreFeedback::default() };
        let rich = MoreFeedback {
            outcomes: BTreeMap::from([("cost".to_owned(), 0.25)]),
            failed: true,
            rewards: BTreeMap::from([(name("a"), 1.0)]),
            preference: Some((name("a"), name("b"))),
        };
        let priced = parser("[objective.outcomes.cost]\nrange = [0.0, 1.0]\nweight = -1.0");
        for (reward, more, event_id, expected) in [
            (Some(0.5), None, None, json!({"reward": 0.5})),
            (None, Some(failed), Some("e"), json!({"failed": true, "event_id": "e"})),
            (Some(1.0), Some(MoreFeedback::default()), None, json!({"reward": 1.0})),
            (
                None,
                Some(rich),
                None,
                json!({"outcomes": {"cost": 0.25}, "failed": true, "rewards": {"a": 1.0}, "preferred": "a", "over": "b"}),
            ),
        ] {
            let feedback = Feedback { reward, more: more.map(Box::new) };
            let line = reward_line("r", &Name::default_space(), 7, &feedback, event_id);
            let mut event = json!({"request_id": "r", "space": "default", "ts_ms": 7});
            event.as_object_mut().unwrap().extend(expected.as_object().unwrap().clone());
            assert_eq!(line.last(), Some(&b'\n'));
            assert_eq!(serde_json::from_slice::<Value>(&line).unwrap(), event);
            let more = feedback.more.filter(|more| **more != MoreFeedback::default());
            assert_eq!(
                priced.reward(&line, None).unwrap().feedback,
                Feedback { reward, more },
                "as the learner reads it"
            );
        }
    }

    const QUERY: &str = r#"{"request_id":"r-1","space":"shop","ts_ms":17,"query":[3,-4.0],"model":"bge",
        "propensities":{"minilm":0.2,"bge":0.8},"params_version":12,"more":[{}]}"#;

    #[test]
    fn good_events() {
        let (name, model) =
            (|text: &str| Name::try_from(text).unwrap(), |text: &str| ModelName::try_from(text).unwrap());
        let event = parser("").query(QUERY.as_bytes(), None).unwrap();
        let expected = QueryEvent {
            request_id: "r-1".to_owned(),
            space: name("shop"),
            ts_ms: 17,
            query: vec![3.0, -4.0],
            model: model("bge"),
            propensities: Propensities::Full(vec![(model("bge"), 0.8), (model("minilm"), 0.2)]),
            policy: None,
            params_version: Some(12),
            outcomes: BTreeMap::new(),
            is_keyed: false,
        };
        assert_eq!(event, expected);
        let encoded = QUERY.replace("[3,-4.0]", "\"AABAQAAAgMA=\"");
        assert_eq!(parser("").query(encoded.as_bytes(), None).unwrap(), expected);
        let reward = parser("").reward(br#"{"request_id":"r-1","ts_ms":18,"reward":2,"event_id":"e"}"#, None).unwrap();
        let feedback = Feedback::reward(2.0);
        assert_eq!((reward.space.as_str(), reward.event_id.as_deref()), ("default", Some("e")));
        assert_eq!(reward.feedback, feedback);
    }

    #[test]
    fn every_kind_of_bad_query_has_its_reason() {
        for (from, to, reason) in [
            (QUERY, "{not json", "not-json"),
            (QUERY, "[]", "not-json"),
            (QUERY, "", "not-json"),
            ("\"request_id\":\"r-1\",", "", "missing-field"),
            ("\"ts_ms\":17,", "", "missing-field"),
            ("\"model\":\"bge\",", "\"model\":null,", "missing-field"),
            ("17", "\"soon\"", "mistyped-field"),
            ("17", "1.5", "mistyped-field"),
            ("[3,-4.0]", "[3,\"x\"]", "mistyped-field"),
            ("[3,-4.0]", "\"AAA\"", "mistyped-field"),
            ("[3,-4.0]", "\"AAAAAAAA\"", "mistyped-field"),
            ("[3,-4.0]", "{}", "mistyped-field"),
            ("\"bge\",", "7,", "mistyped-field"),
            ("{\"minilm\":0.2,\"bge\":0.8}", "0.8", "mistyped-field"),
            ("shop", ".shop", "bad-name"),
            ("\"bge\",", "\"b g e\",", "bad-name"),
            ("\"r-1\"", "\"\"", "bad-name"),
            ("[3,-4.0]", "[1e39,0]", "not-finite"),
            ("[3,-4.0]", "\"AADAfwAAgD8=\"", "not-finite"),
            ("[3,-4.0]", "[0,-0.0]", "zero-vector"),
            ("[3,-4.0]", "[]", "zero-vector"),
            ("0.2", "0.3", "bad-propensities"),
            ("\"minilm\":0.2,\"bge\":0.8", "\"minilm\":1.5,\"bge\":-0.5", "bad-propensities"),
            ("\"minilm\":0.2,\"bge\":0.8", "", "bad-propensities"),
            ("\"propensities\"", "\"others\"", "missing-propensities"),
        ] {
            let changed = QUERY.replace(from, to);
            let bad = parser("").query(changed.as_bytes(), None).unwrap_err();
            assert_eq!(bad.reason(), reason, "{from} -> {to}: {bad}");
        }
        let bad = parser("[events]\nbytes_max = 64").query(QUERY.as_bytes(), None).unwrap_err();
        assert_eq!(bad.reason(), "oversized");
    }

    #[test]
    fn every_kind_of_bad_reward_has_its_reason() {
        let reject = "[reward]\nrange = [1.0, 5.0]\nout_of_range = \"reject\"";
        for (set, text, reason) in [
            ("", r#"{"request_id":"r","ts_ms":1}"#, "missing-field"),
            ("", r#"{"request_id":"r","ts_ms":1,"reward":"x"}"#, "mistyped-field"),
            ("", r#"{"request_id":"r","ts_ms":1,"reward":1e999}"#, "not-json"),
            ("", r#"{"request_id":"r","ts_ms":1,"reward":1,"event_id":5.5}"#, "mistyped-field"),
            (reject, r#"{"request_id":"r","ts_ms":1,"reward":5.5}"#, "reward-out-of-range"),
        ] {
            assert_eq!(parser(set).reward(text.as_bytes(), None).unwrap_err().reason(), reason, "{text}");
        }
        assert!(parser(reject).reward(br#"{"request_id":"r","ts_ms":1,"reward":5}"#, None).is_ok());
    }

    #[test]
    fn the_records_time_fills_in_and_bounds() {
        let reward = |text: &str, record_ms| parser("[join]\nfuture_ms = 10").reward(text.as_bytes(), record_ms);
        let timed = r#"{"request_id":"r","ts_ms":100,"reward":1}"#;
        let timeless = r#"{"request_id":"r","reward":1}"#;
        assert_eq!(reward(timeless, Some(7)).unwrap().ts_ms, 7);
        assert_eq!(reward(timeless, None).unwrap_err().reason(), "missing-field");
        assert_eq!(reward(timed, Some(1_000_000)).unwrap().ts_ms, 100, "the past may be as far as it likes");
        assert_eq!(reward(timed, Some(90)).unwrap().ts_ms, 100);
        assert_eq!(reward(timed, Some(89)).unwrap_err(), Bad::FutureTime { ahead_ms: 11, most_ms: 10 });
        assert_eq!(reward(timed, Some(i64::MIN)).unwrap_err().reason(), "future-time");
    }

    #[test]
    fn a_stacks_own_fields_and_missing_propensities() {
        let set = r#"
            [learner]
            missing_propensities = "uniform"
            [events.fields]
            request_id = "/meta/trace/0"
            query = "/embedding"
            propensity = "/p"
        "#;
        let text = r#"{"meta":{"trace":["t-9"]},"ts_ms":5,"embedding":[1],"model":"bge","p":0.25}"#;
        let event = parser(set).query(text.as_bytes(), None).unwrap();
        assert_eq!((event.request_id.as_str(), event.propensities), ("t-9", Propensities::Chosen(0.25)));
        let unknown = parser(set).query(text.replace(",\"p\":0.25", "").as_bytes(), None).unwrap();
        assert_eq!(unknown.propensities, Propensities::Unknown);
        let bad = parser(set).query(text.replace("0.25", "0").as_bytes(), None).unwrap_err();
        assert_eq!(bad.reason(), "bad-propensities");
        let reject = set.replace("uniform", "reject");
        assert_eq!(parser(&reject).query(text.as_bytes(), None).unwrap_err().reason(), "missing-propensities");
        let with_policy = text.replace("\"p\":", "\"policy\":{\"bge\":1},\"p\":");
        assert!(parser(&reject).query(with_policy.as_bytes(), None).is_ok());
    }

    #[test]
    fn events_of_a_router_are_read_whatever_the_map() {
        let reward = br#"{"request_id":"r","space":"default","ts_ms":1731700000000,"reward":1}"#;
        for set in [
            "[events]\ntime_unit = \"s\"\n[events.fields]\nts_ms = \"/at\"\nquery = \"/emb\"",
            "[events.fields]\nrequest_id = \"/search\"",
            "[events.query_fields]\nmodel = \"/engine\"",
            "[learner]\nmissing_propensities = \"uniform\"\n[events.fields]\npropensities = \"/p\"",
        ] {
            for mapped in [parser(set), parser(set).by_tree()] {
                assert_eq!(mapped.query(QUERY.as_bytes(), None), parser("").query(QUERY.as_bytes(), None), "{set}");
                assert_eq!(mapped.reward(reward, None).unwrap().ts_ms, 1_731_700_000_000, "{set}");
            }
        }
        // Mapped fields come first.
        let mapped = parser("[events.fields]\nmodel = \"/engine\"");
        let both = QUERY.replace("\"more\"", "\"engine\":\"e5\",\"more\"");
        assert_eq!(mapped.query(both.as_bytes(), None).unwrap().model.as_str(), "e5");
        let bad = mapped.query(QUERY.replace("params_version", "version").as_bytes(), None).unwrap_err();
        assert_eq!(bad, Bad::MissingField("/engine".to_owned()));
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = (parser("").query(&bytes, None), parser("").reward(&bytes, Some(0)));
        }

        #[test]
        fn damaged_events_never_panic(at in any::<prop::sample::Index>(), byte in any::<u8>(), cut in any::<prop::sample::Index>()) {
            let mut bytes = QUERY.as_bytes().to_vec();
            let at = at.index(bytes.len());
            bytes[at] = byte;
            let _ = parser("").query(&bytes, Some(0));
            let _ = parser("").query(&bytes[..cut.index(bytes.len())], None);
        }
    }
}
