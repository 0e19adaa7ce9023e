//! The first hour of a new user: foreign logs, no configuration written by hand, a verdict, and a running loop.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Arc;

use flate2::Compression;
use flate2::write::GzEncoder;
use parquet::basic::{LogicalType, Repetition, TimeUnit, Type as Physical};
use parquet::data_type::{ByteArray, ByteArrayType, FloatType, Int64Type};
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::types::{Type, TypePtr};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};

use crate::cli::{shown, terminal};
use crate::sidecar::{Client, Process, free_port};
use crate::size::sized;
use crate::up::eventually;

/// A search, the model that answered it, and what came of it.
struct Search {
    at_ms: i64,
    query: Vec<f32>,
    model: usize,
    /// The distribution that the model was drawn from.
    p: [f64; 3],
    is_good: bool,
}

const MODELS: [&str; 3] = ["BAAI/bge-small-en-v1.5", "intfloat/e5-base", "openai:text-embedding-3-large"];
const DIM: usize = 12;

/// Each model is best on a third of the queries. The split of the experiment changes halfway, if it is logged.
fn searches(number: usize, changes: bool) -> Vec<Search> {
    let mut generator = ChaCha8Rng::seed_from_u64(7);
    let mut at_ms = 1_767_225_600_000;
    (0..number)
        .map(|i| {
            at_ms += 1 + (generator.random::<f64>() * 20_000.0) as i64;
            let p = if changes && i >= number / 2 { [0.2, 0.2, 0.6] } else { [0.5, 0.3, 0.2] };
            let domain = generator.random_range(0..3_usize);
            let mut query: Vec<f32> = (0..DIM).map(|_| generator.random::<f32>() - 0.5).collect();
            query[domain] += 2.0;
            let u: f64 = generator.random();
            let model = if u < p[0] { 0 } else { 1 + usize::from(u >= p[0] + p[1]) };
            let chance = if model == domain { 0.8 } else { 0.2 };
            Search { at_ms, query, model, p, is_good: generator.random::<f64>() < chance }
        })
        .collect()
}

/// Writes a log in a layout of its own; returns its files.
type Write1 = fn(&Path, &[Search]) -> Vec<PathBuf>;

fn utc(at_ms: i64) -> String {
    pointsman::timestamp::format(at_ms)
}

/// Searches as Parquet with embeddings as lists; clicks and purchases as CSV; nothing of searches without a click.
fn parquet_and_events(dir: &Path, searches: &[Search]) -> Vec<PathBuf> {
    let (log, events) = (dir.join("searches.parquet"), dir.join("events.csv"));
    let primitive = |name: &str, physical: Physical, logical: Option<LogicalType>| -> TypePtr {
        let builder = Type::primitive_type_builder(name, physical).with_logical_type(logical);
        Arc::new(builder.with_repetition(Repetition::REQUIRED).build().unwrap())
    };
    let group = |name: &str, repetition: Repetition, logical: Option<LogicalType>, field: TypePtr| -> TypePtr {
        let builder = Type::group_type_builder(name).with_repetition(repetition).with_logical_type(logical);
        Arc::new(builder.with_fields(vec![field]).build().unwrap())
    };
    let list = group("list", Repetition::REPEATED, None, primitive("element", Physical::FLOAT, None));
    let time = LogicalType::timestamp(true, TimeUnit::MICROS);
    let columns = vec![
        primitive("search_id", Physical::BYTE_ARRAY, Some(LogicalType::String)),
        primitive("user_id", Physical::INT64, None),
        primitive("created_at", Physical::INT64, Some(time)),
        group("query_embedding", Repetition::OPTIONAL, Some(LogicalType::List), list),
        primitive("encoder", Physical::BYTE_ARRAY, Some(LogicalType::String)),
    ];
    let schema = Arc::new(Type::group_type_builder("schema").with_fields(columns).build().unwrap());
    let mut writer = SerializedFileWriter::new(File::create(&log).unwrap(), schema, Arc::default()).unwrap();
    let ids: Vec<ByteArray> = (0..searches.len()).map(|i| ByteArray::from(format!("s{i:05}").as_str())).collect();
    let users: Vec<i64> = (0..searches.len() as i64).map(|i| i % 90).collect();
    let times: Vec<i64> = searches.iter().map(|search| 1000 * search.at_ms).collect();
    let numbers: Vec<f32> = searches.iter().flat_map(|search| search.query.clone()).collect();
    let encoders: Vec<ByteArray> = searches.iter().map(|search| ByteArray::from(MODELS[search.model])).collect();
    let definitions = vec![2; numbers.len()];
    let repetitions: Vec<i16> = (0..numbers.len()).map(|i| i16::from(i % DIM != 0)).collect();
    let mut rows = writer.next_row_group().unwrap();
    let mut number = 0;
    while let Some(mut column) = rows.next_column().unwrap() {
        match number {
            0 => column.typed::<ByteArrayType>().write_batch(&ids, None, None).unwrap(),
            1 => column.typed::<Int64Type>().write_batch(&users, None, None).unwrap(),
            2 => column.typed::<Int64Type>().write_batch(&times, None, None).unwrap(),
            3 => column.typed::<FloatType>().write_batch(&numbers, Some(&definitions), Some(&repetitions)).unwrap(),
            _ => column.typed::<ByteArrayType>().write_batch(&encoders, None, None).unwrap(),
        };
        column.close().unwrap();
        number += 1;
    }
    rows.close().unwrap();
    writer.close().unwrap();
    let mut text = "search_id,occurred_at,event\n".to_owned();
    for (i, search) in searches.iter().enumerate().filter(|(_, search)| search.is_good) {
        text += &format!("s{i:05},{},click\n", utc(search.at_ms + 4_000));
        if i % 10 == 0 {
            text += &format!("s{i:05},{},purchase\n", utc(search.at_ms + 90_000));
        }
    }
    fs::write(&events, text).unwrap();
    vec![log, events]
}

