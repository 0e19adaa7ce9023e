//! Tables that fit: on a terminal of 80 columns, and in reports 1,100 pixels wide.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use pointsman::router::Distribution;
use pointsman::simulate::World;
use pointsman::simulate::log_quadratic::{LogQuadratic, LogQuadraticSpec};
use pointsman::simulate::queries::Shape;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};
use unicode_width::UnicodeWidthStr;

use crate::browser::{self, Browser};
use crate::gap::Made;
use crate::picture;

const MODELS: [&str; 4] = ["minilm", "bge", "e5", "gte"];
const DIM: usize = 16;

const CONFIG: &str = "[learner]
dim = 16
models = [\"minilm\", \"bge\", \"e5\", \"gte\"]
[http]
listen = \"127.0.0.1:0\"
";

/// A directory with logs of a router that is better than chance, a data set, and what commands make of them.
struct Desk(tempfile::TempDir);

impl Desk {
    fn new(requests: u64) -> Self {
        let desk = Self(tempfile::tempdir().unwrap());
        fs::write(desk.path("shop.toml"), CONFIG).unwrap();
        desk.write_logs(requests);
        Made { queries: 120, dim: 6, models: 3, structured: true }.write(&desk.path("data-set"));
        desk
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn write_logs(&self, requests: u64) {
        let spec = LogQuadraticSpec {
            dim: DIM,
            models: MODELS.len(),
            intrinsic_rank: 2,
            signal: 0.3,
            shape: Shape::PowerLaw,
            seed: 5,
        };
        let (mut world, mut draws) = (LogQuadratic::new(spec), ChaCha8Rng::seed_from_u64(7));
        let (mut queries, mut rewards) = (String::new(), String::new());
        for i in 0..requests {
            let query = world.next_query();
            let expected = world.expected_rewards(&query);
            let weights: Vec<f64> = expected.iter().map(|reward| (4.0 * reward).exp()).collect();
            let played: Vec<f64> = weights.iter().map(|w| w / weights.iter().sum::<f64>()).collect();
            let propensities: Value =
                MODELS.iter().zip(&played).map(|(name, p)| ((*name).to_owned(), json!(p))).collect();
            let model = Distribution::mix(played.clone(), 0.0, &played).draw(draws.random());
            let reward = if draws.random::<f64>() < expected[model] { 1.0 } else { 0.0 };
            let (id, ts_ms) = (format!("r{i}"), 1_700_000_000_000 + 100 * i);
            let (vector, name) = (query.as_slice(), MODELS[model]);
            let event = json!({
                "request_id": id, "ts_ms": ts_ms, "query": vector, "model": name, "propensities": propensities,
            });
            queries += &format!("{event}\n");
            rewards += &format!("{}\n", json!({"request_id": id, "ts_ms": ts_ms + 40, "reward": reward}));
        }
        for (side, lines) in [("queries", queries), ("rewards", rewards)] {
            fs::create_dir_all(self.path("data/log").join(side)).unwrap();
            fs::write(self.path("data/log").join(side).join("app.jsonl"), lines).unwrap();
        }
    }

    /// What a command prints, on so many columns.
    fn run(&self, columns: Option<&str>, arguments: &str) -> String {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pointsman"));
        command.current_dir(self.0.path()).args(["--config", "shop.toml"]).env_remove("RUST_LOG").env_remove("COLUMNS");
        if let Some(columns) = columns {
            command.env("COLUMNS", columns);
        }
        let output = command.args(arguments.split_whitespace()).output().unwrap();
        assert!(output.status.success(), "{arguments}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }
}

const LOGS: &str = "--queries data/log/queries/app.jsonl --rewards data/log/rewards/app.jsonl";

/// The commands that write reports, with figures of several runs where there can be some.
fn reporting() -> [(&'static str, String); 5] {
    [
        ("demo", "demo --rounds 1000 --dim 8 --models 3 --runs 2 --report report".to_owned()),
        ("compare", "compare --data data-set --unseen --rounds 300 --runs 2 --report report".to_owned()),
        ("gap", "gap --data data-set --report report".to_owned()),
        (
            "evaluate",
            format!("evaluate {LOGS} --algorithms configured,hypentropy-regression --window 500 --report report"),
        ),
        ("replay", format!("replay {LOGS} --report report")),
    ]
}

/// Checks every paragraph that is a table: one with a rule below its headings.
fn check_width(what: &str, text: &str, columns: usize) {
    let is_rule = |line: &str| line.trim_start().starts_with('─');
    let tables: Vec<&str> = text.split("\n\n").filter(|paragraph| paragraph.lines().any(is_rule)).collect();
    assert!(!tables.is_empty(), "{what} prints no table:\n{text}");
    for line in tables.iter().flat_map(|table| table.lines()).filter(|line| !line.starts_with("Report")) {
        assert!(line.width() <= columns, "{what}, on {columns} columns, is {} wide:\n{text}", line.width());
    }
}

#[test]
fn terminal_tables_fit() {
    let desk = Desk::new(600);
    desk.run(None, "learn --once");
    let params = "params show data/log/params/default.safetensors".to_owned();
    let others =
        [("snapshots", "snapshots list".to_owned()), ("show", "snapshots show".to_owned()), ("params", params)];
    for (name, arguments) in reporting().into_iter().chain(others) {
        check_width(name, &desk.run(None, &arguments), 80);
        if name == "evaluate" || name == "compare" {
            check_width(name, &desk.run(Some("60"), &arguments), 60);
            let wide = desk.run(Some("200"), &arguments);
            let head = if name == "evaluate" { "effective examples" } else { "unseen queries" };
            assert!(wide.lines().any(|line| line.ends_with(head)), "a wide terminal wraps nothing:\n{wide}");
        }
    }
}

#[test]
fn report_tables_keep_their_columns() {
    if !browser::possible() {
        return;
    }
    let desk = Desk::new(2000);
    let mut browser = Browser::start();
    for (name, arguments) in reporting() {
        desk.run(None, &arguments);
        let url = report_url(&desk.path("report"), name);
        browser.prefer("light");
        browser.open(&url, picture::WIDTH);
        assert_eq!(browser.eval(CUT_OFF), json!([]), "{name}");
        browser.picture(&format!("report-{name}"));
        browser.open(&url, 390);
        let too_wide = browser.eval("document.documentElement.scrollWidth - innerWidth");
        assert_eq!(too_wide, json!(0), "{name} on a phone: tables scroll, the page does not");
    }
    assert_eq!(browser.complaints(), Vec::<String>::new());
}

/// Tables, and the page, that are wider than their room.
const CUT_OFF: &str = "[document.documentElement, ...document.querySelectorAll('.table')]
    .filter(node => node.scrollWidth > node.clientWidth)
    .map(node => `${node.className}: ${node.scrollWidth} in ${node.clientWidth}`)";

/// The pictures of docs/images that show reports.
#[test]
fn reports_can_be_shown() {
    if !browser::possible() {
        return;
    }
    let (rounds, requests) = if picture::is_refresh() { (20_000, 30_000) } else { (2000, 2000) };
    let desk = Desk::new(requests);
    let mut browser = Browser::start();
    let demo = format!("demo --rounds {rounds} --runs 2 --dim 16 --models 5 --report report");
    let evaluate = format!("evaluate {LOGS} --algorithms configured,hypentropy-regression --report report");
    for (name, arguments, picture) in [("demo", demo, "demo-report"), ("evaluate", evaluate, "evaluation-report")] {
        desk.run(None, &arguments);
        browser.prefer("light");
        browser.open(&report_url(&desk.path("report"), name), picture::WIDTH);
        picture::show(&mut browser, picture, "figure");
    }
}

fn report_url(directory: &Path, name: &str) -> String {
    format!("file://{}", directory.join(format!("{name}.html")).display())
}
