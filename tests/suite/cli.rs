//! The program itself, as a user runs it.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::Read;
use std::os::fd::FromRawFd;
use std::process::{Command, Output, Stdio};

use serde_json::Value;

use crate::picture::pictures;

fn pointsman(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pointsman"));
    command.args(arguments).env_remove("RUST_LOG").env("COLUMNS", "200");
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
    let png = directory.path().join("deep/png");
    let output = pointsman(&[&SMALL[..], &learners, &["--png", png.to_str().unwrap()]].concat());
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
    let pictures = pictures(&png);
    assert_eq!(pictures.len(), html.matches("<figure").count(), "{pictures:?}");
    assert!(pictures.iter().all(|name| name.starts_with("demo-") && name.ends_with(".png")), "{pictures:?}");
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
        (&["demo", "--set", "learner.rank=65"][..], "learner.rank = 65 exceeds learner.dim = 64: lower the rank"),
        (&["check-config", "--config", "/nowhere.toml"][..], "cannot read /nowhere.toml"),
        (
            &["check-config", "--set", "learner.moddels=[]"][..],
            "unknown key learner.moddels: did you mean learner.models?",
        ),
        (&["check-config", "--set", "learner.preset=theory"][..], "learner.intrinsic_rank is not set: "),
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
    assert_eq!(value["resolved"]["learner"]["method"]["actor-critic"]["ball"]["tau"], 1000.0);
}

#[test]
fn the_table_is_written_as_csv_on_request() {
    let directory = tempfile::tempdir().unwrap();
    let [report, csv] = ["report", "demo.csv"].map(|name| directory.path().join(name).to_str().unwrap().to_owned());
    let output = pointsman(&[&SMALL[..], &["--report", &report, "--csv", &csv]].concat());
    assert!(output.status.success(), "{}", text(&output.stderr));
    let written = std::fs::read_to_string(csv).unwrap();
    let lines: Vec<&str> = written.lines().collect();
    assert!(lines.len() == 7 && lines[0].starts_with("policy,"), "{written}");
    assert!(lines[4].starts_with("best constant model,"), "{written}");
}

#[test]
fn completions_and_manual_pages_know_every_command() {
    let help = text(&pointsman(&["--help"]).stdout);
    let names = help.lines().skip_while(|line| *line != "Commands:").skip(1).take_while(|line| !line.is_empty());
    // Further lines of a description are indented more.
    let names = names.filter(|line| line.starts_with("  ") && !line.starts_with("   "));
    let commands: BTreeSet<&str> = names.filter_map(|line| line.split_whitespace().next()).collect();
    assert!(commands.contains("replay") && commands.contains("man") && commands.len() > 12, "{commands:?}");
    // Help is there whatever the configuration.
    let run = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pointsman"));
        let output = command.args(arguments).env("POINTSMAN__NOWHERE__KEY", "1").output().unwrap();
        assert!(output.status.success(), "{arguments:?}: {}", text(&output.stderr));
        text(&output.stdout)
    };
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = run(&["completions", shell]);
        for command in &commands {
            assert!(script.contains(command), "{shell} does not know {command}");
        }
    }
    let bash = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(bash.path(), run(&["completions", "bash"])).unwrap();
    assert!(Command::new("bash").arg("-n").arg(bash.path()).status().unwrap().success(), "no sound bash");
    let page = run(&["man"]);
    assert!(page.contains(".TH POINTSMAN") && page.contains("evaluate"), "{page}");
    let directory = tempfile::tempdir().unwrap();
    run(&["man", "--out", directory.path().to_str().unwrap()]);
    for command in commands.iter().filter(|command| **command != "help") {
        let page = std::fs::read_to_string(directory.path().join(format!("pointsman-{command}.1"))).unwrap();
        assert!(page.contains(&format!(".TH POINTSMAN-{} 1", command.to_uppercase())), "{page}");
    }
    assert!(directory.path().join("pointsman-snapshots-rollback.1").is_file());
}

/// The names of the commands that a help text lists.
fn listed(help: &str) -> Vec<String> {
    let lines = help.lines().skip_while(|line| *line != "Commands:").skip(1).take_while(|line| !line.is_empty());
    let names = lines.filter(|line| line.starts_with("  ") && !line.starts_with("   "));
    names.filter_map(|line| line.split_whitespace().next()).filter(|name| *name != "help").map(str::to_owned).collect()
}

#[test]
fn help_teaches_by_example_and_fits_100_columns() {
    let check = |arguments: &[&str]| {
        let help = text(&pointsman(&[arguments, &["--help"]].concat()).stdout);
        let long = help.lines().find(|line| line.chars().count() > 100);
        assert_eq!(long, None, "{arguments:?}");
        help
    };
    let top = check(&[]);
    assert!(top.contains("Examples:") && top.contains("Exit codes:"), "{top}");
    for command in listed(&top) {
        let help = check(&[&command]);
        assert!(help.contains("Examples:") && help.contains(&format!("  pointsman {command}")), "{help}");
        for inner in listed(&help) {
            check(&[&command, &inner]);
        }
    }
}