/// One CSV table with a byte-order mark, the embedding in numbered columns, times in seconds, stars, and no ID.
fn csv_table(dir: &Path, searches: &[Search]) -> Vec<PathBuf> {
    let path = dir.join("ratings.csv");
    let mut text = "\u{feff}time,arm,stars".to_owned();
    (0..DIM).for_each(|i| text += &format!(",emb_{i}"));
    for search in searches {
        let stars = if search.is_good { 5 } else { 1 };
        text += &format!("\n{:.3},{},{stars}", search.at_ms as f64 / 1000.0, MODELS[search.model]);
        search.query.iter().for_each(|x| text += &format!(",{x}"));
    }
    fs::write(&path, text).unwrap();
    vec![path]
}

/// Compressed JSON lines with nested objects, whole distributions, and the reward in the same line, if there is one.
fn nested_json(dir: &Path, searches: &[Search]) -> Vec<PathBuf> {
    let path = dir.join("decisions.jsonl.gz");
    let mut file = GzEncoder::new(File::create(&path).unwrap(), Compression::fast());
    for (i, search) in searches.iter().enumerate() {
        let distribution: Value =
            MODELS.iter().zip(search.p).map(|(model, p)| ((*model).to_owned(), json!(p))).collect();
        let mut line = json!({
            "meta": {"trace_id": format!("t-{i}"), "at": utc(search.at_ms)},
            "context": {"vector": search.query},
            "routing": {"model": MODELS[search.model], "probs": distribution},
        });
        if i % 11 != 0 {
            line["feedback"] = json!({"label": search.is_good});
        }
        writeln!(file, "{line}").unwrap();
    }
    file.finish().unwrap();
    vec![path]
}

fn pointsman(dir: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pointsman"));
    command.args(arguments).current_dir(dir).env_remove("RUST_LOG").env("COLUMNS", "80").output().unwrap()
}

