//! Stores on a real disk: they last, they are owned by one, they survive damage or say that they do not.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use pointsman::config::StoreConfig;
use pointsman::config::{Config, StoreKind};
use pointsman::engine::{Engine, Input, Side};
use pointsman::runner;
use pointsman::snapshot::LaneHead;
use pointsman::state::generations;
use pointsman::state::{Change, LaneStore, LocalLane, Retention, StateError};
use pointsman::store::{self, Access, Batch, ONE_LANE, SnapshotStore, StoreError};
use pointsman::wire::events::Parser;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::site::{Run, Site, copy, traffic};
use crate::size::sized;

const KINDS: [StoreKind; 2] = [StoreKind::Redb, StoreKind::Sled];

const CONFIG: &str = r#"
    [learner]
    dim = 24
    models = ["a", "b", "c"]
    [snapshot]
    every_updates = 70
    every_ms = 3600000
    keep_hourly = 0
    keep_daily = 0
"#;

/// A site whose learner has come through some logs, with the digest it came to.
fn learned(kind: StoreKind) -> (Site, String) {
    let site = Site::new(&format!("{CONFIG}[store]\nkind = \"{kind}\"\n"));
    site.log("1", &traffic(24, &["a", "b", "c"], 0..600));
    let digest = site.learn()["state_digest"].as_str().unwrap().to_owned();
    (site, digest)
}

#[test]
fn what_is_committed_is_there_after_reopening() {
    for kind in KINDS {
        let directory = tempfile::tempdir().unwrap();
        let dir = directory.path().join("deep/store");
        let big = |n: u8| vec![n; 100_000 + usize::from(n)];
        let open = || LaneStore::new(store::open(&dir, Access::Create(kind)).unwrap(), "file", Retention::newest(3));
        let mut lane = open();
        for n in 0..5_u8 {
            let changes: Vec<Change> = vec![
                (b"big".to_vec(), Some(big(n))),
                (vec![n], Some(Vec::new())),
                (vec![n.wrapping_sub(2)], None),
                (b"once".to_vec(), (n == 0).then(|| b"more".to_vec())),
            ];
            let changes = if n == 0 { changes } else { changes[..3].to_vec() };
            lane.commit(&[n; 3], &changes).unwrap();
        }
        for _ in 0..2 {
            drop(lane);
            lane = open();
            assert_eq!(generations::lanes(lane.store()).unwrap(), ["file"]);
            assert_eq!(lane.generations().unwrap(), [3, 4, 5]);
            let newest = lane.read(5).unwrap();
            assert_eq!(newest.head, [4; 3]);
            let expected =
                [(vec![3], vec![]), (vec![4], vec![]), (b"big".to_vec(), big(4)), (b"once".to_vec(), b"more".to_vec())];
            assert_eq!(newest.records, expected);
            assert_eq!(lane.read(3).unwrap().records[2].1, big(2));
        }
        assert!(lane.store().bytes_on_disk().unwrap() > 300_000);
    }
}

#[test]
fn a_store_has_one_owner() {
    for kind in KINDS {
        let (site, _) = learned(kind);
        let held = store::open(&site.store(), Access::Create(kind)).unwrap();
        for access in [Access::Learn(kind), Access::Create(kind), Access::Write, Access::Repair, Access::Read] {
            assert!(matches!(store::open(&site.store(), access), Err(StoreError::InUse(_))), "{access:?}");
        }
        for arguments in [&["learn", "--once"][..], &["snapshots", "list"], &["snapshots", "rollback", "--to", "3"]] {
            let run = site.run(arguments);
            assert_eq!(run.code, Some(1), "{arguments:?}");
            assert!(run.err.contains("data/store is in use by another process"), "{arguments:?}: {}", run.err);
        }
        drop(held);
        assert_eq!(site.run(&["snapshots", "verify"]).code, Some(0));
    }
}

/// sled's threads may outlive the database that was closed, and keep its file.
#[test]
fn a_database_that_is_still_being_closed_is_waited_for() {
    let directory = tempfile::tempdir().unwrap();
    let dir = directory.path().to_owned();
    drop(store::open(&dir, Access::Create(StoreKind::Sled)).unwrap());
    let kept = fs::File::open(dir.join("sled/db")).unwrap();
    kept.lock().unwrap();
    let opening = std::thread::spawn(move || store::open(&dir, Access::Write).map(drop));
    // Long enough for the lock to be met.
    std::thread::sleep(std::time::Duration::from_millis(100));
    drop(kept);
    opening.join().unwrap().unwrap();
}

