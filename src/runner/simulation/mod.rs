//! A simulated world to break the runtime in.
//!
//! Instances run the real lanes, slots, claims, commits and transactions on brokers and disks in memory. One seed decides
//! everything: the traffic, who acts when, what fails. See [`world`] for the scheduler.
//!
//! | kind of trouble | |
//! |---|---|
//! | instances | start, stop in order, crash before and after any effect, stall in the middle of anything and return as zombies |
//! | group | moves lanes at each join, gives up on members that stall, crash or just so |
//! | brokers | restart, lose requests, lose answers, receive the end of a transaction late or twice |
//! | disks | refuse writes, tear lines, lose what was not flushed, flip a bit of the newest snapshot |
//! | traffic | out of order, repeated, late, early, orphaned, malformed and far-future events |
//! | topics | grow, where one instance has all partitions |
//! | configuration | another cadence of snapshots after each start; in some histories a bound on how long events are held |
//!
//! After each history everything is read as a newcomer would read it, and compared with an undisturbed run over the same
//! logs. A failing seed prints its story; `POINTSMAN_SIMULATION=shared:17` (or `alone:17`) runs one seed again.

mod broker;
mod disk;
mod group;
mod instance;
mod world;

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};

use broker::{Address, entries, newest_head};
use disk::stored;
use instance::{Coordinator, Instance, Plan, Traffic};
use world::{Without, World};

use super::claim::lane_name;
use crate::config::{Algorithm, Config, Estimator, Settings};
use crate::engine::{Engine, Input, Side};
use crate::event::Name;
use crate::merge::{Merge, MergeState, Next, Read, Source, Sourced};
use crate::snapshot::LaneHead;
use crate::state::{LaneStore, Restored, Retention};
use crate::store::Memory;
use crate::transport::kafka::homes::partition_of;
use crate::transport::kafka::state::Mirror;
use crate::wire::events::Parser;
use crate::wire::params;

/// Turns until a history has to be at its end once nothing fails any more.
const TURNS_MAX: usize = 60_000;

/// How long an event is held at most in one of so many histories: shorter than what the traffic is out of order by.
const HOLD: Duration = Duration::from_millis(10);
const HOLDS_IN: u64 = 4;

/// Result of a history.
struct History {
    violations: Vec<String>,
    faults: BTreeMap<&'static str, u64>,
    story: String,
}

/// Runs the history of a seed. With `is_shared` several instances share the lanes, otherwise one has all partitions.
fn run(seed: u64, is_shared: bool, without: Option<Without>, is_recorded: bool) -> History {
    let mut rng = ChaCha8Rng::seed_from_u64(seed ^ 0x7261_6666_6963);
    let (partitions, number) = (rng.random_range(1..=3), if is_shared { rng.random_range(1..=3) } else { 1 });
    let hold = seed.is_multiple_of(HOLDS_IN).then_some(HOLD);
    let plan = Arc::new(Plan { settings: settings(), topics: Default::default(), partitions, is_shared, hold });
    let world = World::new(seed, without, is_recorded);
    let grows = !is_shared && partitions > 1 && rng.random_range(0..4) == 0;
    world.with(|shared| {
        shared.group.set_lanes(partitions as i32);
        shared.partitions = if grows { 1 } else { partitions };
    });
    let events = traffic(&mut rng, &plan, grows);
    let logs = by_partition(&events);
    let instances: Vec<Arc<Instance>> = (0..number).map(|node| Instance::new(&world, node, &plan)).collect();
    let traffic = Arc::new(Traffic { world: world.clone(), events: Mutex::new(events) });
    world.add(traffic.clone());
    if is_shared {
        world.add(Arc::new(Coordinator(world.clone(), instances.clone())));
    }
    for instance in &instances {
        // Instances act more often than the others.
        (0..4).for_each(|_| world.add(instance.clone()));
    }
    while !world.with(|shared| shared.is_complete) && world.with(|shared| shared.violations.is_empty()) {
        world.turn();
    }
    (0..rng.random_range(0..400)).for_each(|_| world.turn());
    world.quiet();
    let is_done = || {
        let Some(owners) = world.with(|shared| if is_shared { shared.group.settled() } else { Some(vec![(0, 0)]) })
        else {
            return false;
        };
        let owned =
            |node| owners.iter().filter(|(_, owner)| *owner == node).map(|(lane, _)| *lane).collect::<Vec<i32>>();
        instances.iter().all(|instance| instance.lanes_at_end() == Some(owned(instance.node)))
    };
    let (mut turns, mut has_stopped) = (0, false);
    // An idle owner does not notice that it was fenced by one that opened its lane too late: then it takes another start.
    while !has_stopped && world.with(|shared| shared.violations.is_empty()) {
        while (turns % 16 != 0 || !is_done()) && turns < TURNS_MAX && world.with(|shared| shared.violations.is_empty())
        {
            world.turn();
            turns += 1;
        }
        if turns == TURNS_MAX {
            world.violated("a lane has no owner, or does not reach its end".to_owned());
        } else {
            has_stopped = stop(&world, &instances);
            turns += 1;
        }
    }
    if has_stopped {
        check(&world, &plan, &instances, &logs, grows);
    }
    world.end();
    world
        .with(|shared| History {
            violations: std::mem::take(&mut shared.violations),
            faults: std::mem::take(&mut shared.faults),
            story: String::new(),
        })
        .with_story(world.story())
}

