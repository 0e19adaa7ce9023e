//! A lane store against the plainest model of one: every kept generation in full.

use super::backup::Backup;
use super::generations::{difference, head_of};
use super::repair::{Plan, Source};
use super::*;
use crate::snapshot::LaneHead;
use crate::store::{Memory, Shared, SnapshotStore};
use crate::wire::records::Record;
use proptest::prelude::*;
use proptest::sample::Index as Pick;
use std::collections::{BTreeMap, BTreeSet};

const LANES: [&str; 3] = ["file", "files", "f"];

type Map = BTreeMap<Vec<u8>, Vec<u8>>;

/// Several lanes of one store in memory.
struct Lanes {
    store: Shared<Memory>,
    lanes: BTreeMap<String, LaneStore<Shared<Memory>>>,
    keep: usize,
}

impl Lanes {
    fn open(store: Memory, keep: usize) -> Self {
        Self { store: Shared::new(store), lanes: BTreeMap::new(), keep }
    }

    fn lane(&mut self, lane: &str) -> &mut LaneStore<Shared<Memory>> {
        let (store, keep) = (self.store.clone(), self.keep);
        let new = || LaneStore::new(store, lane, Retention::newest(keep));
        self.lanes.entry(lane.to_owned()).or_insert_with(new)
    }

    fn memory(&self) -> Memory {
        self.store.lock().clone()
    }

    fn commit(&mut self, lane: &str, head: &[u8], changes: &[Change]) -> u64 {
        self.lane(lane).commit(head, changes).unwrap()
    }

    fn generations(&mut self, lane: &str) -> Vec<u64> {
        self.lane(lane).generations().unwrap()
    }

    fn read(&mut self, lane: &str, generation: u64) -> Result<Snapshot, StateError> {
        self.lane(lane).read(generation)
    }

    fn resume(&mut self, lane: &str) -> Resumed {
        self.lane(lane).resume().unwrap()
    }
}

/// What the store should hold of a lane, in the plainest way: every kept generation in full.
#[derive(Debug, Clone, Default)]
struct Plain(Vec<Kept>);

#[derive(Debug, Clone, Default)]
struct Kept {
    generation: u64,
    head: Vec<u8>,
    /// Values, with the generation that wrote them.
    map: BTreeMap<Vec<u8>, (u64, Vec<u8>)>,
    /// Keys that went with this generation.
    gone: Vec<Vec<u8>>,
}

impl Kept {
    fn records(&self) -> Vec<(Vec<u8>, Vec<u8>)> {
        self.map.iter().map(|(key, (_, value))| (key.clone(), value.clone())).collect()
    }

    fn snapshot(&self) -> Snapshot {
        Snapshot { generation: self.generation, head: self.head.clone(), records: self.records() }
    }
}

impl Plain {
    fn commit(&mut self, head: &[u8], changes: &[Change], keep: usize) -> u64 {
        let mut next = self.0.last().cloned().unwrap_or_default();
        next.generation += 1;
        (next.head, next.gone) = (head.to_vec(), Vec::new());
        for (key, value) in changes {
            match value {
                Some(value) => drop(next.map.insert(key.clone(), (next.generation, value.clone()))),
                None => next.gone.extend(next.map.remove(key).map(|_| key.clone())),
            }
        }
        let generation = next.generation;
        self.0.push(next);
        self.0.drain(..self.0.len().saturating_sub(keep));
        generation
    }

    /// Entries of the store that the kept generations need: at least, and at most with what only the next commit drops.
    fn entries(&self) -> (usize, usize) {
        let parts = |bytes: usize| bytes.div_ceil(Memory::default().value_bytes_max());
        let heads: usize = self.0.iter().map(|kept| parts(24 + kept.head.len())).sum();
        let record = |key: &[u8], value: &[u8]| parts(13 + key.len() + value.len());
        let versions: BTreeMap<(u64, &[u8]), usize> = self
            .0
            .iter()
            .flat_map(|kept| &kept.map)
            .map(|(key, (since, value))| ((*since, &key[..]), record(key, value)))
            .collect();
        let gone = |kept: &Kept| kept.gone.iter().map(|key| record(key, &[])).sum::<usize>();
        let least = heads + versions.values().sum::<usize>() + self.0.iter().skip(1).map(gone).sum::<usize>();
        (least, least + if self.0.len() == 1 { gone(&self.0[0]) } else { 0 })
    }
}

