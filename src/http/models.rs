//! The models of the router: which of them may answer a request, and which rest.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use axum::extract::rejection::PathRejection;
use axum::extract::{Path, Request, State};
use axum::http::StatusCode;
use axum::response::Response;
use serde_json::{Value, json};

use super::Problem;
use super::body::{Kind, kind};
use super::sidecar::{Sidecar, json_response, space};
use crate::config::REST_MS_MAX;
use crate::eligible::Eligible;
use crate::event::{ModelName, Name, excerpt};
use crate::feedback::{Feedback, MoreFeedback};
use crate::router::{Compiled, OUTCOME_NAME_BYTES_MAX, Rest, RestReason, Restriction};
use crate::transport::{lock, now_ms};
use crate::wire::requests::{RestBody, RewardBody};

/// Longest name that an error quotes.
const QUOTED_BYTES_MAX: usize = 80;

/// `GET /v1/models`: the models of each space, and which rest.
pub(super) async fn list(State(sidecar): State<Arc<Sidecar>>) -> Response {
    json_response(&sidecar.models(now_ms()))
}

/// `PUT /v1/models/NAME`: an operator rests or wakes a model.
pub(super) async fn rest(
    State(sidecar): State<Arc<Sidecar>>,
    name: Result<Path<String>, PathRejection>,
    request: Request,
) -> Result<Response, Problem> {
    kind(&request, &[Kind::Json])?;
    let Path(name) = name.map_err(|error| Problem::new(error.status(), error.body_text()))?;
    let (RestBody { space: named, resting, for_ms }, _held) = sidecar.small_json(request).await?;
    let space = space(named)?;
    sidecar.check_space(&space)?;
    if !sidecar.router.holds(&space) && !sidecar.settings().is_reserved(&space) {
        return Err(Problem::field("space", format!("this router has not routed space {space} yet")));
    }
    let models = sidecar.models_of(&space);
    let Some(model) = models.iter().find(|model| model.as_str() == name) else {
        let problem = format!("space {space} has no model {:?}: see /v1/models", excerpt(&name, QUOTED_BYTES_MAX));
        return Err(Problem::new(StatusCode::NOT_FOUND, problem));
    };
    if for_ms.is_some_and(|for_ms| !resting || !(1..=REST_MS_MAX).contains(&for_ms)) {
        return Err(Problem::field("for_ms", format!("must be 1 to {REST_MS_MAX}, with \"resting\": true")));
    }
    let now_ms = now_ms();
    if resting {
        let rest = lock(&sidecar.resting).rest(&space, model, for_ms, now_ms);
        tracing::info!(%space, %model, until_ms = rest.until_ms, "an operator rests the model");
    } else if let Some(rest) = lock(&sidecar.resting).wake(&space, model, now_ms) {
        log_woken(&space, model, rest);
    }
    let mut shown = sidecar.model(&space, model, now_ms);
    shown["space"] = json!(space);
    Ok(json_response(&shown))
}

fn log_woken(space: &Name, model: &ModelName, rest: Rest) {
    tracing::info!(%space, %model, reason = rest.reason.name(), "the model no longer rests");
}

