//! Records of a snapshot, except the learner's: constant records against their files, and damage.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs;

use pointsman::config::{Algorithm, Config, FeatureKind, LearnerConfig, Settings};
use pointsman::engine::{Engine, Input, Side, is_of_lane, space_of};
use pointsman::event::{ModelName, Name};
use pointsman::feedback::MoreFeedback;
use pointsman::snapshot::{Audit, LaneHead, Publication, SharedHead, fingerprint};
use pointsman::state::backup::{Backup, LaneBackup};
use pointsman::state::{LaneStore, Retention};
use pointsman::store::Memory;
use pointsman::wire::envelope::{self, Damaged, Kind};
use pointsman::wire::events::Parser;
use pointsman::wire::records::Record;
use pointsman::wire::records::clock::{ClockRecord, LargestRecord};
use pointsman::wire::records::counts::{JoinCountsRecord, QueryCountsRecord, RewardCountsRecord};
use pointsman::wire::records::head::{HeadRecord, MergeRecord, PositionRecord};
use pointsman::wire::records::keys;
use pointsman::wire::records::lane::{BucketRecord, DroppedRecord, LaneRecord};
use pointsman::wire::records::request::{
    DecisionRecord, FinishedRecord, PendingRecord, PropensitiesRecord, QueryRecord, RequestRecord, RewardRecord,
    VERSION,
};
use pointsman::wire::records::space::{
    AggregateRecord, HeldRecord, JoinRecord, JoinSpecRecord, LearnedRecord, OnMissingRecord, ProbationRecord,
    SideRecord, SpaceRecord,
};
use proptest::prelude::*;

use super::{full_lane, full_settings, golden, golden_dir, records_of};

const CHANGED: &str = "the format changed: raise VERSION and keep the old file";

fn model(text: &str) -> ModelName {
    ModelName::try_from(text).unwrap()
}

fn name(text: &str) -> Name {
    Name::try_from(text).unwrap()
}

fn largest(most: u64, values: &[i64]) -> LargestRecord {
    LargestRecord { most, values: values.to_vec() }
}

fn counts() -> JoinCountsRecord {
    JoinCountsRecord {
        queries: QueryCountsRecord {
            read: 728,
            retired: 1,
            duplicate: 2,
            late: 3,
            joined: 400,
            expired: 300,
            evicted: 4,
            pending: 18,
        },
        rewards: RewardCountsRecord {
            read: 70_021,
            used: 70_000,
            duplicate: 1,
            late: 2,
            orphaned: 3,
            evicted: 4,
            pending: 11,
            further: 1,
            clipped: 300,
        },
    }
}

/// A space in which everything is present.
fn space() -> SpaceRecord {
    SpaceRecord {
        models: vec![model("bge"), model("mini.lm")],
        retired: [model("old-1"), model("old-2")].into(),
        join: JoinRecord {
            spec: JoinSpecRecord {
                window_ms: 600_000,
                early_ms: 120_000,
                remember_ms: 720_000,
                on_missing: OnMissingRecord::Default(0.25),
                aggregate: AggregateRecord::Min,
                pending_max: 1_000_000,
                pending_bytes_max: 1 << 32,
                remembered_max: 3_000_000,
            },
            clock: ClockRecord { newest: largest(8, &[-5, 0, 1_731_700_000_000]), time_ms: Some(1_731_600_000_000) },
            counts: counts(),
            remembered: 700,
            horizon_ms: Some(1_731_500_000_000),
        },
        probation: ProbationRecord {
            trusted_ms: Some(1_731_600_000_001),
            recent_queries: largest(64, &[1, 2, 2]),
            recent_rewards: largest(64, &[3]),
            held: vec![
                HeldRecord {
                    ts_ms: 1_731_700_000_000,
                    after_ms: 1_731_600_000_002,
                    is_taken: false,
                    place: "queries/1.jsonl:7".to_owned(),
                    side: SideRecord::Query,
                    bytes: br#"{"request_id":"r"}"#.to_vec(),
                },
                HeldRecord {
                    ts_ms: 1_731_700_000_001,
                    after_ms: i64::MIN,
                    is_taken: true,
                    place: String::new(),
                    side: SideRecord::Reward,
                    bytes: vec![0, 255],
                },
            ],
        },
        learned: Some(LearnedRecord {
            range: (-1.0, 5.0),
            examples: vec![300, 400],
            rewarded: 400,
            clipped: 3,
            failures: vec![0, 2],
            extremes: Some((0.125, 1.0)),
        }),
    }
}

