//! Freshness: the time from a reward to a router that uses parameters which contain it, with default settings.
//!
//!   cargo bench --bench freshness                           # on files, a minute for each rate of rewards
//!   cargo bench --bench freshness -- --kafka --seconds 20   # on a broker of its own too: needs Java 17 and Maven
//!
//! Router and learner are processes. The client sends 100 queries per second, some of which get a reward 300 ms later. The
//! n-th line of the log of applied requests is contained in version n and later ones. The time ends when the router's status
//! first shows such a version; it is asked every 5 ms.

use std::collections::BTreeMap;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use pointsman::report::{Column, Table};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};

use broker::Broker;

#[path = "support/broker.rs"]
mod broker;

const DIM: usize = 384;
const MODELS: [&str; 3] = ["minilm", "bge", "e5"];
const QUERIES_PER_S: u32 = 100;
const REWARDS_PER_S: [u32; 4] = [1, 3, 5, 30];

/// Time from a query to its reward, in queries.
const REWARD_AFTER: usize = 30;

/// Rewards of the first seconds warm up.
const WARM_UP: Duration = Duration::from_secs(2);

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let seconds = arguments.iter().position(|argument| argument == "--seconds").map_or(60, |at| {
        arguments.get(at + 1).and_then(|seconds| seconds.parse().ok()).expect("--seconds takes a number")
    });
    let broker = arguments.iter().any(|argument| argument == "--kafka").then(Broker::start);
    let mut rows = Vec::new();
    for address in [None, broker.as_ref().map(|broker| broker.address.as_str())] {
        if address.is_none() && !rows.is_empty() {
            break;
        }
        for rewards_per_s in REWARDS_PER_S {
            let mut times = measure(address, rewards_per_s, seconds);
            times.sort_by(f64::total_cmp);
            let at = |share: f64| format!("{:.2} s", times[((times.len() - 1) as f64 * share) as usize]);
            let transport = if address.is_some() { "Kafka" } else { "files" };
            let figures = [rewards_per_s.to_string(), times.len().to_string(), at(0.5), at(0.99), at(1.0)];
            rows.push([transport.to_owned()].into_iter().chain(figures).collect());
        }
    }
    let right = ["rewards/s", "rewards", "p50", "p99", "max"].map(Column::right);
    let columns = [Column::left("transport")].into_iter().chain(right).collect();
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    let note = format!(
        "{QUERIES_PER_S} queries/s, d={DIM} M={}, default settings, {seconds} s each; client, router, learner and broker share \
         {cores} cores",
        MODELS.len()
    );
    println!("{}", Table { columns, rows, note: Some(note) }.text(120));
}

/// The time that each reward took, in seconds.
fn measure(brokers: Option<&str>, rewards_per_s: u32, seconds: u32) -> Vec<f64> {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let config = configure(dir.path(), brokers, rewards_per_s);
    let (router, learner) = (free_port(), free_port());
    if brokers.is_some() {
        let status = command(&config, &["topics", "init"]).status().expect("pointsman");
        assert!(status.success(), "topics init: {status}");
    }
    let _route = Daemon::start(&config, router, &["route", "--serve-uniform"]);
    let learn = Daemon::start(&config, learner, &["learn"]);
    let (to_router, to_learner) = (Client::new(router), Client::new(learner));
    [&to_router, &to_learner].into_iter().for_each(Client::await_ready);
    let over = AtomicBool::new(false);
    let (sent, seen) = std::thread::scope(|scope| {
        let watch = scope.spawn(|| versions(&Client::new(router), &over));
        let (begun, sent) = drive(&to_router, rewards_per_s, seconds);
        let deadline = Instant::now() + Duration::from_secs(30);
        while to_router.version() < sent.len() as u64 {
            assert!(Instant::now() < deadline, "version {} of {} rewards", to_router.version(), sent.len());
            std::thread::sleep(Duration::from_millis(20));
        }
        std::thread::sleep(Duration::from_millis(50));
        over.store(true, Ordering::Relaxed);
        let late: BTreeMap<String, Instant> = sent.into_iter().filter(|(_, at)| *at >= begun + WARM_UP).collect();
        (late, watch.join().expect("the watch"))
    });
    drop(learn);
    let applied = std::fs::read_to_string(dir.path().join("applied.jsonl")).expect("the log of applied requests");
    let took = |(line, version): (&str, u64)| {
        let line: Value = serde_json::from_str(line).expect("a line of JSON");
        let sent = sent.get(line["request_id"].as_str()?)?;
        let (_, used) = seen.iter().find(|(seen, _)| *seen >= version).expect("a version that came into use");
        Some(used.saturating_duration_since(*sent).as_secs_f64())
    };
    applied.lines().zip(1..).filter_map(took).collect()
}

