//! The daemon and the sidecar on a real Kafka broker.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use pointsman::transport::kafka::cluster::HAS_TLS;
use rdkafka::ClientConfig;
use rdkafka::admin::{AdminClient, AdminOptions};
use rdkafka::client::DefaultClientContext;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::KafkaError;
use rdkafka::message::{Header, Headers, Message, OwnedHeaders, OwnedMessage};
use rdkafka::producer::{BaseProducer, BaseRecord, Producer};
use rdkafka::{Offset, TopicPartitionList};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::broker::{self, Broker};
use crate::sidecar::{Client, Process, Traffic, free_port};
use crate::size::sized;

pub const WAIT: Duration = Duration::from_secs(10);

/// One test's directory, configuration and topics.
pub struct Place {
    pub dir: TempDir,
    pub config: PathBuf,
    brokers: String,
    topics: BTreeMap<&'static str, String>,
}

impl Place {
    /// With topics of its own, which are made.
    pub fn new(brokers: &str, more: &str) -> Self {
        let place = Self::without_topics(brokers, more);
        place.ok(&["topics", "init"]);
        place
    }

    pub fn without_topics(brokers: &str, more: &str) -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let dir = tempfile::tempdir().unwrap();
        let prefix = format!("t{}-{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
        let names = ["queries", "rewards", "params", "dead_letters", "snapshots"];
        let topics: BTreeMap<&str, String> = names.map(|name| (name, format!("{prefix}-{name}"))).into();
        let config = dir.path().join("pointsman.toml");
        let text = format!(
            "{more}\n[store]\ndir = {store:?}\n[audit]\napplied_log = {audit:?}\n[transport]\nkind = \"kafka\"\n\
             [transport.kafka]\nbrokers = {brokers:?}\ngroup = {prefix:?}\nidle_ms = 100\n\
             [transport.kafka.create]\npartitions = 3\n[transport.kafka.topics]\n{names}",
            store = dir.path().join("store"),
            audit = dir.path().join("audit.jsonl"),
            names = topics.iter().map(|(name, topic)| format!("{name} = {topic:?}\n")).collect::<String>(),
        );
        fs::write(&config, text).unwrap();
        Self { dir, config, brokers: brokers.to_owned(), topics }
    }

    pub fn brokers(&self) -> &str {
        &self.brokers
    }

    pub fn topic(&self, name: &str) -> &str {
        &self.topics[name]
    }

    pub fn run(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pointsman"));
        command.args(arguments).arg("--config").arg(&self.config).output().unwrap()
    }

    pub fn ok(&self, arguments: &[&str]) -> Output {
        let output = self.run(arguments);
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        output
    }

    /// What a command that fails says; it must fail while running, not by its usage.
    pub fn fails(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{arguments:?}: {text}");
        text
    }

    pub fn learn_once(&self) -> Value {
        serde_json::from_slice(&self.ok(&["learn", "--once", "--json"]).stdout).unwrap()
    }

    pub fn admin(&self) -> AdminClient<DefaultClientContext> {
        ClientConfig::new().set("bootstrap.servers", &self.brokers).create().unwrap()
    }

    pub fn producer(&self) -> BaseProducer {
        ClientConfig::new().set("bootstrap.servers", &self.brokers).create().unwrap()
    }

    pub fn send(&self, topic: &str, values: &[String]) {
        let producer = self.producer();
        for value in values {
            producer.send(BaseRecord::<(), String>::to(self.topic(topic)).payload(value)).unwrap();
        }
        producer.flush(WAIT).unwrap();
    }

    /// All that a topic holds, read by a client of its own.
    pub fn messages(&self, topic: &str) -> Vec<OwnedMessage> {
        let mut settings = ClientConfig::new();
        settings.set("bootstrap.servers", &self.brokers).set("group.id", "test").set("enable.partition.eof", "true");
        settings.set("isolation.level", "read_committed").set("enable.auto.commit", "false");
        let consumer: BaseConsumer = settings.create().unwrap();
        let metadata = consumer.fetch_metadata(Some(self.topic(topic)), WAIT).unwrap();
        let mut left: BTreeSet<i32> = metadata.topics()[0].partitions().iter().map(|p| p.id()).collect();
        let mut all = TopicPartitionList::new();
        for partition in &left {
            all.add_partition_offset(self.topic(topic), *partition, Offset::Beginning).unwrap();
        }
        consumer.assign(&all).unwrap();
        let mut messages = Vec::new();
        while !left.is_empty() {
            match consumer.poll(WAIT).expect("a topic ends") {
                Ok(message) => messages.push(message.detach()),
                Err(KafkaError::PartitionEOF(partition)) => drop(left.remove(&partition)),
                Err(error) => panic!("{error}"),
            }
        }
        messages
    }

