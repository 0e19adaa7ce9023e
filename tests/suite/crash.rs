//! Whatever ends the process, wherever: what it comes to after the last restart is what it would have come to without.

pub mod full;
mod live;
pub mod logs;
pub mod place;

use std::os::unix::process::ExitStatusExt;
use std::process::Stdio;
use std::time::{Duration, Instant};

use pointsman::failpoint;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::size::sized;
use logs::{Disorder, Split, VARIANTS};
use place::{Outcome, Place, Running, json_of, scratch};

const SIGABRT: i32 = 6;
const SIGKILL: i32 = 9;

#[test]
fn killed_at_any_moment() {
    for (n, variant) in VARIANTS.iter().enumerate() {
        let root = tempfile::tempdir().unwrap();
        let logs = variant.logs(600, Disorder::Beyond);
        let place = Place::new(root.path(), variant, &logs, Split::Segments(5));
        let start = Instant::now();
        let expected = place.learn_once();
        let took = start.elapsed();
        expected.check_rich();
        let mut random = ChaCha8Rng::seed_from_u64(n as u64);
        let (mut killed, mut series) = (0, 0);
        while killed < sized(5, 75) {
            place.wipe();
            series += 1;
            // Some of them while it starts: a store that is half made, or half restored.
            let mut after_s = || match random.random_bool(0.3) {
                true => random.random_range(0.0..0.03),
                false => random.random_range(0.0..1.2) * took.as_secs_f64(),
            };
            while let Some(context) = kill_once(&place, after_s()) {
                killed += 1;
                place.check_remains(&expected, &format!("{}, series {series}, {context}", variant.name));
            }
            let context = format!("{}, series {series}, {killed} kills so far", variant.name);
            expected.check_same(&place.learn_once(), &context);
        }
        println!("{}: {killed} kills in {series} series, a run takes {took:?}", variant.name);
    }
}