fn configure(dir: &Path, brokers: Option<&str>, rewards_per_s: u32) -> PathBuf {
    let transport = match brokers {
        None => format!("[transport.file]\ndir = {:?}\n", dir.join("log")),
        Some(brokers) => {
            let topic = |name: &str| format!("{name} = \"{}-{rewards_per_s}-{name}\"\n", std::process::id());
            let topics: String = ["queries", "rewards", "params", "dead_letters", "snapshots"].map(topic).concat();
            format!(
                "[transport]\nkind = \"kafka\"\n[transport.kafka]\nbrokers = {brokers:?}\ngroup = \"{}-{rewards_per_s}\"\n\
                 [transport.kafka.topics]\n{topics}",
                std::process::id()
            )
        }
    };
    let config = dir.join("pointsman.toml");
    let text = format!(
        "[learner]\ndim = {DIM}\nmodels = {MODELS:?}\n[store]\ndir = {:?}\n[audit]\napplied_log = {:?}\n{transport}",
        dir.join("store"),
        dir.join("applied.jsonl"),
    );
    std::fs::write(&config, text).expect("a configuration");
    config
}

/// Sends traffic; when it began, and when the reward of each request was sent.
fn drive(client: &Client, rewards_per_s: u32, seconds: u32) -> (Instant, Vec<(String, Instant)>) {
    let mut random = ChaCha8Rng::seed_from_u64(1);
    let (begun, mut requests, mut sent) = (Instant::now(), Vec::new(), Vec::new());
    for number in 0..seconds * QUERIES_PER_S {
        let due = begun + Duration::from_secs(1) * number / QUERIES_PER_S;
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
        let query: Vec<f32> = (0..DIM).map(|_| random.random_range(-1.0..1.0)).collect();
        let decision = client.post("/v1/route", &json!({"query": query}));
        requests.push(decision["request_id"].as_str().expect("a request ID").to_owned());
        let is_rewarded = (number * rewards_per_s) % QUERIES_PER_S < rewards_per_s;
        if let Some(request_id) = requests.len().checked_sub(REWARD_AFTER).map(|at| &requests[at])
            && is_rewarded
        {
            sent.push((request_id.clone(), Instant::now()));
            client.post("/v1/rewards", &json!({"request_id": request_id, "reward": random.random_range(0.0..1.0)}));
        }
    }
    (begun, sent)
}

/// Versions that came into use, each with when that was noticed.
fn versions(client: &Client, over: &AtomicBool) -> Vec<(u64, Instant)> {
    let mut seen: Vec<(u64, Instant)> = Vec::new();
    while !over.load(Ordering::Relaxed) {
        let version = client.version();
        if seen.last().map_or(0, |last| last.0) < version {
            seen.push((version, Instant::now()));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    seen
}

struct Client {
    agent: ureq::Agent,
    base: String,
}

impl Client {
    fn new(port: u16) -> Self {
        let config = ureq::Agent::config_builder().timeout_global(Some(Duration::from_secs(20)));
        Self { agent: config.build().into(), base: format!("http://127.0.0.1:{port}") }
    }

    fn await_ready(&self) {
        let start = Instant::now();
        while self.agent.get(format!("{}/ready", self.base)).call().is_err() {
            assert!(start.elapsed() < Duration::from_secs(60), "{} is not ready", self.base);
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn post(&self, path: &str, body: &Value) -> Value {
        let request = self.agent.post(format!("{}{path}", self.base)).header("content-type", "application/json");
        let mut response = request.send(body.to_string()).expect("an answer");
        serde_json::from_str(&response.body_mut().read_to_string().expect("a body")).unwrap_or_default()
    }

    /// The version of the parameters in use.
    fn version(&self) -> u64 {
        let mut response = self.agent.get(format!("{}/v1/status", self.base)).call().expect("the status");
        let text = response.body_mut().read_to_string().expect("a body");
        let status: Value = serde_json::from_str(&text).expect("JSON");
        status["spaces"]["default"]["version"].as_u64().unwrap_or(0)
    }
}

/// A process that is stopped at the end.
struct Daemon(Child);

impl Daemon {
    fn start(config: &Path, port: u16, arguments: &[&str]) -> Self {
        let mut command = command(config, arguments);
        command.args(["--set", &format!("http.listen=127.0.0.1:{port}")]).stderr(Stdio::null());
        Self(command.spawn().expect("pointsman"))
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = Command::new("kill").args(["-TERM", &self.0.id().to_string()]).status();
        let _ = self.0.wait();
    }
}

fn command(config: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pointsman"));
    command.args(arguments).arg("--config").arg(config).stdout(Stdio::null());
    command
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).expect("a port").port()
}