    /// Request ids of a topic's events.
    fn ids(&self, topic: &str) -> Vec<String> {
        let id = |message: &OwnedMessage| {
            let event: Value = serde_json::from_slice(message.payload().unwrap()).unwrap();
            event["request_id"].as_str().unwrap().to_owned()
        };
        self.messages(topic).iter().map(id).collect()
    }

    /// Requests that were learned from, as the audit log has them.
    fn applied(&self) -> Vec<String> {
        let text = fs::read_to_string(self.dir.path().join("audit.jsonl")).unwrap_or_default();
        let id = |line: &str| serde_json::from_str::<Value>(line).unwrap()["request_id"].as_str().unwrap().to_owned();
        text.lines().map(id).collect()
    }
}

pub const SMALL: &str =
    "[learner]\ndim = 3\nmodels = [\"a\", \"b\"]\n[join]\nreorder_ms = 10\n[snapshot]\nevery_ms = 100\n";

pub fn query(id: &str, ts_ms: i64) -> String {
    let propensities = json!({"a": 0.5, "b": 0.5});
    let event =
        json!({"request_id": id, "ts_ms": ts_ms, "query": [1, 2, 3], "model": "a", "propensities": propensities});
    event.to_string()
}

pub fn reward(id: &str, ts_ms: i64) -> String {
    json!({"request_id": id, "ts_ms": ts_ms, "reward": 1}).to_string()
}

/// So many requests with their rewards, from `first` on.
pub fn pairs(place: &Place, first: i64, number: i64) {
    let of = |line: fn(&str, i64) -> String, after: i64| -> Vec<String> {
        (first..first + number).map(|i| line(&format!("r{i}"), 1_700_000_000_000 + 10 * i + after)).collect()
    };
    place.send("queries", &of(query, 0));
    place.send("rewards", &of(reward, 5));
}

/// A configuration with an address for one process.
pub fn config_at(place: &Place, name: &str, port: u16) -> PathBuf {
    let path = place.dir.path().join(format!("{name}.toml"));
    let text = fs::read_to_string(&place.config).unwrap();
    fs::write(&path, format!("{text}[http]\nlisten = \"127.0.0.1:{port}\"\n")).unwrap();
    path
}

pub fn log_of(config: &Path) -> String {
    fs::read_to_string(config.with_extension("log")).unwrap_or_default()
}

