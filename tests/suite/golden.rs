//! Results of an independent numpy implementation (dense eigendecomposition at every step), reproduced.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use pointsman::config::{HpgSpec, LearnerConfig, Method, Mode};
use pointsman::event::{Example, Query};
use pointsman::hpg::coin::Bettor;
use pointsman::hpg::parameter_free::ParameterFree;
use pointsman::hpg::projection::Ball;
use pointsman::learner::{Learner, Lesson, Trainer};
use serde::Deserialize;
use serde_json::Value;

fn vectors() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/vectors")
}

fn read<T: serde::de::DeserializeOwned>(path: impl AsRef<Path>) -> T {
    serde_json::from_slice(&fs::read(vectors().join(path)).unwrap()).unwrap()
}

#[test]
fn projection() {
    #[derive(Deserialize)]
    struct Case {
        gamma: Vec<f64>,
        beta: f64,
        tau: f64,
        nu: f64,
        projected: Vec<f64>,
    }
    let cases: Vec<Case> = read("projection.json");
    assert!(cases.len() >= 60);
    for case in cases {
        let mut gamma = case.gamma.clone();
        let nu = Ball { tau: case.tau, beta: case.beta, rank: gamma.len() }.project(&mut gamma);
        // nu itself is known only to the spacing of numbers of its size.
        assert!((nu - case.nu).abs() <= 1e-12 * (1.0 + case.nu), "{nu} {}", case.nu);
        for (found, expected) in gamma.iter().zip(&case.projected) {
            assert!((found - expected).abs() <= 1e-12, "{found} {expected}");
        }
    }
}

#[test]
fn coin_betting() {
    #[derive(Deserialize)]
    struct Bet {
        z: f64,
        g: f64,
    }
    let bets: Vec<Bet> = read("coin-ons.json");
    let mut bettor = Bettor::new(1.0);
    for bet in bets {
        assert!((bettor.magnitude() - bet.z).abs() <= 1e-8 * (1.0 + bet.z), "{} {}", bettor.magnitude(), bet.z);
        bettor.step(bet.g);
    }
}

