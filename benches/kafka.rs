//! Learning through a real broker, beside a raw consumer that reads the same topics and discards; and what each stage
//! takes of the time, run alone on the same events.
//!
//!   cargo bench --bench kafka

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use base64::Engine as _;
use pointsman::config::{Algorithm, Config};
use pointsman::engine::{Engine, Input, Side};
use pointsman::report::{Column, Table};
use pointsman::router::Params;
use pointsman::wire::events::Parser;
use pointsman::wire::params;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rdkafka::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::KafkaError;
use rdkafka::producer::{BaseProducer, BaseRecord, Producer};
use rdkafka::{Offset, TopicPartitionList};

use broker::Broker;

#[path = "support/broker.rs"]
mod broker;

const DIM: usize = 768;
const MODELS: usize = 8;
const RANK: usize = 16;
const REQUESTS: usize = 20_000;
const PARTITIONS: i32 = 3;

fn main() {
    let broker = Broker::start();
    let dir = tempfile::tempdir().expect("a temporary directory");
    let config = dir.path().join("pointsman.toml");
    let models: Vec<String> = (0..MODELS).map(|m| format!("model-{m}")).collect();
    let text = format!(
        "[learner]\ndim = {DIM}\nmodels = {models:?}\nrank = {RANK}\n[store]\ndir = {store:?}\n[transport]\nkind = \"kafka\"\n\
         [transport.kafka]\nbrokers = {address:?}\n[transport.kafka.create]\npartitions = {PARTITIONS}\n",
        store = dir.path().join("store"),
        address = broker.address,
    );
    std::fs::write(&config, &text).expect("a configuration");
    pointsman(&config, &["topics", "init"]);
    let (queries, rewards) = events(&models);
    fill(&broker.address, &queries, &rewards);

    let raw = best_of(3, || read_raw(&broker.address));
    let learn = best_of(2, || {
        // A store of its own every time, so that all is read again.
        let _ = std::fs::remove_dir_all(dir.path().join("store"));
        let start = Instant::now();
        pointsman(&config, &["learn", "--once", "--json"]);
        start.elapsed()
    });
    let rate = |took: Duration| 2.0 * REQUESTS as f64 / took.as_secs_f64();
    let row = |name: &str, took: Duration| {
        vec![name.to_owned(), format!("{:.0}", rate(took)), format!("{:.2}", took.as_secs_f64() / raw.as_secs_f64())]
    };
    let columns = vec![Column::left(""), Column::right("events/s"), Column::right("time / raw")];
    let note = format!(
        "{REQUESTS} requests with their rewards, d={DIM} M={MODELS} k={RANK}, {PARTITIONS} partitions; learn --once from \
         start to exit, durable at the end; broker on the same machine"
    );
    let rows = vec![row("raw consumer, discarding", raw), row("pointsman learn", learn)];
    println!("{}", Table { columns, rows, note: Some(note) }.text(120));
    println!("{}", stages(&text, &queries, &rewards).text(120));
}

/// What the stages take, each alone on one thread.
fn stages(text: &str, queries: &[String], rewards: &[String]) -> Table {
    let mut config: Config = toml::from_str(text).expect("a configuration");
    let parser = Parser::new(&config.check().expect("settings"));
    let start = Instant::now();
    let parse = |side: Side, line: &String| Input::parse(&parser, side, line.clone().into_bytes(), None);
    let inputs: Vec<Input> = queries
        .iter()
        .zip(rewards)
        .flat_map(|(query, reward)| [parse(Side::Query, query), parse(Side::Reward, reward)])
        .collect();
    let decode = start.elapsed();
    let mut step_all = |algorithm: Algorithm| {
        config.learner.algorithm = algorithm;
        let mut engine = Engine::new(config.check().expect("settings"));
        let inputs = inputs.clone();
        let start = Instant::now();
        for input in inputs {
            engine.step(input);
        }
        (start.elapsed(), engine)
    };
    let (join, _) = step_all(Algorithm::Uniform);
    let (both, engine) = step_all(Algorithm::Hpg);
    let space = pointsman::event::Name::default_space();
    let spec = config.check().expect("settings").learner;
    let start = Instant::now();
    let publications = REQUESTS / config.snapshot.every_updates as usize;
    for version in 0..publications {
        let policy = engine.policy(&space).expect("a policy");
        let encoded = params::encode(&Params {
            space: space.clone(),
            epoch: 0,
            version: version as u64,
            revision: 0,
            models: spec.models.clone(),
            dim: spec.dim,
            created_ms: 0,
            algorithm: "hpg".to_owned(),
            policy,
        });
        assert!(!encoded.is_empty());
    }
    let publish = start.elapsed();
    let update = both.saturating_sub(join);
    let all = decode + join + update + publish;
    let row = |(name, took): (&str, Duration)| {
        let each = took.as_secs_f64() * 1e6 / REQUESTS as f64;
        vec![
            name.to_owned(),
            format!("{each:.1} us"),
            format!("{:.1}%", 100.0 * took.as_secs_f64() / all.as_secs_f64()),
        ]
    };
    let stages = [("decode", decode), ("join", join), ("update", update), ("publish (encode)", publish)];
    let columns = vec![Column::left("stage"), Column::right("a request"), Column::right("share")];
    Table { columns, rows: stages.map(row).to_vec(), note: Some("each alone, one thread".to_owned()) }
}