/// Route, Kafka, learn: over HTTP, with delayed and lost rewards, while the learner and the broker are killed.
#[test]
fn every_request_is_applied_exactly_once() {
    if !broker::possible() {
        return;
    }
    const DIM: usize = 64;
    let (rounds, learner_kills, broker_kills) = (sized(6000, 50_000), sized(10, 100), sized(2, 10));
    let mut kafka = Broker::start(&[]);
    let models: Vec<String> = (1..=8).map(|m| format!("model-{m}")).collect();
    let settings = format!(
        "[learner]\ndim = {DIM}\nmodels = {models:?}\n[join]\nreorder_ms = 50\n[snapshot]\nevery_updates = 200\nevery_ms = 200\n"
    );
    let place = Place::new(kafka.address(), &settings);
    let (learn_port, route_port) = (free_port(), free_port());
    let learn_config = config_at(&place, "learn", learn_port);
    let route_config = config_at(&place, "route", route_port);
    let mut learn = Process::start(&learn_config, &["learn"]);
    let route = Process::start(&route_config, &["route", "--serve-uniform"]);
    let (client, learner) = (Client::new(route_port), Client::new(learn_port));
    client.await_status("/ready", 200);
    learner.await_status("/ready", 200);
    let mut traffic = Traffic::new(&models, DIM);
    // Kills come in the first three quarters, so that what was learned can be seen in the last.
    let judged = rounds * 3 / 4;
    let at = |kills: usize| -> BTreeSet<usize> { (1..=kills).map(|n| judged * n / (kills + 1)).collect() };
    let (learner_dies, broker_dies) = (at(learner_kills), at(broker_kills));
    // Requests go on while the learner is gone; then it is waited for, or how much of the traffic met a policy that was
    // learned at all would be up to the machine's speed.
    let absence = judged / (learner_kills + 1) / 4;
    let mut killed = (0, 0);
    for round in 0..rounds {
        if learner_dies.contains(&round) {
            learn.kill();
            learn = Process::start(&learn_config, &["learn"]);
            killed.0 += 1;
        }
        if broker_dies.contains(&round) {
            kafka.kill();
            kafka.restart();
            killed.1 += 1;
        }
        if round == judged || round.checked_sub(absence).is_some_and(|died| learner_dies.contains(&died)) {
            let start = Instant::now();
            let applied = || learner.get("/v1/status").and_then(|(_, status)| status["counts"]["applied"].as_u64());
            while applied().is_none_or(|applied| applied < traffic.rewarded.len() as u64) {
                assert!(start.elapsed() < Duration::from_secs(120), "{:?}\n{}", applied(), log_of(&learn_config));
                std::thread::sleep(Duration::from_millis(100));
            }
        }
        traffic.ask(&client, round >= judged);
    }
    route.terminate();
    learn.terminate();
    let summary = place.learn_once();
    let rewarded = &traffic.rewarded;
    assert_eq!(
        (summary["queries"].as_u64(), summary["rewards"].as_u64()),
        (Some(rounds as u64), Some(rewarded.len() as u64))
    );
    assert_eq!(summary["applied"].as_u64(), Some(rewarded.len() as u64), "{summary}");
    assert_eq!(summary["dead_letters"], json!(0));
    // The topics themselves, read by another client.
    let queries: BTreeSet<String> = place.ids("queries").into_iter().collect();
    let rewards: BTreeSet<String> = place.ids("rewards").into_iter().collect();
    assert_eq!((queries.len(), &rewards), (rounds, rewarded));
    let applied = place.applied();
    let unique: BTreeSet<String> = applied.iter().cloned().collect();
    assert_eq!((applied.len(), &unique), (rewarded.len(), rewarded), "each exactly once");
    // The newest parameters on the topic are those of the last state.
    let newest = place.messages("params").pop().unwrap();
    let params = pointsman::wire::params::decode(newest.payload().unwrap()).unwrap();
    assert_eq!((newest.key(), Some(params.version)), (Some(&b"default"[..]), summary["version"].as_u64()));
    let closed = traffic.closed();
    println!(
        "{rounds} requests, learner killed {} times, broker {}: {} applied, each once; {:.1}% of the gap in the last quarter",
        killed.0,
        killed.1,
        applied.len(),
        100.0 * closed
    );
    assert!(closed > 0.2, "only {closed} of the gap between the best constant model and the oracle");
}

