//! `docs/formats.md` against the formats: `tests/read_backup.py` knows only the page, and reads what Pointsman writes.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use pointsman::event::Query;
use pointsman::state::backup::Backup;
use pointsman::state::{LaneStore, Retention};
use pointsman::store::Memory;
use pointsman::wire::envelope::Damaged;
use pointsman::wire::records::Record;
use pointsman::wire::records::head::{HeadRecord, SharedHead};
use pointsman::wire::records::lane::LaneRecord;
use pointsman::wire::records::learner::LearnerRecord;
use pointsman::wire::records::request::{self, RequestRecord};
use pointsman::wire::records::space::SpaceRecord;
use serde_json::{Value, json};

use crate::site::{Site, traffic};
use crate::tool;

const CONFIG: &str = r#"
    [learner]
    dim = 6
    models = ["a", "b", "c"]
    algorithm = "hpg"
    estimator = "logged"
    mode = "factored"
    batch = 3
    [spaces.explicit]
    mode = "explicit"
    [spaces.exact]
    mode = "exact"
    [spaces.free]
    algorithm = "hpg-parameter-free"
    [spaces.regression]
    algorithm = "hypentropy-regression"
    [snapshot]
    every_updates = 50
    every_ms = 3600000
"#;

/// Spaces whose scores the page defines.
const SCORED: [&str; 4] = ["default", "explicit", "exact", "free"];

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

fn page() -> PathBuf {
    root().join("docs/formats.md")
}

/// Runs the reader with the interpreter that has its optional package, if `tests/python` has made one.
fn read(page: &Path, arguments: &[&str]) -> Output {
    let venv = root().join("target/venv/bin/python");
    let python = if venv.exists() { venv } else { "python3".into() };
    let script = root().join("tests/read_backup.py");
    Command::new(python).arg(script).arg(page).args(arguments).output().unwrap()
}

fn read_json(arguments: &[&str]) -> Value {
    let output = read(&page(), arguments);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[track_caller]
fn assert_refused(page: &Path, arguments: &[&str], problem: &str) {
    let output = read(page, arguments);
    let found = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(1) && found.contains(problem), "{problem}: {found}");
}

/// Spaces of several algorithms with pending and remembered requests, one that has only rewards, and dead letters.
fn learned() -> Site {
    let site = Site::new(CONFIG);
    for (space, requests) in SCORED.iter().chain(&["regression"]).zip([0..250, 0..220, 0..190, 0..160, 0..130]) {
        let (mut queries, mut rewards) = traffic(6, &["a", "b", "c"], requests);
        queries.iter_mut().chain(&mut rewards).for_each(|event| event["space"] = json!(space));
        site.log(space, &(queries, rewards));
    }
    let early = json!({"request_id": "w", "space": "lobby", "ts_ms": 1_700_000_000_000_u64, "reward": 0.5});
    site.log("more", &(vec![json!({"request_id": "bad"})], vec![early]));
    site.learn();
    site
}

#[test]
fn a_backup_is_read_by_the_page_alone() {
    if !tool::possible("the formats page", &["python3"]) {
        return;
    }
    let site = learned();
    let run = site.run(&["snapshots", "backup", "--out", "pointsman.backup"]);
    assert_eq!(run.code, Some(0), "{}", run.err);
    let path = site.path("pointsman.backup");
    let path = path.to_str().unwrap();
    let query = [0.3, -0.1, 0.8, 0.2, 0.5, -0.4];
    let found = read_json(&[path, &json!(query).to_string()]);

    let shown = site.json(&["snapshots", "show", "--json"]);
    let lane = &found["lanes"]["file"];
    assert_eq!((&lane["epoch"], &lane["dead"]), (&shown["epoch"], &shown["dead_letters"]));
    let list = site.json(&["snapshots", "list", "--json"]);
    assert_eq!(lane["generation"], list["generations"].as_array().unwrap().last().unwrap()["generation"]);
    let mut records = BTreeMap::<&str, u64>::new();
    for (key, _) in &Backup::open(&fs::read(path).unwrap()).unwrap().lanes[0].records {
        let name = match key[0] {
            b'l' => "LaneRecord",
            b's' | b'r' => "SpaceRecord",
            b't' => "LearnerRecord",
            _ => "RequestRecord",
        };
        *records.entry(name).or_default() += 1;
    }
    assert_eq!(lane["records"], json!(records));
    assert_eq!((records["SpaceRecord"], records["LearnerRecord"]), (6, 5));
    assert!(lane["spaces"]["lobby"].get("models").is_none());
    assert!(lane["spaces"]["default"]["counts"]["queries"]["pending"].as_u64().unwrap() > 0);
    assert_eq!(lane["spaces"]["regression"]["scores"], Value::Null);

    let query = Query::new(query).unwrap();
    for space in SCORED {
        let of = &lane["spaces"][space];
        let bytes = fs::read(site.path(&format!("data/log/params/{space}.safetensors"))).unwrap();
        let params = pointsman::wire::params::decode(&bytes).unwrap();
        assert_eq!((&of["dim"], &of["version"]), (&json!(6), &json!(params.version)), "{space}");
        assert_eq!(of["models"], json!(params.models));
        for (model, form) in params.models.iter().zip(&params.policy.scores) {
            let (found, expected) = (of["scores"][model.as_str()].as_f64().unwrap(), form.score(query.as_slice()));
            assert!((found - expected).abs() < 1e-4 && expected != 0.0, "{space} {model}: {found} {expected}");
        }
    }

    let bytes = fs::read(path).unwrap();
    let changed = |at: usize, to: u8| {
        let mut bytes = bytes.clone();
        bytes[at] = to;
        bytes
    };
    for (damaged, problem) in [
        (bytes[..bytes.len() - 1].to_vec(), "the envelope has"),
        (changed(8, 77), if found["checksums"] == true { "checksum" } else { "unknown kind 77" }),
        (changed(10, 2), if found["checksums"] == true { "checksum" } else { "unknown version 2" }),
    ] {
        fs::write(site.path("damaged"), damaged).unwrap();
        assert_refused(&page(), &[site.path("damaged").to_str().unwrap()], problem);
    }
    // A page that lacks a field, or a type, is noticed.
    let text = fs::read_to_string(page()).unwrap();
    for (line, problem) in [("  remembered: u64 ", "read_backup.py"), ("enum SideRecord", "schema")] {
        let wrong: String = text.lines().filter(|of| !of.starts_with(line)).map(|of| format!("{of}\n")).collect();
        fs::write(site.path("wrong.md"), &wrong).unwrap();
        assert_refused(&site.path("wrong.md"), &[path], problem);
    }
}

