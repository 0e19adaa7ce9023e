//! Generations of snapshots in a [`SnapshotStore`].
//!
//! A snapshot of a lane is a head and many records. Most records stay as they are from one snapshot to the next, so
//! each is written once, when it changes, with the snapshot that it changed in:
//!
//! ```text
//! h | lane | generation               head: number of records, sum of their checksums, payload
//! r | lane | generation | index       record: checksum, key, and its value unless it is gone from here on
//! ```
//!
//! The records of generation g are, for every key, the newest at or before g. A version is deleted once no kept generation
//! needs it, so every kept generation is complete, and a snapshot costs what has changed since the last. The head holds a
//! checksum over all of them, so a missing, extra or changed record is detected.
//!
//! Keys of the store grow with time, whatever the keys of the records, which suits ordered maps. Values larger than the
//! store permits are split into numbered parts.

use std::collections::{BTreeMap, HashMap};

use thiserror::Error;
use xxhash_rust::xxh3::{Xxh3, xxh3_128};

use super::{Batch, SnapshotStore, StoreError};

/// Snapshots of lanes.
pub struct Archive<S> {
    store: S,
    keep: usize,
    lanes: BTreeMap<String, Index>,
}

/// A change of a record: its key, and its new value unless it is gone.
pub type Change = (Vec<u8>, Option<Vec<u8>>);

/// A snapshot, read and verified.
#[derive(Debug, Clone, PartialEq)]
pub struct Snapshot {
    /// Which one.
    pub generation: u64,
    /// Its head.
    pub head: Vec<u8>,
    /// Its records, by key.
    pub records: Vec<(Vec<u8>, Vec<u8>)>,
}

/// A snapshot that fails verification.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("generation {generation} is damaged: {problem}")]
pub struct DamagedSnapshot {
    /// Which one.
    pub generation: u64,
    /// What is wrong with it.
    pub problem: String,
}

/// Index of a lane's records, so that a commit need not read.
#[derive(Default)]
struct Index {
    /// Generations with the number of parts of their heads.
    generations: BTreeMap<u64, u32>,
    /// The newest version of each key that is there, by a hash of the key.
    newest: HashMap<u128, Version>,
    /// Versions that are obsolete once no generation before this one is kept.
    superseded: BTreeMap<u64, Vec<Version>>,
    sum: u64,
}

/// A record as it was at some generation.
#[derive(Debug, Clone, Copy)]
struct Version {
    generation: u64,
    index: u32,
    parts: u32,
    checksum: u64,
}

impl<S: SnapshotStore> Archive<S> {
    /// Opens the snapshots in `store`, which keeps the newest `keep` of each lane. Recovers a damaged store: its intact
    /// snapshots are copied to a new one.
    pub fn open(store: S, keep: usize) -> Result<Self, StoreError> {
        let mut archive = Self { store, keep: keep.max(1), lanes: BTreeMap::new() };
        if archive.store.is_damaged() {
            archive.salvage()?;
        }
        Ok(archive)
    }

    /// The store itself.
    pub fn store(&self) -> &S {
        &self.store
    }

    /// The store itself, mutably.
    pub fn store_mut(&mut self) -> &mut S {
        &mut self.store
    }

    /// Unwraps the store.
    pub fn into_store(self) -> S {
        self.store
    }

    /// Lanes that have snapshots.
    pub fn lanes(&self) -> Result<Vec<String>, StoreError> {
        let mut lanes = Vec::<String>::new();
        self.store.scan(b"h", &mut |key, _| {
            let length = key.get(1..3).map_or(0, |bytes| usize::from(u16::from_be_bytes([bytes[0], bytes[1]])));
            let lane = String::from_utf8_lossy(key.get(3..3 + length).unwrap_or_default()).into_owned();
            if lanes.last() != Some(&lane) {
                lanes.push(lane);
            }
        })?;
        Ok(lanes)
    }

    /// The generations of a lane, oldest first.
    pub fn generations(&self, lane: &str) -> Result<Vec<u64>, StoreError> {
        Ok(self.heads(lane)?.into_keys().collect())
    }

    /// How many records a generation has, by its head; 0 if that is damaged.
    pub fn records(&self, lane: &str, generation: u64) -> Result<u64, StoreError> {
        Ok(self.head(lane, generation)?.map_or(0, |(count, _, _)| count))
    }