/// A space that has only rewards so far: everything that may be absent is.
fn lobby() -> SpaceRecord {
    let SpaceRecord { join, .. } = space();
    let spec = JoinSpecRecord { on_missing: OnMissingRecord::Drop, aggregate: AggregateRecord::First, ..join.spec };
    let clock = ClockRecord { newest: largest(8, &[]), time_ms: None };
    let recent = || largest(64, &[]);
    SpaceRecord {
        models: Vec::new(),
        retired: [].into(),
        join: JoinRecord { spec, clock, counts: JoinCountsRecord::default(), remembered: 0, horizon_ms: None },
        probation: ProbationRecord {
            trusted_ms: None,
            recent_queries: recent(),
            recent_rewards: recent(),
            held: Vec::new(),
        },
        learned: None,
    }
}

/// A space under each aggregate that the other records lack.
fn aggregates() -> Vec<SpaceRecord> {
    let all = [AggregateRecord::Last, AggregateRecord::Sum, AggregateRecord::Mean, AggregateRecord::Max];
    let under = |aggregate| {
        let mut record = lobby();
        record.join.spec.aggregate = aggregate;
        record
    };
    all.map(under).into()
}

fn requests() -> Vec<(&'static str, RequestRecord)> {
    let rewards = vec![
        RewardRecord { identity: 7, ts_ms: -1, reward: Some(-0.5), more: None, arrival: 3 },
        RewardRecord { identity: u64::MAX, ts_ms: 1_731_700_000_004, reward: Some(1e300), more: None, arrival: 70_000 },
    ];
    let more = MoreFeedback {
        outcomes: [("cost".to_owned(), 0.25)].into(),
        failed: true,
        rewards: [(model("bge"), 0.5), (model("mini.lm"), -1.0)].into(),
        preference: Some((model("bge"), model("mini.lm"))),
    };
    let rich = RewardRecord { identity: 8, ts_ms: 1, reward: None, more: Some(Box::new(more)), arrival: 4 };
    let priced = DecisionRecord {
        vector: Cow::Owned(vec![1.0, 0.0]),
        model: 1,
        propensities: PropensitiesRecord::Full(Cow::Owned(vec![0.0, 1.0, 0.0])),
        policy: None,
        eligible: Some(Cow::Owned(vec![false, true, true])),
        charged: Cow::Owned(vec![("cost".to_owned(), 0.125)]),
        is_keyed: true,
    };
    let priced = QueryRecord { ts_ms: 5, decision: priced };
    let pending = |propensities, policy: Option<&[f64]>, rewards: &[RewardRecord]| {
        let vector = Cow::Owned(vec![0.5, -1.25, 0.0, f32::MAX]);
        let policy = policy.map(|policy| Cow::Owned(policy.to_vec()));
        let (eligible, charged) = (None, Cow::Borrowed(&[][..]));
        let decision = DecisionRecord { vector, model: 300, propensities, policy, eligible, charged, is_keyed: false };
        let query = Some(QueryRecord { ts_ms: 1_731_700_000_000, decision });
        RequestRecord::Pending(PendingRecord { query, rewards: rewards.to_vec() })
    };
    let full = PropensitiesRecord::Full(Cow::Owned(vec![0.25, 0.75]));
    let finished = |settled, used, seen: &[u64]| {
        let (ts_ms, until_ms) = (1_731_700_000_000, 1_731_700_720_000);
        RequestRecord::Finished(FinishedRecord { ts_ms, until_ms, settled, used, seen: seen.to_vec() })
    };
    vec![
        ("full", pending(full, Some(&[0.5, 0.5]), &rewards)),
        ("chosen", pending(PropensitiesRecord::Chosen(0.125), None, &[])),
        ("nothing", pending(PropensitiesRecord::Nothing, None, &rewards[..1])),
        ("early", RequestRecord::Pending(PendingRecord { query: None, rewards })),
        ("finished", finished(false, None, &[7, 1 << 40])),
        ("settled", finished(true, Some(7), &[1 << 40])),
        ("rich", RequestRecord::Pending(PendingRecord { query: Some(priced), rewards: vec![rich] })),
    ]
}