#[test]
fn bad_events_become_dead_letters_with_their_place() {
    let Some(brokers) = broker::shared() else { return };
    let place = Place::new(brokers, SMALL);
    let producer = place.producer();
    let trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    let with = |pairs: &[(&str, &str)]| {
        pairs.iter().fold(OwnedHeaders::new(), |all, (key, value)| all.insert(Header { key, value: Some(*value) }))
    };
    let good = query("r1", 1_700_000_000_000);
    let sent = [
        ("{", with(&[("traceparent", trace)])),
        (r#"{"request_id": "r2"}"#, with(&[])),
        (good.as_str(), with(&[("content-type", "application/avro")])),
        (good.as_str(), with(&[("content-type", "application/json; charset=utf-8")])),
    ];
    for (value, headers) in sent {
        let record = BaseRecord::to(place.topic("queries")).key("k").payload(value).partition(1).headers(headers);
        producer.send(record).unwrap();
    }
    // A message without a value, and one from the far future.
    producer.send(BaseRecord::<str, str>::to(place.topic("rewards")).key("none").partition(0)).unwrap();
    let future = reward("r1", 4_000_000_000_000);
    producer.send(BaseRecord::<str, str>::to(place.topic("rewards")).payload(&future).partition(0)).unwrap();
    producer.flush(WAIT).unwrap();
    // Neither reward is usable, which is a failure, after everything else was done.
    let output = place.run(&["learn", "--once", "--json"]);
    let err = String::from_utf8_lossy(&output.stderr);
    assert!(err.contains("none of the 2 rewards are usable"), "{err}");
    let summary: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert_eq!((&summary["queries"], &summary["rewards"], &summary["dead_letters"]), (&json!(4), &json!(2), &json!(5)));
    let header = |message: &OwnedMessage, name: &str| {
        let headers = message.headers().unwrap();
        let found = headers.iter().find(|header| header.key == name);
        found.and_then(|header| header.value).map(|value| String::from_utf8_lossy(value).into_owned())
    };
    let letters = place.messages("dead_letters");
    let mut found: Vec<(String, String, String)> = letters
        .iter()
        .map(|letter| {
            let of = |name: &str| header(letter, name).unwrap();
            (of("reason"), format!("{}/{}", of("source"), of("partition")), of("offset"))
        })
        .collect();
    found.sort();
    let (queries, rewards) = (format!("{}/1", place.topic("queries")), format!("{}/0", place.topic("rewards")));
    let expected = [
        ("content-type", &queries, "2"),
        ("future-time", &rewards, "1"),
        ("missing-field", &queries, "1"),
        ("not-json", &queries, "0"),
        ("not-json", &rewards, "0"),
    ];
    let expected: Vec<(String, String, String)> =
        expected.map(|(reason, log, offset)| (reason.to_owned(), log.clone(), offset.to_owned())).to_vec();
    assert_eq!(found, expected);
    let traced = letters.iter().find(|letter| header(letter, "traceparent").is_some()).unwrap();
    assert_eq!((traced.payload(), header(traced, "traceparent").as_deref()), (Some(&b"{"[..]), Some(trace)));
    assert_eq!(traced.key(), Some(&b"k"[..]));
    assert_eq!(place.learn_once()["dead_letters"], json!(5), "a restart reads nothing again");
}

#[test]
fn offsets_have_gaps_and_aborted_messages_are_not_read() {
    let Some(brokers) = broker::shared() else { return };
    let place = Place::new(brokers, SMALL);
    let mut settings = ClientConfig::new();
    let id = place.topic("queries");
    let producer: BaseProducer =
        settings.set("bootstrap.servers", brokers).set("transactional.id", id).create().unwrap();
    producer.init_transactions(WAIT).unwrap();
    for (n, commit) in [true, false, true, false].into_iter().enumerate() {
        producer.begin_transaction().unwrap();
        for i in 0..10 {
            let (id, ts_ms) = (format!("r{n}-{i}"), 1_700_000_000_000 + 100 * n as i64 + i);
            let (query, reward) = (query(&id, ts_ms), reward(&id, ts_ms + 5));
            producer.send(BaseRecord::<str, str>::to(place.topic("queries")).payload(&query).partition(0)).unwrap();
            producer.send(BaseRecord::<str, str>::to(place.topic("rewards")).payload(&reward).partition(2)).unwrap();
        }
        producer.flush(WAIT).unwrap();
        if commit {
            producer.commit_transaction(WAIT).unwrap()
        } else {
            producer.abort_transaction(WAIT).unwrap()
        };
    }
    let summary = place.learn_once();
    assert_eq!((&summary["queries"], &summary["applied"]), (&json!(20), &json!(20)));
    assert_eq!(place.learn_once()["queries"], json!(20), "the end is behind the last marker");
}

#[test]
fn what_is_wrong_has_a_name() {
    let Some(brokers) = broker::shared() else { return };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let says = |text: String, expected: &[&str]| {
        for part in expected {
            assert!(text.contains(part), "{part:?} is not in: {text}");
        }
    };
    // No topics.
    let place = Place::without_topics(brokers, SMALL);
    says(place.fails(&["learn", "--once"]), &["does not exist", "pointsman topics init"]);
    let csv = place.dir.path().join("topics.csv");
    says(place.fails(&["topics", "check", "--csv", csv.to_str().unwrap()]), &["5 topic settings differ"]);
    let csv = std::fs::read_to_string(csv).unwrap();
    let missing = format!("{},0,", place.topic("rewards"));
    assert!(csv.starts_with("topic,partitions,state\n") && csv.lines().count() == 6, "{csv}");
    assert!(csv.lines().any(|line| line.starts_with(&missing)), "{csv}");
    // Retention has deleted what was not read.
    let place = Place::new(brokers, SMALL);
    pairs(&place, 0, 30);
    assert_eq!(place.learn_once()["applied"], json!(30));
    pairs(&place, 30, 30);
    let mut all = TopicPartitionList::new();
    for partition in 0..3 {
        all.add_partition_offset(place.topic("queries"), partition, Offset::End).unwrap();
    }
    runtime.block_on(place.admin().delete_records(&all, &AdminOptions::new())).unwrap();
    says(place.fails(&["learn", "--once"]), &["offsets lost", place.topic("queries"), "--accept-gap"]);
    let output = place.ok(&["learn", "--once", "--json", "--accept-gap"]);
    let summary: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&summary["queries"], &summary["rewards"]), (&json!(30), &json!(60)));
    let gaps = place.messages("dead_letters");
    assert!(!gaps.is_empty() && gaps.iter().all(|gap| gap.payload().is_none_or(<[u8]>::is_empty)), "gaps are recorded");
    // The topic is deleted and made again, with more messages than there were.
    runtime.block_on(place.admin().delete_topics(&[place.topic("queries")], &AdminOptions::new())).unwrap();
    let start = Instant::now();
    while !place.run(&["topics", "init"]).status.success() {
        assert!(start.elapsed() < Duration::from_secs(30), "the topic was not made again");
    }
    pairs(&place, 100, 90);
    says(place.fails(&["learn", "--once"]), &["topic recreated", place.topic("queries"), "--accept-gap"]);
    let output = place.ok(&["learn", "--once", "--json", "--accept-gap"]);
    let summary: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&summary["queries"], &summary["applied"]), (&json!(120), &json!(120)));
    // Unequal partitions, where a lane is a pair of them.
    let more = "[transport.kafka.create]\npartitions = 2\n";
    let place = Place::new(brokers, SMALL);
    runtime.block_on(place.admin().delete_topics(&[place.topic("rewards")], &AdminOptions::new())).unwrap();
    let text = fs::read_to_string(&place.config).unwrap().replace("[transport.kafka.create]\npartitions = 3\n", more);
    fs::write(&place.config, text).unwrap();
    while !place.run(&["topics", "init"]).status.success() {
        assert!(start.elapsed() < Duration::from_secs(60), "the topic was not made again");
    }
    let partition = ["--set", "transport.kafka.lanes=partition"];
    says(
        place.fails(&["topics", "check", partition[0], partition[1]]),
        &["topic settings differ from what Pointsman requires"],
    );
    says(
        place.fails(&["learn", "--once", partition[0], partition[1]]),
        &["has 3 partitions", "has 2", "lanes = \"one\""],
    );
    // Parameters that do not fit.
    let large = ["--set", "learner.dim=768", "--set", "learner.rank=200"];
    let text = place.fails(&[&["learn", "--once"][..], &large].concat());
    says(text, &["oversized parameters", "max.message.bytes", "lower learner.rank to"]);
    // Nobody there, and no such host.
    let nobody = format!("transport.kafka.brokers=127.0.0.1:{}", free_port());
    says(
        place.fails(&["learn", "--once", "--set", &nobody]),
        &["cannot reach any broker of 127.0.0.1", "transport.kafka.brokers"],
    );
    let text = place.fails(&["topics", "init", "--set", "transport.kafka.brokers=no-such-host.invalid:9092"]);
    says(text, &["cannot reach any broker of no-such-host.invalid:9092", "resolve"]);
    // A setting that the client does not know.
    let text = place.fails(&["topics", "init", "--set", "transport.kafka.client={\"no.such.setting\"=1}"]);
    says(text, &["transport.kafka.client", "no.such.setting"]);
    if !HAS_TLS {
        for (key, value) in [("security.protocol", "SASL_SSL"), ("sasl.mechanism", "SCRAM-SHA-512")] {
            let text =
                place.fails(&["topics", "init", "--set", &format!("transport.kafka.client={{{key:?}={value:?}}}")]);
            says(text, &[&format!("{key} = {value} needs OpenSSL"), "--features kafka-tls"]);
        }
    }
}

