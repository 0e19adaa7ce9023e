//! The snapshots topic: the state of lanes, which a new owner reads.
//!
//! Lane n has partition n to itself. Its contents are those of a store on disk (see [`crate::state::generations`]): an ordered
//! map of small values, in which a snapshot costs what has changed since the last, and its head holds checksums of all of
//! it. An entry is a message, and a deleted entry is a tombstone; compaction does the rest. A snapshot is one transaction,
//! so a reader of committed messages sees all of it or nothing.
//!
//! ```text
//! format                              version of the layout
//! h | lane | generation | part        head: a `SharedHead`, with the lane's own head in it; the last of its transaction
//! r | lane | generation | index | part
//! ```
//!
//! Lanes do not share partitions because a reader of committed messages waits at the first open transaction: that of
//! another lane, whose owner has died, would hide the newest state of this one. The lane's own transaction is decided once
//! its transactional ID is taken over.

use std::collections::BTreeMap;
use std::ops::ControlFlow;

use rdkafka::message::Message;

use super::cluster::{Cluster, Problem};
use super::outlet::{IfTooLarge, Outgoing};
use super::scan::{Ranges, read_to};
use crate::snapshot::SharedHead;
use crate::state::generations;
use crate::store::{Batch, SnapshotStore, StoreError};

/// All entries of a lane in the topic.
pub type Entries = BTreeMap<Vec<u8>, Vec<u8>>;

/// Maximum size of a value: with its overhead, below the default message limit.
pub const VALUE_BYTES_MAX: usize = 512 << 10;

const FORMAT: &[u8] = b"format";
const VERSION: u16 = 1;

/// A lane's entries at the takeover, and the messages to write since.
pub struct Mirror {
    /// Dropped with the first snapshot: from then on the lane store has its index.
    entries: Entries,
    outbox: Vec<Outgoing>,
    topic: String,
    partition: i32,
}

impl Mirror {
    /// Opens the entries of partition `partition` of `topic`.
    pub fn open(topic: &str, partition: i32, entries: Entries) -> Result<Self, Problem> {
        let lane = format!("{topic}/{partition}");
        let bad = |problem: String| Problem::BadState { lane: lane.clone(), problem };
        let mut outbox = Vec::new();
        match entries.get(FORMAT) {
            None if entries.is_empty() => {
                outbox.push(message(topic, partition, FORMAT, Some(VERSION.to_string().into_bytes())))
            }
            found => {
                let text = found.map(|text| String::from_utf8_lossy(text).into_owned()).unwrap_or_default();
                match text.parse::<u16>() {
                    Ok(version) if version <= VERSION => {}
                    Ok(version) => {
                        return Err(bad(format!(
                            "it has format version {version}, but this version reads up to {VERSION}: upgrade pointsman"
                        )));
                    }
                    Err(_) => return Err(bad("it was not written by pointsman".to_owned())),
                }
            }
        }
        Ok(Self { entries, outbox, topic: topic.to_owned(), partition })
    }

    /// The messages to write; the head is the last.
    pub fn take_outbox(&mut self) -> Vec<Outgoing> {
        std::mem::take(&mut self.outbox)
    }
}

impl SnapshotStore for Mirror {
    fn place(&self) -> String {
        format!("{}/{}", self.topic, self.partition)
    }

    fn value_bytes_max(&self) -> usize {
        VALUE_BYTES_MAX
    }

    fn scan(&self, prefix: &[u8], each: &mut dyn FnMut(&[u8], &[u8])) -> Result<(), StoreError> {
        let from = self.entries.range(prefix.to_vec()..);
        from.take_while(|(key, _)| key.starts_with(prefix)).for_each(|(key, value)| each(key, value));
        Ok(())
    }

    fn apply(&mut self, batch: Batch) -> Result<(), StoreError> {
        if batch.puts.is_empty() {
            // Damaged generations are given up: the others are still read.
            batch.deletes.iter().for_each(|key| drop(self.entries.remove(key)));
        } else {
            self.entries.clear();
        }
        let deletes = batch.deletes.into_iter().map(|key| (key, None));
        for (key, value) in deletes.chain(batch.puts.into_iter().map(|(key, value)| (key, Some(value)))) {
            self.outbox.push(message(&self.topic, self.partition, &key, value));
        }
        Ok(())
    }

    fn start_over(&mut self) -> Result<(), StoreError> {
        self.entries.clear();
        Ok(())
    }
}

