//! `evaluate` on logs of a router whose world is known.

use std::fs;
use std::path::Path;
use std::process::Command;

use pointsman::eligible::Eligible;
use pointsman::evaluate::judge::{Crossing, Judge, Logged, Range};
use pointsman::evaluate::sample_ratio::SampleRatio;
use pointsman::evaluate::verdict::{Assessments, Finding, Names};
use pointsman::event::ModelName;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};

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
    assert!(out.contains("logged policy") && out.contains("uniform earns ") && out.contains(": undecided; "), "{out}");
    // Without --algorithms the configured one is a candidate.
    assert!(out.contains("hpg (configured) earns "), "{out}");
    let verdicts = judged["verdicts"].as_array().unwrap();
    assert_eq!(verdicts.len(), 3);
    assert_eq!((&verdicts[0]["policy"], &verdicts[0]["result"]), (&json!("hypentropy-regression"), &json!("pays")));
    assert_eq!((&verdicts[0]["range"], &verdicts[0]["sentence"]), (&learned["lift_range"], &judged["verdict"]));
    let sentence = judged["verdict"].as_str().unwrap();
    assert!(
        sentence.starts_with("hypentropy-regression earns 0.") && sentence.ends_with("): routing pays."),
        "{sentence}"
    );
    assert!(
        sentence.contains("more per request than always ") && sentence.contains(", the best single model (range +0.")
    );
    let drawn = |name: &str| page.contains(&format!("{name}, lower bound ends with"));
    assert!(["logged policy", "hypentropy-regression", "uniform"].into_iter().all(drawn), "every candidate is charted");
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

/// A log of a 50/30/20 split without propensities, which `learner.missing_propensities` and `learner.declared_propensities` say
/// something about.
fn split_log(dir: &Path, requests: u64) -> [String; 2] {
    let mut random = ChaCha8Rng::seed_from_u64(11);
    let (mut queries, mut rewards) = (String::new(), String::new());
    for i in 0..requests {
        let [draw, luck, kind]: [f64; 3] = random.random();
        let kind = usize::from(kind < 0.5);
        let model = usize::from(draw >= 0.5) + usize::from(draw >= 0.8);
        let vector: Vec<f64> = (0..8).map(|j| if j == kind { 1.0 } else { 0.1 * random.random::<f64>() }).collect();
        let earns = [[0.7, 0.3, 0.2], [0.2, 0.5, 0.3]][kind][model];
        let (time, name) = (1_731_700_000_000 + 1000 * i, ["a", "b", "c"][model]);
        queries += &json!({"request_id": i.to_string(), "ts_ms": time, "query": vector, "model": name}).to_string();
        queries.push('\n');
        let reward = u8::from(luck < earns);
        rewards += &json!({"request_id": i.to_string(), "ts_ms": time + 500, "reward": reward}).to_string();
        rewards.push('\n');
    }
    [("queries", queries), ("rewards", rewards)].map(|(name, text)| {
        let path = dir.join(format!("{name}.jsonl"));
        fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    })
}

