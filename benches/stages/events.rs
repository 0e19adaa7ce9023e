//! What comes in: events, and their join.

use std::collections::HashMap;
use std::hint::black_box;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use pointsman::config::{Config, Settings};
use pointsman::feedback::Feedback;
use pointsman::joiner::{Joiner, Payload};
use pointsman::wire::events::Parser;
use serde_json::{Value, json};

use crate::support::{fastest, model_names, timed};
use crate::{BUDGET, DIM, MODELS, STRETCH, Stage, copy, each, singles};

/// Requests that wait for their reward at any time.
const PENDING: usize = 1000;

/// Query events, as an array of numbers and as base64.
pub fn decoding() -> Vec<Stage> {
    let settings = settings();
    let parser = Parser::new(&settings);
    let arrays = events(|query| json!(query));
    let encoded = events(|query| json!(STANDARD.encode(bytes(query))));
    let read = |events: &[Vec<u8>]| each(events, |event| drop(black_box(parser.query(event, None).expect("an event"))));
    let value = |event: &[u8]| serde_json::from_slice::<Value>(event).expect("JSON");
    let mut value_array = || {
        each(&arrays, |event| {
            let value = value(event);
            let numbers = value["query"].as_array().expect("an array").iter();
            black_box(numbers.map(|x| x.as_f64().expect("a number") as f32).collect::<Vec<f32>>());
        })
    };
    let mut value_text = || {
        each(&encoded, |event| {
            let bytes = STANDARD.decode(value(event)["query"].as_str().expect("text")).expect("base64");
            let numbers = bytes.as_chunks().0.iter();
            black_box(numbers.map(|x| f32::from_le_bytes(*x)).collect::<Vec<f32>>());
        })
    };
    let [array, array_plain, text, text_plain] =
        fastest(BUDGET, [&mut || read(&arrays), &mut value_array, &mut || read(&encoded), &mut value_text]);
    let stage = |name, time, events: &[Vec<u8>], plain| Stage {
        name,
        rank: None,
        time,
        limit: Some(copy(events[0].len())),
        alternatives: vec![("serde_json::Value", plain)],
    };
    vec![
        stage("event, decode array", array, &arrays, array_plain),
        stage("event, decode base64", text, &encoded, text_plain),
    ]
}

fn settings() -> Settings {
    let text = format!("[learner]\ndim = {DIM}\nmodels = {:?}\n", model_names(MODELS));
    toml::from_str::<Config>(&text).expect("good TOML").check().expect("a good configuration")
}

/// Query events, each with its vector as `write` has it.
fn events(write: impl Fn(&[f32]) -> Value) -> Vec<Vec<u8>> {
    let propensities: HashMap<String, f64> = model_names(MODELS).into_iter().map(|name| (name, 0.125)).collect();
    let event = |(i, query): (usize, &Vec<f32>)| {
        let (id, model) = (format!("request-{i:08}"), format!("m{}", i % MODELS));
        let event = json!({
            "request_id": id, "ts_ms": 1_700_000_000_000_i64 + i as i64, "query": write(query), "model": model,
            "propensities": propensities,
        });
        event.to_string().into_bytes()
    };
    singles(STRETCH).iter().enumerate().map(event).collect()
}

/// A query and the reward of an earlier one: a request through the join, against a map that knows nothing of time.
pub fn joining() -> Stage {
    let mut joiner = Joiner::new(settings().join);
    let mut map = HashMap::new();
    let (mut next, mut next_in_map) = (0, 0);
    let mut join = || {
        let (requests, mut out) = (requests(next), Vec::new());
        let request = |(i, (id, earlier, payload)): (usize, (String, String, Waiting))| {
            let ts_ms = 1_700_000_000_000 + (next + i) as i64;
            joiner.observe(ts_ms, &mut out);
            joiner.query(&id, ts_ms, payload, &mut out);
            joiner.observe(ts_ms, &mut out);
            joiner.reward(&earlier, ts_ms, Feedback::reward(1.0), None, &mut out);
            black_box(&out);
            out.clear();
        };
        let time = timed(|| requests.into_iter().enumerate().for_each(request));
        next += STRETCH;
        time / STRETCH as f64
    };
    let mut look_up = || {
        let requests = requests(next_in_map);
        let request = |(id, earlier, payload)| {
            map.insert(id, payload);
            drop(black_box(map.remove(&earlier)));
        };
        next_in_map += STRETCH;
        timed(|| requests.into_iter().for_each(request)) / STRETCH as f64
    };
    // Until as many wait as in the long run.
    (0..2 * PENDING / STRETCH).for_each(|_| _ = (join(), look_up()));
    let [time, map] = fastest(BUDGET, [&mut join, &mut look_up]);
    Stage {
        name: "join, query and reward",
        rank: None,
        time,
        limit: None,
        alternatives: vec![("HashMap, no time", map)],
    }
}

/// A query in the join.
struct Waiting(Vec<f32>);

impl Payload for Waiting {
    fn bytes(&self) -> usize {
        4 * self.0.len()
    }
}

/// Requests from number `first` on: the id, the id of the one whose reward comes now, and what it carries.
fn requests(first: usize) -> Vec<(String, String, Waiting)> {
    let id = |i: usize| format!("request-{i:010}");
    (first..first + STRETCH).map(|i| (id(i + PENDING), id(i), Waiting(vec![1.0; DIM]))).collect()
}

fn bytes(query: &[f32]) -> Vec<u8> {
    query.iter().flat_map(|x| x.to_le_bytes()).collect()
}
