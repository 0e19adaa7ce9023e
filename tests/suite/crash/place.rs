//! A directory with logs, a store and what is written beside; the program at work there; what it came to.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

use pointsman::wire::params;
use serde_json::Value;

use super::logs::{Logs, Split, Variant};

/// Where the program works.
#[derive(Clone)]
pub struct Place {
    /// Logs, dead letters, parameters.
    pub transport: PathBuf,
    pub store: PathBuf,
    pub audit: PathBuf,
    pub config: PathBuf,
    /// More `--set`.
    pub set: Vec<String>,
}

impl Place {
    /// A place under `root` with the logs of a variant.
    pub fn new(root: &Path, variant: &Variant, logs: &Logs, split: Split) -> Self {
        let place = Self::empty(root, variant);
        logs.write(&place.transport, split);
        place
    }

    /// A place under `root` without logs.
    pub fn empty(root: &Path, variant: &Variant) -> Self {
        let config = root.join("config.toml");
        fs::create_dir_all(root).unwrap();
        fs::write(&config, variant.config()).unwrap();
        let (transport, store, audit) = (root.join("log"), root.join("store"), root.join("audit.jsonl"));
        Self { transport, store, audit, config, set: Vec::new() }
    }

    /// The same with a key of the configuration set.
    pub fn with(&self, key_value: &str) -> Self {
        let mut place = self.clone();
        place.set.push(key_value.to_owned());
        place
    }

    /// The program, with the configuration of this place.
    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pointsman"));
        command.env("RUST_LOG", "info").env_remove("POINTSMAN_FAILPOINT");
        command.args(arguments).arg("--config").arg(&self.config);
        let places =
            [("transport.file.dir", &self.transport), ("store.dir", &self.store), ("audit.applied_log", &self.audit)];
        for (key, path) in places {
            command.arg("--set").arg(format!("{key}={}", path.display()));
        }
        // Many run at a time: none of them listens.
        command.args(["--set", "http.listen="]);
        for set in &self.set {
            command.args(["--set", set]);
        }
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// Learns to the end of the logs.
    pub fn learn_once(&self) -> Outcome {
        self.outcome(json_of(&self.command(&["learn", "--once", "--json"]).output().unwrap()))
    }

    /// What is here, with what the program said that it came to.
    pub fn outcome(&self, summary: Value) -> Outcome {
        Outcome {
            summary,
            audit: text(&self.audit).lines().map(str::to_owned).collect(),
            dead: self.dead_letters(),
            params: self
                .published()
                .into_iter()
                .map(|(space, mut params)| {
                    (params.created_ms, params.revision) = (0, 0);
                    (space, params::encode(&params))
                })
                .collect(),
        }
    }

    /// Removes all but the logs.
    pub fn wipe(&self) {
        for dir in [&self.store, &self.transport.join("params"), &self.transport.join("dead-letters")] {
            allow_missing(fs::remove_dir_all(dir));
        }
        allow_missing(fs::remove_file(&self.audit));
    }

    /// What the newest snapshot says, looked up in a copy so that opening the store mends nothing of it. `None` before
    /// there is one.
    pub fn newest_snapshot(&self) -> Option<Value> {
        if !self.store.join("format").exists() {
            return None;
        }
        let copy = scratch();
        copy_tree(&self.store, copy.path());
        let snapshots = |arguments: &[&str]| {
            let mut command = Command::new(env!("CARGO_BIN_EXE_pointsman"));
            command.arg("snapshots").args(arguments).arg("--store").arg(copy.path()).output().unwrap()
        };
        let shown = snapshots(&["show", "--json"]);
        if String::from_utf8_lossy(&shown.stderr).contains("has no snapshot yet") {
            return None;
        }
        json_of(&snapshots_verified(snapshots(&["verify"]), shown)).into()
    }

