//! The disk of an instance: a store and logs of applied requests that outlive a crash, but for what was not flushed.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex};

use super::world::{Without, World};
use crate::runner::claim::{Disk, lane_name};
use crate::state::{LaneStore, Retention};
use crate::store::{Batch, Memory, SnapshotStore, StoreError};
use crate::transport::{Lines, lock};

/// What is on the disk of an instance.
#[derive(Default)]
pub struct Contents {
    /// What a crash leaves of the store.
    durable: Memory,
    /// The store, with what is not flushed.
    visible: Memory,
    noted: BTreeMap<String, u64>,
    /// Logs of applied requests, by lane: what a crash leaves, and all.
    audits: BTreeMap<i32, Audit>,
}

#[derive(Default)]
struct Audit {
    durable: Vec<u8>,
    visible: Vec<u8>,
}

/// A disk.
#[derive(Clone)]
pub struct SimDisk {
    pub world: World,
    pub node: usize,
    pub keep: usize,
    contents: Arc<Mutex<Contents>>,
}

impl SimDisk {
    pub fn new(world: World, node: usize) -> Self {
        Self { world, node, keep: 3, contents: Arc::default() }
    }

    /// The instance has crashed: what was not flushed is gone. With `flip`, the newest snapshot is damaged too.
    pub fn crash(&self, flip: bool) {
        let mut contents = lock(&self.contents);
        let Contents { durable, visible, audits, .. } = &mut *contents;
        // With an older generation to fall back to.
        let heads = durable.entries.keys().filter(|key| key.starts_with(b"h")).count();
        if flip
            && heads > 1
            && let Some((_, head)) = durable.entries.iter_mut().rfind(|(key, _)| key.starts_with(b"h"))
        {
            let at = head.len() / 2;
            head[at] ^= 16;
            self.world.count("bit flipped");
            self.world.record(|| format!("the newest snapshot of instance {} is damaged", self.node));
        }
        visible.clone_from(durable);
        audits.values_mut().for_each(|audit| audit.visible.clone_from(&audit.durable));
    }

    /// What a restart would find in the store.
    pub fn durable(&self) -> Memory {
        lock(&self.contents).durable.clone()
    }

    /// The lines of a lane, as they are read.
    pub fn lines(&self, lane: i32) -> String {
        let contents = lock(&self.contents);
        let bytes = contents.audits.get(&lane).map_or(&[][..], |audit| &audit.visible);
        String::from_utf8_lossy(bytes).into_owned()
    }

    pub fn has_audit(&self, lane: i32) -> bool {
        lock(&self.contents).audits.contains_key(&lane)
    }

    /// Whether a write is durable once it is acknowledged.
    fn flushes(&self) -> bool {
        self.world.without() != Some(Without::Flush) || self.world.below(4) == 0
    }
}

impl Disk for SimDisk {
    type Store = SimStore;

    fn lane(&self, lane: &str) -> LaneStore<SimStore> {
        LaneStore::new(SimStore(self.clone()), lane, Retention::newest(self.keep))
    }

    fn audit(&self, lane: i32) -> Option<Box<dyn Lines>> {
        Some(Box::new(SimLines { disk: self.clone(), lane }))
    }
}

/// The store of an instance.
pub struct SimStore(SimDisk);

impl SnapshotStore for SimStore {
    fn place(&self) -> String {
        format!("the store of instance {}", self.0.node)
    }

    fn value_bytes_max(&self) -> usize {
        4096
    }

    fn scan(&self, prefix: &[u8], each: &mut dyn FnMut(&[u8], &[u8])) -> Result<(), StoreError> {
        lock(&self.0.contents).visible.scan(prefix, each)
    }

    fn apply(&mut self, batch: Batch) -> Result<(), StoreError> {
        let problem = |problem: String| StoreError::Write { path: self.place(), problem };
        self.0.world.effect(self.0.node).map_err(|error| problem(error.to_string()))?;
        if self.0.world.fails(self.0.node, "write refused") {
            return Err(problem("no space left".to_owned()));
        }
        {
            let mut contents = lock(&self.0.contents);
            contents.visible.apply(batch)?;
            if self.0.flushes() {
                contents.durable = contents.visible.clone();
            }
        }
        // Between the write and its acknowledgement.
        self.0.world.effect(self.0.node).map_err(|error| problem(error.to_string()))
    }

    fn start_over(&mut self) -> Result<(), StoreError> {
        lock(&self.0.contents).visible.start_over()
    }

    fn note_newest(&mut self, lane: &str, generation: u64) -> Result<(), StoreError> {
        lock(&self.0.contents).noted.insert(lane.to_owned(), generation);
        Ok(())
    }

    fn newest_noted(&self, lane: &str) -> Option<u64> {
        lock(&self.0.contents).noted.get(lane).copied()
    }
}

/// A log of applied requests.
struct SimLines {
    disk: SimDisk,
    lane: i32,
}

impl Lines for SimLines {
    fn append(&mut self, lines: &[u8]) -> io::Result<()> {
        let died = |error: crate::transport::kafka::cluster::Problem| io::Error::other(error.to_string());
        let SimDisk { world, node, .. } = &self.disk;
        world.effect(*node).map_err(died)?;
        if world.fails(*node, "append refused") {
            return Err(io::Error::from_raw_os_error(28));
        }
        // A crash in the middle leaves a part, and may tear a line.
        let torn = world.below(lines.len() + 1);
        let part = |bytes: &mut Contents, length: usize| {
            let audit = bytes.audits.entry(self.lane).or_default();
            audit.durable.extend_from_slice(&lines[..length]);
        };
        if let Err(error) = world.effect(*node) {
            part(&mut lock(&self.disk.contents), torn);
            world.count("torn write");
            return Err(died(error));
        }
        let flushes = self.disk.flushes();
        let mut contents = lock(&self.disk.contents);
        let audit = contents.audits.entry(self.lane).or_default();
        audit.visible.extend_from_slice(lines);
        if flushes {
            audit.durable.clone_from(&audit.visible);
        }
        Ok(())
    }

    fn cut(&mut self, bytes: u64) -> io::Result<u64> {
        let mut contents = lock(&self.disk.contents);
        let audit = contents.audits.entry(self.lane).or_default();
        let length = audit.visible.len() as u64;
        audit.visible.truncate(usize::try_from(bytes).unwrap_or(usize::MAX));
        audit.durable.clone_from(&audit.visible);
        Ok(length)
    }
}

/// The name under which an instance stores a lane.
pub fn stored(lane: i32, is_shared: bool) -> String {
    if is_shared { lane_name(lane) } else { "one".to_owned() }
}
