//! Which models may answer a request, over real HTTP: restrictions, draw keys, failures, operators; and what rewards may say.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::{Command, Output};

use pointsman::event::{ModelName, Name};
use pointsman::router::{Params, Policy, ScoreForm};
use pointsman::wire::params;
use serde_json::{Value, json};

use crate::sidecar::{Client, Process, events, free_port, write_config};

const MODELS: [&str; 3] = ["minilm", "BAAI/bge", "e5"];
const CONFIG: &str = "[learner]\ndim = 2\nmodels = [\"minilm\", \"BAAI/bge\", \"e5\"]\nretired = [\"old\"]\n";

/// A router, and its client. It is ready once it has read the parameters, if there are some.
fn start(dir: &Path, more: &str) -> (Process, Client) {
    let port = free_port();
    let config = write_config(dir, port, &format!("{CONFIG}{more}"));
    let arguments = if dir.join("log/params").exists() { &["route"][..] } else { &["route", "--serve-uniform"] };
    let route = Process::start(&config, arguments);
    let client = Client::new(port);
    client.await_status("/ready", 200);
    (route, client)
}

/// Parameters that prefer models by 0, 1 and 2, with a floor.
fn publish(dir: &Path) {
    let mut policy = Policy::unlearned(3, None);
    policy.floor = 0.1;
    for (m, form) in policy.scores.iter_mut().enumerate() {
        *form = ScoreForm { bias: m as f32, ..ScoreForm::default() };
    }
    let params = Params {
        space: Name::default_space(),
        epoch: 0,
        version: 7,
        revision: 0,
        models: MODELS.map(|name| ModelName::try_from(name).unwrap()).to_vec(),
        dim: 2,
        created_ms: 1,
        algorithm: "hpg".to_owned(),
        policy,
    };
    std::fs::create_dir_all(dir.join("log/params")).unwrap();
    std::fs::write(dir.join("log/params/default.safetensors"), params::encode(&params)).unwrap();
}

fn numbers(object: &Value) -> BTreeMap<String, f64> {
    serde_json::from_value(object.clone()).unwrap_or_else(|error| panic!("{object}: {error}"))
}

fn assert_near(found: &BTreeMap<String, f64>, expected: &BTreeMap<String, f64>) {
    assert!(found.keys().eq(expected.keys()), "{found:?} {expected:?}");
    assert!(found.iter().zip(expected).all(|((_, a), (_, b))| (a - b).abs() < 1e-12), "{found:?} {expected:?}");
}

