//! Kafka brokers, by tests/broker: one that all tests share, and such as a test may kill.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Once, OnceLock};

use tempfile::TempDir;

use crate::tool;

/// The script at work, and what it said.
struct Process {
    /// The broker lasts as long as this one's standard input is open.
    script: Child,
    java: String,
    address: String,
    sasl_address: Option<String>,
    proxied_address: Option<String>,
}

impl Process {
    fn start(arguments: &[String], stderr: Stdio) -> Result<Self, String> {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/broker");
        let mut command = Command::new(script);
        command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(stderr);
        let mut script = command.spawn().map_err(|error| format!("tests/broker: {error}"))?;
        let mut line = String::new();
        BufReader::new(script.stdout.take().unwrap()).read_line(&mut line).unwrap();
        match *line.split_whitespace().collect::<Vec<_>>() {
            ["ready", address, "pid", java, ref rest @ ..] => {
                let of = |name: &str| rest.chunks_exact(2).find(|pair| pair[0] == name).map(|pair| pair[1].to_owned());
                let (sasl_address, proxied_address) = (of("sasl_ssl"), of("proxied"));
                let (java, address) = (java.to_owned(), address.to_owned());
                Ok(Self { script, java, address, sasl_address, proxied_address })
            }
            _ => Err(format!("tests/broker: {}: {line:?}", script.wait().unwrap())),
        }
    }
}

/// A broker of a test's own, gone with this value.
pub struct Broker {
    process: Process,
    arguments: Vec<String>,
    dir: TempDir,
}

impl Broker {
    /// Starts one with more arguments of tests/broker. Ask [`possible`] first.
    pub fn start(arguments: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut all = vec!["--dir".to_owned(), dir.path().join("broker").to_str().unwrap().to_owned()];
        all.extend(arguments.iter().map(|&argument| argument.to_owned()));
        Self { process: spawn(&dir, &all), arguments: all, dir }
    }

    /// Of the plain listener; the same after a restart.
    pub fn address(&self) -> &str {
        &self.process.address
    }

    /// Of the listener that `--tls` opens; the same after a restart.
    pub fn sasl_address(&self) -> &str {
        self.process.sasl_address.as_deref().expect("started with --tls")
    }

    /// Of the listener that `--proxied` opens: where the proxy connects to. The same after a restart.
    pub fn proxied_address(&self) -> &str {
        self.process.proxied_address.as_deref().expect("started with --proxied")
    }

    /// Kills it as if the power had gone. Its data stay.
    pub fn kill(&mut self) {
        assert!(Command::new("kill").args(["-KILL", &self.process.java]).status().unwrap().success());
        self.process.script.wait().unwrap();
    }

    /// It accepts connections and answers nothing, until [`Broker::thaw`].
    pub fn freeze(&self) {
        assert!(Command::new("kill").args(["-STOP", &self.process.java]).status().unwrap().success());
    }

    /// It answers again.
    pub fn thaw(&self) {
        assert!(Command::new("kill").args(["-CONT", &self.process.java]).status().unwrap().success());
    }

    /// Starts it again with its data, after a kill or, if it still runs, after an orderly stop.
    pub fn restart(&mut self) {
        // Closes standard input first.
        self.process.script.wait().unwrap();
        let before = (self.process.address.clone(), self.process.sasl_address.clone());
        self.process = spawn(&self.dir, &self.arguments);
        assert_eq!(before, (self.process.address.clone(), self.process.sasl_address.clone()));
    }
}

impl Drop for Broker {
    fn drop(&mut self) {
        // Closes standard input first.
        let _ = self.process.script.wait();
    }
}

fn spawn(dir: &TempDir, arguments: &[String]) -> Process {
    let told = dir.path().join("stderr");
    Process::start(arguments, File::create(&told).unwrap().into())
        .unwrap_or_else(|error| panic!("{error}\n{}", fs::read_to_string(&told).unwrap_or_default()))
}

/// The address of a broker that the tests of this run share, so each with topics and groups of its own: that of
/// `POINTSMAN_TEST_BROKERS`, else one by tests/broker, else that of docker-compose.yml; the last two end with this
/// process. `None` if there can be none.
pub fn shared() -> Option<&'static str> {
    static SHARED: OnceLock<Result<Option<String>, String>> = OnceLock::new();
    let shared = SHARED.get_or_init(|| {
        if let Ok(address) = std::env::var("POINTSMAN_TEST_BROKERS") {
            return Ok(Some(address));
        }
        if missing().is_empty() {
            let process = Process::start(&[], Stdio::inherit())?;
            let address = process.address.clone();
            std::mem::forget(process);
            return Ok(Some(address));
        }
        if let Some(address) = composed() {
            return Ok(Some(address));
        }
        possible();
        Ok(None)
    });
    shared.as_ref().unwrap_or_else(|error| panic!("{error}")).as_deref()
}

/// The address of the compose stack's broker, if an engine runs; it is stopped when this process ends.
fn composed() -> Option<String> {
    let script = "{ docker info && docker compose up --detach --wait kafka; } >&2 || exit 1
        echo ready
        cat > /dev/null
        docker compose rm --stop --force kafka >&2";
    let mut command = Command::new("sh");
    command.args(["-c", script]).current_dir(env!("CARGO_MANIFEST_DIR"));
    let mut shell = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().ok()?;
    let mut line = String::new();
    BufReader::new(shell.stdout.take()?).read_line(&mut line).ok()?;
    let ready = line.trim() == "ready";
    if ready {
        std::mem::forget(shell);
    } else {
        let _ = shell.wait();
    }
    ready.then(|| "localhost:29092".to_owned())
}

/// What is needed to start brokers and is not there.
fn missing() -> &'static [&'static str] {
    static MISSING: OnceLock<Vec<&str>> = OnceLock::new();
    MISSING.get_or_init(|| ["java", "mvn"].into_iter().filter(|name| !tool::is_there(name)).collect())
}

/// Whether brokers can be started here. If not, that is said once; in CI it is a failure.
pub fn possible() -> bool {
    static TOLD: Once = Once::new();
    let missing = missing();
    let ci = std::env::var("CI").as_deref() == Ok("true");
    assert!(missing.is_empty() || !ci, "missing: {}, for a Kafka broker", missing.join(", "));
    if !missing.is_empty() {
        TOLD.call_once(|| {
            // Not by eprintln!, which a test that passes hides.
            let _ = writeln!(
                std::io::stderr(),
                "SKIPPED: tests with a Kafka broker (no {}; tests/run --install installs Debian's)",
                missing.join(", no ")
            );
        });
    }
    missing.is_empty()
}