#[test]
fn a_store_that_is_not_ours_is_refused() {
    for (kind, other) in [("redb", "sled"), ("sled", "redb")] {
        let site = Site::new(&format!("{CONFIG}[store]\nkind = \"{kind}\"\n"));
        site.learn();
        let check = |arguments: &[&str], expected: &[&str]| {
            let run = site.run(arguments);
            assert_eq!(run.code, Some(1), "{arguments:?}: {}", run.err);
            for part in expected {
                assert!(run.err.contains(part), "{part} is not in {}", run.err);
            }
        };
        let set = format!("store.kind={other}");
        check(&["learn", "--once", "--set", &set], &[&format!("created with store.kind = \"{kind}\"")]);
        check(&["snapshots", "list", "--store", "nowhere"], &["no store in nowhere"]);
        assert!(!site.path("nowhere").exists(), "looking makes nothing");
        for (format, expected) in [
            (format!("2 {kind}\n"), &["has format version 2", "upgrade pointsman"][..]),
            (format!("60000 {kind}\n"), &["has format version 60000", "upgrade pointsman"]),
            ("one redb\n".to_owned(), &["`format` is invalid", "mv data/store data/store.damaged"]),
            (String::new(), &["`format` is invalid", "replay --keep-open --store data/store"]),
        ] {
            fs::write(site.store().join("format"), format).unwrap();
            check(&["learn", "--once"], expected);
            check(&["snapshots", "verify"], expected);
        }
    }
}

/// What happens to a file.
#[derive(Debug)]
enum Damage {
    Flip(Vec<(usize, u8)>),
    Cut(usize),
    Zero(usize),
    Copy(usize, usize),
    Remove,
}

const PAGE: usize = 4096;

impl Damage {
    fn random(bytes: &[u8], rng: &mut ChaCha8Rng) -> Self {
        let pages = bytes.len() / PAGE;
        let used = |rng: &mut ChaCha8Rng| {
            (0..1000).map(|_| rng.random_range(0..bytes.len())).find(|at| bytes[*at] != 0).unwrap_or(0)
        };
        match rng.random_range(0..10) {
            0 => Self::Flip(vec![(rng.random_range(0..bytes.len()), 1 << rng.random_range(0..8))]),
            1..=3 => Self::Flip(vec![(used(rng), 1 << rng.random_range(0..8))]),
            4 => Self::Flip(vec![(rng.random_range(0..320), 1 << rng.random_range(0..8))]),
            5 => Self::Flip((0..30).map(|_| (used(rng), rng.random())).collect()),
            6 => Self::Cut(rng.random_range(0..bytes.len())),
            7 | 8 => Self::Zero(used(rng) / PAGE),
            _ => Self::Copy(rng.random_range(0..pages), used(rng) / PAGE),
        }
    }

    fn inflict(&self, path: &Path) {
        let mut bytes = fs::read(path).unwrap();
        let page = |at: usize| at * PAGE..(at + 1) * PAGE;
        match self {
            Self::Flip(places) => places.iter().for_each(|(at, mask)| bytes[*at] ^= mask),
            Self::Cut(length) => bytes.truncate(*length),
            Self::Zero(at) => bytes[page(*at)].fill(0),
            Self::Copy(from, to) => bytes.copy_within(page(*from), to * PAGE),
            Self::Remove => return fs::remove_file(path).unwrap(),
        }
        fs::write(path, bytes).unwrap();
    }
}

/// The digest of every generation, oldest first, from a store that is whole.
fn digests(site: &Site) -> Vec<(u64, String)> {
    let run = site.run(&["snapshots", "verify"]);
    assert_eq!(run.code, Some(0), "{}", run.err);
    let parse = |line: &str| {
        let (generation, digest) = line.strip_prefix("generation ")?.split_once(": ok, state digest ")?;
        Some((generation.parse().ok()?, digest.to_owned()))
    };
    run.out.lines().map(|line| parse(line).unwrap()).collect()
}

/// Where a store would go on, as a digest; nothing if it would begin.
fn resumed(site: &Site, dir: &Path, kind: StoreKind) -> Result<Option<String>, StateError> {
    let store = runner::open_store(&StoreConfig { dir: dir.to_owned(), kind })?;
    let restored = LocalLane::new(store, ONE_LANE, Retention::newest(3)).restore(&site.settings())?;
    Ok(restored.map(|restored| restored.engine.digest()))
}

/// Learns on from a damaged store: the end is that of the uninterrupted run and nothing is lost in silence, or else
/// the error says what to do. Returns the generation that it went on from.
fn check_learn(site: &Site, store: &str, end: &str, newest: u64, what: &str) -> Option<u64> {
    let Run { code, out, err } = site.run(&["learn", "--once", "--json", "--set", &format!("store.dir={store}")]);
    assert!(!err.contains("panicked at src/") && !err.contains("the engine thread panicked"), "{what}: {err}");
    if code != Some(0) {
        assert_eq!(code, Some(1), "{what}: {err}");
        let ways = [format!("mv {store} {store}.damaged"), format!("pointsman replay --keep-open --store {store}")];
        assert!(ways.iter().all(|way| err.contains(way)), "{what}: {err}");
        return None;
    }
    let found: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!(found["state_digest"], end, "{what}: {err}");
    let line = err
        .lines()
        .find(|line| line.contains("restored snapshot generation="))
        .unwrap_or_else(|| panic!("{what}: {err}"));
    let generation = line.split("generation=").nth(1).unwrap().split(' ').next().unwrap().parse().unwrap();
    assert!(generation == newest || err.contains("damaged") || err.contains("older snapshot"), "{what}: {err}");
    Some(generation)
}

