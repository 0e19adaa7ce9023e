//! History: topics to files, files to a store, and on in the topics.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use rdkafka::ClientConfig;
use rdkafka::error::RDKafkaErrorCode;
use rdkafka::message::{Header, OwnedHeaders};
use rdkafka::producer::{BaseProducer, BaseRecord, DefaultProducerContext, Producer, ThreadedProducer};
use serde_json::{Value, json};

use crate::broker::shared;
use crate::site::{Site, traffic};
use crate::size::sized;

const MODELS: [&str; 3] = ["a", "b", "c"];
const PARTITIONS: i32 = 3;
const LONG: Duration = Duration::from_secs(30);

/// Topics of a test's own, and a place to run the program in.
struct Topics {
    site: Site,
    name: &'static str,
    brokers: &'static str,
}

/// A message: partition, time of its record, value, content type.
type Sent = (i32, i64, Vec<u8>, Option<&'static str>);

impl Topics {
    /// `None` if there can be no broker.
    fn new(name: &'static str) -> Option<Self> {
        let brokers = shared()?;
        // A broker may outlive the run.
        let id = std::process::id();
        let site = Site::new(&format!(
            r#"
            [learner]
            dim = 4
            models = ["a", "b", "c"]
            [join]
            window_ms = 4000
            early_ms = 1000
            reorder_ms = 86400000
            [snapshot]
            every_updates = 50
            [transport]
            kind = "kafka"
            [transport.kafka]
            brokers = "{brokers}"
            group = "{name}-{id}"
            [transport.kafka.create]
            partitions = {PARTITIONS}
            # The records are of a time long ago.
            retention_ms = -1
            [transport.kafka.topics]
            queries = "{name}-{id}-queries"
            rewards = "{name}-{id}-rewards"
            params = "{name}-{id}-params"
            dead_letters = "{name}-{id}-dead"
            snapshots = "{name}-{id}-snapshots"
            "#
        ));
        let made = site.run(&["topics", "init"]);
        assert_eq!(made.code, Some(0), "{}", made.err);
        Some(Self { site, name, brokers })
    }

    fn topic(&self, side: &str) -> String {
        format!("{}-{}-{side}", self.name, std::process::id())
    }

    fn send(&self, side: &str, messages: &[Sent]) {
        let producer: ThreadedProducer<DefaultProducerContext> = self.client().create().unwrap();
        let topic = self.topic(side);
        for message in messages {
            let mut next = record(&topic, message);
            // Its thread makes room.
            while let Err((error, back)) = producer.send(next) {
                assert_eq!(error.rdkafka_error_code(), Some(RDKafkaErrorCode::QueueFull));
                std::thread::sleep(Duration::from_millis(1));
                next = back;
            }
        }
        producer.flush(LONG).unwrap();
    }

    /// In a transaction, which leaves an offset without a message, and is given up unless `commit`.
    fn send_together(&self, side: &str, messages: &[Sent], commit: bool) {
        let mut client = self.client();
        client.set("transactional.id", format!("{}-{side}", self.name));
        let producer: BaseProducer = client.create().unwrap();
        producer.init_transactions(LONG).unwrap();
        producer.begin_transaction().unwrap();
        let topic = self.topic(side);
        for message in messages {
            producer.send(record(&topic, message)).map_err(|(error, _)| error).unwrap();
        }
        producer.flush(LONG).unwrap();
        let end = if commit { producer.commit_transaction(LONG) } else { producer.abort_transaction(LONG) };
        end.unwrap();
    }

    fn client(&self) -> ClientConfig {
        let mut client = ClientConfig::new();
        client.set("bootstrap.servers", self.brokers).set("linger.ms", "5");
        client
    }

    /// Sends requests: in all partitions, some without their time, some on several lines, some given up.
    fn send_traffic(&self, ids: std::ops::Range<u64>) {
        let (queries, rewards) = traffic(4, &MODELS, ids.clone());
        for (side, events) in [("queries", queries), ("rewards", rewards)] {
            let messages: Vec<Sent> = events.iter().enumerate().map(|(i, event)| message(i, event)).collect();
            let (first, second) = messages.split_at(messages.len() / 2);
            // The brokers' marks of transactions have the time of today: none before what is looked for by time.
            self.send(side, first);
            self.send_together(side, second, true);
            self.send_together(side, &given_up(side, ids.start), false);
        }
    }

    /// Sends requests in an order that has nothing to do with their times. The last partition begins with late ones.
    fn send_disorder(&self, requests: u64) {
        let (queries, rewards) = traffic(4, &MODELS, 0..requests);
        for (side, events) in [("queries", queries), ("rewards", rewards)] {
            let half = events.len() / 2;
            let shuffled = (0..events.len()).map(|i| (i * 7919) % events.len());
            let (early, late): (Vec<usize>, Vec<usize>) = shuffled.partition(|i| *i < half);
            let sent = |i: usize, partition: i32| {
                let ms = events[i]["ts_ms"].as_i64().unwrap();
                (partition, ms, events[i].to_string().into_bytes(), None)
            };
            let last = PARTITIONS - 1;
            let mut messages: Vec<Sent> = late.iter().map(|i| sent(*i, last)).collect();
            messages.extend(early.iter().enumerate().map(|(n, i)| sent(*i, n as i32 % PARTITIONS)));
            self.send(side, &messages);
        }
    }

    fn json(&self, arguments: &[&str]) -> Value {
        self.site.json(arguments)
    }

    fn replay_dump(&self, dump: &str, more: &[&str]) -> Value {
        let (queries, rewards) = (self.files(dump, "queries"), self.files(dump, "rewards"));
        let queries = queries.iter().map(|path| path.to_str().unwrap());
        let rewards = rewards.iter().map(|path| path.to_str().unwrap());
        let mut arguments = vec!["replay", "--json", "--queries"];
        arguments.extend(queries);
        arguments.push("--rewards");
        arguments.extend(rewards);
        arguments.extend(more);
        self.json(&arguments)
    }

    fn files(&self, dump: &str, side: &str) -> Vec<PathBuf> {
        let mut files: Vec<PathBuf> =
            fs::read_dir(self.site.path(dump).join(side)).unwrap().map(|entry| entry.unwrap().path()).collect();
        files.sort();
        files
    }

    fn lines(&self, dump: &str, side: &str) -> Vec<String> {
        let text = |path: &PathBuf| String::from_utf8(zstd::decode_all(&fs::read(path).unwrap()[..]).unwrap()).unwrap();
        self.files(dump, side)
            .iter()
            .flat_map(|path| text(path).lines().map(str::to_owned).collect::<Vec<_>>())
            .collect()
    }
}

fn record<'a>(topic: &'a str, (partition, ms, value, kind): &'a Sent) -> BaseRecord<'a, [u8], [u8]> {
    let record = BaseRecord::to(topic).partition(*partition).timestamp(*ms).payload(&value[..]);
    match kind {
        Some(kind) => record.headers(OwnedHeaders::new().insert(Header { key: "content-type", value: Some(*kind) })),
        None => record,
    }
}

fn message(i: usize, event: &Value) -> Sent {
    let (mut event, ms) = (event.clone(), event["ts_ms"].as_i64().unwrap());
    if i.is_multiple_of(7) {
        event.as_object_mut().unwrap().remove("ts_ms");
    }
    let value = if i.is_multiple_of(11) { format!("{event:#}") } else { event.to_string() };
    (i as i32 % PARTITIONS, ms, value.into_bytes(), i.is_multiple_of(2).then_some("application/json"))
}

/// Events that nobody must ever see, in every partition.
fn given_up(side: &str, id: u64) -> Vec<Sent> {
    let (queries, rewards) = traffic(4, &MODELS, id * 1_000_003 + 1..id * 1_000_003 + 5);
    let events = if side == "queries" { queries } else { rewards };
    let ms = 1_700_000_000_000 + id as i64;
    let sent = |(i, event): (usize, &Value)| {
        let mut event = event.clone();
        event["request_id"] = json!(format!("given-up-{id}-{i}"));
        event["ts_ms"] = json!(ms);
        (i as i32 % PARTITIONS, ms, event.to_string().into_bytes(), None)
    };
    events.iter().enumerate().map(sent).collect()
}

/// Messages that are dead letters, each of which a careless line would make something else of.
fn bad(ms: i64) -> Vec<Sent> {
    let reward = |ts_ms: i64| json!({"request_id": "r1", "ts_ms": ts_ms, "reward": 1, "event_id": "other"}).to_string();
    vec![
        (0, ms, b"{oops".to_vec(), None),
        (0, ms, Vec::new(), None),
        (1, ms, b" \n ".to_vec(), None),
        (1, ms, b"{\"request_id\":\"r\n1\",\"reward\":1}".to_vec(), None),
        (2, ms, reward(ms + 3_600_001).into_bytes(), None),
        (2, ms, reward(ms).into_bytes(), Some("application/avro")),
    ]
}

const COUNTS: [&str; 12] = [
    "queries",
    "rewards",
    "applied",
    "joined",
    "expired",
    "duplicates",
    "late",
    "orphaned",
    "dead_letters",
    "pending",
    "version",
    "state_digest",
];

fn counts(summary: &Value) -> Vec<(&str, &Value)> {
    COUNTS.iter().map(|key| (*key, &summary[*key])).collect()
}

#[test]
fn a_dump_is_learned_and_gone_on_from() {
    let Some(topics) = Topics::new("history-live") else { return };
    topics.send_traffic(0..200);
    topics.send("rewards", &bad(1_700_000_020_000));

    let dumped = topics.json(&["dump", "--out", "d", "--json"]);
    assert_eq!(dumped["messages"], 200 + 160 + 6, "{dumped}");
    assert_eq!(dumped["changed"]["wrapped"], 5, "{dumped}");
    assert!(dumped["changed"]["timed"].as_u64() > Some(40) && dumped["changed"]["joined"].as_u64() > Some(25));
    assert_eq!(dumped["files"].as_array().unwrap().len(), 6);
    let positions: Value = serde_json::from_slice(&fs::read(topics.site.path("d/positions.json")).unwrap()).unwrap();
    for file in dumped["files"].as_array().unwrap() {
        let name = file["file"].as_str().unwrap();
        assert!(file["messages"].as_u64().unwrap() < file["until"].as_u64().unwrap(), "{name} has no gaps");
    }
    assert_eq!(positions.as_object().unwrap().len(), 6);
    for side in ["queries", "rewards"] {
        let lines = topics.lines("d", side);
        assert!(lines.iter().all(|line| serde_json::from_str::<Value>(line).is_ok() || line == "{oops"));
        assert!(!lines.concat().contains("given-up"));
    }
    let again = topics.site.run(&["dump", "--out", "d"]);
    assert!(again.code == Some(2) && again.err.contains("d/positions.json already"), "{}", again.err);

    let audit = "audit.applied_log=applied.jsonl";
    let store = ["--store", "s"];
    let first = topics.replay_dump("d", &["--set", audit, "--keep-open", "--store", "s"]);
    assert_eq!((&first["queries"], &first["rewards"], &first["dead_letters"]), (&json!(200), &json!(166), &json!(6)));
    topics.send_traffic(210..300);
    let learn = ["learn", "--once", "--json", "--set", audit, "--set", "store.dir=s"];
    let lost = topics.site.run(&learn);
    assert!(lost.code == Some(1) && lost.err.contains("snapshots import --start-at FILE"), "{}", lost.err);
    let import = ["snapshots", "import", store[0], store[1], "--start-at", "d/positions.json"];
    let imported = topics.site.run(&import);
    assert!(imported.code == Some(0) && imported.out.contains("set 6 partitions to the positions in"), "{imported:?}");
    let live = topics.json(&learn);

    let fresh = topics.json(&["learn", "--once", "--json", "--set", "audit.applied_log=all.jsonl"]);
    assert_eq!((&fresh["queries"], &fresh["rewards"]), (&json!(290), &json!(160 + 72 + 6)));
    assert_eq!((&fresh["dead_letters"], &fresh["joined"]), (&json!(6), &json!(160 + 72)));
    assert_eq!(counts(&live), counts(&fresh));
    assert_eq!(topics.json(&learn)["state_digest"], live["state_digest"], "there is nothing more");

    let applied = |name: &str| fs::read_to_string(topics.site.path(name)).unwrap();
    let text = applied("applied.jsonl");
    let ids: BTreeSet<String> =
        text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()["request_id"].to_string()).collect();
    assert_eq!((ids.len(), text.lines().count()), (232, 232));
    assert_eq!(text, applied("all.jsonl"));
}

