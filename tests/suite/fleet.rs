//! Many instances that share the lanes of a real Kafka broker, while some join, leave, are killed and come back.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use pointsman::config::Config;
use pointsman::engine::{Engine, Input, Side};
use pointsman::event::{Name, Query};
use pointsman::router::Params;
use pointsman::transport::kafka::cluster::Cluster;
use pointsman::transport::kafka::homes::{Keys, partition_of};
use pointsman::transport::kafka::params;
use pointsman::wire::events::Parser;
use rdkafka::ClientConfig;
use rdkafka::admin::{AdminOptions, AlterConfig, NewPartitions, ResourceSpecifier};
use rdkafka::message::Message;
use rdkafka::producer::{BaseProducer, BaseRecord, Producer};
use serde_json::{Value, json};

use crate::broker::{self, Broker};
use crate::kafka::{Place, log_of};
use crate::sidecar::{Client, Process, free_port};
use crate::size::sized;

pub const DIM: usize = 8;

const LANES: &str = "[learner]\ndim = 8\nmodels = [\"a\", \"b\", \"c\"]\n[join]\nreorder_ms = 20\n\
                     [snapshot]\nevery_updates = 100\nevery_ms = 200\n";

/// One instance of the fleet, with a directory of its own.
pub struct Instance {
    pub config: PathBuf,
    dir: PathBuf,
    client: Client,
    process: Option<Process>,
}

impl Instance {
    pub fn new(place: &Place, name: &str, more: &str) -> Self {
        let (dir, port) = (place.dir.path().join(name), free_port());
        fs::create_dir(&dir).unwrap();
        let config = dir.join("learn.toml");
        let text = fs::read_to_string(&place.config).unwrap();
        let text = text.replace(place.dir.path().to_str().unwrap(), dir.to_str().unwrap());
        let text = text.replace("idle_ms = 100\n", &format!("idle_ms = 100\nlanes = \"partition\"\n{more}"));
        let client = "[transport.kafka.client]\n\"session.timeout.ms\" = 3000\n\"heartbeat.interval.ms\" = 500\n";
        fs::write(&config, format!("{text}{client}[http]\nlisten = \"127.0.0.1:{port}\"\n")).unwrap();
        Self { config, dir, client: Client::new(port), process: None }
    }

    pub fn start(&mut self) {
        self.process = Some(Process::start(&self.config, &["learn"]));
    }

    fn signal(&self, name: &str) {
        self.process.as_ref().unwrap().signal(name);
    }

    fn kill(&mut self) {
        self.process.take().unwrap().kill();
    }

    pub fn leave(&mut self) {
        self.process.take().unwrap().terminate();
    }

    /// Whether it has ended by itself.
    pub fn has_ended(&mut self) -> bool {
        self.process.as_mut().is_some_and(Process::has_ended)
    }

    pub fn status(&self) -> Option<Value> {
        self.process.as_ref()?;
        self.client.get("/v1/status").map(|(_, status)| status)
    }

    /// Lanes that it has, if it is ready.
    fn lanes(&self) -> Vec<i64> {
        let Some(status) = self.status().filter(|status| status["ready"] == json!(true)) else { return Vec::new() };
        status["lanes"].as_array().unwrap().iter().filter_map(Value::as_i64).collect()
    }

    /// Number of lanes that are open, by its log.
    fn open_by_log(&self) -> usize {
        let log = log_of(&self.config);
        let count = |said: &str| log.matches(said).count();
        count("lane opened").saturating_sub(count("dropped lane") + count("lane released"))
    }

    /// How long it took to open each lane, in milliseconds.
    fn openings(&self) -> Vec<u64> {
        let opening = |line: &str| {
            let ms = line.split_once("lane opened")?.1.split_once("ms=")?.1;
            ms.split_whitespace().next()?.parse().ok()
        };
        log_of(&self.config).lines().filter_map(opening).collect()
    }

    /// Requests that it has applied, with the lane whose log has them.
    fn applied(&self, lanes: usize) -> Vec<(usize, Value)> {
        let read = |lane: usize| fs::read_to_string(self.dir.join(format!("audit-partition-{lane}.jsonl")));
        let lines = |lane| {
            let text = read(lane).unwrap_or_default();
            text.lines().map(|line| (lane, serde_json::from_str(line).unwrap())).collect::<Vec<_>>()
        };
        (0..lanes).flat_map(lines).collect()
    }
}

/// Topics with so many partitions.
pub fn place(brokers: &str, lanes: usize) -> Place {
    let place = Place::without_topics(brokers, LANES);
    let text = fs::read_to_string(&place.config).unwrap();
    fs::write(&place.config, text.replace("partitions = 3\n", &format!("partitions = {lanes}\n"))).unwrap();
    place.ok(&["topics", "init"]);
    place
}