fn lane() -> LaneRecord {
    LaneRecord {
        dropped: DroppedRecord { join: counts(), applied: 700 },
        dead_letters: BucketRecord { taken_bytes: 1 << 20, beyond: 2001, unrecorded: 1999 },
    }
}

fn head() -> HeadRecord {
    let time = ClockRecord { newest: largest(8, &[5, 6, 7, 8, 9, 10, 11, 12]), time_ms: Some(5) };
    let begun =
        PositionRecord { floor: 1000, floor_line: 12, read: 4000, done: vec![(1500, 1600), (2000, 2001)], time };
    let time = ClockRecord { newest: largest(8, &[]), time_ms: None };
    let new = PositionRecord { floor: 0, floor_line: 0, read: 0, done: Vec::new(), time };
    HeadRecord {
        queries_dead: 3,
        rewards_dead: 300,
        merge: MergeRecord {
            positions: [("queries/1".to_owned(), begun), ("rewards/1".to_owned(), new)].into(),
            last_ms: Some(1_731_700_000_000),
            out_of_order: 2,
        },
        epoch: 4,
        publications: [(name("default"), Publication { version: 900, revision: 1 })].into(),
        configuration: "{}".to_owned(),
        audit_bytes: 70_000,
        created_ms: 1_731_700_000_000,
    }
}

/// Everything that may be absent is.
fn empty_head() -> HeadRecord {
    let merge = MergeRecord { positions: BTreeMap::new(), last_ms: None, out_of_order: 0 };
    HeadRecord { merge, publications: BTreeMap::new(), configuration: String::new(), ..head() }
}

fn shared_head() -> SharedHead {
    let audits = [("one".to_owned(), Audit { bytes: 120, term: 3 }), ("other".to_owned(), Audit { bytes: 7, term: 2 })];
    SharedHead { instance: "one".to_owned(), partitions: 12, audits: audits.into(), term: 3, lane: head().seal() }
}

/// With records of the versions of its day: a backup holds them as they were stored.
fn backup() -> Backup {
    let stored = |file: &str| golden(file, &[]);
    let records =
        vec![(keys::lane(), stored("record-lane-1.bin")), (keys::space(&name("shop")), stored("record-space-3.bin"))];
    let partition = LaneBackup { lane: "partition-7".to_owned(), generation: 300, head: empty_head().seal(), records };
    let file = LaneBackup { lane: "file".to_owned(), generation: 17, head: head().seal(), records: Vec::new() };
    Backup { lanes: vec![file, partition] }
}

/// The entries of an ordered map after three generations of constant records: some in parts, some superseded, some deleted.
#[test]
fn the_layout_of_generations_equals_its_file() {
    let mut lane = LaneStore::new(Memory::default(), "file", Retention::newest(2));
    let put = |key: &[u8], value: Vec<u8>| (key.to_vec(), Some(value));
    lane.commit(b"head 1", &[put(b"l", vec![1; 5000]), put(b"sshop", vec![2; 10]), put(b"tshop", vec![3; 3])]).unwrap();
    lane.commit(b"head 2", &[put(b"l", vec![4; 20]), (b"tshop".to_vec(), None)]).unwrap();
    lane.commit(&[7; 5000], &[put(b"tshop", vec![]), put(b"l", vec![5; 9000])]).unwrap();
    let entries = lane.into_store().entries.into_iter().map(|(key, value)| (key, Some(value)));
    let present = super::records_json(entries.collect());
    assert_eq!(golden("generations-1.json", &present), present, "{CHANGED}");
}

#[track_caller]
fn check_record<R: Record + PartialEq + std::fmt::Debug>(name: &str, record: &R) {
    let file = format!("record-{name}-{}.bin", R::VERSION);
    let golden = golden(&file, &record.seal());
    assert_eq!(R::open(&golden).as_ref(), Ok(record), "{file}");
    assert!(record.seal() == golden, "{file}: {CHANGED}");
}

#[test]
fn present_records_equal_their_files() {
    check_record("space", &space());
    check_record("space-lobby", &lobby());
    for (record, name) in aggregates().iter().zip(["last", "sum", "mean", "max"]) {
        check_record(&format!("space-{name}"), record);
    }
    check_record("lane", &lane());
    check_record("head", &head());
    check_record("head-empty", &empty_head());
    check_record("shared-head", &shared_head());
    check_record("backup", &backup());
    for (name, record) in requests() {
        let file = format!("record-request-{name}-{VERSION}.bin");
        let golden = golden(&file, &record.seal());
        assert_eq!(RequestRecord::open(&golden).as_ref(), Ok(&record), "{file}");
        assert!(record.seal() == golden, "{file}: {CHANGED}");
    }
}