#[test]
fn the_distribution_is_conditioned_on_the_eligible_models_returned_and_logged() {
    let dir = tempfile::tempdir().unwrap();
    publish(dir.path());
    let (route, client) = start(dir.path(), "");
    let query = json!([1, 2]);
    let explained = client.json("/v1/explain", &json!({"query": query})).1;
    let policy: BTreeMap<String, f64> = explained["models"]
        .as_array()
        .unwrap()
        .iter()
        .map(|model| (model["model"].as_str().unwrap().to_owned(), model["policy"].as_f64().unwrap()))
        .collect();
    let conditioned = |eligible: &[&str]| -> (BTreeMap<String, f64>, BTreeMap<String, f64>) {
        let sum: f64 = eligible.iter().map(|name| policy[*name]).sum();
        let core = eligible.iter().map(|name| ((*name).to_owned(), policy[*name] / sum));
        let floor = 0.1 / eligible.len() as f64;
        (core.clone().collect(), core.map(|(name, p)| (name, 0.9 * p + floor)).collect())
    };
    let floats: Vec<u8> = [1.0_f32, 2.0].iter().flat_map(|x| x.to_le_bytes()).collect();
    let binary = |path: &str| client.post(path, "application/octet-stream", &floats);
    let one = |body: Value| client.json("/v1/route", &body);
    let batch = json!({"requests": [
        {"request_id": "r-4", "query": query, "exclude": ["minilm"]},
        {"request_id": "r-5", "query": query},
    ]});
    let (status, batch) = client.json("/v1/route:batch", &batch);
    assert_eq!(status, 200, "{batch}");
    let mut expected = Vec::new();
    for ((status, answer), eligible) in [
        (one(json!({"request_id": "r-1", "query": query, "models": ["e5", "minilm"]})), &["minilm", "e5"][..]),
        (one(json!({"request_id": "r-2", "query": query, "models": MODELS, "exclude": ["e5", "old"]})), &MODELS[..2]),
        (binary("/v1/route?request_id=r-3&models=BAAI/bge,e5&exclude=BAAI%2Fbge"), &["e5"]),
        ((200, batch["decisions"][0].clone()), &MODELS[1..]),
        ((200, batch["decisions"][1].clone()), &MODELS),
    ] {
        assert_eq!(status, 200, "{answer}");
        let (core, propensities) = conditioned(eligible);
        assert_near(&numbers(&answer["propensities"]), &propensities);
        assert_eq!(answer["propensity"], answer["propensities"][answer["model"].as_str().unwrap()]);
        expected.push((answer["request_id"].clone(), answer["model"].clone(), core, propensities));
    }
    let body = json!({"query": query, "models": ["e5", "minilm"]});
    for model in client.json("/v1/explain", &body).1["models"].as_array().unwrap() {
        let name = model["model"].as_str().unwrap();
        let p = conditioned(&["minilm", "e5"]).1.get(name).copied();
        assert!((model["propensity"].as_f64().unwrap() - p.unwrap_or(0.0)).abs() < 1e-12, "{model}");
        assert_eq!(model["eligible"], p.is_some());
    }
    let metrics = client.get("/metrics").unwrap().1.as_str().unwrap().to_owned();
    assert!(metrics.contains("pointsman_router_restricted_total{} 4"), "{metrics}");
    route.terminate();
    let mut logged = events(dir.path(), "queries");
    logged.sort_by_key(|event| event["request_id"].as_str().unwrap().to_owned());
    assert_eq!(logged.len(), expected.len());
    expected.sort_by_key(|(id, ..)| id.as_str().unwrap().to_owned());
    for (event, (id, model, core, propensities)) in logged.iter().zip(expected) {
        assert_eq!((&event["request_id"], &event["model"]), (&id, &model));
        assert_near(&numbers(&event["propensities"]), &propensities);
        if core == propensities {
            assert_eq!(event.get("policy"), None, "one model alone");
        } else {
            assert_near(&numbers(&event["policy"]), &core);
        }
    }
}

#[test]
fn a_request_that_leaves_no_model_is_an_error_or_goes_to_the_fallback() {
    let dir = tempfile::tempdir().unwrap();
    let (route, client) = start(dir.path(), "");
    for (body, field) in [
        (json!({"models": []}), "models"),
        (json!({"models": ["e5"], "exclude": ["e5"]}), "models"),
        (json!({"models": ["old"]}), "models"),
        (json!({"exclude": MODELS}), "exclude"),
        (json!({"models": ["e6"]}), "models"),
        (json!({"models": ["e5"], "exclude": ["e6"]}), "exclude"),
        (json!({"draw_key": ""}), "draw_key"),
    ] {
        let mut whole = json!({"query": [1, 2]});
        whole.as_object_mut().unwrap().extend(body.as_object().unwrap().clone());
        let (status, problem) = client.json("/v1/route", &whole);
        assert_eq!((status, &problem["field"]), (422, &json!(field)), "{body}: {problem}");
        let (status, problem) = client.json("/v1/route:batch", &json!({"requests": [{"query": [1, 2]}, whole]}));
        assert_eq!((status, &problem["field"]), (422, &json!(format!("requests[1].{field}"))), "{body}: {problem}");
        if body.get("draw_key").is_none() {
            let (status, problem) = client.json("/v1/explain", &whole);
            assert_eq!((status, &problem["field"]), (422, &json!(field)), "{body}: {problem}");
        }
    }
    route.terminate();
    assert_eq!(events(dir.path(), "queries").len(), 0);

    let dir = tempfile::tempdir().unwrap();
    publish(dir.path());
    let (route, client) = start(dir.path(), "[router]\nfallback_model = \"e5\"\n");
    let (status, answer) =
        client.json("/v1/route", &json!({"query": [1, 2], "models": ["minilm"], "exclude": ["minilm"]}));
    assert_eq!((status, &answer["model"], &answer["propensities"]), (200, &json!("e5"), &json!({"e5": 1.0})));
    let (status, problem) = client.json("/v1/route", &json!({"query": [1, 2], "exclude": MODELS}));
    assert_eq!((status, &problem["field"]), (422, &json!("exclude")), "it was excluded by name");
    route.terminate();
    let logged = events(dir.path(), "queries");
    assert_eq!((logged.len(), &logged[0]["propensities"]), (1, &json!({"e5": 1.0})));
}