impl Sidecar {
    /// The models that may answer a request: those that it allows and that do not rest; else `router.fallback_model`.
    pub(super) fn eligible(&self, by: &Compiled, restriction: &Restriction, now_ms: u64) -> Result<Eligible, Problem> {
        let (space, models) = (by.space(), by.models());
        let settings = self.settings();
        let spec = settings.space(space);
        let is_known = |name: &str| spec.models.iter().chain(&spec.retired).any(|model| model.as_str() == name);
        let mut may_answer = restriction.allowed(models, is_known).map_err(|unknown| {
            let name = excerpt(&unknown.name, QUOTED_BYTES_MAX);
            Problem::field(unknown.field, format!("space {space} has no model {name:?}"))
        })?;
        let resting = lock(&self.resting);
        resting.exclude(space, models, &mut may_answer, now_ms);
        if let Some(eligible) = Eligible::only(may_answer) {
            return Ok(eligible);
        }
        let fallback = self.config.router.fallback_model.as_deref();
        let is_fallback = |model: &ModelName| Some(model.as_str()) == fallback && !restriction.excludes(model);
        let mut may_answer: Vec<bool> = models.iter().map(is_fallback).collect();
        resting.exclude(space, models, &mut may_answer, now_ms);
        Eligible::only(may_answer).ok_or_else(|| match (restriction.is_none(), &restriction.models) {
            (true, _) => Problem::unavailable(format!(
                "all models of space {space} rest: wake one with PUT /v1/models/NAME and {{\"resting\": false}}"
            )),
            (false, models) => Problem::field(
                if models.is_some() { "models" } else { "exclude" },
                format!("leaves no model of space {space} that may answer: allow more, or set router.fallback_model"),
            ),
        })
    }

    /// Checks what a reward event says; returns how many of its rewards will be clipped, too.
    pub(super) fn feedback(&self, space: &Name, body: RewardBody) -> Result<(Feedback, u64), Problem> {
        let RewardBody { reward, outcomes, failed, rewards, preferred, over, .. } = body;
        let mut clipped = 0;
        if let Some(reward) = reward {
            clipped += u64::from(self.check_reward("reward", reward)?);
        }
        let outcomes = outcomes.unwrap_or_default();
        for (name, value) in &outcomes {
            if !(1..=OUTCOME_NAME_BYTES_MAX).contains(&name.len()) {
                let problem = format!("names of outcomes must have 1 to {OUTCOME_NAME_BYTES_MAX} bytes");
                return Err(Problem::field("outcomes", problem));
            }
            if !value.is_finite() {
                return Err(Problem::field(format!("outcomes.{name}"), "must be a finite number"));
            }
        }
        let judged = rewards.unwrap_or_default();
        let mut known = BTreeSet::new();
        if !judged.is_empty() || preferred.is_some() || over.is_some() {
            known.extend(self.models_of(space));
            known.extend(self.settings().space(space).retired.iter().cloned());
        }
        let model = |field: &str, name: &str| {
            let known = ModelName::try_from(name).ok().filter(|name| known.contains(name));
            let name = excerpt(name, QUOTED_BYTES_MAX);
            known.ok_or_else(|| Problem::field(field, format!("space {space} has no model {name:?}")))
        };
        let mut rewards = BTreeMap::new();
        for (name, reward) in judged {
            let model = model("rewards", &name)?;
            clipped += u64::from(self.check_reward(&format!("rewards.{model}"), reward)?);
            rewards.insert(model, reward);
        }
        let preference = match (preferred, over) {
            (None, None) => None,
            (Some(preferred), Some(over)) if preferred == over => {
                return Err(Problem::field("over", format!("must be another model than preferred, {preferred:?}")));
            }
            (Some(preferred), Some(over)) => Some((model("preferred", &preferred)?, model("over", &over)?)),
            (None, Some(_)) => return Err(Problem::field("preferred", "missing: over needs preferred")),
            (Some(_), None) => return Err(Problem::field("over", "missing: preferred needs over")),
        };
        let more = MoreFeedback { outcomes, failed: failed.unwrap_or_default(), rewards, preference };
        if reward.is_none() && more == MoreFeedback::default() {
            return Err(Problem::field(
                "reward",
                "missing: send reward, outcomes, failed, rewards, or preferred and over",
            ));
        }
        let more = (more != MoreFeedback::default()).then(|| Box::new(more));
        Ok((Feedback { reward, more }, clipped))
    }

