//! `compare` in simulated worlds, on data sets and on logs.

use std::fs;
use std::path::Path;
use std::process::Command;

use pointsman::simulate::World;
use pointsman::simulate::log_quadratic::{LogQuadratic, LogQuadraticSpec};
use pointsman::simulate::queries::Shape;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};

use crate::gap::Made;
use crate::picture::pictures;

/// Exit code, standard output, standard error.
fn compare(dir: &Path, arguments: &[&str]) -> (Option<i32>, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pointsman"));
    let report = dir.join("report");
    command.arg("compare").args(arguments).args(["--report", report.to_str().unwrap()]);
    command.env_remove("RUST_LOG").env("COLUMNS", "200");
    let output = command.output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

fn json_of(dir: &Path, arguments: &[&str]) -> Value {
    let (code, out, err) = compare(dir, &[arguments, &["--json"]].concat());
    assert_eq!(code, Some(0), "{err}");
    serde_json::from_str(&out).unwrap()
}

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
}

const SMALL: [&str; 8] = ["--rounds", "2000", "--dim", "8", "--models", "3", "--runs", "3"];

#[test]
fn everyone_meets_the_same_queries() {
    let dir = tempfile::tempdir().unwrap();
    let csv = dir.path().join("all.csv");
    let all = "uniform,hypentropy-regression,hpg,hpg:eta=0.1:rank=2,hpg-parameter-free,lin-ucb,lin-ucb:features=linear,\
               lin-thompson,quadratic-sgd,log-quadratic,log-linear,exp3,configured";
    let options = ["--algorithms", all, "--csv", csv.to_str().unwrap(), "--switch-at", "1500", "--lost", "0.1"];
    let png = dir.path().join("png");
    let (code, out, err) = compare(dir.path(), &[&SMALL[..], &options, &["--png", png.to_str().unwrap()]].concat());
    assert_eq!(code, Some(0), "{err}");
    assert_eq!(pictures(&png), ["compare-1-result.png"]);
    for name in all.split(',').filter(|name| *name != "configured") {
        assert!(out.lines().any(|line| line.starts_with(name)), "{name} is not in\n{out}");
    }
    assert!(out.contains("hpg (configured)") && out.contains("mean ± standard deviation of 3 runs"), "{out}");
    assert!(fs::read_to_string(dir.path().join("report/compare.html")).unwrap().contains("<svg"));
    let lines = fs::read_to_string(&csv).unwrap();
    assert_eq!(lines.lines().count(), 1 + 13 * 3);
    let cells = |line: &str| line.split(',').map(str::to_owned).collect::<Vec<String>>();
    let head = cells(lines.lines().next().unwrap());
    let at = |name: &str| head.iter().position(|cell| cell == name).unwrap();
    let (seed, oracle) = (at("seed"), at("oracle"));
    let rows: Vec<Vec<String>> = lines.lines().skip(1).map(cells).collect();
    for row in &rows {
        let first = rows.iter().find(|other| other[seed] == row[seed]).unwrap();
        assert_eq!((row.len(), &row[oracle]), (head.len(), &first[oracle]), "the same world for all");
        if row[0] == "uniform" {
            assert_eq!(row[at("mean_reward")], row[at("uniform")]);
        }
    }
    // Configured as the default is, with the same seeds, it is the default.
    let figures = |name: &str| {
        let of = |row: &&Vec<String>| row[0] == name;
        rows.iter().filter(of).map(|row| row[1..].to_vec()).collect::<Vec<_>>()
    };
    assert_eq!(figures("hpg (configured)"), figures("hpg"));
}

#[test]
fn the_same_command_gives_the_same_figures() {
    let dir = tempfile::tempdir().unwrap();
    let run = || json_of(dir.path(), &[&SMALL[..], &["--algorithms", "hypentropy-regression,lin-thompson"]].concat());
    let first = run();
    assert_eq!(first, run());
    assert_eq!(first["seeds"], json!([1, 2, 3]));
    let gap = |i: usize| numbers(&first["algorithms"][i]["gap_closed"]);
    assert_eq!(gap(0).len(), 3);
    assert_eq!(first["algorithms"][0]["spec"]["hypentropy-regression"]["feature_rank"], 8);
}