fn best_of(times: usize, mut work: impl FnMut() -> Duration) -> Duration {
    (0..times).map(|_| work()).min().unwrap_or_default()
}

fn events(models: &[String]) -> (Vec<String>, Vec<String>) {
    let mut random = ChaCha8Rng::seed_from_u64(1);
    let share = 1.0 / models.len() as f64;
    let propensities: serde_json::Map<String, serde_json::Value> =
        models.iter().map(|model| (model.clone(), share.into())).collect();
    (0..REQUESTS)
        .map(|i| {
            let vector: Vec<u8> = (0..DIM).flat_map(|_| random.random_range(-1.0..1.0_f32).to_le_bytes()).collect();
            let vector = base64::engine::general_purpose::STANDARD.encode(vector);
            let (id, model, ts_ms) = (format!("r{i}"), &models[i % models.len()], 1_700_000_000_000 + 10 * i as u64);
            let query = serde_json::json!({
                "request_id": id, "ts_ms": ts_ms, "query": vector, "model": model, "propensities": propensities,
            });
            let reward = serde_json::json!({
                "request_id": id, "ts_ms": ts_ms + 5, "reward": f64::from(u8::from(random.random_bool(0.5))),
            });
            (query.to_string(), reward.to_string())
        })
        .unzip()
}

fn fill(address: &str, queries: &[String], rewards: &[String]) {
    let mut settings = ClientConfig::new();
    settings.set("bootstrap.servers", address).set("compression.type", "zstd").set("linger.ms", "50");
    let producer: BaseProducer = settings.create().expect("a producer");
    for (i, (query, reward)) in queries.iter().zip(rewards).enumerate() {
        let key = i.to_string();
        for (topic, value) in [("queries", query), ("rewards", reward)] {
            let mut record = BaseRecord::to(topic).key(&key).payload(value);
            while let Err((_, back)) = producer.send(record) {
                producer.poll(Duration::from_millis(10));
                record = back;
            }
        }
    }
    producer.flush(Duration::from_secs(60)).expect("delivered");
}

/// Reads both topics to their ends and discards.
fn read_raw(address: &str) -> Duration {
    let mut settings = ClientConfig::new();
    settings.set("bootstrap.servers", address).set("group.id", "raw").set("enable.partition.eof", "true");
    settings.set("isolation.level", "read_committed").set("enable.auto.commit", "false");
    let start = Instant::now();
    let consumer: BaseConsumer = settings.create().expect("a consumer");
    let mut all = TopicPartitionList::new();
    for topic in ["queries", "rewards"] {
        for partition in 0..PARTITIONS {
            all.add_partition_offset(topic, partition, Offset::Beginning).expect("a partition");
        }
    }
    consumer.assign(&all).expect("assigned");
    let (mut ends, mut read) = (0, 0);
    while ends < 2 * PARTITIONS {
        match consumer.poll(Duration::from_secs(10)).expect("messages") {
            Ok(_) => read += 1,
            Err(KafkaError::PartitionEOF(_)) => ends += 1,
            Err(error) => panic!("{error}"),
        }
    }
    assert_eq!(read, 2 * REQUESTS);
    start.elapsed()
}

fn pointsman(config: &Path, arguments: &[&str]) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pointsman"));
    let output = command.args(arguments).arg("--config").arg(config).output().expect("pointsman");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
