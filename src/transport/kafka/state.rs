//! The snapshots topic: the state of lanes, where whoever takes over a lane finds it.
//!
//! Lane n is partition n, alone. What is there is what a store on disk would hold (see [`crate::store::archive`]): an
//! ordered map of small values, in which a snapshot costs what has changed since the last, and its head vouches for all of
//! it. An entry is a message, and one that goes is a message without a value; compaction does the rest. A snapshot is one
//! transaction, so that whoever reads what is committed sees all of it or nothing.
//!
//! ```text
//! format                              version of the layout
//! h | lane | generation | part        head: a `SharedHead`, with the lane's own head in it; the last of its transaction
//! r | lane | generation | index | part
//! ```
//!
//! The partition is the lane's alone since a reader of committed messages waits at the first transaction that is still
//! open: a transaction of another lane, whose owner has died, would hide the newest state of this one. That of the lane
//! itself has been decided when its name was taken over.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::KafkaError;
use rdkafka::message::Message;
use rdkafka::{ClientConfig, Offset, TopicPartitionList};

use super::cluster::{CALL, Cluster, Plain, Problem, failed, make};
use super::outlet::{IfTooLarge, Outgoing};
use crate::snapshot::SharedHead;
use crate::store::archive::{self, Archive};
use crate::store::{Batch, SnapshotStore, StoreError};

/// All that a lane has in the topic.
pub type Entries = BTreeMap<Vec<u8>, Vec<u8>>;

/// The most bytes of a value: with what is around it, less than any topic takes.
pub const VALUE_BYTES_MAX: usize = 512 << 10;

const FORMAT: &[u8] = b"format";
const VERSION: u16 = 1;

/// A lane's part of the topic, as it was when it was taken over, and what is to be written since.
pub struct Mirror {
    /// Dropped with the first snapshot: from then on the archive knows what is there.
    entries: Entries,
    outbox: Vec<Outgoing>,
    topic: String,
    partition: i32,
}

impl Mirror {
    /// What is in partition `partition` of `topic`.
    pub fn open(topic: &str, partition: i32, entries: Entries) -> Result<Archive<Self>, Problem> {
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
                            "its format is {version}, this program reads up to {VERSION}: upgrade pointsman"
                        )));
                    }
                    Err(_) => return Err(bad("it is not what pointsman wrote".to_owned())),
                }
            }
        }
        let mirror = Self { entries, outbox, topic: topic.to_owned(), partition };
        Archive::open(mirror, 1).map_err(|error| bad(error.to_string()))
    }

    /// What is to be written; the head is the last.
    pub fn take_outbox(&mut self) -> Vec<Outgoing> {
        std::mem::take(&mut self.outbox)
    }
}

impl SnapshotStore for Mirror {
    fn value_bytes_max(&self) -> usize {
        VALUE_BYTES_MAX
    }

    fn scan(&self, prefix: &[u8], each: &mut dyn FnMut(&[u8], &[u8])) -> Result<(), StoreError> {
        let from = self.entries.range(prefix.to_vec()..);
        from.take_while(|(key, _)| key.starts_with(prefix)).for_each(|(key, value)| each(key, value));
        Ok(())
    }

    fn apply(&mut self, batch: Batch) -> Result<(), StoreError> {
        self.entries.clear();
        let deletes = batch.deletes.into_iter().map(|key| (key, None));
        for (key, value) in deletes.chain(batch.puts.into_iter().map(|(key, value)| (key, Some(value)))) {
            self.outbox.push(message(&self.topic, self.partition, &key, value));
        }
        Ok(())
    }

    fn bytes_on_disk(&self) -> Result<u64, StoreError> {
        Ok(0)
    }

    fn start_over(&mut self, _saved: bool) -> Result<(), StoreError> {
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

/// Takes a message of a partition into what is known of it.
pub fn note(entries: &mut Entries, key: Option<&[u8]>, value: Option<&[u8]>) {
    match (key, value) {
        (Some(key), Some(value)) => drop(entries.insert(key.to_vec(), value.to_vec())),
        (Some(key), None) => drop(entries.remove(key)),
        // Nobody of ours writes such.
        (None, _) => {}
    }
}

/// All that is committed of a lane, to its present end, where `entries` are what was there before `offset`.
pub fn read(cluster: &Cluster, lane: i32, mut entries: Entries, offset: u64) -> Result<Entries, Problem> {
    let (_, end) = cluster.watermarks(&cluster.config.topics.snapshots, lane)?;
    // Behind the last message there is the mark of its transaction, which is none.
    if offset > 0 && offset + 1 >= end {
        return Ok(entries);
    }
    let from = if offset == 0 { Offset::Beginning } else { Offset::Offset(offset as i64) };
    read_from(cluster, [(lane, from)].into(), |_, key, value| note(&mut entries, key, value))?;
    Ok(entries)
}

/// The newest heads of lanes; of those that have none, none.
pub fn heads(cluster: &Cluster, lanes: &[i32]) -> Result<BTreeMap<i32, SharedHead>, Problem> {
    let topic = &cluster.config.topics.snapshots;
    let mut heads = BTreeMap::new();
    // A head is the last of its transaction, behind which there may be the remains of some that were given up.
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
            let newest = entries.iter().filter_map(|(key, value)| archive::head_of(key, value)).next_back();
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

/// Calls `each` with every committed message of partitions of the snapshots topic, up to their present ends.
fn read_from(
    cluster: &Cluster,
    from: BTreeMap<i32, Offset>,
    mut each: impl FnMut(i32, Option<&[u8]>, Option<&[u8]>),
) -> Result<(), Problem> {
    let topic = &cluster.config.topics.snapshots;
    let cannot = |error: KafkaError| failed(format!("reading {topic}"), &error);
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
    // While its owner writes all the time, the client may never be at the end of a lane.
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
            Some(Err(error)) => cluster.trouble.note(&error, "while reading the snapshots"),
            None if moved.elapsed() > 3 * CALL => {
                let doing = format!("reading {topic} to its end");
                return Err(Problem::Transient { doing, problem: "nothing comes".to_owned() });
            }
            None => {}
        }
    }
    Ok(())
}

/// A client that follows partitions, in no group though it wants the name of one.
pub fn follower(cluster: &Cluster) -> Result<BaseConsumer<Plain>, Problem> {
    make(&reading(cluster), Plain(cluster.trouble.clone()))
}

/// The same, for one that reads to an end and goes: brokers do not wait for more before they say that it is there.
pub(super) fn visitor(cluster: &Cluster) -> Result<BaseConsumer<Plain>, Problem> {
    make(reading(cluster).set("fetch.wait.max.ms", "10"), Plain(cluster.trouble.clone()))
}

fn reading(cluster: &Cluster) -> ClientConfig {
    let mut settings = cluster.consumer();
    settings.set("enable.partition.eof", "true").set("auto.offset.reset", "earliest");
    settings
}
