//! Files and disks that are not as they should be.

use std::fs;
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use serde_json::json;

use crate::crash::full::Small;
use crate::crash::logs::{Disorder, Pack, Split, VARIANTS, query_line, reward_line};
use crate::crash::place::{Place, Running, check_balance, json_of, scratch, text};
use crate::sidecar::{Client, free_port};

const STARTS: i64 = 1_700_000_000_000;

/// A learner's place without logs, whose joins are never late.
fn place(root: &Path) -> Place {
    Place::empty(root, &VARIANTS[0]).with("join.window_ms=100000000").with("join.early_ms=100000000")
}

/// Lines of both sides for requests with these numbers.
fn lines(numbers: std::ops::Range<i64>) -> [String; 2] {
    let mut random = ChaCha8Rng::seed_from_u64(7);
    let id = |n: i64| format!("r{n}");
    let queries = numbers.clone().map(|n| query_line(&mut random, &id(n), None, STARTS + n) + "\n").collect();
    let rewards = numbers.map(|n| reward_line(&id(n), None, STARTS + n + 5, 0.5) + "\n").collect();
    [queries, rewards]
}

/// Adds requests to `<name>` on both sides.
fn add(place: &Place, name: &str, numbers: std::ops::Range<i64>) {
    for (side, lines) in ["queries", "rewards"].into_iter().zip(lines(numbers)) {
        let dir = place.transport.join(side);
        fs::create_dir_all(&dir).unwrap();
        let mut file = fs::File::options().create(true).append(true).open(dir.join(name)).unwrap();
        file.write_all(lines.as_bytes()).unwrap();
    }
}

fn applied(place: &Place) -> usize {
    text(&place.audit).lines().count()
}