/// Starts learning and kills it after a while; `None` if it was done before.
fn kill_once(place: &Place, after_s: f64) -> Option<String> {
    let mut command = place.command(&["learn", "--once"]);
    command.stdout(Stdio::null());
    let running = Running::start(command);
    std::thread::sleep(Duration::from_secs_f64(after_s));
    let output = running.kill();
    let status = output.status;
    assert!(
        status.success() || status.signal() == Some(SIGKILL),
        "{status}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    (!status.success()).then(|| format!("killed after {after_s} s"))
}

#[test]
fn dies_at_every_place_where_it_can() {
    let root = scratch();
    let cases: Vec<(Place, Outcome)> = VARIANTS
        .iter()
        .map(|variant| {
            let logs = variant.logs(400, Disorder::Beyond);
            let place = Place::new(&root.path().join(variant.name), variant, &logs, Split::Segments(3));
            let expected = place.learn_once();
            (place, expected)
        })
        .collect();
    for (n, name) in failpoint::NAMES.into_iter().enumerate() {
        for (m, hit) in [1, 2, 3, 9].into_iter().enumerate() {
            // In a soak every variant dies everywhere, otherwise they take turns.
            for i in 0..sized(1, cases.len()) {
                let (place, expected) = &cases[(n + m + i) % cases.len()];
                let context = format!("{name}={hit}, variant {}", place.transport.display());
                place.wipe();
                assert!(!die_at(place, name, hit), "{context}: was not reached");
                place.check_remains(expected, &context);
                expected.check_same(&place.learn_once(), &context);
            }
        }
    }
}

/// A process that dies after its third snapshot, again and again, still gets to the end.
#[test]
fn dies_after_every_few_snapshots() {
    for variant in &VARIANTS {
        let root = scratch();
        let place = Place::new(root.path(), variant, &variant.logs(300, Disorder::Beyond), Split::Segments(3));
        let expected = place.learn_once();
        place.wipe();
        let deaths = (0..100).take_while(|_| !die_at(&place, "after-persist", 3)).count();
        assert!((4..100).contains(&deaths), "{}: {deaths}", variant.name);
        expected.check_same(&place.learn_once(), variant.name);
    }
}

/// Learns until a failpoint is reached for the nth time; whether it came to the end without.
fn die_at(place: &Place, name: &str, nth: u32) -> bool {
    let output =
        place.command(&["learn", "--once"]).env("POINTSMAN_FAILPOINT", format!("{name}={nth}")).output().unwrap();
    let status = output.status;
    assert!(
        status.success() || status.signal() == Some(SIGABRT),
        "{status}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    status.success()
}

#[test]
fn split_cadence_and_restarts_do_not_matter() {
    for variant in &VARIANTS {
        let root = scratch();
        let logs = variant.logs(300, Disorder::Within);
        let place = Place::new(&root.path().join("plain"), variant, &logs, Split::One);
        let expected = place.learn_once();
        assert_eq!(expected.summary["out_of_order"], 0);
        for (n, split) in [Split::One, Split::Segments(7), Split::Dealt(4)].into_iter().enumerate() {
            let place = Place::empty(&root.path().join(n.to_string()), variant);
            let files = logs.write(&place.transport, split);
            for cadence in [1, 7, 1_000_000] {
                let context = format!("{}, split {n}, a snapshot every {cadence}", variant.name);
                let place = place.with(&format!("snapshot.every_updates={cadence}"));
                place.wipe();
                die_at(&place, "after-persist", cadence + 1);
                let found = place.learn_once();
                assert_eq!(found.summary, expected.summary, "{context}");
                expected.check_audit(&found, &context);
                assert!(found.params == expected.params, "{context}: other parameters");
                assert_eq!(found.dead.len(), expected.dead.len(), "{context}");
            }
            place.wipe();
            let mut replay = place.command(&["replay", "--keep-open", "--json"]);
            replay.current_dir(root.path()).arg("--queries").args(&files[0]).arg("--rewards").args(&files[1]);
            assert_eq!(json_of(&replay.output().unwrap()), expected.summary, "{}, replay of split {n}", variant.name);
        }
    }
}

#[test]
fn replay_goes_on_after_a_kill() {
    for variant in &VARIANTS {
        let root = scratch();
        let place = Place::empty(root.path(), variant);
        let files = variant.logs(400, Disorder::Beyond).write(&place.transport, Split::Segments(3));
        let letters = place.transport.join("dead-letters/letters.jsonl");
        let replay = |options: &[&str]| {
            let mut command = place.command(&["replay", "--json"]);
            command.arg("--queries").args(&files[0]).arg("--rewards").args(&files[1]);
            command.arg("--dead-letters").arg(&letters).args(options);
            command
        };
        let stored = ["--store", place.store.to_str().unwrap()];
        for more in [&[][..], &["--keep-open"]] {
            place.wipe();
            let expected = place.outcome(json_of(&replay(more).output().unwrap()));
            place.wipe();
            let options = [&stored, more].concat();
            for (name, hit) in [("before-persist", 1), ("mid-persist", 3), ("after-persist", 6), ("before-persist", 2)]
            {
                let output = replay(&options).env("POINTSMAN_FAILPOINT", format!("{name}={hit}")).output().unwrap();
                assert_eq!(output.status.signal(), Some(SIGABRT), "{}: {name}={hit}", variant.name);
            }
            // The second time it has nothing left to do.
            for _ in 0..2 {
                let found = place.outcome(json_of(&replay(&options).output().unwrap()));
                expected.check_same(&found, &format!("{}: replay {more:?}", variant.name));
            }
        }
        let found = place.learn_once();
        let replayed = place.newest_snapshot().unwrap();
        assert_eq!(found.digest(), &replayed["state_digest"], "{}: learn after replay --keep-open", variant.name);
        place.wipe();
        assert_eq!(place.learn_once().digest(), found.digest(), "{}: learn from the start", variant.name);
    }
}
