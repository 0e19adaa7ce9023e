//! Models come and go between two runs; other settings change, or must not.

use std::collections::BTreeSet;

use pointsman::router::{Params, ScoreForm};
use serde_json::{Value, json};

use crate::site::{Run, Site, traffic};

const MODELS: [&str; 3] = ["a", "b", "c"];

fn config(models: &[&str], more: &str) -> String {
    format!("[learner]\ndim = 6\nestimator = \"logged\"\nmodels = {models:?}\n{more}\n[join]\nwindow_ms = 50000\n")
}

/// A site that has learned from 200 requests, of which every fifth has no reward yet.
fn learned(more: &str) -> (Site, Value) {
    let site = Site::new(&config(&MODELS, more));
    site.log("1", &traffic(6, &MODELS, 0..200));
    let end = site.learn();
    (site, end)
}

fn form<'a>(params: &'a Params, model: &str) -> &'a ScoreForm {
    let place = params.models.iter().position(|name| name.as_str() == model).unwrap();
    &params.policy.scores[place]
}

fn assert_balanced(end: &Value) {
    let join = &end["spaces"]["default"]["join"];
    for side in ["queries", "rewards"] {
        let of = join[side].as_object().unwrap();
        let sum: u64 = of.iter().filter(|(key, _)| *key != "read").map(|(_, count)| count.as_u64().unwrap()).sum();
        assert_eq!(of["read"], sum, "{side}: {join}");
    }
}

fn count(queries: &[Value], model: &str, which: impl Fn(&str) -> bool) -> usize {
    let of = |query: &&Value| query["model"] == model && which(query["request_id"].as_str().unwrap());
    queries.iter().filter(of).count()
}

#[test]
fn models_are_added_and_removed() {
    for more in [
        "",
        "mode = \"explicit\"",
        "mode = \"exact\"",
        "mode = \"lazy\"",
        "algorithm = \"hpg-parameter-free\"",
        "algorithm = \"log-quadratic\"",
        "algorithm = \"log-quadratic\"\nrank = 3",
        "algorithm = \"quadratic-sgd\"",
    ] {
        let (site, before) = learned(more);
        let (first, first_rewards) = traffic(6, &MODELS, 0..200);
        let params = site.params();
        let rewarded: BTreeSet<&str> =
            first_rewards.iter().map(|event| event["request_id"].as_str().unwrap()).collect();
        let waiting = count(&first, "b", |id| !rewarded.contains(id));
        assert!(waiting > 5);

        // b goes, d comes, and the order is another.
        site.configure(&config(&["c", "d", "a"], more));
        let run = site.run(&["learn", "--once", "--json"]);
        assert_eq!(run.code, Some(0), "{more}: {}", run.err);
        assert!(run.err.contains("configuration changed since the snapshot"), "{}", run.err);
        let changed: Value = serde_json::from_str(&run.out).unwrap();
        assert_eq!((&changed["retired"], &changed["dead_letters"]), (&json!(waiting), &json!(0)), "{more}");
        assert_eq!(changed["pending"], json!(before["pending"].as_u64().unwrap() - waiting as u64), "{more}");
        assert_eq!(changed["version"], before["version"], "{more}");
        assert_balanced(&changed);
        let now = site.params();
        assert_eq!(now.models.iter().map(|name| name.as_str()).collect::<Vec<_>>(), ["c", "d", "a"]);
        assert!((now.epoch, now.version, now.revision) > (params.epoch, params.version, params.revision), "{more}");
        for model in ["a", "c"] {
            assert_eq!(form(&now, model), form(&params, model), "{more}: {model}");
        }
        assert!(form(&now, "d").eigenvalues.iter().all(|value| *value == 0.0), "{more}: starts at zero");

        // Old routers still send to b, and say so in their propensities; nobody ever knew z.
        let (mut queries, rewards) = traffic(6, &["a", "b", "c", "d"], 200..300);
        queries[7]["model"] = json!("z");
        queries[7]["propensities"] = json!({"a": 0.5, "z": 0.5});
        queries[8]["model"] = json!("a");
        queries[8]["propensities"] = json!({"a": 0.5, "z": 0.5});
        queries[9]["model"] = json!("a");
        queries[9]["propensities"] = json!({"a": 0.25, "b": 0.75});
        let retired = count(&queries, "b", |_| true);
        let late_rewards = first
            .iter()
            .filter(|query| query["model"] == "b" && !rewarded.contains(query["request_id"].as_str().unwrap()));
        let mut rewards = rewards;
        rewards.extend(
            late_rewards
                .map(|query| json!({"request_id": query["request_id"], "ts_ms": 1_700_000_020_000_u64, "reward": 1})),
        );
        rewards.sort_by_key(|event| event["ts_ms"].as_u64());
        site.log("2", &(queries, rewards));
        let end = site.learn();
        assert_eq!((&end["retired"], &end["dead_letters"]), (&json!(waiting + retired), &json!(2)), "{more}");
        assert_eq!(end["queries"], 300);
        assert_balanced(&end);
        assert!(end["version"].as_u64().unwrap() > changed["version"].as_u64().unwrap() + 40, "{more}");
        assert!(form(&site.params(), "d").eigenvalues.iter().any(|value| *value != 0.0), "{more}: has learned");
        assert_eq!(site.learn()["state_digest"], end["state_digest"]);

        // b comes back: it starts at zero, since what it was has been forgotten.
        site.configure(&config(&["a", "b", "c"], more));
        let back = site.learn();
        assert_eq!(back["applied"], end["applied"]);
        assert_balanced(&back);
        assert!(form(&site.params(), "b").eigenvalues.iter().all(|value| *value == 0.0), "{more}");
    }
}