fn error_of(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn mkfifo(path: &Path) {
    assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
}

/// The same command behind `sh -c`, with something set before it.
fn after(setup: &str, command: &Command) -> Command {
    let mut shell = Command::new("sh");
    shell.arg("-c").arg(format!("{setup}; exec \"$@\"")).arg("sh").arg(command.get_program()).args(command.get_args());
    shell.env("RUST_LOG", "info").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    shell
}

/// A learner that answers over HTTP.
fn serving(place: &Place) -> (Place, Client) {
    let port = free_port();
    (place.with(&format!("http.listen=127.0.0.1:{port}")), Client::new(port))
}

fn metrics(client: &Client) -> String {
    client.get("/metrics").unwrap().1.as_str().unwrap().replace("{}", "")
}

#[test]
fn odd_files_are_reported_once_and_skipped() {
    let root = scratch();
    let variant = &VARIANTS[0];
    let place = Place::new(root.path(), variant, &variant.logs(300, Disorder::Beyond), Split::Segments(3));
    let expected = place.learn_once();
    place.wipe();
    let dir = place.transport.join("queries");
    let names = ["fifo.jsonl", "dir.jsonl", "loop.jsonl", "device.jsonl", "bad.jsonl.gz", "bad.jsonl.zst"];
    let [fifo, directory, looped, device, gzip, zst] = names.map(|name| dir.join(name));
    mkfifo(&fifo);
    fs::create_dir(directory).unwrap();
    symlink("loop.jsonl", looped).unwrap();
    symlink("/dev/zero", device).unwrap();
    fs::write(gzip, "this is no gzip").unwrap();
    fs::write(zst, "this is no zstd, either").unwrap();
    mkfifo(&place.transport.join("rewards/fifo.jsonl.gz"));
    let check = |output: &Output| {
        let told = error_of(output);
        assert_eq!(output.status.code(), Some(0), "{told}");
        for name in names {
            let lines = told.lines().filter(|line| line.contains(&format!("queries/{name}")));
            assert_eq!(lines.count(), 1, "{name}: {told}");
        }
    };
    let output = place.command(&["learn", "--once", "--json"]).output().unwrap();
    check(&output);
    expected.check_same(&place.outcome(json_of(&output)), "once");
    place.wipe();
    let (serves, client) = serving(&place);
    let mut daemon = Running::start(serves.command(&["learn"]));
    daemon.wait_until("the end of the logs", || applied(&place) >= expected.audit.len());
    daemon.wait_until("the metric", || metrics(&client).contains("pointsman_learner_skipped_files 7"));
    client.await_status("/ready", 200);
    check(&daemon.stop("-TERM"));
}

#[test]
fn a_skipped_file_is_read_once_it_is_mended_and_keeps_its_position() {
    let root = scratch();
    let place = place(root.path());
    add(&place, "a.jsonl", 0..20);
    let mut daemon = Running::start(place.command(&["learn"]));
    daemon.wait_until("the first events", || applied(&place) == 20);
    // A log that was begun cannot be read for a while: while it is followed, and after a restart.
    let path = place.transport.join("queries/a.jsonl");
    let aside = place.transport.join("aside");
    fs::rename(&path, &aside).unwrap();
    symlink("a.jsonl", &path).unwrap();
    let output = {
        let more = place.transport.join("queries/b.jsonl");
        fs::write(&more, lines(20..30)[0].clone()).unwrap();
        fs::write(place.transport.join("rewards/b.jsonl"), lines(20..30)[1].clone()).unwrap();
        daemon.wait_until("another log", || applied(&place) == 30);
        daemon.stop("-TERM")
    };
    assert_eq!(output.status.code(), Some(0), "{}", error_of(&output));
    let mut daemon = Running::start(place.command(&["learn"]));
    add(&place, "c.jsonl", 30..40);
    daemon.wait_until("a third log", || applied(&place) == 40);
    fs::remove_file(&path).unwrap();
    fs::rename(&aside, &path).unwrap();
    add(&place, "a.jsonl", 40..50);
    daemon.wait_until("the log that was mended", || applied(&place) == 50);
    let output = daemon.stop("-TERM");
    assert_eq!(output.status.code(), Some(0), "{}", error_of(&output));
    let found = place.newest_snapshot().unwrap();
    check_balance(&found, "mended");
    assert_eq!((&found["queries"], &found["duplicates"]), (&json!(50), &json!(0)), "{}", error_of(&output));
}

#[test]
fn odd_parameter_files_hang_nobody() {
    let root = scratch();
    let place = place(root.path());
    add(&place, "a.jsonl", 0..20);
    let params = place.transport.join("params");
    fs::create_dir_all(&params).unwrap();
    mkfifo(&params.join("other.safetensors"));
    let learned = json_of(&place.command(&["learn", "--once", "--json"]).output().unwrap());
    assert_eq!(learned["applied"], 20);
    let (serves, client) = serving(&place);
    let router = Running::start(serves.command(&["route"]));
    client.await_status("/ready", 200);
    let output = router.stop("-TERM");
    assert_eq!(output.status.code(), Some(0), "{}", error_of(&output));
}

#[test]
fn a_closed_pipe_is_no_panic() {
    let root = scratch();
    let place = place(root.path());
    add(&place, "a.jsonl", 0..60);
    place.learn_once();
    let at = |name: &str| place.transport.join(name).to_str().unwrap().to_owned();
    let (queries, rewards) = (at("queries/a.jsonl"), at("rewards/a.jsonl"));
    let (params, query) = (at("params/default.safetensors"), at("query.json"));
    fs::write(&query, "[1, 2, 3, 4, 5, 6, 7, 8]").unwrap();
    let report = root.path().join("report").to_str().unwrap().to_owned();
    let export = root.path().join("out.safetensors").to_str().unwrap().to_owned();
    let letters = root.path().join("letters.jsonl").to_str().unwrap().to_owned();
    let logs = ["--queries", &queries, "--rewards", &rewards];
    let replay = [&["replay", "--dead-letters", &letters][..], &logs].concat();
    let demo = ["demo", "--rounds", "200", "--runs", "1", "--dim", "8", "--report", &report];
    let compare = ["compare", "--rounds", "200", "--runs", "1", "--dim", "8", "--report", &report];
    let commands: [&[&str]; 16] = [
        &["check-config"],
        &["check-config", "--json"],
        &["completions", "bash"],
        &["man"],
        &["--help"],
        &["--version"],
        &["params", "show", &params],
        &["params", "score", "--params", &params, "--query", &query],
        &["snapshots", "list"],
        &["snapshots", "show"],
        &["snapshots", "verify"],
        &["snapshots", "export", "--out", &export],
        &["learn", "--once", "--json"],
        &replay,
        &demo,
        &compare,
    ];
    for arguments in commands {
        let whole = place.command(arguments).output().unwrap();
        for closed in ["stdout", "stderr", "both"] {
            let (reader, writer) = std::io::pipe().unwrap();
            drop(reader);
            let mut command = place.command(arguments);
            command.env("RUST_LOG", "debug");
            if closed != "stderr" {
                command.stdout(writer.try_clone().unwrap());
            }
            if closed != "stdout" {
                command.stderr(writer);
            }
            let output = command.output().unwrap();
            let told = error_of(&output);
            assert_eq!(output.status.code(), whole.status.code(), "{arguments:?}, {closed}: {told}");
            assert!(!told.contains("panicked"), "{arguments:?}: {told}");
        }
        assert_eq!(whole.status.code(), Some(0), "{arguments:?}: {}", error_of(&whole));
    }
    let full = fs::File::options().write(true).open("/dev/full").unwrap();
    let output = place.command(&["check-config"]).stdout(full).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "a full disk is a failure");
    assert!(error_of(&output).contains("cannot write to standard output: No space left"), "{}", error_of(&output));
}

