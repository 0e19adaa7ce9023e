//! The router sidecar over real HTTP, alone and in the loop with the daemon.

use std::collections::{BTreeSet, VecDeque};
use std::fs;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use pointsman::simulate::World;
use pointsman::simulate::log_quadratic::{LogQuadratic, LogQuadraticSpec};
use pointsman::simulate::queries::Shape;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};

use crate::size::sized;

/// A process that is killed when the test is over, however it ends.
pub struct Process(Child, PathBuf);

impl Process {
    pub fn start(config: &Path, arguments: &[&str]) -> Self {
        Self::spawn(Command::new(env!("CARGO_BIN_EXE_pointsman")), config, arguments)
    }

    /// With a hard limit of open descriptors.
    pub fn start_limited(config: &Path, descriptors: u32, arguments: &[&str]) -> Self {
        let mut shell = Command::new("sh");
        shell.args(["-c", &format!("ulimit -n {descriptors} && exec \"$0\" \"$@\"")]);
        shell.arg(env!("CARGO_BIN_EXE_pointsman"));
        Self::spawn(shell, config, arguments)
    }

    pub fn spawn(mut command: Command, config: &Path, arguments: &[&str]) -> Self {
        let log_path = config.with_extension("log");
        let log = fs::File::options().create(true).append(true).open(&log_path).unwrap();
        let child = command.args(arguments).arg("--config").arg(config).stderr(log).stdout(Stdio::null()).spawn();
        Self(child.unwrap(), log_path)
    }

    pub fn id(&self) -> u32 {
        self.0.id()
    }

    /// What it has logged so far.
    pub fn log(&self) -> String {
        fs::read_to_string(&self.1).unwrap()
    }

    pub fn signal(&self, name: &str) {
        assert!(Command::new("kill").args(["-s", name, &self.0.id().to_string()]).status().unwrap().success());
    }

    pub fn terminate(mut self) {
        self.signal("TERM");
        let code = self.0.wait().unwrap().code();
        assert_eq!(code, Some(0), "{}", fs::read_to_string(&self.1).unwrap());
    }

