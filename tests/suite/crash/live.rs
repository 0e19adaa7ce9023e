//! A daemon that runs: signals, logs that grow and rotate, a second one in its way.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::logs::{Disorder, LAST, Pack, Split, VARIANTS, query_line, reward_line};
use super::place::{Place, Running, check_balance, scratch, text};
use crate::size::sized;

#[test]
fn live_over_complete_logs_comes_to_the_same() {
    for (variant, signal) in VARIANTS.iter().zip(["-TERM", "-INT"].into_iter().cycle()) {
        let root = scratch();
        let place = Place::new(root.path(), variant, &variant.logs(400, Disorder::Beyond), Split::Segments(3));
        let expected = place.learn_once();
        place.wipe();
        let mut daemon = Running::start(place.command(&["learn"]));
        daemon.wait_until("the end of the logs", || text(&place.audit).contains(LAST));
        let output = daemon.stop(signal);
        assert_eq!(output.status.code(), Some(0), "{signal}: {}", String::from_utf8_lossy(&output.stderr));
        let mut found = place.newest_snapshot().unwrap();
        let said = expected.summary.as_object().unwrap();
        found.as_object_mut().unwrap().retain(|key, _| said.contains_key(key));
        expected.check_same(&place.outcome(found), &format!("{}, live", variant.name));
    }
}

/// A log that is written as programs do: in pieces that end anywhere, renamed and begun anew, compressed afterwards.
struct Growing {
    dir: PathBuf,
    file: File,
    rotations: usize,
    random: ChaCha8Rng,
}

impl Growing {
    fn new(dir: &Path, seed: u64) -> Self {
        fs::create_dir_all(dir).unwrap();
        let file = File::create(dir.join("live.jsonl")).unwrap();
        Self { dir: dir.to_owned(), file, rotations: 0, random: ChaCha8Rng::seed_from_u64(seed) }
    }

    /// Writes lines, in pieces.
    fn write(&mut self, lines: &[String]) {
        let text: String = lines.iter().flat_map(|line| [line.as_str(), "\n"]).collect();
        let mut rest = text.as_bytes();
        while !rest.is_empty() {
            let piece = self.random.random_range(1..=rest.len().min(900));
            self.file.write_all(&rest[..piece]).unwrap();
            rest = &rest[piece..];
            std::thread::yield_now();
        }
    }

    /// Ends a file in one of the ways that there are. `late` is what its writer still had to say.
    fn rotate(&mut self, late: &[String]) {
        self.rotations += 1;
        let n = self.rotations;
        match n % 3 {
            0 => self.write(late),
            _ => {
                let old = self.dir.join(format!("live.{n}.jsonl"));
                fs::rename(self.dir.join("live.jsonl"), &old).unwrap();
                self.write(late);
                if n % 3 == 1 {
                    let packed = Pack::Zstd.pack(&fs::read(&old).unwrap());
                    let beside = self.dir.join("packing");
                    fs::write(&beside, packed).unwrap();
                    fs::rename(&beside, self.dir.join(format!("live.{n}.jsonl.zst"))).unwrap();
                    fs::remove_file(&old).unwrap();
                }
            }
        }
        let name = if n.is_multiple_of(3) { format!("segment-{n:04}.jsonl") } else { "live.jsonl".to_owned() };
        self.file = File::options().create(true).append(true).open(self.dir.join(name)).unwrap();
    }
}

#[test]
fn logs_that_grow_and_rotate_are_read_once() {
    let root = scratch();
    let variant = &VARIANTS[0];
    let place = Place::empty(root.path(), variant).with("join.window_ms=100000000").with("join.early_ms=100000000");
    let rounds = sized(40, 600);
    let mut daemon = Running::start(place.command(&["learn"]));
    let dir = place.transport.clone();
    let writer = std::thread::spawn(move || {
        let mut sides = [Growing::new(&dir.join("queries"), 1), Growing::new(&dir.join("rewards"), 2)];
        let mut random = ChaCha8Rng::seed_from_u64(3);
        for round in 0..rounds {
            let mut lines = [Vec::new(), Vec::new()];
            for i in 0..25 {
                let id = format!("r{round}-{i}");
                let ts_ms = 1_000_000 + (round * 25 + i) as i64;
                lines[0].push(query_line(&mut random, &id, None, ts_ms));
                lines[1].push(reward_line(&id, None, ts_ms + 5, 0.5));
            }
            for (side, lines) in sides.iter_mut().zip(&lines) {
                let (early, late) = lines.split_at(20);
                side.write(early);
                if random.random_bool(0.5) { side.rotate(late) } else { side.write(late) }
            }
        }
        rounds * 25
    });
    let written = writer.join().unwrap();
    daemon.wait_until("all that was written", || text(&place.audit).lines().count() >= written);
    let output = daemon.stop("-TERM");
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(0), "{told}");
    let found = place.newest_snapshot().unwrap();
    check_balance(&found, "live");
    for key in ["queries", "rewards", "joined", "applied"] {
        assert_eq!(found[key], written, "{key}: {found}\n{told}");
    }
    for key in ["dead_letters", "duplicates", "late", "orphaned", "expired", "pending"] {
        assert_eq!(found[key], 0, "{key}: {found}\n{told}");
    }
}

#[test]
fn a_store_has_one_owner() {
    for variant in &VARIANTS {
        let root = scratch();
        let place = Place::new(root.path(), variant, &variant.logs(50, Disorder::Within), Split::One);
        let mut daemon = Running::start(place.command(&["learn"]));
        daemon.wait_until("the end of the logs", || text(&place.audit).contains(LAST));
        let logs = place.transport.display();
        let (queries, rewards) = (format!("{logs}/queries/a-0000.jsonl"), format!("{logs}/rewards/a-0000.jsonl"));
        let store = place.store.to_str().unwrap();
        for arguments in [
            &["learn"][..],
            &["learn", "--once"],
            &["replay", "--store", store, "--queries", &queries, "--rewards", &rewards],
            &["snapshots", "show"],
        ] {
            let output = place.command(arguments).output().unwrap();
            let told = String::from_utf8_lossy(&output.stderr).into_owned();
            assert_eq!(output.status.code(), Some(1), "{arguments:?}: {told}");
            assert!(told.contains(&format!("store {store} is in use")), "{arguments:?}: {told}");
        }
        assert_eq!(daemon.stop("-TERM").status.code(), Some(0), "the first one goes on");
    }
}