    /// Counts a failure, or an answer, of the model that answered a remembered request. A request fails once.
    pub(super) fn note(&self, space: &Name, request_id: &str, feedback: &Feedback) {
        let now_ms = now_ms();
        let Some(decided) = self.remembered(space, request_id, now_ms) else { return };
        let (model, is_held) = (&decided.model, self.router.holds(space));
        if feedback.more.as_ref().is_some_and(|more| more.failed) {
            if decided.has_failed.swap(true, Ordering::Relaxed) {
                return;
            }
            self.metrics.failed(space, model, is_held);
            // The number of spaces that the router does not hold is unbounded.
            let rest = is_held.then(|| lock(&self.resting).fail(space, model, now_ms)).flatten();
            if let Some(Rest { until_ms, .. }) = rest {
                let failures_max = self.config.router.failures_max;
                tracing::warn!(%space, %model, failures_max, until_ms, "the model failed too often in a row and rests");
            }
        } else if !decided.has_failed.load(Ordering::Relaxed) && says_answered(feedback, model) {
            lock(&self.resting).answer(space, model);
        }
    }

    /// Logs the end of rests.
    pub(super) fn end_rests(&self) {
        for (space, model, rest) in lock(&self.resting).expire(now_ms()) {
            log_woken(&space, &model, rest);
        }
    }

    /// Models of a space that rest.
    pub(super) fn resting_of(&self, space: &Name, now_ms: u64) -> Vec<(ModelName, Rest)> {
        let models = self.models_of(space);
        let resting = lock(&self.resting);
        models.into_iter().filter_map(|model| resting.of(space, &model, now_ms).map(|rest| (model, rest))).collect()
    }

    /// Number of resting models by space, model and reason.
    pub(super) fn rests(&self) -> Vec<(Name, ModelName, RestReason)> {
        lock(&self.resting).all(now_ms()).into_iter().map(|(space, model, rest)| (space, model, rest.reason)).collect()
    }

    fn models(&self, now_ms: u64) -> Value {
        let held = self.router.spaces().into_iter().map(|by| by.space().clone());
        let settings = self.settings();
        let reserved = settings.spaces.keys().cloned().chain([Name::default_space()]);
        let spaces: BTreeSet<Name> = held.chain(reserved.filter(|space| settings.allows(space))).collect();
        let models = |space: &Name| {
            self.models_of(space).iter().map(|model| self.model(space, model, now_ms)).collect::<Vec<_>>()
        };
        json!({ "spaces": spaces.iter().map(|space| (space.to_string(), json!(models(space)))).collect::<serde_json::Map<_, _>>() })
    }

    fn model(&self, space: &Name, model: &ModelName, now_ms: u64) -> Value {
        let resting = lock(&self.resting);
        let mut shown = json!({ "model": model, "resting": false, "failures": resting.failures(space, model) });
        if let Some(rest) = resting.of(space, model, now_ms) {
            shown["resting"] = json!(true);
            shown["reason"] = json!(rest.reason);
            shown["since_ms"] = json!(rest.since_ms);
            shown["until_ms"] = json!(rest.until_ms);
        }
        shown
    }

    /// The models of a space: those of its parameters, then configured ones that these do not have yet.
    fn models_of(&self, space: &Name) -> Vec<ModelName> {
        let mut models = self.router.space(space).map(|by| by.models().to_vec()).unwrap_or_default();
        let settings = self.settings();
        let configured = &settings.space(space).models;
        let known: BTreeSet<&ModelName> = models.iter().collect();
        let new: Vec<ModelName> = configured.iter().filter(|model| !known.contains(model)).cloned().collect();
        models.extend(new);
        models
    }
}

/// Whether feedback shows that the model answered.
fn says_answered(feedback: &Feedback, model: &ModelName) -> bool {
    let names = |more: &MoreFeedback| {
        let preference = more.preference.iter().any(|(preferred, over)| [preferred, over].contains(&model));
        preference || !more.outcomes.is_empty() || more.rewards.contains_key(model)
    };
    feedback.reward.is_some() || feedback.more.as_ref().is_some_and(|more| names(more))
}