/// Whether the program was built with TLS for Kafka, as `tests/run` builds it.
fn has_tls() -> bool {
    let ci = std::env::var("CI").as_deref() == Ok("true");
    assert!(HAS_TLS || !ci, "missing: TLS for Kafka; tests/run builds with --features kafka-tls");
    if !HAS_TLS {
        eprintln!("SKIPPED: TLS for Kafka (built without --features kafka-tls)");
    }
    HAS_TLS
}

#[test]
fn tls_and_passwords() {
    if !has_tls() || !broker::possible() {
        return;
    }
    let tls = tempfile::tempdir().unwrap();
    let kafka = Broker::start(&["--tls", tls.path().to_str().unwrap()]);
    let place = Place::new(kafka.address(), SMALL);
    pairs(&place, 0, 5);
    let password = tls.path().join("password");
    fs::write(&password, "secret\n").unwrap();
    for mechanism in ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] {
        let client = |password: &str| {
            format!(
                "transport.kafka.client={{\"security.protocol\"=\"SASL_SSL\",\"ssl.ca.location\"={ca:?},\
                 \"sasl.mechanism\"=\"{mechanism}\",\"sasl.username\"=\"pointsman\",{password}}}",
                ca = tls.path().join("ca.pem")
            )
        };
        let brokers = format!("transport.kafka.brokers={}", kafka.sasl_address());
        let common = ["--set", &brokers, "--set"];
        let from_file = client(&format!("\"sasl.password.file\"={password:?}"));
        place.ok(&[&["topics", "check"][..], &common, &[&from_file]].concat());
        let good = client("\"sasl.password\"=\"secret\"");
        let output = place.ok(&[&["learn", "--once", "--json"][..], &common, &[&good]].concat());
        let summary: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(summary["applied"], json!(5), "{mechanism}");
        let shown = place.ok(&[&["check-config"][..], &common, &[&good]].concat());
        let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
        assert!(shown.contains("***") && !shown.contains("secret"), "{shown}");
        let start = Instant::now();
        let text = place.fails(
            &[&["learn", "--set", "http.listen="][..], &common, &[&client("\"sasl.password\"=\"wrong\"")]].concat(),
        );
        assert!(text.contains("reject the credentials") && !text.contains("wrong"), "{text}");
        assert!(start.elapsed() < Duration::from_secs(30), "a wrong password is not tried for ever");
    }
}

