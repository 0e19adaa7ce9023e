//! `evaluate` on logs of a router whose world is known.

use std::fs;
use std::path::Path;
use std::process::Command;

use pointsman::evaluate::judge::{Judge, Logged};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::Value;

use crate::compare::write_log;
use crate::picture::pictures;
use crate::size::sized;

const SPACE: [&str; 4] = ["--set", "learner.dim=8", "--set", "learner.models=[\"a\",\"b\",\"c\"]"];

/// Exit code, standard output, standard error.
fn evaluate(arguments: &[&str]) -> (Option<i32>, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pointsman"));
    command.arg("evaluate").args(arguments).args(SPACE).env_remove("RUST_LOG").env("COLUMNS", "200");
    let output = command.output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

fn json_of(arguments: &[&str]) -> Value {
    let (code, out, err) = evaluate(&[arguments, &["--json"]].concat());
    assert_eq!(code, Some(0), "{err}");
    serde_json::from_str(&out).unwrap()
}

fn row<'a>(judged: &'a Value, name: &str) -> &'a Value {
    let rows = judged["policies"].as_array().unwrap();
    rows.iter().find(|row| row["policy"] == name).unwrap_or_else(|| panic!("{name} is not in {judged}"))
}

#[test]
fn a_log_tells_what_policies_are_worth() {
    let dir = tempfile::tempdir().unwrap();
    let (queries, rewards) = write_log(dir.path(), 6000);
    let log = ["--queries", &queries, "--rewards", &rewards];
    let report = dir.path().join("report");
    let asked = ["--algorithms", "hypentropy-regression", "--window", "2000", "--report", report.to_str().unwrap()];
    let png = dir.path().join("png");
    let judged = json_of(&[&log[..], &asked, &["--png", png.to_str().unwrap()]].concat());
    assert_eq!(pictures(&png), ["evaluate-1-all-examples.png"]);
    let number = |row: &Value, key: &str| row[key].as_f64().unwrap();
    let (logged, learned, uniform) =
        (row(&judged, "logged policy"), row(&judged, "hypentropy-regression"), row(&judged, "uniform"));
    // The log is a uniform router's: the two are the same policy.
    for key in ["value", "inverse_propensity", "lift"] {
        assert!((number(logged, key) - number(uniform, key)).abs() < 1e-9, "{key}");
    }
    assert_eq!(number(logged, "effective_examples"), 6000.0);
    assert_eq!(judged["latest"]["examples"], 2000);
    for row in judged["policies"].as_array().unwrap() {
        let (low, high) = (number(&row["range"], "low"), number(&row["range"], "high"));
        for key in ["value", "inverse_propensity", "doubly_robust"] {
            assert!((low..=high).contains(&number(row, key)), "{key} of {row}");
        }
    }
    assert!(number(&learned["lift_range"], "low") > 0.0, "what is learned beats every model alone: {learned}");
    assert!(number(learned, "doubly_robust_deviation") < number(learned, "deviation"), "predictions help: {learned}");
    let page = fs::read_to_string(report.join("evaluate.html")).unwrap();
    assert!(page.contains("<svg") && page.contains("always b"));
    let (code, out, err) = evaluate(&log);
    assert_eq!(code, Some(0), "{err}");
    assert!(out.contains("logged policy") && out.contains("Undecided: "), "{out}");
}

/// Parameters that were learned from a log, judged on it as they are.
#[test]
fn parameters_are_judged_as_they_are() {
    let dir = tempfile::tempdir().unwrap();
    let (queries, rewards) = write_log(dir.path(), 4000);
    let params = learned_params(dir.path(), &queries, &rewards);
    let log = ["--queries", &queries, "--rewards", &rewards, "--params", &params];
    let judged = json_of(&log);
    let row = row(&judged, &params);
    assert!(row["lift"].as_f64().unwrap() > 0.05, "{row}");
    assert_eq!(row["poor_overlap"], false);
}

/// The parameters that `learn` publishes of a log.
fn learned_params(dir: &Path, queries: &str, rewards: &str) -> String {
    let log = dir.join("log");
    for (side, file) in [("queries", queries), ("rewards", rewards)] {
        fs::create_dir_all(log.join(side)).unwrap();
        fs::copy(file, log.join(side).join("1.jsonl")).unwrap();
    }
    let mut command = Command::new(env!("CARGO_BIN_EXE_pointsman"));
    let set = |key: &str, path: &Path| ["--set".to_owned(), format!("{key}={}", path.display())];
    command.args(["learn", "--once"]).args(SPACE).args(["--set", "learner.algorithm=hypentropy-regression"]);
    command.args(set("transport.file.dir", &log)).args(set("store.dir", &dir.join("store")));
    command.args(["--set", "http.listen=127.0.0.1:0"]);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    log.join("params/default.safetensors").to_str().unwrap().to_owned()
}