#[test]
fn a_draw_key_keeps_the_model_and_a_repeat_must_be_the_same_request() {
    let dir = tempfile::tempdir().unwrap();
    let (route, client) = start(dir.path(), "");
    let models = |draw_key: Option<&str>| -> BTreeSet<String> {
        let ask = |i: usize| {
            let id = format!("{}-{i}", draw_key.unwrap_or("none"));
            let body = json!({"request_id": id, "query": [1, 2], "draw_key": draw_key});
            client.json("/v1/route", &body).1["model"].as_str().unwrap().to_owned()
        };
        (0..20).map(ask).collect()
    };
    // 20 draws of three equal models are alike once in 10^9; the draws are the same in every run.
    assert_eq!(models(None).len(), 3);
    let of_sessions: Vec<BTreeSet<String>> =
        ["s-1", "s-6", "s-7", "s-8", "s-9", "s-10", "s-11", "s-12"].map(|key| models(Some(key))).to_vec();
    assert!(of_sessions.iter().all(|models| models.len() == 1), "{of_sessions:?}");
    assert!(of_sessions.iter().flatten().collect::<BTreeSet<_>>().len() > 1, "{of_sessions:?}");
    // By the key alone: as a request with this ID.
    let as_id = client.json("/v1/route", &json!({"request_id": "s-1", "query": [1, 2]})).1;
    assert!(of_sessions[0].contains(as_id["model"].as_str().unwrap()));

    let body = json!({"request_id": "r", "query": [1, 2], "models": ["e5", "minilm"], "draw_key": "s"});
    let first = client.json("/v1/route", &body);
    assert_eq!(first.0, 200);
    assert_eq!(client.json("/v1/route", &body), first);
    let turned = json!({"request_id": "r", "query": [1, 2], "models": ["minilm", "e5"], "draw_key": "s"});
    assert_eq!(client.json("/v1/route", &turned), first, "the order of names does not matter");
    for other in [
        json!({"request_id": "r", "query": [1, 2]}),
        json!({"request_id": "r", "query": [1, 2], "models": ["e5", "minilm"]}),
        json!({"request_id": "r", "query": [1, 2], "models": ["e5"], "draw_key": "s"}),
        json!({"request_id": "r", "query": [1, 2], "exclude": ["BAAI/bge"], "draw_key": "s"}),
    ] {
        assert_eq!(client.json("/v1/route", &other).0, 409, "{other}");
    }
    route.terminate();
    let logged = events(dir.path(), "queries");
    let key_of = |id: &str| logged.iter().find(|event| event["request_id"] == id).unwrap().get("draw_key");
    assert_eq!((key_of("r"), key_of("s-1-0"), key_of("none-0")), (Some(&json!("s")), Some(&json!("s-1")), None));
}

/// Routes to this model alone, and reports something of the request.
fn report(client: &Client, id: &str, model: &str, said: Value) {
    let (status, answer) = client.json("/v1/route", &json!({"request_id": id, "query": [1, 2], "models": [model]}));
    assert_eq!((status, &answer["model"]), (200, &json!(model)), "{answer}");
    say(client, id, said);
}

fn say(client: &Client, id: &str, said: Value) {
    let mut body = json!({"request_id": id});
    body.as_object_mut().unwrap().extend(said.as_object().unwrap().clone());
    assert_eq!(client.json("/v1/rewards", &body).0, 202, "{body}");
}

/// The models that a request without restriction may go to.
fn eligible(client: &Client) -> BTreeSet<String> {
    let explained = client.json("/v1/explain", &json!({"query": [1, 2]})).1;
    let models = explained["models"].as_array().unwrap().iter().filter(|model| model["eligible"] == true);
    models.map(|model| model["model"].as_str().unwrap().to_owned()).collect()
}