#[test]
fn quality_is_reported_against_cost() {
    let dir = tempfile::tempdir().unwrap();
    let png = dir.path().join("png");
    let budgets = ["--budget", "0.4,1", "--reprice-at", "1000", "--cost-noise", "0.2"];
    let arguments = [&SMALL[..], &budgets].concat();
    let (code, out, err) = compare(dir.path(), &[&arguments[..], &["--png", png.to_str().unwrap()]].concat());
    assert_eq!(code, Some(0), "{err}");
    assert_eq!(pictures(&png), ["compare-1-quality-against-cost.png"]);
    for row in ["hpg ", "hypentropy-regression ", "always model-3", "uniform", "best policy, whatever it costs"] {
        assert!(out.lines().any(|line| line.starts_with(row)), "{row} is not in\n{out}");
    }
    let found = json_of(dir.path(), &arguments);
    assert_eq!(found, json_of(dir.path(), &arguments));
    let players = found["algorithms"].as_array().unwrap();
    assert_eq!(players.iter().map(|row| &row["budget"]).collect::<Vec<_>>(), [0.4, 0.4, 1.0, 1.0]);
    let curve: Vec<[Vec<f64>; 2]> =
        found["possible"].as_array().unwrap().iter().map(|p| ["cost", "quality"].map(|key| numbers(&p[key]))).collect();
    for row in players {
        let [cost, quality, possible] = ["cost", "quality", "possible_quality"].map(|key| numbers(&row[key]));
        for run in 0..3 {
            let budget = row["budget"].as_f64().unwrap();
            assert!(quality[run] < 1.1 * possible[run] && cost[run] < 1.3 * budget, "{row}");
            assert!(curve.windows(2).all(|w| w[0][1][run] <= w[1][1][run] + 1e-9), "more money, more quality");
        }
    }
    assert_eq!(found["models"].as_array().unwrap().len(), 3);
}

#[test]
fn models_can_be_missing_at_random() {
    let dir = tempfile::tempdir().unwrap();
    let algorithms = ["--algorithms", "uniform,hypentropy-regression,lin-ucb", "--partial"];
    let found = json_of(dir.path(), &[&SMALL[..], &algorithms].concat());
    let closed = |i: usize| numbers(&found["algorithms"][i]["gap_closed"]).iter().sum::<f64>();
    assert!(closed(1) > closed(0) + 0.3, "{found}");
}

#[test]
fn data_sets_are_learned_where_they_can_be() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    Made { queries: 400, dim: 8, models: 3, structured: true }.write(&data);
    let base = ["--data", data.to_str().unwrap(), "--rounds", "6000", "--runs", "2"];
    let learned = json_of(dir.path(), &[&base[..], &["--algorithms", "hypentropy-regression", "--unseen"]].concat());
    let figures = &learned["algorithms"][0];
    for key in ["gap_closed_last_tenth", "above_best_constant_unseen"] {
        assert!(numbers(&figures[key]).iter().all(|x| *x > 0.05), "{key}: {figures}");
    }
    assert_eq!(learned["settings"]["queries of the data set"], "400");
    let shuffled = json_of(dir.path(), &[&base[..], &["--algorithms", "exp3", "--shuffled"]].concat());
    assert!(numbers(&shuffled["algorithms"][0]["gap_closed"]).iter().all(|x| *x < 0.05), "constants have no more");
    assert_eq!(shuffled["algorithms"][0]["above_best_constant_unseen"], Value::Null);
}