/// Versions without further and clipped rewards, without a summary of the examples or of failures, without the reward that was
/// learned, and with rewards that are numbers.
#[test]
fn records_of_older_versions_are_read() {
    let uncounted = |mut counts: JoinCountsRecord| {
        (counts.rewards.further, counts.rewards.clipped) = (0, 0);
        counts
    };
    let others = aggregates().into_iter().zip(["-last", "-sum", "-mean", "-max"]);
    for (mut record, name) in [(space(), ""), (lobby(), "-lobby")].into_iter().chain(others) {
        record.learned.iter_mut().for_each(|learned| learned.failures.fill(0));
        assert_eq!(SpaceRecord::open(&golden(&format!("record-space{name}-4.bin"), &[])), Ok(record.clone()), "{name}");
        (record.join.counts, record.learned) = (uncounted(record.join.counts), None);
        assert_eq!(SpaceRecord::open(&golden(&format!("record-space{name}-3.bin"), &[])), Ok(record), "{name}");
    }
    let mut record = lane();
    record.dropped.join = uncounted(record.dropped.join);
    assert_eq!(LaneRecord::open(&golden("record-lane-1.bin", &[])), Ok(record));
    for (name, mut record) in requests().into_iter().filter(|(name, _)| *name != "rich") {
        let golden = |version: u8| golden(&format!("record-request-{name}-{version}.bin"), &[]);
        assert_eq!(RequestRecord::open(&golden(2)).as_ref(), Ok(&record), "{name}");
        if let (RequestRecord::Finished(finished), "settled") = (&mut record, name) {
            (finished.used, finished.seen) = (None, Vec::new());
        }
        let golden = golden(1);
        assert_eq!(RequestRecord::open(&golden).as_ref(), Ok(&record), "{name}");
        assert_eq!(RequestRecord::open_unversioned(&golden[1..]), Ok(record), "{name}: 0.1 wrote no version byte");
    }
}

#[test]
fn heads_convert_without_loss() {
    for record in [head(), empty_head()] {
        let bytes = record.seal();
        assert_eq!(LaneHead::open(&bytes).unwrap().seal(), bytes);
    }
    let bytes = shared_head().seal();
    assert_eq!(SharedHead::open(&bytes), Ok(shared_head()));
}

/// A head whose payload decodes but contradicts itself.
#[test]
fn a_log_time_that_contradicts_itself_is_rejected() {
    let mut record = head();
    record.merge.positions.values_mut().for_each(|position| position.time.newest.values.reverse());
    assert!(matches!(LaneHead::open(&record.seal()), Err(Damaged::Corrupt(_))));
}

const ALGORITHMS: [Algorithm; 11] = [
    Algorithm::Hpg,
    Algorithm::HpgParameterFree,
    Algorithm::HypentropyRegression,
    Algorithm::Uniform,
    Algorithm::Fixed,
    Algorithm::LinUcb,
    Algorithm::LinThompson,
    Algorithm::QuadraticSgd,
    Algorithm::LogQuadratic,
    Algorithm::LogLinear,
    Algorithm::Exp3,
];

/// A fixed configuration of each algorithm. The default space has what the presets say; `shop` sets more.
fn settings(algorithm: Algorithm) -> Settings {
    let fixed_model = (algorithm == Algorithm::Fixed).then(|| "b".to_owned());
    let features = if algorithm == Algorithm::LinThompson { FeatureKind::Linear } else { FeatureKind::Quadratic };
    let learner = LearnerConfig {
        dim: 8,
        models: ["a", "b", "c"].map(String::from).to_vec(),
        retired: vec!["old".to_owned()],
        algorithm,
        fixed_model,
        features,
        ..LearnerConfig::default()
    };
    let mut config = Config { learner, ..Config::default() };
    let shop = "[spaces.shop]\nexploration_floor = 0.05\nseed = 7\n";
    config.spaces = toml::from_str::<Config>(shop).unwrap().spaces;
    config.check().unwrap()
}

