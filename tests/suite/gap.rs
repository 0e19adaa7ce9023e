//! `gap` on data sets that have structure, on such that have none, and on real ones where they are there.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use pointsman::simulate::World;
use pointsman::simulate::dataset::{DatasetSpec, DatasetWorld};
use pointsman::simulate::log_quadratic::{LogQuadratic, LogQuadraticSpec};
use pointsman::simulate::queries::{Queries, Shape};
use pointsman::wire::dataset::decode;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::Value;
use xxhash_rust::xxh3::xxh3_64;

use crate::picture::pictures;

/// What a data set is made from.
pub struct Made {
    pub queries: usize,
    pub dim: usize,
    pub models: usize,
    /// Rewards 0.5 + q'W*q, or without any relation to the query.
    pub structured: bool,
}

impl Made {
    /// Writes it as a directory; four candidates a query.
    pub fn write(&self, directory: &Path) {
        let Self { queries: n, dim, models, .. } = *self;
        let (shape, seed) = (Shape::PowerLaw, 3);
        let spec = LogQuadraticSpec { dim, models, intrinsic_rank: 2, signal: 0.3, shape, seed };
        let (world, mut draws) = (LogQuadratic::new(spec), Queries::new(shape, dim, 100));
        let (mut queries, mut rewards) = (Vec::new(), Vec::new());
        for i in 0..n {
            let query = draws.draw();
            rewards.extend(match self.structured {
                true => world.expected_rewards(&query),
                false => (0..models).map(|m| noise(i, m)).collect(),
            });
            queries.extend(query.as_slice().iter().copied());
        }
        let similarities = (0..4 * n).flat_map(|c| (0..models).map(move |m| noise(c, m + 100)));
        let labels = (0..4 * n).map(|c| [0.05, 0.5, 0.95][c % 3]);
        let offsets: Vec<u8> = (0..=n).flat_map(|i| (4 * i as i32).to_le_bytes()).collect();
        let names: Vec<String> = (0..models).map(|m| format!("expert.{m}")).collect();
        let tensors = [
            ("query", Dtype::F32, vec![n, dim], floats(queries.into_iter())),
            ("expected_reward", Dtype::F32, vec![n, models], floats(rewards.into_iter())),
            ("candidate_offsets", Dtype::I32, vec![n + 1], offsets),
            ("candidate_reward", Dtype::F32, vec![4 * n], floats(labels)),
            ("candidate_similarity", Dtype::F32, vec![4 * n, models], floats(similarities)),
        ];
        let views = tensors
            .iter()
            .map(|(name, dtype, shape, bytes)| (*name, TensorView::new(*dtype, shape.clone(), bytes).unwrap()));
        let metadata = HashMap::from([("models".to_owned(), serde_json::to_string(&names).unwrap())]);
        fs::create_dir_all(directory).unwrap();
        fs::write(directory.join("routing.safetensors"), safetensors::serialize(views, Some(metadata)).unwrap())
            .unwrap();
        let category = |i: usize| if i.is_multiple_of(20) { "rare" } else { ["long", "short"][i % 2] };
        let lines: String = (0..n).map(|i| format!("q{i}\tquestion <{i}>\t{}\n", category(i))).collect();
        fs::write(directory.join("queries.tsv"), lines).unwrap();
    }
}

/// A number from 0 to 1 that depends on nothing else.
fn noise(i: usize, m: usize) -> f64 {
    (xxh3_64(&[i.to_le_bytes(), m.to_le_bytes()].concat()) >> 11) as f64 / (1_u64 << 53) as f64
}

fn floats(values: impl Iterator<Item = f64>) -> Vec<u8> {
    values.flat_map(|x| (x as f32).to_le_bytes()).collect()
}