#[test]
fn repeated_and_new_queries_are_reported_apart() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    Made { queries: 300, dim: 8, models: 3, structured: true }.write(&data);
    let csv = dir.path().join("mixed.csv");
    let algorithms = ["--algorithms", "uniform,hypentropy-regression,lin-ucb", "--csv", csv.to_str().unwrap()];
    let base = ["--data", data.to_str().unwrap(), "--rounds", "3000", "--runs", "2"];
    let mixed = ["--zipf", "1", "--new", "0.4", "--unseen"];
    let (code, out, err) = compare(dir.path(), &[&base[..], &algorithms, &mixed].concat());
    assert_eq!(code, Some(0), "{err}");
    let heading = out.lines().next().unwrap();
    assert!(heading.contains("unseen queries  first occurrences") && heading.trim_end().ends_with("repeats"), "{out}");
    assert!(out.contains("of 3000 rounds were first occurrences"), "{out}");
    let lines = fs::read_to_string(&csv).unwrap();
    let cells = |line: &str| line.split(',').map(str::to_owned).collect::<Vec<String>>();
    let head = cells(lines.lines().next().unwrap());
    let rows: Vec<Vec<String>> = lines.lines().skip(1).map(cells).collect();
    let number = |row: &[String], name: &str| -> f64 {
        row[head.iter().position(|cell| cell == name).unwrap_or_else(|| panic!("{name}"))].parse().unwrap()
    };
    for row in &rows {
        assert_eq!(row.len(), head.len());
        let [first, synthetic] = ["first_occurrences", "synthetic_queries"].map(|name| number(row, name));
        // 150 queries are not held out, of which 60 are reserved and 90 repeat.
        assert!(
            (1150.0..1400.0).contains(&first) && first - synthetic <= 150.0 && first - synthetic > 100.0,
            "{row:?}"
        );
        for (all, parts) in [
            ("mean_reward", ["mean_reward_first", "mean_reward_repeats"]),
            ("best_constant", ["best_constant_first", "best_constant_repeats"]),
        ] {
            let [of_first, of_repeats] = parts.map(|name| number(row, name));
            let whole = (first * of_first + (3000.0 - first) * of_repeats) / 3000.0;
            assert!((whole - number(row, all)).abs() < 1e-9, "{all} of {row:?}");
        }
        let other = rows.iter().find(|other| other[1] == row[1]).unwrap();
        for name in ["first_occurrences", "synthetic_queries", "best_constant_first", "oracle"] {
            assert_eq!(number(row, name), number(other, name), "the same queries for all");
        }
    }
    let learned = json_of(dir.path(), &[&base[..], &algorithms, &mixed].concat());
    assert_eq!(learned, json_of(dir.path(), &[&base[..], &algorithms, &mixed].concat()));
    let figures = &learned["algorithms"][1];
    for key in ["above_best_constant_first", "above_best_constant_repeats"] {
        assert!(numbers(&figures[key]).iter().all(|x| *x > 0.02), "{key}: {figures}");
    }
    assert_eq!(
        (&learned["settings"]["zipf exponent"], &learned["settings"]["new queries"]),
        (&json!("1"), &json!("40%"))
    );
    let plain = json_of(dir.path(), &[&base[..], &algorithms].concat());
    assert_eq!(plain["algorithms"][0]["above_best_constant_first"], Value::Null);
    assert!(fs::read_to_string(&csv).unwrap().lines().skip(1).all(|line| line.ends_with(",,,,,,,")));
}

/// A log of a uniform router in a world, in two files.
pub fn write_log(dir: &Path, requests: usize) -> (String, String) {
    let spec = LogQuadraticSpec { dim: 8, models: 3, intrinsic_rank: 1, signal: 0.3, shape: Shape::PowerLaw, seed: 5 };
    let mut world = LogQuadratic::new(spec);
    let mut luck = ChaCha8Rng::seed_from_u64(1);
    let (mut queries, mut rewards) = (String::new(), String::new());
    for i in 0..requests {
        let query = world.next_query();
        let model = luck.random_range(0..3_usize);
        let reward = f64::from(u8::from(luck.random::<f64>() < world.expected_rewards(&query)[model]));
        let ts_ms = 1_700_000_000_000_u64 + 1000 * i as u64;
        let name = ["a", "b", "c"][model];
        let propensities = json!({"a": 1.0 / 3.0, "b": 1.0 / 3.0, "c": 1.0 / 3.0});
        let event = json!({"request_id": format!("r{i}"), "ts_ms": ts_ms, "query": query.as_slice(),
                           "model": name, "propensities": propensities});
        queries += &format!("{event}\n");
        rewards += &format!("{}\n", json!({"request_id": format!("r{i}"), "ts_ms": ts_ms + 500, "reward": reward}));
    }
    let place = |name: &str| dir.join(name).to_str().unwrap().to_owned();
    fs::write(place("queries.jsonl"), queries).unwrap();
    fs::write(place("rewards.jsonl"), rewards).unwrap();
    (place("queries.jsonl"), place("rewards.jsonl"))
}

