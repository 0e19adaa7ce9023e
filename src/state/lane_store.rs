//! The snapshots of one lane: [`LaneStore`].

use xxhash_rust::xxh3::xxh3_64;

use super::backup::{Backup, LaneBackup};
use super::generations::{self, Index, difference};
use super::{Change, DamagedSnapshot, Retention, Snapshot, StateError};
use crate::config::Settings;
use crate::engine::Engine;
use crate::event::Name;
use crate::merge::Position;
use crate::snapshot::{LaneHead, fingerprint, next_epoch};
use crate::store::{Batch, SnapshotStore, StoreError};
use crate::wire::export::Export;
use crate::wire::records::Record;

/// The snapshots of one lane in a store.
pub struct LaneStore<S> {
    store: S,
    lane: String,
    retention: Retention,
    /// Known after the first read of all records or the first commit.
    index: Option<Index>,
    /// A durable generation that is not acknowledged yet, and the hash of its head.
    unacknowledged: Option<(u64, u64)>,
    checkpoints: Option<Vec<Checkpoint>>,
    /// Generations are numbered above this.
    floor: u64,
    /// Whether a damaged generation is an error instead of given up.
    is_strict: bool,
}

/// The newest intact generation, and the later ones, which are damaged.
#[derive(Debug, Default)]
pub struct Resumed {
    /// The newest intact generation.
    pub snapshot: Option<Snapshot>,
    /// What is wrong with the later ones, newest first.
    pub damaged: Vec<DamagedSnapshot>,
}

/// A lane that continues from a snapshot.
pub struct Restored {
    /// The engine.
    pub engine: Engine,
    /// The head of the snapshot.
    pub head: LaneHead,
    /// The snapshot's generation.
    pub generation: u64,
    /// Damaged generations that were given up.
    pub damaged: Vec<DamagedSnapshot>,
    /// The newest generation that was acknowledged, if it is later than this one: the store lost some.
    pub lost: Option<u64>,
}

/// A snapshot restored with the configuration in it.
pub struct Opened {
    /// Its generation.
    pub generation: u64,
    /// Its head.
    pub head: LaneHead,
    /// The configuration in it.
    pub settings: Settings,
    /// The engine.
    pub engine: Engine,
}

/// A checkpoint beside the map.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Checkpoint {
    /// The generation that it copies.
    pub generation: u64,
    /// When that generation was made, in milliseconds since 1970.
    pub created_ms: u64,
}

impl<S: SnapshotStore> LaneStore<S> {
    /// The snapshots of `lane` in `store`.
    pub fn new(store: S, lane: &str, retention: Retention) -> Self {
        let lane = lane.to_owned();
        Self {
            store,
            lane,
            retention,
            index: None,
            unacknowledged: None,
            checkpoints: None,
            floor: 0,
            is_strict: false,
        }
    }

    /// The same, but never gives up a damaged generation: for commands that must not repair on their own.
    pub fn strict(mut self) -> Self {
        self.is_strict = true;
        self
    }

    /// Name of the lane.
    pub fn lane(&self) -> &str {
        &self.lane
    }

    /// The store.
    pub fn store(&self) -> &S {
        &self.store
    }

    /// The store, mutably.
    pub fn store_mut(&mut self) -> &mut S {
        &mut self.store
    }

    /// Unwraps the store.
    pub fn into_store(self) -> S {
        self.store
    }

    /// Numbers the next generation above `generation`.
    pub(super) fn start_after(&mut self, generation: u64) {
        self.floor = self.floor.max(generation);
    }

    /// The generations in the map, oldest first.
    pub fn generations(&self) -> Result<Vec<u64>, StoreError> {
        Ok(generations::heads(&self.store, &self.lane)?.into_keys().collect())
    }

    /// The checkpoints of the lane, oldest first.
    pub fn checkpoints(&self) -> Result<Vec<Checkpoint>, StoreError> {
        checkpoints(&self.store, &self.lane)
    }

    /// Reads one generation, from the map or from a checkpoint.
    pub fn read(&self, generation: u64) -> Result<Snapshot, StateError> {
        let (generations, checkpoints) = (self.generations()?, self.checkpoints()?);
        if generations.contains(&generation) {
            return Ok(generations::read(&self.store, &self.lane, generation)??);
        }
        if let Some(checkpoint) = checkpoints.iter().find(|checkpoint| checkpoint.generation == generation) {
            return read_checkpoint(&self.store, &self.lane, checkpoint);
        }
        let mut all: Vec<u64> = checkpoints.iter().map(|checkpoint| checkpoint.generation).chain(generations).collect();
        all.sort_unstable();
        all.dedup();
        let existing = all.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        Err(StateError::NoGeneration { generation, existing })
    }