/// Waits for the lanes of all instances together to be all lanes, each once, and nobody else's: how long that took.
pub fn await_all(instances: &[Instance], lanes: usize) -> Duration {
    let start = Instant::now();
    loop {
        let mut owned: Vec<i64> = instances.iter().flat_map(Instance::lanes).collect();
        owned.sort_unstable();
        if owned.iter().copied().eq(0..lanes as i64) {
            return start.elapsed();
        }
        assert!(start.elapsed() < Duration::from_secs(90), "{owned:?}\n{}", logs(instances));
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Waits until every instance owns a lane, and no lane is owned twice. A status may be old: only together do they tell.
pub fn await_shared(instances: &[Instance], lanes: usize) {
    let start = Instant::now();
    loop {
        let owned: Vec<Vec<i64>> = instances.iter().map(Instance::lanes).collect();
        let mut all = owned.concat();
        all.sort_unstable();
        if all.iter().copied().eq(0..lanes as i64) && !owned.iter().any(Vec::is_empty) {
            return;
        }
        assert!(start.elapsed() < Duration::from_secs(90), "{owned:?}\n{}", logs(instances));
        std::thread::sleep(Duration::from_millis(20));
    }
}

pub fn logs(instances: &[Instance]) -> String {
    let tail = |instance: &Instance| {
        let log = log_of(&instance.config);
        let from = log.len().saturating_sub(4000);
        format!("--- {}\n{}", instance.dir.display(), String::from_utf8_lossy(&log.as_bytes()[from..]))
    };
    instances.iter().map(tail).collect()
}

/// Traffic that goes on until it is stopped.
pub struct Load {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<(u64, BTreeSet<String>)>,
}

impl Load {
    /// Requests of so many spaces, one in ten of them without a reward.
    pub fn start(place: &Place, brokers: &str, spaces: usize, dim: usize) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let (seen, brokers) = (stop.clone(), brokers.to_owned());
        let (queries, rewards) = (place.topic("queries").to_owned(), place.topic("rewards").to_owned());
        let thread = std::thread::spawn(move || {
            let mut settings = ClientConfig::new();
            settings.set("bootstrap.servers", &brokers).set("partitioner", "murmur2_random").set("linger.ms", "5");
            settings.set("enable.idempotence", "true");
            let producer: BaseProducer = settings.create().unwrap();
            let (mut number, mut rewarded) = (0_u64, BTreeSet::new());
            while !seen.load(Ordering::Relaxed) {
                for _ in 0..8 {
                    let (id, space) = (format!("r{number}"), format!("space-{}", number as usize % spaces));
                    let ts_ms = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis();
                    let query: Vec<f64> = (0..dim as u64).map(|i| ((number * (i + 3)) % 17) as f64 - 7.5).collect();
                    let (model, propensities) =
                        (["a", "b", "c"][number as usize % 3], json!({"a": 0.3, "b": 0.3, "c": 0.4}));
                    let event = json!({"request_id": id, "space": space, "ts_ms": ts_ms, "query": query, "model": model,
                        "propensities": propensities});
                    producer.send(BaseRecord::to(&queries).key(&space).payload(&event.to_string())).unwrap();
                    if number % 10 != 9 {
                        let event = json!({"request_id": id, "space": space, "ts_ms": ts_ms + 3, "reward": number % 2});
                        producer.send(BaseRecord::to(&rewards).key(&space).payload(&event.to_string())).unwrap();
                        rewarded.insert(id);
                    }
                    number += 1;
                }
                producer.poll(Duration::from_millis(20));
            }
            producer.flush(Duration::from_secs(30)).unwrap();
            (number, rewarded)
        });
        Self { stop, thread }
    }

    /// Requests, and those of them that have a reward.
    pub fn stop(self) -> (u64, BTreeSet<String>) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap()
    }
}

/// How many requests the instances together have learned from, as far as they say it.
pub fn applied(instances: &[Instance]) -> u64 {
    let of = |instance: &Instance| instance.status().and_then(|status| status["counts"]["applied"].as_u64());
    instances.iter().filter_map(of).sum()
}

