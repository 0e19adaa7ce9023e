//! Reads partitions of one topic without a group: up to given offsets ([`read_to`]), or as they grow ([`Follower`]).
//!
//! Both have one policy for errors. The client recovers from transient errors, so these are only noted. A permanent error is
//! returned. A read that has not reached its end and receives nothing for 30 seconds fails with [`Problem::Transient`], so
//! that callers retry.

use std::collections::BTreeMap;
use std::ops::{ControlFlow, Range};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::{BorrowedMessage, Message};
use rdkafka::{Offset, TopicPartitionList};

use super::client::Client;
use super::cluster::{CALL, Cluster, Plain, Problem, Trouble, failed, is_lasting, lasting};

/// Offsets to read, by partition.
pub type Ranges = BTreeMap<i32, Range<u64>>;

/// Longest wait for the next message before the end.
const STALLED: Duration = Duration::from_secs(3 * CALL.as_secs());

/// Poll timeout of a read to an offset.
const WAIT: Duration = Duration::from_millis(200);

/// All offsets that these partitions of a topic have now.
pub fn whole(cluster: &Cluster, topic: &str, partitions: impl IntoIterator<Item = i32>) -> Result<Ranges, Problem> {
    let range = |(low, high)| low..high;
    partitions.into_iter().map(|n| Ok((n, range(cluster.watermarks(topic, n)?)))).collect()
}

/// The offset of a message.
pub fn offset_of(message: &BorrowedMessage<'_>) -> u64 {
    message.offset().max(0).unsigned_abs()
}

/// Calls `each` with the offset and the message of every committed message in `ranges`, in the order of each partition.
/// Returns the value with which `each` breaks, if it does.
///
/// Fails if the first offset of a range is gone.
pub fn read_to<B>(
    cluster: &Cluster,
    topic: &str,
    ranges: Ranges,
    mut each: impl FnMut(u64, &BorrowedMessage<'_>) -> ControlFlow<B>,
) -> Result<Option<B>, Problem> {
    let ranges: Ranges = ranges.into_iter().filter(|(_, range)| !range.is_empty()).collect();
    if ranges.is_empty() {
        return Ok(None);
    }
    // Brokers answer at the end of a partition without waiting for more data.
    let settings = [("auto.offset.reset", "error"), ("fetch.wait.max.ms", "10")];
    let mut follower = Follower::with(cluster, topic, &ranges, &settings)?;
    while !follower.caught_up() {
        let partition = {
            let Some(message) = follower.poll(WAIT)? else { continue };
            let (partition, offset) = (message.partition(), offset_of(&message));
            if ranges.get(&partition).is_some_and(|range| range.contains(&offset))
                && let ControlFlow::Break(value) = each(offset, &message)
            {
                return Ok(Some(value));
            }
            partition
        };
        if !follower.behind.0.contains_key(&partition) {
            // Messages after the end would be discarded.
            follower.set_paused(partition, true)?;
        }
    }
    Ok(None)
}

/// Tails partitions from given offsets. If an offset no longer exists, it continues from the oldest message.
pub struct Follower {
    consumer: Client<BaseConsumer<Plain>>,
    trouble: Arc<Trouble>,
    topic: String,
    behind: Behind,
    /// Time spent polling since the last message or end of a partition.
    waited: Duration,
    /// The last error in that time.
    last: Option<KafkaError>,
}

impl Follower {
    /// Reads from the starts of these ranges. It has caught up once it has reached their ends.
    pub fn open(cluster: &Cluster, topic: &str, ranges: &Ranges) -> Result<Self, Problem> {
        Self::with(cluster, topic, ranges, &[("auto.offset.reset", "earliest")])
    }

    fn with(cluster: &Cluster, topic: &str, ranges: &Ranges, settings: &[(&str, &str)]) -> Result<Self, Problem> {
        // No group is joined, though the client requires a group name.
        let mut all = cluster.consumer();
        // Offsets have gaps, so the last message does not show the end.
        all.set("enable.partition.eof", "true");
        all.extend(settings.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())));
        let consumer: Client<BaseConsumer<Plain>> = Client::new(&all, Plain(cluster.trouble.clone()))?;
        let mut assignment = TopicPartitionList::new();
        let added = ranges.iter().try_for_each(|(partition, range)| {
            assignment.add_partition_offset(topic, *partition, Offset::Offset(range.start as i64))
        });
        let assigned = added.and_then(|()| consumer.assign(&assignment));
        assigned.map_err(|error| failed(format!("cannot read topic {topic}"), &error))?;
        let (trouble, topic, behind) = (cluster.trouble.clone(), topic.to_owned(), Behind::new(ranges));
        Ok(Self { consumer, trouble, topic, behind, waited: Duration::ZERO, last: None })
    }

    /// Whether all partitions have been read to the ends of their ranges.
    pub fn caught_up(&self) -> bool {
        self.behind.0.is_empty()
    }

    /// The next message, if one arrives within `timeout`.
    pub fn poll(&mut self, timeout: Duration) -> Result<Option<BorrowedMessage<'_>>, Problem> {
        let begun = Instant::now();
        match self.consumer.poll(timeout) {
            Some(Ok(message)) => {
                self.behind.reach(message.partition(), offset_of(&message) + 1);
                (self.waited, self.last) = (Duration::ZERO, None);
                return Ok(Some(message));
            }
            Some(Err(KafkaError::PartitionEOF(partition))) => {
                self.behind.reach(partition, u64::MAX);
                (self.waited, self.last) = (Duration::ZERO, None);
            }
            // Between the look at the offsets and the read; the next look finds later ones.
            Some(Err(error)) if error.rdkafka_error_code() == Some(RDKafkaErrorCode::AutoOffsetReset) => {
                let doing = format!("cannot read topic {} from its start", self.topic);
                return Err(Problem::Transient { doing, problem: error.to_string() });
            }
            Some(Err(error)) if is_lasting(&error) => {
                return Err(lasting(&format!("reading topic {}", self.topic), &error));
            }
            Some(Err(error)) => {
                self.trouble.note(&error, &format!("error while reading topic {}: {error}", self.topic));
                self.last = Some(error);
            }
            None => {}
        }
        self.waited += begun.elapsed();
        if self.caught_up() || self.waited < STALLED {
            return Ok(None);
        }
        let last = self.last.take().map(|error| format!("; the last error was: {error}")).unwrap_or_default();
        self.waited = Duration::ZERO;
        Err(Problem::Transient {
            doing: format!("cannot read topic {} to its end", self.topic),
            problem: format!("timed out waiting for messages{last}"),
        })
    }

    /// Pauses or resumes a partition. A paused partition counts as read to its end.
    pub fn set_paused(&mut self, partition: i32, is_paused: bool) -> Result<(), Problem> {
        self.behind.reach(partition, u64::MAX);
        let mut one = TopicPartitionList::new();
        one.add_partition(&self.topic, partition);
        let done = if is_paused { self.consumer.pause(&one) } else { self.consumer.resume(&one) };
        done.map_err(|error| failed(format!("cannot pause or resume {}/{partition}", self.topic), &error))
    }
}