#[test]
fn waits_for_the_broker_and_refuses_a_second_instance() {
    if !broker::possible() {
        return;
    }
    let mut kafka = Broker::start(&[]);
    let place = Place::new(kafka.address(), SMALL);
    kafka.kill();
    let port = free_port();
    let config = config_at(&place, "learn", port);
    let learn = Process::start(&config, &["learn"]);
    let client = Client::new(port);
    client.await_status("/live", 200);
    client.await_status("/ready", 503);
    std::thread::sleep(Duration::from_secs(3));
    assert_eq!(client.get("/ready").unwrap().0, 503);
    let log = log_of(&config);
    assert!(log.contains("cannot reach any broker") && log.contains("; retrying"), "{log}");
    kafka.restart();
    let start = Instant::now();
    while client.get("/ready").is_none_or(|(status, _)| status != 200) {
        assert!(start.elapsed() < Duration::from_secs(30), "{}", log_of(&config));
        std::thread::sleep(Duration::from_millis(50));
    }
    // Another one, with a store of its own, does not disturb it.
    let other = format!("store.dir={}", place.dir.path().join("other").display());
    let text = place.fails(&["learn", "--set", "http.listen=", "--set", &other]);
    assert!(text.contains("another instance") && text.contains("transport.kafka.group"), "{text}");
    pairs(&place, 0, 20);
    let start = Instant::now();
    let applied = || client.get("/v1/status").map(|(_, status)| status["counts"]["applied"].clone());
    while applied() != Some(json!(20)) {
        assert!(start.elapsed() < Duration::from_secs(30), "{:?}\n{}", client.get("/v1/status"), log_of(&config));
        std::thread::sleep(Duration::from_millis(50));
    }
    let metrics = client.get("/metrics").unwrap().1.as_str().unwrap().to_owned();
    for line in [
        "pointsman_learner_applied_total{space=\"default\"} 20",
        "pointsman_learner_rebalances_total",
        "pointsman_learner_lag{",
    ] {
        assert!(metrics.contains(line), "{line} is not in {metrics}");
    }
    learn.terminate();
    // Lag monitors see how far it came.
    let mut settings = ClientConfig::new();
    let group = place.topic("queries").strip_suffix("-queries").unwrap();
    settings.set("bootstrap.servers", kafka.address()).set("group.id", group);
    let consumer: BaseConsumer = settings.create().unwrap();
    let mut asked = TopicPartitionList::new();
    asked.add_partition_range(place.topic("queries"), 0, 2);
    let committed = consumer.committed_offsets(asked, WAIT).unwrap();
    let sum: i64 = committed.elements().iter().filter_map(|element| element.offset().to_raw()).sum();
    assert_eq!(sum, 20);
}

