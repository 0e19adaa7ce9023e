//! `pointsman snapshots`, as a user runs it.

use std::fs;
use std::path::Path;

use pointsman::event::Query;
use pointsman::router::Params;
use pointsman::simulate::queries::{Queries, Shape};
use pointsman::store::{self, Access};
use safetensors::SafeTensors;
use serde_json::Value;

use crate::site::{Site, traffic};

const CONFIG: &str = r#"
    [learner]
    estimator = "logged"
    dim = 6
    models = ["a", "b", "c"]
    [snapshot]
    every_updates = 50
    every_ms = 3600000
    keep_hourly = 0
    keep_daily = 0
"#;

fn learned() -> Site {
    learned_from(250)
}

fn learned_from(requests: u64) -> Site {
    let site = Site::new(CONFIG);
    site.log("1", &traffic(6, &["a", "b", "c"], 0..requests));
    site.learn();
    site
}

#[test]
fn what_is_there_is_shown() {
    let site = learned();
    let list = site.json(&["snapshots", "list", "--json"]);
    let generations = list["generations"].as_array().unwrap();
    assert_eq!((&list["lane"], generations.len()), (&Value::from("file"), 3));
    assert!(list["bytes_on_disk"].as_u64().unwrap() > 0);
    assert!(generations.iter().all(|generation| generation["whole"] == true && generation["epoch"] == 0));
    assert_eq!((&generations[2]["applied"], &generations[2]["pending"]), (&Value::from(200), &Value::from(50)));
    let newest = generations[2]["generation"].to_string();

    let end = site.learn();
    let shown = site.json(&["snapshots", "show", "--json"]);
    for (key, value) in end.as_object().unwrap() {
        assert_eq!(shown[key], *value, "{key}");
    }
    assert_eq!(shown["positions"].as_object().unwrap().len(), 2);
    assert_eq!(shown["publications"]["default"]["version"], 200);
    assert_eq!(
        site.json(&["snapshots", "show", "--json", "--generation", &newest])["state_digest"],
        end["state_digest"]
    );

    let table = site.run(&["snapshots", "list", "--store", "data/store"]);
    assert_eq!(table.out.lines().filter(|line| line.ends_with(" ok")).count(), 3, "{}", table.out);
    let written = |arguments: &[&str]| {
        assert_eq!(site.run(&[arguments, &["--csv", "table.csv"]].concat()).code, Some(0));
        fs::read_to_string(site.path("table.csv")).unwrap()
    };
    let csv = written(&["snapshots", "list"]);
    let lines: Vec<&str> = csv.lines().collect();
    assert_eq!((lines[0], lines.len()), ("generation,made,epoch,spaces,applied,pending,kept as,state", 4), "{csv}");
    assert!(lines[3].ends_with(",0,1,200,50,generation,ok"), "{csv}");
    let csv = written(&["snapshots", "show"]);
    assert!(csv.lines().any(|line| line == "\"joined, used\",200,200"), "{csv}");

    let text = site.run(&["snapshots", "show"]).out;
    let digest = end["state_digest"].as_str().unwrap();
    for part in ["joined, used", "space default: version 200", "models a, b, c", digest] {
        assert!(text.contains(part), "{part} is not in\n{text}");
    }
    let verified = site.run(&["snapshots", "verify"]).out;
    assert_eq!(verified.lines().count(), 3);
    assert!(verified.lines().last().unwrap().ends_with(digest));
}