/// The settings in the head of a snapshot are a format too.
#[test]
fn settings_of_every_algorithm() {
    let files: Vec<String> =
        fs::read_dir(golden_dir()).unwrap().map(|file| file.unwrap().file_name().into_string().unwrap()).collect();
    for algorithm in ALGORITHMS {
        let present = fingerprint(&settings(algorithm));
        let kind = serde_json::to_value(algorithm).unwrap();
        let prefix = format!("settings-{}-", kind.as_str().unwrap());
        let number = |file: &String| file.strip_prefix(&prefix)?.strip_suffix(".json")?.parse::<u32>().ok();
        let newest = files.iter().filter_map(number).max().unwrap_or(1);
        let is_new = |golden: Vec<u8>| golden != present.as_bytes() && std::env::var_os("POINTSMAN_BLESS").is_some();
        let found = fs::read(golden_dir().join(format!("{prefix}{newest}.json")));
        let newest = newest + u32::from(found.is_ok_and(is_new));
        for version in 1..=newest {
            let file = format!("{prefix}{version}.json");
            let golden = golden(&file, present.as_bytes());
            let parsed: Settings = serde_json::from_slice(&golden).unwrap_or_else(|error| panic!("{file}: {error}"));
            assert_eq!(Some(parsed.learner.algorithm()), kind.as_str(), "{file}");
            assert!(
                version < newest || golden == present.as_bytes(),
                "{file}: the settings in a snapshot changed: give new fields a serde default and add a new golden"
            );
        }
    }
}

type Changes = Vec<(Vec<u8>, Option<Vec<u8>>)>;
type Store = BTreeMap<Vec<u8>, Vec<u8>>;

fn apply(store: &mut Store, changes: Changes) {
    for (key, value) in changes {
        match value {
            Some(value) => drop(store.insert(key, value)),
            None => drop(store.remove(&key)),
        }
    }
}

fn letters(store: &Store) -> String {
    let mut letters: Vec<char> = store.keys().map(|key| char::from(key[0])).collect();
    letters.dedup();
    letters.into_iter().collect()
}

fn store_of_0_1() -> Store {
    records_of(&golden("records-0.1.json", &[])).into_iter().collect()
}

#[test]
fn the_first_changes_replace_the_keys_of_0_1() {
    let present = full_lane();
    let mut store = store_of_0_1();
    let mut restored = Engine::restore(full_settings(), present.head(), store.clone()).unwrap();
    let digest = restored.digest();
    apply(&mut store, restored.take_changes());
    assert_eq!(letters(&store), "lprst");
    assert_eq!(restored.take_changes(), [], "all of it is saved");
    assert_eq!(restored.digest(), digest);
    let mut fresh = Store::new();
    apply(&mut fresh, full_lane().take_changes());
    // Learners are compared by digest: their record has its own versions. 0.1 kept no summary of the examples.
    let without_summary = |(key, value): (Vec<u8>, Vec<u8>)| match key[0] {
        b's' => (key, SpaceRecord { learned: None, ..SpaceRecord::open(&value).unwrap() }.seal()),
        _ => (key, value),
    };
    let compared = |store: &Store| {
        store.clone().into_iter().filter(|(key, _)| key[0] != b't').map(without_summary).collect::<Store>()
    };
    assert_eq!(compared(&store), compared(&fresh), "a migrated store equals a new one");
    let mut again = Engine::restore(full_settings(), present.head(), store).unwrap();
    assert_eq!((again.digest(), again.take_changes()), (digest, Vec::new()));
}

#[test]
fn a_space_that_is_dropped_before_the_first_changes_leaves_no_old_keys() {
    let mut store = store_of_0_1();
    let mut restored = Engine::restore(full_settings(), full_lane().head(), store.clone()).unwrap();
    for space in ["shop", "blog", "lobby"] {
        assert!(restored.drop_space(&name(space)));
    }
    apply(&mut store, restored.take_changes());
    assert_eq!(letters(&store), "l");
}

