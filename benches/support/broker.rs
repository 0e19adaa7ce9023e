//! A Kafka broker for a benchmark, by tests/broker. Needs Java 17 and Maven.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// A broker that ends with the benchmark.
pub struct Broker {
    script: Child,
    /// Where clients connect.
    pub address: String,
}

impl Broker {
    /// Starts one.
    pub fn start() -> Self {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/broker");
        let mut script =
            Command::new(script).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("tests/broker");
        let mut line = String::new();
        BufReader::new(script.stdout.take().expect("its output")).read_line(&mut line).expect("a line");
        let address = line.split_whitespace().nth(1).expect("an address").to_owned();
        Self { script, address }
    }
}

impl Drop for Broker {
    fn drop(&mut self) {
        // Closes standard input first.
        let _ = self.script.wait();
    }
}