impl History {
    fn with_story(self, story: String) -> Self {
        Self { story, ..self }
    }
}

fn settings() -> Settings {
    let mut config = Config::default();
    config.learner.dim = 2;
    config.learner.models = vec!["a".to_owned(), "b".to_owned()];
    config.learner.algorithm = Algorithm::Hpg;
    config.learner.estimator = Some(Estimator::Logged);
    config.learner.rank = Some(2);
    config.join.window_ms = 400;
    config.join.early_ms = 100;
    config.join.reorder_ms = 60;
    config.check().unwrap()
}

/// The events of a history, in the order in which they are sent.
fn traffic(rng: &mut ChaCha8Rng, plan: &Plan, grows: bool) -> VecDeque<(Address, Vec<u8>)> {
    let spaces: Vec<String> = (0..rng.random_range(1..=4)).map(|n| format!("s{n}")).collect();
    let mut timed: Vec<(i64, Address, Vec<u8>)> = Vec::new();
    let begin_ms = 1_700_000_000_000_i64;
    let requests = rng.random_range(20..=90);
    for n in 0..requests {
        let space = &spaces[rng.random_range(0..spaces.len())];
        let home = if plan.is_shared {
            partition_of(&Name::try_from(space.as_str()).unwrap(), plan.partitions)
        } else if grows {
            let now = 1 + n as usize * plan.partitions / requests as usize;
            rng.random_range(0..now.min(plan.partitions) as i32)
        } else {
            rng.random_range(0..plan.partitions as i32)
        };
        let (queries, rewards) = ((plan.topics.queries.clone(), home), (plan.topics.rewards.clone(), home));
        let ts_ms = begin_ms + 20 * n;
        let (x, y): (f64, f64) = (rng.random_range(-1.0..1.0), rng.random_range(-1.0..1.0));
        let model = if rng.random_bool(0.5) { "a" } else { "b" };
        let query = json!({"request_id": format!("r{n}"), "space": space, "ts_ms": ts_ms, "query": [x, y + 2.0],
                           "model": model, "propensities": {"a": 0.5, "b": 0.5}});
        // Sent up to 25 ms after its time: within the reorder window.
        let mut send = |at_ms: i64, address: &Address, event: String, rng: &mut ChaCha8Rng| {
            timed.push((at_ms + rng.random_range(0..25), address.clone(), event.into_bytes()));
        };
        send(ts_ms, &queries, query.to_string(), rng);
        if rng.random_bool(0.1) {
            send(ts_ms, &queries, query.to_string(), rng);
        }
        let delay_ms = match rng.random_range(0..10) {
            0 => -50,
            1 => 600,
            _ => rng.random_range(0..300),
        };
        let reward = json!({"request_id": format!("r{n}"), "space": space, "ts_ms": ts_ms + delay_ms,
                            "reward": f64::from(rng.random_range(0..=4)) / 4.0});
        if rng.random_bool(0.85) {
            send(ts_ms + delay_ms, &rewards, reward.to_string(), rng);
            if rng.random_bool(0.1) {
                send(ts_ms + delay_ms, &rewards, reward.to_string(), rng);
            }
        }
        match rng.random_range(0..30) {
            0 => send(ts_ms, &queries, "{oops".to_owned(), rng),
            1 => send(ts_ms, &rewards, r#"{"request_id":"x"}"#.to_owned(), rng),
            2 => {
                let orphan = json!({"request_id": "nobody", "space": space, "ts_ms": ts_ms, "reward": 1.0});
                send(ts_ms, &rewards, orphan.to_string(), rng);
            }
            3 => {
                let mut far = query.clone();
                (far["ts_ms"], far["request_id"]) = (json!(ts_ms + 1_000_000_000), json!(format!("far{n}")));
                send(ts_ms, &queries, far.to_string(), rng);
            }
            _ => {}
        }
    }
    timed.sort_by_key(|event| event.0);
    timed.into_iter().map(|(_, address, bytes)| (address, bytes)).collect()
}

type Logs = BTreeMap<Address, Vec<Vec<u8>>>;

fn by_partition(events: &VecDeque<(Address, Vec<u8>)>) -> Logs {
    let mut logs = Logs::new();
    for (address, bytes) in events {
        logs.entry(address.clone()).or_default().push(bytes.clone());
    }
    logs
}

/// A complete log.
struct Whole {
    values: std::vec::IntoIter<Vec<u8>>,
    next: u64,
    side: Side,
    parser: Arc<Parser>,
}

impl Source for Whole {
    type Error = std::convert::Infallible;

    fn read(&mut self) -> Result<Read, Self::Error> {
        let Some(value) = self.values.next() else { return Ok(Read::End) };
        let (start, input) = (self.next, Input::parse(&self.parser, self.side, value, None));
        self.next += 1;
        Ok(Read::Event(Sourced { input, start, end: self.next, line: 0, origin: None }))
    }
}

/// An undisturbed run over partitions: the engine at its end, and the requests that it learned from.
fn undisturbed(plan: &Plan, logs: &Logs, partitions: &[i32]) -> (Engine, Vec<String>) {
    let parser = Arc::new(Parser::new(&plan.settings));
    let mut merge = Merge::new(plan.settings.reorder_ms, &MergeState::default());
    for partition in partitions {
        for (side, topic) in [(Side::Query, &plan.topics.queries), (Side::Reward, &plan.topics.rewards)] {
            let values = logs.get(&(topic.clone(), *partition)).cloned().unwrap_or_default().into_iter();
            merge.add(
                format!("{topic}/{partition}"),
                Whole { values, next: 0, side, parser: parser.clone() },
                None,
                None,
            );
        }
    }
    let (mut engine, mut applied) = (Engine::new(plan.settings.clone()), Vec::new());
    while let Ok(Next::Event(event, _)) = merge.next() {
        applied.extend(engine.step(event.input).applied.into_iter().map(|applied| applied.request_id.to_string()));
    }
    applied.sort();
    (engine, applied)
}

/// Stops all instances in order: whether every lane took its last snapshot.
fn stop(world: &World, instances: &[Arc<Instance>]) -> bool {
    let mut is_whole = true;
    for instance in instances {
        match instance.stop() {
            Ok(whole) => is_whole &= whole,
            Err(error) => world.violated(format!("instance {} cannot stop: {error}", instance.node)),
        }
    }
    is_whole && world.with(|shared| shared.violations.is_empty())
}

/// Compares what is committed with an undisturbed run. When a topic grows, the order of events depends on
/// when the new partition is noticed, and with a bound on how long events are held it depends on when they arrive. Then
/// every event must have been read once, but the states may differ.
fn check(world: &World, plan: &Arc<Plan>, instances: &[Arc<Instance>], logs: &Logs, grows: bool) {
    let is_ordered = !grows && plan.hold.is_none();
    if plan.is_shared {
        for instance in instances {
            if let Err(error) = instance.settle() {
                world.violated(format!("instance {} cannot settle: {error}", instance.node));
            }
        }
    }
    let all: Vec<i32> = (0..plan.partitions as i32).collect();
    let lanes: Vec<(i32, Vec<i32>)> =
        if plan.is_shared { all.into_iter().map(|lane| (lane, vec![lane])).collect() } else { vec![(0, all)] };
    let mut dead = 0;
    for (lane, partitions) in lanes {
        let (expected, requests) = undisturbed(plan, logs, &partitions);
        dead += expected.counts().queries_dead + expected.counts().rewards_dead;
        match committed(world, plan, instances, lane) {
            Ok(engine) => {
                let (found, wanted) = (engine.counts(), expected.counts());
                if !found.join.balance() {
                    world.violated(format!("the counts of lane {lane} do not balance: {found:?}"));
                }
                if (found.queries(), found.rewards()) != (wanted.queries(), wanted.rewards()) {
                    world.violated(format!("lane {lane} has read {found:?}, not {wanted:?}"));
                }
                if engine.digest() != expected.digest() && is_ordered {
                    world.violated(format!(
                        "lane {lane} has another state than an undisturbed run: {found:?}, not {wanted:?}"
                    ));
                }
            }
            Err(problem) => world.violated(format!("the state of lane {lane}: {problem}")),
        }
        let lines: Vec<String> = instances.iter().map(|instance| instance.disk.lines(lane)).collect();
        let id = |line: &str| {
            let line = serde_json::from_str::<Value>(line).ok()?;
            Some(line["request_id"].as_str()?.to_owned())
        };
        let parsed: Option<Vec<String>> = lines.iter().flat_map(|lines| lines.lines()).map(id).collect();
        let Some(mut applied) = parsed else {
            world.violated(format!("lane {lane} has a torn line: {lines:?}"));
            continue;
        };
        applied.sort();
        if !is_ordered {
            let number = applied.len();
            applied.dedup();
            if applied.len() < number {
                world.violated(format!("lane {lane} has applied a request twice: {applied:?}"));
            }
        } else if applied != requests {
            world.violated(format!("lane {lane} applied {applied:?}, not {requests:?}"));
        }
    }
    check_topics(world, plan, dead);
}

/// The engine that a newcomer restores.
fn committed(world: &World, plan: &Plan, instances: &[Arc<Instance>], lane: i32) -> Result<Engine, String> {
    if !plan.is_shared {
        let store = instances.first().map(|instance| instance.disk.durable()).unwrap_or_default();
        let mut store = LaneStore::<Memory>::new(store, &stored(lane, false), Retention::newest(3));
        let restored = store.restore(&plan.settings).map_err(|error| error.to_string())?;
        return restored.map(|Restored { engine, .. }| engine).ok_or_else(|| "nothing is durable".to_owned());
    }
    let address = (plan.topics.snapshots.clone(), lane);
    let (entries, head) =
        world.with(|shared| (entries(&shared.cluster, &address), newest_head(&shared.cluster, &address)));
    let head = head.ok_or("nothing is committed")?;
    let head = LaneHead::open(&head.lane).map_err(|error| error.to_string())?;
    let mirror = Mirror::open(&plan.topics.snapshots, lane, entries).map_err(|error| error.to_string())?;
    let resumed = LaneStore::new(mirror, &lane_name(lane), Retention::newest(1)).newest();
    let resumed = resumed.map_err(|error| error.to_string())?;
    if let Some(damaged) = resumed.damaged.first() {
        return Err(damaged.to_string());
    }
    let records = resumed.snapshot.ok_or("nothing is intact")?.records;
    Engine::restore(plan.settings.clone(), head.engine, records).map_err(|error| error.to_string())
}

/// Published versions grow; each of `dead` malformed events has a dead letter, at least one.
fn check_topics(world: &World, plan: &Plan, dead: u64) {
    let params = (plan.topics.params.clone(), 0);
    let values = |address: &Address| -> Vec<Vec<u8>> {
        world.with(|shared| shared.cluster.committed(address).filter_map(|(_, value)| Some(value?.to_vec())).collect())
    };
    let letters = values(&(plan.topics.dead_letters.clone(), 0)).len();
    if (letters as u64) < dead {
        world.violated(format!("{letters} dead letters for {dead} malformed events"));
    }
    let mut newest = BTreeMap::new();
    for value in values(&params) {
        let Ok(params) = params::decode(&value) else {
            world.violated("published parameters cannot be read".to_owned());
            continue;
        };
        let stamp = (params.epoch, params.version, params.revision);
        // Alone, parameters are published again if it is unknown whether they arrived.
        let is_next = |before: &(u64, u64, u64)| stamp > *before || (!plan.is_shared && stamp == *before);
        if let Some(before) = newest.insert(params.space.clone(), stamp).filter(|before| !is_next(before)) {
            world.violated(format!("space {} was published as {stamp:?} after {before:?}", params.space));
        }
    }
}

/// Runs the histories of some seeds; fails with the story of the first that is violated.
fn explore(is_shared: bool, seeds: std::ops::Range<u64>) -> BTreeMap<&'static str, u64> {
    let kind = if is_shared { "shared" } else { "alone" };
    let wanted = std::env::var("POINTSMAN_SIMULATION").ok();
    let only = wanted.as_deref().map(|wanted| {
        let (of, seed) = wanted.split_once(':').expect("POINTSMAN_SIMULATION=shared:SEED or alone:SEED");
        (of == kind).then(|| seed.parse::<u64>().expect("a seed"))
    });
    let seeds = match only {
        None => seeds,
        Some(Some(seed)) => seed..seed + 1,
        Some(None) => 0..0,
    };
    let mut faults = BTreeMap::new();
    for seed in seeds {
        let history = run(seed, is_shared, None, only.is_some());
        if only.is_some() {
            println!("{}", history.story);
        }
        if !history.violations.is_empty() {
            let failed = run(seed, is_shared, None, true);
            panic!(
                "{:#?}\n{}\nrun this history again: POINTSMAN_SIMULATION={kind}:{seed} cargo test --lib simulation -- --nocapture",
                failed.violations, failed.story
            );
        }
        history.faults.into_iter().for_each(|(fault, number)| *faults.entry(fault).or_default() += number);
    }
    faults
}

