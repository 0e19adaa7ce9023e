//! Time, as the runtime sees it: of the system, or of a simulation.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use crate::transport::now_ms;

/// A clock. It decides when a snapshot is due and how long a retry waits, never what is learned.
pub trait Clock: Send + Sync {
    /// Time since some moment in the past. It never goes back.
    fn now(&self) -> Duration;

    /// Milliseconds since 1970.
    fn wall_ms(&self) -> u64;

    /// Waits.
    fn sleep(&self, time: Duration);
}

/// The clock of the system.
pub struct SystemClock;

impl Clock for SystemClock {
    fn now(&self) -> Duration {
        static START: OnceLock<Instant> = OnceLock::new();
        START.get_or_init(Instant::now).elapsed()
    }

    fn wall_ms(&self) -> u64 {
        now_ms()
    }

    fn sleep(&self, time: Duration) {
        std::thread::sleep(time);
    }
}
