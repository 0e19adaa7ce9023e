//! A place to run the program in: a directory with a configuration, logs, a store and published parameters.

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::Command;

use pointsman::config::{Config, Settings};
use pointsman::router::Params;
use pointsman::simulate::queries::{Queries, Shape};
use serde_json::{Value, json};

pub struct Site {
    directory: tempfile::TempDir,
}

/// What a run of the program came to.
#[derive(Debug)]
pub struct Run {
    pub code: Option<i32>,
    pub out: String,
    pub err: String,
}

impl Site {
    pub fn new(config: &str) -> Self {
        let site = Self { directory: tempfile::tempdir().unwrap() };
        site.configure(config);
        site
    }

    pub fn configure(&self, config: &str) {
        fs::write(self.path("pointsman.toml"), config).unwrap();
    }

    pub fn settings(&self) -> Settings {
        let text = fs::read_to_string(self.path("pointsman.toml")).unwrap();
        toml::from_str::<Config>(&text).unwrap().check().unwrap()
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub fn store(&self) -> PathBuf {
        self.path("data/store")
    }

    /// Adds a file of queries and one of rewards to the logs that `learn` follows.
    pub fn log(&self, name: &str, (queries, rewards): &(Vec<Value>, Vec<Value>)) {
        for (side, events) in [("queries", queries), ("rewards", rewards)] {
            let directory = self.path("data/log").join(side);
            fs::create_dir_all(&directory).unwrap();
            let lines: String = events.iter().map(|event| format!("{event}\n")).collect();
            fs::write(directory.join(format!("{name}.jsonl")), lines).unwrap();
        }
    }

    pub fn run(&self, arguments: &[&str]) -> Run {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pointsman"));
        command.current_dir(self.directory.path()).env_remove("RUST_LOG").env("RUST_BACKTRACE", "0");
        let output = command.args(["--config", "pointsman.toml"]).args(arguments).output().unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        Run { code: output.status.code(), out: text(output.stdout), err: text(output.stderr) }
    }

    /// Runs what must succeed and prints JSON.
    pub fn json(&self, arguments: &[&str]) -> Value {
        let run = self.run(arguments);
        assert_eq!(run.code, Some(0), "{arguments:?}: {}", run.err);
        serde_json::from_str(&run.out).unwrap()
    }

    pub fn learn(&self) -> Value {
        self.json(&["learn", "--once", "--json"])
    }

    /// What is published of the space `default`.
    pub fn params(&self) -> Params {
        let bytes = fs::read(self.path("data/log/params/default.safetensors")).unwrap();
        pointsman::wire::params::decode(&bytes).unwrap()
    }
}

/// Requests as a uniform router would log them: one every 100 ms, four of five with a reward 250 ms later.
pub fn traffic(dim: usize, models: &[&str], ids: Range<u64>) -> (Vec<Value>, Vec<Value>) {
    let mut draws = Queries::new(Shape::PowerLaw, dim, ids.start);
    let propensities: Value = models.iter().map(|m| ((*m).to_owned(), json!(1.0 / models.len() as f64))).collect();
    let (mut queries, mut rewards) = (Vec::new(), Vec::new());
    for id in ids {
        let query: Vec<f32> = draws.draw().as_slice().iter().map(|x| *x as f32).collect();
        let number = id.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        let model = number as usize % models.len();
        let ts_ms = 1_700_000_000_000 + 100 * id;
        if id % 5 > 0 {
            let good = (query[0] > 0.0) == model.is_multiple_of(2);
            let reward = if good { 0.9 } else { 0.2 };
            rewards.push(json!({"request_id": format!("r{id}"), "ts_ms": ts_ms + 250, "reward": reward}));
        }
        queries.push(json!({
            "request_id": format!("r{id}"), "ts_ms": ts_ms, "query": query, "model": models[model],
            "propensities": propensities,
        }));
    }
    (queries, rewards)
}

/// Copies a directory.
pub fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let to = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() { copy(&entry.path(), &to) } else { drop(fs::copy(entry.path(), to)) }
    }
}