    /// Reads one generation; what is wrong with it alone is the inner error.
    pub fn read(&self, lane: &str, generation: u64) -> Result<Result<Snapshot, DamagedSnapshot>, StoreError> {
        self.read_telling(lane, generation, &mut || ())
    }

    /// The same, telling of every version of a record that is looked at: of each record there is at least one.
    pub fn read_telling(
        &self,
        lane: &str,
        generation: u64,
        tell: &mut dyn FnMut(),
    ) -> Result<Result<Snapshot, DamagedSnapshot>, StoreError> {
        let damaged = |problem: String| Ok(Err(DamagedSnapshot { generation, problem }));
        let Some((count, sum, head)) = self.head(lane, generation)? else {
            return damaged("the head does not match its checksum".to_owned());
        };
        let (mut records, mut bad) = (BTreeMap::new(), 0);
        self.versions(lane, &mut |version, record| {
            tell();
            match record {
                _ if version.generation > generation => {}
                Some((key, Some(value))) => drop(records.insert(key.to_vec(), (version.checksum, value.to_vec()))),
                Some((key, None)) => drop(records.remove(key)),
                None => bad += 1,
            }
        })?;
        let found = records.values().fold(0_u64, |sum, (checksum, _)| sum.wrapping_add(*checksum));
        if (records.len() as u64, found) != (count, sum) {
            let found = records.len();
            return damaged(format!("found {found} of {count} records; {bad} records do not match their checksums"));
        }
        let records = records.into_iter().map(|(key, (_, value))| (key, value)).collect();
        Ok(Ok(Snapshot { generation, head, records }))
    }

    /// The newest intact generation, and what damaged the later ones. The later ones are deleted.
    pub fn resume(&mut self, lane: &str) -> Result<(Option<Snapshot>, Vec<DamagedSnapshot>), StoreError> {
        let (snapshot, damaged) = self.newest(lane)?;
        if let (Some(snapshot), false) = (&snapshot, damaged.is_empty()) {
            self.rewind(lane, snapshot.generation)?;
        }
        Ok((snapshot, damaged))
    }

    /// The newest intact generation, and what damaged the later ones.
    pub fn newest(&self, lane: &str) -> Result<(Option<Snapshot>, Vec<DamagedSnapshot>), StoreError> {
        let mut damaged = Vec::new();
        for generation in self.generations(lane)?.into_iter().rev() {
            match self.read(lane, generation)? {
                Ok(snapshot) => return Ok((Some(snapshot), damaged)),
                Err(error) => damaged.push(error),
            }
        }
        Ok((None, damaged))
    }

    /// Deletes all generations after this one.
    pub fn rewind(&mut self, lane: &str, generation: u64) -> Result<(), StoreError> {
        let mut batch = Batch::default();
        for prefix in [lane_key(b'h', lane), lane_key(b'r', lane)] {
            // By the keys that are there: of what is damaged, parts may be missing.
            self.store.scan(&prefix, &mut |key, _| {
                if split_generation(key, &prefix).is_some_and(|(later, _)| later > generation) {
                    batch.deletes.push(key.to_vec());
                }
            })?;
        }
        self.lanes.remove(lane);
        if batch.deletes.is_empty() { Ok(()) } else { self.store.apply(batch) }
    }

    /// Writes the next generation: the changes since the last one, and a head. Returns its number once it is durable. The
    /// same batch deletes generations beyond the limit. Can be retried after a failure.
    pub fn commit(&mut self, lane: &str, head: &[u8], changes: impl AsRef<[Change]>) -> Result<u64, StoreError> {
        self.store.recover()?;
        let mut index = match self.lanes.remove(lane) {
            Some(index) => index,
            None => self.index(lane)?,
        };
        let generation = index.newest_generation().saturating_add(1);
        let mut batch = Batch { value_bytes_max: self.store.value_bytes_max(), ..Batch::default() };
        for (number, (key, value)) in (0_u32..).zip(changes.as_ref()) {
            let version = Version { generation, index: number, parts: 0, checksum: 0 };
            index.change(lane, version, key, value.as_deref(), &mut batch);
        }
        let head = seal_head(&at(b'h', lane, generation), index.newest.len() as u64, index.sum, head);
        let parts = batch.put_parts(&at(b'h', lane, generation), &head);
        index.generations.insert(generation, parts);
        index.prune(lane, self.keep, &mut batch);
        self.store.apply(batch)?;
        // Only now: had it failed, what the store holds would have to be looked at again.
        self.lanes.insert(lane.to_owned(), index);
        Ok(generation)
    }

