//! Parameter files that lie, and secrets in the configuration.

use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use pointsman::event::{ModelName, Name};
use pointsman::router::{HeadTable, Params, Policy, ScoreForm};
use pointsman::wire::params::{STAMP_MAX, decode, encode};
use serde_json::{Value, json};

use crate::sidecar::{Client, Process, free_port, write_config};
use crate::site::Site;

const SMALL: &str = "[learner]\ndim = 3\nmodels = [\"a\", \"b\"]\n";

fn params(version: u64) -> Params {
    Params {
        space: Name::default_space(),
        epoch: 0,
        version,
        revision: 0,
        models: ["a", "b"].map(|name| ModelName::try_from(name).unwrap()).to_vec(),
        dim: 3,
        created_ms: 1_731_700_000_000,
        algorithm: "hpg".to_owned(),
        policy: Policy::unlearned(2, None),
    }
}

/// Encoded parameters with another text in their header.
fn lying(params: &Params, from: &str, to: &str) -> Vec<u8> {
    let bytes = encode(params);
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header = std::str::from_utf8(&bytes[8..8 + length]).unwrap();
    assert!(header.contains(from), "{header}");
    let header = header.replace(from, to);
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &bytes[8 + length..]].concat()
}

/// Replaces a file as a publisher does: a reader sees the old or the new.
fn publish(path: &Path, bytes: &[u8]) {
    let beside = path.with_extension("new");
    std::fs::write(&beside, bytes).unwrap();
    std::fs::rename(beside, path).unwrap();
}