#[test]
fn a_log_is_judged_by_importance_weights() {
    let dir = tempfile::tempdir().unwrap();
    let (queries, rewards) = write_log(dir.path(), 4000);
    let configured = ["--set", "learner.dim=8", "--set", "learner.models=[\"a\",\"b\",\"c\"]"];
    let base = ["--log-queries", &queries, "--log-rewards", &rewards, "--algorithms"];
    let [csv, png] = ["log.csv", "log-png"].map(|name| dir.path().join(name));
    let files = ["--csv", csv.to_str().unwrap(), "--png", png.to_str().unwrap()];
    let judged =
        json_of(dir.path(), &[&base[..], &["uniform,hypentropy-regression,lin-ucb"], &configured, &files].concat());
    assert!(fs::read_to_string(&csv).unwrap().starts_with("policy,value,range,"));
    assert_eq!(pictures(&png), ["evaluate-1-all-examples.png"]);
    assert_eq!(judged["examples"], 4000);
    let row = |name: &str| {
        judged["policies"]
            .as_array()
            .unwrap()
            .iter()
            .find(|row| row["policy"] == name)
            .unwrap_or_else(|| panic!("{name}"))
    };
    let value = |name: &str, key: &str| row(name)[key].as_f64().unwrap();
    // The log is uniform's own, so judging uniform by it is taking the mean.
    assert!((value("uniform", "value") - value("logged policy", "value")).abs() < 1e-9);
    assert!((value("uniform", "effective_examples") - 4000.0).abs() < 1e-6);
    for learner in ["hypentropy-regression", "lin-ucb"] {
        let (better, deviation) = (value(learner, "value") - value("uniform", "value"), value(learner, "deviation"));
        assert!(better > 3.0 * deviation && deviation < 0.03, "{learner}: {better} {deviation}");
        assert!((1000.0..2500.0).contains(&value(learner, "effective_examples")));
    }
    let (code, out, err) = compare(dir.path(), &[&base[..], &["lin-ucb"], &configured].concat());
    assert_eq!(code, Some(0), "{err}");
    assert!(out.contains("always b") && out.contains("4000 examples"), "{out}");
    let (code, _, err) = compare(dir.path(), &[&base[..], &["lin-ucb", "--space", "other"], &configured].concat());
    assert!(code == Some(1) && err.contains("no example of space other"), "{err}");
}

#[test]
fn mistakes_are_told() {
    let dir = tempfile::tempdir().unwrap();
    for (arguments, expected) in [
        (&["--algorithms", "hgp"][..], "learner.algorithm = \"hgp\": must be one of hpg, "),
        (&["--algorithms", "hpg:ranks=3"], "unknown key learner.ranks: did you mean learner.rank?"),
        (&["--algorithms", "hpg:rank"], "\"rank\" must be written as key=value"),
        (&["--algorithms", "hpg:rank=0"], "learner.rank = 0: must be"),
        (&["--algorithms", "hpg:dim=3"], "learner.dim is shared by all algorithms"),
        (&["--algorithms", "hypentropy-regression:mode=lazy"], "learner.mode = lazy"),
        (&["--data", "nowhere"], "nowhere"),
        (&["--unseen"], "--data"),
        (&["--zipf", "1"], "--data"),
        (&["--reprice-at", "5"], "--budget"),
        (&["--budget", "0"], "must be a number from"),
        (&["--budget", "1", "--algorithms", "exp3"], "does not predict rewards"),
        (&["--new", "0.5"], "--data"),
        (&["--data", "nowhere", "--new", "1.5"], "must be a number from 0 to 1"),
        (&["--data", "nowhere", "--zipf", "11"], "must be a number from 0 to 10"),
        (&["--log-queries", "q.jsonl"], "--log-rewards"),
    ] {
        let (code, _, err) = compare(dir.path(), arguments);
        assert_eq!(code, Some(2), "{arguments:?}: {err}");
        assert!(err.contains(expected), "{arguments:?}: {err}");
    }
}
