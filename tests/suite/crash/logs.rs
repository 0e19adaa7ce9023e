//! Logs as stacks write them on their bad days, and configurations to learn from them by.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};

use pointsman::event_time::CONFIRMATIONS;

/// One way to learn, with a log to learn from.
pub struct Variant {
    pub name: &'static str,
    /// What its configuration has besides [`COMMON`].
    config: &'static str,
    /// Whether examples are learned as soon as their reward is there.
    at_once: bool,
    /// Whether models pay for outcomes, not all are always eligible, and rewards are not all that feedback says.
    is_rich: bool,
}

pub const VARIANTS: [Variant; 5] = [
    Variant { name: "first", config: "", at_once: true, is_rich: false },
    Variant {
        name: "sum",
        config: r#"
            join.aggregate = "sum"
            join.on_missing = "default"
            learner.batch = 4
        "#,
        at_once: false,
        is_rich: false,
    },
    Variant {
        name: "sled",
        config: r#"
            store.kind = "sled"
            join.on_missing = "default"
            join.default_reward = 0.25
            learner.batch = 3
        "#,
        at_once: true,
        is_rich: false,
    },
    Variant {
        name: "bounded",
        config: r#"
            join.aggregate = "mean"
            join.pending_max = 90
            join.remembered_max = 100
            learner.algorithm = "hpg-parameter-free"
        "#,
        at_once: false,
        is_rich: false,
    },
    Variant {
        name: "budgets",
        config: r#"
            reward.on_failed = "learn"
            objective.floor = 0.05
            objective.outcomes.cost.range = [0.0, 10.0]
            objective.outcomes.cost.budget = 0.5
            objective.outcomes.cost.models = { a = 0.1, b = 1.0, c = 4.0 }
            objective.outcomes.latency_ms.range = [0.0, 1000.0]
            objective.outcomes.latency_ms.weight = 0.0001
        "#,
        at_once: true,
        is_rich: true,
    },
];

/// Dotted keys, so that a variant can add to any section.
const COMMON: &str = r#"
    learner.dim = 8
    learner.models = ["a", "b", "c"]
    learner.retired = ["old"]
    spaces.wide.dim = 5
    spaces.wide.models = ["c", "d"]
    join.window_ms = 20000
    join.early_ms = 2000
    join.reorder_ms = 1000
    events.bytes_max = 2000
    reward.out_of_range = "reject"
    snapshot.every_updates = 20
    snapshot.every_ms = 50
    transport.file.poll_ms = 5
    transport.file.idle_ms = 20
"#;

const WINDOW_MS: i64 = 20_000;
const EARLY_MS: i64 = 2000;
const REORDER_MS: i64 = 1000;

impl Variant {
    /// Its configuration.
    pub fn config(&self) -> String {
        format!("{COMMON}\n{}", self.config)
    }

    /// Its log.
    pub fn logs(&self, requests: usize, disorder: Disorder) -> Logs {
        let mut writer = Writer {
            random: ChaCha8Rng::seed_from_u64(self.name.bytes().map(u64::from).sum()),
            disorder,
            is_rich: self.is_rich,
            queries: Vec::new(),
            rewards: Vec::new(),
        };
        let mut ts_ms = 1_700_000_000_000;
        for id in 0..requests {
            ts_ms += writer.random.random_range(0..120);
            writer.request(id, ts_ms);
        }
        writer.end(ts_ms + 10 * WINDOW_MS, self.at_once)
    }
}

/// How far the lines of a log are out of order.
#[derive(Clone, Copy, PartialEq)]
pub enum Disorder {
    /// To within `join.reorder_ms`: the split into files does not matter.
    Within,
    /// Some of them beyond it, some of these later than their own window.
    Beyond,
}

/// The last request whose example is learned, with the very last event.
pub const LAST: &str = "the-last";

/// Lines of both sides, in the order in which they are written.
pub struct Logs {
    pub queries: Vec<String>,
    pub rewards: Vec<String>,
}

/// How lines become files.
#[derive(Clone, Copy)]
pub enum Split {
    /// One file a side.
    One,
    /// So many segments one after the other, the older ones compressed.
    Segments(usize),
    /// So many files that overlap in time.
    Dealt(usize),
}

impl Logs {
    /// Writes the files into `queries` and `rewards` under a directory; returns their paths, side by side.
    pub fn write(&self, dir: &Path, split: Split) -> [Vec<PathBuf>; 2] {
        [("queries", &self.queries), ("rewards", &self.rewards)].map(|(side, lines)| {
            let dir = dir.join(side);
            fs::create_dir_all(&dir).unwrap();
            let files: Vec<Vec<&String>> = match split {
                Split::One => vec![lines.iter().collect()],
                Split::Segments(n) => lines.chunks(lines.len().div_ceil(n)).map(|part| part.iter().collect()).collect(),
                Split::Dealt(n) => (0..n).map(|part| lines.iter().skip(part).step_by(n).collect()).collect(),
            };
            let last = files.len() - 1;
            let write = |(n, lines): (usize, &Vec<&String>)| {
                let pack = if n == last { Pack::Plain } else { [Pack::Gzip, Pack::Zstd, Pack::Plain][n % 3] };
                let path = dir.join(format!("a-{n:04}.jsonl{}", pack.suffix()));
                let text: String = lines.iter().flat_map(|line| [line.as_str(), "\n"]).collect();
                fs::write(&path, pack.pack(text.as_bytes())).unwrap();
                path
            };
            files.iter().enumerate().map(write).collect()
        })
    }
}