fn gap(arguments: &[&str]) -> (Option<i32>, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pointsman"));
    let output = command.arg("gap").args(arguments).env_remove("RUST_LOG").output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

fn json(directory: &Path, arguments: &[&str]) -> Value {
    let (code, out, err) = gap(&[&["--data", directory.to_str().unwrap(), "--json"], arguments].concat());
    assert_eq!(code, Some(0), "{err}");
    serde_json::from_str(&out).unwrap()
}

fn number(row: &Value, class: &str, measured: &str) -> f64 {
    row[class][measured].as_f64().unwrap()
}

#[test]
fn structure_carries_over_to_held_out_queries_and_chance_does_not() {
    let directory = tempfile::tempdir().unwrap();
    let (real, chance) = (directory.path().join("real"), directory.path().join("chance"));
    Made { queries: 600, dim: 12, models: 4, structured: true }.write(&real);
    Made { queries: 90, dim: 96, models: 4, structured: false }.write(&chance);

    let found = json(&real, &["--rank", "4"]);
    let all = &found["rows"][0];
    let [constant, linear, quadratic] =
        ["constant", "log_linear", "log_quadratic"].map(|class| number(all, class, "held_out"));
    assert!(quadratic < 0.5 * constant && quadratic < 0.7 * linear, "{all}");
    assert!(number(all, "log_quadratic", "shuffled") > 2.0 * number(all, "log_quadratic", "in_sample"), "{all}");
    let verdict = found["verdict"].as_str().unwrap();
    assert!(verdict.contains("log-quadratic class beats") || verdict.contains("both beat"), "{verdict}");

    let found = json(&chance, &["--rank", "4"]);
    let all = &found["rows"][0];
    let constant = number(all, "constant", "in_sample");
    for class in ["log_linear", "log_quadratic"] {
        for measured in ["in_sample", "shuffled"] {
            assert!(number(all, class, measured) < 0.05 * constant, "{class} {measured}: {all}");
        }
        assert!(number(all, class, "held_out_gain") < 2.0 * number(all, class, "held_out_error"), "{all}");
    }
    assert!(found["verdict"].as_str().unwrap().contains("they memorise"), "{}", found["verdict"]);
}

#[test]
fn the_table_the_report_and_the_file_say_the_same() {
    let directory = tempfile::tempdir().unwrap();
    let (data, report, csv) =
        (directory.path().join("data"), directory.path().join("deep/report"), directory.path().join("gap.csv"));
    Made { queries: 120, dim: 6, models: 3, structured: true }.write(&data);
    let options = ["--folds", "3", "--models", "expert.2,1", "--top", "2", "--csv", csv.to_str().unwrap()];
    let place = ["--data", data.to_str().unwrap(), "--report", report.to_str().unwrap()];
    let png = directory.path().join("png");
    let (code, out, err) = gap(&[&place[..], &options, &["--png", png.to_str().unwrap()]].concat());
    assert_eq!(code, Some(0), "{err}");
    assert_eq!(pictures(&png).len(), 2);
    assert!(err.contains("optimising 100%"), "progress without a terminal is plain lines: {err}");

    let found = json(&data, &options);
    assert_eq!(found, json(&data, &options), "the same every time");
    let rows = found["rows"].as_array().unwrap();
    let names: Vec<&str> = rows.iter().filter_map(|row| row["category"].as_str()).collect();
    assert_eq!(names, ["all", "long", "short"]);
    assert_eq!(rows.iter().map(|row| row["queries"].as_u64().unwrap()).collect::<Vec<_>>(), [120, 54, 60]);
    assert_eq!(found["categories_left_out"], serde_json::json!({"rare": 6}));
    assert!(
        out.contains("categories with too few queries for their own row: rare (6)")
            && out.contains(rows[0]["verdict"].as_str().unwrap())
    );

    let written = fs::read_to_string(&csv).unwrap();
    let mut lines = written.lines();
    assert!(lines.next().unwrap().starts_with("category,queries,constant,log_linear,log_quadratic,held_out_constant"));
    let page = fs::read_to_string(report.join("gap.html")).unwrap();
    for (line, row) in lines.zip(rows) {
        let cells: Vec<&str> = line.split(',').collect();
        let figure = number(row, "log_quadratic", "held_out");
        assert_eq!((cells.len(), cells[7].parse::<f64>().unwrap()), (10, figure));
        assert!(out.contains(&format!("{figure:.4}")) && page.contains(&format!("{figure:.4}")));
    }
    for part in ["<svg", "rank by expert.2", "rank by expert.0", "expert.2 only", "One query: question &lt;"] {
        assert!(page.contains(part), "{part}");
    }
    assert!(!page.contains("<script") && !page.contains("src="));
    let figure = &found["figure"];
    let count = |key: &str| figure[key].as_u64().unwrap();
    let parts = ["found_by_first_alone", "found_by_second_alone", "found_by_both", "found_by_neither"];
    assert_eq!((count("good"), parts.map(count).iter().sum::<u64>()), (160, 160));
    assert_eq!(figure["models"], serde_json::json!(["expert.2", "expert.0"]));
}

#[test]
fn mistakes_are_told_with_the_right_exit_code() {
    let directory = tempfile::tempdir().unwrap();
    let data = directory.path().join("data");
    Made { queries: 20, dim: 3, models: 2, structured: false }.write(&data);
    let broken = directory.path().join("broken.safetensors");
    fs::write(&broken, b"no tensors").unwrap();
    let (data, broken) = (data.to_str().unwrap(), broken.to_str().unwrap());
    for (arguments, code, expected) in [
        (&["--data", data, "--rank", "4"][..], 2, "--rank 4 exceeds the dimension 3 of the queries: lower the rank"),
        (&["--data", data, "--rank", "0"][..], 2, "must be a whole number, 1 or more"),
        (&["--data", data, "--folds", "11"][..], 2, "--folds 11 needs at least 22 queries"),
        (&["--data", data, "--folds", "1"][..], 2, "--folds"),
        (&["--data", data, "--models", "expert.0"][..], 2, "name exactly two models out of expert.0, expert.1"),
        (&["--data", data, "--models", "1,expert.0"][..], 2, "two different models"),
        (&["--data", data, "--models", "1,3"][..], 2, "no model \"3\" in the data set"),
        (&[][..], 2, "--data"),
        (&["--data", "/nowhere"][..], 1, "cannot read /nowhere"),
        (&["--data", broken][..], 1, "is not a valid data set: not a safetensors file"),
    ] {
        let (found, _, err) = gap(arguments);
        assert_eq!(found, Some(code), "{arguments:?}: {err}");
        assert!(err.contains(expected), "{arguments:?}: {err}");
    }
}

/// The collection lies beside the repository where there is one.
pub fn dbpedia() -> Option<PathBuf> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/data/dbpedia-entity");
    let found = directory.join("routing.safetensors").is_file();
    if !found {
        println!("SKIPPED: there is no ../shared/data/dbpedia-entity beside the repository");
    }
    found.then_some(directory)
}