/// A log that contradicts what is assumed of it has no range and no verdict, in `evaluate` and in `replay`; once its split is
/// declared, the two agree.
#[test]
fn a_log_that_contradicts_its_propensities_has_no_verdict() {
    let dir = tempfile::tempdir().unwrap();
    let [queries, rewards] = split_log(dir.path(), 3000);
    let log = ["--queries", &queries, "--rewards", &rewards];
    let replay = |set: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pointsman"));
        command.arg("replay").args(log).args(SPACE).args(set).current_dir(dir.path()).env("COLUMNS", "200");
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let uniform = ["--set", "learner.missing_propensities=uniform"];
    let report = dir.path().join("report");
    let judged = json_of(&[&log[..], &uniform, &["--report", report.to_str().unwrap()]].concat());
    assert_eq!(
        (&judged["contradiction"]["kind"], &judged["contradiction"]["model"]),
        (&json!("sample-ratio"), &json!("a"))
    );
    assert_eq!(judged["sample_ratio"]["mismatch"], true);
    let share = &judged["sample_ratio"]["models"][0];
    assert!(
        (share["played"].as_f64().unwrap() - 0.5).abs() < 0.03
            && (share["expected"].as_f64().unwrap() - 1.0 / 3.0).abs() < 1e-9,
        "{share}"
    );
    for row in judged["policies"].as_array().unwrap() {
        assert_eq!((&row["range"], &row["lift_range"]), (&Value::Null, &Value::Null), "{row}");
    }
    for verdict in judged["verdicts"].as_array().unwrap() {
        assert_eq!(
            (&verdict["result"], &verdict["range"], &verdict["lift"]),
            (&json!("contradiction"), &Value::Null, &Value::Null)
        );
    }
    let reason = judged["verdict"].as_str().unwrap().to_owned();
    assert!(reason.starts_with("no verdict: the log contradicts its propensities: a was played "), "{reason}");
    assert!(
        reason.contains("its mean propensity is 33.3%") && reason.contains("learner.declared_propensities"),
        "{reason}"
    );
    let page = fs::read_to_string(report.join("evaluate.html")).unwrap();
    assert!(page.contains("no verdict: the log contradicts its propensities") && !page.contains("routing pays"));
    let (_, out, _) = evaluate(&[&log[..], &uniform].concat());
    let replayed = replay(&uniform);
    for text in [&out, &replayed] {
        assert_eq!(text.matches(&reason).count(), 1, "{text}");
        assert!(
            text.contains("warning: models were not played as often as their propensities say: a was played "),
            "{text}"
        );
        assert!(!text.contains("pays.") && !text.contains("earns"), "{text}");
    }
    let declared = ["--set", "learner.declared_propensities={a=0.5,b=0.3,c=0.2}"];
    let judged = json_of(&[&log[..], &declared].concat());
    assert_eq!((&judged["contradiction"], &judged["sample_ratio"]["mismatch"]), (&Value::Null, &json!(false)));
    let replayed: Value = serde_json::from_str(&replay(&[&declared[..], &["--json"]].concat())).unwrap();
    let results = |verdicts: &Value| -> Vec<(String, String)> {
        let text = |one: &Value, key: &str| one[key].as_str().unwrap().to_owned();
        verdicts.as_array().unwrap().iter().map(|one| (text(one, "policy"), text(one, "result"))).collect()
    };
    let found = results(&judged["verdicts"]);
    assert_eq!(found, results(&replayed["spaces"]["default"]["worth"]["verdicts"]));
    assert_eq!(found[0], ("hpg (configured)".to_owned(), "pays".to_owned()));
}

/// What a log says of its propensities.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Says {
    /// The distribution of every query.
    Right,
    /// The mean of these, declared for a router that ignores the query.
    Declared,
    /// The distribution of the other kind of queries.
    Wrong,
    /// A uniform choice, for a router that prefers a model.
    Uniform,
}

/// Logs whose propensities are right: ranges cover the truth, and the log is found to contradict them, at any time, as rarely as
/// alpha says. Logs whose propensities are wrong have no verdict.
#[test]
fn verdicts_are_as_right_as_the_propensities() {
    const ALPHA: f64 = 0.1;
    let (runs, events) = (sized(150, 1000) as u64, sized(600, 2000));
    for says in [Says::Right, Says::Declared, Says::Wrong, Says::Uniform] {
        let (mut mismatched, mut contradicted, mut wrong) = (0, 0, 0);
        for seed in 0..runs {
            let found = judge_log(says, seed, events, ALPHA);
            mismatched += u64::from(found.ever_mismatched);
            contradicted += u64::from(found.contradicts);
            wrong += u64::from(found.ever_wrong);
        }
        let share = |number: u64| number as f64 / runs as f64;
        println!(
            "{says:?}: {runs} runs of {events} events: sample ratio ever rejected in {:.1}%, no verdict at the end in {:.1}%, a \
             range ever wrong in {:.1}%",
            100.0 * share(mismatched),
            100.0 * share(contradicted),
            100.0 * share(wrong)
        );
        match says {
            Says::Right | Says::Declared => {
                assert!(share(mismatched) <= ALPHA && share(contradicted) <= ALPHA, "{says:?}");
                // Those of all values and those of all lifts.
                assert!(share(wrong) <= ALPHA, "{says:?}");
            }
            Says::Wrong | Says::Uniform => {
                assert!(share(mismatched) >= 0.99 && share(contradicted) >= 0.99, "{says:?}")
            }
        }
    }
}

#[derive(Default)]
struct Found {
    ever_mismatched: bool,
    /// At the end.
    contradicts: bool,
    ever_wrong: bool,
}