    /// Copies the newest intact generation of each lane to an empty store.
    fn salvage(&mut self) -> Result<(), StoreError> {
        let mut whole = Vec::new();
        for lane in self.lanes()? {
            if let (Some(snapshot), _) = self.newest(&lane)? {
                whole.push((lane, snapshot));
            }
        }
        self.store.start_over(!whole.is_empty())?;
        for (lane, Snapshot { head, records, .. }) in whole {
            let changes: Vec<Change> = records.into_iter().map(|(key, value)| (key, Some(value))).collect();
            self.commit(&lane, &head, changes)?;
        }
        Ok(())
    }

    fn index(&mut self, lane: &str) -> Result<Index, StoreError> {
        let mut index = Index { generations: self.heads(lane)?, ..Index::default() };
        // Records that have lost their head must not get into the next generation.
        self.rewind(lane, index.newest_generation())?;
        self.versions(lane, &mut |version, record| match record {
            Some((key, value)) => index.note(key, version, value.is_none()),
            // No intact generation needs it.
            None => index.superseded.entry(version.generation).or_default().push(version),
        })?;
        Ok(index)
    }

    /// The head of a generation: number of its records, sum of their checksums, payload; `None` if it is damaged.
    fn head(&self, lane: &str, generation: u64) -> Result<Option<(u64, u64, Vec<u8>)>, StoreError> {
        let (place, mut head) = (at(b'h', lane, generation), Vec::new());
        self.store.scan(&place, &mut |_, part| head.extend_from_slice(part))?;
        Ok(open_head(&place, &head))
    }

    fn heads(&self, lane: &str) -> Result<BTreeMap<u64, u32>, StoreError> {
        let prefix = lane_key(b'h', lane);
        let mut heads = BTreeMap::new();
        self.store.scan(&prefix, &mut |key, _| {
            if let Some((generation, _)) = split_generation(key, &prefix) {
                *heads.entry(generation).or_default() += 1;
            }
        })?;
        Ok(heads)
    }

    /// Calls `each` with every version of every record, oldest first: its key and its value unless it is gone, or nothing
    /// if it is damaged.
    fn versions(&self, lane: &str, each: &mut dyn FnMut(Version, Option<RecordView<'_>>)) -> Result<(), StoreError> {
        let prefix = lane_key(b'r', lane);
        let mut current: Option<(Version, Vec<u8>)> = None;
        let mut end = |current: Option<(Version, Vec<u8>)>| {
            if let Some((version, blob)) = current {
                let opened = open_blob(&version.key(lane), &blob);
                let checksum = opened.map_or(0, |(checksum, _)| checksum);
                each(Version { checksum, ..version }, opened.and_then(|(_, record)| open_record(record)));
            }
        };
        self.store.scan(&prefix, &mut |key, part| {
            let Some((generation, index)) = split_place(key, &prefix) else { return };
            match &mut current {
                Some((version, blob)) if (version.generation, version.index) == (generation, index) => {
                    version.parts += 1;
                    blob.extend_from_slice(part);
                }
                _ => {
                    let next = (Version { generation, index, parts: 1, checksum: 0 }, part.to_vec());
                    end(current.replace(next));
                }
            }
        })?;
        end(current);
        Ok(())
    }
}

/// The head that an entry of a store holds; `None` if it holds something else, or only a part of one.
pub fn head_of(key: &[u8], value: &[u8]) -> Option<Vec<u8>> {
    let place = key.strip_suffix(&0_u32.to_be_bytes()).filter(|place| place.starts_with(b"h"))?;
    open_head(place, value).map(|(_, _, head)| head)
}

/// What has to change for the records of one snapshot to become those of another, both by key.
pub fn difference(from: &[(Vec<u8>, Vec<u8>)], to: &[(Vec<u8>, Vec<u8>)]) -> Vec<Change> {
    let of = |records: &[(Vec<u8>, Vec<u8>)]| records.iter().cloned().collect::<BTreeMap<_, _>>();
    let (before, after) = (of(from), of(to));
    let gone = before.keys().filter(|key| !after.contains_key(*key)).map(|key| (key.clone(), None));
    let new = after.iter().filter(|(key, value)| before.get(*key) != Some(value));
    gone.chain(new.map(|(key, value)| (key.clone(), Some(value.clone())))).collect()
}

/// A record's key, and its value unless it is gone.
type RecordView<'a> = (&'a [u8], Option<&'a [u8]>);

impl Version {
    fn key(&self, lane: &str) -> Vec<u8> {
        let mut key = at(b'r', lane, self.generation);
        key.extend_from_slice(&self.index.to_be_bytes());
        key
    }
}

impl Index {
    /// 0 if there is none.
    fn newest_generation(&self) -> u64 {
        self.generations.last_key_value().map_or(0, |(newest, _)| *newest)
    }