/// How a file is compressed.
#[derive(Clone, Copy)]
pub enum Pack {
    Plain,
    Gzip,
    Zstd,
}

impl Pack {
    pub fn suffix(self) -> &'static str {
        match self {
            Self::Plain => "",
            Self::Gzip => ".gz",
            Self::Zstd => ".zst",
        }
    }

    pub fn pack(self, bytes: &[u8]) -> Vec<u8> {
        match self {
            Self::Plain => bytes.to_vec(),
            Self::Gzip => {
                let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
                gzip.write_all(bytes).unwrap();
                gzip.finish().unwrap()
            }
            Self::Zstd => zstd::encode_all(bytes, 1).unwrap(),
        }
    }
}

/// A query event that can be learned from.
pub fn query_line(random: &mut ChaCha8Rng, id: &str, space: Option<&str>, ts_ms: i64) -> String {
    let (dim, models) = if space == Some("wide") { (5, &["c", "d"][..]) } else { (8, &["a", "b", "c"][..]) };
    let query: Vec<f64> = (0..dim).map(|_| random.random_range(-1.0..1.0)).collect();
    let p: f64 = random.random_range(0.1..0.9);
    let rest = (1.0 - p) / (models.len() - 1) as f64;
    let chosen = random.random_range(0..models.len());
    let propensities: serde_json::Map<String, Value> = models
        .iter()
        .enumerate()
        .map(|(m, name)| (name.to_string(), json!(if m == chosen { p } else { rest })))
        .collect();
    json!({
        "request_id": id, "space": space, "ts_ms": ts_ms, "query": query, "model": models[chosen],
        "propensities": propensities,
    })
    .to_string()
}

/// A reward event.
pub fn reward_line(id: &str, space: Option<&str>, ts_ms: i64, reward: f64) -> String {
    json!({"request_id": id, "space": space, "ts_ms": ts_ms, "reward": reward}).to_string()
}

/// Lines with the time at which they are written.
struct Writer {
    random: ChaCha8Rng,
    disorder: Disorder,
    is_rich: bool,
    queries: Vec<(i64, String)>,
    rewards: Vec<(i64, String)>,
}

impl Writer {
    fn request(&mut self, id: usize, ts_ms: i64) {
        let space = [None, Some("shop"), Some("wide")][self.random.random_range(0..3)];
        let id = format!("r{id}");
        let mut query = query_line(&mut self.random, &id, space, ts_ms);
        if self.is_rich {
            query = self.priced(&query, ts_ms);
        }
        self.add(ts_ms, true, query);
        let delays = match self.random.random_range(0..100) {
            0..10 => vec![],
            10..15 => vec![-self.random.random_range(0..EARLY_MS)],
            15..20 => vec![WINDOW_MS + self.random.random_range(1..WINDOW_MS)],
            20..25 => vec![-2 * EARLY_MS],
            25..32 => (0..2).map(|_| self.random.random_range(0..WINDOW_MS)).collect(),
            _ => vec![self.random.random_range(0..WINDOW_MS / 2)],
        };
        for delay in delays {
            let reward = f64::from(self.random.random_range(0..=8_u8)) / 8.0;
            let mut line = reward_line(&id, space, ts_ms + delay, reward);
            if self.is_rich {
                line = self.with_more(&line, space);
            }
            self.add(ts_ms + delay, false, line);
        }
        if self.random.random_bool(0.03) {
            self.add(ts_ms, false, reward_line(&format!("nobody-{id}"), space, ts_ms, 1.0));
        }
        if self.random.random_bool(0.08) {
            self.bad(&id, ts_ms);
        }
    }

    /// The decision of a router with parameters of some version; some with a price that is known in advance, some among fewer
    /// models.
    fn priced(&mut self, line: &str, ts_ms: i64) -> String {
        let mut event: Value = serde_json::from_str(line).unwrap();
        if self.random.random_bool(0.9) {
            event["params_version"] = json!(ts_ms % 50);
        }
        if self.random.random_bool(0.3) {
            event["outcomes"] = json!({"cost": self.random.random_range(0.0..12.0), "other": 1});
        }
        let chosen = event["model"].as_str().unwrap().to_owned();
        if self.random.random_bool(0.3) {
            let p = event["propensities"][&chosen].as_f64().unwrap();
            let other = event["propensities"].as_object().unwrap().keys().find(|name| **name != chosen).unwrap();
            event["propensities"] = json!({&chosen: p, other: 1.0 - p});
        }
        event.to_string()
    }

