//! Counts of further and clipped rewards, and warnings about a log, in every command that learns from one.

use std::fs;

use serde_json::{Value, json};

use crate::browser::{self, Browser};
use crate::sidecar::{Client, Process, free_port};
use crate::site::Site;

const CONFIG: &str = "[learner]\ndim = 2\nmodels = [\"a\", \"b\", \"c\"]\nmissing_propensities = \"uniform\"\n";

const REQUESTS: u64 = 4000;
const CLICKED: u64 = REQUESTS.div_ceil(3);
const BOUGHT: u64 = REQUESTS.div_ceil(15);

/// Requests a minute apart, by turns of models `a` and `b`. One in three is clicked, which is a reward of 1. One click in five
/// is followed by a purchase, a reward of 5 that is sent twice.
fn clicks() -> (Vec<Value>, Vec<Value>) {
    let ts = |i: u64| 1_700_000_000_000 + 60_000 * i;
    let query = |i: u64| {
        let model = ["a", "b"][i as usize % 2];
        json!({"request_id": format!("r{i}"), "ts_ms": ts(i), "query": [1, i], "model": model})
    };
    let reward = |i: u64, after_ms: u64, reward: u64| json!({"request_id": format!("r{i}"), "ts_ms": ts(i) + after_ms, "reward": reward});
    let rewards = (0..REQUESTS).step_by(3).flat_map(|i| {
        let bought = if i % 5 == 0 { vec![reward(i, 2000, 5); 2] } else { Vec::new() };
        std::iter::once(reward(i, 1000, 1)).chain(bought)
    });
    ((0..REQUESTS).map(query).collect(), rewards.collect())
}

const LOG: [&str; 4] = ["--queries", "data/log/queries/all.jsonl", "--rewards", "data/log/rewards/all.jsonl"];

/// A site with the log, where `learn` follows it.
fn site(config: &str) -> Site {
    let site = Site::new(config);
    site.log("all", &clicks());
    site
}

/// Warnings by their code and their key; each sentence names its key.
fn codes(warnings: &Value) -> Vec<(&str, &str)> {
    fn of(warning: &Value) -> (&str, &str) {
        let [code, key, text] = ["code", "key", "text"].map(|part| warning[part].as_str().unwrap());
        assert!(text.contains(key), "{warning}");
        (code, key)
    }
    warnings.as_array().unwrap().iter().map(of).collect()
}

const EQUAL: (&str, &str) = ("all-rewards-equal", "join.on_missing");
const UNREWARDED: (&str, &str) = ("most-queries-unrewarded", "join.on_missing");
const CLIPPED: (&str, &str) = ("many-rewards-clipped", "reward.range");
const FURTHER: (&str, &str) = ("further-rewards-ignored", "join.aggregate");
const UNPLAYED: (&str, &str) = ("model-never-played", "learner.models");

/// What the default configuration makes of clicks.
const OF_CLICKS: [(&str, &str); 4] = [EQUAL, UNREWARDED, FURTHER, UNPLAYED];

/// What is said of it in text.
const SENTENCES: [&str; 4] = [
    "every reward is 1: there is nothing to learn from. If only clicks are logged, set join.on_missing = \"default\"",
    "2666 of 4000 queries have no reward",
    "267 of 1601 rewards came after the first of their request and were ignored",
    "none of 1334 examples played the model c",
];