    fn change(&mut self, lane: &str, version: Version, key: &[u8], value: Option<&[u8]>, batch: &mut Batch) {
        if value.is_none() && !self.newest.contains_key(&xxh3_128(key)) {
            return;
        }
        let place = version.key(lane);
        let (checksum, blob) = seal_blob(&place, &seal_record(key, value));
        let parts = batch.put_parts(&place, &blob);
        self.note(key, Version { parts, checksum, ..version }, value.is_none());
    }

    /// Takes a version as the newest of its key; `gone` if it says that the record is no more.
    fn note(&mut self, key: &[u8], version: Version, gone: bool) {
        let hash = xxh3_128(key);
        let before = if gone { self.newest.remove(&hash) } else { self.newest.insert(hash, version) };
        let useless = self.superseded.entry(version.generation).or_default();
        if let Some(before) = before {
            self.sum = self.sum.wrapping_sub(before.checksum);
            useless.push(before);
        }
        if gone {
            useless.push(version);
        } else {
            self.sum = self.sum.wrapping_add(version.checksum);
        }
    }

    fn prune(&mut self, lane: &str, keep: usize, batch: &mut Batch) {
        while self.generations.len() > keep
            && let Some((generation, parts)) = self.generations.pop_first()
        {
            batch.delete_parts(&at(b'h', lane, generation), parts);
        }
        let Some((&oldest, _)) = self.generations.first_key_value() else { return };
        let newest = self.newest_generation();
        let needed = self.superseded.split_off(&oldest.saturating_add(1));
        for (since, useless) in std::mem::replace(&mut self.superseded, needed) {
            for version in useless {
                if version.generation < newest {
                    batch.delete_parts(&version.key(lane), version.parts);
                } else {
                    // It is in this very batch: where one generation is kept, what is gone goes with the next.
                    self.superseded.entry(since).or_default().push(version);
                }
            }
        }
    }
}

impl Batch {
    /// Puts a value in as many parts as it needs; returns their number.
    fn put_parts(&mut self, key: &[u8], value: &[u8]) -> u32 {
        let before = self.puts.len();
        let parts = (0_u32..).zip(value.chunks(self.value_bytes_max));
        self.puts.extend(parts.map(|(i, part)| (part_key(key, i), part.to_vec())));
        (self.puts.len() - before) as u32
    }

    fn delete_parts(&mut self, key: &[u8], parts: u32) {
        self.deletes.extend((0..parts).map(|i| part_key(key, i)));
    }
}

fn lane_key(kind: u8, lane: &str) -> Vec<u8> {
    let mut key = vec![kind];
    key.extend_from_slice(&(lane.len() as u16).to_be_bytes());
    key.extend_from_slice(lane.as_bytes());
    key
}

fn at(kind: u8, lane: &str, generation: u64) -> Vec<u8> {
    let mut key = lane_key(kind, lane);
    key.extend_from_slice(&generation.to_be_bytes());
    key
}

fn part_key(key: &[u8], part: u32) -> Vec<u8> {
    let mut key = key.to_vec();
    key.extend_from_slice(&part.to_be_bytes());
    key
}

/// The generation behind a prefix, and what follows it.
fn split_generation<'a>(key: &'a [u8], prefix: &[u8]) -> Option<(u64, &'a [u8])> {
    let (generation, rest) = key.get(prefix.len()..)?.split_first_chunk::<8>()?;
    Some((u64::from_be_bytes(*generation), rest))
}

/// Generation and index of a record.
fn split_place(key: &[u8], prefix: &[u8]) -> Option<(u64, u32)> {
    let (generation, rest) = split_generation(key, prefix)?;
    let (index, _) = rest.split_first_chunk::<4>()?;
    Some((generation, u32::from_be_bytes(*index)))
}