fn set(models: &[&str]) -> BTreeSet<String> {
    models.iter().map(|name| (*name).to_owned()).collect()
}

#[test]
fn failures_in_a_row_rest_a_model_until_it_wakes() {
    let dir = tempfile::tempdir().unwrap();
    let (route, client) = start(dir.path(), "[router]\nfailures_max = 2\ncooldown_ms = 3600000\n");
    report(&client, "r-1", "e5", json!({"failed": true}));
    say(&client, "r-1", json!({"failed": true, "event_id": "again"}));
    say(&client, "unknown", json!({"failed": true}));
    assert_eq!(eligible(&client), set(&MODELS), "one request failed, which counts once");
    say(&client, "r-1", json!({"reward": 0}));
    report(&client, "r-2", "e5", json!({"outcomes": {"cost": 0.5}}));
    report(&client, "r-3", "e5", json!({"failed": true, "reward": 0}));
    report(&client, "r-4", "minilm", json!({"failed": true}));
    assert_eq!(eligible(&client), set(&MODELS), "an answer ended the row");
    report(&client, "r-5", "e5", json!({"failed": true}));
    assert_eq!(eligible(&client), set(&MODELS[..2]));
    for i in 0..20 {
        let answer = client.json("/v1/route", &json!({"request_id": format!("s-{i}"), "query": [1, 2]})).1;
        assert_eq!(numbers(&answer["propensities"]), numbers(&json!({"minilm": 0.5, "BAAI/bge": 0.5})));
    }
    let listed = client.get("/v1/models").unwrap().1["spaces"]["default"].clone();
    let [minilm, bge, e5] = [&listed[0], &listed[1], &listed[2]];
    assert_eq!(minilm, &json!({"model": "minilm", "resting": false, "failures": 1}));
    assert_eq!(bge, &json!({"model": "BAAI/bge", "resting": false, "failures": 0}));
    let ends = e5["until_ms"].as_u64().unwrap() - e5["since_ms"].as_u64().unwrap();
    assert_eq!((&e5["reason"], &e5["failures"], ends), (&json!("failures"), &json!(2), 3_600_000), "{e5}");
    // Where no other is allowed, it answers.
    report(&client, "t-1", "e5", json!({"failed": true}));
    let status = client.get("/v1/status").unwrap().1;
    assert_eq!(status["spaces"]["default"]["resting"][0]["model"], "e5", "{status}");
    let metrics = client.get("/metrics").unwrap().1.as_str().unwrap().to_owned();
    for line in [
        "pointsman_router_failures_total{space=\"default\",model=\"e5\"} 4",
        "pointsman_router_failures_total{space=\"default\",model=\"minilm\"} 1",
        "pointsman_router_resting{space=\"default\",model=\"e5\",reason=\"failures\"} 1",
    ] {
        assert!(metrics.lines().any(|found| found == line), "{line}: {metrics}");
    }
    let (status, woken) = client.put("/v1/models/e5", &json!({"resting": false}));
    assert_eq!((status, woken), (200, json!({"space": "default", "model": "e5", "resting": false, "failures": 0})));
    assert_eq!(eligible(&client), set(&MODELS));
    let log = route.log();
    let lines = |text: &str| log.lines().filter(|line| line.contains(text)).count();
    assert_eq!((lines("failed too often in a row"), lines("no longer rests")), (1, 1), "{log}");
    route.terminate();
}

fn models_command(dir: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pointsman"));
    command.args(["models"]).args(arguments).arg("--config").arg(dir.join("pointsman.toml"));
    command.env_remove("RUST_LOG").env("COLUMNS", "200").output().unwrap()
}

fn printed(output: &Output) -> String {
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout.clone()).unwrap()
}

