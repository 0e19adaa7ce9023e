//! A router: parameters of many spaces, replaced while it routes.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, PoisonError};

use arc_swap::ArcSwap;

use super::{Compiled, Distribution, DrawKey, Params};
use crate::eligible::Eligible;
use crate::event::{BadQuery, ModelName, Name};

/// Routes queries with the newest parameters. Readers never wait for writers.
pub struct Router {
    spaces: ArcSwap<HashMap<Name, Arc<Compiled>>>,
    key: DrawKey,
    /// Held by writers, never by readers.
    writer: Mutex<()>,
}

/// A decision, with the parameters used.
#[derive(Debug, Clone)]
pub struct Answer {
    /// Index of the model.
    pub model: usize,
    /// The distribution that it was drawn from.
    pub distribution: Distribution,
    /// What the model was drawn by, if not by the request ID.
    pub draw_key: Option<Box<str>>,
    /// The parameters.
    pub by: Arc<Compiled>,
}

impl Answer {
    /// Name of the model.
    pub fn model_name(&self) -> &ModelName {
        &self.by.models()[self.model]
    }

    /// Numbers over all models, such as a distribution, by the names of the eligible ones.
    pub fn by_name(&self, numbers: &[f64]) -> BTreeMap<&ModelName, f64> {
        let named = self.by.models().iter().zip(numbers.iter().copied()).enumerate();
        named.filter(|(m, _)| self.distribution.eligible.allows(*m)).map(|(_, of)| of).collect()
    }
}

impl Router {
    /// A router without any space.
    pub fn new(key: DrawKey) -> Self {
        Self { spaces: ArcSwap::default(), key, writer: Mutex::new(()) }
    }

    /// Applies parameters if they are newer than the current ones; returns whether they were. Never goes back.
    pub fn offer(&self, params: Params) -> bool {
        self.insert(Compiled::new(params), |new, old| new.stamp() > old.stamp())
    }

    /// Adds initial parameters for a new space.
    pub fn begin(&self, unlearned: Compiled) -> bool {
        self.insert(unlearned, |_, _| false)
    }

    fn insert(&self, new: Compiled, replaces: impl Fn(&Compiled, &Compiled) -> bool) -> bool {
        // A panic leaves the state under this lock consistent.
        let _writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        let spaces = self.spaces.load();
        let taken = spaces.get(new.space()).is_none_or(|old| replaces(&new, old));
        if taken {
            let mut spaces = HashMap::clone(&spaces);
            spaces.insert(new.space().clone(), Arc::new(new));
            self.spaces.store(Arc::new(spaces));
        }
        taken
    }

    /// The parameters of a space.
    pub fn space(&self, space: &Name) -> Option<Arc<Compiled>> {
        self.spaces.load().get(space).cloned()
    }

    /// Whether it holds a space, learned or not.
    pub fn holds(&self, space: &Name) -> bool {
        self.spaces.load().contains_key(space)
    }

    /// Number of spaces that it holds, and of those among them that were learned: whose parameters were offered.
    pub fn sizes(&self) -> (usize, usize) {
        let spaces = self.spaces.load();
        (spaces.len(), spaces.values().filter(|by| by.params().created_ms > 0).count())
    }

    /// All parameters, by space.
    pub fn spaces(&self) -> Vec<Arc<Compiled>> {
        let mut all: Vec<Arc<Compiled>> = self.spaces.load().values().cloned().collect();
        all.sort_by(|a, b| a.space().cmp(b.space()));
        all
    }

    /// Routes a query, which need not be normalised, by the draw of its request id. `None` if there is no such space.
    pub fn route(&self, space: &Name, request_id: &str, query: &[f32]) -> Option<Result<Answer, BadQuery>> {
        Some(self.decide(self.space(space)?, request_id, query))
    }