fn seal_record(key: &[u8], value: Option<&[u8]>) -> Vec<u8> {
    let value_bytes = value.map_or(0, <[u8]>::len);
    let mut record = Vec::with_capacity(5 + key.len() + value_bytes);
    record.push(u8::from(value.is_some()));
    record.extend_from_slice(&(key.len() as u32).to_le_bytes());
    record.extend_from_slice(key);
    record.extend_from_slice(value.unwrap_or_default());
    record
}

fn open_record(record: &[u8]) -> Option<RecordView<'_>> {
    let (&there, rest) = record.split_first()?;
    let (length, rest) = rest.split_first_chunk::<4>()?;
    let (key, value) = rest.split_at_checked(u32::from_le_bytes(*length) as usize)?;
    Some((key, (there == 1).then_some(value)))
}

/// A value with the checksum of itself and its place in front.
fn seal_blob(place: &[u8], payload: &[u8]) -> (u64, Vec<u8>) {
    let checksum = checksum(place, payload);
    let mut blob = Vec::with_capacity(8 + payload.len());
    blob.extend_from_slice(&checksum.to_le_bytes());
    blob.extend_from_slice(payload);
    (checksum, blob)
}

fn open_blob<'a>(place: &[u8], blob: &'a [u8]) -> Option<(u64, &'a [u8])> {
    let (found, payload) = blob.split_first_chunk::<8>()?;
    let expected = checksum(place, payload);
    (u64::from_le_bytes(*found) == expected).then_some((expected, payload))
}

fn checksum(place: &[u8], payload: &[u8]) -> u64 {
    let mut hash = Xxh3::new();
    hash.update(place);
    hash.update(payload);
    hash.digest()
}

fn seal_head(place: &[u8], records: u64, sum: u64, head: &[u8]) -> Vec<u8> {
    let mut payload = Vec::with_capacity(16 + head.len());
    payload.extend_from_slice(&records.to_le_bytes());
    payload.extend_from_slice(&sum.to_le_bytes());
    payload.extend_from_slice(head);
    seal_blob(place, &payload).1
}

fn open_head(place: &[u8], blob: &[u8]) -> Option<(u64, u64, Vec<u8>)> {
    let (_, payload) = open_blob(place, blob)?;
    let (records, rest) = payload.split_first_chunk::<8>()?;
    let (sum, head) = rest.split_first_chunk::<8>()?;
    Some((u64::from_le_bytes(*records), u64::from_le_bytes(*sum), head.to_vec()))
}

#[cfg(test)]
mod tests {
    use super::super::Memory;
    use super::*;
    use proptest::prelude::*;
    use proptest::sample::Index as Pick;
    use std::collections::BTreeSet;

    const LANES: [&str; 3] = ["file", "files", "f"];

    type Map = BTreeMap<Vec<u8>, Vec<u8>>;

    /// What the archive should hold of a lane, in the plainest way: every kept generation in full.
    #[derive(Debug, Clone, Default)]
    struct Plain(Vec<Kept>);

    #[derive(Debug, Clone, Default)]
    struct Kept {
        generation: u64,
        head: Vec<u8>,
        /// Values, with the generation that wrote them.
        map: BTreeMap<Vec<u8>, (u64, Vec<u8>)>,
        /// Keys that went with this generation.
        gone: Vec<Vec<u8>>,
    }

    impl Kept {
        fn records(&self) -> Vec<(Vec<u8>, Vec<u8>)> {
            self.map.iter().map(|(key, (_, value))| (key.clone(), value.clone())).collect()
        }

        fn snapshot(&self) -> Snapshot {
            Snapshot { generation: self.generation, head: self.head.clone(), records: self.records() }
        }
    }

    impl Plain {
        fn commit(&mut self, head: &[u8], changes: &[Change], keep: usize) -> u64 {
            let mut next = self.0.last().cloned().unwrap_or_default();
            next.generation += 1;
            (next.head, next.gone) = (head.to_vec(), Vec::new());
            for (key, value) in changes {
                match value {
                    Some(value) => drop(next.map.insert(key.clone(), (next.generation, value.clone()))),
                    None => next.gone.extend(next.map.remove(key).map(|_| key.clone())),
                }
            }
            let generation = next.generation;
            self.0.push(next);
            self.0.drain(..self.0.len().saturating_sub(keep));
            generation
        }

