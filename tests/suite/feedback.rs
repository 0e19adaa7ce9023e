//! Outcomes, eligible models and feedback beyond a reward, from events to what is learned.

use std::collections::BTreeMap;

use pointsman::config::{Config, Settings};
use pointsman::engine::{Effects, Engine, Input, Side};
use pointsman::event::{Example, Name};
use pointsman::wire::events::Parser;
use serde_json::{Value, json};

fn settings(more: &str) -> Settings {
    let config = format!(
        "[learner]\ndim = 2\nmodels = [\"a\", \"b\", \"c\"]\n[join]\nwindow_ms = 1000\n[objective.outcomes.cost]\nrange = [0.0, \
         10.0]\nbudget = 1.0\nmodels = {{ a = 0.5, b = 2.0, c = 8.0 }}\n{more}"
    );
    toml::from_str::<Config>(&config).unwrap().check().unwrap()
}

struct Lane {
    settings: Settings,
    engine: Engine,
}

impl Lane {
    fn new(more: &str) -> Self {
        let settings = settings(more);
        let mut engine = Engine::new(settings.clone());
        engine.show_examples();
        Self { settings, engine }
    }

    fn step(&mut self, side: Side, event: &Value) -> Effects {
        self.engine.step(Input::parse(&Parser::new(&self.settings), side, event.to_string().into_bytes(), None))
    }

    fn query(&mut self, id: &str, ts_ms: i64, model: &str, more: Value) -> Effects {
        let mut event = json!({
            "request_id": id, "ts_ms": ts_ms, "query": [1.0, 0.5], "model": model,
            "propensities": {"a": 0.5, "b": 0.25, "c": 0.25}, "params_version": 0,
        });
        event.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        self.step(Side::Query, &event)
    }

    fn reward(&mut self, id: &str, ts_ms: i64, more: Value) -> Effects {
        let mut event = json!({"request_id": id, "ts_ms": ts_ms});
        event.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        self.step(Side::Reward, &event)
    }

    /// The example of a request that gets one reward event.
    fn example(&mut self, query: Value, reward: Value) -> Example {
        let id = format!("r{}", self.engine.counts().queries());
        assert!(self.query(&id, 10, "a", query).dead_letters.is_empty());
        let mut effects = self.reward(&id, 11, reward);
        assert_eq!((effects.dead_letters.len(), effects.applied.len()), (0, 1), "{effects:?}");
        effects.applied.remove(0).example.unwrap()
    }

    fn cost(&self) -> (u64, f64) {
        let view = self.engine.objective(&Name::default_space()).unwrap();
        let cost = &view.outcomes[0];
        (cost.requests, cost.mean.unwrap_or_default() * cost.requests as f64)
    }
}

#[test]
fn decisions_are_charged_when_they_are_read_and_settled_when_their_outcome_arrives() {
    let mut lane = Lane::new("");
    lane.query("r1", 10, "b", json!({}));
    assert_eq!(lane.cost(), (1, 2.0), "as configured");
    lane.query("r2", 11, "c", json!({"outcomes": {"cost": 3.0, "other": 7}}));
    assert_eq!(lane.cost(), (2, 5.0), "as the decision says");
    lane.query("r1", 10, "b", json!({}));
    assert_eq!(lane.cost(), (2, 5.0), "a duplicate is not charged");
    // Outcomes alone wait for the reward.
    assert!(lane.reward("r1", 12, json!({"outcomes": {"cost": 0.5}})).applied.is_empty());
    let applied = lane.reward("r1", 13, json!({"reward": 1.0})).applied;
    assert_eq!((applied.len(), lane.cost()), (1, (2, 3.5)));
    assert_eq!(lane.engine.counts().join.rewards.used, 2);
    // Of a query without a reward the outcome counts too.
    lane.reward("r2", 14, json!({"outcomes": {"cost": 99.0}}));
    lane.engine.finish();
    let counts = lane.engine.counts();
    assert_eq!((lane.cost(), counts.join.queries.expired, counts.applied), ((2, 10.5), 1, 1), "clipped to 10");
    assert!(counts.join.balance());
}

#[test]
fn models_without_an_entry_could_not_answer() {
    let mut lane = Lane::new("");
    let example = lane.example(json!({"propensities": {"a": 0.25, "c": 0.75}}), json!({"reward": 1}));
    assert_eq!(example.propensities(), [0.25, 0.0, 0.75]);
    assert_eq!(example.eligible().mask(), Some(&[true, false, true][..]));
    let example = lane.example(json!({"propensities": {"a": 0.25, "b": 0.0, "c": 0.75}}), json!({"reward": 1}));
    assert!(example.eligible().is_all(), "listed with 0");
}