fn message(topic: &str, partition: i32, key: &[u8], value: Option<Vec<u8>>) -> Outgoing {
    Outgoing {
        topic: topic.to_owned(),
        partition: Some(partition),
        key: key.to_vec(),
        value,
        headers: Vec::new(),
        if_too_large: IfTooLarge::Fail,
    }
}

/// Applies a message to the entries of its partition.
pub fn note(entries: &mut Entries, key: Option<&[u8]>, value: Option<&[u8]>) {
    match (key, value) {
        (Some(key), Some(value)) => drop(entries.insert(key.to_vec(), value.to_vec())),
        (Some(key), None) => drop(entries.remove(key)),
        // Not written by Pointsman.
        (None, _) => {}
    }
}

/// All committed entries of a lane up to its current end, where `entries` are those before `offset`.
pub fn read(cluster: &Cluster, lane: i32, mut entries: Entries, offset: u64) -> Result<Entries, Problem> {
    let topic = &cluster.config.topics.snapshots;
    let (low, end) = cluster.watermarks(topic, lane)?;
    // The commit marker of the transaction follows the last message.
    if offset > 0 && offset + 1 >= end {
        return Ok(entries);
    }
    read_to(cluster, topic, [(lane, offset.max(low)..end)].into(), |_, message| {
        note(&mut entries, message.key(), message.payload());
        ControlFlow::<()>::Continue(())
    })?;
    Ok(entries)
}

/// The newest heads of lanes that have one.
pub fn heads(cluster: &Cluster, lanes: &[i32]) -> Result<BTreeMap<i32, SharedHead>, Problem> {
    let topic = &cluster.config.topics.snapshots;
    let mut heads = BTreeMap::new();
    // A head is the last message of its transaction. Messages of aborted transactions may follow it.
    let mut back = 64;
    let mut left = lanes.to_vec();
    while !left.is_empty() {
        let (mut ranges, mut whole) = (Ranges::new(), Vec::new());
        for lane in &left {
            let (low, high) = cluster.watermarks(topic, *lane)?;
            if low + back >= high {
                whole.push(*lane);
            }
            ranges.insert(*lane, low.max(high.saturating_sub(back))..high);
        }
        let mut tails = BTreeMap::<i32, Entries>::new();
        read_to(cluster, topic, ranges, |_, message| {
            note(tails.entry(message.partition()).or_default(), message.key(), message.payload());
            ControlFlow::<()>::Continue(())
        })?;
        for (lane, entries) in tails {
            let newest = entries.iter().filter_map(|(key, value)| generations::head_of(key, value)).next_back();
            if let Some(head) = newest {
                let bad = |problem: String| Problem::BadState { lane: format!("{topic}/{lane}"), problem };
                heads.insert(lane, SharedHead::open(&head).map_err(|error| bad(error.to_string()))?);
            }
        }
        left.retain(|lane| !heads.contains_key(lane) && !whole.contains(lane));
        back *= 16;
    }
    Ok(heads)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::{LaneStore, Retention};

    /// Applies what a mirror writes, as the topic would.
    fn write(entries: &mut Entries, lane: &mut LaneStore<Mirror>) {
        for message in lane.store_mut().take_outbox() {
            note(entries, Some(&message.key), message.value.as_deref());
        }
    }

    fn open(entries: &Entries) -> LaneStore<Mirror> {
        LaneStore::new(Mirror::open("snapshots", 5, entries.clone()).unwrap(), "partition-5", Retention::newest(2))
    }

    #[test]
    fn a_lane_continues_before_a_damaged_generation() {
        let mut entries = Entries::new();
        let mut lane = open(&entries);
        let put = |key: u8, value: u8| (vec![key], Some(vec![value]));
        lane.commit(b"first", &[put(1, 1), put(2, 2)]).unwrap();
        lane.commit(b"second", &[put(1, 3)]).unwrap();
        write(&mut entries, &mut lane);
        let head = entries.iter().rfind(|(key, _)| key.starts_with(b"h")).unwrap().0.clone();
        entries.get_mut(&head).unwrap()[25] ^= 1;
        let mut lane = open(&entries);
        let resumed = lane.resume().unwrap();
        assert_eq!((resumed.damaged.len(), resumed.snapshot.unwrap().head), (1, b"first".to_vec()));
        lane.commit(b"third", &[put(3, 4)]).unwrap();
        write(&mut entries, &mut lane);
        let newest = open(&entries).newest().unwrap().snapshot.unwrap();
        assert_eq!(newest.records, [(vec![1], vec![1]), (vec![2], vec![2]), (vec![3], vec![4])]);
    }
}
