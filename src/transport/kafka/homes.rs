//! Maps events to partitions by their key, as the default partitioner of Kafka producers does.
//!
//! ```text
//! key   space                                           where the space has one partition
//!       space # murmur2(request_id) mod shards          where it is spread over several
//! ```

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::ptr;

use crate::config::Settings;
use crate::event::Name;

/// The keys of events.
#[derive(Debug, Clone, Default)]
pub struct Keys {
    /// Spaces with shards, and their number of shards.
    shards: BTreeMap<Name, usize>,
}

impl Keys {
    /// With these settings.
    pub fn new(settings: &Settings) -> Self {
        Self { shards: settings.sharded() }
    }

    /// The key of an event.
    pub fn key<'a>(&self, space: &'a Name, request_id: &str) -> Cow<'a, str> {
        match self.shards.get(space) {
            Some(shards) => Cow::Owned(shard_key(space, place(request_id.as_bytes(), *shards))),
            None => Cow::Borrowed(space.as_str()),
        }
    }
}

/// The partitions of events.
#[derive(Debug, Clone)]
pub struct Spread {
    keys: Keys,
    partitions: usize,
}

impl Spread {
    /// With these settings and this number of partitions.
    pub fn new(settings: &Settings, partitions: usize) -> Self {
        Self { keys: Keys::new(settings), partitions }
    }

    /// The partition of an event.
    pub fn partition(&self, space: &Name, request_id: &str) -> i32 {
        place(self.keys.key(space, request_id).as_bytes(), self.partitions)
    }
}

fn shard_key(space: &Name, shard: i32) -> String {
    format!("{space}#{shard}")
}

/// The home partition of a space: that of its events, or of its merger if it has shards.
pub fn partition_of(space: &Name, partitions: usize) -> i32 {
    place(space.as_str().as_bytes(), partitions)
}

/// The partitions of all shards of a space.
pub fn partitions_of(space: &Name, shards: usize, partitions: usize) -> BTreeSet<i32> {
    (0..shards as i32).map(|shard| place(shard_key(space, shard).as_bytes(), partitions)).collect()
}

/// murmur2 of a key, without its sign, modulo `among`.
fn place(key: &[u8], among: usize) -> i32 {
    // SAFETY: the function reads `key.len()` bytes of the key and nothing else; it does not use the topic or the
    // opaque values.
    unsafe {
        rdkafka::bindings::rd_kafka_msg_partitioner_murmur2(
            ptr::null(),
            key.as_ptr().cast(),
            key.len(),
            among as i32,
            ptr::null_mut(),
            ptr::null_mut(),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    #[test]
    fn spaces_have_the_partitions_that_java_gives_their_keys() {
        // murmur2 of these keys, as Apache Kafka's own tests have it, without its sign bit.
        for (key, hash) in [("21", -973_932_308_i32), ("foobar", -790_332_482), ("abc", 479_470_107)] {
            let space = Name::try_from(key).unwrap();
            for partitions in [1, 3, 6, 100] {
                assert_eq!(partition_of(&space, partitions), (hash & i32::MAX) % partitions as i32, "{key}");
            }
        }
    }

    #[test]
    fn requests_of_a_spread_space_are_spread_by_their_ids() {
        let lazy = "mode = \"lazy\"\nbaseline = \"none\"";
        let text = format!("[learner]\n{lazy}\n[spaces.hot]\nshards = 3\n");
        let settings = toml::from_str::<Config>(&text).unwrap().check().unwrap();
        let (keys, spread) = (Keys::new(&settings), Spread::new(&settings, 12));
        let [hot, cold] = ["hot", "cold"].map(|name| Name::try_from(name).unwrap());
        assert_eq!(keys.key(&cold, "foobar"), "cold");
        assert_eq!(keys.key(&hot, "foobar"), format!("hot#{}", (-790_332_482_i32 & i32::MAX) % 3));
        let all = partitions_of(&hot, 3, 12);
        let found: BTreeSet<i32> = (0..100).map(|i| spread.partition(&hot, &format!("r{i}"))).collect();
        assert_eq!(found, all);
    }
}