#[test]
fn heads_are_distinguished_from_other_entries() {
    let mut lanes = Lanes::open(Memory::default(), 2);
    for head in [&b"first"[..], b"second"] {
        lanes.commit("file", head, &[(b"k".to_vec(), Some(head.to_vec()))]);
    }
    let entries = lanes.memory().entries;
    let heads: Vec<Vec<u8>> = entries.iter().filter_map(|(key, value)| head_of(key, value)).collect();
    assert_eq!(heads, [b"first".to_vec(), b"second".to_vec()], "in the order of generations");
}

#[test]
fn differences_turn_one_state_into_another() {
    let records = |text: &[(&str, &str)]| -> Records {
        text.iter().map(|(key, value)| (key.as_bytes().to_vec(), value.as_bytes().to_vec())).collect()
    };
    let (from, to) = (records(&[("a", "1"), ("b", "2"), ("c", "3")]), records(&[("b", "2"), ("c", "4"), ("d", "5")]));
    let mut lanes = Lanes::open(Memory::default(), 1);
    lanes.commit("file", b"", &difference(&Records::new(), &from));
    let needed = difference(&from, &to);
    assert_eq!(needed.len(), 3);
    let generation = lanes.commit("file", b" ", &needed);
    assert_eq!(lanes.read("file", generation).unwrap().records, to);
}

#[derive(Debug, Clone)]
enum Step {
    Commit { lane: usize, head: usize, changes: Vec<(u8, Option<usize>)> },
    Reopen,
    Resume { lane: usize },
}

fn step() -> impl Strategy<Value = Step> {
    let value = prop_oneof![3 => 0..300_usize, 1 => 0..20_000_usize, 1 => 8150..8200_usize];
    let change = (0..14_u8, prop::option::weighted(0.7, value));
    let commit = (0..LANES.len(), 0..5000_usize, prop::collection::vec(change, 0..6));
    prop_oneof![
        8 => commit.prop_map(|(lane, head, changes)| Step::Commit { lane, head, changes }),
        1 => Just(Step::Reopen),
        1 => (0..LANES.len()).prop_map(|lane| Step::Resume { lane }),
    ]
}

/// Bytes that differ from all others of this length.
fn bytes(length: usize, salt: &mut u64) -> Vec<u8> {
    *salt += 1;
    salt.to_le_bytes().into_iter().cycle().take(length).collect()
}

/// Keys of several lengths, some the beginning of others, one empty.
fn key(number: u8) -> Vec<u8> {
    vec![number % 3; usize::from(number / 3) * 4]
}

fn changes(of: &[(u8, Option<usize>)], salt: &mut u64) -> Vec<Change> {
    let last: BTreeMap<Vec<u8>, Option<usize>> = of.iter().map(|(number, length)| (key(*number), *length)).collect();
    last.into_iter().map(|(key, length)| (key, length.map(|length| bytes(length, salt)))).collect()
}