    /// The newest intact generation in the map, without a change to the store.
    pub fn newest(&self) -> Result<Resumed, StoreError> {
        let (snapshot, damaged) = newest(&self.store, &self.lane)?;
        Ok(Resumed { snapshot, damaged })
    }

    /// The newest intact generation, to continue from. Deletes the later ones, which are damaged, unless the lane is strict. Reads every record once
    /// unless there is damage.
    pub fn resume(&mut self) -> Result<Resumed, StoreError> {
        match generations::read_newest(&self.store, &self.lane)? {
            (None, index) => {
                self.index = Some(index);
                Ok(Resumed::default())
            }
            (Some(Ok(snapshot)), index) => {
                self.index = Some(index);
                Ok(Resumed { snapshot: Some(snapshot), damaged: Vec::new() })
            }
            (Some(Err(_)), _) => {
                let resumed = self.newest()?;
                if let (Some(damage), true) = (resumed.damaged.first(), self.is_strict) {
                    return Err(StoreError::Damaged { path: self.store.place(), problem: damage.to_string() });
                }
                if let Some(snapshot) = &resumed.snapshot {
                    let batch = generations::rewind(&self.store, &self.lane, snapshot.generation)?;
                    self.store.apply(batch)?;
                    self.index = None;
                }
                Ok(resumed)
            }
        }
    }

    /// Restores the lane from its newest intact generation; `None` if the store is new.
    pub fn restore(&mut self, settings: &Settings) -> Result<Option<Restored>, StateError> {
        let Resumed { snapshot, damaged } = self.resume()?;
        self.check_lost(snapshot.as_ref(), &damaged)?;
        let Some(snapshot) = snapshot else { return Ok(None) };
        let head = LaneHead::open(&snapshot.head)?;
        let engine = Engine::restore(settings.clone(), head.engine.clone(), snapshot.records)?;
        let lost = self.store.newest_noted(&self.lane).filter(|noted| *noted > snapshot.generation);
        Ok(Some(Restored { engine, head, generation: snapshot.generation, damaged, lost }))
    }

    /// Fails if there is no intact snapshot, although there has been one.
    pub fn check_lost(&self, found: Option<&Snapshot>, damaged: &[DamagedSnapshot]) -> Result<(), StoreError> {
        let problem = match (found, damaged.last(), self.store.newest_noted(&self.lane)) {
            (Some(_), ..) | (None, None, None) => return Ok(()),
            (None, Some(damage), _) => format!("it holds no intact snapshot ({damage})"),
            (None, None, Some(noted)) => format!("it is empty, but generation {noted} was committed to it"),
        };
        Err(StoreError::Damaged { path: self.store.place(), problem })
    }

    /// Writes the next generation: the changes since the last one, and a head. Returns its number once it is durable and
    /// acknowledged. The same batch deletes generations beyond the limit. A retry after a failure finishes what was started.
    pub fn commit(&mut self, head: &[u8], changes: &[Change]) -> Result<u64, StoreError> {
        let hash = xxh3_64(head);
        let generation = match self.unacknowledged {
            Some((generation, of)) if of == hash => generation,
            _ => self.write(head, changes)?,
        };
        self.unacknowledged = Some((generation, hash));
        self.store.note_newest(&self.lane, generation)?;
        self.unacknowledged = None;
        Ok(generation)
    }

    fn write(&mut self, head: &[u8], changes: &[Change]) -> Result<u64, StoreError> {
        self.store.recover()?;
        // Taken: after a failed write the store has to be read again.
        let mut index = match self.index.take() {
            Some(index) => index,
            None => generations::read_newest(&self.store, &self.lane)?.1,
        };
        // A number means one state, also after damaged generations were given up.
        let noted = self.store.newest_noted(&self.lane).unwrap_or(0);
        let checkpoints = self.known_checkpoints()?;
        let copied = checkpoints.iter().map(|checkpoint| checkpoint.generation).max().unwrap_or(0);
        let floor = noted.max(copied).max(self.floor);
        let mut batch = Batch { value_bytes_max: self.store.value_bytes_max(), ..Batch::default() };
        let generation = index.commit(&self.lane, floor, head, changes, self.retention.keep, &mut batch);
        self.store.apply(batch)?;
        self.index = Some(index);
        Ok(generation)
    }

