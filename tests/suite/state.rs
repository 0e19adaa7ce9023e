//! Stores as an operator meets them: read-only commands write nothing, backups of a running learner, checkpoints, repair.

use std::collections::BTreeMap;
use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::SystemTime;

use pointsman::config::StoreKind;

use crate::crash::full::Small;
use crate::crash::place::Running;
use crate::site::{Site, copy, traffic};

const KINDS: [StoreKind; 2] = [StoreKind::Redb, StoreKind::Sled];

fn config(kind: StoreKind) -> String {
    format!(
        "[learner]\ndim = 6\nmodels = [\"a\", \"b\", \"c\"]\n[snapshot]\nevery_updates = 50\nevery_ms = 3600000\n\
         [store]\nkind = \"{kind}\"\n"
    )
}

fn learned(kind: StoreKind) -> Site {
    let site = Site::new(&config(kind));
    site.log("1", &traffic(6, &["a", "b", "c"], 0..250));
    site.learn();
    site
}

/// Starts `learn` and waits until it has learned from the logs.
fn running(site: &Site, applied: &str, listen: &str) -> Running {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pointsman"));
    command.current_dir(site.path("")).args(["--config", "pointsman.toml", "learn", "--set"]);
    command.args([&format!("http.listen={listen}"), "--set", "snapshot.every_ms=50", "--set"]);
    command.args(["audit.applied_log=audit.jsonl", "--set", "transport.file.poll_ms=20"]);
    let mut daemon = Running::start(command_quiet(command));
    let audit = site.path("audit.jsonl");
    daemon.wait_until("the end of the logs", || fs::read_to_string(&audit).unwrap_or_default().contains(applied));
    daemon
}

fn command_quiet(mut command: Command) -> Command {
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    command
}

/// Every file below a directory: content and time of the last change.
fn contents(dir: &Path) -> BTreeMap<PathBuf, (Vec<u8>, SystemTime)> {
    let mut all = BTreeMap::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            all.extend(contents(&path));
        } else {
            all.insert(path.clone(), (fs::read(&path).unwrap(), path.metadata().unwrap().modified().unwrap()));
        }
    }
    all
}

const READING: [&[&str]; 5] = [
    &["list"],
    &["show", "--json"],
    &["verify"],
    &["export", "--out", "exported.safetensors"],
    &["repair", "--dry-run"],
];

/// Also of a store whose process was killed, so that its database needs recovery, and of a damaged one.
#[test]
fn read_only_commands_write_nothing() {
    for kind in KINDS {
        let site = learned(kind);
        site.log("2", &traffic(6, &["a", "b", "c"], 250..300));
        let killed = running(&site, "r299", "");
        killed.kill();
        let damage = |path: &Path, number: usize| {
            let mut bytes = fs::read(path).unwrap();
            let at = bytes.len() / number;
            bytes[at..at + 3000].iter_mut().for_each(|byte| *byte ^= 0x55);
            fs::write(path, bytes).unwrap();
        };
        let (mut detected, mut intact) = (0, None);
        for number in [0, 2, 3, 5, 9, 20] {
            copy(&site.store(), &site.path("copy"));
            if number > 0 {
                damage(&site.path("copy").join(if kind == StoreKind::Redb { "db.redb" } else { "sled/db" }), number);
            }
            let before = contents(&site.path("copy"));
            for arguments in READING {
                let run = site.run(&[&["snapshots"], arguments, &["--store", "copy"]].concat());
                assert!(number > 0 || run.code == Some(0), "{kind} {arguments:?}: {}", run.err);
                assert!(matches!(run.code, Some(0 | 1)), "{kind} {arguments:?}: {}", run.err);
                assert!(contents(&site.path("copy")) == before, "{kind}, damage {number}: {arguments:?} wrote");
            }
            // Pages that nothing uses may be damaged unnoticed.
            let verified = site.run(&["snapshots", "verify", "--store", "copy"]);
            detected += usize::from(verified.code == Some(1));
            intact = intact.or(Some(verified.out.clone()));
            // The database may be back at an earlier commit, with other generations. None may have another state.
            let generation = |line: &str| line.split(':').next().map(str::to_owned);
            let has_other_state = |line: &str| {
                let mut known = intact.iter().flat_map(|intact| intact.lines());
                line.contains(": ok") && known.any(|known| generation(known) == generation(line) && known != line)
            };
            assert!(!verified.out.lines().any(has_other_state), "{kind}: {verified:?}");
            fs::remove_dir_all(site.path("copy")).unwrap();
        }
        assert!(detected > 0, "{kind}: no damage was detected");
    }
}