#[test]
fn real_queries_are_memorised() {
    let Some(directory) = dbpedia() else { return };
    let found = json(&directory, &["--rank", "4", "--folds", "2"]);
    let all = &found["rows"][0];
    assert_eq!(all["queries"], 407);
    assert!((number(all, "constant", "in_sample") - 0.0717).abs() < 5e-5, "{all}");
    for class in ["log_linear", "log_quadratic"] {
        assert!(number(all, class, "in_sample") < 0.01 && number(all, class, "shuffled") < 0.01, "{all}");
        assert!(number(all, class, "held_out_gain") < 2.0 * number(all, class, "held_out_error"), "{all}");
    }
    assert!(found["verdict"].as_str().unwrap().contains("they memorise"));
}

#[test]
fn real_queries_are_a_world() {
    let Some(directory) = dbpedia() else { return };
    let text = fs::read_to_string(directory.join("queries.tsv")).unwrap();
    let data = decode(&fs::read(directory.join("routing.safetensors")).unwrap(), Some(&text)).unwrap();
    assert_eq!((data.len(), data.dim, data.models.len()), (407, 768, 8));
    let mut world = DatasetWorld::new(&data, DatasetSpec { shuffled: false, held_out: 0.2, seed: 1 }).unwrap();
    for _ in 0..20 {
        let query = world.next_query();
        let rewards = world.expected_rewards(&query);
        assert!((0..407).any(|i| data.rewards(i) == rewards));
    }
}