/// Number of histories of each kind: 1,000 in all, or 100,000.
fn histories() -> u64 {
    if std::env::var("POINTSMAN_TEST_SIZE").is_ok_and(|size| size == "soak") { 50_000 } else { 500 }
}

/// Fails if a kind of fault was never injected.
fn check_faults(faults: &BTreeMap<&'static str, u64>, kinds: &[&str]) {
    if std::env::var_os("POINTSMAN_SIMULATION").is_none() {
        let missing: Vec<_> = kinds.iter().filter(|kind| !faults.contains_key(**kind)).collect();
        assert!(missing.is_empty(), "never injected: {missing:?}");
    }
}

/// Faults of both kinds of histories.
const COMMON: [&str; 7] =
    ["append refused", "brokers restarted", "crash", "read failed", "stall", "torn write", "write refused"];

#[test]
fn lanes_that_move_have_one_history() {
    let faults = explore(true, 0..histories());
    println!("faults injected: {faults:?}");
    check_faults(&faults, &COMMON);
    let of_brokers = ["request lost", "message lost", "initialization lost", "commit lost", "answer to commit lost"];
    check_faults(&faults, &of_brokers);
    check_faults(&faults, &["late commit", "commit sent twice", "session expired"]);
}

#[test]
fn a_lane_of_one_instance_has_one_history() {
    let faults = explore(false, 0..histories());
    println!("faults injected: {faults:?}");
    check_faults(&faults, &COMMON);
    check_faults(&faults, &["bit flipped", "write lost", "answer lost"]);
}

/// Each protection is needed: without it, some history within the first thousand is violated.
#[test]
fn without_a_protection_histories_are_violated() {
    for (without, is_shared) in [
        (Without::Fence, true),
        (Without::Epoch, true),
        (Without::Position, true),
        (Without::Position, false),
        (Without::Flush, false),
    ] {
        let found = (0..1000).find(|seed| !run(*seed, is_shared, Some(without), false).violations.is_empty());
        let Some(seed) = found else { panic!("no history shows that {without:?} is missing") };
        println!("{without:?}: history {seed}: {:?}", run(seed, is_shared, Some(without), false).violations);
    }
}

#[test]
fn a_seed_decides_everything() {
    for seed in 0..20 {
        let [first, second] = [(), ()].map(|()| run(seed, true, None, true));
        assert_eq!(first.story, second.story);
    }
}