    /// Checks what a process that died has left behind: a snapshot that is whole and balanced, nothing published that it
    /// does not know of, and no line of applied requests that an uninterrupted run does not have.
    pub fn check_remains(&self, expected: &Outcome, context: &str) {
        let snapshot = self.newest_snapshot();
        if let Some(snapshot) = &snapshot {
            check_balance(snapshot, context);
        }
        for (space, params) in self.published() {
            let known = snapshot.as_ref().unwrap_or_else(|| panic!("{context}: published without a snapshot"));
            let last = &known["publications"][&space];
            let number = |value: &Value| value.as_u64().unwrap_or_else(|| panic!("{context}: {space} in {known}"));
            let known = (number(&known["epoch"]), number(&last["version"]), number(&last["revision"]));
            let published = (params.epoch, params.version, params.revision);
            assert!(published <= known, "{context}: {space} is ahead: {published:?} published, {known:?} known");
        }
        let audit = text(&self.audit);
        let whole: Vec<&str> = audit.split_inclusive('\n').filter_map(|line| line.strip_suffix('\n')).collect();
        let applied = snapshot.map_or(0, |snapshot| snapshot["applied"].as_u64().unwrap());
        assert!(whole.len() as u64 >= applied, "{context}: {} lines for {applied} applied", whole.len());
        assert!(
            expected.audit.starts_with(&whole.iter().map(|line| line.to_string()).collect::<Vec<_>>()),
            "{context}"
        );
    }

    /// Logs and offsets of the dead letters. A line that a crash has torn is skipped: it came again.
    fn dead_letters(&self) -> BTreeSet<(String, u64)> {
        let dir = self.transport.join("dead-letters");
        let files = fs::read_dir(dir).map(|entries| entries.map(|entry| entry.unwrap().path()).collect::<Vec<_>>());
        let lines: String = files.unwrap_or_default().iter().map(|path| text(path)).collect();
        let letters = lines.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        letters.map(|letter| (letter["log"].as_str().unwrap().into(), letter["offset"].as_u64().unwrap())).collect()
    }

    /// What is published, by space.
    pub fn published(&self) -> BTreeMap<String, pointsman::router::Params> {
        let Ok(entries) = fs::read_dir(self.transport.join("params")) else { return BTreeMap::new() };
        let paths = entries.map(|entry| entry.unwrap().path());
        let whole = paths.filter(|path| path.extension().is_some_and(|extension| extension == "safetensors"));
        let decode = |path: PathBuf| params::decode(&fs::read(path).unwrap()).unwrap();
        whole.map(decode).map(|params| (params.space.to_string(), params)).collect()
    }
}

fn snapshots_verified(verified: Output, shown: Output) -> Output {
    assert!(verified.status.success(), "{}", String::from_utf8_lossy(&verified.stdout));
    shown
}

/// What a run came to.
pub struct Outcome {
    pub summary: Value,
    pub audit: Vec<String>,
    pub dead: BTreeSet<(String, u64)>,
    /// Without the time and the number of publications.
    pub params: BTreeMap<String, Vec<u8>>,
}

impl Outcome {
    /// The digest of its state.
    pub fn digest(&self) -> &Value {
        &self.summary["state_digest"]
    }

    /// Checks that another run came to the same.
    pub fn check_same(&self, found: &Self, context: &str) {
        assert_eq!(found.summary, self.summary, "{context}");
        self.check_audit(found, context);
        let lost: Vec<_> = self.dead.difference(&found.dead).collect();
        let strange: Vec<_> = found.dead.difference(&self.dead).collect();
        assert!(lost.is_empty() && strange.is_empty(), "{context}: dead letters lost {lost:?}, strange {strange:?}");
        assert!(found.params == self.params, "{context}: other parameters");
    }

    /// Checks that another run has learned from the same requests in the same order.
    pub fn check_audit(&self, found: &Self, context: &str) {
        let differs = self.audit.iter().zip(&found.audit).position(|(a, b)| a != b);
        assert_eq!(
            (found.audit.len(), differs),
            (self.audit.len(), None),
            "{context}: lines of the audit, first other"
        );
    }