fn check(lanes: &mut Lanes, plain: &[Plain], keep: usize) {
    let (mut least, mut most) = (0, 0);
    for (lane, plain) in LANES.into_iter().zip(plain) {
        let expected: Vec<u64> = plain.0.iter().map(|kept| kept.generation).collect();
        assert_eq!(lanes.generations(lane), expected);
        assert!(expected.len() <= keep);
        for kept in &plain.0 {
            assert_eq!(lanes.read(lane, kept.generation).unwrap(), kept.snapshot());
        }
        let bounds = plain.entries();
        (least, most) = (least + bounds.0, most + bounds.1);
    }
    let found = lanes.memory().entries.len();
    assert!((least..=most).contains(&found), "{found} entries, expected {least} to {most}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn keeps_what_a_plain_list_of_maps_would_keep(keep in 1..5_usize, steps in prop::collection::vec(step(), 1..40)) {
        let mut lanes = Lanes::open(Memory::default(), keep);
        let mut plain = vec![Plain::default(); LANES.len()];
        let mut salt = 0;
        for step in steps {
            match step {
                Step::Commit { lane, head, changes: of } => {
                    let (head, changes) = (bytes(head, &mut salt), changes(&of, &mut salt));
                    let expected = plain[lane].commit(&head, &changes, keep);
                    assert_eq!(lanes.commit(LANES[lane], &head, &changes), expected);
                }
                Step::Reopen => lanes = Lanes::open(lanes.memory(), keep),
                Step::Resume { lane } => {
                    let resumed = lanes.resume(LANES[lane]);
                    assert!(resumed.damaged.is_empty());
                    assert_eq!(resumed.snapshot, plain[lane].0.last().map(Kept::snapshot));
                }
            }
            check(&mut lanes, &plain, keep);
        }
    }

    #[test]
    fn damage_is_detected_and_survived(
        keep in 1..4_usize,
        commits in prop::collection::vec((0..2_usize, 0..200_usize, prop::collection::vec((0..14_u8, prop::option::weighted(0.8, 0..9000_usize)), 1..8)), 2..12),
        damage in damage(),
        after in prop::collection::vec(prop::collection::vec((0..14_u8, prop::option::weighted(0.6, 0..9000_usize)), 0..6), 1..5),
        repairs in any::<bool>(),
    ) {
        let mut lanes = Lanes::open(Memory::default(), keep);
        let mut plain = vec![Plain::default(); 2];
        let mut salt = 0;
        for (lane, head, of) in commits {
            let (head, changes) = (bytes(head, &mut salt), changes(&of, &mut salt));
            plain[lane].commit(&head, &changes, keep);
            lanes.commit(LANES[lane], &head, &changes);
        }
        let mut store = lanes.memory();
        let before = store.clone();
        damage.inflict(&mut store.entries);
        let touched = |lane: &str| {
            let of_lane = |store: &Memory| {
                let prefix = [&(lane.len() as u16).to_be_bytes()[..], lane.as_bytes()].concat();
                let entries = store.entries.iter().filter(|(key, _)| key[1..].starts_with(&prefix));
                entries.map(|(key, value)| (key.clone(), value.clone())).collect::<Map>()
            };
            of_lane(&store) != of_lane(&before)
        };
        let touched = LANES.map(touched);
        let mut lanes = Lanes::open(store, keep);
        let mut intact = Vec::new();
        for (i, plain) in plain.iter().enumerate() {
            let mut of_lane = Vec::new();
            for kept in &plain.0 {
                match lanes.read(LANES[i], kept.generation) {
                    Ok(snapshot) => {
                        assert_eq!(snapshot, kept.snapshot());
                        of_lane.push(kept.generation);
                    }
                    Err(_) => assert!(touched[i], "only what was touched is damaged"),
                }
            }
            intact.push(of_lane);
        }
        if repairs {
            let plan = Plan::new(&lanes.memory()).unwrap();
            for lane in &plan.lanes {
                let i = LANES.iter().position(|known| *known == lane.lane).unwrap();
                assert_eq!(lane.from, intact[i].last().map_or(Source::Nothing, |g| Source::Generation(*g)));
            }
            lanes = Lanes::open(plan.carry_out(lanes.memory()).unwrap(), keep);
            for (i, intact) in intact.iter().enumerate() {
                if !intact.is_empty() {
                    assert_eq!(lanes.generations(LANES[i]), *intact, "the repair deletes what is damaged, and nothing else");
                }
            }
            let again = Plan::new(&lanes.memory()).unwrap();
            assert!(again.lanes.iter().all(|lane| lane.from == Source::Nothing || lane.damaged.is_empty()));
        }
        for (i, plain) in plain.iter_mut().enumerate() {
            let (lane, intact) = (LANES[i], &intact[i]);
            let listed = lanes.generations(lane);
            let resumed = lanes.resume(lane);
            assert_eq!(resumed.snapshot.as_ref().map(|snapshot| snapshot.generation), intact.last().copied());
            if let Some(last) = intact.last() {
                assert_eq!(resumed.damaged.len(), listed.iter().filter(|generation| **generation > *last).count());
            } else if !listed.is_empty() {
                // A learner refuses to continue from here.
                continue;
            }
            plain.0.retain(|kept| Some(kept.generation) <= intact.last().copied());
            let mut current = plain.0.last().cloned().unwrap_or_default();
            for of in &after {
                let (head, changes) = (bytes(30, &mut salt), changes(of, &mut salt));
                let mut next = Plain(vec![current]);
                let generation = next.commit(&head, &changes, 1);
                current = next.0.remove(0);
                assert_eq!(lanes.commit(lane, &head, &changes), generation);
                assert_eq!(lanes.read(lane, generation).unwrap(), current.snapshot());
                // The earlier ones are as intact as they were.
                let listed = lanes.generations(lane);
                for kept in plain.0.iter().filter(|kept| listed.contains(&kept.generation)) {
                    let read = lanes.read(lane, kept.generation);
                    assert_eq!(read.is_ok(), intact.contains(&kept.generation));
                    assert!(read.is_err() || read.unwrap() == kept.snapshot());
                }
            }
            assert!(lanes.generations(lane).len() <= keep);
        }
    }

    #[test]
    fn arbitrary_content_is_no_snapshot(
        entries in prop::collection::btree_map(strange_key(), prop::collection::vec(any::<u8>(), 0..200), 0..30),
    ) {
        let memory = Memory { entries, ..Memory::default() };
        let known: BTreeSet<String> =
            generations::lanes(&memory).unwrap().into_iter().chain(LANES.map(String::from)).collect();
        let mut lanes = Lanes::open(memory, 2);
        for lane in known {
            for generation in lanes.generations(&lane) {
                assert!(lanes.read(&lane, generation).is_err());
            }
            assert_eq!(lanes.resume(&lane).snapshot, None);
            let head = b"head".to_vec();
            let generation = lanes.commit(&lane, &head, &[(b"k".to_vec(), Some(b"v".to_vec()))]);
            if generation < u64::MAX {
                let records = vec![(b"k".to_vec(), b"v".to_vec())];
                assert_eq!(lanes.read(&lane, generation).unwrap(), Snapshot { generation, head, records });
            }
        }
    }
}

