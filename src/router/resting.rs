//! Models that rest: they do not answer for a while, after failures in a row or because an operator says so.
//!
//! A model whose answers failed [`RestingSpec::failures_max`] times in a row rests for [`RestingSpec::cooldown_ms`]. Only an
//! answer ends the row: the first failure after a rest starts the next one.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::event::{ModelName, Name};

/// When failures make a model rest, and for how long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RestingSpec {
    /// Failures in a row that start a rest; 0 = none do.
    pub failures_max: u32,
    /// Length of such a rest.
    pub cooldown_ms: u64,
}

/// Why a model rests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum RestReason {
    /// It failed too often in a row.
    Failures,
    /// An operator rests it.
    Operator,
}

impl RestReason {
    /// Its name in logs and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Failures => "failures",
            Self::Operator => "operator",
        }
    }
}

/// A rest of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Rest {
    /// Why it rests.
    pub reason: RestReason,
    /// Start, in milliseconds since 1970.
    pub since_ms: u64,
    /// End, in milliseconds since 1970; `None`: until an operator wakes it.
    pub until_ms: Option<u64>,
}

impl Rest {
    fn is_over(&self, now_ms: u64) -> bool {
        self.until_ms.is_some_and(|until_ms| until_ms <= now_ms)
    }
}

/// A rest that started or ended.
pub type RestOf = (Name, ModelName, Rest);

/// Rests and failures of the models of all spaces. Holds no model that neither rests nor failed last.
#[derive(Debug)]
pub struct Resting {
    spec: RestingSpec,
    spaces: BTreeMap<Name, BTreeMap<ModelName, Health>>,
}

#[derive(Debug, Default)]
struct Health {
    /// Failures since the last answer.
    failures: u32,
    by_failures: Option<Rest>,
    by_operator: Option<Rest>,
}

impl Health {
    /// The rest at a time: the operator's, if there are two.
    fn rest(&self, now_ms: u64) -> Option<Rest> {
        [self.by_operator, self.by_failures].into_iter().flatten().find(|rest| !rest.is_over(now_ms))
    }
}

impl Resting {
    /// Nothing rests.
    pub fn new(spec: RestingSpec) -> Self {
        Self { spec, spaces: BTreeMap::new() }
    }

    /// Counts a failure of a model; returns the rest that it starts, if it does. Pass only spaces whose number is bounded.
    pub fn fail(&mut self, space: &Name, model: &ModelName, now_ms: u64) -> Option<Rest> {
        let RestingSpec { failures_max, cooldown_ms } = self.spec;
        if failures_max == 0 {
            return None;
        }
        let health = self.health(space, model);
        health.failures = health.failures.saturating_add(1);
        if health.failures < failures_max || health.by_failures.is_some_and(|rest| !rest.is_over(now_ms)) {
            return None;
        }
        let until_ms = Some(now_ms.saturating_add(cooldown_ms));
        let rest = Rest { reason: RestReason::Failures, since_ms: now_ms, until_ms };
        health.by_failures = Some(rest);
        Some(rest)
    }

    /// Ends the row of failures of a model that answered. A rest goes on.
    pub fn answer(&mut self, space: &Name, model: &ModelName) {
        if self.failures(space, model) > 0 {
            self.health(space, model).failures = 0;
            self.tidy(space, model);
        }
    }

    /// An operator rests a model, for a time or until it is woken.
    pub fn rest(&mut self, space: &Name, model: &ModelName, for_ms: Option<u64>, now_ms: u64) -> Rest {
        let until_ms = for_ms.map(|for_ms| now_ms.saturating_add(for_ms));
        let rest = Rest { reason: RestReason::Operator, since_ms: now_ms, until_ms };
        self.health(space, model).by_operator = Some(rest);
        rest
    }

    /// An operator wakes a model: ends its rest, whatever the reason, and its row of failures.
    pub fn wake(&mut self, space: &Name, model: &ModelName, now_ms: u64) -> Option<Rest> {
        let rest = self.of(space, model, now_ms);
        if self.spaces.get(space).is_some_and(|models| models.contains_key(model)) {
            *self.health(space, model) = Health::default();
            self.tidy(space, model);
        }
        rest
    }