#[test]
fn a_damaged_file_never_gives_a_wrong_state() {
    let (site, end) = learned(StoreKind::Redb);
    let committed = digests(&site);
    let (newest, newest_digest) = committed.last().unwrap();
    assert_eq!((committed.len(), newest_digest), (3, &end));
    let whole = fs::read(site.store().join("db.redb")).unwrap();
    let mut rng = ChaCha8Rng::seed_from_u64(5);
    let (mut tally, mut reasons, trials) = ([0; 4], BTreeMap::<String, usize>::new(), sized(120, 4000));
    for trial in 0..trials {
        let damage = Damage::random(&whole, &mut rng);
        let what = format!("trial {trial}: {damage:?}");
        let name = format!("copy-{trial}");
        let damaged = |name: &str| {
            copy(&site.store(), &site.path(name));
            damage.inflict(&site.path(name).join("db.redb"));
        };
        damaged(&name);
        let outcome = resumed(&site, &site.path(&name), StoreKind::Redb);
        if let Ok(Some(digest)) = &outcome {
            assert!(committed.iter().any(|(_, known)| known == digest), "{what}: {digest}");
        }
        let kind = match &outcome {
            Ok(Some(digest)) if *digest == end => 0,
            Ok(Some(_)) => 1,
            Ok(None) => 2,
            Err(_) => 3,
        };
        tally[kind] += 1;
        if let Err(StateError::Store(StoreError::Damaged { problem, .. })) = &outcome {
            *reasons.entry(problem.clone()).or_insert(0) += 1;
        }
        fs::remove_dir_all(site.path(&name)).unwrap();
        if kind > 0 && trial % 2 == 0 || trial % 10 == 0 {
            damaged(&name);
            let from = check_learn(&site, &name, &end, *newest, &what);
            assert_eq!(from.is_some(), kind < 2, "{what}: {outcome:?}");
            fs::remove_dir_all(site.path(&name)).unwrap();
        }
    }
    let [newest, older, empty, refused] = tally;
    println!(
        "of {trials} damaged stores: newest {newest}, older {older}, empty {empty}, refused {refused}: {reasons:#?}"
    );
}

#[test]
fn every_file_of_a_store_may_be_lost() {
    for kind in KINDS {
        let (site, end) = learned(kind);
        let newest = digests(&site).last().unwrap().0;
        let mut files = vec![PathBuf::from("format"), "newest".into(), "lock".into()];
        files.extend(match kind {
            StoreKind::Redb => vec![PathBuf::from("db.redb")],
            StoreKind::Sled => vec!["sled/db".into(), "sled/conf".into()],
        });
        for file in &files {
            for damage in [Damage::Remove, Damage::Cut(0)] {
                let what = format!("{kind} {file:?} {damage:?}");
                copy(&site.store(), &site.path("copy"));
                damage.inflict(&site.path("copy").join(file));
                let from = check_learn(&site, "copy", &end, newest, &what);
                let of_ours = matches!(file.to_str(), Some("newest" | "lock"))
                    || (file.ends_with("format") && matches!(damage, Damage::Remove));
                assert!(!of_ours || from == Some(newest), "{what}: went on from {from:?}");
                assert!(!file.ends_with("db.redb") || from.is_none(), "{what}: went on from {from:?}");
                fs::remove_dir_all(site.path("copy")).unwrap();
            }
        }
        // All of it but what remembers how far it was: not to be taken for a new store.
        fs::create_dir(site.path("copy")).unwrap();
        fs::copy(site.store().join("newest"), site.path("copy/newest")).unwrap();
        assert_eq!(check_learn(&site, "copy", &end, newest, "emptied"), None);
    }
}

/// Flips a bit of the values whose keys are chosen.
fn spoil(dir: &Path, choose: impl Fn(&[u8]) -> bool) -> usize {
    let mut raw = store::open(dir, Access::Write).unwrap();
    let mut batch = Batch::default();
    raw.scan(b"", &mut |key, value| {
        if choose(key) {
            let mut value = value.to_vec();
            let middle = value.len() / 2;
            value[middle] ^= 4;
            batch.puts.push((key.to_vec(), value));
        }
    })
    .unwrap();
    let spoiled = batch.puts.len();
    raw.apply(batch).unwrap();
    spoiled
}

