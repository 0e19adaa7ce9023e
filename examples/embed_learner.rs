//! Learns inside your own process, without I/O: events go into `Engine::step`, parameters come out.
//!
//! ```sh
//! cargo run --example embed_learner -- params.safetensors
//! ```
//!
//! The argument is optional: with it, the parameters are written to that file, which `embed_router` reads.

use std::error::Error;
use std::path::Path;

use pointsman::config::{Config, LearnerConfig};
use pointsman::engine::{Engine, Input, Side};
use pointsman::event::{Name, Query};
use pointsman::router::Params;
use pointsman::wire::events::Parser;
use pointsman::wire::params;
use serde_json::{Value, json};

fn main() -> Result<(), Box<dyn Error>> {
    let out = std::env::args_os().nth(1);
    let params = learn(4000)?;
    print!("{}", describe(&params)?);
    if let Some(path) = out {
        std::fs::write(Path::new(&path), params::encode(&params))?;
    }
    Ok(())
}

/// Learns from so many requests, which a uniform router might have logged.
pub fn learn(requests: u64) -> Result<Params, Box<dyn Error>> {
    let models = vec!["minilm".to_owned(), "bge".to_owned()];
    let learner = LearnerConfig { dim: 3, models, ..LearnerConfig::default() };
    let settings = Config { learner, ..Config::default() }.check()?;
    let (parser, mut engine) = (Parser::new(&settings), Engine::new(settings));

    // The engine takes events in the order of their time. It joins a query with its reward, and learns from both.
    for (query, reward) in (0..requests).map(events) {
        for (side, event) in [(Side::Query, query), (Side::Reward, reward)] {
            let effects = engine.step(Input::parse(&parser, side, event.to_string().into_bytes(), None));
            if let Some(letter) = effects.dead_letters.first() {
                return Err(format!("a bad event: {}", letter.bad).into());
            }
        }
    }

    let space = Name::try_from("default")?;
    let view = engine.spaces().find(|view| view.name == space).ok_or("no events")?;
    let policy = engine.policy(&space).ok_or("no policy")?;
    Ok(Params {
        space,
        epoch: 0,
        version: view.version,
        revision: 0,
        models: view.models,
        dim: 3,
        // Your clock, in milliseconds since 1970. The engine has none.
        created_ms: 1,
        algorithm: "hpg".to_owned(),
        policy,
    })
}

/// How the parameters route two queries.
pub fn describe(params: &Params) -> Result<String, Box<dyn Error>> {
    let mut text = format!("learned from {} examples\n", params.version);
    for query in [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]] {
        let shares = params.distribution(&Query::from_f32(&query)?)?.propensities;
        let shares: Vec<String> =
            params.models.iter().zip(shares).map(|(m, p)| format!("{m} {:.0}%", 100.0 * p)).collect();
        text += &format!("{query:?}: {}\n", shares.join(", "));
    }
    Ok(text)
}

/// A query and its reward. minilm is good at queries along the first axis, bge at those along the second.
fn events(i: u64) -> (Value, Value) {
    let random = |salt: u64| ((i * 4 + salt + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as f64 / (1 << 24) as f64;
    let query = [random(0), random(1), 0.2 * random(2)];
    let model = if random(3) < 0.5 { "minilm" } else { "bge" };
    let good = if query[0] > query[1] { "minilm" } else { "bge" };
    let (request_id, ts_ms) = (format!("r-{i}"), 1_700_000_000_000 + 100 * i);
    let query = json!({
        "request_id": request_id, "ts_ms": ts_ms, "query": query, "model": model,
        "propensities": {"minilm": 0.5, "bge": 0.5},
    });
    let reward = if model == good { 0.9 } else { 0.3 };
    (query, json!({"request_id": request_id, "ts_ms": ts_ms + 50, "reward": reward}))
}
