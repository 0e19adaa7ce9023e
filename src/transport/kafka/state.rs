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
use std::time::{Duration, Instant};

use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::KafkaError;
use rdkafka::message::Message;
use rdkafka::{ClientConfig, Offset, TopicPartitionList};

use super::client::Client;
use super::cluster::{CALL, Cluster, Plain, Problem, failed};
use super::outlet::{IfTooLarge, Outgoing};
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
    let (_, end) = cluster.watermarks(&cluster.config.topics.snapshots, lane)?;
    // The commit marker of the transaction follows the last message.
    if offset > 0 && offset + 1 >= end {
        return Ok(entries);
    }
    let from = if offset == 0 { Offset::Beginning } else { Offset::Offset(offset as i64) };
    read_from(cluster, [(lane, from)].into(), |_, key, value| note(&mut entries, key, value))?;
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
        let (mut from, mut whole) = (BTreeMap::new(), Vec::new());
        for lane in &left {
            let (low, high) = cluster.watermarks(topic, *lane)?;
            if low + back >= high {
                whole.push(*lane);
            }
            if low < high {
                from.insert(*lane, Offset::Offset(low.max(high.saturating_sub(back)) as i64));
            }
        }
        let mut tails = BTreeMap::<i32, Entries>::new();
        read_from(cluster, from, |lane, key, value| note(tails.entry(lane).or_default(), key, value))?;
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

/// Calls `each` with every committed message of partitions of the snapshots topic, up to their current ends.
fn read_from(
    cluster: &Cluster,
    from: BTreeMap<i32, Offset>,
    mut each: impl FnMut(i32, Option<&[u8]>, Option<&[u8]>),
) -> Result<(), Problem> {
    let topic = &cluster.config.topics.snapshots;
    let cannot = |error: KafkaError| failed(format!("cannot read topic {topic}"), &error);
    let (mut assignment, mut left) = (TopicPartitionList::new(), BTreeMap::new());
    for (lane, offset) in &from {
        let (low, high) = cluster.watermarks(topic, *lane)?;
        if low < high {
            assignment.add_partition_offset(topic, *lane, *offset).map_err(cannot)?;
            left.insert(*lane, high);
        }
    }
    let consumer = visitor(cluster)?;
    consumer.assign(&assignment).map_err(cannot)?;
    let mut moved = Instant::now();
    // Under constant writes of the owner, the client may never report the end of a lane.
    while !left.is_empty() {
        match consumer.poll(Duration::from_millis(200)) {
            Some(Ok(message)) => {
                let (lane, next) = (message.partition(), message.offset().max(0).unsigned_abs() + 1);
                if left.contains_key(&lane) {
                    each(lane, message.key(), message.payload());
                }
                if left.get(&lane).is_some_and(|end| next >= *end) {
                    left.remove(&lane);
                }
                moved = Instant::now();
            }
            Some(Err(KafkaError::PartitionEOF(lane))) => {
                left.remove(&lane);
                moved = Instant::now();
            }
            Some(Err(error)) => cluster.trouble.note(&error, "error while reading the snapshots topic"),
            None if moved.elapsed() > 3 * CALL => {
                let doing = format!("cannot read topic {topic} to its end");
                return Err(Problem::Transient { doing, problem: "timed out waiting for messages".to_owned() });
            }
            None => {}
        }
    }
    Ok(())
}

/// A client that tails partitions. It joins no group, though the client requires a group name.
pub fn follower(cluster: &Cluster) -> Result<Client<BaseConsumer<Plain>>, Problem> {
    Client::new(&reading(cluster), Plain(cluster.trouble.clone()))
}

/// The same for a client that reads to the end once: brokers answer at the end without waiting for more data.
pub(super) fn visitor(cluster: &Cluster) -> Result<Client<BaseConsumer<Plain>>, Problem> {
    Client::new(reading(cluster).set("fetch.wait.max.ms", "10"), Plain(cluster.trouble.clone()))
}

fn reading(cluster: &Cluster) -> ClientConfig {
    let mut settings = cluster.consumer();
    settings.set("enable.partition.eof", "true").set("auto.offset.reset", "earliest");
    settings
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
