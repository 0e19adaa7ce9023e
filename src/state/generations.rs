//! The layout of a lane's generations in a [`SnapshotStore`].
//!
//! A snapshot of a lane is a head and many records. Most records do not change from one snapshot to the next, so a record is
//! written only with the snapshot in which it changed:
//!
//! ```text
//! h | lane | generation               head: number of records, sum of their checksums, payload
//! r | lane | generation | index       record: checksum, key, and its value unless this version deletes it
//! ```
//!
//! The records of generation g are, for every key, the newest version at or before g. A version is deleted once no kept
//! generation needs it, so every kept generation is complete, and a snapshot costs what has changed since the last. The head
//! holds a checksum over all records, so a missing, extra or changed record is detected.
//!
//! Keys of the store grow with time, whatever the keys of the records, which suits ordered maps. A value larger than the
//! store permits is split into numbered parts.

use std::collections::{BTreeMap, HashMap};

use xxhash_rust::xxh3::{Xxh3, xxh3_128};

use super::{Change, DamagedSnapshot, Records, Snapshot};
use crate::store::{Batch, SnapshotStore, StoreError};

/// Index of a lane's records, so that a commit need not read.
#[derive(Default)]
pub struct Index {
    /// Generations with the number of parts of their heads.
    generations: BTreeMap<u64, u32>,
    /// The newest version of each key that exists, by a hash of the key.
    newest: HashMap<u128, Version>,
    /// Versions that are obsolete once no generation before this one is kept.
    superseded: BTreeMap<u64, Vec<Version>>,
    /// Sum of the checksums of the newest versions.
    sum: u64,
    /// Keys of records that have lost their head: a crash or damage left them. The next batch deletes them.
    strays: Vec<Vec<u8>>,
}

/// A record as it was at some generation.
#[derive(Debug, Clone, Copy)]
struct Version {
    generation: u64,
    index: u32,
    parts: u32,
    checksum: u64,
}

/// A record's key, and its value unless this version deletes it.
type RecordView<'a> = (&'a [u8], Option<&'a [u8]>);

/// Records by key, with the checksums of their versions.
#[derive(Default)]
struct Gathered {
    records: BTreeMap<Vec<u8>, (u64, Vec<u8>)>,
    bad: u64,
}

/// The lanes that have snapshots in a store.
pub fn lanes(store: &impl SnapshotStore) -> Result<Vec<String>, StoreError> {
    let mut lanes = Vec::<String>::new();
    store.scan(b"h", &mut |key, _| {
        let length = key.get(1..3).map_or(0, |bytes| usize::from(u16::from_be_bytes([bytes[0], bytes[1]])));
        let lane = String::from_utf8_lossy(key.get(3..3 + length).unwrap_or_default()).into_owned();
        if lanes.last() != Some(&lane) {
            lanes.push(lane);
        }
    })?;
    Ok(lanes)
}

/// The generations of a lane, oldest first, with the number of parts of their heads.
pub fn heads(store: &impl SnapshotStore, lane: &str) -> Result<BTreeMap<u64, u32>, StoreError> {
    let prefix = lane_key(b'h', lane);
    let mut heads = BTreeMap::new();
    store.scan(&prefix, &mut |key, _| {
        if let Some((generation, _)) = split_generation(key, &prefix) {
            *heads.entry(generation).or_default() += 1;
        }
    })?;
    Ok(heads)
}

/// Reads one generation; what is wrong with it alone is the inner error.
pub fn read(
    store: &impl SnapshotStore,
    lane: &str,
    generation: u64,
) -> Result<Result<Snapshot, DamagedSnapshot>, StoreError> {
    let mut gathered = Gathered::default();
    versions(store, lane, generation, &mut |version, record| gathered.add(version, record), &mut |_| ())?;
    gathered.verify(store, lane, generation)
}