    /// Feedback with more than a reward, or something else.
    fn with_more(&mut self, line: &str, space: Option<&str>) -> String {
        let mut event: Value = serde_json::from_str(line).unwrap();
        let (one, other) = if space == Some("wide") { ("c", "d") } else { ("a", "b") };
        let mut replace = |fields: Value| {
            event.as_object_mut().unwrap().remove("reward");
            event.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        };
        match self.random.random_range(0..10) {
            0 => replace(json!({"failed": true})),
            1 => replace(json!({"outcomes": {"cost": self.random.random_range(0.0..5.0)}})),
            2 => replace(json!({"preferred": one, "over": other})),
            3 => replace(json!({"rewards": {one: 0.75, other: 0.25}})),
            4..7 => event["outcomes"] = json!({"cost": 0.7, "latency_ms": self.random.random_range(0.0..900.0)}),
            _ => {}
        }
        event.to_string()
    }

    /// Adds a line, perhaps twice, where it belongs or somewhat off.
    fn add(&mut self, ts_ms: i64, is_query: bool, line: String) {
        let copies = if self.random.random_bool(0.04) { 2 } else { 1 };
        for _ in 0..copies {
            let jitter = self.random.random_range(0..REORDER_MS - 200);
            let delay = match self.disorder {
                Disorder::Beyond if self.random.random_bool(0.02) => 3 * REORDER_MS,
                Disorder::Beyond if self.random.random_bool(0.005) => WINDOW_MS + 5 * REORDER_MS,
                _ => 0,
            };
            let side = if is_query { &mut self.queries } else { &mut self.rewards };
            side.push((ts_ms + jitter + delay, line.clone()));
        }
    }

    fn bad(&mut self, id: &str, ts_ms: i64) {
        let good: Value = json!({"request_id": format!("bad-{id}"), "ts_ms": ts_ms, "model": "a", "query": [1, 0, 0, 0, 0, 0, 0, 0],
            "propensities": {"a": 0.5, "b": 0.5}});
        let but = |field: &str, value: Value| {
            let mut bad = good.clone();
            bad[field] = value;
            bad.to_string()
        };
        let queries = [
            "{\"request_id\":".to_owned(),
            "[1, 2]".to_owned(),
            "\u{fffd}\u{1}".to_owned(),
            "x".repeat(3000),
            but("query", json!([1, 2])),
            but("query", json!([0, 0, 0, 0, 0, 0, 0, 0])),
            but("query", json!("!")),
            but("query", Value::Null),
            but("model", json!("z")),
            but("space", json!("../..")),
            but("ts_ms", json!("yesterday")),
            but("propensities", json!({"a": 0.5})),
            but("propensities", json!({"a": 0, "b": 1})),
            but("propensities", Value::Null),
        ];
        let rewards = [
            "no".to_owned(),
            json!({"request_id": id, "ts_ms": ts_ms}).to_string(),
            json!({"request_id": id, "ts_ms": ts_ms, "reward": "much"}).to_string(),
            json!({"request_id": id, "ts_ms": ts_ms, "reward": 7}).to_string(),
            json!({"request_id": "", "ts_ms": ts_ms, "reward": 1}).to_string(),
        ];
        let is_query = self.random.random_bool(0.7);
        let lines = if is_query { &queries[..] } else { &rewards[..] };
        let line = lines.choose(&mut self.random).cloned().unwrap_or_default();
        self.add(ts_ms, is_query, line);
        if self.random.random_bool(0.3) {
            let mut retired = good.clone();
            (retired["model"], retired["propensities"]) = (json!("old"), json!({"old": 0.5, "a": 0.5}));
            self.add(ts_ms, true, retired.to_string());
        }
    }

    /// The lines in their order, some that stay open, and a request whose example is learned with the last event of all. The
    /// end is far ahead of the rest, with enough events in every space to confirm it.
    fn end(mut self, ts_ms: i64, at_once: bool) -> Logs {
        for (n, space) in [None, Some("shop"), Some("wide")].into_iter().cycle().take(36).enumerate() {
            let (id, ts_ms) = (format!("open-{n}"), ts_ms - n as i64);
            if n.is_multiple_of(2) {
                self.rewards.push((ts_ms, reward_line(&id, space, ts_ms, 1.0)));
            } else {
                self.queries.push((ts_ms, query_line(&mut self.random, &id, space, ts_ms)));
            }
        }
        self.queries.push((ts_ms, query_line(&mut self.random, LAST, None, ts_ms)));
        self.rewards.push((ts_ms + 1, reward_line(LAST, None, ts_ms + 1, 0.5)));
        if !at_once {
            let ts_ms = ts_ms + WINDOW_MS + 1;
            for n in 0..CONFIRMATIONS {
                let id = format!("closes-the-last-{n}");
                self.queries.push((ts_ms, query_line(&mut self.random, &id, None, ts_ms)));
            }
        }
        let lines = |mut timed: Vec<(i64, String)>| {
            timed.sort_by_key(|line| line.0);
            timed.into_iter().map(|line| line.1).collect()
        };
        Logs { queries: lines(self.queries), rewards: lines(self.rewards) }
    }
}