#[test]
fn replay_counts_further_and_clipped_rewards_and_warns() {
    let site = site(CONFIG);
    let replay = |more: &[&str]| site.run(&[&["replay"], &LOG[..], more].concat());
    let json = |more: &[&str]| -> Value { serde_json::from_str(&replay(&[more, &["--json"]].concat()).out).unwrap() };
    let found = json(&["--report", "report"]);
    assert_eq!(codes(&found["warnings"]), OF_CLICKS);
    assert_eq!(found["warnings"][0]["space"], "default");
    let counts =
        |found: &Value| ["applied", "further", "clipped", "duplicates"].map(|key| found[key].as_u64().unwrap());
    assert_eq!(counts(&found), [CLICKED, BOUGHT, 0, 2 * BOUGHT], "a purchase that is sent again repeats the first");
    let rewards = &found["spaces"]["default"]["join"]["rewards"];
    assert_eq!((&rewards["further"], &rewards["duplicate"]), (&json!(BOUGHT), &json!(2 * BOUGHT)));
    let (page, run) = (fs::read_to_string(site.path("report/replay.html")).unwrap(), replay(&[]));
    assert!(page.contains("<h2>Warnings</h2>"), "{page}");
    for sentence in SENTENCES {
        let line = format!("warning: space default: {sentence}");
        assert!(run.out.lines().any(|of| of.starts_with(&line)), "{line}\n{}", run.out);
        assert!(page.contains(&sentence.replace('"', "&quot;")) || page.contains(sentence), "{sentence}\n{page}");
    }
    for (name, number) in [("of these further (ignored)", BOUGHT), ("of these clipped", 0), ("duplicate", 2 * BOUGHT)] {
        let ends = |line: &str| line.trim_end().ends_with(&format!(" {number}"));
        assert!(run.out.lines().any(|line| line.starts_with(name) && ends(line)), "{name}\n{}", run.out);
    }
    // A sum is out of range though no reward alone is clipped, and counts once.
    let summed = json(&["--set", "join.aggregate=sum"]);
    assert_eq!(counts(&summed), [CLICKED, 0, BOUGHT, BOUGHT]);
    assert_eq!(codes(&summed["warnings"]), [EQUAL, UNREWARDED, CLIPPED, UNPLAYED]);
    // What the warnings ask for.
    let remedies =
        ["join.aggregate=sum", "join.on_missing=default", "reward.range=[0,6]", "learner.models=[\"a\",\"b\"]"];
    let remedied = json(&remedies.map(|set| ["--set", set]).concat());
    assert_eq!(counts(&remedied), [REQUESTS, 0, 0, BOUGHT]);
    assert_eq!(remedied["warnings"], json!([]));
}

#[test]
fn evaluate_and_compare_warn() {
    let site = site(CONFIG);
    let found = site.json(&[&["evaluate", "--json", "--report", "report"], &LOG[..]].concat());
    assert_eq!(codes(&found["warnings"]), OF_CLICKS);
    let page = fs::read_to_string(site.path("report/evaluate.html")).unwrap();
    let (warnings, table) = (page.find("<h2>Warnings</h2>").unwrap(), page.find("<h2>All examples</h2>").unwrap());
    assert!(warnings < table);
    let logs = ["--log-queries", LOG[1], "--log-rewards", LOG[3]];
    for command in [[&["evaluate"], &LOG[..]].concat(), [&["compare", "--algorithms", "uniform"], &logs[..]].concat()] {
        let run = site.run(&command);
        assert_eq!(run.code, Some(0), "{}", run.err);
        for sentence in SENTENCES {
            assert!(run.out.contains(&format!("\nwarning: space default: {sentence}")), "{sentence}\n{}", run.out);
        }
    }
    let without = site.json(&[&["evaluate", "--json", "--set", "join.on_missing=default"], &LOG[..]].concat());
    assert_eq!(codes(&without["warnings"]), [FURTHER, UNPLAYED]);
}

