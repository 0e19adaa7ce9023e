//! Places where a test can make the process die, as if the power had gone.
//!
//! `POINTSMAN_FAILPOINT=name=3` aborts the third time that the place of this name is reached,
//! `POINTSMAN_FAILPOINT=panic:name=3` panics there. Only builds with debug assertions look; in a release the calls are
//! nothing.

/// Where the learner can die.
pub const NAMES: [&str; 6] =
    ["before-persist", "mid-persist", "after-persist", "before-publish", "mid-publish", "after-publish"];

/// Where the router looks for new parameters.
pub const READ_PARAMS: &str = "read-params";

/// Dies here if a test asked for it.
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
            assert!(!armed.panics, "a test asked for this panic at {name}");
            std::process::abort();
        }
    }
}