/// Partitions that are not yet read to their ends, with these. Under constant writes the client may never report the end of
/// a partition, so offsets count as well.
struct Behind(BTreeMap<i32, u64>);

impl Behind {
    fn new(ranges: &Ranges) -> Self {
        let behind = ranges.iter().filter(|(_, range)| !range.is_empty());
        Self(behind.map(|(partition, range)| (*partition, range.end)).collect())
    }

    /// Everything before `next` was read.
    fn reach(&mut self, partition: i32, next: u64) {
        if self.0.get(&partition).is_some_and(|end| next >= *end) {
            self.0.remove(&partition);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn partitions_are_behind_until_their_ends_are_reached() {
        const END: u64 = u64::MAX;
        let ranges: Ranges = [(0, 0..3), (1, 5..9), (2, 4..4), (3, Range { start: 7, end: 2 }), (4, 0..1)].into();
        let mut behind = Behind::new(&ranges);
        for (partition, next, left) in [
            (0, 2, &[0, 1, 4][..]),
            // An empty range is never behind, nor is a partition that is not read.
            (2, 5, &[0, 1, 4]),
            (7, END, &[0, 1, 4]),
            (0, 3, &[1, 4]),
            (0, 4, &[1, 4]),
            // The last offsets of a range need not have messages.
            (1, 8, &[1, 4]),
            (1, 12, &[4]),
            (4, END, &[]),
            (4, END, &[]),
        ] {
            behind.reach(partition, next);
            assert_eq!(behind.0.keys().copied().collect::<Vec<_>>(), left, "{partition} up to {next}");
        }
    }
}