#[test]
fn operators_rest_and_wake_models() {
    let dir = tempfile::tempdir().unwrap();
    let (route, client) = start(dir.path(), "[spaces.shop]\nmodels = [\"e5\", \"minilm\"]\n");
    let run = |arguments: &[&str]| models_command(dir.path(), arguments);
    assert_eq!(printed(&run(&["rest", "BAAI/bge"])), "BAAI/bge of space default rests until it is woken\n");
    assert_eq!(eligible(&client), set(&["minilm", "e5"]));
    let rested = printed(&run(&["rest", "e5", "--for", "2h"]));
    assert!(rested.starts_with("e5 of space default rests until 20"), "{rested}");
    assert_eq!(eligible(&client), set(&["minilm"]));
    let (status, problem) = client.json("/v1/route", &json!({"query": [1, 2], "models": ["e5"]}));
    assert_eq!((status, &problem["field"]), (422, &json!("models")), "an operator's rest holds: {problem}");
    let shop = client.json("/v1/route", &json!({"query": [1, 2], "space": "shop"})).1;
    assert_eq!(shop["propensities"], json!({"e5": 0.5, "minilm": 0.5}), "spaces rest apart");
    let table = printed(&run(&["list"]));
    let row =
        |space: &str, model: &str| table.lines().find(|line| line.contains(space) && line.contains(model)).unwrap();
    assert!(row("default", "BAAI/bge").contains("rests (operator)"), "{table}");
    assert!(row("default", "minilm").contains("answers") && row("shop", "e5").contains("answers"), "{table}");
    let listed: Value = serde_json::from_str(&printed(&run(&["list", "--space", "shop", "--json"]))).unwrap();
    assert_eq!(listed["spaces"].as_object().unwrap().keys().collect::<Vec<_>>(), ["shop"]);
    printed(&run(&["rest", "minilm"]));
    let (status, problem) = client.json("/v1/route", &json!({"query": [1, 2]}));
    assert_eq!(status, 503, "all rest: {problem}");
    for model in ["minilm", "BAAI/bge", "e5"] {
        assert_eq!(printed(&run(&["wake", model])), format!("{model} of space default does not rest\n"));
    }
    assert_eq!(eligible(&client), set(&MODELS));
    for (arguments, code, says) in [
        (&["rest", "e6"][..], 1, "space default has no model \"e6\""),
        (&["rest", "BAAI/bge", "--space", "shop", "--url", "http://127.0.0.1:1"], 1, "no answer from"),
        (&["rest", "e5", "--space", "unrouted"], 1, "has not routed space unrouted"),
        (&["rest", "e5", "--for", "10"], 2, "such as 10m"),
        (&["rest", ".e5"], 2, "is not a name of a model"),
        (&["list", "--url", "ftp://router"], 2, "--url"),
    ] {
        let output = run(arguments);
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!((output.status.code(), error.contains(says)), (Some(code), true), "{arguments:?}: {error}");
    }
    for (body, status, field) in [
        (json!({"resting": true, "for_ms": 0}), 422, json!("for_ms")),
        (json!({"resting": false, "for_ms": 1}), 422, json!("for_ms")),
        (json!({"resting": "yes"}), 422, json!("resting")),
        (json!({"resting": true, "space": "a b"}), 422, json!("space")),
    ] {
        let (found, problem) = client.put("/v1/models/e5", &body);
        assert_eq!((found, &problem["field"]), (status, &field), "{body}: {problem}");
    }
    let log = route.log();
    let lines = |text: &str| log.lines().filter(|line| line.contains(text)).count();
    assert_eq!((lines("an operator rests the model"), lines("no longer rests")), (3, 3), "{log}");
    route.terminate();
}