    /// Checks that its log had some of everything, else the comparison would show little.
    pub fn check_rich(&self) {
        for key in ["applied", "expired", "duplicates", "retired", "late", "orphaned", "dead_letters", "pending"] {
            assert!(self.summary[key].as_u64().unwrap() > 0, "{key}: {}", self.summary);
        }
        check_balance(&self.summary, "uninterrupted");
        assert_eq!(self.audit.len() as u64, self.summary["applied"].as_u64().unwrap());
        assert_eq!(self.dead.len() as u64, self.summary["dead_letters"].as_u64().unwrap());
        assert_eq!(self.params.len(), 3);
    }
}

/// Checks that every event that was read has ended in one count.
pub fn check_balance(summary: &Value, context: &str) {
    let number = |value: &Value| value.as_u64().unwrap_or_else(|| panic!("{context}: {summary}"));
    for (side, dead) in [("queries", "queries_dead"), ("rewards", "rewards_dead")] {
        let mut read = number(&summary[dead]);
        for space in summary["spaces"].as_object().unwrap().values() {
            let counts = space["join"][side].as_object().unwrap();
            // Two counts are parts of others.
            let is_outcome = |key: &str| !["read", "further", "clipped"].contains(&key);
            let outcomes: u64 = counts.iter().filter(|(key, _)| is_outcome(key)).map(|(_, count)| number(count)).sum();
            assert_eq!(outcomes, number(&counts["read"]), "{context}: {side} in {summary}");
            read += outcomes;
        }
        assert_eq!(read, number(&summary[side]), "{context}: {side} in {summary}");
    }
}

/// The JSON that a command printed, which must have succeeded.
pub fn json_of(output: &Output) -> Value {
    assert!(output.status.success(), "{:?}: {}", output.status, String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// A process that does not outlive the test.
pub struct Running(Option<Child>);

impl Running {
    pub fn start(mut command: Command) -> Self {
        Self(Some(command.spawn().unwrap()))
    }

    pub fn id(&self) -> u32 {
        self.0.as_ref().unwrap().id()
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: &str) {
        assert!(Command::new("kill").args([signal, &self.id().to_string()]).status().unwrap().success());
    }

    /// How it ended, if it has.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.0.as_mut().unwrap().try_wait().unwrap()
    }

    /// Kills it as if the power had gone; how it ended, by this or before.
    pub fn kill(mut self) -> Output {
        let mut child = self.0.take().unwrap();
        child.kill().unwrap();
        child.wait_with_output().unwrap()
    }

    /// Sends it a signal and waits until it has ended.
    pub fn stop(mut self, signal: &str) -> Output {
        self.signal(signal);
        self.0.take().unwrap().wait_with_output().unwrap()
    }

    /// Waits for something that the process does.
    pub fn wait_until(&mut self, what: &str, mut done: impl FnMut() -> bool) {
        let start = Instant::now();
        while !done() {
            if let Some(status) = self.ended() {
                let output = self.0.take().unwrap().wait_with_output().unwrap();
                panic!("{status} before {what}: {}", String::from_utf8_lossy(&output.stderr));
            }
            assert!(start.elapsed() < Duration::from_secs(120), "waited too long for {what}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(child) = &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// A directory in memory, where there is one. A process that dies loses nothing that the kernel has, so all that is
/// given up is the waiting for the disk.
pub fn scratch() -> tempfile::TempDir {
    let memory = Path::new("/dev/shm");
    if memory.is_dir() { tempfile::tempdir_in(memory).unwrap() } else { tempfile::tempdir().unwrap() }
}

/// Copies a directory with all that is in it.
pub fn copy_tree(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        let target = to.join(path.file_name().unwrap());
        if path.is_dir() {
            copy_tree(&path, &target);
        } else {
            fs::copy(&path, &target).unwrap();
        }
    }
}

/// A file's text; nothing if it is not there.
pub fn text(path: &Path) -> String {
    match fs::read(path) {
        Ok(bytes) => String::from_utf8(bytes).unwrap(),
        Err(error) if error.kind() == ErrorKind::NotFound => String::new(),
        Err(error) => panic!("{}: {error}", path.display()),
    }
}

fn allow_missing(result: std::io::Result<()>) {
    match result {
        Err(error) if error.kind() != ErrorKind::NotFound => panic!("{error}"),
        _ => {}
    }
}