/// All files and directories below a directory.
fn walk(dir: &Path) -> Vec<PathBuf> {
    let mut found = vec![dir.to_owned()];
    for entry in fs::read_dir(dir).into_iter().flatten() {
        let path = entry.unwrap().path();
        found.extend(if path.is_dir() { walk(&path) } else { vec![path] });
    }
    found
}

#[test]
fn what_is_written_is_for_its_owner_alone() {
    for variant in [&VARIANTS[0], &VARIANTS[2]] {
        let root = scratch();
        let (written, audit) = (root.path().join("written"), root.path().join("written/audit.jsonl"));
        let logs = variant.logs(100, Disorder::Beyond);
        let given = Place::new(&root.path().join("given"), variant, &logs, Split::One);
        let place = Place { store: written.join("store"), audit, ..given.clone() };
        for inside in ["params", "dead-letters"] {
            symlink(written.join(inside), place.transport.join(inside)).unwrap();
            after("umask 077", Command::new("mkdir").arg("-p").arg(written.join(inside))).status().unwrap();
        }
        let output = after("umask 000", &place.command(&["learn", "--once"])).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{}", error_of(&output));
        let (serves, client) = serving(&Place { transport: written.join("log"), ..place });
        let router = Running::start(after("umask 000", &serves.command(&["route", "--serve-uniform"])));
        client.await_status("/ready", 200);
        assert_eq!(client.json("/v1/route", &json!({"query": [1, 2, 3, 4, 5, 6, 7, 8]})).0, 200);
        assert_eq!(router.stop("-TERM").status.code(), Some(0));
        let found = walk(&written);
        for path in &found {
            let mode = fs::symlink_metadata(path).unwrap().permissions().mode() & 0o7777;
            let expected = if path.is_dir() { 0o700 } else { 0o600 };
            assert_eq!(mode, expected, "{path:?}: {mode:o}");
        }
        assert!(found.len() > 14, "{found:?}");
    }
}

#[test]
fn a_planted_symlink_is_not_followed() {
    let root = scratch();
    let place = place(root.path());
    add(&place, "a.jsonl", 0..20);
    let victim = root.path().join("victim");
    fs::write(&victim, "precious").unwrap();
    fs::create_dir_all(place.transport.join("params")).unwrap();
    fs::create_dir_all(&place.store).unwrap();
    for name in ["db.redb.new", "format.new", "newest.new"] {
        symlink(&victim, place.store.join(name)).unwrap();
    }
    symlink(&victim, place.transport.join("params/default.safetensors.new")).unwrap();
    assert_eq!(place.learn_once().summary["applied"], 20);
    assert_eq!(text(&victim), "precious");
    assert!(!place.published().is_empty());
}

