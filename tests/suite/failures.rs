//! What a user meets when something is wrong: reasons, remedies, exit codes.

use std::fs;
use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::{Value, json};

use crate::compare::write_log;

const CONFIG: &str = "[learner]\ndim = 8\nmodels = [\"a\", \"b\"]\n";

fn run(dir: &Path, columns: &str, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pointsman"));
    command.current_dir(dir).args(arguments).env("RUST_LOG", "error").env("COLUMNS", columns);
    command.output().unwrap()
}

/// Exit code, standard output, standard error.
fn pointsman(dir: &Path, arguments: &[&str]) -> (Option<i32>, String, String) {
    let output = run(dir, "200", arguments);
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

fn query(i: usize) -> Value {
    json!({"request_id": format!("r{i}"), "ts_ms": 1_700_000_000_000_u64 + 10 * i as u64, "query": [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8], "model": "a",
           "propensities": {"a": 0.5, "b": 0.5}})
}

fn reward(i: usize) -> Value {
    json!({"request_id": format!("r{i}"), "ts_ms": 1_700_000_000_005_u64 + 10 * i as u64, "reward": 1})
}

fn lines(events: impl Iterator<Item = Value>) -> String {
    events.map(|event| format!("{event}\n")).collect()
}

/// A directory with a configuration, good rewards, and these queries.
fn place(name: &str, queries: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("pointsman.toml"), CONFIG).unwrap();
    fs::write(dir.path().join("r.jsonl"), lines((0..30).map(reward))).unwrap();
    fs::write(dir.path().join(name), queries).unwrap();
    dir
}

/// Fields under other names than those that are configured.
fn foreign(i: usize) -> Value {
    json!({"id": format!("r{i}"), "vec": [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8], "model": "a"})
}

#[test]
fn a_log_without_a_usable_query_fails_and_says_why() {
    let dir = place("q.jsonl", &lines((0..30).map(foreign)));
    fs::create_dir_all(dir.path().join("data/log/queries")).unwrap();
    fs::copy(dir.path().join("q.jsonl"), dir.path().join("data/log/queries/q.jsonl")).unwrap();
    for command in [
        &["replay", "--queries", "q.jsonl", "--rewards", "r.jsonl"][..],
        &["evaluate", "--queries", "q.jsonl", "--rewards", "r.jsonl"],
        &["compare", "--log-queries", "q.jsonl", "--log-rewards", "r.jsonl"],
        &["learn", "--once"],
    ] {
        let (code, _, err) = pointsman(dir.path(), command);
        assert_eq!(code, Some(1), "{command:?}: {err}");
        for part in [
            "none of the 30 queries are usable:",
            "30x missing-field: /request_id is missing",
            "q.jsonl, line 1: {\"id\":\"r0\",",
            "the event has the fields id, model, vec: map them in [events.fields]",
            "`pointsman init FILE..`",
            "`pointsman doctor`",
        ] {
            assert!(err.contains(part), "{command:?}: {part:?} is not in {err}");
        }
    }
    // The counts are there nevertheless.
    let (code, out, _) = pointsman(dir.path(), &["replay", "--queries", "q.jsonl", "--rewards", "r.jsonl", "--json"]);
    let summary: Value = serde_json::from_str(&out).unwrap();
    assert_eq!((code, &summary["dead_letters"], &summary["orphaned"]), (Some(1), &json!(30), &json!(30)));
}

#[test]
fn rewards_that_are_all_rejected_are_a_failure_too() {
    let dir = place("q.jsonl", &lines((0..30).map(query)));
    fs::write(dir.path().join("r.jsonl"), lines((0..30).map(|i| json!({"request_id": i.to_string(), "clicked": 1}))))
        .unwrap();
    let (code, _, err) = pointsman(dir.path(), &["replay", "--queries", "q.jsonl", "--rewards", "r.jsonl"]);
    assert_eq!(code, Some(1), "{err}");
    assert!(
        err.contains("none of the 30 rewards are usable:") && err.contains("map them in [events.reward_fields]"),
        "{err}"
    );
}

