//! Dead letters: floods, oversized events and batches that cannot be read.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use rdkafka::ClientConfig;
use rdkafka::admin::{AdminOptions, NewTopic, TopicReplication};
use rdkafka::message::{Header, Headers, Message, OwnedHeaders, OwnedMessage};
use rdkafka::producer::{BaseProducer, BaseRecord, Producer};
use serde_json::{Value, json};

use crate::broker;
use crate::kafka::{Place, SMALL, WAIT, config_at, log_of, query, reward};
use crate::sidecar::{Client, Process, free_port, write_config};

/// Records 100 letters of short events in full.
const FLOOD: &str = "[learner]\ndim = 3\nmodels = [\"a\", \"b\"]\n[events]\ndead_letters_bytes_max = 52000\n";

fn run(dir: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pointsman"));
    command.current_dir(dir).args(arguments).output().unwrap()
}

fn json_of(output: &Output) -> Value {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// The summary of a run that had no usable query, and failed for that.
fn json_of_nothing(output: &Output) -> Value {
    let err = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{err}");
    assert!(err.contains("queries are usable"), "{err}");
    serde_json::from_slice(&output.stdout).unwrap()
}

fn lines(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// All dead letters of a directory of logs.
fn recorded(log: &Path) -> Vec<Value> {
    let files = fs::read_dir(log.join("dead-letters")).unwrap().map(|entry| entry.unwrap().path());
    files.flat_map(|path| lines(&fs::read_to_string(path).unwrap())).collect()
}

#[test]
fn a_compressed_flood_of_bad_lines_fills_neither_disk_nor_memory() {
    let dir = tempfile::tempdir().unwrap();
    let number = 300_000;
    // With a good event at the beginning: a log that has none there is given up.
    let good = query("r", 1_700_000_000_000);
    let bomb = zstd::encode_all(format!("{good}\n{}", "x\n".repeat(number)).as_bytes(), 19).unwrap();
    assert!(bomb.len() < 1000, "{}", bomb.len());
    fs::write(dir.path().join("queries.jsonl.zst"), bomb).unwrap();
    fs::write(dir.path().join("rewards.jsonl"), "").unwrap();
    fs::write(dir.path().join("pointsman.toml"), SMALL).unwrap();
    // Letters of the whole flood would take some 500 MB.
    let script = "ulimit -v 400000 && exec \"$0\" replay --config pointsman.toml --queries queries.jsonl.zst \
                  --rewards rewards.jsonl --json --dead-letters dead.jsonl \
                  --set events.dead_letters_bytes_max=1000000";
    let mut command = Command::new("sh");
    command.current_dir(dir.path()).args(["-c", script, env!("CARGO_BIN_EXE_pointsman")]);
    let output = command.output().unwrap();
    let summary = json_of(&output);
    let letters = fs::read_to_string(dir.path().join("dead.jsonl")).unwrap();
    assert!(letters.len() < 2_000_000, "{}", letters.len());
    let (letters, unrecorded) = (lines(&letters).len(), summary["dead_letters_unrecorded"].as_u64().unwrap() as usize);
    assert_eq!(summary["dead_letters"], json!(number), "each ends in one count");
    assert_eq!(letters + unrecorded, number, "and is recorded, or counted as not recorded");
    assert!(letters > 1000 && unrecorded > 200_000, "{letters} {unrecorded}");
    let log = String::from_utf8_lossy(&output.stderr).into_owned();
    let warnings: Vec<&str> = log.lines().filter(|line| line.contains("WARN")).collect();
    assert_eq!(warnings.len(), 2, "the first bad event, and the begin of sampling: {log}");
    let sampling = warnings.iter().find(|line| line.contains("events.dead_letters_bytes_max")).unwrap();
    assert!(sampling.contains("not-json") && sampling.contains("queries.jsonl.zst"), "{sampling}");
}

#[test]
fn a_restart_samples_the_same_dead_letters() {
    let bad: String = (0..6000).map(|i| format!("bad {i}\n")).collect();
    let cut = 2345 * 9;
    let cut = cut + bad[cut..].find('\n').unwrap() + 1;
    let learn = |dir: &Path| {
        let config = write_config(dir, 0, FLOOD);
        json_of_nothing(&run(dir, &["learn", "--once", "--json", "--config", config.to_str().unwrap()]))
    };
    let (whole, parts) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let file = |dir: &Path| dir.join("log/queries/a.jsonl");
    for dir in [&whole, &parts] {
        fs::create_dir_all(dir.path().join("log/queries")).unwrap();
    }
    fs::write(file(whole.path()), &bad).unwrap();
    let expected = learn(whole.path());
    fs::write(file(parts.path()), &bad[..cut]).unwrap();
    learn(parts.path());
    fs::write(file(parts.path()), &bad).unwrap();
    let found = learn(parts.path());
    assert_eq!((&found["dead_letters"], &found["dead_letters_unrecorded"]), (&json!(6000), &json!(5895)));
    assert_eq!(found["dead_letters_unrecorded"], expected["dead_letters_unrecorded"]);
    assert_eq!(found["state_digest"], expected["state_digest"]);
    let lines =
        |dir: &Path| -> Vec<Value> { recorded(&dir.join("log")).iter().map(|letter| letter["line"].clone()).collect() };
    assert_eq!(lines(parts.path()), lines(whole.path()));
    assert_eq!(lines(whole.path()).len(), 105);
}

#[test]
fn what_is_not_recorded_is_in_status_and_metrics() {
    let (dir, port) = (tempfile::tempdir().unwrap(), free_port());
    fs::create_dir_all(dir.path().join("log/queries")).unwrap();
    fs::write(dir.path().join("log/queries/a.jsonl"), "bad\n".repeat(1500)).unwrap();
    let config = write_config(dir.path(), port, FLOOD);
    let learn = Process::start(&config, &["learn"]);
    let client = Client::new(port);
    let start = Instant::now();
    let counts = || client.get("/v1/status").map(|(_, status)| status["counts"].clone()).unwrap_or_default();
    while counts()["queries_dead"] != json!(1500) {
        assert!(start.elapsed() < Duration::from_secs(30), "{}", log_of(&config));
        std::thread::sleep(Duration::from_millis(20));
    }
    let unrecorded = counts()["dead_unrecorded"].as_u64().unwrap();
    assert_eq!(unrecorded, 1399);
    let metrics = client.get("/metrics").unwrap().1.as_str().unwrap().to_owned();
    for line in [
        "pointsman_learner_dead_letters_unrecorded_total{} 1399",
        "pointsman_learner_dead_letters_total{kind=\"query\",reason=\"not-json\"} 1500",
    ] {
        assert!(metrics.contains(line), "{line} is not in {metrics}");
    }
    learn.terminate();
    assert_eq!(recorded(&dir.path().join("log")).len(), 101);
}

fn header(message: &OwnedMessage, name: &str) -> Option<String> {
    let found = message.headers()?.iter().find(|header| header.key == name)?;
    found.value.map(|value| String::from_utf8_lossy(value).into_owned())
}

#[test]
fn a_flood_is_sampled_on_kafka() {
    let Some(brokers) = broker::shared() else { return };
    let place = Place::new(brokers, FLOOD);
    let producer = place.producer();
    for i in 0..2500 {
        let value = format!("bad {i}");
        producer.send(BaseRecord::<str, str>::to(place.topic("queries")).payload(&value).partition(i % 3)).unwrap();
    }
    producer.flush(WAIT).unwrap();
    let summary = json_of_nothing(&place.run(&["learn", "--once", "--json"]));
    let letters = place.messages("dead_letters").len() as u64;
    let unrecorded = summary["dead_letters_unrecorded"].as_u64().unwrap();
    assert_eq!((summary["dead_letters"].as_u64(), letters + unrecorded), (Some(2500), 2500), "{summary}");
    assert!((101..110).contains(&letters), "{letters}");
    let again = place.learn_once();
    assert_eq!(again["dead_letters_unrecorded"], summary["dead_letters_unrecorded"]);
    assert_eq!(place.messages("dead_letters").len() as u64, letters, "a restart reads nothing again");
}

/// Bytes that no compression makes smaller, as text.
fn noise(bytes: usize) -> String {
    let mut state = 1_u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        char::from(b'0' + ((state >> 33) % 75) as u8)
    };
    (0..bytes).map(|_| next()).filter(|c| *c != '\\').collect()
}

/// Sends events whose dead letters would be larger than any topic takes, if all that came with them were copied.
fn send_poison(place: &Place) {
    let mut settings = ClientConfig::new();
    settings.set("bootstrap.servers", place.brokers()).set("message.max.bytes", "1040000");
    let producer: BaseProducer = settings.create().unwrap();
    let (long, small) = (noise(600_000), noise(900_000));
    let mut bad_name: Value = serde_json::from_str(&query("r1", 1_700_000_000_000)).unwrap();
    bad_name["space"] = json!(long);
    let bad_name = bad_name.to_string();
    let with = |name: &str| OwnedHeaders::new().insert(Header { key: name, value: Some(&small) });
    let topic = place.topic("queries");
    let records = [
        BaseRecord::<str, str>::to(topic).payload(&bad_name).key("k"),
        BaseRecord::<str, str>::to(topic).payload("{").key(&small),
        BaseRecord::<str, str>::to(topic).payload("{").headers(with("traceparent")),
        BaseRecord::<str, str>::to(topic).payload("{").headers(with("content-type")),
        // As large as the topic takes: with what a letter adds it would be larger.
        BaseRecord::<str, str>::to(topic).payload(&small).key(&long[..130_000]),
    ];
    for record in records {
        producer.send(record.partition(0)).unwrap();
        producer.flush(WAIT).unwrap();
    }
}

fn check_poison(letters: &[OwnedMessage]) {
    let mut reasons: Vec<String> = letters.iter().map(|letter| header(letter, "reason").unwrap()).collect();
    reasons.sort();
    assert_eq!(reasons, ["bad-name", "content-type", "not-json", "not-json", "not-json"]);
    for letter in letters {
        let headers = letter.headers().unwrap();
        let of_headers: usize = headers.iter().map(|header| header.value.unwrap().len()).sum();
        let key = letter.key().unwrap_or_default();
        assert!(header(letter, "detail").unwrap().len() < 600 && of_headers < 1200 && key.len() <= 1024, "{headers:?}");
    }
    let named = letters.iter().find(|letter| header(letter, "reason").unwrap() == "bad-name").unwrap();
    assert!(header(named, "detail").unwrap().contains("bytes)"), "the excerpt says how long the name was");
    assert!(named.payload().unwrap().len() > 590_000, "the event itself is whole");
    let cut_keys = letters.iter().filter_map(|letter| header(letter, "key_cut_from_bytes")).count();
    assert_eq!(cut_keys, 2, "a key that was cut says so");
    let traced = letters.iter().find_map(|letter| header(letter, "traceparent")).unwrap();
    assert!(traced.len() < 200 && traced.contains("bytes)"), "{traced}");
}

#[test]
fn a_poison_pill_becomes_a_bounded_dead_letter() {
    let Some(brokers) = broker::shared() else { return };
    for lanes in ["one", "partition"] {
        let place = Place::new(brokers, SMALL);
        let lanes = format!("transport.kafka.lanes={lanes}");
        send_poison(&place);
        let summary = json_of_nothing(&place.run(&["learn", "--once", "--json", "--set", &lanes]));
        assert_eq!(summary["dead_letters"], json!(5), "{summary}");
        check_poison(&place.messages("dead_letters"));
    }
}

#[test]
fn a_dead_letter_that_the_broker_rejects_goes_without_its_event() {
    let Some(brokers) = broker::shared() else { return };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    // With 250 bytes the place of an event fits, with 80 only the marks of transactions do.
    for (lanes, bytes, expected) in [("one", "250", 5), ("partition", "250", 5), ("partition", "80", 0)] {
        let place = Place::without_topics(brokers, SMALL);
        let small = NewTopic::new(place.topic("dead_letters"), 1, TopicReplication::Fixed(1));
        let small = small.set("max.message.bytes", bytes);
        runtime.block_on(place.admin().create_topics(&[small], &AdminOptions::new())).unwrap();
        // It makes the others, and complains about this one.
        place.fails(&["topics", "init"]);
        let lanes = format!("transport.kafka.lanes={lanes}");
        send_poison(&place);
        let output = place.run(&["learn", "--once", "--json", "--set", &lanes]);
        assert_eq!(json_of_nothing(&output)["dead_letters"], json!(5));
        let letters = place.messages("dead_letters");
        assert_eq!(letters.len(), expected, "{bytes}");
        assert!(letters.iter().all(|letter| letter.payload().is_none() && letter.headers().is_none()));
        let keys: BTreeSet<&[u8]> = letters.iter().filter_map(Message::key).collect();
        let places: Vec<String> =
            (0..expected).map(|offset| format!("{}/0/{offset}", place.topic("queries"))).collect();
        assert_eq!(keys, places.iter().map(String::as_bytes).collect(), "the key says where the event is");
        if expected == 0 {
            let log = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(log.contains("raise max.message.bytes"), "{log}");
        }
    }
}

/// The client takes a megabyte at most, so that a small bomb will do, and soon fetches again after an error.
const NARROW: &str = "[transport.kafka.client]\n\"fetch.max.bytes\" = 1000000\n\"receive.message.max.bytes\" = 1000512\n\
                      \"fetch.error.backoff.ms\" = 50\n";

/// Sends good events, then `bombs` in one batch that cannot be decompressed, then good ones again, all to partition 0 of
/// the queries, with their rewards. Returns the offset of the first bomb.
fn send_bombs(place: &Place, bombs: usize) -> u64 {
    let mut settings = ClientConfig::new();
    settings.set("bootstrap.servers", place.brokers()).set("compression.type", "zstd").set("linger.ms", "300");
    settings.set("message.max.bytes", "100000000").set("batch.size", "100000000");
    let producer: BaseProducer = settings.create().unwrap();
    let send = |topic: &str, values: Vec<String>| {
        for value in &values {
            producer.send(BaseRecord::<str, str>::to(place.topic(topic)).payload(value).partition(0)).unwrap();
        }
        producer.flush(WAIT).unwrap();
    };
    let of = |line: fn(&str, i64) -> String, ids: std::ops::Range<i64>| -> Vec<String> {
        ids.map(|i| line(&format!("r{i}"), 1_700_000_000_000 + 10 * i)).collect()
    };
    send("queries", of(query, 0..10));
    send("queries", vec!["0".repeat(2_000_000); bombs]);
    send("queries", of(query, 10..20));
    send("rewards", of(reward, 0..20));
    10
}

/// A configuration with the narrow client.
fn narrow(place: &Place) {
    let text = fs::read_to_string(&place.config).unwrap();
    fs::write(&place.config, format!("{text}{NARROW}")).unwrap();
}

#[test]
fn a_batch_that_cannot_be_decompressed_stops_with_its_offset_or_is_skipped() {
    let Some(brokers) = broker::shared() else { return };
    for lanes in ["one", "partition"] {
        let place = Place::new(brokers, SMALL);
        narrow(&place);
        let from = send_bombs(&place, 3);
        // In lanes by partition the good events are not in the partition of their key.
        let summary_of = if lanes == "one" { json_of } else { json_of_nothing };
        let lanes = format!("transport.kafka.lanes={lanes}");
        let text = place.fails(&["learn", "--once", "--set", &lanes]);
        let named = format!("cannot read {}/0 from offset {from} on", place.topic("queries"));
        assert!(text.contains(&named) && text.contains("--accept-gap"), "{text}");
        let summary = summary_of(&place.run(&["learn", "--once", "--json", "--accept-gap", "--set", &lanes]));
        assert_eq!(summary["queries"], json!(21), "the batch counts as one: {summary}");
        let gaps: Vec<OwnedMessage> = place.messages("dead_letters");
        let gaps: Vec<&OwnedMessage> =
            gaps.iter().filter(|letter| header(letter, "reason").as_deref() == Some("gap")).collect();
        assert_eq!(gaps.len(), 1);
        let of = |name: &str| header(gaps[0], name).unwrap();
        assert_eq!((of("from"), of("to")), (from.to_string(), (from + 3).to_string()));
        assert_eq!(
            (of("source"), of("partition"), of("offset")),
            (place.topic("queries").to_owned(), "0".into(), of("from"))
        );
        let again = json_of(&place.ok(&["learn", "--once", "--json", "--set", &lanes]));
        assert_eq!(again["queries"], json!(21), "what was skipped stays skipped: {again}");
    }
}

#[test]
fn a_daemon_at_a_batch_that_cannot_be_read_is_not_ready_and_says_where() {
    let Some(brokers) = broker::shared() else { return };
    let place = Place::new(brokers, SMALL);
    let port = free_port();
    let config = config_at(&place, "learn", port);
    fs::write(&config, fs::read_to_string(&config).unwrap() + NARROW).unwrap();
    let from = send_bombs(&place, 1);
    let learn = Process::start(&config, &["learn"]);
    let client = Client::new(port);
    let topic = place.topic("queries");
    let await_that = |what: &str, is_so: &dyn Fn() -> bool| {
        let start = Instant::now();
        while !is_so() {
            assert!(start.elapsed() < Duration::from_secs(60), "{what}\n{}", log_of(&config));
            std::thread::sleep(Duration::from_millis(50));
        }
    };
    let named = format!("cannot read {topic}/0 from offset {from} on");
    let ready = || client.get("/ready").map(|(code, text)| (code, text.to_string())).unwrap_or_default();
    await_that("not ready", &|| ready().0 == 503 && ready().1.contains(&named));
    let logged = ["ERROR", "cannot read batch; lane stopped", topic, &format!("offset={from} ")];
    let is_logged = |line: &str| logged.iter().all(|part| line.contains(part));
    assert!(log_of(&config).lines().any(is_logged), "{}", log_of(&config));
    let metrics = || client.get("/metrics").map(|(_, text)| text.as_str().unwrap().to_owned()).unwrap_or_default();
    let stopped = format!("pointsman_learner_unreadable_offset{{topic=\"{topic}\",partition=\"0\"}} {from}\n");
    await_that("the metric", &|| metrics().contains(&stopped));
    // What is read but cannot be learned before what is not read counts as lag.
    let later: Vec<String> = (50..70).map(|i| query(&format!("r{i}"), 1_700_000_001_000 + 10 * i)).collect();
    let producer = place.producer();
    for value in &later {
        producer.send(BaseRecord::<str, str>::to(topic).payload(value).partition(1)).unwrap();
    }
    producer.flush(WAIT).unwrap();
    let lag = format!("pointsman_learner_lag{{topic=\"{topic}\",partition=\"1\"}} 20\n");
    await_that("the lag", &|| metrics().contains(&lag));
    // It ends like any other, and goes on once it is allowed to.
    learn.terminate();
    let learn = Process::start(&config, &["learn", "--accept-gap"]);
    let applied = || client.get("/v1/status").map(|(_, status)| status["counts"]["applied"].clone());
    await_that("learning", &|| applied() == Some(json!(20)));
    client.await_status("/ready", 200);
    assert!(
        metrics().contains("pointsman_learner_dead_letters_total{kind=\"query\",reason=\"gap\"} 1"),
        "{}",
        metrics()
    );
    learn.terminate();
}