#[test]
fn names_from_outside_forge_no_log_lines() {
    const FORGED: &str = "2026-01-01T00:00:00.000000Z ERROR pointsman: forged";
    let root = scratch();
    let place = place(root.path());
    add(&place, "a.jsonl", 0..5);
    let dir = place.transport.join("queries");
    let evil = format!("x\n{FORGED}\u{1b}[31m\r.jsonl");
    fs::create_dir(dir.join(&evil)).unwrap();
    fs::write(dir.join(format!("y{evil}.gz")), "no gzip").unwrap();
    let id = json!(format!("id\n{FORGED}\u{1b}[31m\u{9b}31m"));
    let letter = json!({"request_id": id, "space": id, "ts_ms": STARTS, "query": [1], "model": id});
    fs::write(dir.join(format!("z{evil}")), format!("{letter}\n{{{id}\n")).unwrap();
    for format in ["text", "json"] {
        place.wipe();
        let mut command = place.with(&format!("log.format={format}")).command(&["learn", "--once"]);
        let output = command.env("RUST_LOG", "debug").output().unwrap();
        let told = error_of(&output);
        assert_eq!(output.status.code(), Some(0), "{told}");
        assert!(told.contains("forged"), "it is logged: {told}");
        assert!(!told.lines().any(|line| line.starts_with(FORGED)), "{told}");
        assert!(!told.contains(['\u{1b}', '\r']), "{told}");
        assert!(format == "json" || !told.contains('\u{9b}'), "{told}");
    }
    let output = place.command(&["replay", "--rewards", "nowhere", "--queries"]).arg(dir.join(&evil)).output().unwrap();
    assert!(!error_of(&output).contains(['\u{1b}', '\r']), "{}", error_of(&output));
}

#[test]
fn a_shorter_file_is_a_counted_gap() {
    let root = scratch();
    let place = place(root.path());
    add(&place, "a.jsonl", 0..20);
    add(&place, "b.jsonl", 20..40);
    assert_eq!(place.learn_once().summary["applied"], 40);
    // After a loss of power: one file ends in the middle of a line, the other was also compressed since.
    let path = |name: &str| place.transport.join("queries").join(name);
    let cut = |name: &str, bytes: u64| {
        let file = fs::File::options().write(true).open(path(name)).unwrap();
        file.set_len(file.metadata().unwrap().len() - bytes).unwrap();
    };
    cut("a.jsonl", 300);
    cut("b.jsonl", 300);
    fs::write(path("b.jsonl.gz"), Pack::Gzip.pack(&fs::read(path("b.jsonl")).unwrap())).unwrap();
    fs::remove_file(path("b.jsonl")).unwrap();
    let output = place.command(&["learn", "--once", "--json"]).output().unwrap();
    let told = error_of(&output);
    assert_eq!(json_of(&output)["applied"], 40, "{told}");
    for expected in ["truncated below the read position", "shorter than its read position"] {
        assert_eq!(told.lines().filter(|line| line.contains(expected)).count(), 1, "{expected}: {told}");
    }
    add(&place, "a.jsonl", 40..60);
    let (serves, client) = serving(&place);
    let mut daemon = Running::start(serves.command(&["learn"]));
    daemon.wait_until("what was written since", || applied(&place) == 60);
    // While it runs, too.
    cut("a.jsonl", 300);
    daemon.wait_until("the gap", || metrics(&client).contains("pointsman_learner_log_gap_bytes_total 300"));
    let more = lines(60..80);
    fs::write(path("c.jsonl"), &more[0]).unwrap();
    fs::write(place.transport.join("rewards/c.jsonl"), &more[1]).unwrap();
    daemon.wait_until("another log", || applied(&place) == 80);
    assert!(metrics(&client).contains("pointsman_learner_log_gaps_total 2"), "{}", metrics(&client));
    let output = daemon.stop("-TERM");
    assert_eq!(output.status.code(), Some(0), "{}", error_of(&output));
    check_balance(&place.newest_snapshot().unwrap(), "shorter");
}