/// Live, and however often it is stopped or killed.
#[test]
fn a_learner_shows_warnings_and_keeps_the_counts() {
    let (queries, rewards) = clicks();
    let site = Site::new(CONFIG);
    let start_ms = queries[0]["ts_ms"].as_i64().unwrap();
    let halves = |events: &[Value]| -> (Vec<Value>, Vec<Value>) {
        let is_early = |event: &&Value| event["ts_ms"].as_i64().unwrap() < start_ms + 60_000 * 2000;
        events.iter().cloned().partition(|event| is_early(&event))
    };
    let ((early_queries, late_queries), (early_rewards, late_rewards)) = (halves(&queries), halves(&rewards));
    site.log("1", &(early_queries, early_rewards));
    let run = site.run(&["learn", "--once"]);
    assert_eq!(run.code, Some(0), "{}", run.err);
    assert!(run.err.contains("WARN") && run.err.contains(SENTENCES[0]), "{}", run.err);

    site.log("2", &(late_queries, late_rewards));
    let port = free_port();
    let listen = format!("http.listen=127.0.0.1:{port}");
    let config = site.path("pointsman.toml");
    let directory = site.path("data");
    let at = |key: &str, name: &str| format!("{key}={}", directory.join(name).display());
    let places = [at("store.dir", "store"), at("transport.file.dir", "log")];
    let learn = Process::start(&config, &["learn", "--set", &listen, "--set", &places[0], "--set", &places[1]]);
    let client = Client::new(port);
    client.await_status("/ready", 200);
    let status = await_applied(&client);
    let space = &status["spaces"]["default"];
    assert_eq!(codes(&space["warnings"]), OF_CLICKS);
    assert_eq!(space["counts"]["join"]["rewards"]["further"], BOUGHT);
    check_metrics(&client);
    check_page(port);
    learn.kill();
    let (found, shown) = (site.learn(), site.json(&["snapshots", "show", "--json"]));
    let whole = self::site(CONFIG);
    let expected = whole.learn();
    for key in ["state_digest", "further", "clipped", "duplicates", "warnings", "rewards", "applied"] {
        assert_eq!(found[key], expected[key], "{key}");
        assert_eq!(shown[key], expected[key], "{key}");
    }
    assert!(site.run(&["snapshots", "show"]).out.contains(&format!("warning: space default: {}", SENTENCES[0])));
}

/// The status once everything is learned.
fn await_applied(client: &Client) -> Value {
    let start = std::time::Instant::now();
    loop {
        let status = client.get("/v1/status").unwrap().1;
        if status["counts"]["applied"] == CLICKED {
            return status;
        }
        assert!(start.elapsed().as_secs() < 60, "{status}");
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
}

fn check_metrics(client: &Client) {
    let metrics = client.get("/metrics").unwrap().1;
    let text = metrics.as_str().unwrap();
    for code in [EQUAL, UNREWARDED, CLIPPED, FURTHER, UNPLAYED].map(|(code, _)| code) {
        let is_there = u64::from(OF_CLICKS.iter().any(|(of, _)| *of == code));
        let line = format!("pointsman_learner_warnings{{space=\"default\",code=\"{code}\"}} {is_there}");
        assert!(text.lines().any(|of| of == line), "{line}\n{text}");
    }
    for line in [
        format!("pointsman_learner_rewards_further_total{{}} {BOUGHT}"),
        "pointsman_learner_rewards_clipped_total{} 0".to_owned(),
    ] {
        assert!(text.lines().any(|of| of == line), "{line}\n{text}");
    }
}

fn check_page(port: u16) {
    if !browser::possible() {
        return;
    }
    let mut browser = Browser::start();
    browser.open(&format!("http://127.0.0.1:{port}/"), 1280);
    browser.wait_for("!(document.getElementById('warnings-card')?.hidden ?? true)");
    let shown = browser.eval("[...document.querySelectorAll('#warnings li')].map(item => item.textContent)");
    let expected: Vec<String> = SENTENCES.iter().map(|sentence| format!("default: {sentence}")).collect();
    let shown: Vec<&str> = shown.as_array().unwrap().iter().map(|line| line.as_str().unwrap()).collect();
    assert_eq!(shown.len(), expected.len());
    // The last windows are still open, so that fewer queries have expired than after a replay.
    for (line, expected) in shown.iter().zip(&expected).filter(|(_, expected)| !expected.contains("2666")) {
        assert!(line.starts_with(expected.as_str()), "{expected}: {line}");
    }
    let reward =
        "[...document.querySelectorAll('#rewards-funnel div')].map(row => row.innerText.replaceAll(/\\s+/g, ' '))";
    let rewards = browser.eval(reward);
    let has = |line: String| rewards.as_array().unwrap().iter().any(|row| row.as_str().unwrap().starts_with(&line));
    assert!(has(format!("further {BOUGHT} ")) && has("clipped 0 ".to_owned()), "{rewards}");
    browser.picture("warnings");
    assert_eq!(browser.complaints(), Vec::<String>::new());
}