#[test]
fn a_log_is_given_up_when_its_first_thousand_events_are_rejected() {
    let csv: String = (0..20_000).map(|i| format!("r{i},\"[0.6,0.8]\",a,1\n")).collect();
    let csv = format!("id,vec,model,clicked\n{csv}");
    let dir = place("c.jsonl", &csv);
    fs::write(dir.path().join("c.csv"), &csv).unwrap();
    let letters = dir.path().join("pointsman-dead-letters.jsonl");
    let as_json =
        ["the first 1000 events of c.jsonl were all rejected:", "c.jsonl, line 1: id,vec,model,clicked", "c.csv"];
    let as_csv =
        ["the first 1000 events of c.csv were all rejected:", "the table has the columns clicked, id, model, vec"];
    for (command, parts) in [
        (&["replay", "--queries", "c.jsonl", "--rewards", "r.jsonl"][..], &as_json[..]),
        (&["evaluate", "--queries", "c.jsonl", "--rewards", "r.jsonl"], &as_json),
        (&["compare", "--log-queries", "c.jsonl", "--log-rewards", "r.jsonl"], &as_json),
        (&["replay", "--examples", "c.csv"], &as_csv),
        (&["evaluate", "--examples", "c.csv"], &as_csv),
    ] {
        let (code, out, err) = pointsman(dir.path(), command);
        assert_eq!((code, out.as_str()), (Some(1), ""), "{command:?}: {err}");
        for part in parts {
            assert!(err.contains(part), "{command:?}: {part:?} is not in {err}");
        }
        let recorded = fs::metadata(&letters).map_or(0, |file| file.len());
        assert!(recorded < 1 << 20, "{command:?}: {recorded} bytes of dead letters");
    }
    // One good event among them, and the whole log is read.
    let good = lines(std::iter::once(query(0)));
    fs::write(dir.path().join("c.jsonl"), format!("{good}{csv}")).unwrap();
    let (code, out, err) = pointsman(dir.path(), &["replay", "--queries", "c.jsonl", "--rewards", "r.jsonl", "--json"]);
    let summary: Value = serde_json::from_str(&out).unwrap();
    assert_eq!((code, &summary["queries"]), (Some(0), &json!(20_002)), "{err}");
}

#[test]
fn some_rejected_events_are_a_warning_with_the_most_frequent_reasons() {
    let bad = |i: usize| {
        let mut event = query(i);
        match i {
            0..8 => event["query"] = json!([1]),
            8..13 => event["model"] = json!("zz"),
            13..16 => event["query"] = json!([0, 0, 0, 0, 0, 0, 0, 0]),
            16 => event["ts_ms"] = json!(true),
            _ => {}
        }
        event
    };
    let dir = place("q.jsonl", &lines((0..30).map(bad)));
    for command in [
        ["replay", "--queries", "q.jsonl", "--rewards", "r.jsonl"],
        ["evaluate", "--queries", "q.jsonl", "--rewards", "r.jsonl"],
    ] {
        let (code, _, err) = pointsman(dir.path(), &command);
        assert_eq!(code, Some(0), "{err}");
        for part in [
            "warning: 17 of 30 queries were rejected:",
            "  8x wrong-dimension: the query has 1 components",
            "  5x unknown-model: the space has no model zz",
            "    q.jsonl, line 9: {",
            "  3x zero-vector: ",
            "  1x for 1 more reasons",
        ] {
            assert!(err.contains(part), "{command:?}: {part:?} is not in {err}");
        }
    }
    // In a dead letter the detail comes first, and the bytes, in full, last.
    let letters = fs::read_to_string(dir.path().join("pointsman-dead-letters.jsonl")).unwrap();
    let begin = "{\"reason\":\"wrong-dimension\",\"detail\":\"the query has 1 components";
    let first = letters.lines().find(|line| line.starts_with(begin)).expect(&letters);
    let places = ["\"source\":", "\"time_ms\":", "\"bytes\":"].map(|key| first.find(key).unwrap());
    assert!(places.is_sorted(), "{first}");
    let letter: Value = serde_json::from_str(first).unwrap();
    assert!(first.ends_with(&format!("\"bytes\":{}}}", letter["bytes"])), "{first}");
}