#[test]
fn rewards_say_more_than_a_number() {
    let dir = tempfile::tempdir().unwrap();
    let (route, client) = start(dir.path(), "[reward]\nout_of_range = \"reject\"\n");
    let good = [
        json!({"reward": 0.5}),
        json!({"outcomes": {"cost": 0.002, "latency_ms": -120.5}}),
        json!({"failed": true, "event_id": "e-1"}),
        json!({"rewards": {"minilm": 0, "BAAI/bge": 1, "old": 0.5}}),
        json!({"preferred": "e5", "over": "minilm"}),
        json!({"reward": 1, "outcomes": {"cost": 0}, "failed": false, "rewards": {}, "preferred": null, "over": null}),
    ];
    for body in &good {
        say(&client, "r", body.clone());
    }
    for (body, field) in [
        (json!({}), "reward"),
        (json!({"event_id": "e"}), "reward"),
        (json!({"failed": false, "outcomes": {}, "rewards": {}}), "reward"),
        (json!({"reward": null}), "reward"),
        (json!({"reward": 2}), "reward"),
        (json!({"reward": 1, "failed": "yes"}), "failed"),
        (json!({"outcomes": {"cost": "much"}}), "outcomes.cost"),
        (json!({"outcomes": {"": 1}}), "outcomes"),
        (json!({"rewards": {"e5": 2}}), "rewards.e5"),
        (json!({"rewards": {"e6": 1}}), "rewards"),
        (json!({"preferred": "e5"}), "over"),
        (json!({"over": "e5"}), "preferred"),
        (json!({"preferred": "e5", "over": "e5"}), "over"),
        (json!({"preferred": "e5", "over": "e6"}), "over"),
        (json!({"preferred": "e6", "over": "e5"}), "preferred"),
    ] {
        let mut whole = json!({"request_id": "r"});
        whole.as_object_mut().unwrap().extend(body.as_object().unwrap().clone());
        let (status, problem) = client.json("/v1/rewards", &whole);
        assert_eq!((status, &problem["field"]), (422, &json!(field)), "{body}: {problem}");
    }
    assert_eq!(client.post("/v1/rewards", "application/json", br#"{"request_id":"r","outcomes":{"c":1e999}}"#).0, 400);
    route.terminate();
    let logged = events(dir.path(), "rewards");
    assert_eq!(logged.len(), good.len());
    for (event, said) in logged.iter().zip(&good[..5]) {
        let mut expected = json!({"request_id": "r", "space": "default", "ts_ms": event["ts_ms"]});
        expected.as_object_mut().unwrap().extend(said.as_object().unwrap().clone());
        let plain = |value: &Value| value.to_string().replace(".0", "");
        assert_eq!(plain(event), plain(&expected));
    }
    let fields: Vec<&String> = logged[5].as_object().unwrap().keys().collect();
    assert_eq!(fields, ["outcomes", "request_id", "reward", "space", "ts_ms"], "only what was said");
}

/// What the router writes of restricted decisions and richer feedback is no dead letter for the learner.
#[test]
fn the_learner_reads_what_the_router_writes() {
    let dir = tempfile::tempdir().unwrap();
    let more = "[objective.outcomes.cost]\nrange = [0.0, 1.0]\nweight = -1.0\n";
    let (route, client) = start(dir.path(), more);
    let cases = [
        (json!({"models": ["e5"]}), json!({"failed": true})),
        (json!({"exclude": ["e5"]}), json!({"reward": 1, "outcomes": {"cost": 0.5}})),
        (json!({"draw_key": "s-1"}), json!({"rewards": {"minilm": 0, "e5": 1}})),
        (json!({"models": ["e5", "minilm"]}), json!({"preferred": "e5", "over": "minilm"})),
        (json!({}), json!({"reward": 0})),
    ];
    for (i, (choice, said)) in cases.iter().enumerate() {
        let mut body = json!({"request_id": format!("r-{i}"), "query": [1, i]});
        body.as_object_mut().unwrap().extend(choice.as_object().unwrap().clone());
        assert_eq!(client.json("/v1/route", &body).0, 200, "{body}");
        say(&client, &format!("r-{i}"), said.clone());
    }
    route.terminate();
    let log = |side: &str| {
        let mut paths =
            std::fs::read_dir(dir.path().join("log").join(side)).unwrap().map(|entry| entry.unwrap().path());
        paths.next().unwrap()
    };
    let mut command = Command::new(env!("CARGO_BIN_EXE_pointsman"));
    command.current_dir(dir.path()).args(["replay", "--json", "--config", "pointsman.toml", "--store", "replayed"]);
    let output = command.arg("--queries").arg(log("queries")).arg("--rewards").arg(log("rewards")).output().unwrap();
    let counts: Value = serde_json::from_str(&printed(&output)).unwrap();
    let number = |key: &str| counts[key].as_u64();
    let found = ["queries", "rewards", "joined", "dead_letters", "pending"].map(number);
    assert_eq!(found, [5, 5, 5, 0, 0].map(Some), "{counts}");
}