#[test]
fn mistakes_are_told() {
    let site = learned();
    site.run(&["snapshots", "export", "--out", "good.safetensors"]);
    fs::write(site.path("bad.safetensors"), b"no tensors at all").unwrap();
    drop(store::open(&site.path("empty"), Access::Create(pointsman::config::StoreKind::Redb)).unwrap());
    let listed = site.json(&["snapshots", "list", "--json"]);
    let numbers: Vec<String> =
        listed["generations"].as_array().unwrap().iter().map(|value| value["generation"].to_string()).collect();
    let no_such = format!("no generation 99 in the store: it has {}", numbers.join(", "));
    for (arguments, code, expected) in [
        (&["list", "--store", "nowhere"][..], 1, "no store in nowhere"),
        (&["show", "--store", "nowhere"], 1, "no store in nowhere"),
        (&["verify", "--store", "nowhere"], 1, "no store in nowhere"),
        (&["export", "--store", "nowhere", "--out", "x"], 1, "no store in nowhere"),
        (&["rollback", "--store", "nowhere", "--to", "1"], 1, "no store in nowhere"),
        (&["list", "--store", "empty"], 1, "the store empty has no snapshot yet"),
        (&["show", "--generation", "99"], 1, &no_such),
        (&["export", "--generation", "99", "--out", "x"], 1, &no_such),
        (&["rollback", "--to", "99"], 1, &no_such),
        (&["rollback"], 2, "--to"),
        (&["rollback", "--to", "last"], 2, "invalid value 'last'"),
        (&["export"], 2, "--out"),
        (&["export", "--space", "shop", "--out", "x"], 1, "no space shop in the snapshot"),
        (&["export", "--space", "a shop", "--out", "x"], 2, "a shop"),
        (&["export", "--out", "no/such/directory/x"], 1, "cannot write no/such/directory/x"),
        (&["import", "--from", "nowhere.safetensors"], 1, "cannot read nowhere.safetensors"),
        (&["import", "--from", "bad.safetensors"], 1, "not a safetensors file"),
        (
            &["import", "--from", "data/log/params/default.safetensors"],
            1,
            "expected a file of `pointsman snapshots export`",
        ),
        (&["import", "--space", "a shop", "--from", "good.safetensors"], 2, "a shop"),
        (
            &["import", "--store", "new", "--set", "learner.dim=7", "--from", "good.safetensors"],
            1,
            "the file has dim = 6, but space default has dim = 7",
        ),
        (
            &["import", "--store", "new", "--set", "learner.models=[\"a\", \"b\"]", "--from", "good.safetensors"],
            1,
            "space default has no model c",
        ),
        (
            &["import", "--store", "new", "--set", "learner.algorithm=uniform", "--from", "good.safetensors"],
            1,
            "uniform does not support imported parameters",
        ),
        (&["prune"], 2, "unrecognized subcommand"),
    ] {
        let run = site.run(&[&["snapshots"], arguments].concat());
        assert_eq!(run.code, Some(code), "{arguments:?}: {}", run.err);
        assert!(run.err.contains(expected), "{arguments:?}: {}", run.err);
    }
    assert_eq!(
        site.json(&["snapshots", "list", "--json"])["generations"],
        listed["generations"],
        "none of it changed a thing"
    );
}

#[test]
fn exported_reference_cases_have_their_parameters() {
    for name in ["exact-clean", "truncated-messy", "batched", "theory", "importance", "floor"] {
        let case = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/vectors").join(name);
        let site = Site::new(&fs::read_to_string(case.join("config.toml")).unwrap());
        let [queries, rewards] = ["queries.jsonl", "rewards.jsonl"].map(|file| case.join(file).display().to_string());
        let replayed =
            site.json(&["replay", "--queries", &queries, "--rewards", &rewards, "--store", "store", "--json"]);
        assert_eq!(
            site.json(&["snapshots", "show", "--store", "store", "--json"])["state_digest"],
            replayed["state_digest"]
        );
        assert_eq!(site.run(&["snapshots", "export", "--store", "store", "--out", "w.safetensors"]).code, Some(0));
        let bytes = fs::read(site.path("w.safetensors")).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        let expected: Value = serde_json::from_slice(&fs::read(case.join("expected.json")).unwrap()).unwrap();
        for (model, w) in expected["W"].as_object().unwrap() {
            let w: Vec<Vec<f64>> = serde_json::from_value(w.clone()).unwrap();
            let read = |part: &str| {
                let tensor = tensors.tensor(&format!("{model}/{part}")).unwrap();
                let numbers: Vec<f64> =
                    tensor.data().as_chunks::<8>().0.iter().map(|b| f64::from_le_bytes(*b)).collect();
                (tensor.shape().to_vec(), numbers)
            };
            let ((shape, lambda), (vectors_shape, v)) = (read("eigenvalues"), read("eigenvectors"));
            let (dim, k) = (w.len(), lambda.len());
            assert_eq!((shape, vectors_shape), (vec![k], vec![dim, k]));
            for (row, expected) in w.iter().enumerate() {
                for (column, expected) in expected.iter().enumerate() {
                    let found: f64 = (0..k).map(|i| v[row * k + i] * lambda[i] * v[column * k + i]).sum();
                    assert!((found - expected).abs() < 1e-8, "{name} {model}: {found} {expected}");
                }
            }
        }
    }
}