/// Reads the newest generation and the index of the lane, in one pass over the records. The snapshot is `None` if the
/// lane has no generation.
pub fn read_newest(
    store: &impl SnapshotStore,
    lane: &str,
) -> Result<(Option<Result<Snapshot, DamagedSnapshot>>, Index), StoreError> {
    let mut gathered = Gathered::default();
    let index = Index::read(store, lane, &mut |version, record| gathered.add(version, record))?;
    let newest = match index.generations.last_key_value() {
        Some((newest, _)) => Some(gathered.verify(store, lane, *newest)?),
        None => None,
    };
    Ok((newest, index))
}

/// The batch that deletes every generation after `generation` by the keys that exist: of a damaged one, parts may be missing.
pub fn rewind(store: &impl SnapshotStore, lane: &str, generation: u64) -> Result<Batch, StoreError> {
    let mut batch = Batch::default();
    for prefix in [lane_key(b'h', lane), lane_key(b'r', lane)] {
        store.scan(&prefix, &mut |key, _| {
            if split_generation(key, &prefix).is_some_and(|(later, _)| later > generation) {
                batch.deletes.push(key.to_vec());
            }
        })?;
    }
    Ok(batch)
}

/// The keys of the head of a generation.
pub fn head_keys(store: &impl SnapshotStore, lane: &str, generation: u64) -> Result<Vec<Vec<u8>>, StoreError> {
    let mut keys = Vec::new();
    store.scan(&at(b'h', lane, generation), &mut |key, _| keys.push(key.to_vec()))?;
    Ok(keys)
}

/// The head that an entry of a store holds; `None` if it holds something else, or only a part of one.
pub fn head_of(key: &[u8], value: &[u8]) -> Option<Vec<u8>> {
    let place = key.strip_suffix(&0_u32.to_be_bytes()).filter(|place| place.starts_with(b"h"))?;
    open_head(place, value).map(|(_, _, head)| head)
}

/// The changes that turn the records of one snapshot into those of another, both by key.
pub fn difference(from: &Records, to: &Records) -> Vec<Change> {
    let of = |records: &Records| records.iter().cloned().collect::<BTreeMap<_, _>>();
    let (before, after) = (of(from), of(to));
    let gone = before.keys().filter(|key| !after.contains_key(*key)).map(|key| (key.clone(), None));
    let new = after.iter().filter(|(key, value)| before.get(*key) != Some(value));
    gone.chain(new.map(|(key, value)| (key.clone(), Some(value.clone())))).collect()
}

impl Gathered {
    fn add(&mut self, version: Version, record: Option<RecordView<'_>>) {
        match record {
            Some((key, Some(value))) => {
                self.records.insert(key.to_vec(), (version.checksum, value.to_vec()));
            }
            Some((key, None)) => {
                self.records.remove(key);
            }
            None => self.bad += 1,
        }
    }

    /// Checks the records against the head of their generation.
    fn verify(
        self,
        store: &impl SnapshotStore,
        lane: &str,
        generation: u64,
    ) -> Result<Result<Snapshot, DamagedSnapshot>, StoreError> {
        let damaged = |problem: String| Ok(Err(DamagedSnapshot { generation, problem }));
        let (place, mut bytes) = (at(b'h', lane, generation), Vec::new());
        store.scan(&place, &mut |_, part| bytes.extend_from_slice(part))?;
        let Some((count, sum, head)) = open_head(&place, &bytes) else {
            return damaged("the head does not match its checksum".to_owned());
        };
        let Self { records, bad } = self;
        let found = records.values().fold(0_u64, |sum, (checksum, _)| sum.wrapping_add(*checksum));
        if (records.len() as u64, found) != (count, sum) {
            let found = records.len();
            return damaged(format!("found {found} of {count} records; {bad} records do not match their checksums"));
        }
        let records = records.into_iter().map(|(key, (_, value))| (key, value)).collect();
        Ok(Ok(Snapshot { generation, head, records }))
    }
}