/// A record as Pointsman decodes it. By text: JSON values have no numbers of 128 bits.
fn decoded(record: &str, bytes: &[u8]) -> Value {
    fn text<R: Record>(bytes: &[u8]) -> Result<String, Damaged> {
        Ok(serde_json::to_string(&R::open(bytes)?).unwrap())
    }
    let text = match record {
        "LearnerRecord" => text::<LearnerRecord>(bytes),
        "SpaceRecord" => text::<SpaceRecord>(bytes),
        "HeadRecord" => text::<HeadRecord>(bytes),
        "SharedHead" => text::<SharedHead>(bytes),
        "LaneRecord" => text::<LaneRecord>(bytes),
        "Backup" => text::<Backup>(bytes),
        "RequestRecord" => {
            let record: Result<RequestRecord, Damaged> = RequestRecord::open(bytes);
            record.map(|record| serde_json::to_string(&record).unwrap())
        }
        other => panic!("the page has a record {other}"),
    };
    serde_json::from_str(&text.unwrap()).unwrap()
}

/// Whether two values are equal; numbers of 32 bits are written with fewer digits.
fn is_same(found: &Value, expected: &Value) -> bool {
    match (found, expected) {
        (Value::Array(found), Value::Array(expected)) => {
            found.len() == expected.len() && found.iter().zip(expected).all(|(a, b)| is_same(a, b))
        }
        (Value::Object(found), Value::Object(expected)) => {
            let same = |(key, value): (&String, &Value)| expected.get(key).is_some_and(|of| is_same(value, of));
            found.len() == expected.len() && found.iter().all(same)
        }
        (Value::Number(a), Value::Number(b)) if a.is_f64() && b.is_f64() => {
            let (a, b) = (a.as_f64().unwrap(), b.as_f64().unwrap());
            (a - b).abs() <= 1e-7 * a.abs()
        }
        _ => found == expected,
    }
}

/// Whether a golden file has the newest version of its kind.
fn is_newest(bytes: &[u8]) -> bool {
    let versions = BTreeMap::from(
        [
            (LearnerRecord::KIND, LearnerRecord::VERSION),
            (SpaceRecord::KIND, SpaceRecord::VERSION),
            (HeadRecord::KIND, HeadRecord::VERSION),
            (SharedHead::KIND, SharedHead::VERSION),
            (LaneRecord::KIND, LaneRecord::VERSION),
            (Backup::KIND, Backup::VERSION),
        ]
        .map(|(kind, version)| (kind as u16, version)),
    );
    let number = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
    if bytes.starts_with(b"POINTSMN") { versions[&number(8)] == number(10) } else { bytes[0] == request::VERSION }
}

/// The map that a store of version 2 left, in three generations.
#[test]
fn generations_are_read_by_the_page_alone() {
    if !tool::possible("the formats page", &["python3"]) {
        return;
    }
    let path = root().join("tests/golden/formats/snapshot-2.json");
    let found = read_json(&["--map", path.to_str().unwrap()]);
    let file: BTreeMap<String, String> = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    let decode = |text: &String| BASE64.decode(text).unwrap();
    let entries = file.iter().map(|(key, value)| (decode(key), decode(value))).collect();
    let store = LaneStore::new(Memory { entries, ..Memory::default() }, "file", Retention::newest(3));
    for generation in [1, 2, 3] {
        let snapshot = store.read(generation).unwrap();
        let expected = json!({"head": snapshot.head, "records": snapshot.records});
        assert!(found["lanes"]["file"][generation.to_string()] == expected, "generation {generation}");
    }
}

#[test]
fn the_page_has_every_field_of_every_record() {
    if !tool::possible("the formats page", &["python3"]) {
        return;
    }
    let entries = fs::read_dir(root().join("tests/golden/formats")).unwrap();
    let mut files: Vec<String> = entries.map(|entry| entry.unwrap().path().to_str().unwrap().to_owned()).collect();
    files.retain(|path| path.ends_with(".bin") && is_newest(&fs::read(path).unwrap()));
    let arguments: Vec<&str> = ["--golden"].into_iter().chain(files.iter().map(String::as_str)).collect();
    let found = read_json(&arguments);
    assert_eq!(found["unseen"], json!([]), "the page has these, but no golden file has");
    for path in files {
        let of = &found["files"][&path];
        let record = of["record"].as_str().unwrap();
        let expected = decoded(record, &fs::read(&path).unwrap());
        assert!(is_same(&of["value"], &expected), "{path}\nby the page: {}\ndecoded: {expected}", of["value"]);
    }
}