fn wait_until(what: &str, condition: impl Fn() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < Duration::from_secs(20), "{what} never came true");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn bad_parameters_are_rejected_and_the_next_good_ones_used() {
    let dir = tempfile::tempdir().unwrap();
    let port = free_port();
    let config = write_config(dir.path(), port, SMALL);
    let file = dir.path().join("log/params/default.safetensors");
    std::fs::create_dir_all(file.parent().unwrap()).unwrap();
    publish(&file, &encode(&params(1)));
    let route = Process::start(&config, &["route"]);
    let client = Client::new(port);
    client.await_status("/ready", 200);
    let rejected = || -> u64 {
        let text = client.get("/metrics").unwrap().1.as_str().unwrap().to_owned();
        let line = text.lines().find(|line| line.starts_with("pointsman_router_params_rejected_total")).unwrap();
        line.rsplit_once(' ').unwrap().1.parse().unwrap()
    };
    let route_once = |version: u64| {
        let (status, answer) = client.json("/v1/route", &json!({"query": [1, 2, 3]}));
        assert_eq!((status, &answer["params_version"]), (200, &json!(version)), "{answer}");
        assert!(answer["propensity"].is_f64(), "{answer}");
    };
    route_once(1);
    let newer = params(2);
    let mut huge = newer.clone();
    huge.policy.scores[0] =
        ScoreForm { eigenvalues: vec![3e38, -3e38], eigenvectors: vec![3e38; 6], ..ScoreForm::default() };
    let mut unconfigured = newer.clone();
    unconfigured.models[1] = ModelName::try_from("evil").unwrap();
    let mut corrected = newer.clone();
    corrected.policy.head = HeadTable::new(2, vec![1, 2], vec![0.0; 4]).unwrap();
    let mut infinite = newer.clone();
    infinite.policy.head = HeadTable::new(2, vec![1], vec![0.0, f32::INFINITY]).unwrap();
    let bad = [
        lying(&newer, r#""dim":"3""#, r#""dim":"9223372036854775808""#),
        lying(&newer, r#""dim":"3""#, r#""dim":"4""#),
        lying(&newer, r#""epoch":"0""#, r#""epoch":"18446744073709551615""#),
        encode(&huge),
        encode(&unconfigured),
        encode(&infinite),
        lying(&corrected, r#""dtype":"U64""#, r#""dtype":"I64""#),
        lying(&corrected, r#""shape":[2,2]"#, r#""shape":[4,1]"#),
        lying(&corrected, r#""format_version":"2""#, r#""format_version":"3""#),
        b"no tensors".to_vec(),
    ];
    for (i, bytes) in bad.iter().enumerate() {
        publish(&file, bytes);
        wait_until(&format!("rejection {i}"), || rejected() == i as u64 + 1);
        route_once(1);
    }
    assert_eq!(client.get("/ready").unwrap().0, 200, "it serves what it has");
    publish(&file, &encode(&params(3)));
    let version = || client.get("/v1/status").unwrap().1["spaces"]["default"]["version"].clone();
    wait_until("version 3", || version() == json!(3));
    route_once(3);
    route.terminate();
    let log = std::fs::read_to_string(config.with_extension("log")).unwrap();
    assert_eq!(log.matches("rejected invalid parameters").count(), bad.len(), "{log}");
}

/// Runs a command with one more environment variable.
fn run(config: &Path, arguments: &[&str], (name, value): (&str, &str)) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pointsman"));
    command.args(arguments).arg("--config").arg(config).env(name, value).output().unwrap()
}

#[test]
fn a_panic_on_any_thread_ends_the_process_and_names_the_thread() {
    for (arguments, place, thread) in [
        (&["route", "--serve-uniform"][..], "panic:read-params=2", "thread parameters panicked"),
        (&["learn"][..], "panic:before-persist=1", "thread keeper panicked"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let config = write_config(dir.path(), free_port(), SMALL);
        let output = run(&config, arguments, ("POINTSMAN_FAILPOINT", place));
        let log = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(1) && log.contains(thread), "{:?}: {log}", output.status);
    }
}

#[test]
fn epochs_never_wrap() {
    for (epoch, expected) in [("18446744073709551615".to_owned(), 0), (STAMP_MAX.to_string(), STAMP_MAX)] {
        let site = Site::new(SMALL);
        let propensities = json!({"a": 0.5, "b": 0.5});
        let query =
            json!({"request_id": "r", "ts_ms": 1, "query": [1, 2, 3], "model": "a", "propensities": propensities});
        site.log("1", &(vec![query], vec![json!({"request_id": "r", "ts_ms": 2, "reward": 1})]));
        let file = site.path("data/log/params/default.safetensors");
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        let epoch = format!(r#""epoch":"{epoch}""#);
        std::fs::write(&file, lying(&params(9), r#""epoch":"0""#, &epoch)).unwrap();
        site.json(&["learn", "--once", "--json"]);
        let published = decode(&std::fs::read(&file).unwrap()).unwrap();
        assert_eq!((published.epoch, published.version), (expected, 1), "{epoch}");
    }
}

#[test]
fn a_token_that_looks_like_toml_is_taken_verbatim() {
    let token = "8#kJ2mQv9xLpZ";
    let dir = tempfile::tempdir().unwrap();
    let port = free_port();
    let config = write_config(dir.path(), port, SMALL);
    let file = dir.path().join("token");
    std::fs::write(&file, format!("{token}\n")).unwrap();
    for (name, value) in [("POINTSMAN__HTTP__TOKEN", token), ("POINTSMAN__HTTP__TOKEN__FILE", file.to_str().unwrap())] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pointsman"));
        command.args(["route", "--serve-uniform", "--config"]).arg(&config).env(name, value);
        let mut route = command.spawn().unwrap();
        Client::new(port).await_status("/ready", 200);
        let status = |token: &str| {
            let agent: ureq::Agent = ureq::Agent::config_builder().http_status_as_error(false).build().into();
            let request = agent.get(format!("http://127.0.0.1:{port}/v1/status"));
            request.header("authorization", format!("Bearer {token}")).call().unwrap().status().as_u16()
        };
        assert_eq!([status("8"), status(token)], [401, 200], "{name}");
        route.kill().unwrap();
        route.wait().unwrap();
    }
}

#[test]
fn secrets_are_never_shown() {
    let secret = "8kJ2mQv9xLpZ";
    let dir = tempfile::tempdir().unwrap();
    let config = write_config(dir.path(), free_port(), SMALL);
    let shown = |output: &Output| {
        let text = [&output.stdout[..], &output.stderr].concat();
        String::from_utf8(text).unwrap()
    };
    for name in ["HTTP__TOKN", "HTP__TOKEN", "HTTP", "HTTP__TOKEN__FILE", "HTTP__TOKEN__FIL", "ROUTER__KEYS"] {
        let output = run(&config, &["check-config"], (&format!("POINTSMAN__{name}"), secret));
        let text = shown(&output);
        assert!(output.status.code() == Some(2) && !text.contains(secret) && text.contains(name), "{name}: {text}");
    }
    for key in ["SASL__PASSWORD", "SASL__PASWORD", "SSL__KEY__PEM", "SASL__OAUTHBEARER__TOKEN__ENDPOINT__URL", "X"] {
        let name = format!("POINTSMAN__TRANSPORT__KAFKA__CLIENT__{key}");
        for json in [&[][..], &["--json"]] {
            let output = run(&config, &[&["check-config"], json].concat(), (&name, secret));
            let text = shown(&output);
            assert!(output.status.success() && !text.contains(secret) && text.contains("***"), "{name}: {text}");
        }
        if !["SASL__PASWORD", "X"].contains(&key) {
            continue;
        }
        // The client says that it does not know the setting.
        let output = run(&config, &["topics", "init", "--set", "transport.kafka.brokers=127.0.0.1:1"], (&name, secret));
        assert!(!output.status.success() && !shown(&output).contains(secret), "{}", shown(&output));
    }
    let protocol = ("POINTSMAN__TRANSPORT__KAFKA__CLIENT__SECURITY__PROTOCOL", "SASL_SSL");
    let output = run(&config, &["check-config", "--json"], protocol);
    let checked: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(checked["config"]["transport"]["kafka"]["client"]["security.protocol"], "SASL_SSL");
}