#[test]
fn old_and_new_keys_of_one_record_are_inconsistent() {
    let head = || full_lane().head();
    let old = store_of_0_1();
    let mut new = Store::new();
    apply(&mut new, full_lane().take_changes());
    let restore = |store: Store| Engine::restore(full_settings(), head(), store);
    // A request of its own may have either key.
    let (old_key, value) = old.iter().find(|(key, _)| key[0] == b'q').unwrap();
    let new_key: Vec<u8> = [b"p", &old_key[1..]].concat();
    let mut mixed = new.clone();
    mixed.remove(&new_key).unwrap();
    mixed.insert(old_key.clone(), value.clone());
    assert_eq!(restore(mixed).unwrap().digest(), full_lane().digest());
    for (key, value) in old.iter().filter(|(key, _)| b"qgd".contains(&key[0])) {
        let mut mixed = new.clone();
        mixed.insert(key.clone(), value.clone());
        let error = restore(mixed).err().expect("both keys").to_string();
        assert!(error.contains("inconsistent"), "{error}");
    }
}

#[test]
fn every_key_belongs_to_a_space_or_to_the_lane() {
    let mut new = Store::new();
    apply(&mut new, full_lane().take_changes());
    for key in new.keys().chain(store_of_0_1().keys()) {
        assert_eq!(is_of_lane(key), b"lgd".contains(&key[0]), "{key:?}");
        assert_eq!(space_of(key).is_none(), is_of_lane(key), "{key:?}");
    }
}