/// A batch that was begun with the old models is applied to them.
#[test]
fn a_partial_batch_is_not_lost() {
    let (site, before) = learned("batch = 64");
    assert_eq!((&before["applied"], &before["version"]), (&json!(160), &json!(128)));
    site.configure(&config(&["a", "c"], "batch = 64"));
    let changed = site.learn();
    assert_eq!((&changed["applied"], &changed["version"]), (&json!(160), &json!(160)));
    assert_eq!(site.params().version, 160);
}

#[test]
fn the_order_of_models_does_not_matter() {
    for more in ["", "algorithm = \"hpg-parameter-free\""] {
        let ((one, _), (other, _)) = (learned(more), learned(more));
        other.configure(&config(&["c", "a", "b"], more));
        let moved = other.learn();
        assert_eq!((&moved["retired"], &moved["pending"]), (&json!(0), &one.learn()["pending"]));
        for model in MODELS {
            assert_eq!(form(&other.params(), model), form(&one.params(), model));
        }
        for site in [&one, &other] {
            site.log("2", &traffic(6, &MODELS, 200..300));
        }
        let (first, second) = (one.learn(), other.learn());
        for key in ["applied", "joined", "pending", "retired", "dead_letters", "mean_reward"] {
            assert_eq!(first[key], second[key], "{key}");
        }
        let query = [0.5; 6];
        for model in MODELS {
            let (found, expected) =
                (form(&other.params(), model).score(&query), form(&one.params(), model).score(&query));
            assert!((found - expected).abs() < 1e-4 * expected.abs().max(1.0), "{model}: {found} {expected}");
        }
    }
}

#[test]
fn what_cannot_change_is_refused_by_its_key() {
    let (site, end) = learned("");
    for (set, expected) in [
        (&["learner.dim=7"][..], &["learner.dim = 6", "the configuration has 7"][..]),
        (&["learner.algorithm=hpg-parameter-free"], &["learner.algorithm = hpg,", "hpg-parameter-free"]),
        (&["learner.algorithm=uniform"], &["learner.algorithm = hpg,", "uniform"]),
        (&["learner.mode=lazy"], &["learner.mode"]),
        (&["learner.dim=7", "learner.models=[\"a\", \"x\"]"], &["learner.dim = 6", "the configuration has 7"]),
    ] {
        let mut arguments = vec!["learn", "--once"];
        set.iter().for_each(|set| arguments.extend(["--set", set]));
        let run = site.run(&arguments);
        assert_eq!(run.code, Some(1), "{set:?}: {}", run.err);
        for part in expected {
            assert!(run.err.contains(part), "{part} is not in: {}", run.err);
        }
    }
    assert_eq!(site.learn()["state_digest"], end["state_digest"], "nothing of it was done");
}

#[test]
fn what_may_change_is_taken_over_and_told() {
    let (site, before) = learned("");
    for (set, key) in [
        ("learner.eta=0.02", "learner.method.hpg.rate.constant"),
        ("learner.tau=5", "learner.method.hpg.ball.tau"),
        ("learner.exploration_floor=0.1", "learner.exploration_floor"),
        ("join.window_ms=10000", "join.window_ms"),
        ("join.aggregate=mean", "join.aggregate"),
    ] {
        let run = site.run(&["learn", "--once", "--json", "--set", set]);
        assert_eq!(run.code, Some(0), "{set}: {}", run.err);
        let told =
            run.err.lines().any(|line| line.contains("configuration changed since the snapshot") && line.contains(key));
        assert!(told, "{set}: {}", run.err);
        let end: Value = serde_json::from_str(&run.out).unwrap();
        assert_eq!(end["applied"], before["applied"], "{set}");
        assert_balanced(&end);
    }
    // The shorter window holds for the queries that wait already.
    site.configure(&config(&MODELS, "").replace("50000", "1000"));
    assert_eq!(site.learn()["expired"], 0, "time stands still");
    // Ten requests, two of them without a reward: enough events to move time.
    site.log("2", &traffic(6, &MODELS, 300..310));
    let end = site.learn();
    assert_eq!((&end["expired"], &end["pending"]), (&before["pending"], &json!(2)));
    assert_balanced(&end);
}

#[test]
fn logs_of_old_models_can_be_replayed() {
    let (site, _) = learned("");
    let (queries, _) = traffic(6, &MODELS, 0..200);
    let of_b = count(&queries, "b", |_| true);
    let replay = |set: &str| {
        let logs = ["--queries", "data/log/queries/1.jsonl", "--rewards", "data/log/rewards/1.jsonl"];
        site.run(&[&["replay", "--json", "--set", "learner.models=[\"a\", \"c\"]", "--set", set][..], &logs].concat())
    };
    let summary = |run: &Run| serde_json::from_str::<Value>(&run.out).unwrap();
    let run = replay("learner.retired=[\"b\"]");
    assert_eq!(run.code, Some(0), "{}", run.err);
    let end = summary(&run);
    assert_eq!((&end["retired"], &end["dead_letters"]), (&json!(of_b), &json!(0)));
    assert_balanced(&end);
    assert!(end["applied"].as_u64().unwrap() > 80);
    // Without it, b never existed, not even in propensities.
    let run = replay("learner.retired=[]");
    assert_eq!((run.code, &summary(&run)["dead_letters"]), (Some(1), &json!(200)));
    assert!(run.err.contains("none of the 200 queries are usable") && run.err.contains("unknown-model"), "{}", run.err);
}
