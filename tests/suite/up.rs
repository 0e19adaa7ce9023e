//! Learner, router and page in one process on one port, as a user runs it.

use std::collections::BTreeSet;
use std::fs;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::broker;
use crate::kafka::{Place, config_at};
use crate::sidecar::{Client, Process, events, free_port, write_config};

/// The best model of a query is the one that its first number names.
const WORLD: &str =
    "[learner]\ndim = 2\nmodels = [\"a\", \"b\"]\n[snapshot]\nevery_ms = 100\n[join]\nreorder_ms = 50\n";

pub fn eventually<T>(what: &str, found: impl Fn() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(found) = found() {
            return found;
        }
        assert!(start.elapsed() < Duration::from_secs(60), "never: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn start(dir: &Path, port: u16) -> (Process, Client) {
    let config = write_config(dir, port, WORLD);
    let up = Process::start(&config, &["up"]);
    let client = Client::new(port);
    client.await_status("/ready", 200);
    (up, client)
}

fn query(round: usize) -> [f64; 2] {
    let way = [1.0, -1.0][round % 2];
    [way, 0.3]
}

/// Routes a query and sends its reward: 1 if the model is the one for it.
fn ask(client: &Client, name: &str, round: usize) -> Value {
    let id = format!("{name}-{round}");
    let (status, decided) = client.json("/v1/route", &json!({"request_id": id, "query": query(round)}));
    assert_eq!(status, 200, "{decided}");
    let is_right = decided["model"] == ["a", "b"][round % 2];
    let reward = json!({"request_id": id, "reward": f64::from(u8::from(is_right))});
    assert_eq!(client.json("/v1/rewards", &reward).0, 202);
    decided
}

fn status(client: &Client) -> Value {
    client.get("/v1/status").expect("an answer").1
}

/// Waits until the router routes by parameters of this version or a later one.
fn await_version(client: &Client, version: u64) -> u64 {
    eventually(&format!("version {version}"), || {
        status(client)["router"]["spaces"]["default"]["version"].as_u64().filter(|found| *found >= version)
    })
}

fn run(dir: &Path, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_pointsman")).args(arguments).current_dir(dir).output().unwrap()
}

fn learned_once(config: &Path) -> Value {
    let output = run(Path::new("."), &["learn", "--once", "--json", "--config", config.to_str().unwrap()]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn a_request_and_its_reward_change_the_next_decisions() {
    let dir = tempfile::tempdir().unwrap();
    let port = free_port();
    let (up, client) = start(dir.path(), port);
    let first = ask(&client, "first", 0);
    assert_eq!((&first["propensities"], &first["params_version"]), (&json!({"a": 0.5, "b": 0.5}), &json!(0)));
    (1..200).for_each(|round| _ = ask(&client, "first", round));
    await_version(&client, 200);
    let explained = client.json("/v1/explain", &json!({"query": query(0)})).1;
    assert!(explained["models"][0]["propensity"].as_f64().unwrap() > 0.6, "{explained}");
    let decided = ask(&client, "then", 0);
    assert!(decided["params_version"].as_u64().unwrap() >= 200, "{decided}");
    up.terminate();
    // All that was answered is in the log, and the last snapshot is published.
    let queries = events(dir.path(), "queries");
    let ids: BTreeSet<&str> = queries.iter().map(|event| event["request_id"].as_str().unwrap()).collect();
    assert_eq!((queries.len(), ids.len(), events(dir.path(), "rewards").len()), (201, 201, 201));
    assert!(dir.path().join("log/params/default.safetensors").exists());

    // Separate processes continue from the same store, and the other way round.
    let learned = learned_once(&dir.path().join("pointsman.toml"));
    assert_eq!((&learned["queries"], &learned["applied"]), (&json!(201), &json!(201)), "{learned}");
    let (up, client) = start(dir.path(), port);
    assert_eq!(await_version(&client, 1), 201);
    (0..20).for_each(|round| _ = ask(&client, "again", round));
    await_version(&client, 221);
    up.terminate();
    assert_eq!(learned_once(&dir.path().join("pointsman.toml"))["applied"], json!(221));
}

#[test]
fn one_port_answers_for_both() {
    let dir = tempfile::tempdir().unwrap();
    let (up, client) = start(dir.path(), free_port());
    (0..30).for_each(|round| _ = ask(&client, "r", round));
    await_version(&client, 30);
    eventually("the learner reports", || (status(&client)["learner"]["counts"]["applied"] == 30).then_some(()));
    let shown = status(&client);
    assert_eq!(shown.as_object().unwrap().keys().collect::<Vec<_>>(), ["learner", "router"]);
    for (side, field) in [("learner", "counts"), ("learner", "uptime_s"), ("router", "spaces"), ("router", "uptime_s")]
    {
        assert!(!shown[side][field].is_null(), "{side} {field}: {shown}");
    }
    assert_eq!((&shown["learner"]["ready"], &shown["router"]["ready"]), (&json!(true), &json!(true)));
    let metrics = client.get("/metrics").unwrap().1;
    let metrics = metrics.as_str().unwrap();
    let families: Vec<&str> = metrics.lines().filter(|line| line.starts_with("# TYPE ")).collect();
    assert_eq!(families.len(), families.iter().collect::<BTreeSet<_>>().len(), "each family once");
    assert_eq!(metrics.matches("# EOF").count(), 1);
    for series in [
        "pointsman_router_decisions_total{space=\"default\"",
        "pointsman_learner_applied_total{space=\"default\"} 30",
        "pointsman_router_http_connections{}",
    ] {
        assert!(metrics.contains(series), "{series} is not in\n{metrics}");
    }
    let batch = json!({"requests": [{"query": [1, 0]}, {"query": [0, 1]}]});
    assert_eq!(client.json("/v1/route:batch", &batch).1["decisions"].as_array().map(Vec::len), Some(2));
    for (path, expected) in [("/", 200), ("/live", 200), ("/openapi.json", 200), ("/v1/backup", 403), ("/v1/no", 404)] {
        assert_eq!(client.get(path).map(|(status, _)| status), Some(expected), "{path}");
    }
    up.terminate();
}

#[test]
fn one_token_protects_all_of_it() {
    let dir = tempfile::tempdir().unwrap();
    let port = free_port();
    let config = write_config(dir.path(), port, WORLD);
    let up = Process::start(&config, &["up", "--set", "http.token=t"]);
    let client = Client::new(port);
    client.await_status("/ready", 200);
    for path in ["/v1/status", "/v1/events", "/v1/backup", "/metrics"] {
        assert_eq!(client.get(path).map(|(status, _)| status), Some(401), "{path}");
    }
    assert_eq!(client.json("/v1/route", &json!({"query": [1, 0]})).0, 401);
    assert!(up.log().contains("Bearer $TOKEN"), "the example says that it needs a token: {}", up.log());
    let token = fs::read_to_string(dir.path().join("store/backup-token")).unwrap();
    let url = format!("http://127.0.0.1:{port}/v1/backup");
    let backup = ureq::get(&url).header("authorization", "Bearer t").header("x-pointsman-store-token", token.trim());
    assert!(backup.call().unwrap().status().is_success());
    up.terminate();
}

#[test]
fn after_a_kill_every_event_is_learned_once() {
    let dir = tempfile::tempdir().unwrap();
    let port = free_port();
    let mut asked = 0;
    for (life, rounds) in [("one", 60), ("two", 40), ("three", 30)] {
        let (up, client) = start(dir.path(), port);
        (0..rounds).for_each(|round| _ = ask(&client, life, round));
        asked += rounds as u64;
        if life == "two" {
            await_version(&client, asked);
        }
        up.kill();
    }
    let (up, client) = start(dir.path(), port);
    await_version(&client, asked);
    up.terminate();
    let learned = learned_once(&dir.path().join("pointsman.toml"));
    for (name, number) in [("queries", asked), ("rewards", asked), ("applied", asked), ("duplicates", 0), ("late", 0)] {
        assert_eq!(learned[name], json!(number), "{name}: {learned}");
    }
}

#[test]
fn topics_work_as_files_do() {
    let Some(brokers) = broker::shared() else { return };
    for lanes in ["one", "partition"] {
        let place = Place::new(brokers, &WORLD.replace("reorder_ms = 50", "reorder_ms = 0"));
        let port = free_port();
        let config = config_at(&place, "up", port);
        let arguments = ["up", "--set", &format!("transport.kafka.lanes={lanes}")];
        for (life, known) in [("one", 0), ("two", 50)] {
            let up = Process::start(&config, &arguments);
            let client = Client::new(port);
            client.await_status("/ready", 200);
            if known > 0 {
                await_version(&client, known);
            }
            (0..50).for_each(|round| _ = ask(&client, life, round));
            await_version(&client, known + 50);
            up.terminate();
        }
        assert_eq!((place.messages("queries").len(), place.messages("rewards").len()), (100, 100), "{lanes}");
    }
}

#[test]
fn the_demo_needs_nothing_and_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let (work, temporary) = (dir.path().join("work"), dir.path().join("tmp"));
    [&work, &temporary].into_iter().for_each(|dir| fs::create_dir(dir).unwrap());
    let port = free_port();
    let mut demo = Command::new(env!("CARGO_BIN_EXE_pointsman"));
    demo.args(["up", "--demo", "--set", &format!("http.listen=127.0.0.1:{port}")]);
    let mut demo = demo.current_dir(&work).env("TMPDIR", &temporary).stderr(Stdio::null()).spawn().unwrap();
    let client = Client::new(port);
    client.await_status("/ready", 200);
    let version = await_version(&client, 1);
    await_version(&client, version + 100);
    assert_eq!(fs::read_dir(&temporary).unwrap().count(), 1);
    assert!(Command::new("kill").args(["-s", "INT", &demo.id().to_string()]).status().unwrap().success());
    assert_eq!(demo.wait().unwrap().code(), Some(0));
    let left = |dir: &Path| fs::read_dir(dir).unwrap().count();
    assert_eq!((left(&temporary), left(&work)), (0, 0));
}

#[test]
fn a_configured_demo_keeps_its_log_and_store() {
    let dir = tempfile::tempdir().unwrap();
    let port = free_port();
    let config = write_config(dir.path(), port, WORLD);
    let up = Process::start(&config, &["up", "--demo", "--rate", "300"]);
    let client = Client::new(port);
    client.await_status("/ready", 200);
    await_version(&client, 20);
    up.terminate();
    let (queries, rewards) = (events(dir.path(), "queries"), events(dir.path(), "rewards"));
    assert!(queries.len() >= 20 && rewards.len() >= 20, "{} {}", queries.len(), rewards.len());
    assert_eq!(queries[0]["propensities"], json!({"a": 0.5, "b": 0.5}), "the configured models");
    assert_eq!(learned_once(&config)["queries"], json!(queries.len()));
}

#[test]
fn what_cannot_start_says_why() {
    let dir = tempfile::tempdir().unwrap();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let config = write_config(dir.path(), port, WORLD);
    let config = config.to_str().unwrap();
    let free = format!("http.listen=127.0.0.1:{}", free_port());
    for (arguments, code, expected) in [
        (&[][..], 1, "set http.listen to a free address"),
        (&["--set", "http.listen="], 2, "http.listen is empty"),
        (&["--set", "http.listen=0.0.0.0:0"], 2, "http.token"),
        (&["--demo", "--set", "transport.kind=kafka"], 2, "--demo with transport.kind = kafka"),
        (&["--rate", "5"], 2, "--demo"),
    ] {
        let output = run(dir.path(), &[&["up", "--config", config][..], arguments].concat());
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(code) && told.contains(expected), "{arguments:?}: {told}");
        assert!(!dir.path().join("store").exists(), "{arguments:?}: it has not begun");
    }
    // A learner that cannot go on ends the process.
    let learn = Process::start(Path::new(config), &["learn", "--set", &free]);
    eventually("the store", || dir.path().join("store/backup-token").exists().then_some(()));
    let output =
        run(dir.path(), &["up", "--config", config, "--set", &format!("http.listen=127.0.0.1:{}", free_port())]);
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(1) && told.contains("pointsman: ") && told.contains("store"), "{told}");
    learn.terminate();
}