/// Something that happens to a store.
#[derive(Debug, Clone)]
enum Damage {
    Flip(Pick, Pick, u8),
    Cut(Pick, Pick),
    Delete(Pick),
    Swap(Pick, Pick),
}

fn damage() -> impl Strategy<Value = Damage> {
    let pick = any::<Pick>;
    prop_oneof![
        (pick(), pick(), 0..8_u8).prop_map(|(at, byte, bit)| Damage::Flip(at, byte, bit)),
        (pick(), pick()).prop_map(|(at, length)| Damage::Cut(at, length)),
        pick().prop_map(Damage::Delete),
        (pick(), pick()).prop_map(|(a, b)| Damage::Swap(a, b)),
    ]
}

impl Damage {
    fn inflict(self, entries: &mut Map) {
        let keys: Vec<Vec<u8>> = entries.keys().cloned().collect();
        let key = |pick: Pick| keys[pick.index(keys.len())].clone();
        match self {
            Self::Flip(at, byte, bit) => {
                let value = entries.get_mut(&key(at)).unwrap();
                let byte = byte.index(value.len());
                value[byte] ^= 1 << bit;
            }
            Self::Cut(at, length) => {
                let value = entries.get_mut(&key(at)).unwrap();
                value.truncate(length.index(value.len()));
            }
            Self::Delete(at) => drop(entries.remove(&key(at))),
            Self::Swap(a, b) => {
                let (first, second) = (entries[&key(a)].clone(), entries[&key(b)].clone());
                entries.insert(key(a), second);
                entries.insert(key(b), first);
            }
        }
    }
}

