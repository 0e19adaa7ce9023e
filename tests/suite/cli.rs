//! The program itself, as a user runs it.

use std::process::{Command, Output};

use serde_json::Value;

fn pointsman(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pointsman"));
    command.args(arguments).env_remove("RUST_LOG");
    command.output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

const SMALL: [&str; 9] = ["demo", "--rounds", "600", "--dim", "8", "--models", "3", "--runs", "2"];

#[test]
fn demo_prints_a_table_and_writes_a_report_that_stands_alone() {
    let directory = tempfile::tempdir().unwrap();
    let report = directory.path().join("deep/report");
    let learners = ["--learners", "configured,theory,parameter-free", "--report", report.to_str().unwrap()];
    let output = pointsman(&[&SMALL[..], &learners].concat());
    assert!(output.status.success(), "{}", text(&output.stderr));
    let printed = text(&output.stdout);
    for row in ["HPG, practical", "HPG, theory", "HPG, parameter-free", "best constant model", "uniform", "oracle"] {
        assert!(printed.lines().any(|line| line.starts_with(row)), "{row} is not in\n{printed}");
    }
    assert!(text(&output.stderr).contains("learning 100%"), "progress without a terminal is plain lines");
    let html = std::fs::read_to_string(report.join("demo.html")).unwrap();
    for part in ["<svg", "Reward over time", "Regret over time", "Traffic share of each model", "Eigenvalues of W"] {
        assert!(html.contains(part), "{part}");
    }
    assert!(!html.contains("<script") && !html.contains("src=") && !html.contains("@import"));
}

#[test]
fn demo_in_json_is_one_object_and_reproducible() {
    let directory = tempfile::tempdir().unwrap();
    let run = |world: &str| {
        let options = ["--json", "--world", world, "--delay", "10", "--refresh", "5", "--lost", "0.1"];
        let place = ["--switch-at", "300", "--report", directory.path().to_str().unwrap()];
        let output = pointsman(&[&SMALL[..], &options, &place].concat());
        assert!(output.status.success(), "{}", text(&output.stderr));
        serde_json::from_slice::<Value>(&output.stdout).unwrap()
    };
    for world in ["log-quadratic", "items"] {
        let first = run(world);
        assert_eq!(first, run(world));
        assert_eq!(first["seeds"], serde_json::json!([1, 2]));
        let names = ["HPG, practical", "hypentropy regression", "rival: quadratic LinUCB"];
        let references = ["best constant model", "uniform", "oracle of every query"];
        for (i, name) in names.iter().chain(&references).enumerate() {
            assert_eq!(first["policies"][i]["policy"], *name);
        }
        assert_eq!(first["policies"][5]["gap_closed"], serde_json::json!([1.0, 1.0]));
        let reward = |i: usize| first["policies"][i]["mean_reward"][0].as_f64().unwrap();
        assert!(reward(5) > reward(3) && reward(3) >= reward(4));
    }
}

#[test]
fn mistakes_exit_with_2_and_say_what_to_do() {
    for (arguments, expected) in [
        (&["demo", "--set", "learner.tau=0"][..], "learner.tau = 0: must be"),
        (&["demo", "--models", "1"][..], "nothing to route"),
        (&["demo", "--lost", "2"][..], "must be a number from 0 to 1"),
        (&["demo", "--set", "learner.rank=65"][..], "learner.rank = 65: must be 1 to 64"),
        (&["check-config", "--config", "/nowhere.toml"][..], "cannot read /nowhere.toml"),
        (&["check-config", "--set", "learner.moddels=[]"][..], "moddels"),
        (&["check-config", "--set", "learner.preset=theory"][..], "learner.intrinsic_rank"),
        (&["dmeo"][..], "demo"),
    ] {
        let output = pointsman(arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert!(text(&output.stderr).contains(expected), "{arguments:?}: {}", text(&output.stderr));
    }
}

#[test]
fn failing_to_write_the_report_exits_with_1() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let place = ["--report", file.path().to_str().unwrap()];
    let output = pointsman(&[&SMALL[..], &place].concat());
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("cannot create"), "{}", text(&output.stderr));
}

#[test]
fn check_config_prints_a_configuration_that_checks() {
    let directory = tempfile::tempdir().unwrap();
    let output = pointsman(&["check-config", "--set", "learner.eta=0.25", "--set", "learner.dim=32"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let path = directory.path().join("printed.toml");
    std::fs::write(&path, &output.stdout).unwrap();
    let again = pointsman(&["check-config", "--config", path.to_str().unwrap()]);
    assert_eq!(text(&again.stdout), text(&output.stdout));
    let json = pointsman(&["check-config", "--json"]);
    let value: Value = serde_json::from_slice(&json.stdout).unwrap();
    assert_eq!(value["config"]["learner"]["dim"], 768);
    assert_eq!(value["resolved"]["learner"]["method"]["hpg"]["ball"]["tau"], 1000.0);
}