#[test]
fn it_runs_on_what_init_wrote() {
    let dir = tempfile::tempdir().unwrap();
    let row = |i: usize| {
        let (engine, clicked) = (["bge", "e5"][i % 2], u8::from(i.is_multiple_of(3)));
        let emb = [(i % 7) as f64 - 3.1, (i % 5) as f64 - 1.9, 0.5];
        json!({"search": format!("s-{i}"), "when": 1_731_700_000 + i, "emb": emb, "engine": engine, "clicked": clicked})
    };
    let rows: String = (0..400).map(|i| format!("{}\n", row(i))).collect();
    fs::write(dir.path().join("searches.jsonl"), rows).unwrap();
    let init = run(dir.path(), &["init", "searches.jsonl", "--yes"]);
    let printed = String::from_utf8_lossy(&init.stdout).into_owned();
    assert!(
        init.status.success() && printed.contains("pointsman up"),
        "{printed}{}",
        String::from_utf8_lossy(&init.stderr)
    );

    let port = free_port();
    let (listen, log) = (format!("http.listen=127.0.0.1:{port}"), dir.path().join("up.log"));
    let quick = ["--set", "snapshot.every_ms=100", "--set", "join.reorder_ms=50", "--set", "transport.file.idle_ms=40"];
    let start = || {
        let mut up = Command::new(env!("CARGO_BIN_EXE_pointsman"));
        up.args(["up", "--set", &listen]).args(quick).current_dir(dir.path());
        up.stdout(Stdio::null()).stderr(fs::File::create(&log).unwrap()).spawn().unwrap()
    };
    let stop = |mut up: std::process::Child| {
        assert!(Command::new("kill").args(["-s", "TERM", &up.id().to_string()]).status().unwrap().success());
        assert_eq!(up.wait().unwrap().code(), Some(0), "{}", fs::read_to_string(&log).unwrap());
        fs::read_to_string(&log).unwrap()
    };
    let client = Client::new(port);
    let up = start();
    client.await_status("/ready", 200);
    let told = stop(up);
    assert!(told.contains("replay --store data/store --keep-open") && told.contains("seq 3 |"), "{told}");

    let replay = run(dir.path(), &["replay", "--store", "data/store", "--keep-open", "--json"]);
    let learned: Value = serde_json::from_slice(&replay.stdout).unwrap();
    assert_eq!(learned["applied"], json!(400), "{learned}");
    let up = start();
    client.await_status("/ready", 200);
    // Field names and the unit of times are those of the old log: the router's own events are read as well.
    // Several: one event long after all others is not believed.
    for i in 0..10 {
        let id = format!("live-{i}");
        let (status, decided) = client.json("/v1/route", &json!({"request_id": id, "query": [1, 2, 3]}));
        assert_eq!(status, 200, "{decided}");
        assert_eq!(client.json("/v1/rewards", &json!({"request_id": id, "reward": 1})).0, 202);
    }
    await_version(&client, 410);
    let told = stop(up);
    assert!(!told.contains("replay --store"), "{told}");
    assert_eq!(fs::read_dir(dir.path().join("data/log/dead-letters")).map_or(0, Iterator::count), 0);
}