impl Index {
    /// Reads the index of a lane; also calls `each` with every version.
    fn read(
        store: &impl SnapshotStore,
        lane: &str,
        each: &mut dyn FnMut(Version, Option<RecordView<'_>>),
    ) -> Result<Self, StoreError> {
        let mut index = Self { generations: heads(store, lane)?, ..Self::default() };
        let (newest, mut strays) = (index.newest_generation(), Vec::new());
        let mut note = |version: Version, record: Option<RecordView<'_>>| {
            match record {
                Some((key, value)) => index.note(key, version, value.is_none()),
                // No intact generation needs it.
                None => index.superseded.entry(version.generation).or_default().push(version),
            }
            each(version, record);
        };
        versions(store, lane, newest, &mut note, &mut |key| strays.push(key.to_vec()))?;
        index.strays = strays;
        Ok(index)
    }

    /// Adds the next generation to a batch: changes, head, and the deletion of what no kept generation needs. Its number is
    /// above `floor`.
    pub fn commit(
        &mut self,
        lane: &str,
        floor: u64,
        head: &[u8],
        changes: &[Change],
        keep: usize,
        batch: &mut Batch,
    ) -> u64 {
        let generation = self.newest_generation().max(floor).saturating_add(1);
        batch.deletes.append(&mut self.strays);
        for (number, (key, value)) in (0_u32..).zip(changes) {
            let version = Version { generation, index: number, parts: 0, checksum: 0 };
            self.change(lane, version, key, value.as_deref(), batch);
        }
        let place = at(b'h', lane, generation);
        let parts = batch.put_parts(&place, &seal_head(&place, self.newest.len() as u64, self.sum, head));
        self.generations.insert(generation, parts);
        self.prune(lane, keep, batch);
        generation
    }

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

    /// Records the newest version of a key; `deletes` if that version deletes the record.
    fn note(&mut self, key: &[u8], version: Version, deletes: bool) {
        let hash = xxh3_128(key);
        let before = if deletes { self.newest.remove(&hash) } else { self.newest.insert(hash, version) };
        let obsolete = self.superseded.entry(version.generation).or_default();
        if let Some(before) = before {
            self.sum = self.sum.wrapping_sub(before.checksum);
            obsolete.push(before);
        }
        if deletes {
            obsolete.push(version);
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
        for (since, obsolete) in std::mem::replace(&mut self.superseded, needed) {
            for version in obsolete {
                if version.generation < newest {
                    batch.delete_parts(&version.key(lane), version.parts);
                } else {
                    // It is in this very batch. If only one generation is kept, the next batch deletes it.
                    self.superseded.entry(since).or_default().push(version);
                }
            }
        }
    }
}

/// Calls `each` with every version up to generation `last`, oldest first: its key and its value unless it deletes the record,
/// or nothing if it is damaged. Calls `later` with the store's keys of later versions.
fn versions(
    store: &impl SnapshotStore,
    lane: &str,
    last: u64,
    each: &mut dyn FnMut(Version, Option<RecordView<'_>>),
    later: &mut dyn FnMut(&[u8]),
) -> Result<(), StoreError> {
    let prefix = lane_key(b'r', lane);
    let mut current: Option<(Version, Vec<u8>)> = None;
    let mut end = |current: Option<(Version, Vec<u8>)>| {
        if let Some((version, blob)) = current {
            let opened = open_blob(&version.key(lane), &blob);
            let checksum = opened.map_or(0, |(checksum, _)| checksum);
            each(Version { checksum, ..version }, opened.and_then(|(_, record)| open_record(record)));
        }
    };
    store.scan(&prefix, &mut |key, part| {
        if split_generation(key, &prefix).is_some_and(|(generation, _)| generation > last) {
            later(key);
            return;
        }
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

impl Version {
    fn key(&self, lane: &str) -> Vec<u8> {
        let mut key = at(b'r', lane, self.generation);
        key.extend_from_slice(&self.index.to_be_bytes());
        key
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