#[test]
fn what_cannot_be_written_fails_before_the_work() {
    let dir = place("q.jsonl", &lines((0..30).map(query)));
    fs::write(dir.path().join("file"), "").unwrap();
    let before = fs::read_dir(dir.path()).unwrap().count();
    let log = ["--queries", "q.jsonl", "--rewards", "r.jsonl"];
    let (demo, compare) = (["demo", "--rounds", "100000000"], ["compare", "--rounds", "100000000"]);
    let (replay, evaluate) = ([&["replay"][..], &log].concat(), [&["evaluate"][..], &log].concat());
    let (in_file, csv) = ("cannot create files in file (", "cannot write none/x.csv (--csv): ");
    for (command, option, value, expected) in [
        (&demo[..], "--report", "file", in_file),
        (&demo, "--png", "file/deep", in_file),
        (&demo, "--csv", "none/x.csv", csv),
        (&compare, "--report", "file/deep", in_file),
        (&compare, "--csv", "none/x.csv", csv),
        (&replay, "--report", "file", in_file),
        (&replay, "--params", "file", in_file),
        (&replay, "--csv", "none/x.csv", csv),
        (&replay, "--dead-letters", "file/x.jsonl", "cannot "),
        (&evaluate, "--report", "file", in_file),
        (&evaluate, "--csv", ".", "cannot write . (--csv): is a directory"),
        (&["simulate", "--requests", "1"], "--csv", "none/x.csv", csv),
        (&["init", "q.jsonl", "r.jsonl", "--yes"], "--out", "none/x.toml", "cannot write none/x.toml (--out): "),
    ] {
        let (code, out, err) = pointsman(dir.path(), &[command, &[option, value]].concat());
        assert_eq!((code, out.as_str()), (Some(1), ""), "{command:?} {option}: {err}");
        assert!(err.contains(expected) && err.contains(option), "{command:?} {option}: {err}");
    }
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), before, "nothing is left behind");
}

#[test]
fn a_simulation_has_a_largest_dimension() {
    let dir = tempfile::tempdir().unwrap();
    for command in ["demo", "compare"] {
        let (code, _, err) = pointsman(dir.path(), &[command, "--dim", "4097"]);
        assert_eq!(code, Some(2), "{err}");
        assert!(err.contains("must be a whole number, 1 to 4096: learners decompose a matrix"), "{err}");
    }
}

#[test]
fn configuration_errors_name_file_and_line() {
    let dir = place("q.jsonl", "");
    for (text, expected) in [
        (
            "[learner]\ndim = 2\n\ntua = 1\n",
            "in pointsman.toml, line 4: unknown key learner.tua: did you mean learner.tau?",
        ),
        (
            "[learner]\n\nalgorithm = \"hgp\"\n",
            "in pointsman.toml, line 3: learner.algorithm = \"hgp\": must be one of hpg, ",
        ),
        ("[learner]\ndim = 2\ntau = 0\n", "in pointsman.toml, line 3: learner.tau = 0: must be "),
        (
            "[spaces.shop]\ndim = 2\nranks = 3\n",
            "in pointsman.toml, line 3: unknown key spaces.shop.ranks: did you mean",
        ),
        ("[learner]\ndim = 2\ndim = 3\n", "pointsman.toml is not valid TOML, line 3: "),
    ] {
        fs::write(dir.path().join("pointsman.toml"), text).unwrap();
        let (code, _, err) = pointsman(dir.path(), &["check-config"]);
        assert_eq!(code, Some(2), "{err}");
        assert!(err.contains(expected), "{expected:?} is not in {err}");
        for rust in ["enum ", "struct ", "usize", "u64", "f64", "variant", "deserialize"] {
            assert!(!err.contains(rust), "{rust} is in {err}");
        }
    }
}

#[test]
fn bash_completes_the_keys_of_set() {
    let dir = tempfile::tempdir().unwrap();
    let (_, script, _) = pointsman(dir.path(), &["completions", "bash"]);
    fs::write(dir.path().join("completions.sh"), script).unwrap();
    let complete = |words: &[&str]| -> Vec<String> {
        let (last, before) = (words[words.len() - 1], words[words.len() - 2]);
        let words: Vec<String> = words.iter().map(|word| format!("'{word}'")).collect();
        let program = format!(
            "source ./completions.sh; COMP_WORDS=({}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); \
             _pointsman pointsman '{last}' '{before}'; printf '%s\\n' \"${{COMPREPLY[@]}}\"",
            words.join(" ")
        );
        let output = Command::new("bash").current_dir(dir.path()).args(["--norc", "-c", &program]).output().unwrap();
        assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect()
    };
    assert_eq!(complete(&["pointsman", "--set", "learner.di"]), ["learner.dim="]);
    assert_eq!(complete(&["pointsman", "replay", "--set", "store."]), ["store.dir=", "store.kind="]);
    assert_eq!(complete(&["pointsman", "snapshots", "list", "--set", "http.tls.k"]), ["http.tls.key="]);
    assert_eq!(complete(&["pointsman", "replay", "--repo"]), ["--report"], "all else is completed as before");
    for (shell, call) in [("zsh", ":KEY=VALUE:_pointsman_keys'"), ("fish", "-a \"(__pointsman_keys)\"")] {
        let (_, script, _) = pointsman(dir.path(), &["completions", shell]);
        assert!(
            script.contains(call) && script.contains("learner.dim=") && !script.contains("POINTSMAN_KEYS"),
            "{shell}"
        );
    }
}