    /// Copies the newest generation, made at `created_ms`, to a checkpoint if one is due, and deletes those beyond the limits.
    /// Returns the new checkpoint.
    pub fn checkpoint_if_due(&mut self, created_ms: u64) -> Result<Option<Checkpoint>, StateError> {
        let mut checkpoints = self.known_checkpoints()?.clone();
        let made_ms: Vec<u64> = checkpoints.iter().map(|checkpoint| checkpoint.created_ms).collect();
        if !self.retention.is_due(created_ms, &made_ms) {
            return Ok(None);
        }
        let Some(&generation) = self.generations()?.last() else { return Ok(None) };
        let snapshot = generations::read(&self.store, &self.lane, generation)??;
        let bytes = Backup { lanes: vec![LaneBackup::new(&self.lane, snapshot)] }.seal();
        let made = Checkpoint { generation, created_ms };
        self.store.write_checkpoint(&made.name(&self.lane), &bytes)?;
        checkpoints.push(made.clone());
        let made_ms: Vec<u64> = checkpoints.iter().map(|checkpoint| checkpoint.created_ms).collect();
        let kept = self.retention.kept(&made_ms);
        let (kept, beyond): (Vec<_>, Vec<_>) =
            checkpoints.into_iter().partition(|checkpoint| kept.contains(&checkpoint.created_ms));
        for checkpoint in beyond {
            self.store.remove_checkpoint(&checkpoint.name(&self.lane))?;
        }
        self.checkpoints = Some(kept);
        Ok(Some(made))
    }

    /// The checkpoints, listed once.
    fn known_checkpoints(&mut self) -> Result<&Vec<Checkpoint>, StoreError> {
        let checkpoints = match self.checkpoints.take() {
            Some(checkpoints) => checkpoints,
            None => self.checkpoints()?,
        };
        Ok(self.checkpoints.insert(checkpoints))
    }

    /// The newest generation that was acknowledged, if the store no longer has it.
    pub fn lost(&self) -> Result<Option<u64>, StoreError> {
        let newest = self.generations()?.last().copied();
        Ok(self.store.newest_noted(&self.lane).filter(|noted| Some(*noted) > newest))
    }

    /// Restores every generation and every checkpoint with the configuration in it, oldest first, and calls `each` with the
    /// outcome.
    pub fn verify(&self, mut each: impl FnMut(u64, Result<Opened, StateError>)) -> Result<(), StoreError> {
        for generation in self.all_generations()? {
            each(generation, self.read(generation).and_then(Opened::new));
        }
        Ok(())
    }

    /// Generations in the map and in checkpoints, oldest first.
    pub fn all_generations(&self) -> Result<Vec<u64>, StoreError> {
        let checkpoints = self.checkpoints()?;
        let mut all: Vec<u64> = checkpoints.iter().map(|checkpoint| checkpoint.generation).collect();
        all.append(&mut self.generations()?);
        all.sort_unstable();
        all.dedup();
        Ok(all)
    }

    /// Adds a generation with the state of an older one, in a new epoch.
    pub fn rollback(&mut self, to: u64) -> Result<(u64, u64), StateError> {
        let target = self.read(to)?;
        let newest = self.newest_to_change()?;
        // The target must be usable, not only intact.
        let Opened { mut head, .. } = Opened::new(target.clone())?;
        head.epoch = next_epoch(LaneHead::open(&newest.head)?.epoch.max(head.epoch));
        let generation = self.commit(&head.seal(), &difference(&newest.records, &target.records))?;
        Ok((generation, head.epoch))
    }

    /// Adds a generation with imported parameters, in a new epoch, or with other positions to read from. `settings` are those
    /// of a lane that has no snapshot yet.
    pub fn import(
        &mut self,
        settings: Settings,
        export: Option<(&Name, &Export)>,
        positions: Option<std::collections::BTreeMap<String, Position>>,
    ) -> Result<(u64, u64), StateError> {
        let (mut head, mut engine) = if self.generations()?.is_empty() {
            let head = LaneHead { configuration: fingerprint(&settings), ..LaneHead::default() };
            (head, Engine::new(settings))
        } else {
            let opened = Opened::new(self.newest_to_change()?)?;
            (opened.head, opened.engine)
        };
        if let Some((space, export)) = export {
            engine.import(space.clone(), &export.eigens, export.dim)?;
            head.epoch = next_epoch(head.epoch);
            head.publications.remove(space);
        }
        if let Some(positions) = positions {
            head.merge.positions = positions;
        }
        head.engine = engine.head();
        let generation = self.commit(&head.seal(), &engine.take_changes())?;
        Ok((generation, head.epoch))
    }

