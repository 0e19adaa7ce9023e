//! The examples do what they say.

use std::fs;
use std::path::Path;
use std::process::Command;

use pointsman::wire::params;
use serde_json::Value;

use crate::site::Site;
use crate::tool;

#[allow(dead_code, reason = "its main is for cargo run")]
#[path = "../../examples/embed_learner.rs"]
mod embed_learner;
#[allow(dead_code, reason = "its main is for cargo run")]
#[path = "../../examples/embed_router.rs"]
mod embed_router;

#[test]
fn what_the_embedded_learner_learns_the_embedded_router_plays() {
    let learned = embed_learner::learn(4000).unwrap();
    assert_eq!(learned.version, 4000);
    let told = embed_learner::describe(&learned).unwrap();
    let share = |query: &str, model: &str| -> f64 {
        let line = told.lines().find(|line| line.starts_with(query)).unwrap();
        line.split([':', ','])
            .map(str::trim)
            .find_map(|part| part.strip_prefix(model))
            .unwrap()
            .trim_end_matches('%')
            .trim()
            .parse()
            .unwrap()
    };
    assert!(share("[1.0, 0.0, 0.0]", "minilm") > 70.0 && share("[0.0, 1.0, 0.0]", "bge") > 70.0, "{told}");

    let dir = tempfile::tempdir().unwrap();
    let (file, log) = (dir.path().join("params.safetensors"), dir.path().join("log/queries/app.jsonl"));
    fs::write(&file, params::encode(&learned)).unwrap();
    let models: Vec<String> =
        (0..20).map(|i| embed_router::route(&file, &log, &format!("r-{i}"), &[0.9, 0.1, 0.0]).unwrap()).collect();
    assert!(models.iter().filter(|model| *model == "minilm").count() > 10, "{models:?}");
    let events: Vec<Value> =
        fs::read_to_string(&log).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(
        events.iter().zip(&models).all(|(event, model)| event["model"] == **model && event["params_version"] == 4000)
    );
}

#[test]
fn produced_events_can_be_learned_from() {
    if !tool::possible("examples", &["python3"]) {
        return;
    }
    let site = Site::new("[learner]\ndim = 3\nmodels = [\"minilm\", \"bge\"]\n");
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/produce_events.py");
    let made = Command::new("python3").arg(script).arg(site.path("data/log")).arg("300").output().unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let learned = site.learn();
    assert_eq!(
        (&learned["queries"], &learned["rewards"], &learned["dead_letters"]),
        (&300.into(), &300.into(), &0.into())
    );
    assert!(learned["applied"].as_u64().unwrap() > 250, "{learned}");
}
