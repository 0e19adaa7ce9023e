//! Invented space names.

use serde_json::{Value, json};

use crate::sidecar::{Client, Process, events, free_port, write_config};
use crate::site::{Site, copy};

const SMALL: &str = "[learner]\ndim = 2\nmodels = [\"a\", \"b\"]\n";

fn query(space: &str, id: &str, ts_ms: i64) -> Value {
    let propensities = json!({"a": 0.5, "b": 0.5});
    json!({"request_id": id, "space": space, "ts_ms": ts_ms, "query": [1, 1], "model": "a", "propensities": propensities})
}

fn reward(space: &str, id: &str, ts_ms: i64) -> Value {
    json!({"request_id": id, "space": space, "ts_ms": ts_ms, "reward": 1})
}

fn names(summary: &Value) -> Vec<&str> {
    summary["spaces"].as_object().unwrap().keys().map(String::as_str).collect()
}

fn published(site: &Site) -> Vec<String> {
    let entries = std::fs::read_dir(site.path("data/log/params")).into_iter().flatten();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

/// More junk rewards than there may be spaces: they create none, and nothing of them is published.
#[test]
fn rewards_create_no_spaces() {
    let site = Site::new(SMALL);
    let junk = (0..1100).map(|i| reward(&format!("junk-{i}"), "r", 1000 + i));
    site.log("1", &(vec![query("default", "r", 5000)], junk.chain([reward("default", "r", 6000)]).collect()));
    let found = site.json(&["learn", "--once", "--json"]);
    assert_eq!((names(&found), &found["applied"]), (vec!["default"], &json!(1)), "{found}");
    assert_eq!((&found["rewards"], &found["pending"], &found["evicted"]), (&json!(1101), &json!(1100), &json!(0)));
    assert_eq!(published(&site), ["default.safetensors"]);
    // A reward that came early is not lost, not even across a restart.
    site.log("2", &(vec![query("junk-7", "r", 7000)], Vec::new()));
    let found = site.json(&["learn", "--once", "--json"]);
    assert_eq!((names(&found), &found["applied"]), (vec!["default", "junk-7"], &json!(2)), "{found}");
    let at_once = Site::new(SMALL);
    for side in ["queries", "rewards"] {
        copy(&site.path("data/log").join(side), &at_once.path("data/log").join(side));
    }
    assert_eq!(at_once.json(&["learn", "--once", "--json"])["state_digest"], found["state_digest"]);
}

/// The same over HTTP: after the flood the router still routes `default`, and holds no invented space.
#[test]
fn junk_does_not_reach_the_router() {
    let dir = tempfile::tempdir().unwrap();
    let port = free_port();
    let config = write_config(dir.path(), port, &format!("{SMALL}spaces_max = 20\n"));
    let route = Process::start(&config, &["route", "--serve-uniform"]);
    let client = Client::new(port);
    client.await_status("/ready", 200);
    for i in 0..30 {
        let body = json!({"request_id": "r", "space": format!("junk-{i}"), "reward": 1});
        assert_eq!(client.json("/v1/rewards", &body).0, 202);
    }
    // Invented names in queries are routed, too, but keep nobody out.
    for i in 0..30 {
        let body = json!({"space": format!("asked-{i}"), "query": [1, 1]});
        assert_eq!(client.json("/v1/route", &body).0, 200, "asked-{i}");
    }
    assert_eq!(client.json("/v1/route", &json!({"query": [1, 1]})).0, 200);
    let status = client.get("/v1/status").unwrap().1;
    let spaces = names(&status);
    assert!(spaces.len() <= 21 && spaces.contains(&"default"), "{spaces:?}");
    let metrics = client.get("/metrics").unwrap().1.as_str().unwrap().to_owned();
    let series = metrics.lines().filter(|line| line.starts_with("pointsman_router_decisions_total{"));
    assert!(series.count() <= 2 * 22, "{metrics}");
    route.terminate();
    assert_eq!((events(dir.path(), "rewards").len(), events(dir.path(), "queries").len()), (30, 31));
}

#[test]
fn the_limit_is_logged_once_and_spaces_with_examples_stay() {
    let site = Site::new(&format!("{SMALL}spaces_max = 3\n[spaces.listed]\n"));
    let junk = |from: i64| (0..50).map(move |i| query(&format!("junk-{from}-{i}"), "r", from + i));
    let queries: Vec<Value> = junk(100)
        .chain([query("shop", "r", 200)])
        .chain(junk(300))
        .chain([query("listed", "r", 400), query("default", "r", 400)])
        .collect();
    let rewards = ["shop", "listed", "default"].map(|space| reward(space, "r", 401));
    // The reward of shop comes at once, so that it has an example before the next flood.
    let rewards = [reward("shop", "r", 201)].into_iter().chain(rewards).collect();
    site.log("1", &(queries, rewards));
    let run = site.run(&["learn", "--once", "--json"]);
    let found: Value = serde_json::from_str(&run.out).unwrap();
    assert_eq!(run.err.matches("learner.spaces_max reached").count(), 1, "{}", run.err);
    let spaces = names(&found);
    assert!(
        ["default", "listed", "shop"].iter().all(|space| spaces.contains(space)) && spaces.len() == 4,
        "{spaces:?}"
    );
    assert_eq!((&found["applied"], &found["queries"], &found["dead_letters"]), (&json!(3), &json!(103), &json!(0)));
    assert_eq!((&found["evicted"], &found["pending"]), (&json!(99), &json!(1)), "{found}");
    let mut files = published(&site);
    files.sort();
    assert_eq!(files, ["default", "listed", "shop"].map(|space| format!("{space}.safetensors")));
    // Twice from the same logs, once with a restart between: the same state.
    let again = site.json(&["learn", "--once", "--json"]);
    assert_eq!(again["state_digest"], found["state_digest"]);
}

#[test]
fn only_listed_spaces_where_configured() {
    let dir = tempfile::tempdir().unwrap();
    let port = free_port();
    let config = write_config(dir.path(), port, &format!("{SMALL}spaces = \"listed\"\n[spaces.shop]\n"));
    let route = Process::start(&config, &["route", "--serve-uniform"]);
    let client = Client::new(port);
    client.await_status("/ready", 200);
    for (space, is_good) in [("shop", true), ("default", true), ("junk", false)] {
        let (routed, rewarded) = if is_good { (200, 202) } else { (422, 422) };
        let query = json!({"space": space, "query": [1, 1], "request_id": "r"});
        assert_eq!(client.json("/v1/route", &query).0, routed, "{space}");
        assert_eq!(client.json("/v1/explain", &json!({"space": space, "query": [1, 1]})).0, routed, "{space}");
        let (status, problem) = client.json("/v1/rewards", &json!({"space": space, "request_id": "r", "reward": 1}));
        assert_eq!(status, rewarded, "{space}: {problem}");
    }
    route.terminate();

    let site = Site::new(&format!("{SMALL}spaces = \"listed\"\n[spaces.shop]\n"));
    site.log(
        "1",
        &(vec![query("shop", "r", 1), query("junk", "r", 1)], vec![reward("shop", "r", 2), reward("junk", "r", 2)]),
    );
    let found = site.json(&["learn", "--once", "--json"]);
    assert_eq!((names(&found), &found["dead_letters"], &found["applied"]), (vec!["shop"], &json!(2), &json!(1)));
}

#[test]
fn spaces_can_be_dropped() {
    let site = Site::new(SMALL);
    let both = |space: &str| (query(space, "r", 1), reward(space, "r", 2));
    let (queries, mut rewards): (Vec<Value>, Vec<Value>) = ["default", "shop", "junk"].map(both).into_iter().unzip();
    rewards.push(reward("early", "r", 3));
    site.log("1", &(queries, rewards));
    assert_eq!(names(&site.json(&["learn", "--once", "--json"])), ["default", "junk", "shop"]);
    let missing = site.run(&["snapshots", "drop", "--space", "nowhere"]);
    assert_eq!(missing.code, Some(1));
    assert!(missing.err.contains("no space nowhere in lane file: it has default, junk, shop"), "{missing:?}");
    let run = site.run(&["snapshots", "drop", "--space", "junk", "--space", "early"]);
    assert_eq!(run.code, Some(0), "{}", run.err);
    let shown = site.json(&["snapshots", "show", "--json"]);
    assert_eq!((names(&shown), &shown["epoch"]), (vec!["default", "shop"], &json!(1)), "{shown}");
    assert_eq!((&shown["applied"], &shown["rewards"], &shown["evicted"]), (&json!(3), &json!(4), &json!(1)));
    // A later query creates it anew, in the new epoch.
    site.log("2", &(vec![query("junk", "s", 10)], vec![reward("junk", "s", 11)]));
    let found = site.json(&["learn", "--once", "--json"]);
    assert_eq!((&found["spaces"]["junk"]["version"], &found["applied"]), (&json!(1), &json!(4)), "{found}");
    assert_eq!(site.run(&["snapshots", "verify"]).code, Some(0));
}
