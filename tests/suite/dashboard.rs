//! Every query of the dashboard and every alert, asked of a real Prometheus that scrapes the running daemons.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::deploy;
use crate::sidecar::{Client, free_port};
use crate::stack::Stack;
use crate::tool;

/// Metrics that may have nothing to tell here, and why.
const MAY_BE_EMPTY: [(&str, &str); 4] = [
    ("pointsman_learner_unreadable_offset", "log files have no partitions"),
    ("pointsman_learner_lag", "log files have no partitions"),
    ("pointsman_learner_broker_errors", "there are no brokers"),
    ("pointsman_router_deliveries", "there are no brokers"),
];

struct Prometheus {
    child: Child,
    client: Client,
}

impl Prometheus {
    fn start(dir: &Path, stack: &Stack) -> Self {
        let port = free_port();
        let rules = root().join("config/alerts.yml");
        let config = format!(
            "global: {{scrape_interval: 500ms, evaluation_interval: 1s}}
rule_files: [{rules:?}]
scrape_configs:
  - {{job_name: router, static_configs: [{{targets: [\"127.0.0.1:{}\"]}}]}}
  - {{job_name: learner, static_configs: [{{targets: [\"127.0.0.1:{}\"]}}]}}
",
            stack.router, stack.learner
        );
        let path = dir.join("prometheus.yml");
        fs::write(&path, config).unwrap();
        let child = Command::new("prometheus")
            .arg(format!("--config.file={}", path.display()))
            .arg(format!("--storage.tsdb.path={}", dir.join("prometheus").display()))
            .arg(format!("--web.listen-address=127.0.0.1:{port}"))
            .stderr(fs::File::create(dir.join("prometheus.log")).unwrap())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let client = Client::new(port);
        client.await_status("/-/ready", 200);
        Self { child, client }
    }

    /// The number of series that an expression gives.
    fn ask(&self, expression: &str) -> usize {
        let body = format!("query={}", encode(expression));
        let (status, answer) = self.client.post("/api/v1/query", "application/x-www-form-urlencoded", body.as_bytes());
        assert_eq!(status, 200, "{expression}: {answer}");
        let numbers = answer["data"]["result"].as_array().unwrap();
        let is_number = |row: &&Value| row["value"][1] != "NaN";
        numbers.iter().filter(is_number).count()
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

fn encode(text: &str) -> String {
    text.bytes()
        .map(|b| if b.is_ascii_alphanumeric() { (b as char).to_string() } else { format!("%{b:02X}") })
        .collect()
}

/// The series that an expression asks for: names of metrics with their labels.
fn selectors(expression: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for (at, _) in expression.match_indices("pointsman_") {
        let rest = &expression[at..];
        let name = rest.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_')).next().unwrap();
        let labels = rest[name.len()..].strip_prefix('{').map(|labels| labels.split('}').next().unwrap());
        found.insert(labels.map_or(name.to_owned(), |labels| format!("{name}{{{labels}}}")));
    }
    found
}

fn alerts() -> Vec<(String, String)> {
    let text = fs::read_to_string(root().join("config/alerts.yml")).unwrap();
    let rules: serde_yaml_ng::Value = serde_yaml_ng::from_str(&text).unwrap();
    let rules = rules["groups"][0]["rules"].as_sequence().unwrap();
    let text = |value: &serde_yaml_ng::Value| value.as_str().unwrap().to_owned();
    rules.iter().map(|rule| (text(&rule["alert"]), text(&rule["expr"]))).collect()
}

#[test]
fn every_panel_and_every_alert_finds_its_metrics() {
    if !tool::possible("the dashboard", &["prometheus", "promtool"]) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let stack = Stack::start(dir.path());
    stack.write_bad_events();
    let prometheus = Prometheus::start(dir.path(), &stack);
    let asked: BTreeSet<String> = deploy::expressions()
        .into_iter()
        .map(|text| text.replace("$__rate_interval", "30s").replace("$space", ".*"))
        // An alert that does not go off gives nothing: what it looks at must be there.
        .chain(alerts().iter().flat_map(|(_, expression)| selectors(expression)).filter(|selector| {
            // What goes wrong is not there while nothing does.
            let wrong = ["code=~\"5..\"", "dropped|rejected", "outcome=\"lost\"", "too-many-spaces"];
            !wrong.iter().any(|wrong| selector.contains(wrong))
        }))
        .collect();
    assert!(asked.len() > 30, "{asked:?}");
    let may_be_empty = |text: &str| MAY_BE_EMPTY.iter().any(|(name, _)| text.contains(name));
    let mut left: Vec<&String> = asked.iter().filter(|text| !may_be_empty(text)).collect();
    let start = Instant::now();
    while !left.is_empty() {
        left.retain(|text| prometheus.ask(text) == 0);
        assert!(start.elapsed() < Duration::from_secs(90), "these give nothing: {left:#?}");
        std::thread::sleep(Duration::from_millis(200));
    }
    // Those that may be empty are at least understood.
    asked.iter().filter(|text| may_be_empty(text)).for_each(|text| _ = prometheus.ask(text));
    let rules = prometheus.client.get("/api/v1/rules").unwrap().1;
    for rule in rules["data"]["groups"][0]["rules"].as_array().unwrap() {
        assert_eq!(rule["health"], "ok", "{rule}");
    }
}

#[test]
fn alerts_go_off_when_they_must() {
    if !tool::possible("the dashboard", &["prometheus", "promtool"]) {
        return;
    }
    let run = |arguments: &[&str]| {
        let output = Command::new("promtool").args(arguments).current_dir(root()).output().unwrap();
        let told = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{arguments:?}: {told}");
    };
    run(&["check", "rules", "config/alerts.yml"]);
    run(&["test", "rules", "tests/alerts.yml"]);
    let tested = fs::read_to_string(root().join("tests/alerts.yml")).unwrap();
    for (alert, _) in alerts() {
        assert!(tested.contains(&format!("alertname=\"{alert}\"")), "{alert} has no test");
    }
}