/// Waits until the instances together have learned from so many requests.
fn await_applied(instances: &[Instance], is_enough: impl Fn(u64) -> bool) {
    let start = Instant::now();
    while !is_enough(applied(instances)) {
        assert!(start.elapsed() < Duration::from_secs(90), "{}\n{}", applied(instances), logs(instances));
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Waits for something that the instances come to.
fn await_that(instances: &[Instance], is_so: impl Fn(&[Instance]) -> bool) {
    let start = Instant::now();
    while !is_so(instances) {
        assert!(start.elapsed() < Duration::from_secs(90), "{}", logs(instances));
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// What all lanes have come to, by somebody who has only what the topics hold.
fn summary(place: &Place) -> Value {
    let dir = place.dir.path().join("judge");
    let set = |key: &str, value: &str| ["--set".to_owned(), format!("{key}={value}")];
    let more = [
        set("store.dir", dir.to_str().unwrap()),
        set("audit.applied_log", ""),
        set("transport.kafka.lanes", "partition"),
    ];
    let more: Vec<String> = more.concat();
    let arguments: Vec<&str> =
        ["learn", "--once", "--json"].into_iter().chain(more.iter().map(String::as_str)).collect();
    // One that was killed is a member until its session is over.
    let start = Instant::now();
    loop {
        let output = place.run(&arguments);
        if output.status.success() {
            return serde_json::from_slice(&output.stdout).unwrap();
        }
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(said.contains("another instance") && start.elapsed() < Duration::from_secs(30), "{said}");
    }
}

/// Checks that every request was applied once, and that all that was read is accounted for.
pub fn check(place: &Place, instances: &[Instance], lanes: usize, requests: u64, rewarded: &BTreeSet<String>) {
    let mut applied = Vec::new();
    for instance in instances {
        for (lane, line) in instance.applied(lanes) {
            let space = Name::try_from(line["space"].as_str().unwrap()).unwrap();
            assert_eq!(partition_of(&space, lanes), lane as i32, "{line}");
            applied.push(line["request_id"].as_str().unwrap().to_owned());
        }
    }
    let unique: BTreeSet<String> = applied.iter().cloned().collect();
    let twice = || {
        let mut seen = BTreeSet::new();
        applied.iter().filter(|id| !seen.insert(id.as_str())).take(20).cloned().collect::<Vec<_>>()
    };
    let missing: Vec<&String> = rewarded.difference(&unique).take(20).collect();
    assert!(missing.is_empty(), "not in the logs of applied requests: {missing:?}\n{}", logs(instances));
    assert_eq!(applied.len(), rewarded.len(), "each once, but {:?}\n{}", twice(), logs(instances));
    let found = summary(place);
    let of = |key: &str| found[key].as_u64().unwrap();
    assert_eq!((of("queries"), of("rewards"), of("applied")), (requests, rewarded.len() as u64, applied.len() as u64));
    assert_eq!((of("dead_letters"), of("duplicates"), of("late"), of("orphaned")), (0, 0, 0, 0), "{found}");
    assert_eq!(of("queries"), of("joined") + of("pending"), "{found}");
}

/// Checks that parameters never went back, whoever wrote them, and that lanes were written by one after the other.
pub fn check_history(place: &Place) {
    let mut newest = BTreeMap::<String, (u64, u64, u64)>::new();
    for message in place.messages("params") {
        let Params { space, epoch, version, revision, .. } =
            pointsman::wire::params::decode(message.payload().unwrap()).unwrap();
        let before = newest.insert(space.to_string(), (epoch, version, revision));
        assert!(
            before < Some((epoch, version, revision)),
            "{space}: {:?} after {before:?}",
            (epoch, version, revision)
        );
    }
    let mut terms = BTreeMap::<i32, u64>::new();
    for message in place.messages("snapshots") {
        let (Some(key), Some(value)) = (message.key(), message.payload()) else { continue };
        let Some(head) = pointsman::state::generations::head_of(key, value) else { continue };
        let head = pointsman::snapshot::SharedHead::open(&head).unwrap();
        let before = terms.insert(message.partition(), head.term);
        assert!(before <= Some(head.term), "{}: {} after {before:?}", message.partition(), head.term);
    }
}

#[test]
fn every_request_is_applied_once_by_the_whole_fleet() {
    let Some(brokers) = broker::shared() else { return };
    let (lanes, spaces, kills) = (12, 60, sized(10, 100));
    let place = place(brokers, lanes);
    let mut instances: Vec<Instance> = (0..3).map(|n| Instance::new(&place, &format!("i{n}"), "")).collect();
    instances.iter_mut().for_each(Instance::start);
    let load = Load::start(&place, brokers, spaces, DIM);
    await_all(&instances, lanes);
    let mut absences = Vec::new();
    for round in 0..kills {
        let victim = round % 3;
        instances[victim].kill();
        // Most of the time the others take over; now and then it is back before they notice.
        if round % 4 != 3 {
            absences.push(await_all(&instances, lanes).as_secs_f64());
        }
        instances[victim].start();
        if round % 5 == 4 {
            // Another leaves in an orderly way, and comes back.
            await_all(&instances, lanes);
            let leaver = (victim + 1) % 3;
            instances[leaver].leave();
            await_all(&instances, lanes);
            instances[leaver].start();
        }
    }
    let start = Instant::now();
    while instances.iter().any(|instance| instance.lanes().len() != lanes / 3) {
        assert!(start.elapsed() < Duration::from_secs(60), "not shared evenly\n{}", logs(&instances));
        std::thread::sleep(Duration::from_millis(50));
    }
    let (requests, rewarded) = load.stop();
    await_applied(&instances, |applied| applied == rewarded.len() as u64);
    for instance in &instances {
        // Both sides of a lane are read where the lane is.
        let status = instance.status().unwrap();
        let lags: Vec<(String, i64, u64)> = serde_json::from_value(status["lags"].clone()).unwrap();
        let own = instance.lanes();
        assert!(lags.iter().all(|(_, partition, _)| own.contains(partition)), "{own:?} {lags:?}");
    }
    let openings: Vec<f64> = instances.iter().flat_map(Instance::openings).map(|ms| ms as f64).collect();
    instances.iter_mut().for_each(Instance::leave);
    check(&place, &instances, lanes, requests, &rewarded);
    check_history(&place);
    let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len().max(1) as f64;
    println!(
        "{requests} requests, {kills} kills: {} applied, each once; {:.1} s from a kill until all lanes are owned again \
         (session of 3 s), {:.0} ms a lane to open from the topic ({} lanes)",
        rewarded.len(),
        mean(&absences),
        mean(&openings),
        openings.len(),
    );
}

#[test]
fn a_zombie_changes_nothing() {
    let Some(brokers) = broker::shared() else { return };
    let (lanes, spaces) = (4, 20);
    let place = place(brokers, lanes);
    let mut instances: Vec<Instance> = (0..2).map(|n| Instance::new(&place, &format!("i{n}"), "")).collect();
    instances.iter_mut().for_each(Instance::start);
    let load = Load::start(&place, brokers, spaces, DIM);
    for _ in 0..sized(2, 10) {
        await_shared(&instances, lanes);
        let start = Instant::now();
        // Its status may be older than its last loss of lanes.
        while instances[0].open_by_log() == 0 {
            assert!(start.elapsed() < Duration::from_secs(60), "{}", logs(&instances));
            std::thread::sleep(Duration::from_millis(20));
        }
        instances[0].signal("STOP");
        await_all(&instances[1..], lanes);
        let said = log_of(&instances[0].config).matches("dropped lane").count();
        instances[0].signal("CONT");
        while log_of(&instances[0].config).matches("dropped lane").count() == said {
            assert!(start.elapsed() < Duration::from_secs(120), "{}", logs(&instances));
            std::thread::sleep(Duration::from_millis(20));
        }
    }
    await_all(&instances, lanes);
    let (requests, rewarded) = load.stop();
    await_applied(&instances, |applied| applied == rewarded.len() as u64);
    instances.iter_mut().for_each(Instance::leave);
    check(&place, &instances, lanes, requests, &rewarded);
    check_history(&place);
}

#[test]
fn brokers_may_die_too() {
    if !broker::possible() {
        return;
    }
    let mut kafka = Broker::start(&[]);
    let brokers = kafka.address().to_owned();
    let (lanes, spaces) = (4, 20);
    let place = place(&brokers, lanes);
    let mut instances: Vec<Instance> = (0..2).map(|n| Instance::new(&place, &format!("i{n}"), "")).collect();
    instances.iter_mut().for_each(Instance::start);
    let load = Load::start(&place, &brokers, spaces, DIM);
    for round in 0..sized(2, 10) {
        await_all(&instances, lanes);
        let before = applied(&instances);
        await_applied(&instances, |applied| applied > before + 200);
        kafka.kill();
        if round % 2 == 1 {
            // One of the learners dies at the same time.
            instances[0].kill();
            instances[0].start();
        }
        kafka.restart();
    }
    await_all(&instances, lanes);
    let (requests, rewarded) = load.stop();
    await_applied(&instances, |applied| applied == rewarded.len() as u64);
    instances.iter_mut().for_each(Instance::leave);
    check(&place, &instances, lanes, requests, &rewarded);
    check_history(&place);
}

/// A broker that does not answer keeps no learner from stopping, whether it shares its lanes or not.
#[test]
fn a_frozen_broker_keeps_nobody_from_stopping() {
    if !broker::possible() {
        return;
    }
    let kafka = Broker::start(&[]);
    let short = "delivery_timeout_ms = 3000\n";
    let places = [place(kafka.address(), 2), place(kafka.address(), 2)];
    let mut instances = places.each_ref().map(|place| Instance::new(place, "i0", short));
    let text = fs::read_to_string(&instances[1].config).unwrap();
    fs::write(&instances[1].config, text.replace("lanes = \"partition\"", "lanes = \"one\"")).unwrap();
    instances.iter_mut().for_each(Instance::start);
    let start = Instant::now();
    let is_ready = |instance: &Instance| instance.status().is_some_and(|status| status["ready"] == json!(true));
    while !instances.iter().all(is_ready) {
        assert!(start.elapsed() < Duration::from_secs(60), "{}", logs(&instances));
        std::thread::sleep(Duration::from_millis(20));
    }
    kafka.freeze();
    instances.iter().for_each(|instance| instance.signal("TERM"));
    // The last snapshot of the first may or may not have become durable before.
    let codes = instances.each_mut().map(|instance| instance.process.take().unwrap().wait(Duration::from_secs(60)));
    kafka.thaw();
    assert!(codes.iter().all(|code| matches!(code, Some(0 | 1))), "{codes:?}\n{}", logs(&instances));
}

/// Lanes that have to be opened while no broker answers are opened once one does, however long that takes.
#[test]
fn a_lane_that_opens_while_the_broker_is_gone_ends_nothing() {
    if !broker::possible() {
        return;
    }
    let kafka = Broker::start(&[]);
    let (lanes, spaces) = (8, 24);
    let place = place(kafka.address(), lanes);
    let mut instances: Vec<Instance> = (0..2).map(|n| Instance::new(&place, &format!("i{n}"), "")).collect();
    instances.iter_mut().for_each(Instance::start);
    let load = Load::start(&place, kafka.address(), spaces, DIM);
    for round in 0..sized(2, 12) {
        await_shared(&instances, lanes);
        let before = applied(&instances);
        await_applied(&instances, |applied| applied > before + 100);
        let taken_over = |instances: &[Instance]| log_of(&instances[1].config).matches("took over lane").count();
        let before = taken_over(&instances);
        if round % 2 == 1 {
            instances[0].kill();
        } else {
            instances[0].leave();
        }
        // The broker stops before the lanes are assigned, or while they are opened.
        if round % 4 > 0 {
            await_that(&instances, |instances| taken_over(instances) > before);
        }
        kafka.freeze();
        // Longer than a call to the brokers may take, and than the session of a member.
        std::thread::sleep(Duration::from_secs(15));
        let has_ended = instances[1].has_ended();
        kafka.thaw();
        assert!(!has_ended, "{}", logs(&instances));
        await_all(&instances[1..], lanes);
        assert!(!instances[1].has_ended(), "{}", logs(&instances));
        instances[0].start();
    }
    await_shared(&instances, lanes);
    let (requests, rewarded) = load.stop();
    await_applied(&instances, |applied| applied == rewarded.len() as u64);
    instances.iter_mut().for_each(Instance::leave);
    check(&place, &instances, lanes, requests, &rewarded);
    check_history(&place);
}

/// Two processes must not use copies of one store: they would have one name in the group and among the owners of lanes.
#[test]
fn a_copy_of_an_instance_is_refused() {
    let Some(brokers) = broker::shared() else { return };
    let (lanes, spaces) = (4, 20);
    let place = place(brokers, lanes);
    let mut instances: Vec<Instance> = (0..2).map(|n| Instance::new(&place, &format!("i{n}"), "")).collect();
    instances[0].start();
    let load = Load::start(&place, brokers, spaces, DIM);
    await_all(&instances, lanes);
    copy_store(&mut instances);
    await_all(&instances, lanes);
    let said = log_of(&instances[0].config).len();
    check_refused(&mut instances);
    let before = applied(&instances);
    await_applied(&instances, |applied| applied > before + 100);
    await_all(&instances, lanes);
    let since = log_of(&instances[0].config).split_off(said);
    let is_undisturbed = ["lane opened", "lane released", "dropped lane"].iter().all(|x| !since.contains(x));
    assert!(is_undisturbed, "{since}");
    let (requests, rewarded) = load.stop();
    await_applied(&instances, |applied| applied == rewarded.len() as u64);
    instances[0].leave();
    check(&place, &instances, lanes, requests, &rewarded);
    check_history(&place);
}

/// The same with all partitions in one lane.
#[test]
fn a_copy_of_the_only_instance_is_refused() {
    let Some(brokers) = broker::shared() else { return };
    let place = place(brokers, 3);
    let mut instances: Vec<Instance> = (0..2).map(|n| Instance::new(&place, &format!("i{n}"), "")).collect();
    for Instance { config, .. } in &instances {
        let text = fs::read_to_string(config).unwrap();
        fs::write(config, text.replace("lanes = \"partition\"", "lanes = \"one\"")).unwrap();
    }
    instances[0].start();
    let load = Load::start(&place, brokers, 20, DIM);
    await_applied(&instances, |applied| applied > 100);
    copy_store(&mut instances);
    await_applied(&instances, |applied| applied > 200);
    check_refused(&mut instances);
    let before = applied(&instances);
    await_applied(&instances, |applied| applied > before + 100);
    let (_, rewarded) = load.stop();
    await_applied(&instances, |applied| applied == rewarded.len() as u64);
    instances[0].leave();
    let lines = fs::read_to_string(instances[0].dir.join("audit.jsonl")).unwrap();
    let id = |line: &str| serde_json::from_str::<Value>(line).unwrap()["request_id"].as_str().unwrap().to_owned();
    let found: BTreeSet<String> = lines.lines().map(id).collect();
    assert_eq!((lines.lines().count(), &found), (rewarded.len(), &rewarded), "each once");
}

/// Copies the store of the first instance to the second, while neither runs; then the first runs again.
fn copy_store(instances: &mut [Instance]) {
    instances[0].leave();
    let [from, to] = [0, 1].map(|n: usize| instances[n].dir.join("store"));
    assert!(from.join("instance").exists());
    assert!(Command::new("cp").arg("-r").args([from, to]).status().unwrap().success());
    instances[0].start();
}

/// The second instance, a copy of the first, has to end by itself and to say why, while the first goes on.
fn check_refused(instances: &mut [Instance]) {
    let name = fs::read_to_string(instances[0].dir.join("store/instance")).unwrap();
    instances[1].start();
    let code = instances[1].process.take().unwrap().wait(Duration::from_secs(90));
    let said = log_of(&instances[1].config);
    assert_eq!(code, Some(1), "{said}");
    for part in [&*format!("instance {} runs already", name.trim()), "a store.dir of its own", "file `instance`"] {
        assert!(said.contains(part), "{part:?} is not in: {said}");
    }
    assert!(!instances[0].has_ended(), "{}", logs(instances));
}

/// The same configuration with lanes, for commands that run once.
const BY_PARTITION: [&str; 2] = ["--set", "transport.kafka.lanes=partition"];

fn learn_once(place: &Place) -> Value {
    let output = place.ok(&[&["learn", "--once", "--json"][..], &BY_PARTITION].concat());
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Requests with rewards, so many of each space.
fn send(place: &Place, brokers: &str, spaces: usize, from: u64, to: u64) {
    let mut settings = ClientConfig::new();
    let producer: BaseProducer =
        settings.set("bootstrap.servers", brokers).set("partitioner", "murmur2_random").create().unwrap();
    for number in from..to {
        for space in 0..spaces {
            let (id, space) = (format!("r{number}"), format!("space-{space}"));
            let ts_ms = 1_700_000_000_000 + 10 * number;
            let event = json!({"request_id": id, "space": space, "ts_ms": ts_ms, "query": [1, 2, 3, 4, 5, 6, 7, 8],
                "model": "a", "propensities": {"a": 0.5, "b": 0.5}});
            producer.send(BaseRecord::to(place.topic("queries")).key(&space).payload(&event.to_string())).unwrap();
            let event = json!({"request_id": id, "space": space, "ts_ms": ts_ms + 5, "reward": 1});
            producer.send(BaseRecord::to(place.topic("rewards")).key(&space).payload(&event.to_string())).unwrap();
        }
    }
    producer.flush(Duration::from_secs(30)).unwrap();
}

fn grow(place: &Place, to: usize) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let admin = place.admin();
    for topic in ["queries", "rewards", "snapshots"] {
        let more = NewPartitions::new(place.topic(topic), to);
        runtime.block_on(admin.create_partitions(&[more], &AdminOptions::new())).unwrap()[0].as_ref().unwrap();
    }
}

#[test]
fn spaces_follow_their_partitions_when_a_topic_grows() {
    let Some(brokers) = broker::shared() else { return };
    let place = place(brokers, 3);
    let spaces = 12;
    send(&place, brokers, spaces, 0, 10);
    assert_eq!(learn_once(&place)["applied"], json!(120));
    let says = |arguments: &[&str], expected: &[&str]| {
        let text = place.fails(&[arguments, &BY_PARTITION].concat());
        expected.iter().for_each(|part| assert!(text.contains(part), "{part:?} is not in: {text}"));
    };
    says(&["repartition"], &["distributed over the 3 partitions", "nothing to do"]);
    grow(&place, 5);
    // The new partitions are seen within the time that a client keeps what it knows.
    says(&["learn", "--once"], &["has 5 partitions, but its lanes were created for 3", "pointsman repartition"]);
    let output = place.ok(&[&["repartition", "--json"][..], &BY_PARTITION].concat());
    let moved: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&moved["before"], &moved["now"], &moved["spaces"]), (&json!(3), &json!(5), &json!(12)));
    assert!(moved["moved"].as_u64().unwrap() > 0, "{moved}");
    send(&place, brokers, spaces, 10, 20);
    // Another instance, which knows the topics alone; and one with a store of before.
    let judged = summary(&place);
    let again = learn_once(&place);
    for found in [judged, again] {
        assert_eq!(
            (&found["queries"], &found["applied"], &found["dead_letters"]),
            (&json!(240), &json!(240), &json!(0))
        );
        for space in 0..spaces {
            assert_eq!(found["spaces"][format!("space-{space}")]["version"], json!(20), "{found}");
        }
    }
    check_history(&place);
    // What was not read is not forgotten silently.
    send(&place, brokers, spaces, 20, 21);
    grow(&place, 7);
    says(&["repartition"], &["has unread messages from offset", "learn --once", "--accept-gap"]);
    place.ok(&[&["repartition", "--accept-gap"][..], &BY_PARTITION].concat());
    let found = learn_once(&place);
    let of = |key: &str| found[key].as_u64().unwrap();
    assert_eq!(
        (of("queries"), of("rewards"), of("queries") + of("rewards")),
        (252, 252, 2 * of("applied") + of("dead_letters"))
    );
    assert!(of("dead_letters") > 0, "{found}");
}

/// Requests that the lanes of one store have applied, each as space and id.
fn applied_here(place: &Place, lanes: i32) -> Vec<String> {
    let read = |lane: i32| fs::read_to_string(place.dir.path().join(format!("audit-partition-{lane}.jsonl")));
    let text: String = (0..lanes).map(|lane| read(lane).unwrap_or_default()).collect();
    let id = |line: &str| {
        let line: Value = serde_json::from_str(line).unwrap();
        format!("{} {}", line["space"], line["request_id"])
    };
    text.lines().map(id).collect()
}

/// A later epoch in a store is the lane's state for all, from the next time on that it is opened there.
#[test]
fn a_lane_is_rolled_back_for_all() {
    let Some(brokers) = broker::shared() else { return };
    let place = place(brokers, 2);
    let spaces = 6;
    for run in 0..2 {
        send(&place, brokers, spaces, 5 * run, 5 * run + 5);
        assert_eq!(learn_once(&place)["applied"], json!(30 * (run + 1)));
    }
    let lane = ["--lane", "partition-0"];
    let listed: Value =
        serde_json::from_slice(&place.ok(&[&["snapshots", "list", "--json"][..], &lane].concat()).stdout).unwrap();
    // The checkpoint is older than the first event.
    let generations = listed["generations"].as_array().unwrap();
    let oldest = generations.iter().find(|generation| generation["applied"].as_u64() > Some(0)).unwrap();
    assert_eq!(oldest["kept_as"], "generation", "{listed}");
    place.ok(&[&["snapshots", "rollback", "--to", &oldest["generation"].to_string()][..], &lane].concat());
    // What came after it is learned again.
    for found in [learn_once(&place), summary(&place)] {
        assert_eq!((&found["queries"], &found["applied"]), (&json!(60), &json!(60)), "{found}");
    }
    let (all, unique) = (applied_here(&place, 2), applied_here(&place, 2).into_iter().collect::<BTreeSet<_>>());
    assert_eq!((all.len(), unique.len()), (60, 60));
    check_history(&place);
    let epochs: BTreeSet<u64> = place
        .messages("params")
        .iter()
        .map(|message| pointsman::wire::params::decode(message.payload().unwrap()).unwrap().epoch)
        .collect();
    assert_eq!(epochs, [0, 1].into());
}

/// Wherever the process dies, the log of applied requests and the state come to the same.
#[test]
fn a_crash_anywhere_in_a_snapshot_is_of_no_consequence() {
    let Some(brokers) = broker::shared() else { return };
    let place = place(brokers, 2);
    let spaces = 6;
    // The first two are the first snapshots of the lanes, the next are those with the events.
    let few = [
        ("before-publish", 1),
        ("before-publish", 3),
        ("mid-publish", 3),
        ("mid-publish", 4),
        ("after-publish", 3),
        ("before-persist", 4),
        ("after-persist", 3),
    ];
    for sent in 1..=sized(few.len(), 20 * few.len()) as u64 {
        let (name, nth) = few[sent as usize % few.len()];
        send(&place, brokers, spaces, 3 * sent - 3, 3 * sent);
        let mut command = Command::new(env!("CARGO_BIN_EXE_pointsman"));
        command.args(["learn", "--once", "--config"]).arg(&place.config).args(BY_PARTITION);
        let output = command.env("POINTSMAN_FAILPOINT", format!("{name}={nth}")).output().unwrap();
        assert!(!output.status.success(), "{name}={nth}: {}", String::from_utf8_lossy(&output.stderr));
        let expected = 3 * sent * spaces as u64;
        assert_eq!(learn_once(&place)["applied"], json!(expected), "{name}={nth}");
        let (all, unique) = (applied_here(&place, 2), applied_here(&place, 2).into_iter().collect::<BTreeSet<_>>());
        assert_eq!((all.len() as u64, unique.len() as u64), (expected, expected), "{name}={nth}");
    }
    check_history(&place);
}

#[test]
fn what_lanes_need_is_checked() {
    let Some(brokers) = broker::shared() else { return };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let place = place(brokers, 3);
    let says = |expected: &[&str]| {
        let text = place.fails(&[&["learn", "--once"][..], &BY_PARTITION].concat());
        expected.iter().for_each(|part| assert!(text.contains(part), "{part:?} is not in: {text}"));
    };
    let set = |topic: &str, key: &str, value: &str| {
        let topic = place.topic(topic).to_owned();
        let change = AlterConfig::new(ResourceSpecifier::Topic(&topic)).set(key, value);
        runtime.block_on(place.admin().alter_configs(&[change], &AdminOptions::new())).unwrap()[0].as_ref().unwrap();
    };
    set("rewards", "retention.ms", "60000");
    says(&[place.topic("rewards"), "retention.ms", "60000", "join.window_ms"]);
    set("rewards", "retention.ms", "-1");
    set("snapshots", "cleanup.policy", "delete");
    says(&[place.topic("snapshots"), "cleanup.policy", "compact"]);
    set("snapshots", "cleanup.policy", "compact");
    learn_once(&place);
    // With one lane there is nothing to stand by for.
    let output = place.run(&["learn", "--set", "transport.kafka.standby=true"]);
    assert_eq!(output.status.code(), Some(2), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Lanes that are followed are taken over without reading all of their topic.
#[test]
fn a_standby_takes_over() {
    let Some(brokers) = broker::shared() else { return };
    let (lanes, spaces, dim) = (4, 20, sized(DIM, 768));
    let place = place(brokers, lanes);
    let text = fs::read_to_string(&place.config).unwrap().replace("dim = 8\n", &format!("dim = {dim}\n"));
    fs::write(&place.config, text).unwrap();
    let mut instances = vec![Instance::new(&place, "i0", ""), Instance::new(&place, "i1", "standby = true\n")];
    instances[0].start();
    let load = Load::start(&place, brokers, spaces, dim);
    await_all(&instances, lanes);
    let mut absences = Vec::new();
    for _ in 0..sized(2, 20) {
        instances[1].start();
        await_shared(&instances, lanes);
        instances[0].kill();
        absences.push(await_all(&instances, lanes).as_secs_f64());
        instances[0].start();
        await_all(&instances, lanes);
        instances[1].leave();
        await_all(&instances, lanes);
    }
    let (requests, rewarded) = load.stop();
    await_applied(&instances, |applied| applied == rewarded.len() as u64);
    let opened = |instance: &Instance| {
        let openings = instance.openings();
        let (lanes, ms) = (openings.len(), openings.iter().sum::<u64>());
        format!("{:.0} ms a lane ({lanes})", ms as f64 / lanes.max(1) as f64)
    };
    println!("take-over, cold: {}; by a standby: {}", opened(&instances[0]), opened(&instances[1]));
    let mut entries = BTreeMap::new();
    for message in place.messages("snapshots") {
        let key = (message.partition(), message.key().unwrap().to_vec());
        entries.insert(key, message.payload().map_or(0, <[u8]>::len));
    }
    println!("state of a lane: {:.2} MB", entries.values().sum::<usize>() as f64 / lanes as f64 / 1e6);
    println!("from a kill until all lanes are owned again, session of 3 s: {absences:.1?} s");
    assert!(!log_of(&instances[1].config).contains("is incomplete"), "{}", logs(&instances));
    instances[0].leave();
    check(&place, &instances, lanes, requests, &rewarded);
    check_history(&place);
}

/// A space that is spread over several partitions learns what it would have learned in one: its parameters are those
/// of one learner that has seen all its requests.
#[test]
fn shards_of_a_space_add_up() {
    let sums = "mode = \"lazy\"\nbaseline = \"none\"\neta = 0.1\nbeta = 3.0\ntau = 300.0\n";
    for (found, expected) in shards_and_one(sums, sized(300, 5000) as u64) {
        let near = found.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-4 && b.abs() > 1e-3);
        assert!(near, "{found:?} {expected:?}");
    }
}

/// The same for the default learner. Its shards find their leading directions from their own queries, so that the sums are
/// nearly those of one: the same model is best.
#[test]
fn shards_of_the_default_learner_add_up() {
    let scores = shards_and_one("", sized(1500, 6000) as u64);
    let best = |scores: &[f64]| (0..scores.len()).max_by(|&a, &b| scores[a].total_cmp(&scores[b]));
    let queries = scores.len();
    let bests: BTreeSet<Option<usize>> = scores.iter().map(|(_, one)| best(one)).collect();
    assert!(bests.len() > 1, "one model is best on all queries: {scores:?}");
    let same = scores.iter().filter(|(shards, one)| best(shards) == best(one)).count();
    assert!(same * 10 >= queries * 9, "{same} of {queries}: {scores:?}");
}

/// Scores of some queries as learned by six shards in a fleet, and by one learner that sees all requests.
fn shards_and_one(learner: &str, number: u64) -> Vec<(Vec<f64>, Vec<f64>)> {
    let Some(brokers) = broker::shared() else { return Vec::new() };
    let lanes = 4;
    let place = place(brokers, lanes);
    let text = fs::read_to_string(&place.config).unwrap();
    let text = text.replace("[join]\n", &format!("{learner}[spaces.hot]\nshards = 6\n[join]\n"));
    fs::write(&place.config, &text).unwrap();
    let mut instances: Vec<Instance> = ["i0", "i1"].iter().map(|name| Instance::new(&place, name, "")).collect();
    instances.iter_mut().for_each(Instance::start);
    await_shared(&instances, lanes);
    await_all(&instances, lanes);
    let config: Config = toml::from_str(&text).unwrap();
    let settings = config.check().unwrap();
    let (keys, hot) = (Keys::new(&settings), Name::try_from("hot").unwrap());
    let (parser, mut alone) = (Parser::new(&settings), Engine::new(settings.clone()));
    let producer: BaseProducer =
        ClientConfig::new().set("bootstrap.servers", brokers).set("partitioner", "murmur2_random").create().unwrap();
    for i in 0..number {
        let (id, ts_ms) = (format!("r{i}"), 1_731_700_000_000 + i);
        let (query, model) = (vector(i), ["a", "b", "c"][(i * 7 / 3) as usize % 3]);
        // Which model is good depends on the sign of two components' product.
        let is_good = match model {
            "a" => query[0] * query[1] > 0.0,
            "b" => query[0] * query[1] < 0.0,
            _ => false,
        };
        let query = json!({"request_id": id, "space": "hot", "ts_ms": ts_ms, "query": query,
            "model": model, "propensities": {"a": 0.3, "b": 0.3, "c": 0.4}});
        let reward = json!({"request_id": id, "space": "hot", "ts_ms": ts_ms, "reward": u8::from(is_good)});
        let key = keys.key(&hot, &id).into_owned();
        for (topic, side, event) in [("queries", Side::Query, query), ("rewards", Side::Reward, reward)] {
            let line = event.to_string();
            producer.send(BaseRecord::to(place.topic(topic)).key(&key).payload(&line)).unwrap();
            alone.step(Input::parse(&parser, side, line.into_bytes(), None));
        }
        producer.poll(Duration::ZERO);
    }
    producer.flush(Duration::from_secs(30)).unwrap();
    await_applied(&instances, |applied| applied == number);
    let cluster = Cluster::new(&config.transport.kafka).unwrap();
    let start = Instant::now();
    let published = loop {
        let newest = params::newest(&cluster).unwrap();
        if let Some(found) = newest.into_iter().find(|params| params.space == hot && params.version == number) {
            break found;
        }
        assert!(start.elapsed() < Duration::from_secs(60), "{}", logs(&instances));
        std::thread::sleep(Duration::from_millis(50));
    };
    assert!(instances.iter().all(|instance| !instance.applied(lanes).is_empty()), "each has some of its shards");
    let expected = Params { policy: alone.policy(&hot).unwrap(), ..published.clone() };
    instances.iter_mut().for_each(Instance::leave);
    let scores = |i: u64| {
        let query = Query::new(vector(1000 + i)).unwrap();
        let [found, expected] = [&published, &expected].map(|params| params.scores(&query).unwrap());
        (found, expected)
    };
    (0..20).map(scores).collect()
}

/// Some query.
fn vector(i: u64) -> Vec<f64> {
    (0..DIM as u64).map(|j| ((i * (j + 3)) % 17) as f64 - 7.5).collect()
}