#[test]
fn a_new_file_with_the_inode_of_an_old_one_is_another_log() {
    let root = scratch();
    let place = place(root.path());
    add(&place, "a.jsonl", 0..20);
    let mut daemon = Running::start(place.command(&["learn"]));
    daemon.wait_until("the first events", || applied(&place) == 20);
    for (side, new) in ["queries", "rewards"].into_iter().zip(lines(20..100)) {
        let dir = place.transport.join(side);
        let path = dir.join("a.jsonl");
        let inode = fs::metadata(&path).unwrap().ino();
        fs::write(dir.join("packing"), Pack::Gzip.pack(&fs::read(&path).unwrap())).unwrap();
        fs::rename(dir.join("packing"), dir.join("a.jsonl.gz")).unwrap();
        // Written in place: to whoever looks at name, inode and length, a file that has grown.
        fs::write(&path, new).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().ino(), inode);
    }
    daemon.wait_until("all requests", || applied(&place) == 100);
    let output = daemon.stop("-TERM");
    assert_eq!(output.status.code(), Some(0), "{}", error_of(&output));
    let found = place.newest_snapshot().unwrap();
    assert_eq!((&found["queries"], &found["duplicates"]), (&json!(100), &json!(0)), "{}", error_of(&output));
}

/// What an operation that cannot succeed does to a daemon, until it can.
fn check_retried(place: &Place, operation: &str, cause: &str, mend: impl FnOnce()) {
    add(place, "a.jsonl", 0..20);
    let (serves, client) = serving(place);
    let mut daemon = Running::start(serves.command(&["learn"]));
    let failing = format!("pointsman_learner_failing{{operation=\"{operation}\"}}");
    daemon.wait_until("the failure", || {
        client
            .get("/ready")
            .is_some_and(|(code, answer)| code == 503 && answer["detail"].as_str().unwrap_or_default().contains(cause))
    });
    assert!(metrics(&client).contains(&format!("{failing} 1")), "{}", metrics(&client));
    let attempts = |text: &str| -> u64 {
        let name = format!("pointsman_learner_failures_total{{operation=\"{operation}\"}} ");
        text.lines().find_map(|line| line.strip_prefix(&name)).unwrap().parse().unwrap()
    };
    daemon.wait_until("several attempts", || attempts(&metrics(&client)) > 2);
    mend();
    client.await_status("/ready", 200);
    daemon.wait_until("all requests", || {
        metrics(&client).contains("pointsman_learner_applied_total{space=\"default\"} 20")
    });
    assert!(metrics(&client).contains(&format!("{failing} 0")), "{}", metrics(&client));
    let output = daemon.stop("-TERM");
    let told = error_of(&output);
    assert_eq!(output.status.code(), Some(0), "{told}");
    assert_eq!(told.lines().filter(|line| line.contains("ERROR")).count(), 1, "{told}");
    assert!(!place.published().is_empty());
}

#[test]
fn a_learner_that_cannot_publish_retries() {
    let root = scratch();
    let place = place(root.path());
    // A file where the directory of parameters must be.
    fs::create_dir_all(&place.transport).unwrap();
    let params = place.transport.join("params");
    fs::write(&params, "").unwrap();
    check_retried(&place, "publish", "publish fails: ", || fs::remove_file(&params).unwrap());
}

#[test]
fn a_learner_that_cannot_write_dead_letters_retries() {
    let root = scratch();
    let place = place(root.path());
    let (dir, letters) = (place.transport.join("queries"), place.transport.join("dead-letters"));
    fs::create_dir_all(&dir).unwrap();
    fs::write(dir.join("bad.jsonl"), "bad\n").unwrap();
    fs::write(&letters, "").unwrap();
    check_retried(&place, "dead_letters", "dead_letters fails: ", || fs::remove_file(&letters).unwrap());
    assert_eq!(fs::read_dir(letters).unwrap().count(), 1);
}

/// A disk that is always full, without root: the daemon stays, says so, and can be stopped.
#[test]
fn a_full_disk_does_not_keep_a_learner_from_stopping() {
    let root = scratch();
    let place = place(root.path());
    add(&place, "a.jsonl", 0..20);
    let (serves, client) = serving(&Place { audit: "/dev/full".into(), ..place });
    let mut daemon = Running::start(serves.command(&["learn"]));
    daemon.wait_until("the failure", || {
        client
            .get("/ready")
            .is_some_and(|(code, answer)| code == 503 && answer.to_string().contains("no storage space"))
    });
    let output = daemon.stop("-TERM");
    let told = error_of(&output);
    assert_eq!(output.status.code(), Some(1), "what it could not keep is a failure: {told}");
    assert!(told.contains("/dev/full: No space left on device"), "{told}");
}

