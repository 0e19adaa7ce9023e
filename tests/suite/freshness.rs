//! From a reward to a router that uses parameters which contain it, with default settings.

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::broker;
use crate::kafka::Place;
use crate::sidecar::{Client, Process, free_port};

const MODELS: &str = "[learner]\ndim = 8\nmodels = [\"a\", \"b\"]\n";

/// With this no event is past the reorder window while the test runs: only the bound of live events releases any.
const NEVER_PAST: &str = "[join]\nreorder_ms = 3600000\n";

const PATIENCE: Duration = Duration::from_secs(60);

/// Sends queries at about 100 per second, and a reward for every twentieth, until it is over: the number of rewards.
fn traffic(client: &Client, over: &AtomicBool) -> u64 {
    let mut rewards = 0;
    for number in 0.. {
        if over.load(Ordering::Relaxed) {
            break;
        }
        let query: Vec<f64> = (0..8).map(|i| f64::from((number * 7 + i * i) % 13) - 6.0).collect();
        let (status, decision) = client.json("/v1/route", &json!({"query": query}));
        assert_eq!(status, 200, "{decision}");
        if number % 20 == 0 {
            let reward = json!({"request_id": decision["request_id"], "reward": f64::from(number % 3) / 2.0});
            assert_eq!(client.json("/v1/rewards", &reward).0, 202);
            rewards += 1;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    rewards
}

/// Waits for parameters in use that contain so many examples; the status of their space.
fn await_version(router: &Client, version: u64) -> Value {
    let start = Instant::now();
    loop {
        let space = router.get("/v1/status").unwrap().1["spaces"]["default"].clone();
        if space["version"].as_u64() >= Some(version) {
            return space;
        }
        assert!(start.elapsed() < PATIENCE, "version {version} is not in use: {space}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// The value of a metric without labels, or with the labels of the default space.
fn metric(client: &Client, name: &str) -> Option<f64> {
    let text = client.get("/metrics")?.1.as_str()?.to_owned();
    let names = [name.to_owned(), format!("{name}{{}}"), format!("{name}{{space=\"default\"}}")];
    let (_, value) = text
        .lines()
        .filter_map(|line| line.split_once(' '))
        .find(|(found, _)| names.iter().any(|name| name == found))?;
    value.parse().ok()
}

/// Runs a router and a learner of this configuration.
fn check(config: &Path) {
    let (router_port, learner_port) = (free_port(), free_port());
    let listen = |port: u16| format!("http.listen=127.0.0.1:{port}");
    let _route = Process::start(config, &["route", "--serve-uniform", "--set", &listen(router_port)]);
    let _learn = Process::start(config, &["learn", "--set", &listen(learner_port)]);
    let (router, learner) = (Client::new(router_port), Client::new(learner_port));
    [&router, &learner].into_iter().for_each(|client| client.await_status("/ready", 200));
    assert_eq!(metric(&router, "pointsman_freshness_seconds"), None);
    let over = AtomicBool::new(false);
    let rewards = std::thread::scope(|scope| {
        let sending = scope.spawn(|| traffic(&Client::new(router_port), &over));
        // While events keep coming, so no log is idle.
        await_version(&router, 10);
        over.store(true, Ordering::Relaxed);
        sending.join().unwrap()
    });
    // The last reward too, although nothing follows it.
    let space = await_version(&router, rewards);
    assert_eq!(space["version"], rewards);
    let freshness = metric(&router, "pointsman_freshness_seconds").expect("the freshness of the parameters in use");
    assert_eq!(space["freshness_s"].as_f64(), Some(freshness));
    assert!((0.0..PATIENCE.as_secs_f64()).contains(&freshness), "{freshness}");
    assert!(metric(&router, "pointsman_router_freshness_seconds_count") >= Some(2.0));
    let start = Instant::now();
    while metric(&learner, "pointsman_learner_held_events") != Some(0.0) {
        assert!(start.elapsed() < PATIENCE, "events are held although nothing precedes them");
        std::thread::sleep(Duration::from_millis(20));
    }
    let status = learner.get("/v1/status").unwrap().1;
    assert_eq!(status["counts"]["join"]["rewards"]["used"], rewards, "{status}");
    assert_eq!(status["held_events"], 0, "{status}");
}

#[test]
fn a_reward_on_files_changes_routing_while_traffic_flows() {
    for join in ["", NEVER_PAST] {
        let dir = tempfile::tempdir().unwrap();
        let config = dir.path().join("pointsman.toml");
        let (store, log) = (dir.path().join("store"), dir.path().join("log"));
        let places = format!("[store]\ndir = {store:?}\n[transport.file]\ndir = {log:?}\n");
        fs::write(&config, format!("{MODELS}{join}{places}")).unwrap();
        check(&config);
    }
}

#[test]
fn a_reward_on_kafka_changes_routing_while_traffic_flows() {
    let Some(brokers) = broker::shared() else { return };
    let place = Place::new(brokers, &format!("{MODELS}{NEVER_PAST}"));
    check(&place.config);
}
