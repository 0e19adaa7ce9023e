//! Simulated traffic against a real router, and asking how one is.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::sidecar::{Client, Process, events, free_port, write_config};

const SMALL: &str = "[learner]\ndim = 6\nmodels = [\"a\", \"b\", \"c\"]\n";

fn command(config: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pointsman"));
    command.args(arguments).arg("--config").arg(config).env_remove("RUST_LOG");
    command
}

fn run(config: &Path, arguments: &[&str]) -> Output {
    command(config, arguments).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

fn summary(output: &Output) -> Value {
    assert!(output.status.success(), "{}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn ids(events: &[Value]) -> BTreeSet<&str> {
    events.iter().map(|event| event["request_id"].as_str().unwrap()).collect()
}

/// Whole lines in a directory of files that are being written.
fn written(dir: &Path) -> usize {
    let lines = |path: &Path| fs::read(path).unwrap().iter().filter(|byte| **byte == b'\n').count();
    fs::read_dir(dir).unwrap().map(|entry| lines(&entry.unwrap().path())).sum()
}

#[test]
fn the_logs_hold_what_the_summary_says() {
    let dir = tempfile::tempdir().unwrap();
    let port = free_port();
    let config = write_config(dir.path(), port, SMALL);
    let route = Process::start(&config, &["route", "--serve-uniform"]);
    Client::new(port).await_status("/ready", 200);
    let simulate = ["simulate", "--requests", "500", "--rate", "0", "--delay-ms", "5", "--loss", "0.2", "--json"];
    let first = summary(&run(&config, &simulate));
    let second = summary(&run(&config, &[&simulate[..], &["--space", "shop", "--connections", "1"]].concat()));
    route.terminate();
    let (queries, rewards) = (events(dir.path(), "queries"), events(dir.path(), "rewards"));
    for (found, space) in [(&first, "default"), (&second, "shop")] {
        let of_space = |events: &[Value]| -> Vec<Value> {
            events.iter().filter(|event| event["space"] == space).cloned().collect()
        };
        let (queries, rewards) = (of_space(&queries), of_space(&rewards));
        assert_eq!((&found["requests"], &found["errors"]), (&json!(500), &json!(0)), "{found}");
        assert_eq!((queries.len(), ids(&queries).len()), (500, 500));
        assert_eq!((json!(rewards.len()), ids(&rewards).len()), (found["rewards"].clone(), rewards.len()));
        assert!(ids(&rewards).is_subset(&ids(&queries)));
        assert_eq!(rewards.len() as u64 + found["rewards_lost"].as_u64().unwrap(), 500);
        assert_eq!(found["rewards_unsent"], json!(0));
        let mean = rewards.iter().map(|event| event["reward"].as_f64().unwrap()).sum::<f64>() / rewards.len() as f64;
        assert!((mean - found["mean_reward"].as_f64().unwrap()).abs() < 1e-12, "{found}");
        let expected = |of: &str| found["expected_reward"][of].as_f64().unwrap();
        assert!((expected("policy") - expected("uniform")).abs() < 1e-12, "the router has learned nothing");
        assert!(expected("oracle") > expected("best_constant") && expected("best_constant") > expected("uniform"));
        assert!(found["latency_ms"]["p50"].as_f64().unwrap() <= found["latency_ms"]["p99"].as_f64().unwrap());
    }
    // One seed is one world: only the draws of the router differ, as ids do.
    assert_eq!(first["rewards_lost"], second["rewards_lost"]);
    let oracles = [&first, &second].map(|found| found["expected_reward"]["oracle"].as_f64().unwrap());
    assert!((oracles[0] - oracles[1]).abs() < 1e-9, "{oracles:?}");
}

#[test]
fn it_waits_for_a_router_that_comes_later() {
    let dir = tempfile::tempdir().unwrap();
    let port = free_port();
    let config = write_config(dir.path(), port, SMALL);
    let log = dir.path().join("simulate.log");
    let mut early = command(&config, &["simulate", "--requests", "50", "--rate", "0", "--delay-ms", "0", "--json"]);
    let early = early.stdout(Stdio::piped()).stderr(fs::File::create(&log).unwrap()).spawn().unwrap();
    let told = |what: &str| {
        let start = Instant::now();
        while !fs::read_to_string(&log).unwrap().contains(what) {
            assert!(start.elapsed() < Duration::from_secs(30), "never told of {what:?}");
            std::thread::sleep(Duration::from_millis(20));
        }
    };
    told("cannot connect");
    let route = Process::start(&config, &["route", "--serve-uniform"]);
    let found = summary(&early.wait_with_output().unwrap());
    assert_eq!((&found["requests"], &found["rewards"]), (&json!(50), &json!(50)), "{found}");
    assert!(found["errors"].as_u64().unwrap() > 0);
    route.terminate();
    assert_eq!((events(dir.path(), "queries").len(), events(dir.path(), "rewards").len()), (50, 50));
}

#[test]
fn a_signal_ends_it_with_the_table() {
    let dir = tempfile::tempdir().unwrap();
    let port = free_port();
    let config = write_config(dir.path(), port, SMALL);
    let route = Process::start(&config, &["route", "--serve-uniform"]);
    Client::new(port).await_status("/ready", 200);
    // Rewards that would come in an hour are not waited for.
    let mut endless = command(&config, &["simulate", "--rate", "200", "--delay-ms", "3600000"]);
    let endless = endless.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let start = Instant::now();
    while written(&dir.path().join("log/queries")) < 20 {
        assert!(start.elapsed() < Duration::from_secs(30), "no traffic");
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(Command::new("kill").args(["-s", "TERM", &endless.id().to_string()]).status().unwrap().success());
    let output = endless.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let printed = text(&output.stdout);
    let value = |row: &str| {
        let line =
            printed.lines().find(|line| line.starts_with(row)).unwrap_or_else(|| panic!("{row} is not in\n{printed}"));
        line.split_whitespace().last().unwrap().to_owned()
    };
    route.terminate();
    assert_eq!(value("requests "), events(dir.path(), "queries").len().to_string());
    assert_eq!(value("rewards sent"), events(dir.path(), "rewards").len().to_string());
    for row in
        ["errors", "latency p50", "latency p99", "best constant model (", "oracle", "gap closed in the last tenth"]
    {
        value(row);
    }
}

#[test]
fn what_cannot_work_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let port = free_port();
    let config = write_config(dir.path(), port, SMALL);
    fs::write(&config, fs::read_to_string(&config).unwrap().replace("[http]", "[http]\ntoken = \"s3cret\"")).unwrap();
    let route = Process::start(&config, &["route", "--serve-uniform"]);
    let client = Client::new(port);
    client.await_status("/ready", 200);
    let url = format!("http://127.0.0.1:{port}");
    for (arguments, code, expected) in [
        (&["--to", "ftp://router"][..], 2, "http://host:port"),
        (&["--to", "router:9464"][..], 2, "http://host:port"),
        (&["--loss", "2"][..], 2, "must be a number from 0 to 1"),
        (&["--rate=-1"][..], 2, "must be a number from 0 to 1000000"),
        (&["--space", "a b"][..], 2, "--space"),
        (&["--token", "wrong"][..], 1, "401"),
        (&["--set", "learner.dim=5"][..], 1, "422"),
        (&["--set", "learner.models=[\"a\", \"b\", \"x\"]"][..], 1, "use the router's configuration"),
        (&["--to", &url, "--token", ""][..], 1, "missing or wrong bearer token"),
    ] {
        let output = run(&config, &[&["simulate", "--requests", "5"][..], arguments].concat());
        let told = text(&output.stderr);
        assert!(output.status.code() == Some(code) && told.contains(expected), "{arguments:?}: {told}");
    }
    assert_eq!(summary(&run(&config, &["simulate", "--requests", "5", "--json"]))["requests"], json!(5));
    route.terminate();
}

#[test]
fn health_is_an_exit_code() {
    let dir = tempfile::tempdir().unwrap();
    let port = free_port();
    let config = write_config(dir.path(), port, SMALL);
    let ready = format!("http://127.0.0.1:{port}/ready");
    let check = |arguments: &[&str], code: i32, expected: &str| {
        let output = run(&config, &[&["health"][..], arguments].concat());
        let told = text(&output.stdout) + &text(&output.stderr);
        assert!(output.status.code() == Some(code) && told.contains(expected), "{arguments:?}: {told}");
    };
    check(&[], 1, "no answer from http://127.0.0.1:");
    let route = Process::start(&config, &["route"]);
    Client::new(port).await_status("/live", 200);
    check(&[], 0, "200");
    check(&["--url", &ready], 1, "no parameters received yet");
    check(&["--url", "localhost"], 2, "http://host:port");
    route.terminate();
}