fn assert_same_scores(found: &Params, expected: &Params) {
    let mut queries = Queries::new(Shape::Isotropic, expected.dim, 9);
    for query in (0..50).map(|_| queries.draw()) {
        for (model, form) in expected.models.iter().zip(&expected.policy.scores) {
            let place = found.models.iter().position(|name| name == model).unwrap();
            let (found, expected) = (found.policy.scores[place].score(query.as_slice()), form.score(query.as_slice()));
            assert!((found - expected).abs() < 2e-6 * expected.abs().max(1.0), "{model}: {found} {expected}");
        }
    }
}

#[test]
fn what_is_exported_can_be_imported() {
    let site = learned();
    let original = site.params();
    assert!(original.policy.scores.iter().all(|form| !form.eigenvalues.is_empty()));
    assert_eq!(site.run(&["snapshots", "export", "--out", "all.safetensors"]).code, Some(0));

    for mode in ["factored", "explicit", "exact"] {
        let fresh = Site::new(&CONFIG.replace("dim = 6", &format!("dim = 6\nmode = \"{mode}\"")));
        let from = site.path("all.safetensors").display().to_string();
        let run = fresh.run(&["snapshots", "import", "--from", &from]);
        assert_eq!(run.code, Some(0), "{}", run.err);
        assert!(run.out.contains("generation 1, epoch 1"), "{}", run.out);
        let end = fresh.learn();
        assert_eq!((&end["version"], &end["queries"]), (&Value::from(0), &Value::from(0)));
        let params = fresh.params();
        assert_eq!((params.epoch, params.version), (1, 0));
        assert_same_scores(&params, &original);
        fresh.log("1", &traffic(6, &["a", "b", "c"], 250..300));
        assert_eq!(fresh.learn()["version"], 40, "it learns on");
    }

    // Into the store itself, from an older state: parameters change, all else stays.
    site.log("2", &traffic(6, &["a", "b", "c"], 250..400));
    let before = site.learn();
    let run = site.run(&["snapshots", "import", "--from", "all.safetensors"]);
    assert_eq!(run.code, Some(0), "{}", run.err);
    let after = site.run(&["learn", "--once", "--json"]);
    assert!(!after.err.contains("older snapshot"), "{}", after.err);
    let after: Value = serde_json::from_str(&after.out).unwrap();
    for key in ["queries", "rewards", "applied", "pending", "version"] {
        assert_eq!(after[key], before[key], "{key}");
    }
    let params = site.params();
    assert_eq!((params.epoch, params.version), (1, before["version"].as_u64().unwrap()));
    assert_same_scores(&params, &original);
}

