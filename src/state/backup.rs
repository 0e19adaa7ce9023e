//! Complete copies of generations, as one file: a backup holds the newest generation of every lane, a checkpoint one generation
//! of one lane.

use super::{LaneStore, Opened, Retention, Snapshot, StateError, generations};
use crate::snapshot::{LaneHead, next_epoch};
use crate::store::SnapshotStore;
pub use crate::wire::records::backup::{Backup, LaneBackup};

impl LaneBackup {
    pub(super) fn new(lane: &str, snapshot: Snapshot) -> Self {
        let Snapshot { generation, head, records } = snapshot;
        Self { lane: lane.to_owned(), generation, head, records }
    }

    pub(super) fn into_snapshot(self) -> Snapshot {
        Snapshot { generation: self.generation, head: self.head, records: self.records }
    }
}

impl Backup {
    /// The newest intact generation of every lane.
    pub fn of(store: &impl SnapshotStore) -> Result<Self, StateError> {
        let mut lanes = Vec::new();
        for lane in generations::lanes(store)? {
            let (snapshot, damaged) = super::lane_store::newest(store, &lane)?;
            match (snapshot, damaged.into_iter().next()) {
                (Some(snapshot), _) => lanes.push(LaneBackup::new(&lane, snapshot)),
                (None, Some(damage)) => return Err(damage.into()),
                (None, None) => {}
            }
        }
        if lanes.is_empty() { Err(StateError::Empty(store.place())) } else { Ok(Self { lanes }) }
    }

    /// Writes the lanes to an empty store, each in a new epoch: routers and the snapshots topic may hold a later state.
    pub fn restore_into<S: SnapshotStore>(self, mut store: S) -> Result<(), StateError> {
        if !generations::lanes(&store)?.is_empty() {
            return Err(StateError::NotEmpty(store.place()));
        }
        // A backup that cannot be used must not become a store.
        self.lanes.iter().try_for_each(|lane| Opened::new(lane.clone().into_snapshot()).map(drop))?;
        for LaneBackup { lane, generation, head, records } in self.lanes {
            let mut head = LaneHead::open(&head)?;
            head.epoch = next_epoch(head.epoch);
            let changes: Vec<_> = records.into_iter().map(|(key, value)| (key, Some(value))).collect();
            let mut lane = LaneStore::new(store, &lane, Retention::ALL);
            // Generations keep counting from the backup, so that a number means one state.
            lane.start_after(generation);
            lane.commit(&head.seal(), &changes)?;
            store = lane.into_store();
        }
        Ok(())
    }
}
