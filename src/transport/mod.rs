//! Transports: sources of events and destinations of results.

pub mod ahead;
pub mod append;
pub mod directory;
pub mod file;
pub mod kafka;
pub mod params;
pub mod table;
pub mod writer;

use std::io;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use base64::Engine as _;
use serde::Serialize;
use serde_json::Value;

use crate::engine::{DeadLetter, Side};
use crate::event::{Name, excerpt};
use crate::merge::{Origin, Source};

/// Why a transport cannot read or write.
#[derive(Debug, thiserror::Error)]
pub enum TransportError {
    /// A file.
    #[error(transparent)]
    File(#[from] io::Error),
    /// The brokers.
    #[error(transparent)]
    Kafka(#[from] kafka::cluster::Problem),
}

/// A log that can describe the position of an event.
pub trait Log: Source<Error = TransportError> + Send {
    /// The position of the event that starts at `start`, in line `line`.
    fn place(&self, start: u64, line: u64) -> Value;
}

/// Lines that a restart may have to truncate: the log of applied requests.
pub trait Lines: Send {
    /// Appends complete lines durably, all or none. Can be retried.
    fn append(&mut self, lines: &[u8]) -> io::Result<()>;

    /// Truncates to `bytes`, if it is longer; returns the previous length.
    fn cut(&mut self, bytes: u64) -> io::Result<u64>;
}

/// Destination of dead letters and parameters.
pub trait Outlet: Send {
    /// Writes dead letters durably.
    fn dead_letters(&mut self, letters: &[Letter]) -> Result<(), TransportError>;

    /// Whether it publishes parameters.
    fn publishes(&self) -> bool;

    /// Publishes the parameters of spaces durably.
    fn publish(&mut self, params: &[(Name, Vec<u8>)]) -> Result<(), TransportError>;
}

/// Wakes threads that wait for new events.
#[derive(Debug, Default)]
pub struct Bell {
    rings: Mutex<u64>,
    changed: Condvar,
}

impl Bell {
    /// Wakes all waiting threads.
    pub fn ring(&self) {
        *lock(&self.rings) += 1;
        self.changed.notify_all();
    }

    /// Number of rings so far.
    pub fn rings(&self) -> u64 {
        *lock(&self.rings)
    }

    /// Waits until there are more rings than `seen`, or for `timeout`; returns their number.
    pub fn wait(&self, seen: u64, timeout: Duration) -> u64 {
        let waited = self.changed.wait_timeout_while(lock(&self.rings), timeout, |rings| *rings == seen);
        *waited.unwrap_or_else(PoisonError::into_inner).0
    }
}

/// Locks a value that is only replaced, taken or extended in single steps, so a panic leaves it consistent.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A dead letter with its source position and time.
pub struct Letter {
    /// The event and the reason.
    pub letter: DeadLetter,
    /// Its source position.
    pub place: Value,
    /// Metadata of its record.
    pub origin: Option<Box<Origin>>,
    /// When it was read, in milliseconds since 1970.
    pub time_ms: u64,
}

/// Maximum length of the detail: enough for the problem and an excerpt of the event.
const DETAIL_BYTES_MAX: usize = 512;

/// Memory of a letter besides its event and metadata: mostly its position, as a JSON object.
const LETTER_MEMORY_BYTES: usize = 1024;

impl Letter {
    /// The problem, truncated to a bounded length.
    pub fn detail(&self) -> String {
        excerpt(&self.letter.bad.to_string(), DETAIL_BYTES_MAX).into_owned()
    }

    /// Memory that it uses until it is durable.
    pub fn memory_bytes(&self) -> usize {
        let of_origin = |origin: &Origin| {
            origin.key.as_ref().map_or(0, Vec::len) + origin.traceparent.as_ref().map_or(0, String::len)
        };
        self.letter.bytes.len() + self.origin.as_deref().map_or(0, of_origin) + LETTER_MEMORY_BYTES
    }

    /// As a line of JSON.
    pub fn line(&self) -> String {
        let Self { letter, place, time_ms, .. } = self;
        let line = Line {
            reason: letter.bad.reason(),
            detail: &self.detail(),
            side: letter.side,
            place: place.as_object(),
            time_ms: *time_ms,
            bytes: &base64::engine::general_purpose::STANDARD.encode(&letter.bytes),
        };
        format!("{}\n", serde_json::to_string(&line).expect("text, numbers and JSON values are always JSON"))
    }
}

/// A dead letter on files. People read it: what is wrong comes first, the event last, since it may be long.
#[derive(Serialize)]
struct Line<'a> {
    reason: &'static str,
    detail: &'a str,
    side: Side,
    #[serde(flatten)]
    place: Option<&'a serde_json::Map<String, Value>>,
    time_ms: u64,
    bytes: &'a str,
}

/// Now, in milliseconds since 1970.
pub(crate) fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_millis() as u64)
}