    /// Forgets the rests that are over; returns those of models that rest no longer.
    pub fn expire(&mut self, now_ms: u64) -> Vec<RestOf> {
        let mut woken = Vec::new();
        for (space, models) in &mut self.spaces {
            models.retain(|model, health| {
                let mut ended = None;
                for rest in [&mut health.by_failures, &mut health.by_operator] {
                    if rest.is_some_and(|rest| rest.is_over(now_ms)) {
                        ended = rest.take();
                    }
                }
                if let Some(rest) = ended.filter(|_| health.rest(now_ms).is_none()) {
                    woken.push((space.clone(), model.clone(), rest));
                }
                health.failures > 0 || health.rest(now_ms).is_some()
            });
        }
        self.spaces.retain(|_, models| !models.is_empty());
        woken
    }

    /// The rest of a model at a time.
    pub fn of(&self, space: &Name, model: &ModelName, now_ms: u64) -> Option<Rest> {
        self.spaces.get(space)?.get(model)?.rest(now_ms)
    }

    /// Failures of a model since its last answer.
    pub fn failures(&self, space: &Name, model: &ModelName) -> u32 {
        let health = self.spaces.get(space).and_then(|models| models.get(model));
        health.map_or(0, |health| health.failures)
    }

    /// All rests at a time.
    pub fn all(&self, now_ms: u64) -> Vec<RestOf> {
        let models = self.spaces.iter().flat_map(|(space, models)| models.iter().map(move |of| (space, of)));
        let rests =
            models.filter_map(|(space, (model, health))| Some((space.clone(), model.clone(), health.rest(now_ms)?)));
        rests.collect()
    }

    /// Removes resting models from those that may answer, given one entry per model. Rests from failures are ignored where
    /// they would leave no model; those of operators never are.
    pub fn exclude(&self, space: &Name, models: &[ModelName], may_answer: &mut [bool], now_ms: u64) {
        let Some(known) = self.spaces.get(space) else { return };
        let mut tired = Vec::new();
        for (m, model) in models.iter().enumerate().filter(|(m, _)| may_answer[*m]).collect::<Vec<_>>() {
            match known.get(model).and_then(|health| health.rest(now_ms)).map(|rest| rest.reason) {
                Some(RestReason::Operator) => may_answer[m] = false,
                Some(RestReason::Failures) => tired.push(m),
                None => {}
            }
        }
        if may_answer.iter().filter(|may| **may).count() > tired.len() {
            tired.into_iter().for_each(|m| may_answer[m] = false);
        }
    }

    fn health(&mut self, space: &Name, model: &ModelName) -> &mut Health {
        self.spaces.entry(space.clone()).or_default().entry(model.clone()).or_default()
    }

