//! Programs that tests need and that may not be there.

use std::collections::BTreeSet;
use std::io::Write;
use std::process::{Command, Stdio};
use std::sync::Mutex;

/// Whether these programs are there, for tests of `what`. If not, that is said once; in CI it is a failure.
pub fn possible(what: &'static str, programs: &[&str]) -> bool {
    static TOLD: Mutex<BTreeSet<&str>> = Mutex::new(BTreeSet::new());
    let missing: Vec<&str> = programs.iter().copied().filter(|name| !is_there(name)).collect();
    let ci = std::env::var("CI").as_deref() == Ok("true");
    assert!(missing.is_empty() || !ci, "missing: {}, for tests of {what}", missing.join(", "));
    if !missing.is_empty() && TOLD.lock().unwrap().insert(what) {
        let missing = missing.join(", no ");
        // Not by eprintln!, which a test that passes hides.
        let _ = writeln!(
            std::io::stderr(),
            "SKIPPED: tests of {what} (no {missing}; tests/run --install installs Debian's)"
        );
    }
    missing.is_empty()
}

pub fn is_there(program: &str) -> bool {
    let mut which = Command::new("sh");
    which.args(["-c", "command -v \"$0\"", program]).stdout(Stdio::null());
    which.status().is_ok_and(|status| status.success())
}