    /// Adds a generation without these spaces, in a new epoch.
    pub fn drop_spaces(&mut self, spaces: &[Name]) -> Result<(u64, u64), StateError> {
        let Opened { mut head, mut engine, .. } = Opened::new(self.newest_to_change()?)?;
        for space in spaces {
            if !engine.drop_space(space) {
                let existing: Vec<&str> = engine.names().map(Name::as_str).take(20).collect();
                let existing = if existing.is_empty() { "no spaces".to_owned() } else { existing.join(", ") };
                return Err(StateError::NoSpace { space: space.to_string(), lane: self.lane.clone(), existing });
            }
            head.publications.remove(space);
        }
        head.epoch = next_epoch(head.epoch);
        head.engine = engine.head();
        let generation = self.commit(&head.seal(), &engine.take_changes())?;
        Ok((generation, head.epoch))
    }

    /// The newest generation, which must be intact: damage must not reach the next one.
    fn newest_to_change(&mut self) -> Result<Snapshot, StateError> {
        let (newest, index) = generations::read_newest(&self.store, &self.lane)?;
        self.index = Some(index);
        match newest {
            Some(Ok(snapshot)) => Ok(snapshot),
            Some(Err(damage)) => Err(StateError::NeedsRepair { place: self.store.place(), damage }),
            None => Err(StateError::Empty(self.store.place())),
        }
    }
}

/// The newest intact generation of a lane, and what is wrong with the later ones.
pub(super) fn newest(
    store: &impl SnapshotStore,
    lane: &str,
) -> Result<(Option<Snapshot>, Vec<DamagedSnapshot>), StoreError> {
    let mut damaged = Vec::new();
    for generation in generations::heads(store, lane)?.into_keys().rev() {
        match generations::read(store, lane, generation)? {
            Ok(snapshot) => return Ok((Some(snapshot), damaged)),
            Err(error) => damaged.push(error),
        }
    }
    Ok((None, damaged))
}

/// The checkpoints of a lane, oldest first.
pub(super) fn checkpoints(store: &impl SnapshotStore, lane: &str) -> Result<Vec<Checkpoint>, StoreError> {
    let names = store.checkpoint_names()?;
    let parsed = names.iter().filter_map(|name| Checkpoint::parse(name));
    let mut checkpoints: Vec<Checkpoint> =
        parsed.filter(|(of, _)| *of == lane).map(|(_, checkpoint)| checkpoint).collect();
    checkpoints.sort();
    Ok(checkpoints)
}

/// Reads a checkpoint of a lane.
pub(super) fn read_checkpoint(
    store: &impl SnapshotStore,
    lane: &str,
    checkpoint: &Checkpoint,
) -> Result<Snapshot, StateError> {
    let damaged = |problem: String| DamagedSnapshot { generation: checkpoint.generation, problem };
    let bytes = store.read_checkpoint(&checkpoint.name(lane))?;
    let backup = Backup::open(&bytes).map_err(|error| damaged(error.to_string()))?;
    let found = backup.lanes.into_iter().find(|of| of.lane == lane && of.generation == checkpoint.generation);
    Ok(found.ok_or_else(|| damaged("the file is the checkpoint of another generation".to_owned()))?.into_snapshot())
}

impl Opened {
    /// Restores a snapshot with the configuration in it.
    pub fn new(snapshot: Snapshot) -> Result<Self, StateError> {
        let head = LaneHead::open(&snapshot.head)?;
        let settings: Settings = serde_json::from_str(&head.configuration)?;
        let engine = Engine::restore(settings.clone(), head.engine.clone(), snapshot.records)?;
        Ok(Self { generation: snapshot.generation, head, settings, engine })
    }
}

impl Checkpoint {
    /// File name.
    pub(super) fn name(&self, lane: &str) -> String {
        format!("{lane}-{}-{}.snapshot", self.generation, self.created_ms)
    }

    /// The lane and the checkpoint that a file name stands for.
    pub(super) fn parse(name: &str) -> Option<(&str, Self)> {
        let mut parts = name.strip_suffix(".snapshot")?.rsplitn(3, '-');
        let (created_ms, generation) = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
        Some((parts.next()?, Self { generation, created_ms }))
    }
}