#[test]
fn a_pair_of_partitions_is_a_lane() {
    let Some(brokers) = broker::shared() else { return };
    let place = Place::new(brokers, SMALL);
    let mut settings = ClientConfig::new();
    settings.set("bootstrap.servers", brokers).set("partitioner", "murmur2_random");
    let producer: BaseProducer = settings.create().unwrap();
    let spaces: Vec<String> = (0..10).map(|n| format!("space-{n}")).collect();
    let in_space = |line: &str, space: &str| {
        let mut event: Value = serde_json::from_str(line).unwrap();
        event["space"] = json!(space);
        event.to_string()
    };
    let send = |from: i64, to: i64| {
        for i in from..to {
            let (id, ts_ms, space) = (format!("r{i}"), 1_700_000_000_000 + 10 * i, &spaces[i as usize % 10]);
            let (query, reward) = (in_space(&query(&id, ts_ms), space), in_space(&reward(&id, ts_ms + 5), space));
            producer.send(BaseRecord::to(place.topic("queries")).key(space).payload(&query)).unwrap();
            producer.send(BaseRecord::to(place.topic("rewards")).key(space).payload(&reward)).unwrap();
        }
        producer.flush(WAIT).unwrap();
    };
    send(0, 100);
    // Somebody's event without the key that it should have.
    let home = place.messages("queries").iter().find(|message| message.key() == Some(b"space-1")).unwrap().partition();
    let stray = in_space(&query("stray", 1_700_000_000_000), "space-1");
    let record = BaseRecord::<str, str>::to(place.topic("queries")).payload(&stray).partition((home + 1) % 3);
    producer.send(record).unwrap();
    producer.flush(WAIT).unwrap();

    let lanes = ["--set", "transport.kafka.lanes=partition"];
    let learn = |more: &[&str]| -> Value {
        let output = place.ok(&[&["learn", "--once", "--json"][..], &lanes, more].concat());
        serde_json::from_slice(&output.stdout).unwrap()
    };
    let summary = learn(&[]);
    assert_eq!((&summary["applied"], &summary["dead_letters"]), (&json!(100), &json!(1)), "{summary}");
    assert!(spaces.iter().all(|space| summary["spaces"][space]["version"] == json!(10)), "{summary}");
    let letters = place.messages("dead_letters");
    let reason = letters[0].headers().unwrap().iter().find(|header| header.key == "reason").unwrap().value;
    assert_eq!((letters.len(), reason), (1, Some(&b"wrong-partition"[..])));
    // It goes on, lane by lane, and comes to what one lane would have come to.
    send(100, 200);
    let summary = learn(&[]);
    assert_eq!((&summary["queries"], &summary["applied"]), (&json!(201), &json!(200)), "{summary}");
    let newest = |place: &Place| -> BTreeMap<String, pointsman::router::Policy> {
        let decode = |message: &OwnedMessage| {
            let params = pointsman::wire::params::decode(message.payload().unwrap()).unwrap();
            (params.space.to_string(), params.policy)
        };
        place.messages("params").iter().map(decode).collect()
    };
    let by_partition = newest(&place);
    let other = format!("store.dir={}", place.dir.path().join("one").display());
    let output = place.ok(&["learn", "--once", "--json", "--set", &other, "--set", "audit.applied_log="]);
    let one: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(one["applied"], json!(200), "the stray query repeats nothing: {one}");
    let together = newest(&place);
    for space in spaces.iter().filter(|space| *space != "space-1") {
        assert_eq!(by_partition[space], together[space], "{space}");
    }
    // Every lane has its own log of what was applied, and its own snapshots.
    let mut applied = Vec::new();
    for partition in 0..3 {
        let text = fs::read_to_string(place.dir.path().join(format!("audit-partition-{partition}.jsonl"))).unwrap();
        applied.extend(text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()["request_id"].clone()));
    }
    applied.sort_by_key(|id| id.as_str().unwrap()[1..].parse::<u32>().unwrap());
    assert_eq!(applied, (0..200).map(|i| json!(format!("r{i}"))).collect::<Vec<_>>());
    assert!(place.fails(&["snapshots", "list"]).contains("--lane"));
    let output = place.ok(&["snapshots", "show", "--json", "--lane", "partition-2"]);
    let shown: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(shown["lane"], json!("partition-2"));
    assert!(place.fails(&["learn", "--once"]).contains("the store holds lane \"partition-0\""));
}