#[test]
fn topics_are_replayed_as_their_dump_is() {
    let Some(topics) = Topics::new("history-replay") else { return };
    topics.send_traffic(0..150);
    topics.send("rewards", &bad(1_700_000_016_000));
    let replay = |more: &[&str]| topics.json(&[&["replay", "--from-kafka", "--json"][..], more].concat());
    let dump = |more: &[&str]| topics.json(&[&["dump", "--json", "--out"][..], more].concat());

    dump(&["all"]);
    let whole = replay(&[]);
    assert_eq!((&whole["queries"], &whole["rewards"], &whole["pending"]), (&json!(150), &json!(126), &json!(0)));
    assert_eq!(topics.replay_dump("all", &[]), whole);

    // Further out of order than the merge can mend: a whole partition that begins late, with an early event in it.
    let Some(disordered) = Topics::new("history-disorder") else { return };
    disordered.send_disorder(400);
    let from_topics = disordered.json(&["replay", "--from-kafka", "--json"]);
    disordered.json(&["dump", "--json", "--out", "all"]);
    assert_eq!(disordered.replay_dump("all", &[]), from_topics);

    // By time: records of the first five seconds, then the others.
    let middle = "2023-11-14T22:13:25Z";
    let early = dump(&["early", "--until", middle]);
    let late = dump(&["late", "--since", middle]);
    assert_eq!(early["messages"].as_u64().unwrap() + late["messages"].as_u64().unwrap(), 276);
    assert_eq!(topics.lines("early", "queries").len(), 50);
    let part = replay(&["--until", "1700000005000"]);
    assert_eq!((&part["queries"], &part), (&json!(50), &topics.replay_dump("early", &[])));
    assert_eq!(replay(&["--since", middle]), topics.replay_dump("late", &[]));
    let end = replay(&["--since", "2030-01-01T00:00:00Z"]);
    assert_eq!((&end["queries"], &end["rewards"]), (&json!(0), &json!(0)));

    // By offset, in every partition; of the topics only one.
    let cut = dump(&["cut", "--since", "offset:10", "--until", "offset:15", "--topics", "queries"]);
    assert_eq!(cut["messages"], 5 * PARTITIONS, "{cut}");
    assert!(!topics.site.path("cut/rewards").exists());
    let cut = replay(&["--since", "offset:10", "--until", "offset:15"]);
    assert_eq!((&cut["queries"], &cut["rewards"]), (&json!(5 * PARTITIONS), &json!(5 * PARTITIONS)));
    let none = dump(&["none", "--since", "offset:9", "--until", "offset:3"]);
    assert_eq!(none["messages"], 0);

    // With a store it goes on where it was left, and `learn` after it.
    let kept = ["--store", "s", "--keep-open"];
    replay(&[&kept[..], &["--until", middle]].concat());
    let refused = topics.site.run(&["replay", "--from-kafka", "--store", "s", "--since", middle]);
    assert!(refused.code == Some(1) && refused.err.contains("omit --since to resume"), "{}", refused.err);
    let resumed = replay(&kept);
    assert_eq!((&resumed["queries"], &resumed["rewards"], &resumed["joined"]), (&json!(150), &json!(126), &json!(120)));
    topics.send_traffic(160..180);
    let live = topics.json(&["learn", "--once", "--json", "--set", "store.dir=s"]);
    let fresh = topics.json(&["learn", "--once", "--json"]);
    assert_eq!((&live["queries"], counts(&live)), (&json!(170), counts(&fresh)));
}