/// An import never mixes what is damaged into the next generation.
#[test]
fn import_goes_on_from_what_is_whole() {
    let site = learned_from(260);
    assert_eq!(site.run(&["snapshots", "export", "--out", "all.safetensors"]).code, Some(0));
    let end = site.json(&["snapshots", "show", "--json"]);
    let newest = end["generation"].as_u64().unwrap();
    let before = (newest - 1).to_string();
    let older = site.json(&["snapshots", "show", "--json", "--generation", &before]);
    // The record that the newest generation wrote last.
    let mut raw = store::open(&site.store(), Access::Write).unwrap();
    let mut last = None;
    store::SnapshotStore::scan(&raw, b"r", &mut |key, value| last = Some((key.to_vec(), value.to_vec()))).unwrap();
    let (key, mut value) = last.unwrap();
    value[20] ^= 1;
    store::SnapshotStore::apply(&mut raw, store::Batch { puts: vec![(key, value)], ..store::Batch::default() })
        .unwrap();
    drop(raw);

    let run = site.run(&["snapshots", "verify"]);
    assert_eq!(run.code, Some(1));
    assert!(run.out.contains("is damaged") && run.err.contains("1 of 3 generations are damaged"), "{run:?}");
    let list = site.json(&["snapshots", "list", "--json"]);
    assert_eq!(
        (&list["generations"][2]["whole"], &list["generations"][1]["whole"]),
        (&Value::from(false), &Value::from(true))
    );
    let run = site.run(&["snapshots", "import", "--from", "all.safetensors"]);
    assert_eq!(run.code, Some(1), "{}", run.err);
    assert!(run.err.contains("run `pointsman snapshots repair --store data/store` first"), "{}", run.err);
    let logs = ["--queries", "data/log/queries/1.jsonl", "--rewards", "data/log/rewards/1.jsonl"];
    let run = site.run(&[&["replay", "--store", "data/store"][..], &logs].concat());
    assert_eq!(run.code, Some(1), "only `learn` repairs on its own");
    assert!(run.err.contains("pointsman snapshots repair --store data/store"), "{}", run.err);
    let run = site.run(&["snapshots", "repair"]);
    assert_eq!(run.code, Some(0), "{}", run.err);
    let plan = format!("lane file: continue from generation {before}; delete generation {newest} (");
    assert!(run.out.starts_with(&plan) && run.out.ends_with("done\n"), "{}", run.out);
    let run = site.run(&["snapshots", "import", "--from", "all.safetensors"]);
    assert_eq!(run.code, Some(0), "{}", run.err);
    let imported = site.json(&["snapshots", "show", "--json"]);
    for key in ["queries", "rewards", "applied", "pending", "version"] {
        assert_eq!(imported[key], older[key], "{key}");
    }
    let after = site.learn();
    for key in ["queries", "rewards", "applied", "pending", "version"] {
        assert_eq!(after[key], end[key], "what was lost is read again: {key}");
    }
}

#[test]
fn rolled_back_it_learns_the_same_again() {
    let site = learned();
    site.log("2", &traffic(6, &["a", "b", "c"], 250..400));
    let end = site.learn();
    assert_eq!(site.params().epoch, 0);
    for epoch in 1..=2 {
        let list = site.json(&["snapshots", "list", "--json"]);
        let to = list["generations"][0]["generation"].to_string();
        let older = site.json(&["snapshots", "show", "--json", "--generation", &to]);
        assert_ne!(older["state_digest"], end["state_digest"]);
        let run = site.run(&["snapshots", "rollback", "--to", &to]);
        assert_eq!(run.code, Some(0), "{}", run.err);
        assert!(run.out.contains(&format!("rolled back to generation {to}: new generation ")), "{}", run.out);
        assert!(run.out.trim_end().ends_with(&format!(", epoch {epoch}")), "{}", run.out);
        let now = site.json(&["snapshots", "show", "--json"]);
        assert_eq!((&now["state_digest"], &now["epoch"]), (&older["state_digest"], &Value::from(epoch)));
        assert_eq!(now["positions"], older["positions"]);

        let run = site.run(&["learn", "--once", "--json"]);
        assert!(!run.err.contains("older snapshot") && !run.err.contains("ahead of the store"), "{}", run.err);
        let again: Value = serde_json::from_str(&run.out).unwrap();
        assert_eq!(again, end);
        let params = site.params();
        assert_eq!((params.epoch, params.version), (epoch, end["version"].as_u64().unwrap()));
    }
    let query = Query::new([1.0, 0.0, 0.0, 0.0, 0.0, 0.0]).unwrap();
    assert!(site.params().policy.scores.iter().all(|form| form.score(query.as_slice()).is_finite()));
}
