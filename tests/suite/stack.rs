//! Router, learner and simulated traffic, as real processes on log files.

use std::fs;
use std::path::{Path, PathBuf};

use crate::sidecar::{Client, Process, free_port, write_config};

pub const WORLD: &str = "[learner]
dim = 16
models = [\"minilm\", \"bge\", \"e5\", \"gte\"]
[snapshot]
every_updates = 100
every_ms = 300
[join]
reorder_ms = 100
window_ms = 2000
early_ms = 1000
";

/// A router, a learner, and traffic.
pub struct Stack {
    /// Their ports.
    pub router: u16,
    pub learner: u16,
    dir: PathBuf,
    _processes: Vec<Process>,
}

impl Stack {
    pub fn start(dir: &Path) -> Self {
        let (router, learner) = (free_port(), free_port());
        let config = write_config(dir, router, WORLD);
        let to = format!("http://127.0.0.1:{router}");
        let listen = format!("http.listen=127.0.0.1:{learner}");
        let mut processes = vec![
            Process::start(&config, &["route", "--serve-uniform"]),
            Process::start(&config, &["learn", "--set", &listen]),
        ];
        Client::new(router).await_status("/ready", 200);
        Client::new(learner).await_status("/ready", 200);
        for (space, rate) in [("default", "120"), ("shop", "30")] {
            let load =
                ["simulate", "--to", &to, "--rate", rate, "--space", space, "--delay-ms", "300", "--loss", "0.1"];
            processes.push(Process::start(&config, &load));
        }
        Self { router, learner, dir: dir.to_owned(), _processes: processes }
    }

    /// Two events that cannot be read, one with markup in it.
    pub fn write_bad_events(&self) {
        let lines = "{\"request_id\":\"<b>x</b>\"}\nno JSON <script>\n";
        fs::write(self.dir.join("log/queries/by-hand.jsonl"), lines).unwrap();
    }
}