/// Kind and generation of an entry of the lane `file`.
fn place(key: &[u8]) -> (u8, u64) {
    (key[0], u64::from_be_bytes(key[7..15].try_into().unwrap()))
}

#[test]
fn each_generation_may_be_damaged() {
    for kind in KINDS {
        let (site, end) = learned(kind);
        let committed = digests(&site);
        let newest = committed.last().unwrap().0;
        for entry in [b'h', b'r'] {
            for (generation, _) in &committed {
                let what = format!("{kind}: {} of generation {generation}", char::from(entry));
                copy(&site.store(), &site.path("copy"));
                assert!(spoil(&site.path("copy"), |key| place(key) == (entry, *generation)) > 0);
                let expected = if *generation == newest {
                    newest - 1
                } else if entry == b'h' {
                    newest
                } else {
                    // Later generations need some of those records too.
                    generation - 1
                };
                let expected = Some(expected).filter(|expected| *expected >= committed[0].0);
                assert_eq!(check_learn(&site, "copy", &end, newest, &what), expected, "{what}");
                if expected.is_some() {
                    assert_eq!(resumed(&site, &site.path("copy"), kind).unwrap().as_deref(), Some(&*end), "{what}");
                }
                fs::remove_dir_all(site.path("copy")).unwrap();
            }
        }
        copy(&site.store(), &site.path("copy"));
        assert_eq!(spoil(&site.path("copy"), |key| key[0] == b'h'), 3);
        assert_eq!(check_learn(&site, "copy", &end, newest, "all heads"), None);
    }
}

/// However many snapshots, a store takes what its generations take.
#[test]
fn a_store_does_not_grow() {
    const KEEP: usize = 3;
    let models: Vec<String> = (0..8).map(|m| format!("m{m}")).collect();
    let names: Vec<&str> = models.iter().map(String::as_str).collect();
    let text = format!(
        "[learner]\ndim = 128\nmodels = {models:?}\nrank = 16\n[join]\nwindow_ms = 20000\nearly_ms = 0\nremember_ms = 10000\n"
    );
    let settings = toml::from_str::<Config>(&text).unwrap().check().unwrap();
    let parser = Parser::new(&settings);
    let mut engine = Engine::new(settings);
    let directory = tempfile::tempdir().unwrap();
    let store = store::open(directory.path(), Access::Create(StoreKind::Redb)).unwrap();
    let mut lane = LaneStore::new(store, ONE_LANE, Retention::newest(KEEP));
    let snapshots = sized(300, 5000);
    let (mut early, mut peak) = (0, 0);
    for number in 0..=snapshots {
        // The first brings the join to its steady size.
        let ids = if number == 0 { 0..600 } else { 595 + 5 * number as u64..600 + 5 * number as u64 };
        let (queries, rewards) = traffic(128, &names, ids);
        let sides = queries.into_iter().map(|event| (Side::Query, event));
        let mut events: Vec<(Side, serde_json::Value)> =
            sides.chain(rewards.into_iter().map(|event| (Side::Reward, event))).collect();
        events.sort_by_key(|(side, event)| (event["ts_ms"].as_u64(), *side));
        for (side, event) in events {
            let effects = engine.step(Input::parse(&parser, side, event.to_string().into_bytes(), None));
            assert_eq!(effects.dead_letters, []);
        }
        let head = LaneHead { engine: engine.head(), ..LaneHead::default() };
        lane.commit(&head.seal(), &engine.take_changes()).unwrap();
        if number == 50 {
            early = lane.store().bytes_on_disk().unwrap();
        } else if number > 50 && number % 50 == 0 {
            peak = peak.max(lane.store().bytes_on_disk().unwrap());
        }
    }
    let newest = lane.newest().unwrap().snapshot.unwrap();
    let live = newest.head.len() + newest.records.iter().map(|(_, value)| value.len()).sum::<usize>();
    let bytes = lane.store().bytes_on_disk().unwrap();
    println!(
        "{snapshots} snapshots of {live} bytes in {} records, {KEEP} kept: {early} bytes on disk after 50, at most {peak} \
         since, {bytes} at the end: {:.2} times the live state",
        newest.records.len(),
        bytes as f64 / live as f64
    );
    assert!(peak.max(bytes) as f64 <= 1.1 * early as f64);
    assert!(peak.max(bytes) as usize <= 2 * (KEEP + 1) * live);
    let restored =
        Engine::restore(toml::from_str::<Config>(&text).unwrap().check().unwrap(), engine.head(), newest.records);
    assert_eq!(restored.unwrap().digest(), engine.digest());
    drop(lane);
    let reopened = LaneStore::new(store::open(directory.path(), Access::Read).unwrap(), ONE_LANE, Retention::ALL);
    assert_eq!(reopened.generations().unwrap().len(), KEEP);
}