#[test]
fn mistakes_are_told() {
    let dir = tempfile::tempdir().unwrap();
    let (queries, rewards) = write_log(dir.path(), 20);
    let log = ["--queries", &queries, "--rewards", &rewards];
    for (arguments, expected_code, expected) in [
        (&["--alpha", "0.7"][..], 2, "must be a number from 1e-6 to 0.5"),
        (&["--algorithms", "hgp"], 2, "learner.algorithm = \"hgp\": must be one of hpg, "),
        (&["--params", "nowhere"], 1, "cannot read nowhere"),
        (&["--params", &queries], 1, "is not a valid parameter file"),
        (&["--space", "other"], 1, "no example of space other"),
    ] {
        let (code, _, err) = evaluate(&[&log[..], arguments].concat());
        assert_eq!(code, Some(expected_code), "{arguments:?}: {err}");
        assert!(err.contains(expected), "{arguments:?}: {err}");
    }
}

/// Policies that learn from what they chose, judged after every event: the share of runs in which a range of 95% is ever
/// wrong, about value or lift, at any of the moments.
#[test]
fn ranges_are_right_at_all_times_as_often_as_they_say() {
    const ALPHA: f64 = 0.05;
    let (runs, events) = (sized(100, 1000) as u64, sized(1000, 2000));
    let wrong = (0..runs).filter(|seed| is_ever_wrong(*seed, events, ALPHA)).count() as f64 / runs as f64;
    println!("{runs} runs of {events} events: ever wrong in {:.1}%, {:.1}% allowed", 100.0 * wrong, 100.0 * ALPHA);
    // They are cautious: all three together stay within what each is allowed.
    assert!(wrong <= ALPHA, "{wrong}");
}

/// A world of three kinds of queries and three models; the router leans on what has earned more so far.
fn is_ever_wrong(seed: u64, events: usize, alpha: f64) -> bool {
    const REWARDS: [[f64; 3]; 3] = [[0.7, 0.4, 0.2], [0.1, 0.5, 0.3], [0.4, 0.4, 0.6]];
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let mut judge = Judge::new(3, 2, 500);
    let (mut sums, mut counts) = ([[0.5_f64; 3]; 3], [[1.0_f64; 3]; 3]);
    let (mut truth, mut constants) = ([0.0; 2], [0.0; 3]);
    (1..=events).any(|n| {
        let [kind, draw, luck]: [f64; 3] = random.random();
        let kind = ((3.0 * kind) as usize).min(2);
        let weights: [f64; 3] = std::array::from_fn(|m| (4.0 * sums[kind][m] / counts[kind][m]).exp());
        let played = weights.map(|weight| 0.1 + 0.7 * weight / weights.iter().sum::<f64>());
        let model = if draw < played[0] {
            0
        } else if draw < played[0] + played[1] {
            1
        } else {
            2
        };
        let reward = f64::from(u8::from(luck < REWARDS[kind][model]));
        let other = [[0.8, 0.1, 0.1], [0.2, 0.6, 0.2], [0.1, 0.1, 0.8]][kind];
        judge.see(&Logged { propensities: &played, model, reward, predicted: &[0.4; 3] }, &[&played, &other], None);
        sums[kind][model] += reward;
        counts[kind][model] += 1.0;
        for (truth, policy) in truth.iter_mut().zip([played, other]) {
            *truth += policy.iter().zip(REWARDS[kind]).map(|(p, r)| p * r).sum::<f64>();
        }
        constants.iter_mut().zip(REWARDS[kind]).for_each(|(sum, reward)| *sum += reward);
        // Looking is what costs; it is done often, and always early on.
        n % 10 == 0 && {
            let best = constants.iter().fold(0.0_f64, |m, sum| m.max(*sum));
            let outside = |range: pointsman::evaluate::judge::Range, x: f64| x < range.low || range.high < x;
            let estimates = judge.all();
            let value = |i: usize| truth[i] / n as f64;
            outside(estimates[0].range(alpha), value(0))
                || outside(estimates[1].range(alpha), value(1))
                || outside(estimates[0].lift_range(alpha), (truth[0] - best) / n as f64)
        }
    })
}