        /// Entries of the store that the kept generations need: at least, and at most with what only the next commit drops.
        fn entries(&self) -> (usize, usize) {
            let parts = |bytes: usize| bytes.div_ceil(Memory::default().value_bytes_max());
            let heads: usize = self.0.iter().map(|kept| parts(24 + kept.head.len())).sum();
            let record = |key: &[u8], value: &[u8]| parts(13 + key.len() + value.len());
            let versions: BTreeMap<(u64, &[u8]), usize> = self
                .0
                .iter()
                .flat_map(|kept| &kept.map)
                .map(|(key, (since, value))| ((*since, &key[..]), record(key, value)))
                .collect();
            let gone = |kept: &Kept| kept.gone.iter().map(|key| record(key, &[])).sum::<usize>();
            let least = heads + versions.values().sum::<usize>() + self.0.iter().skip(1).map(gone).sum::<usize>();
            (least, least + if self.0.len() == 1 { gone(&self.0[0]) } else { 0 })
        }
    }

    #[test]
    fn heads_are_told_from_other_entries() {
        let mut archive = Archive::open(Memory::default(), 2).unwrap();
        for head in [&b"first"[..], b"second"] {
            archive.commit("file", head, vec![(b"k".to_vec(), Some(head.to_vec()))]).unwrap();
        }
        let entries = archive.into_store().entries;
        let heads: Vec<Vec<u8>> = entries.iter().filter_map(|(key, value)| head_of(key, value)).collect();
        assert_eq!(heads, [b"first".to_vec(), b"second".to_vec()], "in the order of generations");
    }

    #[test]
    fn differences_turn_one_state_into_another() {
        let records = |text: &[(&str, &str)]| -> Vec<(Vec<u8>, Vec<u8>)> {
            text.iter().map(|(key, value)| (key.as_bytes().to_vec(), value.as_bytes().to_vec())).collect()
        };
        let (from, to) =
            (records(&[("a", "1"), ("b", "2"), ("c", "3")]), records(&[("b", "2"), ("c", "4"), ("d", "5")]));
        let mut archive = Archive::open(Memory::default(), 1).unwrap();
        archive.commit("file", b"", difference(&[], &from)).unwrap();
        let needed = difference(&from, &to);
        assert_eq!(needed.len(), 3);
        let generation = archive.commit("file", b"", needed).unwrap();
        assert_eq!(archive.read("file", generation).unwrap().unwrap().records, to);
    }

    #[derive(Debug, Clone)]
    enum Step {
        Commit { lane: usize, head: usize, changes: Vec<(u8, Option<usize>)> },
        Reopen,
        Rewind { lane: usize, to: Pick },
    }

    fn step() -> impl Strategy<Value = Step> {
        let value = prop_oneof![3 => 0..300_usize, 1 => 0..20_000_usize, 1 => 8150..8200_usize];
        let change = (0..14_u8, prop::option::weighted(0.7, value));
        let commit = (0..LANES.len(), 0..5000_usize, prop::collection::vec(change, 0..6));
        prop_oneof![
            8 => commit.prop_map(|(lane, head, changes)| Step::Commit { lane, head, changes }),
            1 => Just(Step::Reopen),
            1 => (0..LANES.len(), any::<Pick>()).prop_map(|(lane, to)| Step::Rewind { lane, to }),
        ]
    }

    /// Bytes that differ from all others of this length.
    fn bytes(length: usize, salt: &mut u64) -> Vec<u8> {
        *salt += 1;
        salt.to_le_bytes().into_iter().cycle().take(length).collect()
    }

    /// Keys of several lengths, some the beginning of others, one empty.
    fn key(number: u8) -> Vec<u8> {
        vec![number % 3; usize::from(number / 3) * 4]
    }

    fn changes(of: &[(u8, Option<usize>)], salt: &mut u64) -> Vec<Change> {
        let last: BTreeMap<Vec<u8>, Option<usize>> =
            of.iter().map(|(number, length)| (key(*number), *length)).collect();
        last.into_iter().map(|(key, length)| (key, length.map(|length| bytes(length, salt)))).collect()
    }