#[test]
fn a_learner_survives_a_full_disk() {
    for variant in [&VARIANTS[0], &VARIANTS[2]] {
        let root = scratch();
        let logs = variant.logs(400, Disorder::Beyond);
        let roomy = Place::new(&root.path().join("roomy"), variant, &logs, Split::One);
        let expected = roomy.learn_once();
        roomy.wipe();
        let Some(small) = Small::mount(16 << 20) else { return };
        let (store, audit) = (small.path().join("store"), small.path().join("audit.jsonl"));
        let place = Place { store, audit, transport: root.path().join("empty"), ..roomy.clone() };
        place.learn_once();
        let mut ballast = fs::File::create(small.path().join("ballast")).unwrap();
        while ballast.write_all(&[1; 4096]).is_ok() {}
        let (serves, client) = serving(&Place { transport: roomy.transport.clone(), ..place.clone() });
        let mut daemon = Running::start(serves.command(&["learn"]));
        daemon.wait_until("the full disk", || {
            let answer = client.get("/ready");
            answer.is_some_and(|(code, answer)| code == 503 && answer.to_string().contains("space"))
        });
        drop(ballast);
        fs::remove_file(small.path().join("ballast")).unwrap();
        daemon.wait_until("the end of the logs", || applied(&place) >= expected.audit.len());
        client.await_status("/ready", 200);
        let output = daemon.stop("-TERM");
        assert_eq!(output.status.code(), Some(0), "{}", error_of(&output));
        let found = place.newest_snapshot().unwrap();
        assert_eq!(found["state_digest"], *expected.digest(), "{}: {}", variant.name, error_of(&output));
        expected.check_audit(&place.outcome(found), variant.name);
    }
}

/// Lowers or raises how many descriptors a process may have.
fn limit_descriptors(pid: u32, most: u64) {
    let limit = format!("--nofile={most}:1024");
    assert!(Command::new("prlimit").args(["--pid", &pid.to_string(), &limit]).status().unwrap().success());
}

#[test]
fn a_learner_without_descriptors_waits_for_some() {
    let root = scratch();
    let place = place(root.path());
    add(&place, "a.jsonl", 0..20);
    let mut command = place.command(&["learn"]);
    let log = root.path().join("stderr");
    command.stderr(fs::File::create(&log).unwrap());
    let mut daemon = Running::start(command);
    daemon.wait_until("the first events", || applied(&place) == 20);
    limit_descriptors(daemon.id(), 3);
    add(&place, "b.jsonl", 20..40);
    daemon.wait_until("the failure", || text(&log).contains("Too many open files"));
    limit_descriptors(daemon.id(), 1024);
    daemon.wait_until("all requests", || applied(&place) == 40);
    assert_eq!(text(&log).matches("Too many open files").count(), 1, "{}", text(&log));
    // It can be stopped while it lasts, too.
    limit_descriptors(daemon.id(), 3);
    add(&place, "c.jsonl", 40..60);
    daemon.wait_until("the failure", || text(&log).matches("Too many open files").count() == 2);
    daemon.signal("-TERM");
    daemon.wait_until("the signal", || text(&log).contains("SIGTERM"));
    limit_descriptors(daemon.id(), 1024);
    // The last snapshot may come before the descriptors. Then the exit code says so. Nothing is lost either way.
    let code = daemon.stop("-TERM").status.code();
    assert!(code == Some(0) || (code == Some(1) && text(&log).contains("Too many open files")), "{}", text(&log));
    assert_eq!(place.learn_once().summary["applied"], 60);
    assert_eq!(applied(&place), 60);
}

/// Sends requests until `enough`; how many were acknowledged, and how many rejected.
fn send(client: &Client, from: u32, enough: impl Fn(u32, u32) -> bool) -> (u32, u32) {
    let (mut written, mut rejected) = (0, 0);
    while !enough(written, rejected) {
        let id = format!("r{}", from + written + rejected);
        match client.json("/v1/route", &json!({"request_id": id, "query": vec![0.5; 768]})).0 {
            200 => written += 1,
            503 => rejected += 1,
            other => panic!("{other}"),
        }
    }
    (written, rejected)
}

