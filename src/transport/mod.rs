//! Where events come from and where results go.

pub mod ahead;
pub mod append;
pub mod directory;
pub mod file;
pub mod kafka;
pub mod params;
pub mod writer;

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use base64::Engine as _;
use serde_json::{Value, json};

use crate::engine::DeadLetter;
use crate::event::{Name, excerpt};
use crate::merge::{MergeState, Origin, Source};

/// A log that can say where in it an event is.
pub trait Log: Source<Error = io::Error> {
    /// The place of the event that begins at `start`, in line `line`.
    fn place(&self, start: u64, line: u64) -> Value;
}

/// Where bad events and parameters go.
pub trait Outlet: Send {
    /// Keeps bad events; when it returns they are durable.
    fn dead_letters(&mut self, letters: &[Letter]) -> anyhow::Result<()>;

    /// Whether it takes parameters.
    fn publishes(&self) -> bool;

    /// Publishes the parameters of spaces; when it returns they are durable.
    fn publish(&mut self, params: &[(Name, Vec<u8>)]) -> anyhow::Result<()>;

    /// A snapshot with these positions is durable.
    fn reached(&mut self, _positions: &MergeState) {}
}

impl<T: Outlet> Outlet for Arc<Mutex<T>> {
    fn dead_letters(&mut self, letters: &[Letter]) -> anyhow::Result<()> {
        lock(self).dead_letters(letters)
    }

    fn publishes(&self) -> bool {
        lock(self).publishes()
    }

    fn publish(&mut self, params: &[(Name, Vec<u8>)]) -> anyhow::Result<()> {
        lock(self).publish(params)
    }

    fn reached(&mut self, positions: &MergeState) {
        lock(self).reached(positions);
    }
}

/// Locks what is only ever replaced, taken or added to in single steps: whoever panicked left nothing half done.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A bad event, with where it was and when it was met.
pub struct Letter {
    /// The event and what was wrong with it.
    pub letter: DeadLetter,
    /// Where it was.
    pub place: Value,
    /// What came with it.
    pub origin: Option<Box<Origin>>,
    /// When it was met, in milliseconds since 1970.
    pub time_ms: u64,
}

/// Bytes of a letter's detail: enough for what is wrong and an excerpt of the event.
const DETAIL_BYTES_MAX: usize = 512;

/// Memory that a letter takes besides its event and what came with it: mostly its place, as a JSON object.
const LETTER_MEMORY_BYTES: usize = 1024;

impl Letter {
    /// What was wrong, at a bounded length.
    pub fn detail(&self) -> String {
        excerpt(&self.letter.bad.to_string(), DETAIL_BYTES_MAX).into_owned()
    }

    /// Memory that it takes until it is durable.
    pub fn memory_bytes(&self) -> usize {
        let of_origin = |origin: &Origin| {
            origin.key.as_ref().map_or(0, Vec::len) + origin.traceparent.as_ref().map_or(0, String::len)
        };
        self.letter.bytes.len() + self.origin.as_deref().map_or(0, of_origin) + LETTER_MEMORY_BYTES
    }

    /// As a line of JSON.
    pub fn line(&self) -> String {
        let Self { letter, place, time_ms, .. } = self;
        let mut record = place.clone();
        record["reason"] = json!(letter.bad.reason());
        record["detail"] = json!(self.detail());
        record["side"] = json!(letter.side);
        record["time_ms"] = json!(time_ms);
        record["bytes"] = json!(base64::engine::general_purpose::STANDARD.encode(&letter.bytes));
        format!("{record}\n")
    }
}

/// Now, in milliseconds since 1970.
pub(crate) fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_millis() as u64)
}