    fn check(archive: &Archive<Memory>, plain: &[Plain], keep: usize) {
        let (mut least, mut most) = (0, 0);
        for (lane, plain) in LANES.into_iter().zip(plain) {
            let expected: Vec<u64> = plain.0.iter().map(|kept| kept.generation).collect();
            assert_eq!(archive.generations(lane).unwrap(), expected);
            assert!(expected.len() <= keep);
            for kept in &plain.0 {
                assert_eq!(archive.read(lane, kept.generation).unwrap().unwrap(), kept.snapshot());
            }
            let bounds = plain.entries();
            (least, most) = (least + bounds.0, most + bounds.1);
        }
        let found = archive.store().entries.len();
        assert!((least..=most).contains(&found), "{found} entries, expected {least} to {most}");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(96))]

        #[test]
        fn keeps_what_a_plain_list_of_maps_would_keep(keep in 1..5_usize, steps in prop::collection::vec(step(), 1..40)) {
            let mut archive = Archive::open(Memory::default(), keep).unwrap();
            let mut plain = vec![Plain::default(); LANES.len()];
            let mut salt = 0;
            for step in steps {
                match step {
                    Step::Commit { lane, head, changes: of } => {
                        let (head, changes) = (bytes(head, &mut salt), changes(&of, &mut salt));
                        let expected = plain[lane].commit(&head, &changes, keep);
                        assert_eq!(archive.commit(LANES[lane], &head, changes).unwrap(), expected);
                    }
                    Step::Reopen => archive = Archive::open(archive.into_store(), keep).unwrap(),
                    Step::Rewind { lane, to } => {
                        let kept = &mut plain[lane].0;
                        if !kept.is_empty() {
                            kept.truncate(to.index(kept.len()) + 1);
                            archive.rewind(LANES[lane], kept.last().unwrap().generation).unwrap();
                        }
                    }
                }
                check(&archive, &plain, keep);
            }
        }

        #[test]
        fn damage_is_noticed_and_survived(
            keep in 1..4_usize,
            commits in prop::collection::vec((0..2_usize, 0..200_usize, prop::collection::vec((0..14_u8, prop::option::weighted(0.8, 0..9000_usize)), 1..8)), 2..12),
            damage in damage(),
            after in prop::collection::vec(prop::collection::vec((0..14_u8, prop::option::weighted(0.6, 0..9000_usize)), 0..6), 1..5),
        ) {
            let mut archive = Archive::open(Memory::default(), keep).unwrap();
            let mut plain = vec![Plain::default(); 2];
            let mut salt = 0;
            for (lane, head, of) in commits {
                let (head, changes) = (bytes(head, &mut salt), changes(&of, &mut salt));
                plain[lane].commit(&head, &changes, keep);
                archive.commit(LANES[lane], &head, changes).unwrap();
            }
            let mut store = archive.into_store();
            let before = store.clone();
            damage.inflict(&mut store.entries);
            let touched = |lane: &str| {
                let of_lane = |store: &Memory| {
                    let entries = store.entries.iter().filter(|(key, _)| key[1..].starts_with(&lane_key(0, lane)[1..]));
                    entries.map(|(key, value)| (key.clone(), value.clone())).collect::<Map>()
                };
                of_lane(&store) != of_lane(&before)
            };
            let touched = LANES.map(touched);
            let mut archive = Archive::open(store, keep).unwrap();
            for (i, plain) in plain.iter_mut().enumerate() {
                let lane = LANES[i];
                let mut whole = Vec::new();
                for kept in &plain.0 {
                    match archive.read(lane, kept.generation).unwrap() {
                        Ok(snapshot) => {
                            assert_eq!(snapshot, kept.snapshot());
                            whole.push(kept.generation);
                        }
                        Err(_) => assert!(touched[i], "only what was touched is damaged"),
                    }
                }
                let listed = archive.generations(lane).unwrap();
                let (resumed, damaged) = archive.resume(lane).unwrap();
                assert_eq!(resumed.as_ref().map(|snapshot| snapshot.generation), whole.last().copied());
                if !whole.is_empty() {
                    assert_eq!(damaged.len(), listed.iter().filter(|g| **g > *whole.last().unwrap()).count());
                } else if !listed.is_empty() {
                    // Nobody goes on from here: the runner refuses.
                    continue;
                }
                plain.0.retain(|kept| Some(kept.generation) <= whole.last().copied());
                let mut current = plain.0.last().cloned().unwrap_or_default();
                for of in &after {
                    let (head, changes) = (bytes(30, &mut salt), changes(of, &mut salt));
                    let mut next = Plain(vec![current]);
                    let generation = next.commit(&head, &changes, 1);
                    current = next.0.remove(0);
                    assert_eq!(archive.commit(lane, &head, changes).unwrap(), generation);
                    assert_eq!(archive.read(lane, generation).unwrap().unwrap(), current.snapshot());
                    // Those before are as whole as they were.
                    for kept in plain.0.iter().filter(|kept| archive.generations(lane).unwrap().contains(&kept.generation)) {
                        let read = archive.read(lane, kept.generation).unwrap();
                        assert_eq!(read.is_ok(), whole.contains(&kept.generation));
                        assert!(read.is_err() || read.unwrap() == kept.snapshot());
                    }
                }
                assert!(archive.generations(lane).unwrap().len() <= keep);
            }
        }

        #[test]
        fn arbitrary_content_is_no_snapshot(
            entries in prop::collection::btree_map(strange_key(), prop::collection::vec(any::<u8>(), 0..200), 0..30),
            to in any::<u64>(),
        ) {
            let mut archive = Archive::open(Memory { entries }, 2).unwrap();
            let lanes: BTreeSet<String> = archive.lanes().unwrap().into_iter().chain(LANES.map(String::from)).collect();
            for lane in lanes {
                for generation in archive.generations(&lane).unwrap() {
                    assert!(archive.read(&lane, generation).unwrap().is_err());
                }
                assert_eq!(archive.resume(&lane).unwrap().0, None);
                let head = b"head".to_vec();
                let generation = archive.commit(&lane, &head, vec![(b"k".to_vec(), Some(b"v".to_vec()))]).unwrap();
                if generation < u64::MAX {
                    let records = vec![(b"k".to_vec(), b"v".to_vec())];
                    assert_eq!(archive.read(&lane, generation).unwrap().unwrap(), Snapshot { generation, head, records });
                }
                archive.rewind(&lane, to).unwrap();
            }
        }
    }

    /// Something that happens to a store.
    #[derive(Debug, Clone)]
    enum Damage {
        Flip(Pick, Pick, u8),
        Cut(Pick, Pick),
        Delete(Pick),
        Swap(Pick, Pick),
    }

    fn damage() -> impl Strategy<Value = Damage> {
        let pick = any::<Pick>;
        prop_oneof![
            (pick(), pick(), 0..8_u8).prop_map(|(at, byte, bit)| Damage::Flip(at, byte, bit)),
            (pick(), pick()).prop_map(|(at, length)| Damage::Cut(at, length)),
            pick().prop_map(Damage::Delete),
            (pick(), pick()).prop_map(|(a, b)| Damage::Swap(a, b)),
        ]
    }

    impl Damage {
        fn inflict(self, entries: &mut Map) {
            let keys: Vec<Vec<u8>> = entries.keys().cloned().collect();
            let key = |pick: Pick| keys[pick.index(keys.len())].clone();
            match self {
                Self::Flip(at, byte, bit) => {
                    let value = entries.get_mut(&key(at)).unwrap();
                    let byte = byte.index(value.len());
                    value[byte] ^= 1 << bit;
                }
                Self::Cut(at, length) => {
                    let value = entries.get_mut(&key(at)).unwrap();
                    value.truncate(length.index(value.len()));
                }
                Self::Delete(at) => drop(entries.remove(&key(at))),
                Self::Swap(a, b) => {
                    let (first, second) = (entries[&key(a)].clone(), entries[&key(b)].clone());
                    entries.insert(key(a), second);
                    entries.insert(key(b), first);
                }
            }
        }
    }

    /// Keys that are nearly those of an archive.
    fn strange_key() -> impl Strategy<Value = Vec<u8>> {
        let lane = prop_oneof![Just(b"\0\x04file".to_vec()), prop::collection::vec(any::<u8>(), 0..8)];
        let number = prop_oneof![Just(u64::MAX), Just(0), Just(1), Just(2), any::<u64>()];
        let end = prop::collection::vec(any::<u8>(), 0..10);
        (prop_oneof![Just(b'h'), Just(b'r'), any::<u8>()], lane, number, end).prop_map(|(kind, lane, number, end)| {
            let mut key = vec![kind];
            key.extend([lane, number.to_be_bytes().to_vec(), end].concat());
            key
        })
    }
}