/// More messages than a queue takes, and quicker than statistics come.
#[test]
fn long_partitions_are_read_to_their_end() {
    let Some(topics) = Topics::new("history-long") else { return };
    let ms = 1_700_000_000_000;
    let reward = |i: i64| json!({"request_id": format!("r{i}"), "ts_ms": ms + i, "reward": 1}).to_string().into_bytes();
    let number = sized(150_000, 1_000_000) as i64;
    let messages: Vec<Sent> = (0..number).map(|i| (i32::from(i % 10 == 0), ms + i, reward(i), None)).collect();
    topics.send("rewards", &messages);
    topics.send_together("rewards", &given_up("rewards", 7), false);
    for arguments in [&["replay", "--from-kafka", "--json"][..], &["learn", "--once", "--json"]] {
        let found = topics.json(arguments);
        assert_eq!((&found["rewards"], &found["out_of_order"]), (&json!(number), &json!(0)), "{arguments:?}");
    }
    assert_eq!(topics.json(&["dump", "--out", "d", "--json"])["messages"], number);

    // `learn --once` has published nothing: rewards alone make no space.
    let none = topics.site.run(&["params", "show", "--topic", "--space", "shop"]);
    assert!(none.code == Some(1) && none.err.contains("no parameters of space shop"), "{}", none.err);
}