/// Two kinds of queries, one more frequent, and three models.
fn judge_log(says: Says, seed: u64, events: usize, alpha: f64) -> Found {
    const REWARDS: [[f64; 3]; 2] = [[0.7, 0.4, 0.2], [0.1, 0.5, 0.3]];
    const PLAYED: [[f64; 3]; 2] = [[0.6, 0.3, 0.1], [0.2, 0.3, 0.5]];
    const SPLIT: [f64; 3] = [0.5, 0.3, 0.2];
    let policies = [[0.8, 0.1, 0.1], [0.1, 0.8, 0.1]];
    let candidates = ["logged", "routed"].map(str::to_owned);
    let models = ["a", "b", "c"].map(|name| ModelName::try_from(name).unwrap());
    let names = Names { candidates: &candidates, models: &models };
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let (mut judge, mut ratio) = (Judge::new(3, 2, 200), SampleRatio::new(3));
    let (mut truth, mut found) = ([0.0; 5], Found::default());
    for n in 1..=events {
        let [kind, draw, luck]: [f64; 3] = random.random();
        let kind = usize::from(kind < 0.25);
        let (played, said) = match says {
            Says::Right => (PLAYED[kind], PLAYED[kind]),
            Says::Declared => (SPLIT, SPLIT),
            Says::Wrong => (PLAYED[kind], PLAYED[1 - kind]),
            Says::Uniform => (SPLIT, [1.0 / 3.0; 3]),
        };
        let model = usize::from(draw >= played[0]) + usize::from(draw >= played[0] + played[1]);
        let reward = f64::from(u8::from(luck < REWARDS[kind][model]));
        ratio.see(&said, model);
        judge.see(
            &Logged { propensities: &said, model, reward, predicted: &[0.4; 3], eligible: &Eligible::ALL },
            &[&said, &policies[kind]],
        );
        found.ever_mismatched |= ratio.is_mismatch(alpha);
        let value = |policy: &[f64]| policy.iter().zip(REWARDS[kind]).map(|(p, r)| p * r).sum::<f64>();
        let alone = [0, 1, 2].map(|model| REWARDS[kind][model]);
        for (sum, value) in truth.iter_mut().zip([value(&said), value(&policies[kind])].into_iter().chain(alone)) {
            *sum += value;
        }
        if n % 20 > 0 && n < events {
            continue;
        }
        let assessed = Assessments::of(&judge, &ratio, &names, alpha).unwrap();
        found.contradicts = assessed.contradiction.is_some();
        let comparisons = assessed.comparisons(&names);
        for one in &comparisons {
            assert_eq!(one.result == Finding::Contradiction, found.contradicts);
            assert!(
                one.range
                    .is_none_or(|range| range.low <= range.high && one.lift == Some(range.nearest(one.lift.unwrap())))
            );
        }
        let means = truth.map(|sum| sum / n as f64);
        let best = means[2..].iter().fold(0.0_f64, |best, mean| best.max(*mean));
        let outside = |range: Option<Range>, x: f64| range.is_some_and(|range| range.nearest(x) != x);
        let all = &assessed.all;
        let figures = all.candidates.iter().chain(&all.alone).zip(means);
        found.ever_wrong |= figures.into_iter().any(|(figures, mean)| outside(figures.range, mean));
        found.ever_wrong |= all.lifts.iter().zip(means).any(|(lift, mean)| outside(lift.over_any, mean - best));
    }
    found
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
        judge.see(
            &Logged { propensities: &played, model, reward, predicted: &[0.4; 3], eligible: &Eligible::ALL },
            &[&played, &other],
        );
        sums[kind][model] += reward;
        counts[kind][model] += 1.0;
        for (truth, policy) in truth.iter_mut().zip([played, other]) {
            *truth += policy.iter().zip(REWARDS[kind]).map(|(p, r)| p * r).sum::<f64>();
        }
        constants.iter_mut().zip(REWARDS[kind]).for_each(|(sum, reward)| *sum += reward);
        // Looking is what costs; it is done often, and always early on.
        n % 10 == 0 && {
            let best = constants.iter().fold(0.0_f64, |m, sum| m.max(*sum));
            let outside = |range: Result<Range, Crossing>, x: f64| range.map_or(true, |range| range.nearest(x) != x);
            let estimates = judge.all();
            let value = |i: usize| truth[i] / n as f64;
            outside(estimates[0].range(alpha), value(0))
                || outside(estimates[1].range(alpha), value(1))
                || outside(estimates[0].lift_range(alpha), (truth[0] - best) / n as f64)
        }
    })
}
