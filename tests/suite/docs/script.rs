//! The command blocks of a page, run as a reader would run them.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::markdown::Page;
use crate::sidecar::free_port;

/// How long the blocks of one page may take.
pub const LIMIT: Duration = Duration::from_secs(120);

/// Ports that pages use, each replaced by a free one.
const PORTS: [&str; 4] = ["9464", "9465", "9466", "9467"];

/// Begins the output of a block in the log.
const MARK: char = '\u{1e}';

/// Runs the blocks of a page, in order, in one new directory; returns what went wrong.
pub fn run(page: &Page, limit: Duration) -> Option<String> {
    let ports: BTreeMap<&str, String> = PORTS.into_iter().map(|port| (port, free_port().to_string())).collect();
    let (side, here) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let script = script(page, &ports, side.path())?;
    fs::write(side.path().join("script"), script).unwrap();
    let log = side.path().join("log");
    let mut bash = Group::start(side.path(), here.path(), &log, &ports[PORTS[0]]);
    let status = bash.wait(limit);
    drop(bash);
    let told = String::from_utf8_lossy(&fs::read(log).unwrap()).into_owned();
    let last = told.rsplit(MARK).next().unwrap_or_default();
    let (line, output) = last.split_once('\n').unwrap_or((last, ""));
    match status {
        Some(Some(0)) => None,
        Some(code) => Some(format!("{}:{line}: the block ended with {code:?}:\n{output}", page.path)),
        None => Some(format!("{}:{line}: the page took more than {limit:?}:\n{output}", page.path)),
    }
}

/// All blocks of a page as one script; files are copied from `side`, where they are put. None if nothing is to be run.
fn script(page: &Page, ports: &BTreeMap<&str, String>, side: &Path) -> Option<String> {
    let with_ports = |text: &str| ports.iter().fold(text.to_owned(), |text, (from, to)| text.replace(from, to));
    let (mut script, mut runs) = ("set -euo pipefail\n".to_owned(), false);
    for block in &page.blocks {
        if let Some(file) = block.file() {
            let from = side.join(format!("file-{}", block.line));
            fs::write(&from, with_ports(&block.text)).unwrap();
            script += &format!("mkdir -p \"$(dirname '{file}')\"\ncp '{}' '{file}'\n", from.display());
        } else if block.language() == "sh" && !block.is_marked("example") {
            script += &format!("printf '{MARK}%s\\n' {}\n{}\n", block.line, with_ports(&block.text));
            runs = true;
        }
    }
    runs.then_some(script)
}

/// A shell and all that it has started, killed together.
struct Group(Child);

impl Group {
    fn start(side: &Path, here: &Path, log: &Path, port: &str) -> Self {
        let program = Path::new(env!("CARGO_BIN_EXE_pointsman"));
        let path = std::env::var("PATH").unwrap_or_default();
        let output = fs::File::create(log).unwrap();
        let mut bash = Command::new("bash");
        bash.arg(side.join("script"))
            .current_dir(here)
            .env("PATH", format!("{}:{path}", program.parent().unwrap().display()))
            .env("POINTSMAN__HTTP__LISTEN", format!("127.0.0.1:{port}"))
            .env_remove("REPO")
            .env_remove("RUST_LOG")
            .env_remove("COLUMNS")
            .stdin(Stdio::null())
            .stdout(output.try_clone().unwrap())
            .stderr(output)
            .process_group(0);
        Self(bash.spawn().unwrap())
    }

    /// The code that the shell ends with; none if it takes too long.
    fn wait(&mut self, limit: Duration) -> Option<Option<i32>> {
        let start = Instant::now();
        while start.elapsed() < limit {
            if let Some(status) = self.0.try_wait().unwrap() {
                return Some(status.code());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        None
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if let Ok(id) = i32::try_from(self.0.id()) {
            // The group outlives its leader while anything in it runs; one that is gone is no failure.
            unsafe { libc::kill(-id, libc::SIGKILL) };
        }
        let _ = self.0.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(text: &str, limit: Duration) -> String {
        run(&Page::parse("x.md", text), limit).unwrap_or_else(|| "good".to_owned())
    }

    #[test]
    fn blocks_run_in_order_and_the_one_that_fails_is_named() {
        let good = "```json file=a/b.json\n{\"port\":9464}\n```\n```sh\nx=1\nsleep 100 &\npointsman --version\n```\n\
                    ```sh example\nfalse\n```\n```text\nno command\n```\n\
                    ```sh\ntest $x = 1\ntest ! \"$(cat a/b.json)\" = '{\"port\":9\"\"464}'\n```\n";
        assert_eq!(outcome(good, LIMIT), "good");
        assert_eq!(outcome("nothing to run", LIMIT), "good");
        let bad = "```sh\necho first\n```\n\n```sh\necho second\npointsman lern\necho third\n```\n";
        let told = outcome(bad, LIMIT);
        assert!(told.starts_with("x.md:5: the block ended with Some(2):\nsecond\n"), "{told}");
        assert!(told.contains("lern") && !told.contains("first") && !told.contains("third"), "{told}");
        for bad in ["false | cat", "cat \"$REPO\"", "pointsman learn --set learner.etta=1"] {
            let told = outcome(&format!("```sh\n{bad}\n```\n"), LIMIT);
            assert!(told.contains("x.md:1: the block ended with"), "{bad}: {told}");
        }
        let slow = outcome("```sh\nsleep 60\n```\n", Duration::from_millis(200));
        assert!(slow.contains("took more than"), "{slow}");
    }
}