    /// Removes a model that there is nothing to say of.
    fn tidy(&mut self, space: &Name, model: &ModelName) {
        let Some(models) = self.spaces.get_mut(space) else { return };
        let is_plain =
            |health: &Health| health.failures == 0 && health.by_failures.is_none() && health.by_operator.is_none();
        if models.get(model).is_some_and(is_plain) {
            models.remove(model);
        }
        if models.is_empty() {
            self.spaces.remove(space);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resting() -> (Resting, Name, [ModelName; 3]) {
        let models = ["a", "b", "c"].map(|name| ModelName::try_from(name).unwrap());
        (Resting::new(RestingSpec { failures_max: 3, cooldown_ms: 100 }), Name::default_space(), models)
    }

    /// Three failures in a row.
    fn fail(resting: &mut Resting, model: &ModelName, now_ms: u64) {
        for _ in 0..3 {
            resting.fail(&Name::default_space(), model, now_ms);
        }
    }

    fn may_answer(resting: &Resting, allowed: [bool; 3], now_ms: u64) -> [bool; 3] {
        let (_, space, models) = self::resting();
        let mut may_answer = allowed;
        resting.exclude(&space, &models, &mut may_answer, now_ms);
        may_answer
    }

    const ALL: [bool; 3] = [true; 3];

    #[test]
    fn failures_in_a_row_rest_a_model_until_the_cooldown_is_over() {
        let (mut resting, space, [a, ..]) = resting();
        assert_eq!((resting.fail(&space, &a, 1), resting.fail(&space, &a, 2)), (None, None));
        assert_eq!(may_answer(&resting, ALL, 2), ALL);
        let rest = Rest { reason: RestReason::Failures, since_ms: 3, until_ms: Some(103) };
        assert_eq!(resting.fail(&space, &a, 3), Some(rest));
        assert_eq!(resting.fail(&space, &a, 4), None, "decisions from before the rest do not extend it");
        assert_eq!(may_answer(&resting, ALL, 102), [false, true, true]);
        assert!(resting.expire(102).is_empty());
        assert_eq!(may_answer(&resting, ALL, 103), ALL);
        assert_eq!(resting.expire(103), [(space.clone(), a.clone(), rest)]);
        assert!(resting.expire(104).is_empty(), "it wakes once");
        // The row goes on: the first failure after the rest starts the next one.
        assert_eq!(resting.fail(&space, &a, 110).map(|rest| rest.until_ms), Some(Some(210)));
    }

    #[test]
    fn an_answer_ends_the_row_but_not_the_rest() {
        let (mut resting, space, [a, b, _]) = resting();
        for now_ms in 0..20 {
            resting.answer(&space, &a);
            assert_eq!((resting.fail(&space, &a, now_ms), resting.fail(&space, &a, now_ms)), (None, None));
        }
        assert_eq!((resting.failures(&space, &a), resting.failures(&space, &b)), (2, 0));
        assert!(resting.fail(&space, &a, 20).is_some());
        resting.answer(&space, &a);
        assert_eq!((resting.failures(&space, &a), may_answer(&resting, ALL, 50)), (0, [false, true, true]));
        assert_eq!(resting.expire(120).len(), 1);
        assert!(resting.spaces.is_empty(), "nothing is left to remember");
    }

    #[test]
    fn rests_from_failures_never_leave_no_model() {
        let (mut resting, space, [a, b, c]) = resting();
        for model in [&a, &b] {
            fail(&mut resting, model, 0);
        }
        assert_eq!(may_answer(&resting, ALL, 50), [false, false, true]);
        assert_eq!(may_answer(&resting, [true, true, false], 50), [true, true, false]);
        resting.rest(&space, &c, None, 10);
        assert_eq!(may_answer(&resting, ALL, 50), [true, true, false], "the operator's rest holds");
        assert_eq!(may_answer(&resting, [false, false, true], 50), [false; 3]);
        let elsewhere = Name::try_from("shop").unwrap();
        let mut may_answer = ALL;
        resting.exclude(&elsewhere, &[a, b, c], &mut may_answer, 50);
        assert_eq!(may_answer, ALL, "spaces rest apart");
    }

    #[test]
    fn operators_rest_and_wake() {
        let (mut resting, space, [a, ..]) = resting();
        let rest = resting.rest(&space, &a, Some(50), 0);
        assert_eq!(
            (rest.reason, resting.of(&space, &a, 49), resting.of(&space, &a, 50)),
            (RestReason::Operator, Some(rest), None)
        );
        let forever = resting.rest(&space, &a, None, 60);
        fail(&mut resting, &a, 60);
        assert_eq!(resting.of(&space, &a, 70), Some(forever), "the operator's rest is shown first");
        assert!(resting.expire(1000).is_empty(), "it still rests");
        assert_eq!(resting.all(2000), [(space.clone(), a.clone(), forever)]);
        assert_eq!(resting.wake(&space, &a, 3000), Some(forever));
        assert_eq!((resting.failures(&space, &a), resting.wake(&space, &a, 3000)), (0, None));
        fail(&mut resting, &a, 4000);
        assert!(resting.wake(&space, &a, 4001).is_some() && resting.spaces.is_empty());
    }

    #[test]
    fn no_number_of_failures_is_never() {
        let (_, space, [a, ..]) = resting();
        let mut resting = Resting::new(RestingSpec { failures_max: 0, cooldown_ms: 100 });
        assert!((0..100).all(|now_ms| resting.fail(&space, &a, now_ms).is_none()));
        assert!(resting.spaces.is_empty());
    }
}
