//! Logs through the whole stream: parse, merge, join, learn.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use pointsman::config::Config;
use pointsman::engine::{Engine, Input, Side};
use pointsman::wire::events::Parser;
use serde_json::{Value, json};

use crate::picture::pictures;

const CASES: [&str; 6] = ["exact-clean", "truncated-messy", "batched", "theory", "importance", "floor"];

fn case(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/vectors").join(name)
}

/// Runs `pointsman replay` in `directory`.
fn replay(directory: &Path, config: &Path, queries: &[PathBuf], rewards: &[PathBuf], more: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pointsman"));
    command.current_dir(directory).arg("replay").arg("--config").arg(config);
    command.arg("--queries").args(queries).arg("--rewards").args(rewards).args(more);
    command.output().unwrap()
}

fn summary(output: &Output) -> Value {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn replay_case(directory: &Path, name: &str, more: &[&str]) -> Output {
    let case = case(name);
    let (queries, rewards) = (case.join("queries.jsonl"), case.join("rewards.jsonl"));
    replay(directory, &case.join("config.toml"), &[queries], &[rewards], more)
}

#[test]
fn reference_cases_have_their_counts() {
    let directory = tempfile::tempdir().unwrap();
    for name in CASES {
        let found = summary(&replay_case(directory.path(), name, &["--json"]));
        let expected: Value = serde_json::from_slice(&fs::read(case(name).join("expected.json")).unwrap()).unwrap();
        for key in ["queries", "rewards", "applied", "expired", "duplicates", "dead_letters", "pending"] {
            assert_eq!(found[key], expected["counts"][key], "{name}: {key}");
        }
        let count = |key: &str| found[key].as_u64().unwrap();
        assert_eq!(json!(count("late") + count("orphaned")), expected["counts"]["unmatched"], "{name}");
        assert_eq!(found["version"], found["applied"]);
        let mean = |value: &Value| value["mean_reward"].as_f64().unwrap();
        assert!((mean(&found) - mean(&expected)).abs() < 1e-12, "{name}");
    }
}

#[test]
fn reference_cases_have_their_parameters() {
    for name in CASES {
        let (engine, _) = engine_after(name);
        let expected: Value = serde_json::from_slice(&fs::read(case(name).join("expected.json")).unwrap()).unwrap();
        let view = engine.spaces().next().unwrap();
        for (model, eigen) in view.models.iter().zip(&view.eigens) {
            let w: Vec<Vec<f64>> = serde_json::from_value(expected["W"][model.as_str()].clone()).unwrap();
            for (found, expected) in eigen.dense(w.len()).iter().zip(w.concat()) {
                assert!((found - expected).abs() < 1e-8, "{name} {model}: {found} {expected}");
            }
        }
    }
}

/// The engine after a case, driven step by step with counts checked after each; and its dead letters.
fn engine_after(name: &str) -> (Engine, usize) {
    let config: Config = toml::from_str(&fs::read_to_string(case(name).join("config.toml")).unwrap()).unwrap();
    let settings = config.check().unwrap();
    let parser = Parser::new(&settings);
    let mut inputs = Vec::new();
    for (file, side) in [("queries.jsonl", Side::Query), ("rewards.jsonl", Side::Reward)] {
        for line in fs::read(case(name).join(file)).unwrap().split(|&byte| byte == b'\n').filter(|l| !l.is_empty()) {
            inputs.push(Input::parse(&parser, side, line.to_vec(), None));
        }
    }
    inputs.sort_by(|a, b| a.key().cmp(&b.key()));
    let mut engine = Engine::new(settings);
    let mut dead = 0;
    for (steps, input) in inputs.into_iter().enumerate() {
        let effects = engine.step(input);
        dead += effects.dead_letters.len();
        let counts = engine.counts();
        assert!(counts.join.balance());
        assert_eq!(counts.queries() + counts.rewards(), steps as u64 + 1);
    }
    engine.finish();
    (engine, dead)
}

#[test]
fn the_split_and_the_packing_of_files_do_not_matter() {
    let directory = tempfile::tempdir().unwrap();
    for name in ["truncated-messy", "batched"] {
        let whole = summary(&replay_case(directory.path(), name, &["--json"]));
        let mut parts: [Vec<PathBuf>; 2] = [Vec::new(), Vec::new()];
        for (side, file) in ["queries.jsonl", "rewards.jsonl"].into_iter().enumerate() {
            let text = fs::read_to_string(case(name).join(file)).unwrap();
            let lines: Vec<&str> = text.lines().collect();
            // Every third line in a file of its own kind: they overlap in time.
            for part in 0..3 {
                let text = lines.iter().skip(part).step_by(3).map(|line| format!("{line}\n")).collect::<String>();
                let path = directory.path().join(format!("{part}-{file}{}", ["", ".gz", ".zst"][part]));
                fs::write(&path, pack(part, text.as_bytes())).unwrap();
                parts[side].insert(0, path);
            }
        }
        let split =
            summary(&replay(directory.path(), &case(name).join("config.toml"), &parts[0], &parts[1], &["--json"]));
        assert_eq!(split, whole, "{name}");
    }
}

fn pack(kind: usize, bytes: &[u8]) -> Vec<u8> {
    use std::io::Write;
    match kind {
        0 => bytes.to_vec(),
        1 => {
            let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
            gzip.write_all(bytes).unwrap();
            gzip.finish().unwrap()
        }
        _ => zstd::encode_all(bytes, 1).unwrap(),
    }
}

#[test]
fn dead_letters_keep_everything() {
    let directory = tempfile::tempdir().unwrap();
    let output = replay_case(directory.path(), "truncated-messy", &["--report", "out", "--png", "png"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let printed = String::from_utf8(output.stdout).unwrap();
    assert!(printed.contains("dead letters") && printed.contains("state digest"), "{printed}");
    let html = fs::read_to_string(directory.path().join("out/replay.html")).unwrap();
    assert!(html.contains("Traffic share of each model") && html.contains("Eigenvalues of W"));
    assert_eq!(pictures(&directory.path().join("png")).len(), html.matches("<figure").count());
    let letters = fs::read_to_string(directory.path().join("pointsman-dead-letters.jsonl")).unwrap();
    let letters: Vec<Value> = letters.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let (_, dead) = engine_after("truncated-messy");
    assert_eq!(letters.len(), dead);
    let mut reasons: Vec<&str> = letters.iter().map(|letter| letter["reason"].as_str().unwrap()).collect();
    reasons.sort_unstable();
    let expected = [
        "bad-propensities",
        "missing-field",
        "mistyped-field",
        "not-json",
        "not-json",
        "unknown-model",
        "wrong-dimension",
        "zero-vector",
    ];
    assert_eq!(reasons, expected);
    for letter in &letters {
        let source = fs::read_to_string(letter["source"].as_str().unwrap()).unwrap();
        let line = source.lines().nth(letter["line"].as_u64().unwrap() as usize - 1).unwrap();
        assert_eq!(letter["bytes"].as_str().unwrap(), encode(line.as_bytes()));
        assert!(letter["time_ms"].as_u64().unwrap() > 0);
    }
}

fn encode(bytes: &[u8]) -> String {
    use base64::Engine as _;
    base64::engine::general_purpose::STANDARD.encode(bytes)
}

/// Spaces are independent, may differ in their learner, and are bounded in number.
#[test]
fn many_spaces() {
    let directory = tempfile::tempdir().unwrap();
    let config = directory.path().join("spaces.toml");
    let text = r#"
        [learner]
        dim = 2
        models = ["a", "b"]
        spaces_max = 3
        missing_propensities = "uniform"
        [spaces.wide]
        dim = 3
        models = ["b", "c", "d"]
        [join]
        window_ms = 100
        on_missing = "default"
    "#;
    fs::write(&config, text).unwrap();
    let query = |id: u64, space: &str, query: Value, model: &str| {
        json!({"request_id": format!("r{id}"), "space": space, "ts_ms": id, "query": query, "model": model}).to_string()
    };
    let queries = [
        query(1, "one", json!([1, 0]), "a"),
        query(2, "two", json!([0, 1]), "b"),
        query(3, "wide", json!([0, 1, 1]), "d"),
        query(150, "one", json!([0, 1]), "b"),
        query(204, "three", json!([0, 1]), "b"),
        query(5, "wide", json!([0, 1]), "d"),
        query(6, "one", json!([0, 1]), "d"),
    ];
    let rewards = [
        json!({"request_id": "r1", "space": "one", "ts_ms": 7, "reward": 1}).to_string(),
        json!({"request_id": "r1", "space": "two", "ts_ms": 8, "reward": 1}).to_string(),
        json!({"request_id": "r2", "space": "two", "ts_ms": 8, "reward": 0}).to_string(),
        json!({"request_id": "r3", "space": "wide", "ts_ms": 9, "reward": 0.5}).to_string(),
    ];
    let write = |name: &str, lines: &[String]| {
        let path = directory.path().join(name);
        fs::write(&path, lines.join("\n")).unwrap();
        path
    };
    let (queries, rewards) = (write("q.jsonl", &queries), write("r.jsonl", &rewards));
    let found = summary(&replay(directory.path(), &config, &[queries], &[rewards], &["--json"]));
    assert_eq!(found["dead_letters"], 3, "too many spaces, wrong dimension, unknown model: {found}");
    assert_eq!((&found["joined"], &found["expired"], &found["applied"]), (&json!(3), &json!(1), &json!(4)));
    assert_eq!(found["orphaned"], 1, "a reward belongs to its own space: {found}");
    assert_eq!(found["spaces"].as_object().unwrap().len(), 3);
    assert_eq!(found["spaces"]["wide"]["mean_reward"], 0.5);
    assert_eq!(found["spaces"]["two"]["mean_reward"], 0.0);
    assert_eq!(found["spaces"]["one"]["mean_reward"], 0.5, "with the default reward");
}

#[test]
fn keep_open_leaves_windows_and_batches_open() {
    let directory = tempfile::tempdir().unwrap();
    let closed = summary(&replay_case(directory.path(), "batched", &["--json"]));
    let open = summary(&replay_case(directory.path(), "batched", &["--json", "--keep-open"]));
    assert!(open["version"].as_u64().unwrap().is_multiple_of(16));
    assert!(open["version"].as_u64() < closed["version"].as_u64());
}

#[test]
fn a_log_that_is_not_there_or_torn_is_an_error() {
    let directory = tempfile::tempdir().unwrap();
    let (config, nowhere) = (case("batched").join("config.toml"), PathBuf::from("nowhere.jsonl"));
    let rewards = [case("batched").join("rewards.jsonl")];
    let output = replay(directory.path(), &config, &[nowhere], &rewards, &[]);
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("cannot read nowhere.jsonl"));
    let torn = directory.path().join("torn.jsonl.zst");
    let packed = pack(2, &fs::read(case("batched").join("queries.jsonl")).unwrap());
    fs::write(&torn, &packed[..packed.len() / 2]).unwrap();
    let output = replay(directory.path(), &config, &[torn], &rewards, &[]);
    assert_eq!(output.status.code(), Some(1));
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(told.contains("torn.jsonl.zst"), "{told}");
}