fn succeed(dir: &Path, arguments: &[&str]) -> String {
    let output = pointsman(dir, arguments);
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{arguments:?}\n{}\n{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}

fn json_of(dir: &Path, arguments: &[&str]) -> Value {
    serde_json::from_str(&succeed(dir, &[arguments, &["--json"]].concat())).unwrap()
}

#[test]
fn from_foreign_logs_to_a_verdict_and_a_running_loop() {
    let number = sized(2_500, 12_000);
    let layouts: [(Write1, bool, &[&str]); 3] = [
        (
            parquet_and_events,
            false,
            &["query_embedding, 12 dimensions", "of rewards occurred_at", "click = 0.3, purchase = 1"],
        ),
        (csv_table, false, &["emb, 12 dimensions", "rows have no request ID", "1 to 5"]),
        (nested_json, true, &["context/vector, 12 dimensions", "routing/probs", "are dropped"]),
    ];
    for (write, changes, findings) in layouts {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        let files = write(dir, &searches(number, changes));
        let names: Vec<&str> = files.iter().map(|path| path.file_name().unwrap().to_str().unwrap()).collect();
        let said = succeed(dir, &[&["init", "--yes"], &names[..]].concat()).replace('\n', " ");
        for finding in findings {
            assert!(said.contains(finding), "{finding} is not in\n{said}");
        }

        let checks = json_of(dir, &["doctor"]);
        let results: Vec<&str> =
            checks["checks"].as_array().unwrap().iter().map(|c| c["result"].as_str().unwrap()).collect();
        // Nothing answers at http.listen yet.
        assert!(results.iter().filter(|result| **result != "ok").eq([&"warn"]), "{checks:#}");

        let judged = json_of(dir, &["evaluate"]);
        let best = &judged["verdicts"][0];
        assert_eq!(
            (&best["policy"], &best["result"]),
            (&json!("hpg (configured)"), &json!("pays")),
            "{names:?}: {judged:#}"
        );
        assert!(best["range"]["low"].as_f64().unwrap() > 0.0, "{judged:#}");
        assert_eq!(judged["verdict"], best["sentence"]);

        let replay = ["replay", "--store", "data/store", "--keep-open", "--params", "data/log/params"];
        let learned = json_of(dir, &replay);
        assert_eq!(
            (&learned["queries"], &learned["dead_letters"]),
            (&json!(number), &json!(0)),
            "{names:?}: {learned:#}"
        );
        run_from_there(dir, learned["version"].as_u64().unwrap());
    }
}

/// `up` routes by what was learned from the log, and requests with their rewards give new parameters.
fn run_from_there(dir: &Path, version: u64) {
    let port = free_port();
    let listen = format!("http.listen=127.0.0.1:{port}");
    let mut command = Command::new(env!("CARGO_BIN_EXE_pointsman"));
    command.args(["up", "--set", &listen]).current_dir(dir);
    let up = Process::spawn(command, &dir.join("pointsman.toml"), &[]);
    let client = Client::new(port);
    client.await_status("/ready", 200);
    let decide = |id: &str, search: &Search| {
        let (status, decided) = client.json("/v1/route", &json!({"request_id": id, "query": search.query}));
        assert_eq!(status, 200, "{decided}");
        decided
    };
    let new = searches(20, false);
    let first = decide("first", &new[0]);
    assert_eq!(first["params_version"], version, "{first}");
    let learned =
        |client: &Client| client.get("/v1/status").unwrap().1["router"]["spaces"]["default"]["version"].as_u64();
    for (i, search) in new.iter().enumerate() {
        let id = format!("live-{i}");
        decide(&id, search);
        let status = client.json("/v1/rewards", &json!({"request_id": id, "reward": 1})).0;
        assert_eq!(status, 202);
    }
    eventually("parameters that contain the new rewards", || learned(&client).filter(|now| *now > version));
    up.terminate();
}

#[test]
fn init_asks_on_a_terminal() {
    let dir = tempfile::tempdir().unwrap();
    let numbered: Vec<String> = (0..8).map(|i| format!("v{i}")).collect();
    let mut lines = vec![format!("request_id,ts_ms,reward,one,other,{}", numbered.join(","))];
    lines.extend((0..60).map(|i| {
        let (one, other) = if i % 2 == 0 { ("a", "x") } else { ("b", "y") };
        format!("r{i},{},{},{one},{other},0.{i}{}", 1_767_225_600_000_i64 + i, i % 3 % 2, ",0.5".repeat(7))
    }));
    fs::write(dir.path().join("log.csv"), lines.join("\n")).unwrap();
    let (mut ours, theirs) = terminal();
    // The second candidate, then the proposal as it is.
    ours.write_all(b"2\n\n").unwrap();
    let reading = std::thread::spawn(|| shown(ours));
    let mut command = Command::new(env!("CARGO_BIN_EXE_pointsman"));
    command.args(["init", "log.csv"]).current_dir(dir.path()).env_remove("RUST_LOG");
    command.stdin(theirs.try_clone().unwrap()).stderr(theirs).stdout(Stdio::null());
    let status = command.status().unwrap();
    drop(command);
    let said = reading.join().unwrap();
    assert!(status.success(), "{said}");
    assert!(said.contains("Which column of log.csv is the chosen model?") && said.contains("1. one (a)"), "{said}");
    let written = fs::read_to_string(dir.path().join("pointsman.toml")).unwrap();
    assert!(written.contains("model = \"/other\"") && written.contains("query = \"/v\""), "{written}");

    // It never replaces a configuration that it was not asked to replace.
    let refused = pointsman(dir.path(), &["init", "log.csv", "--yes"]);
    assert_eq!(refused.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("pointsman.toml exists"), "{refused:?}");
    succeed(dir.path(), &["init", "log.csv", "--yes", "--force", "--model", "one"]);
    assert!(fs::read_to_string(dir.path().join("pointsman.toml")).unwrap().contains("model = \"/one\""));
}
