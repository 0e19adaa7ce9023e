//! A changed configuration, applied by SIGHUP and over HTTP while learner and router run.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use crate::sidecar::{Client, Process, free_port, write_config};
use crate::up::eventually;

fn config(models: &str, more: &str) -> String {
    format!(
        "[learner]\ndim = 2\nmodels = [{models}]\n[snapshot]\nevery_ms = 100\n[join]\nreorder_ms = 50\n\
         [objective.outcomes.cost]\nrange = [0.0, 10.0]\n{more}\n"
    )
}

/// Routes a query and rewards it; the answer.
fn ask(client: &Client, id: &str) -> Value {
    let (status, decided) = client.json("/v1/route", &json!({"request_id": id, "query": [1.0, 0.5]}));
    assert_eq!(status, 200, "{decided}");
    let reward = json!({"request_id": id, "reward": 1, "outcomes": {"cost": 2.0}});
    assert_eq!(client.json("/v1/rewards", &reward).0, 202);
    decided
}

fn learner(client: &Client) -> Value {
    client.get("/v1/status").unwrap().1["learner"].clone()
}

fn applied(client: &Client, number: u64) {
    eventually(&format!("{number} applied"), || (learner(client)["counts"]["applied"] == number).then_some(()));
}

fn change(dir: &Path, port: u16, text: &str) {
    write_config(dir, port, text);
}

#[test]
fn models_and_budgets_change_while_it_runs() {
    let (dir, port) = (tempfile::tempdir().unwrap(), free_port());
    let path = write_config(dir.path(), port, &config("\"a\", \"b\"", "budget = 1.0"));
    let up = Process::start(&path, &["up"]);
    let client = Client::new(port);
    client.await_status("/ready", 200);
    let reload = || client.json("/v1/reload", &json!({}));
    assert_eq!(reload(), (200, json!({"changed": []})), "nothing has changed");
    (0..20).for_each(|i| _ = ask(&client, &format!("one-{i}")));
    applied(&client, 20);

    // A model comes, and the budget doubles.
    change(dir.path(), port, &config("\"a\", \"b\", \"c\"", "budget = 2.0"));
    let changed = json!({"changed": ["learner.models", "objective.outcomes.cost.budget"]});
    assert_eq!(reload(), (200, changed));
    let routed = || {
        let decided = client.json("/v1/explain", &json!({"query": [1.0, 0.5]})).1;
        decided["models"].as_array().is_some_and(|models| models.len() == 3).then_some(())
    };
    eventually("the new model is routed to", routed);
    let budget = || learner(&client)["spaces"]["default"]["objective"]["outcomes"][0]["budget"].as_f64();
    eventually("the new budget", || (budget() == Some(2.0)).then_some(()));
    (0..20).for_each(|i| _ = ask(&client, &format!("two-{i}")));
    applied(&client, 40);

    // What needs a restart is named, and nothing of it is applied.
    let fixed = config("\"a\", \"c\"", "budget = 3.0").replace("dim = 2", "dim = 3");
    change(dir.path(), port, &format!("{fixed}[runtime]\nworkers = 3\n"));
    let (status, problem) = reload();
    let detail = problem["detail"].as_str().unwrap_or_default();
    assert!(status == 422 && detail.starts_with("learner.dim, runtime.workers cannot change while"), "{problem}");
    change(dir.path(), port, &config("\"a\", \"c\"", "budget = -3.0"));
    let (status, problem) = reload();
    let detail = problem["detail"].as_str().unwrap_or_default();
    assert!(status == 422 && detail.contains("objective.outcomes.cost.budget = -3"), "{problem}");
    assert_eq!(budget(), Some(2.0));

    // A model goes, by a signal.
    change(dir.path(), port, &config("\"a\", \"c\"", "budget = 3.0"));
    up.signal("HUP");
    eventually("the budget of the signal", || (budget() == Some(3.0)).then_some(()));
    let names = || {
        let decided = client.json("/v1/explain", &json!({"query": [1.0, 0.5]})).1;
        let names = decided["models"].as_array()?.iter().map(|model| model["model"].clone()).collect::<Vec<_>>();
        (names == ["a", "c"]).then_some(())
    };
    eventually("the model is gone", names);
    (0..20).for_each(|i| _ = ask(&client, &format!("three-{i}")));
    applied(&client, 60);
    let counts = learner(&client)["counts"].clone();
    assert_eq!((&counts["join"]["queries"]["joined"], &counts["queries_dead"]), (&json!(60), &json!(0)), "{counts}");
    let log = up.log();
    assert!(log.contains("configuration reloaded"), "{log}");
    up.terminate();
    assert!(fs::exists(dir.path().join("log/params/default.safetensors")).unwrap());
}