#[test]
fn parameter_free() {
    #[derive(Deserialize)]
    struct Run {
        dim: usize,
        models: usize,
        eta: f64,
        tau: f64,
        beta: f64,
        rank: usize,
        steps: Vec<Step>,
        r#final: Final,
    }
    #[derive(Deserialize)]
    struct Step {
        q: Vec<f64>,
        p: Vec<f64>,
        m: usize,
        r: f64,
        z: Vec<f64>,
    }
    #[derive(Deserialize)]
    struct Final {
        z: Vec<f64>,
        w: Vec<Vec<Vec<f64>>>,
    }
    let run: Run = read("parameter-free.json");
    for mode in [Mode::Exact, Mode::Explicit, Mode::Factored] {
        let config = LearnerConfig {
            dim: run.dim,
            models: (0..run.models).map(|m| format!("m{m}")).collect(),
            algorithm: pointsman::config::Algorithm::HpgParameterFree,
            eta: Some(run.eta),
            rank: Some(run.rank),
            baseline: Some(pointsman::hpg::gradient::Baseline::None),
            mode,
            ..LearnerConfig::default()
        };
        let Method::HpgParameterFree(spec @ HpgSpec { .. }) = config.check().unwrap().method else { panic!() };
        assert_eq!((spec.ball.tau, spec.ball.beta), (run.tau, run.beta));
        let mut learner = ParameterFree::new(spec, run.dim, run.models, None);
        for (t, step) in run.steps.iter().enumerate() {
            assert_close(&learner.magnitudes(), &step.z, 1e-8);
            let query = Query::new(step.q.clone()).unwrap();
            let mut scores = vec![0.0; run.models];
            learner.scores(&query, &mut scores);
            assert_close(&pointsman::router::Sampling::Softmax.core(&scores), &step.p, 1e-8);
            let example = Example::new(query, step.m, step.p.clone(), None, step.r).unwrap();
            learner.apply(&[Lesson::new(example, 0.5)], t as u64);
        }
        assert_close(&learner.magnitudes(), &run.r#final.z, 1e-8);
        for ((eigen, z), w) in learner.eigens().iter().zip(&run.r#final.z).zip(&run.r#final.w) {
            let expected: Vec<f64> = w.iter().flatten().map(|w| w * z).collect();
            assert_close(&eigen.dense(run.dim), &expected, 1e-8);
        }
    }
}

/// Every case's examples, in the order in which they complete, through the learner in every mode that can play it.
#[test]
fn learner_steps() {
    for case in ["exact-clean", "truncated-messy", "batched", "theory", "importance", "floor"] {
        let text = fs::read_to_string(vectors().join(case).join("config.toml")).unwrap();
        let table: toml::Table = text.parse().unwrap();
        let config: LearnerConfig = table["learner"].clone().try_into().unwrap();
        let expected: Value = read(Path::new(case).join("expected.json"));
        let examples = joined_examples(case, &config.models, config.dim);
        assert_eq!(examples.len() as u64, expected["counts"]["applied"].as_u64().unwrap(), "{case}");
        for mode in [Mode::Exact, Mode::Explicit, Mode::Factored] {
            let mut trainer = Trainer::new(LearnerConfig { mode, ..config.clone() }.check().unwrap());
            for example in &examples {
                trainer.learn(example.clone()).unwrap();
            }
            trainer.flush();
            assert_eq!(trainer.version(), examples.len() as u64);
            let mean = expected["mean_reward"].as_f64().unwrap();
            assert!((trainer.mean_reward() - mean).abs() < 1e-12, "{case}");
            for (name, eigen) in config.models.iter().zip(trainer.eigens()) {
                let w: Vec<Vec<f64>> = serde_json::from_value(expected["W"][name].clone()).unwrap();
                assert_close(&eigen.dense(config.dim), &w.concat(), 1e-8);
            }
        }
    }
}

fn assert_close(found: &[f64], expected: &[f64], tolerance: f64) {
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(expected) {
        assert!((found - expected).abs() <= tolerance, "{found} {expected}");
    }
}

/// A join as simple as can be, for logs whose bad lines all lack something that a good one has.
fn joined_examples(case: &str, models: &[String], dim: usize) -> Vec<Example> {
    let mut events = Vec::new();
    for (kind, file) in ["queries.jsonl", "rewards.jsonl"].into_iter().enumerate() {
        for line in fs::read_to_string(vectors().join(case).join(file)).unwrap().lines() {
            let Ok(event) = serde_json::from_str::<Value>(line) else { continue };
            if let (Some(ts), Some(id)) = (event["ts_ms"].as_i64(), event["request_id"].as_str()) {
                events.push((ts, kind, id.to_owned(), event));
            }
        }
    }
    events.sort_by(|a, b| (a.0, a.1, &a.2).cmp(&(b.0, b.1, &b.2)));
    let (window, early) = (60_000, 10_000);
    let mut queries: BTreeMap<String, (i64, Example)> = BTreeMap::new();
    let mut rewards: BTreeMap<String, (i64, f64)> = BTreeMap::new();
    let mut done = Vec::new();
    let mut seen = std::collections::BTreeSet::new();
    for (ts, kind, id, event) in events {
        if kind == 0 {
            let Some(example) = parse_query(&event, models, dim) else { continue };
            if !seen.insert(id.clone()) {
                continue;
            }
            match rewards.remove(&id) {
                Some((at, reward)) if at >= ts - early => done.push(with_reward(&example, reward)),
                _ => drop(queries.insert(id, (ts, example))),
            }
        } else if let Some(reward) = event["reward"].as_f64() {
            match queries.remove(&id) {
                Some((at, example)) if ts <= at + window => done.push(with_reward(&example, reward)),
                Some(_) => {}
                None if !seen.contains(&id) => drop(rewards.entry(id).or_insert((ts, reward))),
                None => {}
            }
        }
    }
    done
}

fn with_reward(example: &Example, reward: f64) -> Example {
    let policy = (example.policy() != example.propensities()).then(|| example.policy().to_vec());
    Example::new(example.query().clone(), example.model(), example.propensities().to_vec(), policy, reward).unwrap()
}

fn parse_query(event: &Value, models: &[String], dim: usize) -> Option<Example> {
    let vector: Vec<f32> = match &event["query"] {
        Value::Array(numbers) => numbers.iter().map(|x| x.as_f64().map(|x| x as f32)).collect::<Option<_>>()?,
        Value::String(text) => base64(text).as_chunks::<4>().0.iter().map(|&b| f32::from_le_bytes(b)).collect(),
        _ => return None,
    };
    let probabilities = |field: &str| {
        let of = |name: &String| event[field].get(name)?.as_f64();
        models.iter().map(of).collect::<Option<Vec<f64>>>()
    };
    let model = models.iter().position(|name| event["model"] == **name)?;
    let propensities = probabilities("propensities")?;
    if vector.len() != dim || (propensities.iter().sum::<f64>() - 1.0).abs() > 1e-6 {
        return None;
    }
    let query = Query::from_f32(&vector).ok()?;
    Example::new(query, model, propensities, probabilities("policy"), 0.0).ok()
}

fn base64(text: &str) -> Vec<u8> {
    let digit =
        |c: u8| b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/".iter().position(|&x| x == c);
    let mut bytes = Vec::new();
    let (mut bits, mut count) = (0_u32, 0);
    for value in text.bytes().filter_map(digit) {
        bits = bits << 6 | value as u32;
        count += 6;
        if count >= 8 {
            count -= 8;
            bytes.push((bits >> count) as u8);
        }
    }
    bytes
}