/// Runs `learn --once` on empty logs and returns what it logs.
fn logged(format: &str, environment: &[(&str, &str)], stderr: Stdio) -> String {
    let directory = tempfile::tempdir().unwrap();
    let [log, store] = [("transport.file.dir", "log"), ("store.dir", "store")]
        .map(|(key, name)| format!("{key}={}", directory.path().join(name).display()));
    let mut command = Command::new(env!("CARGO_BIN_EXE_pointsman"));
    command.args(["learn", "--once", "--set", &format!("log.format={format}"), "--set", &log, "--set", &store]);
    let output = command.env_remove("RUST_LOG").envs(environment.iter().copied()).stderr(stderr).output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    text(&output.stderr)
}

#[test]
fn the_log_is_text_or_json_and_the_environment_says_how_much() {
    let plain = logged("text", &[], Stdio::piped());
    assert!(plain.contains("INFO") && plain.contains("learning") && !plain.contains('\u{1b}'), "{plain}");
    assert_eq!(logged("text", &[("RUST_LOG", "error")], Stdio::piped()), "");
    let json = logged("json", &[("RUST_LOG", "debug")], Stdio::piped());
    let lines: Vec<Value> = json.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let snapshot = lines.iter().find(|line| line["message"] == "snapshot").expect(&json);
    assert_eq!((&snapshot["level"], &snapshot["generation"]), (&"DEBUG".into(), &1.into()));
    let bad = pointsman(&["learn", "--once", "--set", "log.format=xml"]);
    assert!(
        bad.status.code() == Some(2) && text(&bad.stderr).contains("log.format = \"xml\": must be text or json"),
        "{}",
        text(&bad.stderr)
    );
}

/// Both ends of a terminal: what a program writes to the second is read from the first.
pub fn terminal() -> (File, File) {
    let (mut ours, mut its) = (0, 0);
    let none = std::ptr::null_mut();
    assert_eq!(unsafe { libc::openpty(&mut ours, &mut its, none, none.cast(), none.cast()) }, 0);
    // A process that another test starts at the same time must not keep the terminal open.
    for end in [ours, its] {
        assert_eq!(unsafe { libc::fcntl(end, libc::F_SETFD, libc::FD_CLOEXEC) }, 0);
    }
    unsafe { (File::from_raw_fd(ours), File::from_raw_fd(its)) }
}

/// All that comes out of a terminal until its other end is closed.
pub fn shown(mut ours: File) -> String {
    let (mut all, mut part) = (Vec::new(), [0; 4096]);
    while let Ok(n @ 1..) = ours.read(&mut part) {
        all.extend_from_slice(&part[..n]);
    }
    String::from_utf8_lossy(&all).into_owned()
}

#[test]
fn a_terminal_gets_colours_unless_it_wants_none_and_a_bar_with_rate_and_time_left() {
    let log = |environment: &[(&str, &str)]| {
        let (ours, its) = terminal();
        let reading = std::thread::spawn(|| shown(ours));
        logged("text", environment, its.into());
        reading.join().unwrap()
    };
    assert!(log(&[("NO_COLOR", "")]).contains("\u{1b}["));
    let plain = log(&[("NO_COLOR", "1")]);
    assert!(plain.contains("learning") && !plain.contains('\u{1b}'), "{plain:?}");
    let directory = tempfile::tempdir().unwrap();
    let bar = |arguments: &[&str]| {
        let (ours, its) = terminal();
        let reading = std::thread::spawn(|| shown(ours));
        let mut command = Command::new(env!("CARGO_BIN_EXE_pointsman"));
        command.current_dir(directory.path()).args(arguments);
        assert!(command.stderr(its).stdout(Stdio::null()).status().unwrap().success());
        drop(command);
        reading.join().unwrap()
    };
    let demo = bar(&["demo", "--rounds", "3000", "--dim", "8", "--report", "report"]);
    assert!(demo.contains("rounds/s") && demo.contains(" left"), "{demo:?}");
    for side in ["queries", "rewards"] {
        std::fs::create_dir_all(directory.path().join("data/log").join(side)).unwrap();
    }
    let query = format!("[{}1]", "1,".repeat(767));
    let event = format!(
        "{{\"request_id\":\"r\",\"ts_ms\":1,\"query\":{query},\"model\":\"bge\",\"propensities\":{{\"bge\":1}}}}\n"
    );
    std::fs::write(directory.path().join("data/log/queries/1.jsonl"), event).unwrap();
    bar(&["learn", "--once"]);
    for command in [&["list"][..], &["show"], &["verify"], &["export", "--out", "all"]] {
        let read = bar(&[&["snapshots"], command].concat());
        assert!(read.contains("generations/s") && read.contains(" left"), "{command:?}: {read:?}");
    }
}