#[test]
fn a_repair_says_what_it_gives_up_and_does_it() {
    let site = learned(StoreKind::Redb);
    let run = site.run(&["snapshots", "repair"]);
    assert_eq!((run.code, run.out.as_str()), (Some(0), "nothing to repair: every generation is intact\n"));
    let shown = site.json(&["snapshots", "show", "--json"]);
    let checkpoint = site.json(&["snapshots", "list", "--json"])["generations"][0].clone();
    assert_eq!(checkpoint["kept_as"], "checkpoint");
    // The database is lost, so the checkpoint is all there is.
    fs::write(site.store().join("db.redb"), vec![7; 100_000]).unwrap();
    let refused = site.run(&["learn", "--once"]);
    assert_eq!(refused.code, Some(1));
    assert!(refused.err.contains("pointsman snapshots repair --store data/store"), "{}", refused.err);
    let planned = site.run(&["snapshots", "repair", "--dry-run"]);
    assert!(!site.store().join("db.redb.damaged-1").exists(), "a dry run changes nothing");
    let done = site.run(&["snapshots", "repair"]);
    assert_eq!((planned.code, done.code), (Some(0), Some(0)), "{}{}", planned.err, done.err);
    assert_eq!(done.out, format!("{}done\n", planned.out));
    assert!(
        done.out.contains("the database is damaged") && done.out.contains("restore the checkpoint"),
        "{}",
        done.out
    );
    assert!(site.store().join("db.redb.damaged-1").exists());
    assert_eq!(site.run(&["snapshots", "verify"]).code, Some(0));
    // What the checkpoint lacks is read again: the same state in the end.
    assert_eq!(site.learn()["state_digest"], shown["state_digest"]);
}

#[test]
fn a_rollback_reaches_a_checkpoint() {
    let site = learned(StoreKind::Redb);
    let end = site.json(&["snapshots", "show", "--json"]);
    let list = site.json(&["snapshots", "list", "--json"]);
    let first = &list["generations"][0];
    assert_eq!((&first["kept_as"], &first["applied"]), (&"checkpoint".into(), &0.into()));
    let to = first["generation"].to_string();
    let run = site.run(&["snapshots", "rollback", "--to", &to]);
    assert_eq!(run.code, Some(0), "{}", run.err);
    assert_eq!(site.json(&["snapshots", "show", "--json"])["applied"], 0);
    let again = site.learn();
    assert_eq!(again["state_digest"], end["state_digest"]);
}

#[test]
fn a_running_learner_is_backed_up() {
    for kind in KINDS {
        let site = learned(kind);
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let listen = format!("127.0.0.1:{port}");
        site.log("2", &traffic(6, &["a", "b", "c"], 250..400));
        let daemon = running(&site, "r399", &listen);
        let set = format!("http.listen={listen}");
        let run = site.run(&["snapshots", "backup", "--out", "pointsman.backup", "--set", &set]);
        assert_eq!(run.code, Some(0), "{}", run.err);
        assert!(run.out.starts_with("backed up lane file, generation "), "{}", run.out);
        // Without the token of the store there is none.
        let url = format!("http://{listen}/v1/backup");
        let refused = ureq::get(&url).config().http_status_as_error(false).build().call().unwrap();
        assert_eq!(refused.status(), 403);
        // Another configuration finds no learner.
        let lost = site.run(&["snapshots", "backup", "--out", "other", "--set", "http.listen=127.0.0.1:1"]);
        assert_eq!(lost.code, Some(1));
        assert!(lost.err.contains("is in use, and no learner sent a backup"), "{}", lost.err);
        assert!(!site.path("other").exists());
        daemon.stop("-TERM");
        let end = site.json(&["snapshots", "show", "--json"]);

        let run = site.run(&["snapshots", "restore", "--from", "pointsman.backup"]);
        assert_eq!(run.code, Some(1));
        assert!(run.err.contains("already has snapshots"), "{}", run.err);
        let run = site.run(&["snapshots", "restore", "--from", "pointsman.backup", "--store", "restored"]);
        assert_eq!(run.code, Some(0), "{}", run.err);
        let restored = site.json(&["snapshots", "show", "--json", "--store", "restored"]);
        assert_eq!(restored["epoch"], 1);
        // It continues from its positions to the same end.
        let again = site.json(&["learn", "--once", "--json", "--set", "store.dir=restored"]);
        assert_eq!(again["state_digest"], end["state_digest"]);
        let mut bytes = fs::read(site.path("pointsman.backup")).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        fs::write(site.path("bad.backup"), bytes).unwrap();
        let run = site.run(&["snapshots", "restore", "--from", "bad.backup", "--store", "new"]);
        assert!(run.code == Some(1) && run.err.contains("checksum") && !site.path("new").exists(), "{}", run.err);
        // A stopped store is backed up without a learner.
        assert_eq!(site.run(&["snapshots", "backup", "--out", "stopped.backup"]).code, Some(0));
    }
}

/// A full disk is not damage: nothing may be moved aside for it.
#[test]
fn a_full_disk_at_open_is_reported_as_such() {
    for kind in KINDS {
        let site = learned(kind);
        let Some(small) = Small::mount(16 << 20) else { return };
        let dir = small.path().join("store");
        copy(&site.store(), &dir);
        // Takes every block that is left.
        let mut filler = fs::File::create(small.path().join("filler")).unwrap();
        while std::io::Write::write_all(&mut filler, &[1; 4096]).is_ok() {}
        for dir in [&dir, &small.path().join("new")] {
            let run = site.run(&["learn", "--once", "--set", &format!("store.dir={}", dir.display())]);
            assert_eq!(run.code, Some(1), "{kind}: {}", run.err);
            let error = run.err.lines().last().unwrap_or_default();
            assert!(error.contains("No space left on device") && !error.contains("mv "), "{kind}: {}", run.err);
        }
        drop(filler);
        fs::remove_file(small.path().join("filler")).unwrap();
        let run = site.run(&["learn", "--once", "--set", &format!("store.dir={}", dir.display())]);
        assert_eq!(run.code, Some(0), "{kind}: {}", run.err);
    }
}