fn query_files(place: &Place) -> Vec<PathBuf> {
    walk(&place.transport.join("queries")).into_iter().filter(|path| path.is_file()).collect()
}

#[test]
fn a_router_survives_a_full_disk() {
    let Some(small) = Small::mount(1 << 20) else { return };
    let root = scratch();
    let place = Place { transport: small.path().join("log"), ..Place::empty(root.path(), &VARIANTS[0]) };
    // The learner must not fill the disk itself, with dead letters of events that are too large for it.
    let place = place.with("learner.dim=768").with("learner.models=[\"a\", \"b\"]").with("events.bytes_max=100000");
    let learner = Running::start(place.command(&["learn"]));
    let (serves, client) = serving(&place);
    let router = Running::start(serves.command(&["route", "--serve-uniform"]));
    client.await_status("/ready", 200);
    let ballast = small.path().join("ballast");
    fs::write(&ballast, vec![1; 200 << 10]).unwrap();
    let mut written = 0;
    for round in 0..3 {
        written += send(&client, round * 10_000, |_, rejected| rejected >= 100).0;
        fs::remove_file(&ballast).unwrap();
        written += send(&client, round * 10_000 + 5000, |written, _| written >= 5).0;
        let mut ballast = fs::File::create(&ballast).unwrap();
        while ballast.write_all(&[1; 4096]).is_ok() {}
    }
    fs::remove_file(&ballast).unwrap();
    let told = error_of(&router.stop("-TERM"));
    assert_eq!(told.lines().filter(|line| line.contains("ERROR")).count(), 1, "{told}");
    let files = query_files(&place);
    assert!(files.len() <= 6, "{files:?}");
    let lines: Vec<String> =
        files.iter().flat_map(|path| text(path).lines().map(str::to_owned).collect::<Vec<_>>()).collect();
    assert_eq!(lines.len(), written as usize);
    for line in lines {
        serde_json::from_str::<serde_json::Value>(&line).unwrap();
    }
    let learned = learner.stop("-TERM");
    assert_eq!(learned.status.code(), Some(0), "{}", error_of(&learned));
    let output = place.command(&["learn", "--once", "--json"]).output().unwrap();
    assert_eq!(json_of(&output)["queries"], written, "{}", error_of(&output));
    assert!(!error_of(&output).contains("shorter"), "{}", error_of(&output));
}

/// The same without root: no file may have more than a kilobyte, less than an event.
#[test]
fn a_router_that_cannot_write_leaves_no_litter_and_may_drop() {
    for (on_full, status) in [("reject", 503), ("drop", 200)] {
        let root = scratch();
        let place =
            Place::empty(root.path(), &VARIANTS[0]).with("learner.dim=768").with("learner.models=[\"a\", \"b\"]");
        let (serves, client) = serving(&place.with(&format!("events.on_full={on_full}")));
        let command = serves.command(&["route", "--serve-uniform"]);
        let router = Running::start(after("trap '' XFSZ; ulimit -f 1", &command));
        client.await_status("/ready", 200);
        for i in 0..50 {
            let id = format!("r{i}");
            let (found, answer) = client.json("/v1/route", &json!({"request_id": id, "query": vec![0.5; 768]}));
            assert_eq!(found, status, "{answer}");
            let reward = client.json("/v1/rewards", &json!({"request_id": id, "reward": 1}));
            assert!([202, 503].contains(&reward.0), "{reward:?}");
        }
        let outcome = if on_full == "drop" { "dropped" } else { "rejected" };
        let counted = format!("pointsman_router_events_total{{kind=\"decision\",outcome=\"{outcome}\"}} 50");
        assert!(metrics(&client).contains(&counted), "{}", metrics(&client));
        let output = router.stop("-TERM");
        let told = error_of(&output);
        assert_eq!(output.status.code(), Some(0), "{told}");
        assert_eq!(told.lines().filter(|line| line.contains("ERROR")).count(), 1, "{told}");
        assert_eq!(query_files(&place), Vec::<PathBuf>::new());
    }
}
