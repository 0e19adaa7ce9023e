//! What can be saved from a damaged store.

use std::collections::BTreeSet;
use std::fmt;

use super::lane_store::{checkpoints, newest, read_checkpoint};
use super::{Checkpoint, DamagedSnapshot, LaneStore, Retention, Snapshot, StateError, generations};
use crate::store::{Batch, SnapshotStore, StoreError};

/// What a repair does.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// Whether the database is replaced by a new one. The damaged files are renamed, not deleted.
    pub replaces_store: bool,
    /// What happens to each lane, by name.
    pub lanes: Vec<LanePlan>,
}

/// What a repair does to a lane.
#[derive(Debug, Clone, PartialEq)]
pub struct LanePlan {
    /// Name of the lane.
    pub lane: String,
    /// What it continues from.
    pub from: Source,
    /// Damaged generations that are given up.
    pub damaged: Vec<DamagedSnapshot>,
    /// The newest generation that was acknowledged, if the database lost it.
    pub lost: Option<u64>,
}

impl LanePlan {
    fn gives_up(&self) -> bool {
        !self.damaged.is_empty() || self.lost.is_some()
    }
}

/// What a lane continues from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// An intact generation in the database.
    Generation(u64),
    /// A checkpoint: no generation in the database is intact.
    Checkpoint(Checkpoint),
    /// Nothing: the lane is lost.
    Nothing,
}

impl Plan {
    /// Reads the whole store, without a change to it.
    pub fn new(store: &impl SnapshotStore) -> Result<Self, StoreError> {
        // A database that cannot be read at all leaves the checkpoints.
        let (lanes, is_readable) = match generations::lanes(store) {
            Ok(lanes) => (lanes, true),
            Err(StoreError::Damaged { .. }) => (Vec::new(), false),
            Err(error) => return Err(error),
        };
        let names = store.checkpoint_names()?;
        let of_checkpoints = names.iter().filter_map(|name| Some(Checkpoint::parse(name)?.0.to_owned()));
        let lanes: BTreeSet<String> = lanes.into_iter().chain(of_checkpoints).collect();
        let mut plans = Vec::new();
        let mut is_scannable = true;
        for lane in lanes {
            let (from, damaged) = match Self::source(store, &lane) {
                Err(StoreError::Damaged { .. }) => {
                    is_scannable = false;
                    (checkpoint_of(store, &lane)?, Vec::new())
                }
                found => found?,
            };
            let lost = match &from {
                Source::Generation(newest) => {
                    let is_lost =
                        |noted: &u64| noted > newest && damaged.iter().all(|damage| damage.generation < *noted);
                    store.newest_noted(&lane).filter(is_lost)
                }
                _ => None,
            };
            plans.push(LanePlan { lane, from, damaged, lost });
        }
        Ok(Self { replaces_store: store.is_damaged() || !is_readable || !is_scannable, lanes: plans })
    }

    fn source(store: &impl SnapshotStore, lane: &str) -> Result<(Source, Vec<DamagedSnapshot>), StoreError> {
        let mut damaged = Vec::new();
        let mut from = None;
        for generation in generations::heads(store, lane)?.into_keys().rev() {
            match generations::read(store, lane, generation)? {
                Ok(_) => from = from.or(Some(Source::Generation(generation))),
                Err(error) => damaged.push(error),
            }
        }
        let from = match from {
            Some(from) => from,
            None => checkpoint_of(store, lane)?,
        };
        Ok((from, damaged))
    }

    /// Whether there is nothing to do.
    pub fn is_empty(&self) -> bool {
        let is_intact = |plan: &LanePlan| matches!(plan.from, Source::Generation(_)) && !plan.gives_up();
        !self.replaces_store && self.lanes.iter().all(is_intact)
    }

    /// Carries the plan out. Fails without a change if nothing can be saved.
    pub fn carry_out<S: SnapshotStore>(self, mut store: S) -> Result<S, StateError> {
        let mut saved = Vec::new();
        for LanePlan { lane, from, damaged, .. } in self.lanes {
            let snapshot = match &from {
                Source::Nothing => None,
                Source::Generation(_) => newest(&store, &lane)?.0,
                Source::Checkpoint(checkpoint) => Some(read_checkpoint(&store, &lane, checkpoint)?),
            };
            saved.push((lane, from, damaged, snapshot));
        }
        if saved.iter().all(|(.., snapshot)| snapshot.is_none()) && self.replaces_store {
            let problem = "neither the database nor a checkpoint holds an intact snapshot".to_owned();
            return Err(StoreError::Damaged { path: store.place(), problem }.into());
        }
        if self.replaces_store {
            store.start_over()?;
        }
        for (lane, from, damaged, snapshot) in saved {
            let is_in_place = matches!(from, Source::Generation(_)) && !self.replaces_store;
            if is_in_place {
                store.apply(without(&store, &lane, &damaged)?)?;
                // What was given up is no longer missing.
                let newest = generations::heads(&store, &lane)?.into_keys().next_back().unwrap_or(0);
                store.note_newest(&lane, newest)?;
            } else if let Some(Snapshot { generation, head, records }) = snapshot {
                let batch = generations::rewind(&store, &lane, 0)?;
                store.apply(batch)?;
                let changes: Vec<_> = records.into_iter().map(|(key, value)| (key, Some(value))).collect();
                let mut lane = LaneStore::new(store, &lane, Retention::ALL);
                lane.start_after(generation);
                lane.commit(&head, &changes)?;
                store = lane.into_store();
            }
        }
        Ok(store)
    }
}

impl fmt::Display for LanePlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "lane {}: ", self.lane)?;
        match &self.from {
            Source::Generation(generation) => write!(f, "continue from generation {generation}")?,
            Source::Checkpoint(Checkpoint { generation, .. }) => {
                write!(f, "no generation is intact; restore the checkpoint of generation {generation}")?;
            }
            Source::Nothing => write!(f, "neither a generation nor a checkpoint is intact; give the lane up")?,
        }
        if let Some(lost) = self.lost {
            write!(f, "; generation {lost} is missing")?;
        }
        self.damaged
            .iter()
            .try_for_each(|damage| write!(f, "; delete generation {} ({})", damage.generation, damage.problem))
    }
}

/// The batch that deletes damaged generations.
fn without(store: &impl SnapshotStore, lane: &str, damaged: &[DamagedSnapshot]) -> Result<Batch, StoreError> {
    let heads = generations::heads(store, lane)?;
    let is_damaged = |generation: &u64| damaged.iter().any(|damage| damage.generation == *generation);
    let newest = heads.keys().rev().find(|generation| !is_damaged(generation)).copied().unwrap_or(0);
    let mut batch = generations::rewind(store, lane, newest)?;
    // Older ones lose their heads only: later generations may need their records, and the next commit prunes the rest.
    for generation in heads.keys().filter(|generation| **generation < newest && is_damaged(generation)) {
        batch.deletes.append(&mut generations::head_keys(store, lane, *generation)?);
    }
    Ok(batch)
}

/// The newest intact checkpoint of a lane.
fn checkpoint_of(store: &impl SnapshotStore, lane: &str) -> Result<Source, StoreError> {
    let intact = |checkpoint: &Checkpoint| read_checkpoint(store, lane, checkpoint).is_ok();
    let newest = checkpoints(store, lane)?.into_iter().rev().find(intact);
    Ok(newest.map_or(Source::Nothing, Source::Checkpoint))
}