    /// Routes many queries with one consistent state of the parameters.
    pub fn route_all<'a>(
        &self,
        space: &Name,
        requests: impl IntoIterator<Item = (&'a str, &'a [f32])>,
    ) -> Option<Vec<Result<Answer, BadQuery>>> {
        let by = self.space(space)?;
        Some(requests.into_iter().map(|(id, query)| self.decide(by.clone(), id, query)).collect())
    }

    /// Routes a query by given parameters, which it need not hold.
    pub fn decide(&self, by: Arc<Compiled>, request_id: &str, query: &[f32]) -> Result<Answer, BadQuery> {
        self.decide_among(by, request_id, None, query, &Eligible::ALL)
    }

    /// The same among the eligible models, and by the draw of another key than the request ID, if there is one. Requests with
    /// one key, such as the ID of a session, keep their model while the distribution stays the same.
    pub fn decide_among(
        &self,
        by: Arc<Compiled>,
        request_id: &str,
        draw_key: Option<&str>,
        query: &[f32],
        eligible: &Eligible,
    ) -> Result<Answer, BadQuery> {
        let distribution = by.distribution_among(query, eligible)?;
        let model = distribution.draw(self.key.draw(by.space(), draw_key.unwrap_or(request_id)));
        Ok(Answer { model, distribution, draw_key: draw_key.map(Box::from), by })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::router::{Policy, ScoreForm};
    use std::sync::atomic::{AtomicBool, Ordering};

    fn params(stamp: (u64, u64, u64), bias: f32) -> Params {
        let mut policy = Policy::unlearned(2, None);
        policy.scores[0] = ScoreForm { bias, ..ScoreForm::default() };
        Params {
            space: Name::default_space(),
            epoch: stamp.0,
            version: stamp.1,
            revision: stamp.2,
            models: ["a", "b"].map(|name| ModelName::try_from(name).unwrap()).to_vec(),
            dim: 2,
            created_ms: 0,
            algorithm: "hpg".to_owned(),
            policy,
        }
    }

    fn router() -> Router {
        Router::new(DrawKey::new(b"key").unwrap())
    }

    #[test]
    fn never_goes_back() {
        let router = router();
        let space = Name::default_space();
        assert!(router.route(&space, "r", &[1.0, 0.0]).is_none());
        let models = params((0, 0, 0), 0.0).models;
        assert!(router.begin(Compiled::unlearned(space.clone(), models.clone(), 2, None)));
        assert!(!router.begin(Compiled::unlearned(space.clone(), models, 2, Some(1))));
        for (stamp, taken) in [
            ((0, 0, 0), false),
            ((0, 5, 1), true),
            ((0, 5, 1), false),
            ((0, 4, 9), false),
            ((0, 5, 2), true),
            ((1, 0, 0), true),
            ((0, 9, 9), false),
        ] {
            assert_eq!(router.offer(params(stamp, 0.0)), taken, "{stamp:?}");
        }
        assert_eq!(router.space(&space).unwrap().stamp(), (1, 0, 0));
    }

    #[test]
    fn what_is_routed_while_parameters_change_is_all_of_one_version() {
        let router = router();
        let space = Name::default_space();
        router.offer(params((0, 1, 0), 1.0));
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for version in 2..2000_u16 {
                    router.offer(params((0, version.into(), 0), f32::from(version)));
                }
                stop.store(true, Ordering::Relaxed);
            });
            let mut last = 0;
            while !stop.load(Ordering::Relaxed) {
                let answer = router.route(&space, "r", &[1.0, 0.0]).unwrap().unwrap();
                let version = answer.by.params().version;
                let odds = (answer.distribution.policy[0] / answer.distribution.policy[1]).ln();
                assert!(version >= last, "it went back");
                assert!(version > 600 || (odds - version as f64).abs() < 1e-6, "{odds} in version {version}");
                last = version;
            }
        });
    }

    #[test]
    fn eligible_models_are_drawn_from_the_conditioned_distribution() {
        let router = router();
        router.offer(params((0, 1, 0), 1.0));
        let by = router.space(&Name::default_space()).unwrap();
        let only_b = Eligible::only(vec![false, true]).unwrap();
        for id in ["r", "s", "t", "u", "v", "w"] {
            let answer = router.decide_among(by.clone(), id, None, &[1.0, 0.0], &only_b).unwrap();
            let b = answer.model_name();
            assert_eq!((b.as_str(), answer.by_name(&answer.distribution.propensities)), ("b", [(b, 1.0)].into()));
            let all = router.decide_among(by.clone(), "any", Some(id), &[1.0, 0.0], &Eligible::ALL).unwrap();
            assert_eq!(
                all.model,
                router.route(by.space(), id, &[1.0, 0.0]).unwrap().unwrap().model,
                "drawn by the key"
            );
            assert_eq!(all.by_name(&all.distribution.policy).len(), 2);
        }
    }

    #[test]
    fn a_fallback_is_always_played_and_bad_queries_are_told() {
        let router = router();
        let space = Name::default_space();
        router.begin(Compiled::unlearned(space.clone(), params((0, 0, 0), 0.0).models, 2, Some(1)));
        let requests: Vec<String> = (0..100).map(|i| i.to_string()).collect();
        let requests = requests.iter().map(|id| (id.as_str(), &[0.5_f32, 1.0][..]));
        for answer in router.route_all(&space, requests).unwrap() {
            assert_eq!(answer.unwrap().model_name().as_str(), "b");
        }
        for (query, expected) in [
            (&[1.0][..], BadQuery::Dimension { found: 1, expected: 2 }),
            (&[0.0, 0.0], BadQuery::Zero),
            (&[1.0, f32::INFINITY], BadQuery::NotFinite { index: 1, value: f64::INFINITY }),
        ] {
            assert_eq!(router.route(&space, "r", query).unwrap().unwrap_err(), expected);
        }
    }
}
