//! Failpoints: places where a test can abort the process, as a power failure would.
//!
//! `POINTSMAN_FAILPOINT=name=3` aborts when the failpoint of this name is reached for the third time,
//! `POINTSMAN_FAILPOINT=panic:name=3` panics there. Only builds with debug assertions have failpoints; in a release build
//! the calls do nothing.

/// Failpoints of the learner.
pub const NAMES: [&str; 6] =
    ["before-persist", "mid-persist", "after-persist", "before-publish", "mid-publish", "after-publish"];

/// The failpoint of the router, where it looks for new parameters.
pub const READ_PARAMS: &str = "read-params";

/// Aborts or panics here if a test has armed this failpoint.
pub fn reach(name: &str) {
    if cfg!(debug_assertions) {
        debug::reach(name);
    }
}

mod debug {
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicU64, Ordering};

    struct Armed {
        name: String,
        left: AtomicU64,
        panics: bool,
    }

    pub fn reach(name: &str) {
        static ARMED: OnceLock<Option<Armed>> = OnceLock::new();
        debug_assert!(super::NAMES.contains(&name) || name == super::READ_PARAMS);
        let armed = ARMED.get_or_init(|| {
            let wish = std::env::var("POINTSMAN_FAILPOINT").ok()?;
            let (name, times) = wish.split_once('=')?;
            let (panics, name) = (name.starts_with("panic:"), name.trim_start_matches("panic:"));
            Some(Armed { name: name.to_owned(), left: AtomicU64::new(times.parse().ok()?), panics })
        });
        if let Some(armed) = armed.as_ref().filter(|armed| armed.name == name)
            && armed.left.fetch_sub(1, Ordering::Relaxed) == 1
        {
            assert!(!armed.panics, "failpoint {name}: a test requested this panic");
            std::process::abort();
        }
    }
}