#[test]
fn a_learner_without_a_snapshot_begins_where_it_is_told() {
    let Some(brokers) = broker::shared() else { return };
    let place = Place::new(brokers, SMALL);
    let learn = |store: &str, start: &str| -> Value {
        let store = format!("store.dir={}", place.dir.path().join(store).display());
        let start = format!("transport.kafka.start={start}");
        let arguments = ["learn", "--once", "--json", "--set", &store, "--set", &start, "--set", "audit.applied_log="];
        serde_json::from_slice(&place.ok(&arguments).stdout).unwrap()
    };
    pairs(&place, 0, 10);
    assert_eq!(learn("late", "latest")["queries"], json!(0));
    let now = || std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_millis();
    std::thread::sleep(Duration::from_millis(20));
    let between = now();
    std::thread::sleep(Duration::from_millis(20));
    pairs(&place, 10, 7);
    assert_eq!(
        learn("late", "latest")["applied"],
        json!(7),
        "what came since its first start, with a snapshot at zero"
    );
    assert_eq!(learn("timed", &between.to_string())["applied"], json!(7));
    assert_eq!(learn("all", "earliest")["applied"], json!(17));
}

#[test]
fn what_cannot_be_delivered_is_retried_and_not_lost() {
    if !broker::possible() {
        return;
    }
    let mut kafka = Broker::start(&[]);
    let place = Place::new(kafka.address(), &SMALL.replace("every_ms = 100", "every_ms = 3000"));
    let port = free_port();
    let config = config_at(&place, "learn", port);
    let text =
        fs::read_to_string(&config).unwrap().replace("idle_ms = 100", "idle_ms = 100\ndelivery_timeout_ms = 1500");
    fs::write(&config, text).unwrap();
    let learn = Process::start(&config, &["learn"]);
    let client = Client::new(port);
    client.await_status("/ready", 200);
    pairs(&place, 0, 20);
    let start = Instant::now();
    while client.get("/v1/status").is_none_or(|(_, status)| status["counts"]["applied"] != json!(20)) {
        assert!(start.elapsed() < Duration::from_secs(30), "{}", log_of(&config));
        std::thread::sleep(Duration::from_millis(20));
    }
    // Applied, perhaps not yet published: one of these snapshots meets no broker.
    kafka.kill();
    let start = Instant::now();
    while !log_of(&config).contains("cannot deliver") {
        assert!(start.elapsed() < Duration::from_secs(30), "{}", log_of(&config));
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(log_of(&config).contains("within transport.kafka.delivery_timeout_ms"), "{}", log_of(&config));
    let (code, text) = client.get("/ready").unwrap();
    assert!(code == 503 && text.to_string().contains("publish fails"), "{code} {text}");
    kafka.restart();
    let start = Instant::now();
    while client.get("/ready").unwrap().0 != 200 {
        assert!(start.elapsed() < Duration::from_secs(30), "{}", log_of(&config));
        std::thread::sleep(Duration::from_millis(20));
    }
    learn.terminate();
    assert_eq!(place.applied().len(), 20);
    let newest = place.messages("params").pop().unwrap();
    assert_eq!(pointsman::wire::params::decode(newest.payload().unwrap()).unwrap().version, 20);
}