/// Restores, and if that succeeds does some of everything: it must not panic.
fn restore_and_go_on(store: Store) -> bool {
    let parser = Parser::new(&full_settings());
    let Ok(mut engine) = Engine::restore(full_settings(), full_lane().head(), store) else { return false };
    for i in 0..12_i64 {
        for space in ["shop", "blog", "lobby"] {
            let (id, ts_ms) = (format!("r{}", 30 + i), 4000 + 700 * i);
            let query = format!(
                r#"{{"request_id":"{id}","space":"{space}","ts_ms":{ts_ms},"query":[1,2,3],"model":"a","propensity":0.5}}"#
            );
            let reward = format!(r#"{{"request_id":"{id}","space":"{space}","ts_ms":{ts_ms},"reward":0.5}}"#);
            for (side, text) in [(Side::Query, query), (Side::Reward, reward), (Side::Reward, "{".to_owned())] {
                engine.step(Input::parse(&parser, side, text.into_bytes(), None));
            }
        }
        if i % 5 == 4 {
            engine.take_changes();
        }
    }
    engine.counts();
    engine.digest();
    engine.finish();
    engine.drop_space(&name("shop"));
    engine.counts();
    engine.take_changes();
    true
}

/// Damage behind the checksum: changes the payload and seals it again.
fn reseal(key: &[u8], value: &[u8], damage: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    let kind = match key[0] {
        b'l' => Kind::Lane,
        b's' | b'r' => Kind::Space,
        _ => {
            let mut value = value.to_vec();
            damage(&mut value);
            return value;
        }
    };
    let (version, payload) = envelope::open(kind, u16::MAX, value).unwrap();
    let mut payload = payload.to_vec();
    damage(&mut payload);
    // The layout of an envelope: magic, kind, version, length, payload, checksum.
    let mut sealed = envelope::seal(kind, version, &());
    sealed.truncate(12);
    sealed.extend((payload.len() as u64).to_le_bytes());
    sealed.extend(payload);
    let checksum = xxhash_rust::xxh3::xxh3_64(&sealed);
    sealed.extend(checksum.to_le_bytes());
    sealed
}

fn new_store() -> Store {
    let mut store = Store::new();
    apply(&mut store, full_lane().take_changes());
    store
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn damaged_records_are_rejected_or_harmless(
        of in any::<prop::sample::Index>(),
        flips in prop::collection::vec((any::<prop::sample::Index>(), 0..8_u8), 1..4),
        cut in prop::option::weighted(0.2, any::<prop::sample::Index>()),
        (is_old, is_sealed) in any::<(bool, bool)>(),
    ) {
        let mut store = if is_old { store_of_0_1() } else { new_store() };
        // The learner's record has its own tests.
        let keys: Vec<Vec<u8>> = store.keys().filter(|key| key[0] != b't').cloned().collect();
        let key = &keys[of.index(keys.len())];
        let damage = |bytes: &mut Vec<u8>| {
            for (at, bit) in flips {
                if !bytes.is_empty() {
                    let at = at.index(bytes.len());
                    bytes[at] ^= 1 << bit;
                }
            }
            cut.into_iter().for_each(|cut| bytes.truncate(cut.index(bytes.len() + 1)));
        };
        let mut value = store[key].clone();
        if is_sealed {
            value = reseal(key, &value, damage);
        } else {
            damage(&mut value);
        }
        store.insert(key.clone(), value);
        restore_and_go_on(store);
    }

    /// Of an envelope every flipped bit and every truncation is rejected.
    #[test]
    fn damaged_envelopes_are_rejected(of in 0..4_usize, at in any::<prop::sample::Index>(), bit in 0..8) {
        let sealed = [space().seal(), lane().seal(), head().seal(), shared_head().seal()][of].clone();
        let open = |bytes: &[u8]| match of {
            0 => SpaceRecord::open(bytes).is_ok(),
            1 => LaneRecord::open(bytes).is_ok(),
            2 => LaneHead::open(bytes).is_ok(),
            _ => SharedHead::open(bytes).is_ok(),
        };
        prop_assert!(open(&sealed));
        let at = at.index(sealed.len());
        let mut flipped = sealed.clone();
        flipped[at] ^= 1_u8 << bit;
        prop_assert!(!open(&flipped) && !open(&sealed[..at]));
    }

    #[test]
    fn truncated_requests_are_rejected(of in any::<prop::sample::Index>(), at in any::<prop::sample::Index>()) {
        let all = requests();
        let sealed = all[of.index(all.len())].1.seal();
        prop_assert!(RequestRecord::<DecisionRecord>::open(&sealed[..at.index(sealed.len())]).is_err());
    }

    /// Records that are lost, swapped or renamed.
    #[test]
    fn misplaced_records_are_rejected_or_harmless(
        (one, other) in any::<(prop::sample::Index, prop::sample::Index)>(),
        letter in prop::sample::select(b"lsrtpqgdx".to_vec()),
        kind in 0..3_u8,
    ) {
        let mut store = new_store();
        let keys: Vec<Vec<u8>> = store.keys().cloned().collect();
        let (one, other) = (&keys[one.index(keys.len())], &keys[other.index(keys.len())]);
        let value = store[one].clone();
        match kind {
            0 => drop(store.remove(one)),
            1 => drop(store.insert(other.clone(), value)),
            _ => drop(store.insert([&[letter], &one[1..]].concat(), value)),
        }
        restore_and_go_on(store);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// However often changes are taken, and the lane restored from them: the same digest, and the same store.
    #[test]
    fn restored_changes_give_the_same_lane(
        events in prop::collection::vec((0..4_usize, 0..12_u8, 0..7_u8, 0..400_i64), 1..150),
        saves in prop::collection::vec(prop::option::weighted(0.15, any::<bool>()), 150),
    ) {
        let parser = Parser::new(&full_settings());
        let (mut plain, mut saved) = (Engine::new(full_settings()), Engine::new(full_settings()));
        let (mut store, mut now_ms) = (Store::new(), 0);
        for ((space, id, kind, later), save) in events.into_iter().zip(saves) {
            now_ms += later;
            let space = ["default", "shop", "blog", "lobby"][space];
            let (at, known) = match kind {
                0 => (now_ms, r#","propensities":{"a":0.25,"b":0.75},"policy":{"a":0.5,"b":0.5}"#),
                1 => (now_ms, r#","propensity":0.5"#),
                2 => (now_ms - 900, ""),
                _ => (now_ms, ""),
            };
            let (side, text) = match kind {
                0..3 if space != "lobby" => (
                    Side::Query,
                    format!(r#"{{"request_id":"r{id}","space":"{space}","ts_ms":{at},"query":[1,{id},3],"model":"a"{known}}}"#),
                ),
                3 if id == 0 => (Side::Reward, "{".to_owned()),
                _ => (Side::Reward, format!(r#"{{"request_id":"r{id}","space":"{space}","ts_ms":{at},"reward":0.{id}}}"#)),
            };
            let input = Input::parse(&parser, side, text.into_bytes(), None);
            prop_assert_eq!(plain.step(input.clone()), saved.step(input));
            if let Some(restart) = save {
                apply(&mut store, saved.take_changes());
                if restart {
                    saved = Engine::restore(full_settings(), saved.head(), store.clone()).unwrap();
                    prop_assert_eq!(saved.take_changes(), Vec::new());
                }
                prop_assert_eq!(saved.digest(), plain.digest());
            }
        }
        prop_assert_eq!(saved.digest(), plain.digest());
        apply(&mut store, saved.take_changes());
        let mut at_once = Store::new();
        apply(&mut at_once, plain.take_changes());
        prop_assert_eq!(store, at_once);
    }
}
