//! `pointsman doctor`: what it finds, and what it says to do.

use std::fs;
use std::path::Path;
use std::process::Output;

use serde_json::{Value, json};

use crate::broker;
use crate::kafka::Place;
use crate::site::Site;

/// The checks, as (check, result, text and remedy).
fn checks(printed: &str) -> Vec<(String, String, String)> {
    let printed: Value = serde_json::from_str(printed).unwrap();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let check = |c: &Value| {
        let said = format!("{}; {}", text(&c["text"]), text(&c["remedy"]));
        (text(&c["check"]), text(&c["result"]), said)
    };
    printed["checks"].as_array().unwrap().iter().map(check).collect()
}

/// Asserts the result of the check whose name begins so, and parts of what it says.
fn finds(checks: &[(String, String, String)], name: &str, result: &str, parts: &[&str]) {
    let found = checks.iter().find(|check| check.0.starts_with(name)).unwrap_or_else(|| panic!("{name}: {checks:#?}"));
    assert_eq!(found.1, result, "{found:?}");
    assert!(parts.iter().all(|part| found.2.contains(part)), "{parts:?} are not in {found:?}");
}

const LOGS: &str =
    "[learner]\ndim = 2\nmodels = [\"a\", \"b\"]\n[logs]\nqueries = [\"q.jsonl\"]\nrewards = [\"r.jsonl\"]\n";

fn write_logs(site: &Site, model: &str, rewarded: &str) {
    let line = |id: &str, i: u64, more: Value| {
        let mut event = json!({"request_id": format!("{id}{i}"), "ts_ms": 1_700_000_000_000_u64 + i});
        event.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        format!("{event}\n")
    };
    let query = |i| line("r", i, json!({"query": [1.0, i], "model": model, "propensities": {"a": 0.5, "b": 0.5}}));
    fs::write(site.path("q.jsonl"), (0..50).map(query).collect::<String>()).unwrap();
    let reward = |i| line(rewarded, i, json!({"reward": 1}));
    fs::write(site.path("r.jsonl"), (0..50).map(reward).collect::<String>()).unwrap();
}

#[test]
fn logs_store_and_parameters_on_files() {
    let site = Site::new(LOGS);
    let doctor = || {
        let run = site.run(&["doctor", "--json"]);
        (run.code, checks(&run.out))
    };
    // Nothing is there yet.
    let (code, found) = doctor();
    assert_eq!(code, Some(1));
    finds(&found, "q.jsonl", "fail", &["No such file", "pointsman init"]);

    write_logs(&site, "a", "r");
    let (code, found) = doctor();
    assert_eq!(code, Some(0), "{found:#?}");
    finds(&found, "q.jsonl", "ok", &["50 of the first 50 queries are usable"]);
    finds(&found, "join", "ok", &["50 of the first 50 rewards belong to one of the first 50 queries"]);
    finds(&found, "store", "ok", &["does not exist yet"]);
    finds(&found, "server", "warn", &["pointsman up"]);

    // Models and request IDs that nobody configured.
    write_logs(&site, "c", "x");
    let (code, found) = doctor();
    assert_eq!(code, Some(1));
    finds(&found, "q.jsonl", "fail", &["0 of the first 50 queries are usable", "unknown-model"]);
    write_logs(&site, "a", "x");
    finds(&doctor().1, "join", "fail", &["0 of the first 50 rewards", "events.fields.request_id"]);

    // Parameters of another configuration.
    write_logs(&site, "a", "r");
    fs::create_dir_all(site.path("data/log/params")).unwrap();
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/formats/params-1.safetensors");
    fs::copy(golden, site.path("data/log/params/shop.safetensors")).unwrap();
    let (code, found) = doctor();
    assert_eq!(code, Some(1));
    finds(&found, "parameters", "fail", &["space shop", "dim"]);

    // For people: a line each, with the remedy.
    let run = site.run(&["doctor"]);
    assert!(run.out.starts_with("ok    configuration: 2 models, 2 dimensions"), "{}", run.out);
    assert!(run.out.contains("\nfail  parameters: ") && run.err.contains("1 check failed"), "{}{}", run.out, run.err);
    assert!(!site.path("data/store").exists(), "it changes nothing");
}

#[test]
fn brokers_and_topics() {
    let Some(brokers) = broker::shared() else { return };
    let place = Place::without_topics(brokers, "[learner]\ndim = 2\nmodels = [\"a\", \"b\"]\n");
    let of = |output: &Output| checks(&String::from_utf8_lossy(&output.stdout));
    let missing = place.run(&["doctor", "--json"]);
    assert_eq!(missing.status.code(), Some(1));
    finds(&of(&missing), "brokers", "ok", &["reachable"]);
    finds(&of(&missing), &format!("topic {}", place.topic("queries")), "fail", &["pointsman topics init"]);
    place.ok(&["topics", "init"]);
    let found = of(&place.ok(&["doctor", "--json"]));
    finds(&found, &format!("topic {}", place.topic("queries")), "ok", &["3 partitions"]);
    finds(&found, &format!("topic {}", place.topic("params")), "ok", &[]);
    let nobody = place.run(&["doctor", "--json", "--set", "transport.kafka.brokers=127.0.0.1:1"]);
    assert_eq!(nobody.status.code(), Some(1));
    finds(&of(&nobody), "brokers 127.0.0.1:1", "fail", &["cannot reach any broker", "transport.kafka.brokers"]);
}