#[test]
fn no_table_loses_a_column_in_80_columns() {
    let dir = tempfile::tempdir().unwrap();
    let (queries, rewards) = write_log(dir.path(), 300);
    let space = ["--set", "learner.dim=8", "--set", "learner.models=[\"a\",\"b\",\"c\"]"];
    let small = ["--rounds", "200", "--dim", "8", "--runs", "2"];
    let evaluate = ["evaluate", "--queries", &queries, "--rewards", &rewards, "--algorithms", "hypentropy-regression"];
    for (command, columns) in [
        ([&evaluate[..], &space].concat(), 8),
        ([&["compare", "--algorithms", "hpg:estimator=logged,exp3"][..], &small].concat(), 6),
        ([&["demo", "--learners", "configured"][..], &small].concat(), 6),
    ] {
        let output = run(dir.path(), "80", &command);
        let out = String::from_utf8(output.stdout).unwrap();
        let rule = out.lines().find(|line| line.starts_with('─')).unwrap();
        assert_eq!(rule.split_whitespace().count(), columns, "{out}");
        let table = out.lines().skip_while(|line| !line.starts_with('─')).take_while(|line| !line.is_empty());
        assert!(table.clone().count() > 3 && table.clone().all(|line| line.chars().count() <= 80), "{out}");
    }
}

/// The state after a replay of these files.
fn digest(dir: &Path, files: &[&str]) -> Value {
    let (code, out, err) = pointsman(dir, &[&["replay", "--json"][..], files].concat());
    assert_eq!(code, Some(0), "{err}");
    let summary: Value = serde_json::from_str(&out).unwrap();
    assert_eq!((&summary["applied"], &summary["dead_letters"]), (&json!(30), &json!(0)), "{summary}");
    summary["state_digest"].clone()
}

#[test]
fn a_byte_order_mark_is_ignored_wherever_logs_are_read() {
    let (queries, rewards) = (lines((0..30).map(query)), lines((0..30).map(reward)));
    let dir = place("q.jsonl", &queries);
    let write = |name: &str, text: &str| {
        let bytes = format!("\u{feff}{text}").into_bytes();
        let mut file = fs::File::create(dir.path().join(name)).unwrap();
        match name.ends_with(".zst") {
            true => file.write_all(&zstd::encode_all(&bytes[..], 3).unwrap()).unwrap(),
            false => file.write_all(&bytes).unwrap(),
        }
    };
    let plain = digest(dir.path(), &["--queries", "q.jsonl", "--rewards", "r.jsonl"]);
    for suffix in ["", ".zst"] {
        let (q, r) = (format!("marked-q.jsonl{suffix}"), format!("marked-r.jsonl{suffix}"));
        write(&q, &queries);
        write(&r, &rewards);
        assert_eq!(digest(dir.path(), &["--queries", &q, "--rewards", &r]), plain, "{suffix}");
    }
    let rows: String = (0..30_usize)
        .map(|i| {
            format!(
                "r{i},{},\"[0.1,0.2,0.3,0.4,0.5,0.6,0.7,0.8]\",{},0.5,1\n",
                1_700_000_000_000 + 10 * i,
                ["a", "b"][i % 2]
            )
        })
        .collect();
    let table = format!("request_id,ts_ms,query,model,propensity,reward\n{rows}");
    fs::write(dir.path().join("t.csv"), &table).unwrap();
    fs::write(dir.path().join("pointsman.toml"), format!("{CONFIG}missing_propensities = \"uniform\"\n")).unwrap();
    let plain = digest(dir.path(), &["--examples", "t.csv"]);
    write("marked.csv", &table);
    write("marked.csv.zst", &table);
    for name in ["marked.csv", "marked.csv.zst"] {
        assert_eq!(digest(dir.path(), &["--examples", name]), plain, "{name}");
        let (code, _, err) = pointsman(dir.path(), &["evaluate", "--examples", name]);
        assert_eq!(code, Some(0), "{err}");
        let init = ["init", name, "--yes", "--out", "new.toml", "--force"];
        let (code, out, err) = pointsman(dir.path(), &init);
        assert!(code == Some(0) && out.contains("request_id"), "{out}{err}");
    }
}