/// Keys that are nearly those of an lane store.
fn strange_key() -> impl Strategy<Value = Vec<u8>> {
    let lane = prop_oneof![Just(b"\0\x04file".to_vec()), prop::collection::vec(any::<u8>(), 0..8)];
    let number = prop_oneof![Just(u64::MAX), Just(0), Just(1), Just(2), any::<u64>()];
    let end = prop::collection::vec(any::<u8>(), 0..10);
    (prop_oneof![Just(b'h'), Just(b'r'), any::<u8>()], lane, number, end).prop_map(|(kind, lane, number, end)| {
        let mut key = vec![kind];
        key.extend([lane, number.to_be_bytes().to_vec(), end].concat());
        key
    })
}

/// A lane that learns, to be committed to a store.
fn engine() -> (crate::engine::Engine, crate::config::Settings) {
    let text = "[learner]\ndim = 2\nmodels = [\"a\", \"b\"]\n[join]\nwindow_ms = 7200000\n";
    let settings = toml::from_str::<crate::config::Config>(text).unwrap().check().unwrap();
    (crate::engine::Engine::new(settings.clone()), settings)
}

/// Commits one generation with `requests` new requests; returns the digest of its state.
fn learn(
    lane: &mut LaneStore<Shared<Memory>>,
    engine: &mut crate::engine::Engine,
    settings: &crate::config::Settings,
    created_ms: u64,
    requests: u64,
) -> String {
    use crate::engine::{Input, Side};
    let parser = crate::wire::events::Parser::new(settings);
    for i in 0..requests {
        let (id, ts_ms) = (format!("{created_ms}-{i}"), created_ms + i);
        let query = format!(r#"{{"request_id":"{id}","ts_ms":{ts_ms},"query":[1,{i}],"model":"a","propensity":0.5}}"#);
        let reward = format!(r#"{{"request_id":"{id}","ts_ms":{ts_ms},"reward":0.5}}"#);
        engine.step(Input::parse(&parser, Side::Query, query.into_bytes(), None));
        if i % 2 == 0 {
            engine.step(Input::parse(&parser, Side::Reward, reward.into_bytes(), None));
        }
    }
    let configuration = crate::snapshot::fingerprint(settings);
    let head = LaneHead { engine: engine.head(), configuration, created_ms, ..LaneHead::default() };
    lane.commit(&head.seal(), &engine.take_changes()).unwrap();
    lane.checkpoint_if_due(created_ms).unwrap();
    engine.digest()
}

const HOUR_MS: u64 = 3_600_000;

/// Disk use over a month stays below (keep + keep_hourly + keep_daily + 1) times the largest state, and every kept state is
/// the one that was committed.
#[test]
fn a_month_of_snapshots_is_bounded_and_reachable() {
    let (mut engine, settings) = engine();
    let retention = Retention { keep: 3, hourly: 24, daily: 7 };
    let store = Shared::new(Memory::default());
    let mut lane = LaneStore::new(store.clone(), "file", retention);
    let (mut largest, mut digests) = (0, BTreeMap::new());
    for step in 0..30 * 24 * 4_u64 {
        let digest = learn(&mut lane, &mut engine, &settings, step * HOUR_MS / 4, 6);
        let newest = lane.newest().unwrap().snapshot.unwrap();
        digests.insert(newest.generation, digest);
        let state = Backup::of(&*store.lock()).unwrap().seal().len() as u64;
        largest = largest.max(state);
        let bytes = store.lock().bytes_on_disk().unwrap();
        // A version of a record costs the store at most 64 bytes besides its key and value, a part of it.
        let records = newest.records.len() as u64;
        let bound = (3 + 24 + 7 + 1) * (largest + 64 * (records + 8));
        assert!(bytes <= bound, "{bytes} bytes at step {step}, at most {bound} expected");
    }
    assert_eq!(lane.checkpoints().unwrap().len(), 24 + 7 - 1, "the first of today is both");
    let mut verified = 0;
    lane.verify(|generation, opened| {
        assert_eq!(opened.unwrap().engine.digest(), digests[&generation]);
        verified += 1;
    })
    .unwrap();
    assert_eq!(verified, 3 + 24 + 7 - 1);
    // A rollback reaches back a week, and can be undone.
    let oldest = lane.all_generations().unwrap()[0];
    let newest = *digests.last_key_value().unwrap().0;
    let (rolled_back, epoch) = lane.rollback(oldest).unwrap();
    assert_eq!((rolled_back, epoch), (newest + 1, 1));
    assert_eq!(Opened::new(lane.read(rolled_back).unwrap()).unwrap().engine.digest(), digests[&oldest]);
    let (again, epoch) = lane.rollback(newest).unwrap();
    assert_eq!((again, epoch), (newest + 2, 2));
    assert_eq!(Opened::new(lane.read(again).unwrap()).unwrap().engine.digest(), digests[&newest]);
}

#[test]
fn a_backup_is_the_newest_generation_and_restores_into_an_empty_store() {
    let (mut engine, settings) = engine();
    let store = Shared::new(Memory::default());
    let mut lane = LaneStore::new(store.clone(), "file", Retention::newest(2));
    assert!(matches!(Backup::of(&*store.lock()), Err(StateError::Empty(_))));
    let mut digest = String::new();
    for hour in 0..4 {
        digest = learn(&mut lane, &mut engine, &settings, hour * HOUR_MS, 10);
    }
    let bytes = Backup::of(&*store.lock()).unwrap().seal();
    let backup = Backup::open(&bytes).unwrap();
    assert!(matches!(backup.clone().restore_into(store.clone()), Err(StateError::NotEmpty(_))));
    let other = Shared::new(Memory::default());
    backup.restore_into(other.clone()).unwrap();
    let restored = LaneStore::new(other, "file", Retention::newest(2)).restore(&settings).unwrap().unwrap();
    assert_eq!((restored.engine.digest(), restored.generation, restored.head.epoch), (digest, 5, 1));
    for (at, bit) in (0..bytes.len()).zip((0..8).cycle()) {
        let mut flipped = bytes.clone();
        flipped[at] ^= 1 << bit;
        assert!(Backup::open(&flipped).is_err());
    }
}

/// A write that fails after the batch is durable must not become two generations.
#[test]
fn a_retried_commit_is_one_generation() {
    #[derive(Default)]
    struct Forgetful {
        memory: Memory,
        notes: u64,
    }
    impl SnapshotStore for Forgetful {
        fn place(&self) -> String {
            String::new()
        }
        fn value_bytes_max(&self) -> usize {
            self.memory.value_bytes_max()
        }
        fn scan(&self, prefix: &[u8], each: &mut dyn FnMut(&[u8], &[u8])) -> Result<(), StoreError> {
            self.memory.scan(prefix, each)
        }
        fn apply(&mut self, batch: crate::store::Batch) -> Result<(), StoreError> {
            self.memory.apply(batch)
        }
        fn start_over(&mut self) -> Result<(), StoreError> {
            self.memory.start_over()
        }
        fn note_newest(&mut self, _: &str, _: u64) -> Result<(), StoreError> {
            self.notes += 1;
            let (path, problem) = (String::new(), "no space".to_owned());
            if self.notes % 2 == 1 { Err(StoreError::Write { path, problem }) } else { Ok(()) }
        }
    }
    let mut lane = LaneStore::new(Forgetful::default(), "file", Retention::newest(5));
    for (number, head) in (1..).zip([b"a", b"b", b"b"]) {
        let change = [(vec![number as u8], Some(vec![1]))];
        assert!(lane.commit(head, &change).is_err());
        assert_eq!(lane.commit(head, &change).unwrap(), number);
    }
    assert_eq!(lane.generations().unwrap(), [1, 2, 3]);
    assert_eq!(lane.newest().unwrap().snapshot.unwrap().records.len(), 3);
}