#[test]
fn mistakes_are_told() {
    let site = Site::new("[transport.kafka]\nbrokers = \"127.0.0.1:1\"");
    fs::create_dir_all(site.path("old/queries")).unwrap();
    fs::write(site.path("bad.json"), r#"{"queries/1.jsonl#00": 5}"#).unwrap();
    for (arguments, code, expected) in [
        (&["dump"][..], 2, "--out"),
        (&["dump", "--out", "x", "--since", "soon"], 2, "2026-01-31T12:00:00Z"),
        (&["dump", "--out", "x", "--topics", "params"], 2, "possible values"),
        (&["dump", "--out", "old"], 2, "old/queries already exists"),
        (&["dump", "--out", "x"], 1, "cannot reach any broker of 127.0.0.1:1"),
        (&["replay", "--from-kafka", "--queries", "x", "--rewards", "y"], 2, "cannot be used with"),
        (&["replay", "--since", "5", "--queries", "x", "--rewards", "y"], 2, "cannot be used with"),
        (&["replay", "--since", "5"], 2, "--queries"),
        (&["replay"], 2, "--queries"),
        (&["params", "show"], 2, "FILE"),
        (&["snapshots", "import"], 2, "--from"),
        (&["snapshots", "import", "--start-at", "bad.json"], 1, "bad.json is not a positions.json"),
        (&["snapshots", "import", "--start-at", "no.json"], 1, "cannot read no.json"),
    ] {
        let run = site.run(arguments);
        assert_eq!(run.code, Some(code), "{arguments:?}: {}", run.err);
        assert!(run.err.contains(expected), "{arguments:?}: {}", run.err);
    }
    assert!(!site.path("x").exists() && !site.path("data").exists());
}
