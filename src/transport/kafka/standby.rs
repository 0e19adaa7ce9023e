//! Standby copies of the lanes of other instances, so that a takeover need not read the snapshots topic from its
//! beginning.
//!
//! A thread tails the topic. It pauses lanes that this instance owns, and resumes them once they are released. A takeover
//! reads what the copy still lacks. Copies share a limit in bytes: a lane whose copy does not fit is read in full at the
//! takeover. So is one whose copy is incomplete according to the head of its state: compaction may have removed a tombstone
//! before it was read here.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use rdkafka::message::Message;

use super::cluster::{Cluster, Problem};
use super::scan::{Follower, offset_of, whole};
use super::state::{Entries, note};
use crate::transport::lock;

/// Tails the snapshots topic until it is dropped.
pub struct Standby {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    lanes: Mutex<BTreeMap<i32, Copied>>,
    stop: AtomicBool,
    bytes_max: usize,
}

/// Copy of a lane.
#[derive(Default)]
struct Copied {
    entries: Entries,
    bytes: usize,
    /// The offset after the last message read.
    next: u64,
    /// Whether this instance owns the lane: it is paused then.
    own: bool,
    /// Whether it exceeded the limit.
    dropped: bool,
}

impl Standby {
    /// Tails this many lanes, in at most `bytes_max` bytes.
    pub fn start(cluster: &Cluster, lanes: usize, bytes_max: usize) -> Result<Self, Problem> {
        let topic = &cluster.config.topics.snapshots;
        let follower = Follower::open(cluster, topic, &whole(cluster, topic, 0..lanes as i32)?)?;
        let copies = (0..lanes as i32).map(|lane| (lane, Copied::default())).collect();
        let stop = AtomicBool::new(false);
        let shared = Arc::new(Shared { lanes: Mutex::new(copies), stop, bytes_max });
        let following = Following { follower, shared: shared.clone(), paused: BTreeMap::new() };
        let thread =
            std::thread::Builder::new().name("standby".to_owned()).spawn(move || following.run()).map_err(|error| {
                Problem::Failed { doing: "cannot start the standby thread".to_owned(), problem: error.to_string() }
            })?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// The copy of a lane, if there is one, and the offset to continue from. Marks the lane as owned by this instance.
    pub fn take(&self, lane: i32) -> Option<(Entries, u64)> {
        let mut lanes = lock(&self.shared.lanes);
        let copy = lanes.get_mut(&lane)?;
        copy.own = true;
        (!copy.dropped && copy.next > 0).then(|| (copy.entries.clone(), copy.next))
    }

    /// Resumes tailing a released lane.
    pub fn give_back(&self, lane: i32) {
        if let Some(copy) = lock(&self.shared.lanes).get_mut(&lane) {
            copy.own = false;
        }
    }
}

impl Drop for Standby {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The thread.
struct Following {
    follower: Follower,
    shared: Arc<Shared>,
    /// Whether a lane is paused.
    paused: BTreeMap<i32, bool>,
}

impl Following {
    fn run(mut self) {
        while !self.shared.stop.load(Ordering::Relaxed) {
            match self.step() {
                Ok(()) => {}
                Err(problem @ Problem::Transient { .. }) => tracing::debug!(%problem, "cannot copy lanes; retrying"),
                Err(problem) => {
                    tracing::warn!(%problem, "dropped all standby copies; takeovers read the snapshots topic in full");
                    return lock(&self.shared.lanes).clear();
                }
            }
        }
    }

    fn step(&mut self) -> Result<(), Problem> {
        if let Some(message) = self.follower.poll(Duration::from_millis(50))? {
            let next = offset_of(&message) + 1;
            self.shared.take_in(message.partition(), message.key(), message.payload(), next);
        }
        self.pause_own()
    }

    fn pause_own(&mut self) -> Result<(), Problem> {
        let lanes = lock(&self.shared.lanes);
        let wanted: BTreeMap<i32, bool> = lanes.iter().map(|(lane, copy)| (*lane, copy.own || copy.dropped)).collect();
        drop(lanes);
        for (lane, pause) in wanted {
            if self.paused.insert(lane, pause).unwrap_or(false) != pause {
                self.follower.set_paused(lane, pause)?;
            }
        }
        Ok(())
    }
}

impl Shared {
    fn take_in(&self, lane: i32, key: Option<&[u8]>, value: Option<&[u8]>, next: u64) {
        let mut lanes = lock(&self.lanes);
        let all: usize = lanes.values().map(|copy| copy.bytes).sum();
        let Some(copy) = lanes.get_mut(&lane).filter(|copy| !copy.dropped) else { return };
        let before = key.and_then(|key| copy.entries.get(key)).map_or(0, Vec::len);
        let after = value.map_or(0, <[u8]>::len);
        note(&mut copy.entries, key, value);
        copy.bytes = (copy.bytes + after).saturating_sub(before);
        copy.next = next;
        if (all + after).saturating_sub(before) > self.bytes_max {
            tracing::warn!(lane, "transport.kafka.standby_bytes_max reached; dropped the standby copy of the lane");
            *copy = Copied { dropped: true, own: copy.own, ..Copied::default() };
        }
    }
}