    /// The code that it ends with by itself, if it does in time.
    pub fn wait(mut self, timeout: Duration) -> Option<i32> {
        let start = Instant::now();
        while start.elapsed() < timeout {
            if let Some(status) = self.0.try_wait().unwrap() {
                return status.code();
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        None
    }

    pub fn has_ended(&mut self) -> bool {
        self.0.try_wait().unwrap().is_some()
    }

    pub fn kill(mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// A client of one sidecar.
pub struct Client {
    agent: ureq::Agent,
    base: String,
}

impl Client {
    pub fn new(port: u16) -> Self {
        let config =
            ureq::Agent::config_builder().http_status_as_error(false).timeout_global(Some(Duration::from_secs(20)));
        Self { agent: config.build().into(), base: format!("http://127.0.0.1:{port}") }
    }

    pub fn post(&self, path: &str, content_type: &str, body: &[u8]) -> (u16, Value) {
        let request = self.agent.post(format!("{}{path}", self.base)).header("content-type", content_type);
        answer(request.send(body).unwrap())
    }

    pub fn json(&self, path: &str, body: &Value) -> (u16, Value) {
        self.post(path, "application/json", body.to_string().as_bytes())
    }

    pub fn put(&self, path: &str, body: &Value) -> (u16, Value) {
        let request = self.agent.put(format!("{}{path}", self.base)).header("content-type", "application/json");
        answer(request.send(body.to_string()).unwrap())
    }

    pub fn get(&self, path: &str) -> Option<(u16, Value)> {
        self.agent.get(format!("{}{path}", self.base)).call().ok().map(answer)
    }

    /// Waits until it answers, ready or not.
    pub fn await_status(&self, path: &str, status: u16) {
        let start = Instant::now();
        while self.get(path).is_none_or(|(found, _)| found != status) {
            assert!(start.elapsed() < Duration::from_secs(30), "{path} never came to {status}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

fn answer(mut response: ureq::http::Response<ureq::Body>) -> (u16, Value) {
    let text = response.body_mut().read_to_string().unwrap();
    (response.status().as_u16(), serde_json::from_str(&text).unwrap_or(Value::String(text)))
}

pub fn write_config(dir: &Path, port: u16, more: &str) -> std::path::PathBuf {
    let path = dir.join("pointsman.toml");
    let text = format!(
        "{more}\n[http]\nlisten = \"127.0.0.1:{port}\"\n[store]\ndir = {store:?}\n[transport.file]\ndir = {log:?}\npoll_ms = 20\nidle_ms = 40\n",
        store = dir.join("store"),
        log = dir.join("log"),
    );
    fs::write(&path, text).unwrap();
    path
}

pub fn events(dir: &Path, side: &str) -> Vec<Value> {
    let mut paths: Vec<_> =
        fs::read_dir(dir.join("log").join(side)).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    let lines = |path: &std::path::PathBuf| {
        fs::read_to_string(path)
            .unwrap()
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect::<Vec<Value>>()
    };
    paths.iter().flat_map(lines).collect()
}

const SMALL: &str = "[learner]\ndim = 3\nmodels = [\"a\", \"b\"]\n";

#[test]
fn answers_decide_and_are_logged_once() {
    let dir = tempfile::tempdir().unwrap();
    let port = free_port();
    let config = write_config(dir.path(), port, SMALL);
    let route = Process::start(&config, &["route", "--serve-uniform"]);
    let client = Client::new(port);
    client.await_status("/ready", 200);
    let body = json!({"request_id": "r-1", "query": [1, 2, 3]});
    let (status, first) = client.json("/v1/route", &body);
    assert_eq!((status, &first["propensities"]), (200, &json!({"a": 0.5, "b": 0.5})));
    assert_eq!((&first["params_version"], &first["space"]), (&json!(0), &json!("default")));
    assert_eq!(client.json("/v1/route", &body).1, first, "the same request, the same answer");
    let floats: Vec<u8> = [1.0_f32, 2.0, 3.0].iter().flat_map(|x| x.to_le_bytes()).collect();
    let (status, binary) = client.post("/v1/route?request_id=r-2&space=shop", "application/octet-stream", &floats);
    assert_eq!((status, &binary["space"]), (200, &json!("shop")));
    let batch = json!({"requests": [{"request_id": "r-1", "query": [1, 2, 3]}, {"query": "AACAPwAAAEAAAEBA"}]});
    let (status, decisions) = client.json("/v1/route:batch", &batch);
    assert_eq!((status, &decisions["decisions"][0]), (200, &first), "known from before");
    assert_eq!(client.json("/v1/rewards", &json!({"request_id": "r-1", "reward": 0.5})).0, 202);
    route.terminate();
    let logged = events(dir.path(), "queries");
    let ids: Vec<&Value> = logged.iter().map(|event| &event["request_id"]).collect();
    assert_eq!(ids, [&json!("r-1"), &json!("r-2"), &decisions["decisions"][1]["request_id"]]);
    for event in &logged {
        assert_eq!((&event["query"], &event["propensities"]), (&json!("AACAPwAAAEAAAEBA"), &first["propensities"]));
    }
    let rewards = events(dir.path(), "rewards");
    assert_eq!((rewards.len(), &rewards[0]["reward"]), (1, &json!(0.5)));
}

/// The parameters of version 2, whose head table has two queries.
#[test]
fn head_queries_are_routed_by_their_corrections() {
    let dir = tempfile::tempdir().unwrap();
    let port = free_port();
    let text = "[learner]\ndim = 3\nmodels = [\"bge\", \"mini.lm\"]\n";
    let config = write_config(dir.path(), port, text);
    let params = dir.path().join("log/params");
    std::fs::create_dir_all(&params).unwrap();
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/formats/params-2.safetensors");
    std::fs::copy(&golden, params.join("shop.safetensors")).unwrap();
    let route = Process::start(&config, &["route"]);
    let client = Client::new(port);
    client.await_status("/ready", 200);
    assert_eq!(client.get("/v1/status").unwrap().1["spaces"]["shop"]["head_queries"], 2);
    let known = pointsman::wire::params::decode(&std::fs::read(&golden).unwrap()).unwrap();
    for (query, is_head) in [([3.0, 4.0, 0.0], true), ([0.0, 0.0, -7.0], true), ([0.0, 0.0, 7.0], false)] {
        let body = json!({"query": query, "space": "shop"});
        let explained = client.json("/v1/explain", &body).1;
        assert_eq!(explained["is_head_query"], is_head, "{explained}");
        let expected = known.distribution(&pointsman::event::Query::new(query).unwrap()).unwrap();
        let routed = client.json("/v1/route", &body).1;
        for (m, model) in ["bge", "mini.lm"].iter().enumerate() {
            let [routed, explained] = [&routed["propensities"][model], &explained["models"][m]["propensity"]];
            assert_eq!(routed, explained);
            assert!((routed.as_f64().unwrap() - expected.propensities[m]).abs() < 1e-6, "{routed} of {model}");
        }
    }
    route.terminate();
}

#[test]
fn how_a_query_would_be_routed_is_explained_and_leaves_no_trace() {
    let dir = tempfile::tempdir().unwrap();
    let port = free_port();
    let config = write_config(dir.path(), port, &format!("{SMALL}[router]\nfallback_model = \"b\"\n"));
    let route = Process::start(&config, &["route", "--serve-uniform"]);
    let client = Client::new(port);
    client.await_status("/ready", 200);
    let (status, told) = client.json("/v1/explain", &json!({"query": [1, 2, 3], "space": "shop"}));
    assert_eq!((status, &told["space"], &told["params_version"]), (200, &json!("shop"), &json!(0)));
    let spaces = || client.get("/v1/status").unwrap().1["spaces"].as_object().unwrap().len();
    assert_eq!(spaces(), 0, "a space that was only asked about is not begun");
    let routed = client.json("/v1/route", &json!({"query": [1, 2, 3], "space": "shop"})).1;
    for model in told["models"].as_array().unwrap() {
        let name = model["model"].as_str().unwrap();
        assert_eq!(model["propensity"], routed["propensities"][name], "{told}");
    }
    assert_eq!(spaces(), 1);
    for (body, status) in [(json!({"query": [1, 2]}), 422), (json!({"query": [0, 0, 0]}), 422), (json!({}), 422)] {
        assert_eq!(client.json("/v1/explain", &body).0, status, "{body}");
    }
    let metrics = client.get("/metrics").unwrap().1.as_str().unwrap().to_owned();
    assert!(metrics.contains("pointsman_router_decisions_total{space=\"shop\",model=\"b\"} 1"), "{metrics}");
    assert!(metrics.contains("pointsman_router_requests_total{endpoint=\"explain\",code=\"422\"} 3"), "{metrics}");
    route.terminate();
    assert_eq!(events(dir.path(), "queries").len(), 1, "only what was routed is logged");
}

#[test]
fn what_is_wrong_is_told_with_its_field() {
    let dir = tempfile::tempdir().unwrap();
    let port = free_port();
    let limits = format!("{SMALL}[router]\nfallback_model = \"b\"\n");
    let config = write_config(dir.path(), port, &limits);
    with_http(&config, "body_bytes_max = 1000\ntoken = \"s3cret\"");
    let route = Process::start(&config, &["route"]);
    let client = Client::new(port);
    client.await_status("/live", 200);
    client.await_status("/ready", 503);
    let good = json!({"query": [1, 2, 3]});
    assert_eq!(client.json("/v1/route", &good).0, 401);
    let (status, problem) = client.get("/v1/status").unwrap();
    assert_eq!((status, &problem["status"]), (401, &json!(401)));
    drop(route);

    let text = fs::read_to_string(&config).unwrap().replace("token = \"s3cret\"", "");
    fs::write(&config, text).unwrap();
    let route = Process::start(&config, &["route", "--serve-uniform"]);
    client.await_status("/ready", 200);
    let long = format!("{{\"query\": [1, 2, 3], \"pad\": \"{}\"}}", "x".repeat(2000));
    for (path, body, status, field) in [
        ("/v1/route", "{", 400, None),
        ("/v1/route", "[1]", 422, Some("body")),
        ("/v1/route", "{}", 422, Some("query")),
        ("/v1/route", r#"{"query": [1, 2, 3]} x"#, 400, None),
        ("/v1/route", r#"{"query": [1, 2]}"#, 422, Some("query")),
        ("/v1/route", r#"{"query": [0, 0, 0]}"#, 422, Some("query")),
        ("/v1/route", r#"{"query": [1, "x", 3]}"#, 422, Some("query[1]")),
        ("/v1/route", r#"{"query": "abc"}"#, 422, Some("query")),
        ("/v1/route", r#"{"query": [1, 2, 3], "space": "a b"}"#, 422, Some("space")),
        ("/v1/route", r#"{"query": [1, 2, 3], "request_id": ""}"#, 422, Some("request_id")),
        ("/v1/route", &long, 413, None),
        ("/v1/route:batch", r#"{"requests": [{"query": [1, 2, 3]}, {"query": [1]}]}"#, 422, Some("requests[1].query")),
        ("/v1/rewards", r#"{"request_id": "r"}"#, 422, Some("reward")),
        ("/v1/rewards", r#"{"request_id": "r", "reward": "good"}"#, 422, Some("reward")),
        ("/v1/nothing", "{}", 404, None),
        ("/v1/status", "{}", 405, None),
    ] {
        let (found, problem) = client.post(path, "application/json", body.as_bytes());
        assert_eq!((found, &problem["status"]), (status, &json!(status)), "{path} {body}: {problem}");
        if let Some(field) = field.filter(|field| !field.is_empty()) {
            assert_eq!(problem["field"], json!(field), "{body}: {problem}");
        }
    }
    assert_eq!(client.post("/v1/route", "application/octet-stream", &[0; 7]).0, 400);
    let twice = client.post("/v1/route?space=a&space=b", "application/octet-stream", &[0; 12]);
    assert_eq!((twice.0, &twice.1["status"]), (400, &json!(400)));
    assert_eq!(client.json("/v1/route", &good).1["model"], json!("b"), "the fallback");
    route.terminate();
    assert_eq!(events(dir.path(), "queries").len(), 1, "what was refused is not logged");
}

/// A configuration with more keys of `[http]`.
fn with_http(config: &Path, keys: &str) {
    let text = fs::read_to_string(config).unwrap().replace("[http]", &format!("[http]\n{keys}"));
    fs::write(config, text).unwrap();
}

#[test]
fn too_many_and_too_slow_requests_are_turned_away() {
    let dir = tempfile::tempdir().unwrap();
    let port = free_port();
    let config = write_config(dir.path(), port, SMALL);
    with_http(&config, "requests_per_s_max = 1\ntimeout_ms = 1000");
    let route = Process::start(&config, &["route", "--serve-uniform"]);
    let client = Client::new(port);
    client.await_status("/ready", 200);
    // The body that it announces never comes.
    let mut slow = std::net::TcpStream::connect(("127.0.0.1", port)).unwrap();
    slow.write_all(
        b"POST /v1/route HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{",
    )
    .unwrap();
    let mut answer = [0; 12];
    slow.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"HTTP/1.1 408");
    let statuses: Vec<u16> = (0..5).map(|_| client.json("/v1/explain", &json!({"query": [1, 2, 3]})).0).collect();
    assert!(statuses.contains(&429), "{statuses:?}");
    drop(slow);
    route.terminate();
}

#[test]
fn a_full_queue_rejects_or_drops_and_counts() {
    for on_full in ["reject", "drop"] {
        let dir = tempfile::tempdir().unwrap();
        let port = free_port();
        let more = format!("{SMALL}[events]\nqueue_max = 1\non_full = {on_full:?}\n");
        let route = Process::start(&write_config(dir.path(), port, &more), &["route", "--serve-uniform"]);
        let client = Client::new(port);
        client.await_status("/ready", 200);
        // How many events the sidecar says had this outcome.
        let counted = |outcome: &str| -> usize {
            let text = client.get("/metrics").unwrap().1.as_str().unwrap().to_owned();
            let label = format!("outcome=\"{outcome}\"");
            let counts =
                text.lines().filter(|line| line.starts_with("pointsman_router_events") && line.contains(&label));
            counts.map(|line| line.rsplit_once(' ').unwrap().1.parse::<usize>().unwrap()).sum()
        };
        let (mut answered, mut refused) = (0, 0);
        let start = Instant::now();
        while counted("rejected") + counted("dropped") == 0 {
            assert!(start.elapsed() < Duration::from_secs(60), "a queue of one was never full");
            let body = json!({"query": [1, 2, 3]});
            let one = || (0..50).map(|_| Client::new(port).json("/v1/route", &body).0).collect::<Vec<u16>>();
            let statuses: Vec<u16> = std::thread::scope(|scope| {
                let threads: Vec<_> = (0..16).map(|_| scope.spawn(one)).collect();
                threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
            });
            answered += statuses.iter().filter(|status| **status == 200).count();
            refused += statuses.iter().filter(|status| **status == 503).count();
        }
        let (written, rejected, dropped) = (counted("written"), counted("rejected"), counted("dropped"));
        route.terminate();
        assert_eq!(events(dir.path(), "queries").len(), written, "{on_full}");
        assert_eq!((answered, refused), (written + dropped, rejected), "{on_full}");
        assert_eq!(if on_full == "reject" { dropped } else { rejected }, 0, "{on_full}");
    }
}

/// The daemon and the sidecar as two processes, each restarted midway, over HTTP, with delayed and lost rewards.
#[test]
fn the_closed_loop_learns() {
    const DIM: usize = 64;
    let rounds = sized(8000, 20_000);
    let dir = tempfile::tempdir().unwrap();
    let port = free_port();
    let models: Vec<String> = (1..=8).map(|m| format!("model-{m}")).collect();
    let settings = format!(
        "[learner]\ndim = {DIM}\nmodels = {models:?}\n[join]\nreorder_ms = 20\n[snapshot]\nevery_updates = 200\nevery_ms = 100\n"
    );
    let config = write_config(dir.path(), port, &settings);
    let mut learn = Process::start(&config, &["learn", "--set", "http.listen="]);
    let mut route = Process::start(&config, &["route", "--serve-uniform"]);
    let client = Client::new(port);
    client.await_status("/ready", 200);
    let mut traffic = Traffic::new(&models, DIM);
    for round in 0..rounds {
        if round == rounds / 3 {
            route.terminate();
            route = Process::start(&config, &["route"]);
            client.await_status("/ready", 200);
        }
        if round == rounds / 2 {
            learn.kill();
            learn = Process::start(&config, &["learn", "--set", "http.listen="]);
        }
        traffic.ask(&client, round >= rounds * 3 / 4);
    }
    route.terminate();
    learn.terminate();
    let output = Command::new(env!("CARGO_BIN_EXE_pointsman"))
        .args(["learn", "--once", "--json", "--config"])
        .arg(&config)
        .output()
        .unwrap();
    let summary: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(summary["queries"], json!(rounds));
    let rewarded = json!(traffic.rewarded.len());
    assert_eq!((&summary["rewards"], &summary["applied"]), (&rewarded, &rewarded));
    assert_eq!(summary["dead_letters"], json!(0));
    let closed = traffic.closed();
    println!("closed loop of {rounds} requests: {:.1}% of the gap in the last quarter", 100.0 * closed);
    assert!(closed > 0.25, "only {closed} of the gap between the best constant model and the oracle");
}

/// Simulated traffic with delayed and lost rewards, one request at a time.
pub struct Traffic {
    models: Vec<String>,
    world: LogQuadratic,
    luck: ChaCha8Rng,
    waiting: VecDeque<(String, f64)>,
    /// Requests whose reward was sent.
    pub rewarded: BTreeSet<String>,
    policy: f64,
    constants: Vec<f64>,
    oracle: f64,
}

impl Traffic {
    pub fn new(models: &[String], dim: usize) -> Self {
        let number = models.len();
        let shape = Shape::PowerLaw;
        let spec = LogQuadraticSpec { dim, models: number, intrinsic_rank: 2, signal: 0.3, shape, seed: 3 };
        Self {
            models: models.to_vec(),
            world: LogQuadratic::new(spec),
            luck: ChaCha8Rng::seed_from_u64(5),
            waiting: VecDeque::new(),
            rewarded: BTreeSet::new(),
            policy: 0.0,
            constants: vec![0.0; number],
            oracle: 0.0,
        }
    }

    /// Has a query routed, and sends a reward that is due; `judged`: it counts for how well it is routed.
    pub fn ask(&mut self, client: &Client, judged: bool) {
        let query = self.world.next_query();
        let bytes: Vec<u8> = query.as_slice().iter().flat_map(|&x| (x as f32).to_le_bytes()).collect();
        let (status, decision) = client.post("/v1/route", "application/octet-stream", &bytes);
        assert_eq!(status, 200, "{decision}");
        let expected = self.world.expected_rewards(&query);
        if judged {
            let of = |name: &str| decision["propensities"][name].as_f64().unwrap();
            self.policy += self.models.iter().zip(&expected).map(|(name, r)| of(name) * r).sum::<f64>();
            self.constants.iter_mut().zip(&expected).for_each(|(sum, r)| *sum += r);
            self.oracle += expected.iter().fold(0.0_f64, |m, &r| m.max(r));
        }
        let chosen = self.models.iter().position(|name| decision["model"] == **name).unwrap();
        let reward = f64::from(u8::from(self.luck.random::<f64>() < expected[chosen]));
        if self.luck.random::<f64>() >= 0.1 {
            self.waiting.push_back((decision["request_id"].as_str().unwrap().to_owned(), reward));
        }
        if self.waiting.len() > 100 {
            let (request_id, reward) = self.waiting.pop_front().unwrap();
            assert_eq!(client.json("/v1/rewards", &json!({"request_id": request_id, "reward": reward})).0, 202);
            self.rewarded.insert(request_id);
        }
    }

    /// How much of the gap between the best constant model and the oracle was closed, in what was judged.
    pub fn closed(&self) -> f64 {
        let best = self.constants.iter().fold(0.0_f64, |m, &r| m.max(r));
        (self.policy - best) / (self.oracle - best)
    }
}