#[test]
fn feedback_may_be_about_several_models() {
    let mut lane = Lane::new("[reward]\nrange = [0.0, 2.0]\n");
    let judged = json!({"rewards": {"a": 1.0, "b": 0.5, "c": 4.0}});
    let example = lane.example(json!({}), judged.clone());
    assert_eq!(example.rewards().collect::<Vec<_>>(), [(0, 0.5), (1, 0.25), (2, 1.0)], "clipped and scaled");
    let example = lane.example(json!({}), json!({"reward": 2.0, "rewards": {"a": 1.0, "b": 0.5}}));
    assert_eq!(example.rewards().collect::<Vec<_>>(), [(0, 1.0), (1, 0.25)], "the reward counts first");
    let example = lane.example(json!({}), json!({"preferred": "c", "over": "b"}));
    let preference = example.preference().unwrap();
    assert_eq!((example.reward(), preference.preferred, preference.over), (None, 2, 1));
    assert_eq!(lane.engine.mean_reward(), 0.75, "of the rewards of chosen models");
    for (bad, reason) in [
        (json!({"rewards": {"z": 1.0}}), "unknown-model"),
        (json!({"rewards": {"a": "good"}}), "mistyped-field"),
        (json!({"preferred": "a"}), "missing-field"),
        (json!({"preferred": "a", "over": "a"}), "bad-feedback"),
        (json!({"failed": 1}), "mistyped-field"),
        (json!({"outcomes": {"cost": "much"}}), "mistyped-field"),
        (json!({}), "missing-field"),
    ] {
        let letters = lane.reward("r0", 20, bad.clone()).dead_letters;
        assert_eq!(letters.iter().map(|letter| letter.bad.reason()).collect::<Vec<_>>(), [reason], "{bad}");
    }
    assert!(lane.engine.counts().join.balance());
}

#[test]
fn failed_decisions_are_dropped_or_learned() {
    let failed = json!({"failed": true});
    let mut lane = Lane::new("");
    lane.query("r1", 10, "b", json!({}));
    assert!(lane.reward("r1", 11, failed.clone()).applied.is_empty());
    let counts = lane.engine.counts();
    assert_eq!((counts.join.queries.joined, counts.join.rewards.used, counts.applied), (1, 1, 0));
    let mut lane = Lane::new("[reward]\non_failed = \"learn\"\nfailed_reward = 0.25\n");
    assert_eq!(lane.example(json!({}), failed).reward(), Some(0.25));
    assert_eq!(lane.example(json!({}), json!({"failed": true, "reward": 1.0})).reward(), Some(1.0));
}

/// A preference moves the two models apart, as rewards of all models do.
#[test]
fn feedback_without_own_rewards_is_learned() {
    for feedback in [json!({"preferred": "c", "over": "a"}), json!({"rewards": {"a": 0.0, "b": 0.5, "c": 1.0}})] {
        let config = "[learner]\ndim = 2\nmodels = [\"a\", \"b\", \"c\"]\n";
        let settings = toml::from_str::<Config>(config).unwrap().check().unwrap();
        let mut lane = Lane { engine: Engine::new(settings.clone()), settings };
        lane.engine.show_examples();
        for _ in 0..400 {
            lane.example(json!({}), feedback.clone());
        }
        let policy = lane.engine.policy(&Name::default_space()).unwrap();
        let scores: Vec<f64> = policy.scores.iter().map(|form| form.score(&[0.894_427_19, 0.447_213_6])).collect();
        assert!(scores[2] > scores[0] + 1.0, "{feedback}: {scores:?}");
    }
}

/// Charges, tolls and debts are state: wherever the engine is saved and restored, it ends in the same state.
#[test]
fn a_restored_engine_continues_to_the_same_state() {
    let more = "[objective]\nfloor = 0.05\n[objective.outcomes.latency_ms]\nrange = [0.0, 1000.0]\nweight = 0.0001\n";
    let events: Vec<(Side, Value)> = (0..300_i64)
        .flat_map(|i| {
            let model = ["a", "b", "c"][(i * 7 % 3) as usize];
            let query = json!({
                "request_id": format!("r{i}"), "ts_ms": 10 * i, "query": [1.0, (i % 11) as f64 - 5.0], "model": model,
                "propensities": {"a": 0.5, "b": 0.25, "c": 0.25}, "params_version": i / 2,
            });
            let reward = match i % 5 {
                0 => json!({"rewards": {"a": 0.1, "b": 0.9}}),
                1 => json!({"preferred": "b", "over": "c"}),
                2 => json!({"outcomes": {"cost": 0.3, "latency_ms": 250}}),
                _ => json!({"reward": (i % 2) as f64, "outcomes": {"cost": 1.5}}),
            };
            let mut event = json!({"request_id": format!("r{i}"), "ts_ms": 10 * i + 500});
            event.as_object_mut().unwrap().extend(reward.as_object().unwrap().clone());
            [(Side::Query, query), (Side::Reward, event)]
        })
        .collect();
    let run = |restarts: usize| {
        let mut lane = Lane::new(more);
        let mut records: BTreeMap<Vec<u8>, Vec<u8>> = BTreeMap::new();
        for (n, (side, event)) in events.iter().enumerate() {
            assert!(lane.step(*side, event).dead_letters.is_empty(), "{event}");
            if restarts > 0 && n.is_multiple_of(restarts) {
                for (key, value) in lane.engine.take_changes() {
                    match value {
                        Some(value) => _ = records.insert(key, value),
                        None => _ = records.remove(&key),
                    }
                }
                let head = lane.engine.head();
                lane.engine = Engine::restore(lane.settings.clone(), head, records.clone()).unwrap();
            }
        }
        lane.engine.digest()
    };
    let expected = run(0);
    for restarts in [1, 2, 7, 100] {
        assert_eq!(run(restarts), expected, "a restart after every {restarts} events");
    }
}
